"""Losses of tokens behind mlx-lm's cache.

mlx_losses.py MODEL TOKENS.npy PROMPT FLAGS… prints `[flags sequence pos]` as JSON, for the tokens
behind the first PROMPT + 1. mlx-lm has an environment of its own, so nothing of ours is imported.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import mlx.core as mx  # pyright: ignore
import numpy as np
from mlx_lm import load  # pyright: ignore
from mlx_lm.generate import generate_step, setup_arg_parser  # pyright: ignore


def losses(model: Any, tokens: list[int], prompt: int, flags: str) -> list[float]:
    """Losses of the tokens behind a prompt, which mlx-lm is made to say one by one."""
    options = setup_arg_parser().parse_args(flags.split())
    following = iter(tokens[prompt + 1 :])
    steps = generate_step(
        mx.array(tokens[: prompt + 1]),
        model,
        max_tokens=len(tokens) - prompt - 1,
        # It begins a step more than it is asked for.
        sampler=lambda _: mx.array([next(following, 0)]),
        kv_bits=options.kv_bits,
        kv_group_size=options.kv_group_size,
        quantized_kv_start=options.quantized_kv_start,
    )
    return [-float(logprobs[token]) for token, logprobs in steps]


if __name__ == "__main__":
    model, _ = load(sys.argv[1])
    sequences, prompt = np.load(sys.argv[2]).tolist(), int(sys.argv[3])
    rows = [[losses(model, each, prompt, flags) for each in sequences] for flags in sys.argv[4:]]
    print(json.dumps(rows))
