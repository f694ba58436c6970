"""Values of Arrow as Python has them, with the digits that they mean and every time."""

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import pyarrow as pa

from headcount.queries.open.rooms import TIMES_OF
from headcount.schemas.files.run_directory import pc
from headcount.schemas.packages import entered


def python_values(column: pa.Array) -> list[Any]:
    """The values of a column; lists, structs and maps hold values likewise.

    A float32 becomes the shortest number that means it: 0.1 and not 0.10000000149011612. Arrow's
    text of a float32 is that number. A time that Python does not have, for example of the year
    12345, becomes DuckDB's text.
    """
    kind = column.type
    if pa.types.is_float32(kind):
        texts = column.cast(pa.string()).to_pylist()
        return [None if text is None else float(text) for text in texts]
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        fields = [python_values(child) for child in column.flatten()]
        rows = zip(*fields, strict=True) if fields else ((),) * len(column)
        valid = column.is_valid().to_pylist()
        return [
            dict(zip(names, row, strict=True)) if is_valid else None
            for row, is_valid in zip(rows, valid, strict=True)
        ]
    if pa.types.is_map(kind):
        return _maps(column)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = pc.list_value_length(column).to_pylist()
        values = iter(python_values(column.flatten()))
        return [None if length is None else list(islice(values, length)) for length in lengths]
    if pa.types.is_union(kind) and kind.mode == "sparse":
        codes = {code: place for place, code in enumerate(kind.type_codes)}
        members = [python_values(column.field(place)) for place in codes.values()]
        return [members[codes[code]][row] for row, code in enumerate(column.type_codes.to_pylist())]
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind) or pa.types.is_time(kind):
        return entered(TIMES_OF)(column)
    return column.to_pylist()


def _maps(column: pa.Array) -> list[Any]:
    """Each map as a list of pairs, because its keys may be anything."""
    ends = column.offsets.to_pylist()
    first, last = (ends[0], ends[-1]) if ends else (0, 0)
    keys, items = (
        python_values(child.slice(first, last - first)) for child in (column.keys, column.items)
    )
    pairs = list(zip(keys, items, strict=True))
    slices: Iterator[Any] = (pairs[low - first : high - first] for low, high in pairwise(ends))
    valid = column.is_valid().to_pylist()
    return [part if is_valid else None for part, is_valid in zip(slices, valid, strict=True)]
