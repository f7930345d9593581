"""Vendor sources on recorded frames: no network, the libraries' own columns and types.

The frames are in fixtures/vendors; `record.py` there made them with the pinned libraries.
"""

import importlib
import json
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import exchange_calendars
import pandas as pd
import polars as pl
import pytest

from echelon.data.bars import SCHEMA
from echelon.data.importing import import_source
from echelon.data.sources._protocol import Source
from echelon.data.sources._retry import Retry, Verdict
from echelon.data.sources._vendor import AShare, a_share, distinct_a_shares, share_volume
from echelon.data.sources.akshare_ import AkshareSource
from echelon.data.sources.tushare_ import TushareSource
from echelon.data.sources.yfinance_ import MARKETS, YFinanceSource, market_of
from echelon.data.store import Store
from echelon.errors import ConfigError, SourceError

FRAMES = Path(__file__).parent / "fixtures" / "vendors"
NAMES = sorted(p.stem for p in FRAMES.glob("*.csv"))
PINNED = {"yfinance": "1.7.0", "akshare": "1.19.5", "tushare": "1.4.29"}

Answer = pd.DataFrame | Exception | Callable[..., pd.DataFrame]


def recorded(name: str) -> pd.DataFrame:
    """Rebuild a recorded frame with the types its JSON states."""
    meta = json.loads((FRAMES / f"{name}.json").read_text(encoding="utf-8"))
    text = pd.read_csv(FRAMES / f"{name}.csv", dtype=str, index_col=0, keep_default_na=False)
    frame = pd.DataFrame(index=pd.RangeIndex(len(text)))
    for column, kind in meta["columns"].items():
        values = text[column].reset_index(drop=True)
        if kind == "date":
            frame[column] = [date.fromisoformat(v) for v in values]
        elif kind == "object":
            frame[column] = pd.Series([v or None for v in values], dtype=object)
        elif kind == "str":
            frame[column] = values.where(values != "", None)
        elif kind.startswith("datetime64"):
            frame[column] = pd.to_datetime(values).astype(kind)
        else:
            frame[column] = values.astype(kind)
    if meta["index"]["dtype"].startswith("datetime64"):
        unit, zone = (
            meta["index"]["dtype"].removeprefix("datetime64[").removesuffix("]").split(", ")
        )
        index = pd.to_datetime(text.index, utc=True).tz_convert(zone).as_unit(unit)
        frame.index = pd.DatetimeIndex(index, name=meta["index"]["name"])
    return frame


class Calls:
    """A fake of a vendor's module: answers by function, in turn, and notes the arguments."""

    def __init__(self, **answers: Answer | list[Answer]) -> None:
        self.answers = {k: v if isinstance(v, list) else [v] for k, v in answers.items()}
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, function: str) -> Callable[..., pd.DataFrame]:
        if function not in self.__dict__["answers"]:
            raise AttributeError(function)

        def call(**arguments: Any) -> pd.DataFrame:
            self.calls.append((function, arguments))
            queue = self.answers[function]
            answer = queue.pop(0) if len(queue) > 1 else queue[0]
            if isinstance(answer, Exception):
                raise answer
            return answer(**arguments) if callable(answer) else answer.copy()

        return call

    def arguments(self, function: str) -> list[dict[str, Any]]:
        return [a for f, a in self.calls if f == function]


class Yahoo(Calls):
    """A fake of the yfinance module: Ticker(symbol).history(…) and config.debug."""

    def __init__(self, history: Answer | list[Answer]) -> None:
        super().__init__(history=history)
        self.config = SimpleNamespace(debug=SimpleNamespace(hide_exceptions=True))

    def Ticker(self, symbol: str) -> SimpleNamespace:
        def history(**arguments: Any) -> pd.DataFrame:
            assert self.config.debug.hide_exceptions is False, "errors would be swallowed"
            return Calls.__getattr__(self, "history")(symbol=symbol, **arguments)

        return SimpleNamespace(history=history)


class YFTickerMissingError(Exception):
    """Stands in for the library's class: yfinance/exceptions.py."""


