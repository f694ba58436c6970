"""What the recipes share: data with repeats, initialisation, optimiser, training loop, files and
command line.

Tensors carry TransformerLens names; every sequence of tokens [batch pos] starts with BOS at
position 0.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from models import evaluation

TOKENS_PER_STEP = 4096
EMBEDDINGS = ("embed.W_E", "wte.weight")
POSITIONS = ("pos_embed.W_pos", "wpe.weight")
WRITERS = ("attn.W_O", "c_proj.weight")
MATRICES = ("W_Q", "W_K", "W_V", "W_O", "W_U", "c_attn.weight", "c_fc.weight", "c_proj.weight")

Source = Callable[[np.random.Generator, np.ndarray, int], np.ndarray]
"""Draws the fresh tokens [batch] for one position, given tokens [batch pos] filled up to it."""

Maker = Callable[[np.random.Generator, int, int], np.ndarray]
"""Draws tokens [batch pos] for a number of sequences and a length."""


# Data


@dataclass(frozen=True)
class Repeats:
    """How often and from how far back a sequence repeats itself."""

    copied: float
    """Probability that a segment copies earlier tokens."""
    whole: float
    """Share of sequences that are one segment repeated to the end."""
    recent: float
    """Share of copy distances drawn log-uniformly; the rest are uniform."""


def copy_lags(rng: np.random.Generator, batch: int, length: int, repeats: Repeats) -> np.ndarray:
    """Draw how far back each position copies from, 0 for a fresh token, as [batch pos]."""
    lags = np.zeros((batch, length), dtype=np.int64)
    for row in lags:
        if rng.random() < repeats.whole:
            repeat_to_the_end(rng, row)
        else:
            copy_segments(rng, row, repeats)
    return lags


def repeat_to_the_end(rng: np.random.Generator, row: np.ndarray) -> None:
    """Set the lags of one sequence so that one segment repeats until the end."""
    period = rng.integers(3, len(row) // 2 + 1)
    start = 1 + rng.integers(0, len(row) // 4 + 1)
    row[start + period :] = period


def copy_segments(rng: np.random.Generator, row: np.ndarray, repeats: Repeats) -> None:
    """Set the lags of one sequence to segments of 3 to 24 tokens, some of them copies."""
    pos = 1
    while pos < len(row):
        size = rng.integers(3, 25)
        if pos > 2 and rng.random() < repeats.copied:
            if rng.random() < repeats.recent:
                distance = int(math.exp(rng.uniform(math.log(2), math.log(pos))))
            else:
                distance = rng.integers(2, pos)
            row[pos : pos + size] = distance
        pos += size


def compose(rng: np.random.Generator, source: Source, lags: np.ndarray, bos: int) -> np.ndarray:
    """Fill tokens [batch pos] from BOS on: copies where a lag is set, the source elsewhere."""
    tokens = np.full(lags.shape, bos, dtype=np.int64)
    rows = np.arange(len(tokens))
    for pos in range(1, lags.shape[1]):
        lag = lags[:, pos]
        tokens[:, pos] = np.where(lag > 0, tokens[rows, pos - lag], source(rng, tokens, pos))
    return tokens


def repeating(source: Source, repeats: Repeats, bos: int) -> Maker:
    """Make sequences in which part of what the source gives is repeated."""
    return lambda rng, batch, length: compose(
        rng, source, copy_lags(rng, batch, length, repeats), bos
    )


def uniform(low: int, high: int) -> Source:
    """Every token from low to high - 1 is equally likely."""
    return lambda rng, tokens, pos: rng.integers(low, high, len(tokens))


def skip_gram(
    low: int, high: int, weights: tuple[float, float, float], table_seed: int = 0
) -> Source:
    """The next token is a successor of the token 1, 2 or 3 back; each has two successors per
    distance.

    The weights are the probabilities of the three distances; what remains is a uniform token.
    """
    # RandomState, because its stream is frozen across numpy versions and the tables are part of the
    # recipe.
    successors = np.random.RandomState(table_seed).randint(low, high, size=(3, high, 2))
    thresholds = np.cumsum(weights)

    def draw(rng: np.random.Generator, tokens: np.ndarray, pos: int) -> np.ndarray:
        rows = np.arange(len(tokens))
        choice = np.searchsorted(thresholds, rng.random(len(tokens)), side="right")
        back = pos - 1 - choice
        known = (choice < 3) & (back >= 1)
        previous = np.where(known, tokens[rows, np.maximum(back, 0)], low)
        follows = successors[np.minimum(choice, 2), previous, rng.integers(0, 2, len(tokens))]
        return np.where(known, follows, rng.integers(low, high, len(tokens)))

    return draw


def mixture(parts: Sequence[tuple[float, Maker]]) -> Maker:
    """Make batches whose sequences come from several makers, each with its share."""
    shares = [share for share, _ in parts]

    def make(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
        counts = rng.multinomial(batch, shares)
        made = [
            maker(rng, count, length)
            for count, (_, maker) in zip(counts, parts, strict=True)
            if count
        ]
        return np.concatenate(made)

    return make


# Training


@dataclass(frozen=True)
class Plan:
    """The optimiser's numbers for one training."""

    steps: int
    lr: float
    weight_decay: float
    cosine: bool
    """Whether the learning rate falls as a cosine, or in a straight line."""
    cooldown: float
    """Share of the steps, at the end, over which the learning rate falls to 2 %."""
    warmup: int = 100


