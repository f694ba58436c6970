"""What was measured on some sequences: one array for each column, one check of its numbers, and the
rows that they become.

Numbers, lists and means are alike. The first axis of an array is that of sequences; in a table of
means it is that of count, mean and M2. Then come `layer` and `head`, where the column has them, and
the entries of a list.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa
from torch import Tensor

from headcount.schemas.errors import MeasureError
from headcount.schemas.filled_tables import TABLES
from headcount.schemas.formulas import Formula, Kind
from headcount.schemas.kinds import schema_of_rows
from headcount.schemas.measured_heads import ABSENT, MeasuredHeads
from headcount.schemas.plugins import line_of
from headcount.schemas.registry import is_of_plugin
from headcount.schemas.tables import Table, table_of
from headcount.workers.measurements.moments import merged_moments, places_on_axes

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Measurements:
    """What was measured on some sequences; NaN where it is not defined."""

    tables: dict[str, Columns]  # by table: float32 `[sequence …]`, or float64 `[3 …]` of means
    measured_heads: MeasuredHeads  # which layer and head of the model each place on these axes is

    @property
    def heads(self) -> Columns:
        """Values of the table `heads`: `[sequence layer head]`, by statistic."""
        return self.tables["heads"]

    @property
    def sequences(self) -> Columns:
        """Values of the table `sequences`: uniform baselines and predictions."""
        return self.tables["sequences"]

    @classmethod
    def of_batches(cls, measured_batches: "Iterable[Measurements]") -> "Measurements":
        """What was measured on all batches, in order."""
        batches = list(measured_batches)
        tables: dict[str, Columns] = {}
        for table, columns in batches[0].tables.items():
            tables[table] = {}
            for name in columns:
                arrays = [batch.tables[table][name] for batch in batches]
                if TABLES[table].has("sequence"):
                    tables[table][name] = np.concatenate(arrays)
                else:
                    tables[table][name] = reduce(merged_moments, arrays)
        return cls(tables, batches[0].measured_heads)

    def first(self, count: int) -> Self:
        """The same with the values of the first sequences alone; means stay those of all."""
        tables = {
            table: {name: values[:count] for name, values in columns.items()}
            if TABLES[table].has("sequence")
            else columns
            for table, columns in self.tables.items()
        }
        return replace(self, tables=tables)


class Column(NamedTuple):
    """What one formula gave in a batch."""

    table: Table
    name: str
    formula: Formula
    values: Tensor
    """The axes are those of `Measurements`. NaN where the formula has no value, and infinity where
    it has one that is not finite (`workers.measurements.undefined`).
    """


def check_finite(
    columns: Iterable[Column], heads: MeasuredHeads, first: int, sequences: int
) -> None:
    """Raise `MeasureError` for the earliest layer in which a value is infinite.

    What is not finite in one layer spoils all later ones, so the earliest names the cause. The
    batch has this many sequences, and `first` is the place of the first one in the shard.
    """
    found: list[tuple[int, Column, list[int]]] = []
    for column in columns:
        infinite = np.isinf(column.values.numpy())
        if infinite.any():
            has_layers = column.table.has("layer")
            place = np.argwhere(infinite.swapaxes(0, 1) if has_layers else infinite)[0].tolist()
            # What has no layer is computed after the last one.
            found.append((place[0] if has_layers else len(heads.layers), column, place))
    if not found:
        return
    _, column, rest = min(found, key=lambda each: each[0])
    where = entry = ""
    if column.formula.axis:
        axes = places_on_axes(column.formula, column.values.shape[-1])
        index = rest.pop()
        entry = " at " + ", ".join(f"{axis} {places[index]}" for axis, places in axes.items())
    if column.table.has("layer"):
        layer, sequence, *head = rest
        where = f"layer {heads.layers[layer]}"
        where += "".join(f", head {heads.numbers[layer][i]}" for i in head) + ": "
    else:
        sequence, *position = rest
        entry = entry or "".join(f" at position {i}" for i in position)
    number = f"sequence {first + sequence}"
    advice = "the model's weights and precision"
    if is_of_plugin(column.formula.function):
        advice = line_of(column.formula.function)
    if not column.table.has("sequence"):
        number = f"one of the sequences {first} to {first + sequences - 1}"
    raise MeasureError(
        f"{where}{column.name} is not finite{entry} for {number} of the shard; expected a finite "
        f"number: look at {advice}"
    )


def numbered(
    axes: Sequence[str], shape: Sequence[int], heads: MeasuredHeads
) -> tuple[dict[str, np.ndarray], np.ndarray | slice]:
    """Where values with these axes lie, in numbers of the model; and which of the values exist.

    Values are taken in their order in memory. A layer may have fewer measured heads than there are
    places, and the places left over have no value.
    """
    indices = dict(zip(axes, (places.ravel() for places in np.indices(shape)), strict=True))
    existing: np.ndarray | slice = slice(None)
    if "head" in indices:
        # By place of the layer, so before layers become numbers of the model.
        indices["head"] = np.array(heads.numbers)[indices["layer"], indices["head"]]
        if heads.count < len(heads.layers) * heads.width:
            existing = indices["head"] != ABSENT
    if "layer" in indices:
        indices["layer"] = np.array(heads.layers)[indices["layer"]]
    return {axis: index[existing] for axis, index in indices.items()}, existing


def rows_by_name(
    kind: Kind,
    name: str,
    axes: Sequence[str],
    values: Mapping[str, np.ndarray],
    heads: MeasuredHeads,
    schema: pa.Schema,
    **same_in_all_rows: int,
) -> pa.Table:
    """A row with the formula's name for each place in the arrays, which become columns."""
    assert kind.named_by is not None
    indices, existing = numbered(axes, next(iter(values.values())).shape, heads)
    if "entry" in indices:
        entry = indices.pop("entry")
        places = places_on_axes(kind[name], int(entry.max(initial=-1)) + 1)
        indices |= {axis: place[entry] for axis, place in places.items()}
    rows = len(next(iter(indices.values())))
    columns = {
        **{column: np.full(rows, value) for column, value in same_in_all_rows.items()},
        **indices,
        kind.named_by: pa.repeat(name, rows),
        **{column: array.ravel()[existing] for column, array in values.items()},
    }
    return table_of(columns, schema)


def means_table(
    kind: Kind, shard: int, means: Mapping[str, np.ndarray], heads: MeasuredHeads
) -> pa.Table:
    """One row per layer × head × formula × entry, in the order formula, layer, head, entry.

    `means` are count, mean and M2 by formula: `[3 layer head entry]`, or `[3 layer entry]` for what
    the heads of a layer share.
    """
    schema = schema_of_rows(kind, [kind[name] for name in means])
    rows: list[pa.Table] = []
    for name, moments in means.items():
        axes = ["layer", "head", "entry"] if moments.ndim == 4 else ["layer", "entry"]
        values: dict[str, np.ndarray] = dict(zip(("count", "mean", "m2"), moments, strict=True))
        rows.append(rows_by_name(kind, name, axes, values, heads, schema, shard=shard))
    return pa.concat_tables(rows).combine_chunks()
