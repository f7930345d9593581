"""Features bar by bar: one row of a panel in, one row of X out, equal to what `prepare` writes.

1. `FeatureStream.from_panel` folds every feature's kernel over each symbol's history, as preparing
   does, and keeps the state that it leaves.
2. `push` anchors the bars of one row, refuses what cannot be (and then changes nothing), steps each
   kernel once for all symbols that have a bar, and carries the others' values along.
3. Absent symbols are zeroed, ranks, z-scores and exogenous values join, the fitted scaler scales.

A user's factor has no kernel: it is computed over its last `lookback` bars, through the same `run`.
One that answers otherwise over its whole history, a recursion say, cannot be streamed and is
refused by name when the stream starts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from echelon.data.panel import Panel
from echelon.data.stream import StreamState, check_arrays
from echelon.errors import DataError, FeatureError, StoreError
from echelon.features._kernels import relative_to_close, relative_value
from echelon.features.base import Bars, Feature
from echelon.features.engine import (
    ACROSS,
    MONEY,
    FeaturePlan,
    anchor_fields,
    bars_of,
    values_are_relative,
)
from echelon.features.registry import run
from echelon.features.scaler import Scaler
from echelon.types import Bools, Floats, Floats32

_NEVER = np.iinfo(np.int64).min
_FIELDS = ("close", "raw_close", "open", "high", "low", "value", "vwap", "limit_up", "limit_down")
_POSITIVE = ("close", "raw_close", "open", "high", "low", "vwap")
_LEAST, _MOST = 1e-30, 1e30
"""Anchored prices and values within: their squares and ratios stay finite numbers."""


@cache
def _least(have: tuple[str, ...]) -> tuple[Floats, Bools]:
    """[K,1] the least that each field but the limits can be, and whether it is there."""
    names = _FIELDS[:-2]
    least = np.array([[_LEAST if name in _POSITIVE else 0.0] for name in names])
    return least, np.array([[name in have] for name in names])


class FeatureRow(NamedTuple):
    """One row of X."""

    x: Floats32  # [N,F] scaled, 0 where absent
    present: Bools  # [N] listed, warmed up, not delisted


class FeatureStream:
    """The rows of X as they come."""

    def __init__(self, symbols: tuple[str, ...], plan: FeaturePlan, scaler: Scaler) -> None:
        """Before the first bar; see `from_panel` for one that continues a history."""
        if scaler.names != plan.names:
            raise FeatureError("the scaler is of other features than the plan. Prepare again.")
        n, width = len(symbols), sum(len(f.names) for f in plan.series)
        self.symbols, self.plan, self.scaler = symbols, plan, scaler
        self._time = np.array(_NEVER)
        self._bars = np.zeros(n, dtype=np.int64)
        self._carry = np.zeros((n, width), dtype=np.float32)
        self._relative = np.zeros((n, 2))
        self._kernel_states = {
            f.names[0]: np.zeros((n, f.kernel.size)) for f in plan.series if f.kernel is not None
        }
        self._needs = frozenset().union(*(f.needs for f in plan.series))
        self._factors = tuple(f for f in plan.series if f.kernel is None)
        longest = max((f.lookback for f in self._factors), default=0)
        self._windows = {name: np.full((n, longest), np.nan) for name in _FIELDS}
        self._window_times = np.zeros((n, longest), dtype=np.int64)
        first = len(plan.sources) - len(plan.ranks)
        self._across = {
            method: [first + k for k, rank in enumerate(plan.ranks) if rank.method == method]
            for method in dict.fromkeys(rank.method for rank in plan.ranks)
        }
        zero = [f.on_gap == "zero" for f in plan.series for _ in f.names]
        self._carried = ~np.array(zero, dtype=np.bool_)
        self._lay_out(n, width)

    def _lay_out(self, n: int, width: int) -> None:
        """The kernels' inputs and outputs, made once: fields [N,1], a block [N,1,C] a feature."""
        self._bar = np.full((len(_FIELDS), n), np.nan)
        self._times = np.zeros((n, 1), dtype=np.int64)
        seen = {name: self._bar[k].reshape(n, 1) for k, name in enumerate(_FIELDS)}
        seen["times"] = self._times.view()
        for view in seen.values():  # read-only as those of `Bars`: one compiled version for both
            view.setflags(write=False)
        self._out = np.full(n * width, np.nan)
        self._place = np.empty((n, width), dtype=np.int64)
        self._calls = []
        start = column = 0
        for feature in self.plan.series:
            size = len(feature.names)
            block = np.arange(start, start + n * size).reshape(n, size)
            self._place[:, column : column + size] = block
            out = self._out[start : start + n * size].reshape(n, 1, size)
            start, column = start + n * size, column + size
            kernel = feature.kernel
            if kernel is not None:
                fields = [seen[name] for name in kernel.fields]
                state = self._kernel_states[feature.names[0]]
                self._calls.append((kernel.advance, (state, out, *fields, *kernel.settings)))
                if kernel.relative:
                    shares = np.array(kernel.relative), out, seen["close"]
                    self._calls.append((relative_to_close, shares))

    @staticmethod
    def from_panel(panel: Panel, plan: FeaturePlan, scaler: Scaler) -> FeatureStream:
        """The stream that continues `panel`."""
        stream = FeatureStream(panel.symbols, plan, scaler)
        stream._refuse_missing(panel)
        for n in range(len(panel.symbols)):
            stream._fold(panel, n)
        stream._time[()] = panel.times[-1].astype("datetime64[us]").astype(np.int64)
        return stream

    def _fold(self, panel: Panel, n: int) -> None:
        """Follow symbol n's history."""
        bars, _ = bars_of(panel, n, self._relative[n : n + 1])
        self._bars[n] = len(bars)
        if not len(bars):
            return
        column = 0
        for feature in self.plan.series:
            part = slice(column, column + len(feature.names))
            column = part.stop
            if feature.kernel is not None:
                state = self._kernel_states[feature.names[0]][n : n + 1]
                self._carry[n, part] = feature.kernel.fold(state, bars, len(feature.names))[-1]
            elif len(bars) >= self.plan.warmup:
                values = run(feature, bars, self.symbols[n])
                refuse_longer_memory(feature, bars, values, self.symbols[n], self.plan.warmup)
                self._carry[n, part] = values[-1]
        kept = min(len(bars), self._window_times.shape[1])
        if kept:
            self._window_times[n, -kept:] = bars.times[-kept:].view(np.int64)
            for name, window in self._windows.items():
                values_ = getattr(bars, name)
                if values_ is not None:
                    window[n, -kept:] = values_[-kept:]

    def push(self, row: Panel, exogenous: Floats | None = None) -> FeatureRow:
        """The row of X of this row of a panel (T = 1); a refusal changes nothing.

        exogenous [N,K]: the series of the plan as known now, NaN where none is in force
        """
        self._check(row, exogenous)
        on = ~np.isnan(row.close[0])
        unit = 1.0 / row.anchor
        if row.factor is not None:
            unit = unit * row.factor[0]
        grids = {name: getattr(row, name) for name in MONEY}
        raw = {k: g[0] for k, g in grids.items() if g is not None}
        fields = anchor_fields(raw, unit, vwap="vwap" in row.fields)
        relative = None
        if values_are_relative(row):
            relative, out = self._relative.copy(), np.empty((len(on), 1, 1))
            relative_value(relative, on, out, fields["value"][:, None])
            fields["value"] = out[:, 0, 0]
        for name, values in fields.items():
            self._bar[_FIELDS.index(name)] = values
        self._check_values(on, tuple(fields))
        time = int(row.times.astype("datetime64[us]").view(np.int64)[0])
        windows = self._extend_windows(fields, on, time) if self._factors else None
        custom = self._run_factors(windows, on) if windows is not None else []
        # Nothing is refused from here on.
        if relative is not None:
            self._relative[:] = relative
        if windows is not None:
            self._window_times, self._windows = windows.times, windows.fields
        self._time[()] = self._times[:] = time
        for advance, (state, *rest) in self._calls:
            advance(state, on, *rest)
        table = self._out[self._place]
        for part, rows in custom:
            table[:, part] = rows
        np.copyto(self._carry, table, where=on[:, None], casting="same_kind")
        self._bars += on
        return self._assemble(row, on, exogenous)

    def _assemble(self, row: Panel, on: Bools, exogenous: Floats | None) -> FeatureRow:
        """Mask, rank, join and scale."""
        present = row.present[0] & (self._bars >= self.plan.warmup)
        x = np.zeros((len(on), len(self.plan.names)), dtype=np.float32)
        shown = present[:, None] & (on[:, None] | self._carried)
        x[:, : len(self.plan.sources)] = np.where(shown, self._carry, 0)[:, self.plan.sources]
        for method, columns in self._across.items():
            base = x[:, columns].T.astype(np.float64, order="C")
            mask = np.tile(present & row.member[0], (len(base), 1))
            x[:, columns] = ACROSS[method](base, mask).T
        if exogenous is not None and self.plan.exogenous:
            known = np.where(present[:, None], exogenous, 0.0)
            x[:, -known.shape[1] :] = known
        x = self.scaler.transform(x)
        x[~present] = 0.0
        return FeatureRow(x, present)

    def _extend_windows(self, fields: dict[str, Floats], on: Bools, time: int) -> _Windows:
        """The factors' windows with this bar at their end, in new arrays."""
        moved = np.where(on[:, None], np.roll(self._window_times, -1, axis=1), self._window_times)
        moved[on, -1] = time
        windows = {}
        for name, window in self._windows.items():
            windows[name] = np.where(on[:, None], np.roll(window, -1, axis=1), window)
            if name in fields:
                windows[name][on, -1] = fields[name][on]
        return _Windows(moved, windows, frozenset(fields))

    def _run_factors(self, windows: _Windows, on: Bools) -> list[tuple[slice, Floats]]:
        """Columns and values [N,C] of each user's factor, for symbols that are warmed up."""
        warm = on & (self._bars + 1 >= self.plan.warmup)
        parts, column = [], 0
        for feature in self.plan.series:
            part = slice(column, column + len(feature.names))
            column = part.stop
            if feature.kernel is None:
                rows = np.full((len(on), len(feature.names)), np.nan)
                for n in np.flatnonzero(warm):
                    bars = windows.bars(int(n), feature.lookback)
                    rows[n] = run(feature, bars, self.symbols[n])[-1]
                parts.append((part, rows))
        return parts

    def _check(self, row: Panel, exogenous: Floats | None) -> None:
        if row.symbols != self.symbols or len(row.times) != 1:
            raise DataError(
                f"the row is a panel of {row.shape} with symbols {row.symbols[:3]} …, expected one "
                f"row of {self.symbols[:3]} … ({len(self.symbols)})."
            )
        last = self._time.astype("datetime64[us]")
        if self._time != _NEVER and row.times[0] <= last:
            raise DataError(f"the row of {row.times[0]} is not after the last one, {last}.")
        self._refuse_missing(row)
        series, shape = self.plan.exogenous, (len(self.symbols), len(self.plan.exogenous))
        if series and (exogenous is None or exogenous.shape != shape):
            is_ = "none" if exogenous is None else f"the shape {exogenous.shape}"
            raise DataError(
                f"exogenous values: expected {shape} ({', '.join(series)}), it is {is_}."
            )

    def _refuse_missing(self, panel: Panel) -> None:
        if self._needs <= panel.fields:
            return
        for feature in self.plan.series:
            lacks = sorted(feature.needs - panel.fields)
            if lacks:
                raise FeatureError(
                    f"feature {feature.names[0]!r} cannot be streamed: the panel has no "
                    f"{', '.join(lacks)}.",
                    feature.names[0],
                )

    def _check_values(self, on: Bools, have: tuple[str, ...]) -> None:
        """Refuse a bar with a number that is none, or beyond any market."""
        least, needed = _least(have)
        values = self._bar[: len(least)]
        bad = on & needed & ~((values >= least) & (values <= _MOST))
        if bad.any():
            k, n = (int(i) for i in np.argwhere(bad)[0])
            raise DataError(
                f"{self.symbols[n]}: {_FIELDS[k]} is {values[k, n]:g} in units of its first close, "
                f"expected a number from {least[k, 0]:g} to {_MOST:g}. Correct the bar."
            )

    def state(self) -> StreamState:
        """All that `restore` needs; arrays are copies."""
        arrays = {name: array.copy() for name, array in self._arrays().items()}
        names = [list(f.names) for f in self.plan.series]
        return StreamState(arrays, {"symbols": list(self.symbols), "features": names})

    def restore(self, state: StreamState) -> None:
        """Continue from what `state` gave, in a stream of the same symbols and features."""
        mine = self.state()
        if state.facts != mine.facts:
            odd = [k for k, fact in mine.facts.items() if state.facts.get(k) != fact]
            raise StoreError(
                f"the state is of a stream of other {', '.join(odd)}. Start from history."
            )
        check_arrays(state.arrays, mine.arrays)
        for name, array in self._arrays().items():
            array[...] = state.arrays[name]

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {
            **{"time": self._time, "bars": self._bars, "carry": self._carry},
            **{"relative": self._relative, "window.times": self._window_times},
        }
        arrays |= {f"window.{name}": window for name, window in self._windows.items()}
        return arrays | {f"kernel.{name}": s for name, s in self._kernel_states.items()}


