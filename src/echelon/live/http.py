"""HTTP on this machine: JSON documents between an engine, its operators and a paper venue; metrics.

    Server(routes, token, port)          a server on 127.0.0.1; routes: (method, path) → handler
    call(url, method, path, body, …)     one call; `Client` keeps its connection for many

A request is looked at in this order, so that nothing of a stranger is read: it names this machine
(no page in a browser can send it by another name), it has the token, its path is known, it has a
body that is not too large and is a JSON object. Numbers survive exactly: JSON has their shortest
digits.

An error of ours leaves as {"error": text, "kind": class} and is raised by the client again. Where
no answer came, or none of ours, the client raises BrokerError: what was asked may have been done.
"""

from __future__ import annotations

import hmac
import json
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from echelon.config.secrets import is_loopback
from echelon.errors import (
    DataError,
    EchelonError,
    StaleBarsError,
    StoreError,
    UsageError,
    bound_message,
    shorten,
)
from echelon.files import Closing, json_line
from echelon.live.brokers import BrokerError
from echelon.monitoring.metrics import CONTENT_TYPE, Metrics

log = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]
Routes: TypeAlias = Mapping[tuple[str, str], "Handler | Callable[[Mapping[str, Any]], Page]"]

MAX_BODY = 64 * 1024 * 1024
"""Bytes of a request or an answer: bars of some 500,000 symbols."""
_IDLE_SECONDS = 60.0
MOST_CONNECTIONS = 128
"""Above it the oldest is cut off, so that whoever holds many takes neither files nor threads."""
_KINDS: Mapping[str, type[EchelonError]] = {
    kind.__name__: kind for kind in (DataError, StaleBarsError, UsageError, EchelonError)
}
_STATUS: Mapping[type[EchelonError], int] = {
    StaleBarsError: 409,
    DataError: 422,
    UsageError: 400,
    StoreError: 503,
    BrokerError: 503,
}


class Page(NamedTuple):
    """An answer that is no JSON document. kind: its media type"""

    kind: str
    data: bytes


class Server(Closing):
    """A server that runs in threads of its own, until it is closed."""

    def __init__(self, routes: Routes, token: str, port: int) -> None:
        """port: 0 takes any that is free"""
        try:
            self._http = _HTTPServer(("127.0.0.1", port), _Requests)
        except OSError as error:
            raise UsageError(
                f"port {port} of 127.0.0.1 cannot be used ({error.strerror}). Choose another one."
            ) from None
        self._http.routes, self._http.token = dict(routes), token.encode()
        self.port: int = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.05,), name="http", daemon=True
        )
        self._thread.start()

    def wait_for_reader(self, most: float = 60.0) -> None:
        """Wait until who reads regularly has read once more, at most twice as long as usual."""
        now, answered = time.monotonic(), self._http.answered
        with self._http.changed:
            if len(answered) < 2 or now - answered[1] > (
                seconds := min(most, 2.0 * (answered[1] - answered[0]))
            ):
                return
            log.info("waiting for the last scrape, at most %.0f s (Ctrl-C: no longer)", seconds)
            self._http.changed.wait_for(lambda: answered[-1] >= now, seconds)

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        self._http.cut_off()


def metrics_route(metrics: Metrics) -> Routes:
    """Where Prometheus reads."""
    return {("GET", "/metrics"): lambda _: Page(CONTENT_TYPE, metrics.render())}


