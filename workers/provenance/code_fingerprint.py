"""The fingerprint of the code that measures, by which machines tell whether they run the same."""

import hashlib
import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import platformdirs

from headcount.schemas.errors import RunError
from headcount.schemas.fingerprints import digest, module_code
from headcount.schemas.packages import MEASURING, PACKAGE


class Code(NamedTuple):
    """The Python files of `schemas` and `workers`, as they were read."""

    fingerprint: str  # comments, docstrings and layout do not count
    content: str  # a digest of all bytes


_known_fingerprints: dict[str, str] = {}  # told by another process, by digest of the bytes


def code_fingerprint(root: Path = PACKAGE) -> str:
    """A fingerprint of the Python files of `schemas` and `workers`, without prose and layout."""
    return read_code(root).fingerprint


@cache
def read_code(root: Path = PACKAGE) -> Code:
    """The fingerprint of the code, and the digest of the bytes that it was made from."""
    paths = [path for package in MEASURING for path in (root / package).rglob("*.py")]
    # Sorted, because a folder lists its files in another order on each machine. The name is part
    # of it, or moving code between two files would go unseen.
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(paths)}
    hashed = hashlib.sha256()
    for name, content in files.items():
        # The lengths tell where a name or a file ends.
        hashed.update(f"{len(name)} {len(content)} {name}".encode())
        hashed.update(content)
    content_digest = hashed.hexdigest()
    known = _known_fingerprints.get(content_digest) or _remembered(content_digest)
    if known is not None:
        return Code(known, content_digest)
    parts = (
        part
        for name, content in files.items()
        for part in (name, module_code(content, with_errors=True))
    )
    fingerprint = digest(parts)
    # A cache that takes nothing only costs the next command half a second.
    with suppress(OSError, RuntimeError):
        file = _cache_file(content_digest)
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        temporary.write_text(fingerprint)
        os.replace(temporary, file)
    return Code(fingerprint, content_digest)


def _remembered(content_digest: str) -> str | None:
    """The fingerprint that an earlier command has made of the same bytes, if its cache is whole."""
    with suppress(OSError, RuntimeError, ValueError):
        fingerprint = _cache_file(content_digest).read_text(encoding="ascii")
        if re.fullmatch(r"[0-9a-f]{12}", fingerprint):
            return fingerprint
    return None


def _cache_file(content_digest: str) -> Path:
    # A user of a container may have neither HOME nor an entry in passwd, which is a RuntimeError.
    return platformdirs.user_cache_path("headcount") / "code" / content_digest


def learn_fingerprint(code: Code) -> None:
    """Take over the fingerprint of another process. It holds here if the bytes are the same.

    To parse all files takes half a second, and a replica may have no cache of its own.
    """
    _known_fingerprints[code.content] = code.fingerprint


def check_code(code: Code) -> None:
    """Refuse to work for a driver whose code is another one than this machine's."""
    learn_fingerprint(code)
    if code_fingerprint() != code.fingerprint:
        raise RunError(
            f"this node runs code {code_fingerprint()}, the driver {code.fingerprint}; remove the "
            "copy of headcount that is installed there"
        )
