"""What a scan finds in its corpus beside sequences: the fate of every document, and bad rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from headcount.schemas.errors import CorpusError, printable
from headcount.schemas.files.document_fates import FATES, OTHER, Fates
from headcount.workers.inputs.corpus.corpus import PART, Corpus
from headcount.workers.inputs.corpus.document_block import SKIPPED, DocumentBlock
from headcount.workers.inputs.corpus.sequence_index import BadRun
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
    sequences_left = sequences
    fates: dict[str, Counter[str]] = {}
    bad_run = BadRun()
    problems: list[str] = []
    carried = np.zeros(len(corpus.choice.columns), np.int64)
    for number in range(len(index.ends)):
        block = index.block(number, corpus)
        _count_fates(fates, block, _fate_of_each(block, sequences_left))
        sequences_left = max(0, sequences_left - block.sequences)
        # In the order of the files, even if the documents are shuffled.
        bad_documents = np.flatnonzero(block.n_tokens == BAD)
        bad_documents = bad_documents[np.argsort(block.position[bad_documents])]
        bad_run.add(block.position[bad_documents])
        room = NAMED_PROBLEMS - len(problems)
        problems += [reader.problem_of(block, i) for i in bad_documents[:room].tolist()]
        for i, column in enumerate(corpus.choice.columns):
            values = block.labels[field_column(column)]
            carried[i] += len(values) - values.null_count
    return Findings(
        fates=Fates.of_parts(fates),
        bad_in_a_row=bad_run.longest,
        problems=tuple(problems),
        carried=tuple(carried.tolist()),
    )


def _fate_of_each(block: DocumentBlock, sequences: int) -> np.ndarray:
    """For each document, the position of its fate in `FATES`, if so many sequences are measured.

    Later lines overrule earlier ones: an empty document between two used ones is empty.
    """
    n_tokens = block.n_tokens
    fate = np.full(len(n_tokens), FATES.index("not needed"))
    if block.packing == "document":
        fate[n_tokens < block.length] = FATES.index("too short")
        fate[block.long_documents[:sequences]] = FATES.index("used")
    else:
        used_end = min(sequences, block.sequences) * block.length
        fate[block.begins_of(np.arange(len(block))) < used_end] = FATES.index("used")
    fate[n_tokens == 0] = FATES.index("empty")
    fate[n_tokens == BAD] = FATES.index("bad")
    fate[n_tokens == SKIPPED] = FATES.index("skipped")
    return fate


def _count_fates(fates: dict[str, Counter[str]], block: DocumentBlock, fate: np.ndarray) -> None:
    """Add the documents of a block to the counts by part and fate."""
    parts = block.labels[PART].combine_chunks().dictionary_encode()
    # The first name is that of documents that do not say their part.
    names = ["", *parts.dictionary.to_pylist()]
    part_numbers = parts.indices.fill_null(-1).to_numpy(zero_copy_only=False) + 1
    counts = np.zeros((len(names), len(FATES)), np.int64)
    np.add.at(counts, (part_numbers, fate), 1)
    for name, counts_of_part in zip(names, counts.tolist(), strict=True):
        of_part = Counter(dict(zip(FATES, counts_of_part, strict=True)))
        if of_part := +of_part:  # Without zeros.
            fates.setdefault(name, Counter()).update(of_part)
    for name, count in block.others.items():
        fates.setdefault(name, Counter())[OTHER] += count


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
