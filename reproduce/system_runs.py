"""The runs of a system of the literature (`reproduce.system`): planned, measured and opened."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from headcount.jobs.corpus.preparation import FOLDER, Preparation
from headcount.jobs.corpus.work import Watch, unwatched
from headcount.jobs.plan.plan import Plan, plan_run, prepare_run
from headcount.jobs.plan.resolved_scan import ResolvedScan, resolve
from headcount.jobs.resources import Resources
from headcount.jobs.run.loop import run_to_end
from headcount.jobs.run.progress import WholeProgress
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.queries.open.verified_files import Tell
from headcount.reproduce.system import TEXT, System
from headcount.reproduce.verdicts import has_sizes
from headcount.schemas.errors import RunError, ScanError, unknown
from headcount.schemas.files.places import place
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.scans.kinds import TABLES
from headcount.schemas.scans.scan import Scan, override_fields, parse_scan
from headcount.workers.model.files.known_models import KnownModels
from headcount.workers.model.files.model_info import find_model

SYSTEM_FIELDS = ("bundled", "checkpoints", "sizes")
"""What a system says of a scan beside the fields of a scan."""

HEAD_FIELDS = ("layers", "heads")
"""Fields of a scan that an override may not set, because they choose heads."""

PRECISION = "float32"
"""What every system is measured in. Faster formats drift by more than some tolerances allow."""


def plan_system(
    system: System,
    model: str,
    out: str,
    overrides: Sequence[str] = (),
    watch: Watch = unwatched,
    *,
    text: str | None = None,
    models: KnownModels | None = None,
) -> list[Plan]:
    """The plans of a system's runs.

    They lie in one directory, whose name is a fingerprint of all that they measure: with another
    model, formula or input the runs lie elsewhere. An override `SCAN.key=value` is for one scan of
    the system, any other for all. `watch` is told how far the preparation of a corpus is. `text` is
    the file of the authors' text. `models` describes each model once for several systems.
    """
    check_overrides([system], overrides)
    # The name of the directory needs all resolved scans, and every plan needs the directory. So
    # scans are resolved first, with another `out`, which is no part of what they measure.
    scans = _resolved_scans(system, model, out, overrides, text, models or KnownModels())
    identities = {
        name: [resolved.identity, resolved.meanings, resolved.scan.sequences]
        for name, resolved in scans.items()
    }
    content = json.dumps(identities, sort_keys=True, default=str)
    fingerprint = hashlib.sha256(content.encode()).hexdigest()[:8]
    # Runs of one system lie in many directories, and read the same texts.
    return _plan_runs(scans, str(place(out) / fingerprint), str(place(out) / FOLDER), watch)


def plan_system_in(
    directory: str,
    system: System,
    model: str,
    watch: Watch = unwatched,
    models: KnownModels | None = None,
) -> list[Plan]:
    """The plans of a system's runs in a directory of any name, which may have other runs."""
    scans = _resolved_scans(system, model, directory, (), None, models or KnownModels())
    return _plan_runs(scans, directory, str(place(directory) / FOLDER), watch)


def _plan_runs(
    scans: Mapping[str, ResolvedScan], directory: str, corpora: str, watch: Watch
) -> list[Plan]:
    """The plans of some scans; their tokens lie in `corpora` unless a scan says another place."""
    plans: list[Plan] = []
    for name, resolved in scans.items():
        places = {"out": directory, "corpora": resolved.scan.corpora or corpora}
        scan = resolved.scan.model_copy(update=places)
        run = RunDirectory.of(directory, scan.run_id(name))
        preparation = Preparation(watch=watch)
        plans.append(plan_run(replace(resolved, scan=scan), run, preparation=preparation))
    return plans


def measure_runs(
    plans: Iterable[Plan],
    resources: Resources,
    console: Console,
    allow_other_code: bool = False,
    models: KnownModels | None = None,
    whole: WholeProgress | None = None,
) -> None:
    """Measure what is missing of runs: in this process if there are 0 replicas, else on Ray.

    The first shard that fails is an error, because half a run says nothing about a system.
    """
    for plan in plans:
        prepare_run(plan, "")
        run_to_end(
            plan,
            resources,
            console,
            stop_at_failure=True,
            allow_other_code=allow_other_code,
            models=models,
            whole=whole,
        )


def tokens_to_measure(plans: Iterable[Plan]) -> int:
    """Tokens that some runs still have to send through a model."""
    tokens = 0
    for plan in plans:
        # Shards are of one size, except the last, so this is near enough for a time left.
        share_missing = 1 - plan.shards_done / max(1, plan.manifest.shards)
        tokens += round(plan.tokens * share_missing)
    return tokens


def open_system_runs(system: System, directory: str, tell: Tell = lambda line: None) -> RunDatabase:
    """Open the runs of a system, with the views that its checks and figures ask.

    `tell` is called with a line whenever damage is found.
    """
    return open_runs(directory, table_views() | system.view, tell=tell)


