"""Ticks that come one by one make the bars that their file makes."""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from echelon.config.live import GateConfig
from echelon.data.derive import Listings, PanelKind
from echelon.data.sources.ticks import TicksSource
from echelon.data.stream import BarSet, PanelStream, StreamFacts
from echelon.live.feeds import Message
from echelon.live.feeds.messages import read_message
from echelon.live.feeds.ticks import TickBars
from echelon.live.gate import Gate
from echelon.types import Freq

CODES = ("600000.SH", "000001.SZ", "300750.SZ")
FIELDS = frozenset({"open", "high", "low", "close", "volume", "amount", "pre_close"})


def kind(freq: Freq, calendar: str = "XSHG") -> PanelKind:
    zone = "Asia/Shanghai" if calendar == "XSHG" else "UTC"
    return PanelKind(CODES, freq, calendar, zone, "raw", FIELDS, False, 250)


def session_ticks(day: date, seed: int, count: int = 4_000) -> list[dict[str, Any]]:
    """Trades of a session, auctions and prints behind the close among them, in order of time."""
    rng = np.random.default_rng(seed)
    spans = [(9, 15, 15), (9, 30, 120), (13, 0, 120), (15, 0, 4)]
    minutes = [datetime(day.year, day.month, day.day, h, m) for h, m, _ in spans]
    ticks = []
    for _ in range(count):
        k = int(rng.choice(4, p=[0.05, 0.45, 0.45, 0.05]))
        at = minutes[k] + timedelta(milliseconds=int(rng.integers(0, spans[k][2] * 60_000)))
        price, volume = round(float(rng.uniform(9, 11)), 2), float(rng.integers(1, 50) * 100)
        ticks.append(
            {
                **{"time": at, "symbol": str(rng.choice(CODES)), "price": price},
                **{"volume": volume, "pre_close": 10.0},
            }
        )
    return sorted(ticks, key=lambda tick: tick["time"])


def messages_of(ticks: list[dict[str, Any]]) -> list[Message]:
    lines = (
        json.dumps({"schema": 1, "type": "tick", **tick, "time": tick["time"].isoformat()})
        for tick in ticks
    )
    return [read_message("s", k, line.encode()) for k, line in enumerate(lines)]


def imported(ticks: list[dict[str, Any]], freq: Freq, path: Path) -> pl.DataFrame:
    header = "万得代码,自然日,时间,成交价格,成交数量,前收盘"
    rows = (
        f"{t['symbol']},{t['time']:%Y%m%d},{t['time'].strftime('%H%M%S%f')[:9]},"
        f"{t['price']},{t['volume']:.0f},{t['pre_close']}"
        for t in ticks
    )
    path.write_text("\n".join([header, *rows]) + "\n")
    source = TicksSource(path, freq=freq)
    frames = [piece.frame for piece in source.frames()]
    assert source.problems() == []
    return pl.concat(frames).sort("time", "symbol")


def streamed(ticks: list[dict[str, Any]], freq: Freq, batch: int) -> pl.DataFrame:
    """As the gate does: bars of a time when all its ticks are there."""
    bars = TickBars(kind(freq))
    messages = messages_of(ticks)
    by_time: dict[Any, list[Message]] = {}
    for k in range(0, len(messages), batch):
        for message in bars.place(messages[k : k + batch]):
            assert message.kind == "tick"
            by_time.setdefault(message.time, []).append(message)
    rows = []
    for time, part in by_time.items():
        bodies, problems = bars.bars(part)
        assert problems == []
        rows += [{**body, "time": time.item()} for body in bodies]
    return pl.DataFrame(rows).with_columns(pl.col("time").cast(pl.Datetime("us")))


@pytest.mark.parametrize("freq", ["1min", "5min", "1d"])
@pytest.mark.parametrize("batch", [1_000_000, 97])
def test_ticks_of_a_feed_make_the_bars_of_their_file(
    freq: Freq, batch: int, tmp_path: Path
) -> None:
    ticks = session_ticks(date(2024, 1, 2), 1) + session_ticks(date(2024, 1, 3), 2)
    expected = imported(ticks, freq, tmp_path / "ticks.csv")
    mine = streamed(ticks, freq, batch).sort("time", "symbol")
    assert len(mine) == len(expected) > 0
    for name in ("time", "symbol", *FIELDS):
        assert mine[name].to_list() == expected[name].to_list(), name


