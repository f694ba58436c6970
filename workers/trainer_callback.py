"""Heads while they are trained: a callback for the Trainer of transformers.

```python
callback = headcount.MeasureCallback(tokens, every=500, out="heads", on_alarm="stop")
Trainer(model, arguments, train_dataset=texts, callbacks=[callback]).train()
callback.table()
```

A training loop without the Trainer calls `headcount.watch` itself.
"""

import sys
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from headcount.schemas.arguments import Location, checked
from headcount.schemas.errors import HeadcountError, ModelError, ScanError, counted
from headcount.schemas.files.parquet import parquet_bytes
from headcount.schemas.places import Place, place, write_whole
from headcount.schemas.reasons import reason
from headcount.schemas.scans.scan_file import parse_scan
from headcount.schemas.values import Count
from headcount.schemas.watch.history import MeasuredStep, measured_step, read_table, step_files
from headcount.schemas.watch.rules import WATCHED
from headcount.workers.measure_api import GIVEN, measure, whole_sequences
from headcount.workers.watching import (
    OnAlarm,
    Sample,
    Watcher,
    facts_of,
    logged,
    refuse_sharded,
    ring,
    sample_of,
)

SAME_WEIGHTS = 1e-3  # how far a statistic of the same weights may differ on another device


class MeasureCallback(TrainerCallback):
    """Measures all heads on the same tokens before, during and after a training, and rings.

    The Trainer logs what is measured, wherever it logs the loss. What goes wrong while it measures
    does not end the training: it warns once and measures no more. Wrong arguments are refused when
    it is made or before the first step.
    """

    @checked(ScanError)
    def __init__(
        self,
        tokens: object,
        *,
        every: Count = 500,
        statistics: Literal["standard", "all", "effects"] | Sequence[str] = WATCHED,
        out: Location | None = None,
        log: Literal["model", "layers", "none"] = "model",
        on_alarm: OnAlarm = "warn",
        on_error: Literal["warn", "raise"] = "warn",
    ) -> None:
        """`every` is a number of steps. `out` is a directory that gets a Parquet file each time.

        By default it measures what the rules read. `log` says whether the Trainer logs numbers of
        the model, also of each layer, or none. `on_alarm` may be a function of an alarm.
        """
        self.tokens = whole_sequences(tokens)
        # Now, and not when the training has begun. The model is not known yet.
        sequences, n_ctx = self.tokens.shape
        statistic_names = statistics if isinstance(statistics, str) else list(statistics)
        scan = {"model": GIVEN, "n_ctx": n_ctx, "sequences": sequences}
        parse_scan(scan | {"statistics": statistic_names, "input": {"family": GIVEN}})
        self.every = every
        self.statistics = statistics
        self.out = None if out is None else place(str(out))
        self.log = log
        self.on_alarm: OnAlarm = on_alarm
        self.on_error = on_error
        self._watcher = Watcher()
        self._trainer: Any = None  # the Trainer that calls; none if something else does
        self._sample = Sample()  # of what the model is trained on
        self.has_failed = False  # whether it has warned, and measures no more
        self._tables: dict[int, pa.Table] = {}

    def table(self) -> pa.Table:
        """All rows of the training so far: those of `headcount.measure`, and the column `step`."""
        if not self._tables:
            raise ScanError("the callback has measured nothing yet; the Trainer calls it")
        return pa.concat_tables(self._tables.values()).unify_dictionaries()

    # The Trainer names these methods and their parameters.

    def on_train_begin(  # noqa: D102
        self, args: object, state: TrainerState, control: TrainerControl, **others: object
    ) -> None:
        model = others["model"]
        assert isinstance(model, nn.Module)
        # On every process: the others would wait for ever for one that has ended.
        refuse_sharded(model)
        if not state.is_world_process_zero:
            return
        step = state.global_step
        self.has_failed = False
        self._trainer, self._sample = _calling_trainer(), Sample()
        # What a training that is resumed had measured beyond its checkpoint is measured again.
        self._tables = {before: rows for before, rows in self._tables.items() if before < step}
        files = self._files_of_steps()
        if files and step == 0:
            raise ScanError(
                f"out: {self.out} holds {counted(len(files), 'step')} of an earlier training, "
                f"{min(files)} to {max(files)}, which would be mixed with this one; name another "
                "directory, or delete it"
            )
        try:
            rows = self._measured(others["model"], step)
            self._check_continues(files, step, rows)
        except (ScanError, ModelError):
            raise  # A wrong argument: nothing has been trained yet.
        except Exception as error:
            self._fail(step, error)
            return
        earlier = {other: file for other, file in files.items() if other < step}
        self._watcher = Watcher(
            [measured_step(other, read_table(file)) for other, file in earlier.items()]
        )
        self._keep(step, rows, [file for other, file in files.items() if other > step])
        self._tell(step, rows, control)

    def on_step_begin(  # noqa: D102
        self, args: object, state: TrainerState, control: TrainerControl, **others: object
    ) -> None:
        is_measured = (state.global_step + 1) % self.every == 0
        if self.has_failed or not is_measured or not state.is_world_process_zero:
            return
        model = others["model"]
        assert isinstance(model, nn.Module)

        def keep(module: nn.Module, arguments: object, inputs: dict[str, Any]) -> None:
            hook.remove()
            self._sample = sample_of(inputs)

        # A Trainer does not show its callbacks the batch.
        hook = model.register_forward_pre_hook(keep, with_kwargs=True)

    def on_step_end(  # noqa: D102
        self, args: object, state: TrainerState, control: TrainerControl, **others: object
    ) -> None:
        # At the end of a training loggers may be closed before this is called.
        is_last = state.global_step >= state.max_steps or control.should_training_stop
        if state.global_step % self.every == 0 or is_last:
            self.on_train_end(args, state, control, **others)

    def on_train_end(  # noqa: D102
        self, args: object, state: TrainerState, control: TrainerControl, **others: object
    ) -> None:
        step = state.global_step
        if self.has_failed or step in self._tables or not state.is_world_process_zero:
            return
        try:
            rows = self._measured(others["model"], step)
        except Exception as error:
            self._fail(step, error)
            return
        self._keep(step, rows)
        self._tell(step, rows, control)

    def _measured(self, model: object, step: int) -> pa.Table:
        assert isinstance(model, nn.Module)
        rows = measure(model, self.tokens, self.statistics, run_id=f"step-{step}")
        # The batch of a step says nothing of a later one.
        sample, self._sample = self._sample, Sample()
        rows = facts_of(model, sample).added_to(rows)
        return rows.append_column("step", pa.array(np.full(rows.num_rows, step, np.int64)))

    def _tell(self, step: int, rows: pa.Table, control: TrainerControl) -> None:
        """Log a step as the Trainer logs losses, and ring if a rule does."""
        try:
            noted = measured_step(step, rows)
            new = self._watcher.note(noted)
            self._log(noted, control)
        except Exception as error:
            self._fail(step, error)
            return
        for alarm in new:
            ring(alarm, self.on_alarm)
        if self.on_alarm == "stop" and not all(alarm.is_notice for alarm in new):
            control.should_training_stop = True

    def _log(self, noted: MeasuredStep, control: TrainerControl) -> None:
        if self._trainer is None or self.log == "none":
            return
        numbers = logged(noted, self.log == "layers")
        # To log takes back the Trainer's own wish to log the loss of this step.
        wishes_to_log = control.should_log
        self._trainer.log(numbers | {"heads/alarms": float(len(self._watcher.rung))})
        control.should_log = wishes_to_log

    def _keep(self, step: int, rows: pa.Table, replaced: Sequence[Place] = ()) -> None:
        """Keep the rows of a step, in `out` too, where they take the place of later steps."""
        self._tables[step] = rows
        if self.out is None:
            return
        try:
            for file in replaced:
                file.unlink(missing_ok=True)
            # Readers of the directory never see half of a file.
            write_whole(self.out / f"step-{step:09d}.parquet", parquet_bytes(rows))
        except Exception as error:
            self._fail(step, error)

    def _files_of_steps(self) -> dict[int, Place]:
        """The files in `out`, by step; none if it cannot be read: writing says why."""
        try:
            return {} if self.out is None else step_files(self.out)
        except (OSError, HeadcountError):
            return {}

    def _check_continues(self, files: dict[int, Place], step: int, rows: pa.Table) -> None:
        """Refuse to go on, from a checkpoint, in the files of another training."""
        before = max((other for other in files if other <= step), default=None)
        if before is None:
            return
        earlier = read_table(files[before])
        is_same = earlier.column_names == rows.column_names and earlier.num_rows == rows.num_rows
        if is_same and before == step:
            is_same = all(
                np.allclose(earlier[name], rows[name], SAME_WEIGHTS, SAME_WEIGHTS, equal_nan=True)
                for name in rows.column_names
                if pa.types.is_floating(rows.schema.field(name).type)
            )
        if not is_same:
            raise ScanError(
                f"out: {files[before]} has step {before} of another training than the one that is "
                "resumed (other tokens, statistics or weights); name the directory of this "
                "training, or a new one"
            )

    def _fail(self, step: int, error: Exception) -> None:
        self.has_failed = True
        if self.on_error == "raise":
            raise error
        what = reason(error) if isinstance(error, HeadcountError) else repr(error)
        warnings.warn(
            f"headcount measures no more from step {step} on, and the training goes on: {what}; "
            'on_error="raise" ends it instead',
            RuntimeWarning,
            stacklevel=3,
        )


def _calling_trainer() -> object | None:
    """The Trainer whose callbacks are being called; None if something else calls.

    A Trainer does not tell its callbacks who it is, and only it can log to all of its loggers.
    """
    from transformers import Trainer

    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    return None
