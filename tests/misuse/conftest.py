"""Fixtures for tables of misuse: the command line runs in this process, and no row needs a scan."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headcount.command_line
from tests.toys import toy_models as toy


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory of 259 tokens, 64 positions, one layer and two heads."""
    return toy.save_byte_model(tmp_path_factory.mktemp("toy") / "bytes")


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[str]]]:
    """Runs `headcount …` in this process: exit code and lines of stderr."""

    def run(*arguments: str | Path) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["headcount", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            headcount.command_line.main()
        code = stopped.value.code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err + captured.out
        return code if isinstance(code, int) else 0, captured.err.splitlines()

    return run


@pytest.fixture
def plan_error(
    command: Callable[..., tuple[int, list[str]]], tmp_path: Path, model: Path
) -> Callable[..., list[str]]:
    """The lines with which `headcount plan` refuses a scan that is good but for `changes`; paths
    are shortened.
    """

    def plan(*overrides: str, **changes: Any) -> list[str]:
        fields = {
            "model": str(model),
            "n_ctx": 8,
            "sequences": 2,
            "out": str(tmp_path / "runs"),
            "input": {"family": "uniform_random"},
        }
        lines = [
            f"{key} = {in_toml(value)}"
            for key, value in (fields | changes).items()
            if value is not None
        ]
        (tmp_path / "toy.toml").write_text("\n".join(lines), encoding="utf-8")
        code, err = command(
            "plan", tmp_path / "toy.toml", *[part for o in overrides for part in ("--set", o)]
        )
        assert code == 2
        assert all(line.startswith("error: ") for line in err)
        # The tokens of a corpus may lie there already; no run does.
        assert list((tmp_path / "runs").glob("run_id=*")) == []
        return [
            line.removeprefix("error: ").replace(str(tmp_path), "TMP").replace(str(model), "MODEL")
            for line in err
        ]

    return plan


def in_toml(value: Any) -> str:
    """A value as a TOML file writes it."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{k} = {in_toml(v)}' for k, v in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(in_toml, value))}]"
    if isinstance(value, float):
        return repr(value)  # NaN and infinity are "nan" and "inf", in Python as in TOML.
    return json.dumps(value)
