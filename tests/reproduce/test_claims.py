"""The claims of the sources: each is shown, covered or left out, and names what is there."""

import re
from pathlib import Path

import pytest

from docs import pages
from headcount.schemas.errors import ScanError
from tests.toys.toy_replications import REPLICATIONS


def problems(directory: Path = pages.CLAIMS) -> list[str]:
    """What claims name that is not there; one line each."""
    shown = {
        name: [value.full_name for value in each.published_values]
        + [claim.words for claim in each.claim]
        + [figure.title for figure in each.figure]
        for name, each in REPLICATIONS.items()
    }
    known_words = pages.known_words()
    lines: list[str] = []
    for file, source in pages.sources(directory).items():
        for claim in source.claim:
            where = f"{file}.toml: {claim.text[:60]!r}"
            for place in claim.shown_by:
                name, _, beginning = place.partition(": ")
                if name not in shown:
                    lines.append(f"{where}: there is no replication {name!r}")
                elif not any(each.startswith(beginning) for each in shown[name]):
                    lines.append(f"{where}: nothing in {name} begins with {beginning!r}")
            if claim.covered_by and not {*re.findall(r"\w+", claim.covered_by)} & known_words:
                lines.append(f"{where}: covered_by names no column, intervention, input or view")
    return lines


def test_every_claim_names_what_is_there() -> None:
    assert problems() == []


@pytest.mark.parametrize(("answer", "problem"), [
    ('shown_by = ["previous_token: L0H0, total"]', ""),
    ('left_out = "needs a training run"\nreason = "training"', ""),
    ('covered_by = "the mean of sink_mass"', ""),
    ('shown_by = ["previous_tokens: L0H0"]', "there is no replication 'previous_tokens'"),
    ('shown_by = ["previous_token: L9H0"]', "nothing in previous_token begins with 'L9H0'"),
    ('covered_by = "nothing of ours"', "names no column, intervention, input or view"),
    ("", "expected shown_by, covered_by or left_out"),
    ('left_out = "needs a training run"', "expected left_out and its reason"),
    ('shown_by = ["previous_token"]', "expected 'REPLICATION: beginning of a name'"),
])  # fmt: skip
def test_a_claim_of_what_is_not_there_or_without_an_answer_is_a_line(
    tmp_path: Path, answer: str, problem: str
) -> None:
    file = tmp_path / "own.toml"
    file.write_text(f'source = "s"\n[[claim]]\ntext = "It is so."\n{answer}\n')
    try:
        lines = problems(tmp_path)
        assert all(line.startswith("own.toml: 'It is so.'") for line in lines)
    except ScanError as error:
        lines = str(error).splitlines()
    assert len(lines) == (1 if problem else 0)
    assert all(problem in line for line in lines)
