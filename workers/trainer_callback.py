"""Heads while they are trained: a callback for the Trainer of transformers.

```python
callback = headcount.MeasureCallback(tokens, every=500, statistics=["sink_mass"], out="heads")
Trainer(model, arguments, train_dataset=texts, callbacks=[callback]).train()
callback.table()
```

A training loop without the Trainer calls `headcount.measure` itself.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
from torch import nn
from transformers import TrainerCallback, TrainerState

from headcount.schemas.errors import ScanError
from headcount.schemas.files.parquet import parquet_bytes
from headcount.schemas.files.places import place, write_whole
from headcount.schemas.scans.arguments import Location, checked
from headcount.schemas.scans.scan import parse_scan
from headcount.schemas.scans.values import Count
from headcount.workers.measure_api import GIVEN, measure, whole_sequences


class MeasureCallback(TrainerCallback):
    """Measures all heads on the same tokens before, during and after a training."""

    @checked(ScanError)
    def __init__(
        self,
        tokens: object,
        *,
        every: Count = 500,
        statistics: Literal["standard", "all"] | Sequence[str] = "standard",
        out: Location | None = None,
    ) -> None:
        """`every` is a number of steps. `out` is a directory that gets a Parquet file each time."""
        self.tokens = whole_sequences(tokens)
        # Now, and not when the training has begun. The model is not known yet.
        sequences, n_ctx = self.tokens.shape
        names = statistics if isinstance(statistics, str) else list(statistics)
        scan = {"model": GIVEN, "n_ctx": n_ctx, "sequences": sequences, "statistics": names}
        parse_scan(scan | {"input": {"family": GIVEN}})
        self.every = every
        self.statistics = statistics
        self.out = None if out is None else place(str(out))
        self._tables: dict[int, pa.Table] = {}

    def table(self) -> pa.Table:
        """All rows so far: those of `headcount.measure`, and the column `step`."""
        if not self._tables:
            raise ScanError("the callback has measured nothing yet; the Trainer calls it")
        return pa.concat_tables(self._tables.values()).unify_dictionaries()

    # The Trainer names these methods and their parameters.

    def on_step_end(  # noqa: D102
        self, args: object, state: TrainerState, control: object, **others: object
    ) -> None:
        if state.global_step % self.every == 0:
            self.on_train_begin(args, state, control, **others)

    def on_train_begin(  # noqa: D102
        self, args: object, state: TrainerState, control: object, **others: object
    ) -> None:
        step, model = state.global_step, others["model"]
        if step in self._tables or not state.is_world_process_zero:
            return
        assert isinstance(model, nn.Module)
        rows = measure(model, self.tokens, self.statistics, run_id=f"step-{step}")
        steps = pa.array(np.full(rows.num_rows, step, np.int64))
        self._tables[step] = rows.append_column("step", steps)
        if self.out is not None:
            # Readers of the directory never see half of a file.
            file = self.out / f"step-{step:09d}.parquet"
            write_whole(file, parquet_bytes(self._tables[step]))

    on_train_end = on_train_begin
