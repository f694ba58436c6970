"""The subcommand `export`. Heavy imports wait until it runs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from headcount.queries.commands.query import Code, tell_user, warn_of_damage
from headcount.schemas.errors import QueryError

if TYPE_CHECKING:
    from headcount.exports.registry import Exported, ExportFormat, Needs
    from headcount.exports.source import ExportSource
    from headcount.queries.ask.asking import RunDatabase

commands = typer.Typer(rich_markup_mode=None)

FORMAT_OPTIONS = "headcount.format_options"
"""Where a command keeps what the options of its format are, until it runs."""

Device = Literal["auto", "cpu", "cuda"]


class ExportCommand(TyperCommand):
    """A command that also takes the options of a format, and explains them."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Read the command line. `--help` beside a format is about that format."""
        from headcount.exports.registry import export_formats

        export = export_formats().get(args[0]) if args else None
        if export is None:
            return super().parse_args(ctx, args)
        if {"-h", "--help"} & set(args):
            typer.echo(help_text(export))
            raise typer.Exit
        # Which options there are depends on the format, so typer cannot know them.
        own = {option.flag: option.name for option in export.options.values()}
        others = {flag for parameter in self.get_params(ctx) for flag in parameter.opts}
        given = ctx.meta[FORMAT_OPTIONS] = dict[str, str]()
        rest: list[str] = []
        words = iter(args)
        for word in words:
            flag, equals, value = word.partition("=")
            if flag in own:
                text = value if equals else next(words, None)
                if text is None:
                    raise QueryError(f"{flag}: expected a value")
                given[own[flag]] = text
            elif flag.startswith("--") and flag not in others:
                flags = ", ".join(own) or "none"
                raise QueryError(f"export {export.name}: unexpected {flag!r}; its options: {flags}")
            else:
                rest.append(word)
        return super().parse_args(ctx, rest)


@commands.command(cls=ExportCommand)
def export(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="FORMAT", help="Format, as --list names it; FORMAT --help explains it."
        ),
    ] = None,
    runs: Annotated[
        str | None,
        typer.Argument(
            metavar="RUNS",
            help="A run directory, or a directory of runs; a path or a URL. With --model: "
            "where its run is written, by default runs.",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", metavar="PATH", help="File or folder to write; a path or a URL."
        ),
    ] = None,
    listed: Annotated[
        bool,
        typer.Option("--list", help="Print the formats, and who reads them."),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="A Hub id, a local directory, or bundled:NAME: run the scan that the format "
            "needs, then export it."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set a field of that scan, such as sequences=500. May be repeated.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Then cut the cache of the model as the file says, and print what is lost: "
            "with the chosen heads whole, and with as many random ones.",
        ),
    ] = False,
    device: Annotated[Device, typer.Option(help="Device of what is measured.")] = "auto",
    run_ids: Annotated[
        list[str] | None,
        typer.Option(
            "--run",
            metavar="RUN_ID",
            help="The run, if RUNS has several. Twice, if the format compares two.",
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an older export in one step.")
    ] = False,
    code: Code = None,
) -> None:
    """Write what runs measured as a file that another tool loads: which heads retrieve, how far
    they look back, how large their keys get.
    """
    from headcount.exports.destination import check_destination, write_export
    from headcount.exports.registry import FORMATS, export_formats
    from headcount.exports.source import choose_run
    from headcount.schemas.files.places import absolute
    from headcount.schemas.files.run_directory import RunDirectory

    formats = export_formats()
    if listed:
        for format_name, listed_format in formats.items():
            typer.echo(f"{format_name}: {listed_format.title}\n    {listed_format.read_by}")
        return
    if name is None:
        raise QueryError("expected the name of a format; headcount export --list has them")
    export = FORMATS.named(name, "export")
    options = export.parsed_options(context.meta.get(FORMAT_OPTIONS, {}))
    if output is None:
        raise QueryError(
            f"export {name}: say where to with -o PATH, for instance -o {export.example}"
        )
    # Before any scan: it would be paid for in vain.
    destination = check_destination(export, output, replace)
    if runs is None and model is None:
        raise QueryError(f"export {name}: expected RUNS, or --model MODEL to measure it now")
    if model is None and overrides:
        raise QueryError("--set is about the scan of --model; leave it out")
    baseline = None
    needs = export.needs(options)
    if model is not None:
        fields = {"model": model, "out": runs or "runs"}
        runs, baseline = _measured(needs, f"export-{name}", fields, overrides, device)
    directory = RunDirectory(absolute(str(runs)))
    # A calibration lies beside its run.
    if needs.calibrated and directory.path.name.startswith("run_id="):
        runs, run_ids = str(directory.path.parent), [directory.run_id]
    found = _opened(str(runs), code)
    source = choose_run(found, export, options, destination, run_ids or (), baseline)
    source = dataclasses.replace(source, device=device)
    exported: Exported = export.function(source, **options)
    # Before anything is written: the model, or what runs it, may not be there.
    trial = _tried_out(exported, source, model, device) if check else ""
    size = write_export(export, destination, exported.files)
    for note in filter(None, (*exported.notes, exported.stability)):
        tell_user(f"note: {note}")
    typer.echo(
        f"{output}: {name} of {source.model_name}, from run {source.run_id} ({size / 1e3:,.1f} kB)"
    )
    typer.echo(trial, nl=False)


