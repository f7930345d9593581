"""Rewards: each kind by hand, the penalties, and what is remembered between steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import make_config

from echelon.config.agents import RewardConfig
from echelon.envs import rewards
from echelon.envs.rewards import CVAR_LEAST, SHARPE_BOUND, RewardState, new_state, restart, reward
from echelon.types import Floats


def config(**changes: object) -> RewardConfig:
    return RewardConfig(**changes)  # type: ignore[arg-type]


def paid(path: list[float], settings: RewardConfig, benchmark: list[float] | None = None) -> Floats:
    """Rewards of one book along a path of values, [T−1]."""
    value = np.array(path)
    state = new_state(value[:1], settings)
    out = []
    for t in range(len(path) - 1):
        gain = None if benchmark is None else np.array([benchmark[t]])
        step, state = reward(state, value[t : t + 1], value[t + 1 : t + 2], gain, settings)
        out.append(step[0])
    return np.array(out)


PATH = [100.0, 110.0, 99.0, 108.9]


def test_return_is_the_relative_change() -> None:
    assert paid(PATH, config()) == pytest.approx([0.1, -0.1, 0.1])


def test_log_return_is_its_logarithm() -> None:
    assert paid(PATH, config(kind="log_return")) == pytest.approx(np.log([1.1, 0.9, 1.1]))


def test_log_return_of_a_total_loss_is_finite() -> None:
    assert paid([100.0, 0.0], config(kind="log_return"))[0] == pytest.approx(np.log(1e-9))


def test_excess_is_return_less_the_benchmark() -> None:
    found = paid(PATH, config(kind="excess"), [0.05, -0.2, 0.1])
    assert found == pytest.approx([0.05, 0.1, 0.0])


def test_scale_multiplies_everything_last() -> None:
    settings = config(drawdown_penalty=2.0)
    scaled = settings.model_copy(update={"scale": 100.0})
    assert paid(PATH, scaled) == pytest.approx(100.0 * paid(PATH, settings))


def test_drawdown_penalty_takes_off_what_the_drawdown_deepened_by() -> None:
    # Values 100, 90, 95, 80, 120, 108: drawdowns 0.1, 0.05, 0.2, 0, 0.1.
    path = [100.0, 90.0, 95.0, 80.0, 120.0, 108.0]
    penalty = paid(path, config()) - paid(path, config(drawdown_penalty=3.0))
    # Deeper by 0.1, then shallower, then deeper by 0.15, a new high, and deeper by 0.1.
    assert penalty == pytest.approx([0.3, 0.0, 0.45, 0.0, 0.3])


def test_drawdown_begins_anew_with_an_episode() -> None:
    settings = config(drawdown_penalty=1.0)
    _, state = reward(
        new_state(np.array([100.0, 100.0]), settings),
        np.array([100.0, 100.0]),
        np.array([150.0, 150.0]),
        None,
        settings,
    )
    state = restart(state, np.array([100.0, 150.0]), np.array([True, False]))
    found, _ = reward(state, np.array([100.0, 150.0]), np.array([99.0, 148.5]), None, settings)
    assert state.peak.tolist() == [100.0, 150.0]
    assert found == pytest.approx([-0.01 - 0.01, -0.01 - 0.01])


def direct_differential_sharpe(returns: list[float], decay: float) -> list[float]:
    """Moody and Saffell's formula, written out step by step, cut as ours is."""
    a = b = 0.0
    out = []
    for r in returns:
        variance = b - a * a
        d = 0.0
        if variance > 1e-12:
            d = (b * (r - a) - 0.5 * a * (r * r - b)) / variance**1.5
        out.append(min(max(d, -SHARPE_BOUND), SHARPE_BOUND))
        a += decay * (r - a)
        b += decay * (r * r - b)
    return out


def test_differential_sharpe_agrees_with_the_formula_written_out() -> None:
    returns = np.random.default_rng(0).normal(0.001, 0.01, 300)
    path = 100.0 * np.cumprod(np.concatenate([[1.0], 1.0 + returns]))
    found = paid(path.tolist(), config(kind="differential_sharpe", sharpe_decay=0.02))
    expected = direct_differential_sharpe(returns.tolist(), 0.02)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert np.abs(found[100:]).max() < SHARPE_BOUND


def test_differential_sharpe_is_the_derivative_of_the_sharpe_ratio() -> None:
    """D = dS/dη at η = 0, with S the ratio of the moments after a step of size η."""
    mean, square, gain = np.array([0.002]), np.array([0.0004]), np.array([0.015])

    def ratio(eta: float) -> float:
        a, b = mean + eta * (gain - mean), square + eta * (gain**2 - square)
        return float(a[0] / np.sqrt(b[0] - a[0] ** 2))

    found, *_ = rewards.differential_sharpe(mean, square, gain, 0.01)
    assert found[0] == pytest.approx((ratio(1e-6) - ratio(-1e-6)) / 2e-6, rel=1e-5)


def test_differential_sharpe_of_cash_is_zero() -> None:
    assert paid([100.0] * 5, config(kind="differential_sharpe")).tolist() == [0.0] * 4


def test_differential_sharpe_after_a_first_fee_stays_bounded() -> None:
    """A fee of a basis point, then an ordinary day: unbounded, this would pay about 5,000."""
    found = paid([100.0, 99.99, 100.99], config(kind="differential_sharpe"))
    assert found.tolist() == [0.0, SHARPE_BOUND]


