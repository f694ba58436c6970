"""What `headcount diff A B` says: whether two models are the same, and where they differ."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator
from dataclasses import asdict
from math import sqrt

import numpy as np
from rich.console import Console

from headcount.jobs.bars import bar
from headcount.jobs.commands.model_report import listed_layers
from headcount.jobs.plan.plan import where_begun
from headcount.queries.ask.asking import open_runs
from headcount.schemas.errors import ModelError, QueryError, counted, unknown
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.places import absolute
from headcount.schemas.significance import p_above, q_of
from headcount.workers.diff.causes import CAUSES, UNKNOWN, Cause
from headcount.workers.diff.comparison import (
    LAYER_SEQUENCES,
    Comparer,
    Comparison,
    Fault,
    check_sizes,
)
from headcount.workers.diff.number_grids import FORMATS
from headcount.workers.diff.passes import OWN_Z, Place
from headcount.workers.diff.steps import windows_of
from headcount.workers.diff.texts import (
    OF_TEXTS,
    SEQUENCES,
    cut_to,
    inputs_of,
    sequence_length,
    tokenizer_causes,
)
from headcount.workers.known_models import KnownModels
from headcount.workers.model.model_info import ModelInfo
from headcount.workers.run_model import RunModel

ROUNDING = "rounding"
KINDS = ("same", ROUNDING, *FORMATS, *CAUSES, *OF_TEXTS, UNKNOWN)

MOST_CAUSES, MOST_HEADS = 5, 5  # that are said


def check_kinds(allowed: Collection[str]) -> None:
    """Refuse a kind that nobody knows."""
    for kind in allowed:
        if kind not in KINDS:
            raise ModelError(f"--allow: {unknown('kind', kind, KINDS)}")


class Difference:
    """Two models and what was found between them."""

    def __init__(self, a: str, b: str, console: Console) -> None:
        self.names = a, b
        self.runs = _run_at(a), _run_at(b)  # in which both are measured; None where it is not
        models = KnownModels()
        with bar(console, "") as show:
            show("reading the models", None)
            self.infos = [
                _described(models, *side) for side in zip(self.names, self.runs, strict=True)
            ]
            check_sizes(*self.infos)
            show("loading the models", None)
            ours, theirs = (models.load(info, "raw", "cpu") for info in self.infos)
            # A run has its input; of two runs, it is the first one's.
            self.source = self.runs[0] or self.runs[1]
            self.reader = self.infos[self.runs.index(self.source)]  # whose tokens they are
            self.inputs = inputs_of(self.reader, sequence_length(ours, theirs))
            if self.source is not None:
                n_ctx = min(info.n_ctx for info in self.infos)
                name = f"sequences of {self.source.run_id}"
                self.inputs = {name: cut_to(stored_tokens(self.source), n_ctx)}
            self.n_ctx = next(iter(self.inputs.values())).shape[1]
            windows = filter(None, (*windows_of(ours), *windows_of(theirs)))
            self.longest_window = max(windows, default=0)
            self.of_texts, self.tokenizers = tokenizer_causes(*self.infos)
            self.comparison: Comparison = Comparer(ours, theirs, show).compare(self.inputs)

    @property
    def verdict(self) -> str:
        """Whether it is the same model."""
        return "different" if self.of_texts else self.comparison.verdict

    @property
    def causes(self) -> dict[Cause, list[int]]:
        """What the difference looks like, and in which layers."""
        return self.comparison.causes | {cause: [] for cause in self.of_texts}

    def exit_code(self, allowed: Collection[str]) -> int:
        """0 if everything that was found is allowed, else 1."""
        if self.comparison.rounding and not {ROUNDING, self.comparison.rounding} & {*allowed}:
            return 1
        return int(any(cause.kind not in allowed for cause in self.causes))

    def json(self) -> str:
        """Everything, for programs; undefined numbers are null."""
        comparison = self.comparison
        losses = comparison.losses.items()
        record = {
            "a": self.names[0],
            "b": self.names[1],
            "verdict": self.verdict,
            "rounding": comparison.rounding or None,
            "rounded": comparison.rounded,
            "causes": [asdict(cause) | {"layers": layers} for cause, layers in self.causes.items()],
            "faults": [asdict(fault) for fault in comparison.faults],
            "tokenizers": self.tokenizers,
            "losses": {name: _change(both.numpy()) for name, both in losses},
            "heads": self._heads(),
            "n_ctx": self.n_ctx,
            "sequences": {name: len(tokens) for name, tokens in self.inputs.items()},
            "noise": comparison.noise.middle,
            "comparisons": comparison.noise.comparisons,
        }
        text = json.dumps(record)
        return json.dumps(json.loads(text, parse_constant=lambda _: None), indent=2)

    def lines(self) -> Iterator[tuple[str, str]]:
        """A word and its text, at most twenty."""
        comparison = self.comparison
        yield "verdict", f"{self.verdict}: {self._sentence()}"
        if comparison.faults:
            yield "begins", _in_words(comparison.faults[0])
        layers = sorted({fault.layer for fault in comparison.faults if fault.layer is not None})
        if len(layers) > 1:
            steps = counted(len(comparison.faults), "step")
            yield "", f"{steps} of {listed_layers(layers)}, each by itself"
        yield from self._lines_on_causes()
        is_same = comparison.verdict == "same"
        for name, both in comparison.losses.items():
            loss = _change(both.numpy())
            words = "changes by {change:+.2g} ± {standard_error:.1g}".format(**loss)
            words = "is the same" if is_same else words
            yield "does", f"the loss on {name}, {loss['a']:.4f}, {words}"
        if not is_same and (heads := self._heads()):
            words = "L{layer}H{head} {change:.2g} ± {standard_error:.1g}"
            largest = max(head["q"] for head in heads)
            about = f"change of z, as a share of it; above noise with q ≤ {largest:.1g}"
            yield "heads", f"{', '.join(words.format(**head) for head in heads)} ({about})"
        yield from self._lines_on_input()
        if not is_same:
            yield "further", self._further()

    def _sentence(self) -> str:
        if self.comparison.faults:
            return "B does not compute what A computes"
        if self.of_texts:
            return "the models compute the same from the same tokens, and their tokenizers differ"
        if self.comparison.rounding:
            return f"B is A but for weights that are rounded to {self.comparison.rounding}"
        return "A and B compute the same, within the arithmetic of float32"

    def _lines_on_causes(self) -> Iterator[tuple[str, str]]:
        if self.comparison.rounded:
            rounded = self.comparison.rounded.items()
            counts = [f"{counted(len(weights), 'weight')} to {name}" for name, weights in rounded]
            yield "rounded", ", ".join(counts)
        causes = list(self.causes.items())
        for cause, layers in causes[:MOST_CAUSES]:
            where = f"{listed_layers(sorted(layers))}: " if layers else ""
            yield "looks like", f"{cause.kind}: {where}{cause.sentence}"
        if len(causes) > MOST_CAUSES:
            yield "", f"and {len(causes) - MOST_CAUSES} more, which --json lists"

    def _lines_on_input(self) -> Iterator[tuple[str, str]]:
        yield "tokenizers", self.tokenizers
        kinds = " and ".join(f"{len(tokens)} {name}" for name, tokens in self.inputs.items())
        yield "input", f"{kinds} of {self.n_ctx} of A's tokens; layers on {LAYER_SEQUENCES} of each"
        if self.longest_window >= self.n_ctx:
            longest = f"a window of {self.longest_window:,} tokens"
            yield "", f"{longest} is longer than the input: masks alone were compared"
        noise = self.comparison.noise
        count = f"{noise.comparisons:,} comparisons of A with itself"
        yield "noise", f"{noise.middle:.1g}, the middle of {count} in another order of summation"

    def _further(self) -> str:
        """What compares rows of both sides."""
        a, b = self.runs
        if a is None or b is None or a.path.parent != b.path.parent:
            return "--report FILE.html measures both sides, and writes a page with them"
        pair = f"run_id = '{b.run_id}' AND other_run = '{a.run_id}'"
        sql = f"FROM run_changes WHERE {pair} ORDER BY q"
        return f'headcount query {shlex.quote(str(a.path.parent))} "{sql}"'

    def _heads(self) -> list[dict[str, float]]:
        """The heads whose z changed most, on average over sequences, and q: that of all heads, of a
        change no larger than the noise of z.
        """
        changes = self.comparison.head_changes
        if not changes:
            return []
        heads = [(layer, head) for layer in changes for head in range(changes[layer].shape[1])]
        by_head = np.concatenate([changes[layer].T.numpy() for layer in changes])  # [head sequence]
        n_sequences = by_head.shape[1]
        means, errors = by_head.mean(1), by_head.std(1, ddof=1) / sqrt(n_sequences)
        noise = self.comparison.noise.limit(Place(None, OWN_Z))
        q = q_of(p_above(means, errors, n_sequences - 1, noise))
        numbers = zip(heads, means.tolist(), errors.tolist(), q.tolist(), strict=True)
        records = [
            {"layer": layer, "head": head, "change": mean, "standard_error": error, "q": of_all}
            for (layer, head), mean, error, of_all in numbers
            if mean > noise
        ]
        return sorted(records, key=lambda record: -record["change"])[:MOST_HEADS]


def stored_tokens(run: RunDirectory) -> np.ndarray:
    """The tokens of the first sequences of a run, `[sequence pos]`."""
    rows = open_runs(run.path).rows(
        "SELECT tokens FROM sequences WHERE intervention = 'none' "
        f"ORDER BY sequence LIMIT {SEQUENCES}"
    )
    if not rows:
        raise QueryError(f"{run.path}: has no sequences under the intervention none")
    return np.array([tokens for (tokens,) in rows])


def _run_at(name: str) -> RunDirectory | None:
    """The run in a directory; None if a name is that of a model."""
    run = RunDirectory(absolute(name))
    is_run = run.path.name.startswith("run_id=") or run.manifest_file.is_file()
    return run if is_run else None


def _described(models: KnownModels, name: str, run: RunDirectory | None) -> ModelInfo:
    """The model of a name; that of a run has the weights that the run measured."""
    if run is None:
        return models.describe(name)
    try:
        with where_begun(run, []):
            return RunModel(run.path).info
    except ModelError as error:
        problem = str(error).partition("; --model ")[0]
        raise ModelError(
            f"{problem}; instead of the run name its model, where it lies now"
        ) from None


def _in_words(fault: Fault) -> str:
    words = fault.quantity if fault.layer is None else f"layer {fault.layer}, {fault.quantity}"
    if fault.quantity == "rotation":
        words += f" of {fault.module}"
    elif fault.module:
        words += f" before {fault.module}" if fault.is_input else f" ({fault.module})"
    if fault.heads and len(fault.heads) < fault.n_heads:
        shown = ", ".join(map(str, fault.heads[:8]))
        words += f", head{'s' if len(fault.heads) > 1 else ''} {shown} of {fault.n_heads}"
    if fault.positions < 1:
        share = f"{fault.positions:.0%} of positions"
        words += f", at {share}, the first {fault.first_position}"
    return f"{words}: by {fault.size:.2g} of its size, noise is below {fault.limit:.1g}"


def _change(losses: np.ndarray) -> dict[str, float]:
    """Mean losses `[side sequence]` by A and B, the change, and its error over sequences."""
    ours, theirs = losses
    change = theirs - ours
    return {
        "a": float(ours.mean()),
        "b": float(theirs.mean()),
        "change": float(change.mean()),
        "standard_error": float(change.std(ddof=1) / sqrt(len(change))),
    }
