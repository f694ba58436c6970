"""The fingerprint of the code that measures, so that two machines can tell whether they run the
same.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def code_fingerprint() -> str:
    """A hash of every Python file of `schemas` and `workers`."""
    digest = hashlib.sha256()
    for package in ("schemas", "workers"):
        for file in sorted((ROOT / package).rglob("*.py")):
            digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]
