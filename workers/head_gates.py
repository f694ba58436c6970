"""Which KV heads need their whole cache, by what the model recalls: heads are opened in rounds.

At first the cache of every KV head is cut: its queries see the first keys and the last ones. One
pass backward says of each head how much the loss of the answers falls, to first order, if it gets
its whole cache back: its gain. The heads with the largest gains are opened, and the others are
asked again.

Where every head is whole, each alone may be missing without a loss, because others do the same: a
gain there says little. From the other end, the first that retrieves stands out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from headcount.workers.engine.engine import StopPass
from headcount.workers.engine.prediction_inputs import check_unembedding
from headcount.workers.model.attention_facts import (
    AttentionFacts,
    all_scores,
    distances,
    pattern_of,
    unseen_keys,
    weighted_values,
)
from headcount.workers.model.model import Model, at_least_float32

KVHead = tuple[int, int]  # a layer, and one of its heads of keys and values

ROUNDS = 9
"""Rounds in which half of the heads are opened; the others are ranked by their last gains."""

MOST_TOKENS = 2048  # of a batch, whose graph is held until its backward pass


class Needles(NamedTuple):
    """Sequences in which something is asked for, and the tokens of the answers."""

    tokens: np.ndarray  # `[sequence pos]`
    answers: np.ndarray  # whether a token is of an answer: `[sequence pos]`; the first never is


@dataclass(frozen=True)
class Round:
    """What the model recalls with some heads open, and what opening another would gain."""

    opened: tuple[KVHead, ...]  # in the order in which they were opened
    recall: float  # the share of the answers' tokens that it predicts first
    loss: float  # their mean loss, in nats
    gains: tuple[tuple[float, ...], ...]
    """`[layer kv_head]`: the fall of that loss, to first order, if the head is opened, or was."""

    @property
    def facts(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return asdict(self)

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> "Round":
        """The round that `facts` tell."""
        opened = tuple((layer, head) for layer, head in facts["opened"])
        gains = tuple(map(tuple, facts["gains"]))
        return cls(opened, facts["recall"], facts["loss"], gains)


class HeadGates:
    """A model with a gate at each KV head: 0 where its cache is cut, 1 where it is whole.

    z = z_cut + gate (z_whole - z_cut), as DuoAttention trains them.
    """

    def __init__(self, model: Model, sink: int, recent: int) -> None:
        check_unembedding(model)
        self.model, self.sink, self.recent = model, sink, recent
        info = model.info
        self.layers = tuple(info.attention_layers_or_all)
        self.gates = torch.zeros(
            info.n_layers, info.n_kv_heads or info.n_heads, device=model.device
        )
        self._attended = 0  # layers that have attended in the pass that is running

    def rounds(
        self, needles: Needles, before: Sequence[Round], told: Callable[[int], None]
    ) -> Iterator[Round]:
        """Open heads until half of them are open, or none gains anything; what was measured
        `before` is not measured again. `told` hears how many sequences have gone through the model.
        """
        heads = len(self.layers) * self.gates.shape[1]
        step = -(-heads // (2 * ROUNDS))
        yield from before
        latest = before[-1] if before else self.asked(needles, (), told)
        if not before:
            yield latest
        while 2 * len(latest.opened) < heads:
            best = [head for head, gain in self.closed(latest) if gain > 0][:step]
            if not best:
                return
            latest = self.asked(needles, (*latest.opened, *best), told)
            yield latest

    def closed(self, latest: Round) -> list[tuple[KVHead, float]]:
        """The heads that are not open, and their gains: the largest first."""
        gains = {
            (layer, head): gain
            for layer in self.layers
            for head, gain in enumerate(latest.gains[layer])
            if (layer, head) not in latest.opened
        }
        return sorted(gains.items(), key=lambda item: -item[1])

    def ranking(self, latest: Round) -> list[KVHead]:
        """All heads: those that were opened in their order, then the others by their gains."""
        return [*latest.opened, *(head for head, _ in self.closed(latest))]

    def whole(self, needles: Needles, told: Callable[[int], None]) -> tuple[float, float]:
        """Recall and loss with every cache whole."""
        self.gates.fill_(1)
        with torch.no_grad():
            return self._recall_and_loss(needles, told)

    def asked(
        self, needles: Needles, opened: tuple[KVHead, ...], told: Callable[[int], None]
    ) -> Round:
        """What the model recalls with these heads open."""
        gates = torch.zeros_like(self.gates)
        for layer, head in opened:
            gates[layer, head] = 1
        self.gates = gates.requires_grad_()
        with torch.enable_grad():
            recall, loss = self._recall_and_loss(needles, told)
        assert gates.grad is not None
        self.gates = gates.detach()
        gains = tuple(tuple(-gain for gain in of_layer) for of_layer in gates.grad.tolist())
        return Round(opened, recall, loss, gains)

    def _recall_and_loss(
        self, needles: Needles, told: Callable[[int], None]
    ) -> tuple[float, float]:
        """Share and mean loss of the answers' tokens; gates that want gradients get them."""
        loss, known, answers = 0.0, 0, int(needles.answers.sum())
        size = max(1, MOST_TOKENS // needles.tokens.shape[1])
        for start in range(0, len(needles.tokens), size):
            tokens, asked = (
                torch.from_numpy(part[start : start + size]).to(self.model.device)
                for part in needles
            )
            tokens = tokens.long()
            targets = tokens[:, 1:][asked[:, 1:]]
            # A token is predicted at the position before it.
            logits = self.model.unembed(self._final(tokens)[:, :-1][asked[:, 1:]])
            of_batch = cross_entropy(logits, targets, reduction="sum") / answers
            if of_batch.requires_grad:
                of_batch.backward()
            loss += of_batch.item()
            known += int((logits.argmax(-1) == targets).sum())
            told(len(tokens))
        return known / answers, loss

    def _final(self, tokens: Tensor) -> Tensor:
        """The stream after the last norm: `[batch pos d_model]`."""
        finals: list[Tensor] = []

        def end_pass(_module: object, args: tuple[Tensor, ...]) -> None:
            finals.append(at_least_float32(args[0]))
            raise StopPass

        (unembedding,) = self.model.modules("unembed")
        hook = unembedding.register_forward_pre_hook(end_pass)
        self._attended = 0
        try:
            self.model.run_bare(tokens, self._attend)
        except StopPass:
            pass
        finally:
            hook.remove()
        return finals[0]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
        """A layer's z `[batch pos head d_v]`, as its gates say."""
        layer = self.layers[self._attended]
        self._attended += 1
        n_heads, positions = q.shape[1], torch.arange(q.shape[2], device=q.device)
        seen = ~unseen_keys(len(positions), facts, q.device)  # [query key]
        is_kept = (positions < self.sink) | (distances(positions, positions) < self.recent)
        attend = partial(_attention, q, k, v, facts)
        z_cut, z_whole = attend(seen & is_kept), attend(seen)
        gates = self.gates[layer].repeat_interleave(n_heads // self.gates.shape[1])
        z = z_cut + gates[:, None, None] * (z_whole - z_cut)
        return z.transpose(1, 2).to(v.dtype)


def _attention(q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts, seen: Tensor) -> Tensor:
    """z `[batch head pos d_v]` of queries that see the keys of a mask `[query key]`."""
    if facts.soft_cap is None and facts.slopes is None and facts.sink is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=facts.scale, enable_gqa=True
        )
    scores = all_scores(q, k, facts).masked_fill(~seen, -torch.inf)
    return weighted_values(pattern_of(scores, facts), v)
