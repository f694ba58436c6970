"""The Parquet tables: what one row is, which columns there are, and how files are sorted.

A table is an object. `schemas.filled_tables.TABLES` lists all. Each kind of measurement fills
one.
"""
# pyarrow has no types.
# pyright: basic

import inspect
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

COLUMN = re.compile(r"^(\w+) \((\w+)(\[\])?\): (.+(?:\n .+)*)", re.MULTILINE)
"""A column in a text: its name, its type and its description, which further lines may go on."""

Written = Literal["every shard", "where asked for", "once", "when shards are merged"]
"""When a table is written.

every shard: by each shard, under each intervention.
where asked for: the same, but only if the scan names a formula that fills the table.
once: with shard 0.
when shards are merged: by `headcount compact`, from rows of other tables that it merges.
"""


@dataclass(frozen=True)
class Column:
    """A column of a table or of a view."""

    name: str
    type: pa.DataType
    description: str
    nullable: bool = True
    facts: tuple[tuple[str, str], ...] = ()  # more metadata of the field: unit, source, range

    @property
    def field(self) -> pa.Field:
        """The column as a field of a Parquet schema."""
        metadata = {"description": self.description, **dict(self.facts)}
        return pa.field(self.name, self.type, nullable=self.nullable, metadata=metadata)


def described(text: str) -> tuple[Column, ...]:
    """Columns that may be NULL, from lines `name (type): description`; `int32[]` is a list.

    >>> described("labels (string[]): Role of each token.")[0].type
    ListType(list<item: string>)
    """
    columns: list[Column] = []
    for name, alias, is_list, description in COLUMN.findall(inspect.cleandoc(text)):
        item = pa.type_for_alias(alias)
        column_type = pa.list_(item) if is_list else item
        columns.append(Column(name, column_type, " ".join(description.split())))
    return tuple(columns)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table. The folder of its files and the view in SQL have its name."""

    name: str
    grain: tuple[str, ...]  # what one row is about, besides its run and its intervention
    content: str  # what a row holds, in a few words
    keys: tuple[Column, ...]  # columns that are never NULL, besides those of `PARTITIONS`
    columns: tuple[Column, ...] = ()  # other columns that every scan writes
    order: tuple[str, ...]  # sort columns of merged files, by which readers skip row groups
    written: Written
    row_group: int | None = None  # rows of a group of a merged file, if not as many as usual

    @property
    def description(self) -> str:
        """What the view holds, in one sentence."""
        partitions = ("run",) if self.written == "once" else ("run", "intervention")
        *first_words, last_word = (*partitions, *self.grain)
        return f"One row per {', '.join(first_words)} and {last_word}: {self.content}"

    @property
    def own(self) -> dict[str, Column]:
        """The columns that every scan writes, by name."""
        return {column.name: column for column in (*self.keys, *self.columns)}

    def has(self, key: str) -> bool:
        """Whether a column is one of its keys."""
        return any(column.name == key for column in self.keys)

    def schema(self, measured: Iterable[Column] = ()) -> pa.Schema:
        """The schema of its rows: its own columns, then the measured ones."""
        return pa.schema([column.field for column in (*self.own.values(), *measured)])


def measured_column(name: str, facts: Mapping[str, Any]) -> Column:
    """The column of a formula, from its facts or from its record in a manifest."""
    is_list = facts.get("per_token") or facts.get("axis", "none") != "none"
    column_type = pa.list_(pa.float32()) if is_list else pa.float32()
    description = facts.get("description", "")
    if axis := facts.get("axis"):
        # The column is a list. Its description must say what the index is.
        description = f"By {axis}, from 0: {description}"
    metadata = [(fact, facts[fact]) for fact in ("unit", "source") if fact in facts]
    if facts.get("range"):
        metadata.append(("range", json.dumps(facts["range"])))
    return Column(name, column_type, description, facts=tuple(metadata))


COMPONENT = described("""
    component (int16): Component of a head's queries, from 0, of values along components or pairs of
        them; NULL for the others.
""")

OPTIONAL_PLACES: dict[str, tuple[Column, ...]] = {
    "dimension": described("""
        dimension (int32): Coordinate of the residual stream, from 0, of values along coordinates;
            NULL for the others.
    """),
    "component": COMPONENT,
    "pair of components": COMPONENT
    + described("""
        other_component (int16): The other component, never before the first one, of values along
            pairs of components; NULL for the others.
    """),
    "candidate": described("""
        candidate (int16): Candidate of a search, from 0, in the order that the profile's formula
            lists; NULL for the others.
    """),
    "part": described("""
        part (int16): Part of a sum, from 0, in the order that the profile's formula lists; NULL for
            the others.
    """),
    "earlier head": described("""
        earlier_layer (int16): Layer of the earlier head, from 0, of values by pair of heads; NULL
            for the others.
        earlier_head (int16): The earlier head within its layer, from 0, of values by pair of heads;
            NULL for the others.
    """),
}
"""Columns that say where a value lies on an axis, by axis.

