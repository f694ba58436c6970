"""Norms of queries, keys, values, head outputs and the residual stream."""

from headcount.schemas.formula_kinds import statistic
from headcount.schemas.pattern import Tensor
from headcount.schemas.units import AbsoluteValue, Norm

CACHED = "after KIVI, Liu et al. 2024, arXiv 2402.02750"


def largest_size(vectors: Tensor) -> Tensor:
    """Largest absolute value of a component of `vectors [batch pos head d_head]`."""
    # Without a copy of the absolute values.
    largest, smallest = vectors.amax(1).amax(-1), vectors.amin(1).amin(-1)
    return largest.maximum(-smallest)


@statistic("Sandoval-Segura et al. 2025, arXiv 2504.03889", standard=True, shown=4)
def value_norm(v: Tensor) -> Norm:
    """Mean norm of the value vectors.

    1/T Σ_k ‖v[k]‖₂

    >>> value_norm(vectors([3, 4], [0, 0])).item()
    2.5
    """
    return v.norm(dim=-1).mean(1)


@statistic("Sandoval-Segura et al. 2025, arXiv 2504.03889", standard=True, marks="first key")
def sink_value_norm(v: Tensor) -> Norm:
    """Norm of the value vector at position 0.

    ‖v[0]‖₂

    >>> sink_value_norm(vectors([3, 4], [0, 0])).item()
    5.0
    """
    return v[:, 0].norm(dim=-1)


@statistic("Gu et al. 2024, arXiv 2410.10781", standard=True)
def key_norm(k: Tensor) -> Norm:
    """Mean norm of the key vectors.

    1/T Σ_k ‖k[k]‖₂

    >>> key_norm(vectors([3, 4], [0, 0])).item()
    2.5
    """
    return k.norm(dim=-1).mean(1)


@statistic("Gu et al. 2024, arXiv 2410.10781", standard=True, marks="first key")
def sink_key_norm(k: Tensor) -> Norm:
    """Norm of the key vector at position 0.

    ‖k[0]‖₂

    >>> sink_key_norm(vectors([3, 4], [0, 0])).item()
    5.0
    """
    return k[:, 0].norm(dim=-1)


@statistic("Gu et al. 2024, arXiv 2410.10781", standard=True)
def query_norm(q: Tensor) -> Norm:
    """Mean norm of the query vectors.

    1/T Σ_q ‖q[q]‖₂

    >>> query_norm(vectors([3, 4], [0, 0])).item()
    2.5
    """
    return q.norm(dim=-1).mean(1)


@statistic("Sandoval-Segura et al. 2025, arXiv 2504.03889", standard=True, shown=6)
def head_output_norm(z: Tensor) -> Norm:
    """Mean norm of the head's output before W_O.

    1/T Σ_q ‖z[q]‖₂, z[q] = Σ_k A[q,k] v[k]

    >>> head_output_norm(vectors([3, 4], [0, 0])).item()
    2.5
    """
    return z.norm(dim=-1).mean(1)


@statistic("Guo et al. 2024, arXiv 2410.13835", standard=True)
def resid_pre_norm(resid_pre: Tensor) -> Norm:
    """Mean norm of the residual stream before the layer, position 0 included; the same for all
    heads.

    1/T Σ_k ‖resid_pre[k]‖₂

    >>> resid_pre_norm(stream([3, 4], [0, 0])).item()
    2.5
    """
    return resid_pre.norm(dim=-1).mean(1)


@statistic("Guo et al. 2024, arXiv 2410.13835", standard=True, marks="first key")
def sink_resid_pre_norm(resid_pre: Tensor) -> Norm:
    """Norm of the residual stream before the layer at position 0; the same for all heads.

    ‖resid_pre[0]‖₂

    >>> sink_resid_pre_norm(stream([3, 4], [0, 0])).item()
    5.0
    """
    return resid_pre[:, 0].norm(dim=-1)


@statistic("Guo et al. 2024, arXiv 2410.13835", standard=True)
def resid_post_norm(resid_post: Tensor) -> Norm:
    """Mean norm of the residual stream after the layer, position 0 included; the same for all
    heads.

    1/T Σ_k ‖resid_post[k]‖₂

    >>> resid_post_norm(stream([3, 4], [0, 0])).item()
    2.5
    """
    return resid_post.norm(dim=-1).mean(1)


@statistic("Guo et al. 2024, arXiv 2410.13835", standard=True, marks="first key")
def sink_resid_post_norm(resid_post: Tensor) -> Norm:
    """Norm of the residual stream after the layer at position 0; the same for all heads.

    ‖resid_post[0]‖₂

    >>> sink_resid_post_norm(stream([3, 4], [0, 0])).item()
    5.0
    """
    return resid_post[:, 0].norm(dim=-1)


@statistic(CACHED)
def query_absmax(q: Tensor) -> AbsoluteValue:
    """Largest absolute value of a component of the queries, after any rotation.

    max_q max_d |q[q,d]|

    >>> query_absmax(vectors([3, -4], [0, 2])).item()
    4.0
    """
    return largest_size(q)


@statistic(CACHED)
def key_absmax(k: Tensor) -> AbsoluteValue:
    """Largest absolute value of a component of the keys as a cache stores them, after any rotation.

    max_k max_d |k[k,d]|

    >>> key_absmax(vectors([3, -4], [0, 2])).item()
    4.0
    """
    return largest_size(k)


@statistic(CACHED)
def value_absmax(v: Tensor) -> AbsoluteValue:
    """Largest absolute value of a component of the values as a cache stores them.

    max_k max_d |v[k,d]|

    >>> value_absmax(vectors([3, -4], [0, 2])).item()
    4.0
    """
    return largest_size(v)
