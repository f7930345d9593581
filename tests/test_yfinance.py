"""The yfinance source on recorded frames: no network."""

from datetime import date, datetime, timedelta
from itertools import pairwise
from typing import Any

import exchange_calendars
import pandas as pd
import polars as pl
import pytest
from vendor_fakes import (
    HTTPError,
    Naps,
    Yahoo,
    YFPricesMissingError,
    YFTzMissingError,
    clock,
    only,
    patient,
    recorded,
    yahoo,
)

from echelon.data.sources import Source
from echelon.data.sources.yfinance_ import EXCHANGES, exchange_of
from echelon.errors import SourceError


def test_yfinance_daily_bars_are_split_adjusted_with_dividend_factor() -> None:
    source = yahoo(Yahoo(recorded("yfinance_daily")))
    assert isinstance(source, Source)
    info = source.info()
    assert (info.price_basis, info.calendar, info.timezone) == (
        "split_adjusted",
        "XNYS",
        "America/New_York",
    )
    bars = only(source)
    assert bars["time"][0] == datetime(2020, 8, 26)  # the exchange's day, not UTC's
    assert bars["close"].to_list() == [126.52, 125.01, 124.81, 129.04, 134.18, 131.40, 120.88]
    assert bars["factor"].round(6).to_list() == [0.9938] * 5 + [1.0] * 2
    assert bars["volume"][1] == 1_001_000.0
    assert bars["pre_close"].null_count() == bars.height


def test_yfinance_asks_for_unadjusted_prices_actions_and_an_exclusive_end() -> None:
    client = Yahoo(recorded("yfinance_daily"))
    only(yahoo(client, start=date(2020, 8, 1), end=date(2020, 9, 3)))
    assert client.arguments("history") == [
        {
            "symbol": "AAPL",
            "interval": "1d",
            "auto_adjust": False,
            "actions": True,
            "start": "2020-08-01",
            "end": "2020-09-04",
        }
    ]


def test_yfinance_without_start_asks_for_all_history_not_for_one_month() -> None:
    client = Yahoo(recorded("yfinance_daily"))
    only(yahoo(client))
    (asked,) = client.arguments("history")
    assert asked["period"] == "max"
    assert "start" not in asked


def test_yfinance_update_starts_at_the_last_stored_bar_and_includes_it() -> None:
    client = Yahoo(recorded("yfinance_daily"))
    bars = only(yahoo(client), {"AAPL": datetime(2020, 9, 1)})
    assert client.arguments("history")[0]["start"] == "2020-09-01"
    assert bars["time"].to_list() == [datetime(2020, 9, d) for d in (1, 2, 3)]


def test_yfinance_leaves_out_the_day_that_is_still_trading() -> None:
    before_close, after = clock(2020, 9, 3, 19, 0), clock(2020, 9, 3, 22, 30)
    frame = recorded("yfinance_daily")
    assert only(yahoo(Yahoo(frame), now=before_close))["time"].max() == datetime(2020, 9, 2)
    assert only(yahoo(Yahoo(frame), now=after))["time"].max() == datetime(2020, 9, 3)


@pytest.mark.parametrize(("freq", "name", "minutes"), [("5min", "5m", 5), ("1min", "1m", 1)])
def test_yfinance_intraday_bars_are_stamped_with_their_end_and_take_the_days_factor(
    freq: str, name: str, minutes: int
) -> None:
    def answer(interval: str, **_: Any) -> pd.DataFrame:
        return recorded("yfinance_daily" if interval == "1d" else f"yfinance_{name}")

    bars = only(yahoo(Yahoo(answer), freq=freq, start=date(2020, 9, 3), end=date(2020, 9, 3)))
    first = datetime(2020, 9, 3, 9, 30) + timedelta(minutes=minutes)
    assert bars["time"].to_list() == [first + timedelta(minutes=minutes * k) for k in range(6)]
    assert bars["factor"].to_list() == [1.0] * 6


