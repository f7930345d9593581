"""From a panel to features: the one path that prepare, the leakage check and live share.

1. `FeaturePlan` fixes the columns: time-series features, their ranks or z-scores, exogenous series.
2. Each symbol's own bars, gaps removed and anchored at its first close, go through every
   time-series feature; values land on the bar's row, and days without a bar get the last value
   again (or zero, as the feature says).
3. A symbol is present once its longest feature has warmed up, until it delists. Rows of an
   absent symbol are zero.
4. Ranks and z-scores compare the present members of one bar. Their column holds what they are made
   of until then, so that a feature which they replace takes no room.
5. Moments over the train rows, present symbols only, make the scaler.

X [T,N,F] is a file, written by assets and then rewritten by time (`GridFile`): indicators are
computed symbol by symbol, ranks and scaling bar by bar, and at 5,000 symbols neither order fits in
memory whole. Plain writes are used instead of a memory map because mapped pages count as the
process's memory while they are dirty.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from echelon.config import Config
from echelon.data.exogenous import Exogenous, join_all
from echelon.data.panel import Panel
from echelon.errors import FeatureError
from echelon.features._kernels import rank_rows, relative_value, standard_rows
from echelon.features.base import Bars, CrossSection, Feature, FeatureSpec, Group
from echelon.features.registry import run
from echelon.features.scaler import RunningMoments
from echelon.files import Closing
from echelon.types import Bools, Floats, Floats32, Ints

log = logging.getLogger(__name__)

SymbolProgress = Callable[[int, int], None]
"""Called with (symbols done, symbols in all)."""


ACROSS: Mapping[str, Callable[[Floats, Bools], Floats]] = {
    "rank": rank_rows,
    "zscore": standard_rows,
}
"""How the symbols of a bar are compared: (values [T,N], mask [T,N]) → [T,N]."""


@dataclass(frozen=True)
class FeaturePlan:
    """The columns of X, in order: time-series features, those across symbols, exogenous ones.

    A time-series feature that a comparison across symbols replaces is computed, but is no column.
    """

    series: tuple[Feature, ...]
    ranks: tuple[CrossSection, ...]
    exogenous: tuple[str, ...]

    @staticmethod
    def from_specs(specs: tuple[FeatureSpec, ...], exogenous: tuple[str, ...] = ()) -> FeaturePlan:
        """Sort specs into kinds, each in the order given."""
        plan = FeaturePlan(
            tuple(s for s in specs if isinstance(s, Feature)),
            tuple(s for s in specs if isinstance(s, CrossSection)),
            exogenous,
        )
        twice = sorted({name for name in exogenous if plan.names.count(name) > 1})
        if twice:
            raise FeatureError(
                f"exogenous series {', '.join(twice)}: a feature has that name already. Rename the "
                "series in its file, or leave it out by data.exogenous.series.",
                twice[0],
            )
        return plan

    @property
    def names(self) -> tuple[str, ...]:
        """Column names [F]."""
        return (*self._kept, *(r.name for r in self.ranks), *self.exogenous)

    @cached_property
    def sources(self) -> Ints:
        """Which computed column each column of X is made of, the exogenous ones apart."""
        place = {name: k for k, name in enumerate(self._computed)}
        bases = (*self._kept, *(r.base for r in self.ranks))
        return np.array([place[name] for name in bases], dtype=np.int64)

    @property
    def _computed(self) -> tuple[str, ...]:
        return tuple(name for f in self.series for name in f.names)

    @property
    def _kept(self) -> tuple[str, ...]:
        replaced = {r.base for r in self.ranks if r.replaces}
        return tuple(name for name in self._computed if name not in replaced)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Group of each column [F]."""
        series = {name: f.group for f in self.series for name in f.names}
        exogenous: tuple[Group, ...] = tuple("exogenous" for _ in self.exogenous)
        return (*(series[n] for n in self._kept), *(r.group for r in self.ranks), *exogenous)

    @property
    def lookbacks(self) -> dict[str, int]:
        series = {name: f.lookback for f in self.series for name in f.names}
        kept = {name: series[name] for name in self._kept}
        return kept | {r.name: series[r.base] for r in self.ranks}

    @property
    def warmup(self) -> int:
        """Bars a symbol needs before it is present."""
        return max((f.lookback for f in self.series), default=1)


MONEY = ("close", "open", "high", "low", "volume", "amount", "pre_close", "band")
"""Grids of a panel that the fields of `Bars` are made of."""


_VWAP_SLACK = 1e-3
"""How far beyond a bar's low and high the mean price of its trades may be, by rounding."""


