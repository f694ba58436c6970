"""What alarms find in tiny trainings: `python -m benchmarks.trainings record|calibrate|judge DIR`,
and what they cost: `python -m benchmarks.trainings price`.

`record` runs 60 sound trainings and 40 with planted faults, each some seconds on one core, and
keeps what was measured in DIR. `calibrate` writes the thresholds of the rules from half of the
sound ones. `judge` says what the rules find in all others: the table of docs/guide/training.md.
"""

import argparse
import pickle
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils import logging

from benchmarks.trainings.judge import calibrate, judged, table
from benchmarks.trainings.plan import TRAININGS
from benchmarks.trainings.price import price
from benchmarks.trainings.training import Recording, run
from headcount.workers.process import prepare_process


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, calibrate or judge."""
    prepare_process()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("record", "calibrate", "judge", "price"))
    parser.add_argument(
        "directory",
        type=Path,
        nargs="?",
        default=Path("trainings"),
        help="where the recordings lie",
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.what == "price":
        print(price())
        return
    if options.what == "record":
        record(options.directory)
        return
    recordings = read(options.directory)
    if options.what == "calibrate":
        calibrate(recordings)
    else:
        print(table(judged(recordings)))


def record(directory: Path) -> None:
    """Run the trainings that the directory does not have."""
    logging.set_verbosity_error()
    directory.mkdir(parents=True, exist_ok=True)
    for number, training in enumerate(TRAININGS):
        file = directory / f"{training.key}.pickle"
        if file.exists():
            continue
        recording = run(training)
        file.write_bytes(pickle.dumps(recording))
        print(
            f"{number + 1} of {len(TRAININGS)}  {recording.seconds:4.1f} s  {training.name}",
            flush=True,
        )


def read(directory: Path) -> list[Recording]:
    """The recordings of all trainings, in their order."""
    files = [directory / f"{training.key}.pickle" for training in TRAININGS]
    return [pickle.loads(file.read_bytes()) for file in files if file.exists()]


if __name__ == "__main__":
    main()
