"""How a scan is read: from a file or from its fields. Whatever is wrong is a line that names it."""

import json
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from headcount.schemas.errors import ScanError, unknown
from headcount.schemas.formula_kinds import CURVES, PROFILES, WEIGHT_STATISTICS
from headcount.schemas.formulas import check_names
from headcount.schemas.kinds import KINDS
from headcount.schemas.places import check_address, check_on_disk, place
from headcount.schemas.plugin_files import read_and_activate
from headcount.schemas.scans.overrides import override_fields
from headcount.schemas.scans.scan import BRIDGE_PRECISIONS, PRECISIONS, Scan
from headcount.schemas.values import Problem, by_key, shortened, wrong_value

MOST_PAIRED = 256
"""Longest sequences whose pairs are stored: 256 · 257 / 2 = 32,896 pairs in every head."""

MOST_SHARDS = 10_000_000
"""Shards of a run. Each has a commit, and a reader of the run holds all commits in memory."""

LONGEST_FILE_NAME = 255
"""Longest name of a file or directory that file systems take, in bytes."""

LONGEST_INTERVENTION = 240
"""Longest text of an intervention, in bytes: it names a directory, after `intervention=`."""

PARTITION_PREFIXES = ("run_id=", "intervention=")
"""Beginnings of directory names that readers turn into columns, wherever they are in a path."""

GRADIENT_PRECISIONS = ("auto", "float32", "float64")
"""Precisions that have a backward pass; auto means float32."""


def load_scan(path: Path, overrides: Iterable[str] = ()) -> Scan:
    """Read and validate a scan file; an override is `key=value` with a dotted key, in TOML."""
    fields = read_fields(path, overrides)
    try:
        return parse_scan(fields)
    except ScanError as error:
        raise ScanError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None


