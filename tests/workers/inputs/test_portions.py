"""Portions: the records are those of the files, whatever the ranges and the place to go on at."""

from __future__ import annotations

import csv
import gzip
import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from headcount.schemas.errors import CorpusError
from headcount.workers.inputs.corpus.documents import Document, Reading, Source, hub_version
from headcount.workers.inputs.store import portions
from headcount.workers.inputs.store.portions import (
    FileState,
    Portion,
    PortionReader,
    Position,
    file_states,
    portions_of,
)
from tests.s3.s3_server import S3Server
from tests.toys.object_stores import object_store
from tests.toys.refusals import refused
from tests.toys.toy_corpora import Row, packed, write_parquet

READING = Reading()
SetRanges = Callable[[int], None]

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


def source_of(path: Path, kind: str = "jsonl") -> Source:
    return Source(kind, str(path), path.stat().st_size)


def portion_from(source: Source, start: int = 0, stop: int | None = None) -> Portion:
    """A part of one file."""
    return Portion(0, (source,), (FileState.of(source),), start, stop)


def write(path: Path, content: bytes, kind: str = "jsonl") -> Source:
    """A file of lines, compressed as its name says."""
    path.write_bytes(packed(path.name, content))
    return source_of(path, kind)


def documents_by_hand(content: bytes) -> list[tuple[int, str | None]]:
    """Row and text of every line that is not blank; None for a line that is not JSON."""
    return [
        (row, json.loads(line)["text"] if line.startswith("{") else None)
        for row, line in enumerate(content.decode("utf-8-sig").split("\n"))
        if line.strip()
    ]


def read(
    parts: Iterable[Portion], reading: Reading = READING, step: int | None = None
) -> list[tuple[int, int, Document]]:
    """Number of the source, row in the source, and document.

    Reading begins anew behind every `step` records, from the position that was reached.
    """
    found: list[tuple[int, int, Document]] = []
    rows_before = 0
    for portion in parts:
        rows_before = 0 if portion.begins_source else rows_before
        position = Position()
        ended = False
        while not ended:
            reader = PortionReader(pickle.loads(pickle.dumps(portion)), reading, position)
            for count, (number, record) in enumerate(reader, 1):
                document = portion.sources[number].document_of(record, reading)
                row = record.row + (0 if number else rows_before)
                found.append((portion.first_source + number, row, document))
                if count == step:
                    break
            ended = reader.ended
            # A reader that ends exactly with its last record does not know that it has ended.
            assert ended or reader.position > position
            position = reader.position
        rows_before += position.row
    return found


def rows_and_texts(
    parts: Iterable[Portion], step: int | None = None
) -> list[tuple[int, str | None]]:
    found = read(parts, step=step)
    return [(row, None if document.problem else document.text) for _, row, document in found]


problem = partial(refused, CorpusError)
"""The one line that something is refused with."""

CHANGED = "changed while it was read; run the same command again"


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> SetRanges:
    """Sets how many bytes a range has, whether the file is compressed or not."""

    def set_bytes(size: int) -> None:
        monkeypatch.setattr(portions, "RANGE_BYTES", size)
        monkeypatch.setattr(portions, "COMPRESSED_RANGE_BYTES", size)
        monkeypatch.setattr(portions, "COMPRESSED_RANGES", 1000)

    return set_bytes


TEXTS = ["before it", "x" * 3000, "behind it", "é" * 990, "", "y" * 1001, "z" * 900]


def texts_in(path: Path) -> Source:
    """The texts in a file of the kind that its name says."""
    kind = path.name.split(".")[1]
    if kind == "jsonl":
        lines = b"".join(b"%s\n" % json.dumps({"text": text}).encode() for text in TEXTS)
        return write(path, lines)
    if kind == "csv":
        return texts_in_csv(path, TEXTS)
    if kind == "parquet":
        rows: list[Row] = [(text, None) for text in TEXTS]
        return source_of(write_parquet(path, rows, row_group_size=4), kind)
    path.write_text(json.dumps([{"text": text} for text in TEXTS]))
    return source_of(path, kind)


