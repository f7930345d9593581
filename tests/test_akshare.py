"""The akshare source on recorded frames: no network."""

from datetime import date, datetime

import pytest
from vendor_fakes import (
    akshare_client,
    clock,
    eastmoney,
    only,
    recorded,
)

from echelon.data.sources import Source
from echelon.errors import SourceError


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
    with pytest.raises(SourceError, match="gap cannot be filled: import again"):
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
        ("000003.SZ", date(1991, 7, 3), date(2002, 6, 14), "PT金田A"),
        ("600001.SH", date(1998, 1, 22), date(2009, 12, 29), "邯郸钢铁"),
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
