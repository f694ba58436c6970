"""Standard errors over documents: every way to one gives what a definition in numpy gives."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from headcount.jobs.plan.plan import Plan, make_plan, prepare_run
from headcount.jobs.run.loop import measure_in_process
from headcount.jobs.upkeep.compaction import compact
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.queries.open.standard_errors import MACROS
from headcount.queries.report.head_card import head_card
from headcount.queries.report.report import _prediction_sql
from headcount.queries.report.section import read_section, runs_by_id
from headcount.schemas.scans.scan import parse_scan
from tests.queries.test_explore_queries import Asker
from tests.toys.toy_corpora import documents, write_jsonl
from tests.toys.toy_runs import Row, write_run

N_CTX, PER_SHARD, HEADS = 9, 4, 3 * 8
STATISTICS = ("sink_mass", "value_norm", "induction_score")
INTERVENTIONS = ("none", "zero_head(1,6)")


def error_over_documents(values: Any, of_documents: Iterable[Any]) -> tuple[float | None, int]:
    """The standard error of the mean, and the number of documents; NaN is no value."""
    values = np.array(values, float)
    pairs = [(d, x) for d, x in zip(of_documents, values, strict=True) if not np.isnan(x)]
    total = {d: [x for other, x in pairs if other == d] for d in {d for d, _ in pairs}}
    if len(total) < 2:
        return None, len(total)
    mean = sum(x for _, x in pairs) / len(pairs)
    squares = sum(len(xs) ** 2 * (sum(xs) / len(xs) - mean) ** 2 for xs in total.values())
    scale = len(total) / (len(total) - 1) / len(pairs) ** 2
    return float((squares * scale) ** 0.5), len(total)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A run of texts of which some are far longer than a sequence, and longer than a shard."""
    folder = tmp_path_factory.mktemp("runs")
    lengths = (130, 9, 20, 3, 61, 8, 240, 5, 5, 33, 12, 70)
    file = write_jsonl(folder / "texts.jsonl", documents(*lengths))
    fields = {
        "model": "bundled:gpt2-mini",
        "out": str(folder),
        "n_ctx": N_CTX,
        "sequences": "all",
        "sequences_per_shard": PER_SHARD,
        "input": {"family": "pile", "files": str(file), "packing": "concat"},
        "interventions": list(INTERVENTIONS),
        "statistics": list(STATISTICS),
        "predictions": ["loss"],
        "curves": ["attention_received_by_key"],
        "profiles": ["attention_by_lag"],
    }
    prepared = make_plan(parse_scan(fields), "texts")
    prepare_run(prepared, "")
    shards = np.arange(prepared.manifest.shards)
    assert len([*measure_in_process(prepared, shards, "cpu")]) == len(shards) > 5
    return prepared


@pytest.fixture(scope="module")
def sequences(plan: Plan) -> list[dict[str, Any]]:
    """The sequences of the run under no intervention."""
    rows = open_runs(plan.run.path).records(
        "SELECT * FROM sequences WHERE intervention = 'none' ORDER BY sequence"
    )
    counts = np.unique([row["document"] for row in rows], return_counts=True)[1]
    assert len(rows) > 4 * PER_SHARD
    assert counts.max() > 2 * PER_SHARD
    assert 1 in counts
    return rows


Values = dict[tuple[str, str, int, int], np.ndarray]


@pytest.fixture(scope="module")
def values(plan: Plan) -> Values:
    """What every head has on each sequence, by intervention, statistic, layer and head."""
    rows = open_runs(plan.run.path).records("SELECT * FROM heads ORDER BY sequence")
    found: dict[tuple[str, str, int, int], list[float]] = {}
    for row in rows:
        for statistic in STATISTICS:
            key = (row["intervention"], statistic, row["layer"], row["head"])
            number = row[statistic]
            found.setdefault(key, []).append(np.nan if number is None else number)
    assert any(np.isnan(numbers).any() for numbers in found.values())
    return {key: np.array(numbers, float) for key, numbers in found.items()}


