"""Stores that stand still, that never answer, and whose listings are stale: runs in them go on, or
end in one line and are continued, and each row is there once.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from headcount.jobs.corpus.preparation import CorpusWork, corpora_of, prepare_on_node
from headcount.jobs.plan.plan import Plan
from headcount.jobs.run.loop import missing_shards
from headcount.jobs.upkeep.merged_files import Group, merge_group
from headcount.jobs.upkeep.removal import check_removable
from headcount.schemas import object_stores
from headcount.schemas.errors import RunError, SilentStoreError, StoreError, WriteError
from headcount.schemas.files.commit import COMMITS
from headcount.schemas.files.run_directory import RunDirectory, find_runs
from headcount.schemas.places import StorePath, names, place, write_whole
from headcount.schemas.scans.scan_file import parse_scan
from headcount.workers.first_write import write_new
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.inputs.store.preparation import is_whole
from headcount.workers.model.info.description import describe, find_model
from headcount.workers.provenance.code_fingerprint import read_code
from tests.s3.s3_server import Rule, S3Server
from tests.tools.committed_rows import compare, rows_of
from tests.tools.processes import DIES_WITH_ITS_PARENT
from tests.toys.object_stores import hurry, object_store
from tests.toys.refusals import refused
from tests.toys.runs_here import begun, run_here
from tests.toys.toy_replica import ToyReplica

SHARDS = 8


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A store of which a request is given up after two seconds."""
    hurry(monkeypatch, REQUEST_SECONDS=1)
    with object_store(monkeypatch) as server:
        yield server


def plan_in(out: str) -> Plan:
    fields = {
        "model": "bundled:attn-only-2l-mini",
        "n_ctx": 8,
        "input": {"family": "uniform_random"},
    }
    sizes = {"sequences": SHARDS, "sequences_per_shard": 1, "out": out}
    return begun({**fields, **sizes})


def assert_rows_are_there_once(plan: Plan, folder: Path) -> None:
    undisturbed = plan_in(str(folder))
    run_here(undisturbed)
    assert compare(rows_of(plan.run.path), rows_of(undisturbed.run.path)) == (0, 0, 0)


def puts(store: S3Server, part: str) -> int:
    return sum(r.method == "PUT" and part in r.path for r in store.requests())


def test_a_run_goes_on_after_its_store_stood_still(store: S3Server, tmp_path: Path) -> None:
    class Disturber(ToyReplica):
        shards = 0

        def misbehave(self, token: int) -> None:
            self.shards += 1
            if self.shards == 3:
                Thread(target=stand_still).start()
                time.sleep(0.1)

    def stand_still() -> None:
        with store.standing_still():
            time.sleep(3)

    plan = plan_in("s3://bucket/still")
    began = time.monotonic()
    run_here(plan, Disturber)
    assert time.monotonic() - began > 3
    assert_rows_are_there_once(plan, tmp_path)


def prepare_corpus() -> Callable[[], bool]:
    write_whole(place("s3://bucket/texts.txt"), b"A text of some tokens.")
    fields = {"model": "bundled:gpt2-mini", "n_ctx": 4, "out": "s3://bucket/prepared"}
    corpus = {"family": "text", "files": "s3://bucket/texts.txt"}
    scan = parse_scan(fields | {"sequences": "all", "input": corpus})
    work = CorpusWork(Sequences(scan, describe(find_model(scan.model))), corpora_of(scan))
    work.store.create()
    (extent,) = work.missing()
    code, task = read_code(), (work.store, extent, work.sequences.tokenizer, 1)

    def prepare() -> bool:
        assert prepare_on_node(code, None, *task) is None
        return is_whole(work.store.portions()[extent.key])

    return prepare


def merge() -> Callable[[], bool]:
    plan = plan_in("s3://bucket/merged")
    run_here(plan)
    group = Group(plan.run, plan.run.commit_log().select(COMMITS.names), frozenset())
    return lambda: len(merge_group(group).commits) == SHARDS


