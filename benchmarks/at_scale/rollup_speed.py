"""What dashboards wait for: `python -m benchmarks.at_scale.rollup_speed`.

A compacted run of GPT-2 small over a billion tokens of the Pile is generated: 144 million rows of
the standard statistics, with their roll-ups and samples. A few merged files are written; the
others are links to them, so the disk holds one file in `LINKED`, and only the numbers of shards
repeat. Each query is asked on two threads, in a connection of its own, until nothing has to be
checked any more. Queries of roll-ups are timed as they are; named queries over rows are compared
with a plain DuckDB scan that averages the same columns of the same files.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from headcount.queries.ask.answers import run_query
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.schemas.files.commit import COMMITS
from headcount.schemas.files.commits import write_segment
from headcount.schemas.files.digests import digest_of
from headcount.schemas.files.manifest import LAYOUT, Manifest
from headcount.schemas.files.parquet import parquet_bytes, table_of
from headcount.schemas.files.run_directory import RunDirectory, data_path
from headcount.schemas.formulas import Formula
from headcount.schemas.histogram_bins import Axis
from headcount.schemas.kinds import table_schema
from headcount.schemas.statistics import STATISTICS
from headcount.schemas.tables import (
    HEADS,
    ROLLUPS,
    SAMPLES,
    SEQUENCES,
    uniform_column,
    with_partitions,
)
from headcount.workers.measurements.rollups import rolled_up

LAYERS, HEADS_OF_LAYER, N_CTX = 12, 12, 1000
PARTS = 22
SHARD = 64
SHARDS_OF_FILE = 217
"""Shards that compaction merges: two million rows of GPT-2 small."""

SEQUENCES_OF_FILE = SHARD * SHARDS_OF_FILE
LINKED = 24
"""Merged files that are one file on the disk."""

RUN_ID = "billion-000000000000"

ROLLUP_QUERIES = {
    "heatmap of one statistic": "SELECT layer, head, mean, standard_error FROM head_summaries "
    "WHERE statistic = 'sink_mass' AND intervention = 'none'",
    "summaries of one head": "FROM head_summaries WHERE layer = 5 AND head = 1",
    "summaries of one head by part": "FROM subset_summaries WHERE layer = 5 AND head = 1",
    "quantiles of one statistic": "FROM head_quantiles WHERE statistic = 'entropy'",
    "distribution of one head": "SELECT low, high, sum(count) FROM distributions "
    "WHERE statistic = 'entropy' AND layer = 5 AND head = 1 GROUP BY ALL",
    "list of statistics": "FROM statistics",
}

ROW_QUERIES = {
    "by_head": [s.name for s in STATISTICS.values() if s.standard],
    "sink_heads": ["sink_mass", "sink_value_norm", "value_norm", "sink_resid_pre_norm",
                   "resid_pre_norm"],
}  # fmt: skip
"""Named queries, each with the statistics that it reads."""


@dataclass(frozen=True)
class Timed:
    """What a query took once everything was checked and cached: the best of some times."""

    seconds: float
    cpu_seconds: float


def statistics() -> list[Formula]:
    """The statistics that a scan measures by default."""
    return [statistic for statistic in STATISTICS.values() if statistic.standard]


def write_run(out: Path, files: int) -> RunDirectory:
    """A compacted run of so many merged files."""
    run = RunDirectory.of(out, RUN_ID)
    manifest = _manifest(files)
    commits: list[dict[str, Any]] = []
    written: list[dict[str, pa.Buffer]] = []
    paths: list[dict[str, Path]] = []
    Path(str(run.commits_directory)).mkdir(parents=True)
    for number in range(files):
        if number % LINKED == 0:
            tables = _tables(number, manifest.sample_stride)
            written.append({name: parquet_bytes(*content) for name, content in tables})
            paths.append({})
        contents = written[-1]
        data_files: list[dict[str, Any]] = []
        for table, content in contents.items():
            path = data_path(table, "none", f"merged-{number:06d}.parquet")
            target = Path(str(run.path)) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if table in paths[-1]:
                os.link(paths[-1][table], target)
            else:
                target.write_bytes(content)
                paths[-1][table] = target
            data_files.append(
                {"table": table, "intervention": "none", "path": path, "rows": 0,
                 "bytes": content.size, "shards": SHARDS_OF_FILE, "digest": digest_of(content)}
            )  # fmt: skip
        first = number * SHARDS_OF_FILE
        commits += [_commit(first + shard, data_files) for shard in range(SHARDS_OF_FILE)]
    write_segment(run.commits_directory, pa.Table.from_pylist(commits, COMMITS))
    Path(str(run.manifest_file)).write_text(manifest.model_dump_json())
    return run


def _tables(seed: int, stride: int) -> list[tuple[str, tuple[pa.Table, int]]]:
    """The tables of one merged file, each with the rows of its row groups."""
    rng = np.random.default_rng(seed)
    sequence = np.arange(SEQUENCES_OF_FILE) + seed * SEQUENCES_OF_FILE
    axes = {statistic.name: Axis(*statistic.range) for statistic in statistics()}
    sequence_rows = _sequence_rows(rng, sequence)
    head_rows = _head_rows(rng, sequence, axes)
    tables = {
        HEADS: head_rows,
        SEQUENCES: sequence_rows,
        ROLLUPS: rolled_up(head_rows, sequence_rows, axes),
        SAMPLES: head_rows.filter(pa.array(head_rows["sequence"].to_numpy() % stride == 0)),
    }
    return [
        (table.name, (with_partitions(rows, RUN_ID, "none"), table.row_group or 65_536))
        for table, rows in tables.items()
    ]


def _sequence_rows(rng: np.random.Generator, sequence: np.ndarray) -> pa.Table:
    """Rows of `sequences`, of documents that each are of a random subset of the Pile."""
    # Most of the Pile is in few of its parts.
    shares = np.arange(1, PARTS + 1) ** -1.0
    parts = rng.choice(
        [f"Part {n:02}" for n in range(PARTS)], len(sequence), p=shares / sum(shares)
    )
    # Two sequences of five go on with the document of the one before.
    document = np.cumsum(rng.random(len(sequence)) < 0.6)
    sequences: dict[str, Any] = {
        "input_family": ["pile"] * len(sequence),
        "shard": sequence // SHARD,
        "sequence": sequence,
        "document": sequence[0] + document,
        "pile_set_name": parts[document - 1].tolist(),
        "n_tokens": np.full(len(sequence), N_CTX),
        "tokens": [[0]] * len(sequence),
    }
    for statistic in statistics():
        if statistic.uniform_baseline:
            sequences[uniform_column(statistic.name)] = np.full(len(sequence), 0.01, np.float32)
    return table_of(sequences, table_schema(SEQUENCES, {STATISTICS.field: statistics()}))


def _head_rows(
    rng: np.random.Generator, sequence: np.ndarray, axes: Mapping[str, Axis]
) -> pa.Table:
    """Rows of `heads` in the order of a merged file: all sequences of a head, then the next."""
    cells = LAYERS * HEADS_OF_LAYER
    head = np.repeat(np.arange(cells), len(sequence))
    of_head: dict[str, Any] = {
        "input_family": pa.array(["pile"]).dictionary_encode().take(
            pa.array(np.zeros(len(head), np.int32))
        ).cast(pa.string()),
        "shard": np.tile(sequence // SHARD, cells),
        "sequence": np.tile(sequence, cells),
        "layer": head // HEADS_OF_LAYER,
        "head": head % HEADS_OF_LAYER,
    }  # fmt: skip
    for name, axis in axes.items():
        of_head[name] = _values(rng, axis, head).astype(np.float32)
    return table_of(of_head, table_schema(HEADS, {STATISTICS.field: statistics()}))


def _values(rng: np.random.Generator, axis: Axis, head: np.ndarray) -> np.ndarray:
    """Values of a statistic: every head has a place of its own, and sequences differ by a fifth."""
    centre = rng.random(LAYERS * HEADS_OF_LAYER)[head]
    spread = rng.normal(0, 0.2, len(head))
    if axis.is_linear:
        return (centre * np.exp(spread)).clip(max=1) * axis.high
    sign = np.where(centre < 0.5, -1, 1) if axis.low < 0 else 1
    return sign * 10 * centre * np.exp(spread)


def _commit(shard: int, files: list[dict[str, Any]]) -> dict[str, Any]:
    method = {"intervention": "none", "engine": "fused", "precision": "float32",
              "attention": "tiles", "built_layers": []}  # fmt: skip
    rows = SHARD * LAYERS * HEADS_OF_LAYER
    return {
        "run_id": RUN_ID, "shard": shard, "start": shard * SHARD, "stop": (shard + 1) * SHARD,
        "rows": rows, "tokens": SHARD * N_CTX, "seconds": 1.0, "compute_seconds": 1.0,
        "idle_seconds": 0.0, "finished": datetime.now(UTC), "host": "generated",
        "replica": "generated", "attempt": 1, "code": "generated", "device": "none",
        "versions": [], "methods": [method], "bad_rows": [], "files": files,
    }  # fmt: skip


def _manifest(files: int) -> Manifest:
    scan = {"model": "gpt2", "n_ctx": N_CTX, "input": {"family": "pile"},
            "interventions": ["none"], "sequences_per_shard": SHARD}  # fmt: skip
    return Manifest(
        layout=LAYOUT,
        run_id=RUN_ID,
        created="2026-01-01T00:00:00Z",
        identity={"scan": scan},
        shards=files * SHARDS_OF_FILE,
        sequences=files * SEQUENCES_OF_FILE,
        kinds={"statistics": {statistic.name: statistic.record for statistic in statistics()}},
        model={"name": "gpt2", "n_layers": LAYERS, "n_heads": HEADS_OF_LAYER},
        code="generated",
        versions={},
    )


def ask(database: RunDatabase, query: str, rounds: int) -> Timed:
    """Ask a query some times."""
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        began, cpu_began = time.perf_counter(), time.process_time()
        for _batch in run_query(database, query).batches():
            pass
        times.append((time.perf_counter() - began, time.process_time() - cpu_began))
    seconds, cpu_seconds = (min(column) for column in zip(*times, strict=True))
    return Timed(seconds, cpu_seconds)


def plain_scan(run: RunDirectory, columns: list[str], rounds: int) -> Timed:
    """Average some columns by head, without any view of ours."""
    connection = duckdb.connect()
    averages = ", ".join(f"avg({column})" for column in columns)
    sql = f"SELECT layer, head, {averages} FROM '{run.path}/heads/*/*.parquet' GROUP BY ALL"
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        began, cpu_began = time.perf_counter(), time.process_time()
        connection.execute(sql).fetchall()
        times.append((time.perf_counter() - began, time.process_time() - cpu_began))
    seconds, cpu_seconds = (min(column) for column in zip(*times, strict=True))
    return Timed(seconds, cpu_seconds)


def main() -> None:
    """Generate the run, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=72, help="merged files; 72 are 10^9 tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", action="store_true", help="also the named queries over rows")
    parser.add_argument("--out", type=Path, help="keep the run here, or use the one that is here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out: Path = options.out or Path(temporary)
        run = RunDirectory.of(out, RUN_ID)
        if not Path(str(run.manifest_file)).is_file():
            began = time.process_time()
            write_run(out, options.files)
            print(f"generated in {time.process_time() - began:.0f} CPU seconds")
        for table in (HEADS, ROLLUPS, SAMPLES):
            sizes = [file.stat().st_size for file in out.glob(f"*/{table.name}/*/*.parquet")]
            print(f"{table.name}: {sum(sizes) / 1e6:,.1f} MB in {len(sizes)} files")
        began, cpu_began = time.perf_counter(), time.process_time()
        database = open_runs(str(run.path))
        print(f"open: {time.perf_counter() - began:.3f} s, "
              f"CPU {time.process_time() - cpu_began:.3f} s")  # fmt: skip
        for name, query in ROLLUP_QUERIES.items():
            print(f"{name}: {ask(database, query, options.rounds)}")
        for view, columns in ROW_QUERIES.items() if options.rows else ():
            view_time = ask(database, f"FROM {view}", options.rounds)
            scan_time = plain_scan(run, columns, options.rounds)
            ratio = view_time.cpu_seconds / scan_time.cpu_seconds
            print(
                f"{view}: {view_time}\n  plain scan: {scan_time}\n  ratio of CPU time: {ratio:.2f}"
            )


if __name__ == "__main__":
    main()
