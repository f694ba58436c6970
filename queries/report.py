"""One HTML file with what the heads of some runs do: heatmaps, rankings, norms.

It needs no network and no server.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from queries.asking import Record, RunDatabase
from queries.html_page import Figures, write_html
from queries.run_tables import bounds
from queries.shipped_views import QUERIES
from queries.sql_text import text_literal
from schemas.errors import QueryError
from schemas.predictions import PREDICTIONS
from schemas.statistics import STATISTICS

TOP_HEADS = 10
"""Heads in a ranking."""


class Ranking(NamedTuple):
    """What the report shows of a view that ranks heads."""

    title: str
    flag: str
    """The column that says whether a head passes the view's threshold."""
    columns: list[str]
    """The columns shown. The view ranks by the first."""


RANKINGS = {
    "sink_heads": Ranking(
        "Strongest sinks",
        "is_sink",
        ["sink_mass", "chance", "sink_rate", "value_norm_ratio"],
    ),
    "induction_heads": Ranking(
        "Strongest induction",
        "is_induction",
        ["induction_score", "chance", "coverage"],
    ),
}
"""The rankings, by view."""

DORMANT_COLUMNS = ["induction_repeated", "sink_repeated", "sink_unrepeated", "sink_text"]

RESIDUAL_NORMS = {
    "resid_pre_norm",
    "sink_resid_pre_norm",
    "resid_post_norm",
    "sink_resid_post_norm",
}
"""Statistics that the card of the residual stream shows."""

PILE_SET_STATISTICS = ("sink_mass", "induction_score")
"""The two statistics that differ most between kinds of text."""

Matrix = list[list[float | None]]
"""Values by layer and head. None where nothing was measured, or it is undefined."""


def write_report(database: RunDatabase, output: Path) -> None:
    """Write the report on some runs into one HTML file."""
    figures = Figures()
    statistics = {row["name"]: row for row in _records(database, "statistics", "FROM statistics")}
    sections: list[Record] = []
    for run in _records(database, "runs", "FROM runs"):
        sections += _sections(database, run, statistics, figures)
    content = {"sections": sections, "dormant": _dormant_blocks(database, figures)}
    write_html(QUERIES / "report", output, content, figures)


def _records(database: RunDatabase, subject: str, sql: str) -> list[Record]:
    """The rows of a query. If it fails, the error is one line that names its subject."""
    try:
        return database.records(sql)
    except QueryError as error:
        raise QueryError(f"report, {subject}: {error}") from None


def _view_records(database: RunDatabase, view: str, clauses: str = "") -> list[Record]:
    """The rows of a view. None if these runs did not measure a column that it needs."""
    # Any other error is raised: an empty place on the page means that nothing was measured.
    if view in database.unmeasured_views():
        return []
    return _records(database, view, f"FROM {view} {clauses}")


def _sections(
    database: RunDatabase, run: Record, statistics: dict[str, Record], figures: Figures
) -> list[Record]:
    """One section for each intervention of a run. A run without rows yet has sections too."""
    in_run = f"WHERE run_id = {text_literal(run['run_id'])}"
    # Once for all interventions: the view reads every row of the run.
    heads = _view_records(database, "by_head", in_run)
    damaged = _records(database, "damaged shards", f"FROM shards {in_run} AND status = 'damaged'")
    chance = _chance_levels(database, in_run)
    predictions = _predictions(database, in_run)
    sections: list[Record] = []
    for intervention in run["interventions"]:
        in_section = f"{in_run} AND intervention = {text_literal(intervention)}"
        rows = [row for row in heads if row["intervention"] == intervention]
        norms = _view_records(database, "layer_norms", in_section)
        cards = _statistic_cards(run, rows, statistics, chance, norms, figures)
        section = {
            "run": run,
            "intervention": intervention,
            "engine": _engine(database, run, intervention),
            "options": _input_words(run),
            "empty": not rows,
            "damaged": [row["shard"] for row in damaged],
            "families": cards.heatmaps,
            "constants": cards.constants,
            "layers": _norm_cards(run, norms, figures) + cards.layers,
            "rankings": _rankings(database, in_section),
            "predictions": predictions.get(intervention, []),
            "pile_sets": _pile_set_cards(database, run, in_section, figures),
        }
        sections.append(section)
    return sections


