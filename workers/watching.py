"""A watched training: what is noted of a model at a step, what is logged of it, and what rings.

`headcount.watch` is for a loop of one's own; the callback of the Trainer does the same.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from headcount.schemas.arguments import checked
from headcount.schemas.errors import MeasureError, ModelError, ScanError
from headcount.schemas.values import Index
from headcount.schemas.watch.alarms import Alarm, alarms
from headcount.schemas.watch.history import Facts, MeasuredStep, layer_of, measured_step
from headcount.schemas.watch.rules import WATCHED
from headcount.workers.borrowed_model import evaluating, unwrapped
from headcount.workers.measure_api import measure

OnAlarm: TypeAlias = Literal["warn", "stop"] | Callable[[Alarm], object]

FLAT = ("FullyShardedDataParallel", "FlatParameter")  # names of classes of FSDP 1

NARROW = (torch.bfloat16, torch.float16)  # formats in which small updates are rounded away


class Watcher:
    """The measured steps of one training, and the rules that have rung in it."""

    def __init__(self, measured: Sequence[MeasuredStep] = ()) -> None:
        self.measured = list(measured)
        self.rung = {alarm.rule for alarm in alarms(self.measured)}

    def note(self, step: MeasuredStep) -> list[Alarm]:
        """Add a step; returns what rings for the first time."""
        # A step that is measured again takes the place of what followed it.
        self.measured = [each for each in self.measured if each.step < step.step] + [step]
        new = [alarm for alarm in alarms(self.measured) if alarm.rule not in self.rung]
        self.rung |= {alarm.rule for alarm in new}
        return new


_WATCHERS: WeakKeyDictionary[nn.Module, Watcher] = WeakKeyDictionary()
"""Those of models that `headcount.watch` was called with and that still exist."""


@checked(ScanError)
def watch(
    model: object,
    tokens: object,
    step: Index,
    *,
    batch: Mapping[str, object] | None = None,
    on_alarm: OnAlarm = "warn",
    layers: bool = False,
) -> dict[str, float]:
    """Measure the heads of a model in training, ring if a rule does, and return what to log.

    `tokens` are `[sequence pos]`, the same each time. `batch` are the inputs of this training
    step, for the rules on data and documents. `on_alarm` is "warn", "stop", which raises, or a
    function of an alarm. The dictionary has the mean and largest of each statistic over the heads,
    and the head of the largest; with `layers` also the mean of each layer:
    `heads/sink_mass/mean`, `…/layer_0`.
    """
    modules = unwrapped(model)
    refuse_sharded(modules)
    rows = measure(modules, tokens, WATCHED, run_id=f"step-{step}")
    sample = Sample() if batch is None else sample_of(batch)
    noted = measured_step(step, facts_of(modules, sample).added_to(rows))
    watcher = _WATCHERS.setdefault(modules, Watcher())
    for alarm in watcher.note(noted):
        if on_alarm == "stop" and not alarm.is_notice:
            raise MeasureError(str(alarm))
        ring(alarm, on_alarm)
    return logged(noted, layers) | {"heads/alarms": float(len(watcher.rung))}


def ring(alarm: Alarm, on_alarm: OnAlarm) -> None:
    """Tell of an alarm."""
    if callable(on_alarm):
        on_alarm(alarm)
    else:
        warnings.warn(str(alarm), RuntimeWarning, stacklevel=4)


def logged(step: MeasuredStep, layers: bool) -> dict[str, float]:
    """What is logged of a step: `heads/STATISTIC/mean`, `/max`, `/max_layer`, `/max_head`."""
    numbers: dict[str, float] = {}
    for statistic, values in step.heads.items():
        if np.isnan(values).all():
            continue
        layer, head = np.unravel_index(np.nanargmax(values), values.shape)
        name = f"heads/{statistic}"
        numbers[f"{name}/mean"] = float(np.nanmean(values))
        numbers[f"{name}/max"] = float(values[layer, head])
        numbers[f"{name}/max_layer"] = float(layer)
        numbers[f"{name}/max_head"] = float(head)
        for number, of_layer in enumerate(values if layers else ()):
            if not np.isnan(of_layer).all():
                numbers[f"{name}/layer_{number}"] = float(np.nanmean(of_layer))
    return numbers


def refuse_sharded(modules: nn.Module) -> None:
    """Refuse a model of which each process has a part."""
    for part in (*modules.modules(), *modules.parameters()):
        names = {kind.__name__ for kind in type(part).__mro__}
        # ZeRO-3 marks the weights that it has taken apart.
        if names & {*FLAT, "DTensor"} or hasattr(part, "ds_id"):
            raise ModelError(
                "model: expected whole weights, got weights that FSDP or ZeRO-3 has sharded; save "
                "whole checkpoints (FSDP: state_dict_type FULL_STATE_DICT, ZeRO-3: "
                "stage3_gather_16bit_weights_on_model_save) and run headcount watch DIRECTORY"
            )


# Facts of a model and of what it is trained on


@dataclass(frozen=True)
class Sample:
    """What is kept of a training step's inputs."""

    repeated: float | None = None  # share of the tokens that were in their sequence before
    shifted: float | None = None  # share of the labels that are the next token, not their own
    batch: str | None = None  # digest of the tokens
    inputs: Mapping[str, Any] | None = None
    """The inputs of one sequence, without labels: the one with most documents."""
    has_documents: bool = False  # whether that sequence has several


