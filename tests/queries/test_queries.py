"""The views over small runs with exact numbers: what counts, what is refused, what is written."""

import io
import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from headcount.queries.ask.answers import run_query
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.queries.ask.formats import Format, rows_to_read, write
from headcount.queries.ask.text_tables import COUNTED_ROWS
from headcount.queries.open.base_views import MACROS
from headcount.queries.open.descriptions import VIEWS
from headcount.queries.open.named_queries import QUERIES
from headcount.queries.open.shipped_views import DYNAMIC
from headcount.queries.open.table_sql import SOURCES, source_sql
from headcount.schemas.errors import QueryError
from headcount.schemas.filled_tables import TABLES
from headcount.schemas.statistics import STATISTICS
from tests.toys.commands import ended
from tests.toys.toy_runs import (
    Cell,
    Row,
    ask,
    data_file,
    local,
    one_line,
    open_tables,
    write_run,
)

SINKS: dict[str, Cell] = {"sink_mass": lambda row: sink_mass(row)}

NORMS: dict[str, Cell] = {
    # The mean over the other positions is (T · mean - first) / (T - 1). With T = 5 that is
    # (5·4 - 8)/4 = 3 for values and (5·2 - 2)/4 = 2 for keys.
    "value_norm": lambda row: 4.0,
    "sink_value_norm": lambda row: 8.0,
    "key_norm": lambda row: 2.0,
    "sink_key_norm": lambda row: 2.0,
    # The residual stream is the same for all heads.
    "resid_pre_norm": lambda row: 12.0,
    "sink_resid_pre_norm": lambda row: 20.0,
    "resid_post_norm": lambda row: 4.0 if row.layer == 0 else 1.0,
    "sink_resid_post_norm": lambda row: 20.0 if row.layer == 0 else 5.0,
}

NEEDED: dict[str, Cell] = {
    **NORMS,
    **dict.fromkeys(("sink_mass", "entropy", "induction_score", "match_coverage"), lambda row: 0.5),
}
"""What all named queries together need. Views over all statistics take long to bind."""


def sink_mass(row: Row) -> float:
    """0.5 and 0.75 in turn for head 1, and a quarter of that for the others."""
    return (0.5 if row.sequence % 2 == 0 else 0.75) / (1 if row.head == 1 else 4)


# Views


def induction(row: Row) -> float | None:
    """Undefined in the first sequence, which has no copies."""
    return None if row.sequence == 0 else (0.25, 0.5)[row.head]


