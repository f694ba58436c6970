"""What a corpus probably holds, by the portions that are there: for `headcount plan`.

If none is there the first one is prepared, which takes seconds and serves the scan, too. Its
numbers are scaled by stored bytes. Its sequences are also what a plan measures to say what the scan
costs.
"""

from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from headcount.jobs.corpus.preparation import CorpusWork, prepare_here
from headcount.schemas.errors import CorpusError, counted
from headcount.schemas.places import Place, sizes
from headcount.workers.inputs.corpus.sequence_index import SequenceIndex
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.inputs.store.token_store import open_portion

MOST_PORTIONS = 8  # portions that are prepared at most to find a first sequence
TIMED_TOKENS = 1 << 18  # tokens whose text is tokenised again to see how long the others will take


@dataclass(frozen=True)
class CorpusEstimate:
    """What a corpus probably holds, and what its preparation will probably take."""

    sample: Sequences  # the sequences of the portions that are there
    scale: float  # how often the whole corpus has what these portions have
    sequences: int  # of the scan
    tokens_missing: int  # tokens that the scan needs and the store does not have
    seconds: float  # to prepare them on this machine, in one process
    bytes: int  # that they will take in the store
    is_least: bool  # whether it may be far larger: nobody knows the size of Hub data


def estimate_corpus(sequences: Sequences, corpora: Place) -> CorpusEstimate | None:
    """What a corpus probably holds; None if the store has all, or its first portion is all."""
    work = CorpusWork(sequences, corpora)
    assert sequences.corpus is not None
    # `skip` and `shuffle` speak of the whole corpus. They are taken into account by numbers.
    choice = replace(sequences.corpus.choice, skip=0, shuffle=False)
    corpus = replace(sequences.corpus, choice=choice)
    for _ in range(MOST_PORTIONS):
        if work.is_done:
            return None
        there = work.index
        index = SequenceIndex(
            work.store, corpus, there.length, there.separator, beyond=there.beyond
        )
        for place, portion in zip(there.places, there.portions, strict=False):
            index.add(place.first_source, portion)
        if len(index):
            return _scaled(work, index)
        work.store.create()
        prepare_here(work, most=1)
    raise CorpusError(
        f"input: no sequence of {counted(sequences.text_length, 'token')} in the first "
        f"{index.tokens:,} tokens of the corpus; lower n_ctx, or look at where and "
        "files; headcount corpus prepare SCAN reads all of it"
    )


def _scaled(work: CorpusWork, index: SequenceIndex) -> CorpusEstimate:
    """The numbers of the first portions, scaled to the corpus."""
    sequences, store = work.sequences, work.store
    is_least = not work.total_bytes
    scale = 1.0 if is_least else work.total_bytes / max(1.0, work.covered_bytes())
    documents_taken = max(1.0, scale * index.places[-1].taken_before)
    share_left = 1 - min(1.0, work.index.corpus.choice.skip / documents_taken)
    available = max(1, round(scale * len(index) * share_left))
    total = available if sequences.enough is None else sequences.enough
    if not is_least and not sequences.is_drawn:
        total = min(total, available)
    needs_all = sequences.enough is None or work.index.corpus.is_read_whole
    share_needed = 1.0 if needs_all else min(1.0, total / available)
    missing = max(0, round(scale * index.tokens * share_needed) - index.tokens)
    # The text of some tokens takes as long as other text of the corpus.
    files = (open_portion(store, portion) for portion in index.portions)
    largest = max(files, key=lambda file: file.record.tokens)
    some_tokens = largest.tokens(0, min(TIMED_TOKENS, largest.record.tokens))
    parts = np.array_split(some_tokens, 256)
    texts = [sequences.tokenizer.text(ids.tolist()) for ids in parts]
    began = perf_counter()
    sequences.tokenizer.encode_many(texts)
    tokens_per_second = len(some_tokens) / (perf_counter() - began)
    bytes_by_name = dict(sizes(store.folder))
    stored = sum(bytes_by_name[portion.file_name] for portion in index.portions)
    scan = sequences.scan
    # The sample holds fewer sequences than the scan asks for: all of them are used.
    if not sequences.is_drawn:
        scan = scan.model_copy(update={"sequences": "all"})
    return CorpusEstimate(
        sample=Sequences(scan, sequences.info, index, index.corpus, sequences.partners),
        scale=scale,
        sequences=total,
        tokens_missing=missing,
        seconds=missing / tokens_per_second,
        bytes=round(missing * stored / max(1, index.tokens)),
        is_least=is_least,
    )
