"""Scans of several checkpoints: one scan file whose `model` or `revision` is a list.

Each checkpoint is a run of its own, so all that holds for a run holds for each: it is committed,
continued and extended by itself. Its scan is the file's with one more `--set model=…`.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from headcount.schemas.errors import ScanError
from headcount.schemas.scans.scan import Scan, load_scan, read_fields
from headcount.schemas.scans.values import shortened
from headcount.workers.model.files.bundled_models import BUNDLED_MODELS

BUNDLED = "bundled:"

LISTABLE = ("model", "revision")
"""Fields that may be a list."""


@dataclass(frozen=True)
class ScanOfCheckpoint:
    """One of the scans that a scan file means."""

    file: Path
    overrides: tuple[str, ...]
    """What was set, and which checkpoint this is."""
    scan: Scan


def scans_of(scan_file: Path, overrides: Sequence[str] = ()) -> list[ScanOfCheckpoint]:
    """The scans that a file means: one, or one for each checkpoint that it lists."""
    fields = read_fields(scan_file, overrides)
    listed = [field for field in LISTABLE if isinstance(fields.get(field), list)]
    if len(listed) > 1:
        raise ScanError(
            f"{scan_file}: model and revision are both lists; expected one list, of models or of "
            "the revisions of one model"
        )
    field = listed[0] if listed else "model"
    checkpoints = _checkpoints(scan_file, field, fields.get(field))
    if checkpoints is None:
        return [ScanOfCheckpoint(scan_file, tuple(overrides), load_scan(scan_file, overrides))]
    scans: list[ScanOfCheckpoint] = []
    for checkpoint in checkpoints:
        # A text is quoted in JSON as in TOML.
        of_checkpoint = (*overrides, f"{field}={json.dumps(checkpoint, ensure_ascii=False)}")
        scan = load_scan(scan_file, of_checkpoint)
        scans.append(ScanOfCheckpoint(scan_file, of_checkpoint, scan))
    return scans


def _checkpoints(scan_file: Path, field: str, value: object) -> list[str] | None:
    """The checkpoints that a field lists, patterns filled in; None if it names one."""
    if isinstance(value, str):
        # A directory may have brackets in its name.
        is_pattern = field == "model" and glob.has_magic(value) and not os.path.exists(value)
        return _directories(scan_file, value) if is_pattern else None
    if not isinstance(value, list):
        return None
    texts = cast("list[Any]", value)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ScanError(
            f"{scan_file}: {field}: expected a text, or a list of texts, got "
            f"{shortened(repr(texts), 60)}"
        )
    checkpoints: list[str] = []
    for text in texts:
        # A text of the list may be a pattern, too.
        checkpoints += _checkpoints(scan_file, field, text) or [text]
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
    directories = [
        f"{prefix}{path}"
        for path in matches
        if os.path.isfile(os.path.join(root, path, "config.json"))
    ]
    if not directories:
        raise ScanError(
            f"{scan_file}: model: no directory with a config.json matches {pattern!r} (in "
            f"{Path.cwd()}); expected directories of models, such as steps/step-*"
        )
    return sorted(directories, key=_by_numbers)


def _by_numbers(path: str) -> tuple[bool, list[int], str]:
    """A key that sorts step-1000 behind step-200, and a name without a number last.

    >>> sorted(["final", "step-1000", "step-200"], key=_by_numbers)
    ['step-200', 'step-1000', 'final']
    """
    numbers = [int(digits) for digits in re.findall(r"\d+", path)]
    has_own_number = re.search(r"\d", Path(path).name) is not None
    return not has_own_number, numbers, path