class YFPricesMissingError(YFTickerMissingError):
    """Stands in for the library's class."""


class YFTzMissingError(YFTickerMissingError):
    """Stands in for the library's class."""


class YFRateLimitError(Exception):
    """Stands in for the library's class."""


class HTTPError(OSError):
    """Stands in for the class of requests and of curl_cffi: it carries the response."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP Error {status}")
        self.response = SimpleNamespace(status_code=status)


class Naps:
    """Stands in for time.sleep."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def clock(*when: int) -> Callable[[], datetime]:
    return lambda: datetime(*when, tzinfo=UTC)


def patient(naps: Naps | None = None) -> Retry:
    return Retry(attempts=3, sleep=naps or Naps(), jitter=lambda: 0.0)


def yahoo(client: Any, *symbols: str, **query: Any) -> YFinanceSource:
    fixed: dict[str, Any] = {"start": None, "end": None, "freq": "1d", "now": clock(2020, 9, 10)}
    fixed["retry"] = patient()
    return YFinanceSource(symbols or ("AAPL",), client=client, **(fixed | query))


def eastmoney(client: Any, *symbols: str, **query: Any) -> AkshareSource:
    fixed: dict[str, Any] = {"start": None, "end": None, "freq": "1d", "now": clock(2024, 6, 20)}
    fixed["retry"] = patient()
    return AkshareSource(symbols or ("000001.SZ",), client=client, **(fixed | query))


def pro(client: Any, *symbols: str, **query: Any) -> TushareSource:
    fixed: dict[str, Any] = {
        "start": date(2024, 6, 1),
        "end": None,
        "freq": "1d",
        "now": clock(2024, 6, 20),
        "retry": patient(),
    }
    return TushareSource(symbols or ("000001.SZ",), client=client, **(fixed | query))


def akshare_client(**changed: Answer | list[Answer]) -> Calls:
    answers: dict[str, Any] = {
        "stock_zh_a_hist": recorded("akshare_daily"),
        "stock_zh_a_daily": recorded("akshare_hfq_factor"),
        "stock_zh_index_daily_em": recorded("akshare_index_daily"),
        "index_zh_a_hist_min_em": recorded("akshare_index_5min"),
        "stock_info_sh_delist": recorded("akshare_sh_delist"),
        "stock_info_sz_delist": recorded("akshare_sz_delist"),
    }
    return Calls(**(answers | changed))


def tushare_client(**changed: Answer | list[Answer]) -> Calls:
    def basic(list_status: str, fields: str) -> pd.DataFrame:
        return recorded(f"tushare_basic_{list_status}")[fields.split(",")]

    answers: dict[str, Any] = {
        "daily": recorded("tushare_daily"),
        "adj_factor": recorded("tushare_adj_factor"),
        "namechange": recorded("tushare_namechange"),
        "index_daily": recorded("tushare_index_daily"),
        "stk_mins": recorded("tushare_stk_mins"),
        "idx_mins": recorded("tushare_idx_mins"),
        "stock_basic": basic,
    }
    return Calls(**(answers | changed))


def only(source: Source, since: dict[str, datetime] | None = None) -> pl.DataFrame:
    (raw,) = source.frames(since)
    assert list(raw.frame.columns) == [*SCHEMA, "row"]
    assert raw.frame.schema["time"] == pl.Datetime("us")
    return raw.frame


# --- the recordings ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_recording_cites_the_pinned_library_and_its_columns(name: str) -> None:
    meta = json.loads((FRAMES / f"{name}.json").read_text(encoding="utf-8"))
    assert meta["version"] == PINNED[meta["library"]]
    assert meta["function"].startswith(meta["library"] + "/")
    assert ".py: " in meta["function"]
    frame = recorded(name)
    assert list(frame.columns) == list(meta["columns"])
    for column, kind in meta["columns"].items():
        if kind != "date":
            assert str(frame[column].dtype) == kind, column


def test_pins_are_those_of_the_project() -> None:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    for source in (YFinanceSource, AkshareSource, TushareSource):
        assert f'"{source.package}"' in project


