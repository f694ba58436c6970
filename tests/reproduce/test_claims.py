"""The claims of the sources: each is shown, covered or left out, and names what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from headcount.reproduce import coverage
from headcount.schemas.errors import ScanError


def test_every_claim_names_what_is_there() -> None:
    assert coverage.problems() == []


def test_the_page_has_every_claim() -> None:
    page = coverage.coverage_page()
    for source in coverage.sources().values():
        assert f"## {source.seed}\n" in page
    rows = [line for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    headers = len(coverage.sources())
    claims = sum(len(source.claim) for source in coverage.sources().values())
    assert len(rows) - headers == claims


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ('shown_by = ["previous_token: L0H0, total"]', ""),
        ('left_out = "needs a training run"', ""),
        ('covered_by = "the mean of sink_mass"', ""),
        ('shown_by = ["previous_tokens: L0H0"]', "there is no system 'previous_tokens'"),
        ('shown_by = ["previous_token: L9H0"]', "has a name that begins with 'L9H0'"),
        ('covered_by = "nothing of ours"', "covered_by names no column, edit, input or view"),
    ],
)
def test_a_claim_that_names_what_is_not_there_is_a_line(
    tmp_path: Path, answer: str, problem: str
) -> None:
    file = tmp_path / "own.toml"
    file.write_text(f'seed = "s"\n[[claim]]\ntext = "It is so."\n{answer}\n')
    lines = coverage.problems(tmp_path)
    assert len(lines) == (1 if problem else 0)
    assert all(problem in line and line.startswith("own.toml: 'It is so.'") for line in lines)


def test_a_claim_without_an_answer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('seed = "s"\n[[claim]]\ntext = "It is so."\n')
    with pytest.raises(ScanError, match="expected shown_by, covered_by or left_out"):
        coverage.sources(tmp_path)
