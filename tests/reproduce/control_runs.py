"""Short runs of a replication on random weights, and the views of interventions that do nothing.

The controls (`tests.reproduce.controls`) ask them. All runs of a replication lie in one directory
and are opened once; `RunsShown` says which of them its SQL sees.
"""

from __future__ import annotations

import contextlib
import json
import re
import string
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from headcount.jobs.plan.plan import Plan, prepare_run
from headcount.jobs.resources import Resources
from headcount.jobs.run.loop import run_to_end
from headcount.queries.ask.asking import RunDatabase
from headcount.queries.sql_text import text_literal
from headcount.reproduce.replication import Replication
from headcount.reproduce.replication_runs import plan_replication_in
from headcount.schemas.scans.kinds import TABLES
from headcount.workers.inputs.corpus.text_files import located
from headcount.workers.model.files.known_models import KnownModels
from headcount.workers.model.files.model_info import ModelInfo
from tests.toys.random_model import MOST_POSITIONS, miniature_steps, write_random_model

CHARACTERS = string.ascii_letters + string.digits + " .,"
"""Characters of a text that stands for another: 65, as many as the models of characters have."""

LEAST_VOCABULARY = 1024
"""Tokens that the vocabulary keeps if predictions of a large one would take too long."""

FEW_LAYERS, FEW_HEADS = 4, 8
"""Size of the model that shows which figures an intervention moves: any model shows it."""

HIDING_INTERVENTIONS = ("mask_", "keep_window")
"""Interventions that hide keys."""

HIDING_COST = 10
"""How many times as long as others they take: they build whole patterns."""

MOST_DRAWN = 8
"""Sequences of a scan that is a picture. Scans of more are for means, which SQL may read by any
part of their names.
"""

MOST_VOCABULARY = 50257
"""Tokens of the largest vocabulary that the controls write: GPT-2's."""

TOKEN_OPTIONS = ("token", "low", "high")
"""Options of inputs that are ids of tokens."""

WITHOUT_HEADS = 8
"""Heads of a model of which the source names no number of heads."""


@dataclass(frozen=True)
class Extent:
    """How much of a replication the controls measure. No figure needs precision to be wrong."""

    sequences: int
    """Most sequences of a scan."""
    least_sequences: int
    """Least sequences of a scan, if the replication has as many, however many tokens they have."""
    tokens: int
    """Tokens of a scan under one intervention, unless so few sequences have more."""
    logits: float
    """Predictions for losses times vocabulary, of a scan; beyond that the vocabulary is smaller."""
    layers: int
    """Most layers, and most heads of a layer, of a model of which no certain head is published."""
    small_vocabulary: bool
    """Whether ids of tokens that inputs name are moved into a small vocabulary."""
    entries: float
    """Entries of all patterns of a replication. Beyond that the model has fewer heads, and then
    fewer layers, if no certain head is published.
    """


FULL = Extent(
    sequences=6,
    least_sequences=2,
    tokens=1024,
    logits=2e9,
    layers=1000,
    small_vocabulary=False,
    entries=4e10,
)
"""What `make controls` measures."""

QUICK = Extent(
    sequences=6,
    least_sequences=1,
    tokens=256,
    logits=5e5,
    layers=12,
    small_vocabulary=True,
    entries=3e8,
)
"""What the tests measure, of every replication."""


@dataclass(frozen=True)
class ShortReplication:
    """A replication with few sequences, for a model of published layers and heads."""

    replication: Replication
    n_layers: int
    n_heads: int
    n_ctx: int
    d_vocab: int
    steps: tuple[int, ...]
    """Steps of its training after which the model has checkpoints."""
    notes: tuple[str, ...]
    """What is smaller than published and might matter, a line each."""

    @property
    def sizes(self) -> dict[str, int | str]:
        """The sizes of the model."""
        return {
            "n_layers": self.n_layers,
            "n_heads": self.n_heads,
            "n_ctx": self.n_ctx,
            "d_vocab": self.d_vocab,
        }


