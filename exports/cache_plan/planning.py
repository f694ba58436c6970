"""A plan from what a user asks for to its files: measured, kept on the way, and reported."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from headcount.exports.cache_plan.engines import CacheEngine
from headcount.exports.cache_plan.plans import CacheShape
from headcount.exports.cache_plan.search import (
    LEAST_RECALL,
    SURE,
    Found,
    Goal,
    Point,
    Search,
    not_undercut,
)
from headcount.exports.formats.duo import problem_of_window
from headcount.exports.shared.certainty import cost
from headcount.exports.shared.confirmation import shown_and_kept, tell_passes
from headcount.jobs.bars import waiting
from headcount.jobs.resources import Resources
from headcount.queries.commands.opening import tell_user
from headcount.schemas.errors import QueryError
from headcount.schemas.places import explained, write_whole
from headcount.workers.cache_trial import CacheTrial

PLAN = "plan.json"

MOST_POINTS = 8  # of a Pareto table


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a user wants to have planned."""

    model: str
    engine: CacheEngine
    goal: Goal
    texts: Sequence[str]
    n_ctx: int | None
    sequences: int
    recent: int
    resources: Resources
    folder: Path
    replace: bool

    def made(self) -> dict[str, Any]:
        """Measure and write it; returns what plan.json says."""
        console = Console(stderr=True, highlight=False)
        with waiting(console, "reading the model's files and the texts"):
            trial = self._trial()
            # Before the model is loaded: what is refused costs nothing.
            self._check_window(trial.n_ctx)
            if (problem := self.engine.problem(trial.info)) is not None:
                raise QueryError(f"--engine {self.engine.name}: {trial.info.name}: {problem}")
            identity = trial.identity
        answers, opened = self._known(identity)
        trial.known.update(answers)
        trial.opened.update(opened)
        # A folder that cannot be written is refused before anything is paid for.
        self._save(trial, identity)
        with ExitStack() as stack:
            with waiting(console, "loading the model"):
                stack.enter_context(trial.loaded())
                shape = self._shape(trial)
            return self._measured(trial, identity, shape)

    def _trial(self) -> CacheTrial:
        make = CacheTrial
        if self.resources.replicas:
            # Ray takes a second to import.
            from headcount.jobs.run.ray_trial import TrialOnRay

            make = partial(TrialOnRay, self.resources)
        return make(
            self.model,
            self.texts,
            n_ctx=self.n_ctx,
            sequences=self.sequences,
            reads_prompts=self.engine.reads_prompts,
            device=self.resources.device,
        )

    def _measured(
        self, trial: CacheTrial, identity: dict[str, Any], shape: CacheShape
    ) -> dict[str, Any]:
        """Search with a trial that is loaded, and write what was found; returns the same."""
        search = Search(trial, self.engine, shape, self.goal, tell_user)
        passes = search.passes + (2 + MOST_POINTS) * len(trial.pieces["reports"].tokens)
        tell_passes(trial, passes)
        save = partial(self._save, trial, identity)
        with shown_and_kept("cache-plan", "cache-plan: ", passes, save) as trial.passed:
            found = search.run()
            facts = self._facts(trial, shape, search, found)
        content = {**identity, **facts, "answers": trial.known, "opened": trial.opened}
        files = {PLAN: json.dumps(content, indent=1).encode()}
        if found.chosen is not None and self.engine.files is not None:
            files |= self.engine.files(found.chosen.plan, shape)
        self._write(files)
        return content

    def _check_window(self, n_ctx: int) -> None:
        has_windows = any(each.window for each in self.engine.alternatives)
        problem = problem_of_window(n_ctx, self.engine.sink, self.recent, "--window")
        if has_windows and problem is not None:
            raise QueryError(problem)

    def _shape(self, trial: CacheTrial) -> CacheShape:
        # A model that cannot go on behind a prompt has none.
        end = trial.prompt if self.engine.rounds_prompts else 0
        return shape_of(trial, self.engine.sink, self.recent, self.engine.whole, end or None)

    def _known(self, identity: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The answers of an earlier command with the same questions, and its rounds of opening."""
        file = self.folder / PLAN
        if not file.is_file():
            return {}, {}
        try:
            before = json.loads(file.read_text())
            differing = [name for name, fact in identity.items() if before.get(name) != fact]
            known = before["answers"], before["opened"]
        except (ValueError, LookupError, AttributeError):
            differing, known = ["its form"], ({}, {})
        if not differing:
            return known
        if self.replace:
            return {}, {}
        raise QueryError(
            f"{file}: is a plan of other questions ({', '.join(differing)} differ); choose another "
            "folder, or say --replace"
        )

    def _save(self, trial: CacheTrial, identity: Mapping[str, Any]) -> None:
        """Write what is known so far."""
        known = {"answers": trial.known, "opened": trial.opened}
        content = {**identity, "unfinished": "its search", **known}
        self._write({PLAN: json.dumps(content, indent=1).encode()})

    def _write(self, files: Mapping[str, bytes]) -> None:
        with explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                write_whole(self.folder / name, content)

    # What is reported

    def _facts(
        self, trial: CacheTrial, shape: CacheShape, search: Search, found: Found
    ) -> dict[str, Any]:
        """What was found, with the plans that are reported as other documents have them."""
        full, chosen = search.full_bytes, found.chosen
        points = pareto(found.tried)
        if chosen is not None and chosen not in points:
            points = sorted([*points, chosen], key=lambda point: -point.bytes_per_token)
        rows = {point: self._reported(trial, shape, point, full) for point in points}
        alone = [
            {
                "kind": choice.kind,
                "heads": [f"{layer}-{head}" for layer, head in choice.heads],
                "cost": float(costs.mean()),
                "sequences": len(costs),
            }
            for choice, costs in found.alone.items()
        ]
        of_chosen: dict[str, Any] = {"plan": None, "heads": {}, "flags": None}
        if chosen is not None:
            of_chosen = {
                "plan": rows[chosen],
                "heads": chosen.plan.facts(shape),
                "flags": self.engine.flags and self.engine.flags(chosen.plan, shape),
            }
        return {
            "engine": self.engine.name,
            "goal": self.goal._asdict(),
            "window": {"sink": shape.sink, "recent": shape.recent, "whole": shape.whole},
            "prompt": trial.prompt,
            "bytes_per_token_whole": full,
            **of_chosen,
            "pareto": [*rows.values()],
            "alone": alone,
            "p_alike": found.p_alike,
            "can_choose": found.can_choose,
            "stability": found.stability and found.stability.facts,
        }

    def _reported(
        self, trial: CacheTrial, shape: CacheShape, point: Point, full: float
    ) -> dict[str, Any]:
        """A plan as the documents that report have it."""
        text = point.plan.intervention(shape)
        return {
            "bytes_per_token": point.bytes_per_token,
            "share": point.bytes_per_token / full,
            **reported(trial, text),
            "where_chosen": {"delta_nll": point.loss, "recall": point.recall},
            "intervention": text,
        }


def shape_of(
    trial: CacheTrial, sink: int, recent: int, whole: int = 0, end: int | None = None
) -> CacheShape:
    """A model's cache, and what windows and formats leave of it. The model is loaded."""
    info = trial.info
    return CacheShape(
        kv_heads=info.kv_heads,
        n_kv_heads=info.n_kv_heads or info.n_heads,
        d_head=info.d_head,
        n_ctx=trial.n_ctx,
        sink=sink,
        recent=recent,
        whole=whole,
        end=end or trial.n_ctx,
        own_windows=trial.own_windows(),
    )


def reported(trial: CacheTrial, intervention: str) -> dict[str, float]:
    """How much the loss of the text rises, and what is recalled, where documents report."""
    untouched, changed = (trial.measure("reports", name) for name in ("none", intervention))
    documents = trial.pieces["reports"].documents
    recall, whole = (cost(each.recall, documents) for each in (changed, untouched))
    return {
        **cost(changed.text - untouched.text, documents),
        "recall": recall["delta_nll"],
        "recall_error": recall["standard_error"],
        "recall_whole": whole["delta_nll"],
    }


def words_of_costs(row: Mapping[str, Any]) -> tuple[str, str]:
    """How much the loss rises, and what is recalled, with standard errors."""

    def error(value: float | None) -> str:
        return "?" if value is None or np.isnan(value) else f"{value:.2g}"

    return (
        f"{row['delta_nll']:+.4f} ± {error(row['standard_error'])}",
        f"{row['recall']:.2f} ± {error(row['recall_error'])}",
    )


def pareto(tried: Sequence[Point]) -> list[Point]:
    """The plans that none undercuts in both bytes and cost, the largest first; some of many."""
    sizes, costs = ([getattr(one, name) for one in tried] for name in ("bytes_per_token", "cost"))
    best = [tried[index] for index in reversed(not_undercut(sizes, costs))]
    if len(best) > MOST_POINTS:
        places = np.linspace(0, len(best) - 1, MOST_POINTS).round().astype(int)
        best = [best[place] for place in places.tolist()]
    return best


def lines_of(content: Mapping[str, Any]) -> list[str]:
    """What a plan says, in lines."""
    from headcount.queries.ask.text_tables import text_table

    rows = [
        (
            f"{row['bytes_per_token']:,.0f}",
            f"{100 * row['share']:.1f}",
            *words_of_costs(row),
            "the plan" if row == content["plan"] else "",
        )
        for row in content["pareto"]
    ]
    lines = [
        text_table(["bytes_per_token", "percent", "loss_rises_by", "recall", ""], rows).rstrip()
    ]
    goal, plan = content["goal"], content["plan"]
    if not content["can_choose"]:
        smallest = min(content["p_alike"].values())
        lines.append(
            f"cannot choose: heads and layers cost the same within their errors (p {smallest:.2g} "
            f"of {len(content['p_alike'])} kinds, expected {SURE} or less in all), so only plans "
            "that treat all alike are left; more --sequences may tell them apart"
        )
    if plan is None:
        asked = [] if goal["loss"] is None else [f"a loss of at most {goal['loss']:+g}"]
        asked += [] if goal["share"] is None else [f"{goal['share']:.0%} of the bytes"]
        asked += [f"{LEAST_RECALL:.0%} of the recall"] if goal["recall"] else []
        lines.append(f"no plan that was tried has {' and '.join(asked)}; ask for less")
        return lines
    if plan["intervention"] == "none":
        lines.append("the plan leaves the cache as it is: everything that was tried costs more")
    if content["stability"]:
        facts = {name: fact for name, fact in content["stability"].items() if name != "verdict"}
        from headcount.exports.shared.certainty import Stability

        lines.append(f"choices alone are {Stability(**facts)}")
    if content["flags"]:
        lines.append(f"{content['engine']}: {content['flags']}")
    return lines
