"""Standard errors over documents: every way to one gives what a definition in numpy gives."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from headcount.jobs.plan.plan import Plan
from headcount.jobs.upkeep.compaction import compact
from headcount.queries.ask.asking import open_runs
from headcount.queries.report.head_card import head_card
from headcount.queries.report.report import _prediction_sql
from headcount.queries.report.section import NUMBERS, read_section, runs_by_id
from tests.queries.page.test_explore_queries import Asker
from tests.toys.runs_here import measure_here
from tests.toys.toy_corpora import documents, write_jsonl
from tests.toys.toy_runs import Row, write_run

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


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A run of texts of which some are far longer than a sequence, and longer than a shard."""
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
def measured(plan: Plan) -> Measured:
    database = open_runs(plan.run.path)
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
    # The page has it by head only.
    if "subset" not in record:
        found = record["effective_documents"]
        assert (np.nan if found is None else found) == effective_number(values, of_documents)


def check_views(plan: Plan, measured: Measured) -> None:
    database = open_runs(plan.run.path)
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
        check(record, values[place(record)] - untouched, documents)


def check_sink_against_loss(plan: Plan, measured: Measured) -> None:
    database = open_runs(plan.run.path)
    documents, _, _, values = measured
    sinks: dict[str, np.ndarray] = {}
    losses: dict[str, np.ndarray] = {}
    for intervention in INTERVENTIONS:
        of_heads = [v for key, v in values.items() if key[:2] == (intervention, "sink_mass")]
        sinks[intervention] = np.mean(of_heads, 0)
        rows = database.rows(
            f"SELECT loss FROM sequences WHERE intervention = '{intervention}' ORDER BY sequence"
        )
        losses[intervention] = np.array(rows, float)[:, 0]
    records = database.records("sink_against_loss")
    assert len(records) == len(INTERVENTIONS)
    assert [row["sink_mass"] for row in records] == sorted(row["sink_mass"] for row in records)
    for row in records:
        own, other = row["intervention"], next(i for i in INTERVENTIONS if i != row["intervention"])
        for name, by_intervention in (("sink", sinks), ("loss", losses)):
            here = by_intervention[own]
            change = here - by_intervention["none"]
            mean = row["sink_mass" if name == "sink" else name]
            assert (mean, row[f"{name}_change"]) == pytest.approx((here.mean(), change.mean()))
            for column, of_column in ((f"{name}_error", here), (f"{name}_change_error", change)):
                expected = error_over_documents(of_column, documents)
                assert (row[column], row["documents"]) == expected, column
        is_beaten = all(x[other].mean() < x[own].mean() for x in (sinks, losses))
        assert row["on_frontier"] == (not is_beaten)


def check_pages(plan: Plan, measured: Measured) -> None:
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
    database = open_runs(plan.run.path)
    (run,) = runs_by_id(database).values()
    for intervention in INTERVENTIONS:
        section = read_section(database, run, intervention)
        for index, statistic in enumerate(section.statistics):
            for layer, head in np.ndindex(section.shape):
                own = values[intervention, statistic, layer, head]
                error, number = error_over_documents(own, documents)
                assert section.numbers["documents"][index, layer, head] == number
                shown = section.numbers["standard_error"][index, layer, head]
                assert shown == error or (error is None and np.isnan(shown))
    card = head_card(database, "L1H6").statistic("sink_mass")
    expected = error_over_documents(values["none", "sink_mass", 1, 6], documents)
    assert (card.standard_error, card.documents) == expected


@pytest.mark.parametrize("check_all", [check_views, check_pages])
def test_rows_give_the_errors_of_numpy(plan: Plan, measured: Measured, check_all: Any) -> None:
    check_all(plan, measured)


@pytest.mark.long
def test_roll_ups_give_the_errors_of_numpy(plan: Plan, measured: Measured) -> None:
    # Some shards are merged in pairs, whose documents go on in other roll-ups and in rows.
    compact(plan.run, 2 * PER_SHARD * HEADS * N_CTX + 1)
    rolled_up = open_runs(plan.run.path).rows("SELECT count(DISTINCT document) > 2 FROM rollups")
    assert rolled_up == [(True,)]
    check_views(plan, measured)
    check_sink_against_loss(plan, measured)
    check_pages(plan, measured)
    compact(plan.run)
    assert not open_runs(plan.run.path).rows("FROM internal.unrolled_heads")
    check_views(plan, measured)
    check_pages(plan, measured)


def test_predictions_and_kept_curves_have_numpys_errors(plan: Plan, measured: Measured) -> None:
    database = open_runs(plan.run.path)
    sql = "SELECT loss FROM sequences WHERE intervention <> 'none' ORDER BY sequence"
    changes = np.array(database.rows(sql), float).ravel() - measured.losses
    rows = {row["intervention"]: row for row in database.records(_prediction_sql("loss", ""))}
    error, _ = error_over_documents(measured.losses, measured.documents)
    assert (rows["none"]["standard_error"], rows["none"]["change_error"]) == (error, None)
    error, _ = error_over_documents(changes, measured.documents)
    assert rows["zero_head(1,6)"]["change_error"] == error
    (run,) = runs_by_id(database).values()
    curve = next(c for c in read_section(database, run, "none").curves if not c.profiled)
    lists = database.rows(
        "SELECT attention_received_by_key FROM curves WHERE intervention = 'none' "
        "AND label = 'L1H6' ORDER BY sequence"
    )
    for found, one in zip(curve.standard_errors[:, 1, 6], np.array(lists)[:, 0].T, strict=True):
        assert found == error_over_documents(one, measured.documents)[0]


def test_errors_of_profiles_are_over_shards_where_documents_are_long(plan: Plan) -> None:
    database = open_runs(plan.run.path)
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
        assert row["standard_error"] == pytest.approx(expected)
        assert (row["this_documents"], row["other_documents"]) == (this_number, other_number)


def test_the_error_of_a_small_spread_on_a_large_mean_keeps_its_digits(tmp_path: Path) -> None:
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
