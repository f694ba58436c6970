"""The group `reproduce`. Heavy imports wait until a command runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from headcount.jobs.commands.options import (
    AllowOtherCode,
    Cores,
    DeviceOption,
    LocalReplicas,
    Overrides,
)
from headcount.jobs.console import say
from headcount.schemas.errors import RunError, ScanError, counted, unknown

if TYPE_CHECKING:
    from headcount.reproduce.replication import Replication
    from headcount.reproduce.reproduction import Attempt

SOMETHING_SKIPPED = 3
"""Exit code if no result failed, but a replication that fits the model could not be measured."""


class DefaultedGroup(TyperGroup):
    """A group whose first command need not be named: `reproduce NAME` beside `reproduce texts`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - typer has no name
        """Read the command line."""
        is_named = args[:1] and args[0] in self.commands
        return super().parse_args(ctx, args if is_named else [next(iter(self.commands)), *args])


commands = typer.Typer(
    name="reproduce",
    cls=DefaultedGroup,
    help="Replicate results of the literature, with a verdict beside each published figure.",
    rich_markup_mode=None,
)


@commands.command("replications")
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Replications, as --list names them, or your own files, FILE.toml.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A Hub id, a local directory, or bundled:NAME. Default: the miniature that the "
            "replication names."
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Every replication; with --model, every one that was published for a model of "
            "these sizes.",
        ),
    ] = False,
    listed: Annotated[
        bool,
        typer.Option(
            "--list",
            help="Print the replications, and what measures the published models.",
        ),
    ] = False,
    out: Annotated[str, typer.Option(help="Directory for the runs.")] = "runs/reproduce",
    file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Also write the results to this file."),
    ] = None,
    text_files: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="[NAME=]FILE",
            help="The authors' own text, a file or a glob, for the replication NAME and all others "
            "that were published for the same. May be repeated. headcount reproduce texts builds "
            "some.",
        ),
    ] = None,
    overrides: Overrides = None,
    replicas: LocalReplicas = 0,
    cores: Cores = 0,
    device: DeviceOption = "auto",
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Ray cluster that this machine belongs to. It needs --replicas.",
        ),
    ] = None,
    allow_other_code: AllowOtherCode = False,
) -> None:
    """Replicate results of the literature: scan, query, and a verdict beside each published figure.

    The numbers of a miniature are not compared, but what must hold in any model is checked. What
    does not fit the model, or lacks a file, is said and skipped. Exit codes: 2 if a result fails, 3
    if none fails but something was skipped that fits the model.
    """
    from headcount.reproduce.replication import find_replications, replications
    from headcount.schemas.places import check_directory
    from headcount.schemas.registry import check_docstrings

    if listed:
        _print_replications(replications())
        return
    if not names and not every:
        raise ScanError("expected the name of a replication, or --all; --list names them")
    selection = replications() if every else find_replications(names or [])
    check_docstrings()
    if file is not None:
        _check_output(file, ".json")
    text_by_replication = texts_of_replications(text_files or [], selection)
    # A place that cannot be is one mistake, and not a reason to skip every replication.
    check_directory("--out", out)
    # These import torch, which takes seconds: a mistake above is answered without it.
    from headcount.jobs.bars import waiting
    from headcount.jobs.run.progress import WholeProgress

    console = Console(highlight=False, stderr=True)
    with waiting(console, "starting"):
        from headcount.jobs.resources import Resources
        from headcount.reproduce.replication_runs import (
            check_overrides,
            describe_model,
            measure_runs,
        )
        from headcount.reproduce.reproduction import Attempt
        from headcount.workers.known_models import KnownModels
        from headcount.workers.process import prepare_process

    prepare_process()
    check_overrides([*selection.values()], overrides or [])
    resources = Resources(replicas, cores, device, address)
    resources.check_here()
    models = KnownModels()
    attempts: list[Attempt] = []
    with waiting(console, "planning"):
        if model is not None:
            # A model that is not there is one mistake, and not a reason to skip every replication.
            describe_model(model, overrides or [], models)
        # What cannot be measured is said before anything is.
        for name, replication in selection.items():
            measured = model or replication.bundled_model
            attempt = Attempt(name, replication, measured, text_by_replication.get(name))
            attempt.plan(out, overrides or [], models, console, every and model is not None)
            attempts.append(attempt)
    _write_results(attempts, file)
    all_runs = WholeProgress(sum(attempt.tokens_to_measure for attempt in attempts))
    for attempt in attempts:
        if attempt.skipped:
            continue
        try:
            measure_runs(attempt.plans, resources, console, allow_other_code, models, all_runs)
            page = attempt.judge()
            _print_results(attempt)
            if page:
                typer.echo(f"figures in {page}")
        # One replication that cannot be measured says nothing about the others.
        except Exception as error:
            attempt.skip(error, console)
        _write_results(attempts, file)
    _end(attempts, console)


