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

from echelon.agents.apg import APG, information_ratio, utility
from echelon.backtest.policy import Policy
from echelon.backtest.run import run_backtest
from echelon.config import Config
from echelon.config.agents import RewardConfig
from echelon.envs import rewards
from echelon.envs.act import ActionRule, Holdings
from echelon.envs.books import Books, equal_weight_returns
from echelon.envs.world import World
from echelon.errors import ConfigError, DataError, TrainingError
from echelon.models.encoders import Encoder, build_encoder
from echelon.models.expert import memberships
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


def test_rules_that_jump_with_an_order_are_named_and_left_out() -> None:
    learner = make_learner(steady_world(min_commission=1.0, min_value=1e9))
    assert learner.facts().dropped == ("market.min_commission", "market.min_order_value")
    assert "market.min_order_value; validated" in learner.facts().lines()[0]
    assert learner.train_once()["charts/exposure"] > 0.0


def test_horizon_longer_than_the_train_window_is_refused() -> None:
    with pytest.raises(DataError, match=r"expert\.horizon=75 does not fit.*74 steps"):
        make_learner(gappy_world(), "expert.horizon=75")
    assert trained(make_learner(gappy_world(), "expert.horizon=74"), 1).steps == 4 * 74


WIDE = (
    *("window=1", "train.algo=APG", "expert.actor=top_k", "expert.hidden=8", "reward.kind=active"),
    *("reward.scale=1", "reward.variance_penalty=0", "train.books=8", "expert.horizon=20"),
    *("expert.warmup_updates=0", "train.lr_actor=0.02", "pretrain.cross_fit=2"),
)
QUICK = ("train.books=16", "train.lr_actor=0.01")
N_WIDE, WIDE_ROWS, LEARNED_ROWS = 60, 600, 400


class ScoresThemselves(Encoder):
    """Embeds a bar as its features: what an encoder that forecasts would give."""

    def __init__(self, config: Config, n_features: int) -> None:
        super().__init__(config, n_features)
        self.d_model = n_features

    def _encode(self, x: Tensor) -> Tensor:
        return x[..., self.window - 1 :, :, :]


def planted_wide(seed: int = 3, leak: float = 0.0, cost: float = 0.001) -> World:
    """Scores of which a slow part foresees returns and a fast one does not.

    leak: how much of the next day's own noise the scores of the train window know, as those of
    a forecaster do that was fitted on it
    """
    rng = np.random.default_rng(seed)
    shape = (WIDE_ROWS, N_WIDE)
    noise = rng.standard_normal(shape)
    slow = np.zeros(shape)
    slow[0] = rng.standard_normal(N_WIDE)
    for t in range(1, WIDE_ROWS):
        slow[t] = 0.95 * slow[t - 1] + np.sqrt(1.0 - 0.95**2) * rng.standard_normal(N_WIDE)
    steps = 0.01 * rng.standard_normal((WIDE_ROWS, 1)) + 0.02 * noise
    # A score of the close of t foresees what comes after the fill at the open of t + 1.
    steps[2:] += 0.0015 * slow[:-2]
    score = slow + rng.standard_normal(shape)
    score[: LEARNED_ROWS - 2] += leak * noise[2:LEARNED_ROWS]
    score = (score - score.mean(1, keepdims=True)) / score.std(1, keepdims=True)
    close = 20.0 * np.exp(np.cumsum(steps, axis=0))
    opens = np.concatenate([close[:1], close[:-1]])
    splits = {"train": range(LEARNED_ROWS), "valid": range(LEARNED_ROWS, WIDE_ROWS)}
    x = score[..., None].astype(np.float32)
    return make_world(
        close=close, open=opens, x=x, window=1, splits=splits, commission=cost, initial_cash=1e7
    )


def make_wide(world: World, *overrides: str, seed: int = 7) -> APG:
    config = make_config(*WIDE, *overrides)
    return APG(config, world, seed, ScoresThemselves(config, world.x.shape[2]))


