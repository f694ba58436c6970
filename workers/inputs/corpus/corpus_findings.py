"""What a scan finds in its corpus beside sequences: the fate of every document, and bad rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from headcount.schemas.errors import CorpusError, printable
from headcount.schemas.files.document_fates import FATES, OTHER, Fates
from headcount.workers.inputs.corpus.corpus import PART, Corpus
from headcount.workers.inputs.corpus.sequence_index import SKIPPED, BadRun, SequenceIndex
from headcount.workers.inputs.store.token_store import BAD, field_column

LISTED_PARTS = 20  # parts of a corpus that an error message lists
NAMED_PROBLEMS = 1000  # bad rows that are named; the others are counted


@dataclass(frozen=True)
class Findings:
    """What became of the documents of a corpus."""

    fates: Fates
    bad_in_a_row: int  # the largest number of bad documents one after the other
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


def findings(index: SequenceIndex, sequences: int) -> Findings:
    """What became of the documents, in a run of the first `sequences` of a corpus."""
    index = index.up_to(sequences) if sequences < len(index) else index
    corpus = index.corpus
    sequences_left = sequences
    fates: dict[str, Counter[str]] = defaultdict(Counter)
    bad_run = BadRun()
    problems: list[str] = []
    carried = np.zeros(len(corpus.choice.columns), np.int64)
    for number in range(len(index.ends)):
        block = index.block(number)
        # For each document the position of its fate in `FATES`. Later lines overrule earlier ones:
        # an empty document between two used ones is empty.
        n_tokens = block.n_tokens
        fate = np.full(len(block), FATES.index("not needed"))
        if corpus.packing == "document":
            fate[n_tokens < block.length] = FATES.index("too short")
            fate[block.long_documents[:sequences_left]] = FATES.index("used")
        else:
            used_end = min(sequences_left, block.sequences) * block.length
            fate[block.begins_of(np.arange(len(block))) < used_end] = FATES.index("used")
        fate[n_tokens == 0] = FATES.index("empty")
        fate[n_tokens == BAD] = FATES.index("bad")
        fate[n_tokens == SKIPPED] = FATES.index("skipped")
        sequences_left = max(0, sequences_left - block.sequences)
        # Documents that do not say their part count under the empty name.
        parts = block.table[PART].fill_null("").combine_chunks().dictionary_encode()
        counts = np.zeros((len(parts.dictionary), len(FATES)), np.int64)
        np.add.at(counts, (parts.indices.to_numpy(), fate), 1)
        for name, counts_of_part in zip(parts.dictionary.to_pylist(), counts.tolist(), strict=True):
            fates[name] += Counter(dict(zip(FATES, counts_of_part, strict=True)))
        for name, count in block.others.items():
            fates[name][OTHER] += count
        # In the order of the files, even if the documents are shuffled.
        bad_documents = np.flatnonzero(n_tokens == BAD)
        bad_documents = bad_documents[np.argsort(block.position[bad_documents])]
        bad_run.add(block.position[bad_documents])
        room = NAMED_PROBLEMS - len(problems)
        problems += [index.problem_of(block, i) for i in bad_documents[:room].tolist()]
        for i, column in enumerate(corpus.choice.columns):
            carried[i] += len(block) - block.table[field_column(column)].null_count
    return Findings(
        Fates.of_parts(fates), bad_run.longest, tuple(problems), tuple(carried.tolist())
    )


def check_bad_rows(found: Findings, share: float, in_a_row: int) -> None:
    """Refuse a corpus with a larger share of bad documents, or more of them one after the other."""
    names = found.problems
    first_names = f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
    if found.bad_in_a_row > in_a_row:
        raise CorpusError(
            f"input: more than {in_a_row:,} documents in a row are bad: {first_names}; mend or "
            f"remove them, or leave them out: --set bad_rows_in_a_row={10 * in_a_row}"
        )
    share_found = found.bad / max(1, found.documents)
    if share_found > share:
        # Rounded up, so that the advised value is large enough.
        sufficient_share = min(1.0, np.ceil(share_found * 1000) / 1000)
        raise CorpusError(
            f"input: {found.bad:,} of {found.documents:,} documents are bad, more than bad_rows = "
            f"{share:g}: {first_names}; mend or remove them, or leave them out: --set "
            f"bad_rows={sufficient_share:g}"
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