def texts_in_csv(path: Path, texts: list[str]) -> Source:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["n", "text"], *enumerate(texts)])
    return source_of(path, "csv")


# Going on from any position


def hub_of(folder: Path, files: int = 1) -> list[Source]:
    """A local data set, in several files with some row groups."""
    folder.mkdir()
    for number in range(files):
        rows: list[Row] = [(f"text {number} {row}", "ArXiv") for row in range(7)]
        write_parquet(folder / f"train-{number}.parquet", rows, row_group_size=2)
    return [Source("hub", str(folder), 0, "train", part, files) for part in range(files)]


@pytest.fixture
def every_kind(tmp_path: Path) -> list[Source]:
    """A source of every kind of file, each with several records if it can have them."""
    (tmp_path / "a.txt").write_text("one\n text")
    return [
        write(tmp_path / "a.jsonl", LINES),
        write(tmp_path / "b.jsonl.zst", LINES),
        write(tmp_path / "c.jsonl.gz", LINES + b"\n\n"),
        write(tmp_path / "lines.json", LINES, "json"),
        *(texts_in(tmp_path / f"a.{kind}") for kind in ("json", "csv", "parquet")),
        source_of(tmp_path / "a.txt", "text"),
        source_of(tmp_path / "a.txt", "flowing text"),
    ]


def test_reading_goes_on_at_any_position_of_any_source(every_kind: list[Source], ranges: SetRanges):
    expected = [
        (number, document.row, document)
        for number, source in enumerate(every_kind)
        for document in source.documents()
    ]
    assert len(expected) == 4 * 6 + 3 * len(TEXTS) + 2
    for size in (1 << 20, 60):
        ranges(size)
        parts = portions_of(every_kind)
        for step in (None, 1, 3):
            found = read(parts, step=step)
            assert [(n, row) for n, row, _ in found] == [(n, row) for n, row, _ in expected]
            # A row of a range is counted from its beginning.
            contents = [replace(document, row=0) for _, _, document in found]
            assert contents == [replace(document, row=0) for _, _, document in expected]


# Which portions there are


