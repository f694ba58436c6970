"""Export formats: a function whose keyword-only parameters are the options of the format.

A format reads its run through the `source` and returns the content of its files. The name of the
function is the name of the format, with `-` for `_`. `formats/razor.py` is a short one, and
`formats.export_formats` has all.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import Field

from headcount.exports.shared.certainty import Stability
from headcount.schemas.errors import QueryError
from headcount.schemas.places import Place
from headcount.schemas.registry import Entry, Registry, prose_of, read_argument
from headcount.schemas.values import problem_of

if TYPE_CHECKING:
    from headcount.workers.model.info.model_files import AdapterChoice

Options = Mapping[str, Any]  # values of options by name: numbers, texts and truth values

Part = Annotated[float, Field(gt=0, lt=1)]  # a share that chooses: all or none is no choice

REPEATED = "repeated_random"
"""A random block twice: it needs no corpus and fits every model. In the second copy, a head that
retrieves attends to the first, which is half of the sequence away. A head that only streams does
not. Few tokens of natural text need anything far away, so their mean would hide such heads.
"""


BUNDLED_TEXT = {"family": "text", "files": "bundled:LICENSE", "packing": "concat"}
"""The input of the only text that every installation has."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run must have measured so that a format can be made of it."""

    statistics: tuple[str, ...] = ()  # statistics as a scan writes them: `distant_mass(4,64)`
    profiles: tuple[str, ...] = ()
    families: tuple[str, ...] = ()  # Input families that the format can be made of. Empty: any.
    input_options: Mapping[str, object] = field(default_factory=dict)
    """Options of the input of the scan that `--model` runs."""
    about_text: bool = False
    """Whether it is about text as the model reads it. Any input will do, and the scan that
    `--model` runs reads one if the model has a tokenizer.
    """
    every_head: bool = True  # whether the run must have measured every head of the model
    calibrated: bool = False  # whether measured interventions must say how good estimates are
    baseline: "Needs | None" = None
    """What a second run must have measured, whose input lacks what the first one is about. It is
    of the same model, with sequences of the same length.
    """

    def scan_fields(
        self, model: str, positions: int | None = None, *, reads_text: bool = True
    ) -> dict[str, Any]:
        """The fields of a scan that measures it, in at most `positions` tokens a sequence.

        `reads_text` says whether the model has a tokenizer.
        """
        fields: dict[str, Any] = {"model": model, "n_ctx": min(1024, positions or 1024)}
        fields |= {"sequences": 64, "sequences_per_shard": 16}
        if self.statistics:
            fields["statistics"] = list(self.statistics)
        if self.profiles:
            fields["profiles"] = list(self.profiles)
        if self.about_text and reads_text:
            # It has two thousand tokens or more.
            fields |= {"n_ctx": min(512, fields["n_ctx"]), "sequences": "all"}
            return fields | {"sequences_per_shard": 1, "input": BUNDLED_TEXT}
        family = self.families[0] if self.families else REPEATED
        return fields | {"input": {"family": family, **self.input_options}}

    def __str__(self) -> str:
        parts = [*self.statistics, *(f"profile {name}" for name in self.profiles)]
        line = ", ".join(parts) or "a finished run"
        line += f"; input {' or '.join(self.families)}" if self.families else ""
        line += "; by default a text" if self.about_text else ""
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


def dropped_by(sparsity: float, count: int) -> int:
    """How many of so many heads DuoAttention lets stream: those below this quantile of the scores.

    >>> dropped_by(0.75, 12), dropped_by(0.25, 90), dropped_by(0.001, 12)
    (9, 23, 1)
    """
    # Roundings must not add a head.
    return math.ceil(sparsity * (count - 1) - 1e-9)


def sparsity_of(dropped: int, count: int) -> float:
    """A short number with which so many of the heads stream.

    >>> sparsity_of(10, 12), sparsity_of(9, 12), sparsity_of(1, 4096)
    (0.8333, 0.75, 0.0002441)
    """
    for digits in range(4, 18):
        sparsity = float(f"{dropped / count:.{digits}g}")
        # kvpress rounds, instead of taking a quantile.
        if dropped_by(sparsity, count) == dropped == round(sparsity * count):
            return sparsity
    return dropped / count


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
class Setting:
    """What is known of a run before anything is measured, and of one that is there as well."""

    model: str  # a Hub id, a directory or bundled:NAME
    revision: str | None
    tokenizer: str | None  # another one than the model's own
    adapter: "AdapterChoice"  # what becomes of an adapter in the model's directory
    n_ctx: int
    bos: bool
    input_options: Mapping[str, Any]
    sequences: int | None  # None if that depends on a corpus
    n_layers: int
    n_heads: int
    n_kv_heads: int | None  # None if a run has no record of it
    attention_layers: tuple[int, ...]
    directory: Place | None  # of the run; None if it is not there yet
    runs: Place  # where its directory lies, or will
    destination: Place


@dataclass(frozen=True, kw_only=True)
class ExportFormat(Entry):
    """A registered format."""

    title: str  # what it holds, in a few words
    read_by: str  # tools that load it
    source: str  # where the format is defined: a URL
    writes: Literal["file", "folder"]
    example: str  # a path that a user might write it to
    load: str = ""  # Python that loads what was written to that path. A test runs ours.
    opens: Callable[[Options], bool] = lambda _: False
    """Whether its KV heads are ranked by what the model recalls while they are opened in rounds."""
    refusal: Callable[[Setting, Options], str | None] = lambda _, __: None
    """Why it cannot be made, for all that is known before anything is measured. None if it can."""
    streamed_keys: Callable[[Options, int], tuple[int, int]] | None = None
    """Of the options and n_ctx: the first and last keys that a head keeps which is cut, as
    `--check` does it. None if the format cuts no cache.
    """
    is_ranking: Callable[[Options], bool] = lambda _: False
    """Whether its file leaves open how many heads keep their whole cache."""
    file_patterns: tuple[str, ...] = ()
    """The names of the files in the folder that it writes. `*` stands for any text."""
    libraries: tuple[str, ...] = ()  # libraries that are installed for it alone
    least_documents: int = 1
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
