"""A `Model` of modules that somebody else has loaded, and goes on using.

Nothing of theirs is changed. A model of transformers is copied without its hooks, and the copy
shares the tensors: it costs no memory, and it sees every step of an optimizer. A
`TransformerBridge` is run as it is, because it shows activations without being changed.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from headcount.schemas.errors import ModelError
from headcount.schemas.reasons import reason
from headcount.workers.bridge.booting import compared, modules_of_bridge
from headcount.workers.loading import bridgeable, model_of
from headcount.workers.model.adapters import adapters_of, merge_adapters
from headcount.workers.model.attention_check import CHECK_TOKENS, drawn_tokens
from headcount.workers.model.info.description import shape_of
from headcount.workers.model.model import Model
from headcount.workers.model.model_info import SHAPE, ModelInfo, text_config

DEVICES = ("cpu", "cuda")  # kinds of devices that are measured on

SHARED_FORMATS = (torch.float32, torch.float64)
"""Formats of weights that are shared. Weights in narrower ones are copied as float32."""

WRAPPERS = ("_orig_mod", "module")  # where compilers and data parallelism keep a model

PATCHES = ("forward", "_original_forward", "_old_forward")
"""Attributes by which libraries replace the `forward` of one module, for example to cast it."""

Layout = tuple[tuple[Any, ...], ...]
"""Where each tensor of some modules lies, and the numbers that they are set to, such as a scale. As
long as it is the same, what was copied of them is right.
"""


@dataclass
class BorrowedModel:
    """A `Model` that reads somebody else's weights."""

    model: Model
    device: str  # kind of the device: cpu or cuda
    is_bridge: bool  # whether it was a `TransformerBridge`, which only the dense engine runs
    layout: Layout

    def fits(self, modules: nn.Module) -> bool:
        """Whether it has the weights of the modules, whatever these are now.

        Weights in narrow formats were copied, and bridges of some architectures split weights into
        copies when they are booted. Adapters are switched without a change of any tensor.
        """
        is_shared = _addresses(self.model.all_weights()) <= _addresses(modules.parameters())
        return is_shared and self.layout == _layout(modules) and not adapters_of(modules)

    def leads_to(self, modules: nn.Module) -> bool:
        """Whether it may hold the modules themselves, which would then live as long as it does."""
        return self.is_bridge or any(
            isinstance(value, FunctionType) and value.__closure__ is not None
            for part in modules.modules()
            for value in vars(part).values()
        )

    @contextmanager
    def reading(self, modules: nn.Module) -> Iterator[Model]:
        """Within it, the model has the weights of now, and evaluates instead of training."""
        # What was kept is of the weights of an earlier step.
        vars(self.model).pop("circuit", None)
        with (
            # A copy evaluates as it is.
            evaluating(modules) if self.is_bridge else nullcontext(),
            # Training code may cast all products around this call.
            torch.autocast(self.device, enabled=False),
            _current(self.model.device),
        ):
            yield self.model


def unwrapped(model: object) -> nn.Module:
    """The model inside what wraps it; refused if it is no model."""
    inner = model
    while isinstance(inner, nn.Module):
        # What has a config of its own is a model, which only a compiler can have inside.
        names = WRAPPERS if getattr(inner, "config", None) is None else WRAPPERS[:1]
        wrapped = [getattr(inner, name, None) for name in names]
        if (module := next((w for w in wrapped if isinstance(w, nn.Module)), None)) is None:
            break
        inner = module
    # An adapted model, as the library PEFT makes it. It is told by its methods, so that nothing
    # imports PEFT here.
    if isinstance(inner, nn.Module) and hasattr(inner, "get_base_model"):
        adapted: Any = inner
        method = getattr(adapted, "active_peft_config", None)
        if getattr(method, "is_prompt_learning", False):
            raise ModelError(
                f"model: {type(method).__name__} puts learned vectors before every sequence, which "
                "cannot be measured; pass model.get_base_model() to measure the model without them"
            )
        inner = adapted.get_base_model()
    has_config = getattr(inner, "config", None) is not None
    if isinstance(inner, nn.Module) and (has_config or _is_bridge(inner)):
        return inner
    raise ModelError(
        "model: expected a loaded causal language model of transformers or a "
        f"TransformerBridge, got {type(model).__name__}"
    )


