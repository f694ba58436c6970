"""Named queries that a run brings: asked by name, held to the tables of runs, never over ours."""

import hashlib
import json
from pathlib import Path

import duckdb
import pytest

import headcount
from headcount.schemas.errors import QueryError
from headcount.schemas.files.run_directory import RunDirectory
from tests.toys.commands import ended, error_of, printed
from tests.toys.refusals import refused
from tests.toys.toy_runs import local, write_run

LATE = """\
-- Heads of late layers. More of it.
-- parameter first BIGINT = 1: the first late layer.
SELECT layer, head, avg(entropy) AS entropy
FROM heads WHERE layer >= $first GROUP BY ALL ORDER BY ALL
"""


def run_with(out: Path, name: str = "a-1", **queries: str) -> RunDirectory:
    """A toy run of 2 layers × 2 heads that brings some queries."""
    run = write_run(out, name, {"entropy": lambda row: row.layer + row.head / 2}, layers=2, heads=2)
    manifest = json.loads(local(run.manifest_file).read_text())
    for query, sql in queries.items():
        digest = hashlib.sha256(sql.encode()).hexdigest()
        manifest["queries"][query] = digest
        file = local(run.query_file(digest))
        file.parent.mkdir(exist_ok=True)
        file.write_text(sql)
    local(run.manifest_file).write_text(json.dumps(manifest))
    return run


SECRET = "what only the user may read"

BAD = {
    "a_file": "SELECT * FROM read_text('{secret}')",
    "a_table": "SELECT * FROM '{secret}'",
    "inside": "SELECT (SELECT any_value(content) FROM glob('*') g, read_text('{secret}')) AS text",
    "described": "SELECT * FROM (DESCRIBE '{secret}')",
    "dynamic": "SELECT * FROM query('FROM read_text(''{secret}'')')",
    "writes": "COPY (SELECT 1) TO '{written}'",
    "second": "SELECT 1 AS one; COPY (SELECT 1) TO '{written}'",
    "defaults": "-- parameter a VARCHAR = (FROM read_text('{secret}')): b.\nSELECT $a",
    "closes": "-- parameter a DOUBLE = 1) AS TABLE SELECT 1; FROM 'x' --: b.\nSELECT 1",
    "attaches": "ATTACH '{written}'",
    "read_csv": "-- parameter file VARCHAR = 'a': b.\nSELECT 7 AS seven",
}


OURS = ("heads", "by_head", "Sink_heads", "duckdb_views", "headcount_notes")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A secret; `runs` with a good query, bad ones, and some of our names; and their views."""
    home = tmp_path_factory.mktemp("bad")
    (home / "secret.txt").write_text(SECRET)
    # Where queries may read, nothing is written either.
    places = {"secret": home / "secret.txt", "written": home / "runs/run_id=a-1/written.parquet"}
    texts = {name: f"-- Rows.\n{sql.format(**places)}" for name, sql in BAD.items()}
    texts |= dict.fromkeys(OURS, "-- A.\nSELECT 7 AS n") | {"late_heads": LATE}
    run_with(home / "runs", **texts)
    printed("views", home / "runs", "-o", home / "head.duckdb")
    return home


def test_a_query_that_a_run_brings_is_listed_explained_asked_and_exported(home: Path):
    runs = home / "runs"
    assert "late_heads               Heads of late layers.\n" in printed("query", runs)
    assert "--first WHOLE NUMBER  the first late layer." in printed(
        "query", runs, "late_heads", "--help"
    )
    rows = ended("query", runs, "late_heads", "--format", "csv").stdout
    assert rows.splitlines() == ["layer,head,entropy", "1,0,1.0", "1,1,1.5"]
    with headcount.open(runs) as opened:
        assert len(opened.sql("late_heads", first=0).rows()) == 4
        assert opened.sql("SELECT count(*) FROM late_heads").rows() == [(2,)]
    with duckdb.connect(str(home / "head.duckdb"), read_only=True) as connection:
        assert connection.sql("FROM late_heads(first := 0)").fetchall()[-1] == (1, 1, 1.5)


def test_sql_of_a_run_reaches_no_file_whether_it_is_asked_or_exported(home: Path):
    assert error_of("query", home / "runs", "a_file") == (
        "a_file: reads read_text(…), expected tables of the runs"
    )
    with (
        headcount.open(home / "runs") as runs,
        duckdb.connect(str(home / "head.duckdb"), read_only=True) as connection,
    ):
        for name in BAD:
            assert SECRET not in refused(QueryError, lambda asked: runs.sql(asked).rows(), name)
            assert SECRET not in refused(
                duckdb.Error, lambda asked: connection.sql(f"FROM {asked}").fetchall(), name
            )
    assert not list(home.rglob("written.parquet"))


def test_a_query_of_a_run_never_stands_for_one_of_ours(home: Path):
    with headcount.open(home / "runs") as runs:
        assert len(runs.sql("heads").rows()) > 4
        assert "n" not in runs.sql("by_head").columns
        assert len(runs.sql("SELECT view_name FROM duckdb_views()").rows()) > 10
    with duckdb.connect(str(home / "head.duckdb"), read_only=True) as connection:
        for name in ("heads", "by_head", "sink_heads", "headcount_notes"):
            assert "n" not in connection.sql(f"DESCRIBE {name}").fetchnumpy()["column_name"]


def test_one_name_with_two_texts_and_a_damaged_file_say_so_when_they_are_asked(tmp_path: Path):
    run = run_with(tmp_path, late_heads=LATE, number="-- A.\nSELECT 1 AS one")
    run_with(tmp_path, "b-1", late_heads=LATE.replace(">=", ">"))
    assert "late_heads is one query in run a-1 and another in run b-1; ask one" in error_of(
        "query", tmp_path, "late_heads"
    )
    assert ended("query", run.path, "late_heads").code == 0
    (file,) = [file for file in local(run.path).rglob("*.sql") if "one" in file.read_text()]
    file.write_text("-- A.\nSELECT 2 AS one")
    assert "number: run a-1 does not have its file as it was kept" in error_of(
        "query", run.path, "number"
    )
