"""The shape of the command line: panels, lists of names, the first scan file, the version."""

import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

import headcount
from headcount.commands import PANELS
from headcount.jobs.commands.catalogue import REGISTRIES, known_names
from headcount.schemas.statistics import STATISTICS
from headcount.workers.inputs import INPUTS
from headcount.workers.interventions import INTERVENTIONS
from headcount.workers.model.info.bundled_models import BUNDLED
from tests import ROOT
from tests.toys.commands import printed


def test_every_command_is_in_one_panel_and_help_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    in_panels = [name for names in PANELS.values() for name in names]
    assert sorted(in_panels) == sorted(get_command(headcount.app).commands)  # pyright: ignore
    help_text = printed("--help")
    assert [f"{panel}:" for panel in PANELS] == [
        line for line in help_text.splitlines() if line.strip(":") in PANELS
    ]
    pages = [help_text, *(printed(name, "--help") for name in in_panels)]
    assert {len(line) for page in pages for line in page.splitlines() if len(line) > 80} == set()
    assert "..." not in help_text.partition("Measure:")[2]


def test_the_first_command_of_reproduce_need_not_be_named() -> None:
    assert printed("reproduce", "--list") == printed("reproduce", "replications", "--list")
    assert "reproduce texts [OPTIONS]" in printed("reproduce", "texts", "--help")


def test_what_a_scan_can_name_is_listed_with_its_meaning() -> None:
    registries = (STATISTICS, INTERVENTIONS, INPUTS, [f"bundled:{name}" for name in BUNDLED])
    for word, registry in zip(REGISTRIES, registries, strict=True):
        # In a pipe, each is a line.
        lines = printed("list", word).splitlines()
        assert [line.split()[0] for line in lines] == list(registry)
        assert all(len(line.split()) > 2 and line.endswith(".") for line in lines)
    assert dict(known_names("statistics"))["sink_mass"].startswith("Mean attention to key 0")


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert headcount.__version__ == project["project"]["version"]
    assert f"## {headcount.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert printed("-V") == printed("--version")
    assert printed("-V").startswith(f"headcount {headcount.__version__}, code ")


def test_a_first_scan_file_runs_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert printed("init", "first.toml").splitlines()[1:] == [
        "  headcount scan first.toml",
        "  headcount query runs induction_heads",
    ]
    with headcount.scan("first.toml", quiet=True) as runs:
        (first, *_) = runs.sql("SELECT label, is_induction FROM induction_heads WHERE rank = 1")
    assert first == ("L1H2", True)
