"""Models, tokenizers and scans that are small enough to make in a moment, with random weights of
sensible scale.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headcount.schemas.profiles import PROFILES
from headcount.schemas.scans.intervention import NONE, Intervention, parse_intervention
from headcount.schemas.scans.scan import Scan
from headcount.schemas.scans.scan_file import parse_scan
from headcount.schemas.statistics import STATISTICS
from headcount.workers.engine.number_formats import LinearProducts
from headcount.workers.loading import load_model
from headcount.workers.model.info.description import describe, find_model
from headcount.workers.model.model_info import ModelInfo
from headcount.workers.replica import InterventionMeasurements, Replica

D_VOCAB, N_CTX, BOS, EOS = 61, 40, 0, 1
FORWARD_STATISTICS = [statistic.name for statistic in STATISTICS.select("all")]
FORWARD_PROFILES = [name for name in PROFILES if not PROFILES[name].needs_gradients]
"""What a forward pass gives."""
BYTE_BOS = 256
"""End-of-text token of the byte tokenizer; below it, a token is a byte."""


def gpt2(**changes: Any) -> Any:
    """Configuration of a three-layer GPT-2."""
    sizes = {"vocab_size": D_VOCAB, "n_positions": N_CTX, "n_embd": 32, "n_layer": 3, "n_head": 4}
    return _config("GPT2Config", sizes | changes)


def family(name: str, **changes: Any) -> Any:
    """Configuration of a two-layer model of another family, most of which have rotary positions."""
    sizes = {
        "vocab_size": D_VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": N_CTX,
    }  # fmt: skip
    return _config(name, sizes | changes)


def _config(name: str, fields: dict[str, Any]) -> Any:
    import transformers

    return getattr(transformers, name)(**{"bos_token_id": BOS, "eos_token_id": EOS} | fields)


def save_model(path: Path, config: Any) -> Path:
    """Write a Hugging Face model with random weights: config.json and model.safetensors."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_config(config)
    draw_weights(model)
    model.save_pretrained(path)
    return path


def draw_weights(model: torch.nn.Module, seed: int = 0) -> None:
    """Fill a model with random weights of sensible scale."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.3 if weight.dim() > 1 else 0.2
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
            # The weight of a norm is about 1.
            if weight.dim() == 1 and name.endswith("weight"):
                weight.add_(1)


def legacy_state(
    n_layers: int = 2, n_heads: int = 4, d_head: int = 8, n_ctx: int = N_CTX, d_vocab: int = D_VOCAB
) -> dict[str, torch.Tensor]:
    """Weights of a model, named and shaped as in old TransformerLens checkpoints."""
    generator = torch.Generator().manual_seed(0)
    d_model = n_heads * d_head

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    state = {"embed.W_E": draw(d_vocab, d_model), "pos_embed.W_pos": draw(n_ctx, d_model)}
    for layer in range(n_layers):
        block = f"blocks.{layer}"
        state |= {f"{block}.ln1.w": 1 + draw(d_model), f"{block}.ln1.b": draw(d_model)}
        for name in "QKV":
            state |= {
                f"{block}.attn.W_{name}": draw(n_heads, d_model, d_head),
                f"{block}.attn.b_{name}": draw(n_heads, d_head),
            }
        state |= {
            f"{block}.attn.W_O": draw(n_heads, d_head, d_model),
            f"{block}.attn.b_O": draw(d_model),
        }
    return state | {
        "ln_final.w": 1 + draw(d_model),
        "ln_final.b": draw(d_model),
        "unembed.W_U": draw(d_model, d_vocab),
    }


LEGACY_CONFIG = {
    "n_layers": 2, "n_heads": 4, "d_model": 32, "d_head": 8, "n_ctx": N_CTX, "d_vocab": D_VOCAB,
    "act_fn": "relu", "attn_only": True, "normalization_type": "LN", "eps": 1e-5,
    "positional_embedding_type": "standard", "bos_token_id": BOS,
}  # fmt: skip


def save_legacy(path: Path, ending: str, **changes: Any) -> Path:
    """Write an attention-only model as TransformerLens did: config.json and a .pth, or the same as
    safetensors.
    """
    from safetensors.torch import save_file

    path.mkdir(parents=True)
    write_config(path, LEGACY_CONFIG | changes)
    if ending == "pth":
        torch.save(legacy_state(), path / "toy_final.pth")
    else:
        save_file(legacy_state(), path / "model.safetensors")
    return path


def byte_tokenizer(path: Path, special: str = "<|endoftext|>") -> Path:
    """Write tokenizer.json of 257 tokens: one for each byte, in the order of the bytes, and the end
    of text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # Byte-level pre-tokenisers stand printable bytes for themselves and shift the others beyond
    # 255.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(256, 512))
    letters = [chr(byte if byte in printable else next(shifted)) for byte in range(256)]
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([special])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def save_byte_model(path: Path) -> Path:
    """Write a one-layer GPT-2 that reads bytes."""
    sizes = {"vocab_size": 257, "n_positions": 64, "n_embd": 8, "n_layer": 1, "n_head": 2}
    config = gpt2(**sizes, bos_token_id=BYTE_BOS, eos_token_id=BYTE_BOS)
    return byte_tokenizer(save_model(path, config))


