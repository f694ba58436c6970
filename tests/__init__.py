"""The tests. Folders mirror the packages."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The repository."""
