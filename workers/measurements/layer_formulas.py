"""Evaluates the formulas of every layer while a forward pass goes through the model.

A formula is evaluated as soon as everything that it reads exists. So activations need not be kept,
and q, k and v are still in the cache when they are read.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from headcount.schemas.errors import ModelError
from headcount.schemas.files.tables import SEQUENCES, uniform_column
from headcount.schemas.formulas import Formula, Kind, evaluate
from headcount.workers.engine.engine import Activations
from headcount.workers.measurements.moments import count_mean_m2, entries_of
from headcount.workers.measurements.requested import Requested
from headcount.workers.measurements.results import Column
from headcount.workers.measurements.undefined import defined_or_nan, where_defined
from headcount.workers.model.layer_weights import READABLE_WEIGHTS, attention_weights
from headcount.workers.model.model import Model

HEAD_AXIS = {
    **dict.fromkeys(("q", "unrotated_q", "k", "v", "z"), 2),
    **dict.fromkeys(("b_Q", "b_K", "W_K", "W_O"), 0),
}
"""The axis of heads of each of `schemas.statistics.LAYER_VALUES` that has one."""

LayerValue = Any
"""What a formula reads: a tensor, a pattern, pairs of tokens, labels, or a fact of the model."""


class _Evaluation(NamedTuple):
    """A formula, what it reads, and the kinds of measurement that store it."""

    formula: Formula
    reads: frozenset[str]
    kinds: list[Kind]


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
        self.requested = requested
        self.heads = requested.heads
        self.tokens = tokens
        self.shared_values = shared_values
        # A profile can be requested as a curve as well. It is evaluated once and stored twice.
        kinds_of_formula: dict[Formula, list[Kind]] = {}
        for kind, formulas in requested.computed("in every layer"):
            for formula in formulas:
                kinds_of_formula.setdefault(formula, []).append(kind)
        self.evaluations = [
            _Evaluation(formula, frozenset(formula.parameters), kinds)
            for formula, kinds in kinds_of_formula.items()
        ]
        self.read = set[str]().union(*(reads for _, reads, _ in self.evaluations))
        self.read_late = set[str]().union(
            *(reads for _, reads, _ in self.evaluations if "resid_post" in reads)
        )
        """What must be kept until the end of a layer, because it is read with `resid_post`."""
        self.weight_names = self.read & {*READABLE_WEIGHTS}
        self.windows = set[int]()
        """How many keys the last query of a measured layer sees, of all layers."""
        self._values: dict[tuple[str, str], Tensor] = {}
        """By field of the scan and formula: `[batch layer …]`, or `[3 layer …]`."""
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
        for number, (formula, reads, kinds) in enumerate(self.evaluations):
            if (layer, number) in self._evaluated:
                continue
            if reads & unknown_weights:
                # Only formulas whose value is one number read weights.
                value = torch.full(self.tokens.shape[:1], torch.nan, device=self.tokens.device)
            elif reads <= available_names:
                value = defined_or_nan(formula, available)
            else:
                continue
            for kind in kinds:
                self._store(kind, formula, layer, value)
            self._evaluated.add((layer, number))

    def _store(self, kind: Kind, formula: Formula, layer: int, value: Tensor) -> None:
        """Keep what a formula is in a layer, or its moments over the batch."""
        is_list = bool(formula.axis)
        if is_list:
            value = entries_of(formula, value)
        # What the heads of a layer share comes without their axis. Rows of heads repeat it; rows of
        # means have it once.
        has_heads = value.dim() == (3 if is_list else 2)
        n_heads = len(self.heads.by_layer[layer])
        if kind.averaged:
            value = count_mean_m2(value)
        elif not has_heads and kind.table.has("head"):
            value = value[:, None].expand(-1, n_heads, *value.shape[1:])
            has_heads = True
        values = self._values.get((kind.field, formula.name))
        if values is None:
            shape = [len(value), len(self.heads.layers), *value.shape[1:]]
            if has_heads:
                shape[2] = self.heads.width
            dtype = torch.float64 if kind.averaged else torch.float32
            # A layer that an engine never shows must not look undefined: `check_finite` refuses
            # infinity.
            values = torch.full(shape, torch.inf, dtype=dtype, device=value.device)
            self._values[kind.field, formula.name] = values
        of_layer = values[:, self.heads.places[layer]]
        if has_heads and n_heads < self.heads.width:
            of_layer[:, n_heads:] = torch.nan  # Other layers have more heads.
            of_layer = of_layer[:, :n_heads]
        of_layer.copy_(value)

    def _weights_of(self, layer: int) -> Mapping[str, LayerValue]:
        """The weights that formulas read, of the measured heads of a layer."""
        if layer not in self._weights:
            weights = attention_weights(self.model, layer, self.weight_names)
            self._weights[layer] = _of_heads(weights, self.heads.part(layer))
        return self._weights[layer]

    def columns(self, by_tokens: Mapping[str, LayerValue]) -> Iterator[Column]:
        """The values of all layers, and the uniform baselines.

        `by_tokens` is what the tokens alone decide. Where a statistic has a value and what it is
        under uniform attention depend on nothing else.
        """
        for kind, formulas in self.requested.computed("in every layer"):
            for formula in formulas:
                if (kind.field, formula.name) not in self._values:
                    raise ModelError(
                        f"{kind.field}: {formula.name} reads {', '.join(formula.parameters)}, and "
                        "this engine does not show all of them in this model; leave it out, or use "
                        "the other engine"
                    )
                values = self._values[kind.field, formula.name]
                defined = None
                if formula.defined is not None and not bool(formula.axis):
                    defined = where_defined(formula, by_tokens, self.tokens[:, 0])
                    values.masked_fill_(~defined.view(-1, *[1] * (values.dim() - 1)), torch.nan)
                yield Column(kind.table, formula.name, formula, values)
                if formula.uniform_baseline:
                    # Uniform attention is the same in all heads, so its pattern has one.
                    level = evaluate(formula.function, by_tokens, formula.arguments)[:, 0].float()
                    if len(self.windows) > 1:
                        # A sequence has one uniform baseline, and here every kind of layer would
                        # have its own.
                        level = torch.full_like(level, torch.nan)
                    elif defined is not None:
                        level = level.masked_fill(~defined, torch.nan)
                    yield Column(SEQUENCES, uniform_column(formula.name), formula, level)


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
