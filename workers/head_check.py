"""Whether the chosen KV heads are the ones that need a whole cache: an ablation of a model.

The chosen heads keep their whole cache. All others keep the first keys and the last ones, as a
cache that was cut by the choice would. Then the model is asked for needles, and to go on with a
repeated block. As many random heads are kept whole for comparison.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from headcount.schemas.errors import ScanError, counted
from headcount.schemas.scans.intervention import NONE, Intervention, InterventionPart
from headcount.schemas.scans.measured_heads import Head
from headcount.schemas.scans.scan import Scan, parse_scan
from headcount.workers.engine.engine import Engine
from headcount.workers.engine.prediction_inputs import PredictionInputs, check_unembedding
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.model.attention_facts import window_of
from headcount.workers.model.files.known_models import KnownModels
from headcount.workers.model.files.model_files import AdapterChoice
from headcount.workers.replica import Replica

MOST_TOKENS = 16_384  # of a batch
MOST_N_CTX = 1024  # tokens of a sequence if nobody says how many

TOLERANCE = 0.02  # share of recall that a cut may cost, and of loss that it may add

SEARCHED_TOLERANCE = TOLERANCE / 2
"""The same while a number of heads is looked for: on other sequences it may be a little worse."""

MOST_STEPS = 32  # numbers of heads that are tried at most

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


class Question(NamedTuple):
    """Sequences, and the tokens of them that the model should know."""

    tokens: np.ndarray  # `[sequence pos]`
    asked: np.ndarray  # whether a token is one of these: `[sequence pos]`; the first never is


@dataclass(frozen=True)
class Answers:
    """What a model says of its tokens."""

    recall: float  # share of the tokens of needles that it predicts first
    loss: float  # mean loss after repeats, in nats

    def loses_nothing(self, full: "Answers", tolerance: float = TOLERANCE) -> bool:
        """Whether they are as good as those of the full cache, within the tolerance."""
        recalls = self.recall >= (1 - tolerance) * full.recall
        return recalls and self.loss <= (1 + tolerance) * full.loss


class HeadTrial:
    """A model whose named heads keep their whole cache; others the first and last keys."""

    def __init__(
        self,
        model: str,
        sink: int,
        recent: int,
        *,
        n_ctx: int | None = None,
        sequences: int = 64,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        adapter: AdapterChoice = "refuse",
    ) -> None:
        models = KnownModels()
        self.info = models.describe(model, adapter=adapter)
        self.model = model
        self.sink = sink
        self.recent = recent
        self.n_ctx = min(self.info.n_ctx, MOST_N_CTX) if n_ctx is None else n_ctx
        self.sequences = sequences
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
        # The scan of any needles stands for all: its replica runs any tokens of this length.
        self.replica = Replica(self.info, self._scan("needle", 0), device, models.load)
        check_unembedding(self.replica.model)

    def table(
        self,
        heads: Collection[KVHead],
        random_seeds: Sequence[int] = (0, 1, 2),
        seed: int = 0,
    ) -> pa.Table:
        """What is lost if only some KV heads `(layer, kv_head)` keep their whole cache.

        One row for the full cache, one for the chosen heads, one for as many random heads by each
        of `random_seeds`, and one for no head. `recall` is the share of the tokens of needles that
        are predicted first (family `needle`). `loss_after_repeats` is the mean loss in the second
        copy of a random block, from its second token on (family `repeated_random`).
        `cache_percent` is what is kept of a full cache of `n_ctx` tokens.
        """
        questions = self._questions(seed)
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
        rows: list[dict[str, object]] = []
        for words, random_seed, kept in cuts:
            answers = self._answers(kept, questions)
            of_chosen = len({*kept} & {*chosen})
            found = (answers.recall, answers.loss, self._cache_percent(kept))
            values = (words, random_seed, len(kept), of_chosen, *found)
            rows.append(dict(zip(SCHEMA.names, values, strict=True)))
        return pa.Table.from_pylist(rows, schema=SCHEMA)

    def fewest(self, ranked_heads: Sequence[KVHead], seed: int = 0) -> int:
        """How many ranked heads lose nothing, the fewest of at most `MOST_STEPS` numbers."""
        questions = self._questions(seed)
        full = self._answers(self.kv_heads, questions)
        step = -(-len(ranked_heads) // MOST_STEPS)
        # Not by halving: more heads may lose more, as L2H3 of gpt2-mini does beside ten others.
        for kept in range(0, len(ranked_heads), step):
            heads = sorted({*ranked_heads[:kept]} & {*self.kv_heads})
            answers = self._answers(tuple(heads), questions)
            if answers.loses_nothing(full, SEARCHED_TOLERANCE):
                return kept
        return len(ranked_heads)

    def _scan(self, family: str, seed: int) -> Scan:
        """The scan whose sequences a question is made of. It is never run."""
        fields = {"model": self.model, "n_ctx": self.n_ctx, "sequences": self.sequences}
        fields |= {"sequences_per_shard": self.sequences, "seed": seed}
        return parse_scan({**fields, "input": {"family": family}})

    def _questions(self, seed: int) -> tuple[Question, Question]:
        needles = Sequences(self._scan("needle", seed), self.info).shard(0)
        assert needles.labels is not None
        scan = self._scan("repeated_random", seed)
        repeats = Sequences(scan, self.info).shard(0).tokens
        # The first token of the second copy cannot be known: nothing says that a copy begins.
        period = (scan.n_ctx - scan.bos + 1) // 2
        asked = np.zeros(repeats.shape, dtype=bool)  # [sequence pos]
        asked[:, scan.bos + period + 1 :] = True
        needle_answers = np.array(needles.labels) == "answer"
        return Question(needles.tokens, needle_answers), Question(repeats, asked)

    def _answers(self, heads: tuple[KVHead, ...], questions: tuple[Question, Question]) -> Answers:
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
        needles, repeats = questions
        with self.replica.engine_under(intervention, None) as engine:
            recall = _recalls_and_losses(engine, needles)[0].double().mean().item()
            loss = _recalls_and_losses(engine, repeats)[1].double().mean().item()
        return Answers(recall, loss)

    def _cache_percent(self, kept_heads: tuple[KVHead, ...]) -> float:
        full = kept = 0
        for head in self.kv_heads:
            facts = self.replica.model.facts(head[0])
            # A layer with a window never keeps more than it.
            keys = self.n_ctx if facts is None else window_of(facts, self.n_ctx)
            full += keys
            kept += keys if head in kept_heads else min(keys, self.sink + self.recent)
        return 100 * kept / full


def verdict(table: pa.Table) -> list[str]:
    """What the table of a trial says, in lines."""
    rows = table.to_pylist()
    full, with_chosen, *with_random, with_none = (
        Answers(row["recall"], row["loss_after_repeats"]) for row in rows
    )
    is_within = "within" if with_chosen.loses_nothing(full) else "not within"
    lines = [
        f"chosen heads: {is_within} {100 * TOLERANCE:.0f} % of the full cache "
        f"(recall {with_chosen.recall:.3f} of {full.recall:.3f}, "
        f"loss {with_chosen.loss:.3f} against {full.loss:.3f})"
    ]
    if with_random:
        recalls = ", ".join(f"{one.recall:.3f}" for one in with_random)
        losses = ", ".join(f"{one.loss:.3f}" for one in with_random)
        overlaps = ", ".join(str(row["of_the_chosen"]) for row in rows[2:-1])
        lines.append(
            f"random heads: recall {recalls}, loss {losses}, with {overlaps} of the "
            f"{rows[1]['kv_heads']} chosen heads among them"
        )
    if 2 * rows[1]["kv_heads"] > rows[0]["kv_heads"]:
        lines.append("more than half of the heads are chosen, so any random ones hold many of them")
    if full.recall <= with_none.recall:
        lines.append("every head recalls no more than none does, so recall says nothing here")
    if full.loss >= with_none.loss:
        lines.append("every head has no lower loss than none has, so the loss says nothing here")
    return lines


def _recalls_and_losses(engine: Engine, question: Question) -> tuple[Tensor, Tensor]:
    """Whether each token that is asked for is predicted first, and its loss."""
    model = engine.model
    losses: list[Tensor] = []
    is_first: list[Tensor] = []
    size = max(1, MOST_TOKENS // question.tokens.shape[1])
    for start in range(0, len(question.tokens), size):
        tokens, asked = (
            torch.from_numpy(part[start : start + size]).to(model.device) for part in question
        )
        tokens = tokens.long()
        final: list[Tensor] = []
        # No layer is shown, so no pattern is asked anything, and none is built.
        engine.run(tokens, {}, lambda *_: None, read_late=(), on_final=final.append, layers=())
        (hidden,) = final  # [batch pos d_model], after the last norm.
        # A token is predicted at the position before it.
        streams = hidden[:, :-1][asked[:, 1:]]  # [asked d_model]
        targets = tokens[:, 1:][asked[:, 1:]]  # [asked]
        inputs = PredictionInputs(model, hidden, tokens)
        for stream, target in zip(inputs.chunks(streams), inputs.chunks(targets), strict=True):
            logits = model.unembed(stream)
            losses.append(torch.nn.functional.cross_entropy(logits, target, reduction="none"))
            is_first.append(logits.argmax(-1) == target)
    return torch.cat(is_first), torch.cat(losses)
