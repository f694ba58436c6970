"""Profiles, curves and weights: the way from a shard through its files into the views."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from headcount.jobs.plan.plan import Plan
from headcount.jobs.run.loop import missing_shards
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.kinds import schema_of_rows, table_schema
from headcount.schemas.profiles import PROFILES
from headcount.schemas.tables import CURVES as CURVES_TABLE
from headcount.schemas.weight_statistics import WEIGHT_STATISTICS
from tests.toys import toy_models as toy
from tests.toys.runs_here import begun, measured
from tests.toys.toy_runs import ask, data_file, local, write_run

T, SEQUENCES, PER_SHARD, LAYERS, HEADS = 7, 8, 3, 3, 4
PLACES = ("query", "key", "lag", "candidate", "dimension", "component", "other_component", "part")
"""Columns that say where an entry lies."""
SHARED = {name for name in PROFILES if "resid" in name or "logit" in name}
"""Profiles that all heads of a layer share."""
CURVES = [name for name, profile in PROFILES.items() if profile.axis != "pair"]
# Shards do not know which run they are of.
OF_THE_RUN = ["run_id", "intervention"]


def begin(out: Path, model: Path, **changes: Any) -> Plan:
    sizes = {"n_ctx": T, "sequences": SEQUENCES, "sequences_per_shard": PER_SHARD}
    fields = {"model": str(model), "out": str(out), "input": {"family": "uniform_random"}}
    return begun(fields | sizes | {"statistics": ["sink_alpha"]} | changes)


def rows_of_file(run: RunDirectory, table: str, shard: int) -> pa.Table:
    return pq.ParquetFile(data_file(run, table, "none", shard)).read().drop_columns(OF_THE_RUN)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, gpt2: Path) -> Plan:
    """A finished run of everything that can be kept."""
    fields: dict[str, Any] = {"profiles": list(PROFILES), "curves": CURVES}
    fields |= {"weight_statistics": [*WEIGHT_STATISTICS]}
    fields |= {"interventions": ["none", "zero_query_bias"]}
    return measured(begin(tmp_path_factory.mktemp("runs"), gpt2, **fields))


def test_files_have_their_schemas_and_weights_lie_with_the_first_shard(plan: Plan):
    profiles = rows_of_file(plan.run, "profiles", 1)
    assert profiles.schema.equals(schema_of_rows(PROFILES, PROFILES.values()))
    assert profiles["profile"].unique().to_pylist() == list(PROFILES)
    assert set(profiles["shard"].to_pylist()) == {1}
    curves = rows_of_file(plan.run, "curves", 1)
    of_curves = {"curves": [PROFILES[name] for name in CURVES]}
    assert curves.schema.equals(table_schema(CURVES_TABLE, of_curves))
    keys = ["input_family", "shard", "sequence", "layer", "head"]
    assert curves.select(keys).equals(rows_of_file(plan.run, "heads", 1).select(keys))
    metadata = curves.schema.field("sink_attention_by_query").metadata
    described = (metadata[b"description"][:18], metadata[b"unit"])
    assert described == (b"By query, from 0: ", b"probability")
    weights = rows_of_file(plan.run, "weights", 0)
    assert weights.schema.equals(schema_of_rows(WEIGHT_STATISTICS, WEIGHT_STATISTICS.values()))
    assert weights["weight"].unique().to_pylist() == list(WEIGHT_STATISTICS)
    # Engine and precision change nothing.
    other = {"engine": "dense", "precision": "float64", "statistics": ["sink_alpha"]}
    replica = toy.replica(Path(plan.scan.model), weight_statistics=[*WEIGHT_STATISTICS], **other)
    assert weights.equals(replica.weights()["weights"])

    first, *others = plan.run.commits()
    of_intervention = ["heads", "sequences", "curves", "profiles"]
    assert [f.table for f in first.files] == [*of_intervention * 2, "weights"]
    assert [[f.table for f in other.files] for other in others] == [of_intervention * 2] * 2
    # Rows are those of heads alone.
    assert first.rows == 2 * PER_SHARD * LAYERS * HEADS
    kinds = plan.manifest.kinds
    assert kinds["profiles"]["score_by_pair"]["axis"] == "pair"
    assert [set(kinds[field]) for field in ("profiles", "curves", "weight_statistics")] == [
        set(PROFILES), set(CURVES), set(WEIGHT_STATISTICS)
    ]  # fmt: skip


def test_an_entry_lies_where_its_axes_say(plan: Plan):
    table = rows_of_file(plan.run, "profiles", 0)

    def rows_of(name: str) -> pa.Table:
        return table.filter(pc.equal(table["profile"], name))  # pyright: ignore[reportAttributeAccessIssue]

    pairs = {"pair": ["query", "key"], "pair of components": ["component", "other_component"]}
    for name, profile in PROFILES.items():
        rows = rows_of(name)
        axes = pairs.get(profile.axis, [profile.axis])
        assert [a for a in PLACES if rows[a].null_count == 0] == axes
        assert all(rows[a].null_count == len(rows) for a in {*PLACES} - set(axes))
        assert rows["head"].null_count == (len(rows) if name in SHARED else 0)
    for name, (row, column), start, places in (
        ("score_by_pair", pairs["pair"], 0, [(0, 0), (1, 0), (1, 1), (2, 0)]),
        ("query_second_moment", pairs["pair of components"], 6, [(0, 6), (0, 7), (1, 1), (1, 2)]),
    ):
        found = rows_of(name).slice(start, 4)
        assert list(zip(found[row].to_pylist(), found[column].to_pylist(), strict=True)) == places


def test_every_column_of_every_view_is_described(plan: Plan):
    shared = "NULL if all heads of a layer share the values."
    ends = {"profiles": shared, "profile_means": shared, "curves": "."}
    ends |= {"weights": "NULL for values that a model has only once."}
    comments = ask(
        plan.run.path,
        "SELECT table_name, column_name, comment FROM duckdb_columns() "
        f"WHERE table_name IN {(*ends,)} AND schema_name = 'main'",
    )
    assert [row for row in comments if not row[2]] == []
    described = {(view, column): comment for view, column, comment in comments}
    for view, end in ends.items():
        assert described[view, "layer" if view == "weights" else "head"].endswith(end), view


def test_lost_weights_make_their_shard_missing_and_come_back(tmp_path: Path, gpt2: Path):
    """The scan has an intervention alone; weights are of the untouched model."""
    fields = {"interventions": ["zero_query_bias"], "weight_statistics": ["query_bias_norm"]}
    plan = measured(begin(tmp_path, gpt2, **fields))
    file = local(data_file(plan.run, "weights", "none", 0))
    assert "earlier_head" not in pq.ParquetFile(file).schema_arrow.names
    question = "SELECT count(*), min(value) > 0 FROM weights"
    assert ask(plan.run.path, question) == [(LAYERS * HEADS, True)]
    before = file.read_bytes()
    file.unlink()
    assert missing_shards(plan).tolist() == [0]
    assert ask(plan.run.path, "weights") == []
    measured(plan)
    assert file.read_bytes() == before


def test_runs_that_kept_different_things_are_read_together(tmp_path: Path):
    neox = toy.save_model(tmp_path / "neox", toy.family("GPTNeoXConfig"))
    names = ["attention_by_lag", "sink_resid_post_by_dimension"]
    changes: list[dict[str, Any]] = [{}, {"profiles": names[:1]}, {"profiles": names}]
    changes[0]["curves"] = ["score_shift_by_key"]
    runs = [measured(begin(tmp_path / "runs", neox, **kept)).run for kept in changes]
    columns = [rows_of_file(run, "profiles", 0).column_names for run in runs[1:]]
    assert ["dimension" in names_of_run for names_of_run in columns] == [False, True]
    question = "SELECT profile, count(*), count(lag), count(dimension) FROM profile_means"
    lags, dimensions = (names[0], 56, 56, 0), (names[1], 64, 0, 64)
    by_run = f"{question} WHERE run_id = '{runs[2].run_id}' GROUP BY ALL ORDER BY ALL"
    assert ask(tmp_path / "runs", by_run) == [lags, dimensions]
    assert ask(runs[1].path, f"{question} GROUP BY ALL") == [lags]
    # Keys that rotate have no shift.
    assert set(ask(tmp_path / "runs", "SELECT score_shift_by_key FROM curves")) == {(None,)}
    assert ask(runs[1].path, "curves") == []


ENTRY = {"layer": 0, "head": 1, "profile": "attention_by_lag", "lag": 2}
ENTRY |= {"count": 2, "mean": 2.0, "m2": 2.0}


def test_sql_merges_exactly(tmp_path: Path):
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
    sd = pytest.approx((27.2 / 4) ** 0.5)
    error = pytest.approx((27.2 / 20) ** 0.5)
    keys = ("a-1", "toy", 5, "none")
    # Each: layer, head, label, query, key, lag, other places, count, mean, sd, error, groups.
    by_lag = ("attention_by_lag", 0, 1, "L0H1", None, None, 2, *[None] * 5, 5, mean, sd, error, 5)
    by_key = ("resid_pre_norm_by_key", 0, *[None] * 3, 0, *[None] * 6, 1, 7.0, None, None, 1)
    assert ask(run.path, "profile_means") == [(*keys, *by_lag), (*keys, *by_key)]
