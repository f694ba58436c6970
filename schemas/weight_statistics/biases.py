"""The query bias: the coordinates and the positions that it makes every query look for."""

from headcount.schemas.formula_kinds import weight
from headcount.schemas.pattern import Tensor
from headcount.schemas.statistics.decomposition import has_fixed_positions
from headcount.schemas.units import Cosine, Norm, ScaledLogits

RAN_MILO = "Ran-Milo et al. 2026, arXiv 2604.14722"


@weight(f"after {RAN_MILO}", axis="none")
def query_bias_norm(b_Q: Tensor) -> Norm:
    """Norm of the query bias.

    ‖b_Q‖₂

    >>> query_bias_norm(head([3, 4])).tolist()
    [5.0]
    """
    return b_Q.norm(dim=-1)


@weight(f"{RAN_MILO}, figure 4", axis="dimension", defined=has_fixed_positions)
def bias_key_coupling(b_Q: Tensor, W_K: Tensor) -> ScaledLogits:
    """How much one unit of a coordinate of a key's input adds to that key's score, for every query.

    γ[d] = Σ_e b_Q[e] W_K[d,e]

    With x[k] the input after the norm, Σ_d x[k,d] γ[d] is Δ[k] of `score_shift_by_key`.

    >>> bias_key_coupling(head([1, 2]), head([[3, 4], [5, -1]])).tolist()
    [[11.0, 3.0]]
    """
    return (W_K @ b_Q[..., None])[..., 0]


@weight(f"{RAN_MILO}, figure 2", axis="position", defined=has_fixed_positions, of_directions=True)
def bias_position_cosine(b_Q: Tensor, W_K: Tensor, effective: Tensor) -> Cosine:
    """Cosine of the query bias and the key that an effective position makes.

    cos(b_Q, EPE[j] W_K), EPE[j] = W_pos[j] + MLP_0(W_pos[j])

    >>> W_K, effective = head([[1, 0], [0, 1]]), stream([6, 8], [-4, 3])[0]
    >>> bias_position_cosine(head([3, 4]), W_K, effective).tolist()
    [[1.0, 0.0]]
    """
    keys = effective @ W_K
    return (keys @ b_Q[..., None])[..., 0] / (keys.norm(dim=-1) * b_Q.norm(dim=-1)[..., None])
