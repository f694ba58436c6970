"""What a scan finds in its corpus beside sequences: the fate of every document, and bad rows."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np

from headcount.schemas.errors import CorpusError, printable
from headcount.schemas.files.document_fates import FATES, OTHER, Fates
from headcount.workers.inputs.corpus.corpus import PART, Corpus
from headcount.workers.inputs.corpus.document_block import SKIPPED, DocumentBlock
from headcount.workers.inputs.corpus.sequence_index import NO_SOURCE, BadRun, SequenceIndex
from headcount.workers.inputs.corpus.sequence_reader import SequenceReader
from headcount.workers.inputs.store.token_store import BAD, field_column

LISTED_PARTS = 20
"""Parts of a corpus that an error message lists."""

NAMED_PROBLEMS = 1000
"""Bad rows that are named; the others are counted."""


@dataclass(frozen=True)
class Findings:
    """What became of the documents of a corpus."""

    fates: Fates
    bad_in_a_row: int
    """The largest number of bad documents one after the other."""
    problems: tuple[str, ...]
    """The first bad documents in the order of the files, each with its problem."""
    carried: tuple[int, ...]
    """For each field that is carried into `sequences`: how many documents have it."""

    @property
    def bad(self) -> int:
        """How many documents are bad."""
        return self.fates.all.get("bad", 0)

    @property
    def documents(self) -> int:
        """How many documents were read, those that `where` does not select included."""
        return sum(self.fates.all.values())


def findings(reader: SequenceReader, sequences: int) -> Findings:
    """What became of the documents, in a run of the first `sequences` of a corpus."""
    corpus = reader.corpus
    is_everything = sequences >= len(reader)
    index = reader.index if is_everything else reader.index.up_to(sequences, corpus)
    survey = _Survey(reader, index, sequences)
    for number, block in enumerate(index.blocks(corpus)):
        survey.add(number, block)
    return survey.findings()


class _Survey:
    """Counts documents block by block."""

    def __init__(self, reader: SequenceReader, index: SequenceIndex, sequences: int) -> None:
        self.reader = reader
        self.index = index
        self.sequences_left = sequences
        self.text_ends = _ends_of_texts(index)
        self.fates: dict[str, Counter[str]] = {}
        self.bad_run = BadRun()
        self.problems: list[str] = []
        self.carried = np.zeros(len(reader.corpus.choice.columns), np.int64)

    def add(self, number: int, block: DocumentBlock) -> None:
        """Count the documents of the next block."""
        self._count_fates(block, self._fate_of_each(number, block))
        for part_name, count in block.others.items():
            self.fates.setdefault(part_name, Counter())[OTHER] += count
        # In the order of the files, even if the documents are shuffled.
        bad_documents = np.flatnonzero(block.n_tokens == BAD)
        bad_documents = bad_documents[np.argsort(block.position[bad_documents])]
        self.bad_run.add(block.position[bad_documents])
        room = NAMED_PROBLEMS - len(self.problems)
        self.problems += [
            self.reader.problem_of(block, document) for document in bad_documents[:room].tolist()
        ]
        for i, column in enumerate(self.reader.corpus.choice.columns):
            values = block.labels[field_column(column)]
            self.carried[i] += len(values) - values.null_count

    def _count_fates(self, block: DocumentBlock, fate: np.ndarray) -> None:
        parts = block.labels[PART].combine_chunks()
        # The first name is that of documents that do not say their part.
        names = ["", *parts.dictionary.to_pylist()]
        part_numbers = parts.indices.fill_null(-1).to_numpy() + 1
        counts = np.zeros((len(names), len(FATES)), np.int64)
        np.add.at(counts, (part_numbers, fate), 1)
        for name, counts_of_part in zip(names, counts.tolist(), strict=True):
            by_fate = {
                fate_name: count
                for fate_name, count in zip(FATES, counts_of_part, strict=True)
                if count
            }
            if by_fate:
                self.fates.setdefault(name, Counter()).update(by_fate)

    def _fate_of_each(self, number: int, block: DocumentBlock) -> np.ndarray:
        """For each document, the position of its fate in `FATES`.

        Later lines overrule earlier ones: an empty document between two used ones is empty.
        """
        n_tokens = block.n_tokens
        fate = np.full(len(n_tokens), FATES.index("not needed"))
        if block.packing == "document":
            fate[n_tokens < block.length] = FATES.index("too short")
            fate[block.long_documents[: self.sequences_left]] = FATES.index("used")
        else:
            fate[self._is_in_a_sequence(number, block)] = FATES.index("used")
        self.sequences_left = max(0, self.sequences_left - block.sequences)
        fate[n_tokens == 0] = FATES.index("empty")
        fate[n_tokens == BAD] = FATES.index("bad")
        fate[n_tokens == SKIPPED] = FATES.index("skipped")
        return fate

    def _is_in_a_sequence(self, number: int, block: DocumentBlock) -> np.ndarray:
        """Which documents have a token in one of the sequences, if documents are joined."""
        is_used = np.zeros(len(block), bool)
        sequences_left = self.sequences_left
        for text in block.texts:
            # The last text of a block may go on in later blocks, and its last sequence too.
            is_last = text is block.texts[-1]
            text_end = self.text_ends[number] if is_last else text.joined_end
            sequences_before = text.joined_before // block.length
            wanted = sequences_before + max(0, sequences_left)
            # The token behind the last sequence that is wanted.
            used_end = min(text_end // block.length, wanted) * block.length
            documents = np.arange(text.begin, text.end)
            is_used[documents] = block.begins_of(documents) < used_end
            sequences_left -= text.joined_end // block.length - sequences_before
        return is_used

    def findings(self) -> Findings:
        """What was found in all blocks."""
        return Findings(
            fates=Fates.of_parts(self.fates),
            bad_in_a_row=self.bad_run.longest,
            problems=tuple(self.problems),
            carried=tuple(self.carried.tolist()),
        )


def _ends_of_texts(index: SequenceIndex) -> list[int]:
    """For each block: where the joined text of its last document ends, in this block or later."""
    if len(index.ends) != len(index.pieces):
        # Shuffled documents are all in one block, and make one text.
        return [sys.maxsize] * len(index.ends)
    behind = [index.place(number + 1) for number in range(len(index.pieces))]
    ends: list[int] = []
    text, end = NO_SOURCE, 0
    # Backwards, the first end of a text that is met is its last.
    for place in reversed(behind):
        if place.joined_source != text:
            text, end = place.joined_source, place.joined_before
        ends.append(end)
    return ends[::-1]


@dataclass(frozen=True)
class BadRows:
    """How much of a corpus may be bad."""

    share: float
    """Share of all documents."""
    in_a_row: int
    """Documents one after the other."""

    def check(self, found: Findings) -> None:
        """Refuse a corpus of which more is bad."""
        names = found.problems
        first_names = f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
        if found.bad_in_a_row > self.in_a_row:
            raise CorpusError(
                f"input: more than {self.in_a_row:,} documents in a row are bad: {first_names}; "
                "mend or remove them, or leave them out: "
                f"--set bad_rows_in_a_row={10 * self.in_a_row}"
            )
        share = found.bad / max(1, found.documents)
        if share > self.share:
            # Rounded up, so that the advised value is large enough.
            sufficient_share = min(1.0, np.ceil(share * 1000) / 1000)
            raise CorpusError(
                f"input: {found.bad:,} of {found.documents:,} documents are bad, more than "
                f"bad_rows = {self.share:g}: {first_names}; mend or remove them, or leave them "
                f"out: --set bad_rows={sufficient_share:g}"
            )


def check_choice(found: Findings, corpus: Corpus) -> None:
    """Refuse conditions that no document fits, and fields to carry that no document has."""
    fates = found.fates.all
    documents_taken = found.documents - fates.get(OTHER, 0)
    if corpus.choice.where and fates.get(OTHER) and documents_taken == found.bad:
        counts = Counter(
            {name: counts[OTHER] for name, counts in found.fates.parts.items() if OTHER in counts}
        )
        del counts[""]
        parts = ", ".join(
            f"{printable(name)} ({count:,})" for name, count in counts.most_common(LISTED_PARTS)
        )
        described = " and ".join(
            f"{name} = {' or '.join(map(repr, values))}" for name, values in corpus.choice.where
        )
        raise CorpusError(
            f"input.where: none of {found.documents:,} documents has {described}; "
            f"pile_set_name is {parts or 'nowhere'}; change input.where"
        )
    for column, count in zip(corpus.choice.columns, found.carried, strict=True):
        if not count and documents_taken:
            raise CorpusError(
                f"input.columns: none of {documents_taken:,} documents has a field {column}, nor "
                "its meta; leave it out, or write its name as it is there"
            )
