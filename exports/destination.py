"""Where an export goes: a file or a folder that appears whole, on a disk or in a store."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from headcount.exports.registry import ExportFormat
from headcount.schemas.errors import QueryError
from headcount.schemas.files.places import Place, absolute, names, reason, write_whole

RANDOM_PART = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<=snap-)\d+")
"""What differs in the name of one of Iceberg's files whenever it is written."""


def check_destination(export: ExportFormat, output: str, replace: bool) -> Place:
    """The place of an export. It is an error if something is there that must not be replaced, or
    if nothing can be written there.
    """
    destination = absolute(output)
    try:
        if isinstance(destination, Path):
            _check_parent(destination)
        if export.writes == "file":
            if isinstance(destination, Path) and destination.is_dir():
                raise QueryError(f"{destination}: is a directory; expected the name of a file")
            is_there = destination.is_file()
        else:
            if destination.is_file():
                raise QueryError(
                    f"{destination}: is a file; expected a folder, or a name that is free"
                )
            # A store has no empty folders: one is there if it holds something.
            is_there = any(True for _ in names(destination))
        if is_there and not replace:
            raise QueryError(
                f"{destination}: is there already; choose another name, or say --replace"
            )
    except OSError as error:
        # A name that is too long, for instance.
        raise QueryError(f"{destination}: cannot be written ({reason(error)})") from None
    return destination


def _check_parent(destination: Path) -> None:
    """Refuse a place below a file, or one that must not be written: a scan may come first."""
    if destination == destination.parent:
        raise QueryError(f"{destination}: is the root of the disk; expected a name in a directory")
    # The nearest folder that is there. Those between are made when the export is written.
    parent = next(place for place in destination.parents if place.exists())
    if not parent.is_dir():
        raise QueryError(f"{destination}: {parent} is a file; expected a directory, or a free name")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise QueryError(
            f"{destination}: {parent} cannot be written (no permission); choose another place"
        )


def write_export(export: ExportFormat, destination: Place, files: Mapping[str, bytes]) -> int:
    """Write an export whole; returns its size in bytes."""
    try:
        if export.writes == "file":
            (content,) = files.values()
            write_whole(destination, content)
        elif isinstance(destination, Path):
            _write_folder(destination, files)
        else:
            # A store has no folders that could be renamed. Each object is written whole.
            for name, content in files.items():
                write_whole(destination / name, content)
    except OSError as error:
        raise QueryError(f"{destination}: cannot be written ({reason(error)})") from None
    return sum(map(len, files.values()))


def _write_folder(destination: Path, files: Mapping[str, bytes]) -> None:
    """Write files beside the destination, then give their folder its name in one step."""
    _refuse_other_files(destination, files)
    destination.parent.mkdir(parents=True, exist_ok=True)
    # Two exports to one place at a time write into different folders.
    mark = secrets.token_hex(4)
    partial = destination.with_name(f".{destination.name}.{mark}.part")
    older = destination.with_name(f".{destination.name}.{mark}.old")
    try:
        partial.mkdir()
        for name, content in files.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(partial / name, content)
        # A name that holds a folder cannot be taken, so an older export steps aside first.
        if destination.exists():
            destination.rename(older)
        try:
            partial.rename(destination)
        except OSError:
            # Rather the older export than none.
            if older.exists():
                older.rename(destination)
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    # Only now that the new folder has the name.
    shutil.rmtree(older, ignore_errors=True)


def _refuse_other_files(destination: Path, files: Mapping[str, bytes]) -> None:
    """Refuse to replace a folder that holds more than an older export: it may be anything."""
    if not destination.is_dir():
        return
    old_files = [path for path in destination.rglob("*") if not path.is_dir()]
    of_export = set(map(_lasting_name, files))
    old_names = sorted(str(path.relative_to(destination)) for path in old_files)
    others = [name for name in old_names if _lasting_name(name) not in of_export]
    if others:
        raise QueryError(
            f"{destination}: holds {others[0]}, which is no part of this export; choose another "
            "folder"
        )


def _lasting_name(name: str) -> str:
    """The name of a file without what differs in every export.

    >>> _lasting_name("heads/metadata/snap-241-0-f390002b-7b78-406b-8897-516283d3200b.avro")
    'heads/metadata/snap-*-0-*.avro'
    """
    return RANDOM_PART.sub("*", name)
