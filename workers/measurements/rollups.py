"""Roll-ups: moments and histograms of every statistic, from the rows of many shards.

Roll-ups of one shard would take more than its rows: 64 sequences lie in some fifteen parts of the
Pile, and each subset has a mean, a spread and a histogram of four values. So they are made of
shards that are merged.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headcount.schemas.files.run_directory import pc
from headcount.schemas.histogram_bins import Axis
from headcount.schemas.tables import ROLLUPS, table_of

COUNTERS = 2**20  # bins of histograms that are counted at once, 8 bytes each


class Cells(NamedTuple):
    """The rows of `heads` by layer and head, or also by subset of the Pile.

    A document that may have sequences elsewhere has cells of its own: only with those can its sum
    be known.
    """

    order: np.ndarray  # The rows, sorted by cell and then by document.
    of_rows: np.ndarray  # The cell of each row, in that order.
    starts: np.ndarray  # For each cell, where its rows start in that order.
    sizes: np.ndarray  # For each cell, how many rows it has.
    document_starts: np.ndarray  # For each document of each cell, where its rows start.
    first_documents: np.ndarray  # For each cell, its first document among these.
    keys: dict[str, Any]  # What every cell is about, by column of `rollups`.


def rolled_up(heads: pa.Table, sequences: pa.Table, axes: Mapping[str, Axis]) -> pa.Table:
    """The roll-ups of rows of `heads`, which are of one run and one intervention.

    They are of every head over all sequences, and again over those of each subset of the Pile.
    `sequences` says of which subset of the Pile each sequence is. `axes` names the statistics.
    """
    schema = ROLLUPS.schema()
    if not len(heads):
        return schema.empty_table()
    rows: list[pa.Table] = []
    for by_subset in (False, True):
        cells = _cells(heads, sequences, by_subset)
        for name in sorted(axes):
            columns = _statistic_columns(name, heads[name].to_numpy(), axes[name], cells)
            rows.append(table_of(columns, schema))
    table = pa.concat_tables([schema.empty_table(), *rows])
    return table.sort_by([(column, "ascending") for column in ROLLUPS.order]).combine_chunks()


def _cells(heads: pa.Table, sequences: pa.Table, by_subset: bool) -> Cells:
    """The cells in the table's order: layer, head, part, document, NULL last; or heads."""
    number = sequences["sequence"].to_numpy()
    parts, part = _coded(
        sequences["pile_set_name"].to_pylist() if by_subset else [None] * len(number)
    )
    # A synthetic sequence is a document of its own, with a negative number.
    document = pc.coalesce(sequences["document"], pa.array(-1 - number)).to_numpy()
    # A document that may have sequences elsewhere is open. Its sequences follow one another, so it
    # has some at the ends of a gap.
    has_neighbours = np.isin(number - 1, number) & np.isin(number + 1, number)
    is_open = (document >= 0) & np.isin(document, document[~has_neighbours])
    open_documents, open_document = _coded(
        [own if one else None for own, one in zip(document.tolist(), is_open, strict=True)]
    )
    cell_of_sequence = part * len(open_documents) + open_document
    cells_of_head = len(parts) * len(open_documents)
    document_codes = np.unique(document, return_inverse=True)[1]
    sequence_order = np.argsort(number)
    index = sequence_order[np.searchsorted(number[sequence_order], heads["sequence"].to_numpy())]

    layers, heads_of_layer = (heads[key].to_numpy().astype(np.int64) for key in ("layer", "head"))
    width = int(heads_of_layer.max()) + 1
    # [row of heads]
    codes = (layers * width + heads_of_layer) * cells_of_head + cell_of_sequence[index]
    # A number that sorts by cell, then by document; there are no more of those than sequences.
    documents = codes * len(number) + document_codes[index]
    order = np.argsort(documents, kind="stable")
    document_starts = np.unique(documents[order], return_index=True)[1]
    code_of_cell, starts, sizes = np.unique(codes[order], return_index=True, return_counts=True)
    head_of_cell, rest = np.divmod(code_of_cell, cells_of_head)
    part_of_cell, document_of_cell = np.divmod(rest, len(open_documents))
    keys = {
        "input_family": [heads["input_family"][0].as_py()] * len(starts),
        "layer": head_of_cell // width,
        "head": head_of_cell % width,
        "by_subset": [by_subset] * len(starts),
        "pile_set_name": [parts[code] for code in part_of_cell],
        "document": [open_documents[code] for code in document_of_cell],
    }
    of_rows = np.repeat(np.arange(len(starts)), sizes)
    first_documents = np.searchsorted(document_starts, starts)
    return Cells(order, of_rows, starts, sizes, document_starts, first_documents, keys)


