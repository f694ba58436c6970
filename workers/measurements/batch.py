"""One forward pass, and what is kept of it.

A batch goes from tokens to columns in two steps. `launch` starts the pass, in which formulas are
evaluated layer by layer. `collect` waits for the results, checks them and puts them into columns.
On a GPU, results travel to the host while the next batch runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from headcount.schemas.files.tables import SEQUENCES, uniform_column
from headcount.schemas.formulas import Formula
from headcount.schemas.pattern import Labels
from headcount.schemas.scans.kinds import KINDS
from headcount.schemas.scans.measured_heads import MeasuredHeads, find_heads
from headcount.schemas.statistics import STATISTICS
from headcount.workers.engine.engine import Engine
from headcount.workers.engine.fused_pattern import uniform_pattern
from headcount.workers.engine.prediction_inputs import PredictionInputs
from headcount.workers.engine.token_pairs import find_matches
from headcount.workers.measurements.finite_checks import (
    check_lists,
    check_means,
    check_numbers,
    check_predictions,
)
from headcount.workers.measurements.layer_formulas import (
    LayerFormulas,
    LayerResults,
    where_defined,
    with_baseline,
)
from headcount.workers.measurements.profile_means import Aggregate, aggregates, merge
from headcount.workers.measurements.requested import Requested
from headcount.workers.measurements.undefined import defined_or_nan
from headcount.workers.model.layer_weights import effective_or_nan

Columns = dict[str, np.ndarray]


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
        """Values of the table `sequences`: uniform baselines and predictions."""
        return self.tables["sequences"]

    @classmethod
    def of_batches(cls, measured_batches: Iterable[Measurements]) -> Measurements:
        """What was measured on all batches, in order."""
        batches = list(measured_batches)
        first_batch = batches[0]
        tables: dict[str, Columns] = {}
        for table, columns in first_batch.tables.items():
            tables[table] = {
                name: np.concatenate([batch.tables[table][name] for batch in batches])
                for name in columns
            }
        means = {
            field: merge([batch.means[field] for batch in batches]) for field in first_batch.means
        }
        return cls(tables, means, first_batch.measured_heads)

    def first(self, count: int) -> Self:
        """The same with the values of the first sequences alone."""
        tables = {
            table: {name: values[:count] for name, values in columns.items()}
            for table, columns in self.tables.items()
        }
        return replace(self, tables=tables)


@dataclass(frozen=True)
class PredictionResults:
    """What the formulas of one kind gave after the pass."""

    values: dict[str, Tensor]
    """By formula: `[batch]` or `[batch pos]`."""
    defined: dict[str, Tensor]
    """Where these have a value, likewise."""


@dataclass(frozen=True)
class PendingBatch:
    """The results of a forward pass, which may still be on their way from the device."""

    requested: Requested
    layers: dict[str, LayerResults]
    """By field of the scan."""
    predictions: dict[str, PredictionResults]
    """By field of the scan."""
    sequences: int
    first: int
    """Position of the first sequence in its shard, for messages."""
    ready: torch.cuda.Event | None
    """When the results are on the host; None if they never left it."""


def measure_batch(engine: Engine, statistics: Sequence[Formula], tokens: Tensor) -> Measurements:
    """One forward pass over tokens `[batch pos]`."""
    all_heads = find_heads("all", "all", engine.model.info)
    requested = Requested({STATISTICS.field: statistics}, all_heads)
    return collect(launch(engine, requested, tokens))


def launch(
    engine: Engine,
    requested: Requested,
    tokens: Tensor,
    first: int = 0,
    labels: Labels | None = None,
) -> PendingBatch:
    """Start a forward pass over tokens `[batch pos]`; on a GPU this returns before it is done."""
    matches = find_matches(tokens)
    shared_values: dict[str, Any] = {
        **matches,
        "tokens": tokens,
        "labels": labels or {},
        "rotary": engine.model.rotary,
    }
    if requested.reads("effective"):
        shared_values["effective"] = effective_or_nan(engine.model, tokens.shape[1])

    # The pass fills `layer_formulas` with values, layer by layer.
    layer_formulas = LayerFormulas(engine.model, requested, tokens, shared_values)
    final_streams: list[Tensor] = []
    engine.run(
        tokens,
        matches,
        layer_formulas.evaluate,
        layer_formulas.read_late,
        final_streams.append if requested.has_predictions else None,
        requested.heads.layers,
    )

    # Uniform attention is decided by the tokens and by what a query sees.
    uniform = uniform_pattern(matches, tokens, max(layer_formulas.windows, default=None))
    by_tokens = {**shared_values, "pattern": uniform}
    layers = layer_formulas.results(tokens, by_tokens)
    predictions: dict[str, PredictionResults] = {}
    if requested.has_predictions:
        # Taken out of the list, so that the stream is freed with `inputs`.
        inputs = PredictionInputs(engine.model, final_streams.pop(), tokens)
        predictions = _predictions(requested, inputs)
    ready = None
    if tokens.device.type != "cpu":
        layers = {
            field: LayerResults(
                numbers=_copied_to_host(results.numbers),
                defined=_copied_to_host(results.defined),
                lists=_to_host(results.lists),
                means=_to_host(results.means),
                uniform_baseline=_copied_to_host(results.uniform_baseline),
            )
            for field, results in layers.items()
        }
        predictions = {
            field: PredictionResults(_to_host(results.values), _to_host(results.defined))
            for field, results in predictions.items()
        }
        # The copies are queued behind the pass. When the device has reached this event, they are
        # done; until then the pinned memory holds anything.
        ready = torch.cuda.Event()
        ready.record()
    return PendingBatch(requested, layers, predictions, len(tokens), first, ready)


def _predictions(requested: Requested, inputs: PredictionInputs) -> dict[str, PredictionResults]:
    """What is computed from the stream after the last norm, by field of the scan."""
    results: dict[str, PredictionResults] = {}
    for kind, formulas in requested.computed("after the pass"):
        values = {formula.name: defined_or_nan(formula, inputs) for formula in formulas}
        defined = {
            formula.name: where_defined(formula, inputs, values[formula.name])
            for formula in formulas
        }
        results[kind.field] = PredictionResults(values, defined)
    return results


def _to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _copied_to_host(tensor) for name, tensor in tensors.items()}


def _copied_to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, which arrives while the device goes on."""
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def collect(pending: PendingBatch) -> Measurements:
    """Wait for a forward pass, check its results, and put them into columns."""
    if pending.ready is not None:
        pending.ready.synchronize()
    heads = pending.requested.heads
    # Tables in which each formula is a column; kinds with `named_by` have rows for each formula.
    tables: dict[str, Columns] = {kind.table.name: {} for kind in KINDS if kind.named_by is None}
    means: dict[str, dict[str, Aggregate]] = {}
    for kind, formulas in pending.requested.computed("in every layer"):
        results = pending.layers[kind.field]
        if kind.averaged:
            means[kind.field] = aggregates(results.means)
            check_means(
                means[kind.field], _along(formulas), heads, pending.first, pending.sequences
            )
        else:
            columns, uniform_baseline = _checked_columns(pending, formulas, results)
            tables[kind.table.name] |= columns
            tables[SEQUENCES.name] |= uniform_baseline
    for kind, _ in pending.requested.computed("after the pass"):
        results = pending.predictions[kind.field]
        columns = _as_columns(results.values)
        defined = {name: where.numpy() for name, where in results.defined.items()}
        check_predictions(columns, defined, pending.first)
        # Only now: NaN would hide an infinity from the check.
        for name, values in columns.items():
            values[~defined[name]] = np.nan
        tables[kind.table.name] |= columns
    return Measurements(tables, means, heads)


