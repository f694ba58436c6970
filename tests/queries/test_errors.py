"""Errors, changes, p and q of views against definitions in numpy, where documents are known.

And how often intervals and discoveries are right where the truth is.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from headcount.queries.answers.numbers import NUMBERS
from headcount.queries.answers.page_queries import Curves, Head, Heatmap, Scope
from headcount.queries.answers.page_runs import PageRuns
from headcount.queries.answers.run_details import Details
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.queries.report.head_card import head_card
from headcount.schemas.statistics import STATISTICS as ALL
from tests.queries.page.test_explore_queries import Asker
from tests.toys.toy_runs import Cell, Row, write_run

if TYPE_CHECKING:
    from headcount.jobs.plan.plan import Plan

N_CTX, PER_SHARD, HEADS = 9, 4, 3 * 8
STATISTICS = ("sink_mass", "value_norm", "induction_score")
INTERVENTIONS = ("none", "zero_head(1,6)")


def error_over_documents(values: Any, of_documents: Any) -> tuple[Any, int]:
    """The standard error of the mean, and the number of documents; NaN is no value."""
    values = np.array(values, float)
    defined = values[~np.isnan(values)]
    names, document = np.unique(np.array(of_documents)[~np.isnan(values)], return_inverse=True)
    number = len(names)
    shares = np.bincount(document) / len(defined)
    if number < 2:
        return None, number
    sums = np.bincount(document, defined - defined.mean())
    error = ((sums**2).sum() / (1 - (shares**2).sum())) ** 0.5 / len(defined)
    return pytest.approx(float(error), rel=1e-5, abs=1e-9), number


def effective_number(values: Any, of_documents: Any) -> Any:
    """How many equally long documents are as sure as these."""
    sizes = np.unique(np.array(of_documents)[~np.isnan(values)], return_counts=True)[1]
    # The page and its answers are in float32, and have NaN for what is undefined.
    expected = sizes.sum() ** 2 / (sizes**2).sum() if len(sizes) else np.nan
    return pytest.approx(expected, rel=1e-6, nan_ok=True)


def freedom_of(values: Any, of_documents: Any) -> Any:
    """The degrees of freedom of the mean; NaN with less than two documents."""
    is_defined = ~np.isnan(np.array(values, float))
    sizes = np.unique(np.array(of_documents)[is_defined], return_counts=True)[1]
    if len(sizes) < 2:
        return pytest.approx(np.nan, nan_ok=True)
    squares = sizes**2 / sizes.sum() ** 2
    # Satterthwaite: of a sum of χ² of one degree each, with the squares as weights.
    freedom = (1 - squares.sum()) * squares.sum() ** 2 / (squares**2).sum()
    return pytest.approx(max(1, freedom), rel=1e-6)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A run of texts of which some are far longer than a sequence, and longer than a shard."""
    from tests.toys.runs_here import measure_here
    from tests.toys.toy_corpora import documents, write_jsonl

    folder = tmp_path_factory.mktemp("runs")
    lengths = (70, 9, 20, 3, 31, 8, 130, 5, 5, 33, 12, 40)
    file = write_jsonl(folder / "texts.jsonl", documents(*lengths))
    fields = {
        "model": "bundled:gpt2-mini", "out": str(folder), "n_ctx": N_CTX, "sequences": "all",
        "sequences_per_shard": PER_SHARD,
        "input": {"family": "pile", "files": str(file), "packing": "concat"},
        "interventions": list(INTERVENTIONS), "statistics": list(STATISTICS),
        "predictions": ["loss"], "curves": ["attention_received_by_key"],
        "profiles": ["attention_by_lag"],
    }  # fmt: skip
    prepared = measure_here(fields, "texts")
    assert prepared.manifest.shards > 5
    return prepared


Values = dict[tuple[str, str, int, int], np.ndarray]


class Measured(NamedTuple):
    documents: np.ndarray
    parts: np.ndarray
    losses: np.ndarray
    values: Values
    """By sequence; for each intervention, statistic, layer and head."""


@pytest.fixture(scope="module")
def unmerged(plan: Plan) -> RunDatabase:
    """Its rows, before a test merges them."""
    return open_runs(plan.run.path)


@pytest.fixture(scope="module")
def measured(unmerged: RunDatabase) -> Measured:
    database = unmerged
    rows = database.records("SELECT * FROM sequences WHERE intervention = 'none' ORDER BY sequence")
    documents = np.array([row["document"] for row in rows])
    counts = np.unique(documents, return_counts=True)[1]
    assert counts.max() > 2 * PER_SHARD
    assert 1 in counts
    values: Values = {}
    for statistic in STATISTICS:
        lists = f"list({statistic} ORDER BY sequence)"
        sql = f"SELECT intervention, layer, head, {lists} FROM heads GROUP BY ALL"
        for intervention, layer, head, numbers in database.rows(sql):
            values[intervention, statistic, layer, head] = np.array(numbers, float)
    assert any(np.isnan(numbers).any() for numbers in values.values())
    parts = np.array([row["pile_set_name"] or "" for row in rows])
    return Measured(documents, parts, np.array([row["loss"] for row in rows], float), values)


