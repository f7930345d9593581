"""Bars of Alpaca's stream and endpoint, from a server on loopback."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_alpaca import KEY, SECRET, FakeAlpaca
from pydantic import SecretStr

from echelon.errors import DataError, UsageError
from echelon.live.alpaca_api import Keys
from echelon.live.feeds import Address, Message

pytest.importorskip("alpaca", reason="alpaca-py is in the extra `live`")
import msgpack
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

from echelon.live.feeds.alpaca import AlpacaFeed, Kind, Service, open_alpaca

KEYS = Keys(SecretStr(KEY), SecretStr(SECRET))
SYMBOLS = ("AAPL", "MSFT")
FIELDS = frozenset({"open", "high", "low", "close", "volume", "factor"})
DAY = date(2026, 1, 15)  # New York is five hours behind
OPEN = datetime(2026, 1, 15, 14, 30, tzinfo=UTC)


class Stream:
    """The websocket: says what `say` is given to whoever is connected and knows the keys."""

    def __init__(self) -> None:
        self.sockets: list[Any] = []
        self.subscribed: list[Any] = []
        self.server = serve(self._talk, "127.0.0.1", 0)
        self.url = f"ws://127.0.0.1:{self.server.socket.getsockname()[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _talk(self, socket: Any) -> None:
        try:
            socket.send(msgpack.packb([{"T": "success", "msg": "connected"}]))
            auth = msgpack.unpackb(socket.recv())
            if (auth["key"], auth["secret"]) != (KEY, SECRET):
                text = f"auth failed: {auth['key']}"
                socket.send(msgpack.packb([{"T": "error", "code": 402, "msg": text}]))
                return
            socket.send(msgpack.packb([{"T": "success", "msg": "authenticated"}]))
            wanted = msgpack.unpackb(socket.recv())
            self.subscribed.append(wanted["bars"])
            socket.send(msgpack.packb([{"T": "subscription", "bars": wanted["bars"]}]))
            self.sockets.append(socket)
            socket.recv()
        except ConnectionClosed:
            return

    def say(self, *bars: Mapping[str, Any]) -> None:
        self.sockets[-1].send(msgpack.packb(list(bars), datetime=True))

    def drop(self) -> None:
        self.sockets.pop().close()

    def close(self) -> None:
        for socket in self.sockets:
            socket.close()
        self.server.shutdown()


class Clock:
    """A clock that stands at a time until it is moved."""

    def __init__(self, at: datetime) -> None:
        self.at = at

    def __call__(self) -> datetime:
        return self.at


class Place:
    """A feed with all that stands around it."""

    def __init__(self, venue: FakeAlpaca, stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ECHELON_ALPACA_URL", venue.url)
        self.venue, self.stream = venue, stream
        self.minutes: list[tuple[str, dict[str, Any]]] = []
        self.days: list[tuple[str, dict[str, Any]]] = []
        self.actions: dict[str, list[dict[str, Any]]] = {}
        self.asked: list[Mapping[str, str]] = []
        self.clock = Clock(OPEN)
        venue.data["/v2/stocks/bars"] = self._bars
        venue.data["/v1/corporate-actions"] = self._actions
        self.feeds: list[AlpacaFeed] = []

    def _bars(self, query: Mapping[str, str]) -> object:
        """Pages of two bars."""
        self.asked.append(query)
        source = self.days if query["timeframe"] == "1Day" else self.minutes
        begin, end = _time(query["start"]), _time(query["end"])
        rows = [(s, b) for s, b in source if begin <= _time(b["t"]) <= end]
        at = int(query.get("page_token", "0"))
        page: dict[str, list[Any]] = {}
        for symbol, bar in rows[at : at + 2]:
            page.setdefault(symbol, []).append(bar)
        more = str(at + 2) if at + 2 < len(rows) else None
        return {"bars": page, "next_page_token": more}

    def _actions(self, query: Mapping[str, str]) -> object:
        chosen = {
            kind: [a for a in items if query["start"] <= a["ex_date"] <= query["end"]]
            for kind, items in self.actions.items()
        }
        return {"corporate_actions": chosen, "next_page_token": None}

    def feed(self, freq: Any = "1min", fields: frozenset[str] = FIELDS, **kind: Any) -> AlpacaFeed:
        service = Service(SYMBOLS, keys=KEYS, seconds=10.0)
        service._stream_url = self.stream.url
        anchors = {symbol: (date(2026, 1, 9), 2.0) for symbol in SYMBOLS}
        feed = AlpacaFeed(
            service,
            Kind(freq, "XNYS", "America/New_York", fields),
            lambda after: anchors,
            settle=15.0,
            now=self.clock,
        )
        self.feeds.append(feed)
        return feed

    def start(self, feed: AlpacaFeed, after: str) -> None:
        """Start, and wait until the stream is there."""
        before = len(self.stream.sockets)
        feed.start({}, np.datetime64(after, "us"))
        wait(lambda: len(self.stream.sockets) > before)

    def caught_up(self, feed: AlpacaFeed, seconds: float = 16.0) -> list[Message]:
        """Messages after what was missed was fetched."""
        assert wait(lambda: feed.poll(0.01) == [] and feed._connected is not None)
        self.clock.at += timedelta(seconds=seconds)
        messages = feed.poll(0.0)
        assert feed._connected is None
        return messages

    def caught_up_after_failures(self, feed: AlpacaFeed, messages: list[Message]) -> bool:
        """The same where the endpoint fails at first; adds what came to `messages`."""
        assert wait(lambda: feed.poll(0.01) == [] and feed._connected is not None)
        while feed._connected is not None:
            self.clock.at += timedelta(seconds=16)
            messages += feed.poll(0.0)
        return True


def wait(said: Callable[[], object], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not said():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)
    return True


def _time(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    return at if at.tzinfo else at.replace(tzinfo=UTC)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    stream = Stream()
    with FakeAlpaca(tmp_path / "v.db") as venue:
        made = Place(venue, stream, monkeypatch)
        yield made
        for feed in made.feeds:
            feed.close()
        stream.close()


def values(close: float, at: datetime | str) -> dict[str, Any]:
    prices = {"o": close - 1, "h": close + 2, "l": close - 3, "c": close, "v": 10.0}
    return {**prices, "n": 3, "vw": close, "t": at}


def streamed(symbol: str, minute: int, close: float = 100.0) -> dict[str, Any]:
    """The bar of the session's minute, counted from 0."""
    at = OPEN + timedelta(minutes=minute)
    return {"T": "b", "S": symbol, **values(close, at)}


