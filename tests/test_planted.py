"""Planted markets: their numbers as specified, and their filters exact.

The trend's filter is compared with the sum over all paths of signs, the Kalman filters with the
conditional expectation of the joint Gaussian of everything drawn and everything seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from scipy import stats
from worlds import make_config

from echelon.backtest.baselines import Momentum, Random
from echelon.backtest.policy import Policy
from echelon.backtest.run import run_backtest, run_values
from echelon.config import Config
from echelon.envs import Action
from echelon.envs.act import Holdings
from echelon.ops.measures import sharpe_annual
from echelon.proving.planted import (
    PLANTED,
    BayesFilter,
    CrossSectionMarket,
    PlantedMarket,
    PlantedSignal,
    ReversionMarket,
    Rule,
    rules_of_thumb,
)
from echelon.proving.worlds import Draw, drawn_world, join_worlds, planted_worlds
from echelon.types import Floats

MARKET = PlantedMarket()
GOLDEN_CLOSE = [391.85401896562297, 5.881119185018747, 64.81397935222795]
GOLDEN_OPEN = [7911.167762329563, 23.585867023168035, 1346.015026589231]
GOLDEN_SIGN = [-1.0, -1.0, -1.0, 1.0, -1.0, 1.0, 1.0, 1.0]
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


def sharpes(policy: Policy, draws: Sequence[Draw], config: Config) -> Floats:
    """[D] of a policy that needs no features, on draws traded side by side."""
    shape = draws[0].close.shape
    x, present = np.zeros((*shape, 1), dtype=np.float32), np.ones(shape, dtype=bool)
    worlds = [drawn_world(draw.open, draw.close, x, present, config) for draw in draws]
    together, starts = join_worlds(worlds)
    value = run_values(policy, together, starts, len(worlds[0].span("test")) - 1, config)
    returns = value[1:] / value[:-1] - 1.0
    return np.array([sharpe_annual(returns[:, d], 252.0) for d in range(len(draws))])


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


@pytest.mark.parametrize("signal", PLANTED)
def test_a_draw_depends_on_its_seed_and_its_name(signal: str) -> None:
    market = PLANTED[signal](n_bars=200)
    first = market.draw(1, "train")
    assert np.array_equal(first.close, market.draw(1, "train").close)
    assert not np.array_equal(first.close, market.draw(2, "train").close)
    assert not np.array_equal(first.close, market.draw(1, "valid").close)


def test_draws_of_the_trend_are_those_that_results_were_measured_on() -> None:
    draw = MARKET.draw(0, "unseen")
    assert draw.close[-1, :3] == pytest.approx(GOLDEN_CLOSE, rel=1e-9)
    assert draw.open[3000, :3] == pytest.approx(GOLDEN_OPEN, rel=1e-9)
    assert draw.hidden[3000].tolist() == GOLDEN_SIGN


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
    filtered = market.probability_up(close)
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
    said, up = market.probability_up(draw.close).ravel(), draw.hidden.ravel() > 0
    for low in np.arange(0.1, 0.9, 0.1):
        inside = (said >= low) & (said < low + 0.1)
        # Neighbouring bars are alike: count one in thirty.
        error = 4 * 0.5 / np.sqrt(inside.sum() / 30)
        assert up[inside].mean() == pytest.approx(said[inside].mean(), abs=error)


@pytest.mark.parametrize("signal", PLANTED)
def test_filter_does_not_look_ahead(signal: str) -> None:
    market = PLANTED[signal]()
    close = market.draw(2, "x").close[:200]
    changed = close.copy()
    changed[101:] *= np.random.default_rng(0).uniform(0.8, 1.2, changed[101:].shape)
    for what in (market.expected_drift, market.wants):
        before, after = what(close), what(changed)
        assert np.array_equal(before[:101], after[:101])
        assert not np.array_equal(before[101:], after[101:])
        assert np.array_equal(before[:101], what(close[:101]))


@pytest.mark.parametrize("signal", PLANTED)
def test_filter_forgets_the_scale_of_prices(signal: str) -> None:
    market = PLANTED[signal]()
    close = market.draw(2, "x").close[:50]
    assert market.expected_drift(close * 7.0) == pytest.approx(market.expected_drift(close))


def test_bayes_buys_above_one_half_and_sells_below() -> None:
    market = PlantedMarket(n_bars=120)
    (world,) = planted_worlds([market.draw(0, "x")], few_features())
    policy = BayesFilter(market)
    policy.start(world, range(20, 120))
    rows = np.arange(20, 120)
    allowed = np.ones((100, 8, 3), dtype=bool)
    allowed[0, :, Action.BUY] = False
    held = Holdings(np.zeros((100, 8)), np.zeros(100), allowed, np.ones(100))  # type: ignore[arg-type]
    got = policy.decide(rows, held)
    wanted = np.where(
        market.probability_up(world.rows.close)[20:120] > 0.5, Action.BUY, Action.SELL
    )
    assert np.array_equal(got[1:], wanted[1:])
    assert not (got[0] == Action.BUY).any()


def test_sharpe_of_the_filter_is_that_of_the_reference() -> None:
    """3.50 ± 0.24 over 40 draws, filled at the close of the decision, 5 bp a side."""
    config = make_config("fee_rate=0.0005", "market.fill=close")
    draws = [MARKET.draw(seed, "reference") for seed in range(4)]
    found = sharpes(BayesFilter(MARKET), draws, config)
    # Three standard errors of a mean of four, and one of the reference's own forty.
    assert np.mean(found) == pytest.approx(3.50, abs=0.24 * (3 / np.sqrt(4) + 1 / np.sqrt(40)))
    assert np.std(found, ddof=1) < 0.5


def test_filter_and_momentum_earn_at_the_next_open_too() -> None:
    market = PlantedMarket(n_bars=2500)
    config = few_features("market.fill=open")
    (world,) = planted_worlds([market.draw(4, "open")], config)
    assert world.fill_open
    span = world.span("test")
    bayes = run_backtest(BayesFilter(market), world, span, config).measures["sharpe_annual"]
    momentum = run_backtest(Momentum(10), world, span, config).measures["sharpe_annual"]
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


def joint_expectation(hidden: Floats, seen: Floats, observed: Floats) -> Floats:
    """E[hidden | seen = observed] of jointly Gaussian ones, by the textbook formula.

    hidden[H,J], seen[S,J]: as sums over J independent standard normals; observed[S]
    """
    weights = np.linalg.solve(seen @ seen.T, observed)
    return np.asarray(hidden @ seen.T @ weights)


def parts_of(draw: Draw) -> tuple[Floats, Floats]:
    """Log returns overnight and in the session, [T−1,N] each."""
    return np.log(draw.open[1:] / draw.close[:-1]), np.log(draw.close[1:] / draw.open[1:])


@pytest.mark.parametrize("deviation", [0.01, 0.0199])
def test_reversion_filter_equals_the_joint_gaussian_expectation(deviation: float) -> None:
    """Given every gap and every session: opens tell the filter nothing the closes do not."""
    market = ReversionMarket(n_assets=2, n_bars=8, deviation=deviation, persistence=0.8)
    draw = market.draw(3, "short")
    gap, session = parts_of(draw)
    fleeting = deviation * np.sqrt(1.0 - 0.8**2)
    lasting = np.sqrt(market.noise**2 - fleeting**2)
    n, night = 7, market.overnight
    # Normals: the first deviation; for each bar walk and deviation, night and day.
    every = np.eye(1 + 4 * n)
    deviations = [deviation * every[0]]
    seen: list[Floats] = []
    for k in range(n):
        walk_n, walk_d, dev_n, dev_d = every[1 + 4 * k : 5 + 4 * k]
        shares = ((night, walk_n, dev_n), (1.0 - night, walk_d, dev_d))
        seen += [
            -0.2 * share * deviations[-1] + np.sqrt(share) * (lasting * walk + fleeting * dev)
            for share, walk, dev in shares
        ]
        moved = np.sqrt(night) * dev_n + np.sqrt(1.0 - night) * dev_d
        deviations.append(0.8 * deviations[-1] + fleeting * moved)
    fair = 0.5 * (market.noise**2 + (0.2 * deviation) ** 2)
    predicted = market.expected_drift(draw.close)
    assert predicted[0].tolist() == [0.0, 0.0]
    for t in range(1, 8):
        for asset in range(2):
            parts = np.stack([gap[:t, asset] + night * fair, session[:t, asset] + 0.8 * fair], 1)
            state = joint_expectation(
                deviations[t][None], np.array(seen[: 2 * t]), parts.reshape(-1)
            )
            assert predicted[t, asset] == pytest.approx(-0.2 * state[0], abs=1e-12), (t, asset)
    assert np.abs(predicted).max() > 1e-4


@pytest.mark.parametrize("common", [0.0, 0.3, 0.9])
def test_cross_section_filter_equals_the_joint_gaussian_expectation(common: float) -> None:
    """Given the gaps and sessions of all assets at once."""
    market = CrossSectionMarket(n_assets=3, n_bars=7, common=common, drift=0.01, persistence=0.8)
    draw = market.draw(3, "short")
    gap, session = parts_of(draw)
    n_bars, n, night = 6, 3, market.overnight
    relative = np.eye(n) - 1.0 / n
    both, own = market.noise * np.sqrt(common), market.noise * np.sqrt(1.0 - common)
    fair = 0.5 * (market.noise**2 + 0.01**2 * 2.0 / 3.0)
    # Normals: the first strengths; for each bar their shocks and, night and day, common and own.
    every = np.eye(n + n_bars * (n + 2 * (1 + n)))
    left = iter(every)
    take = lambda count: np.array([next(left) for _ in range(count)])  # noqa: E731
    strength = take(n)
    strengths, seen = [strength], []
    for _ in range(n_bars):
        for share in (night, 1.0 - night):
            noise = both * take(1) + own * take(n)
            seen.append(share * 0.01 * relative @ strength + np.sqrt(share) * noise)
        strength = 0.8 * strength + 0.6 * take(n)
        strengths.append(strength)
    observed = np.stack([gap + night * fair, session + (1.0 - night) * fair], axis=1)
    predicted = market.expected_drift(draw.close)
    assert (predicted[0] == 0.0).all()
    for t in range(1, n_bars + 1):
        wanted = 0.01 * joint_expectation(
            relative @ strengths[t], np.concatenate(seen[: 2 * t]), observed[:t].reshape(-1)
        )
        assert predicted[t] == pytest.approx(wanted, abs=1e-12), t
    assert np.abs(predicted).max() > 1e-4


LONG = {
    "reversion": ReversionMarket(n_bars=60_000),
    "cross_section": CrossSectionMarket(n_bars=60_000),
}


@pytest.mark.parametrize("signal", LONG)
def test_closes_are_fair_to_who_knows_nothing_and_as_noisy_as_told(signal: str) -> None:
    market = LONG[signal]
    close = market.draw(1, "long").close
    simple = close[1:] / close[:-1] - 1.0
    error = simple.mean(axis=1).std() / np.sqrt(len(simple))
    assert simple.mean() == pytest.approx(0.0, abs=4 * error)
    drift = market.expected_drift(close)[:-1]
    shock = np.diff(np.log(close), axis=0) - drift
    assert shock.std() == pytest.approx(market.noise, rel=0.05)


def test_deviations_are_as_large_and_as_lasting_as_told() -> None:
    market = ReversionMarket(n_bars=60_000)
    draw = market.draw(1, "long")
    hidden, growth = draw.hidden, np.diff(np.log(draw.close), axis=0)
    assert hidden.std() == pytest.approx(market.deviation, rel=0.02)
    assert np.corrcoef(hidden[1:].ravel(), hidden[:-1].ravel())[0, 1] == pytest.approx(
        0.9, abs=0.01
    )
    # What is left of the log price is a random walk: its steps do not know the deviation.
    walk = growth - np.diff(hidden, axis=0)
    n = walk.size
    assert abs(np.corrcoef(walk.ravel(), hidden[:-1].ravel())[0, 1]) < 4 / np.sqrt(n)
    assert abs(np.corrcoef(walk[1:].ravel(), walk[:-1].ravel())[0, 1]) < 4 / np.sqrt(n)
    gap = np.log(draw.open[1:] / draw.close[:-1])
    assert gap.var() == pytest.approx(0.2 * market.noise**2, rel=0.03)


def test_only_relative_strength_gives_drift_in_the_cross_section() -> None:
    market = CrossSectionMarket(n_bars=60_000)
    draw = market.draw(1, "long")
    assert np.abs(draw.hidden.mean(axis=1)).max() < 1e-12
    assert draw.hidden.var() == pytest.approx(1.0 - 1.0 / 8.0, rel=0.05)
    noise = np.diff(np.log(draw.close), axis=0) - market.drift * draw.hidden[:-1]
    together = np.corrcoef(noise.T)[np.triu_indices(8, 1)]
    assert together == pytest.approx(np.full(28, market.common), abs=0.02)
    assert noise.std() == pytest.approx(market.noise, rel=0.01)


@pytest.mark.parametrize("signal", LONG)
def test_kalman_filter_knows_how_much_it_knows(signal: str) -> None:
    """Expectations are as spread as it says, and right on average whatever they are."""
    market = LONG[signal]
    draw = market.draw(2, "long")
    state, known = market.filter_state(draw.close)  # type: ignore[attr-defined]
    assert known[0] == 0.0
    assert (np.diff(known) > -1e-12).all()
    assert state.std() == pytest.approx(known[-1], rel=0.03)
    slope = (state * draw.hidden).mean() / (state**2).mean()
    assert slope == pytest.approx(1.0, abs=0.03)


STRENGTH = {"trend": "drift", "reversion": "deviation", "cross_section": "drift"}


@pytest.mark.parametrize("signal", PLANTED)
def test_without_strength_there_is_nothing_to_predict(signal: str) -> None:
    market = PLANTED[signal](n_bars=300, **{STRENGTH[signal]: 0.0})
    close = market.draw(0, "none").close
    assert np.abs(market.expected_drift(close)).max() < 1e-12
    assert not market.wants(close).any()
    assert np.diff(np.log(close), axis=0).std() == pytest.approx(0.012, rel=0.06)


def test_rules_of_thumb_buy_what_rose_or_fell_by_itself_or_in_comparison() -> None:
    close = np.array([[100.0, 100.0, 100.0], [101.0, 102.0, 103.0]])
    x, present = np.zeros((2, 3, 1), dtype=np.float32), np.ones((2, 3), dtype=bool)
    world = drawn_world(close, close, x, present, make_config("window=1"))
    free = Holdings(np.zeros((1, 3)), np.zeros(1), np.ones((1, 3, 3), dtype=bool), np.ones(1))  # type: ignore[arg-type]

    def bought(rule: Rule) -> list[bool]:
        rule.start(world, range(2))
        return (rule.decide(np.array([1]), free)[0] == Action.BUY).tolist()

    assert bought(Rule(1)) == [True, True, True]
    assert bought(Rule(1, reversal=True)) == [False, False, False]
    assert bought(Rule(1, relative=True)) == [False, False, True]
    assert bought(Rule(1, reversal=True, relative=True)) == [True, False, False]
    assert [rule.name for rule in rules_of_thumb((5,))] == [
        "momentum 5",
        "reversal 5",
        "relative momentum 5",
        "relative reversal 5",
    ]


@pytest.mark.parametrize(
    ("market", "likely_best"),
    [
        (ReversionMarket(n_bars=2000), Rule(10, reversal=True)),
        (CrossSectionMarket(n_bars=2000), Rule(10, relative=True)),
    ],
)
def test_reference_earns_as_told_and_beats_rules_of_thumb(
    market: PlantedSignal, likely_best: Rule
) -> None:
    """3.0 over 16 draws of 6000 bars, next open, 5 bp a side; here over 8 of 2000."""
    config = make_config("fee_rate=0.0005")
    assert config.market.fill == "open"
    draws = [market.draw(seed, "reference") for seed in range(8)]
    found = sharpes(BayesFilter(market), draws, config).mean()
    assert 2.4 < found < 3.6
    assert found > sharpes(likely_best, draws, config).mean() + 0.1
    wrong_way = Rule(10, reversal=market.signal == "cross_section")
    assert sharpes(wrong_way, draws, config).mean() < -1.0


@pytest.mark.parametrize("signal", PLANTED)
def test_lots_earn_about_nothing_without_costs(signal: str) -> None:
    market = PLANTED[signal](n_bars=2000)
    draws = [market.draw(seed, "lots") for seed in range(8)]
    found = sharpes(Random(0), draws, make_config("fee_rate=0")).mean()
    # A draw's Sharpe ratio has a standard error of √(252 / 2000).
    assert abs(found) < 4 * np.sqrt(252 / 2000 / 8)


def test_joined_draws_are_stretches_that_nothing_crosses() -> None:
    config, market = few_features(), PlantedMarket(n_bars=120, n_assets=2)
    worlds = planted_worlds([market.draw(k, "x") for k in range(3)], config)
    together, starts = join_worlds(worlds)
    spans = together.spans("train")
    assert [span.start for span in spans] == starts.tolist()
    assert [len(span) for span in spans] == [len(world.span("train")) for world in worlds]
    for span, world in zip(spans, worlds, strict=True):
        own = world.span("train")
        window = slice(span.start - config.window + 1, span.stop)
        assert np.array_equal(together.x[window], world.x[own.start - config.window + 1 : own.stop])
    assert worlds[0].spans("train") == (worlds[0].span("train"),)
