"""Changes of single heads."""

from collections.abc import Mapping

import torch
from torch import Tensor

from headcount.schemas.pattern import Pattern
from headcount.schemas.statistics.effects import Bits, quantised
from headcount.schemas.values import Index
from headcount.workers.engine.changes import replaced
from headcount.workers.engine.token_pairs import find_matches
from headcount.workers.interventions.intervention_registry import intervention


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
    # [pos 1]: so many positions are in the running sum.
    count = torch.arange(1, z.shape[1] + 1, device=z.device)[:, None]
    return replaced(z, (..., head, slice(None)), z[:, :, head].cumsum(1) / count)


@intervention
def patch_head(z: Tensor, partner: Tensor, *, layer: Index, head: Index) -> Tensor:
    """The output of one head comes from the run on the partner sequence, in which all other changes
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
def quantise_values(
    z: Tensor, pattern: Pattern, v: Tensor, *, layer: Index, head: Index, bits: Bits = 4
) -> Tensor:
    """The values of one head, and of the query heads that share them, have so many bits, as the
    statistic effect_quantised_values has it.
    """
    return z.where(~sharing(pattern, z, head), pattern.weighted(quantised(v, bits)))


@intervention
def quantise_keys(
    z: Tensor, pattern: Pattern, k: Tensor, v: Tensor, *, layer: Index, head: Index, bits: Bits = 4
) -> Tensor:
    """The keys of one head, and of the query heads that share them, have so many bits, as the
    statistic effect_quantised_keys has it.
    """
    return z.where(~sharing(pattern, z, head), pattern.with_keys(quantised(k, bits), v))


@intervention
def head_to_first(pattern: Tensor, *, layer: Index, head: Index) -> Tensor:
    """One head attends to the first token alone (Guo et al. 2024; Stolfo et al. 2024)."""
    return replaced(pattern, (slice(None), head), to_first(pattern[:, head]))


@intervention
def ideal_backcopy(
    pattern: Tensor, labels: Mapping[str, Tensor], *, layer: Index, head: Index
) -> Tensor:
    """One head attends as the oracle of Bigram-Backcopy: a query labelled "trigger" to the token
    before it, the others to the first token alone (Guo et al. 2024).
    """
    n_ctx = pattern.shape[-1]
    ideal = to_first(pattern[:, head])
    if "trigger" in labels:
        # A trigger at position 0 has no token before it.
        is_trigger = labels["trigger"][:, 1:, None]  # [batch query-1 1]
        previous = torch.eye(n_ctx, dtype=pattern.dtype, device=pattern.device)[:-1]
        ideal[:, 1:] = torch.where(is_trigger, previous, ideal[:, 1:])
    return replaced(pattern, (slice(None), head), ideal)


@intervention
def ideal_induction(pattern: Tensor, tokens: Tensor, *, layer: Index, head: Index) -> Tensor:
    """One head attends as an ideal induction head: a query whose token occurred before, equally to
    the keys that followed it; the others to the first token alone.
    """
    batch, n_ctx = tokens.shape
    pairs = find_matches(tokens)["successors"].matrix(slice(0, batch), 0, n_ctx)
    count = pairs.sum(-1, keepdim=True)  # [batch query 1]
    equally = pairs.to(pattern.dtype) / count.clamp_min(1)
    ideal = torch.where(count > 0, equally, to_first(pattern[:, head]))
    return replaced(pattern, (slice(None), head), ideal)


def sharing(pattern: Pattern, z: Tensor, head: int) -> Tensor:
    """Which heads share the keys and values of one: `[1 head 1]`, beside z."""
    is_head = replaced(torch.zeros_like(z[:1, 0, :, 0]), (..., head), 1)  # [1 head]
    return pattern.shared(is_head)[..., None] > 0


def to_first(pattern: Tensor) -> Tensor:
    """A pattern of the same shape, all of whose queries attend to key 0."""
    return replaced(torch.zeros_like(pattern), (..., 0), 1)