def stored(symbol: str, minute: int, close: float = 100.0) -> tuple[str, dict[str, Any]]:
    at = OPEN + timedelta(minutes=minute)
    return symbol, values(close, at.isoformat().replace("+00:00", "Z"))


def brief(messages: list[Message]) -> list[Any]:
    return [
        (m.kind, str(m.time)[11:16], m.body.get("symbol"), m.body.get("close")) for m in messages
    ]


def read(feed: AlpacaFeed, count: int) -> list[Message]:
    messages: list[Message] = []
    if count > 0:
        wait(lambda: messages.extend(feed.poll(0.05)) or len(messages) >= count)
    return messages


def test_minute_bars_come_by_their_end_with_the_exchanges_clock(place: Place) -> None:
    feed = place.feed()
    place.start(feed, "2026-01-14T16:00")
    assert place.caught_up(feed) == []
    place.stream.say(streamed("AAPL", 0, 50.0), streamed("MSFT", 0, 60.0))
    place.stream.say(streamed("AAPL", -1), streamed("AAPL", 390), streamed("TSLA", 1))  # not ours
    place.stream.say(streamed("AAPL", 0, 51.0))  # said again: the first one stands
    place.stream.say(streamed("AAPL", 1, 52.0))
    messages = read(feed, 3)
    assert brief(messages) == [
        ("bar", "09:31", "AAPL", 50.0),
        ("bar", "09:31", "MSFT", 60.0),
        ("bar", "09:32", "AAPL", 52.0),
    ]
    body = messages[0].body
    assert body == {
        "symbol": "AAPL",
        **{"open": 49.0, "high": 52.0, "low": 47.0, "close": 50.0, "volume": 10.0},
        "factor": 2.0,
    }
    offsets = [message.offset for message in messages]
    assert offsets == sorted(set(offsets))
    assert {message.source for message in messages} == set(feed.sources)
    assert place.stream.subscribed == [list(SYMBOLS)]


