"""`headcount query --interactive`: at a terminal, and at the end of a pipe."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from queries.asking import RunDatabase, open_runs
from queries.named_queries import QUERIES, read_queries
from queries.prompt import completions
from tests.toy_runs import write_run

COMMAND = [sys.executable, "-m", "headcount", "query"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    write_run(out, "a-1", {"sink_mass": lambda row: 0.1 + row.head, "entropy": lambda row: None})
    return out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rank", ["ranking"]),
        ("ranking --as", ["--ascending"]),
        ("SELECT mean_si", []),
        ("SELECT sink_", ["sink_mass", "sink_heads", "sink_values"]),
        ("FROM by_head WHERE mean_s", ["mean_sink_mass"]),
        ("ex", ["exit"]),
    ],
)
def test_names_are_completed(path: Path, text: str, expected: list[str]) -> None:
    database: RunDatabase = open_runs(path)
    assert [name for name, _ in completions(text, database, read_queries(QUERIES))] == expected


def test_a_pipe_asks_several_questions_and_a_mistake_ends_none(path: Path) -> None:
    lines = (
        "ranking --limit 3\nSELECT lyer FROM heads\nhelp outliers\n\n"
        "SELECT count(*) AS n FROM heads;\nquit\nFROM heads\n"
    )
    result = subprocess.run(
        [*COMMAND, str(path), "--interactive"],
        input=lines,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["n", "──", "24"]
    assert "error: query 'ranking' has no parameter --limit" in result.stderr
    assert "SELECT lyer FROM heads\n       ^^^^\nerror: unknown column 'lyer'" in result.stderr
    assert "--k WHOLE NUMBER" in result.stderr


def test_a_terminal_completes_and_remembers(path: Path, tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    with subprocess.Popen(
        [*COMMAND, str(path), "--interactive"], stdin=end, stdout=end, stderr=end, env=environment
    ) as process:
        os.close(end)
        read_until(terminal, "headcount>")
        # Tab completes the only name that begins so.
        os.write(terminal, b"rankin\t\r")
        seen = read_until(terminal, "L1H2")
        assert "sink_mass" in seen
        read_until(terminal, "headcount>")
        os.write(terminal, b"\x04")
        assert process.wait(30) == 0
    os.close(terminal)
    assert "+ranking" in (tmp_path / "headcount" / "questions").read_text().replace(
        "+ranking ", "+ranking"
    )


def read_until(terminal: int, words: str) -> str:
    """What a terminal shows until some words are there."""
    shown = ""
    deadline = time.monotonic() + 60
    while words not in shown:
        assert time.monotonic() < deadline, shown
        readable, _, _ = select.select([terminal], [], [], 1)
        if readable:
            shown += os.read(terminal, 65536).decode(errors="replace")
    return shown