def _check_output(file: Path, suffix: str) -> None:
    """Refuse a file that cannot be written, before the work and not after it."""
    from headcount.queries.ask.formats import check_suffix

    check_suffix(file, suffix)
    if not file.parent.is_dir():
        raise RunError(f"{file}: cannot be written ({file.parent} is no directory)")


def texts_of_replications(
    options: Sequence[str], selection: Mapping[str, Replication]
) -> dict[str, str]:
    """The file of the authors' text, by replication. A text that nobody reads is refused."""
    wanted_by_replication = {
        name: replication.text.what for name, replication in selection.items() if replication.text
    }
    files: dict[str, str] = {}
    for option in options:
        if not wanted_by_replication:
            raise ScanError(
                f"--text {option}: none of these replications reads a text of its authors; "
                "leave it out"
            )
        name, equals, named_file = option.partition("=")
        is_named = bool(equals) and name in wanted_by_replication
        wanted = {wanted_by_replication[name]} if is_named else set(wanted_by_replication.values())
        text_file = named_file if is_named else option
        if len(wanted) > 1:
            choices = "; ".join(f"{name}={what}" for name, what in wanted_by_replication.items())
            first = next(iter(wanted_by_replication))
            raise ScanError(
                f"--text {option}: these replications were published for different texts; "
                f"expected NAME=FILE, for instance --text {first}=FILE ({choices})"
            )
        paths = [Path(path) for path in sorted(glob(str(Path(text_file).expanduser())))]
        if not any(path.is_file() for path in paths):
            raise RunError(f"--text {option}: no such file; expected {next(iter(wanted))}")
        for name, what in wanted_by_replication.items():
            text = selection[name].text
            if what in wanted and text is not None:
                text.check(text_file, paths)
                files[name] = text_file
    return files


def _write_results(attempts: Sequence[Attempt], file: Path | None) -> None:
    """Write the results so far: a command that is stopped leaves them."""
    if file is None:
        return
    results = [asdict(result) for attempt in attempts for result in attempt.results]
    try:
        file.write_text(f"{json.dumps(results, indent=1)}\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{file}: cannot be written ({error.strerror})") from None


def _end(attempts: Sequence[Attempt], console: Console) -> None:
    """Say how many results have which verdict, and end with the code that belongs to them."""
    skipped = [attempt for attempt in attempts if attempt.skipped]
    # Of one replication nothing else can be said.
    if len(attempts) == 1 and attempts[0].error is not None:
        raise attempts[0].error
    if len(skipped) == len(attempts):
        raise RunError("no replication could be measured; each line above says why")
    counts = Counter(result.verdict for attempt in attempts for result in attempt.results)
    verdicts = ", ".join(f"{counts[verdict]:,} {verdict}" for verdict in VERDICT_ORDER)
    measured = counted(len(attempts) - len(skipped), "replication")
    say(console, f"{measured} measured, {len(skipped)} skipped; results: {verdicts}")
    failures = counts["fail"]
    if failures:
        raise RunError(
            f"{failures} of {failures + counts['pass']} results differ from what was published "
            "or must hold"
        )
    if any(attempt.error is not None for attempt in skipped):
        raise typer.Exit(SOMETHING_SKIPPED)


