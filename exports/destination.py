"""Where an export goes: a file or a folder that appears whole, on a disk or in a store."""

import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from headcount.exports.registry import ExportFormat
from headcount.schemas.errors import QueryError
from headcount.schemas.files.places import Place, absolute, explained, names, reason, write_whole

RANDOM_PART = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<=snap-)\d+")
"""What differs in the name of one of Iceberg's files whenever it is written."""


def check_destination(export: ExportFormat, output: str, replace: bool) -> Place:
    """The place of an export. It is an error if something is there that must not be replaced, or
    if nothing can be written there: a scan may come first.
    """
    destination = absolute(output)
    problem = None
    try:
        if isinstance(destination, Path):
            # The nearest folder that is there. Those between are made when the export is written.
            parent = next((place for place in destination.parents if place.exists()), None)
            if parent is None:
                problem = "is the root of the disk; expected a name in a directory"
            elif not parent.is_dir():
                problem = f"{parent} is a file; expected a directory, or a free name"
            elif not os.access(parent, os.W_OK | os.X_OK):
                problem = f"{parent} cannot be written (no permission); choose another place"
            elif export.writes == "file" and destination.is_dir():
                problem = "is a directory; expected the name of a file"
        is_file = destination.is_file()
        if export.writes == "folder" and is_file:
            problem = problem or "is a file; expected a folder, or a name that is free"
        # A store has no empty folders: one is there if it holds something.
        is_there = is_file or (export.writes == "folder" and bool(names(destination)))
    except OSError as error:
        # A name that is too long, for instance.
        raise QueryError(f"{destination}: cannot be written ({reason(error)})") from None
    if is_there and not replace:
        problem = problem or "is there already; choose another name, or say --replace"
    if problem is not None:
        raise QueryError(f"{destination}: {problem}")
    return destination


def write_export(
    export: ExportFormat, destination: Place, files: Mapping[str, bytes | Path]
) -> int:
    """Write an export whole; returns the size in bytes of what is new in it."""
    with explained(destination):
        if isinstance(destination, Path) and export.writes == "folder":
            _write_folder(destination, files)
        else:
            # A store has no folders that could be renamed. Each object is written whole.
            for name, content in files.items():
                place = destination if export.writes == "file" else destination / name
                write_whole(place, content.read_bytes() if isinstance(content, Path) else content)
    return sum(len(content) for content in files.values() if isinstance(content, bytes))


def _write_folder(destination: Path, files: Mapping[str, bytes | Path]) -> None:
    """Write files beside the destination, then give their folder its name in one step."""
    # A folder that holds more than an older export may be anything.
    of_export = {RANDOM_PART.sub("*", name) for name in files}
    for path in sorted(destination.rglob("*")):
        name = str(path.relative_to(destination))
        if not path.is_dir() and RANDOM_PART.sub("*", name) not in of_export:
            raise QueryError(
                f"{destination}: holds {name}, which is no part of this export; choose another "
                "folder"
            )
    destination.parent.mkdir(parents=True, exist_ok=True)
    # Two exports to one place at a time write into different folders.
    mark = secrets.token_hex(4)
    partial = destination.with_name(f".{destination.name}.{mark}.part")
    older = destination.with_name(f".{destination.name}.{mark}.old")
    try:
        partial.mkdir()
        for name, content in files.items():
            if isinstance(content, bytes):
                write_whole(partial / name, content)
                continue
            # The Hub's cache names its files by symbolic links, which others may not follow.
            try:
                os.link(content.resolve(), partial / name)
            except OSError:
                # On another disk, or one without links.
                shutil.copyfile(content, partial / name)
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
