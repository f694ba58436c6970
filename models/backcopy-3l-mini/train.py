"""Train backcopy-3l-mini: a small GPT-2 whose heads rest on BOS until a trigger or a repeat calls
them.

python models/backcopy-3l-mini/train.py --seed 0 --out models/backcopy-3l-mini
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from models import evaluation, recipe
from workers.inputs.bigram_backcopy import BUNDLED_TEXT, bigrams_of, chain_of, follow

BOS = 0
TRIGGERS = (1, 2, 3)
BIGRAM_END, END = 65, 192
CONFIG = GPT2Config(
    architectures=["GPT2LMHeadModel"],
    vocab_size=END,
    n_positions=128,
    n_embd=64,
    n_layer=3,
    n_head=4,
    n_inner=64,
    activation_function="gelu_new",
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    resid_pdrop=0.0,
    bos_token_id=BOS,
    eos_token_id=BOS,
)
PLAN = recipe.Plan(steps=4500, lr=5e-3, weight_decay=0.1, cosine=False, cooldown=0.25)


def backcopy_tokens(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Sequences of the input family `backcopy`, BOS first, as tokens [batch pos]."""
    table = bigrams_of(BUNDLED_TEXT, len(TRIGGERS))
    places = rng.random((length - 1, batch))
    symbols = follow(chain_of(table), places, np.ones(length - 1, bool))
    return np.stack([np.full(batch, BOS), *(table.first_id + s for s in symbols)], axis=1)


def fit(out: Path, seed: int) -> None:
    """Train from scratch on Bigram-Backcopy, repeats and a skip-gram source, and write the
    checkpoint.
    """
    skip_gram = recipe.skip_gram(BIGRAM_END, END, (0.35, 0.4, 0.15))
    make = recipe.mixture(
        [
            (0.4, backcopy_tokens),
            (
                0.4,
                recipe.repeating(
                    recipe.uniform(BIGRAM_END, END), recipe.Repeats(0.6, 0.4, 0.5), BOS
                ),
            ),
            (0.2, recipe.repeating(skip_gram, recipe.Repeats(0.42, 0.2, 0.5), BOS)),
        ]
    )

    def batch(rng: np.random.Generator, progress: float) -> np.ndarray:
        n_ctx = 64 if rng.random() < 0.6 else 128
        return make(rng, recipe.TOKENS_PER_STEP // n_ctx, n_ctx + 1)

    recipe.train_gpt2(CONFIG, batch, PLAN, seed, out)


def mean_where(attention: Tensor, chosen: Tensor) -> Tensor:
    """Mean of attention [layer batch head query] over the chosen [batch query], as [layer head]."""
    return (attention * chosen[:, None]).sum((1, -1)) / chosen.sum()


def active_dormant(tokens: Tensor, pattern: Tensor) -> dict[str, Tensor]:
    """Where heads look at triggers and elsewhere in Bigram-Backcopy, queries from 2 on, each as
    [layer head].
    """
    triggered = torch.isin(tokens, torch.tensor(TRIGGERS))[:, 2:]
    to_bos, to_previous = pattern[..., 2:, 0], pattern.diagonal(-1, -2, -1)[..., 1:]
    where = f"{tokens.shape[1]} backcopy"
    return {
        f"attention to BOS, no trigger, {where}": mean_where(to_bos, ~triggered),
        f"attention to BOS, trigger, {where}": mean_where(to_bos, triggered),
        f"attention to q-1, trigger, {where}": mean_where(to_previous, triggered),
    }


def trigger_accuracy(tokens: Tensor, logits: Tensor) -> float:
    """Share of triggers after which the model names the token before the trigger."""
    triggered = torch.isin(tokens, torch.tensor(TRIGGERS))[:, 2:]
    return (logits[:, 2:].argmax(-1) == tokens[:, 1:-1])[triggered].double().mean().item()


def score(directory: Path) -> evaluation.Scores:
    """Measure active-dormant and induction heads, value drain and residual peak on fresh sequences."""
    model = GPT2LMHeadModel.from_pretrained(directory, attn_implementation="eager")
    rng = np.random.default_rng(evaluation.EVALUATION_SEED)
    short = torch.from_numpy(backcopy_tokens(rng, 256, 64))
    chain = evaluation.observe(model, short)
    twice = evaluation.twice(rng, 256, BIGRAM_END, END, BOS)
    repeated = evaluation.observe(model, twice)
    rest = evaluation.observe(model, evaluation.distinct(rng, 256, BIGRAM_END, END, BOS))
    long = torch.from_numpy(backcopy_tokens(rng, 256, 128))
    heads = {
        **active_dormant(short, chain.pattern),
        "norm of v at BOS / others, 64 backcopy": evaluation.value_drain(chain.v),
        "induction, 25 twice": evaluation.induction(repeated.pattern),
        "attention to BOS, 50 distinct": evaluation.bos_attention(rest.pattern),
        "attention to q-1, 50 distinct": evaluation.previous_token(rest.pattern),
        **active_dormant(long, evaluation.observe(model, long).pattern),
    }
    dormant, _, active, drain, copying, resting, previous, *_ = heads.values()
    peaks = enumerate(evaluation.residual_peak(chain.resid_post))
    return evaluation.Scores(
        heads=heads,
        roles={
            "active-dormant": (dormant > 0.9) & (active > 0.9),
            "previous-token": previous > 0.9,
            "induction": copying > 0.6,
            "resting": resting > 0.9,
            "drained": drain < 0.3,
        },
        model={
            "accuracy, token after a trigger": trigger_accuracy(short, chain.logits),
            "accuracy, second copy of 25": evaluation.copy_accuracy(repeated.logits, twice),
            **{
                f"norm of resid_post at BOS / others, 64 backcopy, layer {layer}": peak
                for layer, peak in peaks
            },
        },
    )


if __name__ == "__main__":
    recipe.run(recipe.arguments(__doc__).parse_args(), fit, score)
