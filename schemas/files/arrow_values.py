"""Values of Arrow's arrays as Python has them. Times that Python cannot hold become text.

Python's times end at the years 1 and 9999, at microseconds, and at the time zones that it knows.
"""

from typing import Any

import numpy as np
import pyarrow as pa

UNITS_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}

INFINITE = {2**31 - 1, 2**63 - 1}
"""What DuckDB writes for infinity in a date and in a timestamp, and with a minus for the other."""

DAY_SECONDS = 24 * 60 * 60

NOT_PYTHONS = (OverflowError, ValueError, KeyError)
"""What pyarrow raises for a time, or for a time zone, that Python does not have."""


def values_of(array: Any) -> list[Any]:  # noqa: ANN401 (pyarrow has no types)
    """What `to_pylist` gives, with text for times that Python cannot hold.

    >>> values_of(pa.array([{"at": 0}, {"at": 10**18}], pa.struct([("at", pa.timestamp("us"))])))
    [{'at': datetime.datetime(1970, 1, 1, 0, 0)}, {'at': '33658-09-27 01:46:40'}]
    """
    try:
        return array.to_pylist()
    except UnicodeDecodeError:
        raise
    except NOT_PYTHONS:
        return [_value_of(scalar) for scalar in array]


def _value_of(scalar: Any) -> Any:  # noqa: ANN401
    """The value of one scalar."""
    kind = scalar.type
    if not scalar.is_valid:
        return None
    if pa.types.is_struct(kind):
        return {kind.field(i).name: _value_of(scalar[i]) for i in range(kind.num_fields)}
    if pa.types.is_map(kind):
        pairs = scalar.values
        return list(zip(*(values_of(pairs.field(i)) for i in (0, 1)), strict=True))
    if isinstance(scalar, pa.ListScalar):
        return values_of(scalar.values)
    if isinstance(
        scalar, pa.DictionaryScalar | pa.RunEndEncodedScalar | pa.ExtensionScalar | pa.UnionScalar
    ):
        return _value_of(scalar.value)
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind) or pa.types.is_time(kind):
        return _time(scalar, kind)
    if pa.types.is_duration(kind):
        days, rest = divmod(scalar.value, DAY_SECONDS * UNITS_PER_SECOND[kind.unit])
        clock = _clock(rest, DAY_SECONDS * UNITS_PER_SECOND[kind.unit])
        return f"{days} day{'' if abs(days) == 1 else 's'}, {clock}"
    return scalar.as_py()


def times_of(column: pa.Array) -> list[Any]:
    """Dates, times and timestamps; DuckDB's text for those that Python cannot hold."""
    kind = column.type
    if not pa.types.is_date(kind) and kind.unit == "ns":
        # Arrow makes objects of pandas of nanoseconds, if it is installed.
        return [_time(value, kind) for value in column]
    is_time = pa.types.is_time(kind)
    try:
        values = column.to_pylist()
    except NOT_PYTHONS:
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
    except NOT_PYTHONS:
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
