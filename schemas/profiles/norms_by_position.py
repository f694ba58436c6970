"""Norms of vectors, position by position."""

from headcount.schemas.formula_kinds import profile
from headcount.schemas.pattern import Tensor
from headcount.schemas.statistics.head_results import result_norms
from headcount.schemas.units import Norm


@profile("Gu et al. 2024, arXiv 2410.10781", axis="key")
def value_norm_by_key(v: Tensor) -> Norm:
    """Norm of the value vector.

    ‖v[k]‖₂

    >>> value_norm_by_key(vectors([3, 4], [0, 1])).tolist()
    [[[5.0, 1.0]]]
    """
    return _by_head(v.norm(dim=-1))


@profile("Guo et al. 2024, arXiv 2410.13835", axis="key")
def value_result_norm_by_key(v: Tensor, W_O: Tensor) -> Norm:
    """Norm of the value vector after W_O.

    ‖v[k] W_O‖₂

    >>> value_result_norm_by_key(vectors([1], [0]), head([[3, 4]])).tolist()
    [[[5.0, 0.0]]]
    """
    return result_norms(v, W_O)


@profile("Gu et al. 2024, arXiv 2410.10781", axis="key")
def key_norm_by_key(k: Tensor) -> Norm:
    """Norm of the key vector.

    ‖k[k]‖₂

    >>> key_norm_by_key(vectors([3, 4], [0, 1])).tolist()
    [[[5.0, 1.0]]]
    """
    return _by_head(k.norm(dim=-1))


@profile("Gu et al. 2024, arXiv 2410.10781", axis="query")
def query_norm_by_query(q: Tensor) -> Norm:
    """Norm of the query vector.

    ‖q[q]‖₂

    >>> query_norm_by_query(vectors([3, 4], [0, 1])).tolist()
    [[[5.0, 1.0]]]
    """
    return _by_head(q.norm(dim=-1))


@profile("Farrell 2023, recency bias", axis="query")
def head_output_norm_by_query(z: Tensor) -> Norm:
    """Norm of the head's output before W_O; it falls as 1/√(q+1) under uniform attention.

    ‖z[q]‖₂, z[q] = Σ_k A[q,k] v[k]

    >>> head_output_norm_by_query(vectors([3, 4], [0, 1])).tolist()
    [[[5.0, 1.0]]]
    """
    return _by_head(z.norm(dim=-1))


@profile("Guo et al. 2024, arXiv 2410.13835", axis="key")
def resid_pre_norm_by_key(resid_pre: Tensor) -> Norm:
    """Norm of the residual stream before the layer; the same for all heads.

    ‖resid_pre[k]‖₂

    >>> resid_pre_norm_by_key(stream([3, 4], [0, 1])).tolist()
    [[5.0, 1.0]]
    """
    return resid_pre.norm(dim=-1)


@profile("Guo et al. 2024, arXiv 2410.13835", axis="key")
def resid_post_norm_by_key(resid_post: Tensor) -> Norm:
    """Norm of the residual stream after the layer; the same for all heads.

    ‖resid_post[k]‖₂

    >>> resid_post_norm_by_key(stream([3, 4], [0, 1])).tolist()
    [[5.0, 1.0]]
    """
    return resid_post.norm(dim=-1)


def _by_head(lengths: Tensor) -> Tensor:
    """From `[batch pos head]` to `[batch head pos]`."""
    return lengths.swapaxes(1, 2)
