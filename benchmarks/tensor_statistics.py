"""What statistics of tensors cost, in CPU time of the attention alone.

python -m benchmarks.tensor_statistics
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

import headcount

SHAPES = ((1, 12, 12, 1024), (4, 9, 3, 512), (1, 16, 4, 2048))
"""Sequences, heads, KV heads and tokens."""

ROUNDS = 9


def cpu_seconds(call: Callable[[], object]) -> float:
    """The CPU time of a call."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def main() -> None:
    """Print medians of interleaved rounds."""
    for batch, heads, kv_heads, n_ctx in SHAPES:
        q = torch.randn(batch, heads, n_ctx, 64)
        k, v = torch.randn(2, batch, kv_heads, n_ctx, 64)
        tokens = torch.randint(500, (batch, n_ctx))
        attention = partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
        alone = partial(headcount.attention_statistics, q, k, v)
        calls = (attention, alone, partial(alone, tokens=tokens))
        rounds = [[cpu_seconds(call) for call in calls] for _ in range(ROUNDS + 1)][1:]
        ratios = (statistics.median(each[i] / each[0] for each in rounds) for i in (1, 2))
        words = "{:.2f} times the attention, with tokens {:.2f}".format(*ratios)
        print(f"{batch} × {n_ctx} tokens, {heads} heads over {kv_heads}: {words}")


if __name__ == "__main__":
    main()
