"""What a plan of a cache costs: the loss of texts, and the recall of needles in them.

Each sequence is a piece of a text with a sentence somewhere in it, and at its end a question about
it. One pass tells the loss of the text, and whether the answer is found. Most of a sequence may be
a prompt that is read with the whole cache: then only what is behind it is asked for.

A model without a tokenizer reads random tokens: a needle in a block that is repeated, with what an
earlier copy foretells as the text.

Texts are split into halves: one chooses, the other reports. Where plans are chosen, each is
compared with the whole cache at some of the tokens: how far the predictions have moved. A rise of
the loss has the same mean if the model knows its texts, and much more noise: it may fall by chance.
Only what is compared is unembedded there; all of the text is where a result is reported.

What is measured is kept by its intervention, so nothing is measured twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from headcount.schemas.errors import ScanError, counted
from headcount.schemas.scans.intervention import parse_intervention
from headcount.schemas.scans.scan_file import parse_scan
from headcount.workers.engine.prediction_inputs import check_unembedding, row_chunks
from headcount.workers.head_gates import Asked, HeadGates, KVHead, Predictions, Round, rounds_of
from headcount.workers.inputs.corpus.text_files import BUNDLED_LICENSE, read_texts, text_record
from headcount.workers.inputs.families.needles import needle_in, needle_in_copies
from headcount.workers.inputs.input_registry import Draw
from headcount.workers.interventions import bind
from headcount.workers.known_models import KnownModels
from headcount.workers.model.attention_facts import window_of
from headcount.workers.model.info.model_files import AdapterChoice
from headcount.workers.model.info.text_tokenizer import TextTokenizer, has_tokenizer
from headcount.workers.provenance.code_fingerprint import code_fingerprint
from headcount.workers.read_prompts import MOST_TOKENS, ReadPrompts, changed_attention
from headcount.workers.replica import Replica

Half = Literal["chooses", "reports"]
HALVES: tuple[Half, Half] = ("chooses", "reports")

SEEDS: dict[Half, int] = {"chooses": 1, "reports": 2}
"""Of the needles in each half of the texts."""

LONGEST = 512  # tokens of a sequence if nobody says how many

PROMPT_SHARE = 0.75  # of what stands before a question, so text is read behind it as well

FEWEST = 2  # sequences of each half

MOST_MOVED = 64  # tokens of the text of a sequence whose predictions are compared
MOST_PREDICTIONS = 2**28  # probabilities of the whole cache that are held in memory, about


class Pieces(NamedTuple):
    """The sequences of one half."""

    tokens: np.ndarray  # `[sequence pos]`
    is_text: np.ndarray
    """Tokens of the text but the first, or of a copy: `[sequence pos]`."""
    is_question: np.ndarray
    is_answer: np.ndarray
    documents: np.ndarray  # of which document each sequence is: `[sequence]`


class Measured(NamedTuple):
    """What a model says of some sequences: `[sequence]` each."""

    text: np.ndarray
    """Mean loss of tokens of the text, in nats; where plans are chosen, of those that are compared.
    """
    needle: np.ndarray  # mean loss of the tokens of the answer
    recall: np.ndarray  # the share of these that it predicts first
    text_moved: np.ndarray
    """Mean over tokens of the text of Σ_v p[v] log(p[v] / p'[v]), with p of the whole cache and p'
    of this one, in nats; NaN where nothing is chosen.
    """
    needle_moved: np.ndarray  # the same over the tokens of the answer


class CacheTrial:
    """A model that reads texts with needles in them, with caches as interventions leave them.

    The model is loaded when it is asked for the first time. `passed` is told how many sequences
    have gone through it.
    """

    models = 1  # that measure at once

    def __init__(
        self,
        model: str,
        texts: Sequence[str],
        *,
        n_ctx: int | None,
        sequences: int,
        reads_prompts: bool = False,
        revision: str | None = None,
        tokenizer: str | None = None,
        adapter: AdapterChoice = "refuse",
        device: Literal["auto", "cpu", "cuda"] = "auto",
    ) -> None:
        """`reads_prompts`: whether most of a sequence is read before its cache is cut, if the model
        can go on from its keys and values. Else every query sees what is left of the cache.
        """
        self._models = KnownModels()
        self.info = self._models.describe(model, revision, adapter, tokenizer)
        self.reads_texts = bool(texts) or has_tokenizer(self.info.tokenizer)
        self.texts = [*texts] if texts or not self.reads_texts else [BUNDLED_LICENSE]
        self.model, self.device = model, device
        self.n_ctx = min(self.info.n_ctx, LONGEST) if n_ctx is None else n_ctx
        self.sequences, self.reads_prompts = sequences, reads_prompts
        self.known: dict[str, list[list[float | None]]] = {}
        """`[sequence]` of the fields of `Measured`, by half and intervention."""
        self.opened: dict[str, list[dict[str, Any]]] = {}
        """The rounds in which heads were opened, by how caches were cut."""
        self.passed: Callable[[int], None] = lambda _: None
        self.part = slice(None)
        """Which sequences of each half are measured here, in an actor not all."""
        if self.n_ctx > self.info.n_ctx:
            raise ScanError(
                f"--n-ctx {self.n_ctx}: is beyond the {self.info.n_ctx} positions of "
                f"{self.info.name}"
            )

    @cached_property
    def replica(self) -> Replica:
        """The loaded model."""
        fields = {"model": self.model, "n_ctx": self.n_ctx, "sequences": 1}
        scan = parse_scan({**fields, "input": {"family": "uniform_random"}})
        replica = Replica(self.info, scan, self.device, self._models.load)
        check_unembedding(replica.model)
        return replica

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Within it, what measures is there."""
        _ = self.replica
        yield

    def run(self, count: int) -> None:
        """Send so many sequences through each model, to see how long that takes."""
        self.answers("chooses", "none", range(count * self.models))

    def own_windows(self) -> dict[int, int]:
        """The window that each layer has of itself, if it has one."""
        layers = self.info.attention_layers_or_all
        facts = {layer: self.replica.model.facts(layer) for layer in layers}
        return {
            layer: window_of(of_layer, self.n_ctx)
            for layer, of_layer in facts.items()
            if of_layer is not None
        }

    @property
    def identity(self) -> dict[str, Any]:
        """What answers rest on: only those to the same questions can be used again."""
        return {
            "model": self.info.name,
            "sha256": self.info.sha256,
            "code": code_fingerprint(),
            "n_ctx": self.n_ctx,
            "reads_prompts": self.reads_prompts,
            "sequences": {half: len(each.tokens) for half, each in self.pieces.items()},
            "needle_seeds": dict(SEEDS),
            "texts": [text_record(text) for text in self.texts],
        }

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return TextTokenizer(self.info.tokenizer, self.info.d_vocab)

    @cached_property
    def _documents(self) -> list[list[np.ndarray]]:
        """Pieces of each document; the pieces of a single long one count as documents."""
        if not self.reads_texts:
            # Each random sequence is a document, of which nothing is there before it is drawn.
            return [[np.zeros(0, int)]] * (2 * self.sequences)
        texts = [text for file in self.texts for text in read_texts(file)]
        documents: list[list[np.ndarray]] = []
        for tokens in self._tokenizer.encode_many(texts):
            starts = range(0, len(tokens) - self.n_ctx + 1, self.n_ctx)
            pieces = [np.array(tokens[start : start + self.n_ctx]) for start in starts]
            if pieces:
                documents.append(pieces)
        if len(documents) < 2 * FEWEST:
            documents = [[piece] for pieces in documents for piece in pieces]
        if len(documents) < 2 * FEWEST:
            raise ScanError(
                f"--text: expected {2 * FEWEST} documents or pieces of {self.n_ctx} tokens, so "
                "that half of them choose and the others report, got "
                f"{counted(len(documents), 'piece')}; name longer texts, or lower n_ctx"
            )
        return documents

    @cached_property
    def pieces(self) -> dict[Half, Pieces]:
        """The sequences of each half. Each document is in one half alone."""
        order = np.random.default_rng(0).permutation(len(self._documents)).tolist()
        middle = len(order) // 2
        members = (order[:middle], order[middle : 2 * middle])
        return {
            half: self._pieces(of_half, SEEDS[half])
            for half, of_half in zip(HALVES, members, strict=True)
        }

    def _pieces(self, documents: Sequence[int], seed: int) -> Pieces:
        special = [i for i in (self.info.bos_token_id, self.info.eos_token_id) if i is not None]
        ordinary = np.setdiff1d(np.arange(self.info.d_vocab), special)
        has_bos = self.info.begins_with_bos("auto")
        # The first piece of each document, then the second ones: as many documents as there are.
        longest = max(len(self._documents[document]) for document in documents)
        places = [
            (document, number)
            for number in range(longest)
            for document in documents
            if number < len(self._documents[document])
        ][: self.sequences]
        tokens = np.zeros((len(places), self.n_ctx), dtype=np.int64)
        is_text, is_question, is_answer = (np.zeros(tokens.shape, dtype=bool) for _ in range(3))
        for row, (document, number) in enumerate(places):
            draw = Draw(
                np.random.default_rng((seed, row)),
                self.n_ctx - has_bos,
                ordinary,
                row,
                lambda: self._tokenizer,
            )
            piece = self._documents[document][number]
            labelled = needle_in(draw, piece) if self.reads_texts else needle_in_copies(draw)
            names = np.array(labelled.names("text_needle"))
            if has_bos:
                assert self.info.bos_token_id is not None
                tokens[row, 0] = self.info.bos_token_id
            tokens[row, has_bos:] = labelled.tokens
            is_text[row, has_bos:] = names == ""
            is_question[row, has_bos:] = names == "query"
            is_answer[row, has_bos:] = names == "answer"
        is_text[:, 0] = False
        numbers = np.array([document for document, _ in places])
        return Pieces(tokens, is_text, is_question, is_answer, numbers)

    def measure(self, half: Half, intervention: str, count: int | None = None) -> Measured:
        """What the first so many sequences of a half say under an intervention; None: all."""
        pieces = self.pieces[half]
        count = len(pieces.tokens) if count is None else min(count, len(pieces.tokens))
        rows = self.known.setdefault(f"{half} {intervention}", [])
        if len(rows) < count:
            rows += self.answers(half, intervention, range(len(rows), count))
        return Measured(*np.array(rows[:count], float).T)

    def _own(self, half: Half) -> Pieces:
        """The sequences of a half that are measured here."""
        return Pieces(*(each[self.part] for each in self.pieces[half]))

    def answers(self, half: Half, intervention: str, rows: range) -> list[list[float | None]]:
        """The fields of `Measured` for some of the sequences that are measured here."""
        asked = self._asked(half)[self.part]
        whole = self._expected if half == "chooses" and intervention != "none" else None
        # Where the tokens that these sequences are asked for begin among those of all.
        row = int(asked[: rows.start].sum())
        losses, is_first, moved = list[Tensor](), list[Tensor](), list[Tensor]()
        for logits, targets in self._asked_logits(half, intervention, rows):
            losses.append(cross_entropy(logits, targets, reduction="none"))
            is_first.append(logits.argmax(-1) == targets)
            if whole is None:
                # The whole cache is where it is. Elsewhere nothing is compared.
                distance = 0.0 if half == "chooses" else math.nan
                moved.append(torch.full_like(losses[-1], distance))
            else:
                moved.append(whole.part(row, row + len(targets)).divergences(logits))
            row += len(targets)
        loss, found, distance = (
            torch.cat(parts).double().cpu().numpy() for parts in (losses, is_first, moved)
        )
        asked = asked[rows.start : rows.stop]
        of_row, is_answer = (
            np.nonzero(asked)[0],
            self._own(half).is_answer[rows.start : rows.stop][asked],
        )

        def means(values: np.ndarray, is_in: np.ndarray) -> np.ndarray:
            sums = np.bincount(of_row[is_in], values[is_in], len(asked))
            return sums / np.bincount(of_row[is_in], minlength=len(asked))

        columns = (
            means(loss, ~is_answer),
            means(loss, is_answer),
            means(found, is_answer),
            means(distance, ~is_answer),
            means(distance, is_answer),
        )
        return [[None if np.isnan(x) else x for x in one] for one in np.transpose(columns).tolist()]

    @torch.no_grad()
    def _asked_logits(
        self, half: Half, intervention: str, rows: range
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The logits `[asked d_vocab]` before the tokens that some sequences are asked for, and
        these tokens: some at a time, in their order.
        """
        model, prompts = self.replica.model, self._prompts[half]
        bound = bind(parse_intervention(intervention))
        bound.check(self.info, self.n_ctx)
        attend = changed_attention(bound.changes(model))
        size = max(1, MOST_TOKENS // (self.n_ctx - prompts.length))
        asked = self._asked(half)[self.part]
        for start in range(rows.start, rows.stop, size):
            batch = slice(start, min(start + size, rows.stop))
            stream = prompts.read_on(batch, attend)
            # A token is predicted at the position before it.
            is_asked = asked[batch, prompts.length + 1 :]
            targets = torch.from_numpy(prompts.tokens[batch, prompts.length + 1 :][is_asked])
            streams = stream[:, :-1][torch.from_numpy(is_asked).to(stream.device)]
            chunks = (row_chunks(model, x) for x in (streams, targets.to(stream.device)))
            for of_chunk, targets_of_chunk in zip(*chunks, strict=True):
                yield model.logits(of_chunk), targets_of_chunk
            self.passed(len(stream))

    @cached_property
    def _prompts(self) -> dict[Half, ReadPrompts]:
        """The sequences of each half, whose prompts are read before any cache is cut."""
        model, pieces = self.replica.model, self.pieces
        length = 0
        if self.reads_prompts:
            first_question = min(each.is_question.argmax(1).min() for each in pieces.values())
            length = int(PROMPT_SHARE * first_question)
            if not ReadPrompts(model, pieces["chooses"].tokens[:1], length).is_exact:
                length = 0
        return {half: ReadPrompts(model, self._own(half).tokens, length) for half in HALVES}

    @property
    def prompt(self) -> int:
        """How many tokens are read with the whole cache, before it is cut."""
        return self._prompts["chooses"].length

    def _asked(self, half: Half) -> np.ndarray:
        """Tokens whose predictions are read: the answers and, where plans are chosen, some of the
        text behind the prompt, evenly spaced; else all of it: `[sequence pos]`.
        """
        pieces, first = self.pieces[half], self.prompt + 1
        asked = pieces.is_answer.copy()
        count = len(asked) * self.info.d_vocab
        most = max(1, min(MOST_MOVED, MOST_PREDICTIONS // count)) if half == "chooses" else None
        for row, is_text in zip(asked, pieces.is_text, strict=True):
            places = first + np.flatnonzero(is_text[first:])
            step = 1 if most is None else -(-len(places) // most)
            row[places[::step]] = True
        return asked

    @cached_property
    def _expected(self) -> Predictions:
        """What the model predicts with its whole cache before the tokens that are compared, those
        of one sequence that chooses after those of another.
        """
        rows = range(len(self._own("chooses").tokens))
        chunks = [
            Predictions.of(logits) for logits, _ in self._asked_logits("chooses", "none", rows)
        ]
        return Predictions(*map(torch.cat, zip(*chunks, strict=True)))

    def rounds(self, sink: int, recent: int, needle_weight: float) -> list[Round]:
        """Rounds in which KV heads are opened, by how far predictions have moved where plans are
        chosen: the mean over tokens of the text, and that over the answers times a weight.
        """
        known = self.opened.setdefault(f"{sink},{recent},{needle_weight:g}", [])
        before, found = [*map(Round.read, known)], list[Round]()
        ask = partial(self.round_of_opening, sink, recent, needle_weight)
        for one in rounds_of(self.info.kv_heads, before, ask):
            found.append(one)
            if len(found) > len(known):
                known.append(one.facts)
        return found

    def round_of_opening(
        self, sink: int, recent: int, needle_weight: float, opened: tuple[KVHead, ...]
    ) -> Round:
        """The round of `rounds` in which these heads are open, of the sequences measured here."""
        pieces, is_asked = self._own("chooses"), self._asked("chooses")[self.part]
        text, answers = (
            is_in / is_in.sum(1, keepdims=True)
            for is_in in (is_asked & ~pieces.is_answer, pieces.is_answer)
        )
        # A weight of 0 would say that answers are not asked for.
        weights = text + max(needle_weight, 1e-12) * answers
        # The loss is a mean over all sequences, wherever they are measured.
        count = len(self.pieces["chooses"].tokens)
        asked = Asked(pieces.tokens, weights / count, self._expected)
        gates = HeadGates(self.replica.model, sink, recent, self._prompts["chooses"])
        return gates.asked(asked, opened, self.passed)
