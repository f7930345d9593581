"""The tushare source on recorded frames: no network."""

import importlib
from collections.abc import Callable
from datetime import date, datetime
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from vendor_fakes import (
    Calls,
    Naps,
    only,
    patient,
    pro,
    recorded,
    tushare_client,
)

from echelon.data.sources import Source
from echelon.errors import ConfigError, SourceError


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
        ("000001.SZ", date(1991, 4, 3), None, "平安银行"),
        ("000003.SZ", date(1991, 7, 3), date(2002, 6, 14), "PT金田A(退)"),
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


def weights(size: int) -> Callable[..., pd.DataFrame]:
    """An index of `size` members, listed on the first of each month; at most 5,000 rows."""

    def answer(index_code: str, start_date: str, end_date: str) -> pd.DataFrame:
        days = [f"2024{m:02d}01" for m in range(1, 7) if start_date <= f"2024{m:02d}01" <= end_date]
        rows = [(index_code, f"{k:06d}.SZ", d, 0.1) for d in days for k in range(size)]
        columns = ["index_code", "con_code", "trade_date", "weight"]
        return pd.DataFrame(rows[:5000], columns=columns)

    return answer


def test_tushare_membership_of_a_large_index_is_not_cut_off() -> None:
    client = tushare_client(index_weight=weights(2000))
    members = pro(client, start=date(2024, 1, 1), membership_index="000852.SH").membership()
    assert members is not None
    assert members.height == 2000
    assert set(members["start"]) == {date(2024, 1, 1)}
    assert members["end"].null_count() == 2000


def test_tushare_list_of_a_day_that_may_be_cut_off_is_refused() -> None:
    client = tushare_client(index_weight=weights(6000))
    source = pro(client, start=date(2024, 1, 1), membership_index="000985.SH")
    with pytest.raises(SourceError, match=r"returned 5000 rows for 2024-.*data\.universe"):
        source.membership()


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
