"""kvpress reads our exports by its own classes, and loses less by them than by random ones.

`pytest -m long -s tests/kvpress` prints the table.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headcount.workers.model.info.bundled_models import BUNDLED
from tests import ROOT
from tests.toys.commands import printed

pytestmark = pytest.mark.long

ENVIRONMENT = ROOT / ".venv-kvpress"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
MODEL = "llama-mini"
TEXT = ["input.family=text", "input.files=bundled:LICENSE", "input.packing=concat", "sequences=16"]
OF_TEXT = [word for setting in TEXT for word in ("--set", setting)]
EXPORTS = {
    "duo": ("duo", ["--recent", "16", "--sparsity", "0.9375", "--set", "n_ctx=128"]),
    "expected-attention": ("expected-attention", OF_TEXT),
    "qfilters": (f"nthngdy/{MODEL}_qfilt", OF_TEXT),
}


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of an environment with kvpress, made anew when the requirements change."""
    python, made_of = ENVIRONMENT / "bin" / "python", ENVIRONMENT / REQUIREMENTS.name
    if made_of.exists() and made_of.read_bytes() == REQUIREMENTS.read_bytes():
        return python
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        pytest.skip("needs uv, which makes the environment of kvpress")
    find_links = os.environ.get("PIP_FIND_LINKS")
    settings = {"UV_FIND_LINKS": find_links} if find_links else {"UV_TORCH_BACKEND": "cpu"}
    install = ["pip", "install", "-q", "--python", python, "-r", REQUIREMENTS]
    for words in (["venv", "-q", "--clear", ENVIRONMENT], install):
        command = [uv, *words]
        made = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"the environment of kvpress cannot be made: {made.stderr.strip()}")
    shutil.copy(REQUIREMENTS, made_of)
    return python


@pytest.fixture(scope="module")
def rows(python: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Losses and recall behind every cut, by export and file."""
    directory = tmp_path_factory.mktemp("kvpress")
    for name, (folder, options) in EXPORTS.items():
        words = [directory / name, "--model", f"bundled:{MODEL}", *options]
        printed("export", name, *words, "-o", directory / "exports" / folder)
    page = ROOT / "docs" / "guide" / "caches.md"
    command = [python, Path(__file__).with_name("compare.py")]
    command += [BUNDLED[MODEL], directory / "exports", page]
    compared = subprocess.run(command, capture_output=True, text=True)
    assert compared.returncode == 0, compared.stderr
    # kvpress says above it where it found the weights.
    rows = json.loads(compared.stdout.splitlines()[-1])
    for row in rows:
        print(*(f"{value:.3f}" if isinstance(value, float) else value for value in row.values()))
    return rows


def named(rows: list[dict[str, Any]], export: str, name: str, column: str) -> list[float]:
    """A column of the rows of an export whose file begins with a name."""
    return [r[column] for r in rows if r["export"] == export and r["file"].startswith(name)]


def test_the_heads_of_duo_lose_nothing_and_random_ones_what_was_repeated(
    rows: list[dict[str, Any]],
) -> None:
    for column in ("loss_text", "loss_repeat", "recall"):
        assert named(rows, "duo", "ours", column) == pytest.approx(
            named(rows, "", "whole cache", column), rel=0.01
        )
    (loss,), (recall,) = (named(rows, "duo", "ours", name) for name in ("loss_repeat", "recall"))
    assert min(named(rows, "duo", "random", "loss_repeat")) > loss + 0.3
    assert max(named(rows, "duo", "random", "recall")) < 0.1 * recall


def test_moments_of_a_heads_own_queries_keep_what_text_needs(rows: list[dict[str, Any]]) -> None:
    (loss,) = named(rows, "expected-attention", "ours", "loss_text")
    others = named(rows, "expected-attention", "other heads", "loss_text")
    assert loss < min(others + named(rows, "", "random keys", "loss_text"))


def test_filters_are_read_from_the_folder_of_their_name(rows: list[dict[str, Any]]) -> None:
    """That they are the same is said where they are read; that they are better is not seen here."""
    assert len(named(rows, "qfilters", "", "loss_text")) == 6
