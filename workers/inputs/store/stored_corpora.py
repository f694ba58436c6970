"""What lies in the token stores of a folder, for the commands that list, show and remove them."""

import re
import shutil
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from headcount.schemas.errors import CorpusError, RunError, printable, unknown
from headcount.schemas.object_stores import delete_directory, listed
from headcount.schemas.places import Place, names, stats
from headcount.schemas.reasons import reason
from headcount.workers.inputs.corpus.documents import Source
from headcount.workers.inputs.store.preparation import is_whole
from headcount.workers.inputs.store.token_store import (
    BAD,
    STORE_FILE,
    PortionRecord,
    TokenStore,
    forget_open_files,
    open_portion,
    read_record,
)

STORE_NAME = re.compile(r"[0-9a-f]{12}")

LISTED_PROBLEMS = 100  # bad rows of a file that are listed
READERS = 16  # portions that are looked at at once: a store of objects answers each request slowly


@dataclass(frozen=True)
class StoredCorpus:
    """What lies in a token store. Documents that are bad count, too."""

    key: str
    store: TokenStore | None
    problem: str | None  # what cannot be read: another version, a broken or damaged file
    documents: int
    tokens: int
    bad: int
    bytes: int  # of all files in the folder
    changed: datetime | None  # when the newest of them was written


@dataclass
class StoredFile:
    """What a token store holds of one file, of a range of it, or of one part of a data set."""

    name: str
    bytes: int  # its size when it was prepared; 0 for a data set
    stop: int | None = None
    documents: int = 0
    tokens: int = 0
    bad: int = 0
    empty: int = 0  # documents without a token
    whole: bool = False  # whether it is prepared from its beginning to its end
    problems: list[str] = field(default_factory=list[str])
    """The first bad rows, each with its place and what is wrong with it."""


def store_folder(corpora: Place, beginning: str) -> Place:
    """The folder of the one store whose key begins so; any other number of stores is refused."""
    known = [name for name in names(corpora) if STORE_NAME.fullmatch(name)]
    keys = [name for name in known if name.startswith(beginning)]
    if len(keys) != 1:
        raise RunError(f"{corpora}: {unknown('corpus', beginning, known)}")
    return corpora / keys[0]


def stored_corpora(corpora: Place) -> list[StoredCorpus]:
    """The token stores in a folder, in the order of their keys."""
    keys = sorted(name for name in names(corpora) if STORE_NAME.fullmatch(name))
    return [stored_corpus(corpora / key) for key in keys]


def stored_corpus(folder: Place) -> StoredCorpus:
    """The token store in a folder."""
    if isinstance(folder, Path):
        files = [
            (status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))
            for _, status in stats(folder)
        ]
    else:
        files = [(info.size or 0, info.mtime) for info in listed(folder)]
    store = problem = None
    records: list[PortionRecord] = []
    try:
        store = _read_store(folder)
        portions = [p for extent in store.portions().values() for p in extent.values()]
        with ThreadPoolExecutor(READERS) as readers:
            records += readers.map(partial(read_record, store), portions)
    except (RunError, CorpusError) as error:
        problem = str(error)
    return StoredCorpus(
        folder.name,
        store,
        problem,
        documents=sum(record.documents for record in records),
        tokens=sum(record.tokens for record in records),
        bad=sum(record.bad for record in records),
        bytes=sum(size for size, _ in files),
        changed=max((changed for _, changed in files), default=None),
    )


def _read_store(folder: Place) -> TokenStore:
    store = TokenStore.read(folder)
    if store is None:
        raise RunError(
            f"{folder / STORE_FILE}: not there; expected the description of a token store"
        )
    return store


def stored_files(folder: Place) -> list[StoredFile]:
    """What a token store holds of each file, in the order of their names."""
    store = _read_store(folder)
    # By the file as it was (kind, name, size, time), and by where a range of it begins.
    found: dict[tuple[str, str, int, int], dict[int, StoredFile]] = defaultdict(dict)
    for portions in store.portions().values():
        parts: dict[int, StoredFile] = {}
        start, files = 0, {}
        for _, portion in sorted(portions.items()):
            file = open_portion(store, portion)
            start, documents = file.record.start, file.documents()
            for number, (kind, name, size, changed) in file.record.files.items():
                files[int(number)] = kind, name, size, changed
                part = parts.setdefault(int(number), StoredFile(name, size, file.record.stop))
                _add_documents(part, documents, int(number), kind, start)
        for number, part in parts.items():
            # A source is read to its end if a later one is begun.
            part.whole = is_whole(portions) or number < max(parts)
            ranges = found[files[number]]
            # A file may have been read alone and together with others.
            if start not in ranges or ranges[start].documents < part.documents:
                ranges[start] = part
    stored: list[StoredFile] = []
    for (_, name, size, _), ranges in sorted(found.items(), key=lambda item: item[0][1]):
        whole = StoredFile(name, size)
        end: int | None = 0
        for start, part in sorted(ranges.items()):
            for what in ("documents", "tokens", "bad", "empty", "problems"):
                setattr(whole, what, getattr(whole, what) + getattr(part, what))
            end = part.stop if start == end and part.whole else -1
        whole.whole = end is None
        del whole.problems[LISTED_PROBLEMS:]
        stored.append(whole)
    return stored


def _add_documents(
    part: StoredFile, documents: pa.Table, source: int, kind: str, start: int
) -> None:
    """Count the documents of one source of a portion, in an extent that begins at `start`."""
    first, end = np.searchsorted(documents["source"].to_numpy(), [source, source + 1])
    documents = documents.slice(first, end - first)
    n_tokens = documents["n_tokens"].to_numpy()
    part.documents += len(n_tokens)
    part.tokens += int(np.maximum(n_tokens, 0).sum())
    part.bad += int((n_tokens == BAD).sum())
    part.empty += int((n_tokens == 0).sum())
    bad = documents.filter(documents["problem"].is_valid()).slice(0, LISTED_PROBLEMS)
    for row in bad.select(["row", "offset", "problem"]).to_pylist():
        place = Source(kind, part.name, 0).place_of(row["row"])
        if start:
            # How many lines lie before the range is not known here.
            unit = "row" if kind == "parquet" else "byte"
            place = f"{printable(part.name)}, {unit} {row['offset'] + 1:,}"
        part.problems.append(f"{place} ({printable(row['problem'])})")


def remove_corpus(folder: Place) -> None:
    """Delete a token store."""
    try:
        if isinstance(folder, Path):
            shutil.rmtree(folder)
        else:
            delete_directory(folder)
    except OSError as error:
        raise RunError(
            f"{folder}: cannot be deleted whole ({reason(error)}); mend that, and the same command "
            "continues"
        ) from None
    forget_open_files()
