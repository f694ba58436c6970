"""precision.md: its verdicts follow from the figures, and its query answers what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb
import pytest

from benchmarks.at_scale.precision_drift import (
    PAGE,
    SINKS,
    Case,
    Drift,
    acceptable,
    gpt2_small_sharp,
    granite_swa_sharp,
    measure_case,
    page,
    read_cases,
    read_figures,
    scans,
    write_figures,
)
from headcount.schemas.scans.precision import FASTEST_ACCEPTABLE, PRECISIONS
from headcount.schemas.statistics import KIND, STATISTICS
from tests import ROOT


def test_the_page_is_made_from_figures_of_every_precision_that_allow_the_defaults() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(*read_cases())
    _, cases = read_cases()
    assert len(cases) >= 4
    standard = {statistic.name for statistic in KIND.select("standard")}
    # Statistics that were registered later are measured with the next make precision.
    assert {name for case in cases for name in case.drift["float32"]} >= standard
    for case in cases:
        assert case.sequences >= 200
        assert set(case.drift) == set(PRECISIONS) - {"float64"}
        for fastest in FASTEST_ACCEPTABLE.values():
            assert acceptable(case.drift[fastest]) or case.model == SINKS


@pytest.mark.long
def test_every_case_can_be_measured(tmp_path: Path) -> None:
    sharp = gpt2_small_sharp(tmp_path / "sharp", n_layers=1)
    cases = [
        measure_case(fields, 2, ["float32"])
        for fields in scans(sharp, granite_swa_sharp(tmp_path / SINKS))
    ]
    # Every statistic has a value in some case.
    assert {name for case in cases for name in case.drift["float32"]} == set(STATISTICS)


def test_acceptable_means_the_99th_percentile_of_standard_probabilities_and_norms() -> None:
    within = dict.fromkeys(STATISTICS, Drift(0.0, 0.001, 1.0))
    beyond = Drift(0.0, 1.1e-3, 1.0)
    assert acceptable(within)
    for name, drift, is_acceptable in (
        ("sink_mass", beyond, False),
        ("value_norm", beyond, False),
        ("sink_mass", Drift(0.0, float("nan"), 1.0), False),
        ("entropy", beyond, True),
        ("head_output_norm_last", beyond, True),
    ):
        assert acceptable(within | {name: drift}) == is_acceptable, name


def test_figures_are_read_back_to_the_bit(tmp_path: Path) -> None:
    drift = {"float32": {"sink_mass": Drift(0.1, 1 / 3, 5e-324)}}
    write_figures([Case("a", "text", 2, 8, drift)], tmp_path / "figures.csv")
    assert read_figures(tmp_path / "figures.csv") == {("a", "text"): drift}


def test_the_query_of_the_page_answers_the_table_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = PAGE.read_text(encoding="utf-8")
    (query,) = re.findall(r"```sql\n(.*?)```", text, flags=re.DOTALL)
    header, _, *rows = text.rsplit("```\n\n", 1)[1].splitlines()
    with duckdb.connect() as connection:
        cursor = connection.execute(query)
        columns = [column[0] for column in cursor.description or []]
        answers = cursor.fetchall()
    assert header == f"| {' | '.join(columns)} |"
    assert rows == [f"| {' | '.join(answer)} |" for answer in answers]
    assert len(rows) == len(PRECISIONS) - 1
