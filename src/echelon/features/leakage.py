"""The leakage check: change or remove the future, and see whether anything before it changes.

Four tests, the last three on the whole line from stored bars to features and scaler:

1. *ladder*: every time-series feature on many prefixes of single symbols, because some leaks
   (a back-fill over a gap) show only at cuts that fall into the gap. What fails here is left out
   of the other three.
2. *truncated*: everything after a cut removed; nothing up to it may change.
3. *scrambled*: everything after a cut replaced by noise; nothing up to it may change.
4. *rescaled*: every symbol's prices in other units; no feature may change at all. A feature that
   does carries the price level, and a file adjusted to its download day has put later splits and
   dividends into that level.

What differs is reported by name: features, scaler entries, membership and the other masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from echelon import rng
from echelon.config import Config
from echelon.data.build import PanelRequest, build_panel
from echelon.data.panel import Panel
from echelon.data.store import Manifest, Store
from echelon.data.views import RescaledView, ScrambledView, TruncatedView
from echelon.errors import FeatureError
from echelon.features.base import Bars, Feature
from echelon.features.engine import FeaturePlan, bars_of, compute, load_exogenous
from echelon.features.prepare import panel_fields, panel_request, refuse_empty_train, split_layout
from echelon.features.registry import run, select
from echelon.features.scaler import RunningMoments
from echelon.files import read_array, scratch_directory
from echelon.types import Bools, Floats, Floats32

Test = Literal["truncated", "scrambled", "rescaled", "ladder"]
_MASKS = ("present", "member", "tradable", "suspended", "delisted")
_GRIDS = ("open", "high", "low", "close", "volume", "amount", "factor", "pre_close", "band")
_PANEL = (*_MASKS, *_GRIDS, "limit_up", "limit_down", "benchmark")
_MAX_SYMBOLS = 60
_LADDER_RUN = 250


@dataclass(frozen=True, slots=True)
class Leak:
    """Something up to the cut (None: anywhere) that depends on what comes after it, or on units."""

    kind: Literal["feature", "scaler", "panel"]
    name: str
    test: Test
    cut: datetime | None
    where: str
    detail: str


@dataclass(frozen=True)
class LeakageReport:
    leaks: tuple[Leak, ...]
    features: tuple[str, ...]
    cuts: tuple[datetime, ...]
    symbols: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(leak.name for leak in self.leaks))


@dataclass(frozen=True)
class _Line:
    """One pass through the whole line: panel, X [T,N,F] (unscaled), the train window's moments."""

    names: tuple[str, ...]
    panel: Panel
    x: Floats32
    moments: RunningMoments


def check_leakage(
    config: Config,
    store: Store,
    dataset: Manifest,
    *,
    n_cuts: int = 3,
    step: Callable[[str], None] | None = None,
) -> LeakageReport:
    """Run all four tests on the configured features over a stored dataset."""
    tell = step or (lambda _: None)
    store = store.pin_dataset(dataset.name)
    selection = select(config.features, panel_fields(config, dataset.info))
    request = panel_request(config)
    symbols = request.symbols or tuple(store.symbols(dataset.name)["symbol"])
    if len(symbols) > _MAX_SYMBOLS:  # evenly chosen: the code paths are the same for all
        chosen = np.linspace(0, len(symbols) - 1, _MAX_SYMBOLS).astype(int)
        symbols = tuple(symbols[k] for k in chosen)
    request = request._replace(symbols=symbols)
    panel = build_panel(store, dataset.name, request)
    cuts = _cuts(config, panel, dataset, n_cuts)
    plan = FeaturePlan.from_specs(selection.specs)
    tell("every feature on many prefixes of single symbols")

    def fresh() -> FeaturePlan:
        # User files are run again each time: what a factor remembers must not cross the cut.
        return FeaturePlan.from_specs(
            select(config.features, panel_fields(config, dataset.info)).specs
        )

    leaks = list(_ladder(panel, fresh, config.seed))
    leaking = {leak.name for leak in leaks}
    with scratch_directory("leakage") as folder:

        def take(view: Store, cut: datetime | None, k: int) -> _Line:
            clean, path = _without(fresh(), leaking), folder / f"{k}.npy"
            return _take_line(config, view, dataset.name, request, clean, cut, path)

        tell("the whole line as it is")
        true = take(store, None, 0)
        views: list[tuple[Test, datetime | None, Store]] = [
            view
            for cut in cuts
            for view in (
                ("truncated", cut, TruncatedView(store, cut)),
                ("scrambled", cut, ScrambledView(store, cut, config.seed)),
            )
        ]
        views.append(("rescaled", None, RescaledView(store)))
        if dataset.info.price_basis == "adjusted":
            views.append(("rescaled", None, RescaledView(store, volume=False)))
        for k, (test, cut, view) in enumerate(views, 1):
            tell(f"{test}{f' after {cut}' if cut else ''}")
            try:
                other = take(view, cut, k)
            except FeatureError as error:
                # It could be computed with the true future and cannot without it.
                leaks.append(Leak("feature", error.feature, test, cut, "", str(error)))
                continue
            leaks += _compare(config, true, other, test, cut)
        names = tuple(dict.fromkeys((*plan.names, *true.names)))
    return LeakageReport(tuple(leaks), names, tuple(cuts), len(panel.symbols))