def table_views() -> dict[str, str]:
    """Views that every system may ask: each table as `system_TABLE`, with the scan of each row."""
    views: dict[str, str] = {}
    for table in TABLES:
        # A system asks for the means of a profile over all shards, not for those of each shard.
        source = "profile_means" if table == "profiles" else table
        views[f"system_{table}"] = (
            f"SELECT name AS scan, {source}.* FROM {source} JOIN runs USING (run_id)"
        )
    return views


def check_overrides(selection: Sequence[System], overrides: Iterable[str]) -> None:
    """Refuse an override that names neither a field nor a scan of the systems, names heads, or
    chooses a precision.
    """
    known_names = {*Scan.model_fields}
    for system in selection:
        known_names |= {*system.scan}
    for override in overrides:
        key, equals, _ = override.partition("=")
        first_name = key.partition(".")[0].strip()
        last_name = key.rpartition(".")[2].strip()
        # An override without "=" is refused later, with a message of its own.
        if equals and first_name not in known_names:
            raise ScanError(
                f"--set {override}: {unknown('scan or field', first_name, known_names)}"
            )
        if last_name in HEAD_FIELDS:
            raise ScanError(
                f"--set {override}: a system's figures are of the heads that its own scans name; "
                "leave it out, or measure some heads with headcount scan"
            )
        if last_name == "precision":
            raise ScanError(
                f"--set {override}: systems are measured in {PRECISION}, because other formats "
                "drift by more than some tolerances allow; leave it out, or measure with "
                "headcount scan"
            )


def overrides_of_system(overrides: Iterable[str], system: System) -> list[str]:
    """The overrides that concern a system: of a field, or of one of its scans."""
    own_names = {*system.scan, *Scan.model_fields}
    return [
        override
        for override in overrides
        if override.partition("=")[0].partition(".")[0].strip() in own_names
    ]


def _resolved_scans(
    system: System,
    model: str,
    out: str,
    overrides: Sequence[str],
    text: str | None,
    models: KnownModels,
) -> dict[str, ResolvedScan]:
    """The scans of a system that this model can have, by name."""
    info = models.describe(model)
    scans: dict[str, ResolvedScan] = {}
    for scan_name, entry in system.scan.items():
        # Some scans are only for models with enough positions, or with a query bias.
        if "sizes" in entry and not any(has_sizes(info, sizes) for sizes in entry["sizes"]):
            continue
        scan_overrides = _overrides_of_scan(overrides, scan_name, system)
        checkpoints = _models_by_run_name(scan_name, entry.get("checkpoints"), model)
        for run_name, checkpoint in checkpoints.items():
            fields = _scan_fields(system, entry, model, text)
            fields |= {"model": checkpoint, "out": out}
            scan = parse_scan(override_fields(fields, scan_overrides))
            # An override may name another model, or a revision of it.
            is_known = scan.model == checkpoint and scan.revision is None
            scans[run_name] = resolve(scan, models.describe(checkpoint) if is_known else None)
    return scans


def _overrides_of_scan(overrides: Iterable[str], scan: str, system: System) -> list[str]:
    """The overrides that concern a scan, without its name."""
    scan_overrides: list[str] = []
    for override in overrides:
        first_name, _, remainder = override.partition(".")
        if first_name == scan:
            scan_overrides.append(remainder)
        elif first_name not in system.scan:
            scan_overrides.append(override)
    return scan_overrides


def _models_by_run_name(scan: str, checkpoints: str | None, model: str) -> dict[str, str]:
    """What a scan measures, by name of the run: the model, or its checkpoints."""
    if checkpoints is None:
        return {scan: model}
    matches = find_model(model).glob(checkpoints)
    directories = sorted(match for match in matches if match.is_dir())
    if not directories:
        raise RunError(
            f"{model}: no checkpoints {checkpoints} in its directory; the scan {scan!r} needs them"
        )
    return {f"{scan}-{directory.name}": str(directory) for directory in directories}


def _scan_fields(
    system: System, entry: dict[str, Any], model: str, text: str | None
) -> dict[str, Any]:
    """Fields of a scan. Later ones win: the defaults, its own, and those of the miniature."""
    fields = {"precision": PRECISION} | system.defaults
    fields |= {key: value for key, value in entry.items() if key not in SYSTEM_FIELDS}
    if model == system.bundled_model:
        fields |= system.bundled
        fields |= entry.get("bundled", {})
    if system.text is None:
        return fields
    return _with_text(fields, text or system.text.default)


def _with_text(value: Any, text: str) -> Any:  # noqa: ANN401 (what TOML holds)
    """Fields in which every `$text` is the name of a file."""
    if isinstance(value, dict):
        return {key: _with_text(item, text) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_text(item, text) for item in value]
    return text if value == TEXT else value
