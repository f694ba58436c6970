"""Which groups of heads can get a window at the least loss: ranked by effects, then measured.

Effects of single heads add up, so the estimate of a group is their sum. The best 2k groups are
measured one by one, and the k that cost least are chosen. Then all of these are measured together,
because joint effects are no sums.

Half of the documents rank and choose. The numbers in a file are of the others: what was chosen
because it looks good in some documents looks better there than it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headcount.exports.formats.duo import problem_of_window
from headcount.exports.shared.certainty import DocumentSums, Stability, half_of, stability_of
from headcount.exports.shared.confirmation import FEWEST_DOCUMENTS, changes_of_loss, documents_of
from headcount.exports.shared.registry import CacheCut, Options, Setting
from headcount.exports.shared.source import CONFIRMATION, ExportSource, column_of
from headcount.queries.open.sql_text import quoted_name
from headcount.schemas.errors import QueryError, counted
from headcount.schemas.scans.head_groups import LayerGroup, groups_text
from headcount.schemas.scans.scan import LONGEST_INTERVENTION


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
    # Twice as many are candidates, in as few layers as hold them.
    layers = -(-min(2 * count, candidates) // groups)
    text = _intervention(sink, window, groups, [(layer, groups - 1) for layer in range(layers)])
    if len(text) > LONGEST_INTERVENTION:
        return _problem_of_length(flag, count, text)
    return None


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

    parts = int(documents.max()) + 1
    chooses = half_of(parts, 0, 0)[documents]
    by_estimate = best_by_estimate(estimates[:, chooses], count)
    tried = sorted(by_estimate)
    text_of(tried)  # Before anything is paid for.
    reports = ~chooses
    if source.awaits is not None and CONFIRMATION in source.awaits:
        chosen = sorted(by_estimate[:count])
        return WindowChoice(
            chosen=[candidates[index] for index in chosen],
            groups=groups,
            measured={
                candidates[index]: {
                    "estimate": float(estimates[index, reports].mean()),
                    "chosen": index in chosen,
                }
                for index in tried
            },
        )
    changes = np.full(estimates.shape, np.nan)
    changes[tried], first_run = changes_of_loss(
        source,
        [text_of([index]) for index in tried],
        len(documents),
        f"{len(tried)} candidates, one by one",
    )
    chosen = least_costly(estimates[:, chooses], changes[:, chooses], count)
    (together,), second_run = changes_of_loss(
        source, [text_of(chosen)], len(documents), f"the {len(chosen)} that are chosen, together"
    )
    measured = {
        candidates[index]: {
            "estimate": float(estimates[index, reports].mean()),
            **cost(changes[index, reports], documents[reports]),
            "chosen": index in chosen,
        }
        for index in tried
    }
    of_singles = float(changes[chosen][:, reports].mean(1).sum())

    def found_in(split: int, half: int) -> list[int]:
        is_in = half_of(parts, split, half)[documents]
        return least_costly(estimates[:, is_in], changes[:, is_in], count)

    return WindowChoice(
        chosen=[candidates[index] for index in chosen],
        groups=groups,
        measured=measured,
        joint=cost(together[reports], documents[reports]) | {"sum_of_singles": of_singles},
        stability=stability_of(found_in, parts),
        run_ids=[first_run, second_run],
    )


def best_by_estimate(estimates: np.ndarray, count: int) -> list[int]:
    """The 2 `count` candidates with the least mean estimates `[candidate sequence]`, best first."""
    return np.argsort(estimates.mean(1), kind="stable")[: 2 * count].tolist()


def least_costly(estimates: np.ndarray, changes: np.ndarray, count: int) -> list[int]:
    """The `count` candidates, in order, with the least mean changes of the loss among those that
    are best by estimate: `[candidate sequence]` both.

    A candidate that was not measured is NaN and cannot be chosen.
    """
    costs = changes.mean(1)
    known = [index for index in best_by_estimate(estimates, count) if not np.isnan(costs[index])]
    return sorted(sorted(known, key=costs.__getitem__)[:count])


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
