"""What a model predicts: columns of the table `sequences`. Each is one function, as a statistic is.

What predictions read is computed only if a scan names a prediction that reads it.
"""

# torch gives `norm` no types.
# pyright: basic

from headcount.schemas.formula_kinds import PREDICTIONS as PREDICTIONS
from headcount.schemas.formula_kinds import prediction
from headcount.schemas.pattern import Tensor
from headcount.schemas.units import Cosine, Length, Logit, Nats, Norm, Probability, ShareOfTokens

PROFILER = "Scheuer, attention-sink-profiler"
RAN_MILO = "Ran-Milo et al. 2026, arXiv 2604.14722"


def has_second_token(tokens: Tensor) -> bool:
    """there are at least two tokens."""
    return tokens.shape[1] > 1


def has_third_token(tokens: Tensor) -> bool:
    """there are at least three tokens."""
    return tokens.shape[1] > 2


def has_earlier_token(tokens: Tensor) -> Tensor:
    """some token stands before it."""
    # The cumulative sum of ones is the position from 1, on the device of the tokens.
    return (tokens * 0 + 1).cumsum(1) > 1


def has_known_positions(positions_known: Tensor) -> Tensor:
    """effective positions are known."""
    return positions_known


@prediction("standard", defined=has_second_token)
def loss(token_loss: Tensor) -> Nats:
    """Mean cross-entropy of the next token.

    1/(T-1) Σ_{i≥1} -ln p(t[i] | t[<i])

    >>> loss(nats([nan, 1, 3])).item()
    2.0
    """
    # The loss of the first token is NaN: nothing predicts it.
    return token_loss[:, 1:].mean(-1)


