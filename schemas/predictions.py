"""What a model predicts: columns of the table `sequences`. Each is one function, as a statistic is.

What predictions read is computed only if a scan names a prediction that reads it.
"""

# torch gives `norm` no types.
# pyright: basic

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec

from headcount.schemas.files.tables import SEQUENCES
from headcount.schemas.formulas import Ranged, read_definition
from headcount.schemas.pattern import Tensor
from headcount.schemas.scans.kind import Kind

PREDICTION_INPUTS: dict[str, str] = {
    "tokens": "token ids [batch pos]",
    "positions_known": "whether the model adds positions and its first MLP is a module of its own",
    "token_loss": "-ln p(t[i] | t[<i]) of every token, NaN for the first [batch pos]",
    "final_logit": "logit after the last token of every token of the sequence [batch pos]",
    "final_logprob": "ln p after the last token of every token of the sequence [batch pos]",
    "effective": "effective positions EPE[i] = W_pos[i] + MLP_0(W_pos[i]), without a norm [pos "
    "d_model]",
    "position_after_mlp": "what positions change in e + MLP_0(e), without a norm, of token "
    "embeddings e [batch pos d_model]",
    "position_after_layer": "what positions change in the stream after the first layer [batch pos "
    "d_model]",
    "first_mlp_out": "what the first MLP adds to the stream at position 0 [batch d_model]",
}
"""Every name that a prediction may take as a parameter.

The last four use the untouched weights, without any intervention. They are NaN unless
`positions_known`.
"""


@dataclass(frozen=True, kw_only=True)
class Prediction(Ranged):
    """A registered prediction: a column of `sequences`."""

    per_token: bool
    """Whether it is a list with a value for each of `tokens`."""

    @property
    def facts(self) -> dict[str, Any]:
        """What columns, comments and manifests say about it."""
        return super().facts | {"per_token": self.per_token}


PREDICTIONS: dict[str, Prediction] = {}

P = ParamSpec("P")


def prediction(
    *,
    unit: str,
    range: tuple[float, float],  # noqa: A002
    source: str,
    per_token: bool = False,
    defined: Callable[..., Tensor | bool] | None = None,
    of_directions: bool = False,
) -> Callable[[Callable[P, Tensor]], Callable[P, Any]]:
    """Register a function as a prediction.

    It returns `[batch]`, or `[batch pos]` if it is `per_token`. `defined` is a rule that takes
    prediction inputs too and says, per sequence or per token, where the prediction has a value.
    Elsewhere the column is NULL. It is NULL too if it is `of_directions` and one of its vectors is
    zero.
    """

    def register(function: Callable[P, Tensor]) -> Callable[P, Any]:
        fields = read_definition(
            function, "prediction", PREDICTIONS, "prediction", PREDICTION_INPUTS
        )
        fields |= {"unit": unit, "range": range, "source": source}
        fields |= {"defined": defined, "of_directions": of_directions}
        PREDICTIONS[function.__name__] = Prediction(**fields, per_token=per_token)
        return function

    return register


KIND = Kind(
    field="predictions",
    word="prediction",
    meaning="What the model predicts, columns of the sequences table: a list of names. Default: "
    "none.",
    registry=PREDICTIONS,
    table=SEQUENCES,
    computed="after the pass",
    page="predictions.md",
    introduction="""\
# Predictions

What the model predicts, named in a scan's `predictions`: float32 columns of the table `sequences`.
Those with one value for each token are lists parallel to `tokens`. `t[i]` is a token, T = `n_ctx`.
This page is generated from `schemas/predictions.py` by `make docs`.

Effective positions are known if the model adds positions and its first MLP is a module of its own.
""",
)


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


@prediction(unit="nats", range=(0, math.inf), source="standard", defined=has_second_token)
def loss(token_loss: Tensor) -> Tensor:
    """Mean cross-entropy of the next token.

    1/(T-1) Σ_{i≥1} -ln p(t[i] | t[<i])

    >>> loss(nats([nan, 1, 3])).item()
    2.0
    """
    # The loss of the first token is NaN: nothing predicts it.
    return token_loss[:, 1:].mean(-1)


