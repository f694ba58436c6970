"""A real server that speaks S3 on this machine, and a proxy in front of it that injects faults.

Both are processes of their own, `python -m tests.s3_server server|proxy`, that end when whoever
started them ends. The server is moto's: it keeps objects in memory and checks no signatures. The
proxy holds one connection to the server for each of a client, passes heads and bodies on byte for
byte, and answers `GET` and `POST /_faults` itself.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self, TypedDict
from urllib.parse import unquote

ROOT = Path(__file__).parent.parent
CONTROL = "/_faults"
ERROR_CODES = {403: "AccessDenied", 404: "NoSuchKey", 500: "InternalError", 503: "SlowDown"}
PATIENCE = 60.0
SCOPE = "Credential=test/20260101/us-east-1/s3/aws4_request"
UNCHECKED_SIGNATURE = {
    "Authorization": f"AWS4-HMAC-SHA256 {SCOPE}, SignedHeaders=host, Signature=0"
}


class Action(TypedDict, total=False):
    """What a fault does; keys combine, and happen in the order in which they stand here."""

    delay: float
    """Seconds to hold the request back, whole; it reaches the server even if the client has left by
    then.
    """
    kill: list[int]
    """Processes to end by SIGKILL."""
    run: str
    """A shell command to run to its end."""
    when: Literal["before", "after"]
    """Whether `kill` and `run` happen before the server sees the request (unless told) or after it
    has answered.
    """
    status: int
    """An error to answer with, as S3 words it; the server never sees the request."""
    cut: Literal["before", "after"]
    """Close the connection unanswered: the server never sees the request, or has carried it out."""
    cut_body: int
    """Close the connection after so many bytes of the answer's body."""


@dataclass(frozen=True)
class Rule:
    """Which requests fail, and how; of several rules that would fire, the first does, and the
    others see no match.
    """

    action: Action
    path: str = ""
    """A regular expression to find in the decoded path and query, such as
    `/bucket/k=1/x.parquet?uploads`.
    """
    method: str | None = None
    skip: int = 0
    """How many matches to let pass first."""
    count: int | None = 1
    """How many times to fire before the rule is spent; for ever if None."""
    probability: float = 1.0
    seed: int = 0


class Request(NamedTuple):
    """A request that the proxy has dealt with."""

    method: str
    path: str
    """The decoded path and query."""
    status: int
    """What the server answered, 0 if it never saw the request or is gone."""
    fault: str
    """The action of the rule that fired, such as `cut after`, or nothing."""


def client_env(url: str) -> dict[str, str]:
    """The environment in which S3 clients find the server at a URL."""
    return {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class Address(Protocol):
    """Where a server listens."""

    host: str
    port: int


class LocalProcess:
    """A context manager for a process of this module that listens on a free port, until it is left."""

    host: str
    port: int

    def __init__(self, host: str, arguments: Sequence[str]) -> None:
        self.host = host
        self._arguments = arguments

    def __enter__(self) -> Self:
        with socket.create_server((self.host, 0), backlog=512) as listener:
            self.port = listener.getsockname()[1]
            descriptor = listener.fileno()
            role, *others = self._arguments
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.s3_server", role, str(descriptor), *others],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[descriptor],
                start_new_session=True,
            )
        try:
            self._prepare()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()

    @property
    def pid(self) -> int:
        """The process, to be killed or stopped."""
        return self._process.pid

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.host}:{self.port}"

    def env(self) -> dict[str, str]:
        """The environment in which S3 clients find it."""
        return client_env(self.url)

    def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and body that a plain request on a connection of its own is answered with."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)
        try:
            connection.request(
                method, path, body=body, headers=UNCHECKED_SIGNATURE | dict(headers or {})
            )
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _prepare(self) -> None:
        raise NotImplementedError


class S3Server(LocalProcess):
    """An S3 server with one empty bucket."""

    def __init__(self, bucket: str = "bucket", host: str = "127.0.0.1") -> None:
        super().__init__(host, ["server"])
        self.bucket = bucket

    def _prepare(self) -> None:
        status, body = self.request("PUT", f"/{self.bucket}")
        if status != 200:
            raise RuntimeError(f"the bucket was refused: {status} {body.decode(errors='replace')}")


