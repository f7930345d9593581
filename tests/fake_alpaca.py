"""A venue that speaks as Alpaca's trading API does, on loopback, with faults and a book of its own.

    python -m tests.fake_alpaca --book BOOK.db --port 0 --seed 1 --rates '{"drop_after": 0.1}'

prints its URL and serves until it is killed; `FakeAlpaca(book)` does the same in a thread. The book
is a SQLite file that outlives the process: every order that was ever taken, by client_order_id, and
every POST that asked for one. What a venue must refuse (a second order with an id) it refuses, and
`state()["duplicates"]` counts ids with more than one order all the same: it must be 0.

A fault strikes a request: by script (`strike`), else by seeded probability (`rates`):

    drop_before  connection closed, nothing done      drop_after  done, then closed, no answer
    error_before 503, nothing done                    error_after done, then 504
    hang_before  no answer for `hang` seconds         hang_after  done, then no answer for so long
    throttle     429, nothing done                    reject      403 of an order, nothing done
    replay       done twice, as a proxy that tries again; the second answer is given
    garbage      done, answered by a page that is no JSON
    cut          done, the answer ends in the middle
    slow         done and answered after `delay` seconds
    late         fills are not listed yet (of activities only), once

`fill`: at_once; parts (half now, the rest when the order has been asked for twice); hold (until
`settle`). Market orders fill at `prices` (default 100). GET /fake/state and POST /fake/do
({"strike": […], "prices": {…}, "settle": true, …}) are for tests and need no keys.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sqlite3
import sys
import threading
import time
import urllib.request
import uuid
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

KEY, SECRET = "PKFAKEKEY0123456789", "fakeSECRETfakeSECRETfakeSECRET0123456789"
FAULTS = (
    *("drop_before", "drop_after", "error_before", "error_after", "hang_before", "hang_after"),
    *("throttle", "reject", "replay", "garbage", "cut", "slow", "late"),
)
_TABLES = """
CREATE TABLE IF NOT EXISTS orders (
    n INTEGER PRIMARY KEY, id TEXT NOT NULL, client_id TEXT NOT NULL, symbol TEXT, side TEXT,
    qty REAL, tif TEXT, filled REAL DEFAULT 0, status TEXT, at TEXT, polls INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS posts (n INTEGER PRIMARY KEY, client_id TEXT, answer INTEGER);
CREATE TABLE IF NOT EXISTS fills (
    n INTEGER PRIMARY KEY, id TEXT UNIQUE, order_id TEXT, symbol TEXT, side TEXT, qty REAL,
    price REAL, cum REAL, leaves REAL, at TEXT);
CREATE TABLE IF NOT EXISTS cash (n INTEGER PRIMARY KEY CHECK (n = 1), cash REAL);
"""
_OPEN = ("accepted", "partially_filled", "new")


class Answer(Exception):
    """What a request gets when the venue says no."""

    def __init__(self, status: int, code: int, message: str) -> None:
        self.status, self.body = status, {"code": code, "message": message}
        super().__init__(message)


class Book:
    """Orders, fills and cash, in a SQLite file."""

    def __init__(self, path: Path, cash: float) -> None:
        self.db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self.db.row_factory = sqlite3.Row
        self.db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + _TABLES)
        self.db.execute("INSERT OR IGNORE INTO cash VALUES (1, ?)", (cash,))
        self.lock = threading.RLock()
        self.fill = "at_once"
        self.prices: dict[str, float] = {}
        self.blocked: set[str] = set()  # symbols whose orders are refused

    def rows(self, text: str, *values: object) -> list[sqlite3.Row]:
        return self.db.execute(text, values).fetchall()

    def cash(self) -> float:
        return float(self.rows("SELECT cash FROM cash")[0]["cash"])

    def positions(self) -> dict[str, float]:
        held: dict[str, float] = {}
        for row in self.rows("SELECT symbol, side, qty FROM fills ORDER BY n"):
            sign = 1.0 if row["side"] == "buy" else -1.0
            held[row["symbol"]] = round(held.get(row["symbol"], 0.0) + sign * row["qty"], 9)
        return {symbol: count for symbol, count in sorted(held.items()) if count}

    def place(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Take an order, or say no as the venue does."""
        client, symbol = str(body["client_order_id"]), str(body["symbol"])
        status = 200
        try:
            with self.lock:
                return self._place(body, client, symbol)
        except Answer as no:
            status = no.status
            raise
        finally:
            self.db.execute("INSERT INTO posts (client_id, answer) VALUES (?, ?)", (client, status))

    def _place(self, body: Mapping[str, Any], client: str, symbol: str) -> dict[str, Any]:
        qty, side, tif = float(body["qty"]), body["side"], body["time_in_force"]
        if symbol in self.blocked:
            raise Answer(422, 42210000, f'asset "{symbol}" is not tradable')
        if qty != int(qty) and tif != "day":
            raise Answer(422, 42210000, "fractional orders must be DAY orders")
        # Buying power first, then the id, as the venue may do.
        if side == "buy" and qty * self.prices.get(symbol, 100.0) > self.cash():
            raise Answer(403, 40310000, "insufficient buying power")
        if side == "sell" and qty > self.positions().get(symbol, 0.0) + 1e-12:
            raise Answer(403, 40310000, f"insufficient qty available for order ({symbol})")
        if self.rows("SELECT 1 FROM orders WHERE client_id = ?", client):
            raise Answer(422, 40010001, "client_order_id must be unique")
        name = str(uuid.uuid5(uuid.NAMESPACE_URL, client))
        self.db.execute(
            "INSERT INTO orders (id, client_id, symbol, side, qty, tif, status, at) "
            "VALUES (?, ?, ?, ?, ?, ?, 'accepted', ?)",
            (name, client, symbol, side, qty, tif, _now()),
        )
        if self.fill != "hold":
            self.trade(name, qty if self.fill == "at_once" else qty / 2.0)
        return self.describe(self.order("id", name))

    def trade(self, name: str, qty: float) -> None:
        """Fill so much of an order."""
        with self.lock:
            row = self.order("id", name)
            price = self.prices.get(row["symbol"], 100.0)
            total = row["filled"] + qty
            at = _now()
            n = self.rows("SELECT COUNT(*) AS n FROM fills")[0]["n"]
            stamp = at[:23].translate({ord(c): None for c in "-T:."})
            activity = f"{stamp}::{uuid.uuid5(uuid.NAMESPACE_URL, f'{name}/{n}')}"
            self.db.execute("BEGIN")
            self.db.execute(
                "INSERT INTO fills (id, order_id, symbol, side, qty, price, cum, leaves, at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    activity,
                    name,
                    row["symbol"],
                    row["side"],
                    qty,
                    price,
                    total,
                    row["qty"] - total,
                    at,
                ),
            )
            sign = -1.0 if row["side"] == "buy" else 1.0
            self.db.execute("UPDATE cash SET cash = cash + ?", (sign * qty * price,))
            status = "filled" if total >= row["qty"] - 1e-12 else "partially_filled"
            self.db.execute(
                "UPDATE orders SET filled = ?, status = ? WHERE id = ?", (total, status, name)
            )
            self.db.execute("COMMIT")

    def order(self, column: str, value: str) -> sqlite3.Row:
        rows = self.rows(f"SELECT * FROM orders WHERE {column} = ?", value)
        if not rows:
            raise Answer(404, 40410000, f"order not found for {value}")
        return rows[0]

    def ask(self, column: str, value: str) -> dict[str, Any]:
        """An order that somebody asks for, which may move it on."""
        with self.lock:
            row = self.order(column, value)
            self.db.execute("UPDATE orders SET polls = polls + 1 WHERE n = ?", (row["n"],))
            if self.fill == "parts" and row["status"] == "partially_filled" and row["polls"] >= 1:
                self.trade(row["id"], row["qty"] - row["filled"])
            return self.describe(self.order(column, value))

    def settle(self) -> None:
        """Fill all that is open."""
        for row in self.rows("SELECT * FROM orders WHERE status IN (?, ?, ?)", *_OPEN):
            self.trade(row["id"], row["qty"] - row["filled"])

    def finish(self, client: str, status: str) -> None:
        """End an order as cancelled, expired, rejected … by the venue."""
        self.db.execute("UPDATE orders SET status = ? WHERE client_id = ?", (status, client))

    def cancel(self, name: str) -> None:
        with self.lock:
            row = self.order("id", name)
            if row["status"] not in _OPEN:
                raise Answer(422, 42210000, f"order is already in {row['status']!r} state")
            self.db.execute("UPDATE orders SET status = 'canceled' WHERE id = ?", (name,))

    def list_orders(self, query: Mapping[str, str]) -> list[dict[str, Any]]:
        direction = "ASC" if query.get("direction") == "asc" else "DESC"
        where = "status IN ('accepted', 'partially_filled', 'new')"
        where = where if query.get("status", "open") == "open" else "1"
        rows = self.rows(
            f"SELECT * FROM orders WHERE {where} AND at > ? ORDER BY n {direction} LIMIT ?",
            *(query.get("after", "").replace("+00:00", ""), int(query.get("limit", "50"))),
        )
        return [self.ask("id", row["id"]) for row in rows]

    def activities(self, query: Mapping[str, str]) -> list[dict[str, Any]]:
        rows = self.rows("SELECT * FROM fills ORDER BY n")
        ids = [row["id"] for row in rows]
        token = query.get("page_token")
        if token is not None:
            if token not in ids:
                raise Answer(422, 40010001, "page_token is invalid")
            rows = rows[ids.index(token) + 1 :]
        after = query.get("after", "").replace("Z", "")
        rows = [row for row in rows if row["at"] > after]
        return [_activity(row) for row in rows[: int(query.get("page_size", "100"))]]

    def describe(self, row: sqlite3.Row) -> dict[str, Any]:
        return {
            "id": row["id"],
            "client_order_id": row["client_id"],
            "created_at": f"{row['at']}Z",
            "submitted_at": f"{row['at']}Z",
            "symbol": row["symbol"],
            "side": row["side"],
            "qty": repr(row["qty"]),
            "filled_qty": repr(row["filled"]),
            "type": "market",
            "time_in_force": row["tif"],
            "status": row["status"],
        }

    def state(self) -> dict[str, Any]:
        """What a test asks: orders by client id, how often each was posted, duplicates."""
        orders: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows("SELECT * FROM orders ORDER BY n"):
            orders.setdefault(row["client_id"], []).append(self.describe(row))
        posts = Counter(row["client_id"] for row in self.rows("SELECT client_id FROM posts"))
        fills = self.rows("SELECT * FROM fills ORDER BY n")
        return {
            "orders": {client: listed[0] for client, listed in orders.items()},
            "posts": dict(posts),
            "duplicates": sum(len(listed) - 1 for listed in orders.values()),
            "fills": [_activity(row) for row in fills],
            "cash": self.cash(),
            "positions": self.positions(),
        }


