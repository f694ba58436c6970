"""Models with random weights, in the layout of a miniature."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
)

from headcount.schemas.packages import PACKAGE
from tests.toys.toy_models import legacy_state, write_config

MINIATURES = PACKAGE / "models"

MOST_POSITIONS = 1024  # positions of a model, if the other has more

UNTRAINED, LIVELY = 0.02, 0.3
"""Standard deviation of weights: as GPT-2 begins, and so large that every change shows."""


FAMILIES: dict[str, Callable[[dict[str, int]], Any]] = {
    "gpt2": lambda shape: GPT2Config(**shape),
    "gpt_neo": lambda shape: GPTNeoConfig(
        **shape, attention_types=[[["global"], shape["num_hidden_layers"]]]
    ),
    "opt": lambda shape: OPTConfig(
        **shape, ffn_dim=4 * shape["hidden_size"], word_embed_proj_dim=shape["hidden_size"]
    ),
    "qwen2": lambda shape: Qwen2Config(**shape, **_of_rotary(shape)),
    "llama": lambda shape: LlamaConfig(**shape, **_of_rotary(shape)),
    "mistral": lambda shape: MistralConfig(**shape, **_of_rotary(shape), sliding_window=None),
}
"""Configurations of families, from sizes in the words of transformers."""


def _of_rotary(shape: dict[str, int]) -> dict[str, int]:
    """Two queries share a key, if there are two."""
    n_heads, d_model = shape["num_attention_heads"], shape["hidden_size"]
    groups = n_heads // 2 if n_heads % 2 == 0 else n_heads
    return {"intermediate_size": 4 * d_model, "num_key_value_heads": groups}


def write_random_model(
    directory: Path,
    like: str,
    sizes: Mapping[str, int | str],
    scale: float,
    steps: Sequence[int] = (),
    seed: int = 0,
) -> Path:
    """Write a model in the layout of a miniature; all `steps` have the same weights.

    An untrained model of transformers is as that makes it.
    """
    miniature = MINIATURES / like.removeprefix("bundled:")
    config = json.loads((miniature / "config.json").read_text(encoding="utf-8"))
    n_layers, n_heads = int(sizes["n_layers"]), int(sizes.get("n_heads", 8))
    n_ctx = min(int(sizes.get("n_ctx", MOST_POSITIONS)), MOST_POSITIONS)
    d_head = int(sizes["d_head"])
    d_vocab, d_model = int(sizes["d_vocab"]), n_heads * d_head
    if "model_type" in config:
        from transformers import AutoModelForCausalLM

        # The last token is BOS, as in GPT-2.
        last = dict.fromkeys(("bos_token_id", "eos_token_id"), d_vocab - 1)
        shape = {
            "num_hidden_layers": n_layers, "num_attention_heads": n_heads, "hidden_size": d_model,
            "max_position_embeddings": n_ctx, "vocab_size": d_vocab, **last,
        }  # fmt: skip
        make_config = FAMILIES[str(sizes.get("family", "gpt2"))]
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(make_config(shape))
        if scale != UNTRAINED:
            _draw(dict(model.named_parameters()), scale, seed)
        model.save_pretrained(directory)
    else:
        shape = {"n_layers": n_layers, "n_heads": n_heads, "d_head": d_head, "n_ctx": n_ctx}
        directory.mkdir(parents=True)
        of_width = {"d_model": d_model, "d_vocab": d_vocab, "d_vocab_out": d_vocab}
        write_config(directory, config | shape | of_width)
        state = legacy_state(**shape, d_vocab=d_vocab)
        _draw(state, scale, seed)
        save_file(state, directory / "model.safetensors")
    # The tokenizer of a miniature, with tokens that no text has up to the vocabulary.
    tokenizer = json.loads((MINIATURES / "gpt2-mini" / "tokenizer.json").read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    known = len({*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])})
    vocabulary |= {f"<unused {token}>": token for token in range(known, d_vocab)}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    for step in steps:
        checkpoint = directory / f"step-{step:06}"
        checkpoint.mkdir()
        for file in directory.glob("*.*"):
            (checkpoint / file.name).symlink_to(file)
    return directory


def _draw(state: Mapping[str, torch.Tensor], scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(state.items()):
            # The gain of a norm is 1. An untrained model has no biases.
            if name.endswith((".ln_1.weight", ".ln_2.weight", "ln_f.weight", "norm.weight", ".w")):
                weight.fill_(1)
            elif name.rpartition(".")[2].startswith("b") and scale == UNTRAINED:
                weight.zero_()
            else:
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)


def miniature_steps(like: str) -> list[int]:
    """The steps after which a miniature has checkpoints."""
    checkpoints = (MINIATURES / like.removeprefix("bundled:")).glob("step-*")
    return sorted(int(checkpoint.name.removeprefix("step-")) for checkpoint in checkpoints)
