"""One HTML file with what the heads of some runs do: heatmaps, rankings, norms. It needs no network
and no server.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from queries.asking import Record, RunDatabase
from queries.connection import QUERIES
from queries.html_page import Figures, write_html
from queries.run_tables import bounds
from schemas.errors import QueryError
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


def write_report(database: RunDatabase, output: Path) -> None:
    """Write the report on some runs into one HTML file."""
    figures = Figures()
    statistics = {row["name"]: row for row in _records(database, "statistics", "FROM statistics")}
    sections: list[Record] = []
    for run in _records(database, "runs", "FROM runs"):
        sections += _sections(database, run, statistics, figures)
    content = {"sections": sections, "dormant": _dormant(database, figures)}
    write_html(QUERIES / "report", output, content, figures)


def _records(database: RunDatabase, subject: str, sql: str) -> list[Record]:
    """The rows of a query; what goes wrong with it is one line that names its subject."""
    try:
        return database.records(sql)
    except QueryError as error:
        raise QueryError(f"report, {subject}: {error}") from None


def _view_records(database: RunDatabase, view: str, rest: str = "") -> list[Record]:
    """The rows of a view; none if these runs did not measure a column that it needs."""
    if view in database.unmeasured_views():
        return []
    return _records(database, view, f"FROM {view} {rest}")


def _sections(
    database: RunDatabase, run: Record, statistics: dict[str, Record], figures: Figures
) -> list[Record]:
    """One section for each intervention of a run; a run without rows yet still has one."""
    in_run = f"WHERE run_id = {_text(run['run_id'])}"
    by_head = _view_records(database, "by_head", in_run)
    damaged = _records(database, "damaged shards", f"FROM shards {in_run} AND status = 'damaged'")
    chance = _chance_levels(database, in_run)
    predictions = _predictions(database, in_run)
    options = json.loads(run["input_options"])
    option_texts = [f"{key} {value}" for key, value in options.items() if value is not None]
    if run["documents"] is not None:
        option_texts.append(run["documents"])
    sections: list[Record] = []
    for intervention in run["interventions"]:
        where = f"{in_run} AND intervention = {_text(intervention)}"
        rows = [row for row in by_head if row["intervention"] == intervention]
        norms = _view_records(database, "layer_norms", where)
        cards = _statistic_cards(run, rows, statistics, chance, norms, figures)
        section = {
            "run": run,
            "intervention": intervention,
            "engine": _engine(database, run, intervention),
            "options": ", ".join(option_texts),
            "empty": not rows,
            "damaged": [row["shard"] for row in damaged],
            "families": cards.families,
            "constants": cards.constants,
            "layers": _norm_cards(run, norms, figures) + cards.layers,
            "rankings": _rankings(database, where),
            "predictions": predictions.get(intervention, []),
            "pile_sets": _pile_sets(database, run, where, figures),
        }
        sections.append(section)
    return sections


def _engine(database: RunDatabase, run: Record, intervention: str) -> str:
    """What measured an intervention; before its first shard, what is to."""
    sql = f"""
        SELECT DISTINCT method.engine, method.built_layers
        FROM (SELECT unnest(methods) AS method FROM shards WHERE run_id = {_text(run["run_id"])})
        WHERE method.intervention = {_text(intervention)} ORDER BY ALL
    """
    methods = _records(database, "engines", sql)
    return "; ".join(map(_engine_words, methods)) or run["engine"]


def _engine_words(method: Record) -> str:
    layers = method["built_layers"]
    built = f", with built patterns in layers {' '.join(map(str, layers))}" if layers else ""
    return f"{method['engine']}{built}"


def _chance_levels(database: RunDatabase, in_run: str) -> Record:
    """What uniform attention would score, by name of the column in `sequences`."""
    if not any(column.startswith("chance_") for column in database.columns("sequences")):
        return {}
    sql = f"SELECT avg(COLUMNS('^chance_.*')) FROM sequences {in_run}"
    (levels,) = _records(database, "chance levels", sql)
    return levels


def _rankings(database: RunDatabase, where: str) -> list[Record]:
    """The heads that lead in each ranking that these runs can have."""
    rankings: list[Record] = []
    for view, (title, flag, columns) in RANKINGS.items():
        rest = f"{where} AND {columns[0]} IS NOT NULL LIMIT {TOP}"
        rows = _view_records(database, view, rest)
        if rows:
            rankings.append({"title": title, "flag": flag, "columns": columns, "rows": rows})
    return rankings


def _predictions(database: RunDatabase, in_run: str) -> dict[str, list[Record]]:
    """By intervention, what the model predicts in one number a sequence: mean, and mean change from
    the untouched model.
    """
    columns = database.columns("sequences")
    by_intervention: dict[str, list[Record]] = {}
    for prediction in PREDICTIONS.values():
        name = prediction.name
        if prediction.per_token or name not in columns:
            continue
        sql = f"""
        SELECT intervention,
               avg(value) AS mean, stddev_samp(value) / sqrt(count(value)) AS standard_error,
               avg(change) AS change, stddev_samp(change) / sqrt(count(change)) AS change_error
        FROM (SELECT edited.intervention, edited.{name}::DOUBLE AS value,
                     value - untouched.{name} AS change
              FROM (FROM sequences {in_run}) AS edited LEFT JOIN sequences AS untouched
                  ON untouched.run_id = edited.run_id AND untouched.sequence = edited.sequence
                  AND untouched.intervention = 'none' AND edited.intervention <> 'none')
        GROUP BY intervention HAVING mean IS NOT NULL"""
        for row in _records(database, f"prediction {name}", sql):
            card = {"name": name, "unit": prediction.unit, "meaning": prediction.meaning, **row}
            by_intervention.setdefault(row["intervention"], []).append(card)
    return by_intervention


@dataclass
class _StatisticCards:
    """What a section shows of the statistics of its run."""

    families: dict[str, list[Record]] = field(default_factory=dict[str, list[Record]])
    """Heatmaps, by the file that the statistic is in."""
    layers: list[Record] = field(default_factory=list[Record])
    """Lines, for what all heads of a layer share."""
    constants: list[Record] = field(default_factory=list[Record])
    """Numbers, for what the whole model shares or has not defined."""


def _statistic_cards(
    run: Record,
    rows: list[Record],
    statistics: dict[str, Record],
    chance: Record,
    norms: list[Record],
    figures: Figures,
) -> _StatisticCards:
    cards = _StatisticCards()
    for name in run["statistics"] if rows else []:
        entry = statistics[name]
        card = {**entry, "title": name, "chance_level": chance.get(f"chance_{name}")}
        z = _matrix(run, rows, f"mean_{name}")
        values = [value for line in z for value in line if value is not None]
        in_layers: dict[int, list[float | None]] = {}
        for row in rows:
            in_layers.setdefault(row["layer"], []).append(row[f"mean_{name}"])
        measured = list(in_layers.values())
        # One head of a layer does not tell whether its heads are alike.
        same_in_layers = any(len(line) > 1 for line in measured) and all(map(_same, measured))
        by_layer = {layer: line[0] for layer, line in in_layers.items()}
        if not values:
            cards.constants.append({**card, "value": None})
        elif same_in_layers and _same(list(by_layer.values())):
            cards.constants.append({**card, "value": measured[0][0]})
        elif same_in_layers:
            # The norms of the residual stream have a card of their own.
            if not (norms and name in LAYER_LINES):
                series = [{"name": name, "y": _line(run, by_layer)}]
                lines = figures.add(kind="lines", series=series, y=entry["unit"])
                cards.layers.append(card | lines)
        else:
            low, high, scale = _scale(entry, values)
            heatmap = figures.add(
                kind="heatmap",
                z=z,
                low=low,
                high=high,
                scale=scale,
                x="head",
                y="layer (0 at top)",
            )
            cards.families.setdefault(_family(name), []).append(card | heatmap)
    return cards


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


def _line(run: Record, by_layer: dict[int, float | None]) -> list[float | None]:
    """A value for every layer of a model: none where it was not measured."""
    return [by_layer.get(layer) for layer in range(run["n_layers"] or 1 + max(by_layer))]


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
    """The file that a statistic is in; one of another version of headcount may be in none."""
    statistic = STATISTICS.get(name)
    return statistic.compute.__module__.rpartition(".")[2] if statistic else "other"


def _norm_cards(run: Record, norms: list[Record], figures: Figures) -> list[Record]:
    """Lines of the residual stream's length by layer."""
    if all(row["resid_pre_first"] is None for row in norms):
        return []
    lengths = {
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
            lengths,
            "euclidean norm",
        ),
        ("Residual peak", "Length at position 0 over the mean of the others.", ratios, "ratio"),
    ]
    cards: list[Record] = []
    for title, meaning, columns, unit in charts:
        series = [
            {"name": name, "y": _line(run, {row["layer"]: row[column] for row in norms})}
            for name, column in columns.items()
        ]
        lines = figures.add(kind="lines", series=series, y=unit, log=True)
        cards.append({"title": title, "meaning": meaning} | lines)
    return cards


