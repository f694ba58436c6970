"""Moments and histograms of every statistic, by head and by subset of the Pile, as internal views.

They come from the roll-ups that were written, and from the rows of shards that have none.

`internal.subset_moments`, `internal.head_moments`, `internal.subset_bins` and `internal.head_bins`
are what the views subset_summaries, head_summaries, distributions and head_quantiles stand on.

Each statistic has a select of its own. So a query about one of them reads one column of the
rows: DuckDB drops the selects whose constant `statistic` is another one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from headcount.queries.open.run import Run
from headcount.queries.open.run_tables import bounds
from headcount.queries.open.sql_text import quoted_name, text_literal
from headcount.schemas.histogram_bins import (
    BINS_PER_OCTAVE,
    LAST_BIN,
    LINEAR_BINS,
    SMALLEST_OCTAVE,
    Axis,
)

SQL = (Path(__file__).with_name("internal") / "rollup_views.sql").read_text(encoding="utf-8")

PARTS = dict(re.findall(r"-- part: (\w+)\n(.*?)(?=\n-- part|\Z)", SQL, flags=re.DOTALL))
"""The SQL of the views, by name of the part."""

BIN_ENDS = PARTS["bin_ends"].format(
    linear_bins=LINEAR_BINS,
    last_bin=LAST_BIN,
    bins_per_octave=BINS_PER_OCTAVE,
    smallest_octave=SMALLEST_OCTAVE,
    near_zero=repr(2.0**SMALLEST_OCTAVE),
)
"""The columns `low` and `high` of a bin, in SQL, from `bin`, `range_low` and `range_high`."""

HEAD_KEYS = ("run_id", "intervention", "input_family", "layer", "head", "statistic")
SUBSET_KEYS = (*HEAD_KEYS, "pile_set_name")


@dataclass(frozen=True)
class MeasuredStatistic:
    """A statistic that some runs measured."""

    name: str
    axis: Axis
    run_ids: tuple[str, ...] | None  # The runs that measured it. None if all did.

    @property
    def value(self) -> str:
        """Its column, in SQL."""
        return quoted_name(self.name)

    @property
    def condition(self) -> str:
        """The rows of runs that measured it, in SQL."""
        if self.run_ids is None:
            return ""
        return f"WHERE run_id IN ({', '.join(map(text_literal, self.run_ids))})"


def measured_statistics(runs: Sequence[Run]) -> list[MeasuredStatistic]:
    """The statistics that some run measured, each with its axis."""
    runs_by_name: dict[str, list[Run]] = {}
    for run in runs:
        for name in run.manifest.kinds.get("statistics", {}):
            runs_by_name.setdefault(name, []).append(run)
    return [
        MeasuredStatistic(
            name,
            Axis(*bounds(measured_by[0].manifest.kinds["statistics"][name].get("range"))),
            None
            if len(measured_by) == len(runs)
            else tuple(run.directory.run_id for run in measured_by),
        )
        for name, measured_by in runs_by_name.items()
    ]


def create_rollup_views(connection: duckdb.DuckDBPyConnection, runs: Sequence[Run]) -> None:
    """Create the internal views, which read the rows of some runs; of none, roll-ups alone."""
    statistics = measured_statistics(runs)
    for prefix, keys in (("subset", SUBSET_KEYS), ("head", HEAD_KEYS)):
        # Those of subsets of the Pile, or the far fewer of whole heads.
        level = "by_subset" if keys == SUBSET_KEYS else "NOT by_subset"
        for content, of_rows in (("moments", "moments_of_rows"), ("bins", "bins_of_rows")):
            selects = [_of_rows(of_rows, keys, statistic) for statistic in statistics]
            merged = PARTS[f"merged_{content}"].format(
                by=", ".join(keys),
                level=level,
                from_rows="".join(f" UNION ALL BY NAME {select}" for select in selects),
                bin_ends=BIN_ENDS,
            )
            connection.execute(f"CREATE OR REPLACE VIEW internal.{prefix}_{content} AS {merged}")


def _of_rows(part: str, keys: Sequence[str], statistic: MeasuredStatistic) -> str:
    """The moments or the histogram of one statistic, from rows that are in no roll-up."""
    constant = f"{text_literal(statistic.name)} AS statistic"
    # Sequences are read only where the subset of the Pile is among the keys.
    subsets = f"JOIN {_of_sequences('pile_set_name', 'unrolled_sequences')}"
    return PARTS[part].format(
        keys=", ".join(constant if key == "statistic" else key for key in keys),
        value=statistic.value,
        condition=statistic.condition,
        documents=_of_sequences("document, pile_set_name", "unrolled_documents"),
        subsets=subsets if "pile_set_name" in keys else "",
        bin=bin_of(statistic.value, statistic.axis),
        low=statistic.axis.low,
        high=statistic.axis.high,
    )


def _of_sequences(columns: str, view: str) -> str:
    """Columns that an internal view has for each sequence, to be joined to rows of heads."""
    # Not USING: where DuckDB names the tables of a query, it knows no columns of a table.
    return f"""(
        SELECT run_id AS _run, intervention AS _intervention, sequence AS _sequence, {columns}
        FROM internal.{view}
    ) ON run_id = _run AND intervention = _intervention AND sequence = _sequence"""


def bin_of(value: str, axis: Axis) -> str:
    """The bin of a value, in SQL: what `Axis.bins_of` says."""
    if axis.is_linear:
        bins_per_unit = LINEAR_BINS / (axis.high - axis.low)
        place = f"floor(({value}::DOUBLE - {axis.low!r}) * {bins_per_unit!r})"
        return f"greatest(0, least({LINEAR_BINS - 1}, {place}))::SMALLINT"
    steps = f"(log2(abs({value}::DOUBLE)) - {SMALLEST_OCTAVE}) * {BINS_PER_OCTAVE}"
    return f"""(CASE
        WHEN abs({value}) < {2.0**SMALLEST_OCTAVE!r} THEN 0
        ELSE sign({value}) * least({LAST_BIN}, floor({steps}) + 1)
    END)::SMALLINT"""
