"""Object stores for DuckDB: its own extension for them is a download, so it reads through pyarrow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import duckdb
from fsspec.implementations.arrow import ArrowFSWrapper

from schemas.places import StorePath


class _Store(ArrowFSWrapper):
    """One bucket's pyarrow file system, under the scheme that its addresses begin with."""

    cachable = False

    def __init__(self, filesystem: Any, scheme: str) -> None:
        super().__init__(filesystem)
        self.scheme = scheme

    @property
    def protocol(self) -> str:
        """The scheme; pyarrow calls Google's gcs, its addresses say gs."""
        return self.scheme

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """Without the scheme; DuckDB compares an address with what is allowed before `..` is
        resolved, so there is none.
        """
        if ".." in str(path).split("/"):
            raise PermissionError(f"{path} has a `..`")
        return super()._strip_protocol(path)

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any
    ) -> Any:
        if mode != "rb":
            raise PermissionError(f"{path}: queries only read")
        return super()._open(path, mode, block_size, **options)


def register_stores(connection: duckdb.DuckDBPyConnection, places: Iterable[object]) -> None:
    """Let a connection read the stores that runs lie in."""
    stores = {p.url.partition("://")[0]: p for p in places if isinstance(p, StorePath)}
    for scheme, store in stores.items():
        connection.register_filesystem(_Store(store.filesystem, scheme))
