"""One model on one device: measures every statistic of a scan on batches of sequences."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from headcount.schemas.errors import MeasureError, ModelError, ScanError, counted
from headcount.schemas.files.commit import Method
from headcount.schemas.plugins import activate
from headcount.schemas.scans.intervention import NONE, Intervention
from headcount.schemas.scans.scan import Scan
from headcount.workers.engine.changes import LABELS
from headcount.workers.engine.engine import Engine
from headcount.workers.engine.patching import with_partner
from headcount.workers.engine.prediction_inputs import check_unembedding
from headcount.workers.engine.rooms import (
    LOAD_MODEL,
    PROVEN_SWEEP,
    WEIGHT_TABLES,
    engine_class,
    entered,
)
from headcount.workers.engine.told_layers import told_by_layers
from headcount.workers.interventions import changed_weights
from headcount.workers.interventions.settlement import (
    Settled,
    check_bridge_precision,
    settle,
    settle_one,
)
from headcount.workers.measurements.batch import PendingBatch, Requested, collect, launch
from headcount.workers.measurements.results import Measurements
from headcount.workers.model.layer_weights import READ_THROUGH_BRIDGE
from headcount.workers.model.model import Model
from headcount.workers.model.model_info import ModelInfo

NO_MEMORY = ("allocate memory", "could not create a primitive")
"""What PyTorch and oneDNN say on a CPU if an allocation fails."""

Load = Callable[[ModelInfo, str, str, torch.dtype], Model]
"""Loads a model: its description, the processing of its weights, the device, their format."""


@dataclass(frozen=True)
class InterventionMeasurements(Measurements):
    """What was measured under one intervention, and how."""

    method: Method


class Replica:
    """A loaded model that measures."""

    tokens_measured = 0  # of the shard in hand, over all its interventions

    on_tokens: Callable[[int], None] = staticmethod(lambda _: None)
    """Called after each batch with `tokens_measured`, and within a long one with as many tokens of
    it as it has gone through layers.
    """

    def __init__(
        self, info: ModelInfo, scan: Scan, device: str = "auto", load: Load | None = None
    ) -> None:
        """`load` loads the model; None means from its files, for this replica alone."""
        self.device = resolve_device(device)
        activate(scan.plugins)
        self.scan = scan
        # The narrower precisions are formats of products, so weights stay float32.
        dtype = torch.float64 if scan.precision == "float64" else torch.float32
        try:
            self.model = (load or entered(LOAD_MODEL))(
                info, scan.weight_processing, self.device, dtype
            )
        except torch.OutOfMemoryError:
            # Only a GPU says so, and a replica has one.
            memory = torch.cuda.get_device_properties(self.device).total_memory
            raise ModelError(too_large_for_a_gpu(info.path, dtype, memory)) from None
        unused = self.model.unused_weights
        # The files hold more than config.json says, so one of them may be wrong.
        if unused and scan.unused_weights == "refuse":
            raise ModelError(
                f"{info.path}: {counted(len(unused), 'tensor')} of the weights have no place in "
                f"the model of config.json: {', '.join(unused[:3])}"
                f"{', …' if len(unused) > 3 else ''}; correct config.json, or set unused_weights = "
                '"ignore" to measure without them'
            )
        formulas = [formula for kind in scan.kinds() for formula in scan.formulas(kind)]
        names = {name for each in formulas for name in (*each.parameters, *each.conditions)}
        if scan.kinds("from the weights") or names & {*READ_THROUGH_BRIDGE}:
            # Now, because a pass that boots it would last seconds longer than the others.
            self.model.bridge()
        self.settlement = settle(self.model, scan, self.device)
        self.depth = scan.depth(self.model.info)  # how many layers a forward pass goes through
        # Without the formulas that such a model does not have.
        existing = {
            kind.field: [each for each in scan.formulas(kind) if each.exists(self.model.rotary)]
            for kind in scan.kinds()
        }
        self.requested = Requested(existing, scan.measured_heads(self.model.info))
        if self.requested.computed("after the pass") or scan.gradients:
            check_unembedding(self.model)
        self.untouched: tuple[np.ndarray, list[Tensor]] | None = None
        """Tokens that were measured last without an intervention, and `final_stream` of each batch.
        """
        self.free_since: float | None = None
        """When the last shard was measured. It tells how long the replica waited for the next."""
        # The activations of all layers are kept until the backward pass has used them.
        most_tokens = MOST_TOKENS[self.device] // (4 if scan.gradients else 1)
        self.batch = BatchSize(scan.batch_size, self.device, scan.n_ctx, most_tokens)
        self.engine = self._engine()

    def _engine(self) -> Engine:
        """What measures the untouched model."""
        scan = self.scan
        # Folding happens in the bridge alone, so folded weights are measured there.
        if scan.engine == "dense" or scan.weight_processing == "folded":
            return engine_class("dense")(self.model)
        # With the GPU's kernel if there is one that agrees with the tiles here.
        sweep = entered(PROVEN_SWEEP)(self.model, scan.n_ctx, self.precision, self.device)
        name = "gradient" if scan.gradients else "fused"
        return engine_class(name)(self.model, self.precision, sweep)

    def measure(
        self,
        tokens: np.ndarray,
        intervention: Intervention = NONE,
        labels: list[list[str]] | None = None,
        partner: np.ndarray | None = None,
    ) -> InterventionMeasurements:
        """Measure tokens `[sequence pos]`; a batch that does not fit the device's memory is halved.

        `labels` has a label or an empty text for each token. `partner` sequences are run first if
        the intervention takes something from them.
        """
        bound = self._settled(intervention).bound
        if bound.needs_labels and labels is None:
            raise ScanError(
                f"interventions: '{intervention}': reads which tokens are labelled, and no labels "
                "are given"
            )
        masks: dict[str, np.ndarray] = {}
        if labels and (bound.needs_labels or self.requested.reads(LABELS)):
            label_of_token = np.array(labels)  # [sequence pos], "" where a token has none.
            masks = {
                str(name): label_of_token == name for name in np.unique(label_of_token) if name
            }
        partner = partner if bound.needs_partner else None
        sequences = _Sequences(tokens, masks, partner, None, [])
        if intervention != NONE and self.requested.reads_untouched:
            sequences = sequences._replace(untouched=self._untouched(tokens, labels))
        with self.engine_under(intervention, partner) as engine:
            try:
                batches = self._batches(engine, sequences)
                measured = Measurements.of_batches(batches)
            except MeasureError as error:
                problem = self.model.weight_problem
                if problem is None:
                    raise
                raise MeasureError(f"{error}: {problem}") from None
        if intervention == NONE:
            self.untouched = tokens, sequences.final_streams
        method = engine.method(str(intervention), self.depth)
        return InterventionMeasurements(**vars(measured), method=method)

    def _untouched(self, tokens: np.ndarray, labels: list[list[str]] | None) -> Tensor:
        """`final_stream` of the untouched model `[sequence d_model]`, which is measured now if the
        same tokens were not measured last without an intervention.
        """
        if self.untouched is None or self.untouched[0] is not tokens:
            tokens_measured = self.tokens_measured
            self.measure(tokens, labels=labels)
            # It is no intervention of the scan.
            self.tokens_measured = tokens_measured
        assert self.untouched is not None
        return torch.cat(self.untouched[1])

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
        # The engine changes activations. Weights are changed in the model itself, and restored when
        # the block ends.
        changes = bound.changes(self.model)
        is_fused = settled.engine == "fused"
        engine = self.engine if is_fused else engine_class("dense")(self.model)
        # Tensors of inference mode can never have gradients.
        inference = torch.no_grad() if self.scan.gradients else torch.inference_mode()
        with inference, changed_weights(self.model, bound):
            yield engine.changed(changes)

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
        return entered(WEIGHT_TABLES)(self.model, self.scan)

    def _batches(self, engine: Engine, sequences: "_Sequences") -> Iterator[Measurements]:
        """What each batch found, in order, fetched and checked while a GPU computes the next."""
        start = 0
        pending: PendingBatch | None = None
        while start < len(sequences.tokens):
            began = time.perf_counter()
            launched: PendingBatch | None = None
            try:
                with self._told_while_it_runs(sequences, start):
                    launched = self._launch(engine, sequences, start)
            except RuntimeError as error:
                # On a CPU this error has no type of its own.
                says_no_memory = any(words in str(error) for words in NO_MEMORY)
                if not isinstance(error, torch.OutOfMemoryError) and not says_no_memory:
                    raise
            # Where memory has run out too: the batch before is whole, and its results leave the
            # device before fewer sequences are tried.
            if pending is not None:
                yield collect(pending)
                pending = None
            if launched is None:
                if self.batch.size == 1:
                    n_ctx = sequences.tokens.shape[1]
                    raise ModelError(
                        f"one sequence of {counted(n_ctx, 'token')} does not fit the memory; "
                        "lower n_ctx"
                    )
                self.batch.halve()
                continue  # The same sequences again, fewer at a time.
            pending = launched
            if self.batch.searching:
                # Sizes are compared by time, and a time means something only if the pass is over.
                yield collect(launched)
                pending = None
                self.batch.note(launched.sequences, time.perf_counter() - began)
            self.tokens_measured += launched.sequences * sequences.tokens.shape[1]
            self.on_tokens(self.tokens_measured)
            start += launched.sequences
        if pending is not None:
            yield collect(pending)

    def _told_while_it_runs(
        self, sequences: "_Sequences", first: int
    ) -> AbstractContextManager[None]:
        """Within it, people hear now and then how far the batch in hand is."""
        batch = sequences.tokens[first : first + self.batch.size]
        passes = 1 if sequences.partner is None else 2
        return told_by_layers(
            self.model.blocks[: self.depth],
            passes,
            bool(self.scan.gradients),
            lambda share: self.on_tokens(self.tokens_measured + int(share * batch.size)),
        )

    def _launch(self, engine: Engine, sequences: "_Sequences", first: int) -> PendingBatch:
        """Start the pass over a batch, after the pass over its partners if there are any."""
        batch = slice(first, first + self.batch.size)

        def on_device(array: np.ndarray) -> Tensor:
            tensor = torch.from_numpy(array[batch])
            if self.device == "cpu":
                return tensor
            # From pinned memory the copy is asynchronous: the device need not finish its work
            # first.
            return tensor.pin_memory().to(self.device, non_blocking=True)

        tokens = on_device(sequences.tokens).long()
        partner = None if sequences.partner is None else on_device(sequences.partner).long()
        labels = {name: on_device(mask) for name, mask in sequences.masks.items()}
        if LABELS in engine.changes.reads:
            engine = engine.changed(engine.changes.given({LABELS: labels}))
        patched_engine = with_partner(engine, partner, self.depth)
        untouched = None if sequences.untouched is None else sequences.untouched[batch]
        pending = launch(patched_engine, self.requested, tokens, first, labels, untouched)
        if pending.final_stream is not None:
            sequences.final_streams.append(pending.final_stream)
        return pending


class _Sequences(NamedTuple):
    """Sequences to measure `[sequence pos]`, with what belongs to each."""

    tokens: np.ndarray
    masks: Mapping[str, np.ndarray]  # where each label stands, by label
    partner: np.ndarray | None  # their partners, if the intervention needs them
    untouched: Tensor | None  # the untouched model's `final_stream`, if predictions read it
    final_streams: list[Tensor]  # takes the `final_stream` of each batch


def resolve_device(device: str) -> str:
    """What `auto` means on this machine: its GPU, if it has one."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def is_device_failure(error: Exception) -> bool:
    """Whether a device has failed so that only a new process mends it; want of memory is none."""
    is_device_error = isinstance(error, torch.AcceleratorError)
    return is_device_error and not isinstance(error, torch.OutOfMemoryError)


