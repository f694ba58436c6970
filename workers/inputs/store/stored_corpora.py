"""What lies in a folder of token stores: which corpora, how much of which files, and how much room
they take. Stores are deleted here, too.
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
from filelock import FileLock, Timeout

from headcount.schemas.errors import RunError, printable, unknown
from headcount.schemas.files.places import Place, StorePath, names, reason, stats
from headcount.workers.inputs.corpus.documents import Source
from headcount.workers.inputs.store.token_files import forget_open_files, values_of
from headcount.workers.inputs.store.token_store import (
    BAD,
    LOCK_FILE,
    READERS,
    STORE_FILE,
    FilePart,
    PieceRecord,
    TokenStore,
    chain_of,
    read_documents,
)

STORE_NAME = re.compile(r"[0-9a-f]{12}")
PORTION_NAME = re.compile(r"[0-9a-f]{16}")

LISTED_PROBLEMS = 100
"""Bad rows of a file that are listed."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class StoredCorpus:
    """What lies in a token store. Pieces that nobody needs any more count as bytes only."""

    key: str
    """Its name in the folder."""
    store: TokenStore | None
    problem: str | None
    """Why there is no store: another version, or a broken description."""
    portions: int
    """Portions of which at least the beginning is prepared."""
    pieces: int
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
    changed: datetime | None
    """When it had been changed last; None if that is not known."""
    documents: int = 0
    """Bad ones included."""
    tokens: int = 0
    bad: int = 0
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
    portions = _portion_keys(folder)
    listings = _for_all(folder, portions, lambda name: _files_in(folder / name))
    files = [*_files_in(folder), *(file for listing in listings for file in listing)]
    try:
        store = TokenStore.read(folder)
        problem = None if store else f"{folder / STORE_FILE}: not there"
    except RunError as error:
        store, problem = None, str(error)
    committed = _for_all(folder, portions, store.committed) if store else []
    chains = [chain for pieces in committed if (chain := chain_of(pieces))]
    pieces = [piece for chain in chains for piece in chain]
    return StoredCorpus(
        key=key,
        store=store,
        problem=problem,
        portions=len(chains),
        pieces=len(pieces),
        documents=sum(piece.documents for piece in pieces),
        tokens=sum(piece.tokens for piece in pieces),
        bad=sum(piece.bad for piece in pieces),
        bytes=sum(file.bytes for file in files),
        changed=max((file.changed for file in files), default=None),
    )


def stored_files(corpora: Place, key: str) -> list[StoredFile]:
    """What a token store holds of each file, in the order of their names."""
    folder = _folder_of(corpora, key)
    store = TokenStore.read(folder)
    if store is None:
        raise RunError(f"{folder / STORE_FILE}: not there; remove this store")
    stretches: dict[FilePart, dict[int, _Stretch]] = {}
    for records in _for_all(folder, _portion_keys(folder), store.records):
        for stretch in _stretches_of(store, records):
            of_file = stretches.setdefault(stretch.file, {})
            # A file may have been cut or joined with others in several ways.
            other = of_file.get(stretch.start)
            if other is None or other.documents < stretch.documents:
                of_file[stretch.start] = stretch
    return [
        _stored_file(file, [of_file[start] for start in sorted(of_file)])
        for file, of_file in sorted(stretches.items(), key=lambda item: item[0].name)
    ]


def remove_corpus(corpora: Place, key: str) -> None:
    """Delete a token store; refused while a process of this machine prepares a part of it."""
    folder = _folder_of(corpora, key)
    portions = _portion_keys(folder)
    try:
        with ExitStack() as locks:
            if isinstance(folder, Path):
                for name in portions:
                    locks.enter_context(FileLock(folder / name / LOCK_FILE, timeout=0))
            for name in portions:
                _delete_folder(folder / name)
        # The description goes last, so that what is left of a store can be removed.
        _delete_folder(folder)
    except Timeout:
        raise RunError(
            f"{folder}: another process prepares this corpus; wait for it, or stop it and run the "
            "same command again"
        ) from None
    except OSError as error:
        raise RunError(
            f"{folder}: cannot be deleted whole ({reason(error)}); mend that, and the same command "
            "continues"
        ) from None
    forget_open_files()


class _Stretch(NamedTuple):
    """What a portion holds of one file."""

    file: FilePart
    start: int
    """Where the portion begins in the file, as `Portion.start`."""
    stop: int | None
    ended: bool
    """Whether the pieces reach to the end of the stretch."""
    rows: int
    """Rows of the stretch, if the pieces reach to its end and the portion has one file."""
    documents: int
    tokens: int
    bad: int
    problems: list[tuple[int, str]]
    """Rows within the stretch, each with what is wrong with it."""


