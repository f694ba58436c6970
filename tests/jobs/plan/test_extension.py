"""A run grows, or continues with another batch size, other places or a mended corpus.

Its rows are those of a run that was like this from the beginning, even if a command is killed in
between, at any moment.
"""

import io
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from rich.console import Console

from headcount.jobs.corpus.preparation import Preparation
from headcount.jobs.plan.plan import Plan, make_plan, replan
from headcount.jobs.run.loop import missing_shards
from headcount.jobs.upkeep.checking import check_run
from headcount.jobs.upkeep.compaction import compact
from headcount.jobs.upkeep.status import as_lines, read_status
from headcount.schemas.errors import RunError
from headcount.schemas.files.commits import gather
from headcount.schemas.files.run_directory import RunDirectory, pc
from headcount.schemas.places import write_whole
from headcount.schemas.scans.scan_file import parse_scan
from headcount.workers.inputs.corpus.sequence_index import SequenceIndex
from headcount.workers.inputs.store.token_store import forget_open_files
from headcount.workers.shard import commit_shard, measure_shard
from tests.tools.deaths import killed_after
from tests.toys.refusals import refused
from tests.toys.runs_here import run_here
from tests.toys.toy_corpora import write_jsonl
from tests.toys.toy_replica import ToyReplica
from tests.toys.toy_runs import local, open_tables

RowsOfSize = Callable[[int], pa.Table]
Change = Callable[[RunDirectory], object]
SHARD_SIZE = 3
FIELDS: dict[str, Any] = {
    "model": "bundled:attn-only-2l-mini", "n_ctx": 9, "input": {"family": "uniform_random"},
    "interventions": ["none", "zero_head(0,0)"], "statistics": ["entropy", "sink_mass"],
    "sequences_per_shard": SHARD_SIZE,
}  # fmt: skip


def plan_of(directory: Path, sequences: int | str, **changes: Any) -> Plan:
    """Plan the run of this file's scan, with so many sequences and other changes."""
    preparation = changes.pop("preparation", Preparation())
    scan = parse_scan(FIELDS | {"sequences": sequences, "out": str(directory)} | changes)
    return make_plan(scan, "grown", preparation=preparation)


def measured_run(directory: Path, sequences: int | str, **changes: Any) -> RunDirectory:
    """A run that is planned and brought to its end."""
    plan = plan_of(directory, sequences, **changes)
    run_here(plan)
    return plan.run


def rows(run: RunDirectory) -> pa.Table:
    """The rows of `heads` that a reader sees, each once."""
    columns = "intervention, sequence, shard, layer, head, entropy, sink_mass"
    table = open_tables(run.path).table(f"SELECT {columns} FROM heads ORDER BY ALL")
    keys = table.select(["intervention", "sequence", "layer", "head"]).to_pylist()
    assert len({tuple(key.values()) for key in keys}) == len(keys)
    return table


def rows_of_first_shard(table: pa.Table) -> pa.Table:
    return table.filter(pc.less(table["sequence"], SHARD_SIZE))


@pytest.fixture(scope="module")
def rows_of_whole_run(tmp_path_factory: pytest.TempPathFactory) -> RowsOfSize:
    """The rows of a run of so many sequences that never grew."""
    return cache(lambda sequences: rows(measured_run(tmp_path_factory.mktemp("whole"), sequences)))


def assert_rows(run: RunDirectory, expected: pa.Table) -> None:
    """Check the rows that a reader sees, and that a bare glob finds no others."""
    assert rows(run).equals(expected)
    sql = f"SELECT count(*) FROM '{local(run.path)}/heads/*/*.parquet'"
    assert duckdb.connect().execute(sql).fetchall() == [(len(expected),)]


def leave(run: RunDirectory) -> None:
    """Leave a run's commit log as it is."""


def gather_again(run: RunDirectory) -> None:
    """What a late attempt leaves: a segment, and a file of the same shard."""
    commits = list(run.commits())
    gather(run.commits_directory, commits)
    write_whole(run.commit_file(commits[-1].shard), commits[-1].model_dump_json().encode())


