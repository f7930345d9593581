"""The world books trade in: market rows for the ledger, features for the agent, one time axis.

Made once from a prepared set; everything after it works on row numbers. A row is a bar: a book
that stands at row t has seen the bars up to t and decides what is filled next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from echelon import market
from echelon.config import Config
from echelon.data.calendars import bars_per_day, periods_per_year
from echelon.data.panel import forward_fill
from echelon.errors import ConfigError, DataError
from echelon.features.prepared import Prepared
from echelon.runs.registry import TestRead
from echelon.types import Bools, Floats, Floats32, Freq, PriceBasis, Times

_BLOCK = 256  # rows looked at together: a large X is mapped, not read


@dataclass(frozen=True)
class World:
    """`T` bars of `N` assets, as ledger and agent see them."""

    rows: market.MarketRows  # the ledger's market, T rows
    rules: market.Rules  # by target weights; `act.rules_for` gives those of the 20/50 rule
    x: Floats32  # [T,N,F] scaled features
    present: Bools  # [T,N] has features
    member: Bools  # [T,N] may be bought
    growth: Floats  # [T,N] total-return index (dividends and splits inside), for baselines
    times: Times  # [T]
    symbols: tuple[str, ...]
    splits: Mapping[str, range]  # name → rows of decisions and marks
    window: int
    fill_open: bool  # orders fill at the next open; otherwise at the close they were decided on
    initial_cash: float
    periods_per_year: float
    benchmark: Floats | None  # [T] level of the benchmark index, NaN where unknown
    ledger: Mapping[str, str]  # what a report says about prices and fills
    # Name → pieces of a split that do not follow one another in time, where it has some: neither an
    # episode nor a window of features may cross from one to the next.
    stretches: Mapping[str, tuple[range, ...]] = field(default_factory=dict)
    # Works the orders of all books through the bar after the decision; None: they fill at once. It
    # is the market's, not a book's: a policy that simulates books next to the real one has to get
    # the same fills.
    executor: market.Executor | None = None
    in_force: market.RulesInForce | None = None  # as reported, where the world is of data or drawn
    bars_per_day: int = 1  # of a regular session: windows of risk control are in trading days

    def __post_init__(self) -> None:
        shape = self.rows.close.shape
        for name in ("present", "member", "growth"):
            assert getattr(self, name).shape == shape, f"{name} is not [T,N]"
        assert self.x.shape[:2] == shape, "x is not [T,N,F]"
        assert self.times.shape == shape[:1], "times is not [T]"
        if self.executor is not None and not self.fill_open:
            raise ConfigError(
                f"the executor {self.executor.name!r} works orders through the bar after the "
                "decision, but fills are at the close of the decision. Set market.fill to 'open', "
                "or market.executor to 'immediate'."
            )

    @property
    def n_assets(self) -> int:
        return len(self.symbols)

    def span(self, split: str) -> range:
        """Rows of a split on which a book can stand: at least two, all with a whole window."""
        if split not in self.splits:
            raise DataError(
                f"split.{split} is not in this world, which has {', '.join(self.splits)}. The "
                "test window is sealed: `echelon evaluate RUN --split test` opens it and counts "
                "the look."
            )
        rows = self.splits[split]
        first = max(rows.start, self.window - 1)
        if rows.stop - first < 2:
            raise DataError(
                f"split.{split} has {len(rows)} bars, of which {max(rows.stop - first, 0)} have "
                f"window={self.window} bars behind them; at least 2 are needed. Lengthen the split "
                "or shorten the window."
            )
        return range(first, rows.stop)

    @property
    def kept(self) -> range:
        """Rows that can be looked at: all there are, or of a world that grows the last ones."""
        return range(len(self.times))

    def first_rows(self, rows: market.Rows) -> market.Rows:
        """[E] for each of rows[E] the first one on which a book may stand that comes to it.

        Looking back is allowed, but not into another stretch, nor to rows without a whole window.
        """
        first = min(max(split.start, self.window - 1) for split in self.splits.values())
        out = np.full(len(rows), first, dtype=np.int64)
        for piece in chain.from_iterable(self.stretches.values()):
            inside = (rows >= piece.start) & (rows < piece.stop)
            out[inside] = np.maximum(out[inside], piece.start)
        return out

    def history_rows(self, rows: market.Rows) -> market.Rows:
        """[E] how far back prices belong together with those of rows[E]: not past a stretch."""
        out = np.zeros(len(rows), dtype=np.int64)
        for piece in chain.from_iterable(self.stretches.values()):
            out[(rows >= piece.start) & (rows < piece.stop)] = piece.start
        return out

    def spans(self, split: str) -> tuple[range, ...]:
        """Stretches of a split to be traded each by itself: `span`, or those of a joined world."""
        return self.stretches.get(split) or (self.span(split),)


class WorldFacts(NamedTuple):
    data: market.TradedData
    freq: Freq
    window: int
    splits: Mapping[str, range]
    benchmark: bool  # the data have an index

    def settings(self, config: Config, costs: float) -> dict[str, Any]:
        """The fields of a `World` that are not of its rows."""
        data, in_force = self.data, market.rules_in_force(config, self.data)
        assert data.calendar is not None, "data are of a calendar"
        ledger = {"fill": in_force.fill, "prices": data.price_basis, "preset": in_force.preset}
        return {
            "rules": in_force.resolved.rules.scale_costs(costs),
            "symbols": data.symbols,
            "splits": self.splits,
            "window": self.window,
            "fill_open": config.market.fill == "open",
            "initial_cash": config.market.initial_cash,
            "periods_per_year": periods_per_year(data.calendar, self.freq),
            "bars_per_day": bars_per_day(data.calendar, self.freq),
            "ledger": ledger,
            "in_force": in_force,
        }

    def row_settings(self, config: Config) -> market.RowSettings:
        """How market rows are laid out."""
        resolved = market.rules_in_force(config, self.data).resolved
        return market.RowSettings(
            lots=resolved.lots and self.data.price_basis != "adjusted",
            stamp_duty=resolved.stamp_duty,
            unknown_haircut=config.market.delist_haircut,
            median_bars=config.market.median_days,
        )


def total_return_index(close: Floats, factor: Floats | None, basis: PriceBasis) -> Floats:
    """[T,N] the close, times the factor, carried forward, where the prices lack it."""
    if factor is None or basis == "adjusted":
        return np.asarray(close, dtype=np.float64)
    return np.asarray(close * factor)


def rules_of(prepared: Prepared, config: Config) -> market.RulesInForce:
    """The rules in force on a prepared set; a preset that contradicts its calendar is refused."""
    return market.rules_in_force(config, _traded_data(prepared))


def _traded_data(prepared: Prepared) -> market.TradedData:
    manifest = prepared.manifest
    opens, volume, limits = (
        prepared.array(name) is not None for name in ("open", "volume", "limit_up")
    )
    return market.TradedData(
        manifest["calendar"], manifest["price_basis"], prepared.symbols, opens, volume, limits
    )


def world_of(
    prepared: Prepared, config: Config, *, costs: float = 1.0, read: TestRead | None = None
) -> World:
    """The world of a prepared set under the configuration's rules, up to the end of validation.

    The test window is not in it, so nothing that learns or chooses can look at it by mistake. To
    have it, hand in `read`: the registry gives one to whoever writes the look down.

    costs: what trading costs, times this; 0 leaves out every cost, as `eval.use_fee: false` asks
    """
    sealed = prepared.splits["valid"].rows.stop
    stop = len(prepared.times) if read is not None else sealed
    member, benchmark = prepared.array("member"), prepared.array("benchmark")
    splits = {name: split.rows for name, split in prepared.splits.items()}
    facts = WorldFacts(
        data=_traded_data(prepared),
        freq=prepared.manifest["freq"],
        window=prepared.window,
        splits={name: rows for name, rows in splits.items() if rows.stop <= stop},
        benchmark=benchmark is not None,
    )
    settings = facts.settings(config, costs)
    history = _history(prepared, stop)
    start = market.RowState.start(len(prepared.symbols))
    rows, _ = market.lay_rows(history, facts.row_settings(config), start)
    x = np.asarray(prepared.x[:stop])
    _refuse_nan(x, prepared)
    factor = None if history.factor is None else forward_fill(history.factor)
    return World(
        rows=rows._replace(stamp=rows.stamp * costs),
        x=x,
        present=np.asarray(prepared.present[:stop]),
        member=np.asarray((prepared.present if member is None else member)[:stop]),
        growth=total_return_index(history.close, factor, history.price_basis),
        times=np.asarray(prepared.times[:stop]),
        benchmark=None if benchmark is None else np.asarray(benchmark[:stop]),
        **settings,
    )


def index_world(world: World) -> World | None:
    """A world whose one asset is the benchmark, at its closes and without costs; None: no index."""
    if world.benchmark is None:
        return None
    level = forward_fill(world.benchmark[:, None])
    known = np.isfinite(level)
    shape = level.shape
    history = market.PriceHistory(
        times=world.times,
        symbols=("benchmark",),
        price_basis="adjusted",
        close=level,
        tradable=known,
        delisted=np.zeros(shape, dtype=bool),
    )
    return replace(
        world,
        rows=market.market_rows(history, lots=False, stamp_duty=False),
        rules=world.rules.scale_costs(0.0)._replace(
            min_value=0.0, participation=np.inf, price_limits=False
        ),
        x=np.zeros((*shape, 1), dtype=np.float32),
        present=known,
        member=known,
        growth=level,
        symbols=("benchmark",),
        # An index has no open to fill at; a fill at the next close would lose it the first day.
        fill_open=False,
        executor=None,
    )


def _history(prepared: Prepared, stop: int) -> market.PriceHistory:
    parts: dict[str, Any] = {}
    for name in ("tradable", "delisted", "open", "volume", "factor", "limit_up", "limit_down"):
        values = prepared.array(name)
        parts[name] = None if values is None else np.asarray(values[:stop])
    for name in ("tradable", "delisted"):
        assert parts[name] is not None, f"a prepared set always has {name}"
    return market.PriceHistory(
        times=np.asarray(prepared.times[:stop]),
        symbols=prepared.symbols,
        price_basis=prepared.manifest["price_basis"],
        close=np.asarray(prepared.close[:stop]),
        reasons=prepared.delist_reasons,
        **parts,
    )


def _refuse_nan(x: Floats32, prepared: Prepared) -> None:
    for low in range(0, len(x), _BLOCK):
        for at, asset, feature in np.argwhere(~np.isfinite(x[low : low + _BLOCK])).tolist():
            row = low + at
            raise DataError(
                f"{prepared.path / 'X.npy'}: feature {prepared.names[feature]!r} of "
                f"{prepared.symbols[asset]} is not a number at {prepared.times[row]} (row {row}). "
                "Run `echelon prepare` again, or leave the feature out."
            )
