"""Safetensors as bytes, for the formats that are read as weights are."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from headcount.schemas.errors import QueryError


def safetensors_bytes(tensors: Mapping[str, np.ndarray], provenance: Mapping[str, object]) -> bytes:
    """The content of a safetensors file; the header says where it comes from."""
    try:
        from safetensors.numpy import save
    except ModuleNotFoundError:
        raise QueryError(
            "this format needs safetensors, which is not installed: pip install -e '.[export]'"
        ) from None
    # Readers of weights look for this format in the header: the layout of torch's tensors.
    metadata = {"format": "pt", "headcount": json.dumps(provenance, ensure_ascii=False)}
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    return save(arrays, metadata)
