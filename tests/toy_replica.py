"""A replica that computes nothing, for tests of what happens around it;
`python -m tests.toy_replica` is headcount with it.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from schemas.commits import Method
from schemas.intervention import NONE, Intervention
from schemas.measured_heads import MeasuredHeads
from schemas.statistics import KIND
from schemas.tables import chance_column
from workers.interventions.settlement import Settlement
from workers.model.model_info import ModelInfo
from workers.replica import InterventionMeasurements, Replica

PACE = 0.25
"""Seconds of a shard, so that there is time to disturb a run."""

SCALE = np.float32(2**26)
"""Divides numbers of less than 24 bits into every statistic's range, and loses none of their bits."""


class ToyReplica(Replica):
    """A replica that is there at once; its numbers tell sequences, layers, heads and statistics
    apart.
    """

    def __init__(self, info: ModelInfo, scan: Any, device: str = "auto") -> None:
        self.info, self.scan, self.free_since = info, scan, None
        self.device = "cpu"
        self.settlement = Settlement("float32", {})

    def measure(
        self,
        tokens: np.ndarray,
        intervention: Intervention = NONE,
        labels: list[list[str]] | None = None,
        partner: np.ndarray | None = None,
    ) -> InterventionMeasurements:
        """Numbers made of the tokens, after whatever this replica does first."""
        self.misbehave(int(tokens[0, 1]))
        statistics = self.scan.formulas(KIND)
        sequence = (tokens * np.arange(1, tokens.shape[1] + 1)).sum(1).astype(np.float32)
        method = Method(
            intervention=str(intervention),
            engine="none",
            precision="float32",
            attention="",
            built_layers=[],
        )
        head = np.arange(self.info.n_layers * self.info.n_heads, dtype=np.float32).reshape(
            1, self.info.n_layers, -1
        )
        heads = {
            s.name: (sequence[:, None, None] + head / 64 + i) / SCALE
            for i, s in enumerate(statistics)
        }
        chance = {chance_column(s.name): sequence / SCALE for s in statistics if s.chance}
        every = MeasuredHeads.every(self.info.n_layers, self.info.n_heads)
        return InterventionMeasurements({"heads": heads, "sequences": chance}, {}, every, method)

    def misbehave(self, token: int) -> None:
        """Nothing; `token` tells the shards apart."""


class SteadyReplica(ToyReplica):
    """Takes its time for every shard, and never measures one that begins with the token in a file
    `poison` beside the runs.
    """

    def misbehave(self, token: int) -> None:
        """Sleep, or fail."""
        time.sleep(PACE)
        poison = Path(self.scan.out) / "poison"
        if poison.is_file() and token == int(poison.read_text(encoding="utf-8")):
            raise MemoryError(f"poisoned by token {token}")


if __name__ == "__main__":
    import jobs.run_loop
    from headcount import main
    from tests import toy_replica

    jobs.run_loop.run_to_end = partial(jobs.run_loop.run_to_end, replica_class=toy_replica.SteadyReplica)
    main()
