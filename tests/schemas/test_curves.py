"""The `curves` table: profiles kept of every sequence, against the profiles that average them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from headcount.jobs.plan.cost import measure_cost
from headcount.jobs.plan.plan import Plan, make_plan, prepare_run
from headcount.jobs.run.loop import missing_shards
from headcount.jobs.upkeep.compaction import compact
from headcount.queries.ask.answers import run_query
from headcount.queries.open.connection import connect
from headcount.schemas.errors import MeasureError, ScanError
from headcount.schemas.files.tables import CURVES as CURVES_TABLE
from headcount.schemas.profiles import PROFILES
from headcount.schemas.scans.kinds import table_schema
from headcount.schemas.scans.measured_heads import MeasuredHeads
from headcount.schemas.scans.scan import parse_scan
from headcount.workers.measurements.finite_checks import check_lists
from headcount.workers.replica import Replica
from headcount.workers.shard import run_shard
from tests.toys import toy_models as toy
from tests.toys.toy_runs import data_file, local

T = 7
ENTRIES = {"dimension": 32, "component": 8, "pair of components": 36, "candidate": 4}
CURVES = [name for name, profile in PROFILES.items() if profile.axis != "pair"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.save_model(tmp_path_factory.mktemp("models") / "gpt2", toy.gpt2())


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return toy.repeating_tokens(T, batch=5)


@pytest.mark.parametrize("engine", ["fused", "dense"])
def test_the_mean_of_a_curve_is_its_profile(model: Path, tokens: np.ndarray, engine: str) -> None:
    fields = {
        "statistics": ["sink_alpha"],
        "engine": engine,
        "curves": CURVES,
        "profiles": CURVES,
        "batch_size": 2,
    }
    measured = toy.measure(model, tokens, **fields)
    assert set(measured.tables["curves"]) == set(CURVES)
    for name, aggregate in measured.means["profiles"].items():
        entries = ENTRIES.get(PROFILES[name].axis, T)
        assert measured.tables["curves"][name].shape == (5, 3, 4, entries)
        mean = measured.tables["curves"][name].astype(np.float64).mean(0)
        # Means of what heads share have no axis of heads; curves always do.
        shared = aggregate.mean[:, None] if aggregate.mean.ndim == 2 else aggregate.mean
        np.testing.assert_allclose(mean, np.broadcast_to(shared, mean.shape), rtol=1e-5, atol=1e-6)


def test_a_curve_of_one_sequence_has_that_sequence_s_numbers(
    model: Path, tokens: np.ndarray
) -> None:
    measured = toy.measure(
        model, tokens, statistics=["sink_alpha"], curves=["sink_attention_by_query"]
    )
    curve = measured.tables["curves"]["sink_attention_by_query"]
    np.testing.assert_allclose(curve[..., 0], 1, atol=1e-6)
    np.testing.assert_allclose(curve.mean(-1), measured.heads["sink_alpha"], atol=1e-6)


def begin(out: Path, model: Path, **changes: Any) -> Plan:
    fields = {
        "model": str(model),
        "out": str(out),
        "n_ctx": T,
        "sequences": 8,
        "sequences_per_shard": 3,
        "input": {"family": "uniform_random"},
        "interventions": ["none", "zero_query_bias"],
        "statistics": ["sink_alpha"],
        "curves": CURVES,
    }
    plan_of_curves = make_plan(parse_scan(fields | changes), "toy")
    prepare_run(plan_of_curves, "")
    replica = Replica(plan_of_curves.info, plan_of_curves.scan, "cpu")
    for shard in missing_shards(plan_of_curves).tolist():
        run_shard(replica, plan_of_curves.run, plan_of_curves.sequences.shard(shard))
    return plan_of_curves


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Plan:
    return begin(tmp_path_factory.mktemp("runs"), model)


def ask(plan: Plan, question: str) -> list[tuple[Any, ...]]:
    return list(run_query(connect(plan.run.path, lazily=True), question).rows())


def test_a_file_has_the_rows_of_heads_and_says_what_its_lists_are(plan: Plan) -> None:
    curves, heads = (
        pq.ParquetFile(data_file(plan.run, t, "none", 1))
        .read()
        .drop_columns(["run_id", "intervention"])
        for t in ("curves", "heads")
    )
    assert curves.schema.equals(
        table_schema(CURVES_TABLE, {"curves": [PROFILES[name] for name in CURVES]})
    )
    keys = ["input_family", "shard", "sequence", "layer", "head"]
    assert curves.select(keys).equals(heads.select(keys))
    metadata = curves.schema.field("sink_attention_by_query").metadata
    assert metadata[b"description"].startswith(b"By query, from 0: ")
    assert metadata[b"unit"] == b"probability"


def test_sql_finds_the_heads_of_a_list(plan: Plan) -> None:
    question = """
        SELECT
            max(abs(list_avg(sink_attention_by_query) - sink_alpha)),
            count(*),
            min(len(score_shift_by_key))
        FROM curves JOIN heads USING (run_id, intervention, sequence, layer, head)"""
    ((error, rows, entries),) = ask(plan, question)
    assert error < 1e-6
    assert (rows, entries) == (2 * 8 * 3 * 4, T)


def test_a_commit_lists_the_file_and_counts_the_rows_of_heads_alone(plan: Plan) -> None:
    commit = next(plan.run.commits())
    assert [f.table for f in commit.files] == ["heads", "sequences", "curves"] * 2
    assert commit.rows == 2 * 3 * 3 * 4
    assert set(plan.manifest.kinds["curves"]) == set(CURVES)


def test_compacting_keeps_every_row(tmp_path: Path, model: Path) -> None:
    plan = begin(tmp_path, model)
    before = sorted(ask(plan, "curves"), key=str)
    assert compact(plan.run).problems == []
    assert len(list(local(plan.run.path).glob("curves/intervention=*/*.parquet"))) == 2
    assert sorted(ask(plan, "curves"), key=str) == before


def test_the_plan_counts_their_bytes(tmp_path: Path, model: Path) -> None:
    without = begin(tmp_path / "a", model, curves=[])
    plan = begin(tmp_path / "b", model)
    assert measure_cost(plan).bytes_on_disk > 2 * measure_cost(without).bytes_on_disk
    assert ask(without, "curves") == []


def test_what_a_model_has_not_is_null(tmp_path: Path) -> None:
    rotary = toy.save_model(tmp_path / "neox", toy.family("GPTNeoXConfig"))
    plan = begin(tmp_path, rotary, curves=["score_shift_by_key"], interventions=["none"])
    assert set(ask(plan, "SELECT score_shift_by_key FROM curves")) == {(None,)}


def test_a_number_that_is_none_is_an_error_that_says_where() -> None:
    values = np.zeros((2, 3, 4, T), np.float32)
    values[1, 2, 3, 5] = np.inf
    with pytest.raises(
        MeasureError,
        match="layer 2, head 3: value_norm_by_key is not finite at key 5 for sequence 11 ",
    ):
        check_lists({"value_norm_by_key": values}, PROFILES, MeasuredHeads.every(3, 4), first=10)


def test_pairs_are_too_many_to_keep() -> None:
    with pytest.raises(
        ScanError, match="curves: score_by_pair has a number for every pair of a query and a key"
    ):
        toy.toy_scan(curves=["score_by_pair"])
