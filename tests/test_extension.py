"""A run grows, and goes on with another batch size: the rows are those of a run that was so from the
beginning, whenever a command is killed in between.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from jobs.checking import check_run
from jobs.compaction import compact
from jobs.plan import Plan, make_plan, prepare_run
from jobs.ray_cluster import Resources
from jobs.replan import replan
from jobs.run_loop import missing_shards, run_to_end
from jobs.status import as_lines, read_status
from queries.connection import connect
from schemas import places
from schemas.commits import fold
from schemas.errors import HeadcountError, RunError, ScanError
from schemas.places import write_whole
from schemas.run_directory import RunDirectory
from schemas.scan import parse_scan
from tests.toy_replica import ToyReplica
from tests.toy_runs import local
from workers.replica import Replica
from workers.shard import commit_shard, measure_shard

SIZE = 3
FIELDS: dict[str, Any] = {
    "model": "bundled:attn-only-2l-mini",
    "n_ctx": 9,
    "input": {"family": "uniform_random"},
    "interventions": ["none", "zero_head(0,0)"],
    "statistics": ["entropy", "sink_mass"],
    "sequences_per_shard": SIZE,
}


class Killed(BaseException):
    """The process is gone."""


def planned(out: Path, sequences: int | str, **changes: Any) -> Plan:
    scan = parse_scan(FIELDS | {"sequences": sequences, "out": str(out)} | changes)
    return make_plan(scan, "grown")


def measured(plan: Plan, replica: type[Replica] = ToyReplica, verify: bool = False) -> list[str]:
    """Bring a run to its end in this process; the lines that it says."""
    text = io.StringIO()
    prepare_run(plan, "")
    console = Console(file=text, width=1000, highlight=False)
    assert run_to_end(plan, Resources(0, 1, "cpu", None), console, verify, replica) == []
    return text.getvalue().splitlines()


def rows(run: RunDirectory) -> pa.Table:
    """The rows of `heads` that a reader sees, each once."""
    sql = "SELECT intervention, sequence, shard, layer, head, entropy, sink_mass FROM heads ORDER BY ALL"
    found = connect(run.path).sql(sql).to_arrow_table()
    keys = found.select(["intervention", "sequence", "layer", "head"]).to_pylist()
    assert len({tuple(key.values()) for key in keys}) == len(keys)
    return found


def globbed(run: RunDirectory) -> int:
    """How many rows of `heads` a bare glob finds."""
    import duckdb

    pattern = local(run.path) / "heads" / "*" / "*.parquet"
    (found,) = duckdb.connect().execute(f"SELECT count(*) FROM '{pattern}'").fetchall()
    return found[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], pa.Table]:
    """The rows of a run of so many sequences that never grew."""
    kept: dict[int, pa.Table] = {}

    def of(sequences: int) -> pa.Table:
        if sequences not in kept:
            plan = planned(tmp_path_factory.mktemp("whole"), sequences)
            measured(plan)
            kept[sequences] = rows(plan.run)
        return kept[sequences]

    return of


def leave(run: RunDirectory) -> None:
    """Leave a run's ledger as it is."""


def fold_all(run: RunDirectory) -> None:
    fold(run.commits_directory, list(run.commits()))


def fold_and_commit_again(run: RunDirectory) -> None:
    """What a late attempt leaves: a fold, and a file of the same shard."""
    commits = list(run.commits())
    fold(run.commits_directory, commits)
    write_whole(run.commit_file(commits[-1].shard), commits[-1].model_dump_json().encode())


def compact_all(run: RunDirectory) -> None:
    compact(run)


def compact_in_pairs(run: RunDirectory) -> None:
    compact(run, 2 * SIZE * 2 * 8)


LEDGERS = [leave, fold_all, fold_and_commit_again, compact_all, compact_in_pairs]


