"""Corpora: every sequence is checked against documents that the test holds itself, tokenised by one
byte per token.
"""

import csv
import io
import json
import pickle
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from headcount.schemas.errors import ModelError
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.inputs.store.token_store import PortionFile
from tests.toys.refusals import refused
from tests.toys.small_portions import cut_portions
from tests.toys.toy_corpora import (
    LENGTH,
    Row,
    all_origins,
    all_tokens,
    byte_model,
    cut,
    document,
    documents,
    fates_of,
    make_index,
    open_corpus,
    packed,
    parquet_bytes,
    plain_bytes,
    problem_of,
    problems,
    texts_of,
    write_jsonl,
    write_lines,
    write_parquet,
)
from tests.toys.toy_models import BYTE_BOS, toy_info, toy_scan

PACKINGS = ("document", "concat")
ROWS = documents(3, 6, 20, 1, 5, 8, 9, 30)


# Forms

MARK = b"\xef\xbb\xbf"
PLAIN = plain_bytes(ROWS)
LINES = PLAIN.splitlines()
ARRAY = b"[%s]" % b",\n".join(LINES)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def in_frames(content: bytes) -> bytes:
    """Frames of zstd that end inside a line and inside a letter, one of which holds nothing, and
    one that is to be skipped, as a table of the others is.
    """
    places = [0, 1, 30, 30, content.rindex("ä".encode()) + 1, len(content)]
    frames = [zstandard.compress(content[a:b]) for a, b in pairwise(places)]
    return b"".join([*frames[:3], b"\x52\x2a\x4d\x18\x04\x00\x00\x00none", *frames[3:]])


def as_csv() -> bytes:
    text = io.StringIO(newline="")
    rows = [("text", "dataset"), *((document, name or "") for document, name in ROWS)]
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


FORMS: list[tuple[str, bytes]] = [
    ("a.jsonl", PLAIN),
    ("mark.jsonl.gz", MARK + PLAIN),
    ("crlf.jsonl", b"\r\n".join([*LINES, b""])),
    ("open.jsonl.zst", b"\n".join(LINES)),
    ("frames.jsonl.zst", in_frames(PLAIN)),
    ("lines.json.zst", MARK + PLAIN),
    ("array.json", ARRAY),
    ("array.json.gz", MARK + b" \n" + ARRAY),
    ("a.csv", as_csv()),
    ("mark.csv.gz", MARK + as_csv()),
    ("a.csv.zst", as_csv()),
    ("struct.parquet", parquet_bytes(ROWS)),
    ("groups.parquet", parquet_bytes(ROWS, "json", row_group_size=3)),
    ("zstd.parquet", parquet_bytes(ROWS, compression="zstd")),
]


@pytest.mark.parametrize(("name", "content"), FORMS, ids=[name for name, _ in FORMS])
def test_a_file_reads_the_same_whatever_its_form(tmp_path: Path, name: str, content: bytes):
    path = write(tmp_path / name, content if name.startswith("frames") else packed(name, content))
    family = "csv_texts" if ".csv" in name else "pile"
    sequences = open_corpus(path, family=family)
    assert all_tokens(sequences) == cut([ROWS], "document")
    origins = all_origins(sequences)
    long = [i for i, (text, _) in enumerate(ROWS) if len(text.encode()) >= LENGTH]
    assert origins["row"] == long
    assert origins["pile_set_name"] == [ROWS[i][1] for i in long]
    # Families of any text take every form.
    options = {"family": "repeated_text", "files": str(path), "chunk": LENGTH, "packing": "concat"}
    sequences = open_corpus(path, input=options)
    assert all_tokens(sequences) == cut([ROWS], "concat")
    assert fates_of(sequences).all == {"used": len(ROWS)}


