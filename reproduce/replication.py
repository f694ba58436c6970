"""Replications of the literature: each a file `NAME.toml` of scans, checks, claims and figures.

A check compares numbers with published ones, if the model is of the published sizes. A claim
(a sign, an order, a threshold) must hold in every model that it is claimed of.
"""

import csv
import hashlib
import io
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from headcount.schemas.errors import ScanError, unknown
from headcount.schemas.files.input_files import read_input
from headcount.schemas.reasons import reason
from headcount.schemas.values import shortened
from headcount.workers.model.model_info import ModelInfo

REPLICATIONS = Path(__file__).parent / "replications"

TEXT, STAND_IN = "$text", "bundled:LICENSE"
"""What stands for the user's text in a scan's input, and what is read if the user gives none."""

M = TypeVar("M", bound=BaseModel)

COLUMNS = ("name", "value", "model", "tolerance", "spread", "draws", "stated")
"""Columns of a file of published values. The first two are required."""

COVERAGE = 0.99
"""Share of right models that a tolerance lets pass, if a spread or a number was published."""

ERRORS_OF_MEANS = 3
"""Standard errors of a difference of two means that a tolerance is: 99.7 % of normal ones lie
within, and still 99 % of those that one sequence in fifty makes.
"""


@cache
def prediction_factor(draws: int) -> float:
    """Half the width of the interval that holds one more draw, in standard deviations of `draws`.

    `t sqrt(1 + 1/draws)` with Student's quantile t, for `COVERAGE`, two-sided. Dimensionless, at
    least 2.6. With 3 draws their own deviation is so uncertain that it is 11.5.
    """
    # With t = sqrt(f) tan(angle) the density over f degrees of freedom is cos(angle)^(f - 1).
    freedom = draws - 1
    angles = np.linspace(-np.pi / 2, np.pi / 2, 100_001)
    below = np.cumsum(np.cos(angles) ** (freedom - 1))
    angle = np.interp((1 + COVERAGE) / 2 * below[-1], below, angles)
    return float(np.tan(angle)) * math.sqrt(freedom * (1 + 1 / draws))


MODEL_FIELDS = tuple(field.name for field in dataclass_fields(ModelInfo))


def _known_sizes(sizes: dict[str, int | str]) -> dict[str, int | str]:
    """Refuse a field that no model's description has: it would never be equal."""
    for field in sizes:
        if field not in MODEL_FIELDS:
            raise ValueError(unknown("field of a model", field, MODEL_FIELDS))
    return sizes


Sizes = Annotated[dict[str, int | str], AfterValidator(_known_sizes)]
"""What a model must have, by field of its description (`workers.model.model_info`)."""

Reasons = str | dict[str, str]
"""One line why, for all names or by name. A name that ends in `*` stands for all that begin so."""


@dataclass(frozen=True)
class PublishedValue:
    """A number that was published, and how near a measured one must be."""

    name: str
    """The name that the check's SQL gives the measured value."""
    value: float
    tolerance: float | None
    """In units of the scale. None if it follows from the measured scatter, or for a record."""
    scale: Literal["absolute", "relative", "log10"] = "absolute"
    spread: float | None = None
    """Published standard deviation over draws, from which the tolerance follows."""
    draws: int = 0
    sequences: int = 0
    """Sequences that the value is a mean of, if the tolerance follows from the measured scatter."""
    model: str = ""
    """The model that it was published for, if a file has those of several."""
    stated: str = ""
    """Date of the newest statement of the source about it."""

    def __post_init__(self) -> None:
        """Refuse a logarithm of nothing."""
        if self.scale == "log10" and self.value <= 0:
            raise ValueError(f"{self.name}: log10: expected a value above 0, got {self.value:g}")

    @property
    def full_name(self) -> str:
        """The name, with that of the model if there is one."""
        return f"{self.model}: {self.name}" if self.model else self.name

    def allowed_distance(self, scatter: float | None = None) -> float | None:
        """The tolerance in the units of the value, or in decades. None if nothing gives it.

        `scatter` is the measured standard deviation over sequences.
        """
        if self.sequences:
            # Both means are of so many sequences.
            error = math.sqrt(2 / self.sequences)
            return None if scatter is None else ERRORS_OF_MEANS * error * scatter
        if self.tolerance is None or self.scale != "relative":
            return self.tolerance
        return self.tolerance * abs(self.value)

    def is_near(self, measured: float | None, scatter: float | None = None) -> bool:
        """Whether a measured value is within the tolerance. An undefined one is not."""
        allowed = self.allowed_distance(scatter)
        if measured is None or allowed is None or not math.isfinite(measured):
            return False
        if self.scale == "log10":
            # Published values of this scale are above 0 (`__post_init__`).
            is_positive = measured > 0
            return is_positive and abs(math.log10(measured / self.value)) <= allowed
        return abs(measured - self.value) <= allowed


