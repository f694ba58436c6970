"""Which plan saves most at a loss: choices alone, then together in rounds, always measured.

What a plan costs is how far predictions move from those of the whole cache. Plans that treat all
heads alike come first. Beside one of them that costs next to nothing, each choice is tried alone,
which says how choices of a kind share what they cost all together. A window of one head costs
nothing alone, because others do the same: heads are cut all together and opened in rounds, and a
window costs what is gained where its head is opened.

A sum of what single choices cost is no result: here it only says what is tried next. Each round
takes the next choices, deals them into two hands, measures each hand together with what is chosen,
and keeps the hand that costs less for each byte that it saves. The other one goes back, at the cost
that was measured, and so do both if the next choices seem to cost less. If a round costs more than
is allowed, fewer are tried.

Where choices of a kind cost all the same within their errors, nothing can be chosen: then only the
plans that treat all heads alike are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from headcount.exports.cache_plan.engines import CacheEngine
from headcount.exports.cache_plan.plans import CachePlan, CacheShape, Choice, KVHead
from headcount.exports.shared.certainty import Stability, half_of, stability_of
from headcount.schemas.errors import counted
from headcount.workers.cache_trial import CacheTrial, Measured
from headcount.workers.head_gates import ROUNDS as ROUNDS_OF_OPENING
from headcount.workers.head_gates import Round

FEW = 4  # of many choices, each is measured alone on one in so many sequences
MANY = 32  # choices from which on that is done

PASSES_OF_A_ROUND = 4  # as long as a round of opening heads takes, forward and backward

ROUNDS = 16  # about as many rounds lead through all choices

SURE = 0.05  # p from which down choices of a kind are not alike
PERMUTATIONS = 999

LEAST_RECALL = 0.95
"""Of the whole cache's, that --task recall keeps. A plan is left out whose recall is lower by more
than its standard error: of a few needles, one more or less is chance.
"""

NEEDLE_WEIGHT = 0.2
"""What a nat at an answer counts beside one at each token of a text: an answer is found as before
until its predictions have moved some tenths of a nat, which would be much for a text.
"""

FREE = 0.1
"""The share that a uniform plan to begin with may cost of the loss that is allowed, or else of the
best uniform plan that is small enough.
"""

NOTHING = 0.001  # nats that predictions move by, below which a plan for all heads is good enough

MOST_FAILURES = 8  # rounds that cost too much, until the search ends
MOST_WAITS = 8  # rounds that cost more than the next ones seem to, after which none waits


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
    cost: float  # how far predictions of text, with --task recall also of answers, have moved
    recall: float
    finds_needles: bool  # whether that is no less than is allowed, within its standard error


@dataclass
class Found:
    """What a search has found."""

    chosen: Point | None  # None: nothing that was tried does what is asked for
    tried: list[Point]  # all that were measured together
    alone: dict[Choice, np.ndarray]  # what each choice costs by itself: `[sequence]`
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
        self.trial, self.engine, self.shape = trial, engine, shape
        self.goal, self.tell = goal, tell
        self.sequences = len(trial.pieces["chooses"].tokens)
        self.choices = engine.choices(shape)
        self.full_bytes = CachePlan.untouched(shape).bytes_per_token(shape)
        self.uniform = self._uniform_plans()
        self.few = self.sequences
        if len(self.choices) > MANY:
            self.few = max(2, -(-self.sequences // FEW))

    def _uniform_plans(self) -> list[CachePlan]:
        """The plans that treat all heads alike, but those that only take more from one that is
        small enough.
        """
        plans = self.engine.uniform(self.shape)
        small = [plan for plan in plans if self._is_small(plan.bytes_per_token(self.shape))]
        return [
            plan
            for plan in plans
            if not any(plan != each and plan.keeps_part_of(each, self.shape) for each in small)
        ]

    @property
    def _needle_weight(self) -> float:
        return NEEDLE_WEIGHT if self.goal.recall else 0.0

    @property
    def passes(self) -> int:
        """How many sequences go through the model where documents choose, at most."""
        whole, opened = 2, 0
        if self._head_windows:
            opened = PASSES_OF_A_ROUND * (1 + ROUNDS_OF_OPENING)
        if self.choices:
            whole += 2 * (ROUNDS + MOST_FAILURES + MOST_WAITS)
        few = len(self.uniform) + len(self.choices) - len(self._head_windows)
        whole += len(of_kinds(self.choices))
        return self.sequences * (whole + opened + len(self.uniform)) + self.few * few

    def run(self) -> Found:
        """Search; what is known already is not measured again."""
        self.tell("the whole cache")
        untouched = self._point(CachePlan.untouched(self.shape))
        tried = [untouched, *self._uniform_points()]
        best = self._best(tried)
        is_enough = self.goal.share is not None and best is not None and best.cost <= NOTHING
        if not self.choices or is_enough:
            return Found(best, tried, {}, {}, None)
        start = self._start(tried)
        alone = self._alone(start.plan) | self._opened()
        found = Found(None, tried, alone, self._p_alike(alone), None)
        if found.can_choose:
            tried += self._rounds(start, self._costs_in_all(start, alone))
        found.chosen = self._best(tried)
        if found.chosen is not None and found.can_choose:
            found.stability = self._stability(found.chosen.plan, alone)
        return found

    # Measurements

    def _changes(self, plan: CachePlan, count: int | None = None) -> Measured:
        """Changes of the losses of each sequence, and the recall."""
        full = self.trial.measure("chooses", "none", count)
        changed = self.trial.measure("chooses", plan.intervention(self.shape), count)
        return changed._replace(text=changed.text - full.text, needle=changed.needle - full.needle)

    def _costs(self, changes: Measured) -> np.ndarray:
        """What it costs in each sequence: `[sequence]`."""
        return changes.text_moved + self._needle_weight * changes.needle_moved

    def _point(self, plan: CachePlan) -> Point:
        changes = self._changes(plan)
        whole = self.trial.measure("chooses", "none")
        return Point(
            plan,
            plan.bytes_per_token(self.shape),
            float(changes.text.mean()),
            float(self._costs(changes).mean()),
            float(changes.recall.mean()),
            finds_needles(changes.recall, whole.recall),
        )

    def _is_allowed(self, point: Point) -> bool:
        if self.goal.loss is not None and point.loss > self.goal.loss:
            return False
        return not self.goal.recall or point.finds_needles

    def _is_small(self, bytes_per_token: float) -> bool:
        share = self.goal.share
        return share is not None and bytes_per_token <= share * self.full_bytes

    def _best(self, tried: Sequence[Point]) -> Point | None:
        """The least costly of those that are small enough; or the smallest that is allowed."""
        allowed = [point for point in tried if self._is_allowed(point)]
        if self.goal.share is None:
            return min(allowed, key=lambda point: (point.bytes_per_token, point.cost), default=None)
        small = [point for point in tried if self._is_small(point.bytes_per_token)]
        if self.goal.loss is not None:
            small = [point for point in small if self._is_allowed(point)]
        # What keeps needles comes before what does not.
        return min(small, key=lambda point: (not self._is_allowed(point), point.cost), default=None)

    # Choices by themselves

    def _uniform_points(self) -> list[Point]:
        """Plans that treat all heads alike: on few sequences, and those worth it on all."""
        self.tell(f"all heads alike, in {counted(len(self.uniform), 'way')}")
        costs = [self._costs(self._changes(plan, self.few)).mean() for plan in self.uniform]
        sizes = [plan.bytes_per_token(self.shape) for plan in self.uniform]
        return [self._point(self.uniform[index]) for index in not_undercut(sizes, costs)]

    def _start(self, uniform: Sequence[Point]) -> Point:
        """The smallest plan for all heads that costs next to nothing."""
        if self.goal.loss is not None:
            most = self.goal.loss
        else:
            most = min(
                (point.cost for point in uniform if self._is_small(point.bytes_per_token)),
                default=0.0,
            )
        cheap = [
            point
            for point in uniform
            if point.cost <= FREE * most
            and self._is_allowed(point)
            and not self._is_small(point.bytes_per_token)
        ]
        return min(cheap, key=lambda point: point.bytes_per_token, default=uniform[0])

    def _open_choices(self, plan: CachePlan) -> list[Choice]:
        """The choices that would change a plan."""
        return [each for each in self.choices if plan.with_choices(self.shape, [each]) != plan]

    def _alone(self, start: CachePlan) -> dict[Choice, np.ndarray]:
        """What each choice costs beside a plan, but for windows of single heads: `[sequence]`."""
        choices = [each for each in self._open_choices(start) if each not in self._head_windows]
        if not choices:
            return {}
        self.tell(f"{counted(len(choices), 'choice')}, each alone, on {self.few} sequences")
        before = self._costs(self._changes(start, self.few))
        return {
            choice: self._costs(self._changes(start.with_choices(self.shape, [choice]), self.few))
            - before
            for choice in choices
        }

    @cached_property
    def _head_windows(self) -> dict[Choice, KVHead]:
        """The choices of a window for a single KV head, if the engine has these."""
        units = {each.unit for each in self.engine.alternatives if each.window}
        if units != {"KV head"}:
            return {}
        return {choice: choice.heads[0] for choice in self.choices if choice.window}

    def _opened(self) -> dict[Choice, np.ndarray]:
        """What windows of single heads cost where all heads are cut and opened in rounds:
        `[sequence]`. That heads are all alike is seen here, also where windows cost nothing.
        """
        if not self._head_windows:
            return {}
        self.tell(f"{counted(len(self.shape.kv_heads), 'KV head')} cut, and opened in rounds")
        rounds = self.trial.rounds(self.shape.sink, self.shape.recent, self._needle_weight)
        costs = window_costs(rounds, self.shape.kv_heads)
        return {choice: costs[head] for choice, head in self._head_windows.items()}

    def _costs_in_all(
        self, start: Point, alone: Mapping[Choice, np.ndarray]
    ) -> dict[Choice, float]:
        """What each choice costs if those of a kind add up to what they cost all together. Windows
        of single heads do so from the beginning.
        """
        costs: dict[Choice, float] = {}
        for choices in of_kinds(alone).values():
            measured = np.array([alone[choice] for choice in choices])
            if choices[0] in self._head_windows:
                of_choices = measured.mean(1)
            else:
                plan = start.plan.with_choices(self.shape, choices)
                of_choices = shares(measured) * max(0.0, self._point(plan).cost - start.cost)
            costs |= zip(choices, of_choices.tolist(), strict=True)
        return costs

    def _price(
        self, plan: CachePlan, choice: Choice, costs: Mapping[Choice, float]
    ) -> tuple[float, float]:
        """What a choice costs for each byte that it saves beside a plan; then what it saves."""
        saved = self._saved(plan, choice)
        return costs[choice] / max(saved, 1e-9), -saved

    def _saved(self, plan: CachePlan, choice: Choice) -> float:
        """Bytes per token that a choice saves beside a plan."""
        smaller = plan.with_choices(self.shape, [choice])
        return plan.bytes_per_token(self.shape) - smaller.bytes_per_token(self.shape)

    def _p_alike(self, alone: Mapping[Choice, np.ndarray]) -> dict[str, float]:
        """For each kind: how likely the costs of its choices differ this much if which choice has
        which cost in a sequence is chance.
        """
        return {
            kind: p_alike(np.array([alone[choice] for choice in choices]))
            for kind, choices in of_kinds(alone).items()
            if len(choices) > 1
        }

    # Choices together

    def _rounds(self, start: Point, costs: dict[Choice, float]) -> list[Point]:
        """The plans that were measured on the way to fewer bytes."""
        current, tried, failures, waited = start, list[Point](), 0, 0
        size = max(1, -(-len(costs) // ROUNDS))
        while failures < MOST_FAILURES and not self._is_small(current.bytes_per_token):
            queue = [each for each in self._open_choices(current.plan) if each in costs]
            queue.sort(key=lambda choice: self._price(current.plan, choice, costs))
            next_ones = queue[: 2 * size]
            hands = [
                self._cut_to_size(current.plan, hand)
                for hand in (next_ones[0::2], next_ones[1::2])
                if hand
            ]
            if not hands:
                break
            self.tell(
                f"{current.bytes_per_token / self.full_bytes:.0%} of the bytes at "
                f"{current.loss:+.4f}; {counted(size, 'choice')} more, in {len(hands)} ways"
            )
            points = [self._point(current.plan.with_choices(self.shape, hand)) for hand in hands]
            tried += points
            better = min(range(len(points)), key=lambda i: self._price_of(current, points[i]))
            _, price = self._price_of(current, points[better])
            others = [self._price(current.plan, each, costs)[0] for each in queue[2 * size :]]
            waits = waited < MOST_WAITS and price > min(others, default=math.inf)
            for hand, point in zip(hands, points, strict=True):
                if waits or point is not points[better]:
                    self._raise_costs(costs, current, hand, point)
            if self.goal.share is None and not self._is_allowed(points[better]):
                failures += 1
                if size == 1:
                    del costs[hands[better][0]]
                size = max(1, size // 2)
                continue
            if waits:
                waited += 1
                continue
            current = points[better]
        return tried

    def _cut_to_size(self, plan: CachePlan, hand: Sequence[Choice]) -> Sequence[Choice]:
        """As many of the choices as make a plan small enough."""
        if self.goal.share is None:
            return hand
        most = self.goal.share * self.full_bytes
        for count in range(1, len(hand)):
            if plan.with_choices(self.shape, hand[:count]).bytes_per_token(self.shape) <= most:
                return hand[:count]
        return hand

    def _price_of(self, before: Point, after: Point) -> tuple[bool, float]:
        saved = before.bytes_per_token - after.bytes_per_token
        return not self._is_allowed(after), (after.cost - before.cost) / max(saved, 1e-9)

    def _raise_costs(
        self, costs: dict[Choice, float], before: Point, hand: Sequence[Choice], after: Point
    ) -> None:
        """Choices that cost more together than they seemed to wait until others cost as much."""
        _, price = self._price_of(before, after)
        for choice in hand:
            costs[choice] = max(costs[choice], price * self._saved(before.plan, choice))

    def _stability(self, plan: CachePlan, alone: dict[Choice, np.ndarray]) -> Stability | None:
        """How far halves of the documents agree on the choices that cost least by themselves, of
        those that were tried on most sequences.
        """
        if not alone:
            return None
        most = max(map(len, alone.values()))
        costs = {choice: each for choice, each in alone.items() if len(each) == most}
        documents = self.trial.pieces["chooses"].documents[:most]
        _, of_document = np.unique(documents, return_inverse=True)
        parts = int(of_document.max()) + 1
        chosen = [choice for choice in costs if plan.with_choices(self.shape, [choice]) == plan]
        if parts < 2 or not chosen:
            return None

        def best(split: int, half: int) -> list[Choice]:
            is_in = half_of(parts, split, half)[of_document]
            means = {choice: each[is_in].mean() for choice, each in costs.items()}
            return sorted(means, key=lambda choice: float(means[choice]))[: len(chosen)]

        return stability_of(best, parts)


def window_costs(rounds: Sequence[Round], heads: Sequence[KVHead]) -> dict[KVHead, np.ndarray]:
    """What a window of each head costs in each sequence, `[sequence]`: what was gained in the round
    that opened the head, shared by the gains. Heads that stayed cut share what is still lost.
    """
    costs: dict[KVHead, np.ndarray] = {}

    def share(asked: Round, members: Sequence[KVHead], fall: float) -> None:
        total = sum(max(0.0, float(asked.of_all[head])) for head in members)
        for layer, head in members:
            gains = asked.gains[:, layer, head]
            is_gain = gains.sum() > 0 and fall > 0
            costs[layer, head] = gains * len(gains) * (fall / total) if is_gain else 0 * gains

    for before, after in pairwise(rounds):
        share(before, after.opened[len(before.opened) :], before.loss - after.loss)
    share(rounds[-1], [head for head in heads if head not in costs], rounds[-1].loss)
    return costs


def finds_needles(recall: np.ndarray, whole: np.ndarray) -> bool:
    """Whether the recall in some sequences is no less than is allowed of the whole cache's, within
    its standard error.

    >>> finds_needles(np.array([1, 0, 1, 1]), np.ones(4))
    True
    >>> finds_needles(np.array([0, 0, 1, 0]), np.ones(4))
    False
    """
    lost = LEAST_RECALL * whole - recall
    return bool(lost.mean() <= lost.std(ddof=1) / np.sqrt(len(lost)))


def of_kinds(choices: Iterable[Choice]) -> dict[str, list[Choice]]:
    """Choices by their kind."""
    kinds: dict[str, list[Choice]] = {}
    for choice in choices:
        kinds.setdefault(choice.kind, []).append(choice)
    return kinds


def shares(costs: np.ndarray) -> np.ndarray:
    """The part of each choice in what choices cost together, `[choice]`, by what they cost in some
    sequences `[choice sequence]`. As far as these costs differ by chance, all parts are equal:
    their differences are those of the means times 1 - (variance of a mean) / (variance of means).

    >>> shares(np.array([[1.0, 1.0], [3.0, 3.0]])), shares(np.array([[1.0, 3.0], [3.0, 1.0]]))
    (array([0.25, 0.75]), array([0.5, 0.5]))
    """
    means = costs.mean(1)
    # What neither the choice nor the sequence explains.
    rest = costs - means[:, None] - costs.mean(0) + costs.mean()
    freedom = max(1, (len(costs) - 1) * (costs.shape[1] - 1))
    chance = (rest**2).sum() / freedom / costs.shape[1]
    spread = means.var(ddof=1) if len(means) > 1 else 0.0
    sure = max(0.0, 1 - chance / spread) if spread > 0 else 0.0
    # What lowers the loss by chance costs nothing.
    of_choices = np.maximum(0.0, means.mean() + sure * (means - means.mean()))
    total = of_choices.sum()
    return of_choices / total if total > 0 else np.full(len(means), 1 / len(means))


def not_undercut(sizes: Sequence[float], costs: Sequence[float]) -> list[int]:
    """Which of some plans no other undercuts in both, the smallest first.

    >>> not_undercut([3, 1, 2, 4], [5, 9, 9, 0])
    [1, 0, 3]
    """
    best: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (sizes[i], costs[i])):
        if not best or costs[index] < costs[best[-1]]:
            best.append(index)
    return best


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
