"""Interventions by name: a function whose first parameter names what it changes.

The first parameter is a weight of the attention layers (`W_Q [head d_model d_head]`, `b_Q [head
d_head]`, …), `W_pos [pos d_model]`, or an activation
(`workers.engine.changes.CHANGEABLE_ACTIVATIONS`). The function returns the changed tensor. It does
not change its arguments.

Further positional parameters name what the change reads:

* `circuit`: what the unchanged weights say of positions;
* `b_Q` and `scale`: the query bias of the layer as it is under the changes of weights, and the
  factor of its scores, only for a change of `attn_scores` in a model without rotations, soft caps,
  windows and learned sinks;
* `layer`: the number of the layer;
* `tokens`, and activations that come before the changed one (`workers.engine.changes.readable`),
  only for a change of an activation;
* `partner`: the changed activation in the run on the partner sequences;
* `labels`: which tokens the input family has labelled, a mask `[batch pos]` by label.

Keyword-only parameters are options: numbers, or one of some names. A scan writes them in their
order, `name(1,0.5)`. If the last option is a tuple, it takes all values that are left. An option
named `layer` says where the change is made; without it, the change is made in every layer. `a+b` is
a, then b.

The type of an option says what it may be (`schemas.scans.values`). If the model or the length of
the sequences sets a limit, the decorator says so in `most`. If options are wrong only together,
`refuse` says so. A change of scores that hides all but the first and the last keys of some heads
says which in `streaming`, so that no matrix of scores is needed where nobody looks at it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from headcount.schemas.errors import ModelError, ScanError, counted, unknown
from headcount.schemas.files.fingerprints import fingerprint
from headcount.schemas.registry import Argument, first_paragraph
from headcount.schemas.scans.intervention import NONE, Intervention, InterventionPart
from headcount.schemas.scans.measured_heads import Head, find_heads
from headcount.schemas.scans.values import expected, problem_of
from headcount.workers.engine.changes import (
    CHANGEABLE_ACTIVATIONS,
    LABELS,
    PARTNER,
    Change,
    Changes,
    Streaming,
    readable,
)
from headcount.workers.model.files.model_info import ModelInfo
from headcount.workers.model.model import Model

CHANGEABLE_WEIGHTS = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
CHANGEABLE_EMBEDDINGS = ("W_pos",)
"""Weights that are not a layer's."""

Options = dict[str, Any]
"""Options of a change by name: whole numbers, numbers, or names."""


@dataclass(frozen=True)
class LargestValue:
    """The largest value of an option with which a change still does what it says."""

    words: str
    """The value in words, for example `n_ctx - 1`."""
    of: Callable[[ModelInfo, int], int]
    """The value for a model and a length `n_ctx` of the sequences."""


Refuse = Callable[[Options, int], str | None]
"""Says what is wrong with the options as a whole for sequences of `n_ctx` tokens; None if nothing
is.
"""

Streams = Callable[[Options, ModelInfo], Streaming]
"""Which heads of a model a change leaves the first and the last keys alone, by its options."""


