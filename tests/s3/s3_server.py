"""A real server that speaks S3 on this machine, and faults that it can be told to have.

The server is moto's: it keeps objects in memory and checks no signatures. It runs in a process of
its own (`tests/s3/s3_faults.py`), which ends when the process that started it ends.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypedDict

from tests import ROOT

CONTROL = "/_faults"
PAST_FAULTS = "X-Past-Faults"
"""A request with this header meets no fault and is not logged."""
PATIENCE_SECONDS = 60.0
SCOPE = "Credential=test/20260101/us-east-1/s3/aws4_request"
UNCHECKED_SIGNATURE = {
    "Authorization": f"AWS4-HMAC-SHA256 {SCOPE}, SignedHeaders=host, Signature=0"
}


class Action(TypedDict, total=False):
    """What a fault does. Keys combine, and happen in the order in which they stand here."""

    delay: float
    """Seconds to hold the request back. It is carried out even if the client has left by then."""
    kill: list[int]
    """Processes to end by SIGKILL."""
    run: str
    """A shell command to run to its end."""
    when: Literal["before", "after"]
    """Whether `kill` and `run` happen before the request is carried out (default) or after it."""
    status: int
    """An error to answer with, as S3 words it. The request is not carried out."""
    cut: Literal["before", "after"]
    """Close the connection without an answer, before or after the request is carried out."""
    cut_body: int
    """Close the connection after this many bytes of the answer's body."""


@dataclass(frozen=True)
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
    fault: str
    """The action of the rule that fired, such as `cut after`, or nothing."""


class S3Server:
    """A context manager for a server with one empty bucket, on a free port of this machine.

    A server takes a second to start, so the next one of this process with the usual bucket is the
    same, emptied.
    """

    idle: ClassVar[list[tuple[subprocess.Popen[bytes], int]]] = []
    """Servers that wait for the next test, and their ports."""
    port: int

    def __init__(
        self, bucket: str = "bucket", host: str = "127.0.0.1", rules: Sequence[Rule] = ()
    ) -> None:
        self.bucket = bucket
        self.host = host
        self._rules = rules
        self._is_usual = (bucket, host) == ("bucket", "127.0.0.1")

    def __enter__(self) -> Self:
        if self.idle and self._is_usual:
            self._process, self.port = self.idle.pop()
            self.request("POST", "/moto-api/reset", past_faults=True)
        else:
            self._start()
        try:
            status, body = self.request("PUT", f"/{self.bucket}", past_faults=True)
            if status != 200:
                raise RuntimeError(f"the bucket was refused: {status} {body!r}")
            self.set_rules(*self._rules)
        except BaseException:
            self.__exit__()
            raise
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
        if self._is_usual and self._process.poll() is None:
            self.clear()
            self.idle.append((self._process, self.port))
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()

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

    def request(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] = b"",
        headers: Mapping[str, str] | None = None,
        past_faults: bool = False,
    ) -> tuple[int, bytes]:
        """Status and body of the answer to a plain request on a connection of its own."""
        all_headers = UNCHECKED_SIGNATURE | dict(headers or {})
        if past_faults:
            all_headers[PAST_FAULTS] = "yes"
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_SECONDS)
        try:
            connection.request(method, path, body=body, headers=all_headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def set_rules(self, *rules: Rule) -> None:
        """Replace the rules, with fresh counts. The log continues."""
        self._control("POST", {"rules": [asdict(rule) for rule in rules]})

    def spent(self) -> list[int]:
        """How often each rule has fired."""
        return self._control("GET")["fired"]

    def requests(self) -> list[Request]:
        """The requests since the log was emptied, in the order in which they ended."""
        return [Request(*entry) for entry in self._control("GET")["log"]]

    def clear(self) -> None:
        """Drop the rules and empty the log."""
        self._control("POST", {"rules": [], "log": []})

    def _control(self, method: str, change: Any = None) -> Any:
        status, body = self.request(method, CONTROL, json.dumps(change).encode() if change else b"")
        if status != 200:
            raise RuntimeError(f"the server answered {status}: {body.decode()}")
        return json.loads(body)
