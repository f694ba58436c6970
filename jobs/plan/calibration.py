"""Scans of losses under interventions beside a run, such as those that its effects estimate."""

import random
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from headcount.schemas.errors import RunError, ScanError
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.formulas import CALIBRATED
from headcount.schemas.scans.intervention import parse_intervention
from headcount.schemas.scans.measured_heads import Head, MeasuredHeads
from headcount.schemas.scans.scan import parse_scan
from headcount.workers.interventions import bind
from headcount.workers.model.files.model_info import ModelInfo


def calibration_of(run: RunDirectory, heads: int, sequences: int, draw: int) -> dict[str, Any]:
    """The fields of a scan of the first sequences of a run, under the interventions whose effects
    the run estimates, each on the same drawn heads.

    The view `effect_calibration` finds the losses beside the estimates.
    """
    manifest = run.manifest()
    templates = [
        record[CALIBRATED]
        for record in manifest.kinds.get("statistics", {}).values()
        if record.get(CALIBRATED)
    ]
    info, n_ctx = _info(manifest), manifest.identity["scan"]["n_ctx"]
    drawn = drawn_heads(manifest, info, heads, draw)
    texts = (t.format(layer=head.layer, head=head.head) for t in templates for head in drawn)
    # A window as long as the sequences has no effect, and none to measure.
    interventions = [text for text in texts if _does_something(text, info, n_ctx)]
    if not interventions:
        raise RunError(
            f"{run.run_id}: expected a run with effects that an intervention can measure on "
            f"sequences of {n_ctx} tokens (shorter windows), and it has none; add "
            '"effects" to statistics in its scan, and scan again'
        )
    return scan_of_losses(run, interventions, sequences)


def scan_of_losses(
    run: RunDirectory, interventions: Sequence[str], sequences: int
) -> dict[str, Any]:
    """The fields of a scan of the losses of the first sequences of a run: of the untouched model,
    and under interventions.
    """
    manifest = run.manifest()
    fields = dict(manifest.identity["scan"])
    kept = min(sequences, manifest.sequences)
    fields |= {
        "interventions": ["none", *interventions],
        "statistics": ["sink_mass"],
        "predictions": ["loss"],
        "profiles": [],
        "curves": [],
        "weight_statistics": [],
        # Of one layer, so that the others need no pattern; losses need a whole pass anyway.
        "layers": [_measured_heads(manifest, _info(manifest)).layers[0]],
        "heads": "all",
        "sequences": kept,
        "sequences_per_shard": min(kept, fields["sequences_per_shard"]),
        # What has a backward pass.
        "precision": "float64" if fields.get("precision") == "float64" else "float32",
        "out": str(run.path.parent),
        "corpora": manifest.corpora,
        "batch_size": manifest.batch_size,
    }
    fields["input"] = _set(fields["input"])
    return _set(fields)


def _set(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that have a value: TOML knows no other."""
    return {name: value for name, value in fields.items() if value is not None}


def drawn_heads(manifest: Manifest, info: ModelInfo, count: int, draw: int) -> list[Head]:
    """Heads of a run, as many of each layer as of the others, but for one."""
    measured = _measured_heads(manifest, info)
    generator = random.Random(draw)
    shuffled = [
        generator.sample([Head(layer, head) for head in of_layer], len(of_layer))
        for layer, of_layer in sorted(measured.by_layer.items())
    ]
    turns = (head for turn in zip_longest(*shuffled) for head in turn if head is not None)
    return sorted([head for head, _ in zip(turns, range(count), strict=False)])


def _measured_heads(manifest: Manifest, info: ModelInfo) -> MeasuredHeads:
    return parse_scan({**manifest.identity["scan"], "sequences": 1}).measured_heads(info)


def _info(manifest: Manifest) -> ModelInfo:
    fields: dict[str, Any] = dict(manifest.model)
    layers = fields.pop("attention_layers", None)
    del fields["files"]
    return ModelInfo("", attention_layers=layers and tuple(layers), **fields)


def _does_something(text: str, info: ModelInfo, n_ctx: int) -> bool:
    try:
        bind(parse_intervention(text)).check(info, n_ctx)
    except ScanError:
        return False
    return True
