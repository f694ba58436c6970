"""The card of one head: all that a run says of it, as plain lists and numbers, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headcount.queries.answers.axes import DRAWN_BINS
from headcount.queries.answers.examples import (
    EXCERPT_TOKENS,
    LEAST,
    MOST,
    NO_TOKENIZER,
    Extremes,
    Texts,
    example_statistics,
    with_texts,
)
from headcount.queries.answers.head_curves import Array, HeadCurve
from headcount.queries.answers.numbers import NUMBERS, Numbers
from headcount.queries.answers.page_queries import (
    Curves,
    Effects,
    Heatmap,
    Histograms,
    Scope,
    Subsets,
    where,
)
from headcount.queries.answers.page_queries import Head as PageHead
from headcount.queries.answers.page_runs import PageRuns
from headcount.queries.answers.run_facts import RunFacts
from headcount.queries.ask.asking import Record, RunDatabase
from headcount.queries.report.html_page import CARD, TEMPLATES, html_text, json_value
from headcount.schemas.errors import QueryError, unknown
from headcount.schemas.measured_heads import Head
from headcount.workers.run_model import RunModels


@dataclass(frozen=True)
class CardStatistic:
    """One statistic of a head. None is undefined."""

    name: str
    meaning: str
    formula: str
    unit: str
    mean: float | None
    standard_error: float | None  # over documents
    documents: int
    degrees_of_freedom: float | None  # of Student's t
    minimum: float | None
    maximum: float | None
    count: int  # sequences on which it is defined
    undefined: int
    uniform_baseline: float | None  # what uniform attention would score on the same sequences
    percentile: float | None  # share of the other heads with a smaller mean, as in SQL's head_card
    heads: int  # that have a mean, with itself: what the percentile is among
    change: float | None  # Mean change from the untouched model. None without an intervention.
    change_error: float | None


@dataclass(frozen=True)
class CardEffect:
    """What an intervention on a head does to the loss, to first order, in nats per token."""

    statistic: str
    intervention: str
    effect: float
    standard_error: float | None
    q: float | None  # how sure it is not 0, over all heads
    direct: float | None
    """The part that reaches the logits without passing a later layer. None if it was not
    measured.
    """
    direct_error: float | None
    indirect: float | None
    trust: str  # how it agrees with measured interventions


@dataclass(frozen=True)
class CardDistribution:
    """How many sequences have a value in each bin."""

    edges: list[float]
    counts: list[int]


@dataclass(frozen=True)
class CardSubset:
    """The mean over one subset of the Pile."""

    subset: str
    mean: float | None
    standard_error: float | None
    documents: int
    count: int


@dataclass(frozen=True)
class Excerpt:
    """A piece of a sequence, and what a head attends to in it."""

    sequence: int
    value: float
    subset: str | None  # of the Pile
    start: int  # position of its first token in the sequence
    length: int  # tokens of the whole sequence
    tokens: list[str]  # text of each token, or its number if no tokenizer is at hand
    marked: list[int]  # indices of the tokens that the statistic is about
    marks: str  # what these are
    weights: list[float] | None  # attention that each token receives; None if not measured


@dataclass(frozen=True)
class HeadCard:
    """What one run says of one head under one intervention."""

    label: str
    layer: int
    head: int
    run_id: str
    model: str
    intervention: str
    input_family: str
    sequences: int  # sequences of the shards that are done
    n_ctx: int
    heads: int  # heads that were measured
    statistics: list[CardStatistic]
    distributions: dict[str, CardDistribution]  # by statistic
    subsets: dict[str, list[CardSubset]]  # by statistic; empty if the input has none of the Pile
    curves: list[HeadCurve]
    effects: list[CardEffect]
    most: dict[str, list[Excerpt]]  # by statistic, the sequences in which the head is most active
    least: dict[str, list[Excerpt]]
    note: str  # Why tokens are numbers. Empty if they are text.

    def statistic(self, name: str) -> CardStatistic:
        """One statistic by its name."""
        names = [statistic.name for statistic in self.statistics]
        if name not in names:
            raise QueryError(unknown("statistic", name, names))
        return self.statistics[names.index(name)]


def head_card(
    database: RunDatabase,
    label: str,
    run_id: str | None = None,
    intervention: str = "none",
    models: RunModels | None = None,
) -> HeadCard:
    """The card of a head, of the only run if none is named; `models` turns tokens into text."""
    runs = PageRuns(database, is_whole=True)
    head, run = chosen_head(database, label, run_id, intervention)
    facts = runs.facts(run["run_id"])
    scope = Scope(run_id=facts.run_id, intervention=intervention)
    return _Answers(runs, facts, scope, head, models).card(run)


def chosen_head(
    database: RunDatabase, label: str, run_id: str | None, intervention: str
) -> tuple[Head, Record]:
    """A head and its run, the only one if none is named."""
    head = Head.labelled(label)
    if head is None:
        raise QueryError(f"head {label!r}: expected a layer and a head, such as L5H1")
    run = _chosen_run(database, run_id)
    if intervention not in run["interventions"]:
        raise QueryError(unknown("intervention", intervention, run["interventions"]))
    last = Head(run["n_layers"] - 1, run["n_heads"] - 1)
    if head.layer > last.layer or head.head > last.head:
        raise QueryError(f"run {run['run_id']}: head {head}: expected a head from L0H0 to {last}")
    return head, run


def card_html(card: HeadCard) -> str:
    """A card as one HTML document, which needs nothing else."""
    data = json_value(asdict(card))
    return html_text(TEMPLATES / "head_card", {"label": card.label}, data, CARD)


def _chosen_run(database: RunDatabase, run_id: str | None) -> Record:
    runs = {row["run_id"]: row for row in database.records("FROM runs")}
    if run_id is None and len(runs) == 1:
        return next(iter(runs.values()))
    if run_id is None:
        raise QueryError(
            f"{len(runs)} runs are open: expected a run_id, such as {next(iter(runs), 'none')}"
        )
    if run_id not in runs:
        raise QueryError(unknown("run", str(run_id), runs))
    return runs[run_id]


class _Answers:
    """The answers about one head to what a page may ask."""

    def __init__(
        self, runs: PageRuns, facts: RunFacts, scope: Scope, head: Head, models: RunModels | None
    ) -> None:
        self.runs = runs
        self.facts = facts
        self.scope = scope
        self.head = head
        self.of_head = {"scope": scope, "head": PageHead(**head._asdict())}
        self.models = models
        self.note = ""

    def card(self, run: Record) -> HeadCard:
        """All of them."""
        # Percentiles need the means of all heads.
        means = self.runs.answer(Heatmap(kind="heatmap", scope=self.scope))
        numbers: Numbers = dict(zip(NUMBERS, means.arrays, strict=True))
        has_rows = numbers["count"].any() or numbers["undefined"].any()
        names = self.facts.statistics if has_rows else ()
        statistics = self._statistics(names, means.header["uniform_baseline"], numbers)
        examples = {name: self._examples(name) for name in example_statistics(names)}
        return HeadCard(
            label=str(self.head),
            layer=self.head.layer,
            head=self.head.head,
            run_id=run["run_id"],
            model=run["model"],
            intervention=self.scope.intervention,
            input_family=run["input_family"],
            sequences=run["sequences_done"],
            n_ctx=run["n_ctx"],
            heads=int(numbers["count"].any(axis=0).sum()),
            statistics=statistics,
            distributions=self._distributions(names) if names else {},
            subsets=self._subsets(names),
            curves=[
                HeadCurve(**row)
                for row in self.runs.answer(Curves(kind="curves", **self.of_head)).header["rows"]
            ],
            effects=self._effects({one.name: one for one in statistics}),
            most={name: most for name, (most, _) in examples.items() if most},
            least={name: least for name, (_, least) in examples.items() if least},
            note=self.note,
        )

    def _statistics(
        self, names: Sequence[str], baselines: Record, numbers: Numbers
    ) -> list[CardStatistic]:
        about = {row["name"]: row for row in self.runs.statistics}
        changes = [None, None]
        if names and self.scope.intervention != "none" and "none" in self.facts.interventions:
            query = Heatmap(kind="heatmap", changes=True, **self.of_head)
            changes = self.runs.answer(query).arrays[:2]
        return [
            CardStatistic(
                name=name,
                meaning=about[name]["meaning"],
                formula=about[name]["formula"] or "",
                unit=about[name]["unit"],
                uniform_baseline=baselines.get(name),
                heads=int((~np.isnan(numbers["mean"][index])).sum()),
                change=_number(changes[0], index, 0, 0),
                change_error=_number(changes[1], index, 0, 0),
                **{column: _number(numbers[column], index, *self.head) for column in NUMBERS},
            )
            for index, name in enumerate(names)
        ]

    def _distributions(self, names: Sequence[str]) -> dict[str, CardDistribution]:
        query = Histograms.model_construct(kind="histograms", statistics=names, **self.of_head)
        answer = self.runs.answer(query)
        distributions: dict[str, CardDistribution] = {}
        for name, counts in zip(names, answer.arrays[0], strict=True):
            low, high = answer.header["axes"][name]
            if counts.any():
                edges = np.linspace(low, high, DRAWN_BINS + 1).tolist()
                distributions[name] = CardDistribution(edges, counts.tolist())
        return distributions

    def _subsets(self, names: Sequence[str]) -> dict[str, list[CardSubset]]:
        subsets: dict[str, list[CardSubset]] = {name: [] for name in names}
        if names and self.runs.subsets(self.facts.run_id):
            query = Subsets(kind="subsets", **self.of_head)
            for row in self.runs.answer(query).header["rows"]:
                subsets[row.pop("statistic")].append(CardSubset(**row))
        return subsets

    def _examples(self, statistic: str) -> tuple[list[Excerpt], list[Excerpt]]:
        """The sequences in which a statistic is largest, and others in which it is smallest."""
        largest, smallest = (
            self.runs.answer(
                Extremes(
                    kind="extremes",
                    **self.of_head,
                    statistic=statistic,
                    statistics=(statistic,),
                    lowest=lowest,
                )
            ).header["rows"]
            for lowest in (False, True)
        )
        most = largest[:MOST]
        sequences = {row["sequence"] for row in most}
        # With few sequences, the least active would be among the most active again.
        least = [row for row in smallest[:LEAST] if row["sequence"] not in sequences]
        query = Texts(
            kind="texts",
            scope=self.scope,
            sequences=tuple(row["sequence"] for row in (*most, *least)),
            heads=(self.of_head["head"],) * len(most + least),
            first=EXCERPT_TOKENS,
            statistic=statistic,
        )
        run_id = self.facts.run_id
        texts = with_texts(self.runs.answer(query), self.models, run_id, NO_TOKENIZER).header
        self.note = texts.get("note", self.note)
        of_sequence = {row["sequence"]: row for row in texts["rows"]}
        names = ("start", "tokens", "marked", "marks", "weights")

        def excerpts(rows: list[Record]) -> list[Excerpt]:
            return [
                Excerpt(
                    sequence=row["sequence"],
                    value=row[statistic],
                    length=of_sequence[row["sequence"]]["n_tokens"],
                    subset=row["subset"],
                    **{name: of_sequence[row["sequence"]][name] for name in names},
                )
                for row in rows
                if row["sequence"] in of_sequence
            ]

        return excerpts(most), excerpts(least)

    def _effects(self, statistics: dict[str, CardStatistic]) -> list[CardEffect]:
        answer = self.runs.answer(Effects(kind="effects", scope=self.scope)).header["effects"]
        of_head = f"{where(self.scope.conditions_on_run)} AND label = '{self.head}'"
        sql = f"SELECT statistic, q FROM head_effects{of_head}"
        rows = self.runs.database.records(sql) if answer else []
        q = {row["statistic"]: row["q"] for row in rows}
        effects: list[CardEffect] = []
        for about in answer:
            own = statistics[about["statistic"]]
            if own.mean is None:
                continue
            direct = statistics.get(f"direct_{own.name}")
            effects.append(
                CardEffect(
                    statistic=own.name,
                    intervention=about["measured_by"].format(**self.head._asdict()),
                    effect=own.mean,
                    standard_error=own.standard_error,
                    q=q[own.name],
                    direct=direct.mean if direct else None,
                    direct_error=direct.standard_error if direct else None,
                    indirect=own.mean - direct.mean if direct and direct.mean is not None else None,
                    trust=about["trust"][1 + self.head.layer],
                )
            )
        return effects


def _number(values: Array | None, *place: int) -> Any:  # noqa: ANN401  # int or float
    """A number of the head: None for NaN."""
    value = None if values is None else values[place].item()
    return None if value is None or np.isnan(value) else value
