"""Queries that nothing can interrupt, asked of real processes."""

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from headcount.queries.explore.sql_process import Settings, SqlProcesses, SqlQuery
from headcount.queries.open.limits import spill_directory
from headcount.schemas.errors import QueryError
from tests.tools.processes import DIES_WITH_ITS_PARENT

IN_A_FUNCTION = "SELECT {} AS x".format(
    " OR ".join(f"regexp_matches(repeat('a', 100000000), '(a+)+{end}')" for end in "bcdef")
)
"""DuckDB hears no interrupt before this ends: about half a second for each on a quick machine."""

NEEDS_MEMORY = "SELECT length(repeat('x', 2000000000)) AS x"

LIMITS = ["--memory", "300MB", "--timeout", "1"]


@pytest.fixture
def processes(small: Path) -> Iterator[SqlProcesses]:
    pool = SqlProcesses(Settings(str(small), None, "100MB"))
    yield pool
    pool.close()


def test_a_query_that_needs_more_memory_is_one_line_and_the_next_is_answered(
    processes: SqlProcesses,
) -> None:
    with pytest.raises(QueryError, match="needs more memory than it may take"):
        SqlQuery(processes, NEEDS_MEMORY, 0).answer()
    answer = SqlQuery(processes, "SELECT 1 AS one", 0).answer()
    assert answer == {"columns": ["one"], "rows": [[1]], "has_more": False}


def test_a_query_inside_of_a_function_ends_with_its_process(processes: SqlProcesses) -> None:
    query = SqlQuery(processes, IN_A_FUNCTION, 0)
    errors: list[QueryError] = []

    def ask() -> None:
        try:
            query.answer()
        except QueryError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while query._process is None:
        time.sleep(0.01)
    pid = query._process._process.pid
    began = time.monotonic()
    query.interrupt()
    thread.join(20)
    assert len(errors) == 1
    # The next process starts meanwhile.
    assert time.monotonic() - began < 10
    assert not spill_directory(pid).exists()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.long
def test_the_command_ends_soon_after_its_timeout_and_keeps_to_its_memory(small: Path) -> None:
    for sql, why in ((IN_A_FUNCTION, "stopped after 1 s"), (NEEDS_MEMORY, "needs more memory")):
        began = time.monotonic()
        words = [sys.executable, "-m", "headcount", "query", str(small), sql, *LIMITS]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
        assert why in ended.stderr
        assert time.monotonic() - began < 20


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_explorer_while_ten_bad_queries_run(
    small: Path, number: signal.Signals
) -> None:
    words = ["-m", "headcount", "explore", str(small), "--no-open", "--memory", "300MB"]
    command = [*DIES_WITH_ITS_PARENT, sys.executable, *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout
        assert process.stderr
        address = urlsplit(process.stdout.readline().strip())

        def ask(kind: str, **fields: object) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", address.port or 0, timeout=60)
            headers = {"Authorization": f"Bearer {address.fragment}"}
            headers["Content-Type"] = "application/json"
            with closing(connection):
                connection.request("POST", "/ask", json.dumps({"kind": kind, **fields}), headers)
                with connection.getresponse() as response:
                    return response.status

        assert ask("sql", text="SELECT 1 AS one") == 200
        bad = [
            threading.Thread(target=ask, args=["sql"], kwargs={"text": IN_A_FUNCTION}, daemon=True)
            for _ in range(10)
        ]
        for thread in bad:
            thread.start()
        time.sleep(1)
        # The page goes on to answer.
        scope = {"run_id": "a-1"}
        assert ask("heatmap", scope=scope, statistic="sink_mass") == 200
        process.send_signal(number)
        began = time.monotonic()
        process.wait(30)
        assert time.monotonic() - began < 5
        assert process.returncode == 128 + number
        assert "Traceback" not in process.stderr.read()
