"""Answers of a store that are cut anywhere: what is read is right, or it is an error of the store.

pyarrow takes an answer that is cut inside its headers for an object without a byte, or for a
directory without a name.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from headcount.jobs.upkeep.checking import check_run
from headcount.schemas.errors import StoreError
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.places import StorePath, names
from tests.s3.s3_server import Rule, S3Server
from tests.toys.commands import ended, error_of, printed
from tests.toys.object_stores import copied_to_store, object_store
from tests.toys.refusals import refused
from tests.toys.runs_here import begun, run_here

SHARDS = 5
ROWS = 5 * 2 * 8
"""Of `heads`: sequences, layers and heads."""

SAMPLE = (20, 100, 200, 260, 320)
"""Bytes after which an answer is cut: inside the headers, behind them, and in the body."""

SWEEP = range(420)

SWEEP_OF_ROWS = range(0, 420, 11)
"""Fewer, because each takes a query and a check. Lines of headers have other lengths."""

READS = {
    "HEAD of commits": ("/commits/shard-", "HEAD"),
    "GET of commits": ("/commits/shard-", "GET"),
    "HEAD of the manifest": ("manifest.json", "HEAD"),
    "GET of the manifest": ("manifest.json", "GET"),
    "HEAD of rows": ("/heads/.*parquet", "HEAD"),
    "GET of rows": ("/heads/.*parquet", "GET"),
    "listings": ("list-type=2", "GET"),
    "listings of commits": ("list-type=2.*commits/", "GET"),
    "listings of rows": ("list-type=2.*heads/", "GET"),
}


@pytest.fixture(scope="module")
def store() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, object_store(patch) as server:
        yield server


@pytest.fixture(scope="module")
def run(store: S3Server, tmp_path_factory: pytest.TempPathFactory) -> StorePath:
    """A complete run in the store."""
    folder = tmp_path_factory.mktemp("runs")
    fields: dict[str, Any] = {"model": "bundled:attn-only-2l-mini", "n_ctx": 8}
    fields |= {"sequences": SHARDS, "sequences_per_shard": 1, "out": str(folder)}
    fields |= {"input": {"family": "uniform_random"}, "statistics": ["sink_mass"]}
    plan = begun(fields)
    run_here(plan)
    return copied_to_store(plan.run, "s3://bucket/runs")


@pytest.fixture(autouse=True)
def _no_rules(store: S3Server) -> Iterator[None]:
    yield
    store.clear()


def answer(run: StorePath) -> int:
    words = ("query", run, "SELECT count(*) AS n FROM heads", "--format", "csv")
    return int(printed(*words).split()[-1])


def cut(store: S3Server, where: str, at: int, count: int | None) -> None:
    path, method = READS[where]
    store.set_rules(Rule({"cut_at": at}, path, method, count=count))


def expected_rows(store: S3Server, run: StorePath) -> int:
    store.set_rules()
    return answer(run)


@pytest.mark.parametrize(
    "where",
    [
        "GET of commits",
        "HEAD of rows",
        *(
            pytest.param(where, marks=pytest.mark.long)
            for where in ("HEAD of commits", "GET of rows", "listings of commits")
        ),
    ],
)
def test_an_answer_that_is_cut_once_costs_no_row(store: S3Server, run: StorePath, where: str):
    whole = expected_rows(store, run)
    for at in (20, 200):
        cut(store, where, at, count=1)
        assert answer(run) == whole
        assert store.spent() == [1]


def test_what_is_always_cut_inside_its_headers_is_an_error_of_the_store(
    store: S3Server, run: StorePath
):
    for where in ("HEAD of commits", "HEAD of the manifest", "HEAD of rows", "listings of commits"):
        cut(store, where, 100, count=None)
        told = error_of("query", run, "SELECT count(*) FROM heads")
        assert "rm" not in told.split(), where
        assert "elete" not in told, where
        assert re.search(r"no whole answer to \d+ requests|cannot be read", told), told
    for where in ("HEAD of commits", "HEAD of rows", "listings of commits"):
        cut(store, where, 100, count=None)
        checked = ended("check", run)
        assert checked.code == 1, where
        assert "as committed" not in checked.stdout, where
        assert "damaged" not in checked.stdout, where


def test_a_store_that_lists_nothing_has_not_lost_a_commit(store: S3Server, run: StorePath):
    cut(store, "listings", 100, count=None)
    assert "does not list what lies in it" in refused(StoreError, RunDirectory(run).commit_log)


def test_an_answer_with_another_body_is_no_commit(store: S3Server, run: StorePath):
    whole = expected_rows(store, run)
    error = "<Error><Code>InternalError</Code></Error>"
    store.set_rules(Rule({"body": error}, "/commits/shard-", "GET", count=1))
    assert answer(run) == whole
    store.set_rules(Rule({"body": error}, "/commits/shard-", "GET", count=None))
    assert ended("query", run, "heads").code != 0
    assert ended("status", run).code != 0


def test_a_complete_run_that_misses_a_commit_is_not_answered(store: S3Server, run: StorePath):
    commit = run / "commits" / "shard-000003.json"
    content = commit.read_bytes()
    commit.unlink()
    try:
        told = error_of("query", run, "SELECT count(*) FROM heads")
        assert "was complete, and 1 commit of 5 cannot be found" in told
    finally:
        from headcount.schemas.places import write_whole

        write_whole(commit, content)


@pytest.mark.long
@pytest.mark.parametrize("where", READS)
def test_an_answer_that_is_cut_at_any_byte_costs_nothing(
    store: S3Server, run: StorePath, where: str
):
    directory = RunDirectory(run)
    whole = expected_rows(store, run)
    for at in SWEEP_OF_ROWS if where.endswith("rows") else SWEEP:
        cut(store, where, at, count=1)
        assert len(directory.commit_log()) == SHARDS
        if where.endswith("rows"):
            assert answer(run) == whole
            cut(store, where, at, count=1)
            assert check_run(directory).damaged == []
        assert sorted(names(run / "commits")) == [f"shard-{n:06d}.json" for n in range(SHARDS)]
