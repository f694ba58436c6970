"""What a user asks for: one TOML file, validated into one frozen `Scan`."""

from __future__ import annotations

import copy
import hashlib
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.errors import ScanError, unknown
from schemas.intervention import NONE, Intervention
from schemas.places import place
from schemas.precision import BRIDGE_PRECISIONS, PRECISIONS
from schemas.predictions import select_predictions
from schemas.profiles import select_curves, select_profiles
from schemas.statistics import select
from schemas.weight_statistics import select_weight_statistics

Count = Annotated[int, Field(ge=1)]

EMPTY_UNLESS_TOLD = ("profiles", "curves", "weight_statistics", "predictions")
"""Lists of names that a scan need not have."""


CHANGES_NO_ROW = ("batch_size", "sequences", "out")
"""Fields that say how, how much and where; a run is found again, whatever they are."""


class Input(BaseModel):
    """Where sequences come from: a family, and that family's own options."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)
    family: str

    @property
    def options(self) -> dict[str, Any]:
        """The options as written; the family checks them."""
        return dict(self.model_extra or {})


class Scan(BaseModel):
    """A scan; the text under each field is what `headcount plan` prints beside its value."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    model: Annotated[str, Field(min_length=1)]
    """A Hub id, a local directory, or bundled:NAME."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; none means the default branch."""
    weight_processing: Literal["raw", "folded"] = "raw"
    """raw: as trained. folded: LayerNorm folded in and weights centred, as older TransformerLens
    did; norms differ.
    """
    precision: str = "auto"
    """Number formats of the model's products; auto is the fastest whose drift is acceptable
    (docs/precision.md).
    """
    engine: Literal["fused", "dense"] = "fused"
    """fused: never builds an attention pattern. dense: builds each one through TransformerLens's
    hooks; the reference.
    """
    n_ctx: Count
    """Tokens in every sequence, the beginning-of-sequence token included."""
    bos: bool = True
    """Whether every sequence begins with the model's beginning-of-sequence token."""
    input: Input
    """Where sequences come from: a family and its options."""
    interventions: tuple[Intervention, ...] = (NONE,)
    """Edits of the model, each measured on the same sequences; none is the untouched model."""
    statistics: Literal["standard", "all"] | tuple[str, ...] = "standard"
    """Columns of the heads table: standard, all, or a list of names."""
    profiles: tuple[str, ...] = ()
    """Profiles (means by key, query, lag or pair) of the profiles table: a list of names, none
    unless told.
    """
    curves: tuple[str, ...] = ()
    """Profiles kept of every sequence, list columns of the curves table: a list of names, none
    unless told.
    """
    weight_statistics: tuple[str, ...] = ()
    """Statistics of the weights alone, in the weights table: a list of names, none unless told."""
    predictions: tuple[str, ...] = ()
    """What the model predicts, columns of the sequences table: a list of names, none unless told.
    """
    sequences: Count | Literal["all"]
    """How many sequences; all means as many as the corpus holds."""
    sequences_per_shard: Count = 256
    """Sequences in one shard: the unit of work, of retry and of commit."""
    batch_size: Count | Literal["auto"] = "auto"
    """Sequences in one forward pass; auto finds the fastest while the scan runs."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of synthetic input; sequence i depends on (seed, i) alone."""
    out: str = "runs"
    """Directory that holds the runs: a path, s3://… or gs://…"""

    @property
    def record(self) -> dict[str, Any]:
        """What rows mean, as a run's manifest keeps it; lists that are empty unless told leave no
        trace.
        """
        unused = {name for name in EMPTY_UNLESS_TOLD if not getattr(self, name)}
        return self.model_dump(mode="json", exclude={*CHANGES_NO_ROW, *unused})

    @property
    def fingerprint(self) -> str:
        """Identifies what is measured, wherever it is written."""
        content = json.dumps(self.record, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:8]

    def run_id(self, name: str) -> str:
        """The id of the run this scan makes: the same scan finds its run again."""
        return f"{name}-{self.fingerprint}"


