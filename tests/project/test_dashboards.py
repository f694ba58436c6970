"""The dashboard that refreshes, and the queries that its page gives to other tools."""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest

import headcount
from tests import ROOT

STATISTICS = ["entropy", "sink_mass"]


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    """The functions of the dashboard. Streamlit is imported by `main` alone."""
    return runpy.run_path(str(ROOT / "docs" / "guide" / "streamlit_dashboard.py"))


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        "model": "bundled:attn-only-2l-mini",
        "n_ctx": 16,
        "sequences": 4,
        "sequences_per_shard": 2,
        # Sixteen tokens have no key that is so far away.
        "statistics": ["distant_mass(4,64)", *STATISTICS],
        "input": {"family": "uniform_random"},
        "out": str(tmp_path_factory.mktemp("dashboard") / "runs"),
    }


def test_the_dashboard_grows_with_the_run(
    dashboard: dict[str, Any], fields: dict[str, Any]
) -> None:
    with headcount.scan(fields, sequences=2, quiet=True) as runs:
        assert dashboard["statistics"](runs) == STATISTICS
        assert dashboard["means"](runs, "entropy").df()["count"].unique().tolist() == [2]
        # The same run, continued elsewhere while it is open here.
        with headcount.scan(fields, quiet=True) as continued:
            assert continued.path == runs.path
        assert dashboard["means"](runs, "entropy").df()["count"].unique().tolist() == [2]
        assert runs.refresh() is runs
        (progress,) = dashboard["progress"](runs).df().to_dict("records")
        assert (progress["sequences_done"], progress["sequences"]) == (4, 4)
        shown = dashboard["means"](runs, "entropy").df()
        assert shown["count"].unique().tolist() == [4]
        query = "SELECT layer, head, avg(entropy) AS mean FROM heads GROUP BY ALL ORDER BY ALL"
        by_rows = runs.sql(query).df()
        assert shown["mean"].tolist() == pytest.approx(by_rows["mean"].tolist(), rel=1e-6)
        axes = {channel["field"] for channel in dashboard["HEATMAP"]["encoding"].values()}
        assert axes <= set(shown.columns)
        assert dashboard["means"](runs, "it's nothing").rows() == []


def test_the_queries_of_the_page_have_answers(fields: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "guide" / "dashboards.md").read_text(encoding="utf-8")
    queries = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    assert len(queries) == 4
    with headcount.scan(fields, quiet=True) as runs:
        answers = [runs.sql(query).rows() for query in queries]
    heads, ranked, bins, percents = answers
    assert len(heads) == len(ranked) == 16
    assert ranked == sorted(ranked, key=lambda row: -row[1])
    assert sum(row[2] for row in bins) == 4
    assert [row[1] for row in percents] == [100.0]
