"""`yfinance`: Yahoo's daily, 5-minute and 1-minute bars (library version 1.7.0).

Yahoo's open, high, low and close are adjusted for splits, not for dividends; `Adj Close` is
adjusted for both, so factor = Adj Close / Close. Intraday answers have no adjusted close of their
own: their bars take the factor of their day. Yahoo stamps an intraday bar with its start; ours
are stamped with their end.

Delisted symbols vanish from Yahoo: a universe downloaded here is one of survivors. Keep importing
what you follow, or use a source that lists the dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from typing import Any, ClassVar

import polars as pl

from echelon.data.sources._columns import NAMES
from echelon.data.sources._vendor import BAR, KnownFailure, Vendor
from echelon.errors import SourceError
from echelon.types import Freq, PriceBasis

_YAHOO = ("Open", "High", "Low", "Close", "Adj Close", "Volume")
_COLUMNS = {theirs: theirs.lower().replace(" ", "_") for theirs in _YAHOO}
_INTERVAL: Mapping[Freq, str] = {"1d": "1d", "5min": "5m", "1min": "1m"}

_REACH: Mapping[Freq, tuple[int, int]] = {"5min": (59, 59), "1min": (29, 7)}
"""Days back that Yahoo keeps, and days it answers at once (60, and 30 by 8, less a margin)."""

EXCHANGES: Mapping[str, tuple[str, str]] = {k: tuple(v) for k, v in NAMES["yahoo"].items()}
"""Yahoo's symbol suffix → calendar and time zone; none: United States."""


