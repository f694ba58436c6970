"""What an answer looks like: on terminals of any width, in files of any format.

Also what happens if a disk is full or a reader leaves.
"""

import csv
import io
import json
import os
import signal
import time
from functools import cache, partial
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from headcount.queries.ask.answers import run_query
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.queries.ask.formats import Format, write
from headcount.queries.ask.text_tables import write_table
from tests import ROOT
from tests.tools.processes import Command
from tests.toys.commands import ended, error_of, printed

NUMBERS = "range(100000000000) a, range(10000) b"
ENDLESS = f"SELECT count(*) FROM {NUMBERS} WHERE a.range % 7 = b.range % 3"

SECONDS_BEHIND_THE_BEGINNING = 0.6
"""Seconds of a processor after which a command has long begun its query."""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@cache
def database_of(small: Path) -> RunDatabase:
    """One database for all queries."""
    return open_runs(small)


def table_lines(
    small: Path, query: str, width: int | None, limit: int | None = None, *, vertical: bool = False
) -> list[str]:
    """The lines of a table on a terminal, or in a pipe if there is no width."""
    out = io.StringIO() if width is None else Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", str(width or 80))
        write_table(run_query(database_of(small), query), out, limit, vertical)
    return out.getvalue().splitlines()


# Tables


def test_a_table_is_exact_and_counts_what_it_leaves_out(small: Path) -> None:
    query = "SELECT label, mean_sink_mass / 3 AS third, mean_entropy, 1234567 AS n FROM by_head"
    assert table_lines(small, query, None, 2) == [
        "label     third   mean_entropy           n",
        "──────────────────────────────────────────",
        "L0H0    0.03333              –   1,234,567",
        "L0H1     0.3667              –   1,234,567",
        "… 4 more rows (--limit 2)",
    ]
    query = "SELECT [1/3, NULL, 12345.678] AS a, ['none', NULL] AS b"
    assert table_lines(small, query, None) == [
        "a                     b",
        "───────────────────────────────",
        "[0.3333, –, 12,346]   [none, –]",
    ]
    assert table_lines(small, "SELECT 1 AS a WHERE false", None) == ["a", "─", "no rows"]
    # In a pipe, wide tables are not mangled.
    names = run_query(database_of(small), "by_head").schema.names
    assert table_lines(small, "by_head", None)[0].split() == names


def test_constant_columns_are_written_once_and_those_that_do_not_fit_are_named(small: Path) -> None:
    query = "SELECT *, layer + head AS something FROM by_head, range(2) AS t(copied)"
    lines = table_lines(small, query, 45)
    constants = (
        "run_id: a-1, model: toy, n_ctx: 5, intervention: none, input_family: uniform_random"
    )
    assert lines[:5] == constants.split(", ")
    header = next(place for place, line in enumerate(lines) if line.startswith("layer"))
    assert lines[header].split() == ["layer", "head", "label", "mean_sink_mass"]
    assert lines[header + 2].split() == ["0", "0", "L0H0", "0.1"]
    left_out = "… 2 more columns: copied, something (--vertical or -o FILE.csv has all)"
    assert " ".join(" ".join(lines).split()).endswith(left_out)
    assert max(map(len, lines[:-1])) <= 45


def test_a_row_too_wide_for_the_terminal_has_one_column_a_line(small: Path) -> None:
    query = "SELECT 'L0H0' AS label, 0.25 AS sink_mass, repeat('ab', 20) AS long, NULL AS none"
    assert table_lines(small, query, 40) == [
        "label      L0H0",
        "sink_mass  0.25",
        f"long       {'ab' * 20}",
        "none       –",
    ]
    assert table_lines(small, query, 200)[0].split() == ["label", "sink_mass", "long", "none"]
    assert table_lines(small, query, None, vertical=True) == [
        "label      L0H0",
        "sink_mass  0.25",
        f"long       {'ab' * 20}",
        "none       –",
    ]


def test_rows_of_a_vertical_table_are_numbered(small: Path) -> None:
    lines = table_lines(small, "SELECT i FROM range(5) AS t(i)", None, 2, vertical=True)
    assert lines == ["row 1", "i  0", "row 2", "i  1", "… 3 more rows (--limit 2)"]
    lines = table_lines(small, "SELECT repeat('漢', n) AS text, n FROM range(1, 3) AS t(n)", None)
    assert lines == ["text   n", "────────", "漢     1", "漢漢   2"]


