"""Corpus families: text in files, or in a data set on the Hub."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any, Literal

from schemas.errors import CorpusError, ScanError, printable
from schemas.places import StorePath, matching, place, reason
from workers.inputs.corpus import Corpus
from workers.inputs.documents import COMPRESSED, Source, open_hub
from workers.inputs.input_registry import input_family
from workers.inputs.text_files import located

Packing = Literal["document", "concat"]

PILE = {".jsonl": "jsonl", ".json": "json", ".parquet": "parquet"}
CSV = {".csv": "csv"}
TEXT = {"": "text"}
ANY_TEXT = PILE | CSV | TEXT
"""Kind of a file by its ending, .zst and .gz left out."""


def _split_of_files(options: dict[str, Any]) -> str | None:
    if options["files"] is None or options["split"] == "train":
        return None
    return "input.split: expected with a dataset only, got files; leave it out"


@input_family(refuse=_split_of_files)
def pile(
    *,
    files: str | list[str] | None = None,
    dataset: str | None = None,
    split: str = "train",
    packing: Packing = "document",
) -> Corpus:
    """Documents with fields, as the Pile has them (`text`, `meta.pile_set_name`): .jsonl, .json or
    .parquet files, or a Hub data set.

    * `dataset`: a data set of the Hub, for example `NeelNanda/pile-10k`, instead of `files`.
    * `split`: the part of the data set that is read.
    """
    if (files is None) == (dataset is None):
        raise ScanError(
            "input: the family pile needs either files (paths or globs) or dataset (a Hub name)"
        )
    if dataset is not None:
        parts = open_hub(dataset, split).num_shards
        return Corpus(
            tuple(Source("hub", dataset, 0, split, part, parts) for part in range(parts)), packing
        )
    return Corpus(_list(files or [], PILE), packing)


@input_family
def csv_texts(*, files: str | list[str], packing: Packing = "document") -> Corpus:
    """Rows of .csv files with a column text; a column dataset, where there is one, becomes
    `pile_set_name`.

    Made for the 300 texts of Ran-Milo et al. 2026, of 40 tokens each (n_ctx = 40, bos = false).
    """
    return Corpus(_list(files, CSV), packing)


@input_family
def shuffled_text(*, files: str | list[str], packing: Packing = "document") -> Corpus:
    """Text whose tokens are permuted within each sequence: natural text without its order.

    After Mahmood's reproduction of Ran-Milo et al. 2026. The permutation depends on the seed and
    the sequence.
    """
    return Corpus(_list(files, ANY_TEXT), packing, tokens_shuffled=True)


@input_family
def repeated_text(
    *, files: str | list[str], chunk: int, repeat_bos: bool = False, packing: Packing = "document"
) -> Corpus:
    """The first `chunk` tokens of a text, repeated to the end of the sequence (Scheuer,
    attention-sink-profiler).

    With packing by document, each text gives one chunk. BOS, where the scan has it, stands at
    position 0 and is not counted in `chunk`; with `repeat_bos` it stands before every copy.
    """
    if chunk < 1:
        raise ScanError(f"input.chunk: expected 1 or more tokens, got {chunk}")
    return Corpus(_list(files, ANY_TEXT), packing, chunk=chunk, repeat_bos=repeat_bos)


@input_family
def text(*, files: str | list[str], packing: Packing = "document") -> Corpus:
    """Plain UTF-8 text files, each one document; `bundled:LICENSE` is a file of this project."""
    return Corpus(_list(files, TEXT), packing)


def _list(files: str | list[str], kinds: dict[str, str]) -> tuple[Source, ...]:
    """The files of paths and globs, each once, in the order of their names."""
    patterns = [files] if isinstance(files, str) else files
    if not patterns:
        raise ScanError("input.files: expected at least one path or glob, got []")
    found: dict[str, tuple[str, int]] = {}
    for pattern in patterns:
        where = place(located(pattern))
        if isinstance(where, StorePath):
            found |= {str(p): (str(p), size) for p, size in _in_store(where)}
            continue
        path = str(where)
        if os.path.isdir(path):
            raise CorpusError(
                f"input.files: {pattern!r} is a directory; expected files, for instance "
                f"{pattern.rstrip('/')}/*"
            )
        matched = (
            [path]
            if os.path.isfile(path)
            else [p for p in glob.glob(path, recursive=True) if os.path.isfile(p)]
        )
        if not matched:
            raise CorpusError(f"input.files: no file matches {pattern!r} (in {Path.cwd()})")
        for p in matched:
            found.setdefault(os.path.realpath(p), (p, os.path.getsize(p)))
    sources: list[Source] = []
    for path, size in sorted(found.values(), key=lambda p: (Path(p[0]).name, p[0])):
        sources.append(Source(_kind(path, kinds), path, size))
    return tuple(sources)


def _kind(path: str, kinds: dict[str, str]) -> str:
    """What is in a file, by its ending."""
    packed = path.endswith(COMPRESSED)
    inner = path.rpartition(".")[0] if packed else path
    kind = next((kind for ending, kind in kinds.items() if inner.endswith(ending)), None)
    if kind is None or (packed and kind == "parquet"):
        raise CorpusError(
            f"{printable(path)}: expected a file that ends in {', '.join(kinds)}; those of text may "
            "also be packed (.zst, .gz)"
        )
    return kind


def _in_store(pattern: StorePath) -> list[tuple[StorePath, int]]:
    try:
        found = matching(pattern)
    except OSError as error:
        raise CorpusError(f"input.files: {pattern} cannot be listed ({reason(error)})") from None
    if not found:
        raise CorpusError(f"input.files: no object matches {str(pattern)!r}")
    return found