@pytest.mark.parametrize("change", LEDGERS)
@pytest.mark.parametrize("first", [2, 5, 6, 7])
def test_a_run_is_extended(
    tmp_path: Path,
    whole: Callable[[int], pa.Table],
    change: Callable[[RunDirectory], None],
    first: int,
) -> None:
    begun = planned(tmp_path, first)
    measured(begun)
    change(begun.run)
    before = {c.shard: c.finished for c in begun.run.commits()}
    longer = planned(tmp_path, 11)
    assert longer.run == begun.run
    kept = first // SIZE
    assert longer.done == kept
    lines = measured(longer)
    assert f"extended from {first} to 11 sequences" in lines[0]
    assert rows(longer.run).equals(whole(11))
    assert globbed(longer.run) == len(whole(11))
    commits = list(longer.run.commits())
    assert [(c.start, c.stop) for c in commits] == [(0, 3), (3, 6), (6, 9), (9, 11)]
    again = [c.shard for c in commits if before.get(c.shard) != c.finished]
    assert again == list(range(kept, 4))
    manifest = longer.run.manifest()
    assert (manifest.sequences, manifest.shards) == (11, 4)
    assert read_status(longer.run).complete
    change(longer.run)
    measured(planned(tmp_path, 13))
    assert rows(longer.run).equals(whole(13))
    assert globbed(longer.run) == len(whole(13))
    compact(longer.run)
    assert rows(longer.run).equals(whole(13))
    assert globbed(longer.run) == len(whole(13))


def test_fewer_sequences_than_there_are_measure_nothing(
    tmp_path: Path, whole: Callable[[int], pa.Table]
) -> None:
    measured(planned(tmp_path, 11))
    fewer = planned(tmp_path, 4)
    assert (fewer.manifest.sequences, fewer.requested, fewer.done) == (11, 4, 4)
    lines = measured(fewer)
    assert "4 sequences asked for, and the run has 11; they all stay" in lines[0]
    assert "4 shards, 4 of them done" in lines[1]
    assert rows(fewer.run).equals(whole(11))


def test_of_an_unfinished_run_only_what_is_asked_for_is_measured(tmp_path: Path) -> None:
    begun = planned(tmp_path, 11)
    measured(begun)
    for shard in (1, 3):
        local(begun.run.commit_file(shard)).unlink()
    measured(planned(tmp_path, 4))
    assert begun.run.ledger([])["shard"].to_pylist() == [0, 1, 2]
    assert not read_status(begun.run).complete


def test_a_status_counts_what_is_missing_of_an_extended_run(tmp_path: Path) -> None:
    begun = planned(tmp_path, 5)
    measured(begun)
    assert [planned(tmp_path, n).done for n in (5, 6, 11)] == [2, 1, 1]
    status = read_status(begun.run)
    assert (status.complete, status.done, status.missing) == (True, 2, 0)
    manifest = begun.run.manifest()
    longer = manifest.model_copy(update={"sequences": 11, "shards": 4})
    local(begun.run.manifest_file).write_text(longer.model_dump_json())
    status = read_status(begun.run)
    assert (status.complete, status.done, status.missing) == (False, 1, 3)
    assert status.tokens_done == SIZE * 9 * 2


def test_a_commit_that_a_late_replica_left_short_is_measured_anew(
    tmp_path: Path, whole: Callable[[int], pa.Table]
) -> None:
    begun = planned(tmp_path, 5)
    measured(begun)
    late = list(begun.run.commits())[1]
    measured(planned(tmp_path, 11))
    write_whole(begun.run.commit_file(1), late.model_dump_json().encode())
    measured(planned(tmp_path, 11))
    assert rows(begun.run).equals(whole(11))


def test_a_replica_that_outlived_its_driver_leaves_an_extended_shard_alone(
    tmp_path: Path, whole: Callable[[int], pa.Table]
) -> None:
    begun = planned(tmp_path, 5)
    prepare_run(begun, "")
    replica = ToyReplica(begun.info, begun.scan)
    last = measure_shard(replica, begun.sequences.shard(1))
    measured(begun)
    longer = planned(tmp_path, 11)
    measured(longer)
    with pytest.raises(RunError, match="the run has grown since this attempt began, and shard 1"):
        commit_shard(begun.scan, begun.run, last, 1)
    fold_all(begun.run)
    with pytest.raises(RunError, match="goes to sequence 6, not 5"):
        commit_shard(begun.scan, begun.run, last, 1)
    assert rows(begun.run).equals(whole(11))
    assert check_run(begun.run).damaged == []