def test_a_text_file_is_one_document(tmp_path: Path):
    texts = {"a": "To be, or not to be\r\n\r\nthat is", "b.txt.gz": "the question", "c": "short"}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(packed(name, MARK * (name != "a") + text.encode()))
    for packing in PACKINGS:
        sequences = open_corpus(tmp_path / "*", packing, family="text", text_field="body")
        # Small files are read together, so they are joined, too.
        assert all_tokens(sequences) == cut([[(text, None) for text in texts.values()]], packing)
        assert set(all_origins(sequences)["row"]) == {0}


def test_a_local_data_set_reads_like_its_files(tmp_path: Path):
    files = [documents(3, 6, 20, 1, 5), documents(40), documents(7, 4, 6, 13, 2, 30)]
    for i, rows in enumerate(files):
        meta = [json.dumps({"text": text, "meta": {"pile_set_name": name}}) for text, name in rows]
        write_lines(tmp_path / f"{i}.jsonl", map(str.encode, meta))
    options = {"family": "pile", "dataset": str(tmp_path), "packing": "concat"}
    sequences = open_corpus([], input=options, sequences_per_shard=3)
    assert all_tokens(sequences) == cut(files, "concat")
    assert sequences.shard(1).tokens.tolist() == cut(files, "concat")[3:6]
    origins = all_origins(sequences)
    assert sorted(set(origins["file"])) == [f"{tmp_path}#{part}" for part in range(3)]
    # The documents of the first file begin at 0, 4, 11, 32 and 34 of 40 tokens.
    assert origins["row"][:6] == [0, 1, 2, 2, 2, 2]
    assert origins["offset"][:6] == [0, 2, 1, 7, 13, 19]
    assert origins["pile_set_name"][:6] == [None, "ArXiv", *["Pile-CC"] * 4]


# Which files


def test_files_come_in_the_order_of_their_names_whatever_the_order_asked(tmp_path: Path):
    for folder, name in [("b", "0"), ("a", "2"), ("a", "1"), ("b", "10")]:
        (tmp_path / folder).mkdir(exist_ok=True)
        write_jsonl(tmp_path / folder / f"{name}.jsonl", [(f"{name} and more", folder)])
    for files in (["b/*", "a/*"], ["a/1*", "b/10*", "a/2*", "b/0*"], ["**/*.jsonl"]):
        origins = all_origins(open_corpus([tmp_path / file for file in files]))
        found = [Path(file).relative_to(tmp_path).as_posix() for file in origins["file"]]
        assert found == ["b/0.jsonl", "a/1.jsonl", "b/10.jsonl", "a/2.jsonl"]


def test_each_file_is_read_once_however_often_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # A name with brackets is a name where such a file is.
    path = write_jsonl(tmp_path / "a[1].jsonl", ROWS)
    (tmp_path / "b.jsonl").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    files = [str(path), "a[1].jsonl", "./b.jsonl", "*.jsonl", f"../{tmp_path.name}/b.jsonl"]
    sequences = open_corpus(files)
    assert all_tokens(sequences) == cut([ROWS], "document")
    # What a manifest keeps does not depend on the directory.
    assert sequences.corpus
    assert sequences.corpus.record["sources"][0]["path"] == "a[1].jsonl"


# Names of fields


