"""Models in TransformerLens's old layout, which are converted to modules of its own."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from headcount.schemas.errors import ModelError
from headcount.schemas.reasons import reason
from headcount.workers.bridge.booting import modules_of_bridge
from headcount.workers.model.attention_modules import take_over_modules
from headcount.workers.model.info.description import LEGACY_PLAIN
from headcount.workers.model.info.model_files import CONFIG, read_object, weight_files
from headcount.workers.model.model import LoadedModules
from headcount.workers.model.model_info import SHAPE, ModelInfo
from headcount.workers.model.pickles import check_pickles

LEGACY_FIELDS = (*SHAPE, "act_fn", "attn_only", "final_rms", "eps")
"""Fields of a legacy config.json that have the same name in TransformerLens's config of today."""


def load_legacy(info: ModelInfo, device: str, dtype: torch.dtype) -> LoadedModules:
    """Modules of TransformerLens's own with the weights of files in its old layout."""
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
    return modules_of_bridge(info.name, bridge)
