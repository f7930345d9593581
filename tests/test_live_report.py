"""What is made of a journal: its tables, its report in two languages, the terminal's dashboard."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from browsers import draw_page, drawn_charts
from engines import Served, daily
from rich.console import Console

from echelon.cli.live_view import Recorder, read_recent, sparkline, status_view
from echelon.config.live import LimitsConfig, LiveConfig
from echelon.config.secrets import Secrets
from echelon.errors import DataError, UsageError
from echelon.live.brokers import open_broker
from echelon.live.control import ControlServer, ask_engine
from echelon.live.engine import Command, LiveEngine
from echelon.live.feeds import open_feed
from echelon.live.gate import REFUSED
from echelon.live.journal import START, Journal
from echelon.live.limits import STOPPED
from echelon.live.replay import replay_journal
from echelon.live.report import gather, live_words, render, verdict, write_live_report
from echelon.live.results import SHORTFALL, live_backtest, outcomes, shortfalls
from echelon.live.tables import TABLES, export_tables, last_status, read_table_of
from echelon.report.texts import Words, catalogue
from echelon.serving.decision import WHY

BARS = 16


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Served:
    return daily(tmp_path_factory.mktemp("served"), bars_file, "A2C")


def _engine(known: Served, path: Path, limits: LimitsConfig) -> LiveEngine:
    config = LiveConfig(sync=False, limits=limits)
    until = known.world.times[known.rows(BARS).start - 1].astype("datetime64[D]").item()
    return LiveEngine.open(
        *(known.bundle, known.store, path, open_feed("store", known.bundle, known.store)),
        *(open_broker("paper", known.bundle, path, known.store, until, config), config),
        until=until,
    )


@pytest.fixture(scope="module")
def clean(known: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal in which nothing happened but bars and orders."""
    path = tmp_path_factory.mktemp("clean") / "live.db"
    with _engine(known, path, LimitsConfig()) as engine:
        engine.run(bars=BARS)
    return path


