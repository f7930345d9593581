"""`tushare`: A-share bars of tushare.pro (library version 1.4.29; token from TUSHARE_TOKEN).

Prices are raw, with the exchange's reference price (pre_close) and tushare's adjustment factor.
Daily volume comes in lots (手) and value in thousands (千元), minute bars in shares and money.
`stock_basic` lists the delisted too, so a universe drawn from it has no survivorship bias;
`namechange` says when a stock was under special treatment (ST).

The library raises a bare `Exception` with the server's text for every refusal and returns a
frame without columns where the HTTP request failed: both are distinguished here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time, timedelta
from typing import Any, ClassVar

import polars as pl

from echelon.config import Config
from echelon.config.secrets import Secrets
from echelon.data.sources._vendor import AShare, AShareVendor, KnownFailure, reading_answers
from echelon.errors import SourceError
from echelon.types import Freq

_PRICES = ("open", "high", "low", "close")
_LOT, _THOUSAND = 100.0, 1000.0
_FIRST_DAY = date(1990, 12, 19)  # the Shanghai exchange opened

_DAYS_AT_ONCE: Mapping[Freq, int] = {"1d": 5000, "5min": 150, "1min": 30}
"""Calendar days per request, so that an answer stays below the server's row limit."""
_ROW_LIMIT: Mapping[Freq, int] = {"1d": 6000, "5min": 8000, "1min": 8000}

_LIST_DAYS = 150
_LIST_ROWS, _LIST_LIMIT = 3000, 5000
"""index_weight states no row limit; the server's lowest is 5,000 rows. An answer beyond the first
number is asked for again in halves, a single day beyond the second is refused."""

_SPECIAL_TREATMENT = re.compile(r"^S?\*?ST", re.IGNORECASE)


