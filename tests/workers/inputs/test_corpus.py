"""Corpora: every sequence is checked against documents that the test holds itself, tokenised by one
byte per token.
"""

from __future__ import annotations

import csv
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from headcount.schemas.errors import CorpusError, ModelError, ScanError
from headcount.workers.inputs.corpus.documents import Source
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.inputs.store import preparation
from headcount.workers.model.files.model_info import ModelInfo
from tests import PILE_MINI
from tests.toys.toy_corpora import (
    LENGTH,
    Row,
    all_origins,
    all_tokens,
    as_json,
    byte_info,
    cut,
    documents,
    make_index,
    open_corpus,
    plain_bytes,
    problem_of,
    problems,
    write_csv,
    write_jsonl,
    write_lines,
    write_parquet,
    write_zst,
)  # fmt: skip
from tests.toys.toy_models import BYTE_BOS, byte_tokenizer, toy_info, toy_scan


@pytest.fixture(scope="session")
def info(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    """A model that reads bytes; its weights are never asked for."""
    return byte_info(tmp_path_factory.mktemp("bytes"))


THREE_FILES = [
    documents(3, 6, 20, 1, 5),
    documents(40, first=5),
    documents(7, 4, 6, 6, 13, 2, 30, first=6),
]


@pytest.fixture
def three_files(tmp_path: Path) -> list[Path]:
    return [write_jsonl(tmp_path / f"{i:02}.jsonl", rows) for i, rows in enumerate(THREE_FILES)]


@pytest.mark.parametrize("packing", ["document", "concat"])
@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 13, 40])
def test_packing_is_what_the_plain_words_say(
    three_files: list[Path], info: ModelInfo, packing: str, length: int
):
    expected = cut(THREE_FILES, packing, length)
    sequences = open_corpus(info, three_files, packing, n_ctx=length, sequences_per_shard=4)
    assert len(sequences) == len(expected)
    assert all_tokens(sequences) == expected


def test_packing_counts_by_hand(three_files: list[Path], info: ModelInfo):
    # Documents of at least 6 bytes: 6, 20 | 40 | 7, 6, 6, 13, 30. Bytes and ends of text: 40 | 41 |
    # 75.
    assert len(open_corpus(info, three_files, "document")) == 2 + 1 + 5
    assert len(open_corpus(info, three_files, "concat")) == 6 + 6 + 12


@pytest.mark.parametrize("packing", ["document", "concat"])
def test_bos_is_put_before_the_text(three_files: list[Path], info: ModelInfo, packing: str):
    sequences = open_corpus(info, three_files, packing, n_ctx=LENGTH + 1, bos=True)
    assert all_tokens(sequences) == [[BYTE_BOS, *ids] for ids in cut(THREE_FILES, packing)]


@pytest.mark.parametrize("packing", ["document", "concat"])
@pytest.mark.parametrize("per_shard", [1, 3, 5, 1000])
def test_shards_of_any_size_hold_the_same_sequences(
    three_files: list[Path], info: ModelInfo, packing: str, per_shard: int
):
    assert all_tokens(
        open_corpus(info, three_files, packing, sequences_per_shard=per_shard)
    ) == cut(THREE_FILES, packing)


@pytest.mark.parametrize("packing", ["document", "concat"])
def test_shards_read_in_any_order_or_alone_give_the_same_sequences(
    three_files: list[Path], info: ModelInfo, packing: str
):
    expected = cut(THREE_FILES, packing)
    sequences = open_corpus(info, three_files, packing, sequences_per_shard=2)
    for number in [*reversed(range(sequences.shards)), 1, 0, 2, 2]:
        assert sequences.shard(number).tokens.tolist() == expected[2 * number : 2 * number + 2]
    for number in range(sequences.shards):
        fresh_sequences = Sequences(sequences.scan, info, sequences.index)
        assert (
            fresh_sequences.shard(number).tokens.tolist() == expected[2 * number : 2 * number + 2]
        )


@pytest.mark.parametrize("packing", ["document", "concat"])
def test_the_origin_leads_back_to_the_tokens(
    three_files: list[Path], info: ModelInfo, packing: str
):
    sequences = open_corpus(info, three_files, packing, sequences_per_shard=3)
    origins = all_origins(sequences)
    rows = {str(path): rows for path, rows in zip(three_files, THREE_FILES, strict=True)}
    for i, ids in enumerate(all_tokens(sequences)):
        file, row, offset = (origins[key][i] for key in ("file", "row", "offset"))
        rows_from_here = rows[file][row:]
        joined = [token for text, _ in rows_from_here for token in [*text.encode(), BYTE_BOS]]
        assert joined[offset : offset + LENGTH] == ids
        assert offset <= len(rows_from_here[0][0].encode())
        assert origins["pile_set_name"][i] == rows_from_here[0][1]


def test_the_origin_by_hand(three_files: list[Path], info: ModelInfo):
    origins = all_origins(open_corpus(info, three_files[:1], "concat"))
    # The documents begin at 0, 4, 11, 32, 34 of 40 tokens.
    assert origins["row"] == [0, 1, 2, 2, 2, 2]
    assert origins["offset"] == [0, 2, 1, 7, 13, 19]
    assert origins["pile_set_name"] == [None, "ArXiv", *["Pile-CC"] * 4]


def test_a_sequence_that_begins_with_a_document_comes_from_it(tmp_path: Path, info: ModelInfo):
    # Five bytes and the end of text fill a sequence; the row between them is bad.
    first, second, third = (line.encode() for line in as_json(documents(5, 5, 5)))
    path = write_lines(tmp_path / "a.jsonl", [first, second, b"{", third, *[third] * 100])
    origins = all_origins(open_corpus(info, path, "concat"))
    assert origins["row"] == [0, 1, *range(3, 104)]
    assert origins["offset"] == [0] * 103


