"""Small corpora whose tokens are bytes, and what their sequences must be."""

import gzip
import io
import json
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from headcount.schemas.errors import CorpusError, HeadcountError, ScanError
from headcount.schemas.files.document_fates import Fates
from headcount.workers.inputs.input_registry import CHOICE
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.inputs.store.extents import extents_of
from headcount.workers.inputs.store.preparation import prepare_extent
from headcount.workers.model.model_info import ModelInfo
from tests.toys.toy_models import BYTE_BOS, byte_tokenizer, toy_info, toy_scan

LENGTH = 6

CORPORA = tempfile.TemporaryDirectory(prefix="headcount-corpora-")
"""Where the token stores of these corpora lie. They are told apart by the paths of their files."""

Row = tuple[str, str | None]
"""Text and pile_set_name."""


def document(number: int, length: int) -> Row:
    """A text of `length` bytes that differs from those of other numbers."""
    if length <= 2:
        text = "xy"[:length]
    else:
        letters = "abcdefghijklmnopqrstuvwxyz"
        # The last letter is two bytes long, so bytes and letters are not the same count.
        text = "".join(letters[(number * 7 + i * i) % 26] for i in range(length - 2)) + "ä"
    return text, [None, "ArXiv", "Pile-CC"][number % 3]


def documents(*lengths: int) -> list[Row]:
    """Documents of these lengths."""
    return [document(i, length) for i, length in enumerate(lengths)]


def plain_bytes(rows: Iterable[Row]) -> bytes:
    """Documents as lines of JSON."""
    fields = [
        {"text": text} | ({"meta": {"pile_set_name": name}} if name else {}) for text, name in rows
    ]
    return "".join(f"{json.dumps(each, ensure_ascii=False)}\n" for each in fields).encode()


def write_jsonl(path: Path, rows: Iterable[Row]) -> Path:
    path.write_bytes(plain_bytes(rows))
    return path


def write_lines(path: Path, lines: Iterable[bytes]) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def open_corpus(
    files: Any,
    packing: str = "document",
    family: str = "pile",
    info: ModelInfo | None = None,
    **changes: Any,
) -> Sequences:
    """The sequences of LENGTH tokens of some files, indexed; changes of the scan, or options of the
    family. The model reads bytes if none is named.
    """
    files = [str(file) for file in files] if isinstance(files, list | tuple) else str(files)
    choice = {name: changes.pop(name) for name in CHOICE if name in changes}
    options = {"family": family, "files": files, "packing": packing, **choice}
    fields = {"bos": False, "n_ctx": LENGTH, "sequences": "all", "input": options} | changes
    sequences = Sequences(toy_scan(**fields), info or byte_model())
    make_index(sequences)
    sequences.check_index()
    return sequences


def make_index(sequences: Sequences) -> None:
    """Prepare as much of a corpus as its sequences need, and give them their index."""
    assert sequences.corpus is not None
    store = sequences.store(Path(CORPORA.name))
    store.create()
    index = sequences.new_index(store)
    for extent in extents_of(sequences.corpus.sources):
        list(prepare_extent(store, extent, sequences.tokenizer))
        for _, portion in sorted(store.portions()[extent.key].items()):
            if not index.may_stop:
                index.add(extent.first_source, portion)
    sequences.use_index(index.ended())


def all_tokens(sequences: Sequences) -> list[list[int]]:
    return np.concatenate([sequences.shard(i).tokens for i in range(sequences.shards)]).tolist()


def texts_of(sequences: Sequences) -> list[str]:
    """The sequences as texts, in which a bar stands for the end of text."""
    return [
        "".join("|" if i == BYTE_BOS else chr(i) for i in tokens)
        for tokens in all_tokens(sequences)
    ]


def all_origins(sequences: Sequences) -> dict[str, list[Any]]:
    shards = [sequences.shard(i).origin for i in range(sequences.shards)]
    return {key: [value for origin in shards for value in origin[key]] for key in shards[0]}


def problems(sequences: Sequences) -> list[str]:
    """The bad documents of a corpus."""
    assert sequences.findings is not None
    return list(sequences.findings.problems)


def cut(files: Iterable[Iterable[Row]], packing: str, length: int = LENGTH) -> list[list[int]]:
    """The expected sequences: bytes of documents, or of documents joined by the end of text."""
    sequences: list[list[int]] = []
    for rows in files:
        texts = [list(text.encode()) for text, _ in rows]
        if packing == "document":
            sequences += [ids[:length] for ids in texts if len(ids) >= length]
        else:
            joined = [token for ids in texts for token in [*ids, BYTE_BOS]]
            sequences += [
                joined[i : i + length] for i in range(0, len(joined) - length + 1, length)
            ]
    return sequences


def fates_of(sequences: Sequences) -> Fates:
    """What became of the documents of a corpus."""
    assert sequences.fates is not None
    return sequences.fates


def problem_of(files: Any, **changes: Any) -> str:
    """The one line that a corpus is refused with, by its index or by one of its shards."""
    with pytest.raises(HeadcountError) as caught:
        all_tokens(open_corpus(files, **changes))
    assert isinstance(caught.value, CorpusError | ScanError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def byte_info(path: Path) -> ModelInfo:
    """A model that reads bytes, in a directory; its weights are never asked for."""
    byte_tokenizer(path)
    return toy_info(
        path=str(path),
        name="bytes",
        n_ctx=1024,
        d_vocab=257,
        bos_token_id=BYTE_BOS,
        eos_token_id=BYTE_BOS,
    )


@cache
def byte_model() -> ModelInfo:
    """The model of bytes that corpora are read for."""
    folder = Path(CORPORA.name) / "model"
    folder.mkdir()
    return byte_info(folder)


def packed(name: str, content: bytes) -> bytes:
    """The content of a file, compressed as its name says."""
    if name.endswith(".gz"):
        return gzip.compress(content)
    return zstandard.compress(content) if name.endswith(".zst") else content


def parquet_bytes(rows: Iterable[Row], meta: str = "struct", **options: Any) -> bytes:
    """A Parquet file whose column meta is a struct or JSON."""
    texts, names = zip(*rows, strict=True)
    metas: list[Any] = [{"pile_set_name": name} for name in names]
    if meta == "json":
        metas = [json.dumps(fields) for fields in metas]
    columns = {"id": list(range(len(texts))), "text": list(texts), "meta": metas}
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, **options)
    return file.getvalue()


def write_parquet(path: Path, rows: Iterable[Row], meta: str = "struct", **options: Any) -> Path:
    path.write_bytes(parquet_bytes(rows, meta, **options))
    return path
