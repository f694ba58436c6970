"""The replications of one command: each is planned, measured and judged, or skipped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from headcount.jobs.console import say
from headcount.jobs.plan.plan import Plan
from headcount.jobs.resources import Resources
from headcount.jobs.run.progress import WholeProgress, watch_index
from headcount.queries.commands.query import tell_user, warn_of_damage
from headcount.reproduce.published_texts import how_to_get
from headcount.reproduce.replication import Replication
from headcount.reproduce.replication_figures import Heading, write_page
from headcount.reproduce.replication_runs import (
    measure_runs,
    open_replication_runs,
    overrides_of_replication,
    plan_replication,
    tokens_to_measure,
)
from headcount.reproduce.verdicts import Result, has_sizes, judge, warning
from headcount.schemas.errors import HeadcountError, RunError
from headcount.schemas.files.places import place, reason
from headcount.workers.model.files.known_models import KnownModels
from headcount.workers.model.files.model_info import ModelInfo


@dataclass
class Attempt:
    """One replication of a command, and what became of it."""

    name: str
    replication: Replication
    model: str
    text: str | None = None
    """The file of the authors' text, if the user gave one."""
    plans: list[Plan] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    skipped: str = ""
    """Why it was not measured."""
    error: Exception | None = None
    """What stopped it. None if it was published for other models."""

    @property
    def info(self) -> ModelInfo:
        """The model that it is measured on."""
        return self.plans[0].info

    @property
    def directory(self) -> str:
        """All its runs lie in one directory."""
        return self.plans[0].scan.out

    def skip(self, why: Exception | str, console: Console) -> None:
        """Say why it is not measured. That is its only line among the results."""
        self.skipped = why if isinstance(why, str) else _line(why)
        self.error = None if isinstance(why, str) else why
        say(console, f"{self.name}: skipped: {self.skipped}")
        nothing = ("", None, None, None, "skipped")
        self.results = [Result(self.name, *nothing, self.model, reason=self.skipped)]

    def judge(self) -> str:
        """Compare what its runs measured, and write its page beside them; the path of the page.

        There is no page if the runs lie in an object store.
        """
        replication = self.replication
        database = open_replication_runs(replication, self.directory, tell_user)
        warn_of_damage(database)
        has_text = self.text is not None
        self.results = judge(self.name, replication, self.info, self.model, database, has_text)
        # Beside the directory, not in it: it is no file of a run.
        page = place(f"{self.directory}.html")
        if not isinstance(page, Path):
            return ""
        heading = Heading(
            replication=self.name,
            title=replication.title,
            source=replication.source,
            model=self.model,
            runs=page.stem,
            warning=warning(replication, self.info, self.model),
        )
        write_page(page, heading, self.results, replication.figure, database)
        return str(page)


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

    def plan(self, selection: Mapping[str, Replication]) -> list[Attempt]:
        """Plan every replication: what cannot be measured is said before anything is."""
        attempts: list[Attempt] = []
        for name, replication in selection.items():
            model = self.model or replication.bundled_model
            attempt = Attempt(name, replication, model, self.texts.get(name))
            attempts.append(attempt)
            try:
                misfit = _misfit(replication, self.models.describe(model), model)
                if misfit and self.only_fitting:
                    attempt.skip(misfit, self.console)
                    continue
                with watch_index(self.console) as watch:
                    attempt.plans = plan_replication(
                        replication,
                        model,
                        f"{self.out.rstrip('/')}/{name}",
                        overrides_of_replication(self.overrides, replication),
                        watch,
                        text=attempt.text,
                        models=self.models,
                    )
            except Exception as error:
                attempt.skip(error, self.console)
        return attempts

    def measure(self, attempt: Attempt, all_runs: WholeProgress) -> None:
        """Measure what is missing of its runs."""
        measure_runs(
            attempt.plans,
            self.resources,
            self.console,
            self.allow_other_code,
            models=self.models,
            all_runs=all_runs,
        )


def progress_of(attempts: Sequence[Attempt]) -> WholeProgress:
    """How far all of them are."""
    return WholeProgress(sum(tokens_to_measure(attempt.plans) for attempt in attempts))


def write_results(attempts: Sequence[Attempt], file: Path | None) -> None:
    """Write the results so far: a command that is stopped leaves them."""
    if file is None:
        return
    results = [asdict(result) for attempt in attempts for result in attempt.results]
    try:
        file.write_text(f"{json.dumps(results, indent=1)}\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{file}: cannot be written ({error.strerror})") from None


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
