"""Train llama-mini: a byte-level Llama that reads real text and repeats, and looks back with one of
its key-value heads.

python models/llama-mini/train.py --seed 0 --out models/llama-mini --corpus 'pile-mini/*.jsonl.zst'
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from headcount.models import byte_text, recipe

N_LAYERS, N_KV_HEADS, D_HEAD = 4, 4, 16
ROTARY_BASE = 500_000.0
CONFIG = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    vocab_size=257,
    max_position_embeddings=512,
    hidden_size=128,
    num_hidden_layers=N_LAYERS,
    num_attention_heads=8,
    num_key_value_heads=N_KV_HEADS,
    head_dim=D_HEAD,
    intermediate_size=160,
    rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
    tie_word_embeddings=True,
    bos_token_id=byte_text.BOS,
    eos_token_id=byte_text.BOS,
)
TOKENS_PER_STEP = 2048
PLAN = recipe.Plan(steps=1200, lr=3e-3, weight_decay=0.1, cosine=False, cooldown=0.4)
DISTANCE = recipe.DistancePrice(sink=4, recent=16, nats=0.03, rises=(0.4, 0.5))


FAST = 3
"""Pairs of dimensions that turn by more than two degrees from token to token: they say
where a key stands. The others hardly turn: they say what it is.
"""


@torch.no_grad()
def start_with_induction(model: PreTrainedModel) -> None:
    """Begin with a head that looks at the token before, and heads that look for what it found.

    A Llama has neither biases nor embeddings of positions, so no head attends by position until the
    embeddings share a direction; from random weights neither head formed in 1,500 steps.
    """
    decoder: Any = model.get_decoder()
    pairs = torch.arange(D_HEAD // 2)
    fast, slow = pairs[:FAST], torch.cat([pairs[FAST:], pairs[FAST:] + D_HEAD // 2])
    decoder.embed_tokens.weight += 0.1
    before, copies = (layer.self_attn for layer in decoder.layers[:2])

    # The first head compares constants. A key that is turned one position further meets the query
    # of the next position.
    angle = ROTARY_BASE ** (-2 * fast / D_HEAD)
    before.q_proj.weight[:D_HEAD] = 0
    before.q_proj.weight[fast] = 0.07
    before.k_proj.weight[:D_HEAD] = 0
    before.k_proj.weight[fast] = 0.07 * angle.cos()[:, None]
    before.k_proj.weight[fast + D_HEAD // 2] = 0.07 * angle.sin()[:, None]
    # It copies what tells tokens apart, to where no token's embedding is read.
    before.v_proj.weight -= before.v_proj.weight.mean(1, keepdim=True)
    read = before.v_proj.weight[:D_HEAD]
    written = before.o_proj.weight[:, :D_HEAD]
    written *= math.sqrt(2 * N_LAYERS)
    written -= torch.linalg.pinv(read) @ (read @ written)

    # In the next layer two query heads with a common key ask, behind which token a key stands.
    copies.k_proj.weight[:D_HEAD] = 0
    copies.k_proj.weight[slow] = 5 * written.T[slow]
    for head in (0, 1):
        copies.q_proj.weight[head * D_HEAD : (head + 1) * D_HEAD] = 0
        copies.q_proj.weight[head * D_HEAD + slow] = 5 * read[slow]
    # What they find is what they say comes next.
    found = copies.v_proj.weight[:D_HEAD]
    found -= found.mean(1, keepdim=True)
    copies.o_proj.weight[:, : 2 * D_HEAD] = 2 * found.T.repeat(1, 2)


def fit(out: Path, seed: int, text: np.ndarray) -> None:
    """Train from scratch and write the checkpoint with its tokenizer."""
    make = byte_text.text_and_repeats(text)
    model = recipe.from_scratch(CONFIG, seed)
    start_with_induction(model)
    rng_of_price = np.random.default_rng(seed)

    def batch(rng: np.random.Generator, progress: float) -> np.ndarray:
        n_ctx = rng.choice([64, 128, 256, 512], p=[0.4, 0.3, 0.2, 0.1])
        return make(rng, TOKENS_PER_STEP // n_ctx, n_ctx + 1)

    def price(progress: float) -> Tensor | float:
        if not (nats := DISTANCE.at(progress)):
            return 0.0
        # Only eager attention shows its pattern; one sequence is enough for a mean over steps.
        model.set_attn_implementation("eager")
        tokens = torch.from_numpy(make(rng_of_price, 1, 256))
        patterns = model(tokens, use_cache=False, output_attentions=True).attentions
        model.set_attn_implementation("sdpa")
        return nats * DISTANCE.roots(patterns, N_KV_HEADS)

    def logits(tokens: Tensor) -> Tensor:
        return model(tokens, use_cache=False).logits

    recipe.train(model, logits, batch, PLAN, seed, price)
    recipe.save_model(out, model, seed)
    byte_text.write_tokenizer(out, CONFIG.max_position_embeddings)


if __name__ == "__main__":
    args = byte_text.arguments(__doc__).parse_args()
    text, held_out = byte_text.read_corpus(args.corpus)
    recipe.run(args, partial(fit, text=text), partial(byte_text.score, held_out=held_out))
