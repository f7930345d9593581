"""The live engine: bit for bit the backtest, an order once, and going on wherever it died."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Served, a_share, daily

from echelon.config.live import GateConfig, LimitsConfig, LiveConfig
from echelon.errors import EchelonError, StoreError, UsageError
from echelon.files import read_json, write_json
from echelon.live.brokers import BrokerError, OrderRequest, open_broker
from echelon.live.control import ControlServer, ask_engine, control_file, write_mode
from echelon.live.engine import Clock, Command, LiveEngine, holdable
from echelon.live.feeds import Feed, open_feed, publish_bars
from echelon.live.journal import Journal
from echelon.live.limits import STOPPED, RiskRecord, Situation, pass_orders
from echelon.live.replay import replay_journal
from echelon.serving.engine import Account

Get = Callable[..., Served]
QUICK = LiveConfig(sync=False, snapshot_every=7)


_LIMITS = ("risk.max_drawdown=0.03", "risk.target_volatility=0.1")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Get:
    """Bundles by market and algorithm, each made once."""
    known: dict[tuple[str, ...], Served] = {}

    def get(market: str = "daily", algo: str = "A2C", *limits: str) -> Served:
        key = market, algo, *limits
        if key not in known:
            path = tmp_path_factory.mktemp(f"{market}-{algo}")
            make: Any = daily if market == "daily" else a_share
            where = bars_file if market == "daily" else market
            known[key] = make(path, where, algo, None, *limits)
        return known[key]

    return get


def _until(known: Served, bars: int) -> date:
    """The day before the last `bars` of validation."""
    day = known.world.times[known.rows(bars).start - 1].astype("datetime64[D]").item()
    assert isinstance(day, date)
    return day


def _engine(
    known: Served,
    journal: Path,
    until: date,
    feed: str = "store",
    broker: str = "paper",
    config: LiveConfig = QUICK,
) -> LiveEngine:
    return LiveEngine.open(
        *(known.bundle, known.store, journal, open_feed(feed, known.bundle, known.store)),
        open_broker(broker, known.bundle, journal, known.store, until, config),
        *(config,),
        until=until,
    )


@pytest.mark.parametrize("limits", [(), _LIMITS], ids=["free", "budget"])
@pytest.mark.parametrize("algo", ["A2C", "SAC", "HIERARCHY"])
@pytest.mark.parametrize("market", ["daily", "1d", "5min"])
def test_a_journal_equals_the_backtest_bit_for_bit(
    served: Get, tmp_path: Path, market: str, algo: str, limits: tuple[str, ...]
) -> None:
    known, bars = served(market, algo, *limits), 24
    with _engine(known, tmp_path / "j.db", _until(known, bars)) as engine:
        engine.run(bars=bars)
        assert engine.state.mode == "running", engine.state.why
    with Journal.read(tmp_path / "j.db") as journal:
        journal.verify()
        done = replay_journal(known.bundle, journal)
    assert done.differences == ()
    assert done.compared == len(done.decisions) == bars
    assert done.orders > 0
    assert done.backtest is not None
    assert np.abs(done.backtest.fills.shares).sum() > 0.0


@pytest.fixture(params=[(), _LIMITS], ids=["free", "budget"])
def run_whole(
    request: pytest.FixtureRequest, served: Get, tmp_path: Path
) -> tuple[Served, date, list[dict[str, Any]]]:
    """(a flat agent's bundle, day before its bars, what its journal holds after 12 bars)."""
    known = served("daily", "A2C", *request.param)
    until = _until(known, 12)
    with _engine(known, tmp_path / "whole.db", until) as engine:
        engine.run(bars=12)
    return known, until, _content(tmp_path / "whole.db")


def _content(path: Path) -> list[dict[str, Any]]:
    """Decisions, orders and fills of a journal, without what a restart may do twice."""
    kinds = ("bars", "decision", "order", "fills", "account")
    with Journal.read(path) as journal:
        journal.verify()
        entries = [(entry.kind, dict(entry.body)) for entry in journal.entries(kinds=kinds)]
    for _, body in entries:
        body.pop("received", None)
    return [{"kind": kind, **body} for kind, body in entries]


def test_stopped_and_started_again_at_every_bar_it_is_the_same_run(
    run_whole: tuple[Served, date, list[dict[str, Any]]], tmp_path: Path
) -> None:
    known, until, whole = run_whole
    for k in range(12):
        feed = "store" if k % 2 else f"store:{known.store}"
        with _engine(known, tmp_path / "again.db", until, feed) as engine:
            assert engine.state.bars == k
            engine.run(bars=1)
    assert _content(tmp_path / "again.db") == whole


class _DeathError(Exception):
    """Where the test lets the engine die."""


def test_an_engine_that_dies_between_any_two_writes_goes_on_as_if_nothing_had_been(
    run_whole: tuple[Served, date, list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, until, whole = run_whole
    rng, path = random.Random(3), tmp_path / "again.db"
    points = {
        Journal: ("append", "commit", "snapshot"),
        LiveEngine: ("_send", "_resolve", "_take_answers", "_write_orders"),
    }
    fuse = [0]

    def dying(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            fuse[0] -= 1
            if fuse[0] == 0:
                raise _DeathError
            result = method(*arguments, **named)
            if fuse[0] == 1:
                fuse[0] = 0
                raise _DeathError
            return result

        return call

    with monkeypatch.context() as patched:
        for owner, names in points.items():
            for name in names:
                patched.setattr(owner, name, dying(getattr(owner, name)))
        deaths = done = 0
        while done < 12:
            fuse[0] = rng.randint(1, 40)
            try:
                with _engine(known, path, until) as engine:
                    engine.run(bars=12 - engine.state.bars)
                    done = engine.state.bars
            except _DeathError:
                deaths += 1
    assert deaths > 10
    assert _content(path) == whole


def test_what_an_operator_says_is_an_entry_and_holds(served: Get, tmp_path: Path) -> None:
    known = served()
    until, path = _until(known, 12), tmp_path / "j.db"
    with _engine(known, path, until) as engine:
        engine.run(bars=3)
        engine.obey(Command("halt", "ann"))
        engine.run(bars=2)
        assert engine.state.mode == "halted"
    with _engine(known, path, until) as engine:  # also behind a restart
        assert engine.state.mode == "halted"
        assert engine.state.why == "command of ann"
        engine.run(bars=1)
        engine.obey(Command("reduce-only", "ann"))
        engine.run(bars=2)
        engine.obey(Command("resume", "ann"))
        engine.run(bars=2)
        with pytest.raises(UsageError, match="'dance' is no command"):
            engine.obey(Command("dance"))
    with Journal.read(path) as journal:
        stopped = [(e.body["code"], e.body["side"]) for e in journal.entries(kinds=("stopped",))]
        commands = [e.body["name"] for e in journal.entries(kinds=("command",))]
        orders = [e.body["bar"] for e in journal.entries(kinds=("order",))]
        times = [e.body["time"] for e in journal.entries(kinds=("bars",))]
        done = replay_journal(known.bundle, journal)
    assert commands == ["halt", "reduce-only", "resume"]
    assert {code for code, _ in stopped} <= {"halted", "reduce_only"}
    assert "halted" in {code for code, _ in stopped}
    assert ("reduce_only", "sell") not in stopped
    assert not {bar[:10] for bar in orders} & {time[:10] for time in times[3:6]}
    # what was decided follows from what was seen all the same
    assert done.differences == ()
    assert done.touched is not None
    assert 0 < done.compared < 10


def test_flatten_sells_all_and_halts(served: Get, tmp_path: Path) -> None:
    known = served()
    with _engine(known, tmp_path / "j.db", _until(known, 12)) as engine:
        engine.run(bars=6)
        assert engine.state.account["positions"]
        engine.obey(Command("flatten", "ann"))
        assert engine.state.mode == "halted"
        engine.run(bars=3)
        assert engine.state.account["positions"] == {}
        assert engine.state.orders == {}


@pytest.mark.parametrize("killed", [False, True])
def test_flatten_whose_orders_were_lost_sells_all_the_same(
    served: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    known, path = served(), tmp_path / "j.db"
    with _engine(known, path, _until(known, 12)) as engine:
        engine.run(bars=6)
        lose = _Losing(engine.broker.submit, KeyboardInterrupt if killed else BrokerError)
        monkeypatch.setattr(engine.broker, "submit", lose)
        if not killed:
            engine.obey(Command("flatten", "ann"))
            engine.run(bars=2)
        else:
            with pytest.raises(KeyboardInterrupt):
                engine.obey(Command("flatten", "ann"))
        assert lose.lost
    with _engine(known, path, _until(known, 12)) as engine:
        engine.run(bars=2)
        assert engine.state.mode == "halted"
        assert engine.state.account["positions"] == {}


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"max_order_value": 1.0}, "max_order_value"),
        ({"max_position": 1e-6}, "max_position"),
        ({"max_turnover": 1e-9}, "max_turnover"),
        ({"min_cash": 1.0}, "min_cash"),
        ({"max_orders_per_minute": 1}, "max_orders_per_minute"),
    ],
)
def test_limits_stop_orders_with_their_code(
    served: Get, tmp_path: Path, limits: dict[str, Any], code: str
) -> None:
    known = served()
    config = LiveConfig(sync=False, limits=LimitsConfig(**limits))
    path = tmp_path / "j.db"
    with _engine(known, path, _until(known, 12), config=config) as engine:
        engine.run(bars=4)
    with Journal.read(path) as journal:
        assert {e.body["code"] for e in journal.entries(kinds=("stopped",))} == {code}
    assert code in STOPPED


@pytest.mark.parametrize("limit", ["max_daily_loss", "max_drawdown"])
def test_losses_halt_the_engine(served: Get, tmp_path: Path, limit: str) -> None:
    known = served()
    config = LiveConfig(sync=False, limits=LimitsConfig(**{limit: 1e-9}))
    with _engine(known, tmp_path / "j.db", _until(known, 24), config=config) as engine:
        engine.run(bars=24)
        assert engine.state.mode == "halted"
        assert f"limits.{limit}" in engine.state.why


def test_the_kill_file_stops_every_order_while_it_is_there(served: Get, tmp_path: Path) -> None:
    known, kill = served(), tmp_path / "STOP"
    config = LiveConfig(sync=False, limits=LimitsConfig(kill_file=kill))
    with _engine(known, tmp_path / "j.db", _until(known, 12), config=config) as engine:
        kill.touch()
        engine.run(bars=3)
        assert "order" not in engine.state.counts
        assert engine.state.counts["stopped"] > 0
        kill.unlink()
        engine.run(bars=3)
        sent = engine.state.counts["order"]
        assert sent > 0
        kill.touch()
        with pytest.raises(UsageError, match="STOP is there"):
            engine.obey(Command("flatten", "ann"))
        assert engine.state.counts["order"] == sent


def test_a_journal_of_another_bundle_and_a_bundle_that_fills_at_the_close_are_refused(
    served: Get, tmp_path: Path, bars_file: Path
) -> None:
    known, path = served(), tmp_path / "j.db"
    until = _until(known, 12)
    with _engine(known, path, until) as engine:
        engine.run(bars=2)
    other = served("daily", "SAC")
    with pytest.raises(StoreError, match="another bundle"):
        _engine(other, path, until)
    same_close = daily(tmp_path / "close", bars_file, "A2C", None, "market.fill=close")
    with pytest.raises(UsageError, match=r"market\.fill"):
        _engine(same_close, tmp_path / "k.db", _until(same_close, 12))


def test_a_second_engine_on_one_journal_is_refused(served: Get, tmp_path: Path) -> None:
    known, path = served(), tmp_path / "j.db"
    until = _until(known, 12)
    with _engine(known, path, until), pytest.raises(StoreError, match=r"j\.db"):
        _engine(known, path, until)


class _LiveFeed:
    """A feed that says it is live; bars of a store behind it."""

    live = True

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)


