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

What an option may be is in its type (`schemas.values`) and, where the model or the length of the
sequences bounds it, in the decorator's `most`; what only several of them tell is in its `refuse`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args, get_origin

from torch import Tensor

from schemas.errors import ModelError, ScanError, counted, unknown
from schemas.fingerprints import fingerprint
from schemas.formulas import first_paragraph
from schemas.intervention import NONE, Argument, Intervention, InterventionPart
from schemas.values import problem_of
from workers.engine.edits import EDITABLE_ACTIVATIONS, PARTNER, Edit, Edits, readable
from workers.model.model import Model
from workers.model.model_info import ModelInfo

EDITABLE_WEIGHTS = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
EDITABLE_EMBEDDINGS = ("W_pos",)
"""Weights that are not a layer's."""


Options = dict[str, Any]


@dataclass(frozen=True)
class Largest:
    """The largest value of an option with which an edit still does what it says."""

    words: str
    """It, in terms of the model and of the sequences."""
    of: Callable[[ModelInfo, int], int]
    """It, from a model and from `n_ctx`."""


Refuse = Callable[[Options, int], str | None]
"""Says what is wrong with options together, for sequences of `n_ctx` tokens; none if nothing is."""


@dataclass(frozen=True)
class Registered:
    """An intervention as it is written; `target` is empty where nothing is edited."""

    name: str
    function: Callable[..., Any]
    target: str
    reads: tuple[str, ...]
    options: dict[str, inspect.Parameter]
    meaning: str
    most: Mapping[str, Largest]
    """The largest value of the options that have one."""
    refuse: Refuse | None

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The options that are one of some names, and these names."""
        return {
            key: get_args(p.annotation)
            for key, p in self.options.items()
            if get_origin(p.annotation) is Literal
        }

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
        """Refuse what a model or a sequence does not have, and edits that would edit nothing."""
        has = {
            "layer": (info.n_layers, info.name),
            "head": (info.n_heads, info.name),
            "position": (n_ctx, "a sequence"),
        }
        for part in self.parts:
            what = f"interventions: '{self.intervention}'"
            for key, (count, whose) in has.items():
                number = part.options.get(key, 0)
                if number >= count:
                    raise ScanError(f"{what}: {key} {number} of {whose}, which has {count}")
            for key, largest in part.registered.most.items():
                most, number = largest.of(info, n_ctx), part.options[key]
                if most < 1:
                    raise ScanError(
                        f"{what}: n_ctx = {n_ctx} leaves nothing to hide ({key} is at most "
                        f"{largest.words}); raise n_ctx"
                    )
                if number > most:
                    raise ScanError(
                        f"{what}: {key}: expected at most {most} ({largest.words}), got {number}"
                    )
            problem = part.registered.refuse and part.registered.refuse(part.options, n_ctx)
            if problem:
                raise ScanError(f"{what}: {problem}")

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


def intervention(
    function: Callable[..., Any] | None = None,
    *,
    most: Mapping[str, Largest] | None = None,
    refuse: Refuse | None = None,
) -> Callable[..., Any]:
    """Register a function as an intervention, with what its options may be at most and together."""
    if function is None:
        return partial(intervention, most=most, refuse=refuse)
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
    INTERVENTIONS[function.__name__] = Registered(
        function.__name__,
        function,
        target,
        tuple(reads),
        options,
        meaning=first_paragraph(function),
        most=most or {},
        refuse=refuse,
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
    parts = tuple(map(_bound_part, intervention.parts))
    if len(parts) > 1:
        names = [str(part) for part in intervention.parts]
        if (none := str(NONE)) in names:
            raise ScanError(
                f"interventions: '{intervention}': {none} is the untouched model and stands alone; "
                "leave it out, or name it as an intervention of its own"
            )
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ScanError(
                f"interventions: '{intervention}': expected each edit once, got {twice} "
                f"{names.count(twice)} times"
            )
    return BoundIntervention(intervention, parts)


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
            f"interventions: '{part}' has {counted(len(part.arguments), 'option')}; "
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
    """A number in the range of its type, or one of the names that a `Literal` lists."""
    if get_origin(annotation) is Literal:
        if argument not in get_args(annotation):
            raise ScanError(f"{what}: {unknown('name', str(argument), get_args(annotation))}")
        return argument
    problem = problem_of(annotation, argument)
    if problem is not None:
        raise ScanError(f"{what}: expected {problem}, got {argument!r}")
    return float(argument) if _is_float(annotation) else argument


def _is_float(annotation: Any) -> bool:
    return float in (annotation, *get_args(annotation))


def _signature(found: Registered) -> str:
    return f"{found.name}({','.join(found.options)})" if found.options else found.name
