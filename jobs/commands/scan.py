"""The subcommands `init`, `plan`, `scan`, `rm`, `compact` and `doctor`.

Torch and Ray take seconds to import, so they are imported inside the functions that need them.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from typer.core import TyperCommand

from headcount.jobs.console import in_bytes, say
from headcount.schemas.errors import HeadcountError, RunError, ScanError, counted, printable
from headcount.schemas.packages import PACKAGE

if TYPE_CHECKING:
    from headcount.jobs.corpus.estimate import CorpusEstimate
    from headcount.jobs.plan.cost import Cost
    from headcount.jobs.plan.plan import Plan
    from headcount.jobs.plan.scan_runs import ScanCommand
    from headcount.jobs.upkeep.merged_files import MergeGroups
    from headcount.schemas.files.commit import Failure
    from headcount.schemas.files.document_fates import Fates
    from headcount.schemas.scans.scan import Scan

commands = typer.Typer(rich_markup_mode=None)

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a field of the scan."),
]
Replicas = Annotated[
    int, typer.Option(min=1, help="Number of replicas. Each is one model in a process of its own.")
]
LocalReplicas = Annotated[
    int,
    typer.Option(
        min=0,
        help="Number of replicas. Each is one model in a process of its own. 0 measures in this "
        "process, without Ray.",
    ),
]
MaybeReplicas = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Number of replicas. Each is one model in a process of its own. 0 measures in this "
        "process, without Ray. By default one for each GPU here, 0 without a GPU, and 1 on a "
        "cluster.",
    ),
]
Cores = Annotated[
    int,
    typer.Option(
        min=0,
        help="CPU cores of each replica. 0 divides the cores of this machine; on a cluster it "
        "means 1.",
    ),
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(help="Device of the replicas. auto uses GPUs if there are enough."),
]

New = Annotated[
    bool,
    typer.Option(
        "--new",
        help="Start another run of the scan, NAME-HASH-2, -3 …, beside the existing runs.",
    ),
]
AllowOtherCode = Annotated[
    bool,
    typer.Option(
        "--allow-other-code",
        help="Continue a run that other measuring code began. Every shard records which code "
        "measured it.",
    ),
]

Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Read every file of the shards that are done, and measure damaged shards again.",
    ),
]

VerifyCorpus = Annotated[
    bool,
    typer.Option(
        "--verify-corpus",
        help="Read the texts of the corpus again and compare them with their tokens; prepare again "
        "what differs.",
    ),
]

FIRST_SCAN = PACKAGE / "jobs" / "scans" / "first.toml"
"""What `init` writes."""

MOST_BAD_ROWS = 5
"""Bad rows that are named; the others are counted."""


class CommandOfAScan(TyperCommand):
    """A command that says how a field of a scan is set, if somebody writes it as an option."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Read the command line."""
        names = [name for each in self.params for name in (*each.opts, *each.secondary_opts)]
        for word, following in zip(args, [*args[1:], "VALUE"], strict=False):
            flag, _, value = word.partition("=")
            if not flag.startswith("--") or flag in (*names, *ctx.help_option_names):
                continue
            # Only a mistake waits for this import.
            from headcount.schemas.scans.scan import Scan

            key = flag.removeprefix("--").replace("-", "_")
            if key.partition(".")[0] in Scan.model_fields:
                advice = shlex.join(["--set", f"{key}={value or following}"])
                raise ScanError(f"{flag}: a field of a scan, and no option; write {advice}")
        return super().parse_args(ctx, args)


@commands.command()
def init(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The scan file (TOML) to write.")
    ] = Path("scan.toml"),
) -> None:
    """Write a first scan file, of a small model that comes with headcount."""
    text = FIRST_SCAN.read_text(encoding="utf-8")
    if file.suffix.lower() != ".toml":
        raise ScanError(f"{file}: expected a name that ends in .toml")
    try:
        # Never over a file that is there.
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise ScanError(f"{file}: is there already; say another name, or delete it") from None
    except OSError as error:
        raise ScanError(f"{file}: cannot be written ({error.strerror})") from None
    print(f"{file}: a first scan; it takes seconds. Next:")
    print(f"  {shlex.join(['headcount', 'scan', str(file)])}")
    print("  headcount query runs induction_heads")


