"""What columns mean and what views need, as the database itself says it."""

import json
import math
import re

from headcount.queries.open.comments import column_texts
from headcount.queries.open.descriptions import PREFIXES
from headcount.queries.open.opened_runs import OpenedRuns
from headcount.queries.open.run_tables import measured_columns
from headcount.schemas.filled_tables import FILLINGS, TABLES

SAME_RANGE = ("mean_", "max_", "uniform_")  # prefixes that keep the range of a column

Facts = dict[str, dict[str, str]]  # description, unit, range and source, by name of the column


def views_read(opened: OpenedRuns, query: str) -> list[str]:
    """The views whose names stand in a query. DuckDB would name the tables below them."""
    words = re.findall(r"\w+", query.lower())
    views = opened.view_descriptions
    return [word for word in dict.fromkeys(words) if word in views]


def column_facts(opened: OpenedRuns, query: str) -> Facts:
    """Meaning, unit, range and source of columns by name, as the query's views say, then tables."""
    preferred = [*views_read(opened, query), *TABLES]
    rank = {view: preferred.index(view) for view in preferred}
    # The query's views are there by now, and making all others would take half a second.
    opened.make_tables()
    measured = measured_columns(opened.runs)
    texts = sorted(
        column_texts(opened.cursor(), measured),
        key=lambda text: rank.get(text[0], len(preferred)),
    )
    facts: Facts = {}
    for _, column, description in texts:
        facts.setdefault(column, {"description": description})
    formula_facts: Facts = {}
    sql = "SELECT name, unit, source, range_low, range_high FROM formulas"
    for name, unit, source, low, high in opened.fetched(sql):
        of_formula = {"unit": unit, "source": source}
        if low is not None:
            # JSON does not have infinity: an open end is null.
            ends = [end if math.isfinite(end) else None for end in (low, high)]
            of_formula["range"] = json.dumps(ends)
        formula_facts[name] = {key: text for key, text in of_formula.items() if text}
    for column, facts_of_column in facts.items():
        # The column that this one sums up: `entropy` for `mean_entropy`.
        prefixes = [prefix for prefix in (*PREFIXES, "uniform_") if column.startswith(prefix)]
        base_column = column.removeprefix(prefixes[0]) if prefixes else column
        # The standard deviation of a probability is one in unit, but not in range.
        has_base_range = column == base_column or column.startswith(SAME_RANGE)
        for key, text in formula_facts.get(base_column, {}).items():
            if key != "range" or has_base_range:
                facts_of_column[key] = text
    return facts


def why_empty(opened: OpenedRuns, query: str) -> list[str]:
    """For each view that a query reads and that has no rows, what a scan needs to fill it."""
    lines: list[str] = []
    for view in views_read(opened, query):
        need = _need(opened, view)
        if need and not opened.fetched(f'SELECT 1 FROM "{view}" LIMIT 1'):
            lines.append(f"{view} has no rows in these runs; it needs {need}")
    return lines


def _need(opened: OpenedRuns, view: str) -> str | None:
    """What a view needs: the field of a scan that fills a table, or what its description says."""
    if view in TABLES:
        if TABLES[view].written == "every shard":
            return "a shard that is done: headcount status RUN says how far a run is"
        if TABLES[view].written == "when shards are merged":
            return "merged shards: headcount compact RUN; head_summaries answers without"
        fields = [f"{filling.field} = […]" for filling in FILLINGS if filling.table.name == view]
        # Two kinds may fill one table.
        return f"{' or '.join(fields)} in the scan"
    # The description of a `.sql` file may end in such a sentence.
    need = re.search(r"Needs: (.+?)\.?$", opened.view_descriptions[view])
    return need[1] if need else None