def test_old_bars_of_a_live_feed_are_decided_on_and_not_traded(served: Get, tmp_path: Path) -> None:
    known = served()
    with _engine(known, tmp_path / "j.db", _until(known, 12)) as engine:
        engine.feed = _LiveFeed(engine.feed)
        engine.run(bars=3)
        assert engine.state.mode == "running"
        assert engine.state.counts["decision"] == 3
        assert "order" not in engine.state.counts
    with Journal.read(tmp_path / "j.db") as journal:
        assert {e.body["code"] for e in journal.entries(kinds=("stopped",))} <= {
            "old_data",
            "closed",
        }


def test_a_clock_before_the_bars_halts(served: Get, tmp_path: Path) -> None:
    known = served()
    with _engine(known, tmp_path / "j.db", _until(known, 12)) as engine:
        engine.feed = _LiveFeed(engine.feed)
        engine.clock = Clock(wall=lambda: datetime(2001, 1, 1, tzinfo=UTC))
        engine.run(bars=1)
        assert engine.state.mode == "halted"
        assert engine.state.why.startswith("clock:")
        assert "order" not in engine.state.counts


@pytest.mark.parametrize(
    ("day", "received"),
    [
        ("2016-03-11", "2016-03-11T21:00:10"),
        ("2016-03-14", "2016-03-14T20:00:10"),  # clocks went forward
        ("2016-11-07", "2016-11-07T21:00:10"),
        ("2016-11-25", "2016-11-25T18:00:10"),  # half a session
    ],
)
def test_a_daily_bar_is_as_old_as_its_session_is_over(
    served: Get, tmp_path: Path, day: str, received: str
) -> None:
    known = served()
    with _engine(known, tmp_path / "j.db", _until(known, 12)) as engine:
        at = datetime.fromisoformat(f"{received}+00:00")
        assert engine._age(np.datetime64(day), at) == (10.0, True)
        saturday = np.datetime64("2016-03-11"), datetime(2016, 3, 12, 17, tzinfo=UTC)
        assert engine._age(*saturday) == (20.0 * 3600.0, False)


