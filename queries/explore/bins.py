"""The histograms of roll-ups by head, held in memory once they were read.

The roll-ups of a large run are hundreds of megabytes. Axes are found in these histograms, and they
answer for the sample until it is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

import duckdb

from headcount.queries.explore.page_questions import BINS_IN_MEMORY, where
from headcount.queries.sql_text import text_literal

COLUMNS = "run_id, intervention, statistic, layer, head, bin, low, high, count, minimum, maximum"


class BinsInMemory:
    """A table of the histograms that were asked for."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        connection.execute(
            f"CREATE TABLE {BINS_IN_MEMORY} AS SELECT {COLUMNS} FROM ledger.head_bins LIMIT 0"
        )
        self._held: set[tuple[str, str, str]] = set()
        """Run, intervention and statistic."""
        self._lock = Lock()

    def hold(
        self,
        run_id: str,
        intervention: str,
        statistics: Iterable[str],
        cursor: duckdb.DuckDBPyConnection,
    ) -> None:
        """Read the histograms of some statistics, unless they are there."""
        # Two questions must not read the same ones: they would count twice.
        with self._lock:
            keys = {(run_id, intervention, name) for name in statistics} - self._held
            if not keys:
                return
            names = ", ".join(text_literal(name) for _, _, name in sorted(keys))
            conditions = [
                f"run_id = {text_literal(run_id)}",
                f"intervention = {text_literal(intervention)}",
                f"statistic IN ({names})",
            ]
            cursor.execute(
                f"INSERT INTO {BINS_IN_MEMORY} "
                f"SELECT {COLUMNS} FROM ledger.head_bins{where(conditions)}"
            )
            self._held |= keys
