"""What a model's weights say of positions, without any input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from schemas.errors import ModelError

if TYPE_CHECKING:
    from workers.model.loading import LoadedModel


@dataclass(frozen=True)
class Circuit:
    """The embeddings of positions, and what the first layer makes of them."""

    positions: Tensor
    """`W_pos [pos d_model]`."""
    effective: Tensor
    """`EPE[j] = p[j] + MLP_0(p[j])`, without the norm before the MLP; p[j] where there is no MLP.
    Ran-Milo et al. 2026.
    """

    @classmethod
    def of(cls, model: LoadedModel) -> Circuit:
        """Read it off untouched weights; a model whose effective positions cannot be known is
        refused.
        """
        name, found = model.info.name, getattr(model.bridge, "W_pos", None)
        if not isinstance(found, Tensor):
            raise ModelError(
                f"{name}: no position embeddings are added in this model; choose another intervention"
            )
        if model.hides("mlp_out"):
            raise ModelError(
                f"{name}: its first MLP is no module of its own, or folded, so its effective positions are not known; "
                "choose another intervention, or weight_processing = 'raw'"
            )
        positions = found.detach().clone()
        return cls(positions, effective_positions(positions, model.parts["mlp_out"]))

    def massive_coordinates(self, count: int) -> list[int]:
        """The coordinates of the first effective position that are largest in size, largest first."""
        return torch.topk(self.effective[0].abs(), count).indices.tolist()


def effective_positions(positions: Tensor, mlps: Sequence[nn.Module]) -> Tensor:
    """`EPE[j]` of embeddings of positions and the first of a model's MLPs, if it has any."""
    return positions + mlps[0](positions[None])[0] if mlps else positions
