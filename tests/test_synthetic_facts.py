"""Stylised facts of the synthetic market, each within a stated range over a fixed set of seeds.

The ranges bracket what daily bars of large US stocks show over six-year windows: excess kurtosis
2 to 12, autocorrelation of |r| from about 0.2 at lag 1 to 0.1 at lag 20, correlation 0.2 to 0.5.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from echelon.config import SyntheticConfig
from echelon.data.synth.market import REGIMES, Factor, ar1, build_market
from echelon.data.synth.minutes import MinuteEngine
from echelon.data.synth.path import trace
from echelon.types import Floats

SEEDS = (0, 1, 2, 3, 4, 5)
CALM = {"delistings": 0.0, "late_listings": 0.0, "suspension_rate": 0.0}


@cache
def quiet_returns(seed: int) -> Floats:
    """Daily log total returns [T,N] of a market in which every symbol trades every day."""
    market = build_market(SyntheticConfig(n_symbols=24, n_days=1500, **CALM), seed)
    paths = [trace(market, n) for n in range(market.n_symbols)]
    return np.diff(np.log(np.stack([p.close_ticks * p.factor for p in paths], axis=1)), axis=0)


def day_returns(factor: Factor) -> Floats:
    """Log return of each day, [T]."""
    return factor.overnight + factor.intraday


def autocorrelation(x: Floats, lag: int) -> float:
    """Mean over columns of the autocorrelation of x [T,N]."""
    x = x - x.mean(axis=0)
    return float(((x[lag:] * x[:-lag]).mean(axis=0) / (x * x).mean(axis=0)).mean())


def test_daily_returns_have_fat_tails() -> None:
    for seed in SEEDS:
        r = quiet_returns(seed) - quiet_returns(seed).mean(axis=0)
        excess = (r**4).mean(axis=0) / (r**2).mean(axis=0) ** 2 - 3
        assert 2.0 < np.median(excess) < 12.0
        assert excess.min() > 0.5


def test_volatility_clusters_and_fades_with_the_lag() -> None:
    by_lag = {
        lag: np.array([autocorrelation(np.abs(quiet_returns(s)), lag) for s in SEEDS])
        for lag in (1, 5, 20, 60)
    }
    assert np.all((by_lag[1] > 0.08) & (by_lag[1] < 0.40))
    assert np.all((by_lag[5] > 0.07) & (by_lag[5] < 0.35))
    assert np.all((by_lag[20] > 0.03) & (by_lag[20] < 0.25))
    means = [by_lag[lag].mean() for lag in (1, 5, 20, 60)]
    assert means == sorted(means, reverse=True)


def test_returns_themselves_are_not_autocorrelated() -> None:
    for lag in (1, 2, 5):
        values = [autocorrelation(quiet_returns(seed), lag) for seed in SEEDS]
        assert np.abs(np.mean(values)) < 0.015
        assert np.max(np.abs(values)) < 0.05


def test_symbols_move_together_and_more_so_within_a_sector() -> None:
    for seed in SEEDS:
        corr = np.corrcoef(quiet_returns(seed).T)
        sector = build_market(SyntheticConfig(n_symbols=24, n_days=1), seed).sector
        same = sector[:, None] == sector
        off = ~np.eye(len(sector), dtype=bool)
        assert 0.15 < corr[off].mean() < 0.55
        assert corr[same & off].mean() > corr[~same].mean() + 0.05


def test_annual_volatility_is_that_of_single_stocks() -> None:
    for seed in SEEDS:
        assert 0.20 < quiet_returns(seed).std(axis=0).mean() * np.sqrt(252) < 0.45


def test_volume_over_the_session_is_a_u_and_minutes_move_together() -> None:
    config = SyntheticConfig(n_symbols=8, n_days=32, **CALM)
    engine = MinuteEngine(build_market(config, 1))
    made = [engine.block(trace(engine.market, n), 0) for n in range(8)]
    volume = np.stack([b.lots.sum(axis=0) for b in made if b is not None]).sum(axis=0)
    opening, middle, closing = volume[:30].mean(), volume[100:140].mean(), volume[-30:].mean()
    assert 1.8 < opening / middle < 5.0
    assert 1.8 < closing / middle < 5.0
    assert volume[60:90].mean() < opening
    closes = np.stack([b.close.ravel() for b in made if b is not None])
    minute_returns = np.diff(np.log(closes.reshape(8, 32, 240)), axis=2).reshape(8, -1)
    corr = np.corrcoef(minute_returns)
    assert 0.1 < corr[~np.eye(8, dtype=bool)].mean() < 0.6
    # Busy minutes are volatile minutes.
    lots = np.stack([b.lots[:, 1:].ravel() for b in made if b is not None])
    for n in range(8):
        assert np.corrcoef(np.abs(minute_returns[n]), lots[n])[0, 1] > 0.15


def test_overnight_gaps_have_fatter_tails_than_sessions() -> None:
    market = build_market(SyntheticConfig(n_symbols=24, n_days=1500, **CALM), 0)
    ratio = []
    for n in range(24):
        p = trace(market, n)
        night = p.log_open[1:] - p.log_close[:-1]
        inside = p.log_close - p.log_open
        ratio.append(kurtosis(night) / kurtosis(inside))
        assert 0.2 < night.var() / (night.var() + inside.var()) < 0.7
    assert np.median(ratio) > 1.5


def kurtosis(x: Floats) -> float:
    x = x - x.mean()
    return float((x**4).mean() / (x**2).mean() ** 2)


def test_turbulent_regime_is_the_most_volatile_and_all_regimes_occur() -> None:
    market = build_market(SyntheticConfig(n_symbols=1, n_days=4000), 2)
    spread = [day_returns(market.market)[market.regime == k].std() for k in range(len(REGIMES))]
    assert np.bincount(market.regime, minlength=3).min() > 100
    assert spread[2] > spread[1] > spread[0]
    assert np.mean(np.diff(market.regime) != 0) < 0.03


def test_market_falls_raise_later_volatility() -> None:
    corr = []
    for seed in SEEDS:
        factor = build_market(SyntheticConfig(n_symbols=1, n_days=4000), seed).market
        change = np.diff(np.log(factor.volatility))
        corr.append(np.corrcoef(day_returns(factor)[:-1] / factor.volatility[:-1], change)[0, 1])
    assert -0.7 < np.mean(corr) < -0.1


def test_volatility_path_standardises_returns() -> None:
    market = build_market(SyntheticConfig(n_symbols=10, n_days=2000, **CALM), 4)
    for n in range(10):
        p = trace(market, n)
        z = (np.diff(p.log_close) - p.drift[1:]) / p.volatility[1:]
        assert 0.85 < z.std() < 1.15
        assert abs(z.mean()) < 0.1


def test_ar1_has_the_stated_spread_and_persistence() -> None:
    x = ar1(np.random.default_rng(0).standard_normal(200_000), 0.9, 0.4)
    assert x.std() == pytest.approx(0.4, rel=0.03)
    assert np.corrcoef(x[1:], x[:-1])[0, 1] == pytest.approx(0.9, abs=0.01)
