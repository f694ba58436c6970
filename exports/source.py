"""What a format reads: one run, through the views of `queries`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.exports.registry import ExportFormat, Needs, Options
from headcount.queries.ask.asking import RunDatabase
from headcount.queries.open.connection import OPENED
from headcount.queries.open.run import Run
from headcount.queries.sql_text import text_literal
from headcount.schemas.errors import QueryError, counted, unknown
from headcount.schemas.files.places import Place
from headcount.schemas.statistics import STATISTICS

RUN_FACTS = """
    SELECT run_id, model, model_fingerprint, tokenizer, weight_processing, precision, n_ctx, bos,
        input_family, input_options, interventions, statistics, measured_heads, seed, n_layers,
        n_heads, n_kv_heads, d_model, d_head, shards, shards_done, complete, sequences,
        sequences_done, tokens, code
    FROM runs ORDER BY run_id
"""


MEAN_OR_NOTHING = "coalesce(mean, 0)"
"""The mean of a share of attention, 0 where a window hides all keys that it is about."""


@dataclass(frozen=True)
class ExportSource:
    """One run, and the options with which a format is made of it."""

    database: RunDatabase
    run: Mapping[str, Any]
    """The run's row in the view `runs`."""
    format: ExportFormat
    options: Options
    destination: Place
    """Where the file or folder will be, for formats that depend on its name."""
    baseline: ExportSource | None = None
    """The second run, if the format needs one (`Needs.baseline`)."""

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self.run["run_id"]

    @property
    def model_name(self) -> str:
        """The model, without the place where it lies on somebody's disk."""
        model = self.run["model"]
        return Path(model).name if Path(model).is_absolute() else model

    @property
    def directory(self) -> Place:
        """Where the run lies."""
        return opened_run(self.database, self.run_id).directory.path

    def committed_files(self, table: str) -> list[str]:
        """Full paths of the files of a table that count, for formats that refer to them."""
        return opened_run(self.database, self.run_id).files(table)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers, and query heads in a layer."""
        return self.run["n_layers"], self.run["n_heads"]

    @property
    def kv_shape(self) -> tuple[int, int]:
        """Layers, and KV heads in a layer."""
        n_kv_heads = self.run["n_kv_heads"]
        if n_kv_heads is None:
            raise QueryError(
                f"run {self.run_id}: has no record of its KV heads; scan again with --model"
            )
        return self.run["n_layers"], n_kv_heads

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.run["n_heads"] // self.kv_shape[1]

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of an answer."""
        return self.database.rows(sql)

    def table(self, sql: str) -> pa.Table:
        """The rows of an answer as an Arrow table."""
        return self.database.table(sql)

    def of_this_run(self, intervention: str = "none") -> str:
        """The condition of rows of this run, in SQL."""
        return (
            f"run_id = {text_literal(self.run_id)} AND intervention = {text_literal(intervention)}"
        )

    def by_head(
        self, statistic: str, value: str = "mean", intervention: str = "none"
    ) -> np.ndarray:
        """A statistic of every query head, `[layer head]`: a column of `head_summaries`, or
        `MEAN_OR_NOTHING`.

        `statistic` is written as in a scan. A layer that does not attend is NaN.
        """
        columns = f"layer, head, {value} FROM head_summaries"
        return self._matrix(statistic, columns, self.shape, intervention)

    def by_kv_head(
        self, statistic: str, value: str = "highest", intervention: str = "none"
    ) -> np.ndarray:
        """A statistic of every KV head, `[layer kv_head]`: a column of the view `kv_heads`."""
        columns = f"layer, kv_head, {value} FROM kv_heads"
        return self._matrix(statistic, columns, self.kv_shape, intervention)

    def _matrix(
        self, statistic: str, columns: str, shape: tuple[int, int], intervention: str
    ) -> np.ndarray:
        """Values by layer and head. It is an error if one is missing in a layer that attends."""
        rows = self.rows(
            f"SELECT {columns} WHERE {self.of_this_run(intervention)} AND "
            f"statistic = {text_literal(column_of(statistic))}"
        )
        matrix = np.full(shape, np.nan)
        for layer, head, value in rows:
            matrix[layer, head] = np.nan if value is None else value
        # A layer that does not attend has no rows. In the others every head must have a value.
        attends = np.isin(np.arange(shape[0]), [layer for layer, _, _ in rows])
        undefined = np.argwhere(np.isnan(matrix) & attends[:, None])
        if not len(rows) or len(undefined):
            where = f" of layer {undefined[0][0]}, head {undefined[0][1]}" if len(rows) else ""
            raise QueryError(
                f"run {self.run_id}: {column_of(statistic)}{where} has no value in any of its "
                f"{counted(self.run['sequences_done'], 'sequence')} of {self.run['n_ctx']} tokens; "
                "expected sequences in which it is defined (FROM statistics says where)"
            )
        return matrix

    @property
    def provenance(self) -> dict[str, object]:
        """Where the file comes from: run, model, code, input and options, ready for JSON."""
        names = ("run_id", "model_fingerprint", "weight_processing", "precision", "code")
        facts: dict[str, object] = {"format": self.format.name, "made_by": "headcount"}
        facts["model"] = self.model_name
        facts |= {name: self.run[name] for name in names}
        facts |= self._input_facts
        facts["statistics"] = list(map(column_of, self.format.needs(self.options).statistics))
        if self.baseline is not None:
            run = self.baseline.run
            facts["baseline"] = {"run_id": run["run_id"], "code": run["code"]}
            facts["baseline"] |= self.baseline._input_facts
        facts["options"] = dict(self.options)
        return facts

    @property
    def input_options(self) -> dict[str, Any]:
        """The options of the run's input family that the scan gave."""
        return json.loads(self.run["input_options"] or "{}")

    @property
    def _input_facts(self) -> dict[str, object]:
        """What the run was measured on."""
        facts: dict[str, object] = {
            "input": {"family": self.run["input_family"], **self.input_options}
        }
        return facts | {name: self.run[name] for name in ("n_ctx", "sequences_done", "tokens")}

    @property
    def provenance_line(self) -> str:
        """The same as one line of JSON, for a comment."""
        return json.dumps(self.provenance, ensure_ascii=False)


