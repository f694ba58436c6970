"""The documentation is what the code says, and what it tells people to do works."""

import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from docs import pages
from headcount.exports.formats import export_formats
from headcount.queries.open.named_queries import QUERIES, read_queries
from headcount.schemas.packages import PACKAGES
from headcount.schemas.scans.scan import Scan
from tests import ROOT
from tests.pages.page_commands import run_headcount
from tests.tools.processes import Command

DOCS = ROOT / "docs"
SHELVES = {name: sorted((DOCS / name).iterdir()) for name in ("guide", "reference", "internals")}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]

LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([\w-]+))?\)")
"""A link to a file of ours, to a heading in it, or to one of the same page."""

FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
"""A block of code."""

COMMAND = re.compile(r"\s*headcount (corpus [a-z]+|reproduce texts|[a-z]+(?:-[a-z]+)?)\b([^#]*)")
"""A command of headcount at the beginning of a line of code, without a remark behind it."""

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")

FOLLOWED = """
import runpy
from pathlib import Path

import pytest

from headcount.queries.ask.asking import open_runs
from tests.toys.commands import printed
from tests.toys.runs_here import measure_here


def run(**fields):
    sizes = {"n_ctx": 16, "sequences": 6, "sequences_per_shard": 2}
    return measure_here(fields | sizes | {"model": "bundled:attn-only-2l-mini"}, fields["out"])


run(
    out="steps", statistics=["second_key_mass", "sink_mass"],
    interventions=["none", "zero_value_bias"], input={"family": "single_token", "token": 7},
)
steps = open_runs("steps")
rows = steps.rows(
    "SELECT intervention, layer, head, round(mean_second_key_mass, 4) FROM by_head ORDER BY ALL"
)
changed = [row[1:] for row in rows if row[0] != "none"]
untouched = [row[1:] for row in rows if row[0] == "none"]
# Values change no pattern of the layer that reads them.
assert len(untouched) == 16 and changed[:8] == untouched[:8] and changed != untouched, rows
assert steps.rows("SELECT count(*) FROM restless_sinks") == [(32,)]
printed("reproduce", "copying.toml", "--json", "copying.json")

plan = run(
    out="layers", statistics=["sink_mass"], layer_statistics=["update_norm"],
    interventions=["none", "zero_query_bias"], input={"family": "uniform_random"},
)
query = "SELECT intervention, layer, sequence, update_norm FROM layers ORDER BY ALL"
rows = open_runs(plan.run.path).rows(query)
assert len(rows) == 2 * 2 * 6, len(rows)
printed("compact", plan.run.path)
assert len(list(Path(plan.run.path).glob("layers/*/merged-*.parquet"))) == 2
merged = open_runs(plan.run.path)
assert merged.rows(query) == rows
kinds = "SELECT kind, unit, runs FROM formulas WHERE name = 'update_norm'"
assert merged.rows(kinds) == [("layer statistic", "euclidean norm", 1)]

doctests = ["headcount/schemas/statistics/sink.py", "headcount/schemas/layer_statistics.py"]
assert pytest.main(["-q", "--doctest-modules", *doctests]) == 0
runpy.run_module("docs.pages", run_name="__main__", alter_sys=True)
"""


def copy_project(folder: Path) -> None:
    for package in (*PACKAGES, "headcount", "benchmarks", "tests", "docs"):
        # With its bytecode, which holds for the same sizes and times: a copy keeps both.
        shutil.copytree(ROOT / package, folder / package, symlinks=True)
    shutil.copy(ROOT / "conftest.py", folder)


def main_of_a_copy() -> None:
    """Forget our modules, then run FOLLOWED with those of the copy in this directory.

    So it is forked from a process that has imported torch.
    """
    ours = {path.stem for path in Path().iterdir() if path.suffix == ".py" or path.is_dir()}
    for name in list(sys.modules):
        if name.partition(".")[0] in ours:
            del sys.modules[name]
    sys.path.insert(0, str(Path.cwd()))
    exec(FOLLOWED, {})


def apply_diff(file: Path, diff: str) -> None:
    """Add the lines that a diff adds, each below or in place of the line above it in the diff."""
    source = file.read_text(encoding="utf-8")
    for line_above, line in itertools.pairwise(diff.splitlines()):
        if line.startswith("+"):
            # The first character of a line of a diff is its sign.
            anchor = f"\n{line_above[1:]}\n"
            assert source.count(anchor) == 1, line_above
            kept = "\n" if line_above.startswith("-") else anchor
            source = source.replace(anchor, f"{kept}{line[1:]}\n")
    file.write_text(source, encoding="utf-8")


STEP = re.compile(r"(?:Create|Add to) `([\w./]+)`:\n\n```(\w+)\n(.*?)```", re.DOTALL)


@pytest.mark.long
def test_following_adding_md_adds_what_it_says_and_the_tests_that_look_for_news_pass(
    tmp_path: Path,
) -> None:
    copy_project(tmp_path)
    steps = STEP.findall((DOCS / "internals" / "adding.md").read_text(encoding="utf-8"))
    assert len(steps) == 12
    for path, language, addition in steps:
        if language == "diff":
            apply_diff(tmp_path / path, addition)
        else:
            with (tmp_path / path).open("a", encoding="utf-8") as file:
                file.write(f"\n\n{addition}" if file.tell() else addition)
    main = f"{__name__}.{main_of_a_copy.__name__}"
    done = Command(environment=os.environ, directory=tmp_path, main=main).ended(300)
    assert done.code == 0, done.stdout + done.stderr
    new_page = (tmp_path / "docs" / "reference" / "layers.md").read_text(encoding="utf-8")
    assert new_page.startswith("# Layer statistics\n")
    assert "### update_norm\n\nMean length of what a layer adds to the residual stream." in new_page
    results = json.loads((tmp_path / "copying.json").read_text())
    assert [each["verdict"] for each in results] == ["not comparable"] * 2 + ["pass"]

    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    names = "workers/engine/test_reference schemas/test_scan workers/engine/test_measure "
    names += "workers/inputs/test_families project/test_docs"
    files = [f"tests/{name}.py" for name in names.split()]
    # Of the reference and of the pages, what a new name can break.
    words = "registered or changes_something or facts_of_a_layer or zero_value_bias or index_lists"
    words += " or of_one_kind or no_two_columns or pickled or test_measure or test_families"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", words]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("name", pages.PAGES)