class ControlledQuery(BaseModel):
    """SQL whose rows the controls try, and why some cannot fail.

    `python -m tests.reproduce.controls` demands that every row fails for random weights, and
    for interventions that do nothing, unless it says why here.
    """

    # A misspelt key in a file is an error.
    model_config = ConfigDict(extra="forbid", frozen=True)
    sql: str
    passes_random: Reasons = ""
    """Why a model with random weights cannot be told from the published model."""
    passes_null: Reasons = ""
    """Why an intervention that does nothing cannot be told from the published intervention."""


class Check(ControlledQuery):
    """Numbers that were published, by name. `sql` gives rows (name, measured value)."""

    published: dict[str, float] = {}
    file: str = ""
    """A CSV file beside the replication's, in place of `published`: the columns name and value,
    and if needed model and tolerance. A row with a `model` is compared only if the measured model
    has the sizes that `published_models` gives for it.
    """
    tolerance: float | None = None
    """How far a measured value may lie from the published one, if the source gives neither a spread
    nor a number of sequences.
    """
    tolerance_reason: str = ""
    """What such a tolerance follows from, in a few words."""
    relative: bool = False
    """Whether the tolerance is a share of the published value."""
    log10: bool = False
    """Whether the tolerance is of the decimal logarithm: 1 allows a factor of 10."""
    spread: float | dict[str, float] | None = None
    """Published standard deviation of the value over draws of texts or trainings, in units of the
    tolerance. The published value is their mean, and what is measured is one more draw.
    """
    draws: int = 0
    """Number of these draws."""
    sequences: int = 0
    """Sequences that a published mean is of, if their spread was not published. Then the third
    column of `sql` is the standard deviation over the measured ones.
    """
    record: str = ""
    """Why the values only stand beside the measured ones: what was read is not what was published,
    or no source states them.
    """
    stated: str = ""
    """As in the replication, if the source said this at another time."""
    sizes: Sizes | str = {}
    """Sizes of the model that these were published for, or its name in `published_models`, if it is
    not the replication's model.
    """
    needs_text: bool = False
    """Whether the figures are of the authors' own text: not comparable without `--text`."""
    _values: dict[tuple[str, str], PublishedValue] = PrivateAttr({})

    @property
    def values(self) -> tuple[PublishedValue, ...]:
        """Every published value, from the file or from `published`."""
        return tuple(self._values.values())

    @model_validator(mode="after")
    def _read_values(self, info: ValidationInfo) -> Self:
        if bool(self.published) and bool(self.file):
            raise ValueError("expected either published or file, got both")
        if self.relative and self.log10:
            raise ValueError("expected either relative or log10, got both")
        source = self.file or "published"
        rows = [{"name": name, "value": value} for name, value in self.published.items()]
        if self.file:
            rows = _rows_of_file((info.context or {}).get("directory", REPLICATIONS) / self.file)
        self._values = {}
        for row in rows:
            value = self._published_value(source, row)
            if (value.model, value.name) in self._values:
                raise ValueError(f"{source}: names {value.name!r} twice")
            self._values[value.model, value.name] = value
        return self

    def _published_value(self, source: str, row: Mapping[str, Any]) -> PublishedValue:
        name, spreads = row["name"], self.spread
        value = _number(source, row, "value", None)
        tolerance = _number(source, row, "tolerance", self.tolerance)
        own = spreads.get(name) if isinstance(spreads, dict) else spreads
        spread = _number(source, row, "spread", own)
        draws = int(_number(source, row, "draws", self.draws) or 0)
        if value is None:
            raise ValueError(f"{source}: {name}: no value")
        if spread is not None:
            if draws < 2:
                raise ValueError(
                    f"{source}: {name}: spread: expected draws, 2 or more, got {draws}"
                )
            tolerance = prediction_factor(draws) * spread
        elif self.record or self.sequences:
            tolerance = None
        elif tolerance is None:
            raise ValueError(f"{source}: {name}: no tolerance, in the file or in the check")
        elif not self.tolerance_reason:
            raise ValueError(
                f"{source}: {name}: expected tolerance_reason, what its tolerance follows from"
            )
        return PublishedValue(
            name=name,
            value=value,
            tolerance=tolerance,
            scale="log10" if self.log10 else "relative" if self.relative else "absolute",
            spread=spread,
            draws=draws,
            sequences=self.sequences,
            model=row.get("model") or "",
            stated=row.get("stated") or self.stated,
        )


