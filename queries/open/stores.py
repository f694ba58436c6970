"""Object stores for DuckDB, which reads them through pyarrow.

DuckDB's own extension for stores is a download, and reading runs must not need the network.

DuckDB keeps what it has read in memory. Before it uses that, it asks for the size and the time of
change of the file: several times a file and query. A commit says both of a file that counts, so
the store itself is asked only for bytes that were not read before.
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import duckdb
import pyarrow as pa
from fsspec.core import has_magic
from fsspec.implementations.arrow import ArrowFSWrapper
from pyarrow.fs import FileSystem

from headcount.schemas.files.run_directory import pc
from headcount.schemas.object_stores import (
    filesystem_of,
    listed,
    object_info,
    open_content,
    read_at,
    tag_of,
)
from headcount.schemas.places import StorePath

VERSION_DIGITS = 7
"""Hexadecimal digits of a digest that tell two contents of a file apart, as seconds since 1970.

They end in 1978: DuckDB does not keep what has changed within the last seconds.
"""


@dataclass(frozen=True)
class CommittedObject:
    """What a commit says about an object."""

    size: int
    version: datetime
    """Stands for the time of the last change. It follows from the content."""


def committed_objects(run: StorePath, commit_log: pa.Table) -> dict[str, CommittedObject]:
    """The objects that some commits of a run refer to, by key. Older commits have no digest."""
    files = pc.list_flatten(commit_log["files"]).combine_chunks()
    columns = [pc.struct_field(files, name).to_pylist() for name in ("path", "bytes", "digest")]
    return {
        f"{run.key}/{path}": CommittedObject(
            size, datetime.fromtimestamp(int(digest[:VERSION_DIGITS], 16), UTC)
        )
        for path, size, digest in zip(*columns, strict=True)
        if digest
    }


class _OpenObject:
    """A committed object for reading. The store is asked for it when its bytes are."""

    def __init__(self, store: _Store, key: str, expected_size: int) -> None:
        self._store = store
        self._key = key
        self._size = expected_size
        self._position = 0
        self._file: Any = None  # pyarrow has no types.

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the place of the next read."""
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = begin + offset
        return self._position

    def tell(self) -> int:
        """The place of the next read."""
        return self._position

    def read(self, size: int = -1) -> bytes:
        """So many bytes, or all that are left."""
        if self._file is None:
            self._file = self._store.open_unchanged(self._key, self._size)
        left = max(0, self._size - self._position)
        wanted = left if size < 0 else min(size, left)
        where = self._store.place(self._key)
        content = read_at(self._file, wanted, self._position, where)
        self._position += len(content)
        return content

    def close(self) -> None:
        """Give back what was opened."""
        if self._file is not None:
            self._file.close()


class _Store(ArrowFSWrapper):
    """One bucket's pyarrow file system, under the scheme that its addresses begin with."""

    # fsspec would hand out one instance for all buckets of a scheme.
    cachable = False

    def __init__(
        self, filesystem: FileSystem, scheme: str, committed: Mapping[str, CommittedObject]
    ) -> None:
        super().__init__(filesystem)
        self.scheme = scheme
        self.committed = committed
        self._tags: dict[str, str | bytes | None] = {}
        """What the store called the content of an object when it was first opened."""

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

    def place(self, key: str) -> StorePath:
        """Where an object lies."""
        return StorePath(f"{self.scheme}://{key}")

    def ls(self, path: str, detail: bool = False, **options: object) -> list[Any]:
        """What lies in a directory, of which a listing that was cut shows less."""
        infos = listed(self.place(self._strip_protocol(path)))
        # A path that is none of a directory is that of an object.
        entries = [self._make_entry(info) for info in infos] or [self.info(path)]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **options: object) -> dict[str, Any]:
        """The size and the kind of an object; the commits say those of committed ones."""
        key = self._strip_protocol(path)
        known = self.committed.get(key)
        if known is None:
            return self._make_entry(object_info(self.place(key)))
        return {"name": key, "size": known.size, "type": "file", "mtime": known.version}

    def modified(self, path: str) -> datetime:
        """When an object was changed; of a committed one, a time that follows from its content."""
        known = self.committed.get(self._strip_protocol(path))
        return super().modified(path) if known is None else known.version

    def open_unchanged(self, key: str, expected_size: int) -> Any:  # noqa: ANN401 (pyarrow)
        """Open a committed object; raises OSError if it is not what was opened before.

        Pages of two versions of a file would otherwise be read as one.
        """
        file = open_content(self.place(key))
        tag = tag_of(file)
        # The tag that was seen first stays for as long as the runs are open.
        if file.size() != expected_size or self._tags.setdefault(key, tag) != tag:
            file.close()
            raise OSError(
                f"{self.scheme}://{key}: has changed since the runs were opened; open them again"
            )
        return file

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
        key = self._strip_protocol(path)
        if key in self.committed:
            return _OpenObject(self, key, self.committed[key].size)
        return self.place(key).open()


def register_stores(
    connection: duckdb.DuckDBPyConnection,
    runs: Iterable[StorePath],
    committed: Mapping[str, CommittedObject],
) -> None:
    """Let a connection read the stores that runs lie in. The mapping may grow later."""
    for scheme, store in {run.url.partition("://")[0]: run for run in runs}.items():
        connection.register_filesystem(_Store(filesystem_of(store), scheme, committed))
