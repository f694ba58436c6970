"""A run grows, or continues with another batch size, other places or a mended corpus.

Its rows are those of a run that was like this from the beginning, even if a command is killed in
between, at any moment.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from headcount.jobs.cluster.ray_cluster import Resources
from headcount.jobs.corpus.preparation import Preparation
from headcount.jobs.plan.plan import Plan, make_plan, prepare_run, replan
from headcount.jobs.run.loop import missing_shards, run_to_end
from headcount.jobs.upkeep.checking import check_run
from headcount.jobs.upkeep.compaction import compact
from headcount.jobs.upkeep.status import as_lines, read_status
from headcount.queries.open.connection import connect, describe
from headcount.schemas.errors import RunError, ScanError
from headcount.schemas.files import places
from headcount.schemas.files.commits import gather
from headcount.schemas.files.places import write_whole
from headcount.schemas.files.run_directory import RunDirectory, pc
from headcount.schemas.scans.scan import Scan, parse_scan
from headcount.workers.inputs.corpus.sequence_reader import SequenceReader
from headcount.workers.replica import Replica
from headcount.workers.shard import commit_shard, measure_shard
from tests.toys.toy_replica import ToyReplica
from tests.toys.toy_runs import connect_to_tables, data_file, local

SHARD_SIZE = 3
FIELDS: dict[str, Any] = {
    "model": "bundled:attn-only-2l-mini",
    "n_ctx": 9,
    "input": {"family": "uniform_random"},
    "interventions": ["none", "zero_head(0,0)"],
    "statistics": ["entropy", "sink_mass"],
    "sequences_per_shard": SHARD_SIZE,
}


class Killed(BaseException):
    """The process is gone."""


def plan_of(directory: Path, sequences: int | str, **changes: Any) -> Plan:
    """Plan the run of this file's scan, with so many sequences and other changes."""
    return make_plan(scan_of(directory, sequences, **changes), "grown")


def scan_of(directory: Path, sequences: int | str, **changes: Any) -> Scan:
    """This file's scan, with so many sequences and other changes."""
    return parse_scan(FIELDS | {"sequences": sequences, "out": str(directory)} | changes)


def run_here(plan: Plan, replica: type[Replica] = ToyReplica, verify: bool = False) -> list[str]:
    """Bring a run to its end in this process; returns the lines that it says."""
    printed = io.StringIO()
    prepare_run(plan, "")
    console = Console(file=printed, width=1000, highlight=False)
    assert run_to_end(plan, Resources(0, 1, "cpu", None), console, verify, replica) == []
    return printed.getvalue().splitlines()


def rows(run: RunDirectory) -> pa.Table:
    """The rows of `heads` that a reader sees, each once."""
    columns = "intervention, sequence, shard, layer, head, entropy, sink_mass"
    # No views over the tables, and no comments: this connection is asked once.
    connection = connect(run.path, lazily=True)
    table = connection.sql(f"SELECT {columns} FROM heads ORDER BY ALL").to_arrow_table()
    keys = table.select(["intervention", "sequence", "layer", "head"]).to_pylist()
    assert len({tuple(key.values()) for key in keys}) == len(keys)
    return table


def rows_of_first_shard(table: pa.Table) -> pa.Table:
    return table.filter(pc.less(table["sequence"], SHARD_SIZE))


def count_rows_by_glob(run: RunDirectory) -> int:
    """How many rows of `heads` a bare glob finds."""
    import duckdb

    pattern = local(run.path) / "heads" / "*" / "*.parquet"
    ((count,),) = duckdb.connect().execute(f"SELECT count(*) FROM '{pattern}'").fetchall()
    return count


@pytest.fixture(scope="module")
def rows_of_whole_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], pa.Table]:
    """The rows of a run of so many sequences that never grew."""
    cached_rows: dict[int, pa.Table] = {}

    def rows_of_size(sequence_count: int) -> pa.Table:
        if sequence_count not in cached_rows:
            plan = plan_of(tmp_path_factory.mktemp("whole"), sequence_count)
            run_here(plan)
            cached_rows[sequence_count] = rows(plan.run)
        return cached_rows[sequence_count]

    return rows_of_size


def leave_commit_log(run: RunDirectory) -> None:
    """Leave a run's commit log as it is."""