@pytest.mark.parametrize("packing", ["document", "concat"])
@pytest.mark.parametrize("wanted", [1, 2, 3, 7, 8])
def test_the_first_sequences_are_those_of_all(
    three_files: list[Path], info: ModelInfo, packing: str, wanted: int
):
    sequences = open_corpus(info, three_files, packing, sequences=wanted)
    assert len(sequences) == wanted
    assert all_tokens(sequences) == cut(THREE_FILES, packing)[:wanted]


@pytest.mark.parametrize("packing", ["document", "concat"])
def test_indexing_stops_when_there_is_enough(
    tmp_path: Path, info: ModelInfo, packing: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(preparation, "PIECE_DOCUMENTS", 100)
    rows = documents(*[9] * 2000)
    first, second = (
        write_jsonl(tmp_path / "0.jsonl", rows),
        write_jsonl(tmp_path / "1.jsonl", documents(9)),
    )
    sequences = open_corpus(info, [first, second], packing, sequences=600)
    assert sequences.index is not None
    # Tokens are needed up to document 600, or up to token 3,600 of 10 a document.
    assert len(sequences.index.pieces) == {"document": 6, "concat": 4}[packing]
    assert all_tokens(sequences) == cut([rows], packing)[:600]


# Formats


ROWS = documents(3, 6, 20, 1, 5, 8, 9, 30)


def test_a_zst_file_of_one_frame_or_many_reads_like_the_plain_file(tmp_path: Path, info: ModelInfo):
    content = plain_bytes(ROWS)
    one_frame = write_zst(tmp_path / "one.jsonl.zst", content)
    # Frames may end inside a line, inside a character, and hold nothing.
    places = [0, 1, 30, 30, content.rindex("ä".encode()) + 1, len(content)]
    many_frames = write_zst(
        tmp_path / "many.jsonl.zst", *(content[start:stop] for start, stop in pairwise(places))
    )
    for path in (one_frame, many_frames):
        assert all_tokens(open_corpus(info, path, "concat")) == cut([ROWS], "concat")


def test_a_zst_file_longer_than_its_reading_buffer(tmp_path: Path, info: ModelInfo):
    noise = np.random.default_rng(0).integers(97, 123, size=(40, 30_000)).astype(np.uint8)
    rows: list[Row] = [(line.tobytes().decode(), None) for line in noise]
    path = write_zst(tmp_path / "long.jsonl.zst", plain_bytes(rows[:25]), plain_bytes(rows[25:]))
    assert path.stat().st_size > 2 << 18
    assert all_tokens(open_corpus(info, path)) == cut([rows], "document")


@pytest.mark.parametrize("options", [{}, {"row_group_size": 3}, {"compression": "zstd"}])
@pytest.mark.parametrize(("meta", "named"), [("struct", True), ("json", True), ("absent", False)])
def test_a_parquet_file_reads_like_the_plain_file(
    tmp_path: Path, info: ModelInfo, meta: str, named: bool, options: dict[str, Any]
):
    path = write_parquet(tmp_path / "rows.parquet", ROWS, meta, **options)
    sequences = open_corpus(info, path)
    assert all_tokens(sequences) == cut([ROWS], "document")
    origins = all_origins(sequences)
    long = [i for i, (text, _) in enumerate(ROWS) if len(text.encode()) >= LENGTH]
    assert origins["row"] == long
    assert origins["pile_set_name"] == [ROWS[i][1] if named else None for i in long]


def test_rows_are_counted_across_the_batches_of_a_parquet_file(tmp_path: Path, info: ModelInfo):
    path = write_parquet(tmp_path / "rows.parquet", documents(*[7] * 600))
    assert all_origins(open_corpus(info, path))["row"] == list(range(600))


@pytest.mark.parametrize("packing", ["document", "concat"])
def test_a_text_file_is_one_document(tmp_path: Path, info: ModelInfo, packing: str):
    texts = ["To be, or not to be\r\n\r\nthat is", "the question", "short"]
    for name, text in zip("abc", texts, strict=True):
        (tmp_path / name).write_bytes(text.encode())
    sequences = open_corpus(info, tmp_path / "*", packing, family="text")
    assert all_tokens(sequences) == cut([[(text, None)] for text in texts], packing)
    assert set(all_origins(sequences)["row"]) == {0}


@pytest.mark.parametrize("packing", ["document", "concat"])
def test_a_local_data_set_reads_like_its_files(tmp_path: Path, info: ModelInfo, packing: str):
    for i, rows in enumerate(THREE_FILES):
        lines = [json.dumps({"text": text, "meta": {"pile_set_name": name}}) for text, name in rows]
        (tmp_path / f"{i}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    fields = {"bos": False, "n_ctx": LENGTH, "sequences": "all", "sequences_per_shard": 3}
    options = {"family": "pile", "dataset": str(tmp_path), "packing": packing}
    sequences = Sequences(toy_scan(**fields, input=options), info)
    make_index(sequences)
    assert all_tokens(sequences) == cut(THREE_FILES, packing)
    assert sequences.shard(1).tokens.tolist() == cut(THREE_FILES, packing)[3:6]
    origins = all_origins(sequences)
    assert sorted(set(origins["file"])) == [f"{tmp_path}#{part}" for part in range(3)]
    for file, row, ids in zip(origins["file"], origins["row"], all_tokens(sequences), strict=True):
        text, _ = THREE_FILES[int(file[-1])][row]
        assert packing == "concat" or list(text.encode())[:LENGTH] == ids


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"text": "abcdefgh"}\n{"text": \n', "cannot be read"),
        (b'{"body": "abcdefgh"}\n', "expected a column text, found body; set input.text_field"),
    ],
)
def test_a_local_data_set_that_is_broken_is_one_line(
    tmp_path: Path, info: ModelInfo, content: bytes, reason: str
):
    (tmp_path / "0.jsonl").write_bytes(content)
    with pytest.raises(CorpusError) as caught:
        open_data_set(info, str(tmp_path))
    assert str(caught.value).startswith(f"data set '{tmp_path}'")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_data_set_that_is_not_there_is_one_line(tmp_path: Path, info: ModelInfo):
    with pytest.raises(CorpusError) as caught:
        open_data_set(info, str(tmp_path / "absent"))
    assert str(caught.value).startswith(
        f"data set '{tmp_path / 'absent'}', split 'train': cannot be opened ("
    )
    assert "\n" not in str(caught.value)


