"""Check a scan that other machines will run, as far as this machine can."""

from __future__ import annotations

import os
from pathlib import Path

from headcount.jobs.plan.model_places import FILE_OPTIONS
from headcount.jobs.plan.resolved_scan import check_scan
from headcount.schemas.errors import ScanError
from headcount.schemas.files.places import StorePath, place
from headcount.schemas.scans.scan import Scan, load_scan
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.interventions import needs_partners
from headcount.workers.model.files.model_info import describe, find_model


def portable_scan(scan_file: Path, overrides: list[str]) -> Scan:
    """Read a scan file; refuse mistakes, and places that the nodes of a cluster cannot reach.

    The corpus is not opened, because this machine may not see it.
    """
    scan = load_scan(scan_file, overrides)
    _check_everywhere("out", scan.out, "--set out=s3://BUCKET/runs")
    if scan.corpora is not None:
        _check_everywhere("corpora", scan.corpora, "--set corpora=s3://BUCKET/corpora")
    for option in FILE_OPTIONS:
        value = scan.input.options.get(option)
        files = value if isinstance(value, list) else [value]
        for file in files:
            # A value of another type is an error of the family's check below.
            if isinstance(file, str) and not file.startswith("bundled:"):
                _check_everywhere(
                    f"input.{option}", file, "an absolute path that every node mounts, or s3://"
                )
    # `a/b` may be a directory here, and may be a model of the Hub.
    is_directory_here = not os.path.isabs(scan.model) and Path(scan.model).is_dir()
    if scan.model.startswith((".", "~")) or is_directory_here:
        raise ScanError(
            f"model: {scan.model} is a directory of this machine; expected bundled:NAME, a Hub id "
            "or an absolute path that every node mounts"
        )
    check_scan(scan)
    # Bundled models are small and on this machine, so more can be checked.
    if scan.model.startswith("bundled:"):
        info = describe(find_model(scan.model))
        scan = scan.for_model(info)
        sequences = Sequences(scan, info, partners=needs_partners(scan.interventions))
        if sequences.family.synthetic:
            sequences.shard(0)  # Impossible options show when the first sequences are drawn.
    return scan


def _check_everywhere(key: str, location: str, example: str) -> None:
    """Refuse a location that means another place on every node."""
    # Every node has its own home directory.
    if not location.startswith("~"):
        where = place(location)
        if isinstance(where, StorePath) or where.is_absolute():
            return
    raise ScanError(
        f"{key}: {location} means another place on every node; expected a store or an absolute "
        f"path ({example})"
    )
