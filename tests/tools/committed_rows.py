"""The rows of a run, and how they differ from those of another one.

It needs neither PyTorch nor Ray, which take seconds to import.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import pyarrow as pa
import pyarrow.parquet as pq

from headcount.schemas.files.run_directory import RunDirectory, pc

KEYS = ["sequence", "layer", "head"]


def rows_of(run: RunDirectory) -> pa.Table:
    """Every row of `heads` that a reader who follows the commits finds."""
    # Shards that were merged share a file, in which others may have been taken back since.
    shards_by_path: defaultdict[str, list[int]] = defaultdict(list)
    for commit in run.commits():
        for file in commit.files:
            if file.table == "heads":
                shards_by_path[file.path].append(commit.shard)
    tables: list[pa.Table] = []
    for path, shards in shards_by_path.items():
        rows = pq.ParquetFile(pa.BufferReader((run.path / path).read_bytes())).read()
        tables.append(rows.filter(pc.is_in(rows["shard"], pa.array(shards, rows["shard"].type))))
    return (
        pa.concat_tables(tables)
        .drop_columns("run_id")  # The runs that are compared have names of their own.
        .sort_by([(key, "ascending") for key in KEYS])
    )


def compare(measured: pa.Table, expected: pa.Table) -> tuple[int, int, int]:
    """Rows lost, rows doubled, rows with other values."""
    measured_keys, expected_keys = (
        Counter(zip(*(table[key].to_pylist() for key in KEYS), strict=True))
        for table in (measured, expected)
    )
    lost = (expected_keys - measured_keys).total()
    doubled = (measured_keys - expected_keys).total()
    if lost or doubled:
        return lost, doubled, 0
    measured_rows, expected_rows = measured.to_pandas(), expected.to_pandas()
    columns = [name for name in expected_rows.columns if expected_rows[name].dtype == "float32"]
    measured_values, expected_values = measured_rows[columns], expected_rows[columns]
    # Another process may sum in another order: float32 noise, and the same NULLs.
    difference = (measured_values - expected_values).abs().fillna(0)
    near = difference <= 1e-5 * (1 + expected_values.abs().fillna(0))
    same = near & (measured_values.isna() == expected_values.isna())
    return 0, 0, int((~same.all(axis=1)).sum())