def _input_words(run: Record) -> str:
    """The options of a run's input, and what became of its documents."""
    options: Record = json.loads(run["input_options"])
    words = [f"{name} {value}" for name, value in options.items() if value is not None]
    if run["documents"] is not None:
        words.append(run["documents"])
    return ", ".join(words)


def _engine(database: RunDatabase, run: Record, intervention: str) -> str:
    """The engine that measured an intervention. Before the first shard, the one that will."""
    # DISTINCT, because every shard names its method, and usually all name the same.
    sql = f"""
        SELECT DISTINCT method.engine, method.built_layers
        FROM (
            SELECT unnest(methods) AS method
            FROM shards
            WHERE run_id = {text_literal(run["run_id"])}
        )
        WHERE method.intervention = {text_literal(intervention)}
        ORDER BY ALL
    """
    methods = _records(database, "engines", sql)
    return "; ".join(map(_engine_words, methods)) or run["engine"]


def _engine_words(method: Record) -> str:
    layers = method["built_layers"]
    built = f", with built patterns in layers {' '.join(map(str, layers))}" if layers else ""
    return f"{method['engine']}{built}"


def _chance_levels(database: RunDatabase, in_run: str) -> Record:
    """What uniform attention would score, by name of the column in `sequences`."""
    # DuckDB refuses a COLUMNS that matches nothing.
    if not any(column.startswith("chance_") for column in database.columns("sequences")):
        return {}
    sql = f"SELECT avg(COLUMNS('^chance_.*')) FROM sequences {in_run}"
    (levels,) = _records(database, "chance levels", sql)
    return levels


def _rankings(database: RunDatabase, in_section: str) -> list[Record]:
    """The first heads of each ranking that these runs can have."""
    rankings: list[Record] = []
    for view, ranking in RANKINGS.items():
        # A head without a score has no place in a ranking.
        clauses = f"{in_section} AND {ranking.columns[0]} IS NOT NULL LIMIT {TOP_HEADS}"
        rows = _view_records(database, view, clauses)
        if rows:
            rankings.append({**ranking._asdict(), "rows": rows})
    return rankings


def _predictions(database: RunDatabase, in_run: str) -> dict[str, list[Record]]:
    """By intervention, the mean of every prediction that is one number a sequence.

    Beside it stands the mean change from the untouched model.
    """
    measured = database.columns("sequences")
    by_intervention: dict[str, list[Record]] = {}
    for prediction in PREDICTIONS.values():
        name = prediction.name
        # What has a number for every token has no mean over sequences.
        if prediction.per_token or name not in measured:
            continue
        for row in _records(database, f"prediction {name}", _prediction_sql(name, in_run)):
            card = {"name": name, "unit": prediction.unit, "meaning": prediction.meaning, **row}
            by_intervention.setdefault(row["intervention"], []).append(card)
    return by_intervention


def _prediction_sql(name: str, in_run: str) -> str:
    """Mean of a prediction, and of its change on the same sequences, with standard errors."""
    # The LEFT JOIN keeps the untouched model itself, whose change is NULL.
    return f"""
        SELECT
            intervention,
            avg(value) AS mean,
            stddev_samp(value) / sqrt(count(value)) AS standard_error,
            avg(change) AS change,
            stddev_samp(change) / sqrt(count(change)) AS change_error
        FROM (
            SELECT
                edited.intervention,
                edited.{name}::DOUBLE AS value,
                value - untouched.{name} AS change
            FROM (FROM sequences {in_run}) AS edited
            LEFT JOIN sequences AS untouched
                ON untouched.run_id = edited.run_id
                AND untouched.sequence = edited.sequence
                AND untouched.intervention = 'none'
                AND edited.intervention <> 'none'
        )
        GROUP BY intervention
        HAVING mean IS NOT NULL
    """


@dataclass
class _StatisticCards:
    """What a section shows of the statistics of its run."""

    heatmaps: dict[str, list[Record]] = field(default_factory=dict[str, list[Record]])
    """Statistics that differ between heads, by the file that defines them."""
    layers: list[Record] = field(default_factory=list[Record])
    """Lines, for what all heads of a layer share."""
    constants: list[Record] = field(default_factory=list[Record])
    """Numbers, for what the whole model shares or what is undefined."""


