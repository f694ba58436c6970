"""What a format reads: one run, through the views of `queries`."""

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.exports.shared.certainty import (
    LARGEST_Q,
    MARGIN,
    Choice,
    DocumentSums,
    Scores,
    half_of,
    stability_of,
    sure_heads,
)
from headcount.exports.shared.registry import ExportFormat, Needs, Options, Setting, ranked
from headcount.queries.answers.loss_effects import NOT_CALIBRATED, effects_among
from headcount.queries.ask.asking import Record, RunDatabase
from headcount.queries.open.column_facts import column_facts
from headcount.queries.open.run import Run
from headcount.queries.open.sql_text import quoted_name, text_literal
from headcount.schemas.errors import QueryError, ScanError, counted, unknown
from headcount.schemas.places import Place
from headcount.schemas.significance import p_above, q_of
from headcount.schemas.statistics import STATISTICS
from headcount.schemas.tables import uniform_column
from headcount.schemas.values import in_toml

UNFINISHED = "unfinished"
"""What a file says of itself under this name as long as its list is not confirmed."""

CALIBRATION = "calibration of its effects"
OPENING, CHECK = "what the model recalls with some heads open", "its check"
"""What confirms a list: interventions whose effects it estimates, heads that are opened in rounds,
and a cut cache.
"""

MOST_PARTS = 1024
"""Groups of documents at most, so that memory does not grow with a run. Groups are independent, as
documents are.
"""

SAME_IN_BASELINE = ("n_ctx", "bos", "weight_processing")
"""Fields of a scan in which a run and its baseline agree, so that only their inputs differ."""


