"""What a layer computes, step by step, and the same steps of another layer from the same inputs.

Each module of a layer is given what the same module of the other model was given, and what it puts
out is replaced by what the other one put out. So a step differs by itself, and hands nothing on.
What lies between two modules shows as the input of the second one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headcount.workers.diff.side import NOTHING, Side, WholePass, given_stream, with_stream
from headcount.workers.model.attention_facts import Attend, AttentionFacts
from headcount.workers.model.bare_modules import ATTENTION, MLP, PROJECTIONS, first_of
from headcount.workers.model.rotations import Rotation

JOINT = ("c_attn", "query_key_value", "qkv_proj", "Wqkv", "qkv")
"""Names of modules that make q, k and v at once. They are seen where the attention gets them."""

QK_NORM = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")


@dataclass
class LayerTrace:
    """What one layer computes of a stream."""

    stream: Tensor
    inputs: dict[str, Tensor] = field(default_factory=dict)  # of modules, by name in the layer
    outputs: dict[str, Tensor] = field(default_factory=dict)
    attention: dict[str, Tensor] = field(default_factory=dict)  # q, k, v, z `[batch pos head d]`
    rotation: Rotation | None = None
    result: Tensor = NOTHING  # the stream after the layer

    def of_first(self) -> LayerTrace:
        """The same of the first sequence alone."""
        inputs, outputs, attention = (
            {name: tensor[:1] for name, tensor in tensors.items()}
            for tensors in (self.inputs, self.outputs, self.attention)
        )
        rest = (self.rotation, self.result[:1])
        return LayerTrace(self.stream[:1], inputs, outputs, attention, *rest)


@dataclass(frozen=True)
class Step:
    """One step of a layer, by both models from the same inputs: `[batch pos head d]`."""

    quantity: str
    module: str  # that was given or puts out what differs; empty if none
    is_input: bool
    ours: Tensor
    theirs: Tensor

    @property
    def key(self) -> str:
        """What is compared with the noise of the same step in all layers."""
        return f"{self.module} {self.quantity} {self.is_input}"

    def sizes(self) -> Tensor:
        """The difference relative to ours `[batch pos head]`, or to ours at a middle position."""
        difference, size = (self.theirs - self.ours).norm(dim=-1), self.ours.norm(dim=-1)
        middle = size.flatten(0, 1).median(0).values
        return difference / torch.maximum(size, middle).clamp(min=1e-30)


Z_KEY = " pattern False"
"""Key of the step that attention is: its two sides are z."""


def by_head(tensor: Tensor, d_head: int | None) -> Tensor:
    """`[batch pos d]` as `[batch pos head d_head]`, of one head where there are none."""
    if tensor.dim() == 4:
        return tensor
    return tensor.unflatten(-1, (-1, d_head or tensor.shape[-1]))


def whole_step(quantity: str, ours: Tensor, theirs: Tensor) -> Step:
    """A step that no module makes alone: `[batch pos d]` by both."""
    return Step(quantity, "", False, by_head(ours, None), by_head(theirs, None))


def quantity_of(module: str, is_input: bool) -> str:
    """What users call what a module is given or puts out."""
    *path, name = module.split(".")
    inside = path[0] if path else name
    letters = [letter for letter, names in PROJECTIONS.items() if name in names]
    if name in QK_NORM:
        return "QK norm" if not is_input else name[0]
    if name in MLP or inside in MLP:
        return "MLP" if not is_input or name not in MLP else "residual stream"
    if "norm" in name or name.startswith("ln"):
        return "residual stream" if is_input else "norm"
    if inside in ATTENTION or name in ATTENTION:
        if is_input and (name in JOINT or not path):
            return "norm"
        if letters and letters[0] in "QKV":
            return "norm" if is_input else letters[0].lower()
        return "z" if is_input else "attention output"
    return "residual stream"


def named_parts(block: nn.Module) -> dict[str, nn.Module]:
    """The modules inside a layer by name."""
    return {name: module for name, module in block.named_modules() if name}


@contextmanager
def hooked(block: nn.Module, begin: Callable[..., Any], end: Callable[..., Any]) -> Iterator[None]:
    """Within it, each module of a layer calls `begin` before and `end` behind it, with its name."""
    with ExitStack() as hooks:
        for name, module in named_parts(block).items():
            before = module.register_forward_pre_hook(partial(begin, name), with_kwargs=True)
            hooks.enter_context(before)
            hooks.enter_context(module.register_forward_hook(partial(end, name)))
        yield


@contextmanager
def recorded(block: nn.Module, trace: LayerTrace) -> Iterator[None]:
    """Within it, what a layer's modules are given and put out is kept, of those called once."""
    calls: dict[str, int] = {}

    def is_of_positions(tensor: object) -> bool:
        if not isinstance(tensor, Tensor) or tensor.dim() not in (3, 4):
            return False
        return tensor.shape[:2] == trace.stream.shape[:2]

    def begin(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[name] = calls.get(name, 0) + 1
        if is_of_positions(stream := given_stream(args, kwargs)):
            trace.inputs[name] = stream.clone()

    def end(name: str, _module: nn.Module, _args: object, output: object) -> None:
        put_out: Any = first_of(output)
        if is_of_positions(put_out):
            trace.outputs[name] = put_out.clone()

    with hooked(block, begin, end):
        yield
    for name in (name for name, count in calls.items() if count > 1):
        trace.inputs.pop(name, None)
        trace.outputs.pop(name, None)


def note_attention(trace: LayerTrace, attend: Attend) -> Attend:
    """The same attention, which notes what it is given and puts out."""

    def noting(q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
        trace.rotation = facts.rotation
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            trace.attention[name] = tensor.transpose(1, 2).clone()
        z = attend(q, k, v, facts)
        trace.attention["z"] = z.clone()
        return z

    return noting


def turned(rotation: Rotation | None, x: Tensor, *, back: bool) -> Tensor:
    """q or k `[batch pos head d]` rotated by a layer's rotation or rotated back."""
    if rotation is None or rotation.rotate is None:
        return x
    return rotation.undo(x) if back else rotation.apply(x)


def steps_of(
    side: Side, whole: WholePass, layer: int, trace: LayerTrace, attend: Attend
) -> tuple[list[Step], Rotation | None]:
    """The steps of a layer of a side, each from what the traced layer of the other was given."""
    steps: list[Step] = []
    d_head = side.model.info.d_head
    rotations: list[Rotation | None] = []

    def compare(module: str, is_input: bool, theirs: Tensor, ours: Tensor) -> Tensor:
        quantity = quantity_of(module, is_input)
        in_heads = quantity in ("q", "k", "v", "z", "QK norm")
        has_heads = in_heads and ours.shape[-1] % d_head == 0
        pair = [by_head(each, d_head if has_heads else None).clone() for each in (ours, theirs)]
        steps.append(Step(quantity, module, is_input, *pair))
        return ours.clone()

    def begin(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        pair = comparable(given_stream(args, kwargs), trace.inputs.get(name))
        if pair is None:
            return None
        return with_stream(args, kwargs, compare(name, True, *pair))

    def end(name: str, _module: nn.Module, _args: object, output: Any) -> Any:  # noqa: ANN401
        pair = comparable(first_of(output), trace.outputs.get(name))
        if pair is None or name.rpartition(".")[2] in JOINT:
            return None
        replaced = compare(name, False, *pair)
        return (replaced, *output[1:]) if isinstance(output, tuple | list) else replaced

    def attend_as_ours(q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
        ours, own = trace.attention, facts.rotation
        rotations.append(own)
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            theirs = like(tensor.transpose(1, 2), ours[name])
            if name == "v":
                steps.append(Step("v", "", True, ours["v"], theirs))
                continue
            unrotated = turned(trace.rotation, ours[name], back=True)
            steps.append(Step(name, "", True, unrotated, turned(own, theirs, back=True)))
            rotated = turned(own, unrotated, back=False)
            steps.append(Step("rotation", name, True, ours[name], rotated))
        q, k, v = (ours[name].transpose(1, 2) for name in "qkv")
        z = attend(q, k, v, facts)
        steps.append(Step("pattern", "", False, ours["z"], z))
        return ours["z"].clone()

    with hooked(side.model.blocks[layer], begin, end):
        result = side.run_layer(whole, layer, trace.stream, attend_as_ours)
    ours, theirs = map(side.model.stream, (trace.result, result))
    steps.append(whole_step("residual stream", ours, theirs))
    return steps, rotations[0] if rotations else None


def comparable(theirs: object, ours: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Theirs and ours, if they are tensors of one shape."""
    if isinstance(theirs, Tensor) and ours is not None and theirs.shape == ours.shape:
        return theirs, ours
    return None


def like(theirs: Tensor, ours: Tensor) -> Tensor:
    """Keys or values with as many heads as ours, each repeated for those that would share it."""
    n_theirs, n_ours = theirs.shape[2], ours.shape[2]
    return theirs.repeat_interleave(max(1, n_ours // n_theirs), 2)[:, :, :n_ours]
