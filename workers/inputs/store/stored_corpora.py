"""What lies in the token stores of a folder, for the commands that list, show and remove them."""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.fs as pafs

from headcount.schemas.errors import CorpusError, RunError, printable, unknown
from headcount.schemas.files.places import Place, names, reason, stats
from headcount.workers.inputs.corpus.documents import Source
from headcount.workers.inputs.store.preparation import is_whole
from headcount.workers.inputs.store.token_store import (
    BAD,
    STORE_FILE,
    Portion,
    PortionRecord,
    TokenStore,
    forget_open_files,
    open_portion,
    read_record,
    values_of,
)

STORE_NAME = re.compile(r"[0-9a-f]{12}")

LISTED_PROBLEMS = 100
"""Bad rows of a file that are listed."""

READERS = 16
"""Portions that are looked at at once: a store of objects answers each request slowly."""


@dataclass(frozen=True)
class StoredCorpus:
    """What lies in a token store."""

    key: str
    """Its name in the folder."""
    store: TokenStore | None
    problem: str | None
    """What cannot be read of it: another version, a broken description, a damaged portion."""
    documents: int
    """Bad ones included."""
    tokens: int
    bad: int
    bytes: int
    """Of all files in the folder."""
    changed: datetime | None
    """When the newest of them was written."""


@dataclass
class StoredFile:
    """What a token store holds of one file, or of one part of a data set."""

    name: str
    """Path or address."""
    bytes: int
    """Its size when it was prepared; 0 for a data set."""
    documents: int = 0
    """Bad ones included."""
    tokens: int = 0
    bad: int = 0
    empty: int = 0
    """Documents without a token."""
    whole: bool = False
    """Whether it is prepared from its beginning to its end."""
    problems: list[str] = field(default_factory=list[str])
    """The first bad rows, each with its place and what is wrong with it."""


def stored_corpora(corpora: Place) -> list[StoredCorpus]:
    """The token stores in a folder, in the order of their keys."""
    keys = sorted(name for name in names(corpora) if STORE_NAME.fullmatch(name))
    return [stored_corpus(corpora, key) for key in keys]


def stored_corpus(corpora: Place, key: str) -> StoredCorpus:
    """The token store of that key; refuse a key that the folder does not have."""
    folder = _folder_of(corpora, key)
    if isinstance(folder, Path):
        files = [
            (status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))
            for _, status in stats(folder)
        ]
    else:
        listed = folder.filesystem.get_file_info(pafs.FileSelector(folder.key))
        files = [(info.size or 0, info.mtime) for info in listed]
    store = problem = None
    records: list[PortionRecord] = []
    try:
        store = TokenStore.read(folder)
        if store is None:
            problem = f"{folder / STORE_FILE}: not there"
        else:
            extents = store.portions().values()
            portions = [portion for extent in extents for portion in extent.values()]
            with ThreadPoolExecutor(READERS) as readers:
                records += readers.map(partial(read_record, store), portions)
    except (RunError, CorpusError) as error:
        problem = str(error)
    return StoredCorpus(
        key=key,
        store=store,
        problem=problem,
        documents=sum(record.documents for record in records),
        tokens=sum(record.tokens for record in records),
        bad=sum(record.bad for record in records),
        bytes=sum(size for size, _ in files),
        changed=max((changed for _, changed in files), default=None),
    )


def stored_files(corpora: Place, key: str) -> list[StoredFile]:
    """What a token store holds of each file, in the order of their names."""
    folder = _folder_of(corpora, key)
    store = TokenStore.read(folder)
    if store is None:
        raise RunError(f"{folder / STORE_FILE}: not there; remove this store")
    # By the file as it was, and by where a range of it begins. A file may have been read alone and
    # together with others.
    found: dict[tuple[str, str, int, int], dict[int, tuple[StoredFile, int | None]]] = {}
    for portions in store.portions().values():
        for file, start, part, stop in _parts_of(store, portions):
            parts = found.setdefault(file, {})
            if start not in parts or parts[start][0].documents < part.documents:
                parts[start] = part, stop
    files: list[StoredFile] = []
    for (_, name, size, _), parts in sorted(found.items(), key=lambda item: item[0][1]):
        stored = StoredFile(name, size)
        end: int | None = 0
        for start in sorted(parts):
            part, stop = parts[start]
            stored.documents += part.documents
            stored.tokens += part.tokens
            stored.bad += part.bad
            stored.empty += part.empty
            stored.problems += part.problems
            end = stop if start == end and part.whole else -1
        stored.whole = end is None
        del stored.problems[LISTED_PROBLEMS:]
        files.append(stored)
    return files


def _parts_of(
    store: TokenStore, portions: dict[int, Portion]
) -> Iterator[tuple[tuple[str, str, int, int], int, StoredFile, int | None]]:
    """What the portions of an extent hold of each file, and where the extent begins and ends."""
    parts: dict[int, StoredFile] = {}
    files: dict[int, tuple[str, str, int, int]] = {}
    record = read_record(store, portions[max(portions)])
    for portion in sorted(portions.values()):
        file = open_portion(store, portion)
        documents = file.documents()
        sources = values_of(documents["source"])
        for number, (kind, name, size, changed) in file.record.files.items():
            first, end = np.searchsorted(sources, [int(number), int(number) + 1])
            of_file = documents.slice(first, end - first)
            n_tokens = values_of(of_file["n_tokens"])
            files[int(number)] = kind, name, size, changed
            part = parts.setdefault(int(number), StoredFile(name, size))
            part.documents += len(n_tokens)
            part.tokens += int(np.maximum(n_tokens, 0).sum())
            part.bad += int((n_tokens == BAD).sum())
            part.empty += int((n_tokens == 0).sum())
            bad = of_file.filter(of_file["problem"].is_valid()).slice(0, LISTED_PROBLEMS)
            for row in bad.select(["row", "offset", "problem"]).to_pylist():
                place = Source(kind, name, size).place_of(row["row"])
                if record.start:
                    # How many lines lie before the range is not known here.
                    unit = "row" if kind == "parquet" else "byte"
                    place = f"{printable(name)}, {unit} {row['offset'] + 1:,}"
                part.problems.append(f"{place} ({printable(row['problem'])})")
    for number, part in parts.items():
        # A source is read to its end if a later one is begun.
        part.whole = is_whole(portions) or number < max(parts)
        yield files[number], record.start, part, record.stop


def remove_corpus(corpora: Place, key: str) -> None:
    """Delete a token store."""
    folder = _folder_of(corpora, key)
    try:
        if isinstance(folder, Path):
            shutil.rmtree(folder)
        else:
            folder.filesystem.delete_dir(folder.key)
    except OSError as error:
        raise RunError(
            f"{folder}: cannot be deleted whole ({reason(error)}); mend that, and the same command "
            "continues"
        ) from None
    forget_open_files()


def _folder_of(corpora: Place, key: str) -> Place:
    known = [name for name in names(corpora) if STORE_NAME.fullmatch(name)]
    if key not in known:
        raise RunError(f"{corpora}: {unknown('corpus', key, known)}")
    return corpora / key
