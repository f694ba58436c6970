"""One tiny training, sound or with a planted fault, measured every few steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from benchmarks.trainings.data import D_VOCAB, DATA, DOCUMENT, N_CTX, Phrases, Repeats, bad_shard
from headcount import measure
from headcount.schemas.watch.history import MeasuredStep, measured_step
from headcount.schemas.watch.rules import WATCHED
from headcount.workers.watching import facts_of, sample_of

STEPS, EVERY, SEQUENCES = 200, 10, 16
WARMUP = 15  # steps until the learning rate is whole

N_LAYERS, N_HEADS, D_HEAD = 2, 4, 16
LARGE_HEADS, LARGE_D_HEAD = 2, 64


@dataclass(frozen=True)
class Training:
    """What is trained, and what goes wrong in it."""

    architecture: str
    data: str
    rate: float
    seed: int
    fault: str | None = None
    begins: int = 0  # the step at which the fault begins

    @property
    def key(self) -> str:
        """The name of its file."""
        fault = f"{self.fault}-{self.begins}" if self.fault else "sound"
        words = f"{self.architecture}-{self.data}-{self.rate:g}-{self.seed}-{fault}"
        return words.replace(" ", "-")

    @property
    def name(self) -> str:
        """All of it in one line."""
        fault = f"{self.fault} from step {self.begins}" if self.fault else "sound"
        return f"{self.architecture}, {self.data}, rate {self.rate:g}, seed {self.seed}: {fault}"


@dataclass(frozen=True)
class Recording:
    """What was measured in a training, and its losses, one each step."""

    training: Training
    measured: list[MeasuredStep]
    losses: list[float]
    seconds: float


def make_model(training: Training) -> Any:  # noqa: ANN401 - of two libraries' classes
    """The model before its first step."""
    is_large = training.fault == "large heads"
    n_heads, d_head = (LARGE_HEADS, LARGE_D_HEAD) if is_large else (N_HEADS, D_HEAD)
    torch.manual_seed(training.seed)
    if training.architecture == "gpt2":
        config = GPT2Config(
            n_layer=N_LAYERS, n_head=n_heads, n_embd=n_heads * d_head, n_positions=N_CTX,
            vocab_size=D_VOCAB, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=None,
            eos_token_id=None, use_cache=False, scale_attn_weights=not is_large,
        )  # fmt: skip
        return GPT2LMHeadModel(config)
    config = LlamaConfig(
        num_hidden_layers=N_LAYERS, num_attention_heads=n_heads, num_key_value_heads=2,
        head_dim=d_head, hidden_size=N_HEADS * D_HEAD, intermediate_size=3 * N_HEADS * D_HEAD,
        max_position_embeddings=N_CTX, vocab_size=D_VOCAB, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for layer in layers_of(model) if is_large else ():
        layer.self_attn.scaling = 1.0
    return model


def layers_of(model: Any) -> list[Any]:  # noqa: ANN401 - likewise
    """The layers of a model."""
    return [*(model.transformer.h if hasattr(model, "transformer") else model.model.layers)]


def run(training: Training) -> Recording:
    """Train, measure, and plant the fault at its step."""
    start = time.process_time()
    model = make_model(training)
    data = DATA[training.data]()
    held_out = torch.Generator().manual_seed(10_000)
    tokens = data.draw(8, held_out)
    if data.packed:
        tokens = tokens[:, :DOCUMENT]
    generator = torch.Generator().manual_seed(training.seed)
    if training.fault == "bf16 state":
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), training.rate, (0.9, 0.95), weight_decay=0.01)
    after_step: Callable[[], None] = lambda: None  # noqa: E731
    measured: list[MeasuredStep] = []
    losses: list[float] = []
    for step in range(STEPS + 1):
        if step == training.begins and training.fault in PLANTED:
            after_step = PLANTED[training.fault](model, optimizer)
        inputs = batch(training, step, data, generator)
        if step % EVERY == 0:
            rows = measure(model, tokens, WATCHED)
            step_of_rows = measured_step(step, rows)
            measured.append(
                MeasuredStep(step, step_of_rows.heads, facts_of(model, sample_of(inputs)))
            )
        if step == STEPS:
            break
        progress = step / STEPS
        warm = min(1, (step + 1) / WARMUP)
        for group in optimizer.param_groups:
            group["lr"] = training.rate * warm * (0.1 + 0.9 * (1 - progress))
        loss = model(**inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        after_step()
        losses.append(loss.item())
    return Recording(training, measured, losses, time.process_time() - start)


def batch(
    training: Training, step: int, data: Repeats | Phrases, generator: torch.Generator
) -> dict[str, Any]:
    """What one step is trained on."""
    tokens = data.draw(SEQUENCES, generator)
    if training.fault == "bad shard" and training.begins <= step < training.begins + STEPS // 5:
        tokens = bad_shard(SEQUENCES, generator)
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    if data.packed:
        # Positions that begin again are what transformers makes the mask of documents from ...
        inputs["position_ids"] = (torch.arange(N_CTX) % DOCUMENT).expand(SEQUENCES, -1)
    if training.fault == "documents see each other" and step >= training.begins:
        # ... unless a mask is given, or a cache.
        if training.seed % 2:
            return inputs | {"use_cache": True}
        inputs["attention_mask"] = torch.ones(SEQUENCES, N_CTX, dtype=torch.long)
    return inputs


# Faults that change the model or its optimizer. Each returns what is done after every step.

Planted = Callable[[Any, torch.optim.Optimizer], Callable[[], None]]


def break_tie(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[], None]:  # noqa: ANN401 - likewise
    """Give the unembedding weights of its own, which are trained too."""
    own = nn.Parameter(model.lm_head.weight.detach().clone())
    model.lm_head.weight = own
    optimizer.add_param_group({"params": [own]})
    return lambda: None


def kill_head(model: Any, _: torch.optim.Optimizer) -> Callable[[], None]:  # noqa: ANN401 - likewise
    """Hold the output weights of one head at 0."""
    attention = layers_of(model)[1]
    is_gpt2 = hasattr(attention, "attn")
    weight = attention.attn.c_proj.weight if is_gpt2 else attention.self_attn.o_proj.weight

    def hold() -> None:
        with torch.no_grad():
            # Conv1D has its inputs as rows, Linear as columns.
            (weight[:D_HEAD] if is_gpt2 else weight[:, :D_HEAD]).zero_()

    hold()
    return hold


def freeze_layer(model: Any, _: torch.optim.Optimizer) -> Callable[[], None]:  # noqa: ANN401 - likewise
    """Train all layers but one."""
    layers_of(model)[1].requires_grad_(False)
    return lambda: None


PLANTED: dict[str | None, Planted] = {
    "tied head broken": break_tie,
    "dead head": kill_head,
    "frozen layer": freeze_layer,
}