def _checked_columns(
    pending: PendingBatch, formulas: Sequence[Formula], results: LayerResults
) -> tuple[Columns, Columns]:
    """The columns of a kind that is not averaged, and the uniform baselines of its statistics."""
    heads = pending.requested.heads
    names = [formula.name for formula in formulas if not formula.listed]
    # Pinned memory is scarce, so what is kept is copied out of it.
    numbers = dict(zip(names, results.numbers.numpy().copy(), strict=True))
    defined = dict(zip(names, results.defined.numpy(), strict=True))
    check_numbers(numbers, defined, heads, pending.first)
    # Only now: NaN would hide an infinity from the check.
    for name, values in numbers.items():
        values[~defined[name]] = np.nan
    lists = _as_columns(results.lists)
    check_lists(lists, _along(formulas), heads, pending.first)

    uniform_baseline: Columns = {}
    for statistic, values in zip(
        with_baseline(formulas), results.uniform_baseline.numpy(), strict=True
    ):
        uniform_baseline[uniform_column(statistic.name)] = np.where(
            defined[statistic.name], values, np.float32(np.nan)
        )
    return numbers | lists, uniform_baseline


def _along(formulas: Iterable[Formula]) -> dict[str, Formula]:
    """The formulas with an axis, by name."""
    return {formula.name: formula for formula in formulas if formula.axis}


def _as_columns(tensors: Mapping[str, Tensor]) -> Columns:
    """Copies as float32."""
    return {name: tensor.numpy().astype(np.float32) for name, tensor in tensors.items()}
