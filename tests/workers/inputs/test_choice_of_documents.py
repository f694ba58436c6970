"""Which documents of a corpus are taken in which order, and which of their fields are carried."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headcount.schemas.errors import ScanError
from headcount.workers.inputs import INPUTS
from headcount.workers.inputs.sequences import Sequences
from tests.toys.refusals import refused
from tests.toys.toy_corpora import (
    all_origins,
    all_tokens,
    fates_of,
    open_corpus,
    packed,
    problem_of,
    problems,
    write_lines,
)
from tests.toys.toy_models import BYTE_BOS

FIELDS = [
    {"text": f"document {i:02} of thirty", "id": i, "lang": "en" if i % 3 else "de",
     "meta": {"pile_set_name": ["Github", "ArXiv", "Pile-CC"][i % 3], "year": 2000 + i % 5}}
    for i in range(30)
]  # fmt: skip


def write_fields(folder: Path, form: str = "jsonl") -> Path:
    file = folder / f"a.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(FIELDS), file, row_group_size=7)
    elif form == "json":
        file.write_bytes(json.dumps(FIELDS).encode())
    else:
        lines = "".join(f"{json.dumps(fields)}\n" for fields in FIELDS)
        file.write_bytes(packed(form, lines.encode()))
    return file


def taken(sequences: Sequences) -> list[int]:
    """The numbers of the documents that the sequences come from, read in order."""
    return [int(bytes(ids[9:11])) for ids in all_tokens(sequences)]


choose = partial(open_corpus, n_ctx=20)


@pytest.mark.parametrize("form", ["jsonl", "jsonl.zst", "json", "parquet"])
def test_documents_are_taken_and_carried_by_their_fields(tmp_path: Path, form: str):
    file = write_fields(tmp_path, form)
    for where, expected in [
        ({"pile_set_name": "Github"}, [i for i in range(30) if i % 3 == 0]),
        ({"meta.pile_set_name": ["Github", "ArXiv"]}, [i for i in range(30) if i % 3 < 2]),
        ({"meta": {"year": 2003}}, [i for i in range(30) if i % 5 == 3]),
        ({"year": ["2003", 2004.0], "lang": "de"}, [3, 9, 18, 24]),
    ]:
        sequences = choose(file, where=where)
        assert taken(sequences) == all_origins(sequences)["row"] == expected
        n_used = len(expected)
        assert fates_of(sequences).all == {"used": n_used, "not asked for": 30 - n_used}
    columns = ["id", "meta.year", "lang"]
    sequences = choose(file, columns=columns, sequences_per_shard=7, shuffle=1)
    names = ("doc_id", "doc_meta_year", "doc_lang")
    assert list(zip(*(all_origins(sequences)[name] for name in names), strict=True)) == [
        (str(i), str(2000 + i % 5), "en" if i % 3 else "de") for i in taken(sequences)
    ]


def test_shuffled_documents_have_one_order(tmp_path: Path):
    orders = [
        taken(choose(write_fields(tmp_path, form), shuffle=5, sequences_per_shard=size))
        for form, size in [("jsonl", 100), ("jsonl.gz", 1), ("parquet", 4), ("json", 7)]
    ]
    assert sorted(orders[0]) == list(range(30))
    assert orders == [orders[0]] * 4
    file = write_fields(tmp_path)
    assert taken(choose(file, shuffle=5, sequences=7)) == orders[0][:7]
    assert taken(choose(file, shuffle=True, seed=5)) == orders[0]
    assert taken(choose(file, shuffle=6)) != orders[0]
    # The seed 0 shuffles, too.
    assert taken(choose(file, shuffle=0)) != list(range(30))
    assert taken(choose(file, shuffle=False)) == list(range(30))


def test_bad_rows_keep_their_problem_in_another_order(tmp_path: Path):
    lines = [json.dumps(fields).encode() for fields in FIELDS]
    lines[4] = b"{"
    lines[17] = b'{"text": 3}'
    file = write_lines(tmp_path / "a.jsonl", lines)
    # A row that cannot be read has no fields, and is never skipped or left out.
    options: dict[str, Any] = {"shuffle": 3, "skip": 1, "where": {"lang": ["en", "de"]}}
    sequences = choose(file, bad_rows=0.1, **options)
    expected = [
        f"{file}, line 5 (invalid JSON)",
        f"{file}, line 18 (text is int, expected a string)",
    ]
    assert problems(sequences) == expected
    bad = [row for i in range(sequences.shards) for row in sequences.shard(i).bad_rows]
    assert sorted(bad) == sorted(expected)


@pytest.mark.parametrize("columns", [["a b", "A_b"], ["id", "id"]])
def test_two_fields_are_not_carried_into_one_column(columns: list[str]):
    told = refused(ScanError, INPUTS["pile"].check, {"files": "a.jsonl", "columns": columns})
    first, second = map(repr, columns)
    assert told.startswith(f"input.columns: {first} and {second} are both the column doc_")


def test_a_field_of_any_type_is_carried_as_text(tmp_path: Path):
    values = {
        '"a"': "a", "3": "3", "2.5": "2.5", "true": "true", "null": None,
        '["a", "ä"]': '["a", "ä"]', '{"b": 1}': '{"b": 1}', '"\\ud800"': "\\ud800",
    }  # fmt: skip
    lines = [f'{{"text": "abcdefgh", "x": {value}}}'.encode() for value in values]
    path = write_lines(tmp_path / "a.jsonl", lines)
    origins = all_origins(open_corpus(path, columns=["x"]))
    assert origins["doc_x"] == list(values.values())
    # A number is asked for by its value, and true is no number.
    for asked, expected in [(3.0, [1]), (1, []), (True, [3]), ("a", [0])]:
        options: dict[str, Any] = {"where": {"x": [asked, "none"]}, "skip": 0}
        if expected:
            assert all_origins(open_corpus(path, **options))["row"] == expected
        else:
            assert "none of 8 documents has x" in problem_of(path, **options)


def test_a_joined_sequence_carries_what_its_first_token_belongs_to(tmp_path: Path):
    rows = [{"text": "abc", "n": 0}, {"text": "defg", "n": 1}, {"text": "hijklmn"}]
    path = write_lines(tmp_path / "a.jsonl", [json.dumps(row).encode() for row in rows])
    sequences = open_corpus(path, "concat", columns=["n"])
    assert all_origins(sequences)["doc_n"] == ["0", "1"]
    assert all_tokens(sequences)[0] == [*b"abc", BYTE_BOS, *b"de"]
