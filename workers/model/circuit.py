"""What a model's weights say of positions, without any input."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Circuit:
    """The embeddings of positions, and what the first layer makes of them."""

    positions: Tensor  # `W_pos [pos d_model]`
    effective: Tensor
    """`EPE[j] = p[j] + MLP_0(p[j])`, without the norm before the MLP (Ran-Milo et al. 2026). It is
    p[j] if there is no MLP.
    """

    def massive_coordinates(self, count: int) -> list[int]:
        """The `count` coordinates of the first effective position that are largest in size."""
        # effective[0] is [d_model]
        return torch.topk(self.effective[0].abs(), count).indices.tolist()


def effective_positions(positions: Tensor, mlps: Sequence[nn.Module]) -> Tensor:
    """`EPE [pos d_model]` of embeddings of positions and the first of a model's MLPs, if any."""
    if not mlps:
        return positions
    # Modules take a batch, here of one sequence that consists of the positions alone.
    first_mlp_out = mlps[0](positions[None])[0]
    return positions + first_mlp_out
