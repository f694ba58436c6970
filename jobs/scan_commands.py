"""The subcommands `plan`, `scan`, `rm`, `compact` and `doctor`. Heavy imports wait until a command
runs.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from jobs.console import say
from schemas.errors import HeadcountError, RunError, counted, printable

if TYPE_CHECKING:
    from jobs.corpus_index import KeptIndex
    from jobs.cost import Cost
    from jobs.plan import Plan
    from schemas.commits import Failure
    from schemas.document_fates import Fates
    from schemas.scan import Scan

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
    typer.Option(help="What replicas compute on; auto: GPUs if there are any."),
]

New = Annotated[
    bool,
    typer.Option(
        "--new",
        help="Start another run of the scan, NAME-HASH-2, -3 …, beside those that there are.",
    ),
]
AllowOtherCode = Annotated[
    bool,
    typer.Option(
        "--allow-other-code",
        help="Go on with a run that other measuring code began; every shard says which code "
        "measured it.",
    ),
]

Verify = Annotated[
    bool,
    typer.Option(
        "--verify", help="Read every file of shards that are done, and measure damaged ones anew."
    ),
]


def mount(app: typer.Typer) -> None:
    """Add the subcommands to the front door."""
    for command in (plan, scan, rm, compact, doctor):
        app.command()(command)


def plan(
    scan_file: Annotated[Path, typer.Argument(metavar="SCAN", help="A scan file (TOML).")],
    overrides: Overrides = None,
    replicas: LocalReplicas = 1,
    device: DeviceOption = "auto",
    new: New = False,
    every: Annotated[
        bool, typer.Option("--all", help="Print the fields that have their default, too.")
    ] = False,
) -> None:
    """Print what a scan says, with its meaning, and its cost before it is paid."""
    from schemas.scan import load_scan

    # Before the seconds that the imports below take.
    parsed_scan = load_scan(scan_file, overrides or ())
    from jobs.corpus_index import KeptIndex
    from jobs.cost import Rehearsal, threads_of
    from jobs.plan import begun_precisions, find_run, plan_run, resolve
    from jobs.progress import watch_index
    from jobs.scan_runs import ScanCommand
    from schemas.run_directory import RunDirectory
    from workers.interventions.settlement import check_begun
    from workers.process import prepare_process

    prepare_process(threads_of(device, replicas))
    command = ScanCommand.typed(scan_file, overrides or ())
    resolved = resolve(parsed_scan)
    first = RunDirectory.of(parsed_scan.out, resolved.scan.run_id(scan_file.stem))
    run = find_run(resolved, first, command, new)
    # What cannot run is refused before the time that the tokenising of a corpus takes.
    rehearsal = Rehearsal(resolved.scan, resolved.info, device, replicas)
    precision = rehearsal.settlement.precision
    if run.manifest_file.is_file():
        check_begun(begun_precisions(run), precision, run.run_id, rehearsal.device)
    with watch_index(Console(highlight=False, stderr=True)) as watch:
        scan_plan = plan_run(resolved, run, watch=watch, command=command)
    kept = KeptIndex.of(scan_plan.sequences, scan_plan.run.path.parent)
    if kept is not None:
        kept.write(scan_plan.sequences)

    console = Console(highlight=False)
    _print_values(console, scan_plan, parsed_scan, every)
    cost = rehearsal.measure(scan_plan)
    console.print(_run_table(scan_plan, cost, kept))
    if scan_plan.sequences.fates is not None:
        console.print(_documents_table(scan_plan.sequences.fates))
    console.print(_time_table(cost))
    console.print(_size_table(cost))
    say(console, f"in {scan_plan.run.path}")
    if cost.measured_on != cost.device:
        say(
            console,
            f"This machine has no {cost.device}: times and memory were measured on its "
            f"{cost.measured_on} in {cost.measured_in}.",
        )
    for note in scan_plan.notes:
        say(console, f"{scan_plan.run.run_id}: {note}")
    _print_bad_rows(console, scan_plan.bad_rows)


def _print_values(console: Console, plan: Plan, parsed_scan: Scan, every: bool) -> None:
    """Print the fields that a scan sets, with their meaning; with `every`, the others too."""
    from jobs.cost import meanings
    from schemas.values import in_toml

    table = Table(
        "field",
        Column("value", overflow="fold"),
        "meaning",
        title=f"run {plan.run.run_id}",
        title_justify="left",
    )
    rows = meanings(plan.scan)
    rows.append(("input.family", plan.scan.input.family, plan.sequences.family.meaning))
    rows += [
        (f"input.{option}", value if isinstance(value, str) else in_toml(value), "")
        for option, value in plan.sequences.options.items()
    ]
    set_here = {*parsed_scan.model_fields_set, "input.family"}
    set_here |= {f"input.{option}" for option in parsed_scan.input.options}
    hidden = 0
    for row in rows:
        if every or row[0] in set_here:
            table.add_row(*(escape(printable(cell)) for cell in row))
        else:
            hidden += 1
    console.print(table)
    if hidden:
        say(console, f"{counted(hidden, 'more field')} with the default; --all shows them")


def _run_table(plan: Plan, cost: Cost, kept: KeptIndex | None) -> Table:
    """What will run, and on what."""
    table = Table(
        "cost",
        Column("", overflow="fold"),
        title="measured on this machine, extrapolated to the scan",
        title_justify="left",
    )
    replicas = "in this process" if not cost.replicas else counted(cost.replicas, "replica")
    table.add_row("device", f"{cost.device}, {cost.precision}, {replicas}")
    table.add_row("batches", counted(cost.batch_size, "sequence"))
    done = plan.done
    table.add_row("shards", f"{plan.manifest.shards:,}{f', {done:,} done' if done else ''}")
    table.add_row("sequences", f"{len(plan.sequences):,}")
    table.add_row("tokens", f"{plan.tokens:,} through the model")
    index = plan.sequences.index
    if index is not None:
        tokens = int(index.n_tokens[index.n_tokens > 0].sum())
        place = "not kept (a data set of the Hub)" if kept is None else f"kept as {kept.file}"
        documents = counted(index.documents, "document")
        corpus = f"{documents} read, {counted(tokens, 'token')}; index {place}"
        table.add_row("corpus", escape(printable(corpus)))
    memory = f"{_bytes(cost.peak_memory)} at the peak of one replica"
    if cost.gpu_memory:
        memory += f", {_bytes(cost.gpu_memory)} on the GPU"
    table.add_row("memory", memory)
    return table


def _documents_table(fates: Fates) -> Table:
    """What becomes of the corpus's documents, by part."""
    kinds = list(fates.all)
    numbers = [Column(kind, justify="right") for kind in ("all", *kinds)]
    table = Table(Column("documents", overflow="fold"), *numbers)
    parts = {printable(name) or "of no part": counts for name, counts in fates.parts.items()}
    for name, counts in (parts if len(parts) > 1 else {}).items():
        cells = [f"{counts.get(kind, 0):,}" for kind in kinds]
        table.add_row(escape(name), f"{sum(counts.values()):,}", *cells)
    total = [f"{count:,}" for count in fates.all.values()]
    table.add_row("all", f"{sum(fates.all.values()):,}", *total)
    return table


