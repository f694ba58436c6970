"""Where a run's model and files lie: from which directory their names are meant, and where they are
if they have moved.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any, cast

from jobs.scan_runs import resumption
from schemas.errors import RunError
from schemas.manifest import Location, Manifest
from schemas.places import StorePath, place
from schemas.run_directory import RunDirectory
from schemas.scan import Scan, override_fields
from workers.inputs.text_files import BUNDLED_PREFIX

FILE_OPTIONS = ("files", "text")
"""Options of input families that name files."""

PLACES = ("model", *(f"input.{option}" for option in FILE_OPTIONS))
"""Fields of a scan that say where something lies; what it is, its fingerprints say."""


def places_of(scan: Scan) -> dict[str, Location]:
    """The places that a scan names: a model's directory, and files."""
    places: dict[str, Location] = {}
    if _on_disk(scan.model) and Path(os.path.expanduser(scan.model)).is_dir():
        places["model"] = scan.model
    for option in FILE_OPTIONS:
        value = scan.input.options.get(option)
        if value is not None:
            places[f"input.{option}"] = value
    return places


@contextmanager
def where_begun(run: RunDirectory, overrides: Sequence[str]) -> Iterator[list[str]]:
    """Work where the relative names of a run are meant from, or here where that directory is gone;
    gives the overrides, whose own relative names are meant from here.
    """
    anchored = [_anchored(override) for override in overrides]
    manifest = run.manifest()
    begun_in = Path(manifest.begun_in or ".")
    found = begun_in if begun_in.is_dir() and not _missing(manifest, begun_in) else Path.cwd()
    with chdir(found):
        yield anchored


def placed(
    run: RunDirectory, manifest: Manifest, kept: Mapping[str, Any], overrides: Sequence[str]
) -> dict[str, Any]:
    """The fields of a run's scan, with its places and what was `kept` as last set; what is gone is
    named.
    """
    settings = [f"{field}={json.dumps(value)}" for field, value in manifest.places.items()]
    fields = override_fields(manifest.identity["scan"], settings) | kept
    set_now = {override.partition("=")[0].strip() for override in overrides}
    for field, location in _missing(manifest, Path.cwd()).items():
        if field not in set_now:
            looked = sorted({manifest.begun_in or os.getcwd(), os.getcwd()})
            what = "the directory of its model" if field == "model" else "files of its input"
            raise RunError(
                f"{run.path}: {location}, {what}, is not there (looked in {' and in '.join(looked)}); "
                f"{resumption(run, '--set', f'{field}=PATH')} goes on with PATH in its place"
            )
    return override_fields(fields, overrides)


def _missing(manifest: Manifest, directory: Path) -> dict[str, str]:
    """The places of a run at which nothing lies, seen from a directory: the first of each field."""
    missing: dict[str, str] = {}
    for field, value in manifest.places.items():
        for location in [value] if isinstance(value, str) else value:
            if _on_disk(location) and not _lies_there(directory, location):
                missing.setdefault(field, location)
    return missing


def _lies_there(directory: Path, location: str) -> bool:
    path = directory / place(location)  # pyright: ignore
    return path.exists() or bool(glob.glob(str(path), recursive=True))


def _on_disk(location: str) -> bool:
    """Whether a name means a place on this machine's disk, if it means one."""
    return not location.startswith(BUNDLED_PREFIX) and not isinstance(place(location), StorePath)


def _anchored(override: str) -> str:
    """An override whose relative names are absolute, so that they mean the same elsewhere."""
    field = override.partition("=")[0].strip()
    if field not in PLACES:
        return override
    value: Any = override_fields({}, [override])
    for part in field.split("."):
        value = value[part]
    if isinstance(value, str):
        return f"{field}={json.dumps(_absolute(field, value))}"
    if isinstance(value, list):
        every = [_absolute(field, v) if isinstance(v, str) else v for v in cast("list[Any]", value)]
        return f"{field}={json.dumps(every)}"
    return override


def _absolute(field: str, location: str) -> str:
    """A place on the disk by its absolute name; a model that is no directory may be one of the Hub."""
    if not _on_disk(location):
        return location
    path = os.path.abspath(os.path.expanduser(location))
    return location if field == "model" and not os.path.isdir(path) else path