def late(*values: object) -> Any:
    """Parameters of a long test."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(("first_size", "change_commit_log"), [
    # A short shard behind whole ones, alone, and none.
    (5, gather_again), late(7, compact),
    late(2, leave), late(2, compact), late(6, leave), late(6, compact), late(6, gather_again),
])  # fmt: skip
def test_a_run_is_extended(
    tmp_path: Path, rows_of_whole_run: RowsOfSize, change_commit_log: Change, first_size: int
):
    run = measured_run(tmp_path, first_size)
    change_commit_log(run)
    finished_before = {c.shard: c.finished for c in run.commits()}
    longer_plan = plan_of(tmp_path, 11)
    assert longer_plan.run == run
    # A last shard that was short does not count any more.
    whole_shards = first_size // SHARD_SIZE
    assert longer_plan.shards_done == whole_shards
    said = run_here(longer_plan)
    assert f"grows from {first_size} to 11 sequences" in said[0]
    assert_rows(run, rows_of_whole_run(11))
    commits = list(run.commits())
    assert [(c.start, c.stop) for c in commits] == [(0, 3), (3, 6), (6, 9), (9, 11)]
    measured_again = [c.shard for c in commits if finished_before.get(c.shard) != c.finished]
    assert measured_again == list(range(whole_shards, 4))
    manifest = run.manifest()
    assert (manifest.sequences, manifest.shards) == (11, 4)
    assert read_status(run).complete
    # It can be extended again, from any state of the commit log, and compacted afterwards.
    change_commit_log(run)
    assert measured_run(tmp_path, 13) == run
    assert_rows(run, rows_of_whole_run(13))
    compact(run)
    assert_rows(run, rows_of_whole_run(13))


def test_a_scan_of_fewer_sequences_measures_only_these_and_keeps_all(
    tmp_path: Path, rows_of_whole_run: RowsOfSize
):
    run = measured_run(tmp_path, 11)
    plan = plan_of(tmp_path, 4)
    assert (plan.manifest.sequences, plan.requested_sequences, plan.shards_done) == (11, 4, 4)
    said = run_here(plan)
    assert "4 sequences asked for, and the run has 11; they all stay" in said[0]
    assert "4 shards, 4 of them done" in said[1]
    assert rows(run).equals(rows_of_whole_run(11))
    for shard in (1, 3):
        local(run.commit_file(shard)).unlink()
    run_here(plan_of(tmp_path, 4))
    assert run.commit_log([])["shard"].to_pylist() == [0, 1, 2]
    assert not read_status(run).complete
    # A driver that is killed may leave a longer run whose last shard is still short.
    run = measured_run(tmp_path / "killed", 5)
    assert [plan_of(tmp_path / "killed", n).shards_done for n in (5, 6, 11)] == [2, 1, 1]
    longer_manifest = run.manifest().model_copy(update={"sequences": 11, "shards": 4})
    local(run.manifest_file).write_text(longer_manifest.model_dump_json())
    status = read_status(run)
    assert (status.complete, status.done, status.missing) == (False, 1, 3)
    assert status.tokens_done == SHARD_SIZE * 9 * 2


def test_a_replica_that_outlived_its_driver_leaves_an_extended_shard_alone(
    tmp_path: Path, rows_of_whole_run: RowsOfSize
):
    plan = plan_of(tmp_path, 5)
    run_here(plan)
    run = plan.run
    short_shard = measure_shard(ToyReplica(plan.info, plan.scan), plan.sequences.shard(1))
    short_commit = local(run.commit_file(1)).read_bytes()
    measured_run(tmp_path, 11)
    with pytest.raises(RunError, match="the run has grown since this attempt began, and shard 1"):
        commit_shard(plan.scan, run, short_shard, 1)
    gather(run.commits_directory, list(run.commits()))
    with pytest.raises(RunError, match="goes to sequence 6, not 5"):
        commit_shard(plan.scan, run, short_shard, 1)
    assert check_run(run).damaged == []
    assert rows(run).equals(rows_of_whole_run(11))
    # A short commit that it left all the same is measured anew.
    write_whole(run.commit_file(1), short_commit)
    measured_run(tmp_path, 11)
    assert rows(run).equals(rows_of_whole_run(11))


def test_a_damaged_roll_up_is_no_reason_to_measure(tmp_path: Path):
    plan = plan_of(tmp_path, 5)
    run_here(plan)
    run, before = plan.run, list(plan.run.commits())
    compact(run)
    for rollup in local(run.path).glob("rollups/intervention=none/*.parquet"):
        rollup.write_bytes(b"PAR1")
    assert missing_shards(plan, verify=True).tolist() == []
    assert [commit.finished for commit in run.commits()] == [c.finished for c in before]
    assert (read_status(run).done, read_status(run).damaged) == (2, 0)
    assert {damage.path[:8] for damage in check_run(run).damaged} == {"rollups/"}


@pytest.mark.parametrize(("change_commit_log", "interventions", "step"), [
    (leave, ["none"], 5),
    # Every moment, every form of the commit log.
    late(leave, FIELDS["interventions"], 1), late(gather_again, ["none"], 1),
    late(compact, ["none"], 1),
])  # fmt: skip
def test_killed_at_any_change_of_the_disk_the_same_command_ends_with_the_same_rows(
    tmp_path: Path,
    rows_of_whole_run: RowsOfSize,
    change_commit_log: Change,
    interventions: list[str],
    step: int,
):
    whole = rows_of_whole_run(8)
    expected_rows = whole.filter(pc.is_in(whole["intervention"], pa.array(interventions)))
    kept_rows = rows_of_first_shard(expected_rows)
    begun = measured_run(tmp_path / "begun", 5, interventions=interventions)
    change_commit_log(begun)
    for changes in count(step=step):
        directory = tmp_path / str(changes)
        shutil.copytree(tmp_path / "begun", directory)
        run = RunDirectory.of(str(directory), begun.run_id)

        def extend(directory: Path = directory) -> None:
            measured_run(directory, 8, interventions=interventions)

        if not killed_after(changes, extend):
            break
        # The first shard never goes; the second is there as it was, not at all, or longer.
        rows_in_between = rows(run)
        assert len(rows_in_between) * SHARD_SIZE // len(kept_rows) in (3, 5, 6, 8)
        assert rows_of_first_shard(rows_in_between).equals(kept_rows)
        extend()
        assert_rows(run, expected_rows)
    assert_rows(run, expected_rows)
    assert changes >= 9


def test_a_run_continues_with_another_batch_size(tmp_path: Path):
    run = measured_run(tmp_path, 5)
    local(run.commit_file(1)).unlink()
    assert measured_run(tmp_path, 5, batch_size=2) == run
    assert run.manifest().batch_size == 2
    assert replan(run).scan.batch_size == 2
    assert replan(run, ["batch_size=1"]).scan.batch_size == 1
    longer_plan = replan(run, ["sequences=8"])
    assert (longer_plan.scan.batch_size, longer_plan.manifest.sequences) == (2, 8)
    # The second of two that extend at once is refused.
    slow_plan = plan_of(tmp_path, 8)
    measured_run(tmp_path, 11)
    with pytest.raises(RunError, match="another process has extended this run meanwhile"):
        run_here(slow_plan)


# The corpus of a run


def fields_of_corpus(text_file: Path, **options: Any) -> dict[str, Any]:
    """The model and the input of a scan of all files in the directory of one."""
    input_ = {"family": "pile", "files": str(text_file.parent / "*.jsonl"), **options}
    return {"model": "bundled:gpt2-mini", "n_ctx": 5, "input": input_}


def write_texts(file: Path, *documents: int) -> Path:
    """Write a file with documents of so many letters, no two of them alike."""
    texts = ["".join(chr(97 + (i * 7 + n) % 26) for i in range(n)) for n in documents]
    file.parent.mkdir(exist_ok=True)
    return write_jsonl(file, [(text, None) for text in texts])


def tokens_read(run: RunDirectory) -> list[Any]:
    sql = "SELECT sequence, row, tokens FROM sequences WHERE intervention = 'none' ORDER BY ALL"
    return open_tables(run.path).rows(sql)


@pytest.mark.parametrize("packing", [late("document"), "concat"])
def test_a_corpus_run_is_extended(tmp_path: Path, packing: str):
    corpus_file = write_texts(tmp_path / "texts" / "a.jsonl", *range(8, 18))
    fields = fields_of_corpus(corpus_file, packing=packing)
    for sequences in (4, 8, "all"):
        run = measured_run(tmp_path / "out", sequences, **fields)
    write_texts(tmp_path / "texts" / "b.jsonl", 20, 30)
    sequences_before = run.manifest().sequences
    assert plan_of(tmp_path / "out", 8, **fields).manifest.sequences == sequences_before
    assert measured_run(tmp_path / "out", "all", **fields) == run
    assert run.manifest().sequences > sequences_before
    assert len(run.manifest().identity["corpus"]["sources"]) == 2
    lone_run = measured_run(tmp_path / "alone", "all", **fields)
    assert rows(run).equals(rows(lone_run))
    assert tokens_read(run) == tokens_read(lone_run)


def half_measured_run(tmp_path: Path, **options: Any) -> tuple[dict[str, Any], Path, RunDirectory]:
    """A run whose shard 2, sequences 6 to 8, is not measured.

    Its 16 documents are 16 sequences. Joined, they would make more, so they are fewer.
    """
    options = {"packing": "document"} | options
    longest = 24 if options["packing"] == "document" else 14
    corpus_file = write_texts(tmp_path / "texts" / "b.jsonl", *range(8, longest))
    fields = fields_of_corpus(corpus_file, **options)
    run = measured_run(tmp_path / "out", "all", **fields)
    local(run.commit_file(2)).unlink()
    local(run.complete_file).unlink()
    return fields, corpus_file, run


def reverse_text(file: Path, row: int) -> None:
    """Change a document without changing the length of its file."""
    lines = file.read_text().splitlines(keepends=True)
    text = json.loads(lines[row])["text"]
    lines[row] = lines[row].replace(text, text[::-1])
    file.write_text("".join(lines))


def rows_of_sequence(reader: SequenceIndex, sequence: int) -> list[int]:
    """The rows of the documents that a sequence is made of."""
    block = reader.block(0)
    documents = block.pieces(sequence, sequence + 1).document
    return block.row[documents[0] : documents[-1] + 1].tolist()


@pytest.mark.parametrize(("packing", "options"), [
    ("document", {"shuffle": 3}),
    # In these orders, sequences are found by the same rules.
    late("concat", {"shuffle": 3}), late("concat", {"skip": 1}),
])  # fmt: skip
def test_a_run_continues_after_an_unmeasured_document_was_mended(
    tmp_path: Path, packing: str, options: dict[str, Any]
):
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
    assert tokens_read(run) == tokens_read(measured_run(tmp_path / "alone", "all", **fields))
    kept = [row for row in tokens_read(run) if row[0] // SHARD_SIZE not in affected_shards]
    assert tokens_before == kept


def write_again_without_tokens(file: Path, run: RunDirectory) -> None:
    shutil.rmtree(local(run.path).parent / "corpora")
    forget_open_files()
    reverse_text(file, 7)


def record_of(run: RunDirectory) -> Path:
    return local(run.index) / "corpus.json"


CHANGED = "the corpus has changed since the run was begun: "


@pytest.mark.parametrize(("change", "message"), [
    (lambda file, run: reverse_text(file, 0),
     f"{CHANGED}sequence 0, which begins in {{file}}, line 1, would not be the same; "),
    (lambda file, run: file.write_text(file.read_text().rpartition("\n{")[0]),
     f"{CHANGED}it held 16 sequences and holds 15"),
    (lambda file, run: write_texts(file.with_name("a.jsonl"), 30),
     f"{CHANGED}sequence 0 came from {{file}}, line 1 and would come from "
     "{file.parent}/a.jsonl, line 1"),
    (write_again_without_tokens,
     f"{CHANGED}b.jsonl is not as it was, and the tokens that the run was begun with are "
     "gone from {run.path.parent}/corpora/"),
    (lambda file, run: record_of(run).rename(local(run.index) / "documents.parquet"),
     "gone, so nothing says which corpus the run was begun with"),
    (lambda file, run: record_of(run).write_text('{"format": 3}'),
     "damaged, or of another version of headcount, so nothing says which corpus"),
])  # fmt: skip
def test_another_corpus_is_refused_in_one_line(
    tmp_path: Path, change: Callable[[Path, RunDirectory], object], message: str
):
    fields, file, run = half_measured_run(tmp_path)
    change(file, run)
    line = refused(RunError, plan_of, tmp_path / "out", "all", **fields)
    assert line.startswith(str(run.path))
    assert message.format(file=file, run=run) in line


def test_a_change_that_keeps_size_and_time_is_found_if_the_corpus_is_verified(tmp_path: Path):
    fields, file, run = half_measured_run(tmp_path)
    times = os.stat(file)
    reverse_text(file, 7)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    # The tokens of before are still there, so the run stays one of the text of before.
    measured_run(tmp_path / "out", "all", **fields)
    local(run.commit_file(2)).unlink()
    said = io.StringIO()
    preparation = Preparation(verify=True, console=Console(file=said, width=1000))
    with pytest.raises(RunError, match=r"b\.jsonl is not as it was, and the tokens that the run"):
        plan_of(tmp_path / "out", "all", preparation=preparation, **fields)
    lines = said.getvalue().splitlines()
    assert re.search(r"b\.jsonl, line 8", lines[0])
    assert lines[1] == "1 portion differed and will be prepared again"


def test_a_bad_row_may_be_mended(tmp_path: Path):
    file = write_texts(tmp_path / "texts" / "b.jsonl", *range(8, 24))
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:12], "{\n", *lines[12:]]))
    fields = fields_of_corpus(file) | {"bad_rows": 0.1}
    run = measured_run(tmp_path / "out", "all", **fields)
    assert "corpus    17 documents: 16 used, 1 bad" in as_lines(read_status(run))
    # The sequences behind the bad row are not measured.
    for shard in (4, 5):
        local(run.commit_file(shard)).unlink()
    file.write_text("".join([*lines[:12], lines[0], *lines[12:]]))
    measured_run(tmp_path / "out", "all", **fields)
    assert read_status(run).documents == {"used": 17}
    # The default of `bad_rows` would have refused the corpus before it was mended.
    assert run.manifest().bad_rows == 0.1


def test_a_run_goes_on_when_its_tokens_or_its_corpus_lie_elsewhere(tmp_path: Path):
    fields, file, run = half_measured_run(tmp_path)
    corpora, elsewhere = tmp_path / "out" / "corpora", tmp_path / "elsewhere"

    def has_new_index() -> bool:
        return plan_of(tmp_path / "out", "all", **fields).has_new_index

    # A file that was only written again changes nothing.
    os.utime(file, (1, 1))
    assert has_new_index()
    measured_run(tmp_path / "out", "all", **fields)
    assert not has_new_index()
    # Now it is as it was, so its tokens are made again.
    shutil.rmtree(corpora)
    assert not has_new_index()
    shutil.move(corpora, elsewhere)
    fields["corpora"] = str(elsewhere)
    assert has_new_index()
    measured_run(tmp_path / "out", "all", **fields)
    # `resume` does not need the scan file to find the tokens.
    assert run.manifest().corpora == str(elsewhere)
    assert len(replan(run).sequences) == 16
    assert not corpora.exists()
    moved_file = tmp_path / "moved" / file.name
    moved_file.parent.mkdir()
    shutil.copy2(file, moved_file)
    shutil.rmtree(elsewhere)
    assert replan(run, [f"input.files={moved_file}"]).has_new_index


def test_a_run_of_counted_tokens_goes_on_while_the_counts_are_the_same(tmp_path: Path):
    file = write_texts(tmp_path / "texts" / "b.jsonl", 8, 30)
    fields = fields_of_corpus(file) | {"input": {"family": "unigram_text", "files": str(file)}}
    run = measured_run(tmp_path / "out", 4, **fields)
    tokens_before = tokens_read(run)
    # The order of letters does not count, so the corpus is still the same to this run.
    reverse_text(file, 1)
    assert measured_run(tmp_path / "out", 8, **fields) == run
    assert (tokens_read(run)[:4], len(tokens_read(run))) == (tokens_before, 8)
    write_texts(file, 8, 31)
    with pytest.raises(RunError, match=r"token \d+ occurred \d+ times and occurs \d+ times"):
        plan_of(tmp_path / "out", 8, **fields)


def test_runs_that_carry_different_columns_are_asked_together(tmp_path: Path):
    file, out = tmp_path / "a.jsonl", tmp_path / "out"
    lines = [{"text": "abcdefgh" * 3, "id": i, "meta": {"year": 2000 + i}} for i in range(4)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for columns in ([], ["id"], ["id", "meta.year"]):
        run = measured_run(out, "all", **fields_of_corpus(file, columns=columns))
    sql = (
        "SELECT doc_id, doc_meta_year, count(*) FROM sequences WHERE intervention = 'none' AND "
        "row = 2 GROUP BY ALL ORDER BY ALL"
    )
    expected = [("2", "2002", 1), ("2", None, 1), (None, None, 1)]
    assert open_tables(out).rows(sql) == expected
    compact(run)
    assert open_tables(out).rows(sql) == expected
