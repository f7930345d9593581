"""`akshare`: A-share bars from Eastmoney, adjustment factors from Sina (library version 1.19.5).

Prices are raw. The factor is Sina's start-anchored one (`stock_zh_a_daily(adjust="hfq-factor")`),
not Eastmoney's 后复权 close over its raw close: Eastmoney adds dividends instead of multiplying,
so that ratio drifts from day to day without any corporate action (and can turn negative;
akshare issues 1878 and 5287).

The reference price of the day follows from it: pre_close = close[t−1] · factor[t−1] / factor[t],
rounded to the cent. Volumes come in lots (手) of 100 and are checked against the traded value.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, time, timedelta
from functools import cached_property
from typing import Any, ClassVar

import polars as pl

from echelon.data.sources._retry import Verdict
from echelon.data.sources._vendor import (
    AShare,
    Vendor,
    a_share,
    distinct_a_shares,
    fold_opening_auction,
    join_latest_day,
    numbers,
    reading_answers,
    share_volume,
    take,
)
from echelon.errors import SourceError
from echelon.types import Freq

_QUOTES = {
    "开盘": "open",
    "最高": "high",
    "最低": "low",
    "收盘": "close",
    "成交量": "volume",
    "成交额": "amount",
}
_NUMBERS = tuple(_QUOTES.values())
_PERIOD: Mapping[Freq, str] = {"5min": "5", "1min": "1"}
_LOT = 100.0
_DELISTED = (
    (
        *("SH", "stock_info_sh_delist", "全部"),
        # The page's column is the delisting day, whatever the library calls it.
        {"公司代码": "code", "公司简称": "name", "上市日期": "listed", "暂停上市日期": "delisted"},
    ),
    (
        *("SZ", "stock_info_sz_delist", "终止上市公司"),
        {"证券代码": "code", "证券简称": "name", "上市日期": "listed", "终止上市日期": "delisted"},
    ),
)
_CONTEXT = timedelta(days=20)
"""Asked for before the first wanted bar, so that its reference price has a day before it; longer
than any holiday."""


class AkshareSource(Vendor):
    """Bars by `stock_zh_a_hist` and `stock_zh_a_hist_min_em`, symbol by symbol."""

    name: ClassVar[str] = "akshare"
    package: ClassVar[str] = "akshare==1.19.5"

    @reading_answers("akshare", "the list of symbols")
    def instruments(self) -> pl.DataFrame | None:
        """Listing and delisting days of those symbols that have been delisted."""
        found = []
        for market, function, argument, columns in _DELISTED:
            mine = {s.code: name for name, s in self._shares.items() if s.market == market}
            if not mine:
                continue
            raw = self._call(function, f"exchange {market}", symbol=argument)
            table = take(raw, columns, vendor=self.name, symbol=market, call=function)
            found.append(
                table.filter(pl.col("code").is_in(list(mine))).select(
                    pl.col("code").replace_strict(mine, return_dtype=pl.String).alias("symbol"),
                    pl.col("listed", "delisted").cast(pl.Date),
                    reason=pl.lit(None, dtype=pl.String),
                    name=pl.col("name").cast(pl.String),
                )
            )
        return pl.concat(found).sort("symbol") if found else None

    @reading_answers("akshare", "the index")
    def benchmark(self) -> pl.DataFrame | None:
        """The benchmark's closes, whole; an index such as 000300.SH."""
        if self._benchmark is None:
            return None
        index = a_share(self._benchmark, self.name, index=True)
        if self._freq == "1d":
            raw = self._index_days(index)
            columns, form = {"date": "time", "close": "close"}, "%Y-%m-%d"
        else:
            raw = self._index_minutes(index)
            columns, form = {"时间": "time", "收盘": "close"}, "%Y-%m-%d %H:%M:%S"
        if raw.empty:
            raise self._nothing(self._benchmark)
        bars = take(raw, columns, vendor=self.name, symbol=self._benchmark, call="index bars")
        bars = numbers(bars, ["close"], vendor=self.name, symbol=self._benchmark)
        bars = bars.with_columns(_times(bars, form, self._benchmark))
        return self._finished(bars, self._benchmark).select("time", "close").sort("time")

    def _index_days(self, index: AShare) -> Any:  # noqa: ANN401
        start, end = self._day_range(None)
        return self._call(
            "stock_zh_index_daily_em",
            index.dotted,
            symbol=index.prefixed,
            start_date=start,
            end_date=end,
        )

    def _index_minutes(self, index: AShare) -> Any:  # noqa: ANN401
        start, end = self._minute_range(None)
        return self._call(
            "index_zh_a_hist_min_em",
            index.dotted,
            symbol=index.code,
            period=_PERIOD[self._freq],
            start_date=start,
            end_date=end,
        )

    def _market(self) -> tuple[str, str]:
        return "XSHG", "Asia/Shanghai"

    def _fields(self) -> frozenset[str]:
        # Minute bars have no reference price of their own.
        both = {"open", "high", "low", "close", "volume", "amount", "factor"}
        return frozenset(both | {"pre_close"} if self._freq == "1d" else both)

    @cached_property
    def _shares(self) -> dict[str, AShare]:
        return distinct_a_shares(self._symbols, self.name)

    def _bars(self, symbol: str, first: datetime | None) -> pl.DataFrame:
        share = self._shares[symbol]
        bars = (
            self._days(symbol, share, first)
            if self._freq == "1d"
            else self._minutes(symbol, share, first)
        )
        bars = join_latest_day(bars, self._factors(symbol, share))
        if bars["factor"].null_count():
            early = bars.filter(pl.col("factor").is_null())["time"].min()
            raise SourceError(
                f"akshare: {symbol} has no adjustment factor as early as {early!s}. "
                "Set data.start to a later day, or use tushare."
            )
        return self._with_reference(bars) if self._freq == "1d" else bars

    def _days(self, symbol: str, share: AShare, first: datetime | None) -> pl.DataFrame:
        start, end = self._day_range(first)
        raw = self._call(
            "stock_zh_a_hist",
            symbol,
            symbol=share.code,
            period="daily",
            start_date=start,
            end_date=end,
            adjust="",
        )
        if raw.empty:
            raise self._nothing(symbol, first)
        columns = {"日期": "time", **_QUOTES, "涨跌额": "change"}
        bars = take(raw, columns, vendor=self.name, symbol=symbol, call="stock_zh_a_hist")
        bars = numbers(bars, [*_NUMBERS, "change"], vendor=self.name, symbol=symbol)
        bars = bars.with_columns(_times(bars, "%Y-%m-%d", symbol), symbol=pl.lit(symbol))
        return share_volume(bars, _LOT, vendor=self.name, symbol=symbol)

    def _with_reference(self, bars: pl.DataFrame) -> pl.DataFrame:
        """Add pre_close, then drop the days that were only asked for to compute it."""
        # On a symbol's very first bar the vendor's change is against the issue price.
        before = pl.col("close").shift(1) * pl.col("factor").shift(1) / pl.col("factor")
        reference = before.fill_null(pl.col("close") - pl.col("change"))
        # Half a cent goes up, as at the exchange; the nudge is for numbers like 10.1049999….
        reference = ((reference * 100 + 0.5 + 1e-6).floor() / 100).round(2)
        bars = bars.sort("time").with_columns(pre_close=reference)
        return bars if self._start is None else bars.filter(pl.col("time").dt.date() >= self._start)

    def _minutes(self, symbol: str, share: AShare, first: datetime | None) -> pl.DataFrame:
        start, end = self._minute_range(first)
        raw = self._call(
            "stock_zh_a_hist_min_em",
            symbol,
            symbol=share.code,
            start_date=start,
            end_date=end,
            period=_PERIOD[self._freq],
            adjust="",
        )
        if raw.empty:
            raise self._nothing(symbol, first)
        columns = {"时间": "time", **_QUOTES}
        bars = take(raw, columns, vendor=self.name, symbol=symbol, call="stock_zh_a_hist_min_em")
        bars = numbers(bars, _NUMBERS, vendor=self.name, symbol=symbol)
        bars = bars.with_columns(_times(bars, "%Y-%m-%d %H:%M:%S", symbol), symbol=pl.lit(symbol))
        self._refuse_gap(symbol, bars, first)
        bars = share_volume(bars, _LOT, vendor=self.name, symbol=symbol)
        return fold_opening_auction(bars, self._freq)

    def _refuse_gap(self, symbol: str, bars: pl.DataFrame, first: datetime | None) -> None:
        """Eastmoney keeps few minutes: five sessions of 1-minute bars, some weeks of 5-minute."""
        earliest = bars["time"].min()
        assert isinstance(earliest, datetime)
        if first is not None and earliest.date() > first.date():
            raise SourceError(
                f"akshare: the stored {self._freq} bars of {symbol} end on {first}, the vendor's "
                f"begin on {earliest}. The gap cannot be filled: import anew, without --update."
            )
        if first is None and self._start is not None and earliest.date() > self._start + _CONTEXT:
            raise SourceError(
                f"akshare: {symbol} is wanted from {self._start} on, but the vendor keeps "
                f"{self._freq} bars only from {earliest} on. Set data.start to "
                f"{earliest.date()} or later, or use tushare."
            )

    def _factors(self, symbol: str, share: AShare) -> pl.DataFrame:
        raw = self._call("stock_zh_a_daily", symbol, symbol=share.prefixed, adjust="hfq-factor")
        table = take(
            raw,
            {"date": "day", "hfq_factor": "factor"},
            vendor=self.name,
            symbol=symbol,
            call="stock_zh_a_daily(hfq-factor)",
        )
        table = numbers(table, ["factor"], vendor=self.name, symbol=symbol)
        return table.with_columns(pl.col("day").cast(pl.Date))

    def _day_range(self, first: datetime | None) -> tuple[str, str]:
        start = first.date() if first else self._start
        begin = (start - _CONTEXT).strftime("%Y%m%d") if start else "19900101"
        return begin, self._end.strftime("%Y%m%d") if self._end else "20500101"

    def _minute_range(self, first: datetime | None) -> tuple[str, str]:
        day = first.date() if first else self._start
        begin = datetime.combine(day, time(0)) if day else datetime(1990, 1, 1)
        end = datetime.combine(self._end, time(23, 59)) if self._end else datetime(2050, 1, 1)
        return f"{begin:%Y-%m-%d %H:%M:%S}", f"{end:%Y-%m-%d %H:%M:%S}"

    def _classify(self, error: Exception) -> Verdict:
        names = {c.__name__ for c in type(error).__mro__}
        if names & {"RateLimitError", "NetworkError", "APIError", "DataParsingError"}:
            return Verdict.TRANSIENT
        return super()._classify(error)


from_config = AkshareSource.from_config


def _times(bars: pl.DataFrame, form: str, symbol: str) -> pl.Expr:
    """The time column as naive Datetime; a value that cannot be read is an error."""
    column = pl.col("time")
    if bars.schema["time"] != pl.String:
        return column.cast(pl.Datetime("us"))
    read = bars["time"].str.to_datetime(form, time_unit="us", strict=False)
    if read.null_count():
        bad = bars.filter(read.is_null())["time"][0]
        raise SourceError(
            f"akshare: {symbol} has the time {bad!r}, expected the form {form}. The vendor has "
            "changed its answer; install `pip install 'echelon[vendors]'`."
        )
    return column.str.to_datetime(form, time_unit="us")
