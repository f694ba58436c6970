"""Values of parameters that name something of the runs: one that names nothing is an error."""

import re

from headcount.queries.open.opened_runs import OpenedRuns
from headcount.queries.open.shipped_views import way_to
from headcount.queries.open.sql_text import text_literal
from headcount.schemas.errors import QueryError, unknown_among

GROUPS = ("pile_set_name", "input_family", "model", "run_id")

KNOWN_VALUES = {
    "statistic": "SELECT name FROM statistics",
    "intervention": "SELECT DISTINCT unnest(interventions) FROM runs",
    "label": "SELECT DISTINCT 'L' || layer || 'H' || head FROM runs, "
    "unnest(range(n_layers)) AS layers(layer), unnest(range(n_heads)) AS heads(head)",
    "compare": f"SELECT unnest([{', '.join(map(text_literal, GROUPS))}])",
    "this": "SELECT DISTINCT {compare} FROM sequences JOIN runs USING (run_id)",
    "other": "SELECT DISTINCT {compare} FROM sequences JOIN runs USING (run_id)",
}
"""What exists, by the name of a parameter. `{compare}` is the column of that parameter's value."""

TEXT = r"'(?:[^']|'')*'"
CALL = re.compile(rf'"?\b(\w+)"?\s*\(((?:{TEXT}|[^()\'])*)\)')
ARGUMENT = re.compile(rf"(\w+)\s*:=\s*({TEXT})")


def check_values(opened: OpenedRuns, sql: str) -> None:
    """Refuse a value of a named query that names nothing in these runs."""
    for name, arguments in CALL.findall(sql):
        query = opened.shipped.queries.get(name.lower())
        literals = dict(ARGUMENT.findall(arguments))
        values = {each: text[1:-1].replace("''", "'") for each, text in literals.items()}
        for parameter in query.parameters if query else ():
            if parameter.name in KNOWN_VALUES and parameter.name in values:
                _check(opened, parameter.name, values)


def _check(opened: OpenedRuns, name: str, values: dict[str, str]) -> None:
    # Before the groups themselves: the column that has them.
    compare = values.get("compare", GROUPS[0])
    if name != "compare" and compare not in GROUPS:
        return
    column = f"runs.{compare}" if compare != GROUPS[0] else compare
    rows = opened.fetched(KNOWN_VALUES[name].format(compare=column))
    known = [value for (value,) in rows if value is not None]
    value = values[name]
    # People write l5h1 too.
    if (value.upper() if name == "label" else value) in known:
        return
    if name == "statistic" and (remedy := way_to(value)):
        raise QueryError(f"statistic {value!r} was not measured in these runs{remedy}")
    thing = compare if name in ("this", "other") else name
    listing = {
        "statistic": "SELECT name FROM statistics",
        "label": "SELECT DISTINCT label FROM heads",
        "intervention": "SELECT interventions FROM runs",
        "pile_set_name": "SELECT DISTINCT pile_set_name FROM sequences",
    }.get(thing, f"SELECT DISTINCT {thing} FROM runs")
    raise QueryError(unknown_among(thing, value, known, listing))
