"""The fingerprint of the code that measures, by which machines tell whether they run the same."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from headcount.schemas.files.fingerprints import digest, module_code
from headcount.schemas.packages import MEASURING, PACKAGE


class Code(NamedTuple):
    """The Python files of `schemas` and `workers`, as they were read."""

    fingerprint: str
    """Comments, docstrings and layout do not count."""
    content: str
    """A digest of all bytes."""


_known_fingerprints: dict[str, str] = {}
"""Fingerprints that another process told this one, by the digest of the bytes."""


def code_fingerprint(root: Path = PACKAGE) -> str:
    """A fingerprint of every Python file of `schemas` and `workers`.

    Comments, docstrings and layout do not count.
    """
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
    known = _known_fingerprints.get(hashed.hexdigest())
    parts = (
        part
        for name, content in files.items()
        for part in (name, module_code(content, with_errors=True))
    )
    return Code(known or digest(parts), hashed.hexdigest())


def learn_fingerprint(code: Code) -> None:
    """Take over the fingerprint of another process. It holds here if the bytes are the same.

    To parse all files takes half a second, which every replica would spend anew.
    """
    _known_fingerprints[code.content] = code.fingerprint