def gather_all(run: RunDirectory) -> None:
    gather(run.commits_directory, list(run.commits()))


def gather_and_commit_again(run: RunDirectory) -> None:
    """What a late attempt leaves: a segment, and a file of the same shard."""
    commits = list(run.commits())
    gather(run.commits_directory, commits)
    write_whole(run.commit_file(commits[-1].shard), commits[-1].model_dump_json().encode())


def compact_all(run: RunDirectory) -> None:
    compact(run)


def compact_in_pairs(run: RunDirectory) -> None:
    layers, heads = 2, 8
    compact(run, 2 * SHARD_SIZE * layers * heads)


@pytest.mark.parametrize(
    ("first_size", "change_commit_log"),
    [
        # A short shard alone, behind a whole one, and none. A merged file may hold the short one
        # beside whole ones, or hold whole ones alone.
        (2, leave_commit_log),
        (5, leave_commit_log),
        *((size, compact_all) for size in (2, 5, 6)),
        *((size, gather_and_commit_again) for size in (5, 6)),
        # The only size at which a merged file of whole shards has a short one behind it.
        (7, compact_in_pairs),
        # Each of these begins or goes on as one of those above does.
        pytest.param(6, leave_commit_log, marks=pytest.mark.long),
        *(pytest.param(size, gather_all, marks=pytest.mark.long) for size in (5, 6)),
        *(pytest.param(size, compact_in_pairs, marks=pytest.mark.long) for size in (5, 6)),
    ],
)
def test_a_run_is_extended(
    tmp_path: Path,
    rows_of_whole_run: Callable[[int], pa.Table],
    change_commit_log: Callable[[RunDirectory], None],
    first_size: int,
) -> None:
    begun_plan = plan_of(tmp_path, first_size)
    run_here(begun_plan)
    change_commit_log(begun_plan.run)
    finished_before = {c.shard: c.finished for c in begun_plan.run.commits()}
    longer_plan = plan_of(tmp_path, 11)
    assert longer_plan.run == begun_plan.run
    # A last shard that was short does not count any more.
    whole_shards = first_size // SHARD_SIZE
    assert longer_plan.shards_done == whole_shards
    said = run_here(longer_plan)
    assert f"extended from {first_size} to 11 sequences" in said[0]
    assert rows(longer_plan.run).equals(rows_of_whole_run(11))
    assert count_rows_by_glob(longer_plan.run) == len(rows_of_whole_run(11))
    commits = list(longer_plan.run.commits())
    assert [(c.start, c.stop) for c in commits] == [(0, 3), (3, 6), (6, 9), (9, 11)]
    measured_again = [c.shard for c in commits if finished_before.get(c.shard) != c.finished]
    assert measured_again == list(range(whole_shards, 4))
    manifest = longer_plan.run.manifest()
    assert (manifest.sequences, manifest.shards) == (11, 4)
    assert read_status(longer_plan.run).complete
    # It can be extended again, from any state of the commit log, and compacted afterwards.
    change_commit_log(longer_plan.run)
    run_here(plan_of(tmp_path, 13))
    assert rows(longer_plan.run).equals(rows_of_whole_run(13))
    assert count_rows_by_glob(longer_plan.run) == len(rows_of_whole_run(13))
    compact(longer_plan.run)
    assert rows(longer_plan.run).equals(rows_of_whole_run(13))
    assert count_rows_by_glob(longer_plan.run) == len(rows_of_whole_run(13))


def test_a_scan_of_fewer_sequences_measures_nothing_and_keeps_all(
    tmp_path: Path, rows_of_whole_run: Callable[[int], pa.Table]
) -> None:
    run_here(plan_of(tmp_path, 11))
    plan_of_fewer = plan_of(tmp_path, 4)
    assert (
        plan_of_fewer.manifest.sequences,
        plan_of_fewer.requested_sequences,
        plan_of_fewer.shards_done,
    ) == (11, 4, 4)
    said = run_here(plan_of_fewer)
    assert "4 sequences asked for, and the run has 11; they all stay" in said[0]
    assert "4 shards, 4 of them done" in said[1]
    assert rows(plan_of_fewer.run).equals(rows_of_whole_run(11))


