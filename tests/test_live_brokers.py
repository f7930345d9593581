"""Every broker does what the engine relies on; the paper venue fills as the backtest does."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from engines import Served, a_share, daily

from echelon.backtest.run import run_backtest
from echelon.live.brokers import OrderRequest, Shown
from echelon.live.brokers.paper import PaperVenue
from echelon.serving.decision import Decision
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
        venue._journal._db.rollback()
        venue.close()
        return begin("killed")

    whole, expected = drive(known, begin("whole"), n_bars)
    decisions, answers = drive(known, begin("killed"), n_bars, restart)
    assert answers == expected
    assert [d.to_dict() for d in decisions] == [d.to_dict() for d in whole]
    assert sum(len(shown.fills) for shown in answers) > 0