@dataclass(frozen=True)
class ExportSource:
    """One run, and the options with which a format is made of it."""

    database: RunDatabase
    run: Mapping[str, Any]  # the run's row in the view `runs`
    format: ExportFormat
    options: Options
    destination: Place  # where the file or folder will be, for formats that depend on its name
    baseline: "ExportSource | None" = None  # the second run, if `Needs.baseline` asks for one
    split: tuple[int, int] | None = None  # half of which split `sums` are over; None: all
    known_sums: dict[str, DocumentSums] = field(default_factory=dict, repr=False)
    """What was read already: halves are parts of it."""
    awaits: str | None = None
    """What confirms the list and is not measured yet: the file is written before, and says so."""
    opening: Mapping[str, Any] | None = None
    """What the model recalls with some KV heads open, if a format wants that and it is measured."""
    check: Mapping[str, Any] | None = None  # what `--check` has found out, if anything

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self.run["run_id"]

    @property
    def model_name(self) -> str:
        """The model, without the place where it lies on somebody's disk."""
        manifest = self.opened.manifest
        return manifest.model["name"] if "model" in manifest.places else self.run["model"]

    @property
    def opened(self) -> Run:
        """The run's manifest and files, for formats that refer to them."""
        runs = self.database.runs
        return next(run for run in runs if run.directory.run_id == self.run_id)

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

    @property
    def setting(self) -> Setting:
        """The same as it is known of a run that is only planned."""
        manifest, run = self.opened.manifest, self.run
        layers = manifest.model.get("attention_layers") or range(run["n_layers"])
        scan = manifest.identity["scan"]

        def name_of(field: str) -> str | None:
            name = scan.get(field)
            if field not in manifest.places:
                return name
            # A relative name is meant from where the run was begun, if that is there.
            begun_in = manifest.begun_in if os.path.isdir(manifest.begun_in) else ""
            return os.path.join(begun_in, os.path.expanduser(name))

        return Setting(
            model=name_of("model") or run["model"],
            revision=scan.get("revision"),
            tokenizer=name_of("tokenizer"),
            adapter=scan.get("adapter", "refuse"),
            n_ctx=run["n_ctx"],
            bos=run["bos"],
            input_options=self.input_options,
            sequences=run["sequences_done"],
            n_layers=run["n_layers"],
            n_heads=run["n_heads"],
            n_kv_heads=run["n_kv_heads"],
            attention_layers=tuple(layers),
            directory=self.opened.directory.path,
            runs=self.opened.directory.path.parent,
            destination=self.destination,
        )

    @property
    def condition(self) -> str:
        """The condition of rows of this run without an intervention, in SQL."""
        return f"run_id = {text_literal(self.run_id)} AND intervention = 'none'"

    def half(self, split: int, half: int) -> "ExportSource":
        """The same with half of the documents, and with half of the baseline's."""
        baseline = self.baseline and self.baseline.half(split, half)
        return replace(self, split=(split, half), baseline=baseline)

    def sums(self, expression: str, least_documents: int = 2) -> DocumentSums:
        """What an expression of columns of `heads` and `sequences` adds up to in each document.

        NULL counts as 0: it is attention to keys that a window hides. It is an error if there are
        too few documents to say how sure a list is.
        """
        if expression not in self.known_sums:
            self.known_sums[expression] = self._read_sums(expression)
        sums = self.known_sums[expression]
        if sums.documents < least_documents:
            raise QueryError(
                f"export {self.format.name}: the {counted(self.run['sequences_done'], 'sequence')} "
                f"of run {self.run_id} are of one document; expected {least_documents} or more, to "
                "say how sure a list is"
            )
        if self.split is None:
            return sums
        return sums.of(half_of(sums.documents, *self.split))

    def _read_sums(self, expression: str) -> DocumentSums:
        rows = self.database.table(
            f"""
            WITH parts AS (
                -- A sequence without a document is one of its own.
                SELECT
                    sequence,
                    (dense_rank() OVER (ORDER BY document, if(document IS NULL, sequence, NULL))
                        - 1) % {MOST_PARTS} AS part
                FROM internal.documents
                WHERE {self.condition}
            )
            SELECT
                part, layer, head,
                sum(coalesce({expression}, 0)::DOUBLE) AS total, count(*) AS number
            FROM heads
            JOIN sequences USING (run_id, intervention, sequence)
            JOIN parts USING (sequence)
            WHERE {self.condition}
            GROUP BY ALL
            """
        )
        part, layer, head, total, number = (column.to_numpy() for column in rows.columns)
        documents = int(part.max()) + 1
        totals = np.full((documents, *self.shape), np.nan)
        totals[part, layer, head] = total
        numbers = np.zeros(documents)
        # All heads have the same sequences.
        numbers[part] = number
        return DocumentSums(totals, numbers)

    def scores(self, *statistics: str, margin: float = MARGIN, least_documents: int = 2) -> Scores:
        """The sum of some statistics of every head, against what uniform attention would score and
        a margin.
        """
        columns = [column_of(statistic) for statistic in statistics]
        stored = self.database.columns("sequences")
        uniform = [name for name in map(uniform_column, columns) if name in stored]
        total = " + ".join(f"coalesce({column}, 0)" for column in columns)
        less_uniform = " - ".join([total, *(f"coalesce({name}, 0)" for name in uniform)])
        excess = self.sums(less_uniform, least_documents)
        p = p_above(excess.means, excess.errors, excess.degrees_of_freedom, margin)
        means = self.sums(total, least_documents).means
        return Scores(means, excess.means, excess.errors, excess.degrees_of_freedom, p)

    @property
    def documents(self) -> int:
        """The documents that the run is of. A sequence without one is one of its own."""
        ((documents,),) = self.database.rows(
            f"""
            SELECT count(DISTINCT (document, if(document IS NULL, sequence, NULL)))
            FROM internal.documents
            WHERE {self.condition}"""
        )
        return documents

    def check_differs_from_uniform(self, statistic: str) -> None:
        """It is an error if no head is surely above or below what uniform attention would score, by
        more than MARGIN. Of one document, the size alone decides.
        """
        scores = self.scores(statistic, least_documents=1)
        size = np.abs(scores.excess)
        q = q_of(p_above(size, scores.errors, scores.degrees_of_freedom, MARGIN))
        if not ((q <= LARGEST_Q) | (np.isnan(scores.errors) & (size > MARGIN))).any():
            raise self.nothing_found(statistic)

    def effects(self, statistic: str) -> DocumentSums:
        """What an intervention on each head does to the loss, as a run with effects estimates it.

        It is an error if no measured intervention says how far that can be trusted.
        """
        column = column_of(statistic)
        known = column in self.known_sums or CALIBRATION in (self.awaits or "")
        if not known and self.calibration([column])[column] == NOT_CALIBRATED:
            raise QueryError(
                f"export {self.format.name}: {column} of run {self.run_id} is an estimate to first "
                f"order that was not calibrated; run headcount calibrate {self.run_id} first"
            )
        return self.sums(column)

    def surely_harmful(self, statistic: str) -> dict[tuple[int, int], float]:
        """The heads whose intervention surely raises the loss, the largest effect first, with q."""
        effects = self.effects(statistic)
        means = effects.means
        return sure_heads(
            ranked(means), q_of(p_above(means, effects.errors, effects.degrees_of_freedom, 0))
        )

    def choice(self, choose: "Callable[[ExportSource], Mapping[tuple[int, int], float]]") -> Choice:
        """What `choose` takes from the run, and how much of it each half of the documents takes."""
        items = choose(self)
        # All sums are over the same documents.
        documents = next(iter(self.known_sums.values())).documents
        stability = stability_of(lambda split, half: choose(self.half(split, half)), documents)
        return Choice(items, stability)

    def nothing_found(self, *statistics: str) -> QueryError:
        """That no head surely differs from uniform attention in any of some statistics."""
        farthest: list[str] = []
        for statistic in statistics:
            scores = self.scores(statistic)
            layer, head = at = np.unravel_index(
                np.nanargmax(np.abs(scores.excess)), scores.excess.shape
            )
            difference = f"{scores.excess[at]:+.3f} ± {scores.errors[at]:.3f}"
            farthest.append(f"L{layer}H{head} by {statistic} ({difference})")
        return QueryError(
            f"export {self.format.name}: no head of run {self.run_id} differs from uniform "
            f"attention by more than {MARGIN} with q <= {LARGEST_Q}, so a list would be chance; "
            f"the farthest is {', '.join(farthest)}; expected a model that has learned this, or "
            "more documents"
        )

    def by_head(
        self, statistic: str, aggregate: str, view: str = "head_summaries"
    ) -> dict[tuple[int, int], Any]:
        """What an aggregate in SQL makes of a statistic's rows in a view, by layer and head.

        `statistic` is written as in a scan. The view `heads` has a row for each sequence: there the
        statistic is `value`, which is 0 where a window hides all keys that it is about. A layer
        that does not attend has no rows.
        """
        column = column_of(statistic)
        rows = f"(FROM {view} WHERE statistic = {text_literal(column)})"
        if view == "heads":
            rows = f"(SELECT *, coalesce({quoted_name(column)}, 0) AS value FROM heads)"
        found = self.database.rows(
            f"SELECT layer, head, {aggregate} FROM {rows} WHERE {self.condition} GROUP BY ALL"
        )
        return {(layer, head): value for layer, head, value in found}

    def matrix(self, statistic: str, aggregate: str, view: str = "head_summaries") -> np.ndarray:
        """A number for every query head, `[layer head]`; `by_head` has the arguments.

        A layer that does not attend is NaN. In the others every head must have a number.
        """
        numbers = self.by_head(statistic, aggregate, view)
        undefined = [head for head, number in numbers.items() if number is None]
        if undefined or not numbers:
            where = " of layer {}, head {}".format(*undefined[0]) if undefined else ""
            raise QueryError(
                f"run {self.run_id}: {column_of(statistic)}{where} has no value in any of its "
                f"{counted(self.run['sequences_done'], 'sequence')} of {self.run['n_ctx']} tokens; "
                "expected sequences in which it is defined (FROM statistics says where)"
            )
        matrix = np.full(self.shape, np.nan)
        for head, number in numbers.items():
            matrix[head] = number
        return matrix

    def stored_schema(self, table: str) -> pa.Schema:
        """The stored columns of a table, with what each means as `doc` in its metadata."""
        facts = column_facts(self.database, f"FROM {table}")
        # `label` is none of them: the view makes it.
        stored = self.database.table(f"SELECT * FROM internal.{quoted_name(table)} LIMIT 0").schema
        return pa.schema(
            field.with_metadata({"doc": facts.get(field.name, {}).get("description", "")})
            for field in stored
        )

    @property
    def input_options(self) -> dict[str, Any]:
        """The options of the run's input family that the scan gave."""
        return json.loads(self.run["input_options"] or "{}")

    @property
    def _input_facts(self) -> dict[str, object]:
        family = {"family": self.run["input_family"], **self.input_options}
        names = ("n_ctx", "sequences_done", "tokens")
        return {"input": family, **{name: self.run[name] for name in names}}

    def calibration(self, statistics: Sequence[str]) -> dict[str, str | list[Record]]:
        """How far each effect among some statistics can be trusted: how it agrees with measured
        interventions, over all layers (`layer` is None) and in each, or that nothing was measured.
        """
        names = effects_among(statistics)
        if not names:
            return {}
        compared = self.database.records(
            "SELECT statistic, layer, heads, sequences, spearman, slope FROM effect_calibration "
            f"WHERE run_id = {text_literal(self.run_id)}"
        )
        by_effect: dict[str, str | list[Record]] = {}
        for name in names:
            rows = [row for row in compared if row["statistic"] == name]
            by_effect[name] = [
                {key: value for key, value in row.items() if key != "statistic"} for row in rows
            ] or NOT_CALIBRATED
        return by_effect

    @property
    def provenance(self) -> dict[str, object]:
        """Where the file comes from: run, model, code, input and options, ready for JSON."""
        names = ("run_id", "model_fingerprint", "weight_processing", "precision", "code")
        facts: dict[str, object] = {"format": self.format.name, "made_by": "headcount"}
        facts["model"] = self.model_name
        facts |= {name: self.run[name] for name in names}
        facts |= self._input_facts
        statistics = list(map(column_of, self.format.needs(self.options).statistics))
        facts["statistics"] = statistics
        if calibration := self.calibration(statistics):
            facts["calibration"] = calibration
        if self.baseline is not None:
            run = self.baseline.run
            facts["baseline"] = {"run_id": run["run_id"], "code": run["code"]}
            facts["baseline"] |= self.baseline._input_facts
        facts["options"] = dict(self.options)
        if self.opening is not None:
            facts["opening"] = dict(self.opening)
        if self.check is not None:
            facts["check"] = dict(self.check)
        if self.awaits is not None:
            facts[UNFINISHED] = f"{self.awaits}; the same command goes on with it"
        return facts

    @property
    def provenance_line(self) -> str:
        """The same as one line of JSON, for a comment."""
        return json.dumps(self.provenance, ensure_ascii=False)

    def json_file(
        self,
        content: Mapping[str, object],
        indent: int | None = None,
        choice: Choice | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> bytes:
        """A file of one JSON object, which also says where it is from and how sure a choice is.

        `facts` are more of that.
        """
        said = self.provenance | (choice.facts if choice else {}) | dict(facts or {})
        content = {**content, "headcount": said}
        return f"{json.dumps(content, indent=indent, ensure_ascii=False)}\n".encode()

    def safetensors_file(self, tensors: Mapping[str, np.ndarray]) -> bytes:
        """A safetensors file, whose header says where it comes from."""
        from safetensors.numpy import save

        # Readers of weights look for this format in the header: the layout of torch's tensors.
        metadata = {"format": "pt", "headcount": self.provenance_line}
        arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        return save(arrays, metadata)


def column_of(statistic: str) -> str:
    """The column of a statistic that a scan names.

    >>> column_of("distant_mass(4, 64)"), column_of("entropy")
    ('distant_mass_4_64', 'entropy')
    """
    try:
        return STATISTICS.find(statistic).name
    except ScanError:
        # A plug-in's, which is not here: runs have its columns.
        if not statistic.isidentifier():
            raise
        return statistic


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

    def runs_of(opened: RunDatabase) -> list[ExportSource]:
        records = opened.records("FROM runs ORDER BY run_id")
        return [ExportSource(opened, run, export, options, destination) for run in records]

    runs = runs_of(database)
    known = [run.run_id for run in runs]
    for run_id in run_ids:
        if run_id not in known:
            raise QueryError(unknown("run", run_id, known))
    named_runs = [run for run in runs if not run_ids or run.run_id in run_ids]
    models: dict[str, str] = {}
    for source in named_runs:
        run = source.run
        models.setdefault(run["model_fingerprint"], f"{run['run_id']} ({run['model']})")
    if len(models) > 1:
        raise QueryError(
            f"the runs are of {len(models)} models; expected one, named with --run: "
            f"{', '.join(models.values())}"
        )
    # To keep as many first keys as the longest sequences have would leave none.
    most, sink = max(source.run["n_ctx"] for source in named_runs), options.get("sink", 0)
    if sink >= most:
        raise QueryError(
            f"export {export.name}: --sink {sink}: expected fewer than the {most:,} tokens of a "
            "sequence of these runs"
        )
    needs = export.needs(options)
    chosen = _only_fitting(named_runs, needs)
    if needs.baseline is None:
        return chosen
    others = runs_of(baseline_database or database)
    # A user who named one run has not said which baseline it has.
    if len(run_ids) > 1:
        others = [run for run in others if run.run_id in run_ids]
    return replace(chosen, baseline=_only_fitting(others, needs.baseline, chosen))


def _only_fitting(
    runs: Sequence[ExportSource], needs: Needs, compared: ExportSource | None = None
) -> ExportSource:
    """The only run that measured what is needed; if it is to be the baseline of `compared`, the
    only one of them that differs from it in its input alone.
    """
    problems = [problem_of(run, needs, compared) for run in runs]
    fitting = [run for run, problem in zip(runs, problems, strict=True) if problem is None]
    if len(fitting) == 1:
        return fitting[0]
    first = compared or runs[0]
    subject = f"export {first.format.name}"
    if fitting:
        names = ", ".join(run.run_id for run in fitting)
        use, flag = "exported", "--run"
        if compared is not None:
            use, flag = f"the baseline of run {compared.run_id}", "a second --run"
        raise QueryError(
            f"{subject}: {counted(len(fitting), 'run')} could be {use}; expected one, named with "
            f"{flag}: {names}"
        )
    fields = needs.scan_fields(first.run["model"], first.opened.manifest.model.get("n_ctx"))
    if compared is not None:
        subject += f": run {compared.run_id} has no baseline"
        fields |= {name: compared.run[name] for name in SAME_IN_BASELINE}
        # Options that have no value, or that are off, need no line.
        tokens = {name: value for name, value in _options_beside_period(compared).items() if value}
        fields["input"] = {**fields["input"], **tokens}
    scan = "".join(f"\n    {name} = {in_toml(value)}" for name, value in fields.items())
    advice = f"this scan would do, and --model MODEL runs it:{scan}"
    if needs.calibrated:
        advice = (
            "this scan would do, then headcount calibrate of its run; --model MODEL runs both:"
            f"{scan}"
        )
    # A run that only has to be finished needs no other scan.
    unfinished = [
        str(run.opened.directory.path)
        for run, problem in zip(runs, problems, strict=True)
        if problem is not None and problem.startswith("is not complete")
    ]
    if unfinished:
        advice = f"headcount resume {' or '.join(unfinished)} goes on with it"
        if needs.calibrated:
            advice += ", then headcount calibrate of it"
    reasons = "; ".join(
        f"run {run.run_id} {problem}" for run, problem in zip(runs, problems, strict=True)
    )
    raise QueryError(f"{subject}: {reasons}; {advice}")


def problem_of(
    source: ExportSource, needs: Needs, compared: ExportSource | None = None
) -> str | None:
    """Why a format cannot be made of a run, or compare a run with it. None if it can."""
    run = source.run
    profiles = source.opened.manifest.kinds.get("profiles", {})
    columns = map(column_of, needs.statistics)
    missing = [column for column in columns if column not in run["statistics"]]
    missing += [f"the profile {name}" for name in needs.profiles if name not in profiles]
    missing += [] if "none" in run["interventions"] else ["the intervention none"]
    if missing:
        return f"did not measure {', '.join(missing)}"
    if run["measured_heads"] != "all" and needs.every_head:
        return f"measured {run['measured_heads']} only, expected every head"
    if needs.families and run["input_family"] not in needs.families:
        return f"is over {run['input_family']}, expected {' or '.join(needs.families)}"
    if compared is not None:
        for fact in ("model_fingerprint", *SAME_IN_BASELINE):
            if run[fact] != compared.run[fact]:
                return f"has {fact} {run[fact]}, expected {compared.run[fact]}"
        if _options_beside_period(source) != _options_beside_period(compared):
            return "draws from other tokens"
    # Last: to finish a run that lacks something else would be in vain.
    if not run["complete"]:
        return f"is not complete: {run['shards_done']:,} of {run['shards']:,} shards are in"
    return None


def _options_beside_period(source: ExportSource) -> dict[str, Any]:
    """Which tokens an input draws from. `period` says how they repeat: in a baseline, none do."""
    return {name: value for name, value in source.input_options.items() if name != "period"}