def open_data_set(info: ModelInfo, dataset: str) -> Sequences:
    fields = {
        "bos": False,
        "n_ctx": LENGTH,
        "sequences": "all",
        "input": {"family": "pile", "dataset": dataset},
    }
    sequences = Sequences(toy_scan(**fields), info)
    make_index(sequences)
    return sequences


def test_special_tokens_written_in_a_text_are_text(tmp_path: Path, info: ModelInfo):
    rows: list[Row] = [("a<|endoftext|>b", None)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert all_tokens(open_corpus(info, path, n_ctx=15)) == [list(b"a<|endoftext|>b")]


def test_the_mini_pile_reads_whole(info: ModelInfo):
    if not PILE_MINI.is_dir():
        pytest.skip("shared/data/pile-mini is not there")
    sequences = open_corpus(info, PILE_MINI / "0*.jsonl.zst", n_ctx=256, sequences=300)
    origins = all_origins(sequences)
    assert len(origins["row"]) == 300
    assert None not in origins["pile_set_name"]
    content = zstandard.ZstdDecompressor().stream_reader(
        (PILE_MINI / "00.jsonl.zst").read_bytes(), read_across_frames=True
    )
    lines = content.read().splitlines()
    for file, row, ids in zip(origins["file"], origins["row"], all_tokens(sequences), strict=True):
        if file.endswith("00.jsonl.zst"):
            assert list(json.loads(lines[row])["text"].encode())[:256] == ids


# Which files


def test_files_come_in_the_order_of_their_names_whatever_the_order_asked(
    tmp_path: Path, info: ModelInfo
):
    for folder, name in [("b", "0"), ("a", "2"), ("a", "1"), ("b", "10")]:
        (tmp_path / folder).mkdir(exist_ok=True)
        write_jsonl(tmp_path / folder / f"{name}.jsonl", [(f"{name} and more", folder)])
    for files in (["b/*", "a/*"], ["a/1*", "b/10*", "a/2*", "b/0*"], ["**/*.jsonl"]):
        origins = all_origins(open_corpus(info, [tmp_path / file for file in files]))
        assert [Path(file).relative_to(tmp_path).as_posix() for file in origins["file"]] == [
            "b/0.jsonl", "a/1.jsonl", "b/10.jsonl", "a/2.jsonl",
        ]  # fmt: skip


def test_each_file_is_read_once_however_often_it_is_named(
    tmp_path: Path, info: ModelInfo, monkeypatch: pytest.MonkeyPatch
):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "b.jsonl").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    files = [str(path), "a.jsonl", "./a.jsonl", "*.jsonl", f"../{tmp_path.name}/a.jsonl"]
    assert all_tokens(open_corpus(info, files)) == cut([ROWS], "document")


def test_a_name_with_brackets_is_a_name_where_such_a_file_is(tmp_path: Path, info: ModelInfo):
    path = write_jsonl(tmp_path / "a[1].jsonl", ROWS)
    assert all_tokens(open_corpus(info, path)) == cut([ROWS], "document")


def test_the_record_does_not_depend_on_the_directory(tmp_path: Path, info: ModelInfo):
    records = []
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        corpus = open_corpus(info, write_jsonl(tmp_path / folder / "a.jsonl", ROWS)).corpus
        assert corpus is not None
        records.append(corpus.record)
    assert records[0] == records[1]
    assert records[0]["sources"][0]["path"] == "a.jsonl"


# Lines


def test_line_ends_blank_lines_and_a_missing_last_line_end_change_nothing(
    tmp_path: Path, info: ModelInfo
):
    lines = as_json(ROWS)
    variants = {
        "crlf": "\r\n".join([*lines, ""]),
        "open": "\n".join(lines),
        "blank": "\n\n" + "\n  \n\r\n".join(lines) + "\n\n",
        "mark": "\ufeff" + "\n".join(lines),
    }
    for name, content in variants.items():
        plain_file = tmp_path / f"{name}.jsonl"
        plain_file.write_bytes(content.encode())
        for path in (plain_file, write_zst(tmp_path / f"{name}.jsonl.zst", content.encode())):
            sequences = open_corpus(info, path, "concat")
            assert all_tokens(sequences) == cut([ROWS], "concat"), name
            assert problems(sequences) == []


def test_rows_are_lines_blank_ones_included(tmp_path: Path, info: ModelInfo):
    first, second = as_json(documents(6, 7))
    path = write_lines(tmp_path / "a.jsonl", [b"", first.encode(), b"", b"", second.encode()])
    assert all_origins(open_corpus(info, path))["row"] == [1, 4]


