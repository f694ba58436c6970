"""What a run on Ray tells Prometheus, while it runs.

Each metric is defined here once: its name, kind, unit, tags and meaning. The same table is in
`docs/internals/operations.md`, and the dashboard in `deploy/grafana` draws them. Ray collects them
on every node and puts `ray_` before each name, and `_total` behind that of a counter.

Metrics are for watching. What was measured is in the commits: a process that is killed loses what
it has counted since Ray last collected it, 10 s at most.
"""

from __future__ import annotations

import socket
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ray.util.metrics import Counter, Gauge

    from headcount.schemas.files.commit import Commit
    from headcount.workers.shard import MeasuredShard

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

    @property
    def exported_name(self) -> str:
        """The name by which Prometheus knows it."""
        return f"ray_{self.name}{'_total' if self.kind == 'counter' else ''}"


TOKENS_MEASURED = Metric(
    "headcount_tokens_measured",
    "counter",
    "tokens",
    ("run_id", "node"),
    "Tokens that went through the model, counted once for each intervention.",
)
TOKENS_PREPARED = Metric(
    "headcount_tokens_prepared",
    "counter",
    "tokens",
    ("node",),
    "Tokens that were written to a token store.",
)
SHARDS = Metric(
    "headcount_shards",
    "gauge",
    "shards",
    ("run_id", "state"),
    "Shards that the command was asked for: `waiting`, `running`, `done` or `failed`.",
)
SHARDS_REPEATED = Metric(
    "headcount_shards_repeated",
    "counter",
    "shards",
    ("run_id", "reason"),
    "Shards that were handed out again: `failed`, `died` (their replica), `node_lost`, `preempted` "
    "or `straggler`.",
)
PHASE_SECONDS = Metric(
    "headcount_phase_seconds",
    "counter",
    "seconds",
    ("run_id", "node", "phase"),
    "Seconds that replicas spent `reading`, `measuring` and `writing`. The three overlap.",
)
IDLE_SHARE = Metric(
    "headcount_replica_idle_share",
    "gauge",
    "share, 0 to 1",
    ("run_id", "node", "replica"),
    f"Share of its time that a replica waited for tokens, over its last {IDLE_WINDOW} commits.",
)
BAD_ROWS = Metric(
    "headcount_bad_rows",
    "counter",
    "rows",
    ("run_id", "node"),
    "Rows of the corpus that could not be read, in the shards that were committed.",
)

METRICS = (
    TOKENS_MEASURED,
    TOKENS_PREPARED,
    SHARDS,
    SHARDS_REPEATED,
    PHASE_SECONDS,
    IDLE_SHARE,
    BAD_ROWS,
)


def add(metric: Metric, amount: float, tags: Mapping[str, str]) -> None:
    """Add to a counter; does nothing without Ray."""
    # Ray takes no zero.
    if amount > 0 and _ray_runs():
        _counter(metric).inc(amount, dict(tags))


def show(metric: Metric, value: float, tags: Mapping[str, str]) -> None:
    """Set a gauge; does nothing without Ray."""
    if _ray_runs():
        _gauge(metric).set(value, dict(tags))


def tokens_prepared(tokens: int) -> None:
    """Count tokens that this process has written to a token store."""
    add(TOKENS_PREPARED, tokens, {"node": node_name()})


class ReplicaMetrics:
    """What one replica tells of the shards of a run."""

    def __init__(self, run_id: str) -> None:
        self._tags = {"run_id": run_id, "node": node_name()}

    def read(self, seconds: float) -> None:
        """Count the reading of a shard."""
        self._phase("reading", seconds)

    def measured(self, shard: MeasuredShard) -> None:
        """Count a shard that went through the model."""
        self._phase("measuring", shard.seconds)
        add(TOKENS_MEASURED, shard.input.tokens.size * len(shard.measured), self._tags)

    def written(self, commit: Commit, seconds: float) -> None:
        """Count a shard whose tables and commit are there."""
        self._phase("writing", seconds)
        add(BAD_ROWS, len(commit.bad_rows), self._tags)

    def _phase(self, phase: str, seconds: float) -> None:
        add(PHASE_SECONDS, seconds, {**self._tags, "phase": phase})


class RunMetrics:
    """What the driver tells of a run.

    Ray forgets a gauge when it was read once. So the driver, which is always awake, sets all of
    them again and again, those of the replicas too.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._commits: dict[str, deque[Commit]] = {}
        """The last commits of each replica, by its name."""

    def committed(self, commit: Commit) -> None:
        """Note how long a replica had waited for a shard."""
        commits = self._commits.setdefault(commit.replica, deque(maxlen=IDLE_WINDOW))
        commits.append(commit)

    def ended(self, replica: str) -> None:
        """Forget a replica that is no more."""
        self._commits.pop(replica, None)

    def repeated(self, reason: str) -> None:
        """Count a shard that is handed out again."""
        add(SHARDS_REPEATED, 1, {"run_id": self._run_id, "reason": reason})

    def show(self, shards_by_state: Mapping[str, int]) -> None:
        """Set all gauges."""
        for shard_state, count in shards_by_state.items():
            show(SHARDS, count, {"run_id": self._run_id, "state": shard_state})
        for replica, commits in self._commits.items():
            idle = sum(commit.idle_seconds for commit in commits)
            busy = sum(commit.compute_seconds for commit in commits)
            share = idle / (idle + busy) if idle else 0.0
            tags = {"run_id": self._run_id, "node": commits[0].host, "replica": replica}
            show(IDLE_SHARE, share, tags)


def table() -> str:
    """The metrics as a Markdown table."""
    lines = ["| name for Prometheus | kind | unit | tags | meaning |", "|---|---|---|---|---|"]
    for metric in METRICS:
        tags = ", ".join(f"`{tag}`" for tag in metric.tags)
        cells = (f"`{metric.exported_name}`", metric.kind, metric.unit, tags, metric.meaning)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@cache
def node_name() -> str:
    """The name of this machine, as commits have it."""
    return socket.gethostname()


def _ray_runs() -> bool:
    """Whether this process belongs to a Ray cluster. Importing Ray to find out would take 1 s."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


@cache
def _counter(metric: Metric) -> Counter:
    from ray.util.metrics import Counter

    return Counter(metric.name, metric.meaning, metric.tags)


@cache
def _gauge(metric: Metric) -> Gauge:
    from ray.util.metrics import Gauge

    return Gauge(metric.name, metric.meaning, metric.tags)
