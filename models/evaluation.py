"""What the recipes measure on a trained model, and the tables of its card.

Tensors have TransformerLens names and axes: tokens [batch pos], pattern [layer batch head query
key]. Every sequence starts with BOS at position 0. Scores of heads are [layer head].
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

EVALUATION_SEED = 2026


# Fresh inputs


def twice(
    rng: np.random.Generator, batch: int, low: int, high: int, bos: int, period: int = 25
) -> Tensor:
    """BOS and a segment of uniform tokens, twice."""
    segment = rng.integers(low, high, (batch, period))
    return with_bos(np.tile(segment, 2), bos)


def distinct(
    rng: np.random.Generator, batch: int, low: int, high: int, bos: int, length: int = 50
) -> Tensor:
    """BOS and uniform tokens that all differ."""
    vocabulary = np.tile(np.arange(low, high), (batch, 1))
    return with_bos(rng.permuted(vocabulary, axis=1)[:, :length], bos)


def with_bos(tokens: np.ndarray, bos: int) -> Tensor:
    """Tokens [batch pos] with BOS before each sequence."""
    return torch.from_numpy(np.pad(tokens, ((0, 0), (1, 0)), constant_values=bos))


# Observing a model of transformers


@dataclass(frozen=True)
class Observation:
    """What one forward pass of a GPT-2 or a Llama shows."""

    logits: Tensor
    """[batch pos d_vocab]"""
    pattern: Tensor
    """[layer batch head query key]"""
    v: Tensor
    """[layer batch head pos d_head]"""
    resid_post: Tensor
    """[layer batch pos d_model]"""


def keep(outputs: list[Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    """A forward hook that appends the module's output to a list."""
    return lambda module, arguments, output: outputs.append(output)


@torch.inference_mode()
def observe(model: PreTrainedModel, tokens: Tensor) -> Observation:
    """What one forward pass of a GPT-2 or a Llama with eager attention shows."""
    values: list[Tensor] = []
    resid_post: list[Tensor] = []
    hooks: list[RemovableHandle] = []
    for name, module in model.named_modules():
        if name.endswith((".c_attn", ".v_proj")):
            hooks.append(module.register_forward_hook(keep(values)))
        elif re.search(r"\.(h|layers)\.\d+$", name):
            hooks.append(module.register_forward_hook(keep(resid_post)))
    try:
        output = model(tokens, output_attentions=True, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    pattern = torch.stack(output.attentions)
    n_heads = pattern.shape[2]
    d_head = model.config.hidden_size // n_heads
    v = torch.stack(values)
    if v.shape[-1] == 3 * model.config.hidden_size:
        # c_attn computes q, k and v side by side, each with its heads side by side.
        v = v.chunk(3, dim=-1)[2]
    v = v.unflatten(-1, (-1, d_head)).transpose(2, 3)
    # Query heads that share a KV head stand side by side.
    v = v.repeat_interleave(n_heads // v.shape[2], dim=2)
    return Observation(output.logits, pattern, v, torch.stack(resid_post))


# Scores


@dataclass(frozen=True)
class Scores:
    """What a trained model shows, per head and as a whole."""

    heads: dict[str, Tensor]
    """By score, values [layer head]."""
    roles: dict[str, Tensor]
    """By role, a mask [layer head] of the heads that have it."""
    model: dict[str, float]
    """Scores of the whole model."""


def previous_token(pattern: Tensor) -> Tensor:
    """Mean attention of a head to the token before the query, over queries from 2 on."""
    return pattern.diagonal(-1, -2, -1)[..., 1:].mean((1, -1))


def bos_attention(pattern: Tensor) -> Tensor:
    """Mean attention of a head to BOS, over queries from 2 on."""
    # Query 0 can look nowhere else, and query 1 only at itself.
    return pattern[..., 2:, 0].mean((1, -1))


def induction(pattern: Tensor) -> Tensor:
    """Mean attention of a head, in the second copy, to the token after the query's earlier copy.

    For BOS and two copies of N tokens: mean over q = N+1 .. 2N of A[q, q-N+1].
    """
    period = (pattern.shape[-1] - 1) // 2
    return pattern.diagonal(1 - period, -2, -1)[..., 2:].mean((1, -1))


def copy_accuracy(logits: Tensor, tokens: Tensor) -> float:
    """Share of the second copy's tokens, from its second on, that the model predicts first."""
    period = (tokens.shape[1] - 1) // 2
    predicted = logits[:, period + 1 : -1].argmax(-1)
    return (predicted == tokens[:, period + 2 :]).double().mean().item()


def value_drain(v: Tensor) -> Tensor:
    """Norm of v at BOS over its mean norm at the other positions, for each head."""
    norm = v.norm(dim=-1)
    return norm[..., 0].mean(1) / norm[..., 1:].mean((1, -1))


def residual_peak(resid_post: Tensor) -> list[float]:
    """Norm of resid_post at BOS over its mean norm at the other positions, for each layer."""
    norm = resid_post.norm(dim=-1)
    return (norm[..., 0].mean(1) / norm[..., 1:].mean((1, -1))).tolist()


# Tables


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(scores: Mapping[str, Scores]) -> str:
    """The scores of one or more trainings, by label, as Markdown."""
    trainings = list(scores.values())
    rows: list[list[str]] = []
    for name in trainings[0].model:
        values = [training.model[name] for training in trainings]
        rows.append([name, *(f"{value:.3f}" for value in values)])
    for role in trainings[0].roles:
        counts = [int(training.roles[role].sum()) for training in trainings]
        rows.append([f"{role} heads", *map(str, counts)])
    tables = [table(["whole model", *scores], rows)]
    tables += [head_table(label, training) for label, training in scores.items()]
    return "\n\n".join(tables)


def head_table(label: str, scores: Scores) -> str:
    """A table with one row for each head: its roles and its scores."""
    n_layers, n_heads = next(iter(scores.heads.values())).shape
    rows: list[list[str]] = []
    for layer, head in itertools.product(range(n_layers), range(n_heads)):
        roles = [role for role, mask in scores.roles.items() if mask[layer, head]]
        values = [f"{score[layer, head]:.3f}" for score in scores.heads.values()]
        rows.append([f"L{layer}H{head}", ", ".join(roles), *values])
    return table([f"head, {label}", "role", *scores.heads], rows)


def fill_card(card: Path, text: str) -> None:
    """Replace the text between the card's two score markers."""
    before, opening, remainder = card.read_text().partition("<!-- scores -->\n")
    _, closing, after = remainder.partition("<!-- end of scores -->")
    if not (opening and closing):
        raise ValueError(f"{card} lacks the lines <!-- scores --> and <!-- end of scores -->")
    card.write_text(f"{before}{opening}{text}\n{closing}{after}")
