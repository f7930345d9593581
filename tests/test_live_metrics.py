"""Metrics of a live engine: what the journal says, and nothing that can disturb it."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Served, a_share, sample
from shells import Shell
from test_metrics import read_page

from echelon.config.live import LimitsConfig, LiveConfig
from echelon.live.brokers import BrokerError, open_broker
from echelon.live.control import ControlServer
from echelon.live.engine import Command, LiveEngine
from echelon.live.feeds import open_feed
from echelon.live.journal import Journal
from echelon.live.monitor import Monitor
from echelon.live.tables import read_table_of
from echelon.monitoring.metrics import LIVE, METRICS, Metrics

TOKEN = "a-token-of-enough-letters"
QUICK = LiveConfig(sync=False, snapshot_every=7)
BARS = 40
Page = dict[tuple[str, ...], float]
_CLOCKS = ("live_lag_seconds", "live_journal_bytes", "live_journal_entries", "live_info")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    """Bundles, each made once: the sample under a hierarchy, A-shares under an agent."""
    known: dict[str, Served] = {}

    def get(name: str) -> Served:
        if name not in known:
            path = tmp_path_factory.mktemp(name)
            known[name] = (
                sample(path, "HIERARCHY") if name == "sample" else a_share(path, "1d", "A2C")
            )
        return known[name]

    return get


def _engine(known: Served, journal: Path, config: LiveConfig = QUICK) -> LiveEngine:
    until = known.world.times[known.rows(BARS).start - 1].astype("datetime64[D]").item()
    return LiveEngine.open(
        *(known.bundle, known.store, journal, open_feed("store", known.bundle, known.store)),
        open_broker("paper", known.bundle, journal, known.store, until, config),
        *(config,),
        until=until,
    )


def _watched(engine: LiveEngine) -> Metrics:
    metrics = Metrics(*LIVE)
    engine.watchers.append(Monitor(metrics, engine, "store:somewhere"))
    return metrics


def _page(metrics: Metrics) -> Page:
    return read_page(metrics.render())


def _gauges(page: Page) -> Page:
    names = {m.name for m in METRICS if m.kind == "gauge"} - {*_CLOCKS}
    return {key: value for key, value in page.items() if key[0] in names}


@pytest.mark.parametrize("name", ["sample", "shares"])
def test_what_is_exported_is_what_the_journal_says(
    served: Callable[[str], Served], tmp_path: Path, name: str
) -> None:
    known, path = served(name), tmp_path / "j.db"
    config = QUICK.model_copy(update={"limits": LimitsConfig(max_turnover=0.4)})
    with _engine(known, path, config) as engine:
        metrics = _watched(engine)
        engine.run(bars=BARS // 2)
        engine.obey(Command("reduce-only", "test"))
        engine.run(bars=BARS // 2)
        page = _page(metrics)
        status = engine.status()
    with Journal.read(path) as journal:
        kinds = Counter(entry.kind for entry in journal.entries())
        entries = {kind: [e.body for e in journal.entries(kinds=(kind,))] for kind in kinds}
        fills, orders = read_table_of(journal, "fills"), read_table_of(journal, "orders")
    value = fills["shares"].abs() * fills["price"]
    bought = fills["shares"] > 0
    assert page["live_bars_total",] == page["live_decision_seconds_count",] == BARS
    assert page["live_orders_total", "buy"] == (orders["side"] == "buy").sum() > 0
    assert page["live_orders_total", "sell"] == (orders["side"] == "sell").sum() > 0
    for side, mine in (("buy", bought), ("sell", ~bought)):
        assert page["live_fills_total", side] == mine.sum() > 0
        assert page["live_traded_value_total", side] == pytest.approx(value.filter(mine).sum())
    for fee in ("commission", "stamp"):
        assert page["live_fees_total", fee] == pytest.approx(fills[fee].sum())
    assert (fills["stamp"].sum() > 0) == (name == "shares")
    assert page["live_slippage_value_total",] == pytest.approx(fills["slippage"].sum())
    stopped = Counter(body["code"] for body in entries["stopped"])
    assert {"max_turnover", "reduce_only"} & stopped.keys()
    assert {
        key[1]: n for key, n in page.items() if key[0] == "live_stopped_orders_total" and n
    } == (stopped)
    states = Counter(body["state"] for body in entries["status"])
    for state in ("accepted", "filled", "cancelled", "rejected"):
        assert page["live_order_states_total", state] == states[state]
    assert page["live_commands_total", "reduce-only"] == 1.0
    assert page["live_mode", "reduce_only"] == 1.0
    assert page["live_mode", "running"] == page["live_mode", "halted"] == 0.0
    assert page["live_journal_entries",] == sum(kinds.values())
    assert page["live_journal_bytes",] >= path.stat().st_size

    decisions = entries["decision"]
    equity = np.array([body["account"]["equity"] for body in decisions])
    last, account = decisions[-1], entries["account"][-1]
    assert page["live_equity",] == equity[-1] == status["equity"]
    assert page["live_cash",] == account["cash"]
    assert page["live_positions",] == len(account["positions"])
    assert page["live_drawdown",] == 1.0 - equity[-1] / equity.max()
    assert page["live_exposure",] == 1.0 - last["account"]["cash"] / equity[-1]
    today = orders.filter(orders["time"] == orders["time"].max())
    traded = 0.0
    if today["time"][0] == np.datetime64(last["time"]).astype(object):
        sized = [
            o["spend"] or max(abs(o["wanted"]), o["shares"]) * o["price"] for o in today.to_dicts()
        ]
        traded = sum(sized)
    assert page["live_turnover",] == pytest.approx(traded / equity[-1])
    losses = np.sort(1.0 - equity[1:] / equity[:-1])[::-1]
    points = 0.05 * len(losses)
    tail = losses[: int(points)].sum() + (points - int(points)) * losses[int(points)]
    assert page["live_cvar",] == pytest.approx(tail / points)
    prices = {body["id"]: body["price"] for body in entries["order"]}
    paid = [
        1e4 * (f["price"] / prices[f["order_id"]] - 1.0) * np.sign(f["shares"])
        for f in fills.to_dicts()
    ]
    assert page["live_slippage_basis_points_count",] == len(paid)
    below = sum(bps <= 5.0 for bps in paid)
    assert page["live_slippage_basis_points_bucket", "5.0"] == below


def test_who_is_in_charge_and_how_sure_the_router_is(
    served: Callable[[str], Served], tmp_path: Path
) -> None:
    with _engine(served("sample"), tmp_path / "j.db") as engine:
        metrics = _watched(engine)
        engine.run(bars=12)
        page = _page(metrics)
        decision = engine.decision
    assert decision is not None
    charge = decision.in_charge
    assert charge is not None
    assert charge.probabilities is not None
    odds = np.array([*charge.probabilities.values()])
    for expert, probability in charge.probabilities.items():
        assert page["live_in_charge", expert] == float(expert == charge.expert)
        assert page["live_masked", expert] == float(expert in charge.masked)
        assert page["live_router_probability", expert] == probability
    assert page["live_router_entropy",] == pytest.approx(-(odds * np.log(odds)).sum())
    assert page["live_position_scale",] == charge.position_scale
    assert 0.0 < page["live_mapd",] <= 1.0


def test_time_of_the_last_bar_is_the_close_of_its_session(
    served: Callable[[str], Served], tmp_path: Path
) -> None:
    with _engine(served("sample"), tmp_path / "j.db") as engine:
        metrics = _watched(engine)
        began = time.time()
        engine.run(bars=1)
        page, day = _page(metrics), engine.decider.time.astype("datetime64[D]").item()
    ended = datetime.fromtimestamp(page["live_bar_time_seconds",], UTC)
    assert (ended.date(), ended.hour) in {(day, 20), (day, 21)}  # 16:00 in New York
    assert page["live_bar_time_seconds",] + page["live_lag_seconds",] == pytest.approx(
        began, abs=60.0
    )


def test_gauges_of_an_engine_that_was_killed_are_there_again(
    served: Callable[[str], Served], tmp_path: Path
) -> None:
    known, path = served("sample"), tmp_path / "j.db"
    with _engine(known, path) as engine:
        metrics = _watched(engine)
        engine.run(bars=26)
        before = _page(metrics)
    with _engine(known, path) as engine:
        metrics = _watched(engine)
        engine.run(lambda: True)  # starts, and stops before the next bar
        restored = _page(metrics)
        engine.run(bars=4)
        after = _page(metrics)
    with _engine(known, tmp_path / "whole.db") as engine:
        metrics = _watched(engine)
        engine.run(bars=30)
        whole = _page(metrics)
    assert ("live_cvar",) in before
    assert _gauges(restored) == _gauges(before)
    assert _gauges(after) == _gauges(whole)
    assert restored["live_bars_total",] == 0.0
    assert after["live_bars_total",] == 4.0


def _ask(port: int, token: str = TOKEN) -> tuple[int, str, bytes]:
    http = HTTPConnection("127.0.0.1", port, timeout=10.0)
    http.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
    answer = http.getresponse()
    body = answer.status, answer.headers["Content-Type"], answer.read()
    http.close()
    return body


def test_control_server_answers_prometheus_and_nobody_without_the_token(
    served: Callable[[str], Served], tmp_path: Path, free_port: int
) -> None:
    with _engine(served("shares"), tmp_path / "j.db") as engine:
        metrics = _watched(engine)
        with ControlServer(engine, TOKEN, metrics, free_port):
            engine.run(bars=3)
            status, kind, page = _ask(free_port)
            assert status == 200
            assert kind == "text/plain; version=0.0.4; charset=utf-8"
            assert read_page(page)["live_bars_total",] == 3.0
            assert _ask(free_port, "another-token-of-letters")[0] == 401


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def test_scraper_that_hangs_or_reads_nothing_changes_no_decision(
    served: Callable[[str], Served], tmp_path: Path
) -> None:
    known, content = served("shares"), []
    for scraped in (False, True):
        path = tmp_path / f"{scraped}.db"
        with _engine(known, path) as engine:
            metrics = _watched(engine)
            for k in range(20_000):  # a page larger than what sockets take in
                metrics.set("guard_feature_out_of_range_share", 0.5, f"feature number {k}")
            with ControlServer(engine, TOKEN, metrics) as control:
                stuck = [_hang(control) for _ in range(3 if scraped else 0)]
                engine.run(bars=6)
                assert not engine.errors
                for sock in stuck:
                    sock.close()
        with Journal.read(path) as journal:
            journal.verify()
            content.append(
                [(e.kind, e.body) for e in journal.entries(kinds=("decision", "order", "fills"))]
            )
    assert content[0] == content[1]


def _hang(control: ControlServer) -> socket.socket:
    """A client that asks, and reads nothing of the answer."""
    sock = socket.create_connection(("127.0.0.1", control.port))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    head = f"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    sock.sendall(head.encode())
    return sock


def test_venue_that_is_silent_shows_and_counts(
    served: Callable[[str], Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _engine(served("shares"), tmp_path / "j.db") as engine:
        metrics, pages = _watched(engine), []
        fuse = [3]
        show_bars: Any = engine.broker.show_bars  # type: ignore[attr-defined]

        def fail(bars: object) -> object:
            if fuse[0]:
                fuse[0] -= 1
                raise BrokerError("no answer")
            pages.append(_page(metrics))
            return show_bars(bars)

        monkeypatch.setattr(engine.broker, "show_bars", fail)
        engine.run(bars=1)
        page = _page(metrics)
    assert pages[0]["live_venue_silent",] == 1.0
    assert pages[0]["live_errors_total", "venue"] == page["live_errors_total", "venue"] == 3.0
    assert page["live_venue_silent",] == 0.0


def test_live_run_answers_prometheus_on_the_port_of_its_settings(
    served: Callable[[str], Served],
    shell: Shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_port: int,
) -> None:
    known, pages, run = served("shares"), [], LiveEngine.run

    def look(engine: LiveEngine, *args: Any, **kwargs: Any) -> None:
        run(engine, *args, **kwargs)
        pages.append(read_page(_ask(free_port)[2]))

    monkeypatch.setattr(LiveEngine, "run", look)
    monkeypatch.setenv("ECHELON_TOKEN", TOKEN)
    day = known.world.times[known.rows(BARS).start].astype("datetime64[D]")
    shell.works(
        *("live", "run", "--bundle", str(known.bundle.path), "--store", str(known.store)),
        *("--journal", str(tmp_path / "j.db"), "--from", str(day), "--bars", "2"),
        *("-o", f"metrics.port={free_port}", "-o", "sync=false"),
    )
    (page,) = pages
    assert page["live_bars_total",] == 2.0
    bundle = known.bundle
    assert page["live_info", "paper", bundle.id, "store", bundle.manifest["policy"]] == 1.0
