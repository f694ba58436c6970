"""Train attn-only-2l-mini: two attention layers without MLPs, in the legacy TransformerLens format.

python models/attn-only-2l-mini/train.py --seed 0 --out models/attn-only-2l-mini
"""

import json
import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from models import evaluation, recipe

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
BOS, FIRST, END = CONFIG["bos_token_id"], 1, CONFIG["d_vocab"]
PLAN = recipe.Plan(steps=2800, lr=4e-3, weight_decay=0.01, cosine=True, cooldown=1.0)
MAKE = recipe.mixture(
    [
        (0.5, recipe.repeating(recipe.uniform(FIRST, END), recipe.Repeats(0.6, 0.3, 1.0), BOS)),
        (
            0.5,
            recipe.repeating(
                recipe.skip_gram(FIRST, END, (0.3, 0.35, 0.25)),
                recipe.Repeats(0.42, 0.15, 1.0),
                BOS,
            ),
        ),
    ]
)


class LayerNorm(nn.Module):
    """LayerNorm with the parameter names of TransformerLens."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.w, self.b, self.eps = (
            nn.Parameter(torch.ones(d_model)),
            nn.Parameter(torch.zeros(d_model)),
            eps,
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.w.shape, self.w, self.b, self.eps)


class Attention(nn.Module):
    """Causal attention with one weight matrix per head, which also gives its pattern [batch head
    query key].
    """

    def __init__(self, d_model: int, n_heads: int, d_head: int) -> None:
        super().__init__()
        for name in "QKV":
            self.register_parameter(
                f"W_{name}", nn.Parameter(torch.empty(n_heads, d_model, d_head))
            )
            self.register_parameter(f"b_{name}", nn.Parameter(torch.zeros(n_heads, d_head)))
        self.W_O, self.b_O = (
            nn.Parameter(torch.empty(n_heads, d_head, d_model)),
            nn.Parameter(torch.zeros(d_model)),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (self.project(x, name) for name in "QKV")
        attn_scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        pattern = attn_scores.masked_fill(future, -torch.inf).softmax(-1)
        z = (pattern @ v).transpose(1, 2).flatten(2)
        return z @ self.W_O.flatten(0, 1) + self.b_O, pattern

    def project(self, x: Tensor, name: str) -> Tensor:
        """q, k or v as [batch head pos d_head], by one multiplication for all heads."""
        weight, bias = getattr(self, f"W_{name}"), getattr(self, f"b_{name}")
        return (
            (x @ weight.transpose(0, 1).flatten(1))
            .unflatten(-1, bias.shape)
            .add(bias)
            .transpose(1, 2)
        )


class Block(nn.Module):
    """LayerNorm and attention, added to the residual stream."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.ln1 = LayerNorm(config["d_model"], config["eps"])
        self.attn = Attention(config["d_model"], config["n_heads"], config["d_head"])

    def forward(self, resid_pre: Tensor) -> tuple[Tensor, Tensor]:
        """resid_post, and the pattern [batch head query key]."""
        attn_out, pattern = self.attn(self.ln1(resid_pre))
        return resid_pre + attn_out, pattern


class AttentionOnly(nn.Module):
    """A transformer whose state dict is a legacy TransformerLens checkpoint."""

    def __init__(self, config: dict) -> None:
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
        """Logits [batch pos d_vocab], and a pattern [batch head query key] for each layer."""
        resid = self.embed["W_E"][tokens] + self.pos_embed["W_pos"][: tokens.shape[1]]
        patterns = []
        for block in self.blocks:
            resid, pattern = block(resid)
            patterns.append(pattern)
        return self.ln_final(resid) @ self.unembed["W_U"] + self.unembed["b_U"], patterns


def batch(rng: np.random.Generator, progress: float) -> np.ndarray:
    """4096 tokens: 64 positions for the first quarter, then 64 or 128."""
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
    """Measure previous-token and induction heads on fresh random tokens."""
    model = AttentionOnly(json.loads((directory / "config.json").read_text()))
    model.load_state_dict(load_file(directory / "model.safetensors"))
    rng = np.random.default_rng(evaluation.EVALUATION_SEED)
    rest = torch.stack(model(evaluation.distinct(rng, 512, FIRST, END, BOS, length=100))[1])
    tokens = evaluation.twice(rng, 512, FIRST, END, BOS)
    logits, patterns = model(tokens)
    heads = {
        "attention to q-1, 100 distinct": evaluation.previous_token(rest),
        "attention to BOS, 100 distinct": evaluation.bos_attention(rest),
        "induction, 25 twice": evaluation.induction(torch.stack(patterns)),
    }
    previous, _, copying = heads.values()
    return evaluation.Scores(
        heads=heads,
        roles={"previous-token": previous > 0.9, "induction": copying > 0.6},
        model={"accuracy, second copy of 25": evaluation.copy_accuracy(logits, tokens)},
    )


if __name__ == "__main__":
    recipe.run(recipe.arguments(__doc__).parse_args(), fit, score)
