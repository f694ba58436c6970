"""A real server that speaks S3 on this machine, and faults that it can be told to have.

The server is moto's: it keeps objects in memory and checks no signatures. It runs in a process of
its own (`tests/s3/s3_faults.py`), which ends when the process that started it ends.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypedDict

from tests import ROOT

CONTROL = "/_faults"
SCOPE = "Credential=test/20260101/us-east-1/s3/aws4_request"
UNCHECKED_SIGNATURE = {
    "Authorization": f"AWS4-HMAC-SHA256 {SCOPE}, SignedHeaders=host, Signature=0"
}


class Action(TypedDict, total=False):
    """What a fault does. Keys combine, and happen in the order in which they stand here."""

    delay: float
    """Seconds to hold the request back. It is carried out even if the client has left by then."""
    kill: list[int]
    """Processes to end by SIGKILL before the request is carried out."""
    status: int
    """An error to answer with, as S3 words it. The request is not carried out."""
    cut: Literal["before", "after"]
    """Close the connection without an answer, before or after the request is carried out."""
    cut_body: int
    """Close the connection after this many bytes of the answer's body."""
    cut_at: int
    """Close the connection after this many bytes of the answer, which begins with its headers."""
    cut_within: int
    """The same after a number of bytes that is drawn below this one."""
    body: str
    """Answer with this in place of the object or the listing."""
    stale: float
    """Leave out of a listing what was written first within the last so many seconds."""


@dataclass
class Rule:
    """Which requests fail, and how. If several rules would fire, the first one does, and the others
    do not count the request.
    """

    action: Action
    path: str = ""
    """A regular expression to find in the decoded path and query, such as
    `/bucket/k=1/x.parquet?uploads`.
    """
    method: str | None = None
    skip: int = 0
    """How many matching requests pass first."""
    count: int | None = 1
    """How many times the rule fires. None means for ever."""
    probability: float = 1.0
    seed: int = 0


class Request(NamedTuple):
    """A request that was answered, or was not answered on purpose."""

    method: str
    path: str
    """The decoded path and query."""
    status: int
    """Status after it was carried out; 0 if it was not."""


class S3Server:
    """A context manager for a server with one empty bucket, on a free port of this machine.

    A server takes a second to start, so the next one of this process is the same, emptied.
    """

    idle: ClassVar[list[tuple[str, subprocess.Popen[bytes], int]]] = []
    """Servers that wait for the next test, with their hosts and ports."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host

    def __enter__(self) -> Self:
        waiting = [server for server in self.idle if server[0] == self.host]
        if waiting:
            self.idle.remove(waiting[0])
            _, self._process, self.port = waiting[0]
            self.request("POST", "/moto-api/reset")
        else:
            self._start()
        status, body = self.request("PUT", "/bucket")
        assert status == 200, body
        self.clear()
        return self

    def _start(self) -> None:
        # The socket listens before the process is there, so the first request waits and is not
        # refused.
        with socket.create_server((self.host, 0), backlog=512) as listener:
            self.port = listener.getsockname()[1]
            descriptor = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.s3.s3_faults", str(descriptor)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[descriptor],
                start_new_session=True,
            )

    def __exit__(self, *_: object) -> None:
        try:
            self.clear()
            self.idle.append((self.host, self._process, self.port))
        except OSError:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://{self.host}:{self.port}"

    def env(self) -> dict[str, str]:
        """The environment in which S3 clients find the server."""
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test-secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of the answer to a plain request on a connection of its own."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, path, body=body, headers=UNCHECKED_SIGNATURE)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def set_rules(self, *rules: Rule) -> None:
        """Replace the rules, with fresh counts. The log continues."""
        self._control({"rules": [asdict(rule) for rule in rules]})

    def spent(self) -> list[int]:
        """How often each rule has fired."""
        return self._control({})["fired"]

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Take connections and answer nothing meanwhile, and then carry out what has come."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def requests(self) -> list[Request]:
        """The requests since the log was emptied, in the order in which they ended."""
        return [Request(*entry) for entry in self._control({})["log"]]

    def clear(self) -> None:
        """Drop the rules and empty the log."""
        self._control({"rules": [], "log": []})

    def _control(self, change: dict[str, Any]) -> Any:
        status, body = self.request("POST", CONTROL, json.dumps(change).encode())
        assert status == 200, body.decode()
        return json.loads(body)
