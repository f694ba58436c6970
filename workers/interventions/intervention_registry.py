"""Interventions by name: a function whose first parameter names what it edits.

That parameter is a weight of the attention layers (`W_Q [head d_model d_head]`,
`b_Q [head d_head]`, …), `W_pos [pos d_model]`, or an activation
(`workers.engine.edits.EDITABLE_ACTIVATIONS`). The function returns the edited tensor and leaves its
arguments alone. Further parameters name what it reads: `circuit` is what the untouched weights say
of positions, `layer` the number of the layer; the edit of an activation may read `tokens`, what the
layer has known before (`workers.engine.edits.readable`), and `partner`, which is its own target in
the run on the partner sequences. Keyword-only parameters are options, numbers or one of some names,
written in a scan as `name(1,0.5)` in their order; one named `layer` says where the edit is made,
otherwise it is made in every layer. `a+b` is a, then b.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from torch import Tensor

from schemas.errors import ModelError, ScanError, unknown
from schemas.fingerprints import fingerprint
from schemas.formulas import first_paragraph
from schemas.intervention import Argument, Intervention, InterventionPart
from workers.engine.edits import EDITABLE_ACTIVATIONS, PARTNER, Edit, Edits, readable
from workers.model.model import Model
from workers.model.model_info import ModelInfo

EDITABLE_WEIGHTS = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
EDITABLE_EMBEDDINGS = ("W_pos",)
"""Weights that are not a layer's."""


@dataclass(frozen=True)
class Registered:
    """An intervention as it is written; `target` is empty where nothing is edited."""

    name: str
    function: Callable[..., Any]
    target: str
    reads: tuple[str, ...]
    options: dict[str, inspect.Parameter]
    meaning: str

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The options that are one of some names, and these names."""
        return {key: names for key, p in self.options.items() if (names := get_args(p.annotation))}

    @property
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps of it."""
        return {"meaning": self.meaning, "fingerprint": fingerprint(self.function)}


@dataclass(frozen=True)
class BoundPart:
    """One edit and its options, by name."""

    registered: Registered
    options: dict[str, Any]

    @property
    def target(self) -> str:
        """What is edited."""
        return self.registered.target

    @property
    def layer(self) -> int | None:
        """The layer in which it is edited; none means every one."""
        layer = self.options.get("layer")
        return None if layer is None else int(layer)

    def function_for(self, model: Model) -> Callable[[Tensor, Mapping[str, Any]], Tensor]:
        """The edit for a model: a function of what is edited and of what may be read."""
        function, reads = partial(self.registered.function, **self.options), self.registered.reads
        fixed = {"circuit": model.circuit} if "circuit" in reads else {}
        return lambda value, known: function(value, *({**known, **fixed}[name] for name in reads))


@dataclass(frozen=True)
class BoundIntervention:
    """An intervention and the functions that make its edits, in order."""

    intervention: Intervention
    parts: tuple[BoundPart, ...]

    def check(self, info: ModelInfo, n_ctx: int) -> None:
        """Refuse layers and heads that a model does not have, and positions that a sequence does
        not have.
        """
        has = {
            "layer": (info.n_layers, info.name),
            "head": (info.n_heads, info.name),
            "position": (n_ctx, "a sequence"),
        }
        for part in self.parts:
            for key, (count, whose) in has.items():
                number = part.options.get(key, 0)
                if not 0 <= number < count:
                    raise ScanError(
                        f"interventions: '{self.intervention}': {key} {number} of {whose}, "
                        f"which has {count}"
                    )

    def check_measured(self, depth: int) -> None:
        """Refuse edits of layers after those that a forward pass goes through: they would change
        nothing.
        """
        for part in self.parts:
            if part.layer is not None and part.layer >= depth:
                raise ScanError(
                    f"interventions: '{self.intervention}': edits layer {part.layer}, and nothing "
                    f"after layer {depth - 1} is measured, so it would change nothing; measure "
                    f"layer {part.layer} or a later one, name a prediction, or leave it out"
                )

    @property
    def weight_parts(self) -> tuple[BoundPart, ...]:
        """The parts that edit weights."""
        return tuple(p for p in self.parts if p.target in EDITABLE_WEIGHTS + EDITABLE_EMBEDDINGS)

    @property
    def activation_parts(self) -> tuple[BoundPart, ...]:
        """The parts that edit activations."""
        return tuple(p for p in self.parts if p.target in EDITABLE_ACTIVATIONS)

    def edits(self, model: Model) -> Edits:
        """The edits of activations; what the model does not have is refused."""
        for part in self.activation_parts:
            if not model.has(part.target):
                raise ModelError(
                    f"{model.info.name}: no {part.target} for {part.registered.name} to edit"
                )
        return Edits(
            Edit(p.target, p.function_for(model), p.layer, frozenset(p.registered.reads))
            for p in self.activation_parts
        )

    @property
    def needs_partner(self) -> bool:
        """Whether it takes something from a run on partner sequences."""
        return any(PARTNER in part.registered.reads for part in self.parts)


