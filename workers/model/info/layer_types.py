"""Whether transformers takes windows of single layers from the configuration of a model."""

from pathlib import Path


def layer_types_problem(path: Path) -> str | None:
    """Why `layer_types` of full and sliding attention would not do; None if they would."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    config = config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    if types is None:
        return f"models of type {config.model_type} take no layer_types"
    if others := {*types} - {"full_attention"}:
        return f"the model has layers of {', '.join(sorted(others))} already"
    return None
