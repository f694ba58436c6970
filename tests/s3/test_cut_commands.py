"""Commands of a store whose answers are cut: what they say is right, or an error of the store.

A scan is a process of its own.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headcount.jobs import phases
from headcount.jobs.run.loop import missing_shards
from headcount.schemas.errors import RunError, StoreError
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.object_stores import matching
from headcount.schemas.places import StorePath, names, place, sizes, write_whole
from headcount.workers.inputs.store.stored_corpora import remove_corpus
from tests.s3.s3_server import Rule, S3Server
from tests.tools.committed_rows import compare, rows_of
from tests.tools.processes import Command, Ended
from tests.toys.commands import ended
from tests.toys.object_stores import copied_to_store, object_store
from tests.toys.refusals import refused
from tests.toys.runs_here import begun, run_here

SHARDS = 5

HEAD = 420
"""Bytes of the longest answer without a body, and more."""

MAIN = "headcount.command_line.main"

TOY = "tests.toys.toy_replica.main"
"""`headcount` with a replica that computes nothing."""

SCAN = """\
model = "bundled:gpt2-mini"
n_ctx = 8
sequences = 10
sequences_per_shard = 2
statistics = ["sink_mass"]
out = "{}"

[input]
family = "text"
packing = "concat"
files = "s3://bucket/texts/*.txt"
"""

ERROR_OF_STORE = re.compile(
    r"error: .*(no whole answer to \d+ requests|cannot be (read|written|deleted)|Connection)"
)


@pytest.fixture(scope="module")
def store() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, object_store(patch) as server:
        for number, text in enumerate(("A text of some tokens. ", "Another text. ")):
            write_whole(place(f"s3://bucket/texts/{number}.txt"), (text * 9).encode())
        yield server


@pytest.fixture(autouse=True)
def _no_rules(store: S3Server) -> Iterator[None]:
    yield
    store.clear()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A complete run on a disk."""
    fields: dict[str, Any] = {"model": "bundled:attn-only-2l-mini", "n_ctx": 8}
    fields |= {"sequences": SHARDS, "sequences_per_shard": 1, "statistics": ["sink_mass"]}
    fields |= {"input": {"family": "uniform_random"}, "out": str(tmp_path_factory.mktemp("runs"))}
    plan = begun(fields)
    run_here(plan)
    return plan.run


def some_cut(share: float, seed: int, path: str = "", method: str | None = None) -> Rule:
    return Rule({"cut_within": HEAD}, path, method, count=None, probability=share, seed=seed)


def command(folder: Path, *words: object, main: str = MAIN) -> Ended:
    texts = [str(word) for word in words]
    return Command(*texts, environment=os.environ, directory=folder, main=main).ended()


def until_done(store: S3Server, folder: Path, *words: object, seed: int, main: str = MAIN) -> int:
    """Run a command again and again while answers are cut; returns how often it failed."""
    for attempt in range(12):
        store.set_rules(some_cut(0.25, seed * 100 + attempt))
        done = command(folder, *words, main=main)
        store.set_rules()
        if done.code == 0:
            return attempt
        assert ERROR_OF_STORE.search(done.stderr), done
        assert "Traceback" not in done.stderr
    raise AssertionError("never done")


def run_in(out: str) -> StorePath:
    """The one run in a directory of the store."""
    directory = place(out)
    (name,) = (name for name in names(directory) if name.startswith("run_id="))
    run = directory / name
    assert isinstance(run, StorePath)
    return run


