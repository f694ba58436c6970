"""The rows of a run, and how they differ from those of another one.

This judges what the product keeps and reads, so it shares no code with it: it follows the section
"Which rows count" of docs/reference/files.md.
"""

import hashlib
import json
import math
from collections import defaultdict
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

Rows = dict[tuple[object, ...], list[dict[str, Any]]]
"""Rows by their table and keys. More than one under a key are doubled."""

KEYS = ("intervention", "sequence", "layer", "head")


def rows_of(run: object) -> Rows:
    """Every row of `heads` and `sequences` that counts. A file must be as it was committed."""
    filesystem, root = pafs.FileSystem.from_uri(str(run))
    shards_of_file: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for shard, commit in _commits(filesystem, f"{root}/commits").items():
        for file in commit["files"]:
            shards_of_file[file["path"], file["digest"]].add(shard)
    rows: Rows = defaultdict(list)
    for (path, digest), shards in shards_of_file.items():
        content = _content(filesystem, f"{root}/{path}")
        assert hashlib.blake2b(content, digest_size=16).hexdigest() == digest, path
        table = path.partition("/")[0]
        if table in ("heads", "sequences"):
            for row in pq.read_table(pa.BufferReader(content)).to_pylist():
                if row["shard"] in shards:
                    rows[table, *(row.get(key) for key in KEYS)].append(row)
    return rows


def _commits(filesystem: pafs.FileSystem, directory: str) -> dict[int, Any]:
    """The commits that count, by shard."""
    listed = filesystem.get_file_info(pafs.FileSelector(directory))
    loose: dict[int, Any] = {}
    gathered: dict[int, Any] = {}
    for name in sorted(info.base_name for info in listed):
        content = _content(filesystem, f"{directory}/{name}")
        if name.startswith("segment-"):
            segment = pq.read_table(pa.BufferReader(content)).to_pylist()
            gathered |= {commit["shard"]: commit for commit in segment}
        elif name.startswith("shard-"):
            commit = json.loads(content)
            loose[commit["shard"]] = commit
    return loose | {shard: commit for shard, commit in gathered.items() if commit["files"]}


def _content(filesystem: pafs.FileSystem, path: str) -> bytes:
    with filesystem.open_input_file(path) as file:
        return file.read()


def compare(measured: Rows, expected: Rows) -> tuple[int, int, int]:
    """Rows lost, rows doubled, rows with other values."""
    keys = measured.keys() | expected.keys()
    surplus = [len(measured.get(key, [])) - len(expected.get(key, [])) for key in keys]
    pairs = (zip(measured.get(key, []), expected.get(key, []), strict=False) for key in keys)
    different = sum(not _is_same(*pair) for each in pairs for pair in each)
    return -sum(min(n, 0) for n in surplus), sum(max(n, 0) for n in surplus), different


def _is_same(row: dict[str, Any], expected: dict[str, Any]) -> bool:
    # Another process may sum in another order, which float32 shows.
    return row.keys() == expected.keys() and all(
        math.isclose(row[name], value, rel_tol=1e-5, abs_tol=1e-5)
        if isinstance(value, float) and isinstance(row[name], float)
        else row[name] == value
        # The runs that are compared have names of their own.
        for name, value in expected.items()
        if name != "run_id"
    )