def test_small_files_are_joined_in_order(
    tmp_path: Path, ranges: SetRanges, monkeypatch: pytest.MonkeyPatch
):
    lengths = [30, 30, 0, 30, 200, 10, 10, 10, 10, 10, 10, 0, 90, 15]
    line = b'{"text": ""}\n'
    sources: list[Source] = []
    for number, length in enumerate(lengths):
        content = line * (length // len(line)) + b" " * (length % len(line))
        sources.append(write(tmp_path / f"{number:02}.jsonl", content))
    ranges(100)
    monkeypatch.setattr(portions, "FILES_IN_PORTION", 5)
    parts = portions_of(sources)
    assert [(part.first_source, len(part.sources), part.bytes) for part in parts] == [
        (0, 4, 90), (4, 1, 100), (4, 1, 100), (5, 5, 50), (10, 3, 100), (13, 1, 15),
    ]  # fmt: skip
    assert [(part.start, part.stop) for part in parts[:3]] == [(0, None), (0, 100), (100, None)]
    assert [part.begins_source for part in parts] == [True, True, False, True, True, True]
    assert [part.ends_source for part in parts] == [True, False, True, True, True, True]
    assert len({part.key for part in parts}) == len(parts)
    assert [number for number, _, _ in read(parts)] == [
        number for number, length in enumerate(lengths) for _ in range(length // len(line))
    ]
    assert portions_of([]) == []


def test_a_parquet_file_is_cut_between_row_groups(tmp_path: Path, ranges: SetRanges):
    path = tmp_path / "a.parquet"
    schema = pa.schema({"text": pa.string()})
    ends = [0, 30, 33, 37, 37, 38, 40, 43]
    with pq.ParquetWriter(path, schema) as writer:
        for start, stop in pairwise(ends):
            texts = [f"text {row}" for row in range(start, stop)]
            writer.write_table(pa.table({"text": texts}, schema), row_group_size=100)
    source = source_of(path, "parquet")
    ranges(-(-source.bytes // 4))
    parts = portions_of([source])
    assert [(part.start, part.stop) for part in parts] == [(0, 30), (30, 40), (40, None)]
    for step in (None, 1, 4):
        assert rows_and_texts(parts, step) == [(row, f"text {row}") for row in range(43)]
    # A range of rows may end inside a row group.
    for start, stop in [(0, 5), (28, 35), (33, 34), (42, 43), (7, None)]:
        found = rows_and_texts([portion_from(source, start, stop)])
        assert found == [(row - start, f"text {row}") for row in range(start, stop or 43)]


def test_a_file_that_cannot_be_cut_is_one_portion(tmp_path: Path, ranges: SetRanges):
    (tmp_path / "broken.parquet").write_bytes(b"x" * 500)
    (tmp_path / "broken.jsonl.zst").write_bytes(b"x" * 500)
    sources = [
        source_of(tmp_path / "broken.parquet", "parquet"),
        source_of(tmp_path / "broken.jsonl.zst"),
        *(texts_in(tmp_path / name) for name in ("a.json", "a.csv")),
    ]
    ranges(100)
    parts = portions_of(sources)
    assert [part.first_source for part in parts] == [0, 1, 2, 3]
    for part in parts[:2]:
        assert problem(read, [part]).startswith(part.sources[0].path)


def test_the_key_of_a_portion_says_what_is_in_its_files(
    tmp_path: Path, ranges: SetRanges, monkeypatch: pytest.MonkeyPatch
):
    ranges(60)
    monkeypatch.chdir(tmp_path)

    def keys(name: str, content: bytes = LINES, changed: int = 7, kind: str = "jsonl") -> list[str]:
        Path(name).write_bytes(content)
        os.utime(name, ns=(changed, changed))
        return [part.key for part in portions_of([Source(kind, name, 0)])]

    same = [keys(name) for name in ("a.jsonl", "./a.jsonl", str(tmp_path / "a.jsonl"))]
    assert same == [same[0]] * 3
    # A moment later, a byte longer, of another kind, elsewhere: every key is another one.
    others = [
        keys("a.jsonl", changed=8),
        keys("a.jsonl", LINES + b"\n"),
        keys("a.jsonl", kind="json"),
        keys("b.jsonl"),
    ]
    assert len({key for found in [same[0], *others] for key in found}) == 5 * 3


# Data sets


def test_every_part_of_a_data_set_is_a_portion_and_knows_its_files(tmp_path: Path):
    sources = hub_of(tmp_path / "set", files=3)
    parts = portions_of(sources)
    assert [part.first_source for part in parts] == [0, 1, 2]
    texts = [(number, document.text) for number, _, document in read(parts, step=4)]
    assert texts == [(number, f"text {number} {row}") for number in range(3) for row in range(7)]
    keys = [part.key for part in parts]
    assert len(set(keys)) == 3
    assert [part.key for part in portions_of(sources)] == keys
    parts[0].check_unchanged()
    file = tmp_path / "set" / "train-1.parquet"
    os.utime(file, (1, 1))
    assert not {part.key for part in portions_of(sources)} & set(keys)
    assert "changed while it was read" in problem(parts[0].check_unchanged)
    # A data set that another version of the code, or another commit, reads is another one.
    assert hub_version(str(tmp_path / "set"), "train") == FileState.of(sources[0]).version


def test_a_data_set_that_stops_half_way_keeps_what_was_read(tmp_path: Path):
    hub_of(tmp_path / "set", files=2)
    path = tmp_path / "set" / "train-1.parquet"
    first_column = pq.ParquetFile(path).metadata.row_group(0).column(1)
    begin = first_column.dictionary_page_offset or first_column.data_page_offset
    length = first_column.total_compressed_size
    content = path.read_bytes()
    path.write_bytes(content[:begin] + b"\xff" * length + content[begin + length :])
    # One part that has both files.
    (portion,) = portions_of([Source("hub", str(tmp_path / "set"), 0)])
    reader = PortionReader(portion, READING)
    rows: list[int] = []
    told = problem(lambda: rows.extend(record.row for _, record in reader))
    # The library reads ahead, so the last rows before the broken ones may be lost, too.
    assert rows == list(range(len(rows)))
    assert 3 <= len(rows) <= 7
    where = f"data set '{tmp_path / 'set'}', split 'train'"
    assert told.startswith(f"{where}: cannot be read further than {len(rows)} rows (")
    assert told.endswith("; run the same command again")
    assert reader.position == Position(0, len(rows), len(rows))
    assert not reader.ended


# Files that change


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path, ranges: SetRanges):
    path = tmp_path / "a.jsonl"
    changed = f"{path}: {CHANGED}"
    ranges(60)
    for change in (path.unlink, lambda: write(path, LINES[:70]), lambda: os.utime(path, (1, 1))):
        parts = portions_of([write(path, LINES)])
        parts[0].check_unchanged()
        change()
        assert [problem(part.check_unchanged) for part in parts] == [changed] * len(parts)
    write(path, LINES)
    parts = portions_of([source_of(path)])
    write(path, LINES[:70])
    # Its beginning can still be read. What ends early, or is broken, is no other reason.
    assert problem(read, [parts[1]]) == changed
    path.unlink()
    assert problem(read, [parts[0]]) == changed
    (portion,) = portions_of([Source("jsonl", str(path), 0)])
    portion.check_unchanged()
    assert problem(read, [portion]).startswith(f"{path}: cannot be read (No such file")
    # A Parquet file that lost rows.
    texts: list[Row] = [(f"text {row}", None) for row in range(20)]
    path = write_parquet(tmp_path / "a.parquet", texts, row_group_size=5)
    source = source_of(path, "parquet")
    ranges(-(-source.bytes // 2))
    parts = portions_of([source])
    write_parquet(path, texts[:5])
    assert problem(read, [parts[0]]) == changed.replace("a.jsonl", "a.parquet")


# Files in a store


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with object_store(monkeypatch) as server:
        yield server


def test_files_in_a_store_are_listed_once_and_read_by_ranges(store: S3Server, ranges: SetRanges):
    contents = {
        **{f"small/{number:02}.jsonl": LINES[:20] for number in range(20)},
        "large/a.jsonl": LINES,
        "large/b.jsonl.zst": zstandard.compress(LINES),
        "large/c.jsonl.gz": gzip.compress(LINES),
    }
    for name, content in contents.items():
        assert store.request("PUT", f"/bucket/{name}", content)[0] == 200
    store.clear()
    sources = [Source("jsonl", f"s3://bucket/{name}", 0) for name in sorted(contents)]
    states = file_states(sources)
    assert [state.bytes for state in states] == [len(contents[name]) for name in sorted(contents)]
    assert all(state.changed > 0 for state in states)
    # One listing, and a question for each of the three others.
    lists = [request for request in store.requests() if "list-type" in str(request)]
    assert len(lists) <= 1 + 3
    ranges(60)
    parts = portions_of(sources)
    for number in range(3):
        of_source = [part for part in parts if part.first_source == number]
        assert len(of_source) == 3
        assert rows_and_texts(of_source, step=2) == documents_by_hand(LINES)
    assert store.request("PUT", "/bucket/large/a.jsonl", LINES[:30])[0] == 200
    assert problem(parts[0].check_unchanged) == f"s3://bucket/large/a.jsonl: {CHANGED}"