def test_an_unfinished_run_measures_only_the_requested_sequences(tmp_path: Path) -> None:
    begun_plan = plan_of(tmp_path, 11)
    run_here(begun_plan)
    for shard in (1, 3):
        local(begun_plan.run.commit_file(shard)).unlink()
    run_here(plan_of(tmp_path, 4))
    assert begun_plan.run.commit_log([])["shard"].to_pylist() == [0, 1, 2]
    assert not read_status(begun_plan.run).complete


def test_a_status_counts_what_is_missing_of_an_extended_run(tmp_path: Path) -> None:
    begun_plan = plan_of(tmp_path, 5)
    run_here(begun_plan)
    assert [plan_of(tmp_path, n).shards_done for n in (5, 6, 11)] == [2, 1, 1]
    status = read_status(begun_plan.run)
    assert (status.complete, status.done, status.missing) == (True, 2, 0)
    manifest = begun_plan.run.manifest()
    longer_manifest = manifest.model_copy(update={"sequences": 11, "shards": 4})
    local(begun_plan.run.manifest_file).write_text(longer_manifest.model_dump_json())
    status = read_status(begun_plan.run)
    assert (status.complete, status.done, status.missing) == (False, 1, 3)
    assert status.tokens_done == SHARD_SIZE * 9 * 2


def test_a_commit_that_a_late_replica_left_short_is_measured_anew(
    tmp_path: Path, rows_of_whole_run: Callable[[int], pa.Table]
) -> None:
    begun_plan = plan_of(tmp_path, 5)
    run_here(begun_plan)
    short_commit = list(begun_plan.run.commits())[1]
    run_here(plan_of(tmp_path, 11))
    write_whole(begun_plan.run.commit_file(1), short_commit.model_dump_json().encode())
    run_here(plan_of(tmp_path, 11))
    assert rows(begun_plan.run).equals(rows_of_whole_run(11))


def test_a_replica_that_outlived_its_driver_leaves_an_extended_shard_alone(
    tmp_path: Path, rows_of_whole_run: Callable[[int], pa.Table]
) -> None:
    begun_plan = plan_of(tmp_path, 5)
    prepare_run(begun_plan, "")
    replica = ToyReplica(begun_plan.info, begun_plan.scan)
    short_shard = measure_shard(replica, begun_plan.sequences.shard(1))
    run_here(begun_plan)
    longer_plan = plan_of(tmp_path, 11)
    run_here(longer_plan)
    with pytest.raises(RunError, match="the run has grown since this attempt began, and shard 1"):
        commit_shard(begun_plan.scan, begun_plan.run, short_shard, 1)
    gather_all(begun_plan.run)
    with pytest.raises(RunError, match="goes to sequence 6, not 5"):
        commit_shard(begun_plan.scan, begun_plan.run, short_shard, 1)
    assert rows(begun_plan.run).equals(rows_of_whole_run(11))
    assert check_run(begun_plan.run).damaged == []


def test_a_late_attempt_leaves_a_committed_shard_alone(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 5)
    prepare_run(plan, "")
    replica = ToyReplica(plan.info, plan.scan)
    first_attempt, late_attempt = (
        measure_shard(replica, plan.sequences.shard(0)) for _ in range(2)
    )
    # Two attempts may differ in the last bit.
    for measurements in late_attempt.measured.values():
        measurements.tables["heads"]["entropy"] += np.float32(2**-30)
    committed = commit_shard(plan.scan, plan.run, first_attempt, 1)
    assert commit_shard(plan.scan, plan.run, late_attempt, 2) == committed
    assert (check_run(plan.run).damaged, check_run(plan.run).unreferenced) == ([], 0)
    # A damaged shard is taken back, and measured by the attempt that comes first.
    local(data_file(plan.run, "heads", "none", 0)).write_bytes(b"PAR1")
    assert missing_shards(plan).tolist() == [0, 1]
    again = commit_shard(plan.scan, plan.run, late_attempt, 2)
    assert (again.attempt, list(plan.run.commits())) == (2, [again])
    assert check_run(plan.run).damaged == []


