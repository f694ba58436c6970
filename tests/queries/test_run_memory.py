"""A look for news finds every commit and every damage, and reads again only what changed."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import headcount
from headcount.jobs.upkeep.compaction import compact
from headcount.queries.open import run_memory
from headcount.queries.open.run import Run, read_run
from headcount.queries.open.run_memory import RunMemory
from headcount.queries.open.verified_files import CLOCK_TICK_SECONDS
from headcount.schemas.files.commits import read_commit
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.places import Place, write_whole
from tests.toys.object_stores import copied_to_store, object_store
from tests.toys.toy_runs import data_file, local, write_run

TICK = 0.1
"""Seconds that a tick is taken to last here. Clocks of this machine tick in thousandths."""


class Looks(NamedTuple):
    """A run and what remembers it."""

    directory: RunDirectory
    memory: RunMemory

    def look(self) -> Run:
        """The run as it is returned, which must be what reading it now returns."""
        run = self.memory.read_run(self.directory, None)
        now = read_run(self.directory, None)
        assert run.commit_log.equals(now.commit_log)
        assert run.damaged == now.damaged
        assert run.manifest == now.manifest
        return run

    def settle(self) -> Run:
        """Look until the run is remembered for good."""
        self.look()
        time.sleep(self.memory.tick_seconds)
        run = self.look()
        assert self.look() is run
        return run


def toy_run(out: Path, **facts: Any) -> RunDirectory:
    """Four shards of two sequences."""
    cells = {"entropy": lambda row: float(row.sequence)}
    return write_run(out, "a-1", cells, sequences=8, layers=1, heads=1, **facts)


@pytest.fixture
def looks(tmp_path: Path) -> Looks:
    return Looks(toy_run(tmp_path), RunMemory(TICK))


def commit_anew(file: Place) -> None:
    """Write another commit over one, of the same size."""
    commit = read_commit(file, "a-1")
    assert commit is not None
    tokens = 9 - commit.tokens % 10 + commit.tokens // 10 * 10
    other = commit.model_copy(update={"tokens": tokens}).model_dump_json()
    assert len(other) == len(commit.model_dump_json())
    write_whole(file, other.encode())


def test_an_unchanged_run_is_read_twice_and_then_never(looks: Looks) -> None:
    first = looks.look()
    # Within a tick of the clock, something may have changed and look the same.
    assert looks.look() is not first
    run = looks.settle()
    for _ in range(3):
        assert looks.look() is run


def test_every_change_is_seen(looks: Looks, tmp_path: Path) -> None:
    directory = looks.directory
    heads = local(data_file(directory, "heads", "none", 1))
    content = heads.read_bytes()
    commit = local(directory.commit_file(3)).read_bytes()
    run = looks.settle()

    def changed() -> Run:
        nonlocal run
        before, run = run, looks.look()
        assert run is not before
        run = looks.settle()
        return run

    local(directory.commit_file(3)).unlink()
    assert len(changed().commit_log) == 3
    write_whole(directory.commit_file(3), commit)
    assert len(changed().commit_log) == 4
    heads.unlink()
    assert [damage.shards for damage in changed().damaged] == [[1]]
    write_whole(heads, content)
    assert changed().damaged == []
    compact(directory)
    assert {file.shards for commit in changed().directory.commits() for file in commit.files} == {4}
    manifest = local(directory.manifest_file)
    manifest.write_text(manifest.read_text().replace("2026-01-02", "2026-01-03"))
    assert changed().manifest.created.startswith("2026-01-03")


class CoarseStatus(NamedTuple):
    """What a file system says that keeps whole ticks, and whose inodes are used again."""

    st_size: int
    st_mtime_ns: int
    st_ctime_ns: int
    st_ino: int = 0


@pytest.fixture
def coarse_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let listings say of times what FAT says, whose ticks last two seconds, in shorter ticks."""
    exact = run_memory.stats

    def coarse(directory: Path) -> Iterator[tuple[str, CoarseStatus]]:
        tick = int(TICK * 1e9)
        for name, status in exact(directory):
            mtime, ctime = (t // tick * tick for t in (status.st_mtime_ns, status.st_ctime_ns))
            yield name, CoarseStatus(status.st_size, mtime, ctime)

    monkeypatch.setattr(run_memory, "stats", coarse)


@pytest.mark.usefixtures("coarse_clock")
def test_a_commit_in_the_same_tick_of_a_coarse_clock_is_seen(looks: Looks) -> None:
    file = looks.directory.commit_file(2)
    # Any phase of the tick, with looks between the commits.
    for pause in (0.0, 0.35, 0.95):
        for _ in range(3):
            commit_anew(file)
            looks.look()
        time.sleep(pause * TICK)
        looks.look()
    run = looks.settle()
    commit_anew(file)
    assert looks.look() is not run


def test_a_run_without_commits_is_seen_to_begin(tmp_path: Path) -> None:
    looks = Looks(toy_run(tmp_path, commit=[]), RunMemory(TICK))
    assert len(looks.settle().commit_log) == 0
    other = local(toy_run(tmp_path / "b").path)
    shutil.copytree(other, local(looks.directory.path), dirs_exist_ok=True)
    assert len(looks.look().commit_log) == 4
    assert looks.settle().damaged == []


@pytest.mark.long
def test_in_a_store_each_commit_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with object_store(monkeypatch) as server:
        directory = RunDirectory(copied_to_store(toy_run(tmp_path), "s3://bucket/runs"))
        looks = Looks(directory, RunMemory())
        file = directory.commit_file(2)
        for _ in range(4):
            commit_anew(file)
            looks.look()
        looks.settle()
        server.clear()
        looks.memory.read_run(directory, None)
        # The manifest, and listings of the commits, of `heads` and of `sequences`.
        assert len(server.requests()) == 4
        commit_anew(file)
        looks.look()


def test_refreshed_runs_are_opened_again_only_for_news(tmp_path: Path) -> None:
    directory = toy_run(tmp_path)
    commit = local(directory.commit_file(3))
    content = commit.read_bytes()
    commit.unlink()
    query = "SELECT shards_done FROM runs"
    with headcount.open(tmp_path) as runs:
        time.sleep(CLOCK_TICK_SECONDS)
        database = runs.refresh().database
        assert runs.refresh().database is database
        write_whole(commit, content)
        assert runs.refresh().sql(query).rows() == [(4,)]
        assert runs.database is not database
        toy = write_run(tmp_path, "b-1", {"entropy": lambda row: 1.0})
        assert len(runs.refresh().sql(query)) == 2
        os.unlink(local(data_file(toy, "heads", "none", 0)))
        with pytest.warns(UserWarning, match="is gone"):
            runs.refresh()
        assert sorted(runs.sql(query).rows()) == [(1,), (4,)]
