"""What the statistics that read labels cost over the standard ones: processor seconds, in pairs.

`python -m benchmarks.at_scale.label_cost`. Each round measures the same needles with and without
them, so that a slower minute of the machine meets both.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ways import make_gpt2_small
from headcount.schemas.scans.scan import parse_scan
from headcount.schemas.statistics import STATISTICS
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.model.info.description import describe, find_model
from headcount.workers.process import prepare_process
from headcount.workers.replica import Replica

NEED_LABELS = ["labelled_key_mass_gold_query", "retrieval_score"]
ROUNDS = 9


def scans(wide: Path) -> Iterator[dict[str, Any]]:
    """A model that is nearly all measuring, and one with layers of GPT-2 small's width."""
    fields = {"bos": True, "input": {"family": "needle"}}
    yield fields | {"model": "bundled:needle-mini", "n_ctx": 128, "sequences": 16}
    yield fields | {"model": str(wide), "n_ctx": 256, "sequences": 2}


def ratios(fields: dict[str, Any]) -> list[float]:
    """Seconds with the statistics that read labels over seconds without, of each round."""
    info = describe(find_model(fields["model"]))
    shard = Sequences(parse_scan(fields), info).shard(0)
    standard = [statistic.name for statistic in STATISTICS.select("standard")]
    replicas = [
        Replica(info, parse_scan(fields | {"statistics": names}))
        for names in (standard, standard + NEED_LABELS)
    ]

    def seconds_of(replica: Replica) -> float:
        start_time = time.process_time()
        replica.measure(shard.tokens, labels=shard.labels)
        return time.process_time() - start_time

    for replica in replicas:
        seconds_of(replica)  # The first pass is slower.
    answers: list[float] = []
    for _ in range(ROUNDS):
        without, with_labels = (seconds_of(replica) for replica in replicas)
        answers.append(with_labels / without)
    return answers


def main() -> None:
    """Print the median and the range of the ratios of each scan."""
    prepare_process()
    with tempfile.TemporaryDirectory() as directory:
        for fields in scans(make_gpt2_small(Path(directory) / "two-layers", n_layer=2)):
            pairs = ratios(fields)
            model = Path(fields["model"].removeprefix("bundled:")).name
            print(f"{model}: {np.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})")


if __name__ == "__main__":
    main()