class FaultProxy(LocalProcess):
    """A proxy in front of a server, transparent but for its rules."""

    def __init__(self, server: Address, rules: Sequence[Rule] = ()) -> None:
        super().__init__(server.host, ["proxy", server.host, str(server.port)])
        self._rules = rules

    def set_rules(self, *rules: Rule) -> None:
        """Replace the rules, with fresh counts; the log goes on."""
        self._control("POST", {"rules": [asdict(rule) for rule in rules]})

    def spent(self) -> list[int]:
        """How often each rule has fired."""
        return self._control("GET")["fired"]

    def requests(self) -> list[Request]:
        """What has arrived since the log was emptied, and been dealt with, in the order of the
        latter.
        """
        return [Request(*entry) for entry in self._control("GET")["log"]]

    def clear(self) -> None:
        """Drop the rules and empty the log."""
        self._control("POST", {"rules": [], "log": []})

    def _prepare(self) -> None:
        self.set_rules(*self._rules)

    def _control(self, method: str, change: Any = None) -> Any:
        status, body = self.request(method, CONTROL, json.dumps(change).encode() if change else b"")
        if status != 200:
            raise RuntimeError(f"the proxy answered {status}: {body.decode()}")
        return json.loads(body)


@dataclass
class LiveRule:
    """A rule and how far it has come."""

    rule: Rule
    matched: int = 0
    fired: int = 0
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.rule.seed)
        re.compile(self.rule.path)

    def fires(self, method: str, path: str) -> bool:
        """Whether it takes this request; counts."""
        rule = self.rule
        if rule.method not in (None, method) or not re.search(rule.path, path):
            return False
        self.matched += 1
        fires = (
            self.matched > rule.skip
            and (rule.count is None or self.fired < rule.count)
            and (rule.probability >= 1 or self.random.random() < rule.probability)
        )
        self.fired += fires
        return fires


class Message(NamedTuple):
    """A request or an answer: its first line, its headers in lower case, and the bytes as they
    came.
    """

    start: list[str]
    headers: dict[str, str]
    head: bytes
    body: bytes
    last: bool
    """Whether no other message follows on this connection."""


async def read_head(reader: StreamReader) -> tuple[list[str], dict[str, str], bytes]:
    """First line, headers, and the bytes of both."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    fields = (line.partition(":") for line in lines)
    return first.split(" ", 2), {name.lower(): value.strip() for name, _, value in fields}, head


async def read_body(reader: StreamReader, headers: Mapping[str, str]) -> bytes:
    """A body of known length or in chunks, with the chunks' framing."""
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return await reader.readexactly(int(headers.get("content-length", 0)))
    parts: list[bytes] = []
    size = -1
    while size:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        parts += [line, await reader.readexactly(size)]
        if size:
            parts.append(await reader.readexactly(2))
    while parts[-1] != b"\r\n":
        parts.append(await reader.readuntil(b"\r\n"))
    return b"".join(parts)


async def read_request(reader: StreamReader, writer: StreamWriter) -> Message:
    """The next request of a client, which is told to go on if it waits for that before it sends the
    body.
    """
    start, headers, head = await read_head(reader)
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await read_body(reader, headers)
    return Message(start, headers, head, body, headers.get("connection", "").lower() == "close")


async def read_answer(reader: StreamReader, method: str) -> Message:
    """The server's answer, without the `100 Continue` that may come first."""
    while True:
        start, headers, head = await read_head(reader)
        if start[1][0] != "1":
            break
    last = headers.get("connection", "").lower() == "close" or start[0] == "HTTP/1.0"
    if method == "HEAD" or start[1] in ("204", "304"):
        return Message(start, headers, head, b"", last)
    if "content-length" in headers or "transfer-encoding" in headers:
        return Message(start, headers, head, await read_body(reader, headers), last)
    return Message(start, headers, head, await reader.read(), True)


def error_answer(status: int, method: str) -> bytes:
    """An error as S3 words it."""
    code = ERROR_CODES.get(status, "InternalError")
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>injected</Message></Error>'
    head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head if method == "HEAD" else head + body).encode()


