"""Norms of what a head writes to the residual stream: vectors after W_O."""

from headcount.schemas.formula_kinds import statistic
from headcount.schemas.pattern import Tensor
from headcount.schemas.units import Norm


def result_norms(x: Tensor, W_O: Tensor) -> Tensor:
    """‖x W_O‖₂ of every `x [batch pos head d_head]`: `[batch head pos]`."""
    # ‖x W_O‖² = x (W_O W_Oᵀ) xᵀ. The product in parentheses is d_head × d_head, far smaller than
    # vectors of d_model. Rounding may leave a tiny negative number, which has no root.
    x = x.transpose(1, 2)
    return ((x @ (W_O @ W_O.mT)) * x).sum(-1).clamp(min=0).sqrt()


@statistic("Sandoval-Segura et al. 2025, arXiv 2504.03889")
def head_output_norm_last(z: Tensor) -> Norm:
    """Norm of the head's output at the last query, before W_O.

    ‖z[T-1]‖₂, z[q] = Σ_k A[q,k] v[k]

    >>> head_output_norm_last(vectors([0, 0], [3, 4])).item()
    5.0
    """
    return z[:, -1].norm(dim=-1)


@statistic("Sandoval-Segura et al. 2025, arXiv 2504.03889")
def head_result_norm(z: Tensor, W_O: Tensor) -> Norm:
    """Mean norm of what the head writes to the residual stream.

    1/T Σ_q ‖z[q] W_O‖₂, z[q] = Σ_k A[q,k] v[k]

    >>> head_result_norm(vectors([1], [0]), head([[3, 4]])).item()
    2.5
    """
    return result_norms(z, W_O).mean(-1)


@statistic("Sandoval-Segura et al. 2025, arXiv 2504.03889")
def head_result_norm_last(z: Tensor, W_O: Tensor) -> Norm:
    """Norm of what the head writes to the residual stream at the last query.

    ‖z[T-1] W_O‖₂, z[q] = Σ_k A[q,k] v[k]

    >>> head_result_norm_last(vectors([1], [2]), head([[3, 4]])).item()
    10.0
    """
    return result_norms(z[:, -1:], W_O)[..., 0]


@statistic("Guo et al. 2024, arXiv 2410.13835")
def value_result_norm(v: Tensor, W_O: Tensor) -> Norm:
    """Mean norm of the value vectors after W_O, position 0 included.

    1/T Σ_k ‖v[k] W_O‖₂

    >>> value_result_norm(vectors([1], [0]), head([[3, 4]])).item()
    2.5
    """
    return result_norms(v, W_O).mean(-1)


@statistic("Guo et al. 2024, arXiv 2410.13835", marks="first key")
def sink_value_result_norm(v: Tensor, W_O: Tensor) -> Norm:
    """Norm of the value vector at position 0 after W_O.

    ‖v[0] W_O‖₂

    >>> sink_value_result_norm(vectors([2], [0]), head([[3, 4]])).item()
    10.0
    """
    return result_norms(v[:, :1], W_O)[..., 0]
