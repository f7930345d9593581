"""The learner: its books, its episodes, its updates, its draws and its state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from worlds import make_config, make_world

from echelon.agents import a2c as module
from echelon.agents.a2c import (
    A2C,
    learning_rate_share,
    portfolio_inputs,
    sample,
)
from echelon.config import Config
from echelon.envs import Action, ActionRule, Books, World
from echelon.envs.act import Holdings
from echelon.errors import DataError, TrainingError
from echelon.models.actor_critic import MarketTensors

SMALL = (
    *("window=4", "model.d_model=8", "model.n_layers=1", "model.hidden=8"),
    *("train.rollout_steps=5", "train.books=6", "train.offset_groups=2", "train.lr_actor=0.01"),
    *("train.lr_critic=0.01", "reward.scale=100"),
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_config(*overrides: str) -> Config:
    return make_config(*SMALL, *overrides)


def learner(*overrides: str, seed: int = 7, **world: Any) -> A2C:
    return A2C(small_config(*overrides), make_world(**world), seed)


def weights(agent: A2C) -> Tensor:
    return torch.cat([p.detach().ravel().clone() for p in agent.net.parameters()])


def test_collecting_and_loss_use_the_same_encodings_also_with_dropout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = learner("model.dropout=0.5")
    seen: list[Tensor] = []
    mask_logits = agent.net.mask_logits

    def watched(*args: Any) -> Tensor:
        logits = mask_logits(*args)
        seen.append(logits.detach().clone())
        return logits

    encoded = 0
    encode = agent.net.encode

    def counted(x: Tensor) -> MarketTensors:
        nonlocal encoded
        encoded += 1
        return encode(x)

    monkeypatch.setattr(agent.net, "mask_logits", watched)
    monkeypatch.setattr(agent.net, "encode", counted)
    agent.train_once()
    assert encoded == 1
    *collected, in_loss = seen
    torch.testing.assert_close(torch.stack(collected, dim=1), in_loss[:, :-1], rtol=1e-5, atol=1e-7)


def test_rollout_has_the_windows_of_its_rows() -> None:
    agent = learner()
    rows = agent.rows.copy()
    x, present = agent.world.x, agent.world.present
    rollout = agent.collect()
    for g, row in enumerate(rows.tolist()):
        for k in range(6):
            window = torch.from_numpy(x[row + k - 3 : row + k + 1])
            alone = agent.net.encode(window).actor[0]
            torch.testing.assert_close(rollout.market.actor[g, k], alone, rtol=1e-5, atol=1e-6)
            assert rollout.present[g, k, 0].tolist() == present[row + k].tolist()


def test_groups_trade_as_learners_of_one_group_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same books, once in 3 groups of 2 and once as 3 learners, given the same actions."""
    groups, per_group = 3, 2
    overrides = (f"train.books={groups * per_group}", f"train.offset_groups={groups}")
    changes = {"n_rows": 80, "seed": 5}
    world = make_world(**changes)
    together = A2C(small_config(*overrides), world, 1)
    rows = together.rows.copy()
    assert len(set(rows.tolist())) == groups
    one = small_config(f"train.books={per_group}", "train.offset_groups=1")
    alone = [A2C(one, world, 1) for _ in range(groups)]
    rng = np.random.default_rng(0)
    script = torch.from_numpy(rng.integers(0, 3, (5, groups, per_group, world.n_assets)))

    def play(actions: Tensor) -> None:
        lines = iter(actions)
        monkeypatch.setattr(module, "sample", lambda _logits, _generator: next(lines))

    play(script)
    whole = together.collect()
    for g, agent in enumerate(alone):
        agent.rows[:] = rows[g]
        agent.books.reset(np.full(per_group, rows[g]))
        agent.net.load_state_dict(together.net.state_dict())
        play(script[:, g : g + 1])
        part = agent.collect()
        for name in ("portfolio", "present", "allowed", "actions", "reward", "discount"):
            assert torch.equal(getattr(whole, name)[g], getattr(part, name)[0]), name
        torch.testing.assert_close(whole.market.actor[g], part.market.actor[0])


