"""What a corpus probably holds, from a sample: for `headcount plan`, which never tokenises much.

A few MB of text are tokenised, at places that lie evenly over the corpus, into a token store that
is thrown away. Their numbers are scaled by stored bytes. The sequences of the sample are also what
a plan measures to say what the scan costs.
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from time import perf_counter

import numpy as np

from headcount.jobs.corpus.stored_bytes import covered_bytes
from headcount.jobs.corpus.work import CorpusWork
from headcount.schemas.errors import CorpusError, counted
from headcount.schemas.files.places import Place
from headcount.workers.inputs.corpus.corpus import Corpus
from headcount.workers.inputs.corpus.documents import COMPRESSED
from headcount.workers.inputs.corpus.sequence_index import IndexBuilder, SequenceIndex
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.inputs.store.portions import Portion
from headcount.workers.inputs.store.preparation import prepare_portion
from headcount.workers.inputs.store.token_store import TokenStore

SAMPLE_TOKENS = 1 << 20
"""Tokens of a sample, about 4 MB of English text. A scan that lacks no more is planned exactly."""

SAMPLE_PLACES = 32
"""Places of a corpus that a sample is taken from."""

MOST_ROUNDS = 4
"""How often a sample without a sequence is made four times as large."""

SMALL_FILE = 1 << 20
"""Bytes of a file that a sample enters at its beginning only."""


@dataclass(frozen=True)
class CorpusEstimate:
    """What a corpus probably holds, and what its preparation will probably take."""

    sample: Sequences
    """The sequences of the sample."""
    sequences: int
    """Of the scan."""
    documents: int
    """Of the whole corpus, like the tokens and the bad rows."""
    tokens: int
    bad: int
    tokens_there: int
    """Tokens that the store has."""
    tokens_missing: int
    """Tokens that the scan needs and the store does not have."""
    seconds: float
    """To prepare them on this machine, in one process."""
    bytes: int
    """That they will take in the store."""
    sampled_tokens: int
    is_least: bool
    """Whether the corpus may be far larger: nobody knows the size of a data set of the Hub."""
    directory: ShortLivedDirectory
    """Holds the tokens of the sample."""


class ShortLivedDirectory:
    """A temporary directory that goes away with this object."""

    def __init__(self) -> None:
        self.path = Path(mkdtemp(prefix="headcount-plan-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def estimate_corpus(sequences: Sequences, corpora: Place) -> CorpusEstimate | None:
    """What the corpus of some sequences probably holds.

    None if the token store has all that they need, or lacks no more than a sample would take.
    """
    work = CorpusWork(sequences, corpora)
    if work.is_done or work.expected_tokens(work.orders()) <= SAMPLE_TOKENS:
        return None
    sample_tokens = SAMPLE_TOKENS
    for _ in range(MOST_ROUNDS):
        sample = _Sample(work, sample_tokens)
        if sample.index.sequences:
            return sample.estimate()
        # Documents that are long enough may be rare.
        sample_tokens *= 4
    raise CorpusError(
        f"input: no sequence of {counted(sequences.text_length, 'token')} in a sample of "
        f"{sample.tokens:,} tokens of the corpus; lower n_ctx, or look at where and files; "
        "headcount corpus prepare SCAN reads all of it"
    )


class _Sample:
    """Documents from evenly spread places of a corpus, tokenised."""

    def __init__(self, work: CorpusWork, most_tokens: int) -> None:
        self.work = work
        sequences = work.sequences
        assert sequences.corpus is not None
        # `skip` and `shuffle` speak of the whole corpus. They are taken into account by numbers.
        choice = replace(sequences.corpus.choice, skip=0, shuffle=False)
        self.corpus: Corpus = replace(sequences.corpus, choice=choice)
        self.directory = ShortLivedDirectory()
        # Pieces know the key of their store.
        self.folder = self.directory.path / work.store.key
        self.store: TokenStore = replace(work.store, folder=self.folder)
        self.stored_bytes = 0.0
        """Bytes of the files that the sample covers."""
        self.is_whole = True
        """Whether every source of the sample was read whole."""
        builder = IndexBuilder(self.corpus, self.store, sequences.text_length, None, None)
        places = list(_places(work.portions))
        most_here = -(-most_tokens // len(places))
        speeds: list[float] = []
        for portion in places:
            began = perf_counter()
            pieces = prepare_portion(self.store, portion, sequences.tokenizer, most_here)
            tokens = sum(piece.tokens for piece in pieces)
            speeds.append(tokens / (perf_counter() - began))
            builder.add(portion, pieces)
            self.is_whole &= pieces[-1].ended and portion.begins_source
            self.stored_bytes += covered_bytes(portion, pieces[-1])
        # The first place warms up, and a place with little text says little.
        self.tokens_per_second = max(1.0, *speeds)
        self.index: SequenceIndex = builder.index()
        self.documents, self.tokens, self.bad = builder.documents, builder.tokens, builder.bad

    def estimate(self) -> CorpusEstimate:
        """The numbers of the sample, scaled to the corpus."""
        work = self.work
        is_least = not work.total_bytes
        scale = 1.0 if is_least else work.total_bytes / max(1.0, self.stored_bytes)
        available = self._sequences(scale)
        enough = work.enough
        total = available if work.sequences.enough is None else work.sequences.enough
        if not is_least and not work.sequences.is_drawn:
            total = min(total, available)
        share_needed = 1.0 if enough is None else min(1.0, enough / max(1, available))
        missing = max(0, round(scale * self.tokens * share_needed) - work.tokens)
        stored = sum(file.stat().st_size for file in self.folder.rglob("*.parquet"))
        scan = work.sequences.scan
        # The sample holds fewer sequences than the scan asks for: all of them are used.
        if not work.sequences.is_drawn:
            scan = scan.model_copy(update={"sequences": "all"})
        return CorpusEstimate(
            sample=Sequences(
                scan,
                work.sequences.info,
                self.index,
                self.corpus,
                work.sequences.partners,
            ),
            sequences=total,
            documents=round(scale * self.documents),
            tokens=round(scale * self.tokens),
            bad=round(scale * self.bad),
            tokens_there=work.tokens,
            tokens_missing=missing,
            seconds=missing / self.tokens_per_second,
            bytes=round(missing * stored / max(1, self.tokens)),
            sampled_tokens=self.tokens,
            is_least=is_least,
            directory=self.directory,
        )

    def _sequences(self, scale: float) -> int:
        """How many sequences the corpus probably holds."""
        length = self.work.sequences.text_length
        documents_taken = joined = long_documents = 0
        for block in self.index.blocks(self.corpus):
            with_tokens = block.n_tokens[block.n_tokens > 0]
            documents_taken += len(block)
            joined += int(with_tokens.sum()) + len(with_tokens)
            long_documents += int(np.count_nonzero(with_tokens >= length))
        if self.corpus.packing == "document":
            sequences = scale * long_documents
        elif self.is_whole:
            sequences = scale * self.index.sequences
        else:
            # The text of every source ends within a sequence, on average in its middle.
            sequences = scale * joined / length - len(self.corpus.sources) / 2
        corpus = self.work.sequences.corpus
        assert corpus is not None
        share_left = 1 - min(1.0, corpus.choice.skip / max(1.0, scale * documents_taken))
        return max(1, round(sequences * share_left))


def _places(portions: list[Portion]) -> Iterator[Portion]:
    """What a sample reads, in the order of the corpus: beginnings in evenly spread files.

    A file of plain lines can be entered anywhere, every other file at its beginning.
    """
    ends = np.cumsum([max(1, portion.bytes) for portion in portions])
    targets = (np.arange(SAMPLE_PLACES) + 0.5) / SAMPLE_PLACES * ends[-1]
    last: tuple[int, int] | None = None
    for target in targets.tolist():
        number = int(np.searchsorted(ends, target, side="right"))
        offset = int(target - (ends[number - 1] if number else 0))
        portion = _entered(portions[number], offset)
        identity = portion.first_source, portion.start
        if identity != last:
            yield portion
        # Neighbouring places may lie in one small file, which is read once.
        last = identity


def _entered(portion: Portion, offset: int) -> Portion:
    """One source of a portion, from a place on that lies `offset` stored bytes behind its begin."""
    number = 0
    while number + 1 < len(portion.sources) and offset >= portion.files[number].bytes:
        offset -= portion.files[number].bytes
        number += 1
    source, state = portion.sources[number], portion.files[number]
    start = portion.start
    if source.path.endswith(COMPRESSED):
        # To reach a place in it means to read all that lies before.
        start = 0
    elif source.kind == "jsonl" and state.bytes > SMALL_FILE:
        # A small file is read whole, so that the sample holds whole files, too.
        start += offset
    return Portion(
        portion.first_source + number, (source,), (state,), start, None, state.bytes - start
    )
