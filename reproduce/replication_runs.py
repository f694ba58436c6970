"""The runs of a replication (`reproduce.replication`): planned, measured and opened."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from headcount.jobs.corpus.preparation import FOLDER, HERE, Preparation
from headcount.jobs.plan.identity import find_run, without_model
from headcount.jobs.plan.plan import Plan, plan_run
from headcount.jobs.plan.resolved_scan import ResolvedScan, resolve
from headcount.jobs.plan.run_plan import prepare_run
from headcount.jobs.resources import Resources
from headcount.jobs.run.measuring import run_to_end
from headcount.jobs.run.progress import WholeProgress
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.queries.open.sql_text import text_literal
from headcount.queries.open.verified_files import Tell
from headcount.reproduce.replication import STAND_IN, TEXT, Replication
from headcount.reproduce.verdicts import has_sizes
from headcount.schemas.errors import RunError, ScanError, unknown
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.filled_tables import TABLES
from headcount.schemas.places import place
from headcount.schemas.scans.overrides import field_of, override_fields, split_override
from headcount.schemas.scans.scan import Scan
from headcount.schemas.scans.scan_file import parse_scan
from headcount.workers.known_models import KnownModels
from headcount.workers.model.info.description import find_model
from headcount.workers.model.info.text_tokenizer import TextTokenizer
from headcount.workers.model.model_info import ModelInfo

REPLICATION_FIELDS = ("bundled", "checkpoints", "sizes", "token_text")
"""What a replication says of a scan beside the fields of a scan."""

HEAD_FIELDS = ("layers", "heads")
"""Fields of a scan that an override may not set, because they choose heads."""

PRECISION = "float32"
"""What every replication is measured in. Faster formats drift beyond some tolerances."""


def plan_replication(
    replication: Replication,
    model: str,
    out: str,
    overrides: Iterable[str] = (),
    preparation: Preparation = HERE,
    *,
    text: str | None = None,
    models: KnownModels | None = None,
) -> list[Plan]:
    """The plans of a replication's runs.

    They lie in one directory below `out`, whose name is a fingerprint of all that they measure:
    with another model, formula or input the runs lie elsewhere. An override `SCAN.key=value` is for
    one scan, any other for all. `text` is
    the file of the authors' text. `models` describes each model once for several replications.
    """
    models = models or KnownModels()
    info = describe_model(model, overrides, models)
    scans: dict[str, ResolvedScan] = {}
    for scan_name, entry in replication.scan.items():
        # Some scans are only for models with enough positions, or with a query bias.
        if "sizes" in entry and not any(has_sizes(info, sizes) for sizes in entry["sizes"]):
            continue
        fields = _scan_fields(replication, entry, model, info.family, text)
        own_overrides = _overrides_of_scan(overrides, scan_name)
        checkpoints = _models_by_run_name(scan_name, entry.get("checkpoints"), model)
        for run_name, checkpoint in checkpoints.items():
            places = {"model": checkpoint, "out": out}
            scan = parse_scan(override_fields(fields | places, own_overrides))
            of_scan = models.describe(scan.model, scan.revision, scan.adapter, scan.tokenizer)
            resolved = resolve(scan, of_scan)
            if "token_text" in entry and model != replication.bundled_model:
                _check_token(resolved, scan_name, entry["token_text"])
            scans[run_name] = resolved

    # The name of the directory needs all resolved scans, and every plan needs the directory.
    # `out` is no part of what a scan measures.
    # Nor is it what the model is called and where it lies.
    identities = {
        name: [without_model(resolved.identity), resolved.meanings, resolved.scan.sequences]
        for name, resolved in scans.items()
    }
    content = json.dumps(identities, sort_keys=True, default=str)
    directory = str(place(out) / hashlib.sha256(content.encode()).hexdigest()[:8])
    plans: list[Plan] = []
    for name, resolved in scans.items():
        # Runs of one replication lie in many directories, and read the same texts.
        corpora = resolved.scan.corpora or str(place(out) / FOLDER)
        scan = resolved.scan.model_copy(update={"out": directory, "corpora": corpora})
        run, _ = find_run(resolved, RunDirectory.of(directory, resolved.run_id(name)), new=False)
        plans.append(plan_run(replace(resolved, scan=scan), run, preparation=preparation))
    return plans


def _check_token(resolved: ResolvedScan, scan: str, text: str) -> None:
    """Refuse a token that the model's tokenizer reads as another text than was published."""
    info, token = resolved.info, int(resolved.sequences.options["token"])
    # Not the tokenizer of the sequences: random tokens do not depend on any.
    tokenizer = TextTokenizer(info.tokenizer, info.d_vocab)
    (text_here,) = tokenizer.texts([token])
    if text_here != text:
        tokens = tokenizer.encode(text)
        of_text = f"={tokens[0]}" if len(tokens) == 1 else ""
        raise ScanError(
            f"{info.name}: its tokenizer reads {text_here!r} from token {token}, and the scan "
            f"{scan!r} means {text!r}; --set {scan}.input.token{of_text or '=ID'} names a token of "
            "this tokenizer"
        )


