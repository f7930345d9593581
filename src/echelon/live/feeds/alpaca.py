"""`alpaca[?feed=sip]`: Alpaca's bars of US stocks, by websocket and by the historical endpoint.

1. Bars within the day: the stream gives minute bars, from a thread of its own that connects again
   whenever the connection is lost; bars of 5 minutes are made of them.
2. The stream has no offsets and says nothing twice. After every connection, so after a restart too,
   bars of the stream wait until those since the last one were fetched from the historical
   endpoint, which needs a while until it has the newest. A bar that came both ways counts once.
3. Daily bars: those of the stream are of the day so far, without a word when one is final. So they
   are fetched, once the session has been over for a while.
4. A time that was fetched whole ends with `close`; one of the stream ends by the gate's deadline.

Prices are as traded. Factors of adjustment go with the bars: the store's last one, times what the
splits and dividends since then make of it (`Adjuster`). Where the dataset has no factor, nothing
can say that a price was split: a split stops the feed, with what to do.

feed=iex (default) has the trades of one exchange, some percent of the volume; sip has all and takes
a subscription. Train on the volume that you trade by.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np

from echelon.data.calendars import MINUTES, hours
from echelon.errors import DataError, UsageError, shorten
from echelon.files import Closing
from echelon.live.alpaca_api import Keys, ask, load_alpaca, override_url, prepare_client
from echelon.live.brokers import BrokerError
from echelon.live.feeds import Address, Message
from echelon.live.feeds.history import StoredBars
from echelon.live.feeds.messages import refuse
from echelon.serving.bundle import Bundle
from echelon.types import Freq

log = logging.getLogger(__name__)

SOURCE = "alpaca"
_PLACES = 1 << 21
"""Offsets of a minute's messages: more than any has."""
_MINUTE = timedelta(minutes=1)
_OVERLAP = 2 * _MINUTE
_SYMBOLS_AT_ONCE = 200
_SILENT_SECONDS = 60.0
"""Without a connection, after which it is said again."""
_UNKNOWN_ACTIONS = ("spin_offs", "unit_splits", "stock_mergers", "stock_and_cash_mergers")
_DAYS_KEPT = 60
_ANCHOR_DAYS: Mapping[Freq, int] = {"1d": 90, "5min": 20, "1min": 20}
"""How far back a symbol's last factor is looked for in the store."""

Which = Literal["iex", "sip"]


class Bar(NamedTuple):
    """A bar by its end: of a minute or of a session, on the exchange's clock."""

    symbol: str
    time: datetime
    open: float
    high: float
    low: float
    close: float
    volume: float
    amount: float


def open_alpaca(address: Address, bundle: Bundle, store: Path) -> AlpacaFeed:
    """`alpaca[?feed=iex|sip]`."""
    address.refuse_options("feed")
    which = address.options.get("feed", "iex")
    if address.place or which not in ("iex", "sip"):
        raise UsageError(f"--feed {shorten(address.text, 60)}: expected alpaca or alpaca?feed=sip.")
    universe = bundle.universe
    if universe["timezone"] != "America/New_York":
        raise UsageError(
            f"{bundle.path}: its market is {universe['calendar']}; Alpaca has US stocks."
        )
    service = Service(bundle.symbols, which)  # type: ignore[arg-type]
    stored = StoredBars.from_bundle(bundle, store)
    return AlpacaFeed(
        service,
        Kind(
            universe["freq"],
            universe["calendar"],
            universe["timezone"],
            frozenset(universe["fields"]),
        ),
        partial(last_factors, stored, bundle.symbols, universe["freq"]),
    )


class Kind(NamedTuple):
    """What the bundle's bars are; fields: of `derive.FIELDS`."""

    freq: Freq
    calendar: str
    timezone: str
    fields: frozenset[str]


