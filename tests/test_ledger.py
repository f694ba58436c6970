"""The ledger: files and folds, whoever dies in between and however often something is done twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import schemas.commits as ledger
from jobs.run_lock import locked
from jobs.run_loop import fold_commits
from jobs.spans import Spans
from schemas.commits import COMMITS, Commit, Failure, drop, fold
from schemas.damage import Damage
from schemas.errors import RunError, ScanError
from schemas.places import StorePath, names, place
from schemas.run_directory import RunDirectory
from tests.toy_runs import Row, local, write_run


def one(row: Row) -> float:
    return 1.0


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Ten shards of one sequence each, done."""
    return write_run(tmp_path, "a-1", {"sink_mass": one}, sequences=10, per_shard=1)


def files(run: RunDirectory, kind: str) -> list[str]:
    return sorted(n for n in names(run.commits_directory) if n.startswith(kind))


def shards(run: RunDirectory) -> list[int]:
    return run.ledger([])["shard"].to_pylist()


def test_folding_changes_where_commits_are_and_nothing_else(run: RunDirectory) -> None:
    before = list(run.commits())
    fold(run.commits_directory, before[2:7])
    assert list(run.commits()) == before
    assert len(files(run, "fold-")) == 1
    assert files(run, "shard-") == [f"shard-{shard:06d}.json" for shard in (0, 1, 7, 8, 9)]
    assert run.ledger([])["folded"].to_pylist() == [2 <= shard < 7 for shard in range(10)]
    assert run.ledger(["rows", "host"]).column_names == ["shard", "rows", "host", "folded"]


@pytest.mark.parametrize("deletions", range(4))
def test_whoever_folds_may_die_before_all_files_are_deleted(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, deletions: int
) -> None:
    before = list(run.commits())

    def die(paths: Any) -> None:
        for path, _ in zip(paths, range(deletions), strict=False):
            path.unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(ledger, "delete", die)
    with pytest.raises(KeyboardInterrupt):
        fold(run.commits_directory, before[:3])
    assert list(run.commits()) == before


