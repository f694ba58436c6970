"""What was measured, held against what was published and against what must hold."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from queries.asking import Row, RunDatabase
from reproduce.system import Check, Phenomenon, System
from schemas.errors import QueryError, RunError
from workers.model.model_info import ModelInfo, describe, find_model

Verdict = Literal["pass", "fail", "not comparable"]


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


def judge(name: str, system: System, model: str, database: RunDatabase) -> list[Finding]:
    """Hold what was measured against what was published, and against what must hold."""
    info = describe(find_model(model))
    findings: list[Finding] = []
    for check in system.check:
        comparable = has_sizes(info, check.sizes or system.published_sizes)
        findings += _check_findings(name, check, comparable, model, database)
    for phenomenon in system.phenomenon:
        if not phenomenon.models or model in phenomenon.models:
            findings += _phenomenon_findings(name, phenomenon, model, database)
    return findings


def _check_findings(
    name: str, check: Check, comparable: bool, model: str, database: RunDatabase
) -> list[Finding]:
    """One finding for each published number."""
    measured = _values(name, check.sql, database)
    findings: list[Finding] = []
    for key, published in check.published.items():
        # What overrides left out was not measured: no number, and no pass.
        value = _number(measured.get(key))
        tolerance = check.tolerance * abs(published) if check.relative else check.tolerance
        verdict: Verdict = "not comparable"
        if comparable:
            near = value is not None and abs(value - published) <= tolerance
            verdict = "pass" if near else "fail"
        findings.append(Finding(name, key, published, value, tolerance, verdict, model))
    return findings


def _phenomenon_findings(
    name: str, phenomenon: Phenomenon, model: str, database: RunDatabase
) -> list[Finding]:
    """One finding for each row of the phenomenon's SQL; one that says so if there are no rows."""
    rows = _rows(name, phenomenon.sql, 3, database)
    if not rows:
        claim = f"{phenomenon.words}: no rows"
        return [Finding(name, claim, "holds", None, None, "not comparable", model)]
    findings: list[Finding] = []
    for claim, value, holds in rows:
        number = _number(value)
        # 0/0 is NaN, which SQL holds to be greater than every number; it shows nothing.
        undefined = value is not None and number is None
        verdict: Verdict = "pass" if holds and not undefined else "fail"
        findings.append(Finding(name, str(claim), "holds", number, None, verdict, model))
    return findings


def has_sizes(info: ModelInfo, sizes: dict[str, int]) -> bool:
    """Whether a model has the sizes of one whose figures were published."""
    return all(asdict(info).get(key) == value for key, value in sizes.items())


def warning(system: System, model: str) -> str:
    """What a reader of the findings must know if the model is not the published one; else
    nothing.
    """
    incomparable = "its numbers are not comparable with the published ones"
    if model == system.published_model:
        return ""
    if model == system.bundled_model:
        return f"a miniature: {incomparable}"
    info = describe(find_model(model))
    published_sizes = [system.published_sizes]
    published_sizes += [check.sizes for check in system.check if check.sizes]
    if any(has_sizes(info, sizes) for sizes in published_sizes):
        return "a model of the sizes of a published one: its numbers are compared, and may differ"
    return f"another model: {incomparable}"


def _number(value: Any) -> float | None:
    """A number that JSON has; none if it is undefined or infinite."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RunError(f"the SQL of a system gives {value!r} where a number is expected") from None
    return number if math.isfinite(number) else None


def _values(name: str, sql: str, database: RunDatabase) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in _rows(name, sql, 2, database):
        if str(key) in values:
            raise RunError(f"{name}: a check names {key!r} twice")
        values[str(key)] = value
    return values


def _rows(name: str, sql: str, columns: int, database: RunDatabase) -> list[Row]:
    first_line = sql.strip().partition("\n")[0]
    try:
        rows = database.rows(sql)
    except QueryError as error:
        raise RunError(f"{name}: {error}, in {first_line}") from None
    if rows and len(rows[0]) != columns:
        raise RunError(f"{name}: expected {columns} columns, got {len(rows[0])}, in {first_line}")
    return rows