GQA = {"num_key_value_heads": 2}
GEMMA2 = {"head_dim": 8, "sliding_window": 64, **GQA}
GPT_OSS = {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **GQA}

CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: gpt2(),
    "gpt2-two-layers": lambda: gpt2(n_layer=2),
    "gpt2-inverse-layer": lambda: gpt2(scale_attn_by_inverse_layer_idx=True),
    "gpt2-reordered": lambda: gpt2(reorder_and_upcast_attn=True),
    "gpt2-long": lambda: gpt2(n_positions=256, n_layer=1, n_embd=16, n_head=2),
    "llama": lambda: family("LlamaConfig"),
    "llama-gqa": lambda: family("LlamaConfig", **GQA),
    "llama-wide-heads": lambda: family("LlamaConfig", head_dim=12),
    "mistral-window-20": lambda: family("MistralConfig", sliding_window=20, **GQA),
    "neox": lambda: family("GPTNeoXConfig"),
    "neox-serial": lambda: family("GPTNeoXConfig", use_parallel_residual=False),
    "qwen2": lambda: family("Qwen2Config", **GQA),
    "qwen3": lambda: family("Qwen3Config", head_dim=8, **GQA),
    "phi": lambda: family("PhiConfig"),
    "gemma2": lambda: family(
        "Gemma2Config", attn_logit_softcapping=None, final_logit_softcapping=None, **GEMMA2
    ),
    "gemma2-capped": lambda: family("Gemma2Config", **GEMMA2),
    "gemma2-low-caps": lambda: family(
        "Gemma2Config",
        attn_logit_softcapping=1.5,
        final_logit_softcapping=4.0,
        head_dim=8,
        sliding_window=6,
        **GQA,
    ),
    "gpt-oss-window-6": lambda: family(
        "GptOssConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=6, **GPT_OSS
    ),
    "granite": lambda: family(
        "GraniteConfig",
        embedding_multiplier=2.0,
        attention_multiplier=0.5,
        residual_multiplier=0.7,
        logits_scaling=4.0,
        **GQA,
    ),
    # Windows in which the second half of 17 queries does not see key 0.
    "mistral-window-6": lambda: family("MistralConfig", sliding_window=6, **GQA),
    "gemma2-window-6": lambda: family(
        "Gemma2Config",
        attn_logit_softcapping=0.5,
        final_logit_softcapping=None,
        layer_types=["sliding_attention"] * 2,
        **GEMMA2 | {"sliding_window": 6},
    ),
    # Learned sinks, a window in the first layer, and one expert.
    "gpt-oss": lambda: family(
        "GptOssConfig", num_local_experts=1, num_experts_per_tok=1, sliding_window=14, **GPT_OSS
    ),
    "bigcode": lambda: family(
        "GPTBigCodeConfig", n_embd=32, n_inner=48, n_layer=2, n_head=4, n_positions=N_CTX
    ),
    "bloom": lambda: family("BloomConfig", n_layer=2, n_head=4),
    "opt": lambda: family("OPTConfig", ffn_dim=48, word_embed_proj_dim=32),
    "gpt-neo": lambda: family(
        "GPTNeoConfig", num_layers=2, attention_types=[[["global", "local"], 1]], window_size=30
    ),
}
"""Models that several files measure."""