def check(record: dict[str, Any], values: Any, of_documents: Any) -> None:
    """The record has the error and the number of documents that numpy has."""
    expected = error_over_documents(values, of_documents)
    assert (record["standard_error"], record["documents"]) == expected
    # The page has no effective number, and freedom by head only.
    for name, definition in (
        ("effective_documents", effective_number), ("degrees_of_freedom", freedom_of)
    ):  # fmt: skip
        if name in record:
            found = np.nan if record[name] is None else record[name]
            assert found == definition(values, of_documents)
    assert "subset" in record or "degrees_of_freedom" in record


def check_views(database: RunDatabase, measured: Measured) -> None:
    documents, parts, _, values = measured

    def place(record: dict[str, Any]) -> tuple[str, str, int, int]:
        return record["intervention"], record["statistic"], record["layer"], record["head"]

    for view, number in (("head_summaries", 3), ("FROM ranking(statistic := 'value_norm')", 1)):
        records = database.records(view)
        assert len(records) == 2 * HEADS * number
        for record in records:
            check(record, values[place(record)], documents)
    for record in database.records("subset_summaries"):
        is_here = parts == (record["pile_set_name"] or "")
        check(record, values[place(record)][is_here], documents[is_here])
    for record in database.records("by_pile_set"):
        is_here = parts == record["pile_set_name"]
        for name in STATISTICS:
            own = values[place(record | {"statistic": name})][is_here]
            expected, _ = error_over_documents(own, documents[is_here])
            assert record[f"se_{name}"] == expected
        assert record["documents"] == len(set(documents[is_here]))
    records = database.records("effects")
    assert records
    for record in records:
        untouched = values[place(record | {"intervention": "none"})]
        intervened = values[place(record)]
        check(record, intervened - untouched, documents)
        defined = ~np.isnan(intervened - untouched)
        means = (untouched[defined].mean(), intervened[defined].mean())
        assert (record["untouched"], record["intervened"]) == pytest.approx(means, rel=1e-6)
        assert record["change"] == pytest.approx(means[1] - means[0], abs=1e-6)
        assert record["pairs"] == defined.sum()


def check_pages(plan: Plan, database: RunDatabase, measured: Measured) -> None:
    documents, parts, _, values = measured
    ask = Asker(Path(str(plan.run.path)))
    ask.run_id = plan.run.run_id
    place = {"layer": 1, "head": 3}
    numbers = ask("heatmap", head=place)
    columns = dict(zip(NUMBERS, numbers["arrays"], strict=True))
    for index, statistic in enumerate(numbers["statistics"]):
        row = {name: column[index, 0, 0] for name, column in columns.items()}
        check(row, values["none", statistic, 1, 3], documents)
    for row in ask("subsets", head=place, statistic="sink_mass")["rows"]:
        is_here = parts == (row["subset"] or "")
        check(row, values["none", "sink_mass", 1, 3][is_here], documents[is_here])
    ask.engine.close()
    runs = PageRuns(database, is_whole=True)
    for intervention in INTERVENTIONS:
        scope = Scope(run_id=plan.run.run_id, intervention=intervention)
        answer = runs.answer(Heatmap(kind="heatmap", scope=scope))
        of_all = dict(zip(NUMBERS, answer.arrays, strict=True))
        for index, layer, head in np.ndindex(of_all["mean"].shape):
            own = values[intervention, answer.header["statistics"][index], layer, head]
            error, number = error_over_documents(own, documents)
            assert of_all["documents"][index, layer, head] == number
            shown = of_all["standard_error"][index, layer, head]
            assert shown == error or (error is None and np.isnan(shown))
    card = head_card(database, "L1H6").statistic("sink_mass")
    expected = error_over_documents(values["none", "sink_mass", 1, 6], documents)
    assert (card.standard_error, card.documents) == expected


def test_views_give_the_errors_of_numpy(unmerged: RunDatabase, measured: Measured) -> None:
    check_views(unmerged, measured)


def test_pages_give_the_errors_of_numpy(
    plan: Plan, unmerged: RunDatabase, measured: Measured
) -> None:
    check_pages(plan, unmerged, measured)


