"""The packages of this project, and where they lie.

`tests/project/test_imports.py` says what each package may import.
"""

from pathlib import Path

PACKAGES = ("schemas", "workers", "jobs", "queries", "exports", "reproduce", "models")
"""Each is a folder of the repository, and is imported as `headcount.NAME`."""

PACKAGE = Path(__file__).parent.parent
"""The installed package `headcount`. In a clone it has a link to the folder of each package."""

MEASURING = ("schemas", "workers")  # those that decide what a row says