def facts_of(model: nn.Module, sample: Sample) -> Facts:
    """What a model says of itself now, and of what it is trained on."""
    # In float64, so that a weight whose norm stays the same has stayed the same.
    norms = {
        name: float(torch.linalg.vector_norm(weight.detach(), dtype=torch.float64))
        for name, weight in model.named_parameters()
    }
    narrow = [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and weight.dtype in NARROW
    ]
    inputs = sample.inputs
    return Facts(
        norms,
        narrow,
        _untied(model),
        leak=leak_between(model, inputs) if inputs and sample.has_documents else None,
        repeated=sample.repeated,
        ahead=leak_from_later(model, inputs) if inputs else None,
        shifted=sample.shifted,
        batch=sample.batch,
        attention=_attention_of(model),
    )


def _untied(model: Any) -> float | None:  # noqa: ANN401 - of whatever library
    """How far the unembedding is from the embedding, where the config says that they are one."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return None
    both = model.get_input_embeddings(), model.get_output_embeddings()
    embedding, unembedding = (part.weight.detach() for part in both)
    return float((embedding - unembedding).norm() / embedding.norm())


def _attention_of(model: nn.Module) -> dict[str, str]:
    """Digest of the numbers that the attention of each layer is set to, but for dropout."""
    numbers: dict[str, list[str]] = {}
    for place, part in model.named_modules():
        layer = layer_of(place)
        if layer is None or not any(word in place.lower() for word in ("attn", "attention")):
            continue
        for name, value in vars(part).items():
            is_number = type(value) in (int, float, bool) and not name.startswith("_")
            if is_number and name != "training" and "dropout" not in f"{place}.{name}":
                numbers.setdefault(f"{layer}", []).append(f"{place}.{name} {value!r}")
    return {layer: _digest("\n".join(lines).encode()) for layer, lines in numbers.items()}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def sample_of(batch: Mapping[str, Any]) -> Sample:
    """What is kept of the inputs of a training step; nothing if they are no tokens.

    Documents begin where `position_ids` begin again.
    """
    tokens, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(tokens, Tensor) or tokens.dim() != 2:
        return Sample()
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape:
        mask = torch.ones_like(tokens)
    texts = [row[is_text != 0] for row, is_text in zip(tokens, mask, strict=True)]
    distinct = sum(len(text.unique()) for text in texts)
    repeated = 1 - distinct / max(1, sum(map(len, texts)))
    row, documents, positions = 0, 1, batch.get("position_ids")
    if isinstance(positions, Tensor):
        positions = positions.expand(len(tokens), -1)
        begun = (positions == 0).sum(1)
        row, documents = int(begun.argmax()), int(begun.max())
    inputs = {
        name: value[row : row + 1].clone()
        if isinstance(value, Tensor) and value.dim() and len(value) == len(tokens)
        else value
        for name, value in {**batch, "position_ids": positions}.items()
        if name != "labels"
    }
    digest = _digest(tokens.cpu().numpy().tobytes())
    return Sample(repeated, _shifted(tokens, batch.get("labels")), digest, inputs, documents > 1)


def _shifted(tokens: Tensor, labels: object) -> float | None:
    """Share of the labels that are the token after their own, and not their own."""
    if not isinstance(labels, Tensor) or labels.shape != tokens.shape or tokens.shape[1] < 2:
        return None
    labels = labels[:, :-1].to(tokens.device)
    is_label = labels >= 0  # Others count for nothing in the loss.
    if not is_label.any():
        return None
    is_next = (labels == tokens[:, 1:]) & (labels != tokens[:, :-1])
    return float(is_next[is_label].double().mean())


def leak_between(model: Any, inputs: Mapping[str, Any]) -> float:  # noqa: ANN401 - likewise
    """How far predictions in the second document of a sequence follow the tokens of the first.

    ‖logits - logits'‖ / ‖logits‖ over the second document, where logits' are those after every
    token of the first has become another one.
    """
    first, second, *later = (inputs["position_ids"][0] == 0).nonzero().flatten().tolist()
    stop = later[0] if later else inputs["input_ids"].shape[1]
    return _moved(model, inputs, slice(first, second), slice(second, stop))


def leak_from_later(model: Any, inputs: Mapping[str, Any]) -> float | None:  # noqa: ANN401 - likewise
    """How far predictions follow later tokens of their sequence, which they must not see.

    ‖logits - logits'‖ / ‖logits‖ over the first half of the text, where logits' are those after
    every token of the second half has become another one; None if there is one token.
    """
    mask = inputs.get("attention_mask")
    is_text = torch.ones_like(inputs["input_ids"])
    if isinstance(mask, Tensor) and mask.shape == is_text.shape:
        is_text = mask
    places = is_text[0].nonzero().flatten().tolist()
    if len(places) < 2:
        return None
    first, middle, last = places[0], places[len(places) // 2], places[-1]
    return _moved(model, inputs, slice(middle, last + 1), slice(first, middle))


def _moved(model: Any, inputs: Mapping[str, Any], changed: slice, looked_at: slice) -> float:  # noqa: ANN401 - likewise
    """How far the predictions of some tokens of a sequence move where some others are changed."""
    tokens = inputs["input_ids"].clone()
    tokens[:, changed] = (tokens[:, changed] + 1) % model.config.vocab_size
    with evaluating(model), torch.no_grad():
        logits, others = (
            model(**{**inputs, "input_ids": each}).logits[:, looked_at].float()
            for each in (inputs["input_ids"], tokens)
        )
    return float((logits - others).norm() / logits.norm())
