"""What the recipes measure on a trained model, and the tables of its card.

Tensors carry TransformerLens names and axes: tokens [batch pos], pattern [layer batch head query
key]. Every sequence starts with BOS at position 0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

EVALUATION_SEED = 2026


# Fresh inputs


def twice(
    rng: np.random.Generator, batch: int, low: int, high: int, bos: int, period: int = 25
) -> Tensor:
    """BOS and uniform tokens, the same ones again."""
    segment = rng.integers(low, high, (batch, period))
    return torch.from_numpy(np.pad(np.tile(segment, 2), ((0, 0), (1, 0)), constant_values=bos))


def distinct(
    rng: np.random.Generator, batch: int, low: int, high: int, bos: int, length: int = 50
) -> Tensor:
    """BOS and tokens of which none occurs twice."""
    tokens = rng.permuted(np.tile(np.arange(low, high), (batch, 1)), axis=1)[:, :length]
    return torch.from_numpy(np.pad(tokens, ((0, 0), (1, 0)), constant_values=bos))


# Observing a GPT-2


@dataclass(frozen=True)
class Observation:
    """What one forward pass of a GPT-2 shows."""

    logits: Tensor
    """[batch pos d_vocab]"""
    pattern: Tensor
    """[layer batch head query key]"""
    v: Tensor
    """[layer batch head pos d_head]"""
    resid_post: Tensor
    """[layer batch pos d_model]"""


def keep(outputs: list[Tensor]) -> Callable[[nn.Module, tuple, Tensor], None]:
    """A forward hook that appends what the module gives."""
    return lambda module, args, output: outputs.append(output)


@torch.inference_mode()
def observe(model: GPT2LMHeadModel, tokens: Tensor) -> Observation:
    """Run a GPT-2 with eager attention and keep what the scores read."""
    qkv: list[Tensor] = []
    resid_post: list[Tensor] = []
    hooks = []
    for layer in range(model.config.n_layer):
        block = f"transformer.h.{layer}"
        hooks.append(model.get_submodule(f"{block}.attn.c_attn").register_forward_hook(keep(qkv)))
        hooks.append(model.get_submodule(block).register_forward_hook(keep(resid_post)))
    try:
        output = model(tokens, output_attentions=True, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    v = (
        torch.stack(qkv)
        .chunk(3, dim=-1)[2]
        .unflatten(-1, (model.config.n_head, -1))
        .transpose(2, 3)
    )
    return Observation(output.logits, torch.stack(output.attentions), v, torch.stack(resid_post))


# Scores


@dataclass(frozen=True)
class Scores:
    """What a trained model shows, per head and as a whole."""

    heads: dict[str, Tensor]
    """Score to [layer head]."""
    roles: dict[str, Tensor]
    """Role to a mask [layer head]."""
    model: dict[str, float]


def previous_token(pattern: Tensor) -> Tensor:
    """Mean attention to the token before the query, queries from 2 on, as [layer head]."""
    return pattern.diagonal(-1, -2, -1)[..., 1:].mean((1, -1))


def bos_attention(pattern: Tensor) -> Tensor:
    """Mean attention to BOS, queries from 2 on, as [layer head]."""
    return pattern[..., 2:, 0].mean((1, -1))


def induction(pattern: Tensor) -> Tensor:
    """Mean attention of the second copy to the token after the query's earlier copy, as [layer
    head].

    For BOS and two copies of N tokens: mean over q = N+1 .. 2N of A[q, q-N+1].
    """
    period = (pattern.shape[-1] - 1) // 2
    return pattern.diagonal(1 - period, -2, -1)[..., 2:].mean((1, -1))


def copy_accuracy(logits: Tensor, tokens: Tensor) -> float:
    """Share of the second copy's tokens, from its second on, that the model names."""
    period = (tokens.shape[1] - 1) // 2
    guess = logits[:, period + 1 : -1].argmax(-1)
    return (guess == tokens[:, period + 2 :]).double().mean().item()


def value_drain(v: Tensor) -> Tensor:
    """Norm of v at BOS over its mean norm at the other positions, as [layer head]."""
    norm = v.norm(dim=-1)
    return norm[..., 0].mean(1) / norm[..., 1:].mean((1, -1))


def residual_peak(resid_post: Tensor) -> list[float]:
    """Norm of resid_post at BOS over its mean norm at the other positions, one number per layer."""
    norm = resid_post.norm(dim=-1)
    return (norm[..., 0].mean(1) / norm[..., 1:].mean((1, -1))).tolist()


# Tables


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(scores: Mapping[str, Scores]) -> str:
    """The scores of one or more trainings, by label, as Markdown."""
    first = next(iter(scores.values()))
    rows = [[name, *(f"{s.model[name]:.3f}" for s in scores.values())] for name in first.model]
    rows += [
        [f"{role} heads", *(str(int(s.roles[role].sum())) for s in scores.values())]
        for role in first.roles
    ]
    parts = [table(["whole model", *scores], rows)]
    return "\n\n".join(parts + [head_table(label, s) for label, s in scores.items()])


def head_table(label: str, scores: Scores) -> str:
    """One row per head: its roles and its scores."""
    n_layers, n_heads = next(iter(scores.heads.values())).shape
    rows = []
    for layer in range(n_layers):
        for head in range(n_heads):
            roles = ", ".join(role for role, mask in scores.roles.items() if mask[layer, head])
            rows.append(
                [
                    f"L{layer}H{head}",
                    roles,
                    *(f"{s[layer, head]:.3f}" for s in scores.heads.values()),
                ]
            )
    return table([f"head, {label}", "role", *scores.heads], rows)


def fill_card(card: Path, text: str) -> None:
    """Replace what stands between the card's two score markers."""
    before, opening, rest = card.read_text().partition("<!-- scores -->\n")
    _, closing, after = rest.partition("<!-- end of scores -->")
    if not (opening and closing):
        raise ValueError(f"{card} lacks the lines <!-- scores --> and <!-- end of scores -->")
    card.write_text(f"{before}{opening}{text}\n{closing}{after}")
