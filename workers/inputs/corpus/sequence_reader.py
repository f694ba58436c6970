"""Sequences of a corpus, read from the token store by their index."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from headcount.schemas.errors import printable
from headcount.schemas.files.tables import carried_name
from headcount.workers.inputs.corpus.corpus import Corpus
from headcount.workers.inputs.corpus.document_block import DocumentBlock, JoinedText
from headcount.workers.inputs.corpus.sequence_index import SequenceIndex
from headcount.workers.inputs.store.token_store import BAD

BLOCKS_IN_MEMORY = 4
"""Blocks of documents that are kept. They hold no tokens. A shard seldom spans more than two."""

Origin = dict[str, list[Any]]
"""Where sequences came from: columns of the table `sequences`, by name."""


class Beginnings(NamedTuple):
    """Where some sequences begin, one after the other."""

    block: int
    """The number of the block that they begin in."""
    documents: np.ndarray
    """The document of the block that each begins in."""
    tokens: np.ndarray
    """The token of that document at which it begins."""


class _Run(NamedTuple):
    """Tokens of one joined text that belong to sequences one after the other."""

    block: int
    """The block in which they end, or all lie."""
    text: JoinedText
    """What the block holds of the text."""
    start: int
    stop: int


class SequenceReader:
    """Reads sequences by their index: in any order, and fastest one after the other."""

    def __init__(self, corpus: Corpus, index: SequenceIndex, separator: int | None) -> None:
        """`separator` is the token that joins documents."""
        self.corpus = corpus
        self.index = index
        self.length = index.length
        self.separator = separator
        self._blocks: OrderedDict[int, DocumentBlock] = OrderedDict()

    def __len__(self) -> int:
        """The number of sequences that the index holds."""
        return self.index.sequences

    def read(self, start: int, stop: int) -> tuple[np.ndarray, Origin]:
        """Tokens `[sequence length]` of the sequences `start .. stop-1`, and their origin."""
        origin: Origin = {name: [] for name in ("file", "row", "offset", "pile_set_name")}
        origin |= {carried_name(column): [] for column in self.corpus.choice.columns}
        for beginnings in self._beginnings(start, stop):
            block = self.block(beginnings.block)
            documents = beginnings.documents
            sources = block.source[documents].tolist()
            origin["file"] += [self.corpus.sources[source].name for source in sources]
            origin["row"] += block.row[documents].tolist()
            origin["offset"] += beginnings.tokens.tolist()
            origin["pile_set_name"] += block.pile_set_names(documents)
            for column in self.corpus.choice.columns:
                origin[carried_name(column)] += block.carried(documents, column)
        origin["document"] = self._main_documents(start, stop).tolist()
        tokens: list[np.ndarray] = []
        if self.corpus.packing == "document":
            for number, first, last in self._in_blocks(start, stop):
                block = self.block(number)
                tokens.append(block.first_tokens(block.long_documents[first:last], self.length))
            return np.concatenate(tokens), origin
        assert self.separator is not None
        for run in self._runs(start, stop):
            for part in self._parts(run):
                block = self.block(part.block)
                tokens.append(block.joined_tokens(part.text, part.start, part.stop, self.separator))
        # A run holds whole sequences, though its parts may end inside one.
        return np.concatenate(tokens).reshape(stop - start, self.length), origin

    def bad_rows(self, start: int, stop: int) -> list[str]:
        """The bad rows between the beginning of sequence `start` and that of sequence `stop`."""
        # The first sequence also answers for bad rows before it, the last for those after it.
        first_block, first_document = self._beginning_of(start) if start else (0, 0)
        is_last = stop >= len(self)
        last_block, end = (len(self.index.ends), 0) if is_last else self._beginning_of(stop)
        bad_rows: list[str] = []
        for number in range(first_block, min(last_block + 1, len(self.index.ends))):
            block = self.block(number)
            begin = first_document if number == first_block else 0
            lengths = block.n_tokens[begin : end if number == last_block else None]
            bad_documents = begin + np.flatnonzero(lengths == BAD)
            bad_rows += [self.problem_of(block, i) for i in bad_documents.tolist()]
        return bad_rows

    def place_of(self, block: DocumentBlock, document: int) -> str:
        """Where a document lies, for people."""
        source = self.corpus.sources[block.source[document]]
        return source.place_of(int(block.row[document]))

    def problem_of(self, block: DocumentBlock, document: int) -> str:
        """A bad document, with its problem."""
        return f"{self.place_of(block, document)} ({printable(block.problem(document))})"

    def block(self, number: int) -> DocumentBlock:
        """The documents of a block of the index."""
        if number in self._blocks:
            self._blocks.move_to_end(number)
        else:
            self._blocks[number] = self.index.block(number, self.corpus)
            if len(self._blocks) > BLOCKS_IN_MEMORY:
                self._blocks.popitem(last=False)
        return self._blocks[number]

    # Where sequences lie

    def _in_blocks(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The block in which some sequences end, and the numbers in it of the first and the last.

        The last is one behind.
        """
        while start < stop:
            number = self.index.block_of(start)
            before = int(self.index.ends[number - 1]) if number else 0
            stop_here = min(stop, int(self.index.ends[number]))
            yield number, start - before, stop_here - before
            start = stop_here

    def _runs(self, start: int, stop: int) -> Iterator[_Run]:
        """Sequences of joined texts, as many at once as lie together."""
        for number, first, last in self._in_blocks(start, stop):
            block = self.block(number)
            done = first
            while done < last:
                text, token = block.joined_place(done)
                # As many whole sequences as the text has room for from here on.
                count = min(last - done, (text.joined_end - token) // self.length)
                yield _Run(number, text, token, token + count * self.length)
                done += count

    def _beginnings(self, start: int, stop: int) -> Iterator[Beginnings]:
        """Where the sequences `start .. stop-1` begin."""
        if self.corpus.packing == "document":
            for number, first, last in self._in_blocks(start, stop):
                documents = self.block(number).long_documents[first:last]
                yield Beginnings(number, documents, np.zeros_like(documents))
            return
        for run in self._runs(start, stop):
            starts = np.arange(run.start, run.stop, self.length)
            # Only the first sequence of a run can begin in an earlier block.
            for part in self._parts(run):
                inside = starts[(part.start <= starts) & (starts < part.stop)]
                if len(inside):
                    block = self.block(part.block)
                    documents = block.documents_at(part.text, inside)
                    yield Beginnings(part.block, documents, inside - block.begins_of(documents))

    def _parts(self, run: _Run) -> list[_Run]:
        """A run divided by the blocks that its tokens lie in, in order."""
        start = max(run.start, run.text.joined_before)
        parts = [run._replace(start=start)]
        number = run.block - 1
        while start > run.start:
            texts = self.block(number).texts
            # A text that goes on in the next block is the last of its own. A block may have nothing
            # of it, if its documents are not taken.
            if texts and texts[-1].source == run.text.source and texts[-1].joined_before < start:
                text, stop = texts[-1], start
                start = max(run.start, text.joined_before)
                parts.append(_Run(number, text, start, stop))
            number -= 1
        return parts[::-1]

    def _beginning_of(self, sequence: int) -> tuple[int, int]:
        """The block and the document that a sequence begins in."""
        beginnings = next(self._beginnings(sequence, sequence + 1))
        return beginnings.block, int(beginnings.documents[0])

    def documents_of(self, sequence: int) -> list[tuple[DocumentBlock, int]]:
        """The documents that have tokens in a sequence."""
        if self.corpus.packing == "document":
            number, document = self._beginning_of(sequence)
            return [(self.block(number), document)]
        (run,) = self._runs(sequence, sequence + 1)
        documents: list[tuple[DocumentBlock, int]] = []
        for part in self._parts(run):
            block = self.block(part.block)
            first, last = block.documents_at(part.text, np.array([part.start, part.stop - 1]))
            documents += [(block, i) for i in range(first, last + 1) if block.n_tokens[i] > 0]
        return documents

    def _main_documents(self, start: int, stop: int) -> np.ndarray:
        """The number in the corpus of the document with most tokens of each sequence."""
        if self.corpus.packing == "document":
            return np.concatenate(
                [
                    self.block(number).position[self.block(number).long_documents[first:last]]
                    for number, first, last in self._in_blocks(start, stop)
                ]
            )
        return np.concatenate([self._main_documents_of(run) for run in self._runs(start, stop)])

    def _main_documents_of(self, run: _Run) -> np.ndarray:
        """The same for the sequences of a run."""
        # Of each document with tokens: where it begins and ends in its text, and its number.
        documents_of_parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for part in self._parts(run):
            block = self.block(part.block)
            ends_of_part = np.array([part.start, part.stop - 1])
            first, last = block.documents_at(part.text, ends_of_part).tolist()
            documents = first + np.flatnonzero(block.n_tokens[first : last + 1] > 0)
            begins_of_part = block.begins_of(documents)
            documents_of_parts.append(
                (
                    begins_of_part,
                    begins_of_part + block.n_tokens[documents],
                    block.position[documents],
                )
            )
        begins, ends, positions = map(np.concatenate, zip(*documents_of_parts, strict=True))
        # Cut where a document or a sequence begins: each cut is of one document and one sequence.
        starts = np.arange(run.start, run.stop, self.length)
        cuts = np.union1d(np.maximum(begins, run.start), starts)  # sorted, each once
        document = np.searchsorted(begins, cuts, side="right") - 1
        # A separator behind a document belongs to none, so a cut ends with its document.
        n_tokens = np.minimum(ends[document], np.append(cuts[1:], run.stop)) - cuts
        sequence = (cuts - run.start) // self.length
        # Of each sequence the longest cut comes first, of equal ones the earliest.
        order = np.lexsort((cuts, -n_tokens, sequence))
        _, firsts = np.unique(sequence[order], return_index=True)
        return positions[document[order[firsts]]]

    def first_token_of(self, sequence: int) -> int:
        """The token of its first document at which a sequence begins."""
        return int(next(self._beginnings(sequence, sequence + 1)).tokens[0])


def moved_sequence(
    before: SequenceReader, now: SequenceReader, sequences: Iterable[int]
) -> str | None:
    """Why a sequence is not the same by another index of the corpus; None if all are the same.

    The first sequence that differs is named.
    """
    for sequence in sequences:
        if sequence >= len(now):
            return f"it held {len(before):,} sequences and holds {len(now):,}"
        difference = _difference_of_sequence(before, now, sequence)
        if difference is not None:
            return difference
    return None


def moved_counts(before: SequenceIndex, now: SequenceIndex) -> str | None:
    """Why tokens are not drawn as they were by another index of the corpus; None if they are."""
    assert before.token_counts is not None
    assert now.token_counts is not None
    moved = np.flatnonzero(before.token_counts != now.token_counts)
    if not len(moved):
        return None
    token = int(moved[0])
    return (
        f"token {token} occurred {before.token_counts[token]:,} times and occurs "
        f"{now.token_counts[token]:,} times"
    )


def _difference_of_sequence(
    before: SequenceReader, now: SequenceReader, sequence: int
) -> str | None:
    """How the documents of one sequence differ between two indexes of a corpus; None if not."""
    old_documents = before.documents_of(sequence)
    new_documents = now.documents_of(sequence)
    for (old_block, old), (new_block, new) in zip(old_documents, new_documents, strict=False):
        old_place, new_place = before.place_of(old_block, old), now.place_of(new_block, new)
        if old_place != new_place:
            return f"sequence {sequence:,} came from {old_place} and would come from {new_place}"
        if old_block.content[old] != new_block.content[new]:
            return f"{new_place} is another text, which sequence {sequence:,} was made of"
    same_length = len(old_documents) == len(new_documents)
    if not same_length or before.first_token_of(sequence) != now.first_token_of(sequence):
        return f"sequence {sequence:,} would not be the same"
    return None
