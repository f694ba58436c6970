"""Object stores: what lies there, read and written through pyarrow.

Only what lies under an address is looked for here: `places` enters this room by its name.

An answer of a store may be cut anywhere. Of one that is cut inside its headers, pyarrow takes what
is left for all: an object without a byte, a directory without a name, bytes that never came. It
repeats a request that is cut later. So whatever looks empty, short or broken is read again before
it is believed, and in the end is an error of the store:

* the size of an object: `open_content`; its bytes: `read_at`;
* what a small object says: `places.read_as`;
* the names in a directory: `listed`, of which an empty one is looked for in the directory above.
"""
# pyarrow has no types.
# pyright: basic

import errno
import io
import os
import re
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import timedelta
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import pyarrow as pa
import pyarrow.fs as pafs

from headcount.schemas.errors import RunError
from headcount.schemas.places import READINGS, OpenFile, Place, StorePath, unread
from headcount.schemas.reasons import ATTEMPTS, reason

REQUEST_SECONDS, CONNECT_SECONDS = 15, 10
"""Time that a request waits for the next byte of its answer, and for a connection. Six seconds more
after its last own byte: curl's speed is a mean of so many.
"""

PROBES, PAUSE_SECONDS = 6, 0.5
"""Probes before the first request to a store that does not answer, and the pause between two."""

PROBE_SECONDS, PROBING_SECONDS = 8.0, 20.0
"""Time that a probe waits for any answer, and all together. Requests wait far longer, as a scan can
afford to.
"""

PAGE = 1000  # names that pyarrow asks for in one request

REQUEST_BYTES = 4 << 20  # bytes of a request for a part of an object: each waits 20 to 100 ms

MARK_BYTES = 16  # that stand in the memory before a store's answer is read into it

NOT_WHOLE = (
    "the store gave no whole answer to {} requests; bring it or the network up, then run the same "
    "command"
)


def filesystem_of(where: StorePath) -> pafs.FileSystem:
    """The pyarrow file system that reaches an address."""
    scheme, bucket = where.url.split("/")[:3:2]
    return _filesystem(scheme[:-1], bucket, *region_and_endpoint())


def is_file(where: StorePath) -> bool:
    """Whether there is such an object; raises `RunError` if the store does not say."""
    try:
        return filesystem_of(where).get_file_info(where.key).type is pafs.FileType.File
    except OSError as error:
        raise unread(where, error) from None


def is_directory(where: StorePath) -> bool:
    """Whether there are objects under an address."""
    try:
        # A store may keep a marker of a directory in which nothing lies.
        kind = filesystem_of(where).get_file_info(where.key).type
    except OSError as error:
        raise unread(where, error) from None
    if kind is pafs.FileType.NotFound:
        return bool(listed(where))  # Unless the answer was cut.
    return kind is pafs.FileType.Directory


def read_bytes(where: StorePath) -> bytes:
    """The whole content; raises FileNotFoundError if there is no such object."""
    with open_content(where) as content:
        return read_at(content, content.size(), 0, where)


def write_bytes(where: StorePath, content: bytes | pa.Buffer) -> None:
    """Make an object with all of its content."""
    # One call writes everything. Closing a stream publishes what it has received so far, so an
    # error between two calls would publish half of the content.
    with filesystem_of(where).open_output_stream(where.key, compression=None) as file:
        file.write(content)


def delete(where: StorePath) -> None:
    """Delete an object; raises FileNotFoundError if there is none."""
    filesystem_of(where).delete_file(where.key)


def opened(where: StorePath) -> OpenFile:
    """The object as a file that can be read at any place."""
    return io.BufferedReader(_Object(open_content(where), where), REQUEST_BYTES)


def open_content(where: StorePath) -> Any:  # noqa: ANN401 (pyarrow has no types)
    """pyarrow's file, whose size is right: without a byte only where a listing says so too."""
    for _ in range(READINGS):
        content = filesystem_of(where).open_input_file(where.key)
        if content.size() and tag_of(content):
            return content
    # Perhaps it has no byte, or the store has no tags.
    sizes_listed = [info.size for info in listed(where.parent) if info.base_name == where.name]
    if sizes_listed == [content.size()]:
        return content
    raise OSError(errno.EIO, NOT_WHOLE.format(READINGS), str(where))


class _Object(io.RawIOBase):
    """An object of a store, of whose bytes each is there or an error is raised."""

    def __init__(self, content: Any, where: StorePath) -> None:  # noqa: ANN401 (pyarrow's file)
        self._content, self._where = content, where
        self._size: int = content.size()
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = begin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 (any buffer)
        content = self._read(min(len(buffer), self._size - self._position))
        buffer[: len(content)] = content
        return len(content)

    def readall(self) -> bytes:
        return self._read(self._size - self._position)

    def _read(self, size: int) -> bytes:
        content = read_at(self._content, max(0, size), self._position, self._where)
        self._position += len(content)
        return content

    def close(self) -> None:
        self._content.close()
        super().close()


