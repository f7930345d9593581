"""The router: deterministic, resumable, never masked, and able to learn whom to choose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import Always, Moving, Tilted
from rule_routers import EqualRouter
from worlds import make_config, make_world

from echelon.backtest.run import run_backtest
from echelon.config import Config
from echelon.errors import StoreError
from echelon.population.expert_books import survey
from echelon.population.meta_env import MetaEnv
from echelon.population.policy import HierarchyPolicy
from echelon.population.reference_policies import HedgeRouter
from echelon.population.router import Router, probabilities_along
from echelon.population.router_task import observation_names
from echelon.runs.checkpoint import load_checkpoint, save_checkpoint


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_of(*more: str) -> Config:
    small = (
        *("meta_router.horizons=[2,5]", "meta_router.every_bars=2", "meta_router.n_envs=4"),
        *("meta_router.n_steps=64", "meta_router.batch_size=32"),
        "meta_router.episode_decisions=10",
    )
    return make_config(*small, *more)


def env_of(config: Config) -> MetaEnv:
    world = make_world(n_rows=200, seed=1)
    experts = [Moving("a"), Moving("b", -1.0), Always("c", (0.2, 0.2, 0.2))]
    return MetaEnv(experts, world, [range(20, 190)], config, 5)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(v, other[k]) for k, v in one.items())


def some_obs(config: Config, n: int = 50) -> np.ndarray:
    size = len(observation_names("abc", config.meta_router.horizons))
    return np.random.default_rng(2).uniform(-2, 2, (n, size)).astype(np.float32)


def test_untrained_router_chooses_by_its_seed_and_leaves_global_chance_alone() -> None:
    config = config_of()
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002 (SB3 draws from it)
    expected = torch.rand(1), np.random.rand()  # noqa: NPY002
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    routers = [Router(config, 3, seed) for seed in (1, 1, 2)]
    routers[0].learn(env_of(config), 64, 0)
    assert (torch.rand(1), np.random.rand()) == expected  # noqa: NPY002
    assert same(routers[1].weights(), Router(config, 3, 1).weights())
    assert not same(routers[1].weights(), routers[2].weights())
    allowed = np.ones((50, 4), dtype=bool)
    obs = some_obs(config)
    np.testing.assert_array_equal(
        routers[1].choose(obs, allowed), Router(config, 3, 1).choose(obs, allowed)
    )


def test_masked_choices_are_never_made_and_have_no_probability() -> None:
    config = config_of()
    router = Router(config, 3, 1)
    with torch.no_grad():
        router.net.action_net.bias += torch.tensor([20.0, 0.0, 0.0, 0.0])
    obs = some_obs(config)
    allowed = np.random.default_rng(4).random((50, 4)) < 0.5
    allowed[:, 3] = True
    chosen = router.choose(obs, allowed)
    assert allowed[np.arange(50), chosen].all()
    assert (chosen[allowed[:, 0]] == 0).all()
    found = router.probabilities(obs, allowed)
    assert (found[~allowed] == 0.0).all()
    np.testing.assert_allclose(found.sum(axis=1), 1.0)
    np.testing.assert_array_equal(found.argmax(axis=1), chosen)
    only_cash = np.zeros((50, 4), dtype=bool)
    only_cash[:, 3] = True
    assert (router.choose(obs, only_cash) == 3).all()


def test_run_that_is_resumed_between_phases_gives_the_same_numbers(tmp_path: Path) -> None:
    config = config_of("meta_router.kl_bonus=policy")
    whole, env = Router(config, 3, 1), env_of(config)
    first = whole.learn(env, 128, 0)
    assert first["router/decisions"] == 128
    saved = save_checkpoint(tmp_path, 1, *whole.state(), config_hash="c", keep=1)
    resumed = Router(config, 3, 99)
    resumed.seed = 1
    read = load_checkpoint(saved)
    resumed.restore(read.tensors, read.state)
    env.renew(1)
    one = whole.learn(env, 128, 1)
    torch.rand(5)  # what happened elsewhere does not matter, nor what the environment did before
    other = env_of(config)
    other.renew(1)
    two = resumed.learn(other, 128, 1)
    del one["time/router_updates"], two["time/router_updates"]
    assert one == two
    left, right = whole.state(), resumed.state()
    assert same(left[0], right[0])
    assert left[1] == right[1]
    assert whole.learn(env, 64, 2)["router/decisions"] == 320


def test_learning_rate_and_weight_of_the_bonus_can_be_set_and_are_kept() -> None:
    config = config_of()
    router = Router(config, 3, 1)
    router.set_lr(0.0)
    router.incentive.weight = 0.05
    before = router.weights()
    told = router.learn(env_of(config), 64, 0)
    assert same(before, router.weights())
    assert told["router/kl_lambda"] != 0.05, "it adapts on"
    other = Router(config, 3, 1)
    other.restore(*router.state())
    assert (other.ppo.lr, other.incentive.weight) == (0.0, router.incentive.weight)


def test_weights_of_another_population_are_refused() -> None:
    config = config_of()
    with pytest.raises(StoreError, match="do not fit 4 experts"):
        Router(config, 4, 1).load(Router(config, 3, 1).weights())
    other = Router(config, 3, 2)
    other.load(Router(config, 3, 1).weights())
    assert same(other.weights(), Router(config, 3, 1).weights())


def test_router_learns_to_choose_the_expert_that_earns() -> None:
    # Asset 0 rises in every bar, asset 1 falls; the one who holds the riser is always best.
    bars = np.arange(200)
    close = 100.0 * np.stack([1.004**bars, 0.998**bars], axis=1)
    world = make_world(close=close, commission=0.0005)
    config = config_of("meta_router.lr=0.003", "risk.enabled=false", "meta_router.kl_lambda=0")
    experts = [Always("falls", (0.0, 1.0)), Always("half", (0.5, 0.5)), Always("rises", (1.0, 0.0))]
    router = Router(config, 3, 1)
    env = MetaEnv(experts, world, [range(20, 190)], config, 5)
    told = [router.learn(env, 640, 0)]
    env.renew(1)
    told.append(router.learn(env, 640, 1))
    assert told[1]["router/relative_return"] > told[0]["router/relative_return"]
    assert told[1]["router/usage_entropy"] < told[0]["router/usage_entropy"]
    policy = HierarchyPolicy(experts, router, config, 1)
    run_backtest(policy, world, range(20, 60), config)
    assert policy.record is not None
    assert set(policy.record.in_charge.tolist()) == {2}


def test_probabilities_along_a_span_are_those_of_a_backtest_there() -> None:
    world = make_world(n_rows=120, seed=1)
    config = config_of("risk.drawdown_limit=0.04", "risk.drawdown_release=0.03")
    experts = [Tilted("a", 1.0), Tilted("b", -1.0), Always("c", (0.2, 0.2, 0.2))]
    router = Router(config, 3, 1)
    with torch.no_grad():
        router.net.action_net.weight *= 100.0
    spans = [range(40, 70), range(71, 118)]
    found = probabilities_along(router, survey(experts, world, spans, config))
    for span in spans:
        policy = HierarchyPolicy(experts, router, config, 1)
        run_backtest(policy, world, range(span.start, span.stop + 1), config)
        assert policy.record is not None
        here = found[span.start : span.stop]
        np.testing.assert_array_equal(here.argmax(axis=1), policy.record.in_charge)
        np.testing.assert_allclose(here.sum(axis=1), 1.0)
        assert len(set(policy.record.in_charge.tolist())) >= 2
    assert np.isnan(found[[39, 70, 118]]).all()


def test_hedge_follows_the_expert_that_earns_and_forgets_fresh_books() -> None:
    hedge = HedgeRouter(rate=10.0, share=0.1)
    obs = np.zeros((2, 1), dtype=np.float32)
    everyone = np.ones((2, 3), dtype=bool)
    hedge.follow(np.zeros((2, 2)), np.array([True, True]))
    hedge.follow(np.array([[0.1, 0.0], [0.0, 0.1]]), np.array([False, False]))
    # e : 1, then a tenth spread anew.
    first = 0.9 * np.e / (np.e + 1) + 0.05
    np.testing.assert_allclose(hedge.trust, [[first, 1 - first], [1 - first, first]])
    assert hedge.choose(obs, everyone).tolist() == [0, 1]
    masked = np.array([[False, True, True], [False, False, True]])
    assert hedge.choose(obs, masked).tolist() == [1, 2]
    hedge.follow(np.zeros((2, 2)), np.array([False, True]))
    assert hedge.trust[1].tolist() == [0.5, 0.5]
    assert hedge.trust[0, 0] > 0.5


def test_equal_router_gives_everybody_a_turn() -> None:
    router = EqualRouter(bars=2)
    obs, everyone = np.zeros((1, 1), dtype=np.float32), np.ones((1, 4), dtype=bool)
    chosen = []
    for bar in range(8):
        router.follow(np.zeros((1, 3)), np.array([bar == 0]))
        chosen.append(int(router.choose(obs, everyone)[0]))
    assert chosen == [0, 0, 1, 1, 2, 2, 0, 0]
    assert router.choose(obs, np.array([[False, False, True, True]])).tolist() == [2]
