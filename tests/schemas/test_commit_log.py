"""The commit log: commits in files and in segments.

Its meaning is the same after every order of deaths, and if something is done twice.
"""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import headcount.schemas.files.commits as commit_log
from headcount.jobs.run.commit_log import CommitLog
from headcount.schemas.errors import RunError, ScanError
from headcount.schemas.files.commit import COMMITS, Commit, Failure
from headcount.schemas.files.commits import gather, gather_loose, taken_back, write_segment
from headcount.schemas.files.content_check import files_damaged_by_content
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.places import StorePath, names, place
from tests.toys.refusals import refused
from tests.toys.toy_runs import data_file, local, write_run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Ten shards of one sequence each, done."""
    return write_run(tmp_path, "a-1", {"sink_mass": lambda _: 1.0}, sequences=10, per_shard=1)


def commit_log_files(run: RunDirectory, prefix: str) -> list[str]:
    """Names of the files of a commit log that begin with `segment-` or `shard-`."""
    return sorted(name for name in names(run.commits_directory) if name.startswith(prefix))


def committed_shards(run: RunDirectory) -> list[int]:
    """The shards that a reader counts as done."""
    return run.commit_log([])["shard"].to_pylist()


def test_gathering_changes_where_commits_are_and_nothing_else(run: RunDirectory):
    commits_before = list(run.commits())
    gather(run.commits_directory, commits_before[2:7])
    assert list(run.commits()) == commits_before
    assert len(commit_log_files(run, "segment-")) == 1
    loose = [f"shard-{shard:06d}.json" for shard in (0, 1, 7, 8, 9)]
    assert commit_log_files(run, "shard-") == loose
    assert run.commit_log(["rows", "host"]).column_names == ["shard", "rows", "host"]


def test_a_commit_that_another_driver_gathers_meanwhile_is_left_to_it(run: RunDirectory):
    commits_before = list(run.commits())
    gather(run.commits_directory, commits_before[3:4])
    # It is listed still, and cannot be read.
    listed = local(run.commits_directory) / "shard-000003.json"
    listed.symlink_to("nowhere")
    gather_loose(run.commits_directory, run.run_id, least=5)
    listed.unlink()
    assert commit_log_files(run, "shard-") == []
    assert list(run.commits()) == commits_before


@pytest.mark.parametrize("deletions", range(4))
def test_a_segment_may_be_killed_before_all_commit_files_are_deleted(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, deletions: int
):
    commits_before = list(run.commits())

    def die(paths: Any) -> None:
        for path, _ in zip(paths, range(deletions), strict=False):
            path.unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(commit_log, "delete", die)
    with pytest.raises(KeyboardInterrupt):
        gather(run.commits_directory, commits_before[:3])
    assert list(run.commits()) == commits_before


def test_a_segment_may_fail_before_it_is_there(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    commits_before = list(run.commits())

    def fill_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fill_disk)
    with pytest.raises(RunError, match=r"segment-000000-.*No space left on device"):
        gather(run.commits_directory, commits_before)
    assert list(run.commits()) == commits_before


def test_two_may_gather_at_once_and_each_commit_counts_once(run: RunDirectory):
    commits_before = list(run.commits())
    # The segments overlap, and the third says what the first says.
    gather(run.commits_directory, commits_before[:6])
    gather(run.commits_directory, commits_before[4:8])
    gather(run.commits_directory, commits_before[:6])
    assert list(run.commits()) == commits_before


def test_a_late_attempt_at_a_gathered_shard_does_not_count(run: RunDirectory):
    first = next(run.commits())
    gather(run.commits_directory, [first])
    # Its clock is ahead by far: clocks do not decide.
    late = {"attempt": 2, "finished": first.finished + timedelta(days=300)}
    late_commit = first.model_copy(update=late)
    local(run.commit_file(0)).write_text(late_commit.model_dump_json())
    assert next(run.commits()) == first


def test_a_shard_that_is_taken_back_is_missing_until_it_is_committed_anew(run: RunDirectory):
    commits_before = list(run.commits())
    gather(run.commits_directory, commits_before)
    write_segment(run.commits_directory, taken_back(run.run_id, [3, 5]))
    assert committed_shards(run) == [0, 1, 2, 4, 6, 7, 8, 9]
    second_commit = commits_before[3].model_copy(update={"attempt": 2})
    local(run.commit_file(3)).write_text(second_commit.model_dump_json())
    assert [commit.attempt for commit in run.commits() if commit.shard == 3] == [2]
    gather(run.commits_directory, [second_commit])
    assert [(commit.shard, commit.attempt) for commit in run.commits()][3:5] == [(3, 2), (4, 1)]
    assert 5 not in committed_shards(run)


def test_a_reader_that_is_overtaken_by_a_segment_reads_again(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    commits_before = list(run.commits())
    real_names = commit_log.names
    names_listed_first: list[str] = []

    def list_then_gather(directory: Any) -> Any:
        """List the commit log; the first time, somebody gathers it before a file is opened."""
        listed_names = list(real_names(directory))
        if not names_listed_first:
            names_listed_first.extend(listed_names)
            gather(run.commits_directory, commits_before)
        return listed_names

    monkeypatch.setattr(commit_log, "names", list_then_gather)
    assert list(run.commits()) == commits_before
    assert len(names_listed_first) == 10


def test_a_file_that_is_no_commit_of_this_run_is_skipped(run: RunDirectory):
    file = local(run.commit_file(3))
    commit = json.loads(file.read_bytes())
    without_rows = {key: value for key, value in commit.items() if key != "rows"}
    for spoilt in (commit | {"run_id": "other-1"}, commit | {"shard": 4}, without_rows, []):
        file.write_text(json.dumps(spoilt))
        assert committed_shards(run) == [0, 1, 2, 4, 5, 6, 7, 8, 9], spoilt


def test_a_segment_holds_every_field_of_a_commit(run: RunDirectory):
    assert set(Commit.model_fields) == set(COMMITS.names)
    fields = {"bad_rows": ["a.jsonl:7 (text is null)"], "seconds": 0.1234}
    commit = next(run.commits()).model_copy(update=fields)
    gather(run.commits_directory, [commit])
    assert next(run.commits()) == commit


def test_a_late_attempt_is_not_gathered_in_place_of_the_commit_that_counts(run: RunDirectory):
    commits_before = list(run.commits())
    gather(run.commits_directory, commits_before[:2])
    late_commit = commits_before[1].model_copy(update={"attempt": 2})
    local(run.commit_file(1)).write_text(late_commit.model_dump_json())
    gather(run.commits_directory, [late_commit, commits_before[2]])
    assert list(run.commits()) == commits_before
    assert len(commit_log_files(run, "shard-")) == 7


def test_a_driver_gathers_while_outcomes_pass(run: RunDirectory):
    commits_before = list(run.commits())
    outcomes: list[Commit | Failure] = [*commits_before]
    outcomes.insert(5, Failure(99, "why"))
    with CommitLog(run, print, per_segment=4) as commit_log:
        for outcome in outcomes:
            commit_log.note(outcome)
    assert len(commit_log_files(run, "segment-")) == 2
    assert commit_log_files(run, "shard-") == ["shard-000008.json", "shard-000009.json"]
    assert list(run.commits()) == commits_before


def test_files_are_held_to_their_commits_by_name_or_by_content(run: RunDirectory):
    for shard in (3, 7):
        local(data_file(run, "heads", "none", shard)).write_bytes(b"")
    local(data_file(run, "heads", "none", 2)).unlink()
    local(data_file(run, "heads", "none", 4)).write_bytes(bytes(size_of(run, 4)))

    def damages(manifest: Manifest | None = None) -> dict[str, tuple[list[int], str]]:
        log = run.commit_log()
        found = (
            files_damaged_by_content(run.path, manifest, log)
            if manifest
            else run.damaged_files(log)
        )
        return {d.path: (d.shards, d.why) for d in found}

    heads = "heads/intervention=none/shard-{:06d}.parquet".format
    # On a disk, names tell which files are there, and whoever opens one compares its size.
    by_name = {heads(2): ([2], "is gone")}
    assert damages() == by_name
    by_content = {heads(4): ([4], "has other content than was committed")} | {
        heads(n): ([n], f"has 0 bytes where {size_of(run, n):,} were committed") for n in (3, 7)
    }
    assert damages(run.manifest()) == by_name | by_content


def size_of(run: RunDirectory, shard: int) -> int:
    """Bytes of a shard's file of heads, as committed."""
    return next(c.files[0].bytes for c in run.commits() if c.shard == shard)


