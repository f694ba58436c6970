"""Edits of single heads."""

from __future__ import annotations

import torch
from torch import Tensor

from schemas.values import Index
from workers.engine.edits import replaced
from workers.interventions.intervention_registry import intervention


@intervention
def zero_head(z: Tensor, *, layer: Index, head: Index) -> Tensor:
    """One head moves nothing: its output before W_O is set to zero."""
    return replaced(z, (..., head, slice(None)), 0)


@intervention
def keep_head(z: Tensor, *, layer: Index, head: Index) -> Tensor:
    """All heads of a layer except one move nothing (Farrell 2023, where the other patterns are set
    to zero).
    """
    return replaced(torch.zeros_like(z), (..., head, slice(None)), z[:, :, head])


@intervention
def mean_head(z: Tensor, *, layer: Index, head: Index) -> Tensor:
    """The output of one head becomes its mean over the positions up to here, so that nothing is
    known of later tokens.
    """
    count = torch.arange(1, z.shape[1] + 1, device=z.device)[:, None]
    return replaced(z, (..., head, slice(None)), z[:, :, head].cumsum(1) / count)


@intervention
def patch_head(z: Tensor, partner: Tensor, *, layer: Index, head: Index) -> Tensor:
    """The output of one head comes from the run on the partner sequence, in which all other edits
    are made, too (activation patching; Farrell 2023).
    """
    return replaced(z, (..., head, slice(None)), partner[:, :, head])


@intervention
def patch_head_at(
    z: Tensor, partner: Tensor, *, layer: Index, head: Index, position: Index
) -> Tensor:
    """What patch_head does, at one position alone."""
    return replaced(z, (slice(None), position, head), partner[:, position, head])


@intervention
def head_to_first(pattern: Tensor, *, layer: Index, head: Index) -> Tensor:
    """One head attends to the first token alone (Guo et al. 2024; Stolfo et al. 2024)."""
    edited = pattern.clone()
    edited[:, head] = 0
    edited[:, head, :, 0] = 1
    return edited
