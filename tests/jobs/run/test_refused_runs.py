"""Whatever refuses to continue a run leaves its files as they are, and so its rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from rich.console import Console

from headcount.jobs.corpus.preparation import Preparation
from headcount.jobs.plan.plan import Plan, make_plan, replan
from headcount.jobs.resources import Resources
from headcount.jobs.run.measuring import run_to_end
from headcount.jobs.upkeep.compaction import compact
from headcount.jobs.upkeep.removal import remove
from headcount.schemas.errors import HeadcountError, ModelError, RunError
from headcount.schemas.files.commits import gather
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.places import write_whole
from headcount.schemas.scans.scan_file import parse_scan
from headcount.workers.model.model_info import ModelInfo
from headcount.workers.replica import Replica
from tests.toys.commands import error_of
from tests.toys.runs_here import become, run_here
from tests.toys.toy_corpora import write_jsonl
from tests.toys.toy_replica import ToyReplica
from tests.toys.toy_runs import local, open_tables

SEQUENCES, LONGER = 5, 7  # the last shard of three is short, and is measured again
HERE = Resources(0, 1, "cpu", None)
SILENT = Console(quiet=True)
Refusal = Callable[[RunDirectory, pytest.MonkeyPatch], object]


def plan_of(directory: Path, sequences: int = LONGER, **changes: Any) -> Plan:
    """Plan the run of this file's scan."""
    fields: dict[str, Any] = {
        "model": "bundled:attn-only-2l-mini", "n_ctx": 9, "statistics": ["entropy", "sink_mass"],
        "sequences_per_shard": 3, "sequences": sequences, "out": str(directory),
        "input": {"family": "uniform_random"},
    }  # fmt: skip
    return make_plan(parse_scan(fields | changes), "kept", preparation=Preparation())


def longer(run: RunDirectory) -> Plan:
    return plan_of(local(run.path).parent)


def become_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, "of another")