@commands.command(cls=CommandOfAScan)
def plan(
    scan_file: Annotated[Path, typer.Argument(metavar="SCAN", help="A scan file (TOML).")],
    overrides: Overrides = None,
    replicas: MaybeReplicas = None,
    device: DeviceOption = "auto",
    new: New = False,
    every: Annotated[
        bool, typer.Option("--all", help="Also print the fields that have their default.")
    ] = False,
) -> None:
    """Print what a scan measures and what it will cost.

    The cost is measured here, with a few batches of each intervention. A corpus that is not
    prepared is estimated by its first portion. Every field of the scan is printed with its meaning.
    """
    from headcount.jobs.plan.checkpoints import scans_of

    # A mistake in the scan file shows before the seconds that the imports below take.
    scans = scans_of(scan_file, overrides or ())
    parsed_scan = scans[0].scan
    from headcount.jobs.plan.cost import Rehearsal, threads_of
    from headcount.jobs.plan.identity import begun_precisions
    from headcount.jobs.plan.plan import estimated_plan, find_run
    from headcount.jobs.plan.resolved_scan import resolve
    from headcount.jobs.plan.scan_runs import ScanCommand
    from headcount.jobs.resources import Resources
    from headcount.schemas.files.run_directory import RunDirectory
    from headcount.workers.interventions.settlement import check_begun
    from headcount.workers.process import prepare_process

    if replicas is None:
        # A GPU that is named may be one of a cluster, which this machine only plans for.
        replicas = Resources.asked_for(None, 0, device, None).replicas or int(device == "cuda")
    # As many threads as one replica of the scan would have, or the cost would be another one.
    prepare_process(threads_of(device, replicas))
    command = ScanCommand.typed(scan_file, scans[0].overrides)
    resolved = resolve(parsed_scan)
    first_run = RunDirectory.of(parsed_scan.out, resolved.scan.run_id(scan_file.stem))
    run = find_run(resolved, first_run, command, new)
    # A scan that cannot run is refused before any text is tokenised.
    rehearsal = Rehearsal(resolved.scan, resolved.info, device, replicas)
    precision = rehearsal.settlement.precision
    if run.manifest_file.is_file():
        check_begun(begun_precisions(run), precision, run.run_id, rehearsal.device)
    scan_plan = estimated_plan(resolved, run, command)
    console = Console(highlight=False)
    _print_values(console, scan_plan, parsed_scan, every)
    _print_cost(console, scan_plan, rehearsal.measure(scan_plan))
    for note in scan_plan.notes:
        say(console, f"{scan_plan.run.run_id}: {note}")
    _print_bad_rows(console, scan_plan.bad_rows)
    if len(scans) > 1:
        say(console, f"This is the first of {len(scans)} checkpoints, which are a run each.")


def _print_values(console: Console, plan: Plan, parsed_scan: Scan, every: bool) -> None:
    """Print the fields that a scan sets, with their meaning; with `every`, also the others."""
    from headcount.jobs.plan.cost import field_meanings
    from headcount.schemas.scans.values import in_toml

    table = Table(
        "field",
        Column("value", overflow="fold"),
        "meaning",
        title=f"run {plan.run.run_id}",
        title_justify="left",
    )
    rows = field_meanings(plan.scan)
    rows.append(("input.family", plan.scan.input.family, plan.sequences.family.meaning))
    rows += [
        (f"input.{option}", value if isinstance(value, str) else in_toml(value), "")
        for option, value in plan.sequences.options.items()
    ]
    fields_set = {*parsed_scan.model_fields_set, "input.family"}
    fields_set |= {f"input.{option}" for option in parsed_scan.input.options}
    shown_rows = [row for row in rows if every or row[0] in fields_set]
    for row in shown_rows:
        # A value may hold brackets, which Rich would read as markup.
        table.add_row(*(escape(printable(cell)) for cell in row))
    console.print(table)
    hidden = len(rows) - len(shown_rows)
    if hidden:
        say(console, f"{counted(hidden, 'more field')} with the default; --all shows them")


def _print_cost(console: Console, plan: Plan, cost: Cost) -> None:
    """Print what the scan will measure, how long it takes and what it writes."""
    console.print(_run_table(plan, cost))
    if plan.estimate is None and plan.sequences.fates is not None:
        console.print(_documents_table(plan.sequences.fates))
    console.print(_time_table(cost))
    console.print(_size_table(cost))
    say(console, f"in {plan.run.path}")
    if cost.measured_on != cost.device:
        # The scan may run on a cluster with GPUs that this machine does not have.
        say(
            console,
            f"This machine has no {cost.device}: times and memory were measured on its "
            f"{cost.measured_on} in {cost.measured_in}.",
        )


