"""The names of the views that every run has: no plug-in may take one."""

import tomllib
from functools import cache

from headcount.schemas.filled_tables import TABLES
from headcount.schemas.packages import PACKAGE


@cache
def names_of_views() -> frozenset[str]:
    """The tables, and the views that `queries` makes of them."""
    folder = PACKAGE / "queries"
    texts = tomllib.loads((folder / "open/internal/columns.toml").read_text(encoding="utf-8"))
    shipped = (file.stem for file in (folder / "sql").rglob("*.sql"))
    return frozenset({*TABLES, *texts["tables"], *texts["views"], *shipped})