def tag_of(content: Any) -> str | bytes | None:  # noqa: ANN401 (pyarrow's file)
    """What a store calls the content of an object; the request that opened it brought the tag."""
    metadata: dict[Any, Any] = content.metadata()
    return metadata.get("ETag") or metadata.get("etag")


def read_at(content: Any, size: int, position: int, where: StorePath) -> bytes:  # noqa: ANN401
    """So many bytes of pyarrow's file at a position; raises OSError if they do not all come."""
    try:
        for _ in range(READINGS if size else 0):
            # Of an answer without a body pyarrow says that all bytes came, and gives whatever lay
            # in the memory. So that begins with a mark, which then is still there.
            buffer = bytearray(size)
            mark = os.urandom(min(size, MARK_BYTES))
            buffer[: len(mark)] = mark
            content.seek(position)
            if content.readinto(buffer) == size and buffer[: len(mark)] != mark:
                return bytes(buffer)
    except OSError as error:
        # Somebody deleted it after it was opened.
        if re.search("NO_SUCH_KEY|RESOURCE_NOT_FOUND", str(error)):
            raise FileNotFoundError(errno.ENOENT, "is gone", str(where)) from None
        raise
    if size:
        raise OSError(errno.EIO, NOT_WHOLE.format(READINGS), str(where))
    return b""