def files_of(run: RunDirectory) -> dict[str, bytes]:
    """Every file of a run with its content."""
    root = local(run.path)
    return {str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*") if f.is_file()}


def other_code(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    become_other_code(monkeypatch)
    run_here(longer(run))


def other_code_and_a_damaged_file(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    become_other_code(monkeypatch)
    run_to_end(plan_of(local(run.path).parent, SEQUENCES), HERE, SILENT, ToyReplica, verify=True)


def other_precision(run: RunDirectory, _: pytest.MonkeyPatch) -> None:
    plan = longer(run)
    plan = replace(plan, scan=plan.scan.model_copy(update={"precision": "tf32"}))
    run_here(plan, Replica)


def a_model_that_cannot_be_loaded(run: RunDirectory, _: pytest.MonkeyPatch) -> None:
    class Unloadable(ToyReplica):
        def __init__(self, info: ModelInfo, scan: Any, device: str = "auto") -> None:
            raise ModelError(f"{info.path}: too large for this machine")

    run_here(longer(run), Unloadable)


def a_cluster_that_is_not_there(run: RunDirectory, _: pytest.MonkeyPatch) -> None:
    run_to_end(longer(run), Resources(1, 1, "cpu", "127.0.0.1:9"), SILENT, ToyReplica)


def a_device_that_is_not_there(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    command("resume", run.path, "--set", f"sequences={LONGER}", "--device", "cuda")


def another_driver(run: RunDirectory, _: pytest.MonkeyPatch) -> None:
    plan = longer(run)
    with FileLock(local(run.path) / ".lock"):
        run_here(plan)


def a_run_that_grew_meanwhile(run: RunDirectory, _: pytest.MonkeyPatch) -> None:
    plan = longer(run)
    assert plan.previous_manifest is not None
    shorter = plan.previous_manifest.model_copy(update={"sequences": SEQUENCES - 1})
    run_here(replace(plan, previous_manifest=shorter))


def another_formula_of_this_code(run: RunDirectory, _: pytest.MonkeyPatch) -> None:
    manifest = run.manifest()
    kinds = {**manifest.kinds, "statistics": {}}
    with changed_manifest(run, kinds=kinds):
        replan(run, [f"sequences={LONGER}"])


def a_field_that_changes_rows(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    command("resume", run.path, "--set", 'statistics=["entropy"]')


def a_model_that_is_another(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    command("resume", run.path, "--set", "model=bundled:gpt2-mini")


def a_run_to_continue_and_a_new_one(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    command("scan", local(run.path) / "scan.toml", "--new", "--run", run.run_id)


def a_compaction_beside_a_driver(run: RunDirectory, _: pytest.MonkeyPatch) -> None:
    with FileLock(local(run.path) / ".lock"):
        compact(run)


def a_removal_beside_a_driver(run: RunDirectory, _: pytest.MonkeyPatch) -> None:
    with FileLock(local(run.path) / ".lock"):
        remove(run)


def a_calibration_without_effects(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    command("calibrate", run.path)


@contextmanager
def changed_manifest(run: RunDirectory, **changes: Any) -> Iterator[None]:
    """A manifest with other fields, for a block that reads it."""
    before = local(run.manifest_file).read_bytes()
    changed = run.manifest().model_copy(update=changes).model_dump_json()
    write_whole(run.manifest_file, changed.encode())
    try:
        yield
    finally:
        write_whole(run.manifest_file, before)


def command(*words: object) -> None:
    """Run a command in this process; what it says is raised, as a call raises it."""
    raise HeadcountError(error_of(*words))


@pytest.fixture(scope="module", params=["loose", "gathered"])
def begun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A complete run whose last shard is short; its commits are files, or in a segment."""
    run = plan_of(tmp_path_factory.mktemp("runs"), SEQUENCES).run
    run_here(plan_of(local(run.path).parent, SEQUENCES))
    if request.param == "gathered":
        gather(run.commits_directory, list(run.commits()))
    assert open_tables(run.path).rows("FROM heads LIMIT 1")
    return run


@pytest.mark.parametrize("refusal", [
    other_code, other_precision, a_model_that_cannot_be_loaded,
    a_cluster_that_is_not_there, a_device_that_is_not_there, another_driver,
    a_run_that_grew_meanwhile, another_formula_of_this_code, a_field_that_changes_rows,
    a_model_that_is_another, a_run_to_continue_and_a_new_one, a_compaction_beside_a_driver,
    a_removal_beside_a_driver, a_calibration_without_effects,
])  # fmt: skip
def test_what_is_refused_leaves_the_run_as_it_is(
    begun: RunDirectory, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
):
    files = files_of(begun)
    with pytest.raises(HeadcountError) as refused:
        refusal(begun, monkeypatch)
    assert "\n" not in str(refused.value)
    assert files_of(begun) == files


def test_a_damaged_shard_is_taken_back_only_by_what_measures_it_again(
    begun: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    file = next(local(begun.path).glob("heads/*/shard-000000-*.parquet"))
    content = file.read_bytes()
    file.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    files = files_of(begun)
    with monkeypatch.context() as patch, pytest.raises(RunError, match="--allow-other-code"):
        other_code_and_a_damaged_file(begun, patch)
    assert files_of(begun) == files
    plan = plan_of(local(begun.path).parent, SEQUENCES)
    assert run_to_end(plan, HERE, SILENT, ToyReplica, verify=True) == []
    assert file.read_bytes() == content


def test_a_corpus_that_changed_leaves_the_run_as_it_is(tmp_path: Path):
    texts: list[Any] = [(f"document {number} of a corpus", None) for number in range(8)]
    corpus = write_jsonl(tmp_path / "texts.jsonl", texts)
    changes = {
        "model": "bundled:gpt2-mini", "input": {"family": "pile", "files": str(corpus)},
    }  # fmt: skip
    plan = plan_of(tmp_path / "runs", SEQUENCES, **changes)
    run_here(plan)
    files = files_of(plan.run)
    write_jsonl(corpus, [*texts[:2], ("another document here", None), *texts[3:]])
    with pytest.raises(RunError, match="the corpus has changed"):
        run_here(plan_of(tmp_path / "runs", LONGER, **changes))
    assert files_of(plan.run) == files


def test_code_is_refused_before_a_corpus_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    texts: list[Any] = [(f"document {number} of a corpus", None) for number in range(8)]
    corpus = write_jsonl(tmp_path / "texts.jsonl", texts)
    changes = {
        "model": "bundled:gpt2-mini", "input": {"family": "pile", "files": str(corpus)},
    }  # fmt: skip
    run_here(plan_of(tmp_path / "runs", SEQUENCES, **changes))
    scan = plan_of(tmp_path / "runs", LONGER, **changes).scan

    class NothingIsPrepared(Preparation):
        def prepared(self, *_: object) -> Any:
            raise AssertionError

    become_other_code(monkeypatch)
    with pytest.raises(RunError, match="--allow-other-code"):
        make_plan(scan, "kept", preparation=NothingIsPrepared(), allow_other_code=False)
