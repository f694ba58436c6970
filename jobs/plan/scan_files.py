"""The scans that a scan file means, read and checked.

A `model` or `revision` that is a list means a scan for each checkpoint. Each is a run of its own,
so all that holds for a run holds for each: it is committed, continued and extended by itself. Its
scan is the file's with one more `--set model=…`.
"""

import glob
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headcount.schemas.errors import ScanError, counted
from headcount.schemas.places import StorePath, place
from headcount.schemas.scans.scan import Scan
from headcount.schemas.scans.scan_file import load_scan, read_fields
from headcount.schemas.values import shortened
from headcount.workers.model.info.bundled_models import BUNDLED_MODELS

BUNDLED = "bundled:"


@dataclass(frozen=True)
class ScanOfCheckpoint:
    """One of the scans that a scan file means."""

    file: Path
    overrides: tuple[str, ...]  # what was set, and which checkpoint this is
    scan: Scan

    @property
    def text(self) -> str:
        """What the run keeps of the scan: the file as it is, and what was set as comments."""
        comments = "".join(f"\n# --set {override}" for override in self.overrides)
        return self.file.read_text(encoding="utf-8") + comments


def scans_of(
    scan_file: Path, overrides: Sequence[str] = (), plugins: Sequence[Path] = ()
) -> list[ScanOfCheckpoint]:
    """The scans that a file means: one, or one for each checkpoint that it lists.

    `plugins` are files besides those that it names.
    """
    fields = read_fields(scan_file, overrides)
    if plugins and isinstance(named := fields.get("plugins", []), list):
        files = json.dumps([*named, *map(str, plugins)], ensure_ascii=False)
        overrides = [*overrides, f"plugins={files}"]
    listed = [field for field in ("model", "revision") if isinstance(fields.get(field), list)]
    if len(listed) > 1:
        raise ScanError(
            f"{scan_file}: model and revision are both lists; expected one list, of models or of "
            "the revisions of one model"
        )
    field = listed[0] if listed else "model"
    checkpoints = _checkpoints(scan_file, field, fields.get(field))
    settings = [tuple(overrides)]
    if checkpoints is not None:
        # A text is quoted in JSON as in TOML.
        texts = [json.dumps(checkpoint, ensure_ascii=False) for checkpoint in checkpoints]
        settings = [(*overrides, f"{field}={text}") for text in texts]
    return [ScanOfCheckpoint(scan_file, each, load_scan(scan_file, each)) for each in settings]


def refuse_checkpoints(fields: Mapping[str, object]) -> None:
    """Refuse a list or a pattern where a scan has one model, and so one run."""
    for field in ("model", "revision"):
        value = fields.get(field)
        if isinstance(value, list | tuple):
            count, example = counted(len(value), "checkpoint"), f"{field}=NAME"
        elif isinstance(value, str) and _is_pattern(field, value):
            count, example = f"the pattern {shortened(repr(value), 60)}", "model=NAME"
        else:
            continue
        raise ScanError(
            f"{field}: expected one checkpoint, got {count}; headcount scan FILE on the command "
            f"line makes a run of each, and here each is a call: headcount.scan(…, {example})"
        )


def _is_pattern(field: str, value: str) -> bool:
    # A directory may have brackets in its name.
    return field == "model" and glob.has_magic(value) and not os.path.exists(value)


def _checkpoints(scan_file: Path, field: str, value: object) -> list[str] | None:
    """The checkpoints that a field lists, patterns filled in; None if it names one."""
    if isinstance(value, str):
        return _directories(scan_file, value) if _is_pattern(field, value) else None
    if not isinstance(value, list):
        return None
    if not value or not all(isinstance(text, str) and text for text in value):
        raise ScanError(
            f"{scan_file}: {field}: expected a text, or a list of texts, got "
            f"{shortened(repr(value), 60)}"
        )
    # A text of the list may be a pattern, too.
    lists = (_checkpoints(scan_file, field, text) or [text] for text in value)
    checkpoints = [checkpoint for each in lists for checkpoint in each]
    twice = sorted({text for text in checkpoints if checkpoints.count(text) > 1})
    if twice:
        raise ScanError(
            f"{scan_file}: {field}: expected each checkpoint once, got {twice[0]} twice"
        )
    return checkpoints


