"""Where runs and corpora lie: a local path, or one in an object store with the few of pathlib's
verbs that we need.

A file is written whole or not at all: a temporary name, fsync and rename on a disk, one upload in a
store.
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import os
import re
import secrets
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import pyarrow as pa
import pyarrow.fs as pafs

from schemas.errors import RunError, ScanError

STORES = ("s3", "gs")
ATTEMPTS = 6
"""How often a request to a store is tried, with growing pauses: about ten seconds in all."""

KNOCKS = 6
"""How often a store is asked whether it is there, before anything else is asked of it."""

KNOCK_SECONDS = 8.0
"""A store says something in this time. Requests to it wait far longer, as a scan may do."""

KNOCKING_SECONDS = 20.0
"""No more is asked after this time."""

PAUSE_SECONDS = 0.5
"""Between two times that it is asked."""


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

    @property
    def filesystem(self) -> Any:
        """The pyarrow file system that reaches it."""
        scheme, _, key = self.url.partition("://")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        # pyarrow does not look for it by itself.
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        return _filesystem(scheme, key.partition("/")[0], region, endpoint)

    def is_file(self) -> bool:
        """Whether there is such an object; a store that does not say raises `RunError`."""
        try:
            return self.filesystem.get_file_info(self.key).type is pafs.FileType.File
        except OSError as error:
            raise RunError(f"{self}: cannot be read ({reason(error)})") from None

    def read_bytes(self) -> bytes:
        """The whole content; where there is none, FileNotFoundError."""
        with self.open() as file:
            return file.read()

    def open(self) -> Any:
        """The object as a file that can be read anywhere."""
        return self.filesystem.open_input_file(self.key)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object."""
        try:
            self.filesystem.delete_file(self.key)
        except FileNotFoundError:
            if not missing_ok:
                raise


Place = Path | StorePath


def place(where: str | Place) -> Place:
    """A local path, `file://…`, `s3://bucket/…` or `gs://bucket/…`; anything else raises
    `ScanError`.

    >>> place("s3://bucket/runs/") / "run_id=a-1"
    StorePath(url='s3://bucket/runs/run_id=a-1')
    >>> place("abfs://box/runs")
    Traceback (most recent call last):
    schemas.errors.ScanError: abfs://box/runs: expected a path, file://, s3:// or gs://
    """
    if isinstance(where, StorePath):
        return where
    text = str(where)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return Path(os.path.expanduser(text))
    if scheme == "file" and rest.startswith("/"):
        return Path(rest)
    if scheme not in STORES:
        raise ScanError(
            f"{text}: expected a path, file://, {' or '.join(f'{name}://' for name in STORES)}"
        )
    if "@" in rest.partition("/")[0]:
        raise ScanError(
            f"{scheme}://…@{rest.rpartition('@')[2]}: an address is kept with the run and must "
            "hold no credentials; set them in the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, an "
            "instance profile)"
        )
    if not rest.partition("/")[0]:
        raise ScanError(f"{text}: expected {scheme}://BUCKET/PATH")
    return StorePath(re.sub(r"(?<!:)/+", "/", text).rstrip("/"))


@cache
def _filesystem(scheme: str, bucket: str, region: str | None, endpoint: str | None) -> Any:
    _knock(f"{scheme}://{bucket}", endpoint or _public_address(scheme, region))
    if scheme == "gs":
        return pafs.GcsFileSystem(retry_time_limit=timedelta(seconds=60))
    if region is None and endpoint is None:
        try:
            region = pafs.resolve_s3_region(bucket)
        except OSError:
            region = None
    return pafs.S3FileSystem(
        region=region,
        endpoint_override=endpoint,
        connect_timeout=10,
        request_timeout=30,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        allow_delayed_open=True,  # Small objects are one PUT instead of a multipart upload.
    )


def _public_address(scheme: str, region: str | None) -> str:
    """Where a store is reached unless the environment names another place."""
    if scheme == "gs":
        return os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"
    if region is None:
        return "https://s3.amazonaws.com"
    return f"https://s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"


def _knock(store: str, address: str) -> None:
    """Refuse a store that does not answer at all: a request to it would be waited for for minutes.

    Any answer will do. Behind a proxy nothing is asked, because a proxy answers itself.
    """
    parts = urlsplit(address if "://" in address else f"http://{address}")
    host, secure = parts.hostname or "", parts.scheme == "https"
    if getproxies().get(parts.scheme) and not proxy_bypass(host):
        return
    problem: Exception | None = None
    until = time.monotonic() + KNOCKING_SECONDS
    for _ in range(KNOCKS):
        if time.monotonic() > until - KNOCK_SECONDS:
            break
        connection = (
            HTTPSConnection(host, parts.port, timeout=KNOCK_SECONDS, context=_any_certificate())
            if secure
            else HTTPConnection(host, parts.port, timeout=KNOCK_SECONDS)
        )
        try:
            connection.request("HEAD", "/")
            connection.getresponse()
        except (OSError, HTTPException) as error:
            problem = error
            time.sleep(PAUSE_SECONDS)
        else:
            return
        finally:
            connection.close()
    variable = "AWS_ENDPOINT_URL" if store.startswith("s3:") else "STORAGE_EMULATOR_HOST"
    raise RunError(
        f"{store}: the store at {address} does not answer ({reason(problem or OSError())}); bring "
        f"it or the network up, or name another address in {variable}, then run the same command"
    ) from None


