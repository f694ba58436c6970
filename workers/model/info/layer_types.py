"""Which layers of a model have windows, and whether transformers takes them from its config."""

from pathlib import Path
from typing import Any

from headcount.schemas.errors import ModelError
from headcount.workers.model.info.model_files import is_gguf


def layer_types_problem(path: Path) -> str | None:
    """Why `layer_types` of full and sliding attention would not do; None if they would."""
    config = _text_config(path)
    types = getattr(config, "layer_types", None)
    if types is None:
        return f"models of type {config.model_type} take no layer_types"
    if others := {*types} - {"full_attention"}:
        return f"the model has layers of {', '.join(sorted(others))} already"
    return None


def has_sliding_layers(path: Path) -> bool:
    """Whether the configuration of a model names layers with a window."""
    return "sliding_attention" in (getattr(_text_config(path), "layer_types", None) or [])


def _text_config(path: Path) -> Any:  # noqa: ANN401
    from transformers import AutoConfig

    if is_gguf(path):
        raise ModelError(
            f"{path}: expected a directory with a config.json, as this engine reads it, got a GGUF "
            "file; name the directory that it was made from"
        )
    config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    return config.get_text_config(decoder=True)
