"""The subcommand `reproduce`. Heavy imports wait until it runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

from jobs.scan_commands import AllowOtherCode, DeviceOption, Overrides
from queries.query_commands import tell_user, warn_of_damage
from schemas.errors import RunError, ScanError

if TYPE_CHECKING:
    from reproduce.system import System
    from reproduce.verdicts import Finding


def mount(app: typer.Typer) -> None:
    """Add the subcommand to the front door."""
    app.command()(reproduce)


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
    every: Annotated[bool, typer.Option("--all", help="Measure every system.")] = False,
    listed: Annotated[
        bool,
        typer.Option("--list", help="Print the systems, and the models they were published for."),
    ] = False,
    out: Annotated[str, typer.Option(help="Directory for the runs.")] = "runs/reproduce",
    file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Also write the findings to this file."),
    ] = None,
    overrides: Overrides = None,
    device: DeviceOption = "auto",
    allow_other_code: AllowOtherCode = False,
) -> None:
    """Measure a system of the literature again: scan, query, and a verdict beside every published
    figure.

    A miniature is another model, so its numbers are not compared. What must hold in any model is
    checked.
    """
    from reproduce.system import find_systems, systems

    if listed:
        _print_systems(systems())
        return
    if not names and not every:
        raise ScanError("expected the name of a system, or --all; --list names them")
    if file is not None and not file.parent.is_dir():
        raise RunError(f"{file}: cannot be written ({file.parent} is no directory)")
    selection = systems() if every else find_systems(names or [])
    # These import torch, which takes seconds: a mistake above is answered without it.
    from jobs.progress import watch_index
    from reproduce.system_runs import measure_runs, plan_system
    from workers.process import prepare_process

    prepare_process()

    console = Console(highlight=False, stderr=True)
    findings: list[Finding] = []
    for name, system in selection.items():
        system_model = model or system.bundled_model
        system_directory = f"{out.rstrip('/')}/{name}"
        with watch_index(console) as watch:
            plans = plan_system(system, system_model, system_directory, overrides or [], watch)
        measure_runs(plans, device, console, allow_other_code)
        # All runs of a system lie in one directory.
        findings += _judge(name, system, system_model, plans[0].scan.out)
    if file is not None:
        _write_json(findings, file)
    verdicts = [finding.verdict for finding in findings if finding.verdict != "not comparable"]
    failures = verdicts.count("fail")
    if failures:
        raise RunError(
            f"{failures} of {len(verdicts)} findings differ from what was published or must hold"
        )


def _judge(name: str, system: System, model: str, directory: str) -> list[Finding]:
    """Print the findings on the runs of a system, and write its page beside the runs.

    There is no page if the runs lie in an object store.
    """
    from reproduce.system_figures import Heading, write_page
    from reproduce.system_runs import open_system_runs
    from reproduce.verdicts import judge, warning
    from schemas.places import place

    database = open_system_runs(system, directory, tell_user)
    warn_of_damage(database)
    findings = judge(name, system, model, database)
    _print_findings(name, system, model, directory, findings)
    # Beside the directory, not in it: it is no file of a run.
    page = place(f"{directory}.html")
    if isinstance(page, Path):
        heading = Heading(
            system=name,
            title=system.title,
            source=system.source,
            model=model,
            runs=page.stem,
            warning=warning(system, model),
        )
        write_page(page, heading, findings, system.figure, database)
        typer.echo(f"figures in {page}")
    return findings


VERDICT_ORDER = ("fail", "pass", "not comparable")
"""The order in which findings are printed."""


def _print_findings(
    name: str, system: System, model: str, directory: str, findings: list[Finding]
) -> None:
    title = f"{name}: {system.title} ({system.source})\nmodel {model}, runs in {directory}"
    table = Table(
        "name", "published", "measured", "tolerance", "verdict", title=title, title_justify="left"
    )
    # On a miniature nearly all published figures cannot be compared. That long list comes last.
    for finding in sorted(findings, key=lambda finding: VERDICT_ORDER.index(finding.verdict)):
        table.add_row(
            finding.name,
            _cell(finding.published),
            _cell(finding.measured),
            _cell(finding.tolerance),
            finding.verdict,
        )
    Console(highlight=False).print(table)


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