@dataclass(frozen=True)
class RunsShown:
    """Which runs the SQL of a replication sees, and which interventions of each."""

    interventions_by_run: tuple[tuple[str, tuple[str, ...]], ...]
    """Id of each run, and the interventions that its scan asks for."""
    is_null: bool = False
    """Whether each intervention has the rows of the untouched model."""

    def show(self, database: RunDatabase) -> None:
        """Let the tables of a database hold these runs alone.

        Their rows are copied into memory: every check reads them again, from many small files.
        """
        pairs = [
            (run, intervention)
            for run, interventions in self.interventions_by_run
            for intervention in interventions
        ]
        cells = ", ".join(
            f"({text_literal(run)}, {text_literal(intervention)})" for run, intervention in pairs
        )
        execute = database.connection.execute
        execute(
            "CREATE OR REPLACE TABLE internal.shown AS "
            f"SELECT * FROM (VALUES {cells}) AS t(run_id, shown_as)"
        )
        shown_runs = "run_id IN (SELECT run_id FROM internal.shown)"
        execute(
            f"CREATE OR REPLACE VIEW main.runs AS SELECT * FROM internal.runs WHERE {shown_runs}"
        )
        source = "'none'" if self.is_null else "shown.shown_as"
        columns = _columns(database)
        for name, table in TABLES.items():
            measured_columns = columns["internal", name]
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


def _columns(database: RunDatabase) -> Mapping[tuple[str, str], set[str]]:
    """Names of the columns of each table or view, by schema and name."""
    sql = "SELECT schema_name, table_name, column_name FROM duckdb_columns() WHERE NOT internal"
    columns: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for schema, name, column in database.connection.execute(sql).fetchall():
        columns[schema, name].add(column)
    return columns


class SameModel(KnownModels):
    """A model whose checkpoints all have its weights, so that one load is enough."""

    _description: ModelInfo | None = None

    def describe(self, model: str) -> ModelInfo:
        """What the model is, and each of its checkpoints."""
        if self._description is None:
            self._description = super().describe(model)
        return self._description


@dataclass(frozen=True)
class RandomModel:
    """A model with random weights, which all runs on it share."""

    path: str
    known: KnownModels


class ControlRuns:
    """Measures short runs; the same run of the same model is measured once."""

    def __init__(self, directory: Path, extent: Extent) -> None:
        self.directory = directory
        self.extent = extent
        self._models: dict[tuple[object, ...], RandomModel] = {}
        self._plans: dict[tuple[str, str, str, str], list[Plan]] = {}

    def model(self, short: ShortReplication, scale: float) -> RandomModel:
        """The model of a short replication, written and loaded once for all that have its sizes."""
        layout = short.replication.bundled_model
        key = (layout, *short.sizes.values(), short.steps, scale)
        if key not in self._models:
            directory = self.directory / f"model-{len(self._models)}"
            path = write_random_model(directory, layout, short.sizes, scale, short.steps)
            self._models[key] = RandomModel(str(path), SameModel())
        return self._models[key]

    def measure(self, name: str, replication: Replication, model: RandomModel) -> list[Plan]:
        """Measure the missing runs of a replication on a model; the plans of all its runs."""
        plans: list[Plan] = []
        for scan, entry in replication.scan.items():
            key = (name, model.path, scan, str(entry))
            if key not in self._plans:
                one_scan = replication.model_copy(update={"scan": {scan: entry}})
                directory = str(self.runs(name))
                new = plan_replication_in(directory, one_scan, model.path, models=model.known)
                for plan in new:
                    measure_run(plan, model.known)
                self._plans[key] = new
            plans += self._plans[key]
        return plans

    def runs(self, name: str) -> Path:
        """Where the runs of a replication lie."""
        return self.directory / f"runs-{name}"


def measure_run(plan: Plan, known: KnownModels) -> None:
    """Measure a run in this process, without a word."""
    prepare_run(plan, "")
    resources = Resources(replicas=0, device="cpu")
    run_to_end(plan, resources, Console(quiet=True), stop_at_failure=True, models=known)


def as_measured(plans: Sequence[Plan]) -> RunsShown:
    """Runs as they were measured."""
    return RunsShown(tuple((plan.run.run_id, _interventions(plan)) for plan in plans))


def as_if_untouched(plans: Sequence[Plan], untouched: Sequence[Plan]) -> RunsShown:
    """The same runs, with rows of the untouched model for each intervention.

    `untouched` are those of `with_untouched`, in the same order.
    """
    interventions_by_run = tuple(
        (other.run.run_id, _interventions(plan))
        for plan, other in zip(plans, untouched, strict=True)
    )
    return RunsShown(interventions_by_run, is_null=True)


