"""Alerts and daily summaries of a real engine: what is told, and that nobody waits for it."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Served, daily
from robots import Robot, mail_server, webhook, wecom
from typer.testing import CliRunner

from echelon.cli import app
from echelon.config.alerts import AlertsConfig
from echelon.config.live import LimitsConfig, LiveConfig
from echelon.errors import DataError, StoreError
from echelon.live import report
from echelon.live.alerts import AlertReader, AlertWatcher, metrics_of, read_check
from echelon.live.brokers import BrokerError, open_broker
from echelon.live.engine import Command, LiveEngine
from echelon.live.feeds import open_feed
from echelon.live.journal import START, Journal
from echelon.live.monitor import Monitor
from echelon.live.replay import JournalReplay, replay_journal
from echelon.live.report import write_live_report
from echelon.live.results import LiveRows
from echelon.live.summary import message, render, summarise
from echelon.live.tables import read_table_of
from echelon.monitoring import alerts as module
from echelon.monitoring.alerts import Alert, Alerter
from echelon.monitoring.metrics import LIVE, Metrics
from echelon.report.texts import Words
from echelon.serving.bundle import Bundle

BARS = 12
TOKEN = "7f3a9c52e1b84d60a5"


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Served:
    return daily(tmp_path_factory.mktemp("served"), bars_file, "HIERARCHY")


def _engine(known: Served, path: Path, limits: LimitsConfig | None = None) -> LiveEngine:
    config = LiveConfig(sync=False, limits=limits or LimitsConfig())
    until = known.world.times[known.rows(BARS).start - 1].astype("datetime64[D]").item()
    return LiveEngine.open(
        *(known.bundle, known.store, path, open_feed("store", known.bundle, known.store)),
        *(open_broker("paper", known.bundle, path, known.store, until, config), config),
        until=until,
    )


@pytest.fixture(scope="module")
def journal(known: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without anything but bars and orders."""
    path = tmp_path_factory.mktemp("journal") / "live.db"
    with _engine(known, path) as engine:
        engine.run(bars=BARS)
    return path


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Robot]:
    with Robot(webhook()) as robot:
        monkeypatch.setenv("ECHELON_ALERT_HOOK", f"{robot.url}/{TOKEN}")
        monkeypatch.setattr(module, "_FIRST_WAIT", 0.01)
        yield robot


def _settings(**more: Any) -> AlertsConfig:
    channel = {"kind": "webhook", "url": "ECHELON_ALERT_HOOK", "severity": "info"}
    return AlertsConfig.model_validate({"channels": [channel], "per_minute": 60_000, **more})


def _entries(path: Path) -> list[tuple[str, dict[str, Any]]]:
    with Journal.read(path) as journal:
        return [(entry.kind, entry.body) for entry in journal.entries() if entry.kind != START]


# --- alerts --------------------------------------------------------------------------------------


def test_an_engine_alerts_of_what_an_operator_should_know(
    known: Served, tmp_path: Path, hook: Robot
) -> None:
    path = tmp_path / "live.db"
    with Alerter(_settings(drawdown=1e-6), "demo", Words("en").alert) as alert:
        with _engine(known, path, LimitsConfig(max_order_value=1.0)) as engine:
            engine.watchers.append(AlertWatcher(alert, 1e-6))
            engine.run(bars=1)
            engine.config = replace_limits(engine.config, LimitsConfig())
            engine.run(bars=6)
            engine.obey(Command("reduce-only", "operator"))
            engine.halt("gap", "2 bar sets are missing")
            engine.run(bars=1)
        with _engine(known, path) as engine:
            engine.watchers.append(AlertWatcher(alert, 1e-6))
            engine.run(bars=1)
    told = [each for body in hook.bodies for each in body["alerts"]]
    texts = [each["text"] for each in told]
    kinds = [each["kind"] for each in told]
    for kind in ("stopped", "drawdown", "command", "halt", "recovered"):
        assert kind in kinds, kinds
    assert "Critical: trading halted: bar sets are missing: 2 bar sets are missing" in texts
    assert "Notice: command “reduce only” by operator" in texts
    stopped = next(each for each in told if each["kind"] == "stopped")
    assert stopped["values"]["count"] == len(stopped["values"]["symbols"].split(", "))
    assert kinds.count("recovered") == 1
    assert not engine.errors
    assert all(kind == "webhook" for kind, _ in alert.sent)