def test_two_attempts_that_write_at_once_leave_one_whole_shard(
    tmp_path: Path, rows_of_whole_run: Callable[[int], pa.Table]
) -> None:
    """Both look for a commit before either has written one."""
    plan = plan_of(tmp_path, 5)
    run_here(plan)
    replica = ToyReplica(plan.info, plan.scan)
    late_attempt = measure_shard(replica, plan.sequences.shard(0))
    for measurements in late_attempt.measured.values():
        measurements.tables["heads"]["entropy"] += np.float32(2**-30)
    commit_file = local(plan.run.commit_file(0))
    first_commit = commit_file.read_bytes()
    commit_file.unlink()
    commit_shard(plan.scan, plan.run, late_attempt, 2)
    commit_file.write_bytes(first_commit)
    assert check_run(plan.run).damaged == []
    # The files of the other attempt are gone when all shards are done, so that a glob is right.
    assert check_run(plan.run).unreferenced == 2
    run_here(plan_of(tmp_path, 5))
    assert rows(plan.run).equals(rows_of_whole_run(5))
    assert (check_run(plan.run).damaged, check_run(plan.run).unreferenced) == ([], 0)


def test_a_damaged_roll_up_is_no_reason_to_measure(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 11)
    run_here(plan)
    compact_all(plan.run)
    before = list(plan.run.commits())
    for rollup in local(plan.run.path).glob("rollups/intervention=none/*.parquet"):
        rollup.write_bytes(b"PAR1")
    assert missing_shards(plan, verify=True).tolist() == []
    assert list(plan.run.commits()) == before
    status = read_status(plan.run)
    assert (status.done, status.damaged) == (4, 0)
    assert {damage.path[:8] for damage in check_run(plan.run).damaged} == {"rollups/"}