class _Windows(NamedTuple):
    """The last bars of every symbol, the newest last: times, fields [N,W]; have: which."""

    times: np.ndarray
    fields: dict[str, Floats]
    have: frozenset[str]

    def bars(self, n: int, length: int) -> Bars:
        """Symbol n's last bars."""
        fields = {name: self.fields[name][n, -length:] for name in self.have}
        return Bars(times=self.times[n, -length:].view("datetime64[us]"), **fields)


def refuse_longer_memory(
    feature: Feature, bars: Bars, values: Floats, symbol: str, warmup: int
) -> None:
    """Refuse a factor whose value over all bars is not that over its last `lookback` bars.

    values [L,C]: over all bars. Looked at where a symbol warms up, half-way and at the end.
    """
    for t in sorted({warmup - 1, (warmup + len(bars)) // 2 - 1, len(bars) - 1}):
        part = slice(t + 1 - feature.lookback, t + 1)
        names = [name for name in Bars.__slots__ if getattr(bars, name) is not None]
        window = replace(bars, **{name: getattr(bars, name)[part] for name in names})
        alone = run(feature, window, symbol)[-1]
        if not np.array_equal(alone.astype(np.float32), values[t].astype(np.float32)):
            raise FeatureError(
                f"factor {feature.names[0]!r} cannot be streamed: for {symbol} at {bars.times[t]} "
                f"it is {values[t]} over all bars and {alone} over the {feature.lookback} that it "
                "declares as its lookback. Declare a longer one, or compute it from these alone.",
                feature.names[0],
            )
