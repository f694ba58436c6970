"""Named queries with parameters: their answers against numpy, on the command line and in SQL."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headcount.queries.ask.answers import run_query
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.schemas.errors import QueryError, SqlMistake
from tests.toys.commands import ended, printed
from tests.toys.toy_runs import Cell, Row, write_run

LAYERS, HEADS, SEQUENCES = 2, 6, 9
PARTS = ("ArXiv", "Github", "Wikipedia (en)")
RUNS = {"a-1": "pile", "b-2": "pile", "c-3": "text"}
MODELS = {"a-1": "toy", "b-2": "seed 2", "c-3": "toy"}


def sink_mass(run: str) -> Cell:
    def value(row: Row) -> float | None:
        # Head L1H2 is never defined, and the first sequence is undefined everywhere.
        if row.sequence == 0 or (row.layer, row.head) == (1, 2):
            return None
        # Heads 3 and 4 are equal: they share a rank.
        head = 3 if row.head == 4 else row.head
        return (0.31 * head + 0.17 * row.layer + 0.011 * row.sequence**3 * ord(run[0])) % 0.97

    return value


def entropy(row: Row) -> float:
    return float(row.sequence * 7 % 5 + row.head)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    size: dict[str, Any] = {"layers": LAYERS, "heads": HEADS, "sequences": SEQUENCES}
    for run, family in RUNS.items():
        cells: dict[str, Cell] = {"sink_mass": sink_mass(run), "entropy": entropy}
        facts = size | {"family": family, "model": MODELS[run]}
        facts |= {"pile_sets": PARTS if family == "pile" else (None,)}
        write_run(out, run, cells, per_shard=4, uniform_baseline=0.125, **facts)
    return out


@pytest.fixture(scope="module")
def database(path: Path) -> RunDatabase:
    return open_runs(path)


def values(run: str) -> np.ndarray:
    """`[layer head sequence]`, NaN where undefined, in the precision of the files."""
    array = np.empty((LAYERS, HEADS, SEQUENCES), np.float32)
    for layer, head, sequence in np.ndindex(*array.shape):
        array[layer, head, sequence] = sink_mass(run)(Row("none", sequence, layer, head))
    return array.astype(float)


def of_run(rows: list[dict[str, Any]], run: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["run_id"] == run]


def test_a_limit_that_hides_runs_is_said(path: Path) -> None:
    """Rows of a view are ordered by run, unless they are ranked."""

    def note(*words: object) -> list[str]:
        end = ended("query", path, *words)
        assert end.code == 0, end.output
        return end.stderr.splitlines()

    of_first = "note: only rows of run a-1 are shown, of 3 runs; see also: "
    assert note("by_head", "--limit", 10) == [f"{of_first}FROM by_head WHERE run_id = 'b-2'"]
    of_two = "note: only rows of 2 runs are shown, of 3 runs; see also: "
    words = ("BY_HEAD", "--limit", 13, "--format", "csv")
    assert note(*words) == [f"{of_two}FROM BY_HEAD WHERE run_id = 'c-3'"]
    words = ("quantiles", "--statistic", "entropy", "--limit", 12)
    of_query = "FROM quantiles(statistic := 'entropy') WHERE run_id = 'b-2'"
    assert note(*words) == [f"{of_first}{of_query}"]
    assert note("heads") == [f"{of_first}FROM heads WHERE run_id = 'b-2'"]
    # All runs are there, no limit cuts anything, or whoever asks has chosen by SQL.
    for words in (
        ("by_head", "--limit", 25),
        ("ranking", "--limit", 3),
        ("by_head", "--format", "csv"),
        ("FROM by_head LIMIT 10",),
        ("by_head", "--limit", 0),
        ("statistics", "--limit", 1),
    ):
        assert note(*words) == [], words


def test_a_ranking_has_means_errors_and_uniform_baselines(database: RunDatabase) -> None:
    rows = of_run(database.records("ranking"), "a-1")
    expected = values("a-1")[:, :, 1:]
    *ranked, last = rows
    means = [row["mean"] for row in ranked]
    assert means == sorted(means, reverse=True)
    for row in ranked:
        cell = expected[row["layer"], row["head"]]
        sd = cell.std(ddof=1)
        assert row == row | {
            "mean": pytest.approx(cell.mean(), rel=1e-12),
            "sd": pytest.approx(sd, rel=1e-9),
            "standard_error": pytest.approx(sd / 8**0.5, rel=1e-9),
            "above_uniform": pytest.approx(cell.mean() - 0.125),
            "rank": 1 + sum(mean > row["mean"] for mean in means),
        } | {"defined": 8, "sequences": 9, "n_ctx": 5}
    assert (last["label"], last["rank"], last["mean"]) == ("L1H2", None, None)
    ascending = database.records("FROM ranking(statistic := 'entropy', ascending := true)")
    assert [row["label"] for row in of_run(ascending, "b-2")[:2]] == ["L0H0", "L1H0"]
    assert {row["statistic"] for row in ascending} == {"entropy"}


def test_a_statistic_is_asked_of_the_runs_that_measured_it(tmp_path: Path) -> None:
    for run, columns in {"a-1": ("entropy",), "b-2": ("entropy", "sink_mass")}.items():
        write_run(tmp_path, run, dict.fromkeys(columns, lambda row: float(row.head)))
    without_sinks = open_runs(tmp_path / "run_id=a-1")
    both = open_runs(tmp_path)
    for name in ("ranking", "outliers"):
        with pytest.raises(QueryError, match=r"'sink_mass' was not measured .*; --statistic names"):
            without_sinks.records(name)
        assert without_sinks.records(f"FROM {name}(statistic := 'entropy')")
        assert {row["run_id"] for row in both.records(name)} == {"b-2"}
    assert both.rows("SELECT label FROM ranking LIMIT 1") == [("L0H2",)]


def test_a_head_card_places_a_head_among_the_others(database: RunDatabase) -> None:
    rows = of_run(database.records("FROM head_card(label := 'l0h3')"), "a-1")
    card = {row["statistic"]: row for row in rows}
    assert set(card) == {"entropy", "sink_mass"}
    means = values("a-1")[:, :, 1:].mean(-1)
    sink = card["sink_mass"]
    others = means[~np.isnan(means)]
    cell = values("a-1")[0, 3, 1:]
    assert sink == sink | {"heads": 11, "uniform_baseline": 0.125, "defined": 8, "undefined": 1} | {
        "mean": pytest.approx(means[0, 3]),
        "percentile": pytest.approx(100 * (others < means[0, 3]).sum() / 10),
        "standard_error": pytest.approx(cell.std(ddof=1) / 8**0.5, rel=1e-6),
        "minimum": pytest.approx(cell.min()),
        "maximum": pytest.approx(cell.max()),
    }
    # Four heads of twelve have a smaller entropy than head 2, and one other has the same.
    entropies = {
        row["run_id"]: row["percentile"]
        for row in database.records("FROM head_card('L0H2')")
        if row["statistic"] == "entropy"
    }
    assert entropies == dict.fromkeys(RUNS, pytest.approx(100 * 4 / 11))


def test_quantiles_are_those_of_numpy(database: RunDatabase) -> None:
    rows = of_run(database.records("quantiles"), "b-2")
    assert len(rows) == LAYERS * HEADS
    percents = (1, 5, 25, 50, 75, 95, 99)
    for row in rows:
        numbers = np.percentile(values("b-2")[row["layer"], row["head"], 1:], percents)
        is_defined = row["label"] != "L1H2"
        expected = pytest.approx(numbers) if is_defined else [None] * 7
        assert [row[f"p{percent:02}"] for percent in percents] == expected
        assert row["defined"] == (8 if is_defined else 0)


def test_outliers_are_the_extreme_sequences_and_the_first_of_equals(database: RunDatabase) -> None:
    rows = [row for row in database.records("FROM outliers(k := 2)") if row["run_id"] == "a-1"]
    assert len(rows) == (LAYERS * HEADS - 1) * 4
    cell = values("a-1")[1, 5]
    order = [int(place) for place in np.argsort(cell[1:]) + 1]
    found = [row for row in rows if row["label"] == "L1H5"]
    assert [(row["extreme"], row["rank"], row["sequence"]) for row in found] == [
        ("largest", 1, order[-1]),
        ("largest", 2, order[-2]),
        ("smallest", 1, order[0]),
        ("smallest", 2, order[1]),
    ]
    spread = cell[1:].std(ddof=1)
    for row in found:
        value, part = cell[row["sequence"]], PARTS[row["sequence"] % 3]
        assert (row["value"], row["pile_set_name"]) == (value, part)
        assert row["deviations"] == pytest.approx((value - cell[1:].mean()) / spread)
    # Sequences 0 and 5 share the smallest entropy; 2 and 7 the largest.
    equals = database.rows("SELECT extreme, sequence FROM outliers('entropy', 1)")
    assert {*equals} == {("largest", 2), ("smallest", 0)}


def test_contrasts_are_of_all_parts_or_of_one_input(database: RunDatabase) -> None:
    contrasts = "FROM contrasts(statistic := 'sink_mass', compare := '{}')".format
    rows = database.records(contrasts("pile_set_name"))
    assert {(row["this"], row["other"]) for row in rows} == {*combinations(PARTS, 2)}
    rows = database.records(contrasts("input_family', this := 'text"))
    (row,) = (row for row in rows if row["label"] == "L1H4")
    assert row == row | {"run_id": None, "this": "text", "other": "pile", "model": "toy"}
    this, other = (values(run)[1, 4, 1:].mean() for run in ("c-3", "a-1"))
    assert row["difference"] == pytest.approx(this - other)


def ranks(numbers: np.ndarray) -> np.ndarray:
    return np.array([(numbers < x).sum() + ((numbers == x).sum() + 1) / 2 for x in numbers])


def test_agreement_of_seeds_is_the_correlation_of_ranks(database: RunDatabase) -> None:
    rows = database.records("seed_agreement")
    assert [(row["run_id"], row["other_run"], row["statistic"]) for row in rows] == [
        ("a-1", "b-2", "entropy"),
        ("a-1", "b-2", "sink_mass"),
    ]
    this, other = (
        np.nanmean(np.delete(values(run).reshape(-1, SEQUENCES), HEADS + 2, 0), 1)
        for run in ("a-1", "b-2")
    )
    sink = rows[1]
    assert (sink["heads"], sink["model"], sink["other_model"]) == (11, "toy", "seed 2")
    assert sink["spearman"] == pytest.approx(np.corrcoef(ranks(this), ranks(other))[0, 1])
    assert sink["pearson"] == pytest.approx(np.corrcoef(this, other)[0, 1])
    # The entropies of both runs are equal.
    assert (rows[0]["spearman"], rows[0]["top"]) == (pytest.approx(1), 1)


def test_uniform_baselines_are_one_row_per_statistic(database: RunDatabase) -> None:
    sql = "SELECT DISTINCT statistic, uniform_baseline, n_ctx FROM uniform_baselines ORDER BY 1"
    assert database.rows(sql) == [("entropy", 0.125, 5), ("sink_mass", 0.125, 5)]


# Parameters


def test_parameters_on_the_command_line_and_in_sql_are_the_same(path: Path) -> None:
    options = ("--limit", "3", "--format", "csv")
    # Of a view, a note says that the limit hides runs.
    rows = ended("query", path, "outliers", "--statistic=entropy", "--k", "1", *options).stdout
    assert rows == printed("query", path, "FROM outliers(statistic := 'entropy', k := 1)", *options)
    assert rows.count("\n") == 4
    out = printed("query", path, "outliers", "--help")
    assert "--k WHOLE NUMBER  How many sequences of each head, at either end. (default 3)" in out
    assert "In SQL: FROM outliers(statistic := 'sink_mass', k := 3)" in out
    assert "RUNS" in printed("query", "--help")


def test_a_parameter_without_a_default_must_be_given(path: Path, tmp_path: Path) -> None:
    (tmp_path / "one_layer.sql").write_text(
        "-- Heads of a layer.\n-- parameter depth BIGINT: The layer.\n"
        "-- example: one_layer --depth 1\nFROM heads WHERE layer = $depth"
    )
    database = open_runs(path, queries=tmp_path)
    assert len(database.rows("FROM one_layer(depth := 1)")) == 3 * HEADS * SEQUENCES
    for query in ("FROM one_layer", "FROM one_layer()", "SELECT label FROM one_layer"):
        with pytest.raises(QueryError, match=r"needs --depth .*, as in: one_layer --depth 1"):
            database.records(query)
    (tmp_path / "one_layer.sql").write_text("-- parameter depth LAYER: The layer.\nFROM heads")
    with pytest.raises(QueryError, match=r"expected a type of VARCHAR, .* got LAYER"):
        open_runs(path, queries=tmp_path)


def test_a_parameter_may_stand_wherever_groups_are_asked(path: Path, tmp_path: Path) -> None:
    (tmp_path / "busy_layers.sql").write_text(
        "-- Layers by the rows of their heads from some head on.\n"
        "-- parameter first BIGINT = 4: the first head that counts.\n"
        "-- parameter rows BIGINT = 9: rows that a layer has at least.\n"
        "SELECT layer, count(*) - $first AS above, $rows AS least\n"
        "FROM heads WHERE head >= $first AND run_id = 'a-1' GROUP BY layer\n"
        "HAVING count(*) >= $rows ORDER BY layer\n"
    )
    # By a column that is none of the groups, which has nothing to do with a parameter.
    (tmp_path / "ungrouped.sql").write_text(
        "-- Not a query.\n-- parameter least BIGINT = 1: rows.\n"
        "SELECT layer, head FROM heads GROUP BY layer HAVING count(*) >= $least\n"
    )
    database = open_runs(path, queries=tmp_path)
    assert database.rows("FROM busy_layers") == [(layer, 14, 9) for layer in range(LAYERS)]
    assert database.rows("FROM busy_layers(rows := 19)") == []
    assert database.rows("FROM busy_layers(first := 3, rows := 27)") == [(0, 24, 27), (1, 24, 27)]
    with pytest.raises(QueryError, match='column "head" must appear in the GROUP BY clause'):
        database.rows("FROM ungrouped")


def test_a_mistake_points_at_its_place(database: RunDatabase) -> None:
    for sql, pointer in {
        "SELECT lyer FROM heads": "SELECT lyer FROM heads\n       ^^^^",
        "SELECT 1\nFROM heads h\nWHERE h.lyer = 1": "WHERE h.lyer = 1\n      ^^^^^^",
        "SELECT layer frm heads": "SELECT layer frm heads\n                 ^^^^^",
        "FROM headz": "FROM headz\n     ^^^^^",
        "SELECT layer, sum(head) FROM heads": "SELECT layer, sum(head) FROM heads\n       ^^^^^",
        "SELECT error('LINE 1: x')": None,
    }.items():
        with pytest.raises(SqlMistake) as mistake:
            list(run_query(database, sql).rows())
        assert mistake.value.pointer == pointer