class _HTTPServer(ThreadingHTTPServer):
    """Knows its connections, so that none is answered after the end."""

    daemon_threads = True
    routes: Routes
    token: bytes

    def __init__(self, *arguments: Any) -> None:  # noqa: ANN401 (those of the base)
        self._connections: dict[Any, None] = {}  # the oldest first
        self.answered: deque[float] = deque(maxlen=2)
        self.changed = threading.Condition()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        self._connections[request] = None
        for oldest in list(self._connections)[:-MOST_CONNECTIONS]:
            self._cut_off(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def note_answer(self, began: float) -> None:
        with self.changed:
            self.answered.append(began)
            self.changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        log.debug("a connection of %s broke off", client_address, exc_info=True)

    def cut_off(self) -> None:
        for connection in list(self._connections):
            self._cut_off(connection)

    def _cut_off(self, connection: Any) -> None:  # noqa: ANN401
        self._connections.pop(connection, None)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "echelon", ""
    timeout = _IDLE_SECONDS
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    server: _HTTPServer

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401 (of the base)
        log.debug(format, *args)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base finds wrong with a request."""
        self._refuse(code, explain or message or "not a request")

    def _answer(self) -> None:
        refused = self._refusal()
        if refused is not None:
            self._refuse(*refused)
            return
        began = time.monotonic()
        try:
            body = self._body()
            self._send(200, self.server.routes[self.command, self.path](body))
            self.wfile.flush()
            self.server.note_answer(began)
        except EchelonError as error:
            self._send_problem(error)
        except Exception:
            log.exception("%s %s failed", self.command, self.path)
            self.close_connection = True  # its body may not have been read to the end
            self._send(500, {"error": "it failed; its log says why", "kind": "bug"})

    def _refusal(self) -> tuple[int, str] | None:
        """(status, why) of a request that is not even read."""
        if not is_loopback(urlsplit(f"//{self.headers.get('Host', '')}").hostname):
            return 403, "only this machine is answered, by its own name"
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        same = hmac.compare_digest(given.encode(), self.server.token)
        if scheme.lower() != "bearer" or not same:
            return 401, "no token, or another one. Send that of ECHELON_TOKEN."
        if (self.command, self.path) not in self.server.routes:
            return 404, f"there is no {self.command} {shorten(self.path, 80)} here"
        size = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not size.isdecimal() or not size.isascii():
            return 411, "say the length of the body"
        if len(size) > 12 or int(size) > MAX_BODY:
            return 413, f"a body of at most {MAX_BODY:,} bytes is read"
        return None

    def _body(self) -> dict[str, Any]:
        """The JSON object that was sent; {}: there is no body."""
        size = int(self.headers.get("Content-Length", "0"))
        data = self.rfile.read(size)
        if len(data) < size:
            self.close_connection = True
            raise UsageError("the body ends too early.")
        try:
            tree = json.loads(data) if data else {}
        except (ValueError, RecursionError):
            tree = None
        if not isinstance(tree, dict):
            raise UsageError("the body is no JSON object. Send one.")
        return tree

    def _send_problem(self, error: EchelonError) -> None:
        status = next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 422)
        kind = next(k.__name__ for k in type(error).__mro__ if k.__name__ in _KINDS)
        self._send(status, {"error": bound_message(str(error)), "kind": kind})

    def _refuse(self, status: int, why: str) -> None:
        """Answer what was not read to its end: the connection is of no use any more."""
        self.close_connection = True
        self._send(status, {"error": shorten(why), "kind": "UsageError"})

    def _send(self, status: int, answer: Mapping[str, Any] | Page) -> None:
        if isinstance(answer, Page):
            kind, data = answer
        else:
            kind, data = "application/json", json_line(answer, allow_nan=True).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)


class Client(Closing):
    """Calls of one server, over a connection that is kept."""

    def __init__(self, url: str, token: str, seconds: float) -> None:
        """url: http://127.0.0.1:PORT; seconds: that an answer is waited for"""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme != "http" or not is_loopback(parts.hostname) or port is None:
            raise UsageError(
                f"{shorten(url, 80)}: expected http://127.0.0.1:PORT. The token is sent in the "
                "clear, so only this machine is called."
            )
        self.url = f"http://127.0.0.1:{port}"
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._http = HTTPConnection("127.0.0.1", port, timeout=seconds)

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The document that is answered."""
        data = None if body is None else json_line(body, allow_nan=True).encode()
        try:
            self._drop_ended()
            self._http.request(method, path, data, self._headers)
            response = self._http.getresponse()
            content = response.read(MAX_BODY + 1)
            tree = json.loads(content)
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            self.close()
            what = shorten(error) or type(error).__name__
            raise BrokerError(f"{self.url}: no answer to {method} {path} ({what})") from error
        if response.status == 200 and isinstance(tree, dict):
            return tree
        why = tree.get("error") if isinstance(tree, dict) else None
        if why is None or response.status >= 500:
            raise BrokerError(f"{self.url}: {method} {path} failed ({shorten(why, 1_000)})")
        raise _KINDS.get(tree.get("kind"), EchelonError)(f"{self.url}: {why}")

    def _drop_ended(self) -> None:
        """A server may have ended a connection that was idle: what is sent on it would be lost."""
        sock = self._http.sock
        if sock is not None and select.select([sock], [], [], 0)[0]:
            self.close()


def call(
    url: str, method: str, path: str, body: Mapping[str, Any] | None, token: str, seconds: float
) -> dict[str, Any]:
    with Client(url, token, seconds) as client:
        return client.call(method, path, body)