def _time_table(cost: Cost) -> Table:
    """Speed and time of every intervention and of all of them."""
    from jobs.console import duration

    table = Table(
        Column("intervention", overflow="fold"),
        "engine",
        Column("tokens/s", justify="right"),
        Column("time", justify="right"),
    )
    for one in cost.interventions:
        speed = f"{one.tokens_per_second:,.0f}"
        method = one.method
        engine = f"{method.engine}, {method.attention}"
        if method.built_layers:
            engine += f", patterns built in {counted(len(method.built_layers), 'layer')}"
        table.add_row(method.intervention, engine, speed, f"about {duration(one.seconds)}")
    if len(cost.interventions) > 1:
        # Every intervention reads the same tokens, so this is the mean over tokens.
        tokens = sum(one.tokens_per_second * one.seconds for one in cost.interventions)
        speed = f"{tokens / cost.seconds:,.0f}"
        table.add_row("all", "", speed, f"about {duration(cost.seconds)}")
    return table


def _size_table(cost: Cost) -> Table:
    """Rows and bytes of every table, and of all of them."""
    table = Table(
        "table",
        Column("rows", justify="right"),
        Column("on disk", justify="right"),
    )
    for one in cost.tables:
        table.add_row(one.table, f"{one.rows:,}", f"about {_bytes(one.bytes)}")
    table.add_row("all", "", f"about {_bytes(cost.bytes_on_disk)}")
    return table


