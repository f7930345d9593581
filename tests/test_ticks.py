"""Tick files: exact bars against a slow, obvious twin; bad rows; Parquet; bounded memory."""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from datetime import date, datetime, time, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echelon.cli.app import main
from echelon.data.importing import import_source
from echelon.data.sources import Source
from echelon.data.sources import ticks as module
from echelon.data.sources._ticks_read import ProblemLog
from echelon.data.sources.ticks import (
    BarMerger,
    TicksSource,
    bar_end,
    sessions_of,
)
from echelon.data.store import Store
from echelon.errors import DataError, InvalidDataError, Problem, SourceError
from echelon.types import Freq

TRADES = ("万得代码", "自然日", "时间", "成交价格", "成交数量")
SNAPSHOTS = ("万得代码", "自然日", "时间", "成交价", "当日累计成交量", "当日成交额", "前收盘")
BAR = ("open", "high", "low", "close", "volume", "amount")
Row = Sequence[object]
# ru_maxrss outlives exec, so a child would report the size of the pytest that started it. A shell
# in between (which must fork, having more to do) is small.
THIN = ("sh", "-c", '"$@"; exit $?', "sh")


def write(path: Path, header: Sequence[str], rows: Iterable[Row], encoding: str = "utf-8") -> Path:
    text = "\n".join(",".join(map(str, r)) for r in [header, *rows]) + "\n"
    data = text.encode(encoding)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def bars_of(source: TicksSource) -> pl.DataFrame:
    frames = [piece.frame for piece in source.frames()]
    return pl.concat(frames).sort("symbol", "time") if frames else pl.DataFrame()