def json_answer(status: int, value: Any) -> bytes:
    """An answer of the proxy itself."""
    body = json.dumps(value).encode()
    return f"HTTP/1.1 {status} -\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Upstream:
    """The connection to the server that belongs to one client's."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._streams: tuple[StreamReader, StreamWriter] | None = None

    async def ask(self, request: Message) -> Message:
        """Pass a request on and return the answer."""
        if self._streams and self._streams[0].at_eof():
            self.close()
        if not self._streams:
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        writer.write(request.head + request.body)
        answer, _ = await asyncio.gather(read_answer(reader, request.start[0]), writer.drain())
        if answer.last:
            self.close()
        return answer

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._streams:
            self._streams[1].close()
        self._streams = None


class Proxy:
    """What runs in the proxy's process."""

    def __init__(self, host: str, port: int) -> None:
        self.address = (host, port)
        self.rules: list[LiveRule] = []
        self.log: list[Request] = []

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Answer one client until one of both sides closes."""
        upstream = Upstream(*self.address)
        try:
            while await self.answer(await read_request(reader, writer), writer, upstream):
                await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            upstream.close()
            writer.close()

    async def answer(self, request: Message, writer: StreamWriter, upstream: Upstream) -> bool:
        """Answer one request; whether the connection stays open."""
        method, target = request.start[0], unquote(request.start[1])
        if target == CONTROL:
            writer.write(self.control(request.body))
            return True
        log = self.log
        action = next(
            (live.rule.action for live in self.rules if live.fires(method, target)), Action()
        )
        fault = " ".join(f"{key} {value}" for key, value in action.items())

        await asyncio.sleep(action.get("delay", 0))
        if action.get("when") != "after":
            await carry_out(action)
        if "status" in action or action.get("cut") == "before":
            log.append(Request(method, target, 0, fault))
            if "status" in action:
                writer.write(error_answer(action["status"], method))
            return "status" in action and not request.last

        try:
            answer = await upstream.ask(request)
        except (OSError, EOFError):
            log.append(Request(method, target, 0, fault or "server lost"))
            raise
        if action.get("when") == "after":
            await carry_out(action)
        log.append(Request(method, target, int(answer.start[1]), fault))
        if action.get("cut") == "after":
            return False
        writer.write(answer.head + answer.body[: action.get("cut_body")])
        return not (request.last or answer.last or "cut_body" in action)

    def control(self, body: bytes) -> bytes:
        """Make the changes that a body asks for, and tell how things stand."""
        try:
            change = json.loads(body or b"{}")
            if "rules" in change:
                self.rules = [LiveRule(Rule(**rule)) for rule in change["rules"]]
        except (ValueError, TypeError, re.error) as error:
            return json_answer(400, str(error))
        self.log = change.get("log", self.log)
        return json_answer(200, {"fired": [live.fired for live in self.rules], "log": self.log})


async def carry_out(action: Action) -> None:
    """Kill and run what an action names."""
    for pid in action.get("kill", []):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    if "run" in action:
        process = await asyncio.create_subprocess_shell(
            action["run"], stdin=asyncio.subprocess.DEVNULL
        )
        await process.wait()


async def run_proxy(listener: socket.socket, host: str, port: int) -> None:
    """Serve until killed."""
    server = await asyncio.start_server(Proxy(host, port).serve, sock=listener, limit=1 << 20)
    await server.serve_forever()


def run_server(listener: socket.socket) -> None:
    """Serve S3 until killed."""
    import logging

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        disable_nagle_algorithm = True

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    host, port = listener.getsockname()
    application: Any = DomainDispatcherApplication(create_backend_app)
    make_server(
        host, port, application, threaded=True, request_handler=Handler, fd=listener.fileno()
    ).serve_forever()


def end_with_parent() -> None:
    """End this process when the one that started it is gone."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def main(role: str, descriptor: str, *address: str) -> None:
    """Run as the server or the proxy on a socket that listens already."""
    end_with_parent()
    listener = socket.socket(fileno=int(descriptor))
    if role == "server":
        run_server(listener)
    else:
        asyncio.run(run_proxy(listener, address[0], int(address[1])))


if __name__ == "__main__":
    main(*sys.argv[1:])
