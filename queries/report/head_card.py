"""The card of one head: all that a run says of it, as plain lists and numbers, and as a page."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from headcount.queries.answers.examples import Examples, Excerpt, example_statistics, read_examples
from headcount.queries.answers.head_curves import HeadCurve
from headcount.queries.answers.numbers import NUMBERS, Numbers
from headcount.queries.answers.page_queries import Effects
from headcount.queries.answers.run_facts import facts_of_runs
from headcount.queries.answers.section import Section, answered, read_section
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
    head = Head.labelled(label)
    if head is None:
        raise QueryError(f"head {label!r}: expected a layer and a head, such as L5H1")
    run = _chosen_run(database, run_id)
    if intervention not in run["interventions"]:
        raise QueryError(unknown("intervention", intervention, run["interventions"]))
    (facts,) = facts_of_runs(database, [run]).values()
    if head.layer >= facts.layers or head.head >= facts.heads:
        raise QueryError(
            f"run {run['run_id']}: head {head}: expected a head from L0H0 to "
            f"{Head(facts.layers - 1, facts.heads - 1)}"
        )
    section = read_section(database, facts, intervention, head=head)
    names = example_statistics(section.facts.statistics)
    examples = read_examples(database, section, {name: [head] for name in names}, models)
    return _card(database, run, section, head, examples)


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


def _card(
    database: RunDatabase, run: Record, section: Section, head: Head, examples: Examples
) -> HeadCard:
    facts = {row["name"]: row for row in database.records("FROM statistics")}

    def own(numbers: Numbers, column: str, statistic: int) -> Any:  # noqa: ANN401  # int or float
        """A number of the head: None for NaN."""
        value = numbers[column][statistic, *head].item()
        return None if np.isnan(value) else value

    statistics: list[CardStatistic] = []
    distributions: dict[str, CardDistribution] = {}
    subsets: dict[str, list[CardSubset]] = {}
    for index, name in enumerate(section.facts.statistics):
        changes = section.changes
        statistics.append(
            CardStatistic(
                name=name,
                meaning=facts[name]["meaning"],
                formula=facts[name]["formula"] or "",
                unit=facts[name]["unit"],
                uniform_baseline=section.uniform_baseline.get(name),
                heads=int((~np.isnan(section.numbers["mean"][index])).sum()),
                change=own(changes, "mean", index) if changes else None,
                change_error=own(changes, "standard_error", index) if changes else None,
                **{column: own(section.numbers, column, index) for column in NUMBERS},
            )
        )
        if name in section.histograms:
            first, size, counts = section.histograms[name].groups_of(head)
            edges = section.histograms[name].edges_of(first, size, len(counts))
            distributions[name] = CardDistribution(edges, counts)
        columns = ("mean", "standard_error", "documents", "count")
        subsets[name] = [
            CardSubset(subset, *(own(numbers, column, index) for column in columns))
            for subset, numbers in section.subsets.items()
        ]
    return HeadCard(
        label=str(head),
        layer=head.layer,
        head=head.head,
        run_id=run["run_id"],
        model=run["model"],
        intervention=section.intervention,
        input_family=run["input_family"],
        sequences=run["sequences_done"],
        n_ctx=run["n_ctx"],
        heads=int(section.numbers["count"].any(axis=0).sum()),
        statistics=statistics,
        distributions=distributions,
        subsets=subsets,
        curves=[curve.of_head(*head) for curve in section.curves],
        effects=_effects(database, section, head, {one.name: one for one in statistics}),
        most={name: excerpts for (name, *_), excerpts in examples.most.items()},
        least={name: excerpts for (name, *_), excerpts in examples.least.items()},
        note=examples.note,
    )


def _effects(
    database: RunDatabase, section: Section, head: Head, statistics: dict[str, CardStatistic]
) -> list[CardEffect]:
    facts = replace(section.facts, has_parts=False)
    answer = answered(database, facts, Effects(kind="effects", scope=section.scope)).header
    effects: list[CardEffect] = []
    sql = f"SELECT statistic, q FROM head_effects{section.condition} AND label = '{head}'"
    rows = database.records(sql) if answer["effects"] else []
    q = {row["statistic"]: row["q"] for row in rows}
    for about in answer["effects"]:
        own = statistics[about["statistic"]]
        if own.mean is None:
            continue
        direct = statistics.get(f"direct_{own.name}")
        effects.append(
            CardEffect(
                statistic=own.name,
                intervention=about["measured_by"].format(layer=head.layer, head=head.head),
                effect=own.mean,
                standard_error=own.standard_error,
                q=q[own.name],
                direct=direct.mean if direct else None,
                direct_error=direct.standard_error if direct else None,
                indirect=own.mean - direct.mean if direct and direct.mean is not None else None,
                trust=about["trust"][1 + head.layer],
            )
        )
    return effects
