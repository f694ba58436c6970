"""Statistics of the weights alone: exact numbers, the law they obey, and the way through a shard
into the view.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from headcount.jobs.plan.cost import measure_cost
from headcount.jobs.plan.plan import Plan, make_plan, prepare_run
from headcount.jobs.run.loop import missing_shards
from headcount.jobs.upkeep.compaction import compact
from headcount.queries.ask.answers import run_query
from headcount.queries.ask.asking import open_runs
from headcount.queries.open.connection import connect
from headcount.schemas.errors import MeasureError, QueryError, RunError, ScanError
from headcount.schemas.scans.kinds import schema_of_rows
from headcount.schemas.scans.scan import parse_scan
from headcount.schemas.weight_statistics import KIND, WEIGHT_STATISTICS, weight
from headcount.workers.replica import Replica
from headcount.workers.shard import run_shard
from tests.toys import toy_models as toy
from tests.toys.toy_runs import data_file, local, read_manifest, write_run

ALL = list(WEIGHT_STATISTICS)
OF_VALUES = {"value_output_norm", "value_composition", "copying_score"}
"""Statistics that read values alone, which every model has."""
T = 6

Raw = dict[str, np.ndarray]
"""`b_Q [layer head d_head]`, `W_K [layer head d_model d_head]`, `W_pos` and `EPE` `[pos d_model]`,
in float64.
"""


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.save_model(tmp_path_factory.mktemp("models") / "gpt2", toy.gpt2())


@pytest.fixture(scope="module")
def legacy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.save_legacy(tmp_path_factory.mktemp("models") / "legacy", "safetensors")


def raw_gpt2(path: Path) -> Raw:
    """From the file's own tensors: `c_attn` is `[d_model 3·d_model]`, queries first, then keys,
    head by head.
    """
    state = {name: t.double().numpy() for name, t in load_file(path / "model.safetensors").items()}
    heads, d_model, d_head = 4, 32, 8
    b_q, w_k = [], []
    for layer in range(3):
        attn = f"transformer.h.{layer}.attn.c_attn"
        b_q.append(state[f"{attn}.bias"][:d_model].reshape(heads, d_head))
        w_k.append(
            state[f"{attn}.weight"][:, d_model : 2 * d_model]
            .reshape(d_model, heads, d_head)
            .swapaxes(0, 1)
        )
    positions, mlp = state["transformer.wpe.weight"], "transformer.h.0.mlp"
    x = positions @ state[f"{mlp}.c_fc.weight"] + state[f"{mlp}.c_fc.bias"]
    gelu = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    effective = positions + gelu @ state[f"{mlp}.c_proj.weight"] + state[f"{mlp}.c_proj.bias"]
    return {"b_Q": np.stack(b_q), "W_K": np.stack(w_k), "W_pos": positions, "EPE": effective}


def raw_legacy(path: Path) -> Raw:
    """An attention-only model has no MLP, so its effective positions are its positions."""
    state = {name: t.double().numpy() for name, t in load_file(path / "model.safetensors").items()}
    weights = {
        name: np.stack([state[f"blocks.{la}.attn.{name}"] for la in range(2)])
        for name in ("b_Q", "W_K")
    }
    return weights | {"W_pos": state["pos_embed.W_pos"], "EPE": state["pos_embed.W_pos"]}


def expected_of(raw: Raw) -> Raw:
    """Every statistic, by its formula."""
    keys = np.einsum("jd,lhde->lhje", raw["EPE"], raw["W_K"])
    centred = raw["W_pos"] - raw["W_pos"].mean(-1, keepdims=True)
    lengths = np.linalg.norm(keys, axis=-1) * np.linalg.norm(raw["b_Q"], axis=-1)[..., None]
    return {
        "query_bias_norm": np.sqrt((raw["b_Q"] ** 2).sum(-1)),
        "bias_key_coupling": np.einsum("lhe,lhde->lhd", raw["b_Q"], raw["W_K"]),
        "bias_position_cosine": np.einsum("lhje,lhe->lhj", keys, raw["b_Q"]) / lengths,
        "position_norm": np.sqrt((raw["W_pos"] ** 2).sum(-1)),
        "effective_position_norm": np.sqrt((raw["EPE"] ** 2).sum(-1)),
        "first_effective_position": raw["EPE"][0],
        "centred_position_norm": np.sqrt(raw["W_pos"].var(-1) * raw["W_pos"].shape[1]),
        "position_product_first": centred @ centred[0],
        "position_product_second": centred @ centred[1],
        **{
            f"position_component_{1 + c}": coordinates
            for c, coordinates in enumerate(components(centred))
        },
    }


def components(centred: np.ndarray) -> np.ndarray:
    """Coordinates `[component pos]` along the three largest eigenvectors of the covariance of
    coordinates.
    """
    rows = centred - centred.mean(0)
    _, vectors = np.linalg.eigh(rows.T @ rows)
    coordinates_of_rows = (rows @ vectors[:, -3:]).T[::-1]
    return np.stack([line * np.sign(line[np.abs(line).argmax()]) for line in coordinates_of_rows])


def table_of(path: Path, **changes: Any) -> pa.Table:
    fields = {"statistics": ["sink_alpha"], "weight_statistics": ALL}
    return toy.replica(path, **fields | changes).weights()["weights"]


def rows_of(table: pa.Table, name: str) -> list[dict[str, Any]]:
    return [row for row in table.to_pylist() if row["weight"] == name]


def check(table: pa.Table, expected: Raw) -> None:
    assert table.schema.equals(schema_of_rows(KIND, WEIGHT_STATISTICS.values()))
    for name, values in expected.items():
        rows = rows_of(table, name)
        assert len(rows) == values.size, name
        axis = WEIGHT_STATISTICS[name].axis
        keys = ["layer", "head"] if values.ndim >= 2 or axis == "none" else []
        keys += [] if axis == "none" else [axis]
        for row in rows:
            assert {
                k for k in ("layer", "head", "position", "dimension") if row[k] is not None
            } == set(keys)
            assert row["value"] == pytest.approx(
                values[tuple(row[k] for k in keys)], rel=1e-11, abs=1e-13
            )
        assert rows == sorted(rows, key=lambda row: [row[k] for k in keys])


# InterventionMeasurements on a model


def test_a_gpt2_has_the_numbers_of_its_tensors(gpt2: Path) -> None:
    table = table_of(gpt2)
    check(table, expected_of(raw_gpt2(gpt2)))
    assert table["weight"].unique().to_pylist() == ALL


def test_an_attention_only_model_has_the_numbers_of_its_tensors(legacy: Path) -> None:
    check(table_of(legacy), expected_of(raw_legacy(legacy)))


@pytest.mark.parametrize(
    "changes", [{"engine": "dense"}, {"precision": "bfloat16"}, {"precision": "float64"}]
)
def test_engine_and_precision_change_nothing(gpt2: Path, changes: dict[str, str]) -> None:
    check(table_of(gpt2, **changes), expected_of(raw_gpt2(gpt2)))


def test_the_shift_of_a_key_is_its_input_times_the_coupling(gpt2: Path) -> None:
    tokens = toy.repeating_tokens(T, batch=3)
    profiles = ["score_shift_by_key", "score_shift_lead_by_key"]
    replica = toy.replica(
        gpt2,
        precision="float64",
        profiles=profiles,
        statistics=["sink_alpha"],
        weight_statistics=ALL,
    )
    inputs: list[torch.Tensor] = []

    def record_output(_module: object, _arguments: object, out: torch.Tensor) -> None:
        inputs.append(out)

    norms = [block.get_submodule("ln_1") for block in replica.model.blocks]
    hooks = [norm.register_forward_hook(record_output) for norm in norms]
    measured = replica.measure(tokens).means["profiles"]
    for hook in hooks:
        hook.remove()
    coupling = np.zeros((3, 4, 32))
    for row in rows_of(replica.weights()["weights"], "bias_key_coupling"):
        coupling[row["layer"], row["head"], row["dimension"]] = row["value"]
    shifts = np.einsum("lbkd,lhd->blhk", torch.stack(inputs).numpy(), coupling)
    np.testing.assert_allclose(
        measured["score_shift_by_key"].mean, shifts.mean(0), rtol=1e-9, atol=1e-11
    )
    lead = shifts - shifts.min(-1, keepdims=True)
    np.testing.assert_allclose(
        measured["score_shift_lead_by_key"].mean, lead.mean(0), rtol=1e-9, atol=1e-11
    )


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


def test_a_scan_without_them_is_recorded_as_before_there_were_any() -> None:
    assert "weight_statistics" not in toy.toy_scan().record
    assert toy.toy_scan(weight_statistics=["position_norm"]).record["weight_statistics"] == [
        "position_norm"
    ]


def test_they_come_in_registry_order() -> None:
    assert [s.name for s in KIND.select(reversed(ALL))] == ALL


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


@pytest.fixture
def plan(tmp_path: Path, gpt2: Path) -> Plan:
    return measure_shards(begin(tmp_path / "runs", gpt2))


def ask(path: Path, question: str) -> list[tuple[Any, ...]]:
    return list(run_query(connect(path, lazily=True), question).rows())


def files_of(plan: Plan) -> list[str]:
    run = local(plan.run.path)
    # Without the digest of the content.
    return [
        str(file.relative_to(run))[: -len("1a2b3c4d.parquet")]
        for file in sorted(run.glob("weights/*/*"))
    ]


def test_a_run_has_them_once_of_the_untouched_model(plan: Plan, gpt2: Path) -> None:
    assert files_of(plan) == ["weights/intervention=none/shard-000000-"]
    first, second = plan.run.commits()
    assert [f.table for f in first.files] == ["heads", "sequences"] * 2 + ["weights"]
    assert [f.table for f in second.files] == ["heads", "sequences"] * 2
    assert first.rows == 3 * 3 * 4 * 2
    table = pq.ParquetFile(data_file(plan.run, "weights", "none", 0)).read()
    assert set(table["intervention"].to_pylist()) == {"none"}
    check(table.drop_columns(["run_id", "intervention"]), expected_of(raw_gpt2(gpt2)))
    assert plan.manifest.kinds["weight_statistics"]["bias_key_coupling"]["axis"] == "dimension"
    assert set(plan.manifest.kinds["weight_statistics"]) == set(ALL)


def test_a_run_without_pairs_of_heads_has_no_columns_for_them(tmp_path: Path, gpt2: Path) -> None:
    changes = {"weight_statistics": ["query_bias_norm"], "statistics": ["sink_alpha"]}
    run = measure_shards(begin(tmp_path, gpt2, **changes)).run
    file = pq.ParquetFile(data_file(run, "weights", "none", 0))
    assert "earlier_head" not in file.schema_arrow.names
    assert len(ask(local(run.path), "SELECT value FROM weights")) == 3 * 4


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


def test_a_query_reads_them_and_every_column_is_described(plan: Plan, gpt2: Path) -> None:
    expected = expected_of(raw_gpt2(gpt2))
    question = (
        "SELECT intervention, value FROM weights WHERE weight = '{}' "
        "ORDER BY layer, head, position, dimension"
    )
    runs = open_runs(plan.run.path)
    for name, values in expected.items():
        rows = runs.rows(question.format(name))
        assert {row[0] for row in rows} == {"none"}
        np.testing.assert_allclose([row[1] for row in rows], values.ravel(), rtol=1e-11, atol=1e-13)
    sql = (
        "SELECT column_name, comment FROM duckdb_columns() "
        "WHERE table_name = 'weights' AND schema_name = 'main'"
    )
    described = dict(runs.rows(sql))
    assert [name for name, comment in described.items() if not comment] == []
    assert described["layer"].endswith("NULL for values that a model has only once.")


def test_a_scan_that_measures_only_edits_has_them_too(tmp_path: Path, gpt2: Path) -> None:
    edited = measure_shards(begin(tmp_path, gpt2, interventions=["zero_query_bias"]))
    assert files_of(edited) == ["weights/intervention=none/shard-000000-"]
    assert ask(
        local(edited.run.path),
        "SELECT min(value) > 0 FROM weights WHERE weight = 'query_bias_norm'",
    ) == [(True,)]


def test_a_scan_without_them_writes_none(tmp_path: Path, gpt2: Path) -> None:
    bare = measure_shards(begin(tmp_path, gpt2, weight_statistics=[]))
    assert files_of(bare) == []
    assert ask(local(bare.run.path), "weights") == []


def test_a_lost_file_makes_its_shard_missing_and_a_resume_brings_it_back(plan: Plan) -> None:
    file = local(data_file(plan.run, "weights", "none", 0))
    before = file.read_bytes()
    file.unlink()
    assert missing_shards(plan).tolist() == [0]
    assert ask(local(plan.run.path), "weights") == []
    measure_shards(plan)
    assert missing_shards(plan).tolist() == []
    assert file.read_bytes() == before


def test_compacting_leaves_the_file(plan: Plan) -> None:
    before = ask(local(plan.run.path), "weights")
    assert compact(plan.run).problems == []
    assert files_of(plan) == ["weights/intervention=none/shard-000000-"]
    assert len(list(local(plan.run.path).glob("heads/intervention=*/*.parquet"))) == 2
    assert ask(local(plan.run.path), "weights") == before
    assert missing_shards(plan).tolist() == []
    assert compact(plan.run).problems == []
    assert ask(local(plan.run.path), "weights") == before


def test_a_run_that_measured_others_is_not_gone_on_with(tmp_path: Path, gpt2: Path) -> None:
    first = begin(tmp_path, gpt2, weight_statistics=["position_norm"])
    other = parse_scan(first.scan.model_dump(mode="json") | {"weight_statistics": []})
    assert other.fingerprint != first.scan.fingerprint
    with pytest.raises(
        RunError,
        match=r"weight statistic position_norm \(no longer\), weight_statistics \(",
    ):
        make_plan(other, "toy", first.run.run_id)


def test_what_a_plan_costs_counts_the_file_once(plan: Plan) -> None:
    without = make_plan(plan.scan.model_copy(update={"weight_statistics": ()}), "toy")
    bytes_ = [measure_cost(p, passes=2, patience=0).bytes_on_disk for p in (plan, without)]
    size = local(data_file(plan.run, "weights", "none", 0)).stat().st_size
    assert bytes_[0] - bytes_[1] == pytest.approx(size, rel=0.1)


def test_two_formulas_of_one_name_are_refused(tmp_path: Path) -> None:
    entry = {"weight": "position_norm", "position": 0, "value": 1.0}
    runs = [
        write_run(tmp_path, name, {"sink_mass": lambda row: 0.5}, weights=[entry])
        for name in ("a", "b")
    ]
    assert ask(tmp_path, "SELECT run_id, position, value FROM weights ORDER BY run_id") == [
        ("a", 0, 1),
        ("b", 0, 1),
    ]
    manifest = local(runs[1].manifest_file)
    fingerprint = read_manifest(runs[1])["kinds"]["weight_statistics"]["position_norm"][
        "fingerprint"
    ]
    manifest.write_text(manifest.read_text().replace(fingerprint, "other"))
    with pytest.raises(
        QueryError, match="weight statistic 'position_norm' has one formula in run a"
    ):
        connect(tmp_path)
