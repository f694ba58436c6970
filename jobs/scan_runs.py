"""The runs of one scan, and the command that starts another.

The first is called NAME-HASH, others that `headcount scan --new` started NAME-HASH-2, NAME-HASH-3, …
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import OtherRunError, RunError
from schemas.manifest import Manifest
from schemas.places import names, reason
from schemas.run_directory import RunDirectory


@dataclass(frozen=True)
class ScanCommand:
    """How a scan was asked for: the words after `headcount scan`, and where they were typed."""

    words: tuple[str, ...] = ()
    """The scan file and what was set; empty where no command was typed."""
    directory: str = ""

    @classmethod
    def typed(cls, scan_file: Path, overrides: Sequence[str] = ()) -> ScanCommand:
        """The command that is being run."""
        words = [str(scan_file)]
        for override in overrides:
            words += ["--set", override]
        return cls(tuple(words), os.getcwd())

    @classmethod
    def of_run(cls, manifest: Manifest) -> ScanCommand:
        """The command that began a run."""
        return cls(manifest.begun_with, manifest.begun_in)

    def text(self, *more: str) -> str:
        """The command with more words, as it is typed here."""
        typed = shlex.join(["headcount", "scan", *self.words, *more])
        if self.directory in ("", os.getcwd()):
            return typed
        if (Path(self.directory) / self.words[0]).is_file():
            return f"cd {shlex.quote(self.directory)} && {typed}"
        return f"{typed} (where {self.words[0]} lies)"

    def way(self, run: RunDirectory) -> str:
        """What leads on where a run cannot be gone on with."""
        if self.words:
            return f"{self.text('--new')} starts another run"
        return f"{removal(run)} deletes it, and then the same command starts anew"


UNKNOWN = ScanCommand()
"""No command was typed: a run that Python code or a system of `headcount reproduce` asks for."""


def removal(run: RunDirectory) -> str:
    """The command that deletes a run."""
    return shlex.join(["headcount", "rm", str(run.path)])


def resumption(run: RunDirectory, *words: str) -> str:
    """The command that goes on with a run."""
    return shlex.join(["headcount", "resume", str(run.path), *words])


@contextmanager
def saying_the_way(run: RunDirectory, command: ScanCommand) -> Iterator[None]:
    """Where another run is the way on, say which command starts it."""
    try:
        yield
    except OtherRunError as error:
        raise RunError(f"{error}; {command.way(run)}") from None


def runs_of(first: RunDirectory) -> list[RunDirectory]:
    """The runs of the scan whose first run is, or would be, `first`; the newest first."""
    runs = [_numbered(first, number) for number in sorted(_numbers(first), reverse=True)]
    return [run for run in runs if run.manifest_file.is_file()]


def next_run(first: RunDirectory) -> RunDirectory:
    """The run after all that there are, whether whole or half deleted."""
    return _numbered(first, max(_numbers(first), default=0) + 1)


def _numbers(first: RunDirectory) -> set[int]:
    pattern = re.compile(rf"{re.escape(first.path.name)}(?:-([2-9]|[1-9]\d+))?")
    try:
        found = [pattern.fullmatch(name) for name in names(first.path.parent)]
    except OSError as error:
        raise RunError(f"{first.path.parent}: cannot be read ({reason(error)})") from None
    return {int(match[1] or 1) for match in found if match is not None}


def _numbered(first: RunDirectory, number: int) -> RunDirectory:
    name = first.path.name if number == 1 else f"{first.path.name}-{number}"
    return RunDirectory(first.path.parent / name)
