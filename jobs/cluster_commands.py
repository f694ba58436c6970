"""The subcommands for runs elsewhere: `submit`, `status`, `list`, `logs`, `stop`, `resume`. Heavy
imports wait.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from jobs.console import say
from jobs.scan_commands import (
    AllowOtherCode,
    Cores,
    DeviceOption,
    LocalReplicas,
    New,
    Overrides,
    Replicas,
    Verify,
)
from schemas.errors import RunError, counted, unknown

if TYPE_CHECKING:
    from schemas.run_directory import RunDirectory

URL = "http://HOST:8265"
Address = Annotated[str, typer.Option(metavar=URL, help="The cluster's dashboard.")]
MaybeAddress = Annotated[
    str | None, typer.Option(metavar=URL, help="The cluster's dashboard; none asks no cluster.")
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="NAME",
        help="Give the job this variable of this machine; whoever may read the cluster's jobs can "
        "read its value.",
    ),
]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's name or id, its directory, or its address in a store."
    ),
]
Runs = Annotated[
    str,
    typer.Option(
        metavar="DIRECTORY",
        help="Where a run that is given by its name lies: a path, or an address.",
    ),
]
RunOrJob = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, directory or address.")]


def mount(app: typer.Typer) -> None:
    """Add the subcommands to the front door."""
    for command in (submit, status, list_runs, logs, stop, resume):
        app.command(command.__name__.partition("_")[0])(command)


def submit(
    scan_file: Annotated[Path, typer.Argument(metavar="SCAN", help="A scan file (TOML).")],
    address: Address,
    overrides: Overrides = None,
    replicas: Replicas = 1,
    cores: Cores = 0,
    device: DeviceOption = "auto",
    env: Env = None,
    new: New = False,
) -> None:
    """Run a scan as a job of a Ray cluster, with the code that is here. Submitting it twice is one
    job.
    """
    from jobs.portable_scan import portable_scan
    from jobs.ray_cluster import Resources
    from jobs.submission import submit as submit_scan
    from workers.process import prepare_process

    prepare_process()
    scan = portable_scan(scan_file, overrides or [])
    resources = Resources(replicas, cores, device, address)
    line, run = submit_scan(scan, scan_file, overrides or [], resources, env or [], new)
    _tell(line)
    print(run.run_id)


def status(
    run: Run,
    runs: Runs = "runs",
    address: MaybeAddress = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Say it again and again, until the run is complete.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How often --watch says it.")
    ] = 5.0,
    format_: Annotated[
        Literal["text", "json"], typer.Option("--format", help="For people or for programs.")
    ] = "text",
) -> None:
    """Say how far a run is, from its directory alone; with a cluster's address, also the state of
    its job.
    """
    from jobs.status import as_json, as_lines, read_status

    directory = _run_directory(run, runs)
    on_terminal = sys.stdout.isatty() and format_ == "text"
    shown = 0
    while True:
        run_status = read_status(directory)
        record, lines = as_json(run_status), as_lines(run_status)
        if address is not None:
            job_state = _job_states(address).get(directory.run_id, "none")
            record |= {"job": job_state}
            lines = [*lines, f"job       {job_state}"]
        if format_ == "json":
            lines = [json.dumps(record)]
        elif watch and on_terminal:
            # What was shown before is written over; no line may wrap, or it would not fit.
            width = shutil.get_terminal_size().columns
            lines = [line[:width] for line in lines]
            print(f"\x1b[{shown}A\x1b[J" if shown else "", end="")
        elif watch:
            # A log gets a line each time.
            shards, tokens = (line.split(maxsplit=1)[1] for line in lines[1:3])
            lines = [f"{datetime.now(UTC):%H:%M:%S}  shards {shards}; tokens {tokens}"]
        print("\n".join(lines), flush=True)
        shown = len(lines)
        if not watch or run_status.complete:
            return
        time.sleep(every)


def list_runs(
    runs: Annotated[
        str | None,
        typer.Argument(metavar="RUNS", help="A directory of runs; 'runs' if no address."),
    ] = None,
    address: MaybeAddress = None,
) -> None:
    """List the runs of a directory and how far they are, the jobs of a cluster, or both."""
    from jobs.status import HEADINGS, list_line
    from schemas.places import place
    from schemas.run_directory import find_runs

    if runs is None and address is not None:
        _list_jobs(address)
        return
    job_states = None if address is None else _job_states(address)
    rows: list[tuple[str, ...]] = [HEADINGS]
    if job_states is not None:
        rows = [(*rows[0], "job")]
    unreadable: list[RunError] = []
    for run in find_runs(place(runs or "runs")):
        try:
            row: tuple[str, ...] = list_line(run)
        except RunError as error:
            unreadable.append(error)
            continue
        if job_states is not None:
            row = (*row, job_states.get(run.run_id, "none"))
        rows.append(row)
    _print_table(rows)
    for error in unreadable:
        _tell(str(error))


def logs(
    run: RunOrJob,
    address: Address,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job ends.")
    ] = False,
) -> None:
    """Print what the driver of a run's last job said."""
    from jobs.submission import JobClient

    cluster = JobClient(address)
    job = cluster.find(run)
    for text in cluster.log(job, follow):
        sys.stdout.write(text)
        sys.stdout.flush()
    if follow:
        _tell(f"{job.job_id}: {cluster.state(job)}")