def test_a_run_in_this_process_is_whole_although_answers_are_cut(
    store: S3Server, calm: RunDirectory
):
    scan: dict[str, Any] = calm.manifest().identity["scan"]
    fields = {"model": "bundled:attn-only-2l-mini", "n_ctx": 8, "sequences": SHARDS}
    fields |= {"sequences_per_shard": 1, "statistics": ["sink_mass"], "input": scan["input"]}
    plan = begun({**fields, "out": "s3://bucket/here"})
    errors: list[str] = []
    for attempt in range(12):
        store.set_rules(some_cut(0.25, attempt))
        try:
            run_here(plan)
            break
        except RunError as error:
            errors.append(f"error: {error}")
    store.set_rules()
    assert all(map(ERROR_OF_STORE.search, errors)), errors
    assert compare(rows_of(plan.run.path), rows_of(calm.path)) == (0, 0, 0)
    assert missing_shards(plan).tolist() == []


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_a_scan_of_texts_is_whole_although_answers_are_cut(
    store: S3Server, tmp_path: Path, seed: int
):
    (tmp_path / "calm.toml").write_text(SCAN.format("s3://bucket/calm"))
    (tmp_path / "cut.toml").write_text(SCAN.format(f"s3://bucket/cut-{seed}"))
    if not names(place("s3://bucket/calm")):
        done = command(tmp_path, "scan", "calm.toml", main=TOY)
        assert done.code == 0, done
    until_done(store, tmp_path, "scan", "cut.toml", main=TOY, seed=seed)
    run = run_in(f"s3://bucket/cut-{seed}")
    expected = rows_of(run_in("s3://bucket/calm"))
    assert compare(rows_of(run), expected) == (0, 0, 0)
    # What is damaged is measured anew by resume.
    (run / "commits" / "shard-000001.json").unlink()
    (run / "complete.json").unlink()
    until_done(store, tmp_path, "resume", run, main=TOY, seed=seed + 50)
    until_done(store, tmp_path, "compact", run, main=MAIN, seed=seed + 100)
    assert compare(rows_of(run), expected) == (0, 0, 0)
    check_answers(store, tmp_path, run, seed=seed + 200)
    until_done(store, tmp_path, "corpus", "list", f"{run.parent}/corpora", seed=seed)
    until_done(store, tmp_path, "rm", "--yes", run, main=MAIN, seed=seed + 150)
    assert run.name not in names(run.parent)


def check_answers(store: S3Server, folder: Path, run: StorePath, seed: int) -> None:
    """Ask for a complete run while answers are cut: what is said is true, or the store's error."""
    count = "SELECT count(*) AS n FROM heads"
    rows = sum(len(of_key) for key, of_key in rows_of(run).items() if key[0] == "heads")
    right = {
        ("status", str(run)): rf"shards +{SHARDS} of {SHARDS} done",
        ("check", str(run)): "as committed",
        ("list", str(run.parent)): rf"{SHARDS}/{SHARDS}",
        ("query", str(run), count): rf"\b{rows}\b",
    }
    for number, (words, answer) in enumerate(right.items()):
        for attempt in range(3):
            store.set_rules(some_cut(0.25, seed * 100 + number * 10 + attempt))
            asked = command(folder, *words)
            store.set_rules()
            if asked.code == 0:
                assert re.search(answer, asked.stdout + asked.stderr), asked
            else:
                assert ERROR_OF_STORE.search(asked.stderr), asked
                assert not re.search(r"damaged|delete|headcount rm|Traceback", asked.stderr), asked


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_upkeep_is_right_or_an_error_of_the_store(
    store: S3Server, calm: RunDirectory, tmp_path: Path, seed: int
):
    run = copied_to_store(calm, f"s3://bucket/upkeep-{seed}")
    expected = rows_of(run)
    right = {
        "status": r"shards +5 of 5 done",
        "check": r"5 shards, 10 files, .* as committed",
        "list": r"5/5",
        "query": r"\b80\b",
    }
    for number, (name, answer) in enumerate(right.items()):
        store.set_rules(some_cut(0.25, seed * 100 + number))
        sql = ["SELECT count(*) AS n FROM heads"] if name == "query" else []
        asked = ended(name, run.parent if name == "list" else run, *sql)
        told = asked.output
        if asked.code:
            assert ERROR_OF_STORE.search(told), told
            assert not re.search(r"damaged|delete|headcount rm", told), told
        else:
            assert re.search(answer, told), told
    for number in range(12):
        store.set_rules(some_cut(0.25, seed * 1000 + number))
        if ended("compact", run).code == 0:
            break
    store.set_rules()
    assert compare(rows_of(run), expected) == (0, 0, 0)
    assert len(RunDirectory(run).commit_log()) == SHARDS
    sql = "SELECT sum(count) AS n FROM rollups"
    words = ["query", str(run), sql, "--format", "csv"]
    whole = ended(*words).stdout
    store.set_rules(some_cut(0.25, seed, "/rollups/|segment-"))
    asked = ended(*words)
    assert ERROR_OF_STORE.search(asked.stderr) or asked.stdout == whole


