"""The regime market as specified, its mirror and filter exact, its references as measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from worlds import make_config

from echelon.backtest.run import run_values
from echelon.config import Config
from echelon.ops.measures import sharpe_annual
from echelon.proving.regime import (
    EQUAL,
    FOLLOW,
    HORIZONS,
    OPPOSE,
    RegimeDraw,
    RegimeMarket,
    TiltedWeights,
    book_returns,
    choose_expert,
    expert_values,
    hedge,
    regime_worlds,
    router_view,
    run_references,
)
from echelon.proving.worlds import Arena, join_worlds
from echelon.types import Floats

MARKET = RegimeMarket()
SHORT = RegimeMarket(n_bars=300, flip=0.02)
MEASURED = {
    "equal weight": -0.03,
    "follow": -0.26,
    "oppose": -0.21,
    "trailing 40": 2.45,
    "fixed-share hedge": 2.57,
    "regime filter": 2.61,
    "regime-aware": 2.99,
}
"""Sharpe ratios over 10 mirrored pairs by an independent prototype, filled at the close."""


def paper(fill: str = "open") -> Config:
    return make_config("fee_rate=0.0005", f"market.fill={fill}")


@pytest.fixture(scope="module")
def long() -> RegimeDraw:
    return RegimeMarket(n_bars=200_000).draw(1, "long")


@pytest.fixture(scope="module")
def measured() -> Mapping[str, Floats]:
    """Returns[S,16] of the references over 8 mirrored pairs, filled at the close.

    As many bars in all as two pairs of full length; side by side they are stepped in less time.
    """
    market = RegimeMarket(n_bars=2500)
    return run_references(market, market.pairs(8, "test"), paper("close"))


def test_numbers_are_those_of_the_issue() -> None:
    assert (MARKET.n_assets, MARKET.n_bars, MARKET.noise) == (8, 10_000, 0.012)
    assert (MARKET.strength, MARKET.persistence, MARKET.flip) == (0.12, 0.98, 1 / 400)
    assert HORIZONS == (5, 20, 40, 120)


def test_signal_has_unit_variance_and_the_persistence_told(long: RegimeDraw) -> None:
    x = long.x
    # Neighbouring values hang together: a hundred of them count as one.
    error = 1 / np.sqrt(x.size / 100)
    assert x.mean() == pytest.approx(0.0, abs=4 * error)
    assert x.var() == pytest.approx(1.0, abs=4 * np.sqrt(2) * error)
    assert np.corrcoef(x[1:].ravel(), x[:-1].ravel())[0, 1] == pytest.approx(0.98, abs=0.002)
    first = np.array([RegimeMarket(n_bars=2).draw(s, "first").x[0] for s in range(200)])
    assert first.var() == pytest.approx(1.0, abs=4 * np.sqrt(2 / 1600))
    assert np.abs(np.corrcoef(x.T)[np.triu_indices(8, 1)]).max() < 0.1


def test_regime_flips_as_often_as_told_and_begins_either_way(long: RegimeDraw) -> None:
    flips = (long.regime[1:] != long.regime[:-1]).mean()
    error = np.sqrt(MARKET.flip / len(long.regime))
    assert flips == pytest.approx(MARKET.flip, abs=4 * error)
    assert set(np.unique(long.regime)) == {-1.0, 1.0}
    first = [SHORT.draw(seed, "first").regime[0] for seed in range(400)]
    assert np.mean(first) == pytest.approx(0.0, abs=4 / 20)


def test_simple_returns_are_the_signal_times_the_regime_and_noise(long: RegimeDraw) -> None:
    returns = long.close[1:] / long.close[:-1] - 1.0
    drift = 0.12 * 0.012 * long.regime[:-1, None] * long.x[:-1]
    noise = returns - drift
    n = noise.size
    assert noise.mean() == pytest.approx(0.0, abs=4 * 0.012 / np.sqrt(n))
    assert noise.std() == pytest.approx(0.012, rel=4 / np.sqrt(2 * n))
    for seen in (drift, long.x[:-1], long.x[1:]):
        assert abs(np.corrcoef(noise.ravel(), seen.ravel())[0, 1]) < 4 / np.sqrt(n)
    gap = long.open[1:] / long.close[:-1] - 1.0 - 0.2 * drift
    assert gap.std() == pytest.approx(np.sqrt(0.2) * 0.012, rel=0.01)
    assert abs(np.corrcoef(gap.ravel(), (noise - gap).ravel())[0, 1]) < 4 / np.sqrt(n)


def test_mirror_has_the_same_signal_and_noise_and_the_opposite_regime() -> None:
    draw, mirror = MARKET.pairs(1, "x", 5)
    assert np.array_equal(draw.x, mirror.x)
    assert np.array_equal(draw.regime, -mirror.regime)
    returns = [d.close[1:] / d.close[:-1] - 1.0 for d in (draw, mirror)]
    drift = 0.12 * 0.012 * draw.regime[:-1, None] * draw.x[:-1]
    assert np.abs(returns[0] - drift - (returns[1] + drift)).max() < 1e-14
    gaps = [d.open[1:] / d.close[:-1] - 1.0 for d in (draw, mirror)]
    assert np.abs(gaps[0] - 0.2 * drift - (gaps[1] + 0.2 * drift)).max() < 1e-14
    assert np.array_equal(MARKET.draw(5, "x").close, draw.close)
    assert not np.array_equal(MARKET.draw(6, "x").close, draw.close)
    third, fourth = MARKET.pairs(2, "x", first_seed=4)[2:]
    assert np.array_equal(third.close, draw.close)
    assert np.array_equal(fourth.close, mirror.close)


def probability_by_paths(market: RegimeMarket, draw: RegimeDraw, t: int) -> float:
    """P(g_t = 1 | all up to t): the sum over every path of regimes g_0..g_t."""
    returns = draw.close[1 : t + 1] / draw.close[:t] - 1.0
    up = every = 0.0
    for path in itertools.product((1.0, -1.0), repeat=t + 1):
        weight = 0.5
        for k in range(t):
            expected = market.strength * market.noise * path[k] * draw.x[k]
            weight *= math.exp(-(((returns[k] - expected) / market.noise) ** 2).sum() / 2)
            weight *= market.flip if path[k + 1] != path[k] else 1.0 - market.flip
        every += weight
        up += weight * (path[t] > 0)
    return up / every


@pytest.mark.parametrize("flip", [1 / 400, 0.2])
def test_filter_equals_the_sum_over_all_paths(flip: float) -> None:
    market = RegimeMarket(n_assets=3, n_bars=9, flip=flip, strength=0.5)
    draw = market.draw(0, "short")
    filtered = market.follow_probability(draw.x, draw.close)
    assert filtered[0] == 0.5
    for t in range(1, 9):
        assert filtered[t] == pytest.approx(probability_by_paths(market, draw, t), abs=1e-12), t
    assert np.abs(filtered - 0.5).max() > 0.2


CHANGING = RegimeMarket(
    n_assets=3, n_bars=7, flip=0.05, fast_flip=0.4, turns=0.2, lead=1.5, strength=0.5
)


def test_filter_of_changing_rates_and_a_hint_equals_the_sum_over_all_paths() -> None:
    market, draw = CHANGING, CHANGING.draw(0, "short")
    returns = draw.close[1:] / draw.close[:-1] - 1.0
    filtered = market.filter_probability(draw)
    for t in range(7):
        up = every = 0.0
        for signs in itertools.product((1.0, -1.0), repeat=t + 1):
            for rates in itertools.product((0, 1), repeat=t + 1):
                weight = 0.5 * (0.2 if rates[0] else 0.8)
                weight *= math.exp(-((draw.hint[0] - 1.5 * signs[0]) ** 2) / 2)
                for k in range(t):
                    expected = 0.5 * market.noise * signs[k] * draw.x[k]
                    weight *= math.exp(-(((returns[k] - expected) / market.noise) ** 2).sum() / 2)
                    weight *= 0.8 if rates[k] == rates[k + 1] else 0.2
                    flip = 0.4 if rates[k + 1] else 0.05
                    weight *= flip if signs[k] != signs[k + 1] else 1.0 - flip
                    now, then = (draw.hint[k + j] - 1.5 * signs[k + j] for j in (1, 0))
                    weight *= math.exp(-((now - 0.9 * then) ** 2) / (2 * 0.19))
                every += weight
                up += weight * (signs[t] > 0)
        assert filtered[t] == pytest.approx(up / every, abs=1e-12), t
    assert np.abs(filtered - 0.5).max() > 0.3


def test_rates_change_and_the_hint_shows_the_regime_in_noise_that_mirrors_share() -> None:
    market = RegimeMarket(n_bars=40_000, flip=1 / 1200, fast_flip=1 / 60, turns=1 / 800, lead=1.0)
    draw, mirror = market.pairs(1, "x", 2)
    flips = np.flatnonzero(np.diff(draw.regime))
    assert len(flips) / 40_000 == pytest.approx((1 / 1200 + 1 / 60) / 2, rel=0.3)
    gaps = np.diff(flips)
    assert gaps.std() > 1.5 * gaps.mean(), "of one rate their deviation is their mean"
    np.testing.assert_allclose(draw.hint - draw.regime, mirror.hint - mirror.regime, atol=1e-12)
    noise = draw.hint - draw.regime
    assert noise.std() == pytest.approx(1.0, abs=0.05)
    assert np.corrcoef(noise[1:], noise[:-1])[0, 1] == pytest.approx(0.9, abs=0.01)
    assert ((market.filter_probability(draw) > 0.5) == (draw.regime > 0)).mean() > 0.9


def test_market_without_changes_is_the_one_that_proofs_were_made_on() -> None:
    assert repr(RegimeMarket()) == (
        "RegimeMarket(n_assets=8, n_bars=10000, noise=0.012, strength=0.12, persistence=0.98, "
        "flip=0.0025, overnight=0.2)"
    )
    assert repr(RegimeMarket(lead=1.0)).endswith("overnight=0.2, lead=1.0)")
    draw = SHORT.draw(3, "x")
    assert (draw.hint == 0.0).all()
    plain = SHORT.follow_probability(draw.x, draw.close)
    np.testing.assert_array_equal(SHORT.filter_probability(draw), plain)
    unchanged = replace(SHORT, turns=1e-300, lead=1e-300)
    np.testing.assert_allclose(unchanged.filter_probability(draw), plain, atol=1e-9)


def test_filter_is_calibrated_and_right_most_of_the_time(long: RegimeDraw) -> None:
    said, up = MARKET.follow_probability(long.x, long.close), long.regime > 0
    assert ((said > 0.5) == up).mean() == pytest.approx(0.946, abs=0.01)
    for low in np.arange(0.1, 0.9, 0.2):
        inside = (said >= low) & (said < low + 0.2)
        assert up[inside].mean() == pytest.approx(said[inside].mean(), abs=0.1)


def test_worlds_show_the_signal_and_nothing_else() -> None:
    draw, mirror = SHORT.pairs(1, "x")
    worlds = regime_worlds([draw, mirror], paper())
    for world, drawn in zip(worlds, (draw, mirror), strict=True):
        assert world.x.shape == (300, 8, 1)
        assert np.array_equal(world.x[..., 0], drawn.x.astype(np.float32))
        assert np.array_equal(world.rows.close, drawn.close)
        assert np.array_equal(world.rows.open, drawn.open)
        assert world.window == 20
        assert world.span("test") == range(19, 300)
        assert world.fill_open
        assert world.rules.commission == 0.0005
    # What a draw shows cannot tell it from its mirror.
    assert np.array_equal(worlds[0].x, worlds[1].x)


def test_flat_agents_can_be_shown_what_a_router_sees() -> None:
    draws, config = SHORT.pairs(1, "x"), paper()
    shown = router_view(draws, config)
    worlds = regime_worlds(draws, config, shown=shown)
    assert worlds[0].x.shape == (300, 8, 1 + 2 * 4)
    values = expert_values(Arena.from_draws(regime_worlds(draws, config)), config)
    assert values.shape == (281, 2, 2)
    wanted = values[200, 1, 1] / values[180, 1, 1] - 1.0
    # The second draw, oppose, over 20 bars: at row 219 all assets see it.
    seen = worlds[1].x[219, :, 1 + 4 + 1] * 0.012 * np.sqrt(20)
    assert seen == pytest.approx(np.full(8, wanted), rel=1e-5)
    assert (worlds[0].x[:20, :, 1:] == 0.0).all()
    assert not np.array_equal(worlds[0].x, worlds[1].x)


def test_book_returns_are_those_over_the_last_bars() -> None:
    values = np.array([[100.0, 10.0], [110.0, 9.0], [99.0, 9.9], [198.0, 9.9]])
    found = book_returns(values, (1, 2))
    assert found.shape == (4, 2, 2)
    assert found[:, 0, 0] == pytest.approx([0.0, 0.1, -0.1, 1.0])
    assert found[:, 0, 1] == pytest.approx([0.0, 0.1, -0.01, 0.8])
    assert found[:, 1, 1] == pytest.approx([0.0, -0.1, -0.01, 0.1])


def test_book_returns_do_not_know_what_follows() -> None:
    values = np.exp(np.cumsum(np.random.default_rng(0).normal(0, 0.01, (200, 3, 2)), axis=0))
    changed = values.copy()
    changed[121:] *= 2.0
    assert np.array_equal(book_returns(values)[:121], book_returns(changed)[:121])
    assert np.array_equal(book_returns(values)[:121], book_returns(values[:121]))


def test_experts_follow_and_oppose_by_the_softmax() -> None:
    x = np.array([[0.0, 1.0], [2.0, 2.0]])
    up = math.exp(1.5) / (1.0 + math.exp(1.5))
    assert FOLLOW.weights(x) == pytest.approx(np.array([[1 - up, up], [0.5, 0.5]]))
    assert OPPOSE.weights(x) == pytest.approx(np.array([[up, 1 - up], [0.5, 0.5]]))
    assert EQUAL.weights(x) == pytest.approx(np.full((2, 2), 0.5))


def test_hedge_trusts_by_exponential_weights_and_shares() -> None:
    returns = np.array([[0.02, -0.01], [-0.02, 0.03]])
    trust = hedge(returns)
    first = math.exp(1.2) / (math.exp(1.2) + math.exp(-0.6))
    first = 0.996 * first + 0.002
    up, down = first * math.exp(-1.2), (1 - first) * math.exp(1.8)
    assert trust[:, 0] == pytest.approx([0.5, first, 0.996 * up / (up + down) + 0.002])
    assert trust.sum(axis=1) == pytest.approx(np.ones(3))


def test_switch_decides_every_five_bars_from_the_start_of_each_draw() -> None:
    scores = np.zeros((40, 2))
    scores[np.arange(40), np.arange(40) % 2] = 1.0
    choice = choose_expert(scores, np.array([3, 24]))
    assert choice[3:13].tolist() == [1] * 5 + [0] * 5
    assert choice[24:34].tolist() == [0] * 5 + [1] * 5
    at_once = choose_expert(scores, np.array([3, 24]), every=1)
    assert at_once.tolist() == [0, 1] * 20


def test_decisions_use_nothing_of_the_future() -> None:
    """Cut the draws off: what was earned before the cut stays the same, for every reference."""
    draws = SHORT.pairs(1, "cut")
    cut = [RegimeDraw(*(part[:200] for part in draw)) for draw in draws]
    whole, before = (run_references(SHORT, some, paper()) for some in (draws, cut))
    for name, returns in before.items():
        assert returns.shape == (180, 2)
        assert np.array_equal(whole[name][:180], returns), name


def slow_sharpe(expert: TiltedWeights, draw: RegimeDraw, first: int) -> float:
    """By hand: each bar pay 5 bp of what weights must move, then earn the simple returns."""
    target = expert.weights(draw.x)
    held, earned = np.zeros(target.shape[1]), []
    for t in range(first, len(target) - 1):
        fee = 0.0005 * np.abs(target[t] - held).sum()
        returns = draw.close[t + 1] / draw.close[t] - 1.0
        growth = 1.0 + target[t] @ returns
        earned.append((1.0 - fee) * growth - 1.0)
        held = target[t] * (1.0 + returns) / growth
    return sharpe_annual(np.array(earned), 252.0)


@pytest.mark.parametrize("expert", [FOLLOW, OPPOSE, EQUAL], ids=lambda e: e.name)
def test_kernel_earns_what_the_arithmetic_by_hand_earns(expert: TiltedWeights) -> None:
    market = RegimeMarket(n_bars=1500)
    draw = market.draw(0, "hand")
    world, starts = join_worlds(regime_worlds([draw], paper("close")))
    value = run_values(expert, world, starts, 1480, paper("close"))[:, 0]
    found = sharpe_annual(value[1:] / value[:-1] - 1.0, 252.0)
    assert found == pytest.approx(slow_sharpe(expert, draw, 19), abs=0.005)


def test_references_come_in_the_order_of_what_they_know(
    measured: Mapping[str, Floats],
) -> None:
    found = {
        name: np.mean([sharpe_annual(returns[:, d], 252.0) for d in range(16)])
        for name, returns in measured.items()
    }
    assert list(found) == list(MEASURED)
    assert max(found["follow"], found["oppose"]) < found["equal weight"]
    assert found["equal weight"] + 1.5 < found["trailing 40"] < found["regime filter"]
    assert found["fixed-share hedge"] < found["regime filter"] < found["regime-aware"] - 0.2


@pytest.mark.parametrize("name", MEASURED)
def test_references_earn_what_the_prototype_measured(
    name: str, measured: Mapping[str, Floats]
) -> None:
    """A pair of 10,000 bars has a Sharpe ratio with a standard deviation of 0.19 at most."""
    found = np.mean([sharpe_annual(measured[name][:, d], 252.0) for d in range(16)])
    error = 0.19 * np.sqrt(1 / 2 + 1 / 10)
    assert found == pytest.approx(MEASURED[name], abs=3 * error)


def test_over_a_pair_the_signal_alone_pays_its_costs_only() -> None:
    """Without costs a draw and its mirror sum to noise: no drift is left, whatever x says."""
    draws = RegimeMarket(n_bars=4000).pairs(1, "sum")
    config = make_config("fee_rate=0", "market.fill=close")
    values = expert_values(Arena.from_draws(regime_worlds(draws, config)), config)
    returns = (values[1:] / values[:-1] - 1.0).sum(axis=1)
    # Weights are those of x alone, so the drifts cancel bar by bar.
    weights = FOLLOW.weights(draws[0].x.astype(np.float32))[19:-1]
    noise = sum(draw.close[20:] / draw.close[19:-1] - 1.0 for draw in draws)
    assert np.abs(returns[:, 0] - (weights * noise).sum(axis=1)).max() < 1e-9
    drift = 0.12 * 0.012 * (draws[0].regime[19:-1, None] * draws[0].x[19:-1] * weights).sum(axis=1)
    assert abs(np.corrcoef(returns[:, 0], drift)[0, 1]) < 4 / np.sqrt(len(drift))
