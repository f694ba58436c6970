"""What the driver of a job says to programs."""

import pytest

from headcount.jobs.job_state import PREFIX, JobState, StateTeller, states_in
from headcount.jobs.phases import JOB_VARIABLE


def test_the_driver_of_a_job_tells_programs_each_change_of_its_state(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    outside = StateTeller(said.append)
    outside.tell("measuring", "all is well", "run")
    assert (said.pop(), capsys.readouterr().err) == ("run: all is well", "")

    monkeypatch.setenv(JOB_VARIABLE, "{}")
    driver = StateTeller(said.append)
    for _ in range(2):
        driver.tell("short of machines", 'a "GPU"\nis wanted')
    driver.tell("without replicas", "no replica yet")
    driver.tell("measuring", "the first", "run")
    lacks = 'a "GPU"\nis wanted'
    assert said == [lacks, lacks, "no replica yet", "run: the first"]
    log = capsys.readouterr().err
    assert [*states_in(log)] == [
        JobState(state="short of machines", words=lacks),
        JobState(state="without replicas", words="no replica yet"),
        JobState(state="measuring", words="the first"),
    ]
    # A log may be read in the middle of a line, and has lines of others.
    half_line = log.splitlines()[1][:-5]
    assert [*states_in(f"measuring\n{PREFIX}none\n{half_line}")] == []
