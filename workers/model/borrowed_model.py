"""A `Model` of modules that somebody else has loaded, and goes on using.

Nothing of theirs is changed. A model of transformers is copied without its hooks, and the copy
shares the tensors: it costs no memory, and it sees every step of an optimizer. A
`TransformerBridge` is run as it is, because it shows activations without being changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from schemas.errors import ModelError
from schemas.places import reason
from workers.model.loading import bridgeable, model_of, modules_of_bridge
from workers.model.model import Model
from workers.model.model_info import ModelInfo, shape_of

DEVICES = ("cpu", "cuda")
"""Kinds of devices that are measured on."""

SHARED_FORMATS = (torch.float32, torch.float64)
"""Formats of weights that are shared. Weights in narrower ones are copied as float32."""

WRAPPERS = ("_orig_mod", "module")
"""Where `torch.compile` and data parallelism keep the model that they wrap."""

PATCHES = ("forward", "_original_forward", "_old_forward")
"""Attributes by which libraries replace the `forward` of one module, for example to cast it."""

BRIDGE_SHAPE = ("n_layers", "n_heads", "d_model", "d_head", "n_ctx", "d_vocab")
"""Fields of a bridge's config that say the model's shape."""

Layout = tuple[tuple[str, int, torch.dtype, torch.Size], ...]
"""Where each tensor of some modules lies. As long as it is the same, what shares them is right."""


@dataclass
class BorrowedModel:
    """A `Model` that reads somebody else's weights."""

    model: Model
    device: str
    """Kind of the device: cpu or cuda."""
    is_bridge: bool
    """Whether it was a `TransformerBridge`, which only the dense engine runs."""
    layout: Layout
    places: frozenset[int]
    """Where in memory their weights lie."""

    @property
    def is_shared(self) -> bool:
        """Whether all weights are theirs, so that it sees what becomes of them.

        Weights in narrow formats were copied. Bridges of some architectures split weights into
        copies, so the answer may change when the bridge is booted.
        """
        return _places(self.model.all_weights()) <= self.places

    def fits(self, modules: nn.Module) -> bool:
        """Whether it still has the weights of the modules, whatever these are now."""
        return self.is_shared and self.layout == _layout(modules)

    @contextmanager
    def reading(self, modules: nn.Module) -> Iterator[Model]:
        """Within it, the model has the weights of now, and evaluates instead of training."""
        # What was kept is of the weights of an earlier step.
        vars(self.model).pop("circuit", None)
        is_training = {part: part.training for part in modules.modules()} if self.is_bridge else {}
        device = self.model.device
        try:
            if self.is_bridge:
                modules.eval()
            # Training code may cast all products around this call.
            with torch.autocast(self.device, enabled=False), _current(device):
                yield self.model
        finally:
            for part, training in is_training.items():
                part.training = training


def unwrapped(model: object) -> nn.Module:
    """The model inside what wraps it; refused if it is no model."""
    inner = model
    while (name := next((name for name in WRAPPERS if _has_module(inner, name)), None)) is not None:
        inner = getattr(inner, name)
    if not isinstance(inner, nn.Module) or getattr(inner, "config", None) is None:
        if isinstance(inner, nn.Module) and _is_bridge(inner):
            return inner
        raise ModelError(
            "model: expected a loaded causal language model of transformers or a "
            f"TransformerBridge, got {type(model).__name__}"
        )
    return inner


def borrow(modules: nn.Module) -> BorrowedModel:
    """A `Model` that shares the weights of a model of transformers or of a bridge."""
    device = _one_device(modules)
    # Libraries draw first weights for modules that they wrap, from the generators of the user.
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), _current(device):
        is_bridge = _is_bridge(modules)
        model = _of_bridge(modules) if is_bridge else _of_transformers(modules, device)
    places = _places(modules.parameters())
    return BorrowedModel(model, device.type, is_bridge, _layout(modules), places)


# A model of transformers