def _run_table(plan: Plan, cost: Cost) -> Table:
    """What the scan will measure, and on which device."""
    table = Table(
        "cost",
        Column("", overflow="fold"),
        title="measured on this machine, extrapolated to the scan",
        title_justify="left",
    )
    replicas = "in this process" if not cost.replicas else counted(cost.replicas, "replica")
    table.add_row("device", f"{cost.device}, {cost.precision}, {replicas}")
    table.add_row("batches", counted(cost.batch_size, "sequence"))
    shards_done = plan.shards_done
    done_note = f", {shards_done:,} done" if shards_done else ""
    estimate, index = plan.estimate, plan.sequences.index
    roughly = "" if estimate is None else "at least " if estimate.is_least else "about "
    table.add_row("shards", f"{roughly}{plan.manifest.shards:,}{done_note}")
    table.add_row("sequences", f"{roughly}{plan.manifest.sequences:,}")
    table.add_row("tokens", f"{roughly}{plan.tokens:,} through the model")
    unmeasured = 0
    if estimate is not None:
        unmeasured = estimate.unmeasured
        for line in _estimate_lines(estimate, roughly):
            table.add_row("corpus", line)
    elif index is not None:
        unmeasured = index.unmeasured
        documents = counted(index.documents, "document")
        tokens = counted(index.tokens, "token")
        corpus = f"{tokens} of {documents} are prepared in {index.store.folder}"
        table.add_row("corpus", escape(printable(corpus)))
    if unmeasured:
        table.add_row("", f"{roughly}{unmeasured:,} tokens at portions' ends are not measured")
    memory = f"{in_bytes(cost.peak_memory)} at the peak of one replica"
    if cost.gpu_memory:
        memory += f", {in_bytes(cost.gpu_memory)} on the GPU"
    table.add_row("memory", memory)
    return table


def _estimate_lines(estimate: CorpusEstimate, roughly: str) -> list[str]:
    """What a corpus probably holds, what of it is prepared, and what the rest takes."""
    from headcount.jobs.console import duration

    holds = f"{roughly}{estimate.documents:,} documents, {estimate.tokens:,} tokens"
    if estimate.bad:
        holds += f", {counted(estimate.bad, 'bad row')}"
    missing = (
        f"{counted(estimate.tokens_there, 'token')} prepared, "
        f"{roughly}{estimate.tokens_missing:,} tokens to prepare"
    )
    takes = f"about {duration(estimate.seconds)} on this machine, {in_bytes(estimate.bytes)}"
    return [f"{holds} (by those prepared)", f"{missing}: {takes}"]


def _documents_table(fates: Fates) -> Table:
    """How many documents of the corpus have which fate: a row for each part, and one for all."""
    fate_names = list(fates.all)
    columns = [Column(name, justify="right") for name in ("all", *fate_names)]
    table = Table(Column("documents", overflow="fold"), *columns)
    if len(fates.parts) > 1:
        for part, counts in fates.parts.items():
            cells = [f"{counts.get(name, 0):,}" for name in fate_names]
            label = escape(printable(part) or "of no subset")
            table.add_row(label, f"{sum(counts.values()):,}", *cells)
    totals = [f"{count:,}" for count in fates.all.values()]
    table.add_row("all", f"{sum(fates.all.values()):,}", *totals)
    return table


def _time_table(cost: Cost) -> Table:
    """Speed and time of every intervention and of all of them."""
    from headcount.jobs.console import duration

    table = Table(
        Column("intervention", overflow="fold"),
        "engine",
        Column("tokens/s", justify="right"),
        Column("time", justify="right"),
    )
    for intervention_cost in cost.interventions:
        speed = f"{intervention_cost.tokens_per_second:,.0f}"
        time = f"about {duration(intervention_cost.seconds)}"
        method = intervention_cost.method
        engine = f"{method.engine}, {method.attention}"
        if method.built_layers:
            engine += f", patterns built in {counted(len(method.built_layers), 'layer')}"
        table.add_row(method.intervention, engine, speed, time)
    if len(cost.interventions) > 1:
        # Every intervention reads the same tokens, so this is the mean over tokens.
        tokens = sum(each.tokens_per_second * each.seconds for each in cost.interventions)
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
    for table_cost in cost.tables:
        size = f"about {in_bytes(table_cost.bytes)}"
        table.add_row(table_cost.table, f"{table_cost.rows:,}", size)
    table.add_row("all", "", f"about {in_bytes(cost.bytes_on_disk)}")
    return table