def _interventions(plan: Plan) -> tuple[str, ...]:
    return tuple(map(str, plan.scan.interventions))


def with_untouched(replication: Replication, is_miniature: bool = False) -> Replication:
    """The replication, in which each scan that lacks the untouched model measures nothing else."""
    scans: dict[str, dict[str, Any]] = {}
    for name, entry in replication.scan.items():
        fields = replication.defaults | entry
        if is_miniature:
            fields |= replication.bundled | entry.get("bundled", {})
        interventions = fields.get("interventions", ["none"])
        scans[name] = entry if "none" in interventions else entry | {"interventions": ["none"]}
    return replication.model_copy(update={"scan": scans})


# Short replications


def short_replication(
    replication: Replication,
    sizes: Mapping[str, int | str],
    extent: Extent,
    of_few_heads: bool = False,
) -> ShortReplication:
    """The replication with few sequences, and with the scans that a model of these sizes has."""
    scans: dict[str, dict[str, Any]] = {}
    for name, entry in replication.scan.items():
        if _is_of_sizes(entry, sizes) and not _is_for_figures(replication, name):
            scans[name] = _short_scan(replication, entry, extent)
    short = replication.model_copy(update={"scan": scans, "bundled": {}})
    n_layers, n_heads = int(sizes["n_layers"]), int(sizes.get("n_heads", WITHOUT_HEADS))
    if of_few_heads and not _names_heads(replication):
        n_layers, n_heads = min(n_layers, FEW_LAYERS), min(n_heads, FEW_HEADS)
    # Without predictions and without ids of tokens, no figure depends on the vocabulary.
    inputs = [(short.defaults | entry)["input"] for entry in scans.values()]
    names_tokens = any({*TOKEN_OPTIONS} & {*source} for source in inputs)
    needs_ids = names_tokens and not extent.small_vocabulary
    predicts = any(_field(short, entry, "predictions", []) for entry in scans.values())
    is_small = not (needs_ids or predicts)
    d_vocab = min(int(sizes["d_vocab"]), LEAST_VOCABULARY if is_small else MOST_VOCABULARY)
    notes: list[str] = []

    # Figures of single heads keep all heads, because any of them may be named.
    if not _names_heads(replication):
        published = n_layers, n_heads
        entries = sum(_entries(short, entry) for entry in scans.values())
        n_layers, n_heads = _affordable_heads(n_layers, n_heads, entries, extent)
        if (n_layers, n_heads) != published:
            notes.append(
                f"{n_layers} of {published[0]} layers and {n_heads} of {published[1]} heads"
            )
    # Logits take the time of a scan that predicts. Ids that figures name must stay ids.
    predictions = max(_predictions(short, entry) for entry in scans.values())
    most_tokens = int(extent.logits / predictions) if predictions else d_vocab
    if most_tokens < d_vocab and not needs_ids:
        vocabulary = max(LEAST_VOCABULARY, most_tokens)
        if vocabulary < d_vocab:
            notes.append(f"a vocabulary of {vocabulary:,}, published {sizes['d_vocab']:,}")
            d_vocab = vocabulary
    if d_vocab < MOST_VOCABULARY:
        scans = {name: _with_small_ids(short, scans[name], d_vocab) for name in scans}
        short = short.model_copy(update={"scan": scans})
    n_ctx = min(int(sizes.get("n_ctx", MOST_POSITIONS)), MOST_POSITIONS)
    return ShortReplication(
        short, n_layers, n_heads, n_ctx, d_vocab, _steps(replication), tuple(notes)
    )


def _affordable_heads(n_layers: int, n_heads: int, entries: int, extent: Extent) -> tuple[int, int]:
    """As many layers and heads as there is time for, if one head has so many pattern entries."""
    if n_layers > extent.layers:
        n_layers, n_heads = extent.layers, min(n_heads, extent.layers)
    n_heads = max(1, min(n_heads, int(extent.entries / (entries * n_layers))))
    most_layers = max(FEW_LAYERS, int(extent.entries / (entries * n_heads)))
    return min(n_layers, most_layers), n_heads


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


def _is_of_sizes(entry: Mapping[str, Any], sizes: Mapping[str, int | str]) -> bool:
    """Whether a scan is of models of these sizes."""
    alternatives: list[Mapping[str, int | str]] = entry.get("sizes", [])
    if not alternatives:
        return True
    return any(
        all(sizes.get(field) == size for field, size in alternative.items())
        for alternative in alternatives
    )


