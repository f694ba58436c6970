"""What one head looks at on one sequence: for every query the key with most of its attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headcount.schemas.scans.intervention import Intervention
from headcount.workers.engine.engine import Activations
from headcount.workers.engine.patching import with_partner
from headcount.workers.replica import Replica


@dataclass(frozen=True)
class StrongestKeys:
    """Where the attention of a head goes, for every query of a sequence."""

    key: np.ndarray
    """The key with most attention, the first of several; -1 if the query sees no key."""
    mass: np.ndarray
    """Attention to it."""
    first: np.ndarray
    """Attention to key 0."""


def strongest_keys(
    replica: Replica,
    tokens: np.ndarray,
    layer: int,
    head: int,
    intervention: Intervention,
    partner: np.ndarray | None = None,
) -> StrongestKeys:
    """Run one sequence `[pos]` and read the pattern of one head.

    `partner` is a sequence too, if the intervention takes something from it.
    """
    rows: list[Tensor] = []

    def read_pattern(shown_layer: int, activations: Activations) -> None:
        # The fused engine shows a layer twice.
        if shown_layer == layer and not rows:
            pattern = activations["pattern"]
            # A row at a time: the pattern of a long sequence does not fit the memory.
            for q in range(len(tokens)):
                attention = pattern.row(q)[0, head].double()  # [key]; it holds any key exactly.
                # Keys behind the window have no attention.
                mass, key = attention.nan_to_num(nan=0).max(dim=-1)
                rows.append(torch.stack([key.double(), mass, attention[0]]))

    batch = _as_batch(replica, tokens)
    partner_batch = None if partner is None else _as_batch(replica, partner)
    with replica.engine_under(intervention, partner) as engine:
        patched_engine = with_partner(engine, partner_batch, depth=layer + 1)
        patched_engine.run(batch, {}, read_pattern, (), layers=[layer])
    key, mass, first = torch.stack(rows).cpu().numpy().T
    # A change can leave a query no attention at all, and then the largest is that of any key.
    return StrongestKeys(np.where(mass > 0, key, -1).astype(int), mass, first)


def _as_batch(replica: Replica, tokens: np.ndarray) -> Tensor:
    """One sequence as the model takes it: `[1 pos]`."""
    return torch.from_numpy(tokens[None]).long().to(replica.device)
