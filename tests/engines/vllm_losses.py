"""Losses of tokens behind vLLM's cache.

vllm_losses.py MODEL TOKENS.npy PROMPT FLAGS… prints `[flags sequence pos]` as JSON, for the tokens
behind the first PROMPT + 1. vLLM has an environment of its own, so nothing of ours is imported.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from vllm import LLM, EngineArgs, SamplingParams  # pyright: ignore
from vllm.distributed import cleanup_dist_env_and_memory  # pyright: ignore
from vllm.utils.argparse_utils import FlexibleArgumentParser  # pyright: ignore


def losses(path: str, tokens: np.ndarray, prompt: int, flags: str) -> list[list[float]]:
    """Losses `[sequence pos]` of the tokens behind a prompt."""
    count, length = tokens.shape
    fixed = [
        "--model", path, "--dtype", "float32", "--enforce-eager", "--skip-tokenizer-init",
        "--max-num-seqs", str(count), "--max-model-len", str(length + 1),
        "--kv-cache-memory-bytes", str(1 << 30), "--no-enable-prefix-caching",
    ]  # fmt: skip
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    options = EngineArgs.from_cli_args(parser.parse_args([*fixed, *flags.split()]))
    engine = LLM.from_engine_args(options)
    wanted = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": sequence.tolist()} for sequence in tokens]
    outputs = engine.generate(prompts, wanted, use_tqdm=False)
    del engine
    cleanup_dist_env_and_memory()
    return [
        [
            -of_token[token].logprob
            for of_token, token in zip(
                output.prompt_logprobs[prompt + 1 :], sequence[prompt + 1 :].tolist(), strict=True
            )
        ]
        for output, sequence in zip(outputs, tokens, strict=True)
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    sequences, prompt = np.load(sys.argv[2]), int(sys.argv[3])
    print(json.dumps([losses(sys.argv[1], sequences, prompt, flags) for flags in sys.argv[4:]]))
