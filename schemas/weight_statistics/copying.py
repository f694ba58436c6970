"""Whether a head makes the tokens that it attends to more probable."""

from headcount.schemas.formula_kinds import weight
from headcount.schemas.pattern import Tensor
from headcount.schemas.units import Share
from headcount.schemas.weight_statistics.composition import ELHAGE


@weight(ELHAGE, axis="none", of_directions=True)
def copying_score(copying_eigenvalues: Tensor) -> Share:
    """How much attending to a token raises its own logit, from -1 (always lowers) to 1 (copies).

    Σ_i Re λ_i / Σ_i |λ_i|, λ the eigenvalues of W_E read_V W_O read_U

    read_V and read_U hold the norms before them.

    >>> copying_score(head([[3, 3], [0, 1]])).tolist()
    [0.75]
    """
    real_parts, sizes = copying_eigenvalues[..., 0], copying_eigenvalues[..., 1]
    return real_parts.sum(-1) / sizes.sum(-1)
