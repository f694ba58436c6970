"""The sequences of a scan, by index: the same tokens whatever shard, actor or order asks for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from schemas.document_fates import Fates
from schemas.errors import CorpusError, ModelError, ScanError
from schemas.scan import Scan
from workers.inputs import Draw, InputFamily, Labelled, find_input
from workers.inputs.bigram_backcopy import BUNDLED_TEXT
from workers.inputs.corpus import Corpus
from workers.inputs.document_index import (
    BadRows,
    Index,
    Watch,
    build_index,
    check_choice,
    named_problems,
    unwatched,
)
from workers.inputs.sequence_reader import SequenceReader
from workers.inputs.text_files import check_bundled, text_record
from workers.model.model_info import ModelInfo, no_token
from workers.model.text_tokenizer import TextTokenizer


@dataclass(frozen=True)
class ShardInput:
    """What a replica needs of a shard: its sequences, and where they came from."""

    shard: int
    start: int
    tokens: np.ndarray
    """`[sequence pos]`, int32."""
    origin: dict[str, list[Any]]
    """Columns of the `sequences` table by name."""
    bad_rows: list[str]
    labels: list[list[str]] | None = None
    """The label of every token, "" where it has none; none where the family has no labels."""
    partner: np.ndarray | None = None
    """The partner sequences, like `tokens`; none where the family has none."""


class Sequences:
    """Sequences `0 .. len-1` of a scan.

    For a corpus, `index` must have been built (`make_index`) or read; `corpus` is given where its
    files were listed before. `partners` are drawn too if an intervention takes something from them.
    """

    def __init__(
        self,
        scan: Scan,
        info: ModelInfo,
        index: Index | None = None,
        corpus: Corpus | None = None,
        partners: bool = False,
    ) -> None:
        self.scan, self.info, self.index, self.partners = scan, info, index, partners
        self.least_sequences = 0
        """Sequences that the index reaches as far as at least: a run has them already."""
        if corpus is not None:
            self.corpus = self._chosen(corpus)
        self.family = find_input(scan.input.family)
        self.options = self.family.check(scan.input.options)
        if scan.n_ctx > info.n_ctx:
            raise ScanError(
                f"n_ctx: {scan.n_ctx} is beyond the {info.n_ctx} positions of {info.name}"
            )
        if scan.bos and info.bos_token_id is None:
            raise ModelError(
                f"{no_token(info, 'bos_token_id', 'beginning-of-sequence')}; set bos = false"
            )
        if self.options.get("repeat_bos") and not scan.bos:
            raise ScanError("input.repeat_bos: expected with bos = true only; leave it out")
        _check_range(self.options, info)
        for key in ("files", "text"):
            value = self.options.get(key)
            for path in [value] if isinstance(value, str) else value or ():
                if path != BUNDLED_TEXT:
                    check_bundled(f"input.{key}", path)
        if self.length < 1:
            raise ScanError(
                f"n_ctx: {scan.n_ctx} leaves no room for a token beside the beginning-of-sequence "
                "token"
            )
        if self.family.synthetic and scan.sequences == "all":
            raise ScanError(
                f"sequences: expected a number, got 'all'; the family {self.family.name} has no end"
            )

    @property
    def length(self) -> int:
        """Tokens of a sequence that are not the beginning-of-sequence token."""
        return self.scan.n_ctx - self.scan.bos

    @cached_property
    def corpus(self) -> Corpus | None:
        """The corpus, its files listed; none where the family is synthetic."""
        return None if self.family.synthetic else self._chosen(self.family.corpus(self.options))

    def _chosen(self, corpus: Corpus) -> Corpus:
        return replace(corpus, choice=corpus.choice.resolved(self.scan.seed))

    @property
    def record(self) -> dict[str, Any]:
        """Identifies the files that the sequences depend on."""
        if self.corpus is not None:
            return self.corpus.record
        text = self.options.get("text")
        return {} if text is None or text == BUNDLED_TEXT else {"text": text_record(text)}

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer."""
        return TextTokenizer(Path(self.info.path), self.info.d_vocab)

    @cached_property
    def reads_text(self) -> bool:
        """Whether the tokenizer has a part in the sequences: in those of a corpus, and of a synthetic
        family that asks for it when its first sequence is drawn.
        """
        if self.corpus is None:
            self._labelled(0, self.family)
            return "tokenizer" in self.__dict__
        return True

    def use_index(self, index: Index | None) -> None:
        """Read the corpus by another index, or by one that is still to be made."""
        self.index = index
        self.__dict__.pop("_reader", None)

    def indexed_enough(self, least: int) -> bool:
        """Whether the index reaches as far as the scan needs it, and at least `least` sequences."""
        assert self.corpus is not None
        assert self.index is not None
        if self.scan.sequences == "all":
            return self.index.whole_sources == len(self.corpus.sources)
        return len(self._reader) >= max(least, self.scan.sequences)

    def make_index(self, watch: Watch = unwatched, known: Index | None = None) -> None:
        """Index the corpus as far as the scan needs it; nothing to do for a synthetic family.
        Documents that `known` has are not tokenised again.
        """
        if self.corpus is not None and self.index is None:
            self.index = build_index(
                self.corpus, self.tokenizer, self.text_length, self.enough, watch, known,
                self.bad_rows.in_a_row,
            )  # fmt: skip

    def check_index(self) -> None:
        """Refuse a corpus that is too bad, or has nothing of what the scan asks for."""
        if self.corpus is not None and self.index is not None:
            self.bad_rows.check(self.index, self.corpus)
            check_choice(self.index, self.corpus)

    @property
    def bad_rows(self) -> BadRows:
        """How much of the corpus may be bad."""
        return BadRows(self.scan.bad_rows, self.scan.bad_rows_in_a_row)

    @property
    def enough(self) -> int | None:
        """Sequences that the index is made for; none means all that there are."""
        if self.scan.sequences == "all":
            return None
        return max(self.scan.sequences, self.least_sequences)

    @property
    def fates(self) -> Fates | None:
        """What became of the documents of a corpus; none where the family is synthetic."""
        return None if self.corpus is None else self._reader.fates(len(self))

    def reader_of(self, index: Index, corpus: Corpus) -> SequenceReader:
        """Sequences of this scan by another index of its corpus."""
        return SequenceReader(corpus, index, self.tokenizer, self.text_length, self._separator)

    @property
    def reader(self) -> SequenceReader:
        """Sequences by the index."""
        return self._reader

    def __len__(self) -> int:
        """How many sequences the scan has; a corpus that holds fewer than asked for is an error."""
        if self.corpus is None:
            return int(self.scan.sequences)
        held, asked = len(self._reader), self.scan.sequences
        if held == 0 or (asked != "all" and held < asked):
            assert self.index is not None
            bad = named_problems(self.index, self.corpus)
            wanted = "at least 1" if asked == "all" else f"{asked:,}"
            advice = ["lower n_ctx or sequences"]
            if self.corpus.packing != "concat":
                advice.append("or pack with concat")
            if bad:
                advice.append(f"or mend {bad[0]}")
            raise CorpusError(
                f"input: the corpus holds {held:,} sequences of {self.text_length} tokens of text "
                f"({self.corpus.packing} packing), {wanted} wanted, of "
                f"{self._reader.fates(held).line}; {', '.join(advice)}"
            )
        return held if asked == "all" else asked

    @property
    def shards(self) -> int:
        """How many shards the sequences make."""
        return -(-len(self) // self.scan.sequences_per_shard)

    def shard(self, number: int) -> ShardInput:
        """The input of one shard; in order they are read fastest."""
        start = number * self.scan.sequences_per_shard
        stop = min(start + self.scan.sequences_per_shard, len(self))
        if self.corpus is None:
            return self._drawn(number, start, stop)
        bad_rows = self._reader.bad_rows(start, stop)
        tokens, origin = self._reader.read(start, stop)
        tokens = self._with_bos(self._arranged(start, tokens))
        if self.corpus.repeat_bos:
            tokens = tokens[:, np.arange(self.scan.n_ctx) % (self.text_length + self.scan.bos)]
        return ShardInput(number, start, tokens, origin, bad_rows)

    @property
    def text_length(self) -> int:
        """Tokens of text in a sequence of the corpus; the rest repeats them."""
        assert self.corpus is not None
        chunk = self.corpus.chunk or self.length
        if chunk > self.length:
            raise ScanError(
                f"input.chunk: expected 1 to {self.length}, the tokens in a sequence, got {chunk}"
            )
        return chunk

    def _arranged(self, start: int, text: np.ndarray) -> np.ndarray:
        """Sequences of a corpus out of their text: repeated or shuffled where the family says so."""
        assert self.corpus is not None
        if self.corpus.chunk is not None:
            return text[:, np.arange(self.length) % self.corpus.chunk]
        if self.corpus.tokens_shuffled:
            return np.array(
                [self._draw_of(start + i).rng.permutation(row) for i, row in enumerate(text)]
            )
        return text

    @cached_property
    def _reader(self) -> SequenceReader:
        assert self.corpus is not None
        if self.index is None:
            raise RuntimeError("make_index() comes first")
        if self.corpus.packing == "concat" and self._separator is None:
            raise ModelError(
                f"{no_token(self.info, 'eos_token_id', 'end-of-text')} to join documents with; "
                "pack by document"
            )
        return self.reader_of(self.index, self.corpus)

    @property
    def _separator(self) -> int | None:
        """The token that joins documents."""
        end = self.info.eos_token_id
        return self.info.bos_token_id if end is None else end

    @cached_property
    def _ordinary(self) -> np.ndarray:
        special = [t for t in (self.info.bos_token_id, self.info.eos_token_id) if t is not None]
        return np.setdiff1d(np.arange(self.info.d_vocab), special)

    def _draw_of(self, sequence: int) -> Draw:
        stream = self.family.stream
        return Draw.of(
            self.scan.seed, sequence, stream, self.length, self._ordinary, lambda: self.tokenizer
        )

    def _drawn(self, number: int, start: int, stop: int) -> ShardInput:
        drawn = [self._labelled(i, self.family) for i in range(start, stop)]
        tokens = self._with_bos(np.array([tokens for tokens, _ in drawn], np.int32))
        bos = [""] * self.scan.bos
        labels = [bos + names for _, names in drawn if names is not None]
        return ShardInput(
            number, start, tokens, {}, [], labels or None, self._partners(start, stop)
        )

    def _partners(self, start: int, stop: int) -> np.ndarray | None:
        """The partner of every sequence, if the family has partners and they are wanted."""
        if self.family.partner is None or not self.partners:
            return None
        family = find_input(self.family.partner)
        drawn = [self._labelled(i, family)[0] for i in range(start, stop)]
        return self._with_bos(np.array(drawn, np.int32))

    def _labelled(self, sequence: int, family: InputFamily) -> tuple[np.ndarray, list[str] | None]:
        """One sequence of a synthetic family, and the label of every token where the family has
        labels.
        """
        returned = family.function(self._draw_of(sequence), **self.options)
        tokens = np.asarray(returned.tokens if isinstance(returned, Labelled) else returned)
        if tokens.shape != (self.length,):
            raise ScanError(
                f"input family {family.name}: returned shape {tokens.shape}, expected "
                f"({self.length},)"
            )
        return tokens, returned.names(family.name) if isinstance(returned, Labelled) else None

    def _with_bos(self, tokens: np.ndarray) -> np.ndarray:
        if not self.scan.bos:
            return tokens
        return np.concatenate(
            [np.full((len(tokens), 1), self.info.bos_token_id, np.int32), tokens], axis=1
        )


def _check_range(options: dict[str, Any], info: ModelInfo) -> None:
    """Refuse to draw from tokens that a model does not have, or from none."""
    low, high = options.get("low"), options.get("high")
    if low is not None and low >= info.d_vocab:
        raise ScanError(
            f"input.low: expected 0 to {info.d_vocab - 1}, the token ids of {info.name}, got {low}"
        )
    if high is None:
        return
    if high > info.d_vocab:
        raise ScanError(
            f"input.high: expected 1 to {info.d_vocab}, the tokens of {info.name}, got {high}"
        )
    if low is not None and low >= high:
        raise ScanError(f"input.low: expected less than high = {high}, got {low}")
