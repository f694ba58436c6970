"""A model whose weights are loaded: what the rest of the house may know of it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from headcount.schemas.errors import ModelError
from headcount.schemas.registry import in_words
from headcount.schemas.values import shortened
from headcount.workers.model.attention_check import (
    active_stream,
    settle_attention,
)
from headcount.workers.model.attention_facts import Attend, AttentionFacts, AttentionSizes
from headcount.workers.model.attention_layers import attending
from headcount.workers.model.bare_modules import (
    ATTENTION,
    POSITIONS,
    child_of,
    foreign_module,
    projection,
)
from headcount.workers.model.circuit import Circuit, effective_positions
from headcount.workers.model.model_info import ModelInfo, text_config
from headcount.workers.model.rotations import Rotation

LARGEST_WEIGHT = 1e6  # no model that was trained has a weight as large as this

MODULE_OUTPUTS = ("pos_embed", "attn_out", "mlp_out")
"""Activations that are seen as the outputs of modules, which may be unknown."""


def at_least_float32(tensor: Tensor) -> Tensor:
    """A tensor in float32, or in float64 if it is that already: measuring uses no narrower one."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@dataclass(frozen=True)
class ChangeableWeight:
    """A weight that can be changed in place."""

    layer: int | None
    tensor: Tensor  # writing to it changes the model
    parameter: str | None  # that holds it in the bare modules; None if a copy of the bridge
    read: Callable[[], Tensor]  # returns the weight as the model reads it now


class Bridge(Protocol):
    """What a model asks of its bridge, which is booted when it is first asked (`workers.bridge`).

    TransformerLens does not bridge every architecture: then there is none, and `problem` says why.
    """

    problem: str | None  # why there is no bridge, or why it cannot run the model
    modules: dict[str, list[nn.Module]]  # bare modules by the activation they put out

    @property
    def has_weights(self) -> bool:
        """Whether it names the model's weights."""
        ...

    def weight(self, name: str) -> Tensor | None:
        """A weight that belongs to no layer, such as `W_U`; None if it is not shown."""

    def layer_weight(self, layer: int, name: str) -> Tensor | None:
        """A weight of a layer's attention; None if it is not shown."""

    def parameters(self) -> Iterator[Tensor]:
        """Every weight that it reads."""
        ...

    def has(self, activation: str) -> bool:
        """Whether the model has `pos_embed`, `attn_out` or `mlp_out`."""
        ...

    def first_mlp_out(self, tokens: Tensor) -> Tensor:
        """What the first MLP adds at position 0: `[batch d_model]`."""
        ...

    def settle(self, model: Model) -> None:
        """Hold what it shows of each layer in a run against the facts of the bare modules."""

    def shown_facts(self, layer: int) -> AttentionFacts:
        """How a layer makes its pattern of the q and k that are shown; refused if not."""
        ...


class LoadedModules(NamedTuple):
    """The bare modules, those of them that are the layers, and how their bridge is booted."""

    bare: nn.Module
    blocks: list[nn.Module]
    known: dict[str, list[nn.Module]]  # `Bridge.modules`, as far as known without the bridge
    boot: Callable[[], Bridge]
    has_booted: bool = False  # whether the bridge is there already
    unused: tuple[str, ...] = ()  # tensors in the files that have no place in the modules