@pytest.mark.long
def test_roll_ups_give_the_errors_of_numpy(plan: Plan, measured: Measured) -> None:
    # Some shards are merged in pairs, whose documents go on in other roll-ups and in rows.
    from headcount.jobs.upkeep.compaction import compact

    compact(plan.run, 2 * PER_SHARD * HEADS * N_CTX + 1)
    database = open_runs(plan.run.path)
    assert database.rows("SELECT count(DISTINCT document) > 2 FROM rollups") == [(True,)]
    check_views(database, measured)
    check_pages(plan, database, measured)
    compact(plan.run)
    database = open_runs(plan.run.path)
    assert not database.rows("FROM internal.unrolled_heads")
    check_views(database, measured)
    check_pages(plan, database, measured)


def test_predictions_and_kept_curves_have_numpys_errors(
    plan: Plan, unmerged: RunDatabase, measured: Measured
) -> None:
    database = unmerged
    runs = PageRuns(database)
    scopes = [Scope(run_id=plan.run.run_id, intervention=name) for name in INTERVENTIONS]
    sql = "SELECT loss FROM sequences WHERE intervention <> 'none' ORDER BY sequence"
    changes = np.array(database.rows(sql), float).ravel() - measured.losses
    details = [runs.answer(Details(kind="details", scope=scope)).header for scope in scopes]
    ([untouched], [changed]) = (one["rows"] for one in details)
    error, _ = error_over_documents(measured.losses, measured.documents)
    assert (untouched["standard_error"], untouched["change_error"]) == (error, None)
    error, _ = error_over_documents(changes, measured.documents)
    assert changed["change_error"] == error
    query = Curves(kind="curves", scope=scopes[0], head=Head(layer=1, head=6))
    [errors] = [
        curve["standard_errors"]
        for curve in runs.answer(query).header["rows"]
        if not curve["profiled"]
    ]
    lists = database.rows(
        "SELECT attention_received_by_key FROM curves WHERE intervention = 'none' "
        "AND label = 'L1H6' ORDER BY sequence"
    )
    for found, one in zip(errors, np.array(lists)[:, 0].T, strict=True):
        assert found == error_over_documents(one, measured.documents)[0]


def test_errors_of_profiles_are_over_shards_where_documents_are_long(
    unmerged: RunDatabase,
) -> None:
    database = unmerged
    own = "profile = 'attention_by_lag' AND intervention = 'none' AND label = 'L1H6' AND lag = 2"
    shards = database.records(f"SELECT count, mean FROM profiles WHERE {own}")
    numbers = [row["mean"] for row in shards for _ in range(row["count"])]
    groups = [number for number, row in enumerate(shards) for _ in range(row["count"])]
    sql = f"SELECT standard_error, groups FROM profile_means WHERE {own}"
    assert database.rows(sql) == [error_over_documents(numbers, groups)]


def test_runs_and_groups_are_compared_over_documents(tmp_path: Path) -> None:
    of_documents = (0, 0, 0, 1, 2, 2, 2, 2, 3, 4, 4, 5)
    parts = ("ArXiv", "Github", "Github", "ArXiv")

    def value(row: Row) -> float:
        return float(np.random.default_rng([row.sequence, row.head]).random())

    def other_value(row: Row) -> float:
        return value(row) ** 2 + of_documents[row.sequence] / 8

    facts = {"sequences": 12, "documents": of_documents, "pile_sets": parts}
    write_run(tmp_path, "a-1", {"sink_mass": value}, **facts)
    write_run(tmp_path, "b-2", {"sink_mass": other_value}, model="other", **facts)
    database = open_runs(tmp_path)
    rows = [Row("none", sequence, 1, 2) for sequence in range(12)]
    one = np.array([value(row) for row in rows], np.float32).astype(float)
    two = np.array([other_value(row) for row in rows], np.float32).astype(float)
    where = "run_id = 'b-2' AND label = 'L1H2' AND statistic = 'sink_mass'"
    (change,) = database.records(f"FROM run_changes WHERE {where}")
    check(change, two - one, of_documents)
    where = "WHERE label = 'L1H2' AND coalesce(run_id, 'a-1') = 'a-1'"
    is_arxiv = np.arange(12) % 4 % 3 == 0
    for compare, groups in {
        "pile_set_name": [(one[chosen], np.array(of_documents)[chosen]) for chosen in
                          (is_arxiv, ~is_arxiv)],
        "model": [(two, of_documents), (one, of_documents)],
    }.items():  # fmt: skip
        (row,) = database.records(f"FROM contrasts(compare := '{compare}') {where}")
        (this, this_number), (other, other_number) = (error_over_documents(*g) for g in groups)
        expected = math.hypot(*(0 if e is None else e.expected for e in (this, other)))
        difference = np.mean(groups[0][0]) - np.mean(groups[1][0])
        found = [row[name] for name in ("difference", "standard_error", "z")]
        assert found == pytest.approx([difference, expected, difference / expected])
        assert (row["this_documents"], row["other_documents"]) == (this_number, other_number)
        sequences = (row["this_sequences"], row["other_sequences"])
        assert sequences == tuple(len(numbers) for numbers, _ in groups)


