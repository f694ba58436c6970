"""Formats that say where a sliding window can stand in for full attention."""

from headcount.schemas.registry import import_files

import_files(__name__, __path__)
