"""Profiles: how means of batches are merged, what is undefined, and the way from a shard to the
views.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from headcount.jobs.plan.cost import measure_cost
from headcount.jobs.plan.plan import Plan, make_plan, prepare_run
from headcount.jobs.run.loop import missing_shards
from headcount.jobs.upkeep.compaction import compact
from headcount.queries.ask.answers import run_query
from headcount.queries.open.connection import connect as connect_eagerly
from headcount.schemas.errors import MeasureError, ModelError, QueryError, RunError
from headcount.schemas.pattern import TIE
from headcount.schemas.profiles import KIND, PROFILES, columns_and_diagonals
from headcount.schemas.profiles.columns_and_diagonals import CANDIDATES
from headcount.schemas.scans.kinds import schema_of_rows
from headcount.schemas.scans.measured_heads import MeasuredHeads
from headcount.schemas.scans.scan import parse_scan
from headcount.workers.engine.dense_pattern import DensePattern
from headcount.workers.measurements.finite_checks import check_means
from headcount.workers.measurements.profile_means import (
    Aggregate,
    aggregates,
    count_mean_m2,
    means_table,
    merge,
)
from headcount.workers.model.attention_facts import AttentionFacts
from headcount.workers.model.rotations import Rotation
from headcount.workers.replica import InterventionMeasurements, Replica
from headcount.workers.shard import run_shard
from tests.toys import toy_models as toy
from tests.toys.toy_runs import data_file, local, read_manifest, write_run

# All questions here go through `run_query`, which makes the views that they name.
connect = partial(connect_eagerly, lazily=True)

T, SHARDS, PER_SHARD = 7, 3, 5
D_MODEL, D_HEAD = 32, 8
COMPONENTS = {"component": D_HEAD, "pair of components": D_HEAD * (D_HEAD + 1) // 2}
PLACES = ("query", "key", "lag", "candidate", "dimension", "component", "other_component")
"""Columns that say where an entry lies."""
SHARED = {name for name in PROFILES if "resid" in name}
"""Profiles that all heads of a layer share."""
ALL = list(PROFILES)
EVERY = MeasuredHeads.every(3, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.save_model(tmp_path_factory.mktemp("models") / "gpt2", toy.gpt2())


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return toy.repeating_tokens(T, batch=11)


@pytest.fixture(scope="module")
def measured(model: Path, tokens: np.ndarray) -> InterventionMeasurements:
    return measure(model, tokens)


def measure(model: Path, tokens: np.ndarray, **changes: Any) -> InterventionMeasurements:
    return toy.measure(
        model, tokens, **{"profiles": ALL, "statistics": ["sink_alpha", "value_norm"]} | changes
    )


def aggregate_by_hand(values: np.ndarray) -> Aggregate:
    """The aggregate of all rows at once."""
    count = np.full(values.shape[1:], len(values))
    return Aggregate(count, values.mean(0), ((values - values.mean(0)) ** 2).sum(0))


def assert_same(actual: Aggregate, expected: Aggregate) -> None:
    """The count exactly, the mean to 1e-9, M2 to 1e-6 of its size."""
    np.testing.assert_array_equal(actual.count, expected.count)
    np.testing.assert_allclose(actual.mean, expected.mean, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(actual.m2, expected.m2, rtol=1e-6, atol=1e-15)


# Aggregates


def test_the_aggregate_of_batches_is_the_aggregate_of_all_rows() -> None:
    rows = np.random.default_rng(0).normal(1e4, 1e-2, (101, 2, 3))
    batches = np.split(rows, [1, 3, 40, 100])
    assert_same(
        merge([{"p": aggregate_by_hand(batch)} for batch in batches])["p"], aggregate_by_hand(rows)
    )


def test_a_number_that_is_not_finite_is_an_error_that_says_where() -> None:
    mean = torch.ones(3, 3, 4, 10, dtype=torch.float64)
    mean[1, 1, 2, 4] = math.inf
    message = (
        r"layer 1, head 2: profile score_by_pair is not finite at query 2, key 1 for one of the "
        "sequences 8 to 10 of the shard; expected finite numbers"
    )
    with pytest.raises(MeasureError, match=message):
        check_means(aggregates({"score_by_pair": mean}), PROFILES, EVERY, first=8, sequences=3)
    shared = torch.ones(3, 3, 10, dtype=torch.float64)
    shared[1, 2, 9] = math.inf
    with pytest.raises(
        MeasureError, match=r"layer 2: profile resid_pre_norm_by_key is not finite at key 9 "
    ):
        check_means(
            aggregates({"resid_pre_norm_by_key": shared}), PROFILES, EVERY, first=0, sequences=1
        )


def test_weights_that_are_not_numbers_are_an_error(
    model: Path, tmp_path: Path, tokens: np.ndarray
) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["transformer.h.2.mlp.c_proj.bias"][:] = math.inf

    spoilt = toy.copy_of(model, tmp_path / "spoilt", lambda path: toy.change_weights(path, spoil))
    fields = {"profiles": ["resid_post_norm_by_key"], "statistics": ["sink_alpha"]}
    with pytest.raises(
        MeasureError, match="layer 2: profile resid_post_norm_by_key is not finite at key 0"
    ):
        toy.measure(spoilt, tokens, **fields)


# InterventionMeasurements on a model


@pytest.mark.parametrize("size", [1, 4])
def test_the_batch_size_changes_nothing(
    model: Path, tokens: np.ndarray, measured: InterventionMeasurements, size: int
) -> None:
    means = measure(model, tokens, batch_size=size).means["profiles"]
    for name, aggregate in measured.means["profiles"].items():
        assert np.array_equal(means[name].count, aggregate.count)
        np.testing.assert_allclose(
            means[name].mean, aggregate.mean, rtol=1e-5, atol=1e-6, err_msg=name
        )
        np.testing.assert_allclose(means[name].m2, aggregate.m2, rtol=1e-3, atol=1e-5, err_msg=name)


def test_one_token_has_one_entry_of_each(model: Path) -> None:
    profiles = measure(model, np.array([[5], [6]], np.int32)).means["profiles"]
    entries = {name: aggregate.mean.shape[-1] for name, aggregate in profiles.items()}
    of_one_token = {"dimension": D_MODEL, "candidate": 4} | COMPONENTS
    assert entries == {name: of_one_token.get(PROFILES[name].axis, 1) for name in ALL}
    rows_of_layer = sum(n if name in SHARED else 4 * n for name, n in entries.items())
    assert means_table(KIND, 0, profiles, EVERY).num_rows == 3 * rows_of_layer


# Written and read


def begin(out: Path, model: Path, **changes: Any) -> Plan:
    fields = {
        "model": str(model),
        "out": str(out),
        "n_ctx": T,
        "sequences": SHARDS * PER_SHARD - 2,
        "sequences_per_shard": PER_SHARD,
        "input": {"family": "uniform_random"},
        "interventions": ["none", "zero_query_bias"],
        "statistics": ["sink_alpha"],
        "profiles": ALL,
    }
    plan_of_profiles = make_plan(parse_scan(fields | changes), "toy")
    prepare_run(plan_of_profiles, "")
    return plan_of_profiles


def measure_shards(plan: Plan) -> Plan:
    replica = Replica(plan.info, plan.scan, "cpu")
    for shard in missing_shards(plan).tolist():
        run_shard(replica, plan.run, plan.sequences.shard(shard))
    return plan


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Plan:
    return measure_shards(begin(tmp_path_factory.mktemp("runs"), model))


def ask(connection: duckdb.DuckDBPyConnection, question: str) -> list[tuple[Any, ...]]:
    return list(run_query(connection, question).rows())


def test_a_file_says_what_its_columns_mean(plan: Plan) -> None:
    table = pq.ParquetFile(data_file(plan.run, "profiles", "none", 1)).read()
    rows = table.drop_columns(["run_id", "intervention"])
    assert rows.schema.equals(schema_of_rows(KIND, PROFILES.values()))
    assert rows.column_names == [
        "shard", "layer", "head", "profile", "query", "key", "lag", "count", "mean", "m2",
        "candidate", "dimension", "component", "other_component",
    ]  # fmt: skip
    assert table.schema.field("m2").metadata[b"description"].startswith(b"Sum over the sequences")
    assert table["profile"].unique().to_pylist() == ALL
    assert set(table["shard"].to_pylist()) == {1}


def test_runs_from_before_there_were_dimensions_are_read_beside_others(
    tmp_path: Path, model: Path
) -> None:
    names = ["attention_by_lag", "sink_resid_post_by_dimension"]
    runs = [
        measure_shards(begin(tmp_path, model, profiles=names[: 1 + i], interventions=["none"])).run
        for i in range(2)
    ]
    columns = [
        pq.ParquetFile(data_file(run, "profiles", "none", 0)).schema_arrow.names for run in runs
    ]
    assert ["dimension" in names_of_run for names_of_run in columns] == [False, True]
    question = "SELECT profile, count(*), count(lag), count(dimension) FROM profile_means"
    lags, dimensions = (names[0], 84, 84, 0), (names[1], 96, 0, 96)
    by_run = f"{question} WHERE run_id = '{runs[1].run_id}' GROUP BY ALL ORDER BY ALL"
    assert ask(connect(tmp_path), by_run) == [lags, dimensions]
    assert ask(connect(runs[0].path), f"{question} GROUP BY ALL") == [lags]


def test_an_entry_lies_where_its_axes_say(plan: Plan) -> None:
    table = pq.ParquetFile(data_file(plan.run, "profiles", "none", 0)).read()
    for name, profile in PROFILES.items():
        rows = table.filter(pc.equal(table["profile"], name))  # pyright: ignore[reportAttributeAccessIssue]
        pairs = {
            "pair": ["query", "key"],
            "pair of components": ["component", "other_component"],
        }
        axes = pairs.get(profile.axis, [profile.axis])
        assert [a for a in PLACES if rows[a].null_count == 0] == axes
        assert all(rows[a].null_count == len(rows) for a in {*PLACES} - set(axes))
        assert rows["head"].null_count == (len(rows) if name in SHARED else 0)
    pairs = table.filter(pc.equal(table["profile"], "score_by_pair"))  # pyright: ignore[reportAttributeAccessIssue]
    first = pairs.slice(0, 4).select(["query", "key"]).to_pylist()
    assert first == [{"query": q, "key": k} for q, k in ((0, 0), (1, 0), (1, 1), (2, 0))]
    moments = table.filter(pc.equal(table["profile"], "query_second_moment"))  # pyright: ignore[reportAttributeAccessIssue]
    first = moments.slice(6, 4).select(["component", "other_component"]).to_pylist()
    places = ((0, 6), (0, 7), (1, 1), (1, 2))
    assert first == [{"component": i, "other_component": j} for i, j in places]


def test_a_commit_lists_the_file_and_does_not_count_its_rows(plan: Plan) -> None:
    commit = next(plan.run.commits())
    assert [f.table for f in commit.files] == ["heads", "sequences", "profiles"] * 2
    assert commit.rows == 2 * PER_SHARD * 3 * 4
    assert plan.manifest.kinds["profiles"]["score_by_pair"]["axis"] == "pair"
    assert set(plan.manifest.kinds["profiles"]) == set(ALL)


ENTRY = {"layer": 0, "head": 1, "profile": "attention_by_lag", "lag": 2}
ENTRY |= {"count": 2, "mean": 2.0, "m2": 2.0}


def test_sql_merges_exactly(tmp_path: Path) -> None:
    # Shard 0: 1, 3 (mean 2, M2 2). Shard 1: 5, 5, 8 (mean 6, M2 6). Together: mean 4.4, M2 = 124 -
    # 5·4.4² = 27.2.
    shards = [ENTRY, ENTRY | {"count": 3, "mean": 6.0, "m2": 6.0}]
    shared = {"layer": 0, "profile": "resid_pre_norm_by_key", "key": 0}
    shared |= {"count": 1, "mean": 7.0, "m2": 0.0}
    run = write_run(
        tmp_path, "a-1", {"sink_mass": lambda row: 0.5},
        profiles=lambda shard: [shards[shard], *[shared][: 1 - shard]],
    )  # fmt: skip
    mean = pytest.approx(4.4, rel=1e-12)
    sd = pytest.approx(math.sqrt(27.2 / 4))
    error = pytest.approx(math.sqrt(27.2 / 20))
    nulls = [None] * 4  # dimension, component, other_component, candidate
    keys = ("a-1", "toy", 5, "none")
    assert ask(connect(run.path), "profile_means") == [
        # layer, head, label, query, key, lag; other places; count, mean, sd, standard_error, groups
        (*keys, "attention_by_lag", 0, 1, "L0H1", None, None, 2, *nulls, 5, mean, sd, error, 5),
        (
            *keys,
            "resid_pre_norm_by_key",
            0,
            *[None] * 3,
            0,
            None,
            *nulls,
            1,
            7.0,
            None,
            None,
            1,
        ),
    ]


def test_runs_with_and_without_profiles_are_read_together(tmp_path: Path) -> None:
    write_run(tmp_path, "a-1", {"sink_mass": lambda row: 0.5})
    write_run(tmp_path, "b-1", {"sink_mass": lambda row: 0.5}, profiles=lambda shard: [ENTRY])
    connection = connect(tmp_path)
    assert ask(connection, "SELECT run_id, shard, mean FROM profiles ORDER BY shard") == [
        ("b-1", 0, 2),
        ("b-1", 1, 2),
    ]
    assert ask(connection, "SELECT count(*) FROM heads") == [(2 * 4 * 2 * 3,)]


def test_two_formulas_of_one_profile_are_refused(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path, n, {"sink_mass": lambda row: 0.5}, profiles=lambda _: [ENTRY])
        for n in ("a", "b")
    ]
    manifest = local(runs[1].manifest_file)
    fingerprint = read_manifest(runs[1])["kinds"]["profiles"]["attention_by_lag"]["fingerprint"]
    manifest.write_text(manifest.read_text().replace(fingerprint, "other"))
    with pytest.raises(
        QueryError,
        match=r"profile 'attention_by_lag' has one formula in run a \(\w+\) and another in run b",
    ):
        connect(tmp_path)


def test_every_column_of_both_views_is_described(plan: Plan) -> None:
    sql = (
        "SELECT column_name, comment FROM duckdb_columns() "
        "WHERE table_name = '{}' AND schema_name = 'main'"
    )
    for view in ("profiles", "profile_means"):
        described = dict(ask(connect(plan.run.path), sql.format(view)))
        assert [name for name, comment in described.items() if not comment] == []
        assert described["head"].endswith("NULL if all heads of a layer share the values.")


def test_compacting_keeps_every_row(tmp_path: Path, model: Path) -> None:
    run = measure_shards(begin(tmp_path, model)).run

    def rows(view: str) -> list[tuple[Any, ...]]:
        return sorted(ask(connect(run.path), view), key=str)

    before = {view: rows(view) for view in ("profiles", "profile_means")}
    assert compact(run).problems == []
    assert len(list(local(run.path).glob("profiles/intervention=*/*.parquet"))) == 2
    assert before["profiles"] == rows("profiles")
    means = [pytest.approx(row[15]) for row in before["profile_means"]]
    assert [row[15] for row in rows("profile_means")] == means


def test_a_run_that_measured_other_profiles_is_not_gone_on_with(
    tmp_path: Path, model: Path
) -> None:
    first = begin(tmp_path, model, profiles=["attention_by_lag"])
    assert begin(tmp_path, model, profiles=["attention_by_lag"]).run.run_id == first.run.run_id
    other = parse_scan(first.scan.model_dump(mode="json") | {"profiles": []})
    assert other.fingerprint != first.scan.fingerprint
    with pytest.raises(
        RunError,
        match=r"profile attention_by_lag \(no longer\), "
        r"profiles \(\[\"attention_by_lag\"\], now null",
    ):
        make_plan(other, "toy", first.run.run_id)


def test_what_a_plan_costs_counts_the_files(plan: Plan) -> None:
    without = make_plan(plan.scan.model_copy(update={"profiles": ()}), "toy")
    bytes_ = [measure_cost(p, passes=2, patience=0).bytes_on_disk for p in (plan, without)]
    size = local(data_file(plan.run, "profiles", "none", 0)).stat().st_size
    assert bytes_[0] - bytes_[1] == pytest.approx(2 * SHARDS * size, rel=0.2)


def test_an_entry_without_a_value_is_no_part_of_the_aggregate() -> None:
    profile = PROFILES["value_norm_by_key"]
    first = torch.tensor([[[1.0, math.nan, math.nan]], [[3.0, 5.0, math.nan]]])
    count, mean, m2 = count_mean_m2(profile, first)
    assert count.tolist() == [[2, 1, 0]]
    assert mean[0, :2].tolist() == [2, 5]
    assert m2[0, :2].tolist() == [2, 0]
    assert mean[0, 2].isnan()
    assert m2[0, 2].isnan()
    second = torch.tensor([[[2.0, math.nan, math.nan]], [[2.0, math.nan, 7.0]]])
    batches = [
        aggregates({"value_norm_by_key": count_mean_m2(profile, rows)[:, None]})
        for rows in (first, second)
    ]
    merged = merge(batches)["value_norm_by_key"]
    assert merged.count.tolist() == [[[4, 1, 1]]]
    assert merged.mean.tolist() == [[[2, 5, 7]]]
    assert merged.m2.tolist() == [[[2, 0, 0]]]
    table = means_table(KIND, 0, {"value_norm_by_key": batches[0]["value_norm_by_key"]}, EVERY)
    assert table["mean"].to_pylist() == [2, 5, None]
    assert table["m2"].to_pylist() == [2, 0, None]


# Columns and diagonals


def random_pattern(n_ctx: int) -> DensePattern:
    """A pattern of two sequences and three heads, some of whose columns and diagonals are heavy."""
    generator = torch.Generator().manual_seed(n_ctx)
    scores = torch.randn(2, 3, n_ctx, n_ctx, generator=generator, dtype=torch.float64) * 2
    scores[:, 0, :, n_ctx // 3] += 6
    scores[:, 1] += torch.diag_embed(torch.full((n_ctx - 9,), 6.0, dtype=torch.float64), -9)
    future = torch.ones(n_ctx, n_ctx).triu(1).bool()
    rows = scores.masked_fill(future, -math.inf).softmax(-1)
    keys = torch.eye(n_ctx, dtype=rows.dtype).expand_as(rows)
    return DensePattern(rows, rows, rows, keys, AttentionFacts(1.0))


def chosen(masses: np.ndarray, count: int, always: int, n_ctx: int) -> set[int]:
    """The heaviest places, the first of which are always chosen."""
    scaled_count, first = (max(1, round(n * n_ctx / 30_000)) for n in (count, always))
    order = np.argsort(-masses).tolist()
    rest = [place for place in order if place >= first]
    return {*range(first), *rest[: max(scaled_count - first, 0)]}


def test_the_definition_of_columns_and_diagonals_names_its_numbers() -> None:
    file = columns_and_diagonals
    definition = file.column_diagonal_attention_by_candidate.__doc__ or ""
    pairs = ", ".join(f"{columns:,} and {diagonals:,}" for columns, diagonals in CANDIDATES[1:])
    columns, diagonals = CANDIDATES[0]
    words = " ".join(definition.split())
    assert f"diagonals: {columns:,} and {diagonals:,}, {pairs}, scaled" in words
    assert f"by n_ctx / {file.SEARCH_LENGTH:,}" in words
    assert f"first {file.FIRST_COLUMNS} columns" in words
    assert f"nearest {file.NEAREST_DIAGONALS} diagonals" in words
    assert f"min({file.LAST_QUERIES}, T)" in words
    assert f"to {TIE:.0e}".replace("e-0", "e-") in words


@pytest.mark.parametrize("n_ctx", [40, 700])
def test_columns_and_diagonals_are_those_of_the_definition(n_ctx: int) -> None:
    pattern = random_pattern(n_ctx)
    by_lag = PROFILES["tail_attention_by_lag"].compute(pattern)
    by_key = PROFILES["tail_attention_by_key"].compute(pattern)
    shares = PROFILES["column_diagonal_attention_by_candidate"].compute(pattern)
    n = min(64, n_ctx)
    queries, keys = np.arange(n_ctx - n, n_ctx)[:, None], np.arange(n_ctx)
    for sequence, head in np.ndindex(2, 3):
        rows = pattern.pattern[sequence, head, n_ctx - n :].numpy()
        columns = rows.sum(0)
        lags = np.array([rows[queries - keys == lag].sum() for lag in range(n_ctx)])
        np.testing.assert_allclose(by_lag[sequence, head], lags / n, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(by_key[sequence, head], columns / n, rtol=1e-9, atol=1e-12)
        for candidate, (n_columns, n_diagonals) in enumerate(CANDIDATES):
            in_column = np.isin(keys, list(chosen(columns, n_columns, 30, n_ctx)))
            on_diagonal = np.isin(queries - keys, list(chosen(lags, n_diagonals, 100, n_ctx)))
            share = rows[in_column | on_diagonal].sum() / n
            assert shares[sequence, head, candidate].item() == pytest.approx(share, rel=1e-6)
    # The first head looks at one column, and more columns than diagonals are of no use to the
    # second.
    assert by_lag[:, 1].argmax(-1).tolist() == [9, 9]


# Moments of queries

MOMENTS = [name for name in ALL if "query_mean" in name or "second_moment" in name]
FAMILIES = {
    "GPT-2": toy.gpt2(n_layer=2),
    "Llama": toy.family("LlamaConfig", num_key_value_heads=2),
    "Qwen3": toy.family("Qwen3Config", num_key_value_heads=2, head_dim=D_HEAD),
    # Only half of the components are rotated.
    "Phi": toy.family("PhiConfig"),
}


def test_queries_that_a_module_rotates_in_its_own_way_are_an_error(tmp_path: Path) -> None:
    path = toy.save_model(tmp_path / "nanochat", toy.family("NanoChatConfig"))
    tokens = toy.repeating_tokens(T, batch=2)
    rotated = measure(path, tokens, profiles=["rotated_query_mean"]).means["profiles"]
    assert np.isfinite(rotated["rotated_query_mean"].mean).all()
    message = "nanochat: the queries of layer 0 before their rotation are not known, because "
    with pytest.raises(ModelError, match=message):
        measure(path, tokens, profiles=["query_mean"])


def test_a_rotation_that_is_not_all_that_a_layer_does_is_not_undone() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    given = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(3.0)[None, :, None].expand(1, 3, 4)
    rotation = Rotation(apply_rotary_pos_emb, angles.cos(), angles.sin(), 4, given)
    rotated = apply_rotary_pos_emb(given, given, angles.cos(), angles.sin())[0]
    assert rotation.checked(rotated).rotate is not None
    torch.testing.assert_close(rotation.undo(rotated.transpose(1, 2)), given.transpose(1, 2))
    assert rotation.checked(rotated * 2).rotate is None


def test_nothing_is_rotated_back_if_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = toy.save_model(tmp_path / "llama", FAMILIES["Llama"])
    tokens = toy.repeating_tokens(T, batch=2)
    part = measure(path, tokens, profiles=MOMENTS, heads=["L0H1", "L1H3"]).means["profiles"]
    whole = measure(path, tokens, profiles=MOMENTS).means["profiles"]
    for name in MOMENTS:
        np.testing.assert_allclose(part[name].mean[1, 0], whole[name].mean[1, 3], rtol=1e-6)

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("queries were rotated back")

    monkeypatch.setattr(Rotation, "undo", refuse)
    others = [name for name in ALL if name not in MOMENTS]
    measure(path, tokens, profiles=others, heads=["L0H1"])
    with pytest.raises(AssertionError, match="rotated back"):
        measure(path, tokens, profiles=["query_mean"])
