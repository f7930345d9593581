"""What the vendor sources share: checked frames, symbols, finished bars, one way to fail.

A vendor's library changes its columns, returns nothing for a symbol it does not know and quotes
a bar that is still trading. None of that may pass in silence, so every request goes through
`Vendor._ask`, every frame through `Vendor._table`, and bars that may still change are left out: a
later update brings them. A new vendor is a file with a subclass, and its line in `echelon.sources`.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import logging
import random
import re
import time as clock
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Self
from zoneinfo import ZoneInfo

import polars as pl
import pyarrow as pa

from echelon.config import Config
from echelon.data.bars import RawFrame, conform
from echelon.data.calendars import MINUTES
from echelon.data.sources import Source
from echelon.data.sources._times import drop_absurd
from echelon.errors import ConfigError, EchelonError, SourceError, shorten
from echelon.sources import SourceInfo
from echelon.types import Freq, PriceBasis

log = logging.getLogger(__name__)

_CHANGED = (
    "The vendor has changed its answer; install the versions Echelon is tested with: "
    "`pip install 'echelon[vendors]'`."
)

BAR: Mapping[Freq, timedelta] = {freq: timedelta(minutes=m) for freq, m in MINUTES.items()}


FailureKind = Literal["fatal", "transient", "rate limit"]
"""What a failure calls for: giving up; another try, as the network or the server stumbled; or one
after the vendor's window has passed, as there were too many calls."""


class KnownFailure(NamedTuple):
    """A failure by what names it: a class of errors, words of the message, or `HTTP 404`."""

    pattern: str
    kind: FailureKind | None  # None: as for any error of its class
    advice: str = ""  # what the user can do once it is final; empty: what the base class says


@dataclass(frozen=True)
class Retry:
    """How often and how patiently to call a vendor again after a transient failure.

    Waits double from `base` up to `cap`, less a random share, so that clients that failed together
    do not return together. A rate limit is waited out in full.
    """

    attempts: int = 5  # the first included
    base: float = 1.0  # seconds, as are the next two
    cap: float = 60.0
    rate_limit_wait: float = 61.0  # vendors count calls per minute
    sleep: Callable[[float], None] = clock.sleep
    jitter: Callable[[], float] = random.SystemRandom().random  # in [0, 1)

    def wait(self, attempt: int, kind: FailureKind) -> float:
        """Seconds to wait after failure number `attempt` (from 1)."""
        if kind == "rate limit":
            return self.rate_limit_wait + self.base * self.jitter()
        full = min(self.cap, self.base * 2.0 ** (attempt - 1))
        return full * (1.0 - 0.5 * self.jitter())


