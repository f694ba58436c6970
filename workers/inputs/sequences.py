"""The sequences of a scan, by index: the same tokens in whatever shard, actor or order they are
read.

A corpus is read through its index. A synthetic family is drawn, each sequence from a random stream
of its own. Either way the beginning-of-sequence token comes first if the scan asks for it.
"""

import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from headcount.schemas.errors import CorpusError, ModelError, ScanError, printable
from headcount.schemas.files.document_fates import OTHER, Fates
from headcount.schemas.places import Place
from headcount.schemas.scans.scan import Scan
from headcount.workers.inputs import INPUTS, Draw, InputFamily, Labelled
from headcount.workers.inputs.corpus.corpus import Corpus
from headcount.workers.inputs.corpus.sequence_index import Findings, Origin, SequenceIndex
from headcount.workers.inputs.corpus.text_files import check_bundled, text_record
from headcount.workers.inputs.families.bigram_backcopy import BUNDLED_TEXT
from headcount.workers.inputs.store.token_store import TokenStore
from headcount.workers.model.info.description import no_token
from headcount.workers.model.info.text_tokenizer import TextTokenizer
from headcount.workers.model.model_info import ModelInfo

LISTED_PARTS = 20  # parts of a corpus that an error message lists


@dataclass(frozen=True)
class ShardInput:
    """What a replica needs of a shard: its sequences, and where they came from."""

    shard: int
    start: int  # the index of its first sequence in the scan
    tokens: np.ndarray  # `[sequence pos]`, int32
    origin: Origin
    bad_rows: list[str]
    labels: list[list[str]] | None = None  # of every token, "" for none; None: no labels
    partner: np.ndarray | None = None  # the partner sequences, if the family has them


