"""Days from the store: grids, prices, what was known, what is missing, and the cache."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from markets import FrameSource

from echelon.data.importing import import_source
from echelon.data.sources.files import ParquetSource
from echelon.data.store import Store
from echelon.data.views import ScrambledView
from echelon.errors import (
    DamagedError,
    DataError,
    InvalidDataError,
    UniverseError,
    UsageError,
)
from echelon.execution import ExecutionRules, Simulator, parent_orders
from echelon.execution.days import DayCache, load_days

SHANGHAI = {"freq": "5min", "calendar": "XSHG", "timezone": "Asia/Shanghai", "price_basis": "raw"}
NEW_YORK = {"freq": "1min", "calendar": "XNYS", "timezone": "America/New_York"}
CRYPTO = {"freq": "1min", "calendar": "24/7", "timezone": "UTC"}


def bar(symbol: str, time: str, close: float, volume: float | None = 100.0, **more: float) -> dict:
    """A bar that ends at `time`."""
    row = {"symbol": symbol, "time": datetime.fromisoformat(time), "close": close}
    return row | {"volume": volume} | more


def stored(root: Path, rows: list[dict], name: str = "m", **info: object) -> Store:
    store = Store(root / "store")
    import_source(FrameSource(pl.DataFrame(rows), **info), store, name)
    return store


def whole_session(day: str, *, price: float = 10.0) -> list[dict]:
    """48 five-minute bars of an A-share day; bar k closes at price + k/100, opens 0.005 lower."""
    begin = [570 + 5 * k for k in range(24)] + [780 + 5 * k for k in range(24)]
    midnight = datetime.fromisoformat(day)
    return [
        bar(
            "600000.SH",
            str(midnight + timedelta(minutes=m + 5)),
            price + k / 100,
            1000.0 + k,
            open=price + k / 100 - 0.005,
            high=price + k / 100 + 0.02,
            low=price + k / 100 - 0.02,
            amount=(1000.0 + k) * (price + k / 100 + 0.01),
        )
        for k, m in enumerate(begin)
    ]


MONDAY, TUESDAY, WEDNESDAY = date(2016, 3, 7), date(2016, 3, 8), date(2016, 3, 9)


def test_a_share_day_has_48_ticks_without_lunch_named_by_their_begin(tmp_path: Path) -> None:
    store = stored(tmp_path, whole_session("2016-03-07"), **SHANGHAI)
    days = load_days(store, "m", [], MONDAY, MONDAY, cache=None)
    assert days.shape == (1, 48)
    assert days.clock[[0, 1, 23, 24, 47]].tolist() == [570, 575, 685, 780, 895]
    np.testing.assert_allclose(days.buy[0], 10.0 + np.arange(48) / 100)
    np.testing.assert_allclose(days.known[0], days.buy[0] - 0.005)
    assert days.volume[0, [0, 47]].tolist() == [1000.0, 1047.0]
    assert days.price_source == "close"


def test_mean_price_is_money_over_volume_and_without_money_the_typical_price(
    tmp_path: Path,
) -> None:
    store = stored(tmp_path, whole_session("2016-03-07"), **SHANGHAI)
    days = load_days(store, "m", [], MONDAY, MONDAY, price_source="vwap", cache=None)
    np.testing.assert_allclose(days.buy[0], 10.01 + np.arange(48) / 100)
    rows = [
        row | {"amount": None, "high": row["high"] + 0.01} for row in whole_session(str(MONDAY))
    ]
    store = stored(tmp_path, rows, "other", **SHANGHAI)
    days = load_days(store, "other", [], MONDAY, MONDAY, price_source="vwap", cache=None)
    np.testing.assert_allclose(days.buy[0], 10.0 + np.arange(48) / 100 + 0.01 / 3)


def test_money_in_other_units_than_prices_is_refused(tmp_path: Path) -> None:
    rows = [row | {"volume": row["volume"] / 100} for row in whole_session(str(MONDAY))]
    store = stored(tmp_path, rows, **SHANGHAI)
    with pytest.raises(DataError, match=r"outside low to high in 48 of 48 bars.*lots of 100"):
        load_days(store, "m", [], MONDAY, MONDAY, price_source="vwap", cache=None)
    assert load_days(store, "m", [], MONDAY, MONDAY, cache=None).shape == (1, 48)


def test_missing_bars_have_no_price_and_no_volume_and_keep_what_was_known(tmp_path: Path) -> None:
    rows = whole_session("2016-03-07")
    del rows[10], rows[0]
    store = stored(tmp_path, rows, **SHANGHAI)
    days = load_days(store, "m", [], MONDAY, MONDAY, cache=None)
    assert np.flatnonzero(np.isnan(days.buy[0])).tolist() == [0, 10]
    assert days.volume[0, [0, 10]].tolist() == [0.0, 0.0]
    assert np.isnan(days.known[0, 0])
    assert days.known[0, 10] == days.buy[0, 9]


def test_without_opens_the_price_before_is_known_across_days_and_adjustments(
    tmp_path: Path,
) -> None:
    rows = [
        bar("AAA", "2020-01-06 09:31", 10.0, factor=1.0),
        bar("AAA", "2020-01-06 09:32", 20.0, factor=1.0),
        bar("AAA", "2020-01-07 09:31", 11.0, factor=2.0),  # two for one
    ]
    store = stored(tmp_path, rows, **NEW_YORK)
    days = load_days(store, "m", ["AAA"], date(2020, 1, 6), date(2020, 1, 7), cache=None)
    assert days.shape == (2, 390)
    assert days.known[0, :3].tolist() == [10.0, 10.0, 20.0]
    assert days.known[1, :2].tolist() == [10.0, 11.0]


def test_bar_that_ends_at_midnight_is_the_last_tick_of_the_day_that_is_over(tmp_path: Path) -> None:
    rows = [bar("BTC", "2022-01-01 00:01", 1.0), bar("BTC", "2022-01-02 00:00", 2.0)]
    store = stored(tmp_path, rows, **CRYPTO)
    days = load_days(store, "m", [], date(2022, 1, 1), date(2022, 1, 2), cache=None)
    assert days.shape == (1, 1440)
    assert (days.clock[0], days.clock[-1]) == (0.0, 1439.0)
    assert days.buy[0, [0, -1]].tolist() == [1.0, 2.0]


def test_early_close_leaves_the_rest_of_the_grid_empty(tmp_path: Path) -> None:
    # The day after Thanksgiving closes at 13:00; the Monday after is regular.
    rows = [bar("AAA", "2016-11-25 13:00", 1.0), bar("AAA", "2016-11-28 16:00", 1.0)]
    rows.append(bar("AAA", "2016-11-29 16:00", 1.0))
    store = stored(tmp_path, rows, **NEW_YORK)
    days = load_days(store, "m", [], date(2016, 11, 25), date(2016, 11, 29), cache=None)
    assert days.shape == (3, 390)
    assert np.flatnonzero(days.volume[0]).tolist() == [209]
    alone = load_days(store, "m", [], date(2016, 11, 25), date(2016, 11, 25), cache=None)
    assert alone.shape == (1, 390)


def test_calendar_of_the_data_takes_the_times_that_occur(tmp_path: Path) -> None:
    rows = [bar("X", f"2020-01-0{d} {t}", 1.0) for d in (6, 7) for t in ("10:05", "10:10")]
    rows.append(bar("X", "2020-01-07 22:00", 1.0))
    store = stored(tmp_path, rows, freq="5min", calendar="data", timezone="UTC")
    days = load_days(store, "m", [], date(2020, 1, 6), date(2020, 1, 7), cache=None)
    assert days.clock.tolist() == [600, 605, 1315]


def test_bars_outside_the_session_are_refused_or_dropped(tmp_path: Path) -> None:
    rows = [bar("AAA", f"2020-01-{d:02} 09:31", 10.0) for d in range(6, 10)]
    rows.append(bar("AAA", "2020-01-06 18:00", 11.0))
    store = stored(tmp_path, rows, **NEW_YORK)
    span = (date(2020, 1, 6), date(2020, 1, 9))
    with pytest.raises(DataError, match=r"1 bar\(s\), the first of AAA at 2020-01-06 18:00:00"):
        load_days(store, "m", [], *span, cache=None)
    days = load_days(store, "m", [], *span, outside="drop", cache=None)
    assert days.volume.sum() == 400.0


def test_halted_sessions_are_left_out(tmp_path: Path) -> None:
    rows = whole_session("2016-03-07") + whole_session("2016-03-09", price=12.0)
    store = stored(tmp_path, rows, **SHANGHAI)
    days = load_days(store, "m", [], MONDAY, date(2016, 3, 11), cache=None)
    assert days.dates.astype("datetime64[D]").tolist() == [MONDAY, WEDNESDAY]


def test_bar_without_volume_has_a_price_and_fills_nothing(tmp_path: Path) -> None:
    rows = [bar("AAA", "2020-01-06 09:31", 10.0, 0.0), bar("AAA", "2020-01-06 09:32", 10.0, None)]
    rows.append(bar("AAA", "2020-01-06 09:33", 10.0, 7.0))
    store = stored(tmp_path, rows, **NEW_YORK)
    days = load_days(store, "m", [], date(2020, 1, 6), date(2020, 1, 6), cache=None)
    assert days.buy[0, :3].tolist() == [10.0] * 3
    simulator = Simulator(days, parent_orders(0, 3.0, True, 0, 3), ExecutionRules(3))
    simulator.step(np.array([3.0]))
    assert simulator.ticks.executed[0, :3].tolist() == [0.0, 0.0, 3.0]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (bar("AAA", "2020-01-06 09:31", 10.0, -5.0), "volume -5.0 is negative"),
        (bar("AAA", "2020-01-06 09:32", 10.0), "AAA at 2020-01-06 09:32.* repeats row 0"),
        (bar("AAA", "2020-01-06 09:31", -1.0), "close -1.0 is not positive"),
    ],
)
def test_import_refuses_what_no_day_can_have(tmp_path: Path, row: dict, told: str) -> None:
    rows = [bar("AAA", "2020-01-06 09:32", 10.0), row]
    with pytest.raises(InvalidDataError, match=told):
        stored(tmp_path, rows, **NEW_YORK)


def test_files_that_others_wrote_are_refused(tmp_path: Path) -> None:
    rows = [bar("AAA", f"2020-01-06 09:3{k}", 10.0) for k in (1, 2, 3, 4)]
    store = stored(tmp_path, rows, **NEW_YORK)
    path = next((tmp_path / "store").glob("m/v-*/bars/2020-01-06.parquet"))
    bad = pl.read_parquet(path).with_columns(volume=pl.Series([-1.0, 1.0, float("nan"), 1.0]))
    bad.write_parquet(path)
    with pytest.raises(DamagedError, match="not what was imported"):
        load_days(store, "m", [], date(2020, 1, 6), date(2020, 1, 6), cache=None)


def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    store = stored(tmp_path, whole_session("2016-03-07"), **SHANGHAI)
    with pytest.raises(UniverseError, match=r"did you mean 600000\.SH"):
        load_days(store, "m", ["600000.SZ"], MONDAY, MONDAY)
    with pytest.raises(DataError, match=r"no bars of 600000\.SH from 2017-01-03 to 2017-02-03; it"):
        load_days(store, "m", [], date(2017, 1, 3), date(2017, 2, 3))
    with pytest.raises(UsageError, match="needs order-book snapshots"):
        load_days(store, "m", [], MONDAY, MONDAY, price_source="book")
    daily = [bar("AAA", "2020-01-06", 10.0)]
    with pytest.raises(DataError, match="daily bars; execution works inside the day"):
        load_days(stored(tmp_path, daily, "d"), "d", [], MONDAY, MONDAY)
    row = bar("AAA", "2020-01-06 09:31", 10.0)
    del row["volume"]
    with pytest.raises(DataError, match="has no volume"):
        load_days(stored(tmp_path, [row], "n", **NEW_YORK), "n", [], MONDAY, MONDAY)


def remove_bars(root: Path) -> None:
    for path in (root / "store").glob("m/v-*/bars/*.parquet"):
        path.unlink()


def test_cache_serves_days_again_and_a_new_import_is_another_day(tmp_path: Path) -> None:
    cache = DayCache()
    store = stored(tmp_path, whole_session("2016-03-07"), **SHANGHAI)
    first = load_days(store, "m", [], MONDAY, MONDAY, cache=cache)
    remove_bars(tmp_path)  # what is cached is not read
    again = load_days(store, "m", [], MONDAY, MONDAY, cache=cache)
    np.testing.assert_array_equal(first.buy, again.buy)
    assert len(cache) == 1
    store = stored(tmp_path, whole_session("2016-03-07", price=20.0), **SHANGHAI)
    other = load_days(store, "m", [], MONDAY, MONDAY, cache=cache)
    assert other.buy[0, 0] == 20.0


def test_cache_key_holds_price_source_and_what_lies_outside(tmp_path: Path) -> None:
    cache = DayCache()
    store = stored(tmp_path, whole_session("2016-03-07"), **SHANGHAI)
    load_days(store, "m", [], MONDAY, MONDAY, cache=cache)
    mean = load_days(store, "m", [], MONDAY, MONDAY, price_source="vwap", cache=cache)
    load_days(store, "m", [], MONDAY, MONDAY, outside="drop", cache=cache)
    assert len(cache) == 3
    assert mean.buy[0, 0] == pytest.approx(10.01)


def test_cache_forgets_what_was_used_longest_ago(tmp_path: Path) -> None:
    rows = [row for day in ("07", "08", "09") for row in whole_session(f"2016-03-{day}")]
    store = stored(tmp_path, rows, **SHANGHAI)
    cache = DayCache(max_bytes=2 * 4 * 48 * 8)
    assert load_days(store, "m", [], MONDAY, WEDNESDAY, cache=cache).shape == (3, 48)
    assert len(cache) == 0  # larger than all that it holds
    for day in (MONDAY, TUESDAY, MONDAY, WEDNESDAY):
        load_days(store, "m", [], day, day, cache=cache)
    assert len(cache) == 2
    remove_bars(tmp_path)
    for day in (MONDAY, WEDNESDAY):
        load_days(store, "m", [], day, day, cache=cache)
    with pytest.raises(DamagedError):
        load_days(store, "m", [], TUESDAY, TUESDAY, cache=cache)


def test_views_of_a_store_are_not_cached(tmp_path: Path) -> None:
    cache = DayCache()
    store = stored(tmp_path, whole_session("2016-03-07"), **SHANGHAI)
    true = load_days(store, "m", [], MONDAY, MONDAY, cache=cache)
    view = ScrambledView(store, datetime(2016, 3, 7, 10, 0), seed=1)
    other = load_days(view, "m", [], MONDAY, MONDAY, outside="drop", cache=cache)
    assert len(cache) == 1
    np.testing.assert_array_equal(true.buy[0, :6], other.buy[0, :6])
    assert not np.array_equal(true.buy[0], other.buy[0])


def test_real_five_minute_bars_make_whole_days(shared_data: Path, tmp_path: Path) -> None:
    source = ParquetSource(shared_data / "cn_5min_000338_2007_2018.parquet", freq="5min")
    store = Store(tmp_path / "store")
    import_source(source, store, "m")
    first, last = date(2016, 1, 1), date(2016, 6, 30)
    days = load_days(store, "m", [], first, last, price_source="vwap", cache=None)
    assert days.shape == (118, 48)
    assert not np.isnan(days.buy).any()
    assert np.nanmax(np.abs(days.buy / days.known - 1.0)) < 0.11
