"""The engine on Alpaca and on order sheets: every order once, and journal and venue agree."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from broker_adapters import SheetAdapter
from engines import Served, daily
from fake_alpaca import KEY, SECRET, FakeAlpaca

from echelon.config.live import LiveConfig
from echelon.live.brokers import open_broker
from echelon.live.engine import Command, LiveEngine
from echelon.live.feeds import open_feed
from echelon.live.feeds.alpaca import last_factors
from echelon.live.feeds.history import StoredBars
from echelon.live.journal import Journal
from echelon.serving.engine import Account

pytest.importorskip("alpaca", reason="alpaca-py is in the extra `live`")

BARS = 16
QUICK = LiveConfig(sync=False, snapshot_every=5)
FAULTS = ("drop_before", "drop_after", "error_before", "error_after", "replay", "garbage", "cut")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Served:
    return daily(tmp_path_factory.mktemp("daily"), bars_file, "A2C")


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APCA_API_KEY_ID", KEY)
    monkeypatch.setenv("APCA_API_SECRET_KEY", SECRET)


def until(known: Served) -> date:
    day = known.world.times[known.rows(BARS).start - 1].astype("datetime64[D]").item()
    assert isinstance(day, date)
    return day


def open_engine(known: Served, journal: Path, broker: str) -> LiveEngine:
    day = until(known)
    return LiveEngine.open(
        *(known.bundle, known.store, journal, open_feed("store", known.bundle, known.store)),
        open_broker(broker, known.bundle, journal, known.store, day, QUICK),
        QUICK,
        until=day,
    )


@pytest.mark.parametrize("rate", [0.0, 0.03])
def test_every_order_is_at_alpaca_once_and_no_key_in_the_journal(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    rates = dict.fromkeys(FAULTS, rate)
    with FakeAlpaca(tmp_path / "v.db", rates=rates, seed=5, cash=200_000.0) as venue:
        monkeypatch.setenv("ECHELON_ALPACA_URL", venue.url)
        done = 0
        while done < BARS:  # a new process every few bars
            with open_engine(served, tmp_path / "j.db", "alpaca") as engine:
                engine.run(bars=min(5, BARS - done))
                done = engine.state.bars
                assert engine.state.mode == "running", engine.state.why
        venue.do({"rates": {}})
        state = venue.state()
    with Journal.read(tmp_path / "j.db") as journal:
        journal.verify()
        sent = {e.body["id"]: e.body for e in journal.entries(kinds=("order",))}
        last = {e.body["id"]: e.body["state"] for e in journal.entries(kinds=("status",))}
        fills = [f for e in journal.entries(kinds=("fills",)) for f in e.body["fills"]]
    assert state["duplicates"] == 0
    assert len(state["orders"]) > 3
    assert set(state["orders"]) == {name for name, s in last.items() if s == "filled"}
    assert set(state["orders"]) <= set(sent)
    for name, body in state["orders"].items():
        assert body["symbol"] == sent[name]["symbol"]
        assert float(body["qty"]) == pytest.approx(sent[name]["shares"], abs=1e-9)
    known = {f["id"] for f in state["fills"]}
    assert len({f["trade_id"] for f in fills}) == len(fills)
    assert {f["trade_id"] for f in fills} <= known  # those of the last bar come with the next
    assert (sum(state["struck"].values()) > 0) == (rate > 0)
    for path in tmp_path.glob("j.db*"):
        assert SECRET.encode() not in path.read_bytes()
        assert KEY.encode() not in path.read_bytes()


def test_fills_between_two_questions_and_rounding_are_no_differences(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeAlpaca(tmp_path / "v.db", cash=200_000.0, fill="hold") as venue:
        monkeypatch.setenv("ECHELON_ALPACA_URL", venue.url)
        venue.book.prices = dict.fromkeys(served.bundle.symbols, 1.0)
        with open_engine(served, tmp_path / "j.db", "alpaca") as engine:
            engine.run(bars=1)
            assert engine.state.orders
        with open_engine(served, tmp_path / "j.db", "alpaca") as engine:
            ask = engine.broker.account

            def account() -> Account:
                venue.book.settle()  # behind the answer about fills
                held = ask()
                dust = {s: held.positions.get(s, 0.0) - 1e-9 for s in served.bundle.symbols}
                return held._replace(positions=dust)

            monkeypatch.setattr(engine.broker, "account", account)
            assert engine.reconcile() == []
            assert engine.state.mode == "running", engine.state.why
            assert (
                engine.state.counts["fills"] == 2
            )  # the first of a new journal says from where on
            assert engine.state.account["cash"] == venue.book.cash() < 200_000.0


@pytest.mark.parametrize("how", ["adopt", "undo", "resume"])
def test_a_trade_by_hand_halts_and_is_adopted_or_undone(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("echelon.live.engine._FIT_SECONDS", 0.1)
    symbol = served.bundle.symbols[0]
    with FakeAlpaca(tmp_path / "v.db", cash=200_000.0) as venue:
        monkeypatch.setenv("ECHELON_ALPACA_URL", venue.url)
        with open_engine(served, tmp_path / "j.db", "alpaca") as engine:
            engine.run(bars=3)
            assert engine.state.mode == "running", engine.state.why
            by_hand = {"client_order_id": "mine", "symbol": symbol, "side": "buy", "qty": "7"}
            venue.book.prices[symbol] = 0.01  # all the money is spent
            venue.book.place({**by_hand, "type": "market", "time_in_force": "day"})
            del venue.book.prices[symbol]
            engine.run(bars=2)
            assert engine.state.mode == "halted"
            assert engine.state.counts["difference"] == 1
        with open_engine(served, tmp_path / "j.db", "alpaca") as engine:  # also behind a restart
            held = venue.book.positions().get(symbol, 0.0)
            said = engine.obey(Command("reconcile", "ann"))
            assert said["differences"] == [f"{symbol}: +7 shares at the venue"]
            if how != "resume":
                engine.obey(Command("reconcile", "ann", adopt=how == "adopt", undo=how == "undo"))
            engine.obey(Command("resume", "ann"))
            now = venue.book.positions().get(symbol, 0.0)
            assert now == pytest.approx(held - 7.0 if how == "undo" else held)
            assert engine.obey(Command("reconcile", "ann"))["differences"] == []
            engine.run(bars=2)
            assert engine.state.mode == "running", engine.state.why


def test_flatten_sells_what_was_filled_since_the_last_bar(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeAlpaca(tmp_path / "v.db", cash=200_000.0) as venue:
        monkeypatch.setenv("ECHELON_ALPACA_URL", venue.url)
        with open_engine(served, tmp_path / "j.db", "alpaca") as engine:
            engine.run(bars=1)
            assert engine.state.account["positions"] == {}
            assert venue.book.positions()
            engine.obey(Command("flatten", "ann"))
            assert venue.book.positions() == {}
            assert engine.reconcile() == []
            assert engine.state.why == "command: flattened by an operator"


def test_the_engine_trades_by_order_sheets(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ECHELON_SHEET_WEBHOOK", raising=False)
    desk = SheetAdapter(tmp_path)
    desk.held = dict.fromkeys(served.bundle.symbols, 0.0)
    desk.cash = 100_000.0
    desk._write()
    for _ in range(6):
        with open_engine(served, tmp_path / "j.db", f"sheet:{desk.path}") as engine:
            engine.run(bars=1)
            assert engine.state.mode == "running", engine.state.why
            desk.go_on(engine.broker)
    with Journal.read(tmp_path / "j.db") as journal:
        sent = [e.body["id"] for e in journal.entries(kinds=("order",))]
        fills = [f for e in journal.entries(kinds=("fills",)) for f in e.body["fills"]]
    written = [order["id"] for order in desk._read("orders")]
    assert written == sent
    assert len(set(written)) == len(written) > 1
    assert {f["order_id"] for f in fills} <= set(written)
    assert len(fills) > 0


def test_anchors_are_the_stores_last_factors(served: Served) -> None:
    bars = StoredBars.from_bundle(served.bundle, served.store)
    after = served.world.times[served.rows(BARS).start].astype("datetime64[us]").item()
    factors = last_factors(bars, served.bundle.symbols, "1d", after)
    has = "factor" in served.bundle.universe["fields"]
    assert set(factors) == (set(served.bundle.symbols) if has else set())
    assert all(day == after.date() and factor > 0.0 for day, factor in factors.values())
