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

from jobs.progress import say
from jobs.scan_commands import DeviceOption, Overrides
from schemas.errors import RunError, ScanError

if TYPE_CHECKING:
    from reproduce.system import System
    from reproduce.verdicts import Finding


def table_views() -> dict[str, str]:
    """What every system may ask: the tables, and which of its scans a row is of."""
    from schemas.kinds import TABLES

    # Of profiles a system asks the means over all shards.
    views = {name: name for name in TABLES} | {"profiles": "profile_means"}
    return {
        f"system_{table}": f"SELECT name AS scan, {view}.* FROM {view} JOIN runs USING (run_id)"
        for table, view in views.items()
    }


def mount(app: typer.Typer) -> None:
    """Add the subcommand to the front door."""

    @app.command()
    def reproduce(
        names: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="NAME",
                help="Systems, as --list shows them, or files of your own, FILE.toml.",
            ),
        ] = None,
        model: Annotated[
            str | None,
            typer.Option(
                help="A Hub id, a local directory, or bundled:NAME; the miniature unless told."
            ),
        ] = None,
        every: Annotated[bool, typer.Option("--all", help="Every system.")] = False,
        listed: Annotated[
            bool,
            typer.Option(
                "--list", help="Name the systems, and the models they were published for."
            ),
        ] = False,
        out: Annotated[str, typer.Option(help="Directory for the runs.")] = "runs/reproduce",
        file: Annotated[
            Path | None,
            typer.Option("--json", metavar="FILE", help="Write the verdict there, too."),
        ] = None,
        overrides: Overrides = None,
        device: DeviceOption = "auto",
    ) -> None:
        """Measure a system of the literature again: scan, query, and a verdict beside every
        published figure.

        A miniature is another model, so its numbers are not compared; what must hold in any model
        is.
        """
        from reproduce.system import find_systems, systems

        if listed:
            _list(systems())
            return
        if not names and not every:
            raise ScanError("expected the name of a system, or --all; --list names them")
        if file is not None and not file.parent.is_dir():
            raise RunError(f"{file}: cannot be written ({file.parent} is no directory)")
        found: list[Finding] = []
        for name, system in (systems() if every else find_systems(names or [])).items():
            chosen = model or system.bundled_model
            home = _measure(name, system, chosen, out, overrides or [], device)
            found += _judge(name, system, chosen, home)
        if file is not None:
            _write(found, file)
        judged = [finding.verdict for finding in found if finding.verdict != "not comparable"]
        if failed := judged.count("fail"):
            raise RunError(
                f"{failed} of {len(judged)} findings differ from what was published or must hold"
            )


def _measure(
    name: str, system: System, model: str, out: str, overrides: list[str], device: str
) -> str:
    """Bring the runs of a system to their end; the directory they lie in."""
    from reproduce.system_runs import measure, plans

    console = Console(highlight=False, stderr=True)
    made = plans(system, model, f"{out.rstrip('/')}/{name}", overrides)
    for plan in made:
        measure(plan, device, lambda line: say(console, line))
    return made[0].scan.out


def _judge(name: str, system: System, model: str, home: str) -> list[Finding]:
    """The verdict on the runs of a system, printed, and on a page beside them where they lie on
    this machine's disks.
    """
    from queries.query_commands import open_runs
    from reproduce.system_figures import write_page
    from reproduce.verdicts import judge, warning
    from schemas.places import place

    ask = open_runs(home, table_views() | system.view)
    found = judge(name, system, model, ask)
    _show(name, system, model, home, found)
    page = place(f"{home}.html")
    if isinstance(page, Path):
        heading = {
            "title": f"{name}: {system.title}",
            "source": system.source,
            "model": model,
            "runs": page.stem,
        }
        figures = [figure.model_dump() for figure in system.figure]
        write_page(
            page,
            heading,
            warning(system, model),
            [asdict(finding) for finding in found],
            figures,
            ask,
        )
        typer.echo(f"figures in {page}")
    return found


def _show(name: str, system: System, model: str, home: str, found: list[Finding]) -> None:
    title = f"{name}: {system.title} ({system.source})\nmodel {model}, runs in {home}"
    table = Table(
        "name", "published", "measured", "tolerance", "verdict", title=title, title_justify="left"
    )
    for finding in found:
        cells = (finding.published, finding.measured, finding.tolerance)
        table.add_row(finding.name, *map(_cell, cells), finding.verdict)
    Console(highlight=False).print(table)


def _cell(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def _list(found: dict[str, System]) -> None:
    table = Table(
        Column("name", no_wrap=True),
        Column("what", overflow="fold"),
        box=box.SIMPLE_HEAD,
        show_edge=False,
    )
    for name, system in found.items():
        models = (
            f"{system.published_model}; offline {system.bundled_model.removeprefix('bundled:')}"
        )
        table.add_row(name, f"{system.title}\n{models}")
    Console(highlight=False).print(table)


def _write(found: list[Finding], file: Path) -> None:
    try:
        file.write_text(
            json.dumps([asdict(finding) for finding in found], indent=1) + "\n", encoding="utf-8"
        )
    except OSError as error:
        raise RunError(f"{file}: cannot be written ({error.strerror})") from None