@pytest.fixture(scope="module")
def eventful(known: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal with stopped orders, commands, a halt, a difference and a refused message."""
    path = tmp_path_factory.mktemp("eventful") / "live.db"
    with _engine(known, path, LimitsConfig(max_turnover=0.5)) as engine:
        engine.run(bars=BARS // 2)
        engine.obey(Command("halt", "operator <b>"))
        engine.run(bars=2)
        engine.obey(Command("resume", "operator <b>"))
        engine.run(bars=BARS // 2 - 2)
        body = {"source": "0", "offset": 7, "time": "2018-01-02", "symbol": "AAPL"}
        engine.journal.append("refused", {**body, "reason": "late", "detail": "passed"})
        engine.journal.append("recovered", {"snapshot": 1, "time": ""})
        engine.journal.append("difference", {"differences": ["AAPL: journal 1 shares, venue 2"]})
        engine.halt("difference", "paper and journal differ: AAPL")
    return path


@pytest.fixture
def opened(clean: Path) -> Iterator[Journal]:
    with Journal.read(clean) as journal:
        yield journal


def _at_venue(journal: Journal, path: Path, leave_out: str = "") -> Journal:
    """The same journal, of a broker whose fills nobody can compute; without a kind of entries."""
    about = {k: v for k, v in journal.about().items() if k != "format"}
    copy = Journal.open(path, {**about, "broker": "alpaca"}, sync=False)
    snapshot = journal.last_snapshot(first=True)
    assert snapshot is not None
    copy.snapshot(snapshot[1])
    for entry in journal.entries():
        if entry.kind not in (START, "snapshot", leave_out):
            copy.append(entry.kind, entry.body, entry.data)
    copy.commit()
    return copy


# Tables.


def test_every_kind_of_entry_is_in_a_table(eventful: Path, tmp_path: Path) -> None:
    with Journal.read(eventful) as journal:
        written = export_tables(journal, tmp_path)
        assert {path.stem for path in written} == set(TABLES)
        listed = {seq for path in written for seq in pl.read_parquet(path)["entry"].to_list()}
        told = {kind for table in TABLES.values() for kind in table.kinds}
        for entry in journal.entries():
            # A status is told by its order.
            assert entry.seq in listed or entry.kind in ("status", "fills"), entry.kind
            assert entry.kind in told or entry.seq in listed
        orders, fills = (
            pl.read_parquet(tmp_path / f"{name}.parquet") for name in ("orders", "fills")
        )
        assert orders.filter(pl.col("filled") > 0).height == fills["order_id"].n_unique()
        assert written[tmp_path / "stopped.parquet"] > 0
        assert pl.read_parquet(tmp_path / "events.parquet")["kind"].to_list().count("command") == 2


def test_a_table_without_rows_has_its_columns(opened: Journal) -> None:
    stopped = read_table_of(opened, "stopped")
    assert stopped.height == 0
    assert stopped.schema["time"] == pl.Datetime("us")
    assert {"symbol", "code", "entry"} <= set(stopped.columns)


# Numbers.


def test_live_book_of_a_paper_journal_is_the_backtest(known: Served, opened: Journal) -> None:
    replay = replay_journal(known.bundle, opened)
    live = live_backtest(opened, replay.world)
    assert replay.backtest is not None
    assert live.value.tolist() == replay.backtest.value.tolist()
    assert live.fills.shares.tolist() == replay.backtest.fills.shares.tolist()
    assert live.measures["sharpe_annual"] == replay.backtest.measures["sharpe_annual"]
    assert np.allclose(live.weights, replay.backtest.weights, atol=1e-6)


def test_shortfall_is_what_the_fills_cost_against_the_close(known: Served, opened: Journal) -> None:
    costs = shortfalls(opened, replay_journal(known.bundle, opened).world)
    assert costs.height > 0
    fills = {row["order_id"]: row for row in read_table_of(opened, "fills").to_dicts()}
    for order in costs.filter(pl.col("filled") > 0).to_dicts():
        fill, sign = fills[order["id"]], 1.0 if order["side"] == "buy" else -1.0
        paid = sign * abs(fill["shares"]) * (fill["price"] - order["arrival"])
        paid += fill["commission"] + fill["stamp"]
        assert order["total"] - order["unfilled"] == pytest.approx(paid, abs=1e-6)
        assert order["total"] == pytest.approx(sum(order[name] for name in SHORTFALL))


def test_what_is_not_filled_costs_what_the_price_ran_away(
    known: Served, opened: Journal, tmp_path: Path
) -> None:
    world = replay_journal(known.bundle, opened).world
    first = next(opened.entries(kinds=("order",))).body
    asked = 100.0
    with _at_venue(opened, tmp_path / "v.db") as venue:
        order = {**first, "id": "x", "side": "buy", "shares": asked, "spend": 0.0, "by": "undo"}
        venue.append("order", order)
        venue.append("status", {"id": "x", "state": "cancelled", "filled": 40.0, "reason": "lot"})
        fill = {"trade_id": "t", "order_id": "x", "symbol": first["symbol"], "shares": 40.0}
        fill |= {"price": first["price"] + 0.5, "commission": 3.0, "stamp": 1.0, "slippage": 8.0}
        venue.append("fills", {"fills": [{**fill, "time": ""}], "cursor": "z"})
        venue.commit()
        (row,) = shortfalls(venue, world).filter(id="x").to_dicts()
    n = known.bundle.symbols.index(first["symbol"])
    at = int(world.times.searchsorted(read_table_of(opened, "decisions")["time"].to_numpy()[0]))
    ran = float(world.rows.close[at + 1, n]) - first["price"]
    assert row["market"] == pytest.approx(40.0 * 0.5 - 8.0)
    assert (row["slippage"], row["fees"]) == (8.0, 4.0)
    assert row["unfilled"] == pytest.approx(60.0 * ran)
    assert row["value"] == pytest.approx(asked * first["price"])


def test_every_symbol_has_an_outcome_at_every_decision(eventful: Path, known: Served) -> None:
    with Journal.read(eventful) as journal:
        every = outcomes(journal)
        decided = read_table_of(journal, "decisions").height
    assert every.height == decided * len(known.bundle.symbols)
    assert every.null_count().sum_horizontal().item() == 0
    stopped = every.filter(kind="stopped")
    assert {"max_turnover", "halted"} >= set(stopped["code"]) > set()
    assert set(every.filter(kind="untraded")["code"]) <= {*WHY, "no_order"}


# Words.


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_code_is_told_in_words(lang: str) -> None:
    keys = catalogue(lang).keys()
    for kind, codes in (("untraded", WHY), ("stopped", STOPPED), ("refused", REFUSED)):
        missing = [code for code in codes if f"{kind}_{code}" not in keys]
        assert not missing, kind


# The page.


def test_report_of_a_paper_journal_says_that_live_is_the_backtest(
    known: Served, clean: Path, tmp_path: Path
) -> None:
    with Journal.read(clean) as journal:
        page = write_live_report(known.bundle, journal, tmp_path, "en")
        orders = read_table_of(journal, "orders").height
    text = page.read_text(encoding="utf-8")
    words = live_words("en")
    assert words("live_verdict_equal", decisions=BARS, orders=orders, bars=BARS) in text
    assert (tmp_path / "equity.png").read_bytes().startswith(b"\x89PNG")
    charts = drawn_charts(draw_page(page, tmp_path / "profile"))
    expected = ("equity", "shortfall", "why", "holdings", "actions", "costs")
    assert {f"live/{name}" for name in expected} <= charts


def test_report_tells_what_happened_in_both_languages(
    known: Served, eventful: Path, tmp_path: Path
) -> None:
    with Journal.read(eventful) as journal:
        results = gather(known.bundle, journal)
    for lang in ("en", "zh"):
        words = live_words(lang)
        page = render(results, words, tmp_path)
        own = page[: page.index('id="report-data"')]
        assert f"<h1>{known.bundle.manifest['policy']}</h1>" in own
        for text in (
            words("stopped_max_turnover"),
            words("stopped_halted"),
            words("refused_late"),
            words("live_kind_command") + words("colon") + words("live_command_resume"),
            words("live_kind_halt") + words("colon") + words("live_halt_difference"),
            words("live_part_unfilled"),
            "AAPL: journal 1 shares, venue 2",
        ):
            assert text in own, text
        assert "operator &lt;b&gt;" in own
        assert words("live_kind_recovered") in own
        assert "&quot;snapshot&quot;" not in own
        assert words("live_verdict_equal", decisions=BARS, orders=0, bars=BARS) not in own
    assert verdict(results, words).key == "open"
    assert results.replay.touched is not None


def test_fills_of_a_venue_stand_beside_the_backtest(
    known: Served, opened: Journal, tmp_path: Path
) -> None:
    with _at_venue(opened, tmp_path / "v.db", leave_out="fills") as venue:
        results = gather(known.bundle, venue)
        page = render(results, live_words("en"), tmp_path)
    assert (results.replay.compared, results.replay.differences) == (0, ())
    assert results.live is not None
    assert not results.live.fills.shares.any()
    said = live_words("en")("live_verdict_venue", decisions=BARS, broker="alpaca")
    assert said in page


def test_no_secret_is_in_journal_log_or_report(
    known: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    secrets = {name.upper(): f"nobody-may-see-{name}" for name in Secrets.model_fields}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    caplog.set_level("DEBUG")
    path, token = tmp_path / "live.db", secrets["ECHELON_TOKEN"]
    with _engine(known, path, LimitsConfig()) as engine, ControlServer(engine, token):
        engine.run(bars=3)
        assert ask_engine(path, token) is not None
        status = json.dumps(engine.published)
    with Journal.read(path) as journal:
        write_live_report(known.bundle, journal, tmp_path / "report", "en")
        export_tables(journal, tmp_path / "tables")
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"live.db", "report.html", "orders.parquet"} <= {file.name for file in written}
    for text in [status.encode(), caplog.text.encode(), *(file.read_bytes() for file in written)]:
        assert b"nobody-may-see" not in text


def test_other_languages_are_written_again_and_unknown_ones_refused(
    known: Served, clean: Path, tmp_path: Path
) -> None:
    with Journal.read(clean) as journal:
        write_live_report(known.bundle, journal, tmp_path, "zh")
        (tmp_path / "report.zh.html").write_text("old", encoding="utf-8")
        write_live_report(known.bundle, journal, tmp_path, "en")
        with pytest.raises(UsageError, match="fr"):
            write_live_report(known.bundle, journal, tmp_path, "fr")
    chinese = (tmp_path / "report.zh.html").read_text(encoding="utf-8")
    assert Words("zh")("live_title") in chinese
    assert 'href="report.html"' in chinese


def test_journal_without_a_decision_is_refused(known: Served, tmp_path: Path) -> None:
    path = tmp_path / "live.db"
    with _engine(known, path, LimitsConfig()):
        pass
    with Journal.read(path) as journal:
        with pytest.raises(DataError, match="nothing was decided yet"):
            write_live_report(known.bundle, journal, tmp_path / "report", "en")
        with pytest.raises(DataError, match="nothing was decided yet"):
            replay_journal(known.bundle, journal)


# The dashboard.


def _drawn(view: Any) -> str:
    page = io.StringIO()
    Console(width=80, file=page).print(view)
    return page.getvalue()


def test_dashboard_shows_equity_positions_orders_and_warnings(eventful: Path) -> None:
    with Journal.read(eventful) as journal:
        status = {**last_status(journal), "running": False}
    recent = read_recent(eventful, status)
    text = _drawn(status_view(status, recent))
    assert f"{status['equity']:,.2f}" in text
    assert sparkline(recent.equity) in text
    assert "halted; no engine runs" in text
    unknown = _drawn(status_view({**status, "running": None}, recent))
    assert "ECHELON_TOKEN is not set" in unknown
    assert "no engine runs" not in unknown
    said = " ".join(text.split())
    assert "trading halted: " in said
    assert "paper and journal differ: AAPL" in said
    assert "orders stopped: Turnover of the session" in said
    assert "messages refused: Its bar set had passed" in said
    held = status["account"]["positions"]
    assert held
    worth = max(held, key=lambda symbol: held[symbol] * recent.close[symbol])
    share = held[worth] * recent.close[worth] / status["equity"]
    assert f"{share:.1%}" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_dashboard_bears_an_engine_that_has_seen_nothing(known: Served, tmp_path: Path) -> None:
    path = tmp_path / "live.db"
    with _engine(known, path, LimitsConfig()) as engine:
        text = _drawn(status_view(engine.published, Recorder(path).look(engine.published)))
    assert "none yet, 0 bars" in text


def test_sparkline_reaches_from_the_lowest_to_the_highest() -> None:
    assert sparkline([1.0, 2.0, 8.0]) == "▁▂█"
    assert sparkline([5.0, 5.0]) == "▄▄"
    assert sparkline([]) == ""
