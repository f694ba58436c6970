"""Corpora that cannot be read as they are, and choices that no document fits: one line each, which
names what was found and the way on.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GOOD = (
    b'{"text": "To be, or not to be", "id": 1, "meta": {"pile_set_name": "Plays", "year": 1600}}\n'
)
BAD = b"{\n"
BOOK = b'{"id": 1, "body": "To be, or not to be"}\n'
ENDINGS = (
    "expected a file that ends in .jsonl, .json, .parquet; those of text may also be "
    "packed (.zst, .gz)"
)

CASES: list[tuple[str, dict[str, bytes], dict[str, Any], str]] = [
    (
        "no field of the name of the text",
        {"a.jsonl": BOOK * 3},
        {},
        "input: 3 of 3 documents are bad, more than bad_rows = 0.01: TMP/a.jsonl, line 1 (has no "
        "field text; found id, body; set input.text_field), TMP/a.jsonl, line 2 (has no "
        "field text; "
        "found id, body; set input.text_field), TMP/a.jsonl, line 3 (has no field text; found id, "
        "body; set input.text_field); mend or remove them, or leave them out: --set bad_rows=1",
    ),
    (
        "another name of the text",
        {"a.jsonl": GOOD},
        {"text_field": "body"},
        "input: 1 of 1 documents are bad, more than bad_rows = 0.01: TMP/a.jsonl, line 1 (has no "
        "field body; found text, id, meta; set input.text_field); mend or remove them, or leave "
        "them out: --set bad_rows=1",
    ),
    (
        "an empty name of the text",
        {"a.jsonl": GOOD},
        {"text_field": ""},
        "input.text_field: expected a string that is not empty, got ''",
    ),
    (
        "a share of bad rows",
        # Two sequences are wanted, so nothing behind the third document counts.
        {"a.jsonl": GOOD + BAD + GOOD * 30},
        {},
        "input: 1 of 3 documents are bad, more than bad_rows = 0.01: TMP/a.jsonl, line 2 "
        "(invalid JSON); mend or remove them, or leave them out: --set bad_rows=0.334",
    ),
    (
        "bad rows in a row",
        {"a.jsonl": GOOD + BAD * 101},
        {},
        "input: more than 100 documents in a row are bad: TMP/a.jsonl, line 2 (invalid JSON), "
        "TMP/a.jsonl, line 3 (invalid JSON), TMP/a.jsonl, line 4 (invalid JSON) …; mend or remove "
        "them, or leave them out: --set bad_rows_in_a_row=1000",
    ),
    (
        "nothing but empty documents",
        {"a.jsonl": b'{"text": ""}\n' * 5},
        {},
        "input: the corpus holds 0 sequences of 7 tokens of text (document packing), 2 wanted, of "
        "5 documents: 5 empty; lower n_ctx or sequences, or pack with concat",
    ),
    (
        "control characters",
        {"a\x1b[31m.jsonl": b'{"\\u001b]0;x\\u0007": 1}\n'},
        {"files": "TMP/a*"},
        "input: 1 of 1 documents are bad, more than bad_rows = 0.01: TMP/a\\x1b[31m.jsonl, line 1 "
        "(has no field text; found \\x1b]0;x\\x07; set input.text_field); mend or remove them, or "
        "leave them out: --set bad_rows=1",
    ),
    (
        "a part that is not there",
        {"a.jsonl": GOOD * 3},
        {"where": {"pile_set_name": "plays"}},
        "input.where: none of 3 documents has pile_set_name = 'plays'; pile_set_name is Plays (3); "
        "change input.where",
    ),
    (
        "conditions that no document fits together",
        {"a.jsonl": GOOD * 3},
        {"where": {"pile_set_name": "Plays", "year": [1599, 1601]}},
        "input.where: none of 3 documents has pile_set_name = 'Plays' and year = 1599 or 1601; "
        "pile_set_name is Plays (3); change input.where",
    ),
    (
        "a condition without values",
        {"a.jsonl": GOOD},
        {"where": {"year": []}},
        "input.where.year: expected a value or some values, got []",
    ),
    (
        "a condition that is none",
        {"a.jsonl": GOOD},
        {"where": "year = 1600"},
        "input.where: expected a table, got 'year = 1600'",
    ),
    (
        "a column that is not there",
        {"a.jsonl": GOOD * 3},
        {"columns": ["yaer"]},
        "input.columns: none of 2 documents has a field yaer, nor its meta; leave it out, or write "
        "its name as it is there",
    ),
    (
        "a seed below zero",
        {"a.jsonl": GOOD},
        {"shuffle": -3},
        "input.shuffle: expected true or a seed, 0 or more, got -3",
    ),
    (
        "fewer than no documents",
        {"a.jsonl": GOOD},
        {"skip": -3},
        "input.skip: expected 0 or more documents, got -3",
    ),
    (
        "more skipped than there are",
        {"a.jsonl": GOOD * 3},
        {"skip": 3},
        "input: the corpus holds 0 sequences of 7 tokens of text (document packing), 2 wanted, of "
        "3 documents: 3 skipped; lower n_ctx or sequences, or pack with concat",
    ),
    ("a packed file of Parquet", {"a.parquet.gz": b""}, {}, f"TMP/a.parquet.gz: {ENDINGS}"),
    ("a file of no kind", {"a.doc": b""}, {}, f"TMP/a.doc: {ENDINGS}"),
    (
        "a number in the place of JSON",
        {"a.json": b"[3, 4]"},
        {},
        "input: 2 of 2 documents are bad, more than bad_rows = 0.01: TMP/a.json, row 1 (expected a "
        "JSON object, got int), TMP/a.json, row 2 (expected a JSON object, got int); mend "
        "or remove "
        "them, or leave them out: --set bad_rows=1",
    ),
    (
        "half an array",
        {"a.json": b'[{"text": "To be'},
        {},
        "TMP/a.json: not JSON (Unterminated string starting at: line 1 column 11 (char 10)); "
        "expected an array of objects, or an object in each line",
    ),
    (
        "half a packed file",
        {"a.jsonl.gz": gzip.compress(GOOD * 100)[:-9]},
        {},
        "TMP/a.jsonl.gz: cannot be read (Compressed file ended before the end-of-stream marker was "
        "reached); is the file complete?",
    ),
    (
        "a column of another name",
        {"a.csv": b"id,body\n1,To be\n"},
        {"family": "csv_texts"},
        "TMP/a.csv: expected a column text, found id, body; set input.text_field",
    ),
]


@pytest.mark.parametrize(
    ("files", "options", "line"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_a_corpus_is_refused_in_one_line(
    plan_error: Callable[..., list[str]],
    tmp_path: Path,
    files: dict[str, bytes],
    options: dict[str, Any],
    line: str,
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    input_table = {"family": "pile", "files": str(tmp_path / next(iter(files))), **options}
    input_table["files"] = input_table["files"].replace("TMP", str(tmp_path))
    assert [
        problem.removeprefix("TMP/toy.toml: ") for problem in plan_error(input=input_table)
    ] == [line]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("bad_rows=-0.1", "TMP/toy.toml: bad_rows: expected 0 or more, got -0.1"),
        ("bad_rows=1.5", "TMP/toy.toml: bad_rows: expected at most 1, got 1.5"),
        ("bad_rows=nan", "TMP/toy.toml: bad_rows: expected at most 1, got nan"),
        ("bad_rows_in_a_row=0", "TMP/toy.toml: bad_rows_in_a_row: expected 1 or more, got 0"),
    ],
)
def test_limits_that_are_none_are_refused(
    plan_error: Callable[..., list[str]], override: str, line: str
) -> None:
    assert plan_error(override) == [line]


def test_what_is_left_out_is_said(
    command: Callable[..., tuple[int, list[str]]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: Path,
) -> None:
    rows = [json.dumps({"text": "To be, or not", "meta": {"pile_set_name": "a\x1b[31m"}})] * 4
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, "{", '{"text": ""}', '{"text": "To"}']))
    (tmp_path / "toy.toml").write_text(
        f"model = {json.dumps(str(model))}\nn_ctx = 8\nsequences = 'all'\nbad_rows = 0.2\n"
        f"out = {json.dumps(str(tmp_path / 'runs'))}\n"
        f"input = {{ family = 'pile', files = {json.dumps(str(tmp_path / 'a.jsonl'))} }}\n"
    )
    from rich.console import Console

    from headcount.jobs.commands.scan import _documents_table, _print_bad_rows
    from headcount.jobs.plan.plan import make_plan
    from headcount.schemas.scans.scan import load_scan

    plan = make_plan(load_scan(tmp_path / "toy.toml"), "toy")
    assert plan.sequences.fates is not None
    console = Console(width=200)
    console.print(_documents_table(plan.sequences.fates))
    _print_bad_rows(console, plan.bad_rows)
    report_lines = [
        " ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()
    ]
    assert "a\\x1b[31m 4 4 0 0 0" in report_lines
    assert "of no part 3 0 1 1 1" in report_lines
    assert "all 7 4 1 1 1" in report_lines
    assert f"1 bad row left out: {tmp_path}/a.jsonl, line 5 (invalid JSON)" in report_lines
    assert "Lines and rows are counted from 1 here, and from 0 in sequences.row." in report_lines