def opened_run(database: RunDatabase, run_id: str) -> Run:
    """A run as queries see it."""
    opened = OPENED[database.connection]
    return next(run for run in opened.runs if run.directory.run_id == run_id)


def column_of(statistic: str) -> str:
    """The column of a statistic that a scan names.

    >>> column_of("distant_mass(4, 64)"), column_of("entropy")
    ('distant_mass_4_64', 'entropy')
    """
    return STATISTICS.find(statistic).name


def choose_run(
    database: RunDatabase,
    export: ExportFormat,
    options: Options,
    destination: Place,
    run_ids: Collection[str] = (),
    baseline_database: RunDatabase | None = None,
) -> ExportSource:
    """The run that a format is made of, with its baseline if it needs one.

    It is an error if no run will do, or several would. `run_ids` are those that the user named. The
    baseline is looked for in `baseline_database`, by default among the same runs.
    """
    needs = export.needs(options)
    runs = database.records(RUN_FACTS)
    known = [run["run_id"] for run in runs]
    for run_id in run_ids:
        if run_id not in known:
            raise QueryError(unknown("run", run_id, known))
    named_runs = [run for run in runs if not run_ids or run["run_id"] in run_ids]
    models: dict[str, str] = {}
    for run in named_runs:
        models.setdefault(run["model_fingerprint"], f"{run['run_id']} ({run['model']})")
    if len(models) > 1:
        raise QueryError(
            f"the runs are of {len(models)} models; expected one, named with --run: "
            f"{', '.join(models.values())}"
        )
    # To keep as many first keys as the longest sequences have would leave none.
    most, sink = max(run["n_ctx"] for run in named_runs), options.get("sink", 0)
    if sink >= most:
        raise QueryError(
            f"export {export.name}: --sink {sink}: expected fewer than the {most:,} tokens of a "
            "sequence of these runs"
        )
    run = _fitting_run(database, export, named_runs, needs)
    source = ExportSource(database, run, export, options, destination)
    if needs.baseline is None:
        return source
    baseline = _baseline_of(source, needs.baseline, baseline_database or database, run_ids)
    return replace(source, baseline=baseline)


def _fitting_run(
    database: RunDatabase,
    export: ExportFormat,
    runs: Sequence[Mapping[str, Any]],
    needs: Needs,
) -> Mapping[str, Any]:
    """The only run that has measured what is needed."""
    profiles: defaultdict[str, set[str]] = defaultdict(set)
    # `runs` says nothing of profiles, and asking for them reads their files.
    if needs.profiles:
        for run_id, profile in database.rows("SELECT DISTINCT run_id, profile FROM profiles"):
            profiles[run_id].add(profile)
    problems = {run["run_id"]: _problem_of(run, needs, profiles[run["run_id"]]) for run in runs}
    fitting = [run for run in runs if problems[run["run_id"]] is None]
    if not fitting:
        positions = opened_run(database, runs[0]["run_id"]).manifest.model.get("n_ctx")
        reasons = "; ".join(f"run {run_id} {problem}" for run_id, problem in problems.items())
        advice = _advised(needs.scan_fields(runs[0]["model"], positions))
        # A run that only has to be finished needs no other scan.
        if all(problem and "is not complete" in problem for problem in problems.values()):
            advice = "headcount resume goes on with it"
        raise QueryError(f"export {export.name}: {reasons}; {advice}")
    if len(fitting) > 1:
        names = ", ".join(run["run_id"] for run in fitting)
        raise QueryError(
            f"export {export.name}: {counted(len(fitting), 'run')} could be exported; expected "
            f"one, named with --run: {names}"
        )
    return fitting[0]


