"""Whether figures and claims can fail: for random weights, and for interventions that do nothing.

A figure that a model with random weights passes says nothing about the published model. A figure of
an intervention that passes if the intervention does nothing says nothing about the intervention.
Each must fail, or say in one line why it cannot (`passes_random`, `passes_null`). The other way
round, a model that is right must pass: the scatter that the authors give is drawn many times
(`scatter_problems`).

* Random weights: a model of the published layers and heads with narrow heads, on few sequences of
  the published scans, compared as if it were the published model.
* Interventions that do nothing: the same replication, with every intervention measured as `none`.
  What does not change depends on no intervention. What becomes 0, 1 or 100 is a change, a ratio or
  a percentage, and is compared so. Any other value becomes that of a figure that depends on no
  intervention, the untouched model's: its published value is compared.

`python -m tests.reproduce.controls [NAME …]`, or `make controls` for all.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headcount.queries.ask.asking import RunDatabase
from headcount.reproduce.published_values import PublishedValue
from headcount.reproduce.replication import (
    Check,
    Claim,
    Replication,
    find_replications,
    replications,
)
from headcount.reproduce.replication_runs import open_replication_runs, plan_replication_in
from headcount.reproduce.verdicts import Result, finite_number, judge, measured_by_name, rows_of
from headcount.schemas.errors import HeadcountError, QueryError, RunError
from headcount.workers.model.files.known_models import KnownModels
from headcount.workers.process import prepare_process
from tests.reproduce.control_runs import (
    FULL,
    QUICK,
    ControlRuns,
    RunsShown,
    ShortReplication,
    as_if_untouched,
    as_measured,
    measure_run,
    short_replication,
    stand_in_files,
    with_untouched,
)
from tests.toys.random_model import LIVELY, UNTRAINED

DRAWS = 20_000
"""Pairs of a published and a measured value that are drawn for the scatter of one figure."""

LEAST_PASSING = 0.99
"""Share of right models that a figure must pass."""

SAME = 1e-6
"""Relative difference below which two measured values are one."""

NOTHING = (0.0, 1.0, 100.0)
"""What changes, ratios and percentages of an intervention that does nothing are."""


@dataclass(frozen=True)
class Control:
    """What one control says of one figure or claim."""

    replication: str
    name: str
    control: str
    """random, null or scatter."""
    is_wrong: bool
    """Whether it passes although it must not, and no reason is given."""
    text: str
    """What was seen."""


# What a figure measures


def measured_values(name: str, check: Check, database: RunDatabase) -> dict[str, float | None]:
    """What a check measures, by name. Nothing if these runs lack what its SQL reads."""
    try:
        values = measured_by_name(name, check.sql, database)
    except (RunError, QueryError):
        return {}
    return {key: finite_number(value) for key, value in values.items()}


# Controls


class ReplicationControls:
    """Both controls of one replication, on short runs that lie in one directory."""

    def __init__(self, name: str, replication: Replication, runs: ControlRuns) -> None:
        self.name = name
        self.replication = replication
        self.runs = runs
        self.notes: list[str] = []
        """What was smaller than published and might matter."""
        self.unmeasured: list[str] = []
        """Published figures that have no value for random weights."""
        self.without_null: list[str] = []
        """Published figures of a replication with interventions that have no value if interventions
        do nothing.
        """
        self._values: dict[tuple[RunsShown, str], dict[str, float | None]] = {}
        self._shown: RunsShown | None = None

    def measure(self) -> list[Control]:
        """Measure all runs, then ask every check and every claim."""
        with stand_in_files(self.replication):
            all_sizes = self._distinct_sizes()
            random_runs = [(sizes, self._random_runs(sizes)) for sizes in all_sizes]
            changed_sizes = all_sizes if has_interventions(self.replication) else []
            changed_runs = [(sizes, self._changed_runs(sizes)) for sizes in changed_sizes]
            # Opened when all runs are there: a database does not see those that come later.
            self.database = open_replication_runs(self.replication, str(self.runs.runs(self.name)))
        controls: list[Control] = []
        for sizes, shown in random_runs:
            controls += self._random_figures(sizes, shown)
            if sizes == self.replication.published_sizes:
                controls += self._random_claims(shown)
        for sizes, (changed, null) in changed_runs:
            controls += self._null_figures(sizes, changed, null)
        return controls

    # Runs

    def _distinct_sizes(self) -> list[dict[str, int | str]]:
        """The sizes of each model that something was published for, each once."""
        sizes: list[dict[str, int | str]] = []
        for check in self.replication.check:
            for value in check.values:
                if self.replication.sizes_of(check, value) not in sizes:
                    sizes.append(dict(self.replication.sizes_of(check, value)))
        if self.replication.published_sizes not in sizes:
            sizes.append(dict(self.replication.published_sizes))
        return sizes

    def _random_runs(self, sizes: Mapping[str, int | str]) -> RunsShown:
        short = short_replication(self.replication, sizes, self.runs.extent)
        self._note(short)
        model = self.runs.model(short, UNTRAINED)
        return as_measured(self.runs.measure(self.name, short.replication, model))

    def _changed_runs(self, sizes: Mapping[str, int | str]) -> tuple[RunsShown, RunsShown]:
        """Runs whose interventions show, and the same as if they did nothing."""
        short = short_replication(self.replication, sizes, self.runs.extent, of_few_heads=True)
        try:
            model = self.runs.model(short, LIVELY)
            plans = self.runs.measure(self.name, short.replication, model)
        except HeadcountError:
            # An intervention names a head that a small model lacks.
            short = short_replication(self.replication, sizes, self.runs.extent)
            model = self.runs.model(short, LIVELY)
            plans = self.runs.measure(self.name, short.replication, model)
        self._note(short)
        other = with_untouched(short.replication)
        is_other = other != short.replication
        untouched = self.runs.measure(self.name, other, model) if is_other else plans
        return as_measured(plans), as_if_untouched(plans, untouched)

    def _note(self, short: ShortReplication) -> None:
        self.notes += [note for note in short.notes if note not in self.notes]

    # Queries

    def _measured(self, check: Check, shown: RunsShown) -> dict[str, float | None]:
        """What a check measures on some runs; models of other sizes may ask for the same."""
        key = (shown, check.sql)
        if key not in self._values:
            self._show(shown)
            self._values[key] = measured_values(self.name, check, self.database)
        return self._values[key]

    def _show(self, shown: RunsShown) -> None:
        if shown != self._shown:
            shown.show(self.database)
            self._shown = shown

    def _values_of(self, sizes: Mapping[str, int | str]) -> Iterator[tuple[Check, PublishedValue]]:
        """What was published for a model of these sizes."""
        for check in self.replication.check:
            for value in check.values:
                if self.replication.sizes_of(check, value) == sizes:
                    yield check, value

    def _random_figures(self, sizes: Mapping[str, int | str], shown: RunsShown) -> list[Control]:
        controls: list[Control] = []
        for check, value in self._values_of(sizes):
            measured = self._measured(check, shown).get(value.name)
            if measured is None:
                self.unmeasured.append(value.full_name)
            elif value.is_near(measured):
                why = check.why_random_passes(value.name)
                text = why or f"published {value.value:.4g}, random weights {measured:.4g}"
                controls.append(Control(self.name, value.full_name, "random", not why, text))
        return controls

    def _random_claims(self, shown: RunsShown) -> list[Control]:
        self._show(shown)
        controls: list[Control] = []
        for claim in self.replication.claim:
            for words, value, holds in claim_rows(self.name, claim, self.database):
                if holds:
                    why = claim.why_random_passes(words)
                    why = why or claim.why_random_passes(claim.words)
                    text = why or f"holds for random weights ({value})"
                    controls.append(Control(self.name, words, "random", not why, text))
        return controls

    def _null_figures(
        self, sizes: Mapping[str, int | str], changed: RunsShown, null: RunsShown
    ) -> list[Control]:
        # All with interventions first: to show other runs takes longer than a query.
        values = [
            (check, value, self._measured(check, changed).get(value.name))
            for check, value in self._values_of(sizes)
        ]
        pairs: list[tuple[Check, PublishedValue, float, float]] = []
        for check, value, before in values:
            after = self._measured(check, null).get(value.name)
            if before is None or after is None:
                self.without_null.append(value.full_name)
            else:
                pairs.append((check, value, before, after))
        return null_figures(self.name, pairs)


def claim_rows(
    name: str, claim: Claim, database: RunDatabase
) -> list[tuple[str, float | None, bool]]:
    """Claim, value and whether it holds, in the order of the rows."""
    try:
        rows = rows_of(name, claim.sql, 3, database)
    except (RunError, QueryError):
        return []
    results: list[tuple[str, float | None, bool]] = []
    for words, value, holds in rows:
        number = finite_number(value)
        is_undefined = value is not None and number is None
        results.append((str(words), number, bool(holds) and not is_undefined))
    return results


def null_figures(
    name: str, pairs: Sequence[tuple[Check, PublishedValue, float, float]]
) -> list[Control]:
    """Figures that an intervention which does nothing passes: of each, the values with and without
    it.
    """
    untouched = [
        (check, value, after)
        for check, value, before, after in pairs
        if math.isclose(before, after, rel_tol=SAME, abs_tol=SAME)
    ]
    controls: list[Control] = []
    for check, value, before, after in pairs:
        if math.isclose(before, after, rel_tol=SAME, abs_tol=SAME):
            continue
        null_value = _null_value(check, after, untouched)
        if null_value is not None and value.is_near(null_value):
            why = check.why_null_passes(value.name)
            shown = f"published {value.value:.4g}, untouched {null_value:.4g}"
            text = why or shown
            controls.append(Control(name, value.full_name, "null", not why, text))
    return controls


def _null_value(
    check: Check, after: float, untouched: Sequence[tuple[Check, PublishedValue, float]]
) -> float | None:
    """The published value of a model whose interventions do nothing; None if there is none."""
    for nothing in NOTHING:
        if math.isclose(after, nothing, rel_tol=SAME, abs_tol=SAME):
            return nothing
    same = [
        (other, value)
        for other, value, measured in untouched
        if math.isclose(after, measured, rel_tol=SAME)
    ]
    # The row of the same check comes first: another may be rounded otherwise.
    same.sort(key=lambda pair: pair[0] is not check)
    return same[0][1].value if same else None


# Claims of interventions, on the miniature, where they hold


def null_claims_of_miniature(
    name: str, replication: Replication, directory: str, models: KnownModels
) -> list[Control]:
    """Claims that hold on the miniature if interventions do nothing; missing runs are measured."""
    if not replication.claim or not has_interventions(replication):
        return []
    model = replication.bundled_model
    plans = plan_replication_in(directory, replication, model, models=models)
    untouched_replication = with_untouched(replication, is_miniature=True)
    untouched = plan_replication_in(directory, untouched_replication, model, models=models)
    for plan in [*plans, *untouched]:
        measure_run(plan, models)
    database = open_replication_runs(replication, directory)
    as_measured(plans).show(database)
    results = judge(name, replication, plans[0].info, model, database)
    return null_claims(name, replication, database, results, as_if_untouched(plans, untouched))


def null_claims(
    name: str,
    replication: Replication,
    database: RunDatabase,
    results: Iterable[Result],
    null: RunsShown,
) -> list[Control]:
    """Claims of interventions that hold on a model, and hold there if the interventions do nothing.

    `results` are those of the runs with interventions.
    """
    with_interventions = {each.name: each.measured for each in results if each.verdict == "pass"}
    null.show(database)
    controls: list[Control] = []
    for claim in replication.claim:
        for words, value, holds in claim_rows(name, claim, database):
            if not holds or _depends_on_no_intervention(words, value, with_interventions):
                continue
            why = claim.why_null_passes(words) or claim.why_null_passes(claim.words)
            text = why or f"holds under interventions that do nothing ({value})"
            controls.append(Control(name, words, "null", not why, text))
    return controls


def _depends_on_no_intervention(
    words: str, null_value: float | None, with_interventions: Mapping[str, float | None]
) -> bool:
    """Whether a claim has the same words and the same number with the interventions."""
    if words not in with_interventions:
        return False
    value = with_interventions[words]
    if null_value is None or value is None:
        return null_value is value
    # DuckDB may add up in another order, so the last bits may differ.
    return math.isclose(null_value, value, rel_tol=SAME, abs_tol=SAME)


def has_interventions(replication: Replication) -> bool:
    """Whether any scan of a replication intervenes."""
    fields = [replication.defaults, replication.bundled, *replication.scan.values()]
    interventions = [
        intervention for entry in fields for intervention in entry.get("interventions", [])
    ]
    return any(intervention != "none" for intervention in interventions)


def passing_share(value: PublishedValue) -> float:
    """The share of right models that a figure passes, if published and measured values scatter."""
    if not value.standard_error:
        return 1.0
    generator = np.random.default_rng(0)
    # Both the published and the measured value scatter about the true one.
    draws = generator.standard_normal((2, DRAWS)) * value.standard_error + value.value
    published, measured = draws
    if value.scale == "log10":
        both = (published > 0) & (measured > 0)
        ratio = np.divide(measured, published, out=np.ones(DRAWS), where=both)
        near = both & (np.abs(np.log10(ratio, where=both, out=np.zeros(DRAWS))) <= value.tolerance)
    else:
        unit = np.abs(published) if value.scale == "relative" else 1.0
        near = np.abs(measured - published) <= value.tolerance * unit
    return float(near.mean())


def scatter_problems(name: str, replication: Replication) -> list[Control]:
    """Figures that a right model fails in more than one of a hundred cases."""
    controls: list[Control] = []
    for check in replication.check:
        for value in check.values:
            share = passing_share(value)
            # The draws themselves scatter by 0.0007.
            if share < LEAST_PASSING - 0.002:
                text = f"a right model passes in {share:.1%} of cases"
                controls.append(Control(name, value.full_name, "scatter", True, text))
    return controls


def main(words: Sequence[str]) -> int:
    """Print which figures and claims pass that must not; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.reproduce.controls", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="replications; none means all")
    parser.add_argument("--reasons", action="store_true", help="also print those with a reason")
    parser.add_argument("--quick", action="store_true", help="as short as the tests measure")
    options = parser.parse_args(words)
    prepare_process()
    selection = find_replications(options.names) if options.names else replications()
    wrong = 0
    with tempfile.TemporaryDirectory() as directory:
        runs = ControlRuns(Path(directory), QUICK if options.quick else FULL)
        models = KnownModels()
        for name, replication in selection.items():
            began = time.process_time()
            try:
                controls = ReplicationControls(name, replication, runs)
                results = [*scatter_problems(name, replication), *controls.measure()]
                miniature = str(Path(directory) / f"miniature-{name}")
                results += null_claims_of_miniature(name, replication, miniature, models)
            except HeadcountError as error:
                print(f"{name}: no controls: {error}", flush=True)
                wrong += 1
                continue
            _print(controls, results, time.process_time() - began, options.reasons)
            wrong += sum(result.is_wrong for result in results)
    return 1 if wrong else 0


def _print(
    controls: ReplicationControls, results: Iterable[Control], seconds: float, with_reasons: bool
) -> None:
    wrong = [result for result in results if result.is_wrong]
    excused = [result for result in results if not result.is_wrong]
    print(
        f"{controls.name}: {len(wrong)} pass that must not, {len(excused)} with a reason; "
        f"{seconds:.1f} s of a processor",
        flush=True,
    )
    for note in controls.notes:
        print(f"  measured with {note}")
    if controls.unmeasured:
        print(f"  no value for random weights: {len(controls.unmeasured)} figures")
    for result in [*wrong, *(excused if with_reasons else [])]:
        print(f"  {result.control}: {result.name}: {result.text}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
