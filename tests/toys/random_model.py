"""Models with random weights and narrow heads, in the layout of a miniature."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from headcount.schemas.packages import PACKAGE

MINIATURES = PACKAGE / "models"

D_HEAD = 4  # width of a head
MOST_POSITIONS = 1024  # positions of a model, if the other has more

UNTRAINED, LIVELY = 0.02, 0.3
"""Standard deviation of weights: as GPT-2 begins, and so large that every change shows."""


def write_random_model(
    directory: Path,
    like: str,
    sizes: Mapping[str, int | str],
    scale: float,
    steps: Sequence[int] = (),
) -> Path:
    """Write a model in the layout of a miniature; all `steps` have the same weights."""
    miniature = MINIATURES / like.removeprefix("bundled:")
    config = _read_json(miniature / "config.json")
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    n_layers, n_heads = int(sizes["n_layers"]), int(sizes.get("n_heads", 8))
    n_ctx = min(int(sizes.get("n_ctx", MOST_POSITIONS)), MOST_POSITIONS)
    d_vocab = int(sizes["d_vocab"])
    write = _write_gpt2 if "model_type" in config else _write_legacy
    write(directory, miniature, (n_layers, n_heads, n_ctx, d_vocab))
    state = load_file(directory / "model.safetensors")
    for name, weight in sorted(state.items()):
        # The gain of a norm stays 1. An untrained model has no biases.
        is_gain = name.endswith((".ln_1.weight", ".ln_2.weight", "ln_f.weight", ".w"))
        is_bias = name.rpartition(".")[2].startswith(("bias", "b", "b_"))
        if is_gain or (is_bias and scale == UNTRAINED):
            continue
        weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(directory, d_vocab)
    for step in steps:
        checkpoint = directory / f"step-{step:06}"
        checkpoint.mkdir()
        for file in directory.glob("*.*"):
            (checkpoint / file.name).symlink_to(file)
    return directory


def miniature_steps(like: str) -> list[int]:
    """The steps after which a miniature has checkpoints."""
    checkpoints = (MINIATURES / like.removeprefix("bundled:")).glob("step-*")
    return sorted(int(checkpoint.name.removeprefix("step-")) for checkpoint in checkpoints)


def _write_tokenizer(directory: Path, d_vocab: int) -> None:
    """The tokenizer of a miniature, with tokens that no text has up to the vocabulary."""
    tokenizer = _read_json(MINIATURES / "gpt2-mini" / "tokenizer.json")
    vocabulary = tokenizer["model"]["vocab"]
    known = len({*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])})
    vocabulary |= {f"<unused {token}>": token for token in range(known, d_vocab)}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _write_gpt2(directory: Path, _miniature: Path, shape: tuple[int, int, int, int]) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    n_layers, n_heads, n_ctx, d_vocab = shape
    sizes: dict[str, Any] = {"n_layer": n_layers, "n_head": n_heads, "n_embd": n_heads * D_HEAD}
    sizes |= {"n_positions": n_ctx, "vocab_size": d_vocab}
    # The last token, as in GPT-2.
    config = GPT2Config(**sizes, bos_token_id=d_vocab - 1, eos_token_id=d_vocab - 1)
    GPT2LMHeadModel(config).save_pretrained(directory)


def _write_legacy(directory: Path, miniature: Path, shape: tuple[int, int, int, int]) -> None:
    config = _read_json(miniature / "config.json")
    n_layers, n_heads, n_ctx, d_vocab = shape
    sizes = {"n_layers": n_layers, "n_heads": n_heads, "n_ctx": n_ctx, "d_vocab": d_vocab}
    sizes |= {"d_vocab_out": d_vocab, "d_head": D_HEAD, "d_model": n_heads * D_HEAD}
    (directory / "config.json").write_text(json.dumps(config | sizes), encoding="utf-8")
    # The size of each axis of the miniature's weights says which size it is.
    names = ("n_ctx", "d_vocab", "n_heads", "d_head", "d_model")
    renamed = {config[name]: sizes[name] for name in names}
    state = {}
    for name, weight in load_file(miniature / "model.safetensors").items():
        axes = [renamed.get(size, size) for size in weight.shape]
        # The width may be as large as the context, so it is told apart by its place.
        if name.startswith("pos_embed"):
            axes = [n_ctx, renamed[config["d_model"]]]
        is_gain = name.endswith(".w")
        state[name] = torch.ones(axes) if is_gain else torch.zeros(axes)
    save_file(state, directory / "model.safetensors")
