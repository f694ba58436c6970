"""A model of transformers whose heads see windows by masks in float64, and how far its predictions
move: what a trial of a cache must say, by nothing of ours.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from headcount.workers.cache_trial import CacheTrial, Measured
from headcount.workers.model.info.description import find_model

N_CTX, SINK, RECENT = 256, 4, 24
HEADS, GROUP = 8, 2
"""Of the model: query heads, and how many of them share keys."""


def reading_model() -> Any:
    """`bundled:llama-mini` as its library has it."""
    path = find_model("bundled:llama-mini")
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()


def cut_to_windows(model: Any, windows: Collection[tuple[int, int]], first: int = 0) -> None:
    """Let KV heads `(layer, head)` see the first keys and recent ones, in queries from one on."""
    behind = torch.arange(first, N_CTX)[:, None] - torch.arange(N_CTX)
    between = (behind >= RECENT) & (torch.arange(N_CTX) >= SINK)

    def with_mask(layer: int, module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        streams = torch.tensor([(layer, head // GROUP) in windows for head in range(HEADS)])
        unseen = (behind < 0) | (between & streams[:, None, None])
        mask = torch.zeros(unseen.shape, dtype=torch.float64).masked_fill(unseen, -1e30)
        return args, kwargs | {"attention_mask": mask[None]}

    for layer, block in enumerate(model.model.layers):
        block.self_attn.register_forward_pre_hook(partial(with_mask, layer), with_kwargs=True)


def check_moves(
    trial: CacheTrial, measured: Measured, before: Tensor, after: Tensor, first: int = 0
) -> None:
    """Hold a trial to logarithms of probabilities `[sequence pos d_vocab]`, from `first` on."""
    pieces = trial.pieces["chooses"]
    moved = (before.exp() * (before - after)).sum(-1).numpy()  # [sequence pos]
    for is_in, found in (
        (trial._asked("chooses") & ~pieces.is_answer, measured.text_moved),
        (pieces.is_answer, measured.needle_moved),
    ):
        # A token is predicted at the position before it.
        means = [moved[row, :-1][where[first + 1 :]].mean() for row, where in enumerate(is_in)]
        np.testing.assert_allclose(found, means, atol=1e-5)
        assert found.min() > 1e-3
