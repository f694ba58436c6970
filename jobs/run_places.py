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


def any_relative(places: Mapping[str, Location]) -> bool:
    """Whether some place means another one in another working directory."""
    return any(
        _on_disk(location) and not os.path.isabs(os.path.expanduser(location))
        for value in places.values()
        for location in ([value] if isinstance(value, str) else value)
    )


@contextmanager
def where_begun(run: RunDirectory, overrides: Sequence[str]) -> Iterator[list[str]]:
    """Work where the relative names of a run are meant from, or here where more of them lie; gives
    the overrides, whose own relative names are meant from here.
    """
    anchored = [_anchored(override) for override in overrides]
    manifest = run.manifest()
    directories = [Path(manifest.begun_in), Path.cwd()] if manifest.begun_in else [Path.cwd()]
    there = [directory for directory in directories if directory.is_dir()]
    found = min(there, key=lambda directory: len(_missing(manifest, directory, overrides)))
    with chdir(found):
        yield anchored


def placed(
    run: RunDirectory, manifest: Manifest, kept: dict[str, Any], overrides: Sequence[str]
) -> dict[str, Any]:
    """The fields of a run's scan, with its places and what was `kept` as last set; what is gone is
    named.
    """
    missing = _missing(manifest, Path.cwd(), overrides)
    if missing:
        gone = not Path(manifest.begun_in).is_dir()
        begun = f" ({manifest.begun_in}, where it was begun, is gone)" if gone else ""
        named = ", ".join(f"{field} = {location!r}" for field, location in missing.items())
        settings = [word for field in missing for word in ("--set", f"{field}=PATH")]
        raise RunError(
            f"{run.path}: not there, seen from {os.getcwd()}{begun}: {named}; resume the run from "
            f"where that lies, or say where: {resumption(run, *settings)}"
        )
    settings = [f"{field}={json.dumps(value)}" for field, value in manifest.places.items()]
    fields = override_fields(manifest.identity["scan"], settings) | kept
    fields = override_fields(fields, overrides)
    if fields["model"] != manifest.identity["scan"]["model"]:
        fields["revision"] = None  # It is the Hub's, and fingerprints say whether it is the same.
    return fields


def _missing(manifest: Manifest, directory: Path, overrides: Sequence[str]) -> dict[str, str]:
    """Places of a run, but for those that are set now, at which nothing lies as seen from a
    directory: the first of each field.
    """
    set_now = {override.partition("=")[0].strip() for override in overrides}
    missing: dict[str, str] = {}
    for field, value in manifest.places.items():
        for location in [value] if isinstance(value, str) else value:
            here = not _on_disk(location) or _lies_there(directory, location)
            if not here and field not in set_now:
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
