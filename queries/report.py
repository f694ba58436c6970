"""One HTML file with what the heads of some runs do: heatmaps, rankings, norms. It needs no network
and no server.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import duckdb

from queries.answers import run_query
from queries.connection import QUERIES, connect
from queries.html_page import Record, add_figure, write_html
from queries.run_tables import bounds
from schemas.errors import QueryError
from schemas.places import Place
from schemas.predictions import PREDICTIONS
from schemas.statistics import STATISTICS

TOP = 10
"""Heads in a ranking."""

RANKINGS = {
    "sink_heads": (
        "Strongest sinks",
        "is_sink",
        ["sink_mass", "chance", "sink_rate", "value_norm_ratio"],
    ),
    "induction_heads": (
        "Strongest induction",
        "is_induction",
        ["induction_score", "chance", "coverage"],
    ),
}
"""View, title, the column that marks a head, and the columns shown; the first of them is ranked."""
DORMANT = ["induction_repeated", "sink_repeated", "sink_unrepeated", "sink_text"]
LAYER_LINES = {"resid_pre_norm", "sink_resid_pre_norm", "resid_post_norm", "sink_resid_post_norm"}


def write_report(path: str | Place, output: Path) -> None:
    """Write the report on the runs at `path` into one HTML file."""
    figures: list[Record] = []
    connection = connect(path)
    runs = _records(connection, "runs")
    statistics = {row["name"]: row for row in _records(connection, "statistics")}
    sections = [
        section for run in runs for section in _sections(connection, run, statistics, figures)
    ]
    content = {"sections": sections, "dormant": _dormant(connection, figures)}
    write_html(QUERIES / "report", output, content, figures)


def _records(connection: duckdb.DuckDBPyConnection, question: str) -> list[Record]:
    answer = run_query(connection, question)
    return [dict(zip(answer.schema.names, row, strict=True)) for row in answer.rows()]


def _optional(connection: duckdb.DuckDBPyConnection, question: str) -> list[Record]:
    """The rows of a view that these runs may lack the columns for."""
    try:
        return _records(connection, question)
    except QueryError:
        return []


def _sections(
    connection: duckdb.DuckDBPyConnection,
    run: Record,
    statistics: dict[str, Record],
    figures: list[Record],
) -> list[Record]:
    """One section for each intervention of a run; a run without rows yet still has one."""
    run_id = _text(run["run_id"])
    by_head = _records(connection, f"FROM by_head WHERE run_id = {run_id}")
    chance = _optional(
        connection, f"SELECT avg(COLUMNS('^chance_.*')) FROM sequences WHERE run_id = {run_id}"
    )
    damaged = _records(connection, f"FROM shards WHERE run_id = {run_id} AND status = 'damaged'")
    options = ", ".join(
        f"{key} {value}"
        for key, value in json.loads(run["input_options"]).items()
        if value is not None
    )
    predictions = _predictions(connection, run_id)
    sections = []
    for intervention in run["interventions"]:
        where = f"WHERE run_id = {run_id} AND intervention = {_text(intervention)}"
        rows = [row for row in by_head if row["intervention"] == intervention]
        lines = _optional(connection, f"FROM layer_norms {where}")
        families, layers, constants = _statistics(
            run, rows, statistics, chance[0] if chance else {}, lines, figures
        )
        sections.append({
            "run": run, "intervention": intervention, "engine": _engine(connection, run, intervention),
            "options": options, "families": families, "constants": constants,
            "empty": not rows, "damaged": [row["shard"] for row in damaged],
            "rankings": [
                {"title": title, "flag": flag, "columns": columns, "rows": ranked}
                for view, (title, flag, columns) in RANKINGS.items()
                if (ranked := _optional(connection, f"FROM {view} {where} AND {columns[0]} IS NOT NULL LIMIT {TOP}"))
            ],
            "layers": _norm_lines(lines, figures) + layers,
            "predictions": predictions.get(intervention, []),
            "pile_sets": _pile_sets(connection, run, where, figures),
        })  # fmt: skip
    return sections


def _engine(connection: duckdb.DuckDBPyConnection, run: Record, intervention: str) -> str:
    """What measured an intervention; before its first shard, what is to."""
    sql = f"""
        SELECT DISTINCT method.engine, method.built_layers
        FROM (SELECT unnest(methods) AS method FROM shards WHERE run_id = {_text(run["run_id"])})
        WHERE method.intervention = {_text(intervention)} ORDER BY ALL
    """
    return "; ".join(map(_engine_words, _records(connection, sql))) or run["engine"]


def _engine_words(method: Record) -> str:
    layers = method["built_layers"]
    built = f", with built patterns in layers {' '.join(map(str, layers))}" if layers else ""
    return f"{method['engine']}{built}"


def _predictions(connection: duckdb.DuckDBPyConnection, run_id: str) -> dict[str, list[Record]]:
    """By intervention, what the model predicts in one number a sequence: mean, and mean change from
    the untouched model.
    """
    found: dict[str, list[Record]] = {}
    for prediction in PREDICTIONS.values():
        if prediction.per_token:
            continue
        name = prediction.name
        sql = f"""
        SELECT intervention, avg(value) AS mean, stddev_samp(value) / sqrt(count(value)) AS standard_error,
               avg(change) AS change, stddev_samp(change) / sqrt(count(change)) AS change_error
        FROM (SELECT e.intervention, e.{name}::DOUBLE AS value, value - n.{name} AS change
              FROM sequences AS e LEFT JOIN sequences AS n
                  ON n.run_id = e.run_id AND n.sequence = e.sequence AND n.intervention = 'none' AND e.intervention <> 'none'
              WHERE e.run_id = {run_id})
        GROUP BY intervention HAVING mean IS NOT NULL"""
        for row in _optional(connection, sql):
            card = {"name": name, "unit": prediction.unit, "meaning": prediction.meaning, **row}
            found.setdefault(row["intervention"], []).append(card)
    return found


def _statistics(
    run: Record, rows: list[Record], statistics: dict[str, Record], chance: Record, lines: list[Record],
    figures: list[Record],
) -> tuple[dict[str, list[Record]], list[Record], list[Record]]:  # fmt: skip
    """Heatmaps by family; lines for what all heads of a layer share; numbers for what the whole
    model shares.
    """
    families: dict[str, list[Record]] = {}
    layers: list[Record] = []
    constants: list[Record] = []
    for name in run["statistics"] if rows else []:
        z = _matrix(run, rows, f"mean_{name}")
        entry = statistics[name]
        card = {**entry, "title": name, "chance_level": chance.get(f"chance_{name}")}
        values = [value for line in z for value in line if value is not None]
        if not values:
            constants.append({**card, "value": None})
        elif run["n_heads"] > 1 and all(_same(line) for line in z):
            by_layer = [line[0] for line in z]
            if _same(by_layer):
                constants.append({**card, "value": by_layer[0]})
            elif not (lines and name in LAYER_LINES):
                series = [{"name": name, "y": by_layer}]
                layers.append(
                    card | add_figure(figures, kind="lines", series=series, y=entry["unit"])
                )
        else:
            low, high, scale = _scale(entry, values)
            figure = add_figure(
                figures,
                kind="heatmap",
                z=z,
                low=low,
                high=high,
                scale=scale,
                x="head",
                y="layer (0 at top)",
            )
            families.setdefault(_family(name), []).append(card | figure)
    return families, layers, constants


def _scale(entry: Record, values: list[float]) -> tuple[float, float, str]:
    """Colours: 0 to 1 where that is the range, even around 0 where the sign means something, else
    what occurs.
    """
    low, high = bounds({"range": [entry["range_low"], entry["range_high"]]})
    if (low, high) == (0, 1):
        return 0, 1, "sequential"
    if low < 0:
        far = max(abs(value) for value in values) or 1
        return -far, far, "diverging"
    return min(values), max(values), "sequential"


def _matrix(run: Record, rows: list[Record], column: str) -> list[list[float | None]]:
    layers = run["n_layers"] or 1 + max(row["layer"] for row in rows)
    heads = run["n_heads"] or 1 + max(row["head"] for row in rows)
    z: list[list[float | None]] = [[None] * heads for _ in range(layers)]
    for row in rows:
        z[row["layer"]][row["head"]] = row[column]
    return z


def _same(values: list[float | None]) -> bool:
    """Whether all values are one, up to the order in which a mean was added up."""
    first = values[0]
    if first is None:
        return all(value is None for value in values)
    return all(
        value is not None and math.isclose(value, first, rel_tol=1e-6, abs_tol=1e-9)
        for value in values
    )


def _family(name: str) -> str:
    known = STATISTICS.get(name)
    return known.compute.__module__.rpartition(".")[2] if known else "other"


def _norm_lines(lines: list[Record], figures: list[Record]) -> list[Record]:
    if all(line["resid_pre_first"] is None for line in lines):
        return []
    norms = {
        "before the layer, position 0": "resid_pre_first",
        "before the layer, others": "resid_pre_others",
        "after the layer, position 0": "resid_post_first",
        "after the layer, others": "resid_post_others",
    }
    ratios = {"before the layer": "resid_pre_ratio", "after the layer": "resid_post_ratio"}
    charts = [
        (
            "Residual stream",
            "Mean length at position 0 and at the other positions.",
            norms,
            "euclidean norm",
        ),
        ("Residual peak", "Length at position 0 over the mean of the others.", ratios, "ratio"),
    ]
    cards = []
    for title, meaning, columns, unit in charts:
        series = [
            {"name": name, "y": [line[column] for line in lines]}
            for name, column in columns.items()
        ]
        figure = add_figure(figures, kind="lines", series=series, y=unit, log=True)
        cards.append({"title": title, "meaning": meaning} | figure)
    return cards


def _pile_sets(
    connection: duckdb.DuckDBPyConnection, run: Record, where: str, figures: list[Record]
) -> list[Record]:
    """Part of the Pile × layer, mean over heads, for the two statistics that differ most between
    kinds of text.
    """
    cards = []
    for name in ("sink_mass", "induction_score"):
        if name not in run["statistics"]:
            continue
        sql = (
            f"SELECT pile_set_name, layer, avg(mean_{name}) AS mean, max(sequences) AS sequences "
            f"FROM by_pile_set {where} GROUP BY ALL ORDER BY ALL"
        )
        rows = _optional(connection, sql)
        names = list(dict.fromkeys(f"{row['pile_set_name']} ({row['sequences']})" for row in rows))
        z: list[list[float | None]] = [[None] * run["n_layers"] for _ in names]
        for row in rows:
            z[names.index(f"{row['pile_set_name']} ({row['sequences']})")][row["layer"]] = row[
                "mean"
            ]
        if names:
            figure = add_figure(
                figures,
                kind="heatmap",
                z=z,
                low=0,
                high=1,
                scale="sequential",
                x="layer",
                y="",
                rows=names,
            )
            meaning = "Mean over the heads of a layer, per part of the Pile (number of sequences)."
            cards.append({"title": name, "meaning": meaning} | figure)
    return cards


def _dormant(connection: duckdb.DuckDBPyConnection, figures: list[Record]) -> list[Record]:
    """One block per model, intervention and combination of runs."""
    blocks: dict[tuple[Any, ...], list[Record]] = {}
    for row in _optional(connection, "dormant_induction_heads"):
        key = ("model", "intervention", "repeated_run", "unrepeated_run", "text_run")
        blocks.setdefault(tuple(row[name] for name in key), []).append(row)
    return [_dormant_block(rows, figures) for rows in blocks.values()]


def _dormant_block(rows: list[Record], figures: list[Record]) -> Record:
    points = [
        {
            "name": row["label"],
            "x": row["induction_repeated"],
            "y": row["sink_unrepeated"],
            "on": row["is_dormant"],
            # The crowd of heads that never copy would be unreadable.
            "label": index < TOP and (row["induction_repeated"] or 0) > 0.1,
        }
        for index, row in enumerate(rows)
    ]
    axes = {"x": "induction score where the input repeats", "y": "sink mass where nothing repeats"}
    count = sum(bool(row["is_dormant"]) for row in rows)
    block = {"first": rows[0], "columns": DORMANT, "rows": rows[:TOP], "count": count}
    return block | add_figure(figures, kind="points", points=points, **axes)


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
