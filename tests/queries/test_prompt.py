"""`headcount query --interactive`: at a terminal, and at the end of a pipe."""

import os
import sys
from pathlib import Path
from typing import Any

import pexpect
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
    ("SELECT sink_", ["sink_mass", "sink_against_loss", "sink_heads", "sink_values"]),
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
    # Nobody here tells where the cursor is. The prompt would wait two seconds for that.
    variables = {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    words = ["-m", "headcount", "query", str(small), "--interactive"]
    options: Any = {"env": os.environ | variables, "encoding": "utf-8", "timeout": 120}
    with pexpect.spawn(sys.executable, words, **options) as terminal:
        terminal.expect_exact("headcount>")
        # Tab completes the only name that begins so.
        terminal.send("rankin\t")
        terminal.expect_exact("g")
        terminal.send("\r")
        terminal.expect_exact("L0H0")
        assert "sink_mass" in str(terminal.before)
        terminal.expect_exact("headcount>")
        terminal.send("\x04")
        terminal.expect_exact(pexpect.EOF)
        assert terminal.wait() == 0
    assert "+ranking" in (tmp_path / "headcount" / "queries").read_text()
