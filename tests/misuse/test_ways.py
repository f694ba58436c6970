"""What a run is, what refuses to continue it, and what is advised then."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from headcount.jobs.plan.plan import make_plan
from headcount.jobs.plan.run_plan import prepare_run
from headcount.jobs.plan.scan_files import portable_scan
from headcount.jobs.run_names import last_run, next_run, runs_of
from headcount.jobs.upkeep.removal import remove
from headcount.schemas.errors import RunError
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.scans.scan import Scan, safe_name
from headcount.schemas.scans.scan_file import load_scan
from headcount.workers.model.info.text_tokenizer import TextTokenizer
from tests.misuse.conftest import Command
from tests.toys import toy_models as toy
from tests.toys.commands import printed
from tests.toys.toy_runs import local, open_tables, write_run

IN_PROCESS = ("--replicas", "0", "--device", "cpu")


@pytest.fixture
def home(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model, texts and a scan of them, all by relative names."""
    path = tmp_path / "home"
    shutil.copytree(model, path / "bytes")
    monkeypatch.chdir(path)
    lines = [json.dumps({"text": chr(97 + i) * 40}) + "\n" for i in range(6)]
    (path / "a.jsonl").write_text("".join(lines))
    write_scan(path / "toy.toml")
    return path


def write_scan(file: Path, **changes: Any) -> Path:
    """Write a scan of two shards."""
    fields = {"model": "bytes", "n_ctx": 8, "sequences": 4, "sequences_per_shard": 2}
    fields |= {"statistics": ["entropy"], "input.family": "pile", "input.files": "*.jsonl"}
    content = (f"{key} = {json.dumps(value)}\n" for key, value in (fields | changes).items())
    file.write_text("".join(content))
    return file


def scan_here(command: Command, *words: str) -> Path:
    """Run `headcount scan toy.toml …`; returns the run that it made or continued."""
    code, lines = command("scan", "toy.toml", *words, *IN_PROCESS)
    assert code == 0, lines
    commits = Path.cwd().glob("runs/*/commits/*.json")
    return max(commits, key=lambda file: file.stat().st_mtime_ns).parent.parent


def refusal(command: Command, *words: str | Path) -> str:
    code, (line,) = command(*words, *IN_PROCESS)
    assert code == 2
    return line


def without_last_commit(run: Path) -> Path:
    """Delete the last commit of a run, so that one of its shards is not done."""
    (run / "commits" / "shard-000001.json").unlink(missing_ok=True)
    return run


def rows(run: Path) -> list[Any]:
    columns = "sequence, layer, head, entropy, tokens, file"
    sql = f"SELECT {columns} FROM heads JOIN sequences USING (sequence) ORDER BY ALL"
    return open_tables(run).rows(sql)


# What a run is


def test_the_layout_of_its_file_does_not_change_a_tokenizer(home: Path):
    path = home / "bytes" / "tokenizer.json"
    before = TextTokenizer(home / "bytes", 257).fingerprint
    content = json.loads(path.read_text()) | {"truncation": None}
    path.write_text(json.dumps(content, indent=3, sort_keys=True))
    assert TextTokenizer(home / "bytes", 257).fingerprint == before


# Numbered runs


def test_new_runs_have_numbers_and_the_newest_that_fits_is_continued(home: Path, command: Command):
    first = scan_here(command)
    names = [first.name, f"{first.name}-2", f"{first.name}-3"]
    assert [scan_here(command, "--new").name for _ in range(2)] == names[1:]
    (home / "runs" / f"{first.name}-x").mkdir()
    (home / "runs" / f"{first.name}-9").mkdir()  # A half deleted run.
    directory, run_id = RunDirectory(first), first.name[7:]
    assert [run.run_id for run in runs_of(directory)] == [name[7:] for name in names[::-1]]
    next_ids = [next_run(directory, ids).run_id for ids in ([], [f"{run_id}-12"])]
    assert next_ids == [f"{run_id}-10", f"{run_id}-13"]
    last_ids = [last_run(directory, ids).run_id for ids in ([], [f"{run_id}-10"])]
    assert last_ids == [f"{run_id}-3", f"{run_id}-10"]
    # A broken manifest does not block the other runs. The scan continues the run that fits.
    (home / "runs" / names[2] / "manifest.json").write_text("{")
    without_last_commit(home / "runs" / names[1])
    assert scan_here(command).name == names[1]
    for name in names:
        (home / "runs" / name / "manifest.json").write_text("{")
    phrase = "bring back a copy; headcount scan --new starts another run"
    assert refusal(command, "scan", "toy.toml").endswith(phrase)


# Runs are continued from any directory


def test_a_run_goes_on_from_anywhere(home: Path, command: Command, monkeypatch: pytest.MonkeyPatch):
    expected = rows(scan_here(command))
    run = scan_here(command, "--new")
    elsewhere = home.parent / "elsewhere"
    elsewhere.mkdir()

    def continue_from(directory: Path, *words: str | Path) -> None:
        without_last_commit(run)
        monkeypatch.chdir(directory)
        code, lines = command(*words, *IN_PROCESS)
        assert code == 0, lines
        assert len(list((run / "commits").iterdir())) == 2
        assert rows(run) == expected

    continue_from(elsewhere, "resume", run)
    # The scan continues elsewhere: its relative names mean other places with the same content.
    for name in ("bytes", "a.jsonl", "toy.toml"):
        shutil.move(home / name, elsewhere / name)
    continue_from(elsewhere, "scan", "toy.toml", "--set", f"out={home}/runs")
    continue_from(Path("/"), "resume", run)