def _number(
    source: str, row: Mapping[str, Any], column: str, default: float | None
) -> float | None:
    """A cell as a number; what the check says if it is empty or the file lacks the column."""
    text = row.get(column)
    if text in (None, ""):
        return default
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"{source}: {shortened(row['name'], 60)}: {column}: expected a number, got "
            f"{shortened(repr(text), 60)}"
        ) from None


def _rows_of_file(file: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file of published values."""
    try:
        reader = csv.DictReader(io.StringIO(read_input(file).decode(), newline=""))
        columns = tuple(reader.fieldnames or ())
        rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file.name}: cannot be read ({reason(error)})") from None
    if not {"name", "value"} <= set(columns) <= set(COLUMNS):
        raise ValueError(
            f"{file.name}: expected the columns name and value, and of the others "
            f"{', '.join(COLUMNS[2:])} those needed, got "
            f"{shortened(', '.join(columns), 60) or 'none'}"
        )
    return rows


class Claim(ControlledQuery):
    """Something that must hold. `sql` gives rows (name, value, whether it holds)."""

    models: tuple[str, ...] = ()
    """Models that it is claimed of. Default: all."""

    @property
    def words(self) -> str:
        """What it claims: the first text in its SQL, or the whole SQL if it has none."""
        # The first column of the SQL is the claim, usually the template of a format().
        text = re.search(r"'(.+?)'", self.sql)
        return text[1] if text else self.sql


class StandInText(BaseModel):
    """The authors' text, which we do not ship."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    what: str
    """What a user may give with `--text FILE`."""
    fingerprint: str = ""
    """Beginning of the SHA-256 of that file, if it is one certain text."""

    def check(self, name: str, files: Iterable[Path]) -> None:
        """Refuse another text, whose figures would be compared with those of the authors'."""
        if not self.fingerprint:
            return
        content = b"".join(read_input(file) for file in files if file.is_file())
        digest = hashlib.sha256(content).hexdigest()[:16]
        if digest != self.fingerprint:
            raise ScanError(
                f"--text {name}: expected {self.what}, with the SHA-256 {self.fingerprint}…, got "
                f"{digest}…"
            )


class Figure(BaseModel):
    """A picture. `sql` gives rows (series, x, y), (x, y, value) for a heat map, or (name, x, y) for
    points. A series `NAME, published` after NAME has its colour.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    title: str
    sql: str
    kind: Literal["line", "bar", "heat", "points"] = "line"
    square: bool = False
    """Whether cells of a heat map are square, as in a picture of a pattern: keys across (x),
    queries down (y).
    """
    x: str = ""
    y: str = ""


class Replication(BaseModel):
    """One replication of the literature."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    title: str
    source: str
    stated: str = ""
    """Date of the newest statement of the source about its figures, as far as it is known."""
    measured: str
    """What is measured, in a sentence."""
    published_model: str
    """The model whose figures were published, as a scan names it."""
    made_by: str = ""
    """The command of a shell that makes its directory, if it is no model of the Hub."""
    training_tokens: int = 0
    """Tokens that this command trains on."""
    published_sizes: Sizes
    """Sizes that a model must have for its numbers to be compared, by field of its description."""
    published_models: dict[str, Sizes] = {}
    """Sizes of further models, by name, for the rows of a check's file that name a model."""
    bundled_model: str
    """The miniature that shows the claims offline."""
    scan: dict[str, dict[str, Any]]
    """Fields of each scan, by name of the scan. A table `bundled` has those of the miniature.

    With `checkpoints = "step-*"` a scan runs on every such directory inside the model's, and the
    runs are called NAME-DIRECTORY. With `sizes`, a list of tables, a scan runs only on models
    that have the sizes of one of them. `token_text` is the text of the token whose id the input
    names: another tokenizer may read another text from it.
    """
    text: StandInText | None = None
    """What the value `"$text"` of an input's option stands for."""
    defaults: dict[str, Any] = {}
    """Fields that all scans share."""
    bundled: dict[str, Any] = {}
    """Fields that differ for the miniature in all scans."""
    family: dict[str, dict[str, Any]] = {}
    """Fields that differ in all scans for the models of a family, by its name in transformers."""
    view: dict[str, str] = {}
    """Views that checks, claims and figures may ask, SQL by name."""
    check: tuple[Check, ...] = ()
    claim: tuple[Claim, ...] = ()
    figure: tuple[Figure, ...] = ()

    @model_validator(mode="after")
    def _know_every_name(self) -> Self:
        for check in self.check:
            names = [check.sizes] if isinstance(check.sizes, str) else []
            for name in names + [value.model for value in check.values if value.model]:
                if name not in self.published_models:
                    problem = unknown("model", name, self.published_models)
                    raise ValueError(
                        f"{check.file or 'sizes'}: {problem}; published_models gives the sizes of "
                        "each"
                    )
        families = {str(sizes.get("family")) for sizes in self.all_sizes}
        for name in self.family:
            if name not in families:
                raise ValueError(f"family.{name}: {unknown('family', name, families)}")
        for name, scan in self.scan.items():
            sizes = scan.get("sizes", [])
            for alternative in sizes:
                _known_sizes(alternative)
            if "token" in (self.defaults | scan).get("input", {}) and "token_text" not in scan:
                raise ValueError(
                    f"scan.{name}: its input names a token by its id; token_text says which text "
                    "that is"
                )
            if self.text is None and TEXT in str([self.defaults, self.bundled, scan]):
                raise ValueError(
                    f"scan.{name}: reads {TEXT}, and the replication has no table [text]"
                )
        return self

    def sizes_of(self, check: Check, value: PublishedValue) -> dict[str, int | str]:
        """The sizes that a model must have for a value to be compared."""
        if value.model:
            return self.published_models[value.model]
        if isinstance(check.sizes, str):
            return self.published_models[check.sizes]
        return check.sizes or self.published_sizes

    @property
    def published_values(self) -> list[PublishedValue]:
        """Every published value, of all checks."""
        return [value for check in self.check for value in check.values]

    @property
    def all_sizes(self) -> list[dict[str, int | str]]:
        """The sizes of every model that something was published for."""
        sizes = [self.published_sizes, *self.published_models.values()]
        own = [check.sizes for check in self.check]
        return sizes + [each for each in own if each and not isinstance(each, str)]


def replications() -> dict[str, Replication]:
    """Every replication we ship, by name."""
    return {file.stem: read_toml(file, Replication) for file in sorted(REPLICATIONS.glob("*.toml"))}


def read_toml(file: Path, model: type[M]) -> M:
    """What a file of TOML holds; raises `ScanError` with one line."""
    try:
        fields = tomllib.loads(read_input(file).decode())
        return model.model_validate(fields, context={"directory": file.parent})
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScanError(f"{file}: cannot be read ({reason(error)})") from None
    except ValidationError as error:
        # One mistake is enough for one line.
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise ScanError(f"{file}: {place}: {problem['msg']}") from None


def find_replications(names: Iterable[str]) -> dict[str, Replication]:
    """The replications of these names. A name `FILE.toml` reads a user's own file."""
    shipped_files = {file.stem: file for file in sorted(REPLICATIONS.glob("*.toml"))}
    selection: dict[str, Replication] = {}
    for name in names:
        if name.endswith(".toml"):
            selection[Path(name).stem] = read_toml(Path(name), Replication)
        elif name in shipped_files:
            selection[name] = read_toml(shipped_files[name], Replication)
        else:
            raise ScanError(unknown("replication", name, shipped_files))
    return selection
