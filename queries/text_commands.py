"""The subcommand `text`: a sequence as it reads, and what a head looks at in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import typer

from queries.run_models import LookLike, OpenModel, RunModelLike, RunModels
from schemas.errors import ModelError, QueryError, printable

if TYPE_CHECKING:
    from queries.asking import Record, RunDatabase

WIDTH = 100
"""Columns of the lines, unless told."""


def mount(app: typer.Typer, open_model: OpenModel) -> None:
    """Add the subcommand to the front door."""

    @app.command()
    def text(  # pyright: ignore[reportUnusedFunction]
        run: Annotated[
            str, typer.Argument(metavar="RUN", help="A run directory: a path or a URL.")
        ],
        sequence: Annotated[
            int, typer.Argument(metavar="SEQUENCE", min=0, help="Number of the sequence, from 0.")
        ],
        head: Annotated[
            str | None,
            typer.Option(metavar="L5H1", help="Say what this head looks at from every token."),
        ] = None,
        intervention: Annotated[
            str, typer.Option(metavar="NAME", help="Under this edit of the model.")
        ] = "none",
        width: Annotated[int, typer.Option(min=20, help="Columns of a line.")] = WIDTH,
        model: Annotated[
            str | None,
            typer.Option(metavar="PATH", help="Where the model lies, if it has moved."),
        ] = None,
        device: Annotated[
            Literal["auto", "cpu", "cuda"], typer.Option(help="What the head is run on.")
        ] = "auto",
    ) -> None:
        """Print a sequence of a run as text, and what a head looks at in it."""
        from queries.asking import open_runs
        from queries.formats import writing_to_stdout
        from queries.query_commands import tell_user, warn_of_damage

        place = None if head is None else _head(head)
        database = open_runs(run, tell=tell_user)
        warn_of_damage(database)
        record = _only_run(database, run)
        if place is not None:
            _check_head(place, record)
        found = _sequence(database, record, sequence)
        tokens: list[int] = found["tokens"]
        of_run = RunModels(run, open_model, model)[record["run_id"]]
        texts = _texts(of_run, tokens)
        with writing_to_stdout() as out:
            out.write(_heading(record, found))
            if place is None:
                _write_text(texts, out, width)
                return
            looks = of_run.looks(sequence, tokens, *place, intervention, device)
            _write_statistics(database, sequence, place, intervention, out)
            _write_looks(texts, looks, out, width)


def _head(text: str) -> tuple[int, int]:
    """Layer and head, from their label.

    >>> _head("L5H1")
    (5, 1)
    """
    match = re.fullmatch(r"[Ll](\d+)[Hh](\d+)", text.strip())
    if match is None:
        raise QueryError(f"--head: expected a layer and a head such as L5H1, got {text!r}")
    return int(match[1]), int(match[2])


def _check_head(place: tuple[int, int], run: Record) -> None:
    layer, head = place
    if layer >= run["n_layers"] or head >= run["n_heads"]:
        raise QueryError(
            f"--head L{layer}H{head}: {run['model']} has heads L0H0 to "
            f"L{run['n_layers'] - 1}H{run['n_heads'] - 1}"
        )


def _only_run(database: RunDatabase, place: str) -> Record:
    """The one run at a place."""
    runs = database.records("FROM runs")
    if len(runs) != 1:
        ids = ", ".join(f"run_id={run['run_id']}" for run in runs[:5])
        raise QueryError(
            f"{place}: expected one run, got {len(runs)}; say which directory: {ids}"
            f"{' …' if len(runs) > 5 else ''}"
        )
    return runs[0]


def _sequence(database: RunDatabase, run: Record, sequence: int) -> Record:
    """The row of a sequence."""
    found = database.records(f"FROM sequences WHERE sequence = {sequence} LIMIT 1")
    if found:
        return found[0]
    ends = database.records("SELECT min(sequence) AS low, max(sequence) AS high FROM sequences")[0]
    have = "none yet" if ends["low"] is None else f"{ends['low']} to {ends['high']}"
    raise QueryError(f"run {run['run_id']} has no sequence {sequence}; it has {have}")


def _texts(model: RunModelLike, tokens: list[int]) -> list[str]:
    """The text of each token; its number where the model has no tokenizer."""
    try:
        return [printable(text) for text in model.texts(tokens)]
    except ModelError as error:
        typer.echo(f"note: token numbers are shown: {error}", err=True)
        return [str(token) for token in tokens]


def _heading(run: Record, found: Record) -> str:
    """Where a sequence comes from, on one line."""
    parts = [f"sequence {found['sequence']} of {run['run_id']}", f"{len(found['tokens'])} tokens"]
    if found["file"] is not None:
        parts.append(f"{found['file']}, row {found['row']}, from token {found['offset']}")
    if found["pile_set_name"] is not None:
        parts.append(found["pile_set_name"])
    return f"{printable('; '.join(parts))}\n\n"


def _write_text(texts: list[str], out: TextIO, width: int) -> None:
    """Write tokens one after the other, a bar between two, and before each line the position of its
    first token.
    """
    from rich.cells import cell_len

    edge = len(str(len(texts))) + 2
    line, used, start = "", 0, 0
    for position, text in enumerate(texts):
        piece = text if not line else f"|{text}"
        if line and edge + used + cell_len(piece) > width:
            out.write(f"{start:>{edge - 2}}  {line}\n")
            line, used, start, piece = "", 0, position, text
        line += piece
        used += cell_len(piece)
    out.write(f"{start:>{edge - 2}}  {line}\n")


def _write_statistics(
    database: RunDatabase,
    sequence: int,
    place: tuple[int, int],
    intervention: str,
    out: TextIO,
) -> None:
    """Write what the run measured of a head on a sequence."""
    layer, head = place
    quoted = intervention.replace("'", "''")
    rows = database.records(
        "SELECT * EXCLUDE (run_id, intervention, input_family, shard, sequence, layer, head, "
        f"label) FROM heads WHERE sequence = {sequence} AND layer = {layer} AND head = {head} "
        f"AND intervention = '{quoted}'"
    )
    out.write(f"L{layer}H{head}, intervention {intervention}\n")
    if not rows:
        out.write("not measured in this run\n\n")
        return
    edge = max(map(len, rows[0]))
    for name, value in rows[0].items():
        out.write(f"{name:<{edge}}  {'NULL' if value is None else f'{value:.4g}'}\n")
    out.write("\n")


def _write_looks(texts: list[str], looks: Sequence[LookLike], out: TextIO, width: int) -> None:
    """Write a line for every token: the key with most of its attention, and that to key 0."""
    from rich.cells import cell_len, set_cell_size

    digits = max(len(str(len(texts))), 3)
    room = max((width - 2 * digits - 18) // 2, 5)
    # Quotes show where a token begins with a space.
    texts = [f"'{text}'" for text in texts]
    room = min(room, max(*map(cell_len, texts), 6))

    def cut(text: str) -> str:
        return set_cell_size(text if cell_len(text) <= room else f"{text[: room - 1]}+", room)

    out.write(f"{'pos':>{digits}} {cut('token')} {'key':>{digits}} {cut('is')}  share  key 0\n")
    for position, (text, look) in enumerate(zip(texts, looks, strict=True)):
        key = f"{look.key:>{digits}} {cut(texts[look.key])}  {look.mass:5.3f}"
        unseen = f"{'-':>{digits}} {cut('')}  {'-':>5}"
        out.write(
            f"{position:>{digits}} {cut(text)} {key if look.key >= 0 else unseen}  "
            f"{look.first:5.3f}\n"
        )