class Vendor(Source):
    """Base of the vendor sources: the query, the client and how requests are made."""

    name: ClassVar[str]
    package: ClassVar[str]
    price_basis: ClassVar[PriceBasis] = "raw"
    fields: ClassVar[frozenset[str]]
    """The columns of `bars.SCHEMA` that this source fills; pre_close in daily bars alone."""
    failures: ClassVar[tuple[KnownFailure, ...]] = ()
    settled: ClassVar[time] = time(15, 30)
    """Local time from which the day's bar no longer changes; around the clock: the next day."""

    def __init__(
        self,
        symbols: Sequence[str],
        *,
        start: date | None,
        end: date | None,
        freq: Freq,
        benchmark: str | None = None,
        client: Any = None,  # noqa: ANN401 (a vendor's module or api object)
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        retry: Retry = Retry(),  # noqa: B008 (frozen)
    ) -> None:
        """`start` and `end`: days, both included; null: all there is; now: with a time zone."""
        if not symbols:
            raise ConfigError(
                f"{self.name}: no symbols to download. List them in data.symbols or assets."
            )
        twice = sorted({s for s in symbols if list(symbols).count(s) > 1})
        if twice:
            raise SourceError(
                f"{self.name}: listed more than once: {', '.join(twice)}. Name each symbol once."
            )
        if start is not None and end is not None and start > end:
            raise SourceError(f"{self.name}: start {start} is after end {end}. Swap them.")
        self._symbols = tuple(symbols)
        self._start, self._end, self._freq = start, end, freq
        self._benchmark = benchmark
        self._given_client = client
        self._now, self._retry = now, retry

    @classmethod
    def from_config(cls, config: Config, **options: Any) -> Self:  # noqa: ANN401 (of the vendor)
        """The source of the `data` section; `options`: what this vendor takes besides the rest."""
        data = config.data
        query: dict[str, Any] = {"start": data.start, "end": data.end, "freq": data.freq}
        symbols = data.symbols or config.assets
        return cls(symbols, benchmark=data.benchmark, **query, **options)

    @abstractmethod
    def _bars(self, symbol: str, first: datetime | None) -> pl.DataFrame:
        """Return the bars of `symbol` from `first` on (null: from `start`), with `row`."""

    @abstractmethod
    def _index_bars(self, symbol: str) -> pl.DataFrame:
        """Return time and close of the index `symbol`, from `start` on."""

    @abstractmethod
    def _market(self) -> tuple[str, str]:
        """Calendar and time zone of the symbols."""

    def _extras(self) -> tuple[str | None, ...]:
        """What else the answer depends on."""
        return (self._benchmark,)

    def _judge(self, error: Exception) -> tuple[FailureKind, str]:
        """What a failed request calls for, and what the user can do where that is nothing more."""
        status = getattr(getattr(error, "response", None), "status_code", None)
        status = status if isinstance(status, int) else None  # None: there was no answer
        names = " ".join(c.__name__ for c in type(error).__mro__)  # a vendor's own are not imported
        text = f"{names} HTTP {status} {error}"
        known = next((f for f in self.failures if re.search(f.pattern, text)), None)
        # Every HTTP library in use derives its network errors from OSError.
        network = isinstance(error, OSError)
        kind: FailureKind = "fatal"
        if known is not None and known.kind is not None:
            kind = known.kind
        elif status == 429:
            kind = "rate limit"
        elif network and (status == 408 or not 400 <= (status or 0) < 500):
            kind = "transient"
        if known is not None and known.advice:
            return kind, known.advice
        if network and status != 404:
            return kind, "Check the network connection and try again; nothing was imported."
        return kind, (
            "Check that the symbol exists; if it does, the vendor's answer has changed: compare "
            f"the installed version with {self.package}."
        )

    def info(self) -> SourceInfo:
        calendar, timezone = self._market()
        query = [self.name, self.package, self._symbols, self._freq, *self._extras()]
        days = [self._start, self._end, self._local_now().date()]
        text = json.dumps([*query, *(d and d.isoformat() for d in days)], ensure_ascii=False)
        return SourceInfo(
            name=self.name,
            freq=self._freq,
            calendar=calendar,
            timezone=timezone,
            price_basis=self.price_basis,
            fields=self.fields - ({"pre_close"} if self._freq != "1d" else set()),
            fingerprint=hashlib.sha256(text.encode()).hexdigest(),
        )

    def frames(self, since: Mapping[str, datetime] | None = None) -> Iterator[RawFrame]:
        for symbol in self._symbols:
            first = (since or {}).get(symbol)
            with reading_answers(self.name, symbol):
                bars = self._drop_unfinished(self._bars(symbol, first), symbol)
            if first is not None:
                bars = bars.filter(pl.col("time") >= first)
            if bars.is_empty():
                raise self._nothing(symbol, first)
            yield RawFrame(conform(bars.sort("time")), f"{self.name}:{symbol}")

    def benchmark(self) -> pl.DataFrame | None:
        if self._benchmark is None:
            return None
        with reading_answers(self.name, "the index"):
            bars = self._drop_unfinished(self._index_bars(self._benchmark), self._benchmark)
            if bars.is_empty():
                raise self._nothing(self._benchmark)
            return bars.select("time", "close").sort("time")

    def _drop_unfinished(self, bars: pl.DataFrame, symbol: str) -> pl.DataFrame:
        """Leave out bars after `end` and bars that may still change."""
        now = self._local_now()
        if self._freq == "1d":
            settled = self._market()[0] != "24/7" and now.time() >= self.settled
            last = now.date() if settled else now.date() - timedelta(days=1)
            done = pl.col("time").dt.date() <= last
        else:
            done = pl.col("time") <= now
        kept = bars.filter(done)
        lost = bars.height - kept.height
        if lost:
            log.info("%s:%s: %d unfinished bar(s) left out", self.name, symbol, lost)
        return kept if self._end is None else kept.filter(pl.col("time").dt.date() <= self._end)

    def _local_now(self) -> datetime:
        return self._now().astimezone(ZoneInfo(self._market()[1])).replace(tzinfo=None)

    @property
    def _client(self) -> Any:  # noqa: ANN401
        if self._given_client is None:
            self._given_client = self._new_client()
        return self._given_client

    def _new_client(self) -> Any:  # noqa: ANN401
        module = self.package.partition("==")[0]
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise SourceError(
                f"{self.name}: the package {error.name!r} is not installed. Install the vendor "
                f"libraries with `pip install 'echelon[vendors]'` (tested with {self.package})."
            ) from error

    def _ask(self, call: Callable[[], Any], symbol: str, what: str) -> Any:  # noqa: ANN401
        """Make one request, trying again where that can help; a failure names the symbol."""
        for attempt in itertools.count(1):
            try:
                return call()
            except EchelonError:
                raise
            except Exception as error:
                kind, advice = self._judge(error)
                if kind == "fatal" or attempt >= self._retry.attempts:
                    tried = "" if kind == "fatal" else f" {attempt} times"
                    raise SourceError(
                        f"{self.name}: {what} failed{tried} for {symbol}: "
                        f"{type(error).__name__}: {self._redact(str(error))}. {advice}"
                    ) from error
                pause = self._retry.wait(attempt, kind)
                log.warning(
                    "%s:%s %s failed (%s, %s); attempt %d of %d follows in %.1f s",
                    *(self.name, symbol, what, kind, type(error).__name__),
                    *(attempt + 1, self._retry.attempts, pause),
                )
            self._retry.sleep(pause)

    def _call(self, function: str, symbol: str, /, **arguments: str) -> Any:  # noqa: ANN401
        """Call a function of the vendor's library by name, as `_ask` does."""
        return self._ask(lambda: getattr(self._client, function)(**arguments), symbol, function)

    def _table(
        self,
        frame: Any,  # noqa: ANN401 (a pandas frame)
        columns: Mapping[str, str],
        symbol: str,
        call: str,
        *,
        text: Sequence[str] = (),
        **times: str,
    ) -> pl.DataFrame:
        """Pick `columns` (theirs → ours) of an answer; what is not there or is odd is an error.

        text: ours that stay as they are
        times: ours → the form of their text; days become Date, `time` Datetime
        Everything else becomes Float64; `row` counts the vendor's rows.
        """
        names = [str(c) for c in getattr(frame, "columns", ())]
        missing = [c for c in columns if names.count(c) != 1]
        if missing:
            have = shorten(", ".join(names)) or "none"
            raise SourceError(
                f"{self.name}: {call} for {symbol} came without column {missing[0]!r} (columns: "
                f"{have}). {_CHANGED}"
            )
        table = pl.from_pandas(frame[list(columns)].reset_index(drop=True)).rename(dict(columns))
        nested = [c for c, kind in table.schema.items() if kind.is_nested() or kind == pl.Binary]
        if nested:
            raise TypeError(f"{nested[0]} of {call} is {table.schema[nested[0]]}")
        for column in set(table.columns) - set(text) - set(times):
            try:
                table = table.with_columns(pl.col(column).cast(pl.Float64))
            except pl.exceptions.PolarsError as error:
                raise SourceError(
                    f"{self.name}: column {column!r} of {symbol} should hold numbers but is "
                    f"{table.schema[column]} with other content ({shorten(error)}). {_CHANGED}"
                ) from error
        read = [self._times(table[column], form, symbol, call) for column, form in times.items()]
        return table.with_columns(read).with_row_index("row")

    def _times(self, cells: pl.Series, form: str, symbol: str, call: str) -> pl.Series:
        """A column of an answer as Date, `time` as Datetime; only days may be missing."""
        if isinstance(cells.dtype, pl.Date | pl.Datetime):
            read = drop_absurd(cells).cast(pl.Datetime("us"))
            written = cells.to_physical().cast(pl.String)
        else:
            written = cells.cast(pl.String)
            read = written.str.to_datetime(form, time_unit="us", strict=False)
        needed = cells.name == "time" or (written != "").fill_null(False)
        bad = written.filter(read.is_null() & needed)
        if bad.len():
            raise SourceError(
                f"{self.name}: {call} for {symbol} has the {cells.name} {bad[0]!r}, expected the "
                f"form {form}. {_CHANGED}"
            )
        return read if cells.name == "time" else read.dt.date()

    @staticmethod
    def _join_latest_day(bars: pl.DataFrame, by_day: pl.DataFrame) -> pl.DataFrame:
        """Give each bar the row of `by_day` with the latest `day` that is not after it."""
        known = by_day.drop("row", strict=False).unique("day", keep="first", maintain_order=True)
        return (
            bars.with_columns(day=pl.col("time").dt.date())
            .sort("day", "time")
            .join_asof(known.sort("day"), on="day", strategy="backward")
            .drop("day")
        )

    def _redact(self, text: str) -> str:
        return text

    @property
    def _last_day(self) -> date:
        today = self._local_now().date()
        return min(self._end or today, today)

    def _spans(self, start: date, days: int) -> Iterator[tuple[date, date]]:
        """Cut `start` to the last day into spans of at most `days` days; there is always one."""
        while start + timedelta(days=days - 1) < self._last_day:
            yield start, start + timedelta(days=days - 1)
            start += timedelta(days=days)
        yield start, max(start, self._last_day)

    def _nothing(self, symbol: str, first: datetime | None = None, reason: str = "") -> SourceError:
        """The error for a symbol without bars; `reason`: what the vendor said about it."""
        said = f" The vendor says: {reason}." if reason else ""
        if first is not None:
            return SourceError(
                f"{self.name}: nothing for {symbol} from {first} on, not even the bar already "
                f"stored.{said} If the vendor dropped the symbol, take it out of data.symbols: its "
                "stored history stays; otherwise import again, without --update."
            )
        span = f"{self._start or 'the beginning'} to {self._end or 'today'}"
        return SourceError(
            f"{self.name}: no {self._freq} bars for {symbol} from {span}.{said} The symbol is "
            "unknown there, or has no trades in that span; check its spelling and the dates."
        )


