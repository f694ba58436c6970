"""`headcount query --interactive`: at a terminal, and at the end of a pipe."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headcount import app
from headcount.queries.ask.asking import RunDatabase
from headcount.queries.ask.named_queries import QUERIES, read_queries
from headcount.queries.ask.prompt import completions


@pytest.mark.parametrize(("text", "expected"), [
    ("rank", ["ranking"]),
    ("ranking --as", ["--ascending"]),
    ("SELECT mean_si", []),
    ("SELECT sink_", ["sink_mass", "sink_heads", "sink_values"]),
    ("FROM by_head WHERE mean_s", ["mean_sink_mass"]),
    ("ex", ["exit"]),
])  # fmt: skip
def test_names_are_completed(database: RunDatabase, text: str, expected: list[str]) -> None:
    assert [name for name, _ in completions(text, database, read_queries(QUERIES))] == expected


def test_a_pipe_asks_several_queries_and_a_mistake_ends_none(small: Path) -> None:
    lines = (
        "ranking --limit 3\nSELECT lyer FROM heads\nhelp outliers\n\n"
        "SELECT count(*) AS n FROM heads;\nquit\nFROM heads\n"
    )
    words = ["query", str(small), "--interactive"]
    result = CliRunner().invoke(app, words, input=lines, catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout.split() == ["n", "──", "24"]
    assert "error: query 'ranking' has no parameter --limit" in result.stderr
    assert "SELECT lyer FROM heads\n       ^^^^\nerror: unknown column 'lyer'" in result.stderr
    assert "--k WHOLE NUMBER" in result.stderr


@pytest.mark.long
def test_a_terminal_completes_and_remembers(small: Path, tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    environment = os.environ | {
        "XDG_STATE_HOME": str(tmp_path),
        "TERM": "xterm",
        # Nobody here tells where the cursor is. The prompt would wait two seconds for that.
        "PROMPT_TOOLKIT_NO_CPR": "1",
    }
    command = [sys.executable, "-m", "headcount", "query", str(small), "--interactive"]
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment)
    os.close(end)
    try:
        read_until(terminal, "headcount>")
        # Tab completes the only name that begins so.
        os.write(terminal, b"rankin\t")
        read_until(terminal, "g")
        os.write(terminal, b"\r")
        answer, _, rest = read_until(terminal, "L0H0").partition("L0H0")
        assert "sink_mass" in answer
        if "headcount>" not in rest:
            read_until(terminal, "headcount>")
        os.write(terminal, b"\x04")
        # Not all of it may be sent before somebody reads it.
        with suppress(OSError):
            read_until(terminal, "what is never shown")
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert "+ranking" in (tmp_path / "headcount" / "queries").read_text()


def read_until(terminal: int, words: str, seconds: float = 120) -> str:
    """What a terminal shows until some words are there."""
    shown = ""
    deadline = time.monotonic() + seconds
    while words not in shown:
        assert time.monotonic() < deadline, shown
        readable, _, _ = select.select([terminal], [], [], 1)
        if readable:
            shown += os.read(terminal, 65536).decode(errors="replace")
    return shown
