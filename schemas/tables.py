"""The Parquet tables: which columns, of which type, with which meaning."""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import json
from collections.abc import Iterable

import pyarrow as pa

from schemas.formulas import Formula, Ranged
from schemas.predictions import Prediction
from schemas.profiles import Profile
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
"""Key columns inside the files; `run_id` and `intervention` are the names of the directories around
them.
"""

ORIGIN: dict[str, tuple[pa.DataType, str]] = {
    "file": (pa.string(), "File that the text comes from; NULL for synthetic input."),
    "row": (pa.int64(), "Row (line) of the file that holds the first token of the text, from 0."),
    "offset": (pa.int32(), "Token of that row at which the sequence starts, from 0."),
    "pile_set_name": (
        pa.string(),
        "Part of the Pile that the row belongs to, where the corpus says so.",
    ),
    "n_tokens": (pa.int32(), "Tokens in the sequence, the beginning-of-sequence token included."),
    "tokens": (pa.list_(pa.int32()), "Token ids, as the model saw them."),
    "labels": (
        pa.list_(pa.string()),
        "What each token is in the layout of the input family, '' where nothing; NULL where the family has no labels.",
    ),
}
"""Columns of `sequences` that say where a sequence came from and what it was."""

PROFILE: dict[str, tuple[pa.DataType, str]] = {
    "head": (
        pa.int16(),
        "Head within the layer, from 0; NULL where the heads of a layer share the values.",
    ),
    "profile": (pa.string(), "Profile: what was averaged over the sequences of the shard."),
    "query": (
        pa.int32(),
        "Query, from 0, of profiles along queries or pairs; NULL along keys or lags.",
    ),
    "key": (
        pa.int32(),
        "Key, from 0, of profiles along keys or pairs; NULL along queries or lags.",
    ),
    "lag": (pa.int32(), "Lag, query - key, of profiles along lags; NULL along the others."),
    "count": (pa.int64(), "Sequences."),
    "mean": (pa.float64(), "Mean over the sequences."),
    "m2": (pa.float64(), "Sum over the sequences of the squared deviation from the mean."),
}
"""Columns of `profiles` after `shard` and `layer`: which entry of which profile, and its mergeable
aggregate.
"""

WEIGHT: dict[str, tuple[pa.DataType, str]] = {
    "layer": (pa.int16(), "Layer, from 0; NULL for what a model has once."),
    "head": (pa.int16(), "Head within the layer, from 0; NULL where heads share the values."),
    "weight": (pa.string(), "Weight statistic: what was computed from the weights alone."),
    "position": (
        pa.int32(),
        "Position, from 0, of statistics along positions; NULL for the others.",
    ),
    "dimension": (
        pa.int32(),
        "Coordinate of the residual stream, from 0, of statistics along them; NULL for the others.",
    ),
    "value": (pa.float64(), "Value; NULL where it is not defined."),
}
"""Columns of `weights`, which says the same of every shard."""


def heads_schema(statistics: Iterable[Statistic]) -> pa.Schema:
    """One row per sequence × layer × head, one float32 column per statistic."""
    columns = [_field(s.name, pa.float32(), s.description, s) for s in statistics]
    return pa.schema([_key(name) for name in KEYS] + columns)


def curves_schema(curves: Iterable[Profile]) -> pa.Schema:
    """One row per sequence × layer × head, one list of float32 per curve: a number for every key,
    query or lag.
    """
    columns = [
        _field(c.name, pa.list_(pa.float32()), f"By {c.axis}, from 0: {c.description}", c)
        for c in curves
    ]
    return pa.schema([_key(name) for name in KEYS] + columns)


def sequences_schema(
    statistics: Iterable[Statistic], predictions: Iterable[Prediction] = ()
) -> pa.Schema:
    """One row per sequence: its origin, its tokens, what uniform attention would have scored, what
    the model predicts.
    """
    keys = [_key(name) for name in ("input_family", "shard", "sequence")]
    origin = [_field(name, type_, text) for name, (type_, text) in ORIGIN.items()]
    chance = [
        _field(
            chance_column(s.name),
            pa.float32(),
            f"What uniform attention would score as {s.name}.",
            s,
        )
        for s in statistics
        if s.chance
    ]
    predicted = [
        _field(o.name, prediction_type(o.per_token), o.description, o) for o in predictions
    ]
    return pa.schema(keys + origin + chance + predicted)


def prediction_type(per_token: bool) -> pa.DataType:
    """The type of a prediction's column."""
    return pa.list_(pa.float32()) if per_token else pa.float32()


def profiles_schema() -> pa.Schema:
    """One row per shard × layer × head × profile × entry, an entry being a query, a key, a lag, or
    a query and a key.
    """
    columns = [_field(name, type_, text) for name, (type_, text) in PROFILE.items()]
    return pa.schema([_key("shard"), _key("layer"), *columns])


def weights_schema() -> pa.Schema:
    """One row per layer × head × weight statistic × index, an index being a position or a
    dimension.
    """
    return pa.schema([_field(name, type_, text) for name, (type_, text) in WEIGHT.items()])


def chance_column(statistic: str) -> str:
    """The column of `sequences` that holds a statistic's chance level."""
    return f"chance_{statistic}"


def _key(name: str) -> pa.Field:
    type_, text = KEYS[name]
    return pa.field(name, type_, nullable=False, metadata={"description": text})


def _field(
    name: str, type_: pa.DataType, description: str, formula: Formula | None = None
) -> pa.Field:
    metadata = {"description": description}
    if formula is not None:
        metadata |= {"unit": formula.unit, "source": formula.source}
    if isinstance(formula, Ranged):
        metadata["range"] = json.dumps(formula.range)
    return pa.field(name, type_, metadata=metadata)