def test_the_error_of_a_small_spread_on_a_large_mean_keeps_its_digits(tmp_path: Path) -> None:
    from headcount.jobs.upkeep.compaction import compact

    of_documents = np.repeat(np.arange(8), (1, 5, 2, 2, 9, 3, 1, 7))
    run = write_run(
        tmp_path, "a-1", {"value_norm": lambda row: 4096 + row.sequence % 7 / 1024},
        sequences=30, per_shard=4, documents=of_documents.tolist(), layers=1, heads=1,
    )  # fmt: skip
    numbers = 4096 + np.arange(30) % 7 / 1024
    error, _ = error_over_documents(numbers, of_documents)
    for rows in (4 * 2 + 1, 1000, None):
        (row,) = open_runs(run.path).records("head_summaries")
        assert row["standard_error"] == pytest.approx(error.expected, rel=1e-9)
        if rows:
            compact(run, rows)


BY_HAND: dict[str, tuple[list[int | None], list[float | None], float | None, float | None]] = {
    # Documents and values of sequences, the error and the degrees of freedom.
    # One document: nothing is known of others.
    "a-1": ([0, 0, 0], [1, 2, 6], None, None),
    # Two: S_d - n_d x̄ is -1 and 1, so s² = 2 / (4 - 2).
    "b-1": ([0, 1], [1, 3], 1, 1),
    # One that a shard's end divides: the residuals are -2, 2, 0, 0; Σ n_d² = 7, Σ n_d⁴ = 19.
    "c-1": ([0, 0, 1, 2, 3], [1, 1, 4, 2, 2], (8 / (25 - 7)) ** 0.5, (1 - 7 / 25) * 7**2 / 19),
    # The same, and a sequence of the first document without a value.
    "d-1": ([0, 0, 0, 1, 2, 3], [1, None, 1, 4, 2, 2], (8 / 18) ** 0.5, (1 - 7 / 25) * 7**2 / 19),
    # One has most sequences: (1 - 39/81) 39² / 1299 = 0.6, and 1 is the least.
    "e-1": ([0, 0, 0, 0, 0, 0, 1, 2, 3], [2, 2, 2, 2, 2, 2, 0, 4, 2], (8 / (81 - 39)) ** 0.5, 1),
    # The residuals of synthetic sequences: -3, -1, 1 and 3.
    "f-1": ([None] * 4, [1, 3, 5, 7], (20 / (16 - 4)) ** 0.5, 3),
}


def test_errors_and_freedom_by_hand_from_rows_and_from_roll_ups(tmp_path: Path) -> None:

    from headcount.jobs.upkeep.compaction import compact

    def cell_of(values: list[float | None]) -> Cell:
        return lambda row: values[row.sequence]

    runs = [
        write_run(
            tmp_path, name, {"value_norm": cell_of(values)}, layers=1, heads=1,
            sequences=len(documents), per_shard=1, documents=documents,
        )
        for name, (documents, values, *_) in BY_HAND.items()
    ]  # fmt: skip
    expected = {
        name: (pytest.approx(error), pytest.approx(freedom))
        for name, (_, _, error, freedom) in BY_HAND.items()
    }
    # Each shard of its own; two shards in a roll-up; all in one.
    for rows in (3, 1000, None):
        found = {
            row["run_id"]: (row["standard_error"], row["degrees_of_freedom"])
            for row in open_runs(tmp_path).records("head_summaries")
        }
        assert found == expected
        if rows:
            for run in runs:
                compact(run, rows)


# Changes between interventions and between runs


THREE = ("none", "zero_query_bias", "zero_mlps")


def varied_cell(name: str, missing_every: int) -> Cell:
    """Numbers that differ everywhere. Every `missing_every`-th has no value."""

    def value(row: Row) -> float | None:
        place = row.sequence * 31 + row.layer * 7 + row.head * 3 + len(row.intervention) + len(name)
        return None if place % missing_every == 0 else math.sin(place * 1.7) / 2 + 0.5

    return value


def varied_cells(shift: float = 0.0) -> dict[str, Cell]:
    """Three statistics: one shifted, one not, and one that is never defined."""
    sink_mass = varied_cell("sink_mass", 5)

    def shifted(row: Row) -> float | None:
        value = sink_mass(row)
        return None if value is None else value + shift * (row.sequence + 1)

    return {
        "sink_mass": shifted,
        "entropy": varied_cell("entropy", 4),
        "value_norm": lambda row: None,
    }


