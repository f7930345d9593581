"""Every broker does what the engine relies on; the paper venue fills as the backtest does."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from broker_adapters import AlpacaAdapter, SheetAdapter
from engines import Served, a_share, daily

from echelon.backtest.run import run_backtest
from echelon.errors import DamagedError, DataError, StaleBarsError, StoreError, UsageError
from echelon.live import http
from echelon.live.brokers import (
    Broker,
    BrokerError,
    OrderRequest,
    OrderStatus,
    Shown,
    SimulatedVenue,
    VenueFill,
    open_broker,
)
from echelon.live.brokers.paper import CANCELLED, INVALID, REPLACED, PaperVenue
from echelon.live.brokers.remote import RemoteBroker, serve_venue
from echelon.live.http import Client, Server, call
from echelon.live.journal import Journal
from echelon.serving.decision import WHY, Decision
from echelon.serving.export import ExportRequest
from echelon.serving.replay import compare_decisions

Get = Callable[..., Served]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Get:
    """Bundles by market and algorithm, each made once."""
    known: dict[tuple[str, str, ExportRequest | None], Served] = {}

    def get(market: str, algo: str = "A2C", request: ExportRequest | None = None) -> Served:
        key = market, algo, request
        if key not in known:
            path = tmp_path_factory.mktemp(f"{market}-{algo}")
            if market == "daily":
                known[key] = daily(path, bars_file, algo, request)
            else:
                known[key] = a_share(path, market, algo, request)
        return known[key]

    return get


def last_day(known: Served, bars: int) -> date:
    """Of the history before the last `bars` of validation."""
    day: date = known.world.times[known.rows(bars).start - 1].astype("datetime64[D]").item()
    return day


def requests_of(decision: Decision) -> list[OrderRequest]:
    """What the kernel gets of a decision, as orders."""
    tried = {order.symbol: order.shares for order in decision.orders}
    shares, spend = decision.wanted.shares[0].tolist(), decision.wanted.spend[0].tolist()
    return [
        OrderRequest(
            f"{decision.time}-{symbol}",
            symbol,
            "sell" if wish < 0.0 else "buy",
            tried.get(symbol, 0.0),
            1.0,
            wish,
            money,
        )
        for symbol, wish, money in zip(decision.symbols, shares, spend, strict=True)
        if wish or money > 0.0
    ]


TOKEN = "a token for tests only"


# The contract: what every adapter does.


class Adapter(Protocol):
    """A venue to try a broker on."""

    symbols: tuple[str, ...]
    """Two or more, of which a few shares can be bought at any time."""
    keeps_rejections: bool
    """Whether an order that the venue refused is one that it knows after a restart."""

    def open(self) -> Broker:
        """A broker at the venue; called again, after `close`, as by a process that starts anew."""

    def go_on(self, broker: Broker) -> None:
        """Let the market go on: what is open is filled, or ends."""

    def close(self) -> None:
        """The end of the venue."""


class PaperAdapter:
    """The paper venue in this process."""

    keeps_rejections = True

    def __init__(self, known: Served, directory: Path) -> None:
        self.known, self.path = known, directory / "venue"
        self.symbols = known.bundle.symbols
        self.bars = known.bar_sets(known.engine(_BARS))

    def open(self) -> Broker:
        known = self.known
        return PaperVenue.open(known.bundle, self.path, known.store, last_day(known, _BARS))

    def go_on(self, broker: Broker) -> None:
        assert isinstance(broker, SimulatedVenue)
        broker.show_bars(next(self.bars))

    def close(self) -> None:
        pass


class RemoteAdapter(PaperAdapter):
    """The paper venue behind HTTP, which restarts with every broker."""

    def __init__(self, known: Served, directory: Path) -> None:
        super().__init__(known, directory)
        self.stack = ExitStack()

    def open(self) -> Broker:
        self.close()
        known = self.known
        url = self.stack.enter_context(
            serve_venue(known.bundle, self.path, known.store, last_day(known, _BARS), TOKEN)
        )
        return RemoteBroker(url, TOKEN, known.bundle.id)

    def close(self) -> None:
        self.stack.close()


_BARS = 12
ADAPTERS: dict[str, Callable[[Get, Path], Adapter]] = {
    "paper": lambda get, path: PaperAdapter(get("daily"), path),
    "remote paper": lambda get, path: RemoteAdapter(get("daily"), path),
    "alpaca": lambda _get, path: AlpacaAdapter(path),
    "sheet": lambda _get, path: SheetAdapter(path),
}


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest, served: Get, tmp_path: Path) -> Iterator[Adapter]:
    """A venue of each kind, new."""
    made = ADAPTERS[request.param](served, tmp_path)
    yield made
    made.close()


def order(name: str, symbol: str, shares: float, side: str = "buy") -> OrderRequest:
    """An order by the numbers that every broker takes."""
    return OrderRequest(name, symbol, side, shares, 1.0)  # type: ignore[arg-type]


def test_order_sent_again_is_the_same_order(adapter: Adapter) -> None:
    broker = adapter.open()
    wanted = [order("a1", adapter.symbols[0], 3.0), order("a2", adapter.symbols[1], 2.0)]
    first = broker.submit(wanted)
    assert [(status.id, status.state) for status in first] == [
        ("a1", "accepted"),
        ("a2", "accepted"),
    ]
    assert broker.submit(wanted) == first
    assert broker.submit([wanted[1], wanted[1]]) == [first[1], first[1]]
    assert {status.id for status in broker.open_orders()} == {"a1", "a2"}
    adapter.go_on(broker)
    ended = broker.submit(wanted)
    assert [(s.id, s.state, s.filled) for s in ended] == [
        ("a1", "filled", 3.0),
        ("a2", "filled", 2.0),
    ]
    adapter.go_on(broker)
    assert broker.account().positions == {adapter.symbols[0]: 3.0, adapter.symbols[1]: 2.0}
    assert broker.open_orders() == []
    broker.close()


def test_order_that_never_came_is_missing(adapter: Adapter) -> None:
    broker = adapter.open()
    broker.submit([order("b1", adapter.symbols[0], 1.0)])
    assert list(broker.orders(["b0", "b1", "b2"])) == ["b1"]
    assert broker.orders(["b0"]) == {}
    assert broker.orders([]) == {}
    broker.close()


def test_cancelled_order_is_not_filled(adapter: Adapter) -> None:
    broker = adapter.open()
    broker.submit([order("c1", adapter.symbols[0], 1.0), order("c2", adapter.symbols[1], 1.0)])
    broker.cancel(["c1", "unknown"])
    broker.cancel(["c1"])
    adapter.go_on(broker)
    known = broker.orders(["c1", "c2"])
    assert (known["c1"].state, known["c1"].filled) == ("cancelled", 0.0)
    assert known["c1"].reason
    assert known["c2"].state == "filled"
    broker.cancel(["c2"])
    assert broker.orders(["c2"]) == {"c2": known["c2"]}
    assert [fill.order_id for fill in broker.fills("")[0]] == ["c2"]
    broker.close()


def test_order_that_cannot_be_is_rejected_and_stays_so(adapter: Adapter) -> None:
    broker = adapter.open()
    wrong = [order("d1", "NO-SUCH", 1.0), order("d2", adapter.symbols[0], -1.0)]
    said = broker.submit(wrong)
    assert [status.state for status in said] == ["rejected", "rejected"]
    assert all(status.reason for status in said)
    assert broker.submit(wrong) == said
    assert list(broker.orders(["d1", "d2"]).values()) == said
    adapter.go_on(broker)
    assert broker.fills("")[0] == []
    broker.close()


def test_fills_behind_a_cursor_are_whole_in_order_and_not_repeated(adapter: Adapter) -> None:
    broker = adapter.open()
    assert broker.fills("") == ([], broker.fills("")[1])
    listed: list[VenueFill] = []
    cursor = ""
    for k, (symbol, side) in enumerate(
        [(adapter.symbols[0], "buy"), (adapter.symbols[1], "buy"), (adapter.symbols[0], "sell")]
    ):
        broker.submit([order(f"e{k}", symbol, 2.0, side)])
        adapter.go_on(broker)
        new, cursor = broker.fills(cursor)
        assert {fill.order_id for fill in new} == {f"e{k}"}
        assert sum(fill.shares for fill in new) == (2.0 if side == "buy" else -2.0)
        assert broker.fills(cursor) == ([], cursor)
        listed += new
    assert broker.fills("") == (listed, cursor)
    assert len({fill.trade_id for fill in listed}) == len(listed)
    assert all(fill.price > 0.0 and fill.time for fill in listed)
    broker.close()


def test_account_is_what_fills_made_of_the_cash(adapter: Adapter) -> None:
    broker = adapter.open()
    cash = broker.account().cash
    assert broker.account().positions == {}
    broker.submit([order("f1", adapter.symbols[0], 4.0), order("f2", adapter.symbols[1], 2.0)])
    adapter.go_on(broker)
    broker.submit([order("f3", adapter.symbols[0], 1.0, "sell")])
    adapter.go_on(broker)
    for fill in broker.fills("")[0]:
        cash -= fill.shares * fill.price + fill.commission + fill.stamp
    account = broker.account()
    assert account.cash == pytest.approx(cash, rel=1e-12)
    assert account.positions == {adapter.symbols[0]: 3.0, adapter.symbols[1]: 2.0}
    broker.close()


def test_restart_keeps_everything(adapter: Adapter) -> None:
    broker = adapter.open()
    broker.submit([order("g1", adapter.symbols[0], 1.0), order("g2", "NO-SUCH", 1.0)])
    adapter.go_on(broker)
    broker.submit([order("g3", adapter.symbols[1], 1.0), order("g4", adapter.symbols[0], 1.0)])
    broker.cancel(["g4"])
    ids = ["g1", "g2", "g3", "g4", "g5"]
    if not adapter.keeps_rejections:  # sent again, it is judged again
        ids.remove("g2")
    before = broker.orders(ids), broker.fills(""), broker.account(), broker.open_orders()
    broker.close()
    broker = adapter.open()
    assert (broker.orders(ids), broker.fills(""), broker.account(), broker.open_orders()) == before
    adapter.go_on(broker)
    known = broker.orders(ids)
    states = {"g1": "filled", "g2": "rejected", "g3": "filled", "g4": "cancelled"}
    expected = {name: state for name, state in states.items() if name in ids}
    assert {name: status.state for name, status in known.items()} == expected
    broker.close()


# The paper venue.

Venue = Any  # Broker and SimulatedVenue


def drive(
    known: Served,
    venue: Venue,
    bars: int,
    restart: Callable[[Venue], Venue] = lambda venue: venue,
) -> tuple[list[Decision], list[Shown]]:
    """An engine on a venue, by hand; restart: at every point at which something can die."""
    engine = known.engine(bars)
    decisions, answers = [], []
    for one in known.bar_sets(engine):
        shown = venue.show_bars(one)
        venue = restart(venue)
        assert venue.show_bars(one) == shown
        decision = engine.push(one, shown.account)
        engine.complete()
        requests = requests_of(decision)
        first = venue.submit(requests)
        venue = restart(venue)
        assert venue.submit(requests) == first
        assert venue.account() == shown.account
        decisions.append(decision)
        answers.append(shown)
    return decisions, answers


def by_bar(answers: list[Shown], decisions: list[Decision]) -> dict[str, Any]:
    """Time → symbol → (shares, price)."""
    return {
        str(decision.time): {fill.symbol: (fill.shares, fill.price) for fill in shown.fills}
        for decision, shown in zip(decisions, answers, strict=True)
    }


@pytest.mark.parametrize(("market", "algo"), [("daily", "A2C"), ("1d", "A2C"), ("5min", "SAC")])
def test_paper_venue_fills_as_the_backtest_does_bit_for_bit(
    served: Get, tmp_path: Path, market: str, algo: str
) -> None:
    known, n_bars = served(market, algo), 24
    rows = known.rows(n_bars)
    with PaperVenue.open(
        known.bundle, tmp_path / "venue", known.store, last_day(known, n_bars)
    ) as venue:
        decisions, answers = drive(known, venue, n_bars)
        backtest = run_backtest(known.bundle.policy(), known.world, rows, known.bundle.config)
        assert list(compare_decisions(decisions, backtest, by_bar(answers, decisions))) == []
        fills, cursor = venue.fills("")
        assert fills == [fill for shown in answers for fill in shown.fills]
        assert cursor == answers[-1].cursor
        assert len({fill.trade_id for fill in fills}) == len(fills) > 0
    fees = ("commission", "stamp", "slippage")
    paid = {name: sum(getattr(fill, name) for fill in fills) for name in fees}
    expected = {name: float(getattr(backtest.fills, name).sum()) for name in fees}
    assert paid == pytest.approx(expected, rel=1e-12)


def test_remote_venue_answers_as_the_one_in_process(served: Get, tmp_path: Path) -> None:
    known, n_bars = served("1d"), 8
    day = last_day(known, n_bars)
    with PaperVenue.open(known.bundle, tmp_path / "here", known.store, day) as venue:
        _, expected = drive(known, venue, n_bars)
    with serve_venue(known.bundle, tmp_path / "there", known.store, day, TOKEN) as url:
        with RemoteBroker(url, TOKEN, known.bundle.id) as broker:
            _, answers = drive(known, broker, n_bars)
        with RemoteBroker(url, TOKEN, "another") as stranger, pytest.raises(UsageError):
            stranger.account()
        stranger = RemoteBroker(url, "another token", known.bundle.id)
        with stranger, pytest.raises(UsageError, match="ECHELON_TOKEN"):
            stranger.submit([])
    assert answers == expected
    with RemoteBroker(url, TOKEN, known.bundle.id, 5.0) as late, pytest.raises(BrokerError):
        late.account()


def test_bad_bars_change_nothing_and_old_ones_are_refused(served: Get, tmp_path: Path) -> None:
    known = served("1d")
    sets = list(known.bar_sets(known.engine(6)))
    with ExitStack() as stack:
        day = last_day(known, 6)
        url = stack.enter_context(
            serve_venue(known.bundle, tmp_path / "venue", known.store, day, TOKEN)
        )
        venue = stack.enter_context(RemoteBroker(url, TOKEN, known.bundle.id))
        venue.show_bars(sets[0])
        seen = venue.show_bars(sets[1])
        symbol = next(s for s, c in zip(known.bundle.symbols, sets[2].close, strict=True) if c == c)
        venue.submit([OrderRequest("h1", symbol, "buy", 0.0, 1.0, 0.0, 50_000.0)])
        bad = replace(sets[2], close=np.full_like(sets[2].close, -1.0))
        with pytest.raises(DataError, match="expected"):
            venue.show_bars(bad)
        with pytest.raises(StaleBarsError, match="gone by"):
            venue.show_bars(sets[0])
        other = replace(sets[1], close=sets[1].close * 1.01)
        with pytest.raises(StaleBarsError, match="other bars"):
            venue.show_bars(other)
        assert venue.show_bars(replace(sets[1], exogenous=np.zeros((1, 1)))) == seen
        assert [status.id for status in venue.open_orders()] == ["h1"]
        shown = venue.show_bars(sets[2])
        assert [status.id for status in shown.statuses] == ["h1"]
        with pytest.raises(UsageError, match="no fill"):
            venue.fills("99999")


def test_orders_that_are_not_filled_say_why(served: Get, tmp_path: Path) -> None:
    known = served("1d")
    sets = known.bar_sets(known.engine(6))
    with PaperVenue.open(
        known.bundle, tmp_path / "venue", known.store, last_day(known, 6)
    ) as venue:
        first = next(sets)
        venue.show_bars(first)
        trades = [n for n, price in enumerate(first.close) if price == price]
        halted = [n for n, price in enumerate(first.close) if price != price]
        names = [known.bundle.symbols[n] for n in (*trades, *halted)]
        held, more = names[0], names[1]
        nan = float("nan")
        said = venue.submit(
            [
                OrderRequest("i0", held, "buy", 0.0, 1.0, nan),
                OrderRequest("i1", held, "sell", 5.0, 1.0, 5.0),
                OrderRequest("i2", held, "buy", 0.0, 1.0, 100.0, 5.0),
                OrderRequest("i3", held, "buy", 0.0, 1.0),
                OrderRequest("i4", held, "buy", 0.0, 1.0, 2000.0),
                OrderRequest("i5", held, "buy", 0.0, 1.0, 2030.0),
                OrderRequest("i6", more, "sell", 0.0, 1.0, -100.0),
            ]
        )
        assert [(status.state, status.reason) for status in said] == [
            *[("rejected", "invalid_order")] * 4,
            *[("cancelled", "replaced"), ("accepted", None), ("accepted", None)],
        ]
        shown = venue.show_bars(next(sets))
        ended = {status.id: status for status in shown.statuses}
        assert ended["i5"] == OrderStatus("i5", "filled", 2000.0, "lot")
        assert ended["i6"] == OrderStatus("i6", "cancelled", 0.0, "not_held")
        assert shown.account.positions == {held: 2000.0}
        assert shown.account.locked == {held: 2000.0}
        assert {status.reason for status in (*said, *ended.values())} - {None} <= {
            *WHY,
            CANCELLED,
            REPLACED,
            INVALID,
        }


def test_venue_that_fails_to_write_answers_nothing_more(
    served: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = served("1d")
    sets = list(known.bar_sets(known.engine(4)))
    path, day = tmp_path / "venue", last_day(known, 4)
    venue = PaperVenue.open(known.bundle, path, known.store, day)
    expected = venue.show_bars(sets[0])

    def full(_self: object) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "commit", full)
        with pytest.raises(StoreError, match="full"):
            venue.show_bars(sets[1])
    for ask in (venue.account, venue.open_orders, lambda: venue.show_bars(sets[1])):
        with pytest.raises(StoreError, match="Start it again"):
            ask()
    venue.close()
    with PaperVenue.open(known.bundle, path, known.store, day) as again:
        assert again.show_bars(sets[0]) == expected
        assert again.show_bars(sets[1]).cursor > expected.cursor


def test_journal_that_says_other_fills_is_refused(served: Get, tmp_path: Path) -> None:
    known = served("1d")
    path, day = tmp_path / "venue", last_day(known, 4)
    venue = PaperVenue.open(known.bundle, path, known.store, day)
    journal = venue._journal
    journal.append_about(
        "orders",
        {"orders": [order("j1", "NO-SUCH", 1.0)._asdict()], "statuses": [_ACCEPTED]},
        ["j1"],
    )
    journal.commit()
    venue.close()
    with pytest.raises(DamagedError, match="fills otherwise"):
        PaperVenue.open(known.bundle, path, known.store, day)


_ACCEPTED = OrderStatus("j1", "accepted")._asdict()


def test_broker_is_opened_by_its_name(served: Get, tmp_path: Path) -> None:
    known = served("daily")
    journal = tmp_path / "live"
    with pytest.raises(UsageError, match="there are paper, alpaca, sheet"):
        open_broker("nobody", known.bundle, journal, known.store)
    with pytest.raises(UsageError, match="only this machine"):
        RemoteBroker("http://example.com:80", TOKEN, known.bundle.id)
    broker = open_broker("paper", known.bundle, journal, known.store, last_day(known, 4))
    assert broker.name == "paper"
    assert (tmp_path / "live.venue").is_file()
    broker.close()


def test_who_holds_many_connections_loses_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MOST_CONNECTIONS", 5)
    with Server({("GET", "/v1/x"): lambda _: {"x": 1}}, TOKEN, 0) as server:
        held = []
        for _ in range(20):
            held.append(socket.create_connection(("127.0.0.1", server.port), timeout=30.0))
            held[-1].sendall(b"GET /v1/")  # and never the rest
        assert call(server.url, "GET", "/v1/x", None, TOKEN, 30.0) == {"x": 1}
        for stranger in held[:15]:
            stranger.settimeout(30.0)
            assert not stranger.recv(1_000).startswith(b"HTTP/1.1 200")
        for stranger in held:
            stranger.close()


def test_server_reads_nothing_of_who_has_no_token_or_another_name() -> None:
    asked: list[Any] = []

    def echo(body: Any) -> dict[str, Any]:
        asked.append(body)
        return {"body": body}

    with Server({("POST", "/v1/echo"): echo}, TOKEN, 0) as server:
        sent = {"x": 0.1 + 0.2, "y": [1e-310, float("inf")]}
        assert call(server.url, "POST", "/v1/echo", sent, TOKEN, 10.0) == {"body": sent}
        for token, path, why in (
            ("other", "/v1/echo", "no token"),
            (TOKEN, "/v1/nothing", "there is no POST"),
        ):
            with pytest.raises(UsageError, match=why):
                call(server.url, "POST", path, {}, token, 10.0)
        good = {"Authorization": f"Bearer {TOKEN}", "Content-Length": "2"}
        for headers, status in (
            ({**good, "Host": "example.com"}, 403),
            ({**good, "Authorization": TOKEN}, 401),
            ({**good, "Content-Length": str(1 << 40)}, 413),
            ({**good, "Content-Length": "many"}, 411),
            (good, 400),
        ):
            asking = HTTPConnection("127.0.0.1", server.port, timeout=10.0)
            asking.putrequest("POST", "/v1/echo", skip_host="Host" in headers)
            for name, value in headers.items():
                asking.putheader(name, value)
            asking.endheaders(b"[]")
            assert asking.getresponse().status == status, headers
            asking.close()
        assert asked == [sent]
        with Client(server.url, TOKEN, 10.0) as client:
            assert client.call("POST", "/v1/echo", {}) == {"body": {}}
            server.close()
            with pytest.raises(BrokerError, match="no answer"):
                client.call("POST", "/v1/echo", {})
    assert len(asked) == 2


@pytest.mark.parametrize(("market", "algo"), [("1d", "A2C"), ("5min", "SAC")])
def test_paper_venue_killed_at_every_point_answers_the_same(
    served: Get, tmp_path: Path, market: str, algo: str
) -> None:
    known, n_bars = served(market, algo), 10
    day = last_day(known, n_bars)

    def begin(name: str) -> PaperVenue:
        place = tmp_path / name
        return PaperVenue.open(known.bundle, place, known.store, day, snapshot_every=3)

    def restart(venue: PaperVenue) -> PaperVenue:
        venue.close()  # what is not committed is lost, as by a kill
        return begin("killed")

    whole, expected = drive(known, begin("whole"), n_bars)
    decisions, answers = drive(known, begin("killed"), n_bars, restart)
    assert answers == expected
    assert [d.to_dict() for d in decisions] == [d.to_dict() for d in whole]
    assert sum(len(shown.fills) for shown in answers) > 0
