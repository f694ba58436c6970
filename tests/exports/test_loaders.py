"""What the pages load our exports with: every example reads a file that its command wrote."""

import contextlib
import io
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headcount.exports.formats import export_formats
from tests.toys.commands import printed

MODEL = "bundled:gpt2-mini"
LAYERS, HEADS, SEQUENCES = 3, 8, 4
SIZES = ["--model", MODEL, "--set", f"sequences={SEQUENCES}", "--set", "n_ctx=160"]
OF_A_RUN = ("card", "iceberg")
"""Formats of any finished run. The others first scan what they need."""

PRINTED = {
    "duo": r"\(3, 8\) 4 64",
    "expected-attention": r"\(3, 8, \d+\) \(3, 8, \d+, \d+\)",
    "fp8-kv-checkpoint": "attn_head",
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
    """`exports.md` is made of these examples."""
    (run,) = (home / "runs").glob("run_id=*")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(home / "cache"))
    format_ = export_formats()[name]
    assert format_.load
    where, example = (
        text.replace("run_id=…", run.name) for text in (format_.example, format_.load)
    )
    # The runs of the other formats are kept apart, so that the page's run is the only one here.
    runs = ["runs"] if name in OF_A_RUN else [f"runs-of-{name}", *SIZES]
    export(name, *runs, "-o", where)
    output = io.StringIO()
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(output):
        exec(example, names)
    if name == "card":
        assert len(names["heads"]) == SEQUENCES * LAYERS * HEADS
    else:
        assert re.fullmatch(f"{PRINTED[name]}\n", output.getvalue(), re.DOTALL), output.getvalue()
