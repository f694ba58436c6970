"""From a model's files to a `Model`: its bare modules, and how their bridge is booted.

A model in Hugging Face's layout is loaded by transformers, and its bridge is booted when something
asks for it. So is a GGUF file, whose weights become plain ones. One in TransformerLens's old layout
is converted to modules of TransformerLens's own.
"""

import copy
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headcount.schemas.errors import ModelError
from headcount.schemas.reasons import reason
from headcount.workers.bridge.booting import boot, folded
from headcount.workers.bridge.legacy import load_legacy
from headcount.workers.model.adapters import apply_adapter
from headcount.workers.model.attention_check import CHECK_TOKENS, drawn_tokens
from headcount.workers.model.attention_layers import take_over_attention
from headcount.workers.model.attention_modules import take_over_modules
from headcount.workers.model.bare_modules import (
    InPlaceGelu,
    find_blocks,
    find_modules,
    fuse_gelu,
)
from headcount.workers.model.info.gguf_file import gguf_alone, gguf_config
from headcount.workers.model.info.model_files import adapter_files, weight_files
from headcount.workers.model.model import LoadedModules, Model
from headcount.workers.model.model_info import ModelInfo
from headcount.workers.model.pickles import check_pickles

STORED_MASK = re.compile(r"\.(attn|attention)\.(masked_)?bias$")
"""Names of causal masks, which older versions of transformers stored for GPT-2 and GPT-Neo."""

NO_ADAPTER = {"subfolder": "no-adapter"}
"""Where transformers is to look for an adapter. By itself it applies the one beside the weights."""

LOADING: dict[str, Any] = {
    "attn_implementation": "eager",
    "trust_remote_code": False,
    "output_loading_info": True,
    "ignore_mismatched_sizes": True,
}
"""What transformers is told of every model."""

BARE_ALONE = ("embed", "unembed", "rotary_positions", "key_input")
"""Activations whose modules are found without TransformerLens."""


def load_model(
    info: ModelInfo, weights: str, device: str, dtype: torch.dtype = torch.float32
) -> Model:
    """Load a model with its weights as `dtype`; `weights` is `raw` or `folded`."""
    load = LOADERS[info.layout]
    return model_of(info, load(info, device, dtype), weights)


def model_of(info: ModelInfo, loaded: LoadedModules, weights: str) -> Model:
    """A model from its modules; `weights` is `raw` or `folded`."""
    if weights == "folded":
        loaded = folded(info, loaded)
    model = Model(info, loaded)
    if loaded.has_booted:
        model.bridge()  # It costs no more than its check.
    return model


# Hugging Face's layout


def bridgeable(info: ModelInfo, model: nn.Module, device: str, dtype: torch.dtype) -> LoadedModules:
    """The bare modules of a model of transformers. The model itself is kept for the bridge."""
    model.eval().requires_grad_(False).to(device)
    # A bridge replaces modules in place, so the bare modules are a copy. The memo makes the copy
    # share the tensors.
    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    bare = copy.deepcopy(model, memo=tensors)
    fuse_gelu(bare, InPlaceGelu)
    take_over_attention(bare)
    take_over_modules(bare)
    blocks = find_blocks(bare, info)
    found = find_modules(bare, blocks)
    known = {activation: found[activation] for activation in BARE_ALONE}
    return LoadedModules(bare, blocks, known, partial(boot, info, model, bare, blocks, dtype))


def _load_hugging_face(info: ModelInfo, device: str, dtype: torch.dtype) -> LoadedModules:
    from transformers import AutoModelForCausalLM

    files = weight_files(Path(info.path), info.layout)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            info.path,
            dtype=dtype,
            use_safetensors=files[0].suffix != ".bin",
            # A .bin file is a pickle. Code in it is refused and not run.
            weights_only=True,
            local_files_only=True,
            adapter_kwargs=NO_ADAPTER,
            **LOADING,
        )
    except Exception as error:
        check_pickles(files)
        raise ModelError(f"{info.path}: the weights cannot be loaded ({reason(error)})") from None
    model, report = loaded
    _check_absent(info, report)
    if info.has_adapter:
        check_pickles(file for file in adapter_files(Path(info.path)) if file.suffix == ".bin")
        apply_adapter(model, Path(info.path), drawn_tokens(info, 1, CHECK_TOKENS))
    # What the library knows to ignore is not among them.
    unused = (name for name in report["unexpected_keys"] if not STORED_MASK.search(name))
    return bridgeable(info, model, device, dtype)._replace(unused=tuple(sorted(unused)))


def _load_gguf(info: ModelInfo, device: str, dtype: torch.dtype) -> LoadedModules:
    from transformers import AutoModelForCausalLM

    path = Path(info.path)
    config = gguf_config(path)
    with gguf_alone(path) as words:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **words, config=config, dtype=dtype, **LOADING
        )
    model, report = loaded
    _check_absent(info, report)
    # The file does not name it, and TransformerLens looks for it.
    model.config.architectures = [type(model).__name__]
    unused = tuple(sorted(report["unexpected_keys"]))
    return bridgeable(info, model, device, dtype)._replace(unused=unused)


LOADERS = {"huggingface": _load_hugging_face, "gguf": _load_gguf, "legacy": load_legacy}
"""How models are loaded, by the layout of their files."""


def _check_absent(info: ModelInfo, report: Mapping[str, Any]) -> None:
    """Refuse weights that the files do not have, or in another shape."""
    # transformers draws such weights at random and only warns.
    mismatched = [name for name, *_ in report["mismatched_keys"]]
    absent = sorted({*report["missing_keys"], *mismatched})
    if absent:
        raise ModelError(
            f"{info.path}: weights missing or of another shape: {', '.join(absent[:5])} "
            f"({len(absent)} in all)"
        )