@prediction(unit="nats", range=(0, math.inf), source="Olsson et al. 2022", defined=has_third_token)
def loss_early(token_loss: Tensor) -> Tensor:
    """Mean cross-entropy of the tokens in the first half; in repeated input, of the first copy.

    1/⌊(T-1)/2⌋ Σ_{1≤i≤⌊(T-1)/2⌋} -ln p(t[i] | t[<i])

    >>> loss_early(nats([nan, 1, 2, 5, 7])).item()
    1.5
    """
    return token_loss[:, 1 : (token_loss.shape[1] + 1) // 2].mean(-1)


@prediction(unit="nats", range=(0, math.inf), source="Olsson et al. 2022", defined=has_second_token)
def loss_late(token_loss: Tensor) -> Tensor:
    """Mean cross-entropy of the tokens in the second half; in repeated input, of the second copy.

    1/⌈(T-1)/2⌉ Σ_{i>⌊(T-1)/2⌋} -ln p(t[i] | t[<i])

    >>> loss_late(nats([nan, 1, 2, 5, 7])).item()
    6.0
    """
    return token_loss[:, (token_loss.shape[1] + 1) // 2 :].mean(-1)


@prediction(
    unit="nats",
    range=(0, math.inf),
    source="standard",
    per_token=True,
    defined=has_earlier_token,
)
def losses(token_loss: Tensor) -> Tensor:
    """Cross-entropy of each token.

    -ln p(t[i] | t[<i])
    """
    return token_loss


@prediction(unit="probability", range=(0, 1), source="Farrell 2023", per_token=True)
def final_probabilities(final_logprob: Tensor) -> Tensor:
    """Probability of each token of the sequence as the next token after the whole sequence.

    p(t[i] | t[0], …, t[T-1])
    """
    return final_logprob.exp()


@prediction(unit="logit", range=(-math.inf, math.inf), source="Farrell 2023", per_token=True)
def final_logits(final_logit: Tensor) -> Tensor:
    """Logit of each token of the sequence as the next token after the whole sequence, up to a
    constant of the sequence.

    logit(t[i] | t[0], …, t[T-1])
    """
    return final_logit


@prediction(
    unit="cosine",
    range=(-1, 1),
    source="Ran-Milo et al. 2026, arXiv 2604.14722, figure 3",
    per_token=True,
    defined=has_known_positions,
    of_directions=True,
)
def position_cosine_mlp(effective: Tensor, position_after_mlp: Tensor) -> Tensor:
    """Cosine of each effective position and the change that the position makes after the first MLP.

    cos(EPE[i], (x + MLP_0(x)) - (e + MLP_0(e))), EPE[i] = W_pos[i] + MLP_0(W_pos[i]), x = e +
    W_pos[i], e the token's embedding

    >>> position_cosine_mlp(stream([3, 4])[0], stream([8, -6])).tolist()
    [[0.0]]
    """
    return _cosine(effective, position_after_mlp)


@prediction(
    unit="cosine",
    range=(-1, 1),
    source="Ran-Milo et al. 2026, arXiv 2604.14722, figure 3",
    per_token=True,
    defined=has_known_positions,
    of_directions=True,
)
def position_cosine_layer(effective: Tensor, position_after_layer: Tensor) -> Tensor:
    """Cosine of each effective position and the change that positions make after the first layer.

    cos(EPE[i], L_0(e + W_pos)[i] - L_0(e)[i]), EPE[i] = W_pos[i] + MLP_0(W_pos[i]), L_0 the first
    layer, e the token embeddings

    >>> position_cosine_layer(stream([3, 4])[0], stream([6, 8])).tolist()
    [[1.0]]
    """
    return _cosine(effective, position_after_layer)


@prediction(
    unit="euclidean norm",
    range=(0, math.inf),
    source="Ran-Milo et al. 2026, arXiv 2604.14722",
    defined=has_known_positions,
)
def first_mlp_norm(first_mlp_out: Tensor) -> Tensor:
    """Norm of what the first MLP adds to the residual stream at position 0.

    ‖m‖₂, m = output of the MLP of layer 0 at position 0

    >>> first_mlp_norm(stream([3, 4])[0]).tolist()
    [5.0]
    """
    return first_mlp_out.norm(dim=-1)


@prediction(
    unit="length along a direction",
    range=(-math.inf, math.inf),
    source="Ran-Milo et al. 2026, arXiv 2604.14722, intervention d",
    defined=has_known_positions,
    of_directions=True,
)
def first_mlp_position_part(first_mlp_out: Tensor, effective: Tensor) -> Tensor:
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
