"""What the driver of a job says to programs: a line of its log for each change of its state.

Whoever submits a job sees nothing of it but its log. The sentences there are for people. So the
driver also writes lines such as

    headcount-state {"state": "measuring", "words": "the first shard is committed"}

which `headcount submit` waits for.
"""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict

from headcount.jobs.phases import JOB_VARIABLE

PREFIX = "headcount-state "

State = Literal["short of machines", "without replicas", "measuring"]
"""That no machine has what a replica needs; that there is none for another reason, perhaps because
a model is being loaded; and that a shard is committed.
"""


class JobState(BaseModel):
    """A state of a driver, and what it says of it to people."""

    model_config = ConfigDict(frozen=True)
    state: State
    words: str


class StateTeller:
    """Says the states of the driver in this process: to people, and in a job to programs, too."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.last: JobState | None = None

    def tell(self, state: State, words: str, subject: str = "") -> None:
        """Say words about a subject; a state that was told last is no change."""
        self.say(f"{subject}: {words}" if subject else words)
        new = JobState(state=state, words=words)
        if new != self.last and JOB_VARIABLE in os.environ:
            print(f"{PREFIX}{new.model_dump_json()}", file=sys.stderr, flush=True)
        self.last = new


def is_state(line: str) -> bool:
    """Whether a line of a log is for programs alone."""
    return line.startswith(PREFIX)


def states_in(log: str) -> Iterator[JobState]:
    """The states that a log tells, in their order."""
    for line in filter(is_state, log.splitlines()):
        try:
            yield JobState.model_validate_json(line.removeprefix(PREFIX))
        except ValueError:
            continue  # The last line may be cut off.
