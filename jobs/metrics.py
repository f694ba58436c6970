"""What a run on Ray tells Prometheus, while it runs.

Each metric is defined here once: its name, kind, unit, tags and meaning. The same table is in
`docs/internals/operations.md`, and the dashboard in `deploy/grafana` draws them. Ray collects them
on every node and puts `ray_` before each name, and `_total` behind that of a counter.

Metrics are for watching. What was measured is in the commits: a process that is killed loses what
it has counted since Ray last collected it, 10 s at most.
"""

import socket
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

IDLE_WINDOW = 20
"""Commits over which a replica's idle share is taken."""


@dataclass(frozen=True)
class Metric:
    """A number that Prometheus can ask for."""

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    tags: tuple[str, ...]
    meaning: str

    def tell(self, value: float, **tags: str) -> None:
        """Add to a counter, or set a gauge; does nothing in a process without Ray."""
        # Importing Ray to find out would take 1 s.
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        if self.kind == "gauge":
            _of_ray(self).set(value, tags)
        elif value > 0:  # Ray takes no zero.
            _of_ray(self).inc(value, tags)


TOKENS_MEASURED = Metric(
    "headcount_tokens_measured", "counter", "tokens", ("run_id", "node"),
    "Tokens that went through the model, counted once for each intervention.",
)  # fmt: skip
TOKENS_PREPARED = Metric(
    "headcount_tokens_prepared", "counter", "tokens", ("node",),
    "Tokens that were written to a token store.",
)  # fmt: skip
SHARDS = Metric(
    "headcount_shards", "gauge", "shards", ("run_id", "state"),
    "Shards that the command was asked for: `waiting`, `running`, `done` or `failed`.",
)  # fmt: skip
SHARDS_REPEATED = Metric(
    "headcount_shards_repeated", "counter", "shards", ("run_id", "reason"),
    "Shards that were handed out again: `failed`, `died` (their replica), `node_lost`, `preempted` "
    "or `straggler`.",
)  # fmt: skip
PHASE_SECONDS = Metric(
    "headcount_phase_seconds", "counter", "seconds", ("run_id", "node", "phase"),
    "Seconds that replicas spent `reading`, `measuring` and `writing`. The three overlap.",
)  # fmt: skip
IDLE_SHARE = Metric(
    "headcount_replica_idle_share", "gauge", "share, 0 to 1", ("run_id", "node", "replica"),
    f"Share of its time that a replica waited for tokens, over its last {IDLE_WINDOW} commits.",
)  # fmt: skip
BAD_ROWS = Metric(
    "headcount_bad_rows", "counter", "rows", ("run_id", "node"),
    "Rows of the corpus that could not be read, in the shards that were committed.",
)  # fmt: skip


@cache
def node_name() -> str:
    """The name of this machine, as commits have it."""
    return socket.gethostname()


@cache
def _of_ray(metric: Metric) -> Any:  # noqa: ANN401 - a counter or a gauge
    from ray.util.metrics import Counter, Gauge

    return (Counter if metric.kind == "counter" else Gauge)(
        metric.name, metric.meaning, metric.tags
    )
