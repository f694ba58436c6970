"""Where a run's model and files lie: the directory that their names are meant from, and their new
places if they have moved.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any, cast

from headcount.jobs.plan.scan_runs import resumption
from headcount.schemas.errors import RunError
from headcount.schemas.files.manifest import Location, Manifest
from headcount.schemas.files.places import StorePath, place
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.scans.scan import Scan, override_fields
from headcount.workers.inputs.corpus.text_files import BUNDLED_PREFIX

FILE_OPTIONS = ("files", "text")
"""Options of input families that name files."""

PLACES = ("model", *(f"input.{option}" for option in FILE_OPTIONS))
"""Fields of a scan that say where something lies. What lies there is known by fingerprints."""


def places_of(scan: Scan) -> dict[str, Location]:
    """The places that a scan names, by field: a model's directory, and files."""
    places: dict[str, Location] = {}
    if _is_on_disk(scan.model) and Path(os.path.expanduser(scan.model)).is_dir():
        places["model"] = scan.model
    for option in FILE_OPTIONS:
        location = scan.input.options.get(option)
        if location is not None:
            places[f"input.{option}"] = location
    return places


def any_relative(places: Mapping[str, Location]) -> bool:
    """Whether some name means another place in another working directory."""
    names = [name for location in places.values() for name in _names_in(location)]
    return any(_is_on_disk(name) and not os.path.isabs(os.path.expanduser(name)) for name in names)


@contextmanager
def where_begun(run: RunDirectory, overrides: Sequence[str]) -> Iterator[list[str]]:
    """Work in the directory that a run's relative names are meant from; yields the overrides.

    That is where the run was begun, or the working directory if more of its files lie there. The
    directory changes and the names do not, because `sequences.file` holds names as the scan has
    them. Overrides come from the user, so their relative names are made absolute first.
    """
    absolute_overrides = [_absolute_override(override) for override in overrides]
    manifest = run.manifest()
    candidates = [Path(manifest.begun_in), Path.cwd()] if manifest.begun_in else [Path.cwd()]
    directories = [directory for directory in candidates if directory.is_dir()]
    # `min` returns the first of equals: where the run was begun.
    best = min(directories, key=lambda directory: len(_missing(manifest, directory, overrides)))
    with chdir(best):
        yield absolute_overrides


def placed_fields(
    run: RunDirectory, manifest: Manifest, remembered: dict[str, Any], overrides: Sequence[str]
) -> dict[str, Any]:
    """The fields of a run's scan, as last set: its places, then `remembered`, then the overrides.

    Places at which nothing lies any more are an error that names all of them.
    """
    missing = _missing(manifest, Path.cwd(), overrides)
    if missing:
        is_gone = not Path(manifest.begun_in).is_dir()
        origin = f" ({manifest.begun_in}, where it was begun, is gone)" if is_gone else ""
        named = ", ".join(f"{field} = {location!r}" for field, location in missing.items())
        advice = [word for field in missing for word in ("--set", f"{field}=PATH")]
        raise RunError(
            f"{run.path}: not there, seen from {os.getcwd()}{origin}: {named}; resume the run from "
            f"where that lies, or say where: {resumption(run, *advice)}"
        )
    place_settings = [f"{field}={json.dumps(value)}" for field, value in manifest.places.items()]
    placed = override_fields(manifest.identity["scan"], place_settings)
    fields = override_fields(placed | remembered, overrides)
    if fields["model"] != manifest.identity["scan"]["model"]:
        # A revision belongs to a model of the Hub. Fingerprints say whether this is the same model.
        fields["revision"] = None
    return fields


def _missing(manifest: Manifest, directory: Path, overrides: Sequence[str]) -> dict[str, str]:
    """The first name of each field at which nothing lies, seen from a directory.

    Fields that the overrides set do not count.
    """
    overridden = {override.partition("=")[0].strip() for override in overrides}
    missing: dict[str, str] = {}
    for field, location in manifest.places.items():
        if field in overridden:
            continue
        for name in _names_in(location):
            # Only what is on the disk is looked for: a store or a bundled text does not move.
            if not _is_on_disk(name):
                continue
            path = directory / place(name)  # pyright: ignore
            # A directory may have brackets in its name, so the name itself is looked for first.
            if not path.exists() and not glob.glob(str(path), recursive=True):
                missing.setdefault(field, name)
    return missing


def _names_in(location: Location) -> Sequence[str]:
    """The names in a place: `input.files` may be one pattern or a list of them."""
    return [location] if isinstance(location, str) else location


def _is_on_disk(name: str) -> bool:
    """Whether a name can only mean something on this machine's disk."""
    return not name.startswith(BUNDLED_PREFIX) and not isinstance(place(name), StorePath)


def _absolute_override(override: str) -> str:
    """An override with absolute names, so that it means the same in another directory."""
    field = override.partition("=")[0].strip()
    if field not in PLACES:
        return override
    # The value is parsed as in a scan file, then followed along the dots of the field.
    value: Any = override_fields({}, [override])
    for key in field.split("."):
        value = value[key]
    if isinstance(value, str):
        return f"{field}={json.dumps(_absolute_name(field, value))}"
    if isinstance(value, list):
        names = [
            _absolute_name(field, name) if isinstance(name, str) else name
            for name in cast("list[Any]", value)
        ]
        return f"{field}={json.dumps(names)}"
    return override


def _absolute_name(field: str, name: str) -> str:
    """The absolute name of a place on the disk; any other name as it is."""
    if not _is_on_disk(name):
        return name
    path = os.path.abspath(os.path.expanduser(name))
    # A model that is no directory here may be one of the Hub.
    return name if field == "model" and not os.path.isdir(path) else path