def test_a_line_of_two_megabytes(tmp_path: Path, info: ModelInfo):
    long = "0123456789" * 200_000
    rows: list[Row] = [("before it", None), (long, None), ("behind it", None)]
    for path in (
        write_jsonl(tmp_path / "a.jsonl", rows),
        write_zst(tmp_path / "a.jsonl.zst", plain_bytes(rows)),
    ):
        assert [document.text for document in Source("jsonl", str(path), 0).documents()] == [
            text for text, _ in rows
        ]
    sequences = open_corpus(
        info, tmp_path / "a.jsonl.zst", "concat", n_ctx=1000, sequences_per_shard=500
    )
    # 9 + 1, 2,000,000 + 1 and 9 + 1 tokens.
    assert len(sequences) == 2000
    assert sequences.shard(0).tokens[0].tolist() == [*b"before it", BYTE_BOS, *long[:990].encode()]
    assert sequences.shard(3).tokens[-1].tolist() == list(long[1_998_990:1_999_990].encode())


# Bad rows

BAD_LINES = [
    (b"{", "invalid JSON"),
    (b'{"text": "abc"', "invalid JSON"),
    (b"\x00", "invalid JSON"),
    (b"[" * 100_000, "invalid JSON"),
    (b"[1, 2]", "expected a JSON object, got list"),
    (b'"text"', "expected a JSON object, got str"),
    (b"null", "expected a JSON object, got NoneType"),
    (b"{}", "has no field text; found nothing; set input.text_field"),
    (b'{"id": 1, "body": "b"}', "has no field text; found id, body; set input.text_field"),
    (b'{"text": null}', "text is null, expected a string"),
    (b'{"text": 3}', "text is int, expected a string"),
    (b'{"text": ["abcdefgh"]}', "text is list, expected a string"),
    (b'{"text": "abc\xff\xfedefgh"}', "not UTF-8"),
    (b'{"text": "abc\\ud800defgh"}', "text has lone surrogates, which are not UTF-8"),
]


@pytest.mark.parametrize(("line", "problem"), BAD_LINES)
@pytest.mark.parametrize("packing", ["document", "concat"])
def test_a_bad_row_is_named_and_left_out(
    tmp_path: Path, info: ModelInfo, packing: str, line: bytes, problem: str
):
    rows = documents(*[8] * 120)
    good = [line.encode() for line in as_json(rows)]
    path = write_lines(tmp_path / "a.jsonl", [*good[:50], line, *good[50:]])
    sequences = open_corpus(info, path, packing)
    assert problems(sequences) == [f"{path}, line 51 ({problem})"]
    assert all_tokens(sequences) == cut([rows], packing)
    assert sequences.shard(0).bad_rows == [f"{path}, line 51 ({problem})"]


def test_a_row_is_bad_in_one_shard_alone(tmp_path: Path, info: ModelInfo):
    good = [line.encode() for line in as_json(documents(*[8] * 300))]
    path = write_lines(tmp_path / "a.jsonl", [*good[:100], b"{", *good[100:299], b"{}", good[299]])
    sequences = open_corpus(info, path, sequences_per_shard=100)
    bad = [sequences.shard(i).bad_rows for i in range(3)]
    assert bad == [
        [f"{path}, line 101 (invalid JSON)"],
        [],
        [f"{path}, line 301 (has no field text; found nothing; set input.text_field)"],
    ]


@pytest.mark.parametrize(
    ("good", "bad", "share", "advice"),
    [
        (99, 1, 0.01, None),
        (98, 1, 0.01, "0.011"),
        (198, 2, 0.01, None),
        (197, 2, 0.01, "0.011"),
        (3, 1, 0.25, None),
        (3, 1, 0.24, "0.25"),
        (99, 1, 0.0, "0.01"),
    ],
)
def test_a_corpus_with_too_large_a_share_of_bad_rows_is_refused(
    tmp_path: Path, info: ModelInfo, good: int, bad: int, share: float, advice: str | None
):
    rows = documents(*[8] * good)
    path = write_lines(
        tmp_path / "a.jsonl", [*[b"{"] * bad, *(line.encode() for line in as_json(rows))]
    )
    # However few sequences a shard has: the share is that of the corpus.
    changes: dict[str, Any] = {"bad_rows": share, "sequences_per_shard": 2}
    if advice is None:
        assert all_tokens(open_corpus(info, path, **changes)) == cut([rows], "document")
        return
    bad_places = ", ".join(f"{path}, line {i + 1} (invalid JSON)" for i in range(bad))
    assert problem_of(info, path, **changes) == (
        f"input: {bad} of {good + bad} documents are bad, more than bad_rows = {share:g}: "
        f"{bad_places}; mend or remove them, or leave them out: --set bad_rows={advice}"
    )