class Shelf:
    """Models on disk and their replicas, each made once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.replicas: dict[str, TextReplica] = {}

    def path(self, name: str) -> Path:
        """A model of `CONFIGS`, `legacy-ENDING`, `bytes`, or a bundled one."""
        if name.endswith("-mini"):
            return find_model(f"bundled:{name}")
        path = self.root / name
        if not path.exists():
            if name.startswith("legacy-"):
                save_legacy(path, name.removeprefix("legacy-"))
            elif name == "bytes":
                save_byte_model(path)
            else:
                save_model(path, CONFIGS[name]())
        return path

    def replica(self, name: str, engine: str = "fused", **changes: Any) -> TextReplica:
        """A replica, which its users leave as it was."""
        key = f"{name} {engine} {changes}"
        if key not in self.replicas:
            self.replicas[key] = replica(self.path(name), engine=engine, **changes)
        return self.replicas[key]


def copy_of(path: Path, to: Path, change: Callable[[Path], object] = lambda _: None) -> Path:
    """A copy of a model directory, changed."""
    shutil.copytree(path, to)
    change(to)
    return to


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write a model's config.json."""
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")


def change_config(path: Path, **changes: Any) -> None:
    """Change fields of a model's config.json."""
    write_config(path, json.loads((path / "config.json").read_text(encoding="utf-8")) | changes)


def pickle_weights(path: Path, more: Mapping[str, Any] | None = None) -> None:
    """Replace a model's weights by a file as older versions of transformers wrote it."""
    from safetensors.torch import load_file

    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save({**tensors, **(more or {})}, path / "pytorch_model.bin")


def change_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a model.safetensors."""
    from safetensors.torch import load, save_file

    tensors = load((path / "model.safetensors").read_bytes())
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def toy_scan(**changes: Any) -> Scan:
    """A scan with little in it."""
    fields = {"model": "toy", "n_ctx": 8, "sequences": 4, "statistics": "all"}
    return parse_scan({**fields, "input": {"family": "uniform_random"}, **changes})


def toy_info(**changes: Any) -> ModelInfo:
    """What a model says of itself, without a model."""
    fields: dict[str, Any] = {
        "path": "/nowhere/toy", "name": "toy", "layout": "huggingface", "sha256": "0" * 16,
        "n_layers": 1, "n_heads": 2, "d_model": 8, "d_head": 4, "n_ctx": 64, "d_vocab": D_VOCAB,
        "bos_token_id": BOS, "eos_token_id": EOS,
    }  # fmt: skip
    return ModelInfo(**fields | changes)


class TextReplica(Replica):
    """A replica that is asked for interventions by their text."""

    def measure(
        self,
        tokens: np.ndarray,
        intervention: Intervention | str = NONE,
        labels: list[list[str]] | None = None,
        partner: np.ndarray | None = None,
    ) -> InterventionMeasurements:
        """Measure under an intervention."""
        if isinstance(intervention, str):
            intervention = parse_intervention(intervention)
        return super().measure(tokens, intervention, labels, partner)


load_once = cache(load_model)


def replica(path: Path, load: Any = load_once, **changes: Any) -> TextReplica:
    """A replica of a model on one CPU core. Who changes the model has it loaded by `load_model`."""
    scan = toy_scan(model=str(path), **{"n_ctx": N_CTX} | changes)
    return TextReplica(describe(path), scan, "cpu", load)


def measure(path: Path, tokens: np.ndarray, **changes: Any) -> InterventionMeasurements:
    """Measure tokens `[sequence pos]` with a model."""
    return replica(path, **changes).measure(tokens)


def multiply_with(patch: pytest.MonkeyPatch, product: Any) -> None:
    """Let the fused engine multiply by `product(x, weight, bias)` in linear layers."""
    products = LinearProducts(product)
    patch.setattr("headcount.workers.engine.fused_engine.linears_in", lambda *_: products)


def repeating_tokens(n_ctx: int, batch: int = 1, distinct: int = 7) -> np.ndarray:
    """Random tokens out of a few, so that many have earlier copies: `[batch n_ctx]`."""
    return (
        np.random.default_rng(n_ctx).integers(2, 2 + distinct, size=(batch, n_ctx)).astype(np.int32)
    )
