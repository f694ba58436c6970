"""One replication of a command: planned, measured and judged, or skipped."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from headcount.jobs.console import say
from headcount.jobs.corpus.preparation import Preparation
from headcount.jobs.plan.plan import Plan
from headcount.queries.commands.opening import tell_user, warn_of_damage
from headcount.reproduce.published_texts import how_to_get
from headcount.reproduce.replication import Replication
from headcount.reproduce.replication_figures import write_page
from headcount.reproduce.replication_runs import (
    describe_model,
    open_replication_runs,
    plan_replication,
)
from headcount.reproduce.verdicts import Result, has_sizes, judge, warning
from headcount.schemas.errors import HeadcountError
from headcount.schemas.places import place
from headcount.schemas.reasons import reason
from headcount.workers.known_models import KnownModels
from headcount.workers.model.model_info import ModelInfo


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
    def directory(self) -> str:
        """All its runs lie in one directory."""
        return self.plans[0].scan.out

    @property
    def tokens_to_measure(self) -> int:
        """Tokens that its runs still have to send through the model."""
        # Shards are of one size, except the last, so this is near enough for a time left.
        return sum(
            round(plan.tokens * (1 - plan.shards_done / max(1, plan.manifest.shards)))
            for plan in self.plans
        )

    def plan(
        self,
        out: str,
        overrides: Iterable[str],
        models: KnownModels,
        console: Console,
        only_fitting: bool,
    ) -> None:
        """Plan its runs, below `out`. One that cannot be measured is skipped.

        `only_fitting` skips one that was published for models of other sizes.
        """
        try:
            info = describe_model(self.model, overrides, models)
            misfit = self._misfit(info) if only_fitting else ""
            if misfit:
                self.skip(misfit, console)
                return
            self.plans = plan_replication(
                self.replication,
                self.model,
                f"{out.rstrip('/')}/{self.name}",
                overrides,
                Preparation(console=console),
                text=self.text,
                models=models,
            )
        except Exception as error:
            self.skip(error, console)

    def _misfit(self, info: ModelInfo) -> str:
        """Why it was not published for such a model; empty if it was."""
        replication = self.replication
        claimed_of = {name for claim in replication.claim for name in claim.models}
        if self.model == replication.bundled_model or self.model in claimed_of:
            return ""
        if any(has_sizes(info, sizes) for sizes in replication.all_sizes):
            return ""
        sizes = replication.published_sizes
        published = ", ".join(f"{field} {size}" for field, size in sizes.items())
        actual = ", ".join(f"{field} {getattr(info, field)}" for field in sizes)
        return (
            f"published for {replication.published_model} ({published}), and this model has "
            f"{actual}"
        )

    def skip(self, why: Exception | str, console: Console) -> None:
        """Say why it is not measured. That is its only line among the results."""
        self.skipped = str(why)
        if isinstance(why, Exception):
            self.error = why
            line = str(why) if isinstance(why, HeadcountError) else reason(why)
            command = how_to_get(line)
            self.skipped = f"{line}; {command} builds it" if command else line
        say(console, f"{self.name}: skipped: {self.skipped}")
        nothing = ("", None, None, None, "skipped")
        self.results = [Result(self.name, *nothing, self.model, reason=self.skipped)]

    def judge(self) -> str:
        """Compare what its runs measured, and write its page beside them; the path of the page.

        There is no page if the runs lie in an object store.
        """
        replication, info = self.replication, self.plans[0].info
        database = open_replication_runs(replication, self.directory, tell_user)
        warn_of_damage(database)
        has_text = self.text is not None
        self.results = judge(self.name, replication, info, self.model, database, has_text)
        # Beside the directory, not in it: it is no file of a run.
        page = place(f"{self.directory}.html")
        if not isinstance(page, Path):
            return ""
        notice = warning(replication, info, self.model)
        write_page(page, self.name, replication, self.model, self.results, database, notice)
        return str(page)