def test_too_many_bad_rows_in_a_row_end_the_reading(
    tmp_path: Path, info: ModelInfo, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(preparation, "PIECE_DOCUMENTS", 100)
    good = [line.encode() for line in as_json(documents(*[8] * 3000))]
    path = write_lines(tmp_path / "a.jsonl", [*good[:10], *[b"{"] * 6, *good[10:]])
    bad_places = ", ".join(f"{path}, line {i} (invalid JSON)" for i in (11, 12, 13))
    assert problem_of(info, path, bad_rows_in_a_row=5) == (
        f"input: more than 5 documents in a row are bad: {bad_places} …; mend or remove them, or "
        "leave them out: --set bad_rows_in_a_row=50"
    )
    sequences = open_corpus(info, path, bad_rows_in_a_row=6)
    assert len(sequences) == 3000
    fields = {"sequences": "all", "input": {"family": "pile", "files": str(path)}}
    stopped = Sequences(toy_scan(bos=False, n_ctx=LENGTH, bad_rows_in_a_row=5, **fields), info)
    make_index(stopped)
    assert stopped.index is not None
    assert stopped.index.documents == 100


def test_a_shard_names_the_bad_rows_that_it_spans(tmp_path: Path, info: ModelInfo):
    good = [line.encode() for line in as_json(documents(*[8] * 300))]
    path = write_lines(tmp_path / "a.jsonl", [*good[:150], *[b"{"] * 3, *good[150:]])
    sequences = open_corpus(info, path, sequences_per_shard=100)
    assert [len(sequences.shard(i).bad_rows) for i in range(3)] == [0, 3, 0]
    assert all_tokens(sequences) == cut([documents(*[8] * 300)], "document")


# Empty documents


@pytest.mark.parametrize("packing", ["document", "concat"])
def test_empty_documents_are_left_out_and_are_not_bad(
    tmp_path: Path, info: ModelInfo, packing: str
):
    rows = documents(8, 9, 7)
    lines = [line.encode() for line in as_json(rows)]
    empty = b'{"text": ""}'
    path = write_lines(tmp_path / "a.jsonl", [empty, lines[0], empty, empty, *lines[1:], empty])
    sequences = open_corpus(info, path, packing)
    assert all_tokens(sequences) == cut([rows], packing)
    assert problems(sequences) == []
    assert [shard.bad_rows for shard in map(sequences.shard, range(sequences.shards))] == [
        [] for _ in range(sequences.shards)
    ]
    assert sequences.fates is not None
    assert sequences.fates.all == {"used": 3, "empty": 4}
    assert all_origins(sequences)["row"][0] == 1


def test_text_that_the_tokenizer_drops_is_empty(tmp_path: Path):
    path = byte_tokenizer(tmp_path)
    content = json.loads((path / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    (path / "tokenizer.json").write_text(json.dumps(content))
    info = toy_info(path=str(path), n_ctx=64, d_vocab=257, bos_token_id=256, eos_token_id=256)
    rows: list[Row] = [("abcdefgh", None), ("  \n ", None), ("ijklmnop", None)]
    sequences = open_corpus(info, write_jsonl(tmp_path / "a.jsonl", rows), "concat")
    assert all_tokens(sequences) == cut([[rows[0], rows[2]]], "concat")
    assert sequences.fates is not None
    assert sequences.fates.all == {"used": 2, "empty": 1}


# What became of the documents


def test_every_document_has_one_fate_and_the_parts_add_up(tmp_path: Path, info: ModelInfo):
    # Parts by document: none, ArXiv, Pile-CC, none, …
    rows = documents(8, 3, 8, 2, 9, 8, 8, 4, 5)
    lines = [line.encode() for line in as_json(rows)]
    lines[4:4] = [b"{", b'{"text": "", "meta": {"pile_set_name": "ArXiv"}}']
    path = write_lines(tmp_path / "a.jsonl", lines)
    sequences = open_corpus(info, path, sequences=3, bad_rows=0.2)
    assert sequences.fates is not None
    assert sequences.fates.parts == {
        "": {"used": 1, "too short": 1, "bad": 1},
        "ArXiv": {"used": 1, "too short": 1, "empty": 1},
        "Pile-CC": {"used": 1},
    }
    # Documents behind the last sequence do not count.
    assert sequences.fates.all == {"used": 3, "too short": 2, "bad": 1, "empty": 1}
    everything = open_corpus(info, path, bad_rows=0.2).fates
    assert everything is not None
    assert everything.all == {"used": 5, "too short": 4, "bad": 1, "empty": 1}
    assert sum(everything.all.values()) == len(lines)


def test_joined_documents_are_used_or_not_needed(tmp_path: Path, info: ModelInfo):
    path = write_jsonl(tmp_path / "a.jsonl", documents(3, 1, 4, 8, 8))
    sequences = open_corpus(info, path, "concat", sequences=2)
    assert sequences.fates is not None
    # 3 + 1, 1 + 1 are the first six tokens, 4 + 1 and one of the fourth document the next.
    assert sequences.fates.all == {"used": 4}
    everything = open_corpus(info, path, "concat", n_ctx=14).fates
    assert everything is not None
    # One sequence of 14 of 29 tokens ends in the fourth document, two in the last.
    assert everything.all == {"used": 5}
    longer = open_corpus(info, path, "concat", n_ctx=20).fates
    assert longer is not None
    assert longer.all == {"used": 4, "not needed": 1}


def test_small_parts_are_counted_together(tmp_path: Path, info: ModelInfo):
    rows: list[Row] = [("abcdefgh", f"part {i % 60:02}") for i in range(100)]
    sequences = open_corpus(info, write_jsonl(tmp_path / "a.jsonl", rows))
    assert sequences.fates is not None
    assert len(sequences.fates.parts) == 51
    assert sequences.fates.parts["10 other parts"] == {"used": 10}
    assert sequences.fates.parts["part 00"] == {"used": 2}


@pytest.mark.parametrize(
    ("meta", "name"),
    [
        ("null", None),
        ("3", None),
        ('["ArXiv"]', None),
        ('"ArXiv"', None),
        ('"{\\"pile_set_name\\": \\"ArXiv\\"}"', "ArXiv"),
        ('"[]"', None),
        ("{}", None),
        ('{"pile_set_name": 3}', None),
        ('{"pile_set_name": null}', None),
        ('{"pile_set_name": "\\ud800"}', None),
        ('{"pile_set_name": "ArXiv", "more": [1]}', "ArXiv"),
    ],
)
def test_a_meta_of_any_type_is_no_problem(
    tmp_path: Path, info: ModelInfo, meta: str, name: str | None
):
    path = write_lines(tmp_path / "a.jsonl", [b'{"meta": %s, "text": "abcdefgh"}' % meta.encode()])
    sequences = open_corpus(info, path)
    assert all_tokens(sequences) == [list(b"abcdef")]
    assert all_origins(sequences)["pile_set_name"] == [name]


def test_a_parquet_row_that_is_not_utf8_is_bad_and_its_neighbours_are_not(
    tmp_path: Path, info: ModelInfo
):
    rows = documents(*[8] * 120)
    texts: list[bytes | None] = [text.encode() for text, _ in rows]
    column = pa.array([*texts[:7], b"abc\xff\xfedef", None, *texts[7:]], pa.binary())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column.view(pa.string())}), path)
    sequences = open_corpus(info, path, bad_rows=0.02)
    assert problems(sequences) == [
        f"{path}, row 8 (not UTF-8)",
        f"{path}, row 9 (text is null, expected a string)",
    ]


