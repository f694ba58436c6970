"""One HTML file with what the heads of some runs do. It needs no network and no server.

This file gathers the answers to what the page asks; `page/shared/page.js` shows them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from headcount.queries.answers.examples import (
    LEAST,
    MOST,
    MOST_EXAMPLE_STATISTICS,
    example_statistics,
    read_examples,
    strongest_heads,
)
from headcount.queries.answers.head_curves import Array
from headcount.queries.answers.loss_effects import shown_runs
from headcount.queries.answers.numbers import NUMBERS, Numbers
from headcount.queries.answers.page_queries import Effects
from headcount.queries.answers.run_facts import (
    STATISTIC_FACTS,
    RunFacts,
    facts_of_runs,
    first_statistics,
)
from headcount.queries.answers.section import Section, answered, read_section
from headcount.queries.ask.asking import Record, RunDatabase
from headcount.queries.open.sql_text import text_literal
from headcount.queries.report.html_page import (
    REPORT,
    TEMPLATES,
    check_writable,
    json_value,
    write_html,
)
from headcount.schemas.measured_heads import Head
from headcount.schemas.predictions import PREDICTIONS

if TYPE_CHECKING:
    from pathlib import Path

    from headcount.workers.run_model import RunModels

LABELLED_HEADS = 10  # heads of a scatter plot that may have a label

MOST_DETAILED_CELLS = 60_000  # heads times statistics whose details fit into one file

MOST_EXCERPTS = 2_400  # excerpts of texts in one file


@dataclass(frozen=True)
class Detail:
    """How much of each section one file can hold."""

    distributions: bool
    heads_with_examples: int  # heads of each statistic whose sequences are shown


def write_report(database: RunDatabase, output: Path, models: RunModels | None = None) -> None:
    """Write one HTML file: the explorer's page with the answers that `source.js` looks for."""
    check_writable(output)
    runs = shown_runs(database.records("FROM runs"))
    facts_of_run = facts_of_runs(database, runs)
    detail = _detail(runs)
    sections: Record = {}
    overview = [_overview_of_run(database, run, facts_of_run[run["run_id"]]) for run in runs]
    for shown in overview:
        own: list[Record] = []
        # A run without rows yet has sections too.
        for intervention in shown["interventions"]:
            facts = facts_of_run[shown["run_id"]]
            section = read_section(database, facts, intervention, with_details=detail.distributions)
            examples = _examples(database, section, detail, models)
            own.append(_head_facts(database, section) | {"examples": examples})
            sections[f"{facts.run_id}/{intervention}"] = own[-1]
        shown["has_curves"] = any(section["curves"] for section in own)
        shown["has_effects"] = any(any(section["effects"].values()) for section in own)
    data = {
        "overview": {
            "runs": overview,
            "statistics": database.records(f"SELECT {STATISTIC_FACTS} FROM statistics"),
            "damage": [],
            "is_short": not detail.distributions,
            "dormant": _dormant_blocks(database),
        },
        "sections": sections,
    }
    write_html(TEMPLATES / "report", output, {}, json_value(data), REPORT)


def _detail(runs: Iterable[Record]) -> Detail:
    """What fits into a file of a few megabytes, however many runs and heads there are."""
    cells = 0
    sections = 0
    for run in runs:
        heads = (run["n_layers"] or 1) * (run["n_heads"] or 1)
        cells += heads * len(run["statistics"]) * len(run["interventions"])
        sections += len(run["interventions"])
    excerpts_of_head = MOST_EXAMPLE_STATISTICS * (MOST + LEAST)
    heads_with_examples = MOST_EXCERPTS // (excerpts_of_head * max(1, sections))
    return Detail(cells <= MOST_DETAILED_CELLS, max(2, heads_with_examples))


def _overview_of_run(database: RunDatabase, run: Record, facts: RunFacts) -> Record:
    """What the page lists of a run, and what a reader must know of it before the numbers."""
    names = (
        "run_id name model weight_processing input_family n_ctx n_layers n_heads measured_heads "
        "precision created shards shards_done complete sequences sequences_done rows interventions "
        "statistics"
    )
    in_run = f"WHERE run_id = {text_literal(run['run_id'])}"
    damaged = database.records(f"FROM shards {in_run} AND status = 'damaged'")
    subsets = database.records(
        f"SELECT DISTINCT pile_set_name AS name FROM sequences {in_run} "
        "AND pile_set_name IS NOT NULL ORDER BY ALL",
    )
    return {name: run[name] for name in names.split()} | {
        "options": _input_words(run),
        "predictions": _predictions(database, in_run),
        "engines": {name: _engine(database, run, name) for name in run["interventions"]},
        "damaged": [row["shard"] for row in damaged],
        "subsets": [row["name"] for row in subsets],
        "first_statistics": first_statistics(facts.statistics),
        # A manifest may not say the sizes of its model.
        "n_layers": facts.layers,
        "n_heads": facts.heads,
    }


