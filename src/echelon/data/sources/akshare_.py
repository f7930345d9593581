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
from datetime import date, datetime, timedelta
from typing import ClassVar

import polars as pl

from echelon.data.sources._vendor import (
    AShareVendor,
    KnownFailure,
    reading_answers,
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


class AkshareSource(AShareVendor):
    name: ClassVar[str] = "akshare"
    package: ClassVar[str] = "akshare==1.19.5"
    # Minute bars have no reference price of their own.
    fields = frozenset({*_QUOTES.values(), "factor", "pre_close"})
    failures = (KnownFailure("RateLimitError|NetworkError|APIError|DataParsingError", "transient"),)

    @reading_answers("akshare", "the list of symbols")
    def instruments(self) -> pl.DataFrame | None:
        """Listing and delisting days of those symbols that have been delisted."""
        tables = []
        for market, function, argument, columns in _DELISTED:
            mine = {s.code: name for name, s in self._shares.items() if s.market == market}
            if not mine:
                continue
            raw = self._call(function, f"exchange {market}", symbol=argument)
            days = dict.fromkeys(("listed", "delisted"), "%Y-%m-%d")
            table = self._table(raw, columns, market, function, text=("code", "name"), **days)
            tables.append(
                table.filter(pl.col("code").is_in(list(mine))).select(
                    pl.col("code").replace_strict(mine, return_dtype=pl.String).alias("symbol"),
                    *("listed", "delisted"),
                    pl.col("name").cast(pl.String),
                )
            )
        return pl.concat(tables).sort("symbol") if tables else None

    def _index_bars(self, symbol: str) -> pl.DataFrame:
        index = self._index(symbol)
        if self._freq == "1d":
            columns = {"date": "time", "close": "close"}
            return self._quotes("stock_zh_index_daily_em", symbol, index.prefixed, columns)
        columns = {"时间": "time", "收盘": "close"}
        period = _PERIOD[self._freq]
        return self._quotes("index_zh_a_hist_min_em", symbol, index.code, columns, period=period)

    def _quotes(
        self,
        function: str,
        symbol: str,
        code: str,
        columns: Mapping[str, str],
        first: datetime | None = None,
        **options: str,
    ) -> pl.DataFrame:
        """One table of quotes from `first` on: time, `columns` (theirs → ours) and row."""
        day = first.date() if first else self._start
        if self._freq == "1d":
            form = "%Y-%m-%d"
            start = f"{day - _CONTEXT:%Y%m%d}" if day else "19900101"
            end = f"{self._end:%Y%m%d}" if self._end else "20500101"
        else:
            form = "%Y-%m-%d %H:%M:%S"
            start = f"{day or date(1990, 1, 1)} 00:00:00"
            end = f"{self._end} 23:59:00" if self._end else "2050-01-01 00:00:00"
        span = {"start_date": start, "end_date": end}
        raw = self._call(function, symbol, symbol=code, **span, **options)
        if raw.empty:
            raise self._nothing(symbol, first)
        return self._table(raw, columns, symbol, function, time=form)

    def _bars(self, symbol: str, first: datetime | None) -> pl.DataFrame:
        share, function, options = self._shares[symbol], "stock_zh_a_hist", {"adjust": ""}
        if self._freq == "1d":
            columns, options["period"] = {"日期": "time", **_QUOTES, "涨跌额": "change"}, "daily"
        else:
            function += "_min_em"
            columns, options["period"] = {"时间": "time", **_QUOTES}, _PERIOD[self._freq]
        bars = self._quotes(function, symbol, share.code, columns, first, **options)
        bars = bars.with_columns(symbol=pl.lit(symbol))
        bars = self._in_shares(bars, _LOT, symbol)
        if self._freq != "1d":
            self._refuse_gap(symbol, bars, first)
            bars = self._fold_opening_auction(bars)
        function = "stock_zh_a_daily"
        raw = self._call(function, symbol, symbol=share.prefixed, adjust="hfq-factor")
        columns = {"date": "day", "hfq_factor": "factor"}
        call = f"{function}(hfq-factor)"
        factors = self._table(raw, columns, symbol, call, day="%Y-%m-%d")
        bars = self._join_latest_day(bars, factors)
        if bars["factor"].null_count():
            early = bars.filter(pl.col("factor").is_null())["time"].min()
            raise SourceError(
                f"akshare: {symbol} has no adjustment factor as early as {early!s}. "
                "Set data.start to a later day, or use tushare."
            )
        return self._with_reference(bars) if self._freq == "1d" else bars

    def _with_reference(self, bars: pl.DataFrame) -> pl.DataFrame:
        """Add pre_close, then drop the days that were only asked for to compute it."""
        # On a symbol's very first bar the vendor's change is against the issue price.
        before = pl.col("close").shift(1) * pl.col("factor").shift(1) / pl.col("factor")
        reference = before.fill_null(pl.col("close") - pl.col("change"))
        # Half a cent goes up, as at the exchange; the nudge is for numbers like 10.1049999….
        reference = ((reference * 100 + 0.5 + 1e-6).floor() / 100).round(2)
        bars = bars.sort("time").with_columns(pre_close=reference)
        return bars if self._start is None else bars.filter(pl.col("time").dt.date() >= self._start)

    def _refuse_gap(self, symbol: str, bars: pl.DataFrame, first: datetime | None) -> None:
        """Eastmoney keeps few minutes: five sessions of 1-minute bars, some weeks of 5-minute."""
        earliest = bars["time"].min()
        assert isinstance(earliest, datetime)
        if first is not None and earliest.date() > first.date():
            raise SourceError(
                f"akshare: the stored {self._freq} bars of {symbol} end on {first}, the vendor's "
                f"begin on {earliest}. The gap cannot be filled: import again, without --update."
            )
        if first is None and self._start is not None and earliest.date() > self._start + _CONTEXT:
            raise SourceError(
                f"akshare: {symbol} is wanted from {self._start} on, but the vendor keeps "
                f"{self._freq} bars only from {earliest} on. Set data.start to "
                f"{earliest.date()} or later, or use tushare."
            )


from_config = AkshareSource.from_config
