"""What is known of a training at the steps that were measured."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headcount.schemas.places import Place, names, open_at_once

FACTS = b"headcount.facts"  # where the file of a step keeps what its rows do not say

STEP_FILE = re.compile(r"step-(\d{9,})\.parquet")  # the name of a step's file

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
    ahead: float | None = None
    """How far predictions follow later tokens."""
    shifted: float | None = None
    """Share of the labels of a training batch that are the next token, and not their own."""
    batch: str | None = None
    """Digest of the tokens of a training batch."""
    attention: Mapping[str, str] = field(default_factory=dict[str, str])
    """Digest of the numbers that each layer's attention is set to, such as its scale, by layer."""

    @staticmethod
    def of_rows(rows: pa.Table) -> Facts:
        """Those that the rows of a step carry; none if they carry none."""
        text = (rows.schema.metadata or {}).get(FACTS)
        return Facts(**json.loads(text)) if text else Facts()

    def added_to(self, rows: pa.Table) -> pa.Table:
        """The rows, which carry them from now on."""
        metadata = {**(rows.schema.metadata or {}), FACTS: json.dumps(asdict(self)).encode()}
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
    kinds = {
        name: "max" if name in LARGEST else "mean"
        for name in rows.column_names
        if pa.types.is_floating(rows.schema.field(name).type)
    }
    # Undefined values are NULL, which count for nothing.
    by_head = rows.group_by(["layer", "head"]).aggregate([*kinds.items()])
    places = tuple(by_head[name].to_numpy() for name in ("layer", "head"))
    heads: dict[str, np.ndarray] = {}
    for name, kind in kinds.items():
        heads[name] = np.full([axis.max() + 1 for axis in places], np.nan)
        heads[name][places] = by_head[f"{name}_{kind}"].to_numpy()
    return MeasuredStep(step, heads, Facts.of_rows(rows))


def step_files(directory: Place) -> dict[int, Place]:
    """The files that a callback wrote into a directory, by step."""
    matches = [STEP_FILE.fullmatch(name) for name in names(directory)]
    return {int(match[1]): directory / match[0] for match in matches if match is not None}


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

    def by_layer(self, statistic: str) -> np.ndarray:
        """Its mean over the heads of each layer, `[step layer 1]`."""
        return np.nanmean(self.of(statistic), axis=2, keepdims=True)

    def fact(self, name: str) -> np.ndarray:
        """A number of the whole model or batch at all steps, `[step 1 1]`; NaN where unknown."""
        numbers = [getattr(each.facts, name) for each in self.measured]
        return np.array(numbers, float)[:, None, None]

    @property
    def n_layers(self) -> int:
        """The layers of the model."""
        return next(iter(self.measured[0].heads.values())).shape[0]

    def norms(self) -> tuple[list[str], np.ndarray]:
        """The weights that every step knows, and their norms `[step weight]`."""
        norms = [each.facts.norms for each in self.measured]
        known = [name for name in norms[0] if all(name in of_step for of_step in norms)]
        return known, np.array([[of_step[name] for name in known] for of_step in norms])


def layer_of(weight: str) -> int | None:
    """The layer that a weight belongs to, by its name; None for an embedding.

    >>> layer_of("transformer.h.11.attn.c_attn.weight"), layer_of("lm_head.weight")
    (11, None)
    """
    match = LAYER.search(f".{weight}.")
    return int(match[1]) if match else None


def read_table(file: Place) -> pa.Table:
    """The table of a file, which from a store is fetched in one request."""
    with open_at_once(file) as content:
        return pq.read_table(content)