def _names_heads(replication: Replication) -> bool:
    names = [value.name for value in replication.published_values]
    return any(re.search(r"L\d+H\d+", name) for name in names)


def _with_small_ids(
    replication: Replication, entry: dict[str, Any], d_vocab: int
) -> dict[str, Any]:
    """A scan whose input names tokens of a small vocabulary. The last one stays the last: BOS."""
    source = dict(_field(replication, entry, "input", {}))
    if int(source.get("high", 0)) > d_vocab:
        source["high"] = d_vocab - 1
        source["low"] = min(int(source.get("low", 0)), d_vocab // 2)
    token = int(source.get("token", 0))
    if token >= d_vocab:
        is_last = token == MOST_VOCABULARY - 1
        source["token"] = d_vocab - 1 if is_last else token % (d_vocab - 1)
    return entry | {"input": source}


def _is_for_figures(replication: Replication, scan: str) -> bool:
    """Whether a scan of a few sequences is only drawn: a picture cannot fail."""
    name = f"'{scan}'"
    sequences = _field(replication, replication.scan[scan], "sequences", "all")
    if sequences == "all" or sequences > MOST_DRAWN:
        return False
    queries = [
        *replication.view.values(),
        *(each.sql for each in (*replication.check, *replication.claim)),
    ]
    is_drawn = any(name in figure.sql for figure in replication.figure)
    return is_drawn and not any(name in sql for sql in queries)


def _short_scan(
    replication: Replication, entry: Mapping[str, Any], extent: Extent
) -> dict[str, Any]:
    fields = {key: value for key, value in entry.items() if key != "sizes"}
    source = fields.get("input") or replication.defaults.get("input")
    # A corpus that is not here: the miniature reads something else.
    if source is None or source["family"] == "pile":
        fields |= {"input": (replication.bundled | entry.get("bundled", {}))["input"]}
    n_ctx = int(_field(replication, entry, "n_ctx", 0))
    few = max(extent.least_sequences, min(extent.sequences, extent.tokens // n_ctx))
    published = _field(replication, entry, "sequences", "all")
    return fields | {"sequences": few if published == "all" else min(few, published)}


def _field(replication: Replication, entry: Mapping[str, Any], field: str, default: Any) -> Any:
    return entry.get(field, replication.defaults.get(field, default))


def _entries(replication: Replication, entry: Mapping[str, Any]) -> int:
    """Entries of the patterns of one head and layer, as many as take as long as a scan does."""
    interventions = _field(replication, entry, "interventions", ["none"])
    passes = sum(
        HIDING_COST if intervention.startswith(HIDING_INTERVENTIONS) else 1
        for intervention in interventions
    )
    return passes * entry["sequences"] * int(_field(replication, entry, "n_ctx", 0)) ** 2


def _predictions(replication: Replication, entry: Mapping[str, Any]) -> int:
    """Predictions of a scan that asks for losses. Others predict one token a sequence."""
    if "loss" not in str(_field(replication, entry, "predictions", [])):
        return 0
    interventions = _field(replication, entry, "interventions", ["none"])
    return len(interventions) * entry["sequences"] * int(_field(replication, entry, "n_ctx", 0))


# Files


@contextlib.contextmanager
def stand_in_files(replication: Replication) -> Iterator[None]:
    """Work in an empty directory with a file for each that a scan of the replication names.

    They hold lines of this project's licence, as if they were of three data sets.
    """
    words = Path(located("bundled:LICENSE")).read_text(encoding="utf-8").split()
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        # Files are named in any option of an input, so all words of the scans are looked at.
        texts = json.dumps([replication.defaults, replication.scan])
        for name in set(texts.replace('"', "\n").splitlines()):
            # A name with a slash is of a corpus elsewhere.
            if not name.endswith((".csv", ".txt")) or "/" in name:
                continue
            if name.endswith(".txt"):
                letters = "".join(letter for letter in " ".join(words) if letter in CHARACTERS)
                Path(name).write_text(letters + CHARACTERS, encoding="utf-8")
                continue
            lines = ["text,dataset"]
            for row in range(3 * FULL.sequences):
                text = " ".join(words[row * 11 : row * 11 + 400]).replace('"', "")
                lines.append(f'"{text}",{("sst2", "gsm8k", "humaneval")[row % 3]}')
            Path(name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        yield