def _tried_out(exported: Exported, source: ExportSource, model: str | None, device: Device) -> str:
    """What the model loses with a cache that is cut so: recall of needles, loss after repeats.

    If the number of heads is open, it is the smallest one with which nothing is lost. Returns the
    table, and what it says in lines, as one text.
    """
    cut = exported.cut
    if cut is None:
        raise QueryError(
            f"export {source.format.name}: chooses no heads to keep whole; leave out --check"
        )
    from headcount.queries.api import text_table
    from headcount.workers.head_check import JUDGED_SEED, SEARCHED_SEED, HeadTrial, verdict
    from headcount.workers.process import prepare_process

    prepare_process()
    # On the model where it lies now, which may have moved since the run.
    path, n_ctx = model or source.run["model"], source.run["n_ctx"]
    adapter = source.opened.manifest.identity["scan"].get("adapter", "refuse")
    trial = HeadTrial(path, cut.sink, cut.recent, n_ctx=n_ctx, device=device, adapter=adapter)
    heads = cut.heads
    lines: list[str] = []
    if cut.is_ranking:
        # A number that was found on some sequences is judged on others.
        kept = trial.fewest(heads, seed=SEARCHED_SEED)
        line = f"number of heads: with {kept} of {len(heads)} nothing is lost on other sequences"
        # All or none of them is no choice.
        if 0 < kept < len(heads):
            line += f"; --sparsity {1 - kept / len(heads):.4g} chooses them"
        lines.append(line)
        heads = heads[:kept]
    # A layer that does not attend has scores, but no cache.
    table = trial.table([head for head in heads if head in trial.kv_heads], seed=JUDGED_SEED)
    rows = [tuple(row.values()) for row in table.to_pylist()]
    text = text_table(table.schema.names, rows)
    return "".join(f"{line}\n" for line in (text, *lines, *verdict(table)))


def _measured(
    needs: Needs, name: str, fields: dict[str, Any], overrides: list[str] | None, device: Device
) -> tuple[str, RunDatabase | None]:
    """Measure all that is needed; returns where its run lies, and the baseline's run, opened."""
    from headcount.jobs.api import measure_losses_beside
    from headcount.jobs.commands.cluster import DRAWN_HEADS, DRAWN_SEQUENCES
    from headcount.jobs.plan.calibration import calibration_of
    from headcount.jobs.resources import Resources
    from headcount.schemas.files.places import absolute
    from headcount.schemas.files.run_directory import RunDirectory

    baseline = None
    # First, as its input takes fewer options: what it refuses is said before anything is measured.
    if needs.baseline is not None:
        baseline = _opened(_scan(needs.baseline, f"{name}-baseline", fields, overrides, device))
    path = _scan(needs, name, fields, overrides, device)
    if needs.calibrated:
        run = RunDirectory(absolute(path))
        losses = calibration_of(run, DRAWN_HEADS, DRAWN_SEQUENCES, draw=0)
        resources = Resources(replicas=0, device=device)
        measure_losses_beside(run, losses, "calibration", resources)
    return path, baseline


def _scan(
    needs: Needs, name: str, fields: dict[str, Any], overrides: list[str] | None, device: Device
) -> str:
    """Run or continue the scan that measures what is needed; returns where its run lies."""
    from headcount.jobs.api import run_scan
    from headcount.schemas.scans.scan import override_fields
    from headcount.workers.model.files.model_info import describe, find_model

    # No longer than the model takes, unless the user says so.
    overridden = override_fields(fields, overrides or [])
    directory = find_model(overridden["model"], overridden.get("revision"))
    adapter = overridden.get("adapter", "refuse")
    positions = describe(directory, adapter=adapter).n_ctx
    run = run_scan(
        override_fields(needs.scan_fields(fields["model"], positions) | fields, overrides or []),
        {},
        name=name,
        replicas=0,
        cores=0,
        device=device,
        address=None,
        new=False,
        quiet=False,
    )
    return str(run)


def _opened(runs: str, code: str | None = None) -> RunDatabase:
    from headcount.queries.ask.asking import open_runs

    database = open_runs(runs, code=code, tell=tell_user)
    warn_of_damage(database)
    return database


def help_text(export: ExportFormat) -> str:
    """What a format is for, who reads it, what it needs and takes, for a terminal."""
    needs = export.needs(export.parsed_options({}))
    lines = [
        export.meaning,
        "",
        f"Read by: {export.read_by}",
        f"Source:  {export.source}",
        f"Needs:   {needs}",
        f"Writes:  a {export.writes}",
    ]
    if export.details:
        lines += ["", export.details]
    if export.options:
        options = export.options.values()
        lines += ["", "Options:"]
        lines += [f"  {option.flag}  {option.meaning} ({option.values})" for option in options]
    command = f"headcount export {export.name}"
    lines += ["", f"From runs:  {command} RUNS -o {export.example}"]
    if needs.statistics or needs.profiles:
        lines.append(f"By a scan:  {command} --model bundled:gpt2-mini -o {export.example}")
    return "\n".join(lines)