def check_change(row: dict[str, Any], before: list[Any], after: list[Any]) -> None:
    """Hold a row to the values on each sequence."""
    # Files hold float32, so the exact change is that of the rounded values.
    pairs = [
        (np.float32(old), np.float32(new))
        for old, new in zip(before, after, strict=True)
        if old is not None and new is not None
    ]
    old_values, new_values = np.array(pairs, np.float64).T
    changes = new_values - old_values
    error = changes.std(ddof=1) / math.sqrt(len(pairs))
    expected = [old_values.mean(), new_values.mean(), changes.mean(), error]
    found = [row[name] for name in ("other", "this", "change", "standard_error")]
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert row["pairs"] == len(pairs) < len(before)


def test_a_single_pair_has_no_standard_error_and_no_pair_no_row(tmp_path: Path) -> None:
    def only_first(row: Row) -> float | None:
        return 0.5 if row.sequence == 0 or row.intervention == "none" else None

    def never_both(row: Row) -> float | None:
        return 0.5 if (row.sequence % 2 == 0) == (row.intervention == "none") else None

    cells = {"sink_mass": only_first, "entropy": never_both}
    write_run(tmp_path, "a-1", cells, interventions=("none", "zero_mlps"), layers=1, heads=1)
    write_run(tmp_path, "b-2", cells)  # Without interventions there are no effects.
    (effect,) = open_runs(tmp_path).records("effects")
    assert effect["statistic"] == "sink_mass"
    assert (effect["change"], effect["standard_error"], effect["pairs"]) == (0, None, 1)


def test_run_changes_are_those_of_numpy_in_both_directions(tmp_path: Path) -> None:
    first_cells = varied_cells()
    second_cells = varied_cells(shift=0.01)
    # A statistic that only one of the runs measured has no change.
    del second_cells["entropy"]
    write_run(tmp_path, "a-1", first_cells, sequences=9, interventions=("none", "zero_query_bias"))
    write_run(tmp_path, "b-2", second_cells, sequences=7, heads=2, interventions=THREE)
    changes = open_runs(tmp_path).records("run_changes")
    # Directions, interventions, layers and heads that both runs have.
    assert len(changes) == 2 * 2 * 2 * 2
    assert {row["statistic"] for row in changes} == {"sink_mass"}
    for row in changes:
        places = [Row(row["intervention"], s, row["layer"], row["head"]) for s in range(7)]
        first, second = (
            [cells["sink_mass"](place) for place in places] for cells in (first_cells, second_cells)
        )
        before, after = (second, first) if row["run_id"] == "a-1" else (first, second)
        check_change(row, before, after)


def test_runs_on_other_input_are_not_compared(tmp_path: Path) -> None:
    different: tuple[dict[str, Any], ...] = ({}, {"n_ctx": 6}, {"family": "repeated_random"})
    for number, facts in enumerate(different):
        write_run(tmp_path, f"a-{number}", varied_cells(), **facts)
    assert open_runs(tmp_path).records("run_changes") == []


def test_the_frontier_of_sink_and_loss_is_what_nothing_beats(tmp_path: Path) -> None:
    # By intervention: the mean sink and the mean loss. Two have the sink or the loss of another.
    points = {
        "none": (0.5, 2.0), "zero_mlps": (0.25, 3.0), "zero_tokens": (0.5, 3.0),
        "zero_positions": (0.625, 2.0), "zero_query_bias": (0.75, 4.0),
        "zero_first_token": (0.125, 5.0),
    }  # fmt: skip

    of_documents = (0, 0, 1)

    def values(intervention: str) -> np.ndarray:
        """Sinks and losses by sequence, which spread more under an intervention."""
        spread = (np.arange(3) - 1) / (2 if intervention == "none" else 1)
        return np.array([points[intervention][0] + spread / 8, points[intervention][1] + spread])

    def sink_mass(row: Row) -> float:
        return values(row.intervention)[0, row.sequence] + 0.0625 * (2 * row.head - 1)

    def loss(intervention: str, sequence: int) -> float:
        return values(intervention)[1, sequence]

    facts: dict[str, Any] = {"sequences": 3, "heads": 2, "interventions": [*points]}
    facts["documents"] = of_documents
    write_run(tmp_path, "a-1", {"sink_mass": sink_mass}, losses=loss, **facts)
    write_run(tmp_path, "b-2", {"sink_mass": sink_mass}, **facts)  # It has no losses.
    rows = open_runs(tmp_path).records("sink_against_loss")
    found = {row["intervention"]: (row["sink_mass"], row["loss"]) for row in rows}
    assert (found, len(rows)) == (points, len(points))
    assert [row["sink_mass"] for row in rows] == sorted(sink for sink, _ in points.values())
    for row in rows:
        here = values(row["intervention"])
        for name, own, change in zip(("sink", "loss"), here, here - values("none"), strict=True):
            assert row[f"{name}_change"] == change.mean()
            for column, of_column in ((f"{name}_error", own), (f"{name}_change_error", change)):
                assert (row[column], 2) == error_over_documents(of_column, of_documents)
        assert (row["documents"], row["sequences"]) == (2, 3)
    beaten = {row["intervention"] for row in rows if not row["on_frontier"]}
    assert beaten == {"zero_query_bias"}