@prediction("Olsson et al. 2022", defined=has_third_token)
def loss_early(token_loss: Tensor) -> Nats:
    """Mean cross-entropy of the tokens in the first half; in repeated input, of the first copy.

    1/⌊(T-1)/2⌋ Σ_{1≤i≤⌊(T-1)/2⌋} -ln p(t[i] | t[<i])

    >>> loss_early(nats([nan, 1, 2, 5, 7])).item()
    1.5
    """
    return token_loss[:, 1 : (token_loss.shape[1] + 1) // 2].mean(-1)


@prediction("Olsson et al. 2022", defined=has_second_token)
def loss_late(token_loss: Tensor) -> Nats:
    """Mean cross-entropy of the tokens in the second half; in repeated input, of the second copy.

    1/⌈(T-1)/2⌉ Σ_{i>⌊(T-1)/2⌋} -ln p(t[i] | t[<i])

    >>> loss_late(nats([nan, 1, 2, 5, 7])).item()
    6.0
    """
    return token_loss[:, (token_loss.shape[1] + 1) // 2 :].mean(-1)


@prediction("standard", per_token=True, defined=has_earlier_token)
def losses(token_loss: Tensor) -> Nats:
    """Cross-entropy of each token.

    -ln p(t[i] | t[<i])
    """
    return token_loss


@prediction("Farrell 2023", per_token=True)
def final_probabilities(final_logprob: Tensor) -> Probability:
    """Probability of each token of the sequence as the next token after the whole sequence.

    p(t[i] | t[0], …, t[T-1])
    """
    return final_logprob.exp()


@prediction("Farrell 2023", per_token=True)
def final_logits(final_logit: Tensor) -> Logit:
    """Logit of each token of the sequence as the next token after the whole sequence, up to a
    constant of the sequence.

    logit(t[i] | t[0], …, t[T-1])
    """
    return final_logit


@prediction(PROFILER)
def final_divergence(divergence: Tensor) -> Nats:
    """Kullback-Leibler divergence of the next token's distribution after the whole sequence from
    that of the untouched model.

    Σ_w p(w) ln(p(w) / p'(w)), p of the untouched model, p' under the intervention

    Without an intervention it is 0.
    """
    return divergence


@prediction(PROFILER)
def final_top1_agreement(final_candidates: Tensor, untouched_candidates: Tensor) -> ShareOfTokens:
    """Whether the most probable token after the whole sequence is that of the untouched model.

    1 if argmax_w p'(w) = argmax_w p(w), else 0; p of the untouched model, p' under the intervention

    >>> final_top1_agreement(*candidates([7, 2, 5], [2, 7, 5])).tolist()
    [0.0]
    """
    return (final_candidates[:, 0] == untouched_candidates[:, 0]).float()


@prediction(PROFILER)
def final_top5_agreement(final_candidates: Tensor, untouched_candidates: Tensor) -> ShareOfTokens:
    """Share of the five most probable tokens of the untouched model after the whole sequence that
    are among the five under the intervention.

    1/5 |{five w of largest p(w)} ∩ {five w of largest p'(w)}|, p of the untouched model, p' under
    the intervention

    Of tokens that tie to 1e-5, those with smaller numbers. Without an intervention it is 1.

    >>> final_top5_agreement(*candidates([7, 2, 5, 1, 0], [2, 7, 9, 8, 4])).item()
    0.4000000059604645
    """
    is_common = final_candidates[:, :, None] == untouched_candidates[:, None]
    return is_common.any(-1).float().mean(-1)


@prediction(
    f"{RAN_MILO}, figure 3", per_token=True, defined=has_known_positions, of_directions=True
)
def position_cosine_mlp(effective: Tensor, position_after_mlp: Tensor) -> Cosine:
    """Cosine of each effective position and the change that the position makes after the first MLP.

    cos(EPE[i], (x + MLP_0(x)) - (e + MLP_0(e))), EPE[i] = W_pos[i] + MLP_0(W_pos[i]), x = e +
    W_pos[i], e the token's embedding

    >>> position_cosine_mlp(stream([3, 4])[0], stream([8, -6])).tolist()
    [[0.0]]
    """
    return _cosine(effective, position_after_mlp)


@prediction(
    f"{RAN_MILO}, figure 3", per_token=True, defined=has_known_positions, of_directions=True
)
def position_cosine_layer(effective: Tensor, position_after_layer: Tensor) -> Cosine:
    """Cosine of each effective position and the change that positions make after the first layer.

    cos(EPE[i], L_0(e + W_pos)[i] - L_0(e)[i]), EPE[i] = W_pos[i] + MLP_0(W_pos[i]), L_0 the first
    layer, e the token embeddings

    >>> position_cosine_layer(stream([3, 4])[0], stream([6, 8])).tolist()
    [[1.0]]
    """
    return _cosine(effective, position_after_layer)


@prediction(RAN_MILO, defined=has_known_positions)
def first_mlp_norm(first_mlp_out: Tensor) -> Norm:
    """Norm of what the first MLP adds to the residual stream at position 0.

    ‖m‖₂, m = output of the MLP of layer 0 at position 0

    >>> first_mlp_norm(stream([3, 4])[0]).tolist()
    [5.0]
    """
    return first_mlp_out.norm(dim=-1)


@prediction(f"{RAN_MILO}, intervention d", defined=has_known_positions, of_directions=True)
def first_mlp_position_part(first_mlp_out: Tensor, effective: Tensor) -> Length:
    """Part of what the first MLP adds at position 0 that lies along the first effective position,
    which `swap_effective_positions` moves.

    α = m·EPE[0] / ‖EPE[0]‖₂, m = output of the MLP of layer 0 at position 0, EPE[0] = W_pos[0] +
    MLP_0(W_pos[0])

    >>> first_mlp_position_part(stream([3, 4])[0], stream([0, 2], [9, 9])[0]).tolist()
    [4.0]
    """
    first = effective[0]
    return (first_mlp_out * first).sum(-1) / first.norm(dim=-1)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine along the last axis; NaN if a vector is zero."""
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
