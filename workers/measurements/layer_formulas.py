"""Evaluates the formulas of every layer while a forward pass goes through the model.

A formula is evaluated as soon as everything that it reads exists. So activations need not be kept,
and q, k and v are still in the cache when they are read.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from headcount.schemas.errors import ModelError
from headcount.schemas.formulas import Formula, Kind, evaluate
from headcount.schemas.scans.measured_heads import MeasuredHeads
from headcount.workers.engine.engine import Activations
from headcount.workers.measurements.profile_means import count_mean_m2, entries_of
from headcount.workers.measurements.requested import Requested
from headcount.workers.measurements.undefined import defined_or_nan
from headcount.workers.model.layer_weights import READABLE_WEIGHTS, attention_weights
from headcount.workers.model.model import Model

HEAD_AXIS = {
    **dict.fromkeys(("q", "unrotated_q", "k", "v", "z"), 2),
    **dict.fromkeys(("b_Q", "b_K", "W_K", "W_O"), 0),
}
"""The axis of heads of each of `schemas.statistics.LAYER_VALUES` that has one."""

LayerValue = Any
"""What a formula reads: a tensor, a pattern, pairs of tokens, labels, or a fact of the model."""


@dataclass(frozen=True)
class LayerResults:
    """What the formulas of one kind gave in the measured layers of a batch."""

    numbers: Tensor
    """`[formula batch layer head]`, or `[formula batch layer]`."""
    defined: Tensor
    """Where these have a value: `[formula batch]`."""
    lists: dict[str, Tensor]
    """By formula: `[batch layer head entry]`, or `[batch layer entry]`."""
    means: dict[str, Tensor]
    """By formula, count, mean and M2 over the batch: `[3 layer head entry]`, or
    `[3 layer entry]`.
    """
    uniform_baseline: Tensor
    """What uniform attention would score as the statistics `with_baseline`: `[statistic batch]`."""


class LayerFormulas:
    """The formulas that are evaluated in every layer, and their values so far."""

    def __init__(
        self,
        model: Model,
        requested: Requested,
        tokens: Tensor,
        shared_values: Mapping[str, LayerValue],
    ) -> None:
        """`shared_values` are what formulas read that is the same in every layer."""
        self.model = model
        self.heads = requested.heads
        self.shared_values = shared_values
        self.by_field: dict[str, _KindValues] = {}
        # A profile can be requested as a curve as well. It is evaluated once and stored twice.
        stores: dict[Formula, list[_KindValues]] = {}
        for kind, formulas in requested.computed("in every layer"):
            values = _KindValues(kind, formulas, tokens, requested.heads)
            self.by_field[kind.field] = values
            for formula in formulas:
                stores.setdefault(formula, []).append(values)
        self.evaluations = [
            _Evaluation(formula, frozenset(formula.parameters), stored_in)
            for formula, stored_in in stores.items()
        ]
        late_evaluations = [
            evaluation for evaluation in self.evaluations if "resid_post" in evaluation.reads
        ]
        self.read_late = _everything_read(late_evaluations)
        """What must be kept until the end of a layer, because it is read with `resid_post`."""
        self.read = _everything_read(self.evaluations)
        self.weight_names = self.read & {*READABLE_WEIGHTS}
        self.windows = set[int]()
        """How many keys the last query of a measured layer sees, of all layers."""
        self._weights: dict[int, Mapping[str, LayerValue]] = {}
        self._evaluated: set[tuple[int, int]] = set()

    def evaluate(self, layer: int, activations: Activations) -> None:
        """Evaluate what can be evaluated now and was not before.

        The fused engine calls this twice in a layer: after the attention, and at its end.
        """
        heads = self.heads.part(layer)
        # Not merged into one dict, because an engine may make a value when it is asked for.
        weights = self._weights_of(layer)
        unknown_weights = self.weight_names - weights.keys()
        sources = [weights, self.shared_values, _of_heads(activations, heads)]
        available = ChainMap(*cast(list[dict[str, LayerValue]], sources))
        available_names = {name for name in self.read if name in available}
        if "pattern" in available:
            self.windows.add(available["pattern"].window)
        for number, (formula, reads, stored_in) in enumerate(self.evaluations):
            if (layer, number) in self._evaluated:
                continue
            if reads & unknown_weights:
                for values in stored_in:
                    values.store_undefined(layer, formula)
                self._evaluated.add((layer, number))
                continue
            if not reads <= available_names:
                continue
            value = defined_or_nan(formula, available)
            for values in stored_in:
                values.store(layer, formula, value)
            self._evaluated.add((layer, number))

    def _weights_of(self, layer: int) -> Mapping[str, LayerValue]:
        """The weights that formulas read, of the measured heads of a layer."""
        if layer not in self._weights:
            weights = attention_weights(self.model, layer, self.weight_names)
            self._weights[layer] = _of_heads(weights, self.heads.part(layer))
        return self._weights[layer]

    def results(
        self, tokens: Tensor, by_tokens: Mapping[str, LayerValue]
    ) -> dict[str, LayerResults]:
        """The values of all layers, by field of the scan.

        `by_tokens` is what the tokens alone decide. Where a statistic has a value and what it is
        under uniform attention depend on nothing else.
        """
        results: dict[str, LayerResults] = {}
        for field, values in self.by_field.items():
            defined = [where_defined(f, by_tokens, tokens[:, 0]) for f in values.single_valued]
            # Uniform attention is the same in all heads, so its pattern has one.
            uniform_baseline = [
                evaluate(statistic.function, by_tokens, statistic.arguments)[:, 0]
                for statistic in with_baseline(values.formulas)
            ]
            if len(self.windows) > 1:
                # A sequence has one uniform baseline, and here every kind of layer would have its
                # own.
                uniform_baseline = [torch.full_like(level, torch.nan) for level in uniform_baseline]
            by_layer = values.by_layer()
            results[field] = LayerResults(
                numbers=values.numbers,
                defined=_stacked(defined),
                lists={} if values.kind.averaged else by_layer,
                means=by_layer if values.kind.averaged else {},
                uniform_baseline=_stacked(uniform_baseline),
            )
        return results


class _Evaluation(NamedTuple):
    """A formula, what it reads, and where its values go."""

    formula: Formula
    reads: frozenset[str]
    stored_in: list[_KindValues]


def _everything_read(evaluations: Sequence[_Evaluation]) -> set[str]:
    return set[str]().union(*(evaluation.reads for evaluation in evaluations))


class _KindValues:
    """The values of one kind of measurement in the layers of a batch."""

    def __init__(
        self, kind: Kind, formulas: Sequence[Formula], tokens: Tensor, heads: MeasuredHeads
    ) -> None:
        self.kind = kind
        self.formulas = formulas
        self.heads = heads
        self.has_head_axis = kind.table.has("head")
        self.single_valued = (
            [] if kind.averaged else [formula for formula in formulas if not formula.listed]
        )
        """Formulas whose value is one number; they share a tensor, which travels at once."""
        shape = [len(self.single_valued), len(tokens), len(heads.layers)]
        if self.has_head_axis:
            shape.append(heads.width)
        # A layer that an engine never shows must not look undefined: infinity is refused below, in
        # `check_numbers`.
        self.numbers = torch.full(shape, torch.inf, device=tokens.device)
        self.numbers_of = {
            formula.name: numbers
            for formula, numbers in zip(self.single_valued, self.numbers, strict=True)
        }
        self.layers_of: dict[str, list[Tensor]] = {
            formula.name: [] for formula in formulas if formula.name not in self.numbers_of
        }

    def store(self, layer: int, formula: Formula, value: Tensor) -> None:
        """Keep what a formula is in a layer, or the means of it."""
        if self.kind.averaged:
            # A formula along pairs is of each head. The others may be of what the heads share, and
            # then the value has no axis of heads.
            has_head_axis = value.dim() >= 3
            padded = _padded(value, self.heads.width) if has_head_axis else value
            self.layers_of[formula.name].append(count_mean_m2(formula, padded))
        elif formula.axis:
            value = entries_of(formula, value)
            self.layers_of[formula.name].append(self._for_each_head(value, 3, layer))
        else:
            place = self.heads.places[layer]
            self.numbers_of[formula.name][:, place] = self._for_each_head(value, 2, layer)

    def store_undefined(self, layer: int, formula: Formula) -> None:
        """Note that a formula has no value in a layer, because a weight that it reads is not known.

        Only formulas whose value is one number read weights.
        """
        self.numbers_of[formula.name][:, self.heads.places[layer]] = torch.nan

    def by_layer(self) -> dict[str, Tensor]:
        """All layers by formula: lists `[batch layer …]`, or count, mean and M2 `[3 layer …]`."""
        for name, layers in self.layers_of.items():
            if not layers:
                formula = self.kind[name]
                raise ModelError(
                    f"{self.kind.field}: {name} reads {', '.join(formula.parameters)}, and this "
                    "engine does not show all of them in this model; leave it out, or use the "
                    "other engine"
                )
        return {name: torch.stack(layers, dim=1) for name, layers in self.layers_of.items()}

    def _for_each_head(self, value: Tensor, dimensions: int, layer: int) -> Tensor:
        """A value with an axis of heads, as a row of each head needs it.

        What the heads of a layer share comes without this axis: it has fewer than `dimensions`.
        """
        if not self.has_head_axis:
            return value
        if value.dim() < dimensions:
            n_measured = len(self.heads.by_layer[layer])
            value_of_heads = value[:, None].expand(-1, n_measured, *value.shape[1:])
        else:
            value_of_heads = value
        return _padded(value_of_heads, self.heads.width)


def with_baseline(formulas: Sequence[Formula]) -> list[Formula]:
    """The statistics whose value under uniform attention is recorded."""
    return [f for f in formulas if f.uniform_baseline]


def where_defined(formula: Formula, values: Mapping[str, LayerValue], like: Tensor) -> Tensor:
    """Where a formula has a value, in the shape of `like`."""
    everywhere = torch.ones_like(like, dtype=torch.bool)
    if formula.defined is None:
        return everywhere
    return everywhere & evaluate(formula.defined, values, formula.arguments)


def _of_heads(
    values: Mapping[str, LayerValue], heads: tuple[int, ...] | None
) -> Mapping[str, LayerValue]:
    """What is known of a layer, of some of its heads alone; None means all."""
    return values if heads is None else _SomeHeads(values, heads)


class _SomeHeads(Mapping[str, LayerValue]):
    """Values of which some heads are selected when they are asked for."""

    def __init__(self, values: Mapping[str, LayerValue], heads: tuple[int, ...]) -> None:
        self.values_of_all = values
        self.heads = heads
        self.selected: dict[str, LayerValue] = {}
        """What was asked for. A pattern remembers its answers, so there must be one."""

    def __contains__(self, name: object) -> bool:
        return name in self.values_of_all

    def __getitem__(self, name: str) -> LayerValue:
        if name not in self.selected:
            value = self.values_of_all[name]
            if name == "pattern":
                value = value.only(self.heads)
            elif name in HEAD_AXIS:
                index = torch.tensor(self.heads, device=value.device)
                value = value.index_select(HEAD_AXIS[name], index)
            self.selected[name] = value
        return self.selected[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_of_all)

    def __len__(self) -> int:
        return len(self.values_of_all)


def _padded(value: Tensor, width: int) -> Tensor:
    """Values `[batch head …]` with NaN for the heads that other layers have more of."""
    missing_heads = width - value.shape[1]
    if not missing_heads:
        return value
    shape = (len(value), missing_heads, *value.shape[2:])
    return torch.cat([value, value.new_full(shape, torch.nan)], dim=1)


def _stacked(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors) if tensors else torch.empty(0)
