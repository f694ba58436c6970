"""Train backcopy-3l-mini: a small GPT-2 whose heads rest on BOS until a trigger or a repeat.

python models/backcopy-3l-mini/train.py --seed 0 --out models/backcopy-3l-mini
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from headcount.models import evaluation, recipe
from headcount.workers.inputs.families.bigram_backcopy import (
    BUNDLED_TEXT,
    bigrams_of,
    chain_of,
    follow,
)

BOS = 0
TRIGGERS = (1, 2, 3)
BIGRAM_END = 65
END = 192
"""Tokens below BIGRAM_END belong to Bigram-Backcopy; those up to END are drawn in repeats."""

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
    # A symbol is where a uniform number falls in its row; a copy follows every trigger.
    draws = rng.random((length - 1, batch))
    copies = np.ones(length - 1, bool)
    symbols = follow(chain_of(table), draws, copies)
    tokens = [table.first_id + symbols_at_position for symbols_at_position in symbols]
    return np.stack([np.full(batch, BOS), *tokens], axis=1)


def fit(out: Path, seed: int) -> None:
    """Train from scratch on Bigram-Backcopy and on repeats, and write the checkpoint."""
    uniform = recipe.uniform(BIGRAM_END, END)
    uniform_repeats = recipe.Repeats(copied=0.6, whole=0.4, recent=0.5)
    skip_gram = recipe.skip_gram(BIGRAM_END, END, weights=(0.35, 0.4, 0.15))
    skip_gram_repeats = recipe.Repeats(copied=0.42, whole=0.2, recent=0.5)
    make = recipe.mixture(
        [
            (0.4, backcopy_tokens),
            (0.4, recipe.repeating(uniform, uniform_repeats, BOS)),
            (0.2, recipe.repeating(skip_gram, skip_gram_repeats, BOS)),
        ]
    )

    def batch(rng: np.random.Generator, progress: float) -> np.ndarray:
        n_ctx = 64 if rng.random() < 0.6 else 128
        return make(rng, recipe.TOKENS_PER_STEP // n_ctx, n_ctx + 1)

    recipe.train_from_scratch(CONFIG, batch, PLAN, seed, out)


@dataclass(frozen=True)
class TriggerAttention:
    """Mean attention of heads in Bigram-Backcopy, over queries from 2 on; each [layer head]."""

    rest_elsewhere: Tensor
    """To BOS, if the query is not a trigger."""
    rest_at_triggers: Tensor
    """To BOS, if the query is a trigger."""
    active_at_triggers: Tensor
    """To the token before the query, if the query is a trigger."""

    def by_name(self, n_ctx: int) -> dict[str, Tensor]:
        """The three as scores of a card."""
        return {
            f"attention to BOS, no trigger, {n_ctx} backcopy": self.rest_elsewhere,
            f"attention to BOS, trigger, {n_ctx} backcopy": self.rest_at_triggers,
            f"attention to q-1, trigger, {n_ctx} backcopy": self.active_at_triggers,
        }


def trigger_queries(tokens: Tensor) -> Tensor:
    """Which queries from 2 on are triggers, as a mask [batch query]."""
    return torch.isin(tokens, torch.tensor(TRIGGERS))[:, 2:]


def mean_over(attention: Tensor, queries: Tensor) -> Tensor:
    """Mean of attention [layer batch head query] over a mask [batch query], as [layer head]."""
    return (attention * queries[:, None]).sum((1, -1)) / queries.sum()


def trigger_attention(tokens: Tensor, pattern: Tensor) -> TriggerAttention:
    """Where heads look at triggers and elsewhere."""
    triggers = trigger_queries(tokens)
    to_bos = pattern[..., 2:, 0]
    # The diagonal begins with query 1.
    to_previous = pattern.diagonal(-1, -2, -1)[..., 1:]
    return TriggerAttention(
        rest_elsewhere=mean_over(to_bos, ~triggers),
        rest_at_triggers=mean_over(to_bos, triggers),
        active_at_triggers=mean_over(to_previous, triggers),
    )


def trigger_accuracy(tokens: Tensor, logits: Tensor) -> float:
    """Share of triggers after which the model predicts the token before the trigger."""
    is_right = logits[:, 2:].argmax(-1) == tokens[:, 1:-1]
    return is_right[trigger_queries(tokens)].double().mean().item()


def score(directory: Path) -> evaluation.Scores:
    """Scores of active-dormant and induction heads, value drain and residual peak, on fresh
    sequences.
    """
    model = GPT2LMHeadModel.from_pretrained(directory, attn_implementation="eager")
    # The order of these draws is fixed: another order would give the card other scores.
    rng = np.random.default_rng(evaluation.EVALUATION_SEED)
    short_tokens = torch.from_numpy(backcopy_tokens(rng, 256, 64))
    on_short = evaluation.observe(model, short_tokens)
    repeated_tokens = evaluation.twice(rng, 256, BIGRAM_END, END, BOS)
    on_repeats = evaluation.observe(model, repeated_tokens)
    distinct_tokens = evaluation.distinct(rng, 256, BIGRAM_END, END, BOS)
    on_distinct = evaluation.observe(model, distinct_tokens)
    long_tokens = torch.from_numpy(backcopy_tokens(rng, 256, 128))
    on_long = evaluation.observe(model, long_tokens)

    on_triggers = trigger_attention(short_tokens, on_short.pattern)
    drain = evaluation.value_drain(on_short.v)
    induction = evaluation.induction(on_repeats.pattern)
    to_bos = evaluation.bos_attention(on_distinct.pattern)
    to_previous = evaluation.previous_token(on_distinct.pattern)
    peaks = {
        f"norm of resid_post at BOS / others, 64 backcopy, layer {layer}": peak
        for layer, peak in enumerate(evaluation.residual_peak(on_short.resid_post))
    }
    return evaluation.Scores(
        heads={
            **on_triggers.by_name(64),
            "norm of v at BOS / others, 64 backcopy": drain,
            "induction, 25 twice": induction,
            "attention to BOS, 50 distinct": to_bos,
            "attention to q-1, 50 distinct": to_previous,
            **trigger_attention(long_tokens, on_long.pattern).by_name(128),
        },
        roles={
            "active-dormant": (on_triggers.rest_elsewhere > 0.9)
            & (on_triggers.active_at_triggers > 0.9),
            "previous-token": to_previous > 0.9,
            "induction": induction > 0.6,
            "resting": to_bos > 0.9,
            "drained": drain < 0.3,
        },
        model={
            "accuracy, token after a trigger": trigger_accuracy(short_tokens, on_short.logits),
            "accuracy, second copy of 25": evaluation.copy_accuracy(
                on_repeats.logits, repeated_tokens
            ),
            **peaks,
        },
    )


if __name__ == "__main__":
    recipe.run(recipe.arguments(__doc__).parse_args(), fit, score)
