"""A thousand random damages: none is returned as data, and nothing else is left out."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from headcount import app
from jobs.checking import check_run
from jobs.compaction import compact
from queries import verified_files
from queries.asking import open_runs
from schemas import damage
from schemas.commits import Commit, fold
from schemas.errors import RunError
from schemas.parquet import parquet_bytes
from schemas.run_directory import RunDirectory
from tests.toy_runs import Entry, Row, local, write_run

DAMAGES, AT_ONCE = 1000, 12
SHARDS, PER_SHARD, LAYERS, HEADS = 24, 1, 2, 2
INTERVENTIONS = ("none", "zero_query_bias")
RUNS = ("a-1", "b-1")
TABLES = ("heads", "sequences", "profiles", "weights")


def toy(out: Path, name: str, weights: int) -> RunDirectory:
    """A run of a model with some weights: other numbers in files of about the same size."""
    draw = np.random.default_rng(weights)
    values = draw.random((2, SHARDS * PER_SHARD, LAYERS, HEADS), np.float32)

    def value(row: Row) -> float:
        return float(values[INTERVENTIONS.index(row.intervention), row.sequence, row.layer, row.head])

    def profiles(shard: int) -> list[Entry]:
        entry = {"layer": 1, "head": 1, "profile": "attention_by_lag", "count": PER_SHARD}
        return [entry | {"lag": lag, "mean": weights / (lag + 1), "m2": 0.5} for lag in range(2)]

    return write_run(
        out, name, {"sink_mass": value, "entropy": lambda row: 1 + value(row)},
        layers=LAYERS, heads=HEADS, sequences=SHARDS * PER_SHARD, per_shard=PER_SHARD,
        interventions=INTERVENTIONS, profiles=profiles,
        weights=[{"weight": "position_norm", "position": i, "value": weights} for i in range(3)],
    )  # fmt: skip


def loose(run: RunDirectory) -> None:
    """Leave the commits as they are."""


def folded(run: RunDirectory) -> None:
    fold(run.commits_directory, list(run.commits()))


def compacted(run: RunDirectory) -> None:
    compact(run, 3 * PER_SHARD * LAYERS * HEADS)


@dataclass
class Prepared:
    """Two runs as they were committed, and their files as an earlier measuring wrote them."""

    home: Path
    files: dict[Path, bytes]
    older: dict[Path, bytes]
    """By path of the file that it could be taken for."""
    shards: dict[Path, tuple[str, frozenset[int]]]
    """Run, and shards with rows in the file."""
    rows: dict[str, dict[tuple[str, int], list[str]]]
    """Rows by table, and by run and shard."""


def asked(home: Path) -> tuple[dict[str, dict[tuple[str, int], list[str]]], list[str]]:
    """Every row that queries return, and what they warn of."""
    heard: list[str] = []
    # Without the shipped views, which take most of the time.
    database = open_runs(home, queries=home / "no views", tell=heard.append)
    heard += [f"warning: {line}" for line in database.damage()]
    counts = ", ".join(f"(SELECT count(*) FROM {table})" for table in TABLES)
    database.rows(f"SELECT {counts}")
    rows: dict[str, dict[tuple[str, int], list[str]]] = {}
    for table in TABLES:
        # The rows of `weights` lie with shard 0.
        shard = "0" if table == "weights" else "shard"
        sql = f"SELECT run_id, {shard}, t::TEXT FROM {table} t ORDER BY ALL"
        rows[table] = {}
        for run, number, text in database.rows(sql):
            rows[table].setdefault((run, number), []).append(text)
    return rows, heard


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> list[Prepared]:
    found: list[Prepared] = []
    for change in (loose, folded, compacted):
        home, before = (tmp_path_factory.mktemp(f"{change.__name__}{i}") for i in (1, 2))
        files: dict[Path, bytes] = {}
        older: dict[Path, bytes] = {}
        shards: dict[Path, tuple[str, frozenset[int]]] = {}
        for number, name in enumerate(RUNS):
            now, then = toy(home, name, number), toy(before, name, number + 10)
            for run in (now, then):
                change(run)
            paths = {
                (f.table, f.intervention, commit.shard): (f.path, f.shards)
                for commit in then.commits()
                for f in commit.files
            }
            for commit in now.commits():
                for f in commit.files:
                    path = local(now.path) / f.path
                    files[path] = path.read_bytes()
                    _, known = shards.get(path, (name, frozenset()))
                    shards[path] = name, known | {commit.shard}
                    other, _ = paths[f.table, f.intervention, commit.shard]
                    older[path] = (local(then.path) / other).read_bytes()
        rows, heard = asked(home)
        assert heard == []
        found.append(Prepared(home, files, older, shards, rows))
    return found


def flipped(content: bytes, count: int, draw: random.Random) -> bytes:
    """The content with so many bytes changed, in one place."""
    start = draw.randrange(max(1, len(content) - count))
    changed = bytearray(content)
    for i in range(start, min(len(content), start + count)):
        changed[i] ^= draw.randrange(1, 256)
    return bytes(changed)


def alike(state: Prepared, path: Path, kind: str) -> list[Path]:
    """Files that could be taken for a file: of another shard, intervention, table or run."""
    run, table, intervention, name = path.parts[-4:]
    same = {
        "shard": lambda p: p[:3] == (run, table, intervention),
        "intervention": lambda p: p[:2] == (run, table) and p[3][:12] == name[:12],
        "table": lambda p: p[0] == run and p[1] != table,
        "run": lambda p: p[0] != run and p[1:3] == (table, intervention),
    }[kind]
    return [other for other in state.files if other != path and same(other.parts[-4:])]


def damaged(state: Prepared, path: Path, how: str, draw: random.Random) -> dict[Path, bytes | None]:
    """What lies where after one damage; None where nothing does."""
    content = state.files[path]
    if how.startswith("flip"):
        return {path: flipped(content, int(how[4:]), draw)}
    if how == "cut":
        return {path: content[: draw.randrange(len(content))]}
    if how == "longer":
        return {path: content + draw.randbytes(draw.choice([1, 16, 512]))}
    if how == "older":
        return {path: state.older[path]}
    if how.startswith("swap "):
        others = alike(state, path, how[5:])
        other = draw.choice(others) if others else path
        return {path: state.files[other], other: content}
    return {path: None if how == "gone" else b""}


HOW = (
    *("flip1", "flip16", "flip512") * 3,
    *("cut", "longer", "older", "gone", "empty") * 2,
    *("swap shard", "swap intervention", "swap table", "swap run"),
)


def put(path: Path, content: bytes | None, hide: bool) -> None:
    """Change a file; `hide` gives it the times that it had."""
    before = path.stat()
    if content is None:
        path.unlink()
        return
    path.write_bytes(content)
    if hide:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_no_damage_is_returned_as_data(
    prepared: list[Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified_files, "_folders", lambda: [tmp_path])
    draw = random.Random(1)
    count = 0
    while count < DAMAGES:
        state = draw.choice(prepared)
        told: dict[Path, bytes | None] = {}
        for path in draw.sample(sorted(state.files), AT_ONCE):
            told |= damaged(state, path, draw.choice(HOW), draw)
            count += 1
        for path, content in told.items():
            put(path, content, hide=draw.random() < 0.5)
        wrong = {path for path, content in told.items() if content != state.files[path]}
        bad = {(state.shards[p][0], shard) for p in wrong for shard in state.shards[p][1]}
        rows, heard = asked(state.home)
        for table in TABLES:
            expected = {key: kept for key, kept in state.rows[table].items() if key not in bad}
            assert rows[table] == expected, (table, told.keys())
        for name in {name for name, _ in bad}:
            lines = [line for line in heard if line.startswith(f"warning: run {name}: shard")]
            assert lines
            assert all("--verify measures" in line for line in lines)
        assert bad or not heard
        for path in told:
            path.write_bytes(state.files[path])
    for state in prepared:
        assert asked(state.home) == (state.rows, [])