# --- yfinance ---------------------------------------------------------------------------------


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
    with pytest.raises(SourceError, match="gap cannot be filled from Yahoo: import anew"):
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
    for calendar, zone in MARKETS.values():
        if calendar != "24/7":
            real = getattr(exchange_calendars.calendar_utils, f"{calendar}ExchangeCalendar")
            assert str(real.tz) == zone, calendar
    assert market_of("BTC-USD") == ("24/7", "UTC")
    assert market_of("BRK-B") == market_of("^GSPC") == ("XNYS", "America/New_York")
    with pytest.raises(SourceError, match="exchange of 'EURUSD=X' is not known"):
        market_of("EURUSD=X")


def test_yfinance_setting_that_hides_errors_is_restored() -> None:
    client = Yahoo([OSError("reset"), OSError("reset"), OSError("reset")])
    with pytest.raises(SourceError, match=r"failed 3 times for AAPL: OSError: reset.*network"):
        only(yahoo(client))
    assert client.config.debug.hide_exceptions is True


# --- akshare ----------------------------------------------------------------------------------


def test_akshare_daily_bars_are_raw_in_shares_with_factor_and_reference_price() -> None:
    source = eastmoney(akshare_client())
    assert isinstance(source, Source)
    assert (source.info().price_basis, source.info().calendar) == ("raw", "XSHG")
    bars = only(source)
    assert bars["volume"][0] == 81_234_500.0  # 812345 lots
    assert bars["amount"][0] == 860_273_355.0
    assert bars["close"].to_list() == [10.62, 10.55, 10.71, 10.82, 10.21, 10.15, 10.33]
    assert bars["factor"].to_list() == [1.0] * 4 + [1.0712871287] * 3
    # The ex-day's reference is the close before it, less the dividend; elsewhere the close.
    assert bars["pre_close"].to_list() == [10.50, 10.62, 10.55, 10.71, 10.10, 10.21, 10.15]


def test_akshare_update_asks_for_days_before_the_stored_bar_and_yields_from_it() -> None:
    client = akshare_client()
    bars = only(eastmoney(client), {"000001.SZ": datetime(2024, 6, 14)})
    (asked,) = client.arguments("stock_zh_a_hist")
    assert asked == {
        "symbol": "000001",
        "period": "daily",
        "start_date": "20240525",
        "end_date": "20500101",
        "adjust": "",
    }
    assert bars["time"].to_list() == [datetime(2024, 6, d) for d in (14, 17, 18)]
    assert bars["pre_close"][0] == 10.10  # known although its day before is not delivered


def test_akshare_start_and_end_are_days_included() -> None:
    bars = only(eastmoney(akshare_client(), start=date(2024, 6, 7), end=date(2024, 6, 14)))
    assert bars["time"].to_list() == [datetime(2024, 6, d) for d in (7, 11, 12, 14)]
    assert bars["pre_close"][0] == 10.62


def test_akshare_leaves_out_the_session_in_progress() -> None:
    noon = clock(2024, 6, 18, 4, 0)  # 12:00 in Shanghai
    assert only(eastmoney(akshare_client(), now=noon))["time"].max() == datetime(2024, 6, 17)


@pytest.mark.parametrize("spelling", ["000001.SZ", "000001", "sz000001", "SZ000001", "000001.XSHE"])
def test_akshare_symbol_keeps_the_users_spelling(spelling: str) -> None:
    client = akshare_client()
    assert only(eastmoney(client, spelling))["symbol"].unique().to_list() == [spelling]
    assert client.arguments("stock_zh_a_hist")[0]["symbol"] == "000001"
    assert client.arguments("stock_zh_a_daily")[0] == {
        "symbol": "sz000001",
        "adjust": "hfq-factor",
    }


def test_akshare_minutes_fold_the_opening_auction_into_the_first_bar() -> None:
    client = akshare_client(stock_zh_a_hist_min_em=recorded("akshare_1min"))
    bars = only(eastmoney(client, freq="1min"))
    assert bars["time"].to_list() == [datetime(2024, 6, 17, 9, 31 + k) for k in range(4)]
    assert bars["open"][0] == 10.20  # the auction's
    assert bars["close"][0] == 10.22
    assert bars["volume"][0] == (5000 + 5700) * 100
    assert bars["factor"].to_list() == [1.0712871287] * 4


