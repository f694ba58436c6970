"""Small runs with the real layout and schemas, and numbers that are easy to check by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa

from queries.asking import RunDatabase
from queries.connection import OPENED, OpenedRuns, connect
from schemas.commits import Commit, DataFile, Method, Version
from schemas.digests import digest_of
from schemas.kinds import table_schema
from schemas.manifest import Manifest
from schemas.parquet import parquet_bytes
from schemas.places import Place
from schemas.profiles import PROFILES
from schemas.run_directory import RunDirectory
from schemas.statistics import KIND, Statistic
from schemas.tables import CURVES, HEADS, SEQUENCES, WEIGHTS, chance_column
from schemas.tables import PROFILES as PROFILES_TABLE
from schemas.weight_statistics import WEIGHT_STATISTICS


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


def connect_to_tables(path: str | Place) -> duckdb.DuckDBPyConnection:
    """A connection without the shipped views and comments: it opens in a fraction of the time."""
    # This folder has no `.sql` files.
    return connect(path, queries=Path(__file__).parent, lazily=True)


Cell = Callable[[Row], float | None]
Entry = dict[str, Any]
"""A row of `profiles`, but for its shard, or a row of `weights`."""


def write_run(
    out: Path,
    name: str,
    columns: Mapping[str, Cell],
    *,
    layers: int = 2,
    heads: int = 3,
    n_ctx: int = 5,
    family: str = "uniform_random",
    sequences: int = 4,
    per_shard: int = 2,
    commit: Iterable[int] | None = None,
    interventions: Sequence[str] = ("none",),
    chance: float = 0.25,
    pile_sets: Sequence[str | None] = (None,),
    model: str = "toy",
    fingerprints: Mapping[str, str] | None = None,
    profiles: Callable[[int], list[Entry]] | None = None,
    curves: Mapping[str, Callable[[Row], list[float]]] | None = None,
    weights: Sequence[Entry] = (),
) -> RunDirectory:
    """Write a run.

    `columns` gives the value of each statistic for each row. `commit` names the shards to write,
    by default all of them. `profiles` gives the rows of `profiles` of a shard, `curves` the lists
    of each row of `curves`, `weights` the rows of `weights`, which are written with shard 0.
    """
    statistics = KIND.select(list(columns))
    columns = {KIND.find(text).name: cell for text, cell in columns.items()}
    run = RunDirectory.of(out, name)
    local(run.path).mkdir(parents=True)
    shards = -(-sequences // per_shard)
    every_row = _rows(interventions, range(sequences), layers, heads)
    kinds = {
        "statistics": {
            statistic.name: statistic.record
            | _range(statistic, map(columns[statistic.name], every_row))
            | _fingerprint(statistic.name, fingerprints)
            for statistic in statistics
        }
    }
    if profiles:
        profile_names = {entry["profile"] for entry in profiles(0)}
        kinds["profiles"] = {profile: PROFILES[profile].record for profile in profile_names}
    if curves:
        kinds["curves"] = {name: PROFILES[name].record for name in curves}
    if weights:
        weight_names = {entry["weight"] for entry in weights}
        kinds["weight_statistics"] = {
            weight: WEIGHT_STATISTICS[weight].record for weight in weight_names
        }
    manifest = Manifest(
        run_id=name,
        created="2026-01-02T03:04:05Z",
        identity={
            "scan": {
                "model": model,
                "weight_processing": "raw",
                "precision": "float32",
                "engine": "fused",
                "n_ctx": n_ctx,
                "bos": True,
                "input": {"family": family, "period": 2},
                "interventions": list(interventions),
                "sequences_per_shard": per_shard,
                "seed": 7,
            },
            "model": {"fingerprint": f"weights of {model}"},
            "statistics": {statistic.name: statistic.fingerprint for statistic in statistics},
        },
        shards=shards,
        sequences=sequences,
        kinds=kinds,
        model={
            "name": model,
            "n_layers": layers,
            "n_heads": heads,
            "d_model": 12,
            "d_head": 4,
            "n_ctx": 64,
            "d_vocab": 9,
        },
        code="c0de",
        versions={},
    )
    local(run.manifest_file).write_text(manifest.model_dump_json())
    for shard in range(shards) if commit is None else commit:
        span = range(shard * per_shard, min((shard + 1) * per_shard, sequences))
        files: list[DataFile] = []
        for intervention in interventions:
            rows = _rows([intervention], span, layers, heads)
            tables = {"heads": _heads(rows, columns, statistics, family, shard)}
            origins = [pile_sets[sequence % len(pile_sets)] for sequence in span]
            tables["sequences"] = _sequences(
                span, statistics, family, shard, n_ctx, origins, chance
            )
            if profiles:
                entries = [{**entry, "shard": shard} for entry in profiles(shard)]
                tables["profiles"] = pa.Table.from_pylist(entries, schema=PROFILES_TABLE.schema())
            if curves:
                tables["curves"] = _curves(rows, curves, family, shard)
            for table, content in tables.items():
                files.append(_write(run, table, intervention, shard, content))
        if weights and shard == 0:
            content = pa.Table.from_pylist(list(weights), schema=WEIGHTS.schema())
            files.append(_write(run, "weights", "none", shard, content))
        write_commit(run, shard, span, files, n_ctx * len(interventions))
    return run


def _rows(interventions: Sequence[str], sequences: range, layers: int, heads: int) -> list[Row]:
    """The rows of some sequences, in the order of a file."""
    return list(starmap(Row, product(interventions, sequences, range(layers), range(heads))))


def write_commit(
    directory: RunDirectory, shard: int, span: range, files: list[DataFile], tokens: int
) -> None:
    """Write the record that makes a shard done.

    `tokens` are those of one sequence under all interventions.
    """
    commit = Commit(
        run_id=directory.run_id,
        shard=shard,
        start=span.start,
        stop=span.stop,
        rows=sum(file.rows for file in files if file.table == "heads"),
        tokens=len(span) * tokens,
        seconds=1.5,
        compute_seconds=1.25,
        idle_seconds=0.25,
        finished=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        host="toy",
        replica="toy-1",
        attempt=1,
        code="c0de",
        device="cpu toy",
        versions=[Version(library="torch", version="2.0")],
        methods=[
            Method(
                intervention=intervention,
                engine="fused",
                precision="float32",
                attention="tiles",
                built_layers=[],
            )
            for intervention in dict.fromkeys(file.intervention for file in files)
        ],
        bad_rows=[],
        files=files,
    )
    path = local(directory.commit_file(shard))
    path.parent.mkdir(exist_ok=True)
    path.write_text(commit.model_dump_json())


def without_runs(connection: duckdb.DuckDBPyConnection) -> RunDatabase:
    """A database that reads no run."""
    OPENED[connection] = OpenedRuns([], [], print)
    return RunDatabase(connection)


def _heads(
    rows: list[Row],
    columns: Mapping[str, Cell],
    statistics: tuple[Statistic, ...],
    family: str,
    shard: int,
) -> pa.Table:
    content = _keys(rows, family, shard)
    content |= {name: [cell(row) for row in rows] for name, cell in columns.items()}
    return pa.table(content, schema=table_schema(HEADS, {KIND.field: statistics}))


def _curves(
    rows: list[Row], curves: Mapping[str, Callable[[Row], list[float]]], family: str, shard: int
) -> pa.Table:
    content = _keys(rows, family, shard)
    content |= {name: [curve(row) for row in rows] for name, curve in curves.items()}
    profiles = [PROFILES[name] for name in curves]
    return pa.table(content, schema=table_schema(CURVES, {"curves": profiles}))


def _keys(rows: list[Row], family: str, shard: int) -> dict[str, list[Any]]:
    """The columns that say what a row is about."""
    return {
        "input_family": [family] * len(rows),
        "shard": [shard] * len(rows),
        "sequence": [row.sequence for row in rows],
        "layer": [row.layer for row in rows],
        "head": [row.head for row in rows],
    }


def _sequences(
    span: range,
    statistics: tuple[Statistic, ...],
    family: str,
    shard: int,
    n_ctx: int,
    origins: list[str | None],
    chance: float,
) -> pa.Table:
    n = len(span)
    content: dict[str, list[Any]] = {
        "input_family": [family] * n,
        "shard": [shard] * n,
        "sequence": list(span),
        "file": [None] * n,
        "row": [None] * n,
        "offset": [None] * n,
        "pile_set_name": origins,
        "n_tokens": [n_ctx] * n,
        "tokens": [list(range(n_ctx))] * n,
        "labels": [None] * n,
    }
    for statistic in statistics:
        if statistic.chance:
            content[chance_column(statistic.name)] = [chance] * n
    return pa.table(content, schema=table_schema(SEQUENCES, {KIND.field: statistics}))


def _write(
    run: RunDirectory, table: str, intervention: str, shard: int, content: pa.Table
) -> DataFile:
    path = local(run.data_file(table, intervention, shard))
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


def _range(statistic: Statistic, values: Iterable[float | None]) -> dict[str, list[float | None]]:
    """A statistic's range, widened to hold the toy numbers."""
    low, high = statistic.facts["range"]
    defined = [value for value in values if value is not None]
    # None is a range without an end.
    lowest = None if low is None else min([low, *defined])
    highest = None if high is None else max([high, *defined])
    return {"range": [lowest, highest]}


def _fingerprint(name: str, fingerprints: Mapping[str, str] | None) -> dict[str, str]:
    """The fingerprint that a statistic has instead of its own, if there is one."""
    return {"fingerprint": fingerprints[name]} if fingerprints and name in fingerprints else {}


def read_manifest(directory: RunDirectory) -> dict[str, Any]:
    """The manifest as JSON, for tests that edit it."""
    return json.loads(directory.manifest_file.read_bytes())
