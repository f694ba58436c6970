"""The axis of a statistic: its ends and its bins, the same for a histogram, a brush and a cube."""

import math
from dataclasses import dataclass

from headcount.queries.open.sql_text import quoted_name

BINS = 128  # Bins of an axis. A brush begins and ends at their edges.
DRAWN_BINS = BINS // 2  # bins that a histogram draws: each is two bins of the axis

FILLED_SHARE = 1 / 3  # an axis shows a whole range if values fill this share of it


NEAR_ZERO = 0.25  # an axis begins at zero if values begin nearer, as a share of their width


@dataclass(frozen=True)
class Axis:
    """The ends of an axis. Values beyond an end count in the bin at that end."""

    low: float
    high: float

    def bin_sql(self, statistic: str, bins: int = BINS) -> str:
        """The bin of a value as SQL, from 0. NULL for a value that is undefined."""
        value = quoted_name(statistic)
        scale = bins / (self.high - self.low)
        # A number with a point is a DECIMAL in SQL, which takes five times as long.
        bin_number = f"floor(({value}::DOUBLE - {_double(self.low)}) * {_double(scale)})"
        inside = f"least(greatest({bin_number}, 0::DOUBLE), {bins - 1}::DOUBLE)::SMALLINT"
        # `greatest` leaves NULL out of account: an undefined value would be in the first bin.
        return f"CASE WHEN {value} IS NOT NULL THEN {inside} END"


def axis_of(
    declared: tuple[float | None, float | None], smallest: float | None, largest: float | None
) -> Axis:
    """The axis for values between `smallest` and `largest` of a statistic with a declared range.

    >>> axis_of((0, 1), 0.02, 0.9)
    Axis(low=0.0, high=1.0)
    >>> axis_of((0, 1), 0.001, 0.0234)
    Axis(low=0.0, high=0.024)
    >>> axis_of((0, None), 3.14159, 27.1828)
    Axis(low=0.0, high=28.0)
    >>> axis_of((None, None), None, None)
    Axis(low=0.0, high=1.0)
    """
    low, high = declared
    if smallest is None or largest is None:
        # No value is defined. Any axis will do.
        return Axis(0.0, 1.0)
    if low is not None and high is not None and largest - smallest >= FILLED_SHARE * (high - low):
        return Axis(float(low), float(high))
    if 0 < smallest <= NEAR_ZERO * (largest - smallest):
        smallest = 0.0
    # Round numbers outwards: two digits of the width.
    width = (largest - smallest) or abs(largest) or 1.0
    step = 10.0 ** (math.floor(math.log10(width)) - 1)
    digits = max(0, 1 - math.floor(math.log10(width)))
    # The high end lies above the largest value, even if that is round itself.
    axis_low = round(math.floor(smallest / step) * step, digits)
    axis_high = round((math.floor(largest / step) + 1) * step, digits)
    if low is not None:
        axis_low = max(axis_low, float(low))
    if high is not None and high > axis_low:
        axis_high = min(axis_high, float(high))
    return Axis(axis_low, axis_high)


def _double(value: float) -> str:
    return f"{value!r}::DOUBLE"
