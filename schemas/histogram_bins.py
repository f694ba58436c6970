"""The bins of a statistic's histogram: fixed by its range alone, so histograms add up.

Between two finite ends there are `LINEAR_BINS` equal ones. On an open axis they are logarithmic, as
in DDSketch (Masson et al. 2019, arXiv 1908.10693), so the error is a share of the value. Bin b > 0
goes from 2^((b-1)/16 - 40) to 2^(b/16 - 40), and bin -b is its mirror image. Bin 0 is what lies
between: zero, and what no float32 activation tells from zero.

The numbers of bins are plain integers. A sketch of a library would be bytes that no SQL can add.
"""

import math
from dataclasses import dataclass

import numpy as np

LINEAR_BINS = 256  # between two finite ends: a power of two makes them exact
BINS_PER_OCTAVE = 16  # bins between a value and its double, each 2^(1/16) - 1 = 4.4 % wide

SMALLEST_OCTAVE = -40  # values below 2^-40 in size are in bin 0
LARGEST_OCTAVE = 64  # values of at least 2^64 in size are in the last bin, which has no end

LAST_BIN = (LARGEST_OCTAVE - SMALLEST_OCTAVE) * BINS_PER_OCTAVE + 1  # the last logarithmic one


@dataclass(frozen=True)
class Axis:
    """The axis of a histogram: the range of the statistic."""

    low: float
    high: float

    @property
    def is_linear(self) -> bool:
        """Whether the bins are equal: if both ends are finite."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def bins_of(self, values: np.ndarray) -> np.ndarray:
        """The bin of each value, which must be a number; rounding may take it past an end.

        >>> Axis(0, 1).bins_of(np.array([0, 0.5, 1, 1.001])).tolist()
        [0, 128, 255, 255]
        >>> Axis(0, math.inf).bins_of(np.array([0, 1, 1.99, 2, math.inf])).tolist()
        [0, 641, 656, 657, 1665]
        >>> Axis(-math.inf, math.inf).bins_of(np.array([-2, 1e-13])).tolist()
        [-657, 0]
        """
        values = values.astype(np.float64)
        if self.is_linear:
            bins = np.floor((values - self.low) * (LINEAR_BINS / (self.high - self.low)))
            # The upper end is in the last bin, with what rounding has put beyond it.
            return bins.clip(0, LINEAR_BINS - 1).astype(np.int16)
        # Zero has no logarithm. Any size below the smallest bin will do in its place.
        sizes = np.abs(values).clip(2.0**SMALLEST_OCTAVE / 2)
        steps = np.floor((np.log2(sizes) - SMALLEST_OCTAVE) * BINS_PER_OCTAVE)
        bins = (steps + 1).clip(0, LAST_BIN)
        return np.copysign(bins, values).astype(np.int16)