A table that does not have them in every file has them if a formula runs along this axis. So runs
that were measured before there was such an axis are read and continued as they are.
"""


def uniform_column(statistic: str) -> str:
    """The column of `sequences` that holds a statistic's uniform baseline."""
    return f"uniform_{statistic}"


def measured_uniform(name: str, facts: Mapping[str, Any]) -> Column:
    """The column of `sequences` with what uniform attention would score as a statistic."""
    description = f"What uniform attention would score as {name}."
    return measured_column(uniform_column(name), {**facts, "description": description})


def carried_name(field: str) -> str:
    """The column of `sequences` that carries a field of the corpus's documents.

    >>> carried_name("meta.year"), carried_name("Source URL")
    ('doc_meta_year', 'doc_source_url')
    """
    return "doc_" + re.sub(r"\W+", "_", field.lower())


def carried_column(field: str) -> Column:
    """The column of `sequences` that carries a field of the corpus's documents."""
    description = (
        f"{field} of the document that holds the first token of the text, as text; NULL where it "
        "has none."
    )
    return Column(carried_name(field), pa.string(), description)


WORD = pa.dictionary(pa.int32(), pa.string())
"""Type of a word that a whole file repeats. pandas gives the same type to a directory's name."""

RUN_ID = Column("run_id", WORD, "Run that the row belongs to.", nullable=False)
INTERVENTION = Column(
    "intervention",
    WORD,
    "Intervention of the model under which it was measured; none is the untouched model.",
    nullable=False,
)
PARTITIONS = (RUN_ID, INTERVENTION)
"""Columns of every file that are also in the names of the directories around it.

Some readers of a glob ignore directories. Without the columns in the file they would mix
interventions and runs, and no column would tell the rows apart.
"""

PARTITION_NAMES = [column.name for column in PARTITIONS]


def with_partitions(rows: pa.Table, run_id: str, intervention: str) -> pa.Table:
    """Rows with the columns `run_id` and `intervention` before the others."""
    # A dictionary of one word, to which every row refers by index 0.
    indices = pa.array(np.zeros(rows.num_rows, np.int32))
    partitions = [
        pa.DictionaryArray.from_arrays(indices, [word]) for word in (run_id, intervention)
    ]
    schema = rows.schema
    for column in reversed(PARTITIONS):
        schema = schema.insert(0, column.field)
    return pa.Table.from_arrays([*partitions, *rows.columns], schema=schema)


INPUT_FAMILY, SHARD, SEQUENCE, LAYER, HEAD, STATISTIC = (
    replace(column, nullable=False)
    for column in described("""
        input_family (string): Family of inputs that the sequence comes from.
        shard (int32): Shard that the sequence belongs to: the unit of work and of commit.
        sequence (int64): Index of the sequence in the scan; with the seed and the options it
            determines the tokens.
        layer (int16): Layer, from 0.
        head (int16): Head within the layer, from 0.
        statistic (string): Statistic: a column of heads.
    """)
)

OF_SEQUENCE = (INPUT_FAMILY, SHARD, SEQUENCE)  # keys of a table with a row per sequence
OF_HEAD = (*OF_SEQUENCE, LAYER, HEAD)  # keys of a table with a row per sequence, layer and head

HEADS = Table(
    name="heads",
    grain=("sequence", "layer", "head"),
    content="every statistic as it was measured.",
    keys=OF_HEAD,
    order=("layer", "head", "sequence"),
    written="every shard",
)

SEQUENCES = Table(
    name="sequences",
    grain=("sequence",),
    content="where it came from, its tokens, what uniform attention would score, what the model "
    "predicts.",
    keys=OF_SEQUENCE,
    columns=described("""
        file (string): File that the text comes from; NULL for synthetic input.
        row (int64): Row (line) of the file that holds the first token of the text, from 0.
        offset (int32): Token of that row at which the sequence starts, from 0.
        document (int64): Document with most tokens of the text, of equal ones the first: its number
            in the corpus, from 0, in the order of the files. Standard errors take documents for
            independent. NULL for synthetic input, where every sequence counts as a document.
        pile_set_name (string): Subset of the Pile that the row belongs to; NULL if the corpus does
            not say.
        n_tokens (int32): Tokens in the sequence, the beginning-of-sequence token included.
        tokens (int32[]): Token ids, as the model saw them.
        labels (string[]): Role of each token in the layout of the input family, '' if it has none;
            NULL if the family does not label tokens.
    """),
    order=("sequence",),
    written="every shard",
)

CURVES = Table(
    name="curves",
    grain=("sequence", "layer", "head"),
    content="lists with a number for every key, query or lag.",
    keys=OF_HEAD,
    order=("layer", "head", "sequence"),
    written="where asked for",
)