def test_damage_in_a_merged_file_does_not_stop_an_extension(
    tmp_path: Path, rows_of_whole_run: Callable[[int], pa.Table]
) -> None:
    begun_plan = plan_of(tmp_path, 5)
    run_here(begun_plan)
    compact_all(begun_plan.run)
    (merged_file,) = (local(begun_plan.run.path) / "heads" / "intervention=none").iterdir()
    content = bytearray(merged_file.read_bytes())
    content[len(content) // 2] ^= 1  # One flipped bit.
    merged_file.write_bytes(content)
    run_here(plan_of(tmp_path, 11))
    assert rows(begun_plan.run).equals(rows_of_whole_run(11))
    assert count_rows_by_glob(begun_plan.run) == len(rows_of_whole_run(11))


def die_after(monkeypatch: pytest.MonkeyPatch, allowed_changes: int | None) -> Callable[[], int]:
    """Raise `Killed` at the next change of the disk after `allowed_changes`; returns a counter.

    A change is a file that appears whole or disappears.
    """
    changes_made = 0
    real_replace, real_unlink = os.replace, Path.unlink

    def count_change() -> None:
        nonlocal changes_made
        if changes_made == allowed_changes:
            raise Killed
        changes_made += 1

    def counted_replace(source: Path, target: Path) -> None:
        count_change()
        real_replace(source, target)

    def counted_unlink(path: Path, missing_ok: bool = False) -> None:
        if path.exists() and not path.name.endswith((".tmp", ".lock")):
            count_change()
        real_unlink(path, missing_ok)

    monkeypatch.setattr(places.os, "replace", counted_replace)
    monkeypatch.setattr(Path, "unlink", counted_unlink)
    return lambda: changes_made


@pytest.mark.parametrize(
    ("change_commit_log", "interventions"),
    [
        (leave_commit_log, FIELDS["interventions"]),
        # A commit log in another form is taken back in the same way for each intervention.
        pytest.param(gather_and_commit_again, ["none"], marks=pytest.mark.long),
        pytest.param(compact_all, ["none"], marks=pytest.mark.long),
    ],
)
def test_killed_at_any_change_of_the_disk_the_same_command_ends_with_the_same_rows(
    tmp_path: Path,
    rows_of_whole_run: Callable[[int], pa.Table],
    change_commit_log: Callable[[RunDirectory], None],
    interventions: list[str],
) -> None:
    expected_rows, rows_before = (
        table.filter(pc.is_in(table["intervention"], pa.array(interventions)))
        for table in map(rows_of_whole_run, (8, 5))
    )
    kept_rows = rows_of_first_shard(rows_before)
    begun_plan = plan_of(tmp_path / "begun", 5, interventions=interventions)
    run_here(begun_plan)
    change_commit_log(begun_plan.run)
    was_killed = True
    allowed_changes = 0
    while was_killed:
        directory = tmp_path / str(allowed_changes)
        shutil.copytree(tmp_path / "begun", directory)
        run = RunDirectory.of(str(directory), begun_plan.run.run_id)
        with pytest.MonkeyPatch.context() as patch:
            die_after(patch, allowed_changes)
            try:
                run_here(plan_of(directory, 8, interventions=interventions))
                was_killed = False
            except Killed:
                pass
        rows_in_between = rows(run)
        if was_killed:
            # The first shard never goes; the second is there as it was, not at all, or longer.
            sequence_count = len(rows_in_between) * SHARD_SIZE // len(kept_rows)
            assert sequence_count in (3, 5, 6, 8)
            assert rows_of_first_shard(rows_in_between).equals(kept_rows)
        run_here(plan_of(directory, 8, interventions=interventions))
        assert rows(run).equals(expected_rows)
        assert count_rows_by_glob(run) == len(expected_rows)
        allowed_changes += 1
    assert allowed_changes >= 10


def test_a_run_continues_with_another_batch_size(tmp_path: Path) -> None:
    begun_plan = plan_of(tmp_path, 5)
    run_here(begun_plan)
    local(begun_plan.run.commit_file(1)).unlink()
    smaller_plan = plan_of(tmp_path, 5, batch_size=2)
    assert smaller_plan.run == begun_plan.run
    run_here(smaller_plan, Replica)
    assert begun_plan.run.manifest().batch_size == 2
    assert replan(begun_plan.run).scan.batch_size == 2
    assert replan(begun_plan.run, ["batch_size=1"]).scan.batch_size == 1
    longer_plan = replan(begun_plan.run, ["sequences=8"])
    assert (longer_plan.scan.batch_size, longer_plan.manifest.sequences) == (2, 8)
    with pytest.raises(
        ScanError, match=r"--set seed=3: when grown-.* continues, only batch_size, "
    ):
        replan(begun_plan.run, ["seed=3"])


def test_the_second_of_two_that_extend_at_once_is_refused(tmp_path: Path) -> None:
    run_here(plan_of(tmp_path, 5))
    slow_plan = plan_of(tmp_path, 8)
    run_here(plan_of(tmp_path, 11))
    with pytest.raises(RunError, match="another process has extended this run meanwhile"):
        run_here(slow_plan)


def fields_of_corpus(text_file: Path, **options: Any) -> dict[str, Any]:
    """The input of a scan of all files in the directory of one."""
    files = str(text_file.parent / "*.jsonl")
    return {"input": {"family": "pile", "files": files, **options}}


def write_texts(file: Path, *documents: int) -> Path:
    """Write a file with documents of so many letters, no two of them alike."""
    lines: list[str] = []
    for length in documents:
        letters = [chr(ord("a") + (i * 7 + length) % 26) for i in range(length)]
        lines.append(json.dumps({"text": "".join(letters)}) + "\n")
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(lines))
    return file


@pytest.mark.parametrize("packing", ["document", "concat"])
def test_a_corpus_run_is_extended(tmp_path: Path, packing: str) -> None:
    corpus_file = write_texts(tmp_path / "texts" / "a.jsonl", *range(8, 24))
    fields = fields_of_corpus(corpus_file, packing=packing) | {"model": "bundled:gpt2-mini"}
    run_here(plan_of(tmp_path / "out", 4, **fields))
    run_here(plan_of(tmp_path / "out", 8, **fields))
    grown_plan = plan_of(tmp_path / "out", "all", **fields)
    run_here(grown_plan)
    run = grown_plan.run
    write_texts(tmp_path / "texts" / "b.jsonl", 30, 40, 50)
    assert plan_of(tmp_path / "out", 8, **fields).manifest.sequences == run.manifest().sequences
    grown_plan = plan_of(tmp_path / "out", "all", **fields)
    assert grown_plan.manifest.sequences > run.manifest().sequences
    run_here(grown_plan)
    assert len(run.manifest().identity["corpus"]["sources"]) == 2
    lone_plan = plan_of(tmp_path / "alone", "all", **fields)
    run_here(lone_plan)
    assert rows(run).equals(rows(lone_plan.run))
    tokens_sql = "SELECT intervention, sequence, file, row, tokens FROM sequences ORDER BY ALL"
    tokens, expected_tokens = (
        connect_to_tables(each.path).execute(tokens_sql).fetchall() for each in (run, lone_plan.run)
    )
    assert tokens == expected_tokens