def test_what_was_missed_is_fetched_before_anything_goes_on(place: Place) -> None:
    place.clock.at = OPEN + timedelta(minutes=4, seconds=20)
    place.minutes = [stored(s, m, 100.0 + m) for s in SYMBOLS for m in range(-5, 5)]
    feed = place.feed()
    place.start(feed, "2026-01-15T09:31")  # the engine has the first bar already
    place.stream.say(streamed("AAPL", 3, 103.0), streamed("AAPL", 4, 104.0))
    messages = place.caught_up(feed, seconds=41.0)  # the fourth minute has ended, and can be had
    messages += read(feed, 10 - len(messages))  # what the stream said may still be on its way
    assert brief(messages) == [
        item
        for m in (2, 3, 4)
        for item in (
            *(("bar", f"09:{30 + m}", symbol, 99.0 + m) for symbol in SYMBOLS),
            ("close", f"09:{30 + m}", None, None),
        )
    ] + [("bar", "09:35", "AAPL", 104.0)]
    assert all(query["feed"] == "iex" for query in place.asked)


def test_a_lost_connection_loses_no_bar_and_uses_none_twice(place: Place) -> None:
    place.clock.at = OPEN
    feed = place.feed()
    place.start(feed, "2026-01-14T16:00")
    assert place.caught_up(feed) == []
    place.stream.say(streamed("AAPL", 0), streamed("MSFT", 0))
    messages = read(feed, 2)
    place.stream.drop()
    place.minutes = [stored(s, m, 100.0 + m) for s in SYMBOLS for m in range(4)]
    place.clock.at = OPEN + timedelta(minutes=3, seconds=30)
    wait(lambda: len(place.stream.subscribed) == 2)
    wait(lambda: len(place.stream.sockets) == 1)
    place.venue.strike("error_before", "drop_before", path="/v2/stocks/bars")
    place.stream.say(streamed("AAPL", 2, 102.0), streamed("AAPL", 3, 103.0))
    assert place.caught_up_after_failures(feed, messages)
    place.stream.say(streamed("MSFT", 3, 103.0))
    missing = 8 - sum(message.kind == "bar" for message in messages)
    messages += read(feed, missing)
    bars = [item for item in brief(messages) if item[0] == "bar"]
    assert sorted(bars) == sorted(
        ("bar", f"09:{31 + m}", symbol, 100.0 + m) for m in range(4) for symbol in SYMBOLS
    )


def test_bars_of_five_minutes_are_made_of_minutes(place: Place) -> None:
    place.clock.at = OPEN + timedelta(minutes=2, seconds=1)
    place.minutes = [stored("AAPL", 0, 50.0), stored("AAPL", 1, 60.0), stored("MSFT", 1, 70.0)]
    feed = place.feed("5min", FIELDS | {"amount"})
    place.start(feed, "2026-01-14T16:00")
    assert place.caught_up(feed) == []  # the bar has begun, and is not over
    place.stream.say(streamed("AAPL", 3, 40.0), streamed("AAPL", 4, 45.0))
    (message,) = read(feed, 1)
    assert brief([message]) == [("bar", "09:35", "AAPL", 45.0)]
    assert message.body["open"] == 49.0
    assert (message.body["high"], message.body["low"]) == (62.0, 37.0)
    assert message.body["volume"] == 40.0
    assert message.body["amount"] == 10.0 * (50.0 + 60.0 + 40.0 + 45.0)
    assert feed.poll(0.05) == []
    place.clock.at = OPEN + timedelta(minutes=5, seconds=16)
    assert brief(read(feed, 1)) == [("bar", "09:35", "MSFT", 70.0)]  # no trade since


