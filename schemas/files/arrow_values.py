"""Values of Arrow's arrays as Python has them. Times that Python cannot hold become text.

Python's times end at the years 1 and 9999, at microseconds, and at the time zones that it knows.
"""

from datetime import date, timedelta
from typing import Any

import pyarrow as pa

NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
DAY = 24 * 60 * 60 * 10**9  # in nanoseconds

DAYS_OF_400_YEARS = 146_097
"""After them the calendar repeats."""

INFINITE = {
    2**31 - 1: "infinity",
    2**63 - 1: "infinity",
    1 - 2**31: "-infinity",
    1 - 2**63: "-infinity",
}
"""How DuckDB and Postgres write dates and times that are before or after all others."""


def values_of(array: Any) -> list[Any]:  # noqa: ANN401 (pyarrow has no types)
    """What `to_pylist` gives, with text for times that Python cannot hold.

    >>> values_of(pa.array([{"at": 0}, {"at": 10**18}], pa.struct([("at", pa.timestamp("us"))])))
    [{'at': datetime.datetime(1970, 1, 1, 0, 0)}, {'at': '+33658-09-27 01:46:40'}]
    """
    try:
        return array.to_pylist()
    except UnicodeDecodeError:
        raise
    except (OverflowError, ValueError, KeyError):
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
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        raise
    except (OverflowError, ValueError, KeyError):
        return _time_text(scalar)


def _time_text(scalar: Any) -> str:  # noqa: ANN401
    """A time as `str` writes Python's times; those with a time zone in UTC."""
    kind, count = scalar.type, scalar.value
    if pa.types.is_date(kind):
        unit = DAY if kind == pa.date32() else NANOSECONDS["ms"]
        return INFINITE.get(count) or _date_text(count * unit // DAY)
    days, rest = divmod(count * NANOSECONDS[kind.unit], DAY)
    if pa.types.is_duration(kind):
        return f"{days} day{'' if abs(days) == 1 else 's'}, {_clock_text(rest)}"
    if pa.types.is_time(kind):
        return _clock_text(rest)
    zone = "+00:00" if kind.tz else ""
    return INFINITE.get(count) or f"{_date_text(days)} {_clock_text(rest)}{zone}"


def _date_text(days: int) -> str:
    """The date so many days after 1970-01-01; a year of more than four digits has a sign."""
    cycles, days_in_cycle = divmod(days, DAYS_OF_400_YEARS)
    day = date(1970, 1, 1) + timedelta(days_in_cycle)
    year = day.year + 400 * cycles
    year_text = f"{year:04}" if 0 <= year <= 9999 else f"{year:+05}"
    return f"{year_text}-{day:%m-%d}"


def _clock_text(nanoseconds: int) -> str:
    seconds, fraction = divmod(nanoseconds, NANOSECONDS["s"])
    text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    if fraction % 1000:
        return f"{text}.{fraction:09}"
    return f"{text}.{fraction // 1000:06}" if fraction else text
