"""What a head does for the loss, to first order, and what it writes straight to the logits.

L is the mean next-token loss of a sequence in nats, and z[q] a head's output before W_O. An
intervention puts z'[q] in the place of z[q]. To first order the loss then rises by
Σ_q ⟨∂L/∂z[q], z'[q] - z[q]⟩: its effect. One backward pass gives that of all heads and
interventions at once. A positive effect means that the intervention raises the loss.

The direct part of an effect is what reaches the logits without passing a later layer, the scale of
the last norm (and of a norm behind the attention) held as it is. The rest is the indirect part.

First order is an estimate. `headcount calibrate` measures some of these interventions and compares.
Setting z to zero has no signed effect here: Σ_q ⟨∂L/∂z[q], z[q]⟩ = ⟨∂L/∂W_O, W_O⟩, which is about 0
for a trained model on texts like those it was trained on, however much the head does.
"""

from typing import Annotated

from pydantic import Field

from headcount.schemas.formula_kinds import statistic
from headcount.schemas.pattern import Pattern, Tensor
from headcount.schemas.statistics.reach import has_distant_keys
from headcount.schemas.units import Logits, NatsPerToken, Norm, ShareOfNorms
from headcount.schemas.values import Count, Index

Bits = Annotated[int, Field(ge=1, le=16)]

HIDDEN_Z = "the layer changes z before W_O, or adds what it writes to the stream in another way"
"""Why a layer may have no direct part."""


def has_next_token(tokens: Tensor) -> bool:
    """there are at least two tokens."""
    return tokens.shape[1] > 1


def quantised(x: Tensor, bits: int) -> Tensor:
    """x with its last axis in 2^bits levels, equally far apart from its smallest number to its
    largest.
    """
    low = x.amin(-1, keepdim=True)
    step = (x.amax(-1, keepdim=True) - low) / (2**bits - 1)
    # A vector whose numbers are all equal has steps of 0, and stays as it is.
    return low + step * ((x - low) / step.clamp(min=1e-30)).round()


def causal_mean(z: Tensor) -> Tensor:
    """The mean of z `[batch pos head d_head]` over the positions up to each."""
    # The cumulative sum of ones counts the positions.
    return z.cumsum(1) / (z[:1, :, :1, :1] * 0 + 1).cumsum(1)


def effect(dz: Tensor, change: Tensor) -> Tensor:
    """Σ_q ⟨∂L/∂z[q], z'[q] - z[q]⟩: `[batch head]`."""
    return (dz * change).sum((1, 3))


@statistic(
    "after Xiao et al. 2024, arXiv 2410.10819",
    defined=has_distant_keys,
    measured_by="stream_heads({sink},{recent},L{layer}H{head})",
)
def effect_window(
    pattern: Pattern, v: Tensor, z: Tensor, dz: Tensor, *, sink: Index = 4, recent: Count = 64
) -> NatsPerToken:
    """Rise of the loss, to first order, if the head sees only the first `sink` keys and the last
    `recent`.

    Σ_q ⟨∂L/∂z[q], z'[q] - z[q]⟩, z'[q] = Σ_{k∈K} A[q,k] v[k] / (Σ_{k∈K} A[q,k] + gate[q]),
    K = {k: k < sink or q-k < recent}

    -1 times the gradient of DuoAttention's gate at 1.

    >>> a = pattern([[1, 0, 0], [0.5, 0.5, 0], [0.5, 0.25, 0.25]])
    >>> v, z, dz = vectors([0], [4], [8]), vectors([0], [2], [3]), vectors([1], [1], [1])
    >>> effect_window(a, v, z, dz, sink=0, recent=2).item()
    3.0
    """
    return effect(dz, pattern.within(sink, recent, v) - z)


