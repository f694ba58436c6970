"""Where runs and corpora lie: a local path, or a path in an object store.

A store path has the few methods of `pathlib.Path` that we need. A file is written whole or not at
all: a temporary name, fsync and rename on a disk, a single upload in a store.

How stores are asked, and why their answers are not believed at once, is a matter of its own
(`object_stores.py`), which is imported by the first address that has a scheme.
"""
# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import io
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from io import BufferedReader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa

from headcount.schemas.errors import RunError, ScanError, StoreError, WriteError
from headcount.schemas.reasons import reason, store_error

STORES = ("s3", "gs")

READINGS = 6  # times that a store is read before it is believed that something is empty or broken

NOT_LISTED = "the store does not list what lies in it"

OpenFile: TypeAlias = BufferedReader
"""A file that is open for reading; pyarrow's buffers have its methods, but no types."""

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class StorePath:
    """A path in an object store: `scheme://bucket/key`."""

    url: str

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        """All but the last part."""
        return StorePath(self.url.rpartition("/")[0])

    @property
    def key(self) -> str:
        """The path as the file system wants it: `bucket/key`."""
        return self.url.partition("://")[2]

    def is_file(self) -> bool:
        """Whether there is such an object; raises `RunError` if the store does not say."""
        return _stores().is_file(self)

    def read_bytes(self) -> bytes:
        """The whole content; raises FileNotFoundError if there is no such object."""
        return _stores().read_bytes(self)

    def open(self) -> OpenFile:
        """The object as a file that can be read at any place."""
        return _stores().opened(self)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object."""
        try:
            _stores().delete(self)
        except FileNotFoundError:
            if not missing_ok:
                raise


def _stores() -> ModuleType:
    """The room of object stores. What lies on a disk is read without it."""
    return import_module("headcount.schemas.object_stores")


Place = Path | StorePath

CUT_ADDRESS = re.compile(
    r"(?!bundled:)(?:[a-z][a-z0-9+.-]+|.*/(?:file|s3a?|gs|gcs|abfss?|az|adl|hdfs|hf|https?)):/(?!/)",
    re.I,
)
"""How an address begins that has lost a slash. A `Path` takes two slashes for one, and may put the
working directory before them.
"""


def check_address(text: str) -> None:
    """Refuse an address with one slash: it would mean a directory called `s3:`.

    >>> check_address("s3:/bucket/runs")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    headcount.schemas.errors.ScanError: s3:/bucket/runs: an address that has lost a slash, ...
    """
    if match := CUT_ADDRESS.match(text):
        scheme = match[0].rpartition(":")[0].rpartition("/")[2]
        # The path of a file begins with a slash itself.
        slashes = ":///" if scheme.lower() == "file" else "://"
        raise ScanError(
            f"{text}: an address that has lost a slash, as in a Path of Python; expected it as a "
            f"text, '{scheme}{slashes}{text[match.end() :]}'"
        )


def read_as(where: Place, parse: Callable[[bytes], T]) -> T:
    """What a small file says. In a store, what cannot be parsed is read again.

    Raises what `parse` raises, FileNotFoundError if there is no such file, and OSError.
    """
    for _ in range(READINGS - 1 if isinstance(where, StorePath) else 0):
        content = where.read_bytes()
        with suppress(ValueError, LookupError, TypeError, AttributeError, pa.ArrowException):
            return parse(content)
    return parse(where.read_bytes())


def place(where: str | Place) -> Place:
    """The place that a text names: a local path, `file://…`, `s3://bucket/…` or `gs://bucket/…`.

    Anything else raises `ScanError`.

    >>> place("s3://bucket/runs/") / "run_id=a-1"
    StorePath(url='s3://bucket/runs/run_id=a-1')
    >>> place("abfs://box/runs")
    Traceback (most recent call last):
    headcount.schemas.errors.ScanError: abfs://box/runs: expected a path, file://, s3:// or gs://
    """
    if isinstance(where, StorePath):
        return where
    text = str(where)
    check_address(text)
    scheme, separator, path = text.partition("://")
    if not separator:
        return Path(os.path.expanduser(text))
    if scheme == "file" and path.startswith("/"):
        return Path(path)
    if scheme not in STORES:
        raise ScanError(
            f"{text}: expected a path, file://, {' or '.join(f'{name}://' for name in STORES)}"
        )
    bucket = path.partition("/")[0]
    if "@" in bucket:
        raise ScanError(
            f"{scheme}://…@{path.rpartition('@')[2]}: an address is kept with the run and must "
            "hold no credentials; set them in the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, an "
            "instance profile)"
        )
    if not bucket:
        raise ScanError(f"{text}: expected {scheme}://BUCKET/PATH")
    if {".", ".."} & {*path.split("/")}:
        # A store takes them for names, and a directory of it has no parent.
        raise ScanError(f"{text}: expected an address without . and .. among its names")
    # Two slashes in a row would name another object than one slash does.
    return StorePath(re.sub(r"(?<!:)/+", "/", text).rstrip("/"))


def check_on_disk(path: str | Path) -> None:
    """Refuse an address where only a file of this machine can be read or written."""
    if "://" in str(path) or CUT_ADDRESS.match(str(path)):
        raise ScanError(f"{path}: an address; expected a file of this machine")


def check_directory(key: str, directory: str) -> None:
    """Refuse a directory of this machine that cannot be made or written to; nothing is made.

    `key` is what names it. A store is asked only when something is written.
    """
    path = absolute(directory)
    if not isinstance(path, Path):
        return
    there = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not there.is_dir():
        kind = (
            "a link that leads nowhere" if there.is_symlink() and not there.exists() else "a file"
        )
        raise ScanError(f"{key}: expected a directory, got {directory!r}, and {there} is {kind}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ScanError(
            f"{key}: {directory!r} cannot be written: this user may not write to {there}; allow "
            "it, or name another directory"
        )


def write_whole(where: Place, content: bytes | pa.Buffer) -> None:
    """Make a file visible with all of its content or not at all; raises `WriteError` on failure."""
    with explained(where):
        if isinstance(where, StorePath):
            _stores().write_bytes(where, content)
        else:
            with temporary_file(where, content) as temporary:
                os.replace(temporary, where)


@contextmanager
def temporary_file(where: Path, content: bytes | pa.Buffer) -> Iterator[Path]:
    """A file with the content beside the one that it becomes.

    Its name does not end in .parquet or .json, so no glob takes a half-written file for a whole
    one.
    """
    # The random part keeps two attempts at the same file apart.
    temporary = where.with_name(f".{where.name}.{secrets.token_hex(4)}.tmp")
    try:
        with _created(temporary) as file:
            file.write(content)
            file.flush()
            # Without it a power cut can leave the new name with an empty file.
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _created(file: Path) -> io.BufferedWriter:
    """A new file, and its directory if that is not there."""
    try:
        return file.open("wb")
    except FileNotFoundError:
        file.parent.mkdir(parents=True, exist_ok=True)
        return file.open("wb")


@contextmanager
def explained(where: Place) -> Iterator[None]:
    """Turn an error of writing into the line about it."""
    try:
        yield
    except OSError as error:
        if isinstance(where, Path):
            kind, advice = WriteError, "free space or choose another place"
        else:
            kind, advice = store_error(error), "mend the access or the store"
        raise kind(
            f"{where}: cannot be written ({reason(error)}); {advice}, then run the same command"
        ) from None


def settle(directory: Place) -> None:
    """Make the names in a directory survive a power cut. Call it before deleting what they replace.

    If nothing is deleted, a lost name does no harm: its shard is measured again. So ordinary
    commits skip this step, which would halve their speed.
    """
    if isinstance(directory, Path):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_whole(where: Place) -> Any:  # noqa: ANN401 (pyarrow has no types)
    """A file that is open for reading; raises FileNotFoundError if there is none."""
    return where.open("rb") if isinstance(where, Path) else where.open()


def open_at_once(where: Place) -> OpenFile:
    """A file that is open for reading. From a store it is fetched whole, in one request."""
    return open_whole(where) if isinstance(where, Path) else pa.BufferReader(where.read_bytes())


def absolute(where: str | Place) -> Place:
    """A place that means the same in every working directory.

    Its last part is a real name: "." becomes the name of the working directory.
    """
    location = place(where)
    return Path(os.path.abspath(location)) if isinstance(location, Path) else location


def names(directory: Place) -> list[str]:
    """Names of the files and directories in a directory, unordered; none if it does not exist."""
    if isinstance(directory, StorePath):
        return [info.base_name for info in _stores().listed(directory)]
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def sizes(directory: Place) -> Iterator[tuple[str, int]]:
    """Names and sizes of the files in a directory, unordered; none if it does not exist."""
    if isinstance(directory, StorePath):
        return _stores().sizes(directory)
    return ((name, status.st_size) for name, status in stats(directory))


def is_directory(where: Place) -> bool:
    """Whether there is a directory at a path, or objects under an address."""
    return where.is_dir() if isinstance(where, Path) else _stores().is_directory(where)


def stats(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Names and `os.stat` results of the files and directories in a directory on a disk."""
    try:
        entries = os.scandir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        for entry in entries:
            try:
                yield entry.name, entry.stat()
            except FileNotFoundError:
                continue  # Somebody deleted it after it was listed.


def unread(where: Place, error: BaseException) -> RunError:
    """The error about what cannot be read, or is not what was written there."""
    kind = RunError if isinstance(where, Path) else StoreError
    return kind(f"{where}: cannot be read ({reason(error)})")
