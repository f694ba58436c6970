"""Whether figures and claims can fail: for random weights, and for interventions that do nothing.

A figure that a model with random weights passes says nothing about the published model. A figure of
an intervention that passes if the intervention does nothing says nothing about the intervention.
Each must fail, or say in one line why it cannot (`passes_random`, `passes_null`). A record is
compared with nothing, so nothing passes it.

* Random weights: five untrained models, compared as if each were the published model, on few
  sequences of its scans. Their heads are as wide as its own; of models that are wider than 768 as
  those of the miniature, and narrower where there are many tokens. They have no more layers than
  figures name, and as many heads as there is time for. Further models of a table are one each.
* Interventions that do nothing: the same replication on a replica that measures the untouched model
  under every intervention. What does not change depends on no intervention. What becomes 0, 1 or
  100 is a change, a ratio or a percentage, and is compared so. Any other value becomes that of a
  figure that depends on no intervention, the untouched model's: its published value is compared.

`python -m tests.reproduce.controls [NAME …]`, or `make controls` for all.
"""

import contextlib
import json
import math
import re
import string
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headcount.jobs.plan.run_plan import prepare_run
from headcount.jobs.run.loop import missing_shards
from headcount.queries.ask.asking import RunDatabase
from headcount.reproduce.replication import (
    Check,
    PublishedValue,
    Reasons,
    Replication,
    find_replications,
    replications,
)
from headcount.reproduce.replication_runs import open_replication_runs, plan_replication
from headcount.reproduce.verdicts import (
    NOTHING_MEASURED,
    Measured,
    Result,
    claim_rows,
    judge,
    measured_by_name,
)
from headcount.schemas.errors import HeadcountError, QueryError, RunError
from headcount.schemas.scans.intervention import NONE, Intervention
from headcount.workers.inputs.corpus.text_files import located
from headcount.workers.known_models import KnownModels
from headcount.workers.model.model_info import ModelInfo
from headcount.workers.process import prepare_process
from headcount.workers.replica import InterventionMeasurements, Replica
from headcount.workers.shard import MeasuredShard, commit_shard, measure_shard
from tests.toys.random_model import (
    LIVELY,
    MOST_POSITIONS,
    UNTRAINED,
    miniature_steps,
    write_random_model,
)

SAME = 1e-6
"""Difference below which two measured values are one: DuckDB may add up in another order."""

NOTHING = (0.0, 1.0, 100.0)
"""What changes, ratios and percentages of an intervention that does nothing are."""

ModelSizes = Mapping[str, int | str]
"""Sizes of a model, by field of its description."""


class Control(NamedTuple):
    """A figure or a claim that passes a control."""

    control: str
    """random or null."""
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

MOST_SEQUENCES, FEW_SEQUENCES, MOST_TOKENS = 6, 3, 256
"""Of a scan under one intervention, and of one of an untrained model: one for each of three data
sets. It has one sequence, however many tokens that has.
"""

SEEDS = range(5)
"""Of the weights of untrained models."""

FEW_LAYERS, MOST_HEADS = 2, 12
"""Layers and heads of a model of which no certain ones are published."""

WIDEST, WIDTH_OF_HEADS, NARROW = 768, 16, 4
"""Wider models have heads of 16, as the miniature of GPT-2. Where interventions do nothing, what is
compared are published values, so one model with narrow heads is enough.
"""

MOST_PRODUCTS = 4e10
"""Multiplications of the layers of one untrained model. Beyond that its heads are narrower. So many
have the interventions of the sink circuit at GPT-2's width.
"""

MOST_ENTRIES = 3e8
"""Entries of all patterns of a replication. Beyond that the model has fewer heads, and then fewer
layers, if no certain head is published.
"""

HIDING_COST = 10
"""How many times as long as others interventions take that hide keys: they build whole patterns."""

SMALL_VOCABULARY, LAST_TOKEN = 4096, 50256
"""Tokens of a vocabulary if nothing depends on it, or losses would take too long; and the last
token of GPT-2's, which is its BOS.
"""

MOST_DRAWN = 8
"""Sequences of a scan that is a picture. Scans of more are for means, which SQL may read by any
part of their names.
"""


