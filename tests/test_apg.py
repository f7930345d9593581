"""Analytic policy gradient: it trades as the books do, learns what pays, and resumes exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import make_config, make_world

from echelon.agents.apg import APG, utility
from echelon.config.agents import RewardConfig
from echelon.envs import rewards
from echelon.envs.act import ActionRule
from echelon.envs.books import Books
from echelon.envs.world import World
from echelon.errors import ConfigError, DataError, TrainingError
from echelon.models.encoders import build_encoder
from echelon.training.run import load_policy

SMALL = (
    *("window=6", "model.d_model=8", "model.n_layers=1", "expert.hidden=8", "train.algo=APG"),
    *("train.books=4", "expert.horizon=5", "expert.warmup_updates=0", "train.lr_actor=0.01"),
    *("reward.scale=100", "reward.variance_penalty=1"),
)
N_ROWS, N_ASSETS = 80, 3


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def steady_world(**changes: Any) -> World:
    """Asset 0 rises 1 % a bar, the others fall; the one feature says which does what."""
    steps = np.array([0.01, -0.01, -0.005])
    close = 20.0 * np.exp(np.arange(N_ROWS)[:, None] * steps)
    x = np.broadcast_to((100.0 * steps).astype(np.float32)[:, None], (*close.shape, 1)).copy()
    return make_world(close=close, x=x, window=6, splits={"train": range(N_ROWS)}, **changes)


def gappy_world() -> World:
    """Assets absent, suspended and out of the universe at one time or another."""
    rng = np.random.default_rng(4)
    shape = (N_ROWS, N_ASSETS)
    return make_world(
        n_rows=N_ROWS,
        n_assets=N_ASSETS,
        window=6,
        splits={"train": range(N_ROWS)},
        tradable=rng.random(shape) < 0.8,
        present=rng.random(shape) < 0.8,
        member=rng.random(shape) < 0.8,
    )


def make_learner(world: World, *overrides: str, seed: int = 7, tables: Path | None = None) -> APG:
    config = make_config(*SMALL, *overrides)
    torch.manual_seed(3)
    return APG(config, world, seed, build_encoder(config, world.x.shape[2]), tables)


def trained(learner: APG, updates: int) -> APG:
    for _ in range(updates):
        learner.train_once()
    return learner


def everything(learner: APG) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, state = learner.state()
    return {name: value.clone() for name, value in tensors.items()}, state


def same(left: APG, right: APG) -> bool:
    (a, state_a), (b, state_b) = everything(left), everything(right)
    return (
        state_a == state_b
        and a.keys() == b.keys()
        and all(torch.equal(a[name], b[name]) for name in a)
    )


@pytest.mark.parametrize("fill_open", [True, False])
def test_its_books_make_the_returns_that_its_policy_makes_in_the_real_ones(fill_open: bool) -> None:
    world = replace(gappy_world(), fill_open=fill_open)
    learner = trained(make_learner(world, "expert.horizon=12", "train.lr_actor=0.1"), 3)
    rows = torch.tensor([10, 30, 50])
    run = learner.trade(rows, torch.zeros(3, N_ASSETS), torch.ones(3))
    span = world.span("train")
    books = Books(world, ActionRule("weights"), RewardConfig(), 3, span)
    books.reset(rows.numpy())
    policy = learner.policy()
    policy.start(world, span)
    for k in range(12):
        before = books.value.copy()
        result = books.step(policy.decide(books.row, books.holdings()))
        assert run.gain[k].tolist() == pytest.approx(result.value / before - 1.0, abs=1e-5)
        assert run.cash[k].tolist() == pytest.approx(books.book.cash / books.value, abs=1e-4)
    assert run.gain.abs().max() > 1e-4


def test_it_learns_to_hold_what_rises() -> None:
    world = steady_world()
    learner = make_learner(world, "train.lr_actor=0.05")
    first = learner.train_once()["charts/reward"]
    trained(learner, 20)
    # Bought at the open, which here is the close: the first of the five bars earns nothing.
    assert learner.train_once()["charts/reward"] > max(first, 0.0) + 0.3
    policy, span = learner.policy(), world.span("train")
    books = Books(world, ActionRule("weights"), RewardConfig(), 1, span)
    policy.start(world, span)
    assert policy.decide(books.row, books.holdings())[0, 0] > 0.9


def test_a_dislike_of_variance_holds_less() -> None:
    world = make_world(n_rows=N_ROWS, n_assets=N_ASSETS, window=6, splits={"train": range(N_ROWS)})
    fast = "train.lr_actor=0.05"
    bold = trained(make_learner(world, fast, "reward.variance_penalty=0"), 15)
    timid = trained(make_learner(world, fast, "reward.variance_penalty=1000"), 15)
    assert timid.train_once()["charts/exposure"] < bold.train_once()["charts/exposure"] - 0.2


def test_an_update_counts_books_times_bars_and_moves_the_actor_alone() -> None:
    learner = make_learner(gappy_world())
    actor = {k: v.clone() for k, v in learner.actor.state_dict().items()}
    encoder = {k: v.clone() for k, v in learner.serving.state_dict().items()}
    metrics = learner.train_once()
    assert learner.steps == 4 * 5
    assert metrics.keys() == learner.train_once().keys()
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["losses/total"] == pytest.approx(-metrics["charts/reward"])
    assert any(not torch.equal(v, actor[k]) for k, v in learner.actor.state_dict().items())
    assert all(torch.equal(v, encoder[k]) for k, v in learner.serving.state_dict().items())


def test_books_begin_with_portfolios_of_what_is_there() -> None:
    world = gappy_world()
    learner = make_learner(world)
    rows = torch.arange(10, 60)
    weights, cash = learner._draw_weights(rows)
    torch.testing.assert_close(weights.sum(-1) + cash, torch.ones(50))
    assert (weights[~torch.from_numpy(world.present[10:60])] == 0.0).all()
    assert weights.std() > 0.05


def test_books_stay_within_their_stretch() -> None:
    stretches = (range(6, 20), range(30, 40))
    world = replace(gappy_world(), stretches={"train": stretches})
    learner = make_learner(world)
    first, last = learner.starts.draw(500)
    within = [np.isin(first, span) & np.isin(last, span) for span in stretches]
    assert np.logical_or(*within).all()
    assert all(part.any() for part in within)
    assert (last - first == 5).all()


def test_resumed_training_is_bit_exact() -> None:
    world = gappy_world()
    options = ("train.lr_schedule=cosine", "train.total_env_steps=400", "expert.warmup_updates=3")
    whole = trained(make_learner(world, *options), 9)
    half = trained(make_learner(world, *options), 4)
    resumed = make_learner(world, *options)
    assert not same(resumed, half)
    resumed.restore(*everything(half))
    assert same(trained(resumed, 5), whole)


def test_same_seed_same_weights_and_another_seed_others() -> None:
    world = gappy_world()
    one = trained(make_learner(world), 2)
    assert same(one, trained(make_learner(world), 2))
    assert not same(one, trained(make_learner(world, seed=8), 2))


def test_saved_weights_make_the_same_policy(tmp_path: Path) -> None:
    world = gappy_world()
    learner = trained(make_learner(world, tables=tmp_path), 3)
    assert (tmp_path / "embeddings.npy").is_file()
    config = make_config(*SMALL)
    again = load_policy(config, learner.weights(), world.x.shape[2], 7)
    span = world.span("train")
    books = Books(world, ActionRule("weights"), RewardConfig(), 1, span)
    decided = []
    for policy in (learner.policy(), again):
        policy.start(world, span)
        decided.append(policy.decide(books.row, books.holdings()))
    assert np.array_equal(*decided, equal_nan=True)
    learner.close()
    assert not list(tmp_path.iterdir())


def test_learning_rate_warms_up_and_falls() -> None:
    options = ("train.lr_schedule=linear", "train.total_env_steps=400", "expert.warmup_updates=4")
    learner = make_learner(gappy_world(), *options)
    rates = [learner.train_once()["charts/learning_rate"] for _ in range(8)]
    assert rates[:4] == pytest.approx(
        [0.01 * (k + 1) / 4 * (1 - 20 * (k + 1) / 400) for k in range(4)]
    )
    assert rates[-1] < rates[3]


@pytest.mark.parametrize("kind", ["return", "log_return"])
def test_utility_is_what_the_books_pay(kind: str) -> None:
    reward = RewardConfig(kind=kind, scale=100.0, variance_penalty=30.0)
    before, after = np.array([1.0, 2.0, 1.0]), np.array([1.03, 1.9, 1.0])
    paid, _ = rewards.reward(rewards.new_state(before, reward), before, after, None, reward)
    found = utility(torch.from_numpy(after / before - 1.0), reward)
    assert found.tolist() == pytest.approx(paid)


def test_number_that_is_none_stops_before_the_weights() -> None:
    learner = trained(make_learner(gappy_world()), 2)
    before = {k: v.clone() for k, v in learner.actor.state_dict().items()}
    look = learner.table.look
    learner.table.look = lambda rows: look(rows) * torch.nan  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"losses/gradient_norm = nan.*lr_actor"):
        learner.train_once()
    assert all(torch.equal(v, before[k]) for k, v in learner.actor.state_dict().items())


@pytest.mark.parametrize(
    "setting",
    [
        "reward.kind=excess",
        "reward.kind=differential_sharpe",
        "reward.drawdown_penalty=0.5",
        "reward.cvar_penalty=0.5",
        "lora.enabled=true",
    ],
)
def test_setting_that_has_no_gradient_is_refused_by_its_key(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        make_learner(gappy_world(), setting)


def test_rule_of_the_market_that_depends_on_size_is_refused() -> None:
    world = steady_world(min_commission=1.0)
    with pytest.raises(ConfigError, match=r"market\.min_commission=0"):
        make_learner(world)


def test_horizon_longer_than_the_train_window_is_refused() -> None:
    with pytest.raises(DataError, match=r"expert\.horizon=75 does not fit.*74 steps"):
        make_learner(gappy_world(), "expert.horizon=75")
    assert trained(make_learner(gappy_world(), "expert.horizon=74"), 1).steps == 4 * 74