def _coded(values: list[Any]) -> tuple[list[Any], np.ndarray]:
    """The different values in order, None last, and the place of each value among them."""
    distinct = [*sorted({value for value in values if value is not None}), None]
    index_of = {value: index for index, value in enumerate(distinct)}
    return distinct, np.array([index_of[value] for value in values], np.int64)


def _statistic_columns(name: str, values: np.ndarray, axis: Axis, cells: Cells) -> dict[str, Any]:
    """The columns of one statistic's rows; `values` has NaN where it is undefined."""
    values = values[cells.order].astype(np.float64)
    is_defined = ~np.isnan(values)
    count = np.add.reduceat(is_defined, cells.starts, dtype=np.int64)
    total = np.add.reduceat(np.where(is_defined, values, 0), cells.starts)
    # Without a defined value, everything else is NaN, which is written as NULL.
    has_values = np.where(count > 0, 1, np.nan)
    mean = total / np.maximum(count, 1) * has_values
    # Two passes: the mean of squares less the square of the mean would lose a small spread.
    deviations = np.where(is_defined, values - mean[cells.of_rows], 0)
    bins, counts = _histograms(axis.bins_of(values[is_defined]), cells.of_rows[is_defined], cells)
    minimum = np.minimum.reduceat(np.where(is_defined, values, np.inf), cells.starts)
    maximum = np.maximum.reduceat(np.where(is_defined, values, -np.inf), cells.starts)
    document_sums = np.add.reduceat(deviations, cells.document_starts)
    document_counts = np.add.reduceat(is_defined, cells.document_starts, dtype=np.float64)

    def over_documents(terms: np.ndarray) -> np.ndarray:
        return np.add.reduceat(terms, cells.first_documents)

    return cells.keys | {
        "statistic": [name] * len(cells.starts),
        "count": count,
        "undefined": cells.sizes - count,
        "mean": mean,
        "m2": np.add.reduceat(deviations**2, cells.starts) * has_values,
        "documents": over_documents(document_counts > 0),
        "document_m2": over_documents(document_sums**2),
        "document_product": over_documents(document_sums * document_counts),
        "document_squares": over_documents(document_counts**2),
        "document_fourths": over_documents(document_counts**4),
        "minimum": minimum * has_values,
        "maximum": maximum * has_values,
        "range_low": np.full(len(cells.starts), axis.low),
        "range_high": np.full(len(cells.starts), axis.high),
        "bins": bins,
        "counts": counts,
    }


def _histograms(
    bins: np.ndarray, cell_of_value: np.ndarray, cells: Cells
) -> tuple[pa.Array, pa.Array]:
    lowest = int(bins.min(initial=0))
    span = int(bins.max(initial=0)) - lowest + 1
    # Cell and bin as one number, so that one count makes the histograms of many cells. Where shards
    # have gaps between them there are many more cells than heads, so some are counted at a time.
    cells_at_once = max(1, COUNTERS // span)
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for first in range(0, len(cells.starts), cells_at_once):
        begin, end = np.searchsorted(cell_of_value, (first, first + cells_at_once))
        codes = (cell_of_value[begin:end] - first) * span + (bins[begin:end] - lowest)
        counts = np.bincount(codes)
        occupied = np.flatnonzero(counts)
        parts.append((first * span + occupied, counts[occupied]))
    occupied, counts = map(np.concatenate, zip(*parts, strict=True))
    bins_of_cell = np.bincount(occupied // span, minlength=len(cells.starts))
    offsets = pa.array(np.concatenate([[0], np.cumsum(bins_of_cell)]), pa.int32())
    numbers = pa.array((occupied % span + lowest).astype(np.int16))
    return (
        pa.ListArray.from_arrays(offsets, numbers),
        pa.ListArray.from_arrays(offsets, pa.array(counts.astype(np.int32))),
    )