SAME_IN_BASELINE = ("n_ctx", "bos", "weight_processing")
"""Fields of a scan in which a run and its baseline agree, so that only their inputs differ."""


def _baseline_of(
    source: ExportSource, needs: Needs, database: RunDatabase, run_ids: Collection[str]
) -> ExportSource:
    """The run that a run is compared with: the only one that differs from it in its input alone."""
    export = source.format
    candidates = [
        ExportSource(database, run, export, source.options, source.destination)
        for run in database.records(RUN_FACTS)
        # A user who named one run has not said which baseline it has.
        if len(run_ids) < 2 or run["run_id"] in run_ids
    ]
    fitting = [run for run in candidates if _is_baseline(run, source, needs)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = ", ".join(run.run_id for run in fitting)
        raise QueryError(
            f"export {export.name}: run {source.run_id} could be compared with "
            f"{counted(len(fitting), 'run')}; expected one, named with a second --run: {names}"
        )
    fields = needs.scan_fields(source.run["model"])
    fields |= {name: source.run[name] for name in SAME_IN_BASELINE}
    # Options that have no value, or that are off, need no line.
    tokens = {name: value for name, value in _options_beside_period(source).items() if value}
    fields["input"] = {**needs.input, **tokens}
    families = " or ".join(needs.families)
    raise QueryError(
        f"export {export.name}: run {source.run_id} has no finished run beside it that measured "
        f"{', '.join(map(column_of, needs.statistics))} of the same model over {families}; "
        f"{_advised(fields)}"
    )


def _is_baseline(candidate: ExportSource, source: ExportSource, needs: Needs) -> bool:
    """Whether a run measured what is needed, and differs from another only in its input."""
    same = ("model_fingerprint", *SAME_IN_BASELINE)
    return (
        # No format needs profiles of its baseline.
        _problem_of(candidate.run, needs, profiles=()) is None
        and all(candidate.run[fact] == source.run[fact] for fact in same)
        and _options_beside_period(candidate) == _options_beside_period(source)
    )


def _options_beside_period(source: ExportSource) -> dict[str, Any]:
    """Which tokens an input draws from. `period` says how they repeat: in a baseline, none do."""
    return {name: value for name, value in source.input_options.items() if name != "period"}


def _problem_of(run: Mapping[str, Any], needs: Needs, profiles: Collection[str]) -> str | None:
    """Why a format cannot be made of a run. None if it can."""
    if not run["complete"]:
        done, shards = run["shards_done"], run["shards"]
        return f"is not complete: {done:,} of {shards:,} shards are in"
    columns = [column_of(statistic) for statistic in needs.statistics]
    missing = [column for column in columns if column not in run["statistics"]]
    if missing:
        return f"did not measure {', '.join(missing)}"
    missing = [profile for profile in needs.profiles if profile not in profiles]
    if missing:
        return f"did not measure the profile {', '.join(missing)}"
    missing = [name for name in needs.interventions if name not in run["interventions"]]
    if missing:
        return f"did not measure the intervention {', '.join(missing)}"
    if run["measured_heads"] != "all" and needs.every_head:
        return f"measured {run['measured_heads']} only, expected every head"
    if needs.families and run["input_family"] not in needs.families:
        return f"is over {run['input_family']}, expected {' or '.join(needs.families)}"
    return None


def _advised(fields: Mapping[str, object]) -> str:
    """The advice to run a scan, with its fields below."""
    scan = "".join(f"\n    {line}" for line in toml_lines(fields))
    return f"this scan would do, and --model MODEL runs it:{scan}"


def toml_lines(fields: Mapping[str, object]) -> list[str]:
    """Fields of a scan as lines of TOML.

    JSON writes texts, numbers, truth values and lists of them as TOML does.
    """
    tables = {name: value for name, value in fields.items() if isinstance(value, Mapping)}
    plain = {name: value for name, value in fields.items() if name not in tables}
    lines = [f"{name} = {json.dumps(value)}" for name, value in plain.items()]
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    return lines