def _directories(scan_file: Path, pattern: str) -> list[str]:
    """The model directories that a pattern fits, in the order of the numbers in their names."""
    prefix, root = (BUNDLED, BUNDLED_MODELS) if pattern.startswith(BUNDLED) else ("", Path())
    matches = glob.glob(os.path.expanduser(pattern.removeprefix(prefix)), root_dir=root)
    # A directory without a configuration is no model: logs often lie beside checkpoints.
    directories = [f"{prefix}{path}" for path in matches if _is_model(root / path)]
    if not directories:
        raise ScanError(
            f"{scan_file}: model: no directory with a config.json matches {pattern!r} (in "
            f"{Path.cwd()}); expected directories of models, such as steps/step-*"
        )
    return sorted(directories, key=by_numbers)


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file() or (path.suffix == ".gguf" and path.is_file())


def by_numbers(path: str) -> tuple[bool, list[int], str]:
    """A key that sorts step-1000 behind step-200, and a name without a number last.

    >>> sorted(["final", "step-1000", "step-200"], key=by_numbers)
    ['step-200', 'step-1000', 'final']
    """
    numbers = [int(digits) for digits in re.findall(r"\d+", path)]
    has_own_number = re.search(r"\d", Path(path).name) is not None
    return not has_own_number, numbers, path


def portable_scan(scan_file: Path, overrides: Sequence[str]) -> Scan:
    """Read a scan that other machines will run; refuse mistakes and places they cannot reach."""
    # Torch takes seconds to import, and whoever reads a scan file first wants to hear of mistakes.
    from headcount.jobs.plan.identity import FILE_OPTIONS
    from headcount.jobs.plan.resolved_scan import check_scan
    from headcount.workers.inputs.sequences import Sequences
    from headcount.workers.interventions import needs_partners
    from headcount.workers.model.info.description import described

    scan = load_scan(scan_file, overrides)
    places = [("out", scan.out, "--set out=s3://BUCKET/runs")]
    if scan.corpora is not None:
        places.append(("corpora", scan.corpora, "--set corpora=s3://BUCKET/corpora"))
    for option in FILE_OPTIONS:
        value = scan.input.options.get(option)
        places += [
            (f"input.{option}", file, "an absolute path that every node mounts, or s3://")
            for file in (value if isinstance(value, list) else [value])
            # A value of another type is an error of the family's check below.
            if isinstance(file, str) and not file.startswith(BUNDLED)
        ]
    for key, location, example in places:
        # A name in a home directory means another place on every node, too.
        where = None if location.startswith("~") else place(location)
        if where is None or not (isinstance(where, StorePath) or where.is_absolute()):
            raise ScanError(
                f"{key}: {location} means another place on every node; expected a store or an "
                f"absolute path ({example})"
            )
    for field, name in (("model", scan.model), ("tokenizer", scan.tokenizer or BUNDLED)):
        # `a/b` may be a directory here, and may be a model of the Hub.
        is_here = not os.path.isabs(name) and os.path.exists(name)
        if name.startswith((".", "~")) or is_here:
            kind = "file" if os.path.isfile(name) else "directory"
            raise ScanError(
                f"{field}: {name} is a {kind} of this machine; expected bundled:NAME, a Hub id "
                "or an absolute path that every node mounts"
            )
    check_scan(scan)
    # Bundled models are small and on this machine, so more can be checked.
    if scan.model.startswith(BUNDLED):
        info = described(scan)
        scan = scan.for_model(info)
        sequences = Sequences(scan, info, partners=needs_partners(scan.interventions))
        if sequences.family.synthetic:
            sequences.shard(0)  # Impossible options show when the first sequences are drawn.
    return scan
