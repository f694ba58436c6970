"""The subcommands `plan`, `scan` and `doctor`. Heavy imports wait until a command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from schemas.errors import RunError

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a field of the scan.")
]


def mount(app: typer.Typer) -> None:
    """Add the subcommands to the front door."""
    for command in (plan, scan, doctor):
        app.command()(command)


def plan(
    scan_file: Annotated[Path, typer.Argument(metavar="SCAN", help="A scan file (TOML).")], overrides: Overrides = None
) -> None:
    """Print every resolved value of a scan, and its cost before it is paid."""
    from jobs.cost import meanings, measure_cost
    from jobs.plan import make_plan
    from jobs.progress import duration
    from schemas.scan import load_scan

    console = Console(highlight=False)
    made = make_plan(load_scan(scan_file, overrides or ()), scan_file.stem)
    values = Table("field", "value", "meaning", title=f"run {made.run.run_id}", title_justify="left")
    for row in meanings(made.scan):
        values.add_row(*row)
    values.add_row("input.family", made.scan.input.family, made.sequences.family.meaning)
    for option, value in made.sequences.options.items():
        values.add_row(f"input.{option}", str(value), "")
    console.print(values)
    cost = measure_cost(made)
    done = sum(1 for _ in made.run.commits())
    table = Table("cost", "", title="measured on this machine, extrapolated to the scan", title_justify="left")
    table.add_row("device", f"{cost.device}, {cost.precision}, {made.scan.engine} engine")
    table.add_row("batches", f"{cost.batch_size} sequences")
    table.add_row("shards", f"{made.manifest.shards:,}{f', {done:,} done' if done else ''}")
    table.add_row("sequences", f"{len(made.sequences):,}")
    table.add_row("tokens", f"{made.tokens:,} through the model")
    table.add_row(
        "rows", f"{made.rows:,} in heads, {len(made.sequences) * len(made.scan.interventions):,} in sequences"
    )
    table.add_row("on disk", f"about {_bytes(cost.bytes_on_disk)} in {made.run.path}")
    table.add_row("memory", f"{_bytes(cost.peak_memory)} at the peak of one replica")
    table.add_row("time", f"about {duration(cost.seconds)} at {cost.tokens_per_second:,.0f} tokens/s, one replica")
    console.print(table)
    _print_bad_rows(console, made.bad_rows)


def scan(
    scan_files: Annotated[
        list[Path], typer.Argument(metavar="SCAN...", help="Scan files (TOML), run one after another.")
    ],
    overrides: Overrides = None,
    run: Annotated[
        str | None, typer.Option(help="Go on with this run (its id); refused when the scan differs.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Models to load, each in an actor of its own.")] = 1,
    cores: Annotated[int, typer.Option(min=0, help="CPU cores of each replica; 0 shares out the machine's.")] = 0,
) -> None:
    """Run scans. A run that was stopped, however it was, goes on with the same command."""
    from jobs.execute import Resources, execute, missing_shards, start_ray
    from jobs.plan import make_plan, prepare_run
    from jobs.progress import watch
    from schemas.scan import load_scan

    console = Console(highlight=False, stderr=True)
    failed = 0
    for scan_file in scan_files:
        made = make_plan(load_scan(scan_file, overrides or ()), scan_file.stem, run)
        prepare_run(made, scan_file.read_text(encoding="utf-8") + "".join(f"\n# --set {o}" for o in overrides or ()))
        missing = missing_shards(made)
        shards = made.manifest.shards
        done = shards - len(missing)
        _say(console, f"{made.run.run_id}: {made.tokens:,} tokens, {shards:,} shards, {done:,} of them done")
        _print_bad_rows(console, made.bad_rows)
        if missing:
            resources = start_ray(Resources(replicas, cores))
            outcomes = execute(made, missing, resources)
            failures = watch(outcomes, made.tokens, made.tokens * done // shards, console)
            for failure in failures:
                _say(console, f"shard {failure.shard} failed: {failure.error}")
            failed += len(failures)
        print(made.run.path)
    if failed:
        raise RunError(
            f"{failed} shards failed, all others are committed; mend the cause and run the same command again"
        )


def doctor() -> None:
    """Check that this machine can run scans, and say what it has."""
    from jobs.doctor import examine

    console = Console(highlight=False)
    healthy = True
    for check in examine():
        healthy &= check.ok
        _say(console, f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<16} {check.found}")
    if not healthy:
        sys.exit(1)


def _print_bad_rows(console: Console, problems: dict[str, str], most: int = 5) -> None:
    if problems:
        named = [f"{place} ({problem})" for place, problem in list(problems.items())[:most]]
        more = f" and {len(problems) - most} more" if len(problems) > most else ""
        _say(console, f"{len(problems)} bad rows left out: {', '.join(named)}{more}")


def _say(console: Console, line: str) -> None:
    """Print a line as it is: not wrapped, not interpreted."""
    console.print(line, markup=False, soft_wrap=True)


def _bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
