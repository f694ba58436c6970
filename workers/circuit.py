"""What a model's weights say of positions, without any input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from schemas.errors import ModelError


@dataclass(frozen=True)
class Circuit:
    """The embeddings of positions, and what the first layer makes of them."""

    positions: Tensor
    """`W_pos [pos d_model]`."""
    effective: Tensor
    """`EPE[j] = p[j] + MLP_0(p[j])`, without the norm before the MLP; p[j] where there is no MLP. Ran-Milo et al. 2026."""

    @classmethod
    def of(cls, name: str, bridge: Any, mlp: nn.Module | None) -> Circuit:
        """Read it off untouched weights; a model that adds no positions is refused."""
        found = getattr(bridge, "W_pos", None)
        if not isinstance(found, Tensor):
            raise ModelError(f"{name}: no position embeddings are added in this model; choose another intervention")
        positions = found.detach().clone()
        return cls(positions, effective_positions(positions, mlp))

    def massive_coordinates(self, count: int) -> list[int]:
        """The coordinates of the first effective position that are largest in size, largest first."""
        return torch.topk(self.effective[0].abs(), count).indices.tolist()


def effective_positions(positions: Tensor, mlp: nn.Module | None) -> Tensor:
    """`EPE[j]` of embeddings of positions and the first layer's MLP."""
    return positions if mlp is None else positions + mlp(positions[None])[0]
