"""What the recipes share: data with repeats, initialisation, optimiser, training loop, files and
command line.

Tensors have TransformerLens names. Every sequence of tokens [batch pos] starts with BOS at position
0. The draws of a recipe are part of its model: an intervention that draws in another order trains
  another model.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from headcount.models import evaluation

TOKENS_PER_STEP = 4096
EMBEDDINGS = ("embed.W_E", "wte.weight", "embed_tokens.weight")
POSITIONS = ("pos_embed.W_pos", "wpe.weight")
WRITERS = ("attn.W_O", "c_proj.weight", "o_proj.weight", "down_proj.weight")
MATRICES = ("W_Q", "W_K", "W_V", "W_O", "W_U", "c_attn.weight", "c_fc.weight", "_proj.weight")

Source = Callable[[np.random.Generator, np.ndarray, int], np.ndarray]
"""Draws the fresh tokens [batch] of one position, given tokens [batch pos] that are filled up to
it.
"""

Maker = Callable[[np.random.Generator, int, int], np.ndarray]
"""Draws tokens [batch pos], given a number of sequences and a length."""


# Data: sequences that repeat


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
    """How far back each position copies from, 0 for a fresh token, as [batch pos]."""
    lags = np.zeros((batch, length), dtype=np.int64)
    for sequence_lags in lags:
        if rng.random() < repeats.whole:
            repeat_to_the_end(rng, sequence_lags)
        else:
            copy_segments(rng, sequence_lags, repeats)
    return lags


def repeat_to_the_end(rng: np.random.Generator, lags: np.ndarray) -> None:
    """Set the lags of one sequence so that one segment repeats until the end."""
    length = len(lags)
    period = rng.integers(3, length // 2 + 1)
    start = 1 + rng.integers(0, length // 4 + 1)
    lags[start + period :] = period


def copy_segments(rng: np.random.Generator, lags: np.ndarray, repeats: Repeats) -> None:
    """Set the lags of one sequence to segments of 3 to 24 tokens, some of them copies."""
    pos = 1
    while pos < len(lags):
        size = rng.integers(3, 25)
        # A copy needs two tokens before it: BOS is never copied.
        if pos > 2 and rng.random() < repeats.copied:
            if rng.random() < repeats.recent:
                # Log-uniform, because near repeats are common in text and far ones are rare.
                distance = int(math.exp(rng.uniform(math.log(2), math.log(pos))))
            else:
                distance = rng.integers(2, pos)
            lags[pos : pos + size] = distance
        pos += size


def compose(rng: np.random.Generator, source: Source, lags: np.ndarray, bos: int) -> np.ndarray:
    """Tokens [batch pos] that begin with BOS: copies where a lag is set, else from the source."""
    tokens = np.full(lags.shape, bos, dtype=np.int64)
    sequences = np.arange(len(tokens))
    # Position by position: a copy may copy a copy.
    for pos in range(1, lags.shape[1]):
        lag = lags[:, pos]
        copies = tokens[sequences, pos - lag]
        tokens[:, pos] = np.where(lag > 0, copies, source(rng, tokens, pos))
    return tokens


def repeating(source: Source, repeats: Repeats, bos: int) -> Maker:
    """A maker of sequences that repeat a part of what the source gives."""

    def make(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
        lags = copy_lags(rng, batch, length, repeats)
        return compose(rng, source, lags, bos)

    return make


def uniform(low: int, high: int) -> Source:
    """A source in which every token from low to high - 1 is equally likely."""
    return lambda rng, tokens, pos: rng.integers(low, high, len(tokens))


def skip_gram(
    low: int, high: int, weights: tuple[float, float, float], table_seed: int = 0
) -> Source:
    """A source whose next token is a successor of the token 1, 2 or 3 back; a token has two
    successors for each distance.

    The weights are the probabilities of the three distances; otherwise the token is uniform.
    """
    # RandomState's stream is the same in every version of numpy, and the table is a part of the
    # recipe.
    successors = np.random.RandomState(table_seed).randint(low, high, size=(3, high, 2))
    thresholds = np.cumsum(weights)

    def draw(rng: np.random.Generator, tokens: np.ndarray, pos: int) -> np.ndarray:
        batch = len(tokens)
        # 0, 1, 2 for the tokens 1, 2, 3 back; 3 for a uniform token.
        choice = np.searchsorted(thresholds, rng.random(batch), side="right")
        source_pos = pos - 1 - choice
        # Near the beginning there may be no token that far back, and BOS has no successors.
        has_source = (choice < 3) & (source_pos >= 1)
        source_tokens = tokens[np.arange(batch), np.maximum(source_pos, 0)]
        previous = np.where(has_source, source_tokens, low)
        which_successor = rng.integers(0, 2, batch)
        next_tokens = successors[np.minimum(choice, 2), previous, which_successor]
        return np.where(has_source, next_tokens, rng.integers(low, high, batch))

    return draw


def mixture(parts: Sequence[tuple[float, Maker]]) -> Maker:
    """A maker of batches whose sequences come from several makers, each with its share."""
    shares = [share for share, _ in parts]

    def make(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
        counts = rng.multinomial(batch, shares)
        batches: list[np.ndarray] = []
        for count, (_, maker) in zip(counts, parts, strict=True):
            if count:
                batches.append(maker(rng, count, length))
        return np.concatenate(batches)

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
            # Two matrices a layer write into the residual stream, so their sum would grow with
            # the depth.
            std = 0.07 / math.sqrt(2 * n_layers) if name.endswith(WRITERS) else 0.07
            nn.init.normal_(parameter, std=std, generator=generator)


def sinusoids(n_ctx: int, d_model: int) -> Tensor:
    """Sines and cosines of geometric frequencies, root mean square 1, as [n_ctx d_model]."""
    frequency = 10_000 ** -(torch.arange(0, d_model, 2) / d_model)
    angle = torch.arange(n_ctx)[:, None] * frequency
    return math.sqrt(2) * torch.cat([angle.sin(), angle.cos()], dim=1)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's groups of parameters: matrices decay; embeddings, positions, biases and LayerNorms do
    not.
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if name.endswith(MATRICES) else others).append(parameter)
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def lr_factor(plan: Plan, step: int) -> float:
    """The learning rate at a step as a share of its peak."""
    warmup = min(1.0, (step + 1) / plan.warmup)
    # 0 until the cooldown begins, 1 at the end of training.
    cooldown = max(0.0, 1 - (1 - step / plan.steps) / plan.cooldown)
    decay = (1 + math.cos(math.pi * cooldown)) / 2 if plan.cosine else 1 - cooldown
    return warmup * (0.02 + 0.98 * decay)


def train(
    model: nn.Module,
    logits: Callable[[Tensor], Tensor],
    make: Callable[[np.random.Generator, float], np.ndarray],
    plan: Plan,
    seed: int,
    penalty: Callable[[float], Tensor | float] | None = None,
) -> None:
    """Minimise next-token cross-entropy on batches of make(rng, progress); every position counts
    the same.

    A penalty, given the progress, is added to the loss of the forward pass before it.
    """
    rng = np.random.default_rng(seed)
    optimiser = torch.optim.AdamW(
        decay_groups(model, plan.weight_decay), lr=plan.lr, betas=(0.9, 0.99), eps=1e-8
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, partial(lr_factor, plan))
    started = time.monotonic()
    for step in range(plan.steps):
        progress = step / plan.steps
        tokens = torch.from_numpy(make(rng, progress))
        loss = F.cross_entropy(logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        objective = loss if penalty is None else loss + penalty(progress)
        optimiser.zero_grad()
        objective.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if (step + 1) % 200 == 0:
            print(
                f"step {step + 1}  loss {loss.item():.3f}  {time.monotonic() - started:.0f} s",
                flush=True,
            )


def save(out: Path, tensors: Mapping[str, Tensor], config: dict[str, Any], seed: int) -> None:
    """Write config.json and model.safetensors, whose metadata holds the seed."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(
        dict(tensors), out / "model.safetensors", metadata={"format": "pt", "seed": str(seed)}
    )
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def from_scratch(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A model of transformers with freshly drawn weights."""
    model = AutoModelForCausalLM.from_config(config)
    initialise(model, config.num_hidden_layers, embedding_std=0.1, seed=seed)
    return model


def save_model(out: Path, model: PreTrainedModel, seed: int) -> None:
    """Write a model of transformers so that from_pretrained reads it."""
    # The unembedding is the embedding, and safetensors refuses tensors that share memory.
    tensors = {
        name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }
    save(out, tensors, model.config.to_diff_dict(), seed)


def train_from_scratch(
    config: PreTrainedConfig,
    make: Callable[[np.random.Generator, float], np.ndarray],
    plan: Plan,
    seed: int,
    out: Path,
) -> None:
    """Train a model of transformers and write it."""
    model = from_scratch(config, seed)
    train(model, lambda tokens: model(tokens, use_cache=False).logits, make, plan, seed)
    save_model(out, model, seed)


# Attention far back has a price


@dataclass(frozen=True)
class DistancePrice:
    """What a model pays for attention to keys that are neither the first nor the last few.

    Each KV head pays for the root of its share of such attention: two heads with half the attention
    are dearer than one head with all of it, so the model gathers what looks back in few heads.
    """

    sink: int
    recent: int
    nats: float
    """What a KV head pays whose attention is all distant."""
    rises: tuple[float, float]
    """The progress at which the price begins to rise from 0, and at which it is whole."""

    def at(self, progress: float) -> float:
        """The price in nats."""
        start, end = self.rises
        return self.nats * min(1.0, max(0.0, (progress - start) / (end - start)))

    def distant_mass(self, pattern: Tensor, n_kv_heads: int) -> Tensor:
        """Mean attention of a KV head's query heads to distant keys, of a pattern [batch head query
        key].
        """
        positions = torch.arange(pattern.shape[-1])
        is_distant = (positions[:, None] - positions >= self.recent) & (positions >= self.sink)
        mass = (pattern * is_distant)[..., self.sink + self.recent :, :].sum(-1)
        return mass.unflatten(1, (n_kv_heads, -1)).mean((0, 2, 3))

    def roots(self, patterns: Sequence[Tensor], n_kv_heads: int) -> Tensor:
        """The sum over KV heads of the root of their distant attention."""
        by_head = torch.stack([self.distant_mass(pattern, n_kv_heads) for pattern in patterns])
        return (by_head + 1e-3).sqrt().sum()


# Command line


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that every train.py has."""
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
    """Train (with --evaluate only score), then print the scores and fill the card."""
    # The models are so small that threads would mostly wait for one another.
    torch.set_num_threads(1)
    if not (args.evaluate or args.out):
        raise SystemExit("Give --out DIR to train, or --evaluate DIR to score.")
    if not args.evaluate:
        fit(args.out, args.seed)
    directories = args.evaluate or [args.out]
    scores = {seed_label(directory): score(directory) for directory in directories}
    text = evaluation.report(scores)
    print(text)
    if args.card:
        evaluation.fill_card(args.card, text)


def seed_label(directory: Path) -> str:
    """The seed of a checkpoint, from the metadata of its file, such as `seed 0`."""
    with safe_open(directory / "model.safetensors", "pt") as file:
        return f"seed {file.metadata()['seed']}"
