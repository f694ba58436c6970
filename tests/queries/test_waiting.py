"""What commands say while they read for long."""

import re
import time

import pytest

from headcount.queries.commands.opening import waiting


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
