"""A run's plan, made again from what lies in its directory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jobs.plan import Plan, check_not_older, make_plan
from schemas.errors import RunError, ScanError
from schemas.run_directory import RunDirectory
from schemas.scan import CHANGES_NO_ROW, override_fields, parse_scan

SETTABLE = tuple(field for field in CHANGES_NO_ROW if field != "out")
"""Fields of a scan that a run may go on with otherwise: more sequences extend it."""


def replan(run: RunDirectory, overrides: Sequence[str] = ()) -> Plan:
    """The plan of a run, from its manifest alone: the scan file is not needed. `overrides` may set
    what changes no row.
    """
    check_overrides(overrides)
    manifest = run.manifest()
    if manifest.run_id != run.run_id:
        raise RunError(
            f"{run.path}: this is run {manifest.run_id}; call its directory "
            f"run_id={manifest.run_id} again"
        )
    check_not_older(run, manifest)
    fields: Any = manifest.identity.get("scan")
    if not isinstance(fields, dict):
        raise RunError(f"{run.manifest_file}: not a manifest (no scan in it)")
    fields |= {"sequences": manifest.sequences, "batch_size": manifest.batch_size}
    scan = parse_scan(override_fields(fields, overrides) | {"out": str(run.path.parent)})
    return make_plan(scan, run.run_id, run.run_id)


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse to set anything that would change rows of a run."""
    for override in overrides:
        if override.partition("=")[0].strip() not in SETTABLE:
            raise ScanError(
                f"--set {override}: expected {' or '.join(SETTABLE)}, which change no row of a "
                "run; for anything else start a new run with headcount scan"
            )
