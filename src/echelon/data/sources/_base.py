"""What a source is: one small protocol, one file each; `examples/source.py` shows how to add one.

A source reads; it does not judge. It turns what it finds into canonical bars (`data.bars`) and
says where each row came from; `data.validate` judges the rows and `data.importing` writes the
good ones to the store.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Protocol, runtime_checkable

import polars as pl

from echelon.config import Config
from echelon.data.bars import RawFrame, SourceInfo
from echelon.errors import ConfigError, Problem


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

        `delisted` is the first day on which the symbol no longer trades.
        """
        return None

    def membership(self) -> pl.DataFrame | None:
        """Index membership: symbol, start, end (Date; end exclusive, null = still in); or None."""
        return None

    def benchmark(self) -> pl.DataFrame | None:
        """The benchmark index: time (Datetime us), close (Float64); or None."""
        return None


def required_path(config: Config) -> Path:
    """`data.path`, which a source of files cannot do without."""
    path = config.data.path
    if path is None:
        raise ConfigError(
            f"data.source is {config.data.source!r} but data.path is not set. "
            "Add `-o data.path=FILE`."
        )
    return path
