"""The kinds of measurement as readers of runs know them: the tables that they fill.

The formulas of a kind are in `schemas.kinds.KINDS`, which imports every formula. Whoever only reads
a run needs none: its manifest says what was measured.
"""

# pyarrow has no types.
# pyright: basic

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headcount.schemas import tables
from headcount.schemas.tables import (
    HEADS,
    OPTIONAL_PLACES,
    ROLLUPS,
    SAMPLES,
    SEQUENCES,
    Column,
    Table,
    carried_column,
    measured_column,
    measured_uniform,
)


@dataclass(frozen=True)
class Filling:
    """What one kind of measurement writes, and where."""

    field: str  # field of a scan, and of a manifest, that names formulas of this kind
    word: str  # noun for one of them
    table: Table  # the table that they fill
    named_by: str | None = None  # column with names of formulas; None: each is a column

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


STATISTICS = Filling("statistics", "statistic", HEADS)
PREDICTIONS = Filling("predictions", "prediction", SEQUENCES)
CURVES = Filling("curves", "profile", tables.CURVES)
PROFILES = Filling("profiles", "profile", tables.PROFILES, named_by="profile")
WEIGHT_STATISTICS = Filling(
    "weight_statistics", "weight statistic", tables.WEIGHTS, named_by="weight"
)

FILLINGS = (STATISTICS, PREDICTIONS, CURVES, PROFILES, WEIGHT_STATISTICS)

WORDS = {filling.field: filling.word for filling in FILLINGS} | {
    "inputs": "input family",
    "interventions": "intervention",
}
"""Noun for one of the names that each field of a manifest describes."""

OF_MERGED = (ROLLUPS.name, SAMPLES.name)
"""The tables that a merge writes. They repeat what `heads` says: both files, or none, count."""

TABLES: dict[str, Table] = {
    table.name: table for table in (*(filling.table for filling in FILLINGS), ROLLUPS, SAMPLES)
}
"""Every table by name: those that the kinds fill, and those that a merge writes."""


def columns_of(
    kinds: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, Column]]:
    """The measured columns of every table, by name; `kinds` has the facts by field and formula."""
    columns: dict[str, dict[str, Column]] = {name: {} for name in TABLES}
    for filling in FILLINGS:
        for name, facts in kinds.get(filling.field, {}).items():
            for table, column in filling.columns(name, facts):
                columns[table.name][column.name] = column
    columns[SAMPLES.name] = columns[HEADS.name]
    return columns


def carried_columns(fields: Iterable[str]) -> dict[str, dict[str, Column]]:
    """The columns that carry fields of documents, by table and name."""
    columns = [carried_column(field) for field in fields]
    return {SEQUENCES.name: {column.name: column for column in columns}}
