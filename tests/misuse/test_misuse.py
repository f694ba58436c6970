"""What a user gets wrong is answered with the lines of `misuse.toml`, in this process."""

import glob
import json
import re
import shlex
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

import headcount
from headcount.jobs.endings import ended_in_lines
from headcount.schemas.errors import ModelError, ScanError
from headcount.schemas.scans.intervention import parse_intervention
from headcount.schemas.scans.scan import safe_name
from headcount.schemas.scans.scan_file import parse_scan
from headcount.workers.interventions import bind
from headcount.workers.model.info.text_tokenizer import _check_size
from tests import ROOT
from tests.misuse.conftest import Command
from tests.toys import toy_models as toy
from tests.toys.object_stores import hurry

TABLE = tomllib.loads(Path(__file__).with_name("misuse.toml").read_text(encoding="utf-8"))
REPEATED = re.compile(f"({'|'.join(TABLE['texts'])}|.)\\{{(\\d+)\\}}", re.DOTALL)


def repeated(value: Any) -> Any:
    """A value in whose strings A{3} has become AAA."""
    if isinstance(value, str):
        return REPEATED.sub(lambda match: match[1] * int(match[2]), value)
    if isinstance(value, list):
        return [repeated(item) for item in value]
    if isinstance(value, dict):
        return {repeated(key): repeated(item) for key, item in value.items()}
    return value


def rows(section: str) -> Any:
    """The rows of a section as parameters, named by what stands first."""
    section_rows = repeated(TABLE["rows"][section])
    names = [str(row[-1] if section == "runs" else row[0] or row[1])[:60] for row in section_rows]
    return pytest.mark.parametrize("row", section_rows, ids=names)


def agree(expected: str, found: str) -> bool:
    """Whether a text is as expected, where `…` stands for anything."""
    return re.fullmatch(re.escape(expected).replace("…", ".*"), found, re.DOTALL) is not None


def change(path: Path, value: Any, locks: ExitStack) -> None:
    """Write, change, cut, delete or lock a file or a model, as `misuse.toml` says."""
    if isinstance(value, str):
        for name, text in TABLE["texts"].items():
            value = value.replace(name, text)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(value.encode("latin-1"))
    elif value is True:
        locks.enter_context(FileLock(path))
    elif value is False:
        path.unlink()
    elif isinstance(value, int):
        path.write_bytes(path.read_bytes()[:value])
    elif path.suffix in CHANGES:
        CHANGES[path.suffix](path, value)
    else:
        if path.is_symlink():
            source = path.resolve()
            path.unlink()
            shutil.copytree(source, path)
        path.mkdir(exist_ok=True)
        for name, content in value.items():
            change(path / name, content, locks)