def short_replication(
    replication: Replication, sizes: ModelSizes, most_sequences: int = MOST_SEQUENCES
) -> tuple[Replication, dict[str, Any]]:
    """The replication with few sequences, and with the scans that a model of these sizes has; and
    the sizes of a model for which there is time.
    """
    scans: dict[str, dict[str, Any]] = {}
    for name, entry in replication.scan.items():
        alternatives: list[ModelSizes] = entry.get("sizes", [{}])
        is_of_sizes = any(each.items() <= sizes.items() for each in alternatives)
        fields = replication.defaults | entry | replication.family.get(str(sizes.get("family")), {})
        fields = {key: fields[key] for key in fields if key not in ("sizes", "bundled")}
        if not is_of_sizes or _is_only_drawn(replication, name, fields):
            continue
        # A corpus that is not here: the miniature reads something else.
        if fields.get("input", {"family": "pile"})["family"] == "pile":
            fields["input"] = (replication.bundled | entry.get("bundled", {}))["input"]
        few = max(1, min(most_sequences, MOST_TOKENS // fields["n_ctx"]))
        published = fields.get("sequences", "all")
        fields["sequences"] = few if published == "all" else min(few, published)
        scans[name] = fields
    affordable = _affordable_sizes(replication, scans, sizes)
    if "family" in sizes:
        affordable["family"] = sizes["family"]
    for fields in scans.values():
        fields["input"] = _with_small_ids(fields["input"], affordable["d_vocab"])
    emptied = {"defaults": {}, "bundled": {}, "family": {}}
    short = replication.model_copy(update=emptied | {"scan": scans})
    return short, affordable


def _affordable_sizes(
    replication: Replication, scans: Mapping[str, Mapping[str, Any]], sizes: ModelSizes
) -> dict[str, Any]:
    # Of some models the source names no number of heads.
    n_layers, n_heads = int(sizes["n_layers"]), int(sizes.get("n_heads", 8))
    d_model = int(sizes.get("d_model", WIDEST))
    d_head = d_model // n_heads if d_model <= WIDEST else WIDTH_OF_HEADS
    names = " ".join(value.name for value in replication.published_values)
    # Figures of single heads keep all heads, because any of them may be named.
    if not re.search(r"L\d+H\d+", names):
        named_layers = [int(layer) + 1 for layer in re.findall(r"layer (\d+)", names)]
        # Of a small model interventions name every layer.
        if n_layers > 3:
            n_layers = min(n_layers, max(FEW_LAYERS, *named_layers, 0))
        # As many heads as there is time for.
        entries = sum(map(_entries, scans.values()))
        n_heads = max(1, min(n_heads, MOST_HEADS, int(MOST_ENTRIES / (entries * n_layers))))
    # A layer has 12 d_model² weights.
    widest = math.sqrt(MOST_PRODUCTS / (12 * n_layers * sum(map(_tokens, scans.values()))))
    # A power of 2, so that replications share models.
    d_head = max(NARROW, 2 ** int(math.log2(max(1, min(d_head, widest / n_heads)))))
    asked = [fields["predictions"] for fields in scans.values() if "predictions" in fields]
    is_small = not asked or "loss" in str(asked)
    d_vocab = int(sizes["d_vocab"])
    return {
        "n_layers": n_layers,
        "n_heads": n_heads,
        "d_head": d_head,
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


def _tokens(fields: Mapping[str, Any]) -> int:
    """Tokens of all passes of a scan."""
    return len(fields.get("interventions", ["none"])) * fields["sequences"] * fields["n_ctx"]


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
        texts = json.dumps([replication.defaults, replication.family, replication.scan])
        # A name with a slash is of a corpus elsewhere.
        for name in re.findall(r'"([^"/]+(?:\.txt|\.csv))"', texts):
            Path(name).write_text(contents[Path(name).suffix], encoding="utf-8")
        yield


# Runs


class UntouchedReplica(Replica):
    """Measures the untouched model, and says that it was measured under each intervention."""

    _measured: tuple[np.ndarray, InterventionMeasurements] | None = None

    def measure(
        self,
        tokens: np.ndarray,
        intervention: Intervention = NONE,
        labels: list[list[str]] | None = None,
        partner: np.ndarray | None = None,
    ) -> InterventionMeasurements:
        """Measure the same under every intervention, and so only once."""
        if self._measured is None or self._measured[0] is not tokens:
            self._measured = tokens, super().measure(tokens, NONE, labels, partner)
        measured = self._measured[1]
        method = measured.method.model_copy(update={"intervention": str(intervention)})
        return replace(measured, method=method)


def measured_runs(
    replication: Replication,
    model: str,
    out: Path,
    models: KnownModels,
    replica_class: type[Replica] = Replica,
) -> tuple[Path, ModelInfo]:
    """Measure what is missing of runs below a directory; their own directory, and the model."""
    # The tokenizer of an untrained model has no words, so its ids mean no text.
    scans = {
        name: {field: value for field, value in entry.items() if field != "token_text"}
        for name, entry in replication.scan.items()
    }
    replication = replication.model_copy(update={"scan": scans})
    plans = plan_replication(replication, model, str(out / replica_class.__name__), models=models)
    shards: dict[tuple[str, str, int], MeasuredShard] = {}
    for plan in plans:
        prepare_run(plan, "")
        # Checkpoints of an untrained model have the same weights, and are measured once.
        asked = plan.info.sha256, plan.scan.model_copy(update={"model": ""}).model_dump_json()
        replica = None
        for shard in missing_shards(plan).tolist():
            if (*asked, shard) not in shards:
                replica = replica or replica_class(plan.info, plan.scan, load=models.load)
                shards[*asked, shard] = measure_shard(replica, plan.sequences.shard(shard))
            commit_shard(plan.scan, plan.run, shards[*asked, shard], attempt=1)
    return Path(plans[0].scan.out), plans[0].info


# Controls


class ReplicationControls:
    """Both controls of one replication, on short runs."""

    def __init__(
        self,
        name: str,
        replication: Replication,
        home: Path,
        models: KnownModels,
        seeds: range = SEEDS,
    ) -> None:
        """`home` has the runs of all replications, and models for all that have their sizes."""
        self.name = name
        self.seeds = seeds
        self.replication = replication
        self.home = home
        self.models = models
        self.unmeasured: set[str] = set()
        """Published figures that have no value for random weights."""
        self.without_null: list[str] = []
        """Published figures of a replication with interventions that have no value if interventions
        do nothing.
        """
        self._databases: dict[Path, RunDatabase] = {}
        self._values: dict[tuple[Path, str], dict[str, Measured]] = {}

    def measure(self) -> list[Control]:
        """Measure all runs, and ask every check and every claim."""
        all_sizes: list[ModelSizes] = [self.replication.published_sizes]
        for check in self.replication.check:
            for value in check.values:
                if (sizes := self.replication.sizes_of(check, value)) not in all_sizes:
                    all_sizes.append(sizes)
        controls: list[Control] = []
        for sizes in all_sizes:
            seeds = self.seeds if sizes == all_sizes[0] else self.seeds[:1]
            controls += self._random_figures(sizes, seeds)
            if has_interventions(self.replication):
                controls += self._null_figures(sizes)
        for seed in self.seeds:
            database = self.database(self.runs(all_sizes[0], UNTRAINED, seed))
            claims = passing_claims(self.name, self.replication, database, "passes_random")
            controls += [Control("random", words, f"holds ({v})", why) for words, v, why in claims]
        return controls

    def runs(
        self,
        sizes: ModelSizes,
        scale: float,
        seed: int = 0,
        replica_class: type[Replica] = Replica,
    ) -> Path:
        """The directory of the short runs on a model with random weights."""
        most = FEW_SEQUENCES if scale == UNTRAINED else MOST_SEQUENCES
        short, affordable = short_replication(self.replication, sizes, most)
        if scale != UNTRAINED:
            affordable["d_head"] = NARROW
        layout, steps = short.bundled_model, _steps(short)
        facts = [layout.removeprefix("bundled:"), *affordable.values(), scale, *steps, seed]
        model = self.home / "-".join(map(str, facts))
        if not model.exists():
            write_random_model(model, layout, affordable, scale, steps, seed)
        out = self.home / self.name
        with stand_in_files(self.replication):
            return measured_runs(short, str(model), out, self.models, replica_class)[0]

    def database(self, runs: Path) -> RunDatabase:
        """Runs with the views of the replication, opened once."""
        if runs not in self._databases:
            self._databases[runs] = open_replication_runs(self.replication, str(runs))
        return self._databases[runs]

    def _measured(
        self, sizes: ModelSizes, runs: Path
    ) -> Iterator[tuple[Check, PublishedValue, Measured]]:
        """What was published for a model of these sizes, and what some runs measure of it."""
        for check in (check for check in self.replication.check if not check.record):
            for value in check.values:
                if self.replication.sizes_of(check, value) != sizes:
                    continue
                # Models of other sizes may have the same short runs.
                key = (runs, check.sql)
                if key not in self._values:
                    # These runs may lack what the SQL reads.
                    self._values[key] = {}
                    with contextlib.suppress(RunError, QueryError):
                        self._values[key] = measured_by_name(self.name, check, self.database(runs))
                yield check, value, self._values[key].get(value.name, NOTHING_MEASURED)

    def _random_figures(self, sizes: ModelSizes, seeds: Iterable[int]) -> list[Control]:
        controls: list[Control] = []
        for seed in seeds:
            runs = self.runs(sizes, UNTRAINED, seed)
            for check, value, (number, scatter) in self._measured(sizes, runs):
                if number is None:
                    self.unmeasured.add(value.full_name)
                elif value.is_near(number, scatter):
                    seen = f"published {value.value:.4g}, random weights {number:.4g}"
                    why = named_reason(check.passes_random, value.name)
                    controls.append(Control("random", value.full_name, seen, why))
        return controls

    def _null_figures(self, sizes: ModelSizes) -> list[Control]:
        """Figures that an intervention which does nothing passes."""
        before_and_after = (
            self._measured(sizes, self.runs(sizes, LIVELY, replica_class=each))
            for each in (Replica, UntouchedReplica)
        )
        pairs: list[tuple[Check, PublishedValue, float, float | None]] = []
        untouched: list[tuple[Check, float, float]] = []
        for (check, value, before), (_, _, (after, scatter)) in zip(*before_and_after, strict=True):
            if before.value is None or after is None:
                self.without_null.append(value.full_name)
            elif _is_same(before.value, after):
                untouched.append((check, after, value.value))
            else:
                pairs.append((check, value, after, scatter))
        controls: list[Control] = []
        for check, value, after, scatter in pairs:
            # What is published for a model whose interventions do nothing. The row of the same
            # check comes first: another may be rounded otherwise.
            candidates = [nothing for nothing in NOTHING if _is_same(after, nothing)]
            rows = sorted(untouched, key=lambda row: row[0] is not check)
            candidates += [
                published
                for _, measured, published in rows
                if math.isclose(after, measured, rel_tol=SAME)
            ]
            if candidates and value.is_near(candidates[0], scatter):
                seen = f"published {value.value:.4g}, untouched {candidates[0]:.4g}"
                why = named_reason(check.passes_null, value.name)
                controls.append(Control("null", value.full_name, seen, why))
        return controls


def passing_claims(
    name: str, replication: Replication, database: RunDatabase, field: str
) -> Iterator[tuple[str, float | None, str]]:
    """Words and value of each claim that holds, and why it may, as a field says of the claim; empty
    if it must not.
    """
    for claim in replication.claim:
        reasons: Reasons = getattr(claim, field)
        # These runs may lack what the SQL reads.
        with contextlib.suppress(RunError, QueryError):
            for words, value, holds in claim_rows(name, claim, database):
                if holds:
                    why = named_reason(reasons, words) or named_reason(reasons, claim.words)
                    yield words, value, why


def has_interventions(replication: Replication) -> bool:
    """Whether any scan of a replication intervenes, or of its miniature."""
    fields = [replication.defaults, replication.bundled, *replication.scan.values()]
    return any({*entry.get("interventions", [])} - {"none"} for entry in fields)


def null_claims(
    name: str,
    replication: Replication,
    out: Path,
    models: KnownModels,
    results: Iterable[Result],
) -> list[Control]:
    """Claims of interventions that hold on the miniature, and hold there if they do nothing.

    `results` are those of the runs with interventions.
    """
    if not has_interventions(replication) or not replication.claim:
        return []
    model = replication.bundled_model
    runs, _ = measured_runs(replication, model, out, models, UntouchedReplica)
    null = open_replication_runs(replication, str(runs))
    with_interventions = {each.name: each.measured for each in results if each.verdict == "pass"}
    controls: list[Control] = []
    for words, value, why in passing_claims(name, replication, null, "passes_null"):
        # The same words and the same number: it depends on no intervention.
        if words in with_interventions and _is_same(value, with_interventions[words]):
            continue
        controls.append(Control("null", words, f"holds ({value})", why))
    return controls


def main(names: Sequence[str]) -> int:
    """Print which figures and claims pass that must not; returns the exit code."""
    prepare_process()
    wrong_count = 0
    with tempfile.TemporaryDirectory() as home:
        models = KnownModels()
        for name, replication in (find_replications(names) or replications()).items():
            found: list[Control] = []
            try:
                found += ReplicationControls(name, replication, Path(home), models).measure()
                model, out = replication.bundled_model, Path(home) / f"miniature-{name}"
                runs, info = measured_runs(replication, model, out, models)
                database = open_replication_runs(replication, str(runs))
                results = judge(name, replication, info, model, database)
                found += null_claims(name, replication, out, models, results)
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