def active_measures(policy: Policy, world: World, split: str = "valid") -> tuple[float, float]:
    """(information ratio, turnover) of a year over the mean asset."""
    span = world.span(split)
    run = run_backtest(policy, world, span, make_config(*WIDE))
    mean = equal_weight_returns(world, span)[span.start : span.stop - 1]
    active = run.returns - mean
    return float(active.mean() / active.std() * np.sqrt(252)), float(run.traded[10:].mean() * 252)


class TopKRule:
    """The plain rule in staggered tranches: each holds the K best, and keeps down to K · buffer."""

    name, kind = "rule", "weights"

    def __init__(self, k: int = 6, buffer: float = 3.0, tranches: int = 5) -> None:
        self.k, self.keep, self.tranches = k, k * buffer, tranches

    def start(self, world: World, span: range) -> None:
        self.world, self.held = world, [set[int]() for _ in range(self.tranches)]

    def decide(self, row: np.ndarray, held: Holdings) -> np.ndarray:
        best = np.argsort(-self.world.x[row[0], :, 0])
        which = int(row[0]) % self.tranches
        kept = {int(n) for n in best[: int(self.keep)] if int(n) in self.held[which]}
        new = [int(n) for n in best if int(n) not in kept][: self.k - len(kept)]
        self.held[which] = kept | set(new)
        target = np.zeros((1, self.world.n_assets))
        for names in self.held:
            target[0, list(names)] += 1.0 / self.k / self.tranches
        return target


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_untrained_it_trades_as_the_top_k_rule(seed: int) -> None:
    world = planted_wide(seed)
    span, config = world.span("valid"), make_config(*WIDE)
    mean = equal_weight_returns(world, span)[span.start : span.stop - 1]
    own, rule = (
        run_backtest(policy, world, span, config)
        for policy in (make_wide(world).policy(), TopKRule())
    )
    active, rule_active = own.returns - mean, rule.returns - mean
    assert np.corrcoef(active, rule_active)[0, 1] > 0.75
    assert active.std() == pytest.approx(rule_active.std(), rel=0.15)
    assert active.mean() / active.std() > rule_active.mean() / rule_active.std() - 0.02
    assert own.traded[10:].mean() == pytest.approx(rule.traded[10:].mean(), rel=0.3)


def test_its_target_is_the_top_k_and_holdings_leave_in_few_bars() -> None:
    world = planted_wide()
    learner = make_wide(world)
    policy, span = learner.policy(), world.span("valid")
    run = run_backtest(policy, world, span, learner.config)
    held = (run.weights > 1e-6).sum(axis=1)[20:]
    # Six members, some more at the edge, and what is being sold.
    assert 6 <= held.min() <= held.max() <= 36
    assert run.cash_share[20:].max() < 0.15
    assert run.weights.max() < 1.5 / 6


def test_it_learns_to_trade_less_of_what_it_cannot_keep_and_earns_more() -> None:
    world = planted_wide(cost=0.002)
    learner = make_wide(world, *QUICK)
    ratio, turnover = active_measures(learner.policy(), world)
    learned_ratio, learned_turnover = active_measures(trained(learner, 40).policy(), world)
    assert learned_turnover < 0.7 * turnover
    assert learned_ratio > ratio + 0.5


def test_policy_of_in_sample_scores_trades_too_much_and_earns_less() -> None:
    """What a forecaster says of the rows it was fitted on looks better than it is anywhere else."""
    honest, leaky = planted_wide(cost=0.002), planted_wide(leak=0.3, cost=0.002)
    after = slice(LEARNED_ROWS, WIDE_ROWS)
    assert np.array_equal(honest.x[after], leaky.x[after])
    (ratio, turnover), (leaky_ratio, leaky_turnover) = (
        active_measures(trained(make_wide(world, *QUICK), 40).policy(), honest)
        for world in (honest, leaky)
    )
    assert leaky_turnover > 1.5 * turnover
    assert leaky_ratio < ratio - 1.0


