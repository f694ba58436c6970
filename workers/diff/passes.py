"""A pass through a model in which each tensor on the way is seen, and may be replaced."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from headcount.schemas.errors import ModelError
from headcount.workers.engine.engine import StopPass
from headcount.workers.engine.fused_pattern import FusedPattern
from headcount.workers.model.attention_facts import (
    Attend,
    AttentionFacts,
    all_scores,
    pattern_of,
    weighted_values,
)
from headcount.workers.model.bare_modules import ATTENTION, MLP, PROJECTIONS, first_of
from headcount.workers.model.model import Model
from headcount.workers.model.rotations import Rotation

JOINT = ("c_attn", "query_key_value", "qkv_proj", "Wqkv", "qkv")
"""Names of modules that make q, k and v at once. They are seen where the attention gets them."""

QK_NORM = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")

WHOLE, OWN_Z = "layer", "z of the layer"
"""What is seen of a layer that is not looked into: what it puts out, and its z, which stays."""

UNEMBEDDED = 24  # positions of a sequence whose logits are seen: vocabularies may be large
NOTHING = torch.empty(0)


class Place(NamedTuple):
    """Where a tensor is seen: the same place in two forms of one model."""

    layer: int | None  # None outside of the layers
    quantity: str  # what users call it
    module: str = ""  # that is given it or puts it out, by its name in the layer; empty if none
    is_input: bool = False  # whether the module is given it


Visit = Callable[[Place, Tensor], Tensor]
"""Sees a tensor at a place, and returns what the model goes on with."""

Hook = Callable[..., Any]


def swept(q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
    """Attention as it is measured: z `[batch pos head d_v]`, a tile of scores at a time."""
    return FusedPattern(q, k, v, facts, {}).z.transpose(1, 2)


def built(q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
    """The same of the whole matrix, which adds up in another order."""
    return weighted_values(pattern_of(all_scores(q, k, facts), facts), v).transpose(1, 2)


def quantity_of(module: str, is_input: bool) -> str:
    """What users call what a module of a layer is given or puts out."""
    *path, name = module.split(".")
    inside = path[0] if path else name
    if name in QK_NORM:
        return name[0] if is_input else "QK norm"
    if name in MLP or inside in MLP:
        return "residual stream" if is_input and name in MLP else "MLP"
    if "norm" in name or name.startswith("ln"):
        return "residual stream" if is_input else "norm"
    if inside not in ATTENTION and name not in ATTENTION:
        return "residual stream"
    letter = next((letter for letter in "QKV" if name in PROJECTIONS[letter]), "")
    if is_input:
        return "norm" if letter or name in JOINT or not path else "z"
    return letter.lower() or "attention output"


def parts_of(block: nn.Module) -> dict[str, nn.Module]:
    """The modules inside a layer by name."""
    return {name: module for name, module in block.named_modules() if name}


def run_visited(
    model: Model, tokens: Tensor, visit: Visit, inside: Collection[int], attend: Attend = swept
) -> None:
    """Run a model on tokens `[batch pos]`, and see what each layer makes.

    It looks into the layers `inside`; if there are any, the pass ends behind the last of them.
    """
    normed = _VisitedPass(model, tokens, visit, inside, attend).run()
    if not inside:
        places = torch.linspace(0, tokens.shape[1] - 1, UNEMBEDDED).long()
        unembedded = visit(Place(None, "unembedding"), model.unembed(normed[:, places]))
        visit(Place(None, "final soft cap"), model.changed_logits(unembedded)[0])


def run_unseen(model: Model, tokens: Tensor) -> Tensor:
    """What the unembedding reads of tokens `[batch pos]`: `[batch pos d_model]`."""
    return _VisitedPass(model, tokens, lambda _, tensor: tensor, (), swept).run()


class _VisitedPass:
    """The hooks of one pass."""

    def __init__(
        self, model: Model, tokens: Tensor, visit: Visit, inside: Collection[int], attend: Attend
    ) -> None:
        self.model, self.tokens, self.visit = model, tokens, visit
        self.inside, self.attend = inside, attend
        self.layer = -1  # that runs now
        self.normed = NOTHING

    def run(self) -> Tensor:
        (unembedding,) = self.model.modules("unembed")
        with ExitStack() as hooks, suppress(StopPass):

            def hook(module: nn.Module, begin: Hook, end: Hook) -> None:
                before = module.register_forward_pre_hook(begin, with_kwargs=True)
                hooks.enter_context(before)
                hooks.enter_context(module.register_forward_hook(end))

            for layer, block in enumerate(self.model.blocks):
                parts = parts_of(block) if layer in self.inside else {}
                for name, part in parts.items():
                    hook(part, partial(self._begin, name), partial(self._end, name))
                hook(block, partial(self._begin_layer, layer), partial(self._end_layer, layer))
            hooks.enter_context(unembedding.register_forward_pre_hook(self._end_pass))
            self.model.run_bare(self.tokens, self._attend)
        return self.normed

    # Arguments and outputs may be anything that a library hands on.

    def _begin_layer(self, layer: int, _module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        self.layer = layer
        if layer > 0:
            return None  # It is given what the layer before it put out.
        embedded = self.visit(Place(None, "embedding"), _given(args, kwargs))
        return _with_given(args, kwargs, embedded)

    def _end_layer(self, layer: int, _module: nn.Module, _args: Any, output: Any) -> Any:  # noqa: ANN401
        stream = first_of(output)
        if not stream.isfinite().all():
            problem = self.model.weight_problem or "its numbers overflow there"
            raise ModelError(
                f"{self.model.info.path}: layer {layer} puts out NaN or infinity ({problem}), "
                "expected numbers; nothing can be compared behind it"
            )
        quantity = "residual stream" if layer in self.inside else WHOLE
        stream = self.visit(Place(layer, quantity), stream)
        if layer == max(self.inside, default=-1):
            raise StopPass
        return _with_first(output, stream)

    def _end_pass(self, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.normed = self.visit(Place(None, "final norm"), args[0])
        raise StopPass

    def _begin(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        given = _given(args, kwargs)
        if not self._is_of_positions(given):
            return None
        place = Place(self.layer, quantity_of(name, True), name, is_input=True)
        return _with_given(args, kwargs, self.visit(place, given))

    def _end(self, name: str, _module: nn.Module, _args: object, output: Any) -> Any:  # noqa: ANN401
        put_out = first_of(output)
        if name.rpartition(".")[2] in JOINT or not self._is_of_positions(put_out):
            return None
        return _with_first(
            output, self.visit(Place(self.layer, quantity_of(name, False), name), put_out)
        )

    def _is_of_positions(self, tensor: object) -> TypeGuard[Tensor]:
        if not isinstance(tensor, Tensor) or tensor.dim() not in (3, 4):
            return False
        return tensor.shape[:2] == self.tokens.shape

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
        if self.layer not in self.inside:
            return self.visit(Place(self.layer, OWN_Z), self.attend(q, k, v, facts))
        can_undo = self.model.can_undo_rotation(self.layer)
        rotation = facts.rotation if can_undo else None
        q, k = self._rotated("q", q, rotation), self._rotated("k", k, rotation)
        v = self.visit(Place(self.layer, "v"), v.transpose(1, 2)).transpose(1, 2)
        return self.visit(Place(self.layer, "pattern"), self.attend(q, k, v, facts))

    def _rotated(self, name: str, x: Tensor, rotation: Rotation | None) -> Tensor:
        """q or k: seen before its rotation, and behind it."""
        x = x.transpose(1, 2)  # [batch pos head d]
        before = self.visit(Place(self.layer, name), x if rotation is None else rotation.undo(x))
        behind = before if rotation is None else rotation.apply(before)
        return self.visit(Place(self.layer, "rotation", name), behind).transpose(1, 2)


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 (of any module)
    """What a module is given first, as an argument or by the name that libraries use."""
    return args[0] if args else kwargs.get("hidden_states")


def _with_given(args: tuple[Any, ...], kwargs: dict[str, Any], given: Tensor) -> Any:  # noqa: ANN401
    return ((given, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": given})


def _with_first(output: Any, first: Tensor) -> Any:  # noqa: ANN401
    if not isinstance(output, tuple | list):
        return first
    return type(output)((first, *output[1:]))  # Some models add lists of them up.
