"""A corpus: sources in a fixed order, which of their documents are taken, and how they become
sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from schemas.errors import ScanError
from schemas.tables import carried_name
from workers.inputs.documents import EVERY_DOCUMENT, Reading, Source, Value

Condition = Value | list[Value]


class Tokenizer(Protocol):
    """What a corpus needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        ...

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """The same for several texts at once."""
        ...


@dataclass(frozen=True)
class Choice:
    """Which documents of a corpus are taken, in which order, and what is read of them."""

    reading: Reading = EVERY_DOCUMENT
    shuffle: bool | int = False
    """The seed of their order; true means the seed of the scan, false the order of the files."""
    skip: int = 0

    def resolved(self, seed: int) -> Choice:
        """The same for a scan of some seed."""
        return replace(self, shuffle=seed) if self.shuffle is True else self

    @property
    def shuffled(self) -> bool:
        """Whether the order is another one than that of the files."""
        return self.shuffle is not False


def choice(
    *,
    text_field: str | None = None,
    where: dict[str, Condition | dict[str, Condition]] | None = None,
    shuffle: bool | int | None = None,
    skip: int | None = None,
    columns: list[str] | None = None,
) -> Choice:
    """Options that every family of text has.

    * `text_field`: the field or column that holds the text, `text` if it is left out. A dot leads
      into a field: `body.plain`.
    * `where`: takes only documents whose fields have these values, `where = { pile_set_name =
      ["Github", "ArXiv"], lang = "en" }`. A field is looked for in the document, then in its
      `meta`.
    * `shuffle`: takes the documents of the whole corpus in random order, by a seed of its own or,
      if it is true, by the scan's.
    * `skip`: leaves out the first documents of those that are taken, in their order.
    * `columns`: fields that are carried into the table `sequences`, as text: `meta.year` becomes
      the column `doc_meta_year`. NULL where a document has no such field.
    """
    if skip is not None and skip < 0:
        raise ScanError(f"input.skip: expected 0 or more documents, got {skip}")
    if shuffle is not None and shuffle < 0:
        raise ScanError(f"input.shuffle: expected true or a seed, 0 or more, got {shuffle}")
    if text_field == "":
        raise ScanError("input.text_field: expected the name of a field, got ''")
    carried: dict[str, str] = {}
    for name in columns or []:
        other = carried.setdefault(carried_name(name), name)
        if other != name or (columns or []).count(name) > 1:
            raise ScanError(
                f"input.columns: {other!r} and {name!r} are both the column "
                f"{carried_name(name)}; leave out one"
            )
    wanted = tuple(_wanted(where or {}))
    for name, values in wanted:
        if not values:
            raise ScanError(f"input.where.{name}: expected a value or some values, got []")
    reading = Reading(text_field or "text", wanted, tuple(columns or []))
    return Choice(reading, False if shuffle is None else shuffle, skip or 0)


def _wanted(
    where: Mapping[str, Condition | dict[str, Condition]], prefix: str = ""
) -> Iterator[tuple[str, tuple[Value, ...]]]:
    """Values by dotted name; TOML makes a table of `where.meta.lang`."""
    for name, condition in where.items():
        if isinstance(condition, dict):
            yield from _wanted(condition, f"{prefix}{name}.")
        else:
            values = condition if isinstance(condition, list) else [condition]
            yield prefix + name, tuple(values)


@dataclass(frozen=True)
class Corpus:
    """What a corpus family returns: sources in order, and how documents become sequences."""

    sources: tuple[Source, ...]
    packing: str
    tokens_shuffled: bool = False
    """Whether the tokens of every sequence are permuted."""
    chunk: int | None = None
    """How many tokens of text are repeated to make a sequence; none means that all of them are
    text.
    """
    repeat_bos: bool = False
    """Whether the beginning-of-sequence token, where there is one, stands before every copy of the
    chunk.
    """
    choice: Choice = field(default_factory=Choice)

    @property
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps of it. Files may grow or be mended: the index says whether
        the sequences are the same.
        """
        sources = [
            asdict(s) | {"path": Path(s.path).name if s.kind != "hub" else s.path}
            for s in self.sources
        ]
        kept = [{name: value for name, value in s.items() if name != "bytes"} for s in sources]
        return {"packing": self.packing, "sources": kept}

    @property
    def reading(self) -> Reading:
        """What is read of each document."""
        return self.choice.reading
