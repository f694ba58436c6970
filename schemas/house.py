"""The packages of this project: the one list of them.

`pyproject.toml` cannot read it; a test holds the two together. `tests/project/test_imports.py` says what
each package may import.
"""

from __future__ import annotations

PACKAGES = ("schemas", "workers", "jobs", "queries", "exports", "reproduce", "models")
"""All of them lie beside `headcount.py`, and each command may need any of them."""

MEASURING = ("schemas", "workers")
"""Those that decide what a row says."""
