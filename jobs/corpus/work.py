"""How far the tokens of a corpus are prepared, and what is to be prepared next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headcount.jobs.corpus.stored_bytes import covered_bytes
from headcount.jobs.upkeep import metrics
from headcount.schemas.files.places import Place
from headcount.workers.inputs.corpus.documents import COMPRESSED
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.inputs.store.portions import portions_of
from headcount.workers.inputs.store.preparation import PreparationProgress
from headcount.workers.inputs.store.token_store import Piece, TokenStore

SPARE_SHARE = 0.1
"""Share by which more is tokenised than the sequences so far suggest."""

LEAST_TOKENS = 1 << 14
"""Tokens that are prepared at least, so that long documents end in few rounds."""

TOKENS_PER_BYTE = 0.25
"""Tokens in a byte of text, before anything of the corpus is known. English has about this."""

COMPRESSION = 3.0
"""How far texts in .zst, .gz and .parquet files are compressed, before any is read."""

LISTED_AT_ONCE = 64
"""Portions whose pieces are looked for together."""

LISTERS = 16
"""Threads that look for pieces."""


@dataclass(frozen=True)
class CorpusProgress:
    """How far the preparation of a corpus is, what was there before included."""

    documents: int
    tokens: int
    bad: int
    share: float | None
    """Share of what the scan needs; None if nobody knows how much that is."""
    tokens_per_second: float | None
    """None until something was prepared."""
    seconds_left: float | None
    waiting: bool = False
    """Whether nothing happens here, because another process prepares the same texts."""


Watch = Callable[[CorpusProgress], None]
"""Is called again and again while a corpus is prepared."""


def unwatched(progress: CorpusProgress) -> None:
    """Watch a corpus being prepared and show nothing."""


@dataclass(frozen=True)
class Order:
    """A portion that is to be prepared."""

    number: int
    """The portion's number in the corpus."""
    most_tokens: int | None
    """Stop after the piece with which so many tokens were written; None prepares all of it."""