def test_wide_books_go_on_where_they_stood_and_resume_bit_exactly() -> None:
    world = planted_wide()
    whole = trained(make_wide(world), 5)
    half = trained(make_wide(world), 2)
    ends = half._standing
    assert ends is not None
    begun = half._begin()
    stays = half.starts.fits(ends.row.numpy())
    assert stays.any()
    assert torch.equal(begun.row[stays], ends.row[stays])
    assert torch.equal(begun.weights[stays], ends.weights[stays])
    torch.testing.assert_close(begun.weights.sum(-1) + begun.cash, torch.ones(8))
    half = trained(make_wide(world), 2)
    resumed = make_wide(world)
    resumed.restore(*everything(half))
    assert same(trained(resumed, 3), whole)


def test_wide_books_make_the_returns_that_the_policy_makes_in_the_real_ones() -> None:
    world = planted_wide()
    world = replace(
        world,
        present=np.random.default_rng(1).random(world.present.shape) < 0.9,
        rows=world.rows._replace(
            tradable=np.random.default_rng(2).random(world.present.shape) < 0.9
        ),
    )
    learner = trained(make_wide(world), 2)
    rows = torch.tensor([10, 100, 200])
    paths = learner.trade(rows, torch.zeros(3, N_WIDE), torch.ones(3))
    books = Books(world, ActionRule("weights"), RewardConfig(), 3, world.span("train"))
    books.reset(rows.numpy())
    policy = learner.policy()
    policy.start(world, world.span("train"))
    for k in range(20):
        before = books.value.copy()
        result = books.step(policy.decide(books.row, books.holdings()))
        assert paths.gain[k].tolist() == pytest.approx(result.value / before - 1.0, abs=1e-5)


def test_actor_of_wide_universes_is_refused_to_learners_without_gradients() -> None:
    with pytest.raises(ConfigError, match=r"expert\.actor 'top_k'.*train\.algo is 'SAC'"):
        make_config("train.algo=SAC", "expert.actor=top_k", "pretrain.cross_fit=2")
    with pytest.raises(ConfigError, match=r"expert\.actor 'top_k'.*pretrain\.cross_fit of 2"):
        make_config("train.algo=APG", "expert.actor=top_k")
    with pytest.raises(ConfigError, match=r"buffer \(5\) times top_share \(0\.3\)"):
        make_config("expert.top_share=0.3", "expert.buffer=5")


@pytest.mark.parametrize(("least", "most"), [(0.0, 1.0), (0.1, 0.7)])
def test_memberships_add_up_and_their_gradients_are_those_of_differences(
    least: float, most: float
) -> None:
    torch.manual_seed(2)
    rating = torch.randn(2, 7, dtype=torch.float64, requires_grad=True)
    width = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    places = torch.full((2, 1), 2.3, dtype=torch.float64, requires_grad=True)
    free = torch.tensor([[True] * 7, [True, False] + [True] * 5])
    bounds = (torch.full((2, 7), least).double(), torch.full((2, 7), most).double())

    def members(rating: Tensor, places: Tensor, width: Tensor) -> Tensor:
        return memberships(rating, places, width, free, *bounds)

    part = members(rating, places, width)
    assert part.sum(-1).tolist() == pytest.approx([2.3, 2.3])
    assert part[1, 1] == 0.0
    assert least <= part[free].min() <= part.max() <= most
    order = rating[0].argsort()
    assert (part[0][order].diff() >= 0.0).all()
    assert torch.autograd.gradcheck(members, (rating, places, width))
    none = memberships(rating, places, width, torch.zeros_like(free))
    assert none.abs().max() == 0.0


def test_information_ratio_is_mean_over_deviation_and_its_risk_is_in_it() -> None:
    active = torch.tensor([[0.01, 0.03], [0.02, -0.02]])
    assert float(information_ratio(active)) == pytest.approx(0.01 / active.std().item())
    assert float(information_ratio(torch.zeros(2, 2))) == 0.0
    with pytest.raises(ConfigError, match=r"reward\.variance_penalty=1 \(take 0\)"):
        make_wide(planted_wide(), "reward.variance_penalty=1")