def test_a_terminal_is_shown_no_control_characters(small: Path) -> None:
    # Escape, a control character of eight bits, a mark of direction, and the bell.
    unsafe = "'a' || chr(27) || '[2J' || chr(155) || chr(8238) || chr(7) || 'b'"
    query = f'SELECT {unsafe} AS "x\x1b[31m", [{unsafe}] AS y'
    for width in (None, 40, 200):
        for vertical in (False, True):
            text = "\n".join(table_lines(small, query, width, vertical=vertical))
            assert not any(sign in text for sign in "\x1b\x9b\u202e\x07")
            assert "a\\x1b[2J\\x9b\\u202e\\x07b" in text.replace("\n", "").replace(" ", "")
    terminal, file, json_shown = Terminal(), io.StringIO(), Terminal()
    shown_as: list[tuple[Format, io.StringIO]] = [
        ("csv", terminal), ("csv", file), ("json", json_shown)
    ]  # fmt: skip
    for answer_format, out in shown_as:
        write(run_query(database_of(small), query), answer_format, out)
    for shown in (terminal, json_shown):
        assert not any(sign in shown.getvalue() for sign in "\x1b\x9b\u202e\x07")
    assert "\x1b[2J\x9b\u202e\x07b" in file.getvalue()
    first, _ = json.loads(json_shown.getvalue())[0].values()
    assert first == "a\x1b[2J\x9b\u202e\x07b"


# Files


def test_every_format_keeps_null_nested_values_quotes_and_unicode(
    small: Path, tmp_path: Path
) -> None:
    query = (
        "SELECT * FROM (VALUES (1, 0.1::FLOAT, [1, NULL], {'a': 'é'}, 'say \"漢\", it''s'), "
        "(NULL, NULL, NULL, NULL, NULL)) AS t(n, x, list, struct, text)"
    )
    first = {"n": 1, "x": 0.1, "list": [1, None], "struct": {"a": "é"}, "text": 'say "漢", it\'s'}
    for name in ("a.csv", "a.json", "a.jsonl", "a.parquet"):
        printed("query", small, query, "-o", str(tmp_path / name))
    assert json.loads((tmp_path / "a.json").read_text()) == [first, dict.fromkeys(first)]
    # JSON has no NaN and no infinity. A float32 is the shortest number that means it.
    numbers = "SELECT 'NaN'::DOUBLE AS a, '-inf'::FLOAT AS b, sum(2**40) AS c, [0.1::FLOAT] AS d"
    answer = json.loads(printed("query", small, numbers, "--format", "json"))
    assert answer == [{"a": None, "b": None, "c": 2**40, "d": [0.1]}]
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == [first, dict.fromkeys(first)]
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.to_pylist() == [first | {"x": pytest.approx(0.1)}, dict.fromkeys(first)]
    with (tmp_path / "a.csv").open(newline="") as file:
        header, row, empty = csv.reader(file)
    assert (header, empty) == (list(first), [""] * 5)
    assert (row[0], row[1], row[4]) == ("1", "0.1", first["text"])
    assert [json.loads(cell) for cell in row[2:4]] == [first["list"], first["struct"]]


def test_the_name_of_a_file_says_its_format(small: Path, tmp_path: Path) -> None:
    query = "SELECT layer, head FROM heads ORDER BY ALL LIMIT 2"
    contents = {}
    for name, *options in (("a.txt",), ("a.CSV",), ("odd.dat", "--format", "csv")):
        assert printed("query", small, query, "-o", str(tmp_path / name), *options) == ""
        contents[name] = (tmp_path / name).read_text()
    assert contents["odd.dat"] == contents["a.CSV"] == "layer,head\n0,0\n0,0\n"
    assert contents["a.txt"].splitlines()[0].split() == ["layer", "head"]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(contents)


