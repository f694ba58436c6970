"""Where the sequences of a corpus lie in the portions of the token store, and what they hold.

The index has a few numbers for each portion and none for a document, so a corpus of any size has a
small index. It says where to look; the documents of a portion are read when a sequence in it is.
"""

from __future__ import annotations

import copy
import json
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

from headcount.schemas.errors import printable
from headcount.schemas.files.tables import carried_name
from headcount.workers.inputs.corpus.corpus import PART, Corpus
from headcount.workers.inputs.corpus.document_block import DocumentBlock, PortionPlace
from headcount.workers.inputs.corpus.documents import as_text
from headcount.workers.inputs.store.token_store import (
    BAD,
    Portion,
    TokenStore,
    field_column,
    open_portion,
)

BLOCKS_IN_MEMORY = 4
"""Blocks of documents that are kept. They hold no tokens. A shard seldom spans more than two."""

Origin = dict[str, list[Any]]
"""Where sequences came from: columns of the table `sequences`, by name."""


class SequenceIndex:
    """Sequences `0 .. len-1` of the portions that were added, in the order of the corpus.

    They are read in any order, and fastest one after the other.
    """

    def __init__(
        self,
        store: TokenStore,
        corpus: Corpus,
        length: int,
        separator: int | None,
        enough: int | None = None,
        most_bad_in_a_row: int | None = None,
    ) -> None:
        """`length` is that of a sequence's text; `separator` is the token that joins documents.

        `enough` sequences are needed; None means all.
        """
        self.store = store
        self.corpus = corpus
        self.length = length
        self.separator = separator
        self.enough = enough
        self.most_bad_in_a_row = most_bad_in_a_row
        self.portions: list[Portion] = []
        self.contents: list[str] = []
        """Of each portion: identifies its documents and tokens, wherever its files lie."""
        self.places = [PortionPlace()]
        """Of each portion where it lies in the corpus, and of what would come behind the last."""
        self.ends: list[int] = []
        """Of each block: how many sequences it has with those before it. A portion is a block, but
        the portions of a shuffled corpus are one block together.
        """
        self.unmeasured = 0
        """Tokens at the ends of portions that are left over when joined documents are cut."""
        self.last_documents: int | None = None
        """How many documents of the last portion count; None means all."""
        self.token_counts: np.ndarray | None = None
        """`[token]`, how often the documents have each; None unless tokens are drawn so."""
        if corpus.counted is not None:
            self.token_counts = np.zeros(store.d_vocab, np.int64)
        self._bad_run = BadRun()
        self._blocks: deque[tuple[int, DocumentBlock]] = deque(maxlen=BLOCKS_IN_MEMORY)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_blocks": deque(maxlen=BLOCKS_IN_MEMORY)}

    def __len__(self) -> int:
        """How many sequences there are; those of a shuffled corpus are known when it is `ended`."""
        return self.ends[-1] if self.ends else 0

    @property
    def documents(self) -> int:
        """Documents in the portions, those that the scan does not take included."""
        return self.places[-1].documents_before

    @property
    def tokens(self) -> int:
        """Tokens of these documents."""
        return self.places[-1].tokens_before

    @property
    def bad(self) -> int:
        """How many of these documents are bad."""
        return self.places[-1].bad_before

    # Making it

    def add(self, first_source: int, portion: Portion) -> None:
        """Add the next portion of the corpus; `first_source` is that of its extent."""
        record = open_portion(self.store, portion).record
        place = self.places[-1]._replace(first_source=first_source)
        if not record.start:
            place = place._replace(rows_before=0)
        self.places[-1] = place
        self.portions.append(portion)
        files = [(kind, name.rpartition("/")[2]) for kind, name, _, _ in record.files.values()]
        content = json.dumps([first_source, record.start, files, record.digest, record.groups])
        self.contents.append(xxhash.xxh3_64_hexdigest(content.encode()))
        block = self._portion_block(len(self.portions) - 1)
        self._bad_run.add(block.position[block.n_tokens == BAD])
        if self.token_counts is not None:
            self.token_counts = self.token_counts + block.token_counts(self.store.d_vocab)
        if not self.corpus.choice.shuffled:
            self.unmeasured += block.unmeasured
            self.ends.append(len(self) + block.sequences)
        self.places.append(
            PortionPlace(
                first_source,
                # Rows are counted from the beginning of an extent, and the next one may go on with
                # the same source.
                place.rows_before + (record.rows if portion.is_last else 0),
                place.taken_before + len(block),
                place.documents_before + record.documents,
                place.tokens_before + record.tokens,
                place.bad_before + record.bad,
            )
        )

    @property
    def may_stop(self) -> bool:
        """Whether there are enough sequences, or too many bad documents one after the other."""
        if self.most_bad_in_a_row is not None and self._bad_run.longest > self.most_bad_in_a_row:
            return True
        # Any document of a shuffled corpus may come first, so all are needed.
        if self.corpus.is_read_whole or self.enough is None:
            return False
        return len(self) >= self.enough

    def ended(self) -> SequenceIndex:
        """The index when its last portion was added: it ends with the last sequence needed."""
        if self.corpus.choice.shuffled and self.portions:
            index = copy.copy(self)
            index._blocks = deque(maxlen=BLOCKS_IN_MEMORY)
            index.ends = [index.block(0).sequences]
            index.unmeasured = index.block(0).unmeasured
            return index
        return self if self.enough is None else self.up_to(self.enough)

    def up_to(self, sequences: int) -> SequenceIndex:
        """The index of the first `sequences`, without the documents behind the last of them.

        Such documents lie in the store because another scan needed them. What a run says of its
        corpus must not depend on that.
        """
        # Of a shuffled corpus every document is needed, because any may come first.
        if self.corpus.is_read_whole or not 0 < sequences <= len(self):
            return self
        ((last, sequence, _),) = self._in_blocks(sequences - 1, sequences)
        block = self.block(last)
        documents = int(block.position[block.last_document(sequence)]) + 1
        left_over = sum(self.block(i).unmeasured for i in range(last, len(self.portions)))
        index = copy.copy(self)
        index._blocks = deque(maxlen=BLOCKS_IN_MEMORY)
        index.portions = self.portions[: last + 1]
        index.contents = self.contents[: last + 1]
        index.places = self.places[: last + 2]
        index.ends = [*self.ends[:last], sequences]
        index.unmeasured = self.unmeasured - left_over
        index.last_documents = documents - self.places[last].documents_before
        return index

    # Reading it

    def block(self, number: int) -> DocumentBlock:
        """The documents of a block."""
        for known, block in self._blocks:
            if known == number:
                return block
        if self.corpus.choice.shuffled:
            portions = range(len(self.portions))
            block = DocumentBlock.shuffled([self._portion_block(i) for i in portions])
        else:
            block = self._portion_block(number)
        self._blocks.append((number, block))
        return block

    def _portion_block(self, number: int) -> DocumentBlock:
        is_last = number == len(self.portions) - 1
        return DocumentBlock.of_portion(
            self.store,
            self.portions[number],
            self.places[number],
            self.corpus,
            self.length,
            self.last_documents if is_last else None,
        )

    def _in_blocks(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The blocks of some sequences, each with the numbers in it of the first and the last.

        The last is one behind.
        """
        while start < stop:
            number = bisect_right(self.ends, start)
            before = self.ends[number - 1] if number else 0
            stop_here = min(stop, self.ends[number])
            yield number, start - before, stop_here - before
            start = stop_here

    def read(self, start: int, stop: int) -> tuple[np.ndarray, Origin]:
        """Tokens `[sequence length]` of the sequences `start .. stop-1`, and their origin."""
        carried = {carried_name(name): field_column(name) for name in self.corpus.choice.columns}
        names = ("file", "row", "offset", "pile_set_name", *carried, "document")
        origin: Origin = {name: [] for name in names}
        tokens: list[np.ndarray] = []
        for number, first, end in self._in_blocks(start, stop):
            block = self.block(number)
            documents, offsets = block.beginnings(first, end)
            labels = block.table.take(documents)
            origin["file"] += [self.corpus.sources[i].name for i in block.source[documents]]
            origin["row"] += block.row[documents].tolist()
            origin["offset"] += offsets.tolist()
            origin["pile_set_name"] += labels[PART].to_pylist()
            for name, column in carried.items():
                origin[name] += [
                    None if value is None else as_text(json.loads(value))
                    for value in labels[column].to_pylist()
                ]
            origin["document"] += block.position[block.main_documents(first, end)].tolist()
            tokens.append(block.tokens(first, end, self.separator))
        return np.concatenate(tokens), origin

    def bad_rows(self, start: int, stop: int) -> list[str]:
        """The bad rows between the beginning of sequence `start` and that of sequence `stop`."""
        # The first sequence also answers for bad rows before it, the last for those after it.
        first_block, first_document = self._beginning_of(start) if start else (0, 0)
        blocks = len(self.ends)
        last_block, end = (blocks, 0) if stop >= len(self) else self._beginning_of(stop)
        bad_rows: list[str] = []
        for number in range(first_block, min(last_block + 1, blocks)):
            block = self.block(number)
            begin = first_document if number == first_block else 0
            lengths = block.n_tokens[begin : end if number == last_block else None]
            bad_documents = begin + np.flatnonzero(lengths == BAD)
            bad_rows += [self.problem_of(block, i) for i in bad_documents.tolist()]
        return bad_rows

    def _beginning_of(self, sequence: int) -> tuple[int, int]:
        """The block and the document that a sequence begins in."""
        ((number, first, end),) = self._in_blocks(sequence, sequence + 1)
        return number, int(self.block(number).beginnings(first, end)[0][0])

    def problem_of(self, block: DocumentBlock, document: int) -> str:
        """A bad document, with its place and its problem."""
        place = self.corpus.sources[block.source[document]].place_of(int(block.row[document]))
        return f"{place} ({printable(block.table['problem'][document].as_py() or '')})"


class BadRun:
    """The largest number of bad documents one after the other."""

    def __init__(self) -> None:
        self.longest = 0
        self._current = 0
        self._last_position = -1

    def add(self, positions: np.ndarray) -> None:
        """Count bad documents by their positions, in order."""
        for position in positions.tolist():
            follows = position == self._last_position + 1
            self._current = self._current + 1 if follows else 1
            self._last_position = position
            self.longest = max(self.longest, self._current)
