"""Machines whose clocks differ by minutes agree on how long a driver has been silent."""

import os
import time
from itertools import product
from pathlib import Path

import pytest

from headcount.jobs import phases
from headcount.jobs.clocks import changed
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.places import place, write_whole
from tests.toys.object_stores import object_store

TRUE_TIME = time.time


def heartbeat(seconds_ahead: float) -> bytes:
    """What a driver writes whose clock is ahead, a minute after it has begun to measure."""
    at = TRUE_TIME() + seconds_ahead
    driver = phases.Driver(host="far", process=7, phase="measuring", since=at - 60, at=at)
    return driver.model_dump_json().encode()


@pytest.mark.parametrize("out", ["runs", "s3://bucket/runs"])
def test_a_driver_that_lives_is_heard_whatever_the_clocks_say(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.of(out, "toy-1")
    with object_store(monkeypatch):
        for driver_ahead, reader_ahead in product((-120, 0, 120), repeat=2):
            file = place(out) / ".drivers" / "toy-1" / "far-7.json"
            write_whole(file, heartbeat(driver_ahead))
            with monkeypatch.context() as patch:
                patch.setattr(time, "time", lambda ahead=reader_ahead: TRUE_TIME() + ahead)
                (driver,) = phases.drivers_of(run)
                assert driver.is_alive(time.time())
                assert driver.line(time.time()).startswith("measuring, for 1 min ")
                assert not driver.is_alive(time.time() + phases.SILENT_SECONDS + 5)


def test_a_driver_that_was_killed_is_silent_whatever_the_clocks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    file = Path("runs/.drivers/toy-1/far-7.json")
    write_whole(file, heartbeat(3600))
    os.utime(file, (TRUE_TIME() - 90, TRUE_TIME() - 90))
    for reader_ahead in (-3600, 0, 3600):
        monkeypatch.setattr(time, "time", lambda ahead=reader_ahead: TRUE_TIME() + ahead)
        (driver,) = phases.drivers_of(RunDirectory.of("runs", "toy-1"))
        assert not driver.is_alive(time.time())
        assert "is silent for 1 min 30" in driver.line(time.time())
    assert changed(Path("runs/none")) is None
