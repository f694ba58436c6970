"""Misuse of `query` and `text`: each gets one line that says what was expected and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.toys.toy_runs import Row, write_run

# A question that DuckDB would answer after years.
ENDLESS = (
    "SELECT count(*) FROM range(100000000000) a, range(10000) b WHERE a.range % 7 = b.range % 3"
)
# One value that does not fit into 100 MB.
LARGE = "SELECT list(i ORDER BY hash(i)) FROM range(50000000) t(i)"
EMPTY_QUESTION = (
    "the question is empty: expected the name of a view, or SQL; without a question, "
    "headcount query RUNS lists the views"
)

REFUSED: list[tuple[list[str], str]] = [
    # Questions and files of questions.
    (["query", "RUNS", ""], EMPTY_QUESTION),
    (["query", "RUNS", " \n\t"], EMPTY_QUESTION),
    (["query", "RUNS", "EMPTY.sql"], "EMPTY.sql: is empty; expected one SQL statement"),
    (["query", "RUNS", "none.sql"], "none.sql: cannot be read (No such file or directory)"),
    (["query", "RUNS", "@RUNS"], "RUNS: cannot be read (Is a directory)"),
    (["query", "RUNS", "-f", "LATIN.sql"], "LATIN.sql: expected SQL in UTF-8"),
    (
        ["query", "RUNS", "heads", "-f", "EMPTY.sql"],
        "expected one question, got 'heads' and --file EMPTY.sql",
    ),
    # Formats and output files.
    (
        ["query", "RUNS", "heads", "-o", "a.csv", "--format", "json"],
        "--format json contradicts the name a.csv: leave out --format, or name the file ….json",
    ),
    (
        ["query", "RUNS", "heads", "-o", "a.xlsx"],
        "a.xlsx: expected a name that ends in .csv, .json, .jsonl, .md, .parquet, .txt; or say "
        "--format csv|json|jsonl|markdown|parquet|table",
    ),
    (
        ["query", "RUNS", "heads", "--format", "parquet"],
        "--format parquet writes a file; say which one with -o FILE.parquet",
    ),
    (
        ["query", "RUNS", "heads", "-o", "a.csv", "--vertical"],
        "--vertical is a form of a table, and this is csv; leave out one",
    ),
    (
        ["query", "RUNS", "heads", "-o", "no/such/folder.csv"],
        "no/such/folder.csv: cannot be written (No such file or directory)",
    ),
    (
        ["query", "RUNS", "heads", "-o", "FOLDER.csv"],
        "FOLDER.csv: cannot be written (Is a directory)",
    ),
    (
        ["query", "RUNS", "heads", "-o", "/dev/full", "--format", "csv"],
        "/dev/full: cannot be written (No space left on device)",
    ),
    (
        ["report", "RUNS", "-o", "out.pdf"],
        "out.pdf: expected a name that ends in .html or .htm",
    ),
    (
        ["reproduce", "recency_bias", "--json", "results.csv"],
        "results.csv: expected a name that ends in .json",
    ),
    (
        ["reproduce", "texts", "sink_circuit", "-o", "texts.jsonl"],
        "texts.jsonl: expected a name that ends in .csv",
    ),
    # Time and memory.
    (
        ["query", "RUNS", ENDLESS, "--timeout", "0.5"],
        "stopped after 0.5 s without an answer; --timeout SECONDS waits longer, --timeout 0 as "
        "long as it takes",
    ),
    (
        ["query", "RUNS", LARGE, "--memory", "100MB"],
        "the question needs more memory than it may take, or more disk than is free for what does "
        "not fit; --memory 8GB gives it more, fewer columns or runs need less",
    ),
    (
        ["query", "RUNS", "heads", "--memory", "much"],
        "--memory: expected a size such as 4GB or 50%, got 'much'",
    ),
    (
        ["query", "RUNS", "heads", "--memory", "0GB"],
        "--memory: expected a size such as 4GB or 50%, got '0GB'",
    ),
    (
        ["query", "RUNS", "heads", "--memory", "150%"],
        "--memory: expected a size such as 4GB or 50%, got '150%'",
    ),
    (
        ["query", "RUNS", "heads", "--memory", "1KB"],
        "--memory 1KB: is less than the runs themselves need; try 1GB",
    ),
    # What the runs did not measure.
    (
        ["query", "RUNS", "SELECT value_norm FROM heads"],
        "column 'value_norm' was not measured in these runs; add 'value_norm' to statistics in a "
        "scan, and scan again",
    ),
    (
        ["query", "RUNS", "SELECT mean_loss FROM by_head"],
        "column 'mean_loss' was not measured in these runs; add 'loss' to predictions in a scan, "
        "and scan again",
    ),
    (
        ["query", "RUNS", "sink_values"],
        "view 'sink_values' cannot be answered from these runs: it needs column "
        "'sink_value_norm', which none of them measured; add 'sink_value_norm' to statistics in a "
        "scan, and scan again",
    ),
    (
        ["query", "RUNS", "SELECT ('x' || chr(27))::INT"],
        "Conversion Error: Could not convert string 'x\\x1b' to INT32",
    ),
    # Text of tokens.
    (
        ["query", "RUNS", "heads", "--text"],
        "--text writes the column tokens as text, and the answer has none; select it, for "
        "instance: SELECT run_id, sequence, tokens FROM sequences",
    ),
    (
        ["query", "RUNS", "SELECT tokens FROM sequences", "--text"],
        "--text: these are 2 runs, whose models may read tokens differently; select run_id beside "
        "tokens",
    ),
    (
        ["text", "RUNS", "0"],
        "RUNS: expected one run, got 2; say which directory: run_id=a-1, run_id=b-2",
    ),
    (["text", "RUNS/run_id=a-1", "9"], "run a-1 has no sequence 9; it has 0 to 3"),
    (
        ["text", "RUNS/run_id=a-1", "0", "--head", "5"],
        "--head: expected a layer and a head such as L5H1, got '5'",
    ),
    (
        ["text", "RUNS/run_id=a-1", "0", "--head", "L2H0"],
        "--head L2H0: toy has heads L0H0 to L1H2",
    ),
]

EMPTY_VIEWS = {
    "first_keys": 'profiles = ["tail_attention_by_key"] in the scan',
    "curves": "curves = […] in the scan",
    "profiles": "profiles = […] in the scan",
    "weights": "weight_statistics = […] in the scan",
    "rollups": "merged shards: headcount compact RUN; head_summaries answers without",
    "effects": 'interventions = ["none", "…"] in one scan',
    "by_pile_set": "an input of the family pile whose rows have meta.pile_set_name",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, and files that are no questions."""
    folder = tmp_path_factory.mktemp("questions")

    def sink_mass(row: Row) -> float:
        return 0.5

    write_run(folder / "RUNS", "a-1", {"sink_mass": sink_mass})
    write_run(folder / "RUNS", "b-2", {"sink_mass": sink_mass}, n_ctx=6)
    (folder / "EMPTY.sql").write_text("\n")
    (folder / "LATIN.sql").write_bytes("SELECT 'é'".encode("latin-1"))
    (folder / "FOLDER.csv").mkdir()
    return folder


@pytest.mark.parametrize(("arguments", "line"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_question_is_refused_in_one_line(
    folder: Path,
    command: Callable[..., tuple[int, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    line: str,
) -> None:
    monkeypatch.chdir(folder)
    files_before = sorted(folder.rglob("*"))
    code, (*pointer, error) = command(*arguments)
    assert (code, error) == (2, f"error: {line}")
    # A mistake in SQL is also shown where it stands.
    if pointer:
        sql, carets = pointer
        assert sql in arguments
        assert re.fullmatch(r" *\^+", carets)
    # No half-written file is left.
    assert sorted(folder.rglob("*")) == files_before


@pytest.mark.parametrize("view", EMPTY_VIEWS)
def test_an_empty_view_says_what_fills_it(
    folder: Path,
    command: Callable[..., tuple[int, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    view: str,
) -> None:
    monkeypatch.chdir(folder)
    note = f"note: {view} has no rows in these runs; it needs {EMPTY_VIEWS[view]}"
    # Without HAVING the answer would have a row, which is 0.
    question = f"SELECT count(*) FROM {view} HAVING count(*) > 0"
    assert command("query", "RUNS", question) == (0, [note])