def _activity(row: sqlite3.Row) -> dict[str, Any]:
    return {
        "id": row["id"],
        "activity_type": "FILL",
        "transaction_time": f"{row['at']}Z",
        "type": "fill" if row["leaves"] <= 1e-12 else "partial_fill",
        "price": repr(row["price"]),
        "qty": repr(row["qty"]),
        "side": row["side"],
        "symbol": row["symbol"],
        "leaves_qty": repr(row["leaves"]),
        "order_id": row["order_id"],
        "cum_qty": repr(row["cum"]),
        "order_status": "filled",
    }


def _now() -> str:
    return datetime.now(UTC).replace(tzinfo=None).isoformat(timespec="microseconds")


class FakeAlpaca:
    """The venue, served from a thread; `url` is what ECHELON_ALPACA_URL takes."""

    def __init__(
        self,
        book: Path,
        *,
        port: int = 0,
        rates: Mapping[str, float] | None = None,
        seed: int = 0,
        cash: float = 1_000_000.0,
        fill: str = "at_once",
        hang: float = 1.0,
        delay: float = 0.05,
    ) -> None:
        self.book = Book(book, cash)
        self.book.fill = fill
        self.hang, self.delay = hang, delay
        self.struck: Counter[str] = Counter()
        self.data: dict[str, Any] = {}  # path → answer or callable, for market data
        self.requests: list[tuple[str, str]] = []
        self._rates, self._rng = dict(rates or {}), random.Random(seed)
        unknown = set(self._rates) - set(FAULTS)
        assert not unknown, unknown
        self._script: deque[tuple[str, str]] = deque()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._server = _Server(("127.0.0.1", port), _handler(self))
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def strike(self, *faults: str, path: str = "") -> None:
        """Let these faults strike the next requests whose "METHOD path" holds `path`."""
        assert set(faults) <= {*FAULTS, "none"}, faults
        with self._lock:
            self._script.extend((path, fault) for fault in faults)

    def next_fault(self, request: str) -> str:
        """The fault of a request; "none": none."""
        with self._lock:
            for n, (path, fault) in enumerate(self._script):
                if path in request:
                    del self._script[n]
                    self.struck[fault] += 1
                    return fault
            draw = self._rng.random()
            for fault, rate in self._rates.items():
                draw -= rate
                if draw < 0.0:
                    self.struck[fault] += 1
                    return fault
        return "none"

    def wait(self, seconds: float) -> None:
        self._stopping.wait(seconds)

    def do(self, deeds: Mapping[str, Any]) -> dict[str, Any]:
        """What POST /fake/do asks for."""
        for fault in deeds.get("strike", ()):
            self.strike(fault)
        if "rates" in deeds:
            self._rates = dict(deeds["rates"])
        self.book.prices.update(deeds.get("prices", {}))
        self.book.fill = deeds.get("fill", self.book.fill)
        if deeds.get("settle"):
            self.book.settle()
        return self.state()

    def state(self) -> dict[str, Any]:
        return {**self.book.state(), "struck": dict(self.struck)}

    def close(self) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()
        with self.book.lock:
            self.book.db.close()

    def __enter__(self) -> FakeAlpaca:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: object) -> None:
        """A client that has gone is no news here."""


