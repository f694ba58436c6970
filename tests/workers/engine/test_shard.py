"""What a shard writes: whole files, the right types, the keys of the run, and the record that makes
it count.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headcount.jobs.plan.begun_with import begun_precisions
from headcount.jobs.plan.plan import Plan, make_plan
from headcount.jobs.plan.run_plan import prepare_run
from headcount.jobs.resources import Resources
from headcount.jobs.run.measuring import measure_in_process
from headcount.schemas.errors import RunError, ScanError
from headcount.schemas.scans.scan_file import parse_scan
from headcount.workers.replica import Replica
from headcount.workers.shard import run_shard
from tests.toys.toy_runs import data_file, local


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A run of two shards of the attention-only model, done."""
    fields = {
        "model": "bundled:attn-only-2l-mini",
        "out": str(tmp_path_factory.mktemp("runs")),
        "n_ctx": 5,
        "sequences": 5,
        "sequences_per_shard": 3,
        "input": {"family": "uniform_random", "distinct": True},
    }
    prepared_plan = make_plan(parse_scan(fields), "small")
    prepare_run(prepared_plan, "# as submitted\n")
    replica = Replica(prepared_plan.info, prepared_plan.scan)
    for shard in range(2):
        run_shard(replica, prepared_plan.run, prepared_plan.sequences.shard(shard))
    return prepared_plan


def test_a_commit_says_how_long_a_shard_took(plan: Plan) -> None:
    first, second = plan.run.commits()
    assert all(0 < commit.compute_seconds < commit.seconds for commit in (first, second))
    # One replica, one shard after the other: it had nothing to wait for first, and then for the
    # first one's files.
    assert first.idle_seconds == 0
    assert second.idle_seconds >= first.seconds - first.compute_seconds - 1e-3


def test_a_run_goes_on_in_the_precision_it_was_begun_in(plan: Plan) -> None:
    assert begun_precisions(plan.run) == {"float32"}
    tf32_plan = replace(plan, scan=plan.scan.model_copy(update={"precision": "tf32"}))
    with pytest.raises(RunError, match=r"begun in float32, and precision = 'auto' means tf32"):
        next(measure_in_process(tf32_plan, np.array([0]), Resources(device="cpu")))


def test_a_run_directory_holds_what_the_design_says(plan: Plan) -> None:
    root = local(plan.run.path)
    names = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}
    files = [file for commit in plan.run.commits() for file in commit.files]
    commits = {f"commits/shard-00000{shard}.json" for shard in range(2)}
    assert names == commits | {"manifest.json", "scan.toml"} | {file.path for file in files}
    # No name is ever used for two contents.
    assert [file.path for file in files] == [
        f"{table}/intervention=none/shard-{shard:06d}-{files[2 * shard + i].digest[:8]}.parquet"
        for shard in range(2)
        for i, table in enumerate(("heads", "sequences"))
    ]
    assert plan.run.scan_file.read_bytes() == b"# as submitted\n"


def test_heads_has_one_row_per_sequence_layer_and_head(plan: Plan) -> None:
    table = pq.ParquetFile(data_file(plan.run, "heads", "none", 1)).read()
    assert table.num_rows == 2 * 2 * 8
    columns = [table[name].to_pylist() for name in ("layer", "sequence", "head")]
    assert list(zip(*columns, strict=True)) == list(product(range(2), (3, 4), range(8)))
    assert set(table["shard"].to_pylist()) == {1}
    assert table.column_names[:2] == ["run_id", "intervention"]
    assert set(table["run_id"].to_pylist()) == {plan.run.run_id}
    assert set(table["intervention"].to_pylist()) == {"none"}
    assert table.schema.field("layer").type == pa.int16()
    assert table.schema.field("entropy").type == pa.float32()


def test_undefined_is_null_and_never_zero(plan: Plan) -> None:
    heads = pq.ParquetFile(data_file(plan.run, "heads", "none", 0)).read()
    sequences = pq.ParquetFile(data_file(plan.run, "sequences", "none", 0)).read()
    # Distinct tokens: nothing repeats, so there is nothing to score.
    assert heads["induction_score"].null_count == heads.num_rows
    assert heads["match_coverage"].to_pylist() == [0.0] * heads.num_rows
    assert sequences["uniform_induction_score"].null_count == 3
    assert sequences["file"].null_count == 3
    uniform_baseline = pytest.approx((1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 4)
    assert sequences["uniform_sink_mass"].to_pylist() == [uniform_baseline] * 3
    assert sequences["tokens"].to_pylist() == plan.sequences.shard(0).tokens.tolist()
    assert sequences["n_tokens"].to_pylist() == [5, 5, 5]


def test_a_commit_counts_what_was_written(plan: Plan) -> None:
    first, second = plan.run.commits()
    assert (first.start, first.stop, first.rows, first.tokens, first.attempt) == (0, 3, 48, 15, 1)
    assert (second.start, second.stop, second.rows, second.tokens) == (3, 5, 32, 10)
    for file in first.files:
        assert (local(plan.run.path) / file.path).stat().st_size == file.bytes


def test_an_out_that_is_a_file_is_one_clear_line(tmp_path: Path, plan: Plan) -> None:
    (tmp_path / "out").write_text("")
    scan = plan.scan.model_copy(update={"out": str(tmp_path / "out")})
    with pytest.raises(ScanError, match=r"out: expected a directory, got '(.*)', and \1 is a file"):
        prepare_run(make_plan(scan, "small"), "")
