"""One command's measuring of several systems: what fits the model, what is skipped, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from headcount.jobs.plan.plan import Plan
from headcount.jobs.resources import Resources
from headcount.jobs.run.progress import WholeProgress, watch_index
from headcount.reproduce.published_texts import how_to_get
from headcount.reproduce.system import System
from headcount.reproduce.system_runs import (
    measure_runs,
    overrides_of_system,
    plan_system,
    tokens_to_measure,
)
from headcount.reproduce.verdicts import Finding, has_sizes
from headcount.schemas.errors import HeadcountError
from headcount.schemas.files.places import reason
from headcount.workers.model.files.known_models import KnownModels
from headcount.workers.model.files.model_info import ModelInfo


@dataclass(frozen=True)
class SkippedSystem:
    """A system that was not measured."""

    system: str
    model: str
    reason: str
    fits: bool
    """Whether it was published for such a model, so that something could be done about it."""
    error: Exception | None = None
    """What stopped it."""

    @property
    def finding(self) -> Finding:
        """The system's only line among the findings."""
        return Finding(
            system=self.system,
            name="",
            published=None,
            measured=None,
            tolerance=None,
            verdict="skipped",
            model=self.model,
            reason=self.reason,
        )


@dataclass(frozen=True)
class PlannedSystem:
    """A system whose runs are planned."""

    name: str
    system: System
    model: str
    info: ModelInfo
    plans: list[Plan]
    has_text: bool
    """Whether its runs read the user's text instead of the one that stands for it."""

    @property
    def directory(self) -> str:
        """All runs of a system lie in one directory."""
        return self.plans[0].scan.out


@dataclass(frozen=True)
class Reproduction:
    """What a user asked for, of all systems of one command."""

    model: str | None
    """None means the miniature of each system."""
    only_fitting: bool
    """Whether systems that were published for models of other sizes are left out."""
    out: str
    overrides: Sequence[str]
    texts: Mapping[str, str]
    """The file of the authors' text, by system."""
    resources: Resources
    allow_other_code: bool
    models: KnownModels
    console: Console

    def plan(
        self, selection: Mapping[str, System]
    ) -> tuple[list[PlannedSystem], list[SkippedSystem]]:
        """Plan every system; what cannot be planned is skipped, with its reason."""
        planned: list[PlannedSystem] = []
        skipped: list[SkippedSystem] = []
        for name, system in selection.items():
            outcome = self._plan_one(name, system)
            if isinstance(outcome, PlannedSystem):
                planned.append(outcome)
            else:
                skipped.append(outcome)
        return planned, skipped

    def measure(
        self,
        planned: Sequence[PlannedSystem],
        judge: Callable[[PlannedSystem], None],
        skip: Callable[[SkippedSystem], None],
    ) -> None:
        """Measure the systems one after the other. Each is handed to `judge`, or to `skip`."""
        whole = WholeProgress(sum(tokens_to_measure(each.plans) for each in planned))
        for each in planned:
            try:
                measure_runs(
                    each.plans,
                    self.resources,
                    self.console,
                    self.allow_other_code,
                    models=self.models,
                    whole=whole,
                )
                judge(each)
            # One system that cannot be measured says nothing about the others.
            except Exception as error:
                skip(SkippedSystem(each.name, each.model, _line(error), fits=True, error=error))

    def _plan_one(self, name: str, system: System) -> PlannedSystem | SkippedSystem:
        model = self.model or system.bundled_model
        try:
            info = self.models.describe(model)
            misfit = _misfit(system, info, model) if self.only_fitting else ""
            if misfit:
                return SkippedSystem(name, model, misfit, fits=False)
            with watch_index(self.console) as watch:
                plans = plan_system(
                    system,
                    model,
                    f"{self.out.rstrip('/')}/{name}",
                    overrides_of_system(self.overrides, system),
                    watch,
                    text=self.texts.get(name),
                    models=self.models,
                )
        except Exception as error:
            return SkippedSystem(name, model, _line(error), fits=True, error=error)
        has_text = name in self.texts
        return PlannedSystem(name, system, model, info, plans, has_text)


def _misfit(system: System, info: ModelInfo, model: str) -> str:
    """Why a system was not published for such a model; empty if it was."""
    claimed_of = {name for phenomenon in system.phenomenon for name in phenomenon.models}
    if model == system.bundled_model or model in claimed_of:
        return ""
    if any(has_sizes(info, sizes) for sizes in system.all_sizes):
        return ""
    sizes = system.published_sizes
    published = ", ".join(f"{field} {size}" for field, size in sizes.items())
    actual = ", ".join(f"{field} {getattr(info, field)}" for field in sizes)
    return f"published for {system.published_model} ({published}), and this model has {actual}"


def _line(error: Exception) -> str:
    """An error in one line, and the command that builds the file that is not there."""
    line = str(error) if isinstance(error, HeadcountError) else reason(error)
    command = how_to_get(line)
    return f"{line}; {command} builds it" if command else line
