"""Faults that are planted in trainings: what each does, and which rules would name it rightly.

A fault is a function of the training's setting, called at the step at which it begins. What
`FAULTS` says of each was written down before anything was recorded.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.trainings.data import N_CTX, random_text
from benchmarks.trainings.training import (
    D_HEAD,
    SAVED,
    SEQUENCES,
    STEPS,
    WARMUP,
    Setting,
    Training,
    attention_of,
    layers_of,
)

Plant = Callable[[Setting, Training], None]

LONG = STEPS // 5  # steps that a bad shard takes
DECAY = 10.0  # of norms: a hundred times 0.1, which is usual


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    right: tuple[str, ...]  # the rules that name it; none if no rule is about it
    plant: Plant

    @property
    def meaning(self) -> str:
        """What goes wrong, in a few words."""
        return (inspect.getdoc(self.plant) or "").removesuffix(".")


FAULTS: dict[str, Fault] = {}


def fault(*right: str) -> Callable[[Plant], Plant]:
    """Register a fault under the name of its function, with the rules that name it."""

    def register(plant: Plant) -> Plant:
        FAULTS[plant.__name__.replace("_", " ")] = Fault(right, plant)
        return plant

    return register


def plant(setting: Setting, training: Training) -> None:
    """Plant the fault of a training, if it has one."""
    if training.fault is not None:
        FAULTS[training.fault].plant(setting, training)


def _output_of(attention: nn.Module) -> Any:  # noqa: ANN401 - of several libraries' classes
    """The projection of the heads' outputs into the stream."""
    names = ("c_proj", "o_proj", "dense")
    return next(part for name, part in attention.named_children() if name in names)


# Those that the rules were made for.


@fault("score_growth", "entropy_collapse")
def rate_too_high(setting: Setting, training: Training) -> None:
    """Learning rate 0.03 to 0.2."""


@fault("score_growth", "entropy_collapse")
def large_heads(setting: Setting, training: Training) -> None:
    """Heads of 64, scores neither normalised nor scaled, rate 0.01."""


@fault("lost_updates")
def bf16_state(setting: Setting, training: Training) -> None:
    """Weights and optimizer state in bfloat16."""
    setting.model.to(torch.bfloat16)


@fault("document_leak")
def documents_see_each_other(setting: Setting, training: Training) -> None:
    """Documents that see each other."""
    # Transformers makes no mask of documents where a mask is given, or a cache.
    more: dict[str, Any] = {"attention_mask": torch.ones(SEQUENCES, N_CTX, dtype=torch.long)}
    if training.seed % 2:
        more = {"use_cache": True}
    draw = setting.batch
    setting.batch = lambda step: draw(step) | more


@fault("data_change", "induction_loss")
def bad_shard(setting: Setting, training: Training) -> None:
    """A bad data shard, 40 steps."""
    draw = setting.batch

    def batch(step: int) -> dict[str, Any]:
        inputs = draw(step)
        if step >= training.begins + LONG:
            return inputs
        tokens = random_text(SEQUENCES, setting.generator)
        return inputs | {"input_ids": tokens, "labels": tokens}

    setting.batch = batch


@fault("tied_head")
def tied_head_broken(setting: Setting, training: Training) -> None:
    """Tied head broken."""
    own = nn.Parameter(setting.model.lm_head.weight.detach().clone())
    setting.model.lm_head.weight = own
    setting.optimizer.add_param_group({"params": [own]})


@fault("head_death")
def dead_head(setting: Setting, training: Training) -> None:
    """Dead head."""
    output = _output_of(attention_of(layers_of(setting.model)[1]))
    # Conv1D has its inputs as rows, Linear as columns.
    of_head = (slice(None), slice(D_HEAD)) if isinstance(output, nn.Linear) else slice(D_HEAD)

    def hold(step: int) -> None:
        with torch.no_grad():
            output.weight[of_head] = 0

    hold(training.begins)
    setting.after_step = hold


