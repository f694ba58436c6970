"""The subcommands for runs that are there: `status`, `list`, `resume` and `calibrate`.

Torch and Ray take seconds to import, so they are imported inside the functions that need them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from headcount.jobs.commands.catalogue import REGISTRIES, known_names
from headcount.jobs.commands.cluster import tell_submission
from headcount.jobs.commands.options import (
    AllowOtherCode,
    ClusterAddress,
    Cores,
    DeviceOption,
    Env,
    MaybeAddress,
    MaybeReplicas,
    Run,
    Runs,
    TrustPlugins,
    Verify,
    VerifyCorpus,
)
from headcount.jobs.console import print_table, print_terms, tell
from headcount.schemas.errors import RunError, unknown

if TYPE_CHECKING:
    from headcount.jobs.cluster.submission import Job
    from headcount.jobs.upkeep.status import Status
    from headcount.schemas.files.run_directory import RunDirectory
    from headcount.schemas.places import Place

commands = typer.Typer(rich_markup_mode=None)

SILENCE_SECONDS = 10.0  # say so if a store has not answered for this long

DRAWN_HEADS, DRAWN_SEQUENCES = 20, 64  # heads and sequences that are measured by default


@commands.command()
def status(
    run: Run,
    runs: Runs = "runs",
    address: MaybeAddress = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Print it again and again until the run is complete.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How often --watch prints it.")
    ] = 5.0,
    format_: Annotated[
        Literal["text", "json"],
        typer.Option("--format", help="text for people, json for programs."),
    ] = "text",
) -> None:
    """Print how far a run is, read from its directory alone.

    With a cluster's address, also print the state of the run's job.
    """
    from rich.live import Live
    from rich.text import Text

    from headcount.jobs.upkeep.status import as_lines
    from headcount.schemas.process import use_arrow_sparingly

    use_arrow_sparingly()
    directory = run_directory(run, runs)
    console = Console(highlight=False)
    redraws = watch and format_ == "text" and console.is_terminal
    with Live(console=console, auto_refresh=False) if redraws else nullcontext() as live:
        while True:
            with _told_if_silent(directory.path):
                run_status, job, error = _status(directory, address)
            lines = as_lines(run_status)
            if job is not None:
                lines.append(f"job       {job}{f': {error}' if error else ''}")
            if live is not None:
                live.update(Text("\n".join(lines), no_wrap=True, overflow="crop"), refresh=True)
            elif format_ == "json":
                # One object a line, also with --watch, so that a program reads them as they come.
                asked = {} if job is None else {"job": job, "job_error": error}
                print(json.dumps(asdict(run_status) | asked), flush=True)
            elif watch:
                # A log gets one line each time: what it does, or how many shards and tokens.
                words = [" ".join(line.split(maxsplit=1)) for line in lines[1:3]]
                print(f"{datetime.now(UTC):%H:%M:%S}  {'; '.join(words)}", flush=True)
            else:
                print("\n".join(lines), flush=True)
            if not watch or run_status.complete:
                return
            time.sleep(every)


def _status(directory: RunDirectory, address: str | None) -> tuple[Status, str | None, str | None]:
    """A run as it stands; if a cluster is asked, the state of its job and why that failed."""
    from headcount.jobs.upkeep.status import Status, read_status

    if address is None:
        return read_status(directory), None, None
    from headcount.jobs.cluster.submission import JobClient

    cluster = JobClient(address)
    job = cluster.last(directory)
    if job is None:
        return read_status(directory), "none", None
    try:
        run_status = read_status(directory)
    except RunError:
        # The run may lie on a disk of the cluster, which is not seen from here.
        phase = f"ended, {job.state}" if job.ended else cluster.phase(job)
        run_status = Status(job.run_id, job.run, begun=False, phase=phase)
    return run_status, job.state, cluster.phase(job) if job.state == "FAILED" else None


@contextmanager
def _told_if_silent(where: Place) -> Iterator[None]:
    """Say that a store has not answered for a while: a request to it is given up after minutes."""
    line = f"{where}: the store has not answered for {SILENCE_SECONDS:.0f} s; asking it again"
    timer = Timer(SILENCE_SECONDS, tell, [line])
    timer.daemon = True
    # A disk answers at once, or fails.
    if not isinstance(where, Path):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@commands.command("list")
def list_runs(
    runs: Annotated[
        str | None,
        typer.Argument(
            metavar="RUNS",
            help="A directory of runs. Default: 'runs' without --address, none with it. Four words "
            "list instead what a scan can name: statistics, interventions, inputs or models; "
            "./models is the directory.",
        ),
    ] = None,
    address: MaybeAddress = None,
) -> None:
    """List runs, the jobs of a cluster, or what a scan can name.

    With --address alone, the cluster's jobs are listed. With a directory too, its runs are listed
    with the states of their jobs.
    """
    if runs in REGISTRIES and address is None:
        print_terms(known_names(runs))
        return
    from headcount.jobs.upkeep.status import HEADINGS, Status, as_row, read_statuses
    from headcount.schemas.places import absolute
    from headcount.schemas.process import use_arrow_sparingly

    use_arrow_sparingly()
    jobs: list[Job] = []
    if address is not None:
        from headcount.jobs.cluster.submission import JobClient

        cluster = JobClient(address)
        jobs = cluster.jobs()
        if runs is None:
            rows = [("job", "state", "started", "phase", "run")]
            for job in jobs:
                started = datetime.fromtimestamp(job.started, UTC).isoformat(timespec="seconds")
                phase = "-" if job.ended else cluster.phase(job)
                rows.append((job.job_id, job.state, started, phase, job.run))
            print_table(rows)
            return
    out = absolute(runs or "runs")
    # Jobs of one run come in their order, so the last one stays in the dictionary.
    last_jobs = {job.run_id: job for job in jobs if job.run == f"{out}/run_id={job.run_id}"}
    at_work = [job for job in last_jobs.values() if not job.ended]
    with _told_if_silent(out):
        statuses, problems = read_statuses(out, may_be_empty=bool(at_work))
    # The driver of a job may not have said anything yet.
    listed = {each.run_id for each in statuses}
    for job in at_work:
        if job.run_id not in listed:
            phase = "submitted" if job.state == "PENDING" else "starting"
            statuses.append(Status(job.run_id, job.run, begun=False, phase=phase))
    rows = [HEADINGS, *map(as_row, statuses)]
    if address is not None:
        states = [last_jobs[s.run_id].state if s.run_id in last_jobs else "none" for s in statuses]
        rows = [(*row, state) for row, state in zip(rows, ["job", *states], strict=True)]
    print_table(rows)
    # Said below the table, so that one broken run does not hide the others.
    for problem in problems:
        tell(problem)


@commands.command()
def resume(
    run: Run,
    runs: Runs = "runs",
    address: MaybeAddress = None,
    replicas: MaybeReplicas = None,
    cores: Cores = 0,
    device: DeviceOption = "auto",
    env: Env = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a field: batch_size, bad_rows or bad_rows_in_a_row; sequences, to extend "
            "the run; model, input.files or input.text, if they have moved.",
        ),
    ] = None,
    verify: Verify = False,
    verify_corpus: VerifyCorpus = False,
    allow_other_code: AllowOtherCode = False,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Continue a run from its directory alone.

    It continues here, or as a job of a cluster. The scan file is not needed.
    """
    from headcount.jobs.bars import waiting

    console = Console(highlight=False, stderr=True)
    directory = run_directory(run, runs)
    with waiting(console, "starting"):
        from headcount.jobs.plan.plan import check_overrides
        from headcount.jobs.resources import Resources

        resources = Resources.asked_for(replicas, cores, device, address)
    if address is not None:
        from headcount.jobs.cluster.submission import JobClient, has_begun, options
        from headcount.jobs.plan.plan import plugins_have_run_here

        if has_begun(directory) is False:
            raise RunError(
                f"{directory.path}: this run never began, so there is nothing to resume; "
                "headcount submit SCAN begins it"
            )
        # The job checks its overrides, too, but minutes later and in its log.
        check_overrides(directory, overrides or [])
        cluster = JobClient(address)
        flags = {
            "--verify": verify,
            "--verify-corpus": verify_corpus,
            "--allow-other-code": allow_other_code,
            "--trust-plugins": trust_plugins or plugins_have_run_here(directory),
        }
        words = [flag for flag, is_set in flags.items() if is_set]
        words += options(overrides or [], resources)
        submission = cluster.start(directory, ["resume", str(directory.path), *words], env or [])
        tell_submission(cluster, submission)
        return
    if env:
        raise RunError(
            "--env: expected with --address only; a run that continues here has this machine's "
            "variables"
        )
    with waiting(console, "starting"):
        from headcount.jobs import phases
        from headcount.jobs.corpus.preparation import Preparation
        from headcount.jobs.plan.plan import replan, where_begun
        from headcount.jobs.run.loop import refuse_failures
        from headcount.jobs.run.measuring import run_to_end
        from headcount.workers.process import prepare_process

    prepare_process()
    resources.check_here()
    # Relative names of the scan are meant from where the run was begun.
    with phases.taken(), where_begun(directory, overrides or []) as absolute_overrides:
        phases.about(directory)
        preparation = Preparation(resources, console, verify_corpus)
        with waiting(console, "planning"):
            plan = replan(
                directory, absolute_overrides, preparation, allow_other_code, trust_plugins
            )
        failures = run_to_end(
            plan, resources, console, verify=verify, allow_other_code=allow_other_code
        )
    print(directory.path)
    refuse_failures({directory: failures})