def _statistic_cards(
    run: Record,
    rows: list[Record],
    statistics: dict[str, Record],
    chance: Record,
    norms: list[Record],
    figures: Figures,
) -> _StatisticCards:
    """A card for each statistic, in the form that its values need."""
    cards = _StatisticCards()
    for name in run["statistics"] if rows else []:
        facts = statistics[name]
        card = {**facts, "title": name, "chance_level": chance.get(f"chance_{name}")}
        means = {(row["layer"], row["head"]): row[f"mean_{name}"] for row in rows}
        layers: dict[int, list[float | None]] = {}
        for (layer, _), mean in means.items():
            layers.setdefault(layer, []).append(mean)
        values = [mean for mean in means.values() if mean is not None]
        # One head of a layer cannot show whether all its heads have the same value.
        has_several_heads = any(len(layer_means) > 1 for layer_means in layers.values())
        same_in_layers = has_several_heads and all(map(_all_equal, layers.values()))
        layer_values = {layer: layer_means[0] for layer, layer_means in layers.items()}
        first_value = next(iter(layer_values.values()))
        if not values:
            cards.constants.append({**card, "value": None})
        elif same_in_layers and _all_equal(list(layer_values.values())):
            cards.constants.append({**card, "value": first_value})
        elif same_in_layers:
            # The norms of the residual stream have a card of their own.
            if not (norms and name in RESIDUAL_NORMS):
                series = [{"name": name, "y": _layer_line(run, layer_values)}]
                lines = figures.add(kind="lines", series=series, y=facts["unit"])
                cards.layers.append(card | lines)
        else:
            heatmap = _heatmap(run, means, _colour_scale(facts, values), figures)
            cards.heatmaps.setdefault(_defining_file(name), []).append(card | heatmap)
    return cards


class _ColourScale(NamedTuple):
    """The values at the two ends of the colours, and which colours."""

    low: float
    high: float
    scale: str


def _colour_scale(facts: Record, values: list[float]) -> _ColourScale:
    """The colours of a heatmap.

    From 0 to 1 if that is the range, even around 0 if the sign has a meaning, else from the
    smallest to the largest value.
    """
    low, high = bounds([facts["range_low"], facts["range_high"]])
    if (low, high) == (0, 1):
        return _ColourScale(0, 1, "sequential")
    if low < 0:
        # If all values are 0, the colours still need two ends.
        largest = max(abs(value) for value in values) or 1
        return _ColourScale(-largest, largest, "diverging")
    return _ColourScale(min(values), max(values), "sequential")


def _heatmap(
    run: Record,
    means: dict[tuple[int, int], float | None],
    colours: _ColourScale,
    figures: Figures,
) -> Record:
    """A heatmap of means by layer and head."""
    # A manifest may not say the sizes of its model. Then the last measured head is the last one.
    n_layers = run["n_layers"] or 1 + max(layer for layer, _ in means)
    n_heads = run["n_heads"] or 1 + max(head for _, head in means)
    matrix: Matrix = [[None] * n_heads for _ in range(n_layers)]
    for (layer, head), mean in means.items():
        matrix[layer][head] = mean
    return figures.add(
        kind="heatmap", z=matrix, **colours._asdict(), x="head", y="layer (0 at top)"
    )


def _layer_line(run: Record, layer_values: dict[int, float | None]) -> list[float | None]:
    """A value for every layer of a model. None where it was not measured."""
    n_layers = run["n_layers"] or 1 + max(layer_values)
    return [layer_values.get(layer) for layer in range(n_layers)]


def _all_equal(values: list[float | None]) -> bool:
    """Whether all values are equal, up to the order in which a mean was added up."""
    first = values[0]
    if first is None:
        return all(value is None for value in values)
    return all(
        value is not None and math.isclose(value, first, rel_tol=1e-6, abs_tol=1e-9)
        for value in values
    )


def _defining_file(name: str) -> str:
    """The file that defines a statistic. One of another version of headcount may be in none."""
    statistic = STATISTICS.get(name)
    return statistic.compute.__module__.rpartition(".")[2] if statistic else "other"


class _NormChart(NamedTuple):
    """A chart of the residual stream's length by layer."""

    title: str
    meaning: str
    unit: str
    lines: dict[str, str]
    """Column of `layer_norms`, by name of the line."""