def test_what_is_removed_is_gone_although_answers_are_cut(store: S3Server, calm: RunDirectory):
    for seed in range(2):
        run = copied_to_store(calm, "s3://bucket/removed")
        for attempt in range(12):
            store.set_rules(some_cut(0.25, seed * 100 + attempt))
            asked = ended("rm", "--yes", run)
            if asked.code == 0:
                break
            assert ERROR_OF_STORE.search(asked.stderr), asked.stderr
        store.set_rules()
        assert run.name not in names(run.parent)
    for at in range(0, HEAD, 60):
        folder = place("s3://bucket/removed/corpora/0123456789ab")
        assert isinstance(folder, StorePath)
        for number in range(3):
            write_whole(folder / f"{number}.parquet", b"1")
        store.set_rules(Rule({"cut_at": at}, "list-type=2", "GET", count=2))
        remove_corpus(folder)
        store.set_rules()
        assert names(folder) == [], at


def test_a_listing_that_lacks_what_is_there_takes_no_commit_back(
    store: S3Server, calm: RunDirectory
):
    run = RunDirectory(copied_to_store(calm, "s3://bucket/pages"))
    folder = run.path / "heads" / "intervention=none"
    assert isinstance(folder, StorePath)
    query = f"list-type=2&prefix=pages/{run.path.name}/heads"
    _, listing = store.request("GET", f"/bucket?{query}")
    assert len(names(folder)) == SHARDS
    # As of a second page of which nothing came.
    shorter = re.sub(r"<Contents>.*?</Contents>", "", listing.decode(), count=2, flags=re.DOTALL)
    store.set_rules(Rule({"body": shorter}, "list-type=2.*heads/", "GET", count=None))
    assert len(names(folder)) == SHARDS - 2
    commit_log = run.commit_log()
    told = refused(StoreError, run.damaged_files, commit_log)
    assert told == f"{folder}: cannot be read (the store does not list what lies in it)"
    store.set_rules()
    (path,) = {name for name, _ in sizes(folder) if "shard-000003" in name}
    (folder / path).unlink()
    (damage,) = run.damaged_files(commit_log)
    assert (damage.shards, damage.why) == ([3], "is gone")


def test_heartbeats_are_found_although_answers_are_cut(store: S3Server, calm: RunDirectory):
    run = RunDirectory(copied_to_store(calm, "s3://bucket/beats"))
    driver = phases.Driver(host="a", process=1, phase="measuring", since=0.0, at=1.0)
    file = run.path.parent / ".drivers" / run.run_id / "a-1.json"
    write_whole(file, driver.model_dump_json().encode())
    (known,) = phases.drivers_of(run)
    # The store's own answer has its time in these bytes.
    places = [(at, ".drivers", method) for at in range(5, HEAD, 37) for method in ("GET", "HEAD")]
    for at, path, method in [*places, *((at, "^/$", "HEAD") for at in range(38, 70, 2))]:
        store.set_rules(Rule({"cut_at": at}, path, method, count=1))
        (heard,) = phases.drivers_of(run)
        assert (heard.host, heard.phase) == ("a", "measuring")
        assert abs(heard.at - known.at) < 5, (at, path)


def test_objects_are_found_by_a_pattern_although_a_listing_is_cut(store: S3Server):
    pattern = place("s3://bucket/texts/*.txt")
    assert isinstance(pattern, StorePath)
    for at in range(0, HEAD, 37):
        store.set_rules(Rule({"cut_at": at}, "list-type=2", "GET", count=2))
        assert [file.name for file, _ in matching(pattern)] == ["0.txt", "1.txt"], at
    store.set_rules(Rule({"cut_at": 100}, "list-type=2.*texts", "GET", count=None))
    with pytest.raises(OSError, match="no whole answer to 6 requests"):
        matching(pattern)
    store.set_rules()
    assert matching(StorePath("s3://bucket/nothing/*.txt")) == []


@pytest.mark.long
def test_an_iceberg_table_counts_what_lies_there_although_answers_are_cut(
    store: S3Server, calm: RunDirectory, tmp_path: Path
):
    pytest.importorskip("pyiceberg")
    run = copied_to_store(calm, "s3://bucket/tables")
    for seed in range(3):
        store.set_rules(some_cut(0.4, seed, "/heads/.*parquet"))
        words = ["export", "iceberg", str(run), "-o", str(tmp_path / f"table-{seed}")]
        asked = ended(*words)
        assert sum(store.spent()) > 5
        assert "80 rows of heads" in asked.output or ERROR_OF_STORE.search(asked.stderr)