def test_a_stray_bar_of_the_future_loses_none_of_those_before_it(
    served: Get, tmp_path: Path
) -> None:
    known = served()
    until, messages = _until(known, 12), tmp_path / "bars.jsonl"
    publish_bars(known.bundle, known.store, f"file:{messages}", until, 6)
    lines = messages.read_text().splitlines(keepends=True)
    stray = lines[0].replace(lines[0].split('"time": "')[1][:10], "2017-01-05")
    messages.write_text("".join([stray, *lines]))
    day = known.world.times[known.rows(12).start + 5].astype("datetime64[D]").item()
    config = QUICK.model_copy(update={"gate": GateConfig(deadline_seconds=0.01)})
    with _engine(known, tmp_path / "j.db", until, f"file:{messages}?mode=live", config=config) as e:
        e.clock = Clock(wall=lambda: datetime(day.year, day.month, day.day, 22, tzinfo=UTC))
        e.run(lambda: e.state.mode == "halted")
        assert e.state.why.startswith("clock: the clock says")
        assert "before the end of the bars of 2017-01-05" in e.state.why
        assert (e.state.bars, e.state.time[:10]) == (6, str(day))


def test_commands_reach_a_running_engine_by_loopback_and_token_only(
    served: Get, tmp_path: Path
) -> None:
    known, path, token = served(), tmp_path / "j.db", "t" * 20
    with _engine(known, path, _until(known, 12)) as engine, ControlServer(engine, token):
        engine.run(bars=2)
        with pytest.raises(EchelonError, match="token"):
            ask_engine(path, "x" * 20)
        status = ask_engine(path, token)
        assert status is not None
        assert status["bars"] == 2
        answers: list[dict[str, Any] | None] = []
        asking = threading.Thread(
            target=lambda: answers.append(ask_engine(path, token, Command("halt", "ann")))
        )
        asking.start()
        while not answers:
            engine._obey()
            time.sleep(0.01)
        asking.join()
        assert answers[0] is not None
        assert answers[0]["mode"] == "halted"
        with pytest.raises(EchelonError, match="adopt is 'no', expected true or false"):
            ask_engine(path, token, Command("reconcile", adopt="no"))  # type: ignore[arg-type]
        # An engine that was killed left its file, and another has its port now.
        write_json(
            control_file(tmp_path / "killed.db"),
            {**read_json(control_file(path), dict[str, Any], ""), "engine": "its own"},
        )
        assert ask_engine(tmp_path / "killed.db", token) is None
        assert ask_engine(tmp_path / "killed.db", token, Command("resume", "ann")) is None
        assert engine.commands.empty()
    assert not control_file(path).exists()
    assert ask_engine(path, token) is None
    write_mode(path, Command("resume", "ann"))
    with _engine(known, path, _until(known, 12)) as engine:
        assert engine.state.mode == "running"


