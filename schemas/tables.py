"""The Parquet tables: which columns, of which type, with which meaning."""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import json
from collections.abc import Iterable

import pyarrow as pa

from schemas.statistics import Statistic

KEYS: dict[str, tuple[pa.DataType, str]] = {
    "input_family": (pa.string(), "Family of inputs that the sequence comes from."),
    "shard": (pa.int32(), "Shard that the sequence belongs to: the unit of work and of commit."),
    "sequence": (
        pa.int64(),
        "Index of the sequence in the scan; with the seed and the options it determines the tokens.",
    ),
    "layer": (pa.int16(), "Layer, from 0."),
    "head": (pa.int16(), "Head within the layer, from 0."),
}
"""Key columns inside the files; `run_id` and `intervention` are the names of the directories around them."""

ORIGIN: dict[str, tuple[pa.DataType, str]] = {
    "file": (pa.string(), "File that the text comes from; NULL for synthetic input."),
    "row": (pa.int64(), "Row (line) of the file that holds the first token of the text, from 0."),
    "offset": (pa.int32(), "Token of that row at which the sequence starts, from 0."),
    "pile_set_name": (pa.string(), "Part of the Pile that the row belongs to, where the corpus says so."),
    "n_tokens": (pa.int32(), "Tokens in the sequence, the beginning-of-sequence token included."),
    "tokens": (pa.list_(pa.int32()), "Token ids, as the model saw them."),
}
"""Columns of `sequences` that say where a sequence came from and what it was."""


def heads_schema(statistics: Iterable[Statistic]) -> pa.Schema:
    """One row per sequence × layer × head, one float32 column per statistic."""
    columns = [_field(s.name, pa.float32(), s.description, s) for s in statistics]
    return pa.schema([_key(name) for name in KEYS] + columns)


def sequences_schema(statistics: Iterable[Statistic]) -> pa.Schema:
    """One row per sequence: its origin, its tokens, and what uniform attention would have scored on it."""
    keys = [_key(name) for name in ("input_family", "shard", "sequence")]
    origin = [_field(name, type_, text) for name, (type_, text) in ORIGIN.items()]
    chance = [
        _field(chance_column(s.name), pa.float32(), f"What uniform attention would score as {s.name}.", s)
        for s in statistics
        if s.chance
    ]
    return pa.schema(keys + origin + chance)


def chance_column(statistic: str) -> str:
    """The column of `sequences` that holds a statistic's chance level."""
    return f"chance_{statistic}"


def _key(name: str) -> pa.Field:
    type_, text = KEYS[name]
    return pa.field(name, type_, nullable=False, metadata={"description": text})


def _field(name: str, type_: pa.DataType, description: str, statistic: Statistic | None = None) -> pa.Field:
    metadata = {"description": description}
    if statistic is not None:
        metadata |= {"unit": statistic.unit, "range": json.dumps(statistic.range), "source": statistic.source}
    return pa.field(name, type_, metadata=metadata)
