"""From a model's files to a `Model`: its bare modules, and how their `TransformerBridge` is booted.

A model in Hugging Face's layout is loaded by transformers, and its bridge is booted when something
asks for it. One in TransformerLens's old layout is converted to modules of TransformerLens's own.
"""

from __future__ import annotations

import copy
import pickle
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import nn

from headcount.schemas.errors import ModelError
from headcount.schemas.files.places import reason
from headcount.workers.model.adapters import apply_adapter
from headcount.workers.model.attention_check import CHECK_TOKENS, drawn_tokens
from headcount.workers.model.attention_layers import take_over_attention
from headcount.workers.model.attention_modules import take_over_modules
from headcount.workers.model.bare_modules import (
    find_blocks,
    find_modules,
    first_mlp,
    key_projections,
    rotary_modules,
)
from headcount.workers.model.files.model_files import (
    CONFIG,
    adapter_files,
    read_object,
    weight_files,
)
from headcount.workers.model.files.model_info import LEGACY_PLAIN, SHAPE, ModelInfo
from headcount.workers.model.model import BootedBridge, LoadedModules, Model

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

LEGACY_FIELDS = (*SHAPE, "act_fn", "attn_only", "final_rms", "eps")
"""Fields of a legacy config.json that have the same name in TransformerLens's config of today."""

STORED_MASK = re.compile(r"\.(attn|attention)\.(masked_)?bias$")
"""Names of causal masks, which older versions of transformers stored for GPT-2 and GPT-Neo."""

MODEL_COMPONENTS = {"normed_final": "ln_final"} | {
    name: name for name in ("embed", "pos_embed", "unembed")
}
BLOCK_COMPONENTS = {"normed": "ln1", "attn_out": "attn", "mlp_out": "mlp"}
"""The components of TransformerLens whose output is an activation."""

NO_ADAPTER = {"subfolder": "no-adapter"}
"""Where transformers is to look for an adapter. By itself it applies the one beside the weights."""

BARE_ALONE = ("embed", "unembed", "rotary_positions", "key_input")
"""Activations whose modules are found without TransformerLens."""


def load_model(
    info: ModelInfo, weights: str, device: str, dtype: torch.dtype = torch.float32
) -> Model:
    """Load a model with its weights as `dtype`; `weights` is `raw` or `folded`."""
    load = _load_hugging_face if info.layout == "huggingface" else _load_legacy
    return model_of(info, load(info, device, dtype), weights)


def model_of(info: ModelInfo, loaded: LoadedModules, weights: str) -> Model:
    """A model from its modules; `weights` is `raw` or `folded`."""
    if weights == "folded":
        loaded = _folded(info, loaded)
    model = Model(info, loaded)
    if loaded.has_booted:
        model.boot_bridge()  # It costs no more than its check.
    return model


def _folded(info: ModelInfo, loaded: LoadedModules) -> LoadedModules:
    booted = loaded.boot()
    if booted.bridge is None:
        raise ModelError(f"{info.name}: {booted.problem}, which folds weights")
    # Only the bridge gets folded weights. The bare modules keep the weights as trained, so whatever
    # is folded must not be asked of them.
    bridge = booted.bridge
    bridge.enable_compatibility_mode()
    d_model, d_vocab = bridge.W_U.shape
    # On the device "meta" no memory is taken for weights that are replaced at once.
    unembedding = nn.Linear(d_model, d_vocab, device="meta")
    unembedding.weight = nn.Parameter(bridge.W_U.T, requires_grad=False)  # [d_vocab d_model]
    unembedding.bias = nn.Parameter(bridge.b_U, requires_grad=False)
    known = loaded.known | {"unembed": [unembedding], "mlp_out": [], "first_mlp": []}
    return loaded._replace(known=known, boot=lambda: booted, has_booted=True)


# Hugging Face's layout


def bridgeable(info: ModelInfo, model: nn.Module, device: str, dtype: torch.dtype) -> LoadedModules:
    """The bare modules of a model of transformers. The model itself is kept for the bridge."""
    model.eval().requires_grad_(False).to(device)
    # A bridge replaces modules in place, so the bare modules are a copy. The memo makes the copy
    # share the tensors.
    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    bare = copy.deepcopy(model, memo=tensors)
    _fuse_gelu(bare, _InPlaceGelu)
    take_over_attention(bare)
    take_over_modules(bare)
    blocks = find_blocks(bare, info)

    found = find_modules(bare, blocks)
    known = {activation: found[activation] for activation in BARE_ALONE}

    def boot() -> BootedBridge:
        """The bridge of `model`, which is used up; it shares the tensors of `bare`."""
        from transformer_lens.model_bridge import TransformerBridge
        from transformer_lens.model_bridge.sources.transformers import helpers, source

        _fuse_gelu(model, partial(nn.GELU, approximate="tanh"))
        try:
            with (
                _stub_tokenizer() as tokenizer,
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
            return BootedBridge(None, find_modules(bare, blocks), problem)
        # Again, because the bridge has put modules of its own in.
        model.requires_grad_(False)
        return BootedBridge(bridge, modules)

    return LoadedModules(bare, blocks, known, boot)


def _load_hugging_face(info: ModelInfo, device: str, dtype: torch.dtype) -> LoadedModules:
    from transformers import AutoModelForCausalLM

    files = weight_files(Path(info.path), info.layout)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            info.path,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=files[0].suffix != ".bin",
            # A .bin file is a pickle. Code in it is refused and not run.
            weights_only=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            adapter_kwargs=NO_ADAPTER,
        )
    except Exception as error:
        check_pickles(files)
        raise ModelError(f"{info.path}: the weights cannot be loaded ({reason(error)})") from None
    model, report = loaded
    # transformers draws such weights at random and only warns.
    mismatched = [name for name, *_ in report["mismatched_keys"]]
    absent = sorted({*report["missing_keys"], *mismatched})
    if absent:
        raise ModelError(
            f"{info.path}: weights missing or of another shape: {', '.join(absent[:5])} "
            f"({len(absent)} in all)"
        )
    if info.has_adapter:
        check_pickles(file for file in adapter_files(Path(info.path)) if file.suffix == ".bin")
        apply_adapter(model, Path(info.path), drawn_tokens(info, 1, CHECK_TOKENS))
    # What the library knows to ignore is not among them.
    unused = (name for name in report["unexpected_keys"] if not STORED_MASK.search(name))
    return bridgeable(info, model, device, dtype)._replace(unused=tuple(sorted(unused)))


