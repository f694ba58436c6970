"""Random damages: none is returned as data, and no other row is left out."""

import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from headcount.jobs.upkeep.checking import check_run
from headcount.jobs.upkeep.compaction import compact
from headcount.queries.ask.answers import run_query
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.queries.open import compared_files, verified_files
from headcount.schemas.errors import HeadcountError, RunError
from headcount.schemas.files import content_check
from headcount.schemas.files.commits import gather
from headcount.schemas.files.digests import digest_of
from headcount.schemas.files.parquet import parquet_bytes
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.places import Place
from headcount.schemas.tables import ROLLUPS
from tests.toys.commands import ended
from tests.toys.refusals import refused
from tests.toys.toy_runs import (
    Cell,
    Entry,
    Row,
    copy_of,
    data_file,
    flip_middle_bit,
    local,
    write_run,
)

DAMAGES = int(os.environ.get("HEADCOUNT_DAMAGES", "20"))
"""How many damages are drawn; `make chaos` draws a thousand."""

FILES_AT_ONCE = 10
SHARDS, PER_SHARD, LAYERS, HEADS = 6, 1, 2, 2
INTERVENTIONS = ("none", "zero_query_bias")
RUNS = ("a-1", "b-1")
TABLES = ("heads", "sequences", "profiles", "weights")


def write_toy_run(out: Path, name: str, weights: int) -> RunDirectory:
    """A run whose numbers depend on `weights`; the files have about the same size."""
    generator = np.random.default_rng(weights)
    values = generator.random((2, SHARDS * PER_SHARD, LAYERS, HEADS), np.float32)

    def value(row: Row) -> float:
        return float(values[INTERVENTIONS.index(row.intervention), *row[1:]])

    def profiles(shard: int) -> list[Entry]:
        entry = {"layer": 1, "head": 1, "profile": "attention_by_lag", "count": PER_SHARD}
        return [entry | {"lag": lag, "mean": weights / (lag + 1), "m2": 0.5} for lag in range(2)]

    return write_run(
        out,
        name,
        {"sink_mass": value, "entropy": lambda row: 1 + value(row)},
        layers=LAYERS,
        heads=HEADS,
        sequences=SHARDS * PER_SHARD,
        per_shard=PER_SHARD,
        interventions=INTERVENTIONS,
        profiles=profiles,
        weights=[{"weight": "position_norm", "position": i, "value": weights} for i in range(3)],
    )


def gather_all(run: RunDirectory) -> None:
    gather(run.commits_directory, list(run.commits()))


def gather_half(run: RunDirectory) -> None:
    gather(run.commits_directory, list(run.commits())[::2])


def compact_in_groups(run: RunDirectory) -> None:
    compact(run, 3 * PER_SHARD * LAYERS * HEADS)


Rows = dict[str, dict[tuple[str, int], list[str]]]
"""Rows by table, and by run and shard."""


@dataclass
class Prepared:
    """Two runs as they were committed, and the same files with other numbers."""

    home: Path
    files: dict[Path, bytes]
    older: dict[Path, bytes]
    """Content with other numbers, by path of the file that it could be taken for."""
    shards: dict[Path, tuple[str, frozenset[int]]]
    """Run, and shards with rows in the file."""
    rows: Rows


def open_tables(home: Place, **options: Any) -> RunDatabase:
    """Runs without the shipped views, which take most of the time."""
    return open_runs(home, queries=Path("no views"), **options)


def query_everything(home: Path) -> tuple[Rows, list[str]]:
    """Every row that queries return, and their warnings."""
    warnings: list[str] = []
    database = open_tables(home, tell=warnings.append)
    warnings += [f"warning: {line}" for line in database.damage()]
    # The rows of roll-ups are of no shard alone, so they are only read.
    counts = ", ".join(f"(SELECT count(*) FROM {table})" for table in (*TABLES, "rollups"))
    database.rows(f"SELECT {counts}")
    assert database.rows("FROM samples EXCEPT FROM heads") == []
    rows: Rows = {}
    for table in TABLES:
        # The rows of `weights` lie with shard 0.
        shard = "0" if table == "weights" else "shard"
        sql = f"SELECT run_id, {shard}, t::TEXT FROM {table} t ORDER BY ALL"
        rows[table] = {}
        for run, number, text in database.rows(sql):
            rows[table].setdefault((run, number), []).append(text)
    return rows, warnings


def late(*names: str) -> list[Any]:
    """Parameters of a long test."""
    return [pytest.param(name, marks=pytest.mark.long) for name in names]


LAYOUTS: dict[str, Callable[[RunDirectory], object]] = {
    "half of the commits in a segment": gather_half,
    "merged files": compact_in_groups,
}


Written = dict[str, RunDirectory]