def test_the_engine_imports_no_torch(served: Get, tmp_path: Path) -> None:
    known = served("daily", "HIERARCHY")
    script = (
        "import sys\n"
        "from echelon.cli.app import main\n"
        "try:\n    main()\n"
        "finally:\n    assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    arguments = [
        *("live", "run", "--bundle", str(known.bundle.path), "--store", str(known.store)),
        *("--journal", str(tmp_path / "j.db"), "--from", str(_until(known, 12))),
        *("--bars", "3", "--no-control"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with Journal.read(tmp_path / "j.db") as journal:
        assert sum(1 for _ in journal.entries(kinds=("decision",))) == 3


def test_a_small_overdraft_is_traded_on_and_short_positions_count_as_nothing() -> None:
    account = Account(-12.5, {"AAA": 3.0, "BBB": -2.0}, {"AAA": 4.0})
    assert holdable(account) == Account(0.0, {"AAA": 3.0, "BBB": 0.0}, {"AAA": 3.0})
    plain = Account(5.0, {"AAA": 3.0}, {"AAA": 1.0})
    assert holdable(plain) == plain


def test_a_paper_venue_that_lost_its_journal_is_noticed(served: Get, tmp_path: Path) -> None:
    known, path = served(), tmp_path / "j.db"
    until = _until(known, 12)
    with _engine(known, path, until) as engine:
        engine.run(bars=5)
        assert engine.state.account["positions"]
    for file in tmp_path.glob("j.db.venue*"):
        file.unlink()
    with (
        _engine(known, path, until) as engine,
        pytest.raises(UsageError, match="another one's, or older"),
    ):
        engine.run(bars=1)


class _Losing:
    """A broker's call whose first request never gets there."""

    def __init__(self, call: Any, error: type[BaseException] = BrokerError) -> None:
        self.call, self.error, self.lost = call, error, False

    def __call__(self, *arguments: Any) -> Any:
        if not self.lost:
            self.lost = True
            raise self.error("the request was lost")
        return self.call(*arguments)


def test_a_command_that_needs_the_venue_waits_until_the_venue_has_answered(
    served: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, path = served(), tmp_path / "j.db"
    answer: Future[dict[str, Any]] = Future()
    with _engine(known, path, _until(known, 12)) as engine:
        engine.run(bars=4)
        show, asked = engine.broker.show_bars, []  # type: ignore[attr-defined]

        def lose_answer(bars: Any) -> Any:
            shown = show(bars)
            asked.append(bars.time)
            if len(asked) == 1:
                engine.commands.put((Command("reconcile", "ann"), answer))
                raise BrokerError("the answer was lost")
            return shown

        monkeypatch.setattr(engine.broker, "show_bars", lose_answer)
        engine.run(bars=3)
        assert answer.result(0)["differences"] == []
    with Journal.read(path) as journal:
        fills = [f["trade_id"] for e in journal.entries(kinds=("fills",)) for f in e.body["fills"]]
        assert replay_journal(known.bundle, journal).differences == ()
    assert len(set(fills)) == len(fills) > 4


def test_cash_of_a_sell_that_is_stopped_buys_nothing() -> None:
    sell = OrderRequest("s", "A", "sell", 100.0, 10.0, -100.0)
    buy = OrderRequest("b", "B", "buy", 50.0, 10.0, 50.0)
    now = Situation("running", 1_000.0, Account(0.0, {"A": 100.0}, {}), {}, 0.0)
    record = RiskRecord()
    assert pass_orders(LimitsConfig(min_cash=0.1), record, [buy, sell], now) == ([sell, buy], [])
    limits = LimitsConfig(min_cash=0.1, max_order_value=600.0)
    passed, stopped = pass_orders(limits, record, [buy, sell], now)
    assert passed == []
    assert [code for _, code in stopped] == ["max_order_value", "min_cash"]


def test_an_order_whose_request_was_lost_is_sent_again_before_the_next_bar(
    served: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = served()
    with _engine(known, tmp_path / "j.db", _until(known, 12)) as engine:
        lose = _Losing(engine.broker.submit)
        monkeypatch.setattr(engine.broker, "submit", lose)
        engine.run(bars=1)
        assert lose.lost
        assert {order["state"] for order in engine.state.orders.values()} == {"accepted"}
        assert {status.id for status in engine.broker.open_orders()} == set(engine.state.orders)


_NOT_SHOWN = ("start", "snapshot")


class _Onlooker:
    def __init__(self) -> None:
        self.entries: list[tuple[str, Any]] = []
        self.in_flight = 0

    def watch(self, engine: LiveEngine, entries: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self.entries += entries
        states = [order["state"] for order in engine.state.orders.values()]
        self.in_flight += states.count("intent")


class _Clumsy:
    def watch(self, _engine: LiveEngine, entries: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        raise ZeroDivisionError(f"{len(entries)} entries")


def test_watchers_see_every_entry_once_orders_are_out_and_one_that_fails_disturbs_nothing(
    run_whole: tuple[Served, date, list[dict[str, Any]]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    known, until, whole = run_whole
    path, seen = tmp_path / "again.db", _Onlooker()
    for bars in (5, 7):
        with _engine(known, path, until) as engine:
            engine.watchers += [_Clumsy(), seen]
            engine.run(bars=bars)
            assert engine.errors == {"_Clumsy.ZeroDivisionError": bars + 2}
    assert _content(path) == whole
    assert caplog.text.count("_Clumsy failed") == 2
    assert seen.in_flight == 0
    with Journal.read(path) as journal:
        written = [(e.kind, e.body) for e in journal.entries() if e.kind not in _NOT_SHOWN]
    assert [(kind, json.loads(json.dumps(body))) for kind, body in seen.entries] == written
