"""What a kind of measurement is: the field of a scan that names formulas, and what becomes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from schemas.errors import ScanError
from schemas.formulas import Formula, chosen
from schemas.tables import SEQUENCES, Column, Table, measured_chance, measured_column

Computed = Literal["in every layer", "after the pass", "from the weights"]
"""When a formula is computed: in every layer of every forward pass, from its activations; after the
last layer, from what the model predicts; or once in a run, from the untouched weights.
"""


class ScanFacts(Protocol):
    """What of a scan decides whether its formulas can be measured."""

    @property
    def n_ctx(self) -> int:
        """Tokens in every sequence."""
        ...

    @property
    def weight_processing(self) -> str:
        """What is done to the weights when a model is loaded."""
        ...


F = TypeVar("F", bound=Formula)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Kind(Generic[F]):
    """A kind of measurement; `schemas.kinds.KINDS` lists them all, and everything walks over it."""

    field: str
    """Field of a scan, and of a manifest, that names formulas of this kind."""
    word: str
    """What one of them is called."""
    meaning: str
    """Meaning of the field, as `headcount plan` prints it."""
    registry: Mapping[str, F]
    table: Table
    """The table that they fill."""
    computed: Computed
    averaged: bool = False
    """Whether mean and spread over the sequences of a shard are kept, not the values themselves."""
    named_by: str | None = None
    """Column of the table that holds a formula's name; without one, every formula is a column."""
    sets: Mapping[str, Callable[[F], bool]] = dataclasses.field(
        default_factory=dict[str, Callable[[F], bool]]
    )
    """Words that a scan may write in place of a list of names, and which formulas each means."""
    default: str | tuple[str, ...] = ()
    """What a scan that does not say measures; if it is nothing, the list may be empty."""
    check: Callable[[Iterable[F], ScanFacts], None] | None = None
    """Refuses formulas that a scan cannot have, with a `ScanError`."""
    page: str
    """File of `docs/` that describes its formulas; kinds of one registry share a page."""
    introduction: str
    """How that page begins."""

    def __repr__(self) -> str:
        return f"Kind({self.field!r})"

    def __post_init__(self) -> None:
        in_rows = self.averaged or self.computed == "from the weights"
        if in_rows != (self.named_by is not None):
            raise ValueError(
                f"kind {self.field!r}: expected `named_by` where values are averaged or come from "
                f"the weights, and nowhere else; got named_by = {self.named_by!r}"
            )
        if self.averaged and self.computed != "in every layer":
            raise ValueError(
                f"kind {self.field!r}: only what is computed in every layer can be averaged, got "
                f"computed = {self.computed!r}"
            )

    def select(self, wanted: str | Iterable[str]) -> tuple[F, ...]:
        """The formulas that a scan names, in registry order."""
        if isinstance(wanted, str):
            belongs = self.sets[wanted]
            return tuple(formula for formula in self.registry.values() if belongs(formula))
        return chosen(wanted, self.registry, self.field, self.word)

    def selected(self, wanted: str | tuple[str, ...], scan: ScanFacts) -> tuple[F, ...]:
        """The same, once they are found to fit the scan; raises `ScanError`."""
        formulas = self.select(wanted)
        if isinstance(wanted, tuple):
            check_names(self.field, wanted, required=bool(self.default))
        if formulas and self.check is not None:
            self.check(formulas, scan)
        return formulas

    def columns(self, name: str, facts: Mapping[str, Any]) -> Iterator[tuple[Table, Column]]:
        """The columns that a formula adds to tables, from its facts or its record in a manifest."""
        if self.named_by is not None:
            return
        yield self.table, measured_column(name, facts)
        if facts.get("chance"):
            yield SEQUENCES, measured_chance(name, facts)


def check_names(field: str, names: tuple[str, ...], required: bool) -> None:
    """Refuse a name that a list of a scan holds twice, and an empty list if one is required."""
    if len(set(names)) == len(names) and (names or not required):
        return
    expected = "at least one name, each once" if required else "each name once"
    raise ScanError(f"{field}: expected {expected}, got {list(names)!r}")
