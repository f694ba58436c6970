"""The subcommands `check`, `compact` and `rm` for the files of runs, `doctor` for a machine, and
`watch` for a training.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from headcount.jobs.commands.options import Yes
from headcount.jobs.console import check_can_ask, duration, in_bytes, say, tell
from headcount.schemas.errors import RunError, counted

commands = typer.Typer(rich_markup_mode=None)


@commands.command()
def check(
    runs: Annotated[
        str,
        typer.Argument(
            metavar="RUNS",
            help="A run directory, or a directory that holds runs; a path, or an address in a "
            "store. Or a plug-in, FILE.py.",
        ),
    ],
) -> None:
    """Compare every file of runs with its commit, or try the definitions of a plug-in.

    Files that are not as committed are named, or the first definition that does not hold. Nothing
    is changed.
    """
    if runs.endswith(".py"):
        _check_plugin(runs)
        return
    from headcount.jobs.bars import waiting
    from headcount.jobs.upkeep.checking import check_run, findings
    from headcount.schemas.files.run_directory import find_runs
    from headcount.schemas.places import absolute

    console = Console(highlight=False)
    all_whole = True
    for run in find_runs(absolute(runs)):
        try:
            with waiting(Console(stderr=True), f"{run.run_id}: reading every file"):
                checked = check_run(run)
            lines, is_whole = findings(run, checked), not checked.damaged
        except RunError as error:
            # One run that cannot be read does not keep the others from being checked.
            lines, is_whole = [str(error)], False
        all_whole &= is_whole
        for line in lines:
            say(console, f"{run.run_id}: {line}")
    if not all_whole:
        sys.exit(1)


def _check_plugin(file: str) -> None:
    """Try a plug-in as a scan does, and say what it defines."""
    from headcount.jobs.bars import waiting
    from headcount.schemas.plugin_files import read_and_activate

    plugins = read_and_activate([file])
    with waiting(Console(stderr=True), f"{file}: trying it on a small model"):
        from headcount.workers.plugin_proof import prove
        from headcount.workers.process import prepare_process

        prepare_process()
        prove(plugins, plugins, "fused")
    for registry, entry in plugins[0].registrations:
        print(f"{registry.word} {entry.name}: {entry.meaning}")
    for query in plugins[0].queries:
        print(f"query {query.name}: {query.meaning}")


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
    from headcount.jobs.bars import waiting
    from headcount.jobs.upkeep.compaction import compact
    from headcount.jobs.upkeep.merge_workers import merging
    from headcount.schemas.files.run_directory import find_runs
    from headcount.schemas.places import absolute

    if address is not None and processes:
        raise RunError(
            f"--processes {processes} merges on this machine, --address {address} on a cluster; "
            "leave out one"
        )
    problems: list[str] = []
    for run in find_runs(absolute(path)):
        try:
            with waiting(Console(stderr=True), f"{run.run_id}: merging files"):
                result = compact(run, tell=tell, merge_groups=merging(processes, address))
        except RunError as error:
            # One run that cannot be compacted does not keep the others from it.
            problems.append(str(error))
            continue
        files_before = result.before.files
        verb = "is" if files_before == 1 else "are"
        files = f"{counted(files_before, 'file')} {verb} now {result.after.files:,}"
        size = f"{in_bytes(result.before.bytes)} are now {in_bytes(result.after.bytes)}"
        tell(f"{run.run_id}: {files}, {size}, in {duration(result.seconds)}")
        problems += [f"{run.run_id}: {problem}" for problem in result.problems]
        print(run.path)
    if problems:
        raise RunError("\n".join(problems))


@commands.command()
def rm(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run directories, or their addresses in a store."),
    ],
    yes: Yes = False,
) -> None:
    """Delete runs.

    A store has no locks: before you delete a run there, make sure that nobody is at work on it.
    """
    from headcount.jobs.upkeep.removal import check_removable, describe_run, remove

    # All are checked before the first is deleted.
    run_directories = [check_removable(location) for location in runs]
    check_can_ask("headcount rm", runs, yes)
    for run in run_directories:
        if yes or typer.confirm(f"Delete {describe_run(run)}?", err=True):
            remove(run)
            tell(f"deleted {run.path}")


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
    adapter: Annotated[
        Literal["refuse", "apply", "ignore"],
        typer.Option(help="What --model does about an adapter beside full weights, as in a scan."),
    ] = "refuse",
) -> None:
    """Check that this machine can run scans, and print what it has."""
    console = Console(highlight=False)
    if model is not None:
        # Loading a large model takes minutes.
        with console.status("loading the model, then measuring two sequences"):
            from headcount.jobs.commands.model_report import report_model
            from headcount.workers.process import prepare_process

            prepare_process()
            for word, text in report_model(model, adapter):
                say(console, f"{word:<10} {text}")
        return
    from headcount.jobs.commands.doctor import check_kernel, examine

    checks, waiting = examine(out), "loading the libraries, then measuring with every model"
    if device == "cuda":
        checks, waiting = check_kernel(), "comparing the kernel with tiles"
    healthy = True
    with console.status(waiting):
        for check in checks:
            say(console, f"{'ok' if check.ok else 'FAIL':<6}{check.name:<16} {check.result}")
            if not check.ok and check.advice:
                say(console, f"{'':<23}{check.advice}")
            healthy &= check.ok
            # The next check may take seconds.
            sys.stdout.flush()
    if not healthy:
        sys.exit(1)


@commands.command()
def watch(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIRECTORY",
            help="Checkpoints such as checkpoint-500, runs of such, or what a callback wrote.",
        ),
    ],
    scan: Annotated[
        Path | None,
        typer.Option(
            metavar="SCAN",
            help="A scan file, whose input and sizes checkpoints are measured with. Default: "
            "random tokens, repeated once.",
        ),
    ] = None,
    runs: Annotated[
        str, typer.Option(metavar="DIRECTORY", help="Where the runs of checkpoints lie.")
    ] = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it for programs.")] = False,
) -> None:
    """Look for what goes wrong in a training, and say since when and in which heads.

    Checkpoints are measured once; the same command goes on with those that are new. Exit code 3
    says that a rule rang.
    """
    from headcount.jobs.commands import watch as watching
    from headcount.schemas.watch.alarms import alarms

    measured = watching.measured_steps(directory, scan, runs)
    rang = alarms(measured)
    write = watching.as_json if as_json else watching.report
    print(write(rang, measured))
    if not all(alarm.is_notice for alarm in rang):
        sys.exit(3)