def test_akshare_five_minutes_keep_their_end_stamps() -> None:
    client = akshare_client(stock_zh_a_hist_min_em=recorded("akshare_5min"))
    bars = only(eastmoney(client, freq="5min", start=date(2024, 6, 17)))
    assert bars["time"].to_list() == [datetime(2024, 6, 17, 9, 35 + 5 * k) for k in range(4)]
    (asked,) = client.arguments("stock_zh_a_hist_min_em")
    assert (asked["period"], asked["start_date"]) == ("5", "2024-06-17 00:00:00")


def test_akshare_minutes_beyond_the_vendors_reach_are_refused() -> None:
    client = akshare_client(stock_zh_a_hist_min_em=recorded("akshare_5min"))
    with pytest.raises(SourceError, match="only from 2024-06-17 09:35:00 on"):
        only(eastmoney(client, freq="5min", start=date(2024, 1, 2)))
    with pytest.raises(SourceError, match="gap cannot be filled: import anew"):
        only(eastmoney(client, freq="5min"), {"000001.SZ": datetime(2024, 5, 6, 15, 0)})


def test_akshare_benchmark_daily_and_intraday() -> None:
    client = akshare_client()
    levels = eastmoney(client, benchmark="000300").benchmark()
    assert levels is not None
    assert client.arguments("stock_zh_index_daily_em")[0]["symbol"] == "sh000300"
    assert levels["close"][0] == 3570.0
    levels = eastmoney(client, benchmark="sh000300", freq="5min").benchmark()
    assert levels is not None
    assert levels["time"][0] == datetime(2024, 6, 17, 9, 35)


def test_akshare_instruments_name_the_delisted() -> None:
    source = eastmoney(akshare_client(), "000001.SZ", "000003.SZ", "600001.SH")
    facts = source.instruments()
    assert facts is not None
    assert facts.rows() == [
        ("000003.SZ", date(1991, 7, 3), date(2002, 6, 14), None, "PT金田A"),
        ("600001.SH", date(1998, 1, 22), date(2009, 12, 29), None, "邯郸钢铁"),
    ]


def test_akshare_unknown_symbol_and_vanished_symbol_are_clear_errors() -> None:
    client = akshare_client(stock_zh_a_hist=recorded("akshare_unknown"))
    with pytest.raises(SourceError, match=r"akshare: no 1d bars for 000001\.SZ"):
        only(eastmoney(client))
    with pytest.raises(SourceError, match=r"not even the bar already stored.*history stays"):
        only(eastmoney(client), {"000001.SZ": datetime(2024, 6, 14)})


def test_akshare_crash_inside_the_library_is_worded_for_the_user() -> None:
    client = akshare_client(
        stock_zh_a_hist_min_em=TypeError("'NoneType' object is not subscriptable")
    )
    with pytest.raises(
        SourceError, match=r"hist_min_em failed for 000001\.SZ: TypeError.*1\.19\.5"
    ):
        only(eastmoney(client, freq="5min"))


def test_akshare_changed_unit_of_volume_is_refused() -> None:
    frame = recorded("akshare_daily")
    frame["成交量"] *= 100
    with pytest.raises(SourceError, match=r"volume and amount of 000001\.SZ do not fit"):
        only(eastmoney(akshare_client(stock_zh_a_hist=frame)))


def test_akshare_index_as_a_stock_is_refused() -> None:
    with pytest.raises(SourceError, match=r"'000001\.SH' is no stock of its exchange"):
        only(eastmoney(akshare_client(), "000001.SH"))


# --- tushare ----------------------------------------------------------------------------------


