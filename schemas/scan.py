"""What a user asks for: one TOML file, validated into one frozen `Scan`."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model

from schemas.errors import ScanError, unknown
from schemas.formulas import Formula
from schemas.intervention import NONE, Intervention
from schemas.kind import Computed, Kind, check_names
from schemas.kinds import KINDS
from schemas.measured_heads import Head, MeasuredHeads, ModelSize, check_named, find_heads
from schemas.places import place
from schemas.precision import BRIDGE_PRECISIONS, PRECISIONS
from schemas.values import LARGEST_INTEGER, Count, Seed, by_key, shortened, wrong_value

LayerNumber = Annotated[int, Field(ge=0)]
Layers = Annotated[tuple[LayerNumber, ...], AfterValidator(lambda layers: tuple(sorted(layers)))]
Heads = Annotated[tuple[Head, ...], AfterValidator(lambda heads: tuple(sorted(heads)))]
"""One choice is one run, in whatever order a scan names it."""
F = TypeVar("F", bound=Formula)
Text = Annotated[str, Field(min_length=1)]

MOST_SHARDS = 10_000_000
"""Every shard has a commit, which whoever reads a run holds in memory."""

MOST_IN_A_SHARD = 1_000_000
"""The sequences of a shard are held in memory at once."""

LONGEST_FILE_NAME = 255
"""What file systems take, in bytes."""

LONGEST_INTERVENTION = 240
"""An intervention names a directory, behind the name of its column."""

SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
"""What directories, addresses, jobs and SQL all take as it is."""

PARTITION_PREFIXES = ("run_id=", "intervention=")
"""What readers take off the path of a file, wherever in it they find it."""

LONGEST_NAME = 100
"""Of a run's name: with its fingerprint it is a directory, a job and a part of addresses."""

CHANGES_NO_ROW = ("batch_size", "sequences", "out", "bad_rows", "bad_rows_in_a_row")
"""Fields that say how, how much and where; a run is found again, whatever they are."""

RENAMED = {"outputs": "predictions", "weights": "weight_processing"}
"""What a field was called in version 0.1, and what it is called now."""


class Input(BaseModel):
    """Where sequences come from: a family, and that family's own options."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)
    family: str

    @property
    def options(self) -> dict[str, Any]:
        """The options as written; the family checks them."""
        return dict(self.model_extra or {})


class Setting(BaseModel):
    """The fields of a scan that come before those of `KINDS`: with which model, on which input."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    model: Text
    """A Hub id, a local directory, or bundled:NAME."""
    revision: Text | None = None
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
    layers: Literal["all"] | Layers = "all"
    """Layers that are measured and stored, from 0: all, or a list as [0, 3]. A forward pass ends
    after the last layer that something needs.
    """
    heads: Literal["all"] | Heads = "all"
    """Heads that are measured and stored: all of these layers, or a list as ["L0H1", "L3H7"], which
    implies its layers.
    """


def _with_kinds(base: type[Setting]) -> type[Setting]:
    """The same with a field for each kind of measurement: names of what is measured."""
    names = tuple[str, ...]
    fields: dict[str, Any] = {}
    for kind in KINDS:
        annotation = Literal[tuple(kind.sets)] | names if kind.sets else names
        fields[kind.field] = (annotation, Field(kind.default, description=kind.meaning))
    return create_model("Measured", __base__=base, __module__=__name__, **fields)


Measured: type[Setting] = _with_kinds(Setting)