@pytest.mark.parametrize(("location", "message"), [
    ("http://localhost/runs", "expected a path, file://, s3:// or gs://"),
    ("s3://", "expected s3://BUCKET/PATH"),
    ("s3://AKIA:secret@bucket/runs", "must hold no credentials"),
])  # fmt: skip
def test_a_place_that_cannot_be_is_refused_without_its_secrets(location: str, message: str):
    told = refused(ScanError, place, location)
    assert (message in told, "secret" in told) == (True, False)


def test_places():
    assert place("file:///data/runs") == Path("/data/runs")
    assert place("~/runs") == Path.home() / "runs"
    assert place("runs") == Path("runs")
    store = place("s3://bucket//runs/")
    assert store == StorePath("s3://bucket/runs")
    assert str((store / "a") / "b") == "s3://bucket/runs/a/b"
    assert ((store / "a").name, (store / "a").parent) == ("a", store)


@pytest.mark.parametrize("name", ["shard-000003.json", f"segment-000000-{'0' * 32}.parquet"])
def test_a_file_that_is_listed_and_cannot_be_opened_is_one_line_soon(run: RunDirectory, name: str):
    link = Path(str(run.commits_directory / name))
    link.unlink(missing_ok=True)
    link.symlink_to("nowhere")
    assert refused(RunError, run.commit_log) == (
        f"{link}: is listed and cannot be opened (No such file or directory); bring back a "
        "copy, or move it away, and headcount resume measures its shards anew"
    )
    link.unlink()
    assert len(committed_shards(run)) == (9 if "shard" in name else 10)
