"""The documentation is what the code says, and what it tells people to do works."""

from __future__ import annotations

import itertools
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


KIND_FOLLOWED = """
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from typer.testing import CliRunner

from headcount import app
from queries.connection import connect, view_descriptions
from schemas.run_directory import find_runs
from workers.replica import Replica
from workers.shard import run_shard
from jobs.plan import make_plan, prepare_run
from schemas.scan import load_scan


def headcount(*arguments):
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return " ".join(done.output.replace("│", " ").split())


Path("layers.toml").write_text(
    'model = "bundled:attn-only-2l-mini"\\nn_ctx = 16\\nsequences = 6\\nsequences_per_shard = 2\\n'
    'statistics = ["sink_mass"]\\nlayer_statistics = ["update_norm"]\\n'
    'interventions = ["none", "zero_query_bias"]\\ninput = { family = "uniform_random" }\\n'
)
printed = headcount("plan", "layers.toml")
assert "layer_statistics update_norm Columns of the layers" in printed, printed

plan = make_plan(load_scan(Path("layers.toml")), "layers")
prepare_run(plan, "")
replica = Replica(plan.info, plan.scan, "cpu")
for shard in range(plan.manifest.shards):
    commit = run_shard(replica, plan.run, plan.sequences.shard(shard))
assert [f.table for f in commit.files] == ["heads", "sequences", "layers"] * 2, commit.files
record = plan.run.manifest().kinds["layer_statistics"]["update_norm"]
assert record["meaning"].startswith("Mean length of what a layer adds"), record

ask = "SELECT intervention, layer, sequence, update_norm FROM layers ORDER BY ALL"
rows = connect(plan.run.path).execute(ask).fetchall()
assert len(rows) == 2 * 2 * 6, len(rows)
expected = []
def note(layer, seen):
    if "resid_post" in seen:
        expected.append((seen["resid_post"] - seen["resid_pre"]).norm(dim=-1).mean(-1))
tokens = torch.from_numpy(np.concatenate([plan.sequences.shard(s).tokens for s in range(3)])).long()
with torch.inference_mode():
    replica.engine.run(tokens, {}, note, {"resid_pre", "resid_post"})
found = [row[3] for row in rows if row[0] == "none"]
np.testing.assert_allclose(found, torch.cat(expected).numpy(), rtol=1e-5)

headcount("compact", plan.run.path)
files = list(Path(plan.run.path).glob("layers/*/*.parquet"))
assert len(files) == 2 and all(f.name.startswith("merged-") for f in files), files
merged = pq.read_table(files[0], partitioning=None)
assert merged["layer"].to_pylist() == [0] * 6 + [1] * 6
assert merged["sequence"].to_pylist() == [*range(6)] * 2

connection = connect(plan.run.path)
assert connection.execute(ask).fetchall() == rows
sentence = "One row per run, intervention, sequence and layer: every layer statistic as it was measured."
assert view_descriptions(connection)["layers"] == sentence
comments = dict(connection.execute(
    "SELECT column_name, comment FROM duckdb_columns() WHERE table_name = 'layers' AND schema_name = 'main'"
).fetchall())
assert all(comments.values()), comments
assert comments["update_norm"].startswith("Mean length of what a layer adds"), comments
kinds = "SELECT kind, \\"table\\", unit, runs FROM formulas WHERE name = 'update_norm'"
assert connection.execute(kinds).fetchall() == [("layer statistic", "layers", "euclidean norm", 1)]
"""


def copy_project(folder: Path) -> None:
    for package in ("schemas", "workers", "jobs", "queries", "reproduce", "models"):
        shutil.copytree(
            ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ("conftest.py", "headcount.py"):
        shutil.copy(ROOT / file, folder)


def run_python(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_following_adding_md_adds_a_kind_of_measurement_with_one_file_and_one_entry(
    tmp_path: Path,
) -> None:
    copy_project(tmp_path)
    text = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
    _, section = text.split("## A kind of measurement\n")
    section, *_ = section.split("\n## ")
    step = r"(?:Create|Add to) `(schemas/\w+\.py)`[^\n]*:\n\n```\w+\n(.*?)```"
    blocks = dict(re.findall(step, section, flags=re.DOTALL))
    assert list(blocks) == ["schemas/layer_statistics.py", "schemas/kinds.py"]
    new = tmp_path / "schemas" / "layer_statistics.py"
    new.write_text(blocks["schemas/layer_statistics.py"], encoding="utf-8")
    kinds = tmp_path / "schemas" / "kinds.py"
    text = kinds.read_text(encoding="utf-8")
    lines = blocks["schemas/kinds.py"].splitlines()
    for above, line in itertools.pairwise(lines):
        if line.startswith("+"):
            assert text.count(f"\n{above[1:]}\n") == 1, above
            text = text.replace(f"\n{above[1:]}\n", f"\n{above[1:]}\n{line[1:]}\n")
    kinds.write_text(text, encoding="utf-8")
    (tmp_path / "followed.py").write_text(KIND_FOLLOWED, encoding="utf-8")
    (tmp_path / "docs").mkdir()
    run_python(tmp_path, "followed.py")
    run_python(tmp_path, "-m", "pytest", "-q", "--doctest-modules", "schemas/layer_statistics.py")
    run_python(tmp_path, "-m", "schemas.formula_pages")
    page = (tmp_path / "docs" / "layers.md").read_text(encoding="utf-8")
    assert page.startswith("# Layer statistics\n")
    assert "### update_norm\n\nMean length of what a layer adds to the residual stream." in page


def test_following_adding_md_adds_a_statistic_an_input_an_intervention_a_query_and_a_system(
    tmp_path: Path,
) -> None:
    copy_project(tmp_path)
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
        run_python(tmp_path, *command)
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
    assert "* `high`: a whole number, 1 or more, may be left out\n" in inputs
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
