"""The subcommands `export` and `cache-plan`. Heavy imports wait until one runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer.core import TyperCommand

from headcount.jobs.commands.options import (
    ClusterAddress,
    Cores,
    DeviceOption,
    MaybeReplicas,
    TrustPlugins,
)
from headcount.queries.commands.opening import Code, tell_user
from headcount.schemas.errors import QueryError

if TYPE_CHECKING:
    from headcount.exports.shared.registry import ExportFormat

commands = typer.Typer(rich_markup_mode=None)

FORMAT_OPTIONS = "headcount.format_options"
"""Where a command keeps what the options of its format are, until it runs."""

Device = Literal["auto", "cpu", "cuda"]

EngineName = Literal["any", "duo", "transformers", "vllm", "llama.cpp", "mlx"]


class ExportCommand(TyperCommand):
    """A command that also takes the options of a format, and explains them."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Read the command line. `--help` beside a format is about that format."""
        from headcount.exports.formats import export_formats
        from headcount.schemas.plugin_files import read_and_activate

        # Ours first: no plug-in may take one of their names.
        export_formats()
        read_and_activate([*_values_of("--plugin", args)])
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


def _values_of(flag: str, args: Sequence[str]) -> Iterator[str]:
    """What a command line says behind a flag, each time that it stands there."""
    for word, following in pairwise([*args, ""]):
        name, equals, value = word.partition("=")
        if name == flag:
            yield value if equals else following


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
    check_sequences: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="NUMBER",
            help="Sequences of --check that choose a number of heads, and as many others that "
            "report: fewer take less time, and say less. Default: 16.",
        ),
    ] = None,
    texts: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="A text that --check reads, as cache-plan does. May be repeated. Default: our "
            "licence, which is short.",
        ),
    ] = None,
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
    plugins: Annotated[
        list[str] | None,
        typer.Option(
            "--plugin",
            metavar="FILE",
            help="Also take formats from this Python file. May be repeated.",
        ),
    ] = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Write what runs measured as a file that another tool loads: which heads retrieve, how far
    they look back, how large their keys get.
    """
    from headcount.exports.destination import check_destination
    from headcount.exports.formats import export_formats
    from headcount.exports.refusals import check_libraries
    from headcount.exports.request import DEFAULT_SEQUENCES, ExportRequest
    from headcount.exports.shared.registry import FORMATS
    from headcount.schemas.plugin_files import read_plugins

    if listed:
        for format_name, listed_format in export_formats().items():
            typer.echo(f"{format_name}: {listed_format.title}\n    {listed_format.read_by}")
        return
    export_formats()
    if name is None:
        raise QueryError("expected the name of a format; headcount export --list has them")
    export = FORMATS.named(name, "export")
    options = export.parsed_options(context.meta.get(FORMAT_OPTIONS, {}))
    if output is None:
        raise QueryError(
            f"export {name}: say where to with -o PATH, for instance -o {export.example}"
        )
    # Before any scan: it would be paid for in vain.
    destination = check_destination(export, output, replace, options)
    contradictions = {
        f"export {name}: expected RUNS, or --model MODEL to measure it now": runs is model is None,
        "--set is about the scan of --model; leave it out": model is None and overrides,
        "--run is about runs that are there, and --model measures its own; leave out one": (
            model is not None and run_ids
        ),
        f"export {name}: chooses no heads to keep whole; leave out --check": (
            check and export.streamed_keys is None
        ),
        "--check-sequences is about --check; leave it out": (
            check_sequences is not None and not check
        ),
        "--text is about --check; leave it out": texts and not check,
    }
    for problem, is_wrong in contradictions.items():
        if is_wrong:
            raise QueryError(problem)
    check_libraries(export)
    request = ExportRequest(
        export=export,
        options=options,
        destination=destination,
        replace=replace,
        model=model,
        check_sequences=(check_sequences or DEFAULT_SEQUENCES) if check else None,
        texts=texts or [],
        device=device,
        code=code,
        run_ids=run_ids or [],
        plugins=read_plugins(plugins or []),
        trust_plugins=trust_plugins,
    )
    exported, source, size = request.made(runs, overrides or [])
    for note in filter(None, (*exported.notes, exported.stability)):
        tell_user(f"note: {note}")
    typer.echo(
        f"{output}: {name} of {source.model_name}, from run {source.run_id} ({size / 1e3:,.1f} kB)"
    )
    if check:
        from headcount.exports.cache_plan.head_check import lines_of_check

        assert source.check is not None
        assert exported.cut is not None
        for line in lines_of_check(source.check, len(exported.cut.heads)):
            typer.echo(line)


@commands.command("cache-plan")
def cache_plan(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A directory, a GGUF file, a Hub id or bundled:NAME."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="FOLDER",
            help="Folder for plan.json and the engine's files. A plan that is there is continued.",
        ),
    ],
    loss: Annotated[
        float | None,
        typer.Option(min=0, help="How far the loss may rise, in nats per token."),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            "--bytes", min=0, max=1, help="The share of the bytes that may stay, instead of --loss."
        ),
    ] = None,
    task: Annotated[
        Literal["text", "recall"],
        typer.Option(help="What must stay: the loss of text, or the recall of needles as well."),
    ] = "text",
    engine: Annotated[
        EngineName, typer.Option(help="The engine that will run the model with it.")
    ] = "any",
    texts: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="A text, or a .jsonl, .parquet or .csv file of documents; may be given several "
            "times. Default: our licence, which is short.",
        ),
    ] = None,
    n_ctx: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a sequence, at which bytes are counted. Default: 512."),
    ] = None,
    sequences: Annotated[
        int, typer.Option(min=2, help="Sequences that choose, and as many others that report.")
    ] = 8,
    window: Annotated[int, typer.Option(min=1, help="Last keys that a window keeps.")] = 64,
    replicas: MaybeReplicas = None,
    cores: Cores = 0,
    device: DeviceOption = "auto",
    address: ClusterAddress = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace a plan of other questions.")
    ] = False,
) -> None:
    """Plan a cache: the fewest bytes at a loss, or the least loss at a share of the bytes.

    Every plan that is tried is measured as a whole. Half of the documents choose, the others
    report.
    """
    from headcount.workers.process import prepare_process

    if loss is None and share is None:
        raise QueryError("cache-plan: expected --loss NATS or --bytes SHARE; say one")
    prepare_process()
    from headcount.exports.cache_plan.engines import ENGINES
    from headcount.exports.cache_plan.planning import PlanRequest, lines_of
    from headcount.exports.cache_plan.search import Goal
    from headcount.jobs.resources import Resources

    resources = Resources.asked_for(replicas, cores, device, address)
    resources.check_here()
    if not resources.replicas:
        prepare_process(resources.cores or None)
    content = PlanRequest(
        model=model,
        engine=ENGINES[engine],
        goal=Goal(loss, share, task == "recall"),
        texts=texts or [],
        n_ctx=n_ctx,
        sequences=sequences,
        recent=window,
        resources=resources,
        folder=output,
        replace=replace,
    ).made()
    for line in lines_of(content):
        typer.echo(line)
    typer.echo(f"{output}: {engine} plan of {content['model']}")


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