def test_a_late_attempt_leaves_a_committed_shard_alone(tmp_path: Path) -> None:
    plan = planned(tmp_path, 5)
    prepare_run(plan, "")
    replica = ToyReplica(plan.info, plan.scan)
    first, late = (measure_shard(replica, plan.sequences.shard(0)) for _ in range(2))
    for measurements in late.measured.values():
        measurements.tables["heads"]["entropy"] += np.float32(2**-30)
    committed = commit_shard(plan.scan, plan.run, first, 1)
    assert commit_shard(plan.scan, plan.run, late, 2) == committed
    assert check_run(plan.run).damaged == []
    # What is damaged is taken back, and measured by whoever comes first.
    local(plan.run.data_file("heads", "none", 0)).write_bytes(b"PAR1")
    assert missing_shards(plan).tolist() == [0, 1]
    again = commit_shard(plan.scan, plan.run, late, 2)
    assert (again.attempt, list(plan.run.commits())) == (2, [again])
    assert check_run(plan.run).damaged == []


def test_two_attempts_that_write_at_once_are_noticed_and_mended(
    tmp_path: Path, whole: Callable[[int], pa.Table]
) -> None:
    """The window that is left: both look for a commit before either has written one."""
    plan = planned(tmp_path, 5)
    measured(plan)
    replica = ToyReplica(plan.info, plan.scan)
    late = measure_shard(replica, plan.sequences.shard(0))
    for measurements in late.measured.values():
        measurements.tables["heads"]["entropy"] += np.float32(2**-30)
    commit = local(plan.run.commit_file(0))
    first = commit.read_bytes()
    commit.unlink()
    commit_shard(plan.scan, plan.run, late, 2)
    commit.write_bytes(first)
    assert {file.path[:6] for file in check_run(plan.run).damaged} == {"heads/"}
    measured(planned(tmp_path, 5), verify=True)
    assert rows(plan.run).equals(whole(5))
    assert check_run(plan.run).damaged == []


def test_damage_in_a_merged_file_does_not_stop_an_extension(
    tmp_path: Path, whole: Callable[[int], pa.Table]
) -> None:
    begun = planned(tmp_path, 5)
    measured(begun)
    compact_all(begun.run)
    (file,) = (local(begun.run.path) / "heads" / "intervention=none").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    measured(planned(tmp_path, 11))
    assert rows(begun.run).equals(whole(11))
    assert globbed(begun.run) == len(whole(11))


def steps(monkeypatch: pytest.MonkeyPatch, allowed: int | None) -> Callable[[], int]:
    """Count what appears and disappears on the disk; after `allowed` changes the process is dead."""
    count = 0
    replace, unlink = os.replace, Path.unlink

    def step() -> None:
        nonlocal count
        if count == allowed:
            raise Killed
        count += 1

    def counted_replace(source: Path, target: Path) -> None:
        step()
        replace(source, target)

    def counted_unlink(path: Path, missing_ok: bool = False) -> None:
        if path.exists() and not path.name.endswith((".tmp", ".lock")):
            step()
        unlink(path, missing_ok)

    monkeypatch.setattr(places.os, "replace", counted_replace)
    monkeypatch.setattr(Path, "unlink", counted_unlink)
    return lambda: count


