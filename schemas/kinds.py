"""The kinds of measurement, each with all of its formulas.

Scans, plans, shards and docs walk over this list. So a new kind is one entry here, one in
`schemas.filled_tables`, and one file.
"""

# pyarrow has no types.
# pyright: basic

from collections.abc import Iterable, Mapping
from importlib import import_module

import pyarrow as pa

from headcount.schemas.filled_tables import carried_columns, columns_of
from headcount.schemas.formula_kinds import (
    CURVES,
    PREDICTIONS,
    PROFILES,
    STATISTICS,
    WEIGHT_STATISTICS,
)
from headcount.schemas.formulas import Formula, Kind
from headcount.schemas.tables import Table

CATALOGUES = ("statistics", "predictions", "profiles", "weight_statistics")
"""Where the formulas stand. Whoever reads how a scan goes need not read them."""

for catalogue in CATALOGUES:
    import_module(f"headcount.schemas.{catalogue}")

# A curve is a profile that is stored for every sequence.
CURVES.update(PROFILES)

KINDS: tuple[Kind, ...] = (STATISTICS, PREDICTIONS, CURVES, PROFILES, WEIGHT_STATISTICS)


def kinds_of(table: Table) -> list[Kind]:
    """The kinds that fill a table."""
    return [kind for kind in KINDS if kind.table is table]


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
