"""Reads and tokenises an extent of a corpus, and commits its portions to the token store.

A portion holds the next documents with 16 Mi letters of text. Its file is its commit, so a
preparation that is killed loses the portions in hand. The next one reads past what is committed,
without parsing it.
"""

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, zip_longest

import numpy as np

from headcount.schemas.errors import CorpusError, printable
from headcount.workers.inputs.corpus.documents import (
    BLANK,
    Document,
    Reading,
    Record,
    document_of,
)
from headcount.workers.inputs.store.extents import Extent
from headcount.workers.inputs.store.token_store import (
    Portion,
    TokenStore,
    commit_portion,
    forget_open_files,
    open_portion,
    read_record,
)
from headcount.workers.model.info.text_tokenizer import TextTokenizer

PORTION_LETTERS = 16 << 20  # letters of text with which a portion is full
PORTION_DOCUMENTS = 1 << 17  # documents of a portion at most

BATCH_LETTERS = 1 << 20  # tokenised at once for each core, or one longer document

BATCH_DOCUMENTS = 1 << 12  # documents that are tokenised at once

PARALLELISM = "TOKENIZERS_PARALLELISM"  # read by tokenizers whenever it tokenises


def use_cores(cores: int) -> None:
    """Have tokenizers use so many cores, not all, in a process that has not tokenised before."""
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

    def __init__(self, extent: Extent, reading: Reading) -> None:
        self.extent = extent
        self.reading = reading
        self.rows = 0  # rows of the source that were read, blank lines counted
        self._records = self._read()
        self.next = next(self._records, None)
        """The number of the next document's source, where it begins there, its record."""

    def _read(self) -> Iterator[tuple[int, int, Record]]:
        extent = self.extent
        try:
            for number, source in enumerate(extent.sources):
                begin = extent.start
                for record in source.records(self.reading, extent.start, extent.stop):
                    if begin == extent.start > 0 and isinstance(record.content, bytes):
                        # The first line of a range begins somewhere behind the range's first byte.
                        begin = record.stop - len(record.content)
                    self.rows = record.row + 1
                    if record.content is not BLANK:
                        yield number, begin, record
                    begin = record.stop
        except CorpusError:
            # A file that changed is often unreadable first. What changed it is the better reason.
            extent.check_unchanged()
            raise

    def skip(self, documents: int) -> None:
        """Go past some documents without parsing them."""
        for _ in range(documents):
            self.next = next(self._records, None)

    def take(self, most: int, letters: float = float("inf")) -> list[tuple[int, int, Document]]:
        """The next documents, up to so many of them or so many letters: source, begin, document."""
        taken: list[tuple[int, int, Document]] = []
        while self.next is not None and len(taken) < most and letters > 0:
            number, begin, record = self.next
            document = document_of(record, self.reading)
            taken.append((number, begin, document))
            letters -= len(document.text)
            self.next = next(self._records, None)
        return taken


def prepare_extent(
    store: TokenStore, extent: Extent, tokenizer: TextTokenizer
) -> Iterator[Portion]:
    """Commit what is missing of an extent, portion by portion; yields each that is committed.

    A portion is tokenised while the next one is read. If that cannot be read, it still ends.
    """
    documents = _Documents(extent, store.reading)
    with ThreadPoolExecutor(1) as committing:
        in_hand: Future[Portion] | None = None
        for number in count():
            portion = store.find(extent.key, number)
            taken: list[tuple[int, int, Document]] = []
            if portion is not None:
                is_last = portion.is_last
                if not is_last:
                    documents.skip(read_record(store, portion).documents)
            else:
                taken = documents.take(PORTION_DOCUMENTS, PORTION_LETTERS)
                is_last = documents.next is None
            if in_hand is not None:
                yield in_hand.result()
                in_hand = None
            if portion is None:
                portion = Portion(extent.key, number, is_last)
                # Blank lines may lie behind the last document.
                rows = documents.rows if is_last else taken[-1][2].row + 1
                in_hand = committing.submit(_commit, store, extent, portion, taken, tokenizer, rows)
            if is_last:
                break
        if in_hand is not None:
            yield in_hand.result()


def _commit(
    store: TokenStore,
    extent: Extent,
    portion: Portion,
    documents: list[tuple[int, int, Document]],
    tokenizer: TextTokenizer,
    rows: int,
) -> Portion:
    id_type = store.token_type.to_pandas_dtype()
    letters_at_once = BATCH_LETTERS * _cores()
    # A row that cannot be read has no tokens.
    tokens = [np.empty(0, id_type)] * len(documents)
    batch: list[int] = []
    letters = 0
    for number, (_, _, document) in enumerate(documents):
        if document.problem is None:
            batch.append(number)
            letters += len(document.text)
        is_last = number == len(documents) - 1
        if letters >= letters_at_once or len(batch) == BATCH_DOCUMENTS or is_last:
            texts = [documents[i][2].text for i in batch]
            for i, ids in zip(batch, tokenizer.encode_many(texts), strict=True):
                tokens[i] = np.array(ids, id_type)
            batch, letters = [], 0
    spelled_out = Counter(
        token for _, _, document in documents for token in tokenizer.spelled_out(document.text)
    )
    # A file that changed while it was read may have been read half old and half new.
    extent.check_unchanged()
    commit_portion(store, extent, portion, documents, tokens, rows, spelled_out)
    return portion


def is_whole(committed: dict[int, Portion]) -> bool:
    """Whether the portions of an extent follow one another to its end."""
    last = committed.get(len(committed) - 1)
    return last is not None and last.is_last


def damaged_portions(store: TokenStore, extent: Extent) -> dict[Portion, str]:
    """The portions of an extent that differ from its texts, which are read again, and how."""
    # Nothing that is already decoded: the files themselves are looked at.
    forget_open_files()
    documents = _Documents(extent, store.reading)
    damages: dict[Portion, str] = {}
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
        columns = [table[name].to_pylist() for name in ("source", "row", "content")]
        stored = zip(*columns, table["problem"].is_valid().to_pylist(), strict=True)
        now = [
            (number, document.row, document.content_hash, document.problem is not None)
            for number, _, document in documents.take(len(table))
        ]
        pairs = zip_longest(stored, now)
        old, new = next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
        if old is not None or new is not None:
            why = "is not what was tokenised" if new else "is not there any more"
        elif portion.is_last and documents.next is not None:
            number, _, record = documents.next
            new, why = (number, record.row), "was not there when the corpus was tokenised"
        else:
            continue
        number, row = (new or old or (0, 0))[:2]
        source = extent.sources[number]
        where = source.place_of(row)
        if extent.start:
            # How many rows lie before the range is not known here.
            where = f"{printable(source.name)}, row {row + 1:,} from {extent.start:,} on"
        damages[portion] = f"{where}: {why}"
    return damages
