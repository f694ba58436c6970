"""Changes of embeddings and of what the first MLP makes of positions."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headcount.schemas.values import Factor, Index, Seed
from headcount.workers.engine.changes import replaced
from headcount.workers.interventions.intervention_registry import LargestValue, intervention
from headcount.workers.interventions.sinks import random_directions
from headcount.workers.model.circuit import Circuit

LAST_BUT_ONE = LargestValue("the model's last but one", lambda info, n_ctx: info.n_ctx - 2)
"""The last position has no next one."""


def _one_position(options: Mapping[str, Any], n_ctx: int) -> str | None:
    """Why positions 0 and 1 cannot be exchanged; None if they can."""
    return None if n_ctx > 1 else "positions 0 and 1 of a sequence, which has 1; raise n_ctx"


@intervention
def first_position_second(W_pos: Tensor) -> Tensor:
    """Position 0 gets the embedding of position 1 (Ran-Milo et al. 2026, intervention c)."""
    return replaced(W_pos, 0, W_pos[1])


@intervention
def blend_first_position(W_pos: Tensor, *, alpha: Factor) -> Tensor:
    """Position 0 gets alpha times its own embedding and 1 - alpha times that of position 1."""
    return replaced(W_pos, 0, alpha * W_pos[0] + (1 - alpha) * W_pos[1])


@intervention
def random_first_position(W_pos: Tensor, *, draw: Seed = 0, alpha: Factor = 0.0) -> Tensor:
    """The control of first_position_second and blend_first_position: position 0 moves as far, in a
    random direction.
    """
    distance = (1 - alpha) * (W_pos[1] - W_pos[0]).norm()
    return replaced(W_pos, 0, W_pos[0] + distance * random_directions(W_pos[0], draw))


@intervention(most={"position": LAST_BUT_ONE})
def blend_position(W_pos: Tensor, *, position: Index, alpha: Factor = 0.0) -> Tensor:
    """A position gets alpha times its own embedding and 1 - alpha times that of the next one: the
    change of blend_first_position, elsewhere.
    """
    return replaced(W_pos, position, alpha * W_pos[position] + (1 - alpha) * W_pos[position + 1])


@intervention
def scale_first_position(W_pos: Tensor, *, alpha: Factor) -> Tensor:
    """The embedding of position 0 is multiplied by alpha."""
    return replaced(W_pos, 0, alpha * W_pos[0])


@intervention
def scale_position(W_pos: Tensor, *, position: Index, alpha: Factor) -> Tensor:
    """The embedding of a position is multiplied by alpha: the intervention scale_first_position,
    elsewhere.
    """
    return replaced(W_pos, position, alpha * W_pos[position])


@intervention
def swap_first_positions(W_pos: Tensor) -> Tensor:
    """Positions 0 and 1 exchange their embeddings."""
    return replaced(W_pos, [0, 1], W_pos[[1, 0]])


@intervention
def zero_positions(pos_embed: Tensor) -> Tensor:
    """No position is embedded, only tokens (Ran-Milo et al. 2026, intervention h; Farrell 2023)."""
    return torch.zeros_like(pos_embed)


@intervention(refuse=_one_position)
def first_rotation_second(rotary_positions: Tensor) -> Tensor:
    """Query and key of position 0 are rotated as those of position 1: first_position_second for
    models that rotate (Mahmood 2026, in Qwen2.5).
    """
    return replaced(rotary_positions, 0, rotary_positions[1])


@intervention(refuse=_one_position)
def swap_first_rotations(rotary_positions: Tensor) -> Tensor:
    """Positions 0 and 1 are rotated as each other: swap_effective_positions and swap_raw_positions
    for models that rotate, in which nothing tells the two apart (Mahmood 2026, in Qwen2.5).
    """
    return replaced(rotary_positions, [0, 1], rotary_positions[[1, 0]])


@intervention
def zero_rotations(rotary_positions: Tensor) -> Tensor:
    """No query or key is rotated by where it is, all as at position 0: zero_positions for models
    that rotate (Mahmood 2026, in Qwen2.5).
    """
    return torch.zeros_like(rotary_positions)


@intervention
def zero_tokens(embed: Tensor) -> Tensor:
    """No token is embedded, only positions (Farrell 2023)."""
    return torch.zeros_like(embed)


@intervention
def zero_first_token(embed: Tensor) -> Tensor:
    """The embedding of the first token is set to zero, that of its position is kept (Ran-Milo et
    al. 2026, intervention f).
    """
    return replaced(embed, (slice(None), 0), 0)


@intervention
def zero_token(embed: Tensor, *, position: Index) -> Tensor:
    """The embedding of the token at a position is set to zero: the intervention zero_first_token,
    elsewhere.
    """
    return replaced(embed, (slice(None), position), 0)


@intervention(refuse=_one_position)
def swap_effective_positions(mlp_out: Tensor, circuit: Circuit, *, layer: Index = 0) -> Tensor:
    """The first MLP writes the direction of effective position 0 at position 1, and that of 1 at 0:
    a·(u1 - u0) is added at 0 and subtracted at 1, with a = mlp_out[0]·u0 (Ran-Milo et al. 2026, d).
    """
    return _swapped(mlp_out, circuit.effective[:2])


@intervention(refuse=_one_position)
def swap_raw_positions(mlp_out: Tensor, circuit: Circuit, *, layer: Index = 0) -> Tensor:
    """The control of swap_effective_positions: the same with raw position embeddings (Ran-Milo et
    al. 2026, e).
    """
    return _swapped(mlp_out, circuit.positions[:2])


def _swapped(mlp_out: Tensor, rows: Tensor) -> Tensor:
    """Turn the part of position 0 along the first of two directions into the second direction.

    At position 1 the opposite step is made, of the same length.
    """
    # The weights are in their own precision, the activation in the one that is measured.
    first, second = (rows / rows.norm(dim=-1, keepdim=True)).to(mlp_out.dtype)
    length_along_first = mlp_out[:, 0] @ first  # [batch]
    step = length_along_first[:, None] * (second - first)  # [batch d_model]
    changed = mlp_out.clone()
    changed[:, 0] += step
    changed[:, 1] -= step
    return changed


@intervention
def zero_mlps(mlp_out: Tensor) -> Tensor:
    """No MLP adds anything (Ran-Milo et al. 2026, intervention g)."""
    return torch.zeros_like(mlp_out)


@intervention
def zero_mlp(mlp_out: Tensor, *, layer: Index) -> Tensor:
    """The MLP of one layer adds nothing."""
    return torch.zeros_like(mlp_out)


@intervention
def zero_attention(attn_out: Tensor, *, layer: Index) -> Tensor:
    """The attention of one layer adds nothing."""
    return torch.zeros_like(attn_out)
