"""Prompts that a model has read whole, and how it reads on behind them.

Keys and values of prompts are kept, so what is asked behind different caches costs a pass of the
tokens behind the prompt alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from headcount.workers.engine.changes import Changes
from headcount.workers.engine.engine import StopPass
from headcount.workers.model.attention_facts import (
    AttentionFacts,
    all_scores,
    distances,
    pattern_of,
    unseen_keys,
    weighted_values,
)
from headcount.workers.model.model import Model, at_least_float32

AttendInLayer = Callable[[int, Tensor, Tensor, Tensor, AttentionFacts], Tensor]
"""Computes attention in a layer, from q `[batch head query d]` of the last tokens, and k and v
`[batch kv_head key d]` of all. Returns z `[batch head query d_v]`.
"""

MOST_TOKENS = 4096  # of a batch of prompts

LARGEST_DIFFERENCE = 1e-3
"""Of the stream behind a prompt from that of one pass, as a share of its norm: rounding is less."""


@dataclass(frozen=True)
class ReadPrompts:
    """Sequences whose first tokens a model has read with its whole cache."""

    model: Model
    tokens: np.ndarray  # `[sequence pos]`
    length: int  # of a prompt; 0: there is none

    @cached_property
    @torch.no_grad()
    def caches(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the prompts in each layer that attends: `[sequence kv_head pos d]`."""
        batches: list[list[tuple[Tensor, Tensor]]] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
            batches[-1].append((k, v))
            return whole_attention(layer, q, k, v, facts)

        size = max(1, MOST_TOKENS // self.length)
        for start in range(0, len(self.tokens), size):
            batches.append([])
            batch = self._on_device(self.tokens[start : start + size, : self.length])
            final_stream(self.model, batch, attend)
        return [
            (torch.cat([k for k, _ in of_layer]), torch.cat([v for _, v in of_layer]))
            for of_layer in zip(*batches, strict=True)
        ]

    def read_on(self, rows: slice, attend: AttendInLayer) -> Tensor:
        """The stream after the last norm behind the prompts of some sequences, `[sequence pos
        d_model]`, with what `attend` makes of their caches.
        """
        layers = self.model.info.attention_layers_or_all
        # Read now: a pass cannot begin within another one.
        caches = self.caches if self.length else []

        def behind(layer: int, q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
            if caches:
                before = caches[layers.index(layer)]
                k, v = (torch.cat([x[rows], y], 2) for x, y in zip(before, (k, v), strict=True))
                # A pass of a few tokens does not know of windows that are longer.
                facts = self.model.facts(layer) or facts
            return attend(layer, q, k, v, facts)

        tokens = self._on_device(self.tokens[rows, self.length :])
        return final_stream(self.model, tokens, behind, self.length)

    @property
    @torch.no_grad()
    def is_exact(self) -> bool:
        """Whether reading on gives what one pass does, so that nothing but keys and values carries
        the prompt.
        """
        first = slice(0, 1)
        try:
            behind = self.read_on(first, whole_attention)
        except TypeError:
            return False  # The model cannot be told where its tokens stand.
        whole = final_stream(self.model, self._on_device(self.tokens[first]), whole_attention)
        expected = whole[:, self.length :]
        return bool((behind - expected).norm() <= LARGEST_DIFFERENCE * expected.norm())

    def _on_device(self, tokens: np.ndarray) -> Tensor:
        return torch.from_numpy(tokens).to(self.model.device).long()


def final_stream(model: Model, tokens: Tensor, attend: AttendInLayer, first: int = 0) -> Tensor:
    """The stream after the last norm, `[batch pos d_model]`, of tokens from a position on."""
    finals: list[Tensor] = []
    layers = iter(model.info.attention_layers_or_all)

    def end_pass(_module: object, args: tuple[Tensor, ...]) -> None:
        finals.append(at_least_float32(args[0]))
        raise StopPass

    def attend_next(q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
        return attend(next(layers), q, k, v, facts).transpose(1, 2).to(v.dtype)

    (unembedding,) = model.modules("unembed")
    hook = unembedding.register_forward_pre_hook(end_pass)
    try:
        model.run_bare(tokens, attend_next, first)
    except StopPass:
        pass
    finally:
        hook.remove()
    return finals[0]


def whole_attention(_layer: int, q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
    """Attention of queries that see all keys before them."""
    return attention(q, k, v, facts, seen_keys(q, k, facts))


def changed_attention(changes: Changes) -> AttendInLayer:
    """Attention behind caches whose keys and values are changed, and partly hidden from heads."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
        k, v = (
            # Changes have positions before heads.
            changes.apply(name, layer, x.transpose(1, 2), {}).transpose(1, 2)
            for name, x in (("rot_k", k), ("v", v))
        )
        seen, streaming = seen_keys(q, k, facts), changes.streaming(layer)
        if streaming is not None:
            is_kept = kept_keys(q, k, streaming.sink, streaming.recent)
            streams = torch.zeros(q.shape[1], dtype=torch.bool, device=q.device)
            streams[list(streaming.heads[layer])] = True
            seen = seen & (is_kept | ~streams[:, None, None])  # [head query key]
        return attention(q, k, v, facts, seen)

    return attend


def seen_keys(q: Tensor, k: Tensor, facts: AttentionFacts) -> Tensor:
    """Which keys the last queries see: `[query key]`."""
    return ~unseen_keys(k.shape[2], facts, q.device)[-q.shape[2] :]


def kept_keys(q: Tensor, k: Tensor, sink: int, recent: int) -> Tensor:
    """Which keys a window keeps for the last queries, the first and the last: `[query key]`."""
    positions = torch.arange(k.shape[2], device=q.device)
    behind = distances(positions[-q.shape[2] :], positions)
    return (positions < sink) | (behind < recent)


def attention(q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts, seen: Tensor) -> Tensor:
    """z `[batch head query d_v]` of queries that see the keys of a mask `[… query key]`."""
    if facts.soft_cap is None and facts.slopes is None and facts.sink is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=facts.scale, enable_gqa=True
        )
    # Scores are of as many queries as keys: those before the last ones are 0, and left out again.
    count, before = q.shape[2], k.shape[2] - q.shape[2]
    unused = (0, 0, before, 0)
    scores = all_scores(pad(q, unused), k, facts)
    scores = scores.masked_fill(~pad(seen, unused, value=True), -torch.inf)
    return weighted_values(pattern_of(scores, facts), v)[:, :, -count:]
