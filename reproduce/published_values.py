"""A published value: what it may lie away from a measured one, and the CSV files of such values."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headcount.schemas.files.places import reason

Scale = Literal["absolute", "relative", "log10"]

COLUMNS = ("name", "value", "model", "tolerance", "standard_error")
"""Columns of a file of published values. The first two are required."""


@dataclass(frozen=True)
class PublishedValue:
    """A number that was published, and how near a measured one must be."""

    name: str
    """The name that the check's SQL gives the measured value."""
    value: float
    tolerance: float
    """In units of the scale."""
    scale: Scale = "absolute"
    standard_error: float | None = None
    """Scatter of the value as its authors give it."""
    model: str = ""
    """The model that it was published for, if a file has those of several."""

    def __post_init__(self) -> None:
        """Refuse a logarithm of nothing."""
        if self.scale == "log10" and self.value <= 0:
            raise ValueError(f"{self.name}: log10: expected a value above 0, got {self.value:g}")

    @property
    def full_name(self) -> str:
        """The name, with that of the model if there is one."""
        return f"{self.model}: {self.name}" if self.model else self.name

    @property
    def allowed_distance(self) -> float:
        """The tolerance in the units of the value, or in decades."""
        return self.tolerance * abs(self.value) if self.scale == "relative" else self.tolerance

    def is_near(self, measured: float | None) -> bool:
        """Whether a measured value is within the tolerance. An undefined one is not."""
        if measured is None or not math.isfinite(measured):
            return False
        if self.scale == "log10":
            # Published values of this scale are above 0 (`__post_init__`).
            is_positive = measured > 0
            return is_positive and abs(math.log10(measured / self.value)) <= self.tolerance
        return abs(measured - self.value) <= self.allowed_distance


def read_values(
    file: Path,
    scale: Scale,
    tolerance: float | None,
    standard_error: float | Mapping[str, float] | None,
) -> tuple[PublishedValue, ...]:
    """The published values of a CSV file. A column of the file wins over what the check says."""
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            columns = tuple(reader.fieldnames or ())
            rows = list(reader)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file.name}: cannot be read ({reason(error)})") from None
    if not {"name", "value"} <= set(columns) <= set(COLUMNS):
        raise ValueError(
            f"{file.name}: expected the columns name and value, and of the others "
            f"{', '.join(COLUMNS[2:])} those needed, got {', '.join(columns) or 'none'}"
        )
    values: dict[tuple[str, str], PublishedValue] = {}
    for row in rows:
        name, model = row["name"], row.get("model") or ""
        value = _number(file, row, "value", None)
        if value is None:
            raise ValueError(f"{file.name}: {name}: no value")
        own_tolerance = _number(file, row, "tolerance", tolerance)
        if own_tolerance is None:
            raise ValueError(f"{file.name}: {name}: no tolerance, in the file or in the check")
        scatter = standard_error
        if isinstance(scatter, Mapping):
            scatter = scatter.get(name)
        scatter = _number(file, row, "standard_error", scatter)
        if (model, name) in values:
            raise ValueError(f"{file.name}: names {name!r} twice")
        values[model, name] = PublishedValue(name, value, own_tolerance, scale, scatter, model)
    return tuple(values.values())


def _number(
    file: Path, row: Mapping[str, str | None], column: str, default: float | None
) -> float | None:
    """A cell as a number; the default if it is empty or the file lacks the column."""
    text = row.get(column)
    if not text:
        return default
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"{file.name}: {row['name']}: {column}: expected a number, got {text!r}"
        ) from None
