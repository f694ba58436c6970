"""A run's plan, made again from what lies in its directory."""

from __future__ import annotations

from typing import Any

from jobs.plan import Plan, make_plan
from schemas.errors import RunError
from schemas.run_directory import RunDirectory
from schemas.scan import parse_scan


def replan(run: RunDirectory) -> Plan:
    """The plan of a run, from its manifest alone: the scan file is not needed."""
    manifest = run.manifest()
    if manifest.run_id != run.run_id:
        raise RunError(
            f"{run.path}: this is run {manifest.run_id}; call its directory "
            f"run_id={manifest.run_id} again"
        )
    fields: Any = manifest.identity.get("scan")
    if not isinstance(fields, dict):
        raise RunError(f"{run.manifest_file}: not a manifest (no scan in it)")
    scan = parse_scan(fields | {"out": str(run.path.parent)})
    return make_plan(scan, run.run_id, run.run_id)
