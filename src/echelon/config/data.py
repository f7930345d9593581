"""Configuration of data: where bars come from, how they are stored and what joins them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Literal
from zoneinfo import available_timezones

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, field_validator

from echelon.config._base import Section
from echelon.sources import SourceName
from echelon.types import Freq, PriceBasis

_FIRST_DAY, _LAST_DAY = date(1900, 1, 1), date(2200, 1, 1)


def _on_or_off(value: object) -> object:
    """YAML reads a bare `on` or `off` as a truth value."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


class SyntheticConfig(Section):
    """The seeded market generator (`data.source: synthetic`)."""

    n_symbols: PositiveInt = 30
    """How many symbols ever exist, including those that list late or delist."""
    n_days: PositiveInt = 1000
    """How many sessions to generate, from `start` on."""
    start: date = date(2015, 1, 5)
    """First session."""
    seed: NonNegativeInt | None = None
    """Seed of the generator; null takes the run's `seed`."""
    delistings: float = Field(default=0.1, ge=0, le=1)
    """Share of symbols that delist before the end."""
    late_listings: float = Field(default=0.2, ge=0, le=1)
    """Share of symbols that list after the start."""
    suspension_rate: float = Field(default=0.002, ge=0, lt=1)
    """Probability per symbol and day that a suspension of several days begins."""
    split_rate: float = Field(default=0.0005, ge=0, lt=1)
    """Probability per symbol and day of a share split."""
    dividend_yield: float = Field(default=0.015, ge=0, lt=1)
    """Annual cash dividend as a share of the price, paid once a year."""
    minutes_per_day: PositiveInt = 240
    """Minute bars in a session; the daily bar is exactly their aggregate."""
    index_size: PositiveInt = 20
    """How many symbols are in the index; its membership changes over time."""

    def _contradictions(self) -> Iterator[str]:
        if not _FIRST_DAY <= self.start <= _LAST_DAY:
            yield f"start ({self.start}) must be from {_FIRST_DAY} to {_LAST_DAY}"
        fits = int((_LAST_DAY - self.start).days * 0.65) + 1  # sessions a day, holidays left out
        if self.n_days > fits:
            yield (
                f"n_days ({self.n_days:,}) sessions from {self.start} end after {_LAST_DAY}, where "
                f"calendars end; at most {fits:,} fit"
            )


class TicksConfig(Section):
    """Tick files (`data.source: ticks`)."""

    price_scale: float | None = Field(default=None, gt=0)
    """Prices in the file times this are money; null: 0.0001 for Wind's whole numbers, else 1."""
    parquet_dir: Path | None = None
    """Also write the ticks themselves, typed, as Parquet files in this directory."""


class ExogenousConfig(Section):
    """One file of macro or sentiment series with publication times."""

    path: Path
    """CSV or Parquet with columns series, period, published, value and, optionally, symbol."""
    series: tuple[str, ...] = ()
    """Which series to use; empty: all in the file."""
    max_age_days: Annotated[int, Field(gt=0, le=100_000)] | None = None
    """A value older than this (since publication) counts as missing; null: never."""


class CacheConfig(Section):
    """The content-addressed cache of prepared features."""

    enabled: bool = True
    """Look results up before computing them, and keep what was computed."""
    dir: Path = Path("cache")
    """Directory of the local cache."""
    max_gb: float = Field(default=20.0, gt=0)
    """Least recently used entries of the local cache are removed beyond this size."""
    redis: bool = False
    """Also use the Redis at ECHELON_REDIS_URL (the URL may hold a password: environment only).
    On another machine it is used only with a key in ECHELON_CACHE_KEY or with `redis_trusted`."""
    redis_trusted: bool = False
    """Use a Redis of another machine without a key: whoever can write to it decides what is
    learned from."""


class DataConfig(Section):
    """Where bars come from and how they become a panel."""

    source: SourceName = "sample"
    """Which source: see the guide to sources. `store` reads `dataset` as imported before."""
    path: Path | None = None
    """File or directory of a file source (csv, parquet, ticks, qlib)."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Your column name → ours, for columns whose name is not recognised."""
    price_basis: PriceBasis | Literal["auto"] = "auto"
    """What the file's OHLC are. auto: raw where there is a pre_close or factor column,
    split_adjusted where there is an adj_close, otherwise adjusted."""
    store: Path = Path("store")
    """Directory of the Parquet store."""
    dataset: str | None = None
    """Name in the store; null: made from the source and its fingerprint."""
    freq: Freq = "1d"
    """Length of a bar."""
    calendar: str = "auto"
    """Exchange code (XNYS, XSHG), 24/7, or data (the days that occur). auto: the source's own."""
    timezone: str | None = None
    """Time zone of the exchange; null: the calendar's. Times with an offset are converted."""
    start: date | None = None
    """First day to use; history before it still warms indicators up."""
    end: date | None = None
    """Last day to use."""
    symbols: tuple[str, ...] = ()
    """What a vendor source downloads; empty: `assets`."""
    benchmark: str | None = None
    """Symbol of the benchmark index: in `benchmark_path`, or at the vendor."""
    benchmark_path: Path | None = None
    """CSV or Parquet file of index bars."""
    universe: Path | None = None
    """CSV or Parquet of membership intervals: symbol, start, end."""
    membership_index: str | None = None
    """Index whose constituents over time are the universe, at a vendor that has them (tushare)."""
    instruments: Path | None = None
    """CSV or Parquet of facts: symbol, listed, delisted, reason, name."""
    limits: Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_or_off)] = "auto"
    """Daily price limits. auto: on for raw A-share prices (calendar XSHG), off otherwise."""
    delist_after: PositiveInt = 250
    """A symbol without a bar for this many sessions counts as delisted from then on, even if
    `instruments` gives a later date: that date was not known yet."""
    exogenous: tuple[ExogenousConfig, ...] = ()
    """Macro or sentiment series, joined as of what was known."""
    qlib_market: str = "all"
    """Which instruments file of a Qlib directory: all, or csi300 …, whose intervals are the
    membership."""
    ticks: TicksConfig = TicksConfig()
    """How tick files are read."""
    synthetic: SyntheticConfig = SyntheticConfig()
    """Parameters of the synthetic market."""
    cache: CacheConfig = CacheConfig()
    """The cache of prepared features."""

    @field_validator("calendar")
    @classmethod
    def _calendar_exists(cls, value: str) -> str:
        if value in ("auto", "data", "24/7"):
            return value
        import exchange_calendars

        if value not in exchange_calendars.get_calendar_names(include_aliases=False):
            raise ValueError(
                f"unknown calendar {value!r}; use an exchange code such as XNYS or XSHG, "
                "24/7, data or auto"
            )
        return value

    @field_validator("timezone")
    @classmethod
    def _timezone_exists(cls, value: str | None) -> str | None:
        known = available_timezones()
        if value is not None and value not in known:
            raise ValueError(f"unknown time zone {value!r}; {_near_zone(value, known)}")
        return value


def _near_zone(value: str, known: set[str]) -> str:
    """A suggestion for a zone that is not there: also by its city alone, in any case."""
    by_name = {name.casefold(): name for name in sorted(known)}
    by_city = {name.rpartition("/")[2].casefold(): name for name in sorted(known) if "/" in name}
    wanted = value.strip().casefold().replace(" ", "_")
    for names in (by_name, by_city):
        near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.75)
        if near:
            return f"did you mean {names[near[0]]!r}?"
    return "use an IANA name such as Asia/Shanghai, America/New_York or UTC"
