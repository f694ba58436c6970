"""What is run: ways to put tokens through a model, and the models and tokens that they get.

Weights are random, for speed does not depend on them. Tokens are drawn by Zipf's law: of 1024
tokens each then has 6.5 earlier copies, on the Pile 5 to 7, so that statistics of repeated tokens
cost what they cost on text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schemas.precision import PRECISIONS
from schemas.statistics import KIND, evaluate
from workers.engine.dense_pattern import DensePattern
from workers.engine.fused_engine import FusedEngine
from workers.engine.number_formats import HALVES, linears_in
from workers.engine.token_pairs import find_matches
from workers.measurements.batch import measure_batch
from workers.model.layer_weights import READABLE_WEIGHTS, attention_weights
from workers.model.loading import load_model
from workers.model.model import bridge_of
from workers.model.model_info import describe

Run = Callable[[Tensor], object]
"""Takes tokens `[batch pos]`."""

Way = Callable[[Path, str, str], Run]
"""Takes a model's directory, a device and a precision."""

STATISTICS = KIND.select("standard")


def bare(path: Path, device: str, precision: str) -> Run:
    """Hugging Face's forward pass: eager modules, SDPA, no unembedding; measures nothing."""
    return _forward(_hugging_face(path, device, precision), device, precision)


def compiled(path: Path, device: str, precision: str, backend: str = "inductor") -> Run:
    """The same forward pass under torch.compile."""
    model: Any = torch.compile(
        _hugging_face(path, device, precision), dynamic=False, backend=backend
    )
    return _forward(model, device, precision)


def fused(path: Path, device: str, precision: str) -> Run:
    """headcount's fused engine, all statistics."""
    engine = FusedEngine(load_model(describe(path), "raw", device), precision)
    return lambda tokens: measure_batch(engine, STATISTICS, tokens)


def run_with_cache(path: Path, device: str, precision: str) -> Run:
    """TransformerLens's run_with_cache, then the same statistics from the cache, all in float32."""
    model = load_model(describe(path), "raw", device)
    bridge = bridge_of(model)
    attention = ("q", "k", "v", "z", "pattern", "attn_scores")
    names = ("hook_resid_pre", "hook_resid_post", *(f"attn.hook_{name}" for name in attention))

    def run(tokens: Tensor) -> object:
        wanted = [
            f"blocks.{layer}.{name}" for layer in range(bridge.cfg.n_layers) for name in names
        ]
        _, cache = bridge.run_with_cache(tokens, names_filter=wanted)
        matches = find_matches(tokens)
        out: list[Tensor] = []
        for layer in range(bridge.cfg.n_layers):
            seen: dict[str, Any] = {
                n.rpartition("hook_")[2]: cache[f"blocks.{layer}.{n}"] for n in names
            }
            q, k = seen["q"].transpose(1, 2), seen["k"].transpose(1, 2)
            scale = bridge.cfg.d_head**-0.5
            seen["pattern"] = DensePattern(seen["pattern"], seen["attn_scores"], q, k, scale)
            seen |= attention_weights(model, layer, READABLE_WEIGHTS)
            out += [evaluate(s.compute, {**seen, **matches}) for s in STATISTICS]
        return out

    return run


WAYS: dict[str, Way] = {way.__name__: way for way in (bare, compiled, fused, run_with_cache)}


def bare_format(precision: str) -> str:
    """The format that a forward pass of Hugging Face's has for a precision of ours.

    float16x2 it does not have; the faster float16 stands for it.
    """
    return PRECISIONS[precision].linears.removesuffix("x2")


def _hugging_face(path: Path, device: str, precision: str) -> Any:
    """A model without its unembedding; a half is the format of all of it, residual stream included."""
    from transformers import AutoModel

    dtype = HALVES.get(bare_format(precision), torch.float32)
    model = AutoModel.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    return model.eval().requires_grad_(False).to(device)


def _forward(model: Any, device: str, precision: str) -> Run:
    # TF32 is no format of tensors: it has to be switched on.
    factors = "tf32" if device == "cuda" and bare_format(precision) == "tf32" else ""

    def run(tokens: Tensor) -> object:
        with linears_in(factors, device):
            return model(tokens, use_cache=False)

    return run


def make_gpt2_small(path: Path, **changes: int) -> Path:
    """A GPT-2 of GPT-2 small's shape, or as changed."""
    from transformers import GPT2Config

    fields: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, **changes}
    return _make(path, GPT2Config(**fields))


def make_rotary(path: Path, **sizes: int) -> Path:
    """A Llama of any shape: rotary positions, so that weights do not grow with `n_ctx`."""
    from transformers import LlamaConfig

    fields: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, **sizes}
    return _make(path, LlamaConfig(**fields))


def _make(path: Path, config: Any) -> Path:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def draw_tokens(path: Path, batch: int, n_ctx: int) -> Tensor:
    """Tokens `[batch pos]` for a model; token r comes with a probability in proportion to 1/(r+1)."""
    d_vocab = json.loads((path / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    chance = 1 / torch.arange(1, d_vocab + 1, dtype=torch.float64)
    drawn = torch.multinomial(
        chance, batch * n_ctx, replacement=True, generator=torch.Generator().manual_seed(0)
    )
    return drawn.view(batch, n_ctx)