class CorpusWork:
    """What is there of a corpus, and what is still to be prepared.

    Pieces are added to the index in the order of the corpus. Those of later portions wait for the
    portions before them.
    """

    def __init__(self, sequences: Sequences, corpora: Place, watch: Watch = unwatched) -> None:
        assert sequences.corpus is not None
        self.sequences = sequences
        self.watch = watch
        self.store: TokenStore = sequences.store(corpora)
        self.portions = portions_of(sequences.corpus.sources)
        self.total_bytes = sum(portion.bytes for portion in self.portions)
        self.enough = None if sequences.corpus.is_read_whole else sequences.enough
        """Sequences that suffice; None if the whole corpus is needed."""
        self.began = time.monotonic()
        self.start_again()
        self.tokens_before = self.tokens
        """Tokens that earlier preparations left."""

    def start_again(self) -> None:
        """Add what the store has, from the beginning of the corpus on."""
        self.builder = self.sequences.index_builder(self.store)
        self.frontier = 0
        """The number of the first portion that is not in the index with all its pieces."""
        self.added: list[Piece] = []
        """The pieces of that portion that are in the index."""
        self.pieces: dict[int, list[Piece]] = {}
        """Committed pieces of some portions, by number of the portion."""
        self.live: dict[int, PreparationProgress] = {}
        """What is being prepared now, by number of the portion."""
        self.documents = self.tokens = self.bad = 0
        """Sums over the committed pieces."""
        self.covered_bytes = 0.0
        """Stored bytes of which they are the tokens."""
        self.tokens_needed: int | None = None
        """Tokens that the scan probably needs; None if it needs all or nobody has asked yet."""
        for first in range(0, len(self.portions), LISTED_AT_ONCE):
            # A store takes milliseconds for each portion, so several are listed at once.
            with ThreadPoolExecutor(LISTERS) as listers:
                portions = self.portions[first : first + LISTED_AT_ONCE]
                for number, chain in enumerate(listers.map(self.store.pieces, portions), first):
                    self._note(number, chain)
            self._add_in_order()
            is_gap_found = self.frontier < min(first + LISTED_AT_ONCE, len(self.portions))
            # Behind a gap, only a scan of everything must know at once what is there.
            if self.is_done or (is_gap_found and self.enough is not None):
                break

    @property
    def listed(self) -> range:
        """The numbers of the portions whose pieces are in the index."""
        return range(min(self.frontier + 1, len(self.pieces)))

    @property
    def state(self) -> tuple[int, int]:
        """Changes with every piece that is committed."""
        return self.frontier, sum(map(len, self.pieces.values()))

    @property
    def is_done(self) -> bool:
        """Whether the index has all that the scan needs, or so many bad rows that it ends."""
        return self.builder.may_stop or self.frontier == len(self.portions)

    def finish(self, number: int) -> None:
        """Take in what was committed of a portion."""
        self.live.pop(number, None)
        first = self.added if number == self.frontier else []
        tokens_before = self.tokens
        self._note(number, self.store.pieces(self.portions[number], first))
        metrics.tokens_prepared(self.tokens - tokens_before)
        self._add_in_order()
        self.show()

    def note_progress(self, number: int, progress: PreparationProgress) -> None:
        """Take in how far the preparation of a portion is."""
        self.live[number] = progress
        self.show()

    def orders(self) -> list[Order]:
        """What is to be prepared next: all that is missing, or what is probably enough."""
        missing = [n for n in range(self.frontier, len(self.portions)) if not self._has_ended(n)]
        if self.enough is None:
            return [Order(number, None) for number in missing]
        wanted = self._tokens_wanted(self.enough)
        self.tokens_needed = self.tokens + wanted
        orders: list[Order] = []
        for number in missing:
            orders.append(Order(number, wanted))
            wanted -= self._tokens_left(number)
            if wanted <= 0:
                break
        return orders

    def expected_tokens(self, orders: Iterable[Order]) -> int:
        """About how many tokens some orders bring."""
        most = [order.most_tokens for order in orders]
        left = [self._tokens_left(order.number) for order in orders]
        return sum(
            tokens if limit is None else min(limit, tokens)
            for limit, tokens in zip(most, left, strict=True)
        )

    def show(self) -> None:
        """Tell how far the preparation is."""
        documents, tokens, bad = self.documents, self.tokens, self.bad
        for number, progress in self.live.items():
            # It counts the committed pieces of its portion, too.
            there = self.pieces.get(number, [])
            documents += progress.documents - sum(piece.documents for piece in there)
            tokens += progress.tokens - sum(piece.tokens for piece in there)
            bad += progress.bad - sum(piece.bad for piece in there)
        prepared = tokens - self.tokens_before
        seconds = time.monotonic() - self.began
        speed = prepared / seconds if prepared else None
        share = self._share(tokens)
        left = tokens * (1 - share) / share if share else None
        self.watch(
            CorpusProgress(
                documents,
                tokens,
                bad,
                share,
                speed,
                left / speed if left is not None and speed else None,
                bool(self.live) and all(progress.waiting for progress in self.live.values()),
            )
        )

    def _share(self, tokens: int) -> float | None:
        """How much of what the scan needs is there, if some tokens are."""
        if self.tokens_needed is not None:
            return min(1.0, tokens / max(1, self.tokens_needed))
        tokens_per_byte = self._tokens_per_byte()
        if not self.total_bytes or tokens_per_byte is None:
            return None
        return min(1.0, tokens / tokens_per_byte / self.total_bytes)

    def _note(self, number: int, chain: list[Piece]) -> None:
        """Know the pieces of a portion, and count them."""
        # What was known of the portion before is taken back, so that nothing counts twice.
        for sign, pieces in ((-1, self.pieces.get(number, [])), (1, chain)):
            self.documents += sign * sum(piece.documents for piece in pieces)
            self.tokens += sign * sum(piece.tokens for piece in pieces)
            self.bad += sign * sum(piece.bad for piece in pieces)
            if pieces:
                self.covered_bytes += sign * covered_bytes(self.portions[number], pieces[-1])
        self.pieces[number] = chain

    def _add_in_order(self) -> None:
        """Add pieces to the index, up to the first that is missing."""
        while not self.is_done and self.frontier in self.pieces:
            portion = self.portions[self.frontier]
            for piece in self.pieces[self.frontier][len(self.added) :]:
                self.builder.add(portion, [piece])
                self.added.append(piece)
                if self.builder.may_stop:
                    return
            if not self._has_ended(self.frontier):
                return
            self.frontier += 1
            self.added = []

    def _has_ended(self, number: int) -> bool:
        pieces = self.pieces.get(number)
        return bool(pieces) and pieces[-1].ended

    def _tokens_wanted(self, enough: int) -> int:
        """Tokens that are probably missing for `enough` sequences."""
        sequences, tokens = self.builder.sequences, self.builder.tokens
        per_sequence = tokens / sequences if sequences else self.sequences.text_length
        wanted = (1 + SPARE_SHARE) * (enough - sequences) * per_sequence + LEAST_TOKENS
        if not sequences:
            # So many tokens gave nothing, for instance because of `skip`: look twice as far.
            wanted = max(wanted, tokens)
        return int(wanted)

    def _tokens_left(self, number: int) -> int:
        """About how many tokens a portion has that are not prepared yet."""
        portion = self.portions[number]
        is_compressed = portion.sources[0].path.endswith((*COMPRESSED, ".parquet"))
        usual = TOKENS_PER_BYTE * COMPRESSION if is_compressed else TOKENS_PER_BYTE
        all_tokens = portion.bytes * (self._tokens_per_byte() or usual)
        there = sum(piece.tokens for piece in self.pieces.get(number, []))
        return max(1, int(all_tokens) - there)

    def _tokens_per_byte(self) -> float | None:
        """Tokens in a stored byte, as far as the corpus is prepared."""
        return self.tokens / self.covered_bytes if self.covered_bytes else None