@torch.no_grad()
def initialise(model: nn.Module, n_layers: int, embedding_std: float, seed: int) -> None:
    """Draw weights in place; biases and LayerNorms keep 0 and 1, positions start as sinusoids."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(POSITIONS):
            parameter.copy_(embedding_std * sinusoids(*parameter.shape))
        elif name.endswith(EMBEDDINGS):
            nn.init.normal_(parameter, std=embedding_std, generator=generator)
        elif name.endswith(MATRICES):
            std = 0.07 / math.sqrt(2 * n_layers) if name.endswith(WRITERS) else 0.07
            nn.init.normal_(parameter, std=std, generator=generator)


def sinusoids(n_ctx: int, d_model: int) -> Tensor:
    """Sines and cosines of geometric frequencies, root mean square 1, as [n_ctx d_model]."""
    frequency = 10_000 ** -(torch.arange(0, d_model, 2) / d_model)
    angle = torch.arange(n_ctx)[:, None] * frequency
    return math.sqrt(2) * torch.cat([angle.sin(), angle.cos()], dim=1)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Split parameters so that only matrices decay: no embedding, position, bias or LayerNorm."""
    named = list(model.named_parameters())
    return [
        {
            "params": [p for name, p in named if name.endswith(MATRICES)],
            "weight_decay": weight_decay,
        },
        {"params": [p for name, p in named if not name.endswith(MATRICES)], "weight_decay": 0.0},
    ]


def lr_factor(plan: Plan, step: int) -> float:
    """The learning rate at a step as a share of its peak."""
    warm = min(1.0, (step + 1) / plan.warmup)
    progress = max(0.0, 1 - (1 - step / plan.steps) / plan.cooldown)
    fall = (1 + math.cos(math.pi * progress)) / 2 if plan.cosine else 1 - progress
    return warm * (0.02 + 0.98 * fall)


def train(
    model: nn.Module,
    logits: Callable[[Tensor], Tensor],
    make: Callable[[np.random.Generator, float], np.ndarray],
    plan: Plan,
    seed: int,
) -> None:
    """Minimise next-token cross-entropy on what make(rng, progress) draws, every position counting
    alike.
    """
    rng = np.random.default_rng(seed)
    optimiser = torch.optim.AdamW(
        decay_groups(model, plan.weight_decay), lr=plan.lr, betas=(0.9, 0.99), eps=1e-8
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, partial(lr_factor, plan))
    started = time.monotonic()
    for step in range(plan.steps):
        tokens = torch.from_numpy(make(rng, step / plan.steps))
        loss = F.cross_entropy(logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if (step + 1) % 200 == 0:
            print(
                f"step {step + 1}  loss {loss.item():.3f}  {time.monotonic() - started:.0f} s",
                flush=True,
            )


def save(out: Path, tensors: Mapping[str, Tensor], config: dict, seed: int) -> None:
    """Write model.safetensors, which remembers its seed, and config.json."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(
        dict(tensors), out / "model.safetensors", metadata={"format": "pt", "seed": str(seed)}
    )
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def train_gpt2(
    config: GPT2Config,
    make: Callable[[np.random.Generator, float], np.ndarray],
    plan: Plan,
    seed: int,
    out: Path,
) -> None:
    """Train a GPT-2 from scratch and write it so that from_pretrained reads it."""
    model = GPT2LMHeadModel(config)
    initialise(model, config.n_layer, embedding_std=0.1, seed=seed)
    train(model, lambda tokens: model(tokens, use_cache=False).logits, make, plan, seed)
    tensors = {
        name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }
    save(out, tensors, config.to_diff_dict(), seed)


# Command line


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options every train.py has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches")
    parser.add_argument("--out", type=Path, help="directory to train into, scored afterwards")
    parser.add_argument(
        "--evaluate", type=Path, nargs="+", help="only score these trained directories"
    )
    parser.add_argument("--card", type=Path, help="write the scores into this model card")
    return parser


def run(
    args: argparse.Namespace,
    fit: Callable[[Path, int], None],
    score: Callable[[Path], evaluation.Scores],
) -> None:
    """Train unless told to evaluate only, then print the scores and fill the card."""
    torch.set_num_threads(1)
    if not (args.evaluate or args.out):
        raise SystemExit("Give --out DIR to train, or --evaluate DIR to score.")
    if not args.evaluate:
        fit(args.out, args.seed)
    text = evaluation.report(
        {seed_label(directory): score(directory) for directory in args.evaluate or [args.out]}
    )
    print(text)
    if args.card:
        evaluation.fill_card(args.card, text)


def seed_label(directory: Path) -> str:
    """The seed that a checkpoint was trained with, as its file remembers it."""
    with safe_open(directory / "model.safetensors", "pt") as file:
        return f"seed {file.metadata()['seed']}"