def half_measured_run(tmp_path: Path, **options: Any) -> tuple[dict[str, Any], Path, RunDirectory]:
    """A run whose shard 2, sequences 6 to 8, is not measured.

    Its 16 documents are 16 sequences. Joined, they would make more, so they are fewer.
    """
    options = {"packing": "document"} | options
    longest = 24 if options["packing"] == "document" else 14
    corpus_file = write_texts(tmp_path / "texts" / "b.jsonl", *range(8, longest))
    fields = fields_of_corpus(corpus_file, **options) | {"model": "bundled:gpt2-mini", "n_ctx": 5}
    begun_plan = plan_of(tmp_path / "out", "all", **fields)
    run_here(begun_plan)
    local(begun_plan.run.commit_file(2)).unlink()
    return fields, corpus_file, begun_plan.run


def reverse_text(file: Path, row: int) -> None:
    """Change a document without changing the length of its file."""
    lines = file.read_text().splitlines(keepends=True)
    text = json.loads(lines[row])["text"]
    lines[row] = lines[row].replace(text, text[::-1])
    file.write_text("".join(lines))


def rows_of_sequence(reader: SequenceReader, sequence: int) -> list[int]:
    """The rows of the documents that a sequence is made of."""
    return [int(block.row[document]) for block, document in reader.documents_of(sequence)]


def tokens_read(run: RunDirectory) -> list[Any]:
    sql = "SELECT sequence, row, tokens FROM sequences WHERE intervention = 'none' ORDER BY ALL"
    return connect_to_tables(run.path).execute(sql).fetchall()


@pytest.mark.parametrize(
    ("packing", "options"),
    [
        ("document", {"shuffle": 3}),
        ("concat", {"shuffle": 3}),
        ("concat", {"skip": 1}),
        # In the order of the files, sequences are found by the same rule.
        pytest.param("document", {}, marks=pytest.mark.long),
        pytest.param("concat", {}, marks=pytest.mark.long),
        pytest.param("document", {"skip": 1}, marks=pytest.mark.long),
    ],
)
def test_a_run_continues_after_an_unmeasured_document_was_mended(
    tmp_path: Path, packing: str, options: dict[str, Any]
) -> None:
    fields, file, run = half_measured_run(tmp_path, packing=packing, **options)
    plan_before = plan_of(tmp_path / "out", "all", **fields)
    assert not plan_before.has_new_index
    reader = plan_before.sequences.reader
    assert len(reader) > 9
    changed_row = rows_of_sequence(reader, 7)[0]
    # With joined documents, a shard beside it may also be made of the document.
    affected_shards = {
        i // SHARD_SIZE for i in range(len(reader)) if changed_row in rows_of_sequence(reader, i)
    }
    for shard in affected_shards:
        local(run.commit_file(shard)).unlink(missing_ok=True)
    tokens_before = tokens_read(run)
    reverse_text(file, changed_row)
    plan = plan_of(tmp_path / "out", "all", **fields)
    assert plan.has_new_index
    run_here(plan)
    assert not plan_of(tmp_path / "out", "all", **fields).has_new_index
    lone_plan = plan_of(tmp_path / "alone", "all", **fields)
    run_here(lone_plan)
    assert tokens_read(run) == tokens_read(lone_plan.run)
    assert tokens_before == [
        row for row in tokens_read(run) if row[0] // SHARD_SIZE not in affected_shards
    ]


def test_a_file_that_was_only_written_again_changes_nothing(tmp_path: Path) -> None:
    fields, file, _ = half_measured_run(tmp_path)
    os.utime(file, (1, 1))
    plan = plan_of(tmp_path / "out", "all", **fields)
    assert plan.has_new_index
    run_here(plan)
    assert not plan_of(tmp_path / "out", "all", **fields).has_new_index