def check(record: dict[str, Any], values: Any, of_documents: Iterable[Any], rel: float) -> None:
    """The record has the error and the number of documents that numpy has."""
    error, number = error_over_documents(values, of_documents)
    assert record["documents"] == number
    expected = None if error is None else pytest.approx(error, rel=rel, abs=1e-9)
    assert record["standard_error"] == expected


def check_views(
    database: RunDatabase, sequences: list[dict[str, Any]], values: Values, rel: float = 1e-5
) -> None:
    """All views of statistics say what numpy says."""
    of_documents = [row["document"] for row in sequences]
    of_parts = np.array([row["pile_set_name"] or "" for row in sequences])

    def place(record: dict[str, Any]) -> tuple[str, str, int, int]:
        return record["intervention"], record["statistic"], record["layer"], record["head"]

    for view in ("head_summaries", "FROM ranking(statistic := 'value_norm')"):
        records = database.records(view)
        assert len(records) == 2 * HEADS * (3 if view == "head_summaries" else 1)
        for record in records:
            check(record, values[place(record)], of_documents, rel)
    for record in database.records("subset_summaries"):
        is_here = of_parts == (record["pile_set_name"] or "")
        here = np.array(of_documents)[is_here]
        check(record, values[place(record)][is_here], here, rel)
    for record in database.records("by_pile_set"):
        is_here = of_parts == record["pile_set_name"]
        here = np.array(of_documents)[is_here]
        assert record["documents"] == len(set(here))
        for statistic in STATISTICS:
            key = (record["intervention"], statistic, record["layer"], record["head"])
            error, _ = error_over_documents(values[key][is_here], here)
            expected = None if error is None else pytest.approx(error, rel=rel, abs=1e-9)
            assert record[f"se_{statistic}"] == expected
    records = database.records("effects")
    assert records
    for record in records:
        _, statistic, layer, head = place(record)
        changes = values[place(record)] - values["none", statistic, layer, head]
        check(record, changes, of_documents, rel)
    check_section(database, of_documents, values, rel)


def check_section(
    database: RunDatabase, of_documents: list[int], values: Values, rel: float
) -> None:
    """What report and cards show is what numpy says."""
    (run,) = runs_by_id(database).values()
    for intervention in INTERVENTIONS:
        section = read_section(database, run, intervention)
        for statistic, found in section.statistics.items():
            for layer, head in np.ndindex(section.shape):
                own = values[intervention, statistic, layer, head]
                error, number = error_over_documents(own, of_documents)
                assert found.means.documents[layer, head] == number
                assert found.means.standard_error[layer, head] == pytest.approx(
                    np.nan if error is None else error, rel=rel, abs=1e-9, nan_ok=True
                )
    card = head_card(database, "L1H6").statistic("sink_mass")
    error, number = error_over_documents(values["none", "sink_mass", 1, 6], of_documents)
    assert (card.standard_error, card.documents) == (pytest.approx(error, rel=rel), number)


def check_explorer(path: Path, sequences: list[dict[str, Any]], values: Values) -> None:
    """The explorer's queries say what numpy says."""
    of_documents = [row["document"] for row in sequences]
    of_parts = np.array([row["pile_set_name"] or "" for row in sequences])
    ask = Asker(path)
    ask.run_id = next(iter(runs_by_id(open_runs(path))))
    place = {"layer": 1, "head": 3}
    for row in ask("card", head=place)["rows"]:
        check(row, values["none", row["statistic"], 1, 3], of_documents, 1e-5)
    for row in ask("parts", head=place, statistic="sink_mass")["rows"]:
        is_here = of_parts == (row["part"] or "")
        own = values["none", "sink_mass", 1, 3][is_here]
        check(row, own, np.array(of_documents)[is_here], 1e-5)
    ask.engine.close()