class Sequences:
    """Sequences `0 .. len-1` of a scan.

    A corpus needs an `index`, which `new_index` begins. A `corpus` is given if its files were
    listed before. `partners` says whether partner sequences are drawn too,
    for interventions that take something from them.
    """

    def __init__(
        self,
        scan: Scan,
        info: ModelInfo,
        index: SequenceIndex | None = None,
        corpus: Corpus | None = None,
        partners: bool = False,
    ) -> None:
        self.scan = scan
        self.info = info
        self.index = index
        self.partners = partners
        self.least_sequences = 0  # of a run that is there: the index must reach as far
        self.has_read_tokenizer = False
        self._last_findings: tuple[int, Findings] | None = None
        if corpus is not None:
            self.corpus = corpus
        self.family = INPUTS.named(scan.input.family, "input.family")
        self.options = self.family.check(scan.input.options)
        self._check()

    def _check(self) -> None:
        """Refuse what does not fit the model, the scan or our files."""
        info, options = self.info, self.options
        if self.has_bos and info.bos_token_id is None:
            raise ModelError(f"{no_token(info, 'bos_token_id')}; set bos = false")
        for problem in self._problems():
            raise ScanError(problem)
        for key in ("files", "text"):
            value = options.get(key)
            for path in [value] if isinstance(value, str) else value or ():
                if path != BUNDLED_TEXT:
                    check_bundled(f"input.{key}", path)

    def _problems(self) -> Iterator[str]:
        """What does not fit the model or the scan, in the order in which it is looked for."""
        scan, info, options = self.scan, self.info, self.options
        ids = f"0 to {info.d_vocab - 1}, the token ids of {info.name}"
        if scan.n_ctx > info.n_ctx:
            yield f"n_ctx: {scan.n_ctx} is beyond the {info.n_ctx} positions of {info.name}"
        if options.get("repeat_bos") and not self.has_bos:
            yield "input.repeat_bos: expected with bos = true only; leave it out"
        low, high = options.get("low", 0), options.get("high")
        end = info.d_vocab if high is None else high
        if low >= info.d_vocab:
            yield f"input.low: expected {ids}, got {low}"
        if end > info.d_vocab:
            yield f"input.high: expected 1 to {info.d_vocab}, the tokens of {info.name}, got {high}"
        if low >= end:
            yield f"input.low: expected less than high = {high}, got {low}"
        token = options.get("token")
        if token is not None and token >= info.d_vocab:
            yield f"input.token: expected {ids}, got {token}"
        first, position = int(self.has_bos), options.get("position")
        if position is not None and not first <= position < scan.n_ctx:
            yield (
                f"input.position: expected {first} to {scan.n_ctx - 1}, the positions of text in a "
                f"sequence, got {position}"
            )
        if self.length < 1:
            yield (
                f"n_ctx: {scan.n_ctx} leaves no room for a token beside the beginning-of-sequence "
                "token"
            )
        # A corpus can be read to its end. What is drawn has none.
        if self.is_drawn and scan.sequences == "all":
            yield (
                f"sequences: expected a number, got 'all'; the family {self.family.name} has no end"
            )

    # What the scan asks for

    @property
    def has_bos(self) -> bool:
        """Whether every sequence begins with the beginning-of-sequence token."""
        return self.info.begins_with_bos(self.scan.bos)

    @property
    def length(self) -> int:
        """Tokens of a sequence that are not the beginning-of-sequence token."""
        return self.scan.n_ctx - self.has_bos

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

    @property
    def is_drawn(self) -> bool:
        """Whether sequences are drawn, so that there are as many as the scan asks for."""
        return self.family.synthetic or self.family.is_endless

    @property
    def enough(self) -> int | None:
        """Sequences that the index must hold. None means as many as there are."""
        if self.scan.sequences == "all":
            return None
        return max(self.scan.sequences, self.least_sequences)

    @cached_property
    def corpus(self) -> Corpus | None:
        """The corpus, its files listed; None if the family is synthetic."""
        if self.family.synthetic:
            return None
        return self.family.corpus(self.options, self.scan.seed)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer."""
        self.has_read_tokenizer = True
        return TextTokenizer(self.info.tokenizer, self.info.d_vocab)

    @property
    def record(self) -> dict[str, Any]:
        """Identifies the files that the sequences depend on, for a run's manifest."""
        if self.corpus is not None:
            return self.corpus.record
        text = self.options.get("text")
        return {} if text in (None, BUNDLED_TEXT) else {"text": text_record(text)}

    @cached_property
    def reads_text(self) -> bool:
        """Whether sequences depend on the tokenizer: a corpus's, and those drawn with it."""
        if self.corpus is not None:
            return True
        self._drawn(self.family, range(1))
        return self.has_read_tokenizer

    # The index of a corpus

    def store(self, corpora: Place) -> TokenStore:
        """The token store that the sequences are read from, among those in a place."""
        assert self.corpus is not None
        return TokenStore.of(corpora, self.tokenizer, self.corpus.reading)

    def new_index(self, store: TokenStore) -> SequenceIndex:
        """An index of the sequences, to which the portions of the store are still to be added."""
        assert self.corpus is not None
        # The token that joins documents: end of text, else beginning of sequence.
        info = self.info
        separator = info.bos_token_id if info.eos_token_id is None else info.eos_token_id
        # Refused before anything is tokenised.
        if self.corpus.packing == "concat" and separator is None:
            raise ModelError(
                f"{no_token(info, 'eos_token_id')} to join documents with; pack by document"
            )
        in_a_row = self.scan.bad_rows_in_a_row
        beyond = self.tokenizer.beyond
        return SequenceIndex(
            store, self.corpus, self.text_length, separator, self.enough, in_a_row, beyond
        )

    def use_index(self, index: SequenceIndex | None) -> None:
        """Read the corpus by another index; None means that one is still to be made."""
        self.index = index
        # What is cached belongs to the index of before.
        self.__dict__.pop("_frequencies", None)
        self._last_findings = None

    def check_index(self) -> None:
        """Refuse a corpus that is too bad, or has nothing of what the scan asks for."""
        if self.corpus is not None and self.index is not None:
            found = self._findings(len(self.reader))
            check_bad_rows(found, self.scan.bad_rows, self.scan.bad_rows_in_a_row)
            check_choice(found, self.corpus)

    @property
    def reader(self) -> SequenceIndex:
        """The index, which is there."""
        if self.index is None:
            raise RuntimeError("the corpus has no index yet")
        return self.index

    @property
    def findings(self) -> Findings | None:
        """What became of the documents of a corpus; None if the family is synthetic."""
        if self.corpus is None:
            return None
        # Where tokens are counted, every document is used.
        return self._findings(len(self.reader) if self.is_drawn else len(self))

    def _findings(self, sequences: int) -> Findings:
        """What became of the documents, in a run of the first `sequences`."""
        # A look at every document of the corpus: the last one is kept.
        if self._last_findings is None or self._last_findings[0] != sequences:
            self._last_findings = sequences, self.reader.findings(sequences)
        return self._last_findings[1]

    @property
    def fates(self) -> Fates | None:
        """How many documents of a corpus have which fate; None if the family is synthetic."""
        return None if self.findings is None else self.findings.fates

    # Sequences and shards

    def __len__(self) -> int:
        """How many sequences the scan has. Too small a corpus raises `CorpusError`."""
        requested = self.scan.sequences
        if self.corpus is None:
            return int(requested)
        available = len(self.reader)
        if available and self.is_drawn:
            return int(requested)
        if available and (requested == "all" or requested <= available):
            return available if requested == "all" else requested
        found = self._findings(available)
        advice = ["lower n_ctx or sequences"]
        if self.corpus.packing != "concat":
            advice.append("or pack with concat")
        if found.problems:
            advice.append(f"or mend {found.problems[0]}")
        raise CorpusError(
            f"input: the corpus holds {available:,} sequences of {self.text_length} tokens of text "
            f"({self.corpus.packing} packing), "
            f"{'at least 1' if requested == 'all' else f'{requested:,}'} wanted, of "
            f"{found.fates.line}; {', '.join(advice)}"
        )

    @property
    def shards(self) -> int:
        """How many shards the sequences make."""
        return -(-len(self) // self.scan.sequences_per_shard)  # Rounded up.

    def shard(self, number: int) -> ShardInput:
        """The input of one shard. Shards of a corpus are read fastest in order."""
        start = number * self.scan.sequences_per_shard
        span = range(start, min(start + self.scan.sequences_per_shard, len(self)))
        if self.corpus is None:
            tokens, labels = self._drawn(self.family, span)
            partner = None
            if self.family.partner is not None and self.partners:
                partner, _ = self._drawn(INPUTS[self.family.partner], span)
            return ShardInput(number, start, tokens, {}, [], labels, partner)
        if self.corpus.counted is not None:
            ids, probabilities = self._frequencies
            rngs = (self._draw_of(i).rng for i in span)
            tokens = [rng.choice(ids, size=self.length, p=probabilities) for rng in rngs]
            return ShardInput(number, start, self._with_bos(tokens), origin={}, bad_rows=[])
        bad_rows = self.reader.bad_rows(start, span.stop)
        text, origin = self.reader.read(start, span.stop)
        return ShardInput(number, start, self._arranged(self.corpus, span, text), origin, bad_rows)

    def _arranged(self, corpus: Corpus, span: range, text: np.ndarray) -> np.ndarray:
        """Sequences out of their text, as the family says. What is random comes from each
        sequence's own stream, not from the order of reading.
        """
        if corpus.chunk is not None:
            # The text is one chunk long. The modulo repeats it to the end of the sequence.
            text = text[:, np.arange(self.length) % corpus.chunk]
        elif corpus.tokens_shuffled:
            draws = map(self._draw_of, span)
            text = np.array([d.rng.permutation(row) for d, row in zip(draws, text, strict=True)])
            text = text[:, np.arange(self.length) % (corpus.kept or self.length)]
        tokens = self._with_bos(text)
        if corpus.replaced is not None:
            token = corpus.replaced.token
            tokens[:, corpus.replaced.position] = [
                self._draw_of(i).tokens(1)[0] if token is None else token for i in span
            ]
        if corpus.repeat_bos:
            # The first copy of the text, with its token in front, is repeated to the end.
            tokens = tokens[:, np.arange(self.scan.n_ctx) % (self.text_length + self.has_bos)]
        return tokens

    def _with_bos(self, sequences: ArrayLike) -> np.ndarray:
        """A new array of sequences, each behind the token that the scan begins them with."""
        tokens = np.array(sequences, np.int32)
        bos = self.info.bos_token_id if self.has_bos else None
        return tokens if bos is None else np.insert(tokens, 0, bos, axis=1)

    # Drawing

    def _drawn(self, family: InputFamily, span: range) -> tuple[np.ndarray, list[list[str]] | None]:
        """Tokens and labels of sequences of a synthetic family."""
        tokens: list[np.ndarray] = []
        labels: list[list[str]] = []
        for sequence in span:
            returned = family.sequence(self._draw_of(sequence), self.options)
            if isinstance(returned, Labelled):
                labels.append([""] * self.has_bos + returned.names(family.name))
                returned = returned.tokens
            if np.shape(returned) != (self.length,):
                raise ScanError(
                    f"input family {family.name}: returned shape {np.shape(returned)}, expected "
                    f"({self.length},)"
                )
            if np.asarray(returned).dtype.kind not in "iu":
                raise ScanError(
                    f"input family {family.name}: returned {np.asarray(returned).dtype}, expected "
                    "token ids, which are integers"
                )
            self._check_tokens(sequence, np.asarray(returned))
            tokens.append(returned)
        return self._with_bos(tokens), labels or None

    def _check_tokens(self, sequence: int, tokens: np.ndarray) -> None:
        """Refuse a drawn sequence with a token that the model does not have."""
        token = int(tokens.max(initial=0))
        if token >= self.info.d_vocab:
            name = self.tokenizer.beyond.get(token, "of no name")
            raise ScanError(
                f"input family {self.family.name}: sequence {sequence} uses token {token} "
                f"({printable(name)}), which is none of the {self.info.d_vocab:,} tokens of "
                f"{self.info.name}; choose another text"
            )

    @cached_property
    def _frequencies(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that may be drawn, and the probability of each."""
        draw, counts = self._draw_of(0), self.reader.token_counts
        assert counts is not None
        ids = draw.ids()
        # A tokenizer may have fewer tokens than its model.
        of_ids = np.append(counts, np.zeros(self.info.d_vocab, np.int64))[ids]
        if not of_ids.any():
            end = "" if draw.high is None else f" and below high = {draw.high}"
            raise ScanError(
                f"input: the corpus has no ordinary token from low = {draw.low} on{end}; widen low "
                "and high"
            )
        return ids, of_ids / of_ids.sum()

    def _draw_of(self, sequence: int) -> Draw:
        """What sequence number `sequence` is drawn from, whatever was drawn before it."""
        stream = self.family.stream or self.family.name
        # All three enter the seed, so sequences are independent of each other and of their order.
        seeds = [self.scan.seed, sequence, zlib.crc32(stream.encode())]
        rng = np.random.default_rng(np.random.SeedSequence(seeds))
        followed = {
            name: self.options[name] for name in ("low", "high", "distinct") if name in self.options
        }
        return Draw(rng, self.length, self._ordinary, sequence, lambda: self.tokenizer, **followed)

    @cached_property
    def _ordinary(self) -> np.ndarray:
        """All token ids of the vocabulary except the special ones."""
        # They may lie anywhere in the vocabulary, so a range would not do.
        special = [i for i in (self.info.bos_token_id, self.info.eos_token_id) if i is not None]
        return np.setdiff1d(np.arange(self.info.d_vocab), special)


def check_bad_rows(found: Findings, share: float, in_a_row: int) -> None:
    """Refuse a corpus with a larger share of bad documents, or more of them one after the other."""
    names = found.problems
    first_names = f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
    if found.bad_in_a_row > in_a_row:
        raise CorpusError(
            f"input: more than {in_a_row:,} documents in a row are bad: {first_names}; mend or "
            f"remove them, or leave them out: --set bad_rows_in_a_row={10 * in_a_row}"
        )
    if 0 < found.bad == found.documents:
        all_documents = "its document is" if found.bad == 1 else f"all {found.bad:,} documents are"
        raise CorpusError(f"input: {all_documents} bad: {first_names}; mend or replace them")
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
        counts = {name: of.get(OTHER, 0) for name, of in found.fates.parts.items() if name}
        most_common = Counter(counts).most_common(LISTED_PARTS)
        parts = ", ".join(f"{printable(name)} ({count:,})" for name, count in most_common if count)
        described = " and ".join(
            f"{name} = {' or '.join(map(repr, values))}" for name, values in corpus.choice.where
        )
        raise CorpusError(
            f"input.where: none of {found.documents:,} documents has {described}; "
            f"pile_set_name is {parts or 'nowhere'}; change input.where"
        )
    for column, is_there in zip(corpus.choice.columns, found.carried, strict=True):
        if not is_there and documents_taken:
            raise CorpusError(
                f"input.columns: none of the {found.carried_of:,} documents read has a field "
                f"{column}, nor its meta; leave it out, or write its name as it is there"
            )
