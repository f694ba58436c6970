"""The views that are no `.sql` files, and what is said of columns."""

import tomllib
from pathlib import Path

from headcount.schemas.filled_tables import TABLES

COLUMNS_FILE = Path(__file__).with_name("internal") / "columns.toml"

TEXTS = tomllib.loads(COLUMNS_FILE.read_text(encoding="utf-8"))

VIEWS: dict[str, str] = {table.name: table.description for table in TABLES.values()} | TEXTS[
    "views"
]
"""Description of every view that is not a `.sql` file."""

PREFIXES: dict[str, str] = TEXTS["prefixes"]
"""What views put before the name of a column that they sum up, and what it means."""
