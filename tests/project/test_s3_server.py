"""The S3 server of the tests has the faults that it is told to have, and S3's clients do what this
project relies on.
"""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.arrow import ArrowFSWrapper
from pyarrow import fs

from tests.tools.s3_server import ROOT, Action, Rule, S3Server

MB = 1_000_000


@pytest.fixture(scope="module")
def started_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def server(started_server: S3Server) -> S3Server:
    """The server, without rules and with an empty log."""
    started_server.clear()
    return started_server


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A key that no other test uses."""
    return f"{request.node.name.replace('[', '-').rstrip(']')}/x"


def arrow(server: S3Server, attempts: int = 1, **options: Any) -> fs.S3FileSystem:
    """Arrow's client."""
    return fs.S3FileSystem(
        access_key="test",
        secret_key="test-secret",
        region="us-east-1",
        endpoint_override=server.url,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=attempts),
        **({"allow_delayed_open": True} | options),
    )


def put(client: fs.S3FileSystem, key: str, body: bytes) -> None:
    """Write an object as a stream."""
    with client.open_output_stream(f"bucket/{key}") as stream:
        stream.write(body)


def methods(server: S3Server) -> str:
    """The methods of the requests so far."""
    return " ".join(request.method for request in server.requests())


def refuses(port: int) -> bool:
    """Whether nothing listens on a port, or soon no more."""
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            return True
        time.sleep(0.05)
    return False


# The server and its faults.


def test_the_process_ends_with_its_block() -> None:
    with S3Server("first") as server:
        assert server.request("PUT", "/first/x", b"1") == (200, b"")
        assert server.request("GET", "/first/x") == (200, b"1")
    assert refuses(server.port)


