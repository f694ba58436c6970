"""Which engine measures each intervention of a scan, and in which precision.

Settled once, when a replica is made or a scan is planned, so that what cannot run is refused before
a GPU is paid for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from headcount.schemas.errors import RunError, ScanError
from headcount.schemas.formula_kinds import DIRECT_GRADIENTS
from headcount.schemas.scans.intervention import Intervention
from headcount.schemas.scans.scan import BRIDGE_PRECISIONS, FASTEST_ACCEPTABLE, Scan
from headcount.workers.engine.changes import hidden_keys
from headcount.workers.interventions import bind
from headcount.workers.interventions.intervention_registry import BoundIntervention, BoundPart
from headcount.workers.model.attention_facts import AttentionFacts, unseen_keys, window_of
from headcount.workers.model.model import Model

STREAM = ("resid_pre", "resid_post")  # what heads write straight to the logits passes here

EngineName = Literal["fused", "dense"]


@dataclass(frozen=True)
class Settled:
    """How one intervention is measured."""

    bound: BoundIntervention
    engine: EngineName
    reason: str  # why the dense engine measures it; empty if the fused engine does


@dataclass(frozen=True)
class Settlement:
    """The precision of a run on a device, and the engine of each intervention."""

    precision: str
    interventions: Mapping[Intervention, Settled]


def settle(model: Model, scan: Scan, device: str) -> Settlement:
    """Settle a scan's interventions for a device, `cpu` or `cuda`, which need not be there.

    `precision = "auto"` becomes the fastest precision that all of the interventions allow.
    """
    settled = {each: settle_one(model, scan, each) for each in scan.interventions}
    precision = scan.precision
    if precision == "auto":
        # The whole run has one precision, and the dense engine is never faster than float32.
        # Nor has it gradients in a narrower one.
        is_dense = any(settlement.engine == "dense" for settlement in settled.values())
        in_float32 = is_dense or scan.gradients
        precision = "float32" if in_float32 else FASTEST_ACCEPTABLE[device]
    for settlement in settled.values():
        check_bridge_precision(settlement, precision)
    return Settlement(precision, settled)


def settle_one(model: Model, scan: Scan, intervention: Intervention) -> Settled:
    """The engine of one intervention. A change that the model does not allow is refused."""
    bound = bind(intervention)
    bound.check(model.info, scan.n_ctx)
    _check_visible(model, bound, scan.n_ctx)
    for part in (*bound.activation_parts, *bound.weight_parts):
        part.check_model(model)
    _check_direct_way(scan, bound)
    reason = _needs_bridge(model, bound)
    if scan.weight_processing == "folded":
        # Folding happens in the bridge alone, so folded weights are measured there.
        reason = "weight_processing is 'folded'"
    if scan.engine == "dense":
        reason = "engine is 'dense'"
    if reason is None:
        return Settled(bound, "fused", "")
    if scan.gradients:
        raise ScanError(
            f"interventions: '{intervention}' needs the dense engine ({reason}), which has no "
            "backward pass; leave it out, or the statistics that need gradients"
        )
    if (problem := model.bridge().problem) is not None:
        raise ScanError(
            f"interventions: '{intervention}' needs the dense engine ({reason}), and "
            f"{model.info.name} has none: {problem}"
        )
    return Settled(bound, "dense", reason)


def _check_direct_way(scan: Scan, bound: BoundIntervention) -> None:
    """Refuse changes of the stream, which lies between a head and the logits."""
    changed = [part.target for part in bound.activation_parts if part.target in STREAM]
    if changed and not scan.gradients.isdisjoint(DIRECT_GRADIENTS):
        raise ScanError(
            f"interventions: '{bound.intervention}': what a head writes straight to the logits is "
            f"not known where {changed[0]} is changed; leave it out, or what begins with direct_"
        )


def _needs_bridge(model: Model, bound: BoundIntervention) -> str | None:
    """Why only the bridge sees a change; None if the bare modules see it too."""
    for part in bound.weight_parts:
        if part.weights(model)[0].parameter is None:
            return f"the modules do not share {part.target} with the bridge"
    for part in bound.activation_parts:
        if part.target in ("q", "k") and model.rotary:
            return f"{part.target} is changed before its rotation"
        if model.hides(part.target):
            return f"no module puts out {part.target}"
    return None


def _check_visible(model: Model, bound: BoundIntervention, n_ctx: int) -> None:
    """Refuse masks that together leave a query without a key.

    They are tried on one head of zeros. Masks of single heads, and masks that read something else,
    cannot be tried before the model runs.
    """
    masks = [
        part
        for part in bound.activation_parts
        if part.target == "attn_scores" and not part.registered.reads and "head" not in part.options
    ]
    tried: list[tuple[int, list[BoundPart]]] = []
    for layer in model.info.attention_layers_or_all:
        # Without a window if nothing is known of the layer.
        facts = model.facts(layer) or AttentionFacts(1.0)
        case = window_of(facts, n_ctx), [part for part in masks if part.layer in (None, layer)]
        # Layers with the same window and masks are tried once.
        if not case[1] or case in tried:
            continue
        tried.append(case)
        scores = torch.zeros(1, 1, n_ctx, n_ctx, dtype=torch.float16)
        for part in case[1]:
            scores = part.registered.function(scores, **part.options)
        # Raises `ScanError` if a query sees no key.
        hidden_keys(scores, unseen_keys(n_ctx, facts, torch.device("cpu")))


def check_bridge_precision(settled: Settled, precision: str) -> None:
    """Refuse a precision that the dense engine does not compute in."""
    if settled.engine == "dense" and precision not in BRIDGE_PRECISIONS:
        raise ScanError(
            f"precision: {settled.bound.intervention} is measured by the dense engine "
            f"({settled.reason}), which does not compute in {precision}; "
            "set precision = 'auto', 'float32' or 'float64'"
        )


def check_begun(begun: frozenset[str], precision: str, run_id: str, device: str) -> None:
    """Refuse to continue a run in another precision than it was begun in."""
    if begun and begun != {precision}:
        raise RunError(
            f"{run_id}: begun in {' and '.join(sorted(begun))}, and precision = 'auto' means "
            f"{precision} on this {device}; go on where it was begun; the same scan with "
            f"--set precision={precision} is a run of its own"
        )