@pytest.mark.parametrize(("line", "text_field", "part"), [
    ('{"content": "abcdefgh"}', "content", None),
    ('{"body": {"plain": "abcdefgh"}}', "body.plain", None),
    ('{"body": "{\\"plain\\": \\"abcdefgh\\"}"}', "body.plain", None),
    ('{"body.plain": "abcdefgh", "body": {"plain": 3}}', "body.plain", None),
    ('{"meta": null, "text": "abcdefgh"}', None, None),
    ('{"meta": ["ArXiv"], "text": "abcdefgh"}', None, None),
    ('{"meta": "ArXiv", "text": "abcdefgh"}', None, None),
    ('{"meta": "{\\"pile_set_name\\": \\"ArXiv\\"}", "text": "abcdefgh"}', None, "ArXiv"),
    ('{"meta": "{broken", "text": "abcdefgh"}', None, None),
    ('{"meta": {"pile_set_name": 3}, "text": "abcdefgh"}', None, None),
    ('{"meta": {"pile_set_name": "\\ud800"}, "text": "abcdefgh"}', None, None),
    ('{"meta": {"pile_set_name": "ArXiv", "more": [1]}, "text": "abcdefgh"}', None, "ArXiv"),
    ('{"pile_set_name": "ArXiv", "meta": 3, "text": "abcdefgh"}', None, "ArXiv"),
])  # fmt: skip
def test_the_text_may_have_another_name_and_a_meta_any_type(
    tmp_path: Path, line: str, text_field: str | None, part: str | None
):
    path = write_lines(tmp_path / "a.jsonl", [line.encode()])
    sequences = open_corpus(path, text_field=text_field)
    assert all_tokens(sequences) == [list(b"abcdef")]
    assert all_origins(sequences)["pile_set_name"] == [part]


def test_the_text_of_a_parquet_file_may_have_another_name(tmp_path: Path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1], "body": [{"plain": "abcdefgh"}], "meta": ["{}"]}), path)
    assert all_tokens(open_corpus(path, text_field="body.plain")) == [list(b"abcdef")]


# Bad rows

GOOD = documents(*[8] * 120)

BAD_LINES = [
    (b"{", "invalid JSON"),
    (b'{"text": "abc"', "invalid JSON"),
    (b"\x00", "zero bytes; was the file written to its end?"),
    (b"[" * 100_000, "has a field that is nested too deeply"),
    (b"[1, 2]", "expected a JSON object, got list"),
    (b"null", "expected a JSON object, got NoneType"),
    (b"{}", "has no field text; found nothing; set input.text_field"),
    (b'{"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1, "g": 1, "meta": {"text": ""}, "i": 1}',
     "has no field text; found a, b, c, d, e, f, g, meta …; set input.text_field"),
    (b'{"text": null}', "text is null, expected a string"),
    (b'{"text": 3}', "text is int, expected a string"),
    (b'{"text": ["abcdefgh"]}', "text is list, expected a string"),
    (b'{"text": "abc\xff\xfedefgh"}',
     "not UTF-8 (byte 13); if the file is Windows-1252 or Latin-1, iconv -f WINDOWS-1252 -t UTF-8 "
     "FILE converts it"),
    (b'{"text": "abc\\ud800defgh"}', "text has lone surrogates, which are not UTF-8"),
]  # fmt: skip


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_bad_row_is_named_and_left_out(tmp_path: Path, packing: str):
    lines = plain_bytes(GOOD).splitlines()
    for number, (line, _) in enumerate(BAD_LINES):
        # Every ninth line is bad.
        lines.insert(9 * number, line)
    path = write_lines(tmp_path / "a.jsonl", lines)
    sequences = open_corpus(path, packing, bad_rows=0.2, sequences_per_shard=7)
    expected = [f"{path}, line {9 * i + 1} ({why})" for i, (_, why) in enumerate(BAD_LINES)]
    assert problems(sequences) == expected
    assert all_tokens(sequences) == cut([GOOD], packing)
    # Each is named by one shard alone.
    shards = [sequences.shard(i) for i in range(sequences.shards)]
    assert [bad for shard in shards for bad in shard.bad_rows] == expected


def bad_csv() -> bytes:
    rows = [b"text,dataset", *[b"abcdefgh,a"] * 50]
    # The blank line is no row; the empty text is a document without a token.
    return b"\n".join([*rows, b"abc\xff\xfedef,a", b"", b",a", b"abcdefgh,a,b", b"abcdefgh", b""])


def bad_parquet() -> bytes:
    texts: list[bytes | None] = [b"abcdefgh"] * 50
    column = pa.array([*texts, b"abc\xff\xfedef", b"abcdefgh", None], pa.binary())
    file = io.BytesIO()
    pq.write_table(pa.table({"text": column.view(pa.string())}), file)
    return file.getvalue()


