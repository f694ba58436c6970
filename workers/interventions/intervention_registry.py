"""Interventions by name: a function whose first parameter names what it changes.

That is a weight of the attention layers, `W_pos [pos d_model]`, or an activation
(`workers.engine.changes.CHANGEABLE_ACTIVATIONS`). The function returns the changed tensor. It does
not change its arguments. Further positional parameters name what the change reads:

* `circuit`: what the unchanged weights say of positions;
* `W_E`: the embedding, only for a change of an activation;
* `b_Q` and `scale`: the query bias of the layer as it is under the changes of weights, and the
  factor of its scores, only for a change of `attn_scores` in a model without rotations, soft caps,
  windows and learned sinks;
* `layer`, and for a change of an activation what `workers.engine.changes.readable` lists.

Keyword-only parameters are options. A scan writes them in their order, `name(1,0.5)`; a last option
that is a tuple takes all values that are left. An option named `layer` says where the change is
made; without it, the change is made in every layer. `a+b` is a, then b.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_origin

from torch import Tensor

from headcount.schemas.errors import ModelError, ScanError, unknown
from headcount.schemas.measured_heads import find_heads
from headcount.schemas.registry import Entry, Registry
from headcount.schemas.scans.intervention import NONE, Intervention, InterventionPart
from headcount.workers.engine.changes import (
    CHANGEABLE_ACTIVATIONS,
    LABELS,
    PARTNER,
    Change,
    Changes,
    Streaming,
    readable,
)
from headcount.workers.model.model import ChangeableWeight, Model
from headcount.workers.model.model_info import ModelInfo

CHANGEABLE_WEIGHTS = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
CHANGEABLE_EMBEDDINGS = ("W_pos",)  # weights that are not a layer's


@dataclass(frozen=True)
class LargestValue:
    """The largest value of an option with which a change still does what it says."""

    words: str  # the value in words, for example `n_ctx - 1`
    of: Callable[[ModelInfo, int], int]  # the value for a model and `n_ctx`


@dataclass(frozen=True, kw_only=True)
class RegisteredIntervention(Entry):
    """An intervention as it is written, before it has options."""

    most: Mapping[str, LargestValue] = field(default_factory=dict[str, LargestValue])
    """The largest value of the options that have one."""
    refuse: Callable[[dict[str, Any], int], str | None] | None = None
    """Says what is wrong with its options together for sequences of `n_ctx` tokens."""
    streaming: Callable[[dict[str, Any], ModelInfo], Streaming] | None = None
    """Says by its options which heads of a model it leaves the first and the last keys alone, so
    that no matrix of scores is needed where nobody looks at it.
    """

    @property
    def target(self) -> str:
        """What it changes; empty for `none`, which changes nothing."""
        return self.parameters[0] if self.parameters else ""

    @property
    def reads(self) -> tuple[str, ...]:
        """What it reads besides the target, in the order of the function's parameters."""
        return self.parameters[1:]


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
        return self.options.get("layer")

    def problem(self, info: ModelInfo, n_ctx: int) -> str | None:
        """What does not exist, or would change nothing; None if nothing is wrong."""
        for option, count, owner in (
            ("layer", info.n_layers, info.name),
            ("head", info.n_heads, info.name),
            ("position", n_ctx, "a sequence"),
        ):
            # A change without the option passes, as if it named the first.
            number = self.options.get(option, 0)
            if number >= count:
                return f"{option} {number} of {owner}, which has {count}"
        try:
            find_heads("all", self.options.get("heads", ()), info)
        except ScanError as error:
            return str(error)
        for option, largest in self.registered.most.items():
            most, number = largest.of(info, n_ctx), self.options[option]
            if most < 1:
                # No value would do, so the advice is about n_ctx.
                return (
                    f"n_ctx = {n_ctx} leaves nothing to hide ({option} is at most "
                    f"{largest.words}); raise n_ctx"
                )
            if number > most:
                return f"{option}: expected at most {most} ({largest.words}), got {number}"
        # Last, because it takes every option for one that exists and is in its range.
        refuse = self.registered.refuse
        return None if refuse is None else refuse(self.options, n_ctx)

    def weights(self, model: Model) -> list[ChangeableWeight]:
        """The weights that it changes, one for each of its layers; a missing one is refused."""
        layers: Iterable[int | None] = range(model.info.n_layers)
        if self.target in CHANGEABLE_EMBEDDINGS:
            layers = [None]
        elif self.layer is not None:
            layers = [self.layer]
        weights: list[ChangeableWeight] = []
        for layer in layers:
            weight = model.changeable_weight(self.target, layer)
            if weight is None:
                where = "" if layer is None else f"layer {layer} has "
                raise ModelError(
                    f"{model.info.name}: {where}no {self.target} for {self.registered.name} to "
                    "change"
                )
            weights.append(weight)
        return weights

    def check_model(self, model: Model) -> None:
        """Refuse a model that lacks what is changed or read; the error names what it can take."""
        try:
            self._check_target(model)
        except ModelError as error:
            others = substitutes(self.registered, model)
            advice = f"; such a model takes {', '.join(others)}" if others else ""
            raise ModelError(f"{error}{advice}") from None

    def _check_target(self, model: Model) -> None:
        if self.target in CHANGEABLE_ACTIVATIONS and not model.has(self.target):
            name = self.registered.name
            raise ModelError(f"{model.info.name}: no {self.target} for {name} to change")
        if self.target in (*CHANGEABLE_WEIGHTS, *CHANGEABLE_EMBEDDINGS):
            self.weights(model)
        self.function_for(model)

    def function_for(self, model: Model) -> Callable[[Tensor, Mapping[str, Any]], Tensor]:
        """The change for a model: a function of what is changed and of what may be read."""
        function, reads = partial(self.registered.function, **self.options), self.registered.reads
        # The circuit is asked for now, while the weights are unchanged.
        circuit = {"circuit": model.circuit} if "circuit" in reads else {}
        if "b_Q" in reads:
            self._check_bias(model)

        def change(value: Tensor, readable_values: Mapping[str, Any]) -> Tensor:
            values = {**readable_values, **circuit}
            if "W_E" in reads:
                values |= {"W_E": model.embedding()}
            if "b_Q" in reads:
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
        # What stands between the scores of all keys and a softmax over them.
        features = {"soft_cap": "a soft cap", "sink": "learned sinks", "window": "a window"}
        for layer in model.info.attention_layers_or_all:
            for fact, words in features.items():
                if getattr(model.facts(layer), fact, None) is not None:
                    raise ModelError(
                        f"{name}: layer {layer} has {words}, and it is defined for a softmax "
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
            if problem := part.problem(info, n_ctx):
                raise ScanError(f"interventions: '{self.intervention}': {problem}")

    def check_measured(self, depth: int) -> None:
        """Refuse changes of layers from `depth` on, which no pass reaches: they change nothing."""
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
        """The changes of activations."""
        changes: list[Change] = []
        for part in self.activation_parts:
            entry = part.registered
            streaming = entry.streaming and entry.streaming(part.options, model.info)
            function, reads = part.function_for(model), frozenset(entry.reads)
            changes.append(Change(part.target, function, part.layer, reads, streaming))
        return Changes(changes)

    @property
    def needs_partner(self) -> bool:
        """Whether it takes something from a run on partner sequences."""
        return any(PARTNER in part.registered.reads for part in self.parts)

    @property
    def needs_labels(self) -> bool:
        """Whether it reads which tokens the input family has labelled."""
        return any(LABELS in part.registered.reads for part in self.parts)


INTERVENTIONS = Registry[RegisteredIntervention]("intervention")


def intervention(
    function: Callable[..., Any] | None = None,
    **facts: Any,  # noqa: ANN401 - fields of `RegisteredIntervention`
) -> Callable[..., Any]:
    """Register a function as an intervention, with fields of `RegisteredIntervention`."""
    if function is None:
        # Used as `@intervention(…)`: return the decorator itself.
        return partial(intervention, **facts)
    entry = RegisteredIntervention(function=function, **facts)
    targets = ("", *CHANGEABLE_WEIGHTS, *CHANGEABLE_EMBEDDINGS, *CHANGEABLE_ACTIVATIONS)
    if entry.target not in targets:
        raise ValueError(f"intervention {entry.name!r}: {unknown('target', entry.target, targets)}")
    # A misspelt parameter is found here, when the module is imported, not in the middle of a run.
    can_read = ("circuit",)
    if entry.target in CHANGEABLE_WEIGHTS:
        can_read += ("layer",)
    elif entry.target in CHANGEABLE_ACTIVATIONS:
        can_read += (*readable(entry.target), "W_E")
        can_read += ("b_Q", "scale") if entry.target == "attn_scores" else ()
    for name in entry.reads:
        if name not in can_read:
            what = f"thing that a change of {entry.target} reads"
            raise ValueError(f"intervention {entry.name!r}: {unknown(what, name, can_read)}")
    return INTERVENTIONS.add(entry).function


def bind(intervention: Intervention) -> BoundIntervention:
    """The functions and checked options of what a scan names.

    >>> from headcount.schemas.scans.intervention import parse_intervention
    >>> bound = bind(parse_intervention("zero_query_bias+scale_query_bias(0.50)"))
    >>> [(part.registered.name, part.options) for part in bound.parts]
    [('zero_query_bias', {}), ('scale_query_bias', {'alpha': 0.5})]
    """
    parts = tuple(map(_bound_part, intervention.parts))
    names = [str(part) for part in intervention.parts]
    for name in names:
        if name == str(NONE) and intervention != NONE:
            raise ScanError(
                f"interventions: '{intervention}': {NONE} is the untouched model and stands "
                "alone; leave it out, or name it as an intervention of its own"
            )
        if names.count(name) > 1:
            raise ScanError(
                f"interventions: '{intervention}': expected each intervention once, got {name} "
                f"{names.count(name)} times"
            )
    return BoundIntervention(intervention, parts)


MOST_SUBSTITUTES = 3  # interventions that a refusal names


def substitutes(entry: RegisteredIntervention, model: Model) -> list[str]:
    """Interventions of the same subject that a model can take, without controls.

    What is written in one file has one subject. Those come first that do the same, by the first
    word of their names.
    """
    names = [
        other.name
        for other in INTERVENTIONS.values()
        if other is not entry
        and other.function.__module__ == entry.function.__module__
        and other.target
        and "random" not in other.name
        and not {PARTNER, LABELS} & {*other.reads}
        and _can_take(other, model)
    ]
    verb = entry.name.partition("_")[0]
    same = [name for name in names if name.partition("_")[0] == verb]
    return (same or names)[:MOST_SUBSTITUTES]


def _can_take(entry: RegisteredIntervention, model: Model) -> bool:
    try:
        BoundPart(entry, {})._check_target(model)
    except ModelError:
        return False
    return True


def needs_partners(interventions: Iterable[Intervention]) -> bool:
    """Whether one of them takes something from a run on partner sequences."""
    return any(bind(intervention).needs_partner for intervention in interventions)


def _bound_part(part: InterventionPart) -> BoundPart:
    """A part of an intervention with its function, and with its options by name."""
    registered = INTERVENTIONS.named(part.name, "interventions")
    arguments: tuple[object, ...] = part.arguments
    last = len(registered.options) - 1
    # A last option that is a tuple takes all arguments that are left.
    is_tuple = [get_origin(option.annotation) is tuple for option in registered.options.values()]
    if is_tuple and is_tuple[-1] and len(arguments) > last:
        arguments = (*arguments[:last], arguments[last:])
    subject = f"interventions: '{part}': OPTION"
    options = INTERVENTIONS.bind(registered, arguments, field="interventions", subject=subject)
    return BoundPart(registered, options)