def _pile_sets(database: RunDatabase, run: Record, where: str, figures: Figures) -> list[Record]:
    """Part of the Pile × layer, mean over heads, for the two statistics that differ most between
    kinds of text.
    """
    meaning = "Mean over the measured heads of a layer, per part of the Pile (number of sequences)."
    cards: list[Record] = []
    for name in ("sink_mass", "induction_score"):
        if name not in run["statistics"]:
            continue
        sql = (
            f"SELECT pile_set_name, layer, avg(mean_{name}) AS mean, max(sequences) AS sequences "
            f"FROM by_pile_set {where} GROUP BY ALL ORDER BY ALL"
        )
        z: dict[str, list[float | None]] = {}
        for row in _records(database, f"{name} by part of the Pile", sql):
            part = f"{row['pile_set_name']} ({row['sequences']})"
            by_layer = z.setdefault(part, [None] * run["n_layers"])
            by_layer[row["layer"]] = row["mean"]
        if z:
            heatmap = figures.add(
                kind="heatmap",
                z=list(z.values()),
                low=0,
                high=1,
                scale="sequential",
                x="layer",
                y="",
                rows=list(z),
            )
            cards.append({"title": name, "meaning": meaning} | heatmap)
    return cards


def _dormant(database: RunDatabase, figures: Figures) -> list[Record]:
    """One block per model, intervention and combination of runs."""
    key = ("model", "intervention", "repeated_run", "unrepeated_run", "text_run")
    blocks: dict[tuple[Any, ...], list[Record]] = {}
    for row in _view_records(database, "dormant_induction_heads"):
        blocks.setdefault(tuple(row[name] for name in key), []).append(row)
    return [_dormant_block(rows, figures) for rows in blocks.values()]


def _dormant_block(rows: list[Record], figures: Figures) -> Record:
    points: list[Record] = []
    for index, row in enumerate(rows):
        induction = row["induction_repeated"]
        point = {
            "name": row["label"],
            "x": induction,
            "y": row["sink_unrepeated"],
            "on": row["is_dormant"],
            # The crowd of heads that never copy would be unreadable.
            "label": index < TOP and (induction or 0) > 0.1,
        }
        points.append(point)
    count = sum(bool(row["is_dormant"]) for row in rows)
    block = {"first": rows[0], "columns": DORMANT, "rows": rows[:TOP], "count": count}
    return block | figures.add(
        kind="points",
        points=points,
        x="induction score where the input repeats",
        y="sink mass where nothing repeats",
    )


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