def test_parquet_says_what_columns_mean(small: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    query = "SELECT label, mean_sink_mass, sd_sink_mass, mean_entropy, 1 AS one FROM by_head"
    printed("query", small, query, "-o", str(file))
    schema = pq.read_schema(file)
    facts = {
        column.name: {key.decode(): text.decode() for key, text in (column.metadata or {}).items()}
        for column in schema
    }
    assert facts["label"]["description"].startswith("Layer and head as people write them")
    mean, sd = facts["mean_sink_mass"], facts["sd_sink_mass"]
    assert mean["unit"] == sd["unit"] == "probability"
    assert mean["description"].startswith("Mean over sequences: Mean attention")
    # A standard deviation has the unit of the statistic, but not its range.
    assert [json.loads(column.get("range", "{}")) for column in facts.values()] == [
        {}, [0, 2.1], {}, [0, None], {},
    ]  # fmt: skip
    assert facts["one"] == {}
    assert str(schema.field("mean_sink_mass").type) == "double"
    assert pq.read_table(file).num_rows == 6


def test_a_file_stays_until_the_answer_is_whole(small: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("old")
    query = "SELECT CASE WHEN i = 50000 THEN error('broken') ELSE i END AS i FROM range(60000) t(i)"
    assert "broken" in error_of("query", small, query, "-o", file)
    assert [(left.name, left.read_text()) for left in tmp_path.iterdir()] == [("a.csv", "old")]
    (tmp_path / "link.csv").symlink_to(file)
    printed("query", small, "SELECT 1 AS a", "-o", str(tmp_path / "link.csv"))
    assert file.read_text() == "a\n1\n"
    assert (tmp_path / "link.csv").is_symlink()


# Queries


def test_queries_come_from_files_and_stdin(small: Path, tmp_path: Path) -> None:
    file = tmp_path / "count.sql"
    # With a byte order mark, as editors on Windows write it.
    file.write_text("-- how many\nSELECT count(*) AS n FROM heads;\n", encoding="utf-8-sig")
    for arguments in ((str(file),), (f"@{file}",), ("-f", str(file))):
        assert printed("query", small, *arguments, "--format", "csv") == "n\n24\n"
    for arguments in (("-",), ("-f", "-")):
        answer = printed("query", small, *arguments, "--format", "csv", stdin="SELECT 2 AS a")
        assert answer == "a\n2\n"


# Processes


headcount = partial(Command, environment=os.environ, directory=ROOT)
"""Starts a command of headcount."""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", ["query . heads --format csv", "list ."])
def test_a_full_stdout_is_one_line(small: Path, words: str) -> None:
    full = Path("/dev/full")
    ended = Command(*words.split(), environment=os.environ, directory=small, stdout=full).ended()
    assert (ended.code, ended.stderr.count("\n")) == (2, 1)
    line = "error: No space left on device, on the disk or in the file that stdout goes to; "
    assert ended.stderr.startswith(line)


@pytest.mark.parametrize("answer_format", ["table", "json"])
def test_a_reader_may_leave(small: Path, tmp_path: Path, answer_format: str) -> None:
    # More than a pipe holds.
    query = "SELECT i, repeat('x', 50) FROM range(20000) t(i)"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    options = ["--format", answer_format, "--limit", "2000"]
    command = headcount("query", small, query, *options, stdout=pipe)
    with pipe.open("rb") as reader:
        assert reader.read(10)
    assert command.ended() == (0, "", "")


def test_any_encoding_is_written(small: Path) -> None:
    words = ("query", small, "SELECT 'é' AS a, NULL AS b")
    written = io.BytesIO()
    stdout = io.TextIOWrapper(written, encoding="ascii", write_through=True)
    assert ended(*words, stdout_to=stdout) == (0, "", "")
    assert written.getvalue().split() == [b"a", b"b", b"-----", b"\\xe9", b"-"]
    end = ended(*words, "--format", "csv", stdout_to=stdout)
    assert end.stderr.startswith("error: stdout is ascii, which has no '\\xe9'; -o FILE.csv")
    assert end.code == 2


def test_ctrl_c_ends_a_query_in_one_line(small: Path) -> None:
    command = headcount("query", small, ENDLESS)
    process = psutil.Process(command.pid)
    # Opening them takes less, so the query has begun, which has no end.
    while process.cpu_times().user < SECONDS_BEHIND_THE_BEGINNING:
        time.sleep(0.05)
    command.send_signal(signal.SIGINT)
    code, stdout, stderr = command.ended(60)
    assert (stdout, stderr.count("\n"), code) == ("", 1, 130)
    assert stderr.startswith("stopped")


def test_markdown_is_a_table_that_no_text_can_leave(small: Path, tmp_path: Path) -> None:
    query = (
        "SELECT 'a|b' AS \"n|m\", '<script>' AS s, 0.1::FLOAT AS x, NULL AS y, [1, NULL] AS l, "
        "'two' || chr(10) || 'lines' AS t"
    )
    path = tmp_path / "answer.md"
    printed("query", small, query, "-o", str(path))
    assert path.read_text().splitlines() == [
        "| n\\|m | s | x | y | l | t |",
        "|---|---|---:|---|---|---|",
        "| a\\|b | \\<script\\> | 0.1 | – | \\[1, null\\] | two\\\\nlines |",
    ]
