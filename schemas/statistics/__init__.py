"""The statistics of the `heads` table, a file per family; importing this registers them all."""

from headcount.schemas.formula_kinds import STATISTICS as STATISTICS
from headcount.schemas.registry import import_files

import_files(__name__, __path__)
