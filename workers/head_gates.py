"""Which KV heads need their whole cache, by what the model recalls: heads are opened in rounds.

At first the cache of every KV head is cut: its queries see the first keys and the last ones. One
pass backward says of each head how much the loss falls, to first order, if it gets its whole cache
back: its gain. The heads with the largest gains are opened, and the others are asked again.

Where every head is whole, each alone may be missing without a loss, because others do the same: a
gain there says little. From the other end, the first that retrieves stands out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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


class Predictions(NamedTuple):
    """What a model predicts before some tokens."""

    probabilities: Tensor  # `[asked d_vocab]`
    certainty: Tensor  # Σ_v p[v] log p[v]: `[asked]`

    @classmethod
    def of(cls, logits: Tensor) -> "Predictions":
        """The softmax of logits `[asked d_vocab]`."""
        logprobs = logits.float().log_softmax(-1)
        probabilities = logprobs.exp()
        return cls(probabilities, (probabilities * logprobs).sum(-1))

    def part(self, start: int, stop: int) -> "Predictions":
        """Some of them."""
        return Predictions(self.probabilities[start:stop], self.certainty[start:stop])

    def divergences(self, logits: Tensor) -> Tensor:
        """How far other predictions are from these: Σ_v p[v] log(p[v] / p'[v]), `[asked]`.

        >>> Predictions.of(torch.zeros(1, 2)).divergences(torch.zeros(1, 2)).tolist()
        [0.0]
        """
        # Σ p log p is known, and no logarithm of the expected probabilities is taken again. A dot
        # product would be faster, and 3e-4 wrong for 49,000 tokens: `sum` adds in pairs.
        return self.certainty - (self.probabilities * logits.float().log_softmax(-1)).sum(-1)


class Asked(NamedTuple):
    """Sequences, and which of their tokens a model should know."""

    tokens: np.ndarray  # `[sequence pos]`
    weights: np.ndarray
    """What the loss of each token counts, 0 if it is not asked for: `[sequence pos]`. The first
    token never is.
    """
    expected: Predictions | None = None
    """What the model should predict before the tokens that are asked for, in their order. Its loss
    is the divergence from that. None: it should have the tokens themselves.
    """

    @classmethod
    def of_answers(cls, tokens: np.ndarray, answers: np.ndarray) -> "Asked":
        """The mean loss of some tokens: `answers [sequence pos]` is where they are."""
        return cls(tokens, answers / answers.sum())

    def part(self, start: int, stop: int) -> "Asked":
        """Some of the sequences."""
        expected = self.expected
        if expected is not None:
            first, last = ((self.weights[:row] > 0).sum() for row in (start, stop))
            expected = expected.part(first, last)
        return Asked(self.tokens[start:stop], self.weights[start:stop], expected)


@dataclass(frozen=True)
class Round:
    """What the model knows with some heads open, and what opening another would gain."""

    opened: tuple[KVHead, ...]  # in the order in which they were opened
    recall: float  # the share of the tokens asked for that it predicts first
    loss: float  # the sum of their losses times their weights, in nats
    gains: np.ndarray
    """The part of each sequence in the fall of that loss, to first order, if the head is opened, or
    was: `[sequence layer kv_head]`.
    """

    @property
    def of_all(self) -> np.ndarray:
        """The gains of all sequences together: `[layer kv_head]`."""
        return self.gains.sum(0)

    @property
    def facts(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return asdict(self) | {"gains": self.gains.tolist()}

    @property
    def pooled(self) -> "Round":
        """The same with the gains of all sequences as those of one."""
        return replace(self, gains=self.gains.sum(0, keepdims=True))

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> "Round":
        """The round that `facts` tell."""
        opened = tuple((layer, head) for layer, head in facts["opened"])
        return cls(opened, facts["recall"], facts["loss"], np.array(facts["gains"]))


class HeadGates:
    """A model with a gate at each KV head: 0 where its cache is cut, 1 where it is whole.

    z = z_cut + gate (z_whole - z_cut), as DuoAttention trains them.
    """

    def __init__(self, model: Model, sink: int, recent: int) -> None:
        check_unembedding(model)
        self.model, self.sink, self.recent = model, sink, recent
        info = model.info
        self.layers = tuple(info.attention_layers_or_all)
        self.n_kv_heads = info.n_kv_heads or info.n_heads
        self._attended = 0  # layers that have attended in the pass that is running

    def rounds(
        self, asked: Asked, before: Sequence[Round], told: Callable[[int], None]
    ) -> Iterator[Round]:
        """Open heads until half of them are open, or none gains anything; what was measured
        `before` is not measured again. `told` hears how many sequences have gone through the model.
        """
        heads = len(self.layers) * self.n_kv_heads
        step = -(-heads // (2 * ROUNDS))
        yield from before
        latest = before[-1] if before else self.asked(asked, (), told)
        if not before:
            yield latest
        while 2 * len(latest.opened) < heads:
            best = [head for head, gain in self.closed(latest) if gain > 0][:step]
            if not best:
                return
            latest = self.asked(asked, (*latest.opened, *best), told)
            yield latest

    def closed(self, latest: Round) -> list[tuple[KVHead, float]]:
        """The heads that are not open, and their gains: the largest first."""
        gains = {
            (layer, head): float(gain)
            for layer in self.layers
            for head, gain in enumerate(latest.of_all[layer])
            if (layer, head) not in latest.opened
        }
        return sorted(gains.items(), key=lambda item: -item[1])

    def ranking(self, latest: Round) -> list[KVHead]:
        """All heads: those that were opened in their order, then the others by their gains."""
        return [*latest.opened, *(head for head, _ in self.closed(latest))]

    def whole(self, asked: Asked, told: Callable[[int], None]) -> tuple[float, float]:
        """Recall and loss with every cache whole."""
        gates = torch.ones(self.model.info.n_layers, self.n_kv_heads)
        with torch.no_grad():
            recall, loss, _ = self._measured(asked, gates, told)
        return recall, loss

    def asked(self, asked: Asked, opened: tuple[KVHead, ...], told: Callable[[int], None]) -> Round:
        """What the model knows with these heads open."""
        gates = torch.zeros(self.model.info.n_layers, self.n_kv_heads)
        for layer, head in opened:
            gates[layer, head] = 1
        with torch.enable_grad():
            recall, loss, slopes = self._measured(asked, gates, told)
        return Round(opened, recall, loss, -slopes)

    def _measured(
        self, asked: Asked, gates: Tensor, told: Callable[[int], None]
    ) -> tuple[float, float, np.ndarray]:
        """Share and weighted loss of the tokens that are asked for, and the slopes of that loss
        `[sequence layer kv_head]`, where gradients are enabled, at `gates [layer kv_head]`.
        """
        loss, known = 0.0, 0
        slopes: list[np.ndarray] = []
        size = max(1, MOST_TOKENS // asked.tokens.shape[1])
        for start in range(0, len(asked.tokens), size):
            part = asked.part(start, start + size)
            tokens = torch.from_numpy(part.tokens).to(self.model.device).long()
            weights = torch.from_numpy(part.weights).to(self.model.device)[:, 1:]
            # A gate of its own for each sequence has the slope of that sequence.
            of_batch = gates.to(self.model.device).repeat(len(tokens), 1, 1)
            of_batch.requires_grad_(torch.is_grad_enabled())
            # A token is predicted at the position before it.
            is_asked = weights > 0
            logits = self.model.logits(self._final(tokens, of_batch)[:, :-1][is_asked])
            targets = tokens[:, 1:][is_asked]
            if part.expected is None:
                losses = cross_entropy(logits, targets, reduction="none")
            else:
                losses = part.expected.divergences(logits)
            weighted = (losses * weights[is_asked]).sum()
            if weighted.requires_grad:
                weighted.backward()
                assert of_batch.grad is not None
                slopes.append(of_batch.grad.double().cpu().numpy())
            loss += weighted.item()
            known += int((logits.argmax(-1) == targets).sum())
            told(len(tokens))
        of_all = np.concatenate(slopes) if slopes else np.zeros(0)
        return known / int((asked.weights[:, 1:] > 0).sum()), loss, of_all

    def _final(self, tokens: Tensor, gates: Tensor) -> Tensor:
        """The stream after the last norm, `[batch pos d_model]`; gates are `[batch layer head]`."""
        finals: list[Tensor] = []

        def end_pass(_module: object, args: tuple[Tensor, ...]) -> None:
            finals.append(at_least_float32(args[0]))
            raise StopPass

        (unembedding,) = self.model.modules("unembed")
        hook = unembedding.register_forward_pre_hook(end_pass)
        self._attended = 0
        try:
            self.model.run_bare(tokens, partial(self._attend, gates))
        except StopPass:
            pass
        finally:
            hook.remove()
        return finals[0]

    def _attend(
        self, gates: Tensor, q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts
    ) -> Tensor:
        """A layer's z `[batch pos head d_v]`, as its gates say."""
        layer = self.layers[self._attended]
        self._attended += 1
        n_heads, positions = q.shape[1], torch.arange(q.shape[2], device=q.device)
        seen = ~unseen_keys(len(positions), facts, q.device)  # [query key]
        is_kept = (positions < self.sink) | (distances(positions, positions) < self.recent)
        attend = partial(_attention, q, k, v, facts)
        z_cut, z_whole = attend(seen & is_kept), attend(seen)
        of_heads = gates[:, layer].repeat_interleave(n_heads // self.n_kv_heads, dim=1)
        z = z_cut + of_heads[:, :, None, None] * (z_whole - z_cut)
        return z.transpose(1, 2).to(v.dtype)


def _attention(q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts, seen: Tensor) -> Tensor:
    """z `[batch head pos d_v]` of queries that see the keys of a mask `[query key]`."""
    if facts.soft_cap is None and facts.slopes is None and facts.sink is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=facts.scale, enable_gqa=True
        )
    scores = all_scores(q, k, facts).masked_fill(~seen, -torch.inf)
    return weighted_values(pattern_of(scores, facts), v)
