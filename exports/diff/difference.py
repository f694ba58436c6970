"""What `headcount diff A B` says: whether two models are the same, and where they differ."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from headcount.jobs.bars import bar
from headcount.jobs.commands.model_report import listed_layers
from headcount.jobs.plan.plan import where_begun
from headcount.schemas.errors import ModelError, counted, unknown
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.places import absolute
from headcount.schemas.significance import p_above, q_of
from headcount.workers.diff.causes import CAUSES, OF_LAYERS, OF_TEXTS, UNKNOWN, Cause
from headcount.workers.diff.comparison import (
    LAYER_SEQUENCES,
    Comparer,
    Comparison,
    Departure,
    check_sizes,
)
from headcount.workers.diff.layer_steps import Z_KEY
from headcount.workers.diff.number_grids import FORMATS
from headcount.workers.diff.texts import (
    inputs_of,
    sequence_length,
    stored_tokens,
    tokenizer_causes,
)
from headcount.workers.known_models import KnownModels
from headcount.workers.model.info.model_info import ModelInfo
from headcount.workers.model.model import Model
from headcount.workers.run_model import RunModel

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = "rounding"
KINDS = ("same", ROUNDING, *FORMATS, *CAUSES, *OF_LAYERS, *OF_TEXTS, UNKNOWN)

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
        self.sides = _run_at(a), _run_at(b)
        self.runs = self.sides  # in which both are measured; None where it is not
        models = KnownModels()
        with bar(console, "") as show:
            show("reading the models", None)
            infos = [_described(models, name) for name in self.names]
            self.infos = infos
            check_sizes(*infos)
            loaded: list[Model] = []
            for info in infos:
                show(f"loading {info.name}", None)
                loaded.append(models.load(info, "raw", "cpu"))
            comparer = Comparer(loaded[0], loaded[1], show)
            n_ctx = sequence_length(loaded[0], loaded[1])
            # A run has its input; of two runs, it is the first one's.
            self.source, self.reader = next(
                ((run, info) for run, info in zip(self.sides, infos, strict=True) if run),
                (None, infos[0]),
            )
            if self.source is not None:
                tokens = stored_tokens(self.source)
                n_ctx = min(tokens.shape[1], loaded[0].info.n_ctx, loaded[1].info.n_ctx)
                inputs = {f"sequences of {self.source.run_id}": tokens[:, :n_ctx]}
            else:
                inputs = inputs_of(self.reader, n_ctx)
            self.n_ctx, self.inputs = n_ctx, inputs
            self.windows = [
                facts.window
                for model in loaded
                for layer in range(model.info.n_layers)
                if (facts := model.facts(layer)) and facts.window and facts.window >= n_ctx
            ]
            self.of_texts, self.tokenizers = tokenizer_causes(*infos)
            self.comparison: Comparison = comparer.compare(inputs)

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

    def record(self) -> dict[str, Any]:
        """Everything, for programs."""
        comparison = self.comparison
        return {
            "a": self.names[0],
            "b": self.names[1],
            "verdict": self.verdict,
            "rounding": comparison.rounding or None,
            "causes": [asdict(cause) | {"layers": of} for cause, of in self.causes.items()],
            "departures": [asdict(departure) for departure in comparison.departures],
            "tokenizers": self.tokenizers,
            "losses": {
                name: dict(zip(("a", "b", "change", "standard_error"), _change(both), strict=True))
                for name, both in comparison.losses.items()
            },
            "heads": [
                {"layer": layer, "head": head, "change": mean, "standard_error": error, "q": q}
                for (layer, head), mean, error, q in self._heads()
            ],
            "n_ctx": self.n_ctx,
            "sequences": {name: len(tokens) for name, tokens in self.inputs.items()},
            "noise": comparison.noise.middle,
            "comparisons": comparison.noise.comparisons,
        }

    def json(self) -> str:
        """The record as JSON, in which undefined numbers are null."""
        text = json.dumps(self.record(), default=str)
        return json.dumps(json.loads(text, parse_constant=lambda _: None), indent=2)

    def lines(self) -> Iterator[tuple[str, str]]:
        """A word and its text, at most twenty."""
        yield "verdict", f"{self.verdict}: {self._sentence()}"
        shown = self.comparison.faults or self.comparison.departures
        yield from self._lines_on_places(shown)
        for name, both in self.comparison.losses.items():
            ours, _, change, error = _change(both)
            words = f"changes by {change:+.2g} ± {error:.1g}" if shown else "is the same"
            yield "does", f"the loss on {name}, {ours:.4f}, {words}"
        if shown and (heads := self._heads()):
            texts = (
                f"L{layer}H{head} {mean:.2g} ± {error:.1g}"
                for (layer, head), mean, error, _ in heads
            )
            largest = max(q for *_, q in heads)
            about = f"change of z, as a share of it; above noise with q ≤ {largest:.1g}"
            yield "heads", f"{', '.join(texts)} ({about})"
        yield from self._lines_on_input()
        if shown:
            yield "further", self._further()

    def _further(self) -> str:
        """How rows of both sides are compared: of two runs those that are there."""
        a, b = self.runs
        if a is None or b is None:
            names = " and ".join(f"--set model={shlex.quote(name)}" for name in self.names)
            return f"headcount scan FILE {names}, then headcount query runs run_changes"
        if a.path.parent != b.path.parent:
            return "headcount query DIRECTORY run_changes, once both runs lie in one directory"
        pair = f"run_id = '{b.run_id}' AND other_run = '{a.run_id}'"
        sql = f"FROM run_changes WHERE {pair} ORDER BY q"
        return f'headcount query {shlex.quote(str(a.path.parent))} "{sql}"'

    def _sentence(self) -> str:
        if self.comparison.faults:
            return "B does not compute what A computes"
        if self.of_texts:
            return "the models compute the same from the same tokens, and their tokenizers differ"
        if self.comparison.rounding:
            return f"B is A but for weights that are rounded to {self.comparison.rounding}"
        return "A and B compute the same, within the arithmetic of float32"

    def _lines_on_places(self, shown: Sequence[Departure]) -> Iterator[tuple[str, str]]:
        if shown:
            yield "begins", _in_words(shown[0])
        layers = sorted({one.layer for one in shown if one.layer is not None})
        if len(layers) > 1:
            yield "", f"{counted(len(shown), 'step')} of {listed_layers(layers)}, each by itself"
        if self.comparison.faults and self.comparison.rounding:
            yield "rounding", f"other weights are rounded to {self.comparison.rounding}"
        causes = list(self.causes.items())
        for cause, of in causes[:MOST_CAUSES]:
            where = f"{listed_layers(sorted(of))}: " if of else ""
            yield "looks like", f"{cause.kind}: {where}{cause.sentence}"
        if len(causes) > MOST_CAUSES:
            yield "", f"and {len(causes) - MOST_CAUSES} more, which --json lists"

    def _lines_on_input(self) -> Iterator[tuple[str, str]]:
        yield "tokenizers", self.tokenizers
        kinds = " and ".join(f"{len(tokens)} {name}" for name, tokens in self.inputs.items())
        yield "input", f"{kinds} of {self.n_ctx} of A's tokens; layers on {LAYER_SEQUENCES} of each"
        if self.windows:
            longest = f"a window of {max(self.windows):,} tokens"
            yield "", f"{longest} is longer than the input: masks alone were compared"
        noise = self.comparison.noise
        count = f"{noise.comparisons:,} comparisons of A with itself"
        yield "noise", f"{noise.middle:.1g}, the middle of {count} in another order of summation"

    def _heads(self) -> list[tuple[tuple[int, int], float, float, float]]:
        """The heads whose z changed most: mean change, its standard error over sequences, and q.

        q is that of all heads, of a change no larger than the noise of z.
        """
        changes = self.comparison.head_changes
        means = np.array([float(each.mean()) for each in changes.values()])
        errors = np.array([_error(each) for each in changes.values()])
        sequences = max(map(len, changes.values()), default=0)
        noise = self.comparison.noise.limit(Z_KEY)
        q = q_of(p_above(means, errors, sequences - 1, noise))
        numbers = zip(changes, means.tolist(), errors.tolist(), q.tolist(), strict=True)
        changed = [head for head in numbers if head[1] > noise]
        return sorted(changed, key=lambda head: -head[1])[:MOST_HEADS]


def _run_at(name: str) -> RunDirectory | None:
    """The run in a directory; None if a name is that of a model."""
    run = RunDirectory(absolute(name))
    is_run = run.path.name.startswith("run_id=") or run.manifest_file.is_file()
    return run if is_run else None


def _described(models: KnownModels, name: str) -> ModelInfo:
    """The model of a name; that of a run has the weights that the run measured."""
    run = _run_at(name)
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


def _in_words(departure: Departure) -> str:
    where = "" if departure.layer is None else f"layer {departure.layer}, "
    what = departure.quantity
    if departure.quantity == "rotation":
        what += f" of {departure.module}"
    elif departure.is_input and departure.module:
        what += f" before {departure.module}"
    elif departure.module:
        what += f" ({departure.module})"
    heads = ""
    if departure.heads and len(departure.heads) < departure.n_heads:
        shown = ", ".join(map(str, departure.heads[:8]))
        heads = f", head{'s' if len(departure.heads) > 1 else ''} {shown} of {departure.n_heads}"
    places = ""
    if departure.positions < 1:
        share = f"{departure.positions:.0%} of positions"
        places = f", at {share}, the first {departure.first_position}"
    size = f"by {departure.size:.2g} of its size, noise is below {departure.limit:.1g}"
    return f"{where}{what}{heads}{places}: {size}"


def _error(values: Tensor) -> float:
    return float(values.std() / sqrt(len(values))) if len(values) > 1 else float("nan")


def _change(losses: Tensor) -> tuple[float, float, float, float]:
    """A's loss, B's, the change and its standard error over sequences."""
    ours, theirs = losses
    change = theirs - ours
    return float(ours.mean()), float(theirs.mean()), float(change.mean()), _error(change)
