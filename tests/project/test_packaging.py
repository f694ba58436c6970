"""The wheel holds all that a user needs, the declared dependencies are those that are imported, and
runs are read without what measures.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from headcount.jobs.cluster.ray_cluster import staged_code
from headcount.schemas.packages import PACKAGES
from tests import ROOT
from tests.project.test_imports import imports_of
from tests.tools.processes import DIES_WITH_ITS_PARENT, Ended, libraries_alone
from tests.toys.toy_runs import write_run

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
GROUPS = PYPROJECT["dependency-groups"]
TESTING = ("tests", "benchmarks", "docs/pages.py", "conftest.py")
MEASURING = ("torch", "ray", "transformers", "transformer_lens", "datasets", "tokenizers")
"""Libraries of the extra `scan` that reading a run must not need."""

BROUGHT_BY_TORCH = {"triton"}
"""Imported where it is there: torch's CUDA build brings the one that fits it."""


def test_one_list_names_the_packages() -> None:
    folders = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    assert folders == {*PACKAGES, "headcount", "tests", "benchmarks"}
    entries = {entry for entry in (ROOT / "headcount").iterdir() if entry.is_symlink()}
    links = {link.name: link.readlink() for link in entries}
    assert links == {package: Path("..") / package for package in PACKAGES}
    typed = set(PYPROJECT["tool"]["pyright"]["include"])
    assert typed == {"headcount/*.py", *PACKAGES, "benchmarks", "docs/pages.py", "tests"}


@pytest.mark.long
def test_the_code_that_a_cluster_is_sent_has_all_that_every_command_imports(tmp_path: Path) -> None:
    """On a machine of a cluster there are the libraries, and no copy of this project."""
    python = libraries_alone(tmp_path / "venv") / "bin" / "python"
    is_installed = "from importlib.util import find_spec; print(find_spec('headcount'))"
    assert run_in(tmp_path, python, "-c", is_installed) == "None\n"
    with staged_code() as code:
        assert run_in(code, python, "-c", EVERY_HELP).count("Usage: ") > 20


EVERY_HELP = """
import sys
from typer.main import get_command
import headcount, headcount.command_line

def ask_for_help(group, words):
    for name, command in group.commands.items():
        sys.argv = ["headcount", *words, name, "--help"]
        try:
            headcount.command_line.main()
        except SystemExit as end:
            assert not end.code, end
        if hasattr(command, "commands"):
            ask_for_help(command, [*words, name])

ask_for_help(get_command(headcount.app), [])
"""


# The wheel


def copy_of_project(source: Path) -> Path:
    """Copy what is packed: a build leaves a folder that the next one reads."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "headcount", source / "headcount", symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = copy_of_project(tmp_path_factory.mktemp("source"))
    target = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", target, source)
    (built,) = target.iterdir()
    return built


def pip(*words: str | Path) -> None:
    """Run pip without a network."""
    call = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    no_network = os.environ | {"PIP_NO_INDEX": "1"}
    done = subprocess.run([*call, *words], env=no_network, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_the_wheel_has_every_file_of_the_packages_but_training_scripts(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {
        file.relative_to(ROOT).as_posix()
        for folder in ("", *PACKAGES)
        for file in (ROOT / "headcount" / folder).glob("**/*" if folder else "*.py")
        if file.is_file() and "__pycache__" not in file.parts
    }
    left_out = re.compile(r"headcount/models/[^/]+/train\.py|headcount/[^/]+/README\.md")
    assert packed == {file for file in files if not left_out.fullmatch(file)}
    bundled = sum(file.stat().st_size for file in (ROOT / "models").rglob("*.safetensors"))
    assert wheel.stat().st_size < bundled + 1_000_000


@pytest.mark.long
def test_an_editable_install_is_found_from_the_folder_above_a_clone(tmp_path: Path) -> None:
    """The clone is a folder `headcount`, which Python would take for a package without code."""
    source = copy_of_project(tmp_path / "headcount")
    python = libraries_alone(tmp_path / "venv") / "bin" / "python"
    options = ("--ignore-installed", "--no-deps", "--no-build-isolation")
    pip("--python", python, "install", *options, "--editable", source)
    found = run_in(tmp_path, python, "-c", "import headcount; print(headcount.__file__)")
    assert found == f"{source / 'headcount' / '__init__.py'}\n"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel, and this environment's libraries behind it."""
    venv = libraries_alone(tmp_path_factory.mktemp("venv") / "venv")
    # pip sees this project through the libraries, and would take it for installed.
    options = ("--ignore-installed", "--no-deps", "--no-compile")
    pip("--python", venv / "bin" / "python", "install", *options, wheel)
    return venv