class Model:
    """One set of weights, seen in two ways.

    The bare modules are those of the model's own library, and are measured. The bridge shows
    activations through TransformerLens's hooks, and names weights. Both share most tensors.

    To import TransformerLens and to boot a bridge takes seconds, and the bare modules measure
    without it. So the bridge is booted when something first asks for it.
    """

    def __init__(self, info: ModelInfo, loaded: LoadedModules) -> None:
        self.info = info
        self.bare = loaded.bare
        self.blocks = loaded.blocks
        self.unused_weights = loaded.unused
        self._known = loaded.known
        self._boot = loaded.boot
        self._bridge: Bridge | None = None
        self._active_stream = active_stream(loaded.bare)
        self._attention = settle_attention(info, loaded.bare, loaded.blocks)
        # Only the bridge measures a model with a problem.
        if self._attention.problem is not None and self.bridge().problem is not None:
            problem = self.bridge().problem
            raise ModelError(f"{info.name}: {self._attention.problem}; {problem}")

    # The bridge

    def bridge(self) -> Bridge:
        """Its bridge, which is booted and checked now if it is not there: that takes seconds."""
        if self._bridge is not None:
            return self._bridge
        devices = [self.device] if self.device.type == "cuda" else []
        logger = logging.getLogger("transformers")
        level = logger.level
        # Libraries draw random weights for modules that they wrap, and must not move the generators
        # of the process. TransformerLens silences some warnings for good. If the bridge is first
        # wanted in inference mode, tensors that are made there could never have gradients.
        with (
            torch.random.fork_rng(devices),
            torch.inference_mode(False),
            warnings.catch_warnings(),
        ):
            try:
                self._bridge = self._boot()
                if self._bridge.problem is None:
                    self._bridge.settle(self)
            except Exception as error:
                if self._bridge is None:
                    raise
                # Not fatal: the model may still run on its bare modules.
                in_format = " in float64" if self.dtype == torch.float64 else ""
                why = shortened(in_words(error))
                self._bridge.problem = f"TransformerLens cannot run this model{in_format} ({why})"
            finally:
                logger.setLevel(level)
        return self._bridge

    @property
    def has_booted(self) -> bool:
        """Whether something has asked for the bridge."""
        return self._bridge is not None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.bare.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the weights."""
        return next(self.bare.parameters()).dtype

    @property
    def precision(self) -> str:
        """The precision of products in the format of the weights, float32 at least."""
        return "float64" if self.dtype == torch.float64 else "float32"

    # Positions

    @cached_property
    def rotary(self) -> bool:
        """Whether q and k are rotated by their positions before they are multiplied."""
        # The check of the attention saw rotations, or there is a module that makes angles.
        if any(facts.rotation for facts in self._attention.facts.values()):
            return True
        names = {name.rpartition(".")[2] for name, _ in self.bare.named_modules()}
        return names.isdisjoint(POSITIONS) and self.has("rotary_positions")

    def positions(self) -> Tensor | None:
        """`W_pos [pos d_model]` as it is now; None if no embeddings of positions are added."""
        self._check_readable("its embeddings of positions", self.modules("pos_embed"))
        return self.bridge().weight("W_pos")

    def effective_positions(self, n_ctx: int | None = None) -> Tensor | None:
        """`EPE [pos d_model]` of the weights as they are now; None if it is not known."""
        positions = self.positions()
        if positions is None or not self.knows_first_mlp():
            return None
        return effective_positions(positions[:n_ctx], self.modules("first_mlp"))

    def knows_first_mlp(self) -> bool:
        """Whether its first MLP can be asked by itself, or it has none."""
        return bool(self.modules("first_mlp")) or not self.has("mlp_out")

    def first_mlp_out(self, tokens: Tensor) -> Tensor | None:
        """What the first MLP adds at position 0: `[batch d_model]`; None if not known."""
        if not self.modules("first_mlp") or self.bridge().problem is not None:
            return None
        return self.bridge().first_mlp_out(tokens)

    @cached_property
    def circuit(self) -> Circuit:
        """What the weights say of positions; it is kept, so no weight may be changed now."""
        positions, effective = self.positions(), self.effective_positions()
        if positions is not None and effective is not None:
            return Circuit(positions.detach().clone(), effective.detach().clone())
        problem = "no position embeddings are added in this model; choose another intervention"
        if positions is not None:
            problem = (
                "its first MLP is folded, or no module of a known name, so its effective positions "
                "are not known; choose another intervention, or weight_processing = 'raw'"
            )
        raise ModelError(f"{self.info.name}: {problem}")

    # Attention

    def scale(self, layer: int) -> float:
        """What q·k is multiplied by to make the scores of a layer."""
        return self.bridge().shown_facts(layer).scale

    def changes_z(self, layer: int) -> bool:
        """Whether a layer changes z before its output projection, for example by a gate."""
        return layer in self._attention.gated

    def facts(self, layer: int) -> AttentionFacts | None:
        """How a layer turns q·k into a pattern; None if it does not attend, or it is not known."""
        return self._attention.facts.get(layer)

    def sizes(self, layer: int) -> AttentionSizes | None:
        """The sizes of a layer's q, k and v; None where `facts` is None."""
        return self._attention.sizes.get(layer)

    @property
    def attention_problem(self) -> str | None:
        """Why the fused engine cannot compute this model's attention; None if it can."""
        return self._attention.problem

    def can_undo_rotation(self, layer: int) -> bool:
        """Whether queries of a layer can be rotated back, as was checked when it was loaded."""
        rotation = self._rotation(layer)
        if rotation is not None:
            return rotation.rotate is not None
        # In a rotary model a layer may rotate nothing. If none is seen to rotate, nobody noted it.
        return not self.rotary or any(self._rotation(other) for other in self._attention.facts)

    def _rotation(self, layer: int) -> Rotation | None:
        facts = self.facts(layer)
        return None if facts is None else facts.rotation

    # Weights

    def layer_weight(self, layer: int, name: str) -> Tensor | None:
        """A weight of a layer as it is now; None if the layer does not have it.

        `name` is `W_Q`, `W_K`, `W_V [head d_model d_head]`, `W_O [head d_head d_model]`, `b_Q`, ….
        Keys and values may have fewer heads than queries. `W_O` is not known where a layer changes
        z before it, because z `W_O` is then not what the head writes.
        """
        if name == "W_O" and self.changes_z(layer):
            return None
        block = self.blocks[layer]
        self._check_readable(f"{name} of layer {layer}", [child_of(block, ATTENTION) or block])
        bridge = self.bridge()
        if not bridge.has_weights:
            return projection(block, name, self.info)
        return bridge.layer_weight(layer, name)

    def _check_readable(self, what: str, modules: Sequence[nn.Module]) -> None:
        for module in modules:
            foreign = foreign_module(module)
            if foreign is not None:
                raise ModelError(
                    f"{self.info.name}: {what} cannot be read, because {foreign} is no plain layer "
                    "of PyTorch or transformers and may compute with other weights; leave out what "
                    "reads weights, or put plain layers with the weights in use into the model"
                )

    def embedding(self) -> Tensor | None:
        """`W_E [d_vocab d_model]`; None if the bridge does not show it."""
        self._check_readable("W_E", self.modules("embed"))
        if not self.bridge().has_weights:
            return tensor_or_none(self.modules("embed")[0], "weight")
        return self.bridge().weight("W_E")

    def unembedding(self) -> Tensor | None:
        """`W_U [d_model d_vocab]`; None if the bridge does not show it."""
        self._check_readable("W_U", self.modules("unembed"))
        return self.bridge().weight("W_U")

    def changeable_weight(self, name: str, layer: int | None = None) -> ChangeableWeight | None:
        """A weight of a layer, or `W_pos` without `layer`; None if the model lacks it."""

        def read() -> Tensor | None:
            return self.positions() if layer is None else self.layer_weight(layer, name)

        tensor = read()
        if tensor is None or (layer is None and name != "W_pos"):
            return None
        # The bridge shows a view of a parameter in another shape. Both have the same storage.
        storage = tensor.untyped_storage().data_ptr()
        parameter = next(
            (
                name
                for name, parameter in self.bare.named_parameters()
                if parameter.untyped_storage().data_ptr() == storage
            ),
            None,
        )
        return ChangeableWeight(layer, tensor, parameter, cast(Callable[[], Tensor], read))

    def all_weights(self) -> Iterator[Tensor]:
        """Every weight that it reads: of the bare modules, and of the bridge if it is booted."""
        yield from self.bare.parameters()
        if self._bridge is not None:
            yield from self._bridge.parameters()

    @property
    def weight_problem(self) -> str | None:
        """Which weight, as it is now, explains activations that are NaN; None if none does."""
        sizes: list[tuple[float, str]] = []
        for name, weight in self.bare.named_parameters():
            if not weight.isfinite().all():
                return f"{name} holds numbers that are NaN or infinite"
            sizes.append((weight.abs().max().item(), name))
        largest, name_of_largest = max(sizes)
        is_large = largest > LARGEST_WEIGHT
        return f"{name_of_largest} holds {largest:.3g}, which overflows" if is_large else None

    # Logits

    def logits(self, stream: Tensor) -> Tensor:
        """Logits `[… d_vocab]` of a part of the stream after the last norm, `[… d_model]`."""
        return self.changed_logits(self.unembed(stream))[0]

    def unembed(self, stream: Tensor) -> Tensor:
        """What the unembedding makes of the stream, before a factor and a cap change it."""
        return self.modules("unembed")[0](stream)

    def changed_logits(self, unembedded: Tensor) -> tuple[Tensor, Tensor | float]:
        """Logits, and their derivatives by what the unembedding puts out.

        logit = cap tanh(scale x / cap), or scale x without a cap
        """
        scaled = unembedded if self.logit_scale == 1 else unembedded * self.logit_scale
        cap = getattr(self._config, "final_logit_softcapping", None)
        if cap is None:
            return scaled, self.logit_scale
        tanh = (scaled / cap).tanh()
        return cap * tanh, self.logit_scale * (1 - tanh.square())

    @property
    def logit_scale(self) -> float:
        """What the model multiplies the unembedding's output by."""
        factor = getattr(self._config, "logit_scale", None)  # as Cohere has it
        divisor = getattr(self._config, "logits_scaling", None)  # as Granite has it
        return (1.0 if factor is None else factor) / (1.0 if divisor is None else divisor)

    @property
    def _config(self) -> object:
        config = getattr(self.bare, "config", None)
        return None if config is None else text_config(config)

    # Activations

    def has(self, activation: str) -> bool:
        """Whether the model has an activation, such as positions that are no rotations."""
        if activation in ("resid_pre", "resid_post") and self._active_stream is not None:
            return False  # There are several, and which of them a change means is not settled.
        if activation in ("rotary_positions", "key_input"):
            return bool(self.modules(activation))
        if activation not in MODULE_OUTPUTS:
            return True
        if not self.bridge().has_weights:
            # What is added to embeddings outside a module of its own is not known.
            return bool(self.modules(activation))
        return self.bridge().has(activation)

    def hides(self, activation: str) -> bool:
        """Whether the model has an activation that is not the output of any module.

        OPT's MLPs are not modules. The modules of a folded model have other weights.
        """
        is_output = activation in MODULE_OUTPUTS
        return is_output and self.has(activation) and not self.modules(activation)

    def modules(self, activation: str) -> list[nn.Module]:
        """The bare modules whose output is an activation: one for each layer, or one in all.

        The activation is `embed`, `pos_embed`, `normed` for what the attention reads, `attn_out`,
        `mlp_out`, `normed_final` for what the unembedding reads, or `unembed` for the logits.
        `rotary_positions` makes the angles of rotations, `key_input` is what makes keys alone, and
        `first_mlp` computes the first MLP, though the layer may run its parts. The list is empty if
        the model hides or lacks it.
        """
        known = self._known.get(activation)
        return self.bridge().modules[activation] if known is None else known

    def stream(self, activation: Tensor) -> Tensor:
        """The stream `[batch pos d_model]` in what a layer takes or hands on.

        Gemma 3n hands on several `[stream batch pos d_model]`, and attention reads one of them.
        """
        if activation.dim() == 3 or self._active_stream is None:
            return activation
        return activation[self._active_stream]

    # Running

    def run_bare(self, tokens: Tensor, attend: Attend, first: int = 0) -> None:
        """One forward pass of the bare modules, with `attend` as their attention. The tokens stand
        from position `first` on.
        """
        # Hugging Face would keep all keys and values for a next token, which is never asked for.
        options: dict[str, object] = {"use_cache": False} if self.info.is_of_transformers else {}
        if first:
            positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
            options["position_ids"] = positions[None]
        with attending(self.bare, attend):
            self.bare(tokens, **options)


def tensor_or_none(holder: object, name: str) -> Tensor | None:
    """An attribute, if it is a tensor."""
    value = getattr(holder, name, None)
    return value if isinstance(value, Tensor) else None
