"""What a file's content is known by."""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import hashlib
from typing import Any

import pyarrow as pa

BYTES = 16
"""Of BLAKE2b: 1.3 GB/s on any core; SHA-256 does 1.9 where the processor has it, 0.4 elsewhere."""


def digest_of(content: bytes | pa.Buffer) -> str:
    """The digest of some bytes.

    >>> digest_of(b"")
    'cae66941d9efbd404e4d88758ea67670'
    """
    return hashlib.blake2b(content, digest_size=BYTES).hexdigest()


def digest_of_file(file: Any) -> str:
    """The digest of an open file, from its beginning; its content is not held in memory."""
    file.seek(0)
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=BYTES)).hexdigest()
