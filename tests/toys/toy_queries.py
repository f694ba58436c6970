"""The queries of a small model, taken from transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch


def queries_of(path: Path, tokens: np.ndarray) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Queries `[batch head pos d_head]` of each layer in float64, before and after rotation.

    They are taken from transformers where its own modules rotate and multiply them.
    """
    from transformers import AutoModelForCausalLM

    before: list[torch.Tensor] = []
    after: list[torch.Tensor] = []
    network = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    file: Any = sys.modules[type(network).__module__]
    rotate = getattr(file, "apply_rotary_pos_emb", None)
    attend = file.eager_attention_forward

    def keep_unrotated(q: torch.Tensor, *rest: Any, **options: Any) -> Any:
        assert rotate is not None
        before.append(q)
        return rotate(q, *rest, **options)

    def keep_rotated(module: Any, q: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if rotate is None:
            before.append(q)
        # Components that are not rotated come only here.
        before[-1] = torch.cat([before[-1], q[..., before[-1].shape[-1] :]], -1)
        after.append(q)
        return attend(module, q, *rest, **options)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(file, "apply_rotary_pos_emb", keep_unrotated, raising=False)
        patch.setattr(file, "eager_attention_forward", keep_rotated)
        network(torch.from_numpy(tokens).long())
    return before, after