VERDICT_ORDER = ("fail", "pass", "record", "not comparable")
"""The order in which results are printed."""


def _print_results(attempt: Attempt) -> None:
    from headcount.reproduce.published_run import estimated_time, published_command

    replication, results = attempt.replication, attempt.results
    title = (
        f"{attempt.name}: {replication.title} ({replication.source})\n"
        f"model {attempt.model}, runs in {attempt.directory}"
    )
    table = Table(
        "name", "published", "measured", "tolerance", "verdict", title=title, title_justify="left"
    )
    # Of a table of thousands, those that fail are printed. All are in the page and in the JSON.
    printed = [result for result in results if not result.file or result.verdict == "fail"]
    # On a miniature nearly all published figures cannot be compared. That long list comes last.
    for result in sorted(printed, key=lambda result: VERDICT_ORDER.index(result.verdict)):
        published, measured = (
            "" if value is None else value if isinstance(value, str) else f"{value:.4g}"
            for value in (result.published, result.measured)
        )
        table.add_row(result.name, published, measured, result.tolerance_text, result.verdict)
    console = Console(highlight=False)
    console.print(table)
    of_tables = [(result.file, result.verdict) for result in results if result.file]
    for (file, verdict), count in Counter(of_tables).items():
        say(console, f"{file}: {count:,} {verdict}")
    if attempt.model == replication.bundled_model:
        # A line for a shell is not broken.
        time = f"{estimated_time(replication)} on one GPU by an estimate"
        typer.echo(
            f"with the published weights, {time}: {published_command(attempt.name, replication)}"
        )


def _print_replications(replications: dict[str, Replication]) -> None:
    from headcount.reproduce.published_run import estimated_time, published_command

    for name, replication in replications.items():
        # Only bundled models are miniatures, so the prefix says nothing here.
        miniature = replication.bundled_model.removeprefix("bundled:")
        typer.echo(f"{name}: {replication.title}")
        typer.echo(f"  offline, with {miniature}: headcount reproduce {name}")
        # A line for a shell is not broken.
        time = f"{estimated_time(replication)} on one GPU by an estimate"
        typer.echo(f"  as published, {time}: {published_command(name, replication)}")


@commands.command()
def texts(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="sink_circuit, sink_circuit_qwen, sink_circuit_long or sink_circuit_sentence.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="CSV file to write. Default: the name that the replications read.",
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="DIR",
            help="Local copies of the data sets: directories sst2, gsm8k and humaneval, as the "
            "library datasets loads them. Default: the Hub.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A directory or Hub id with the tokenizer that cuts the texts. Default: GPT-2's, "
            "and Qwen2.5's for sink_circuit_qwen.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Draw other texts by the same recipe. Default: the published."),
    ] = None,
) -> None:
    """Build the authors' texts that a replication reads.

    We ship no text of others. The texts are built from public data sets by the authors' recipe,
    and compared with a fingerprint of the published ones.
    """
    from headcount.reproduce.published_texts import (
        RECIPES,
        as_csv,
        build_texts,
        check_published,
    )
    from headcount.schemas.places import write_whole

    if name not in RECIPES:
        raise ScanError(unknown("texts", name, RECIPES))
    recipe = RECIPES[name]
    file = output or Path(recipe.file)
    _check_output(file, ".csv")
    drawn_with = recipe.seed if seed is None else seed
    built = build_texts(recipe, source, tokenizer or recipe.tokenizer, drawn_with, typer.echo)
    # Texts that should be the published ones and are not would be mistaken for them.
    share = check_published(recipe, built, drawn_with)
    write_whole(file.absolute(), as_csv(built))
    typer.echo(f"{file}: {recipe.what}")
    typer.echo(share)
