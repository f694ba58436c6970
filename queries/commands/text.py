"""The subcommand `text`: a sequence as it reads, and what a head attends to in it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import typer

from headcount.queries.open.sql_text import text_literal
from headcount.schemas.errors import ModelError, QueryError, printable
from headcount.schemas.measured_heads import Head
from headcount.workers.run_model import Look, RunModels

if TYPE_CHECKING:
    from headcount.queries.ask.asking import Record, RunDatabase

commands = typer.Typer(rich_markup_mode=None)

WIDTH = 100  # characters of a line by default


@commands.command()
def text(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory: a path or a URL.")],
    sequence: Annotated[
        int, typer.Argument(metavar="SEQUENCE", min=0, help="Number of the sequence, from 0.")
    ],
    head: Annotated[
        str | None,
        typer.Option(metavar="L5H1", help="Say what this head attends to from every token."),
    ] = None,
    intervention: Annotated[
        str, typer.Option(metavar="NAME", help="Under this intervention of the model.")
    ] = "none",
    width: Annotated[int, typer.Option(min=20, help="Characters of a line.")] = WIDTH,
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Where the model lies, if it has moved."),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Device that runs the head.")
    ] = "auto",
) -> None:
    """Print a sequence of a run as text, and what a head attends to in it."""
    from headcount.queries.commands.opening import open_for_command, tell_user, waiting

    chosen_head = None if head is None else Head.labelled(head)
    if head is not None and chosen_head is None:
        raise QueryError(f"--head: expected a layer and a head such as L5H1, got {head!r}")
    database = open_for_command(run)
    records = database.records("FROM runs")
    if len(records) != 1:
        directories = ", ".join(f"run_id={record['run_id']}" for record in records[:5])
        more = " …" if len(records) > 5 else ""
        raise QueryError(
            f"{run}: expected one run, got {len(records)}; say which directory: {directories}{more}"
        )
    (run_record,) = records
    n_layers, n_heads = run_record["n_layers"], run_record["n_heads"]
    if chosen_head and (chosen_head.layer >= n_layers or chosen_head.head >= n_heads):
        raise QueryError(
            f"--head {chosen_head}: {run_record['model']} has heads L0H0 to "
            f"{Head(n_layers - 1, n_heads - 1)}"
        )
    # A sequence has one row per intervention, all with the same tokens.
    rows = database.records(f"FROM sequences WHERE sequence = {sequence} LIMIT 1")
    if not rows:
        low, high = database.rows("SELECT min(sequence), max(sequence) FROM sequences")[0]
        existing = "none yet" if low is None else f"{low} to {high}"
        raise QueryError(
            f"run {run_record['run_id']} has no sequence {sequence}; it has {existing}"
        )
    (sequence_record,) = rows
    tokens: list[int] = sequence_record["tokens"]
    run_model = RunModels(run, model)[run_record["run_id"]]
    try:
        texts = [printable(piece) for piece in run_model.texts(tokens)]
    except ModelError as error:
        # What a head attends to can be shown without a tokenizer.
        tell_user(f"note: token numbers are shown: {error}")
        texts = [str(token) for token in tokens]
    out = sys.stdout
    out.write(_heading(run_record, sequence_record))
    if chosen_head is None:
        _write_text(texts, out, width)
        return
    layer, head_index = chosen_head
    with waiting("loading the model"):
        looks = run_model.looks(sequence, tokens, layer, head_index, intervention, device)
    _write_statistics(database, sequence, chosen_head, intervention, out)
    _write_looks(texts, looks, out, width)


def _heading(run: Record, sequence: Record) -> str:
    facts = [f"sequence {sequence['sequence']} of {run['run_id']}"]
    facts.append(f"{len(sequence['tokens'])} tokens")
    if sequence["file"] is not None:
        facts.append("{file}, row {row}, from token {offset}".format(**sequence))
    if sequence["pile_set_name"] is not None:
        facts.append(sequence["pile_set_name"])
    return f"{printable('; '.join(facts))}\n\n"


def _write_text(texts: list[str], out: TextIO, width: int) -> None:
    """Write tokens with a bar between two, and before each line the position of its first token."""
    from rich.cells import cell_len

    # Widths are cells of a terminal, of which a character may take two.
    position_width = len(str(len(texts)))
    room = width - position_width - 2
    line = ""
    line_width = 0
    first_position = 0
    for position, text in enumerate(texts):
        piece = f"|{text}" if line else text
        if line and line_width + cell_len(piece) > room:
            out.write(f"{first_position:>{position_width}}  {line}\n")
            line = ""
            line_width = 0
            first_position = position
            piece = text
        line += piece
        line_width += cell_len(piece)
    out.write(f"{first_position:>{position_width}}  {line}\n")


def _write_statistics(
    database: RunDatabase, sequence: int, head: Head, intervention: str, out: TextIO
) -> None:
    rows = database.records(f"""
        SELECT
            * EXCLUDE (run_id, intervention, input_family, shard, sequence, layer, head, label)
        FROM heads
        WHERE sequence = {sequence}
            AND layer = {head.layer}
            AND head = {head.head}
            AND intervention = {text_literal(intervention)}
    """)
    out.write(f"{head}, intervention {intervention}\n")
    if not rows:
        out.write("not measured in this run\n\n")
        return
    name_width = max(map(len, rows[0]))
    for name, value in rows[0].items():
        out.write(f"{name:<{name_width}}  {'NULL' if value is None else f'{value:.4g}'}\n")
    out.write("\n")


def _write_looks(texts: list[str], looks: Sequence[Look], out: TextIO, width: int) -> None:
    """Write a line for every token: the key with most of its attention, and that to key 0."""
    from rich.cells import cell_len, set_cell_size

    digits = max(len(str(len(texts))), 3)
    # Two positions, two shares and the spaces between take the rest of a line.
    text_width = max((width - 2 * digits - 18) // 2, 5)
    # Quotes show where a token begins with a space.
    quoted_texts = [f"'{text}'" for text in texts]
    text_width = min(text_width, max(*map(cell_len, quoted_texts), 6))

    def fitted(text: str) -> str:
        is_short = cell_len(text) <= text_width
        return set_cell_size(text if is_short else f"{text[: text_width - 1]}+", text_width)

    out.write(
        f"{'pos':>{digits}} {fitted('token')} {'key':>{digits}} {fitted('is')}  share  key 0\n"
    )
    for position, (text, look) in enumerate(zip(quoted_texts, looks, strict=True)):
        if look.key >= 0:
            key = f"{look.key:>{digits}} {fitted(quoted_texts[look.key])}  {look.mass:5.3f}"
        else:
            # An intervention may hide all keys of a query.
            key = f"{'-':>{digits}} {fitted('')}  {'-':>5}"
        out.write(f"{position:>{digits}} {fitted(text)} {key}  {look.first:5.3f}\n")
