"""What a scan asks of one model: the formulas that this model has, and the heads to measure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from headcount.schemas.formulas import Computed, Formula, Kind
from headcount.schemas.scans.kinds import KINDS
from headcount.schemas.scans.measured_heads import MeasuredHeads
from headcount.schemas.scans.scan import Scan
from headcount.workers.model.model import Model


@dataclass(frozen=True)
class Requested:
    """What is computed: which formulas, in which heads."""

    formulas: Mapping[str, Sequence[Formula]]
    """By field of the scan that names them."""
    heads: MeasuredHeads

    @classmethod
    def of_scan(cls, scan: Scan, model: Model) -> Requested:
        """What a scan asks of a model, without the formulas that such a model does not have."""
        formulas = {
            kind.field: [formula for formula in scan.formulas(kind) if formula.exists(model.rotary)]
            for kind in scan.kinds()
        }
        return cls(formulas, scan.measured_heads(model.info))

    def computed(self, when: Computed) -> Iterator[tuple[Kind, Sequence[Formula]]]:
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