def describe_model(model: str, overrides: Iterable[str], models: KnownModels) -> ModelInfo:
    """The model of a replication, or the one that overrides of all scans name: its revision has
    the sizes that decide what is compared.
    """
    names = ("model", "revision", "adapter", "tokenizer")
    of_model = [each for each in overrides if field_of(each) in names]
    fields = override_fields({"model": model}, of_model)
    for name, value in fields.items():
        if not isinstance(value, str):
            raise ScanError(f"--set {name}: expected one text, got {value!r}")
    return models.describe(**fields)


def measure_runs(
    plans: Iterable[Plan],
    resources: Resources,
    console: Console,
    allow_other_code: bool = False,
    models: KnownModels | None = None,
    all_runs: WholeProgress | None = None,
) -> None:
    """Measure what is missing of runs: in this process if there are 0 replicas, else on Ray.

    The first shard that fails is an error, because half a run says nothing about a replication.
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
            all_runs=all_runs,
        )


def open_replication_runs(
    replication: Replication, directory: str, tell: Tell = lambda line: None
) -> RunDatabase:
    """Open the runs of a replication, with the views that its checks and figures ask.

    Every replication may ask `replication_TABLE`, with the scan of each row, and `published`, the
    names and values of its checks. `tell` is called with a line whenever damage is found.
    """
    published = replication.published_values
    names = ", ".join(text_literal(each.full_name) for each in published)
    values = ", ".join(repr(each.value) for each in published)
    views = {
        "published": f"SELECT unnest([{names}]::VARCHAR[]) AS name, "
        f"unnest([{values}]::DOUBLE[]) AS value"
    }
    for table in TABLES:
        # The means of a profile are asked over all shards, not by shard.
        source = "profile_means" if table == "profiles" else table
        views[f"replication_{table}"] = (
            f"SELECT name AS scan, {source}.* FROM {source} JOIN runs USING (run_id)"
        )
    return open_runs(directory, views | replication.view, tell=tell)


def check_overrides(selection: Sequence[Replication], overrides: Iterable[str]) -> None:
    """Refuse an override that names neither a field nor a scan of the replications, names heads, or
    chooses a precision.
    """
    known_names = {*Scan.model_fields}
    for replication in selection:
        known_names |= {*replication.scan}
    for override in overrides:
        names, _ = split_override(override)
        if names[0] not in known_names:
            raise ScanError(f"--set {override}: {unknown('scan or field', names[0], known_names)}")
        if names[-1] in HEAD_FIELDS:
            raise ScanError(
                f"--set {override}: a replication's figures are of the heads that its own scans "
                "name; leave it out, or measure some heads with headcount scan"
            )
        if names[-1] == "precision":
            raise ScanError(
                f"--set {override}: replications are measured in {PRECISION}; other formats "
                "drift by more than some tolerances allow; leave it out, or measure with "
                "headcount scan"
            )


def _overrides_of_scan(overrides: Iterable[str], scan: str) -> list[str]:
    """The overrides of fields of every scan, and those that name this scan, without its name."""
    own: list[str] = []
    for override in overrides:
        (first_name, *names), value = split_override(override)
        if first_name == scan and names:
            own.append(f"{'.'.join(map(json.dumps, names))}={value}")
        # A scan's name alone is no field, and is refused with the scan.
        elif first_name in {scan, *Scan.model_fields}:
            own.append(override)
    return own


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
    replication: Replication, entry: dict[str, Any], model: str, family: str, text: str | None
) -> dict[str, Any]:
    """Fields of a scan. Later ones win: the defaults, its own, those of the model's family, and
    those of the miniature.
    """
    # A published condition does not depend on how the model at hand was trained.
    fields = {"precision": PRECISION, "bos": True} | replication.defaults
    fields |= {key: value for key, value in entry.items() if key not in REPLICATION_FIELDS}
    fields |= replication.family.get(family, {})
    if model == replication.bundled_model:
        fields |= replication.bundled
        fields |= entry.get("bundled", {})
    if replication.text is None:
        return fields
    return _with_text(fields, text or STAND_IN)


def _with_text(value: Any, text: str) -> Any:  # noqa: ANN401 (what TOML holds)
    """Fields in which every `$text` is the name of a file."""
    if isinstance(value, dict):
        return {key: _with_text(item, text) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_text(item, text) for item in value]
    return text if value == TEXT else value