@commands.command(cls=CommandOfAScan)
def scan(
    scan_files: Annotated[
        list[Path], typer.Argument(metavar="SCAN", help="Scan files (TOML), run one after another.")
    ],
    overrides: Overrides = None,
    run: Annotated[
        str | None,
        typer.Option(help="Continue the run with this id. The scan must measure the same."),
    ] = None,
    replicas: MaybeReplicas = None,
    cores: Cores = 0,
    device: DeviceOption = "auto",
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Ray cluster that this machine belongs to. By default Ray is started here.",
        ),
    ] = None,
    verify: Verify = False,
    verify_corpus: VerifyCorpus = False,
    allow_other_code: AllowOtherCode = False,
    new: New = False,
    merge: Annotated[
        bool,
        typer.Option(
            help="When all shards of a run on a disk are done, merge them if they have a million "
            "rows, and write roll-ups for dashboards.",
        ),
    ] = True,
) -> None:
    """Run scans. If a run was stopped or killed, the same command continues it."""
    from headcount.jobs.plan.checkpoints import scans_of
    from headcount.jobs.upkeep import phases

    if new and run is not None:
        raise RunError(f"--new starts a run, --run {run} continues one; leave out one")

    # Read all files first: the imports below take seconds, and the first scan may take hours.
    scans = [scan for file in scan_files for scan in scans_of(file, overrides or ())]
    from headcount.jobs.corpus.preparation import Preparation
    from headcount.jobs.plan.plan import make_plan, prepare_run
    from headcount.jobs.plan.scan_runs import ScanCommand
    from headcount.jobs.resources import Resources
    from headcount.jobs.run.loop import run_to_end
    from headcount.jobs.run.progress import watch_index
    from headcount.jobs.upkeep.compaction import merge_finished
    from headcount.workers.process import prepare_process

    prepare_process()
    console = Console(highlight=False, stderr=True)
    resources = Resources.asked_for(replicas, cores, device, address)
    resources.check_here()
    failures: list[Failure] = []
    advice: list[str] = []
    for requested in scans:
        scan_file = requested.file
        with phases.taken():
            command = ScanCommand.typed(scan_file, requested.overrides)
            phases.note("loading the model")
            with _naming_the_scan(command, len(scans)), watch_index(console) as watch:
                preparation = Preparation(
                    resources, watch, verify_corpus, lambda line: say(console, line)
                )
                scan_plan = make_plan(
                    requested.scan, scan_file.stem, run, preparation, command, new
                )
            # The run keeps the file as it is, and what was set as comments.
            text = scan_file.read_text(encoding="utf-8")
            text += "".join(f"\n# --set {override}" for override in requested.overrides)
            prepare_run(scan_plan, text)
            if new:
                # The same command would start one more.
                say(console, f"{scan_plan.run.run_id}: another run; {command.text()} continues it")
            _print_bad_rows(console, scan_plan.bad_rows)
            run_failures = run_to_end(
                scan_plan, resources, console, verify, allow_other_code=allow_other_code
            )
            # The next scan is run all the same: its cause may be another.
            if run_failures:
                failures += run_failures
                advice.append(f"{command.text()} continues it, {scan_plan.alternative}")
            elif merge:
                phases.note("compacting")
                merge_finished(scan_plan.run, _merging(0, address), lambda line: say(console, line))
            print(scan_plan.run.path)
    if failures:
        raise RunError(
            f"{counted(len(failures), 'shard')} failed, all others are committed; mend the cause, "
            f"then {'; '.join(advice)}"
        )


@contextmanager
def _naming_the_scan(command: ScanCommand, scans: int) -> Iterator[None]:
    """If there are several scans, errors say which one they are about."""
    try:
        yield
    except HeadcountError as error:
        name = f"{shlex.join(command.words)}: " if scans > 1 else ""
        raise type(error)(f"{name}{error}") from None


@commands.command()
def rm(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run directories, or their addresses in a store."),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
) -> None:
    """Delete runs.

    A store has no locks: before you delete a run there, make sure that nobody is at work on it.
    """
    from headcount.jobs.upkeep.removal import check_removable, describe_run, remove

    console = Console(highlight=False, stderr=True)
    # All are checked before the first is deleted.
    run_directories = [check_removable(location) for location in runs]
    if not yes and not sys.stdin.isatty():
        raise RunError(
            "headcount rm asks before it deletes, and stdin is no terminal; "
            f"{shlex.join(['headcount', 'rm', *runs, '--yes'])} does not ask"
        )
    for run in run_directories:
        if yes or typer.confirm(f"Delete {describe_run(run)}?", err=True):
            remove(run)
            say(console, f"deleted {run.path}")


