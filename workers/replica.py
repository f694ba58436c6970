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
from workers.interventions import ACTIVATIONS, edited_weights, find_intervention
from workers.models import ModelInfo, load_model
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
        engine = DenseEngine(self.model, {edit.target: edit.edit}) if edit.target in ACTIVATIONS else self.engine  # pyright: ignore
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
    for statistic, *columns in zip(statistics, *layers, strict=True):
        # What the heads of a layer share comes as [batch].
        values = torch.stack([c if c.dim() == 2 else c[:, None].expand(-1, n_heads) for c in columns], dim=1)
        defined = _defined(statistic, by_tokens, len(tokens))
        heads[statistic.name] = _where_defined(statistic, values.cpu().numpy(), defined, first)
        if statistic.chance:
            values = evaluate(statistic.compute, by_tokens)
            chance[chance_column(statistic.name)] = np.where(defined, values[:, 0].cpu().numpy(), np.nan)
    return heads, chance


def _defined(statistic: Statistic, by_tokens: Mapping[str, Any], batch: int) -> np.ndarray:
    """Whether the statistic has a value, per sequence."""
    if statistic.defined is None:
        return np.ones(batch, dtype=bool)
    defined = torch.as_tensor(evaluate(statistic.defined, by_tokens)).cpu().numpy()
    return np.broadcast_to(defined, (batch,))


def _where_defined(statistic: Statistic, values: np.ndarray, defined: np.ndarray, first: int) -> np.ndarray:
    """`values [batch layer head]` with NaN where the statistic is not defined; elsewhere they must be finite."""
    bad = ~np.isfinite(values) & defined[:, None, None]
    if bad.any():
        layer = int(bad.any(axis=(0, 2)).argmax())
        sequence, head = np.argwhere(bad[:, layer])[0]
        raise MeasureError(
            f"layer {layer}, head {head}: {statistic.name} is {values[sequence, layer, head]} for sequence "
            f"{first + sequence} of the shard; expected a finite number: look at the model's weights and precision"
        )
    return np.where(defined[:, None, None], values, np.nan)


def _join(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
