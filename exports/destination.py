"""Where an export goes: a file or a folder that appears whole, on a disk or in a store."""

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from headcount.exports.shared.registry import ExportFormat, Options
from headcount.exports.shared.source import UNFINISHED
from headcount.schemas.errors import QueryError
from headcount.schemas.places import Place, absolute, explained, names, write_whole
from headcount.schemas.reasons import reason
from headcount.schemas.scans.scan_file import LONGEST_FILE_NAME

LONGEST_MARK = len("..01234567.part")  # what is put around the name of a file until it is whole

RANDOM_PART = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<=snap-)\d+")
"""What differs in the name of one of Iceberg's files whenever it is written."""


def check_destination(
    export: ExportFormat, output: str, replace: bool, options: Options | None = None
) -> Place:
    """The place of an export. It is an error if something is there that must not be replaced, or
    if nothing can be written there: a scan may come first.

    What the same export has begun to write there, with these options, it goes on with.
    """
    destination = absolute(output)
    try:
        problem = _problem_of_disk(export, destination) if isinstance(destination, Path) else None
        is_file = destination.is_file()
        if export.writes == "folder" and is_file:
            problem = problem or "is a file; expected a folder, or a name that is free"
        # A store has no empty folders: one is there if it holds something.
        is_there = is_file or (export.writes == "folder" and bool(names(destination)))
    except OSError as error:
        # A name that is too long, for instance.
        raise QueryError(f"{destination}: cannot be written ({reason(error)})") from None
    if is_there and not replace and not is_begun(export, destination, options or {}):
        problem = problem or "is there already; choose another name, or say --replace"
    if is_there and export.file_patterns and isinstance(destination, Path):
        problem = problem or _problem_of_contents(destination, export.file_patterns)
    if problem is not None:
        raise QueryError(f"{destination}: {problem}")
    return destination


def _problem_of_disk(export: ExportFormat, destination: Path) -> str | None:
    """Why nothing can be written at a place of a disk. None if it seems that it can."""
    # The nearest folder that is there. Those between are made when the export is written.
    parent = next((place for place in destination.parents if place.exists()), None)
    if parent is None:
        return "is the root of the disk; expected a name in a directory"
    if not parent.is_dir():
        return f"{parent} is a file; expected a directory, or a free name"
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"{parent} cannot be written (no permission); choose another place"
    if export.writes == "file" and destination.is_dir():
        return "is a directory; expected the name of a file"
    if destination.exists() and not (destination.is_file() or destination.is_dir()):
        return "is neither a file nor a directory; expected a name that is free"
    return _problem_of_names(destination)


def _problem_of_names(destination: Path) -> str | None:
    """Why a file system would not take the names that are missing on the way to a place, or that of
    a file that becomes it.
    """
    for place in (destination, *destination.parents):
        longest = len(os.fsencode(place.name)) + (LONGEST_MARK if place == destination else 0)
        if longest > LONGEST_FILE_NAME:
            return f"{place.name[:40]}… is too long for a file system; choose a shorter name"
        if place.exists() and place != destination:
            break
    return None


def _problem_of_contents(folder: Path, patterns: Collection[str]) -> str | None:
    """Why a folder must not be replaced: it holds more than an export, so it may be anything."""
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        # A name may hold brackets, which mean something in a pattern.
        is_of_export = name in patterns or any(fnmatch(name, pattern) for pattern in patterns)
        if not path.is_dir() and not is_of_export:
            return f"holds {name}, which is no part of this export; choose another folder"
    return None


def facts_of(export: ExportFormat, destination: Place) -> dict[str, Any]:
    """What an export that is there says of itself; empty if it says nothing."""
    file = destination if export.writes == "file" else destination / "config.json"
    try:
        return _facts_in(file.read_bytes())
    except OSError:
        return {}


def says_unfinished(files: Mapping[str, bytes | Path]) -> bool:
    """Whether an export says of itself that it is not finished: not all formats have the room."""
    return any(UNFINISHED in _facts_in(file) for file in files.values() if isinstance(file, bytes))


def _facts_in(content: bytes) -> dict[str, Any]:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return {}
    # The whole file is an object, or its last line.
    for part in (text, text.strip().rpartition("\n")[2]):
        with contextlib.suppress(ValueError, TypeError, LookupError):
            facts = json.loads(part)["headcount"]
            if isinstance(facts, dict):
                return facts
    return {}


def is_begun(export: ExportFormat, destination: Place, options: Options) -> bool:
    """Whether an unfinished export by the same options is there."""
    facts = facts_of(export, destination)
    is_same = (facts.get("format"), facts.get("options")) == (export.name, dict(options))
    return UNFINISHED in facts and is_same


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
    # What differs in a name whenever it is written may be any text.
    patterns = {RANDOM_PART.sub("*", name) for name in files}
    if (problem := _problem_of_contents(destination, patterns)) is not None:
        raise QueryError(f"{destination}: {problem}")
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
