"""`headcount views`: a DuckDB file of views, read as dashboards read it, while a scan goes on."""

import re
from pathlib import Path

import duckdb
import pytest

from headcount.queries.ask.asking import open_runs
from headcount.queries.ask.exported_views import NOTE, STORE_NOTE, write_views
from headcount.schemas.errors import HeadcountError
from headcount.schemas.statistics import STATISTICS
from tests.toys.toy_runs import Cell, Row, data_file, local, write_run


def sink(row: Row) -> float:
    return row.sequence + row.layer / 4 + row.head / 8


def rows(reader: duckdb.DuckDBPyConnection, sql: str) -> list[tuple[object, ...]]:
    return reader.execute(sql).fetchall()


def test_the_file_is_read_from_anywhere_without_damage_and_renewed_while_a_scan_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns: dict[str, Cell] = {"sink_mass": sink, "entropy": lambda row: None}
    run = write_run(tmp_path / "my runs", "a-1", columns, sequences=6, commit=[0, 1])
    damaged = local(data_file(run, "heads", "none", 1))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    monkeypatch.chdir(tmp_path)
    output = Path("head.duckdb")
    written, [damage] = write_views("my runs", output)
    assert "over 1 run (1 of 3 shards done), " in written
    assert "shard-000001.parquet has" in damage
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    output = tmp_path / "head.duckdb"

    reader = duckdb.connect(str(output), read_only=True)
    # Sequences 0 and 1 are there, whose mean is a half.
    card = "SELECT label, mean FROM head_card(label := 'L1H2') WHERE statistic = 'sink_mass'"
    for sql, row in {
        "SELECT count(*), max(sequence) FROM heads": (12, 1),
        card: ("L1H2", 1.0),
        "SELECT label, rank FROM ranking(ascending := true) LIMIT 1": ("L0H0", 1),
        "SELECT n_ctx, model FROM by_head LIMIT 1": (5, "toy"),
        # No row of a run is in the file.
        "SELECT count(*) FROM internal.heads_content": (0,),
    }.items():
        assert rows(reader, sql) == [row]
    # What was not measured is said.
    with pytest.raises(duckdb.Error, match="needs column 'sink_value_norm'"):
        rows(reader, "FROM sink_values")
    views = rows(reader, "SELECT view_name FROM duckdb_views() WHERE comment <> ''")
    assert {("heads",), ("by_head",), ("outliers",)} <= {*views}
    known = set(open_runs(tmp_path / "my runs").view_descriptions)
    listed = rows(reader, "SELECT view_name FROM duckdb_views() WHERE schema_name = 'main'")
    assert known <= {name for (name,) in listed}
    assert f"head.duckdb: {len(known)} views and " in written
    # DuckDB 1.4 has no function `if`, which it parses away and 2.0 stores.
    stored = "SELECT sql FROM duckdb_views() UNION ALL SELECT macro_definition FROM "
    found = rows(reader, f"{stored}duckdb_functions() WHERE NOT internal")
    assert not [text for (text,) in found if re.search(r'\bif"?\(', str(text))]
    sql = "SELECT column_name, comment FROM duckdb_columns() WHERE table_name = 'by_head'"
    comments = dict(reader.execute(sql).fetchall())
    assert comments["mean_entropy"] == f"Mean over sequences: {STATISTICS['entropy'].description}"
    assert comments["head"] == "Head within the layer, from 0."
    # DuckDB 1.4 reads formats up to 67. The number stands after a checksum and the letters DUCK.
    header = output.read_bytes()[:20]
    assert (header[8:12], int.from_bytes(header[12:20], "little")) == (b"DUCK", 67)
    refresh = f"headcount views '{tmp_path}/my runs' -o {output}"
    sql = "SELECT shards_done || ' of ' || shards, refresh, note FROM headcount_notes"
    assert rows(reader, sql) == [("1 of 3", refresh, NOTE)]

    # The scan has gone on. The open file stays as it was, and a new reader sees more.
    write_run(tmp_path / "more", "a-1", columns, sequences=6)
    for file in (tmp_path / "more").rglob("shard-000002*"):
        place = tmp_path / "my runs" / file.relative_to(tmp_path / "more")
        place.write_bytes(file.read_bytes())
    write_views(str(tmp_path / "my runs"), output)
    assert rows(reader, "SELECT count(*) FROM heads") == [(12,)]
    reader.close()
    with duckdb.connect(str(output), read_only=True) as renewed:
        assert rows(renewed, "SELECT count(*) FROM heads") == [(24,)]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"elsewhere", "head.duckdb", "more", "my runs"}


def test_without_a_run_an_older_file_stays(tmp_path: Path) -> None:
    for name, changed in {"a-1": None, "b-2": {"sink_mass": "changed"}}.items():
        write_run(tmp_path / "runs", name, {"sink_mass": sink}, fingerprints=changed)
    output = tmp_path / "head.duckdb"
    output.write_bytes(b"older")
    for runs, problem in {"nothing": "no run", "runs": "'sink_mass'"}.items():
        with pytest.raises(HeadcountError, match=problem):
            write_views(str(tmp_path / runs), output)
    assert output.read_bytes() == b"older"
    assert "httpfs" in STORE_NOTE
