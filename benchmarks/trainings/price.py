"""What the callback costs a training of 10 million parameters, in CPU time of one thread."""

import inspect
import time
from collections.abc import Callable
from statistics import median

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from headcount import MeasureCallback, watch

D_VOCAB, N_CTX, BATCH, ROUNDS = 1024, 256, 8, 5
TARGET = 0.02  # share of a training's time


def price() -> str:
    """Steps and measurements in turns, and the share of the time that measuring takes."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=6, n_head=6, n_embd=384, n_positions=N_CTX, vocab_size=D_VOCAB, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    batch, tokens = torch.randint(D_VOCAB, (2, BATCH, N_CTX))
    inputs = {"input_ids": batch, "labels": batch}

    def train() -> None:
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    first = _seconds(lambda: watch(model, tokens, 0, batch=inputs))
    steps: list[float] = []
    measurements: list[float] = []
    for number in range(ROUNDS):
        steps.append(_seconds(train))
        measurements.append(
            _seconds(lambda step=number + 1: watch(model, tokens, step, batch=inputs))
        )
    every = inspect.signature(MeasureCallback).parameters["every"].default
    ratio = median(b / a for a, b in zip(steps, measurements, strict=True))
    parameters = sum(weight.numel() for weight in model.parameters())
    verdict = "met" if ratio / every <= TARGET else "missed"
    return (
        f"{parameters / 1e6:.1f} M parameters, {BATCH} x {N_CTX} tokens: a step takes "
        f"{median(steps):.2f} s, a measurement {median(measurements):.2f} s, {ratio:.2f} steps "
        f"(median of {ROUNDS} rounds); the first, which prepares, {first:.1f} s. "
        f"Every {every} steps that is {ratio / every:.2%} of the training; target "
        f"{TARGET:.0%}, {verdict}"
    )


def _seconds(do: Callable[[], object]) -> float:
    start = time.process_time()
    do()
    return time.process_time() - start
