"""Which plan saves most at a loss: choices alone, then together in rounds, always measured.

A sum of what single choices cost is no result: here it only says what is tried next. Each round
takes the next choices, deals them into two hands, measures each hand together with what is chosen,
and keeps the hand that costs less for each byte that it saves. The other one goes back, at the cost
that was measured. If a round costs more than is allowed, fewer are tried.

Where choices of a kind cost all the same within their errors, nothing can be chosen: then only the
plans that treat all heads alike are left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headcount.exports.cache_plan.engines import CacheEngine
from headcount.exports.cache_plan.plans import CachePlan, CacheShape, Choice
from headcount.exports.shared.certainty import Stability, half_of, stability_of
from headcount.schemas.errors import counted
from headcount.workers.cache_trial import CacheTrial, Measured

FEW = 4  # of many choices, each is measured alone on one in so many sequences
MANY = 32  # choices from which on that is done

ROUNDS = 16  # about as many rounds lead through all choices

SURE = 0.05  # p from which down choices of a kind are not alike
PERMUTATIONS = 999

LEAST_RECALL = 0.95  # of the whole cache's, that --task recall keeps

FREE = 0.1  # the share of the allowed loss that a uniform plan may cost to begin with
FREE_LOSS = 0.005  # the same in nats if no loss is stated

MOST_FAILURES = 8  # rounds that cost too much, until the search ends


class Goal(NamedTuple):
    """What is asked for."""

    loss: float | None  # how far the loss may rise, in nats per token
    share: float | None  # of the bytes that may stay
    recall: bool  # whether needles must be found as well


class Point(NamedTuple):
    """A plan that was measured where documents choose."""

    plan: CachePlan
    bytes_per_token: float
    loss: float  # rise of the loss of text, in nats per token
    cost: float  # the same, and with --task recall the rise of the loss of answers
    recall: float


@dataclass
class Found:
    """What a search has found."""

    chosen: Point | None  # None: nothing that was tried does what is asked for
    tried: list[Point]  # all that were measured together
    alone: dict[Choice, np.ndarray]  # what each choice costs alone: `[sequence]`
    p_alike: dict[str, float]  # of each kind: how likely costs differ so if all are alike
    stability: Stability | None

    @property
    def can_choose(self) -> bool:
        """Whether units of any kind are told apart; nothing to tell counts as well."""
        return not self.p_alike or min(self.p_alike.values()) * len(self.p_alike) <= SURE


class Search:
    """A search for the plan of one engine."""

    def __init__(
        self,
        trial: CacheTrial,
        engine: CacheEngine,
        shape: CacheShape,
        goal: Goal,
        tell: Callable[[str], None],
    ) -> None:
        """`tell` takes the words of what begins."""
        self.trial, self.engine, self.shape, self.goal, self.tell = (
            trial,
            engine,
            shape,
            goal,
            tell,
        )
        self.sequences = len(trial.pieces["chooses"].tokens)
        self.choices = engine.choices(shape)
        self.uniform = engine.uniform(shape)
        self.full_bytes = CachePlan.untouched(shape).bytes_per_token(shape)
        self.few = self.sequences
        if len(self.choices) > MANY:
            self.few = max(2, -(-self.sequences // FEW))

    @property
    def passes(self) -> int:
        """How many sequences go through the model where documents choose, at most."""
        rounds = 2 * (ROUNDS + MOST_FAILURES) if self.choices else 0
        whole = 1 + len(self.uniform) + rounds
        return self.sequences * whole + self.few * len(self.choices)

    def run(self) -> Found:
        """Search; what is known already is not measured again."""
        self.tell("the whole cache")
        untouched = self._point(CachePlan.untouched(self.shape))
        self.tell(f"{counted(len(self.uniform), 'plan')} that treat all heads alike")
        tried = [untouched, *map(self._point, self.uniform)]
        if not self.choices:
            return Found(self._best(tried), tried, {}, {}, None)
        start = self._start(tried)
        alone = self._alone()
        found = Found(None, tried, alone, self._p_alike(alone), None)
        if found.can_choose:
            tried += self._rounds(start, alone)
        found.chosen = self._best(tried)
        if found.chosen is not None and found.can_choose:
            found.stability = self._stability(found.chosen.plan, alone)
        return found

    # Measurements

    def _changes(self, plan: CachePlan, count: int | None = None) -> Measured:
        """Changes of the losses of each sequence, and the recall."""
        full = self.trial.measure("chooses", "none", count)
        changed = self.trial.measure("chooses", plan.intervention(self.shape), count)
        return Measured(changed.text - full.text, changed.needle - full.needle, changed.recall)

    def _costs(self, changes: Measured) -> np.ndarray:
        if not self.goal.recall:
            return changes.text
        # Answers that are surer than with the whole cache pay for nothing.
        return changes.text + changes.needle.clip(min=0)

    def _point(self, plan: CachePlan) -> Point:
        changes = self._changes(plan)
        return Point(
            plan,
            plan.bytes_per_token(self.shape),
            float(changes.text.mean()),
            float(self._costs(changes).mean()),
            float(changes.recall.mean()),
        )

    def _is_allowed(self, point: Point) -> bool:
        if self.goal.loss is not None and point.loss > self.goal.loss:
            return False
        least = LEAST_RECALL * float(self.trial.measure("chooses", "none").recall.mean())
        return not self.goal.recall or point.recall >= least

    def _is_small(self, point: Point) -> bool:
        share = self.goal.share
        return share is not None and point.bytes_per_token <= share * self.full_bytes

    def _best(self, tried: Sequence[Point]) -> Point | None:
        """The least costly of those that are small enough; or the smallest that is allowed."""
        allowed = [point for point in tried if self._is_allowed(point)]
        if self.goal.share is None:
            return min(allowed, key=lambda point: (point.bytes_per_token, point.cost), default=None)
        small = [point for point in tried if self._is_small(point)]
        if self.goal.loss is not None:
            small = [point for point in small if self._is_allowed(point)]
        # What keeps needles comes before what does not.
        return min(small, key=lambda point: (not self._is_allowed(point), point.cost), default=None)

    # Choices alone

    def _start(self, uniform: Sequence[Point]) -> Point:
        """The smallest plan for all heads that costs next to nothing."""
        free = FREE_LOSS if self.goal.loss is None else FREE * self.goal.loss
        cheap = [point for point in uniform if point.cost <= free and self._is_allowed(point)]
        return min(cheap, key=lambda point: point.bytes_per_token, default=uniform[0])

    def _alone(self) -> dict[Choice, np.ndarray]:
        """What each choice costs alone: `[sequence]`."""
        untouched = CachePlan.untouched(self.shape)
        plans = {choice: untouched.with_choices(self.shape, [choice]) for choice in self.choices}
        self.tell(f"{counted(len(plans), 'choice')}, each alone, on {self.few} sequences")
        return {
            choice: self._costs(self._changes(plan, self.few)) for choice, plan in plans.items()
        }

    def _price(
        self, plan: CachePlan, choice: Choice, alone: dict[Choice, np.ndarray]
    ) -> tuple[float, float]:
        """What a choice costs for each byte that it saves beside a plan; then what it saves."""
        saved = plan.bytes_per_token(self.shape) - plan.with_choices(
            self.shape, [choice]
        ).bytes_per_token(self.shape)
        # What lowers the loss by chance costs nothing.
        return max(0.0, float(alone[choice].mean())) / max(saved, 1e-9), -saved

    def _p_alike(self, alone: dict[Choice, np.ndarray]) -> dict[str, float]:
        """For each kind: how likely the costs of its choices differ this much if which choice has
        which cost in a sequence is chance.
        """
        kinds: dict[str, list[np.ndarray]] = {}
        for choice, costs in alone.items():
            kinds.setdefault(choice.kind, []).append(costs[: self.few])
        return {kind: p_alike(np.array(costs)) for kind, costs in kinds.items() if len(costs) > 1}

    # Choices together

    def _rounds(self, start: Point, alone: dict[Choice, np.ndarray]) -> list[Point]:
        """The plans that were measured on the way to fewer bytes."""
        costs, current, tried, failures = dict(alone), start, list[Point](), 0
        most = max(1, -(-len(alone) // ROUNDS))
        size = most
        while failures < MOST_FAILURES and not self._is_small(current):
            queue = [
                choice
                for choice in costs
                if current.plan.with_choices(self.shape, [choice]) != current.plan
            ]
            queue.sort(key=lambda choice: self._price(current.plan, choice, costs))
            next_ones = queue[: 2 * size]
            hands = [hand for hand in (next_ones[0::2], next_ones[1::2]) if hand]
            if not hands:
                break
            self.tell(
                f"{current.bytes_per_token / self.full_bytes:.0%} of the bytes at "
                f"{current.loss:+.4f}; {counted(size, 'choice')} more, in {len(hands)} ways"
            )
            points = [self._point(current.plan.with_choices(self.shape, hand)) for hand in hands]
            tried += points
            better = min(range(len(points)), key=lambda i: self._price_of(current, points[i]))
            for hand, point in zip(hands, points, strict=True):
                if point is not points[better]:
                    self._raise_costs(costs, hand, (point.cost - current.cost) / len(hand))
            if self.goal.share is None and not self._is_allowed(points[better]):
                failures += 1
                if size == 1:
                    del costs[hands[better][0]]
                size = max(1, size // 2)
                continue
            current = points[better]
        return tried

    def _price_of(self, before: Point, after: Point) -> tuple[bool, float]:
        saved = before.bytes_per_token - after.bytes_per_token
        return not self._is_allowed(after), (after.cost - before.cost) / max(saved, 1e-9)

    def _raise_costs(
        self, costs: dict[Choice, np.ndarray], hand: Sequence[Choice], least: float
    ) -> None:
        """Choices that cost more together than alone wait until others cost as much."""
        for choice in hand:
            costs[choice] = costs[choice] + max(0.0, least - float(costs[choice].mean()))

    def _stability(self, plan: CachePlan, alone: dict[Choice, np.ndarray]) -> Stability | None:
        """How far halves of the documents agree on the choices that cost least alone."""
        documents = self.trial.pieces["chooses"].documents[: self.few]
        _, of_document = np.unique(documents, return_inverse=True)
        parts = int(of_document.max()) + 1
        chosen = [choice for choice in alone if plan.with_choices(self.shape, [choice]) == plan]
        if parts < 2 or not chosen:
            return None

        def best(split: int, half: int) -> list[Choice]:
            is_in = half_of(parts, split, half)[of_document]
            means = {choice: costs[: self.few][is_in].mean() for choice, costs in alone.items()}
            return sorted(means, key=lambda choice: float(means[choice]))[: len(chosen)]

        return stability_of(best, parts)


def p_alike(costs: np.ndarray) -> float:
    """p of the spread of means of `costs [choice sequence]` over choices, among permutations of the
    choices within every sequence.

    >>> p_alike(np.zeros((4, 3))), p_alike(np.repeat([[0.0], [0.0], [0.0], [9.0]], 8, axis=1))
    (1.0, 0.001)
    """
    rng = np.random.default_rng(0)
    spread = costs.mean(1).var()
    # Of equal costs, the sums differ by their rounding.
    least = spread * (1 - 1e-9) - 1e-18
    larger = sum(rng.permuted(costs, axis=0).mean(1).var() >= least for _ in range(PERMUTATIONS))
    return (1 + int(larger)) / (1 + PERMUTATIONS)
