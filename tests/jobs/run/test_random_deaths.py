"""Every row is there once, wherever processes die that measure, extend and compact a run."""

from __future__ import annotations

import pytest

from tests.tools.random_deaths import run_schedules


@pytest.mark.long
@pytest.mark.parametrize("in_store", [False, True])
def test_each_row_is_there_once_whatever_dies(in_store: bool) -> None:
    seen = run_schedules(10, seed=20261126, in_store=in_store)
    assert seen.bad == []
    assert seen.deaths >= 10