NORM_CHARTS = (
    _NormChart(
        "Residual stream",
        "Mean length at position 0 and at the other positions.",
        "euclidean norm",
        {
            "before the layer, position 0": "resid_pre_first",
            "before the layer, others": "resid_pre_others",
            "after the layer, position 0": "resid_post_first",
            "after the layer, others": "resid_post_others",
        },
    ),
    _NormChart(
        "Residual peak",
        "Length at position 0 over the mean of the others.",
        "ratio",
        {"before the layer": "resid_pre_ratio", "after the layer": "resid_post_ratio"},
    ),
)


def _norm_cards(run: Record, norms: list[Record], figures: Figures) -> list[Record]:
    """Lines of the residual stream's length by layer."""
    # Also true if there are no rows, because the runs lack a column of the view.
    if all(row["resid_pre_first"] is None for row in norms):
        return []
    cards: list[Record] = []
    for chart in NORM_CHARTS:
        series: list[Record] = []
        for line_name, column in chart.lines.items():
            layer_values = {row["layer"]: row[column] for row in norms}
            series.append({"name": line_name, "y": _layer_line(run, layer_values)})
        lines = figures.add(kind="lines", series=series, y=chart.unit, log=True)
        cards.append({"title": chart.title, "meaning": chart.meaning} | lines)
    return cards


def _pile_set_cards(
    database: RunDatabase, run: Record, in_section: str, figures: Figures
) -> list[Record]:
    """Heatmaps by part of the Pile and layer: means over heads."""
    meaning = "Mean over the measured heads of a layer, per part of the Pile (number of sequences)."
    cards: list[Record] = []
    for name in PILE_SET_STATISTICS:
        if name not in run["statistics"]:
            continue
        sql = f"""
            SELECT pile_set_name, layer, avg(mean_{name}) AS mean, max(sequences) AS sequences
            FROM by_pile_set {in_section}
            GROUP BY ALL
            ORDER BY ALL
        """
        lines: dict[str, list[float | None]] = {}
        for row in _records(database, f"{name} by part of the Pile", sql):
            # The number of sequences says how far a mean can be trusted.
            part = f"{row['pile_set_name']} ({row['sequences']})"
            line = lines.setdefault(part, [None] * run["n_layers"])
            line[row["layer"]] = row["mean"]
        if lines:
            heatmap = figures.add(
                kind="heatmap",
                z=list(lines.values()),
                low=0,
                high=1,
                scale="sequential",
                x="layer",
                y="",
                rows=list(lines),
            )
            cards.append({"title": name, "meaning": meaning} | heatmap)
    return cards


def _dormant_blocks(database: RunDatabase, figures: Figures) -> list[Record]:
    """One block for each model, intervention and combination of runs."""
    key_columns = ("model", "intervention", "repeated_run", "unrepeated_run", "text_run")
    rows_by_key: dict[tuple[str | None, ...], list[Record]] = {}
    for row in _view_records(database, "dormant_induction_heads"):
        key = tuple(row[column] for column in key_columns)
        rows_by_key.setdefault(key, []).append(row)
    return [_dormant_block(rows, figures) for rows in rows_by_key.values()]


def _dormant_block(rows: list[Record], figures: Figures) -> Record:
    """A ranking and a scatter plot: copying where the input repeats against resting elsewhere."""
    points: list[Record] = []
    # The view ranks its rows by the induction score, so the first heads are the strongest.
    for index, row in enumerate(rows):
        induction = row["induction_repeated"]
        # Most heads never copy and lie in one crowd, where labels could not be read.
        has_label = index < TOP_HEADS and (induction or 0) > 0.1
        point = {
            "name": row["label"],
            "x": induction,
            "y": row["sink_unrepeated"],
            "on": row["is_dormant"],
            "label": has_label,
        }
        points.append(point)
    dormant_count = sum(bool(row["is_dormant"]) for row in rows)
    block = {
        "first": rows[0],
        "columns": DORMANT_COLUMNS,
        "rows": rows[:TOP_HEADS],
        "count": dormant_count,
    }
    scatter = figures.add(
        kind="points",
        points=points,
        x="induction score where the input repeats",
        y="sink mass where nothing repeats",
    )
    return block | scatter
