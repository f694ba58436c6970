"""A model whose weights are loaded: what the rest of the house may know of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from schemas.errors import ModelError
from schemas.places import reason
from workers.model.attention_layers import Attend, attending, scale_of, score_problem, scores_from
from workers.model.circuit import Circuit, effective_positions
from workers.model.model_info import ModelInfo

CHECK_TOKENS = 8
"""Tokens of the sequences on which the scale is checked: fewer than any model looks back."""

LARGEST_WEIGHT = 1e6
"""No model that was trained has a weight as large as this."""

LOGIT_FIELDS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Fields of a config that change logits after the unembedding."""


def wide(x: Tensor) -> Tensor:
    """What is measured is float32 at least."""
    return x if x.dtype == torch.float64 else x.float()


class Hook(Protocol):
    """Takes an activation and the place where it hooks in; returns another activation, or None."""

    def __call__(self, value: Tensor, hook: object) -> Tensor | None: ...


@dataclass(frozen=True)
class LayerScale:
    """What a layer multiplies q·k by, as its module says and as its own attention confirms."""

    scale: float
    shown: bool
    """Whether the bridge shows the scores behind the layer's pattern."""
    problem: str | None
    """Why the scale does not make the layer's pattern, if it does not."""


@dataclass(frozen=True)
class EditableWeight:
    """A weight that can be edited in place."""

    layer: int | None
    tensor: Tensor
    """Writing to it edits the model."""
    parameter: str | None
    """The parameter of the bare modules that holds it; None if it is a copy, which the bridge alone
    reads.
    """
    read: Callable[[], Tensor]
    """The weight as the model reads it now."""


