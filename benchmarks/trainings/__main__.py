"""What alarms find in tiny trainings: `python -m benchmarks.trainings record|calibrate|judge DIR`.

`record` runs sound trainings and some with planted faults, each some seconds on one core, and
keeps what was measured in DIR. `calibrate` writes the thresholds of the rules from half of the
first sound ones. `judge` says what the rules find in all others, the first ones and the fresh ones:
the tables of docs/guide/training.md.
"""

import argparse
import pickle
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils import logging

from benchmarks.trainings.faults import plant
from benchmarks.trainings.judge import calibrate, judged, table
from benchmarks.trainings.plan import FIRST, FRESH, LATER
from benchmarks.trainings.training import Recording, Training, run
from headcount.workers.process import prepare_process


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, calibrate or judge."""
    prepare_process()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("record", "calibrate", "judge"))
    parser.add_argument("directory", type=Path, nargs="?", default=Path("trainings"),
                        help="where the recordings lie")  # fmt: skip
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.what == "record":
        record(options.directory)
    elif options.what == "calibrate":
        calibrate(read(options.directory, FIRST))
    else:
        for title, trainings in (("First", FIRST), ("Fresh", FRESH), ("Later", LATER)):
            recordings = read(options.directory, trainings)
            print(f"{title}\n\n{table(judged(recordings))}\n")


def record(directory: Path) -> None:
    """Run the trainings that the directory does not have, the latest ones first."""
    logging.set_verbosity_error()
    directory.mkdir(parents=True, exist_ok=True)
    trainings = [*LATER, *FRESH, *FIRST]
    for number, training in enumerate(trainings):
        file = directory / f"{training.key}.pickle"
        if file.exists():
            continue
        recording = run(training, plant)
        file.write_bytes(pickle.dumps(recording))
        place = f"{number + 1} of {len(trainings)}"
        print(f"{place}  {recording.seconds:4.1f} s  {training.name}", flush=True)


def read(directory: Path, trainings: Sequence[Training]) -> list[Recording]:
    """The recordings of some trainings, in their order."""
    files = [directory / f"{training.key}.pickle" for training in trainings]
    return [pickle.loads(file.read_bytes()) for file in files if file.exists()]


if __name__ == "__main__":
    main()
