"""SB3's agents behind our interface: the same as on windows, resumable, and loaded again alike."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3 import PPO, SAC
from worlds import make_config, make_world

from echelon.agents.sb3 import Sb3Learner, Sb3Policy, ppo_steps, refuse_divergence
from echelon.backtest.run import run_backtest
from echelon.config import Config
from echelon.envs.vec import BatchedVecEnv
from echelon.envs.world import World
from echelon.errors import TrainingError
from echelon.proving.planted import PlantedMarket, own_draws
from echelon.runs.checkpoint import load_checkpoint, save_checkpoint
from echelon.training.run import Worlds, load_policy, make_learner

SMALL = (
    *("window=4", "train.books=4", "train.rollout_steps=10", "train.episode_steps=12"),
    *("train.total_env_steps=128", "reward.scale=100", "expert.updates_per_step=0.25"),
)
BOTH = pytest.mark.parametrize("algo", ["SB3-PPO", "SB3-SAC"])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(algo: str, *more: str) -> Config:
    return make_config(*SMALL, f"train.algo={algo}", *more)


def make(algo: str, world: World, *more: str, seed: int = 1) -> Sb3Learner:
    worlds = Worlds(world, world, "data")
    learner = make_learner(small(algo, *more), worlds, Path("nowhere"), seed)
    assert isinstance(learner, Sb3Learner)
    return learner


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(v, other[k]) for k, v in one.items())


@BOTH
def test_lookup_learns_what_sb3_learns_from_windows(algo: str) -> None:
    # A missing asset and all parts of the state, so that no part of the order can be wrong.
    present = np.ones((60, 3), dtype=bool)
    present[:20, 1] = False
    world = make_world(present=present)
    ours = make(algo, world)
    env = BatchedVecEnv(world, ours.config, 4, actions="weights", observation="window")
    settings: dict[str, Any] = {"n_steps": 32, "batch_size": 64}
    if algo == "SB3-SAC":
        settings = {"buffer_size": 400}
    theirs = (PPO if algo == "SB3-PPO" else SAC)("MultiInputPolicy", env, device="cpu", **settings)
    theirs.policy.load_state_dict(ours.model.policy.state_dict())
    env.restore(*ours.env.state())
    env._seeds = [None] * 4
    theirs._last_obs = env._spec.observe(env._books.row, env._held)
    theirs._last_episode_starts = np.ones(4, dtype=bool)
    lots = ours.model.action_space.np_random.bit_generator.state
    theirs.action_space.np_random.bit_generator.state = lots
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002 (what SB3 draws from)
    theirs.learn(160, reset_num_timesteps=False, log_interval=None)
    ours._global_rng.torch = torch.Generator().manual_seed(5).get_state()
    ours._global_rng.numpy = np.random.Generator(np.random.MT19937(0))
    ours._global_rng.numpy.bit_generator.state = np.random.RandomState(5).get_state(legacy=False)
    while ours.steps < 160:
        ours.train_once()
    assert ours.steps == theirs.num_timesteps
    assert ours.model._n_updates == theirs._n_updates > 0
    assert same(ours.model.policy.state_dict(), theirs.policy.state_dict())


@BOTH
def test_same_seed_gives_the_same_weights_and_leaves_global_chance_alone(algo: str) -> None:
    world = make_world()
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002 (what SB3 draws from)
    expected = torch.rand(2), np.random.rand(2)  # noqa: NPY002
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    one = make(algo, world)
    one.train_once()
    run_backtest(one.policy(), world, world.span("valid"), small(algo, "eval.deterministic=false"))
    assert torch.equal(torch.rand(2), expected[0])
    assert np.array_equal(np.random.rand(2), expected[1])  # noqa: NPY002
    other, third = make(algo, world), make(algo, world, seed=2)
    other.train_once()
    third.train_once()
    assert same(one.weights(), other.weights())
    assert not same(one.weights(), third.weights())


@BOTH
def test_restored_learner_goes_on_bit_for_bit(algo: str, tmp_path: Path) -> None:
    world = make_world()
    whole = make(algo, world)
    first = whole.train_once()
    tensors, state = whole.state()
    path = save_checkpoint(
        tmp_path, whole.steps, tensors, {"learner": state}, config_hash="x", keep=1
    )
    expected = [whole.train_once() for _ in range(3)]
    other = make(algo, world, seed=9)
    read = load_checkpoint(path)
    other.restore(dict(read.tensors), read.state["learner"])
    assert [other.train_once() for _ in range(3)] == expected
    assert same(whole.weights(), other.weights())
    assert whole.steps == other.steps
    assert first.keys() == expected[0].keys()


@BOTH
@pytest.mark.parametrize("deterministic", ["true", "false"])
def test_saved_and_loaded_policy_acts_identically(algo: str, deterministic: str) -> None:
    world = make_world()
    config = small(algo, f"eval.deterministic={deterministic}")
    learner = make(algo, world, f"eval.deterministic={deterministic}")
    learner.train_once()
    before = run_backtest(learner.policy(), world, world.span("test"), config)
    loaded = load_policy(config, learner.weights(), world.x.shape[2], 1, "seed 1")
    assert isinstance(loaded, Sb3Policy)
    after = run_backtest(loaded, world, world.span("test"), config)
    assert (before.kind, after.policy) == ("weights", "seed 1")
    assert before.fills.shares.any()
    assert np.array_equal(before.actions, after.actions)
    assert np.array_equal(before.value, after.value)


@BOTH
def test_policy_does_not_look_ahead(algo: str) -> None:
    world = make_world()
    span = world.span("test")
    learner = make(algo, world)
    usual = run_backtest(learner.policy(), world, span, learner.config)
    later = world.x.copy()
    later[span.start + 5 :] += 3.0
    changed = run_backtest(learner.policy(), replace(world, x=later), span, learner.config)
    assert np.array_equal(usual.actions[:5], changed.actions[:5])
    assert not np.array_equal(usual.actions[5], changed.actions[5])
    learner.train_once()  # on its own world again
    assert learner.steps > 0


@BOTH
def test_weights_of_another_network_are_refused(algo: str) -> None:
    learner = make(algo, make_world())
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_policy(learner.config, learner.weights(), 7, 1)
    other = "SB3-SAC" if algo == "SB3-PPO" else "SB3-PPO"
    with pytest.raises(RuntimeError, match="not the weights of"):
        load_policy(small(other), learner.weights(), 2, 1)


def test_state_without_holdings_or_cash_is_learned_from_too() -> None:
    more = ("state.include_pos=false", "state.include_cash=false")
    learner = make("SB3-PPO", make_world(), *more)
    learner.train_once()
    policy = load_policy(small("SB3-PPO", *more), learner.weights(), 2, 1)
    world = make_world(seed=3)
    assert run_backtest(policy, world, world.span("test"), learner.config).value[-1] > 0


def test_losses_that_are_no_numbers_end_training() -> None:
    with pytest.raises(TrainingError, match=r"train/value_loss .* after 1,200 steps"):
        refuse_divergence({"train/value_loss": np.float32("nan"), "train/loss": 1.0}, 1200)
    learner = make("SB3-SAC", make_world())
    while learner.steps <= 100:  # SB3's learning_starts
        learner.train_once()
    before = learner.steps
    with torch.no_grad():
        learner.model.critic.qf0[0].weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="train/critic_loss"):
        learner.train_once()
    assert learner.steps == before


@BOTH
def test_episodes_stay_inside_the_stretches_of_a_market(algo: str) -> None:
    stretches = (range(3, 15), range(18, 36))
    world = make_world(stretches={"train": stretches})
    learner = make(algo, world, "train.episode_steps=5")
    seen = set()
    for _ in range(40):
        views = learner.env.get_attr("row")
        seen |= set(views)
        learner.env.step(np.zeros((4, world.n_assets + 1), dtype=np.float32))
    assert any(row in stretches[0] for row in seen)
    assert any(row in stretches[1] for row in seen)
    assert all(any(row in stretch for stretch in stretches) for row in seen)


def test_an_agent_of_sb3_learns_a_proof_on_the_draws_of_experts() -> None:
    market = PlantedMarket(n_assets=2, n_bars=60)
    ours, theirs = (own_draws(market, small(algo), 3, (4, 2)) for algo in ("SAC", "SB3-PPO"))
    for mine, other in ((ours.train, theirs.train), (ours.valid, theirs.valid)):
        assert len(mine) == len(other) > 1
        for left, right in zip(mine, other, strict=True):
            assert np.array_equal(left.close, right.close)
            assert np.array_equal(left.open, right.open)
    assert len(own_draws(market, small("A2C"), 3, (4, 2)).train) == 1


def test_losses_are_told_from_the_first_update_on() -> None:
    learner = make("SB3-SAC", make_world(), "train.rollout_steps=1")
    first = learner.train_once()
    assert not [name for name in first if name.startswith("losses/")]
    while not learner.model._n_updates:
        told = learner.train_once()
    assert told["losses/critic"] > 0.0


@pytest.mark.parametrize(("books", "total", "steps"), [(64, 10**6, 32), (1, 10**6, 2048)])
def test_rollout_of_ppo_has_the_default_size(books: int, total: int, steps: int) -> None:
    assert ppo_steps(books, total) == steps


@pytest.mark.parametrize("books", [3, 48, 5000])
def test_rollout_of_ppo_is_whole_minibatches(books: int) -> None:
    assert ppo_steps(books, 10**6) * books % 64 == 0
    assert ppo_steps(books, 100) * books % 64 == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make("SB3-PPO", make_world(), "train.books=3")