def run_in(directory: Path, *words: str | Path, said: str = "") -> str:
    """What a command prints in another directory, with no way back to this checkout.

    `said` is a pattern of all that it says on stderr: no library adds a warning to it.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["PYTHONWARNINGS"] = "default"
    done = subprocess.run(words, cwd=directory, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(said, done.stderr), done.stderr
    return done.stdout


SCANNED = (
    r"((?:starting\n|planning\n|preparing tokens: .*\n)*"
    r"\S+: [\d,]+ tokens, \d+ shards?, 0 of them done\n"
    r"(?:planning\n|loading the model\n|[\d,]+ of [\d,]+ tokens.*\n)*"
    r"[\d,]+ tokens in .*\n)"
)
"""What a scan says of one run, and what it does and how far it is, if it takes long."""


@pytest.mark.long
def test_the_wheel_works_in_an_empty_environment(installed: Path, tmp_path: Path) -> None:
    headcount = installed / "bin" / "headcount"
    (site,) = installed.glob("lib/python*/site-packages")
    demo = site / "headcount/jobs/scans/demo/attn-only-2l-mini-repeated.toml"
    (tmp_path / "licence.toml").write_text(
        'model = "bundled:gpt2-mini"\nn_ctx = 32\nsequences = 2\n'
        'input = { family = "text", files = "bundled:LICENSE", packing = "concat" }\n'
    )
    assert "A census of attention heads" in run_in(tmp_path, headcount, "--help")
    assert "headcount scan scan.toml" in run_in(tmp_path, headcount, "init")
    words = ["scan", demo, "licence.toml", "scan.toml", "--replicas", "0", "--set", "sequences=2"]
    run_in(tmp_path, headcount, *words, said=SCANNED * 3)
    (manifest, *_) = (tmp_path / "runs").glob("*/manifest.json")
    from headcount.workers.provenance.code_fingerprint import code_fingerprint

    assert json.loads(manifest.read_text())["code"] == code_fingerprint()
    query = (
        "SELECT model, count(*) AS n FROM heads JOIN runs USING (run_id) GROUP BY ALL ORDER BY 1"
    )
    answer = run_in(tmp_path, headcount, "query", "runs", query, "--format", "csv")
    assert answer.split() == [
        "model,n",
        f"bundled:attn-only-2l-mini,{2 * 2 * 8}",
        f"bundled:gpt2-mini,{2 * 2 * 3 * 8}",
    ]
    assert run_in(tmp_path, headcount, "report", "runs").startswith("report.html: ")
    assert (tmp_path / "report.html").stat().st_size > 50_000
    assert "sink_circuit" in run_in(tmp_path, headcount, "reproduce", "--list")


# What is declared


ELSEWHERE = {
    *(ROOT / "tests" / tool / "compare.py" for tool in ("kvpress", "vllm")),
    *(ROOT / "tests" / "engines").glob("*_losses.py"),
    *(ROOT / "benchmarks" / "real_models" / name for name in ("passkeys.py", "cache_rivals.py")),
}
"""What runs in environments of its own."""


def imported(paths: Sequence[Path]) -> dict[str, list[str]]:
    """The files that import a library when they run, by its top-level name."""
    found: dict[str, list[str]] = {}
    for path in paths:
        for name in {name.partition(".")[0] for name in imports_of(path, with_types=False)}:
            found.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    ours = {"headcount", "tests", "benchmarks", "docs", "conftest"}
    return {
        name: sorted(files)
        for name, files in found.items()
        if name not in ours | BROUGHT_BY_TORCH and name not in sys.stdlib_module_names
    }


def declared(*extras: str) -> set[str]:
    """Names of the distributions that the project asks for, with some of its extras and groups."""
    lines = [*PYPROJECT["project"]["dependencies"]]
    for extra in extras:
        lines += (EXTRAS | GROUPS)[extra]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def python_files(*names: str) -> list[Path]:
    files: list[Path] = []
    for name in names:
        path = ROOT / name
        files += [path] if path.is_file() else sorted({*path.rglob("*.py")} - ELSEWHERE)
    return files


USERS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("headcount/__init__.py", "headcount/commands.py", "schemas", "queries"), ("notebook",)),
    (("workers", "jobs", "reproduce", "models"), ("scan", "gguf")),
    (("exports",), ("export",)),
    (TESTING, ("scan", "dev")),
]
"""What needs which extras and groups."""


@pytest.mark.long
def test_what_is_imported_is_declared_once_and_what_is_declared_is_imported() -> None:
    distributions = packages_distributions()
    used: set[str] = set()
    for folders, extras in USERS:
        available = declared(*extras)
        for library, files in imported(python_files(*folders)).items():
            names = {canonicalize_name(name) for name in distributions[library]}
            assert names & available, (library, files)
            used |= names
    tools = {
        "ruff", "pyright", "pytest-timeout", "pytest-xdist", "setuptools", "triton", "ipykernel",
    }  # fmt: skip
    assert declared("scan", "dev") - used == tools
    base, scan = declared(), declared("scan") - declared()
    assert base & {canonicalize_name(name) for name in MEASURING} == set()
    assert len(scan) == len(EXTRAS["scan"])


# Reading without what measures

HIDDEN = f"""
import contextlib, io, json, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {MEASURING!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""
"""The beginning of a program that cannot import what measures."""

COMMANDS = """
import headcount, headcount.command_line

def refusal(name):
    try:
        eval(f"headcount.{name}")
    except ModuleNotFoundError as error:
        return str(error)

def ended(words):
    sys.argv = ["headcount", *words]
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            headcount.command_line.main()
        except SystemExit as stop:
            code = stop.code or 0
    return code, stdout.getvalue(), stderr.getvalue()

reading, refused = json.loads(sys.argv[1])
read = [*map(ended, reading)]
has_pandas = "pandas" in sys.modules
with headcount.open("runs") as runs:
    answer = runs.sql("SELECT count(*) FROM heads").rows()
refusals = [*map(refusal, ("measure", "MeasureCallback", "scan({})"))]
json.dump([answer, refusals, has_pandas, *read, *map(ended, refused)], sys.stdout)
"""


RUN = "runs/run_id=small"
FEW = [["query", "runs", "SELECT count(*) FROM heads"], ["status", RUN], ["list", "statistics"]]
FEW += [["report", "runs", "--no-text"], ["views", "runs", "-o", "head.duckdb"]]
MORE = [["scan", "--help"], ["list", "runs"], ["query", "runs"], ["report", "runs"]]
MORE += [["list", "models"], ["list", "inputs"], ["compact", "runs"]]


@pytest.mark.parametrize("commands", [FEW, pytest.param(MORE, marks=pytest.mark.long)])
def test_runs_are_read_without_torch_ray_and_pandas_and_measuring_names_the_extra(
    tmp_path: Path, commands: list[list[str]]
) -> None:
    write_run(tmp_path / "runs", "small", {"sink_mass": lambda row: row.head / 4})
    (tmp_path / "toy.toml").write_text(
        'model = "bundled:gpt2-mini"\nn_ctx = 8\nsequences = 2\ninput.family = "uniform_random"\n'
    )
    (tmp_path / "wrong.toml").write_text("n_ctx = 0\n")
    # A scan that is wrong is refused before any other runs, and by a process that lacks torch.
    refused = [["scan", "toy.toml"], ["plan", "toy.toml"], ["scan", "toy.toml", "wrong.toml"]]
    words = [*DIES_WITH_ITS_PARENT, sys.executable, "-c", HIDDEN + COMMANDS]
    words.append(json.dumps([commands, refused]))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer, refusals, has_pandas, *each_ended = json.loads(done.stdout)
    assert (answer, has_pandas) == ([[24]], False)
    assert ["pip install -e '.[scan]'" in line for line in refusals] == [True] * 3
    ended = [Ended(*each) for each in each_ended]
    for command, read in zip(commands, ended, strict=False):
        assert read.code == 0, (command, read.stderr)
        assert read.stdout, command
    *measured, wrong = ended[len(commands) :]
    for each in measured:
        assert each.code == 2
        (line,) = each.stderr.splitlines()
        assert re.match(r"error: \w+ is not installed", line)
        assert "pip install -e '.[scan]'" in line
    assert (wrong.code, "wrong.toml: n_ctx: expected 1 or more, got 0\n" in wrong.stderr) == (
        2,
        True,
    )
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run_id=small"]


OLDER = ("python3.8", "python3.9", "python3.10")


@pytest.mark.long
def test_an_older_python_is_one_line() -> None:
    found = [path for name in OLDER if (path := shutil.which(name)) is not None]
    # A shim of a version that is not chosen ends with an error.
    pythons = [
        file for file in found if not subprocess.run([file, "-V"], capture_output=True).returncode
    ]
    if not pythons:
        pytest.skip("there is no Python here that is too old")
    for python in pythons:
        command = [python, "-m", "headcount", "list"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        expected = r"error: headcount needs Python 3\.11 or newer, and this is 3\.\d+\.\d+\n"
        assert re.fullmatch(expected, done.stderr), done.stderr
        assert (done.returncode, done.stdout) == (2, "")
