"""Input families: a function whose name is the family and whose keyword-only parameters are its options in a scan.

A synthetic family takes a `Draw` and returns one sequence; all randomness comes from the draw, so sequence i depends on
(seed, i, options) alone. A corpus family takes nothing but options and returns a `Corpus`.
"""

from __future__ import annotations

import glob
import inspect
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, ValidationError, create_model

from schemas.errors import CorpusError, ScanError, unknown
from schemas.places import StorePath, matching, place, reason
from schemas.scan import by_key, wrong_value
from workers.corpus import Corpus
from workers.documents import Source, open_hub

Packing = Literal["document", "concat"]


@dataclass(frozen=True)
class Draw:
    """What one synthetic sequence is made from."""

    rng: np.random.Generator
    length: int
    """Tokens to return: n_ctx, less the beginning-of-sequence token."""
    ordinary: np.ndarray
    """Token ids of the vocabulary, special tokens left out."""

    @classmethod
    def of(cls, seed: int, sequence: int, family: str, length: int, ordinary: np.ndarray) -> Draw:
        """The draw of one sequence of a scan."""
        rng = np.random.default_rng(np.random.SeedSequence([seed, sequence, zlib.crc32(family.encode())]))
        return cls(rng, length, ordinary)

    def tokens(self, count: int, low: int = 0, high: int | None = None, distinct: bool = False) -> np.ndarray:
        """`count` token ids, uniform over the ordinary ones in `low .. high-1`; `distinct` draws none twice."""
        ids = self.ordinary[(self.ordinary >= low) & (self.ordinary < (high if high is not None else np.inf))]
        if len(ids) < (count if distinct else 1):
            end = "" if high is None else f" and below high = {high}"
            raise ScanError(
                f"input: {count if distinct else 1} token ids wanted from low = {low} on{end}, {len(ids)} are there; "
                "widen low and high"
            )
        return self.rng.choice(ids, size=count, replace=not distinct)


@dataclass(frozen=True)
class InputFamily:
    """A registered family."""

    name: str
    function: Callable[..., Any]
    meaning: str
    synthetic: bool

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options with every default resolved; a wrong one raises `ScanError`."""
        parameters = [
            p for p in inspect.signature(self.function, eval_str=True).parameters.values() if p.kind is p.KEYWORD_ONLY
        ]
        fields: Any = {p.name: (p.annotation, ... if p.default is p.empty else p.default) for p in parameters}
        model = create_model("Options", __config__=ConfigDict(extra="forbid", strict=True), **fields)
        try:
            return model(**options).model_dump()
        except ValidationError as error:
            found = by_key(error).items()
            raise ScanError("\n".join(self._explain(key, problems, fields) for key, problems in found)) from None

    def _explain(self, key: str, problems: list[Any], known: Iterable[str]) -> str:
        match problems[0]["type"]:
            case "extra_forbidden":
                return f"input.{key}: {unknown(f'option of {self.name}', key, known)}"
            case "missing":
                return f"input.{key}: missing; the family {self.name} needs it"
            case _:
                return wrong_value(f"input.{key}", problems)


INPUTS: dict[str, InputFamily] = {}


def input_family(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function as an input family."""
    name = function.__name__
    if name in INPUTS:
        raise ValueError(f"input family {name!r} is defined twice")
    parameters = inspect.signature(function).parameters.values()
    synthetic = any(p.kind is not p.KEYWORD_ONLY for p in parameters)
    INPUTS[name] = InputFamily(name, function, inspect.cleandoc(function.__doc__ or "").split("\n")[0], synthetic)
    return function


def find_input(name: str) -> InputFamily:
    """The input family of that name."""
    if name not in INPUTS:
        raise ScanError(f"input.family: {unknown('input family', name, INPUTS)}")
    return INPUTS[name]


@input_family
def uniform_random(draw: Draw, *, low: int = 0, high: int | None = None, distinct: bool = False) -> np.ndarray:
    """Tokens drawn uniformly from `low .. high-1` (or the vocabulary); with `distinct`, none occurs twice."""
    return draw.tokens(draw.length, low, high, distinct)


@input_family
def repeated_random(
    draw: Draw, *, period: int | None = None, low: int = 0, high: int | None = None, distinct: bool = False
) -> np.ndarray:
    """A block of `period` random tokens, repeated to the end; twice where no period is given."""
    period = (draw.length + 1) // 2 if period is None else period
    if not 1 <= period <= draw.length:
        raise ScanError(f"input.period: expected 1 to {draw.length}, the tokens in a sequence, got {period}")
    return np.resize(draw.tokens(period, low, high, distinct), draw.length)


@input_family
def pile(
    *,
    files: str | list[str] | None = None,
    dataset: str | None = None,
    split: str = "train",
    packing: Packing = "document",
) -> Corpus:
    """Documents in the Pile's format (`text`, `meta.pile_set_name`): .jsonl, .jsonl.zst or .parquet files, or a Hub data set."""
    if (files is None) == (dataset is None):
        raise ScanError("input: the family pile needs either files (paths or globs) or dataset (a Hub name)")
    if dataset is not None:
        parts = open_hub(dataset, split).num_shards
        return Corpus(tuple(Source("hub", dataset, 0, split, part, parts) for part in range(parts)), packing)
    kinds = {".jsonl": "jsonl", ".jsonl.zst": "jsonl", ".parquet": "parquet"}
    return Corpus(_list(files or [], kinds), packing)


@input_family
def text(*, files: str | list[str], packing: Packing = "document") -> Corpus:
    """Plain UTF-8 text files, each one document."""
    return Corpus(_list(files, {"": "text"}), packing)


def _list(files: str | list[str], kinds: dict[str, str]) -> tuple[Source, ...]:
    """The files of paths and globs, each once, in the order of their names."""
    patterns = [files] if isinstance(files, str) else files
    if not patterns:
        raise ScanError("input.files: expected at least one path or glob, got []")
    found: dict[str, tuple[str, int]] = {}
    for pattern in patterns:
        where = place(pattern)
        if isinstance(where, StorePath):
            found |= {str(p): (str(p), size) for p, size in _in_store(where)}
            continue
        path = str(where)
        if os.path.isdir(path):
            raise CorpusError(
                f"input.files: {pattern!r} is a directory; expected files, for instance {pattern.rstrip('/')}/*"
            )
        matched = [path] if os.path.isfile(path) else [p for p in glob.glob(path, recursive=True) if os.path.isfile(p)]
        if not matched:
            raise CorpusError(f"input.files: no file matches {pattern!r} (in {Path.cwd()})")
        for p in matched:
            found.setdefault(os.path.realpath(p), (p, os.path.getsize(p)))
    sources: list[Source] = []
    for path, size in sorted(found.values(), key=lambda p: (Path(p[0]).name, p[0])):
        kind = next((kind for ending, kind in kinds.items() if path.endswith(ending)), None)
        if kind is None:
            raise CorpusError(f"{path}: expected a file that ends in {', '.join(kinds)}")
        sources.append(Source(kind, path, size))
    return tuple(sources)


def _in_store(pattern: StorePath) -> list[tuple[StorePath, int]]:
    try:
        found = matching(pattern)
    except OSError as error:
        raise CorpusError(f"input.files: {pattern} cannot be listed ({reason(error)})") from None
    if not found:
        raise CorpusError(f"input.files: no object matches {str(pattern)!r}")
    return found