class Model:
    """One set of weights, seen in two ways: through TransformerLens's hooks, and as the bare modules
    of its library.

    Nobody outside this room touches the bridge.
    """

    def __init__(
        self,
        info: ModelInfo,
        bridge: Any,
        bare: nn.Module,
        blocks: Sequence[nn.Module],
        modules: dict[str, list[nn.Module]],
    ) -> None:
        """`modules` are those of the bare tree whose outputs are activations, one for each layer or
        one for all.
        """
        self.info, self.bare, self.blocks = info, bare, list(blocks)
        self._bridge, self._modules = bridge, modules
        self._layer_scales: list[LayerScale] = []

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
        """Whether q and k are turned by their positions before they are multiplied."""
        return self._bridge.cfg.positional_embedding_type == "rotary"

    @property
    def positions(self) -> Tensor | None:
        """`W_pos [pos d_model]` as it is now; None if no embeddings of positions are added."""
        positions = getattr(self._bridge, "W_pos", None)
        return positions if isinstance(positions, Tensor) else None

    def effective_positions(self, n_ctx: int | None = None) -> Tensor | None:
        """`EPE [pos d_model]` of the weights as they are now; None where they are not known."""
        positions = self.positions
        if positions is None or self.hides("mlp_out"):
            return None
        return effective_positions(positions[:n_ctx], self.modules("mlp_out"))

    @cached_property
    def circuit(self) -> Circuit:
        """What the weights say of positions; asked for while nothing is edited."""
        positions, effective = self.positions, self.effective_positions()
        if positions is None:
            raise ModelError(
                f"{self.info.name}: no position embeddings are added in this model; "
                "choose another intervention"
            )
        if effective is None:
            raise ModelError(
                f"{self.info.name}: its first MLP is no module of its own, or folded, so its "
                "effective positions are not known; choose another intervention, or "
                "weight_processing = 'raw'"
            )
        return Circuit(positions.detach().clone(), effective.detach().clone())

    # Scores

    def scale(self, layer: int) -> float:
        """What q·k is multiplied by to make the scores of a layer."""
        settled = self._layer_scales[layer]
        if settled.problem is not None:
            raise ModelError(
                f"{self.info.name}: the scores of layer {layer} could not be made as "
                f"{settled.scale:.4g} · q·k, as its attention module says: {settled.problem}"
            )
        return settled.scale

    def shows_scores(self, layer: int) -> bool:
        """Whether `attn_scores` are the scores behind a layer's pattern: some architectures do not
        hand them out.
        """
        return self._layer_scales[layer].shown

    def settle_scales(self) -> None:
        """Read every layer's scale off its attention module, and hold it against the layer's own
        unedited attention. `load_model` does it.
        """
        tokens = torch.randint(
            self.info.d_vocab,
            (2, min(self.info.n_ctx, CHECK_TOKENS)),
            generator=torch.Generator().manual_seed(0),
        ).to(self.device)
        shown: list[dict[str, Tensor]] = [{} for _ in self.blocks]
        hooks: list[tuple[str, Hook]] = []
        for layer, activations in enumerate(shown):
            for name in ("q", "k", "rot_q", "rot_k", "attn_scores", "pattern"):
                if self.has_hook(place := self.hook_name(name, layer)):
                    hooks.append((place, _noting(activations, name)))
        problem: str | None = None
        try:
            with torch.inference_mode():
                self.run_with_hooks(tokens, hooks)
        except Exception as error:  # The model may still run on its bare modules.
            problem = f"TransformerLens cannot run this model ({reason(error)})"
        self._layer_scales = [
            self._settle(layer, activations, problem) for layer, activations in enumerate(shown)
        ]

    def _settle(self, layer: int, seen: dict[str, Tensor], problem: str | None) -> LayerScale:
        attention = self._bridge.blocks[layer].attn.original_component
        scale = scale_of(attention, self.info.d_head)
        if problem is not None:
            return LayerScale(scale, False, problem)
        q, k = (seen.get(f"rot_{name}", seen.get(name)) for name in ("q", "k"))
        if q is None or k is None or q.dim() != 4 or k.dim() != 4 or "pattern" not in seen:
            return LayerScale(scale, False, "the bridge does not show q, k and pattern by head")
        k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        shows, problem = score_problem(
            scores_from(attention, q, k, scale),
            seen.get("attn_scores", seen["pattern"]),
            seen["pattern"],
            rotations_hidden=self.rotary and "rot_q" not in seen,
        )
        return LayerScale(scale, shows, problem)

    # Weights

    def layer_weight(self, layer: int, name: str) -> Tensor | None:
        """`W_Q`, `W_K`, `W_V [head d_model d_head]`, `W_O [head d_head d_model]` or `b_Q`, … of a
        layer as it is now; None if it has no such weight. Keys and values may have fewer heads.
        """
        weight = getattr(self._bridge.blocks[layer].attn, name, None)
        return weight if isinstance(weight, Tensor) else None

    def editable_weight(self, name: str, layer: int | None = None) -> EditableWeight | None:
        """A weight of a layer, or `W_pos` of none, to be edited; None if the model does not have it."""

        def read() -> Tensor | None:
            return self.positions if layer is None else self.layer_weight(layer, name)

        tensor = read()
        if tensor is None or (layer is None and name != "W_pos"):
            return None
        parameter = self._parameters.get(tensor.untyped_storage().data_ptr())

        def read_again() -> Tensor:
            weight = read()
            assert weight is not None  # It was there a moment ago.
            return weight

        return EditableWeight(layer, tensor, parameter, read_again)

    @cached_property
    def _parameters(self) -> dict[int, str]:
        """Names of the bare modules' parameters, by the place of their storage."""
        return {p.untyped_storage().data_ptr(): name for name, p in self.bare.named_parameters()}

    @property
    def weight_problem(self) -> str | None:
        """Which weight, as it is now, makes what is no number; none if that is not known."""
        largest = (0.0, "")
        for name, weight in self.bare.named_parameters():
            if not weight.isfinite().all():
                return f"{name} holds numbers that are NaN or infinite"
            largest = max(largest, (weight.abs().max().item(), name))
        size, name = largest
        return f"{name} holds {size:.3g}, which overflows" if size > LARGEST_WEIGHT else None

    @property
    def logit_field(self) -> str | None:
        """A field of the config that changes logits after the unembedding, if there is one."""
        config = getattr(self.bare, "config", None)
        changing = (f for f in LOGIT_FIELDS if getattr(config, f, None) not in (None, 1, 1.0))
        return next(changing, None)

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings of tokens `[batch pos]`, without positions: `[batch pos d_model]`."""
        return self.modules("embed")[0](tokens)

    def unembed(self, x: Tensor) -> Tensor:
        """Logits of a part of the stream after the last norm: `[… d_model]` to `[… d_vocab]`."""
        return self.modules("unembed")[0](x)

    # Activations

    def has(self, activation: str) -> bool:
        """Whether there is such an activation: positions may be rotations, and a layer may have no
        MLP.
        """
        mapping = self._bridge.adapter.component_mapping
        known = {
            "pos_embed": "pos_embed" in mapping,
            "mlp_out": "mlp" in mapping["blocks"].submodules,
        }
        return known.get(activation, True)

    def hides(self, activation: str) -> bool:
        """Whether there is such an activation and no module puts it out, as with OPT's MLPs and
        with folded ones.
        """
        return self.has(activation) and self._modules.get(activation) == []

    def modules(self, activation: str) -> list[nn.Module]:
        """The bare modules that put out `embed`, `pos_embed`, `attn_out` or `mlp_out`, or that
        unembed: one for each layer, or one for all; none where the model hides or lacks it.
        """
        return self._modules[activation]

    # Running

    def run_bare(self, tokens: Tensor, attend: Attend) -> None:
        """One forward pass of the bare modules, whose attention `attend` computes."""
        options = {"use_cache": False} if self.info.layout == "huggingface" else {}
        with attending(attend):
            self.bare(tokens, **options)

    def run_with_hooks(self, tokens: Tensor, hooks: Sequence[tuple[str, Hook]]) -> None:
        """One forward pass through TransformerLens's hooks.

        Raises `UserWarning` where the architecture gives it no way to apply what a hook returns.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*edit is discarded")
            self._bridge.run_with_hooks(tokens, return_type=None, fwd_hooks=list(hooks))

    def has_hook(self, name: str) -> bool:
        """Whether TransformerLens hooks in at a place; a layer may not show its rotations."""
        return name in self._bridge.hook_dict

    @staticmethod
    def hook_name(activation: str, layer: int | None = None) -> str:
        """The place where TransformerLens shows an activation."""
        if layer is None:
            return "unembed.hook_in" if activation == "unembed_in" else f"hook_{activation}"
        inside = "" if activation in OF_THE_BLOCK else "attn."
        return f"blocks.{layer}.{inside}hook_{activation}"

    def forget_pattern(self, layer: int) -> None:
        """Let go of a layer's pattern, which the bridge would keep until the next pass."""
        self._bridge.blocks[layer].attn._pattern = None


OF_THE_BLOCK = ("resid_pre", "resid_post", "attn_out", "mlp_out")
"""Activations of a layer that TransformerLens shows outside its attention."""


def bridge_of(model: Model) -> Any:
    """The `TransformerBridge` itself, for tests and benchmarks that compare with TransformerLens."""
    return model._bridge


def _noting(activations: dict[str, Tensor], name: str) -> Hook:
    def note(value: Tensor, hook: object) -> None:
        activations[name] = value.detach().clone()

    return note