def test_views_and_the_explorer_have_the_errors_of_numpy_from_rows_and_from_roll_ups(
    plan: Plan, sequences: list[dict[str, Any]], values: Values
) -> None:
    check_views(open_runs(plan.run.path), sequences, values)
    check_explorer(Path(str(plan.run.path)), sequences, values)
    # Some shards are merged in pairs, whose documents go on in other roll-ups and in rows.
    compact(plan.run, 2 * PER_SHARD * HEADS * N_CTX + 1)
    database = open_runs(plan.run.path)
    assert database.rows("SELECT count(DISTINCT document) > 2 FROM rollups") == [(True,)]
    check_views(database, sequences, values)
    check_explorer(Path(str(plan.run.path)), sequences, values)
    compact(plan.run)
    assert not open_runs(plan.run.path).rows("FROM internal.unrolled_heads")
    check_views(open_runs(plan.run.path), sequences, values)
    check_explorer(Path(str(plan.run.path)), sequences, values)


def test_predictions_and_kept_curves_have_the_errors_of_numpy(
    plan: Plan, sequences: list[dict[str, Any]]
) -> None:
    of_documents = [row["document"] for row in sequences]
    database = open_runs(plan.run.path)
    changed = database.rows(
        "SELECT loss FROM sequences WHERE intervention <> 'none' ORDER BY sequence"
    )
    losses = np.array([row["loss"] for row in sequences], float)
    changes = np.array(changed, float).ravel() - losses
    rows = {row["intervention"]: row for row in database.records(_prediction_sql("loss", ""))}
    error, _ = error_over_documents(losses, of_documents)
    assert rows["none"]["standard_error"] == pytest.approx(error, rel=1e-5)
    assert rows["none"]["change_error"] is None
    error, _ = error_over_documents(changes, of_documents)
    assert rows["zero_head(1,6)"]["change_error"] == pytest.approx(error, rel=1e-5)
    (run,) = runs_by_id(database).values()
    curve = next(c for c in read_section(database, run, "none").curves if not c.profiled)
    lists = database.rows(
        "SELECT attention_received_by_key FROM curves WHERE intervention = 'none' "
        "AND label = 'L1H6' ORDER BY sequence"
    )
    by_key = np.array([one for (one,) in lists]).T
    expected = [error_over_documents(numbers, of_documents)[0] for numbers in by_key]
    assert curve.standard_errors[:, 1, 6] == pytest.approx(expected, rel=1e-5)


def test_errors_of_profiles_are_over_shards_where_documents_have_several_sequences(
    plan: Plan,
) -> None:
    database = open_runs(plan.run.path)
    own = "profile = 'attention_by_lag' AND intervention = 'none' AND label = 'L1H6' AND lag = 2"
    shards = database.records(f"SELECT count, mean FROM profiles WHERE {own}")
    numbers = [row["mean"] for row in shards for _ in range(row["count"])]
    groups = [number for number, row in enumerate(shards) for _ in range(row["count"])]
    error, number = error_over_documents(numbers, groups)
    assert database.rows(f"SELECT standard_error, groups FROM profile_means WHERE {own}") == [
        (pytest.approx(error), number)
    ]


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
    (change,) = database.records(
        "FROM run_changes WHERE run_id = 'b-2' AND label = 'L1H2' AND statistic = 'sink_mass'"
    )
    check(change, two - one, of_documents, 1e-9)
    where = "WHERE label = 'L1H2' AND coalesce(run_id, 'a-1') = 'a-1'"
    is_arxiv = np.arange(12) % 4 % 3 == 0
    for compare, groups in {
        "pile_set_name": [(one[chosen], np.array(of_documents)[chosen]) for chosen in
                          (is_arxiv, ~is_arxiv)],
        "model": [(two, of_documents), (one, of_documents)],
    }.items():  # fmt: skip
        (row,) = database.records(f"FROM contrasts(compare := '{compare}') {where}")
        errors = [error_over_documents(*group) for group in groups]
        assert row["standard_error"] == pytest.approx(math.hypot(*(e or 0 for e, _ in errors)))
        assert (row["this_documents"], row["other_documents"]) == tuple(n for _, n in errors)