# Whole files that cannot be used


def test_a_truncated_zst_file_is_named(tmp_path: Path, info: ModelInfo):
    path = write_zst(tmp_path / "a.jsonl.zst", plain_bytes(ROWS))
    path.write_bytes(path.read_bytes()[:-10])
    assert (
        problem_of(info, path)
        == f"{path}: the zstd stream ends in the middle; fetch the file again"
    )


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl.zst", b"no zstd at all", "cannot be read ("),
        ("a.parquet", b"", "cannot be read ("),
        ("a.parquet", b"PAR1 and then nothing", "cannot be read ("),
        (
            "a.txt",
            b"abcdefgh",
            "expected a file that ends in .jsonl, .json, .parquet; those of text",
        ),
        ("a.zst", b"", "expected a file that ends in .jsonl, .json, .parquet; those of text"),
        (
            "a.parquet.gz",
            b"",
            "expected a file that ends in .jsonl, .json, .parquet; those of text",
        ),
        ("a.json", b"[{},", "not JSON ("),
        ("a.jsonl.gz", b"no gzip at all", "cannot be read ("),
    ],
)
def test_a_file_that_is_not_what_it_says_is_named(
    tmp_path: Path, info: ModelInfo, name: str, content: bytes, problem: str
):
    (tmp_path / name).write_bytes(content)
    assert problem_of(info, tmp_path / name).startswith(f"{tmp_path / name}: {problem}")


def test_a_truncated_parquet_file_is_named(tmp_path: Path, info: ModelInfo):
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-10])
    assert problem_of(info, path).startswith(f"{path}: cannot be read (")


def test_a_parquet_file_without_text_is_named_with_its_columns(tmp_path: Path, info: ModelInfo):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": ["abcdefgh"], "meta": ["{}"]}), path)
    assert problem_of(info, path) == (
        f"{path}: expected a column text, found content, meta; set input.text_field"
    )


def test_a_file_that_is_not_there_is_named_with_the_directory(
    tmp_path: Path, info: ModelInfo, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert (
        problem_of(info, "absent-*.jsonl")
        == f"input.files: no file matches 'absent-*.jsonl' (in {tmp_path})"
    )
    assert problem_of(info, "~nobody-of-that-name/a.jsonl").startswith(
        "input.files: no file matches "
    )
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert (
        problem_of(info, ["a.jsonl", "b.jsonl"])
        == f"input.files: no file matches 'b.jsonl' (in {tmp_path})"
    )


def test_a_directory_in_the_place_of_a_file_is_named(tmp_path: Path, info: ModelInfo):
    expected = (
        f"input.files: '{tmp_path}' is a directory; expected files, for instance {tmp_path}/*"
    )
    assert problem_of(info, tmp_path) == expected


def test_no_files_at_all_are_refused(info: ModelInfo):
    assert problem_of(info, []) == "input.files: expected at least one path or glob, got []"


@pytest.mark.parametrize("options", [{}, {"files": "a.jsonl", "dataset": "b"}])
def test_the_pile_is_files_or_a_data_set(info: ModelInfo, options: dict[str, str]):
    with pytest.raises(
        ScanError, match=r"^input: the family pile needs either files .* or dataset .*$"
    ):
        make_index(Sequences(toy_scan(sequences="all", input={"family": "pile", **options}), info))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, info: ModelInfo):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    path.chmod(0)
    assert problem_of(info, path).startswith(f"{path}: cannot be read (")


@pytest.mark.parametrize(
    ("lengths", "changes", "line"),
    [
        ([5, 4, 3], {}, "0 sequences, at least 1 wanted, of 3 documents: 3 too short"),
        (
            [2, 1],
            {"packing": "concat"},
            "0 sequences, at least 1 wanted, of 2 documents: 2 not needed",
        ),
        ([6, 5, 7], {"sequences": 3}, "2 sequences, 3 wanted, of 3 documents: 2 used, 1 too short"),
        (
            [6, 5, 7],
            {"sequences": 4, "packing": "concat"},
            "3 sequences, 4 wanted, of 3 documents: 3 used",
        ),
        ([], {}, "0 sequences, at least 1 wanted, of 0 documents"),
    ],
)
def test_a_corpus_that_is_too_small_says_what_it_holds(
    tmp_path: Path, info: ModelInfo, lengths: list[int], changes: dict[str, Any], line: str
):
    path = write_jsonl(tmp_path / "a.jsonl", documents(*lengths))
    packing = changes.get("packing", "document")
    described = f"sequences of 6 tokens of text ({packing} packing),"
    advice = "; lower n_ctx or sequences" + ("" if packing == "concat" else ", or pack with concat")
    assert problem_of(info, path, **changes) == (
        f"input: the corpus holds {line.replace('sequences,', described)}{advice}"
    )


