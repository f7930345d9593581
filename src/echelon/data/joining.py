"""Joining bars to one another: anchored factors, ex-right steps, updates in the units stored.

Factors are anchored at each symbol's first bar. Where a source gives reference prices
(`pre_close`) instead of a factor, ex-right days are found from them. An update begins with a bar
that is stored already, and that overlap says how its factor, and the units of a vendor who has
restated history, continue what is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

import polars as pl

from echelon.data.bars import SCHEMA, SourceInfo
from echelon.data.manifest import Manifest
from echelon.data.store import Store
from echelon.errors import DataError
from echelon.types import Problem

_LONG_GAP = timedelta(days=15)  # longer than any holiday


@dataclass
class Joiner:
    """Rescales partitions in time order, carrying each symbol's last state along.

    scale: symbol, price, volume, factor: what to multiply a symbol's rows with
    last: symbol, last_time, last_close, last_factor
    chain: the factor is to be made from pre_close
    warnings: ex-right steps that were inferred across a long gap
    """

    scale: pl.DataFrame
    last: pl.DataFrame
    chain: bool
    warnings: list[Problem] = field(default_factory=list)

    @staticmethod
    def of(info: SourceInfo, base: Manifest | None, store: Store, firsts: pl.DataFrame) -> Joiner:
        """From each symbol's first row, and from its overlap with the stored bars.

        firsts: symbol, time, close, volume, factor of the first row of every symbol
        """
        chain = "factor" not in info.fields and "pre_close" in info.fields
        if base is None:
            scale = firsts.select(
                "symbol",
                price=pl.lit(1.0),
                volume=pl.lit(1.0),
                factor=1.0 / pl.col("factor"),
            )
            return Joiner(scale, _no_last(), chain)
        stored = _stored_at(store, base, firsts)
        both = firsts.join(stored, on="symbol", how="left", suffix="_stored")
        _refuse_without_overlap(both, store.symbols(base.name), base)
        _refuse_restated(both, base)
        # A vendor that restates history (a split, a dividend) changes units: stay in the old ones.
        price = (pl.col("close_stored") / pl.col("close")).fill_null(1.0)
        restated = (price - 1).abs() > 1e-9
        by_volume = pl.col("volume_stored") / pl.col("volume")
        known = by_volume.is_finite() & (by_volume > 0)
        volume = pl.when(restated & known).then(by_volume).when(restated).then(1 / price)
        scale = both.select(
            "symbol",
            price=price,
            volume=volume.otherwise(1.0),
            factor=pl.col("factor_stored").fill_null(1.0) / pl.col("factor"),
        )
        # The update's first row is the stored one again: no ex-right step leads up to it.
        last = stored.select(
            "symbol",
            last_time=pl.lit(None, dtype=pl.Datetime("us")),
            last_close=pl.lit(None, dtype=pl.Float64),
            last_factor="factor",
        )
        return Joiner(scale, last, chain)

    def join(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Rescale one partition, sorted by symbol and time."""
        frame = frame.join(self.scale, on="symbol", how="left", suffix="_scale").with_columns(
            *[pl.col(c) * pl.col("price") for c in ("open", "high", "low", "close", "pre_close")],
            volume=pl.col("volume") * pl.col("volume_scale"),
            factor=pl.col("factor") * pl.col("factor_scale"),
        )
        frame = frame.join(self.last, on="symbol", how="left")
        if self.chain:
            frame = self._chained(frame)
        frame = frame.with_columns(
            factor=pl.col("factor").forward_fill().over("symbol").fill_null(pl.col("last_factor"))
        ).with_columns(factor=pl.col("factor").fill_null(1.0))
        latest = frame.group_by("symbol").agg(
            last_time=pl.col("time").last(),
            last_close=pl.col("close").last(),
            last_factor=pl.col("factor").last(),
        )
        self.last = pl.concat([self.last.join(latest, on="symbol", how="anti"), latest])
        return frame

    def _chained(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The factor from reference prices: it grows by close[t−1] / pre_close[t] (A-shares).

        pre_close belongs to the session, so only its first bar can show a step, against the last
        close of an earlier session.
        """
        before = pl.col("close").shift(1).over("symbol").fill_null(pl.col("last_close"))
        since = pl.col("time").shift(1).over("symbol").fill_null(pl.col("last_time"))
        new_session = pl.col("time").dt.date() != since.dt.date()
        # Half a cent of rounding is not a corporate action.
        moved = (before - pl.col("pre_close")).abs() >= 0.005
        step = pl.when(new_session & moved).then(before / pl.col("pre_close")).otherwise(1.0)
        frame = frame.with_columns(_step=step.fill_null(1.0), _since=since)
        self._warn(
            frame.filter(pl.col("_step") != 1, pl.col("time") - pl.col("_since") > _LONG_GAP)
        )
        chained = pl.col("_step").cum_prod().over("symbol") * pl.col("last_factor").fill_null(1.0)
        return frame.with_columns(factor=chained).drop("_step", "_since")

    def _warn(self, steps: pl.DataFrame) -> None:
        columns = ("symbol", "time", "_since", "_step", "origin", "row")
        for symbol, time, since, step, origin, row in steps.select(columns).iter_rows():
            message = (
                f"{symbol}: the reference price of {time:%Y-%m-%d} implies a corporate action of "
                f"{step:.4g} since its bar before, of {since:%Y-%m-%d}"
            )
            remedy = "Right after a suspension; after a hole in the file, fill in the missing bars"
            self.warnings.append(Problem(origin, row, "pre_close", message, remedy, "warning"))


def _no_last() -> pl.DataFrame:
    return pl.DataFrame(
        schema={
            "symbol": pl.String,
            "last_time": pl.Datetime("us"),
            "last_close": pl.Float64,
            "last_factor": pl.Float64,
        }
    )


def _stored_at(store: Store, base: Manifest, firsts: pl.DataFrame) -> pl.DataFrame:
    """The stored close, volume and factor at the times where an update begins."""
    wanted = firsts.select("symbol", "time")
    columns = ["symbol", "time", "close", "volume", "factor"]
    first = firsts["time"].min()
    assert isinstance(first, datetime)
    found = [
        store.read_bars(base.name, key, columns=columns).join(wanted, on=["symbol", "time"])
        for key in store.partitions(base.name, first)
    ]
    empty = pl.DataFrame(schema={c: SCHEMA[c] for c in columns})
    return pl.concat([empty, *found]).drop("time")


def refuse_other_kind(info: SourceInfo, base: Manifest) -> None:
    """An update must be of the same kind of bars as the dataset it joins."""
    prices = {"open", "high", "low", "volume"}
    for name, new, old in (
        ("freq", info.freq, base.info.freq),
        ("calendar", info.calendar, base.info.calendar),
        ("timezone", info.timezone, base.info.timezone),
        ("price_basis", info.price_basis, base.info.price_basis),
        ("fields", sorted(info.fields & prices), sorted(base.info.fields & prices)),
    ):
        if new != old:
            raise DataError(
                f"dataset {base.name!r} has {name} {old!r}, the update has {new!r}. "
                "Make them agree, or import it anew, without --update."
            )


def _refuse_without_overlap(both: pl.DataFrame, known: pl.DataFrame, base: Manifest) -> None:
    """A symbol's update must begin with a bar that is stored: factors are joined there."""
    apart = both.filter(
        pl.col("close_stored").is_null() & pl.col("symbol").is_in(known["symbol"].implode())
    )
    if apart.height:
        names = ", ".join(apart["symbol"].head(5)) + (" …" if apart.height > 5 else "")
        raise DataError(
            f"dataset {base.name!r}: the update of {names} does not begin with a bar that is "
            "stored, so its adjustment cannot be joined. Include the last stored bar of every "
            "symbol, or import it anew, without --update."
        )


def _refuse_restated(both: pl.DataFrame, base: Manifest) -> None:
    """Raw prices cannot change after the fact; adjusted ones are restated by the vendor."""
    if base.info.price_basis != "raw":
        return
    changed = both.filter((pl.col("close") / pl.col("close_stored") - 1).abs() > 1e-6)
    if changed.height:
        names = ", ".join(changed["symbol"].head(5))
        raise DataError(
            f"dataset {base.name!r}: the source now gives other raw closes than it did for "
            f"{names}. Import it anew, without --update."
        )
