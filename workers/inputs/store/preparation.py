"""Reads and tokenises an extent of a corpus, and commits its portions to the token store.

A portion holds the next documents with 16 Mi letters of text. Its file is its commit, so a
preparation that is killed loses the portions in hand. The next one reads past what is committed,
without parsing it.
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice, zip_longest
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.schemas.errors import CorpusError, printable
from headcount.workers.inputs.corpus.corpus import Tokenizer
from headcount.workers.inputs.corpus.documents import BLANK, Document, Record
from headcount.workers.inputs.store.extents import Extent
from headcount.workers.inputs.store.token_store import (
    Portion,
    TokenStore,
    commit_portion,
    forget_open_files,
    open_portion,
    read_record,
)

PORTION_LETTERS = 16 << 20
"""Letters of text with which a portion is full."""

PORTION_DOCUMENTS = 1 << 17
"""Documents of a portion at most."""

BATCH_LETTERS = 1 << 20
"""Letters that are tokenised at once for each core, unless a single document has more."""

BATCH_DOCUMENTS = 1 << 12
"""Documents that are tokenised at once."""

PARALLELISM = "TOKENIZERS_PARALLELISM"
"""Environment variable that the library tokenizers reads whenever it tokenises."""


def use_cores(cores: int) -> None:
    """Have tokenizers use so many cores, in a process that has not tokenised before.

    Otherwise it starts a thread for every core of the machine.
    """
    os.environ[PARALLELISM] = "false" if cores == 1 else "true"
    os.environ["RAYON_NUM_THREADS"] = str(cores)


def _cores() -> int:
    """Cores that tokenizers uses in this process."""
    if os.environ.get(PARALLELISM) == "false":
        return 1
    # macOS cannot bind a process to cores.
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


class _Documents:
    """The documents of an extent in order, blank lines left out."""

    def __init__(self, extent: Extent, store: TokenStore) -> None:
        self.rows = 0
        """Rows of the source that were read, blank lines counted."""
        self.extent = extent
        self.reading = store.reading
        self._records = self._read()

    def _read(self) -> Iterator[tuple[int, int, Record]]:
        begin, source = self.extent.start, 0
        for number, record in self.extent.records(self.reading):
            if number != source:
                source, begin = number, 0
            elif begin == self.extent.start > 0 and isinstance(record.content, bytes):
                # The first line of a range begins somewhere behind the range's first byte.
                begin = record.stop - len(record.content)
            self.rows = record.row + 1
            if record.content is not BLANK:
                yield number, begin, record
            begin = record.stop

    def skip(self, documents: int) -> None:
        """Go past some documents without parsing them."""
        deque(islice(self._records, documents), maxlen=0)

    def __iter__(self) -> Iterator[tuple[int, int, Document]]:
        """The number of the source within the extent, where the document begins, the document."""
        for number, offset, record in self._records:
            yield number, offset, self.extent.sources[number].document_of(record, self.reading)


@dataclass
class _Reading:
    """The documents of a portion, which are tokenised while the next ones are read."""

    documents: list[tuple[int, int, Document]]
    """As `_Documents` yields them."""
    token_ids: list[Future[list[np.ndarray]]]
    rows: int


def _read_portion(
    documents: _Documents, tokenised: Callable[[list[str]], Future[list[np.ndarray]]]
) -> _Reading:
    """The documents of the next portion, none at the end."""
    letters_at_once = BATCH_LETTERS * _cores()
    reading = _Reading([], [], 0)
    texts: list[str] = []
    letters = letters_of_batch = 0
    for number, offset, document in documents:
        reading.documents.append((number, offset, document))
        if document.problem is None:
            texts.append(document.text)
            letters += len(document.text)
            letters_of_batch += len(document.text)
        if letters_of_batch >= letters_at_once or len(texts) == BATCH_DOCUMENTS:
            reading.token_ids.append(tokenised(texts))
            texts, letters_of_batch = [], 0
        if letters >= PORTION_LETTERS or len(reading.documents) == PORTION_DOCUMENTS:
            break
    reading.token_ids.append(tokenised(texts))
    reading.rows = documents.rows
    return reading


def prepare_extent(store: TokenStore, extent: Extent, tokenizer: Tokenizer) -> Iterator[Portion]:
    """Commit what is missing of an extent, portion by portion; yields each that is committed."""
    documents = _Documents(extent, store)
    id_type = store.token_type.to_pandas_dtype()
    tokenising = ThreadPoolExecutor(1)

    def tokenised(texts: list[str]) -> Future[list[np.ndarray]]:
        return tokenising.submit(_token_ids, tokenizer, texts, id_type)

    try:
        # A portion is the last one if nothing follows it, so the next one is read before it ends.
        unfinished: tuple[int, _Reading] | None = None
        for number in count():
            following: _Reading | None = None
            there = store.find(extent.key, number)
            try:
                if there is None:
                    following = _read_portion(documents, tokenised)
                elif not there.is_last:
                    documents.skip(read_record(store, there).documents)
            except CorpusError:
                # It cannot be read further. What lies before that place is kept.
                if unfinished is not None:
                    yield _commit(store, extent, *unfinished, is_last=False)
                raise
            is_end = following is not None and not following.documents
            if following is not None and is_end:
                # Blank lines may lie behind the last document.
                unfinished = unfinished or (number, following)
                unfinished[1].rows = following.rows
            if unfinished is not None:
                yield _commit(store, extent, *unfinished, is_last=is_end)
            if is_end or (there is not None and there.is_last):
                return
            unfinished = following and (number, following)
    finally:
        # Whoever has enough does not wait for what was read ahead.
        tokenising.shutdown(wait=False, cancel_futures=True)


def _token_ids(tokenizer: Tokenizer, texts: list[str], id_type: Any) -> list[np.ndarray]:  # noqa: ANN401 (a type of numpy's)
    return [np.array(ids, id_type) for ids in tokenizer.encode_many(texts)]


def is_whole(committed: dict[int, Portion]) -> bool:
    """Whether the portions of an extent follow one another to its end."""
    last = committed.get(len(committed) - 1)
    return last is not None and last.is_last and len(committed) == last.number + 1


def _commit(
    store: TokenStore, extent: Extent, number: int, reading: _Reading, is_last: bool
) -> Portion:
    token_ids = (ids for future in reading.token_ids for ids in future.result())
    nothing = np.empty(0, store.token_type.to_pandas_dtype())
    # A row that cannot be read has no tokens.
    tokens = [
        nothing if document.problem is not None else next(token_ids)
        for _, _, document in reading.documents
    ]
    # A file that changed while it was read may have been read half old and half new.
    extent.check_unchanged()
    portion = Portion(extent.key, number, is_last)
    commit_portion(store, extent, portion, reading.documents, tokens, reading.rows)
    return portion


# Verification


def damaged_portions(store: TokenStore, extent: Extent) -> tuple[dict[Portion, str], bool]:
    """The portions of an extent that do not hold what they should, each with what is wrong.

    Also whether a text is another one than was tokenised. All texts are read again, but none is
    tokenised.
    """
    # Nothing that is already decoded: the files themselves are looked at.
    forget_open_files()
    documents = _Documents(extent, store)
    damages: dict[Portion, str] = {}
    is_text_changed = False
    for _, portion in sorted(store.portions().get(extent.key, {}).items()):
        try:
            file = open_portion(store, portion)
            table = file.documents()
            file.tokens(0, file.record.tokens)
        except CorpusError as error:
            damages[portion] = str(error)
            try:
                documents.skip(read_record(store, portion).documents)
                continue
            except CorpusError:
                # Nothing says which texts the portions behind it hold.
                break
        difference = _difference(documents, table)
        if difference is None and portion.is_last and (more := next(iter(documents), None)):
            place = _place(extent, more[0], more[2].row)
            difference = f"{place}: was not there when the corpus was tokenised"
        if difference is not None:
            damages[portion] = difference
            is_text_changed = True
    return damages, is_text_changed


def _difference(documents: _Documents, table: pa.Table) -> str | None:
    """The first document of a portion that is not as the files have it now. All are read."""
    columns = [table[name].to_pylist() for name in ("source", "row", "content")]
    stored = zip(*columns, table["problem"].is_valid().to_pylist(), strict=True)
    now = [
        (number, document.row, document.content_hash, document.problem is not None)
        for number, _, document in islice(documents, len(table))
    ]
    differing = ((old, new) for old, new in zip_longest(stored, now) if old != new)
    old, new = next(differing, (None, None))
    if old is None:
        return None
    number, row = (new or old)[:2]
    why = "is not what was tokenised" if new else "is not there any more"
    return f"{_place(documents.extent, number, row)}: {why}"


def _place(extent: Extent, number: int, row: int) -> str:
    """Where a document is, for people."""
    source = extent.sources[number]
    if not extent.start:
        return source.place_of(row)
    # How many rows lie before the range is not known here.
    return f"{printable(source.name)}, row {row + 1:,} from {extent.start:,} on"
