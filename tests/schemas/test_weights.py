"""Statistics of the weights alone: what is undefined, and the way through a shard into the view."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from headcount.jobs.plan.cost import measure_cost
from headcount.jobs.plan.plan import Plan, make_plan, prepare_run
from headcount.jobs.run.loop import missing_shards
from headcount.jobs.upkeep.compaction import compact
from headcount.queries.ask.answers import run_query
from headcount.queries.open.connection import connect
from headcount.schemas.errors import MeasureError, RunError, ScanError
from headcount.schemas.scans.kinds import schema_of_rows
from headcount.schemas.scans.scan import parse_scan
from headcount.schemas.weight_statistics import KIND, WEIGHT_STATISTICS, weight
from headcount.workers.replica import Replica
from headcount.workers.shard import run_shard
from tests.toys import toy_models as toy
from tests.toys.toy_runs import data_file, local

ALL = list(WEIGHT_STATISTICS)
OF_VALUES = {"value_output_norm", "value_composition", "copying_score"}
"""Statistics that read values alone, which every model has."""
T = 6


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.save_model(tmp_path_factory.mktemp("models") / "gpt2", toy.gpt2())


def table_of(path: Path, **changes: Any) -> pa.Table:
    fields = {"statistics": ["sink_alpha"], "weight_statistics": ALL}
    return toy.replica(path, **fields | changes).weights()["weights"]


def rows_of(table: pa.Table, name: str) -> list[dict[str, Any]]:
    return [row for row in table.to_pylist() if row["weight"] == name]


# InterventionMeasurements on a model


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("LlamaConfig", OF_VALUES),  # Neither biases nor positions.
        ("Qwen2Config", OF_VALUES | {"query_bias_norm"}),  # Biases, and keys that rotate.
    ],
)
def test_what_a_model_has_not_is_no_row(tmp_path: Path, family: str, expected: set[str]) -> None:
    path = toy.save_model(tmp_path / "model", toy.family(family, num_key_value_heads=2))
    assert set(table_of(path)["weight"].unique().to_pylist()) == expected
    profiles = ["score_shift_by_key", "attention_by_lag"]
    assert list(
        toy.measure(path, toy.repeating_tokens(T), profiles=profiles).means["profiles"]
    ) == ["attention_by_lag"]
    assert toy.measure(path, toy.repeating_tokens(T), profiles=profiles[:1]).means == {}


def test_an_mlp_that_is_no_module_leaves_the_effective_positions_undefined(tmp_path: Path) -> None:
    path = toy.save_model(
        tmp_path / "opt", toy.family("OPTConfig", ffn_dim=48, word_embed_proj_dim=32)
    )
    weight_names = table_of(path, engine="dense")["weight"].unique().to_pylist()
    assert set(weight_names) == set(ALL) - {
        "bias_position_cosine",
        "effective_position_norm",
        "first_effective_position",
    }


def test_the_cosine_with_a_bias_of_zero_is_null(gpt2: Path, tmp_path: Path) -> None:
    def silence(weights: dict[str, torch.Tensor]) -> None:
        weights["transformer.h.1.attn.c_attn.bias"][8:16] = 0

    silenced = toy.copy_of(gpt2, tmp_path / "a", lambda path: toy.change_weights(path, silence))
    rows = rows_of(table_of(silenced), "bias_position_cosine")
    assert {(row["layer"], row["head"]) for row in rows if row["value"] is None} == {(1, 1)}
    assert sum(row["value"] is None for row in rows) == toy.N_CTX


def test_weights_that_are_not_numbers_are_an_error(gpt2: Path, tmp_path: Path) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["transformer.h.1.attn.c_attn.bias"][3] = math.nan

    spoilt = toy.copy_of(gpt2, tmp_path / "spoilt", lambda path: toy.change_weights(path, spoil))
    with pytest.raises(MeasureError, match=r"layer 1: b_Q is not finite; expected finite numbers"):
        table_of(spoilt)


# Asked for


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        ScanError, match="unknown weight statistic 'query_bias_nrm': did you mean 'query_bias_norm'"
    ):
        toy.toy_scan(weight_statistics=["query_bias_nrm"])
    with pytest.raises(ScanError, match="weight_statistics: expected each name once, got"):
        toy.toy_scan(weight_statistics=["position_norm", "position_norm"])


def test_folded_weights_are_refused() -> None:
    with pytest.raises(
        ScanError,
        match=r"weight_statistics: .* they expect weight_processing = 'raw', got 'folded'",
    ):
        toy.toy_scan(weight_statistics=ALL, weight_processing="folded")
    assert toy.toy_scan(weight_processing="folded").names(KIND) == ()


def test_a_weight_statistic_names_weights() -> None:
    def broken(b_Qs: Any) -> Any:
        """Meaning.

        Formula
        """

    with pytest.raises(
        ValueError, match="weight statistic 'broken': unknown weight 'b_Qs': did you mean 'b_Q'"
    ):
        weight(axis="none", unit="", source="")(broken)
    assert "broken" not in WEIGHT_STATISTICS


# Written and read


def begin(out: Path, model: Path, **changes: Any) -> Plan:
    fields = {
        "model": str(model),
        "out": str(out),
        "n_ctx": T,
        "sequences": 5,
        "sequences_per_shard": 3,
        "input": {"family": "uniform_random"},
        "interventions": ["none", "zero_query_bias"],
        "statistics": ["sink_alpha"],
        "weight_statistics": ALL,
    }
    plan_of_weights = make_plan(parse_scan(fields | changes), "toy")
    prepare_run(plan_of_weights, "")
    return plan_of_weights


def measure_shards(plan: Plan) -> Plan:
    replica = Replica(plan.info, plan.scan, "cpu")
    for shard in missing_shards(plan).tolist()[::-1]:
        run_shard(replica, plan.run, plan.sequences.shard(shard))
    return plan


def ask(path: Path, question: str) -> list[tuple[Any, ...]]:
    return list(run_query(connect(path, lazily=True), question).rows())


def files_of(plan: Plan) -> list[str]:
    run = local(plan.run.path)
    # Without the digest of the content.
    return [
        str(file.relative_to(run))[: -len("1a2b3c4d.parquet")]
        for file in sorted(run.glob("weights/*/*"))
    ]


def test_the_measured_heads_are_paired_with_every_earlier_head(gpt2: Path) -> None:
    def pairs(**changes: Any) -> dict[tuple[int, int, int, int], float]:
        rows = rows_of(table_of(gpt2, **changes), "key_composition")
        return {
            (row["layer"], row["head"], row["earlier_layer"], row["earlier_head"]): row["value"]
            for row in rows
        }

    every = pairs()
    assert set(every) == {
        (layer, head, earlier, earlier_head)
        for layer in range(3)
        for head in range(4)
        for earlier in range(layer)
        for earlier_head in range(4)
    }
    some = pairs(heads=["L2H1", "L1H3"])
    assert some == {key: every[key] for key in every if key[:2] in ((2, 1), (1, 3))}


def test_a_head_that_reads_what_an_earlier_one_writes_composes_with_it(
    gpt2: Path, tmp_path: Path
) -> None:
    """L0H1 writes one vector; the keys of L1H2 read it alone, those of L1H3 everything but it."""
    written = torch.zeros(32)
    written[:2] = torch.tensor([1.0, -1.0])

    def compose(weights: dict[str, torch.Tensor]) -> None:
        writes = weights["transformer.h.0.attn.c_proj.weight"]  # [head·d_head d_model]
        reads = weights["transformer.h.1.attn.c_attn.weight"]  # [d_model 3·head·d_head]
        writes[8:16] = writes[8:16, :1] * written
        weights["transformer.h.1.ln_1.weight"][:] = 0.5
        reads[:, 48:56] = written[:, None] * reads[:1, 48:56]
        reads[:2, 56:64] = 0

    path = toy.copy_of(gpt2, tmp_path / "a", lambda path: toy.change_weights(path, compose))
    table = table_of(path, weight_statistics=["key_composition"])
    values = {
        row["head"]: row["value"]
        for row in table.to_pylist()
        if (row["layer"], row["earlier_layer"], row["earlier_head"]) == (1, 0, 1)
    }
    assert values[2] == pytest.approx(1, rel=1e-6)
    assert values[3] == pytest.approx(0, abs=1e-6)


# A run


def test_a_run_has_them_once_of_the_untouched_model(tmp_path: Path, gpt2: Path) -> None:
    plan = measure_shards(begin(tmp_path, gpt2))
    assert files_of(plan) == ["weights/intervention=none/shard-000000-"]
    first, second = plan.run.commits()
    assert [f.table for f in first.files] == ["heads", "sequences"] * 2 + ["weights"]
    assert [f.table for f in second.files] == ["heads", "sequences"] * 2
    assert first.rows == 3 * 3 * 4 * 2
    file = local(data_file(plan.run, "weights", "none", 0))
    table = pq.ParquetFile(file).read().drop_columns(["run_id", "intervention"])
    assert table.schema.equals(schema_of_rows(KIND, WEIGHT_STATISTICS.values()))
    assert table["weight"].unique().to_pylist() == list(plan.manifest.kinds[KIND.field]) == ALL
    # Engine and precision change nothing.
    assert table.equals(table_of(gpt2, engine="dense", precision="float64"))
    described = dict(
        ask(
            local(plan.run.path),
            "SELECT column_name, comment FROM duckdb_columns() "
            "WHERE table_name = 'weights' AND schema_name = 'main'",
        )
    )
    assert all(described.values())
    assert described["layer"].endswith("NULL for values that a model has only once.")

    # A plan counts the file once.
    without = make_plan(plan.scan.model_copy(update={"weight_statistics": ()}), "toy")
    bytes_ = [measure_cost(p, passes=2, patience=0).bytes_on_disk for p in (plan, without)]
    assert bytes_[0] - bytes_[1] == pytest.approx(file.stat().st_size, rel=0.1)

    # A lost file makes its shard missing, and a resume brings it back.
    before, rows = file.read_bytes(), ask(local(plan.run.path), "weights")
    assert len(rows) == len(table)
    file.unlink()
    assert missing_shards(plan).tolist() == [0]
    assert ask(local(plan.run.path), "weights") == []
    measure_shards(plan)
    assert missing_shards(plan).tolist() == []
    assert file.read_bytes() == before

    # Compaction leaves it, again and again.
    for _ in range(2):
        assert compact(plan.run).problems == []
        assert files_of(plan) == ["weights/intervention=none/shard-000000-"]
        assert ask(local(plan.run.path), "weights") == rows
    assert missing_shards(plan).tolist() == []


def test_a_scan_of_interventions_alone_has_those_that_it_names(tmp_path: Path, gpt2: Path) -> None:
    changes = {"interventions": ["zero_query_bias"], "weight_statistics": ["query_bias_norm"]}
    plan = measure_shards(begin(tmp_path / "a", gpt2, **changes))
    assert files_of(plan) == ["weights/intervention=none/shard-000000-"]
    file = pq.ParquetFile(data_file(plan.run, "weights", "none", 0))
    assert "earlier_head" not in file.schema_arrow.names
    question = "SELECT count(*), min(value) > 0 FROM weights"
    assert ask(local(plan.run.path), question) == [(3 * 4, True)]
    other = parse_scan(plan.scan.model_dump(mode="json") | {"weight_statistics": []})
    assert other.fingerprint != plan.scan.fingerprint
    problem = r"weight statistic query_bias_norm \(no longer\), weight_statistics \("
    with pytest.raises(RunError, match=problem):
        make_plan(other, "toy", plan.run.run_id)
    bare = measure_shards(begin(tmp_path / "b", gpt2, weight_statistics=[]))
    assert files_of(bare) == ask(local(bare.run.path), "weights") == []
    assert "weight_statistics" not in bare.scan.record