class _InPlaceGelu(nn.Module):
    """PyTorch's tanh GELU in one pass, written over the output of a linear layer."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """GELU of the inputs, in their memory, unless somebody wants its gradient."""
        if inputs.requires_grad:
            return nn.functional.gelu(inputs, approximate="tanh")
        return torch.ops.aten.gelu_(inputs, approximate="tanh")


def _fuse_gelu(model: nn.Module, make: Callable[[], nn.Module]) -> None:
    """Replace transformers' tanh GELU, which takes eight passes, by the same formula in one."""
    from transformers.activations import NewGELUActivation

    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, make())


@contextmanager
def _stub_tokenizer() -> Iterator[Any]:
    """The smallest tokenizer that a bridge accepts. It needs one, but we tokenise ourselves."""
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    stub = Tokenizer(models.WordLevel({"<unk>": 0, "<bos>": 1}, unk_token="<unk>"))
    with tempfile.TemporaryDirectory() as path:
        PreTrainedTokenizerFast(
            tokenizer_object=stub, bos_token="<bos>", eos_token="<bos>"
        ).save_pretrained(path)
        yield AutoTokenizer.from_pretrained(path, local_files_only=True)


# Pickles

NOT_A_TENSOR = re.compile(
    r"unsupported (?:global: )?\S+ \S*\w|TorchScript archive|legacy \.tar", re.IGNORECASE
)
"""What PyTorch says of an object in a pickle that is not read. The rest of its message advises to
read the pickle all the same.
"""


def check_pickles(files: Iterable[Path]) -> None:
    """Refuse pickles of anything else than tensors: to read them would run their code."""
    for file in files:
        if file.suffix == ".safetensors":
            continue
        try:
            # On this device no memory is taken for tensors.
            torch.load(file, "meta", weights_only=True)
        except Exception as error:
            # Whoever reads it says what else is wrong with it.
            if not isinstance(error, pickle.UnpicklingError) and "weights_only" not in str(error):
                continue
            cause = NOT_A_TENSOR.search(str(error))
            raise ModelError(
                f"{file}: not read, as it is no pickle of tensors alone"
                f"{f' ({cause[0]})' if cause else ''}; where you trust it, convert it to "
                "safetensors"
            ) from None


# TransformerLens's old layout


def _load_legacy(info: ModelInfo, device: str, dtype: torch.dtype) -> LoadedModules:
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge.sources.native import boot
    from transformer_lens.utilities.tl_checkpoint_conversion import convert_tl_checkpoint

    path = Path(info.path)
    fields = read_object(path / CONFIG)
    for key, supported in LEGACY_PLAIN.items():
        if fields.get(key) not in (None, supported):
            raise ModelError(
                f"{path}/config.json: {key} is {fields[key]!r}; only {supported!r} is supported "
                "for legacy files"
            )
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(path, info.layout):
        try:
            if file.suffix == ".safetensors":
                tensors |= load_file(file)
            else:
                # A .pth file is a pickle. `weights_only` runs no code from it.
                tensors |= torch.load(file, "cpu", weights_only=True)
        except Exception as error:
            check_pickles([file])
            raise ModelError(f"{file}: the weights cannot be read ({reason(error)})") from None
    # Files of this family often leave out the unembedding's bias, which is then zero.
    try:
        config = TransformerBridgeConfig(
            **{name: fields[name] for name in LEGACY_FIELDS if fields.get(name) is not None},
            d_mlp=fields.get("d_mlp"),
            normalization_type=fields.get("normalization", fields.get("normalization_type")),
            positional_embedding_type="standard",
            init_weights=False,
            architecture="TransformerLensNative",
        )
        bridge = boot(config, device=device, dtype=dtype)
        in_dtype = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        converted = convert_tl_checkpoint(in_dtype, config)
        converted.setdefault("unembed.bias", torch.zeros(info.d_vocab, dtype=dtype))
        bridge.load_state_dict(converted, strict=True)
    except Exception as error:
        raise ModelError(f"{path}: the weights do not fit config.json ({reason(error)})") from None
    bridge.original_model.eval().requires_grad_(False)
    take_over_modules(bridge)
    # These modules are TransformerLens's own, so bridge and bare modules are the same.
    return modules_of_bridge(bridge)


# Either layout


def modules_of_bridge(bridge: TransformerBridge) -> LoadedModules:
    """The modules of a bridge that is there, and that has no other bare modules than its own."""
    bare, blocks = bridge.original_model, list(bridge.blocks)
    booted = BootedBridge(bridge, _modules_by_activation(bridge, bare, blocks))
    return LoadedModules(bare, blocks, {}, lambda: booted, has_booted=True)


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