class Scan(Measured):
    """A scan; the text under each field is what `headcount plan` prints beside its value.

    What it measures lies in one field for each of `KINDS`, such as `statistics`.
    """

    sequences: Annotated[int, Field(ge=1, le=LARGEST_INTEGER)] | Literal["all"]
    """How many sequences; all means as many as the corpus holds."""
    sequences_per_shard: Annotated[int, Field(ge=1, le=MOST_IN_A_SHARD)] = 256
    """Sequences in one shard: the unit of work, of retry and of commit."""
    batch_size: Count | Literal["auto"] = "auto"
    """Sequences in one forward pass; auto finds the fastest while the scan runs."""
    seed: Seed = 0
    """Seed of synthetic input; sequence i depends on (seed, i) alone."""
    bad_rows: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of a corpus's documents that may be bad; they are left out."""
    bad_rows_in_a_row: Count = 100
    """Bad documents in a row, as a damaged file has them, that a corpus may have."""
    out: Text = "runs"
    """Directory that holds the runs: a path, s3://… or gs://…"""

    def names(self, kind: Kind[Any]) -> str | tuple[str, ...]:
        """What the scan writes in the field of a kind: names, or a word for some of them."""
        return getattr(self, kind.field)

    def formulas(self, kind: Kind[F]) -> tuple[F, ...]:
        """What the scan measures of a kind, in registry order."""
        return kind.select(self.names(kind))

    def kinds(self, computed: Computed | None = None) -> list[Kind[Any]]:
        """The kinds that the scan measures something of; only those that are `computed` so."""
        asked = [kind for kind in KINDS if self.names(kind)]
        return [kind for kind in asked if computed is None or kind.computed == computed]

    def measured_heads(self, model: ModelSize) -> MeasuredHeads:
        """The heads that it measures; what the model does not have is refused."""
        return find_heads(self.layers, self.heads, model)

    def depth(self, model: ModelSize) -> int:
        """How many layers a forward pass goes through: predictions need all of them."""
        if self.kinds("after the pass"):
            return model.n_layers
        return self.measured_heads(model).layers[-1] + 1

    def for_model(self, model: ModelSize) -> Self:
        """The same scan with the shortest names of its layers and heads: one choice is one run."""
        measured = self.measured_heads(model)
        layers: Any = "all"
        heads: Any = "all"
        if any(measured.part(layer) is not None for layer in measured.layers):
            heads = measured.heads
        elif len(measured.layers) < model.n_layers:
            layers = measured.layers
        return self.model_copy(update={"layers": layers, "heads": heads})

    @property
    def record(self) -> dict[str, Any]:
        """What rows mean, as a run's manifest keeps it; kinds that nothing is asked of, and a
        choice of all layers or heads, leave no trace.
        """
        unused = {kind.field for kind in KINDS if not self.names(kind)}
        unused |= {field for field in ("layers", "heads") if getattr(self, field) == "all"}
        return self.model_dump(mode="json", exclude={*CHANGES_NO_ROW, *unused})

    @property
    def fingerprint(self) -> str:
        """Identifies what is measured, wherever it is written."""
        content = json.dumps(self.record, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:8]

    def run_id(self, name: str) -> str:
        """The id of the run this scan makes: the same scan finds its run again."""
        return f"{safe_name(name)}-{self.fingerprint}"


def safe_name(name: str) -> str:
    """A scan's name in the characters that directories, addresses, jobs and SQL all take as they
    are: accents are left out, anything else that is not a letter, digit, '.', '_' or '-' is '_'.

    >>> [safe_name(name) for name in ("lr=0.1", "a%20b", "-x", ".toml", "Größe 3")]
    ['lr_0.1', 'a_20b', '_x', '_toml', 'Gro_e_3']
    """
    apart = unicodedata.normalize("NFKD", name)
    plain = "".join(letter for letter in apart if not unicodedata.combining(letter))
    return re.sub(r"^[.-]|[^A-Za-z0-9._-]", "_", plain)[:LONGEST_NAME]


def scan_name(run_id: str) -> str:
    """The name in a run's id: NAME-HASH, or NAME-HASH-2 of the second run of a scan.

    >>> [scan_name(run_id) for run_id in ("my-texts-1a2b3c4d", "my-texts-1a2b3c4d-2", "toy")]
    ['my-texts', 'my-texts', 'toy']
    """
    numbered = re.fullmatch(r"(.+-[0-9a-f]{8})-\d{1,7}", run_id)
    first = numbered[1] if numbered else run_id
    return first.rpartition("-")[0] or first


