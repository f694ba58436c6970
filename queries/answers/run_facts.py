"""What queries of pages need to know of a run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headcount.queries.answers.axes import Axis
from headcount.queries.answers.head_curves import AXES, ProfileFacts
from headcount.queries.answers.loss_effects import PARTS
from headcount.queries.answers.marks import RECEIVED
from headcount.queries.ask.asking import Record, RunDatabase
from headcount.queries.open.run import Run
from headcount.queries.open.sql_text import text_literal
from headcount.schemas.predictions import PREDICTIONS
from headcount.schemas.statistics import STATISTICS
from headcount.schemas.tables import HEADS, ROLLUPS

LARGE_RUN_ROWS = 20_000_000  # of one intervention; with more, brushes read a sample

AXIS_ROWS = 50_000  # rows of the first sequences from which the ends of an axis are taken, about

STATISTIC_FACTS = (
    "name, unit, range_low, range_high, meaning, formula, source, uniform_baseline, measured_by"
)
"""What a page knows of each statistic: columns of the view `statistics`."""

MOST_SHOWN = 6  # statistics that a page shows first


@dataclass(frozen=True)
class RunFacts:
    """What queries need to know of a run."""

    run_id: str
    layers: int
    heads: int
    interventions: tuple[str, ...]
    statistics: tuple[str, ...]
    uniform_baseline: frozenset[str] = frozenset()  # statistics that have one in `sequences`
    axes: dict[str, Axis] = field(default_factory=dict[str, Axis])  # by statistic asked for
    every: int = 1  # in a large run, brushes and histograms read one of so many sequences
    has_rollups: bool = False  # whether means come from roll-ups and not from rows
    has_large_sample: bool = False  # whether the sample of a merge suffices for ends of axes
    sample: str | None = None  # table of that sample, under a query's intervention, once read
    profiles: Mapping[str, ProfileFacts] = field(default_factory=dict[str, ProfileFacts])
    """Profiles by lag, key or query that the run averaged over sequences."""
    kept_curves: Mapping[str, ProfileFacts] = field(default_factory=dict[str, ProfileFacts])
    """Those that it kept for every sequence and did not average."""
    keeps_received: bool = False  # whether it kept for every sequence what each key receives
    predictions: tuple[str, ...] = ()  # those with one number for each sequence
    has_dormant: bool = False  # whether runs beside it show which heads copy and rest
    has_parts: bool = False  # whether it averaged what each part of a layer adds to logits

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and heads."""
        return self.layers, self.heads

    @property
    def is_sampled(self) -> bool:
        """Whether brushes and histograms read a sample that was merged."""
        return self.every > 1 and self.has_rollups

    @property
    def sampled_rows(self) -> str:
        """What has the rows of the sample: its table, or the rows of a run without one."""
        return self.sample or "heads"


def facts_of_runs(
    database: RunDatabase, records: Iterable[Record], *, is_whole: bool = False
) -> dict[str, RunFacts]:
    """What queries need to know of runs, by id, from their rows in the view `runs`.

    `is_whole`: for a page that is written once, whose histograms alone may be of a sample.
    """
    runs = {run.directory.run_id: run for run in database.runs}
    # Asked once and not for each of many runs: it binds the view.
    sequence_columns = database.columns("sequences")
    return {
        record["run_id"]: _facts_of(
            runs[record["run_id"]], record, _shape(database, record), sequence_columns, is_whole
        )
        for record in records
    }


def _facts_of(
    run: Run,
    record: Record,
    shape: tuple[int, int],
    sequence_columns: frozenset[str],
    is_whole: bool,
) -> RunFacts:
    # Of one intervention: a query reads no more.
    rows = record["rows"] // max(1, len(record["interventions"]))
    profiles = _profiles(run, "profiles")
    kept_curves = _profiles(run, "curves")
    # Only if all rows are in roll-ups and samples: otherwise means are as quick from the rows.
    has_rollups = bool(run.files(ROLLUPS.name)) and not run.files(HEADS.name, unrolled=True)
    stride = run.manifest.sample_stride
    has_large_sample = has_rollups and rows // stride >= AXIS_ROWS
    is_large = has_large_sample if is_whole else rows > LARGE_RUN_ROWS
    return RunFacts(
        run_id=record["run_id"],
        layers=shape[0],
        heads=shape[1],
        interventions=tuple(record["interventions"]),
        statistics=tuple(record["statistics"]),
        uniform_baseline=frozenset(
            name for name in record["statistics"] if f"uniform_{name}" in sequence_columns
        ),
        every=stride if is_large else 1,
        has_rollups=has_rollups,
        has_large_sample=has_large_sample,
        profiles=profiles,
        keeps_received=RECEIVED in run.manifest.kinds.get("curves", {}),
        predictions=tuple(
            name
            for name, prediction in PREDICTIONS.items()
            if name in sequence_columns and not prediction.per_token
        ),
        has_parts=PARTS in run.manifest.kinds.get("profiles", {}),
        kept_curves={name: facts for name, facts in kept_curves.items() if name not in profiles},
    )


def _shape(database: RunDatabase, record: Record) -> tuple[int, int]:
    """Layers and heads. Without sizes of its model in a manifest, those up to the last measured."""
    if record["n_layers"] and record["n_heads"]:
        return record["n_layers"], record["n_heads"]
    of_run = f"WHERE run_id = {text_literal(record['run_id'])}"
    [(layers, heads)] = database.rows(f"SELECT max(layer) + 1, max(head) + 1 FROM heads {of_run}")
    return record["n_layers"] or layers or 1, record["n_heads"] or heads or 1


def first_statistics(statistics: Sequence[str]) -> list[str]:
    """The statistics of a run that a page shows first."""
    preferred = [name for name in in_order("shown") if name in statistics]
    return list(dict.fromkeys([*preferred, *statistics]))[:MOST_SHOWN]


def in_order(fact: Literal["shown", "example"]) -> list[str]:
    """The statistics that have a place of a kind, in their order."""
    places = {name: getattr(formula, fact) for name, formula in STATISTICS.items()}
    return sorted(filter(places.get, places), key=lambda name: places[name])


def _profiles(run: Run, field: str) -> dict[str, ProfileFacts]:
    """The profiles in a field of a run's scan that a page can draw as lines."""
    return {
        name: ProfileFacts(record["axis"], record["meaning"], record["unit"])
        for name, record in run.manifest.kinds.get(field, {}).items()
        if record["axis"] in AXES
    }