def test_a_corpus_of_bad_rows_alone_says_so(tmp_path: Path, info: ModelInfo):
    (tmp_path / "a.txt").write_bytes(b"abcdefgh\xff")
    assert problem_of(info, tmp_path / "a.txt", family="text", bad_rows=1.0).endswith(
        "wanted, of 1 document: 1 bad; lower n_ctx or sequences, or pack with concat, or mend "
        f"{tmp_path / 'a.txt'} (not UTF-8 (byte 8))"
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.txt"])
def test_an_empty_file_holds_nothing(tmp_path: Path, info: ModelInfo, name: str):
    (tmp_path / name).write_bytes(b"")
    family = "text" if name == "a.txt" else "pile"
    assert problem_of(info, tmp_path / name, family=family).startswith(
        "input: the corpus holds 0 sequences of 6 tokens"
    )


def test_a_corpus_that_is_prepared_is_not_read_again(tmp_path: Path, info: ModelInfo):
    path = write_jsonl(tmp_path / "a.jsonl", documents(8, 9, 8, 8))
    sequences = open_corpus(info, path)
    path.unlink()
    assert all_tokens(sequences) == cut([documents(8, 9, 8, 8)], "document")


def test_packing_by_concat_needs_a_token_to_join_with(three_files: list[Path], info: ModelInfo):
    nameless = toy_info(path=info.path, d_vocab=257, bos_token_id=None, eos_token_id=None)
    assert len(open_corpus(nameless, three_files, "document")) == 8
    with pytest.raises(ModelError) as caught:
        len(open_corpus(nameless, three_files, "concat"))
    assert (
        str(caught.value)
        == "toy names no end-of-text token to join documents with; pack by document"
    )


SINK_TEXTS = PILE_MINI.parent / "published" / "sink_circuit_300_texts.csv"
GPT2_TOKENIZER = PILE_MINI.parent / "gpt2-tokenizer"


def test_a_csv_file_has_a_text_and_perhaps_a_data_set_in_each_row(tmp_path: Path, info: ModelInfo):
    texts = ['one, "two"', "line\nbreak in it", "short", "ärgerlich", "long" * 50_000]
    rows = [
        ["kind", "dataset", "text"],
        *(["k", "abc"[i % 3], text] for i, text in enumerate(texts)),
    ]
    rows[-1][1] = ""
    sequences = open_corpus(info, write_csv(tmp_path / "a.csv", rows), family="csv_texts")
    assert all_tokens(sequences) == cut([[(text, None) for text in texts]], "document")
    origins = all_origins(sequences)
    assert origins["pile_set_name"] == ["a", "b", "a", None]
    assert origins["row"] == [0, 1, 3, 4]


def test_a_csv_file_of_texts_alone_may_start_with_a_byte_order_mark(
    tmp_path: Path, info: ModelInfo
):
    file = write_csv(tmp_path / "a.csv", [["text"], ["abcdefgh"]], "utf-8-sig")
    sequences = open_corpus(info, file, family="csv_texts")
    assert all_tokens(sequences) == [list(b"abcdef")]
    assert all_origins(sequences)["pile_set_name"] == [None]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"abc\xff\xfedef,a", "not UTF-8"),
        (b"", None),
        (b",a", None),
        (b"abcdefgh,a,b", "more fields than the header names"),
        (b"abcdefgh", None),
    ],
)
def test_a_bad_row_of_a_csv_file_is_left_out(
    tmp_path: Path, info: ModelInfo, line: bytes, problem: str | None
):
    file = write_lines(tmp_path / "a.csv", [b"text,dataset", *[b"abcdefgh,a"] * 200, line])
    sequences = open_corpus(info, file, family="csv_texts")
    assert len(sequences) == 200 + (line == b"abcdefgh")
    shards = [sequences.shard(i) for i in range(sequences.shards)]
    assert [bad for shard in shards for bad in shard.bad_rows] == (
        [f"{file}, row 201 ({problem})"] if problem else []
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"body,dataset\nabcdefgh,a\n",
            "FILE: expected a column text, found body, dataset; set input.text_field",
        ),
        (b"", "FILE: expected a column text, found nothing; set input.text_field"),
        (b'text\n"abcdefgh\n', "FILE, line 2: not CSV (unexpected end of data)"),
    ],
)
def test_a_csv_file_that_is_none_is_one_line(
    tmp_path: Path, info: ModelInfo, content: bytes, message: str
):
    (tmp_path / "a.csv").write_bytes(content)
    assert problem_of(info, tmp_path / "a.csv", family="csv_texts") == message.replace(
        "FILE", str(tmp_path / "a.csv")
    )


def test_csv_texts_are_csv_files(tmp_path: Path, info: ModelInfo):
    (tmp_path / "a.txt").write_text("abcdefgh")
    expected = (
        f"{tmp_path / 'a.txt'}: expected a file that ends in .csv; those of text may "
        "also be packed (.zst, .gz)"
    )
    assert problem_of(info, tmp_path / "a.txt", family="csv_texts") == expected