def replace_limits(config: LiveConfig, limits: LimitsConfig) -> LiveConfig:
    return config.model_copy(update={"limits": limits})


def test_a_hanging_webhook_and_a_full_queue_change_nothing_of_a_run(
    known: Served, journal: Path, tmp_path: Path, hook: Robot, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook.hang.clear()
    monkeypatch.setattr(module, "QUEUE", 2)
    path = tmp_path / "live.db"
    alert = Alerter(_settings(), "demo", Words("en").alert)
    done = threading.Event()

    class Noisy:
        def watch(self, engine: LiveEngine, _entries: Sequence[Any]) -> None:
            for k in range(20):
                alert(Alert("masked", "warning", f"{engine.state.time} {k}"))

    def work() -> None:
        with _engine(known, path) as engine:
            engine.watchers += [AlertWatcher(alert, 0.1), Noisy()]
            engine.run(bars=BARS)
        done.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert done.wait(120.0), "the engine waits for nobody"
    assert not hook.bodies, "the webhook hung all the while"
    assert alert.dropped["queue_full"] > 20 * BARS - 5
    alert.close(0.1)
    decided = [
        [body for kind, body in _entries(p) if kind in ("decision", "order", "fills")]
        for p in (journal, path)
    ]
    assert decided[0] == decided[1]


def test_a_full_disk_ends_a_watched_engine_with_nothing_told_that_is_not_written(
    known: Served, journal: Path, tmp_path: Path, hook: Robot
) -> None:
    path, metrics = tmp_path / "live.db", Metrics(*LIVE)
    with _engine(known, path) as engine, Alerter(_settings(), "demo") as alert:
        engine.watchers += [AlertWatcher(alert, 0.1), Monitor(metrics, engine, "store")]
        engine.run(bars=4)
        pages = engine.journal._db.execute("PRAGMA page_count").fetchone()[0]
        engine.journal._db.execute(f"PRAGMA max_page_count={pages + 8}")
        with pytest.raises(StoreError, match="disk is full"):
            engine.run(bars=BARS - 4)
        page = metrics.render().decode()
    with Journal.read(path) as opened:
        written = opened.verify()
        bars = read_table_of(opened, "decisions").height
        orders = read_table_of(opened, "orders")["side"].to_list()
    assert 4 <= bars < BARS
    assert f"echelon_live_bars_total {float(bars)}" in page
    for side in ("buy", "sell"):
        assert f'echelon_live_orders_total{{side="{side}"}} {float(orders.count(side))}' in page
    with _engine(known, path) as engine, Alerter(_settings(), "demo") as alert:
        engine.watchers += [AlertWatcher(alert, 0.1), Monitor(Metrics(*LIVE), engine, "store")]
        assert engine.journal.seq >= written
        engine.run(bars=BARS - engine.state.bars)
        assert not engine.errors
    same = [
        [body for kind, body in _entries(p) if kind in ("decision", "order", "fills")]
        for p in (journal, path)
    ]
    assert same[0] == same[1]


def test_silence_of_the_venue_is_alerted_once_and_its_end_too(
    known: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Alert] = []
    with _engine(known, tmp_path / "live.db") as engine:
        engine.watchers.append(AlertWatcher(heard.append, None))
        submit, orders, silent = engine.broker.submit, engine.broker.orders, [4]

        def fail(*_: Any) -> Any:
            silent[0] -= 1
            raise BrokerError("no answer")

        monkeypatch.setattr(
            engine.broker, "submit", lambda o: fail() if silent[0] > 0 else submit(o)
        )
        monkeypatch.setattr(
            engine.broker, "orders", lambda o: fail() if silent[0] > 0 else orders(o)
        )
        engine.run(bars=3)
    assert [(a.kind, a.severity) for a in heard if a.kind in ("silent", "answers")] == [
        ("silent", "critical"),
        ("answers", "info"),
    ]


def test_what_is_read_of_entries() -> None:
    reader = AlertReader(0.1)

    def decided(equity: float, **charge: Any) -> tuple[str, dict[str, Any]]:
        calm = {"masked": [], "halted": False, "position_scale": 1.0}
        return "decision", {"account": {"equity": equity}, "in_charge": calm | charge}

    def kinds(*entries: tuple[str, dict[str, Any]]) -> list[tuple[str, str]]:
        return [(alert.kind, alert.who) for alert in reader.read(entries)]

    assert kinds(("bars", {"time": "2024-01-05"}), decided(100.0)) == []
    assert kinds(decided(89.0, masked=["expert 1"], position_scale=0.5)) == [
        ("drawdown", ""),
        ("masked", "expert 1"),
        ("halved", "portfolio"),
    ]
    assert kinds(decided(88.0, masked=["expert 1"], position_scale=0.5)) == []
    capped = decided(88.0, masked=["expert 1"], position_scale=0.5)
    for cap, said in ((0.6, []), (0.4, ["exposure_cut"]), (0.6, []), (0.8, ["exposure_restored"])):
        with_cap = capped[0], capped[1] | {"exposure_cap": cap}
        assert kinds(with_cap) == [(kind, "portfolio") for kind in said]
    assert kinds(decided(96.0, halted=True)) == [
        ("released", "expert 1"),
        ("halted", "portfolio"),
        ("restored", "portfolio"),
    ]
    assert kinds(decided(89.0)) == [("drawdown", ""), ("resumed", "portfolio")]
    refused = {"source": "0", "offset": 1, "time": "", "reason": "jump", "detail": ""}
    order = {"id": "1", "symbol": "KO"}
    rejected = {"id": "1", "state": "rejected", "filled": 0.0, "reason": "no_permission"}
    alerts = reader.read(
        [
            *(("refused", {**refused, "symbol": symbol}) for symbol in ("XOM", "KO", "KO")),
            ("order", order),
            ("status", rejected),
            ("status", {**rejected, "state": "cancelled"}),
        ]
    )
    assert [(a.kind, a.who, a.values) for a in alerts] == [
        ("refused", "jump", {"count": 3, "symbols": "KO, XOM"}),
        ("rejected", "no_permission", {"count": 1, "symbols": "KO"}),
    ]
    assert {alert.time for alert in alerts} == {"2024-01-05"}


@pytest.mark.parametrize(
    ("action", "severity"), [("warn", "warning"), ("reduce", "warning"), ("halt", "critical")]
)
def test_alarms_of_guards_are_alerts_and_their_settings_are_none(
    action: str, severity: str
) -> None:
    alarm = {"event": "alarm", "action": action, "guard": "drift", "name": "cost", "time": "t"}
    ended = {"event": "end", "guard": "unlike_training", "name": "row", "time": "t", "detail": "d"}
    settings = {"event": "settings", "drift": {}, "unlike_training": {}}
    bodies = (settings, {**alarm, "detail": "twice the model"}, ended)
    alerts = AlertReader(None).read([("guard", body) for body in bodies])
    assert [(a.kind, a.severity, a.who) for a in alerts] == [
        ("drift", severity, "cost"),
        ("guard_end", "info", "row"),
    ]
    assert "twice the model" in Words("zh").alert(alerts[0])


def test_an_alerter_that_fails_disturbs_nothing(known: Served, tmp_path: Path) -> None:
    def broken(_alert: Alert) -> None:
        raise RuntimeError("bug")

    with _engine(known, tmp_path / "live.db", LimitsConfig(max_order_value=1.0)) as engine:
        engine.watchers.append(AlertWatcher(broken, None))
        engine.run(bars=2)
        assert engine.state.bars == 2
        assert engine.errors["AlertWatcher.RuntimeError"]


# --- the summary of a day ------------------------------------------------------------------------


def test_a_day_adds_up(known: Served, journal: Path) -> None:
    with Journal.read(journal) as opened:
        day = summarise(known.bundle, opened)
        equity = read_table_of(opened, "decisions")["equity"].to_list()
        fills = read_table_of(opened, "fills")
        times = LiveRows.find(opened, day.results.replay.world).times
        last = fills.filter(fills["after"] == times[-2].item())
    assert day.profit == equity[-1] - equity[-2]
    assert sum(h.gain for h in day.holdings) == pytest.approx(day.profit, abs=1e-6)
    assert day.fills.height == last.height > 0
    paid = day.cost(day.results.live)
    assert paid == day.cost(day.results.replay.backtest), "a paper broker is the model"
    assert paid.value == pytest.approx((last["shares"].abs() * last["price"]).sum())
    assert not day.differences
    assert read_check(journal) == {"day": str(day.day), "equal": True}


def test_a_day_of_a_running_engine_is_of_one_moment(
    known: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "live.db"

    def replay_while_bars_come(bundle: Bundle, opened: Journal) -> JournalReplay:
        done = replay_journal(bundle, opened)
        with _engine(known, path) as engine:
            engine.run(bars=2)
        return done

    with _engine(known, path) as engine:
        engine.run(bars=4)
    monkeypatch.setattr(report, "replay_journal", replay_while_bars_come)
    with Journal.read(path) as opened:
        day = summarise(known.bundle, opened)
        write_live_report(known.bundle, opened, tmp_path / "report", "en")
    with Journal.read(path) as opened:
        assert read_table_of(opened, "decisions").height == 4 + 2 * 2
    assert len(day.results.replay.decisions) == day.results.decisions.height == 4
    assert not day.differences
    assert (tmp_path / "report" / "report.html").is_file()


def test_the_first_day_has_no_profit_and_can_be_summarised(known: Served, tmp_path: Path) -> None:
    path = tmp_path / "live.db"
    with _engine(known, path) as engine:
        engine.run(bars=1)
    with Journal.read(path) as opened:
        day = summarise(known.bundle, opened)
    assert (day.profit, day.fills.height) == (0.0, 0)
    assert "P&L +0.00" in message(day, Words("en")).text
    assert "<svg" in render(day, Words("zh"))


def test_texts_say_what_the_page_says_in_both_languages(known: Served, journal: Path) -> None:
    with Journal.read(journal) as opened:
        day = summarise(known.bundle, opened)
    expert = Words("en").who(day.own[-1]["in_charge"]["expert"])
    for lang, heads in (("en", ("P&L", "In charge: ")), ("zh", ("盈亏", "主导："))):
        words = Words(lang)
        text, page = message(day, words).text, render(day, words)
        assert all(head in text for head in heads)
        assert words.who(day.own[-1]["in_charge"]["expert"]) in page
        assert "<script" not in page
        assert len(text.encode()) <= 2_048, "a robot of WeCom takes no more"
    assert f"In charge: {expert}" in message(day, Words("en")).text
    weights = re.findall(r"(\w+) (\d+\.\d)%", message(day, Words("en")).text.split("\n")[4])
    shares = {symbol: float(value) for symbol, value in weights}
    held = day.bodies[-1]["account"]["positions"]
    for symbol, price in zip(known.bundle.symbols, day.close, strict=True):
        assert shares[symbol] == pytest.approx(100 * held[symbol] * price / day.equity, abs=0.051)
    assert shares["cash"] + sum(v for k, v in shares.items() if k != "cash") == pytest.approx(
        100.0, abs=0.5
    )


def test_alerts_of_a_day_are_those_of_its_entries(known: Served, tmp_path: Path) -> None:
    path = tmp_path / "live.db"
    with _engine(known, path) as engine:
        engine.run(bars=2)
        engine.halt("gap", "yesterday")
        engine.run(bars=1)
        engine.obey(Command("resume", "<b>"))
        engine.halt("limit", "today")
    with Journal.read(path) as opened:
        day = summarise(known.bundle, opened)
        before = summarise(known.bundle, opened, day.day.fromisoformat(day.bodies[0]["time"][:10]))
    assert [a.kind for a in day.alerts if a.kind != "stopped"] == ["command", "halt"]
    assert [a.values for a in before.alerts if a.kind == "halt"] == [{"detail": "yesterday"}]
    page = render(day, Words("en"))
    assert "by &lt;b&gt;" in page
    assert "<b>" not in page.replace("<b>Expert", "")
    assert "today" in message(day, Words("en")).text


def test_a_decision_that_comes_out_otherwise_is_said(
    known: Served, journal: Path, tmp_path: Path
) -> None:
    path = tmp_path / "changed.db"
    with Journal.read(journal) as opened:
        about = {k: v for k, v in opened.about().items() if k != "format"}
        first = opened.last_snapshot(first=True)
        assert first is not None
        entries = [e for e in opened.entries() if e.kind not in (START, "snapshot")]
    *_, last = (e for e in entries if e.kind == "decision")
    with Journal.open(path, about, sync=False) as copy:
        copy.snapshot(first[1])
        for entry in entries:
            body = dict(entry.body)
            if entry.seq == last.seq:
                body["account"] = body["account"] | {"cash": 1.0}
            copy.append(entry.kind, body, entry.data)
        copy.commit()
    with Journal.read(path) as opened:
        day = summarise(known.bundle, opened)
    assert day.differences
    assert read_check(path) == {"day": str(day.day), "equal": False}
    assert "differ" in message(day, Words("en")).text
    done = CliRunner().invoke(
        app, ["live", "summary", "--bundle", str(known.bundle.path), "--journal", str(path)]
    )
    assert done.exit_code == 1
    assert isinstance(done.exception, Exception)


def test_a_day_without_a_decision_is_refused(known: Served, journal: Path) -> None:
    with Journal.read(journal) as opened, pytest.raises(DataError, match="nothing was decided on"):
        summarise(known.bundle, opened, np.datetime64("1999-01-04").item())


def test_the_command_writes_and_sends_without_a_secret_in_anything(
    known: Served,
    journal: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = tmp_path / "live.yaml"
    config.write_text(
        "alerts:\n  language: zh\n  channels:\n"
        "  - {kind: wecom, url: ECHELON_ALERT_WECOM}\n"
        "  - {kind: smtp, url: ECHELON_ALERT_MAIL, to: [desk@example.org]}\n"
    )
    with Robot(wecom(TOKEN)) as robot, mail_server("geheim123") as box:
        monkeypatch.setenv("ECHELON_ALERT_WECOM", f"{robot.url}/send?key={TOKEN}")
        monkeypatch.setenv("ECHELON_ALERT_MAIL", f"smtp://me:geheim123@127.0.0.1:{box.port}")
        command = ["live", "summary", "--bundle", str(known.bundle.path), "--journal", str(journal)]
        command += ["--config", str(config), "--output-dir", str(tmp_path / "out"), "--send"]
        with caplog.at_level(logging.DEBUG):
            done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    (page,) = (tmp_path / "out").glob("summary-*.zh.html")
    text = robot.bodies[0]["text"]["content"]
    assert robot.taken == 1
    assert text in done.output
    assert "全部一致" in text
    attached = next(box.mails[0].iter_attachments())
    assert attached.get_content().split() == page.read_text().split()
    entries = json.dumps(_entries(journal))
    for secret in (TOKEN, "geheim123"):
        for place in (done.output, caplog.text, page.read_text(), entries, text):
            assert secret not in place


def test_live_run_alerts_by_its_configuration(
    known: Served, tmp_path: Path, hook: Robot, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "live.db"
    command = ["live", "run", "--bundle", str(known.bundle.path), "--journal", str(path)]
    command += ["--store", str(known.store), "--no-control", "--bars", "2"]
    command += ["-o", "alerts.channels=[{kind: webhook, url: ECHELON_ALERT_HOOK, severity: info}]"]
    command += ["-o", "limits.max_order_value=1.0", "-o", "sync=false"]
    until = known.world.times[known.rows(BARS).start].astype("datetime64[D]").item()
    done = CliRunner().invoke(app, [*command, "--from", str(until)])
    assert done.exit_code == 0, done.output
    assert {each["kind"] for body in hook.bodies for each in body["alerts"]} >= {"stopped"}

    def broken(*_: Any) -> Any:
        raise DataError(f"the disk of {TOKEN} is gone")

    monkeypatch.setattr(LiveEngine, "step", broken)
    again = CliRunner().invoke(app, command)
    assert again.exit_code != 0
    last = hook.bodies[-1]["alerts"][-1]
    assert (last["kind"], last["severity"]) == ("ended", "critical")
    assert "DataError: the disk of *** is gone" in last["text"]


def test_what_became_of_alerts_and_the_last_check_are_metrics(
    known: Served, journal: Path, hook: Robot
) -> None:
    metrics = Metrics(*LIVE)
    with Alerter(_settings()) as alert:
        metrics.refresh.append(metrics_of(metrics, alert, journal))
        hook.refuse = [(400, {}, {})]
        alert(Alert("error", "warning", "a"))
        alert(Alert("error", "warning", "a"))
    with Journal.read(journal) as opened:
        summarise(known.bundle, opened)
    hook.refuse = []
    with Alerter(_settings()) as other:
        metrics.refresh.append(metrics_of(metrics, other, journal))
        other(Alert("error", "warning", "b"))
    text = metrics.render().decode()
    assert 'echelon_alerts_failed_total{channel="webhook"} 1.0' in text
    assert 'echelon_alerts_dropped_total{reason="repeated"} 1.0' in text
    assert 'echelon_alerts_sent_total{channel="webhook",severity="warning"} 1.0' in text
    assert "echelon_reference_decisions_equal 1.0" in text
