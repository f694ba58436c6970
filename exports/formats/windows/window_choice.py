"""Which groups of heads can get a window at the least loss: measured alone, then together.

Effects are of first order, and say little of a whole layer: of 30 layers of a model, the best by
effects were not the best. So up to 64 groups are measured each alone, first all of them on few
sequences, then the better part on all. Only of more than 64, effects choose those that are tried.

Joint effects are no sums. So the k that get a window are chosen in rounds: half of what is missing
at a time, each by the loss together with those that are chosen already.

Half of the documents rank and choose. The numbers in a file are of the others: what was chosen
because it looks good in some documents looks better there than it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headcount.exports.formats.duo import problem_of_window
from headcount.exports.shared.certainty import DocumentSums, Stability, half_of, stability_of
from headcount.exports.shared.confirmation import FEWEST_DOCUMENTS, LossChanges, documents_of
from headcount.exports.shared.registry import CacheCut, Options, Setting
from headcount.exports.shared.source import CONFIRMATION, ExportSource, column_of
from headcount.queries.open.sql_text import quoted_name
from headcount.schemas.errors import QueryError, counted
from headcount.schemas.scans.head_groups import LayerGroup, groups_text
from headcount.schemas.scans.scan_file import LONGEST_INTERVENTION

MOST_ALONE = 64  # groups that are measured alone, whatever their effects are

FEW = 4  # one in so many sequences is measured first

FEWEST_CHOOSING = 2  # documents of either half among the few sequences

MOST_SPARE = 8  # groups that a round tries beyond those that are missing


@dataclass(frozen=True, kw_only=True)
class WindowChoice:
    """Groups of heads that get a window, and what that costs in nats per token."""

    chosen: list[LayerGroup]  # in order
    groups: int  # groups in a layer
    measured: dict[LayerGroup, dict[str, object]]  # what each measured group costs alone, in order
    joint: dict[str, Any] | None = None
    """What all chosen groups cost together, and the sum of what each costs; None as long as they
    are chosen by estimates alone.
    """
    stability: Stability | None = None
    run_ids: Sequence[str] = ()  # the runs that measured it

    @property
    def facts(self) -> dict[str, object]:
        """What is the same in every file."""
        return {
            "joint": self.joint,
            "stability": self.stability and self.stability.facts,
            "confirmation": [*self.run_ids],
        }

    def note(self, words: str) -> str:
        """What it costs. `words` say what gets a window."""
        joint = self.joint
        if joint is None:
            return f"{words}, by estimates that nothing has confirmed yet"
        return (
            f"{words} changes the loss by {joint['delta_nll']:+.4g} ± "
            f"{joint['standard_error']:.2g} nats per token; one by one, they add up to "
            f"{joint['sum_of_singles']:+.4g} (over {joint['documents']:,} other documents)"
        )

    def cut(self, source: ExportSource, sink: int, window: int) -> CacheCut:
        """The cache of a model with these windows."""
        n_layers, n_kv_heads = source.kv_shape
        heads = [
            (layer, head)
            for layer in range(n_layers)
            for head in range(n_kv_heads)
            if (layer, head * self.groups // n_kv_heads) not in self.chosen
        ]
        return CacheCut(heads=heads, sink=sink, recent=window)


def problem_of_windows(setting: Setting, options: Options, groups: int, flag: str) -> str | None:
    """Why no groups of heads could be chosen, of which a layer has so many. None if they could."""
    sink, window = options["sink"], options["window"]
    if (problem := problem_of_window(setting.n_ctx, sink, window, "--window")) is not None:
        return problem
    documents = options["sequences"]
    if setting.sequences is not None:
        documents = min(documents, setting.sequences)
    if documents < FEWEST_DOCUMENTS:
        return (
            f"{counted(documents, 'sequence')} measured: expected {FEWEST_DOCUMENTS} documents or "
            "more, so that half of them choose and the others report; raise --sequences, or "
            "measure more"
        )
    candidates = groups * len(setting.attention_layers)
    count = options[flag.strip("-")] or max(1, candidates // 2)
    if count > candidates:
        return (
            f"{flag} {count}: expected 1 to {candidates}, as many as {Path(setting.model).name} has"
        )
    # In as few layers as hold all that are tried.
    layers = -(-min(number_tried(count), candidates) // groups)
    text = _intervention(sink, window, groups, [(layer, groups - 1) for layer in range(layers)])
    if len(text) > LONGEST_INTERVENTION:
        return _problem_of_length(flag, count, text)
    return None


def number_tried(count: int) -> int:
    """How many candidates are measured, if there are as many, so that so many are chosen."""
    return max(MOST_ALONE, 2 * count)


def _intervention(sink: int, window: int, groups: int, members: Sequence[LayerGroup]) -> str:
    return f"stream_groups({sink},{window},{groups},{groups_text(groups, members)})"


def _problem_of_length(flag: str, count: int, text: str) -> str:
    return (
        f"{flag} {count}: an intervention on that many takes {len(text)} characters, expected at "
        f"most {LONGEST_INTERVENTION}; ask for fewer"
    )


def choose_windows(
    source: ExportSource,
    groups: int,
    count: int | None,
    *,
    sink: int,
    window: int,
    sequences: int,
    flag: str,
) -> WindowChoice:
    """Choose `count` groups of heads, by default half of them, which see the first `sink` keys and
    the last `window` from now on. A layer has so many `groups`. What is not measured yet is.

    `flag` is the option that says how many.
    """
    documents = documents_of(source, sequences)
    found = estimates_of(source, groups, f"effect_window({sink},{window})", len(documents))
    candidates, estimates = [*found], np.array([*found.values()])
    count = max(1, len(candidates) // 2) if count is None else count
    if not 1 <= count <= len(candidates):
        raise QueryError(
            f"export {source.format.name}: {flag} {count}: expected 1 to {len(candidates)}, as "
            f"many as run {source.run_id} has"
        )

    def text_of(chosen: Sequence[int]) -> str:
        text = _intervention(sink, window, groups, [candidates[index] for index in chosen])
        if len(text) > LONGEST_INTERVENTION:
            problem = _problem_of_length(flag, count, text)
            raise QueryError(f"export {source.format.name}: {problem}")
        return text

    chooses = half_of(int(documents.max()) + 1, 0, 0)[documents]
    by_estimate = np.argsort(estimates[:, chooses].mean(1), kind="stable").tolist()
    tried = sorted(by_estimate[: number_tried(count)])
    text_of(tried[-count:])  # Before anything is paid for.
    estimate_of = estimates[:, ~chooses].mean(1)
    if source.awaits is not None and CONFIRMATION in source.awaits:
        chosen, costs, measured_facts = by_estimate[:count], {}, {}
    else:
        trial = _Trial(source, tried, count, documents, chooses, text_of)
        chosen, costs, measured_facts = trial.chosen, trial.costs(), trial.facts
    rows = {
        candidates[index]: {
            "estimate": float(estimate_of[index]),
            **costs.get(index, {}),
            "chosen": index in chosen,
        }
        for index in tried
    }
    members = [candidates[index] for index in sorted(chosen)]
    return WindowChoice(chosen=members, groups=groups, measured=rows, **measured_facts)


class _Trial:
    """The losses of candidates alone and together, and what is chosen by them."""

    def __init__(
        self,
        source: ExportSource,
        tried: Sequence[int],
        count: int,
        documents: np.ndarray,
        chooses: np.ndarray,
        text_of: Callable[[Sequence[int]], str],
    ) -> None:
        """Measure it: `documents` of all sequences, and which sequences choose."""
        self.documents, self.chooses, self.text_of = documents, chooses, text_of
        self.tried, self.count = tried, count
        plan = plan_of_choice(len(tried), count, documents, chooses)
        self.losses = LossChanges(source, plan.parts, plan.passes)
        self.alone: dict[int, np.ndarray] = {}
        """How the loss of each sequence changes by each alone: of few sequences, or of all."""
        self.together: dict[frozenset[int], np.ndarray] = {}  # the same by several
        kept = tried
        if plan.few is not None:
            costs = self._alone(tried, plan.few)
            kept = least_costly(tried, costs, plan.kept)
        costs = self._alone(sorted(kept), len(documents))
        self.ranking = least_costly(sorted(kept), costs, len(kept))
        self.chosen = grown(self.ranking, count, self._costs_together)
        if count > 1 and frozenset(self.chosen) not in self.together:
            self._costs_together([self.chosen])

    def _alone(self, members: Sequence[int], sequences: int) -> np.ndarray:
        """What each costs alone where documents choose: `[member]`."""
        words = f"{len(members)} candidates, each alone, on {counted(sequences, 'sequence')}"
        texts = [self.text_of([index]) for index in members]
        changes = self.losses.under(texts, sequences, words)
        self.alone |= dict(zip(members, changes, strict=True))
        return changes[:, self.chooses[:sequences]].mean(1)

    def _costs_together(self, sets: Sequence[Sequence[int]]) -> np.ndarray:
        """What each set costs where documents choose: `[set]`."""
        sequences, number = len(self.documents), len(sets[0])
        words = f"{counted(number, 'candidate')} of {self.count} together, in {len(sets)} ways"
        texts = [self.text_of(sorted(members)) for members in sets]
        changes = self.losses.under(texts, sequences, words)
        self.together |= dict(zip(map(frozenset, sets), changes, strict=True))
        return changes[:, self.chooses].mean(1)

    def costs(self) -> dict[int, dict[str, object]]:
        """What each candidate costs alone in the documents that report."""
        return {index: self._reported(changes) for index, changes in self.alone.items()}

    def _reported(self, changes: np.ndarray) -> dict[str, object]:
        reports = ~self.chooses[: len(changes)]
        return cost(changes[reports], self.documents[: len(changes)][reports])

    @property
    def facts(self) -> dict[str, Any]:
        """What it says of the choice."""
        alone = np.array([self.alone[index] for index in self.chosen])
        together = alone[0] if self.count == 1 else self.together[frozenset(self.chosen)]
        halves = int(self.documents.max()) + 1

        def best_in(split: int, half: int) -> list[int]:
            is_in = half_of(halves, split, half)[self.documents]
            costs = np.array([self.alone[index][is_in].mean() for index in self.ranking])
            return least_costly(self.ranking, costs, self.count)

        of_singles = float(alone[:, ~self.chooses].mean(1).sum())
        return {
            "joint": self._reported(together) | {"sum_of_singles": of_singles},
            "stability": stability_of(best_in, halves),
            "run_ids": self.losses.run_ids,
        }


class ChoicePlan(NamedTuple):
    """How a choice is measured."""

    few: int | None  # sequences on which all are measured first; None: on all sequences at once
    kept: int  # candidates that are measured on all sequences
    parts: int  # scans of losses
    passes: int  # at most, those of the untouched model among them


def plan_of_choice(
    tried: int, count: int, documents: np.ndarray, chooses: np.ndarray
) -> ChoicePlan:
    """How to choose so many of the candidates; `documents [sequence]`, and which of them choose."""
    few, kept, sequences = None, max(-(-tried // 2), -(-3 * count // 2)), len(documents)
    for stop in range(-(-sequences // FEW), sequences // 2 + 1):
        in_few, choosing = documents[:stop], chooses[:stop]
        halves = (np.unique(in_few[choosing]), np.unique(in_few[~choosing]))
        if min(map(len, halves)) >= FEWEST_CHOOSING:
            few = stop
            break
    # If most of them are kept, measuring them twice costs more than it saves.
    if few is None or few * tried + sequences * kept >= sequences * tried:
        few, kept = None, tried
    sets = pools(kept, count)
    # The untouched model is measured in every part.
    passes = sequences * (1 + kept) + sum(sequences * (1 + size) for size in sets)
    passes += 0 if few is None else few * (1 + tried)
    return ChoicePlan(few, kept, (few is not None) + 1 + len(sets), passes)


def pools(kept: int, count: int) -> list[int]:
    """How many sets each round after the first measures: that one takes the best alone.

    >>> pools(30, 5), pools(30, 1), pools(5, 5)
    ([4, 3], [], [1])
    """
    sizes: list[int] = []
    chosen = first_part(count)
    while chosen < count < kept:
        missing = count - chosen
        sizes.append(min(kept - chosen, missing + spare(missing)))
        chosen += first_part(missing)
    # Without a question, all are measured together.
    return sizes if chosen == count else [1]


def first_part(missing: int) -> int:
    """How many of the missing a round takes."""
    return -(-missing // 2)


def spare(missing: int) -> int:
    """How many candidates a round tries beyond the missing ones."""
    return min(max(missing, 2), MOST_SPARE)


def grown(
    ranking: Sequence[int], count: int, costs_of: Callable[[Sequence[Sequence[int]]], np.ndarray]
) -> list[int]:
    """`count` of the ranked candidates: the first half is the best alone, the others are those that
    cost least together with what is chosen already. `costs_of` measures sets.
    """
    chosen = list(ranking[: first_part(count)])
    others = list(ranking[len(chosen) :])
    while len(chosen) < count:
        missing = count - len(chosen)
        if len(others) == missing:
            return [*chosen, *others]
        pool = others[: missing + spare(missing)]
        costs = costs_of([[*chosen, index] for index in pool])
        best_first = [pool[place] for place in np.argsort(costs, kind="stable")]
        chosen += best_first[: first_part(missing)]
        others = [*best_first[first_part(missing) :], *others[len(pool) :]]
    return chosen


def least_costly(candidates: Sequence[int], costs: np.ndarray, count: int) -> list[int]:
    """The `count` candidates with the least costs `[candidate]`, the best first."""
    return [candidates[place] for place in np.argsort(costs, kind="stable")[:count]]


def estimates_of(
    source: ExportSource, groups: int, statistic: str, sequences: int
) -> dict[LayerGroup, list[float]]:
    """The sum of an effect over the heads of each group, for each of the first sequences."""
    column = quoted_name(column_of(statistic))
    rows = source.database.rows(
        f"""
        SELECT layer, head * {groups} // {source.run["n_heads"]} AS part, sum({column}::DOUBLE)
        FROM heads
        WHERE {source.condition} AND sequence < {sequences}
        GROUP BY layer, part, sequence
        ORDER BY layer, part, sequence"""
    )
    estimates: dict[LayerGroup, list[float]] = {}
    for layer, group, estimate in rows:
        if estimate is None:
            raise QueryError(
                f"run {source.run_id}: {column_of(statistic)} of layer {layer} has no value in one "
                "of its sequences; expected sequences longer than sink + window"
            )
        estimates.setdefault((layer, group), []).append(estimate)
    least = min(map(len, estimates.values()), default=0)
    if least < sequences:
        raise QueryError(
            f"run {source.run_id}: {least} of its first {counted(sequences, 'sequence')} have rows "
            f"of every head; headcount resume {source.opened.directory.path} --verify measures the "
            "others anew"
        )
    return estimates


def cost(changes: np.ndarray, documents: np.ndarray) -> dict[str, object]:
    """The mean of changes of the loss `[sequence]`, and its standard error over documents."""
    _, of_document = np.unique(documents, return_inverse=True)
    # One layer of one head.
    totals = np.bincount(of_document, changes)[:, None, None]
    sums = DocumentSums(totals, np.bincount(of_document))
    return {
        "delta_nll": sums.means.item(),
        "standard_error": sums.errors.item(),
        "documents": sums.documents,
    }
