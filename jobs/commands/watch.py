"""What `headcount watch DIRECTORY` does: find the measured steps of a training, and ring."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console

from headcount.jobs.api import run_scan
from headcount.jobs.bars import bar
from headcount.schemas.errors import RunError, counted
from headcount.schemas.files.run_directory import RunDirectory, find_runs
from headcount.schemas.filled_tables import HEADS
from headcount.schemas.places import Place, absolute, names, unread
from headcount.schemas.scans.scan_file import read_fields
from headcount.schemas.scans.training_step import training_step
from headcount.schemas.watch.alarms import Alarm
from headcount.schemas.watch.history import MeasuredStep, measured_step, read_table, step_files
from headcount.schemas.watch.rules import WATCHED
from headcount.workers.model.info.model_files import CONFIG
from headcount.workers.model.info.weight_norms import facts_of_files

PERIOD = 32  # tokens that are repeated where no scan names an input

DEFAULT_SCAN: Mapping[str, Any] = {
    "n_ctx": 2 * PERIOD,
    "sequences": 16,
    "bos": False,
    "input": {"family": "repeated_random", "period": PERIOD},
}
"""Needs neither a text nor a tokenizer, and heads can copy in it."""


def measured_steps(directory: str, scan: Path | None, runs: str) -> list[MeasuredStep]:
    """The measured steps of a training, in a directory of any of the three kinds.

    Files that a callback wrote are read. Checkpoints are measured as a scan of a series measures
    them, those that are new. Of runs, those whose model has a step are read.
    """
    where = absolute(directory)
    try:
        files, listed = step_files(where), names(where)
    except OSError as error:
        raise unread(where, error) from None
    if files:
        return [measured_step(step, read_table(file)) for step, file in files.items()]
    checkpoints = _checkpoints(where)
    if checkpoints:
        return _of_checkpoints(checkpoints, _fields(scan), f"{where.name}-watch", runs)
    if "manifest.json" in listed or any(name.startswith("run_id=") for name in listed):
        return _of_runs(where)
    raise _nothing(where)


def _nothing(where: Place) -> RunError:
    is_there = not isinstance(where, Path) or where.is_dir()
    found = "found none of them" if is_there else "there is no such directory"
    return RunError(
        f"{where}: expected checkpoints such as checkpoint-500, runs of such, or files that "
        f"MeasureCallback(out=…) wrote, and {found}"
    )


def _checkpoints(where: Place) -> dict[int, Path]:
    """The models below a directory whose names have a step, by step."""
    if not isinstance(where, Path):
        return {}
    models = sorted(file.parent for file in where.glob(f"*/{CONFIG}"))
    steps = [(training_step(model.name, None), model) for model in models]
    return dict(sorted((step, model) for step, model in steps if step is not None))


def _fields(scan: Path | None) -> dict[str, Any]:
    """The scan of each checkpoint, without its model."""
    if scan is None:
        return {**DEFAULT_SCAN, "statistics": WATCHED}
    return {**read_fields(scan, ()), "statistics": WATCHED}


def _of_checkpoints(
    checkpoints: Mapping[int, Path], fields: Mapping[str, Any], name: str, runs: str
) -> list[MeasuredStep]:
    measured: list[MeasuredStep] = []
    with bar(Console(stderr=True, highlight=False), "checkpoints: ") as show:
        for number, (step, model) in enumerate(checkpoints.items()):
            show(f"{model.name}, {number + 1} of {len(checkpoints)}", number / len(checkpoints))
            # A run that is complete is only found again.
            where = run_scan(
                {**fields, "model": str(model), "out": runs}, {}, name=name, replicas=0, cores=0,
                device="auto", address=None, new=False, quiet=True,
            )  # fmt: skip
            rows = _rows_of(RunDirectory(where))
            measured.append(measured_step(step, facts_of_files(model).added_to(rows)))
    return measured


def _of_runs(where: Place) -> list[MeasuredStep]:
    runs: dict[int, RunDirectory] = {}
    for run in find_runs(where):
        model = run.manifest().identity["scan"]
        step = training_step(model["model"], model.get("revision"))
        if step is None:
            continue
        if step in runs:
            raise RunError(
                f"{where}: expected the runs of one series, got two of step {step}, "
                f"{runs[step].run_id} and {run.run_id}; put the runs of a series in a directory "
                "of their own"
            )
        runs[step] = run
    if not runs:
        raise _nothing(where)
    return [measured_step(step, _rows_of(run)) for step, run in runs.items()]


def _rows_of(run: RunDirectory) -> pa.Table:
    """The committed rows of a run, of the model as it is."""
    paths = {
        file.path: None
        for commit in run.commits()
        for file in commit.files
        if file.table == HEADS.name and file.intervention == "none"
    }
    if not paths:
        raise RunError(f"{run.path}: no committed rows of the model without an intervention")
    tables = [read_table(run.path / path) for path in paths]
    return pa.concat_tables(tables, promote_options="default")


def report(rang: Sequence[Alarm], measured: Sequence[MeasuredStep]) -> str:
    """How much rang in how many steps, then what, and below each what people did about it."""
    steps = sorted(each.step for each in measured)
    notices = sum(alarm.is_notice for alarm in rang)
    counts = f"{counted(len(rang) - notices, 'alarm')} and {counted(notices, 'notice')}"
    first = f"{counts} in {counted(len(steps), 'step')}, {steps[0]} to {steps[-1]}"
    return "\n".join([first, *("\n  ".join(alarm.lines) for alarm in rang)])


def as_json(rang: Sequence[Alarm], measured: Sequence[MeasuredStep]) -> str:
    """The same for programs."""
    steps = sorted(each.step for each in measured)
    return json.dumps({"steps": steps, "alarms": [asdict(alarm) for alarm in rang]}, indent=1)
