"""The group `reproduce`. Heavy imports wait until a command runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table
from typer.core import TyperGroup

from headcount.jobs.commands.scan import (
    AllowOtherCode,
    Cores,
    DeviceOption,
    LocalReplicas,
    Overrides,
)
from headcount.jobs.console import say
from headcount.queries.commands.query import tell_user, warn_of_damage
from headcount.schemas.errors import RunError, ScanError, counted

if TYPE_CHECKING:
    from headcount.reproduce.reproduction import PlannedSystem, Reproduction, SkippedSystem
    from headcount.reproduce.system import System
    from headcount.reproduce.verdicts import Finding

SOMETHING_SKIPPED = 3
"""Exit code if no finding failed, but a system that fits the model could not be measured."""


class DefaultedGroup(TyperGroup):
    """A group whose first command need not be named: `reproduce NAME` beside `reproduce texts`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - typer has no name
        """Read the command line."""
        is_named = args[:1] and args[0] in self.commands
        return super().parse_args(ctx, args if is_named else [next(iter(self.commands)), *args])


commands = typer.Typer(
    name="reproduce",
    cls=DefaultedGroup,
    help="Measure systems of the literature again, with a verdict beside every published figure.",
    rich_markup_mode=None,
)


@commands.command("systems")
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Systems, as --list names them, or your own files, FILE.toml.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A Hub id, a local directory, or bundled:NAME. Default: the system's miniature."
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Measure every system; with --model, every one that was published for a model of "
            "these sizes.",
        ),
    ] = False,
    listed: Annotated[
        bool,
        typer.Option("--list", help="Print the systems, and the models they were published for."),
    ] = False,
    out: Annotated[str, typer.Option(help="Directory for the runs.")] = "runs/reproduce",
    file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Also write the findings to this file."),
    ] = None,
    text_files: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="[NAME=]FILE",
            help="The authors' own text, for the systems that were published for one. NAME is a "
            "system; its text is also that of the other systems that were published for the same. "
            "May be repeated. headcount reproduce texts builds some of them.",
        ),
    ] = None,
    overrides: Overrides = None,
    replicas: LocalReplicas = 0,
    cores: Cores = 0,
    device: DeviceOption = "auto",
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Ray cluster that this machine belongs to. It needs --replicas.",
        ),
    ] = None,
    allow_other_code: AllowOtherCode = False,
) -> None:
    """Measure systems of the literature again: scan, query, and a verdict beside every published
    figure.

    A miniature is another model, so its numbers are not compared. What must hold in any model is
    checked. What does not fit the model, or lacks a file, is said and skipped. Exit codes: 2 if a
    finding fails, 3 if none fails but something was skipped that fits the model.
    """
    from headcount.queries.ask.formats import check_suffix
    from headcount.reproduce.system import find_systems, systems

    if listed:
        _print_systems(systems())
        return
    if not names and not every:
        raise ScanError("expected the name of a system, or --all; --list names them")
    selection = systems() if every else find_systems(names or [])
    if file is not None:
        check_suffix(file, ".json")
    if file is not None and not file.parent.is_dir():
        raise RunError(f"{file}: cannot be written ({file.parent} is no directory)")
    text_by_system = texts_of_systems(text_files or [], selection)
    # These import torch, which takes seconds: a mistake above is answered without it.
    from headcount.jobs.resources import Resources
    from headcount.reproduce.reproduction import Reproduction
    from headcount.reproduce.system_runs import check_overrides
    from headcount.workers.model.files.known_models import KnownModels
    from headcount.workers.process import prepare_process

    prepare_process()
    check_overrides([*selection.values()], overrides or [])
    resources = Resources(replicas, cores, device, address)
    resources.check_here()
    console = Console(highlight=False, stderr=True)
    reproduction = Reproduction(
        model=model,
        only_fitting=every and model is not None,
        out=out,
        overrides=overrides or [],
        texts=text_by_system,
        resources=resources,
        allow_other_code=allow_other_code,
        models=KnownModels(),
        console=console,
    )
    if model is not None:
        # A model that is not there is one mistake, and not a reason to skip every system.
        reproduction.models.describe(model)
    findings, skipped = _measure_and_judge(reproduction, selection, file, console)
    _end(findings, skipped, len(selection), console)


def _measure_and_judge(
    reproduction: Reproduction, selection: Mapping[str, System], file: Path | None, console: Console
) -> tuple[list[Finding], list[SkippedSystem]]:
    """Measure the systems one after another, and keep the findings so far in a file."""
    findings: list[Finding] = []
    skipped: list[SkippedSystem] = []

    def judge(planned: PlannedSystem) -> None:
        findings.extend(_judge(planned))
        write()

    def skip(system: SkippedSystem) -> None:
        say(console, f"{system.system}: skipped: {system.reason}")
        skipped.append(system)
        write()

    def write() -> None:
        # After every system, so that a command that is stopped leaves the findings so far.
        if file is not None:
            _write_json([*findings, *(system.finding for system in skipped)], file)

    planned_systems, unplanned = reproduction.plan(selection)
    for system in unplanned:
        skip(system)
    write()
    reproduction.measure(planned_systems, judge, skip)
    return findings, skipped