@statistic("after Xiao et al. 2024, arXiv 2410.10819", defined=has_distant_keys, missing=HIDDEN_Z)
def direct_effect_window(
    pattern: Pattern,
    v: Tensor,
    z: Tensor,
    direct_dz: Tensor,
    *,
    sink: Index = 4,
    recent: Count = 64,
) -> NatsPerToken:
    """Direct part of `effect_window`.

    Σ_q ⟨D[q], z'[q] - z[q]⟩, D the direct part of ∂L/∂z

    >>> a = pattern([[1, 0, 0], [0.5, 0.5, 0], [0.5, 0.25, 0.25]])
    >>> v, z, D = vectors([0], [4], [8]), vectors([0], [2], [3]), vectors([1], [1], [2])
    >>> direct_effect_window(a, v, z, D, sink=0, recent=2).item()
    6.0
    """
    return effect(direct_dz, pattern.within(sink, recent, v) - z)


@statistic(
    "after Wang et al. 2022, arXiv 2211.00593",
    defined=has_next_token,
    measured_by="mean_head({layer},{head})",
)
def effect_mean(z: Tensor, dz: Tensor) -> NatsPerToken:
    """Rise of the loss, to first order, if the head's output becomes its mean over the positions up
    to each.

    Σ_q ⟨∂L/∂z[q], z'[q] - z[q]⟩, z'[q] = 1/(q+1) Σ_{p≤q} z[p]

    >>> effect_mean(vectors([1], [3]), vectors([5], [2])).item()
    -2.0
    """
    return effect(dz, causal_mean(z) - z)


@statistic("after Wang et al. 2022, arXiv 2211.00593", defined=has_next_token, missing=HIDDEN_Z)
def direct_effect_mean(z: Tensor, direct_dz: Tensor) -> NatsPerToken:
    """Direct part of `effect_mean`.

    Σ_q ⟨D[q], z'[q] - z[q]⟩, D the direct part of ∂L/∂z

    >>> direct_effect_mean(vectors([1], [3]), vectors([5], [2])).item()
    -2.0
    """
    return effect(direct_dz, causal_mean(z) - z)


@statistic(
    "after Liu et al. 2024, arXiv 2402.02750",
    defined=has_next_token,
    measured_by="quantise_values({layer},{head},{bits})",
)
def effect_quantised_values(v: Tensor, dv: Tensor, *, bits: Bits = 4) -> NatsPerToken:
    """Rise of the loss, to first order, if the head's values have so many `bits`; the same for all
    query heads that share them.

    Σ_h Σ_q ⟨∂L/∂z[q], z'[q] - z[q]⟩ over the heads h that share v, z'[q] = Σ_k A[q,k] Q(v[k]),
    Q(x) = min x + s round((x - min x)/s), s = (max x - min x)/(2^bits - 1)

    >>> effect_quantised_values(vectors([0, 2, 6]), vectors([0, 1, 0]), bits=1).item()
    -2.0
    """
    # The same, because ∂L/∂v[k] = Σ_h Σ_q A[q,k] ∂L/∂z[q].
    return effect(dv, quantised(v, bits) - v)


@statistic("after Liu et al. 2024, arXiv 2402.02750", defined=has_next_token, missing=HIDDEN_Z)
def direct_effect_quantised_values(
    pattern: Pattern, v: Tensor, direct_dz: Tensor, *, bits: Bits = 4
) -> NatsPerToken:
    """Direct part of `effect_quantised_values`.

    Σ_h Σ_q ⟨D[q], z'[q] - z[q]⟩ over the heads h that share v, D the direct part of ∂L/∂z

    >>> a = pattern([[1.0]])
    >>> direct_effect_quantised_values(a, vectors([0, 2, 6]), vectors([0, 1, 0]), bits=1).item()
    -2.0
    """
    return pattern.shared(effect(direct_dz, pattern.weighted(quantised(v, bits) - v)))


@statistic(
    "after Liu et al. 2024, arXiv 2402.02750",
    defined=has_next_token,
    measured_by="quantise_keys({layer},{head},{bits})",
)
def effect_quantised_keys(
    pattern: Pattern, k: Tensor, v: Tensor, z: Tensor, dz: Tensor, *, bits: Bits = 4
) -> NatsPerToken:
    """Rise of the loss, to first order in z, if the head's keys have so many `bits`; the same for
    all query heads that share them.

    Σ_h Σ_q ⟨∂L/∂z[q], z'[q] - z[q]⟩ over the heads h that share k, z' the output of the pattern
    that Q(k) makes, k after any rotation, Q(x) = min x + s round((x - min x)/s),
    s = (max x - min x)/(2^bits - 1)

    >>> q, k, v = vectors([0, 0, 0]), vectors([0, 2, 6]), vectors([5])
    >>> effect_quantised_keys(products(q, k), k, v, v, vectors([1]), bits=1).item()
    0.0
    """
    return pattern.shared(effect(dz, pattern.with_keys(quantised(k, bits), v) - z))


