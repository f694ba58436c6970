"""Runs of which a directory is a link: they are read, and nothing writes to them."""

import os
import shutil
from pathlib import Path

import pytest

from headcount.schemas.files.run_directory import RunDirectory
from tests.tools.committed_rows import compare, rows_of
from tests.toys.commands import error_of, printed
from tests.toys.runs_here import begun, run_here
from tests.toys.toy_runs import local

DIRECTORIES = (
    "", "heads", "heads/intervention=none", "sequences", "sequences/intervention=none", "commits",
    "failures", "index",
)  # fmt: skip
"""Every directory of the layout that may be a link, from the run's own on."""

SCAN = """
model = "bundled:attn-only-2l-mini"
n_ctx = 8
sequences = 4
sequences_per_shard = 1
out = "runs"
statistics = ["sink_mass"]
input.family = "uniform_random"
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A complete run in `runs`, and beside it everything of another one in `other`."""
    monkeypatch.chdir(tmp_path)
    fields = {"model": "bundled:attn-only-2l-mini", "n_ctx": 8, "statistics": ["sink_mass"]}
    sizes = {"sequences": 4, "sequences_per_shard": 1, "out": "runs"}
    plan = begun({**fields, **sizes, "input": {"family": "uniform_random"}}, "linked")
    run_here(plan)
    Path("linked.toml").write_text(SCAN)
    for name in ("failures", "index"):
        (local(plan.run.path) / name).mkdir(exist_ok=True)
    shutil.copytree(local(plan.run.path), "other")
    return RunDirectory(Path(os.path.abspath(local(plan.run.path))))


def state_of(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.name != ".lock"
    }


@pytest.fixture(params=DIRECTORIES)
def linked(run: RunDirectory, request: pytest.FixtureRequest) -> Path:
    """A directory of the run that leads to the same one of the other."""
    directory = local(run.path) / request.param
    shutil.rmtree(directory)
    directory.symlink_to(Path("other", request.param).absolute())
    return directory


def test_a_linked_directory_is_read_and_whatever_writes_is_refused(run: RunDirectory, linked: Path):
    before = state_of(Path("other"))
    rows = rows_of(run.path)
    assert compare(rows, rows_of(Path("other").absolute())) == (0, 0, 0)
    name = linked.relative_to(Path.cwd())
    line = f"{name}: a link to {linked.resolve()}, and expected a directory of this run alone"
    for words in (
        ("compact", run.path),
        ("rm", run.path, "--yes"),
        ("resume", run.path, "--replicas", "0"),
        ("scan", "linked.toml", "--replicas", "0", "--set", "sequences=6"),
    ):
        assert line in error_of(*words), words
        assert state_of(Path("other")) == before
    assert linked.is_symlink()


def test_a_file_that_is_a_link_is_replaced_and_not_what_it_leads_to(run: RunDirectory):
    expected = rows_of(run.path)
    for file in local(run.path).rglob("*.parquet"):
        target = Path("other", file.relative_to(local(run.path))).absolute()
        file.unlink()
        file.symlink_to(target)
    before = state_of(Path("other"))
    printed("compact", run.path)
    assert not any(file.is_symlink() for file in local(run.path).rglob("*"))
    assert compare(rows_of(run.path), expected) == (0, 0, 0)
    printed("rm", run.path, "--yes")
    assert state_of(Path("other")) == before