@pytest.mark.parametrize("document", [3, 0])
def test_a_document_that_is_measured_may_not_change(tmp_path: Path, document: int) -> None:
    fields, file, run = half_measured_run(tmp_path)
    reverse_text(file, document)
    with pytest.raises(RunError) as refusal:
        plan_of(tmp_path / "out", "all", **fields)
    assert str(refusal.value).startswith(
        f"{run.path}: the corpus has changed since the run was begun: {file}, line "
        f"{document + 1} is another text, which sequence {document} was made of; "
    )


def test_a_change_that_keeps_size_and_time_is_found_if_the_corpus_is_verified(
    tmp_path: Path,
) -> None:
    fields, file, run = half_measured_run(tmp_path)
    times = os.stat(file)
    reverse_text(file, 7)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    # The tokens of before are still there, so the run stays one of the text of before.
    run_here(plan_of(tmp_path / "out", "all", **fields))
    local(run.commit_file(2)).unlink()
    lines: list[str] = []
    scan = scan_of(tmp_path / "out", "all", **fields)
    with pytest.raises(RunError, match=r"b\.jsonl holds other texts, although its time did not"):
        make_plan(scan, "grown", preparation=Preparation(verify=True, tell=lines.append))
    assert re.search(r"b\.jsonl, line 8", lines[0])
    assert lines[-1] == "1 portion of 1 differed; their texts are prepared again"


def test_a_bad_row_may_be_mended(tmp_path: Path) -> None:
    file = write_texts(tmp_path / "texts" / "b.jsonl", *range(8, 24))
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:12], "{\n", *lines[12:]]))
    fields = fields_of_corpus(file) | {"model": "bundled:gpt2-mini", "n_ctx": 5, "bad_rows": 0.1}
    begun_plan = plan_of(tmp_path / "out", "all", **fields)
    run_here(begun_plan)
    status = read_status(begun_plan.run)
    assert status.documents == {"used": 16, "bad": 1}
    assert "corpus    17 documents: 16 used, 1 bad" in as_lines(status)
    # The sequences behind the bad row are not measured.
    for shard in (4, 5):
        local(begun_plan.run.commit_file(shard)).unlink()
    file.write_text("".join([*lines[:12], lines[0], *lines[12:]]))
    run_here(plan_of(tmp_path / "out", "all", **fields))
    assert read_status(begun_plan.run).documents == {"used": 17}
    # The default of `bad_rows` would have refused the corpus before it was mended.
    assert begun_plan.run.manifest().bad_rows == 0.1


def test_a_removed_document_and_a_file_put_before_are_refused(tmp_path: Path) -> None:
    fields, file, run = half_measured_run(tmp_path)
    text_before = file.read_text()
    file.write_text("".join(text_before.splitlines(keepends=True)[:-1]))
    beginning = f"{run.path}: the corpus has changed since the run was begun: "
    with pytest.raises(RunError) as refusal:
        plan_of(tmp_path / "out", "all", **fields)
    assert str(refusal.value).startswith(f"{beginning}it held 16 sequences and holds 15")
    file.write_text(text_before)
    # Another file before it moves every sequence.
    write_texts(tmp_path / "texts" / "a.jsonl", 30)
    with pytest.raises(RunError) as refusal:
        plan_of(tmp_path / "out", "all", **fields)
    assert str(refusal.value).startswith(
        f"{beginning}sequence 0 came from {file}, line 1 and would come from "
        f"{file.with_name('a.jsonl')}, line 1"
    )


# What a run keeps of its corpus


def test_a_run_goes_on_when_its_tokens_or_its_corpus_lie_elsewhere(tmp_path: Path) -> None:
    fields, file, run = half_measured_run(tmp_path)
    shutil.rmtree(tmp_path / "out" / "corpora")
    # The file is as it was, so its tokens are made again.
    assert not plan_of(tmp_path / "out", "all", **fields).has_new_index
    shutil.move(tmp_path / "out" / "corpora", tmp_path / "elsewhere")
    fields["corpora"] = str(tmp_path / "elsewhere")
    plan = plan_of(tmp_path / "out", "all", **fields)
    assert plan.has_new_index
    run_here(plan)
    assert run.manifest().corpora == str(tmp_path / "elsewhere")
    # `resume` does not need the scan file to find the tokens.
    assert len(replan(run).sequences) == 16
    assert not (tmp_path / "out" / "corpora").exists()
    moved_file = tmp_path / "moved" / file.name
    moved_file.parent.mkdir()
    shutil.copy2(file, moved_file)
    shutil.rmtree(tmp_path / "elsewhere")
    assert replan(run, [f"input.files={moved_file}"]).has_new_index


