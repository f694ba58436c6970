"""The models of runs as questions see them.

Questions know neither models nor tokenizers. `workers.run_model` does, and the front door brings both
together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from headcount.schemas.errors import QueryError

if TYPE_CHECKING:
    # It imports pyarrow, which `headcount --help` need not wait for.
    from headcount.schemas.files.places import Place


class LookLike(Protocol):
    """What a query attends to most."""

    @property
    def key(self) -> int:
        """Position of the key with most attention. Negative if the query sees no key."""
        ...

    @property
    def mass(self) -> float:
        """Attention to that key."""
        ...

    @property
    def first(self) -> float:
        """Attention to key 0."""
        ...


class RunModelLike(Protocol):
    """The model of a run, as `workers.run_model` has it."""

    def text(self, tokens: list[int]) -> str:
        """The text of some tokens."""
        ...

    def texts(self, tokens: list[int]) -> list[str]:
        """The text of each token."""
        ...

    def looks(
        self,
        sequence: int,
        tokens: list[int],
        layer: int,
        head: int,
        intervention: str,
        device: str,
    ) -> Sequence[LookLike]:
        """What a head attends to most, from every query of a sequence."""
        ...


OpenModel: TypeAlias = Callable[["Place", "str | None"], RunModelLike]
"""Opens the model of the run in a directory, or the model at a path if one is given."""


class RunModels:
    """The models of the runs at a place, by run. Each is opened once."""

    def __init__(self, place: str, open_model: OpenModel, model: str | None = None) -> None:
        self.place = place
        self.open_model = open_model
        self.model = model
        self.opened_models: dict[str, RunModelLike] = {}

    def __getitem__(self, run_id: str) -> RunModelLike:
        if run_id not in self.opened_models:
            self.opened_models[run_id] = self.open_model(self._directory(run_id), self.model)
        return self.opened_models[run_id]

    def _directory(self, run_id: str) -> Place:
        from headcount.schemas.files.places import absolute
        from headcount.schemas.files.run_directory import find_runs

        for run in find_runs(absolute(self.place)):
            if run.run_id == run_id:
                return run.path
        raise QueryError(f"{self.place}: has no run {run_id!r}, of which the answer has rows")
