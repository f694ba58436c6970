"""What a scan may read: files that are not what their names say, and files that are no input."""

import bz2
import gzip
import json
import lzma
import os
import shutil
import socket
import unicodedata
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from headcount.jobs.corpus.preparation import special_tokens_line
from headcount.reproduce.replication import Replication, read_toml
from headcount.schemas.errors import CorpusError, HeadcountError, ModelError, ScanError
from headcount.schemas.files.beginnings import LFS_POINTER
from headcount.schemas.files.input_files import ROOTS, open_input
from headcount.workers.inputs.corpus.documents import Source, checked_builder, open_hub
from headcount.workers.inputs.corpus.text_files import read_text
from headcount.workers.model.info.description import describe, find_model
from headcount.workers.model.info.text_tokenizer import TextTokenizer, load_tokenizer
from tests.toys.object_stores import object_store
from tests.toys.refusals import refused
from tests.toys.toy_corpora import (
    all_origins,
    all_tokens,
    documents,
    open_corpus,
    plain_bytes,
    problem_of,
    texts_of,
    write_jsonl,
)
from tests.toys.toy_models import byte_tokenizer

LINES = plain_bytes(documents(8, 9))
# Without the time, which would stand in the names of the tests and differ between processes.
GZIPPED = gzip.compress(LINES, mtime=0)
HALVES = LINES.splitlines(keepends=True)
GZIPPED_HALVES = b"".join(gzip.compress(half, mtime=0) for half in HALVES)
SKIPPABLE = b"\x52\x2a\x4d\x18\x04\x00\x00\x00none"

no_input = partial(refused, ScanError)
"""The one line that a file is refused with which is no input."""


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# Forms


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("padded.jsonl.gz", GZIPPED + bytes(17)),
        ("members.jsonl.gz", GZIPPED_HALVES + bytes(512)),
        ("capitals.JSONL.GZ", GZIPPED),
        ("capitals.Jsonl", LINES),
        ("streams.jsonl.bz2", bz2.compress(HALVES[0]) + bz2.compress(HALVES[1])),
        ("streams.jsonl.xz", lzma.compress(HALVES[0]) + lzma.compress(HALVES[1])),
        ("skippable.jsonl.zst", SKIPPABLE + zstandard.compress(LINES) + SKIPPABLE),
    ],
)
def test_a_compressed_file_is_read_to_its_end(tmp_path: Path, name: str, content: bytes):
    expected = all_tokens(open_corpus(write_jsonl(tmp_path / "a.jsonl", documents(8, 9))))
    assert all_tokens(open_corpus(write(tmp_path / name, content))) == expected
    # A family of any text knows what it is, too.
    options = {"family": "repeated_text", "files": str(tmp_path / name), "chunk": 6}
    assert all_tokens(open_corpus(tmp_path / name, input=options)) == expected


PROMISED = "is not gzip, as its name says; is the file complete, or its name wrong?"
UNSAID = "is {}, and its name does not say so; let its name end in {}"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
ICONV = "looks like {0}, expected UTF-8; iconv -f {0} -t UTF-8 FILE converts it"


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.jsonl", GZIPPED, UNSAID.format("gzip", ".gz")),
        ("a.jsonl.zst", GZIPPED, UNSAID.format("gzip", ".gz")),
        ("a.jsonl.gz", LINES, PROMISED),
        ("a.jsonl.gz", b"", PROMISED.replace("not", "empty, not", 1)),
        ("a.jsonl.gz", GZIPPED[:-9], "cannot be read (…); is the file complete?"),
        ("a.jsonl.gz", GZIPPED + b"more", "cannot be read (…); is the file complete?"),
        ("a.jsonl.xz", lzma.compress(LINES)[:-9], "cannot be read (…); is the file complete?"),
        ("a.jsonl", b"PAR1\x15\x00", UNSAID.format("Parquet", ".parquet")),
        ("a.parquet", POINTER, LFS_POINTER),
        ("a.jsonl", POINTER, LFS_POINTER),
        ("a.jsonl", LINES.decode().encode("utf-16"), ICONV.format("UTF-16")),
        ("a.jsonl", LINES.decode().encode("utf-16-be"), ICONV.format("UTF-16BE")),
        ("a.json", LINES.decode().encode("utf-32-le"), ICONV.format("UTF-32LE")),
    ],
)  # fmt: skip
def test_a_file_that_is_something_else_says_what(
    tmp_path: Path, name: str, content: bytes, line: str
):
    path = write(tmp_path / name, content)
    begin, _, end = f"{path}: {line}".partition("…")
    told = problem_of(path)
    assert told.startswith(begin)
    assert told.endswith(end)
    if content is POINTER:
        assert problem_of(path, family="text") == f"{path}: {line}"