def load_scan(path: Path, overrides: Iterable[str] = ()) -> Scan:
    """Read and validate a scan file; `overrides` are `key=value` with a dotted key and a TOML
    value.
    """
    try:
        # Windows editors begin files with a mark of the encoding.
        fields = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ScanError(
            f"{path}: cannot be read ({error.strerror}); expected a TOML scan file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScanError(f"{path}: not valid TOML: {error}") from None
    except ValueError:
        raise ScanError(f"{path}: not valid TOML: an integer has too many digits") from None
    except RecursionError:
        raise ScanError(f"{path}: not valid TOML: nested too deeply") from None
    fields = override_fields(fields, overrides)
    try:
        return parse_scan(fields)
    except ScanError as error:
        raise ScanError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None


def parse_scan(fields: dict[str, Any]) -> Scan:
    """Validate the fields of a scan.

    >>> parse_scan({"model": "bundled:gpt2-mini", "n_ctx": 0, "input": {"family": "pile"}, "sequences": 1})
    Traceback (most recent call last):
    schemas.errors.ScanError: n_ctx: expected 1 or more, got 0
    """
    control = [
        f"{key}: expected text without control characters, got {text!a}"
        for key, text in _texts(fields)
        if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text)
    ]
    if control:
        raise ScanError("\n".join(control))
    try:
        scan = Scan.model_validate_json(json.dumps(fields, default=str))
    except ValidationError as error:
        below = fields.get("input")
        misplaced = cast("dict[str, Any]", below) if isinstance(below, dict) else {}
        raise ScanError(
            "\n".join(_explain(key, found, misplaced) for key, found in by_key(error).items())
        ) from None
    for kind in KINDS:
        kind.selected(scan.names(kind), scan)
    check_named(scan.layers, scan.heads)
    check_names("interventions", tuple(map(str, scan.interventions)), required=True)
    for intervention in scan.interventions:
        if len(str(intervention).encode()) > LONGEST_INTERVENTION:
            raise ScanError(
                f"interventions: expected at most {LONGEST_INTERVENTION} characters, for it names "
                f"a directory, got {len(str(intervention))}: {str(intervention)[:60]}…"
            )
    if scan.sequences != "all":
        shards = -(-scan.sequences // scan.sequences_per_shard)
        if shards > MOST_SHARDS:
            raise ScanError(
                f"sequences: {scan.sequences:,} make {shards:,} shards, expected at most "
                f"{MOST_SHARDS:,}; raise sequences_per_shard ({scan.sequences_per_shard:,}) or "
                "lower sequences"
            )
    _check_paths(scan)
    if scan.precision not in ("auto", *PRECISIONS):
        raise ScanError(f"precision: {unknown('precision', scan.precision, ('auto', *PRECISIONS))}")
    if scan.precision not in BRIDGE_PRECISIONS and (
        scan.engine == "dense" or scan.weight_processing == "folded"
    ):
        raise ScanError(
            "precision: engine = 'dense' and weight_processing = 'folded' compute in "
            f"{' or '.join(BRIDGE_PRECISIONS[1:])}, got {scan.precision!r}"
        )
    return scan


def _check_paths(scan: Scan) -> None:
    """Refuse names that no file system takes, and directories that cannot hold runs."""
    for key, path in (("model", scan.model), ("out", scan.out)):
        longest = max(path.split("/"), key=len)
        if len(longest.encode()) > LONGEST_FILE_NAME:
            raise ScanError(
                f"{key}: expected names of at most {LONGEST_FILE_NAME} bytes, got "
                f"{shortened(repr(longest), 60)}"
            )
    where = place(scan.out)
    if not scan.out.strip() or str(where).startswith(("~", "bundled:")):
        raise ScanError(f"out: expected a directory that can be written, got {scan.out!r}")
    names = re.split(r"[/\\]", scan.out)
    if taken := next((name for name in names if name.startswith(PARTITION_PREFIXES)), None):
        raise ScanError(
            f"out: expected a directory that holds runs, got {scan.out!r}; a name that begins like "
            f"{taken.partition('=')[0]}= is one of a run"
        )


def override_fields(fields: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of a scan's fields with `key=value` put in: a dotted key and a TOML value."""
    changed = copy.deepcopy(fields)
    for override in overrides:
        _override(changed, override)
    return changed


def _texts(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a scan's fields, with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in cast("dict[str, object]", value).items():
            yield from _texts(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for number, item in enumerate(cast("list[object]", value)):
            yield from _texts(item, f"{key}.{number}")


def _override(fields: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *parents, last = (part.strip() for part in key.split("."))
    if not equals or not all((*parents, last)):
        raise ScanError(f"--set {override}: expected key=value, for instance --set n_ctx=128")
    value = _override_value(override, text)
    for parent in parents:
        table: Any = fields.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ScanError(f"--set {override}: {parent} is a value, not a table")
        fields = cast("dict[str, Any]", table)
    fields[last] = value


def _override_value(override: str, text: str) -> Any:
    """A TOML value, or a string without its quotation marks."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        parsed = {}
    if list(parsed) == ["value"]:
        return parsed["value"]
    bare = text.strip()
    if bare[:1] + bare[-1:] in ("[]", "{}") or bare[:1] in ("'", '"'):
        raise ScanError(
            f"--set {override}: not a TOML value; strings in it stand in quotation marks, for "
            """instance --set 'statistics=["entropy"]'"""
        )
    return text


def _explain(key: str, problems: list[Any], misplaced: dict[str, Any]) -> str:
    match problems[0]["type"]:
        case "missing" if key in misplaced:
            return f"{key}: stands below [input]; move it above"
        case "extra_forbidden" if key == "family":
            return "family: stands outside of [input]; move it below"
        case "extra_forbidden" if key in RENAMED:
            return f"{key}: this field is now called {RENAMED[key]}; rename it in the scan"
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
