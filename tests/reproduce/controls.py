"""Whether figures and claims can fail: for random weights, and for interventions that do nothing.

A figure that a model with random weights passes says nothing about the published model. A figure of
an intervention that passes if the intervention does nothing says nothing about the intervention.
Each must fail, or say in one line why it cannot (`passes_random`, `passes_null`). The other way
round, a model that is right must pass: the scatter that the authors give is drawn many times
(`scatter_problems`).

* Random weights: a model with narrow heads and up to 12 layers (all of the published ones if
  figures name single heads), on few sequences of the published scans, compared as if it were the
  published model.
* Interventions that do nothing: the same replication, with every intervention measured as `none`.
  What does not change depends on no intervention. What becomes 0, 1 or 100 is a change, a ratio or
  a percentage, and is compared so. Any other value becomes that of a figure that depends on no
  intervention, the untouched model's: its published value is compared.

All runs of a replication lie in one directory and are opened once; `RunsShown` says which of them
its SQL sees. `python -m tests.reproduce.controls [NAME …]`, or `make controls` for all.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import string
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from headcount.jobs.plan.plan import Plan
from headcount.jobs.resources import Resources
from headcount.queries.ask.asking import RunDatabase
from headcount.queries.sql_text import text_literal
from headcount.reproduce.published_values import PublishedValue
from headcount.reproduce.replication import (
    Check,
    Reasons,
    Replication,
    find_replications,
    replications,
)
from headcount.reproduce.replication_runs import (
    measure_runs,
    open_replication_runs,
    plan_replication,
)
from headcount.reproduce.verdicts import Result, claim_rows, judge, measured_by_name
from headcount.schemas.errors import HeadcountError, QueryError, RunError
from headcount.schemas.scans.kinds import TABLES
from headcount.workers.inputs.corpus.text_files import located
from headcount.workers.model.files.known_models import KnownModels
from headcount.workers.model.files.model_info import ModelInfo
from headcount.workers.process import prepare_process
from tests.toys.random_model import (
    LIVELY,
    MOST_POSITIONS,
    UNTRAINED,
    miniature_steps,
    write_random_model,
)

DRAWS = 20_000
"""Pairs of a published and a measured value that are drawn for the scatter of one figure."""

LEAST_PASSING = 0.99
"""Share of right models that a figure must pass."""

SAME = 1e-6
"""Difference below which two measured values are one: DuckDB may add up in another order."""

NOTHING = (0.0, 1.0, 100.0)
"""What changes, ratios and percentages of an intervention that does nothing are."""

ModelSizes = Mapping[str, int | str]
"""Sizes of a model, by field of its description."""


class Control(NamedTuple):
    """A figure or a claim that passes a control, or that a right model fails."""

    control: str
    """random, null or scatter."""
    name: str
    seen: str
    reason: str = ""
    """Why it may. Without a reason it is wrong."""


def named_reason(reasons: Reasons, name: str) -> str:
    """The reason for a name: by that name, by a beginning `name*`, or the one for all."""
    if isinstance(reasons, str):
        return reasons
    beginnings = [each for each in reasons if each[-1] == "*" and name.startswith(each[:-1])]
    return next((reasons[each] for each in [name, *beginnings] if each in reasons), "")


def _is_same(value: float | None, other: float | None) -> bool:
    if value is None or other is None:
        return value is other
    return math.isclose(value, other, rel_tol=SAME, abs_tol=SAME)


# Short replications: no figure needs precision to be wrong

CHARACTERS = string.ascii_letters + string.digits + " .,"
"""Characters of a text that stands for another: 65, as many as the models of characters have."""

MOST_SEQUENCES, MOST_TOKENS = 6, 256
"""Of a scan under one intervention. It has one sequence, however many tokens that has."""

MOST_LAYERS, FEW_LAYERS, MOST_HEADS = 12, 4, 12
"""Layers and heads of a model of which no certain head is published."""

MOST_ENTRIES = 3e8
"""Entries of all patterns of a replication. Beyond that the model has fewer heads, and then fewer
layers, if no certain head is published.
"""

HIDING_COST = 10
"""How many times as long as others interventions take that hide keys: they build whole patterns."""

SMALL_VOCABULARY, LAST_TOKEN = 1024, 50256
"""Tokens of a vocabulary if nothing depends on it, or losses would take too long; and the last
token of GPT-2's, which is its BOS.
"""

MOST_DRAWN = 8
"""Sequences of a scan that is a picture. Scans of more are for means, which SQL may read by any
part of their names.
"""


def short_replication(
    replication: Replication, sizes: ModelSizes
) -> tuple[Replication, dict[str, int]]:
    """The replication with few sequences, and with the scans that a model of these sizes has; and
    the sizes of a model for which there is time.
    """
    scans: dict[str, dict[str, Any]] = {}
    for name, entry in replication.scan.items():
        alternatives: list[ModelSizes] = entry.get("sizes", [{}])
        is_of_sizes = any(each.items() <= sizes.items() for each in alternatives)
        fields = replication.defaults | entry
        fields = {key: fields[key] for key in fields if key not in ("sizes", "bundled")}
        if not is_of_sizes or _is_only_drawn(replication, name, fields):
            continue
        # A corpus that is not here: the miniature reads something else.
        if fields.get("input", {"family": "pile"})["family"] == "pile":
            fields["input"] = (replication.bundled | entry.get("bundled", {}))["input"]
        few = max(1, min(MOST_SEQUENCES, MOST_TOKENS // fields["n_ctx"]))
        published = fields.get("sequences", "all")
        fields["sequences"] = few if published == "all" else min(few, published)
        scans[name] = fields
    affordable = _affordable_sizes(replication, scans, sizes)
    for fields in scans.values():
        fields["input"] = _with_small_ids(fields["input"], affordable["d_vocab"])
    short = replication.model_copy(update={"scan": scans, "defaults": {}, "bundled": {}})
    return short, affordable


def _affordable_sizes(
    replication: Replication, scans: Mapping[str, Mapping[str, Any]], sizes: ModelSizes
) -> dict[str, int]:
    # Of some models the source names no number of heads.
    n_layers, n_heads = int(sizes["n_layers"]), int(sizes.get("n_heads", 8))
    names = [value.name for value in replication.published_values]
    # Figures of single heads keep all heads, because any of them may be named.
    if not any(re.search(r"L\d+H\d+", name) for name in names):
        n_layers, n_heads = min(n_layers, MOST_LAYERS), min(n_heads, MOST_HEADS)
        # As many heads, and then layers, as there is time for.
        entries = sum(map(_entries, scans.values()))
        n_heads = max(1, min(n_heads, int(MOST_ENTRIES / (entries * n_layers))))
        n_layers = min(n_layers, max(FEW_LAYERS, int(MOST_ENTRIES / (entries * n_heads))))
    asked = [fields["predictions"] for fields in scans.values() if "predictions" in fields]
    is_small = not asked or "loss" in str(asked)
    d_vocab = int(sizes["d_vocab"])
    return {
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_ctx": min(int(sizes.get("n_ctx", MOST_POSITIONS)), MOST_POSITIONS),
        "d_vocab": min(d_vocab, SMALL_VOCABULARY) if is_small else d_vocab,
    }


def _is_only_drawn(replication: Replication, scan: str, fields: Mapping[str, Any]) -> bool:
    """Whether a scan of a few sequences is only drawn: a picture cannot fail."""
    sequences = fields.get("sequences", "all")
    if sequences == "all" or sequences > MOST_DRAWN:
        return False
    queries = [each.sql for each in (*replication.check, *replication.claim)]
    is_asked = any(f"'{scan}'" in sql for sql in [*replication.view.values(), *queries])
    return not is_asked and any(f"'{scan}'" in figure.sql for figure in replication.figure)


def _entries(fields: Mapping[str, Any]) -> int:
    """Entries of the patterns of one head and layer, as many as take as long as a scan does."""
    interventions: list[str] = fields.get("interventions", ["none"])
    is_hiding = [each.startswith(("mask_", "keep_window")) for each in interventions]
    passes = sum(HIDING_COST if hides else 1 for hides in is_hiding)
    return passes * fields["sequences"] * fields["n_ctx"] ** 2


def _with_small_ids(source: Mapping[str, Any], d_vocab: int) -> dict[str, Any]:
    """An input that names tokens of a small vocabulary. The last one stays the last: BOS."""
    small = dict(source)
    if int(small.get("high", 0)) > d_vocab:
        small["high"] = d_vocab - 1
        small["low"] = min(int(small.get("low", 0)), d_vocab // 2)
    token = int(small.get("token", 0))
    if token >= d_vocab:
        small["token"] = d_vocab - 1 if token == LAST_TOKEN else token % (d_vocab - 1)
    return small


def _steps(replication: Replication) -> tuple[int, ...]:
    """Steps that figures were published for; three of the miniature's if figures name none."""
    if not any("checkpoints" in entry for entry in replication.scan.values()):
        return ()
    names = [value.name for value in replication.published_values]
    published = {int(step) for name in names for step in re.findall(r"^step (\d+)", name)}
    if published:
        return tuple(sorted({0, *published}))
    steps = miniature_steps(replication.bundled_model)
    return steps[0], steps[len(steps) // 2], steps[-1]


@contextlib.contextmanager
def stand_in_files(replication: Replication) -> Iterator[None]:
    """Work in an empty directory with a file for each that a scan of the replication names.

    They hold lines of this project's licence, as if they were of three data sets.
    """
    words = Path(located("bundled:LICENSE")).read_text(encoding="utf-8").split()
    letters = "".join(letter for letter in " ".join(words) if letter in CHARACTERS)
    lines = ["text,dataset"]
    for row in range(3 * MOST_SEQUENCES):
        text = " ".join(words[row * 11 : row * 11 + 400]).replace('"', "")
        lines.append(f'"{text}",{("sst2", "gsm8k", "humaneval")[row % 3]}')
    contents = {".txt": letters + CHARACTERS, ".csv": "\n".join(lines) + "\n"}
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        # Files are named in any option of an input, so all texts of the scans are looked at.
        texts = json.dumps([replication.defaults, replication.scan])
        # A name with a slash is of a corpus elsewhere.
        for name in re.findall(r'"([^"/]+(?:\.txt|\.csv))"', texts):
            Path(name).write_text(contents[Path(name).suffix], encoding="utf-8")
        yield


# Runs


def measured_plans(
    replication: Replication, model: str, known: KnownModels, directory: str
) -> list[Plan]:
    """Measure what is missing of runs in a directory, in this process, without a word."""
    plans = plan_replication(replication, model, directory, models=known, fingerprinted=False)
    measure_runs(plans, Resources(0, device="cpu"), Console(quiet=True), models=known)
    return plans


def with_untouched(replication: Replication) -> Replication:
    """The replication, in which each scan that lacks the untouched model measures nothing else."""
    scans: dict[str, dict[str, Any]] = {}
    for name, entry in replication.scan.items():
        # Of a short replication the last two are empty.
        fields = replication.defaults | entry | replication.bundled | entry.get("bundled", {})
        interventions = fields.get("interventions", ["none"])
        scans[name] = entry if "none" in interventions else entry | {"interventions": ["none"]}
    return replication.model_copy(update={"scan": scans})


class RunsShown(NamedTuple):
    """Which runs the SQL of a replication sees, and which interventions of each."""

    cells: tuple[tuple[str, str], ...]
    """Id of each run, with each intervention that its scan asks for."""
    is_null: bool
    """Whether each intervention has the rows of the untouched model."""

    def show(self, database: RunDatabase) -> None:
        """Let the tables of a database hold these runs alone.

        Their rows are copied into memory: every check reads them again, from many small files.
        """
        execute = database.connection.execute
        cells = ", ".join(
            f"({text_literal(run)}, {text_literal(name)})" for run, name in self.cells
        )
        execute(
            "CREATE OR REPLACE TABLE internal.shown AS "
            f"SELECT * FROM (VALUES {cells}) AS t(run_id, shown_as)"
        )
        shown_runs = "run_id IN (SELECT run_id FROM internal.shown)"
        execute(
            f"CREATE OR REPLACE VIEW main.runs AS SELECT * FROM internal.runs WHERE {shown_runs}"
        )
        source = "'none'" if self.is_null else "shown.shown_as"
        columns: dict[tuple[str, str], set[str]] = {}
        sql = "SELECT schema_name, table_name, column_name FROM duckdb_columns() WHERE NOT internal"
        for schema, table, column in execute(sql).fetchall():
            columns.setdefault((schema, table), set()).add(column)
        for name, table in TABLES.items():
            measured_columns = columns.get(("internal", name), set())
            if "intervention" not in measured_columns:
                continue
            # The columns that users see, in their order: views over a table must still fit it.
            is_labelled = "label" in columns["main", name] - measured_columns
            label = ", 'L' || layer || 'H' || head AS label" if is_labelled else ""
            rows = (
                f"SELECT measured.* REPLACE (shown.shown_as AS intervention) "
                f"FROM internal.{name} AS measured JOIN internal.shown AS shown "
                f"ON measured.run_id = shown.run_id AND measured.intervention = {source}"
            )
            if table.written == "once":
                # Of the weights, which are filed under `none` whatever the scan changes.
                rows = f"SELECT * FROM internal.{name} WHERE {shown_runs}"
            execute(f"CREATE OR REPLACE TABLE internal.shown_{name} AS {rows}")
            execute(
                f"CREATE OR REPLACE VIEW main.{name} AS SELECT *{label} FROM internal.shown_{name}"
            )


def runs_shown(plans: Sequence[Plan], untouched: Sequence[Plan] | None = None) -> RunsShown:
    """Runs as they were measured, or with rows of the untouched model for each intervention.

    `untouched` are the runs of `with_untouched`, in the same order.
    """
    cells = tuple(
        (source.run.run_id, str(intervention))
        for plan, source in zip(plans, untouched or plans, strict=True)
        for intervention in plan.scan.interventions
    )
    return RunsShown(cells, untouched is not None)


# Controls


class ReplicationControls:
    """Both controls of one replication, on short runs that lie in one directory."""

    def __init__(
        self, name: str, replication: Replication, home: Path, models: KnownModels
    ) -> None:
        """`home` has the runs of all replications, and models for all that have their sizes."""
        self.name = name
        self.replication = replication
        self.home = home
        self.models = models
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
        all_sizes: list[ModelSizes] = []
        for check in self.replication.check:
            for value in check.values:
                if (sizes := self.replication.sizes_of(check, value)) not in all_sizes:
                    all_sizes.append(sizes)
        if self.replication.published_sizes not in all_sizes:
            all_sizes.append(self.replication.published_sizes)
        with stand_in_files(self.replication):
            random_runs = [(sizes, runs_shown(self.runs(sizes, UNTRAINED))) for sizes in all_sizes]
            changed_sizes = all_sizes if has_interventions(self.replication) else []
            changed_runs = [(sizes, *self._changed_runs(sizes)) for sizes in changed_sizes]
            # Opened when all runs are there: a database does not see those that come later.
            directory = str(self.home / f"runs-{self.name}")
            self.database = open_replication_runs(self.replication, directory)
        controls: list[Control] = []
        for sizes, shown in random_runs:
            controls += self._random_figures(sizes, shown)
            if sizes == self.replication.published_sizes:
                self._show(shown)
                rows = passing_claims(self.name, self.replication, self.database)
                for words, value, why, _ in rows:
                    controls.append(Control("random", words, f"holds ({value})", why))
        for sizes, changed, null in changed_runs:
            controls += self._null_figures(sizes, changed, null)
        return controls

    def runs(self, sizes: ModelSizes, scale: float, untouched: bool = False) -> list[Plan]:
        """The short runs on a model with random weights, which are measured if they are missing."""
        short, affordable = short_replication(self.replication, sizes)
        layout, steps = short.bundled_model, _steps(short)
        facts = [*affordable.values(), scale, *steps]
        model = self.home / "-".join(map(str, [layout.removeprefix("bundled:"), *facts]))
        if not model.exists():
            write_random_model(model, layout, affordable, scale, steps)
        replication = with_untouched(short) if untouched else short
        directory = str(self.home / f"runs-{self.name}")
        return measured_plans(replication, str(model), self.models, directory)

    def _changed_runs(self, sizes: ModelSizes) -> tuple[RunsShown, RunsShown]:
        """Runs whose interventions show, and the same as if they did nothing."""
        plans = self.runs(sizes, LIVELY)
        return runs_shown(plans), runs_shown(plans, self.runs(sizes, LIVELY, untouched=True))

    def _show(self, shown: RunsShown) -> None:
        if shown != self._shown:
            shown.show(self.database)
            self._shown = shown

    def _measured(
        self, sizes: ModelSizes, shown: RunsShown
    ) -> Iterator[tuple[Check, PublishedValue, float | None]]:
        """What was published for a model of these sizes, and what some runs measure of it."""
        for check in self.replication.check:
            for value in check.values:
                if self.replication.sizes_of(check, value) != sizes:
                    continue
                # Models of other sizes may ask for the same.
                key = (shown, check.sql)
                if key not in self._values:
                    self._show(shown)
                    # These runs may lack what the SQL reads.
                    self._values[key] = {}
                    with contextlib.suppress(RunError, QueryError):
                        self._values[key] = measured_by_name(self.name, check.sql, self.database)
                yield check, value, self._values[key].get(value.name)

    def _random_figures(self, sizes: ModelSizes, shown: RunsShown) -> list[Control]:
        controls: list[Control] = []
        for check, value, measured in self._measured(sizes, shown):
            if measured is None:
                self.unmeasured.append(value.full_name)
            elif value.is_near(measured):
                seen = f"published {value.value:.4g}, random weights {measured:.4g}"
                why = named_reason(check.passes_random, value.name)
                controls.append(Control("random", value.full_name, seen, why))
        return controls

    def _null_figures(
        self, sizes: ModelSizes, changed: RunsShown, null: RunsShown
    ) -> list[Control]:
        """Figures that an intervention which does nothing passes."""
        # All with interventions first: to show other runs takes longer than a query.
        before_and_after = [*self._measured(sizes, changed)], [*self._measured(sizes, null)]
        pairs: list[tuple[Check, PublishedValue, float]] = []
        untouched: list[tuple[Check, float, float]] = []
        for (check, value, before), (_, _, after) in zip(*before_and_after, strict=True):
            if before is None or after is None:
                self.without_null.append(value.full_name)
            elif _is_same(before, after):
                untouched.append((check, after, value.value))
            else:
                pairs.append((check, value, after))
        controls: list[Control] = []
        for check, value, after in pairs:
            # What is published for a model whose interventions do nothing. The row of the same
            # check comes first: another may be rounded otherwise.
            candidates = [nothing for nothing in NOTHING if _is_same(after, nothing)]
            rows = sorted(untouched, key=lambda row: row[0] is not check)
            candidates += [
                published
                for _, measured, published in rows
                if math.isclose(after, measured, rel_tol=SAME)
            ]
            if candidates and value.is_near(candidates[0]):
                seen = f"published {value.value:.4g}, untouched {candidates[0]:.4g}"
                why = named_reason(check.passes_null, value.name)
                controls.append(Control("null", value.full_name, seen, why))
        return controls


def passing_claims(
    name: str, replication: Replication, database: RunDatabase
) -> Iterator[tuple[str, float | None, str, str]]:
    """Words and value of each claim that holds on the runs shown, and why it may hold for random
    weights and for interventions that do nothing; empty if it must not.
    """
    for claim in replication.claim:
        # These runs may lack what the SQL reads.
        with contextlib.suppress(RunError, QueryError):
            for words, value, holds in claim_rows(name, claim, database):
                if holds:
                    reasons = [
                        named_reason(each, words) or named_reason(each, claim.words)
                        for each in (claim.passes_random, claim.passes_null)
                    ]
                    yield words, value, reasons[0], reasons[1]


def has_interventions(replication: Replication) -> bool:
    """Whether any scan of a replication intervenes."""
    fields = [replication.defaults, replication.bundled, *replication.scan.values()]
    return any({*entry.get("interventions", [])} - {"none"} for entry in fields)


# Claims of interventions, on the miniature, where they hold


def measured_miniature(
    replication: Replication, directory: str, models: KnownModels
) -> tuple[RunDatabase, ModelInfo, RunsShown]:
    """The runs of a replication on its miniature, what that is, and what shows them as if
    interventions did nothing.
    """
    model = replication.bundled_model
    plans = measured_plans(replication, model, models, directory)
    other = with_untouched(replication)
    is_other = other != replication
    untouched = measured_plans(other, model, models, directory) if is_other else plans
    database = open_replication_runs(replication, directory)
    if is_other:
        # A user's directory does not have the others.
        runs_shown(plans).show(database)
    return database, plans[0].info, runs_shown(plans, untouched)


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
    if not has_interventions(replication):
        return []
    with_interventions = {each.name: each.measured for each in results if each.verdict == "pass"}
    null.show(database)
    controls: list[Control] = []
    for words, value, _, why in passing_claims(name, replication, database):
        # The same words and the same number: it depends on no intervention.
        if words in with_interventions and _is_same(value, with_interventions[words]):
            continue
        controls.append(Control("null", words, f"holds ({value})", why))
    return controls


# Scatter


def passing_share(value: PublishedValue) -> float:
    """The share of right models that a figure passes, if published and measured values scatter."""
    if not value.standard_error:
        return 1.0
    generator = np.random.default_rng(0)
    # Both the published and the measured value scatter about the true one.
    draws = generator.standard_normal((2, DRAWS)) * value.standard_error + value.value
    published, measured = draws
    with np.errstate(invalid="ignore"):
        # The logarithm of what is not above 0 is NaN, and near nothing.
        distances = {
            "absolute": measured - published,
            "relative": measured / published - 1,
            "log10": np.log10(measured) - np.log10(published),
        }
    return float((np.abs(distances[value.scale]) <= value.tolerance).mean())


def scatter_problems(replication: Replication) -> list[Control]:
    """Figures that a right model fails in more than one of a hundred cases."""
    controls: list[Control] = []
    for value in replication.published_values:
        share = passing_share(value)
        # The draws themselves scatter by 0.0007.
        if share < LEAST_PASSING - 0.002:
            seen = f"a right model passes in {share:.1%} of cases"
            controls.append(Control("scatter", value.full_name, seen))
    return controls


def main(names: Sequence[str]) -> int:
    """Print which figures and claims pass that must not; returns the exit code."""
    prepare_process()
    wrong_count = 0
    with tempfile.TemporaryDirectory() as home:
        models = KnownModels()
        for name, replication in (find_replications(names) or replications()).items():
            found = scatter_problems(replication)
            try:
                found += ReplicationControls(name, replication, Path(home), models).measure()
                if replication.claim:
                    runs = f"{home}/miniature-{name}"
                    database, info, null = measured_miniature(replication, runs, models)
                    results = judge(name, replication, info, replication.bundled_model, database)
                    found += null_claims(name, replication, database, results, null)
            except HeadcountError as error:
                found.append(Control("none", name, str(error)))
            wrong = [each for each in found if not each.reason]
            reasons = len(found) - len(wrong)
            print(f"{name}: {len(wrong)} pass that must not, {reasons} with a reason", flush=True)
            for each in wrong:
                print(f"  {each.control}: {each.name}: {each.seen}")
            wrong_count += len(wrong)
    return 1 if wrong_count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
