"""A model whose weights are loaded: what the rest of the house may know of it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from headcount.schemas.errors import ModelError
from headcount.schemas.places import reason
from headcount.workers.model.attention_check import (
    SeenEnough,
    ShownAttention,
    active_stream,
    drawn_tokens,
    settle_attention,
    settle_shown_attention,
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
from headcount.workers.model.info.model_info import ModelInfo, text_config
from headcount.workers.model.rotations import Rotation

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

CHECK_TOKENS = 8  # of the bridge's check: fewer than any model looks back
LARGEST_WEIGHT = 1e6  # no model that was trained has a weight as large as this

MODULE_OUTPUTS = ("pos_embed", "attn_out", "mlp_out")
"""Activations that are seen as the outputs of modules, which may be unknown."""

OUTSIDE_ATTENTION = ("resid_pre", "resid_post", "attn_out", "mlp_out")
"""Activations of a layer that TransformerLens shows outside its attention."""

Hook = Callable[..., Tensor | None]
"""Sees an activation while the model runs, as `hook(value, hook=TransformerLens's hook point)`.
Returns what takes its place, or None.
"""


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


class BootedBridge(NamedTuple):
    """What TransformerLens makes of a model, and what it tells of the bare modules."""

    bridge: TransformerBridge | None
    modules: dict[str, list[nn.Module]]  # bare modules by the activation they put out
    problem: str | None = None  # why there is no bridge, or why it cannot run the model


class LoadedModules(NamedTuple):
    """The bare modules, those of them that are the layers, and how their bridge is booted."""

    bare: nn.Module
    blocks: list[nn.Module]
    known: dict[str, list[nn.Module]]  # `BootedBridge.modules`, as far as known without the bridge
    boot: Callable[[], BootedBridge]
    has_booted: bool = False  # whether the bridge is there already
    unused: tuple[str, ...] = ()  # tensors in the files that have no place in the modules


class Model:
    """One set of weights, seen in two ways.

    The bridge shows activations through TransformerLens's hooks. The bare modules are those of the
    model's own library, which run faster. Both share most tensors. Nobody outside this room touches
    the bridge. TransformerLens does not bridge every architecture, so there may be none.

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
        self._booted: BootedBridge | None = None
        self._shown: dict[int, ShownAttention] = {}
        self._rotations: dict[int, dict[int, Rotation]] = {}  # by length of sequences that asked
        self._active_stream = active_stream(loaded.bare)
        self._attention = settle_attention(info, loaded.bare, loaded.blocks)
        # Only the bridge measures a model with a problem.
        if self._attention.problem is not None and not self.has_bridge:
            raise ModelError(f"{info.name}: {self._attention.problem}; {self.bridge_problem}")

    # The bridge

    def boot_bridge(self) -> BootedBridge:
        """The bridge, which is booted and checked now if it is not there."""
        if self._booted is not None:
            return self._booted
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
                self._booted = self._boot()
                if self._booted.bridge is not None:
                    self._settle_shown_attention()
            except Exception as error:
                if self._booted is None:
                    raise
                # Not fatal: the model may still run on its bare modules.
                in_format = " in float64" if self.dtype == torch.float64 else ""
                problem = f"TransformerLens cannot run this model{in_format} ({reason(error)})"
                self._booted = self._booted._replace(problem=problem)
            finally:
                logger.setLevel(level)
        return self._booted

    @property
    def has_booted(self) -> bool:
        """Whether something has asked for the bridge."""
        return self._booted is not None

    @property
    def _optional_bridge(self) -> TransformerBridge | None:
        return self.boot_bridge().bridge

    @property
    def _bridge(self) -> TransformerBridge:
        bridge, _, problem = self.boot_bridge()
        if bridge is None or problem is not None:
            raise ModelError(f"{self.info.name}: {problem}")
        return bridge

    @property
    def has_bridge(self) -> bool:
        """Whether TransformerLens can show the model's activations."""
        return self.bridge_problem is None

    @property
    def bridge_problem(self) -> str | None:
        """Why TransformerLens cannot show the model's activations; None if it can."""
        return self.boot_bridge().problem

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.bare.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the weights."""
        return next(self.bare.parameters()).dtype

    # Positions

    @cached_property
    def rotary(self) -> bool:
        """Whether q and k are rotated by their positions before they are multiplied."""
        # The check of the attention saw rotations, or there is a module that makes angles.
        if any(facts.rotation for facts in self._attention.facts.values()):
            return True
        names = {name.rpartition(".")[2] for name, _ in self.bare.named_modules()}
        return names.isdisjoint(POSITIONS) and self.has("rotary_positions")

    @property
    def positions(self) -> Tensor | None:
        """`W_pos [pos d_model]` as it is now; None if no embeddings of positions are added."""
        self._check_readable("its embeddings of positions", self.modules("pos_embed"))
        return _tensor_or_none(self._optional_bridge, "W_pos")

    def effective_positions(self, n_ctx: int | None = None) -> Tensor | None:
        """`EPE [pos d_model]` of the weights as they are now; None if it is not known."""
        positions = self.positions
        if positions is None or not self.knows_first_mlp:
            return None
        return effective_positions(positions[:n_ctx], self.modules("first_mlp"))

    @property
    def knows_first_mlp(self) -> bool:
        """Whether its first MLP can be asked by itself, or it has none."""
        return bool(self.modules("first_mlp")) or not self.has("mlp_out")

    def first_mlp_out(self, tokens: Tensor) -> Tensor | None:
        """What the first MLP adds at position 0: `[batch d_model]`; None if not known."""
        if not self.modules("first_mlp") or not self.has_bridge:
            return None
        outputs: list[Tensor] = []

        def keep_output(value: Tensor, hook: object) -> None:
            outputs.append(value[:, 0])
            raise SeenEnough

        # Later tokens change nothing at position 0.
        with suppress(SeenEnough):
            self.run_with_hooks(tokens[:, :1], [(self.hook_name("mlp_out", 0), keep_output)])
        return outputs[0]

    @cached_property
    def circuit(self) -> Circuit:
        """What the weights say of positions; it is kept, so no weight may be changed now."""
        positions, effective = self.positions, self.effective_positions()
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
        """What q·k is multiplied by to make the scores of a layer that the bridge shows."""
        return self.shown_facts(layer).scale

    def shown_facts(self, layer: int) -> AttentionFacts:
        """How a layer makes its pattern of the q and k that are shown; refused if not."""
        problem = self.bridge_problem or self._shown[layer].problem
        if problem is not None:
            raise ModelError(f"{self.info.name}: {problem}")
        return self._shown[layer].facts

    def shows_scores(self, layer: int) -> bool:
        """Whether the bridge's `attn_scores` are the scores behind a layer's pattern."""
        return self._shown[layer].shows_scores

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

    def rotated(self, layer: int, vectors: Tensor, positions: Tensor | None = None) -> Tensor:
        """Queries or keys `[batch pos head d_head]` as a layer rotates them, if it is known; by
        `positions [pos]`, if a change gives the tokens others than their own.
        """
        rotation = self._rotation(layer)
        is_known = rotation is not None and rotation.rotate is not None
        if not is_known or self.attention_problem is not None:
            return vectors
        n_ctx = vectors.shape[1]
        if n_ctx not in self._rotations:
            layers = self.info.attention_layers_or_all
            of_layers: list[Rotation | None] = []

            def attend(q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
                of_layers.append(facts.rotation)
                if len(of_layers) == len(layers):
                    raise SeenEnough
                # Angles depend on positions alone, so the attention may be anything.
                return v.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])

            with torch.inference_mode(), suppress(SeenEnough):
                self.run_bare(torch.zeros(1, n_ctx, dtype=torch.long, device=self.device), attend)
            noted = zip(layers, of_layers, strict=True)
            self._rotations[n_ctx] = {
                layer: rotation for layer, rotation in noted if rotation is not None
            }
        rotation = self._rotations[n_ctx][layer]
        return (rotation if positions is None else rotation.at(positions)).apply(vectors)

    def _rotation(self, layer: int) -> Rotation | None:
        facts = self.facts(layer)
        return None if facts is None else facts.rotation

    def _settle_shown_attention(self) -> None:
        """Hold what the bridge shows of each layer in a run against the facts."""
        shown: dict[int, dict[str, Tensor]] = {
            layer: {} for layer in self.info.attention_layers_or_all
        }

        def record(activations: dict[str, Tensor], name: str, value: Tensor, hook: object) -> None:
            activations[name] = value.detach().clone()

        def end_pass(value: Tensor, hook: object) -> None:
            raise SeenEnough

        hooks: list[tuple[str, Hook]] = [
            (place, partial(record, activations, name))
            for layer, activations in shown.items()
            for name in ("q", "k", "rot_q", "rot_k", "attn_scores", "pattern")
            if self.has_hook(place := self.hook_name(name, layer))
        ]
        # The unembedding is not run: its weights may be a large part of a mapped file.
        hooks.append((self.hook_name("resid_post", len(self.blocks) - 1), end_pass))
        tokens = drawn_tokens(self.info, 2, CHECK_TOKENS).to(self.device)
        with torch.inference_mode(), suppress(SeenEnough):
            self.run_with_hooks(tokens, hooks)
        for layer, activations in shown.items():
            attention = getattr(self._bridge.blocks[layer], "attn", None)
            self._shown[layer] = settle_shown_attention(
                layer,
                None if attention is None else attention.original_component,
                self.facts(layer) if self.attention_problem is None else None,
                partial(self.rotated, layer),
                activations,
            )

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
        if self._optional_bridge is None:
            return projection(block, name, self.info)
        from transformer_lens.model_bridge.generalized_components.attention import (
            PerLayerGeometryError,
        )

        try:
            return _tensor_or_none(getattr(self._optional_bridge.blocks[layer], "attn", None), name)
        except (NotImplementedError, PerLayerGeometryError):
            # Latent attention has no such matrix. Heads of a layer may have a width of their own,
            # as in Gemma 4, and the bridge splits by that of the config.
            return None

    def _check_readable(self, what: str, modules: Sequence[nn.Module]) -> None:
        for module in modules:
            foreign = foreign_module(module)
            if foreign is not None:
                raise ModelError(
                    f"{self.info.name}: {what} cannot be read, because {foreign} is no plain layer "
                    "of PyTorch or transformers and may compute with other weights; leave out what "
                    "reads weights, or put plain layers with the weights in use into the model"
                )

    @property
    def embedding(self) -> Tensor | None:
        """`W_E [d_vocab d_model]`; None if the bridge does not show it."""
        self._check_readable("W_E", self.modules("embed"))
        if self._optional_bridge is None:
            return _tensor_or_none(self.modules("embed")[0], "weight")
        return _tensor_or_none(self._optional_bridge, "W_E")

    @property
    def unembedding(self) -> Tensor | None:
        """`W_U [d_model d_vocab]`; None if the bridge does not show it."""
        self._check_readable("W_U", self.modules("unembed"))
        return _tensor_or_none(self._optional_bridge, "W_U")

    def changeable_weight(self, name: str, layer: int | None = None) -> ChangeableWeight | None:
        """A weight of a layer, or `W_pos` without `layer`; None if the model lacks it."""

        def read() -> Tensor | None:
            return self.positions if layer is None else self.layer_weight(layer, name)

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
        if self._booted is not None and self._booted.bridge is not None:
            yield from self._booted.bridge.parameters()

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
        if self._optional_bridge is None:
            # What is added to embeddings outside a module of its own is not known.
            return bool(self.modules(activation))
        components = self._optional_bridge.adapter.component_mapping
        assert components is not None
        if activation == "pos_embed":
            return "pos_embed" in components
        # Every layer of a bridge has an `attn_out`.
        return activation == "attn_out" or "mlp" in components["blocks"].submodules

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
        return self.boot_bridge().modules[activation] if known is None else known

    def stream(self, activation: Tensor) -> Tensor:
        """The stream `[batch pos d_model]` in what a layer takes or hands on.

        Gemma 3n hands on several `[stream batch pos d_model]`, and attention reads one of them.
        """
        if activation.dim() == 3 or self._active_stream is None:
            return activation
        return activation[self._active_stream]

    # Running

    def run_bare(self, tokens: Tensor, attend: Attend) -> None:
        """One forward pass of the bare modules, with `attend` as their attention."""
        # Hugging Face would keep all keys and values for a next token, which is never asked for.
        options = {"use_cache": False} if self.info.layout == "huggingface" else {}
        with attending(self.bare, attend):
            self.bare(tokens, **options)

    def run_with_hooks(self, tokens: Tensor, hooks: Sequence[tuple[str, Hook]]) -> None:
        """A pass through the bridge; `UserWarning` if it cannot apply what a hook returns."""
        # TransformerLens only warns. The rows would be those of the unchanged model.
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*edit is discarded")
            self._bridge.run_with_hooks(tokens, return_type=None, fwd_hooks=list(hooks))

    @property
    def rotary_hooks(self) -> list[str]:
        """The hooks at which TransformerLens shows the angles of rotations, `[… pos angle]`."""
        names = () if self._optional_bridge is None else self._optional_bridge.hook_dict
        # Each layer shows the same angles again.
        return [
            name
            for name in names
            if name.endswith((".hook_cos", ".hook_sin")) and not name.startswith("blocks.")
        ]

    def has_hook(self, name: str) -> bool:
        """Whether TransformerLens has a hook of that name; a layer may not show its rotations."""
        return self._optional_bridge is not None and name in self._optional_bridge.hook_dict

    @staticmethod
    def hook_name(activation: str, layer: int | None = None) -> str:
        """The name of the hook at which TransformerLens shows an activation."""
        if layer is None:
            return "unembed.hook_in" if activation == "unembed_in" else f"hook_{activation}"
        if activation == "key_input":
            return f"blocks.{layer}.attn.k.hook_in"
        component = "" if activation in OUTSIDE_ATTENTION else "attn."
        return f"blocks.{layer}.{component}hook_{activation}"

    def forget_pattern(self, layer: int) -> None:
        """Free the memory of a layer's pattern, which the bridge would keep until the next pass."""
        self._bridge.blocks[layer].attn._pattern = None


def _tensor_or_none(holder: object, name: str) -> Tensor | None:
    value = getattr(holder, name, None)
    return value if isinstance(value, Tensor) else None


def bridge_of(model: Model) -> TransformerBridge:
    """The `TransformerBridge`, for tests and benchmarks that compare with TransformerLens."""
    return model._bridge
