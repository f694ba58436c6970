"""What vLLM reads of checkpoints, and how far its cache moves what it predicts.

compare.py FOLDER:DTYPE... prints a list of rows as JSON; DTYPE is that of the cache, as vLLM says
it. vLLM needs an environment of its own, so nothing of ours is imported here.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import sys
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams  # pyright: ignore
from vllm.distributed import cleanup_dist_env_and_memory  # pyright: ignore
from vllm.model_executor.layers.attention import Attention  # pyright: ignore

BOS = 256
SEQUENCES, LENGTH, ANSWER = 16, 128, 24


def held_out_text() -> np.ndarray:
    """Tokens [sequence position]: bytes of the manual that comes with Python."""
    topics = pydoc_data.topics.topics
    text = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
    starts = np.random.default_rng(2026).integers(0, len(text) - LENGTH, SEQUENCES)
    tokens = text[starts[:, None] + np.arange(LENGTH)].astype(np.int64)
    tokens[:, 0] = BOS
    return tokens


def attention_layers(worker: Any) -> dict[str, Any]:
    """What vLLM's attention layers have of scales when weights are loaded."""
    return {
        name: {
            "cache": layer.kv_cache_dtype,
            **{kind: getattr(layer, f"_{kind}_scale").ravel().tolist() for kind in "qkv"},
            # Without Flash Attention 3, one number is applied to all heads.
            "applied": [layer._k_scale_float, layer._v_scale_float],
        }
        for name, layer in worker.model_runner.model.named_modules()
        if isinstance(layer, Attention)
    }


def row(folder: str, dtype: str, tokens: np.ndarray) -> dict[str, Any]:
    """Scales by layer, how far predictions are from those of transformers, and what comes next."""
    llm = LLM(
        folder, dtype="float32", kv_cache_dtype=dtype, enforce_eager=True, max_logprobs=-1,
        max_num_seqs=SEQUENCES, max_model_len=LENGTH + ANSWER, kv_cache_memory_bytes=64 << 20,
        skip_tokenizer_init=True, enable_prefix_caching=False,
    )  # fmt: skip
    wanted = SamplingParams(
        max_tokens=ANSWER, temperature=0, ignore_eos=True, prompt_logprobs=-1, detokenize=False
    )
    prompts = [{"prompt_token_ids": sequence.tolist()} for sequence in tokens]
    outputs = llm.generate(prompts, wanted, use_tqdm=False)
    # The first token of a prompt is not predicted.
    log_p = np.array(
        [
            [
                [of_token[token].logprob for token in sorted(of_token)]
                for of_token in o.prompt_logprobs[1:]
            ]
            for o in outputs
        ]
    )
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder)
        log_q = model(torch.from_numpy(tokens)).logits.log_softmax(-1)[:, :-1].numpy()
    layers = llm.collective_rpc(attention_layers)[0]
    del llm
    cleanup_dist_env_and_memory()
    return {
        "layers": layers,
        "loss": float(-np.take_along_axis(log_p, tokens[:, 1:, None], axis=2).mean()),
        "divergence": float((np.exp(log_q) * (log_q - log_p)).sum(-1).mean()),
        "answers": [output.outputs[0].token_ids for output in outputs],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    text = held_out_text()
    checkpoints = [word.rsplit(":", 1) for word in sys.argv[1:]]
    print(json.dumps([row(folder, dtype, text) for folder, dtype in checkpoints]))
