"""The runs of a system of the literature (`reproduce.system`): planned, and brought to their end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from jobs.in_process import measure_in_process
from jobs.plan import Plan, plan_run, prepare_run, resolve
from jobs.run_lock import locked
from jobs.run_loop import missing_shards
from reproduce.system import System
from reproduce.verdicts import has_sizes
from schemas.commits import Failure
from schemas.errors import RunError, ScanError, unknown
from schemas.places import place
from schemas.run_directory import RunDirectory
from schemas.scan import Scan, override_fields, parse_scan
from workers.model.model_info import describe, find_model


def plans(system: System, model: str, out: str, overrides: Sequence[str] = ()) -> list[Plan]:
    """The runs of a system, in a directory of their own: another model, formula or input lies
    elsewhere.

    An override `SCAN.key=value` is for one scan of the system, any other for all.
    """
    for override in overrides:
        key, equals, _ = override.partition("=")
        first = key.partition(".")[0].strip()
        if equals and first not in (known := {*system.scan, *Scan.model_fields}):
            raise ScanError(f"--set {override}: {unknown('scan or field', first, known)}")
    info = describe(find_model(model))
    scans = {
        name: resolve(
            parse_scan(
                override_fields(
                    _fields(system, own, model) | {"model": at, "out": out},
                    _own(overrides, scan, system),
                )
            )
        )
        for scan, own in system.scan.items()
        if "sizes" not in own or any(has_sizes(info, sizes) for sizes in own["sizes"])
        for name, at in _models(scan, own.get("checkpoints"), model).items()
    }
    identities = {
        name: [resolved.identity, resolved.meanings, resolved.scan.sequences]
        for name, resolved in scans.items()
    }
    same = hashlib.sha256(json.dumps(identities, sort_keys=True, default=str).encode()).hexdigest()[
        :8
    ]
    home = str(place(out) / same)
    made: list[Plan] = []
    for name, resolved in scans.items():
        moved = replace(resolved, scan=resolved.scan.model_copy(update={"out": home}))
        made.append(plan_run(moved, RunDirectory.of(home, moved.scan.run_id(name))))
    return made


def _own(overrides: Iterable[str], scan: str, system: System) -> list[str]:
    """The overrides that concern a scan, without its name."""
    parts = [(override, *override.partition(".")) for override in overrides]
    return [
        rest if first in system.scan else whole
        for whole, first, _, rest in parts
        if first == scan or first not in system.scan
    ]


def _models(scan: str, checkpoints: str | None, model: str) -> dict[str, str]:
    """What a scan measures, by name: the model, or its checkpoints."""
    if checkpoints is None:
        return {scan: model}
    found = sorted(
        directory for directory in find_model(model).glob(checkpoints) if directory.is_dir()
    )
    if not found:
        raise RunError(
            f"{model}: no checkpoints {checkpoints} in its directory; the scan {scan!r} needs them"
        )
    return {f"{scan}-{directory.name}": str(directory) for directory in found}


def _fields(system: System, own: dict[str, Any], model: str) -> dict[str, Any]:
    """Fields of a scan: what all share, what is its own, and what differs for the miniature."""
    ours = ("bundled", "checkpoints", "sizes")
    fields = system.defaults | {key: value for key, value in own.items() if key not in ours}
    return (
        fields | system.bundled | own.get("bundled", {})
        if model == system.bundled_model
        else fields
    )


def measure(plan: Plan, device: str, tell: Callable[[str], None]) -> None:
    """Bring a run to its end in this process: these runs are small, and one replica is soon loaded."""
    prepare_run(plan, "")
    with locked(plan.run):
        missing = missing_shards(plan)
        if not len(missing):
            return
        tell(f"{plan.run.run_id}: {plan.tokens:,} tokens")
        for outcome in measure_in_process(plan, missing, device):
            if isinstance(outcome, Failure):
                raise RunError(f"{plan.run.run_id}: {outcome.error}")
