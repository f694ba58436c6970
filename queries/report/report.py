"""One HTML file with what the heads of some runs do. It needs no network and no server.

This file asks what the page may ask, for all heads at once; `page/shared/source.js` finds the
answers in the file by their keys.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headcount.queries.answers.examples import (
    EXCERPT_TOKENS,
    LEAST,
    MOST,
    MOST_EXAMPLE_STATISTICS,
    NO_TOKENIZER,
    Extremes,
    Texts,
    example_statistics,
    strongest_heads,
    with_texts,
)
from headcount.queries.answers.numbers import NUMBERS
from headcount.queries.answers.page_queries import (
    Answer,
    Curves,
    Effects,
    Head,
    Heatmap,
    Histograms,
    Query,
    Scope,
    Subsets,
)
from headcount.queries.answers.page_runs import PageRuns
from headcount.queries.answers.run_details import Details, Dormant
from headcount.queries.report.html_page import (
    REPORT,
    TEMPLATES,
    check_writable,
    json_value,
    write_html,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headcount.queries.ask.asking import Record, RunDatabase
    from headcount.workers.run_model import RunModels

MOST_DETAILED_CELLS = 60_000  # heads times statistics whose details fit into one file

MOST_EXCERPTS = 2_400  # excerpts of texts in one file

DIGITS = {
    "standard_error": 3,
    "minimum": 4,
    "maximum": 4,
    "values": 4,
    "standard_errors": 2,
    "weights": 2,
}
"""Digits that a reader or a chart can use of an array or a column, if not six."""


@dataclass(frozen=True)
class Detail:
    """How much of each section one file can hold."""

    distributions: bool
    heads_with_examples: int  # heads of each statistic whose sequences are shown


def write_report(
    database: RunDatabase,
    output: Path,
    models: RunModels | None = None,
    heading: Record | None = None,
) -> None:
    """Write one HTML file: the explorer's page with the answers that `source.js` looks for.

    `heading` has what `headcount diff` says of two runs.
    """
    check_writable(output)
    runs = PageRuns(database, is_whole=True).verified(rows=True)
    overview = runs.overview() | {"damage": []}
    answers = EmbeddedAnswers(runs, models)
    sections = [(run, name) for run in overview["runs"] for name in run["interventions"]]
    detail = detail_of([run for run, _ in sections])
    overview["is_short"] = not detail.distributions
    for run, intervention in sections:
        scope = Scope(run_id=run["run_id"], intervention=intervention)
        answers.add(Details(kind="details", scope=scope))
        # A run without rows yet is listed, and has nothing to show.
        if run["rows"]:
            answers.add_section(run, scope, detail)
    data = {
        "overview": json_value(overview),
        "answers": answers.by_key,
        "texts": [json.loads(text) for text in answers.texts],
    }
    write_html(TEMPLATES / "report", output, {"heading": heading}, data, REPORT)


def detail_of(sections: Sequence[Record]) -> Detail:
    """What fits into a file of a few megabytes, however many runs and heads there are: a section
    for each run and intervention.
    """
    cells = sum(run["n_layers"] * run["n_heads"] * len(run["statistics"]) for run in sections)
    excerpts_of_head = MOST_EXAMPLE_STATISTICS * (MOST + LEAST)
    heads = MOST_EXCERPTS // (excerpts_of_head * max(1, len(sections)))
    return Detail(cells <= MOST_DETAILED_CELLS, max(2, heads))


class EmbeddedAnswers:
    """Answers to what a page may ask of runs, by key, short enough for a file."""

    def __init__(self, runs: PageRuns, models: RunModels | None) -> None:
        self._runs = runs
        self._models = models
        self.by_key: dict[str, Record] = {}
        self.texts: dict[str, int] = {}
        """Lists of tokens as JSON, each with its number: heads share excerpts."""

    def add(self, query: Query, answer: Answer | None = None) -> Answer:
        """Keep the answer to a query, which is asked if it is not there yet."""
        answer = answer or self._runs.answer(query)
        # Its SQL is about all heads. The page has shorter SQL about one.
        header = {name: value for name, value in answer.header.items() if name != "sql"}
        names = NUMBERS if isinstance(query, Heatmap) else ("count",) * len(answer.arrays)
        self.by_key[key_of(query)] = {
            **json_value(header, DIGITS),
            "shape": self._runs.facts(query.scope.run_id).shape,
            "arrays": [
                # Counts are as many as histograms have bins, and have no digits to spare.
                array.ravel().tolist()
                if array.dtype.kind in "iu"
                else json_value(array.ravel().tolist(), DIGITS, name)
                for name, array in zip(names, answer.arrays, strict=True)
            ],
        }
        return answer

    def add_section(self, run: Record, scope: Scope, detail: Detail) -> None:
        """Keep all that is shown of a run under an intervention."""
        heatmap = Heatmap(kind="heatmap", scope=scope)
        means = self.add(heatmap).arrays[NUMBERS.index("mean")]
        # An intervention has changes if the same run also measured the untouched model.
        if scope.intervention != "none" and "none" in run["interventions"]:
            self.add(heatmap.model_copy(update={"changes": True}))
        self.add(Effects(kind="effects", scope=scope))
        self.add(Dormant(kind="dormant", scope=scope))
        self.add(Curves(kind="curves", scope=scope))
        statistics: list[str] = run["statistics"]
        names = example_statistics(statistics)
        heads_of = {
            name: strongest_heads(means[statistics.index(name)], detail.heads_with_examples)
            for name in names
        }
        for name, heads in heads_of.items():
            self._add_examples(scope, name, tuple(heads))
        if not detail.distributions:
            return
        self.add(
            Histograms.model_construct(
                kind="histograms", scope=scope, by_head=True, statistics=tuple(statistics)
            )
        )
        if run["subsets"]:
            self.add(Subsets(kind="subsets", scope=scope))

    def _add_examples(self, scope: Scope, statistic: str, heads: tuple[Head, ...]) -> None:
        """Keep the sequences in which a statistic of some heads is extreme, and their texts."""
        sequences: list[int] = []
        of_heads: list[Head] = []
        for lowest in (False, True):
            # Not validated: whoever asks a server names fewer heads and sequences.
            query = Extremes.model_construct(
                kind="extremes",
                scope=scope,
                heads=heads,
                statistic=statistic,
                statistics=(statistic,),
                lowest=lowest,
            )
            # Without heads there is no list for SQL, and no sequence either.
            found = self.add(query).header["table"] if heads else {"sequence": []}
            sequences += found["sequence"]
            cells = zip(found["layer"], found["head"], strict=True) if heads else ()
            of_heads += [Head(layer=layer, head=head) for layer, head in cells]
        texts = Texts.model_construct(
            kind="texts",
            scope=scope,
            sequences=tuple(sequences),
            heads=tuple(of_heads),
            first=EXCERPT_TOKENS,
            statistic=statistic,
        )
        answer = self._runs.answer(texts)
        answer = with_texts(answer, self._models, scope.run_id, NO_TOKENIZER)
        rows = answer.header["rows"]
        columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
        tokens = [json.dumps(one, ensure_ascii=False) for one in columns.pop("tokens", [])]
        columns["text"] = [self.texts.setdefault(one, len(self.texts)) for one in tokens]
        note = answer.header.get("note")
        self.add(texts, Answer({"table": columns, "note": note}))


def key_of(query: Query) -> str:
    """The key of an answer about all heads, as `source.js` makes it."""
    words = [query.kind, query.scope.run_id, query.scope.intervention]
    if isinstance(query, Extremes | Texts):
        words.append(query.statistic or "")
    is_other = getattr(query, "changes", False) or getattr(query, "lowest", False)
    return "/".join([*words, *["yes"] * is_other])
