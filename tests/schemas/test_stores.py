"""Runs and corpora in an object store give the same rows and answers as those on a disk."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import zstandard
from typer.testing import CliRunner

from headcount import app
from headcount.jobs.plan.plan import Plan, make_plan, prepare_run
from headcount.jobs.run.loop import missing_shards
from headcount.jobs.upkeep.checking import check_run
from headcount.jobs.upkeep.compaction import compact
from headcount.jobs.upkeep.status import read_status
from headcount.queries.ask.answers import run_query
from headcount.queries.ask.asking import open_runs
from headcount.queries.open.connection import connect
from headcount.queries.open.stores import CommittedObject, _Store
from headcount.schemas.errors import CorpusError, QueryError, RunError, ScanError
from headcount.schemas.files.commits import gather
from headcount.schemas.files.places import StorePath, matching, names, place, write_whole
from headcount.schemas.files.run_directory import find_runs
from headcount.schemas.scans.scan import parse_scan
from headcount.workers.replica import Replica
from headcount.workers.shard import run_shard
from tests.tools.s3_server import Rule, S3Server
from tests.toys.toy_replica import ToyReplica
from tests.toys.toy_runs import Row, connect_to_tables, data_file, local, write_run

TEXTS = [f"{word} " * 30 for word in ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")]


@pytest.fixture(scope="module")
def store() -> Iterator[S3Server]:
    """A store that can falter, in the environment of this process."""
    before = dict(os.environ)
    with S3Server() as server:
        os.environ |= server.env()
        for number, half in enumerate((TEXTS[:3], TEXTS[3:])):
            lines = "\n".join(
                json.dumps({"text": t, "meta": {"pile_set_name": "Greek"}}) for t in half
            ).encode()
            write_whole(
                place(f"s3://bucket/pile/part-{number}.jsonl.zst"), zstandard.compress(lines)
            )
        yield server
    os.environ.clear()
    os.environ |= before


@pytest.fixture(autouse=True)
def _no_rules(store: S3Server) -> None:
    store.clear()


def plan_of(name: str, out: str, files: str = "s3://bucket/pile/*.jsonl.zst") -> Plan:
    fields = {
        "model": "bundled:gpt2-mini",
        "n_ctx": 32,
        "sequences": 6,
        "sequences_per_shard": 2,
        "out": out,
        # As many as the tests ask for: a report asks the store for each question that it shows.
        "statistics": ["sink_mass", "entropy", "resid_post_norm"],
        "input": {"family": "pile", "files": files},
    }
    plan = make_plan(parse_scan(fields), name)
    prepare_run(plan, "# as submitted\n")
    return plan


def measure(
    plan: Plan, shards: range = range(3), replica_class: type[Replica] = ToyReplica
) -> None:
    replica = replica_class(plan.info, plan.scan, "cpu")
    for shard in shards:
        run_shard(replica, plan.run, plan.sequences.shard(shard))


@pytest.fixture(scope="module")
def measured_plan(store: S3Server) -> Plan:
    """A run whose corpus and rows are in the store."""
    plan = plan_of("stored", "s3://bucket/runs")
    measure(plan)
    return plan


def test_a_run_in_a_store_has_the_rows_of_one_on_a_disk(
    measured_plan: Plan, tmp_path: Path
) -> None:
    assert place("s3://bucket/pile/part-0.jsonl.zst").is_file()
    texts = tmp_path / "texts.jsonl"
    texts.write_text(
        "\n".join(json.dumps({"text": t, "meta": {"pile_set_name": "Greek"}}) for t in TEXTS)
    )
    local = plan_of("stored", str(tmp_path / "runs"), str(texts))
    measure(local)
    question = (
        "SELECT sequence, layer, head, sink_mass, entropy, resid_post_norm FROM heads ORDER BY ALL"
    )
    on_disk = connect_to_tables(local.scan.out).execute(question).fetchall()
    in_store = connect_to_tables(measured_plan.scan.out).execute(question).fetchall()
    assert on_disk == in_store
    assert len(on_disk) == 6 * measured_plan.info.n_layers * measured_plan.info.n_heads
    origin = "SELECT sequence, file, row, pile_set_name FROM sequences ORDER BY ALL"
    assert connect_to_tables(measured_plan.scan.out).execute(origin).fetchall()[3] == (
        3,
        "s3://bucket/pile/part-1.jsonl.zst",
        0,
        "Greek",
    )


def test_the_commit_is_written_last_and_each_file_is_one_put(
    measured_plan: Plan, store: S3Server
) -> None:
    measured_plan.run.commit_file(0).unlink()
    store.clear()
    measure(measured_plan, range(1))
    written = [r.path for r in store.requests() if r.method in ("PUT", "POST")]
    assert len(written) == 3
    assert "/heads/" in written[0]
    assert "/commits/shard-000000.json" in written[-1]


def test_planning_again_finds_the_run_and_its_index(measured_plan: Plan) -> None:
    again = make_plan(measured_plan.scan, "stored")
    assert missing_shards(again).tolist() == []
    assert (
        again.sequences.shard(1).tokens.tolist() == measured_plan.sequences.shard(1).tokens.tolist()
    )
    assert read_status(measured_plan.run).complete


def test_queries_reach_the_run_and_nothing_else_in_the_store(measured_plan: Plan) -> None:
    write_whole(place("s3://bucket/other/secret.parquet"), b"PAR1")
    connection = connect(measured_plan.scan.out)
    inside = data_file(measured_plan.run, "heads", "none", 0)
    assert len(list(run_query(connection, f"SELECT DISTINCT sequence FROM '{inside}'").rows())) == 2
    for outside in (
        "s3://bucket/other/secret.parquet",
        f"{measured_plan.run.path}/../../other/secret.parquet",
        f"{measured_plan.run.path}-2/x.parquet",
        "/etc/passwd",
    ):
        with pytest.raises(QueryError, match=r"(?i)permission|not allowed|disabled"):
            list(run_query(connection, f"SELECT * FROM read_parquet('{outside}')").rows())


def test_the_command_line_takes_addresses(measured_plan: Plan, tmp_path: Path) -> None:
    runner = CliRunner()
    answer = runner.invoke(
        app,
        [
            "query",
            str(measured_plan.run.path),
            "SELECT count(*) AS n FROM sequences",
            "--format",
            "csv",
        ],
    )
    assert answer.output.split() == ["n", "6"]
    report = tmp_path / "report.html"
    assert runner.invoke(app, ["report", measured_plan.scan.out, "-o", str(report)]).exit_code == 0
    assert "stored" in report.read_text()


def test_gathering_and_compacting_in_a_store(store: S3Server) -> None:
    plan = plan_of("gathered", "s3://bucket/gathered")
    measure(plan)
    question = "SELECT sequence, layer, head, sink_mass FROM heads ORDER BY ALL"
    before = connect_to_tables(plan.scan.out).execute(question).fetchall()
    gather(plan.run.commits_directory, list(plan.run.commits())[:2])
    assert sorted(n[:5] for n in names(plan.run.commits_directory)) == ["segment-", "shard"]
    assert connect_to_tables(plan.scan.out).execute(question).fetchall() == before
    compact(plan.run)
    assert len(list(names(plan.run.path / "heads" / "intervention=none"))) == 1
    assert connect_to_tables(plan.scan.out).execute(question).fetchall() == before
    assert missing_shards(plan).tolist() == []


def test_damage_in_a_store_is_found_by_size_or_by_reading(store: S3Server) -> None:
    plan = plan_of("damaged", "s3://bucket/damaged")
    measure(plan)
    file = data_file(plan.run, "heads", "none", 1)
    whole = file.read_bytes()
    write_whole(file, whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
    # Nothing is read for a question; everything is for a check.
    assert connect_to_tables(plan.scan.out).execute("SELECT count(*) FROM shards").fetchall() == [
        (3,)
    ]
    assert open_runs(plan.scan.out).damage() == []
    (found,) = check_run(plan.run).damaged
    assert (found.shards, found.why) == ([1], "has other content than was committed")
    assert missing_shards(plan).tolist() == []
    write_whole(file, whole + b"PAR1")
    (line,) = open_runs(plan.scan.out).damage()
    assert f"has {len(whole) + 4:,} bytes where {len(whole):,} were committed" in line
    assert read_status(plan.run).damaged == 1
    write_whole(file, whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
    assert missing_shards(plan, verify=True).tolist() == [1]
    measure(plan, range(1, 2))
    assert check_run(plan.run).damaged == []


def random_value(row: Row) -> float:
    return float(np.random.default_rng([row.sequence, row.layer, row.head]).random())


def write_to_store(folder: Path, out: str, sequences: int, per_shard: int) -> StorePath:
    """A run of random numbers in the store."""
    columns = {"sink_mass": random_value, "entropy": random_value}
    run = write_run(folder, "a-1", columns, sequences=sequences, per_shard=per_shard)
    copy = place(f"s3://bucket/{out}") / "run_id=a-1"
    assert isinstance(copy, StorePath)
    for file in local(run.path).rglob("*.*"):
        if file.is_file():
            path = file.relative_to(local(run.path)).as_posix()
            write_whole(copy / path, file.read_bytes())
    return copy


def data_requests(store: S3Server) -> Counter[tuple[str, str]]:
    """How often each data file was asked for, by method and path, since the log was emptied."""
    requests = [(r.method, r.path) for r in store.requests() if r.path.endswith(".parquet")]
    store.clear()
    return Counter(requests)


def test_a_store_is_asked_once_for_what_cannot_change(store: S3Server, tmp_path: Path) -> None:
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


def test_an_object_that_changed_since_its_commit_was_read_is_one_clear_line(
    store: S3Server, tmp_path: Path
) -> None:
    run = write_to_store(tmp_path, "changed", sequences=4, per_shard=2)
    database = open_runs(run)
    # The first shard was read when its view was made.
    file = run / "heads/intervention=none/shard-000001.parquet"
    content = file.read_bytes()
    write_whole(file, content + b"PAR1")
    with pytest.raises(QueryError, match="has changed since the runs were opened"):
        database.rows("SELECT sum(entropy) FROM heads")
    write_whole(file, content)
    expected = sum(np.float32(random_value(Row("none", *key))) for key in np.ndindex(4, 2, 3))
    [(total,)] = database.rows("SELECT sum(entropy) FROM heads")
    assert total == pytest.approx(expected, rel=1e-6)


def test_two_contents_of_an_object_are_never_read_as_one(store: S3Server, tmp_path: Path) -> None:
    file = write_to_store(tmp_path, "two", sequences=2, per_shard=2) / "manifest.json"
    content = file.read_bytes()
    committed = CommittedObject(len(content), datetime.fromtimestamp(0, UTC))
    files = _Store(file.filesystem, "s3", {file.key: committed})
    with closing(files.open(str(file))) as opened:
        assert (opened.read(5), opened.read()) == (content[:5], content[5:])
    # Of the same size.
    write_whole(file, content[::-1])
    with (
        closing(files.open(str(file))) as opened,
        pytest.raises(OSError, match="has changed since"),
    ):
        opened.read(5)
    write_whole(file, content)
    with closing(files.open(str(file))) as opened:
        opened.seek(-5, os.SEEK_END)
        assert (opened.read(), opened.tell()) == (content[-5:], len(content))


def test_names_of_interventions_are_names_of_objects(store: S3Server) -> None:
    names = ("none", "scale_query_bias(0.5)+zero_head(1,2)")
    fields = {
        "model": "bundled:attn-only-2l-mini",
        "n_ctx": 16,
        "sequences": 2,
        "interventions": names,
        "out": "s3://bucket/changed",
        "input": {"family": "uniform_random"},
        "statistics": ["sink_mass"],
        "profiles": ["attention_by_lag"],
        "predictions": ["losses"],
    }
    plan = make_plan(parse_scan(fields), "changed")
    prepare_run(plan, "")
    measure(plan, range(1), Replica)
    assert missing_shards(plan, verify=True).tolist() == []
    connection = connect_to_tables("s3://bucket/changed")
    for view in ("heads", "profiles", "sequences"):
        rows = connection.execute(f"SELECT DISTINCT intervention FROM {view} ORDER BY 1").fetchall()
        assert [name for (name,) in rows] == list(names)


def test_a_store_that_falters_loses_nothing(store: S3Server) -> None:
    plan = plan_of("faltering", "s3://bucket/faltering")
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


def test_a_store_that_refuses_is_one_clear_line(store: S3Server) -> None:
    plan = plan_of("refused", "s3://bucket/refused")
    store.set_rules(Rule({"status": 403}, method="PUT", count=None))
    with pytest.raises(
        RunError, match=r"heads/.*shard-000000-\w{8}\.parquet: cannot be written .*ACCESS_DENIED"
    ):
        measure(plan)
    store.set_rules(Rule({"status": 403}, count=None))
    with pytest.raises(RunError, match="cannot be read"):
        plan.run.commit_log()
    with pytest.raises(RunError, match="cannot be read"):
        connect("s3://bucket/refused")
    with pytest.raises(CorpusError, match="cannot be listed"):
        plan_of("other", "s3://bucket/other")


def test_a_missing_run_or_corpus_is_one_clear_line(store: S3Server) -> None:
    with pytest.raises(RunError, match="no run here"):
        connect("s3://bucket/nothing")
    with pytest.raises(CorpusError, match=r"no object matches 's3://bucket/pile/\*.txt'"):
        plan_of("none", "s3://bucket/none", "s3://bucket/pile/*.txt")
    with pytest.raises(ScanError, match="must hold no credentials"):
        parse_scan(
            {
                "model": "m",
                "n_ctx": 2,
                "sequences": 1,
                "input": {"family": "pile"},
                "out": "s3://a:b@bucket/runs",
            }
        )


def test_globs_in_a_store(store: S3Server) -> None:
    for key in ("g/a.jsonl", "g/b.jsonl", "g/deep/c.jsonl", "g/deep/er/d.jsonl", "g/e.txt"):
        write_whole(StorePath(f"s3://bucket/{key}"), key.encode())

    def matching_keys(pattern: str) -> list[str]:
        return sorted(
            str(p).removeprefix("s3://bucket/g/")
            for p, _ in matching(StorePath(f"s3://bucket/{pattern}"))
        )

    assert matching_keys("g/*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert matching_keys("g/**/*.jsonl") == [
        "a.jsonl",
        "b.jsonl",
        "deep/c.jsonl",
        "deep/er/d.jsonl",
    ]
    assert matching_keys("g/[a]*") == ["a.jsonl"]
    assert matching_keys("g/e.txt") == ["e.txt"]
    assert matching_keys("g/nothing") == []
    assert [size for _, size in matching(StorePath("s3://bucket/g/e.txt"))] == [7]


def test_a_run_in_a_store_is_deleted_and_its_neighbours_stay(store: S3Server) -> None:
    plans = [plan_of(name, "s3://bucket/deleted") for name in ("a", "b")]
    for plan in plans:
        measure(plan, range(1))
    kept, gone = (str(plan.run.path) for plan in plans)
    result = CliRunner().invoke(app, ["rm", gone, "--yes"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"deleted {gone}\n")
    assert matching(StorePath(f"{gone}/**/*")) == []
    assert [str(run.path) for run in find_runs(place("s3://bucket/deleted"))] == [kept]
    assert read_status(plans[0].run).done == 1
    result = CliRunner().invoke(app, ["rm", gone, "--yes"])
    assert str(result.exception) == f"{gone}: not there; expected the directory of a run"
