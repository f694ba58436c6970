"""Train the model of Guo et al. 2024 on Bigram-Backcopy and keep checkpoints, in which
active-dormant heads arise.

python -m headcount.models.backcopy --layers 3 --text tinyshakespeare.txt --out DIR

The defaults are the published ones. DIR is then the trained model, DIR/step-000400 the model after
400 steps.
"""

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from headcount.workers.inputs.families.bigram_backcopy import (
    BUNDLED_TEXT,
    Bigrams,
    Chain,
    bigrams_of,
    chain_of,
    follow,
)

# Close together at first, where the heads change fastest.
CHECKPOINTS = [0, 20, 40, 60, 80, 100, 150, *range(200, 2000, 200), *range(2000, 10_000, 1000)]
LEARNING_RATES = {"adamw": 3e-4, "sgd": 0.03}


def arguments() -> argparse.ArgumentParser:
    """The options, whose defaults are the published configuration."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="directory of the model and its checkpoints"
    )
    parser.add_argument(
        "--text",
        default=BUNDLED_TEXT,
        help=f"text whose bigrams are learned, or {BUNDLED_TEXT} (default)",
    )
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument(
        "--dim", type=int, default=256, help="width of the residual stream and of the head"
    )
    parser.add_argument(
        "--length", type=int, default=256, help="tokens of a sequence that the model sees"
    )
    parser.add_argument("--batch", type=int, default=512, help="sequences of a step")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--optimizer", choices=LEARNING_RATES, default="adamw")
    parser.add_argument(
        "--lr", type=float, help=f"learning rate; the default depends: {LEARNING_RATES}"
    )
    parser.add_argument(
        "--checkpoints",
        type=int,
        nargs="*",
        default=CHECKPOINTS,
        help="numbers of steps after which the model is kept",
    )
    parser.add_argument("--seed", type=int, default=42, help="seed of weights and sequences")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def train(args: argparse.Namespace) -> GPT2LMHeadModel:
    """Minimise next-token cross-entropy on fresh sequences at a constant learning rate; every
    position counts the same.
    """
    table = bigrams_of(args.text, triggers=3)
    model = make_model(table, args.layers, args.dim, args.length, args.seed).to(args.device)
    optimiser = make_optimiser(model, args.optimizer, args.lr or LEARNING_RATES[args.optimizer])
    batches = sequences(table, args.batch, args.length + 1, args.seed, args.device)
    for step, tokens in track(enumerate(islice(batches, args.steps)), "training", total=args.steps):
        logits = model(tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        # Before the step, so that step-000000 is the model as it was drawn.
        if step in args.checkpoints:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)
            model.save_pretrained(args.out / f"step-{step:06}")
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for directory in (args.out, args.out / f"step-{args.steps:06}"):
        model.save_pretrained(directory)
    return model


def sequences(table: Bigrams, batch: int, length: int, seed: int, device: str) -> Iterator[Tensor]:
    """Batches of fresh tokens `[sequence pos]` of the input family `backcopy`, BOS first, without
    end.
    """
    generator = torch.Generator(device).manual_seed(seed)
    rows, wakes, copies = chain_of(table)
    chain = Chain(torch.from_numpy(rows).to(device), torch.from_numpy(wakes).to(device), copies)
    # In this variant a copy follows every trigger.
    is_copied = torch.ones(length - 1, dtype=torch.bool, device=device)
    bos = torch.full((batch,), bos_of(table), device=device)
    while True:
        # float64, because a symbol is where its number falls in the cumulative row.
        draws = torch.rand(
            length - 1, batch, generator=generator, device=device, dtype=torch.float64
        )
        tokens = [table.first_id + symbols for symbols in follow(chain, draws, is_copied)]
        yield torch.stack([bos, *tokens], dim=1)


def bos_of(table: Bigrams) -> int:
    """The token before every sequence: the first id after the symbols, as in the source."""
    return table.first_id + len(table.unigram)


def make_model(table: Bigrams, layers: int, dim: int, length: int, seed: int) -> GPT2LMHeadModel:
    """A GPT-2 of one head a layer, with ReLU, an untied unembedding and biases that stay zero.

    Weights are drawn as PyTorch does by default: embeddings from N(0, 1), linear layers uniformly
    up to 1/√(inputs).
    """
    torch.manual_seed(seed)
    bos = bos_of(table)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=bos + 2,  # After BOS the source has a delimiter, which is never used.
            n_positions=length,
            n_embd=dim,
            n_layer=layers,
            n_head=1,
            activation_function="relu",
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=bos,
            eos_token_id=bos + 1,
            tie_word_embeddings=False,
        )
    )
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
        elif isinstance(module, nn.Linear | Conv1D):
            # Conv1D keeps its weight transposed: [inputs outputs].
            inputs = module.weight.shape[0 if isinstance(module, Conv1D) else 1]
            bound = inputs**-0.5
            nn.init.uniform_(module.weight, -bound, bound)
            if module.bias is not None:
                # The source has no biases; zeros that never change stand for that.
                module.bias.requires_grad_(False).zero_()
    return model


def make_optimiser(model: nn.Module, name: str, lr: float) -> torch.optim.Optimizer:
    """One of the published optimisers."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.99), eps=1e-8, weight_decay=1e-4)


if __name__ == "__main__":
    logging.disable_progress_bar()
    train(arguments().parse_args())