PROFILES = Table(
    name="profiles",
    grain=("shard", "layer", "head", "profile", "entry"),
    content="means over the shard's sequences.",
    keys=(SHARD, LAYER),
    columns=described("""
        head (int16): Head within the layer, from 0; NULL if all heads of a layer share the values.
        profile (string): Name of the profile, which was averaged over the sequences of the shard.
        query (int32): Query, from 0, of profiles along queries or pairs; NULL for the others.
        key (int32): Key, from 0, of profiles along keys or pairs; NULL for the others.
        lag (int32): Lag, query - key, of profiles along lags; NULL for the others.
        count (int64): Number of sequences.
        mean (double): Mean over the sequences.
        m2 (double): Sum over the sequences of the squared deviation from the mean.
    """),
    order=("profile", "layer", "head", "query", "key", "lag", "shard"),
    written="where asked for",
)

WEIGHTS = Table(
    name="weights",
    grain=("layer", "head", "weight statistic", "index"),
    content="what the weights say without any input.",
    keys=(),
    columns=described("""
        layer (int16): Layer, from 0; NULL for values that a model has only once.
        head (int16): Head within the layer, from 0; NULL if heads share the values.
        weight (string): Name of the weight statistic, which was computed from the weights alone.
        position (int32): Position, from 0, of statistics along positions; NULL for the others.
        dimension (int32): Coordinate of the residual stream, from 0, of statistics along
            coordinates; NULL for the others.
        value (double): Value; NULL if it is not defined.
    """),
    order=("weight", "layer", "head", "position", "dimension"),
    written="once",
)

ROLLUPS = Table(
    name="rollups",
    grain=("statistic", "layer", "head", "subset of the Pile", "merged shards"),
    content="moments and histogram of the values in heads, over the shards that were merged "
    "together; the views head_summaries, subset_summaries, distributions and head_quantiles add "
    "them up.",
    keys=(INPUT_FAMILY, STATISTIC, LAYER, HEAD),
    columns=described("""
        by_subset (bool): Whether the row is of one subset of the Pile, and not of all sequences.
        pile_set_name (string): Subset of the Pile that the sequences belong to; NULL if the corpus
            does not say, or if the row is of all sequences.
        document (int64): Document of the sequences, if it may have others in shards that were not
            merged with these; NULL if the row is of all other documents.
        count (int32): Number of sequences on which the statistic is defined.
        undefined (int32): Number of sequences on which it is NULL.
        mean (double): Mean of the defined values; NULL if there are none.
        m2 (double): Sum of the squared deviations from the mean.
        documents (int32): Number of documents with a defined value.
        document_m2 (double): Sum over documents d of t_d², where t_d is the sum of d's deviations
            from the mean.
        document_product (double): Sum over documents d of t_d n_d, where n_d is the number of d's
            defined values.
        document_squares (double): Sum over documents d of n_d².
        document_fourths (double): Sum over documents d of n_d⁴.
        minimum (float): Smallest value.
        maximum (float): Largest value.
        range_low (double): Smallest possible value. If it and range_high are finite, the 256 bins
            between them are equal. Otherwise bin b > 0 goes from 2^((b-1)/16 - 40) to 2^(b/16 -
            40), bin -b is its mirror image, and bin 0 is what lies between.
        range_high (double): Largest possible value.
        bins (int16[]): Numbers of the bins with a value, ascending.
        counts (int32[]): Number of values in each of these bins.
    """),
    # Few rows are of all sequences. Of the others, dashboards ask for those of one head.
    order=("by_subset", "layer", "head", "statistic", "pile_set_name", "document"),
    written="when shards are merged",
    row_group=4096,
)

SAMPLE_ROWS = 2_000_000  # rows of `samples`, at most, of a run under one intervention

SAMPLES = Table(
    name="samples",
    grain=("sequence", "layer", "head"),
    content="the rows of heads of one of every 16 sequences, in large runs of one of every 32, 64, "
    "128 and so on, over the shards that were merged.",
    keys=OF_HEAD,
    order=HEADS.order,
    written="when shards are merged",
    row_group=4096,
)


def table_of(columns: Mapping[str, Any], schema: pa.Schema) -> pa.Table:
    """A table with the columns of `schema`.

    NaN becomes NULL. A column without values is all NULL. A matrix becomes a column of lists.
    """
    rows = len(next(iter(columns.values())))
    arrays: list[pa.Array] = []
    for field in schema:
        values = columns.get(field.name)
        if values is None:
            arrays.append(pa.nulls(rows, field.type))
            continue
        is_matrix = isinstance(values, np.ndarray) and values.ndim > 1
        # from_pandas is what makes NaN a NULL.
        array = pa.array(values.ravel() if is_matrix else values, from_pandas=True)
        if is_matrix:
            # Every list has the length of a row, so the flat values need no copying into lists.
            offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
            array = pa.ListArray.from_arrays(offsets, array)
        arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.Table.from_arrays(arrays, schema=schema)