@commands.command()
def calibrate(
    run: Run,
    runs: Runs = "runs",
    heads: Annotated[
        int,
        typer.Option(min=2, help="Number of heads that are drawn, over the whole depth."),
    ] = DRAWN_HEADS,
    sequences: Annotated[
        int, typer.Option(min=2, help="Number of the run's sequences that they are measured on.")
    ] = DRAWN_SEQUENCES,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw.")] = 0,
    replicas: MaybeReplicas = None,
    cores: Cores = 0,
    device: DeviceOption = "auto",
    address: ClusterAddress = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Measure some of the interventions whose effects a run estimates.

    The loss under each of them is measured in a run of its own, NAME-calibration, which lies beside
    the first and continues like any other. Views, reports and exports of effects then say how well
    the estimates agree.
    """
    from headcount.jobs.bars import waiting

    directory = run_directory(run, runs)
    with waiting(Console(highlight=False, stderr=True), "starting"):
        from headcount.jobs.api import measure_losses_beside
        from headcount.jobs.plan.calibration import calibration_of
        from headcount.jobs.resources import Resources

    resources = Resources.asked_for(replicas, cores, device, address)
    on_cpu = resources.on_cpu
    fields = calibration_of(directory, heads, sequences, seed, on_cpu, trust_plugins)
    path = measure_losses_beside(directory, fields, resources)
    print(path)
    print(f"  headcount query {path.parent} effect_calibration")


def run_directory(run: str, runs: str) -> RunDirectory:
    """The run at a path or address, or with a name or id in `runs`; absolute, as processes move."""
    from headcount.jobs.upkeep.status import runs_in
    from headcount.schemas.files.run_directory import RunDirectory
    from headcount.schemas.places import absolute

    by_path = RunDirectory(absolute(run))
    # A path need not exist here: it may be one of the cluster that runs the job.
    if by_path.path.name.startswith("run_id="):
        return by_path
    if "/" in run or (isinstance(by_path.path, Path) and by_path.path.exists()):
        raise RunError(f"{run}: expected the directory of a run, …/run_id=NAME-HASH")
    directory = absolute(runs)
    runs_by_id = {each.run_id: each for each in runs_in(directory)}
    # The name of a run is its id without the hash at the end.
    matches = [
        each for run_id, each in runs_by_id.items() if run in (run_id, run_id.rpartition("-")[0])
    ]
    if not matches:
        message = unknown("run", run, runs_by_id)
        raise RunError(f"{directory}: {message}; --runs names another directory")
    if len(matches) > 1:
        ids = ", ".join(match.run_id for match in matches)
        raise RunError(f"{directory}: {len(matches)} runs have the name {run}; say which: {ids}")
    return matches[0]
