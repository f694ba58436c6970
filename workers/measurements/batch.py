"""One forward pass, and what is kept of it.

`launch` starts the pass: a formula is evaluated as soon as everything that it reads exists, so that
activations need not be kept. `collect` waits for the results and checks them. On a GPU results
travel to the host while the next batch runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from schemas.formulas import Along, Formula, evaluate
from schemas.kind import Computed, Kind
from schemas.kinds import KINDS
from schemas.measured_heads import MeasuredHeads
from schemas.pattern import Labels
from schemas.scan import Scan
from schemas.statistics import KIND as STATISTICS
from schemas.statistics import Statistic
from schemas.tables import SEQUENCES, chance_column
from workers.engine.engine import Activations, Engine
from workers.engine.fused_pattern import uniform_pattern
from workers.engine.prediction_inputs import PredictionInputs
from workers.engine.token_pairs import find_matches
from workers.measurements.finite_checks import (
    check_lists,
    check_means,
    check_numbers,
    check_predictions,
)
from workers.measurements.profile_means import Aggregate, aggregates, count_mean_m2, merge
from workers.measurements.undefined import defined_or_nan
from workers.model.layer_weights import (
    READABLE_WEIGHTS,
    attention_weights,
    effective_or_nan,
)
from workers.model.model import Model

Columns = dict[str, np.ndarray]

HEAD_AXIS = {"q": 2, "k": 2, "v": 2, "z": 2, "b_Q": 0, "b_K": 0, "W_K": 0, "W_O": 0}
"""The axis of heads of each of `schemas.statistics.LAYER_VALUES` that has one."""


@dataclass(frozen=True)
class Requested:
    """What is computed: which formulas, in which heads."""

    formulas: Mapping[str, Sequence[Formula]]
    """By field of the scan that names them."""
    heads: MeasuredHeads

    @classmethod
    def by(cls, scan: Scan, model: Model) -> Requested:
        """What a scan asks of a model, without the formulas that such a model does not have."""
        formulas = {
            kind.field: [f for f in scan.formulas(kind) if f.exists(model.rotary)]
            for kind in scan.kinds()
        }
        return cls(formulas, scan.measured_heads(model.info))

    def computed(self, when: Computed) -> Iterator[tuple[Kind[Any], Sequence[Formula]]]:
        """The kinds that are computed then, and their formulas."""
        for kind in KINDS:
            formulas = self.formulas.get(kind.field, ())
            if kind.computed == when and formulas:
                yield kind, formulas

    @property
    def in_layers(self) -> list[Formula]:
        """What is computed in every layer."""
        return [f for _, formulas in self.computed("in every layer") for f in formulas]

    @property
    def after_the_pass(self) -> bool:
        """Whether something is computed from what the model predicts."""
        return any(True for _ in self.computed("after the pass"))

    def reads(self, name: str) -> bool:
        """Whether a formula of a layer, or the rule that says where it has a value, reads this."""
        return any(name in (*f.parameters, *f.conditions) for f in self.in_layers)


@dataclass(frozen=True)
class Measurements:
    """What was measured on some sequences; NaN where it is not defined."""

    tables: dict[str, Columns]
    """Values of every sequence, float32, by table and column: `[sequence …]`, then `layer` and
    `head` where they are keys of the table, then the entries of a list.
    """
    means: dict[str, dict[str, Aggregate]]
    """Aggregates over the sequences, by field of the scan and formula."""
    measured_heads: MeasuredHeads
    """Which layer and head of the model each place on these axes is."""

    @property
    def heads(self) -> Columns:
        """Values of the table `heads`: `[sequence layer head]`, by statistic."""
        return self.tables["heads"]

    @property
    def sequences(self) -> Columns:
        """Values of the table `sequences`: chance levels and predictions."""
        return self.tables["sequences"]

    @classmethod
    def of(cls, parts: Iterable[Measurements]) -> Measurements:
        """What was measured on all of them, in order."""
        batches = list(parts)
        tables: dict[str, Columns] = {}
        for table, columns in batches[0].tables.items():
            tables[table] = {
                name: np.concatenate([batch.tables[table][name] for batch in batches])
                for name in columns
            }
        means = {
            field: merge([batch.means[field] for batch in batches]) for field in batches[0].means
        }
        return cls(tables, means, batches[0].measured_heads)

    def first(self, count: int) -> Self:
        """The same with the values of the first sequences alone."""
        tables = {
            table: {name: values[:count] for name, values in columns.items()}
            for table, columns in self.tables.items()
        }
        return replace(self, tables=tables)


@dataclass(frozen=True)
class PendingBatch:
    """The results of a forward pass, which may still be on their way from the device."""

    requested: Requested
    numbers: dict[str, Tensor]
    """By field: `[formula batch layer head]`, or `[formula batch layer]`."""
    defined: dict[str, Tensor]
    """By field, where these have a value: `[formula batch]`."""
    lists: dict[str, dict[str, Tensor]]
    """By field and formula: `[batch layer head entry]`, or `[batch layer entry]`."""
    means: dict[str, dict[str, Tensor]]
    """By field and formula, count, mean and M2 over the batch: `[3 layer head entry]`, or
    `[3 layer entry]`.
    """
    chance: dict[str, Tensor]
    """By field, what uniform attention would score as the statistics `with_chance`:
    `[statistic batch]`.
    """
    predictions: dict[str, dict[str, Tensor]]
    """By field and formula: `[batch]` or `[batch pos]`."""
    predicted: dict[str, dict[str, Tensor]]
    """Where these have a value, likewise."""
    sequences: int
    first: int
    """Position of the first sequence in its shard, for messages."""
    ready: torch.cuda.Event | None
    """When the results are on the host; none where they never left it."""


def with_chance(formulas: Iterable[Formula]) -> list[Statistic]:
    """Those of which it is recorded what uniform attention would score."""
    return [f for f in formulas if isinstance(f, Statistic) and f.chance]


def measure_batch(engine: Engine, statistics: Sequence[Statistic], tokens: Tensor) -> Measurements:
    """One forward pass over tokens `[batch pos]`."""
    info = engine.model.info
    every = MeasuredHeads.every(info.n_layers, info.n_heads)
    return collect(launch(engine, Requested({STATISTICS.field: statistics}, every), tokens))


def launch(
    engine: Engine,
    requested: Requested,
    tokens: Tensor,
    first: int = 0,
    labels: Labels | None = None,
) -> PendingBatch:
    """Start a forward pass; on a GPU this returns before it is done."""
    matches = find_matches(tokens)
    known: dict[str, Any] = {
        **matches,
        "tokens": tokens,
        "labels": labels or {},
        "rotary": engine.model.rotary,
    }
    if requested.reads("effective"):
        known["effective"] = effective_or_nan(engine.model, tokens.shape[1])

    layers = _Layers(engine, requested, tokens, known)
    final: list[Tensor] = []
    on_final = final.append if requested.after_the_pass else None
    engine.run(tokens, matches, layers.evaluate, layers.read_late, on_final, requested.heads.layers)

    # Chance levels, and where a statistic has a value, depend on the tokens alone.
    by_tokens = {**known, "pattern": uniform_pattern(matches, tokens)}
    chance: dict[str, Tensor] = {}
    defined: dict[str, Tensor] = {}
    for kind, formulas in requested.computed("in every layer"):
        single = layers.by_field[kind.field].single
        defined[kind.field] = _stacked([_where_defined(f, by_tokens, tokens[:, 0]) for f in single])
        chance[kind.field] = _stacked(
            [evaluate(s.compute, by_tokens)[:, 0] for s in with_chance(formulas)]
        )
    parts: dict[str, Any] = {
        "numbers": {field: values.numbers for field, values in layers.by_field.items()},
        "defined": defined,
        "lists": {f: v.by_layer() for f, v in layers.by_field.items() if not v.kind.averaged},
        "means": {f: v.by_layer() for f, v in layers.by_field.items() if v.kind.averaged},
        "chance": chance,
        **_predicted(engine, requested, final, tokens),
    }
    ready = None
    if tokens.device.type != "cpu":
        parts = _on_the_way_to_the_host(parts)
        ready = torch.cuda.Event()
        ready.record()
    return PendingBatch(requested, **parts, sequences=len(tokens), first=first, ready=ready)


class _Layers:
    """Evaluates formulas in every layer while a forward pass goes through the model."""

    def __init__(
        self,
        engine: Engine,
        requested: Requested,
        tokens: Tensor,
        known: Mapping[str, Any],
    ) -> None:
        self.known = known
        """What formulas read that is the same in every layer."""
        self.part = requested.heads.part
        self.by_field: dict[str, _Values] = {}
        # A profile can be requested as a curve as well; it is evaluated once and kept twice.
        kept_by: dict[Formula, list[_Values]] = {}
        for kind, formulas in requested.computed("in every layer"):
            values = _Values(kind, formulas, tokens, requested.heads)
            self.by_field[kind.field] = values
            for formula in formulas:
                kept_by.setdefault(formula, []).append(values)
        self.formulas = [(f, frozenset(f.parameters), kept) for f, kept in kept_by.items()]
        late = [names for _, names, _ in self.formulas if "resid_post" in names]
        self.read_late = set[str]().union(*late)
        """What must be kept until the end of a layer, because it is read with `resid_post`."""
        read = set[str]().union(*(names for _, names, _ in self.formulas))
        self.weights = cache(
            lambda layer: _of_heads(
                attention_weights(engine.model, layer, read & {*READABLE_WEIGHTS}),
                self.part(layer),
            )
        )
        self.done: set[tuple[int, int]] = set()

    def evaluate(self, layer: int, activations: Activations) -> None:
        """Evaluate what can be evaluated now and was not before; the engine may call this twice."""
        own = _of_heads(activations, self.part(layer))
        available = {**own, **self.known, **self.weights(layer)}
        for number, (formula, names, kept_by) in enumerate(self.formulas):
            if (layer, number) in self.done or not names <= available.keys():
                continue
            value = defined_or_nan(formula, available)
            for values in kept_by:
                values.keep(layer, formula, value)
            self.done.add((layer, number))


class _Values:
    """The values of one kind of measurement in the layers of a batch."""

    def __init__(
        self, kind: Kind[Any], formulas: Sequence[Formula], tokens: Tensor, heads: MeasuredHeads
    ) -> None:
        self.kind, self.heads = kind, heads
        self.by_head = kind.table.has("head")
        self.single = [] if kind.averaged else [f for f in formulas if not f.listed]
        """Formulas whose value is one number; they share a tensor, which travels at once."""
        width = (heads.width,) if self.by_head else ()
        shape = (len(self.single), len(tokens), len(heads.layers), *width)
        # A layer that an engine never shows must not look undefined: infinity is refused below.
        self.numbers = torch.full(shape, torch.inf, device=tokens.device)
        self.row = {f.name: row for f, row in zip(self.single, self.numbers, strict=True)}
        self.layers: dict[str, list[Tensor]] = {
            f.name: [] for f in formulas if f.name not in self.row
        }

    def keep(self, layer: int, formula: Formula, value: Tensor) -> None:
        """Keep what a formula is in a layer, or what is averaged of it."""
        if self.kind.averaged:
            assert isinstance(formula, Along)
            # A formula along pairs is of each head; the others may be what the heads share.
            by_head = value.dim() >= 3
            padded = _padded(value, self.heads.width) if by_head else value
            self.layers[formula.name].append(count_mean_m2(formula, padded))
        elif formula.listed:
            self.layers[formula.name].append(self._for_each_head(value, 3, layer))
        else:
            place = self.heads.places[layer]
            self.row[formula.name][:, place] = self._for_each_head(value, 2, layer)

    def by_layer(self) -> dict[str, Tensor]:
        """Lists `[batch layer …]`, or means `[3 layer …]`, by formula."""
        return {name: torch.stack(layers, dim=1) for name, layers in self.layers.items()}

    def _for_each_head(self, value: Tensor, dimensions: int, layer: int) -> Tensor:
        """What the heads of a layer share comes without their axis; a row of each head has it."""
        if not self.by_head:
            return value
        if value.dim() < dimensions:
            heads = len(self.heads.by_layer[layer])
            value = value[:, None].expand(-1, heads, *value.shape[1:])
        return _padded(value, self.heads.width)


def _of_heads(values: Mapping[str, Any], heads: tuple[int, ...] | None) -> Mapping[str, Any]:
    """What is known of a layer, of some of its heads alone; none means all."""
    if heads is None:
        return values
    return {name: _of_some(name, value, heads) for name, value in values.items()}


def _of_some(name: str, value: Any, heads: tuple[int, ...]) -> Any:
    if name == "pattern":
        return value.only(heads)
    if name not in HEAD_AXIS:
        return value
    return value.index_select(HEAD_AXIS[name], torch.tensor(heads, device=value.device))


def _padded(value: Tensor, width: int) -> Tensor:
    """Values `[batch head …]` with NaN for the heads that other layers have more of."""
    missing = width - value.shape[1]
    if not missing:
        return value
    return torch.cat([value, value.new_full((len(value), missing, *value.shape[2:]), torch.nan)], 1)


def _predicted(
    engine: Engine, requested: Requested, final: list[Tensor], tokens: Tensor
) -> dict[str, dict[str, dict[str, Tensor]]]:
    """What is computed from the stream after the last norm, and where it has a value."""
    predictions: dict[str, dict[str, Tensor]] = {}
    predicted: dict[str, dict[str, Tensor]] = {}
    if requested.after_the_pass:
        inputs = PredictionInputs(engine.model, final.pop(), tokens)
        for kind, formulas in requested.computed("after the pass"):
            values = {f.name: defined_or_nan(f, inputs) for f in formulas}
            predictions[kind.field] = values
            predicted[kind.field] = {
                f.name: _where_defined(f, inputs, values[f.name]) for f in formulas
            }
    return {"predictions": predictions, "predicted": predicted}


def _where_defined(formula: Formula, values: Mapping[str, Any], like: Tensor) -> Tensor:
    """Where a formula has a value, in the shape of `like`."""
    everywhere = torch.ones_like(like, dtype=torch.bool)
    return everywhere if formula.defined is None else everywhere & evaluate(formula.defined, values)


def _stacked(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors) if tensors else torch.empty(0)


def _on_the_way_to_the_host(part: Any) -> Any:
    """Copies in pinned memory, which arrive while the device goes on."""
    if isinstance(part, dict):
        return {name: _on_the_way_to_the_host(one) for name, one in part.items()}
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)


def collect(pending: PendingBatch) -> Measurements:
    """Wait for a forward pass; take and check what it found."""
    if pending.ready is not None:
        pending.ready.synchronize()
    tables: dict[str, Columns] = {kind.table.name: {} for kind in KINDS if kind.named_by is None}
    means: dict[str, dict[str, Aggregate]] = {}
    heads = pending.requested.heads
    for kind, formulas in pending.requested.computed("in every layer"):
        along = {formula.name: formula for formula in formulas if isinstance(formula, Along)}
        if kind.averaged:
            means[kind.field] = aggregates(pending.means[kind.field])
            check_means(means[kind.field], along, heads, pending.first, pending.sequences)
            continue
        single = [formula.name for formula in formulas if not formula.listed]
        # Pinned memory is scarce, so what is kept is copied out of it.
        numbers = dict(zip(single, pending.numbers[kind.field].numpy().copy(), strict=True))
        defined = dict(zip(single, pending.defined[kind.field].numpy(), strict=True))
        check_numbers(numbers, defined, heads, pending.first)
        for name, values in numbers.items():
            values[~defined[name]] = np.nan
        lists = _on_the_host(pending.lists[kind.field])
        check_lists(lists, along, heads, pending.first)
        tables[kind.table.name] |= numbers | lists
        chance = zip(with_chance(formulas), pending.chance[kind.field].numpy(), strict=True)
        for statistic, values in chance:
            column = np.where(defined[statistic.name], values, np.float32(np.nan))
            tables[SEQUENCES.name][chance_column(statistic.name)] = column
    for kind, _ in pending.requested.computed("after the pass"):
        predictions = _on_the_host(pending.predictions[kind.field])
        predicted = {n: where.numpy() for n, where in pending.predicted[kind.field].items()}
        check_predictions(predictions, predicted, pending.first)
        for name, values in predictions.items():
            values[~predicted[name]] = np.nan
        tables[kind.table.name] |= predictions
    return Measurements(tables, means, heads)


def _on_the_host(values: Mapping[str, Tensor]) -> Columns:
    """Copies as float32."""
    return {name: tensor.numpy().astype(np.float32) for name, tensor in values.items()}