def load_scan(path: Path, overrides: Iterable[str] = ()) -> Scan:
    """Read and validate a scan file; `overrides` are `key=value` with a dotted key and a TOML
    value.
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScanError(
            f"{path}: cannot be read ({error.strerror}); expected a TOML scan file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScanError(f"{path}: not valid TOML: {error}") from None
    fields = override_fields(fields, overrides)
    try:
        return parse_scan(fields)
    except ScanError as error:
        raise ScanError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None


def parse_scan(fields: dict[str, Any]) -> Scan:
    """Validate the fields of a scan.

    >>> parse_scan({"model": "bundled:gpt2-mini", "n_ctx": 0, "input": {"family": "pile"}, "sequences": 1})
    Traceback (most recent call last):
    schemas.errors.ScanError: n_ctx: input should be greater than or equal to 1, got 0
    """
    try:
        scan = Scan.model_validate_json(json.dumps(fields, default=str))
    except ValidationError as error:
        raise ScanError(
            "\n".join(_explain(key, found) for key, found in by_key(error).items())
        ) from None
    select(scan.statistics)
    select_profiles(scan.profiles, scan.n_ctx)
    select_curves(scan.curves)
    select_weight_statistics(scan.weight_statistics)
    select_predictions(scan.predictions)
    place(scan.out)
    if scan.precision not in ("auto", *PRECISIONS):
        raise ScanError(f"precision: {unknown('precision', scan.precision, ('auto', *PRECISIONS))}")
    if scan.precision not in BRIDGE_PRECISIONS and (
        scan.engine == "dense" or scan.weight_processing == "folded"
    ):
        raise ScanError(
            f"precision: engine = 'dense' and weight_processing = 'folded' compute in {' or '.join(BRIDGE_PRECISIONS[1:])}, "
            f"got {scan.precision!r}"
        )
    if scan.weight_statistics and scan.weight_processing != "raw":
        raise ScanError(
            f"weight_statistics: these are of the weights as trained, so they expect weight_processing = 'raw', "
            f"got {scan.weight_processing!r}; leave them out or set weight_processing = 'raw'"
        )
    for name in ("statistics", "interventions"):
        values = getattr(scan, name)
        if not values or (len(set(values)) < len(values) and values not in ("standard", "all")):
            texts = list(map(str, values))
            raise ScanError(f"{name}: expected at least one name, each once, got {texts!r}")
    for name in EMPTY_UNLESS_TOLD:
        if len(set(getattr(scan, name))) < len(getattr(scan, name)):
            raise ScanError(f"{name}: expected each name once, got {list(getattr(scan, name))!r}")
    return scan


def override_fields(fields: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of a scan's fields with `key=value` put in: a dotted key and a TOML value."""
    changed = copy.deepcopy(fields)
    for override in overrides:
        _override(changed, override)
    return changed


def _override(fields: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ScanError(f"--set {override}: expected key=value, for instance --set n_ctx=128")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = key.strip().split(".")
    for parent in parents:
        table: Any = fields.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ScanError(f"--set {override}: {parent} is a value, not a table")
        fields = cast("dict[str, Any]", table)
    fields[last] = value


def by_key(error: ValidationError) -> dict[str, list[Any]]:
    """The problems of each dotted key; a value that fits no member of a union is one key with
    several problems.
    """
    problems: dict[str, list[Any]] = {}
    for problem in error.errors():
        first, *rest = problem["loc"]
        # The rest holds names of union members besides places in the scan.
        places = [first, *(part for part in rest if isinstance(part, int) or part == "family")]
        problems.setdefault(".".join(map(str, places)), []).append(problem)
    return {
        key: p
        for key, p in problems.items()
        if not any(other.startswith(f"{key}.") for other in problems)
    }


def wrong_value(key: str, problems: list[Any]) -> str:
    """One line for a value that is wrong: what every member of a union expects, and what arrived."""
    messages = dict.fromkeys(p["msg"][0].lower() + p["msg"][1:] for p in problems)
    lead = "input should be "
    first, *others = messages
    expected = " or ".join([first, *(m.removeprefix(lead) for m in others)])
    return f"{key}: {expected}, got {problems[0]['input']!r}"


def _explain(key: str, problems: list[Any]) -> str:
    match problems[0]["type"]:
        case "extra_forbidden":
            return unknown("key", key, Scan.model_fields)
        case "missing":
            return f"{key}: missing; expected {_expected(key)}"
        case _:
            return wrong_value(key, problems)


def _expected(key: str) -> str:
    if key == "input.family":
        return "the name of an input family"
    field = Scan.model_fields.get(key)
    description = field.description if field and field.description else "a value"
    return description[0].lower() + description[1:].rstrip(".")