def test_whoever_folds_may_die_before_the_fold_is_there(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = list(run.commits())
    monkeypatch.setattr(
        "os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(RunError, match=r"fold-000000-.*No space left on device"):
        fold(run.commits_directory, before)
    assert list(run.commits()) == before


def test_two_may_fold_at_once_and_each_commit_counts_once(run: RunDirectory) -> None:
    before = list(run.commits())
    fold(run.commits_directory, before[:6])
    fold(run.commits_directory, before[4:8])
    fold(run.commits_directory, before[:6])
    assert list(run.commits()) == before


def test_a_late_attempt_at_a_folded_shard_does_not_count(run: RunDirectory) -> None:
    first = next(run.commits())
    fold(run.commits_directory, [first])
    late = first.model_copy(update={"attempt": 2, "finished": first.finished + timedelta(days=300)})
    local(run.commit_file(0)).write_text(late.model_dump_json())
    assert next(run.commits()) == first


def test_a_shard_that_is_taken_back_is_missing_until_it_is_committed_anew(
    run: RunDirectory,
) -> None:
    before = list(run.commits())
    fold(run.commits_directory, before)
    drop(run.commits_directory, run.run_id, [3, 5])
    assert shards(run) == [0, 1, 2, 4, 6, 7, 8, 9]
    again = before[3].model_copy(update={"attempt": 2})
    local(run.commit_file(3)).write_text(again.model_dump_json())
    assert [c.attempt for c in run.commits() if c.shard == 3] == [2]
    fold(run.commits_directory, [again])
    assert [(c.shard, c.attempt) for c in run.commits()][3:5] == [(3, 2), (4, 1)]
    assert 5 not in shards(run)


def test_a_reader_that_is_overtaken_by_a_fold_reads_again(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = list(run.commits())
    listed = ledger.names
    overtaken: list[str] = []

    def list_then_fold(directory: Any) -> Any:
        found = list(listed(directory))
        if not overtaken:
            overtaken.extend(found)
            fold(run.commits_directory, before)
        return found

    monkeypatch.setattr(ledger, "names", list_then_fold)
    assert list(run.commits()) == before
    assert len(overtaken) == 10


@pytest.mark.parametrize(
    "spoil",
    [
        lambda commit: commit | {"run_id": "other-1"},
        lambda commit: commit | {"shard": 4},
        lambda commit: {k: v for k, v in commit.items() if k != "rows"},
        lambda commit: [],
    ],
)
def test_what_is_no_commit_of_this_run_is_passed_over(
    run: RunDirectory, spoil: Callable[[Any], Any]
) -> None:
    file = local(run.commit_file(3))
    file.write_text(json.dumps(spoil(json.loads(file.read_bytes()))))
    assert shards(run) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_a_fold_holds_every_field_of_a_commit(run: RunDirectory) -> None:
    assert set(Commit.model_fields) == set(COMMITS.names)
    commit = next(run.commits()).model_copy(
        update={"bad_rows": ["a.jsonl:7 (text is null)"], "seconds": 0.1234}
    )
    fold(run.commits_directory, [commit])
    assert next(run.commits()) == commit


def test_a_driver_folds_while_outcomes_pass(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.run_loop.COMMITS_PER_FOLD", 4)
    before = list(run.commits())
    outcomes: list[Commit | Failure] = [*before[:5], Failure(99, "why"), *before[5:]]
    assert list(fold_commits(run, outcomes)) == outcomes
    assert len(files(run, "fold-")) == 2
    assert files(run, "shard-") == ["shard-000008.json", "shard-000009.json"]
    assert list(run.commits()) == before


def test_files_are_held_to_their_commits_by_size_or_by_content(run: RunDirectory) -> None:
    fold(run.commits_directory, list(run.commits())[:5])
    local(run.data_file("heads", "none", 2)).unlink()
    local(run.data_file("heads", "none", 3)).write_bytes(b"")
    local(run.data_file("heads", "none", 7)).write_bytes(b"")
    table = run.ledger()
    heads = "heads/intervention=none/shard-{:06d}.parquet".format
    gone = Damage(heads(2), [2], "is gone")
    sizes = {file.path: file.bytes for commit in run.commits() for file in commit.files}
    short = [
        Damage(heads(shard), [shard], f"has 0 bytes where {sizes[heads(shard)]:,} were committed")
        for shard in (3, 7)
    ]
    assert run.damaged_files([table]) == [gone, *short]
    for shard in (4, 8):
        local(run.data_file("heads", "none", shard)).write_bytes(bytes(sizes[heads(shard)]))
    endless = Damage(heads(8), [8], "does not end as a Parquet file does")
    assert run.damaged_files([table]) == [gone, *short, endless]
    other = [
        Damage(heads(shard), [shard], "has other content than was committed") for shard in (4, 8)
    ]
    found = run.damaged_files([table], run.manifest())
    assert sorted(found, key=lambda damage: damage.path) == sorted(
        [gone, *short, *other], key=lambda damage: damage.path
    )


def test_one_driver_at_a_time(run: RunDirectory) -> None:
    with (
        locked(run),
        pytest.raises(RunError, match="another process is at work on this run"),
        locked(run),
    ):
        pass
    with locked(run):
        pass


def test_spans_give_each_shard_once_whoever_asks() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 100):
        wanted = np.sort(rng.choice(1000, size, replace=False))
        spans = Spans(wanted)
        owners = rng.integers(5, size=10 * size).tolist()
        taken = [(owner, shard) for owner in owners if (shard := spans.take(owner)) is not None]
        assert sorted(shard for _, shard in taken) == wanted.tolist()


def test_spans_are_read_forward_but_for_a_step_back_at_each_theft() -> None:
    spans = Spans(np.arange(1000))
    taken: dict[int, list[int]] = {owner: [] for owner in range(4)}
    for turn in range(1000):
        shard = spans.take(turn % 4)
        assert shard is not None
        taken[turn % 4].append(shard)
    for shards in taken.values():
        jumps = np.flatnonzero(np.diff(shards) != 1)
        assert len(jumps) <= 12


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("abfs://box/runs", "expected a path, file://, s3:// or gs://"),
        ("http://localhost/runs", "expected a path, file://, s3:// or gs://"),
        ("s3://", "expected s3://BUCKET/PATH"),
        ("s3://AKIA:secret@bucket/runs", "must hold no credentials"),
    ],
)
def test_a_place_that_cannot_be_is_refused_without_its_secrets(where: str, message: str) -> None:
    with pytest.raises(ScanError, match=message) as caught:
        place(where)
    assert "secret" not in str(caught.value)


def test_places() -> None:
    assert place("file:///data/runs") == Path("/data/runs")
    assert place("~/runs") == Path.home() / "runs"
    assert place("runs") == Path("runs")
    store = place("s3://bucket//runs/")
    assert store == StorePath("s3://bucket/runs")
    assert (str((store / "a") / "b"), (store / "a").name, (store / "a").parent) == (
        "s3://bucket/runs/a/b",
        "a",
        store,
    )
