"""What a plan of a cache costs: the loss of texts, and the recall of needles in them.

Each sequence is a piece of a text with a sentence somewhere in it, and at its end a question about
it. One pass tells the loss of the text, and whether the answer is found.

Texts are split into halves: one chooses, the other reports. What is measured is kept by its
intervention, so nothing is measured twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from headcount.schemas.errors import ModelError, ScanError, counted
from headcount.schemas.scans.intervention import parse_intervention
from headcount.schemas.scans.scan_file import parse_scan
from headcount.workers.engine.prediction_inputs import check_unembedding
from headcount.workers.head_check import Question, recalls_and_losses
from headcount.workers.inputs.corpus.text_files import BUNDLED_LICENSE, read_texts
from headcount.workers.inputs.families.needles import needle_in
from headcount.workers.inputs.input_registry import Draw
from headcount.workers.known_models import KnownModels
from headcount.workers.model.attention_facts import window_of
from headcount.workers.model.info.text_tokenizer import TextTokenizer
from headcount.workers.replica import Replica

Half = Literal["chooses", "reports"]
HALVES: tuple[Half, Half] = ("chooses", "reports")

SEEDS: dict[Half, int] = {"chooses": 1, "reports": 2}
"""Of the needles in each half of the texts."""

LONGEST = 512  # tokens of a sequence if nobody says how many

FEWEST = 2  # sequences of each half


class Pieces(NamedTuple):
    """The sequences of one half."""

    tokens: np.ndarray  # `[sequence pos]`
    is_text: np.ndarray  # tokens of the text, but the first: `[sequence pos]`
    is_answer: np.ndarray
    documents: np.ndarray  # of which document each sequence is: `[sequence]`


class Measured(NamedTuple):
    """What a model says of some sequences: `[sequence]` each."""

    text: np.ndarray  # mean loss of tokens of the text, in nats
    needle: np.ndarray  # mean loss of the tokens of the answer
    recall: np.ndarray  # the share of these that it predicts first


class CacheTrial:
    """A model that reads texts with needles in them, with caches as interventions leave them.

    The model is loaded when it is asked for the first time. `passed` is told how many sequences
    have gone through it.
    """

    def __init__(
        self,
        model: str,
        texts: Sequence[str],
        *,
        n_ctx: int | None,
        sequences: int,
        device: Literal["auto", "cpu", "cuda"] = "auto",
    ) -> None:
        self._models = KnownModels()
        self.info = self._models.describe(model)
        self.model, self.texts, self.device = model, [*texts], device
        self.n_ctx = min(self.info.n_ctx, LONGEST) if n_ctx is None else n_ctx
        self.sequences = sequences
        self.known: dict[str, list[list[float]]] = {}
        """`[sequence]` of text, needle and recall, by half and intervention."""
        self.passed: Callable[[int], None] = lambda _: None
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

    def run(self, count: int) -> None:
        """Send some sequences through the model, to see how long that takes."""
        self._measured(self.pieces["chooses"], "none", range(count))

    def own_windows(self) -> dict[int, int]:
        """The window that each layer has of itself, if it has one."""
        layers = self.info.attention_layers_or_all
        facts = {layer: self.replica.model.facts(layer) for layer in layers}
        return {
            layer: window_of(of_layer, self.n_ctx)
            for layer, of_layer in facts.items()
            if of_layer is not None
        }

    @cached_property
    def _documents(self) -> list[list[np.ndarray]]:
        """Pieces of each document; the pieces of a single long one count as documents."""
        try:
            tokenizer = TextTokenizer(self.info.tokenizer, self.info.d_vocab)
        except ModelError as error:
            raise ModelError(f"cache-plan reads texts: {error}") from None
        texts = [text for file in self.texts or [BUNDLED_LICENSE] for text in read_texts(file)]
        documents: list[list[np.ndarray]] = []
        for tokens in tokenizer.encode_many(texts):
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
                f"{counted(len(documents), 'piece')}; name longer texts, or lower --n-ctx"
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
        tokenizer = TextTokenizer(self.info.tokenizer, self.info.d_vocab)
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
        is_text, is_answer = (np.zeros(tokens.shape, dtype=bool) for _ in range(2))
        for row, (document, number) in enumerate(places):
            draw = Draw(
                np.random.default_rng((seed, row)),
                self.n_ctx - has_bos,
                np.arange(self.info.d_vocab),
                row,
                lambda: tokenizer,
            )
            labelled = needle_in(draw, self._documents[document][number])
            names = np.array(labelled.names("text_needle"))
            if has_bos:
                assert self.info.bos_token_id is not None
                tokens[row, 0] = self.info.bos_token_id
            tokens[row, has_bos:] = labelled.tokens
            is_text[row, has_bos:] = names == ""
            is_answer[row, has_bos:] = names == "answer"
        is_text[:, 0] = False
        return Pieces(tokens, is_text, is_answer, np.array([place for place, _ in places]))

    def measure(self, half: Half, intervention: str, count: int | None = None) -> Measured:
        """What the first so many sequences of a half say under an intervention; None: all."""
        pieces = self.pieces[half]
        count = len(pieces.tokens) if count is None else min(count, len(pieces.tokens))
        rows = self.known.setdefault(f"{half} {intervention}", [])
        if len(rows) < count:
            rows += self._measured(pieces, intervention, range(len(rows), count))
        text, needle, recall = np.array(rows[:count]).T
        return Measured(text, needle, recall)

    def _measured(self, pieces: Pieces, intervention: str, rows: range) -> list[list[float]]:
        chosen = slice(rows.start, rows.stop)
        is_text, is_answer = pieces.is_text[chosen], pieces.is_answer[chosen]
        question = Question(pieces.tokens[chosen], is_text | is_answer)
        with self.replica.engine_under(parse_intervention(intervention), None) as engine:
            recalls, losses = recalls_and_losses(engine, question, self.passed)
        # Of the asked tokens alone, one sequence after the other.
        ends = np.cumsum(question.asked.sum(1))[:-1]
        measured: list[list[float]] = []
        for row, (loss, is_first) in enumerate(
            zip(
                np.split(losses.double().cpu().numpy(), ends),
                np.split(recalls.double().cpu().numpy(), ends),
                strict=True,
            )
        ):
            answers = is_answer[row][question.asked[row]]
            means = (loss[~answers], loss[answers], is_first[answers])
            measured.append([float(values.mean()) for values in means])
        return measured