@statistic("after Liu et al. 2024, arXiv 2402.02750", defined=has_next_token, missing=HIDDEN_Z)
def direct_effect_quantised_keys(
    pattern: Pattern, k: Tensor, v: Tensor, z: Tensor, direct_dz: Tensor, *, bits: Bits = 4
) -> NatsPerToken:
    """Direct part of `effect_quantised_keys`.

    Σ_h Σ_q ⟨D[q], z'[q] - z[q]⟩ over the heads h that share k, D the direct part of ∂L/∂z

    >>> q, k, v = vectors([0, 0, 0]), vectors([0, 2, 6]), vectors([5])
    >>> direct_effect_quantised_keys(products(q, k), k, v, v, vectors([1]), bits=1).item()
    0.0
    """
    return pattern.shared(effect(direct_dz, pattern.with_keys(quantised(k, bits), v) - z))


@statistic(
    "Michel et al. 2019, arXiv 1905.10650",
    defined=has_next_token,
    measured_by="zero_head({layer},{head})",
)
def effect_zero_magnitude(z: Tensor, dz: Tensor) -> NatsPerToken:
    """Size of the change of the loss, to first order, if the head's output becomes zero.

    |Σ_q ⟨∂L/∂z[q], z[q]⟩|

    Its mean over sequences ranks heads. Without the bars that mean is about 0 in a trained model.

    >>> effect_zero_magnitude(vectors([1], [3]), vectors([2], [-4])).item()
    10.0
    """
    return effect(dz, z).abs()


@statistic("standard", defined=has_next_token)
def gradient_norm(dz: Tensor) -> Norm:
    """Norm of the gradient of the loss by the head's output, all positions together.

    (Σ_q ‖∂L/∂z[q]‖₂²)^½

    >>> gradient_norm(vectors([3], [4])).item()
    5.0
    """
    return dz.square().sum((1, 3)).sqrt()


@statistic("after arXiv 2603.17771", defined=has_next_token, of_directions=True)
def gradient_sink_share(dv: Tensor) -> ShareOfNorms:
    """Share of the norms of the gradients by the head's values that is the first position's; the
    same for all query heads that share them.

    ‖∂L/∂v[0]‖₂ / Σ_k ‖∂L/∂v[k]‖₂

    >>> gradient_sink_share(vectors([3], [1])).item()
    0.75
    """
    norms = dv.norm(dim=-1)  # [batch pos head]
    return norms[:, 0] / norms.sum(1)


@statistic("Elhage et al. 2021", defined=has_next_token, missing=HIDDEN_Z)
def direct_effect(z: Tensor, direct_dz: Tensor) -> NatsPerToken:
    """Direct part of the rise of the loss, to first order, if the head's output becomes zero.

    1/(T-1) Σ_{q<T-1} ⟨W_Oᵀ Jᵀ W_U (onehot(t[q+1]) - p[q]), z[q]⟩, J the last norm with its scale
    frozen

    >>> direct_effect(vectors([1], [3]), vectors([2], [-4])).item()
    10.0
    """
    return -effect(direct_dz, z)


@statistic("Elhage et al. 2021", defined=has_next_token, missing=HIDDEN_Z)
def direct_logit(z: Tensor, logit_dz: Tensor) -> Logits:
    """What the head adds straight to the logit of the next token, less the mean over the
    vocabulary; before any cap of the logits.

    1/(T-1) Σ_{q<T-1} ⟨W_Oᵀ Jᵀ (W_U[t[q+1]] - mean W_U), z[q]⟩, J the last norm with its scale
    frozen

    >>> direct_logit(vectors([1], [3]), vectors([2], [4])).item()
    14.0
    """
    return effect(logit_dz, z)
