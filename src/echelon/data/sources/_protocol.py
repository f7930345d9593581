"""What a source is: one small protocol, one file each; `_template.py` shows how to add one.

A source reads; it does not judge. It turns what it finds into canonical bars (`data.bars`) and
says where each row came from; `data.validate` judges the rows and `data.importing` writes the
good ones to the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Protocol, runtime_checkable

import polars as pl

from echelon.data.bars import RawFrame, SourceInfo
from echelon.types import Problem


@runtime_checkable
class Source(Protocol):
    """Where bars come from."""

    def info(self) -> SourceInfo:
        """Describe the data without reading all of it."""
        ...

    def frames(self, since: Mapping[str, datetime] | None = None) -> Iterator[RawFrame]:
        """Yield the bars in pieces that fit in memory.

        `since` maps symbol → time of the last bar already stored; an incremental source then
        yields from that bar on, *including* it (the overlap lets the store join adjustment
        factors), any other source may ignore it.
        """
        ...

    def problems(self) -> list[Problem]:
        """Rows that could not even be read as bars (an unparsable date, say), after `frames`."""
        ...

    def rejected(self) -> pl.DataFrame | None:
        """The rows of `problems` as they stood: file, row, problem, cells; or None."""
        ...

    def instruments(self) -> pl.DataFrame | None:
        """Facts about symbols: symbol, listed, delisted (Date, nullable), reason, name; or None.

        `delisted` is the first day on which the symbol no longer trades.
        """
        ...

    def membership(self) -> pl.DataFrame | None:
        """Index membership: symbol, start, end (Date; end exclusive, null = still in); or None."""
        ...

    def benchmark(self) -> pl.DataFrame | None:
        """The benchmark index: time (Datetime us), close (Float64); or None."""
        ...
