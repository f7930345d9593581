"""A year of daily bars and forty days of 5-minute bars, live, equal the backtest bit for bit.

Of a flat agent, an expert and a hierarchy, on the bundled sample and on A-shares with their rules;
by file and by Kafka.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Served, a_share, sample

from echelon.config.live import LiveConfig
from echelon.live.brokers import open_broker
from echelon.live.engine import LiveEngine
from echelon.live.feeds import open_feed, publish_bars
from echelon.live.journal import Journal
from echelon.live.replay import replay_journal
from scripts.services import Running

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(900)]
CONFIG = LiveConfig(sync=False, snapshot_every=200)
YEAR = (
    "split={train: [2022-02-07, 2022-11-30], valid: [2022-12-01, 2023-12-15], "
    "test: [2023-12-18, 2023-12-29]}"
)
FORTY_DAYS = (
    "split={train: [2023-06-26, 2023-06-30], valid: [2023-07-03, 2023-08-29], "
    "test: [2023-08-30, 2023-08-30]}"
)
MARKETS: dict[str, tuple[Callable[[Path, str], Served], int]] = {
    "sample": (sample, 250),
    "a_share_daily": (
        lambda path, algo: a_share(path, "1d", algo, None, YEAR, first=date(2022, 1, 4)),
        250,
    ),
    "a_share_5min": (
        lambda path, algo: a_share(
            *(path, "5min", algo, None, FORTY_DAYS, "features.indicators={rsi: [6]}"),
            first=date(2023, 6, 20),
        ),
        40 * 48,
    ),
}


def _run(known: Served, path: Path, bars: int, feed: str) -> list[Any]:
    """What the journal holds when the engine has run."""
    day = known.world.times[known.rows(bars).start - 1].astype("datetime64[D]").item()
    assert isinstance(day, date)
    with LiveEngine.open(
        *(known.bundle, known.store, path, open_feed(feed, known.bundle, known.store)),
        open_broker("paper", known.bundle, path, known.store, day, CONFIG),
        CONFIG,
        until=day,
    ) as engine:
        engine.run(bars=bars)
        assert engine.state.mode == "running", engine.state.why
        assert engine.state.bars == bars
    content: list[Any] = []
    with Journal.read(path) as journal:
        for entry in journal.entries(kinds=("decision", "order", "fills", "account", "bars")):
            body = {k: v for k, v in entry.body.items() if k not in _OF_A_FEED}
            content.append((entry.kind, body, entry.data))
    return content


_OF_A_FEED = ("offsets", "seen", "received")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("algo", ["A2C", "SAC", "HIERARCHY"])
@pytest.mark.parametrize("market", list(MARKETS))
def test_long_runs_equal_the_backtest_by_file_and_by_kafka(
    market: str, algo: str, tmp_path: Path, kafka: Running
) -> None:
    make, bars = MARKETS[market]
    known = make(tmp_path, algo)
    until = known.world.times[known.rows(bars).start - 1].astype("datetime64[D]").item()
    assert isinstance(until, date)
    messages = tmp_path / "bars.jsonl"
    publish_bars(known.bundle, known.store, f"file:{messages}", until, bars)
    by_file = _run(known, tmp_path / "file.db", bars, f"file:{messages}")
    with Journal.read(tmp_path / "file.db") as journal:
        journal.verify()
        done = replay_journal(known.bundle, journal)
    assert done.differences == ()
    assert done.compared == bars
    assert done.backtest is not None
    assert np.count_nonzero(done.backtest.fills.shares) > 20
    topic = f"{kafka.url}/{market}-{algo}".lower()
    publish_bars(known.bundle, known.store, topic, until, bars)
    assert _run(known, tmp_path / "kafka.db", bars, f"{topic}?mode=history") == by_file