def test_tushare_daily_bars_are_raw_in_shares_and_money_with_factor_and_st() -> None:
    source = pro(tushare_client())
    assert isinstance(source, Source)
    assert {"pre_close", "st", "factor"} <= source.info().fields
    bars = only(source)
    assert bars["time"].is_sorted()
    assert bars["volume"][0] == 81_234_500.0
    assert bars["amount"][0] == pytest.approx(860_273_355.0)
    assert bars["pre_close"].to_list() == [10.50, 10.62, 10.55, 10.71, 10.10, 10.21, 10.15]
    assert bars["factor"].to_list() == [125.0] * 4 + [133.911] * 3
    assert bars["st"].to_list() == [False, False, True, True, True, False, False]


def test_tushare_update_asks_from_the_last_stored_bar() -> None:
    client = tushare_client()
    bars = only(pro(client), {"000001.SZ": datetime(2024, 6, 17)})
    for function in ("daily", "adj_factor"):
        (asked,) = client.arguments(function)
        assert asked == {
            "ts_code": "000001.SZ",
            "start_date": "20240617",
            "end_date": "20240620",
        }
    assert bars["time"].to_list() == [datetime(2024, 6, 17), datetime(2024, 6, 18)]
    assert bars["st"].to_list() == [False, False]


def test_tushare_long_history_comes_in_spans_below_the_row_limit() -> None:
    def answer(start_date: str, **_: Any) -> pd.DataFrame:
        return recorded("tushare_daily" if start_date > "2017" else "tushare_daily_empty")

    client = tushare_client(daily=answer)
    assert only(pro(client, start=None)).height == 7
    spans = [(a["start_date"], a["end_date"]) for a in client.arguments("daily")]
    assert spans[0][0] == "19901219"
    assert spans[-1][1] == "20240620"
    assert len(spans) == 3


def test_tushare_answer_at_the_row_limit_is_refused_as_cut_off() -> None:
    frame = pd.concat([recorded("tushare_daily")] * 900, ignore_index=True)
    with pytest.raises(SourceError, match=r"returned 6300 rows .* cut off"):
        only(pro(tushare_client(daily=frame)))


def test_tushare_minutes_are_shares_and_money_and_fold_the_auction() -> None:
    client = tushare_client()
    bars = only(pro(client, freq="5min", start=date(2024, 6, 17)))
    assert bars["time"].to_list() == [datetime(2024, 6, 17, 9, 35 + 5 * k) for k in range(5)]
    assert bars["volume"].to_list() == [205_000.0, 110_000.0, 115_000.0, 120_000.0, 125_000.0]
    assert (bars["open"][0], bars["close"][0]) == (10.20, 10.22)
    assert bars["factor"].to_list() == [133.911] * 5
    (asked,) = client.arguments("stk_mins")
    assert asked == {
        "ts_code": "000001.SZ",
        "start_date": "2024-06-17 00:00:00",
        "end_date": "2024-06-20 23:59:59",
        "freq": "5min",
    }


def test_tushare_minutes_without_start_are_refused() -> None:
    with pytest.raises(SourceError, match=r"5min bars need data\.start"):
        pro(tushare_client(), freq="5min", start=None)


def test_tushare_instruments_include_the_delisted() -> None:
    facts = pro(tushare_client(), "000001.SZ", "000003.SZ").instruments()
    assert facts is not None
    assert facts.rows() == [
        ("000001.SZ", date(1991, 4, 3), None, None, "平安银行"),
        ("000003.SZ", date(1991, 7, 3), date(2002, 6, 14), None, "PT金田A(退)"),
    ]
    with pytest.raises(SourceError, match=r"stock_basic knows no 000009\.SZ"):
        pro(tushare_client(), "000009.SZ").instruments()


def test_tushare_membership_is_intervals_of_the_published_lists() -> None:
    client = tushare_client(index_weight=recorded("tushare_index_weight"))
    source = pro(client, start=date(2024, 4, 1), membership_index="000300.SH")
    members = source.membership()
    assert members is not None
    assert members.rows() == [
        ("000001.SZ", date(2024, 4, 30), None),
        ("600000.SH", date(2024, 4, 30), date(2024, 5, 31)),
        ("600000.SH", date(2024, 6, 28), None),
    ]
    assert pro(client).membership() is None
    assert source.info().fingerprint != pro(client, start=date(2024, 4, 1)).info().fingerprint


