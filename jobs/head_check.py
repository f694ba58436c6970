"""Whether the chosen KV heads are the ones that need a whole cache: an ablation of a model.

The chosen heads keep their whole cache. All others keep the first keys and the last ones, as a
cache that was cut by the choice would. Then the model is asked for needles, and to go on with a
repeated block. As many random heads are kept whole for comparison.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from schemas.errors import ScanError, counted
from schemas.intervention import NONE, Intervention, InterventionPart
from schemas.measured_heads import Head
from schemas.scan import Scan, parse_scan
from workers.engine.engine import Activations, Engine
from workers.engine.prediction_inputs import PredictionInputs, check_unembedding
from workers.inputs.sequences import Sequences
from workers.model.known_models import KnownModels
from workers.model.model import Model
from workers.model.model_info import ModelInfo
from workers.replica import Replica

MOST_TOKENS = 16_384
"""Tokens of a batch."""

MOST_N_CTX = 1024
"""Tokens of a sequence if nobody says how many."""


class KVHead(NamedTuple):
    """A head of keys and values."""

    layer: int
    kv_head: int


class Question(NamedTuple):
    """Sequences, and the tokens of them that the model should know."""

    tokens: np.ndarray
    """`[sequence pos]`."""
    asked: np.ndarray
    """Whether a token is one of these: `[sequence pos]`. The first token never is."""


@dataclass(frozen=True)
class Cut:
    """Which KV heads keep a whole cache."""

    kept: str
    """In words, for the table."""
    seed: int | None
    """The seed of a random choice."""
    heads: tuple[KVHead, ...]


@dataclass(frozen=True)
class Answers:
    """What a model says of its tokens."""

    recall: float
    """Share of them that it predicts first."""
    loss: float
    """Their mean loss in nats."""


def check_heads(
    model: str,
    heads: Collection[tuple[int, int]],
    sink: int,
    recent: int,
    *,
    n_ctx: int | None = None,
    sequences: int = 64,
    random_seeds: Sequence[int] = (0, 1, 2),
    seed: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> pa.Table:
    """What is lost if only some KV heads `(layer, kv_head)` keep their whole cache.

    One row for the full cache, one for the chosen heads, one for as many random heads by each of
    `random_seeds`, and one for no head. `recall` is the share of the tokens of needles that are
    predicted first (family `needle`). `loss_after_repeats` is the mean loss in the second copy of a
    random block, from its second token on (family `repeated_random`). `cache_percent` is what is
    kept of a full cache of `n_ctx` tokens.
    """
    models = KnownModels()
    info = models.describe(model)
    length = min(info.n_ctx, MOST_N_CTX) if n_ctx is None else n_ctx
    # The scan of the needles stands for both: its replica runs any tokens of this length.
    needle_scan = _scan(model, "needle", length, sequences, seed)
    repeat_scan = _scan(model, "repeated_random", length, sequences, seed)
    _check_window(recent, length)
    replica = Replica(info, needle_scan, device, models.load)
    check_unembedding(replica.model)
    needles = _needles(needle_scan, info)
    repeats = _repeats(repeat_scan, info)
    cuts = list(_cuts(info, heads, random_seeds))
    rows: list[dict[str, object]] = []
    for cut in cuts:
        intervention = _intervention(cut, info, sink, recent)
        with replica.engine_under(intervention, None) as engine:
            recall = _answers(engine, needles, replica.device).recall
            loss = _answers(engine, repeats, replica.device).loss
        rows.append(
            {
                "kept_whole": cut.kept,
                "seed": cut.seed,
                "kv_heads": len(cut.heads),
                "of_the_chosen": len({*cut.heads} & {*cuts[1].heads}),
                "recall": recall,
                "loss_after_repeats": loss,
                "cache_percent": _cache_percent(replica.model, cut, sink + recent, length),
            }
        )
    return pa.Table.from_pylist(rows, schema=SCHEMA)


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


# The inputs


def _scan(model: str, family: str, n_ctx: int, sequences: int, seed: int) -> Scan:
    """The scan whose sequences a question is made of. It is never run."""
    return parse_scan(
        {
            "model": model,
            "n_ctx": n_ctx,
            "sequences": sequences,
            "sequences_per_shard": sequences,
            "seed": seed,
            "input": {"family": family},
        }
    )


def _check_window(recent: int, n_ctx: int) -> None:
    """Refuse a window from which the first copy of a block can be seen: nothing would be lost."""
    if recent >= n_ctx // 2:
        raise ScanError(
            f"check: expected recent below {n_ctx // 2}, half of {counted(n_ctx, 'token')}, so "
            f"that a repeated block is out of sight, got {recent}; raise n_ctx"
        )


def _needles(scan: Scan, info: ModelInfo) -> Question:
    """Needles in random tokens; the answers at the end are asked for."""
    shard = Sequences(scan, info).shard(0)
    assert shard.labels is not None
    return Question(shard.tokens, np.array(shard.labels) == "answer")


def _repeats(scan: Scan, info: ModelInfo) -> Question:
    """A block of random tokens twice; the second copy from its second token on is asked for."""
    tokens = Sequences(scan, info).shard(0).tokens
    # The first token of the second copy cannot be known: nothing says that a copy begins.
    period = (scan.n_ctx - scan.bos + 1) // 2
    asked = np.zeros(tokens.shape, dtype=bool)
    asked[:, scan.bos + period + 1 :] = True
    return Question(tokens, asked)


# The cuts


def _cuts(
    info: ModelInfo, chosen: Collection[tuple[int, int]], random_seeds: Sequence[int]
) -> Iterator[Cut]:
    """The full cache, the chosen heads, as many random ones for each seed, and no head."""
    every = _kv_heads(info)
    chosen_heads = tuple(sorted(KVHead(*head) for head in set(chosen)))
    for head in chosen_heads:
        if head not in every:
            raise ScanError(
                f"check: KV head {head.kv_head} of layer {head.layer}: {info.name} has "
                f"{counted(info.n_layers, 'layer')} of {counted(_n_kv_heads(info), 'KV head')}"
            )
    yield Cut("every head", None, every)
    yield Cut("chosen heads", None, chosen_heads)
    for seed in random_seeds:
        places = np.random.default_rng(seed).permutation(len(every))[: len(chosen_heads)]
        yield Cut("random heads", seed, tuple(sorted(every[place] for place in places)))
    yield Cut("no head", None, ())


def _kv_heads(info: ModelInfo) -> tuple[KVHead, ...]:
    """All KV heads of a model."""
    return tuple(
        KVHead(layer, kv_head)
        for layer in info.attention_layers_or_all
        for kv_head in range(_n_kv_heads(info))
    )


def _n_kv_heads(info: ModelInfo) -> int:
    return info.n_kv_heads or info.n_heads


def _intervention(cut: Cut, info: ModelInfo, sink: int, recent: int) -> Intervention:
    """The edit that leaves a whole cache to some KV heads alone."""
    if cut.heads == _kv_heads(info):
        return NONE
    group = info.n_heads // _n_kv_heads(info)
    whole = [
        Head(layer, kv_head * group + member)
        for layer, kv_head in cut.heads
        for member in range(group)
    ]
    arguments = (sink, recent, *map(str, whole))
    return Intervention((InterventionPart("stream_other_heads", arguments),))


def _cache_percent(model: Model, cut: Cut, streamed_keys: int, n_ctx: int) -> float:
    """What is kept of the keys and values that a full cache has, in percent."""
    full = kept = 0
    for head in _kv_heads(model.info):
        facts = model.facts(head.layer)
        window = None if facts is None else facts.window
        keys = n_ctx if window is None else min(window, n_ctx)
        full += keys
        kept += keys if head in cut.heads else min(keys, streamed_keys)
    return 100 * kept / full


# The answers


def _answers(engine: Engine, question: Question, device: str) -> Answers:
    """How well a model knows the tokens that it is asked for."""
    losses: list[Tensor] = []
    is_first: list[Tensor] = []
    size = max(1, MOST_TOKENS // question.tokens.shape[1])
    for start in range(0, len(question.tokens), size):
        tokens = torch.from_numpy(question.tokens[start : start + size]).long().to(device)
        asked = torch.from_numpy(question.asked[start : start + size]).to(device)
        hidden = _final_stream(engine, tokens)
        # A token is predicted at the position before it.
        streams = hidden[:, :-1][asked[:, 1:]]
        targets = tokens[:, 1:][asked[:, 1:]]
        inputs = PredictionInputs(engine.model, hidden, tokens)
        pieces = zip(inputs.chunks(streams), inputs.chunks(targets), strict=True)
        for stream, target in pieces:
            logits = inputs.unembed(stream)
            losses.append(torch.nn.functional.cross_entropy(logits, target, reduction="none"))
            is_first.append(logits.argmax(-1) == target)
    return Answers(
        recall=torch.cat(is_first).double().mean().item(),
        loss=torch.cat(losses).double().mean().item(),
    )


def _final_stream(engine: Engine, tokens: Tensor) -> Tensor:
    """The stream after the last norm `[batch pos d_model]`."""
    streams: list[Tensor] = []
    # No layer is shown, so no pattern is asked anything, and none is built.
    engine.run(tokens, {}, _ignore, read_late=(), on_final=streams.append, layers=())
    return streams[0]


def _ignore(_layer: int, _activations: Activations) -> Any:  # noqa: ANN401 - nothing is shown
    return None