def too_large_for_a_gpu(model: str, dtype: torch.dtype, memory: int) -> str:
    """Why a model cannot be loaded, and how large one may be; `memory` in bytes.

    >>> too_large_for_a_gpu("llama", torch.float32, 24_000_000_000).partition(": take")[0][-46:]
    'holds less than 6.0 billion weights in float32'
    """
    most = memory / dtype.itemsize / 1e9
    format_name = str(dtype).removeprefix("torch.")
    return (
        f"{model}: a replica has one GPU, and this one, with {memory / 1e9:.0f} GB, holds less "
        f"than {most:.1f} billion weights in {format_name}: take a smaller model or a larger GPU, "
        "or --device cpu; headcount plan on a machine with that GPU says the same"
    )


FIRST_TOKENS = {"cpu": 2048, "cuda": 16384}  # of the first pass, if the size is searched
MOST_TOKENS = {"cpu": 16384, "cuda": 1 << 20}  # of a pass: a larger one gains nothing on a CPU

REQUIRED_GAIN = 1.05  # a larger batch has to be this much faster to be used

TRIALS = 2  # passes of each size while sizes are compared; the first lays out memory


class BatchSize:
    """How many sequences a forward pass takes: fixed, or found while the scan runs.

    It doubles as long as that is faster. If memory runs out, it halves for good.
    """

    def __init__(
        self, requested_size: int | str, device: str, n_ctx: int, most_tokens: int | None = None
    ) -> None:
        """`requested_size` is a number of sequences, or `auto`: up to so many tokens."""
        if isinstance(requested_size, int):
            self.size = requested_size
            self.largest = requested_size
        else:
            self.size = max(1, FIRST_TOKENS[device] // n_ctx)
            self.largest = max(1, (most_tokens or MOST_TOKENS[device]) // n_ctx)
        self.searching = self.size < self.largest
        self._seconds_of_trials: list[float] = []
        self._best_speed = 0.0
        self._best_size = self.size

    def halve(self) -> None:
        """Go on with half of the size, because memory ran out."""
        self.size //= 2
        self.largest = self.size
        self.searching = False

    def note(self, sequences: int, seconds: float) -> None:
        """A pass over a number of sequences took so long."""
        # The last batch of a shard is often not full, and its speed says nothing of the size.
        if not self.searching or sequences < self.size:
            return
        self._seconds_of_trials.append(seconds)
        if len(self._seconds_of_trials) < TRIALS:
            return
        speed = self.size / min(self._seconds_of_trials)
        if speed < REQUIRED_GAIN * self._best_speed:
            self.size, self.searching = self._best_size, False
            return
        self._best_speed, self._best_size = speed, self.size
        self._seconds_of_trials.clear()
        self.size = min(2 * self.size, self.largest)
        self.searching = self._best_size < self.largest
