"""A corpus: sources in a fixed order, which of their documents are taken, and how they become
sequences.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from headcount.schemas.errors import ScanError
from headcount.schemas.tables import carried_name
from headcount.workers.inputs.corpus.documents import PART, Reading, Source, Value

AllowedValues = Value | list[Value]  # what `where` may say of a field: one value, or several
Conditions = tuple[tuple[str, tuple[Value, ...]], ...]  # allowed values, by name of field


class Tokenizer(Protocol):
    """What a corpus needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        ...

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """Token ids of several texts at once."""
        ...


@dataclass(frozen=True)
class Choice:
    """Which documents of a corpus are taken, in which order, and what is read of them."""

    text_field: str = "text"
    where: Conditions = ()
    columns: tuple[str, ...] = ()  # fields that are carried into `sequences`
    shuffle: bool | int = False  # seed of the order; True: the scan's, False: as the files
    skip: int = 0  # how many of the first documents are left out, in their order

    def resolved(self, seed: int) -> "Choice":
        """The choice for a scan with this seed, in which `shuffle` is no longer True."""
        return replace(self, shuffle=seed) if self.shuffle is True else self

    @property
    def shuffled(self) -> bool:
        """Whether the order is not that of the files."""
        # The seed 0 shuffles, too.
        return self.shuffle is not False


def choice(
    *,
    text_field: str | None = None,
    where: dict[str, AllowedValues | dict[str, AllowedValues]] | None = None,
    shuffle: bool | int | None = None,
    skip: int | None = None,
    columns: list[str] | None = None,
) -> Choice:
    """Options that every family of text has.

    * `text_field`: the field or column that holds the text, `text` by default. A dot leads into a
      field: `body.plain`.
    * `where`: takes only documents whose fields have these values, `where = { pile_set_name =
      ["Github", "ArXiv"], lang = "en" }`. A field is looked for in the document, then in its
      `meta`.
    * `shuffle`: takes the documents of the whole corpus in random order. A number is the seed of
      the order; true means the seed of the scan.
    * `skip`: leaves out this many documents at the beginning of that order.
    * `columns`: fields that are carried into the table `sequences`, as text: `meta.year` becomes
      the column `doc_meta_year`. The value is NULL if a document does not have the field.
    """
    if skip is not None and skip < 0:
        raise ScanError(f"input.skip: expected 0 or more documents, got {skip}")
    if shuffle is not None and shuffle < 0:
        raise ScanError(f"input.shuffle: expected true or a seed, 0 or more, got {shuffle}")
    _check_columns(columns or [])
    conditions = tuple(_conditions(where or {}))
    for name, values in conditions:
        if not values:
            raise ScanError(f"input.where.{name}: expected a value or some values, got []")
    return Choice(
        text_field or "text",
        conditions,
        tuple(columns or []),
        False if shuffle is None else shuffle,
        skip or 0,
    )


def _check_columns(fields: list[str]) -> None:
    """Refuse fields that would become one column of `sequences`."""
    field_of_column: dict[str, str] = {}
    for name in fields:
        column = carried_name(name)
        # `meta.year` and `meta_year` are both `doc_meta_year`.
        first_name = field_of_column.setdefault(column, name)
        if first_name != name or fields.count(name) > 1:
            raise ScanError(
                f"input.columns: {first_name!r} and {name!r} are both the column {column}; leave "
                "out one"
            )


def _conditions(
    where: Mapping[str, AllowedValues | dict[str, AllowedValues]], prefix: str = ""
) -> Iterator[tuple[str, tuple[Value, ...]]]:
    """Allowed values by dotted name: TOML makes a table of `where.meta.lang`."""
    for name, condition in where.items():
        if isinstance(condition, dict):
            yield from _conditions(condition, f"{prefix}{name}.")
        else:
            values = condition if isinstance(condition, list) else [condition]
            yield prefix + name, tuple(values)


@dataclass(frozen=True)
class ReplacedToken:
    """A position of every sequence that has another token than the text."""

    position: int  # in the sequence, with the beginning-of-sequence token
    token: int | None  # None means a random token for each sequence


@dataclass(frozen=True)
class CountedTokens:
    """The tokens that a corpus is asked how often it has them: ordinary ones in `low .. high-1`."""

    low: int = 0
    high: int | None = None  # None means the end of the vocabulary


@dataclass(frozen=True)
class Corpus:
    """What a family of text returns: sources in order, and how documents become sequences."""

    sources: tuple[Source, ...]
    packing: str
    """`document`: a sequence is the first tokens of one document. `concat`: documents are joined
    and cut.
    """
    tokens_shuffled: bool = False  # whether the tokens of every sequence are permuted
    kept: int | None = None  # how many permuted tokens are kept and repeated; None if all are
    chunk: int | None = None  # tokens of text that are repeated to make a sequence; None if none
    repeat_bos: bool = False  # whether that token precedes every copy of the chunk
    before: str = ""  # what is put before every text
    replaced: ReplacedToken | None = None  # what stands in place of one of the text
    counted: CountedTokens | None = None
    """Which tokens are drawn as often as the whole corpus has them; None if sequences are text."""
    choice: Choice = field(default_factory=Choice)

    @property
    def is_read_whole(self) -> bool:
        """Whether its last document may matter to its first sequence."""
        return self.choice.shuffled or self.counted is not None

    @property
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps of it: no sizes, which may grow; the index sees changes."""
        sources: list[dict[str, Any]] = []
        for source in self.sources:
            fields = asdict(source)
            del fields["bytes"]
            if source.kind != "hub":
                # A file may lie elsewhere when the run is continued.
                fields["path"] = Path(source.path).name
            sources.append(fields)
        return {"packing": self.packing, "sources": sources}

    @property
    def reading(self) -> Reading:
        """What the token store keeps of each document, whichever a scan takes."""
        tested_fields = {name for name, _ in self.choice.where if name != PART}
        fields = tested_fields | set(self.choice.columns)
        return Reading(self.choice.text_field, tuple(sorted(fields)), self.before)