def _of_transformers(modules: nn.Module, device: torch.device) -> Model:
    config: Any = modules.config
    name = type(modules).__name__
    try:
        shape = shape_of(config, f"config of {name}")
    except AttributeError:
        raise ModelError(
            f"model: expected a config of transformers, {name} has a {type(config).__name__}"
        ) from None
    info = ModelInfo(config.name_or_path or name, name, "huggingface", "", **shape)
    formats = {weight.dtype for weight in modules.parameters()}
    dtype = torch.float64 if formats == {torch.float64} else torch.float32
    own = _copy(modules, dtype)
    # The bridge shows the scores and the pattern only of this attention.
    own.set_attn_implementation("eager")  # pyright: ignore[reportCallIssue]
    return model_of(info, bridgeable(info, own, str(device), dtype), "raw")


def _copy(modules: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of modules without hooks. It shares their tensors, but for those in narrow formats."""
    # What `deepcopy` finds here it takes for copied.
    copies: dict[int, object] = {}
    for tensor in chain(modules.parameters(), modules.buffers()):
        own = tensor.detach()
        if own.is_floating_point() and own.dtype not in SHARED_FORMATS:
            own = own.to(dtype)
        is_parameter = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(own, requires_grad=False) if is_parameter else own
    for part in modules.modules():
        for name, value in vars(part).items():
            if name in PATCHES:
                copies[id(value)] = _NOTHING
            elif isinstance(value, dict) and name.strip("_").endswith("hooks"):
                copies[id(value)] = type(value)()
    try:
        own_modules = copy.deepcopy(modules, copies)
    except Exception as error:
        raise ModelError(
            f"{type(modules).__name__}: its modules cannot be copied ({reason(error)}); measure "
            "the model before anything wraps it"
        ) from None
    for part in own_modules.modules():
        for name in PATCHES:
            vars(part).pop(name, None)
    return own_modules


_NOTHING = object()
"""Stands for what is not copied."""


# A bridge


def _of_bridge(bridge: Any) -> Model:  # noqa: ANN401 - TransformerBridge is imported late
    formats = {weight.dtype for weight in bridge.parameters()}
    if not formats <= {*SHARED_FORMATS}:
        names = ", ".join(sorted(str(each).removeprefix("torch.") for each in formats))
        raise ModelError(
            f"model: expected a TransformerBridge in float32 or float64, got {names}; pass the "
            "model of transformers, whose weights are copied, or bridge.float()"
        )
    shape: dict[str, Any] = {name: int(getattr(bridge.cfg, name)) for name in BRIDGE_SHAPE}
    name = str(bridge.cfg.model_name)
    info = ModelInfo(name, name, "bridge", "", **shape, bos_token_id=None, eos_token_id=None)
    is_training = {part: part.training for part in bridge.modules()}
    bridge.eval()
    try:
        return model_of(info, modules_of_bridge(bridge), "raw")
    finally:
        for part, training in is_training.items():
            part.training = training


# Either


def _is_bridge(modules: nn.Module) -> bool:
    # By its name, so that a model of transformers does not wait for TransformerLens here.
    return any(kind.__name__ == "TransformerBridge" for kind in type(modules).__mro__)


def _has_module(wrapper: object, name: str) -> bool:
    """Whether an object is no model itself and has one under this name."""
    is_wrapper = isinstance(wrapper, nn.Module) and (
        name == "_orig_mod" or getattr(wrapper, "config", None) is None
    )
    return is_wrapper and isinstance(getattr(wrapper, name, None), nn.Module)


def _layout(modules: nn.Module) -> Layout:
    named_tensors = chain(modules.named_parameters(), modules.named_buffers())
    return tuple(
        (name, tensor.data_ptr(), tensor.dtype, tensor.shape) for name, tensor in named_tensors
    )


def _places(weights: Iterable[Tensor]) -> frozenset[int]:
    """Where in memory weights lie. A view lies where its tensor does."""
    return frozenset(weight.untyped_storage().data_ptr() for weight in weights)


def _one_device(modules: nn.Module) -> torch.device:
    """The device of all weights; refused if there are several, or one that we do not know."""
    devices = {weight.device for weight in modules.parameters()}
    names = ", ".join(sorted(map(str, devices))) or "no weights"
    if len(devices) != 1 or next(iter(devices)).type not in DEVICES:
        raise ModelError(f"model: expected all weights on one CPU or one CUDA device, got {names}")
    return devices.pop()


def _current(device: torch.device) -> torch.cuda.device:
    """Within it, "cuda" means this device; nothing changes for a CPU."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
