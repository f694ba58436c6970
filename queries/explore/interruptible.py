"""A connection that one question uses, and that another thread can interrupt."""

from __future__ import annotations

import contextlib
from threading import Lock
from typing import cast

import duckdb

from headcount.queries.open.connection import OPENED


class Interruptible:
    """Hands out cursors of a connection, and remembers them so that they can be interrupted.

    `run_query` makes its cursor itself, so whoever wants to stop it must know every cursor.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        self._cursors: list[duckdb.DuckDBPyConnection] = []
        self._lock = Lock()

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A new cursor."""
        cursor = self._connection.cursor()
        with self._lock:
            self._cursors.append(cursor)
        return cursor

    def as_duckdb(self) -> duckdb.DuckDBPyConnection:
        """Itself, for functions that take a connection and only make cursors of it."""
        connection = cast("duckdb.DuckDBPyConnection", self)
        OPENED[connection] = OPENED[self._connection]
        return connection

    def interrupt(self) -> None:
        """Stop whatever its cursors compute. One that has not begun must be interrupted again."""
        with self._lock:
            for cursor in self._cursors:
                with contextlib.suppress(duckdb.Error):
                    cursor.interrupt()

    def close(self) -> None:
        """Close its cursors. Nothing may use them any more."""
        with self._lock:
            for cursor in self._cursors:
                cursor.close()
            self._cursors.clear()
