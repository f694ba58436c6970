"""The views over small runs with exact numbers: what counts, what is refused, what is written."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from headcount.queries.ask.answers import run_query
from headcount.queries.ask.asking import open_runs
from headcount.queries.ask.formats import (
    Format,
    rows_to_read,
    write,
    write_csv,
    write_json,
    write_parquet,
)
from headcount.queries.ask.text_tables import COUNTED_ROWS, write_table
from headcount.queries.commands.query import commands
from headcount.queries.open import run_tables
from headcount.queries.open.connection import (
    OPENED,
    _create_source,
    _empty_table,
    view_descriptions,
)
from headcount.queries.open.connection import connect as connect_eagerly
from headcount.queries.open.descriptions import VIEWS
from headcount.queries.open.run import read_runs
from headcount.queries.open.shipped_views import QUERIES
from headcount.queries.open.standard_errors import MACROS
from headcount.schemas.errors import QueryError, RunError
from headcount.schemas.files.places import place
from headcount.schemas.scans.kinds import TABLES
from headcount.schemas.statistics import STATISTICS
from tests import ROOT
from tests.toys.toy_runs import (
    Cell,
    Row,
    connect_to_tables,
    data_file,
    local,
    read_manifest,
    write_run,
)

# All queries here go through `run_query`, which makes the views that they name.
connect = partial(connect_eagerly, lazily=True)

NORMS = {
    # The mean over the other positions is (T · mean - first) / (T - 1). With T = 5 that is
    # (5·4 - 8)/4 = 3 for values and (5·2 - 2)/4 = 2 for keys.
    "value_norm": lambda row: 4.0,
    "sink_value_norm": lambda row: 8.0,
    "key_norm": lambda row: 2.0,
    "sink_key_norm": lambda row: 2.0,
    # The residual stream is the same for all heads.
    "resid_pre_norm": lambda row: 12.0,
    "sink_resid_pre_norm": lambda row: 20.0,
    "resid_post_norm": lambda row: 4.0 if row.layer == 0 else 1.0,
    "sink_resid_post_norm": lambda row: 20.0 if row.layer == 0 else 5.0,
}

NEEDED = {
    **NORMS,
    **dict.fromkeys(("sink_mass", "entropy", "induction_score", "match_coverage"), lambda row: 0.5),
}
"""What all named queries together need. Views over all statistics take long to bind."""


def ask(connection: duckdb.DuckDBPyConnection, query: str) -> list[tuple[Any, ...]]:
    return list(run_query(connection, query).rows())


def written(
    connection: duckdb.DuckDBPyConnection, query: str, writer: Any, limit: int | None = None
) -> str:
    """What a writer makes of an answer."""
    out = io.StringIO()
    options = [] if limit is None else [limit]
    writer(run_query(connection, query), out, *options)
    return out.getvalue()


def sink_mass(row: Row) -> float:
    """0.5 and 0.75 in turn for head 1, and a quarter of that for the others."""
    return (0.5 if row.sequence % 2 == 0 else 0.75) / (1 if row.head == 1 else 4)


# Views


@pytest.mark.parametrize("folder", ["it's [1] * of ?", "two\nlines [1]"])
def test_any_path_is_read_as_it_is(folder: str, tmp_path: Path) -> None:
    for name in (folder, folder.replace("[1]", "1")):
        write_run(tmp_path / name, "a-1", {"entropy": lambda row: 0.5}, layers=1, heads=1)
    connection = connect_to_tables(tmp_path / folder)
    assert ask(connection, "SELECT count(*), sum(entropy) FROM heads") == [(4, 2.0)]


def test_by_head_means_and_deviations(tmp_path: Path) -> None:
    write_run(tmp_path, "a-1", {"sink_mass": sink_mass}, sequences=2, layers=1)
    columns = "layer, head, label, sequences, mean_sink_mass, sd_sink_mass, model"
    assert ask(connect(tmp_path), f"SELECT {columns} FROM by_head WHERE head = 1") == [
        (0, 1, "L0H1", 2, 0.625, pytest.approx(0.125 * 2**0.5), "toy")
    ]


def test_by_head_knows_every_statistic_and_leaves_null_out(tmp_path: Path) -> None:
    cells = dict.fromkeys(STATISTICS, lambda row: None if row.sequence == 0 else 3.0)
    connection = connect(write_run(tmp_path, "a-1", cells, layers=1, heads=1).path)
    names = run_query(connection, "by_head").schema.names
    row = dict(zip(names, ask(connection, "by_head")[0], strict=True))
    assert {name: row[f"mean_{name}"] for name in STATISTICS} == dict.fromkeys(STATISTICS, 3.0)
    assert {row[f"sd_{name}"] for name in STATISTICS} == {0.0}
    assert row["sequences"] == 4


def test_by_head_keeps_deviations_far_smaller_than_the_mean() -> None:
    """Many rows, because sums lose digits row by row: plain squares are off by 0.1 %."""
    connection = duckdb.connect()
    connection.execute("CREATE TABLE runs AS SELECT 'a-1' AS run_id, 'toy' AS model, 5 AS n_ctx")
    connection.execute(
        """
        CREATE TABLE heads AS
        SELECT
            'a-1' AS run_id, 'none' AS intervention, 'pile' AS input_family, 0 AS shard,
            i AS sequence, 0 AS layer, 0 AS head, 'L0H0' AS label,
            (1234.567 + i % 5 * 0.01)::FLOAT AS steps, 0.1::FLOAT AS constant
        FROM range(200_000) AS t(i)
        """
    )
    for signature, body in MACROS.items():
        connection.execute(f"CREATE MACRO {signature} AS {body}")
    by_head = (QUERIES / "heads" / "by_head.sql").read_text()
    answer = connection.execute(f"SELECT sd_steps, sd_constant FROM ({by_head})").fetchall()
    [(steps, constant)] = answer
    [(expected,)] = connection.execute("SELECT stddev_samp(steps) FROM heads").fetchall()
    assert steps == pytest.approx(expected, rel=1e-6)
    assert constant < 2e-8 * 0.1


def test_by_layer_is_mean_and_maximum_of_the_heads(tmp_path: Path) -> None:
    write_run(tmp_path, "a-1", {"sink_mass": lambda row: row.layer + row.head / 4})
    assert ask(
        connect(tmp_path),
        "SELECT layer, heads, sequences, mean_sink_mass, max_sink_mass FROM by_layer",
    ) == [
        (0, 3, 4, 0.25, 0.5),
        (1, 3, 4, 1.25, 1.5),
    ]


def test_sink_heads_are_ranked_with_uniform_baseline_threshold_and_ratios(tmp_path: Path) -> None:
    write_run(tmp_path, "a-1", {"sink_mass": sink_mass, **NORMS}, layers=1, sequences=2)
    columns = (
        "rank, label, sink_mass, uniform_baseline, sink_alpha, is_sink, sink_rate, "
        "value_norm_ratio, resid_pre_norm_ratio, sequences"
    )
    # sink_alpha = (1 + (T - 1) sink_mass) / T.
    first_alpha = pytest.approx((1 + 4 * 0.625) / 5)
    second_alpha = pytest.approx((1 + 4 * 0.15625) / 5)
    value_ratio = pytest.approx(8 / 3)
    # The second heads have 0.3 and 0.35 on the two sequences, so one of two is above 0.3.
    assert ask(connect(tmp_path), f"SELECT {columns} FROM sink_heads") == [
        (1, "L0H1", 0.625, 0.25, first_alpha, True, 1.0, value_ratio, 2.0, 2),
        (2, "L0H0", 0.15625, 0.25, second_alpha, True, 0.5, value_ratio, 2.0, 2),
        (2, "L0H2", 0.15625, 0.25, second_alpha, True, 0.5, value_ratio, 2.0, 2),
    ]


def test_the_sink_threshold_is_on_sink_alpha(tmp_path: Path) -> None:
    cells = {"sink_mass": lambda row: 0.125 if row.head == 0 else 0.25, **NORMS}
    write_run(tmp_path, "a-1", cells, layers=1, heads=2)
    # (1 + 4·0.25)/5 = 0.4 and (1 + 4·0.125)/5 = 0.3, which is not above 0.3.
    assert ask(connect(tmp_path), "SELECT head, is_sink, sink_rate FROM sink_heads") == [
        (1, True, 1.0),
        (0, False, 0.0),
    ]


def test_induction_heads_count_the_sequences_that_had_copies(tmp_path: Path) -> None:
    cells = {
        "induction_score": lambda row: None if row.sequence == 0 else (0.25, 0.5)[row.head],
        "match_coverage": lambda row: 0.0 if row.sequence == 0 else 1.0,
    }
    write_run(tmp_path, "a-1", cells, layers=1, heads=2)
    columns = (
        "rank, label, induction_score, uniform_baseline, is_induction, coverage, "
        "measured, sequences"
    )
    assert ask(connect(tmp_path), f"SELECT {columns} FROM induction_heads") == [
        (1, "L0H1", 0.5, 0.25, True, 0.75, 3, 4),
        (2, "L0H0", 0.25, 0.25, False, 0.75, 3, 4),
    ]


def test_sink_values_compare_position_0_with_the_others(tmp_path: Path) -> None:
    write_run(tmp_path, "a-1", NORMS, layers=1, heads=1)
    columns = (
        "value_norm_first, value_norm_others, value_norm_ratio, "
        "key_norm_first, key_norm_others, key_norm_ratio"
    )
    assert ask(connect(tmp_path), f"SELECT label, {columns} FROM sink_values") == [
        ("L0H0", 8.0, 3.0, pytest.approx(8 / 3), 2.0, 2.0, 1.0)
    ]


def test_layer_norms_and_undefined_ratios(tmp_path: Path) -> None:
    write_run(tmp_path, "a-1", NORMS)
    columns = (
        "resid_pre_first, resid_pre_others, resid_pre_ratio, "
        "resid_post_others, resid_post_ratio, sequences"
    )
    # Layer 0: (5·12 - 20)/4 = 10; after it (5·4 - 20)/4 = 0, and nothing is a multiple of 0.
    assert ask(connect(tmp_path), f"SELECT layer, {columns} FROM layer_norms") == [
        (0, 20.0, 10.0, 2.0, 0.0, None, 4),
        (1, 20.0, 10.0, 2.0, 0.0, None, 4),
    ]


def test_a_sequence_of_one_token_has_no_others(tmp_path: Path) -> None:
    write_run(tmp_path, "a-1", NORMS, n_ctx=1, layers=1, heads=1)
    assert ask(
        connect(tmp_path),
        "SELECT value_norm_first, value_norm_others, value_norm_ratio FROM sink_values",
    ) == [(8.0, None, None)]


def test_by_pile_set_is_not_multiplied_by_interventions(tmp_path: Path) -> None:
    cells = {"sink_mass": lambda row: row.sequence / 8}
    # A sequence without a name is left out.
    pile_sets = ["Github", "Wikipedia (en)", None]
    write_run(
        tmp_path,
        "a-1",
        cells,
        layers=1,
        heads=1,
        pile_sets=pile_sets,
        interventions=("none", "zero_query_bias"),
    )
    query = "SELECT intervention, pile_set_name, sequences, mean_sink_mass FROM by_pile_set"
    assert ask(connect(tmp_path), query) == [
        ("none", "Github", 2, 1.5 / 8),
        ("none", "Wikipedia (en)", 1, 1 / 8),
        ("zero_query_bias", "Github", 2, 1.5 / 8),
        ("zero_query_bias", "Wikipedia (en)", 1, 1 / 8),
    ]


def test_dormant_induction_heads_join_runs_of_the_same_weights(tmp_path: Path) -> None:
    def cells(induction: float | None, first_sink_mass: float) -> dict[str, Cell]:
        return {
            "induction_score": lambda row: induction,
            "sink_mass": lambda row: first_sink_mass / (1 + row.head),
        }

    size: dict[str, Any] = {"layers": 1, "heads": 2}
    write_run(tmp_path, "rep-1", cells(0.75, 0.125), family="repeated_random", **size)
    write_run(tmp_path, "uni-1", cells(None, 0.5), family="uniform_random", **size)
    write_run(
        tmp_path, "other-1", cells(None, 0.5), family="uniform_random", model="another", **size
    )
    columns = (
        "label, induction_repeated, sink_unrepeated, is_dormant, sink_repeated, sink_text, text_run"
    )
    query = f"SELECT {columns} FROM dormant_induction_heads"
    expected = [("L0H0", 0.75, 0.5, True, 0.125), ("L0H1", 0.75, 0.25, False, 0.0625)]
    assert ask(connect(tmp_path), query) == [(*row, None, None) for row in expected]
    write_run(tmp_path, "pile-1", cells(0.25, 0.25), family="pile", **size)
    assert ask(connect(tmp_path), query) == [
        (*expected[0], 0.25, "pile-1"),
        (*expected[1], 0.125, "pile-1"),
    ]


def test_runs_and_shards_and_statistics(tmp_path: Path) -> None:
    write_run(
        tmp_path,
        "toy-scan-0a1b",
        {"sink_mass": sink_mass, "sink_logit_margin": sink_mass},
        commit=[0],
        sequences=5,
    )
    connection = connect(tmp_path)
    origin = "run_id, name, model, n_ctx, input_family, input_options, interventions"
    assert ask(connection, f"SELECT {origin} FROM runs") == [
        ("toy-scan-0a1b", "toy-scan", "toy", 5, "uniform_random", '{"period": 2}', ["none"])
    ]
    progress = "shards, shards_done, complete, sequences, sequences_done, rows, tokens, seconds"
    assert ask(connection, f"SELECT {progress} FROM runs") == [(3, 1, False, 5, 2, 12, 10, 1.5)]
    assert ask(connection, "SELECT shard, start, stop, status, rows, host FROM shards") == [
        (0, 0, 2, "done", 12, "toy"),
        (1, 2, 4, "missing", None, None),
        (2, 4, 5, "missing", None, None),
    ]
    assert ask(
        connection,
        "SELECT name, unit, range_low, range_high, uniform_baseline, runs FROM statistics "
        "ORDER BY name",
    ) == [
        ("sink_logit_margin", "logits", float("-inf"), float("inf"), False, 1),
        ("sink_mass", "probability", 0.0, 1.0, True, 1),
    ]


def test_every_shipped_query_answers_and_is_described(tmp_path: Path) -> None:
    received = {"attention_received_by_key": lambda row: [0.5] * 5}
    write_run(tmp_path, "a-1", NEEDED, curves=received)
    connection = connect_eagerly(tmp_path)
    descriptions = view_descriptions(connection)
    assert list(descriptions) == [*VIEWS, *sorted(file.stem for file in QUERIES.rglob("*.sql"))]
    for name, description in descriptions.items():
        assert description.endswith(".") or "." in description, name
        ask(connection, name)
    comments = dict(
        connection.execute(
            "SELECT column_name, comment FROM duckdb_columns() WHERE table_name = 'by_head'"
        ).fetchall()
    )
    assert comments["mean_entropy"] == f"Mean over sequences: {STATISTICS['entropy'].description}"
    assert comments["head"] == "Head within the layer, from 0."


def test_adding_a_query_is_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "queries"
    shutil.copytree(QUERIES, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (folder / "a_first.sql").write_text(
        "-- Heads of layer 1.\n-- Stands on by_head, which comes later.\nFROM by_head WHERE layer "
        "= 1"
    )
    write_run(tmp_path / "runs", "a-1", {"sink_mass": sink_mass})
    connection = connect(tmp_path / "runs", folder)
    assert (
        view_descriptions(connection)["a_first"]
        == "Heads of layer 1. Stands on by_head, which comes later."
    )
    assert ask(connection, "SELECT label FROM a_first") == [("L1H0",), ("L1H1",), ("L1H2",)]


# What counts


def test_only_whole_committed_files_count(
    tmp_path: Path, app: typer.Typer, capfd: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, "a-1", {"sink_mass": sink_mass}, sequences=10, commit=[0, 1, 2])
    home = local(run.path)
    heads = home / "heads" / "intervention=none"
    (heads / "shard-000003.parquet").write_bytes(b"PAR1 half a file")
    (heads / ".shard-000004.parquet.tmp").write_bytes(b"")
    (heads / "foreign.parquet").write_bytes(b"")
    (home / "commits" / "shard-000003.json").write_text('{"run_id": ')
    shutil.copy(home / "commits" / "shard-000000.json", home / "commits" / "shard-000004.json")
    content = (heads / "shard-000001.parquet").read_bytes()
    (heads / "shard-000001.parquet").write_bytes(content[:-1])
    data_file(run, "sequences", "none", 2).unlink()
    database = open_runs(tmp_path)
    connection = database.connection
    assert ask(connection, "SELECT DISTINCT sequence FROM heads ORDER BY ALL") == [(0,), (1,)]
    assert ask(connection, "SELECT count(*) FROM sequences") == [(2,)]
    assert [row[0] for row in ask(connection, "SELECT status FROM shards")] == [
        "done",
        "damaged",
        "damaged",
        "missing",
        "missing",
    ]
    why = (
        f"heads/intervention=none/shard-000001.parquet has {len(content) - 1:,} bytes where "
        f"{len(content):,} were committed"
    )
    damage = (
        f"run a-1: shard 1: {why} and is left out of every view; so are 1 more files. "
        f"headcount resume {run.path} --verify measures it anew"
    )
    assert ask(connection, "SELECT damage FROM shards WHERE shard < 3") == [
        (None,),
        (why,),
        ("sequences/intervention=none/shard-000002.parquet is gone",),
    ]
    assert database.damage() == [damage]
    # A library prints nothing. A command prints the damage once.
    assert capfd.readouterr() == ("", "")
    told = [f"warning: {damage}"]
    command = ["report", str(tmp_path), "-o", str(tmp_path / "report.html")]
    assert CliRunner().invoke(app, command, catch_exceptions=False).stderr.splitlines() == told
    # An answer also says how much of the run it is about.
    result = CliRunner().invoke(app, ["query", str(tmp_path), "runs"], catch_exceptions=False)
    told.append("note: run a-1 is not complete: 1 of 5 shards are in")
    assert result.stderr.splitlines() == told


def test_a_file_of_the_right_size_without_content_does_not_count(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a-1", {"sink_mass": sink_mass})
    file = local(data_file(run, "heads", "none", 0))
    file.write_bytes(bytes(file.stat().st_size))
    assert ask(connect(tmp_path), "SELECT DISTINCT sequence FROM heads ORDER BY ALL") == [
        (2,),
        (3,),
    ]


def test_files_that_do_not_fit_the_manifest_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a-1", {"sink_mass": sink_mass})
    manifest = read_manifest(run)
    statistics = manifest["kinds"]["statistics"]
    statistics["entropy"] = statistics["sink_mass"]
    local(run.manifest_file).write_text(json.dumps(manifest))
    with pytest.raises(
        QueryError, match=r'table heads do not fit the manifest: .*"entropy" not found'
    ):
        connect(tmp_path)


def test_a_commit_cannot_point_elsewhere(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a-1", {"sink_mass": sink_mass}, commit=[0])
    outside = tmp_path / "outside.parquet"
    shutil.copy(local(data_file(run, "heads", "none", 0)), outside)
    commit = json.loads(run.commit_file(0).read_bytes())
    commit["files"][0]["path"] = "../outside.parquet"
    local(run.commit_file(0)).write_text(json.dumps(commit))
    assert ask(connect(tmp_path), "SELECT count(*) FROM heads") == [(0,)]


def test_an_empty_table_has_the_types_that_a_copy_would_have(tmp_path: Path) -> None:
    write_run(tmp_path, "a-1", {"sink_mass": sink_mass}, sequences=2, layers=1)
    runs, _ = read_runs(place(tmp_path))
    columns = run_tables.measured_columns(runs)
    contents = [_empty_table(table, columns[name]) for name, table in TABLES.items()]
    contents += [run_tables.runs_table([]), run_tables.shards_table([])]
    connection = duckdb.connect()
    connection.execute("CREATE SCHEMA internal")
    for number, content in enumerate(contents):
        _create_source(connection, f"t{number}", content)
        connection.register("copied", content)
        copied, created = (
            connection.execute(
                f"SELECT column_name, column_type FROM (DESCRIBE {table})"
            ).fetchall()
            for table in ("copied", f"commit log.t{number}_content")
        )
        assert copied == created


def test_a_run_without_commits_is_empty_and_has_its_columns(tmp_path: Path) -> None:
    curves = {"attention_received_by_key": lambda row: [0.5] * 5}
    write_run(tmp_path, "a-1", NEEDED, commit=[], curves=curves)
    connection = connect(tmp_path)
    for name in ("heads", "sequences", *(file.stem for file in QUERIES.rglob("*.sql"))):
        assert ask(connection, name) == []
    types = {row[0]: row[1] for row in ask(connection, "DESCRIBE heads")}
    assert (types["run_id"], types["layer"], types["sink_mass"]) == ("VARCHAR", "SMALLINT", "FLOAT")


def test_a_run_directory_and_a_directory_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "date=2026-01-01 o'clock"
    run = write_run(home, "a-1", {"sink_mass": sink_mass})
    write_run(home, "b-2", {"entropy": lambda row: 1.0})
    monkeypatch.chdir(local(run.path))
    assert ask(connect(Path(".")), "SELECT DISTINCT run_id FROM heads") == [("a-1",)]
    query = (
        "SELECT run_id, count(sink_mass), count(entropy), count(*) FROM heads GROUP BY 1 ORDER BY 1"
    )
    assert ask(connect(home), query) == [("a-1", 24, 0, 24), ("b-2", 0, 24, 24)]
    assert "date" not in run_query(connect(home), "heads").schema.names
    with pytest.raises(RunError, match="no run here"):
        connect(run.path / "commits")


def test_two_formulas_under_one_name_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "a-1", {"sink_mass": sink_mass})
    run = write_run(
        tmp_path, "b-2", {"sink_mass": sink_mass}, fingerprints={"sink_mass": "changed"}
    )
    with pytest.raises(
        QueryError, match=r"'sink_mass'.* run a-1 .* run b-2 \(changed\); query one run"
    ):
        connect(tmp_path)
    assert read_manifest(run)["kinds"]["statistics"]["sink_mass"]["fingerprint"] == "changed"
    assert ask(connect(run.path), "SELECT count(*) FROM heads") == [(24,)]


def test_a_view_without_its_columns_names_them(tmp_path: Path) -> None:
    write_run(tmp_path, "a-1", {"sink_mass": sink_mass})
    connection = connect(tmp_path)
    for query in ("sink_values", "SELECT count(*) FROM sink_values"):
        with pytest.raises(QueryError, match=r"'sink_values' .* needs column 'sink_value_norm'"):
            ask(connection, query)
    assert len(ask(connection, "by_head")) == 6


def test_views_that_lack_a_column_can_be_listed(tmp_path: Path) -> None:
    folder = tmp_path / "queries"
    shutil.copytree(QUERIES, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (folder / "a_first.sql").write_text("-- Stands on a view that cannot be.\nFROM sink_values")
    (folder / "broken.sql").write_text("-- A mistake.\nSELECT sink_mass // FROM heads")
    (folder / "ungrouped.sql").write_text("-- Another.\nSELECT layer, sum(sink_mass) FROM heads")
    (folder / "lost.sql").write_text("-- A table that nobody has.\nFROM nowhere")
    write_run(tmp_path / "runs", "a-1", {"sink_mass": sink_mass})
    database = open_runs(tmp_path / "runs", queries=folder)
    unmeasured = database.unmeasured_views()
    assert unmeasured["sink_values"] == unmeasured["a_first"] == "sink_value_norm"
    assert not {"broken", "ungrouped", "lost", "by_head"} & unmeasured.keys()
    assert {"uniform_sink_mass", "tokens", "run_id"} <= database.columns("sequences")
    assert database.columns("nowhere") == frozenset()
    with pytest.raises(
        QueryError, match=r"'a_first' .* needs column 'sink_value_norm', which none"
    ):
        database.records("a_first")


@pytest.mark.parametrize(
    ("query", "makes_all"),
    [
        ("SELECT max(query) FROM profiles", False),
        ("SELECT ln(query + 1) FROM profiles", False),
        ("FROM query('FROM heads')", True),
        ("FROM \"query\" ('FROM heads')", True),
        ("FROM query/* of text */('FROM heads')", True),
        ("FROM query_table('heads')", True),
    ],
)
def test_only_a_function_called_query_has_every_view_made(
    small: Path, query: str, makes_all: bool
) -> None:
    """Profiles have a column of this name. The text of the function may name any view."""
    database = open_runs(small)
    database.rows(query)
    assert ("by_head" in OPENED[database.connection].shipped.created) == makes_all


def test_a_view_is_unmeasured_whether_or_not_all_are_asked_for(small: Path) -> None:
    database = open_runs(small)
    assert database.unmeasured_views("sink_values") == {"sink_values": "sink_value_norm"}
    assert database.unmeasured_views("by_head").keys() == {"sink_values"}
    assert database.unmeasured_views().keys() > {"sink_values"}


def test_runs_can_be_opened_with_more_views(tmp_path: Path) -> None:
    write_run(tmp_path, "a-1", {"sink_mass": sink_mass})
    database = open_runs(tmp_path, {"one": "SELECT 1 AS a", "two": "SELECT a + 1 AS b FROM one"})
    assert database.rows("FROM two") == [(2,)]
    assert database.records("two") == [{"b": 2}]
    with pytest.raises(QueryError, match=r"^view three: unknown column 'c'"):
        open_runs(tmp_path, {"three": "SELECT c FROM heads"})


# Read-only


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    write_run(path, "a-1", {"sink_mass": lambda row: 0.1 + row.head, "entropy": lambda row: None})
    return path


@pytest.mark.parametrize(
    "sql",
    [
        "COPY heads TO '{run}/stolen.csv'",
        "EXPLAIN ANALYZE COPY heads TO '{run}/stolen.csv'",
        "WITH a AS (COPY heads TO '{run}/stolen.csv') FROM a",
        "WITH a AS (DELETE FROM internal.runs_content RETURNING *) FROM a",
        "CREATE TABLE t (a INT)",
        "EXPLAIN ANALYZE CREATE TABLE t (a INT)",
        "INSERT INTO internal.runs_content SELECT * FROM runs",
        "ATTACH '{run}/new.duckdb'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET threads = 1",
        "PRAGMA threads = 1",
        "DROP VIEW heads",
        "CALL pragma_version()",
        "CHECKPOINT memory",
        "EXPORT DATABASE '{run}/all'",
    ],
)
def test_writing_is_refused(small: Path, sql: str) -> None:
    connection = connect(small)
    run = small / "run_id=a-1"
    with pytest.raises(QueryError, match="read-only") as refusal:
        ask(connection, sql.format(run=run))
    assert "\n" not in str(refusal.value)
    assert sorted(path.name for path in run.iterdir()) == [
        "commits",
        "heads",
        "manifest.json",
        "sequences",
    ]
    assert ask(connection, "SELECT count(*) FROM runs") == [(1,)]


def test_nothing_outside_the_runs_can_be_read(small: Path) -> None:
    secret = small.parent / "secret.csv"
    secret.write_text("a\n1\n")
    neighbour = small / "run_id=a-10.csv"
    neighbour.write_text("a\n1\n")
    connection = connect(small)
    # DuckDB could take this Python variable for a table.
    here = pa.table({"a": [1]})
    assert here.num_rows == 1
    for sql in (
        f"FROM read_csv('{secret}')",
        f"FROM '{secret}'",
        f"FROM read_text('{neighbour}')",
        f"FROM read_text('{small}/run_id=a-1/../../secret.csv')",
        "FROM glob('/*')",
        "FROM here",
    ):
        with pytest.raises(QueryError):
            ask(connection, sql)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (
            "by_heads",
            r"unknown view 'by_heads': did you mean 'by_head'\? Known: attention_by_token, by_head",
        ),
        ("FROM headz", r"unknown view 'headz': did you mean 'heads'"),
        ("SELECT qqqq FROM heads", r"unknown column 'qqqq': Nearest: "),
        ("SELECT lyer FROM heads", r"unknown column 'lyer': did you mean 'layer'"),
        # It may name any view, and is about none of those that cannot be answered.
        ("SELECT file FROM duckdb_secrets()", r"unknown column 'file': .*Nearest: "),
        ("SELEC 1", r'syntax error at or near "SELEC"'),
        ("SELECT 1; SELECT 2", r"got 2 statements"),
        ("-- nothing", r"got 0 statements"),
        ("SELECT 1 // 0", r"Division by zero"),
    ],
)
def test_mistakes_are_explained_in_one_line(small: Path, query: str, message: str) -> None:
    with pytest.raises(QueryError, match=message) as mistake:
        ask(connect(small), query)
    assert "\n" not in str(mistake.value)


def test_queries_of_every_kind(small: Path) -> None:
    connection = connect(small)
    assert ask(connection, "-- a comment\nSELECT max(layer) FROM heads; -- the end") == [(1,)]
    assert ask(connection, "FROM heads SELECT count(*)") == [(24,)]
    assert ("head", "SMALLINT") in [row[:2] for row in ask(connection, "DESCRIBE heads")]
    assert len(ask(connection, "SUMMARIZE heads")) == len(ask(connection, "SHOW heads")) == 10
    pivot = "PIVOT heads ON layer USING count(*) GROUP BY head ORDER BY head DESC"
    assert ask(connection, pivot) == [(2, 4, 4), (1, 4, 4), (0, 4, 4)]
    assert "Read Parquet" in ask(connection, "EXPLAIN FROM heads")[0][1]
    assert "Total Time" in ask(connection, "EXPLAIN ANALYZE FROM heads")[0][1]
    assert ask(connection, "SELECT head FROM heads ORDER BY head DESC, layer LIMIT 2") == [
        (2,),
        (2,),
    ]
    assert list(run_query(connection, "SELECT layer FROM by_layer", limit=1).rows()) == [(0,)]


COUNTED = """
WITH once AS MATERIALIZED (SELECT count_execution() AS executions)
SELECT executions, i, CASE WHEN i = {broken} THEN error('row {broken}') END AS e
FROM once, range({rows}) AS numbers(i)"""


@pytest.fixture
def executions(small: Path) -> Iterator[tuple[duckdb.DuckDBPyConnection, list[int]]]:
    """A connection, and a list that grows by one when the query COUNTED is executed."""
    connection = connect(small)
    calls: list[int] = []

    def count_execution() -> int:
        calls.append(1)
        return len(calls)

    connection.create_function("count_execution", count_execution, [], "BIGINT", side_effects=True)
    yield connection, calls
    connection.remove_function("count_execution")
    connection.close()


@pytest.mark.parametrize(
    ("rows", "limit", "last_line"),
    [
        (3, None, "1   2   –"),
        (40, None, "1   39   –"),
        (41, None, "… 1 more rows (--limit 40)"),
        (5, 2, "… 3 more rows (--limit 2)"),
        (5, 0, "… 5 more rows (--limit 0)"),
        (0, 5, "no rows"),
        (COUNTED_ROWS + 40, None, "… 10,000 more rows (--limit 40)"),
        (COUNTED_ROWS + 41, None, "… more than 10,000 more rows (--limit 40)"),
        (1_000_000_000, 3, "… more than 10,000 more rows (--limit 3)"),
    ],
)
@pytest.mark.parametrize("has_limit", [True, False])
def test_a_table_asks_once_however_many_rows_there_are(
    executions: tuple[duckdb.DuckDBPyConnection, list[int]],
    rows: int,
    limit: int | None,
    last_line: str,
    has_limit: bool,
) -> None:
    connection, calls = executions
    query = COUNTED.format(rows=rows, broken=-1)
    # With the limit that the command sets, and without one.
    answer = run_query(connection, query, rows_to_read("table", limit) if has_limit else None)
    out = io.StringIO()
    write_table(answer, out, limit)
    assert " ".join(out.getvalue().splitlines()[-1].split()) == " ".join(last_line.split())
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("answer_format", "limit", "rows"), [("csv", None, 45), ("csv", 7, 7), ("json", 7, 7)]
)
def test_other_formats_ask_once_and_read_no_row_beyond_the_limit(
    executions: tuple[duckdb.DuckDBPyConnection, list[int]],
    answer_format: Format,
    limit: int | None,
    rows: int,
) -> None:
    connection, calls = executions
    query = COUNTED.format(rows=45, broken=-1)
    out = io.StringIO()
    answer = run_query(connection, query, rows_to_read(answer_format, limit))
    write(answer, answer_format, out, limit)
    # CSV has a line for its header, JSON has one for each bracket.
    more_lines = 1 if answer_format == "csv" else 2
    assert out.getvalue().count("\n") == rows + more_lines
    assert len(calls) == 1


@pytest.mark.parametrize(("prefix", "count"), [("EXPLAIN", 0), ("EXPLAIN ANALYZE", 1)])
def test_an_explanation_asks_at_most_once(
    executions: tuple[duckdb.DuckDBPyConnection, list[int]], prefix: str, count: int
) -> None:
    connection, calls = executions
    query = f"{prefix} {COUNTED.format(rows=100_000, broken=-1)}"
    out = io.StringIO()
    write_table(run_query(connection, query, rows_to_read("table", None)), out)
    assert "CTE" in out.getvalue()
    assert "more rows" not in out.getvalue()
    assert len(calls) == count


@pytest.mark.parametrize("broken", [20, 5_000, 10_020])
def test_an_error_in_the_middle_of_an_answer_is_a_line_and_nothing_is_asked_again(
    executions: tuple[duckdb.DuckDBPyConnection, list[int]], broken: int
) -> None:
    connection, calls = executions
    query = COUNTED.format(rows=1_000_000, broken=broken)
    out = io.StringIO()
    with pytest.raises(QueryError, match=f"row {broken}$"):
        write_table(run_query(connection, query, rows_to_read("table", None)), out)
    assert out.getvalue() == ""
    assert len(calls) == 1


# Formats


def test_csv(small: Path) -> None:
    columns = (
        "head, sink_mass, entropy, [1, 2] AS pair, [0.1::FLOAT, NULL] AS curve, "
        "['a', NULL] AS labels, 'a,b' AS t"
    )
    query = f"SELECT {columns} FROM heads WHERE sequence = 0 AND layer = 0"
    lines = list(csv.reader(io.StringIO(written(connect(small), query, write_csv))))
    assert lines[0] == ["head", "sink_mass", "entropy", "pair", "curve", "labels", "t"]
    lists = ["[1, 2]", "[0.1, null]", '["a", null]', "a,b"]
    # A float32 is written as the shortest number that means it.
    sink_masses = ["0.1", "1.1", "2.1"]
    assert lines[1:] == [[str(head), mass, "", *lists] for head, mass in enumerate(sink_masses)]


def test_json_is_valid_and_keeps_null(small: Path) -> None:
    columns = (
        "0.1::FLOAT AS a, 'NaN'::DOUBLE AS b, '-inf'::FLOAT AS c, NULL AS d, sum(layer) AS e, "
        "[1.5] AS f, [0.1::FLOAT, NULL] AS g, NULL::FLOAT[] AS h, []::FLOAT[] AS i"
    )
    assert json.loads(written(connect(small), f"SELECT {columns} FROM heads", write_json)) == [
        {
            "a": 0.1,
            "b": None,
            "c": None,
            "d": None,
            "e": 12,
            "f": [1.5],
            "g": [0.1, None],
            "h": None,
            "i": [],
        }
    ]
    assert json.loads(written(connect(small), "FROM heads WHERE false", write_json)) == []


def test_parquet(small: Path, tmp_path: Path) -> None:
    write_parquet(
        run_query(connect(small), "SELECT layer, sink_mass FROM heads"), tmp_path / "out.parquet"
    )
    table = pq.read_table(tmp_path / "out.parquet")
    assert (table.num_rows, table.column_names, str(table.schema.field("sink_mass").type)) == (
        24,
        ["layer", "sink_mass"],
        "float",
    )
    with pytest.raises(QueryError, match="cannot be written"):
        write_parquet(
            run_query(connect(small), "heads"), tmp_path / "no" / "such" / "folder.parquet"
        )


def test_a_table_is_exact_and_counts_what_it_leaves_out(small: Path) -> None:
    query = "SELECT label, mean_sink_mass / 3 AS third, mean_entropy, 1234567 AS n FROM by_head"
    assert written(connect(small), query, write_table, 2).split("\n") == [
        "label     third   mean_entropy           n",
        "──────────────────────────────────────────",
        "L0H0    0.03333              –   1,234,567",
        "L0H1     0.3667              –   1,234,567",
        "… 4 more rows (--limit 2)",
        "",
    ]
    query = "SELECT [1/3, NULL, 12345.678] AS a, ['none', NULL] AS b"
    assert written(connect(small), query, write_table).split("\n") == [
        "a                     b        ",
        "───────────────────────────────",
        "[0.3333, –, 12,346]   [none, –]",
        "",
    ]
    assert written(connect(small), "SELECT 1 AS a WHERE false", write_table).split("\n") == [
        "a",
        "─",
        "no rows",
        "",
    ]


def test_wide_tables_are_not_mangled_in_a_pipe(small: Path) -> None:
    header = written(connect(small), "by_head", write_table).split("\n")[0]
    assert header.split() == run_query(connect(small), "by_head").schema.names


# Command line


@pytest.fixture
def app() -> typer.Typer:
    return commands


def test_cli(app: typer.Typer, small: Path, tmp_path: Path) -> None:
    def call(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["query", str(small), *arguments], catch_exceptions=False)
        assert result.exit_code == 0
        return result.stdout

    listing = call().splitlines()
    assert listing[0].split()[:4] == ["heads", "One", "row", "per"]
    assert len(listing) == len(VIEWS) + len(list(QUERIES.rglob("*.sql")))
    assert call("SELECT 1 AS a", "--format", "csv") == "a\n1\n"
    assert call("SELECT 1 AS a", "--format", "json", "-o", str(tmp_path / "a.json")) == ""
    assert json.loads((tmp_path / "a.json").read_text()) == [{"a": 1}]
    assert len(call("heads", "--format", "csv", "--limit", "3").splitlines()) == 4
    assert call("heads", "--limit", "3").splitlines()[-1] == "… 21 more rows (--limit 3)"
    call("heads", "--format", "parquet", "-o", str(tmp_path / "a.parquet"))
    assert pq.read_metadata(tmp_path / "a.parquet").num_rows == 24
    with pytest.raises(QueryError, match="-o FILE"):
        call("heads", "--format", "parquet")


def test_asking_for_help_is_quick_and_needs_no_torch() -> None:
    code = (
        "import sys, headcount.queries.commands.query; "
        "heavy = {'plotly', 'duckdb', 'torch', 'ray', 'pyarrow'} & set(sys.modules); "
        "assert not heavy, heavy; "
        "import headcount.queries.report.report, headcount.queries.ask.answers; "
        "assert not {'torch', 'ray', 'headcount.workers.replica', 'headcount.jobs'} & "
        "set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