def texts_of_systems(options: Sequence[str], selection: Mapping[str, System]) -> dict[str, str]:
    """The file of the authors' text, by system. A text that nobody reads is refused."""
    wanted_by_system = {name: system.text.what for name, system in selection.items() if system.text}
    files: dict[str, str] = {}
    for option in options:
        if not wanted_by_system:
            raise ScanError(
                f"--text {option}: none of these systems reads a text of its authors; leave it out"
            )
        name, equals, named_file = option.partition("=")
        is_named = bool(equals) and name in wanted_by_system
        wanted = {wanted_by_system[name]} if is_named else set(wanted_by_system.values())
        text_file = named_file if is_named else option
        if len(wanted) > 1:
            choices = "; ".join(f"{name}={what}" for name, what in wanted_by_system.items())
            raise ScanError(
                f"--text {option}: these systems were published for different texts; expected "
                f"NAME=FILE, for instance --text {next(iter(wanted_by_system))}=FILE ({choices})"
            )
        if not Path(text_file).expanduser().is_file():
            raise RunError(f"--text {option}: no such file; expected {next(iter(wanted))}")
        files |= {name: text_file for name, what in wanted_by_system.items() if what in wanted}
    return files


def _end(
    findings: Sequence[Finding], skipped: Sequence[SkippedSystem], systems: int, console: Console
) -> None:
    """Say how many findings have which verdict, and end with the code that belongs to them."""
    # Of one system nothing else can be said.
    if systems == 1 and skipped and skipped[0].error is not None:
        raise skipped[0].error
    if len(skipped) == systems:
        raise RunError("no system could be measured; each line above says why")
    counts = Counter(finding.verdict for finding in findings)
    verdicts = ", ".join(f"{counts[verdict]:,} {verdict}" for verdict in VERDICT_ORDER)
    measured = counted(systems - len(skipped), "system")
    say(console, f"{measured} measured, {len(skipped)} skipped; findings: {verdicts}")
    failures = counts["fail"]
    if failures:
        raise RunError(
            f"{failures} of {failures + counts['pass']} findings differ from what was published "
            "or must hold"
        )
    if any(system.fits for system in skipped):
        raise typer.Exit(SOMETHING_SKIPPED)


def _judge(planned: PlannedSystem) -> list[Finding]:
    """Print the findings on the runs of a system, and write its page beside the runs.

    There is no page if the runs lie in an object store.
    """
    from headcount.reproduce.system_figures import Heading, write_page
    from headcount.reproduce.system_runs import open_system_runs
    from headcount.reproduce.verdicts import judge, warning
    from headcount.schemas.files.places import place

    name, system, model = planned.name, planned.system, planned.model
    database = open_system_runs(system, planned.directory, tell_user)
    warn_of_damage(database)
    findings = judge(name, system, planned.info, model, database, planned.has_text)
    _print_findings(planned, findings)
    # Beside the directory, not in it: it is no file of a run.
    page = place(f"{planned.directory}.html")
    if isinstance(page, Path):
        heading = Heading(
            system=name,
            title=system.title,
            source=system.source,
            model=model,
            runs=page.stem,
            warning=warning(system, planned.info, model),
        )
        write_page(page, heading, findings, system.figure, database)
        typer.echo(f"figures in {page}")
    return findings


VERDICT_ORDER = ("fail", "pass", "not comparable")
"""The order in which findings are printed."""


def _print_findings(planned: PlannedSystem, findings: Sequence[Finding]) -> None:
    system = planned.system
    title = (
        f"{planned.name}: {system.title} ({system.source})\n"
        f"model {planned.model}, runs in {planned.directory}"
    )
    table = Table(
        "name", "published", "measured", "tolerance", "verdict", title=title, title_justify="left"
    )
    # Of a table of thousands, those that fail are printed. All are in the page and in the JSON.
    printed = [finding for finding in findings if not finding.file or finding.verdict == "fail"]
    # On a miniature nearly all published figures cannot be compared. That long list comes last.
    for finding in sorted(printed, key=lambda finding: VERDICT_ORDER.index(finding.verdict)):
        table.add_row(
            finding.name,
            _cell(finding.published),
            _cell(finding.measured),
            finding.tolerance_text,
            finding.verdict,
        )
    console = Console(highlight=False)
    console.print(table)
    for (file, verdict), count in _counts_by_file(findings).items():
        say(console, f"{file}: {count:,} {verdict}")


def _counts_by_file(findings: Sequence[Finding]) -> Counter[tuple[str, str]]:
    """How many figures of each table have which verdict."""
    return Counter((finding.file, finding.verdict) for finding in findings if finding.file)


def _cell(value: float | str | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.4g}"


def _print_systems(systems: dict[str, System]) -> None:
    table = Table(
        Column("name", no_wrap=True),
        Column("what", overflow="fold"),
        box=box.SIMPLE_HEAD,
        show_edge=False,
    )
    for name, system in systems.items():
        # Only bundled models are miniatures, so the prefix says nothing here.
        miniature = system.bundled_model.removeprefix("bundled:")
        table.add_row(name, f"{system.title}\n{system.published_model}; offline {miniature}")
    Console(highlight=False).print(table)


def _write_json(findings: list[Finding], file: Path) -> None:
    records = [asdict(finding) for finding in findings]
    try:
        file.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{file}: cannot be written ({error.strerror})") from None
