"""The subcommand `reproduce texts`. Heavy imports wait until it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headcount.schemas.errors import RunError, ScanError, unknown


def texts(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="sink_circuit, sink_circuit_long or sink_circuit_sentence."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="CSV file to write. Default: the name that the systems read.",
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
        str,
        typer.Option(metavar="MODEL", help="A directory or Hub id with GPT-2's tokenizer."),
    ] = "openai-community/gpt2",
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Draw other texts by the same recipe. Default: the published."),
    ] = None,
) -> None:
    """Build the texts that a system of the literature was published for.

    We ship no text of others. The texts are built from public data sets by the authors' recipe,
    and compared with a fingerprint of the published ones.
    """
    # This imports the tokenizer's library, which `headcount --help` need not wait for.
    from headcount.queries.ask.formats import check_suffix
    from headcount.reproduce.published_texts import (
        RECIPES,
        Sources,
        as_csv,
        check_published,
        gpt2_tokenizer,
        rows_below,
        rows_of_hub,
    )
    from headcount.schemas.files.places import write_whole

    if name not in RECIPES:
        raise ScanError(unknown("texts", name, RECIPES))
    recipe = RECIPES[name]
    file = output or Path(recipe.file)
    check_suffix(file, ".csv")
    if not file.absolute().parent.is_dir():
        raise RunError(f"{file}: cannot be written ({file.parent} is no directory)")
    drawn_with = recipe.seed if seed is None else seed
    built = recipe.build(
        Sources(
            rows_of_hub if source is None else rows_below(source),
            lambda: gpt2_tokenizer(tokenizer),
            typer.echo,
        ),
        drawn_with,
    )
    write_whole(file.absolute(), as_csv(built))
    typer.echo(f"{file}: {recipe.what}")
    typer.echo(check_published(recipe, built, drawn_with))