def test_where_every_sequence_is_a_document_the_error_is_that_of_independent_values(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path, "a-1", {"entropy": lambda row: row.sequence**2 / 8}, sequences=7)
    numbers = np.arange(7) ** 2 / 8
    for _ in range(2):
        for row in open_runs(run.path).records("head_summaries"):
            assert row["standard_error"] == pytest.approx(numbers.std(ddof=1) / 7**0.5, rel=1e-12)
            assert row["documents"] == 7
        compact(run)


def test_the_error_of_a_small_spread_on_a_large_mean_keeps_its_digits(tmp_path: Path) -> None:
    of_documents = np.repeat(np.arange(8), (1, 5, 2, 2, 9, 3, 1, 7))
    run = write_run(
        tmp_path, "a-1", {"value_norm": lambda row: 4096 + row.sequence % 7 / 1024},
        sequences=30, per_shard=4, documents=of_documents.tolist(), layers=1, heads=1,
    )  # fmt: skip
    numbers = 4096 + np.arange(30) % 7 / 1024
    for rows in (4 * 2 + 1, 1000):
        (row,) = open_runs(run.path).records("head_summaries")
        check(row, numbers, of_documents, 1e-9)
        compact(run, rows)
    (row,) = open_runs(run.path).records("head_summaries")
    check(row, numbers, of_documents, 1e-9)


@pytest.fixture(scope="module")
def drawn() -> duckdb.DuckDBPyConnection:
    """A thousand corpora of 40 documents with 1 to 17 sequences each, of mean 0."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 18, (1000, 40))
    document = np.repeat(np.arange(lengths.size), lengths.ravel())
    value = np.repeat(rng.normal(size=lengths.size), lengths.ravel()) + rng.normal(
        size=len(document)
    )
    connection = duckdb.connect()
    for signature, body in MACROS.items():
        connection.execute(f"CREATE MACRO {signature} AS {body}")
    half = rng.permuted(np.tile([0, 1], (1000, 20)), axis=1).ravel()[document]
    numbers = {"document": document, "corpus": document // 40, "half": half, "value": value}
    connection.register("numbers", pa.table(numbers))
    connection.execute("CREATE TABLE drawn AS FROM numbers")
    return connection


def means_and_errors(connection: duckdb.DuckDBPyConnection, keys: str, document: str) -> np.ndarray:
    """Mean and standard error by corpus, and by half of its documents if that is among the keys."""
    sql = f"""
        SELECT document_mean(sums) AS mean, document_error(sums) AS error FROM (
            SELECT {keys}, {document} AS document, document_sums(value, {document}) AS sums
            FROM drawn GROUP BY ALL
        ) GROUP BY {keys} ORDER BY {keys}
    """
    return np.array(connection.execute(sql).fetchall())


def test_an_interval_of_two_errors_holds_the_mean_as_often_as_it_should(
    drawn: duckdb.DuckDBPyConnection,
) -> None:
    mean, error = means_and_errors(drawn, "corpus", "document").T
    # The 97.5 % quantile of Student's t with 39 degrees of freedom, and that of the normal.
    assert 0.935 < (abs(mean) < 2.023 * error).mean() < 0.965
    assert 0.925 < (abs(mean) < 1.96 * error).mean() < 0.955
    # As if sequences were independent.
    mean, error = means_and_errors(drawn, "corpus", "NULL::BIGINT").T
    assert (abs(mean) < 1.96 * error).mean() < 0.7


def test_halves_of_the_documents_differ_as_seldom_as_they_should(
    drawn: duckdb.DuckDBPyConnection,
) -> None:
    def share(document: str) -> float:
        halves = means_and_errors(drawn, "corpus, half", document).reshape(1000, 2, 2)
        difference = halves[:, 0, 0] - halves[:, 1, 0]
        return (abs(difference) > 1.96 * np.hypot(*halves[:, :, 1].T)).mean()

    assert 0.03 < share("document") < 0.08
    assert share("NULL::BIGINT") > 0.3
