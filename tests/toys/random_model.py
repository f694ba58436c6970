"""Models with random weights, in the layout of a miniature."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headcount.schemas.packages import PACKAGE
from tests.toys.toy_models import family, legacy_state, write_config

MINIATURES = PACKAGE / "models"

MOST_POSITIONS = 1024  # positions of a model, if the other has more

UNTRAINED, LIVELY = 0.02, 0.3
"""Standard deviation of weights: as GPT-2 begins, and so large that every change shows."""


FAMILIES = {
    "gpt2": "GPT2Config", "gpt_neo": "GPTNeoConfig", "opt": "OPTConfig", "qwen2": "Qwen2Config",
    "llama": "LlamaConfig", "mistral": "MistralConfig",
}  # fmt: skip
"""The configurations of families of transformers."""


def config_of_family(name: str, n_layers: int, n_heads: int, d_model: int, **fields: int) -> Any:
    """The configuration of a model of a family of `FAMILIES`."""
    # Two queries share a key, if there are two.
    more: dict[str, Any] = {"num_key_value_heads": n_heads // 2 if n_heads % 2 == 0 else n_heads}
    if name == "gpt2":
        more = {}
    elif name == "gpt_neo":
        more = {"attention_types": [[["global"], n_layers]]}
    elif name == "opt":
        more = {"ffn_dim": 4 * d_model, "word_embed_proj_dim": d_model}
    elif name == "mistral":
        more |= {"sliding_window": None}
    sizes = {"num_hidden_layers": n_layers, "num_attention_heads": n_heads, "hidden_size": d_model}
    return family(FAMILIES[name], **sizes, **fields, **more, intermediate_size=4 * d_model)


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
        fields = {"max_position_embeddings": n_ctx, "vocab_size": d_vocab, **last}
        name = str(sizes.get("family", "gpt2"))
        torch.manual_seed(seed)
        new_config = config_of_family(name, n_layers, n_heads, d_model, **fields)
        model = AutoModelForCausalLM.from_config(new_config)
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
