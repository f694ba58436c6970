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
from schemas.digests import digest_of
from schemas.errors import HeadcountError, RunError
from schemas.kinds import TABLES, kinds_of, table_schema
from schemas.parquet import parquet_bytes, table_of
from schemas.places import write_whole
from schemas.run_directory import RunDirectory, data_path
from schemas.scan import Scan
from schemas.tables import SEQUENCES, Table, with_partitions
from workers.inputs.sequences import ShardInput
from workers.measurements.batch import Measurements
from workers.measurements.profile_means import means_table
from workers.provenance.code_fingerprint import code_fingerprint
from workers.provenance.machine import device_name, measuring_versions
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
    once: dict[str, pa.Table]
    """Rows of the tables that are written once in a run, with shard 0."""


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
    asks_weights = replica.scan.kinds("from the weights")
    once = replica.weights() if shard.shard == 0 and asks_weights else {}
    replica.free_since = time.perf_counter()
    return MeasuredShard(
        shard, measured, replica.free_since - began, idle, device_name(replica.device), once
    )


def commit_shard(scan: Scan, run: RunDirectory, done: MeasuredShard, attempt: int) -> Commit:
    """Write a measured shard's tables, then its commit; a shard that is committed is left as it is.

    Every attempt writes the same names, and two that measure at once may differ in the last bit: a
    late one would leave files that the commit of the other does not describe.
    """
    began = time.perf_counter()
    shard = done.input
    if (committed := _committed_meanwhile(scan, run, shard)) is not None:
        return committed
    files: list[DataFile] = []
    for intervention, measured in done.measured.items():
        files += [
            _write_table(run, name, intervention, shard.shard, rows)
            for name, rows in intervention_tables(scan, shard, measured).items()
        ]
    files += [
        _write_table(run, name, "none", shard.shard, rows) for name, rows in done.once.items()
    ]
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


def _committed_meanwhile(scan: Scan, run: RunDirectory, shard: ShardInput) -> Commit | None:
    """The commit that another attempt has made of a shard; one of fewer sequences does not count.

    A replica that outlived its driver may have the last shard of a run that has grown since.
    """
    stop = shard.start + len(shard.tokens)
    if len(shard.tokens) < scan.sequences_per_shard:
        expected = int(run.manifest().stops(shard.shard))
        if stop != expected:
            raise RunError(
                f"{run.run_id}: the run has grown since this attempt began, and shard "
                f"{shard.shard} goes to sequence {expected}, not {stop}"
            )
    commit = run.loose_commit(shard.shard)
    return commit if commit is not None and commit.stop >= stop else None


def _write_table(
    run: RunDirectory, table: str, intervention: str, shard: int, rows: pa.Table
) -> DataFile:
    content = parquet_bytes(with_partitions(rows, run.run_id, intervention))
    file = run.data_file(table, intervention, shard)
    write_whole(file, content)
    path = data_path(table, intervention, file.name)
    return DataFile(
        table=table,
        intervention=intervention,
        path=path,
        rows=rows.num_rows,
        bytes=len(content),
        digest=digest_of(content),
    )


def intervention_tables(
    scan: Scan, shard: ShardInput, measured: Measurements
) -> dict[str, pa.Table]:
    """The rows of a shard under one intervention, by table."""
    tables: dict[str, pa.Table] = {}
    for name, table in TABLES.items():
        asked = [kind for kind in kinds_of(table) if kind in scan.kinds()]
        means = [(kind, m) for kind in asked if (m := measured.means.get(kind.field))]
        if means:
            rows = [means_table(kind, shard.shard, of_kind) for kind, of_kind in means]
            tables[name] = pa.concat_tables(rows)
        elif table.has("sequence") and (asked or table.written == "every shard"):
            tables[name] = sequence_rows(table, scan, shard, measured)
    return tables


def sequence_rows(table: Table, scan: Scan, shard: ShardInput, measured: Measurements) -> pa.Table:
    """One row per sequence, or per sequence × layer, or per sequence × layer × head: in the order
    layer, sequence, head, so that row groups prune by layer.
    """
    sequences, layers, heads = next(iter(measured.heads.values())).shape
    sizes = {"layer": layers, "sequence": sequences, "head": heads}
    axes = [axis for axis in sizes if table.has(axis)]
    indices = np.indices([sizes[axis] for axis in axes])
    columns: dict[str, Any] = {
        axis: index.ravel() for axis, index in zip(axes, indices, strict=True)
    }
    rows = len(columns["sequence"])
    columns |= _keys(scan, shard, columns["sequence"])
    for name, values in measured.tables.get(table.name, {}).items():
        ordered = values.swapaxes(0, 1) if "layer" in axes else values
        columns[name] = ordered.reshape(rows, *values.shape[len(axes) :])
    if table is SEQUENCES:
        columns |= _origin(shard)
    formulas = {kind.field: scan.formulas(kind) for kind in scan.kinds()}
    return table_of(columns, table_schema(table, formulas))


def _origin(shard: ShardInput) -> dict[str, Any]:
    """Where sequences came from, and what they are."""
    sequences, n_ctx = shard.tokens.shape
    columns = {"n_tokens": np.full(sequences, n_ctx), "tokens": shard.tokens, **shard.origin}
    return columns if shard.labels is None else columns | {"labels": shard.labels}


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
