"""What is known of a training at the steps that were measured."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import pyarrow as pa

FACTS = b"headcount.facts"  # where the file of a step keeps what its rows do not say

STEP_FILE = re.compile(
    r"step-(\d{9,})\.parquet"
)  # the name of a step's file, in a callback's `out`

LAYER = re.compile(r"\.(\d+)\.")  # of a weight's name

LARGEST = ("score_max",)  # statistics of which the largest sequence counts, and not the mean


@dataclass(frozen=True)
class Facts:
    """What a model says of itself at a step, besides the rows of its heads."""

    norms: Mapping[str, float] = field(default_factory=dict[str, float])
    """Norm of each weight, in float64, by its name: the same number means the same weight."""
    narrow: Sequence[str] = ()
    """Names of the weights that are trained in a format of half precision."""
    untied: float | None = None
    """How far the unembedding is from the embedding, as a share; None if not tied by the config."""
    leak: float | None = None
    """How far predictions in one document follow another one's tokens; None without documents."""
    repeated: float | None = None
    """Share of the tokens of a training batch that were in their sequence before."""

    def text(self) -> str:
        """As JSON, for the file of a step."""
        return json.dumps(asdict(self))

    @staticmethod
    def of_rows(rows: pa.Table) -> Facts:
        """Those that the rows of a step carry; none if they carry none."""
        text = (rows.schema.metadata or {}).get(FACTS)
        return Facts(**json.loads(text)) if text else Facts()

    def added_to(self, rows: pa.Table) -> pa.Table:
        """The rows, which carry them from now on."""
        metadata = {**(rows.schema.metadata or {}), FACTS: self.text().encode()}
        return rows.replace_schema_metadata(metadata)


@dataclass(frozen=True)
class MeasuredStep:
    """The heads of a model at one step of its training."""

    step: int
    heads: Mapping[str, np.ndarray]
    """Each statistic by head, `[layer head]`; NaN where it is undefined."""
    facts: Facts = field(default_factory=Facts)


def measured_step(step: int, rows: pa.Table) -> MeasuredStep:
    """The step of some rows: those of `headcount.measure`, or of a file that a callback wrote."""
    layers, heads = (rows[name].to_numpy().astype(np.int64) for name in ("layer", "head"))
    shape = int(layers.max()) + 1, int(heads.max()) + 1
    places = layers * shape[1] + heads
    by_head: dict[str, np.ndarray] = {}
    for name in rows.column_names:
        if not pa.types.is_floating(rows.schema.field(name).type):
            continue
        values = rows[name].to_numpy().astype(np.float64)
        is_defined = ~np.isnan(values)
        at, defined = places[is_defined], values[is_defined]
        counts = np.bincount(at, minlength=shape[0] * shape[1])
        if name in LARGEST:
            summary = np.full(len(counts), -np.inf)
            np.maximum.at(summary, at, defined)
        else:
            sums = np.bincount(at, defined, minlength=len(counts))
            summary = sums / np.maximum(counts, 1)
        by_head[name] = np.where(counts > 0, summary, np.nan).reshape(shape)
    return MeasuredStep(step, by_head, Facts.of_rows(rows))


class History:
    """The measured steps of one training, in their order."""

    def __init__(self, measured: Sequence[MeasuredStep]) -> None:
        self.measured = sorted(measured, key=lambda each: each.step)
        self.steps = [each.step for each in self.measured]

    def has(self, statistics: Sequence[str]) -> bool:
        """Whether every step has measured some statistics."""
        return all(name in each.heads for each in self.measured for name in statistics)

    def of(self, statistic: str) -> np.ndarray:
        """A statistic at all steps, `[step layer head]`."""
        return np.stack([each.heads[statistic] for each in self.measured])

    @property
    def n_layers(self) -> int:
        """The layers of the model."""
        return next(iter(self.measured[0].heads.values())).shape[0]

    def norms(self) -> tuple[list[str], np.ndarray]:
        """The weights that every step knows, and their norms `[step weight]`."""
        known = [name for name in self.measured[0].facts.norms if all(
            name in each.facts.norms for each in self.measured
        )]  # fmt: skip
        return known, np.array([[each.facts.norms[n] for n in known] for each in self.measured])


def layer_of(weight: str) -> int | None:
    """The layer that a weight belongs to, by its name; None for an embedding.

    >>> layer_of("transformer.h.11.attn.c_attn.weight"), layer_of("lm_head.weight")
    (11, None)
    """
    match = LAYER.search(f".{weight}.")
    return int(match[1]) if match else None