def test_what_is_no_file_says_what_it_is(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "link.jsonl").symlink_to("nowhere")
    with socket.socket(socket.AF_UNIX) as listening:
        # The path of a socket must be short.
        os.chdir(tmp_path)
        listening.bind("socket.jsonl")
        told = [problem_of(tmp_path / f"{name}.jsonl") for name in ("pipe", "socket", "link")]
    assert told == [
        f"{tmp_path}/pipe.jsonl: is a pipe; expected a file",
        f"{tmp_path}/socket.jsonl: is a socket; expected a file",
        f"input.files: {tmp_path}/link.jsonl, a link to nowhere: cannot be read (No such file or "
        "directory)",
    ]


def test_where_all_documents_are_bad_none_is_left_out(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", b'{"messages": []}\n' * 2)
    chat = (
        "has no field text; found messages; messages holds chats, and no template is applied to "
        "them: write each chat as one text into a field text"
    )
    assert problem_of(path) == (
        f"input: all 2 documents are bad: {path}, line 1 ({chat}), {path}, line 2 ({chat}); mend "
        "or replace them"
    )


def test_an_error_shows_no_more_of_a_file_than_the_beginning_of_its_names(tmp_path: Path):
    path = write(tmp_path / "a.csv", b"AWS_SECRET_ACCESS_KEY=" + b"x" * 100 + b"SECRET,b\n1,2\n")
    assert "SECRET," not in problem_of(path, family="csv_texts")


# Values that are not text

FAR = 2**62
LONG = "9" * 5000
COLUMNS: dict[str, tuple[Any, str]] = {
    "far": (pa.array([FAR], pa.timestamp("us")), "148108-07-06 14:00:27.387904"),
    "zone": (pa.array([0], pa.timestamp("us", "Mars/Olympus")), "1970-01-01 00:00:00+00"),
    "year_0": (pa.array([-719528], pa.date32()), "0001-01-01 (BC)"),
    "last": (pa.array([2**31 - 1], pa.date32()), "infinity"),
    "inner": (
        pa.array([[{"at": FAR}]], pa.list_(pa.struct([("at", pa.timestamp("us"))]))),
        '[{"at": "148108-07-06 14:00:27.387904"}]',
    ),
    "half": (pa.array([1.5], pa.float16()), "1.5"),
    "unsigned": (pa.array([2**64 - 1], pa.uint64()), "18446744073709551615"),
    "large": (pa.array(["a"], pa.large_string()), "a"),
    "coded": (pa.array(["a"]).dictionary_encode(), "a"),
    "map": (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int8())), '[["k", 1]]'),
}
IN_ARROW: dict[str, tuple[Any, str]] = {
    "view": (pa.array(["a"], pa.string_view()), "a"),
    "runs": (
        pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), COLUMNS["far"][0]),
        COLUMNS["far"][1],
    ),
}


@pytest.mark.parametrize("form", ["parquet", "file", "stream"])
def test_values_that_python_cannot_hold_are_carried_as_text(tmp_path: Path, form: str):
    columns = COLUMNS if form == "parquet" else COLUMNS | IN_ARROW
    named = {name: array for name, (array, _) in columns.items()}
    # Nobody names the fields of `meta`.
    meta = pa.array([{"at": FAR, "pile_set_name": "a"}], pa.struct(
        [("at", pa.timestamp("us", "America/New_York")), ("pile_set_name", pa.string())]
    ))  # fmt: skip
    table = pa.table({"text": ["abcdefgh"], "meta": meta, **named})
    path = tmp_path / ("a.parquet" if form == "parquet" else "a.arrow")
    if form == "parquet":
        pq.write_table(table, path)
    else:
        writer = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as out, writer(out, table.schema) as batches:
            batches.write_table(table)
    origins = all_origins(open_corpus(path, columns=list(columns)))
    assert {name: origins[f"doc_{name}"] for name in columns} == {
        name: [text] for name, (_, text) in columns.items()
    }
    assert origins["pile_set_name"] == ["a"]


def test_an_integer_of_any_length_is_json(tmp_path: Path):
    line = f'{{"text": "abcdefgh", "n": {LONG}, "meta": "{{\\"m\\": [{LONG}, 1]}}"}}\n'
    sequences = open_corpus(write(tmp_path / "a.jsonl", line.encode()), columns=["n", "m"])
    origins = all_origins(sequences)
    assert (origins["doc_n"], origins["doc_m"]) == ([LONG], [f'["{LONG}", 1]'])


