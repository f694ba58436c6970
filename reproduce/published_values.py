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


def named_reason(reasons: str | Mapping[str, str], name: str) -> str:
    """The reason for a name: by that name, by a beginning `name*`, or the one for all.

    >>> named_reason({"first key*": "a share"}, "first key, T = 64")
    'a share'
    """
    if isinstance(reasons, str):
        return reasons
    if name in reasons:
        return reasons[name]
    for pattern, why in reasons.items():
        if pattern.endswith("*") and name.startswith(pattern[:-1]):
            return why
    return ""


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
    values: list[PublishedValue] = []
    for row in rows:
        name = row["name"]
        row_tolerance = _number(file, row, "tolerance", tolerance)
        if row_tolerance is None:
            raise ValueError(f"{file.name}: {name}: no tolerance, in the file or in the check")
        common = standard_error
        if isinstance(common, Mapping):
            common = common.get(name)
        value = _number(file, row, "value", None)
        if value is None:
            raise ValueError(f"{file.name}: {name}: no value")
        values.append(
            PublishedValue(
                name=name,
                value=value,
                tolerance=row_tolerance,
                scale=scale,
                standard_error=_number(file, row, "standard_error", common),
                model=row.get("model") or "",
            )
        )
    keys = [(value.model, value.name) for value in values]
    # Counting each key takes long in a file of thousands, and hardly any names one twice.
    twice = {key for key in keys if keys.count(key) > 1} if len(set(keys)) < len(keys) else set()
    if twice:
        raise ValueError(f"{file.name}: names {sorted(twice)[0][1]!r} twice")
    return tuple(values)


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
