"""Every format through the installed command, in a process of its own: what another process has
imported hides nothing here, and pandas need not be installed.
"""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headcount.exports.formats import export_formats
from tests import ROOT
from tests.tools.processes import Command

MODEL = "bundled:needle-mini"
SIZES = ("--set", "n_ctx=48", "--set", "sequences=8")

OPTIONS = {
    "duo": ("--recent", "5"),
    "razor": ("--recent", "5", "--compression", "12"),
    "important-heads": ("--deviations", "0"),
}
"""Options with which short sequences will do."""

CHECKED = [name for name, export in export_formats().items() if export.streamed_keys is not None]

MAIN = "from headcount.command_line import main; main()"


@pytest.fixture(scope="module")
def without_pandas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python whose libraries are those that are here, but for pandas."""
    site = tmp_path_factory.mktemp("site")
    for directory in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(directory).iterdir():
            if not path.name.startswith("pandas") and not (site / path.name).exists():
                (site / path.name).symlink_to(path)
    return {**os.environ, "PYTHONPATH": f"{site}:{ROOT}"}


def headcount(
    *words: str, directory: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the installed command; with an environment, a Python that has only its libraries."""
    command = [str(Path(sys.executable).parent / "headcount")]
    if environment is not None:
        # Without `site`, Python reads no .pth file, and its own libraries are not there.
        command = [sys.executable, "-S", "-c", MAIN]
    return subprocess.run(
        [*command, *words], cwd=directory, env=environment, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip


def words_of(name: str, out: str) -> list[str]:
    place = "runs/README.md" if name == "card" else out
    return ["export", name, "-o", place, *OPTIONS.get(name, ())]


@pytest.mark.long
@pytest.mark.parametrize("name", export_formats())
def test_every_format_is_made_by_the_installed_command(name: str, tmp_path: Path):
    """From a model with what tries it out, then from the run that is there, without a model."""
    check = ["--check", "--check-sequences", "2"] if name in CHECKED else []
    words = words_of(name, "first")
    # Passages and sentences need room, of which bytes take much.
    model, sizes = "bundled:gpt2-mini", ("--set", "n_ctx=256", "--set", "sequences=8")
    made = headcount(*words, "runs", "--model", model, *sizes, *check, directory=tmp_path)
    assert made.returncode == 0, made.stderr
    assert f": {name} of {model}, from run export-{name}-" in made.stdout
    assert ("kept_whole" in made.stdout) == bool(check)
    (run,) = (path for path in (tmp_path / "runs").glob(f"run_id=export-{name}-[0-9a-f]*")
              if len(path.name.rpartition("-")[2]) == 8
              and "-baseline-" not in path.name)  # fmt: skip
    again = headcount(
        *words_of(name, "again"), "runs", "--run", run.name.removeprefix("run_id="), "--replace",
        directory=tmp_path,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr


@pytest.mark.long
def test_no_format_needs_pandas(tmp_path: Path, without_pandas: dict[str, str]):
    probe = [sys.executable, "-S", "-c", "import torch, transformers, pandas"]
    missing = subprocess.run(probe, env=without_pandas, capture_output=True, text=True)
    assert "No module named 'pandas'" in missing.stderr
    for name in ("duo", "fp8-kv-scales", "card"):
        made = headcount(
            *words_of(name, name), f"runs-{name}" if name != "card" else "runs", "--model", MODEL,
            *SIZES, directory=tmp_path, environment=without_pandas,
        )  # fmt: skip
        assert made.returncode == 0, (name, made.stderr)


# A check takes long, may be stopped, and goes on


def begun(directory: Path, *words: str) -> Command:
    """An export that has begun, and keeps what it measures at once: it would be done in seconds."""
    constants = {"headcount.exports.shared.confirmation.SAVED_SECONDS": 0.0}
    return Command(*words, environment=os.environ, directory=directory, constants=constants)


def facts(directory: Path) -> dict[str, object]:
    return json.loads((directory / "duo/config.json").read_text())["headcount"]


@pytest.mark.long
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_list_is_there_before_its_check_which_goes_on_where_it_was(stop: int, tmp_path: Path):
    words = [*words_of("duo", "duo"), "runs", "--model", MODEL, *SIZES]
    words += ["--check", "--check-sequences", "512"]
    process = begun(tmp_path, *words)
    deadline = time.monotonic() + 300
    answers: dict[str, list[list[float]]] = {}
    while len(answers) < 4 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
        if (tmp_path / "duo/config.json").is_file():
            answers = facts(tmp_path).get("check", {}).get("answers", {})  # pyright: ignore
    process.send_signal(stop)
    stopped_code, _, stderr = process.ended()
    # The list is whole, and says that it is not confirmed.
    assert np.loadtxt(tmp_path / "duo/full_attention_heads.tsv").shape == (3, 4)
    stopped = facts(tmp_path)
    assert stopped["unfinished"] == "its check; the same command goes on with it"
    known: dict[str, list[list[float]]] = stopped["check"]["answers"]  # pyright: ignore
    assert known.items() >= answers.items()
    if stop != signal.SIGKILL:
        assert "stopped; the same command continues the export where it stopped" in stderr
        assert stopped_code == 128 + stop
    # Not all is measured, and how much it would be was said.
    assert "check: at most 10,752 passes of 48 tokens, about " in stderr
    assert "step 3 of 4: how many heads lose nothing" in stderr

    # Another command must not replace it, and the same one needs no word more.
    other = headcount(
        *words_of("duo", "duo"), "--sink", "2", "runs", "--model", MODEL, *SIZES,
        directory=tmp_path,
    )  # fmt: skip
    assert "is there already; choose another name, or say --replace" in other.stderr
    # What it recalls of the first answers, which nobody measured.
    file = tmp_path / "duo/config.json"
    config = json.loads(file.read_text())
    for answer in config["headcount"]["check"]["answers"]["reports none"]:
        answer[2] = 0.8125
    file.write_text(json.dumps(config))
    code, stdout, stderr = begun(tmp_path, *words).ended(600)
    assert code == 0, stderr
    finished = facts(tmp_path)
    assert "unfinished" not in finished
    row, *_ = finished["check"]["table"]  # pyright: ignore
    assert (row["kept_whole"], row["recall"]) == ("every head", 0.8125)
    assert "chosen heads: within" in stdout or "chosen heads: not within" in stdout


@pytest.mark.long
@pytest.mark.parametrize(("name", "options", "has_mark"), [
    ("headkv", ["--score", "effect", "--recent", "5"], True),
    ("headkv", ["--score", "effect", "--recent", "5", "--only-scores", "true"], False),
])  # fmt: skip
def test_what_confirms_a_list_goes_on_where_it_was(
    name: str, options: list[str], has_mark: bool, tmp_path: Path
):
    """Ctrl-C while losses are measured under interventions, and the same command again."""
    words = ["export", name, "-o", "list", *options, "runs", "--model", MODEL]
    words += ["--set", "n_ctx=64", "--set", "sequences=8", "--set", "sequences_per_shard=1"]
    process = begun(tmp_path, *words)
    deadline = time.monotonic() + 300
    committed: dict[Path, int] = {}

    def commits() -> dict[Path, int]:
        files = (tmp_path / "runs").glob("*/commits/[!.]*")
        return {file: file.stat().st_mtime_ns for file in files}

    def is_stopped_soon() -> bool:
        return sum("-calibration-" in str(file) for file in committed) >= 2

    while not is_stopped_soon() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
        committed = commits()
    process.send_signal(signal.SIGINT)
    code, _, stderr = process.ended()
    assert code == 128 + signal.SIGINT, stderr
    assert "stopped; the same command continues the export where it stopped" in stderr
    # Whoever finds a file can see that it is not confirmed.
    assert (tmp_path / "list").exists() == has_mark
    if has_mark:
        assert "list: written; it awaits: " in stderr
        assert last_object(tmp_path / "list")["headcount"]["unfinished"]
    committed = commits()
    code, _, stderr = begun(tmp_path, *words).ended(600)
    assert code == 0, stderr
    assert committed.items() < commits().items()
    content = last_object(tmp_path / "list")
    assert "unfinished" not in content.get("headcount", {})
    if name != "headkv":
        assert content["joint"]["documents"] == 4
    elif has_mark:
        (row, *_) = content["headcount"]["calibration"]["effect_window_4_5"]
        assert row["heads"] > 0


def last_object(file: Path) -> dict[str, Any]:
    """A file that is one object, or its last line."""
    return json.loads(file.read_text().strip().rpartition("\n")[2])
