"""Statistics as their definitions say, one query at a time, in float64, from a GPT-2's raw weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2LMHeadModel

Columns = dict[str, np.ndarray]


def definitions(path: Path, tokens: np.ndarray) -> Columns:
    """Columns `[sequence layer head]` of a GPT-2, from its weights and its own eager attention."""
    model: Any = GPT2LMHeadModel.from_pretrained(path, attn_implementation="eager").double().eval()
    normed: list[torch.Tensor] = []
    after: list[torch.Tensor] = []
    for block in model.transformer.h:
        block.ln_1.register_forward_hook(lambda m, a, out: normed.append(out))
        block.register_forward_hook(
            lambda m, a, out: after.append(out[0] if isinstance(out, tuple) else out)
        )
    with torch.no_grad():
        patterns = model(torch.from_numpy(tokens).long(), output_attentions=True).attentions
    n_heads, d_model = model.config.n_head, model.config.n_embd
    d = d_model // n_heads
    positions = model.transformer.wpe.weight.detach()
    effective = positions + model.transformer.h[0].mlp(positions).detach()
    rows: dict[str, list[float]] = {}
    for s in range(len(tokens)):
        for layer, block in enumerate(model.transformer.h):
            weight, bias = block.attn.c_attn.weight, block.attn.c_attn.bias
            for head in range(n_heads):
                columns = [
                    slice(part * d_model + head * d, part * d_model + (head + 1) * d)
                    for part in range(3)
                ]
                (q, b_Q), (k, b_K), (v, _) = (
                    (normed[layer][s] @ weight[:, c] + bias[c], bias[c]) for c in columns
                )
                W_O = block.attn.c_proj.weight[head * d : (head + 1) * d]
                a = patterns[layer][s, head].detach()
                found = by_pattern(a.numpy(), tokens[s].tolist()) | by_vectors(
                    q.detach(), k.detach(), b_Q.detach(), b_K.detach()
                )
                found |= by_positions(
                    q.detach() - b_Q.detach(), effective[: len(q)] @ weight[:, columns[1]].detach()
                )
                found |= by_outputs(a, v.detach(), W_O.detach()) | by_stream(after[layer][s])
                for name, value in found.items():
                    rows.setdefault(name, []).append(value)
    return {name: np.array(r).reshape(len(tokens), len(after), n_heads) for name, r in rows.items()}


def mean(values: Iterable[float | torch.Tensor]) -> float:
    """NaN where there are none."""
    found = [float(value) for value in values]
    return sum(found) / len(found) if found else math.nan


def by_pattern(a: np.ndarray, t: list[int]) -> dict[str, float]:
    n_ctx = len(a)
    n, late = n_ctx // 2, range(n_ctx // 2, n_ctx)
    found = {
        "sink_mass_first8": mean(a[q, :8].sum() for q in late),
        "next4_mass_late": mean(a[q, 1:5].sum() for q in late if n_ctx > 1),
        "second_key_mass_late": mean(a[q, 1] for q in late if n_ctx > 1),
        "entropy_normalised_late": mean(
            -sum(x * math.log(x) for x in a[q] if x > 0) / math.log(q + 1)
            for q in late
            if n_ctx > 1
        ),
        "match_count": mean(t[:q].count(t[q]) for q in range(n_ctx)),
    }
    repeats = n >= 2 and t[n_ctx - n :] == t[n_ctx - 2 * n : n_ctx - n]
    copied = range(n_ctx - n, n_ctx) if repeats else ()
    return found | {
        "induction_diagonal": mean(a[q, q - n + 1] for q in range(n - 1, n_ctx) if repeats),
        "induction_diagonal_strict": mean(a[q, q - n + 1] for q in copied),
        "duplicate_diagonal": mean(a[q, q - n] for q in copied),
    }


def by_vectors(
    q: torch.Tensor, k: torch.Tensor, b_Q: torch.Tensor, b_K: torch.Tensor
) -> dict[str, float]:
    n_ctx, d = q.shape
    late = range(n_ctx // 2, n_ctx)
    delta = (k - b_K) @ b_Q
    t1_and_t3 = q @ (k - b_K).T
    t1 = (q - b_Q) @ (k - b_K).T / math.sqrt(d)
    t3_pattern = [torch.softmax(delta[: i + 1] / math.sqrt(d), 0) for i in range(n_ctx)]
    scores = q @ k.T / math.sqrt(d)
    cosine = torch.nn.functional.cosine_similarity(q[:, None], k[None], dim=-1)

    def advantage(x: torch.Tensor) -> float:
        return mean(x[i, 0] - x[i, : i + 1].mean() for i in late)

    return {
        "score_shift": delta.mean().item(),
        "sink_score_shift": delta[0].item(),
        "sink_score_shift_lead": (delta[0] - delta.min()).item(),
        "sink_shift_advantage": advantage(delta.expand(n_ctx, n_ctx)),
        "sink_score_advantage": advantage(t1_and_t3),
        "sink_mass_shift_only": mean(t3_pattern[i][0] for i in late if n_ctx > 1),
        "sink_mass_content_only": mean(
            torch.softmax(t1[i, : i + 1], 0)[0] for i in late if n_ctx > 1
        ),
        "sink_logit_spread": scores[1:, 0].std(correction=0).item() if n_ctx > 1 else math.nan,
        "sink_key_cosine": cosine[:, 0].mean().item(),
        "earlier_key_cosine": mean(cosine[i, 1:i].mean() for i in range(2, n_ctx)),
    }


def by_positions(content: torch.Tensor, keys: torch.Tensor) -> dict[str, float]:
    n_ctx = len(content)
    cosine = torch.nn.functional.cosine_similarity(content[:, None], keys[None], dim=-1)
    late = range(n_ctx // 2, n_ctx)
    return {
        "sink_position_cosine": mean(cosine[i, 0] for i in late),
        "other_position_cosine": mean(cosine[i, j] for i in late for j in range(1, n_ctx)),
    }


def by_outputs(a: torch.Tensor, v: torch.Tensor, W_O: torch.Tensor) -> dict[str, float]:
    z = a @ v
    results, values = (z @ W_O).norm(dim=-1), (v @ W_O).norm(dim=-1)
    return {
        "head_output_norm_last": z[-1].norm().item(),
        "head_result_norm": results.mean().item(),
        "head_result_norm_last": results[-1].item(),
        "value_result_norm": values.mean().item(),
        "sink_value_result_norm": values[0].item(),
    }


def by_stream(resid: torch.Tensor) -> dict[str, float]:
    first = resid[0].detach().abs()
    largest = first.sort(descending=True).values[:3]
    return {
        "sink_resid_post_top3": (largest.square().sum() / first.square().sum()).item(),
        "sink_resid_post_massive": float(
            ((first > 100) & (first > 1000 * resid[::16].abs().median())).sum()
        ),
    }
