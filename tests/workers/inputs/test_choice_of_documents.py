"""Files of every ending, names of fields, and which documents of a corpus are taken in which order.
Everything is compared with documents that the test chooses itself.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from headcount.schemas.errors import ScanError
from headcount.workers.inputs import find_input
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.model.files.model_info import ModelInfo
from tests.toys.toy_corpora import (
    LENGTH,
    Row,
    all_origins,
    all_tokens,
    as_json,
    byte_info,
    cut,
    documents,
    open_corpus,
    plain_bytes,
    problem_of,
    problems,
    write_jsonl,
    write_lines,
    write_parquet,
)  # fmt: skip
from tests.toys.toy_models import BYTE_BOS

ROWS = documents(8, 3, 20, 1, 7, 8, 9, 30)
MARK = b"\xef\xbb\xbf"


@pytest.fixture(scope="session")
def info(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return byte_info(tmp_path_factory.mktemp("bytes"))


def as_array() -> bytes:
    return json.dumps([json.loads(line) for line in as_json(ROWS)], indent=1).encode()


def as_csv() -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(
        [("text", "dataset"), *((document_text, name or "") for document_text, name in ROWS)]
    )
    return text.getvalue().encode()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("mark", [b"", MARK])
@pytest.mark.parametrize(
    ("name", "family", "content"),
    [
        ("a.jsonl", "pile", plain_bytes(ROWS)),
        ("a.json", "pile", plain_bytes(ROWS)),
        ("a.json", "pile", as_array()),
        ("a.csv", "csv_texts", as_csv()),
        ("a.csv", "repeated_text", as_csv()),
    ],
)
def test_a_file_reads_the_same_whatever_its_form(
    tmp_path: Path,
    info: ModelInfo,
    packer: str,
    mark: bytes,
    name: str,
    family: str,
    content: bytes,
):
    path = tmp_path / f"{name}{packer}"
    path.write_bytes(PACKERS[packer](mark + content))
    chunk = {"chunk": LENGTH} if family == "repeated_text" else {}
    options = {"family": family, "files": str(path), "packing": "concat", **chunk}
    sequences = open_corpus(info, path, input=options)
    assert all_tokens(sequences) == cut([ROWS], "concat")
    assert sequences.fates is not None
    assert sequences.fates.all == {"used": len(ROWS)}
    # And from the middle, as a run that goes on reads it.
    fresh_sequences = Sequences(
        sequences.scan.model_copy(update={"sequences_per_shard": 2}), info, sequences.index
    )
    assert fresh_sequences.shard(2).tokens.tolist() == cut([ROWS], "concat")[4:6]
    assert all_origins(fresh_sequences) == all_origins(sequences)
    assert set(all_origins(sequences)["pile_set_name"]) == {None, "ArXiv", "Pile-CC"}


@pytest.mark.parametrize("packer", PACKERS)
def test_a_text_file_may_be_packed_and_begin_with_a_mark(
    tmp_path: Path, info: ModelInfo, packer: str
):
    path = tmp_path / f"a.txt{packer}"
    path.write_bytes(PACKERS[packer](MARK + b"abcdefgh"))
    assert all_tokens(open_corpus(info, path, family="text", text_field="body")) == [
        list(b"abcdef")
    ]


def test_a_truncated_gz_file_is_named(tmp_path: Path, info: ModelInfo):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(plain_bytes(ROWS))[:-12])
    assert problem_of(info, path).startswith(f"{path}: cannot be read (")


# Names of fields


@pytest.mark.parametrize(
    ("line", "text_field"),
    [
        ('{"content": "abcdefgh"}', "content"),
        ('{"body": {"plain": "abcdefgh"}}', "body.plain"),
        ('{"body": "{\\"plain\\": \\"abcdefgh\\"}"}', "body.plain"),
        ('{"body.plain": "abcdefgh", "body": {"plain": 3}}', "body.plain"),
    ],
)
def test_the_text_may_have_another_name(
    tmp_path: Path, info: ModelInfo, line: str, text_field: str
):
    path = write_lines(tmp_path / "a.jsonl", [line.encode()])
    assert all_tokens(open_corpus(info, path, text_field=text_field)) == [list(b"abcdef")]


def test_the_text_of_a_parquet_file_may_have_another_name(tmp_path: Path, info: ModelInfo):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1], "body": [{"plain": "abcdefgh"}], "meta": ["{}"]}), path)
    assert all_tokens(open_corpus(info, path, text_field="body.plain")) == [list(b"abcdef")]


def test_the_text_is_not_looked_for_in_meta(tmp_path: Path, info: ModelInfo):
    path = write_lines(tmp_path / "a.jsonl", [b'{"meta": {"text": "abcdefgh"}}'])
    assert problem_of(info, path) == (
        f"input: 1 of 1 documents are bad, more than bad_rows = 0.01: {path}, line 1 (has no field "
        "text; found meta; set input.text_field); mend or remove them, or leave them out: "
        "--set bad_rows=1"
    )


# Which documents

FIELDS = [
    {"text": f"document {i:02} of thirty", "id": i, "lang": "en" if i % 3 else "de",
     "meta": {"pile_set_name": ["Github", "ArXiv", "Pile-CC"][i % 3], "year": 2000 + i % 5}}
    for i in range(30)
]  # fmt: skip


def write_fields(path: Path, form: str) -> Path:
    lines = "".join(f"{json.dumps(fields)}\n" for fields in FIELDS).encode()
    file = path / f"a.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(FIELDS), file, row_group_size=7)
    elif form == "json":
        file.write_bytes(json.dumps(FIELDS).encode())
    else:
        file.write_bytes(PACKERS["" if form == "jsonl" else f".{form.partition('.')[2]}"](lines))
    return file


FORMS = ["jsonl", "jsonl.zst", "jsonl.gz", "json", "parquet"]


def taken(sequences: Sequences) -> list[int]:
    """The numbers of the documents that the sequences come from, read in order."""
    return [int(bytes(ids[9:11])) for ids in all_tokens(sequences)]


def choose(info: ModelInfo, file: Path, **options: Any) -> Sequences:
    fields = ("seed", "sequences", "sequences_per_shard", "bad_rows")
    changes: dict[str, Any] = {name: options.pop(name) for name in fields if name in options}
    full: dict[str, Any] = {"family": "pile", "files": str(file), **options}
    return open_corpus(info, file, n_ctx=20, input=full, **changes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"pile_set_name": "Github"}, [i for i in range(30) if i % 3 == 0]),
        ({"meta.pile_set_name": ["Github", "ArXiv"]}, [i for i in range(30) if i % 3 < 2]),
        ({"meta": {"year": 2003}}, [i for i in range(30) if i % 5 == 3]),
        ({"year": ["2003", 2004.0], "lang": "de"}, [3, 9, 18, 24]),
        ({"id": 7}, [7]),
    ],
)
def test_documents_are_taken_by_their_fields(
    tmp_path: Path, info: ModelInfo, form: str, where: dict[str, Any], expected: list[int]
):
    sequences = choose(info, write_fields(tmp_path, form), where=where)
    assert taken(sequences) == expected
    assert all_origins(sequences)["row"] == expected
    assert sequences.fates is not None
    other_fates = {} if len(expected) == 30 else {"not asked for": 30 - len(expected)}
    assert sequences.fates.all == {"used": len(expected)} | other_fates


def test_what_no_document_fits_is_refused(tmp_path: Path, info: ModelInfo):
    file = write_fields(tmp_path, "jsonl")
    options = {"family": "pile", "files": str(file), "where": {"pile_set_name": ["github", "x"]}}
    assert problem_of(info, file, input=options) == (
        "input.where: none of 30 documents has pile_set_name = 'github' or 'x'; pile_set_name is "
        "ArXiv (10), Github (10), Pile-CC (10); change input.where"
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("per_shard", [1, 4, 100])
def test_shuffled_documents_have_one_order_however_they_are_sharded(
    tmp_path: Path, info: ModelInfo, form: str, per_shard: int
):
    file = write_fields(tmp_path, form)
    order = taken(choose(info, write_fields(tmp_path, "jsonl"), shuffle=5))
    assert sorted(order) == list(range(30))
    assert order != list(range(30))
    sequences = choose(info, file, shuffle=5, sequences_per_shard=per_shard)
    assert taken(sequences) == order
    assert all_origins(sequences)["row"] == order
    for number in reversed(range(sequences.shards)):
        tokens_of_shard = Sequences(sequences.scan, info, sequences.index).shard(number).tokens
        assert [int(bytes(ids[9:11])) for ids in tokens_of_shard.tolist()] == (
            order[number * per_shard : (number + 1) * per_shard]
        )
    assert taken(choose(info, file, shuffle=5, sequences=7)) == order[:7]
    assert taken(choose(info, file, shuffle=True, seed=5)) == order
    assert taken(choose(info, file, shuffle=6)) != order
    assert taken(choose(info, file, shuffle=False)) == list(range(30))


def test_shuffled_documents_of_several_files_are_joined_in_their_order(
    tmp_path: Path, info: ModelInfo
):
    files = [documents(3, 6, 20, 1, 5), documents(40, first=5), documents(7, 4, 6, first=6)]
    for i, rows in enumerate(files):
        write_jsonl(tmp_path / f"{i}.jsonl", rows)
    options = {"family": "pile", "files": str(tmp_path / "*.jsonl"), "packing": "concat"}
    sequences = open_corpus(info, tmp_path, input=options | {"shuffle": 1}, sequences_per_shard=3)
    block = sequences.reader.block(0)
    source, row = block.source.tolist(), block.row.tolist()
    assert sorted(zip(source, row, strict=True)) == [
        (file_number, row_number)
        for file_number, n_rows in enumerate((5, 1, 3))
        for row_number in range(n_rows)
    ]
    joined: list[Row] = [
        files[file_number][row_number] for file_number, row_number in zip(source, row, strict=True)
    ]
    assert all_tokens(sequences) == cut([joined], "concat")


@pytest.mark.parametrize("form", FORMS)
def test_skipped_documents_are_the_first_of_those_taken(tmp_path: Path, info: ModelInfo, form: str):
    file = write_fields(tmp_path, form)
    assert taken(choose(info, file, skip=4)) == list(range(4, 30))
    github = {"pile_set_name": "Github"}
    assert taken(choose(info, file, skip=4, where=github)) == list(range(12, 30, 3))
    skipped_and_chosen = choose(info, file, skip=4, shuffle=2, where=github)
    assert taken(skipped_and_chosen) == taken(choose(info, file, shuffle=2, where=github))[4:]
    assert skipped_and_chosen.fates is not None
    assert skipped_and_chosen.fates.parts["Github"] == {"used": 6, "skipped": 4}
    first = choose(info, file, shuffle=2, sequences=10)
    without_first_ten = choose(info, file, shuffle=2, skip=10)
    assert sorted(taken(first) + taken(without_first_ten)) == list(range(30))


def test_bad_rows_keep_their_problem_in_another_order(tmp_path: Path, info: ModelInfo):
    lines = [json.dumps(fields).encode() for fields in FIELDS]
    lines[4] = b"{"
    lines[17] = b'{"text": 3}'
    file = write_lines(tmp_path / "a.jsonl", lines)
    sequences = choose(info, file, shuffle=3, bad_rows=0.1, skip=1)
    assert problems(sequences) == [
        f"{file}, line 5 (invalid JSON)", f"{file}, line 18 (text is int, expected a string)",
    ]  # fmt: skip
    bad = [row for i in range(sequences.shards) for row in sequences.shard(i).bad_rows]
    assert sorted(bad) == [
        f"{file}, line 18 (text is int, expected a string)", f"{file}, line 5 (invalid JSON)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"skip": -1}, "input.skip: expected 0 or more documents, got -1"),
        ({"shuffle": -1}, "input.shuffle: expected true or a seed, 0 or more, got -1"),
        ({"where": {"lang": []}}, "input.where.lang: expected a value or some values, got []"),
        (
            {"columns": ["a b", "A_b"]},
            "input.columns: 'a b' and 'A_b' are both the column doc_a_b; leave out one",
        ),
        (
            {"columns": ["id", "id"]},
            "input.columns: 'id' and 'id' are both the column doc_id; leave out one",
        ),
    ],
)
def test_a_choice_that_means_nothing_is_refused(options: dict[str, Any], line: str):
    with pytest.raises(ScanError) as caught:
        find_input("pile").check({"files": "a.jsonl", **options})
    assert str(caught.value) == line


# Columns that are carried


@pytest.mark.parametrize("form", FORMS)
def test_fields_of_documents_are_carried_as_text(tmp_path: Path, info: ModelInfo, form: str):
    file = write_fields(tmp_path, form)
    columns = ["id", "meta.year", "lang"]
    sequences = choose(info, file, columns=columns, sequences_per_shard=7, shuffle=1)
    origins = all_origins(sequences)
    order = taken(sequences)
    assert origins["doc_id"] == [str(i) for i in order]
    assert origins["doc_meta_year"] == [str(2000 + i % 5) for i in order]
    assert origins["doc_lang"] == ["en" if i % 3 else "de" for i in order]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ('"a"', "a"),
        ("3", "3"),
        ("2.5", "2.5"),
        ("true", "true"),
        ("null", None),
        ('["a", "ä"]', '["a", "ä"]'),
        ('{"b": 1}', '{"b": 1}'),
        ('"\\ud800"', "\\ud800"),
    ],
)
def test_a_field_of_any_type_is_text(tmp_path: Path, info: ModelInfo, value: str, text: str | None):
    lines = [f'{{"text": "abcdefgh", "x": {value}}}', '{"text": "abcdefgh", "x": "there"}']
    path = write_lines(tmp_path / "a.jsonl", [line.encode() for line in lines])
    assert all_origins(open_corpus(info, path, columns=["x"]))["doc_x"] == [text, "there"]


def test_a_column_that_no_document_has_is_refused(tmp_path: Path, info: ModelInfo):
    file = write_fields(tmp_path, "jsonl")
    options = {"family": "pile", "files": str(file), "columns": ["id", "meta.yaer"]}
    assert problem_of(info, file, input=options) == (
        "input.columns: none of 30 documents has a field meta.yaer, nor its meta; leave it out, or "
        "write its name as it is there"
    )


def test_a_joined_sequence_carries_what_its_first_token_belongs_to(tmp_path: Path, info: ModelInfo):
    rows = [{"text": "abc", "n": 0}, {"text": "defg", "n": 1}, {"text": "hijklmn"}]
    path = write_lines(tmp_path / "a.jsonl", [json.dumps(row).encode() for row in rows])
    sequences = open_corpus(info, path, "concat", columns=["n"])
    assert all_origins(sequences)["doc_n"] == ["0", "1"]
    assert all_tokens(sequences)[0] == [*b"abc", BYTE_BOS, *b"de"]


@pytest.mark.parametrize("meta", ["struct", "json"])
def test_a_parquet_file_of_many_row_groups_is_read_in_any_order(
    tmp_path: Path, info: ModelInfo, meta: str
):
    rows = documents(*[8] * 1000)
    path = write_parquet(tmp_path / "a.parquet", rows, meta, row_group_size=100)
    sequences = open_corpus(info, path, sequences_per_shard=10)
    shards = [sequences.shard(i).tokens.tolist() for i in (99, 50, 51, 3)]
    expected = cut([rows], "document")
    assert shards == [expected[10 * i : 10 * i + 10] for i in (99, 50, 51, 3)]