def _cuts(config: Config, panel: Panel, dataset: Manifest, n_cuts: int) -> list[datetime]:
    """The end of the train window, then times spread over the data."""
    where = split_layout(config, panel.times, dataset.span)
    last_train = where.first_row + where.splits["train"].stop - 1
    spread = np.linspace(0.35, 0.95, max(0, n_cuts - 1)) * (len(panel.times) - 1)
    # A cut falls on a bar: the time axis ends with the last bar there is.
    has_bar = np.flatnonzero((~np.isnan(panel.close)).any(axis=1))
    wanted = [last_train, *spread.astype(int).tolist()]
    rows = sorted({int(has_bar[has_bar <= row][-1]) for row in wanted})
    return [panel.times[row].item() for row in rows]


def _without(plan: FeaturePlan, names: set[str]) -> FeaturePlan:
    series = tuple(f for f in plan.series if not names & set(f.names))
    kept = {name for f in series for name in f.names}
    return FeaturePlan(series, tuple(r for r in plan.ranks if r.base in kept), plan.exogenous)


def _take_line(
    config: Config,
    store: Store,
    dataset: str,
    request: PanelRequest,
    plan: FeaturePlan,
    cut: datetime | None,
    path: Path,
) -> _Line:
    """The whole line for one view of the data; X is written to `path`."""
    have = set(store.symbols(dataset)["symbol"])
    symbols = tuple(s for s in request.symbols if s in have)
    panel = build_panel(store, dataset, request._replace(symbols=symbols))
    # Exogenous series published after the cut are withheld like everything else.
    exogenous = load_exogenous(config, panel, published_until=cut)
    names = exogenous.names if exogenous else ()
    plan = FeaturePlan.from_specs((*plan.series, *plan.ranks), names)
    days = panel.times.astype("datetime64[D]")
    first, last = (np.datetime64(d) for d in config.split.train)
    train = range(int(np.searchsorted(days, first)), int(np.searchsorted(days, last, side="right")))
    present, moments = compute(panel, plan, path, train=train, exogenous=exogenous)
    if cut is None:
        refuse_empty_train(present[train.start : train.stop], plan, config)
    x = read_array(path, "Run the check again.")
    return _Line(plan.names, replace(panel, present=present), x, moments)


def _compare(
    config: Config,
    true: _Line,
    other: _Line,
    test: Test,
    cut: datetime | None,
) -> Iterator[Leak]:
    until = true.panel.times[-1] if cut is None else np.datetime64(cut, "us")
    rows = int(np.searchsorted(true.panel.times, until, side="right"))
    if not np.array_equal(true.panel.times[:rows], other.panel.times[:rows]):
        yield Leak("panel", "times", test, cut, "", "the time axis itself changes")
        return
    mine = [true.panel.symbols.index(s) for s in other.panel.symbols]
    leak = partial(_leak, other.panel, test, cut)
    for f, name in enumerate(true.names):
        yield from leak("feature", name, true.x[:rows, mine, f], other.x[:rows, :, f])
    train_end = np.datetime64(config.split.train[1], "D")
    if until.astype("datetime64[D]") >= train_end and len(mine) == len(true.panel.symbols):
        # Mean and spread of the train window must not move once that window is complete.
        for part in (field.name for field in fields(RunningMoments)):
            a, b = getattr(true.moments, part), getattr(other.moments, part)
            spread = np.sqrt(true.moments.squares / np.maximum(true.moments.count, 1))
            level = spread if part == "mean" else a
            for f in np.flatnonzero(np.abs(a - b) > 1e-5 * np.abs(level) + 1e-9).tolist():
                detail = f"{part} {a[f]:.6g} becomes {b[f]:.6g}"
                yield Leak("scaler", true.names[f], test, cut, "", detail)
    if test == "rescaled":
        return  # prices and limits are meant to change with the units
    for name in _PANEL:
        mine_values, theirs = getattr(true.panel, name), getattr(other.panel, name)
        if mine_values is None and theirs is None:
            continue
        a = _rows(name, mine_values, rows, mine)
        b = _rows(name, theirs, rows, list(range(len(mine))))
        yield from leak("panel", name, a, b)


def _rows(name: str, values: Floats | Bools | None, rows: int, columns: list[int]) -> Floats:
    """The first rows as float64, [rows] or [rows,N]; a factor nobody has is 1."""
    if values is None:
        missing = 1.0 if name == "factor" else np.nan
        return np.full((rows, len(columns)), missing)
    part = np.asarray(values[:rows], dtype=np.float64)
    if part.ndim == 2:
        part = part[:, columns]
    return np.nan_to_num(part, nan=1.0) if name == "factor" else part