def test_tushare_benchmark_daily_and_intraday() -> None:
    client = tushare_client()
    levels = pro(client, benchmark="000300.SH").benchmark()
    assert levels is not None
    assert levels["close"].to_list() == [3570.0 + 4 * k for k in range(7)]
    levels = pro(client, benchmark="000300.SH", freq="5min").benchmark()
    assert levels is not None
    assert levels["time"].is_sorted()
    assert client.arguments("idx_mins")[0]["ts_code"] == "000300.SH"


def test_tushare_missing_factor_of_a_trading_day_is_refused() -> None:
    client = tushare_client(adj_factor=recorded("tushare_adj_factor").iloc[1:])
    with pytest.raises(SourceError, match=r"no value for 000001\.SZ on 1 of 7 .* 2024-06-18"):
        only(pro(client))


def test_tushare_rate_limit_is_waited_out_for_a_minute() -> None:
    naps = Naps()
    limit = Exception("抱歉，您每分钟最多访问该接口200次，权限的具体详情访问：…")
    client = tushare_client(daily=[limit, recorded("tushare_daily")])
    assert only(pro(client, retry=patient(naps))).height == 7
    assert naps.seconds == [61.0]


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("抱歉，您每天最多访问该接口2次", "quota is used up"),
        ("抱歉，您没有访问该接口的权限", "more points"),
        ("您的token不对，请确认。", "TUSHARE_TOKEN"),
    ],
)
def test_tushare_refusal_is_not_retried_and_says_what_to_do(text: str, advice: str) -> None:
    naps = Naps()
    client = tushare_client(daily=Exception(text))
    with pytest.raises(
        SourceError, match=f"daily failed for 000001.SZ: Exception: {text}.*{advice}"
    ):
        only(pro(client, retry=patient(naps)))
    assert naps.seconds == []
    assert len(client.arguments("daily")) == 1


def test_tushare_hidden_http_error_is_retried() -> None:
    naps = Naps()
    client = tushare_client(daily=[pd.DataFrame(), recorded("tushare_daily")])
    assert only(pro(client, retry=patient(naps))).height == 7
    assert naps.seconds == [1.0]


def test_tushare_unknown_symbol_is_a_clear_error() -> None:
    client = tushare_client(daily=recorded("tushare_daily_empty"))
    with pytest.raises(SourceError, match=r"tushare: no 1d bars for 000002\.SZ from 2024-06-01"):
        only(pro(client, "000002.SZ"))


