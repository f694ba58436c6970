"""What was measured, compared with what was published and with what must hold."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, SupportsFloat

from queries.asking import Row, RunDatabase
from reproduce.system import Check, Phenomenon, System
from schemas.errors import QueryError, RunError
from workers.model.model_info import ModelInfo, describe, find_model

Verdict = Literal["pass", "fail", "not comparable"]


@dataclass(frozen=True)
class Finding:
    """One published number or one phenomenon, with its verdict."""

    system: str
    name: str
    published: float | str | None
    """A number, or what must hold."""
    measured: float | None
    tolerance: float | None
    verdict: Verdict
    model: str


def judge(name: str, system: System, model: str, database: RunDatabase) -> list[Finding]:
    """Compare what was measured with what was published, and with what must hold."""
    info = describe(find_model(model))
    findings: list[Finding] = []
    for check in system.check:
        comparable = has_sizes(info, check.sizes or system.published_sizes)
        findings += _check_findings(name, check, comparable, model, database)
    for phenomenon in system.phenomenon:
        # A phenomenon without a list of models is claimed of all.
        if not phenomenon.models or model in phenomenon.models:
            findings += _phenomenon_findings(name, phenomenon, model, database)
    return findings


def _check_findings(
    name: str, check: Check, comparable: bool, model: str, database: RunDatabase
) -> list[Finding]:
    """One finding for each published number."""
    measured_values = _measured_values(name, check.sql, database)
    findings: list[Finding] = []
    for key, published in check.published.items():
        # An override may leave out a part of the scan: then there is no number, and no pass.
        value = _finite_number(measured_values.get(key))
        tolerance = check.tolerance * abs(published) if check.relative else check.tolerance
        verdict: Verdict = "not comparable"
        if comparable:
            is_near = value is not None and abs(value - published) <= tolerance
            verdict = "pass" if is_near else "fail"
        findings.append(Finding(name, key, published, value, tolerance, verdict, model))
    return findings


def _phenomenon_findings(
    name: str, phenomenon: Phenomenon, model: str, database: RunDatabase
) -> list[Finding]:
    """One finding for each row of the phenomenon's SQL, or one that says that there are no rows."""
    rows = _rows(name, phenomenon.sql, 3, database)
    if not rows:
        claim = f"{phenomenon.words}: no rows"
        return [Finding(name, claim, "holds", None, None, "not comparable", model)]
    findings: list[Finding] = []
    for claim, value, holds in rows:
        measured = _finite_number(value)
        # 0/0 is NaN. For SQL it is greater than every number, so a comparison with it may hold,
        # but it shows nothing.
        is_undefined = value is not None and measured is None
        verdict: Verdict = "pass" if holds and not is_undefined else "fail"
        findings.append(Finding(name, str(claim), "holds", measured, None, verdict, model))
    return findings


def has_sizes(info: ModelInfo, sizes: dict[str, int]) -> bool:
    """Whether a model has these sizes, by field of its description."""
    facts = asdict(info)
    return all(facts.get(field) == size for field, size in sizes.items())


def warning(system: System, model: str) -> str:
    """What a reader of the findings must know. Empty if the model is the published one."""
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


def _finite_number(value: SupportsFloat | str | None) -> float | None:
    """A number as JSON can hold it. None if it is undefined or infinite."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RunError(f"the SQL of a system gives {value!r} where a number is expected") from None
    return number if math.isfinite(number) else None


def _measured_values(name: str, sql: str, database: RunDatabase) -> dict[str, Any]:
    """The values that a check's SQL gives, by name."""
    values: dict[str, Any] = {}
    for key, value in _rows(name, sql, 2, database):
        # A later row would silently win over an earlier one.
        if str(key) in values:
            raise RunError(f"{name}: a check names {key!r} twice")
        values[str(key)] = value
    return values


def _rows(name: str, sql: str, column_count: int, database: RunDatabase) -> list[Row]:
    """The rows of a system's SQL. A mistake in it is one line that quotes its beginning."""
    first_line = sql.strip().partition("\n")[0]
    try:
        rows = database.rows(sql)
    except QueryError as error:
        raise RunError(f"{name}: {error}, in {first_line}") from None
    if rows and len(rows[0]) != column_count:
        raise RunError(
            f"{name}: expected {column_count} columns, got {len(rows[0])}, in {first_line}"
        )
    return rows