class YFinanceSource(Vendor):
    name: ClassVar[str] = "yfinance"
    package: ClassVar[str] = "yfinance==1.7.0"
    price_basis: ClassVar[PriceBasis] = "split_adjusted"
    settled: ClassVar[time] = time(18, 0)
    fields = frozenset({"open", "high", "low", "close", "volume", "factor"})
    failures = (
        KnownFailure(
            "YFRateLimitError",
            "rate limit",
            "Yahoo limits calls by address: wait an hour, or download fewer symbols.",
        ),
        KnownFailure(
            "YFTickerMissingError|HTTP 404",
            None,
            "Yahoo knows no such symbol (or has dropped it after a delisting); look it up there "
            "and correct data.symbols.",
        ),
        KnownFailure("YFDataException", "transient"),
    )

    def _index_bars(self, symbol: str) -> pl.DataFrame:
        return self._history(symbol, None)

    def _market(self) -> tuple[str, str]:
        markets = {exchange_of(s): s for s in self._symbols}
        if len(markets) > 1:
            (first, a), (second, b), *_ = markets.items()
            raise SourceError(
                f"yfinance: {a} trades at {first[0]} and {b} at {second[0]}. One dataset has one "
                "calendar: import the exchanges separately."
            )
        return next(iter(markets))

    def _bars(self, symbol: str, first: datetime | None) -> pl.DataFrame:
        bars = self._history(symbol, first)
        if self._freq == "1d":
            return bars
        begin, until = bars["time"].dt.date().sort()[[0, -1]]
        # A week more than the bars: each of them then has a daily factor at or before it.
        days, reason = self._request(symbol, "1d", begin - timedelta(days=7), until)
        if days is None:
            raise self._nothing(symbol, first, reason)
        return self._join_latest_day(
            bars.drop("factor"), days.select(day=pl.col("time").dt.date(), factor="factor")
        )

    def _history(self, symbol: str, first: datetime | None) -> pl.DataFrame:
        """Bars in as many requests as Yahoo's limits ask for."""
        pieces, reason = [], ""
        start = first.date() if first else self._start
        spans: Iterable[tuple[date | None, date]] = [(start, self._last_day)]
        if self._freq != "1d":
            reach, days = _REACH[self._freq]
            earliest = self._local_now().date() - timedelta(days=reach)
            if start is not None and start < earliest:
                self._refuse_depth(symbol, start, earliest, stored=first is not None)
            spans = self._spans(start or earliest, days)
        for begin, until in spans:
            bars, said = self._request(symbol, _INTERVAL[self._freq], begin, until)
            reason = said or reason
            if bars is not None:
                pieces.append(bars)
        if not pieces:
            raise self._nothing(symbol, first, reason)
        return pl.concat(pieces)

    def _refuse_depth(self, symbol: str, begin: date, earliest: date, *, stored: bool) -> None:
        why = "the stored bars end there" if stored else "data.start asks for it"
        remedy = (
            "The gap cannot be filled from Yahoo: import again, without --update."
            if stored
            else f"Set data.start to {earliest} or later, or use daily bars."
        )
        raise SourceError(
            f"yfinance: {symbol} is wanted from {begin} on ({why}), but Yahoo keeps "
            f"{self._freq} bars for {_REACH[self._freq][0]} days only, from {earliest} on. {remedy}"
        )

    def _request(
        self, symbol: str, interval: str, start: date | None, end: date
    ) -> tuple[pl.DataFrame | None, str]:
        """One answer of Yahoo's; without bars: None and what Yahoo said."""
        # Yahoo's end is exclusive. Without a start it would answer with one month.
        span = {"start": start.isoformat()} if start else {"period": "max"}
        span["end"] = (end + timedelta(days=1)).isoformat()

        def call() -> tuple[Any, str]:
            with _errors_shown(self._client):
                try:
                    frame = self._client.Ticker(symbol).history(
                        interval=interval, auto_adjust=False, actions=True, **span
                    )
                except Exception as error:
                    # A span without trades, a weekend say: not yet a reason to give up.
                    if type(error).__name__ != "YFPricesMissingError":
                        raise
                    return None, str(error)
            return (None, "") if frame.empty else (frame, "")

        frame, reason = self._ask(call, symbol, f"history({interval})")
        if frame is None:
            return None, reason
        bars = self._table(frame, _COLUMNS, symbol, f"history({interval})")
        # Indices trade on the clock of the market they measure.
        zone = self._market()[1] if symbol.startswith("^") else exchange_of(symbol)[1]
        given = str(getattr(frame.index, "tz", None))
        if given != zone:
            raise SourceError(
                f"yfinance: {symbol} came in time zone {given}, the import is in {zone}. Import "
                "symbols of one exchange at a time."
            )
        wall_clock = frame.index.tz_localize(None).to_numpy().astype("datetime64[us]")
        bars = bars.with_columns(time=pl.Series(wall_clock), symbol=pl.lit(symbol))
        if interval != "1d":
            bars = bars.with_columns(time=pl.col("time") + BAR[self._freq])
        # A row of nothing but an event (a dividend on a day without trade) is no bar.
        bars = bars.with_columns(pl.col(pl.Float64).fill_nan(None)).filter(
            pl.col("close").is_not_null()
        )
        factor = pl.col("adj_close") / pl.col("close")
        return bars.with_columns(factor=factor).drop("adj_close"), ""


from_config = YFinanceSource.from_config


def exchange_of(symbol: str) -> tuple[str, str]:
    """Calendar and time zone of a Yahoo symbol, by its suffix."""
    if symbol.upper().endswith("-USD"):
        return EXCHANGES["-USD"]
    suffix = symbol.rpartition(".")[2].upper() if "." in symbol else ""
    if suffix not in EXCHANGES or "=" in symbol:
        known = ", ".join(f".{s}" for s in EXCHANGES if s.isalpha())
        raise SourceError(
            f"yfinance: the exchange of {symbol!r} is not known. Known suffixes: {known}, -USD, "
            "and none for the United States (a share class is written BRK-B)."
        )
    return EXCHANGES[suffix]


@contextmanager
def _errors_shown(client: Any) -> Iterator[None]:  # noqa: ANN401
    """Make yfinance raise: by default it logs network errors and returns an empty frame."""
    debug = client.config.debug
    before = debug.hide_exceptions
    debug.hide_exceptions = False
    try:
        yield
    finally:
        debug.hide_exceptions = before