def test_tushare_token_comes_from_the_environment_and_stays_out_of_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[str] = []

    def pro_api(token: str) -> Calls:
        given.append(token)
        return tushare_client(daily=Exception("bad token s3cr3t"))

    monkeypatch.setattr(importlib, "import_module", lambda _: SimpleNamespace(pro_api=pro_api))
    monkeypatch.delenv("TUSHARE_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="TUSHARE_TOKEN is not set"):
        only(pro(None))
    monkeypatch.setenv("TUSHARE_TOKEN", "s3cr3t")
    with pytest.raises(SourceError, match=r"bad token \*\*\*") as caught:
        only(pro(None))
    assert given == ["s3cr3t"]
    assert "s3cr3t" not in str(caught.value)


# --- what all share ---------------------------------------------------------------------------

BROKEN: list[tuple[Callable[[pd.DataFrame], Source], str, str]] = [
    (lambda f: yahoo(Yahoo(f)), "yfinance_daily", "Adj Close"),
    (lambda f: eastmoney(akshare_client(stock_zh_a_hist=f)), "akshare_daily", "成交额"),
    (lambda f: eastmoney(akshare_client(stock_zh_a_daily=f)), "akshare_hfq_factor", "hfq_factor"),
    (lambda f: pro(tushare_client(daily=f)), "tushare_daily", "vol"),
    (lambda f: pro(tushare_client(adj_factor=f)), "tushare_adj_factor", "adj_factor"),
]


@pytest.mark.parametrize(("make", "name", "column"), BROKEN)
def test_missing_column_is_named_with_vendor_symbol_and_remedy(
    make: Callable[[pd.DataFrame], Source], name: str, column: str
) -> None:
    vendor = name.partition("_")[0]
    with pytest.raises(
        SourceError,
        match=rf"{vendor}: .* for (AAPL|000001\.SZ) came without column '{column}'.*pip",
    ):
        only(make(recorded(name).drop(columns=column)))


@pytest.mark.parametrize(("make", "name", "column"), BROKEN)
def test_text_where_numbers_belong_is_named(
    make: Callable[[pd.DataFrame], Source], name: str, column: str
) -> None:
    frame = recorded(name)
    frame[column] = "--"
    with pytest.raises(SourceError, match=r"should hold numbers"):
        only(make(frame))


def sources(**query: Any) -> Iterator[Source]:
    yield yahoo(Yahoo(recorded("yfinance_daily")), **query)
    yield eastmoney(akshare_client(), **query)
    yield pro(tushare_client(), **query)


def test_fingerprint_depends_on_the_query_and_on_the_day() -> None:
    for same, again, longer, later in zip(
        sources(now=clock(2024, 6, 20, 5)),
        sources(now=clock(2024, 6, 20, 6)),
        sources(now=clock(2024, 6, 20, 5), end=date(2024, 6, 18)),
        sources(now=clock(2024, 6, 21, 5)),
        strict=True,
    ):
        prints = [s.info().fingerprint for s in (same, longer, later)]
        assert len(set(prints)) == 3
        assert again.info().fingerprint == prints[0]


def test_info_needs_no_client() -> None:
    for make in (yahoo, eastmoney, pro):
        assert make(None).info().freq == "1d"


@pytest.mark.parametrize("make", [yahoo, eastmoney, pro])
def test_library_that_is_not_installed_says_how_to_install_it(
    make: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(SourceError, match=r"not installed.*pip install 'echelon\[vendors\]'"):
        only(make(None))


@pytest.mark.parametrize("source", [YFinanceSource, AkshareSource, TushareSource])
def test_empty_repeated_and_reversed_queries_are_refused(source: type[Any]) -> None:
    span = {"start": None, "end": None, "freq": "1d"}
    with pytest.raises(SourceError, match="no symbols to download"):
        source([], **span)
    with pytest.raises(SourceError, match="listed more than once: A"):
        source(["A", "A"], **span)
    with pytest.raises(SourceError, match="start 2024-01-02 is after end 2024-01-01"):
        source(["A"], start=date(2024, 1, 2), end=date(2024, 1, 1), freq="1d")


def test_each_symbol_is_one_frame_with_its_origin() -> None:
    client = tushare_client()
    raws = list(pro(client, "000001.SZ", "600000.SH").frames({"600000.SH": datetime(2024, 6, 18)}))
    assert [r.origin for r in raws] == ["tushare:000001.SZ", "tushare:600000.SH"]
    assert [r.frame.height for r in raws] == [7, 1]  # only the stored one is an update
    assert raws[1].frame["row"].to_list() == [0]  # tushare's newest row comes first


@pytest.mark.parametrize(
    ("make", "until"),
    [
        (lambda **q: yahoo(Yahoo(recorded("yfinance_daily")), **q), date(2020, 8, 31)),
        (lambda **q: eastmoney(akshare_client(), **q), date(2024, 6, 12)),
        (lambda **q: pro(tushare_client(), **q), date(2024, 6, 12)),
    ],
)
def test_import_in_two_steps_across_an_ex_day_equals_one(
    make: Callable[..., Source], until: date, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    import_source(make(end=until), store, "steps")
    report = import_source(make(), store, "steps", update=True)
    import_source(make(), store, "once")
    assert report.added == 3
    assert report.manifest.rows == 7
    steps, once = (
        pl.concat([store.read_bars(name, key) for key in store.partitions(name)])
        for name in ("steps", "once")
    )
    assert steps.equals(once)
    assert steps["factor"][0] == 1.0
    assert steps["factor"][-1] != 1.0


# --- symbols ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "index", "share"),
    [
        ("000001.SZ", False, AShare("000001", "SZ")),
        ("600000", False, AShare("600000", "SH")),
        ("688981", False, AShare("688981", "SH")),
        ("300750", False, AShare("300750", "SZ")),
        ("835305", False, AShare("835305", "BJ")),
        ("920001", False, AShare("920001", "BJ")),
        ("sh600000", False, AShare("600000", "SH")),
        ("600000.XSHG", False, AShare("600000", "SH")),
        ("600000.SS", False, AShare("600000", "SH")),
        ("000300", True, AShare("000300", "SH")),
        ("sh000300", True, AShare("000300", "SH")),
        ("399001", True, AShare("399001", "SZ")),
    ],
)
def test_a_share_spellings(text: str, index: bool, share: AShare) -> None:
    assert a_share(text, "x", index=index) == share
    assert a_share(share.dotted, "x", index=index) == share
    assert a_share(share.prefixed, "x", index=index) == share


@pytest.mark.parametrize("text", ["AAPL", "1", "000001.NY", "0000011", ""])
def test_other_symbols_are_refused(text: str) -> None:
    with pytest.raises(SourceError, match="is no A-share symbol"):
        a_share(text, "akshare")


def test_two_spellings_of_one_stock_are_refused() -> None:
    with pytest.raises(SourceError, match=r"'000001\.SZ' and 'sz000001' are the same stock"):
        distinct_a_shares(["000001.SZ", "sz000001"], "akshare")


def test_volume_check_passes_a_symbol_that_never_traded() -> None:
    idle = pl.DataFrame({"close": [10.0], "volume": [0.0], "amount": [0.0]})
    assert share_volume(idle, 100.0, vendor="x", symbol="y")["volume"].to_list() == [0.0]


# --- retry ------------------------------------------------------------------------------------


def failing(times: int, error: Exception) -> Callable[[], str]:
    left = [times]

    def call() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return "done"

    return call


def test_retry_waits_twice_as_long_each_time_up_to_the_cap() -> None:
    naps = Naps()
    retry = Retry(attempts=6, base=1.0, cap=5.0, sleep=naps, jitter=lambda: 0.0)
    assert retry.call(failing(5, OSError()), lambda _: Verdict.TRANSIENT, "x") == "done"
    assert naps.seconds == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_retry_jitter_shortens_a_wait_by_at_most_half() -> None:
    retry = Retry(jitter=lambda: 0.999)
    assert retry.wait(1, Verdict.TRANSIENT) == pytest.approx(0.5, abs=1e-3)
    assert retry.wait(1, Verdict.RATE_LIMIT) >= retry.rate_limit_wait


def test_retry_gives_up_with_the_last_error_itself() -> None:
    naps, error = Naps(), OSError("down")
    with pytest.raises(OSError, match="down") as caught:
        Retry(attempts=3, sleep=naps).call(failing(9, error), lambda _: Verdict.TRANSIENT, "x")
    assert caught.value is error
    assert len(naps.seconds) == 2


def test_retry_raises_a_fatal_error_at_once() -> None:
    naps = Naps()
    with pytest.raises(ValueError, match="no"):
        Retry(sleep=naps).call(failing(1, ValueError("no")), lambda _: Verdict.FATAL, "x")
    assert naps.seconds == []


def test_retry_lets_ctrl_c_through() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    naps = Naps()
    with pytest.raises(KeyboardInterrupt):
        Retry(sleep=naps).call(interrupted, lambda _: Verdict.TRANSIENT, "x")
    assert naps.seconds == []


def test_retry_without_attempts_is_refused() -> None:
    with pytest.raises(ValueError, match="attempts must be at least 1, not 0"):
        Retry(attempts=0)


def test_yahoos_rate_limit_is_waited_out() -> None:
    naps = Naps()
    client = Yahoo([YFRateLimitError(), recorded("yfinance_daily")])
    assert only(yahoo(client, retry=patient(naps))).height == 7
    assert naps.seconds == [61.0]
