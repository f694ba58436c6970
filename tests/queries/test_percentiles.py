"""Where a head stands among the others, and quantiles of its values: the same everywhere."""

from pathlib import Path
from typing import Any

import pytest

from headcount.jobs.upkeep.compaction import compact
from headcount.queries.answers.numbers import NUMBERS
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.queries.report.head_card import head_card
from headcount.queries.report.html_page import unpacked
from headcount.queries.report.report import write_report
from tests.toys.toy_runs import Cell, Row, write_run

LAYERS, HEADS, SEQUENCES = 2, 3, 4
LABELS = [f"L{layer}H{head}" for layer in range(LAYERS) for head in range(HEADS)]


def number_of(row: Row) -> int:
    return row.layer * HEADS + row.head


COLUMNS: dict[str, Cell] = {
    # Three are equal, and the last has no value.
    "sink_mass": lambda row: [0.1, 0.2, 0.2, 0.2, 0.4, None][number_of(row)],
    # More digits than a report prints of a mean.
    "entropy": lambda row: 1 + number_of(row) / 2**21,
    # The same numbers, which are added up in other orders.
    "induction_score": lambda row: [0.1, 0.2, 0.3, 0.7][(row.sequence + number_of(row)) % 4],
    # The heads of a layer share it.
    "resid_pre_norm": lambda row: 1.0 + row.layer,
}

PERCENTILES: dict[str, list[float | None]] = {
    "sink_mass": [0, 25, 25, 25, 100, None],
    "entropy": [0, 20, 40, 60, 80, 100],
    "induction_score": [0, 0, 0, 0, 0, 0],
    "resid_pre_norm": [0, 0, 0, 60, 60, 60],
}


def of_sql(database: RunDatabase) -> dict[str, list[float | None]]:
    """What the view head_card says, by statistic and in the order of the heads."""
    records = database.records("head_card")
    places = {(record["statistic"], record["label"]): record for record in records}
    for (statistic, _), record in places.items():
        assert record["heads"] == sum(one is not None for one in PERCENTILES[statistic])
    return {
        name: [places.get((name, label), {}).get("percentile") for label in LABELS]
        for name in COLUMNS
    }


def of_cards(database: RunDatabase) -> dict[str, list[float | None]]:
    """What cards in Python say."""
    cards = [head_card(database, label) for label in LABELS]
    for card in cards:
        for one in card.statistics:
            assert one.heads == sum(place is not None for place in PERCENTILES[one.name])
    return {name: [card.statistic(name).percentile for card in cards] for name in COLUMNS}


def of_report(database: RunDatabase, path: Path) -> dict[str, list[float | None]]:
    """What the report's page draws."""
    write_report(database, path)
    page: Any = unpacked(path.read_text(encoding="utf-8"))
    answer = page["answers"]["heatmap/a-1/none"]
    percentiles = answer["arrays"][NUMBERS.index("percentile")]
    count = LAYERS * HEADS
    places = {name: i * count for i, name in enumerate(answer["statistics"])}
    return {name: percentiles[places[name] :][:count] for name in COLUMNS}


@pytest.mark.parametrize(
    "is_merged", [pytest.param(False, marks=pytest.mark.long), True], ids=["rows", "rollups"]
)
def test_sql_cards_and_the_query_of_pages_have_the_same_percentiles(
    tmp_path: Path, is_merged: bool
) -> None:
    size = {"layers": LAYERS, "heads": HEADS, "sequences": SEQUENCES}
    run = write_run(tmp_path, "a-1", COLUMNS, **size)
    if is_merged:
        compact(run)
    database = open_runs(tmp_path)
    assert of_sql(database) == PERCENTILES
    assert of_cards(database) == PERCENTILES
    assert of_report(database, tmp_path / "report.html") == PERCENTILES


def test_an_only_head_has_no_percentile(tmp_path: Path) -> None:
    write_run(tmp_path, "a-1", {"sink_mass": lambda row: 0.5}, layers=1, heads=1)
    database = open_runs(tmp_path)
    assert database.rows("SELECT percentile, heads FROM head_card") == [(None, 1)]
    assert head_card(database, "L0H0").statistic("sink_mass").percentile is None


def test_quantiles_of_a_histogram_are_those_of_the_rows_to_less_than_a_bin(tmp_path: Path) -> None:
    # An even number of values, far apart: the median is the mean of two.
    write_run(tmp_path, "a-1", {"sink_mass": lambda row: row.sequence / 4}, sequences=SEQUENCES)
    names = ["p01", "p05", "p25", "p50", "p75", "p95", "p99"]
    sql = f"SELECT {', '.join(names)} FROM {{}} WHERE label = 'L0H1' AND statistic = 'sink_mass'"
    database = open_runs(tmp_path)
    [exact] = database.rows(sql.format("quantiles"))
    [within_bins] = database.rows(sql.format("head_quantiles"))
    assert exact == pytest.approx([0.0075, 0.0375, 0.1875, 0.375, 0.5625, 0.7125, 0.7425])
    assert within_bins == pytest.approx(exact, abs=1 / 256)
