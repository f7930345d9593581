"""Views of a dataset whose future, or whose units, are not the real ones.

The leakage check asks: had the world ended at the cut, or gone another way after it, or had the
vendor quoted prices in other units, would anything we compute about the past be different? Each
view answers as a store that pretends so; nothing on disk is touched.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from datetime import date, datetime

import numpy as np
import polars as pl

from echelon import rng
from echelon.data.store import Store

_PRICES = ("open", "high", "low", "close", "pre_close")


class _View(Store):
    """A store that shows a dataset other than it is: subclasses say how bars and tables differ."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.root, store.pin)

    def read_bars(
        self,
        name: str,
        key: str,
        symbols: Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
    ) -> pl.DataFrame:
        frame = self._bars(super().read_bars(name, key, symbols), name, key)
        return frame if columns is None else frame.select(columns)

    def table(self, name: str, table: str) -> pl.DataFrame | None:
        frame = super().table(name, table)
        return None if frame is None else self._table(frame, table)

    @abstractmethod
    def _bars(self, frame: pl.DataFrame, name: str, key: str) -> pl.DataFrame: ...

    @abstractmethod
    def _table(self, frame: pl.DataFrame, table: str) -> pl.DataFrame: ...


class TruncatedView(_View):
    """The store as it was at `cut`: later bars, listings and membership changes do not exist."""

    def __init__(self, store: Store, cut: datetime) -> None:
        super().__init__(store)
        self.cut = cut

    def partitions(
        self, name: str, start: datetime | None = None, end: datetime | None = None
    ) -> list[str]:
        return super().partitions(name, start, min(end, self.cut) if end else self.cut)

    def _bars(self, frame: pl.DataFrame, name: str, key: str) -> pl.DataFrame:
        return frame.filter(pl.col("time") <= self.cut)

    def _table(self, frame: pl.DataFrame, table: str) -> pl.DataFrame:
        day = self.cut.date()
        if table == "benchmark":
            return frame.filter(pl.col("time") <= self.cut)
        if table == "membership":
            return frame.filter(pl.col("start") <= day).with_columns(_null_after("end", day))
        return frame.filter(pl.col("first") <= self.cut).with_columns(
            _null_after("listed", day), _null_after("delisted", day)
        )


def _null_after(column: str, day: date) -> pl.Expr:
    """The date in `column`, null where it lies after `day`."""
    return pl.when(pl.col(column) <= day).then(pl.col(column)).alias(column)


class ScrambledView(_View):
    """The same past, another future: other bars, delistings and changes of members."""

    def __init__(self, store: Store, cut: datetime, seed: int = 0) -> None:
        super().__init__(store)
        self.cut = cut
        self.seed = seed

    def _bars(self, frame: pl.DataFrame, name: str, key: str) -> pl.DataFrame:
        draw = rng.stream(self.seed, "scramble", name, key)
        noise = pl.Series("_noise", np.exp(draw.normal(0, 0.5, frame.height)))
        gone = pl.Series("_gone", draw.random(frame.height) < 0.2)
        future = pl.col("time") > self.cut
        # The last bar stays, so that the time axis does not shrink by chance.
        lost = future & pl.col("_gone") & (pl.col("time") < pl.col("time").max())
        k = pl.when(future).then(pl.col("_noise")).otherwise(1.0)
        return (
            frame.with_columns(noise, gone)
            .filter(~lost)
            .with_columns(
                *[pl.col(c) * k for c in _PRICES],
                volume=pl.col("volume") * k**2,
                amount=pl.col("amount") * k**3,
                factor=pl.col("factor") * k,
            )
            .drop("_noise", "_gone")
        )

    def _table(self, frame: pl.DataFrame, table: str) -> pl.DataFrame:
        day = self.cut.date()
        if table == "benchmark":
            k = pl.when(pl.col("time") > self.cut).then(1.5).otherwise(1.0)
            return frame.with_columns(close=pl.col("close") * k)
        if table == "membership":
            return frame.filter(pl.col("start") <= day).with_columns(_delay("end", day))
        return frame.with_columns(_delay("delisted", day))


def _delay(column: str, day: date) -> pl.Expr:
    later = (pl.col(column) + pl.duration(days=100)).cast(pl.Date)
    return pl.when(pl.col(column) > day).then(later).otherwise(pl.col(column)).alias(column)


class RescaledView(_View):
    """Prices in other units: each symbol's whole history times a power of two.

    With `volume` divided by it, this is what a split after the last bar does to a vendor's
    adjusted file; without, what a dividend does.
    """

    def __init__(self, store: Store, *, volume: bool = True) -> None:
        super().__init__(store)
        self.volume = volume

    def _bars(self, frame: pl.DataFrame, name: str, key: str) -> pl.DataFrame:
        volume = pl.col("volume") / (_unit() if self.volume else 1.0)
        return frame.with_columns(*[pl.col(c) * _unit() for c in _PRICES], volume=volume)

    def _table(self, frame: pl.DataFrame, table: str) -> pl.DataFrame:
        if table != "symbols":
            return frame
        # The anchor is a price too.
        return frame.with_columns(pl.col("anchor") * _unit())


def _unit() -> pl.Expr:
    """A power of two, never 1, that depends on the symbol: exact in floating point."""
    k = (pl.col("symbol").hash(seed=0) % 4).cast(pl.Int64)
    return k.replace_strict([0, 1, 2, 3], [0.25, 0.5, 2.0, 4.0])
