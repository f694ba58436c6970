"""Replicas that compute nothing, for tests of what happens around a replica.

`tests.tools.processes.Command` with the main `tests.toys.toy_replica.main` is headcount with such a
replica.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headcount.schemas.files.commit import Method
from headcount.schemas.measured_heads import MeasuredHeads
from headcount.schemas.scans.intervention import NONE, Intervention
from headcount.schemas.statistics import STATISTICS
from headcount.schemas.tables import uniform_column
from headcount.workers.interventions.settlement import Settlement
from headcount.workers.model.model_info import ModelInfo
from headcount.workers.replica import InterventionMeasurements, Replica

PACE = 0.25
"""Seconds for each shard, so that there is time to disturb a run."""

SCALE = np.float32(2**26)
"""Numbers of less than 24 bits that are divided by this fit every statistic's range, exactly."""


class ToyReplica(Replica):
    """A replica that needs no model. Its numbers differ by sequence, layer, head and statistic."""

    def __init__(self, info: ModelInfo, scan: Any, device: str = "auto") -> None:
        self.info = info
        self.scan = scan
        self.free_since = None
        self.device = "cpu"
        self.settlement = Settlement("float32", {})

    def measure(
        self,
        tokens: np.ndarray,
        intervention: Intervention = NONE,
        labels: list[list[str]] | None = None,
        partner: np.ndarray | None = None,
    ) -> InterventionMeasurements:
        """Numbers made of the tokens, after `misbehave`."""
        self.misbehave(int(tokens[0, 1]))
        statistics = self.scan.formulas(STATISTICS)
        # Whole numbers below 2**24: float32 holds their sums exactly, wherever they are computed.
        places = np.arange(1, tokens.shape[1] + 1)
        of_sequence = (tokens * places).sum(1).astype(np.float32)
        n_layers, n_heads = self.info.n_layers, self.info.n_heads
        of_head = np.arange(n_layers * n_heads, dtype=np.float32).reshape(1, n_layers, -1) / 64
        heads = {
            statistic.name: (of_sequence[:, None, None] + of_head + number) / SCALE
            for number, statistic in enumerate(statistics)
        }
        with_baseline = [statistic.name for statistic in statistics if statistic.uniform_baseline]
        uniform_baseline = {uniform_column(name): of_sequence / SCALE for name in with_baseline}
        facts: Any = {"engine": "none", "precision": "float32", "attention": "", "built_layers": []}
        method = Method(intervention=str(intervention), **facts)
        every_head = MeasuredHeads.every(n_layers, n_heads)
        return InterventionMeasurements(
            {"heads": heads, "sequences": uniform_baseline}, every_head, method
        )

    def misbehave(self, token: int) -> None:
        """What goes wrong with a shard, here nothing. `token` tells the shards apart."""


class SteadyReplica(ToyReplica):
    """Takes its time for every shard.

    It never measures a shard that begins with the token in a file `poison` beside the runs.
    """

    def misbehave(self, token: int) -> None:
        """Sleep, or fail."""
        time.sleep(PACE)
        poison = Path(self.scan.out) / "poison"
        if poison.is_file() and token == int(poison.read_text(encoding="utf-8")):
            raise MemoryError(f"poisoned by token {token}")


def main() -> None:
    """`headcount …` with steady replicas."""
    import headcount.command_line
    import headcount.jobs.run.measuring

    headcount.jobs.run.measuring.run_to_end = partial(
        headcount.jobs.run.measuring.run_to_end, replica_class=SteadyReplica
    )
    headcount.command_line.main()
