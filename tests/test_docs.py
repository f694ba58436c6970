"""The documentation is what the code says, and what it tells people to do works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headcount import app
from reproduce import systems_page
from schemas import formula_pages
from schemas.scan import Scan
from workers import edit_and_input_pages

ROOT = Path(__file__).parent.parent

FOLLOWED = """
from pathlib import Path
from queries.connection import connect
from schemas.run_directory import RunDirectory
from schemas.scan import parse_scan
from jobs.plan import make_plan, prepare_run
from workers.replica import Replica
from workers.shard import run_shard

scan = parse_scan({
    "model": "bundled:attn-only-2l-mini", "n_ctx": 16, "sequences": 4, "out": "runs",
    "interventions": ["none", "zero_key_bias"], "input": {"family": "single_token", "token": 7},
})
plan = make_plan(scan, "followed")
prepare_run(plan, "")
run_shard(Replica(plan.info, scan), plan.run, plan.sequences.shard(0))
rows = connect(Path("runs")).execute(
    "SELECT intervention, layer, head, round(mean_second_key_mass, 4) FROM by_head ORDER BY ALL"
).fetchall()
edited, untouched = [r[1:] for r in rows if r[0] != "none"], [r[1:] for r in rows if r[0] == "none"]
assert len(untouched) == 16 and edited == untouched, rows
assert connect(Path("runs")).execute("SELECT count(*) FROM restless_sinks").fetchone() == (32,)
"""


def test_following_adding_md_adds_a_statistic_an_input_an_intervention_a_query_and_a_system(
    tmp_path: Path,
) -> None:
    for package in ("schemas", "workers", "jobs", "queries", "reproduce", "models"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ("conftest.py", "headcount.py"):
        shutil.copy(ROOT / file, tmp_path)
    text = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
    steps = re.findall(r"Add to `([\w./]+)`:\n\n```\w+\n(.*?)```", text, flags=re.DOTALL)
    assert [path.split("/")[0] for path, _ in steps] == [
        "schemas",
        "workers",
        "workers",
        "queries",
        "copying.toml",
    ]
    for path, addition in steps:
        with (tmp_path / path).open("a", encoding="utf-8") as added:
            added.write(f"\n\n{addition}" if path.endswith(".py") else addition)
    (tmp_path / "followed.py").write_text(FOLLOWED)
    doctest = ["-m", "pytest", "-q", "--doctest-modules", "schemas/statistics/sink.py"]
    for command in (
        ["followed.py"],
        doctest,
        ["-m", "headcount", "reproduce", "copying.toml", "--json", "copying.json"],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    verdicts = [
        (found["system"], found["verdict"])
        for found in json.loads((tmp_path / "copying.json").read_text())
    ]
    assert verdicts == [("copying", "not comparable")] * 2 + [("copying", "pass")]


@pytest.mark.parametrize(
    "name", [*formula_pages.PAGES, *edit_and_input_pages.PAGES, *systems_page.PAGES]
)
def test_pages_are_what_the_registries_say(name: str) -> None:
    made = edit_and_input_pages.PAGES | systems_page.PAGES
    expected = made[name]() if name in made else formula_pages.page(name)
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == expected, "run: make docs"


def test_the_pages_of_options_say_values_and_defaults_in_words() -> None:
    inputs = edit_and_input_pages.inputs_page()
    assert '* `packing`: "document" or "concat", default "document"\n' in inputs
    assert "* `high`: a whole number, may be left out\n" in inputs
    assert "* `rate`: a number. A probability, 0 to 1.\n" in inputs
    edits = edit_and_input_pages.interventions_page()
    assert "`scale`: `raw` or `layer_mean`, default `raw`" in edits
    for page in (inputs, edits):
        assert re.findall(r"Packing|Literal|\| None|unless told", page) == []


def test_the_readme_names_every_command_and_every_field_of_a_scan() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(
        r"^  (\w+) ",
        CliRunner().invoke(app, ["--help"]).output.split("Commands:")[1],
        flags=re.MULTILINE,
    )
    assert len(commands) >= 5
    assert [c for c in commands if f"headcount {c}" not in readme] == []
    assert [field for field in Scan.model_fields if f"`{field}`" not in readme] == []


def test_every_field_of_a_scan_says_what_it_means() -> None:
    assert [name for name, field in Scan.model_fields.items() if not field.description] == []


def test_the_changelog_names_the_version() -> None:
    version = re.search(
        r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE
    )
    assert version is not None
    assert f"## {version[1]}" in (ROOT / "CHANGELOG.md").read_text()