def borrow(modules: nn.Module) -> BorrowedModel:
    """A `Model` that shares the weights of a model of transformers or of a bridge."""
    weight_devices = {weight.device for weight in modules.parameters()}
    # Buffers may lie elsewhere, but they must have values.
    weight_devices |= {buffer.device for buffer in modules.buffers() if buffer.is_meta}
    if len(weight_devices) != 1 or next(iter(weight_devices)).type not in DEVICES:
        names = ", ".join(sorted(map(str, weight_devices))) or "no weights"
        raise ModelError(f"model: expected all weights on one CPU or one CUDA device, got {names}")
    device = weight_devices.pop()
    # Libraries draw first weights for modules that they wrap, from the generators of the user.
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), _current(device):
        is_bridge = _is_bridge(modules)
        model = _of_bridge(modules) if is_bridge else _of_transformers(modules, device)
    return BorrowedModel(model, device.type, is_bridge, _layout(modules))


# A model of transformers


def _of_transformers(modules: nn.Module, device: torch.device) -> Model:
    config: Any = modules.config
    name = type(modules).__name__
    try:
        shape = shape_of(text_config(config), f"config of {name}")
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
    own.eval()
    tokens = drawn_tokens(info, 1, CHECK_TOKENS).to(device)
    merge_adapters(own, tokens)
    loaded = bridgeable(info, own, str(device), dtype)
    return model_of(info, loaded._replace(boot=partial(compared, loaded, tokens)), "raw")


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
    nothing = object()  # Stands for what is not copied.
    for part in modules.modules():
        for name, value in vars(part).items():
            if name in PATCHES:
                copies[id(value)] = nothing
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


# A bridge


def _of_bridge(bridge: Any) -> Model:  # noqa: ANN401 - TransformerBridge is imported late
    formats = {weight.dtype for weight in bridge.parameters()}
    if not formats <= {*SHARED_FORMATS}:
        names = ", ".join(sorted(str(each).removeprefix("torch.") for each in formats))
        raise ModelError(
            f"model: expected a TransformerBridge in float32 or float64, got {names}; pass the "
            "model of transformers, whose weights are copied, or bridge.float()"
        )
    shape: dict[str, Any] = {name: int(getattr(bridge.cfg, name)) for name in SHAPE}
    name = str(bridge.cfg.model_name)
    info = ModelInfo(name, name, "bridge", "", **shape, bos_token_id=None, eos_token_id=None)
    with evaluating(bridge):
        return model_of(info, modules_of_bridge(name, bridge), "raw")


@contextmanager
def evaluating(modules: nn.Module) -> Iterator[None]:
    """Within it, modules evaluate. Each is left in its mode."""
    is_training = {part: part.training for part in modules.modules()}
    modules.eval()
    try:
        yield
    finally:
        for part, training in is_training.items():
            part.training = training


# Either


def _is_bridge(modules: nn.Module) -> bool:
    # By its name, so that a model of transformers does not wait for TransformerLens here.
    return any(kind.__name__ == "TransformerBridge" for kind in type(modules).__mro__)


def _layout(modules: nn.Module) -> Layout:
    named_tensors = chain(modules.named_parameters(), modules.named_buffers())
    tensors = [
        (name, tensor.data_ptr(), tensor.dtype, tensor.shape) for name, tensor in named_tensors
    ]
    # A training changes the mode of modules all the time, and it is not copied.
    numbers = [
        (place, name, value)
        for place, part in modules.named_modules()
        for name, value in vars(part).items()
        if type(value) in (int, float, bool) and name != "training"
    ]
    return (*tensors, *numbers)


def _addresses(weights: Iterable[Tensor]) -> set[int]:
    """Where in memory weights lie. A view lies where its tensor does."""
    return {weight.untyped_storage().data_ptr() for weight in weights}


def _current(device: torch.device) -> torch.cuda.device:
    """Within it, "cuda" means this device; nothing changes for a CPU."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
