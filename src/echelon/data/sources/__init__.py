"""Sources of market data. `open_source` makes the one a configuration names.

A source is one small protocol, one file each; `examples/source.py` shows how to add one, and
`echelon.sources` lists them. It reads and does not judge: it turns what it finds into canonical
bars (`data.bars`) and says where each row came from; `data.validate` judges the rows.

Each is imported when it is opened: a vendor's library costs nothing to those who do not use it. An
option that a source cannot follow is refused.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import polars as pl

from echelon.config import Config, DataConfig
from echelon.data.bars import RawFrame
from echelon.errors import ConfigError, Problem
from echelon.sources import SOURCES, SourceInfo
from echelon.types import Freq

_OPTIONS = ("columns", "price_basis", "symbols", "membership_index", "qlib_market")
"""What only some sources read; elsewhere it must not be set."""


@runtime_checkable
class Source(Protocol):
    """Where bars come from. What a source has nothing to say about answers 'none' here."""

    @abstractmethod
    def info(self) -> SourceInfo:
        """Describe the data without reading all of it."""

    @abstractmethod
    def frames(self, since: Mapping[str, datetime] | None = None) -> Iterator[RawFrame]:
        """Yield the bars in pieces that fit in memory.

        `since` maps symbol → time of the last bar already stored; an incremental source then
        yields from that bar on, *including* it (the overlap lets the store join adjustment
        factors), any other source may ignore it.
        """

    def problems(self) -> list[Problem]:
        """Rows that could not even be read as bars (an unparsable date, say), after `frames`."""
        return []

    def rejected_rows(self) -> pl.DataFrame | None:
        """The rows of `problems` as they stood: file, row, problem, cells; or None."""
        return None

    def instruments(self) -> pl.DataFrame | None:
        """Facts about symbols: symbol, listed, delisted (Date, nullable), reason, name; or None.

        `delisted` is the first day on which the symbol no longer trades. Columns of which the
        source knows nothing may be left out.
        """
        return None

    def membership(self) -> pl.DataFrame | None:
        """Index membership: symbol, start, end (Date; end exclusive, null = still in); or None."""
        return None

    def benchmark(self) -> pl.DataFrame | None:
        """The benchmark index: time (Datetime us), close (Float64); or None."""
        return None


class PathSource(Source):
    """Base of the sources that read files; timezone: of their times, None: the calendar's."""

    def __init__(
        self, path: Path, *, freq: Freq = "1d", calendar: str = "auto", timezone: str | None = None
    ) -> None:
        self._path = path
        self._freq: Freq = freq
        self._wanted_calendar = calendar
        self._wanted_timezone = timezone

    @classmethod
    def from_config(cls, config: Config, **options: Any) -> Self:  # noqa: ANN401 (of the source)
        """The source of the `data` section; `options`: what this one takes besides the rest."""
        data = config.data
        if data.path is None:
            raise ConfigError(
                f"data.source is {data.source!r} but data.path is not set. Add `-o data.path=FILE`."
            )
        market: dict[str, Any] = {"calendar": data.calendar, "timezone": data.timezone}
        return cls(data.path, freq=data.freq, **market, **options)


def open_source(config: Config) -> Source:
    """Make the source `data.source` names, from the `data` section."""
    data = config.data
    facts = SOURCES.get(data.source)
    if facts is None:
        raise ConfigError(
            f"data.source {data.source!r} cannot be imported from: it names a dataset that "
            "is in the store already."
        )
    default = DataConfig()
    for option in _OPTIONS:
        value = getattr(data, option)
        if value != getattr(default, option) and not facts.follows(option):
            readers = ", ".join(name for name, reader in SOURCES.items() if reader.follows(option))
            raise ConfigError(
                f"data.{option} is {value!r}, but data.source {data.source!r} does not read it "
                f"(only {readers} do). Leave data.{option} out."
            )
    module = importlib.import_module(f"{__name__}.{facts.module}")
    from_config: Callable[[Config], Source] = module.from_config
    source = from_config(config)
    for option in ("freq", "calendar", "timezone") if facts.kind != "files" else ():
        wanted, own = getattr(data, option), getattr(source.info(), option)
        if wanted not in (None, "auto", own):
            raise ConfigError(
                f"data.{option} is {wanted!r}, but the bars of data.source {data.source!r} have "
                f"{own!r} and no other. Leave data.{option} out."
            )
    return source
