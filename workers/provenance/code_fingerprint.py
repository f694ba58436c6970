"""The fingerprint of the code that measures.

Two machines compare it to tell whether they run the same code.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from schemas.fingerprints import digest, module_code

ROOT = Path(__file__).parent.parent.parent


@cache
def code_fingerprint(root: Path = ROOT) -> str:
    """A fingerprint of every Python file of `schemas` and `workers`.

    Comments, docstrings and layout do not count.
    """
    files = [file for package in ("schemas", "workers") for file in (root / package).rglob("*.py")]
    parts: list[str] = []
    # Sorted, because a folder lists its files in another order on each machine. The name is part
    # of it, or moving code between two files would go unseen.
    for file in sorted(files):
        parts += [file.relative_to(root).as_posix(), module_code(file, with_errors=True)]
    return digest(parts)
