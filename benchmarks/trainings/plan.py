"""Which trainings there are, and which rule is right for each fault."""

from itertools import product

from benchmarks.trainings.data import DATA
from benchmarks.trainings.training import Training

ARCHITECTURES, RATES, SEEDS = ("gpt2", "llama"), (1e-3, 2e-3, 4e-3), range(5)

SOUND = [
    Training(architecture, data, rate, seed)
    for seed in SEEDS
    for architecture, data, rate in product(ARCHITECTURES, DATA, RATES)
]

FAULTS: dict[str, tuple[str, ...]] = {
    "rate too high": ("score_growth", "entropy_collapse"),
    "large heads": ("score_growth", "entropy_collapse"),
    "bf16 state": ("lost_updates",),
    "documents see each other": ("document_leak",),
    "bad shard": ("data_change", "induction_loss"),
    "tied head broken": ("tied_head",),
    "dead head": ("head_death",),
    "frozen layer": ("frozen_layer",),
}
"""The rules that name a fault rightly. Where there are two, the fault shows in either way."""

BEGINNINGS = {
    "bad shard": (100, 110, 120, 130, 140),
    "tied head broken": (0, 40, 80, 120, 160),
    "dead head": (0, 40, 80, 120, 160),
    "frozen layer": (0, 40, 80, 120, 160),
}
"""When faults begin; the others are there from the start."""


def faulty() -> list[Training]:
    """Five trainings with each fault."""
    trainings: list[Training] = []
    for fault in FAULTS:
        for number in range(5):
            architecture = ARCHITECTURES[number % 2]
            # Only one data set has documents. In the other, blocks of a shard do not come again.
            data = "phrases" if fault == "documents see each other" or number > 2 else "repeats"
            rate = RATES[1 + number % 2]
            if fault == "rate too high":
                rate = (0.03, 0.05, 0.1, 0.2, 0.05)[number]
            if fault == "large heads":
                rate = 0.01
            begins = BEGINNINGS.get(fault, (0,) * 5)[number]
            trainings.append(Training(architecture, data, rate, 100 + number, fault, begins))
    return trainings


TRAININGS = [*SOUND, *faulty()]
