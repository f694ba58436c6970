"""From a model's files to a `Model`: its weights, wrapped in a `TransformerBridge`."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from schemas.errors import ModelError
from schemas.places import reason
from workers.model.attention_layers import native_attention, take_over_attention
from workers.model.model import Model
from workers.model.model_info import LEGACY_PLAIN, ModelInfo, weight_files


def load_model(
    info: ModelInfo, weights: str, device: str, dtype: torch.dtype = torch.float32
) -> Model:
    """Load weights as `dtype` and wrap them in a `TransformerBridge`; `weights` is raw or folded."""
    load = _load_hf if info.layout == "huggingface" else _load_legacy
    bridge, bare, blocks = load(info, device, dtype)
    modules = _modules(bridge, bare, blocks)
    if weights == "folded":
        bridge.enable_compatibility_mode()
        modules["unembed"] = [_unembedding(bridge)]
        # The modules keep the weights as trained, which do not go with the positions of the bridge.
        modules["mlp_out"] = []
    model = Model(info, bridge, bare, blocks, modules)
    model.settle_scales()
    return model


Loaded = tuple[Any, nn.Module, list[nn.Module]]
"""A bridge, the bare modules, and those of them that are the layers."""


def _unembedding(bridge: Any) -> nn.Module:
    """What the bridge unembeds with: the bare modules keep the weights as trained."""
    made = nn.Linear(*bridge.W_U.shape, device="meta")
    made.weight, made.bias = (
        nn.Parameter(weight, requires_grad=False) for weight in (bridge.W_U.T, bridge.b_U)
    )
    return made


def _load_hf(info: ModelInfo, device: str, dtype: torch.dtype) -> Loaded:
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            info.path, dtype=dtype, attn_implementation="eager", use_safetensors=True,
            local_files_only=True, trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except Exception as error:
        raise ModelError(f"{info.path}: the weights cannot be loaded ({reason(error)})") from None
    model, report = loaded
    absent = sorted({*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])})
    if absent:
        raise ModelError(
            f"{info.path}: weights missing or of another shape: {', '.join(absent[:5])} "
            f"({len(absent)} in all)"
        )
    model.eval().requires_grad_(False).to(device)
    # The bridge replaces modules in place, so the bare tree is copied first; the tensors stay
    # shared.
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    bare = copy.deepcopy(model, memo=tensors)
    _fuse_gelu(bare, in_place=True)
    _fuse_gelu(model)
    try:
        with _stub_tokenizer() as tokenizer:
            bridge = TransformerBridge.boot_transformers(
                info.path, hf_model=model, tokenizer=tokenizer, device=device, dtype=dtype
            )
    except Exception as error:
        raise ModelError(
            f"{info.path}: TransformerLens cannot bridge this architecture ({reason(error)})"
        ) from None
    model.requires_grad_(False)
    take_over_attention(bare)
    mapping: Any = bridge.adapter.component_mapping
    blocks: Any = bare.get_submodule(mapping["blocks"].name)
    return bridge, bare, list(blocks)


def _load_legacy(info: ModelInfo, device: str, dtype: torch.dtype) -> Loaded:
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge.sources.native import boot
    from transformer_lens.utilities.tl_checkpoint_conversion import convert_tl_checkpoint

    path = Path(info.path)
    raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
    for key, plain in LEGACY_PLAIN.items():
        if raw.get(key) not in (None, plain):
            raise ModelError(
                f"{path}/config.json: {key} is {raw[key]!r}; only {plain!r} is supported for "
                "legacy files"
            )
    fields = (
        "n_layers",
        "n_heads",
        "d_model",
        "d_head",
        "n_ctx",
        "d_vocab",
        "act_fn",
        "attn_only",
        "final_rms",
        "eps",
    )
    state: dict[str, torch.Tensor] = {}
    for file in weight_files(path, info.layout):
        try:
            state |= (
                load_file(file)
                if file.suffix == ".safetensors"
                else torch.load(file, "cpu", weights_only=True)
            )
        except Exception as error:
            raise ModelError(f"{file}: the weights cannot be read ({reason(error)})") from None
    try:
        config = TransformerBridgeConfig(
            **{name: raw[name] for name in fields if raw.get(name) is not None},
            d_mlp=raw.get("d_mlp"),
            normalization_type=raw.get("normalization", raw.get("normalization_type")),
            positional_embedding_type="standard",
            init_weights=False,
            architecture="TransformerLensNative",
        )
        bridge = boot(config, device=device, dtype=dtype)
        converted = convert_tl_checkpoint(
            {name: tensor.to(dtype) for name, tensor in state.items()}, config
        )
        # Files of this family often leave out the unembedding's bias, which is then zero.
        converted.setdefault("unembed.bias", torch.zeros(info.d_vocab, dtype=dtype))
        bridge.load_state_dict(converted, strict=True)
    except Exception as error:
        raise ModelError(f"{path}: the weights do not fit config.json ({reason(error)})") from None
    bridge.original_model.eval().requires_grad_(False)
    asking = native_attention()
    for block in bridge.blocks:
        block.attn.original_component.__class__ = asking
    return bridge, bridge.original_model, list(bridge.blocks)


def _modules(bridge: Any, bare: nn.Module, blocks: list[nn.Module]) -> dict[str, list[nn.Module]]:
    """The bare modules of the activations that are some module's output."""
    mapping = bridge.adapter.component_mapping
    modules = {
        name: [bare.get_submodule(mapping[name].name)] if name in mapping else []
        for name in ("embed", "pos_embed", "unembed")
    }
    inside = mapping["blocks"].submodules
    for activation, name in (("attn_out", "attn"), ("mlp_out", "mlp")):
        names = [inside[name].name] * len(blocks) if name in inside and inside[name].name else []
        modules[activation] = [
            getattr(block, own)
            for block, own in zip(blocks, names, strict=False)
            if hasattr(block, own)
        ]
    return modules


class _Gelu(nn.Module):
    """PyTorch's one-pass tanh GELU, written over its input: what a linear layer made, nobody else
    reads.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.gelu_(x, approximate="tanh")


def _fuse_gelu(model: nn.Module, in_place: bool = False) -> None:
    """Put a one-pass tanh GELU in the place of the same formula written as eight passes."""
    from transformers.activations import NewGELUActivation

    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, _Gelu() if in_place else nn.GELU(approximate="tanh"))


@contextmanager
def _stub_tokenizer() -> Iterator[Any]:
    """The smallest tokenizer a bridge accepts: it insists on one, and our tokens come from
    elsewhere.
    """
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    stub = Tokenizer(models.WordLevel({"<unk>": 0, "<bos>": 1}, unk_token="<unk>"))
    with tempfile.TemporaryDirectory() as path:
        PreTrainedTokenizerFast(
            tokenizer_object=stub, bos_token="<bos>", eos_token="<bos>"
        ).save_pretrained(path)
        yield AutoTokenizer.from_pretrained(path, local_files_only=True)
