"""The sample of a large run: read from its files once, and then asked in memory.

Every query about a head would open every file of the run, and decode rows of sequences that it
does not want. In memory, the rows of a head lie side by side and nothing else is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import duckdb

from headcount.queries.explore.page_queries import RunFacts, Scope, sample_condition, where
from headcount.queries.sql_text import quoted_name

SAMPLE_ROWS = 10_000_000
"""Rows of a sample, about, if there is memory for them."""

MOST_SAMPLES = 2
"""Samples that are kept: of so many runs, or interventions of a run."""

MEMORY_SHARE = 1 / 8
"""Share of the memory for queries that a sample may take."""

BYTES_OF_KEYS = 27
"""Bytes of a row's layer, head and sequence, with what DuckDB notes about a row (measured).

Each statistic has four more.
"""


def rows_in_memory(connection: duckdb.DuckDBPyConnection, statistics: int) -> int:
    """How many rows a sample may have."""
    sql = "SELECT parse_formatted_bytes(current_setting('memory_limit'))"
    [(memory_bytes,)] = connection.execute(sql).fetchall()
    bytes_of_row = BYTES_OF_KEYS + 4 * statistics
    return max(1, min(SAMPLE_ROWS, int(MEMORY_SHARE * memory_bytes / bytes_of_row)))


@dataclass(frozen=True)
class Sample:
    """Rows of some sequences of one run under one intervention, in a table."""

    table: str
    facts: RunFacts
    scope: Scope
    """The run and the intervention."""

    @property
    def create(self) -> str:
        """SQL that makes the table, without rows."""
        # The select gives the columns their types.
        return f"CREATE TABLE {self.table} AS {self._rows(['false'])}"

    @property
    def drop(self) -> str:
        """SQL that removes the table."""
        return f"DROP TABLE IF EXISTS {self.table}"

    def parts(self) -> Iterator[str]:
        """SQL that fills the table, layer by layer.

        Queries of the page are answered between two layers. Files are sorted by layer, so each
        statement reads what the others do not.
        """
        for layer in range(self.facts.layers):
            # In this order, DuckDB knows of every block of rows which heads it has.
            yield (
                f"INSERT INTO {self.table} {self._rows([f'layer = {layer}'])} "
                "ORDER BY layer, head, sequence"
            )

    def _rows(self, conditions: list[str]) -> str:
        columns = ", ".join(map(quoted_name, self.facts.statistics))
        conditions = [
            *self.scope.conditions_on_run,
            sample_condition(self.facts.every),
            *conditions,
        ]
        return f"SELECT layer, head, sequence, {columns} FROM heads{where(conditions)}"
