"""docs/troubleshooting.md quotes messages as they are: each is provoked and compared."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import headcount.command_line
from headcount.jobs.endings import lines_of
from tests import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")

ENTRY = re.compile(
    r"^### (?P<title>.+?)\n+```text\n(?P<message>.*?)```\n", re.MULTILINE | re.DOTALL
)

MESSAGES = {match["title"]: match["message"] for match in ENTRY.finditer(PAGE)}
"""The message that the page quotes under each title; `…` stands for anything."""

SCAN = """\
model = "bundled:gpt2-mini"
n_ctx = 8
sequences = 2
statistics = ["sink_mass"]
input = { family = "uniform_random" }
"""

TEXT_SCAN = """\
model = "bundled:gpt2-mini"
n_ctx = 8
sequences = 2
statistics = ["sink_mass"]
input = { family = "pile", files = "texts/*.jsonl" }
"""

Headcount = Callable[..., str]


@pytest.fixture
def run_headcount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Headcount:
    """Runs `headcount …` in a folder with two scans; what it says on stderr."""
    monkeypatch.chdir(tmp_path)
    # The trace of an unforeseen error is kept where temporary files lie.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Path("texts.toml").write_text(SCAN)
    Path("corpus.toml").write_text(TEXT_SCAN)
    Path("texts").mkdir()
    Path("texts/a.jsonl").write_text('{"text": "a first text"}\n{"text": "a second text"}\n')

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["headcount", *arguments])
        with pytest.raises(SystemExit):
            headcount.command_line.main()
        return capsys.readouterr().err

    return run


def scanned_run(run_headcount: Headcount, scan: str = "texts.toml") -> Path:
    """The directory of a run that is complete."""
    run_headcount("scan", scan, "--replicas", "0")
    (run_directory,) = Path("runs").glob(f"run_id={scan.removesuffix('.toml')}-*")
    return run_directory


# Each of these brings about one message.


def unknown_key(run_headcount: Headcount) -> str:
    Path("texts.toml").write_text(SCAN.replace("sequences", "sequnces"))
    return run_headcount("plan", "texts.toml")


def missing_field(run_headcount: Headcount) -> str:
    Path("texts.toml").write_text(SCAN.replace("n_ctx = 8\n", ""))
    return run_headcount("plan", "texts.toml")


def bad_override(run_headcount: Headcount) -> str:
    return run_headcount("plan", "texts.toml", "--set", "statistics=[entropy]")


def unknown_model(run_headcount: Headcount) -> str:
    return run_headcount("plan", "texts.toml", "--set", "model=somebody/some-model")


def too_long_sequences(run_headcount: Headcount) -> str:
    return run_headcount("plan", "texts.toml", "--set", "n_ctx=512")


def no_tokenizer(run_headcount: Headcount) -> str:
    return run_headcount("plan", "corpus.toml", "--set", "model=bundled:attn-only-2l-mini")


def no_file(run_headcount: Headcount) -> str:
    return run_headcount("plan", "corpus.toml", "--set", "input.files=text/*.jsonl")


def small_corpus(run_headcount: Headcount) -> str:
    return run_headcount("plan", "corpus.toml", "--set", "sequences=100")


def bad_documents(run_headcount: Headcount) -> str:
    with Path("texts/a.jsonl").open("a") as file:
        file.write('{"text": "cut off\n')
    return run_headcount("plan", "corpus.toml", "--set", "sequences=all")


def no_gpu(run_headcount: Headcount) -> str:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    return run_headcount("scan", "texts.toml", "--device", "cuda", "--replicas", "0")


def missing_library(run_headcount: Headcount) -> str:
    # Every library is installed where tests run, so the error is made here.
    (line,) = lines_of(ModuleNotFoundError("No module named 'torch'", name="torch"))
    return f"error: {line}"


def memory(run_headcount: Headcount) -> str:
    (line,) = lines_of(MemoryError())
    return f"error: {line}"


def unforeseen_error(run_headcount: Headcount) -> str:
    (line,) = lines_of(ZeroDivisionError("division by zero"))
    return f"error: {line}"


def busy_run(run_headcount: Headcount) -> str:
    run_directory = scanned_run(run_headcount)
    # This is the lock that a scan holds as long as it is at work.
    with FileLock(run_directory / ".lock"):
        return run_headcount("scan", "texts.toml", "--replicas", "0", "--set", "sequences=4")


def changed_corpus(run_headcount: Headcount) -> str:
    scanned_run(run_headcount, "corpus.toml")
    Path("texts/a.jsonl").write_text('{"text": "a first word"}\n{"text": "a second word"}\n')
    return run_headcount("scan", "corpus.toml", "--replicas", "0")


def other_code(run_headcount: Headcount) -> str:
    run_directory = scanned_run(run_headcount)
    manifest_file = run_directory / "manifest.json"
    manifest_text = manifest_file.read_text()
    # As if the run was begun by other code: the manifest has its fingerprint.
    other_manifest = re.sub(r'"code": ?"\w+"', '"code": "0123456789ab"', manifest_text, count=1)
    assert other_manifest != manifest_text
    manifest_file.write_text(other_manifest)
    return run_headcount("scan", "texts.toml", "--replicas", "0", "--set", "sequences=4")


def no_run(run_headcount: Headcount) -> str:
    return run_headcount("query", "run")


def unknown_view(run_headcount: Headcount) -> str:
    scanned_run(run_headcount)
    return run_headcount("query", "runs", "sink_head")


def unmeasured_column(run_headcount: Headcount) -> str:
    scanned_run(run_headcount)
    return run_headcount("query", "runs", "SELECT label, entropy FROM heads")


def unmeasured_view(run_headcount: Headcount) -> str:
    scanned_run(run_headcount)
    return run_headcount("query", "runs", "induction_heads")


def damaged_file(run_headcount: Headcount) -> str:
    run_directory = scanned_run(run_headcount)
    (data_file,) = run_directory.glob("heads/*/*.parquet")
    data_file.write_bytes(data_file.read_bytes()[:-9])
    return run_headcount("query", "runs", "SELECT 1")


def lost_model(run_headcount: Headcount) -> str:
    shutil.copytree(headcount.bundled["gpt2-mini"], "my-model")
    run_headcount("scan", "texts.toml", "--replicas", "0", "--set", "model=./my-model")
    shutil.move("my-model", "moved")
    (run_directory,) = Path("runs").glob("run_id=texts-*")
    return run_headcount("text", str(run_directory), "0")


def nobody_to_ask(run_headcount: Headcount) -> str:
    run_directory = scanned_run(run_headcount)
    # Tests have no terminal on stdin, so there is nobody to ask.
    return run_headcount("rm", str(run_directory))


PROVOCATIONS: dict[str, Callable[[Headcount], str]] = {
    "unknown key": unknown_key,
    "missing; expected": missing_field,
    "not a TOML value": bad_override,
    "neither a directory, nor bundled:NAME, nor to be had from the Hub": unknown_model,
    "is beyond the positions": too_long_sequences,
    "no tokenizer files": no_tokenizer,
    "no file matches": no_file,
    "the corpus holds … sequences": small_corpus,
    "documents are bad": bad_documents,
    "GPU wanted": no_gpu,
    "is not installed": missing_library,
    "memory of this machine ran out": memory,
    "this is a mistake in headcount": unforeseen_error,
    "another process is at work on this run": busy_run,
    "the corpus has changed since the run was begun": changed_corpus,
    "begun with code": other_code,
    "is left out of every view": damaged_file,
    "nobody can be asked here whether to delete": nobody_to_ask,
    "no run here": no_run,
    "unknown view": unknown_view,
    "was not measured in these runs": unmeasured_column,
    "cannot be answered from these runs": unmeasured_view,
    "token numbers are shown": lost_model,
}
"""How to bring about each message, by its title on the page."""


def test_the_page_and_this_file_have_the_same_messages() -> None:
    assert list(MESSAGES) == list(PROVOCATIONS)
    assert PAGE.count("\n### ") == len(MESSAGES)


@pytest.mark.parametrize("title", PROVOCATIONS)
def test_the_program_says_what_the_page_says(title: str, run_headcount: Headcount) -> None:
    printed = PROVOCATIONS[title](run_headcount)
    # The page may break a long message into lines.
    printed_words = " ".join(printed.split())
    expected_words = " ".join(MESSAGES[title].split())
    expected_pattern = re.escape(expected_words).replace("…", ".*")
    assert re.search(expected_pattern, printed_words), f"{title}: {printed}"
