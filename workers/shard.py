"""One shard, from tokens to a commit.

Data files become visible whole, and the commit is written last. So a shard is done if and only if
its commit exists, whenever this process dies.
"""

import contextlib
import json
import math
import os
import socket
import time
import traceback
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.schemas.errors import HeadcountError, RunError, WriteError
from headcount.schemas.files.commit import Commit, DataFile, Failure
from headcount.schemas.files.commits import delete, read_commit
from headcount.schemas.files.digests import digest_of
from headcount.schemas.files.parquet import parquet_bytes
from headcount.schemas.files.run_directory import RunDirectory, data_path, shard_file_name
from headcount.schemas.filled_tables import TABLES
from headcount.schemas.kinds import KINDS, kinds_of, table_schema
from headcount.schemas.places import write_whole
from headcount.schemas.plugins import line_of_error
from headcount.schemas.reasons import reason, store_error
from headcount.schemas.scans.scan import Scan
from headcount.schemas.tables import SEQUENCES, Table, table_of, with_partitions
from headcount.workers.first_write import write_new
from headcount.workers.inputs.sequences import ShardInput
from headcount.workers.measurements.results import Columns, Measurements, means_table, numbered
from headcount.workers.provenance.code_fingerprint import code_fingerprint
from headcount.workers.provenance.machine import device_name, measuring_versions
from headcount.workers.replica import InterventionMeasurements, Replica


@dataclass(frozen=True)
class MeasuredShard:
    """A shard's measurements by intervention, and the time they took."""

    input: ShardInput
    measured: dict[str, InterventionMeasurements]  # by intervention, in the order of the scan
    seconds: float
    idle_seconds: float  # how long the replica had waited for this shard
    device: str  # what it was computed on
    tables_of_run: dict[str, pa.Table]  # rows that are written once in a run, with shard 0


def run_shard(replica: Replica, run: RunDirectory, shard: ShardInput, attempt: int = 1) -> Commit:
    """Measure a shard under every intervention of the scan, write its tables, commit it."""
    return commit_shard(replica.scan, run, measure_shard(replica, shard), attempt)


def measure_shard(replica: Replica, shard: ShardInput) -> MeasuredShard:
    """Measure a shard under every intervention of the scan."""
    began = time.perf_counter()
    replica.tokens_measured = 0
    idle_seconds = 0.0 if replica.free_since is None else began - replica.free_since
    measured = {
        str(intervention): replica.measure(shard.tokens, intervention, shard.labels, shard.partner)
        for intervention in replica.scan.interventions
    }
    # Weights are the same in every shard, so they are written once.
    writes_weights = shard.shard == 0 and replica.scan.kinds("from the weights")
    tables_of_run = replica.weights() if writes_weights else {}
    replica.free_since = time.perf_counter()
    seconds = replica.free_since - began
    device = device_name(replica.device)
    return MeasuredShard(shard, measured, seconds, idle_seconds, device, tables_of_run)


def commit_shard(scan: Scan, run: RunDirectory, measured: MeasuredShard, attempt: int) -> Commit:
    """Write a measured shard's tables, then its commit; returns the commit that counts.

    The files of two attempts have names of their own, and the first commit counts. A late attempt
    takes back what it has written.
    """
    began = time.perf_counter()
    shard = measured.input
    files = _write_tables(scan, run, measured)
    # Only the last shard of a run can be short, and only a short one can grow.
    if len(shard.tokens) < scan.sequences_per_shard:
        stop = int(run.manifest().stops(shard.shard))
        if stop != shard.start + len(shard.tokens):
            raise RunError(
                f"{run.run_id}: the run has grown since this attempt began, and shard "
                f"{shard.shard} goes to sequence {stop}, not {shard.start + len(shard.tokens)}"
            )
    commit = Commit(
        run_id=run.run_id,
        shard=shard.shard,
        start=shard.start,
        stop=shard.start + len(shard.tokens),
        rows=sum(file.rows for file in files if file.table == "heads"),
        tokens=shard.tokens.size * len(scan.interventions),
        seconds=round(measured.seconds + time.perf_counter() - began, 4),
        compute_seconds=round(measured.seconds, 4),
        idle_seconds=round(measured.idle_seconds, 4),
        finished=datetime.now(UTC),
        host=socket.gethostname(),
        replica=replica_name(),
        attempt=attempt,
        code=code_fingerprint(),
        device=measured.device,
        versions=list(measuring_versions()),
        methods=[measurements.method for measurements in measured.measured.values()],
        bad_rows=shard.bad_rows,
        files=files,
    )
    # Last of all, because readers follow commits: until now nobody sees the files.
    file, content = run.commit_file(shard.shard), commit.model_dump_json(indent=1).encode()
    if write_new(file, content):
        return commit
    committed = committed_shard(run, shard.shard, commit.stop)
    if committed is None:
        # What lies there is no commit of this run, or of fewer sequences.
        write_whole(file, content)
        return commit
    # A store may have lost the answer: then this commit is the one that lies there. If the deletion
    # fails, whoever finishes the run tries again.
    with contextlib.suppress(OSError):
        delete(run.path / file.path for file in files if file not in committed.files)
    return committed


def replica_name() -> str:
    """The name of this process's replica, by which commits tell replicas apart."""
    return f"{socket.gethostname()}-{os.getpid()}"


