"""One command's replications: what fits the model, what is skipped, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from headcount.jobs.plan.plan import Plan
from headcount.jobs.resources import Resources
from headcount.jobs.run.progress import WholeProgress, watch_index
from headcount.reproduce.published_texts import how_to_get
from headcount.reproduce.replication import Replication
from headcount.reproduce.replication_runs import (
    measure_runs,
    overrides_of_replication,
    plan_replication,
    tokens_to_measure,
)
from headcount.reproduce.verdicts import Result, has_sizes
from headcount.schemas.errors import HeadcountError
from headcount.schemas.files.places import reason
from headcount.workers.model.files.known_models import KnownModels
from headcount.workers.model.files.model_info import ModelInfo


@dataclass(frozen=True)
class SkippedReplication:
    """A replication that was not measured."""

    replication: str
    model: str
    reason: str
    fits: bool
    """Whether it was published for such a model, so that something could be done about it."""
    error: Exception | None = None
    """What stopped it."""

    @property
    def result(self) -> Result:
        """The replication's only line among the results."""
        return Result(
            replication=self.replication,
            name="",
            published=None,
            measured=None,
            tolerance=None,
            verdict="skipped",
            model=self.model,
            reason=self.reason,
        )


@dataclass(frozen=True)
class PlannedReplication:
    """A replication whose runs are planned."""

    name: str
    replication: Replication
    model: str
    info: ModelInfo
    plans: list[Plan]
    has_text: bool
    """Whether its runs read the user's text instead of the one that stands for it."""

    @property
    def directory(self) -> str:
        """All runs of a replication lie in one directory."""
        return self.plans[0].scan.out


@dataclass(frozen=True)
class Reproduction:
    """What a user asked for, of all replications of one command."""

    model: str | None
    """None means the miniature of each replication."""
    only_fitting: bool
    """Whether replications that were published for models of other sizes are left out."""
    out: str
    overrides: Sequence[str]
    texts: Mapping[str, str]
    """The file of the authors' text, by replication."""
    resources: Resources
    allow_other_code: bool
    models: KnownModels
    console: Console

    def plan(
        self, selection: Mapping[str, Replication]
    ) -> tuple[list[PlannedReplication], list[SkippedReplication]]:
        """Plan every replication; what cannot be planned is skipped, with its reason."""
        planned: list[PlannedReplication] = []
        skipped: list[SkippedReplication] = []
        for name, replication in selection.items():
            outcome = self._plan_one(name, replication)
            if isinstance(outcome, PlannedReplication):
                planned.append(outcome)
            else:
                skipped.append(outcome)
        return planned, skipped

    def measure(
        self,
        planned: Sequence[PlannedReplication],
        judge: Callable[[PlannedReplication], None],
        skip: Callable[[SkippedReplication], None],
    ) -> None:
        """Measure the replications one after the other. Each is handed to `judge`, or to `skip`."""
        all_runs = WholeProgress(sum(tokens_to_measure(each.plans) for each in planned))
        for each in planned:
            try:
                measure_runs(
                    each.plans,
                    self.resources,
                    self.console,
                    self.allow_other_code,
                    models=self.models,
                    all_runs=all_runs,
                )
                judge(each)
            # One replication that cannot be measured says nothing about the others.
            except Exception as error:
                skip(
                    SkippedReplication(each.name, each.model, _line(error), fits=True, error=error)
                )

    def _plan_one(
        self, name: str, replication: Replication
    ) -> PlannedReplication | SkippedReplication:
        model = self.model or replication.bundled_model
        try:
            info = self.models.describe(model)
            misfit = _misfit(replication, info, model) if self.only_fitting else ""
            if misfit:
                return SkippedReplication(name, model, misfit, fits=False)
            with watch_index(self.console) as watch:
                plans = plan_replication(
                    replication,
                    model,
                    f"{self.out.rstrip('/')}/{name}",
                    overrides_of_replication(self.overrides, replication),
                    watch,
                    text=self.texts.get(name),
                    models=self.models,
                )
        except Exception as error:
            return SkippedReplication(name, model, _line(error), fits=True, error=error)
        has_text = name in self.texts
        return PlannedReplication(name, replication, model, info, plans, has_text)


def _misfit(replication: Replication, info: ModelInfo, model: str) -> str:
    """Why a replication was not published for such a model; empty if it was."""
    claimed_of = {name for claim in replication.claim for name in claim.models}
    if model == replication.bundled_model or model in claimed_of:
        return ""
    if any(has_sizes(info, sizes) for sizes in replication.all_sizes):
        return ""
    sizes = replication.published_sizes
    published = ", ".join(f"{field} {size}" for field, size in sizes.items())
    actual = ", ".join(f"{field} {getattr(info, field)}" for field in sizes)
    return f"published for {replication.published_model} ({published}), and this model has {actual}"


def _line(error: Exception) -> str:
    """An error in one line, and the command that builds the file that is not there."""
    line = str(error) if isinstance(error, HeadcountError) else reason(error)
    command = how_to_get(line)
    return f"{line}; {command} builds it" if command else line
