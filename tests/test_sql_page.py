"""Every example of docs/sql.md has an answer, and keeps runs and interventions apart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from jobs.plan import make_plan
from queries.answers import run_query
from queries.asking import RunDatabase, open_runs
from schemas.scan import load_scan
from tests.toy_runs import Cell, Row, write_run

PAGE = Path(__file__).parent.parent / "docs" / "sql.md"
PYTHON_EXAMPLES = re.findall(
    r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL
)
SQL_EXAMPLES = re.findall(r"```sql\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> RunDatabase:
    path = tmp_path_factory.mktemp("runs")

    def value(row: Row) -> float:
        place = row.sequence * 31 + row.layer * 7 + row.head * 3 + len(row.intervention)
        return place * 0.37 % 1

    # The runs differ in entropy, so an example that mixes them gives other rows.
    entropies: dict[str, Cell] = {"a-1": lambda row: 3 * value(row) ** 2, "b-2": value}
    for name, entropy in entropies.items():
        write_run(
            path,
            name,
            {"sink_mass": value, "entropy": entropy},
            heads=6,
            sequences=8,
            interventions=("none", "zero_query_bias"),
            pile_sets=("Github", "ArXiv"),
            family="pile",
        )
    return open_runs(path)


def test_the_examples_in_python_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs", "a-1", {"sink_mass": lambda row: 0.5 + row.head / 10})
    monkeypatch.chdir(tmp_path)
    asking, saving = PYTHON_EXAMPLES
    # The second example continues the first: it uses its variables.
    variables: dict[str, Any] = {}
    exec(asking, variables)
    assert sorted(variables["heads"]["sink_mass"].to_pylist()) == pytest.approx(
        [0.5, 0.5, 0.6, 0.6, 0.7, 0.7]
    )
    assert "L1H2" in capsys.readouterr().out
    exec(saving, variables)
    (tmp_path / "scan.toml").write_text(
        'model = "x"\nn_ctx = 16\nsequences = 2\nstatistics = ["sink_mass"]\n'
        'bos = false\nout = "measured"\n[input]\nfamily = "uniform_random"\n'
    )
    scan = load_scan(tmp_path / "scan.toml", ["model=./my-model"])
    plan = make_plan(scan, "scan")
    assert (plan.info.n_layers, plan.info.n_heads) == (2, 4)


def test_the_page_has_examples() -> None:
    assert len(SQL_EXAMPLES) >= 12
    text = "\n".join(SQL_EXAMPLES)
    for word in ("bar(", "histogram(", "PIVOT", "SUMMARIZE", "quantile", "label", "tokens"):
        assert word in text


@pytest.mark.parametrize("sql", SQL_EXAMPLES, ids=lambda sql: sql.split("\n")[0][:50])
def test_an_example_is_answered_and_mixes_nothing(database: RunDatabase, sql: str) -> None:
    answer = run_query(database.connection, sql)
    rows = list(answer.rows())
    assert rows
    # These are about columns, not about rows of a run.
    if "FROM statistics" in sql or "SUMMARIZE" in sql:
        return
    assert "run_id" in answer.schema.names
    assert "intervention" in answer.schema.names or "intervention = 'none'" in sql or "none" in sql
