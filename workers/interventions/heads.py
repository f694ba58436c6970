"""Edits of single heads."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.interventions.registry import intervention


@intervention
def zero_head(z: Tensor, *, layer: int, head: int) -> Tensor:
    """One head moves nothing: its output before W_O is set to zero."""
    edited = z.clone()
    edited[:, :, head] = 0
    return edited


@intervention
def keep_head(z: Tensor, *, layer: int, head: int) -> Tensor:
    """All heads of a layer but one move nothing (Farrell 2023, where the other patterns are set to zero)."""
    edited = torch.zeros_like(z)
    edited[:, :, head] = z[:, :, head]
    return edited


@intervention
def head_to_first(pattern: Tensor, *, layer: int, head: int) -> Tensor:
    """One head attends to the first token alone (Guo et al. 2024; Stolfo et al. 2024)."""
    edited = pattern.clone()
    edited[:, head] = 0
    edited[:, head, :, 0] = 1
    return edited
