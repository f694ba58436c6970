"""The documentation is what the code says, and what it tells people to do works."""

from __future__ import annotations

import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from headcount.exports.registry import export_formats
from headcount.queries.ask.named_queries import QUERIES, read_queries
from headcount.reproduce import literature_page
from headcount.schemas import formula_pages
from headcount.schemas.packages import PACKAGES
from headcount.schemas.scans.scan import Scan
from headcount.workers import intervention_and_input_pages
from tests import ROOT
from tests.pages import page_commands, reference_pages
from tests.tools.processes import Command

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)(?:#([\w-]+))?\)")
"""A link to a file of ours, and perhaps to a heading in it."""

FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
"""A block of code."""

COMMAND = re.compile(r"\s*headcount (corpus [a-z]+|reproduce texts|[a-z]+)\b([^#]*)")
"""A command of headcount at the beginning of a line of code, without a remark behind it."""

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")

STEPS_FOLLOWED = """
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headcount import app
from headcount.queries.open.connection import connect
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.scans.scan import parse_scan
from headcount.jobs.plan.plan import make_plan, prepare_run
from headcount.workers.replica import Replica
from headcount.workers.shard import run_shard

scan = parse_scan({
    "model": "bundled:attn-only-2l-mini", "n_ctx": 16, "sequences": 4, "out": "steps",
    "statistics": ["second_key_mass", "sink_mass"],
    "interventions": ["none", "zero_value_bias"], "input": {"family": "single_token", "token": 7},
})
plan = make_plan(scan, "followed")
prepare_run(plan, "")
run_shard(Replica(plan.info, scan), plan.run, plan.sequences.shard(0))
rows = connect(Path("steps")).execute(
    "SELECT intervention, layer, head, round(mean_second_key_mass, 4) FROM by_head ORDER BY ALL"
).fetchall()
changed = [row[1:] for row in rows if row[0] != "none"]
untouched = [row[1:] for row in rows if row[0] == "none"]
# Values change no pattern of the layer that reads them.
assert len(untouched) == 16 and changed[:8] == untouched[:8] and changed != untouched, rows
assert connect(Path("steps")).execute("SELECT count(*) FROM restless_sinks").fetchone() == (32,)

assert pytest.main(["-q", "--doctest-modules", "headcount/schemas/statistics/sink.py"]) == 0
arguments = ["reproduce", "copying.toml", "--json", "copying.json"]
result = CliRunner().invoke(app, arguments)
assert result.exit_code == 0, (result.output, result.exception)
"""


KIND_FOLLOWED = """
import runpy
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from headcount import app
from headcount.queries.open.connection import connect, view_descriptions
from headcount.schemas.files.run_directory import find_runs
from headcount.workers.replica import Replica
from headcount.workers.shard import run_shard
from headcount.jobs.plan.plan import make_plan, prepare_run
from headcount.schemas.scans.scan import load_scan


def headcount(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    # Cells of a table may be wrapped over lines, between bars.
    return " ".join(result.output.replace("│", " ").split())


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
assert [file.table for file in commit.files] == ["heads", "sequences", "layers"] * 2, commit.files
record = plan.run.manifest().kinds["layer_statistics"]["update_norm"]
assert record["meaning"].startswith("Mean length of what a layer adds"), record

query = "SELECT intervention, layer, sequence, update_norm FROM layers ORDER BY ALL"
rows = connect(plan.run.path).execute(query).fetchall()
assert len(rows) == 2 * 2 * 6, len(rows)
update_norms = []
def add_update_norm(layer, activations):
    if "resid_post" in activations:
        update = activations["resid_post"] - activations["resid_pre"]
        update_norms.append(update.norm(dim=-1).mean(-1))
shards = [plan.sequences.shard(shard).tokens for shard in range(3)]
tokens = torch.from_numpy(np.concatenate(shards)).long()
with torch.inference_mode():
    replica.engine.run(tokens, {}, add_update_norm, {"resid_pre", "resid_post"})
measured = [row[3] for row in rows if row[0] == "none"]
np.testing.assert_allclose(measured, torch.cat(update_norms).numpy(), rtol=1e-5)

headcount("compact", plan.run.path)
files = list(Path(plan.run.path).glob("layers/*/*.parquet"))
assert len(files) == 2 and all(file.name.startswith("merged-") for file in files), files
merged = pq.read_table(files[0], partitioning=None)
assert merged["layer"].to_pylist() == [0] * 6 + [1] * 6
assert merged["sequence"].to_pylist() == [*range(6)] * 2

connection = connect(plan.run.path)
assert connection.execute(query).fetchall() == rows
description = view_descriptions(connection)["layers"]
assert description.startswith("One row per run, intervention, sequence and layer: "), description
assert description.endswith("every layer statistic as it was measured."), description
comments = dict(connection.execute(
    "SELECT column_name, comment FROM duckdb_columns() "
    "WHERE table_name = 'layers' AND schema_name = 'main'"
).fetchall())
assert all(comments.values()), comments
assert comments["update_norm"].startswith("Mean length of what a layer adds"), comments
kinds = "SELECT kind, \\"table\\", unit, runs FROM formulas WHERE name = 'update_norm'"
assert connection.execute(kinds).fetchall() == [("layer statistic", "layers", "euclidean norm", 1)]

assert pytest.main(["-q", "--doctest-modules", "headcount/schemas/layer_statistics.py"]) == 0
runpy.run_module("headcount.schemas.formula_pages", run_name="__main__")
"""


def copy_project(folder: Path) -> None:
    """Copy the code of the project, for a test that changes it."""
    for package in (*PACKAGES, "headcount", "benchmarks", "tests", "docs"):
        # With its bytecode, which holds for the same sizes and times: a copy keeps both.
        shutil.copytree(ROOT / package, folder / package, symlinks=True)
    shutil.copy(ROOT / "conftest.py", folder)


def run_python(folder: Path, files: Sequence[str]) -> None:
    """Run files in a folder, where Python finds the copy of the project first.

    They do everything in one process, which is forked from one that has imported torch.
    """
    main = f"{__name__}.{main_of_a_copy.__name__}"
    finished = Command(*files, environment=os.environ, directory=folder, main=main).ended(300)
    assert finished.code == 0, finished.stdout + finished.stderr


def main_of_a_copy() -> None:
    """Forget our modules, then run some files with those of the copy in this directory."""
    ours = {path.stem for path in Path().iterdir() if path.suffix == ".py" or path.is_dir()}
    for name in list(sys.modules):
        if name.partition(".")[0] in ours:
            del sys.modules[name]
    sys.path.insert(0, str(Path.cwd()))
    for file in sys.argv[1:]:
        runpy.run_path(file)


def apply_diff(file: Path, diff: str) -> None:
    """Add the lines that a diff adds, each below the line that stands above it in the diff."""
    source = file.read_text(encoding="utf-8")
    for line_above, line in itertools.pairwise(diff.splitlines()):
        if line.startswith("+"):
            # The first character of a line of a diff is its sign.
            anchor = f"\n{line_above[1:]}\n"
            assert source.count(anchor) == 1, line_above
            source = source.replace(anchor, f"{anchor}{line[1:]}\n")
    file.write_text(source, encoding="utf-8")


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in which somebody has done all that adding.md says."""
    folder = tmp_path_factory.mktemp("followed")
    copy_project(folder)
    page_text = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
    add_kind_of_measurement(folder, page_text)
    follow_steps(folder, page_text)
    (folder / "kind_followed.py").write_text(KIND_FOLLOWED, encoding="utf-8")
    (folder / "steps_followed.py").write_text(STEPS_FOLLOWED, encoding="utf-8")
    run_python(folder, ["kind_followed.py", "steps_followed.py"])
    return folder


def add_kind_of_measurement(folder: Path, page_text: str) -> None:
    _, rest_of_page = page_text.split("## A kind of measurement\n")
    section, *_ = rest_of_page.split("\n## ")
    step = r"(?:Create|Add to) `(schemas/[\w/]+\.py)`[^\n]*:\n\n```\w+\n(.*?)```"
    blocks = dict(re.findall(step, section, flags=re.DOTALL))
    assert list(blocks) == ["schemas/layer_statistics.py", "schemas/scans/kinds.py"]
    new_file = folder / "schemas" / "layer_statistics.py"
    new_file.write_text(blocks["schemas/layer_statistics.py"], encoding="utf-8")
    apply_diff(folder / "schemas" / "scans" / "kinds.py", blocks["schemas/scans/kinds.py"])
    (in_index,) = re.findall(r"in `docs/index.md`:\n\n```diff\n(.*?)```", section, re.DOTALL)
    apply_diff(folder / "docs" / "index.md", in_index)


def follow_steps(folder: Path, page_text: str) -> None:
    steps = re.findall(r"Add to `([\w./]+)`:\n\n```\w+\n(.*?)```", page_text, flags=re.DOTALL)
    rooms = [path.split("/")[0] for path, _ in steps]
    assert rooms == [
        "schemas", "tests", "workers", "workers", "tests", "queries", "copying.toml"
    ]  # fmt: skip
    for path, addition in steps:
        with (folder / path).open("a", encoding="utf-8") as file:
            file.write(f"\n\n{addition}" if path.endswith(".py") else addition)


def test_following_adding_md_adds_a_kind_of_measurement_with_one_file_and_one_entry(
    followed: Path,
) -> None:
    new_page = (followed / "docs" / "layers.md").read_text(encoding="utf-8")
    assert new_page.startswith("# Layer statistics\n")
    assert "### update_norm\n\nMean length of what a layer adds to the residual stream." in new_page


def test_following_adding_md_adds_a_statistic_an_input_an_intervention_a_query_and_a_replication(
    followed: Path,
) -> None:
    results = json.loads((followed / "copying.json").read_text())
    verdicts = [(result["replication"], result["verdict"]) for result in results]
    assert verdicts == [("copying", "not comparable")] * 2 + [("copying", "pass")]


@pytest.mark.long
def test_whoever_followed_adding_md_passes_the_tests_that_look_for_what_is_new(
    followed: Path,
) -> None:
    shutil.copy(ROOT / "pyproject.toml", followed)
    names = (
        "workers/engine/test_reference",
        "schemas/test_kinds",
        "workers/engine/test_measure",
        "workers/inputs/test_inputs",
    )
    files = [f"tests/{name}.py" for name in names]
    files += ["tests/project/test_precision_page.py", "tests/project/test_docs.py"]
    # Of the reference and of the pages, what a new name can break.
    words = "registered or changes_something or facts_of_a_layer or zero_value_bias or index_lists"
    others = "test_kinds or test_measure or test_inputs or figures_cover"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, *files, "-k", f"{words} or {others}"],
        cwd=followed,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize(
    "name",
    [
        *formula_pages.PAGES,
        *intervention_and_input_pages.PAGES,
        *literature_page.PAGES,
    ],
)
def test_pages_are_what_the_registries_say(name: str) -> None:
    written_by = intervention_and_input_pages.PAGES | literature_page.PAGES
    expected = written_by[name]() if name in written_by else formula_pages.page(name)
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == expected, "run: make docs"


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_the_generated_parts_of_pages_are_what_the_code_says(name: str) -> None:
    page_text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert page_text == reference_pages.renewed(name), "run: make docs"


def test_the_pages_of_options_say_values_and_defaults_in_words() -> None:
    inputs = intervention_and_input_pages.inputs_page()
    assert '* `packing`: "document" or "concat", default "document". `document` makes' in inputs
    assert "* `high`: a whole number, 1 or more, may be left out. The id after" in inputs
    # One that has another default than most is explained again, the others are only named.
    assert "* `distinct`: true or false, default false\n* `low`, `high`\n" in inputs
    assert "* `low`, `high`, `distinct`\n" in inputs
    assert "* `rate`: a number. A probability, 0 to 1.\n" in inputs
    interventions = intervention_and_input_pages.interventions_page()
    assert "`scale`: `raw` or `layer_mean`, default `raw`" in interventions
    for page in (inputs, interventions):
        assert re.findall(r"Packing|Literal|\| None|unless told", page) == []


def options_by_command() -> dict[str, set[str]]:
    """The options of every command, with their long names."""
    # Every command has --help, which is none of its own parameters.
    return {
        name: {"--help"}.union(*(parameter.opts for parameter in command.params))
        for name, command in reference_pages.commands()
    }


def test_every_command_has_an_example() -> None:
    page_text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    examples, _ = page_text.split("## How a command ends")
    command_names = options_by_command()
    without_example = [name for name in command_names if f"\nheadcount {name} " not in examples]
    assert without_example == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_only_commands_and_options_that_exist(page: Path) -> None:
    known_options = options_by_command()
    page_text = page.read_text(encoding="utf-8")
    for line in code_lines(page_text):
        command = COMMAND.match(line)
        if command is None:
            continue
        command_name, arguments = command.groups()
        assert command_name in known_options, line
        allowed = known_options[command_name]
        if command_name == "query":
            # A named query adds its parameters.
            allowed |= {
                f"--{parameter.name.replace('_', '-')}"
                for query in read_queries(QUERIES).values()
                for parameter in query.parameters
            }
        elif command_name == "export":
            # A format adds its options.
            allowed |= {
                option.flag
                for export in export_formats().values()
                for option in export.options.values()
            }
        assert set(OPTION.findall(arguments)) <= allowed, line


def code_lines(page_text: str) -> Iterator[str]:
    """The lines of a page that are code, in blocks or between backticks."""
    # Prose begins lines with "headcount" too, so only code is looked at.
    in_block = False
    for line in page_text.splitlines():
        if line.startswith("```"):
            in_block = not in_block
        elif in_block or line.startswith("    "):
            yield line
        else:
            yield from re.findall(r"`([^`]+)`", line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    # An example may link to a page that it makes.
    page_text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for linked_path, anchor in LINK.findall(page_text):
        target = page.parent / linked_path
        assert target.exists(), f"{page.name}: {linked_path}"
        if anchor:
            assert anchor in anchors_of(target), f"{page.name}: {linked_path}#{anchor}"
    anchors_here = re.findall(r"\]\(#([\w-]+)\)", page_text)
    assert set(anchors_here) <= anchors_of(page)


def anchors_of(page: Path) -> set[str]:
    """The names under which GitHub links to the headings of a page."""
    page_text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", page_text, flags=re.MULTILINE)
    # GitHub drops punctuation before it joins the words by hyphens.
    plain_headings = [re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain_headings}


def test_the_index_lists_every_page() -> None:
    index_text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed_pages = {path for path, _ in LINK.findall(index_text)}
    page_names = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert page_names - listed_pages == {"index.md"}


def test_a_run_directory_is_as_how_it_works_draws_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    drawn_names = set(re.findall(r"^[├└]── (\w[\w.]*)", page_text, flags=re.MULTILINE))
    # This scan asks for every table, and a corpus has an index.
    (tmp_path / "drawn.toml").write_text(
        'model = "bundled:gpt2-mini"\nn_ctx = 8\nsequences = 2\nstatistics = ["sink_mass"]\n'
        'profiles = ["attention_by_lag"]\ncurves = ["attention_by_lag"]\n'
        'weight_statistics = ["query_bias_norm"]\n'
        'input = { family = "text", files = "bundled:LICENSE", packing = "concat" }\n'
    )
    monkeypatch.chdir(tmp_path)
    page_commands.run_headcount("headcount scan drawn.toml --replicas 0")
    (run_directory,) = Path("runs").glob("run_id=*")
    written_names = {path.name for path in run_directory.iterdir()} - {".lock"}
    # Only a shard that fails leaves a record in failures/, and only compaction writes roll-ups.
    assert written_names == drawn_names - {"failures", "rollups"}


def test_every_field_of_a_scan_says_what_it_means() -> None:
    assert [name for name, field in Scan.model_fields.items() if not field.description] == []


def test_the_changelog_names_the_version() -> None:
    version = re.search(
        r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE
    )
    assert version is not None
    assert f"## {version[1]}" in (ROOT / "CHANGELOG.md").read_text()
