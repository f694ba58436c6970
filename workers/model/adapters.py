"""Adapters, as the library PEFT puts them into a model of transformers, merged into its weights.

They are told by their methods, so that a model without adapters never needs PEFT.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headcount.schemas.errors import ModelError
from headcount.schemas.reasons import reason
from headcount.workers.model.attention_check import difference_of_logits

MERGED_MODULE = "unload_and_optionally_merge_module"
"""PEFT's method of modules that choose among several, for example among trained embeddings."""


def apply_adapter(model: Any, path: Path, tokens: Tensor) -> None:  # noqa: ANN401 (of transformers)
    """Merge the adapter that lies in a directory into the weights of a model."""
    try:
        # PEFT warns of words that transformers gives up.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = model.load_adapter(str(path))
    except ImportError:
        raise ModelError(
            f"{path}: adapter is 'apply', and the library that does it is not installed: "
            "pip install peft"
        ) from None
    except Exception as error:
        raise ModelError(f"{path}: its adapter cannot be applied ({reason(error)})") from None
    # transformers leaves such weights as they were drawn, or out, and only warns.
    wrong = sorted({*report.missing_keys, *report.unexpected_keys})
    if wrong:
        raise ModelError(
            f"{path}: the adapter's weights do not fit adapter_config.json: {', '.join(wrong[:3])} "
            f"({len(wrong)} in all)"
        )
    merge_adapters(model, tokens)


def adapters_of(modules: nn.Module) -> dict[str, Any]:
    """The outermost modules that change what the module inside them computes, by name."""
    adapters: dict[str, Any] = {}
    for name, part in modules.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in adapters)
        if not is_inside and (_is_adapter(part) or hasattr(part, MERGED_MODULE)):
            adapters[name] = part
    return adapters


def _is_adapter(part: nn.Module) -> bool:
    return hasattr(part, "merge") and hasattr(part, "get_base_layer")


def merge_adapters(own: Any, tokens: Tensor) -> None:  # noqa: ANN401 (a model of transformers)
    """Put the adapters of a model into its weights; refused if that changes its logits."""
    adapters = adapters_of(own)
    if not adapters:
        return
    # Merging writes to weights, so they are not shared, neither with the user nor within the model.
    for part in {part for adapter in adapters.values() for part in adapter.modules()}:
        for name, weight in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(weight.detach().clone(), requires_grad=False))
    try:
        # PEFT warns where there is nothing to do.
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = own(tokens, use_cache=False).logits
            for name, adapter in adapters.items():
                own.set_submodule(name, _merged(adapter))
            problem = difference_of_logits(own(tokens, use_cache=False).logits, expected)
    except Exception as error:
        problem = reason(error)
    if problem is not None:
        kind = type(next(iter(adapters.values()))).__name__
        raise ModelError(
            f"model: adapters ({kind}) cannot be merged into a copy of the weights: {problem}; "
            "merge them yourself, or measure without them"
        )


def _merged(adapter: Any) -> nn.Module:  # noqa: ANN401 (one of PEFT's modules)
    is_off = adapter.disable_adapters
    if hasattr(adapter, MERGED_MODULE):
        if is_off:
            return adapter.original_module
        return getattr(adapter, MERGED_MODULE)(merge=True, safe_merge=False, adapter_names=None)
    parts: list[Any] = [part for part in adapter.modules() if _is_adapter(part)]
    for part in parts:
        if not is_off and not part.merged:
            part.merge()
        elif is_off and part.merged:
            part.unmerge()
    return adapter.get_base_layer()
