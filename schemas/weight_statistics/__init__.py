"""The statistics of the `weights` table, a file per family; importing this registers them all."""

from headcount.schemas.formula_kinds import WEIGHT_STATISTICS as WEIGHT_STATISTICS
from headcount.schemas.registry import import_files

import_files(__name__, __path__)
