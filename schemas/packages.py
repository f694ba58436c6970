"""The packages of this project, where they lie, and doors to what few need of them.

`tests/project/test_imports.py` says what each package may import.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGES = ("schemas", "workers", "jobs", "queries", "exports", "reproduce", "models")
"""Each is a folder of the repository, and is imported as `headcount.NAME`."""

PACKAGE = Path(__file__).parent.parent
"""The installed package `headcount`. In a clone it has a link to the folder of each package."""

MEASURING = ("schemas", "workers")  # those that decide what a row says


def entered(door: str) -> Any:  # noqa: ANN401 (whatever stands behind the door)
    """What has this name in its module, which is imported now.

    >>> entered("schemas.errors.counted")(2, "door")
    '2 doors'
    """
    module, _, name = door.rpartition(".")
    return getattr(import_module(f"headcount.{module}"), name)