def day_bar(symbol: str, day: str, close: float) -> tuple[str, dict[str, Any]]:
    return symbol, values(close, f"{day}T05:00:00Z")


def test_daily_bars_are_fetched_when_the_session_is_over(place: Place) -> None:
    place.days = [
        day_bar(symbol, day, close)
        for day, close in (("2026-01-14", 90.0), ("2026-01-15", 91.0), ("2026-01-16", 92.0))
        for symbol in SYMBOLS
    ]
    place.clock.at = datetime(2026, 1, 15, 21, 0, 5, tzinfo=UTC)  # five seconds behind the close
    feed = place.feed("1d")
    feed.start({}, np.datetime64("2026-01-13", "us"))
    assert brief(read(feed, 3)) == [
        ("bar", "00:00", "AAPL", 90.0),
        ("bar", "00:00", "MSFT", 90.0),
        ("close", "00:00", None, None),
    ]
    assert feed.poll(0.0) == []
    place.clock.at += timedelta(seconds=15)
    messages = read(feed, 3)
    assert {str(m.time)[:10] for m in messages} == {"2026-01-15"}
    place.clock.at = datetime(2026, 1, 16, 21, 1, tzinfo=UTC)
    place.venue.strike("error_before", path="/v2/stocks/bars")
    assert feed.poll(0.0) == []  # tried again
    place.clock.at += timedelta(seconds=3)
    assert {str(m.time)[:10] for m in read(feed, 3)} == {"2026-01-16"}
    place.clock.at = datetime(2026, 1, 18, 21, 1, tzinfo=UTC)  # a Sunday
    assert feed.poll(0.0) == []