@pytest.mark.parametrize("change", [leave, fold_and_commit_again, compact_all])
def test_whenever_it_is_killed_the_same_command_ends_with_the_same_rows(
    tmp_path: Path, whole: Callable[[int], pa.Table], change: Callable[[RunDirectory], None]
) -> None:
    expected, short = whole(8), whole(5)
    kept = short.filter(pa.compute.less(short["sequence"], SIZE))  # pyright: ignore
    begun = planned(tmp_path / "begun", 5)
    measured(begun)
    change(begun.run)
    killed, allowed = True, 0
    while killed:
        out = tmp_path / str(allowed)
        shutil.copytree(tmp_path / "begun", out)
        run = planned(out, 8).run
        with pytest.MonkeyPatch.context() as patch:
            steps(patch, allowed)
            try:
                measured(planned(out, 8))
                killed = False
            except Killed:
                pass
        between = rows(run)
        if killed:
            # The first shard never goes; the second is there as it was, not at all, or longer.
            sequences = len(between) * SIZE // len(kept)
            assert sequences in (3, 5, 6, 8)
            known = between.filter(pa.compute.less(between["sequence"], SIZE))  # pyright: ignore
            assert known.equals(kept)
        measured(planned(out, 8))
        assert rows(run).equals(expected)
        assert globbed(run) == len(expected)
        allowed += 1
    assert allowed > 10


def test_a_run_goes_on_with_another_batch_size(tmp_path: Path) -> None:
    begun = planned(tmp_path, 5)
    measured(begun)
    local(begun.run.commit_file(1)).unlink()
    smaller = planned(tmp_path, 5, batch_size=2)
    assert smaller.run == begun.run
    measured(smaller, Replica)
    assert begun.run.manifest().batch_size == 2
    assert replan(begun.run).scan.batch_size == 2
    assert replan(begun.run, ["batch_size=1"]).scan.batch_size == 1
    longer = replan(begun.run, ["sequences=8"])
    assert (longer.scan.batch_size, longer.manifest.sequences) == (2, 8)
    with pytest.raises(
        ScanError, match=r"--set seed=3: grown-.* goes on with another batch_size, "
    ):
        replan(begun.run, ["seed=3"])


def test_two_that_extend_at_once_are_told(tmp_path: Path) -> None:
    measured(planned(tmp_path, 5))
    slow = planned(tmp_path, 8)
    measured(planned(tmp_path, 11))
    with pytest.raises(RunError, match="another process has extended this run meanwhile"):
        measured(slow)


def corpus_fields(*texts: Path, **options: Any) -> dict[str, Any]:
    files = str(texts[0].parent / "*.jsonl")
    return {"input": {"family": "pile", "files": files, **options}}


def write_texts(file: Path, *documents: int) -> Path:
    """A file with documents of so many letters."""
    lines = [
        json.dumps({"text": "".join(chr(97 + (i * 7 + n) % 26) for i in range(n))}) + "\n"
        for n in documents
    ]
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(lines))
    return file


@pytest.mark.parametrize("packing", ["document", "concat"])
def test_a_corpus_run_is_extended(tmp_path: Path, packing: str) -> None:
    first = write_texts(tmp_path / "texts" / "a.jsonl", *range(8, 24))
    fields = corpus_fields(first, packing=packing) | {"model": "bundled:gpt2-mini"}
    measured(planned(tmp_path / "out", 4, **fields))
    measured(planned(tmp_path / "out", 8, **fields))
    grown = planned(tmp_path / "out", "all", **fields)
    measured(grown)
    run = grown.run
    write_texts(tmp_path / "texts" / "b.jsonl", 30, 40, 50)
    assert planned(tmp_path / "out", 8, **fields).manifest.sequences == run.manifest().sequences
    grown = planned(tmp_path / "out", "all", **fields)
    assert grown.manifest.sequences > run.manifest().sequences
    measured(grown)
    assert len(run.manifest().identity["corpus"]["sources"]) == 2
    alone = planned(tmp_path / "alone", "all", **fields)
    measured(alone)
    assert rows(run).equals(rows(alone.run))
    tokens = "SELECT intervention, sequence, file, row, tokens FROM sequences ORDER BY ALL"
    found, expected = (connect(r.path).execute(tokens).fetchall() for r in (run, alone.run))
    assert found == expected


def mended_run(tmp_path: Path, **options: Any) -> tuple[dict[str, Any], Path, RunDirectory]:
    """A run of 16 documents of which shard 2, sequences 6 to 8, is not measured."""
    options = {"packing": "document"} | options
    first = write_texts(tmp_path / "texts" / "b.jsonl", *range(8, 24))
    fields = corpus_fields(first, **options) | {"model": "bundled:gpt2-mini", "n_ctx": 5}
    begun = planned(tmp_path / "out", "all", **fields)
    measured(begun)
    local(begun.run.commit_file(2)).unlink()
    return fields, first, begun.run


