"""The S3 server's process: moto's application inside one that has the faults of its rules.

`python -m tests.s3.s3_faults DESCRIPTOR` serves on a socket that listens already. werkzeug
parses HTTP. A fault decides what becomes of a request, and may close the connection below werkzeug.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from io import BytesIO
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import unquote

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.http import http_date
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Request, Response

from tests.s3.s3_server import CONTROL, Action, Rule
from tests.s3.s3_server import Request as LoggedRequest

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

ERROR_CODES = {
    400: "ExpiredToken",
    403: "AccessDenied",
    404: "NoSuchKey",
    500: "InternalError",
    503: "SlowDown",
}


class LiveRule:
    """A rule, and how often it has matched and fired."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.matched, self.fired = rule, 0, 0
        self.random = random.Random(rule.seed)

    def fires(self, method: str, path: str) -> bool:
        """Whether the rule takes this request. Counts it."""
        rule = self.rule
        if rule.method not in (None, method) or not re.search(rule.path, path):
            return False
        self.matched += 1
        if self.matched <= rule.skip or self.fired == rule.count:
            return False
        fires = rule.probability >= 1 or self.random.random() < rule.probability
        self.fired += fires
        return fires

    def action(self) -> Action:
        """What the rule does this time."""
        action = self.rule.action
        if "cut_within" in action:
            return {**action, "cut_at": self.random.randrange(action["cut_within"])}
        return action


class FaultyApplication:
    """A WSGI application that has the faults of its rules, around one that has none."""

    def __init__(self, application: WSGIApplication) -> None:
        self.application = application
        self.live_rules: list[LiveRule] = []
        self.log: list[LoggedRequest] = []
        self.born: dict[str, float] = {}
        """When each object was written that was not there before, by its key."""
        self.lock = threading.Lock()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request, with the fault of the first rule that fires."""
        method, target = environ["REQUEST_METHOD"], unquote(environ["REQUEST_URI"])
        # The request arrives whole before anything happens to it: a client that is killed now has
        # sent it all. Its body may come in chunks.
        body = Request(environ).get_data()
        environ["wsgi.input"] = BytesIO(body)
        environ["CONTENT_LENGTH"] = str(len(body))
        if target == CONTROL:
            return self.changed(**json.loads(body))(environ, start_response)
        with self.lock:
            firing = (rule for rule in self.live_rules if rule.fires(method, target))
            action = next((rule.action() for rule in firing), Action())

        time.sleep(action.get("delay", 0))
        for pid in action.get("kill", []):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        connection: socket.socket = environ["werkzeug.socket"]
        if "status" in action or action.get("cut") == "before":
            self.log.append(LoggedRequest(method, target, 0))
            if "status" not in action:
                cut_connection(connection)
            return error_response(action["status"])(environ, start_response)

        response = Response.from_app(self.application, environ, buffered=True)
        self.log.append(LoggedRequest(method, target, response.status_code))
        self.note_birth(method, target.partition("?")[0].removeprefix("/bucket/"))
        if "stale" in action:
            response.set_data(self.listing_before(response.get_data(as_text=True), action["stale"]))
        if action.get("cut") == "after":
            cut_connection(connection)
        if "body" in action and method != "HEAD":
            response.set_data(action["body"])
        if "cut_at" in action:
            connection.sendall(whole_answer(response, environ)[: action["cut_at"]])
            cut_connection(connection)
        if "cut_body" in action:
            start_response(response.status, response.get_wsgi_headers(environ).to_wsgi_list())
            return cut_off(response.get_data(), action["cut_body"], connection)
        return response(environ, start_response)

    def note_birth(self, method: str, key: str) -> None:
        """Remember when an object appeared."""
        if method == "PUT":
            self.born.setdefault(key, time.monotonic())
        elif method == "DELETE":
            self.born.pop(key, None)
        elif key == "/moto-api/reset":
            self.born.clear()

    def listing_before(self, listing: str, seconds: float) -> str:
        """A listing without what was written first within the last so many seconds."""
        limit = time.monotonic() - seconds
        names = {key for key, born in [*self.born.items()] if born <= limit}
        shown = names | {key[: slash.end()] for key in names for slash in re.finditer("/", key)}
        entry = r"<(Contents|CommonPrefixes)>.*?<(Key|Prefix)>(.*?)</\2>.*?</\1>"
        return re.sub(entry, lambda m: m[0] if m[3] in shown else "", listing, flags=re.DOTALL)

    def changed(self, rules: list[dict] | None = None, log: list | None = None) -> Response:
        """Replace rules and log where a request asks for it, and answer with their state."""
        if rules is not None:
            self.live_rules = [LiveRule(Rule(**rule)) for rule in rules]
        self.log = self.log if log is None else log
        fired = [live_rule.fired for live_rule in self.live_rules]
        return Response(json.dumps({"fired": fired, "log": self.log}))


def whole_answer(response: Response, environ: WSGIEnvironment) -> bytes:
    """An answer as it goes over the wire. That to HEAD ends with its headers."""
    lines = [f"HTTP/1.1 {response.status}", "Server: moto", f"Date: {http_date()}"]
    lines += [f"{name}: {value}" for name, value in response.get_wsgi_headers(environ)]
    head = "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1")
    return head if environ["REQUEST_METHOD"] == "HEAD" else head + response.get_data()


def cut_connection(connection: socket.socket) -> NoReturn:
    """Close a connection without an answer. werkzeug takes the error for a client that left."""
    connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError("cut on purpose")


def cut_off(body: bytes, length: int, connection: socket.socket) -> Iterator[bytes]:
    """The first bytes of a body, after which the connection is closed."""
    yield body[:length]
    connection.shutdown(socket.SHUT_RDWR)


def error_response(status: int) -> Response:
    """An error as S3 words it."""
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{ERROR_CODES[status]}</Code><Message>injected</Message></Error>"
    )
    return Response(body, status, content_type="application/xml")


class Handler(WSGIRequestHandler):
    """Sends every packet at once; the second one would wait 40 ms for an acknowledgement."""

    disable_nagle_algorithm = True


def end_with_parent() -> None:
    """Wait for the end of standard input: a pipe from the parent, which ends however it ends."""
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    listener = socket.socket(fileno=int(sys.argv[1]))
    host, port = listener.getsockname()
    faulty = FaultyApplication(DomainDispatcherApplication(create_backend_app))
    options = {"threaded": True, "request_handler": Handler, "fd": listener.fileno()}
    make_server(host, port, faulty, **options).serve_forever()
