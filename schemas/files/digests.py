"""The digest by which a commit knows the content of a file."""

import hashlib
from io import BufferedReader

import pyarrow as pa


def digest_of(content: bytes | pa.Buffer) -> str:
    """The digest of some bytes.

    >>> digest_of(b"")
    'cae66941d9efbd404e4d88758ea67670'
    """
    # BLAKE2b made 1.3 GB/s on one core. SHA-256 made 1.9 GB/s, but only with special instructions
    # of the processor.
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def digest_of_file(file: BufferedReader) -> str:
    """The digest of an open file, from its beginning; the content is not held in memory."""
    file.seek(0)
    # A function, because `file_digest` makes the hash itself and cannot pass a length.
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