@commands.command()
def compact(
    path: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run directory, or one that holds runs; a path or an address."
        ),
    ],
    processes: Annotated[
        int,
        typer.Option(
            min=0,
            help="Processes that merge, each with about 1 GB of memory. 0: one for each core, as "
            "far as the memory goes.",
        ),
    ] = 0,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Merge on the cores of this Ray cluster, which this machine belongs to and whose "
            "machines all reach the run.",
        ),
    ] = None,
) -> None:
    """Merge the small files of a run into few large ones.

    If it is stopped or killed, the same command continues. In a store, what was merged stays for an
    hour, until the same command deletes it. A store has no locks: do not compact a run there during
    a scan of it.
    """
    from headcount.jobs.console import duration
    from headcount.jobs.upkeep.compaction import compact
    from headcount.schemas.files.places import absolute
    from headcount.schemas.files.run_directory import find_runs

    if address is not None and processes:
        raise RunError(
            f"--processes {processes} merges on this machine, --address {address} on a cluster; "
            "leave out one"
        )
    merge_groups = _merging(processes, address)
    console = Console(highlight=False, stderr=True)
    problems: list[str] = []
    for run in find_runs(absolute(path)):
        try:
            result = compact(run, tell=lambda line: say(console, line), merge_groups=merge_groups)
        except RunError as error:
            # One run that cannot be compacted does not keep the others from it.
            problems.append(str(error))
            continue
        files_before = result.before.files
        verb = "is" if files_before == 1 else "are"
        files = f"{counted(files_before, 'file')} {verb} now {result.after.files:,}"
        size = f"{in_bytes(result.before.bytes)} are now {in_bytes(result.after.bytes)}"
        say(console, f"{run.run_id}: {files}, {size}, in {duration(result.seconds)}")
        problems += [f"{run.run_id}: {problem}" for problem in result.problems]
        print(run.path)
    if problems:
        raise RunError("\n".join(problems))


def _merging(processes: int, address: str | None) -> MergeGroups:
    """How a compaction merges: in processes of this machine, or on a cluster."""
    from headcount.jobs.upkeep.merge_workers import merged_by_processes, merged_by_tasks

    if address is not None:
        return partial(merged_by_tasks, address)
    return partial(merged_by_processes, processes)


@commands.command()
def doctor(
    out: Annotated[
        str | None,
        typer.Argument(
            metavar="OUT", help="Check also whether runs can be written to this path or store."
        ),
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"],
        typer.Option(
            help="cpu checks the installation. cuda compares the GPU's kernel with the tiles of "
            "the CPU's code, in all shapes."
        ),
    ] = "cpu",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Say instead how this model would be measured: its engine, the attention of its "
            "layers, and the statistics that are NULL.",
        ),
    ] = None,
) -> None:
    """Check that this machine can run scans, and print what it has."""
    if model is not None:
        _report_model(Console(highlight=False), model)
        return
    if device == "cuda":
        _compare_kernel(Console(highlight=False))
        return
    from headcount.jobs.commands.doctor import examine

    console = Console(highlight=False)
    healthy = True
    # Loading the libraries takes seconds, and so does every model.
    with console.status("loading the libraries, then measuring with every bundled model"):
        for check in examine(out):
            healthy &= check.ok
            say(console, f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<16} {check.result}")
            if not check.ok and check.advice:
                say(console, f"{'':<23}{check.advice}")
            # The next check may take seconds.
            sys.stdout.flush()
    if not healthy:
        sys.exit(1)


def _report_model(console: Console, name: str) -> None:
    """Print how a model would be measured."""
    from headcount.jobs.commands.model_report import report_model
    from headcount.workers.process import prepare_process

    prepare_process()
    # A large model takes minutes to load.
    with console.status("loading the model, then measuring two short sequences"):
        for word, text in report_model(name):
            say(console, f"{word:<10} {text}")


def _compare_kernel(console: Console) -> None:
    """Print how much the GPU's kernel and the tiles differ in every shape and precision."""
    from headcount.jobs.commands.kernel_table import (
        COMPARISON_HEAD,
        compare_kernel,
        comparison_line,
        kernel_obstacle,
    )

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


def _print_bad_rows(console: Console, problems: list[str]) -> None:
    """Name the first few rows of the corpus that cannot be read."""
    if not problems:
        return
    hidden = len(problems) - MOST_BAD_ROWS
    more = f" and {hidden:,} more" if hidden > 0 else ""
    rows = counted(len(problems), "bad row")
    say(console, f"{rows} left out: {', '.join(problems[:MOST_BAD_ROWS])}{more}")
    say(console, "Lines and rows are counted from 1 here, and from 0 in sequences.row.")
