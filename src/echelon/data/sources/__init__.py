"""Sources of market data. `open_source` makes the one a configuration names.

Each source is imported when it is opened: a vendor's library, or torch-sized dependencies, cost
nothing to those who do not use them. An option that a source cannot follow is refused: bars that
silently differ from what was asked for are worse than none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from echelon.config import Config, DataConfig
from echelon.data.calendars import FROM_DATA
from echelon.data.sources._protocol import Source
from echelon.errors import ConfigError

__all__ = ["Source", "open_source"]


def open_source(config: Config) -> Source:
    """Make the source `data.source` names, from the `data` section."""
    maker = _MAKERS.get(config.data.source)
    if maker is None:
        raise ConfigError(
            f"data.source {config.data.source!r} cannot be imported from: it names a dataset that "
            "is in the store already."
        )
    _refuse_unread(config.data)
    source = maker(config)
    if config.data.source in _OWN_MARKET:
        _refuse_other_market(config.data, source)
    return source


def _refuse_unread(data: DataConfig) -> None:
    """Refuse options that are set and that the source does not read."""
    default = DataConfig()
    for option, readers in _READ_BY.items():
        value = getattr(data, option)
        if value != getattr(default, option) and data.source not in readers:
            raise ConfigError(
                f"data.{option} is {value!r}, but data.source {data.source!r} does not read it "
                f"(only {', '.join(readers)} do). Leave data.{option} out."
            )


def _refuse_other_market(data: DataConfig, source: Source) -> None:
    """Refuse a calendar, time zone or length of bars that is not the source's own."""
    info = source.info()
    asked = {
        "freq": (data.freq, info.freq),
        "calendar": (data.calendar, info.calendar),
        "timezone": (data.timezone, info.timezone),
    }
    for option, (wanted, own) in asked.items():
        if wanted not in (None, "auto", own):
            raise ConfigError(
                f"data.{option} is {wanted!r}, but the bars of data.source {data.source!r} have "
                f"{own!r} and no other. Leave data.{option} out."
            )


def _path(config: Config) -> Path:
    path = config.data.path
    if path is None:
        raise ConfigError(
            f"data.source is {config.data.source!r} but data.path is not set. "
            "Add `-o data.path=FILE`."
        )
    return path


def _sample(config: Config) -> Source:
    from echelon.data.sources.sample import SampleSource

    return SampleSource()


def _synthetic(config: Config) -> Source:
    from echelon.data.sources.synthetic import SyntheticSource

    synthetic = config.data.synthetic
    seed = config.seed if synthetic.seed is None else synthetic.seed
    calendar = config.data.calendar
    if calendar == FROM_DATA:
        raise ConfigError(
            "data.calendar is 'data', but data.source 'synthetic' has no days of its own to take "
            "it from. Set an exchange code such as XNYS or XSHG, or 24/7."
        )
    return SyntheticSource(
        synthetic, seed, config.data.freq, "XNYS" if calendar == "auto" else calendar
    )


def _files(config: Config) -> Source:
    from echelon.data.sources.files import CsvSource, ParquetSource

    data = config.data
    kind = CsvSource if data.source == "csv" else ParquetSource
    return kind(
        _path(config),
        freq=data.freq,
        calendar=data.calendar,
        timezone=data.timezone,
        columns=data.columns,
        price_basis=data.price_basis,
    )


def _ticks(config: Config) -> Source:
    from echelon.data.sources.ticks import TicksSource

    data = config.data
    calendar = "XSHG" if data.calendar == "auto" else data.calendar
    return TicksSource(
        _path(config),
        freq=data.freq,
        calendar=calendar,
        timezone=data.timezone,
        columns=data.columns,
        parquet_dir=data.ticks.parquet_dir,
        price_scale=data.ticks.price_scale,
    )


def _qlib(config: Config) -> Source:
    from echelon.data.sources.qlib import QlibSource

    data = config.data
    return QlibSource(
        _path(config),
        freq=data.freq,
        calendar=data.calendar,
        timezone=data.timezone,
        market=data.qlib_market,
        benchmark=data.benchmark,
    )


def _vendor(config: Config) -> Source:
    data = config.data
    symbols = data.symbols or config.assets
    if not symbols:
        raise ConfigError(f"data.source is {data.source!r}: set data.symbols (or assets).")
    make: Callable[..., Source]
    if data.source == "yfinance":
        from echelon.data.sources.yfinance_ import YFinanceSource as make
    elif data.source == "akshare":
        from echelon.data.sources.akshare_ import AkshareSource as make
    else:
        from echelon.data.sources.tushare_ import TushareSource

        make = partial(TushareSource, membership_index=data.membership_index)
    return make(symbols, start=data.start, end=data.end, freq=data.freq, benchmark=data.benchmark)


_FILES = ("csv", "parquet")
_READ_BY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "columns": (*_FILES, "ticks"),
        "price_basis": _FILES,
        "symbols": ("yfinance", "akshare", "tushare"),
        "membership_index": ("tushare",),
        "qlib_market": ("qlib",),
    }
)
"""Option → the sources that read it; elsewhere it must not be set."""
_OWN_MARKET = ("sample", "synthetic", "yfinance", "akshare", "tushare")
"""Sources whose calendar and time zone are what they are."""

_MAKERS: dict[str, Callable[[Config], Source]] = {
    "sample": _sample,
    "synthetic": _synthetic,
    "csv": _files,
    "parquet": _files,
    "ticks": _ticks,
    "qlib": _qlib,
    "yfinance": _vendor,
    "akshare": _vendor,
    "tushare": _vendor,
}