def other_text(file: Path, row: int) -> None:
    """Put other letters into a document; the file stays as long as it is."""
    lines = file.read_text().splitlines(keepends=True)
    text = json.loads(lines[row])["text"]
    lines[row] = lines[row].replace(text, text[::-1])
    file.write_text("".join(lines))


def tokens_of(run: RunDirectory) -> list[Any]:
    sql = "SELECT sequence, row, tokens FROM sequences WHERE intervention = 'none' ORDER BY ALL"
    return connect(run.path).execute(sql).fetchall()


@pytest.mark.parametrize("packing", ["document", "concat"])
@pytest.mark.parametrize("options", [{}, {"shuffle": 3}, {"skip": 1}])
def test_a_run_goes_on_with_a_corpus_that_was_mended_where_nothing_is_measured(
    tmp_path: Path, packing: str, options: dict[str, Any]
) -> None:
    fields, file, run = mended_run(tmp_path, packing=packing, **options)
    again = planned(tmp_path / "out", "all", **fields)
    assert not again.indexed_anew
    reader = again.sequences.reader
    document = int(reader.first[7])
    # Where documents are joined, the shards beside it are made of the document too.
    made_of_it = {i // SIZE for i in range(len(reader)) if document in reader.spanned(i, i + 1)}
    for shard in made_of_it:
        local(run.commit_file(shard)).unlink(missing_ok=True)
    before = tokens_of(run)
    other_text(file, int(reader.index.row[document]))
    plan = planned(tmp_path / "out", "all", **fields)
    assert plan.indexed_anew
    measured(plan)
    assert not planned(tmp_path / "out", "all", **fields).indexed_anew
    alone = planned(tmp_path / "alone", "all", **fields)
    measured(alone)
    assert tokens_of(run) == tokens_of(alone.run)
    assert before == [found for found in tokens_of(run) if found[0] // SIZE not in made_of_it]


def test_a_file_that_was_only_written_again_changes_nothing(tmp_path: Path) -> None:
    fields, file, _ = mended_run(tmp_path)
    os.utime(file, (1, 1))
    plan = planned(tmp_path / "out", "all", **fields)
    assert plan.indexed_anew
    measured(plan)
    assert not planned(tmp_path / "out", "all", **fields).indexed_anew


@pytest.mark.parametrize("change", [3, 0])
def test_a_document_that_is_measured_may_not_change(tmp_path: Path, change: int) -> None:
    fields, file, run = mended_run(tmp_path)
    other_text(file, change)
    with pytest.raises(RunError) as refused:
        planned(tmp_path / "out", "all", **fields)
    assert str(refused.value).startswith(
        f"{run.path}: the corpus has changed since the run was begun: {file}, line {change + 1} is "
        f"another text, which sequence {change} was made of; "
    )


def test_a_change_that_no_time_tells_is_found_where_it_is_read(tmp_path: Path) -> None:
    fields, file, run = mended_run(tmp_path)
    times = os.stat(file)
    other_text(file, 7)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    plan = planned(tmp_path / "out", "all", **fields)
    assert not plan.indexed_anew
    with pytest.raises(
        HeadcountError, match=r"b\.jsonl, line 8: changed since the run began; run "
    ):
        plan.sequences.shard(2)
    assert 2 not in {commit.shard for commit in run.commits()}


def test_a_bad_row_may_be_mended(tmp_path: Path) -> None:
    file = write_texts(tmp_path / "texts" / "b.jsonl", *range(8, 24))
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:12], "{\n", *lines[12:]]))
    fields = corpus_fields(file) | {"model": "bundled:gpt2-mini", "n_ctx": 5, "bad_rows": 0.1}
    begun = planned(tmp_path / "out", 9, **fields)
    measured(begun)
    status = read_status(begun.run)
    assert status.documents == {"used": 9, "bad": 1, "not needed": 7}
    assert "corpus    17 documents: 9 used, 1 bad, 7 not needed" in as_lines(status)
    file.write_text("".join([*lines[:12], lines[0], *lines[12:]]))
    measured(planned(tmp_path / "out", "all", **fields))
    assert read_status(begun.run).documents == {"used": 17}
    # With the bad row in it, it would have been refused.
    assert begun.run.manifest().bad_rows == 0.1