@contextmanager
def reading_answers(vendor: str, what: str) -> Iterator[None]:
    """Blame the vendor for what its answers (for `what`) make of our code; also a decorator."""
    try:
        yield
    except (
        *(pl.exceptions.PolarsError, pa.ArrowException),
        *(AttributeError, LookupError, OverflowError, TypeError, ValueError),
    ) as error:
        raise SourceError(
            f"{vendor}: the answer for {what} is no table of numbers, text and dates "
            f"({shorten(error)}). {_CHANGED}"
        ) from error


class AShare(NamedTuple):
    """A mainland symbol: six digits and its exchange (SH, SZ, BJ)."""

    code: str
    market: str

    @property
    def dotted(self) -> str:
        """As tushare writes it: 000001.SZ."""
        return f"{self.code}.{self.market}"

    @property
    def prefixed(self) -> str:
        """As sina and eastmoney's index pages write it: sz000001."""
        return f"{self.market.lower()}{self.code}"


_MARKETS = {"SH": "SH", "SZ": "SZ", "BJ": "BJ", "SS": "SH", "XSHG": "SH", "XSHE": "SZ"}


def a_share(symbol: str, vendor: str, *, index: bool = False) -> AShare:
    """Read 000001.SZ, 000001.XSHE, sz000001, SZ000001 or 000001.

    Without an exchange the number decides: a stock's 000xxx is Shenzhen's, an index's Shanghai's.
    """
    text = symbol.strip().upper()
    match = re.fullmatch(r"(?P<a>SH|SZ|BJ)?(?P<code>\d{6})(?:\.(?P<b>[A-Z]+))?", text)
    if match is not None:
        code, given = match["code"], match["b"] or match["a"]
        if given is None:
            return AShare(code, _market_of(code, index))
        if given in _MARKETS:
            return AShare(code, _MARKETS[given])
    raise SourceError(
        f"{vendor}: {symbol!r} is no A-share symbol. Write six digits and the exchange, such as "
        "000001.SZ or 600000.SH (also read: sz000001, 000001)."
    )