def _handler(fake: FakeAlpaca) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            self._serve("GET")

        def do_POST(self) -> None:
            self._serve("POST")

        def do_DELETE(self) -> None:
            self._serve("DELETE")

        def _serve(self, method: str) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            parts = urlsplit(self.path)
            query = dict(parse_qsl(parts.query))
            if parts.path.startswith("/fake/"):
                answer = fake.do(body) if method == "POST" else fake.state()
                self._answer(200, answer)
                return
            request = f"{method} {parts.path}"
            fake.requests.append((method, self.path))
            keys = self.headers.get("APCA-API-KEY-ID"), self.headers.get("APCA-API-SECRET-KEY")
            if keys != (KEY, SECRET):
                echo = f"request is not authorized: {keys[0]} {keys[1]}"  # as a careless server may
                self._answer(401, {"code": 40110000, "message": echo})
                return
            fault = fake.next_fault(request)
            if fault == "late" and "activities" not in request:
                fault = "none"
            if fault == "reject" and request != "POST /v2/orders":
                fault = "none"
            if self._strikes_before(fault):
                return
            status, answer = self._do(method, parts.path, query, body)
            if fault == "replay":
                status, answer = self._do(method, parts.path, query, body)
            self._strikes_after(fault, status, answer)

        def _strikes_before(self, fault: str) -> bool:
            if fault == "drop_before":
                self._drop()
            elif fault == "hang_before":
                fake.wait(fake.hang)
                self._drop()
            elif fault == "error_before":
                self._answer(503, {"message": "service unavailable"})
            elif fault == "throttle":
                self._answer(429, {"message": "too many requests."})
            elif fault == "reject":
                self._answer(403, {"code": 40310000, "message": "rejected by the fake"})
            elif fault == "late":
                self._answer(200, [])
            else:
                return False
            return True

        def _strikes_after(self, fault: str, status: int, answer: object) -> None:
            if fault == "drop_after":
                self._drop()
            elif fault == "hang_after":
                fake.wait(fake.hang)
                self._drop()
            elif fault == "error_after":
                self._answer(504, {"message": "gateway timeout"})
            elif fault == "garbage":
                self._write(200, b"<html>Welcome to the hotel's network</html>", 43)
            elif fault == "cut":
                data = json.dumps(answer).encode()
                self._write(status, data[: len(data) // 2], len(data) + 1)
                self._drop()
            else:
                if fault == "slow":
                    fake.wait(fake.delay)
                self._answer(status, answer)

        def _do(
            self, method: str, path: str, query: Mapping[str, str], body: Mapping[str, Any]
        ) -> tuple[int, object]:
            try:
                return _route(fake, method, path, query, body)
            except Answer as no:
                return no.status, no.body

        def _answer(self, status: int, answer: object) -> None:
            data = b"" if answer is None else json.dumps(answer).encode()
            self._write(status, data, len(data))

        def _write(self, status: int, data: bytes, length: int) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(data)

        def _drop(self) -> None:
            self.close_connection = True
            with suppress(OSError):  # the client went first
                self.connection.shutdown(socket.SHUT_RDWR)

    return Handler


def _route(
    fake: FakeAlpaca, method: str, path: str, query: Mapping[str, str], body: Mapping[str, Any]
) -> tuple[int, object]:
    book = fake.book
    if path in fake.data:
        answer = fake.data[path]
        return 200, answer(query) if callable(answer) else answer
    if path == "/v2/orders":
        return 200, book.place(body) if method == "POST" else book.list_orders(query)
    if path == "/v2/orders:by_client_order_id":
        return 200, book.ask("client_id", query["client_order_id"])
    if path.startswith("/v2/orders/"):
        name = path.rpartition("/")[2]
        if method == "DELETE":
            book.cancel(name)
            return 204, None
        return 200, book.ask("id", name)
    with book.lock:
        if path == "/v2/account":
            return 200, {"id": "0", "cash": repr(book.cash()), "currency": "USD"}
        if path == "/v2/positions":
            held = book.positions()
            return 200, [{"symbol": name, "qty": repr(count)} for name, count in held.items()]
        if path == "/v2/account/activities/FILL":
            return 200, book.activities(query)
    raise Answer(404, 40410000, f"endpoint not found: {method} {path}")


def call(url: str, deeds: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The state of a fake in another process, after what it was asked to do."""
    data = None if deeds is None else json.dumps(deeds).encode()
    path = "/fake/state" if deeds is None else "/fake/do"
    with urllib.request.urlopen(url + path, data, timeout=10.0) as answer:
        state: dict[str, Any] = json.load(answer)
    return state


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A fake Alpaca trading server.")
    parser.add_argument("--book", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rates", type=json.loads, default={})
    parser.add_argument("--cash", type=float, default=1_000_000.0)
    parser.add_argument("--fill", choices=("at_once", "parts", "hold"), default="at_once")
    parser.add_argument("--hang", type=float, default=1.0)
    given = parser.parse_args(arguments)
    with FakeAlpaca(**vars(given)) as fake:
        sys.stdout.write(f"{fake.url}\n")
        sys.stdout.flush()
        while True:
            time.sleep(60.0)


if __name__ == "__main__":
    main()