def _input_words(run: Record) -> str:
    options: Record = json.loads(run["input_options"])
    words = [
        f"{name} {_option_words(value)}" for name, value in options.items() if value is not None
    ]
    if run["documents"] is not None:
        words.append(run["documents"])
    if run["bos"] is not None:
        evidence = f" ({run['bos_evidence']})" if run["bos_evidence"] else ""
        words.append(f"{'with' if run['bos'] else 'without'} BOS{evidence}")
    return ", ".join(words)


def _option_words(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_option_words, value))
    text = str(value)
    # A report is sent to others, whom the folders of this machine do not concern.
    is_place = text.startswith("/") or "://" in text
    return text.rpartition("/")[2] if is_place else text


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
    engines: list[str] = []
    for method in database.records(sql):
        layers = method["built_layers"]
        built = f", with built patterns in layers {' '.join(map(str, layers))}" if layers else ""
        engines.append(f"{method['engine']}{built}")
    return "; ".join(engines) or run["engine"]


def _head_facts(database: RunDatabase, section: Section) -> Record:
    """Every number by head of a section, as lists in the order of layers and heads."""
    facts = section.facts
    effects = answered(database, facts, Effects(kind="effects", scope=section.scope))
    return {
        "n_layers": facts.layers,
        "n_heads": facts.heads,
        "effects": effects.header,
        "values": {name: _values(section, i) for i, name in enumerate(facts.statistics)},
        "curves": [
            {
                "profile": curve.profile,
                "axis": curve.about.axis,
                "profiled": curve.profiled,
                "meaning": curve.about.meaning,
                "unit": curve.about.unit,
                "indices": curve.indices,
                # By head first, because a card shows one head.
                "values": _rounded(np.moveaxis(curve.values, 0, -1), 4),
                "standard_errors": _rounded(np.moveaxis(curve.standard_errors, 0, -1), 2),
            }
            for curve in section.curves
        ],
    }


def _values(section: Section, statistic: int) -> Record:
    """The numbers of a statistic, with as many digits as a reader or a chart can use."""
    name = section.facts.statistics[statistic]
    of_subsets = ("mean", "standard_error", "documents", "count")

    def lists(numbers: Numbers, columns: Sequence[str]) -> Record:
        return {column: _listed(column, numbers[column][statistic]) for column in columns}

    content: Record = {
        **lists(section.numbers, NUMBERS),
        "uniform_baseline": section.uniform_baseline.get(name),
        "changes": lists(section.changes, (*of_subsets, "degrees_of_freedom"))
        if section.changes
        else None,
        "subsets": {
            subset: lists(numbers, of_subsets) for subset, numbers in section.subsets.items()
        },
    }
    if histograms := section.histograms.get(name):
        edges = histograms.edges
        heads = [Head(*cell) for cell in np.ndindex(section.facts.shape)]
        # Of even bins, only what all edges follow from.
        even = {"low": edges[0], "high": edges[-1], "bins": len(edges) - 1}
        content["edges"] = even if histograms.is_even else edges
        # For each head: its first bin, how many bins are added up, and the sums.
        groups = map(histograms.groups_of, heads)
        content["bins"] = [[first, size, *sums] for first, size, sums in groups]
    return content


DIGITS = {"mean": 6, "standard_error": 3, "minimum": 4, "maximum": 4, "percentile": 6}


def _listed(column: str, values: Array) -> list[float | None]:
    return _rounded(values, DIGITS[column]) if column in DIGITS else values.ravel().tolist()


def _rounded(values: Array, digits: int) -> list[float | None]:
    """Numbers with so many digits: short to write. None where they are undefined."""
    return [
        float(f"{value:.{digits}g}") if math.isfinite(value) else None
        for value in values.ravel().tolist()
    ]


