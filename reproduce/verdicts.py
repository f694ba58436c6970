"""What was measured, held against what was published and against what must hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from reproduce.system import System
from schemas.errors import QueryError, RunError
from workers.model.model_info import ModelInfo, describe, find_model

Verdict = Literal["pass", "fail", "not comparable"]
Ask = Callable[[str], list[tuple[Any, ...]]]
"""Puts SQL to the runs of a system; the rows of the answer."""


@dataclass(frozen=True)
class Finding:
    """One line of the verdict."""

    system: str
    name: str
    published: float | str | None
    """A number, or what must hold."""
    measured: float | None
    tolerance: float | None
    verdict: Verdict
    model: str


def judge(name: str, system: System, model: str, ask: Ask) -> list[Finding]:
    """Hold what was measured against what was published, and against what must hold."""
    info = describe(find_model(model))
    found: list[Finding] = []
    for check in system.check:
        comparable = has_sizes(info, check.sizes or system.published_sizes)
        measured = _values(name, check.sql, ask)
        for key, published in check.published.items():
            # What overrides left out was not measured: no number, and no pass.
            value = _number(measured.get(key))
            tolerance = check.tolerance * abs(published) if check.relative else check.tolerance
            near = value is not None and abs(value - published) <= tolerance
            verdict: Verdict = ("pass" if near else "fail") if comparable else "not comparable"
            found.append(Finding(name, key, published, value, tolerance, verdict, model))
    for phenomenon in system.phenomenon:
        if phenomenon.models and model not in phenomenon.models:
            continue
        if not (rows := _rows(name, phenomenon.sql, 3, ask)):
            found.append(
                Finding(
                    name,
                    f"{phenomenon.words}: no rows",
                    "holds",
                    None,
                    None,
                    "not comparable",
                    model,
                )
            )
        for what, value, holds in rows:
            # 0/0 is NaN, which SQL holds to be greater than every number; it shows nothing.
            verdict = "pass" if holds and (value is None or _number(value) is not None) else "fail"
            found.append(Finding(name, str(what), "holds", _number(value), None, verdict, model))
    return found


def has_sizes(info: ModelInfo, sizes: dict[str, int]) -> bool:
    """Whether a model has the sizes of one whose figures were published."""
    return all(asdict(info).get(key) == value for key, value in sizes.items())


def warning(system: System, model: str) -> str:
    """What a reader of the findings must know where the model is not the published one; else
    nothing.
    """
    incomparable = "its numbers are not comparable with the published ones"
    if model == system.published_model:
        return ""
    if model == system.bundled_model:
        return f"a miniature: {incomparable}"
    info = describe(find_model(model))
    if any(
        has_sizes(info, sizes)
        for sizes in (system.published_sizes, *(c.sizes for c in system.check if c.sizes))
    ):
        return "a model of the sizes of a published one: its numbers are compared, and may differ"
    return f"another model: {incomparable}"


def _number(value: Any) -> float | None:
    """A number that JSON has; none where it is undefined or infinite."""
    try:
        number = math.nan if value is None else float(value)
    except (TypeError, ValueError):
        raise RunError(f"the SQL of a system gives {value!r} where a number is expected") from None
    return number if math.isfinite(number) else None


def _values(name: str, sql: str, ask: Ask) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in _rows(name, sql, 2, ask):
        if str(key) in values:
            raise RunError(f"{name}: a check names {key!r} twice")
        values[str(key)] = value
    return values


def _rows(name: str, sql: str, columns: int, ask: Ask) -> list[tuple[Any, ...]]:
    first = sql.strip().partition("\n")[0]
    try:
        rows = ask(sql)
    except QueryError as error:
        raise RunError(f"{name}: {error}, in {first}") from None
    if rows and len(rows[0]) != columns:
        raise RunError(f"{name}: expected {columns} columns, got {len(rows[0])}, in {first}")
    return rows
