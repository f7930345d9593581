"""The planted market: its numbers as specified, and its filter as exact as the sum over paths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import stats
from worlds import make_config

from echelon.backtest.baselines import Momentum
from echelon.backtest.run import run_backtest
from echelon.config import Config
from echelon.envs import Action
from echelon.envs.act import Holdings
from echelon.proving.planted import BayesFilter, PlantedMarket, planted_worlds
from echelon.types import Floats

MARKET = PlantedMarket()
FEW = (
    "features.ohlcv=false",
    "features.indicators={rsi: [14]}",
    "features.stationary.enabled=false",
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def few_features(*overrides: str) -> Config:
    return make_config(*FEW, "fee_rate=0.0005", *overrides)


@pytest.fixture(scope="module")
def long() -> tuple[PlantedMarket, Floats, Floats, Floats]:
    """(market, sign, log return to the close, gap to the open) of a very long draw."""
    market = PlantedMarket(n_bars=60_000)
    draw = market.draw(1, "long")
    growth = np.diff(np.log(draw.close), axis=0)
    gap = np.log(draw.open[1:] / draw.close[:-1])
    return market, draw.hidden, growth, gap


def test_shape_and_numbers_are_those_of_the_issue() -> None:
    assert (MARKET.n_assets, MARKET.n_bars) == (8, 6000)
    assert (MARKET.drift, MARKET.noise, MARKET.flip) == (0.003, 0.012, 0.015)
    draw = MARKET.draw(0, "x")
    assert draw.hidden.shape == draw.open.shape == draw.close.shape == (6000, 8)
    assert (draw.close[0] == 100.0).all()
    assert (draw.open[0] == 100.0).all()
    assert set(np.unique(draw.hidden)) == {-1.0, 1.0}


def test_signs_are_up_half_of_the_time_and_flip_as_often_as_told(
    long: tuple[PlantedMarket, Floats, Floats, Floats],
) -> None:
    market, sign, _, _ = long
    flips = sign[1:] != sign[:-1]
    n = flips.size
    error = np.sqrt(market.flip * (1 - market.flip) / n)
    assert flips.mean() == pytest.approx(market.flip, abs=4 * error)
    # Neighbouring signs hang together: 480,000 of them count as n·flip independent ones.
    assert sign.mean() == pytest.approx(0.0, abs=4 / np.sqrt(n * market.flip))
    first = np.array([PlantedMarket(n_bars=1, n_assets=400).draw(s, "a").hidden for s in range(10)])
    assert first.mean() == pytest.approx(0.0, abs=4 / np.sqrt(4000))


def test_signs_of_assets_are_independent(
    long: tuple[PlantedMarket, Floats, Floats, Floats],
) -> None:
    _, sign, _, _ = long
    together = np.corrcoef(sign.T)[np.triu_indices(8, 1)]
    assert np.abs(together).max() < 0.15


def test_returns_are_the_last_sign_times_drift_plus_noise(
    long: tuple[PlantedMarket, Floats, Floats, Floats],
) -> None:
    market, sign, growth, _ = long
    noise = growth - market.drift * sign[:-1]
    n = noise.size
    assert noise.mean() == pytest.approx(0.0, abs=4 * market.noise / np.sqrt(n))
    assert noise.std() == pytest.approx(market.noise, rel=4 / np.sqrt(2 * n))
    assert stats.kstest(noise[::10].ravel() / market.noise, "norm").pvalue > 0.001
    # The sign of the bar itself says nothing more about the return that led to it.
    later = growth - market.drift * sign[:-1]
    assert abs(np.corrcoef(later.ravel(), (sign[1:] - sign[:-1]).ravel())[0, 1]) < 4 / np.sqrt(n)
    assert abs(np.corrcoef(noise[1:].ravel(), noise[:-1].ravel())[0, 1]) < 4 / np.sqrt(n)


def test_opens_lie_on_the_way_between_closes(
    long: tuple[PlantedMarket, Floats, Floats, Floats],
) -> None:
    """A fifth of drift and variance falls overnight, the rest in the session, independently."""
    market, sign, growth, gap = long
    n = gap.size
    up = sign[:-1] > 0
    error = 4 * market.noise / np.sqrt(n / 2)
    assert gap[up].mean() == pytest.approx(0.2 * market.drift, abs=error)
    assert gap[~up].mean() == pytest.approx(-0.2 * market.drift, abs=error)
    session = growth - gap
    assert session[up].mean() == pytest.approx(0.8 * market.drift, abs=error)
    night = gap - 0.2 * market.drift * sign[:-1]
    day = session - 0.8 * market.drift * sign[:-1]
    assert night.std() == pytest.approx(np.sqrt(0.2) * market.noise, rel=0.01)
    assert day.std() == pytest.approx(np.sqrt(0.8) * market.noise, rel=0.01)
    assert abs(np.corrcoef(night.ravel(), day.ravel())[0, 1]) < 4 / np.sqrt(n)


def test_a_draw_depends_on_its_seed_and_its_name() -> None:
    first = MARKET.draw(1, "train")
    assert np.array_equal(first.close, MARKET.draw(1, "train").close)
    assert not np.array_equal(first.close, MARKET.draw(2, "train").close)
    assert not np.array_equal(first.close, MARKET.draw(1, "valid").close)


def probability_by_paths(market: PlantedMarket, close: Floats, t: int) -> float:
    """P(s_t = +1 | closes up to t) of one asset: the sum over every path of signs s_0..s_t."""
    returns = np.diff(np.log(close[: t + 1]))
    up = every = 0.0
    for path in itertools.product((1.0, -1.0), repeat=t + 1):
        weight = 0.5
        for k in range(t):
            weight *= math.exp(-(((returns[k] - market.drift * path[k]) / market.noise) ** 2) / 2)
            weight *= market.flip if path[k + 1] != path[k] else 1.0 - market.flip
        every += weight
        up += weight * (path[t] > 0)
    return up / every


@pytest.mark.parametrize("flip", [0.015, 0.3])
def test_filter_equals_the_sum_over_all_paths(flip: float) -> None:
    # A strong drift, so that beliefs are far from one half within a few bars.
    market = PlantedMarket(n_assets=2, n_bars=9, flip=flip, drift=0.01)
    close = market.draw(3, "short").close
    filtered = market.filtered(close)
    assert filtered[0].tolist() == [0.5, 0.5]
    for t in range(1, 9):
        for n in range(2):
            wanted = probability_by_paths(market, close[:, n], t)
            assert filtered[t, n] == pytest.approx(wanted, abs=1e-12), (t, n)
    assert np.abs(filtered - 0.5).max() > 0.1


def test_filter_is_calibrated() -> None:
    """Of the bars at which it says 70 %, the sign is up in 70 %."""
    market = PlantedMarket(n_bars=40_000)
    draw = market.draw(5, "calibration")
    said, up = market.filtered(draw.close).ravel(), draw.hidden.ravel() > 0
    for low in np.arange(0.1, 0.9, 0.1):
        inside = (said >= low) & (said < low + 0.1)
        # Neighbouring bars are alike: count one in thirty.
        error = 4 * 0.5 / np.sqrt(inside.sum() / 30)
        assert up[inside].mean() == pytest.approx(said[inside].mean(), abs=error)


def test_filter_does_not_look_ahead() -> None:
    close = MARKET.draw(2, "x").close[:200]
    changed = close.copy()
    changed[101:] *= np.random.default_rng(0).uniform(0.8, 1.2, changed[101:].shape)
    before, after = MARKET.filtered(close), MARKET.filtered(changed)
    assert np.array_equal(before[:101], after[:101])
    assert not np.array_equal(before[101], after[101])
    assert np.array_equal(before[:101], MARKET.filtered(close[:101]))


def test_filter_forgets_the_scale_of_prices() -> None:
    close = MARKET.draw(2, "x").close[:50]
    assert MARKET.filtered(close * 7.0) == pytest.approx(MARKET.filtered(close))


def test_bayes_buys_above_one_half_and_sells_below() -> None:
    market = PlantedMarket(n_bars=120)
    (world,) = planted_worlds([market.draw(0, "x")], few_features())
    policy = BayesFilter(market)
    policy.start(world, range(20, 120))
    rows = np.arange(20, 120)
    allowed = np.ones((100, 8, 3), dtype=bool)
    allowed[0, :, Action.BUY] = False
    held = Holdings(np.zeros((100, 8)), np.zeros(100), allowed)  # type: ignore[arg-type]
    got = policy.decide(rows, held)
    wanted = np.where(market.filtered(world.rows.close)[20:120] > 0.5, Action.BUY, Action.SELL)
    assert np.array_equal(got[1:], wanted[1:])
    assert not (got[0] == Action.BUY).any()


def test_sharpe_of_the_filter_is_that_of_the_reference() -> None:
    """3.50 ± 0.24 over 40 draws, filled at the close of the decision, 5 bp a side."""
    config = few_features("market.fill=close")
    found = []
    for seed in range(4):
        (world,) = planted_worlds([MARKET.draw(seed, "reference")], config)
        run = run_backtest(BayesFilter(MARKET), world, world.span("test"), config)
        found.append(run.measures.sharpe_annual)
    # Three standard errors of a mean of four, and one of the reference's own forty.
    assert np.mean(found) == pytest.approx(3.50, abs=0.24 * (3 / np.sqrt(4) + 1 / np.sqrt(40)))
    assert np.std(found, ddof=1) < 0.5


def test_filter_and_momentum_earn_at_the_next_open_too() -> None:
    market = PlantedMarket(n_bars=2500)
    config = few_features("market.fill=open")
    (world,) = planted_worlds([market.draw(4, "open")], config)
    assert world.fill_open
    span = world.span("test")
    bayes = run_backtest(BayesFilter(market), world, span, config).measures.sharpe_annual
    momentum = run_backtest(Momentum(10), world, span, config).measures.sharpe_annual
    assert bayes > 2.0
    assert momentum > 2.0


def test_worlds_are_scaled_by_the_first_draw_and_span_everything() -> None:
    market = PlantedMarket(n_bars=400)
    draws = [market.draw(s, "x") for s in range(3)]
    config = few_features()
    worlds = planted_worlds(draws, config)
    first = worlds[0]
    assert first.splits["train"] == first.splits["test"] == range(14, 400)
    assert np.isfinite(first.x).all()
    assert first.x[14:].mean() == pytest.approx(0.0, abs=1e-3)
    assert first.x[14:].std() == pytest.approx(1.0, abs=1e-2)
    # The second draw with the first's scaler: the same as where it stands third.
    again = planted_worlds([draws[0], draws[2]], config)
    assert np.array_equal(again[1].x, worlds[2].x)
    assert not np.array_equal(planted_worlds([draws[2]], config)[0].x, worlds[2].x)
    for world, draw in zip(worlds, draws, strict=True):
        assert np.array_equal(world.rows.close, draw.close)
        assert np.array_equal(world.rows.open, draw.open)


def test_features_of_a_world_do_not_know_the_future() -> None:
    """With the scaler of another draw, what follows a row changes nothing before it."""
    market = PlantedMarket(n_bars=200)
    reference, draw = market.draw(0, "scaler"), market.draw(1, "x")
    other = market.draw(2, "x")
    mixed = type(draw)(*(np.vstack([a[:120], b[120:]]) for a, b in zip(draw, other, strict=True)))
    config = few_features("features.indicators={rsi: [14], sma: [10], macd: [12, 26, 9]}")
    _, whole, changed = planted_worlds([reference, draw, mixed], config)
    assert np.array_equal(whole.x[:120], changed.x[:120])
    assert not np.array_equal(whole.x[120:], changed.x[120:])
