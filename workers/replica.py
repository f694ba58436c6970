"""One model on one device: measures every statistic of a scan on batches of sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schemas.errors import MeasureError, ModelError
from schemas.scan import Scan
from schemas.statistics import Statistic, evaluate, select
from schemas.tables import chance_column
from workers.engines import DenseEngine, FusedEngine
from workers.interventions import ACTIVATIONS, edited_weights, find_intervention, needs_bridge
from workers.loading import load_model
from workers.models import ModelInfo
from workers.pattern import find_matches, uniform_pattern

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 65536}
"""What `batch_size = "auto"` fills: enough to use the device, little enough to stay small."""


@dataclass(frozen=True)
class Measured:
    """Statistics of some sequences under one intervention; NaN where a statistic is not defined."""

    heads: dict[str, np.ndarray]
    """`[sequence layer head]`, float32, by statistic."""
    chance: dict[str, np.ndarray]
    """`[sequence]`, float32, by column of the `sequences` table."""
    engine: str


class Replica:
    """A loaded model that measures."""

    def __init__(self, info: ModelInfo, scan: Scan, device: str = "auto", threads: int | None = None) -> None:
        if threads:
            torch.set_num_threads(threads)
        self.device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self.scan = scan
        self.statistics = select(scan.statistics)
        self.model = load_model(info, scan.weights, self.device)
        self.batch_size = resolve_batch_size(scan, self.device)
        # Folding happens in the bridge alone, so folded weights are measured there.
        fused = scan.engine == "fused" and scan.weights == "raw"
        self.engine = FusedEngine(self.model) if fused else DenseEngine(self.model)

    def measure(self, tokens: np.ndarray, intervention: str = "none") -> Measured:
        """Measure tokens `[sequence pos]`; a batch that does not fit the device's memory is halved."""
        batches: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]] = []
        edit = find_intervention(intervention)
        edits = {edit.target: edit.edit} if edit.target in ACTIVATIONS else {}
        engine = DenseEngine(self.model, edits) if needs_bridge(self.model, edit) else self.engine
        start = 0
        with torch.inference_mode(), edited_weights(self.model, edit):
            while start < len(tokens):
                batch = torch.from_numpy(tokens[start : start + self.batch_size]).long().to(self.device)
                try:
                    batches.append(measure_batch(engine, self.statistics, batch, start))
                except torch.OutOfMemoryError:
                    if self.batch_size == 1:
                        raise ModelError(f"one sequence of {tokens.shape[1]} tokens does not fit the device") from None
                    self.batch_size //= 2
                    continue
                start += len(batch)
        heads, chance = zip(*batches, strict=True)
        return Measured(_join(heads), _join(chance), engine.name)


def resolve_batch_size(scan: Scan, device: str) -> int:
    """Sequences per forward pass: as the scan says, or as many as fill the device's token budget."""
    if scan.batch_size != "auto":
        return scan.batch_size
    return max(1, TOKENS_PER_BATCH[device] // scan.n_ctx)


def measure_batch(
    engine: FusedEngine | DenseEngine, statistics: Sequence[Statistic], tokens: Tensor, first: int = 0
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """One forward pass over tokens `[batch pos]`: columns of `heads` `[batch layer head]`, of `sequences` `[batch]`.

    `first` is the position of the first sequence in its shard, for messages.
    """
    matches = find_matches(tokens)
    layers: list[list[Tensor]] = []
    engine.run(tokens, matches, lambda _, seen: layers.append([evaluate(s.compute, seen) for s in statistics]))
    by_tokens = {"pattern": uniform_pattern(matches, tokens), **matches}
    n_heads = engine.model.info.n_heads
    heads: dict[str, np.ndarray] = {}
    chance: dict[str, np.ndarray] = {}
    defined: dict[str, np.ndarray] = {}
    for statistic, *columns in zip(statistics, *layers, strict=True):
        # What the heads of a layer share comes as [batch].
        values = torch.stack([c if c.dim() == 2 else c[:, None].expand(-1, n_heads) for c in columns], dim=1)
        defined[statistic.name] = _defined(statistic, by_tokens, len(tokens))
        heads[statistic.name] = values.cpu().numpy()
        if statistic.chance:
            values = evaluate(statistic.compute, by_tokens)
            chance[chance_column(statistic.name)] = np.where(
                defined[statistic.name], values[:, 0].cpu().numpy(), np.nan
            )
    _check_finite(heads, defined, first)
    return {name: np.where(defined[name][:, None, None], values, np.nan) for name, values in heads.items()}, chance


def _defined(statistic: Statistic, by_tokens: Mapping[str, Any], batch: int) -> np.ndarray:
    """Whether the statistic has a value, per sequence."""
    if statistic.defined is None:
        return np.ones(batch, dtype=bool)
    defined = torch.as_tensor(evaluate(statistic.defined, by_tokens)).cpu().numpy()
    return np.broadcast_to(defined, (batch,))


def _check_finite(heads: Mapping[str, np.ndarray], defined: Mapping[str, np.ndarray], first: int) -> None:
    """Raise `MeasureError` for the earliest layer that has a value which is defined and not finite."""
    bad = {name: ~np.isfinite(values) & defined[name][:, None, None] for name, values in heads.items()}
    layers = {name: int(where.any(axis=(0, 2)).argmax()) for name, where in bad.items() if where.any()}
    if layers:
        name = min(layers, key=lambda n: layers[n])
        layer = layers[name]
        sequence, head = np.argwhere(bad[name][:, layer])[0]
        raise MeasureError(
            f"layer {layer}, head {head}: {name} is {heads[name][sequence, layer, head]} for sequence {first + sequence} "
            "of the shard; expected a finite number: look at the model's weights and precision"
        )


def _join(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
