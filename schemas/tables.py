"""The Parquet tables: what one row is, which columns it has, in which order rows lie on disk.

A table is an object. `schemas.kinds.TABLES` lists them all: each is filled by a kind of measurement.
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from schemas.formulas import is_list

Written = Literal["every shard", "where asked for", "once"]
"""When a table is written: by every shard under every intervention; likewise, if the scan names
something that fills it; or once in a run, with shard 0.
"""


@dataclass(frozen=True)
class Column:
    """A column of a table or of a view."""

    name: str
    type: pa.DataType
    description: str
    nullable: bool = True
    facts: tuple[tuple[str, str], ...] = ()
    """More metadata of the Parquet field: unit, source, range."""

    @property
    def field(self) -> pa.Field:
        """The column of a Parquet schema."""
        metadata = {"description": self.description, **dict(self.facts)}
        return pa.field(self.name, self.type, nullable=self.nullable, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table: the folder of its files and the view that SQL sees have its name."""

    name: str
    grain: tuple[str, ...]
    """What one row is of, besides its run and its intervention."""
    content: str
    """What a row holds, in a few words."""
    keys: tuple[Column, ...]
    """Columns that are never NULL, besides those of `PARTITIONS`."""
    columns: tuple[Column, ...] = ()
    """The other columns that it has whatever a scan asks for."""
    order: tuple[str, ...]
    """Columns that merged files are sorted by, so that row groups are skipped by their values."""
    written: Written

    @property
    def description(self) -> str:
        """What the view is, in one sentence."""
        around = ("run",) if self.written == "once" else ("run", "intervention")
        *most, last = (*around, *self.grain)
        return f"One row per {', '.join(most)} and {last}: {self.content}"

    @property
    def own(self) -> dict[str, Column]:
        """The columns that it has whatever a scan asks for, by name."""
        return {column.name: column for column in (*self.keys, *self.columns)}

    def has(self, key: str) -> bool:
        """Whether a column is one of its keys."""
        return any(column.name == key for column in self.keys)

    def schema(self, measured: Iterable[Column] = ()) -> pa.Schema:
        """The schema of its rows: its own columns, then what was measured."""
        return pa.schema([column.field for column in (*self.own.values(), *measured)])


def measured_column(name: str, facts: Mapping[str, Any]) -> Column:
    """The column of a formula, from its facts or from its record in a manifest."""
    type_ = pa.list_(pa.float32()) if is_list(facts) else pa.float32()
    description = facts.get("description", "")
    if axis := facts.get("axis"):
        description = f"By {axis}, from 0: {description}"
    return Column(name, type_, description, facts=_column_facts(facts))


def chance_column(statistic: str) -> str:
    """The column of `sequences` that holds a statistic's chance level."""
    return f"chance_{statistic}"


def measured_chance(name: str, facts: Mapping[str, Any]) -> Column:
    """The column of `sequences` with what uniform attention would score as a statistic."""
    description = f"What uniform attention would score as {name}."
    return Column(chance_column(name), pa.float32(), description, facts=_column_facts(facts))