def twin(path: Path, freq: Freq) -> dict[tuple[str, datetime], dict[str, Any]]:
    """A-share bars of a trades file, the obvious way: all rows in memory, sorted, one by one."""
    with path.open(encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    rows.sort(key=lambda r: (r["自然日"], int(r["时间"])))  # stable: ties stay in file order
    bars: dict[tuple[str, datetime], dict[str, Any]] = {}
    for r in rows:
        stamp = datetime.strptime(r["自然日"] + r["时间"].zfill(9)[:6], "%Y%m%d%H%M%S")
        price, volume = float(r["成交价格"]), float(r["成交数量"])
        bar = bars.setdefault(
            (r["万得代码"], _end_of_bar(stamp, freq)),
            {"open": price, "high": price, "low": price, "volume": 0.0, "amount": 0.0},
        )
        bar["high"], bar["low"] = max(bar["high"], price), min(bar["low"], price)
        bar["close"] = price
        bar["volume"] += volume
        bar["amount"] += price * volume
    return bars


def _end_of_bar(stamp: datetime, freq: Freq) -> datetime:
    midnight = datetime.combine(stamp.date(), time())
    if freq == "1d":
        return midnight
    minutes = {"1min": 1, "5min": 5}[freq]
    morning = stamp.hour < 12
    opening = midnight + (timedelta(hours=9, minutes=30) if morning else timedelta(hours=13))
    k = int((stamp - opening).total_seconds() // 60) // minutes
    k = min(max(k, 0), 120 // minutes - 1)
    return opening + timedelta(minutes=(k + 1) * minutes)


def assert_equal_twin(source: TicksSource, path: Path, freq: Freq) -> None:
    expected = twin(path, freq)
    found = {(r["symbol"], r["time"]): r for r in bars_of(source).iter_rows(named=True)}
    assert found.keys() == expected.keys()
    for key, bar in expected.items():
        for name in ("open", "high", "low", "close", "volume"):
            assert found[key][name] == bar[name], (key, name)
        assert found[key]["amount"] == pytest.approx(bar["amount"], rel=1e-12)


def random_trades(n: int, seed: int, n_symbols: int = 5, days: int = 3) -> list[list[object]]:
    rng = random.Random(seed)
    sessions = [(9, 25, 9, 25), (9, 30, 11, 30), (13, 0, 15, 0)]
    rows: list[list[object]] = []
    for _ in range(n):
        h0, m0, h1, m1 = rng.choice(sessions)
        second = rng.randint((h0 * 60 + m0) * 60, (h1 * 60 + m1) * 60)
        clock = f"{second // 3600}{second // 60 % 60:02d}{second % 60:02d}{rng.randint(0, 999):03d}"
        rows.append(
            [
                f"60000{rng.randrange(n_symbols)}.SH",
                20240102 + rng.randrange(days),
                clock,
                f"{rng.randint(900, 1100) / 100:.2f}",
                rng.randint(1, 50) * 100,
            ]
        )
    return rows


def by_time(rows: list[list[object]]) -> list[list[object]]:
    return sorted(rows, key=lambda r: (r[1], int(str(r[2]))))


def by_symbol(rows: list[list[object]]) -> list[list[object]]:
    return sorted(by_time(rows), key=lambda r: str(r[0]))


@pytest.mark.parametrize("freq", ["1min", "5min", "1d"])
@pytest.mark.parametrize("order", [by_time, by_symbol, list])
def test_bars_of_any_row_order_equal_the_slow_twin(tmp_path: Path, freq: Freq, order: Any) -> None:
    path = write(tmp_path / "t.csv", TRADES, order(random_trades(3_000, seed=1)))
    source = TicksSource(path, freq=freq, block_bytes=4_000)
    assert isinstance(source, Source)
    assert_equal_twin(source, path, freq)
    assert source.problems() == []


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 200), block=st.integers(120, 3_000))
def test_block_size_changes_no_bar(tmp_path: Path, seed: int, n: int, block: int) -> None:
    path = write(tmp_path / "t.csv", TRADES, random_trades(n, seed))
    assert_equal_twin(TicksSource(path, freq="1min", block_bytes=block), path, "1min")


def test_spilling_to_disk_changes_no_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.csv", TRADES, by_time(random_trades(3_000, seed=2)))
    monkeypatch.setattr(module, "BarMerger", partial(BarMerger, limit=200))
    monkeypatch.setattr(module, "_PART_BYTES", path.stat().st_size // 3)
    source = TicksSource(path, freq="1min", block_bytes=4_000)
    pieces = [piece.frame for piece in source.frames()]
    assert 1 < len(pieces) <= 3
    for piece in pieces:
        assert piece.equals(piece.sort("symbol", "time"))
    symbols = [set(piece["symbol"]) for piece in pieces]
    assert sum(map(len, symbols)) == len(set.union(*symbols)), "a symbol is in two pieces"
    assert_equal_twin(source, path, "1min")


def test_daily_and_five_minute_bars_are_the_aggregate_of_minutes(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", TRADES, by_time(random_trades(2_000, seed=3)))
    minutes = bars_of(TicksSource(path, freq="1min"))
    day = minutes.group_by("symbol", time=pl.col("time").dt.truncate("1d"), maintain_order=True)
    expected = day.agg(
        pl.col("open").first(),
        pl.col("high").max(),
        pl.col("low").min(),
        pl.col("close").last(),
        pl.col("volume").sum(),
    ).sort("symbol", "time")
    daily = bars_of(TicksSource(path, freq="1d"))
    assert daily.select(expected.columns).equals(expected)


@pytest.mark.parametrize(
    ("clock", "end"),
    [
        ("92500000", "09:31"),
        ("93000000", "09:31"),
        ("93059999", "09:31"),
        ("93100000", "09:32"),
        ("112959999", "11:30"),
        ("113000000", "11:30"),
        ("130000000", "13:01"),
        ("145959999", "15:00"),
        ("150000000", "15:00"),
        ("150003120", "15:00"),
    ],
)
def test_a_trade_belongs_to_the_bar_that_ends_after_it(
    tmp_path: Path, clock: str, end: str
) -> None:
    path = write(tmp_path / "t.csv", TRADES, [("600000.SH", 20240102, clock, 10.0, 100)])
    bars = bars_of(TicksSource(path, freq="1min"))
    assert bars["time"].to_list() == [datetime.fromisoformat(f"2024-01-02 {end}")]


def test_hours_of_another_exchange_and_round_the_clock() -> None:
    times = pl.DataFrame({"ms": [0, 34_199_999, 34_200_000, 57_600_500, 86_399_999]})
    new_york = times.select(bar_end(sessions_of("XNYS"), "5min")).to_series().to_list()
    assert new_york == [None, None, 34_500_000, 57_600_000, None]
    always = times.select(bar_end(sessions_of("24/7"), "1min")).to_series().to_list()
    assert always == [60_000, 34_200_000, 34_260_000, 57_660_000, 86_400_000]


def test_gbk_gz_with_other_names_equals_utf8(tmp_path: Path) -> None:
    rows = by_time(random_trades(500, seed=4))
    plain = write(tmp_path / "a.csv", TRADES, rows)
    header = ("代码", "日期", "时间", "最新价", "成交量", "证券名称")
    named = [[*r, "浦发银行"] for r in rows]
    packed = write(tmp_path / "b.csv.gz", header, named, encoding="gbk")
    left = bars_of(TicksSource(plain, freq="1min"))
    right = bars_of(TicksSource(packed, freq="1min", block_bytes=3_000))
    assert left.equals(right)


@pytest.mark.parametrize(
    ("header", "make"),
    [
        (("code", "date", "time", "price", "volume"), lambda d, t: [d, t]),
        (
            ("code", "date", "time", "price", "volume"),
            lambda d, t: [f"{d[:4]}-{d[4:6]}-{d[6:]}", t],
        ),
        (
            ("code", "date", "time", "price", "volume"),
            lambda d, t: [d, f"{t[:2]}:{t[2:4]}:{t[4:6]}.{t[6:]}"],
        ),
        (("code", "x", "datetime", "price", "volume"), lambda d, t: ["", d + t]),
        (
            ("code", "x", "datetime", "price", "volume"),
            lambda d, t: ["", f"{d[:4]}-{d[4:6]}-{d[6:]} {t[:2]}:{t[2:4]}:{t[4:6]}.{t[6:]}"],
        ),
    ],
)
def test_every_spelling_of_time_gives_the_same_bars(
    tmp_path: Path, header: tuple[str, ...], make: Any
) -> None:
    rows = by_time(random_trades(300, seed=5))
    plain = bars_of(TicksSource(write(tmp_path / "a.csv", TRADES, rows), freq="1min"))
    spelled = [[r[0], *make(str(r[1]), str(r[2]).zfill(9)), *r[3:]] for r in rows]
    other = TicksSource(write(tmp_path / "b.csv", header, spelled), freq="1min")
    assert bars_of(other).equals(plain)
    assert other.problems() == []


def test_times_without_milliseconds_are_read_as_seconds(tmp_path: Path) -> None:
    rows = [
        ("600000.SH", 20240102, "093000", 10.0, 100),
        ("600000.SH", 20240102, 145959, 11.0, 100),
    ]
    bars = bars_of(TicksSource(write(tmp_path / "t.csv", TRADES, rows), freq="1min"))
    assert [t.strftime("%H:%M") for t in bars["time"]] == ["09:31", "15:00"]


def snapshots() -> list[Row]:
    a, b = "600000.SH", "000001.SZ"
    return [
        (a, 20240102, 91503000, 0, 0, 0, 9.9),  # before the auction: a quote
        (a, 20240102, 92503000, 10.0, 500, 5_000, 9.9),
        (b, 20240102, 92503000, 20.0, 100, 2_000, 19.5),
        (a, 20240102, 93001000, 10.2, 800, 8_060, 9.9),
        (a, 20240102, 93101000, 10.2, 800, 8_060, 9.9),  # nothing new: no trade, no bar
        (b, 20240102, 93101000, 20.5, 300, 6_100, 19.5),
        (a, 20240102, 93259000, 10.1, 1_000, 10_080, 9.9),
        (a, 20240103, 92503000, 10.3, 200, 2_060, 10.1),  # a new day starts from nothing
        (a, 20240103, 93005000, 10.4, 300, 3_100, 10.1),
    ]


@pytest.mark.parametrize("block_bytes", [140, 200, 10_000])
def test_cumulative_volume_is_differenced_per_day_across_blocks(
    tmp_path: Path, block_bytes: int
) -> None:
    path = write(tmp_path / "s.csv", SNAPSHOTS, snapshots())
    source = TicksSource(path, freq="1min", block_bytes=block_bytes)
    bars = bars_of(source)
    stamps = [(s, t.strftime("%d %H:%M")) for s, t in bars.select("symbol", "time").iter_rows()]
    found = dict(zip(stamps, bars.select(BAR).rows(), strict=True))
    assert found == {
        ("000001.SZ", "02 09:31"): (20.0, 20.0, 20.0, 20.0, 100, 2_000),
        ("000001.SZ", "02 09:32"): (20.5, 20.5, 20.5, 20.5, 200, 4_100),
        ("600000.SH", "02 09:31"): (10.0, 10.2, 10.0, 10.2, 800, 8_060),
        ("600000.SH", "02 09:33"): (10.1, 10.1, 10.1, 10.1, 200, 2_020),
        ("600000.SH", "03 09:31"): (10.3, 10.4, 10.3, 10.4, 300, 3_100),
    }
    assert source.problems() == []


def test_daily_bars_of_snapshots_carry_the_reference_price(tmp_path: Path) -> None:
    source = TicksSource(write(tmp_path / "s.csv", SNAPSHOTS, snapshots()), freq="1d")
    bars = bars_of(source)
    assert bars["pre_close"].to_list() == [19.5, 9.9, 10.1]
    assert "pre_close" in source.info().fields


@pytest.mark.parametrize("freq", ["1min", "5min"])
def test_every_intraday_bar_carries_the_reference_price_of_its_session(
    tmp_path: Path, freq: Freq
) -> None:
    rows = [(*row[:6], 0 if k == 6 else row[6]) for k, row in enumerate(snapshots())]
    source = TicksSource(write(tmp_path / "s.csv", SNAPSHOTS, rows), freq=freq)
    bars = bars_of(source)
    found = bars.group_by("symbol", pl.col("time").dt.day()).agg(pl.col("pre_close").unique())
    assert bars["pre_close"].null_count() == 0
    assert sorted(found.rows()) == [
        ("000001.SZ", 2, [19.5]),
        ("600000.SH", 2, [9.9]),
        ("600000.SH", 3, [10.1]),
    ]
    assert "pre_close" in source.info().fields


def test_cumulative_volume_that_falls_is_reported_with_its_line(tmp_path: Path) -> None:
    rows = snapshots()
    rows.insert(5, ("600000.SH", 20240102, 93102000, 10.2, 700, 7_000, 9.9))
    source = TicksSource(write(tmp_path / "s.csv", SNAPSHOTS, rows), freq="1d")
    bars = bars_of(source)
    assert bars.filter(symbol="600000.SH")["volume"].to_list() == [1_000, 300]
    volume = [p for p in source.problems() if p.field == "当日累计成交量"]
    assert [p.row for p in volume] == [7]
    assert "less than before" in volume[0].message


def test_per_row_volume_wins_over_cumulative(tmp_path: Path) -> None:
    header = ("万得代码", "自然日", "时间", "成交价", "成交量", "当日累计成交量")
    rows = [("600000.SH", 20240102, 93000000, 10.0, 100, 5_000)]
    bars = bars_of(TicksSource(write(tmp_path / "s.csv", header, rows), freq="1d"))
    assert bars["volume"].to_list() == [100]


def test_volume_in_lots_becomes_shares(tmp_path: Path) -> None:
    header = ("代码", "日期", "时间", "成交价", "成交量(手)", "成交额(万元)")
    rows = [("600000.SH", 20240102, 93000000, 10.0, 3, 0.3)]
    bars = bars_of(TicksSource(write(tmp_path / "s.csv", header, rows), freq="1d"))
    assert bars.select("volume", "amount").row(0) == (300, 3_000)


def test_whole_number_prices_of_wind_are_ten_thousandths(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        ("600000.SH", 20240102, 93000000, 102_500, 100),
        ("600000.SH", 20240102, 93001000, 102_600, 100),
    ]
    path = write(tmp_path / "t.csv", TRADES, rows)
    bars = bars_of(TicksSource(path, freq="1d"))
    assert bars.select("open", "close").row(0) == (10.25, 10.26)
    assert "1/10000" in caplog.text
    assert bars_of(TicksSource(path, freq="1d", price_scale=1.0))["open"].to_list() == [102_500]


def test_cancellations_are_in_no_bar(tmp_path: Path) -> None:
    header = (*TRADES, "成交代码")
    rows = [
        ("000001.SZ", 20240102, 93000000, 10.0, 100, "0"),
        ("000001.SZ", 20240102, 93000000, 0, 400, "C"),
        ("000001.SZ", 20240102, 93001000, 10.1, 200, ""),
    ]
    source = TicksSource(write(tmp_path / "t.csv", header, rows), freq="1d")
    assert bars_of(source)["volume"].to_list() == [300]
    assert source.problems() == []


def test_file_without_volume_gives_bars_without_volume(tmp_path: Path) -> None:
    rows = [("600000.SH", 20240102, 91500000, 0), ("600000.SH", 20240102, 93000000, 10.0)]
    source = TicksSource(write(tmp_path / "t.csv", TRADES[:4], rows), freq="1d")
    bars = bars_of(source)
    assert bars.select("open", "volume", "amount").rows() == [(10.0, None, None)]
    assert source.info().fields == {"open", "high", "low", "close"}


def bad_rows() -> list[Row]:
    good = ("600000.SH", 20240102, 93000000, 10.0, 100)
    return [
        good,
        ("600000.SH", 20240102, 93001000, "abc", 100),  # line 3
        ("600000.SH", 20240102, 93002000, 0, 100),
        ("600000.SH", 20240102, 93003000, -1, 100),
        ("600000.SH", 20240102, 93004000, 10.0, -5),
        ("600000.SH", 20241302, 93005000, 10.0, 100),  # line 7
        ("600000.SH", 20240102, 99999999, 10.0, 100),
        ("600000.SH", 20240102, 120000000, 10.0, 100),
        ("", 20240102, 93006000, 10.0, 100),  # line 10
        ("600000.SH", 20240102, 93007000),
        (),  # a blank line is no row
        ("600000.SH", 20240102, 151000000, 10.0, 100),  # line 13
        ("600000.SH", 20240102, 93008000, 10.5, 100),
    ]


@pytest.mark.parametrize("block_bytes", [120, 200, 10_000])
def test_each_bad_row_is_named_with_line_and_field_and_costs_only_itself(
    tmp_path: Path, block_bytes: int
) -> None:
    path = write(tmp_path / "t.csv", TRADES, bad_rows())
    source = TicksSource(path, freq="1d", block_bytes=block_bytes)
    bars = bars_of(source)
    assert bars.select(BAR).rows() == [(10.0, 10.5, 10.0, 10.5, 200, 2_050)]
    found = {p.row: p for p in source.problems()}
    expected = {
        3: ("成交价格", "abc is not a number"),
        4: ("成交价格", "0.0 is not a price"),
        5: ("成交价格", "-1.0 is negative"),
        6: ("成交数量", "-5.0 is negative"),
        7: ("自然日", "20241302 is not a date"),
        8: ("时间", "99999999 is not a time of day"),
        9: ("时间", "12:00:00.000 is outside the session"),
        10: ("万得代码", "is missing"),
        11: (None, "the line has 3 cells, the header 5"),
        13: ("时间", "15:10:00.000 is after-hours trading"),
    }
    assert found.keys() == expected.keys()
    for row, (field, message) in expected.items():
        assert found[row].field == field
        assert message in found[row].message
        assert found[row].file == str(path)
        assert found[row].remedy
    assert [p.row for p in source.problems() if p.severity == "warning"] == [13]


def test_many_bad_rows_are_listed_in_part_and_counted_in_full(tmp_path: Path) -> None:
    rows: list[Row] = [("600000.SH", 20240102, 93000000, 10.0, 100)]
    rows += [("600000.SH", 20240102, 120000000 + i, 10.0, 100) for i in range(1_000)]
    source = TicksSource(write(tmp_path / "t.csv", TRADES, rows), freq="1d", block_bytes=2_000)
    bars_of(source)
    problems = source.problems()
    assert len(problems) == 21
    assert problems[-1].row is None
    assert "980 more row(s)" in problems[-1].message
    assert source.rejected_rows().height == 1_000


def test_a_second_reading_starts_its_problems_anew(tmp_path: Path) -> None:
    source = TicksSource(write(tmp_path / "t.csv", TRADES, bad_rows()), freq="1d")
    bars_of(source)
    first, rejected_rows = source.problems(), source.rejected_rows()
    bars_of(source)
    assert source.problems() == first
    assert source.rejected_rows().equals(rejected_rows)


def lines_of(path: Path, rows: Iterable[int]) -> list[str]:
    text = path.read_text(encoding="utf-8").splitlines()
    return [text[row - 1] for row in rows]


@pytest.mark.parametrize("block_bytes", [120, 200, 10_000])
def test_every_bad_row_is_set_aside_as_it_stood(tmp_path: Path, block_bytes: int) -> None:
    path = write(tmp_path / "t.csv", TRADES, bad_rows())
    source = TicksSource(path, freq="1d", block_bytes=block_bytes)
    bars_of(source)
    found = source.rejected_rows()
    assert found["row"].to_list() == [*range(3, 12)]  # 13 is after-hours trading: no error
    assert found["file"].unique().to_list() == [str(path)]
    assert found["cells"].to_list() == lines_of(path, range(3, 12))
    assert found["problem"].to_list() == [
        "成交价格: abc is not a number",
        "成交价格: 0.0 is not a price, yet there is volume",
        "成交价格: -1.0 is negative",
        "成交数量: -5.0 is negative",
        "自然日: 20241302 is not a date",
        "时间: 99999999 is not a time of day",
        "时间: 12:00:00.000 is outside the session",
        "万得代码: is missing",
        "the line has 3 cells, the header 5",
    ]


def test_row_with_several_things_wrong_is_set_aside_once(tmp_path: Path) -> None:
    rows = [
        ("600000.SH", 20240102, 93000000, 10.0, 100),
        ("600000.SH", 20241302, 93001000, "abc", "x"),
        ("600000.SH", 20240102, 93002000, "def", 100),
    ]
    source = TicksSource(write(tmp_path / "t.csv", TRADES, rows), freq="1d")
    assert bars_of(source)["volume"].to_list() == [100]
    found = source.rejected_rows()
    assert found["row"].to_list() == [3, 4]
    assert found["problem"][0] == (
        "成交价格: abc is not a number; 成交数量: x is not a number; 自然日: 20241302 is not a date"
    )
    assert source.rejected_rows().height == 2


def test_rows_of_gbk_and_of_several_files_are_set_aside_readably(tmp_path: Path) -> None:
    header = (*TRADES, "备注")
    for day in (20240102, 20240103):
        rows: list[Row] = [
            ("600000.SH", day, 93000000, 10.0, 100, "甲"),
            ("600000.SH", day, 93001000, 10.0, -1, "乙\\"),
        ]
        write(tmp_path / f"{day}.csv.gz", header, rows, encoding="gbk")
    source = TicksSource(tmp_path, freq="1d")
    bars_of(source)
    found = source.rejected_rows()
    assert [Path(f).name for f in found["file"]] == ["20240102.csv.gz", "20240103.csv.gz"]
    assert found["row"].to_list() == [3, 3]
    assert found["cells"][1] == "600000.SH,20240103,93001000,10.0,-1,乙\\"


def test_spilling_rejected_rows_changes_none_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    rows: list[Row] = [("600000.SH", 20240102, 93000000, 10.0, 100)]
    rows += [("600000.SH", 20240102, 120000000 + i, 10.0, 100) for i in range(1_000)]
    path = write(tmp_path / "t.csv", TRADES, rows)
    plain = TicksSource(path, freq="1d", block_bytes=2_000)
    bars_of(plain)
    assert list(scratch.iterdir()) == []
    monkeypatch.setattr(module, "ProblemLog", partial(ProblemLog, limit=20_000))
    source = TicksSource(path, freq="1d", block_bytes=2_000)
    bars_of(source)
    assert len(list(scratch.glob("*/*.parquet"))) > 1
    found = source.rejected_rows()
    assert found.equals(plain.rejected_rows())
    assert found["cells"].to_list() == lines_of(path, range(3, 1_003))
    del source
    assert list(scratch.iterdir()) == []


def test_import_counts_and_writes_every_row_it_sets_aside(tmp_path: Path) -> None:
    rows = bad_rows()
    rows += [("600000.SH", 20240102, 120000000 + i, 10.0, 100) for i in range(500)]
    path = write(tmp_path / "t.csv", TRADES, rows)
    source = TicksSource(path, freq="1d", block_bytes=2_000)
    report = import_source(source, Store(tmp_path / "store"), "m", quarantine=True)
    assert report.quarantine is not None
    aside = pl.read_csv(report.quarantine)
    assert report.manifest.quarantined == aside.height == source.rejected_rows().height == 509
    assert aside.columns == ["file", "row", "problem", "cells"]
    assert aside["cells"].to_list() == lines_of(path, aside["row"])
    assert report.manifest.rows == 1
    assert [p.row for p in report.problems if p.severity == "warning"] == [13]


def test_import_without_quarantine_refuses_bad_rows_but_not_after_hours_trading(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path / "store")
    bad = TicksSource(write(tmp_path / "t.csv", TRADES, bad_rows()), freq="1d")
    with pytest.raises(InvalidDataError, match="nothing was imported") as caught:
        import_source(bad, store, "m")
    assert {p.row for p in caught.value.problems} == {*range(3, 12)}
    assert "m" not in store
    late = [bad_rows()[0], bad_rows()[-2]]
    after = TicksSource(write(tmp_path / "a.csv", TRADES, late), freq="1d")
    report = import_source(after, store, "m")
    assert (report.manifest.quarantined, report.quarantine) == (0, None)


def test_command_writes_bad_ticks_to_a_file_only_when_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("t.csv"), TRADES, bad_rows())
    words = ["echelon", "data", "import", "ticks", "t.csv", "--freq", "1d", "--dataset", "m"]
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 4
    message = capsys.readouterr().err
    assert "--quarantine" in message
    for row in range(3, 12):
        assert f"t.csv, row {row}" in message
    assert "nothing was imported" in message
    assert not Path("store/m/CURRENT.json").exists()
    monkeypatch.setattr(sys, "argv", [*words, "--quarantine"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    assert "9 row(s) set aside in store/m/quarantine.csv" in capsys.readouterr().err
    aside = pl.read_csv("store/m/quarantine.csv")
    assert aside["cells"].to_list() == lines_of(Path("t.csv"), range(3, 12))


def test_row_whose_cumulative_amount_falls_is_as_if_not_there(tmp_path: Path) -> None:
    a = "600000.SH"
    rows: list[Row] = [
        (a, 20240102, 93001000, 10.0, 500, 5_000, 9.9),
        (a, 20240102, 93002000, 12.0, 800, 4_000, 9.9),  # volume grows, the amount falls
        (a, 20240102, 93101000, 10.2, 1_000, 10_100, 9.9),
    ]
    for block_bytes in (140, 10_000):
        path = write(tmp_path / "s.csv", SNAPSHOTS, rows)
        source = TicksSource(path, freq="1min", block_bytes=block_bytes)
        bars = bars_of(source)
        assert bars.select("high", "volume", "amount").rows() == [
            (10.0, 500, 5_000),
            (10.2, 500, 5_100),
        ]
        assert source.rejected_rows()["row"].to_list() == [3]


def test_bad_order_book_cell_is_a_warning_and_bars_do_not_depend_on_it(tmp_path: Path) -> None:
    header = (*TRADES, "申买价1")
    rows = [("600000.SH", 20240102, 93000000, 10.0, 100, "x")]
    path = write(tmp_path / "t.csv", header, rows)
    plain = bars_of(TicksSource(path, freq="1d"))
    source = TicksSource(path, freq="1d", parquet_dir=tmp_path / "out")
    assert bars_of(source).equals(plain)
    assert [(p.row, p.field, p.severity) for p in source.problems()] == [(2, "申买价1", "warning")]
    assert source.rejected_rows().is_empty()
    assert pl.read_parquet(tmp_path / "out" / "t.parquet")["bid_price1"].to_list() == [None]


def test_row_of_a_bar_is_the_line_of_its_first_trade(tmp_path: Path) -> None:
    rows = [
        ("600000.SH", 20240102, 93130000, 10.0, 100),
        ("600000.SH", 20240102, 93005000, 10.1, 100),
        ("600000.SH", 20240102, 93002000, 10.2, 100),
    ]
    source = TicksSource(write(tmp_path / "t.csv", TRADES, rows), freq="1min")
    assert bars_of(source)["row"].to_list() == [4, 2]


def test_directory_of_files_names_the_file_of_each_bar(tmp_path: Path) -> None:
    for day in (20240102, 20240103):
        folder = tmp_path / "in" / str(day)
        folder.mkdir(parents=True)
        write(folder / "逐笔成交.csv", TRADES, [("600000.SH", day, 93000000, 10.0, 100)])
    for path in (tmp_path / "in", tmp_path / "in" / "*" / "逐笔成交.csv"):
        source = TicksSource(path, freq="1d", parquet_dir=tmp_path / "out")
        pieces = list(source.frames())
        assert [Path(p.origin).parent.name for p in pieces] == ["20240102", "20240103"]
        assert len(list((tmp_path / "out").glob("*2024010[23]-逐笔成交.parquet"))) >= 2


def test_trades_and_snapshots_in_one_directory_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "逐笔成交.csv", TRADES, [("600000.SH", 20240102, 93000000, 10.0, 100)])
    write(tmp_path / "行情.csv", SNAPSHOTS, snapshots())
    with pytest.raises(SourceError, match="counted twice"):
        TicksSource(tmp_path, freq="1d").info()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.csv", None, "does not exist"),
        ("empty.csv", b"", "is empty"),
        ("cols.csv", b"code,date,time,foo\n1,2,3,4\n", "'price': no column for it"),
        ("nodate.csv", b"code,time,price\n600000.SH,93000000,10\n", "no date"),
        ("utf16.csv", "代码,日期".encode("utf-16"), "no rows"),
        ("bad.csv.gz", b"not gzip", "damaged or truncated"),
    ],
)
def test_unusable_file_is_refused_with_its_name(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        TicksSource(path, freq="1d").info()
    assert name in str(caught.value)


def test_gz_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    rng = random.Random(1)
    rows = [("600000.SH", 20240102, 93000000, rng.random() + 1, 100) for _ in range(50_000)]
    path = write(tmp_path / "t.csv.gz", TRADES, rows)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 4])
    with pytest.raises(SourceError, match="damaged or truncated"):
        list(TicksSource(path, freq="1d").frames())


