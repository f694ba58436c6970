"""A large run is merged when its last shard is done. Nothing that happens then can harm it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headcount.jobs.run.lock import locked
from headcount.jobs.upkeep import finished_runs
from headcount.jobs.upkeep.finished_runs import merge_finished
from headcount.jobs.upkeep.merged_files import merged_here
from headcount.queries.open.connection import connect
from headcount.schemas.files.run_directory import RunDirectory
from tests.toys.toy_runs import write_run

SEQUENCES, HEADS = 12, 6


@pytest.fixture(autouse=True)
def small_runs_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished_runs, "LARGE_ROWS", SEQUENCES * HEADS)


def toy_run(tmp_path: Path, commit: list[int] | None = None) -> RunDirectory:
    entropy = {"entropy": lambda row: float(row.sequence)}
    return write_run(tmp_path, "a-1", entropy, sequences=SEQUENCES, per_shard=4, commit=commit)


def merge(run: RunDirectory) -> list[str]:
    """What is said of a run that is merged if it is finished."""
    lines: list[str] = []
    merge_finished(run, merged_here, lines.append)
    return lines


def rows_in_roll_ups(run: RunDirectory) -> int | None:
    sql = "SELECT sum(count) FROM rollups WHERE NOT by_subset"
    return connect(run.path, lazily=True).execute(sql).fetchall()[0][0]


def test_a_complete_run_is_merged_once(tmp_path: Path):
    run = toy_run(tmp_path)
    assert merge(run) == ["a-1: group 1 of 1 merged"]
    assert rows_in_roll_ups(run) == SEQUENCES * HEADS
    assert merge(run) == []


def test_an_incomplete_or_small_run_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert merge(toy_run(tmp_path / "incomplete", commit=[0, 1])) == []
    monkeypatch.setattr(finished_runs, "LARGE_ROWS", SEQUENCES * HEADS + 1)
    assert merge(toy_run(tmp_path / "small")) == []


def test_a_run_that_somebody_holds_and_a_damaged_shard_are_left_and_said(tmp_path: Path):
    run = toy_run(tmp_path)
    with locked(run):
        (line,) = merge(run)
    assert line.startswith("warning: a-1 is complete, but not all of it is merged: ")
    assert line.endswith(f"headcount compact {run.path} tries again")
    file = min(tmp_path.rglob("heads/*/*.parquet"))
    content = file.read_bytes()
    file.write_bytes(content[:4] + bytes(9) + content[13:])
    lines = merge(run)
    assert [line for line in lines if line.startswith("warning: ")] == [lines[-1]]
    assert rows_in_roll_ups(run) == (SEQUENCES - 4) * HEADS