def _column_facts(facts: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    texts = [(name, facts[name]) for name in ("unit", "source") if name in facts]
    ranges = [("range", json.dumps(facts["range"]))] if facts.get("range") else []
    return (*texts, *ranges)


WORD = pa.dictionary(pa.int32(), pa.string())
"""Type of a word that a whole file repeats. pandas gives a directory's name the same type."""

RUN_ID = Column("run_id", WORD, "Run that the row belongs to.", nullable=False)
INTERVENTION = Column(
    "intervention",
    WORD,
    "Edit of the model under which it was measured; none is the untouched model.",
    nullable=False,
)
PARTITIONS = (RUN_ID, INTERVENTION)
"""Columns of every file that are also the names of the directories around it.

Some readers of a glob do not look at directories. Without the columns in the file they would mix
interventions and runs, and nothing in the rows would tell them apart.
"""


def with_partitions(rows: pa.Table, run_id: str, intervention: str) -> pa.Table:
    """The rows of a file: which run and which intervention they are of, then what they hold."""
    fields = [column.field for column in PARTITIONS]
    zeros = pa.array(np.zeros(rows.num_rows, np.int32))
    words = [pa.DictionaryArray.from_arrays(zeros, [word]) for word in (run_id, intervention)]
    columns = [*words, *rows.columns]
    return pa.Table.from_arrays(columns, schema=pa.schema([*fields, *rows.schema]))


INPUT_FAMILY = Column(
    "input_family", pa.string(), "Family of inputs that the sequence comes from.", nullable=False
)
SHARD = Column(
    "shard",
    pa.int32(),
    "Shard that the sequence belongs to: the unit of work and of commit.",
    nullable=False,
)
SEQUENCE = Column(
    "sequence",
    pa.int64(),
    "Index of the sequence in the scan; with the seed and the options it determines the tokens.",
    nullable=False,
)
LAYER = Column("layer", pa.int16(), "Layer, from 0.", nullable=False)
HEAD = Column("head", pa.int16(), "Head within the layer, from 0.", nullable=False)

OF_SEQUENCE = (INPUT_FAMILY, SHARD, SEQUENCE)
OF_HEAD = (*OF_SEQUENCE, LAYER, HEAD)
"""Keys of the tables with a row per sequence, and with a row per sequence, layer and head."""

HEADS = Table(
    name="heads",
    grain=("sequence", "layer", "head"),
    content="every statistic as it was measured.",
    keys=OF_HEAD,
    order=("layer", "head", "sequence"),
    written="every shard",
)

SEQUENCES = Table(
    name="sequences",
    grain=("sequence",),
    content="where it came from, its tokens, what uniform attention would score, what the model "
    "predicts.",
    keys=OF_SEQUENCE,
    columns=(
        Column("file", pa.string(), "File that the text comes from; NULL for synthetic input."),
        Column(
            "row",
            pa.int64(),
            "Row (line) of the file that holds the first token of the text, from 0.",
        ),
        Column("offset", pa.int32(), "Token of that row at which the sequence starts, from 0."),
        Column(
            "pile_set_name",
            pa.string(),
            "Part of the Pile that the row belongs to, where the corpus says so.",
        ),
        Column(
            "n_tokens",
            pa.int32(),
            "Tokens in the sequence, the beginning-of-sequence token included.",
        ),
        Column("tokens", pa.list_(pa.int32()), "Token ids, as the model saw them."),
        Column(
            "labels",
            pa.list_(pa.string()),
            "What each token is in the layout of the input family, '' where nothing; NULL where "
            "the family has no labels.",
        ),
    ),
    order=("sequence",),
    written="every shard",
)

CURVES = Table(
    name="curves",
    grain=("sequence", "layer", "head"),
    content="lists with a number for every key, query or lag.",
    keys=OF_HEAD,
    order=("layer", "head", "sequence"),
    written="where asked for",
)

PROFILES = Table(
    name="profiles",
    grain=("shard", "layer", "head", "profile", "entry"),
    content="means over the shard's sequences.",
    keys=(SHARD, LAYER),
    columns=(
        Column(
            "head",
            pa.int16(),
            "Head within the layer, from 0; NULL where the heads of a layer share the values.",
        ),
        Column(
            "profile",
            pa.string(),
            "Profile: what was averaged over the sequences of the shard.",
        ),
        Column(
            "query",
            pa.int32(),
            "Query, from 0, of profiles along queries or pairs; NULL along keys or lags.",
        ),
        Column(
            "key",
            pa.int32(),
            "Key, from 0, of profiles along keys or pairs; NULL along queries or lags.",
        ),
        Column(
            "lag", pa.int32(), "Lag, query - key, of profiles along lags; NULL along the others."
        ),
        Column("count", pa.int64(), "Sequences."),
        Column("mean", pa.float64(), "Mean over the sequences."),
        Column(
            "m2", pa.float64(), "Sum over the sequences of the squared deviation from the mean."
        ),
    ),
    order=("profile", "layer", "head", "query", "key", "lag", "shard"),
    written="where asked for",
)

WEIGHTS = Table(
    name="weights",
    grain=("layer", "head", "weight statistic", "index"),
    content="what the weights say without any input.",
    keys=(),
    columns=(
        Column("layer", pa.int16(), "Layer, from 0; NULL for what a model has once."),
        Column(
            "head",
            pa.int16(),
            "Head within the layer, from 0; NULL where heads share the values.",
        ),
        Column(
            "weight", pa.string(), "Weight statistic: what was computed from the weights alone."
        ),
        Column(
            "position",
            pa.int32(),
            "Position, from 0, of statistics along positions; NULL for the others.",
        ),
        Column(
            "dimension",
            pa.int32(),
            "Coordinate of the residual stream, from 0, of statistics along them; NULL for the "
            "others.",
        ),
        Column("value", pa.float64(), "Value; NULL where it is not defined."),
    ),
    order=("weight", "layer", "head", "position", "dimension"),
    written="once",
)