def committed_shard(run: RunDirectory, shard: int, stop: int) -> Commit | None:
    """The commit that a shard has in a file of its own; None without one that goes up to `stop`.

    A replica that outlived its driver may have the last shard of a run that has grown since.
    """
    file = run.commit_file(shard)
    try:
        commit = read_commit(file, run.run_id)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise store_error(error)(
            f"{file}: cannot be looked for ({reason(error)}); mend the access or the store, then "
            "run the same command"
        ) from None
    return commit if commit is not None and commit.stop >= stop else None


def _write_tables(scan: Scan, run: RunDirectory, measured: MeasuredShard) -> list[DataFile]:
    """Write every table of a shard; the untouched weights are filed under `none`."""
    tables = [
        (name, intervention, rows)
        for intervention, measurements in measured.measured.items()
        for name, rows in intervention_tables(scan, measured.input, measurements).items()
    ]
    tables += [(name, "none", rows) for name, rows in measured.tables_of_run.items()]
    files: list[DataFile] = []
    for name, intervention, rows in tables:
        content = parquet_bytes(with_partitions(rows, run.run_id, intervention))
        digest = digest_of(content)
        path = data_path(name, intervention, shard_file_name(measured.input.shard, digest))
        write_whole(run.path / path, content)
        files.append(
            DataFile(
                table=name,
                intervention=intervention,
                path=path,
                rows=rows.num_rows,
                bytes=content.size,
                digest=digest,
            )
        )
    return files


def intervention_tables(
    scan: Scan, shard: ShardInput, measured: Measurements
) -> dict[str, pa.Table]:
    """The rows of a shard under one intervention, by table."""
    tables: dict[str, pa.Table] = {}
    for name, table in TABLES.items():
        kinds = [kind for kind in kinds_of(table) if kind in scan.kinds()]
        values = measured.tables.get(name, {})
        if table.has("sequence"):
            # `heads` and `sequences` are in every shard, other tables if the scan fills them.
            if kinds or table.written == "every shard":
                tables[name] = _sequence_rows(table, scan, shard, measured, values)
        elif kinds and values:
            tables[name] = means_table(kinds[0], shard.shard, values, measured.measured_heads)
    return tables


def _sequence_rows(
    table: Table, scan: Scan, shard: ShardInput, measured: Measurements, values: Columns
) -> pa.Table:
    """One row per sequence, or per sequence × layer, or per sequence × layer × head.

    They are in the order layer, sequence, head, so that row groups prune by layer.
    """
    n_sequences, n_layers, n_heads = next(iter(measured.heads.values())).shape
    sizes = {"layer": n_layers, "sequence": n_sequences, "head": n_heads}
    shape = {axis: size for axis, size in sizes.items() if table.has(axis)}
    indices, existing = numbered([*shape], [*shape.values()], measured.measured_heads)
    rows = len(indices["sequence"])
    columns: dict[str, Any] = {
        **indices,
        "input_family": pa.repeat(scan.input.family, rows),
        "shard": np.full(rows, shard.shard),
        # The index counts within the shard.
        "sequence": shard.start + indices["sequence"],
    }
    for name, array in values.items():
        # Values are `[sequence layer …]`, rows are in the order of the layers.
        in_row_order = array.swapaxes(0, 1) if "layer" in shape else array
        flat = in_row_order.reshape(math.prod(shape.values()), *array.shape[len(shape) :])
        columns[name] = flat[existing]
    if table is SEQUENCES:
        columns["n_tokens"] = np.full(n_sequences, shard.tokens.shape[1])
        columns |= {"tokens": shard.tokens, "labels": shard.labels, **shard.origin}
    names = tuple((kind.field, scan.names(kind), len(kind)) for kind in scan.kinds())
    # In one order, in whatever order the scan that measures a shard names them.
    carried_fields = tuple(sorted(scan.input.options.get("columns") or []))
    return table_of(columns, _schema(table, names, carried_fields))


@lru_cache(maxsize=64)
def _schema(
    table: Table,
    names: tuple[tuple[str, str | tuple[str, ...], int], ...],
    carried: tuple[str, ...],
) -> pa.Schema:
    """The schema of a table, from what a scan names of each field, of so many formulas.

    Every shard asks for it, and what formulas say of themselves takes ten milliseconds to make.
    """
    kinds = {kind.field: kind for kind in KINDS}
    formulas = {field: kinds[field].select(named) for field, named, _ in names}
    return table_schema(table, formulas, carried)


def failure_of(shard: int, error: Exception) -> Failure:
    """A shard's failure in one line: of an error not of ours, its type and where it came from."""
    if isinstance(error, HeadcountError):
        return Failure(shard, str(error), isinstance(error, WriteError))
    if line := line_of_error(error):
        return Failure(shard, f"{line}: {type(error).__name__}: {error}")
    origin = traceback.extract_tb(error.__traceback__)[-1]
    return Failure(shard, f"{type(error).__name__}: {error} ({origin.name}, line {origin.lineno})")


def note_failure(run: RunDirectory, failure: Failure, attempt: int) -> Failure:
    """Record a failure for `headcount status`, if possible; returns it. The shard stays undone."""
    record = {"attempts": attempt, "error": failure.error}
    try:
        write_whole(run.failure_file(failure.shard), json.dumps(record, indent=1).encode())
    except HeadcountError as error:
        # What does not take a shard does not take the note either, for the same reason.
        if not failure.of_writing:
            return replace(failure, error=f"{failure.error}; {error}")
    return failure