def scan(
    scan_files: Annotated[
        list[Path], typer.Argument(metavar="SCAN", help="Scan files (TOML), run one after another.")
    ],
    overrides: Overrides = None,
    run: Annotated[
        str | None,
        typer.Option(help="Go on with the run of this id; refused if the scan differs."),
    ] = None,
    replicas: LocalReplicas = 1,
    cores: Cores = 0,
    device: DeviceOption = "auto",
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Ray cluster that this machine belongs to. Default: Ray is started here.",
        ),
    ] = None,
    verify: Verify = False,
    allow_other_code: AllowOtherCode = False,
    new: New = False,
) -> None:
    """Run scans. A run that was stopped, however it was, goes on with the same command."""
    from schemas.scan import load_scan

    if new and run is not None:
        raise RunError(f"--new starts a run, --run {run} goes on with one; leave out one")

    # Read all of them first: the imports below take seconds, and the first scan may take hours.
    scans = [(file, load_scan(file, overrides or ())) for file in scan_files]
    from jobs.plan import make_plan, prepare_run
    from jobs.progress import watch_index
    from jobs.ray_cluster import Resources
    from jobs.run_loop import run_to_end
    from jobs.scan_runs import ScanCommand
    from workers.process import prepare_process

    prepare_process()
    console = Console(highlight=False, stderr=True)
    resources = Resources(replicas, cores, device, address)
    resources.check_here()
    failures: list[Failure] = []
    ways: list[str] = []
    for scan_file, parsed_scan in scans:
        command = ScanCommand.typed(scan_file, overrides or ())
        try:
            with watch_index(console) as watch:
                scan_plan = make_plan(parsed_scan, scan_file.stem, run, watch, command, new)
        except HeadcountError as error:
            raise type(error)(f"{scan_file}: {error}" if len(scans) > 1 else str(error)) from None
        scan_text = scan_file.read_text(encoding="utf-8")
        for override in overrides or ():
            scan_text += f"\n# --set {override}"
        prepare_run(scan_plan, scan_text)
        if new:
            # The same command would start one more.
            say(console, f"{scan_plan.run.run_id}: another run; {command.text()} goes on with it")
        _print_bad_rows(console, scan_plan.bad_rows)
        failed = run_to_end(
            scan_plan, resources, console, verify, allow_other_code=allow_other_code
        )
        if failed:
            failures += failed
            ways.append(f"{command.text()} goes on, {scan_plan.way}")
        print(scan_plan.run.path)
    if failures:
        raise RunError(
            f"{counted(len(failures), 'shard')} failed, all others are committed; mend the cause, "
            f"then {'; '.join(ways)}"
        )


def rm(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run directories, or their addresses in a store."),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete runs. Of a run in a store, first make sure that nobody is at work on it: a store has no
    locks.
    """
    from jobs.removal import check_removable, describe_run, remove

    console = Console(highlight=False, stderr=True)
    found = [check_removable(location) for location in runs]
    if not yes and not sys.stdin.isatty():
        raise RunError(
            "nobody can be asked here whether to delete; "
            f"{shlex.join(['headcount', 'rm', *runs, '--yes'])} does not ask"
        )
    for run in found:
        if yes or typer.confirm(f"Delete {describe_run(run)}?", err=True):
            remove(run)
            say(console, f"deleted {run.path}")


def compact(
    path: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run directory, or one that holds runs; a path or an address."
        ),
    ],
    rows: Annotated[int, typer.Option(min=1, help="Rows of heads in a merged file.")] = 2_000_000,
) -> None:
    """Merge the small files of a run into few large ones. If it is stopped, the same command goes on.

    A store has no locks: do not compact a run there during a scan or another compaction of it.
    """
    from jobs.compaction import compact
    from jobs.console import duration
    from schemas.places import absolute
    from schemas.run_directory import find_runs

    console = Console(highlight=False, stderr=True)
    problems: list[str] = []
    for run in find_runs(absolute(path)):
        try:
            result = compact(run, rows, lambda line: say(console, line))
        except RunError as error:
            problems += [str(error)]
            continue
        before = result.before.files
        verb = "is" if before == 1 else "are"
        files = f"{counted(before, 'file')} {verb} now {result.after.files:,}"
        size = f"{_bytes(result.before.bytes)} are now {_bytes(result.after.bytes)}"
        say(console, f"{run.run_id}: {files}, {size}, in {duration(result.seconds)}")
        problems += [f"{run.run_id}: {problem}" for problem in result.problems]
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
    # The libraries take seconds to load, and so does every model.
    with console.status("loading the libraries, then measuring with every bundled model"):
        for check in examine():
            healthy &= check.ok
            say(console, f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<16} {check.found}")
            if not check.ok and check.advice:
                say(console, f"{'':<23}{check.advice}")
            sys.stdout.flush()
    if not healthy:
        sys.exit(1)


def _compare_kernel(console: Console) -> None:
    """Print how the GPU's kernel and the tiles differ in every shape and precision."""
    from jobs.kernel_table import COMPARISON_HEAD, compare_kernel, comparison_line, kernel_obstacle

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


def _print_bad_rows(console: Console, problems: list[str], most: int = 5) -> None:
    if not problems:
        return
    more = f" and {len(problems) - most:,} more" if len(problems) > most else ""
    rows = counted(len(problems), "bad row")
    say(console, f"{rows} left out: {', '.join(problems[:most])}{more}")
    say(console, "Lines and rows are counted from 1 here, and from 0 in sequences.row.")


def _bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
