"""Every example of files.md runs, and every reader of the files keeps run and intervention."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pandas
import polars
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from tests import ROOT
from tests.toys.runs_here import begun, measured

PAGE = (ROOT / "docs" / "reference" / "files.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

SEQUENCES = 4
ROWS = SEQUENCES * 2 * 8  # two layers of eight heads
MASKED = "mask_keys(0,1)"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs with different columns, one of them under two interventions."""
    folder = tmp_path_factory.mktemp("files") / "two runs"
    fields_by_name = {
        "a": {"statistics": ["sink_mass", "entropy"], "interventions": ["none", MASKED]},
        "b": {"statistics": ["sink_mass", "previous_token_score"]},
    }
    for name, fields in fields_by_name.items():
        fields |= {"model": "bundled:attn-only-2l-mini", "input": {"family": "uniform_random"}}
        sizes = {"n_ctx": 8, "sequences": SEQUENCES, "sequences_per_shard": 2}
        measured(begun(fields | sizes | {"out": str(folder / "runs")}, name))
    return folder


def row_counts(heads: Any) -> Counter[tuple[str, str]]:
    """Rows by the name of their run and by intervention, for rows in any library."""
    if isinstance(heads, duckdb.DuckDBPyRelation):
        origins = heads.project("run_id, intervention").fetchall()
    else:
        columns = [heads[name] for name in ("run_id", "intervention")]
        # A column of a pyarrow table holds pyarrow's scalars, not strings.
        lists = [
            column.to_pylist() if isinstance(heads, pa.Table) else column for column in columns
        ]
        origins = zip(*lists, strict=True)
    return Counter((run_id.partition("-")[0], intervention) for run_id, intervention in origins)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_runs_and_keeps_run_and_intervention(
    example: str, runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    # Examples name `runs`, the directory that a user stands beside.
    monkeypatch.chdir(runs)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    variables: dict[str, Any] = {}
    exec(example, variables)
    expected = {("a", "none"): ROWS, ("a", MASKED): ROWS, ("b", "none"): ROWS}
    if "run_id=a-*" in example:
        del expected["b", "none"]
    assert row_counts(variables["heads"]) == expected


def test_every_reader_of_the_table_has_an_example():
    table = PAGE[PAGE.index("| reader |") : PAGE.index("`runs/**/*.parquet`")]
    # The first row of the table is its heading.
    readers = re.findall(r"^\| (\w+) \|", table, re.MULTILINE)[1:]
    # The last section is about commits.
    assert [heading.split()[-1] for heading in HEADINGS[:-1]] == readers


def test_what_the_page_warns_of_is_an_error_and_never_a_silent_loss(
    runs: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(runs)
    with pytest.raises(duckdb.Error, match="union_by_name"):
        duckdb.execute("FROM 'runs/*/heads/**/*.parquet'").fetchall()
    with pytest.raises(polars.exceptions.SchemaError, match="extra column"):
        polars.read_parquet("runs/*/heads/**/*.parquet")
    with pytest.raises(pa.ArrowInvalid):
        pandas.read_parquet("runs")
    (run,) = Path("runs").glob("run_id=a-*")
    with pytest.raises(pa.ArrowTypeError, match="intervention"):
        ds.dataset(run / "heads", partitioning="hive").to_table()