def _leak(
    panel: Panel,
    test: Test,
    cut: datetime | None,
    kind: Literal["feature", "panel"],
    name: str,
    a: Floats | Floats32,
    b: Floats | Floats32,
) -> Iterator[Leak]:
    """At most one leak: the first place where a (as it is) and b (changed) differ."""
    if a.shape != b.shape:
        yield Leak(kind, name, test, cut, "", "is there only with, or only without, the future")
        return
    differ = _differ(a, b, 1e-6)
    if not differ.any():
        return
    place = tuple(int(i) for i in np.argwhere(differ)[0])
    at = str(panel.times[place[0]].astype("datetime64[s]")).replace("T00:00:00", "")
    where = at if len(place) == 1 else f"{panel.symbols[place[1]]} at {at}"
    share = differ.mean()
    detail = f"{a[place]:.6g} becomes {b[place]:.6g}; {share:.2%} of the values differ"
    yield Leak(kind, name, test, cut, where, detail)


def _differ(a: Floats | Floats32, b: Floats | Floats32, tolerance: float) -> Bools:
    """Where a and b differ by more than rounding; NaN equals NaN.

    Rounding is relative to the value and to the typical size of the column (its median): a mean
    or a standard deviation would let a single outlier hide everything else.
    """
    size = np.abs(a.astype(np.float64))
    known = size[np.isfinite(size) & (size > 0)]
    typical = float(np.median(known)) if len(known) else 0.0
    missing = np.isnan(a) != np.isnan(b)
    gap = np.abs(a.astype(np.float64) - b)
    return np.asarray(missing | (gap > tolerance * (size + typical)))


def _ladder(panel: Panel, fresh: Callable[[], FeaturePlan], seed: int) -> Iterator[Leak]:
    """Each feature on many prefixes of a few symbols, the rest removed or replaced by noise."""
    draw = rng.stream(seed, "ladder")
    counts = (~np.isnan(panel.close)).sum(axis=0)
    able = np.flatnonzero(counts > fresh().warmup)
    chosen = draw.permutation(able)[:8]
    leaking: set[str] = set()
    for k, n in enumerate(chosen):
        bars, _ = bars_of(panel, int(n))
        symbol = panel.symbols[n]
        whole = {f.names: run(f, bars, symbol) for f in fresh().series}
        for cut in _ladder_cuts(fresh(), len(bars), draw, dense=k == 0):
            first = replace(bars, **{k: v[:cut] for k, v in _arrays(bars).items()})
            for changed in (first, _noisy_after(bars, cut, draw)):
                for feature in fresh().series:
                    if leaking & set(feature.names) or feature.lookback > cut:
                        continue
                    leak = _prefix_leak(feature, whole[feature.names], changed, cut, symbol)
                    if leak is not None:
                        leaking |= set(feature.names)
                        yield leak


def _ladder_cuts(
    plan: FeaturePlan, length: int, draw: np.random.Generator, *, dense: bool
) -> list[int]:
    """Lengths of prefixes: around every lookback, spread, and a dense stretch for rare regimes."""
    near = {f.lookback + k for f in plan.series for k in range(3)}
    least = min(f.lookback for f in plan.series)
    cuts = near | set(draw.integers(least, length, 24).tolist())
    if dense:
        start = int(draw.integers(least, max(least + 1, length - _LADDER_RUN)))
        cuts |= set(range(start, start + _LADDER_RUN))
    return sorted(cut for cut in cuts if 0 < cut < length)


def _prefix_leak(
    feature: Feature, whole: Floats, other: Bars, cut: int, symbol: str
) -> Leak | None:
    time = other.times[cut - 1].item()
    try:
        part = run(feature, other, symbol)[:cut]
    except FeatureError as error:
        return Leak("feature", feature.names[0], "ladder", time, symbol, str(error))
    for k, name in enumerate(feature.names):
        differ = _differ(whole[:cut, k], part[:, k], 1e-9)
        if differ.any():
            row = int(np.flatnonzero(differ)[0])
            detail = f"{whole[row, k]:.6g} becomes {part[row, k]:.6g} without later bars"
            where = f"{symbol} at {str(other.times[row])[:19]}"
            return Leak("feature", name, "ladder", time, where, detail)
    return None


def _noisy_after(bars: Bars, length: int, draw: np.random.Generator) -> Bars:
    """The same first bars; later ones times noise, one factor a bar, which keeps OHLC in order."""
    noise = np.exp(draw.normal(0.0, 0.5, len(bars)))
    noise[:length] = 1.0
    return replace(bars, **{k: v * noise for k, v in _arrays(bars).items() if k != "times"})


def _arrays(bars: Bars) -> dict[str, Any]:
    arrays = {f.name: getattr(bars, f.name) for f in fields(Bars)}
    return {name: array for name, array in arrays.items() if array is not None}
