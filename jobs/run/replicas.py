"""What a driver needs of the machines that hold its replicas, wherever they are.

`jobs.run.ray_replicas` has real ones in actors of Ray. Tests have a thousand of them on a clock
that jumps.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from headcount.jobs.run.schedule import Call
from headcount.schemas.files.commit import Commit, Failure


class ReplicaPlace(NamedTuple):
    """Where a replica runs."""

    node_id: str  # as the cluster knows the node
    host: str


class InHand(NamedTuple):
    """What a replica measures, and has not committed."""

    shard: int
    tokens: int  # that are measured already


class Loaded(NamedTuple):
    """A replica is ready for shards. It may have been ready before, in another process."""

    replica: int
    place: ReplicaPlace


class NotLoaded(NamedTuple):
    """A replica did not start; it starts again if its constructor raised no error."""

    error: str
    is_for_ever: bool


class Leaves(NamedTuple):
    """A replica was told to leave, and will start again elsewhere."""

    replica: int
    reason: str


class Died(NamedTuple):
    """A replica's process has ended. Its calls end with events of their own, after this one."""

    replica: int


class Ended(NamedTuple):
    """A call has ended: with a commit, a failure, or none if the replica returned the shard."""

    call: Call
    result: Commit | Failure | None
    with_replica: bool = False  # whether it ended because the replica died


Event = Loaded | NotLoaded | Leaves | Died | Ended


class Replicas(Protocol):
    """Replicas by number, from 0 on. They start by themselves, and again after every end."""

    def __len__(self) -> int: ...

    def measure(self, call: Call) -> None:
        """Give a shard to a replica."""
        ...

    def events(self, most: int) -> Iterable[Event]:
        """Wait a second at most until something happens; tells that, and what else is known."""
        ...

    def look(self) -> Iterable[InHand]:
        """Pass on what the cluster has announced; tells how far shards are that take long."""
        ...

    def leave(self, reason: str) -> None:
        """Tell all replicas to finish what they measure, and to leave."""
        ...

    def gone_nodes(self, node_ids: set[str]) -> set[str]:
        """Which of some nodes are dead; to find one may take seconds."""
        ...

    def lack(self) -> str | None:
        """What a replica needs that no machine of the cluster has, in words."""
        ...
