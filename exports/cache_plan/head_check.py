"""Whether the chosen KV heads are the ones that need a whole cache: a plan that a list asks for.

The chosen heads keep their whole cache, all others the first keys and the last ones. As many random
heads are kept whole for comparison. What that costs is measured as for any plan: if a list leaves
the number of heads open, half of the documents choose it, and the others report.

A cut costs the rise of the loss of the text and, if the model finds answers with its whole cache, a
part of the rise at these; a fall of one makes up for no rise of the other. The cost is judged by
that of no head whole: what whole heads are worth. How far predictions move, by which plans are
chosen, would be stricter: they also move where nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from headcount.exports.cache_plan.planning import reported, shape_of, words_of_costs
from headcount.exports.cache_plan.plans import CachePlan, Choice, KVHead
from headcount.exports.cache_plan.search import NEEDLE_WEIGHT
from headcount.exports.shared.certainty import cost
from headcount.exports.shared.confirmation import (
    LEAST_RECALL,
    TOLERANCE,
    shown_and_kept,
    tell_passes,
)
from headcount.exports.shared.registry import CacheCut, sparsity_of
from headcount.schemas.errors import ScanError, counted
from headcount.workers.cache_trial import CacheTrial, Half

SEARCHED_TOLERANCE = TOLERANCE / 2
"""The same while a number of heads is looked for: on other documents it may be a little worse."""

MOST_STEPS = 32  # numbers of heads that are tried at most

RANDOM_SEEDS = (0, 1, 2)  # of the random heads that the chosen ones are compared with


class HeadCheck:
    """A model whose named KV heads keep their whole cache; others the first and last keys."""

    def __init__(self, trial: CacheTrial, sink: int, recent: int) -> None:
        """The model is loaded, to know its windows."""
        self.trial = trial
        self.shape = shape_of(trial, sink, recent)

    def made(
        self, cut: CacheCut, begin: Callable[[str], None], save: Callable[[Mapping[str, Any]], None]
    ) -> dict[str, Any]:
        """What the model loses with a cache that is cut so.

        If the number of heads is open, it is the smallest one with which nothing is lost. `save`
        takes what is known so far, now and then and at an interrupt.
        """
        trial, heads = self.trial, cut.heads
        facts = trial.identity
        passes = self._passes(len(heads) if cut.is_ranking else 0)
        tell_passes(trial, passes, "check: ")
        with shown_and_kept(
            "check", "check: ", passes, lambda: save({**facts, "answers": trial.known})
        ) as trial.passed:
            if cut.is_ranking:
                begin("how many heads lose nothing")
                facts["heads_that_lose_nothing"] = kept = self.fewest(heads)
                heads = heads[:kept]
            begin("the chosen heads against random ones, on other documents")
            # A layer that does not attend has scores, but no cache.
            rows = self.table([head for head in heads if head in self.shape.kv_heads])
        return facts | {"table": rows, "verdict": verdict(rows)}

    def _passes(self, numbers: int) -> int:
        """How many passes there are at most, with so many numbers of heads to try."""
        # The whole cache is read twice: for its loss, and for what it predicts.
        searched = 3 + min(numbers, MOST_STEPS) if numbers else 0
        chooses, reports = (len(half.tokens) for half in self.trial.pieces.values())
        # The table is of all heads, the chosen ones, random ones and none.
        return searched * chooses + (3 + len(RANDOM_SEEDS)) * reports

    def fewest(self, ranked_heads: Sequence[KVHead]) -> int:
        """How many ranked heads lose nothing, the fewest of at most `MOST_STEPS` numbers."""
        most = SEARCHED_TOLERANCE * self._cost("chooses", ())[0]
        # Not by halving: more heads may lose more, as L2H3 of gpt2-mini does beside ten others.
        for kept in range(0, len(ranked_heads), -(-len(ranked_heads) // MOST_STEPS)):
            if self._cost("chooses", ranked_heads[:kept])[0] <= most:
                return kept
        return len(ranked_heads)

    def table(
        self, heads: Collection[KVHead], random_seeds: Sequence[int] = RANDOM_SEEDS
    ) -> list[dict[str, Any]]:
        """What is lost if only some KV heads `(layer, kv_head)` keep their whole cache, on the
        documents that report.

        One row for the full cache, one for the chosen heads, one for as many random heads by each
        of `random_seeds`, and one for no head. `delta_nll` is the rise of the loss of the text,
        `recall` the share of the tokens of answers that are predicted first, both with standard
        errors over documents; `cache_percent` what is kept of a full cache of `n_ctx` tokens.
        """
        every, chosen = self.shape.kv_heads, tuple(sorted({*heads}))
        if foreign := [head for head in chosen if head not in every]:
            info = self.trial.info
            raise ScanError(
                f"check: KV head {foreign[0][1]} of layer {foreign[0][0]}: {info.name} has "
                f"{counted(info.n_layers, 'layer')} of "
                f"{counted(self.shape.n_kv_heads, 'KV head')}"
            )
        cuts: list[tuple[str, int | None, Sequence[KVHead]]] = [
            ("every head", None, every),
            ("chosen heads", None, chosen),
        ]
        for seed in random_seeds:
            # A permutation cut short: a larger choice by the same seed holds the smaller one.
            drawn = np.random.default_rng(seed).permutation(len(every))
            cuts.append(("random heads", seed, [every[index] for index in drawn[: len(chosen)]]))
        cuts.append(("no head", None, ()))
        return [
            {
                "kept_whole": words,
                "seed": seed,
                "kv_heads": len(kept),
                "of_the_chosen": len({*kept} & {*chosen}),
                **self._reported(kept),
            }
            for words, seed, kept in cuts
        ]

    def _plan(self, kept: Collection[KVHead]) -> CachePlan:
        """The plan in which all heads but some keep a window."""
        cut = tuple(head for head in self.shape.kv_heads if head not in kept)
        windows = Choice("window", cut, window=True)
        return CachePlan.untouched(self.shape).with_choices(self.shape, [windows])

    def _cost(self, half: Half, kept: Collection[KVHead]) -> tuple[float, float]:
        """What it costs in a half if only some heads are whole, in nats, and its standard error."""
        text = self._plan(kept).intervention(self.shape)
        whole, changed = (self.trial.measure(half, name) for name in ("none", text))
        recall = self.trial.measure("reports", "none").recall.mean()
        weight = NEEDLE_WEIGHT if recall >= LEAST_RECALL else 0.0
        of_text, of_answers = changed.text - whole.text, weight * (changed.needle - whole.needle)
        of_both = max(0.0, float(of_text.mean())) + max(0.0, float(of_answers.mean()))
        error = cost(of_text + of_answers, self.trial.pieces[half].documents)["standard_error"]
        return of_both, error

    def _reported(self, kept: Collection[KVHead]) -> dict[str, float]:
        """What it costs where documents report, and what is left of the cache."""
        plan, untouched = self._plan(kept), CachePlan.untouched(self.shape)
        share = plan.bytes_per_token(self.shape) / untouched.bytes_per_token(self.shape)
        of_both, error = self._cost("reports", kept)
        return {
            **reported(self.trial, plan.intervention(self.shape)),
            "cost": of_both,
            "cost_error": error,
            "cache_percent": 100 * share,
        }


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the table of a check says, in lines."""
    full, chosen, *random, none = rows
    is_within = "within" if chosen["cost"] <= TOLERANCE * none["cost"] else "not within"
    lines = [
        f"chosen heads: {is_within} {100 * TOLERANCE:.0f} % of the full cache (cost "
        f"{chosen['cost']:.4f} of {none['cost']:.4f} with no head, recall {chosen['recall']:.2f} "
        f"of {full['recall']:.2f})"
    ]
    if random:
        costs = ", ".join(f"{row['cost']:.4f}" for row in random)
        recalls = ", ".join(f"{row['recall']:.2f}" for row in random)
        overlaps = ", ".join(str(row["of_the_chosen"]) for row in random)
        lines.append(
            f"random heads: cost {costs}, recall {recalls}, with {overlaps} of the "
            f"{chosen['kv_heads']} chosen heads among them"
        )
    if 2 * chosen["kv_heads"] > full["kv_heads"]:
        lines.append("more than half of the heads are chosen, so any random ones hold many of them")
    if full["recall"] < LEAST_RECALL:
        lines.append(
            f"with its whole cache the model recalls {full['recall']:.2f} of the answers, expected "
            f"{LEAST_RECALL} or more, so only the loss of text judges"
        )
    elif full["recall"] <= none["recall"]:
        lines.append("every head recalls no more than none does, so recall says nothing here")
    if none["cost"] <= 2 * none["cost_error"]:
        lines.append(
            f"no head whole costs {none['cost']:.4f} ± {none['cost_error']:.2g}, which may be "
            "nothing, so the check says nothing of these heads"
        )
    return lines


def lines_of_check(check: Mapping[str, Any], count: int) -> list[str]:
    """What a check of a list of so many heads has found out, as a table and lines."""
    from headcount.queries.ask.text_tables import text_table

    names = ["kept_whole", "seed", "kv_heads", "of_the_chosen"]
    rows = [
        (*(row[name] for name in names), *words_of_costs(row), row["cache_percent"])
        for row in check["table"]
    ]
    lines = [text_table([*names, "loss_rises_by", "recall", "cache_percent"], rows).rstrip()]
    if (kept := check.get("heads_that_lose_nothing")) is not None:
        line = f"number of heads: with {kept} of {count} nothing is lost on other documents"
        # All or none of them is no choice.
        if 0 < kept < count:
            line += f"; --sparsity {sparsity_of(count - kept, count):g} chooses them"
        lines.append(line)
    return [*lines, *check["verdict"]]
