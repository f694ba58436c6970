"""Models with random weights, in the layout of a miniature."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from headcount.schemas.packages import PACKAGE
from tests.toys.toy_models import gpt2, legacy_state, save_model, write_config

MINIATURES = PACKAGE / "models"

MOST_POSITIONS = 1024  # positions of a model, if the other has more

UNTRAINED, LIVELY = 0.02, 0.3
"""Standard deviation of weights: as GPT-2 begins, and so large that every change shows."""


def write_random_model(
    directory: Path,
    like: str,
    sizes: Mapping[str, int | str],
    scale: float,
    steps: Sequence[int] = (),
    seed: int = 0,
) -> Path:
    """Write a model in the layout of a miniature; all `steps` have the same weights.

    An untrained one has no biases, and short residual projections, as GPT-2 begins.
    """
    miniature = MINIATURES / like.removeprefix("bundled:")
    config = json.loads((miniature / "config.json").read_text(encoding="utf-8"))
    n_layers, n_heads = int(sizes["n_layers"]), int(sizes.get("n_heads", 8))
    n_ctx = min(int(sizes.get("n_ctx", MOST_POSITIONS)), MOST_POSITIONS)
    d_head = int(sizes["d_head"])
    d_vocab, d_model = int(sizes["d_vocab"]), n_heads * d_head
    if "model_type" in config:
        shape = {"n_layer": n_layers, "n_head": n_heads, "n_embd": d_model, "n_positions": n_ctx}
        # The last token is BOS, as in GPT-2.
        last = dict.fromkeys(("bos_token_id", "eos_token_id"), d_vocab - 1)
        save_model(directory, gpt2(vocab_size=d_vocab, **shape, **last))
    else:
        shape = {"n_layers": n_layers, "n_heads": n_heads, "d_head": d_head, "n_ctx": n_ctx}
        directory.mkdir(parents=True)
        of_width = {"d_model": d_model, "d_vocab": d_vocab, "d_vocab_out": d_vocab}
        write_config(directory, config | shape | of_width)
        save_file(legacy_state(**shape, d_vocab=d_vocab), directory / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    state = load_file(directory / "model.safetensors")
    for name, weight in sorted(state.items()):
        is_residual = name.endswith("c_proj.weight") and scale == UNTRAINED
        own_scale = scale / math.sqrt(2 * n_layers) if is_residual else scale
        # The gain of a norm is 1.
        if name.endswith((".ln_1.weight", ".ln_2.weight", "ln_f.weight", ".w")):
            weight.fill_(1)
        elif name.rpartition(".")[2].startswith("b") and scale == UNTRAINED:
            weight.zero_()
        else:
            weight.copy_(torch.randn(weight.shape, generator=generator) * own_scale)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
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


def miniature_steps(like: str) -> list[int]:
    """The steps after which a miniature has checkpoints."""
    checkpoints = (MINIATURES / like.removeprefix("bundled:")).glob("step-*")
    return sorted(int(checkpoint.name.removeprefix("step-")) for checkpoint in checkpoints)
