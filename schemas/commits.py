"""The ledger of a run: which shards are done, and who made them.

commits/shard-000000.json           one commit, written last by whoever measured the shard
commits/fold-000000-DIGEST.parquet  thousands of commits in one file, which replaces theirs

A shard is done if and only if its commit is in the ledger, as a file of its own or in a fold. Among
folds the later name wins; a fold wins over a file of the same shard, which is what a late or
doubled attempt leaves behind. A fold may also take shards back (`dropped`): then a file counts
again. Folds are written whole before the files they replace are deleted, and no name is used for
two contents, so whoever folds may die, or fold twice, at any time.

A commit says what its data files are by their digests; a fold says it of itself, in its name.
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, cast, get_type_hints

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from schemas.digests import digest_of, digest_of_file
from schemas.errors import RunError
from schemas.parquet import parquet_bytes, read_content
from schemas.places import Place, names, open_whole, reason, settle, write_whole

FOLD = 4096
"""Commits that are folded into one file."""

READERS = 16
"""Files read or deleted at once: a store answers slowly, but many at a time."""


class DataFile(BaseModel):
    """A Parquet file with rows of a committed shard, its path relative to the run directory."""

    model_config = ConfigDict(frozen=True)
    table: str
    intervention: str
    path: str
    rows: int
    """Rows of this shard."""
    bytes: int
    """Size of the file."""
    shards: int = 1
    """How many shards have rows in it; more than one after `headcount compact`."""
    digest: str = ""
    """What its content is known by (`schemas.digests`); empty in commits of older code."""


class Method(BaseModel):
    """How one intervention was measured."""

    model_config = ConfigDict(frozen=True)
    intervention: str
    engine: str
    """fused or dense."""
    precision: str
    """Number formats of the products, one of `schemas.precision.PRECISIONS`."""
    attention: str
    """tiles or kernel: how the fused engine asked attention; matrix: patterns were built. Empty in
    commits of older code, which did not say.
    """
    built_layers: list[int]
    """Layers whose pattern was built because an edit needs it."""


class Version(BaseModel):
    """A library that took part in measuring."""

    model_config = ConfigDict(frozen=True)
    library: str
    version: str


class Commit(BaseModel):
    """The record that makes a shard done."""

    model_config = ConfigDict(frozen=True)
    run_id: str
    shard: int
    start: int
    stop: int
    rows: int
    tokens: int
    seconds: float
    """From the first forward pass to the last data file."""
    compute_seconds: float
    """Of these, forward passes and reductions; a replica computes the next shard while it writes
    one.
    """
    idle_seconds: float
    """How long the replica had waited for this shard, computing nothing."""
    finished: datetime
    """When, by the clock of the host; nothing depends on it but what `headcount status` says of
    speed.
    """
    host: str
    replica: str
    """Tells the replicas of a run apart."""
    attempt: int
    code: str
    """Fingerprint of the code that measured it; empty in commits of older code, which did not say."""
    device: str
    """What it was computed on, for example `cuda NVIDIA H100`; empty in commits of older code."""
    versions: list[Version]
    """Libraries that measured; none in commits of older code."""
    methods: list[Method]
    """How each intervention was measured, in the order of the scan."""
    bad_rows: list[str]
    files: list[DataFile]

    @model_validator(mode="before")
    @classmethod
    def _in_words_of_today(cls, fields: Any) -> Any:
        return (
            in_words_of_today(cast("dict[str, Any]", fields))
            if isinstance(fields, dict)
            else fields
        )


def in_words_of_today(fields: dict[str, Any]) -> dict[str, Any]:
    """A commit of older code, which kept its engines and its precision as strings; any other as it
    is.
    """
    if "engine" not in fields:
        return fields
    kept = {name: value for name, value in fields.items() if name not in ("engine", "precision")}
    interventions = dict.fromkeys(file["intervention"] for file in fields["files"] or ())
    methods = older_methods(fields["engine"], fields["precision"], list(interventions))
    return {"code": "", "device": "", "versions": [], "methods": methods} | kept


BUILT = re.compile(r"(\w+), with built patterns in layers ([\d ]+)")


def older_methods(engines: str, precision: str, interventions: list[str]) -> list[dict[str, Any]]:
    """What a commit of older code said of its engines, as methods.

    >>> older_methods("none: fused; mask: fused, with built patterns in layers 0 2", "float32", ["none", "mask"])[1]
    {'intervention': 'mask', 'engine': 'fused', 'precision': 'float32', 'attention': '', 'built_layers': [0, 2]}
    """
    by_intervention = dict.fromkeys(interventions, engines)
    if ": " in engines:
        by_intervention = dict(part.split(": ", 1) for part in engines.split("; "))
    methods: list[dict[str, Any]] = []
    for intervention, engine in by_intervention.items():
        built = BUILT.fullmatch(engine)
        methods.append(
            {
                "intervention": intervention,
                "engine": built[1] if built else engine,
                "precision": precision,
                "attention": "",
                "built_layers": [int(layer) for layer in built[2].split()] if built else [],
            }
        )
    return methods


@dataclass(frozen=True)
class Failure:
    """A shard that could not be measured, and why."""

    shard: int
    error: str


ARROW = {
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    datetime: pa.timestamp("us", "UTC"),
}


def _arrow(annotation: Any) -> pa.DataType:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return pa.struct([(name, _arrow(type_)) for name, type_ in _fields(annotation)])
    if annotation in ARROW:
        return ARROW[annotation]
    return pa.list_(_arrow(annotation.__args__[0]))


def _fields(model: type[BaseModel]) -> list[tuple[str, Any]]:
    hints = get_type_hints(model)
    return [(name, hints[name]) for name in model.model_fields]


COMMITS = pa.schema([(name, _arrow(type_)) for name, type_ in _fields(Commit)])
"""A fold holds these columns, and `dropped`."""

FILES = COMMITS.field("files").type.value_type
"""What a fold says of each data file."""

DROPPED = pa.field("dropped", pa.bool_())


def read_ledger(directory: Place, run_id: str, columns: Sequence[str] | None = None) -> pa.Table:
    """The commits that count, one row per done shard in shard order: `columns` of them (all unless
    told), and `folded`. A column `files.path` is `files` with nothing but paths.
    """
    while True:
        folds = _folds(names(directory))
        try:
            table = pa.concat_tables(read_parts(directory, run_id, columns))
        except FileNotFoundError:
            continue  # Folded meanwhile: what the list named is now in a fold that it did not.
        # A list is no snapshot: it may lack both a fold and the files that were deleted for it.
        if _folds(names(directory)) == folds:
            return table.take(np.argsort(table["shard"].to_numpy(), kind="stable"))


def read_oldest(directory: Place, run_id: str, columns: Sequence[str]) -> dict[str, Any] | None:
    """Some columns of one of a run's first commits; none before there is one.

    A million commits take a gigabyte, and what holds for all of them can be read off one.
    """
    while True:
        try:
            for part in read_parts(directory, run_id, columns):
                if len(part):
                    return part.slice(0, 1).to_pylist()[0]
            return None
        except FileNotFoundError:
            continue  # Folded meanwhile.


def read_parts(
    directory: Place, run_id: str, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """The same as `read_ledger` in parts of bounded size, the oldest fold first, loose commits last;
    FileNotFoundError where somebody else folds meanwhile.
    """
    wanted = list(dict.fromkeys(["shard", *(COMMITS.names if columns is None else columns)]))
    found = list(names(directory))
    folds = _folds(found)
    files = [n for n in found if n.startswith("shard-") and n.endswith(".json")]
    with ThreadPoolExecutor(READERS) as pool:
        keys = list(pool.map(lambda name: _read_keys(directory / name), folds))
        counts = _that_count(keys)
        folded = [key["shard"].to_numpy()[count] for key, count in zip(keys, counts, strict=True)]
        schema = _schema(wanted)
        loose = _read_files(pool, directory, run_id, files, schema)
        new = ~np.isin(loose["shard"].to_numpy(), np.concatenate([*folded, np.empty(0, int)]))
        for start in range(0, len(folds), READERS):
            tables = pool.map(
                lambda name, count: _read_fold(directory / name, wanted, count),
                folds[start : start + READERS],
                counts[start : start + READERS],
            )
            for table in tables:
                yield _marked(table, folded=True)
        yield _marked(loose.filter(pa.array(new)), folded=False)


def _read_fold(file: Place, wanted: list[str], count: np.ndarray) -> pa.Table:
    """Some columns of the rows that count in a fold, which older code may have written."""
    said_otherwise = [name for name in wanted if name in ("code", "device", "versions", "methods")]
    older = ["engine", "precision", "files"] if said_otherwise else []
    schema = _schema(wanted)
    leaves = [name.replace("files.", "files.list.element.") for name in [*wanted, *older]]
    with _opened(file) as content:
        table = read_content(content, list(dict.fromkeys(leaves)))
    table = table if count.all() else table.filter(pa.array(count))
    if said_otherwise and "engine" in table.column_names:
        rows = table.select(older).to_pylist()
        translated = [in_words_of_today(row) for row in rows]
        for name in said_otherwise:
            type_ = COMMITS.field(name).type
            table = table.append_column(name, pa.array([row[name] for row in translated], type_))
    if "files" in schema.names:
        of_files = schema.field("files")
        files = _with_fields(table["files"].combine_chunks(), of_files.type)
        table = table.set_column(table.schema.get_field_index("files"), of_files, files)
    return table.select(schema.names)


def _schema(wanted: Sequence[str]) -> pa.Schema:
    """The schema of some columns, of which `files.path` and the like are parts of `files`."""
    parts = [name.partition(".")[2] for name in wanted if name.startswith("files.")]
    if not parts or "files" in wanted:
        return pa.schema([COMMITS.field(name) for name in wanted if "." not in name])
    whole = [COMMITS.field(name) for name in wanted if "." not in name]
    files = pa.struct([FILES.field(name) for name in parts])
    return pa.schema([*whole, pa.field("files", pa.list_(files))])


def _with_fields(lists: pa.ListArray, type_: pa.ListType) -> pa.ListArray:
    """Lists of files with the fields of `type_`; older code kept no digests."""
    if lists.type == type_:
        return lists
    files, wanted = lists.values, type_.value_type
    known = {files.type.field(i).name for i in range(files.type.num_fields)}
    fields = [wanted.field(i) for i in range(wanted.num_fields)]
    arrays = [
        files.field(f.name) if f.name in known else pa.array([""] * len(files), f.type)
        for f in fields
    ]
    return pa.ListArray.from_arrays(
        lists.offsets, pa.StructArray.from_arrays(arrays, fields=fields)
    )


OWN_DIGEST = re.compile(r"fold-\d+-([0-9a-f]{32})\.parquet")
"""A fold whose name says what its content is known by; the names of older code are shorter."""


def _read_keys(file: Place) -> pa.Table:
    """Which shards a fold has commits of; a fold that is not as it was written raises `RunError`."""
    try:
        with _opened(file) as content:
            known_by = OWN_DIGEST.fullmatch(file.name)
            if known_by is not None and digest_of_file(content) != known_by[1]:
                raise pa.ArrowInvalid("its content is not what its name says")
            return read_content(content, ["shard", DROPPED.name])
    except FileNotFoundError:
        raise  # Folded meanwhile.
    except (OSError, pa.ArrowException) as error:
        raise RunError(
            f"{file}: damaged ({reason(error)}); it holds commits. Delete it, and headcount resume "
            f"{file.parent.parent} measures their shards anew; headcount rm deletes the run"
        ) from None


def _opened(file: Place) -> Any:
    """A fold as a file; in a store it is fetched at once."""
    return open_whole(file) if isinstance(file, Path) else pa.BufferReader(file.read_bytes())


def _that_count(folds: list[pa.Table]) -> list[np.ndarray]:
    """Of each fold, the rows that count: the last one of each shard, unless it drops the shard."""
    if not folds:
        return []
    both = pa.concat_tables(folds)
    shards = both["shard"].to_numpy()
    _, last = np.unique(shards[::-1], return_index=True)
    count = np.zeros(len(shards), bool)
    count[len(shards) - 1 - last] = True
    count &= ~both[DROPPED.name].to_numpy()
    return np.split(count, np.cumsum([len(fold) for fold in folds])[:-1])


def _marked(table: pa.Table, folded: bool) -> pa.Table:
    return table.append_column("folded", pa.array(np.full(len(table), folded)))


def _folds(found: Iterable[str]) -> list[str]:
    return sorted(name for name in found if name.startswith("fold-") and name.endswith(".parquet"))


def _read_files(
    pool: ThreadPoolExecutor, directory: Place, run_id: str, files: list[str], schema: pa.Schema
) -> pa.Table:
    """Commits that are files of their own; what is no commit of this run is passed over."""
    tables = [schema.empty_table()]
    remaining = iter(files)
    while batch := list(islice(remaining, FOLD)):
        commits = (
            c
            for c in pool.map(lambda name: read_commit(directory / name, run_id), batch)
            if c is not None
        )
        tables.append(
            pa.Table.from_pylist(
                [c.model_dump(include=set(schema.names)) for c in commits], schema=schema
            )
        )
    return pa.concat_tables(tables)


def commit_name(shard: int) -> str:
    """Name of the file that commits a shard."""
    return f"shard-{shard:06d}.json"


def read_commit(file: Place, run_id: str) -> Commit | None:
    """The commit in a file; none if it is not one of this run."""
    try:
        commit = Commit.model_validate_json(file.read_bytes())
    except ValidationError:
        return None
    return commit if commit.run_id == run_id and file.name == commit_name(commit.shard) else None


def commits_of(table: pa.Table) -> Iterator[Commit]:
    """The rows of a ledger as commits."""
    for batch in table.select(COMMITS.names).to_batches(FOLD):
        yield from (Commit.model_validate(row) for row in batch.to_pylist())


def fold(directory: Place, commits: Sequence[Commit], dropped: Sequence[int] = ()) -> None:
    """Put commits into one file, then delete the files of their own.

    The same file takes the shards `dropped` back. They must have no file of their own, which would
    count again.
    """
    rows = [commit.model_dump() for commit in commits]
    rows += _dropped_rows(commits[0].run_id, dropped) if dropped else []
    write_fold(directory, pa.Table.from_pylist(rows, schema=COMMITS), len(dropped))
    delete(directory / commit_name(c.shard) for c in commits)


def drop(directory: Place, run_id: str, shards: Sequence[int]) -> None:
    """Take folded shards back: they are missing again."""
    rows = _dropped_rows(run_id, shards)
    write_fold(directory, pa.Table.from_pylist(rows, schema=COMMITS), len(shards))


def _dropped_rows(run_id: str, shards: Sequence[int]) -> list[dict[str, Any]]:
    blank: dict[str, Any] = dict.fromkeys(COMMITS.names)
    return [blank | {"run_id": run_id, "shard": shard} for shard in shards]


def write_fold(directory: Place, table: pa.Table, dropped: int = 0) -> None:
    """Put commits into one file; what it replaces is still there. The last `dropped` rows take
    shards back.
    """
    numbers = [int(n[5:11]) for n in names(directory) if n.startswith("fold-")]
    marks = np.arange(len(table)) >= len(table) - dropped
    content = parquet_bytes(table.append_column(DROPPED, pa.array(marks, pa.bool_())))
    name = f"fold-{max(numbers, default=-1) + 1:06d}-{digest_of(content)}.parquet"
    write_whole(directory / name, content)
    settle(directory)


def delete(files: Iterable[Place]) -> None:
    """Delete files, many at a time; those that are gone already are no problem."""
    with ThreadPoolExecutor(READERS) as pool:
        for _ in pool.map(lambda file: file.unlink(missing_ok=True), files):
            pass
