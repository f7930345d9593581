"""The live engine: bit for bit the backtest, an order exactly once, and going on wherever it died."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Served, a_share, daily

from echelon.config.live import LiveConfig
from echelon.live.brokers import open_broker
from echelon.live.engine import LiveEngine
from echelon.live.feeds import open_feed, publish_bars
from echelon.live.journal import Journal
from echelon.live.replay import replay_journal

Get = Callable[..., Served]
QUICK = LiveConfig(sync=False, snapshot_every=7)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Get:
    """Bundles by market and algorithm, each made once."""
    known: dict[tuple[str, str], Served] = {}

    def get(market: str = "daily", algo: str = "A2C") -> Served:
        key = market, algo
        if key not in known:
            path = tmp_path_factory.mktemp(f"{market}-{algo}")
            make: Any = daily if market == "daily" else a_share
            known[key] = make(path, bars_file if market == "daily" else market, algo)
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


@pytest.mark.parametrize("algo", ["A2C", "SAC", "HIERARCHY"])
@pytest.mark.parametrize("market", ["daily", "1d", "5min"])
def test_a_journal_equals_the_backtest_bit_for_bit(
    served: Get, tmp_path: Path, market: str, algo: str
) -> None:
    known, bars = served(market, algo), 24
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
