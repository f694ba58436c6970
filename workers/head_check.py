"""Whether the chosen KV heads are the ones that need a whole cache: an ablation of a model.

The chosen heads keep their whole cache. All others keep the first keys and the last ones, as a
cache that was cut by the choice would. Then the model is asked for needles, and to go on with a
repeated block. Needles are random tokens; a model that cannot recall these is asked for some in a
text. One that still cannot do one of both with its whole cache is also asked for text whose earlier
part the cut hides. As many random heads are kept whole for comparison.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from headcount.schemas.errors import ModelError, ScanError, counted
from headcount.schemas.measured_heads import Head
from headcount.schemas.scans.head_groups import groups_text
from headcount.schemas.scans.intervention import NONE, Intervention, InterventionPart
from headcount.schemas.scans.scan import Scan
from headcount.schemas.scans.scan_file import parse_scan
from headcount.workers.engine.engine import Engine, PassRequest
from headcount.workers.engine.prediction_inputs import PredictionInputs, check_unembedding
from headcount.workers.inputs.corpus.text_files import BUNDLED_LICENSE, read_text
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.known_models import KnownModels
from headcount.workers.model.attention_facts import window_of
from headcount.workers.model.info.model_files import AdapterChoice
from headcount.workers.model.info.text_tokenizer import TextTokenizer
from headcount.workers.replica import Replica

MOST_TOKENS = 4096  # of a batch, after which people see how far it is
MOST_N_CTX = 1024  # tokens of a sequence if nobody says how many
SEQUENCES = 64  # of each task if nobody says how many
TEXT_SEQUENCES = 8  # at most of text: the licence has no more that differ

LEAST_RECALL = 0.5  # of the whole cache, from which on a model can recall needles

LARGEST_REPEAT_LOSS = 0.5
"""Loss after repeats with the whole cache, as a share of that of a random guess, up to which a
model can go on with repeats.
"""

TOLERANCE = 0.02
"""Share that a cut may cost of what whole heads are worth: of the recall with all of them, and of
the fall of the loss from none to all.
"""

SEARCHED_TOLERANCE = TOLERANCE / 2
"""The same while a number of heads is looked for: on other sequences it may be a little worse."""

MOST_STEPS = 32  # numbers of heads that are tried at most

RANDOM_SEEDS = (0, 1, 2)  # of the random heads that the chosen ones are compared with

SEARCHED_SEED, JUDGED_SEED = 1, 2
"""Seeds of the sequences on which a number of heads is looked for, and of those on which it is
judged. Scores are measured with seed 0 by default.
"""

KVHead = tuple[int, int]  # a layer, and one of its heads of keys and values

SCHEMA = pa.schema(
    [
        ("kept_whole", pa.string()),
        ("seed", pa.int64()),
        ("kv_heads", pa.int64()),
        ("of_the_chosen", pa.int64()),
        ("recall", pa.float64()),
        ("loss_after_repeats", pa.float64()),
        ("cache_percent", pa.float64()),
    ]
)


Task = Literal["needles", "text_needles", "repeats", "text"]

FIELDS: dict[Task, str] = {
    "needles": "recall",
    "text_needles": "recall",
    "repeats": "loss",
    "text": "text_loss",
}
"""Where the answer of a task stands among `Answers`."""


class Question(NamedTuple):
    """Sequences, and the tokens of them that the model should know."""

    tokens: np.ndarray  # `[sequence pos]`
    asked: np.ndarray  # whether a token is one of these: `[sequence pos]`; the first never is


@dataclass(frozen=True)
class Answers:
    """What a model says of its tokens. A loss that it was not asked for is 0, a recall 1."""

    recall: float = 1.0  # share of the tokens of needles that it predicts first
    loss: float = 0.0  # mean loss after repeats, in nats
    text_loss: float = 0.0  # mean loss of text whose earlier part is hidden

    def loses_nothing(self, full: "Answers", none: "Answers", tolerance: float = TOLERANCE) -> bool:
        """Whether they are as good as those of the full cache, within the tolerance. `none` are
        those with no head whole.
        """
        recalls = self.recall >= (1 - tolerance) * full.recall
        predicts = _is_low(self.loss, full.loss, none.loss, tolerance)
        predicts_text = _is_low(self.text_loss, full.text_loss, none.text_loss, tolerance)
        return recalls and predicts and predicts_text


def _is_low(loss: float, full: float, none: float, tolerance: float) -> bool:
    """Whether a loss has risen by a share at most of what whole heads lower it by."""
    # A share of the loss itself would be a hundredth of a nat for one model, and less than
    # rounding for another that knows every token.
    return loss <= full + tolerance * max(0.0, none - full)


class HeadTrial:
    """A model whose named heads keep their whole cache; others the first and last keys.

    The model is loaded when it is asked for the first time. `known` are answers of an earlier
    trial of the same, which are not measured again. `passed` is told how many sequences have gone
    through the model, whenever some have.
    """

    def __init__(
        self,
        model: str,
        sink: int,
        recent: int,
        *,
        revision: str | None = None,
        tokenizer: str | None = None,
        adapter: AdapterChoice = "refuse",
        n_ctx: int | None = None,
        sequences: int = SEQUENCES,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        known: Mapping[str, float] | None = None,
        passed: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._models = KnownModels()
        self.info = self._models.describe(model, revision, adapter, tokenizer)
        self.model = model
        self.sink = sink
        self.recent = recent
        self.n_ctx = min(self.info.n_ctx, MOST_N_CTX) if n_ctx is None else n_ctx
        self.sequences = sequences
        self.device: Literal["auto", "cpu", "cuda"] = device
        self.known = dict(known or {})  # by task, seed and heads
        self.passed = passed
        # From a longer window the first copy of a block could be seen: nothing would be lost.
        if recent >= self.n_ctx // 2:
            raise ScanError(
                f"check: expected recent below {self.n_ctx // 2}, half of "
                f"{counted(self.n_ctx, 'token')}, so that a repeated block is out of sight, got "
                f"{recent}; lower it, or raise n_ctx"
            )
        self.n_kv_heads = self.info.n_kv_heads or self.info.n_heads
        self.kv_heads = tuple(
            (layer, kv_head)
            for layer in self.info.attention_layers_or_all
            for kv_head in range(self.n_kv_heads)
        )

    @cached_property
    def replica(self) -> Replica:
        """The loaded model."""
        # The scan of any needles stands for all: its replica runs any tokens of this length.
        replica = Replica(self.info, self._scan("needle", 0), self.device, self._models.load)
        check_unembedding(replica.model)
        return replica

    @property
    def batch(self) -> int:
        """Sequences that go through the model at a time."""
        return max(1, min(self.sequences, MOST_TOKENS // self.n_ctx))

    def run(self, count: int) -> None:
        """Send some sequences through the model, to see how long that takes."""
        tokens = self._question("repeats", 0).tokens[:count]
        with self.replica.engine_under(NONE, None) as engine:
            recalls_and_losses(engine, Question(tokens, tokens >= 0), lambda _: None)

    def passes(self, numbers: int) -> int:
        """How many passes a trial takes at most, with so many numbers of heads to try: 0 if the
        heads are known.
        """
        searched = 0 if not numbers else 1 + min(numbers, MOST_STEPS)
        # The table is of all heads, the chosen ones, random ones and none.
        caches = searched + 3 + len(RANDOM_SEEDS)
        text = min(TEXT_SEQUENCES, self.sequences)
        # With its whole cache, a model may be asked for needles of both kinds.
        return caches * (2 * self.sequences + text) + self.sequences

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """What the model can do with its whole cache; text stands in for what it cannot."""
        full = self._answers(self.kv_heads, ("needles", "repeats"), SEARCHED_SEED)
        tasks: list[Task] = []
        if full.recall >= LEAST_RECALL:
            tasks.append("needles")
        elif self._recall_of_text() >= LEAST_RECALL:
            tasks.append("text_needles")
        if full.loss <= LARGEST_REPEAT_LOSS * math.log(self.info.d_vocab):
            tasks.append("repeats")
        return (*tasks, "text") if len(tasks) < 2 and self.text is not None else tuple(tasks)

    def _recall_of_text(self) -> float:
        """The recall of needles in a text with the whole cache; 0 if there is no such text."""
        try:
            self._question("text_needles", SEARCHED_SEED)
        except (ModelError, ScanError):
            return 0.0  # No tokenizer, or the sequences are too short for the sentences.
        return self._answer(self.kv_heads, "text_needles", SEARCHED_SEED)

    @property
    def task_lines(self) -> list[str]:
        """What the check leaves out because the model cannot do it, in lines."""
        full = self._answers(self.kv_heads, ("needles", "repeats"), SEARCHED_SEED)
        lines: list[str] = []
        if "needles" not in self.tasks:
            line = f"needles: with its whole cache the model recalls {full.recall:.3f} of them"
            if "text_needles" in self.tasks:
                line += f", and {self._recall_of_text():.3f} of sentences in {BUNDLED_LICENSE}"
                lines.append(f"{line}, which judge instead")
            else:
                lines.append(f"{line}, expected {LEAST_RECALL} or more, so they judge nothing")
        if "repeats" not in self.tasks:
            guess = math.log(self.info.d_vocab)
            lines.append(
                f"repeats: with its whole cache the model has a loss of {full.loss:.3f} after "
                f"them, expected at most half of a random guess's {guess:.3f}, so they judge "
                "nothing"
            )
        if "text" in self.tasks:
            lines.append(f"text: the loss on {BUNDLED_LICENSE} behind the cache judges instead")
        return lines

    @cached_property
    def text(self) -> np.ndarray | None:
        """The tokens of a text; None if the model has no tokenizer, or the text is too short."""
        try:
            tokenizer = TextTokenizer(self.info.tokenizer, self.info.d_vocab)
            tokens = np.array(tokenizer.encode(read_text(BUNDLED_LICENSE)))
        except ModelError:
            return None
        return tokens if len(tokens) >= self.n_ctx else None

    def table(
        self,
        heads: Collection[KVHead],
        random_seeds: Sequence[int] = RANDOM_SEEDS,
        seed: int = 0,
    ) -> pa.Table:
        """What is lost if only some KV heads `(layer, kv_head)` keep their whole cache.

        One row for the full cache, one for the chosen heads, one for as many random heads by each
        of `random_seeds`, and one for no head. `recall` is the share of the tokens of needles that
        are predicted first (family `needle`, or `text_needle` if the model recalls only sentences).
        `loss_after_repeats` is the mean loss in the second copy of a random block, from its second
        token on (family `repeated_random`). `loss_of_text`, if the model cannot do both, is the
        mean loss of the licence's tokens before which the cut hides keys. `cache_percent` is what
        is kept of a full cache of `n_ctx` tokens.
        """
        chosen = tuple(sorted({*heads}))
        for layer, kv_head in chosen:
            if (layer, kv_head) not in self.kv_heads:
                raise ScanError(
                    f"check: KV head {kv_head} of layer {layer}: {self.info.name} has "
                    f"{counted(self.info.n_layers, 'layer')} of "
                    f"{counted(self.n_kv_heads, 'KV head')}"
                )
        cuts: list[tuple[str, int | None, tuple[KVHead, ...]]] = [
            ("every head", None, self.kv_heads),
            ("chosen heads", None, chosen),
        ]
        for random_seed in random_seeds:
            # A permutation cut short: a larger choice by the same seed holds the smaller one.
            drawn = np.random.default_rng(random_seed).permutation(len(self.kv_heads))
            kept = tuple(sorted(self.kv_heads[index] for index in drawn[: len(chosen)]))
            cuts.append(("random heads", random_seed, kept))
        cuts.append(("no head", None, ()))
        schema = SCHEMA
        needles: Task = "text_needles" if "text_needles" in self.tasks else "needles"
        tasks: tuple[Task, ...] = (needles, "repeats")
        if "text" in self.tasks:
            schema = SCHEMA.insert(6, pa.field("loss_of_text", pa.float64()))
            tasks = (*tasks, "text")
        rows: list[dict[str, object]] = []
        for words, random_seed, kept in cuts:
            answers = self._answers(kept, tasks, seed)
            row = {
                "kept_whole": words,
                "seed": random_seed,
                "kv_heads": len(kept),
                "of_the_chosen": len({*kept} & {*chosen}),
                "recall": answers.recall,
                "loss_after_repeats": answers.loss,
                "loss_of_text": answers.text_loss,
                "cache_percent": self._cache_percent(kept),
            }
            rows.append({name: row[name] for name in schema.names})
        return pa.Table.from_pylist(rows, schema=schema)

    def fewest(self, ranked_heads: Sequence[KVHead], seed: int = SEARCHED_SEED) -> int:
        """How many ranked heads lose nothing, the fewest of at most `MOST_STEPS` numbers."""
        full, none = (self._answers(heads, self.tasks, seed) for heads in (self.kv_heads, ()))
        step = -(-len(ranked_heads) // MOST_STEPS)
        # Not by halving: more heads may lose more, as L2H3 of gpt2-mini does beside ten others.
        for kept in range(0, len(ranked_heads), step):
            heads = sorted({*ranked_heads[:kept]} & {*self.kv_heads})
            answers = self._answers(tuple(heads), self.tasks, seed)
            if answers.loses_nothing(full, none, SEARCHED_TOLERANCE):
                return kept
        return len(ranked_heads)

    def _scan(self, family: str, seed: int) -> Scan:
        """The scan whose sequences a question is made of. It is never run."""
        fields = {"model": self.model, "n_ctx": self.n_ctx, "sequences": self.sequences}
        fields |= {"sequences_per_shard": self.sequences, "seed": seed}
        return parse_scan({**fields, "input": {"family": family}})

    def _question(self, task: Task, seed: int) -> Question:
        if task in ("needles", "text_needles"):
            family = "needle" if task == "needles" else "text_needle"
            needles = Sequences(self._scan(family, seed), self.info).shard(0)
            assert needles.labels is not None
            return Question(needles.tokens, np.array(needles.labels) == "answer")
        if task == "text":
            return self._question_of_text(seed)
        scan = self._scan("repeated_random", seed)
        repeats = Sequences(scan, self.info).shard(0).tokens
        # The first token of the second copy cannot be known: nothing says that a copy begins.
        first = int(self.info.begins_with_bos(scan.bos))
        period = (scan.n_ctx - first + 1) // 2
        asked = np.zeros(repeats.shape, dtype=bool)  # [sequence pos]
        asked[:, first + period + 1 :] = True
        return Question(repeats, asked)

    def _question_of_text(self, seed: int) -> Question:
        """Windows of the text, and those of their tokens before which the cut hides keys."""
        assert self.text is not None
        last_start = len(self.text) - self.n_ctx
        sequences = min(TEXT_SEQUENCES, self.sequences)
        starts = np.random.default_rng(seed).integers(last_start + 1, size=sequences)
        tokens = self.text[starts[:, None] + np.arange(self.n_ctx)]
        if self.info.begins_with_bos("auto"):
            tokens[:, 0] = self.info.bos_token_id
        asked = np.zeros(tokens.shape, dtype=bool)  # [sequence pos]
        # The token before the asked one is the query.
        asked[:, self.sink + self.recent + 1 :] = True
        return Question(tokens, asked)

    def _answers(self, heads: tuple[KVHead, ...], tasks: Collection[Task], seed: int) -> Answers:
        answers = {FIELDS[task]: self._answer(heads, task, seed) for task in tasks}
        return Answers(**answers)

    def _answer(self, heads: tuple[KVHead, ...], task: Task, seed: int) -> float:
        """Recall of needles, or a mean loss; measured if it is not known."""
        key = f"{task} {seed} {groups_text(self.n_kv_heads, heads)}"
        if key not in self.known:
            intervention = NONE
            if heads != self.kv_heads:
                group = self.info.n_heads // self.n_kv_heads
                whole_heads = [
                    str(Head(layer, kv_head * group + member))
                    for layer, kv_head in heads
                    for member in range(group)
                ]
                arguments = (self.sink, self.recent, *whole_heads)
                intervention = Intervention((InterventionPart("stream_other_heads", arguments),))
            question = self._question(task, seed)
            with self.replica.engine_under(intervention, None) as engine:
                recalls, losses = recalls_and_losses(engine, question, self.passed)
            asks_needles = FIELDS[task] == "recall"
            self.known[key] = (recalls if asks_needles else losses).double().mean().item()
        return self.known[key]

    def _cache_percent(self, kept_heads: tuple[KVHead, ...]) -> float:
        full = kept = 0
        for head in self.kv_heads:
            facts = self.replica.model.facts(head[0])
            # A layer with a window never keeps more than it.
            keys = self.n_ctx if facts is None else window_of(facts, self.n_ctx)
            full += keys
            kept += keys if head in kept_heads else min(keys, self.sink + self.recent)
        return 100 * kept / full


def verdict(table: pa.Table, tasks: Collection[Task] = ("needles", "repeats")) -> list[str]:
    """What the table of a trial says, in lines. `tasks` are those that judge."""
    rows = table.to_pylist()
    has_text = "loss_of_text" in table.schema.names
    full, with_chosen, *with_random, with_none = (
        Answers(row["recall"], row["loss_after_repeats"], row.get("loss_of_text", 0.0))
        for row in rows
    )
    judged, judged_full, judged_none = (
        _judged(answers, tasks) for answers in (with_chosen, full, with_none)
    )
    is_within = "within" if judged.loses_nothing(judged_full, judged_none) else "not within"
    text = f", text {with_chosen.text_loss:.3f} against {full.text_loss:.3f}" if has_text else ""
    lines = [
        f"chosen heads: {is_within} {100 * TOLERANCE:.0f} % of the full cache "
        f"(recall {with_chosen.recall:.3f} of {full.recall:.3f}, "
        f"loss {with_chosen.loss:.3f} against {full.loss:.3f}{text})"
    ]
    if with_random:
        recalls = ", ".join(f"{one.recall:.3f}" for one in with_random)
        losses = ", ".join(f"{one.loss:.3f}" for one in with_random)
        texts = ", ".join(f"{one.text_loss:.3f}" for one in with_random)
        text = f"text {texts}, " if has_text else ""
        overlaps = ", ".join(str(row["of_the_chosen"]) for row in rows[2:-1])
        lines.append(
            f"random heads: recall {recalls}, loss {losses}, {text}with {overlaps} of the "
            f"{rows[1]['kv_heads']} chosen heads among them"
        )
    if 2 * rows[1]["kv_heads"] > rows[0]["kv_heads"]:
        lines.append("more than half of the heads are chosen, so any random ones hold many of them")
    if full.recall <= with_none.recall:
        lines.append("every head recalls no more than none does, so recall says nothing here")
    if full.loss >= with_none.loss:
        lines.append("every head has no lower loss than none has, so the loss says nothing here")
    if has_text and full.text_loss >= with_none.text_loss:
        lines.append("every head has no lower loss of text than none has, so text says nothing")
    return lines


def _judged(answers: Answers, tasks: Collection[Task]) -> Answers:
    """The answers in those tasks that judge."""
    return Answers(**{FIELDS[task]: getattr(answers, FIELDS[task]) for task in tasks})


def recalls_and_losses(
    engine: Engine, question: Question, passed: Callable[[int], None]
) -> tuple[Tensor, Tensor]:
    """Whether each token that is asked for is predicted first, and its loss."""
    losses: list[Tensor] = []
    is_first: list[Tensor] = []
    for logits, targets in asked_logits(engine, question, passed):
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
        is_first.append(logits.argmax(-1) == targets)
    return torch.cat(is_first), torch.cat(losses)


def asked_logits(
    engine: Engine, question: Question, passed: Callable[[int], None]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The logits `[asked d_vocab]` before the tokens that are asked for, and these tokens: some at
    a time, in their order.
    """
    model = engine.model
    size = max(1, MOST_TOKENS // question.tokens.shape[1])
    for start in range(0, len(question.tokens), size):
        tokens, asked = (
            torch.from_numpy(part[start : start + size]).to(model.device) for part in question
        )
        tokens = tokens.long()
        final: list[Tensor] = []
        # No layer is shown, so no pattern is asked anything, and none is built.
        engine.run(PassRequest(tokens=tokens, read_late=(), on_final=final.append, layers=()))
        (hidden,) = final  # [batch pos d_model], after the last norm.
        # A token is predicted at the position before it.
        streams = hidden[:, :-1][asked[:, 1:]]  # [asked d_model]
        targets = tokens[:, 1:][asked[:, 1:]]  # [asked]
        inputs = PredictionInputs(model, hidden, tokens)
        for stream, target in zip(inputs.chunks(streams), inputs.chunks(targets), strict=True):
            yield model.logits(stream), target
        passed(len(tokens))
