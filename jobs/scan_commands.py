"""The subcommands `plan`, `scan`, `compact` and `doctor`. Heavy imports wait until a command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Column, Table

from jobs.progress import say
from schemas.errors import HeadcountError, RunError

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a field of the scan."),
]
Replicas = Annotated[int, typer.Option(min=1, help="Models to load, each in an actor of its own.")]
LocalReplicas = Annotated[
    int,
    typer.Option(
        min=0,
        help="Models to load, each in an actor of its own; 0: one in this process, without Ray.",
    ),
]
Cores = Annotated[
    int, typer.Option(min=0, help="CPU cores of each replica; 0 shares out the machine's.")
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(help="What replicas compute on; auto: GPUs if there."),
]


def mount(app: typer.Typer) -> None:
    """Add the subcommands to the front door."""
    for command in (plan, scan, compact, doctor):
        app.command()(command)


def plan(
    scan_file: Annotated[Path, typer.Argument(metavar="SCAN", help="A scan file (TOML).")],
    overrides: Overrides = None,
) -> None:
    """Print every resolved value of a scan, and its cost before it is paid."""
    from jobs.progress import duration
    from schemas.scan import load_scan

    wanted = load_scan(
        scan_file, overrides or ()
    )  # Before the seconds that the imports below take.
    from jobs.cost import meanings, measure_cost
    from jobs.plan import make_plan
    from workers.process import prepare_process

    prepare_process()
    console = Console(highlight=False)
    made = make_plan(wanted, scan_file.stem)
    values = Table(
        "field",
        Column("value", overflow="fold"),
        "meaning",
        title=f"run {made.run.run_id}",
        title_justify="left",
    )
    for row in meanings(made.scan):
        values.add_row(*row)
    values.add_row("input.family", made.scan.input.family, made.sequences.family.meaning)
    for option, value in made.sequences.options.items():
        values.add_row(f"input.{option}", str(value), "")
    console.print(values)
    cost = measure_cost(made)
    done = len(made.run.ledger([]))
    table = Table(
        "cost", "", title="measured on this machine, extrapolated to the scan", title_justify="left"
    )
    table.add_row("device", f"{cost.device}, {cost.precision}, {made.scan.engine} engine")
    table.add_row("batches", f"{cost.batch_size} sequences")
    table.add_row("shards", f"{made.manifest.shards:,}{f', {done:,} done' if done else ''}")
    table.add_row("sequences", f"{len(made.sequences):,}")
    table.add_row("tokens", f"{made.tokens:,} through the model")
    table.add_row(
        "rows",
        f"{made.rows:,} in heads, {len(made.sequences) * len(made.scan.interventions):,} in sequences",
    )
    table.add_row("on disk", f"about {_bytes(cost.bytes_on_disk)} in {made.run.path}")
    table.add_row("memory", f"{_bytes(cost.peak_memory)} at the peak of one replica")
    table.add_row(
        "time",
        f"about {duration(cost.seconds)} at {cost.tokens_per_second:,.0f} tokens/s, one replica",
    )
    console.print(table)
    _print_bad_rows(console, made.bad_rows)


def scan(
    scan_files: Annotated[
        list[Path], typer.Argument(metavar="SCAN", help="Scan files (TOML), run one after another.")
    ],
    overrides: Overrides = None,
    run: Annotated[
        str | None,
        typer.Option(help="Go on with this run (its id); refused when the scan differs."),
    ] = None,
    replicas: LocalReplicas = 1,
    cores: Cores = 0,
    device: DeviceOption = "auto",
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Ray cluster that this machine belongs to; else Ray is started.",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(help="Open every file of shards that are done, and measure broken ones anew."),
    ] = False,
) -> None:
    """Run scans. A run that was stopped, however it was, goes on with the same command."""
    from schemas.scan import load_scan

    # All of them before the seconds that the imports below take, and the hours that the first may.
    scans = [(file, load_scan(file, overrides or ())) for file in scan_files]
    from jobs.plan import make_plan, prepare_run
    from jobs.ray_cluster import Resources
    from jobs.run_loop import run_to_end
    from workers.process import prepare_process

    prepare_process()
    console = Console(highlight=False, stderr=True)
    failed = 0
    for scan_file, wanted in scans:
        try:
            made = make_plan(wanted, scan_file.stem, run)
        except HeadcountError as error:
            raise type(error)(f"{scan_file}: {error}" if len(scans) > 1 else str(error)) from None
        prepare_run(
            made,
            scan_file.read_text(encoding="utf-8")
            + "".join(f"\n# --set {o}" for o in overrides or ()),
        )
        _print_bad_rows(console, made.bad_rows)
        failed += len(
            run_to_end(made, Resources(replicas, cores, device, address), console, verify)
        )
        print(made.run.path)
    if failed:
        raise RunError(
            f"{failed} shards failed, all others are committed; mend the cause and run the same command again"
        )


def compact(
    path: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run directory, or one that holds runs; a path or an address."
        ),
    ],
    rows: Annotated[int, typer.Option(min=1, help="Rows of heads in a merged file.")] = 2_000_000,
) -> None:
    """Merge the small files of a run into few large ones; stopped at any time, the same command
    goes on.

    In a store nothing keeps others away: do not compact a run there beside a scan or another
    compaction of it.
    """
    from jobs.compaction import compact
    from jobs.progress import duration
    from schemas.places import absolute
    from schemas.run_directory import find_runs

    console = Console(highlight=False, stderr=True)
    problems: list[str] = []
    for run in find_runs(absolute(path)):
        done = compact(run, rows, lambda line: say(console, line))
        files = f"{done.before.files:,} files are now {done.after.files:,}"
        size = f"{_bytes(done.before.bytes)} are now {_bytes(done.after.bytes)}"
        say(console, f"{run.run_id}: {files}, {size}, in {duration(done.seconds)}")
        problems += [f"{run.run_id}: {problem}" for problem in done.problems]
        print(run.path)
    if problems:
        raise RunError("\n".join(problems))


def doctor(
    device: Annotated[
        Literal["cpu", "cuda"],
        typer.Option(help="cuda: compare the GPU's kernel with the tiles, in all shapes."),
    ] = "cpu",
) -> None:
    """Check that this machine can run scans, and say what it has."""
    if device == "cuda":
        _compare_kernel(Console(highlight=False))
        return
    from jobs.doctor import examine

    console = Console(highlight=False)
    healthy = True
    for check in examine():
        healthy &= check.ok
        say(console, f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<16} {check.found}")
    if not healthy:
        sys.exit(1)


def _compare_kernel(console: Console) -> None:
    """Print how the GPU's kernel and the tiles differ in every shape and precision."""
    from jobs.doctor import COMPARISON_HEAD, compare_kernel, comparison_line, kernel_obstacle

    if obstacle := kernel_obstacle():
        say(console, obstacle)
        sys.exit(1)
    say(console, COMPARISON_HEAD)
    healthy = True
    for comparison in compare_kernel():
        healthy &= comparison.agrees
        say(console, comparison_line(comparison))
    if not healthy:
        sys.exit(1)


def _print_bad_rows(console: Console, problems: dict[str, str], most: int = 5) -> None:
    if problems:
        named = [f"{place} ({problem})" for place, problem in list(problems.items())[:most]]
        more = f" and {len(problems) - most} more" if len(problems) > most else ""
        say(console, f"{len(problems)} bad rows left out: {', '.join(named)}{more}")


def _bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
