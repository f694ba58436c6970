"""Documents of files: the same from every container, and whatever stretches of it are read."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from headcount.schemas.errors import CorpusError
from headcount.workers.inputs.corpus import documents
from headcount.workers.inputs.corpus.documents import (
    BLANK,
    CHANGED,
    EVERY_DOCUMENT,
    Document,
    Reading,
    Source,
    content_bytes_of,
    document_of,
)
from tests.s3.s3_server import ROOT
from tests.toys.object_stores import object_store
from tests.toys.refusals import refused
from tests.toys.toy_corpora import Row, packed, write_parquet

LINES = (
    b'\xef\xbb\xbf{"text": "first"}\r\n'
    b"\n"
    b'{"text": "second \xc3\xa4"}\n'
    b"  \t \r\n"
    b"\n\n"
    b'{"text": "a third one that is longer"}\r\n'
    b'{"text": "4"}\n'
    b"\n"
    b"not JSON\n"
    b'{"text": "the last one has no line end"}'
)
"""Lines with a byte order mark, blank lines and both line ends."""

FOUND = [
    (0, "first"), (2, "second ä"), (6, "a third one that is longer"), (7, "4"), (9, None),
    (10, "the last one has no line end"),
]  # fmt: skip
"""Row and text of every line that is not blank; None for a line that is not JSON."""

problem = partial(refused, CorpusError)
"""The one line that something is refused with."""


def source_of(path: Path, kind: str | None = None) -> Source:
    return Source(kind or path.name.split(".")[1], str(path), path.stat().st_size)


def write(path: Path, content: bytes, kind: str | None = None) -> Source:
    """A file, compressed as its name says."""
    path.write_bytes(packed(path.name, content))
    return source_of(path, kind)


def read(
    source: Source, cuts: Iterable[int] = (0,), reading: Reading = EVERY_DOCUMENT
) -> list[Document]:
    """The documents of the stretches that begin at these places."""
    found: list[Document] = []
    rows_before = 0
    for start, stop in pairwise([*cuts, None]):
        records = list(source.records(reading, start or 0, stop))
        assert [record.row for record in records] == list(range(len(records)))
        for record in records:
            if record.content is not BLANK:
                document = document_of(record, reading)
                found.append(replace(document, row=rows_before + record.row))
        rows_before += len(records)
    return found


def rows_and_texts(found: Iterable[Document]) -> list[tuple[int, str | None]]:
    return [(document.row, None if document.problem else document.text) for document in found]


# Stretches


def test_ranges_of_any_size_hold_every_line_once(tmp_path: Path):
    for name in ("a.jsonl", "a.json", "a.jsonl.zst", "a.jsonl.gz"):
        for content in (LINES, LINES + b"\n", LINES + b"\n \n\n"):
            source = write(tmp_path / name, content)
            assert source.can_be_entered is (name in ("a.jsonl", "a.json"))
            sizes = (1, 2, 7, 16, 30, 60, len(content) - 1, len(content), 1000)
            for size in sizes if source.can_be_entered else (1000,):
                assert rows_and_texts(read(source, range(0, len(content), size))) == FOUND, size


TEXTS = ["before it", "x" * 3000, "behind it", "é" * 990, "", "y" * 1001, "z" * 900]


def texts_in(path: Path) -> Source:
    """The texts in a file of the kind that its name says."""
    match path.name.split(".")[1]:
        case "jsonl":
            return write(path, b"".join(b"%s\n" % json.dumps({"text": t}).encode() for t in TEXTS))
        case "json":
            return write(path, json.dumps([{"text": text} for text in TEXTS]).encode())
        case "csv":
            return texts_in_csv(path, TEXTS)
        case _:
            rows: list[Row] = [(text, None) for text in TEXTS]
            return source_of(write_parquet(path, rows, row_group_size=3))


def texts_in_csv(path: Path, texts: list[str]) -> Source:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["n", "text"], *enumerate(texts)])
    return write(path, path.read_bytes())


def test_ranges_of_any_size_hold_every_row_once(tmp_path: Path):
    source = texts_in(tmp_path / "a.parquet")
    assert source.can_be_entered
    for size in (1, 2, 3, 5, 7):
        assert rows_and_texts(read(source, range(0, 7, size))) == list(enumerate(TEXTS))


def test_a_source_that_can_be_entered_and_ends_early_has_changed(tmp_path: Path):
    lines, table = write(tmp_path / "a.jsonl", LINES), texts_in(tmp_path / "a.parquet")
    for source, told in [
        (lines, f"ends at byte {len(LINES)}, expected {len(LINES) + 9} or more"),
        (table, f"has 7 rows, expected {len(LINES) + 9} or more"),
    ]:
        refusal = problem(lambda s=source: list(s.records(start=3, stop=len(LINES) + 9)))
        assert refusal == f"{source.path}: {told}; {CHANGED}"


def test_files_in_a_store_hold_the_same_documents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with object_store(monkeypatch) as store:
        for name in ("a.jsonl", "a.jsonl.zst", "a.json.gz", "a.csv", "a.parquet"):
            here = texts_in(tmp_path / name)
            content = Path(here.path).read_bytes()
            assert store.request("PUT", f"/bucket/{name}", content)[0] == 200
            there = replace(here, path=f"s3://bucket/{name}")
            for cuts in ((0,), (0, 3, 5))[: 1 + there.can_be_entered]:
                assert rows_and_texts(read(there, cuts)) == list(enumerate(TEXTS))


@pytest.mark.parametrize("ending", ["zst", "gz"])
def test_the_size_of_the_content_is_estimated_from_the_beginning(tmp_path: Path, ending: str):
    same = "what is the same in every line " * 5
    content = "".join(f"{os.urandom(20).hex()} {same}\n" for _ in range(40_000)).encode()
    source = write(tmp_path / f"a.txt.{ending}", content, "text")
    assert content_bytes_of(source.path, source.bytes) == pytest.approx(len(content), rel=0.25)
    (tmp_path / "b.txt").write_bytes(content)
    assert content_bytes_of(str(tmp_path / "b.txt"), 7) == 7


PEAK = """
import resource, sys
from headcount.workers.inputs.corpus.documents import Source
source = Source("jsonl", sys.argv[1], 1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
lengths = [len(record.content) for record in source.records()]
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10, *lengths[-3:])
"""


def test_one_frame_of_any_size_and_a_line_of_any_length_take_little_memory(tmp_path: Path):
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=22)
    one_frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    line = b'{"text": "%s"}\n' % (b"what is said again " * 50_000)
    path = tmp_path / "a.jsonl.zst"
    with path.open("wb") as file:
        # One line that is not ended for 142 MB stands between the others.
        for piece in [*[line] * 150, *[line[:-1]] * 150, b"\n" + line]:
            file.write(one_frame.compress(piece))
        file.write(one_frame.flush())
    command = [sys.executable, "-c", PEAK, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    mebibytes, *lengths = map(int, done.stdout.split())
    assert lengths == [len(line), len(documents.TOO_LARGE), len(line)]
    # The largest line that is read is held twice for a moment. The content has 285 MB.
    assert mebibytes < 2 * (documents.LARGEST_RECORD >> 20) + 30


def test_a_zst_file_of_a_window_too_large_says_so(tmp_path: Path):
    path = tmp_path / "a.jsonl.zst"
    sizes = {"window_log": 28, "write_content_size": False}
    parameters = zstandard.ZstdCompressionParameters.from_level(3, **sizes)
    frame_in_parts = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path.write_bytes(frame_in_parts.compress(LINES) + frame_in_parts.flush())
    told = problem(read, source_of(path))
    assert told.endswith(
        "; its window has more than 128 MiB; compress it without --long and --ultra"
    )


# Records that are too large


@pytest.fixture
def small_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LARGEST_RECORD", 1000)
    monkeypatch.setattr(documents, "PIECE_BYTES", 64)


@pytest.mark.usefixtures("small_records")
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.zst", "jsonl.gz", "json", "csv", "parquet"])
def test_a_record_that_is_too_large_is_a_bad_row(tmp_path: Path, ending: str):
    # A letter of two bytes counts as two; CSV counts letters first, so `é` passes there.
    found = read(texts_in(tmp_path / f"a.{ending}"))
    expected = [None if i in (1, 3, 5) else text for i, text in enumerate(TEXTS)]
    assert rows_and_texts(found) == list(enumerate(expected))
    assert {document.problem for document in found} == {None, documents.TOO_LARGE}


@pytest.mark.parametrize("bytes_beyond", [0, 1])
def test_an_array_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_beyond: int
):
    source = texts_in(tmp_path / "a.json")
    monkeypatch.setattr(documents, "LARGEST_ARRAY", source.bytes - bytes_beyond)
    if not bytes_beyond:
        assert len(read(source)) == len(TEXTS)
        return
    told = problem(read, source)
    assert told.startswith(f"{source.path}: an array of more than ")
    assert told.endswith("; write an object in each line (.jsonl)")


@pytest.mark.usefixtures("small_records")
@pytest.mark.parametrize("kind", ["text", "flowing text"])
def test_a_text_file_that_is_too_large_is_a_bad_row(tmp_path: Path, kind: str):
    sources = [write(tmp_path / str(size), b"t" * size, kind) for size in (1000, 1001, 10)]
    found = [document.problem for source in sources for document in read(source)]
    assert found == [None, documents.TOO_LARGE, None]


# Fields


def test_fields_are_kept_as_json(tmp_path: Path):
    lines = [
        {"text": "a", "year": 2020, "meta": {"lang": "de", "pile_set_name": "ArXiv"}, "no": None},
        {"text": "b", "year": 2020.5, "meta": '{"lang": ["ä", "\\ud800"]}', "no": False},
        {"text": "c"},
    ]
    content = b"".join(b"%s\n" % json.dumps(line).encode() for line in lines)
    reading = Reading(fields=("lang", "meta", "no", "year"))
    found = read(write(tmp_path / "a.jsonl", content), reading=reading)
    assert [document.fields for document in found] == [
        ('"de"', '{"lang": "de", "pile_set_name": "ArXiv"}', "null", "2020"),
        ('["\\u00e4", "\\ud800"]', '{"lang": ["\\u00e4", "\\ud800"]}', "false", "2020.5"),
        (None, None, None, None),
    ]
    assert [document.pile_set_name for document in found] == ["ArXiv", None, None]
    # A document without any of the fields is known by its text alone.
    assert found[2].content_hash == Document(0, "c").content_hash
    assert len({document.content_hash for document in found}) == 3


def test_a_field_that_is_nested_too_deeply_is_a_bad_row(tmp_path: Path):
    # Whether it can be parsed and written again depends on how deep the program already is.
    lines = [b'{"text": "a", "f": %s}\n' % (b"[" * n + b"]" * n) for n in range(900, 1000)]
    source = write(tmp_path / "a.jsonl", b"".join(lines))
    found = [document.problem for document in read(source, reading=Reading(fields=("f",)))]
    assert len(found) == 100
    assert set(found) <= {None, "invalid JSON", "has a field that is nested too deeply"}


def test_the_part_of_a_parquet_row_is_a_column_or_in_meta(tmp_path: Path):
    columns = {"text": ["a", "b"], "pile_set_name": ["ArXiv", None], "more": [1, 2]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    found = read(source_of(tmp_path / "a.parquet"))
    assert [document.pile_set_name for document in found] == ["ArXiv", None]