def bars_of(panel: Panel, n: int, relative: Floats | None = None) -> tuple[Bars, np.ndarray]:
    """Symbol n's own bars, anchored, and the rows [L] of the panel they stand on.

    relative [1,2]: state of `relative_value`, which then follows the bars
    """
    rows = np.flatnonzero(~np.isnan(panel.close[:, n]))
    unit = np.full(len(rows), 1.0 / panel.anchor[n])
    if panel.factor is not None:
        unit *= panel.factor[rows, n]
    grids = {name: getattr(panel, name) for name in MONEY}
    raw = {name: grid[rows, n] for name, grid in grids.items() if grid is not None}
    fields = anchor_fields(raw, unit, vwap="vwap" in panel.fields)
    if values_are_relative(panel):
        out = np.empty((1, len(rows), 1))
        state = np.zeros((1, 2)) if relative is None else relative
        relative_value(state, np.ones(1, dtype=np.bool_), out, fields["value"][None])
        fields["value"] = out[0, :, 0]
    return Bars(times=panel.times[rows], **fields), rows


def anchor_fields(raw: Mapping[str, Floats], unit: Floats, *, vwap: bool) -> dict[str, Floats]:
    """The fields of `Bars` from bars as the source has them, element by element.

    raw: one symbol's bars [L] or one bar of all symbols [N]; unit: 1 / anchor × factor, as long
    vwap: whether they have an average price
    """
    fields = {name: raw[name] * unit for name in ("close", "open", "high", "low") if name in raw}
    fields["raw_close"] = raw["close"]
    if "amount" in raw:
        fields["value"] = raw["amount"]
    elif "volume" in raw:
        fields["value"] = raw["close"] * raw["volume"]
    if vwap:
        traded = raw["volume"] > 0
        price = np.divide(raw["amount"], raw["volume"], where=traded, out=raw["close"].copy())
        price *= unit
        high, low, close = fields["high"], fields["low"], fields["close"]
        typical = (high + low + close) / 3.0
        within = traded & (price >= low * (1 - _VWAP_SLACK)) & (price <= high * (1 + _VWAP_SLACK))
        fields["vwap"] = np.where(within, price, typical)
    if "band" in raw and "pre_close" in raw:
        reference = raw["pre_close"] * unit
        fields["limit_up"] = reference * (1 + raw["band"])
        fields["limit_down"] = reference * (1 - raw["band"])
    return fields


def values_are_relative(panel: Panel) -> bool:
    """Whether traded value is no money, and is told in units of its own beginning."""
    made_up = panel.amount is None and panel.volume is not None
    return made_up and panel.price_basis == "adjusted"


def symbol_features(
    panel: Panel, n: int, plan: FeaturePlan, first_row: int
) -> tuple[Floats32, Bools]:
    """(values [T',F_series], present [T']) of symbol n on the panel's rows from `first_row` on."""
    bars, rows = bars_of(panel, n)
    n_rows = panel.shape[0] - first_row
    values = np.zeros((n_rows, sum(len(f.names) for f in plan.series)), dtype=np.float32)
    if len(bars) < plan.warmup:
        return values, np.zeros(n_rows, dtype=np.bool_)
    present = panel.present[first_row:, n].copy()
    present[: max(0, rows[plan.warmup - 1] - first_row)] = False
    on_bar = np.zeros(panel.shape[0], dtype=np.bool_)
    on_bar[rows] = True
    # For every panel row, which of the symbol's bars was the last one known.
    last = np.cumsum(on_bar)[first_row:] - 1
    table = np.empty((len(bars), values.shape[1]), dtype=np.float32)
    column = 0
    for feature in plan.series:
        table[:, column : column + len(feature.names)] = run(feature, bars, panel.symbols[n])
        column += len(feature.names)
    values[present] = table[last[present]]
    zero = np.array([f.on_gap == "zero" for f in plan.series for _ in f.names], dtype=np.bool_)
    values[np.ix_(~on_bar[first_row:], zero)] = 0.0
    return values, present


