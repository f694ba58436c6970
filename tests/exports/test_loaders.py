"""What the pages load our exports with: every example reads a file that its command wrote.

The examples of other pages: those of files.md run in `test_open_files`; the Python of guide
runs in `test_guide`. One block stays, that for kvpress, which no environment of ours can have: here
it reads its folder through a press that stands in for kvpress's.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headcount.exports.registry import export_formats
from tests import ROOT
from tests.toys.commands import printed

DOCS = ROOT / "docs" / "reference"
MODEL = "bundled:gpt2-mini"
LAYERS, HEADS, SEQUENCES = 3, 8, 4
SIZES = ["--model", MODEL, "--set", f"sequences={SEQUENCES}", "--set", "n_ctx=160"]
OF_A_RUN = ("card", "iceberg")
"""Formats of any finished run. The others first scan what they need."""

PRINTED = {
    "duo": r"\(3, 8\) 4 64",
    "expected-attention": r"\(3, 8, \d+\) \(3, 8, \d+, \d+\)",
    "fp8-kv-scales": r"\[0\.0[^\]]+\]",
    "headkv": r"\d-\d",
    "iceberg": str(SEQUENCES * HEADS),
    "important-heads": r"\[\[\d, \d\].*\]",
    "minference": r"\['vertical_and_slash', \d+, \d+, [01]\.\d+\]",
    "qfilters": r"\(3, 8, \d+\)",
    "qrhead": r"\['\d-\d'.*\]",
    "razor": r"\[\[\d, \d\].*\] 4 4000",
    "retrieval-heads": r"[01]\.\d+",
}
"""What the example of a format prints. That of the card leaves rows behind."""


def python_blocks(page_name: str, fence: str = "python") -> list[str]:
    page = (DOCS / page_name).read_text(encoding="utf-8")
    return re.findall(rf"^```{fence}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


export = partial(printed, "export")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory to work in, with a finished run in `runs`."""
    directory = tmp_path_factory.mktemp("loaders")
    with contextlib.chdir(directory):
        export("razor", "runs", *SIZES, "-o", "of-the-run.json")
        yield directory


@pytest.mark.long
@pytest.mark.parametrize("name", export_formats())
def test_the_example_of_a_format_loads_what_its_command_wrote(
    name: str, home: Path, monkeypatch: pytest.MonkeyPatch
):
    page = (DOCS / "exports.md").read_text(encoding="utf-8")
    section = page[page.index(f"\n## {name}\n") :]
    blocks = r"```bash\nheadcount ([^\n]+)\n```\n\n```python\n(.*?)```"
    match = re.search(blocks, section, re.DOTALL)
    assert match
    command, example = match.groups()
    (run,) = (home / "runs").glob("run_id=*")
    assert export_formats()[name].load == example
    monkeypatch.setenv("HF_DATASETS_CACHE", str(home / "cache"))
    # The runs of the other formats are kept apart, so that the page's run is the only one here.
    runs = ["runs"] if name in OF_A_RUN else [f"runs-of-{name}", *SIZES]
    _, named, _, *rest = command.replace("run_id=…", run.name).split()
    export(named, *runs, *rest)
    printed = io.StringIO()
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(printed):
        exec(example.replace("run_id=…", run.name), names)
    if name == "card":
        assert len(names["heads"]) == SEQUENCES * LAYERS * HEADS
    else:
        assert re.fullmatch(f"{PRINTED[name]}\n", printed.getvalue(), re.DOTALL), printed.getvalue()


@dataclass
class Press:
    """kvpress's press, as far as the example of the page needs it."""

    head_compression_ratio: float = 0.0

    @contextlib.contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        model.read = self.load_attention_pattern(model)
        yield

    def load_attention_pattern(self, model: Any) -> Any:
        raise AssertionError(f"the example reads the pattern of {model} itself")


@pytest.mark.long
def test_the_example_for_kvpress_reads_the_folder(home: Path, monkeypatch: pytest.MonkeyPatch):
    (example,) = python_blocks("../guide/caches.md", "py")
    (folder,) = re.findall(r'folder="([^"]+)"', example)
    cut = ("--recent", "16", "--sparsity", "0.75", "--replace")
    export("duo", "runs-of-kvpress", *SIZES, *cut, "-o", folder)
    kvpress = ModuleType("kvpress")
    monkeypatch.setattr(kvpress, "DuoAttentionPress", Press, raising=False)
    monkeypatch.setitem(sys.modules, "kvpress", kvpress)
    # What takes tokens, and remembers what the press read.
    model: Any = type("Model", (), {"__call__": lambda self, tokens: None})()
    code = compile(example, "example", "exec", dont_inherit=True)
    exec(code, {"model": model, "tokens": None})
    sink, recent, scores = model.read
    assert (sink, recent, scores.shape) == (4, 16, (LAYERS, HEADS))
    assert scores.sum() == LAYERS * HEADS / 4


def test_no_example_of_these_pages_is_left_out():
    assert len(python_blocks("exports.md")) == len(export_formats()) == len(PRINTED) + 1
    assert len(python_blocks("../guide/caches.md", "py")) == 1
