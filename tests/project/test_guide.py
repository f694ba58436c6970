"""The guide is followed to the letter: everything in it runs and prints what its pages say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headcount.queries.ask.asking import open_runs
from headcount.queries.ask.named_queries import QUERIES, read_queries
from tests import ROOT
from tests.pages.page_commands import CommandBlock, follow_page, same_output

TUTORIAL = ROOT / "docs" / "guide" / "tutorial.md"
NAMED_QUERIES = ROOT / "docs" / "reference" / "queries.md"
PAGES = [ROOT / "README.md", *sorted(TUTORIAL.parent.glob("*.md")), NAMED_QUERIES]


def check(page: Path, folder: Path, begun: Path | None = None) -> None:
    for step, printed in follow_page(page, folder, begun):
        if isinstance(step, CommandBlock) and step.output is not None:
            advice = f"python -m tests.pages.page_commands {page.relative_to(ROOT)}"
            assert same_output(step.output, printed), f"{printed}\nif this is right: {advice}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of somebody who has followed the tutorial, where other pages continue."""
    folder = tmp_path_factory.mktemp("tutorial")
    check(TUTORIAL, folder)
    return folder


@pytest.mark.long
# What torch says to a Trainer where there is no GPU.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_prints_what_it_says(
    page: Path, home: Path, tmp_path: Path
) -> None:
    if page != TUTORIAL:
        check(page, tmp_path, home)
    if page == NAMED_QUERIES:
        database = open_runs(tmp_path / "examples")
        for name, query in read_queries(QUERIES).items():
            # These two compare runs on one family of input.
            is_empty = not database.rows(f"{query.call({})} LIMIT 1")
            assert is_empty == (name in ("run_changes", "seed_agreement")), name


def opened_blocks(page: Path) -> Iterator[tuple[str, str]]:
    """The line above each block of a page, and the language of the block."""
    lines = ["", *page.read_text(encoding="utf-8").splitlines()]
    fences = [number for number, line in enumerate(lines) if line.startswith("```")]
    for number in fences[::2]:
        yield lines[number - 1], lines[number].removeprefix("```")


def test_a_block_of_the_guide_that_is_not_run_says_what_it_needs() -> None:
    needs = "a cluster|a GPU|the network|money|another environment"
    excuse = re.compile(rf"<!-- not run: needs ({needs}) -->")
    for page in PAGES:
        for above, language in opened_blocks(page):
            # `py` is Python for another environment. SQL has tests of its own.
            assert language in ("bash", "python", "py", "text", "toml", "csv", "sql", "yaml"), page
            excused = excuse.fullmatch(above) is not None
            assert excused == above.startswith("<!-- not run"), f"{page.name}: {above}"
            assert excused or language != "py", f"{page.name}: {above}"
