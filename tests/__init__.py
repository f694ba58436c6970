"""The tests. Folders mirror the packages."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The repository."""

PILE_MINI = ROOT.parent / "shared" / "data" / "pile-mini"
"""Texts that lie beside a clone on some machines, and are no part of it."""