def test_a_column_may_be_null_or_in_later_documents_alone(tmp_path: Path):
    lines = [b'{"text": "abcdefgh", "no": null}'] * 3 + [b'{"text": "abcdefgh", "tag": "x"}']
    path = write(tmp_path / "a.jsonl", b"\n".join(lines))
    origins = all_origins(open_corpus(path, columns=["no", "tag"], sequences=2))
    assert (origins["doc_no"], origins["doc_tag"]) == ([None, None], [None, None])
    assert problem_of(path, columns=["tg"], sequences=2).startswith(
        "input.columns: none of the 4 documents read has a field tg, nor its meta; "
    )


def test_special_tokens_in_texts_are_counted_and_stay_text(tmp_path: Path):
    byte_tokenizer(tmp_path)
    tokenizer = TextTokenizer(tmp_path, 257)
    (special,) = tokenizer.special_tokens
    texts = [f"a {special} b {special}", "<b>bold</b>", special]
    lines = "".join(f'{{"text": "{text}"}}\n' for text in texts)
    sequences = open_corpus(write(tmp_path / "a.jsonl", lines.encode()))
    assert texts_of(sequences)[0] == texts[0][:6]
    assert sequences.reader.spelled_out == {special: 2}
    line = special_tokens_line(sequences.reader)
    assert f"which stay text ({special} in 2)" in str(line)
    plain = open_corpus(write(tmp_path / "b.jsonl", b'{"text": "<b>bold</b>"}\n'))
    assert special_tokens_line(plain.reader) is None


# Names


def test_an_object_comes_before_the_pattern_that_its_name_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    names = [
        "a?b.jsonl",
        "a#b.jsonl",
        "a+b.jsonl",
        "a[1].jsonl",
        "a1.jsonl",
        "*.jsonl",
        "5% b.jsonl",
        "a:b.jsonl",
        # One letter in two forms, which are two files.
        unicodedata.normalize("NFC", "aé.jsonl"),
        unicodedata.normalize("NFD", "aé.jsonl"),
    ]
    with object_store(monkeypatch) as store:
        for name in names:
            for place in ("here", "s3://bucket/c"):
                if place == "here":
                    write(tmp_path / name, LINES)
                else:
                    assert store.request("PUT", f"/bucket/c/{quote(name)}", LINES)[0] == 200
        store.request("PUT", "/bucket/c/folder.jsonl/", b"")
        for folder in (str(tmp_path), "s3://bucket/c"):
            for name in names:
                origins = all_origins(open_corpus(f"{folder}/{name}"))
                assert set(origins["file"]) == {f"{folder}/{name}"}
            origins = all_origins(open_corpus(f"{folder}/a*.jsonl"))
            assert set(origins["file"]) == {f"{folder}/{n}" for n in names if n.startswith("a")}


# What is no input


def test_files_that_show_the_system_are_no_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")
    (tmp_path / "link.txt").symlink_to("/proc/self/environ")
    (tmp_path / "folder").symlink_to("/proc/self")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.txt").symlink_to("/proc/self/environ")
    card = "---\nconfigs:\n- config_name: default\n  data_files: {}\n---\n"
    for name, file in (("card", f"{tmp_path}/link.txt"), ("url", f"file://{tmp_path}/link.txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "README.md").write_text(card.format(file))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").symlink_to("/proc/self/environ")
    claim = '[[finding]]\nname = "a"\nfile = "/proc/self/environ"\n'
    (tmp_path / "own.toml").write_text(claim)
    patterns = [
        "/proc/self/environ", "file:///proc/self/environ", "/proc/self/envir*", "/dev/null",
        "/sys/kernel/mm/transparent_hugepage/enabled", f"{tmp_path}/link.txt",
        f"{tmp_path}/li*.txt", f"{tmp_path}/folder/environ",
        f"{tmp_path}/../../../../../../proc/self/environ",
    ]  # fmt: skip
    told = [problem_of(pattern, family="text") for pattern in patterns]
    told += [no_input(open_hub, str(tmp_path / name), "train") for name in ("set", "card", "url")]
    told += [no_input(read_text, "/proc/self/environ")]
    told += [no_input(find_model, str(tmp_path / "model")), no_input(find_model, "/proc/self")]
    told += [no_input(checked_builder, str(tmp_path / "card"), "test", "default")]
    for line in told:
        assert "a secret" not in line
        assert "lies in /" in line or line == "/dev/null: is a device; expected a file", line


def test_an_input_that_becomes_a_link_is_refused_when_it_is_read(tmp_path: Path):
    source = Source("text", str(write(tmp_path / "a.txt", b"abc")), 3)
    assert [document.text for document in source.documents()] == ["abc"]
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.txt").symlink_to("/proc/self/environ")
    assert "lies in /proc" in no_input(lambda: list(source.documents()))
    # A pipe to which nobody writes keeps nobody waiting.
    os.mkfifo(tmp_path / "pipe")
    assert no_input(open_input, tmp_path / "pipe").endswith("pipe: is a pipe; expected a file")


@pytest.mark.parametrize(
    "link", ["templates/a.jinja", "deep/er/model.safetensors", "folder/inside"]
)
def test_a_link_anywhere_in_the_directory_of_a_model_is_refused(tmp_path: Path, link: str):
    byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)) == tmp_path
    (tmp_path / link).parent.mkdir(parents=True)
    (tmp_path / link).symlink_to("/proc/self" if link == "folder/inside" else "/proc/self/environ")
    assert no_input(find_model, str(tmp_path)).startswith(f"{tmp_path / link}: lies in /proc")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