def test_generated_pages_are_what_the_registries_say(name: str) -> None:
    page_text = (DOCS / "reference" / name).read_text(encoding="utf-8")
    assert page_text == pages.PAGES[name](page_text), "run: make docs"


@cache
def options_by_command() -> dict[str, set[str]]:
    """The options that a page may give to each command, with their long names."""
    # Every command has --help, which is none of its own parameters.
    options = {
        name: {"--help"}.union(*(parameter.opts for parameter in command.params))
        for name, command in pages.commands()
    }
    for query in read_queries(QUERIES).values():
        options["query"] |= {f"--{each.name.replace('_', '-')}" for each in query.parameters}
    for export in export_formats().values():
        options["export"] |= {option.flag for option in export.options.values()}
    return options


def test_every_command_has_an_example() -> None:
    page_text = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    examples, _ = page_text.split("## How a command ends")
    assert [name for name in options_by_command() if f"\nheadcount {name} " not in examples] == []


def test_pages_use_only_commands_and_options_that_exist() -> None:
    allowed = options_by_command()
    for page in PAGES:
        for line in code_lines(page.read_text(encoding="utf-8")):
            # A line of a shell may have several commands.
            for part in re.split(r" && |; (?:do )?", line):
                if command := COMMAND.match(part):
                    assert command[1] in allowed, f"{page.name}: {part}"
                    unknown = set(OPTION.findall(command[2])) - allowed[command[1]]
                    assert not unknown, f"{page.name}: {part}"


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


def test_links_between_pages_lead_somewhere() -> None:
    for page in (*PAGES, ROOT / "CHANGELOG.md"):
        # An example may link to a page that it makes.
        for path, anchor in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name}: {path}"
            assert not anchor or anchor in anchors_of(target), f"{page.name}: #{anchor}"


@cache
def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    # GitHub drops punctuation before it joins the words of a heading by hyphens.
    return {re.sub(r"[^\w\s-]", "", each.lower()).replace(" ", "-") for each in headings}


def test_the_index_lists_every_page_and_no_shelf_is_full() -> None:
    listed = {path for path, _ in LINK.findall((DOCS / "index.md").read_text(encoding="utf-8"))}
    for name, files in SHELVES.items():
        assert {f"{name}/{file.name}" for file in files if file.suffix == ".md"} <= listed
        assert len(files) <= 16, name


def test_a_run_directory_is_as_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page_text = (DOCS / "internals" / "runs.md").read_text(encoding="utf-8")
    drawn_names = set(re.findall(r"^[├└]── (\w[\w.]*)", page_text, flags=re.MULTILINE))
    # This scan asks for every table, and a corpus has an index.
    (tmp_path / "drawn.toml").write_text(
        'model = "bundled:gpt2-mini"\nn_ctx = 8\nsequences = 2\nstatistics = ["sink_mass"]\n'
        'profiles = ["attention_by_lag"]\ncurves = ["attention_by_lag"]\n'
        'weight_statistics = ["query_bias_norm"]\n'
        'input = { family = "text", files = "bundled:LICENSE", packing = "concat" }\n'
    )
    monkeypatch.chdir(tmp_path)
    run_headcount("headcount scan drawn.toml --replicas 0")
    (run_directory,) = Path("runs").glob("run_id=*")
    written_names = {path.name for path in run_directory.iterdir()} - {".lock"}
    # Only a shard that fails leaves a record in failures/, only compaction writes roll-ups, and a
    # plug-in would be tried first.
    assert written_names == drawn_names - {
        *("failures", "plugins", "queries", "rollups", "samples")
    }


def test_each_folder_of_the_house_says_what_it_is_for() -> None:
    page_text = (DOCS / "internals" / "how-it-works.md").read_text(encoding="utf-8")
    _, _, places = page_text.partition("## Where things are")
    folders = re.findall(r"^(\w+)/ ", places, re.MULTILINE)
    assert {"headcount", *PACKAGES} <= {*folders}
    assert [name for name in folders if not (ROOT / name / "README.md").is_file()] == []


def contributing() -> str:
    return (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_commands_of_contributing_exist() -> None:
    lines = "\n".join(code_lines(contributing()))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^make (\w+)", lines, re.MULTILINE))
    assert targets
    assert [name for name in targets if f"\n{name}:" not in makefile] == []
    modules = re.findall(r"\.venv/bin/python -m (\S+)", lines)
    assert {"pytest", "tests.pages.report_pictures"} <= {*modules}
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


@pytest.mark.long
def test_the_tests_that_contributing_names_run() -> None:
    commands = re.findall(r"^\.venv/bin/python (-m pytest [^#\n]+)", contributing(), re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        words = [sys.executable, *command.split()]
        ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout


def test_every_field_of_a_scan_says_what_it_means() -> None:
    assert [name for name, field in Scan.model_fields.items() if not field.description] == []
