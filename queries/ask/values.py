"""Values of Arrow as Python has them, with the digits that they mean and every time."""

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.schemas.files.run_directory import pc

UNITS_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}

INFINITE = {2**31 - 1, 2**63 - 1}
"""What DuckDB writes for infinity in a date and in a timestamp, and with a minus for the other."""

DAY_SECONDS = 24 * 60 * 60


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
        return _times(column)
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


def _times(column: pa.Array) -> list[Any]:
    """Dates, times and timestamps."""
    kind = column.type
    if not pa.types.is_date(kind) and kind.unit == "ns":
        # Arrow makes objects of pandas of nanoseconds, if it is installed.
        return [_time(value, kind) for value in column]
    is_time = pa.types.is_time(kind)
    try:
        values = column.to_pylist()
    except (OverflowError, ValueError):
        return [_time(value, kind) for value in column]
    # Midnight at the end of a day is no time of Python's, and Arrow takes it for the other one.
    return [_time(value, kind) for value in column] if is_time else values


def _time(value: pa.Scalar, kind: pa.DataType) -> Any:  # noqa: ANN401 - of Python, or a text
    if not value.is_valid:
        return None
    number: int = value.value
    if pa.types.is_date32(kind):
        per_day = 1
    elif pa.types.is_date64(kind):
        per_day = DAY_SECONDS * 1000
    else:
        per_day = DAY_SECONDS * UNITS_PER_SECOND[kind.unit]
    if pa.types.is_time(kind):
        if number >= per_day or (kind.unit == "ns" and number % 1000):
            return _clock(number, per_day)
        return value.cast(pa.time64("us")).as_py() if kind.unit == "ns" else value.as_py()
    try:
        if not pa.types.is_date(kind) and kind.unit == "ns":
            return value.cast(pa.timestamp("us", kind.tz)).as_py()
        return value.as_py()
    except (OverflowError, ValueError):
        return _text_of_time(number, per_day, kind)


def _text_of_time(number: int, per_day: int, kind: pa.DataType) -> str:
    """A date or timestamp as DuckDB writes it, in UTC."""
    if abs(number) in INFINITE:
        return "infinity" if number > 0 else "-infinity"
    days, rest = divmod(number, per_day)
    # numpy counts years on below zero, and writes 0000 for 1 BC.
    year, month, day = str(np.datetime64(days, "D")).rsplit("-", 2)
    is_before = int(year) <= 0
    date = f"{1 - int(year) if is_before else int(year):04}-{month}-{day}"
    date += " (BC)" if is_before else ""
    if pa.types.is_date(kind):
        return date
    return f"{date} {_clock(rest, per_day)}{'+00' if kind.tz else ''}"


def _clock(number: int, per_day: int) -> str:
    """A time of a day: hours, minutes, seconds, and a fraction if there is one."""
    per_second = per_day // DAY_SECONDS
    seconds, fraction = divmod(number, per_second)
    text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    digits = f"{fraction:0{len(str(per_second)) - 1}}".rstrip("0") if fraction else ""
    return f"{text}.{digits}" if digits else text
