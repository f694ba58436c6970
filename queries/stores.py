"""Object stores for DuckDB, which reads them through pyarrow.

DuckDB's own extension for stores is a download, and reading runs must not need the network.
"""

from __future__ import annotations

from collections.abc import Iterable

import duckdb
from fsspec.core import has_magic
from fsspec.implementations.arrow import ArrowFSWrapper
from pyarrow.fs import FileSystem

from schemas.places import StorePath


class _Store(ArrowFSWrapper):
    """One bucket's pyarrow file system, under the scheme that its addresses begin with."""

    # fsspec would hand out one instance for all buckets of a scheme.
    cachable = False

    def __init__(self, filesystem: FileSystem, scheme: str) -> None:
        super().__init__(filesystem)
        self.scheme = scheme

    @property
    def protocol(self) -> str:
        """The scheme. pyarrow calls Google's gcs, while its addresses say gs."""
        return self.scheme

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        """The address without its scheme."""
        # DuckDB compares an address with what is allowed before `..` is resolved.
        if ".." in str(path).split("/"):
            raise PermissionError(f"{path} has a `..`")
        return super()._strip_protocol(path)

    def glob(self, path: str, maxdepth: int | None = None, **options: object) -> object:
        """The files of a pattern. A path without one stands for itself: commits name files in full,
        and DuckDB would look each of them up twice for every view.
        """
        if has_magic(path):
            return super().glob(path, maxdepth, **options)
        return [self._strip_protocol(path)]

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        seekable: bool = True,
        **options: object,
    ) -> object:
        if mode != "rb":
            raise PermissionError(f"{path}: queries only read")
        return super()._open(path, mode, block_size, seekable, **options)


def register_stores(connection: duckdb.DuckDBPyConnection, places: Iterable[object]) -> None:
    """Let a connection read the stores that runs lie in."""
    stores: dict[str, StorePath] = {}
    for place in places:
        if isinstance(place, StorePath):
            scheme = place.url.partition("://")[0]
            stores[scheme] = place
    for scheme, store in stores.items():
        connection.register_filesystem(_Store(store.filesystem, scheme))