def last_factors(
    stored: StoredBars, symbols: Sequence[str], freq: Freq, after: datetime
) -> dict[str, tuple[date, float]]:
    """Symbol → (day, factor) of its last bar in the store that is not behind `after`."""
    factors: dict[str, tuple[date, float]] = {}
    for bars in stored.sets(after - timedelta(days=_ANCHOR_DAYS[freq])):
        if bars.time > np.datetime64(after, "us") or bars.factor is None:
            break
        day = bars.time.astype("datetime64[us]").item().date()
        for n in np.flatnonzero(~np.isnan(bars.factor)).tolist():
            factors[symbols[n]] = day, float(bars.factor[n])
    return factors


class Service:
    """Alpaca's market data for some symbols: the stream, and what was."""

    def __init__(
        self,
        symbols: Sequence[str],
        which: Which = "iex",
        *,
        keys: Keys | None = None,
        seconds: float = 30.0,
    ) -> None:
        self.symbols, self._which = tuple(symbols), which
        self._keys = keys or Keys.from_environment()
        self._stream_url, url = override_url("ws"), override_url()
        historical = load_alpaca("alpaca.data.historical.stock")
        actions = load_alpaca("alpaca.data.historical.corporate_actions")
        self._requests = load_alpaca("alpaca.data.requests")
        self._enums = load_alpaca("alpaca.data.enums")
        self._frames = load_alpaca("alpaca.data.timeframe")
        given = {"raw_data": True, "url_override": url}
        key, secret = self._keys.plain
        direct = url is not None
        client = historical.StockHistoricalDataClient(key, secret, **given)
        self._bars = prepare_client(client, seconds, direct=direct)
        client = actions.CorporateActionsClient(key, secret, **given)
        self._actions = prepare_client(client, seconds, direct=direct)

    def close(self) -> None:
        self._bars._session.close()
        self._actions._session.close()

    def bars(
        self, unit: Literal["Minute", "Day"], start: datetime, end: datetime
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(symbol, bar as the service has it) from start to end, both aware and of bars' begins."""
        for n in range(0, len(self.symbols), _SYMBOLS_AT_ONCE):
            request = self._requests.StockBarsRequest(
                symbol_or_symbols=list(self.symbols[n : n + _SYMBOLS_AT_ONCE]),
                timeframe=self._frames.TimeFrame(1, self._frames.TimeFrameUnit[unit]),
                start=start,
                end=end,
                adjustment=self._enums.Adjustment.RAW,
                feed=self._enums.DataFeed(self._which),
            )
            answer = ask(self._keys, "bars", partial(self._bars.get_stock_bars, request))
            for symbol, bars in sorted(answer.items()):
                yield from ((symbol, bar) for bar in bars or ())

    def actions(self, start: date, end: date) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(kind, corporate action) with ex-days from start to end."""
        for n in range(0, len(self.symbols), _SYMBOLS_AT_ONCE):
            request = self._requests.CorporateActionsRequest(
                symbols=list(self.symbols[n : n + _SYMBOLS_AT_ONCE]),
                start=start,
                end=end,
                limit=None,
            )
            call = partial(self._actions.get_corporate_actions, request)
            answer = ask(self._keys, "corporate actions", call)
            for kind, items in sorted(answer.items()):
                yield from ((kind, item) for item in items or ())

    def stream(
        self, take: Callable[[Mapping[str, Any]], None], connected: Callable[[], None]
    ) -> Any:  # noqa: ANN401 (a StockDataStream)
        """The stream of minute bars, not yet running; connected: called after every connection."""
        library = load_alpaca("alpaca.data.live.stock")

        class Stream(library.StockDataStream):  # type: ignore[misc, name-defined]
            async def _send_subscribe_msg(self) -> None:
                await super()._send_subscribe_msg()
                connected()

        async def on_bar(bar: Mapping[str, Any]) -> None:
            take(bar)

        # What websockets logs of its own includes the message with the keys.
        quiet = logging.Logger("echelon.live.websocket", logging.CRITICAL)
        key, secret = self._keys.plain
        stream = Stream(
            *(key, secret),
            raw_data=True,
            feed=self._enums.DataFeed(self._which),
            websocket_params={"ping_interval": 10, "ping_timeout": 20, "logger": quiet},
            url_override=self._stream_url,
        )
        stream.subscribe_bars(on_bar, *self.symbols)
        return stream


class Adjuster:
    """Factors of a session: the store's last ones, times what happened since."""

    def __init__(
        self, service: Service, kind: Kind, anchors: Mapping[str, tuple[date, float]]
    ) -> None:
        self._service, self._kind, self._anchors = service, kind, anchors
        self._known: dict[date, dict[str, float]] = {}
        self._warned: set[tuple[str, date]] = set()

    def at(self, day: date) -> dict[str, float]:
        """Symbol → factor on a day; {} where the dataset has none. Raises DataError, BrokerError"""
        if day not in self._known:
            if len(self._known) > _DAYS_KEPT:
                self._known.clear()
            with _understanding("corporate actions"):
                self._known[day] = self._compute(day)
        return self._known[day]

    def _compute(self, day: date) -> dict[str, float]:
        adjusts = "factor" in self._kind.fields
        first = min((at for at, _ in self._anchors.values()), default=day)
        factors = {symbol: factor for symbol, (_, factor) in self._anchors.items()}
        actions = []
        for kind, item in self._service.actions(first if adjusts else day, day):
            symbol, ex_day = str(item.get("symbol")), date.fromisoformat(str(item.get("ex_date")))
            anchor = self._anchors.get(symbol)
            if symbol in self._service.symbols and (anchor is None or anchor[0] < ex_day <= day):
                actions.append((ex_day, symbol, kind, item))
        closes = self._closes(first, day) if actions and adjusts else {}
        for ex_day, symbol, kind, item in sorted(actions, key=lambda action: action[:3]):
            ratio = self._ratio(ex_day, symbol, kind, item, closes)
            if adjusts:
                factors[symbol] = factors.get(symbol, 1.0) * ratio
            elif kind in ("forward_splits", "reverse_splits", "stock_dividends"):
                raise DataError(
                    f"{symbol}: {kind} on {ex_day}, and the bundle's dataset has no factor, so "
                    "nothing can tell the engine that the price was split. Import the data again "
                    "with factors, or behind the split, and export a bundle of it."
                )
        return factors if adjusts else {}

    def _closes(self, first: date, day: date) -> dict[str, list[tuple[date, float]]]:
        """Symbol → (day, close as traded) of the sessions."""
        zone = ZoneInfo(self._kind.timezone)
        start = datetime.combine(first - timedelta(days=10), datetime.min.time(), zone)
        end = datetime.combine(day, datetime.min.time(), zone)
        closes: dict[str, list[tuple[date, float]]] = {}
        for symbol, bar in self._service.bars("Day", start, end):
            at = _begin_of(bar).astimezone(zone).date()
            closes.setdefault(symbol, []).append((at, float(bar["c"])))
        return closes

    def _ratio(
        self,
        day: date,
        symbol: str,
        kind: str,
        item: Mapping[str, Any],
        closes: Mapping[str, Sequence[tuple[date, float]]],
    ) -> float:
        """What an action multiplies the factor by, so that price × factor goes on."""
        if kind in ("forward_splits", "reverse_splits"):
            return _rate(item, "new_rate") / _rate(item, "old_rate")
        if kind == "stock_dividends":
            return 1.0 + _rate(item, "rate")
        if kind == "cash_dividends" and "factor" in self._kind.fields:
            before = [close for at, close in closes.get(symbol, ()) if at < day]
            paid = _rate(item, "rate")
            if before and before[-1] > paid:
                return before[-1] / (before[-1] - paid)
        if (kind in _UNKNOWN_ACTIONS or kind == "cash_dividends") and (
            (symbol, day) not in self._warned
        ):
            self._warned.add((symbol, day))
            log.warning("%s: %s on %s: no factor is made of it; look at it", symbol, kind, day)
        return 1.0


class AlpacaFeed(Closing):
    """See the module's text."""

    live = True
    sources = (SOURCE,)
    ended = False

    def __init__(
        self,
        service: Service,
        kind: Kind,
        anchors: Callable[[datetime], Mapping[str, tuple[date, float]]],
        *,
        settle: float = 15.0,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """anchors: the store's factors as of a time. settle: seconds until a bar can be fetched."""
        self._service, self._kind, self._anchors = service, kind, anchors
        self._settle, self._now = timedelta(seconds=settle), now
        self._zone = ZoneInfo(kind.timezone)
        self._events: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._stream: Any = None
        self._thread: threading.Thread | None = None
        self._offset = -1

    def start(self, offsets: Mapping[str, int], after: np.datetime64) -> None:
        """Begin behind `after`; offsets are made of times, so nothing follows from them."""
        self.close()
        self._after: datetime = after.astype("datetime64[us]").item()
        self._last = self._after  # end of the last minute that came
        self._adjuster = Adjuster(self._service, self._kind, self._anchors(self._after))
        self._seen: dict[datetime, set[str]] = {}  # minute → symbols that came
        self._waiting: list[Mapping[str, Any]] = []  # bars of the stream, until all is fetched
        self._connected: datetime | None = None  # when, while what was missed is not fetched yet
        self._again = self._now()  # not before this time is anything fetched
        self._failures = 0
        self._buckets: dict[tuple[datetime, str], Bar] = {}
        self._quiet_since = time.monotonic()
        if self._kind.freq != "1d":
            connected = lambda: self._events.put(None)  # noqa: E731 (one word)
            self._stream = self._service.stream(self._events.put, connected)
            self._thread = threading.Thread(target=self._run, args=(self._stream,), daemon=True)
            self._thread.start()

    def poll(self, seconds: float) -> list[Message]:
        if self._kind.freq == "1d":
            return self._poll_days(seconds)
        deadline = time.monotonic() + seconds
        while True:
            messages = self._catch_up() + self._pass_settled()
            left = deadline - time.monotonic()
            if messages or left <= 0:
                return messages
            try:
                event = self._events.get(timeout=min(left, 0.1))
            except queue.Empty:
                self._complain()
                continue
            if event is None:  # connected
                self._connected = self._now()
                self._again = self._connected + self._settle
                self._quiet_since = math.inf
            elif self._connected is not None:
                self._waiting.append(event)
            elif messages := self._take_minute(event):
                return messages

    def hold(self, sources: frozenset[str]) -> None:
        """There is one source, which is ahead of none."""

    def close(self) -> None:
        self._service.close()
        if self._thread is None:
            return
        stream, self._stream = self._stream, None
        loop = stream._loop
        if loop is not None and loop.is_running():
            for end in (stream.stop_ws, stream.close):
                try:
                    asyncio.run_coroutine_threadsafe(end(), loop).result(timeout=5.0)
                except (TimeoutError, RuntimeError):  # its loop has ended meanwhile
                    break
        self._thread.join(timeout=7.0)
        self._thread = None

    def _run(self, stream: Any) -> None:  # noqa: ANN401
        """The thread: alpaca-py connects again by itself, waiting longer each time."""
        try:
            asyncio.run(stream._run_forever())
        except Exception:
            log.exception("alpaca: the stream has ended")

    def _complain(self) -> None:
        if time.monotonic() - self._quiet_since > _SILENT_SECONDS:
            self._quiet_since = time.monotonic()
            log.warning("alpaca: no connection to the stream of bars yet; it is tried again")

    # Bars within the day.

    def _catch_up(self) -> list[Message]:
        """What was missed before the stream was there, and what the stream said since."""
        if self._connected is None or self._now() < self._again:
            return []
        until = self._connected.astimezone(self._zone).replace(tzinfo=None, second=0, microsecond=0)
        try:
            start = (self._last - _OVERLAP).replace(tzinfo=self._zone)
            end = until.replace(tzinfo=self._zone) - _MINUTE  # of the begins of bars
            bars = list(self._service.bars("Minute", start, end)) if start <= end else []
            messages = self._from_endpoint(bars, until)
        except BrokerError as error:
            self._fail(error)
            return []
        self._failures, self._connected = 0, None
        waiting, self._waiting = self._waiting, []
        for bar in waiting:
            messages += self._take_minute(bar)
        return messages

    def _fail(self, error: BrokerError) -> None:
        self._failures += 1
        log.warning("%s; tried again, until then no bar goes on", error)
        self._again = self._now() + timedelta(seconds=min(2.0**self._failures, 30.0))

    def _from_endpoint(
        self, bars: Sequence[tuple[str, Mapping[str, Any]]], until: datetime
    ) -> list[Message]:
        """Messages of bars that were fetched, each time closed; until: the last of them."""
        with _understanding("bars"):
            minutes = [self._minute({**bar, "S": symbol}) for symbol, bar in bars]
        fresh = sorted(
            (bar for bar in minutes if bar is not None and self._is_new(bar)),
            key=lambda bar: (bar.time, bar.symbol),
        )
        ends = sorted({self._end_of(bar.time) for bar in fresh})
        for day in {end.date() for end in ends}:
            self._adjuster.at(day)  # before anything is remembered: this may fail
        for bar in fresh:
            self._add(bar)
        messages: list[Message] = []
        for end in ends:
            if end <= until:
                messages += [self._message(bar) for bar in self._pop(end)]
                messages.append(self._say("close", end, {}))
        return messages

    def _take_minute(self, raw: Mapping[str, Any]) -> list[Message]:
        """Messages that a minute bar of the stream completes."""
        try:
            bar = self._minute(raw)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self._offset += 1
            return [refuse(SOURCE, self._offset, "malformed", f"a bar of the stream: {error!r}")]
        if bar is None or not self._is_new(bar):
            return []
        self._add(bar)
        end = self._end_of(bar.time)
        if bar.time < end:
            return []
        try:
            return [self._message(self._buckets.pop((end, bar.symbol)))]
        except BrokerError as error:
            self._put_back(raw, bar, error)
            return []

    def _put_back(self, raw: Mapping[str, Any], bar: Bar, error: BrokerError) -> None:
        """A bar whose factor could not be had: fetched again with all others of its time."""
        self._seen[bar.time].discard(bar.symbol)
        self._waiting.append(raw)
        self._connected = self._now()
        self._fail(error)

    def _pass_settled(self) -> list[Message]:
        """Bars of 5 minutes whose last minutes had no trade."""
        if self._connected is not None:
            return []
        now = self._now().astimezone(self._zone).replace(tzinfo=None) - self._settle
        ends = sorted({end for end, _ in self._buckets if end <= now})
        return [self._message(bar) for end in ends for bar in self._pop(end)]

    def _minute(self, raw: Mapping[str, Any]) -> Bar | None:
        """A minute bar by its end; None: before, after or between the hours of trading."""
        end = _begin_of(raw).astimezone(self._zone).replace(tzinfo=None) + _MINUTE
        return _bar(raw, end) if self._trades(end) and end > self._after else None

    def _trades(self, end: datetime) -> bool:
        kind = self._kind
        table = hours(kind.calendar, end.date(), end.date(), kind.timezone)
        return bool(table.height) and bool(table["open"][0] < end <= table["close"][0])

    def _is_new(self, bar: Bar) -> bool:
        return bar.symbol not in self._seen.get(bar.time, ()) and bar.symbol in (
            self._service.symbols
        )

    def _add(self, bar: Bar) -> None:
        self._seen.setdefault(bar.time, set()).add(bar.symbol)
        if bar.time > self._last:
            self._last = bar.time
            old = bar.time - 10 * _OVERLAP
            self._seen = {at: came for at, came in self._seen.items() if at > old}
        end = self._end_of(bar.time)
        known = self._buckets.get((end, bar.symbol))
        if known is None:
            self._buckets[end, bar.symbol] = bar._replace(time=end)
        else:
            self._buckets[end, bar.symbol] = known._replace(
                high=max(known.high, bar.high),
                low=min(known.low, bar.low),
                close=bar.close,
                volume=known.volume + bar.volume,
                amount=known.amount + bar.amount,
            )

    def _end_of(self, minute: datetime) -> datetime:
        """End of the bar that a minute belongs to."""
        step = MINUTES[self._kind.freq]
        return minute + timedelta(minutes=-minute.minute % step)

    def _pop(self, end: datetime) -> list[Bar]:
        keys = sorted(key for key in self._buckets if key[0] == end)
        return [self._buckets.pop(key) for key in keys]

    # Daily bars.

    def _poll_days(self, seconds: float) -> list[Message]:
        """The sessions that ended since the last one, fetched."""
        now = self._now()
        local = now.astimezone(self._zone).replace(tzinfo=None)
        kind = self._kind
        first = self._last.date() + timedelta(days=1)
        over = []
        if now >= self._again and first <= local.date():
            table = hours(kind.calendar, first, local.date(), kind.timezone)
            closes = table["close"].to_list()
            over = [at.date() for at in closes if at + self._settle <= local]
        if not over:
            time.sleep(min(seconds, 1.0))
            return []
        start = datetime.combine(over[0], datetime.min.time(), self._zone)
        end = datetime.combine(over[-1], datetime.min.time(), self._zone)
        try:
            days = self._days(start, end)
            if not days.get(over[-1]):
                raise BrokerError(f"alpaca: no bars of {over[-1]} yet")
            for day in days:
                self._adjuster.at(day)
            messages = [m for day in over for m in self._day(day, days.get(day, []))]
        except BrokerError as error:
            self._fail(error)
            return []
        self._failures = 0
        self._last = datetime.combine(over[-1], datetime.min.time())
        return messages

    def _days(self, start: datetime, end: datetime) -> dict[date, list[Bar]]:
        """Daily bars by their session."""
        days: dict[date, list[Bar]] = {}
        with _understanding("bars"):
            for symbol, raw in self._service.bars("Day", start, end):
                day = _begin_of(raw).astimezone(self._zone).date()
                at = datetime.combine(day, datetime.min.time())
                days.setdefault(day, []).append(_bar({**raw, "S": symbol}, at))
        return days

    def _day(self, day: date, bars: Sequence[Bar]) -> list[Message]:
        at = datetime.combine(day, datetime.min.time())
        ours = [bar for bar in bars if bar.symbol in self._service.symbols]
        return [*(self._message(bar) for bar in ours), self._say("close", at, {})]

    # Messages.

    def _message(self, bar: Bar) -> Message:
        factors = self._adjuster.at(bar.time.date())
        body = {name: value for name, value in bar._asdict().items() if name in self._kind.fields}
        body["symbol"], body["close"] = bar.symbol, bar.close
        if bar.symbol in factors:
            body["factor"] = factors[bar.symbol]
        return self._say("bar", bar.time, body)

    def _say(self, kind: str, at: datetime, body: Mapping[str, Any]) -> Message:
        """A message; offsets rise, and begin anew from the time where that is further."""
        time_ = np.datetime64(at, "us")
        minute = int(time_.astype("datetime64[m]").astype(np.int64))
        self._offset = max(self._offset + 1, minute * _PLACES)
        return Message(SOURCE, self._offset, kind, time_, body)


@contextmanager
def _understanding(what: str) -> Iterator[None]:
    """What cannot be read inside is no answer: BrokerError, so it is asked for again."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BrokerError(f"alpaca: {what} that cannot be read: {error!r}") from None


def _begin_of(raw: Mapping[str, Any]) -> datetime:
    """When a bar began, aware: a text of the endpoint, a timestamp of the stream."""
    value = raw["t"]
    return datetime.fromisoformat(value) if isinstance(value, str) else value.to_datetime()


def _bar(raw: Mapping[str, Any], at: datetime) -> Bar:
    first, high, low, last, volume = (float(raw[name]) for name in "ohlcv")
    amount = volume * float(raw["vw"] if raw.get("vw") is not None else raw["c"])
    return Bar(str(raw["S"]), at, first, high, low, last, volume, amount)


def _rate(item: Mapping[str, Any], name: str) -> float:
    value = float(item.get(name) or math.nan)
    if not (math.isfinite(value) and value > 0.0):
        raise BrokerError(f"alpaca: a corporate action of {item.get('symbol')} without {name}")
    return value