@pytest.mark.parametrize(("name", "content", "expected"), [
    ("a.csv", bad_csv(), {51: "not UTF-8", 53: "more fields than the header names"}),
    ("a.parquet", bad_parquet(), {51: "not UTF-8", 53: "text is null, expected a string"}),
    ("a.json", b"[%s 3]" % (b'{"text": "abcdefgh"},' * 51),
     {52: "expected a JSON object, got int"}),
])  # fmt: skip
def test_a_bad_row_of_a_table_is_named_and_its_neighbours_are_read(
    tmp_path: Path, name: str, content: bytes, expected: dict[int, str]
):
    path = write(tmp_path / name, content)
    family = "csv_texts" if name == "a.csv" else "pile"
    sequences = open_corpus(path, family=family, bad_rows=0.1)
    assert problems(sequences) == [f"{path}, row {row} ({why})" for row, why in expected.items()]
    assert all_tokens(sequences) == [list(b"abcdef")] * 51


@pytest.mark.parametrize(("bad", "share", "advice"), [(1, 0.01, None), (2, 0.01, "0.02")])
def test_a_corpus_with_too_large_a_share_of_bad_rows_is_refused(
    tmp_path: Path, bad: int, share: float, advice: str | None
):
    rows = documents(*[8] * (100 - bad))
    path = write(tmp_path / "a.jsonl", b"{\n" * bad + plain_bytes(rows))
    # However few sequences a shard has: the share is that of the corpus.
    changes: dict[str, Any] = {"bad_rows": share, "sequences_per_shard": 50}
    if advice is None:
        assert all_tokens(open_corpus(path, **changes)) == cut([rows], "document")
    else:
        assert problem_of(path, **changes).endswith(f"leave them out: --set bad_rows={advice}")


def test_too_many_bad_rows_in_a_row_end_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cut_portions(monkeypatch, documents=40)
    good = plain_bytes(documents(*[8] * 200)).splitlines()
    path = write_lines(tmp_path / "a.jsonl", [*good[:10], *[b"{"] * 6, *good[10:]])
    options: dict[str, Any] = {"family": "pile", "files": str(path)}
    fields: dict[str, Any] = {"bad_rows": 0.2, "bad_rows_in_a_row": 5, "input": options}
    stopped = Sequences(toy_scan(bos=False, n_ctx=LENGTH, sequences="all", **fields), byte_model())
    make_index(stopped)
    assert stopped.index is not None
    assert stopped.index.documents == 40
    assert "more than 5 documents in a row are bad" in problem_of(path, **fields)
    assert len(open_corpus(path, **{**fields, "bad_rows_in_a_row": 6})) == 200


# What became of the documents


def test_every_document_has_one_fate_and_the_parts_add_up(tmp_path: Path):
    # Parts by document: none, ArXiv, Pile-CC, none, …
    rows = documents(8, 3, 8, 2, 9, 8, 8, 4, 5)
    lines = plain_bytes(rows).splitlines()
    lines[4:4] = [b"{", b'{"text": "", "meta": {"pile_set_name": "ArXiv"}}']
    path = write_lines(tmp_path / "a.jsonl", lines)
    sequences = open_corpus(path, sequences=3, bad_rows=0.2)
    # Documents behind the last sequence do not count.
    assert fates_of(sequences).parts == {
        "": {"used": 1, "too short": 1, "bad": 1},
        "ArXiv": {"used": 1, "too short": 1, "empty": 1},
        "Pile-CC": {"used": 1},
    }
    everything = {"used": 5, "too short": 4, "bad": 1, "empty": 1}
    assert fates_of(open_corpus(path, bad_rows=0.2)).all == everything