def _predictions(database: RunDatabase, in_run: str) -> dict[str, list[Record]]:
    """By intervention, the mean of each prediction that is a number, and the mean of its change."""
    measured = database.columns("sequences")
    by_intervention: dict[str, list[Record]] = {}
    for prediction in PREDICTIONS.values():
        name = prediction.name
        # What has a number for every token has no mean over sequences.
        if prediction.per_token or name not in measured:
            continue
        for row in database.records(_prediction_sql(name, in_run)):
            entry = {"name": name, "unit": prediction.unit, "meaning": prediction.meaning, **row}
            by_intervention.setdefault(row["intervention"], []).append(entry)
    return by_intervention


def _prediction_sql(name: str, in_run: str) -> str:
    """Mean of a prediction, and of its change on the same sequences, with standard errors."""
    # The LEFT JOIN keeps the untouched model itself, whose change is NULL.
    return f"""
        SELECT
            intervention,
            document_mean(value_sums) AS mean,
            document_error(value_sums) AS standard_error,
            document_mean(change_sums) AS change,
            document_error(change_sums) AS change_error
        FROM (
            SELECT
                intervened.intervention, documents.document,
                document_sums(intervened.{name}, documents.document) AS value_sums,
                document_sums(
                    intervened.{name}::DOUBLE - untouched.{name}, documents.document
                ) AS change_sums
            FROM (FROM sequences {in_run}) AS intervened
            JOIN internal.documents USING (run_id, intervention, sequence)
            LEFT JOIN sequences AS untouched
                ON untouched.run_id = intervened.run_id
                AND untouched.sequence = intervened.sequence
                AND untouched.intervention = 'none'
                AND intervened.intervention <> 'none'
            GROUP BY ALL
        )
        GROUP BY intervention
        HAVING mean IS NOT NULL
    """


def _examples(
    database: RunDatabase, section: Section, detail: Detail, models: RunModels | None
) -> Record:
    """Excerpts of the heads with the largest means, by statistic and head."""
    heads = {
        name: strongest_heads(
            section.numbers["mean"][section.facts.statistics.index(name)],
            detail.heads_with_examples,
        )
        for name in example_statistics(section.facts.statistics)
    }
    examples = read_examples(database, section, heads, models)
    # Heads share sequences: a text stands on the page once, and excerpts have its number.
    texts: dict[str, int] = {}
    packed: Record = {"note": examples.note, "most": {}, "least": {}}
    for group, by_key in (("most", examples.most), ("least", examples.least)):
        for (statistic, layer, head), excerpts in by_key.items():
            entries: list[Record] = []
            for excerpt in excerpts:
                entry = asdict(excerpt)
                entry["subset"] = entry.pop("pile_set_name")
                text = json.dumps(entry.pop("tokens"), ensure_ascii=False)
                entry["text"] = texts.setdefault(text, len(texts))
                entry["value"] = float(f"{excerpt.value:.4g}")
                if excerpt.weights is not None:
                    entry["weights"] = _rounded(np.array(excerpt.weights, dtype=float), 2)
                entries.append(entry)
            packed[group].setdefault(statistic, {})[f"L{layer}H{head}"] = entries
    packed["texts"] = [json.loads(text) for text in texts]
    return packed


def _dormant_blocks(database: RunDatabase) -> list[Record]:
    """Scatter plots: copying where the input repeats, against resting where it does not."""
    view = "dormant_induction_heads"
    # Any other error is raised: an empty place on the page means that nothing was measured.
    if view in database.unmeasured_views(view):
        return []
    keys = "model, intervention, repeated_run, unrepeated_run, text_run"
    # Most heads never copy and lie in one crowd, where labels could not be read.
    sql = f"""
        SELECT
            {keys}, count(*) FILTER (is_dormant) AS passing,
            list({{
                'name': label, 'x': induction_repeated, 'y': sink_unrepeated, 'on': is_dormant,
                'label': place <= {LABELLED_HEADS} AND induction_repeated > 0.1
            }} ORDER BY place) AS points
        FROM (
            SELECT *, row_number() OVER (
                PARTITION BY {keys} ORDER BY induction_repeated DESC NULLS LAST, layer, head
            ) AS place
            FROM {view}
        )
        GROUP BY ALL
        ORDER BY repeated_run, unrepeated_run, text_run, intervention
    """
    return database.records(sql)
