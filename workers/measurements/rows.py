"""From arrays of values to rows, which hold numbers of layers and heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from headcount.schemas.files.parquet import table_of
from headcount.schemas.formulas import Kind
from headcount.schemas.scans.kinds import schema_of_rows
from headcount.schemas.scans.measured_heads import ABSENT, MeasuredHeads
from headcount.workers.measurements.moments import places_on_axes

Indices = dict[str, np.ndarray]
"""By axis, where each value lies on it."""


def numbered(
    axes: Sequence[str], shape: Sequence[int], heads: MeasuredHeads
) -> tuple[Indices, np.ndarray | slice]:
    """Where values with these axes lie, in numbers of the model; and which of the values exist.

    Values are taken in their order in memory. A layer may have fewer measured heads than there are
    places, and the places left over have no value.
    """
    places_on_axes = [places.ravel() for places in np.indices(shape)]
    indices = dict(zip(axes, places_on_axes, strict=True))
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
