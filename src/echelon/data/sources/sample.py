"""The bundled sample: 20 US stocks and the S&P 500 index, 1990–2022, real and offline.

The prices ship inside skfolio: adjusted closes, no opens, no volume. Features that need those
are left out by name, fills happen at the next close, and lots and limits are off. The 20 stocks
were chosen by their later success, so every long-only result on them is flattered: it shows that
the software works, not that a strategy does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cache
from importlib import metadata

import polars as pl

from echelon.config import Config
from echelon.data.bars import RawFrame, conform
from echelon.data.sources import Source
from echelon.sources import SourceInfo

_VERSION = "1"


class SampleSource(Source):
    def info(self) -> SourceInfo:
        return SourceInfo(
            name="sample",
            freq="1d",
            calendar="XNYS",
            timezone="America/New_York",
            price_basis="adjusted",
            fields=frozenset({"close"}),
            fingerprint=f"skfolio-sp500-{metadata.version('skfolio')}-{_VERSION}",
        )

    def frames(self, since: Mapping[str, datetime] | None = None) -> Iterator[RawFrame]:
        long = (
            _load("load_sp500_dataset")
            .with_row_index("row")
            .unpivot(index=["time", "row"], variable_name="symbol", value_name="close")
            .sort("symbol", "time")
        )
        yield RawFrame(conform(long), "skfolio: sp500_dataset")

    def benchmark(self) -> pl.DataFrame | None:
        index = _load("load_sp500_index")
        return index.select("time", pl.col(index.columns[1]).cast(pl.Float64).alias("close"))


def from_config(config: Config) -> SampleSource:
    del config
    return SampleSource()


@cache
def _load(name: str) -> pl.DataFrame:
    from skfolio import datasets

    frame = pl.from_pandas(getattr(datasets, name)(), include_index=True)
    assert isinstance(frame, pl.DataFrame)
    first = frame.columns[0]
    return frame.rename({first: "time"}).with_columns(pl.col("time").cast(pl.Datetime("us")))
