"""One forward pass, and what is kept of it.

A batch goes from tokens to columns in two steps. `launch` starts the pass, in which formulas are
evaluated layer by layer, each as soon as everything that it reads exists: so activations need not
be kept, and q, k and v are still in the cache when they are read. `collect` waits for the results,
checks them and puts them into columns. On a GPU, results travel to the host while the next batch
runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headcount.schemas.errors import ModelError
from headcount.schemas.formula_kinds import FROM_UNTOUCHED, LOGIT_PARTS
from headcount.schemas.formulas import Computed, Formula, Kind, evaluate
from headcount.schemas.kinds import KINDS
from headcount.schemas.measured_heads import MeasuredHeads
from headcount.schemas.pattern import Labels
from headcount.schemas.tables import HEADS, SEQUENCES, uniform_column
from headcount.workers.engine.engine import Activations, Engine, PassRequest
from headcount.workers.engine.fused_pattern import uniform_pattern
from headcount.workers.engine.prediction_inputs import PredictionInputs
from headcount.workers.engine.token_pairs import find_matches
from headcount.workers.measurements.moments import count_mean_m2, entries_of
from headcount.workers.measurements.results import Column, Columns, Measurements, check_finite
from headcount.workers.measurements.undefined import defined_or_nan, where_defined
from headcount.workers.model.layer_weights import (
    READABLE_WEIGHTS,
    attention_weights,
    effective_or_nan,
)
from headcount.workers.model.model import Model

HEAD_AXIS = {
    **dict.fromkeys(("q", "unrotated_q", "k", "v", "z", "dz", "dv", "direct_dz", "logit_dz"), 2),
    **dict.fromkeys(("b_Q", "b_K", "W_K", "W_O"), 0),
}
"""The axis of heads of each of `schemas.formula_kinds.LAYER_VALUES` that has one."""

LayerValue = Any  # what a formula reads: tensor, pattern, pairs of tokens, labels or a fact


@dataclass(frozen=True)
class Requested:
    """What a scan asks of one model: the formulas that this model has, and the heads."""

    formulas: Mapping[str, Sequence[Formula]]  # by field of the scan that names them
    heads: MeasuredHeads

    def computed(self, when: Computed) -> list[tuple[Kind, Formula]]:
        """The formulas that are computed at that time, each with its kind."""
        return [
            (kind, formula)
            for kind in KINDS
            if kind.computed == when
            for formula in self.formulas.get(kind.field, ())
        ]

    @property
    def gradients(self) -> frozenset[str]:
        """What formulas read that only a backward pass knows."""
        names = (formula.gradients for _, formula in self.computed("in every layer"))
        return frozenset[str]().union(*names)

    @property
    def reads_untouched(self) -> bool:
        """Whether a prediction holds a pass against one of the untouched model."""
        predictions = (formula for _, formula in self.computed("after the pass"))
        return any({*formula.parameters} & {*FROM_UNTOUCHED} for formula in predictions)

    def reads(self, name: str) -> bool:
        """Whether a formula of a layer reads this, or the rule that says where it has a value."""
        return any(
            name in formula.parameters or name in formula.conditions
            for _, formula in self.computed("in every layer")
        )


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
        self.tokens = tokens
        self.shared_values = shared_values
        self.requested = requested.computed("in every layer")
        self.kinds_of: dict[Formula, list[Kind]] = {}
        """A profile can be requested as a curve as well. It is evaluated once and stored twice."""
        for kind, formula in self.requested:
            self.kinds_of.setdefault(formula, []).append(kind)
        self.reads = {formula: frozenset(formula.parameters) for formula in self.kinds_of}
        self.read_names = frozenset[str]().union(*self.reads.values())
        self.read_late = set[str]().union(
            *(names for names in self.reads.values() if "resid_post" in names)
        )
        """What must be kept until the end of a layer, because it is read with `resid_post`."""
        self.weight_names = self.read_names & {*READABLE_WEIGHTS}
        self.windows = set[int]()  # how many keys last queries see, over measured layers
        self._values: dict[tuple[str, str], Tensor] = {}
        """By field of the scan and formula: `[batch layer …]`, or `[3 layer …]`."""
        self._weights: dict[int, Mapping[str, Tensor]] = {}  # by layer
        self._evaluated: set[tuple[int, Formula]] = set()

    def evaluate(self, layer: int, activations: Activations) -> None:
        """Evaluate what can be, and was not before: behind a layer's attention, and at its end."""
        heads = self.heads.part(layer)
        if layer not in self._weights:
            self._weights[layer] = attention_weights(self.model, layer, self.weight_names)
        weights = self._weights[layer]
        unknown_weights = {name for name in self.weight_names if name not in weights}
        of_all = LayerView(activations, weights, self.shared_values)
        of_heads = of_all if heads is None else of_all.only(heads)
        available_names = {name for name in self.read_names if name in of_heads}
        if "pattern" in of_heads:
            self.windows.add(of_heads["pattern"].window)
        for formula, reads in self.reads.items():
            if (layer, formula) in self._evaluated:
                continue
            if reads & unknown_weights:
                # Only formulas whose value is one number read weights.
                value = torch.full(self.tokens.shape[:1], torch.nan, device=self.tokens.device)
            elif not reads <= available_names:
                continue
            elif formula.needs_gradients:
                value = self._of_gradients(formula, of_all, heads)
            else:
                value = defined_or_nan(formula, of_heads)
            for kind in self.kinds_of[formula]:
                self._store(kind, formula, layer, value)
            self._evaluated.add((layer, formula))

    def _of_gradients(
        self, formula: Formula, values: Mapping[str, LayerValue], heads: tuple[int, ...] | None
    ) -> Tensor:
        """A formula that reads gradients, of all heads first: heads that share keys or values have
        one effect, and some of them may not be measured.
        """
        if any(values[name] is None for name in formula.parameters):
            shape = (len(self.tokens), LOGIT_PARTS) if formula.axis else (len(self.tokens),)
            return torch.full(shape, torch.nan, device=self.tokens.device)
        value = defined_or_nan(formula, values)
        has_heads = value.dim() > 1 and not formula.axis
        return value[:, list(heads)] if has_heads and heads is not None else value

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

    def columns(self, by_window: Sequence[Mapping[str, LayerValue]]) -> Iterator[Column]:
        """The values of all layers, and the uniform baselines.

        `by_window` is what the tokens alone decide, for each window of a layer. Where a statistic
        has a value and what it is under uniform attention depend on nothing else.
        """
        by_tokens = by_window[-1]
        for kind, formula in self.requested:
            values = self._values.get((kind.field, formula.name))
            if values is None:
                raise ModelError(
                    f"{kind.field}: {formula.name} reads {', '.join(formula.parameters)}, and "
                    "this engine does not show all of them in this model; leave it out, or use "
                    "the other engine"
                )
            defined = None
            if formula.defined is not None and not bool(formula.axis):
                defined = where_defined(formula, by_tokens, self.tokens[:, 0])
                values.masked_fill_(~defined.view(-1, *[1] * (values.dim() - 1)), torch.nan)
            yield Column(kind.table, formula.name, formula, values)
            if formula.uniform_baseline:
                # Uniform attention is the same in all heads, so its pattern has one.
                level, *others = (
                    evaluate(formula.function, one, formula.arguments)[:, 0].float()
                    for one in by_window
                )
                # A sequence has one uniform baseline: none if the windows of layers differ in it.
                for other in others:
                    level = level.masked_fill(~torch.isclose(level, other), torch.nan)
                if defined is not None:
                    level = level.masked_fill(~defined, torch.nan)
                yield Column(SEQUENCES, uniform_column(formula.name), formula, level)


