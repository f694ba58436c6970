"""Train attn-only-2l-mini: two attention layers without MLPs, in the legacy TransformerLens format.

python models/attn-only-2l-mini/train.py --seed 0 --out models/attn-only-2l-mini
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from headcount.models import evaluation, recipe

CONFIG = {
    "model_name": "attn-only-2l-mini",
    "n_layers": 2,
    "d_model": 128,
    "n_ctx": 128,
    "d_head": 16,
    "n_heads": 8,
    "d_mlp": None,
    "d_vocab": 256,
    "d_vocab_out": 256,
    "act_fn": "relu",
    "attn_only": True,
    "normalization_type": "LN",
    "eps": 1e-5,
    "positional_embedding_type": "standard",
    "attention_dir": "causal",
    "use_attn_scale": True,
    "init_mode": "gpt2",
    "init_weights": True,
    "initializer_range": 0.07,
    "dtype": "float32",
    "bos_token_id": 0,
}
BOS = CONFIG["bos_token_id"]
FIRST, END = 1, CONFIG["d_vocab"]
"""The range of tokens that are drawn: all but BOS."""

PLAN = recipe.Plan(steps=2800, lr=4e-3, weight_decay=0.01, cosine=True, cooldown=1.0)

# Uniform tokens leave only copying to learn; the skip-gram source also rewards looking back one,
# two or three tokens.
UNIFORM = recipe.uniform(FIRST, END)
UNIFORM_REPEATS = recipe.Repeats(copied=0.6, whole=0.3, recent=1.0)
SKIP_GRAM = recipe.skip_gram(FIRST, END, weights=(0.3, 0.35, 0.25))
SKIP_GRAM_REPEATS = recipe.Repeats(copied=0.42, whole=0.15, recent=1.0)
MAKE = recipe.mixture(
    [
        (0.5, recipe.repeating(UNIFORM, UNIFORM_REPEATS, BOS)),
        (0.5, recipe.repeating(SKIP_GRAM, SKIP_GRAM_REPEATS, BOS)),
    ]
)


class LayerNorm(nn.Module):
    """LayerNorm with the parameter names of TransformerLens."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(d_model))
        self.b = nn.Parameter(torch.zeros(d_model))
        self.eps = eps

    def forward(self, resid: Tensor) -> Tensor:
        """The normalised stream [batch pos d_model]."""
        return F.layer_norm(resid, self.w.shape, self.w, self.b, self.eps)


class Attention(nn.Module):
    """Causal attention with one weight matrix for each head."""

    def __init__(self, d_model: int, n_heads: int, d_head: int) -> None:
        super().__init__()
        for name in "QKV":
            self.register_parameter(
                f"W_{name}", nn.Parameter(torch.empty(n_heads, d_model, d_head))
            )
            self.register_parameter(f"b_{name}", nn.Parameter(torch.zeros(n_heads, d_head)))
        self.W_O = nn.Parameter(torch.empty(n_heads, d_head, d_model))
        self.b_O = nn.Parameter(torch.zeros(d_model))

    def forward(self, normalised: Tensor) -> tuple[Tensor, Tensor]:
        """The output [batch pos d_model] and the pattern [batch head query key]."""
        q, k, v = (self.project(normalised, name) for name in "QKV")
        attn_scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        n_ctx = normalised.shape[1]
        is_future = torch.ones(n_ctx, n_ctx, dtype=torch.bool).triu(1)
        pattern = attn_scores.masked_fill(is_future, -torch.inf).softmax(-1)
        z = (pattern @ v).transpose(1, 2).flatten(2)
        # z of the heads side by side, times W_O of the heads one below another.
        return z @ self.W_O.flatten(0, 1) + self.b_O, pattern

    def project(self, normalised: Tensor, name: str) -> Tensor:
        """q, k or v as [batch head pos d_head], by one multiplication for all heads."""
        weight = getattr(self, f"W_{name}")
        bias = getattr(self, f"b_{name}")
        side_by_side = normalised @ weight.transpose(0, 1).flatten(1)
        by_head = side_by_side.unflatten(-1, bias.shape) + bias
        return by_head.transpose(1, 2)


