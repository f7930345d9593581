"""Sources of market data. `open_source` makes the one a configuration names.

Each source is imported when it is opened: a vendor's library, or torch-sized dependencies, cost
nothing to those who do not use them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from echelon.config import Config
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
    return maker(config)


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
    return SyntheticSource(synthetic, seed, config.data.freq)


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