def test_the_process_ends_with_the_one_that_started_it() -> None:
    script = (
        "import os, tests.tools.s3_server as s\n"
        "print(s.S3Server().__enter__().port, flush=True); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == -9
    assert refuses(int(ended.stdout))


def test_a_body_in_chunks_arrives_whole(server: S3Server, key: str) -> None:
    server.request("PUT", f"/bucket/{key}", iter([b"hel", b"lo"]))
    assert server.request("GET", f"/bucket/{key}") == (200, b"hello")
    assert [(*request[:1], *request[2:]) for request in server.requests()] == [
        ("PUT", 200, ""),
        ("GET", 200, ""),
    ]


def test_heads_and_ranges(server: S3Server, key: str) -> None:
    server.request("PUT", f"/bucket/{key}", bytes(range(256)))
    connection = http.client.HTTPConnection(server.host, server.port)

    def ask(method: str, **headers: str) -> tuple[int, str | None, bytes]:
        headers["Authorization"] = (
            "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"
        )
        connection.request(method, f"/bucket/{key}", headers=headers)
        response = connection.getresponse()
        return response.status, response.headers["Content-Length"], response.read()

    assert ask("HEAD") == (200, "256", b"")
    assert ask("GET", Range="bytes=10-12") == (206, "3", b"\n\x0b\x0c")
    assert ask("DELETE")[0] == 204
    assert ask("HEAD")[::2] == (404, b"")
    server.set_rules(Rule({"status": 503}, method="HEAD"))
    assert ask("HEAD")[::2] == (503, b"")
    assert ask("GET")[0] == 404
    connection.close()


@pytest.mark.parametrize(("status", "code"), [(503, b"SlowDown"), (500, b"InternalError")])
def test_an_error_never_reaches_the_server(
    server: S3Server, key: str, status: int, code: bytes
) -> None:
    server.set_rules(Rule({"status": status}))
    answer, body = server.request("PUT", f"/bucket/{key}", b"1" * MB)
    assert (answer, f"<Code>{code.decode()}</Code>".encode() in body) == (status, True)
    assert server.request("GET", f"/bucket/{key}", past_faults=True)[0] == 404
    assert server.requests() == [("PUT", f"/bucket/{key}", 0, f"status {status}")]
    assert server.request("PUT", f"/bucket/{key}", b"1")[0] == 200
    assert server.spent() == [1]


@pytest.mark.parametrize(("cut", "status", "found"), [("before", 0, 404), ("after", 200, 200)])
def test_a_cut_before_or_after_the_server_did_it(
    server: S3Server, key: str, cut: Any, status: int, found: int
) -> None:
    server.set_rules(Rule({"cut": cut}, method="PUT"))
    with pytest.raises(http.client.RemoteDisconnected):
        server.request("PUT", f"/bucket/{key}", b"1")
    assert server.request("GET", f"/bucket/{key}", past_faults=True)[0] == found
    assert server.requests() == [("PUT", f"/bucket/{key}", status, f"cut {cut}")]


def test_a_cut_body(server: S3Server, key: str) -> None:
    server.request("PUT", f"/bucket/{key}", b"12345", past_faults=True)
    server.set_rules(Rule({"cut_body": 3}, method="GET"))
    with pytest.raises(http.client.IncompleteRead) as error:
        server.request("GET", f"/bucket/{key}")
    assert (error.value.partial, error.value.expected) == (b"123", 2)


def test_a_delay(server: S3Server) -> None:
    server.set_rules(Rule({"delay": 0.3}))
    started = time.monotonic()
    assert server.request("GET", "/bucket/none")[0] == 404
    assert time.monotonic() - started >= 0.3
    assert server.spent() == [1]


@pytest.mark.parametrize(
    ("action", "runs"),
    [
        ({"when": "before", "cut": "before"}, True),
        ({"when": "after", "cut": "before"}, False),
        ({"when": "after", "cut": "after"}, True),
    ],
)
def test_a_command_before_or_after_the_server_did_it(
    server: S3Server, key: str, tmp_path: Path, action: Action, runs: bool
) -> None:
    trace = tmp_path / "trace"
    touch: Action = {"run": f"touch {trace}"}
    server.set_rules(Rule(touch | action))
    with pytest.raises(http.client.RemoteDisconnected):
        server.request("PUT", f"/bucket/{key}", b"1")
    assert trace.exists() == runs


@pytest.mark.parametrize(("when", "status"), [("before", 0), ("after", 200)])
def test_the_client_itself_is_killed(
    server: S3Server, key: str, tmp_path: Path, when: Any, status: int
) -> None:
    script = (
        "import sys, urllib.request as u\n"
        "sys.stdin.read(1); u.urlopen(u.Request(sys.argv[1], b'1', method='PUT'))"
    )
    command = [sys.executable, "-c", script, f"{server.url}/bucket/{key}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as client:
        action: Action = {"kill": [client.pid], "when": when}
        if when == "before":
            action["cut"] = "before"
        server.set_rules(Rule(action, method="PUT"))
        client.communicate(b"\n")
    assert client.returncode == -9
    assert [request.status for request in server.requests()] == [status]
    assert server.request("GET", f"/bucket/{key}", past_faults=True)[0] == (status or 404)


def test_rules_choose_requests(server: S3Server) -> None:
    def answers(
        *rules: Rule, path: str = "/bucket/k%3D1/none?list-type=2", method: str = "GET"
    ) -> list[int]:
        server.set_rules(*rules)
        return [server.request(method, path)[0] for _ in range(4)]

    error: Action = {"status": 500}
    assert answers(Rule(error, skip=1, count=2)) == [404, 500, 500, 404]
    assert server.spent() == [2]
    assert answers(Rule(error, "k=1/none[?]list", "GET", count=None)) == [500] * 4
    assert answers(Rule(error, "k%3D1"), Rule(error, method="PUT")) == [404] * 4
    assert server.spent() == [0, 0]
    assert answers(Rule(error, count=2), Rule({"status": 503}, skip=1)) == [500, 500, 404, 503]
    assert server.spent() == [2, 1]


def test_chance_is_drawn_from_a_seed(server: S3Server) -> None:
    def pattern(seed: int) -> list[int]:
        server.set_rules(Rule({"status": 500}, probability=0.5, count=None, seed=seed))
        return [server.request("GET", "/bucket/none")[0] for _ in range(12)]

    assert pattern(1) == pattern(1) != pattern(2)
    assert set(pattern(1)) == {404, 500}


def test_a_wrong_rule_is_refused(server: S3Server) -> None:
    with pytest.raises(RuntimeError, match="400"):
        server.set_rules(Rule({"status": 500}, path="("))


# What Arrow's client does.


def test_arrow_finds_the_endpoint_in_the_environment_of_an_address_alone(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    client, path = fs.FileSystem.from_uri("s3://bucket/none/x")
    assert client.get_file_info(path).type == fs.FileType.NotFound
    assert methods(server) == "HEAD GET"


@pytest.mark.parametrize(
    ("size", "delayed", "requests"),
    [
        (100_000, True, "PUT"),
        (100_000, False, "POST PUT POST"),
        (20 * MB, True, "POST PUT PUT POST"),
    ],
)
def test_arrow_writes(server: S3Server, key: str, size: int, delayed: bool, requests: str) -> None:
    client = arrow(server, allow_delayed_open=delayed)
    put(client, key, b"1" * size)
    assert methods(server) == requests
    assert client.get_file_info(f"bucket/{key}").size == size


def test_arrow_reads_lists_and_deletes(server: S3Server, key: str) -> None:
    client, path = arrow(server), f"bucket/{key}"
    put(client, key, b"12345")

    server.clear()
    with client.open_input_file(path) as stream:
        assert stream.read() == b"12345"
    assert methods(server) == "HEAD GET"

    server.clear()
    assert [
        info.path for info in client.get_file_info(fs.FileSelector(path.rpartition("/")[0]))
    ] == [path]
    assert methods(server) == "GET"

    server.clear()
    client.delete_file(path)
    marker = f"/{path.rpartition('/')[0]}/"
    assert [request[:2] for request in server.requests()] == [
        ("HEAD", f"/{path}"),
        ("DELETE", f"/{path}"),
        ("PUT", marker),
    ]


def test_arrow_survives_as_many_errors_as_it_may(server: S3Server, key: str) -> None:
    server.set_rules(Rule({"status": 503}, method="PUT", count=2))
    put(arrow(server, attempts=3), key, b"1")
    assert [request.status for request in server.requests()] == [0, 0, 200]

    server.set_rules(Rule({"status": 503}, method="PUT", count=2))
    with pytest.raises(OSError, match="SLOW_DOWN"):
        put(arrow(server, attempts=2), key, b"1")
    assert server.spent() == [2]


def test_arrow_writes_again_when_the_answer_is_lost(server: S3Server, key: str) -> None:
    server.set_rules(Rule({"cut": "after"}, method="PUT"))
    put(arrow(server, attempts=2), key, b"1")
    assert [request[2:] for request in server.requests()] == [(200, "cut after"), (200, "")]

    server.set_rules(Rule({"cut": "after"}, method="PUT"))
    with pytest.raises(OSError, match="NETWORK_CONNECTION"):
        put(arrow(server), key, b"12")
    assert arrow(server).get_file_info(f"bucket/{key}").size == 2


def test_arrow_never_reads_short(server: S3Server, key: str) -> None:
    server.request("PUT", f"/bucket/{key}", b"1" * 1000, past_faults=True)

    def read(attempts: int) -> bytes:
        server.set_rules(Rule({"cut_body": 10}, key, "GET"))
        with arrow(server, attempts).open_input_file(f"bucket/{key}") as stream:
            return stream.read()

    assert read(2) == b"1" * 1000
    assert methods(server) == "HEAD GET GET"
    with pytest.raises(OSError, match="990 bytes missing"):
        read(1)


def test_arrow_does_not_wait_for_ever(server: S3Server, key: str) -> None:
    server.request("PUT", f"/bucket/{key}", b"1", past_faults=True)
    server.set_rules(Rule({"delay": 30}, method="HEAD"))
    started = time.monotonic()
    with pytest.raises(OSError, match="NETWORK_CONNECTION"):
        arrow(server, request_timeout=1).get_file_info(f"bucket/{key}")
    assert 0.9 < time.monotonic() - started < 25


@pytest.mark.parametrize("size", [1000, 20 * MB])
def test_arrow_publishes_what_a_failed_block_had_written(
    server: S3Server, key: str, size: int
) -> None:
    client = arrow(server)

    def fail() -> None:
        with client.open_output_stream(f"bucket/{key}") as stream:
            stream.write(b"1" * size)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert client.get_file_info(f"bucket/{key}").size == size


def test_a_lost_part_is_never_published(server: S3Server, key: str) -> None:
    server.set_rules(Rule({"status": 503}, "partNumber=2", "PUT", count=None))
    with pytest.raises(OSError, match="SLOW_DOWN"):
        put(arrow(server), key, b"1" * 20 * MB)
    assert server.spent() == [1]
    assert arrow(server).get_file_info(f"bucket/{key}").type == fs.FileType.NotFound


# What DuckDB does with Arrow's client.


class DuckFiles(ArrowFSWrapper):
    """Arrow's client for DuckDB, which compares addresses with what it may read before `..` is
    resolved.
    """

    protocol = "s3"  # pyright: ignore[reportAssignmentType]
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if ".." in path.split("/"):
            raise PermissionError(f"{path} has a `..`")
        return super()._strip_protocol(path)


def test_duckdb_reads_what_it_may_and_nothing_else(server: S3Server, tmp_path: Path) -> None:
    client = arrow(server)
    for key in ("duck/k=1/x", "duck/k=2/x", "ducks/k=1/x"):
        pq.write_table(pa.table({"v": [1, 2]}), f"bucket/{key}.parquet", filesystem=client)
    pq.write_table(pa.table({"v": [1]}), tmp_path / "x.parquet")

    with duckdb.connect() as connection:
        connection.register_filesystem(DuckFiles(client))
        connection.execute("SET allowed_directories = ['s3://bucket/duck']")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")

        paths = [f"s3://bucket/duck/k={k}/x.parquet" for k in (1, 2)]
        query = (
            "SELECT k, sum(v) FROM read_parquet(?, hive_partitioning = true) GROUP BY k ORDER BY k"
        )
        assert connection.execute(query, [paths]).fetchall() == [(1, 3), (2, 3)]

        for path in ("s3://bucket/ducks/k=1/x.parquet", str(tmp_path / "x.parquet")):
            with pytest.raises(duckdb.PermissionException):
                connection.execute(query, [[path]])
        with pytest.raises(duckdb.Error, match=r"Permission ?Error"):
            connection.execute(query, [["s3://bucket/duck/../ducks/k=1/x.parquet"]])

        connection.execute("COPY (SELECT 1) TO 's3://bucket/duck/out.parquet'")
        with pytest.raises(duckdb.PermissionException):
            connection.execute("COPY (SELECT 1) TO 's3://bucket/out.parquet'")
