"""precision.md: its verdicts follow from the figures, and its query answers what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb
import pytest

from benchmarks.at_scale import precision_drift as precision
from benchmarks.at_scale.precision_drift import PAGE, SINKS, Drift, acceptable, read_cases
from headcount.schemas.scans.precision import FASTEST_ACCEPTABLE, PRECISIONS
from headcount.schemas.statistics import STATISTICS
from tests import ROOT


def test_the_page_is_made_from_figures_of_every_precision_that_allow_the_defaults() -> None:
    assert PAGE.read_text(encoding="utf-8") == precision.page(*read_cases())
    _, cases = read_cases()
    assert len(cases) >= 4
    standard = {statistic.name for statistic in STATISTICS.select("standard")}
    # Statistics that were registered later are measured with the next make precision.
    assert {name for case in cases for name in case.drift["float32"]} >= standard
    for case in cases:
        assert case.sequences >= 200
        assert set(case.drift) == set(PRECISIONS) - {"float64"}
        for fastest in FASTEST_ACCEPTABLE.values():
            assert acceptable(case.drift[fastest]) or case.model == SINKS


@pytest.mark.long
def test_every_case_can_be_measured(tmp_path: Path) -> None:
    models = precision.gpt2_small_sharp(tmp_path / "sharp", n_layers=1)
    scans = precision.scans(models, precision.granite_swa_sharp(tmp_path / SINKS))
    cases = [precision.measure_case(fields, 2, ["float32"]) for fields in scans]
    # Every statistic has a value in some case.
    assert {name for case in cases for name in case.drift["float32"]} == set(STATISTICS)


@pytest.mark.parametrize(("name", "p99", "is_acceptable"), [
    ("sink_mass", 1.1e-3, False),
    ("value_norm", 1.1e-3, False),
    ("sink_mass", float("nan"), False),
    ("entropy", 1.1e-3, True),
    ("head_output_norm_last", 1.1e-3, True),
])  # fmt: skip
def test_acceptable_means_the_99th_percentile_of_standard_probabilities_and_norms(
    name: str, p99: float, is_acceptable: bool
) -> None:
    within = dict.fromkeys(STATISTICS, Drift(0.0, 0.001, 1.0))
    assert acceptable(within)
    assert acceptable(within | {name: Drift(0.0, p99, 1.0)}) == is_acceptable


def test_the_query_of_the_page_answers_the_table_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = PAGE.read_text(encoding="utf-8")
    (query,) = re.findall(r"```sql\n(.*?)```", text, flags=re.DOTALL)
    with duckdb.connect() as connection:
        cursor = connection.execute(query)
        columns = [column[0] for column in cursor.description or []]
        header, *rows = [f"| {' | '.join(words)} |" for words in [columns, *cursor.fetchall()]]
    shown_header, _, *shown_rows = text.rsplit("```\n\n", 1)[1].splitlines()
    assert [shown_header, *shown_rows] == [header, *rows]
    assert len(rows) == len(PRECISIONS) - 1
