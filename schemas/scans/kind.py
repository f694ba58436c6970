"""What a kind of measurement is: a field of a scan that names formulas, and where they go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headcount.schemas.errors import ScanError
from headcount.schemas.files.tables import (
    OPTIONAL_PLACES,
    SEQUENCES,
    Column,
    Table,
    measured_column,
    measured_uniform,
)
from headcount.schemas.formulas import Formula, Formulas

Computed = Literal["in every layer", "after the pass", "from the weights"]
"""When a formula is computed.

in every layer: in every forward pass, from the activations of the layer.
after the pass: in every forward pass, from what the model predicts.
from the weights: once in a run, from the untouched weights.
"""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Kind:
    """A kind of measurement; `schemas.scans.kinds.KINDS` lists all of them."""

    field: str
    """Field of a scan, and of a manifest, that names formulas of this kind."""
    meaning: str
    """Meaning of the field, as `headcount plan` prints it."""
    registry: Formulas
    table: Table
    """The table that the formulas fill."""
    computed: Computed
    averaged: bool = False
    """Whether the mean and spread over a shard's sequences are stored instead of the values."""
    named_by: str | None = None
    """Column that holds the names of formulas; if there is none, every formula is a column."""
    sets: Mapping[str, Callable[[Formula], bool]] = dataclasses.field(
        default_factory=dict[str, Callable[[Formula], bool]]
    )
    """Words that a scan may write in place of a list of names, or in the list, and which formulas
    each means.
    """
    default: str | tuple[str, ...] = ()
    """What a scan without the field measures. If it is empty, the scan's list may be empty too."""
    page: str
    """File in `docs/` about the formulas; kinds with the same registry share a page."""

    def __repr__(self) -> str:
        return f"Kind({self.field!r})"

    @property
    def word(self) -> str:
        """Noun for one of its formulas, for example "weight statistic"."""
        return self.registry.word

    def find(self, text: str) -> Formula:
        """The formula that a text of a scan names, for example `distant_mass(4,64)`.

        Raises `ScanError` if there is no such formula, or if its options are wrong.
        """
        return self.registry.find(text, self.field)

    def select(self, names: str | Iterable[str]) -> tuple[Formula, ...]:
        """The formulas that a scan names, in registry order.

        `names` is a word of `sets`, or a list of names in which such words may stand too.
        """
        selected: dict[str, Formula] = {}
        for name in [names] if isinstance(names, str) else names:
            if name in self.sets:
                selected |= {formula.name: formula for formula in self._in_set(name)}
                continue
            formula = self.find(name)
            # An option may hold an underscore, so two choices of options can make one name.
            other = selected.setdefault(formula.name, formula)
            if other.arguments != formula.arguments:
                raise ScanError(
                    f"{self.field}: {other.text} and {formula.text} would have one column, "
                    f"{formula.name}; leave one of them out"
                )
        order_of = {
            formula.function_name: order for order, formula in enumerate(self.registry.values())
        }
        return tuple(
            sorted(
                selected.values(),
                key=lambda formula: (order_of[formula.function_name], formula.name),
            )
        )

    def _in_set(self, word: str) -> list[Formula]:
        is_in_set = self.sets[word]
        return [formula for formula in self.registry.values() if is_in_set(formula)]

    def canonical(self, names: str | tuple[str, ...]) -> str | tuple[str, ...]:
        """The same choice in one way of writing, because a scan's text decides which run it is.

        Options are written out, and what a word in the list stands for is not named again. Names
        that do not exist stay, to be refused where the whole scan is known.
        """
        if isinstance(names, str):
            return names
        words = [name for name in names if name in self.sets]
        in_words = {formula.name for word in words for formula in self._in_set(word)}
        texts: list[str] = []
        for name in names:
            try:
                formula = None if name in words else self.find(name)
            except ScanError:
                formula = None
            if formula is None:
                texts.append(name)
            elif formula.name not in in_words:
                texts.append(formula.text)
        # ["standard"] is "standard".
        return words[0] if texts == words[:1] and words else tuple(texts)

    def check(self, names: str | tuple[str, ...]) -> None:
        """Refuse names that do not exist, or of which one stands twice."""
        self.select(names)
        # A word such as "all" cannot be empty or name a formula twice.
        if isinstance(names, tuple):
            check_names(self.field, names, required=bool(self.default))

    def columns(self, name: str, facts: Mapping[str, Any]) -> Iterator[tuple[Table, Column]]:
        """The columns that a formula adds to tables, from its facts or its record in a manifest."""
        if self.named_by is not None:
            # Its values are rows. Few axes need columns that not every file of the table has.
            for column in OPTIONAL_PLACES.get(facts.get("axis", ""), ()):
                if column.name not in self.table.own:
                    yield self.table, column
            return
        yield self.table, measured_column(name, facts)
        if facts.get("uniform_baseline"):
            yield SEQUENCES, measured_uniform(name, facts)


def check_names(field: str, names: tuple[str, ...], required: bool) -> None:
    """Refuse a list of names with a name twice, and an empty list if a name is required."""
    if len(set(names)) == len(names) and (names or not required):
        return
    expected = "at least one name, each once" if required else "each name once"
    raise ScanError(f"{field}: expected {expected}, got {list(names)!r}")
