"""The router's environment: rewards by hand, masks, ends, and numbers that come again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from commands import Always, Moving, Tilted
from rule_routers import FixedRouter
from stable_baselines3.common.vec_env import VecEnv
from worlds import make_config, make_world

from echelon.backtest.run import run_backtest
from echelon.config import Config
from echelon.config.hierarchy import MetaRouterConfig
from echelon.envs import World
from echelon.errors import StoreError
from echelon.population.meta_env import MetaEnv
from echelon.population.policy import HierarchyPolicy
from echelon.population.router_task import OBSERVATION_CLIP, RouterReward, observation_names


def config_of(*more: str) -> Config:
    small = (
        *("meta_router.horizons=[2,5]", "meta_router.every_bars=2", "meta_router.n_envs=2"),
        *("meta_router.n_steps=8", "meta_router.batch_size=8", "meta_router.episode_decisions=6"),
    )
    return make_config(*small, *more)


def env_of(world: World, config: Config, experts: list[Any], span: range) -> MetaEnv:
    return MetaEnv(experts, world, [span], config, 7)


def step(env: VecEnv, *chosen: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[Any]]:
    return env.step(np.array(chosen))  # type: ignore[return-value]


FEE = 0.01


def two_assets(rows: int = 30) -> World:
    """Asset 0 doubles at every bar, asset 1 halves: opens are the closes before."""
    bars = np.arange(rows)
    close = np.stack([10.0 * 2.0**bars, 1e6 * 0.5**bars], axis=1)
    opens = np.vstack([close[:1], close[:-1]])
    return make_world(close=close, open=opens, commission=FEE, window=1)


def test_relative_reward_of_two_experts_by_hand_with_fees_and_the_cost_of_switching() -> None:
    config = config_of(
        *("risk.enabled=false", "meta_router.every_bars=1", "meta_router.episode_decisions=3"),
        "meta_router.n_envs=1",
    )
    experts = [Always("up", (0.5, 0.0)), Always("down", (0.0, 0.5))]
    env = env_of(two_assets(), config, experts, range(5, 10))
    env.reset()
    # Half of the money is bought for, filled at the close of the decision, as the open is that.
    # cash 0.5 - fee; the half doubles or halves.
    up, down = 0.5 - 0.5 * FEE + 1.0, 0.5 - 0.5 * FEE + 0.25
    _, reward, _, _ = step(env, 0)
    assert reward[0] == pytest.approx(math.log(up) - (math.log(up) + math.log(down)) / 2, rel=1e-6)
    # The real book is now worth `up`, 1 of it in asset 0. Staying sells down to one half of it;
    # switching sells everything, at a fee, and buys the other asset.
    sold = 1.0 - 0.5 * up
    stay = (up - 1.0) + sold * (1 - FEE) + (1.0 - sold) * 2.0
    switch = (up - 1.0) + (1 - FEE) - 0.5 * up * (1 + FEE) + 0.5 * up * 0.5
    _, reward, _, _ = step(env, 1)
    mean = (math.log(stay / up) + math.log(switch / up)) / 2
    assert reward[0] == pytest.approx(math.log(switch / up) - mean, rel=1e-6)
    # Cash sells what there is; the mean is still over the experts alone.
    half = 0.5 * up * 0.5
    rest = switch - half
    cash = rest + half * (1 - FEE)
    want = 0.5 * switch
    stays = rest - (want - half) * (1 + FEE) + want * 0.5
    changes = rest + half * (1 - FEE) - want * (1 + FEE) + want * 2.0
    _, reward, done, _ = step(env, 2)
    mean = (math.log(stays / switch) + math.log(changes / switch)) / 2
    assert reward[0] == pytest.approx(math.log(cash / switch) - mean, rel=1e-6)
    assert done.tolist() == [True]


def test_environments_begin_inside_the_spans_and_end_together_by_truncation() -> None:
    config, world = config_of(), make_world(n_rows=80)
    env = env_of(world, config, [Moving("a"), Moving("b", -1.0)], range(20, 60))
    seen = env.reset()
    assert seen.shape == (2, len(observation_names(("a", "b"), (2, 5))))
    for n in range(6):
        rows = env._books.row.copy()
        assert ((rows >= 20) & (rows < 60)).all()
        seen, _, done, infos = step(env, n % 3, 0)
        assert done.tolist() == [n == 5] * 2
        assert np.abs(seen).max() <= OBSERVATION_CLIP
    for info, row in zip(infos, rows, strict=True):
        assert info["TimeLimit.truncated"] is True
        charge = dict(
            zip(observation_names(("a", "b"), (2, 5)), info["terminal_observation"], strict=True)
        )
        assert charge["charge/a"] + charge["charge/cash"] == 1.0
        np.testing.assert_array_equal(
            info["terminal_observation"][:4], env.survey.view.relative[row + 2].ravel()
        )
    assert (env._books.value == world.initial_cash).all()


def test_short_spans_shorten_episodes() -> None:
    env = env_of(make_world(), config_of(), [Moving("a"), Moving("b")], range(20, 24))
    env.reset()
    assert step(env, 0, 0)[2].tolist() == [False, False]
    assert step(env, 0, 0)[2].tolist() == [True, True]


def falling() -> World:
    """Both assets stand still, until asset 0 falls by 40 % in one bar, at row 33."""
    close = np.full((60, 2), 100.0)
    close[33:, 0] = 60.0
    return make_world(close=close, commission=0.0)


def test_masked_expert_ends_the_step_early_for_all_and_cannot_be_chosen() -> None:
    config = config_of("meta_router.every_bars=5", "meta_router.episode_decisions=2")
    experts = [Always("faller", (1.0, 0.0)), Always("calm", (0.0, 1.0))]
    env = env_of(falling(), config, experts, range(31, 42))
    env.reset()
    assert env._books.row.tolist() == [31, 31]
    assert env.action_masks().all()
    _, reward, done, _ = step(env, 0, 1)
    assert env._books.row.tolist() == [33, 33], "the step goes on after the mask"
    assert reward[0] < 0 < reward[1]
    assert env.env_method("action_masks")[0].tolist() == [False, True, True]
    with pytest.raises(AssertionError, match="a masked expert was chosen"):
        step(env, 0, 1)
    _, _, done, _ = step(env, 1, 2)
    assert (done.tolist(), env._books.row.tolist()) == ([False, False], [38, 38])
    # Of the episode's 10 bars 3 are left.
    assert step(env, 1, 2)[2].tolist() == [True, True]


def test_without_risk_control_the_step_goes_on() -> None:
    config = config_of("meta_router.every_bars=5", "risk.enabled=false")
    experts = [Always("faller", (1.0, 0.0)), Always("calm", (0.0, 1.0))]
    env = env_of(falling(), config, experts, range(31, 42))
    env.reset()
    step(env, 0, 1)
    assert env._books.row.tolist() == [36, 36]
    assert env.action_masks().all()


def test_ruined_book_is_terminated_and_begins_anew_where_it_stands() -> None:
    close = np.full((60, 2), 100.0)
    close[33:, 0] = 1e-6
    world = make_world(close=close, commission=0.0)
    config = config_of("risk.enabled=false")
    experts = [Always("ruined", (1.0, 0.0)), Always("calm", (0.0, 0.5))]
    env = env_of(world, config, experts, range(31, 44))
    env.reset()
    seen, reward, done, infos = step(env, 0, 1)
    assert done.tolist() == [True, False]
    assert infos[0]["TimeLimit.truncated"] is False
    assert infos[0]["terminal_observation"] is not None
    assert infos[1] == {}
    assert np.isfinite(reward).all()
    assert env._books.row.tolist() == [33, 33]
    assert env._books.value[:, 0].tolist() == [world.initial_cash] * 3
    shown = dict(zip(observation_names(("a", "b"), (2, 5)), seen[0], strict=True))
    assert (shown["charge/cash"], shown["charge/a"]) == (1.0, 0.0)


def test_forks_and_policy_trade_alike() -> None:
    # From cash at one row, a fixed choice makes the same of a book in training and in a backtest.
    world = make_world(n_rows=80, seed=4)
    config = config_of("meta_router.n_envs=1", "risk.enabled=false")
    experts = [Moving("a"), Moving("b", -1.0)]
    env = env_of(world, config, experts, range(20, 60))
    env.reset()
    first = int(env._books.row[0])
    for _ in range(5):
        step(env, 1)
    policy = HierarchyPolicy(experts, FixedRouter(1), config, 1)
    found = run_backtest(policy, world, range(first, first + 11), config)
    assert env._books.value[0, 0] == pytest.approx(found.value[-1], rel=1e-13)


def test_view_in_training_is_the_one_in_a_backtest() -> None:
    world = make_world(n_rows=80, seed=4)
    config = config_of("meta_router.n_envs=1")
    experts = [Tilted("a", 1.0), Tilted("b", -1.0)]
    env = env_of(world, config, experts, range(20, 60))

    class Spy(FixedRouter):
        def choose(self, obs: Any, allowed: Any) -> Any:
            self.seen = obs.copy()
            return super().choose(obs, allowed)

    spy = Spy(0)
    # With all rows to look back to, and with as many as the world has.
    for phase in range(4):
        env.renew(phase)
        trained = env.reset()[0]
        row = int(env._books.row[0])
        policy = HierarchyPolicy(experts, spy, config, 1)
        run_backtest(policy, world, range(row, row + 2), config)
        np.testing.assert_allclose(spy.seen[0], trained, atol=1e-3)


def test_same_phase_begins_alike_and_another_differently() -> None:
    world, config = make_world(n_rows=200), config_of("meta_router.n_envs=4")
    env = env_of(world, config, [Moving("a"), Moving("b")], range(20, 190))
    begun = []
    for phase in (3, 3, 4):
        env.renew(phase)
        begun.append(env.reset().tolist())
    assert begun[0] == begun[1] != begun[2]


def incentive(*more: str) -> RouterReward:
    return RouterReward(config_of(*more).meta_router, 3)


def test_pay_is_scaled_return_and_usage_bonus_before_the_decision() -> None:
    paid = incentive("meta_router.kl_lambda=0.1")
    chosen = np.array([0, 3])
    relative = np.array([0.03, -0.01])
    first = paid.pay(relative, chosen, None)
    # Even shares before the first decision: log 3; cash is paid none.
    np.testing.assert_allclose(first, relative / 0.02 + [0.1 * math.log(3), 0.0])
    second = paid.pay(relative, chosen, None)
    # Expert 0 was chosen once of once: (1 + 1) / (1 + 3).
    np.testing.assert_allclose(second, relative / 0.02 + [0.1 * math.log(2), 0.0])
    assert len(paid.usage) == 2


def test_policy_bonus_pays_for_the_portfolio_unlike_the_others() -> None:
    paid = incentive("meta_router.kl_bonus=policy", "meta_router.kl_lambda=0.1")
    targets = np.array([[[0.9, 0.0]], [[0.0, 0.4]], [[0.0, np.nan]]])
    current = np.full((3, 1, 2), 0.4, dtype=np.float32)
    kl = paid.unlikeness(targets, current, np.random.default_rng(1))
    assert kl is not None
    # Of three portfolios two are alike: log 3 against log 3/2.
    np.testing.assert_allclose(kl[:, 0], np.log([3.0, 1.5, 1.5]), atol=1e-6)
    got = paid.pay(np.array([0.0]), np.array([0]), kl)
    np.testing.assert_allclose(got, 0.1 * math.log(3), atol=1e-6)
    assert incentive().unlikeness(targets, current, np.random.default_rng(1)) is None


def test_weight_rises_while_one_expert_does_everything_and_falls_otherwise() -> None:
    paid = incentive("meta_router.kl_lambda=0.1")
    paid.usage.record(np.zeros(900, dtype=np.int64))
    paid.adapt()
    assert 0.1 < paid.weight <= 0.2
    paid.usage.record(np.arange(999) % 3)
    for _ in range(20):
        paid.adapt()
    assert paid.weight == 0.0


def test_weight_of_zero_is_a_switch_and_stays_zero() -> None:
    off = incentive("meta_router.kl_lambda=0")
    relative, chosen = np.array([0.03, -0.01]), np.array([0, 0])
    for _ in range(5):
        paid = off.pay(relative, chosen, None)
        off.adapt()
        assert off.weight == 0.0
    np.testing.assert_array_equal(paid, off.scale.scale(relative))


def test_incentive_goes_on_from_its_state_and_refuses_another_populations() -> None:
    one, other = incentive(), incentive()
    one.pay(np.array([0.1, 0.2, -0.3]), np.array([0, 2, 3]), None)
    one.adapt()
    other.restore(one.state())
    again = (np.array([0.05, 0.0]), np.array([1, 1]), None)
    np.testing.assert_array_equal(one.pay(*again), other.pay(*again))
    assert one.state() == other.state()
    with pytest.raises(StoreError, match="expected usage of 4 experts"):
        RouterReward(MetaRouterConfig(), 4).restore(one.state())