@pytest.mark.skipif(not SINK_TEXTS.is_file(), reason=f"needs {SINK_TEXTS}")
def test_the_published_texts_are_300_sequences_of_40_tokens():
    info = toy_info(
        path=str(GPT2_TOKENIZER), n_ctx=1024, d_vocab=50257, bos_token_id=50256, eos_token_id=50256
    )
    sequences = open_corpus(info, SINK_TEXTS, family="csv_texts", n_ctx=40)
    assert len(sequences) == 300
    assert set(sequences.reader.block(0).n_tokens.tolist()) == {40}
    names = all_origins(sequences)["pile_set_name"]
    assert {name: names.count(name) for name in names} == {
        "sst2": 100,
        "gsm8k": 100,
        "humaneval": 100,
    }
    first = next(csv.DictReader(SINK_TEXTS.read_text(encoding="utf-8").splitlines()))["text"]
    assert sequences.tokenizer.encode(first) == all_tokens(sequences)[0]


@pytest.mark.parametrize("packing", ["document", "concat"])
def test_shuffled_text_has_the_tokens_of_the_text_in_another_order(
    three_files: list[Path], info: ModelInfo, packing: str
):
    in_order = open_corpus(info, three_files, packing, n_ctx=20)
    shuffled = open_corpus(info, three_files, packing, n_ctx=20, family="shuffled_text")
    assert [sorted(ids) for ids in all_tokens(shuffled)] == [
        sorted(ids) for ids in all_tokens(in_order)
    ]
    assert all(
        tokens_shuffled != tokens_in_order
        for tokens_shuffled, tokens_in_order in zip(
            all_tokens(shuffled), all_tokens(in_order), strict=True
        )
    )
    assert all_origins(shuffled) == all_origins(in_order)
    parts = open_corpus(
        info, three_files, packing, n_ctx=20, family="shuffled_text", sequences_per_shard=2
    )
    assert all_tokens(parts) == all_tokens(shuffled)
    other_seed = open_corpus(info, three_files, packing, n_ctx=20, family="shuffled_text", seed=1)
    assert all_tokens(other_seed) != all_tokens(shuffled)


@pytest.mark.parametrize("packing", ["document", "concat"])
@pytest.mark.parametrize("bos", [True, False])
def test_repeated_text_is_a_chunk_over_and_over(
    three_files: list[Path], info: ModelInfo, packing: str, bos: bool
):
    options = {
        "family": "repeated_text",
        "files": [str(file) for file in three_files],
        "packing": packing,
        "chunk": 6,
    }
    sequences = open_corpus(info, three_files, n_ctx=15 + bos, bos=bos, input=options)
    expected = [[*[BYTE_BOS] * bos, *ids, *ids, *ids[:3]] for ids in cut(THREE_FILES, packing, 6)]
    assert all_tokens(sequences) == expected


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (0, "input.chunk: expected 1 or more tokens, got 0"),
        (7, "input.chunk: expected 1 to 6, the tokens in a sequence, got 7"),
    ],
)
def test_a_chunk_that_does_not_fit_is_refused(
    three_files: list[Path], info: ModelInfo, chunk: int, message: str
):
    options = {"family": "repeated_text", "files": str(three_files[0]), "chunk": chunk}
    assert problem_of(info, three_files, input=options) == message


@pytest.mark.parametrize("position", [1, 4])
@pytest.mark.parametrize("token", [None, 7])
def test_a_token_of_the_text_is_replaced_by_a_fixed_or_a_random_one(
    three_files: list[Path], info: ModelInfo, position: int, token: int | None
):
    options = {
        "family": "text_with_token",
        "files": [str(file) for file in three_files],
        "packing": "concat",
        "position": position,
    }
    if token is not None:
        options["token"] = token
    changes: list[dict[str, Any]] = [
        {},
        {"input": options},
        {"input": options, "sequences_per_shard": 2},
    ]
    text, changed, in_parts = (
        np.array(all_tokens(open_corpus(info, three_files, "concat", n_ctx=9, bos=True, **change)))
        for change in changes
    )
    assert changed.tolist() == in_parts.tolist()
    assert (changed[:, 0] == BYTE_BOS).all()
    others = np.arange(9) != position
    assert (changed[:, others] == text[:, others]).all()
    replaced = set(changed[:, position].tolist())
    assert replaced == {7} if token == 7 else len(replaced) > 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": 6}, "input.position: expected 0 to 5, the positions of text in a sequence"),
        ({"token": 257}, "input.token: expected 0 to 256, the token ids of "),
    ],
)
def test_a_token_or_a_position_that_is_not_there_is_refused(
    three_files: list[Path], info: ModelInfo, options: dict[str, int], message: str
):
    family = {"family": "text_with_token", "files": str(three_files[0])}
    assert problem_of(info, three_files, input=family | options).startswith(message)


def test_the_licence_is_running_text_and_a_stream_of_windows(info: ModelInfo):
    """No token is left out between two windows, and white space is single spaces."""
    licence = " ".join(Path("LICENSE").read_text().split()).encode()
    bundled = {"family": "text", "files": "bundled:LICENSE", "packing": "concat"}
    sequences = open_corpus(info, [], n_ctx=65, bos=True, input=bundled)
    windows = all_tokens(sequences)
    assert len(windows) == len(licence) // 64
    in_windows = bytes(token for window in windows for token in window[1:])
    assert in_windows == licence[: len(windows) * 64]
    # The file itself is as it is.
    as_file = open_corpus(
        info, [], n_ctx=64, input=bundled | {"files": str(Path("LICENSE").resolve())}
    )
    assert bytes(all_tokens(as_file)[0]).startswith(b"\n    ")
    assert sequences.record != as_file.record