@pytest.mark.long
@pytest.mark.parametrize("begun_work", [merge, prepare_corpus])
def test_a_worker_waits_longer_for_a_store_than_a_command(
    begun_work: Callable[[], Callable[[], bool]], store: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a task that sets it for its process.
    for cores in ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(cores, "1")
    work = begun_work()
    hurry(monkeypatch, PROBE_SECONDS=0.2, PROBING_SECONDS=0.4)
    # As in a process that has asked for nothing yet.
    object_stores._filesystem.cache_clear()
    runs = place("s3://bucket/runs")
    assert isinstance(runs, StorePath)
    with ThreadPoolExecutor(1) as pool, store.standing_still():
        assert "does not answer (timed out)" in refused(RunError, object_stores.filesystem_of, runs)
        working = pool.submit(work)
        time.sleep(1.5)
        assert not working.done()
    assert working.result()


def test_a_store_that_never_answers_ends_a_run_at_its_first_shard(
    store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, ATTEMPTS=1)
    object_stores._filesystem.cache_clear()
    plan = plan_in("s3://bucket/silent")
    store.set_rules(Rule({"cut": "before"}, "/heads/", "PUT", skip=2, count=None))
    line = (
        rf"{plan.run.path}/heads/.*: cannot be written \(the store gave no whole answer to 2 "
        r"requests, .*: curlCode: 52, .*\); mend the access or the store, then run the same command"
    )
    with pytest.raises(SilentStoreError, match=line):
        run_here(plan)
    assert store.spent() == [2]
    assert names(plan.run.path / "failures") == []
    store.clear()
    run_here(plan)
    assert_rows_are_there_once(plan, tmp_path)


@pytest.mark.long  # boto3 pauses for up to 31 s.
def test_a_commit_that_is_not_answered_is_never_written_without_its_condition(
    store: S3Server,
) -> None:
    plan = plan_in("s3://bucket/commit")
    store.set_rules(Rule({"cut": "before"}, "/commits/", "PUT", count=6))
    with pytest.raises(SilentStoreError, match=r"commits/.*: cannot be written \(Connection was"):
        run_here(plan)
    assert (store.spent(), puts(store, "/commits/")) == ([6], 6)


def test_stale_listings_double_nothing(store: S3Server, tmp_path: Path) -> None:
    plan = plan_in("s3://bucket/stale")
    run_here(plan)
    store.set_rules(Rule({"stale": 3600}, "list-type=2", "GET", count=None))
    # A store that lists nothing where something lies is believed in nothing.
    for command in (missing_shards, run_here):
        with pytest.raises(StoreError, match="the store does not list what lies in it"):
            command(plan)
    assert puts(store, "/heads/") == SHARDS
    store.set_rules()
    assert_rows_are_there_once(plan, tmp_path)


@pytest.mark.parametrize("status", [400, 403])
def test_credentials_that_have_ended_are_said_with_what_to_do(
    store: S3Server, tmp_path: Path, status: int
) -> None:
    file = place("s3://bucket/runs/run_id=a-1/manifest.json")
    write_whole(file, b"{}")
    denied = (
        "(the store denies it: renew the credentials if they have ended, or allow them s3:{} on "
        "bucket/runs/{})"
    )
    run = RunDirectory(file.parent)
    get = denied.format("GetObject and s3:ListBucket", "run_id=a-1/manifest.json")
    bucket, put = denied.format("ListBucket", ""), denied.format("PutObject", "run_id=a-1/new")
    store.set_rules(Rule({"status": status}, "/bucket", count=None))
    assert refused(StoreError, run.manifest) == f"{file}: cannot be read {get}"
    assert refused(StoreError, find_runs, run.path.parent).endswith(get.replace("run_id=a-1/", ""))
    assert (
        refused(StoreError, names, run.path.parent) == f"{run.path.parent}: cannot be read {bucket}"
    )
    told = refused(WriteError, write_new, run.path / "new", b"1")
    assert told.startswith(f"{run.path / 'new'}: cannot be written {put}")
    assert "the store denies it" in refused(StoreError, check_removable, str(run.path))


def test_a_command_that_waits_for_a_store_ends_at_an_interrupt(
    store: S3Server, tmp_path: Path
) -> None:
    store.set_rules(Rule({"delay": 60}, "/bucket", count=None))
    words = [*DIES_WITH_ITS_PARENT, sys.executable, "-m", "headcount", "check", "s3://bucket/runs"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=tmp_path, **pipes) as command:
        while not store.spent()[0]:
            assert command.poll() is None
            time.sleep(0.1)
        # Now it waits inside a library, where Python hears no signal.
        command.send_signal(signal.SIGINT)
        said = command.communicate(timeout=15)
    assert (command.returncode, *said) == (130, "", "stopped\n")
