"""Pages that a reader follows to the letter: every command runs and prints what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ROOT
from tests.pages.page_commands import (
    CommandBlock,
    FileToSave,
    follow,
    same_output,
    steps_of,
    whole_commands,
    with_outputs_of_today,
)


@pytest.mark.parametrize(
    "page_name",
    [
        "docs/tutorial.md",
        "README.md",
        # What these show of the code, tests of exports and of checkpoints test.
        pytest.param("docs/shrink-a-kv-cache.md", marks=pytest.mark.long),
        pytest.param("docs/quantise-a-kv-cache.md", marks=pytest.mark.long),
        pytest.param("docs/watch-a-training-run.md", marks=pytest.mark.long),
    ],
)
# What torch says to a Trainer where there is no GPU.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
def test_every_command_of_a_page_prints_what_the_page_says(page_name: str, tmp_path: Path) -> None:
    page = (ROOT / page_name).read_text(encoding="utf-8")
    # Later steps read the files and runs of earlier ones, so they share a folder and an order.
    names: dict[str, object] = {}
    for step in steps_of(page):
        printed = follow(step, tmp_path, names)
        if isinstance(step, CommandBlock) and step.output is not None:
            advice = f"python -m tests.pages.page_commands {page_name}"
            assert same_output(step.output, printed), f"{printed}\nif this is right: {advice}"


def test_the_tutorial_has_the_steps_that_it_promises() -> None:
    steps = steps_of((ROOT / "docs/tutorial.md").read_text(encoding="utf-8"))
    saved = [step.name for step in steps if isinstance(step, FileToSave)]
    assert saved == ["repeats.toml", "distinct.toml", "texts.csv", "texts.toml"]
    commands = " ".join(
        command for step in steps if isinstance(step, CommandBlock) for command in step.commands
    )
    for view in ("induction_heads", "sink_heads", "dormant_induction_heads", "effects"):
        assert f"FROM {view}" in commands
    assert "by_pile_set" in commands
    assert "headcount text" in commands


def test_a_quotation_goes_over_lines_and_comments_are_no_commands() -> None:
    block = "headcount query runs \"\nSELECT 'a'\"  # a view\n# only a comment\nheadcount list\n"
    assert list(whole_commands(block)) == [
        "headcount query runs \"\nSELECT 'a'\"  # a view",
        "headcount list",
    ]


def test_only_the_last_digit_of_a_decimal_number_may_differ() -> None:
    assert same_output("L1H5  0.98\n", "L1H5  0.97 \n")
    assert not same_output("L1H5  0.98\n", "L1H5  0.96\n")
    assert not same_output("rows  12\n", "rows  13\n")
    assert not same_output("L1H5\n", "L1H5\nL1H6\n")


def test_outputs_are_renewed_in_their_places(tmp_path: Path) -> None:
    page = (
        "Save as `a.txt`:\n\n```text\nfirst\n```\n\n"
        "```bash\ncat a.txt\n```\n\n```text\nan old and long line\n```\n\n"
        "```bash\necho second\n```\n\n```text\n```\n"
    )
    renewed = with_outputs_of_today(page, tmp_path)
    assert renewed == page.replace("an old and long line", "first").replace(
        "echo second\n```\n\n```text\n", "echo second\n```\n\n```text\nsecond\n"
    )
