"""Orders from files and by rule: every fault named, and sizes blind to their own day."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scrambled_days import scramble_after

from echelon.config.execution import ExecutionOrdersConfig
from echelon.errors import ConfigError, DataError, InvalidDataError, SourceError
from echelon.execution import ExecutionRules, Simulator
from echelon.execution.days import Days
from echelon.execution.orders import draw_orders, read_orders, trailing_volume


def a_share_days(n_days: int = 3) -> Days:
    """Five-minute days of 600000.SH from 2016-03-07 on, with a lunch break."""
    clock = np.concatenate([570 + 5.0 * np.arange(24), 780 + 5.0 * np.arange(24)])
    price, volume = np.full((n_days, 48), 10.0), np.full((n_days, 48), 100.0)
    volume *= 1.0 + np.arange(n_days)[:, None]
    dates = np.datetime64("2016-03-07", "us") + np.arange(n_days) * np.timedelta64(1, "D")
    return Days(("600000.SH",) * n_days, dates, clock, price, price, price, volume)


DAYS = a_share_days()
HEAD = "symbol,date,direction,amount,start,end\n"


def orders_of(tmp_path: Path, text: str, days: Days = DAYS):  # noqa: ANN201
    path = tmp_path / "orders.csv"
    path.write_text(text, encoding="utf-8")
    return read_orders(path, days)


def test_orders_of_a_file_in_clock_times_and_iso_times(tmp_path: Path) -> None:
    found = orders_of(
        tmp_path,
        HEAD
        + "600000.SH,2016-03-07,buy,1000,09:30,15:00\n"
        + '600000.SH,20160308,卖,"2,500",9:32,11:30\n'
        + "600000.SH,2016-03-09,SELL,5.5,2016-03-09 13:00:00,2016-03-09T14:00:00\n"
        + "600000.SH,2016-03-09,买入,7,,\n"
        + "600000.SH,2016-03-09,b,7,12:00,\n",
    )
    assert found.day.tolist() == [0, 1, 2, 2, 2]
    assert found.buying.tolist() == [True, False, False, True, True]
    assert found.amount.tolist() == [1000.0, 2500.0, 5.5, 7.0, 7.0]
    # Begun at 09:32, the tick of 09:30 is not its own; at noon it waits for 13:00.
    assert found.start.tolist() == [0, 1, 24, 0, 24]
    assert found.end.tolist() == [48, 24, 36, 48, 48]
    Simulator(DAYS, found, ExecutionRules(6))


def test_orders_of_a_parquet_file_with_chinese_columns(tmp_path: Path) -> None:
    path = tmp_path / "orders.parquet"
    pl.DataFrame(
        {
            "证券代码": ["600000.SH"],
            "日期": pl.Series(["2016-03-08"]).str.to_date(),
            "买卖方向": ["卖出"],
            "数量": [300],
            "开始时间": pl.Series(["2016-03-08 10:00"]).str.to_datetime(),
        }
    ).write_parquet(path)
    found = read_orders(path, DAYS)
    assert [one.tolist() for one in found] == [[1], [300.0], [False], [6], [48]]


def test_times_that_say_their_offset_are_moved_to_the_exchange(tmp_path: Path) -> None:
    path = tmp_path / "orders.csv"
    path.write_text(
        HEAD
        + "600000.SH,2016-03-07,buy,10,2016-03-07T01:30:00Z,2016-03-07 15:00:00+08:00\n"
        + "600000.SH,2016-03-07,buy,10,02:00Z,\n"
        + "600000.SH,2016-03-07,buy,10,10:00,11:00\n",
        encoding="utf-8",
    )
    found = read_orders(path, DAYS, timezone="Asia/Shanghai")
    assert found.start.tolist() == [0, 6, 6]
    assert found.end.tolist() == [48, 48, 18]
    begin = pl.Series(["2016-03-08 10:00"]).str.to_datetime().dt.replace_time_zone("Asia/Shanghai")
    table = {"symbol": ["600000.SH"], "date": ["2016-03-08"], "side": ["buy"], "amount": [1]}
    pl.DataFrame({**table, "start": begin}).write_parquet(tmp_path / "orders.parquet")
    zoned = read_orders(tmp_path / "orders.parquet", DAYS, timezone="Asia/Shanghai")
    assert zoned.start.tolist() == [6]


def test_own_names_of_columns_are_mapped_by_the_key_that_the_hint_names(tmp_path: Path) -> None:
    path = tmp_path / "orders.csv"
    path.write_text("symbol,date,way,amount\n600000.SH,2016-03-07,sell,5\n", encoding="utf-8")
    with pytest.raises(InvalidDataError, match=r"execution\.orders\.columns: \{your_name: dir"):
        read_orders(path, DAYS)
    assert not read_orders(path, DAYS, own={"way": "direction"}).buying.any()


def test_everything_wrong_with_a_file_is_told_by_row_and_field(tmp_path: Path) -> None:
    text = HEAD + (
        "600000.SH,2016-03-07,hold,1000,09:30,15:00\n"
        "600000.SZ,2016-03-07,buy,-5,09:30,15:00\n"
        "600000.SH,2016-04-07,buy,ten,09:30,15:00\n"
        "600000.SH,someday,buy,10,09:30,15:00\n"
        "600000.SH,2016-03-07,buy,10,08:00,15:30\n"
        "600000.SH,2016-03-07,buy,10,11:30,13:00\n"
        "600000.SH,2016-03-07,buy,10,noon,15:00\n"
        "600000.SH,2016-03-07,buy,10,14:00,2016-03-08 14:30\n"
        ",2016-03-07,buy,0,14:00,14:05\n"
    )
    with pytest.raises(InvalidDataError) as caught:
        orders_of(tmp_path, text)
    found = [(p.row, p.field, p.message) for p in caught.value.problems]
    assert found == [
        (2, "direction", "'hold' is no direction"),
        (3, "symbol", "'600000.SZ' is not in the data"),
        (3, "amount", "'-5' is not a positive number of shares"),
        (4, "date", "600000.SH has no day 2016-04-07 in the data (2016-03-07 to 2016-03-09)"),
        (4, "amount", "'ten' is not a positive number of shares"),
        (5, "date", "'someday' is not a date"),
        (6, "start", "08:00 lies outside the market's hours, 09:30 to 15:00"),
        (6, "end", "15:30 lies outside the market's hours, 09:30 to 15:00"),
        (7, "end", "no tick lies wholly within 11:30 to 13:00"),
        (8, "start", "'noon' is not a time"),
        (
            9,
            "end",
            "2310 minutes from the day's midnight lies outside the market's hours, 09:30 to 15:00",
        ),
        (10, "symbol", "the cell is empty"),
        (10, "amount", "'0' is not a positive number of shares"),
    ]
    assert "Did you mean 600000.SH?" in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "orders.csv"))


def test_file_without_a_needed_column_or_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataError, match="direction"):
        orders_of(tmp_path, "symbol,date,amount\n600000.SH,2016-03-07,5\n")
    with pytest.raises(SourceError, match="no rows"):
        orders_of(tmp_path, HEAD)
    with pytest.raises(SourceError, match="does not exist"):
        read_orders(tmp_path / "none.csv", DAYS)


def test_order_up_to_midnight_on_a_day_around_the_clock(tmp_path: Path) -> None:
    days = Days.from_prices(np.ones((1, 1440)), np.ones((1, 1440)), opens_at=0.0)
    text = HEAD + (
        "SYM,2020-01-06,buy,1,23:00,24:00\nSYM,2020-01-06,buy,1,00:00,2020-01-07 00:00\n"
    )
    found = orders_of(tmp_path, text, days)
    assert (found.start.tolist(), found.end.tolist()) == ([1380, 0], [1440, 1440])


def test_drawn_orders_are_shares_of_the_trailing_median_and_repeat_by_seed() -> None:
    days = a_share_days(30)
    rule = ExecutionOrdersConfig(per_day=4, share=(0.01, 0.02), window="random", min_ticks=6)
    found = draw_orders(days, rule, seed=3)
    assert found.day.min() == 5
    assert len(found) == 25 * 4
    usual = trailing_volume(days)
    assert usual[5] == pytest.approx(4800.0 * 3)  # the median of days of 1 to 5 times 4800
    share = found.amount / usual[found.day]
    assert (share.min() >= 0.01, share.max() <= 0.02) == (True, True)
    assert 0.3 < found.buying.mean() < 0.7
    assert (found.end - found.start).min() >= 6
    again = draw_orders(days, rule, seed=3)
    assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True))
    other = draw_orders(days, rule, seed=4)
    assert not np.array_equal(found.amount, other.amount)


def test_drawn_order_does_not_know_its_own_day_nor_which_others_are_loaded() -> None:
    days = a_share_days(45)
    rule = ExecutionOrdersConfig(per_day=1, window="random")
    before = draw_orders(days, rule, seed=1)
    other = draw_orders(scramble_after(days, 19, 47), rule, seed=1)
    upto = before.day <= 20  # day 20 itself is noise, its order is not
    for one, two in zip(before, other, strict=True):
        np.testing.assert_array_equal(one[upto], two[other.day <= 20])
    assert not np.array_equal(before.amount[~upto], other.amount[other.day > 20])
    fewer = draw_orders(a_share_days(21), rule, seed=1)
    for one, two in zip(before, fewer, strict=True):
        np.testing.assert_array_equal(one[upto], two)


def test_whole_days_lots_and_sides_follow_the_rule() -> None:
    days = a_share_days(10)
    found = draw_orders(days, ExecutionOrdersConfig(buys=1.0, lot=100.0), seed=0)
    assert found.buying.all()
    assert set(found.start) == {0}
    assert set(found.end) == {48}
    assert not np.mod(found.amount, 100.0).any()
    with pytest.raises(DataError, match="no order can be drawn"):
        draw_orders(a_share_days(3), ExecutionOrdersConfig(), seed=0)


def test_orders_drawn_or_from_a_file_end_at_an_early_close(tmp_path: Path) -> None:
    days = a_share_days(10)
    price = days.buy.copy()
    price[8, 24:] = np.nan
    # A second symbol says that the market was closed, and not this one halted.
    both = replace(
        days,
        symbols=days.symbols * 2,
        dates=np.tile(days.dates, 2),
        **{name: np.tile(price, (2, 1)) for name in ("buy", "sell")},
        known=np.tile(days.known, (2, 1)),
        volume=np.tile(np.where(np.isnan(price), 0.0, days.volume), (2, 1)),
    )
    date = np.datetime_as_string(days.dates[8], unit="D")
    symbol = days.symbols[0]
    text = HEAD + f"{symbol},{date},buy,1,,\n{symbol},{date},buy,1,09:30,15:00\n"
    short = orders_of(tmp_path, text, both)
    assert short.end.tolist() == [24, 24]
    with pytest.raises(InvalidDataError, match="traded from 09:30 to 11:30 on that day"):
        orders_of(tmp_path, HEAD + f"{symbol},{date},buy,1,13:00,15:00\n", both)
    for window in ("day", "random"):
        found = draw_orders(
            both, ExecutionOrdersConfig(per_day=8, window=window, min_ticks=30), seed=0
        )
        short = np.isin(found.day, (8, 18))
        assert short.any()
        assert found.end[short].max() <= 24
        assert (found.end - found.start)[~short].min() >= 30


def test_stretches_longer_than_the_day_are_refused_by_name() -> None:
    rule = ExecutionOrdersConfig(min_ticks=49, window="random")
    with pytest.raises(ConfigError, match="min_ticks is 49; it must be at most the day's 48 ticks"):
        draw_orders(DAYS, rule, seed=0)
