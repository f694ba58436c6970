"""How the bridge of a model is made: beside its bare modules, of modules of its own, or folded."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn

from headcount.schemas.errors import ModelError
from headcount.schemas.reasons import reason
from headcount.workers.bridge.bridge import Bridge
from headcount.workers.model.attention_check import difference_of_logits
from headcount.workers.model.attention_layers import own_attention
from headcount.workers.model.bare_modules import (
    find_modules,
    first_mlp,
    fuse_gelu,
    key_projections,
    rotary_modules,
)
from headcount.workers.model.model import LoadedModules
from headcount.workers.model.model_info import ModelInfo

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

MODEL_COMPONENTS = {"normed_final": "ln_final"} | {
    name: name for name in ("embed", "pos_embed", "unembed")
}
BLOCK_COMPONENTS = {"normed": "ln1", "attn_out": "attn", "mlp_out": "mlp"}
"""The components of TransformerLens whose output is an activation."""


def boot(
    info: ModelInfo,
    model: nn.Module,
    bare: nn.Module,
    blocks: list[nn.Module],
    dtype: torch.dtype,
) -> Bridge:
    """The bridge of a model of transformers, which is used up; it shares the tensors of `bare`."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.model_bridge.sources.transformers import helpers, source

    fuse_gelu(model, partial(nn.GELU, approximate="tanh"))
    device = str(next(bare.parameters()).device)
    try:
        with (
            stub_tokenizer() as tokenizer,
            # TransformerLens would install torchvision, and with it another torch, to prepare
            # images that nobody shows the model.
            mock.patch.object(helpers, "_ensure_torchvision", return_value=False),
            mock.patch.object(source, "load_modality_processor", return_value=None),
        ):
            bridge = TransformerBridge.boot_transformers(
                info.path, hf_model=model, tokenizer=tokenizer, device=device, dtype=dtype
            )
        components: Any = bridge.adapter.component_mapping
        layers: Any = bare.get_submodule(components["blocks"].name)
        if list(layers) != blocks:
            raise ModelError(f"{info.name}: TransformerLens finds other layers in it")
        modules = _modules_by_activation(bridge, bare, blocks)
    except Exception:
        # Its message lists every architecture that it knows. Ours says what follows from it.
        problem = f"TransformerLens has no bridge for {type(bare).__name__}"
        return Bridge(info.name, None, find_modules(bare, blocks), problem)
    # Again, because the bridge has put modules of its own in.
    model.requires_grad_(False)
    return Bridge(info.name, bridge, modules)


@contextmanager
def stub_tokenizer() -> Iterator[Any]:
    """The smallest tokenizer that a bridge accepts. It needs one, but we tokenise ourselves."""
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    stub = Tokenizer(models.WordLevel({"<unk>": 0, "<bos>": 1}, unk_token="<unk>"))
    with tempfile.TemporaryDirectory() as path:
        PreTrainedTokenizerFast(
            tokenizer_object=stub, bos_token="<bos>", eos_token="<bos>"
        ).save_pretrained(path)
        yield AutoTokenizer.from_pretrained(path, local_files_only=True)


def compared(loaded: LoadedModules, tokens: Tensor) -> Bridge:
    """The bridge of modules, which is not used where its logits are not theirs."""
    booted = loaded.boot()
    assert isinstance(booted, Bridge)
    bridge: Any = booted.transformer_bridge
    if bridge is None:
        return booted
    with torch.inference_mode(), own_attention(loaded.bare):
        expected = loaded.bare(tokens, use_cache=False).logits
        try:
            problem = difference_of_logits(bridge(tokens), expected)
        except Exception as error:
            problem = reason(error)
    if problem is None:
        return booted
    name = type(loaded.bare).__name__
    problem = f"TransformerLens does not compute the logits of {name} ({problem})"
    return Bridge(booted.name, None, find_modules(loaded.bare, loaded.blocks), problem)


def folded(info: ModelInfo, loaded: LoadedModules) -> LoadedModules:
    """The modules with a bridge whose weights are folded; the bare modules keep theirs as trained,
    so whatever is folded must not be asked of them.
    """
    booted = loaded.boot()
    assert isinstance(booted, Bridge)
    bridge = booted.transformer_bridge
    if bridge is None:
        raise ModelError(f"{info.name}: {booted.problem}, which folds weights")
    bridge.enable_compatibility_mode()
    d_model, d_vocab = bridge.W_U.shape
    # On the device "meta" no memory is taken for weights that are replaced at once.
    unembedding = nn.Linear(d_model, d_vocab, device="meta")
    unembedding.weight = nn.Parameter(bridge.W_U.T, requires_grad=False)  # [d_vocab d_model]
    unembedding.bias = nn.Parameter(bridge.b_U, requires_grad=False)
    known = loaded.known | {"unembed": [unembedding], "mlp_out": [], "first_mlp": []}
    return loaded._replace(known=known, boot=lambda: booted, has_booted=True)


def modules_of_bridge(name: str, transformer_bridge: TransformerBridge) -> LoadedModules:
    """The modules of a bridge that is there, and that has no other bare modules than its own."""
    bare, blocks = transformer_bridge.original_model, list(transformer_bridge.blocks)
    modules = _modules_by_activation(transformer_bridge, bare, blocks)
    bridge = Bridge(name, transformer_bridge, modules)
    return LoadedModules(bare, blocks, {}, lambda: bridge, has_booted=True)


def _modules_by_activation(
    bridge: TransformerBridge, bare: nn.Module, blocks: list[nn.Module]
) -> dict[str, list[nn.Module]]:
    """The bare modules whose output is an activation, by activation; none if there is no module."""
    # The adapter names where each component lies in the bare modules of its architecture.
    components: Any = bridge.adapter.component_mapping
    modules: dict[str, list[nn.Module]] = {}
    for activation, name in MODEL_COMPONENTS.items():
        present = name in components
        modules[activation] = [bare.get_submodule(components[name].name)] if present else []
    for activation, name in BLOCK_COMPONENTS.items():
        component = components["blocks"].submodules.get(name)
        # Some architectures have an MLP that is not a module: its component has no name.
        attribute = None if component is None else component.name
        modules[activation] = [
            getattr(block, attribute) for block in blocks if attribute and hasattr(block, attribute)
        ]
    modules["rotary_positions"] = rotary_modules(bare)
    modules["key_input"] = key_projections(blocks)
    modules["first_mlp"] = modules["mlp_out"][:1] or first_mlp(blocks[0])
    return modules