def test_packing_by_concat_needs_a_token_to_join_with(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    bytes_alone = {"path": byte_model().path, "d_vocab": 257, "eos_token_id": None}
    nameless = toy_info(**bytes_alone, bos_token_id=None)
    assert len(open_corpus(path, "document", info=nameless)) == 5
    assert refused(ModelError, open_corpus, path, "concat", info=nameless) == (
        "toy names no end-of-text token to join documents with; pack by document"
    )
    only_bos = toy_info(**bytes_alone, bos_token_id=7)
    assert all_tokens(open_corpus(path, "concat", info=only_bos))[0][3] == 7


def test_the_licence_is_running_text_and_a_stream_of_windows():
    """No token is left out between two windows, and white space is single spaces."""
    licence = " ".join(Path("LICENSE").read_text().split()).encode()
    bundled = {"family": "text", "files": "bundled:LICENSE", "packing": "concat"}
    sequences = open_corpus([], n_ctx=65, bos=True, input=bundled)
    windows = all_tokens(sequences)
    assert len(windows) == len(licence) // 64
    in_windows = bytes(token for window in windows for token in window[1:])
    assert in_windows == licence[: len(windows) * 64]
    # The file itself is as it is.
    as_file = bundled | {"files": str(Path("LICENSE").resolve())}
    file_sequences = open_corpus([], n_ctx=64, sequences=1, input=as_file)
    assert bytes(all_tokens(file_sequences)[0]).startswith(b"\n    ")
    assert sequences.record != file_sequences.record


# Which documents are taken in which order, and which of their fields are carried


FIELDS = [
    {"text": f"document {i:02} of thirty", "id": i, "lang": "en" if i % 3 else "de",
     "meta": {"pile_set_name": ["Github", "ArXiv", "Pile-CC"][i % 3], "year": 2000 + i % 5}}
    for i in range(30)
]  # fmt: skip


def write_fields(folder: Path, form: str = "jsonl") -> Path:
    file = folder / f"a.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(FIELDS), file, row_group_size=7)
    else:
        lines = "".join(f"{json.dumps(fields)}\n" for fields in FIELDS)
        file.write_bytes(packed(form, lines.encode()))
    return file


def taken(sequences: Sequences) -> list[int]:
    """The numbers of the documents that the sequences come from, read in order."""
    return [int(bytes(ids[9:11])) for ids in all_tokens(sequences)]


choose = partial(open_corpus, n_ctx=20)


@pytest.mark.parametrize("form", ["jsonl.zst", "parquet"])
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


def test_the_seed_of_a_shuffle_is_its_own_or_the_scan_s(tmp_path: Path):
    file = write_fields(tmp_path)
    order = taken(choose(file, shuffle=5))
    assert sorted(order) == list(range(30))
    assert taken(choose(file, shuffle=True, seed=5)) == order
    assert taken(choose(file, shuffle=6)) != order
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


# The same tokens, however a corpus is cut, sharded and ordered, and whatever else is stored


WHOLE = (1 << 20, 1 << 20)
SMALL = (100, 30)
"""Bytes that a range of a file covers, letters of a portion."""


GOLDEN_FILES: dict[str, list[Row]] = {
    "0.jsonl": [("abc", None), ("", "A"), ("defghij", "B"), ("k", None), ("lmnopqrs", "A")],
    "1.jsonl.gz": [("The_quick_brown_fox", "B")],
    "2.parquet": [("tuvwxyz", "A"), ("01", "B"), ("234567", "A"), ("890123456", None)],
}

GOLDEN: list[tuple[dict[str, Any], str, str, list[int]]] = [
    ({"packing": "document"}, "defghi lmnopq The_qu tuvwxy 234567 890123",
     "0:2+0 0:4+0 1:0+0 2:0+0 2:2+0 2:3+0", [2, 4, 5, 6, 8, 9]),
    ({"packing": "concat"},
     "abc|de fghij| k|lmno pqrs|T he_qui ck_bro wn_fox |tuvwx yz|01| 234567 |89012",
     "0:0+0 0:2+2 0:3+0 0:4+4 1:0+1 1:0+7 1:0+13 1:0+19 2:0+5 2:2+0 2:2+6",
     [0, 2, 4, 4, 5, 5, 5, 6, 6, 8, 9]),
    ({"packing": "concat", "where": {"pile_set_name": "A"}}, "lmnopq rs|tuv wxyz|2 34567|",
     "0:4+0 0:4+6 2:0+3 2:2+1", [4, 6, 6, 8]),
    ({"packing": "document", "where": {"pile_set_name": ["A", "B"]}, "skip": 3},
     "The_qu tuvwxy 234567", "1:0+0 2:0+0 2:2+0", [5, 6, 8]),
    ({"packing": "concat", "skip": 8}, "234567 |89012", "2:2+0 2:2+6", [8, 9]),
    ({"packing": "document", "shuffle": 1}, "234567 lmnopq 890123 defghi The_qu tuvwxy",
     "2:2+0 0:4+0 2:3+0 0:2+0 1:0+0 2:0+0", [8, 4, 9, 2, 5, 6]),
    ({"packing": "concat", "shuffle": True, "skip": 2, "seed": 1},
     "abc|lm nopqrs |89012 3456|d efghij |The_q uick_b rown_f ox|tuv wxyz|k",
     "0:0+0 0:4+2 0:4+8 2:3+5 0:2+1 0:2+7 1:0+5 1:0+11 1:0+17 2:0+3",
     [0, 4, 9, 9, 2, 5, 5, 5, 6, 6]),
]  # fmt: skip
"""Options; sequences, with a bar for the end of text; file, row and offset at which each begins;
and the document with most of its tokens, the first of equal ones.
"""


@pytest.mark.parametrize("cuts", [WHOLE, SMALL])
@pytest.mark.parametrize(("options", "texts", "begins", "main"), GOLDEN)
def test_tokens_and_origins_are_those_written_here_in_shards_of_any_size_and_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cuts: tuple[int, int],
    options: dict[str, Any],
    texts: str,
    begins: str,
    main: list[int],
):
    if options["packing"] == "concat" and "shuffle" not in options and cuts != WHOLE:
        pytest.skip("joined documents are cut anew in each portion")
    cut_portions(monkeypatch, file_bytes=cuts[0], letters=cuts[1])
    paths = [tmp_path / name for name in GOLDEN_FILES]
    for path, rows in zip(paths, GOLDEN_FILES.values(), strict=True):
        if path.suffix == ".parquet":
            write_parquet(path, rows, row_group_size=2)
        else:
            path.write_bytes(packed(path.name, plain_bytes(rows)))
    expected = texts.split()
    for bos in (False, True):
        fields = {"n_ctx": LENGTH + bos, "bos": bos, "sequences_per_shard": 4}
        sequences = open_corpus(paths, **fields, **options)
        assert texts_of(sequences) == ["|" * bos + text for text in expected]
    tokens = all_tokens(sequences)
    origins = all_origins(sequences)
    files = [Path(file).name for file in origins["file"]]
    places = list(zip(files, origins["row"], origins["offset"], strict=True))
    assert [f"{file[0]}:{row}+{offset}" for file, row, offset in places] == begins.split()
    assert origins["pile_set_name"] == [GOLDEN_FILES[file][row][1] for file, row, _ in places]
    assert origins["document"] == main
    assert sum(fates_of(sequences).all.values()) == 10
    assert fates_of(sequences).all.get("skipped", 0) == options.get("skip", 0)
    # Read alone and backwards, each shard is the same, whatever its size.
    for per_shard in (1, 3):
        scan = sequences.scan.model_copy(update={"sequences_per_shard": per_shard})
        for number in reversed(range(-(-len(expected) // per_shard))):
            alone = Sequences(scan, byte_model(), sequences.index).shard(number).tokens.tolist()
            assert alone == tokens[number * per_shard : (number + 1) * per_shard]
    few = open_corpus(paths, sequences=2, **options)
    assert texts_of(few) == expected[:2]


def test_every_token_of_a_portion_but_those_at_its_end_is_in_one_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cut_portions(monkeypatch, file_bytes=300, letters=60)
    files = [[document(40 * i + j, 5 + (i + j) % 13) for j in range(40)] for i in range(3)]
    for i, rows in enumerate(files):
        path = tmp_path / f"{i}.jsonl{'.zst' * (i == 1)}"
        path.write_bytes(packed(path.name, plain_bytes(rows)))
    sequences = open_corpus(tmp_path / "*", "concat")
    index = sequences.index
    assert index is not None
    ends = [place.documents_before for place in index.places[1:]]
    documents = [row for rows in files for row in rows]
    portions = [documents[first:end] for first, end in pairwise([0, *ends])]
    assert len(portions) > 12
    assert all_tokens(sequences) == cut(portions, "concat")
    joined = sum(len(text.encode()) + 1 for text, _ in documents)
    assert index.unmeasured == joined - LENGTH * len(sequences)
    assert 0 < index.unmeasured < LENGTH * len(portions)
    # Rows count from the beginning of each file, wherever a range or a portion begins.
    origins = all_origins(sequences)
    names = [int(Path(file).name[0]) for file in origins["file"]]
    begins = list(zip(names, origins["row"], origins["pile_set_name"], strict=True))
    assert all(name == files[file][row][1] for file, row, name in begins)
    assert [max(row for file, row, _ in begins if file == i) for i in range(3)] == [39, 39, 39]


# What else is stored


@pytest.mark.parametrize(("packing", "used"), [("document", 5), ("concat", 3)])
def test_a_run_tells_of_its_corpus_up_to_its_last_sequence(tmp_path: Path, packing: str, used: int):
    lines = plain_bytes(document(i, 9) for i in range(16)).splitlines()
    lines[2], lines[13] = b"{", b"{}"
    path = write_lines(tmp_path / "a.jsonl", lines)
    fields = {"sequences_per_shard": 3, "bad_rows": 0.5}
    few = open_corpus(path, packing, sequences=5, **fields)
    # Another scan needs more of the corpus, and prepares it.
    everything = open_corpus(path, packing, **fields)
    again = open_corpus(path, packing, sequences=5, **fields)
    assert len(problems(everything)) == 2
    for sequences in (few, again):
        # Five documents, or those of 5 times 6 tokens, of which each document has 9 + 1.
        assert fates_of(sequences).all == {"used": used, "bad": 1}
        assert problems(sequences) == [f"{path}, line 3 (invalid JSON)"]
        assert all_tokens(sequences) == all_tokens(everything)[:5]
        assert [row for i in range(2) for row in sequences.shard(i).bad_rows] == problems(sequences)


def test_a_corpus_is_indexed_as_far_as_needed_with_a_few_numbers_a_portion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cut_portions(monkeypatch, documents=100)
    rows = [document(i, 9) for i in range(800)]
    path = write_jsonl(tmp_path / "0.jsonl", rows)
    sequences = open_corpus(path, sequences=550)
    assert sequences.index is not None
    assert len(sequences.index.portions) == 6
    assert len(pickle.dumps(sequences.index)) < 3000
    # The corpus is not read again.
    path.unlink()
    assert all_tokens(sequences) == cut([rows], "document")[:550]


def test_a_document_far_longer_than_a_sequence_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = "0123456789" * 20_000
    (tmp_path / "a.txt").write_text(text)
    fields = {"family": "text", "n_ctx": 100, "sequences_per_shard": 10}
    sequences = open_corpus(tmp_path / "a.txt", "concat", **fields)
    read: list[int] = []
    tokens = PortionFile.tokens

    def watched(file: PortionFile, start: int, stop: int) -> np.ndarray:
        read.append(stop - start)
        return tokens(file, start, stop)

    monkeypatch.setattr(PortionFile, "tokens", watched)
    assert sequences.shard(100).tokens.tolist() == [list(text[:100].encode())] * 10
    assert read == [1000]
