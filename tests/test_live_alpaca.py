"""Orders to Alpaca, against a venue on loopback that fails in every way one can."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_alpaca import KEY, SECRET, FakeAlpaca, call
from pydantic import SecretStr

from echelon.errors import ConfigError, UsageError
from echelon.live.alpaca_api import Keys, override_url
from echelon.live.brokers import BrokerError, OrderRequest, OrderStatus
from echelon.live.brokers.alpaca import AlpacaBroker, open_alpaca, time_in_force

pytest.importorskip("alpaca", reason="alpaca-py is in the extra `live`")

ROOT = Path(__file__).parents[1]
SYMBOLS = ("AAPL", "MSFT", "NVDA", "JNJ")
KEYS = Keys(SecretStr(KEY), SecretStr(SECRET))


@pytest.fixture
def venue(tmp_path: Path) -> Iterator[FakeAlpaca]:
    with FakeAlpaca(tmp_path / "venue.db", hang=3.0) as fake:
        yield fake


def broker_at(venue: FakeAlpaca, **settings: Any) -> AlpacaBroker:
    given = {"keys": KEYS, "url": venue.url, "seconds": 10.0, "freq": "1min", **settings}
    return AlpacaBroker(given.pop("symbols", SYMBOLS), **given)


@pytest.fixture
def broker(venue: FakeAlpaca) -> Iterator[AlpacaBroker]:
    with broker_at(venue, seconds=1.0) as opened:
        yield opened


def order(name: str, shares: float = 3.0, symbol: str = "AAPL", side: Any = "buy") -> OrderRequest:
    return OrderRequest(name, symbol, side, shares, 100.0)


def test_an_order_is_filled_and_seen_in_fills_and_account(
    venue: FakeAlpaca, broker: AlpacaBroker
) -> None:
    assert broker.account().cash == 1_000_000.0
    assert broker.submit([order("a"), order("b", 1.5, "MSFT")]) == [
        OrderStatus("a", "filled", 3.0),
        OrderStatus("b", "filled", 1.5),
    ]
    fills, cursor = broker.fills("")
    assert [(f.order_id, f.symbol, f.shares, f.price) for f in fills] == [
        ("a", "AAPL", 3.0, 100.0),
        ("b", "MSFT", 1.5, 100.0),
    ]
    assert len({f.trade_id for f in fills}) == 2
    assert broker.fills(cursor) == ([], cursor)
    account = broker.account()
    assert account.cash == 1_000_000.0 - 450.0
    assert account.positions == {"AAPL": 3.0, "MSFT": 1.5}
    broker.submit([order("c", 1.0, side="sell")])
    assert [f.shares for f in broker.fills(cursor)[0]] == [-1.0]
    assert broker.account().positions == {"AAPL": 2.0, "MSFT": 1.5}


def test_the_same_order_again_gets_the_same_answer_and_no_second_order(
    venue: FakeAlpaca, broker: AlpacaBroker
) -> None:
    first = broker.submit([order("a")])
    with broker_at(venue) as other:
        assert other.submit([order("a")]) == first == broker.submit([order("a")])
    state = venue.state()
    assert state["duplicates"] == 0
    assert state["posts"] == {"a": 3}
    assert state["positions"] == {"AAPL": 3.0}


BEFORE = ("drop_before", "error_before", "hang_before", "throttle")
AFTER = ("drop_after", "error_after", "hang_after", "garbage", "cut")


@pytest.mark.parametrize("fault", [*BEFORE, *AFTER])
def test_without_an_answer_an_order_is_unknown_until_it_is_looked_up(
    venue: FakeAlpaca, broker: AlpacaBroker, fault: str
) -> None:
    venue.strike(fault, path="POST")
    first, second = broker.submit([order("a"), order("b")])
    assert first.state == "unknown"
    assert second.state == "unknown"
    assert "not sent" in str(second.reason)
    assert venue.state()["posts"] == ({} if fault in BEFORE else {"a": 1})  # never sent blindly
    found = broker.orders(["a", "b"])
    assert found == ({} if fault in BEFORE else {"a": OrderStatus("a", "filled", 3.0)})
    lost = [o for o in (order("a"), order("b")) if o.id not in found]
    assert {status.state for status in broker.submit(lost)} == {"filled"}
    assert venue.state()["duplicates"] == 0
    assert venue.state()["positions"] == {"AAPL": 6.0}


def test_a_copy_that_is_refused_is_not_taken_for_the_order(
    venue: FakeAlpaca, broker: AlpacaBroker
) -> None:
    # The copy is refused for the shares that the first one sold, before the id is looked at.
    broker.submit([order("a")])
    venue.strike("replay", path="POST")
    assert broker.submit([order("b", side="sell")]) == [OrderStatus("b", "filled", 3.0)]
    assert broker.account().positions == {}


@pytest.mark.parametrize("n_orders", [1, 9])
def test_orders_that_never_got_there_are_missing(
    venue: FakeAlpaca, broker: AlpacaBroker, n_orders: int
) -> None:
    names = [f"o{n}" for n in range(n_orders)]
    assert broker.orders(names) == {}
    broker.submit([order(name) for name in names[1:]])
    assert set(broker.orders(names)) == set(names[1:])


def test_a_rejection_says_why(venue: FakeAlpaca, broker: AlpacaBroker) -> None:
    venue.book.blocked.add("JNJ")
    poor, short, blocked, good = broker.submit(
        [
            order("poor", 1e6),
            order("short", 5.0, side="sell"),
            order("blocked", symbol="JNJ"),
            order("good"),
        ]
    )
    assert poor == OrderStatus("poor", "rejected", 0.0, "insufficient buying power")
    assert short.state == "rejected"
    assert "insufficient qty" in str(short.reason)
    assert blocked.reason == 'asset "JNJ" is not tradable'
    assert good.state == "filled"
    assert set(venue.state()["orders"]) == {"good"}


def test_parts_are_fills_of_their_own_and_the_rest_can_be_cancelled(venue: FakeAlpaca) -> None:
    venue.book.fill = "hold"
    with broker_at(venue) as broker:
        assert broker.submit([order("a", 10.0)]) == [OrderStatus("a", "accepted")]
        name = venue.state()["orders"]["a"]["id"]
        venue.book.trade(name, 4.0)
        assert broker.orders(["a"])["a"] == OrderStatus("a", "partial", 4.0)
        assert broker.open_orders() == [OrderStatus("a", "partial", 4.0)]
        first, cursor = broker.fills("")
        venue.book.trade(name, 1.0)
        second, cursor = broker.fills(cursor)
        assert [f.shares for f in (*first, *second)] == [4.0, 1.0]
        broker.cancel(["a", "never sent"])
        assert broker.orders(["a"])["a"] == OrderStatus("a", "cancelled", 5.0, "canceled")
        broker.cancel(["a"])  # of what is final: nothing happens
        assert broker.open_orders() == []
        assert broker.fills(cursor)[0] == []
        venue.book.fill = "parts"
        broker.submit([order("b", 7.0)])
        broker.orders(["b"])
        assert broker.orders(["b"])["b"] == OrderStatus("b", "filled", 7.0)
        assert [f.shares for f in broker.fills(cursor)[0]] == [3.5, 3.5]


@pytest.mark.parametrize(
    ("venue_says", "state"),
    [
        ("expired", "cancelled"),
        ("replaced", "cancelled"),
        ("rejected", "rejected"),
        ("pending_cancel", "accepted"),
        ("done_for_day", "accepted"),
        ("a state of tomorrow", "accepted"),
    ],
)
def test_states_of_the_venue_are_ours(venue: FakeAlpaca, venue_says: str, state: str) -> None:
    venue.book.fill = "hold"
    with broker_at(venue) as broker:
        broker.submit([order("a")])
        venue.book.finish("a", venue_says)
        status = broker.orders(["a"])["a"]
    assert status.state == state
    assert (status.reason is None) == (state == "accepted")


def test_fills_survive_a_restart_and_pages(venue: FakeAlpaca) -> None:
    names = [f"o{n:03}" for n in range(110)]
    with broker_at(venue) as broker:
        broker.submit([order(name, 1.0) for name in names])
        everything, end = broker.fills("")
    assert [fill.order_id for fill in everything] == names
    late = lambda: datetime(2100, 1, 1, tzinfo=UTC)  # noqa: E731 (nothing can be booked late)
    for now in (late, lambda: datetime.now(UTC)):
        with broker_at(venue, now=now) as again:
            assert again.fills("")[0] == everything
            fills, cursor = again.fills(end)
            assert fills == []
            assert again.fills(cursor)[0] == []
    assert len(cursor) > len(everything[0].trade_id)  # fresh ones are told apart by id …
    with broker_at(venue, now=late) as again:
        assert again.fills("")[1] == everything[-1].trade_id  # … settled ones by the last


def test_a_fill_that_is_booked_late_and_out_of_order_is_not_lost(venue: FakeAlpaca) -> None:
    with broker_at(venue) as broker:
        broker.submit([order("a"), order("b")])
        whole = venue.book.activities
        hidden = whole({})[0]["id"]
        venue.book.activities = lambda query: [  # type: ignore[method-assign]
            item for item in whole(query) if item["id"] != hidden
        ]
    with broker_at(venue) as broker:  # which knows nothing of what the orders said
        fills, cursor = broker.fills("")
        assert [fill.order_id for fill in fills] == ["b"]
        venue.book.activities = whole  # type: ignore[method-assign]
        fills, cursor = broker.fills(cursor)
        assert [fill.order_id for fill in fills] == ["a"]
        assert broker.fills(cursor)[0] == []


def test_fills_wait_until_they_add_up_to_what_orders_say(
    venue: FakeAlpaca, broker: AlpacaBroker
) -> None:
    broker.submit([order("a")])
    venue.strike("late", "late", "late", path="activities")
    with pytest.raises(BrokerError, match="filled by more than"):
        broker.fills("")
    fills, cursor = broker.fills("")
    assert len(fills) == 1
    broker.orders(["a"])  # said again, of fills that lie before the cursor
    assert broker.fills(cursor)[0] == []


def test_what_the_bundle_does_not_trade_is_left_out(
    venue: FakeAlpaca, caplog: pytest.LogCaptureFixture
) -> None:
    with broker_at(venue) as broker:
        broker.submit([order("a"), order("b", symbol="MSFT")])
    with broker_at(venue, symbols=("AAPL",)) as narrow:
        assert [fill.symbol for fill in narrow.fills("")[0]] == ["AAPL"]
        assert narrow.account().positions == {"AAPL": 3.0}
    assert [r.levelname for r in caplog.records if "MSFT" in r.getMessage()] == ["WARNING"]


def test_quantities_are_cut_to_what_the_venue_takes(venue: FakeAlpaca) -> None:
    with broker_at(venue) as broker:
        broker.submit([order("a", 0.12345678987), order("tiny", 1e-12)])
    with broker_at(venue, lots=True) as broker:
        broker.submit([order("b", 2.9)])
        assert broker.submit([order("c", 0.5)])[0].state == "rejected"
    orders = venue.state()["orders"]
    assert {name: body["qty"] for name, body in orders.items()} == {"a": "0.123456789", "b": "2.0"}


NEW_YORK = {"evening": (1, 30), "night": (9, 0), "late": (14, 27), "day": (15, 0), "close": (21, 5)}


@pytest.mark.parametrize(
    ("freq", "shares", "when", "expected"),
    [
        ("1d", 3.0, "evening", "opg"),
        ("1d", 3.0, "night", "opg"),
        ("1d", 3.0, "late", "day"),
        ("1d", 3.0, "day", "day"),
        ("1d", 3.0, "close", "day"),
        ("1d", 3.5, "night", "day"),
        ("1min", 3.0, "night", "day"),
    ],
)
def test_time_in_force(freq: Any, shares: float, when: str, expected: str) -> None:
    at = datetime(2026, 1, 15, *NEW_YORK[when], tzinfo=UTC)  # New York is five hours behind
    assert time_in_force(freq, shares, at) == expected


def test_time_in_force_is_what_the_venue_gets(venue: FakeAlpaca) -> None:
    night = datetime(2026, 1, 15, 9, 0, tzinfo=UTC)
    with broker_at(venue, freq="1d", now=lambda: night) as broker:
        broker.submit([order("whole"), order("part", 1.5)])
    orders = venue.state()["orders"]
    assert {n: o["time_in_force"] for n, o in orders.items()} == {"whole": "opg", "part": "day"}


def test_a_limit_makes_a_limit_order(
    venue: FakeAlpaca, broker: AlpacaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, submit = [], broker._client.submit_order
    monkeypatch.setattr(
        broker._client, "submit_order", lambda request: asked.append(request) or submit(request)
    )
    broker.submit([order("a"), order("b")._replace(limit=97.1234), order("c")._replace(limit=0.5)])
    assert [request.type.value for request in asked] == ["market", "limit", "limit"]
    assert [getattr(request, "limit_price", None) for request in asked] == [None, 97.12, 0.5]


# Faults at random: exactly once, whatever happens.


def bring_home(broker: AlpacaBroker, orders: list[OrderRequest]) -> None:
    """What the engine does: send, then look up and send what is missing, until all are known."""
    in_flight = {item.id: item for item in orders}
    answers = broker.submit(orders)
    for _ in range(200):
        for status in answers:
            if status.state != "unknown":
                in_flight.pop(status.id, None)
        if not in_flight:
            return
        try:
            known = broker.orders(list(in_flight))
            lost = [item for item in in_flight.values() if item.id not in known]
            answers = [*known.values(), *broker.submit(lost)]
        except BrokerError:
            answers = []
    raise AssertionError(f"never answered of {list(in_flight)}")


def ask(request: Callable[..., Any], *arguments: Any) -> Any:
    for _ in range(200):
        try:
            return request(*arguments)
        except BrokerError:
            continue
    raise AssertionError("never answered")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_under_random_faults_every_order_is_there_exactly_once(tmp_path: Path, seed: int) -> None:
    rates = dict.fromkeys(
        (*BEFORE, *AFTER, "replay", "slow", "late"),
        0.02,
    )
    rng = random.Random(seed)
    given: list[Any] = []
    with FakeAlpaca(tmp_path / "v.db", rates=rates, seed=seed, hang=0.3, fill="parts") as venue:
        cursor = ""
        wanted: dict[str, float] = {}
        for bar in range(12):
            orders = [
                order(f"{bar}-{symbol}", float(rng.randint(1, 9)), symbol) for symbol in SYMBOLS
            ]
            with broker_at(venue, seconds=0.1) as broker:  # every bar after a restart
                bring_home(broker, orders)
                ask(broker.orders, [item.id for item in orders])
                fills, cursor = ask(broker.fills, cursor)
            given += fills
            wanted |= {item.id: item.shares for item in orders}
        with broker_at(venue) as broker:
            venue.do({"rates": {}})
            states = [broker.orders(list(wanted)) for _ in range(3)][-1]
            assert {status.state for status in states.values()} == {"filled"}
            fills, cursor = broker.fills(cursor)
            given += fills
            account = broker.account()
        state = venue.state()
    assert sum(state["struck"].values()) > 20
    assert state["duplicates"] == 0
    assert {name: float(o["qty"]) for name, o in state["orders"].items()} == wanted
    assert len({fill.trade_id for fill in given}) == len(given) == len(state["fills"])
    got: dict[str, float] = {}
    for fill in given:
        got[fill.order_id] = got.get(fill.order_id, 0.0) + fill.shares
    assert got == pytest.approx(wanted)
    assert account.cash == pytest.approx(1_000_000.0 - 100.0 * sum(wanted.values()))


def test_the_fake_in_a_process_of_its_own_keeps_its_book(tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "tests" / "fake_alpaca.py")]
    command = [*program, "--book", str(tmp_path / "v.db")]
    for n in (1, 2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            call(url, {"prices": {"AAPL": 50.0}})
            with broker_at(SimpleNamespace(url=url)) as broker:  # type: ignore[arg-type]
                broker.submit([order("a"), order(f"b{n}")])
            state = call(url)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
    assert state["duplicates"] == 0
    assert state["posts"] == {"a": 2, "b1": 1, "b2": 1}
    assert state["cash"] == 1_000_000.0 - 9 * 50.0


# Keys and accounts.


def test_wrong_keys_stop_with_a_remedy_and_are_never_shown(
    venue: FakeAlpaca, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "aSecretThatNobodyMaySee"
    with broker_at(venue, keys=Keys(SecretStr("aKeyNobodySees"), SecretStr(secret))) as broker:
        for ask_venue in (broker.account, lambda: broker.submit([order("a")])):
            with pytest.raises(ConfigError, match="APCA_API_SECRET_KEY") as caught:
                ask_venue()
            assert "aKeyNobodySees" not in str(caught.value)
            assert secret not in str(caught.value)
        shown = repr(broker._keys) + repr(vars(broker)) + caplog.text
    assert secret not in shown
    assert "aKeyNobodySees" not in shown


@pytest.mark.parametrize("fault", FAULTS := (*BEFORE, *AFTER))
def test_no_failure_shows_the_keys(
    venue: FakeAlpaca, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    caplog.set_level(logging.DEBUG)
    with broker_at(venue, seconds=1.0) as broker:
        venue.strike(fault, fault)
        answers = broker.submit([order("a")])
        with pytest.raises(BrokerError) as caught:
            broker.orders(["a"])
    text = json.dumps(answers) + str(caught.value) + repr(caught.value.__dict__) + caplog.text
    assert KEY not in text
    assert SECRET not in text


def request(address: str, **universe: Any) -> Any:
    facts = {"timezone": "America/New_York", "calendar": "XNYS", "freq": "1d", **universe}
    rules = {"lots": False}
    bundle = SimpleNamespace(path="b", symbols=SYMBOLS, universe=facts, rules=rules)
    return SimpleNamespace(address=address, bundle=bundle)


@pytest.fixture
def keys_set(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("APCA_API_KEY_ID", KEY)
    monkeypatch.setenv("APCA_API_SECRET_KEY", SECRET)
    monkeypatch.delenv("ECHELON_ALPACA_LIVE", raising=False)
    monkeypatch.delenv("ECHELON_ALPACA_URL", raising=False)
    return monkeypatch


def test_the_paper_account_unless_told_twice(keys_set: pytest.MonkeyPatch) -> None:
    with open_alpaca(request("")) as paper:
        assert paper._client._base_url == "https://paper-api.alpaca.markets"
        assert paper.name == "alpaca"
    keys_set.setenv("ECHELON_ALPACA_LIVE", "yes")
    with open_alpaca(request("")) as paper:
        assert paper._client._base_url == "https://paper-api.alpaca.markets"
    with open_alpaca(request("live")) as live:
        assert live._client._base_url == "https://api.alpaca.markets"
        assert live.name == "alpaca:live"  # so that a journal of one is refused with the other
    keys_set.setenv("ECHELON_ALPACA_LIVE", "1")
    with pytest.raises(UsageError, match="ECHELON_ALPACA_LIVE=yes"):
        open_alpaca(request("live"))
    with pytest.raises(UsageError, match="alpaca or alpaca:live"):
        open_alpaca(request("lively"))


def test_keys_are_needed_and_another_market_is_refused(keys_set: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="US stocks"):
        open_alpaca(request("", timezone="Asia/Shanghai", calendar="XSHG"))
    keys_set.delenv("APCA_API_SECRET_KEY")
    with pytest.raises(ConfigError, match="APCA_API_SECRET_KEY"):
        open_alpaca(request(""))


def test_the_url_of_a_fake_is_one_on_this_machine(keys_set: pytest.MonkeyPatch) -> None:
    keys_set.setenv("ECHELON_ALPACA_URL", "http://127.0.0.1:8080/")
    assert override_url() == "http://127.0.0.1:8080"
    assert override_url("ws") == "ws://127.0.0.1:8080"
    for text in ("https://127.0.0.1.evil.example", "http://example.com", "http://127.0.0.1/x"):
        keys_set.setenv("ECHELON_ALPACA_URL", text)
        with pytest.raises(UsageError, match="must be http://127"):
            override_url()


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "alpaca.trading.client", None)
    with pytest.raises(UsageError, match="extra `live`"):
        AlpacaBroker(SYMBOLS, "1d", keys=KEYS)


def test_answers_that_cannot_be_understood_are_no_answers(venue: FakeAlpaca) -> None:
    with broker_at(venue) as broker:
        venue.data["/v2/positions"] = {"symbol": "AAPL"}
        with pytest.raises(BrokerError, match="expected a list"):
            broker.account()
        venue.data["/v2/positions"] = [{"symbol": "AAPL", "qty": "many"}]
        with pytest.raises(BrokerError, match="'qty': expected a number"):
            broker.account()
        del venue.data["/v2/positions"]
        venue.data["/v2/account"] = {"cash": "nan"}
        with pytest.raises(BrokerError, match="'cash'"):
            broker.account()
        venue.data["/v2/orders"] = [{"id": "1", "client_order_id": "another", "status": "new"}]
        assert broker.submit([order("a")])[0].state == "unknown"
        venue.data["/v2/orders"] = {"id": "1", "client_order_id": "another", "status": "new"}
        answer = broker.submit([order("a")])[0]
        assert answer.state == "unknown"
        assert "another" in str(answer.reason)
