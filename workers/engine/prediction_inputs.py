"""What predictions read, never holding all logits; and what the first layer makes of positions."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from headcount.schemas.errors import ModelError
from headcount.schemas.pattern import first_of_largest
from headcount.workers.engine.changes import Change, Changes
from headcount.workers.engine.engine import Activations, Engine, PassRequest, StopPass
from headcount.workers.engine.rooms import engine_class
from headcount.workers.model.layer_weights import known_or_nan
from headcount.workers.model.model import Model

CANDIDATES = 5  # most probable tokens that are compared
CHUNK_BYTES = 64 << 20  # logits that are held at a time


class PredictionInputs(dict[str, Tensor]):
    """What `PREDICTION_INPUTS` names, computed when it is first asked for."""

    def __init__(
        self, model: Model, hidden: Tensor, tokens: Tensor, untouched: Tensor | None = None
    ) -> None:
        """`hidden [batch pos d_model]` is the stream behind the last norm, and `untouched [batch
        d_model]` that of the untouched model at the last token; None if nothing is changed.
        """
        super().__init__(tokens=tokens)
        self.model = model
        self.hidden = hidden
        self.tokens = tokens
        self.untouched = hidden[:, -1] if untouched is None else untouched

    def __missing__(self, name: str) -> Tensor:
        # One computation may give several inputs, so all of them are stored.
        self.update(COMPUTED_BY[name](self))
        return self[name]

    def chunks(self, rows: Tensor) -> list[Tensor]:
        """Rows of a stream, or what belongs to them, in pieces whose logits may be held."""
        return row_chunks(self.model, rows)


def row_chunks(model: Model, rows: Tensor) -> list[Tensor]:
    """Rows, or what belongs to them, in pieces whose logits may be held."""
    bytes_of_row = 4 * model.info.d_vocab
    return list(rows.split(max(1, CHUNK_BYTES // bytes_of_row)))


def check_unembedding(model: Model) -> None:
    """Refuse a model whose predictions are not the softmax of its unembedding."""
    if not model.modules("unembed"):
        raise ModelError(f"{model.info.name}: no unembedding was found; leave predictions out")


def _token_losses(inputs: PredictionInputs) -> dict[str, Tensor]:
    streams = inputs.hidden[:, :-1].flatten(0, 1)  # [batch·(pos-1) d_model]
    next_tokens = inputs.tokens[:, 1:].flatten()  # [batch·(pos-1)]
    token_loss = inputs.hidden.new_full(inputs.tokens.shape, math.nan)
    if len(streams):  # A sequence of one token has no next token.
        losses = next_token_losses(inputs.model, streams, next_tokens)
        # The loss stands at the token that is predicted, not at the one that predicts.
        token_loss[:, 1:] = losses.view(len(inputs.tokens), -1)
    return {"token_loss": token_loss}


def next_token_losses(model: Model, streams: Tensor, next_tokens: Tensor) -> Tensor:
    """The loss of the token that follows each row of the stream behind the last norm: `[row]`."""
    losses: list[Tensor] = []
    chunks = zip(row_chunks(model, streams), row_chunks(model, next_tokens), strict=True)
    for stream, tokens in chunks:
        logits = model.logits(stream)  # [row d_vocab]
        # -ln p(token) = ln Σ e^logits - logit of the token.
        losses.append(logits.logsumexp(-1) - logits.gather(-1, tokens[:, None])[:, 0])
    return torch.cat(losses)


def _final_predictions(inputs: PredictionInputs) -> dict[str, Tensor]:
    final_logits: list[Tensor] = []
    final_logprobs: list[Tensor] = []
    streams = inputs.chunks(inputs.hidden[:, -1])
    for stream, tokens in zip(streams, inputs.chunks(inputs.tokens), strict=True):
        logits = inputs.model.logits(stream)  # [batch d_vocab]
        token_logits = logits.gather(-1, tokens)  # [batch pos]
        final_logits.append(token_logits)
        final_logprobs.append(token_logits - logits.logsumexp(-1, keepdim=True))
    return {"final_logit": torch.cat(final_logits), "final_logprob": torch.cat(final_logprobs)}


def _against_untouched(inputs: PredictionInputs) -> dict[str, Tensor]:
    divergences: list[Tensor] = []
    candidates: list[Tensor] = []
    streams = inputs.chunks(inputs.hidden[:, -1]), inputs.chunks(inputs.untouched)
    for stream_pair in zip(*streams, strict=True):
        # No intervention changes the unembedding. [batch d_vocab]
        logprob, untouched = (inputs.model.logits(s).log_softmax(-1) for s in stream_pair)
        # Rounding may leave a tiny negative number of two distributions that are nearly equal.
        divergences.append((untouched.exp() * (untouched - logprob)).sum(-1).clamp(min=0))
        candidates.append(most_probable(torch.stack([logprob, untouched]).exp()))
    final, untouched_candidates = torch.cat(candidates, dim=1)  # [batch candidate]
    return {
        "divergence": torch.cat(divergences),
        "final_candidates": final,
        "untouched_candidates": untouched_candidates,
    }


def most_probable(probabilities: Tensor) -> Tensor:
    """The most probable tokens `[… candidate]` of `[… d_vocab]`, the first one first."""
    candidates: list[Tensor] = []
    for _ in range(CANDIDATES):
        # One at a time: no sort would know which probabilities tie.
        candidates.append(first_of_largest(probabilities)[..., None])
        probabilities = probabilities.scatter(-1, candidates[-1], 0)
    return torch.cat(candidates, dim=-1)


def _position_changes(inputs: PredictionInputs) -> dict[str, Tensor]:
    """Effective positions, and what positions change when they meet tokens."""
    model, tokens = inputs.model, inputs.tokens
    n_ctx = tokens.shape[1]
    mlps = model.modules("first_mlp")
    effective = model.effective_positions(n_ctx)
    positions = model.positions()
    if positions is None or effective is None or not mlps:
        undefined = inputs.hidden.new_full((*tokens.shape, 1), math.nan)
        return {
            "positions_known": torch.zeros((), dtype=torch.bool, device=tokens.device),
            "effective": undefined[0],
            "position_after_mlp": undefined,
            "position_after_layer": undefined,
        }
    positions = positions[:n_ctx]  # [pos d_model]
    embeddings = model.modules("embed")[0](tokens)  # [batch pos d_model]
    # The fused engine builds no matrix of T², so it is taken if it can run and change this layer.
    is_known = model.attention_problem is None and 0 in model.info.attention_layers_or_all
    if is_known and model.modules("pos_embed"):
        engine = engine_class("fused")(model, model.precision)
    else:
        engine = engine_class("dense")(model)
    without_positions = Change("pos_embed", lambda added, _: torch.zeros_like(added))
    layer_of_both, layer_of_tokens = (
        _after_first_layer(engine.changed(changes), tokens)
        for changes in (Changes(), Changes([without_positions]))
    )
    return {
        "positions_known": torch.ones((), dtype=torch.bool, device=tokens.device),
        "effective": effective,
        "position_after_mlp": positions + mlps[0](embeddings + positions) - mlps[0](embeddings),
        "position_after_layer": layer_of_both - layer_of_tokens,
    }


def _after_first_layer(engine: Engine, tokens: Tensor) -> Tensor:
    streams: list[Tensor] = []

    def keep_stream(_layer: int, activations: Activations) -> None:
        # The fused engine shows a layer after its attention, and once more at its end.
        if "resid_post" in activations:
            streams.append(activations["resid_post"])
            raise StopPass

    engine.run(
        PassRequest(tokens=tokens, on_layer=keep_stream, read_late=("resid_post",), layers=[0])
    )
    return streams[0]


def _first_mlp_out(inputs: PredictionInputs) -> dict[str, Tensor]:
    known = inputs.model.first_mlp_out(inputs.tokens)
    return {"first_mlp_out": known_or_nan(inputs.model, known, len(inputs.tokens))}


COMPUTED_BY: dict[str, Callable[[PredictionInputs], dict[str, Tensor]]] = {
    "first_mlp_out": _first_mlp_out,
    "token_loss": _token_losses,
    **dict.fromkeys(("final_logit", "final_logprob"), _final_predictions),
    **dict.fromkeys(("divergence", "final_candidates", "untouched_candidates"), _against_untouched),
    **dict.fromkeys(
        ("positions_known", "effective", "position_after_mlp", "position_after_layer"),
        _position_changes,
    ),
}
"""What computes each of `schemas.formula_kinds.PREDICTION_INPUTS`."""