@dataclass(frozen=True)
class RegisteredIntervention:
    """An intervention as it is written, before it has options."""

    name: str
    function: Callable[..., Any]
    target: str
    """What it changes; empty for `none`, which changes nothing."""
    reads: tuple[str, ...]
    """What it reads besides the target, in the order of the function's parameters."""
    options: dict[str, inspect.Parameter]
    meaning: str
    most: Mapping[str, LargestValue]
    """The largest value of the options that have one."""
    refuse: Refuse | None
    streaming: Streams | None = None

    @property
    def allowed_names(self) -> dict[str, tuple[str, ...]]:
        """The names that an option may have, for the options that are names."""
        return {
            option: get_args(parameter.annotation)
            for option, parameter in self.options.items()
            if get_origin(parameter.annotation) is Literal
        }

    @property
    def signature(self) -> str:
        """How a scan writes it, for example `keep_window(sinks,window)`."""
        return f"{self.name}({','.join(self.options)})" if self.options else self.name

    @property
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps of it: the meaning, and a fingerprint of its code."""
        return {"meaning": self.meaning, "fingerprint": fingerprint(self.function)}


@dataclass(frozen=True)
class BoundPart:
    """One change of an intervention, with its options by name."""

    registered: RegisteredIntervention
    options: dict[str, Any]

    @property
    def target(self) -> str:
        """What is changed."""
        return self.registered.target

    @property
    def layer(self) -> int | None:
        """The layer in which it is changed; None means every layer."""
        layer = self.options.get("layer")
        return None if layer is None else int(layer)

    def streaming(self, info: ModelInfo) -> Streaming | None:
        """The heads that it leaves the first and the last keys alone, if that is what it does."""
        streaming = self.registered.streaming
        return None if streaming is None else streaming(self.options, info)

    def function_for(self, model: Model) -> Callable[[Tensor, Mapping[str, Any]], Tensor]:
        """The change for a model: a function of what is changed and of what may be read."""
        function = partial(self.registered.function, **self.options)
        reads = self.registered.reads
        # The circuit is asked for now, while the weights are unchanged.
        circuit = {"circuit": model.circuit} if "circuit" in reads else {}
        reads_bias = "b_Q" in reads
        if reads_bias:
            self._check_bias(model)

        def change(value: Tensor, readable_values: Mapping[str, Any]) -> Tensor:
            values = {**readable_values, **circuit}
            if reads_bias:
                layer = readable_values["layer"]
                # Read now: a change of weights in the same intervention may have changed it.
                values |= {"b_Q": model.layer_weight(layer, "b_Q"), "scale": model.scale(layer)}
            if LABELS in reads and LABELS not in values:
                raise ScanError(f"interventions: {self.registered.name}: no labels are given")
            return function(value, *(values[name] for name in reads))

        return change

    def _check_bias(self, model: Model) -> None:
        """Refuse a model in which the query bias has no part of a score for each key alone."""
        name = f"{model.info.name}: {self.registered.name}"
        if model.rotary:
            raise ModelError(f"{name}: queries are rotated, and their bias with them")
        if model.changeable_weight("b_Q", 0) is None:
            raise ModelError(f"{name}: the model has no b_Q")
        for layer in model.info.attention_layers_or_all:
            facts = model.facts(layer)
            if facts is None:
                continue
            # What stands between the scores of all keys and a softmax over them.
            features = {
                "a soft cap": facts.soft_cap,
                "learned sinks": facts.sink,
                "a window": facts.window,
            }
            feature = next((name for name, fact in features.items() if fact is not None), None)
            if feature is not None:
                raise ModelError(
                    f"{name}: layer {layer} has {feature}, and it is defined for a softmax "
                    "of q·k over all keys before a query; use zero_query_bias"
                )


@dataclass(frozen=True)
class BoundIntervention:
    """An intervention and the functions that make its changes, in order."""

    intervention: Intervention
    parts: tuple[BoundPart, ...]

    def check(self, info: ModelInfo, n_ctx: int) -> None:
        """Refuse what a model or a sequence does not have, and what would change nothing."""
        for part in self.parts:
            problem = _missing_place(part, info, n_ctx) or _too_large_option(part, info, n_ctx)
            # Last, because it takes every option for one that exists and is in its range.
            refuse = part.registered.refuse
            if problem is None and refuse is not None:
                problem = refuse(part.options, n_ctx)
            if problem is not None:
                raise ScanError(f"interventions: '{self.intervention}': {problem}")

    def check_measured(self, depth: int) -> None:
        """Refuse changes of layers from `depth` on, which no forward pass goes through.

        They would change nothing.
        """
        for part in self.parts:
            if part.layer is not None and part.layer >= depth:
                raise ScanError(
                    f"interventions: '{self.intervention}': changes layer {part.layer}, and "
                    f"nothing after layer {depth - 1} is measured, so it would change nothing; "
                    f"measure layer {part.layer} or a later one, name a prediction, or leave it out"
                )

    @property
    def weight_parts(self) -> tuple[BoundPart, ...]:
        """The parts that change weights."""
        weights = (*CHANGEABLE_WEIGHTS, *CHANGEABLE_EMBEDDINGS)
        return tuple(part for part in self.parts if part.target in weights)

    @property
    def activation_parts(self) -> tuple[BoundPart, ...]:
        """The parts that change activations."""
        return tuple(part for part in self.parts if part.target in CHANGEABLE_ACTIVATIONS)

    def changes(self, model: Model) -> Changes:
        """The changes of activations. An activation that the model does not have is refused."""
        for part in self.activation_parts:
            if not model.has(part.target):
                raise ModelError(
                    f"{model.info.name}: no {part.target} for {part.registered.name} to change"
                )
        return Changes(
            Change(
                part.target,
                part.function_for(model),
                part.layer,
                frozenset(part.registered.reads),
                part.streaming(model.info),
            )
            for part in self.activation_parts
        )

    @property
    def needs_partner(self) -> bool:
        """Whether it takes something from a run on partner sequences."""
        return any(PARTNER in part.registered.reads for part in self.parts)

    @property
    def needs_labels(self) -> bool:
        """Whether it reads which tokens the input family has labelled."""
        return any(LABELS in part.registered.reads for part in self.parts)


def _missing_place(part: BoundPart, info: ModelInfo, n_ctx: int) -> str | None:
    """What is wrong with a layer, head or position that does not exist; None if all exist."""
    counts = {
        "layer": (info.n_layers, info.name),
        "head": (info.n_heads, info.name),
        "position": (n_ctx, "a sequence"),
    }
    for option, (count, owner) in counts.items():
        # A change without the option passes, as if it named the first.
        number = part.options.get(option, 0)
        if number >= count:
            return f"{option} {number} of {owner}, which has {count}"
    heads: tuple[Head, ...] = part.options.get("heads", ())
    try:
        find_heads("all", heads, info)
    except ScanError as error:
        return str(error)
    return None


def _too_large_option(part: BoundPart, info: ModelInfo, n_ctx: int) -> str | None:
    """What is wrong with an option that is larger than its change allows; None if none is."""
    for option, largest in part.registered.most.items():
        most, number = largest.of(info, n_ctx), part.options[option]
        if most < 1:
            # No value would do, so the advice is about n_ctx.
            return (
                f"n_ctx = {n_ctx} leaves nothing to hide ({option} is at most {largest.words}); "
                "raise n_ctx"
            )
        if number > most:
            return f"{option}: expected at most {most} ({largest.words}), got {number}"
    return None


INTERVENTIONS: dict[str, RegisteredIntervention] = {}


def intervention(
    function: Callable[..., Any] | None = None,
    *,
    most: Mapping[str, LargestValue] | None = None,
    refuse: Refuse | None = None,
    streaming: Streams | None = None,
) -> Callable[..., Any]:
    """Register a function as an intervention.

    `most` has the largest values of its options, `refuse` says what is wrong with them together,
    `streaming` which heads it leaves the first and the last keys alone.
    """
    if function is None:
        # Used as `@intervention(…)`: return the decorator itself.
        return partial(intervention, most=most, refuse=refuse, streaming=streaming)
    parameters = inspect.signature(function, eval_str=True).parameters
    options = {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    positional = [name for name in parameters if name not in options]
    target, *reads = positional or [""]
    targets = ("", *CHANGEABLE_WEIGHTS, *CHANGEABLE_EMBEDDINGS, *CHANGEABLE_ACTIVATIONS)
    if target not in targets:
        raise ValueError(
            f"intervention {function.__name__!r}: {unknown('target', target, targets)}"
        )
    # A misspelt parameter is found here, when the module is imported, not in the middle of a run.
    can_read = _readable(target)
    for name in reads:
        if name not in can_read:
            raise ValueError(
                f"intervention {function.__name__!r}: "
                f"{unknown(f'thing that a change of {target} reads', name, can_read)}"
            )
    if function.__name__ in INTERVENTIONS:
        raise ValueError(f"intervention {function.__name__!r} is defined twice")
    INTERVENTIONS[function.__name__] = RegisteredIntervention(
        function.__name__,
        function,
        target,
        tuple(reads),
        options,
        meaning=first_paragraph(function),
        most=most or {},
        refuse=refuse,
        streaming=streaming,
    )
    return function


def _readable(target: str) -> tuple[str, ...]:
    """What the change of a target may read besides the target itself."""
    if target == "attn_scores":
        return ("circuit", "b_Q", "scale", *readable(target))
    if target in CHANGEABLE_ACTIVATIONS:
        return ("circuit", *readable(target))
    if target in CHANGEABLE_WEIGHTS:
        return ("circuit", "layer")
    return ("circuit",)


def bind(intervention: Intervention) -> BoundIntervention:
    """The functions and checked options of what a scan names.

    >>> from headcount.schemas.scans.intervention import parse_intervention
    >>> bound = bind(parse_intervention("zero_query_bias+scale_query_bias(0.50)"))
    >>> [(part.registered.name, part.options) for part in bound.parts]
    [('zero_query_bias', {}), ('scale_query_bias', {'alpha': 0.5})]
    """
    parts = tuple(_bound_part(part) for part in intervention.parts)
    if len(parts) > 1:
        _check_combination(intervention)
    return BoundIntervention(intervention, parts)


def _check_combination(intervention: Intervention) -> None:
    """Refuse `a+b` in which a part is `none`, or stands twice."""
    names = [str(part) for part in intervention.parts]
    untouched = str(NONE)
    if untouched in names:
        raise ScanError(
            f"interventions: '{intervention}': {untouched} is the untouched model and stands "
            "alone; leave it out, or name it as an intervention of its own"
        )
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ScanError(
            f"interventions: '{intervention}': expected each intervention once, got {repeated} "
            f"{names.count(repeated)} times"
        )


def needs_partners(interventions: Iterable[Intervention]) -> bool:
    """Whether one of them takes something from a run on partner sequences."""
    return any(bind(intervention).needs_partner for intervention in interventions)


REPLACED: dict[str, tuple[int, str]] = {
    "mask_first_keys": (1, "mask_keys(0,{count})"),
    "mask_last_keys": (4, "mask_keys(-{count},{count})"),
    "mask_middle_keys": (4, "mask_keys(HALF,{count}), where HALF is half of n_ctx"),
    "mask_random_keys": (4, "mask_random_span({count}), whose keys stand in a row"),
}
"""Interventions of version 0.2 and before: the default of their `count`, and what to write today.
"""


def _bound_part(part: InterventionPart) -> BoundPart:
    """A part of an intervention with its function, and with its options by name."""
    if part.name in REPLACED:
        default_count, today = REPLACED[part.name]
        count = part.arguments[0] if part.arguments else default_count
        raise ScanError(
            f"interventions: '{part}': {part.name} is gone; write {today.format(count=count)}"
        )
    if part.name not in INTERVENTIONS:
        raise ScanError(f"interventions: {unknown('intervention', part.name, INTERVENTIONS)}")
    registered = INTERVENTIONS[part.name]
    parameters = registered.options
    arguments = _of_each_option(part, parameters)
    if len(arguments) > len(parameters):
        raise ScanError(
            f"interventions: '{part}' has {counted(len(part.arguments), 'option')}; "
            f"expected {registered.signature}"
        )
    options: dict[str, Any] = {}
    # Arguments stand in the order of the options. The last options may be left out.
    for (option, parameter), argument in zip(parameters.items(), arguments, strict=False):
        subject = f"interventions: '{part}': {option}"
        options[option] = _option(subject, parameter.annotation, argument)
    for option, parameter in parameters.items():
        if option in options:
            continue
        if parameter.default is parameter.empty:
            raise ScanError(
                f"interventions: '{part}' needs {option}; expected {registered.signature}"
            )
        options[option] = parameter.default
    return BoundPart(registered, options)


def _of_each_option(
    part: InterventionPart, parameters: Mapping[str, inspect.Parameter]
) -> list[Argument | tuple[Argument, ...]]:
    """The arguments by option: a last option that is a tuple takes all that are left."""
    annotations = [parameter.annotation for parameter in parameters.values()]
    before = len(annotations) - 1
    if not annotations or get_origin(annotations[-1]) is not tuple or len(part.arguments) <= before:
        return list(part.arguments)
    return [*part.arguments[:before], part.arguments[before:]]


def _option(
    subject: str, annotation: object, argument: Argument | tuple[Argument, ...]
) -> Argument | tuple[object, ...]:
    """A number in the range of its type, one of the names that a `Literal` lists, or a tuple."""
    if isinstance(argument, tuple):
        return _tuple_option(subject, annotation, argument)
    if get_origin(annotation) is Literal:
        if argument not in get_args(annotation):
            raise ScanError(f"{subject}: {unknown('name', str(argument), get_args(annotation))}")
        return argument
    problem = problem_of(annotation, argument)
    if problem is not None:
        raise ScanError(f"{subject}: expected {problem}, got {argument!r}")
    # A scan may write a whole number for a float, with or without a range: `scale_query_bias(1)`.
    is_float = float in (annotation, *get_args(annotation))
    return float(argument) if is_float else argument


def _tuple_option(
    subject: str, annotation: object, arguments: tuple[Argument, ...]
) -> tuple[object, ...]:
    """The values of an option that takes several, each of the type of the tuple's items."""
    adapter = TypeAdapter[tuple[object, ...]](cast("Any", annotation))
    try:
        # As JSON, in which a head is its text alone.
        return adapter.validate_json(json.dumps(arguments))
    except ValidationError as error:
        problems = error.errors()
        wrong = problems[0]["input"]
        raise ScanError(f"{subject}: expected {expected(problems[:1])}, got {wrong!r}") from None
