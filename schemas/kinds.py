"""The kinds of measurement, and the tables that they fill.

Scans, manifests, plans, shards, compaction, views and docs all walk over these two lists. So a new
kind is one entry here and one file.
"""

# pyarrow has no types.
# pyright: basic

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from headcount.schemas.formula_kinds import CURVES
from headcount.schemas.formulas import Formula, Kind
from headcount.schemas.predictions import PREDICTIONS
from headcount.schemas.profiles import PROFILES
from headcount.schemas.statistics import STATISTICS
from headcount.schemas.tables import (
    HEADS,
    ROLLUPS,
    SAMPLES,
    SEQUENCES,
    Column,
    Table,
    carried_column,
)
from headcount.schemas.weight_statistics import WEIGHT_STATISTICS

# A curve is a profile that is stored for every sequence.
CURVES.update(PROFILES)

KINDS: tuple[Kind, ...] = (STATISTICS, PREDICTIONS, CURVES, PROFILES, WEIGHT_STATISTICS)

WORDS = {kind.field: kind.word for kind in KINDS} | {
    "inputs": "input family",
    "interventions": "intervention",
}
"""Noun for one of the names that each field of a manifest describes."""

OF_MERGED = (ROLLUPS.name, SAMPLES.name)
"""The tables that a merge writes. They repeat what `heads` says: both files, or none, count."""

TABLES: dict[str, Table] = {
    table.name: table for table in (*(kind.table for kind in KINDS), ROLLUPS, SAMPLES)
}
"""Every table by name: those that the kinds fill, and those that a merge writes."""


def kinds_of(table: Table) -> list[Kind]:
    """The kinds that fill a table."""
    return [kind for kind in KINDS if kind.table is table]


def columns_of(
    kinds: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, Column]]:
    """The measured columns of every table, by name; `kinds` has the facts by field and formula."""
    columns: dict[str, dict[str, Column]] = {name: {} for name in TABLES}
    for kind in KINDS:
        for name, facts in kinds.get(kind.field, {}).items():
            for table, column in kind.columns(name, facts):
                columns[table.name][column.name] = column
    columns[SAMPLES.name] = columns[HEADS.name]
    return columns


def table_schema(
    table: Table, formulas: Mapping[str, Iterable[Formula]], carried: Iterable[str] = ()
) -> pa.Schema:
    """The schema of a table's files, from the formulas of a scan by field; `carried` are the fields
    of documents that `sequences` carries.
    """
    facts = {
        field: {formula.name: formula.facts for formula in formulas_of_kind}
        for field, formulas_of_kind in formulas.items()
    }
    columns = columns_of(facts)[table.name] | carried_columns(carried).get(table.name, {})
    return table.schema(columns.values())


def schema_of_rows(kind: Kind, formulas: Iterable[Formula]) -> pa.Schema:
    """The schema of a table whose rows name the formula that they are values of."""
    return table_schema(kind.table, {kind.field: formulas})


def carried_columns(fields: Iterable[str]) -> dict[str, dict[str, Column]]:
    """The columns that carry fields of documents, by table and name."""
    columns = [carried_column(field) for field in fields]
    return {SEQUENCES.name: {column.name: column for column in columns}}
