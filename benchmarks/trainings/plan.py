"""Which trainings there are: those that the rules were made with, and those that judge them."""

from itertools import product

from benchmarks.trainings.training import Training

ARCHITECTURES, RATES = ("gpt2", "llama"), (1e-3, 2e-3, 4e-3)

SOUND = [
    Training(architecture, data, rate, seed)
    for seed in range(5)
    for architecture, data, rate in product(ARCHITECTURES, ("repeats", "phrases"), RATES)
]

NARROW = [
    Training(architecture, data, rate, 50 + number, narrow=True)
    for number, (architecture, data, rate) in enumerate(
        product(ARCHITECTURES, ("repeats", "phrases"), RATES)
    )
]
"""Sound trainings in bfloat16, as mixed precision does it."""

CALIBRATING = [*SOUND[::2], *NARROW]
"""The half of the sound ones has every architecture, data set and rate."""

BEGINNINGS = {
    "bad shard": (100, 110, 120, 130, 140),
    "tied head broken": (0, 40, 80, 120, 160),
    "dead head": (0, 40, 80, 120, 160),
    "frozen layer": (0, 40, 80, 120, 160),
}
"""When faults begin; the others are there from the start."""

HIGH = {
    "rate too high": (0.03, 0.05, 0.1, 0.2, 0.05),
    "large heads": (0.01,) * 5,
    "no warmup": (0.02,) * 5,
}
"""The rates of faults that are about it."""

MADE_FOR = (
    "rate too high", "large heads", "bf16 state", "documents see each other", "bad shard",
    "tied head broken", "dead head", "frozen layer",
)  # fmt: skip
"""The faults that the rules were made for."""


def faulty() -> list[Training]:
    """Five trainings with each fault that the rules were made for."""
    trainings: list[Training] = []
    for fault, number in product(MADE_FOR, range(5)):
        # Only one data set has documents. In the other, blocks of a shard do not come again.
        data = "phrases" if fault == "documents see each other" or number > 2 else "repeats"
        rate = HIGH.get(fault, RATES[1:] * 3)[number]
        begins = BEGINNINGS.get(fault, (0,) * 5)[number]
        architecture = ARCHITECTURES[number % 2]
        trainings.append(Training(architecture, data, rate, 100 + number, fault, begins))
    return trainings


# The trainings that judge: recorded after the rules were settled, and none of them calibrates.

OTHER_ARCHITECTURES = ("gpt_neox", "qwen3")
OTHER_DATA = ("words", "phrases", "repeats")
OTHER_RATES = (5e-4, 1.5e-3, 3e-3, 6e-3)

FRESH_SOUND = [
    Training(architecture, data, rate, 1000 + number)
    for number, (architecture, data, rate) in enumerate(
        product(OTHER_ARCHITECTURES, OTHER_DATA, OTHER_RATES)
    )
]

FRESH_BEGINNINGS = {
    "rate too high": (0, 0),
    "large heads": (0, 0),
    "bf16 state": (0, 0),
    "documents see each other": (0, 55),
    "bad shard": (60, 97),
    "tied head broken": (33, 121),
    "dead head": (33, 121),
    "frozen layer": (33, 121),
    "labels shifted": (60, 95),
    "mask lost": (0, 95),
    "norms decayed": (0, 40),
    "gradient doubled": (0, 40),
    "no warmup": (0, 0),
    "momentum lost": (0, 95),
    "state lost": (40, 95),
    "earlier checkpoint": (75, 100),
    "scale lost": (40, 95),
    "gradient lost": (0, 95),
    "loader stuck": (60, 95),
    "rate raised": (40, 95),
}
"""When each fault begins, of two trainings with it."""

ONLY_IN = {"tied head broken": "qwen3", "large heads": "gpt_neox"}
"""Faults that only one architecture can have: GPT-NeoX ties no head, Qwen3 normalises scores."""


def fresh_faulty() -> list[Training]:
    """Two trainings with each fault, known or new."""
    trainings: list[Training] = []
    for place, (fault, beginnings) in enumerate(FRESH_BEGINNINGS.items()):
        for number, begins in enumerate(beginnings):
            # Each fault meets two data sets, and both architectures.
            architecture = ONLY_IN.get(fault, OTHER_ARCHITECTURES[(place + number) % 2])
            data = OTHER_DATA[(place + number) % 3]
            if fault == "documents see each other":
                data = "phrases"
            rate = HIGH.get(fault, OTHER_RATES[1:3])[number]
            seed = 2000 + 10 * place + number
            trainings.append(Training(architecture, data, rate, seed, fault, begins))
    return trainings


# Those that judge what was changed after the fresh ones, and rules that came later.

LATER_ARCHITECTURES = ("mistral", "phi")
LATER_RATES = (8e-4, 2e-3, 4e-3, 6e-3)

LATER_SOUND = [
    Training(architecture, data, rate, 3000 + number)
    for number, (architecture, data, rate) in enumerate(
        product(LATER_ARCHITECTURES, OTHER_DATA, LATER_RATES)
    )
]

LATER_BEGINNINGS = {
    "rate too high": 0,
    "large heads": 0,
    "bf16 state": 0,
    "documents see each other": 45,
    "bad shard": 81,
    "tied head broken": 57,
    "dead head": 75,
    "frozen layer": 113,
    "gradient lost": 62,
    "loader stuck": 73,
    "mask lost": 88,
    "labels shifted": 52,
    "scale lost": 68,
    "window narrowed": 64,
    "labels of another sequence": 71,
    "heads tied": 90,
    "embedding frozen": 85,
    "decay of all": 60,
    "gradient reversed": 95,
    "tokens blanked": 55,
    "updates lost": 65,
    "answers leaked": 58,
    "layer reset": 100,
    "positions held": 80,
}
"""When each fault begins, of one training in each architecture."""


def later_faulty() -> list[Training]:
    """A training of each architecture with each fault, known or new."""
    trainings: list[Training] = []
    for place, (fault, begins) in enumerate(LATER_BEGINNINGS.items()):
        for number, other in enumerate(LATER_ARCHITECTURES):
            # Phi ties no head.
            architecture = "mistral" if fault == "tied head broken" else other
            data = OTHER_DATA[(place + number) % 3]
            if fault == "documents see each other":
                data = "phrases"
            rate = HIGH.get(fault, LATER_RATES[1:3])[number]
            seed = 4000 + 10 * place + number
            trainings.append(Training(architecture, data, rate, seed, fault, begins))
    return trainings


FIRST = [*SOUND, *NARROW, *faulty()]
FRESH = [*FRESH_SOUND, *fresh_faulty()]
LATER = [*LATER_SOUND, *later_faulty()]
