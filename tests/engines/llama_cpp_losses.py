"""Losses of tokens behind llama.cpp's cache.

llama_cpp_losses.py MODEL.gguf TOKENS.npy PROMPT FLAGS… prints `[flags sequence pos]` as JSON, for
the tokens behind the first PROMPT + 1. llama.cpp has an environment of its own, so nothing of ours
is imported. Its Python library has no command line; types have the same names in both.
"""

from __future__ import annotations

import argparse
import json
import sys

import llama_cpp  # pyright: ignore
import numpy as np


def losses(path: str, tokens: np.ndarray, prompt: int, flags: str) -> list[list[float]]:
    """Losses `[sequence pos]` of the tokens behind a prompt."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--flash-attn", required=True)
    for stored in ("k", "v"):
        parser.add_argument(f"--cache-type-{stored}", required=True)
    options = parser.parse_args(flags.split())
    length = tokens.shape[1]
    model = llama_cpp.Llama(
        path, n_ctx=length, n_batch=length, n_ubatch=length, n_threads=1, n_threads_batch=1,
        logits_all=True, verbose=False,
        flash_attn=options.flash_attn == "on",
        type_k=getattr(llama_cpp, f"GGML_TYPE_{options.cache_type_k.upper()}"),
        type_v=getattr(llama_cpp, f"GGML_TYPE_{options.cache_type_v.upper()}"),
    )  # fmt: skip
    rows: list[list[float]] = []
    for sequence in tokens:
        model.reset()
        model.eval(sequence.tolist())
        logits = model.scores[prompt : length - 1].astype(float)
        logits -= logits.max(1, keepdims=True)
        chosen = np.take_along_axis(logits, sequence[prompt + 1 :, None], axis=1)[:, 0]
        rows.append((np.log(np.exp(logits).sum(1)) - chosen).tolist())
    return rows


if __name__ == "__main__":
    sequences, prompt = np.load(sys.argv[2]), int(sys.argv[3])
    print(json.dumps([losses(sys.argv[1], sequences, prompt, flags) for flags in sys.argv[4:]]))
