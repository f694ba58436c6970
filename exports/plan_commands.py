"""The subcommand `cache-plan`. Heavy imports wait until it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

commands = typer.Typer(rich_markup_mode=None)

EngineName = Literal["any", "duo", "transformers", "vllm", "llama.cpp", "mlx"]


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
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Device of the model.")
    ] = "auto",
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace a plan of other questions.")
    ] = False,
) -> None:
    """Plan a cache: the fewest bytes at a loss, or the least loss at a share of the bytes.

    Every plan that is tried is measured as a whole. Half of the documents choose, the others
    report.
    """
    from headcount.schemas.errors import QueryError
    from headcount.workers.process import prepare_process

    if loss is None and share is None:
        raise QueryError("cache-plan: expected --loss NATS or --bytes SHARE; say one")
    prepare_process()
    from headcount.exports.cache_plan.engines import ENGINES
    from headcount.exports.cache_plan.planning import PlanRequest, lines_of
    from headcount.exports.cache_plan.search import Goal

    content = PlanRequest(
        model=model,
        engine=ENGINES[engine],
        goal=Goal(loss, share, task == "recall"),
        texts=texts or [],
        n_ctx=n_ctx,
        sequences=sequences,
        recent=window,
        device=device,
        folder=output,
        replace=replace,
    ).made()
    for line in lines_of(content):
        typer.echo(line)
    typer.echo(f"{output}: {engine} plan of {content['model']}")