def compute(
    panel: Panel,
    plan: FeaturePlan,
    path: Path,
    *,
    first_row: int = 0,
    train: range,
    exogenous: Exogenous | None = None,
    progress: SymbolProgress | None = None,
) -> tuple[Bools, RunningMoments]:
    """Write unscaled X [T',N,F] to `path`; returns present [T',N] and the train window's moments.

    first_row: panel row at which X begins; earlier rows only warm features up
    train: rows of X (not of the panel) the moments are taken over
    """
    shape = (panel.shape[0] - first_row, panel.shape[1], len(plan.names))
    present = np.zeros(shape[:2], dtype=np.bool_)
    with GridFile(path, shape) as grid:
        for assets in grid.symbol_blocks():
            block = np.zeros((shape[0], len(assets), shape[2]), dtype=np.float32)
            some = _assets(panel, assets)
            for k, n in enumerate(assets):
                computed, present[:, n] = symbol_features(some, k, plan, first_row)
                block[:, k, : len(plan.sources)] = computed[:, plan.sources]
            grid.write_assets(assets, block)
            if progress is not None:
                progress(assets.stop, shape[1])
        member = panel.member[first_row:]
        compared = range(len(plan.sources) - len(plan.ranks), len(plan.sources))
        moments = RunningMoments.none(shape[2])
        unfinished = bool(plan.ranks) or exogenous is not None
        for rows in grid.time_blocks():
            seen = range(max(rows.start, train.start), min(rows.stop, train.stop))
            if not (unfinished or len(seen)):
                continue
            block = grid.read_rows(rows)
            here = slice(rows.start, rows.stop)
            for column, spec in zip(compared, plan.ranks, strict=True):
                base = block[:, :, column].astype(np.float64)
                block[:, :, column] = ACROSS[spec.method](base, present[here] & member[here])
            if exogenous is not None:
                # Unknown values are NaN here: they do not count in the scaler and scale to zero.
                values = exogenous.values[first_row + rows.start : first_row + rows.stop]
                known = np.where(present[here][:, :, None], values, 0.0)
                block[:, :, shape[2] - len(exogenous.names) :] = known
            if unfinished:
                grid.write_rows(rows, block)
            if len(seen):
                part = slice(seen.start - rows.start, seen.stop - rows.start)
                train_values = block[part][present[seen.start : seen.stop]]
                moments = moments.merge(RunningMoments.from_values(train_values))
    return present, moments


def _assets(panel: Panel, assets: range) -> Panel:
    """The panel of some assets, each one's values side by side: columns miss the cache."""
    part = slice(assets.start, assets.stop)
    arrays = {f.name: getattr(panel, f.name) for f in fields(panel)}
    grids: dict[str, Any] = {
        name: np.asfortranarray(array[:, part])
        for name, array in arrays.items()
        if isinstance(array, np.ndarray) and array.ndim == 2
    }
    return replace(panel, symbols=panel.symbols[part], anchor=panel.anchor[part], **grids)


_ASSETS_BYTES = 64 * 1024 * 1024  # wide enough that a row's piece is several pages
_ROWS_BYTES = 4 * 1024 * 1024  # what is made of a block should still fit in the cache


class GridFile(Closing):
    """An .npy file under construction; use as a context manager."""

    def __init__(self, path: Path, shape: tuple[int, int, int], *, create: bool = True) -> None:
        self.shape = shape
        self._row_bytes = 4 * shape[1] * shape[2]
        if create:
            np.lib.format.open_memmap(path, "w+", "<f4", shape)
        self._start = path.stat().st_size - shape[0] * self._row_bytes
        self._file = path.open("r+b")

    def close(self) -> None:
        self._file.close()

    def symbol_blocks(self) -> Iterator[range]:
        width = _ASSETS_BYTES // max(1, 4 * self.shape[0] * self.shape[2])
        return _ranges(self.shape[1], width)

    def time_blocks(self) -> Iterator[range]:
        return _ranges(self.shape[0], _ROWS_BYTES // max(1, self._row_bytes))

    def write_assets(self, assets: range, block: Floats32) -> None:
        assert block.shape == (self.shape[0], len(assets), self.shape[2]), "block is not [T,n,F]"
        if len(assets) == self.shape[1]:
            self.write_rows(range(self.shape[0]), block)
            return
        offset = self._start + 4 * assets.start * self.shape[2]
        for t, row in enumerate(np.ascontiguousarray(block, dtype="<f4")):
            self._file.seek(offset + t * self._row_bytes)
            self._file.write(row)

    def read_rows(self, rows: range) -> Floats32:
        block = np.empty((len(rows), *self.shape[1:]), dtype="<f4")
        self._file.seek(self._start + rows.start * self._row_bytes)
        read = self._file.readinto(block.data)
        assert read == block.nbytes, "the grid file is shorter than its header says"
        return block.astype(np.float32, copy=False)

    def write_rows(self, rows: range, block: Floats32) -> None:
        assert block.shape == (len(rows), *self.shape[1:]), "block is not [rows,N,F]"
        self._file.seek(self._start + rows.start * self._row_bytes)
        self._file.write(np.ascontiguousarray(block, dtype="<f4").data)


def _ranges(count: int, size: int) -> Iterator[range]:
    size = max(1, size)
    return (range(first, min(first + size, count)) for first in range(0, count, size))


def load_exogenous(
    config: Config, panel: Panel, published_until: datetime | None = None
) -> Exogenous | None:
    """Every configured series on the panel's rows, as known then (and by `published_until`)."""
    if not config.data.exogenous:
        return None
    place = panel.times, panel.symbols, panel.calendar, panel.timezone
    joined = join_all(config.data.exogenous, *place, published_until)
    for k, name in enumerate(joined.names):
        if published_until is None and np.isnan(joined.values[:, :, k]).all():
            log.warning(
                "exogenous series %s is known at no bar of these symbols: check its publication "
                "times, its symbols and max_age_days",
                name,
            )
    return joined