def stop(run: RunOrJob, address: Address) -> None:
    """Stop a run's job; what is committed stays, and `resume` goes on."""
    from jobs.submission import JobClient

    cluster = JobClient(address)
    job = cluster.find(run)
    if job.ended:
        _tell(f"{job.job_id}: has ended before, {job.state}")
        return
    _tell(
        f"{job.job_id}: {cluster.stop(job).state}; headcount resume {job.run} --address "
        f"{cluster.url} goes on"
    )


def resume(
    run: Run,
    runs: Runs = "runs",
    address: MaybeAddress = None,
    replicas: LocalReplicas = 1,
    cores: Cores = 0,
    device: DeviceOption = "auto",
    env: Env = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set batch_size; sequences, which extends the run; or where something lies that "
            "has moved: model, input.files, input.text.",
        ),
    ] = None,
    verify: Verify = False,
    allow_other_code: AllowOtherCode = False,
) -> None:
    """Go on with a run from its directory alone: here, or as a job of a cluster. The scan file is
    not needed.
    """
    from jobs.ray_cluster import Resources
    from jobs.replan import check_overrides, replan

    directory = _run_directory(run, runs)
    resources = Resources(replicas, cores, device, address)
    if address is not None:
        from jobs.submission import resume as submit_resume

        check_overrides(directory, overrides or [])
        _tell(
            submit_resume(
                directory, resources, env or [], overrides or [], verify, allow_other_code
            )
        )
        return
    if env:
        raise RunError(
            "--env: expected with --address only; a run that goes on here has this machine's "
            "variables"
        )
    from jobs.run_loop import run_to_end
    from jobs.run_places import where_begun
    from jobs.scan_runs import ScanCommand, resumption
    from workers.process import prepare_process

    prepare_process()
    resources.check_here()
    console = Console(highlight=False, stderr=True)
    command = ScanCommand.of_run(directory.manifest())
    with where_begun(directory, overrides or []) as anchored:
        plan = replan(directory, anchored, command)
        failures = run_to_end(plan, resources, console, verify, allow_other_code=allow_other_code)
    print(directory.path)
    if failures:
        raise RunError(
            f"{counted(len(failures), 'shard')} failed, all others are committed; mend the cause, "
            f"then {resumption(directory)} goes on, {plan.way}"
        )


def _run_directory(run: str, runs: str) -> RunDirectory:
    """A run directory by its path, made absolute, by its address in a store, or by the run's name or
    id among some runs.
    """
    from schemas.places import absolute
    from schemas.run_directory import RunDirectory, find_runs

    by_path = RunDirectory(absolute(run))
    if by_path.path.name.startswith("run_id="):
        return by_path
    if "/" in run or (isinstance(by_path.path, Path) and by_path.path.exists()):
        raise RunError(f"{run}: expected the directory of a run, …/run_id=NAME-HASH")
    directory = absolute(runs)
    found = {other.run_id: other for other in find_runs(directory)}
    named = [other for other in found.values() if run in (other.run_id, _name_of(other.run_id))]
    if not named:
        raise RunError(f"{directory}: {unknown('run', run, found)}; --runs names another directory")
    if len(named) > 1:
        ids = ", ".join(other.run_id for other in named)
        raise RunError(f"{directory}: {len(named)} runs have the name {run}; say which: {ids}")
    return named[0]


def _name_of(run_id: str) -> str:
    """The name of a run, which is its id without the hash at the end."""
    return run_id.rpartition("-")[0]


def _job_states(address: str) -> dict[str, str]:
    """State of the last job of each run."""
    from jobs.submission import JobClient

    return {job.run_id: job.state for job in JobClient(address).jobs()}


def _list_jobs(address: str) -> None:
    from jobs.submission import JobClient

    rows = [("job", "state", "started", "run")]
    for job in JobClient(address).jobs():
        started = datetime.fromtimestamp(job.started, UTC).isoformat(timespec="seconds")
        rows.append((job.job_id, job.state, started, job.run))
    _print_table(rows)


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows in columns that are never cut, whatever they are printed to."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


def _tell(line: str) -> None:
    say(Console(highlight=False, stderr=True), line)
