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
from torch.nn.functional import cross_entropy

from headcount.workers.engine.prediction_inputs import check_unembedding
from headcount.workers.model.attention_facts import AttentionFacts
from headcount.workers.model.model import Model
from headcount.workers.read_prompts import ReadPrompts, attention, kept_keys, seen_keys

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


def rounds_of(
    heads: Sequence[KVHead],
    before: Sequence[Round],
    ask: Callable[[tuple[KVHead, ...]], Round],
) -> Iterator[Round]:
    """Open heads until half of them are open, or none gains anything. `ask` measures what is known
    with some of them open; what was measured `before` is not measured again.
    """
    step = -(-len(heads) // (2 * ROUNDS))
    yield from before
    latest = before[-1] if before else ask(())
    if not before:
        yield latest
    while 2 * len(latest.opened) < len(heads):
        best = [head for head, gain in closed_heads(heads, latest) if gain > 0][:step]
        if not best:
            return
        latest = ask((*latest.opened, *best))
        yield latest


def closed_heads(heads: Sequence[KVHead], latest: Round) -> list[tuple[KVHead, float]]:
    """The heads that are not open, and their gains: the largest first."""
    gains = {head: float(latest.of_all[head]) for head in heads if head not in latest.opened}
    return sorted(gains.items(), key=lambda item: -item[1])


class HeadGates:
    """A model with a gate at each KV head: 0 where its cache is cut, 1 where it is whole.

    z = z_cut + gate (z_whole - z_cut), as DuoAttention trains them.
    """

    def __init__(
        self, model: Model, sink: int, recent: int, prompts: ReadPrompts | None = None
    ) -> None:
        """Behind `prompts`, if there are any, caches are cut: these are read whole."""
        check_unembedding(model)
        self.model, self.sink, self.recent, self.prompts = model, sink, recent, prompts
        self.n_kv_heads = model.info.n_kv_heads or model.info.n_heads

    def rounds(
        self, asked: Asked, before: Sequence[Round], told: Callable[[int], None]
    ) -> Iterator[Round]:
        """The rounds in which heads are opened. `told` hears how many sequences have gone through
        the model.
        """
        yield from rounds_of(
            self.model.info.kv_heads, before, lambda opened: self.asked(asked, opened, told)
        )

    def ranking(self, latest: Round) -> list[KVHead]:
        """All heads: those that were opened in their order, then the others by their gains."""
        closed = closed_heads(self.model.info.kv_heads, latest)
        return [*latest.opened, *(head for head, _ in closed)]

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
        prompts = self.prompts or ReadPrompts(self.model, asked.tokens, 0)
        # A token is predicted at the position before it, so the first one behind a prompt is not.
        after = prompts.length + 1
        size = max(1, MOST_TOKENS // asked.tokens[:, prompts.length :].shape[1])
        row = 0  # tokens that were asked for
        for start in range(0, len(asked.tokens), size):
            batch = slice(start, start + size)
            targets, weights = (
                torch.from_numpy(x[batch, after:]).to(self.model.device)
                for x in (asked.tokens, asked.weights)
            )
            # A gate of its own for each sequence has the slope of that sequence.
            of_batch = gates.to(self.model.device).repeat(len(targets), 1, 1)
            of_batch.requires_grad_(torch.is_grad_enabled())
            stream = prompts.read_on(batch, partial(self._attend, of_batch))
            is_asked = weights > 0
            logits = self.model.logits(stream[:, :-1][is_asked])
            targets = targets.long()[is_asked]
            if asked.expected is None:
                losses = cross_entropy(logits, targets, reduction="none")
            else:
                losses = asked.expected.part(row, row + len(targets)).divergences(logits)
            row += len(targets)
            weighted = (losses * weights[is_asked]).sum()
            if weighted.requires_grad:
                weighted.backward()
                assert of_batch.grad is not None
                slopes.append(of_batch.grad.double().cpu().numpy())
            loss += weighted.item()
            known += int((logits.argmax(-1) == targets).sum())
            told(len(weights))
        of_all = np.concatenate(slopes) if slopes else np.zeros(0)
        return known / row, loss, of_all

    def _attend(
        self, gates: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts
    ) -> Tensor:
        """A layer's z `[batch head query d_v]`, as its gates `[batch layer head]` say."""
        seen = seen_keys(q, k, facts)
        is_kept = kept_keys(q, k, self.sink, self.recent)
        z_cut, z_whole = (attention(q, k, v, facts, keys) for keys in (seen & is_kept, seen))
        of_heads = gates[:, layer].repeat_interleave(q.shape[1] // self.n_kv_heads, dim=1)
        return z_cut + of_heads[:, :, None, None] * (z_whole - z_cut)
