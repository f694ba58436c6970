"""The runs of one scan, and the commands that an error can advise.

The first run is called NAME-HASH. Those that `headcount scan --new` starts are called NAME-HASH-2,
NAME-HASH-3, …
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headcount.schemas.errors import OtherRunError, RunError
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.files.places import names, reason
from headcount.schemas.files.run_directory import RunDirectory


@dataclass(frozen=True)
class ScanCommand:
    """The command that asked for a scan: the words after `headcount scan`, and its directory."""

    words: tuple[str, ...] = ()
    """The scan file and what was set; empty if no command was typed."""
    directory: str = ""
    """The working directory in which it was typed."""
    here: str = field(default_factory=os.getcwd)
    """The user's working directory now. It is remembered because `resume` changes the process's
    directory to that of the run.
    """

    @classmethod
    def typed(cls, scan_file: Path, overrides: Sequence[str] = ()) -> ScanCommand:
        """The command that is running."""
        words = [str(scan_file)]
        for override in overrides:
            words += ["--set", override]
        return cls(tuple(words), os.getcwd())

    @classmethod
    def of_run(cls, manifest: Manifest) -> ScanCommand:
        """The command that began a run."""
        return cls(manifest.begun_with, manifest.begun_in)

    def text(self, *more_words: str) -> str:
        """The command with more words, as the user would type it now."""
        command_line = shlex.join(["headcount", "scan", *self.words, *more_words])
        if not self.directory:
            return command_line
        scan_file = self.words[0]
        # The scan file was moved or deleted since. Then only the user knows where to type this.
        if not (Path(self.directory) / scan_file).is_file():
            return f"{command_line} (where {scan_file} lies)"
        if self.directory == self.here:
            return command_line
        return f"cd {shlex.quote(self.directory)} && {command_line}"

    def alternative(self, run: RunDirectory) -> str:
        """What a user can do if a run cannot continue: a command, and what it does."""
        if self.words:
            return f"{self.text('--new')} starts another run"
        return f"{removal(run)} deletes it, and then the same command starts anew"


UNKNOWN = ScanCommand()
"""No command was typed: Python code or a replication of `headcount reproduce` asks for the run."""


def removal(run: RunDirectory) -> str:
    """The command that deletes a run."""
    return shlex.join(["headcount", "rm", str(run.path)])


def resumption(run: RunDirectory, *words: str) -> str:
    """The command that continues a run."""
    return shlex.join(["headcount", "resume", str(run.path), *words])


@contextmanager
def naming_the_alternative(run: RunDirectory, command: ScanCommand) -> Iterator[None]:
    """Add to an `OtherRunError` what the user can do instead."""
    try:
        yield
    except OtherRunError as error:
        raise RunError(f"{error}; {command.alternative(run)}") from None


def runs_of(first_run: RunDirectory) -> list[RunDirectory]:
    """The runs of the scan whose first run is, or would be, `first_run`; the newest first."""
    numbers = sorted(_numbers_in_directory(first_run), reverse=True)
    runs = [_numbered(first_run, number) for number in numbers]
    # A directory without a manifest is half deleted.
    return [run for run in runs if run.manifest_file.is_file()]


def next_run(first_run: RunDirectory, other_run_ids: Iterable[str] = ()) -> RunDirectory:
    """The run after all others of the scan.

    Half deleted runs count, so that nobody writes among their remains. `other_run_ids` are of runs
    that lie elsewhere.
    """
    numbers = _numbers_in_directory(first_run) | _numbers_of_ids(first_run, other_run_ids)
    return _numbered(first_run, max(numbers, default=0) + 1)


def last_run(first_run: RunDirectory, other_run_ids: Iterable[str]) -> RunDirectory:
    """The newest run of the scan, here and elsewhere; `first_run` if there is none."""
    runs_here = runs_of(first_run)[:1]
    runs_elsewhere = [
        _numbered(first_run, number) for number in _numbers_of_ids(first_run, other_run_ids)
    ]

    def by_number(run: RunDirectory) -> tuple[int, str]:
        # All names have one beginning, so the longer one has the larger number: -10 after -9.
        return len(run.path.name), run.path.name

    return max([*runs_here, *runs_elsewhere], key=by_number, default=first_run)


def _numbers_in_directory(first_run: RunDirectory) -> set[int]:
    directory = first_run.path.parent
    try:
        return _numbers_among(first_run, names(directory))
    except OSError as error:
        raise RunError(f"{directory}: cannot be read ({reason(error)})") from None


def _numbers_of_ids(first_run: RunDirectory, run_ids: Iterable[str]) -> set[int]:
    return _numbers_among(first_run, (f"run_id={run_id}" for run_id in run_ids))


def _numbers_among(first_run: RunDirectory, directory_names: Iterable[str]) -> set[int]:
    """The numbers of those directories that are runs of the scan; the first run has number 1."""
    # -1 and -01 are no numbers of runs: the first run has none.
    pattern = re.compile(rf"{re.escape(first_run.path.name)}(?:-([2-9]|[1-9]\d+))?")
    matches = [pattern.fullmatch(name) for name in directory_names]
    return {int(match[1] or 1) for match in matches if match is not None}


def _numbered(first_run: RunDirectory, number: int) -> RunDirectory:
    first_name = first_run.path.name
    name = first_name if number == 1 else f"{first_name}-{number}"
    return RunDirectory(first_run.path.parent / name)