def test_a_file_of_a_model_that_becomes_a_link_is_refused_when_it_is_read(
    tmp_path: Path, name: str
):
    directory = tmp_path / "model"
    shutil.copytree(find_model("bundled:llama-mini"), directory)
    path = find_model(str(directory))
    assert describe(path).path == str(directory)
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to("/proc/self/environ")
    assert no_input(describe, path).startswith(f"{path / name}: lies in /proc")


def word_tokenizer(directory: Path, **settings: str) -> Path:
    """A tokenizer of words that has no tokenizer.json."""
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "a"]
    (directory / "vocab.txt").write_text("\n".join(words))
    fields = {"tokenizer_class": "BertTokenizer", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    return directory


def test_a_tokenizer_is_read_from_no_files_that_its_settings_name(tmp_path: Path):
    secret = write(tmp_path / "secret.txt", b"[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\na secret\n")
    plain = load_tokenizer(word_tokenizer(tmp_path)).get_vocab()
    assert plain["a"] == 5
    for field in ("vocab_file", "tokenizer_file", "spm_file"):
        assert load_tokenizer(word_tokenizer(tmp_path, **{field: str(secret)})).get_vocab() == plain
    for field in ("vocab", "merges"):
        told = refused(ModelError, load_tokenizer, word_tokenizer(tmp_path, **{field: str(secret)}))
        assert told.startswith(f"{tmp_path}/tokenizer_config.json: {field} names a file, ")
    word_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    (tmp_path / "vocab.txt").symlink_to("/proc/self/environ")
    assert "lies in /proc" in no_input(load_tokenizer, tmp_path)


def test_inputs_lie_in_the_directories_that_a_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("texts", "other"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.txt", b"abcdefgh")
    (tmp_path / "texts" / "link.txt").symlink_to(tmp_path / "other" / "a.txt")
    monkeypatch.setenv(ROOTS, f"{tmp_path}/texts:/nowhere")
    assert texts_of(open_corpus(tmp_path / "texts" / "a.txt", family="text")) == ["abcdef"]
    assert len(open_corpus("bundled:LICENSE", family="text")) == 1
    for outside in ("other/a.txt", "texts/link.txt", "texts/../other/a.txt", "oth*/a.txt"):
        told = problem_of(tmp_path / outside, family="text")
        assert told.endswith(
            f": lies outside of the directories that {ROOTS} names ({tmp_path}/texts:/nowhere); "
            "move it there, or add its directory"
        )
    for call in (
        lambda: open_hub(str(tmp_path / "other"), "train"),
        lambda: find_model(str(tmp_path / "other")),
        lambda: read_text(str(tmp_path / "other" / "a.txt")),
        lambda: read_toml(tmp_path / "other" / "a.txt", Replication),
    ):
        assert "lies outside of" in no_input(call)
    assert find_model("bundled:gpt2-mini").name == "gpt2-mini"


# Data sets


def test_a_data_set_that_cannot_be_read_says_which_files_can(tmp_path: Path):
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"text": ["abcdefgh"] * 2})
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "split")
    for name, folder in (("saved", "saved"), ("split", "split/train")):
        told = refused(CorpusError, open_hub, str(tmp_path / name), "train")
        files = f"{tmp_path / folder}/*.arrow"
        assert told.endswith(
            "was saved by save_to_disk; name its files in files in place of dataset: files = "
            f"{files!r}"
        )
        assert texts_of(open_corpus(files)) == ["abcdef"] * 2
    (tmp_path / "two").mkdir()
    write(tmp_path / "two" / "a.jsonl", b'{"text": "abcdefgh"}\n')
    write(tmp_path / "two" / "b.jsonl", b'{"text": "abcdefgh", "other": [1]}\n')
    sources = [Source("hub", str(tmp_path / "two"), 0, "train", part, 2) for part in range(2)]
    with pytest.raises(HeadcountError, match=r"; name its files in files in place of dataset"):
        [list(source.documents()) for source in sources]
    assert texts_of(open_corpus(tmp_path / "two" / "*")) == ["abcdef"] * 2
