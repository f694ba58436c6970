"""Small run directories with the real layout and schemas, and numbers that are easy to check by
hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from schemas.commits import Commit, DataFile, Method, Version
from schemas.digests import digest_of
from schemas.kinds import table_schema
from schemas.manifest import Manifest
from schemas.parquet import parquet_bytes
from schemas.places import Place
from schemas.profiles import PROFILES
from schemas.run_directory import RunDirectory
from schemas.statistics import KIND, Statistic
from schemas.tables import HEADS, SEQUENCES, WEIGHTS, chance_column
from schemas.tables import PROFILES as PROFILES_TABLE
from schemas.weight_statistics import WEIGHT_STATISTICS


class Row(NamedTuple):
    """Where a toy number belongs."""

    intervention: str
    sequence: int
    layer: int
    head: int


def local(where: Place) -> Path:
    """A place that is known to be on this disk."""
    assert isinstance(where, Path)
    return where


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
    weights: Sequence[Entry] = (),
) -> RunDirectory:
    """Write a run; `columns` gives each statistic's value per row, `commit` the shards to write
    (all unless told).

    `profiles` gives the rows of `profiles` of each shard, `weights` those of `weights`, which lie
    with shard 0.
    """
    statistics = KIND.select(list(columns))
    directory = RunDirectory.of(out, name)
    local(directory.path).mkdir(parents=True)
    shards = -(-sequences // per_shard)
    every = [
        Row(i, s, la, h)
        for i in interventions
        for s in range(sequences)
        for la in range(layers)
        for h in range(heads)
    ]
    kinds = {
        "statistics": {
            s.name: s.record
            | _range(s, map(columns[s.name], every))
            | _fingerprint(s.name, fingerprints)
            for s in statistics
        }
    }
    if profiles:
        kinds["profiles"] = {p: PROFILES[p].record for p in {r["profile"] for r in profiles(0)}}
    if weights:
        names = {row["weight"] for row in weights}
        kinds["weight_statistics"] = {name: WEIGHT_STATISTICS[name].record for name in names}
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
            "statistics": {s.name: s.fingerprint for s in statistics},
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
    local(directory.manifest_file).write_text(manifest.model_dump_json())
    for shard in range(shards) if commit is None else commit:
        span = range(shard * per_shard, min((shard + 1) * per_shard, sequences))
        files = []
        for intervention in interventions:
            rows = [
                Row(intervention, s, la, h)
                for s in span
                for la in range(layers)
                for h in range(heads)
            ]
            table = _heads(rows, columns, statistics, family, shard)
            files.append(_write(directory, "heads", intervention, shard, table))
            origins = [pile_sets[s % len(pile_sets)] for s in span]
            table = _sequences(span, statistics, family, shard, n_ctx, origins, chance)
            files.append(_write(directory, "sequences", intervention, shard, table))
            if profiles:
                content = [{**entry, "shard": shard} for entry in profiles(shard)]
                table = pa.Table.from_pylist(content, schema=PROFILES_TABLE.schema())
                files.append(_write(directory, "profiles", intervention, shard, table))
        if weights and shard == 0:
            table = pa.Table.from_pylist(list(weights), schema=WEIGHTS.schema())
            files.append(_write(directory, "weights", "none", shard, table))
        write_commit(directory, shard, span, files, n_ctx * len(interventions))
    return directory


def write_commit(
    directory: RunDirectory, shard: int, span: range, files: list[DataFile], tokens: int
) -> None:
    """Write the record that makes a shard done; `tokens` per sequence, over all interventions."""
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


def _heads(
    rows: list[Row],
    columns: Mapping[str, Cell],
    statistics: tuple[Statistic, ...],
    family: str,
    shard: int,
) -> pa.Table:
    content: dict[str, list[Any]] = {
        "input_family": [family] * len(rows),
        "shard": [shard] * len(rows),
        "sequence": [row.sequence for row in rows],
        "layer": [row.layer for row in rows],
        "head": [row.head for row in rows],
    }
    content |= {name: [cell(row) for row in rows] for name, cell in columns.items()}
    return pa.table(content, schema=table_schema(HEADS, {KIND.field: statistics}))


def _sequences(
    span: range, statistics: tuple[Statistic, ...], family: str, shard: int, n_ctx: int,
    origins: list[str | None], chance: float,
) -> pa.Table:  # fmt: skip
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
    content |= {chance_column(s.name): [chance] * n for s in statistics if s.chance}
    return pa.table(content, schema=table_schema(SEQUENCES, {KIND.field: statistics}))


def _write(
    directory: RunDirectory, table: str, intervention: str, shard: int, content: pa.Table
) -> DataFile:
    path = local(directory.data_file(table, intervention, shard))
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"run_id": directory.run_id, "intervention": intervention}
    file = parquet_bytes(content.replace_schema_metadata(metadata))
    path.write_bytes(file)
    relative = str(path.relative_to(local(directory.path)))
    return DataFile(
        table=table,
        intervention=intervention,
        path=relative,
        rows=content.num_rows,
        bytes=file.size,
        digest=digest_of(file),
    )


def _range(statistic: Statistic, values: Iterable[float | None]) -> dict[str, list[float | None]]:
    """A statistic's range, which holds toy numbers too: they need only be easy to check by hand."""
    low, high = statistic.facts["range"]
    known = [value for value in values if value is not None]
    return {
        "range": [
            None if low is None else min([low, *known]),
            None if high is None else max([high, *known]),
        ]
    }


def _fingerprint(name: str, given: Mapping[str, str] | None) -> dict[str, str]:
    return {"fingerprint": given[name]} if given and name in given else {}


def read_manifest(directory: RunDirectory) -> dict[str, Any]:
    """The manifest as JSON, for tests that edit it."""
    return json.loads(directory.manifest_file.read_bytes())
