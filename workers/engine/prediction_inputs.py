"""What predictions read, without ever holding all logits, and what the first layer makes of
positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from schemas.errors import ModelError
from workers.engine.dense_engine import DenseEngine
from workers.engine.edits import Edit, Edits
from workers.engine.engine import Activations, Done
from workers.model.model import Model

CHUNK_BYTES = 64 << 20
"""Logits that are held at a time."""


class PredictionInputs(dict[str, Tensor]):
    """What `schemas.predictions.PREDICTION_INPUTS` names, each computed when it is first asked for.

    `hidden` is the stream after the last norm `[batch pos d_model]`.
    """

    def __init__(self, model: Model, hidden: Tensor, tokens: Tensor) -> None:
        super().__init__()
        self.model, self.hidden, self.tokens = model, hidden, tokens

    def __missing__(self, name: str) -> Tensor:
        self.update(COMPUTED_BY[name](self))
        return self[name]

    def rows(self, stream: Tensor) -> list[Tensor]:
        """A stream in pieces whose logits may be held."""
        return list(stream.split(max(1, CHUNK_BYTES // (4 * self.model.info.d_vocab))))

    def unembed(self, x: Tensor) -> Tensor:
        """Logits of a part of the stream."""
        return self.model.unembed(x)


def check_unembedding(model: Model) -> None:
    """Refuse a model whose predictions are not the softmax of its unembedding."""
    if model.logit_field is not None:
        raise ModelError(
            f"{model.info.name}: {model.logit_field} changes its logits, which predictions do not "
            "know; leave predictions out"
        )
    if not model.modules("unembed"):
        raise ModelError(f"{model.info.name}: no unembedding was found; leave predictions out")


def _token_losses(p: PredictionInputs) -> dict[str, Tensor]:
    before, target = p.hidden[:, :-1].flatten(0, 1), p.tokens[:, 1:].flatten()
    losses = [_losses(p.unembed(x), t) for x, t in zip(p.rows(before), p.rows(target), strict=True)]
    token_loss = p.hidden.new_full(p.tokens.shape, math.nan)
    if losses:
        token_loss[:, 1:] = torch.cat(losses).view(len(p.tokens), -1)
    return {"token_loss": token_loss}


def _losses(logits: Tensor, target: Tensor) -> Tensor:
    return logits.logsumexp(-1) - logits.gather(-1, target[:, None])[:, 0]


def _finals(p: PredictionInputs) -> dict[str, Tensor]:
    ends = zip(p.rows(p.hidden[:, -1]), p.rows(p.tokens), strict=True)
    final, logprobs = zip(*(_final(p.unembed(x), t) for x, t in ends), strict=True)
    return {"final_logit": torch.cat(final), "final_logprob": torch.cat(logprobs)}


def _final(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    own = logits.gather(-1, tokens)
    return own, own - logits.logsumexp(-1, keepdim=True)


def _positions(p: PredictionInputs) -> dict[str, Tensor]:
    """Effective positions, and what positions change when they meet tokens."""
    positions, mlps = p.model.positions, p.model.modules("mlp_out")
    effective = p.model.effective_positions(p.tokens.shape[1])
    if positions is None or effective is None or not mlps:
        nowhere = p.hidden.new_full((*p.tokens.shape, 1), math.nan)
        return {
            "positions_known": torch.zeros((), dtype=torch.bool, device=p.tokens.device),
            "effective": nowhere[0],
            "position_after_mlp": nowhere,
            "position_after_layer": nowhere,
        }
    positions = positions[: p.tokens.shape[1]]
    tokens = p.model.embed(p.tokens)
    both = tokens + positions
    return {
        "positions_known": torch.ones((), dtype=torch.bool, device=p.tokens.device),
        "effective": effective,
        "position_after_mlp": positions + mlps[0](both) - mlps[0](tokens),
        "position_after_layer": _first_layer(p, Edits()) - _first_layer(p, WITHOUT_POSITIONS),
    }


def _first_layer(p: PredictionInputs, edits: Edits) -> Tensor:
    """The stream after the first layer `[batch pos d_model]`."""
    streams: list[Tensor] = []

    def keep(_layer: int, activations: Activations) -> None:
        streams.append(activations["resid_post"])
        raise Done

    DenseEngine(p.model, edits).run(p.tokens, {}, keep)
    return streams[0]


WITHOUT_POSITIONS = Edits([Edit("pos_embed", lambda positions, _: torch.zeros_like(positions))])

COMPUTED_BY: dict[str, Callable[[PredictionInputs], dict[str, Tensor]]] = {
    "tokens": lambda p: {"tokens": p.tokens},
    "positions_known": _positions,
    "token_loss": _token_losses,
    "final_logit": _finals,
    "final_logprob": _finals,
    "effective": _positions,
    "position_after_mlp": _positions,
    "position_after_layer": _positions,
}
"""What computes each of `schemas.predictions.PREDICTION_INPUTS`."""
