"""A run's plan, made again from what lies in its directory."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.plan import Plan, check_not_older, make_plan
from jobs.run_places import PLACES, placed
from jobs.scan_runs import ScanCommand, saying_the_way
from schemas.errors import RunError, ScanError
from schemas.run_directory import RunDirectory
from schemas.scan import CHANGES_NO_ROW, parse_scan

KEPT = tuple(field for field in CHANGES_NO_ROW if field != "out")
"""Fields that change no row, which a manifest has as they were last set."""

SETTABLE = (*KEPT, *PLACES)
"""Fields of a scan that a run may go on with otherwise: more sequences extend it, and what has moved
is found by its content.
"""


SCAN = "SCAN"
"""Stands for the scan file, where nobody knows it."""


def replan(
    run: RunDirectory, overrides: Sequence[str] = (), command: ScanCommand | None = None
) -> Plan:
    """The plan of a run, from its manifest alone: the scan file is not needed. `overrides` may set
    what changes no row. Relative names are meant from the working directory
    (`jobs.run_places.where_begun`); `command` began the run, seen from where the user is.
    """
    manifest = run.manifest()
    command = command or ScanCommand.of_run(manifest)
    if not command.words:
        command = ScanCommand((SCAN,))
    check_overrides(run, overrides, command)
    if manifest.run_id != run.run_id:
        raise RunError(
            f"{run.path}: this is run {manifest.run_id}; call its directory "
            f"run_id={manifest.run_id} again"
        )
    with saying_the_way(run, command):
        check_not_older(run, manifest)
    if not isinstance(manifest.identity.get("scan"), dict):
        raise RunError(f"{run.manifest_file}: not a manifest (no scan in it)")
    kept = {name: getattr(manifest, name) for name in KEPT}
    fields = placed(run, manifest, kept, overrides)
    scan = parse_scan(fields | {"out": str(run.path.parent)})
    return make_plan(scan, run.run_id, run.run_id, command=command)


def check_overrides(
    run: RunDirectory, overrides: Sequence[str], command: ScanCommand | None = None
) -> None:
    """Refuse to set anything that would change rows of a run; `command` began it."""
    command = command or ScanCommand((SCAN,))
    for override in overrides:
        if override.partition("=")[0].strip() not in SETTABLE:
            raise ScanError(
                f"--set {override}: {run.run_id} goes on with another {', '.join(SETTABLE[:-1])} or "
                f"{SETTABLE[-1]}, which change no row of it, and with nothing else; "
                f"{command.text('--set', override)} makes a run of its own"
            )