def test_ticks_outside_the_session_and_of_no_market_are_told() -> None:
    bars = TickBars(kind("1min"))
    base = {"symbol": "600000.SH", "price": 10.0, "volume": 100.0}
    ticks = [
        {**base, "time": datetime(2024, 1, 2, 12, 15)},
        {**base, "time": datetime(2024, 1, 2, 9, 31, 5)},
        {**base, "time": datetime(2024, 1, 2, 9, 31, 6), "volume": -5.0},
        {**base, "time": datetime(2024, 1, 2, 9, 31, 7), "price": 0.0},
        {**base, "time": datetime(2024, 1, 2, 9, 31, 8), "price": 10.5, "amount": 1049.0},
    ]
    outside, *placed = bars.place(messages_of(ticks))
    assert outside.kind == "refused"
    assert outside.body["reason"] == "session"
    assert {message.time for message in placed} == {np.datetime64("2024-01-02T09:32")}
    bodies, problems = bars.bars(placed)
    assert [row for row, _ in problems] == [1, 2]
    assert bodies == [
        {
            **{"symbol": "600000.SH", "open": 10.0, "high": 10.5, "low": 10.0, "close": 10.5},
            **{"volume": 200.0, "amount": 2049.0},
        }
    ]


def gate(*, live: bool) -> Gate:
    """Behind the last bar of 2024-01-02."""
    n = len(CODES)
    days = np.full(n, "NaT", dtype="datetime64[D]")
    known = Listings(days.astype("datetime64[us]"), np.full(n, np.nan), days, days)
    facts = StreamFacts(kind("1min"), known, (None,) * n, np.ones(n, dtype=np.bool_), None)
    panel = PanelStream(facts)
    ten = np.full(n, 10.0)
    panel.push(
        BarSet(
            np.datetime64("2024-01-02T15:00", "us"),
            *(ten, ten, ten, ten, np.full(n, 100.0), np.full(n, 1000.0)),
            pre_close=ten,
        )
    )
    traded = np.ones(n, dtype=np.bool_)
    return Gate(panel, ten, traded, GateConfig(deadline_seconds=5.0), live=live)


def close_of(minute: str, offset: int) -> Message:
    return Message("s", offset, "close", np.datetime64(minute, "us"), {})


def test_the_gate_makes_bars_of_ticks_when_their_time_is_closed() -> None:
    base = {"symbol": "600000.SH", "volume": 100.0}
    begin = datetime(2024, 1, 3, 9, 30)
    prices = [(5, 10.0), (59, 10.2), (60, 10.4), (30, 10.1), (0, 9.9)]  # the last two are late
    ticks = [{**base, "time": begin + timedelta(seconds=s), "price": p} for s, p in prices]
    passing = gate(live=False)
    passing.take(messages_of(ticks), 0.0, ("s",))
    assert list(passing.ready(0.0, ended=False)) == []
    assert passing.offsets == {"s": 0}  # all are needed again after a crash
    passing.take([close_of("2024-01-03T09:31", 5)], 0.0, ("s",))
    (bars,) = passing.ready(0.0, ended=False)
    assert isinstance(bars, BarSet)
    names = ("open", "high", "low", "close", "volume")
    assert [getattr(bars, name)[0] for name in names] == [9.9, 10.2, 9.9, 10.2, 400.0]
    assert np.isnan(bars.close[1:]).all()
    assert passing.offsets == {"s": 2}  # the tick of the next minute still waits
    assert passing.drain() == []


def test_a_live_minute_of_ticks_is_late_only_after_the_next_has_begun() -> None:
    base = {"symbol": "600000.SH", "volume": 100.0, "price": 10.0}
    begin = datetime(2024, 1, 3, 9, 30, 1)
    first, second = ({**base, "time": begin + timedelta(minutes=k)} for k in range(2))
    passing = gate(live=True)
    passing.take(messages_of([first]), 0.0, ("s",))
    assert list(passing.ready(59.0, ended=False)) == []
    passing.take([messages_of([first, second])[1]], 61.0, ("s",))
    assert list(passing.ready(62.0, ended=False)) == []
    ready = [item for item in passing.ready(67.0, ended=False) if isinstance(item, BarSet)]
    assert [str(bars.time)[11:16] for bars in ready] == ["09:31"]
