"""The runs of a system of the literature (`reproduce.system`): planned, measured and opened."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from jobs.plan import Plan, plan_run, prepare_run
from jobs.ray_cluster import Device, Resources
from jobs.resolved_scan import ResolvedScan, resolve
from jobs.run_loop import run_to_end
from queries.asking import RunDatabase, open_runs
from queries.verified_files import Tell
from reproduce.system import System
from reproduce.verdicts import has_sizes
from schemas.errors import RunError, ScanError, unknown
from schemas.kinds import TABLES
from schemas.places import place
from schemas.run_directory import RunDirectory
from schemas.scan import Scan, override_fields, parse_scan
from workers.inputs.document_index import Watch, unwatched
from workers.model.model_info import describe, find_model

OWN_FIELDS = ("bundled", "checkpoints", "sizes")
"""What a system says of a scan beside the scan's own fields."""


def plan_system(
    system: System,
    model: str,
    out: str,
    overrides: Sequence[str] = (),
    watch: Watch = unwatched,
) -> list[Plan]:
    """The plans of a system's runs.

    They lie in one directory, which is named after all that they measure: with another model,
    formula or input the runs lie elsewhere. An override `SCAN.key=value` is for one scan of the
    system, any other for all. `watch` is told how far the tokenising of a corpus is.
    """
    _check_overrides(system, overrides)
    scans = _resolved_scans(system, model, out, overrides)
    identities = {
        name: [resolved.identity, resolved.meanings, resolved.scan.sequences]
        for name, resolved in scans.items()
    }
    content = json.dumps(identities, sort_keys=True, default=str)
    fingerprint = hashlib.sha256(content.encode()).hexdigest()[:8]
    directory = str(place(out) / fingerprint)
    plans: list[Plan] = []
    for name, resolved in scans.items():
        scan = resolved.scan.model_copy(update={"out": directory})
        run = RunDirectory.of(directory, scan.run_id(name))
        plans.append(plan_run(replace(resolved, scan=scan), run, watch=watch))
    return plans


def measure_runs(
    plans: Iterable[Plan], device: Device, console: Console, allow_other_code: bool = False
) -> None:
    """Bring runs to their end in this process: they are small, and one replica is soon loaded.

    The first shard that fails is an error: half a run says nothing about a system.
    """
    for plan in plans:
        prepare_run(plan, "")
        run_to_end(
            plan,
            Resources(replicas=0, device=device),
            console,
            stop_at_failure=True,
            allow_other_code=allow_other_code,
        )


def open_system_runs(system: System, directory: str, tell: Tell = lambda line: None) -> RunDatabase:
    """The runs of a system, with the views that its checks and figures ask; `tell` hears of damage."""
    return open_runs(directory, table_views() | system.view, tell=tell)


def table_views() -> dict[str, str]:
    """What every system may ask: the tables, and which of its scans a row is of."""
    # Of profiles a system asks the means over all shards.
    views = {name: name for name in TABLES} | {"profiles": "profile_means"}
    return {
        f"system_{table}": f"SELECT name AS scan, {view}.* FROM {view} JOIN runs USING (run_id)"
        for table, view in views.items()
    }


def _check_overrides(system: System, overrides: Iterable[str]) -> None:
    names = {*system.scan, *Scan.model_fields}
    for override in overrides:
        key, equals, _ = override.partition("=")
        first = key.partition(".")[0].strip()
        if equals and first not in names:
            raise ScanError(f"--set {override}: {unknown('scan or field', first, names)}")
        if key.rpartition(".")[2].strip() in ("layers", "heads"):
            raise ScanError(
                f"--set {override}: a system's figures are of the heads that its own scans name; "
                "leave it out, or measure some heads with headcount scan"
            )


def _resolved_scans(
    system: System, model: str, out: str, overrides: Sequence[str]
) -> dict[str, ResolvedScan]:
    """The scans of a system that this model can have, by name."""
    info = describe(find_model(model))
    scans: dict[str, ResolvedScan] = {}
    for scan, own in system.scan.items():
        if "sizes" in own and not any(has_sizes(info, sizes) for sizes in own["sizes"]):
            continue
        for name, checkpoint in _models(scan, own.get("checkpoints"), model).items():
            fields = _fields(system, own, model) | {"model": checkpoint, "out": out}
            fields = override_fields(fields, _own_overrides(overrides, scan, system))
            scans[name] = resolve(parse_scan(fields))
    return scans


def _own_overrides(overrides: Iterable[str], scan: str, system: System) -> list[str]:
    """The overrides that concern a scan, without its name."""
    own: list[str] = []
    for override in overrides:
        first, _, rest = override.partition(".")
        if first == scan:
            own.append(rest)
        elif first not in system.scan:
            own.append(override)
    return own


def _models(scan: str, checkpoints: str | None, model: str) -> dict[str, str]:
    """What a scan measures, by name: the model, or its checkpoints."""
    if checkpoints is None:
        return {scan: model}
    matches = find_model(model).glob(checkpoints)
    directories = sorted(match for match in matches if match.is_dir())
    if not directories:
        raise RunError(
            f"{model}: no checkpoints {checkpoints} in its directory; the scan {scan!r} needs them"
        )
    return {f"{scan}-{directory.name}": str(directory) for directory in directories}


def _fields(system: System, own: dict[str, Any], model: str) -> dict[str, Any]:
    """Fields of a scan: what all share, what is its own, and what differs for the miniature."""
    fields = dict(system.defaults)
    fields |= {key: value for key, value in own.items() if key not in OWN_FIELDS}
    if model == system.bundled_model:
        fields |= system.bundled
        fields |= own.get("bundled", {})
    return fields
