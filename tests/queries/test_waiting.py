"""What commands say while they read for long."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headcount.queries.commands.query import waiting
from tests import ROOT
from tests.toys.toy_runs import write_run


def test_a_log_has_a_line_now_and_then_and_none_if_it_is_quick(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with waiting("reading the runs"):
        pass
    assert capsys.readouterr().err == ""
    told, deadline = "", time.monotonic() + 20
    with waiting("reading the runs", seconds=0.02):
        while told.count("\n") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
            told += capsys.readouterr().err
    assert re.fullmatch(r"(reading the runs, for \d+ s\n)+", told)


COMMANDS = """
import sys
from headcount.command_line import main

runs = sys.argv[1]
for words in (
    ["query", runs, "FROM heads LIMIT 1"],
    ["report", runs, "-o", f"{runs}/report.html", "--no-text"],
    ["views", runs, "-o", f"{runs}/head.duckdb"],
):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
assert "pandas" not in sys.modules
"""


def test_commands_that_read_do_not_import_pandas(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    write_run(tmp_path, "a-1", {"sink_mass": lambda row: 0.5})
    program = [sys.executable, "-c", COMMANDS, str(tmp_path)]
    subprocess.run(program, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
