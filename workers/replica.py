"""One model on one device: measures every statistic of a scan on batches of sequences."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from schemas.commits import Method
from schemas.errors import MeasureError, ModelError, counted
from schemas.intervention import NONE, Intervention
from schemas.scan import Scan
from workers.engine.dense_engine import DenseEngine
from workers.engine.engine import Engine
from workers.engine.fused_engine import FusedEngine
from workers.engine.kernel_check import proven_sweep
from workers.engine.patching import with_partner
from workers.engine.prediction_inputs import check_unembedding
from workers.interventions import edited_weights
from workers.interventions.settlement import Settled, check_bridge_precision, settle, settle_one
from workers.measurements.batch import Measurements, PendingBatch, Requested, collect, launch
from workers.measurements.batch_size import BatchSize
from workers.measurements.weight_tables import tables_of_weights
from workers.model.loading import load_model
from workers.model.model_info import ModelInfo


@dataclass(frozen=True)
class InterventionMeasurements(Measurements):
    """What was measured under one intervention, and how."""

    method: Method


class Replica:
    """A loaded model that measures."""

    def __init__(self, info: ModelInfo, scan: Scan, device: str = "auto") -> None:
        self.device = resolve_device(device)
        self.scan = scan
        dtype = torch.float64 if scan.precision == "float64" else torch.float32
        self.model = load_model(info, scan.weight_processing, self.device, dtype)
        self.settlement = settle(self.model, scan, self.device)
        self.depth = scan.depth(self.model.info)
        """How many layers a forward pass goes through."""
        self.requested = Requested.by(scan, self.model)
        if self.requested.after_the_pass:
            check_unembedding(self.model)
        self.free_since: float | None = None
        """When the last shard was measured, for knowing how long the replica waited for the next.
        """
        self.batch = BatchSize(scan.batch_size, self.device, scan.n_ctx)
        # Folding happens in the bridge alone, so folded weights are measured there.
        fused = scan.engine == "fused" and scan.weight_processing == "raw"
        self.engine: Engine = self._fused_engine() if fused else DenseEngine(self.model)

    def _fused_engine(self) -> FusedEngine:
        """The fused engine, with the GPU's kernel if it agrees with the tiles here."""
        sweep = proven_sweep(self.model.info, self.scan.n_ctx, self.precision, self.device)
        return FusedEngine(self.model, self.precision, sweep)

    def measure(
        self,
        tokens: np.ndarray,
        intervention: Intervention = NONE,
        labels: list[list[str]] | None = None,
        partner: np.ndarray | None = None,
    ) -> InterventionMeasurements:
        """Measure tokens `[sequence pos]`, labelled or not; a batch that does not fit the device's
        memory is halved.

        `partner` sequences are run first where the intervention takes something from them.
        """
        if not self._settled(intervention).bound.needs_partner:
            partner = None
        with self.engine_under(intervention, partner) as engine:
            masks = _masks(labels) if labels and self.requested.reads("labels") else {}
            try:
                measured = Measurements.of(self._batches(engine, tokens, masks, partner))
            except MeasureError as error:
                if (problem := self.model.weight_problem) is None:
                    raise
                raise MeasureError(f"{error}: {problem}") from None
        method = engine.method(str(intervention), self.depth)
        return InterventionMeasurements(**vars(measured), method=method)

    @contextmanager
    def engine_under(
        self, intervention: Intervention, partner: np.ndarray | None
    ) -> Iterator[Engine]:
        """The engine that measures under an intervention, while the model has its weights."""
        settled = self._settled(intervention)
        bound = settled.bound
        if bound.needs_partner and partner is None:
            raise ModelError(
                f"{intervention}: takes something from the run on partner sequences, and none are "
                "given"
            )
        edits = bound.edits(self.model)
        fused = settled.engine == "fused"
        engine = self.engine.edited(edits) if fused else DenseEngine(self.model, edits)
        with torch.inference_mode(), edited_weights(self.model, bound):
            yield engine

    @property
    def precision(self) -> str:
        """The precision of everything that it measures."""
        return self.settlement.precision

    def _settled(self, intervention: Intervention) -> Settled:
        """How an intervention is measured; one that the scan does not name is settled now."""
        settled = self.settlement.interventions.get(intervention)
        if settled is None:
            settled = settle_one(self.model, self.scan, intervention)
            check_bridge_precision(settled, self.precision)
        return settled

    def weights(self) -> dict[str, pa.Table]:
        """What the scan asks of the weights of the untouched model, by table."""
        return tables_of_weights(self.model, self.scan)

    def _batches(
        self,
        engine: Engine,
        tokens: np.ndarray,
        masks: dict[str, np.ndarray],
        partner: np.ndarray | None,
    ) -> Iterator[Measurements]:
        """What each batch found, in order; a GPU computes the next batch while one is being
        fetched.
        """
        start = 0
        waiting: PendingBatch | None = None
        while start < len(tokens):
            began = time.perf_counter()
            try:
                some = slice(start, start + self.batch.size)
                batch = self._to_device(torch.from_numpy(tokens[some]).long())
                labels = {
                    name: self._to_device(torch.from_numpy(mask[some]))
                    for name, mask in masks.items()
                }
                others = (
                    None
                    if partner is None
                    else self._to_device(torch.from_numpy(partner[some]).long())
                )
                patched = with_partner(engine, others, self.depth)
                launched = launch(patched, self.requested, batch, start, labels)
            except RuntimeError as error:
                if not _out_of_memory(error):
                    raise
                if self.batch.size == 1:
                    raise ModelError(
                        f"one sequence of {counted(tokens.shape[1], 'token')} does not fit the memory; lower "
                        "n_ctx"
                    ) from None
                self.batch.halve()
                continue
            if waiting is not None:
                yield collect(waiting)
            waiting = launched
            if self.batch.searching:
                yield collect(launched)
                waiting = None
                self.batch.note(len(batch), time.perf_counter() - began)
            start += len(batch)
        if waiting is not None:
            yield collect(waiting)

    def _to_device(self, batch: Tensor) -> Tensor:
        return (
            batch if self.device == "cpu" else batch.pin_memory().to(self.device, non_blocking=True)
        )


def resolve_device(device: str) -> str:
    """What `auto` means on this machine: its GPU, if it has one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def broken(error: Exception) -> bool:
    """Whether a device has failed in a way that only a new process mends: after one such error
    every call raises it.
    """
    return isinstance(error, torch.AcceleratorError) and not isinstance(
        error, torch.OutOfMemoryError
    )


def _out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed; on a CPU that has no type of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def _masks(labels: list[list[str]]) -> dict[str, np.ndarray]:
    """Where each label stands: `[sequence pos]` by label."""
    every = np.array(labels)
    return {str(name): every == name for name in np.unique(every) if name}
