"""What a page says of a run beside its heads: how it was measured, its predictions, its pairs."""

from collections.abc import Sequence
from typing import Literal

import pyarrow as pa

from headcount.queries.answers.page_queries import Answer, Header, Query, Statement, where
from headcount.queries.answers.run_facts import RunFacts
from headcount.queries.ask.asking import RunDatabase
from headcount.queries.open.named_queries import QUERIES, read_queries
from headcount.queries.open.sql_text import text_literal
from headcount.schemas.predictions import PREDICTIONS

LABELLED_HEADS = 10  # heads of a scatter plot that may have a label

DORMANT = "dormant_induction_heads"


def default_of(view: str, parameter: str) -> float:
    """What a number of a named query is by default."""
    return float(read_queries(QUERIES)[view].parameter(parameter).default or "nan")


def without_folder(text: str) -> str:
    """A name without its place: a page is sent to others, whom the folders of this machine do not
    concern.
    """
    is_place = text.startswith("/") or "://" in text
    return text.rstrip("/").rpartition("/")[2] if is_place else text


def rankings(database: RunDatabase) -> dict[str, Header]:
    """By run and statistic the view that ranks heads by it, and the mean it holds them against."""
    of_runs: dict[str, Header] = {}
    for view, query in read_queries(QUERIES).items():
        if (ranking := query.ranking) is None:
            continue
        default = default_of(view, "threshold")
        threshold = ranking.threshold.replace("$threshold", f"{default!r}::DOUBLE")
        for run_id, least in database.rows(f"SELECT run_id, {threshold} FROM runs"):
            about = {"view": view, "threshold": least, "is_strict": ranking.is_strict}
            of_runs.setdefault(run_id, {})[ranking.statistic] = about
    return of_runs


class Details(Query):
    """How an intervention was measured, damaged shards, and the mean of each prediction.

    An object for each prediction. `engines` is empty before the first shard.
    """

    kind: Literal["details"]

    def reads_rows(self, facts: RunFacts) -> bool:
        """Nothing of it is of a head."""
        return False

    def statements(self, facts: RunFacts) -> list[Statement]:
        """The engines, the damaged shards, and one statement for each prediction."""
        of_run = f"WHERE run_id = {text_literal(self.scope.run_id)}"
        # DISTINCT, because every shard names its method, and usually all name the same.
        engines = f"""
            SELECT DISTINCT method.engine, method.built_layers
            FROM (SELECT unnest(methods) AS method FROM shards {of_run})
            WHERE method.intervention = {text_literal(self.scope.intervention)}
            ORDER BY ALL
        """
        damaged = f"SELECT shard FROM shards {of_run} AND status = 'damaged' ORDER BY shard"
        in_scope = where(self.scope.conditions_on_run)
        predictions = [_prediction_sql(name, in_scope) for name in facts.predictions]
        return [Statement(sql) for sql in (engines, damaged, *predictions)]

    def answer(self, facts: RunFacts, tables: Sequence[pa.Table]) -> Answer:
        """One line about the engines, numbers of shards, and one object for each prediction."""
        engines, damaged, *predictions = tables
        lines: list[str] = []
        for method in engines.to_pylist():
            layers = method["built_layers"]
            built = (
                f", with built patterns in layers {' '.join(map(str, layers))}" if layers else ""
            )
            lines.append(f"{method['engine']}{built}")
        rows = [
            {"name": name, "unit": PREDICTIONS[name].unit, "meaning": PREDICTIONS[name].meaning}
            | row
            for name, table in zip(facts.predictions, predictions, strict=True)
            for row in table.to_pylist()
        ]
        shards = damaged["shard"].to_pylist()
        return Answer({"engines": "; ".join(lines), "damaged": shards, "rows": rows})


def _prediction_sql(name: str, in_scope: str) -> str:
    """Mean of a prediction, and of its change on the same sequences, with standard errors."""
    # The LEFT JOIN keeps the untouched model itself, whose change is NULL.
    return f"""
        SELECT
            document_mean(value_sums) AS mean,
            document_error(value_sums) AS standard_error,
            document_mean(change_sums) AS change,
            document_error(change_sums) AS change_error
        FROM (
            SELECT
                documents.document,
                document_sums(intervened.{name}, documents.document) AS value_sums,
                document_sums(
                    intervened.{name}::DOUBLE - untouched.{name}, documents.document
                ) AS change_sums
            FROM (FROM sequences {in_scope}) AS intervened
            JOIN internal.documents USING (run_id, intervention, sequence)
            LEFT JOIN sequences AS untouched
                ON untouched.run_id = intervened.run_id
                AND untouched.sequence = intervened.sequence
                AND untouched.intervention = 'none'
                AND intervened.intervention <> 'none'
            GROUP BY ALL
        )
        HAVING mean IS NOT NULL
    """


class Dormant(Query):
    """Copying where the input repeats, against resting where it does not: an object with points
    for each combination of runs that the run is part of.
    """

    kind: Literal["dormant"]

    def reads_rows(self, facts: RunFacts) -> bool:
        """Means of all heads of several runs."""
        return facts.has_dormant

    def statements(self, facts: RunFacts) -> list[Statement]:
        """One statement, if there are runs of both kinds."""
        if not facts.has_dormant:
            return []
        keys = "model, intervention, repeated_run, unrepeated_run, text_run"
        run_id, intervention = map(text_literal, (self.scope.run_id, self.scope.intervention))
        # Most heads never copy and lie in one crowd, where labels could not be read.
        return [
            Statement(f"""
                SELECT
                    {keys}, count(*) FILTER (is_dormant) AS passing,
                    list({{
                        'name': label, 'x': induction_repeated, 'y': sink_unrepeated,
                        'on': is_dormant,
                        'label': place <= {LABELLED_HEADS} AND induction_repeated > 0.1
                    }} ORDER BY place) AS points
                FROM (
                    SELECT *, row_number() OVER (
                        PARTITION BY {keys}
                        ORDER BY induction_repeated DESC NULLS LAST, layer, head
                    ) AS place
                    FROM {DORMANT}
                    WHERE intervention = {intervention}
                        AND {run_id} IN (repeated_run, unrepeated_run, text_run)
                )
                GROUP BY ALL
                ORDER BY repeated_run, unrepeated_run, text_run
            """)
        ]

    def answer(self, facts: RunFacts, tables: Sequence[pa.Table]) -> Answer:
        """One object for each combination."""
        thresholds = {name: default_of(DORMANT, name) for name in ("least_induction", "least_sink")}
        rows = tables[0].to_pylist() if tables else []
        rows = [row | {"model": without_folder(row["model"])} for row in rows]
        return Answer({"rows": rows, **thresholds})