class TushareSource(AShareVendor):
    name: ClassVar[str] = "tushare"
    package: ClassVar[str] = "tushare==1.4.29"
    fields = frozenset({*_PRICES, "volume", "amount", "factor", "st", "pre_close"})
    failures = (
        KnownFailure(
            "每分钟最多访问|频率过高",
            "rate limit",
            "The account's rate limit did not clear; wait some minutes and try again.",
        ),
        KnownFailure(
            "每小时最多访问|每天最多访问",
            None,
            "The account's quota is used up; try again when it has renewed.",
        ),
        KnownFailure(
            "权限|积分",
            None,
            "The account may not use this table: it needs more points (积分) at tushare.pro.",
        ),
        # A body that is no JSON (a proxy's error page).
        KnownFailure("ValueError", "transient"),
        KnownFailure("(?i)token", None, "Check the environment variable TUSHARE_TOKEN."),
    )

    def __init__(
        self,
        symbols: Sequence[str],
        *,
        membership_index: str | None = None,
        **query: Any,  # noqa: ANN401 (see Vendor)
    ) -> None:
        """See `Vendor`. membership_index: whose constituents `membership` gives; null: none."""
        super().__init__(symbols, **query)
        self._membership_index = membership_index
        self._token: str | None = None
        if self._freq != "1d" and self._start is None:
            raise SourceError(
                f"tushare: {self._freq} bars need data.start; without it the vendor answers with "
                "the last ten days only."
            )

    @reading_answers("tushare", "the list of symbols")
    def instruments(self) -> pl.DataFrame | None:
        """Listing facts of the symbols, the delisted and the suspended among them included."""
        mine = {share.dotted: symbol for symbol, share in self._shares.items()}
        columns = {
            "ts_code": "code",
            "name": "name",
            "list_date": "listed",
            "delist_date": "delisted",
        }
        days = dict.fromkeys(("listed", "delisted"), "%Y%m%d")
        tables = []
        for status in ("L", "D", "P"):
            call, what = "stock_basic", f"status {status}"
            raw = self._query(call, what, list_status=status, fields=",".join(columns))
            table = self._table(raw, columns, what, call, text=("code", "name"), **days)
            names = pl.col("code", "name").cast(pl.String)
            tables.append(table.select(names, "listed", "delisted"))
        facts = pl.concat(tables).filter(pl.col("code").is_in(list(mine)))
        missing = sorted(set(mine) - set(facts["code"]))
        if missing:
            raise SourceError(
                f"tushare: stock_basic knows no {', '.join(missing)}. Check the spelling in "
                "data.symbols: six digits and .SH, .SZ or .BJ."
            )
        return facts.select(
            pl.col("code").replace_strict(mine, return_dtype=pl.String).alias("symbol"),
            *("listed", "delisted", "name"),
        ).sort("symbol")

    @reading_answers("tushare", "the index's members")
    def membership(self) -> pl.DataFrame | None:
        """Constituents of `membership_index` by its monthly lists, as published."""
        if self._membership_index is None:
            return None
        index = self._index(self._membership_index)
        spans = self._spans(self._start or _FIRST_DAY, _LIST_DAYS)
        lists = pl.concat([self._lists(index, *span) for span in spans]).unique()
        if lists.is_empty():
            raise self._nothing(index.dotted)
        spelling = {share.dotted: symbol for symbol, share in self._shares.items()}
        return _intervals(lists).with_columns(pl.col("symbol").replace(spelling))

    def _lists(self, index: AShare, begin: date, until: date) -> pl.DataFrame:
        """Code and day of the constituents published from `begin` to `until`, none cut off."""
        raw = self._query(
            *("index_weight", index.dotted),
            index_code=index.dotted,
            start_date=f"{begin:%Y%m%d}",
            end_date=f"{until:%Y%m%d}",
        )
        if len(raw) >= _LIST_ROWS and begin < until:
            middle = begin + (until - begin) // 2
            later = self._lists(index, middle + timedelta(days=1), until)
            return pl.concat([self._lists(index, begin, middle), later])
        if len(raw) >= _LIST_LIMIT:
            raise SourceError(
                f"tushare: index_weight for {index.dotted} returned {len(raw)} rows for {begin} "
                "alone, the server's row limit: the list may be cut off. Give the constituents "
                "as a file instead: data.universe."
            )
        columns = {"con_code": "code", "trade_date": "day"}
        table = self._table(
            raw, columns, index.dotted, "index_weight", text=("code",), day="%Y%m%d"
        )
        return table.select(pl.col("code").cast(pl.String), "day")

    def _index_bars(self, symbol: str) -> pl.DataFrame:
        index = self._index(symbol)
        function = "index_daily" if self._freq == "1d" else "idx_mins"
        return self._quotes(function, index, index.dotted, ("close",), self._start)

    def _extras(self) -> tuple[str | None, ...]:
        return (self._benchmark, self._membership_index)

    def _bars(self, symbol: str, first: datetime | None) -> pl.DataFrame:
        share = self._shares[symbol]
        start = first.date() if first else self._start
        if self._freq == "1d":
            columns = (*_PRICES, "pre_close", "vol", "amount")
            bars = self._quotes("daily", share, symbol, columns, start)
            bars = bars.with_columns(amount=pl.col("amount") * _THOUSAND)
        else:
            bars = self._quotes("stk_mins", share, symbol, (*_PRICES, "vol", "amount"), start)
        if bars.is_empty():
            raise self._nothing(symbol, first)
        bars = bars.rename({"vol": "volume"}).with_columns(symbol=pl.lit(symbol))
        unit = _LOT if self._freq == "1d" else 1.0
        bars = self._in_shares(bars, unit, symbol)
        if self._freq != "1d":
            bars = self._fold_opening_auction(bars)
        factors = self._quotes("adj_factor", share, symbol, ("adj_factor",), start)
        known = factors.select(day=pl.col("time").dt.date(), factor="adj_factor")
        days = bars["time"].dt.date().unique().sort()
        missing = days.filter(~days.is_in(known["day"].implode()))
        if missing.len():
            raise SourceError(
                f"tushare: adj_factor has no value for {symbol} on {missing.len()} of "
                f"{days.len()} trading days, first {missing[0]}. The factor of a fresh day may "
                "come late: try again later, or set data.end to the day before."
            )
        bars = self._join_latest_day(bars, known)
        return self._join_latest_day(bars, self._special_treatment(share, symbol))

    def _quotes(
        self, function: str, share: AShare, symbol: str, columns: Sequence[str], start: date | None
    ) -> pl.DataFrame:
        """One table for one code, in as many requests as needed: time, `columns` and row."""
        freq: Freq = self._freq if function.endswith("mins") else "1d"
        stamp = "trade_date" if freq == "1d" else "trade_time"
        form = "%Y%m%d" if freq == "1d" else "%Y-%m-%d %H:%M:%S"
        pieces = []
        for begin, until in self._spans(start or _FIRST_DAY, _DAYS_AT_ONCE[freq]):
            raw = self._query(
                *(function, symbol),
                ts_code=share.dotted,
                start_date=datetime.combine(begin, time.min).strftime(form),
                end_date=datetime.combine(until, time.max).strftime(form),
                **({} if freq == "1d" else {"freq": freq}),
            )
            if len(raw) >= _ROW_LIMIT[freq]:
                raise SourceError(
                    f"tushare: {function} for {symbol} returned {len(raw)} rows for {begin} to "
                    f"{until}, its row limit: the answer may be cut off. Please report it."
                )
            wanted = {stamp: "time", **{c: c for c in columns}}
            pieces.append(self._table(raw, wanted, symbol, function, time=form))
        return pl.concat(pieces)

    def _special_treatment(self, share: AShare, symbol: str) -> pl.DataFrame:
        """Day by day on which the name changed: day and st, whether the new one carries ST."""
        fields = "ts_code,name,start_date,end_date,ann_date,change_reason"
        raw = self._query("namechange", symbol, ts_code=share.dotted, fields=fields)
        columns = {"name": "name", "start_date": "day"}
        table = self._table(raw, columns, symbol, "namechange", text=("name",), day="%Y%m%d")
        table = table.drop_nulls("day")
        marked = [bool(_SPECIAL_TREATMENT.match(name or "")) for name in table["name"]]
        return table.select("day", st=pl.Series(marked, dtype=pl.Boolean))

    def _query(self, function: str, symbol: str, **arguments: str) -> Any:  # noqa: ANN401
        def call() -> Any:  # noqa: ANN401
            frame = getattr(self._client, function)(**arguments)
            if frame is None or len(frame.columns) == 0:
                # The HTTP request failed, and the library hid it.
                raise OSError("the server answered the HTTP request with an error")
            return frame

        return self._ask(call, symbol, function)

    def _new_client(self) -> Any:  # noqa: ANN401
        module = super()._new_client()
        self._token = Secrets().require("tushare_token").get_secret_value()
        return module.pro_api(self._token)

    def _redact(self, text: str) -> str:
        return text.replace(self._token, "***") if self._token else text


def from_config(config: Config) -> TushareSource:
    return TushareSource.from_config(config, membership_index=config.data.membership_index)


def _intervals(lists: pl.DataFrame) -> pl.DataFrame:
    """Turn dated lists (code, day) into symbol, start, end; end exclusive, null: still in."""
    days = lists.select("day").unique().sort("day").with_row_index("k")
    after = days.select(k=pl.col("k"), end="day")
    runs = (
        lists.join(days, on="day")
        .sort("code", "k")
        .with_columns(
            run=(pl.col("k").cast(pl.Int64).diff().fill_null(1) != 1).cum_sum().over("code")
        )
        .group_by("code", "run", maintain_order=True)
        .agg(start=pl.col("day").min(), k=pl.col("k").max() + 1)
    )
    return (
        runs.join(after, on="k", how="left")
        .select(symbol="code", start="start", end="end")
        .sort("symbol", "start")
    )
