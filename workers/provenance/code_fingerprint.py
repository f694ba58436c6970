"""The fingerprint of the code that measures, so that two machines can tell whether they run the
same.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from schemas.fingerprints import digest, module_code

ROOT = Path(__file__).parent.parent.parent


@cache
def code_fingerprint(root: Path = ROOT) -> str:
    """A fingerprint of every Python file of `schemas` and `workers`: comments, docstrings and layout
    do not count.
    """
    files = [file for package in ("schemas", "workers") for file in (root / package).rglob("*.py")]
    parts: list[str] = []
    for file in sorted(files):
        parts += [file.relative_to(root).as_posix(), module_code(file, with_errors=True)]
    return digest(parts)
