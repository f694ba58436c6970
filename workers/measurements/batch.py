"""One forward pass, and what is kept of it.

A batch goes from tokens to columns in two steps. `launch` starts the pass, in which formulas are
evaluated layer by layer. `collect` waits for the results, checks them and puts them into columns.
On a GPU, results travel to the host while the next batch runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headcount.schemas.files.tables import HEADS, SEQUENCES
from headcount.schemas.formulas import Formula
from headcount.schemas.pattern import Labels
from headcount.schemas.scans.measured_heads import MeasuredHeads, find_heads
from headcount.schemas.statistics import STATISTICS
from headcount.workers.engine.engine import Engine
from headcount.workers.engine.fused_pattern import uniform_pattern
from headcount.workers.engine.prediction_inputs import PredictionInputs
from headcount.workers.engine.token_pairs import find_matches
from headcount.workers.measurements.layer_formulas import LayerFormulas, Requested
from headcount.workers.measurements.results import Column, Columns, Measurements, check_finite
from headcount.workers.measurements.undefined import defined_or_nan, where_defined
from headcount.workers.model.layer_weights import effective_or_nan


@dataclass(frozen=True)
class PendingBatch:
    """The results of a forward pass, which may still be on their way from the device."""

    columns: list[Column]
    heads: MeasuredHeads
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

    predictions = requested.computed("after the pass")
    # The pass fills `layer_formulas` with values, layer by layer.
    layer_formulas = LayerFormulas(engine.model, requested, tokens, shared_values)
    final_streams: list[Tensor] = []
    engine.run(
        tokens,
        matches,
        layer_formulas.evaluate,
        layer_formulas.read_late,
        final_streams.append if predictions else None,
        requested.heads.layers,
    )

    # Uniform attention is decided by the tokens and by what a query sees.
    uniform = uniform_pattern(matches, tokens, max(layer_formulas.windows, default=None))
    by_tokens = {**shared_values, "pattern": uniform}
    columns = list(layer_formulas.columns(by_tokens))
    if predictions:
        # Taken out of the list, so that the stream is freed with `inputs`.
        inputs = PredictionInputs(engine.model, final_streams.pop(), tokens)
        for kind, formula in predictions:
            values = defined_or_nan(formula, inputs)
            defined = where_defined(formula, inputs, values)
            values = values.float().masked_fill(~defined, torch.nan)
            columns.append(Column(kind.table, formula.name, formula, values))
    ready = None
    if tokens.device.type != "cpu":
        columns = _on_the_way_to_host(columns)
        # The copies are queued behind the pass. When the device has reached this event, they are
        # done; until then the pinned memory holds anything.
        ready = torch.cuda.Event()
        ready.record()
    return PendingBatch(columns, requested.heads, len(tokens), first, ready)


def _on_the_way_to_host(columns: Sequence[Column]) -> list[Column]:
    """Copies in pinned memory, which arrive while the device goes on: one for each format."""
    copied = list(columns)
    for dtype in {column.values.dtype for column in columns}:
        places = [i for i, column in enumerate(columns) if column.values.dtype == dtype]
        on_device = torch.cat([columns[i].values.flatten() for i in places])
        pinned = torch.empty(on_device.shape, dtype=dtype, pin_memory=True)
        pinned.copy_(on_device, non_blocking=True)
        parts = pinned.split([columns[i].values.numel() for i in places])
        for i, part in zip(places, parts, strict=True):
            copied[i] = columns[i]._replace(values=part.view(columns[i].values.shape))
    return copied


def collect(pending: PendingBatch) -> Measurements:
    """Wait for a forward pass, check its results, and put them into tables."""
    if pending.ready is not None:
        pending.ready.synchronize()
    check_finite(pending.columns, pending.heads, pending.first, pending.sequences)
    tables: dict[str, Columns] = {HEADS.name: {}, SEQUENCES.name: {}}
    for column in pending.columns:
        values = column.values.numpy()
        # Pinned memory is scarce, so what is kept is copied out of it.
        values = values if pending.ready is None else values.copy()
        tables.setdefault(column.table.name, {})[column.name] = values
    return Measurements(tables, pending.heads)