def test_reward_and_holdings_of_a_rollout_are_those_of_the_books() -> None:
    """A rollout replayed by hand on books of its own."""
    agent = learner(seed=3)
    start = agent.books.row.copy()
    rollout = agent.collect()
    books = Books(
        agent.world,
        ActionRule.from_config(agent.config, "discrete"),
        agent.config.reward,
        6,
        agent.span,
    )
    books.reset(start)
    for k in range(rollout.reward.shape[1]):
        held = books.holdings()
        book_inputs = np.stack([held.weights, np.repeat(held.cash_share[:, None], 3, 1)], -1)
        assert np.array_equal(rollout.portfolio[:, k].flatten(0, 1).numpy(), book_inputs)
        assert np.array_equal(rollout.allowed[:, k].flatten(0, 1).numpy(), held.allowed)
        result = books.step(rollout.actions[:, k].flatten(0, 1).numpy())
        expected = result.reward.astype(np.float32)
        assert np.array_equal(rollout.reward[:, k].flatten().numpy(), expected)
    last = books.holdings().weights
    assert np.array_equal(rollout.portfolio[:, -1, ..., 0].flatten(0, 1).numpy(), last)


def test_every_action_of_a_rollout_was_allowed() -> None:
    tradable = np.random.default_rng(1).random((60, 3)) > 0.3
    rollout = learner(tradable=tradable).collect()
    picked = rollout.allowed.gather(-1, rollout.actions[..., None])
    assert picked.all()
    assert not rollout.allowed.all()


