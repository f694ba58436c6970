"""What makes the logit of the next token: a decomposition that adds up."""

from headcount.schemas.formula_kinds import profile
from headcount.schemas.pattern import Tensor
from headcount.schemas.units import Logits


@profile("Elhage et al. 2021", axis="part", missing="a layer adds to the stream in another way")
def direct_logit_of_parts(logit_parts: Tensor) -> Logits:
    """What each part of a layer adds straight to the logit of the next token, less the mean over
    the vocabulary; before any cap of the logits, with the scale of the last norm frozen.

    1/(T-1) Σ_{q<T-1} ⟨Jᵀ (W_U[t[q+1]] - mean W_U), x[q]⟩ for x = the embeddings (layer 0), all
    heads, what else the attention adds, the MLP, biases behind the stream (last layer)

    The sum over parts and layers is the whole mean centred logit.

    >>> direct_logit_of_parts(nats([1.0, 2.0, 0.0, 3.0, 0.0])).tolist()
    [[1.0, 2.0, 0.0, 3.0, 0.0]]
    """
    return logit_parts
