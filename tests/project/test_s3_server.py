"""The S3 server of the tests has the faults that it is told to have: a fault that never came would
let every test of failing stores pass.
"""

from __future__ import annotations

import http.client
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.s3.s3_server import Action, Rule, S3Server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.mark.parametrize(
    ("action", "carried_out", "logged"),
    [
        ({"status": 503}, False, "status 503"),
        ({"cut": "before"}, False, "cut before"),
        ({"cut": "after"}, True, "cut after"),
        ({"delay": 0.2}, True, "delay 0.2"),
        ({"run": "touch TRACE"}, True, "run"),
        ({"run": "touch TRACE", "when": "after", "cut": "after"}, True, "cut after"),
        ({"run": "touch TRACE", "cut": "before"}, False, "cut before"),
        ({"kill": "CLIENT", "cut": "before"}, False, "cut before"),
        ({"kill": "CLIENT", "when": "after"}, True, "kill"),
    ],
)
def test_a_fault_comes_before_or_after_the_request_is_carried_out(
    server: S3Server, tmp_path: Path, action: Any, carried_out: bool, logged: str
) -> None:
    path, trace = f"/bucket/{tmp_path.name}", tmp_path / "trace"
    with subprocess.Popen(["sleep", "60"]) as client:
        meant = {"run": f"touch {trace}", "kill": [client.pid]}
        server.clear()
        server.set_rules(Rule(action | {k: meant[k] for k in meant.keys() & action}, method="PUT"))
        started = time.monotonic()
        answer = 0
        with suppress(http.client.RemoteDisconnected):
            answer, _ = server.request("PUT", path, iter([b"hel", b"lo"]))
        assert time.monotonic() - started >= action.get("delay", 0)
        assert "kill" not in action or client.wait(10) == -9
        client.kill()
    assert answer == action.get("status", 0 if "cut" in action else 200)
    assert trace.exists() == ("run" in action)
    found = server.request("GET", path, past_faults=True)
    assert found == (200, b"hello") if carried_out else found[0] == 404
    (entry,) = server.requests()
    assert entry[:3] == ("PUT", path, 200 if carried_out else 0)
    assert logged in entry.fault


def test_rules_choose_requests(server: S3Server) -> None:
    def answers(*rules: Rule, path: str = "/bucket/k%3D1/none?list-type=2") -> list[int]:
        server.set_rules(*rules)
        return [server.request("GET", path)[0] for _ in range(8)]

    error: Action = {"status": 500}
    both = (Rule(error, count=2), Rule({"status": 503}, skip=1))
    # Rules, the answers to eight requests, and how often each rule came.
    for rules, expected, spent in (
        ([Rule(error, skip=1, count=2)], [404, 500, 500, *[404] * 5], [2]),
        ([Rule(error, "k=1/none[?]list", "GET", count=None)], [500] * 8, [8]),
        ([Rule(error, "k%3D1"), Rule(error, method="PUT")], [404] * 8, [0, 0]),
        (both, [500, 500, 404, 503, *[404] * 4], [2, 1]),
    ):
        assert (answers(*rules), server.spent()) == (expected, spent)
    first, again, other = (
        answers(Rule(error, probability=0.5, count=None, seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert {*first, *other} == {404, 500}
    with pytest.raises(RuntimeError, match="400"):
        server.set_rules(Rule(error, path="("))
    server.request("PUT", "/bucket/cut", b"12345", past_faults=True)
    server.set_rules(Rule({"cut_body": 3}, method="GET"))
    with pytest.raises(http.client.IncompleteRead) as cut:
        server.request("GET", "/bucket/cut")
    assert (cut.value.partial, cut.value.expected) == (b"123", 2)
