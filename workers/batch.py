"""One forward pass and what is kept of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schemas.errors import MeasureError
from schemas.formulas import Formula, evaluate
from schemas.pattern import Labels
from schemas.predictions import Prediction, compute_predictions
from schemas.profiles import Profile
from schemas.statistics import Statistic
from schemas.tables import chance_column
from workers.engine.engine import Activations, Engine
from workers.engine.fused_pattern import uniform_pattern
from workers.engine.prediction_inputs import check_predictions, prediction_inputs
from workers.engine.token_pairs import find_matches
from workers.model.layer_weights import (
    READABLE_WEIGHTS,
    attention_weights,
    effective_or_nan,
)
from workers.profile_means import Profiles, aggregates, check_curves, merge, reduced
from workers.undefined import defined_or_nan

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Requested:
    """What is measured on every sequence."""

    statistics: Sequence[Statistic]
    profiles: Sequence[Profile] = ()
    curves: Sequence[Profile] = ()
    """Profiles that are kept of every sequence."""
    predictions: Sequence[Prediction] = ()

    @property
    def formulas(self) -> tuple[Formula, ...]:
        """What is computed in every layer, each once."""
        return tuple(dict.fromkeys((*self.statistics, *self.profiles, *self.curves)))

    def reads(self, name: str) -> bool:
        """Whether one of them, or the rule that says where it has a value, reads something."""
        return any(name in (*f.parameters, *f.conditions) for f in self.formulas)


@dataclass(frozen=True)
class Measurements:
    """What was measured on some sequences; NaN where it is not defined."""

    heads: Columns
    """`[sequence layer head]`, float32, by statistic."""
    sequences: Columns
    """`[sequence]` or `[sequence pos]`, float32, by column of the `sequences` table: chance levels
    and predictions.
    """
    curves: Columns
    """`[sequence layer head entry]`, float32, by profile that is kept of every sequence."""
    profiles: Profiles
    """Aggregates over the sequences, by profile."""

    @classmethod
    def of(cls, parts: Iterable[Measurements]) -> Measurements:
        """What was measured on all of them, in order."""
        every = list(parts)
        heads, sequences, curves = (
            {name: np.concatenate([part[name] for part in table]) for name in table[0]}
            for table in (
                [p.heads for p in every],
                [p.sequences for p in every],
                [p.curves for p in every],
            )
        )
        return cls(heads, sequences, curves, merge([p.profiles for p in every]))


@dataclass(frozen=True)
class PendingBatch:
    """The results of a forward pass, which may still be on their way from the device."""

    asked: Requested
    values: Tensor
    """`[statistic batch layer head]`."""
    chance: Tensor
    """`[statistic batch]`, in the order of the statistics that have a chance level."""
    defined: Tensor
    """`[statistic batch]`."""
    profiles: dict[str, Tensor]
    """Count, mean and M2 over the batch, by profile: `[3 layer head entry]`, or `[3 layer entry]`."""
    curves: dict[str, Tensor]
    """`[batch layer head entry]`, by profile that is kept of every sequence."""
    predictions: dict[str, Tensor]
    """`[batch]` or `[batch pos]`, by column of `sequences`."""
    n_ctx: int
    first: int
    """Position of the first sequence in its shard, for messages."""
    ready: Any
    """A CUDA event, or None where the results are there."""


def measure_batch(engine: Engine, statistics: Sequence[Statistic], tokens: Tensor) -> Measurements:
    """One forward pass over tokens `[batch pos]`."""
    return collect(launch(engine, Requested(statistics), tokens))


def launch(
    engine: Engine,
    asked: Requested,
    tokens: Tensor,
    first: int = 0,
    labels: Labels | None = None,
) -> PendingBatch:
    """Start a forward pass; on a GPU this returns before it is done."""
    matches = find_matches(tokens)
    given = {
        **matches,
        "tokens": tokens,
        "labels": labels or {},
        "rotary": engine.model.rotary,
    }
    if asked.reads("effective"):
        given["effective"] = effective_or_nan(engine.model, tokens.shape[1])
    layers = _Layers(engine, asked, tokens, given)
    final: list[Tensor] = []
    engine.run(
        tokens, matches, layers.see, layers.late, final.append if asked.predictions else None
    )
    predictions = (
        compute_predictions(asked.predictions, prediction_inputs(engine.model, final.pop(), tokens))
        if asked.predictions
        else {}
    )
    by_tokens = {"pattern": uniform_pattern(matches, tokens), **given}
    chance = [evaluate(s.compute, by_tokens)[:, 0] for s in asked.statistics if s.chance]
    defined = [_defined(s, by_tokens, tokens) for s in asked.statistics]
    parts = {
        "values": layers.values,
        "chance": torch.stack(chance) if chance else tokens.new_empty(0),
        "defined": torch.stack(defined),
        "profiles": {
            name: torch.stack(by_layer, dim=1) for name, by_layer in layers.profiles.items()
        },
        "curves": {name: torch.stack(by_layer, dim=1) for name, by_layer in layers.curves.items()},
        "predictions": predictions,
    }
    ready = None
    if tokens.device.type != "cpu":
        parts = {name: _fetched(part) for name, part in parts.items()}
        ready = torch.cuda.Event()
        ready.record()
    return PendingBatch(asked, **parts, n_ctx=tokens.shape[1], first=first, ready=ready)


class _Layers:
    """What is kept of every layer while a forward pass goes through them."""

    def __init__(
        self,
        engine: Engine,
        asked: Requested,
        tokens: Tensor,
        given: Mapping[str, Any],
    ) -> None:
        self.asked, self.given = asked, given
        info = engine.model.info
        self.n_heads = info.n_heads
        shape = (len(asked.statistics), len(tokens), info.n_layers, info.n_heads)
        self.values = torch.full(shape, torch.nan, device=tokens.device)
        self.row = {s.name: row for s, row in zip(asked.statistics, self.values, strict=True)}
        self.profiles: dict[str, list[Tensor]] = {p.name: [] for p in asked.profiles}
        self.curves: dict[str, list[Tensor]] = {c.name: [] for c in asked.curves}
        self.late = {
            name for f in asked.formulas if "resid_post" in f.parameters for name in f.parameters
        }
        """What must be kept until the end of a layer."""
        read = {name for f in asked.formulas for name in f.parameters}.intersection(
            READABLE_WEIGHTS
        )
        self.weights = cache(lambda layer: attention_weights(engine.model, layer, read))
        self.done: set[tuple[int, str]] = set()

    def see(self, layer: int, activations: Activations) -> None:
        """Compute what can be computed by now."""
        seen = {**activations, **self.given, **self.weights(layer)}
        for formula in self.asked.formulas:
            if (layer, formula.name) not in self.done and all(
                name in seen for name in formula.parameters
            ):
                self._keep(layer, formula, defined_or_nan(formula, seen))
                self.done.add((layer, formula.name))

    def _keep(self, layer: int, formula: Formula, value: Tensor) -> None:
        if formula.name in self.row:
            # What the heads of a layer share comes as [batch].
            self.row[formula.name][:, layer] = value if value.dim() == 2 else value[:, None]
        if formula.name in self.profiles and isinstance(formula, Profile):
            self.profiles[formula.name].append(reduced(formula, value))
        if formula.name in self.curves:
            self.curves[formula.name].append(
                value if value.dim() == 3 else value[:, None].expand(-1, self.n_heads, -1)
            )


def _fetched(part: Any) -> Any:
    """A copy in pinned memory, on its way from the device."""
    if isinstance(part, dict):
        return {name: _fetched(one) for name, one in part.items()}
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)


def collect(launched: PendingBatch) -> Measurements:
    """Wait for a forward pass and take what it found."""
    if launched.ready is not None:
        launched.ready.synchronize()
    statistics = launched.asked.statistics
    names = [s.name for s in statistics]
    # Pinned memory is scarce, so what is kept is copied out of it.
    heads = dict(zip(names, launched.values.numpy().copy(), strict=True))
    defined = dict(zip(names, launched.defined.numpy(), strict=True))
    _check_finite(heads, defined, launched.first)
    for name, values in heads.items():
        values[~defined[name]] = np.nan
    with_chance = [s.name for s in statistics if s.chance]
    chance = {
        chance_column(name): np.where(defined[name], values, np.float32(np.nan))
        for name, values in zip(with_chance, launched.chance.numpy(), strict=True)
    }
    predictions = {
        name: values.numpy().astype(np.float32) for name, values in launched.predictions.items()
    }
    check_predictions(predictions, launched.n_ctx, launched.first)
    curves = {name: values.numpy().astype(np.float32) for name, values in launched.curves.items()}
    check_curves(curves, launched.first)
    return Measurements(
        heads,
        chance | predictions,
        curves,
        aggregates(launched.profiles, launched.first, launched.values.shape[1]),
    )


def _defined(statistic: Statistic, by_tokens: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """Whether the statistic has a value, per sequence."""
    always = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
    return always if statistic.defined is None else always & evaluate(statistic.defined, by_tokens)


def _check_finite(
    heads: Mapping[str, np.ndarray], defined: Mapping[str, np.ndarray], first: int
) -> None:
    """Raise `MeasureError` for the earliest layer that has a value which is defined and not finite;
    NaN is undefined (`workers.undefined`).
    """
    bad = {name: np.isinf(values) & defined[name][:, None, None] for name, values in heads.items()}
    layers = {
        name: int(where.any(axis=(0, 2)).argmax()) for name, where in bad.items() if where.any()
    }
    if layers:
        name = min(layers, key=lambda n: layers[n])
        layer = layers[name]
        sequence, head = np.argwhere(bad[name][:, layer])[0]
        raise MeasureError(
            f"layer {layer}, head {head}: {name} is not finite for sequence {first + sequence} "
            "of the shard; expected a finite number: look at the model's weights and precision"
        )