def test_without_an_untouched_run_of_the_scan_there_are_no_changes(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"interventions": ["zero_mlps"], "losses": lambda *_: 1.0}
    write_run(tmp_path, "a-1", {"sink_mass": lambda _: 0.5}, **facts)
    (row,) = open_runs(tmp_path).records("sink_against_loss")
    changes = ("sink_change", "sink_change_error", "loss_change", "loss_change_error")
    assert [row[name] for name in changes] == [None] * 4
    assert (row["sink_mass"], row["loss"], row["on_frontier"]) == (0.5, 1, True)


# p and q

# t, degrees of freedom, and P(|T| > t) by mpmath's incomplete beta function with 40 digits.
TAILS = [
    (0.5, 1, 0.704832764699), (12.706, 1, 0.0500008023581), (1e6, 1, 6.36619772367e-7),
    (0.1, 2, 0.929465438414), (4.303, 2, 0.0499925249852), (1e3, 2, 9.99998500002e-7),
    (1e6, 2, 9.99999999999e-13), (2.9, 3.5, 0.0518543619611), (100, 3.5, 3.55774261555e-7),
    (3e3, 3.5, 2.40695237425e-12), (0.001, 7, 0.999230017245), (2.365, 7, 0.0499723722748),
    (30, 7, 1.17884688807e-8), (150, 7, 1.54424462303e-13), (1, 29, 0.325581988016),
    (2.045, 29, 0.0500240759224), (12, 29, 9.06070833314e-13), (1.962, 999, 0.0500398017967),
    (5, 999, 6.7683618958e-7), (7.3, 999, 5.86565504737e-13), (1.96, 1e6, 0.0499960675828),
    (5, 1e9, 5.73303231780e-7), (0, 5, 1),
]  # fmt: skip


def p_of(t: float, df: float) -> float:
    """P(|T| > t), by the midpoint rule over u = t + s/(1-s) of the density."""
    share = (np.arange(20_000) + 0.5) / 20_000
    u = abs(t) + share / (1 - share)
    density = (1 + u**2 / df) ** (-(df + 1) / 2) / (1 - share) ** 2
    whole = (1 + (share / (1 - share)) ** 2 / df) ** (-(df + 1) / 2) / (1 - share) ** 2
    return float(density.sum() / whole.sum())


