"""The guards of a live engine: false alarms in simulated years, delays to detection, overhead.

    python -m bench guards
    python bench/guards.py --markets 40 --draws 24

1. Bars unlike the training data. Markets of the synthetic generator (20 symbols, regimes, gaps,
   suspensions, splits), 15 years each: train on 8, validation of 2, 5 that nobody has seen.
   Features are the stationary set; embeddings are those of a TimeCNN as drawn. Alarms of the 5
   years are counted against the stated number: false ones, all of them. Then faults, from a day on:
       volume × 100     of all symbols, 手 for 股
       one × 100        of a single symbol
       dead symbol      its prices stand still, its volume goes on
       two columns      of X swapped, a pair drawn at random
       all columns      of X moved by one
       open and close   of the bars swapped
       lagged feed      every bar is that of the day before
2. Drift. The exact filter trades drawn markets with a known edge (`proving.planted`) at 5 basis
   points a side, fills at the next open; validation of 2 years, then 21 that nobody has seen.
   Alarms are counted in the same way. Then faults, a year after the start:
       doubled costs, half the orders not filled
       lagged feed      decided on and compared with the bar before, filled at the true open
       edge halved, edge gone      the drift of the market is
   The weak edge is one of a Sharpe ratio of about 1.
3. Overhead: what the guards take of a decision of the flat agent on 20 assets (the policy of
   `bench decision`), processor time.

Fails where either counts more false alarms than stated, by more than chance (Poisson, 1 %), or
where the guards take 5 % of the decision's 99th percentile or more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import poisson

from echelon.backtest.run import run_backtest
from echelon.config import Config, SyntheticConfig, load_config
from echelon.data.build import build_panel
from echelon.data.importing import import_source
from echelon.data.panel import Panel
from echelon.data.sources.synthetic import SyntheticSource
from echelon.data.store import Store
from echelon.envs.world import World
from echelon.features.engine import FeaturePlan, compute
from echelon.features.registry import select
from echelon.features.scaler import Scaler
from echelon.files import scratch_directory
from echelon.models.encoders import Encoder, build_encoder
from echelon.monitoring.drift import TESTS, DriftTests, Expectation
from echelon.monitoring.guard import Reference, RowGuard
from echelon.proving.planted import BayesFilter, PlantedMarket
from echelon.proving.worlds import at_fee, planted_worlds, proof_config
from echelon.serving.guard_reference import bar_pairs
from echelon.types import Bools, Floats, Floats32

ROOT = Path(__file__).parents[1]
YEAR, SYMBOLS, SEED = 252, 20, 7
TRAIN, VALID, HELD_OUT = 8 * YEAR, 2 * YEAR, 5 * YEAR
PER_YEAR, WATCHED = 0.5, YEAR
"""False alarms a year of each guard, its default; bars after a fault in which it is looked for."""
FAULTS = ("volume × 100", "one × 100", "dead symbol", "open and close", "lagged feed")
OF_COLUMNS = ("two columns", "all columns")
EDGES = {"strong edge": 0.003, "weak edge": 0.0012}
OVERHEAD = 0.05


class Market(NamedTuple):
    """A market as a policy sees it: x[T,N,F], shown[T,N], embeddings[T,D]."""

    panel: Panel
    scaler: Scaler
    x: Floats32
    shown: Bools
    embeddings: Floats32


class Eyes:
    """Features and embeddings of panels."""

    def __init__(self) -> None:
        self.config = proof_config(load_config(ROOT / "configs/qtmrl-fast.yaml"))
        self._encoder: Encoder | None = None

    def see(self, panel: Panel, scaler: Scaler | None = None) -> Market:
        """The panel with its features; scaler: None: fitted on its train window."""
        plan = FeaturePlan.from_specs(select(self.config.features, panel.fields).specs)
        with scratch_directory("guards") as scratch:
            present, moments = compute(panel, plan, scratch / "X.npy", train=range(TRAIN))
            raw = np.load(scratch / "X.npy", allow_pickle=False)
        if scaler is None:
            yes, days = np.ones(len(plan.names), dtype=np.bool_), (date.min, date.max)
            scaler = Scaler.fit(plan.names, moments, yes, days)
        x = scaler.transform(raw)
        x[~present] = 0.0
        shown = present & panel.tradable
        return Market(panel, scaler, x, shown, self.embed(x, shown))

    def embed(self, x: Floats32, shown: Bools) -> Floats32:
        """[T,D] mean embeddings of rows with a whole window; NaN of the others."""
        if self._encoder is None:
            torch.manual_seed(SEED)
            self._encoder = build_encoder(self.config, x.shape[2]).eval()
        window, windows = self.config.window, []
        view = np.lib.stride_tricks.sliding_window_view(x, self.config.window, axis=0)
        with torch.no_grad():
            for part in np.array_split(np.moveaxis(view, -1, 1), max(1, len(view) // 128)):
                z = self._encoder.encode_windows(torch.from_numpy(np.ascontiguousarray(part)))
                windows.append(z.numpy())
        every = np.concatenate(windows)
        weight = shown[window - 1 :].astype(np.float32)
        mean = np.einsum("tnd,tn->td", every, weight) / np.maximum(weight.sum(axis=1), 1)[:, None]
        return np.concatenate([np.full((window - 1, every.shape[2]), np.nan, np.float32), mean])


def draw_panel(seed: int) -> Panel:
    """15 years of a synthetic market."""
    days = TRAIN + VALID + HELD_OUT
    config = SyntheticConfig(
        n_symbols=SYMBOLS, n_days=days, delistings=0.0, late_listings=0.0, start=date(2005, 1, 3)
    )
    with scratch_directory("guards") as scratch:
        import_source(SyntheticSource(config, seed), Store(scratch), "m")
        return build_panel(Store(scratch), "m")


def with_fault(panel: Panel, fault: str, since: int, rng: np.random.Generator) -> Panel:
    """The panel with a fault from the row `since` on."""
    names = ("open", "high", "low", "close", "volume", "amount", "factor", "pre_close")
    have = {name: getattr(panel, name) for name in names}
    if fault == "lagged feed":
        masks = ("present", "member", "suspended", "tradable", "delisted")
        have |= {name: getattr(panel, name) for name in masks}
    grids: dict[str, Any] = {name: grid.copy() for name, grid in have.items() if grid is not None}
    n = int(rng.integers(SYMBOLS))
    for name, grid in grids.items():
        if name in ("volume", "amount") and fault == "volume × 100":
            grid[since:] *= 100.0
        elif name in ("volume", "amount") and fault == "one × 100":
            grid[since:, n] *= 100.0
        elif name in ("open", "high", "low", "close") and fault == "dead symbol":
            grid[since:, n] = panel.close[:since, n][~np.isnan(panel.close[:since, n])][-1]
        elif fault == "lagged feed":
            grid[since:] = have[name][since - 1 : -1]
    if fault == "open and close":
        grids["open"][since:], grids["close"][since:] = have["close"][since:], have["open"][since:]
    return replace(panel, **grids)


def alarms_of(guard: RowGuard, market: Market, rows: range) -> Iterator[tuple[int, str]]:
    """(row, statistic) of every alarm."""
    for t in rows:
        if not market.shown[t].any():
            continue
        z = market.embeddings[t]
        for alarm in guard.check(market.x[t], market.x[t - 1], market.shown[t], z):
            if alarm.on:
                yield t, alarm.name


def swap_columns(eyes: Eyes, market: Market, fault: str, since: int, pair: Any) -> Market:
    x = market.x.copy()
    if fault == "all columns":
        x[since:] = np.roll(market.x[since:], 1, axis=2)
    else:
        x[since:, :, pair] = market.x[since:, :, pair[::-1]]
    return market._replace(x=x, embeddings=eyes.embed(x, market.shown))


class Count(NamedTuple):
    """Alarms in so many ordinary years, and delays in bars by fault; NaN: not seen."""

    years: float
    by_name: Mapping[str, int]
    delays: Mapping[str, list[float]]
    first: Mapping[str, list[str]]

    @property
    def holds(self) -> bool:
        """Whether there are no more alarms than stated, but for chance."""
        alarms = sum(self.by_name.values())
        return float(poisson.sf(alarms - 1, PER_YEAR * self.years)) > 0.01


def watch_rows(markets: int, with_faults: int) -> Count:
    """Part 1."""
    eyes, by_name = Eyes(), dict[str, int]()
    delays: dict[str, list[float]] = {fault: [] for fault in (*FAULTS, *OF_COLUMNS)}
    first: dict[str, list[str]] = {fault: [] for fault in delays}
    warm = 60
    for k in range(markets):
        rng = np.random.default_rng([SEED, k])
        market = eyes.see(draw_panel(SEED + k))
        held_out = range(TRAIN + VALID, len(market.x))
        reference = Reference.fit(
            market.x,
            market.shown,
            range(warm, TRAIN),
            range(TRAIN, TRAIN + VALID),
            market.embeddings,
            float(YEAR),
        )
        for _, name in alarms_of(RowGuard(reference, SYMBOLS, PER_YEAR), market, held_out):
            by_name[name] = by_name.get(name, 0) + 1
        since = int(rng.integers(held_out.start + 20, held_out.stop - WATCHED))
        for fault in delays if k < with_faults else ():
            if fault in OF_COLUMNS:
                pair = rng.choice(market.x.shape[2], 2, replace=False)
                seen = swap_columns(eyes, market, fault, since, pair)
            else:
                seen = eyes.see(with_fault(market.panel, fault, since, rng), market.scaler)
            guard = RowGuard(reference, SYMBOLS, PER_YEAR)
            rows = range(since - 20, since + WATCHED)
            hits = [hit for hit in alarms_of(guard, seen, rows) if hit[0] >= since]
            delays[fault].append(hits[0][0] - since + 1 if hits else np.nan)
            first[fault] += [hits[0][1]] if hits else []
    return Count(markets * HELD_OUT / YEAR, by_name, delays, first)


class _Lagged(BayesFilter):
    """The filter as it decides by the bar before."""

    def start(self, world: World, span: range) -> None:
        super().start(world, span)
        self._wants = np.concatenate([self._wants[:1], self._wants[:-1]])


def drift_config() -> Config:
    return at_fee(proof_config(load_config(ROOT / "configs/qtmrl-fast.yaml")), 5.0)


def traded_pairs(world: World, policy: BayesFilter, config: Config, *, stale: int = 0) -> Floats:
    """[S,Q,2] of a policy in a whole draw; stale: bars that arrival prices are late by."""
    span = world.span("test")
    span = range(span.start + stale, span.stop)
    pairs = bar_pairs(run_backtest(policy, world, span, config), world, span.start)
    if stale:
        moved = replace(world, rows=world.rows._replace(close=np.roll(world.rows.close, 1, axis=0)))
        late = bar_pairs(run_backtest(policy, world, span, config), moved, span.start)
        pairs[:, 5:] = late[:, 5:]
    return pairs


def edge_of(pairs: Floats) -> float:
    """Annual Sharpe ratio."""
    returns = pairs[:, 0, 0]
    return float(returns.mean() / returns.std() * YEAR**0.5)


def watch_drift(draws: int, drift: float) -> tuple[Count, dict[str, float]]:
    """Part 2, of markets with this drift."""
    config, by_name = drift_config(), dict[str, int]()
    delays: dict[str, list[float]] = {}
    first: dict[str, list[str]] = {}
    sharpes: dict[str, list[float]] = {}
    years = 0.0
    for k in range(draws):
        market = PlantedMarket(drift=drift)
        policy, lagged = BayesFilter(market, "weights"), _Lagged(market, "weights")
        made = [replace(market, drift=drift * part) for part in (1.0, 0.5, 0.0)]
        draw = [m.draw(SEED + k, f"guards {m.drift}") for m in made]
        usual, halved, gone = planted_worlds(draw, config)
        pairs = traded_pairs(usual, policy, config)
        valid, live = pairs[: 2 * YEAR], pairs[2 * YEAR :]
        expectation = Expectation.fit(valid, float(YEAR))
        tests = DriftTests(expectation, PER_YEAR, float(YEAR))
        for bar in live:
            for n in tests.step(bar):
                by_name[TESTS[n].quantity] = by_name.get(TESTS[n].quantity, 0) + 1
        years += len(live) / YEAR
        dear, unfilled = live.copy(), live.copy()
        dear[:, :2, 0] -= (live[:, 3, 0] * live[:, 2, 0] / np.maximum(live[:, 3, 1], 1e-12))[
            :, None
        ]
        dear[:, 3, 0] *= 2.0
        unfilled[:, 4, 0] *= 0.5
        faults = {
            "doubled costs": dear,
            "half not filled": unfilled,
            "lagged feed": traded_pairs(usual, lagged, config, stale=1)[2 * YEAR :],
            "edge halved": traded_pairs(halved, policy, config),
            "edge gone": traded_pairs(gone, policy, config),
        }
        for name, stream in {"usual": live, **faults}.items():
            sharpes.setdefault(name, []).append(edge_of(stream))
        for name, stream in faults.items():
            tests = DriftTests(expectation, PER_YEAR, float(YEAR))
            for bar in live[:YEAR]:
                tests.step(bar)
            delay, what = first_alarm(tests, stream[YEAR:])
            delays.setdefault(name, []).append(delay)
            first.setdefault(name, []).extend(what)
    means = {name: float(np.mean(values)) for name, values in sharpes.items()}
    return Count(years, by_name, delays, first), means


def first_alarm(tests: DriftTests, stream: Floats) -> tuple[float, list[str]]:
    for t, bar in enumerate(stream):
        if passed := tests.step(bar):
            return t + 1.0, [TESTS[min(passed)].quantity]
    return np.nan, []


def show(title: str, count: Count, unit: str, most: int) -> None:
    alarms = sum(count.by_name.values())
    print(
        f"{title}: {alarms} false alarms in {count.years:,.0f} years, {alarms / count.years:.2f} a"
    )
    print(f"  year; stated {PER_YEAR:g}. By statistic: {dict(sorted(count.by_name.items()))}")
    print(f"  {'fault':16} {'seen':>8} {'median':>8} {'90 %':>8}  {unit}; first by")
    for fault, delays in count.delays.items():
        array = np.array(delays)
        seen, ranked = np.isfinite(array), np.sort(np.where(np.isfinite(array), array, np.inf))
        places = [ranked[int(q * (len(ranked) - 1))] for q in (0.5, 0.9)] if len(ranked) else []
        texts = [f"{place:,.0f}" if place < np.inf else f"> {most:,}" for place in places]
        names = sorted(set(count.first[fault]), key=count.first[fault].count, reverse=True)
        row = " ".join(f"{text:>8}" for text in (f"{seen.sum()}/{len(array)}", *texts))
        print(f"  {fault:16} {row}  {', '.join(names[:3])}")


def overhead(bars: int) -> float:
    """Share of a decision's 99th percentile that the guards take."""
    from bench.decision import ASSETS, WARM_UP, Walks, make_case
    from echelon.live.guards import Guards
    from echelon.serving.engine import DecisionEngine

    walks = Walks(bars + WARM_UP, ASSETS)
    with tempfile.TemporaryDirectory() as scratch:
        case = make_case(Path(scratch), "qtmrl-fast", walks)
        engine = DecisionEngine.from_store(case.bundle, case.store)
        guards = Guards(case.bundle)
        section = {"action": "warn", "false_alarms_per_year": PER_YEAR}
        guards.note("guard", {"event": "settings", "unlike_training": section, "drift": section})
        push, check = [], []
        for bar_set in walks.bar_sets():
            began = time.process_time_ns()
            decision = engine.push(bar_set)
            push.append(time.process_time_ns() - began)
            body = decision.to_dict()
            began = time.process_time_ns()
            guards.check(engine, body, "running")
            check.append(time.process_time_ns() - began)
    pushed, checked = (np.array(part[WARM_UP:]) / 1e3 for part in (push, check))
    p99 = float(np.percentile(pushed, 99))
    share = float(np.median(checked)) / p99
    print(
        f"overhead, {ASSETS} assets, {len(pushed):,} bars: guards {np.median(checked):.0f} µs "
        f"(p99 {np.percentile(checked, 99):.0f}), a decision {np.median(pushed):.0f} µs (p99 "
        f"{p99:.0f}): {share:.1%} of its p99; goal below {OVERHEAD:.0%}"
    )
    return share


def main(argv: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markets", type=int, default=40, help="synthetic markets, 15 years each")
    parser.add_argument("--faulty", type=int, default=16, help="of these, with faults too")
    parser.add_argument("--draws", type=int, default=24, help="drawn markets of 24 years")
    parser.add_argument("--bars", type=int, default=5_000, help="decisions for the overhead")
    args = parser.parse_args(list(argv))
    torch.set_num_threads(1)
    good = True
    if args.bars:
        good &= overhead(args.bars) < OVERHEAD
    if args.markets:
        rows = watch_rows(args.markets, min(args.faulty, args.markets))
        show("unlike the training data", rows, "bars", WATCHED)
        good &= rows.holds
    for name, drift in EDGES.items() if args.draws else ():
        count, sharpes = watch_drift(args.draws, drift)
        show(f"drift, {name}", count, "bars", 20 * YEAR)
        print("  Sharpe ratios: " + ", ".join(f"{n} {s:.2f}" for n, s in sharpes.items()))
        good &= count.holds
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
