"""One shard, from tokens to a commit. Data files become visible whole, and the commit is written
last.
"""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.commits import Commit, DataFile, Failure
from schemas.errors import HeadcountError
from schemas.parquet import parquet_bytes, table_of
from schemas.places import write_whole
from schemas.predictions import select_predictions
from schemas.profiles import select_curves
from schemas.run_directory import RunDirectory, data_path
from schemas.scan import Scan
from schemas.statistics import select
from schemas.tables import curves_schema, heads_schema, sequences_schema
from workers.code_fingerprint import code_fingerprint
from workers.inputs.sequences import ShardInput
from workers.machine import device_name, measuring_versions
from workers.profile_means import profiles_table
from workers.replica import InterventionMeasurements, Replica


@dataclass(frozen=True)
class MeasuredShard:
    """A shard's statistics by intervention, and the time they took."""

    input: ShardInput
    measured: dict[str, InterventionMeasurements]
    seconds: float
    idle_seconds: float
    """How long the replica had waited for this shard."""
    device: str
    """What it was computed on."""
    weights: pa.Table | None = None
    """The rows of `weights`, which are written with shard 0."""


def run_shard(replica: Replica, run: RunDirectory, shard: ShardInput, attempt: int = 1) -> Commit:
    """Measure a shard under every intervention of the scan, write its tables, commit it."""
    return commit_shard(replica.scan, run, measure_shard(replica, shard), attempt)


def measure_shard(replica: Replica, shard: ShardInput) -> MeasuredShard:
    """Measure a shard under every intervention of the scan."""
    began = time.perf_counter()
    idle = 0.0 if replica.free_since is None else began - replica.free_since
    measured = {
        str(intervention): replica.measure(shard.tokens, intervention, shard.labels, shard.partner)
        for intervention in replica.scan.interventions
    }
    weights = replica.weights() if shard.shard == 0 and replica.scan.weight_statistics else None
    replica.free_since = time.perf_counter()
    return MeasuredShard(
        shard, measured, replica.free_since - began, idle, device_name(replica.device), weights
    )


def commit_shard(scan: Scan, run: RunDirectory, done: MeasuredShard, attempt: int) -> Commit:
    """Write a measured shard's tables, then its commit."""
    began = time.perf_counter()
    shard = done.input
    files: list[DataFile] = []
    for intervention, measured in done.measured.items():
        tables = {
            "heads": heads_table(scan, shard, measured),
            "sequences": sequences_table(scan, shard, measured),
        }
        if scan.curves:
            tables["curves"] = curves_table(scan, shard, measured)
        if measured.profiles:
            tables["profiles"] = profiles_table(shard.shard, measured.profiles)
        files += [
            _write_table(run, name, intervention, shard.shard, rows)
            for name, rows in tables.items()
        ]
    if done.weights is not None:
        files.append(_write_table(run, "weights", "none", shard.shard, done.weights))
    commit = Commit(
        run_id=run.run_id,
        shard=shard.shard,
        start=shard.start,
        stop=shard.start + len(shard.tokens),
        rows=sum(f.rows for f in files if f.table == "heads"),
        tokens=shard.tokens.size * len(scan.interventions),
        seconds=round(done.seconds + time.perf_counter() - began, 4),
        compute_seconds=round(done.seconds, 4),
        idle_seconds=round(done.idle_seconds, 4),
        finished=datetime.now(UTC),
        host=socket.gethostname(),
        replica=f"{socket.gethostname()}-{os.getpid()}",
        attempt=attempt,
        code=code_fingerprint(),
        device=done.device,
        versions=list(measuring_versions()),
        methods=[measured.method for measured in done.measured.values()],
        bad_rows=shard.bad_rows,
        files=files,
    )
    write_whole(run.commit_file(shard.shard), commit.model_dump_json(indent=1).encode())
    return commit


def _write_table(
    run: RunDirectory, table: str, intervention: str, shard: int, rows: pa.Table
) -> DataFile:
    content = parquet_bytes(
        rows.replace_schema_metadata({"run_id": run.run_id, "intervention": intervention})
    )
    file = run.data_file(table, intervention, shard)
    write_whole(file, content)
    path = data_path(table, intervention, file.name)
    return DataFile(
        table=table, intervention=intervention, path=path, rows=rows.num_rows, bytes=len(content)
    )


def heads_table(scan: Scan, shard: ShardInput, measured: InterventionMeasurements) -> pa.Table:
    """One row per sequence × layer × head, in the order layer, sequence, head, so that row groups
    prune by layer.
    """
    columns = _by_head(scan, shard, measured, measured.heads)
    return table_of(columns, heads_schema(select(scan.statistics)))


def curves_table(scan: Scan, shard: ShardInput, measured: InterventionMeasurements) -> pa.Table:
    """One row per sequence × layer × head, in the order of `heads`."""
    columns = _by_head(scan, shard, measured, measured.curves)
    return table_of(columns, curves_schema(select_curves(scan.curves)))


def sequences_table(scan: Scan, shard: ShardInput, measured: InterventionMeasurements) -> pa.Table:
    """One row per sequence."""
    sequences, n_ctx = shard.tokens.shape
    columns: dict[str, Any] = _keys(scan, shard, np.arange(sequences)) | measured.sequences
    columns |= {"n_tokens": np.full(sequences, n_ctx), "tokens": shard.tokens, **shard.origin}
    if shard.labels is not None:
        columns["labels"] = shard.labels
    return table_of(
        columns, sequences_schema(select(scan.statistics), select_predictions(scan.predictions))
    )


def record_failure(run: RunDirectory, shard: int, attempt: int, error: str) -> None:
    """Note that an attempt at a shard failed, and why; the shard stays undone."""
    write_whole(
        run.failure_file(shard),
        json.dumps({"attempts": attempt, "error": error}, indent=1).encode(),
    )


def failed(shard: int, error: Exception) -> Failure:
    """A shard's failure in one line: what one of our errors says, or what another says and where it
    came from.
    """
    if isinstance(error, HeadcountError):
        return Failure(shard, str(error))
    where = traceback.extract_tb(error.__traceback__)[-1]
    return Failure(shard, f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})")


def noted(run: RunDirectory, failure: Failure, attempt: int) -> Failure:
    """Leave a note of a failure for `headcount status`; returns it, with what went wrong with the
    note.
    """
    try:
        record_failure(run, failure.shard, attempt, failure.error)
    except HeadcountError as error:
        return Failure(failure.shard, f"{failure.error}; {error}")
    return failure


def _by_head(
    scan: Scan, shard: ShardInput, measured: InterventionMeasurements, values: dict[str, np.ndarray]
) -> dict[str, Any]:
    """The keys and columns of values `[sequence layer head …]`."""
    sequences, layers, heads = next(iter(measured.heads.values())).shape
    layer, sequence, head = (axis.ravel() for axis in np.indices((layers, sequences, heads)))
    columns = _keys(scan, shard, sequence) | {"layer": layer, "head": head}
    return columns | {
        name: v.swapaxes(0, 1).reshape(len(layer), *v.shape[3:]) for name, v in values.items()
    }


def _keys(scan: Scan, shard: ShardInput, sequence: np.ndarray) -> dict[str, Any]:
    family = (
        pa.array([scan.input.family])
        .dictionary_encode()
        .take(pa.array(np.zeros(len(sequence), np.int32)))
    )
    return {
        "input_family": family.cast(pa.string()),
        "shard": np.full(len(sequence), shard.shard),
        "sequence": shard.start + sequence,
    }
