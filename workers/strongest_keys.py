"""What one head looks at on one sequence: for every query the key with most of its attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from schemas.intervention import Intervention
from workers.engine.engine import Activations
from workers.engine.patching import with_partner
from workers.replica import Replica


@dataclass(frozen=True)
class StrongestKeys:
    """Where the attention of a head goes, for every query of a sequence."""

    key: np.ndarray
    """The key with most attention, the first of several; -1 where the query sees no key."""
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
    """Run one sequence `[pos]` and read the pattern of one head; `partner` likewise, where the
    intervention takes something from it.
    """
    batch = _batch(replica, tokens)
    rows: list[Tensor] = []

    def read(at: int, activations: Activations) -> None:
        # The fused engine shows a layer twice.
        if at == layer and not rows:
            pattern = activations["pattern"]
            # A row at a time: the pattern of a long sequence does not fit the memory.
            rows.extend(_strongest(pattern.row(q)[0, head]) for q in range(len(tokens)))

    others = None if partner is None else _batch(replica, partner)
    with replica.engine_under(intervention, partner) as engine:
        with_partner(engine, others, layer + 1).run(batch, {}, read, (), layers=[layer])
    found = torch.stack(rows).cpu().numpy()
    key = np.where(found[:, 1] > 0, found[:, 0], -1).astype(int)
    return StrongestKeys(key, found[:, 1], found[:, 2])


def _batch(replica: Replica, tokens: np.ndarray) -> Tensor:
    """One sequence as the model takes it."""
    return torch.from_numpy(tokens[None]).long().to(replica.device)


def _strongest(attention: Tensor) -> Tensor:
    """Key, its attention, and attention to key 0, of one query."""
    mass, key = attention.double().max(dim=-1)
    return torch.stack([key.double(), mass, attention[0].double()])