def write_runs(out: Path, weights: int) -> Written:
    return {name: write_toy_run(out, name, weights + i) for i, name in enumerate(RUNS)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The runs of which tests damage copies, by name."""
    return write_runs(tmp_path_factory.mktemp("written"), 0)


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The same runs with other numbers."""
    return write_runs(tmp_path_factory.mktemp("older"), 10)


def prepare(
    folder: Path, runs: Sequence[Written], change: Callable[[RunDirectory], object]
) -> Prepared:
    """Copies of the runs and of the older ones in one layout."""
    state = Prepared(folder / "0", {}, {}, {}, {})
    for name in RUNS:
        now, then = (copy_of(each[name], folder / str(i)) for i, each in enumerate(runs))
        change(now)
        change(then)
        older = {
            (f.table, f.intervention, commit.shard): local(then.path) / f.path
            for commit in then.commits()
            for f in commit.files
        }
        for commit in now.commits():
            for f in commit.files:
                path = local(now.path) / f.path
                state.files[path] = path.read_bytes()
                _, known = state.shards.get(path, (name, frozenset()))
                state.shards[path] = name, known | {commit.shard}
                state.older[path] = older[f.table, f.intervention, commit.shard].read_bytes()
    rows, warnings = query_everything(state.home)
    assert warnings == []
    state.rows.update(rows)
    return state


def facts_of(path: Path) -> tuple[str, ...]:
    """Run, table, intervention and first shard of a file."""
    return (*path.parts[-4:-1], path.name[:12])


def damaged(state: Prepared, path: Path, how: str, generator: random.Random) -> bytes | None:
    """The content of a file after a damage; None if the file is gone."""
    content = state.files[path]
    if how.startswith("flip"):
        count = int(how[4:])
        start = generator.randrange(max(1, len(content) - count))
        flipped = bytes(byte ^ generator.randrange(1, 256) for byte in content[start:][:count])
        return content[:start] + flipped + content[start + count :]
    if how == "another":
        # A file that differs in its run, table, intervention or shard, or in two of them.
        alike = [p for p in state.files if 4 > sum(map(eq, facts_of(p), facts_of(path))) >= 2]
        return state.files[generator.choice(alike)]
    return {
        "cut": content[: generator.randrange(len(content))],
        "longer": content + generator.randbytes(generator.choice([1, 16, 512])),
        "older": state.older[path],
        "empty": b"",
    }.get(how)


KINDS_OF_DAMAGE = (
    *("flip1", "flip16", "flip512") * 3,
    *("cut", "longer", "older", "gone", "empty") * 2,
    *("another",) * 4,
)


def replace_file(path: Path, content: bytes | None, hide: bool) -> None:
    """Change a file; `hide` gives it the times that it had."""
    before = path.stat()
    if content is None:
        path.unlink()
        return
    path.write_bytes(content)
    if hide:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("layout", ["merged files", *late("half of the commits in a segment")])
def test_no_damage_is_read_as_data(
    layout: str, written: Written, older: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    state = prepare(tmp_path / "runs", [written, older], LAYOUTS[layout])
    generator = random.Random(layout)
    files = sorted(state.files)
    at_once = min(FILES_AT_ONCE, len(files) // 3)
    for _ in range(0, DAMAGES, len(LAYOUTS) * at_once):
        damages = {
            path: damaged(state, path, generator.choice(KINDS_OF_DAMAGE), generator)
            for path in generator.sample(files, at_once)
        }
        for path, content in damages.items():
            replace_file(path, content, hide=generator.random() < 0.5)
        changed_paths = {path for path, content in damages.items() if content != state.files[path]}
        # Shards of a damaged roll-up or sample are answered from their rows.
        damaged_shards = {
            (state.shards[path][0], shard)
            for path in changed_paths
            if not {"rollups", "samples"} & {*path.parts}
            for shard in state.shards[path][1]
        }
        rows, warnings = query_everything(state.home)
        for table in TABLES:
            expected = {
                key: kept for key, kept in state.rows[table].items() if key not in damaged_shards
            }
            assert rows[table] == expected, (table, damages.keys())
        for name in {name for name, _ in damaged_shards}:
            lines = [line for line in warnings if line.startswith(f"warning: run {name}: shard")]
            assert lines
            for line in lines:
                is_repeated = re.search(": (rollups|samples)/", line)
                remedy = "writes it again" if is_repeated else "--verify measures"
                assert remedy in line
        assert changed_paths or not warnings
        for path in damages:
            path.write_bytes(state.files[path])
    assert query_everything(state.home) == (state.rows, [])


@pytest.fixture
def run(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return copy_of(written["a-1"], tmp_path / "runs")


def heads_file(run: RunDirectory, shard: int) -> Path:
    return local(data_file(run, "heads", "none", shard))


def test_roll_ups_that_lack_a_column_are_to_be_written_again(tmp_path: Path):
    values: dict[str, Cell] = {"sink_mass": lambda row: row.sequence / 8}
    run = write_run(tmp_path, "a-1", values, sequences=4, per_shard=1, layers=1, heads=1)
    compact(run)
    (file,) = content_check.committed_files(run.commit_log(), [ROLLUPS.name])
    assert content_check.problem(run.path, file, {}) is None
    rows = pq.ParquetFile(local(run.path) / file.path).read()
    content = parquet_bytes(rows.drop_columns("document_fourths"))
    (local(run.path) / file.path).write_bytes(content)
    older = replace(file, bytes=content.size, digest=digest_of(content))
    expected = "has no column document_fourths: an earlier version wrote it"
    assert content_check.problem(run.path, older, {}) == expected


def test_a_checked_file_is_known_until_changed(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    read: list[str] = []

    def problem(*arguments: Any) -> str | None:
        read.append(arguments[1].path)
        return content_check.problem(*arguments)

    monkeypatch.setattr(compared_files, "problem", problem)

    def files_read(sql: str) -> int:
        read.clear()
        open_tables(run.path).rows(sql)
        return len(read)

    def twice(sql: str) -> list[int]:
        return [files_read(sql) for _ in range(2)]

    heads_files = 2 * SHARDS
    # Files that have just been written could change again and look the same.
    now = time.time()
    for written in (now + 3600, now):
        for file in local(run.path).glob("heads/*/*.parquet"):
            os.utime(file, (written, written))
        if written > now:
            assert twice("FROM heads") == [heads_files, heads_files]
    time.sleep(verified_files.CLOCK_TICK_SECONDS)
    assert files_read("FROM runs") == 0
    assert twice("FROM heads") == [heads_files, 0]
    assert twice("FROM sequences") == [2 * SHARDS, 0]
    flip_middle_bit(heads_file(run, 3))
    assert twice("FROM heads") == [1, 1]
    # If the memory is lost, whole or in parts, only time is lost.
    (memory,) = (local(run.path).parents[1] / "caches" / "headcount" / "verified").iterdir()
    memory.write_bytes(memory.read_bytes()[:-21])
    assert files_read("FROM heads, sequences LIMIT 1") in (2, 3)
    memory.write_bytes(b"")
    assert files_read("FROM heads") == heads_files
    # Where neither of the places for it can be written.
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    (tmp_path / f"headcount-{os.getuid()}").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert twice("FROM heads") == [heads_files, heads_files]


def test_a_question_checks_only_the_tables_that_it_reads(run: RunDirectory):
    flip_middle_bit(heads_file(run, 3))
    database = open_tables(run.path)
    assert len(database.rows("FROM sequences")) == 2 * SHARDS
    assert database.damage() == []
    assert len(database.rows("FROM heads")) == 8 * (SHARDS - 1)
    # From now on it is in no view.
    assert len(database.rows("FROM sequences")) == 2 * (SHARDS - 1)
    (line,) = database.damage()
    assert line.startswith("run a-1: shard 3: heads/intervention=none/shard-000003.parquet has oth")
    sql = "SELECT status, damage FROM shards WHERE status <> 'done'"
    why = "heads/intervention=none/shard-000003.parquet has other content than was committed"
    assert database.rows(sql) == [("damaged", why)]


def test_damage_is_found_however_a_table_is_asked_for(run: RunDirectory):
    flip_middle_bit(heads_file(run, 3))
    for question in (
        "FROM by_head",
        "PIVOT heads ON layer USING count(*) GROUP BY head",
        "FROM query_table('heads')",
        "SUMMARIZE heads",
        "WITH sequences AS (FROM main.heads) FROM sequences",
        "EXPLAIN ANALYZE FROM heads",
    ):
        warnings: list[str] = []
        list(run_query(open_runs(run.path, tell=warnings.append), question).rows())
        assert [line[:26] for line in warnings] == ["warning: run a-1: shard 3:"], question


def test_a_long_check_is_announced(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compared_files, "SECONDS_BEFORE_NOTICE", 0.0)
    warnings: list[str] = []
    open_tables(run.path, tell=warnings.append).rows("FROM heads")
    assert warnings == ["checking 0.0 GB against the commits, once"]


def run_command(*arguments: str) -> tuple[int, list[str]]:
    done = ended(*arguments)
    return done.code, done.stdout.splitlines()


def test_check_names_the_damage_and_the_command_that_mends_it(
    run: RunDirectory, written: Written, tmp_path: Path
):
    home = str(tmp_path / "runs")
    size = r"37 files, 0\.2 MB"
    code, (line,) = run_command("check", home)
    assert code == 0
    assert re.fullmatch(f"a-1: 6 shards, {size}, as committed", line)
    flip_middle_bit(heads_file(run, 3))
    heads_file(run, 5).unlink()
    heads_file(run, 4).with_name(".shard-000004.parquet.1a2b.tmp").write_bytes(b"half")
    copy_of(written["b-1"], tmp_path / "runs")
    code, lines = run_command("check", home)
    assert code == 1
    folder = "heads/intervention=none"
    assert lines[:3] == [
        f"a-1: shard 3: {folder}/shard-000003.parquet has other content than was committed",
        f"a-1: shard 5: {folder}/shard-000005.parquet is gone",
        f"a-1: 1 file that no commit refers to; headcount compact {run.path} deletes what it may",
    ]
    mend = re.escape(f"headcount resume {run.path} --verify")
    assert re.fullmatch(f"a-1: 2 shards of 6 damaged, in {size}; {mend} measures .*", lines[3])
    assert re.fullmatch(f"b-1: 6 shards, {size}, as committed", lines[4])


def test_a_value_outside_its_range_is_damage_even_if_the_digest_fits(tmp_path: Path):
    columns = {"sink_mass": lambda row: 1124.2 if row.sequence == 1 else 0.25}
    run = write_run(tmp_path, "a-1", columns, sequences=3, per_shard=1)
    # Toy runs widen ranges to their numbers.
    manifest = local(run.manifest_file)
    manifest.write_text(manifest.read_text().replace("1124.2", "1.0"))
    found = check_run(run).damaged[0]
    assert found.why == "has sink_mass from 1124.2 to 1124.2, outside of its range from 0 to 1"
    assert {row[:1] for row in open_runs(run.path).rows("SELECT shard FROM heads")} == {(0,), (2,)}


def test_a_damaged_segment_is_refused_with_advice(run: RunDirectory):
    gather_all(run)
    (file,) = local(run.commits_directory).iterdir()
    whole = file.read_bytes()
    for i in random.Random(0).sample(range(len(whole)), 20):
        file.write_bytes(whole[:i] + bytes([whole[i] ^ 4]) + whole[i + 1 :])
        told = refused(RunError, run.commit_log)
        assert re.search(r"segment-000000-\w+\.parquet: damaged .* headcount resume", told)
    file.write_bytes(whole)
    assert len(run.commit_log()) == SHARDS


SEGMENT = "commits/segment-000000-1a2b3c4d.parquet"
BREAKAGES = {
    "no scan": ("manifest.json", '"scan":', '"scam":', "not a manifest"),
    "gone": ("manifest.json", None, "", "no manifest.json"),
    "a segment": (SEGMENT, r"\A.*", "PAR1", "damaged"),
    "another column": (
        "manifest.json",
        r'"statistics":\{"',
        r'"statistics":{"no_column":{},"',
        "do not fit the manifest",
    ),
}
"""A file of the run, what is replaced in it by what, and what is said. None: it is deleted."""


@pytest.mark.parametrize("what", ["gone", "another column", *late("no scan", "a segment")])
def test_a_broken_run_does_not_hide_other_runs(
    run: RunDirectory, what: str, written: Written, tmp_path: Path
):
    home = tmp_path / "runs"
    other = copy_of(written["b-1"], home)
    name, old, new, why = BREAKAGES[what]
    file = local(run.path) / name
    if old is None:
        file.unlink()
    else:
        content = file.read_text() if file.exists() else ""
        file.write_text(re.sub(old, new, content, flags=re.DOTALL))
    warnings: list[str] = []
    database = open_runs(home, tell=warnings.append)
    assert database.rows("SELECT run_id, count(*) FROM heads GROUP BY 1") == [("b-1", 8 * SHARDS)]
    assert database.rows("SELECT run_id FROM runs") == [("b-1",)]
    (line,) = database.damage()
    assert all(part in line for part in (str(run.path), why, "bring back a copy")), line
    assert "headcount rm" not in line
    for command, *words in (("query", home, "FROM heads"), ("list", home), ("compact", home)):
        done = ended(command, *words, columns=1000)
        # Reading leaves the broken run out; compaction fails because it could not do its work.
        fine = command != "compact" or what == "another column"
        assert (done.code == 0) == fine, done.output
        if not (what == "another column" and command != "query"):
            assert why in done.stderr
    assert database.rows("SELECT run_id, count(*) FROM heads GROUP BY 1") == [("b-1", 8 * SHARDS)]
    assert [name[:9] for name in os.listdir(local(other.commits_directory))] == ["segment-0"]
    shutil.rmtree(local(other.path))
    with pytest.raises(HeadcountError, match=why):
        open_runs(home).rows("FROM heads")
