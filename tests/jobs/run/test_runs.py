"""Runs on Ray of this machine, stopped and resumed: the same rows, no more and no fewer.

Drivers that are killed on a cluster are tried in `test_faults.py`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headcount.jobs.plan.plan import make_plan, prepare_run
from headcount.jobs.run.loop import tokens_of
from headcount.schemas.errors import RunError
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.scans.scan import Scan, load_scan
from headcount.workers.replica import Replica
from headcount.workers.shard import run_shard
from tests import ROOT
from tests.tools.processes import MARK, Command, kill
from tests.toys.toy_runs import local

FAULTS = ROOT / "tests" / "faults"
SHARDS = 8

SCAN = f"""
model = "bundled:gpt2-mini"
n_ctx = 64
batch_size = 4
sequences = {SHARDS * 4}
sequences_per_shard = 4
interventions = ["none", "zero_query_bias"]
[input]
family = "repeated_random"
"""


@pytest.fixture(scope="module")
def scan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scans") / "killed.toml"
    path.write_text(SCAN)
    return path


@pytest.fixture(scope="module")
def undisturbed(scan_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, pa.Table]:
    """The rows of the same scan, shard by shard in this process, without Ray."""
    return rows(run_here(load_scan(scan_file, [f"out={tmp_path_factory.mktemp('undisturbed')}"])))


def run_here(scan: Scan) -> RunDirectory:
    plan = make_plan(scan, "killed")
    prepare_run(plan, "")
    replica = Replica(plan.info, scan)
    for shard in range(plan.manifest.shards):
        run_shard(replica, plan.run, plan.sequences.shard(shard))
    return plan.run


def rows(run: RunDirectory) -> dict[str, pa.Table]:
    """Every committed row of every table and intervention, in the order of its keys."""
    keys = {"heads": ("sequence", "layer", "head"), "sequences": ("sequence",)}
    files: dict[tuple[str, str], list[Path]] = {}
    for commit in run.commits():
        for file in commit.files:
            path = local(run.path) / file.path
            files.setdefault((file.table, file.intervention), []).append(path)
    tables: dict[str, pa.Table] = {}
    for (table, intervention), paths in files.items():
        joined = pa.concat_tables([pq.read_table(path) for path in paths])
        order = [(key, "ascending") for key in keys[table]]
        tables[f"{table} {intervention}"] = joined.sort_by(order)
    return tables


def assert_same_rows(run: RunDirectory, expected: dict[str, pa.Table]) -> None:
    measured = rows(run)
    assert set(measured) == set(expected)
    for name, table in expected.items():
        assert measured[name].num_rows == table.num_rows, name
        for column in table.column_names:
            where = f"{name}.{column}"
            a, b = measured[name][column].to_pandas(), table[column].to_pandas()
            if a.dtype != "float32":
                assert a.map(str).tolist() == b.map(str).tolist(), where
                continue
            # Another process may sum in another order: float32 noise, and the same NULLs.
            assert (a.isna() == b.isna()).all(), where
            assert ((a - b).abs().fillna(0) <= 1e-5 * (1 + b.abs().fillna(0))).all(), where


@pytest.fixture
def start(scan_file: Path, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts `headcount scan` in a process of its own. What it leaves behind is killed."""
    started: list[Command] = []
    (tmp_path / "orders").mkdir()
    environment = os.environ | {
        MARK: str(tmp_path),
        "PYTHONPATH": str(FAULTS),
        "FAULTS": str(tmp_path / "orders"),
    }

    def begin(out: Path, *options: str) -> Command:
        words = ("scan", scan_file, "--set", f"out={out}", *options)
        started.append(Command(*words, environment=environment, directory=ROOT))
        return started[-1]

    yield begin
    for command in started:
        command.send_signal(signal.SIGKILL)
    kill(str(tmp_path))


def wait_for_commits(run: RunDirectory, count: int, command: Command) -> None:
    deadline = time.monotonic() + 240
    while len(committed_shards(run)) < count:
        assert command.poll() is None, command.ended()
        assert time.monotonic() < deadline, "no commits in four minutes"
        time.sleep(0.05)


