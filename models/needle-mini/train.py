"""Train needle-mini: a GPT-2 that recalls needles with few of its heads.

It starts from backcopy-3l-mini, whose heads already look for earlier copies of a token, and learns
to do so for all tokens, and with fewer heads.

python models/needle-mini/train.py --seed 0 --out models/needle-mini
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

from headcount.models import evaluation, recipe

BOS = 0
FIRST, END = 1, 192
"""The range of tokens that are drawn: all but BOS."""

START = Path(__file__).parent.parent / "backcopy-3l-mini"
TOKENS_PER_STEP = 2048
PLAN = recipe.Plan(steps=800, lr=3e-3, weight_decay=0.1, cosine=False, cooldown=0.4)

UNIFORM = recipe.uniform(FIRST, END)
SKIP_GRAM = recipe.skip_gram(FIRST, END, weights=(0.35, 0.40, 0.15))
UNIFORM_REPEATS = recipe.Repeats(copied=0.6, whole=0.4, recent=0.5)
SKIP_GRAM_REPEATS = recipe.Repeats(copied=0.42, whole=0.2, recent=0.5)

SINK = 4
RECENT = 16
PRICE = recipe.DistancePrice(SINK, RECENT, nats=0.03, rises=(0.3, 0.45))
"""Before it rises, heads get used to the new tokens."""


# Data: needles in a haystack


def needles(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Haystacks with needles, then a question for each needle, as tokens [batch pos].

    A needle is a key of tokens and a value of tokens. A question is the key again, and its answer
    the value.
    """
    uniform = batch // 2
    no_copies = np.zeros((batch, length), dtype=np.int64)
    tokens = np.concatenate(
        [
            recipe.compose(rng, UNIFORM, no_copies[:uniform], BOS),
            recipe.compose(rng, SKIP_GRAM, no_copies[uniform:], BOS),
        ]
    )
    for sequence in tokens:
        ask_for_needles(rng, sequence)
    return tokens


def ask_for_needles(rng: np.random.Generator, tokens: np.ndarray) -> None:
    """Put 1 to 4 needles into the haystack of one sequence, and their questions at its end."""
    count = rng.integers(1, 5)
    key_length = rng.integers(1, 4)
    size = key_length + rng.integers(1, 4)
    haystack = len(tokens) - count * size
    # A place for each needle, in slots so that no two overlap; BOS stays where it is.
    slots = rng.permutation((haystack - 1) // size)[:count]
    keys = rng.permutation(np.arange(FIRST, END))[: count * key_length].reshape(count, key_length)
    drawn = rng.integers(FIRST, END, (count, size))
    drawn[:, :key_length] = keys
    for slot, needle in zip(slots, drawn, strict=True):
        start = 1 + slot * size
        tokens[start : start + size] = needle
    tokens[haystack:] = rng.permutation(drawn).ravel()


MAKE = recipe.mixture(
    [
        (0.4, needles),
        (0.4, recipe.repeating(UNIFORM, UNIFORM_REPEATS, BOS)),
        (0.2, recipe.repeating(SKIP_GRAM, SKIP_GRAM_REPEATS, BOS)),
    ]
)


def batch(rng: np.random.Generator, progress: float) -> np.ndarray:
    """A batch of 2048 tokens, of 64 or 128 positions."""
    n_ctx = 64 if rng.random() < 0.6 else 128
    return MAKE(rng, TOKENS_PER_STEP // n_ctx, n_ctx + 1)


# Training: attention far back has a price


def fit(out: Path, seed: int) -> None:
    """Train on from the first model and write the checkpoint."""
    model = GPT2LMHeadModel.from_pretrained(START)
    attentions: list[tuple[Tensor, ...]] = []

    def make(rng: np.random.Generator, progress: float) -> np.ndarray:
        # Only eager attention shows its pattern, and it takes twice the time.
        model.set_attn_implementation("eager" if PRICE.at(progress) else "sdpa")
        return batch(rng, progress)

    def logits(tokens: Tensor) -> Tensor:
        shows_pattern = model.config._attn_implementation == "eager"
        output = model(tokens, use_cache=False, output_attentions=shows_pattern)
        attentions[:] = [output.attentions]
        return output.logits

    def penalty(progress: float) -> Tensor | float:
        nats = PRICE.at(progress)
        return nats * PRICE.roots(attentions[0], model.config.n_head) if nats else 0.0

    recipe.train(model, logits, make, PLAN, seed, penalty)
    recipe.save_model(out, model, seed)


# Scores


def needle_questions(
    rng: np.random.Generator, batch: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sequences with one needle of 2 key and 4 value tokens, and the place of each needle."""
    tokens = recipe.compose(rng, UNIFORM, np.zeros((batch, length), dtype=np.int64), BOS)
    starts = rng.integers(SINK, length - 12 - RECENT, batch)
    for sequence, start in zip(tokens, starts, strict=True):
        sequence[-6:] = sequence[start : start + 6]
    return tokens, starts


@torch.inference_mode()
def score(directory: Path) -> evaluation.Scores:
    """Recall of needles and repeats, and what each head attends to, on fresh tokens."""
    model = GPT2LMHeadModel.from_pretrained(directory, attn_implementation="eager")
    rng = np.random.default_rng(evaluation.EVALUATION_SEED)
    patterns: dict[str, Tensor] = {}

    def run(name: str, tokens: Tensor) -> Tensor:
        output = model(tokens, output_attentions=True)
        patterns[name] = torch.stack(output.attentions)
        return output.logits

    run("distinct", evaluation.distinct(rng, 256, FIRST, END, BOS, length=100))
    twice = evaluation.twice(rng, 256, FIRST, END, BOS)
    copy_accuracy = evaluation.copy_accuracy(run("twice", twice), twice)
    questions = torch.from_numpy(needle_questions(rng, 256, 128)[0])
    logits = run("needle", questions)
    answers = questions[:, -4:]
    is_recalled = logits[:, -5:-1].argmax(-1) == answers
    local = torch.from_numpy(
        recipe.compose(rng, SKIP_GRAM, np.zeros((256, 100), dtype=np.int64), BOS)
    )
    local_loss = F.cross_entropy(run("local", local)[:, :-1].flatten(0, 1), local[:, 1:].flatten())
    distant = torch.stack([PRICE.distant_mass(p, model.config.n_head) for p in patterns["needle"]])
    induction = evaluation.induction(patterns["twice"])
    to_previous = evaluation.previous_token(patterns["distinct"])
    to_bos = evaluation.bos_attention(patterns["distinct"])
    return evaluation.Scores(
        heads={
            "attention to q-1, 100 distinct": to_previous,
            "attention to BOS, 100 distinct": to_bos,
            "induction, 25 twice": induction,
            f"distant({SINK},{RECENT}), needle": distant,
        },
        roles={
            "previous-token": to_previous > 0.5,
            "induction": induction > 0.5,
            "resting": (to_bos > 0.5) & (induction > 0.5),
        },
        model={
            "recall of a needle's value": is_recalled.double().mean().item(),
            "accuracy, second copy of 25": copy_accuracy,
            "loss on skip-gram tokens, nats": local_loss.item(),
        },
    )


if __name__ == "__main__":
    recipe.run(recipe.arguments(__doc__).parse_args(), fit, score)
