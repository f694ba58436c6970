"""Heads while they are trained: a callback for the Trainer of transformers.

```python
callback = headcount.MeasureCallback(tokens, every=500, statistics=["sink_mass"], out="heads")
Trainer(model, arguments, train_dataset=texts, callbacks=[callback]).train()
callback.table()
```

A training loop without the Trainer calls `headcount.measure` itself.
"""

import re
import warnings
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import nn
from transformers import TrainerCallback, TrainerState

from headcount.schemas.arguments import Location, checked
from headcount.schemas.errors import HeadcountError, ModelError, ScanError, counted
from headcount.schemas.files.parquet import parquet_bytes
from headcount.schemas.places import Place, names, place, reason, write_whole
from headcount.schemas.scans.scan import parse_scan
from headcount.schemas.values import Count
from headcount.workers.measure_api import GIVEN, measure, whole_sequences

STEP_FILE = re.compile(r"step-(\d{9,})\.parquet")  # the name of a step's file in `out`

SAME_WEIGHTS = 1e-3  # how far a statistic of the same weights may differ on another device


class MeasureCallback(TrainerCallback):
    """Measures all heads on the same tokens before, during and after a training.

    What goes wrong while it measures does not end the training: it warns once and measures no
    more. Wrong arguments are refused when it is made or before the first step.
    """

    @checked(ScanError)
    def __init__(
        self,
        tokens: object,
        *,
        every: Count = 500,
        statistics: Literal["standard", "all", "effects"] | Sequence[str] = "standard",
        out: Location | None = None,
        on_error: Literal["warn", "raise"] = "warn",
    ) -> None:
        """`every` is a number of steps. `out` is a directory that gets a Parquet file each time."""
        self.tokens = whole_sequences(tokens)
        # Now, and not when the training has begun. The model is not known yet.
        sequences, n_ctx = self.tokens.shape
        statistic_names = statistics if isinstance(statistics, str) else list(statistics)
        scan = {"model": GIVEN, "n_ctx": n_ctx, "sequences": sequences}
        parse_scan(scan | {"statistics": statistic_names, "input": {"family": GIVEN}})
        self.every = every
        self.statistics = statistics
        self.out = None if out is None else place(str(out))
        self.on_error = on_error
        self.has_failed = False  # whether it has warned, and measures no more
        self._tables: dict[int, pa.Table] = {}

    def table(self) -> pa.Table:
        """All rows of the training so far: those of `headcount.measure`, and the column `step`."""
        if not self._tables:
            raise ScanError("the callback has measured nothing yet; the Trainer calls it")
        return pa.concat_tables(self._tables.values()).unify_dictionaries()

    # The Trainer names these methods and their parameters.

    def on_train_begin(  # noqa: D102
        self, args: object, state: TrainerState, control: object, **others: object
    ) -> None:
        if not state.is_world_process_zero:
            return
        step = state.global_step
        self.has_failed = False
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
        self._keep(step, rows, [file for other, file in files.items() if other > step])

    def on_step_end(  # noqa: D102
        self, args: object, state: TrainerState, control: object, **others: object
    ) -> None:
        if state.global_step % self.every == 0:
            self.on_train_end(args, state, control, **others)

    def on_train_end(  # noqa: D102
        self, args: object, state: TrainerState, control: object, **others: object
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

    def _measured(self, model: object, step: int) -> pa.Table:
        assert isinstance(model, nn.Module)
        rows = measure(model, self.tokens, self.statistics, run_id=f"step-{step}")
        return rows.append_column("step", pa.array(np.full(rows.num_rows, step, np.int64)))

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
        if self.out is None:
            return {}
        try:
            matches = [STEP_FILE.fullmatch(name) for name in names(self.out)]
        except (OSError, HeadcountError):
            return {}
        return {int(match[1]): self.out / match[0] for match in matches if match is not None}

    def _check_continues(self, files: dict[int, Place], step: int, rows: pa.Table) -> None:
        """Refuse to go on, from a checkpoint, in the files of another training."""
        before = max((other for other in files if other <= step), default=None)
        if before is None:
            return
        earlier = pq.read_table(pa.BufferReader(files[before].read_bytes()))
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