def _market_of(code: str, index: bool) -> str:
    if index:
        return "SZ" if code.startswith("39") else "SH"
    if code.startswith(("4", "8", "92")):
        return "BJ"
    return "SH" if code.startswith(("6", "9")) else "SZ"


class AShareVendor(Vendor):
    """A vendor of mainland shares: their market, and symbols in any of the usual spellings."""

    def _market(self) -> tuple[str, str]:
        return "XSHG", "Asia/Shanghai"

    @cached_property
    def _shares(self) -> dict[str, AShare]:
        """Each symbol, as the user writes it → its parts; two spellings of one are refused.

        So is a number that is no stock of its exchange: 000001.SH is an index, 000001.SZ a bank.
        """
        spelled: dict[AShare, str] = {}
        for symbol in self._symbols:
            share = a_share(symbol, self.name)
            if share.market != _market_of(share.code, index=False):
                raise SourceError(
                    f"{self.name}: {symbol!r} is no stock of its exchange (an index, perhaps). "
                    "Stocks are 6xxxxx.SH, 0xxxxx.SZ, 3xxxxx.SZ, 8xxxxx.BJ; an index goes to "
                    "data.benchmark."
                )
            if share in spelled:
                raise SourceError(
                    f"{self.name}: {spelled[share]!r} and {symbol!r} are the same stock. Name it "
                    "once."
                )
            spelled[share] = symbol
        return {symbol: share for share, symbol in spelled.items()}

    def _index(self, symbol: str) -> AShare:
        return a_share(symbol, self.name, index=True)

    def _in_shares(self, frame: pl.DataFrame, stated: float, symbol: str) -> pl.DataFrame:
        """Turn volume from the vendor's `stated` unit into shares.

        Value over volume must lie near the price: where it does not, the vendor's unit has changed.
        """
        scaled = frame.with_columns(volume=pl.col("volume") * stated)
        ratio = (
            scaled.filter(pl.col("volume") > 0, pl.col("amount") > 0, pl.col("close") > 0)
            .select((pl.col("amount") / pl.col("volume") / pl.col("close")).median())
            .item()
        )
        if ratio is not None and not 0.5 < ratio < 2.0:
            raise SourceError(
                f"{self.name}: volume and amount of {symbol} do not fit its prices: amount / "
                f"(volume × close) is {ratio:.3g} instead of about 1. The vendor's unit of volume "
                "or amount has changed; please report it."
            )
        return scaled

    def _fold_opening_auction(self, bars: pl.DataFrame) -> pl.DataFrame:
        """Merge the opening auction's bar, of 09:30 or before, into the session's first."""
        first = timedelta(hours=9, minutes=30) + BAR[self._freq]
        day = pl.col("time").dt.truncate("1d")
        early = pl.col("time") < day + first
        return (
            bars.sort("time")
            .with_columns(time=pl.when(early).then(day + first).otherwise(pl.col("time")))
            .group_by("time", maintain_order=True)
            .agg(
                pl.col("symbol", "row", "open").first(),
                pl.col("high").max(),
                pl.col("low").min(),
                pl.col("close").last(),
                pl.col("volume", "amount").sum(),
            )
        )