class Block(nn.Module):
    """LayerNorm and attention, added to the residual stream."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.ln1 = LayerNorm(config["d_model"], config["eps"])
        self.attn = Attention(config["d_model"], config["n_heads"], config["d_head"])

    def forward(self, resid_pre: Tensor) -> tuple[Tensor, Tensor]:
        """resid_post [batch pos d_model] and the pattern [batch head query key]."""
        attn_out, pattern = self.attn(self.ln1(resid_pre))
        return resid_pre + attn_out, pattern


class AttentionOnly(nn.Module):
    """A transformer whose state dict is a legacy TransformerLens checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        d_model, d_vocab = config["d_model"], config["d_vocab"]
        self.embed = nn.ParameterDict({"W_E": torch.empty(d_vocab, d_model)})
        self.pos_embed = nn.ParameterDict({"W_pos": torch.empty(config["n_ctx"], d_model)})
        self.blocks = nn.ModuleList(Block(config) for _ in range(config["n_layers"]))
        self.ln_final = LayerNorm(d_model, config["eps"])
        self.unembed = nn.ParameterDict(
            {"W_U": torch.empty(d_model, d_vocab), "b_U": torch.zeros(d_vocab)}
        )

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits [batch pos d_vocab] and a pattern [batch head query key] for each layer."""
        resid = self.embed["W_E"][tokens] + self.pos_embed["W_pos"][: tokens.shape[1]]
        patterns: list[Tensor] = []
        for block in self.blocks:
            resid, pattern = block(resid)
            patterns.append(pattern)
        return self.ln_final(resid) @ self.unembed["W_U"] + self.unembed["b_U"], patterns


def batch(rng: np.random.Generator, progress: float) -> np.ndarray:
    """A batch of 4096 tokens: 64 positions for the first quarter of training, then 64 or 128."""
    n_ctx = 128 if progress > 0.25 and rng.random() < 0.5 else 64
    return MAKE(rng, recipe.TOKENS_PER_STEP // n_ctx, n_ctx + 1)


def fit(out: Path, seed: int) -> None:
    """Train from scratch and write the checkpoint."""
    model = AttentionOnly(CONFIG)
    recipe.initialise(model, CONFIG["n_layers"], embedding_std=0.07, seed=seed)
    recipe.train(model, lambda tokens: model(tokens)[0], batch, PLAN, seed)
    recipe.save(out, model.state_dict(), CONFIG | {"seed": seed}, seed)


@torch.inference_mode()
def score(directory: Path) -> evaluation.Scores:
    """Scores of previous-token and induction heads on fresh random tokens."""
    model = AttentionOnly(json.loads((directory / "config.json").read_text()))
    model.load_state_dict(load_file(directory / "model.safetensors"))
    rng = np.random.default_rng(evaluation.EVALUATION_SEED)
    _, patterns = model(evaluation.distinct(rng, 512, FIRST, END, BOS, length=100))
    distinct_pattern = torch.stack(patterns)
    repeated_tokens = evaluation.twice(rng, 512, FIRST, END, BOS)
    logits, patterns = model(repeated_tokens)
    repeated_pattern = torch.stack(patterns)
    to_previous = evaluation.previous_token(distinct_pattern)
    induction = evaluation.induction(repeated_pattern)
    return evaluation.Scores(
        heads={
            "attention to q-1, 100 distinct": to_previous,
            "attention to BOS, 100 distinct": evaluation.bos_attention(distinct_pattern),
            "induction, 25 twice": induction,
        },
        roles={"previous-token": to_previous > 0.9, "induction": induction > 0.6},
        model={"accuracy, second copy of 25": evaluation.copy_accuracy(logits, repeated_tokens)},
    )


if __name__ == "__main__":
    recipe.run(recipe.arguments(__doc__).parse_args(), fit, score)
