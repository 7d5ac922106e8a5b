"""An S3 server with bad days: a proxy before a real one, which does to each request what a script says.

Not a test itself. What it can do to a request:

    "busy"     503 SlowDown, not passed on
    "denied"   403 AccessDenied, not passed on
    "stall"    passed on, answered after `stall_seconds`
    "failed"   passed on, then answered by a 500: done, though it says that it was not
    "reset"    passed on, then the connection is reset without an answer
    "cut"      passed on, the connection closed after half of the announced body
    "short"    passed on, half of the body announced and sent, as if that were all
"""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

# (method, how many of that method came before) -> what to do to it; None: nothing.
Script = Callable[[str, int], str | None]

_REFUSALS = {"busy": (503, "SlowDown"), "denied": (403, "AccessDenied")}
_HOP_HEADERS = ("connection", "content-length", "keep-alive", "server", "date", "transfer-encoding")


def first(method: str, *kinds: str) -> Script:
    """Do these to the first requests of a method, one after the other."""
    return lambda seen, n: kinds[n] if seen == method and n < len(kinds) else None


def every(period: int, kind: str) -> Script:
    """Do this to every so many-th request of each method."""
    return lambda _, n: kind if n % period == period - 1 else None


class SlowS3:
    """Passes requests on to a server at an endpoint; use it in a `with`.

    Attributes:
        seen: the methods of all requests since the script was set.
        stall_seconds: how long a stall lasts.
    """

    def __init__(self, endpoint: str) -> None:
        self._address = urlsplit(endpoint).netloc
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._script: Script = lambda method, n: None
        self.seen: list[str] = []
        self.stall_seconds = 10.0
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy._answer(self)

            do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

            def log_message(self, *arguments: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *arguments: object) -> None:
                pass  # a client that gave up a request closes its connection

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> SlowS3:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def follow(self, script: Script) -> None:
        """From now on do to each request what the script says; counting begins anew."""
        with self._lock:
            self._script, self.seen = script, []

    def _next(self, method: str) -> str | None:
        with self._lock:
            kind = self._script(method, self.seen.count(method))
            self.seen.append(method)
        return kind

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        kind = self._next(request.command)
        if kind in _REFUSALS:
            _refuse(request, *_REFUSALS[kind])
            return
        upstream = http.client.HTTPConnection(self._address, timeout=30)
        try:
            upstream.request(request.command, request.path, body, dict(request.headers.items()))
            answer = upstream.getresponse()
            data = answer.read()
        finally:
            upstream.close()
        if kind == "stall":
            self._ends.wait(self.stall_seconds)
        if kind == "failed":
            _refuse(request, 500, "InternalError")
        elif kind == "reset":
            _reset(request)
        else:
            _pass_on(request, answer, data, kind)


def _refuse(request: BaseHTTPRequestHandler, status: int, code: str) -> None:
    data = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    request.send_response(status)
    request.send_header("Content-Length", str(len(data)))
    request.end_headers()
    request.wfile.write(data)


def _reset(request: BaseHTTPRequestHandler) -> None:
    request.close_connection = True
    now = struct.pack("ii", 1, 0)  # without lingering: closing sends a reset
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
    request.rfile.close()
    request.connection.close()


def _pass_on(
    request: BaseHTTPRequestHandler,
    answer: http.client.HTTPResponse,
    data: bytes,
    kind: str | None,
) -> None:
    half = data[: len(data) // 2]
    announced = half if kind == "short" else data
    request.send_response(answer.status)
    for name, value in answer.getheaders():
        if name.lower() not in _HOP_HEADERS:
            request.send_header(name, value)
    if answer.status not in (204, 304):
        request.send_header("Content-Length", str(len(announced)))
    request.end_headers()
    if kind == "cut":
        request.close_connection = True
    request.wfile.write(half if kind in ("cut", "short") else data)