class LayerView(Mapping[str, LayerValue]):
    """What formulas read of a layer: its activations, its weights, and what all layers share.

    It is no dict of all three, because an engine may make a value when it is asked for.
    """

    def __init__(
        self,
        activations: Mapping[str, LayerValue],
        weights: Mapping[str, LayerValue],
        shared: Mapping[str, LayerValue],
        heads: tuple[int, ...] | None = None,
    ) -> None:
        """`heads` are those that are looked at; None means all."""
        self.sources = (weights, shared, activations)
        self.heads = heads
        # Values of some heads are kept: a pattern remembers its answers.
        self._selected: dict[str, LayerValue] = {}

    def only(self, heads: tuple[int, ...]) -> "LayerView":
        """The same of some heads alone."""
        weights, shared, activations = self.sources
        return LayerView(activations, weights, shared, heads)

    def __getitem__(self, name: str) -> LayerValue:
        if name in self._selected:
            return self._selected[name]
        for source in self.sources:
            if name in source:
                return self._of_heads(name, source[name])
        raise KeyError(name)

    def _of_heads(self, name: str, value: LayerValue) -> LayerValue:
        if self.heads is None:
            return value
        if name == "pattern":
            value = value.only(self.heads)
        elif name in HEAD_AXIS:
            index = torch.tensor(self.heads, device=value.device)
            value = value.index_select(HEAD_AXIS[name], index)
        self._selected[name] = value
        return value

    def __contains__(self, name: object) -> bool:
        return any(name in source for source in self.sources)

    def __iter__(self) -> Iterator[str]:
        return iter({name for source in self.sources for name in source})

    def __len__(self) -> int:
        return len({*self})


@dataclass(frozen=True)
class PendingBatch:
    """The results of a forward pass, which may still be on their way from the device."""

    columns: list[Column]
    heads: MeasuredHeads
    sequences: int
    first: int  # position of the first sequence in its shard, for messages
    ready: torch.cuda.Event | None  # when the results are on the host; None if they never left it
    final_stream: Tensor | None
    """The stream behind the last norm at the last token `[batch d_model]`, on the device; None if
    the pass ended before.
    """


def launch(
    engine: Engine,
    requested: Requested,
    tokens: Tensor,
    first: int = 0,
    labels: Labels | None = None,
    untouched: Tensor | None = None,
) -> PendingBatch:
    """Start a forward pass over tokens `[batch pos]`; on a GPU this returns before it is done.

    `untouched` is the `final_stream` of the untouched model; None if nothing is changed.
    """
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
        PassRequest(
            tokens=tokens,
            matches=matches,
            on_layer=layer_formulas.evaluate,
            read_late=layer_formulas.read_late,
            on_final=final_streams.append if predictions else None,
            layers=requested.heads.layers,
            gradients=requested.gradients,
        )
    )

    # Uniform attention is decided by the tokens and by what a query sees.
    by_window = [
        {**shared_values, "pattern": uniform_pattern(matches, tokens, window)}
        for window in sorted(layer_formulas.windows) or [None]
    ]
    columns = list(layer_formulas.columns(by_window))
    final_stream = None
    if predictions:
        # Taken out of the list, so that the stream is freed with `inputs`.
        inputs = PredictionInputs(engine.model, final_streams.pop(), tokens, untouched)
        # A copy, which does not keep the other positions.
        final_stream = inputs.hidden[:, -1].clone()
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
    return PendingBatch(columns, requested.heads, len(tokens), first, ready, final_stream)


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