def _stretches_of(store: TokenStore, records: Iterable[PieceRecord]) -> Iterator[_Stretch]:
    """What the pieces of a portion hold of each of its files."""
    records_by_piece = {record.piece: record for record in records}
    chain = chain_of(records_by_piece)
    if not chain:
        return
    columns = ["source", "row", "n_tokens", "problem"]
    documents = pa.concat_tables([read_documents(store, piece, columns) for piece in chain])
    source = values_of(documents["source"])
    files = {part.source: part for piece in chain for part in records_by_piece[piece].files}
    record, last = records_by_piece[chain[0]], chain[-1]
    for number, file in files.items():
        # Sources ascend, so those of one file lie together.
        first, end = np.searchsorted(source, [number, number + 1])
        of_file = documents.slice(first, end - first)
        n_tokens = values_of(of_file["n_tokens"])
        is_bad = n_tokens == BAD
        bad_documents = of_file.filter(pa.array(is_bad)).slice(0, LISTED_PROBLEMS)
        yield _Stretch(
            # Its number differs from portion to portion.
            file=replace(file, source=0),
            start=record.portion_start,
            stop=record.portion_stop,
            ended=last.ended or last.stop.source > number,
            rows=last.stop.row,
            documents=len(n_tokens),
            tokens=int(n_tokens[~is_bad].sum()),
            bad=int(is_bad.sum()),
            problems=list(
                zip(
                    bad_documents["row"].to_pylist(),
                    bad_documents["problem"].to_pylist(),
                    strict=True,
                )
            ),
        )


def _stored_file(file: FilePart, stretches: list[_Stretch]) -> StoredFile:
    """Stretches of one file in their order, as what is stored of the file."""
    stored = StoredFile(
        file.name, file.bytes, _time_of(file.changed / 1e9) if file.changed else None
    )
    source = Source(file.kind, file.name, file.bytes)
    end: int | None = 0
    row: int = 0
    for stretch in stretches:
        stored.documents += stretch.documents
        stored.tokens += stretch.tokens
        stored.bad += stretch.bad
        # If the file is prepared from its beginning up to here, its rows can be counted.
        is_next = stretch.start == end
        for row_of_stretch, problem in stretch.problems:
            if is_next:
                place = source.place_of(row + row_of_stretch)
            else:
                place = f"{printable(file.name)}, row {row_of_stretch + 1:,} from {stretch.start:,}"
            stored.problems.append(f"{place} ({printable(problem)})")
        row += stretch.rows
        end = stretch.stop if is_next and stretch.ended else -1
    stored.whole = end is None
    del stored.problems[LISTED_PROBLEMS:]
    return stored


# Folders


class _ListedFile(NamedTuple):
    bytes: int
    changed: datetime


def _files_in(folder: Place) -> list[_ListedFile]:
    """Sizes and times of the files in a folder."""
    if isinstance(folder, Path):
        return [
            _ListedFile(status.st_size, _time_of(status.st_mtime))
            for name, status in stats(folder)
            if name != LOCK_FILE and not (folder / name).is_dir()
        ]
    selector = pafs.FileSelector(folder.key, allow_not_found=True)
    return [
        _ListedFile(info.size, info.mtime)
        for info in folder.filesystem.get_file_info(selector)
        if info.type is pafs.FileType.File
    ]


def _time_of(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _folder_of(corpora: Place, key: str) -> Place:
    known = [name for name in names(corpora) if STORE_NAME.fullmatch(name)]
    if key not in known:
        raise RunError(f"{corpora}: {unknown('corpus', key, known)}")
    return corpora / key


def _portion_keys(folder: Place) -> list[str]:
    return sorted(name for name in names(folder) if PORTION_NAME.fullmatch(name))


def _for_all(folder: Place, portions: list[str], ask: Callable[[str], Result]) -> list[Result]:
    """The answers to a question about each portion. A store is asked many at once."""
    if not isinstance(folder, StorePath):
        return [ask(name) for name in portions]
    with ThreadPoolExecutor(READERS) as threads:
        return list(threads.map(ask, portions))


def _delete_folder(folder: Place) -> None:
    if isinstance(folder, Path):
        shutil.rmtree(folder)
    else:
        folder.filesystem.delete_dir(folder.key)
