"""A store that throttles, that refuses everything from some moment on, or in which two drivers are
at work on one run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from headcount.jobs.cluster.ray_cluster import Resources
from headcount.jobs.plan.plan import Plan, make_plan, prepare_run
from headcount.jobs.run.loop import MOST_UNWRITTEN, run_to_end
from headcount.jobs.upkeep import phases
from headcount.jobs.upkeep.checking import check_run
from headcount.schemas.errors import RunError
from headcount.schemas.files.places import names, place, write_whole
from headcount.schemas.files.run_directory import RunDirectory, shard_file_name
from headcount.schemas.scans.scan import parse_scan
from tests.tools.processes import Command
from tests.tools.s3_server import ROOT, Rule, S3Server
from tests.tools.workers import joined_cluster
from tests.toys.toy_replica import ToyReplica

SHARDS = 30
SILENT = Console(quiet=True)


@pytest.fixture(scope="module")
def store() -> Iterator[S3Server]:
    """A store that can falter, in the environment of this process."""
    before = dict(os.environ)
    with S3Server() as server:
        os.environ |= server.env()
        yield server
    os.environ.clear()
    os.environ |= before


@pytest.fixture(autouse=True)
def _no_rules(store: S3Server) -> None:
    store.clear()


def plan_of(out: str, **fields: Any) -> Plan:
    scan = {
        "model": "bundled:attn-only-2l-mini",
        "n_ctx": 8,
        "sequences": SHARDS,
        "sequences_per_shard": 1,
        "statistics": ["sink_mass"],
        "input": {"family": "uniform_random"},
        "out": f"s3://bucket/{out}",
    }
    plan = make_plan(parse_scan(scan | fields), "idle")
    prepare_run(plan, "")
    return plan


def done_shards(plan: Plan) -> list[int]:
    return plan.run.commit_log([])["shard"].to_pylist()


def written_files(store: S3Server) -> set[str]:
    """The files of rows that somebody tried to write."""
    paths = {request.path for request in store.requests() if request.method == "PUT"}
    return {path for path in paths if "/heads/" in path and path.endswith(".parquet")}


def test_a_store_that_refuses_three_of_ten_requests_loses_no_write(store: S3Server) -> None:
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


def test_a_store_that_cannot_be_written_to_is_noticed_before_anything_is_measured(
    store: S3Server,
) -> None:
    plan = plan_of("closed")
    store.set_rules(Rule({"status": 403}, method="PUT", count=None))
    with pytest.raises(RunError, match=r"\.lock: cannot be written .*; mend the access or the sto"):
        run_to_end(plan, Resources(0, 1, "cpu"), SILENT, replica_class=NeverMadeReplica)


@pytest.mark.parametrize("replicas", [0, pytest.param(1, marks=pytest.mark.long)])
def test_credentials_that_expire_half_way_cost_a_handful_of_shards(
    store: S3Server, replicas: int
) -> None:
    if replicas:
        with joined_cluster(num_cpus=1):
            check_that_a_handful_is_lost(store, replicas)
    else:
        check_that_a_handful_is_lost(store, replicas)


def check_that_a_handful_is_lost(store: S3Server, replicas: int) -> None:
    """Run until the store refuses everything, then again when it takes everything."""
    plan = plan_of(f"expired-{replicas}")
    # A shard takes about five requests.
    store.set_rules(Rule({"status": 403}, skip=60, count=None))
    with pytest.raises(RunError) as stop:
        run_to_end(plan, Resources(replicas, 1, "cpu"), SILENT, replica_class=ToyReplica)
    assert str(stop.value).startswith(
        f"{plan.run.run_id}: stopped, because {MOST_UNWRITTEN} shards in a row could not be "
        f"written, the last with: {plan.run.path}/"
    )
    assert "ACCESS_DENIED" in str(stop.value)
    assert str(stop.value).endswith("mend the access or the store, then run the same command")
    measured = written_files(store)
    store.clear()
    lost = len(measured) - len(done_shards(plan))
    assert done_shards(plan)
    # A replica works at three shards at once.
    assert MOST_UNWRITTEN <= lost <= MOST_UNWRITTEN + 3 * replicas
    assert run_to_end(plan, Resources(0, 1, "cpu"), SILENT, replica_class=ToyReplica) == []
    assert done_shards(plan) == list(range(SHARDS))


class RoundingReplica(ToyReplica):
    """Its last bit depends on the size of batches, as that of a GPU may."""

    def measure(self, *arguments: Any) -> Any:
        """Numbers of a toy replica, and a bit."""
        measured = super().measure(*arguments)
        measured.tables["heads"]["sink_mass"] += np.float32(2**-24 * self.scan.batch_size)
        time.sleep(0.01)
        return measured


def drive() -> None:
    """Measure the run that the command line names, in batches of the size that it names."""
    plan = plan_of(sys.argv[1], batch_size=int(sys.argv[2]))
    console = Console(stderr=True)
    run_to_end(plan, Resources(0, 1, "cpu"), console, replica_class=RoundingReplica)


@pytest.mark.long
def test_two_drivers_with_batches_of_two_sizes_leave_every_row_once_and_no_damage(
    store: S3Server,
) -> None:
    plan = plan_of("both", batch_size=1)
    # Commits that take long: both drivers look for one before the other has written it.
    store.set_rules(Rule({"delay": 0.3}, path="/commits/shard-", method="PUT", count=10))
    drivers = [
        Command(
            "both",
            size,
            environment=os.environ | {"PYTHONPATH": str(ROOT)},
            directory=ROOT,
            main="tests.schemas.test_failing_stores.drive",
        )
        for size in ("1", "2")
    ]
    for driver in drivers:
        ended = driver.ended()
        assert ended.code == 0, ended.stderr
    measured = written_files(store)
    checked = check_run(plan.run)
    assert (checked.damaged, checked.unreferenced, checked.shards) == ([], 0, SHARDS)
    # Otherwise no shard was measured twice, with two results.
    assert len(measured) > SHARDS
    assert sequences_of_a_bare_glob(plan.run) == [
        sequence
        for sequence in range(SHARDS)
        for _ in range(plan.info.n_layers * plan.info.n_heads)
    ]


def sequences_of_a_bare_glob(run: RunDirectory) -> list[int]:
    """The sequence of each row of every file that a glob finds."""
    directory = run.path / "heads" / "intervention=none"
    tables = [
        pq.read_table(pa.BufferReader((directory / n).read_bytes())) for n in names(directory)
    ]
    return sorted(pa.concat_tables(tables)["sequence"].to_pylist())


def test_a_store_in_which_nothing_can_be_deleted_is_a_warning(
    store: S3Server, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of("kept")
    console = Console(stderr=True, width=1000)
    # What a replica left that died before its commit.
    lost = plan.run.path / "heads" / "intervention=none" / shard_file_name(3, "0" * 32)
    write_whole(lost, b"PAR1 half")
    store.set_rules(Rule({"status": 403}, path="heads", method="DELETE", count=None))
    assert run_to_end(plan, Resources(0, 1, "cpu"), console, replica_class=ToyReplica) == []
    assert "files of lost attempts cannot be deleted" in capfd.readouterr().err
    store.clear()
    # The same command tries again.
    assert run_to_end(plan, Resources(0, 1, "cpu"), console, replica_class=ToyReplica) == []
    assert not lost.is_file()


def write_note(run: RunDirectory, **fields: Any) -> None:
    """Write what another driver says of a run."""
    now = datetime.now(UTC)
    values = {"run_id": run.run_id, "phase": "measuring", "since": now, "heard": now, "host": "far"}
    note = phases.Note.model_validate(values | {"machine": "another", "process": 7} | fields)
    file = run.path.parent / phases.NOTES / f"{run.run_id}.json"
    write_whole(file, note.model_dump_json().encode())


def take_notes(run: RunDirectory) -> None:
    with phases.taken():
        phases.about(run)


def test_a_second_driver_of_a_run_in_a_store_is_refused_while_the_first_is_heard_of(
    store: S3Server,
) -> None:
    run = plan_of("taken").run
    heard = datetime.now(UTC)
    write_note(run, since=heard - timedelta(minutes=5))
    with pytest.raises(
        RunError,
        match=r"another driver is at work on this run \(process 7 on far, measuring, for \d min.*\)"
        rf"; wait for it, or stop it .*; if it is dead, that works after 90 s, or at once without "
        rf"s3://bucket/taken/\.phases/{run.run_id}\.json$",
    ):
        take_notes(run)
    # The note of the first is not that of the second, which has ended.
    assert phases.read_note(run) is not None
    write_note(run, heard=heard - timedelta(seconds=phases.PATIENCE_SECONDS + 1))
    take_notes(run)


def test_a_driver_of_this_machine_that_was_killed_locks_nobody_out(store: S3Server) -> None:
    run = plan_of("killed").run
    with subprocess.Popen(["sleep", "100"]) as other:
        machine, _, _ = phases._this_process()  # pyright: ignore[reportPrivateUsage]
        started = phases._process_started(other.pid)  # pyright: ignore[reportPrivateUsage]
        write_note(run, machine=machine, process=other.pid, process_started=started)
        with pytest.raises(RunError, match=rf"process {other.pid} on far"):
            take_notes(run)
        other.kill()
    take_notes(run)