def test_differential_sharpe_forgets_the_episode_before() -> None:
    settings = config(kind="differential_sharpe")
    state = new_state(np.array([100.0]), settings)
    for _ in range(3):
        _, state = reward(state, np.array([100.0]), np.array([101.0]), None, settings)
    state = restart(state, np.array([100.0]), np.array([True]))
    assert state.mean.tolist() == state.square.tolist() == [0.0]


def test_tail_cost_is_the_loss_beyond_the_value_at_risk_over_the_tail() -> None:
    returns = np.linspace(-0.1, 0.1, 1001)
    # The 5 % quantile is −0.09: a loss of 0.1 lies 0.01 beyond it.
    found = rewards.tail_cost(np.array([0.1, 0.09, -0.2]), returns, 0.05)
    assert found == pytest.approx([0.01 / 0.05, 0.0, 0.0], abs=1e-12)


def test_mean_of_value_at_risk_and_tail_cost_is_the_cvar() -> None:
    returns = np.random.default_rng(1).standard_t(4, 4000) * 0.01
    at_risk = -np.quantile(returns, 0.05)
    mean = at_risk + rewards.tail_cost(-returns, returns, 0.05).mean()
    worst = -np.sort(returns)[:200].mean()
    assert mean == pytest.approx(worst, rel=1e-3)


def test_no_tail_is_spoken_of_before_enough_returns() -> None:
    few = np.full(1000, np.nan)
    few[: CVAR_LEAST - 1] = -0.5
    assert rewards.tail_cost(np.array([0.9]), few, 0.05).tolist() == [0.0]
    few[CVAR_LEAST - 1] = -0.5
    assert rewards.tail_cost(np.array([0.9]), few, 0.05) == pytest.approx([0.4 / 0.05])


def test_cvar_penalty_begins_after_enough_returns_and_uses_earlier_ones_only() -> None:
    settings = config(cvar_penalty=2.0)
    rng = np.random.default_rng(2)
    returns = rng.normal(0.0, 0.01, CVAR_LEAST + 50)
    returns[-1] = -0.2
    path = 100.0 * np.cumprod(np.concatenate([[1.0], 1.0 + returns]))
    penalty = returns - paid(path.tolist(), settings)
    assert penalty[:CVAR_LEAST] == pytest.approx(np.zeros(CVAR_LEAST), abs=1e-12)
    at_risk = -np.quantile(returns[:-1], 0.05)
    assert penalty[-1] == pytest.approx(2.0 * (0.2 - at_risk) / 0.05, rel=1e-6)


def test_memory_of_returns_is_shared_and_overwrites_the_oldest() -> None:
    settings = config(cvar_penalty=1.0)
    state = new_state(np.ones(2), settings)
    size = len(state.returns)
    state = state._replace(returns=np.zeros(size), cursor=size - 1)
    _, state = reward(state, np.ones(2), np.array([1.1, 1.2]), None, settings)
    assert state.returns[[size - 1, 0]] == pytest.approx([0.1, 0.2])
    assert state.cursor == 1
    kept = restart(state, np.ones(2), np.array([True, True]))
    assert np.array_equal(kept.returns, state.returns)


def test_without_cvar_nothing_is_remembered() -> None:
    assert new_state(np.ones(3), config()).returns.shape == (0,)


@given(
    st.sampled_from(["return", "log_return", "excess", "active", "differential_sharpe"]),
    st.integers(1, 5),
    st.integers(0, 1000),
)
def test_books_are_paid_as_if_each_were_alone(kind: str, n_books: int, seed: int) -> None:
    settings = config(kind=kind, drawdown_penalty=0.5, scale=10.0)
    rng = np.random.default_rng(seed)
    paths = np.cumprod(1.0 + rng.normal(0.0, 0.02, (12, n_books)), axis=0)
    index = rng.normal(0.0, 0.01, 11)
    state: RewardState = new_state(paths[0], settings)
    together = []
    for t in range(11):
        gain = np.full(n_books, index[t])
        step, state = reward(state, paths[t], paths[t + 1], gain, settings)
        together.append(step)
    for e in range(n_books):
        alone = paid(paths[:, e].tolist(), settings, index.tolist())
        assert np.array_equal(np.array(together)[:, e], alone)


def test_reward_leaves_its_state_as_it_was() -> None:
    settings = config(cvar_penalty=1.0, drawdown_penalty=1.0, kind="differential_sharpe")
    state = new_state(np.ones(2), settings)
    before = [np.array(part) for part in state]
    reward(state, np.ones(2), np.array([1.1, 0.9]), None, settings)
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, state, strict=True))


def test_configuration_reaches_the_reward() -> None:
    settings = make_config("reward={kind: log_return, scale: 100}").reward
    assert paid([100.0, 110.0], settings) == pytest.approx([100 * np.log(1.1)])


def test_variance_penalty_takes_off_the_square_of_the_return() -> None:
    path = [100.0, 110.0, 99.0]
    penalty = paid(path, config()) - paid(path, config(variance_penalty=4.0))
    assert penalty == pytest.approx([4 * 0.1**2, 4 * 0.1**2])