def quantile(p: float, df: float) -> float:
    """The t that p of all differences exceed in size."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if p_of(middle, df) > p else (low, middle)
    return low


def q_of(p: dict[str, float]) -> dict[str, float]:
    """The smallest level at which Benjamini and Hochberg pick a head."""

    def is_picked(head: str, level: float) -> bool:
        ordered = sorted(p.values())
        passing = [one for i, one in enumerate(ordered, 1) if one <= level * i / len(p)]
        return bool(passing) and p[head] <= max(passing)

    levels = sorted(one * len(p) / i for one in p.values() for i in range(1, len(p) + 1))
    # The level itself may lie below what rounding made of it.
    return {head: next(a for a in levels if is_picked(head, a * (1 + 1e-12))) for head in p}


def test_tails_of_student_are_exact(database: RunDatabase) -> None:
    rows = ", ".join(f"({t}::DOUBLE, {df}::DOUBLE)" for t, df, _ in TAILS)
    found = database.rows(f"SELECT student_tail(t, df), df FROM (VALUES {rows}) AS cases (t, df)")
    for (p, df), (*_, exact) in zip(found, TAILS, strict=True):
        assert p == pytest.approx(exact, rel=1e-5 if df > 1 else 4e-4, abs=0)


@pytest.mark.parametrize(
    ("test", "p"),
    [
        # A difference, its error, degrees of freedom, and the size of what differs.
        ("4.303, 1, 2, 0", pytest.approx(0.04999252, rel=1e-5)),
        ("-4.303, 1, 2, 0", pytest.approx(0.04999252, rel=1e-5)),
        ("1, NULL, 0, 0", None), ("1, 0.5, 0, 0", None), ("NULL, 1, 5, 0", None),
        # All documents agree; and what float32 makes of equal numbers.
        ("0.25, 0, 3, 1", 0), ("0, 0, 3, 1", 1), ("1e-7, 1e-9, 9, 1", 1),
    ],
)  # fmt: skip
def test_p_of_few_documents_and_of_documents_that_agree(
    database: RunDatabase, test: str, p: Any
) -> None:
    assert database.rows(f"SELECT two_sided_p({test})") == [(p,)]


@pytest.mark.parametrize("step", [0, 1e-5])
def test_documents_that_agree_have_no_error_and_others_have_theirs(
    database: RunDatabase, step: float
) -> None:
    """Where sums of squares cancel, rounding is larger than nothing."""
    values = np.array([0.3 + 0.1 * number for number in range(6)], np.float32)
    rows = [
        (name, document, value + np.float32(step * (document % 2)))
        for name, value in enumerate(values)
        for document in range(769)
    ]
    table = ", ".join(f"({name}, {document}, {value}::FLOAT)" for name, document, value in rows)
    found = database.rows(
        "SELECT name, document_error(sums) FROM (SELECT name, document_sums(value, document) AS "
        f"sums FROM (VALUES {table}) AS rows (name, document, value) GROUP BY name, document) "
        "GROUP BY name ORDER BY name"
    )
    for name, error in found:
        of_name = np.array([value for other, _, value in rows if other == name], float)
        assert error == pytest.approx(of_name.std(ddof=1) / 769**0.5, rel=1e-2, abs=0)


DOCUMENTS = (0, 0, 1, 2, 2, 2, 3, 4, 5, 5)
STRENGTHS = (0, 0.02, 0.3, 0.5, 0.5, 0.8)


def noisy(row: Row) -> float | None:
    """A change by head that differs between documents. One head is undefined in all but one."""
    if row.head == len(STRENGTHS):
        return 0.5 if row.sequence == 0 else None
    # Heads 3 and 4 are equal: their p are ties.
    key = [row.sequence, 3 if row.head == 4 else row.head, row.layer]
    of_document = np.random.default_rng([DOCUMENTS[row.sequence], *key[1:]]).normal()
    noise = 0.2 * of_document + 0.05 * np.random.default_rng(key).normal()
    return float(0.5 + (row.intervention != "none") * (STRENGTHS[row.head] + noise))


def check_q(rows: list[dict[str, Any]], heads: int, difference: str, error: str) -> None:
    """Hold p and q of one table to their definitions."""
    p = {
        row["label"]: p_of(row[difference] / row[error], row["degrees_of_freedom"])
        for row in rows if row[error]
    }  # fmt: skip
    q = q_of(p)
    assert len(p) == heads
    assert len({round(value, 9) for value in q.values()}) > 2
    for row in rows:
        assert row["p"] == (pytest.approx(p[row["label"]], rel=1e-4) if row["label"] in p else None)
        assert row["q"] == (pytest.approx(q[row["label"]], rel=1e-4) if row["label"] in q else None)


FACTS: dict[str, Any] = {"sequences": 10, "heads": 7, "layers": 1, "documents": DOCUMENTS}


def test_changes_have_p_and_q_over_the_heads_of_a_table(tmp_path: Path) -> None:
    both = ("none", "zero_mlps")
    columns: dict[str, Cell] = {"sink_mass": noisy, "entropy": lambda row: 0.5 + row.head / 8}
    write_run(tmp_path, "a-1", columns, interventions=both, **FACTS)
    write_run(tmp_path, "b-2", columns, interventions=both[:1], **FACTS)
    database = open_runs(tmp_path)
    rows = database.records("effects")
    check_q([r for r in rows if r["statistic"] == "sink_mass"], 6, "change", "standard_error")
    # What does not change at all.
    assert {(row["p"], row["q"]) for row in rows if row["statistic"] == "entropy"} == {(1, 1)}
    # A condition does not change the table that q is over.
    label = "label = 'L0H2' AND statistic = 'sink_mass'"
    assert database.records(f"FROM effects WHERE {label}") == [
        row for row in rows if (row["label"], row["statistic"]) == ("L0H2", "sink_mass")
    ]


def test_two_runs_and_two_groups_have_p_and_q(tmp_path: Path) -> None:
    one = {"sink_mass": lambda row: noisy(row._replace(intervention="none"))}
    two = {"sink_mass": lambda row: noisy(row._replace(intervention="other"))}
    write_run(tmp_path, "a-1", one, **FACTS)
    write_run(tmp_path, "b-2", two, model="other", **FACTS)
    database = open_runs(tmp_path)
    check_q(
        database.records("FROM run_changes WHERE run_id = 'b-2'"), 6, "change", "standard_error"
    )
    errors_of = {
        (row["model"], row["label"]): row["standard_error"]
        for row in database.records("head_summaries")
    }
    for row in database.records("FROM contrasts(compare := 'model')"):
        errors = [errors_of[row[side], row["label"]] for side in ("this", "other")]
        if None in errors:
            assert (row["p"], row["q"]) == (None, None)
            continue
        squares = np.array(errors) ** 2
        # Ten sequences, of documents of 2, 1, 3, 1, 1 and 2: Σ n² = 20 and Σ n⁴ = 116.
        df = squares.sum() ** 2 / (squares**2 / ((1 - 20 / 100) * 20**2 / 116)).sum()
        assert row["degrees_of_freedom"] == pytest.approx(df)
        expected = p_of(row["z"], df) if row["difference"] else 1
        assert row["p"] == pytest.approx(expected, rel=1e-4)


def test_heads_are_held_to_the_uniform_baseline(tmp_path: Path) -> None:
    def score(row: Row) -> float | None:
        value = noisy(row._replace(intervention="zero_mlps"))
        return None if value is None else value - 0.3

    norms = dict.fromkeys(
        ("sink_value_norm", "value_norm", "sink_resid_pre_norm", "resid_pre_norm"),
        lambda row: 1.0,
    )
    columns = {"sink_mass": score, "induction_score": score, "match_coverage": lambda row: 1.0}
    write_run(tmp_path, "a-1", columns | norms, uniform_baseline=0.25, **FACTS)
    database = open_runs(tmp_path)
    for query, mean in {
        "sink_heads": "sink_mass", "induction_heads": "induction_score", "ranking": "mean",
        "FROM ranking(statistic := 'induction_score')": "mean",
    }.items():  # fmt: skip
        rows = database.records(query)
        for row in rows:
            row["above"] = None if row[mean] is None else row[mean] - 0.25
        check_q(rows, 6, "above", "standard_error")
        if query == "induction_heads":
            high = [row for row in rows if row["induction_score"] >= 0.4]
            for row in rows:
                is_sure = None if row["q"] is None else row["q"] <= 0.05
                assert row["is_induction"] == (row in high and is_sure)
            assert 0 < sum(row["is_induction"] or False for row in high) < len(high)


TABLES = ("zero_mlps", *(f"zero_head(0,{head})" for head in range(19)))
"""Interventions: each gives a table of heads for every statistic."""

TRUE_HEADS, TRUE_CHANGE = 10, 4000.0
"""The heads that every second table has a change in, and how large it is."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "covered", "false_of_mixed", "false_of_null"),
    [
        # Nine tenths are null, so 4.5 % are expected; of null tables every discovery is false.
        ((3,) * 8, (0.94, 0.96), (0.04, 0.06), 0.07),
        ((1, 2, 3, 4, 5) * 4, (0.94, 0.96), (0.03, 0.06), 0.07),
        # One document has half of all sequences: its share alone makes every error too large.
        ((24, *[1] * 24), (0.97, 1), (0, 0.01), 0.01),
    ],
)
def test_intervals_and_discoveries_are_as_often_right_as_they_say(
    tmp_path: Path,
    sizes: tuple[int, ...],
    covered: tuple[float, float],
    false_of_mixed: tuple[float, float],
    false_of_null: float,
) -> None:
    """Sequences of one document are alike: a half of their variance is the document's."""
    layers, heads = 4, 25
    documents = np.repeat(np.arange(len(sizes)), sizes)
    names = [one.name for one in ALL.values() if one.standard]
    rng = np.random.default_rng(1)
    shape = (len(TABLES), len(names), layers, heads)
    noise = rng.normal(size=(*shape, len(sizes)))[..., documents]
    noise += rng.normal(size=noise.shape)
    change = np.zeros(shape)
    # The first heads of every second statistic.
    change.reshape(*shape[:2], -1)[:, ::2, :TRUE_HEADS] = TRUE_CHANGE
    values = noise + change[..., None]

    def cell(statistic: int) -> Cell:
        def value(row: Row) -> float:
            if row.intervention == "none":
                return 0.5
            place = (TABLES.index(row.intervention), statistic, row.layer, row.head, row.sequence)
            return 0.5 + float(values[place])

        return value

    write_run(
        tmp_path, "a-1", {name: cell(i) for i, name in enumerate(names)}, layers=layers,
        heads=heads, sequences=len(documents), per_shard=100, documents=documents.tolist(),
        interventions=("none", *TABLES),
    )  # fmt: skip
    changes = np.full(shape, np.nan)
    errors, q = changes.copy(), changes.copy()
    for row in open_runs(tmp_path).records("effects"):
        place = (
            TABLES.index(row["intervention"]), names.index(row["statistic"]), row["layer"],
            row["head"],
        )  # fmt: skip
        changes[place], errors[place], q[place] = row["change"], row["standard_error"], row["q"]
        assert row["documents"] == len(sizes)
    df = freedom_of(np.ones(len(documents)), documents).expected
    coverage = (abs(changes - change) <= quantile(0.05, df) * errors).mean()
    picked = (q <= 0.05).reshape(*shape[:2], -1)
    false = (picked & (change == 0).reshape(picked.shape)).sum(-1)
    shares = false / np.maximum(1, picked.sum(-1))
    assert picked[:, ::2, :TRUE_HEADS].all()
    assert covered[0] <= coverage <= covered[1]
    assert false_of_mixed[0] <= shares[:, ::2].mean() <= false_of_mixed[1]
    assert shares[:, 1::2].mean() <= false_of_null
