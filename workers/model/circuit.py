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
        """The `count` coordinates of the first effective position that are largest in size; with a
        count of 0 the `massive` ones.
        """
        sizes = self.effective[0].abs()  # [d_model]
        if count == 0:
            return massive(sizes).nonzero().flatten().tolist()
        return torch.topk(sizes, count).indices.tolist()


LEAST_MASSIVE = 3
"""Coordinates that count as massive however small they are."""


def massive(sizes: Tensor) -> Tensor:
    """Which sizes `[… d_model]` are above mean + 3 standard deviations, and in any case the three
    largest (Mahmood 2026).

    >>> massive(torch.tensor([1.0, 9, 2, 3, 4])).tolist()
    [False, True, False, True, True]
    """
    deviation = sizes.std(-1, correction=0, keepdim=True)
    third = sizes.topk(min(LEAST_MASSIVE, sizes.shape[-1])).values[..., -1:]
    return (sizes > sizes.mean(-1, keepdim=True) + 3 * deviation) | (sizes >= third)


def effective_positions(positions: Tensor, mlps: Sequence[nn.Module]) -> Tensor:
    """`EPE [pos d_model]` of embeddings of positions and the first of a model's MLPs, if any."""
    if not mlps:
        return positions
    # Modules take a batch, here of one sequence that consists of the positions alone.
    first_mlp_out = mlps[0](positions[None])[0]
    return positions + first_mlp_out