@fault("frozen_layer")
def frozen_layer(setting: Setting, training: Training) -> None:
    """Frozen layer."""
    layers_of(setting.model)[1].requires_grad_(False)


# Those that nobody thought of when the rules were made.


@fault("shifted_labels", "induction_loss")
def labels_shifted(setting: Setting, training: Training) -> None:
    """Labels shifted by one: the token after the next is learned."""
    draw = setting.batch

    def batch(step: int) -> dict[str, Any]:
        inputs = draw(step)
        labels = inputs["labels"].roll(-1, 1)
        labels[:, -1] = -100  # no token comes after the last
        return inputs | {"labels": labels}

    setting.batch = batch


@fault("future_leak")
def mask_lost(setting: Setting, training: Training) -> None:
    """Attention mask lost for one layer, which sees what comes."""
    everything = torch.zeros(1, 1, N_CTX, N_CTX)

    def unmask(part: nn.Module, given: object, named: dict[str, Any]) -> Any:  # noqa: ANN401 - of a hook
        return given, named | {"attention_mask": everything}

    attention = attention_of(layers_of(setting.model)[1])
    attention.register_forward_pre_hook(unmask, with_kwargs=True)


@fault()
def norms_decayed(setting: Setting, training: Training) -> None:
    """Weight decay of norms a hundred times too large."""
    norms = [
        weight
        for name, weight in setting.model.named_parameters()
        if "norm" in name or "ln_" in name
    ]

    def decay(step: int) -> None:
        with torch.no_grad():
            for weight in norms:
                weight.mul_(1 - setting.rate(step) * DECAY)

    setting.after_step = decay


@fault()
def gradient_doubled(setting: Setting, training: Training) -> None:
    """Gradient of one layer doubled."""
    layer = layers_of(setting.model)[1]

    def double(step: int) -> None:
        for weight in layer.parameters():
            weight.grad.mul_(2)

    setting.after_backward = double


@fault("score_growth", "entropy_collapse")
def no_warmup(setting: Setting, training: Training) -> None:
    """Warm-up skipped, rate 0.02."""
    rate = setting.rate
    setting.rate = lambda step: rate(step) / min(1, (step + 1) / WARMUP)


@fault()
def momentum_lost(setting: Setting, training: Training) -> None:
    """Momentum set to 0 every 5 steps."""

    def forget(step: int) -> None:
        if step % 5 == 0:
            for state in setting.optimizer.state.values():
                state["exp_avg"].zero_()

    setting.after_step = forget


@fault()
def state_lost(setting: Setting, training: Training) -> None:
    """State of the optimizer lost once."""
    setting.optimizer.state.clear()


@fault("earlier_weights")
def earlier_checkpoint(setting: Setting, training: Training) -> None:
    """Weights of a checkpoint, of 40 to 55 steps before, loaded once."""
    step = training.begins // SAVED * SAVED - 2 * SAVED
    setting.model.load_state_dict(setting.checkpoints[step])


@fault("changed_attention", "score_growth", "entropy_collapse")
def scale_lost(setting: Setting, training: Training) -> None:
    """Scores no longer divided by √d_head."""
    for layer in layers_of(setting.model):
        attention_of(layer).scaling = 1.0


@fault("frozen_layer")
def gradient_lost(setting: Setting, training: Training) -> None:
    """Gradient of one layer 0, its decay goes on."""
    layer = layers_of(setting.model)[1]

    def lose(step: int) -> None:
        for weight in layer.parameters():
            weight.grad.zero_()

    setting.after_backward = lose


@fault("repeated_batch", "data_change")
def loader_stuck(setting: Setting, training: Training) -> None:
    """The same batch at every step."""
    same = setting.batch(training.begins)
    setting.batch = lambda step: same


@fault("score_growth", "entropy_collapse")
def rate_raised(setting: Setting, training: Training) -> None:
    """Learning rate ten times too high from a step on."""
    rate = setting.rate
    setting.rate = lambda step: 10 * rate(step)


# Those that nobody thought of before the later trainings were planned.