def test_files_and_documents_that_are_taken_away_are_missed(tmp_path: Path) -> None:
    fields, file, run = mended_run(tmp_path)
    before = file.read_text()
    file.write_text("".join(before.splitlines(keepends=True)[:-1]))
    begun = f"{run.path}: the corpus has changed since the run was begun: "
    with pytest.raises(RunError) as refused:
        planned(tmp_path / "out", "all", **fields)
    assert str(refused.value).startswith(f"{begun}it held 16 sequences and holds 15")
    file.write_text(before)
    # Another file before it moves every sequence.
    write_texts(tmp_path / "texts" / "a.jsonl", 30)
    with pytest.raises(RunError) as refused:
        planned(tmp_path / "out", "all", **fields)
    assert str(refused.value).startswith(
        f"{begun}sequence 0 came from {file}, line 1 and would come from "
        f"{file.with_name('a.jsonl')}, line 1"
    )


def test_an_index_of_before_is_held_to_its_lengths(tmp_path: Path) -> None:
    fields, file, run = mended_run(tmp_path)
    index_file = local(run.index) / "documents.parquet"
    table = pq.read_table(index_file)
    metadata = {"problems": "{}", "whole_sources": "1"}
    pq.write_table(
        table.select(["source", "row", "n_tokens"]).replace_schema_metadata(metadata), index_file
    )
    manifest = json.loads(local(run.manifest_file).read_text())
    manifest["identity"]["corpus"]["sources"][0]["bytes"] = file.stat().st_size
    local(run.manifest_file).write_text(json.dumps(manifest))
    assert not planned(tmp_path / "out", "all", **fields).indexed_anew
    write_texts(file, *reversed(range(8, 24)))
    # As many bytes: nothing says that it has changed, until it is read.
    plan = planned(tmp_path / "out", "all", **fields)
    with pytest.raises(HeadcountError, match="line 7: changed since the run began"):
        plan.sequences.shard(2)
    write_texts(file, 9, *range(9, 24))
    with pytest.raises(RunError, match=r"b\.jsonl, line 1 is another text, which sequence 0"):
        planned(tmp_path / "out", "all", **fields)


def test_runs_that_carry_different_columns_are_asked_together(tmp_path: Path) -> None:
    file = tmp_path / "texts" / "a.jsonl"
    file.parent.mkdir()
    lines = [{"text": "abcdefgh" * 3, "id": i, "meta": {"year": 2000 + i}} for i in range(4)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for columns in ([], ["id"], ["id", "meta.year"]):
        fields = corpus_fields(file, columns=columns) | {"model": "bundled:gpt2-mini", "n_ctx": 5}
        measured(planned(tmp_path / "out", "all", **fields))
    asked = connect(tmp_path / "out")
    sql = (
        "SELECT doc_id, doc_meta_year, count(*) FROM sequences WHERE intervention = 'none' AND "
        "row = 2 GROUP BY ALL ORDER BY ALL"
    )
    assert asked.execute(sql).fetchall() == [("2", "2002", 1), ("2", None, 1), (None, None, 1)]
    described = (
        "SELECT comment FROM duckdb_columns() WHERE column_name = 'doc_meta_year' AND "
        "table_name = 'sequences' AND schema_name = 'main'"
    )
    assert asked.execute(described).fetchall() == [
        ("meta.year of the document that holds the first token of the text, as text; NULL where it "
         "has none.",)
    ]  # fmt: skip
    for run in (tmp_path / "out").glob("run_id=*"):
        compact(RunDirectory(run))
    assert connect(tmp_path / "out").execute(sql).fetchall() == [
        ("2", "2002", 1), ("2", None, 1), (None, None, 1)
    ]  # fmt: skip