def fill(weights: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
    """Fill tensors with a value, or leave them out."""
    for name, value in values.items():
        if value is False:
            del weights[name]
        else:
            weights[name].fill_(value)


def merged(old: Any, new: Any) -> Any:
    """The new value; of two tables, their entries together."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {name: merged(old.get(name), value) for name, value in new.items()}


CHANGES: dict[str, Callable[[Path, Any], object]] = {
    ".pth": lambda path, value: torch.save(value, path),
    ".json": lambda path, value: path.write_text(
        json.dumps(merged(json.loads(path.read_text()), value))
    ),
    ".safetensors": lambda path, value: toy.change_weights(path.parent, lambda w: fill(w, value)),
}
"""What a table does to a file of a model, by the ending of its name."""


WAITING = re.compile(r"starting|planning|merging files|[a-z ]+, for \d+ s")
"""A line of a command that has been silent for long."""


class Folder:
    """The folder in which a row runs."""

    def __init__(
        self, path: Path, command: Command, locks: ExitStack, patch: pytest.MonkeyPatch
    ) -> None:
        self.path, self.command, self.locks, self.patch = path, command, locks, patch

    @property
    def files(self) -> list[Path]:
        """Every file, but for those of runs."""
        return sorted(path for path in self.path.rglob("*") if "runs" not in path.parts)

    def change(self, files: dict[str, Any]) -> None:
        """Write or change files, by their names or globs."""
        for name, value in files.items():
            for path in sorted(self.path.glob(name)) if "*" in name else [self.path / name]:
                change(path, value, self.locks)

    def run(self, words: str) -> tuple[int, list[str]]:
        """How a command ends, behind variables that it sets: its code, and its lines of stderr."""
        split = shlex.split(words)
        while re.match("[A-Z_]+=", split[0]):
            self.patch.setenv(*split.pop(0).split("=", 1))
        arguments = [path for word in split for path in glob.glob(word) or [word]]
        code, lines = self.command(*arguments)
        # What it says while it waits, as on a busy machine.
        lines = [line for line in lines if not WAITING.fullmatch(line)]
        return code, [line.replace(str(self.path), "TMP") for line in lines]

    def follow(self, steps: list[Any]) -> list[str]:
        """What the last of some commands says, with changes of files between them."""
        said: list[str] = []
        for step in steps:
            if isinstance(step, dict):
                self.change(step)
            else:
                _, said = self.run(step)
        return said


@pytest.fixture
def folder(
    tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> Iterator[Folder]:
    monkeypatch.chdir(tmp_path)
    # The trace of an error of ours is kept where temporary files lie.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # Nobody waits here for a store that is down.
    hurry(monkeypatch, PAUSE_SECONDS=0)
    for path in shelf.iterdir():
        (tmp_path / path.name).symlink_to(path)
    with ExitStack() as locks:
        folder = Folder(tmp_path, command, locks, monkeypatch)
        texts = TABLE["folder"].items()
        folder.change({name: text.removeprefix("\n") for name, text in texts})
        yield folder


def plan(folder: Folder, changes: dict[str, Any], files: dict[str, Any], lines: list[str]) -> None:
    """Check the lines of `headcount plan` for a scan that is good but for its changes."""
    fields = tomllib.loads(TABLE["folder"]["toy.toml"]) | changes
    if isinstance(fields["input"], dict):
        fields["input"] = {"family": "uniform_random"} | fields["input"]
    folder.change(files)
    folder.change({"toy.toml": ""})
    toml = [f"{json.dumps(key)} = {written(value)}" for key, value in fields.items()]
    (folder.path / "toy.toml").write_text("\n".join(toml), encoding="utf-8")
    found_code, found = folder.run("plan toy.toml")
    text = "\n".join(line.removeprefix("error: ").removeprefix("toy.toml: ") for line in found)
    assert agree("\n".join(lines), text), text
    assert found_code == 2
    assert all(line.startswith("error: ") for line in found)
    # The tokens of a corpus may lie there already; no run does.
    assert not list(folder.path.glob("runs/run_id=*"))


def written(value: Any) -> str:
    """A value as a TOML file writes it."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{k} = {written(v)}' for k, v in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    # NaN and infinity are "nan" and "inf", in Python as in TOML.
    return repr(value) if isinstance(value, float) else json.dumps(value)


@rows("scans")
def test_a_scan_that_is_wrong_is_refused(folder: Folder, row: list[Any]):
    files = row[1] if isinstance(row[1], dict) else {}
    plan(folder, row[0], files, [line for line in row[1:] if isinstance(line, str)])


@rows("corpora")
def test_a_corpus_that_cannot_be_read_as_it_is_is_refused(folder: Folder, row: list[Any]):
    options, files, line = row
    source = {"family": "pile", "files": next(iter(files))}
    plan(folder, {"input": source | options}, files, [line])


@rows("commands")
def test_a_command_is_refused(folder: Folder, row: list[Any]):
    words, *rest = row
    if isinstance(rest[0], dict):
        folder.change(rest.pop(0))
    code = rest.pop(0) if isinstance(rest[0], int) else 2
    before = folder.files
    found_code, lines = folder.run(words)
    # A mistake in SQL is also shown where it stands.
    if len(lines) == 3 and re.fullmatch(r" *\^+", lines[1]):
        assert lines.pop(0) in shlex.split(words)
        del lines[0]
    found = "\n".join(line.removeprefix("error: ") for line in lines)
    assert found_code == code, found
    assert agree("\n".join(rest), found), found
    assert folder.files == before


@rows("runs")
def test_a_run_is_continued_only_as_what_it_is(folder: Folder, row: list[Any]):
    *steps, line = row
    found = "\n".join(folder.follow(steps)).removeprefix("error: ")
    assert agree(line, found), found


def test_a_good_scan_is_planned(folder: Folder):
    assert folder.run("plan toy.toml") == (0, [])


# docs/guide/troubleshooting.md quotes messages as they are: each is provoked and compared.

PAGE = (ROOT / "docs/guide/troubleshooting.md").read_text(encoding="utf-8")
ENTRY = re.compile(r"^### (.+?)\n+```text\n(.*?)```\n", re.MULTILINE | re.DOTALL)
MESSAGES = dict(ENTRY.findall(PAGE))


def test_every_message_of_the_page_is_provoked():
    assert sorted(MESSAGES) == sorted(row[0] for row in TABLE["rows"]["page"])
    assert PAGE.count("\n### ") == len(MESSAGES)


@rows("page")
def test_the_program_says_what_the_page_says(
    folder: Folder, row: list[Any], capsys: pytest.CaptureFixture[str]
):
    title, *steps = row
    if title == "GPU wanted" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    if isinstance(steps[0], str) and steps[0].startswith("raise "):
        with pytest.raises(SystemExit), ended_in_lines():
            exec(steps[0])
        said = capsys.readouterr().err.splitlines()
    else:
        said = folder.follow(steps)
    # The page may break a long message into lines.
    expected, found = (" ".join(text.split()) for text in (MESSAGES[title], " ".join(said)))
    assert agree(f"…{expected}…", found), found


# Python


@pytest.fixture(scope="module")
def opened_runs(shelf: Path) -> Iterator[Any]:
    with headcount.open(shelf / "RUNS") as runs:
        yield runs


@rows("python")
def test_a_call_is_refused(folder: Folder, loaded_model: Any, opened_runs: Any, row: list[str]):
    expression, line = row
    names = {"headcount": headcount, "Path": Path, "model": loaded_model, "runs": opened_runs}
    with pytest.raises(headcount.Error) as refused:
        eval(expression, names)
    found = str(refused.value).replace(str(folder.path), "TMP")
    assert agree(line, found), found
    assert not (folder.path / "runs").exists()


# Interventions


def refusal(text: str, n_ctx: int = 16) -> str:
    """What is said of an intervention; empty where nothing is wrong."""
    info = toy.toy_info(name="toy", n_layers=3, n_heads=4, d_model=32, d_head=8, n_ctx=64)
    try:
        bind(parse_intervention(text)).check(info, n_ctx)
    except ScanError as error:
        prefix, found, line = str(error).partition(f"interventions: '{parse_intervention(text)}': ")
        return line if found and not prefix else str(error)
    return ""


@rows("interventions")
def test_an_intervention_that_means_nothing_is_refused(row: list[Any]):
    text, line, *n_ctx = row
    assert agree(line, refusal(text, *n_ctx))


@rows("tokenizers")
def test_a_tokenizer_fits_its_model(row: list[Any]):
    size, d_vocab, line = row
    said = ""
    try:
        _check_size(Path("model"), {str(token): token for token in range(size)}, d_vocab)
    except ModelError as error:
        said = str(error)
    assert agree(line, said), said


# Names


@rows("names")
def test_a_run_has_a_name_that_every_system_takes(row: list[str]):
    name, safe = row
    fields = {"model": "m", "n_ctx": 8, "sequences": 2, "input": {"family": "uniform_random"}}
    run_id = parse_scan(fields).run_id(name)
    assert run_id.rpartition("-")[0] == safe == safe_name(safe)
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", run_id)
    assert len(f"run_id={run_id}-99") < 255
