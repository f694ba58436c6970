"""The models of runs as questions see them. `jobs.run_model` has one: the front door brings both
together, for questions know neither models nor tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from schemas.errors import QueryError


class LookLike(Protocol):
    """Where a query looks."""

    @property
    def key(self) -> int: ...
    @property
    def mass(self) -> float: ...
    @property
    def first(self) -> float: ...


class RunModelLike(Protocol):
    """The model of a run. `jobs.run_model` has it; questions know neither models nor tokenizers."""

    def text(self, tokens: list[int]) -> str: ...
    def texts(self, tokens: list[int]) -> list[str]: ...
    def looks(
        self,
        sequence: int,
        tokens: list[int],
        layer: int,
        head: int,
        intervention: str,
        device: str,
    ) -> Sequence[LookLike]: ...


OpenModel: TypeAlias = Callable[[Any, str | None], RunModelLike]
"""Opens the model of the run in a directory; or where it lies now, if that is told."""


class RunModels:
    """The models of the runs at a place, by run; each is opened once."""

    def __init__(self, place: str, open_model: OpenModel, model: str | None = None) -> None:
        self.place, self.open_model, self.model = place, open_model, model
        self.opened: dict[str, RunModelLike] = {}

    def __getitem__(self, run_id: str) -> RunModelLike:
        if run_id not in self.opened:
            self.opened[run_id] = self.open_model(self._directory(run_id), self.model)
        return self.opened[run_id]

    def _directory(self, run_id: str) -> Any:
        from schemas.places import absolute
        from schemas.run_directory import find_runs

        for run in find_runs(absolute(self.place)):
            if run.run_id == run_id:
                return run.path
        raise QueryError(f"{self.place}: has no run {run_id!r}, of which the answer has rows")
