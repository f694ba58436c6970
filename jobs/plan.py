"""From a scan to a run: everything resolved and checked before anything is paid for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from jobs.corpus_index import index_corpus
from schemas.errors import RunError, ScanError
from schemas.formulas import Formula
from schemas.places import Place, write_whole
from schemas.predictions import select_predictions
from schemas.profiles import select_curves, select_profiles
from schemas.run_directory import Manifest, RunDirectory, differing_keys, pc
from schemas.scan import Scan
from schemas.statistics import select
from schemas.weight_statistics import select_weight_statistics
from workers.code_fingerprint import code_fingerprint
from workers.inputs import INPUTS, find_input
from workers.inputs.corpus import Index, Watch, unwatched
from workers.inputs.sequences import Sequences
from workers.interventions import Intervention, find_intervention
from workers.model.model_info import ModelInfo, describe, find_model
from workers.replica import resolve_precision

LIBRARIES = (
    "torch",
    "transformers",
    "transformer_lens",
    "ray",
    "pyarrow",
    "datasets",
    "tokenizers",
)


@dataclass(frozen=True)
class Plan:
    """A scan whose every default is resolved and whose input is known."""

    scan: Scan
    info: ModelInfo
    sequences: Sequences
    run: RunDirectory
    manifest: Manifest

    @property
    def tokens(self) -> int:
        """Tokens that go through the model, over all interventions."""
        return len(self.sequences) * self.scan.n_ctx * len(self.scan.interventions)

    @property
    def rows(self) -> int:
        """Rows of the `heads` table."""
        heads = self.info.n_layers * self.info.n_heads
        return len(self.sequences) * heads * len(self.scan.interventions)

    @property
    def bad_rows(self) -> dict[str, str]:
        """Problem by "file:row" of the corpus's rows that cannot be read."""
        return self.sequences.index.problems if self.sequences.index is not None else {}


def check_scan(scan: Scan) -> list[Intervention]:
    """The interventions of a scan; refuse what is wrong with it whatever its model and its corpus
    are.
    """
    found = [find_intervention(name) for name in scan.interventions]
    resolve_precision(scan, "cpu")  # What no device can compute.
    family = find_input(scan.input.family)
    family.check(scan.input.options)
    for intervention in found:
        if intervention.needs_partner and family.partner is None:
            have = ", ".join(sorted(f.name for f in INPUTS.values() if f.partner))
            raise ScanError(
                f"interventions: {intervention.name!r} takes something from the run on partner sequences, and the family "
                f"{family.name} has none; families with partners: {have}"
            )
    return found


def make_plan(scan: Scan, name: str, run_id: str | None = None, watch: Watch = unwatched) -> Plan:
    """Resolve a scan; `run_id` names an existing run that it must fit. `watch` is told how far the
    tokenising of a corpus is.
    """
    return plan_run(
        resolve(scan),
        RunDirectory.of(scan.out, run_id or scan.run_id(name)),
        old=run_id is not None,
        watch=watch,
    )


@dataclass(frozen=True)
class Resolved:
    """What a scan measures, wherever its run lies."""

    scan: Scan
    info: ModelInfo
    sequences: Sequences
    records: dict[str, Any]
    """What the formulas, the input and the interventions are, by field of the manifest."""
    identity: dict[str, Any]


def resolve(scan: Scan) -> Resolved:
    """Find what a scan names; what is wrong is an error now."""
    interventions = check_scan(scan)
    info = describe(find_model(scan.model, scan.revision))
    for intervention in interventions:
        intervention.check(info, scan.n_ctx)
    sequences = Sequences(scan, info)
    identity = {
        "scan": scan.record | {"input": {"family": scan.input.family, **sequences.options}},
        "model": info.record,
        "corpus": sequences.record,
    }
    parts = [part.registered for intervention in interventions for part in intervention.parts]
    records = {kind: {f.name: f.record for f in found} for kind, found in _formulas(scan).items()}
    records |= {"inputs": {sequences.family.name: sequences.family.record}}
    records |= {"interventions": {registered.name: registered.record for registered in parts}}
    identity |= {
        kind: {n: r["fingerprint"] for n, r in found.items()}
        for kind, found in records.items()
        if found
    }
    return Resolved(scan, info, sequences, records, identity)


def plan_run(
    resolved: Resolved, run: RunDirectory, old: bool = False, watch: Watch = unwatched
) -> Plan:
    """The plan of a run, which fits what lies in its directory; an `old` one has to lie there."""
    sequences = resolved.sequences
    if run.manifest_file.is_file():
        _check_same(run, resolved.identity)
        if sequences.corpus is not None:
            sequences.index = Index.read(_index_file(run))
    elif old:
        raise RunError(f"{run.path}: no such run to go on with; leave out --run to start one")
    elif sequences.family.synthetic:
        sequences.shard(0)  # Impossible options show when the first sequences are drawn.
    else:
        index_corpus(sequences, run.path.parent, watch)
    manifest = Manifest(
        run_id=run.run_id,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        identity=resolved.identity,
        shards=sequences.shards,
        sequences=len(sequences),
        model=resolved.info.record,
        code=code_fingerprint(),
        versions={library: version(library) for library in LIBRARIES},
        **resolved.records,
    )
    return Plan(resolved.scan, resolved.info, sequences, run, manifest)


def _formulas(scan: Scan) -> dict[str, Sequence[Formula]]:
    """Everything that a scan measures, by the field that names it."""
    return {
        "statistics": select(scan.statistics),
        "profiles": select_profiles(scan.profiles, scan.n_ctx),
        "curves": select_curves(scan.curves),
        "weight_statistics": select_weight_statistics(scan.weight_statistics),
        "predictions": select_predictions(scan.predictions),
    }


def prepare_run(plan: Plan, scan_text: str) -> None:
    """Create the run's directory, or find it as it was left."""
    if plan.run.manifest_file.is_file():
        return
    write_whole(plan.run.scan_file, scan_text.encode())
    if plan.sequences.index is not None:
        write_whole(_index_file(plan.run), plan.sequences.index.to_parquet())
    write_whole(plan.run.manifest_file, plan.manifest.model_dump_json(indent=1).encode())


def check_precision(plan: Plan, device: str) -> None:
    """Refuse to go on in another precision than the run was begun in."""
    precision = resolve_precision(plan.scan, device)
    methods = pc.list_flatten(plan.run.ledger(["methods"])["methods"])
    begun = pc.unique(pc.struct_field(methods, "precision")).to_pylist()
    if begun and begun != [precision]:
        raise RunError(
            f"{plan.run.run_id}: begun in {' and '.join(begun)}, and precision = 'auto' means {precision} on this {device}; "
            "go on where it was begun, or start a new run with that precision in the scan"
        )


def _index_file(run: RunDirectory) -> Place:
    return run.index / "documents.parquet"


def _check_same(run: RunDirectory, identity: dict[str, Any]) -> None:
    before = run.manifest().identity
    # Manifests of older runs say nothing of the code of inputs and interventions.
    known = {
        key: value
        for key, value in identity.items()
        if key in before or key not in ("inputs", "interventions")
    }
    differing = differing_keys(before, json.loads(json.dumps(known)))
    if differing:
        raise RunError(
            f"{run.path}: this run measured something else; differing keys: {', '.join(differing)}. Start a new run"
        )