def test_a_changed_corpus_whose_old_tokens_are_gone_is_refused(tmp_path: Path) -> None:
    fields, file, run = half_measured_run(tmp_path)
    shutil.rmtree(tmp_path / "out" / "corpora")
    os.utime(file, (1, 1))
    with pytest.raises(RunError) as refusal:
        plan_of(tmp_path / "out", "all", **fields)
    (line,) = str(refusal.value).splitlines()
    assert line.startswith(
        f"{run.path}: the corpus has changed since the run was begun: b.jsonl is not as it was, "
        f"and the tokens that the run was begun with are gone from {tmp_path}/out/corpora/"
    )


def test_a_run_of_counted_tokens_goes_on_while_the_counts_are_the_same(tmp_path: Path) -> None:
    file = write_texts(tmp_path / "texts" / "b.jsonl", 8, 30)
    fields: dict[str, Any] = {
        "model": "bundled:gpt2-mini",
        "n_ctx": 5,
        "input": {"family": "unigram_text", "files": str(file)},
    }
    begun = plan_of(tmp_path / "out", 4, **fields)
    run_here(begun)
    tokens_before = tokens_read(begun.run)
    # The order of letters does not count, so the corpus is still the same to this run.
    reverse_text(file, 1)
    extended = plan_of(tmp_path / "out", 8, **fields)
    run_here(extended)
    assert tokens_read(begun.run)[:4] == tokens_before
    assert len(tokens_read(begun.run)) == 8
    write_texts(file, 8, 31)
    with pytest.raises(RunError, match=r"token \d+ occurred \d+ times and occurs \d+ times"):
        plan_of(tmp_path / "out", 8, **fields)


def test_a_run_of_an_older_version_is_not_continued(tmp_path: Path) -> None:
    fields, _, run = half_measured_run(tmp_path)
    record = local(run.index) / "corpus.json"
    record.rename(record.with_name("documents.parquet"))
    with pytest.raises(RunError, match="begun by an older headcount, which kept no tokens of its"):
        plan_of(tmp_path / "out", "all", **fields)
    record.write_text("[]")
    with pytest.raises(RunError, match=r"corpus\.json: damaged, so nothing says which corpus"):
        plan_of(tmp_path / "out", "all", **fields)


def test_runs_that_carry_different_columns_are_asked_together(tmp_path: Path) -> None:
    file = tmp_path / "texts" / "a.jsonl"
    file.parent.mkdir()
    lines = [{"text": "abcdefgh" * 3, "id": i, "meta": {"year": 2000 + i}} for i in range(4)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for columns in ([], ["id"], ["id", "meta.year"]):
        fields = fields_of_corpus(file, columns=columns) | {
            "model": "bundled:gpt2-mini",
            "n_ctx": 5,
        }
        run_here(plan_of(tmp_path / "out", "all", **fields))
    connection = connect_to_tables(tmp_path / "out")
    sql = (
        "SELECT doc_id, doc_meta_year, count(*) FROM sequences WHERE intervention = 'none' AND "
        "row = 2 GROUP BY ALL ORDER BY ALL"
    )
    assert connection.execute(sql).fetchall() == [("2", "2002", 1), ("2", None, 1), (None, None, 1)]
    comment_sql = (
        "SELECT comment FROM duckdb_columns() WHERE column_name = 'doc_meta_year' AND "
        "table_name = 'sequences' AND schema_name = 'main'"
    )
    describe(connection)
    assert connection.execute(comment_sql).fetchall() == [
        ("meta.year of the document that holds the first token of the text, as text; NULL where it "
         "has none.",)
    ]  # fmt: skip
    for run in (tmp_path / "out").glob("run_id=*"):
        compact(RunDirectory(run))
    assert connect_to_tables(tmp_path / "out").execute(sql).fetchall() == [
        ("2", "2002", 1), ("2", None, 1), (None, None, 1)
    ]  # fmt: skip
