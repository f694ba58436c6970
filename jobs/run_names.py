"""The names of a scan's runs, and the runs that have them.

The first run of a scan is called NAME-HASH. Those that `headcount scan --new` starts are called
NAME-HASH-2, NAME-HASH-3, …
"""

import re
from collections.abc import Iterable

from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.places import names, unread


def runs_of(first_run: RunDirectory) -> list[RunDirectory]:
    """The runs of the scan of `first_run`, the newest first; what has no manifest is none."""
    runs = sorted(_by_number(first_run).items(), reverse=True)
    return [run for _, run in runs if run.manifest_file.is_file()]


def next_run(first_run: RunDirectory, other_run_ids: Iterable[str] = ()) -> RunDirectory:
    """The run after all of a scan, so that nobody writes among what is left of a deleted one."""
    runs = _by_number(first_run) | _by_number(first_run, other_run_ids)
    if not runs:
        return first_run
    return RunDirectory(first_run.path.parent / f"{first_run.path.name}-{max(runs) + 1}")


def last_run(first_run: RunDirectory, other_run_ids: Iterable[str]) -> RunDirectory:
    """The newest run of the scan, here and elsewhere; `first_run` if there is none."""
    elsewhere = _by_number(first_run, other_run_ids).items()
    begun = [(n, run) for n, run in _by_number(first_run).items() if run.manifest_file.is_file()]
    return max([*begun, *elsewhere], default=(0, first_run), key=lambda numbered: numbered[0])[1]


def _by_number(
    first_run: RunDirectory, run_ids: Iterable[str] | None = None
) -> dict[int, RunDirectory]:
    """Those of some runs that are of the scan, by number; by default those in its directory."""
    directory = first_run.path.parent
    try:
        found = names(directory) if run_ids is None else [f"run_id={run_id}" for run_id in run_ids]
    except OSError as error:
        raise unread(directory, error) from None
    # The first run has number 1, and no number in its name: -1 and -01 are none.
    pattern = re.compile(rf"{re.escape(first_run.path.name)}(?:-([2-9]|[1-9]\d+))?")
    matches = [match for name in found if (match := pattern.fullmatch(name))]
    return {int(m[1] or 1): RunDirectory(directory / m[0]) for m in matches}
