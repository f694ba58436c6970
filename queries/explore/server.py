"""The explorer's server: a page, and answers for whoever has the token.

A page of another site cannot ask: the token is in the fragment of the address, which browsers send
nowhere, the page keeps it for its own host and port, and every request says by its Host and Origin
which page it comes from.
"""

import asyncio
import contextlib
import errno
import ipaddress
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import webbrowser
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

from aiohttp import web

from headcount.queries.explore.query_engine import Engine
from headcount.queries.open.limits import spill_directory
from headcount.schemas.errors import HeadcountError, QueryError, printable
from headcount.schemas.packages import PACKAGE
from headcount.schemas.process import UNENDING

PAGE = PACKAGE / "queries" / "page" / "explore"
SHARED_PAGE = PACKAGE / "queries" / "page" / "shared"  # shared with the report

MOST_BYTES = 256 * 1024  # bytes of a request
ANSWERING_SECONDS = 0.5  # in which open requests get their answers when the server ends
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that end the server

LOOPBACK = "127.0.0.1"
LOCAL_NAMES = frozenset({LOOPBACK, "localhost", "::1"})
"""Names of this machine that lead nowhere else. Another site cannot be reached under them."""

TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
}
"""Types of the page's files."""

HEADERS = {
    # Nothing but our own files and answers. No script or style in the markup.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Guard:
    """Who may ask."""

    token: str
    host: str  # the address that the server listens at

    def is_known_host(self, header: str | None) -> bool:
        """Whether a request was sent to one of our names, at whatever port.

        A port may differ behind `ssh -L`. A name that is not ours may have been pointed here by
        another site, to read the answers as its own.
        """
        name = _host_name(f"http://{header}") if header else None
        if name is None:
            return False
        if name in LOCAL_NAMES or name == self.host:
            return True
        if self.host in LOCAL_NAMES:
            return False
        # Who opened the port to others may use any address of the machine, and its name.
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in {socket.gethostname().lower(), socket.getfqdn().lower()}
        return True

    def refusal(self, request: web.Request) -> tuple[int, str] | None:
        """Why a request is refused, with its status. None if it is not."""
        host = request.headers.get("Host")
        if not self.is_known_host(host):
            return 421, "this address is not one of the explorer's"
        origin = request.headers.get("Origin")
        if origin is not None and origin != f"http://{host}":
            return 403, "the request comes from another site"
        if request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            return 403, "the request comes from another site"
        return None

    def has_token(self, request: web.Request) -> bool:
        """Whether a request has the token."""
        header = request.headers.get("Authorization", "")
        # In constant time, so that nobody finds the token letter by letter.
        given = header.encode("utf-8", "surrogateescape")
        return secrets.compare_digest(given, f"Bearer {self.token}".encode())


def make_app(engine: Engine, guard: Guard) -> web.Application:
    """The application: the files of the page, and one address for queries."""
    files = {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for folder in (SHARED_PAGE, PAGE)
        for file in folder.rglob("*.*")
        if file.suffix in TYPES
    }
    files["index.html"] = files["index.html"].replace(b"<!-- page.html -->", files["page.html"])

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        response: web.StreamResponse
        refusal = guard.refusal(request)
        try:
            response = _refused(*refusal) if refusal else await handler(request)
        except web.HTTPException as error:
            response = _refused(error.status, error.text or error.reason)
        except Exception as error:
            # A mistake of ours: the page says it in one line, and the server goes on.
            response = _refused(500, f"{type(error).__name__}: {error}".partition("\n")[0])
        response.headers.update(HEADERS)
        # Names the library and its version, which nobody needs.
        response.headers["Server"] = "headcount"
        return response

    async def page(request: web.Request) -> web.Response:
        name = request.match_info.get("name") or "index.html"
        # Only names that were listed at the start: no path of a request is ever opened.
        if name not in files:
            raise web.HTTPNotFound(text=f"the page has no file {name!r}")
        return web.Response(
            body=files[name], content_type=TYPES[Path(name).suffix], charset="utf-8"
        )

    async def ask(request: web.Request) -> web.Response:
        if not guard.has_token(request):
            return _refused(
                401,
                "the token is missing, or of an explorer that has ended: paste the address that "
                "headcount explore printed into the address bar of this tab",
            )
        if request.content_type != "application/json":
            return _refused(415, "expected application/json")
        try:
            answer = await engine.ask(await request.read())
        except HeadcountError as error:
            return _refused(400, str(error))
        return web.Response(body=answer, content_type="application/octet-stream")

    app = web.Application(middlewares=[guarded], client_max_size=MOST_BYTES)
    app.router.add_post("/ask", ask)
    app.router.add_get("/", page)
    app.router.add_get("/{name:.+}", page)
    return app


def _refused(status: int, why: str) -> web.Response:
    body = json.dumps({"error": printable(why)})
    return web.Response(status=status, text=body, content_type="application/json")


def serve(
    engine: Engine, host: str, port: int, tell: Callable[[str], None], open_browser: bool
) -> None:
    """Serve the page until a signal ends the command."""
    guard = Guard(secrets.token_urlsafe(24), host)
    number = asyncio.run(_serve(engine, guard, port, tell, open_browser))
    # Commands say how they ended in one place.
    signal.raise_signal(number)


async def _serve(
    engine: Engine, guard: Guard, port: int, tell: Callable[[str], None], open_browser: bool
) -> signal.Signals:
    """Serve until a signal comes, and return it."""
    # aiohttp would write a stack trace of every malformed request: nobody reads this log.
    silent = logging.getLogger("headcount.explore")
    silent.addHandler(logging.NullHandler())
    silent.propagate = False
    # A query whose asker is gone is cancelled.
    runner = web.AppRunner(
        make_app(engine, guard),
        handler_cancellation=True,
        access_log=None,
        logger=silent,
        shutdown_timeout=ANSWERING_SECONDS,
    )
    await runner.setup()
    try:
        address = f"{await _listen(runner, guard.host, port)}#{guard.token}"
        # At its end the server waits for no query, file or model: it only reads.
        UNENDING[engine] = partial(shutil.rmtree, spill_directory(os.getpid()), ignore_errors=True)
        preparing = asyncio.create_task(engine.prepare())
        tell(address)
        if open_browser:
            Thread(target=_open_browser, args=[address], daemon=True).start()
        number = await _signal()
        preparing.cancel()
        return number
    finally:
        engine.close()
        await runner.cleanup()


def _open_browser(address: str) -> None:
    # A browser that is missing or does not start is no reason to stop.
    with contextlib.suppress(webbrowser.Error, OSError):
        webbrowser.open(address)


async def _listen(runner: web.AppRunner, host: str, port: int) -> str:
    """Listen, and return the address of the page."""
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = f"--port {port}: is taken by another program; --port 0 takes a free one"
        elif error.errno == errno.EACCES:
            why = f"--port {port}: needs rights that you do not have; --port 0 takes a free one"
        else:
            reason = os.strerror(error.errno).lower() if error.errno else error.strerror
            why = f"--host {host}: cannot be listened at ({reason}); {LOOPBACK} always can"
        raise QueryError(why) from None
    # With --port 0 the system has chosen one.
    _, own_port, *_ = runner.addresses[0]
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{own_port}/"


async def _signal() -> signal.Signals:
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()

    def receive(number: signal.Signals) -> None:
        # A second signal may come while the first is obeyed.
        if not received.done():
            received.set_result(number)

    # The handlers of the command come back: it says how it ended.
    previous = {number: signal.getsignal(number) for number in ENDING}
    for number in ENDING:
        loop.add_signal_handler(number, receive, number)
    try:
        return await received
    finally:
        for number, handler in previous.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _host_name(address: str) -> str | None:
    """The name in an address, in lower case. None if it is not an address."""
    try:
        parts = urlsplit(address)
        # A port that is not a number is found only here.
        _ = parts.port
    except ValueError:
        return None
    if parts.username is not None or parts.path or parts.query or parts.fragment:
        return None
    return parts.hostname
