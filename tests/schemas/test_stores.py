"""Runs and corpora in an object store give the same rows and answers as those on a disk, also if it
throttles or refuses.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from rich.console import Console

from headcount.jobs.cluster.ray_cluster import Resources
from headcount.jobs.commands.doctor import check_out
from headcount.jobs.plan.plan import Plan, make_plan
from headcount.jobs.run.commit_log import MOST_UNWRITTEN, CommitLog
from headcount.jobs.run.loop import missing_shards
from headcount.jobs.run.measuring import measure_in_process, run_to_end
from headcount.jobs.upkeep.checking import check_run
from headcount.jobs.upkeep.status import read_status
from headcount.queries.ask.answers import run_query
from headcount.queries.ask.asking import open_runs
from headcount.queries.open.stores import CommittedObject, _Store
from headcount.schemas.errors import CorpusError, QueryError, RunError
from headcount.schemas.files.commit import Commit, Failure
from headcount.schemas.files.commits import gather
from headcount.schemas.files.run_directory import find_runs, shard_file_name
from headcount.schemas.object_stores import filesystem_of, matching
from headcount.schemas.places import StorePath, names, place, write_whole
from headcount.workers.shard import run_shard
from tests.s3.s3_server import Rule, S3Server
from tests.tools.workers import joined_cluster
from tests.toys.commands import ended, error_of, printed
from tests.toys.object_stores import copied_to_store
from tests.toys.refusals import refused
from tests.toys.runs_here import begun
from tests.toys.toy_corpora import Row as TextRow
from tests.toys.toy_corpora import plain_bytes, write_jsonl
from tests.toys.toy_replica import ToyReplica
from tests.toys.toy_runs import Row, data_file, open_tables, write_run

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
TEXTS: list[TextRow] = [(f"{word} " * 30, "Greek") for word in WORDS]


@pytest.fixture(scope="module")
def store() -> Iterator[S3Server]:
    """A store that can falter, in the environment of this process."""
    before = dict(os.environ)
    with S3Server() as server:
        os.environ |= server.env()
        for number, half in enumerate((TEXTS[:3], TEXTS[3:])):
            file = place(f"s3://bucket/pile/part-{number}.jsonl.zst")
            write_whole(file, zstandard.compress(plain_bytes(half)))
        yield server
    os.environ.clear()
    os.environ |= before


@pytest.fixture(autouse=True)
def _no_rules(store: S3Server) -> None:
    store.clear()


def plan_of(out: str, files: str = "s3://bucket/pile/*.jsonl.zst", **changes: Any) -> Plan:
    fields: dict[str, Any] = {"model": "bundled:gpt2-mini", "n_ctx": 32, "sequences": 6}
    fields |= {"sequences_per_shard": 2, "out": out, "statistics": ["sink_mass", "entropy"]}
    # Their names are in the names of objects.
    fields |= {"interventions": ["none", "scale_query_bias(0.5)+zero_head(1,2)"]}
    fields |= {"input": {"family": "pile", "files": files}}
    return begun(fields | changes, "stored")


def measure(plan: Plan, shards: range = range(3)) -> None:
    replica = ToyReplica(plan.info, plan.scan, "cpu")
    for shard in shards:
        run_shard(replica, plan.run, plan.sequences.shard(shard))


ALL_ROWS = "SELECT intervention, sequence, layer, head, sink_mass, entropy FROM heads ORDER BY ALL"


def answer(plan: Plan, question: str = ALL_ROWS) -> list[tuple[Any, ...]]:
    return open_tables(plan.scan.out).rows(question)


@pytest.fixture(scope="module")
def measured_plan(store: S3Server) -> Plan:
    """A run whose corpus and rows are in the store."""
    plan = plan_of("s3://bucket/runs")
    measure(plan)
    return plan


def test_a_run_in_a_store_has_the_rows_of_one_on_a_disk(measured_plan: Plan, tmp_path: Path):
    texts = write_jsonl(tmp_path / "texts.jsonl", TEXTS)
    on_disk = plan_of(str(tmp_path / "runs"), str(texts))
    measure(on_disk)
    rows = answer(measured_plan)
    assert rows == answer(on_disk)
    assert len(rows) == 2 * 6 * measured_plan.info.n_layers * measured_plan.info.n_heads
    assert {row[0] for row in rows} == set(measured_plan.scan.record["interventions"])
    origin = "SELECT DISTINCT sequence, file, row, pile_set_name FROM sequences ORDER BY ALL"
    fourth = (3, "s3://bucket/pile/part-1.jsonl.zst", 0, "Greek")
    assert answer(measured_plan, origin)[3] == fourth
    # Planning again finds the run and its index.
    again = make_plan(measured_plan.scan, "stored")
    assert missing_shards(again).tolist() == []
    tokens = measured_plan.sequences.shard(1).tokens
    assert again.sequences.shard(1).tokens.tolist() == tokens.tolist()
    assert read_status(measured_plan.run).complete


def test_the_commit_is_written_last_and_each_file_is_one_put(measured_plan: Plan, store: S3Server):
    measured_plan.run.commit_file(0).unlink()
    store.clear()
    measure(measured_plan, range(1))
    written = [r.path for r in store.requests() if r.method in ("PUT", "POST")]
    assert len(written) == 2 * 2 + 1
    assert "/heads/" in written[0]
    assert "/commits/shard-000000.json" in written[-1]


def test_queries_reach_the_run_and_nothing_else_in_the_store(measured_plan: Plan):
    write_whole(place("s3://bucket/other/secret.parquet"), b"PAR1")
    database = open_runs(measured_plan.scan.out)
    inside = data_file(measured_plan.run, "heads", "none", 0)
    assert len(list(run_query(database, f"SELECT DISTINCT sequence FROM '{inside}'").rows())) == 2
    for outside in (
        "s3://bucket/other/secret.parquet",
        f"{measured_plan.run.path}/../../other/secret.parquet",
        f"{measured_plan.run.path}-2/x.parquet",
        "/etc/passwd",
    ):
        with pytest.raises(QueryError, match=r"(?i)permission|not allowed|disabled"):
            list(run_query(database, f"SELECT * FROM read_parquet('{outside}')").rows())


def test_a_run_in_a_store_is_gathered_asked_checked_mended_and_deleted(store: S3Server):
    plan, neighbour = (plan_of("s3://bucket/kept", seed=seed) for seed in (0, 1))
    measure(plan)
    rows = answer(plan)
    gather(plan.run.commits_directory, list(plan.run.commits())[:2])
    assert sorted(n[:5] for n in names(plan.run.commits_directory)) == ["segme", "shard"]
    # What is deleted between a listing and a read is in the next listing, or in what replaces it.
    store.set_rules(
        Rule({"status": 404}, "/segment-", "GET", count=2), Rule({"status": 404}, "/shard-", "GET")
    )
    assert answer(plan) == rows
    assert store.spent() == [2, 1]
    count = "SELECT count(*) AS n FROM sequences"
    assert printed("query", plan.run.path, count, "--format", "csv").split() == ["n", "12"]

    # Nothing is read for a question; everything is for a check.
    file = data_file(plan.run, "heads", "none", 1)
    whole = file.read_bytes()
    spoilt = whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]
    write_whole(file, spoilt)
    assert answer(plan, "SELECT shards_done FROM runs WHERE complete") == [(3,)]
    assert open_runs(plan.run.path).damage() == []
    (found,) = check_run(plan.run).damaged
    assert (found.shards, found.why) == ([1], "has other content than was committed")
    assert missing_shards(plan).tolist() == []
    write_whole(file, whole + b"PAR1")
    (line,) = open_runs(plan.run.path).damage()
    assert f"has {len(whole) + 4:,} bytes where {len(whole):,} were committed" in line
    assert read_status(plan.run).damaged == 1
    write_whole(file, spoilt)
    assert missing_shards(plan, verify=True).tolist() == [1]
    measure(plan, range(1, 2))
    assert check_run(plan.run).damaged == []

    assert ended("rm", plan.run.path, "--yes") == (0, "", f"deleted {plan.run.path}\n")
    assert matching(StorePath(f"{plan.run.path}/**/*")) == []
    assert [run.path for run in find_runs(place("s3://bucket/kept"))] == [neighbour.run.path]
    told = error_of("rm", plan.run.path, "--yes")
    assert told == f"{plan.run.path}: not there; expected the directory of a run"


def random_value(row: Row) -> float:
    return float(np.random.default_rng([row.sequence, row.layer, row.head]).random())


def write_to_store(folder: Path, out: str, sequences: int, per_shard: int) -> StorePath:
    """A run of random numbers in the store."""
    columns = {"sink_mass": random_value, "entropy": random_value}
    run = write_run(folder, "a-1", columns, sequences=sequences, per_shard=per_shard)
    return copied_to_store(run, f"s3://bucket/{out}")


def data_requests(store: S3Server) -> Counter[tuple[str, str]]:
    """How often each data file was asked for, by method and path, since the log was emptied."""
    requests = [(r.method, r.path) for r in store.requests() if r.path.endswith(".parquet")]
    store.clear()
    return Counter(requests)


def test_a_store_is_asked_once_for_what_cannot_change(store: S3Server, tmp_path: Path):
    run = write_to_store(tmp_path, "asked", sequences=24, per_shard=2)
    database = open_runs(run)
    data_requests(store)
    question = "SELECT sum(sink_mass) FROM heads"
    answer = database.rows(question)
    requests = data_requests(store)
    assert {method for method, _ in requests} == {"HEAD", "GET"}
    # The first file was read when its view was made.
    assert 11 <= len({path for _, path in requests}) <= 12
    assert set(requests.values()) == {1}
    assert database.rows(question) == answer
    assert not data_requests(store)


def test_two_contents_of_an_object_are_never_read_as_one(store: S3Server, tmp_path: Path):
    file = write_to_store(tmp_path, "two", sequences=2, per_shard=2) / "manifest.json"
    content = file.read_bytes()
    committed = CommittedObject(len(content), datetime.fromtimestamp(0, UTC))
    files = _Store(filesystem_of(file), "s3", {file.key: committed})
    with closing(files.open(str(file))) as opened:
        assert (opened.read(5), opened.read()) == (content[:5], content[5:])
    # Of the same size.
    write_whole(file, content[::-1])
    with closing(files.open(str(file))) as opened:
        assert "has changed since" in refused(OSError, opened.read, 5)
    write_whole(file, content)
    with closing(files.open(str(file))) as opened:
        opened.seek(-5, os.SEEK_END)
        assert (opened.read(), opened.tell()) == (content[-5:], len(content))


def test_a_store_that_falters_loses_nothing(store: S3Server):
    plan = plan_of("s3://bucket/faltering")
    store.set_rules(
        Rule({"status": 503}, method="PUT", path="/heads/", count=1),
        Rule({"status": 500}, method="PUT", path="/commits/", count=1),
        Rule({"cut": "after"}, method="PUT", path="/sequences/", count=1),
        Rule({"cut_body": 10}, method="GET", path="/commits/", count=1),
    )
    measure(plan)
    assert missing_shards(plan).tolist() == []
    assert len(list(plan.run.commits())) == 3
    assert store.spent() == [1, 1, 1, 1]


def test_a_store_that_refuses_is_one_clear_line(store: S3Server):
    plan = plan_of("s3://bucket/refused")
    store.set_rules(Rule({"status": 403}, method="PUT", count=None))
    message = r"heads/.*shard-000000-\w{8}\.parquet: cannot be written .*allow them s3:PutObject on"
    with pytest.raises(RunError, match=message):
        measure(plan)
    store.set_rules(Rule({"status": 403}, count=None))
    with pytest.raises(RunError, match="cannot be read"):
        plan.run.commit_log()
    with pytest.raises(RunError, match="cannot be read"):
        open_runs("s3://bucket/refused")
    with pytest.raises(CorpusError, match="cannot be listed"):
        plan_of("s3://bucket/other")
    store.clear()
    with pytest.raises(RunError, match="no run here"):
        open_runs("s3://bucket/nothing")
    with pytest.raises(CorpusError, match=r"no object matches 's3://bucket/pile/\*.txt'"):
        plan_of("s3://bucket/none", "s3://bucket/pile/*.txt")


def test_globs_in_a_store(store: S3Server):
    for key in ("g/a.jsonl", "g/b.jsonl", "g/deep/c.jsonl", "g/deep/er/d.jsonl", "g/e.txt"):
        write_whole(StorePath(f"s3://bucket/{key}"), key.encode())
    for pattern, keys in {
        "*.jsonl": ["a.jsonl", "b.jsonl"],
        "**/*.jsonl": ["a.jsonl", "b.jsonl", "deep/c.jsonl", "deep/er/d.jsonl"],
        "[a]*": ["a.jsonl"],
        "e.txt": ["e.txt"],
        "nothing": [],
    }.items():
        found = matching(StorePath(f"s3://bucket/g/{pattern}"))
        assert sorted(str(p) for p, _ in found) == [f"s3://bucket/g/{key}" for key in keys]
        assert {size for p, size in found if p.name == "e.txt"} <= {7}


# Stores that throttle, or refuse everything from some moment on


SHARDS = 20
SILENT = Console(quiet=True)
ONE_PROCESS = Resources(0, 1, "cpu")


def small_plan(out: str, sequences: int = SHARDS) -> Plan:
    """Shards of one short sequence, in the store unless `out` is a path."""
    fields: dict[str, Any] = {"model": "bundled:attn-only-2l-mini", "n_ctx": 8}
    fields |= {"sequences": sequences, "sequences_per_shard": 1, "interventions": ["none"]}
    fields |= {"input": {"family": "uniform_random"}}
    return plan_of(out if out.startswith("/") else f"s3://bucket/{out}", **fields)


def done_shards(plan: Plan) -> list[int]:
    return plan.run.commit_log([])["shard"].to_pylist()


def written_files(store: S3Server) -> set[str]:
    """The files of rows that somebody tried to write."""
    paths = {request.path for request in store.requests() if request.method == "PUT"}
    return {path for path in paths if "/heads/" in path and path.endswith(".parquet")}


@pytest.mark.long
def test_a_store_that_refuses_three_of_ten_requests_loses_no_write(store: S3Server):
    # Without this many, a client with a quota of repetitions would pass.
    files = [place("s3://bucket/throttled") / f"{number}" for number in range(300)]
    store.set_rules(Rule({"status": 503}, method="PUT", count=None, probability=0.3, seed=1))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda file: write_whole(file, b"1"), files))
    assert sorted(names(files[0].parent)) == sorted(file.name for file in files)
    (refused,) = store.spent()
    assert refused > 90


class NeverMadeReplica(ToyReplica):
    """Would be made only to measure."""

    def __init__(self, *arguments: Any) -> None:
        raise AssertionError


def test_a_store_that_cannot_be_written_to_is_noticed_before_anything_is_measured(store: S3Server):
    plan = small_plan("closed")
    store.set_rules(Rule({"status": 403}, method="PUT", count=None))
    with pytest.raises(RunError, match=r"\.lock: cannot be written .*; mend the access or the sto"):
        run_to_end(plan, ONE_PROCESS, SILENT, replica_class=NeverMadeReplica)


@pytest.mark.parametrize("replicas", [0, pytest.param(1, marks=pytest.mark.long)])
def test_credentials_that_expire_half_way_cost_a_handful_of_shards(store: S3Server, replicas: int):
    plan = small_plan(f"expired-{replicas}")
    # A shard takes about five requests.
    store.set_rules(Rule({"status": 403}, skip=40, count=None))
    with joined_cluster(num_cpus=1) if replicas else nullcontext(), pytest.raises(RunError) as stop:
        run_to_end(plan, Resources(replicas, 1, "cpu"), SILENT, replica_class=ToyReplica)
    assert re.fullmatch(
        rf"{plan.run.run_id}: stopped, because {MOST_UNWRITTEN} shards in a row could not be "
        rf"written, the last with: {plan.run.path}/.*allow them s3:.*"
        "mend the access or the store, then run the same command",
        str(stop.value),
        re.DOTALL,
    )
    measured = written_files(store)
    store.clear()
    lost = len(measured) - len(done_shards(plan))
    assert done_shards(plan)
    # A replica works at three shards at once.
    assert lost <= MOST_UNWRITTEN + 3 * replicas
    assert run_to_end(plan, ONE_PROCESS, SILENT, replica_class=ToyReplica) == []
    assert done_shards(plan) == list(range(SHARDS))


def test_a_store_in_which_nothing_can_be_deleted_is_a_warning(
    store: S3Server, capfd: pytest.CaptureFixture[str]
):
    plan = small_plan("kept")
    console = Console(stderr=True, width=1000)
    # What a replica left that died before its commit.
    lost = plan.run.path / "heads" / "intervention=none" / shard_file_name(3, "0" * 32)
    write_whole(lost, b"PAR1 half")
    store.set_rules(Rule({"status": 403}, path="heads", method="DELETE", count=None))
    assert run_to_end(plan, ONE_PROCESS, console, replica_class=ToyReplica) == []
    assert "files of lost attempts cannot be deleted" in capfd.readouterr().err
    store.clear()
    # The same command tries again.
    assert run_to_end(plan, ONE_PROCESS, console, replica_class=ToyReplica) == []
    assert not lost.is_file()


# Several drivers of one run


class PacedReplica(ToyReplica):
    """Takes longer for a shard than two drivers need to see what the other has done."""

    def misbehave(self, token: int) -> None:
        """Sleep."""
        time.sleep(0.05)


@pytest.mark.long
def test_two_drivers_of_a_run_share_its_shards(store: S3Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headcount.jobs.run.shards.LOOK_SECONDS", 0.1)
    plan = small_plan("shared", sequences=30)
    store.clear()

    def drive() -> list[Commit | Failure]:
        shards = missing_shards(plan)
        outcomes: list[Commit | Failure] = []
        with CommitLog(plan.run, print, per_segment=4) as commit_log:
            for outcome in measure_in_process(plan, shards, ONE_PROCESS, PacedReplica):
                commit_log.note(outcome)
                outcomes.append(outcome)
        return outcomes

    with ThreadPoolExecutor(2) as pool:
        drivers = [pool.submit(drive) for _ in range(2)]
        outcomes = [driver.result() for driver in drivers]
    assert done_shards(plan) == list(range(30))
    assert check_run(plan.run).damaged == []
    puts = [request for request in store.requests() if request.method == "PUT"]
    assert 30 <= sum("/heads/" in request.path for request in puts) <= 1.2 * 30
    assert all(isinstance(outcome, Commit) for each in outcomes for outcome in each)


@pytest.mark.parametrize("where", ["disk", "store", "store without conditions"])
def test_the_second_of_two_attempts_changes_nothing(store: S3Server, where: str, tmp_path: Path):
    plan = small_plan(where) if where != "disk" else small_plan(str(tmp_path))
    if where == "store without conditions":
        store.set_rules(Rule({"status": 501}, method="PUT", path="/commits/", count=1))
    replica = ToyReplica(plan.info, plan.scan, "cpu")
    shard = plan.sequences.shard(3)
    first = run_shard(replica, plan.run, shard)
    # Of other numbers, and so with files of other names.
    second = run_shard(replica, plan.run, replace(shard, tokens=shard.tokens[:, ::-1].copy()), 2)
    assert second == first
    assert list(plan.run.commits()) == [first]
    assert check_run(plan.run).unreferenced == 0


def test_a_store_is_asked_whether_it_honours_conditions(store: S3Server, tmp_path: Path):
    assert check_out("s3://bucket/probed").result == (
        "s3://bucket/probed writes a file only if there is none: of two attempts at a shard, the "
        "second one sees the first"
    )
    store.set_rules(Rule({"status": 403}, method="PUT", count=None))
    refused = check_out("s3://bucket/probed")
    assert (refused.ok, "cannot be written" in refused.result) == (False, True)
    assert list(names(place("s3://bucket/probed"))) == []
    assert check_out(str(tmp_path)).ok