SUMMED = "SELECT value_norm_first, value_norm_others, value_norm_ratio FROM sink_values"
ALPHAS = [pytest.approx((1 + 4 * mass) / 5) for mass in (0.625, 0.15625)]
THIRDS = pytest.approx(8 / 3)
ONE_LAYER: dict[str, Any] = {"layers": 1}
ONE_HEAD = ONE_LAYER | {"heads": 1}
TWO_HEADS = ONE_LAYER | {"heads": 2}
TWO_SEQUENCES = ONE_LAYER | {"sequences": 2}
IN_TWO_PARTS = ONE_HEAD | {"pile_sets": ["Github", "Wikipedia (en)", None]}
# Cells of a run, facts of it, a query, and the rows of its answer.
VIEWS_OF_RUNS: list[tuple[dict[str, Cell], dict[str, Any], str, list[tuple[Any, ...]]]] = [
    (
        SINKS, TWO_SEQUENCES | {"heads": 2},
        "SELECT layer, label, sequences, mean_sink_mass, sd_sink_mass, model FROM by_head",
        [
            (0, "L0H0", 2, 0.15625, pytest.approx(0.03125 * 2**0.5), "toy"),
            (0, "L0H1", 2, 0.625, pytest.approx(0.125 * 2**0.5), "toy"),
        ],
    ),
    (
        {"sink_mass": lambda row: row.layer + row.head / 4}, {},
        "SELECT layer, heads, sequences, mean_sink_mass, max_sink_mass FROM by_layer",
        [(0, 3, 4, 0.25, 0.5), (1, 3, 4, 1.25, 1.5)],
    ),
    (
        # sink_alpha = (1 + (T - 1) sink_mass) / T. The second heads have 0.3 and 0.35 on the two
        # sequences, so one of two is above 0.3. Two sequences tell no head from the baseline.
        SINKS | NORMS, TWO_SEQUENCES,
        "SELECT rank, label, sink_mass, uniform_baseline, sink_alpha, is_sink, sink_rate, "
        "value_norm_ratio, resid_pre_norm_ratio, sequences FROM sink_heads",
        [
            (1, "L0H1", 0.625, 0.25, ALPHAS[0], False, 1.0, THIRDS, 2.0, 2),
            (2, "L0H0", 0.15625, 0.25, ALPHAS[1], False, 0.5, THIRDS, 2.0, 2),
            (2, "L0H2", 0.15625, 0.25, ALPHAS[1], False, 0.5, THIRDS, 2.0, 2),
        ],
    ),
    (
        # (1 + 4·0.25)/5 = 0.4 and (1 + 4·0.125)/5 = 0.3, which is not above 0.3.
        {"sink_mass": lambda row: 0.125 if row.head == 0 else 0.25, **NORMS},
        TWO_HEADS | {"uniform_baseline": 0.125},
        "SELECT head, is_sink, sink_rate FROM sink_heads", [(1, True, 1.0), (0, False, 0.0)],
    ),
    (
        {"induction_score": induction, "match_coverage": lambda row: float(row.sequence > 0)},
        TWO_HEADS,
        "SELECT rank, label, induction_score, uniform_baseline, is_induction, coverage, "
        "measured, sequences FROM induction_heads",
        [(1, "L0H1", 0.5, 0.25, True, 0.75, 3, 4), (2, "L0H0", 0.25, 0.25, False, 0.75, 3, 4)],
    ),
    (NORMS, ONE_HEAD, SUMMED, [(8.0, 3.0, THIRDS)]),
    # A sequence of one token has no others.
    (NORMS, ONE_HEAD | {"n_ctx": 1}, SUMMED, [(8.0, None, None)]),
    (
        NORMS, ONE_HEAD,
        "SELECT label, key_norm_first, key_norm_others, key_norm_ratio FROM sink_values",
        [("L0H0", 2.0, 2.0, 1.0)],
    ),
    (
        # Layer 0: (5·12 - 20)/4 = 10; after it (5·4 - 20)/4 = 0, and nothing is a multiple of 0.
        NORMS, {},
        "SELECT layer, resid_pre_first, resid_pre_others, resid_pre_ratio, resid_post_others, "
        "resid_post_ratio, sequences FROM layer_norms",
        [(layer, 20.0, 10.0, 2.0, 0.0, None, 4) for layer in range(2)],
    ),
    (
        # Not multiplied by interventions; a sequence without a name is left out.
        {"sink_mass": lambda row: row.sequence / 8},
        IN_TWO_PARTS | {"interventions": ("none", "zero_query_bias")},
        "SELECT intervention, pile_set_name, sequences, mean_sink_mass, sink_rate FROM by_pile_set",
        [
            (intervention, *row)
            for intervention in ("none", "zero_query_bias")
            for row in [("Github", 2, 1.5 / 8, 0.5), ("Wikipedia (en)", 1, 1 / 8, 0.0)]
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("cells", "facts", "query", "rows"), VIEWS_OF_RUNS)
def test_a_view_has_these_rows(
    tmp_path: Path, cells: Any, facts: Any, query: str, rows: Any
) -> None:
    write_run(tmp_path, "a-1", cells, **facts)
    assert ask(tmp_path, query) == rows


def test_by_head_knows_every_statistic_and_leaves_null_out(tmp_path: Path) -> None:
    cells = dict.fromkeys(STATISTICS, lambda row: None if row.sequence == 0 else 3.0)
    write_run(tmp_path, "a-1", cells, **ONE_HEAD)
    (row,) = open_runs(tmp_path).records("by_head")
    expected = {f"mean_{name}": 3.0 for name in STATISTICS} | {"sequences": 4}
    assert (expected | {f"sd_{name}": 0.0 for name in STATISTICS}).items() <= row.items()


def test_by_head_keeps_deviations_far_smaller_than_the_mean() -> None:
    """Many rows, because sums lose digits row by row: plain squares are off by 0.1 %."""
    connection = duckdb.connect()
    connection.execute("CREATE TABLE runs AS SELECT 'a-1' AS run_id, 'toy' AS model, 5 AS n_ctx")
    connection.execute(
        """
        CREATE TABLE heads AS
        SELECT 'a-1' AS run_id, 'none' AS intervention, 'pile' AS input_family, 0 AS shard,
            i AS sequence, 0 AS layer, 0 AS head, 'L0H0' AS label,
            (1234.567 + i % 5 * 0.01)::FLOAT AS steps, 0.1::FLOAT AS constant
        FROM range(200_000) AS t(i)
        """
    )
    connection.execute(MACROS.read_text())
    by_head = (QUERIES / "heads" / "by_head.sql").read_text()
    [found] = connection.execute(f"SELECT sd_steps, sd_constant FROM ({by_head})").fetchall()
    [(expected,)] = connection.execute("SELECT stddev_samp(steps) FROM heads").fetchall()
    assert found[0] == pytest.approx(expected, rel=1e-6)
    assert found[1] < 2e-8 * 0.1


def test_dormant_induction_heads_join_runs_of_the_same_weights(tmp_path: Path) -> None:
    def write(name: str, family: str, induction: float | None, sink: float, **facts: Any) -> None:
        cells: dict[str, Cell] = {
            "induction_score": lambda row: induction,
            "sink_mass": lambda row: sink / (1 + row.head),
        }
        write_run(tmp_path, name, cells, family=family, **TWO_HEADS, **facts)

    write("rep-1", "repeated_random", 0.75, 0.125)
    write("uni-1", "uniform_random", None, 0.5)
    write("other-1", "uniform_random", None, 0.5, model="another")
    query = (
        "SELECT label, induction_repeated, sink_unrepeated, is_dormant, sink_repeated, sink_text, "
        "text_run FROM dormant_induction_heads"
    )
    expected = [("L0H0", 0.75, 0.5, True, 0.125), ("L0H1", 0.75, 0.25, False, 0.0625)]
    assert ask(tmp_path, query) == [(*row, None, None) for row in expected]
    write("pile-1", "pile", 0.25, 0.25)
    of_text = [(0.25, "pile-1"), (0.125, "pile-1")]
    assert ask(tmp_path, query) == [(*a, *b) for a, b in zip(expected, of_text, strict=True)]


def test_runs_and_shards_and_statistics(tmp_path: Path) -> None:
    cells: dict[str, Cell] = {"sink_mass": sink_mass, "sink_logit_margin": sink_mass}
    write_run(tmp_path, "toy-scan-0a1b", cells, commit=[0], sequences=5)
    database = open_runs(tmp_path)
    for query, rows in {
        "SELECT run_id, name, model, n_ctx, input_family, input_options, interventions FROM runs": [
            ("toy-scan-0a1b", "toy-scan", "toy", 5, "uniform_random", '{"period": 2}', ["none"])
        ],
        "SELECT shards, shards_done, complete, sequences, sequences_done, rows, tokens, seconds "
        "FROM runs": [(3, 1, False, 5, 2, 12, 10, 1.5)],
        "SELECT shard, start, stop, status, rows, host FROM shards": [
            (0, 0, 2, "done", 12, "toy"),
            (1, 2, 4, "missing", None, None),
            (2, 4, 5, "missing", None, None),
        ],
        "SELECT name, unit, range_low, range_high, uniform_baseline, runs FROM statistics "
        "ORDER BY name": [
            ("sink_logit_margin", "logits", float("-inf"), float("inf"), False, 1),
            ("sink_mass", "probability", 0.0, 1.0, True, 1),
        ],
    }.items():
        assert ask(database, query) == rows


def test_every_shipped_query_is_described(database: RunDatabase) -> None:
    descriptions = database.view_descriptions
    assert list(descriptions) == [*VIEWS, *sorted(file.stem for file in QUERIES.rglob("*.sql"))]
    assert [name for name, description in descriptions.items() if "." not in description] == []


# What counts


def test_only_whole_committed_files_count(tmp_path: Path, capfd: Any) -> None:
    run = write_run(tmp_path, "a-1", SINKS, sequences=10, commit=[0, 1, 2])
    heads, commits = (local(run.path) / name for name in ("heads/intervention=none", "commits"))
    (heads / "shard-000003.parquet").write_bytes(b"PAR1 half a file")
    (heads / ".shard-000004.parquet.tmp").write_bytes(b"")
    (heads / "foreign.parquet").write_bytes(b"")
    (commits / "shard-000003.json").write_text('{"run_id": ')
    shutil.copy(commits / "shard-000000.json", commits / "shard-000004.json")
    content = (heads / "shard-000001.parquet").read_bytes()
    (heads / "shard-000001.parquet").write_bytes(content[:-1])
    local(data_file(run, "sequences", "none", 2)).unlink()
    database = open_runs(tmp_path)
    assert ask(database, "SELECT DISTINCT sequence FROM heads ORDER BY ALL") == [(0,), (1,)]
    assert ask(database, "SELECT count(*) FROM sequences") == [(2,)]
    why = (
        f"heads/intervention=none/shard-000001.parquet has {len(content) - 1:,} bytes where "
        f"{len(content):,} were committed"
    )
    assert ask(database, "SELECT status, damage FROM shards") == [
        ("done", None),
        ("damaged", why),
        ("damaged", "sequences/intervention=none/shard-000002.parquet is gone"),
        ("missing", None),
        ("missing", None),
    ]
    damage = (
        "run a-1: shard 2: sequences/intervention=none/shard-000002.parquet is gone and is left "
        "out of every view; so are 1 more files. "
        f"headcount resume {run.path} --verify measures it anew"
    )
    assert database.damage() == [damage]
    # A library prints nothing. A command prints what is gone, and what else it finds as it reads.
    assert capfd.readouterr() == ("", "")
    told = [f"warning: {line}" for line in (damage.replace("; so are 1 more files", ""), damage)]
    of_answer = "note: run a-1 is not complete: 1 of 5 shards are in"
    # An answer also says how much of the run it is about.
    for words, lines in (
        (["report", str(tmp_path), "-o", str(tmp_path / "report.html")], told),
        (["query", str(tmp_path), "SELECT count(*) FROM heads"], [*told, of_answer]),
    ):
        assert ended(*words).stderr.splitlines() == lines


def test_a_commit_cannot_point_elsewhere(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a-1", SINKS, commit=[0])
    shutil.copy(local(data_file(run, "heads", "none", 0)), tmp_path / "outside.parquet")
    commit = json.loads(run.commit_file(0).read_bytes())
    commit["files"][0]["path"] = "../outside.parquet"
    local(run.commit_file(0)).write_text(json.dumps(commit))
    assert ask(tmp_path, "SELECT count(*) FROM heads") == [(0,)]


def test_a_run_without_commits_is_empty_and_has_the_columns_of_a_whole_one(tmp_path: Path) -> None:
    curves = {"attention_received_by_key": lambda row: [0.5] * 5}
    for name, commit in (("empty", []), ("whole", None)):
        write_run(tmp_path / name, "a-1", NEEDED, commit=commit, curves=curves)
    empty, whole = open_runs(tmp_path / "empty"), open_runs(tmp_path / "whole")
    for name in (*TABLES, *(file.stem for file in QUERIES.rglob("*.sql"))):
        assert ask(empty, name) == []
    for name in (*TABLES, "runs", "shards"):
        assert ask(empty, f"DESCRIBE {name}") == ask(whole, f"DESCRIBE {name}"), name
    types = {row[:2] for row in ask(empty, "DESCRIBE heads")}
    assert types > {("run_id", "VARCHAR"), ("layer", "SMALLINT"), ("sink_mass", "FLOAT")}


@pytest.mark.parametrize("folder", ["it's [1] * of ?", "two\nlines [1]", "x=1/y=2", "a%20[1]"])
def test_any_path_is_read_as_it_is(folder: str, tmp_path: Path) -> None:
    for name in {folder, folder.replace("[1]", "1"), folder.replace("=1", "")}:
        write_run(tmp_path / name, "a-1", {"entropy": lambda row: 0.5}, layers=1, heads=1)
    database = open_tables(tmp_path / folder)
    assert ask(database, "SELECT count(*), sum(entropy) FROM heads") == [(4, 2.0)]


def test_a_run_directory_and_a_directory_of_runs(tmp_path: Path, monkeypatch: Any) -> None:
    home = tmp_path / "date=2026-01-01 o'clock"
    run = write_run(home, "a-1", SINKS)
    write_run(home, "b-2", {"entropy": lambda row: 1.0})
    monkeypatch.chdir(local(run.path))
    assert ask(Path("."), "SELECT DISTINCT run_id FROM heads") == [("a-1",)]
    query = "SELECT run_id, count(sink_mass), count(entropy), count(*) FROM heads GROUP BY 1"
    assert ask(home, f"{query} ORDER BY 1") == [("a-1", 24, 0, 24), ("b-2", 0, 24, 24)]
    assert "date" not in run_query(open_runs(home), "heads").schema.names


@pytest.mark.long
def test_named_queries_read_only_tables_that_are_compared_with_their_commits(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, "a-1", NEEDED, curves={"attention_received_by_key": lambda row: [0.5] * 5})
    database = open_runs(tmp_path)
    database.make_views()

    def ask_with_unreadable(sources: set[str], query: str) -> None:
        cursor = database.cursor()
        cursor.execute("BEGIN TRANSACTION")
        for source in sources:
            cursor.execute(
                f"CREATE OR REPLACE VIEW internal.{source} AS {source_sql(SOURCES[source], [])} "
                f"UNION ALL BY NAME SELECT error('{source} is read') AS run_id"
            )
        try:
            cursor.execute(f"FROM {query}").fetchall()
        finally:
            cursor.execute("ROLLBACK")

    for query in database.shipped.queries:
        compared = {*database.sources_read(f"FROM {query}")}
        ask_with_unreadable({*SOURCES} - compared, query)
    with pytest.raises(duckdb.Error, match="heads is read"):
        ask_with_unreadable({"heads"}, "by_head")
    assert database.sources_read("FROM query_table('he' || 'ads')") == list(SOURCES)


def test_views_that_lack_a_column_can_be_listed(tmp_path: Path) -> None:
    queries = {
        "a_first": "-- Stands on a view that cannot be.\nFROM sink_values",
        "broken": "-- A mistake.\nSELECT sink_mass // FROM heads",
        "ungrouped": "-- Another.\nSELECT layer, sum(sink_mass) FROM heads",
        "lost": "-- A table that nobody has.\nFROM nowhere",
    }
    folder = tmp_path / "queries"
    shutil.copytree(QUERIES, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for name, sql in queries.items():
        (folder / f"{name}.sql").write_text(sql)
    write_run(tmp_path / "runs", "a-1", SINKS)
    database = open_runs(tmp_path / "runs", queries=folder)
    unmeasured = database.unmeasured_views()
    assert unmeasured["sink_values"] == unmeasured["a_first"] == "sink_value_norm"
    assert not {"broken", "ungrouped", "lost", "by_head"} & unmeasured.keys()
    assert {"uniform_sink_mass", "tokens", "run_id"} <= database.columns("sequences")
    assert database.columns("nowhere") == frozenset()
    for view, prefix in product(("a_first", "sink_values"), ("", "SELECT count(*) FROM ")):
        with pytest.raises(QueryError, match=f"'{view}' .* needs column 'sink_value_norm', wh"):
            database.records(prefix + view)
    assert len(database.records("by_head")) == 6


def test_runs_can_be_opened_with_more_views(small: Path) -> None:
    database = open_runs(small, {"one": "SELECT 1 AS a", "two": "SELECT a + 1 AS b FROM one"})
    assert database.records("two") == [{"b": 2}]
    with pytest.raises(QueryError, match=r"^view three: unknown column 'c'"):
        open_runs(small, {"three": "SELECT c FROM heads"})


# Read-only


WRITES = [
    "COPY heads TO '{run}/stolen.csv'",
    "COPY (SELECT 1) TO '{run}/stolen.csv'",
    "EXPLAIN ANALYZE COPY heads TO '{run}/stolen.csv'",
    "WITH a AS (COPY heads TO '{run}/stolen.csv') FROM a",
    "WITH a AS (DELETE FROM internal.runs_content RETURNING *) FROM a",
    "CREATE TABLE t (a INT)",
    "CREATE TEMP TABLE t AS SELECT 1",
    "CREATE OR REPLACE VIEW heads AS SELECT 1",
    "EXPLAIN ANALYZE CREATE TABLE t (a INT)",
    "INSERT INTO internal.runs_content SELECT * FROM runs",
    "UPDATE internal.runs_content SET model = 'x'",
    "ATTACH '{run}/new.duckdb'",
    "DETACH memory",
    *("INSTALL httpfs", "LOAD httpfs", "SET threads = 1", "PRAGMA threads = 1"),
    *("DROP VIEW heads", "CALL pragma_version()", "CHECKPOINT memory"),
    *("BEGIN TRANSACTION", "EXPORT DATABASE '{run}/all'"),
]
OTHERS = [
    *("SELECT 1; SELECT 2", "SELECT 1) UNION ALL (SELECT 2", "SELECT 1 /*", "EXECUTE x"),
    *("RESET ALL", "VACUUM", "FROM read_text('{neighbour}')"),
    *("FROM read_csv('{secret}')", "FROM '{secret}'", "FROM read_text('{run}/../../secret.csv')"),
    *("FROM read_blob('/proc/self/environ')", "FROM read_parquet('s3://bucket/x.parquet')"),
    *("FROM glob('/*')", "FROM glob('{run}/../../*')", "FROM sniff_csv('{secret}')"),
    "FROM parquet_metadata('{secret}')",
    # DuckDB could take this Python variable for a table.
    "FROM here",
]


def test_writing_and_reading_outside_the_runs_is_refused_in_one_line(tmp_path: Path) -> None:
    small = tmp_path / "runs"
    write_run(small, "a-1", SINKS)
    secret, neighbour = small.parent / "secret.csv", small / "run_id=a-10.csv"
    for file in (secret, neighbour):
        file.write_text("a\n1\n")
    database, run = open_runs(small), small / "run_id=a-1"
    files = sorted(small.rglob("*"))
    here = pa.table({"a": [1]})
    assert here.num_rows == 1
    for sql in WRITES + OTHERS:
        with one_line(QueryError, "read-only" if sql in WRITES else None):
            ask(database, sql.format(run=run, secret=secret, neighbour=neighbour))
    assert sorted(small.rglob("*")) == files
    assert ask(database, "SELECT count(*) FROM runs") == [(1,)]


def test_queries_of_every_kind(small: Path) -> None:
    database = open_runs(small)
    # Views are made when a query names them. The text of a function may name any.
    call = "QUERY/* of text */('SELECT count(*) FROM by_head')"
    assert DYNAMIC.search("query('')")
    assert ask(database, f"FROM {call}") == [(6,)]
    for refused in ("query('DROP VIEW heads')", "sqlite_scan('/etc/passwd', 't')"):
        with one_line(QueryError):
            ask(database, f"FROM {refused}")
    pivot = "PIVOT heads ON layer USING count(*) GROUP BY head ORDER BY head DESC"
    for query, rows in {
        "-- a comment\nSELECT max(layer) FROM heads; -- the end": [(1,)],
        "FROM heads SELECT count(*)": [(24,)],
        pivot: [(2, 4, 4), (1, 4, 4), (0, 4, 4)],
        "SELECT head FROM heads ORDER BY head DESC, layer LIMIT 2": [(2,), (2,)],
    }.items():
        assert ask(database, query) == rows
    assert ("head", "SMALLINT") in [row[:2] for row in ask(database, "DESCRIBE heads")]
    assert len(ask(database, "SUMMARIZE heads")) == len(ask(database, "SHOW heads")) == 10
    assert "Read Parquet" in ask(database, "EXPLAIN FROM heads")[0][1]
    assert "Total Time" in ask(database, "EXPLAIN ANALYZE FROM heads")[0][1]
    answer = run_query(database, "SELECT layer FROM by_layer", limit=1)
    assert list(answer.rows()) == [(0,)]


COUNTED = """
WITH once AS MATERIALIZED (SELECT count_execution() AS executions)
SELECT executions, i, CASE WHEN i = {broken} THEN error('row {broken}') END AS e
FROM once, range({rows}) AS numbers(i)"""

# Format, limit, rows, the number of lines or the last line.
ASKED_ONCE: list[tuple[Format, int | None, int, int | str]] = [
    ("table", None, 40, "1 39 –"),
    ("table", None, 41, "… 1 more rows (--limit 40)"),
    ("table", 0, 5, "… 5 more rows (--limit 0)"),
    ("table", 5, 0, "no rows"),
    ("table", None, COUNTED_ROWS + 40, "… 10,000 more rows (--limit 40)"),
    ("table", None, COUNTED_ROWS + 41, "… more than 10,000 more rows (--limit 40)"),
    ("table", 3, 1_000_000_000, "… more than 10,000 more rows (--limit 3)"),
    # CSV has a line for its header, JSON has one for each bracket.
    *(("csv", None, 45, 46), ("csv", 7, 45, 8), ("json", 7, 45, 9)),
]


def test_a_query_is_asked_once_however_many_rows_there_are(database: RunDatabase) -> None:
    executions: list[None] = []

    def count_execution() -> int:
        executions.append(None)
        return len(executions)

    def lines(
        format_: Format, limit: int | None, rows: int, broken: int = -1, prefix: str = ""
    ) -> list[str]:
        executions.clear()
        query, out = f"{prefix} {COUNTED.format(rows=rows, broken=broken)}", io.StringIO()
        answer = run_query(database, query, rows_to_read(format_, limit))
        write(answer, format_, out, limit)
        return out.getvalue().splitlines()

    name = count_execution.__name__
    database.connection.create_function(name, count_execution, [], "BIGINT", side_effects=True)
    for format_, limit, rows, expected in ASKED_ONCE:
        found = lines(format_, limit, rows)
        is_number = isinstance(expected, int)
        assert (len(found) if is_number else " ".join(found[-1].split())) == expected
        assert len(executions) == 1
    for broken in (20, 5_000, 10_020):
        with pytest.raises(QueryError, match=f"row {broken}$"):
            lines("table", None, 1_000_000, broken)
        assert len(executions) == 1
    for prefix, count in (("EXPLAIN", 0), ("EXPLAIN ANALYZE", 1)):
        text = "\n".join(lines("table", None, 100_000, prefix=prefix))
        assert ("CTE" in text, "more rows" in text, len(executions)) == (True, False, count)
    database.connection.remove_function(name)


# Command line


def test_the_command_lists_views(small: Path) -> None:
    listing = ended("query", small).stdout.splitlines()
    assert listing[0].split()[:4] == ["heads", "One", "row", "per"]
    assert len(listing) == len(VIEWS) + len(list(QUERIES.rglob("*.sql")))