def test_columns_map_unknown_names(tmp_path: Path) -> None:
    header = ("sec", "date", "time", "px", "sz")
    path = write(tmp_path / "t.csv", header, [("600000.SH", 20240102, 93000000, 10.0, 100)])
    names = {"sec": "symbol", "px": "price", "sz": "volume"}
    assert bars_of(TicksSource(path, freq="1d", columns=names))["volume"].to_list() == [100]
    with pytest.raises(InvalidDataError, match="names 'pxx', but the columns are sec, date"):
        TicksSource(path, freq="1d", columns={"pxx": "price"}).info()
    with pytest.raises(InvalidDataError, match="'prize', which is no field of ours"):
        TicksSource(path, freq="1d", columns={"px": "prize"}).info()


def test_fingerprint_follows_content_and_frequency(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", TRADES, [("600000.SH", 20240102, 93000000, 10.0, 100)])
    before = TicksSource(path, freq="1d").info().fingerprint
    assert TicksSource(path, freq="1d").info().fingerprint == before
    assert TicksSource(path, freq="1min").info().fingerprint != before
    write(path, TRADES, [("600000.SH", 20240102, 93000000, 10.1, 100)])
    assert TicksSource(path, freq="1d").info().fingerprint != before


@pytest.mark.parametrize("symbol", [600000.0, time(9, 30)], ids=["number", "time"])
def test_symbols_of_another_type_are_read_as_text(symbol: object, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    row = dict(zip(TRADES, (symbol, 20240102, 93000000, 10.1, 100), strict=True))
    pl.DataFrame([row]).write_parquet(path)
    bars = bars_of(TicksSource(path, freq="1d"))
    assert len(bars) == 1
    assert bars["symbol"].cast(pl.String)[0].startswith(str(symbol))


def test_days_that_are_no_days_and_written_alike_are_refused_by_row(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    rows = [("600000.SH", ns, 93000000, 10.1, 100) for ns in (0, 20240102)]
    frame = pl.DataFrame(rows, schema=list(TRADES), orient="row")
    frame.with_columns(pl.col(TRADES[1]).cast(pl.Time)).write_parquet(path)
    source = TicksSource(path, freq="1d")
    assert bars_of(source).is_empty()
    assert [(p.row, "is not a date" in p.message) for p in source.problems()] == [
        (0, True),
        (1, True),
    ]


def test_parquet_keeps_every_readable_row_typed(tmp_path: Path) -> None:
    header = (*TRADES, "申买价1", "申卖量2", "买一量", "备注")
    rows: list[Row] = [
        ("600000.SH", 20240102, 91500000, 0, 0, 9.99, 300, 200, "甲"),
        ("600000.SH", 20240102, 93000120, 10.0, 100, 9.99, 300, 200, ""),
        ("600000.SH", 20240102, "x", 10.0, 100, 9.99, 300, 200, "乙"),
        ("000001.SZ", 20240103, 150000000, 20.0, 100, 19.99, "", 200, "乙"),
    ]
    path = write(tmp_path / "t.csv", header, rows, encoding="gbk")
    target = tmp_path / "out" / "t.parquet"
    source = TicksSource(path, freq="1d", parquet_dir=target.parent, block_bytes=90)
    bars_of(source)
    assert [(p.row, p.field) for p in source.problems()] == [(4, "时间")]
    table = pl.read_parquet(target)
    assert table.columns == [
        *("symbol", "date", "time", "price", "volume"),
        *("bid_price1", "ask_volume2", "bid_volume1", "备注"),
    ]
    assert table["date"].to_list() == [date(2024, 1, 2), date(2024, 1, 2), date(2024, 1, 3)]
    assert table["time"].to_list() == [time(9, 15), time(9, 30, 0, 120_000), time(15)]
    assert table["ask_volume2"].to_list() == [300.0, 300.0, None]
    assert table["备注"].to_list() == ["甲", None, "乙"]
    file = pq.ParquetFile(target)
    assert file.num_row_groups > 1
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert [p.name for p in target.parent.iterdir()] == ["t.parquet"]


def test_failed_conversion_leaves_no_parquet(tmp_path: Path) -> None:
    rng = random.Random(1)
    rows = [("600000.SH", 20240102, 93000000, rng.random() + 1, 100) for _ in range(50_000)]
    path = write(tmp_path / "t.csv.gz", TRADES, rows)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 4])
    source = TicksSource(path, freq="1d", parquet_dir=tmp_path / "out", block_bytes=20_000)
    with pytest.raises(SourceError):
        bars_of(source)
    assert list(tmp_path.glob("out/*")) == []


def test_source_writes_parquet_in_the_same_pass(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", TRADES, by_time(random_trades(500, seed=6)))
    source = TicksSource(path, freq="1min", parquet_dir=tmp_path / "out", block_bytes=2_000)
    assert_equal_twin(source, path, "1min")
    assert pl.read_parquet(tmp_path / "out" / "t.parquet").height == 500


def test_problem_says_where_and_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", TRADES, bad_rows())
    source = TicksSource(path, freq="1d")
    bars_of(source)
    first = next(p for p in source.problems() if p.row == 3)
    assert isinstance(first, Problem)
    assert str(first) == (
        f"{path}, row 3, field '成交价格': abc is not a number. Mend or remove the row"
    )


@pytest.mark.slow
def test_two_million_rows_are_converted_in_bounded_memory(tmp_path: Path) -> None:
    """The peak barely depends on the file: bench/ticks.py shows the same for 50 million rows."""
    bench = Path(__file__).parent.parent / "bench" / "ticks.py"
    generate = (
        f"import sys; sys.path.insert(0, {str(bench.parent)!r}); from pathlib import Path; "
        f"import ticks; ticks.generate(Path({str(tmp_path / 't.csv')!r}), 2_000_000)"
    )
    subprocess.run([sys.executable, "-c", generate], check=True)
    done = subprocess.run(
        [*THIN, sys.executable, str(bench), "--child", "ours", "--file", str(tmp_path / "t.csv")],
        env=os.environ | {"POLARS_MAX_THREADS": "2"},
        check=True,
        capture_output=True,
        text=True,
    )
    result = json.loads(done.stdout)
    assert result["rows"] == 2_000_000
    assert result["bars"] == 100_000
    assert result["peak_mb"] < 450