@fault("changed_attention")
def window_narrowed(setting: Setting, training: Training) -> None:
    """One layer sees the last 6 tokens only."""
    places = torch.arange(N_CTX)
    distance = places[:, None] - places
    is_seen = (distance >= 0) & (distance < 6)
    mask = torch.where(is_seen, 0.0, -torch.inf)[None, None]

    def narrow(part: nn.Module, given: object, named: dict[str, Any]) -> Any:  # noqa: ANN401 - of a hook
        return given, named | {"attention_mask": mask}

    attention = attention_of(layers_of(setting.model)[1])
    attention.register_forward_pre_hook(narrow, with_kwargs=True)


@fault("induction_loss", "data_change")
def labels_of_another_sequence(setting: Setting, training: Training) -> None:
    """Labels of the next sequence of the batch."""
    draw = setting.batch

    def batch(step: int) -> dict[str, Any]:
        inputs = draw(step)
        return inputs | {"labels": inputs["labels"].roll(1, 0)}

    setting.batch = batch


@fault()
def heads_tied(setting: Setting, training: Training) -> None:
    """Outputs of two heads of a layer are the same."""
    output = _output_of(attention_of(layers_of(setting.model)[1]))

    def tie(step: int) -> None:
        with torch.no_grad():
            output.weight[:, :D_HEAD] = output.weight[:, D_HEAD : 2 * D_HEAD]

    setting.after_step = tie


@fault()
def embedding_frozen(setting: Setting, training: Training) -> None:
    """Embeddings learn no more."""
    setting.model.get_input_embeddings().requires_grad_(False)


@fault("head_death")
def decay_of_all(setting: Setting, training: Training) -> None:
    """Weight decay a thousand times too large."""
    for group in setting.optimizer.param_groups:
        group["weight_decay"] = 10.0


@fault()
def gradient_reversed(setting: Setting, training: Training) -> None:
    """Gradient of one layer with the wrong sign."""
    layer = layers_of(setting.model)[1]

    def reverse(step: int) -> None:
        for weight in layer.parameters():
            if weight.grad is not None:
                weight.grad.neg_()

    setting.after_backward = reverse


@fault("data_change")
def tokens_blanked(setting: Setting, training: Training) -> None:
    """A third of the tokens replaced by token 0."""
    draw = setting.batch

    def batch(step: int) -> dict[str, Any]:
        inputs = draw(step)
        is_blank = torch.rand(inputs["input_ids"].shape, generator=setting.generator) < 1 / 3
        tokens = inputs["input_ids"].masked_fill(is_blank, 0)
        return inputs | {"input_ids": tokens, "labels": tokens}

    setting.batch = batch


@fault("earlier_weights", "frozen_layer")
def updates_lost(setting: Setting, training: Training) -> None:
    """The optimizer makes no steps."""
    setting.rate = lambda step: 0.0


@fault("future_leak")
def answers_leaked(setting: Setting, training: Training) -> None:
    """The last layer is given the embedding of the next token, too."""
    embedding = setting.model.get_input_embeddings()
    last = layers_of(setting.model)[-1]
    latest: list[torch.Tensor] = []
    embedding.register_forward_hook(lambda part, given, output: latest.append(output))

    def leak(part: nn.Module, given: tuple[torch.Tensor, ...]) -> Any:  # noqa: ANN401 - of a hook
        following = latest.pop().roll(-1, 1)
        latest.clear()
        return (given[0] + following, *given[1:])

    last.register_forward_pre_hook(leak)


@fault()
def layer_reset(setting: Setting, training: Training) -> None:
    """Weights of one layer drawn anew once."""
    with torch.no_grad():
        for weight in layers_of(setting.model)[1].parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.02)


@fault()
def positions_held(setting: Setting, training: Training) -> None:
    """All tokens of a sequence have position 1."""
    draw = setting.batch

    def batch(step: int) -> dict[str, Any]:
        inputs = draw(step)
        return inputs | {"position_ids": torch.ones_like(inputs["input_ids"])}

    setting.batch = batch