def test_a_ruined_book_is_cut_off_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both groups hold a stock that becomes worthless; only its holders have discount 0."""
    close = np.full((30, 2), 10.0)
    close[6:, 0] = 1e-9
    agent = learner(
        *("train.books=4", "train.offset_groups=2", "train.episode_steps=12", "buy_pct=1.0"),
        close=close,
        splits={"train": range(16), "valid": range(16, 20), "test": range(20, 30)},
        commission=0.0,
        initial_cash=100.0,
    )
    for g in range(2):
        agent.rows[g] = 3
    agent.ends[:] = 15
    agent.books.reset(np.full(4, 3))
    buys = torch.zeros(2, 2, 2, dtype=torch.long)
    buys[0, 0, 0] = buys[1, 1, 0] = Action.BUY
    moves = iter([buys, *[torch.zeros_like(buys)] * 4])
    monkeypatch.setattr(module, "sample", lambda _logits, _generator: next(moves))
    rollout = agent.collect()
    ruined = rollout.discount == 0.0
    assert ruined.nonzero().tolist() == [[0, 2, 0], [1, 2, 1]]
    assert rollout.discount[~ruined].unique().tolist() == pytest.approx([0.96])
    # From the next step on the book is a new one: all cash.
    assert rollout.portfolio[0, 3, 0, :, 0].tolist() == [0.0, 0.0]
    assert rollout.portfolio[0, 3, 0, :, 1].tolist() == [1.0, 1.0]
    assert rollout.reward[0, 2, 0] == pytest.approx(-100.0, abs=1e-3)
    assert rollout.reward[0, 3, 0] == 0.0
    assert agent.books.value.tolist() == [100.0] * 4
    assert agent.books.row.tolist() == [8] * 4
    metrics = agent.update(rollout)
    assert all(math.isfinite(v) for v in metrics.values())


def test_books_that_observe_nothing_of_themselves_train() -> None:
    agent = learner("state.include_pos=false", "state.include_cash=false")
    before = weights(agent)
    agent.train_once()
    assert not torch.equal(before, weights(agent))


def test_portfolio_inputs_are_weight_then_cash_share() -> None:
    held = Holdings(
        np.array([[0.25, 0.5]], dtype=np.float32),
        np.array([0.25], dtype=np.float32),
        np.ones((1, 2, 3), dtype=bool),
        np.ones(1),
    )
    both = portfolio_inputs(held, make_config())
    assert both.tolist() == [[[0.25, 0.25], [0.5, 0.25]]]
    only = portfolio_inputs(held, make_config("state.include_cash=false"))
    assert only.tolist() == [[[0.25], [0.5]]]
    cash = portfolio_inputs(held, make_config("state.include_pos=false"))
    assert cash.tolist() == [[[0.25], [0.25]]]
    none = portfolio_inputs(
        held, make_config("state.include_pos=false", "state.include_cash=false")
    )
    assert none.shape == (1, 2, 0)


def rows_visited(agent: A2C, updates: int) -> list[list[int]]:
    """Rows each group stood at before every update."""
    seen = []
    for _ in range(updates):
        agent._begin_episodes()
        seen.append(agent.rows.tolist())
        agent.collect()
    return seen


def test_full_runs_go_through_the_window_and_begin_anew() -> None:
    # Rows 3 to 35 of the train window: 32 steps, in rollouts of 5 and a last one of 2.
    agent = learner("train.offset_groups=1")
    assert agent.span == range(3, 36)
    assert [r[0] for r in rows_visited(agent, 9)] == [3, 8, 13, 18, 23, 28, 33, 3, 8]
    assert agent.steps == 6 * (32 + 5 + 5)


def test_groups_begin_spread_over_the_window() -> None:
    agent = learner("train.offset_groups=3")
    assert agent.rows.tolist() == [3, 13, 24]
    assert agent.books.row.tolist() == [3, 3, 13, 13, 24, 24]


def test_episodes_start_anywhere_they_fit_and_last_as_long_as_told() -> None:
    agent = learner("train.episode_steps=10")
    seen = rows_visited(agent, 80)
    starts = {row for rows in seen[::2] for row in rows}
    assert min(starts) == 3
    assert max(starts) == 25  # the last row is 35
    assert len(starts) > 15
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        assert [b - a for a, b in zip(first, second, strict=True)] == [5, 5]


def test_an_episode_as_long_as_the_window_fits_and_a_longer_one_is_refused() -> None:
    assert learner("train.episode_steps=32").rows.tolist() == [3, 3]
    with pytest.raises(DataError, match=r"episode_steps=33 does not fit.*32 steps.*Shorten"):
        learner("train.episode_steps=33")


def test_a_train_split_without_enough_bars_is_refused() -> None:
    with pytest.raises(DataError, match=r"split.train has 4 bars.*window=4.*at least 2"):
        learner(splits={"train": range(4), "valid": range(4, 9), "test": range(9, 20)})


def test_learning_rates_follow_the_schedule() -> None:
    shares = {
        s: [learning_rate_share(s, p) for p in (0, 0.25, 0.5, 1)]
        for s in ("constant", "linear", "cosine")
    }
    assert shares["constant"] == [1, 1, 1, 1]
    assert shares["linear"] == [1, 0.75, 0.5, 0]
    assert shares["cosine"] == pytest.approx([1, 0.5 + 0.25 * math.sqrt(2), 0.5, 0])
    assert learning_rate_share("linear", 1.5) == 0.0
    assert learning_rate_share("linear", -1.0) == 1.0


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_actor_and_critic_have_rates_of_their_own(schedule: str) -> None:
    agent = learner(
        *("train.lr_actor=0.003", "train.lr_critic=0.0007", f"train.lr_schedule={schedule}"),
        "train.total_env_steps=120",
    )
    for update in (1, 2):
        metrics = agent.train_once()
        share = learning_rate_share(schedule, 30 * update / 120)
        actor, critic = agent.optimizer.param_groups
        assert actor["lr"] == pytest.approx(0.003 * share)
        assert critic["lr"] == pytest.approx(0.0007 * share)
        assert metrics["charts/learning_rate"] == pytest.approx(0.003 * share)
    ids = [{id(p) for p in group["params"]} for group in agent.optimizer.param_groups]
    assert ids[0] == {id(p) for p in agent.net.actor_parameters()}
    assert ids[1] == {id(p) for p in agent.net.critic_parameters()}


def test_first_step_of_adam_moves_each_group_by_its_own_rate() -> None:
    # Adam's first step is lr · g/(|g| + ε): the rate itself for every weight with a gradient.
    agent = learner("train.lr_actor=0.003", "train.lr_critic=0.0007", "train.grad_clip=1e9")
    before = {name: p.detach().clone() for name, p in agent.net.named_parameters()}
    agent.train_once()
    for name, parameter in agent.net.named_parameters():
        moved = (parameter.detach() - before[name]).abs().max()
        rate = 0.0007 if name.startswith("critic") else 0.003
        assert float(moved) == pytest.approx(rate, rel=1e-2), name


@pytest.mark.parametrize("clip", [0.01, 0.5, 1e6])
def test_clipping_bounds_the_gradient_that_is_applied(
    clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = learner(f"train.grad_clip={clip}")
    applied: list[float] = []
    step = agent.optimizer.step

    def watched(*args: Any) -> Any:
        squares = [p.grad.square().sum() for p in agent.net.parameters() if p.grad is not None]
        applied.append(float(torch.stack(squares).sum().sqrt()))
        return step(*args)

    monkeypatch.setattr(agent.optimizer, "step", watched)
    logged = [agent.train_once()["losses/gradient_norm"] for _ in range(3)]
    for norm, used in zip(logged, applied, strict=True):
        assert used == pytest.approx(min(norm, clip), rel=1e-3)
    assert any(norm > 0.5 for norm in logged)


def test_total_loss_is_the_weighted_sum_of_its_parts() -> None:
    metrics = learner("train.value_coef=0.3", "train.entropy_coef=0.2").train_once()
    entropy = metrics["losses/entropy"] * 3  # logged per head
    whole = metrics["losses/policy"] + 0.3 * metrics["losses/value"] - 0.2 * entropy
    assert metrics["losses/total"] == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("rows", [module._PIECE_ROWS, 1])
def test_explained_variance_is_of_the_returns_and_values_of_the_whole_update(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = learner("train.gae_lambda=0.9")
    monkeypatch.setattr(module, "_PIECE_ROWS", rows)
    for _ in range(3):
        agent.train_once()
    agent._begin_episodes()
    rollout = agent.collect()
    with torch.no_grad():
        every = torch.ones(*rollout.portfolio.shape[:4], 3, dtype=torch.bool)
        market = rollout.market.map(lambda part: part[:, :, None])
        value = agent.net(market, rollout.portfolio, rollout.present, every).value
        returns = module.targets(rollout, value, agent.config.train).returns
    error = (returns - value[:, :-1]).numpy().astype(np.float64)
    wanted = 1.0 - error.var() / returns.numpy().astype(np.float64).var()
    found = agent.update(rollout)["charts/explained_variance"]
    assert found == pytest.approx(wanted, rel=1e-4)


def test_entropy_of_a_new_network_is_nearly_that_of_a_coin_with_three_sides() -> None:
    agent = learner(splits={"train": range(36), "valid": range(36, 48), "test": range(48, 60)})
    entropy = agent.train_once()["losses/entropy"]
    # At the first step nothing can be sold, later most can.
    assert math.log(2) < entropy <= math.log(3) + 1e-6


def test_updates_raise_the_probability_of_what_paid() -> None:
    """HOLD of the first asset pays, everything else costs: it is held more and more."""
    agent = learner("train.entropy_coef=0", "reward.scale=1")
    share = []
    for _ in range(40):
        agent._begin_episodes()
        rollout = agent.collect()
        held = rollout.actions[..., 0] == Action.HOLD
        share.append(float(held.float().mean()))
        agent.update(rollout._replace(reward=torch.where(held, 1.0, -1.0)))
    assert np.mean(share[:5]) < 0.6
    assert np.mean(share[-5:]) > 0.9


@pytest.mark.parametrize("part", ["weight", "reward"])
def test_divergence_is_named_and_leaves_the_weights_alone(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = learner()
    agent.train_once()
    if part == "weight":
        with torch.no_grad():
            agent.net.critic.outer.weight[0, 0] = math.nan
    else:
        step = agent.books.step
        monkeypatch.setattr(
            agent.books, "step", lambda a: step(a)._replace(reward=np.full(6, math.nan))
        )
    before, moments = weights(agent), agent.state()[0]["optimizer.state.0.exp_avg"].clone()
    wanted = "losses/value = nan" if part == "weight" else "charts/reward = nan"
    with pytest.raises(TrainingError, match=rf"diverged at step 60: .*{wanted}.*lr_actor"):
        agent.train_once()
    torch.testing.assert_close(weights(agent), before, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(agent.state()[0]["optimizer.state.0.exp_avg"], moments)


def test_draws_have_the_probabilities_of_the_softmax() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0], [0.0, 0.0, 0.0], [-3.0, 2.0, 1.5]])
    generator = torch.Generator().manual_seed(1)
    n = 60_000
    drawn = sample(logits.expand(n, 3, 3), generator)
    for head in range(3):
        counts = torch.bincount(drawn[:, head], minlength=3).numpy()
        wanted = n * torch.softmax(logits[head].double(), -1).numpy()
        assert stats.chisquare(counts, wanted).pvalue > 0.001, counts


def test_draws_of_the_heads_are_independent() -> None:
    generator = torch.Generator().manual_seed(2)
    drawn = sample(torch.zeros(30_000, 2, 3), generator)
    table = torch.bincount(drawn[:, 0] * 3 + drawn[:, 1], minlength=9).view(3, 3).numpy()
    assert stats.chi2_contingency(table).pvalue > 0.001


def test_a_masked_action_is_never_drawn() -> None:
    logits = torch.tensor([-1e9, 0.3, -1e9]).expand(200_000, 3)
    assert sample(logits, torch.Generator().manual_seed(0)).unique().tolist() == [1]


def test_the_same_generator_state_gives_the_same_draws() -> None:
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    first = sample(torch.zeros(50, 4, 3), generator)
    assert not torch.equal(first, sample(torch.zeros(50, 4, 3), generator))
    generator.set_state(state)
    assert torch.equal(first, sample(torch.zeros(50, 4, 3), generator))


STREAMS = [
    (),
    ("model.dropout=0.3",),
    ("train.episode_steps=12", "train.lr_schedule=cosine", "train.normalize_advantages=true"),
    ("model.encoder=Transformer", "model.dropout=0.2"),
    ("reward.kind=differential_sharpe", "reward.drawdown_penalty=0.5"),
]


@pytest.mark.parametrize("overrides", STREAMS)
def test_the_same_seed_gives_the_same_weights_and_another_does_not(
    overrides: tuple[str, ...],
) -> None:
    def trained(seed: int) -> Tensor:
        agent = learner(*overrides, seed=seed)
        for _ in range(4):
            agent.train_once()
        return weights(agent)

    torch.manual_seed(1)  # what a caller did with the global generator does not matter
    first = trained(11)
    torch.manual_seed(2)
    assert torch.equal(first, trained(11))
    assert not torch.equal(first, trained(12))


@pytest.mark.parametrize("overrides", STREAMS)
def test_a_restored_learner_goes_on_bit_for_bit(overrides: tuple[str, ...]) -> None:
    straight = learner(*overrides)
    for _ in range(3):
        straight.train_once()
    tensors, state = straight.state()
    tensors = {name: value.clone() for name, value in tensors.items()}
    other = learner(*overrides)
    other.train_once()
    other.restore(tensors, state)
    for _ in range(3):
        assert straight.train_once() == other.train_once()
    assert torch.equal(weights(straight), weights(other))
    assert same_state(straight, other)


def same_state(one: A2C, two: A2C) -> bool:
    """Weights, optimizer, books and random streams are equal."""
    (tensors, state), (others, other) = one.state(), two.state()
    assert tensors.keys() == others.keys()
    equal = all(
        torch.equal(torch.nan_to_num(tensors[k].double()), torch.nan_to_num(others[k].double()))
        for k in tensors
    )
    return equal and state == other


def test_a_seed_draws_weights_without_touching_the_global_generator() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    learner()
    assert torch.equal(before, torch.get_rng_state())
    agents = [learner(seed=s) for s in (1, 1, 2)]
    assert torch.equal(weights(agents[0]), weights(agents[1]))
    assert not torch.equal(weights(agents[0]), weights(agents[2]))


def test_rewards_are_scaled_by_the_configuration() -> None:
    plain = learner("reward.scale=1").collect()
    scaled = learner("reward.scale=50").collect()
    torch.testing.assert_close(plain.reward * 50.0, scaled.reward)
    assert plain.reward.abs().max() > 0


def test_worlds_with_absent_assets_never_act_on_them() -> None:
    present = np.ones((60, 3), dtype=bool)
    present[:30, 1] = False
    world: World = make_world(present=present)
    agent = A2C(small_config("train.offset_groups=1"), world, 0)
    rollout = agent.collect()
    assert (rollout.actions[..., 1] == Action.HOLD).all()
    assert (rollout.actions[..., 0] != Action.HOLD).any()
