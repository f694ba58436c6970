"""What can be checked of a scan that other machines will run, and a plan made again from nothing
but its run.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from jobs.plan import Plan, check_scan, make_plan
from schemas.errors import RunError, ScanError
from schemas.places import StorePath, place
from schemas.run_directory import RunDirectory
from schemas.scan import Scan, load_scan, parse_scan
from workers.inputs.sequences import Sequences
from workers.model.model_info import describe, find_model

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names of scans that may be names of jobs, which are parts of addresses and of file names."""


def portable_scan(scan_file: Path, overrides: list[str]) -> Scan:
    """Read a scan, and refuse what is wrong or out of reach for the nodes of a cluster; the corpus
    is not looked at.
    """
    scan = load_scan(scan_file, overrides)
    if not NAME.fullmatch(scan_file.stem):
        raise ScanError(
            f"{scan_file}: expected a file name of letters, digits, '.', '_' and '-'; it names the job"
        )
    _check_everywhere("out", scan.out, "--set out=s3://BUCKET/runs")
    for option in ("files", "text"):
        files = scan.input.options.get(option)
        for file in files if isinstance(files, list) else [files]:
            if isinstance(file, str) and not file.startswith("bundled:"):
                _check_everywhere(
                    f"input.{option}", file, "an absolute path that every node mounts, or s3://"
                )
    if _is_relative_directory(scan.model):
        raise ScanError(
            f"model: {scan.model} is a directory of this machine; expected bundled:NAME, a Hub id or an absolute path that "
            "every node mounts"
        )
    check_scan(scan)
    if scan.model.startswith("bundled:"):
        sequences = Sequences(scan, describe(find_model(scan.model)))
        if sequences.family.synthetic:
            sequences.shard(0)  # Impossible options show when the first sequences are drawn.
    return scan


def _check_everywhere(key: str, where: str, instead: str) -> None:
    if where.startswith("~") or not (
        isinstance(found := place(where), StorePath) or found.is_absolute()
    ):
        raise ScanError(
            f"{key}: {where} means another place on every node; expected a store or an absolute path ({instead})"
        )


def _is_relative_directory(model: str) -> bool:
    return model.startswith((".", "~")) or (not os.path.isabs(model) and Path(model).is_dir())


def replan(run: RunDirectory) -> Plan:
    """The plan of a run, from its manifest alone."""
    manifest = run.manifest()
    if manifest.run_id != run.run_id:
        raise RunError(
            f"{run.path}: this is run {manifest.run_id}; call its directory run_id={manifest.run_id} again"
        )
    fields: Any = manifest.identity.get("scan")
    if not isinstance(fields, dict):
        raise RunError(f"{run.manifest_file}: not a manifest (no scan in it)")
    scan = parse_scan(fields | {"out": str(run.path.parent)})
    return make_plan(scan, run.run_id, run.run_id)