def region_and_endpoint() -> tuple[str | None, str | None]:
    """What the environment says of S3; pyarrow does not read these variables by itself."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return region, os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def address_of(scheme: str, region: str | None, endpoint: str | None) -> str:
    """Where the stores of a scheme answer."""
    if endpoint is not None and scheme != "gs":
        return endpoint
    if scheme == "gs":
        return os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"
    if region is None:
        return "https://s3.amazonaws.com"
    return f"https://s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"


@cache
def _filesystem(
    scheme: str, bucket: str, region: str | None, endpoint: str | None
) -> pafs.FileSystem:
    """The file system of a bucket; the cache keeps its connections and probes each store once."""
    _require_answer(f"{scheme}://{bucket}", address_of(scheme, region, endpoint))
    if scheme == "gs":
        return pafs.GcsFileSystem(retry_time_limit=timedelta(seconds=60))
    if region is None and endpoint is None:
        try:
            region = pafs.resolve_s3_region(bucket)
        except OSError:
            # Not every store says it. The library then takes its own default.
            region = None
    return pafs.S3FileSystem(
        region=region,
        endpoint_override=endpoint,
        connect_timeout=CONNECT_SECONDS,
        request_timeout=REQUEST_SECONDS,
        # AWS's standard strategy has a quota: where 30 % of the answers are 503, it soon repeats
        # nothing any more.
        retry_strategy=pafs.AwsDefaultS3RetryStrategy(max_attempts=ATTEMPTS),
        allow_delayed_open=True,  # Small objects are one PUT instead of a multipart upload.
    )


def _require_answer(store: str, address: str) -> None:
    """Raise `RunError` if a store does not answer at all: a request would wait for minutes.

    Any answer will do. Behind a proxy nothing is asked, because the proxy itself would answer.
    """
    url = urlsplit(address if "://" in address else f"http://{address}")
    host = url.hostname or ""
    if getproxies().get(url.scheme) and not proxy_bypass(host):
        return
    # Any certificate will do: a probe sends nothing that must be protected.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    problem: Exception = OSError("no time")
    begun = time.monotonic()
    for _ in range(PROBES):
        # A probe that could not end in time is not begun.
        if time.monotonic() > begun + PROBING_SECONDS - PROBE_SECONDS:
            break
        if url.scheme == "https":
            probe = HTTPSConnection(host, url.port, timeout=PROBE_SECONDS, context=context)
        else:
            probe = HTTPConnection(host, url.port, timeout=PROBE_SECONDS)
        with closing(probe):
            try:
                probe.request("HEAD", "/")
                probe.getresponse()
                return
            except (OSError, HTTPException) as error:
                problem = error
        time.sleep(PAUSE_SECONDS)
    variable = "AWS_ENDPOINT_URL" if store.startswith("s3:") else "STORAGE_EMULATOR_HOST"
    raise RunError(
        f"{store}: the store at {address} does not answer ({reason(problem)}); bring it or the "
        f"network up, or name another address in {variable}, then run the same command"
    )


def wait_for_store(where: Place) -> None:
    """Wait for a store that does not answer for as long as a request does, which begins now.

    Without it, the first request of a process gives up after `PROBING_SECONDS`.
    """
    deadline = time.monotonic() + (ATTEMPTS + 1) * REQUEST_SECONDS
    while isinstance(where, StorePath):
        try:
            _ = filesystem_of(where)
            return
        except RunError:
            if time.monotonic() > deadline:
                raise


def sizes(directory: StorePath) -> Iterator[tuple[str, int]]:
    """Names and sizes of the objects in a directory; none if it does not exist."""
    files = (info for info in listed(directory) if info.type is pafs.FileType.File)
    return ((info.base_name, info.size) for info in files)


def listed(directory: StorePath) -> list[pafs.FileInfo]:
    """What lies in a directory of a store; nothing if it does not exist."""
    longest: list[pafs.FileInfo] = []
    is_there: bool | None = None
    try:
        for _ in range(READINGS):
            try:
                longest = max(longest, _listing(directory), key=len)
            except FileNotFoundError:
                # There is none, or the answer was cut.
                is_there = _is_listed_above(directory)
                if is_there is False:
                    return []
                continue
            # A page that is cut has no names, so those behind full pages may be missing. The
            # directory itself may be among the names of a page.
            if not longest or len(longest) % PAGE not in (0, PAGE - 1):
                return longest
    except OSError as error:
        raise unread(directory, error) from None
    if is_there and not longest:
        raise unread(directory, OSError(NOT_WHOLE.format(READINGS)))
    return longest


def _is_listed_above(directory: StorePath) -> bool | None:
    """Whether the directory above lists this one; None if there is none, or it may not be listed.

    A cut answer about this one has no names. One about that one has, if anything else lies there.
    """
    above = directory.parent
    if not above.key.strip("/"):
        return None  # A bucket may be empty.
    try:
        directories = (i.base_name for i in listed(above) if i.type is pafs.FileType.Directory)
        return directory.name in directories
    except RunError:
        return None


def _listing(directory: StorePath, recursive: bool = False) -> list[pafs.FileInfo]:
    """Raises FileNotFoundError where an answer has neither a name nor a marker of the directory."""
    selector = pafs.FileSelector(directory.key, recursive=recursive)
    return filesystem_of(directory).get_file_info(selector)


def delete_directory(directory: StorePath) -> None:
    """Delete a directory of a store and all that is below it; nothing happens if there is none."""
    for _ in range(READINGS):
        # It deletes what it lists, which a cut answer makes fewer.
        with suppress(FileNotFoundError):
            filesystem_of(directory).delete_dir(directory.key)
        if not listed(directory):
            return
    raise OSError(errno.EIO, NOT_WHOLE.format(READINGS), str(directory))


def object_info(where: StorePath) -> pafs.FileInfo:
    """What the store says of an object, or that there is none."""
    info = filesystem_of(where).get_file_info(where.key)
    if info.type is not pafs.FileType.File or info.size:
        return info
    # The answer was cut, or there is not a byte in it.
    infos = [each for each in listed(where.parent) if each.base_name == where.name]
    return infos[0] if infos else info


def matching(pattern: StorePath) -> list[tuple[StorePath, int]]:
    """Objects of a store that match a glob, and their sizes; the one of that very name if there is.

    `*` stays within one part of the path, `**/` spans several. Everything below the part before the
    first wildcard is listed.
    """
    from fsspec.utils import glob_translate

    info = object_info(pattern)
    if info.type is pafs.FileType.File:
        return [(pattern, info.size)]
    fixed = re.split(r"[*?[]", pattern.key)[0]
    if fixed == pattern.key:
        return []
    # Two asterisks that are not a whole part mean the same as one.
    matches = re.compile(glob_translate(re.sub(r"(?<=[^/])\*\*|\*\*(?=[^/])", "*", pattern.key)))
    scheme = pattern.url.partition("://")[0]
    return [
        (StorePath(f"{scheme}://{info.path}"), info.size)
        for info in _all_below(StorePath(f"{scheme}://{fixed.rpartition('/')[0]}"))
        if info.type is pafs.FileType.File and matches.fullmatch(info.path)
    ]


def _all_below(directory: StorePath) -> list[pafs.FileInfo]:
    """Everything below a directory of a store, as two listings say it; nothing if it is not there.

    A bucket has no directory above, so all listings must say that nothing is there.
    """
    before, is_there = -1, None
    for _ in range(READINGS):
        try:
            infos = _listing(directory, recursive=True)
        except FileNotFoundError:
            # There is none, or the answer was cut.
            infos, is_there = [], _is_listed_above(directory)
            if is_there is False:
                return []
        if infos and len(infos) == before:
            return infos
        before = max(before, len(infos))
    if before == 0 and is_there is None:
        return []
    raise OSError(errno.EIO, NOT_WHOLE.format(READINGS), str(directory))