def test_what_was_moved_is_set(home: Path, command: Command, monkeypatch: pytest.MonkeyPatch):
    run = without_last_commit(scan_here(command))
    expected = rows(scan_here(command, "--new"))
    for folder in ("new place", "texts"):
        (home / folder).mkdir()
    shutil.move("bytes", "new place/moved")
    shutil.move("a.jsonl", "texts/a.jsonl")
    monkeypatch.chdir(home / "new place")
    assert refusal(command, "resume", run) == (
        f"error: {run}: not there, seen from {home}: input.files = '*.jsonl', model = 'bytes'; say "
        f"where that lies: headcount resume {run} --set input.files=PATH --set model=PATH"
    )
    places = ("--set", "model=moved", "--set", "input.files=../texts/*")
    code, lines = command("resume", run, *places, *IN_PROCESS)
    assert code == 0, lines
    assert [row[:5] for row in rows(run)] == [row[:5] for row in expected]
    # The run remembers the new places.
    monkeypatch.chdir("/")
    assert command("resume", without_last_commit(run), *IN_PROCESS)[0] == 0
    # A model counts by its content, not by its name.
    toy.change_config(home / "new place" / "moved", layer_norm_epsilon=1e-3)
    assert "(config.json: " in refusal(command, "resume", without_last_commit(run))


def test_a_run_whose_directory_was_moved_asks_where_its_model_lies(
    home: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    scan_here(command)
    monkeypatch.chdir(home.parent)
    shutil.move(home, home.parent / "moved")
    (run,) = (home.parent / "moved" / "runs").glob("run_id=*")
    line = refusal(command, "resume", without_last_commit(run))
    assert line.endswith(f"headcount resume {run} --set input.files=PATH --set model=PATH")
    # From the second command on the names are meant from where the first one was.
    for directory in (home.parent / "moved", Path("/")):
        monkeypatch.chdir(directory)
        without_last_commit(run)
        assert command("resume", run, *IN_PROCESS)[0] == 0


# Runs are deleted


def test_broken_runs_are_deleted_by_any_name(home: Path, command: Command):
    runs = [scan_here(command), scan_here(command, "--new")]
    (runs[0] / "manifest.json").write_text("{")
    words = ("rm", runs[0], f"runs/{runs[1].name}", "--yes")
    assert command(*words) == (0, [f"deleted {run}" for run in runs])
    assert list((home / "runs").glob("run_id=*")) == []


def test_a_deletion_cut_short_leaves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = write_run(tmp_path, "toy", {"entropy": lambda _: 1.0})

    def die(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(RunError, match="cannot be deleted whole"):
            remove(run)
    assert not run.manifest_file.is_file()
    remove(run)
    assert not local(run.path).exists()


# Odd names


def test_a_file_of_any_name_is_one_run_here_and_on_a_cluster(home: Path):
    everywhere = {"model": "bundled:gpt2-mini", "input.files": f"{home}/a.jsonl"}
    for name in ("a*", "a b", "日本"):
        file = write_scan(home / f"{name}.toml", out="runs of odd names")
        scan = load_scan(file)
        run_id = scan.run_id(file.stem)
        assert run_id.startswith(f"{safe_name(name)}-")
        there = portable_scan(write_scan(file, **everywhere), ["out=/r"])
        assert there.run_id(file.stem) == load_scan(file).run_id(file.stem)
        for _ in range(2):
            prepare_run(make_plan(scan, file.stem), "")
        assert len(list((home / "runs of odd names").glob(f"run_id={run_id}*"))) == 1


# A plan


def test_a_plan_and_a_scan_say_what_is_left_out(
    home: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    lines = [json.dumps({"text": "To be, or not", "meta": {"pile_set_name": "a\x1b[31m"}})] * 4
    (home / "a.jsonl").write_text("\n".join([*lines, "{", '{"text": ""}', '{"text": "To"}']))
    monkeypatch.setenv("COLUMNS", "200")
    settings = ("--set", "sequences=all", "--set", "bad_rows=0.2")
    table = printed("plan", "toy.toml", *settings)
    words = [" ".join(line.replace("│", " ").split()) for line in table.splitlines()]
    assert {"a\\x1b[31m 4 4 0 0 0", "of no subset 3 0 1 1 1", "all 7 4 1 1 1"} <= set(words)
    said = {
        "1 bad row left out: a.jsonl, line 5 (invalid JSON)",
        "Lines and rows are counted from 1 here, and from 0 in sequences.row.",
    }
    assert said <= set(words)
    assert said <= set(command("scan", "toy.toml", *settings, *IN_PROCESS)[1])


def test_a_plan_shows_the_fields_that_the_scan_sets_and_with_all_the_others(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "120")
    outputs = [printed("plan", "toy.toml", "--set", "seed=2", *all_) for all_ in ([], ["--all"])]
    fields = [re.findall(r"^│ ([\w.]+) +│", text, re.MULTILINE) for text in outputs]
    values = {"model", "n_ctx", "statistics", "sequences", "sequences_per_shard", "seed"}
    values |= {"input.family", "input.files"}
    tables = {"device", "batches", "shards", "tokens", "corpus", "memory", "none", "heads", "all"}
    tables.add("BOS")
    assert set(fields[0]) - tables == values
    assert set(Scan.model_fields) - {"input"} | {"input.packing"} <= set(fields[1])
    # Both count the table `heads`, which has the name of a field.
    hidden = len(fields[1]) - len(fields[0])
    assert f"{hidden} more fields with the default; --all shows them" in outputs[0]
    assert "--all" not in outputs[1]