def test_yfinance_one_minute_history_comes_in_week_long_requests() -> None:
    def answer(interval: str, start: str, **_: Any) -> pd.DataFrame:
        if interval == "1d":
            return recorded("yfinance_daily")
        if start <= "2020-09-03" <= str(date.fromisoformat(start) + timedelta(days=6)):
            return recorded("yfinance_1m")
        raise YFPricesMissingError("no price data found")

    client = Yahoo(answer)
    bars = only(yahoo(client, freq="1min", now=clock(2020, 9, 10, 23)))
    spans = [(a["start"], a["end"]) for a in client.arguments("history") if a["interval"] == "1m"]
    assert spans[0][0] == "2020-08-12"
    assert spans[-1][1] == "2020-09-11"
    assert all(date.fromisoformat(b) - date.fromisoformat(a) <= timedelta(7) for a, b in spans)
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    assert bars.height == 6


def test_yfinance_intraday_start_beyond_yahoos_reach_names_limit_and_first_day() -> None:
    source = yahoo(Yahoo(recorded("yfinance_5m")), freq="5min", start=date(2020, 1, 1))
    with pytest.raises(SourceError, match=r"5min bars for 59 days only, from 2020-07-12 on.*Set"):
        only(source)


def test_yfinance_update_across_a_gap_yahoo_cannot_fill_is_refused() -> None:
    source = yahoo(Yahoo(recorded("yfinance_1m")), freq="1min")
    with pytest.raises(SourceError, match="gap cannot be filled from Yahoo: import again"):
        only(source, {"AAPL": datetime(2020, 7, 1, 16, 0)})


def test_yfinance_benchmark_is_time_and_close() -> None:
    client = Yahoo(recorded("yfinance_index"))
    levels = yahoo(client, benchmark="^GSPC").benchmark()
    assert levels is not None
    assert levels.schema == {"time": pl.Datetime("us"), "close": pl.Float64()}
    assert levels["close"][0] == 3478.73
    assert yahoo(client).benchmark() is None


def test_yfinance_unknown_symbol_is_a_clear_error() -> None:
    with pytest.raises(SourceError, match=r"yfinance: no 1d bars for NOPE .*unknown there"):
        only(yahoo(Yahoo(recorded("yfinance_unknown")), "NOPE"))


def test_yfinance_says_what_yahoo_said() -> None:
    with pytest.raises(SourceError, match="The vendor says: No data found, symbol may be delisted"):
        only(yahoo(Yahoo(YFPricesMissingError("No data found, symbol may be delisted")), "NOPE"))
    with pytest.raises(SourceError, match="Yahoo knows no such symbol"):
        only(yahoo(Yahoo(YFTzMissingError("no timezone found")), "NOPE"))


@pytest.mark.parametrize(
    ("status", "naps", "advice"),
    [(404, 0, "Yahoo knows no such symbol"), (503, 2, "Check the network"), (429, 2, "network")],
)
def test_http_status_decides_whether_a_retry_can_help(status: int, naps: int, advice: str) -> None:
    slept = Naps()
    with pytest.raises(SourceError, match=rf"HTTP Error {status}.*{advice}"):
        only(yahoo(Yahoo(HTTPError(status)), retry=patient(slept)))
    assert len(slept.seconds) == naps


def test_yfinance_answer_in_another_time_zone_is_refused() -> None:
    frame = recorded("yfinance_daily").tz_convert("Europe/London")
    with pytest.raises(SourceError, match="came in time zone Europe/London, the import is in Ame"):
        only(yahoo(Yahoo(frame)))


def test_yfinance_symbols_of_two_exchanges_are_refused() -> None:
    with pytest.raises(SourceError, match=r"AAPL trades at XNYS and 0700\.HK at XHKG"):
        yahoo(Yahoo(recorded("yfinance_daily")), "AAPL", "0700.HK").info()


def test_yfinance_markets_are_real_calendars_in_their_time_zone() -> None:
    for calendar, zone in EXCHANGES.values():
        if calendar != "24/7":
            real = getattr(exchange_calendars.calendar_utils, f"{calendar}ExchangeCalendar")
            assert str(real.tz) == zone, calendar
    assert exchange_of("BTC-USD") == ("24/7", "UTC")
    assert exchange_of("BRK-B") == exchange_of("^GSPC") == ("XNYS", "America/New_York")
    with pytest.raises(SourceError, match="exchange of 'EURUSD=X' is not known"):
        exchange_of("EURUSD=X")


def test_yfinance_setting_that_hides_errors_is_restored() -> None:
    client = Yahoo([OSError("reset"), OSError("reset"), OSError("reset")])
    with pytest.raises(SourceError, match=r"failed 3 times for AAPL: OSError: reset.*network"):
        only(yahoo(client))
    assert client.config.debug.hide_exceptions is True
