"""Small runs with the real layout and schemas, and numbers that are easy to check by hand."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import pytest

from headcount.queries.ask.answers import run_query
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.schemas.files.commit import Commit, DataFile, Method, Version
from headcount.schemas.files.digests import digest_of
from headcount.schemas.files.manifest import LAYOUT, Manifest
from headcount.schemas.files.parquet import parquet_bytes
from headcount.schemas.files.run_directory import RunDirectory, data_path
from headcount.schemas.fingerprints import fingerprint
from headcount.schemas.formulas import Formula
from headcount.schemas.kinds import table_schema
from headcount.schemas.places import Place, names
from headcount.schemas.predictions import PREDICTIONS
from headcount.schemas.profiles import PROFILES
from headcount.schemas.statistics import STATISTICS
from headcount.schemas.tables import CURVES, HEADS, SEQUENCES, WEIGHTS, Table, uniform_column
from headcount.schemas.tables import PROFILES as PROFILES_TABLE
from headcount.schemas.weight_statistics import WEIGHT_STATISTICS


class Row(NamedTuple):
    """Where a toy number belongs."""

    intervention: str
    sequence: int
    layer: int
    head: int


def local(where: Place) -> Path:
    """A place on this disk, as a path."""
    assert isinstance(where, Path)
    return where


def open_tables(path: str | Place) -> RunDatabase:
    """Runs without the shipped views and comments: it opens in a fraction of the time."""
    # This folder has no `.sql` files.
    return open_runs(path, queries=Path(__file__).parent)


def ask(runs: RunDatabase | str | Place, query: str) -> list[tuple[Any, ...]]:
    """The rows of an answer, with the views that the query names."""
    database = runs if isinstance(runs, RunDatabase) else open_runs(runs)
    return list(run_query(database, query).rows())


@contextmanager
def one_line(kind: type[Exception], match: str | None = None) -> Iterator[None]:
    """Expects an error that is one line."""
    with pytest.raises(kind, match=match) as refusal:
        yield
    assert "\n" not in str(refusal.value)


Cell = Callable[[Row], float | None]
Entry = dict[str, Any]
"""A row of `profiles`, but for its shard, or a row of `weights`."""


def _record(formula: Formula) -> dict[str, Any]:
    """What the manifest says of a formula, with the fingerprint of its own code alone."""
    return formula.record | {"fingerprint": fingerprint(*formula.code)}


@dataclass(frozen=True, kw_only=True)
class ToyRun:
    """What a toy run is of. Shards that are not committed are not written at all."""

    name: str
    columns: Mapping[str, Cell]
    """The value of each statistic for each row."""
    layers: int = 2
    heads: int = 3
    n_ctx: int = 5
    family: str = "uniform_random"
    sequences: int = 4
    per_shard: int = 2
    commit: Iterable[int] | None = None
    """The shards to write. Default: all."""
    interventions: Sequence[str] = ("none",)
    uniform_baseline: float = 0.25
    pile_sets: Sequence[str | None] = (None,)
    """Parts of the Pile, which the sequences take in turn."""
    documents: Sequence[int | None] = (None,)
    """The documents of the sequences, likewise."""
    model: str = "toy"
    fingerprints: Mapping[str, str] | None = None
    """Fingerprints of statistics that differ from their own."""
    losses: Callable[[str, int], float] | None = None
    """The loss under each intervention of each sequence."""
    profiles: Callable[[int], list[Entry]] | None = None
    """The rows of `profiles` of a shard."""
    curves: Mapping[str, Callable[[Row], list[float]]] | None = None
    """The lists of each row of `curves`."""
    weights: Sequence[Entry] = ()
    """The rows of `weights`, which are written with shard 0."""

    @property
    def shards(self) -> int:
        return -(-self.sequences // self.per_shard)

    @property
    def statistics(self) -> tuple[Formula, ...]:
        return STATISTICS.select(list(self.columns))

    @property
    def cells(self) -> dict[str, Cell]:
        """The values by column: a statistic with options has these in its name."""
        return {STATISTICS.find(text).name: cell for text, cell in self.columns.items()}

    @property
    def kinds(self) -> dict[str, dict[str, dict[str, Any]]]:
        """What the manifest says of every formula."""
        every_row = _rows(self.interventions, range(self.sequences), self.layers, self.heads)
        statistics: dict[str, dict[str, Any]] = {}
        for statistic in self.statistics:
            values = [
                value for value in map(self.cells[statistic.name], every_row) if value is not None
            ]
            low, high = statistic.facts["range"]
            # Widened to hold the toy numbers. None is a range without an end.
            ends = [
                None if low is None else min([low, *values]),
                None if high is None else max([high, *values]),
            ]
            statistics[statistic.name] = _record(statistic) | {"range": ends}
        for name, changed in (self.fingerprints or {}).items():
            statistics[name]["fingerprint"] = changed
        kinds = {"statistics": statistics}
        if self.losses:
            kinds["predictions"] = {"loss": _record(PREDICTIONS["loss"])}
        if self.profiles:
            names = {entry["profile"] for entry in self.profiles(0)}
            kinds["profiles"] = {name: _record(PROFILES[name]) for name in names}
        if self.curves:
            kinds["curves"] = {name: _record(PROFILES[name]) for name in self.curves}
        if self.weights:
            names = {entry["weight"] for entry in self.weights}
            kinds["weight_statistics"] = {name: _record(WEIGHT_STATISTICS[name]) for name in names}
        return kinds

    @property
    def manifest(self) -> Manifest:
        return Manifest(
            layout=LAYOUT, run_id=self.name, created="2026-01-02T03:04:05Z",
            identity={
                "scan": {
                    "model": self.model, "weight_processing": "raw", "precision": "float32",
                    "engine": "fused", "n_ctx": self.n_ctx, "bos": True, "seed": 7,
                    "input": {"family": self.family, "period": 2},
                    "interventions": list(self.interventions),
                    "sequences_per_shard": self.per_shard,
                },
                "model": {"fingerprint": f"weights of {self.model}"},
                "statistics": {each.name: fingerprint(*each.code) for each in self.statistics},
            },
            shards=self.shards, sequences=self.sequences, kinds=self.kinds,
            model={
                "name": self.model, "n_layers": self.layers, "n_heads": self.heads, "d_model": 12,
                "d_head": 4, "n_ctx": 64, "d_vocab": 9,
            },
            code="c0de", versions={},
        )  # fmt: skip

    def span(self, shard: int) -> range:
        """The sequences of a shard."""
        return range(shard * self.per_shard, min((shard + 1) * self.per_shard, self.sequences))

    def tables(self, shard: int, intervention: str) -> dict[str, pa.Table]:
        """The rows of a shard under an intervention, by table."""
        span = self.span(shard)
        rows = _rows([intervention], span, self.layers, self.heads)
        of_shard = {"input_family": self.family, "shard": shard}
        keys = [of_shard | row._asdict() for row in rows]
        sequences = [
            of_shard
            | {
                "sequence": sequence,
                "document": self.documents[sequence % len(self.documents)],
                "pile_set_name": self.pile_sets[sequence % len(self.pile_sets)],
                "n_tokens": self.n_ctx,
                "tokens": list(range(self.n_ctx)),
            }
            | {
                uniform_column(statistic.name): self.uniform_baseline
                for statistic in self.statistics
                if statistic.uniform_baseline
            }
            | ({"loss": self.losses(intervention, sequence)} if self.losses else {})
            for sequence in span
        ]
        of_statistics = {STATISTICS.field: self.statistics}
        of_sequences = of_statistics | (
            {PREDICTIONS.field: [PREDICTIONS["loss"]]} if self.losses else {}
        )

        def of_rows(table: Table, cells: Mapping[str, Callable[[Row], Any]], of: Any) -> pa.Table:
            content = [
                key | {name: cell(row) for name, cell in cells.items()}
                for key, row in zip(keys, rows, strict=True)
            ]
            return pa.Table.from_pylist(content, schema=table_schema(table, of))

        tables = {
            "heads": of_rows(HEADS, self.cells, of_statistics),
            "sequences": pa.Table.from_pylist(
                sequences, schema=table_schema(SEQUENCES, of_sequences)
            ),
        }
        if self.profiles:
            entries = [{**entry, "shard": shard} for entry in self.profiles(shard)]
            kept = {PROFILES.field: [PROFILES[entry["profile"]] for entry in entries]}
            schema = table_schema(PROFILES_TABLE, kept)
            tables["profiles"] = pa.Table.from_pylist(entries, schema=schema)
        if self.curves:
            kept = {"curves": [PROFILES[name] for name in self.curves]}
            tables["curves"] = of_rows(CURVES, self.curves, kept)
        return tables


def write_run(out: Path, name: str, columns: Mapping[str, Cell], **facts: Any) -> RunDirectory:
    """Write a toy run. `facts` are the fields of `ToyRun` that differ from the default."""
    toy = ToyRun(name=name, columns=columns, **facts)
    run = RunDirectory.of(out, name)
    local(run.path).mkdir(parents=True)
    local(run.manifest_file).write_text(toy.manifest.model_dump_json())
    for shard in range(toy.shards) if toy.commit is None else toy.commit:
        files = [
            _write(run, table, intervention, shard, content)
            for intervention in toy.interventions
            for table, content in toy.tables(shard, intervention).items()
        ]
        if toy.weights and shard == 0:
            content = pa.Table.from_pylist(list(toy.weights), schema=WEIGHTS.schema())
            files.append(_write(run, "weights", "none", shard, content))
        span = toy.span(shard)
        commit = Commit(
            run_id=name, shard=shard, start=span.start, stop=span.stop,
            rows=sum(file.rows for file in files if file.table == "heads"),
            tokens=len(span) * toy.n_ctx * len(toy.interventions),
            seconds=1.5, compute_seconds=1.25, idle_seconds=0.25,
            finished=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
            host="toy", replica="toy-1", attempt=1, code="c0de", device="cpu toy",
            versions=[Version(library="torch", version="2.0")],
            methods=[
                Method(intervention=intervention, engine="fused", precision="float32",
                       attention="tiles", built_layers=[])
                for intervention in toy.interventions
            ],
            bad_rows=[], files=files,
        )  # fmt: skip
        local(run.commits_directory).mkdir(exist_ok=True)
        local(run.commit_file(shard)).write_text(commit.model_dump_json())
    return run


def _rows(interventions: Sequence[str], sequences: range, layers: int, heads: int) -> list[Row]:
    """The rows of some sequences, in the order of a file."""
    return list(starmap(Row, product(interventions, sequences, range(layers), range(heads))))


def without_runs(connection: duckdb.DuckDBPyConnection) -> RunDatabase:
    """A database that reads no run."""
    return RunDatabase(connection, queries=Path(__file__).parent)


def _write(
    run: RunDirectory, table: str, intervention: str, shard: int, content: pa.Table
) -> DataFile:
    # Digests in names would make each expected text unreadable. Readers follow any name.
    path = local(run.path) / data_path(table, intervention, f"shard-{shard:06d}.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"run_id": run.run_id, "intervention": intervention}
    file = parquet_bytes(content.replace_schema_metadata(metadata))
    path.write_bytes(file)
    relative = str(path.relative_to(local(run.path)))
    return DataFile(
        table=table,
        intervention=intervention,
        path=relative,
        rows=content.num_rows,
        bytes=file.size,
        digest=digest_of(file),
    )


def data_file(run: RunDirectory, table: str, intervention: str, shard: int) -> Place:
    """The only file with a shard's rows of one table, whatever its digest is."""
    directory = (run.path / data_path(table, intervention, "any")).parent
    (name,) = [n for n in names(directory) if n.startswith(f"shard-{shard:06d}")]
    return directory / name


def read_manifest(directory: RunDirectory) -> dict[str, Any]:
    """The manifest as JSON, for tests that change it."""
    return json.loads(directory.manifest_file.read_bytes())


def copy_of(run: RunDirectory, out: Path) -> RunDirectory:
    """A copy of a run in another directory."""
    return RunDirectory(Path(shutil.copytree(local(run.path), out / run.path.name)))


def flip_middle_bit(file: Path) -> None:
    """Change one bit in the middle of a file; size and times stay."""
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