def committed_shards(run: RunDirectory) -> list[int]:
    return run.commit_log([])["shard"].to_pylist()


def halt_after_commits(orders: Path, commits: int) -> None:
    """Let a driver's replicas commit so many shards, and then wait for ever."""
    # `pass` comes before `wait`: orders are obeyed in the order of their names.
    for number in range(commits):
        (orders / f"pass@commit.{number}").touch()
    for number in range(SHARDS):
        (orders / f"wait@commit.{number}").touch()


def leave_behind(run: RunDirectory) -> None:
    """Write what dead workers and others may leave, which counts for nothing."""
    heads = local(run.path) / "heads" / "intervention=none"
    (heads / ".shard-000099.parquet.123.tmp").write_bytes(b"PAR1 half")
    (heads / "foreign.parquet").write_bytes(b"not parquet")
    local(run.commit_file(98)).write_text('{"shard":')


def test_a_driver_interrupted_then_resumed(
    scan_file: Path,
    undisturbed: dict[str, pa.Table],
    start: Callable[..., Command],
    tmp_path: Path,
) -> None:
    run = RunDirectory.of(tmp_path, load_scan(scan_file).run_id("killed"))
    orders = tmp_path / "orders"
    halt_after_commits(orders, 5)
    interrupted = start(tmp_path, "--replicas", "1")
    wait_for_commits(run, 5, interrupted)
    interrupted.send_signal(signal.SIGINT)
    code, _, errors = interrupted.ended()
    assert code == 130
    assert "Traceback" not in errors
    assert "continues the scan where it stopped" in errors
    kill(str(tmp_path))
    assert len(committed_shards(run)) == 5

    for order in orders.iterdir():
        order.unlink()
    leave_behind(run)
    written = {
        commit.shard: local(run.commit_file(commit.shard)).stat().st_mtime_ns
        for commit in run.commits()
    }
    # The command may differ. Drivers that go on with Ray are tried in `test_faults.py`.
    code, _, errors = start(tmp_path, "--replicas", "0").ended(timeout=300)
    assert code == 0, errors
    assert f"{len(written)} of them done" in errors
    for shard, when in written.items():
        assert local(run.commit_file(shard)).stat().st_mtime_ns == when
    assert [commit.shard for commit in run.commits()] == list(range(SHARDS))
    assert_same_rows(run, undisturbed)


def test_the_tokens_of_shards_know_that_the_last_is_short(scan_file: Path, tmp_path: Path) -> None:
    plan = make_plan(load_scan(scan_file, [f"out={tmp_path}", "sequences=10"]), "short")
    assert [tokens_of(plan, np.array(shards, int)) for shards in ([], [0], [2], [0, 2])] == [
        0,
        512,
        256,
        768,
    ]
    assert tokens_of(plan, np.arange(3)) == plan.tokens == 1280


def test_a_changed_scan_is_refused_for_a_named_run_with_the_keys_that_differ(
    scan_file: Path, tmp_path: Path
) -> None:
    scan = load_scan(scan_file, [f"out={tmp_path}", "sequences=8"])
    run = run_here(scan)
    changed = load_scan(
        scan_file, [f"out={tmp_path}", "sequences=8", "seed=7", "input.distinct=true"]
    )
    with pytest.raises(RunError) as refused:
        make_plan(changed, "killed", run.run_id)
    assert "input.distinct (false, now true), seed (0, now 7); headcount rm " in str(refused.value)
    assert make_plan(changed, "killed").run.path != run.path
    assert make_plan(scan, "killed", run.run_id).run.path == run.path


def test_other_weights_under_the_same_name_are_refused(scan_file: Path, tmp_path: Path) -> None:
    scan = load_scan(scan_file, [f"out={tmp_path}", "sequences=8"])
    run = run_here(scan)
    manifest = json.loads(run.manifest_file.read_bytes())
    manifest["identity"]["model"]["sha256"] = "0" * 16
    local(run.manifest_file).write_text(json.dumps(manifest))
    with pytest.raises(
        RunError, match=r"something else: the model's files \(0000000000000000, now"
    ):
        make_plan(scan, "killed")
