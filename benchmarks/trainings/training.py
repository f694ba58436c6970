"""One tiny training, sound or with a planted fault, measured every few steps."""

import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
from transformers.models.gpt_neox.configuration_gpt_neox import GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.phi.configuration_phi import PhiConfig
from transformers.models.phi.modeling_phi import PhiForCausalLM
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from benchmarks.trainings.data import D_VOCAB, DATA, DOCUMENT, N_CTX
from headcount import Error, measure
from headcount.schemas.watch.history import MeasuredStep, measured_step
from headcount.schemas.watch.rules import WATCHED
from headcount.workers.watching import facts_of, sample_of

STEPS, EVERY, SEQUENCES = 200, 10, 16
WARMUP = 15  # steps until the learning rate is whole
SAVED = 20  # steps between two checkpoints

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
    narrow: bool = False  # bfloat16, the optimizer's own copies and state in float32

    @property
    def key(self) -> str:
        """The name of its file."""
        fault = f"{self.fault}-{self.begins}" if self.fault else "sound"
        fault += "-narrow" if self.narrow else ""
        words = f"{self.architecture}-{self.data}-{self.rate:g}-{self.seed}-{fault}"
        return words.replace(" ", "-")

    @property
    def name(self) -> str:
        """All of it in one line."""
        fault = f"{self.fault} from step {self.begins}" if self.fault else "sound"
        fault += " in bfloat16" if self.narrow else ""
        return f"{self.architecture}, {self.data}, rate {self.rate:g}, seed {self.seed}: {fault}"


@dataclass(frozen=True)
class Recording:
    """What was measured in a training, and its losses, one each step."""

    training: Training
    measured: list[MeasuredStep]
    losses: list[float]
    seconds: float
    refusal: str = ""  # why no more was measured, as of a callback that warns


@dataclass
class Setting:
    """A training that goes on: what a fault can change in it."""

    model: Any  # of several libraries' classes
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], dict[str, Any]]  # the inputs of a step
    rate: Callable[[int], float]  # the learning rate of a step
    generator: torch.Generator  # of the data
    after_backward: Callable[[int], None] = lambda _: None
    after_step: Callable[[int], None] = lambda _: None
    checkpoints: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    """The weights at earlier steps."""


