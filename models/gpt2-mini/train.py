"""Train gpt2-mini: a byte-level GPT-2 that reads real text and repeats.

python models/gpt2-mini/train.py --seed 0 --out models/gpt2-mini --corpus 'pile-mini/*.jsonl.zst'
"""

from functools import partial
from pathlib import Path

import numpy as np
from transformers import GPT2Config

from headcount.models import byte_text, recipe

CONFIG = GPT2Config(
    architectures=["GPT2LMHeadModel"],
    vocab_size=257,
    n_positions=256,
    n_embd=128,
    n_layer=3,
    n_head=8,
    n_inner=256,
    activation_function="gelu_new",
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    resid_pdrop=0.0,
    bos_token_id=byte_text.BOS,
    eos_token_id=byte_text.BOS,
)
PLAN = recipe.Plan(steps=3400, lr=4e-3, weight_decay=0.1, cosine=False, cooldown=0.4)


def fit(out: Path, seed: int, text: np.ndarray) -> None:
    """Train from scratch and write the checkpoint with its tokenizer."""
    make = byte_text.text_and_repeats(text)

    def batch(rng: np.random.Generator, progress: float) -> np.ndarray:
        n_ctx = 128 if rng.random() < 0.6 else 256
        return make(rng, recipe.TOKENS_PER_STEP // n_ctx, n_ctx + 1)

    recipe.train_from_scratch(CONFIG, batch, PLAN, seed, out)
    byte_text.write_tokenizer(out, CONFIG.n_positions)


if __name__ == "__main__":
    args = byte_text.arguments(__doc__).parse_args()
    text, held_out = byte_text.read_corpus(args.corpus)
    recipe.run(args, partial(fit, text=text), partial(byte_text.score, held_out=held_out))