def _any_certificate() -> ssl.SSLContext:
    """For asking whether somebody is there: nothing is sent, so nobody is trusted."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def write_whole(where: Place, content: bytes | pa.Buffer) -> None:
    """Make a file visible with all of its content or not at all; what cannot be written raises
    `RunError`.

    On a disk the temporary name does not end in .parquet or .json, so no glob takes a half-written
    file for a whole one.
    """
    try:
        if isinstance(where, StorePath):
            # One call writes all there is: a stream that is closed after half of it publishes that
            # half.
            with where.filesystem.open_output_stream(where.key, compression=None) as file:
                file.write(content)
        else:
            _write_to_disk(where, content)
    except OSError as error:
        advice = (
            "free space or choose another out"
            if isinstance(where, Path)
            else "mend the access or the store"
        )
        raise RunError(
            f"{where}: cannot be written ({reason(error)}); {advice}, then run the same command"
        ) from None


def _write_to_disk(path: Path, content: bytes | pa.Buffer) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def settle(directory: Place) -> None:
    """Make sure that the names in a directory outlive a power cut, before what they replace is
    deleted.

    Where nothing is deleted a name that is lost does no harm: its shard is measured again.
    """
    if isinstance(directory, Path):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_whole(where: Place) -> Any:
    """A file that can be read anywhere; where there is none, FileNotFoundError."""
    return where.open("rb") if isinstance(where, Path) else where.open()


def absolute(where: str | Place) -> Place:
    """A place that means the same in any working directory, and whose last part is its name, which
    "." has not.
    """
    found = place(where)
    return Path(os.path.abspath(found)) if isinstance(found, Path) else found


def names(directory: Place) -> Iterator[str]:
    """Names of what lies directly in a directory, in no order; nothing where there is no such
    directory.
    """
    if isinstance(directory, StorePath):
        selector = pafs.FileSelector(directory.key, allow_not_found=True)
        try:
            found = directory.filesystem.get_file_info(selector)
        except OSError as error:
            raise RunError(f"{directory}: cannot be read ({reason(error)})") from None
        yield from (info.base_name for info in found)
        return
    try:
        yield from os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return


def sizes(directory: Place) -> Iterator[tuple[str, int]]:
    """Names and sizes of what lies directly in a directory, in no order; nothing where there is no
    such directory.
    """
    if isinstance(directory, StorePath):
        for info in directory.filesystem.get_file_info(
            pafs.FileSelector(directory.key, allow_not_found=True)
        ):
            if info.type is pafs.FileType.File:
                yield info.base_name, info.size
        return
    for name, found in stats(directory):
        yield name, found.st_size


def stats(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Names of what lies directly in a directory on a disk, and what the system says of each."""
    try:
        entries = os.scandir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        for entry in entries:
            try:
                yield entry.name, entry.stat()
            except FileNotFoundError:
                continue  # It is gone since it was listed.


def matching(pattern: StorePath) -> list[tuple[StorePath, int]]:
    """Objects of a store that match a glob, and their sizes; `*` stays within a part of the path,
    `**/` does not.

    Everything below the part before the first wildcard is listed.
    """
    parts = pattern.key.split("/")
    fixed = next((i for i, part in enumerate(parts) if re.search(r"[*?[]", part)), len(parts))
    if fixed == len(parts):
        info = pattern.filesystem.get_file_info(pattern.key)
        return [(pattern, info.size)] if info.type is pafs.FileType.File else []
    selector = pafs.FileSelector("/".join(parts[:fixed]), allow_not_found=True, recursive=True)
    scheme = pattern.url.partition("://")[0]
    return [
        (StorePath(f"{scheme}://{info.path}"), info.size)
        for info in pattern.filesystem.get_file_info(selector)
        if info.type is pafs.FileType.File and _matches(info.path.split("/"), parts)
    ]


def _matches(path: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return _matches(path, pattern[1:]) or (bool(path) and _matches(path[1:], pattern))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])


def reason(error: BaseException) -> str:
    """Why something failed, in the words of the system or the store, on one line."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return text if len(text) <= 240 else f"{text[:239]}…"
