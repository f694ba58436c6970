"""Export formats: a function whose keyword-only parameters are the options of the format.

A format reads its run through the `source` and returns the content of its files. The name of the
function is the name of the format, with `-` for `_`. `formats/razor.py` is a short one.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import Field

from headcount.exports import formats
from headcount.exports.certainty import Stability
from headcount.schemas.errors import QueryError
from headcount.schemas.registry import Entry, Registry, import_files, prose_of, read_argument
from headcount.schemas.scans.values import problem_of

Options = Mapping[str, Any]  # values of options by name: numbers, texts and truth values

Part = Annotated[float, Field(gt=0, lt=1)]  # a share that chooses: all or none is no choice

REPEATED = "repeated_random"
"""A random block twice: it needs no corpus and fits every model. In the second copy, a head that
retrieves attends to the first, which is half of the sequence away. A head that only streams does
not. Few tokens of natural text need anything far away, so their mean would hide such heads.
"""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run must have measured so that a format can be made of it."""

    statistics: tuple[str, ...] = ()  # statistics as a scan writes them: `distant_mass(4,64)`
    profiles: tuple[str, ...] = ()
    families: tuple[str, ...] = ()  # Input families that the format can be made of. Empty: any.
    input_options: Mapping[str, object] = field(default_factory=dict)
    """Options of the input of the scan that `--model` runs."""
    every_head: bool = True  # whether the run must have measured every head of the model
    calibrated: bool = False  # whether measured interventions must say how good estimates are
    baseline: "Needs | None" = None
    """What a second run must have measured, whose input lacks what the first one is about. It is
    of the same model, with sequences of the same length.
    """

    def scan_fields(self, model: str, positions: int | None = None) -> dict[str, Any]:
        """The fields of a scan that measures it, in at most `positions` tokens a sequence."""
        fields: dict[str, Any] = {"model": model, "n_ctx": min(1024, positions or 1024)}
        fields |= {"sequences": 64, "sequences_per_shard": 16}
        if self.statistics:
            fields["statistics"] = list(self.statistics)
        if self.profiles:
            fields["profiles"] = list(self.profiles)
        family = self.families[0] if self.families else REPEATED
        return fields | {"input": {"family": family, **self.input_options}}

    def __str__(self) -> str:
        parts = [*self.statistics, *(f"profile {name}" for name in self.profiles)]
        line = ", ".join(parts) or "a finished run"
        line += f"; input {' or '.join(self.families)}" if self.families else ""
        line += "; headcount calibrate of it" if self.calibrated else ""
        return line if self.baseline is None else f"{line}; and {self.baseline}"


@dataclass(frozen=True, kw_only=True)
class CacheCut:
    """Which KV heads keep their whole cache, and what the others keep."""

    heads: list[tuple[int, int]]  # the heads that keep everything: layer and KV head
    sink: int  # first keys that the others keep
    recent: int  # last keys that the others keep
    is_ranking: bool = False
    """Whether the file leaves open how many heads keep everything. Then `heads` are all of them,
    the highest score first.
    """


def ranked(scores: np.ndarray) -> list[tuple[int, int]]:
    """Layer and head by falling score. Of equal scores, the earlier layer's comes first.

    Heads without a score (NaN) are left out.

    >>> ranked(np.array([[0.1, 0.2], [0.3, 0.1], [np.nan, 0.4]]))
    [(2, 1), (1, 0), (0, 1), (0, 0), (1, 1)]
    """
    order = np.argsort(-scores, axis=None, kind="stable")
    # NaN is sorted to the end.
    order = order[: np.count_nonzero(~np.isnan(scores))]
    layers, heads = np.unravel_index(order, scores.shape)
    return list(zip(layers.tolist(), heads.tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What a format made of a run."""

    files: Mapping[str, bytes | Path]
    """Content by name, or a file of this disk that is linked or copied as it is. A format that
    writes a file has one, whose name does not matter.
    """
    cut: CacheCut | None = None
    """The cut of a cache that the file asks for, which `--check` tries out. None if it asks none.
    """
    stability: Stability | None = None  # how far halves of the documents agree on a list
    notes: tuple[str, ...] = ()  # lines that the user should read


@dataclass(frozen=True, kw_only=True)
class ExportFormat(Entry):
    """A registered format."""

    title: str  # what it holds, in a few words
    read_by: str  # tools that load it
    source: str  # where the format is defined: a URL
    writes: Literal["file", "folder"]
    example: str  # a path that a user might write it to
    load: str  # Python that loads what was written to that path. A test runs it.
    measures: bool = False  # whether it measures more than the run has, in a run beside it
    needs_of: Callable[..., Needs] | Needs  # what it needs, or a function of named options

    @cached_property
    def name(self) -> str:
        """How commands name it."""
        return self.function.__name__.replace("_", "-")

    @property
    def details(self) -> str:
        """The rest of what its docstring says before the options."""
        return prose_of(self.function).partition("\n\n")[2]

    def needs(self, options: Options) -> Needs:
        """What a run must have measured, for these options."""
        if isinstance(self.needs_of, Needs):
            return self.needs_of
        wanted = inspect.signature(self.needs_of).parameters
        return self.needs_of(**{name: options[name] for name in wanted})

    def parsed_options(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """All options: those that a user typed, and the defaults of the others."""
        given: dict[str, object] = {}
        for name, text in texts.items():
            # What an option takes as a text is none of a number or of a truth value.
            is_text = problem_of(self.options[name].annotation, text) is None
            truth = {"true": True, "false": False}
            given[name] = text if is_text else truth.get(text, read_argument(text))
        return FORMATS.bind(self, named=given, field=f"export {self.name}", subject="--FLAG")


FORMATS = Registry[ExportFormat]("format", error=QueryError)

F = TypeVar("F", bound="Callable[..., Exported]")


def export_format(
    title: str,
    *,
    needs: Callable[..., Needs] | Needs,
    **facts: Any,  # noqa: ANN401 - fields of `ExportFormat`, which refuses others
) -> Callable[[F], F]:
    """Register a function as a format, with fields of `ExportFormat`."""

    def register(function: F) -> F:
        FORMATS.add(ExportFormat(function=function, title=title, needs_of=needs, **facts))
        return function

    return register


def export_formats() -> Mapping[str, ExportFormat]:
    """Every format by name, in alphabetical order."""
    # Every file of the package is looked at, so that a format is one file and no further line.
    import_files(formats.__name__, formats.__path__)
    return dict(sorted(FORMATS.items()))