def make_model(architecture: str, seed: int, large_heads: bool) -> Any:  # noqa: ANN401 - of several libraries' classes
    """A model before its first step. Large heads have scores that are not scaled."""
    n_heads, d_head = (LARGE_HEADS, LARGE_D_HEAD) if large_heads else (N_HEADS, D_HEAD)
    torch.manual_seed(seed)
    special: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
    if architecture == "gpt2":
        config = GPT2Config(
            n_layer=N_LAYERS, n_head=n_heads, n_embd=n_heads * d_head, n_positions=N_CTX,
            vocab_size=D_VOCAB, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **special,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
    elif architecture in ("gpt_neox", "phi"):
        make_config, make = {
            "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM),
            "phi": (PhiConfig, PhiForCausalLM),
        }[architecture]
        config = make_config(
            num_hidden_layers=N_LAYERS, num_attention_heads=n_heads, hidden_size=n_heads * d_head,
            intermediate_size=4 * n_heads * d_head, max_position_embeddings=N_CTX,
            vocab_size=D_VOCAB, **special,
        )  # fmt: skip
        model = make(config)
    else:
        kinds = {
            "llama": (LlamaConfig, LlamaForCausalLM),
            "mistral": (MistralConfig, MistralForCausalLM),
            "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        }
        make_config, make = kinds[architecture]
        config = make_config(
            num_hidden_layers=N_LAYERS, num_attention_heads=n_heads, num_key_value_heads=2,
            head_dim=d_head, hidden_size=N_HEADS * D_HEAD, intermediate_size=3 * N_HEADS * D_HEAD,
            max_position_embeddings=N_CTX, vocab_size=D_VOCAB, tie_word_embeddings=True, **special,
        )  # fmt: skip
        model = make(config)
    for layer in layers_of(model) if large_heads else ():
        attention_of(layer).scaling = 1.0
    return model


def layers_of(model: Any) -> list[Any]:  # noqa: ANN401 - likewise
    """The layers of a model."""
    return next([*part] for part in model.modules() if isinstance(part, nn.ModuleList))


def attention_of(layer: nn.Module) -> Any:  # noqa: ANN401 - likewise
    """The attention of a layer."""
    names = ("attn", "self_attn", "attention")
    return next(part for name, part in layer.named_children() if name in names)


class AdamWOfCopies(AdamW):
    """AdamW on float32 copies of narrow weights, as mixed precision needs it."""

    def __init__(self, weights: Iterable[nn.Parameter], *options: Any, **more: Any) -> None:  # noqa: ANN401 - AdamW's own
        self.weights = [*weights]
        self.copies = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        super().__init__(self.copies, *options, **more)

    def step(self, closure: None = None) -> None:
        """Learn in float32, and round once."""
        for weight, copy in zip(self.weights, self.copies, strict=True):
            assert weight.grad is not None
            copy.grad = weight.grad.float()
            weight.grad = None
        super().step(closure)
        with torch.no_grad():
            for weight, copy in zip(self.weights, self.copies, strict=True):
                weight.copy_(copy)


def start(training: Training) -> Setting:
    """A training before its first step, in which nothing is wrong but its rate."""
    model = make_model(training.architecture, training.seed, training.fault == "large heads")
    data = DATA[training.data]()
    generator = torch.Generator().manual_seed(training.seed)
    make_optimizer = AdamW
    if training.narrow:
        model.to(torch.bfloat16)
        make_optimizer = AdamWOfCopies
    optimizer = make_optimizer(model.parameters(), training.rate, (0.9, 0.95), weight_decay=0.01)

    def batch(step: int) -> dict[str, Any]:
        tokens = data.draw(SEQUENCES, generator)
        inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
        if data.packed:
            # Positions that begin again are what transformers makes the mask of documents from.
            inputs["position_ids"] = (torch.arange(N_CTX) % DOCUMENT).expand(SEQUENCES, -1)
        return inputs

    def rate(step: int) -> float:
        progress = step / STEPS
        warm = min(1, (step + 1) / WARMUP)
        return training.rate * warm * (0.1 + 0.9 * (1 - progress))

    return Setting(model, optimizer, batch, rate, generator)


def run(
    training: Training, plant: Callable[[Setting, Training], None], every: int = EVERY
) -> Recording:
    """Train, measure, and plant the fault at its step."""
    began = time.process_time()
    setting = start(training)
    data = DATA[training.data]()
    tokens = data.draw(8, torch.Generator().manual_seed(10_000))
    if data.packed:
        tokens = tokens[:, :DOCUMENT]
    measured: list[MeasuredStep] = []
    losses: list[float] = []
    refusal = ""
    for step in range(STEPS + 1):
        if step == training.begins:
            plant(setting, training)
        model = setting.model
        inputs = setting.batch(step)
        if step % every == 0 and not refusal:
            try:
                heads = measured_step(step, measure(model, tokens, WATCHED)).heads
                measured.append(MeasuredStep(step, heads, facts_of(model, sample_of(inputs))))
            except Error as error:
                refusal = str(error)
        if step == STEPS:
            break
        if step % SAVED == 0:
            setting.checkpoints[step] = deepcopy(model.state_dict())
        for group in setting.optimizer.param_groups:
            group["lr"] = setting.rate(step)
        loss = model(**inputs).loss
        loss.backward()
        setting.after_backward(step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        setting.optimizer.step()
        setting.optimizer.zero_grad()
        setting.after_step(step)
        losses.append(loss.item())
    return Recording(training, measured, losses, time.process_time() - began, refusal)
