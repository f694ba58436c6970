"""The plan of a run, made again from what lies in its directory: the scan file is not needed."""

from __future__ import annotations

from collections.abc import Sequence

from headcount.jobs.corpus.preparation import HERE, Preparation
from headcount.jobs.plan.identity import check_not_older
from headcount.jobs.plan.model_places import PLACES, placed_fields
from headcount.jobs.plan.plan import Plan, make_plan
from headcount.jobs.plan.scan_runs import ScanCommand, naming_the_alternative, removal
from headcount.schemas.errors import RunError, ScanError
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.scans.scan import CHANGES_NO_ROW, parse_scan

REMEMBERED = tuple(field for field in CHANGES_NO_ROW if field != "out")
"""Fields that change no row; a manifest holds the values that were set last."""

SETTABLE = (*REMEMBERED, *PLACES)
"""Fields of a scan that may change when a run continues. More sequences extend it. A place may
change because what lies there is known by its content.
"""

SCAN_FILE = "SCAN"
"""Stands for the scan file in advice if nobody knows its name."""


def replan(
    run: RunDirectory,
    overrides: Sequence[str] = (),
    command: ScanCommand | None = None,
    preparation: Preparation = HERE,
) -> Plan:
    """Plan a run from its manifest alone; `overrides` may set what changes no row.

    Relative names are meant from the working directory: the caller moves there
    (`jobs.plan.model_places.where_begun`). `command` is the one that began the run. `preparation`
    makes the tokens of a corpus ready.
    """
    manifest = run.manifest()
    command = command or ScanCommand.of_run(manifest)
    if not command.words:
        command = ScanCommand((SCAN_FILE,))
    check_overrides(run, overrides, command)
    # Commits hold the run's id, so readers would pass over all commits of a renamed directory.
    if manifest.run_id != run.run_id:
        raise RunError(
            f"{run.path}: this is run {manifest.run_id}; call its directory "
            f"run_id={manifest.run_id} again"
        )
    with naming_the_alternative(run, command):
        check_not_older(run, manifest)
    if not isinstance(manifest.identity.get("scan"), dict):
        raise RunError(
            f"{run.manifest_file}: not a manifest (no scan in it); put the run's own file back, or "
            f"start anew: {removal(run)} deletes the run"
        )
    # An identity leaves these out, because they change no row.
    remembered = {field: getattr(manifest, field) for field in REMEMBERED}
    fields = placed_fields(run, manifest, remembered, overrides)
    # A manifest does not record where the run lies, because a run may be moved.
    scan = parse_scan(fields | {"out": str(run.path.parent)})
    return make_plan(scan, run.run_id, run.run_id, preparation, command)


def check_overrides(
    run: RunDirectory, overrides: Sequence[str], command: ScanCommand | None = None
) -> None:
    """Refuse to set anything that would change rows of a run; `command` began it."""
    command = command or ScanCommand((SCAN_FILE,))
    for override in overrides:
        field = override.partition("=")[0].strip()
        if field not in SETTABLE:
            raise ScanError(
                f"--set {override}: when {run.run_id} continues, only "
                f"{', '.join(SETTABLE[:-1])} or {SETTABLE[-1]} can change, because they change no "
                f"row of it; "
                f"{command.text('--set', override)} makes a run of its own"
            )
