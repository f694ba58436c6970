"""What was measured, compared with what was published and with what must hold."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, SupportsFloat

from headcount.queries.ask.asking import Row, RunDatabase
from headcount.reproduce.replication import Check, Claim, Replication
from headcount.schemas.errors import QueryError, RunError
from headcount.workers.model.model_info import ModelInfo

Verdict = Literal["pass", "fail", "record", "not comparable", "skipped"]


@dataclass(frozen=True)
class Result:
    """One published number or one claim, with its verdict."""

    replication: str
    name: str
    published: float | str | None
    """A number, or what must hold."""
    measured: float | None
    tolerance: float | None
    """How far the measured value may lie from the published one: in its units, or in decades."""
    verdict: Verdict
    model: str
    in_decades: bool = False
    """Whether the tolerance is of the decimal logarithm."""
    file: str = ""
    """The file that the published number is from, if it is one of a table."""
    reason: str = ""
    """Why it is a record or not comparable, or why the replication was skipped."""
    stated: str = ""
    """When the source last said so, if that is known."""

    @property
    def tolerance_text(self) -> str:
        """The tolerance with its unit, if it has one."""
        if self.tolerance is None:
            return ""
        return f"{self.tolerance:.4g}{' decades' if self.in_decades else ''}"


class Measured(NamedTuple):
    """A measured value, and its standard deviation over sequences if a tolerance needs it."""

    value: float | None
    scatter: float | None = None


NOTHING_MEASURED = Measured(None)


def judge(
    name: str,
    replication: Replication,
    info: ModelInfo,
    model: str,
    database: RunDatabase,
    has_text: bool = False,
) -> list[Result]:
    """Compare what was measured with what was published, and with what must hold.

    `model` is what the user calls the model that `info` describes. `has_text` says whether the
    runs read the user's text instead of the one that stands for it.
    """
    results: list[Result] = []
    for check in replication.check:
        measured_values = measured_by_name(name, check, database)
        # Without the authors' text another one was read, and a figure of theirs says nothing of it.
        lacks_text = check.needs_text and not has_text
        for published in check.values:
            # An override may leave out a part of the scan: then there is no number, and no pass.
            value, scatter = measured_values.get(published.name, NOTHING_MEASURED)
            verdict: Verdict = "pass" if published.is_near(value, scatter) else "fail"
            reason = ""
            if not has_sizes(info, replication.sizes_of(check, published)):
                verdict, reason = "not comparable", "published for a model of other sizes"
            elif check.record:
                verdict, reason = "record", check.record
            elif lacks_text:
                verdict = "not comparable"
                reason = f"published for the authors' text: --text {name}=FILE"
            results.append(
                Result(
                    replication=name,
                    name=published.full_name,
                    published=published.value,
                    measured=value,
                    tolerance=published.allowed_distance(scatter),
                    verdict=verdict,
                    model=model,
                    in_decades=published.scale == "log10",
                    file=check.file,
                    reason=reason,
                    stated=published.stated or replication.stated,
                )
            )
    for claim in replication.claim:
        # A claim without a list of models is claimed of all.
        if claim.models and model not in claim.models:
            continue
        rows = claim_rows(name, claim, database)
        for words, value, holds in rows:
            verdict = "pass" if holds else "fail"
            results.append(Result(name, words, "holds", value, None, verdict, model))
        if not rows:
            words = f"{claim.words}: no rows"
            results.append(Result(name, words, "holds", None, None, "not comparable", model))
    return results


def claim_rows(
    name: str, claim: Claim, database: RunDatabase
) -> list[tuple[str, float | None, bool]]:
    """The words, the value, and whether they hold, of each row of a claim's SQL."""
    rows: list[tuple[str, float | None, bool]] = []
    for words, value, holds in _rows(name, claim.sql, 3, database):
        number = finite_number(value)
        # 0/0 is NaN. For SQL it is greater than every number, so a comparison with it may hold,
        # but it shows nothing.
        is_undefined = value is not None and number is None
        rows.append((str(words), number, bool(holds) and not is_undefined))
    return rows


def measured_by_name(name: str, check: Check, database: RunDatabase) -> dict[str, Measured]:
    """The values that a check's SQL gives, by name."""
    values: dict[str, Measured] = {}
    columns = 3 if check.sequences and not check.record else 2
    for key, *numbers in _rows(name, check.sql, columns, database):
        # A later row would silently win over an earlier one.
        if str(key) in values:
            raise RunError(f"{name}: a check names {key!r} twice")
        values[str(key)] = Measured(*map(finite_number, numbers))
    return values


def _rows(name: str, sql: str, column_count: int, database: RunDatabase) -> list[Row]:
    """The rows of a replication's SQL. A mistake in it is one line that quotes its beginning."""
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


def finite_number(value: SupportsFloat | str | None) -> float | None:
    """A number as JSON can hold it. None if it is undefined or infinite."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RunError(
            f"the SQL of a replication gives {value!r} where a number is expected"
        ) from None
    return number if math.isfinite(number) else None


def has_sizes(info: ModelInfo, sizes: Mapping[str, object]) -> bool:
    """Whether a model has these sizes, by field of its description."""
    facts = asdict(info)
    return all(facts[field] == size for field, size in sizes.items())


def warning(replication: Replication, info: ModelInfo, model: str) -> str:
    """What a reader of the results must know. Empty if the model is the published one."""
    incomparable = "its numbers are not comparable with the published ones"
    if model == replication.published_model:
        return ""
    if model == replication.bundled_model:
        return f"a miniature: {incomparable}"
    if any(has_sizes(info, sizes) for sizes in replication.all_sizes):
        return "a model of the sizes of a published one: its numbers are compared, and may differ"
    return f"another model: {incomparable}"
