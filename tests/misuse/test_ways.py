"""What a run is, and which command goes on where it cannot be gone on with."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headcount
from jobs.plan import make_plan
from queries.connection import connect
from schemas.errors import ModelError
from schemas.scan import parse_scan
from tests import toy_models as toy
from tests.toy_runs import write_run
from workers.model.text_tokenizer import TextTokenizer

Command = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads bytes."""
    return toy.save_byte_model(tmp_path_factory.mktemp("ways") / "bytes")


@pytest.fixture
def home(tmp_path: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model, texts and a scan of them, all by relative names."""
    shutil.copytree(shipped, tmp_path / "home" / "bytes")
    monkeypatch.chdir(tmp_path / "home")
    lines = [json.dumps({"text": chr(97 + i) * 40}) + "\n" for i in range(6)]
    (tmp_path / "home" / "a.jsonl").write_text("".join(lines))
    write_scan(tmp_path / "home" / "toy.toml")
    return tmp_path / "home"


def write_scan(file: Path, **changes: Any) -> Path:
    fields = {
        "model": "bytes", "n_ctx": 8, "sequences": 4, "sequences_per_shard": 2,
        "statistics": ["entropy"], "input.family": "pile", "input.files": "*.jsonl",
    }  # fmt: skip
    content = (f"{key} = {json.dumps(value)}\n" for key, value in (fields | changes).items())
    file.write_text("".join(content))
    return file


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `headcount …` in this process: exit code, stdout and lines of stderr."""

    def run(*arguments: str | Path) -> tuple[int, str, list[str]]:
        words = [*map(str, arguments)]
        if words[0] in ("scan", "resume"):
            words += ["--replicas", "0", "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["headcount", *words])
        code: Any = 0
        try:
            headcount.main()
        except SystemExit as stopped:
            code = stopped.code or 0
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err + captured.out
        return code, captured.out, captured.err.splitlines()

    return run


def edit(file: str | Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file."""
    content = json.loads(Path(file).read_text())
    change(content)
    Path(file).write_text(json.dumps(content))


def exchange(tokenizer: Any) -> None:
    """Exchange two ids of a vocabulary."""
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def scanned(command: Command, *words: str) -> Path:
    code, out, err = command("scan", "toy.toml", *words)
    assert code == 0, err
    return Path(out.strip())


def unfinished(run: Path) -> Path:
    """A run whose last shard is not done."""
    (run / "commits" / "shard-000001.json").unlink()
    return run


def rows(run: Path) -> list[Any]:
    sql = "SELECT sequence, layer, head, entropy, tokens, file FROM heads JOIN sequences USING (sequence) ORDER BY ALL"
    return connect(run).execute(sql).fetchall()


# What a run is


CHANGES: list[tuple[str, Callable[[], object], str]] = [
    (
        "tokenizer",
        lambda: edit("bytes/tokenizer.json", exchange),
        r'the tokenizer ("X", now "X")',
    ),
    (
        "weights",
        lambda: toy.change_weights(
            Path("bytes"), lambda w: w["transformer.wpe.weight"].view(-1)[5].add_(1e-3)
        ),
        r"the model's weights (model.safetensors: X, now X)",
    ),
    (
        "configuration",
        lambda: toy.change_config(Path("bytes"), layer_norm_epsilon=1e-3),
        r"the model's configuration (config.json: X, now X)",
    ),
    (
        "code",
        lambda: edit(
            f"{newest()}/manifest.json",
            lambda m: m["kinds"]["statistics"]["entropy"].update(fingerprint="0123456789ab"),
        ),
        'the code of statistic entropy ("X", now "X")',
    ),
]


def newest() -> str:
    return str(next(Path("runs").glob("run_id=*")))


@pytest.mark.parametrize(("name", "change", "told"), CHANGES, ids=[c[0] for c in CHANGES])
def test_what_changed_is_named_and_the_command_that_goes_on(
    home: Path, command: Command, name: str, change: Callable[[], object], told: str
) -> None:
    run = unfinished(scanned(command, "--set", "seed=3"))
    change()
    line = f"error: {run}: this run measured something else: {told}; headcount scan toy.toml --set seed=3 --new starts another run"
    for words in (("scan", "toy.toml", "--set", "seed=3"), ("resume", run)):
        code, _, err = command(*words)
        assert (code, hexless(err)) == (2, hexless([line.replace(str(run), _shown(run, words))]))
    other = scanned(command, "--set", "seed=3", "--new")
    assert other.name == f"{run.name}-2"
    # The same command goes on with the one that fits.
    assert scanned(command, "--set", "seed=3") == other
    assert connect(other).execute("SELECT name FROM runs").fetchall() == [("toy",)]


def _shown(run: Path, words: tuple[Any, ...]) -> str:
    return str(run.absolute()) if words[0] == "resume" else str(run)


def hexless(lines: list[str]) -> list[str]:
    import re

    return [re.sub(r'\b[0-9a-f]{12,16}\b', "X", line) for line in lines]
