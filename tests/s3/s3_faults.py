"""The S3 server's process: moto's application inside one that has the faults of its rules.

`python -m tests.s3.s3_faults DESCRIPTOR` serves on a socket that listens already. werkzeug
parses HTTP. A fault decides what becomes of a request, and may close the connection below werkzeug.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import unquote

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Request, Response

from tests.s3.s3_server import CONTROL, PAST_FAULTS, Action, Rule
from tests.s3.s3_server import Request as LoggedRequest

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

ERROR_CODES = {403: "AccessDenied", 404: "NoSuchKey", 500: "InternalError", 503: "SlowDown"}


@dataclass
class LiveRule:
    """A rule, and how often it has matched and fired."""

    rule: Rule
    matched: int = 0
    fired: int = 0
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.rule.seed)
        re.compile(self.rule.path)

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


class FaultyApplication:
    """A WSGI application that has the faults of its rules, around one that has none."""

    def __init__(self, application: WSGIApplication) -> None:
        self.application = application
        self.live_rules: list[LiveRule] = []
        self.log: list[LoggedRequest] = []
        self.lock = threading.Lock()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        target = unquote(environ["REQUEST_URI"])
        if target == CONTROL:
            return self.control(environ, start_response)
        if f"HTTP_{PAST_FAULTS.upper().replace('-', '_')}" in environ:
            return self.application(environ, start_response)
        method = environ["REQUEST_METHOD"]
        return self.answer(method, target, self.action_for(method, target), environ, start_response)

    def action_for(self, method: str, target: str) -> Action:
        """What the first rule that fires does; nothing if none fires."""
        with self.lock:
            for live_rule in self.live_rules:
                if live_rule.fires(method, target):
                    return live_rule.rule.action
        return {}

    def answer(
        self,
        method: str,
        target: str,
        action: Action,
        environ: WSGIEnvironment,
        start_response: StartResponse,
    ) -> Iterable[bytes]:
        """Answer one request, with the fault of an action."""
        fault = " ".join(f"{key} {value}" for key, value in action.items())
        connection: socket.socket = environ["werkzeug.socket"]

        # The request arrives whole before anything happens to it: a client that is killed now has
        # sent it all.
        body = read_body(environ)
        environ["wsgi.input"] = BytesIO(body)
        environ["CONTENT_LENGTH"] = str(len(body))

        time.sleep(action.get("delay", 0))
        if action.get("when") != "after":
            carry_out(action)
        if "status" in action or action.get("cut") == "before":
            self.log.append(LoggedRequest(method, target, 0, fault))
            if "status" not in action:
                cut_connection(connection)
            return error_response(action["status"])(environ, start_response)

        response = Response.from_app(self.application, environ, buffered=True)
        if action.get("when") == "after":
            carry_out(action)
        self.log.append(LoggedRequest(method, target, response.status_code, fault))
        if action.get("cut") == "after":
            cut_connection(connection)
        if "cut_body" in action:
            start_response(response.status, response.get_wsgi_headers(environ).to_wsgi_list())
            return cut_off(response.get_data(), action["cut_body"], connection)
        return response(environ, start_response)

    def control(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Make the changes that a request asks for, and answer with the state of the rules."""
        try:
            change = json.loads(read_body(environ) or b"{}")
            if "rules" in change:
                self.live_rules = [LiveRule(Rule(**rule)) for rule in change["rules"]]
        except (ValueError, TypeError, re.error) as error:
            return Response(str(error), 400)(environ, start_response)
        self.log = change.get("log", self.log)
        state = {"fired": [live_rule.fired for live_rule in self.live_rules], "log": self.log}
        return Response(json.dumps(state))(environ, start_response)


def read_body(environ: WSGIEnvironment) -> bytes:
    """The body of a request, of known length or in chunks."""
    return Request(environ).get_data()


def carry_out(action: Action) -> None:
    """Kill and run what an action names."""
    for pid in action.get("kill", []):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    if "run" in action:
        subprocess.run(action["run"], shell=True, stdin=subprocess.DEVNULL, check=False)


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
    code = ERROR_CODES.get(status, "InternalError")
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>injected</Message></Error>"
    )
    return Response(body, status, content_type="application/xml")


class Handler(WSGIRequestHandler):
    """Sends every packet at once; the second one would wait 40 ms for an acknowledgement."""

    disable_nagle_algorithm = True


def run_server(listener: socket.socket) -> None:
    """Serve S3 until killed."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    host, port = listener.getsockname()
    application = FaultyApplication(DomainDispatcherApplication(create_backend_app))
    make_server(
        host, port, application, threaded=True, request_handler=Handler, fd=listener.fileno()
    ).serve_forever()


def end_with_parent() -> None:
    """End this process when the one that started it is gone."""

    def wait() -> None:
        # Standard input is a pipe from the parent. It ends when the parent does, however it ended.
        sys.stdin.buffer.read()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    run_server(socket.socket(fileno=int(sys.argv[1])))
