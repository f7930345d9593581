"""Small markets for tests: bars made by hand or by a seed, and sources that serve them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from pathlib import Path

import numpy as np
import polars as pl

from echelon.config import Config, load_config
from echelon.data.bars import RawFrame, conform
from echelon.data.calendars import sessions
from echelon.data.sources import Source
from echelon.sources import SourceInfo

QTMRL = (
    *("AAPL", "MSFT", "NVDA", "CVX", "OXY", "AAL", "UAL", "DAL"),
    *("CCL", "RCL", "WYNN", "LVS", "AXP", "BAC", "JNJ", "GOOGL"),
)


def make_bars(
    symbols: Sequence[str] = ("AAA", "BBB", "CCC"),
    first: date = date(2015, 1, 2),
    last: date = date(2016, 12, 30),
    *,
    seed: int = 0,
    calendar: str = "XNYS",
    gaps: float = 0.0,
    late: Mapping[str, int] | None = None,
    gone: Mapping[str, int] | None = None,
) -> pl.DataFrame:
    """Daily random-walk bars with dividends in the factor; `gaps` is the share of missing bars.

    late: symbol → sessions missing at the start; gone: symbol → sessions missing at the end
    """
    rng = np.random.default_rng(seed)
    times = sessions(calendar, first, last)
    frames = []
    for symbol in symbols:
        n = len(times)
        close = 20 * np.exp(np.cumsum(rng.standard_t(4, n) * 0.012))
        open_ = close * np.exp(rng.normal(0, 0.005, n))
        high = np.maximum(open_, close) * (1 + rng.exponential(0.004, n))
        low = np.minimum(open_, close) * (1 - rng.exponential(0.004, n))
        factor = np.cumprod(np.where(np.arange(n) % 63 == 62, 1.005, 1.0))
        keep = rng.random(n) >= gaps
        keep[: (late or {}).get(symbol, 0)] = False
        keep[n - (gone or {}).get(symbol, 0) :] = False
        frame = pl.DataFrame(
            {
                "time": times,
                "symbol": [symbol] * n,
                "open": open_,
                "high": high,
                "low": low,
                "close": close,
                "volume": rng.integers(1_000, 100_000, n).astype(float),
                "factor": factor,
            }
        )
        frames.append(frame.filter(pl.Series(keep)))
    return pl.concat(frames)


class FrameSource(Source):
    """A source that serves a frame it was given, in as many pieces as asked."""

    def __init__(
        self,
        bars: pl.DataFrame,
        *,
        pieces: int = 1,
        membership: pl.DataFrame | None = None,
        instruments: pl.DataFrame | None = None,
        benchmark: pl.DataFrame | None = None,
        **info: object,
    ) -> None:
        self.bars = bars
        self.pieces = pieces
        self._tables = (membership, instruments, benchmark)
        fields = frozenset(c for c in bars.columns if c not in ("time", "symbol"))
        given: dict[str, object] = {
            "name": "frames",
            "freq": "1d",
            "calendar": "XNYS",
            "timezone": "America/New_York",
            "price_basis": "split_adjusted",
            "fields": fields,
            "fingerprint": "test",
        }
        self._info = SourceInfo(**(given | info))  # type: ignore[arg-type]

    def info(self) -> SourceInfo:
        return self._info

    def frames(self, since: Mapping[str, datetime] | None = None) -> Iterator[RawFrame]:
        size = -(-self.bars.height // self.pieces)
        numbered = self.bars.with_row_index("row")
        for k in range(self.pieces):
            yield RawFrame(conform(numbered.slice(k * size, size)), f"piece-{k}")

    def membership(self) -> pl.DataFrame | None:
        return self._tables[0]

    def instruments(self) -> pl.DataFrame | None:
        return self._tables[1]

    def benchmark(self) -> pl.DataFrame | None:
        return self._tables[2]


def write_qtmrl_parquet(path: Path, last: date = date(2016, 12, 30)) -> Path:
    """A small stand-in for the 16 stocks of the QTMRL configuration, two listing late."""
    bars = make_bars(QTMRL, last=last, late={"GOOGL": 120, "LVS": 60}, gaps=0.01)
    adjusted = bars.with_columns(adj_close=pl.col("close") * pl.col("factor") / 1.04)
    adjusted.rename({"time": "date"}).drop("factor").write_parquet(path)
    return path


CONFIGS = Path(__file__).parents[1] / "configs"
SPLITS = (
    "split={train: [2015-01-02, 2016-01-29], valid: [2016-02-01, 2016-06-30], "
    "test: [2016-07-01, 2016-12-30]}"
)


def qtmrl_config(root: Path, bars: Path, *more: str) -> Config:
    """configs/qtmrl.yaml on a small file of bars, with store and cache below `root`."""
    overrides = [
        *("data.source=parquet", f"data.path={bars}", f"data.store={root}/store"),
        *(f"data.cache.dir={root}/cache", SPLITS, *more),
    ]
    return load_config(CONFIGS / "qtmrl.yaml", overrides)