def read_fields(path: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of a scan file with each `key=value` put in; nothing is validated."""
    check_on_disk(path)
    try:
        # Editors on Windows begin files with a mark of the encoding, which utf-8-sig skips.
        fields = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ScanError(
            f"{path}: cannot be read ({error.strerror}); expected a TOML scan file"
        ) from None
    except ValueError as error:
        is_known = isinstance(error, tomllib.TOMLDecodeError | UnicodeDecodeError)
        # What is left is Python's limit on the digits of an integer.
        problem = error if is_known else "an integer has too many digits"
        raise ScanError(f"{path}: not valid TOML: {problem}") from None
    except RecursionError:
        raise ScanError(f"{path}: not valid TOML: nested too deeply") from None
    return override_fields(fields, overrides)


def parse_scan(fields: dict[str, Any]) -> Scan:
    """Validate the fields of a scan; every problem is a line of the `ScanError`.

    >>> fields = {"model": "bundled:gpt2-mini", "input": {"family": "pile"}, "sequences": 1}
    >>> parse_scan(fields | {"n_ctx": 0})
    Traceback (most recent call last):
    headcount.schemas.errors.ScanError: n_ctx: expected 1 or more, got 0
    """
    # No file name or terminal line can hold control characters and surrogates.
    lines = [
        f"{key}: expected text without control characters, got {text!a}"
        for key, text in _texts(fields)
        if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text)
    ]
    if lines:
        raise ScanError("\n".join(lines))
    fields = fields.copy()
    # What fields name may be theirs.
    plugins = read_and_activate(fields.pop("plugins", []))
    try:
        # As JSON, because only there does pydantic's strict mode take an array for a tuple.
        scan = Scan.model_validate_json(json.dumps(fields, default=str))
    except ValidationError as error:
        # In TOML, whatever is written below [input] belongs to it. Fields of the scan often are.
        below_input = fields.get("input")
        misplaced = cast("dict[str, Any]", below_input) if isinstance(below_input, dict) else {}
        lines = [_explain(key, problems, misplaced) for key, problems in by_key(error).items()]
        raise ScanError("\n".join(lines)) from None
    if plugins:
        scan = scan.model_copy(update={"plugins": plugins})
    # Fields are right by themselves. What follows is about several of them, or about names.
    for kind in KINDS:
        kind.check(scan.names(kind))
    _check_formulas(scan)
    _check_named(scan)
    _check_paths(scan)
    _check_precision(scan)
    _check_gradients(scan)
    return scan


def _check_formulas(scan: Scan) -> None:
    """Refuse what would be too much to store, and weight statistics of weights as not trained."""
    for profile in scan.formulas(PROFILES):
        if profile.axis == "pair" and scan.n_ctx > MOST_PAIRED:
            raise ScanError(
                f"profiles: {profile.name} keeps every pair of a query and a key, so it expects "
                f"n_ctx <= {MOST_PAIRED}, got {scan.n_ctx}; lower n_ctx or leave it out"
            )
    for curve in scan.formulas(CURVES):
        if curve.axis == "pair":
            raise ScanError(
                f"curves: {curve.name} has a number for every pair of a query and a key, too many "
                "to keep of every sequence; ask for it in profiles, which keep the mean"
            )
    if scan.formulas(WEIGHT_STATISTICS) and scan.weight_processing != "raw":
        raise ScanError(
            "weight_statistics: these are of the weights as trained, so they expect "
            f"weight_processing = 'raw', got {scan.weight_processing!r}; leave them out or set "
            "weight_processing = 'raw'"
        )


def _check_named(scan: Scan) -> None:
    """Refuse heads, layers and interventions named twice, and more of them than can be kept."""
    for field, chosen in {"layers": scan.layers, "heads": scan.heads}.items():
        if not isinstance(chosen, str) and (not chosen or len(set(chosen)) < len(chosen)):
            raise ScanError(
                f'{field}: expected "all", or at least one {field[:-1]} and each once, got '
                f"[{', '.join(map(str, chosen))}]"
            )
    if scan.layers != "all" and scan.heads != "all":
        raise ScanError(
            "heads: these imply their layers, so layers and heads exclude each other; "
            "leave one of them out"
        )
    texts = tuple(map(str, scan.interventions))
    check_names("interventions", texts, required=True)
    for text in texts:
        if len(text.encode()) > LONGEST_INTERVENTION:
            raise ScanError(
                f"interventions: expected at most {LONGEST_INTERVENTION} characters, for it names "
                f"a directory, got {len(text)}: {text[:60]}…"
            )
    shards = 0 if scan.sequences == "all" else -(-scan.sequences // scan.sequences_per_shard)
    if shards > MOST_SHARDS:
        raise ScanError(
            f"sequences: {scan.sequences:,} make {shards:,} shards, expected at most "
            f"{MOST_SHARDS:,}; raise sequences_per_shard ({scan.sequences_per_shard:,}) or "
            "lower sequences"
        )


def _check_precision(scan: Scan) -> None:
    """Refuse unknown precisions, and low ones if TransformerLens computes the forward pass."""
    if scan.precision not in ("auto", *PRECISIONS):
        raise ScanError(f"precision: {unknown('precision', scan.precision, ('auto', *PRECISIONS))}")
    needs_bridge = scan.engine == "dense" or scan.weight_processing == "folded"
    if needs_bridge and scan.precision not in BRIDGE_PRECISIONS:
        raise ScanError(
            "precision: engine = 'dense' and weight_processing = 'folded' compute in "
            f"{' or '.join(BRIDGE_PRECISIONS[1:])}, got {scan.precision!r}"
        )


def _check_gradients(scan: Scan) -> None:
    """Refuse a backward pass where there is none: it goes through the fused engine alone."""
    needing = [f.text for kind in scan.kinds() for f in scan.formulas(kind) if f.needs_gradients]
    if not needing:
        return
    for field, expected in {
        "engine": ("fused",), "weight_processing": ("raw",), "precision": GRADIENT_PRECISIONS
    }.items():  # fmt: skip
        if getattr(scan, field) not in expected:
            raise ScanError(
                f"{field}: {needing[0]} needs a backward pass, which expects "
                f"{' or '.join(expected)}, got {getattr(scan, field)!r}"
            )


def _check_paths(scan: Scan) -> None:
    """Refuse names that no file system takes, and directories that cannot hold runs."""
    inputs = [scan.input.options.get(option) for option in ("files", "text", "dataset")]
    for _, text in [("", scan.model), *_texts([scan.tokenizer]), *_texts(inputs)]:
        check_address(text)
    paths = {"model": scan.model, "out": scan.out, "corpora": scan.corpora or "corpora"}
    for key, path in paths.items():
        longest = max(path.split("/"), key=len)
        if len(longest.encode()) > LONGEST_FILE_NAME:
            raise ScanError(
                f"{key}: expected names of at most {LONGEST_FILE_NAME} bytes, got "
                f"{shortened(repr(longest), 60)}"
            )
    del paths["model"]
    for key, path in paths.items():
        # After expansion, a "~" at the start is the home of a user who does not exist.
        if not path.strip() or str(place(path)).startswith(("~", "bundled:")):
            raise ScanError(f"{key}: expected a directory that can be written, got {path!r}")
        # Readers would take such a part of the path for the name of a run or of an intervention.
        for name in re.split(r"[/\\]", path):
            if name.startswith(PARTITION_PREFIXES):
                holds = "runs" if key == "out" else "corpora"
                raise ScanError(
                    f"{key}: expected a directory that holds {holds}, got {path!r}; a name that "
                    f"begins like {name.partition('=')[0]}= is one of a run"
                )


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


def _explain(key: str, problems: list[Problem], misplaced: dict[str, Any]) -> str:
    """One line about what is wrong with a key; `misplaced` are the keys below [input]."""
    match problems[0]["type"]:
        case "missing" if key in misplaced:
            return f"{key}: stands below [input]; move it above"
        case "extra_forbidden" if key == "family":
            return "family: stands outside of [input]; move it below"
        case "extra_forbidden":
            return unknown("key", key, Scan.model_fields)
        case "missing":
            return f"{key}: missing; expected {_expected(key)}"
        case _:
            return wrong_value(key, problems)


def _expected(key: str) -> str:
    """What a missing key means, as the middle of a sentence."""
    if key == "input.family":
        return "the name of an input family"
    field = Scan.model_fields.get(key)
    # The first sentence says what it is; the others say more about it.
    meaning = " ".join(((field and field.description) or "a value").split()).partition(". ")[0]
    return meaning[0].lower() + meaning[1:].rstrip(".")