INTERVENTIONS: dict[str, Registered] = {}


def intervention(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function as an intervention."""
    parameters = inspect.signature(function, eval_str=True).parameters
    options = {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    target, *reads = [name for name in parameters if name not in options] or [""]
    targets = ("", *EDITABLE_WEIGHTS, *EDITABLE_EMBEDDINGS, *EDITABLE_ACTIVATIONS)
    if target not in targets:
        raise ValueError(
            f"intervention {function.__name__!r}: {unknown('target', target, targets)}"
        )
    can_read = _readable(target)
    for name in reads:
        if name not in can_read:
            raise ValueError(
                f"intervention {function.__name__!r}: "
                f"{unknown(f'thing that an edit of {target} reads', name, can_read)}"
            )
    if function.__name__ in INTERVENTIONS:
        raise ValueError(f"intervention {function.__name__!r} is defined twice")
    meaning = first_paragraph(function)
    INTERVENTIONS[function.__name__] = Registered(
        function.__name__, function, target, tuple(reads), options, meaning
    )
    return function


def _readable(target: str) -> tuple[str, ...]:
    """What the edit of a target may read besides the target itself."""
    if target in EDITABLE_ACTIVATIONS:
        return ("circuit", *readable(target))
    if target in EDITABLE_WEIGHTS:
        return ("circuit", "layer")
    return ("circuit",)


def bind(intervention: Intervention) -> BoundIntervention:
    """The functions and checked options of what a scan names.

    >>> from schemas.intervention import parse_intervention
    >>> bound = bind(parse_intervention("zero_query_bias+scale_query_bias(0.50)"))
    >>> [(part.registered.name, part.options) for part in bound.parts]
    [('zero_query_bias', {}), ('scale_query_bias', {'alpha': 0.5})]
    """
    return BoundIntervention(intervention, tuple(map(_bound_part, intervention.parts)))


def needs_partners(interventions: Iterable[Intervention]) -> bool:
    """Whether one of them takes something from a run on partner sequences."""
    return any(bind(intervention).needs_partner for intervention in interventions)


def _bound_part(part: InterventionPart) -> BoundPart:
    if part.name not in INTERVENTIONS:
        raise ScanError(f"interventions: {unknown('intervention', part.name, INTERVENTIONS)}")
    registered = INTERVENTIONS[part.name]
    parameters = registered.options
    if len(part.arguments) > len(parameters):
        raise ScanError(
            f"interventions: '{part}' has {len(part.arguments)} options; "
            f"expected {_signature(registered)}"
        )
    options: dict[str, Any] = {}
    for (key, parameter), argument in zip(parameters.items(), part.arguments, strict=False):
        what = f"interventions: '{part}': {key}"
        options[key] = _option(what, parameter.annotation, argument)
    for key, parameter in parameters.items():
        if key in options:
            continue
        if parameter.default is parameter.empty:
            raise ScanError(
                f"interventions: '{part}' needs {key}; expected {_signature(registered)}"
            )
        options[key] = parameter.default
    return BoundPart(registered, options)


def _option(what: str, annotation: Any, argument: Argument) -> Any:
    """A number, or one of the names that a `Literal` lists."""
    if names := get_args(annotation):
        if argument not in names:
            raise ScanError(f"{what}: {unknown('name', str(argument), names)}")
        return argument
    if annotation is int and isinstance(argument, int):
        return argument
    if annotation is float and not isinstance(argument, str):
        return float(argument)
    expected = "a whole number" if annotation is int else "a number"
    raise ScanError(f"{what} is {str(argument)!r}, expected {expected}")


def _signature(found: Registered) -> str:
    return f"{found.name}({','.join(found.options)})" if found.options else found.name
