"""The runs of one scan, and the command that starts another.

The first is called NAME-HASH, others that `headcount scan --new` started NAME-HASH-2, NAME-HASH-3, …
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    here: str = field(default_factory=os.getcwd)
    """Where the user is, who may be elsewhere by now."""

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
        if not self.directory:
            return typed
        if (Path(self.directory) / self.words[0]).is_file():
            if self.directory == self.here:
                return typed
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


def next_run(first: RunDirectory, others: Iterable[str] = ()) -> RunDirectory:
    """The run after all that there are, whether whole or half deleted; `others` are ids of runs that
    are elsewhere.
    """
    numbers = _numbers(first) | _numbers_among(first, (f"run_id={name}" for name in others))
    return _numbered(first, max(numbers, default=0) + 1)


def last_run(first: RunDirectory, others: Iterable[str]) -> RunDirectory:
    """The newest of the runs that there are, here and elsewhere; the first where there is none."""
    numbers = _numbers_among(first, (f"run_id={name}" for name in others))
    runs = [*runs_of(first)[:1], *(_numbered(first, number) for number in numbers)]
    return max(runs, key=lambda run: (len(run.path.name), run.path.name), default=first)


def _numbers(first: RunDirectory) -> set[int]:
    try:
        return _numbers_among(first, names(first.path.parent))
    except OSError as error:
        raise RunError(f"{first.path.parent}: cannot be read ({reason(error)})") from None


def _numbers_among(first: RunDirectory, found: Iterable[str]) -> set[int]:
    """The numbers of the directories that are runs of the scan."""
    pattern = re.compile(rf"{re.escape(first.path.name)}(?:-([2-9]|[1-9]\d+))?")
    matches = [pattern.fullmatch(name) for name in found]
    return {int(match[1] or 1) for match in matches if match is not None}


def _numbered(first: RunDirectory, number: int) -> RunDirectory:
    name = first.path.name if number == 1 else f"{first.path.name}-{number}"
    return RunDirectory(first.path.parent / name)
