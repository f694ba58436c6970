"""The subcommands `init`, `plan` and `scan`.

Torch and Ray take seconds to import, so they are imported inside the functions that need them.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from headcount.jobs.commands.options import (
    AllowOtherCode,
    ClusterAddress,
    CommandOfAScan,
    Cores,
    DeviceOption,
    MaybeReplicas,
    New,
    Overrides,
    Plugins,
    ScanFile,
    SkipDuplicates,
    Verify,
    VerifyCorpus,
)
from headcount.jobs.console import duration, in_bytes, print_table, say, tell
from headcount.schemas.errors import HeadcountError, RunError, ScanError, counted, printable
from headcount.schemas.packages import PACKAGE

if TYPE_CHECKING:
    from headcount.jobs.bars import Show
    from headcount.jobs.plan.cost import Cost, Rehearsal
    from headcount.jobs.plan.plan import Plan
    from headcount.jobs.plan.resolved_scan import ResolvedScan
    from headcount.jobs.plan.scan_files import ScanOfCheckpoint
    from headcount.jobs.resources import Device
    from headcount.schemas.files.commit import Failure
    from headcount.schemas.files.document_fates import Fates
    from headcount.schemas.files.run_directory import RunDirectory
    from headcount.schemas.scans.scan import Scan

commands = typer.Typer(rich_markup_mode=None)

FIRST_SCAN = PACKAGE / "jobs" / "scans" / "first.toml"  # what `init` writes
MOST_BAD_ROWS = 5  # bad rows that are named; the others are counted


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
    scan_file: ScanFile,
    overrides: Overrides = None,
    plugins: Plugins = None,
    replicas: MaybeReplicas = None,
    device: DeviceOption = "auto",
    new: New = False,
    skip_duplicates: SkipDuplicates = False,
    every: Annotated[
        bool, typer.Option("--all", help="Also print the fields that have their default.")
    ] = False,
) -> None:
    """Print what a scan measures and what it will cost.

    The cost is measured here, with a batch of each intervention. A corpus that is not prepared is
    estimated by its first portion. Every field of the scan is printed with its meaning.
    """
    from headcount.jobs.plan.same_weights import without_duplicates
    from headcount.jobs.plan.scan_files import scans_of

    # A mistake in the scan file shows before the seconds that the imports below take.
    scans = without_duplicates(scans_of(scan_file, overrides or (), plugins or ()), skip_duplicates)
    parsed_scan = scans[0].scan
    from headcount.jobs.bars import bar, waiting

    console, progress_console = Console(highlight=False), Console(highlight=False, stderr=True)
    with waiting(progress_console, "starting"):
        from headcount.jobs.plan.cost import replicas_at_once, threads_of
        from headcount.jobs.plan.plan import check_directories
        from headcount.jobs.resources import Resources
        from headcount.workers.process import prepare_process

    if replicas is None:
        # A GPU that is named may be one of a cluster, which this machine only plans for.
        replicas = Resources.asked_for(None, 0, device, None).replicas or int(device == "cuda")
    # As many threads as one replica of the scan would have, or the cost would be another one.
    prepare_process(threads_of(device, replicas))
    check_directories(parsed_scan)
    priced = _Prices(scan_file.stem, device, replicas, new)
    with bar(progress_console, "") as show:
        scan_plan = priced.plan(parsed_scan, lambda words: show(words, None))
    _print_fields(console, scan_plan, parsed_scan, every)
    with bar(progress_console, "measuring a batch of each intervention") as show:
        cost = priced.cost(scan_plan, lambda words: show(words, None))
    table = Table(
        "cost",
        Column("", overflow="fold"),
        title="measured on this machine, taken times the scan's batches",
        title_justify="left",
    )
    for name, value in _cost_rows(scan_plan, cost):
        table.add_row(escape(printable(name)), escape(printable(value)))
    console.print(table)
    if scan_plan.estimate is None and scan_plan.sequences.fates is not None:
        console.print(_documents_table(scan_plan.sequences.fates))
    say(console, f"in {scan_plan.run.path}")
    if not cost.is_of_device:
        # The scan may run on a cluster with GPUs that this machine does not have.
        say(
            console,
            f"This machine has no {cost.device}: speed and memory are those of one replica, "
            f"measured on its {cost.measured_on} in {cost.measured_in}. How long a {cost.device} "
            f"takes, headcount plan says on a machine that has one.",
        )
    elif replicas > (most := replicas_at_once(device, replicas)):
        say(console, f"Times are those of this machine, where {most} replicas can work at once.")
    for note in scan_plan.notes:
        say(console, f"{scan_plan.run.run_id}: {note}")
    _print_corpus(console, scan_plan)
    if scans[1:]:
        with bar(progress_console, "checkpoints") as show:
            rows = priced.rows(scans, scan_plan, cost, show)
        print_table(rows)


class _Prices:
    """Plans of checkpoints, and what each costs."""

    def __init__(self, name: str, device: Device, replicas: int, new: bool) -> None:
        self.name, self.device, self.replicas, self.new = name, device, replicas, new
        self.rehearsal: Rehearsal | None = None  # of the checkpoint that is planned now

    def plan(self, scan: Scan, tell: Callable[[str], None]) -> Plan:
        """Plan a scan; one that cannot run is refused before any text is tokenised."""
        from headcount.jobs.plan.begun_with import begun_precisions
        from headcount.jobs.plan.cost import Rehearsal
        from headcount.jobs.plan.plan import plan_run
        from headcount.workers.interventions.settlement import check_begun

        tell("planning")
        resolved, run, alike = self._found(scan)
        tell("loading the model")
        self.rehearsal = Rehearsal(resolved.scan, resolved.info, self.device, self.replicas)
        if run.manifest_file.is_file():
            precision = self.rehearsal.settlement.precision
            check_begun(begun_precisions(run), precision, run.run_id, self.rehearsal.device)
        tell("planning")
        return plan_run(resolved, run, is_estimate=True, alike=alike)

    def cost(self, plan: Plan, tell: Callable[[str], None]) -> Cost:
        """Measure what the scan costs that was planned last."""
        assert self.rehearsal is not None
        return self.rehearsal.measure(plan, tell)

    def _found(self, scan: Scan) -> tuple[ResolvedScan, RunDirectory, tuple[RunDirectory, ...]]:
        from headcount.jobs.plan.identity import find_run
        from headcount.jobs.plan.resolved_scan import resolve
        from headcount.schemas.files.run_directory import RunDirectory

        resolved = resolve(scan)
        first_run = RunDirectory.of(scan.out, resolved.run_id(self.name))
        run, alike = find_run(resolved, first_run, self.new)
        return resolved, run, alike

    def rows(
        self, scans: Sequence[ScanOfCheckpoint], first_plan: Plan, first_cost: Cost, show: Show
    ) -> list[tuple[str, ...]]:
        """A row for each checkpoint, which is a run, and one for all, below their headings.

        One with the sizes of the first costs what that costs. Another one is measured. Those of the
        Hub count as the first: a plan fetches no more than one of them.
        """
        from headcount.jobs.plan.cost import has_same_sizes
        from headcount.jobs.plan.plan import plan_run

        rows: list[tuple[str, ...]] = [("checkpoint", "run", "shards", "time", "on disk")]
        total_seconds = total_bytes = 0.0
        for number, checkpoint in enumerate(scans, start=1):
            scan, cost = checkpoint.scan, first_cost
            run_id, shards = "", f"{first_plan.manifest.shards:,}"

            def tell(words: str, number: int = number) -> None:
                show(f"{number} of {len(scans)}: {words}", (number - 1) / len(scans))

            is_here = scan.model.startswith("bundled:") or os.path.isdir(scan.model)
            if number == 1 or (is_here and scan.revision is None):
                plan = first_plan
                if number > 1:
                    tell("planning")
                    resolved, run, alike = self._found(scan)
                    if has_same_sizes(resolved.info, first_plan.info):
                        plan = plan_run(resolved, run, is_estimate=True, alike=alike)
                        sequences = first_plan.manifest.sequences
                        cost = first_cost.of_sequences(sequences, plan.manifest.sequences)
                    else:
                        plan = self.plan(scan, tell)
                        cost = self.cost(plan, tell)
                run_id, done = plan.run.run_id, plan.shards_done
                shards = f"{plan.manifest.shards:,}{f', {done:,} done' if done else ''}"
            total_seconds += cost.seconds
            total_bytes += cost.bytes
            seconds = f"about {duration(cost.seconds)}" if cost.is_of_device else "not known here"
            name = scan.revision or scan.model
            cells = (name, run_id, shards, seconds, f"about {in_bytes(cost.bytes)}")
            rows.append(tuple(map(printable, cells)))
        total = f"about {duration(total_seconds)}" if first_cost.is_of_device else "not known here"
        return [*rows, ("all", "", "", total, f"about {in_bytes(total_bytes)}")]


def _print_fields(console: Console, plan: Plan, parsed_scan: Scan, every: bool) -> None:
    """Print the fields that a scan sets, with their meaning; with `every`, also the others."""
    from headcount.schemas.values import in_toml

    rows: list[tuple[str, str, str]] = []
    for name, field in type(plan.scan).model_fields.items():
        value: object = getattr(plan.scan, name)
        if isinstance(value, tuple):
            value = ", ".join(map(str, value)) or "none"
        # The options of an input follow by themselves.
        if name != "input":
            rows.append((name, str(value), " ".join((field.description or "").split())))
    rows.append(("input.family", plan.scan.input.family, plan.sequences.family.meaning))
    for option, value in plan.sequences.options.items():
        rows.append((f"input.{option}", value if isinstance(value, str) else in_toml(value), ""))
    fields_set = {*parsed_scan.model_fields_set, "input.family"}
    fields_set |= {f"input.{option}" for option in parsed_scan.input.options}
    shown_rows = [row for row in rows if every or row[0] in fields_set]
    table = Table(
        "field",
        Column("value", overflow="fold"),
        "meaning",
        title=f"run {plan.run.run_id}",
        title_justify="left",
    )
    for row in shown_rows:
        # A value may hold brackets, which Rich would read as markup.
        table.add_row(*(escape(printable(cell)) for cell in row))
    console.print(table)
    hidden = len(rows) - len(shown_rows)
    if hidden:
        say(console, f"{counted(hidden, 'more field')} with the default; --all shows them")


def _cost_rows(plan: Plan, cost: Cost) -> Iterator[tuple[str, str]]:
    replicas = "in this process" if not cost.replicas else counted(cost.replicas, "replica")
    yield "device", f"{cost.device}, {cost.precision}, {replicas}"
    yield "BOS", plan.info.bos_line(plan.sequences.has_bos)
    yield "batches", counted(cost.batch_size, "sequence")
    done = f", {plan.shards_done:,} done" if plan.shards_done else ""
    estimate, index = plan.estimate, plan.sequences.index
    roughly = "" if estimate is None else "at least " if estimate.is_least else "about "
    yield "shards", f"{roughly}{plan.manifest.shards:,}{done}"
    yield "sequences", f"{roughly}{plan.manifest.sequences:,}"
    yield "tokens", f"{roughly}{plan.tokens:,} through the model"
    scale = 1.0 if estimate is None else estimate.scale
    if index is not None and estimate is not None:
        documents, tokens, bad = (
            round(scale * count) for count in (index.documents, index.tokens, index.bad)
        )
        bad_rows = f", {counted(bad, 'bad row')}" if bad else ""
        yield (
            "corpus",
            f"{roughly}{documents:,} documents, {tokens:,} tokens{bad_rows} (by those prepared)",
        )
        yield (
            "",
            f"{counted(index.tokens, 'token')} prepared, {roughly}{estimate.tokens_missing:,} "
            f"tokens to prepare: about {duration(estimate.seconds)} on this machine, "
            f"{in_bytes(estimate.bytes)}",
        )
    elif index is not None:
        held = f"{counted(index.tokens, 'token')} of {counted(index.documents, 'document')}"
        yield "corpus", f"{held} are prepared in {index.store.folder}"
    if index is not None and index.unmeasured:
        unmeasured = round(scale * index.unmeasured)
        yield "", f"{roughly}{unmeasured:,} tokens at portions' ends are not measured"
    on_gpu = f", {in_bytes(cost.gpu_memory)} on the GPU" if cost.gpu_memory else ""
    yield "memory", f"{in_bytes(cost.peak_memory)} at the peak of one replica{on_gpu}"
    for each in cost.interventions:
        method = each.method
        built = f", patterns built in {counted(len(method.built_layers), 'layer')}"
        # The time of another device would be no time of this scan.
        time = f"about {duration(each.seconds)}, " if cost.is_of_device else ""
        yield (
            method.intervention,
            f"{time}{each.tokens_per_second:,.0f} tokens/s, "
            f"{method.engine}, {method.attention}{built if method.built_layers else ''}",
        )
    left = f", {duration(cost.seconds * plan.share_left)} of it left" if plan.shards_done else ""
    yield "all", f"about {duration(cost.seconds)}{left}" if cost.is_of_device else "not known here"
    rows = ", ".join(f"{name} {count:,}" for name, count in cost.rows.items())
    yield "on disk", f"about {in_bytes(cost.bytes)}; rows: {rows}"


def _documents_table(fates: Fates) -> Table:
    """How many documents of the corpus have which fate: a row for each part, and one for all."""
    fate_names = list(fates.all)
    columns = [Column(name, justify="right") for name in ("all", *fate_names)]
    table = Table(Column("documents", overflow="fold"), *columns)
    parts = {part or "of no subset": counts for part, counts in fates.parts.items()}
    rows = (parts if len(parts) > 1 else {}) | {"all": fates.all}
    for label, counts in rows.items():
        cells = [f"{counts.get(name, 0):,}" for name in fate_names]
        table.add_row(escape(printable(label)), f"{sum(counts.values()):,}", *cells)
    return table


@commands.command(cls=CommandOfAScan)
def scan(
    scan_files: Annotated[
        list[Path], typer.Argument(metavar="SCAN", help="Scan files (TOML), run one after another.")
    ],
    overrides: Overrides = None,
    plugins: Plugins = None,
    run: Annotated[
        str | None,
        typer.Option(help="Continue the run with this id. The scan must measure the same."),
    ] = None,
    replicas: MaybeReplicas = None,
    cores: Cores = 0,
    device: DeviceOption = "auto",
    address: ClusterAddress = None,
    verify: Verify = False,
    verify_corpus: VerifyCorpus = False,
    allow_other_code: AllowOtherCode = False,
    new: New = False,
    skip_duplicates: SkipDuplicates = False,
    merge: Annotated[
        bool,
        typer.Option(
            help="When all shards of a run on a disk are done, merge them if they have a million "
            "rows, and write roll-ups for dashboards.",
        ),
    ] = True,
) -> None:
    """Run scans. If a run was stopped or killed, the same command continues it."""
    from headcount.jobs import phases
    from headcount.jobs.bars import waiting
    from headcount.jobs.plan.same_weights import without_duplicates
    from headcount.jobs.plan.scan_files import scans_of

    if new and run is not None:
        raise RunError(f"--new starts a run, --run {run} continues one; leave out one")

    # Read all files first: the imports below take seconds, and the first scan may take hours.
    series = [scans_of(file, overrides or (), plugins or ()) for file in scan_files]
    scans = [scan for each in series for scan in without_duplicates(each, skip_duplicates)]
    console = Console(highlight=False, stderr=True)
    with waiting(console, "starting"):
        from headcount.jobs.corpus.preparation import Preparation
        from headcount.jobs.plan.plan import check_directories, make_plan
        from headcount.jobs.plan.resolved_scan import check_scan
        from headcount.jobs.plan.run_plan import prepare_run
        from headcount.jobs.resources import Resources
        from headcount.jobs.run.loop import refuse_failures
        from headcount.jobs.run.measuring import run_to_end
        from headcount.jobs.upkeep.compaction import merge_finished
        from headcount.jobs.upkeep.merge_workers import merging
        from headcount.workers.process import prepare_process

    prepare_process()
    resources = Resources.asked_for(replicas, cores, device, address)
    resources.check_here()
    # Before the first one, which may take hours.
    for requested in scans if scans[1:] else []:
        with _about(requested):
            check_directories(requested.scan)
            check_scan(requested.scan)
    failures: dict[RunDirectory, list[Failure]] = {}
    for requested in scans:
        with phases.taken():
            preparation = Preparation(resources, console, verify_corpus)
            name = requested.file.stem
            about = _about(requested) if scans[1:] else nullcontext()
            with about, waiting(console, "planning"):
                scan_plan = make_plan(requested.scan, name, run, preparation, new, allow_other_code)
            prepare_run(scan_plan, requested.text)
            if new:
                # The same command would start one more.
                tell(f"{scan_plan.run.run_id}: another run; the command without --new continues it")
            _print_corpus(console, scan_plan)
            # After a failure the next scan is run all the same: its cause may be another.
            failures[scan_plan.run] = run_to_end(
                scan_plan, resources, console, verify=verify, allow_other_code=allow_other_code
            )
            if merge and not failures[scan_plan.run]:
                phases.note("compacting")
                with waiting(console, "merging files"):
                    merge_finished(scan_plan.run, merging(0, address), tell)
            print(scan_plan.run.path)
    refuse_failures(failures)


@contextmanager
def _about(requested: ScanOfCheckpoint) -> Iterator[None]:
    """Let an error say which of several scans it is about."""
    try:
        yield
    except HeadcountError as error:
        words = [word for each in requested.overrides for word in ("--set", each)]
        about = shlex.join([str(requested.file), *words])
        raise type(error)(f"{about}: {error}") from None


def _print_corpus(console: Console, plan: Plan) -> None:
    """Say what is special about the corpus, and name the first few rows that cannot be read; of an
    estimate, none is known.
    """
    from headcount.jobs.corpus.preparation import special_tokens_line

    index = plan.sequences.index
    if index is not None and (line := special_tokens_line(index)):
        say(console, line)
    findings = None if plan.estimate else plan.sequences.findings
    if findings is None or not findings.problems:
        return
    problems = list(findings.problems)
    hidden = len(problems) - MOST_BAD_ROWS
    more = f" and {hidden:,} more" if hidden > 0 else ""
    rows = counted(len(problems), "bad row")
    say(console, f"{rows} left out: {', '.join(problems[:MOST_BAD_ROWS])}{more}")
    say(console, "Lines and rows are counted from 1 here, and from 0 in sequences.row.")