def test_factors_follow_splits_and_dividends(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.days = [
        day_bar("AAPL", "2026-01-12", 200.0),
        day_bar("AAPL", "2026-01-13", 50.0),
        day_bar("AAPL", "2026-01-14", 50.0),
        day_bar("AAPL", "2026-01-15", 49.0),
        *(day_bar("MSFT", f"2026-01-{d}", 80.0) for d in range(12, 16)),
    ]
    place.actions = {
        "forward_splits": [
            {"symbol": "AAPL", "ex_date": "2026-01-13", "new_rate": 4, "old_rate": 1},
            {"symbol": "AAPL", "ex_date": "2026-01-09", "new_rate": 7, "old_rate": 1},  # in store
        ],
        "cash_dividends": [{"symbol": "AAPL", "ex_date": "2026-01-15", "rate": 1.0}],
        "stock_dividends": [{"symbol": "MSFT", "ex_date": "2026-01-14", "rate": 0.05}],
        "spin_offs": [{"symbol": "MSFT", "ex_date": "2026-01-15"}],
    }
    place.clock.at = datetime(2026, 1, 15, 21, 1, tzinfo=UTC)
    feed = place.feed("1d")
    feed.start({}, np.datetime64("2026-01-09", "us"))
    factors: dict[str, list[float]] = {}
    for message in read(feed, 12):
        if message.kind == "bar":
            factors.setdefault(message.body["symbol"], []).append(message.body["factor"])
    assert factors["AAPL"] == pytest.approx([2.0, 8.0, 8.0, 8.0 * 50.0 / 49.0])
    assert factors["MSFT"] == pytest.approx([2.0, 2.0, 2.1, 2.1])
    assert "spin_offs on 2026-01-15" in caplog.text


def test_a_split_without_factors_stops_with_a_remedy(place: Place) -> None:
    place.days = [day_bar("AAPL", "2026-01-15", 50.0)]
    place.actions = {
        "cash_dividends": [{"symbol": "AAPL", "ex_date": "2026-01-15", "rate": 1.0}],
    }
    place.clock.at = datetime(2026, 1, 15, 21, 1, tzinfo=UTC)
    feed = place.feed("1d", FIELDS - {"factor"})
    feed.start({}, np.datetime64("2026-01-14", "us"))
    assert "factor" not in read(feed, 2)[0].body
    place.actions["reverse_splits"] = [
        {"symbol": "AAPL", "ex_date": "2026-01-15", "new_rate": 1, "old_rate": 10}
    ]
    again = place.feed("1d", FIELDS - {"factor"})
    again.start({}, np.datetime64("2026-01-14", "us"))
    with pytest.raises(DataError, match="AAPL: reverse_splits on 2026-01-15"):
        again.poll(0.0)


def test_bars_that_are_none_are_refused_and_the_rest_goes_on(place: Place) -> None:
    feed = place.feed()
    place.start(feed, "2026-01-14T16:00")
    place.caught_up(feed)
    odd = streamed("AAPL", 0)
    del odd["c"]
    place.stream.say(odd, {**streamed("AAPL", 0), "o": "many"}, streamed("AAPL", 0))
    messages = read(feed, 3)
    assert [message.kind for message in messages] == ["refused", "refused", "bar"]
    assert messages[0].body["reason"] == "malformed"


def test_an_endpoint_that_talks_nonsense_is_asked_again(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    good = day_bar("AAPL", "2026-01-15", 50.0)
    place.days = [("AAPL", {**good[1], "o": None})]
    place.actions = {"cash_dividends": [{"symbol": "AAPL", "ex_date": "soon"}]}
    place.clock.at = datetime(2026, 1, 15, 21, 1, tzinfo=UTC)
    feed = place.feed("1d")
    feed.start({}, np.datetime64("2026-01-14", "us"))
    assert feed.poll(0.0) == []
    assert "bars that cannot be read" in caplog.text
    place.days = [good]
    place.venue.data["/v1/corporate-actions"] = {"corporate_actions": place.actions}
    place.clock.at += timedelta(seconds=60)
    assert feed.poll(0.0) == []
    assert "corporate actions that cannot be read" in caplog.text
    place.venue.data["/v1/corporate-actions"] = {"corporate_actions": {}}
    place.clock.at += timedelta(seconds=60)
    assert brief(feed.poll(0.0))[0] == ("bar", "00:00", "AAPL", 50.0)


def test_no_log_shows_the_keys(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    feed = place.feed()
    place.start(feed, "2026-01-14T16:00")
    place.stream.drop()
    wait(lambda: len(place.stream.subscribed) == 2)
    place.venue.strike("error_before", path="/v2/stocks/bars")
    place.clock.at += timedelta(seconds=60)
    wait(lambda: feed.poll(0.05) == [] and feed._connected is not None)
    place.clock.at += timedelta(seconds=60)
    wait(lambda: feed.poll(0.05) == [] and "tried again" in caplog.text)
    assert SECRET not in caplog.text
    assert KEY not in caplog.text


def test_what_the_feed_is_not_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle: Any = SimpleNamespace(
        path="b", universe={"timezone": "Asia/Shanghai", "calendar": "XSHG", "freq": "1d"}
    )
    for text, problem in (
        ("alpaca", "Alpaca has US stocks"),
        ("alpaca?feed=otc", "expected alpaca or"),
        ("alpaca?speed=2", "no option 'speed'"),
    ):
        with pytest.raises(UsageError, match=problem):
            open_alpaca(Address.parse(text, {"alpaca": ""}, "--feed"), bundle, Path())
