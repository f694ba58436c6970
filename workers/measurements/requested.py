"""What a scan asks of one model: the formulas that this model has, and the heads to measure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from schemas.formulas import Formula
from schemas.kind import Computed, Kind
from schemas.kinds import KINDS
from schemas.measured_heads import MeasuredHeads
from schemas.scan import Scan
from workers.model.model import Model


def hides_rotations(model: Model) -> bool:
    """Whether the bridge never shows rotated queries, although the model rotates them.

    Some of its layers have the hook and never call it, so the model runs on two tokens.
    """
    if not (model.rotary and model.has_bridge):
        return False
    # The dense engine rotates what the bridge shows if it knows how.
    if all(map(model.can_undo_rotation, model.info.attention_layers_or_all)):
        return False
    shown: list[str] = []

    def note(value: Tensor, hook: object) -> None:
        shown.append("rot_q")

    places = [model.hook_name("rot_q", layer) for layer in range(model.info.n_layers)]
    hooks = [(place, note) for place in places if model.has_hook(place)]
    tokens = torch.zeros(1, min(2, model.info.n_ctx), dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        model.run_with_hooks(tokens, hooks)
    return not shown


@dataclass(frozen=True)
class Requested:
    """What is computed: which formulas, in which heads."""

    formulas: Mapping[str, Sequence[Formula]]
    """By field of the scan that names them."""
    heads: MeasuredHeads
    rotations_hidden: bool = False
    """Whether TransformerLens shows queries and keys of this model only before their rotation.

    Found out only if a formula reads them.
    """

    @classmethod
    def of_scan(cls, scan: Scan, model: Model) -> Requested:
        """What a scan asks of a model, without the formulas that such a model does not have."""
        formulas = {
            kind.field: [formula for formula in scan.formulas(kind) if formula.exists(model.rotary)]
            for kind in scan.kinds()
        }
        reads_rotated = any(
            formula.of_rotated
            for formulas_of_kind in formulas.values()
            for formula in formulas_of_kind
        )
        rotations_hidden = reads_rotated and hides_rotations(model)
        return cls(formulas, scan.measured_heads(model.info), rotations_hidden)

    def computed(self, when: Computed) -> Iterator[tuple[Kind[Any], Sequence[Formula]]]:
        """The kinds that are computed at that time, and their formulas."""
        for kind in KINDS:
            formulas = self.formulas.get(kind.field, ())
            if kind.computed == when and formulas:
                yield kind, formulas

    @property
    def has_predictions(self) -> bool:
        """Whether something is computed from what the model predicts."""
        return any(True for _ in self.computed("after the pass"))

    def reads(self, name: str) -> bool:
        """Whether a formula of a layer reads this, or the rule that says where it has a value."""
        return any(
            name in formula.parameters or name in formula.conditions
            for _, formulas in self.computed("in every layer")
            for formula in formulas
        )
