"""The loss of A2C: by hand, worked out book by book, and against Stable-Baselines3's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import A2C as PeerA2C
from stable_baselines3.common.logger import Logger
from torch import Tensor
from torch.distributions import Categorical
from worlds import make_config

from echelon.agents import a2c as module
from echelon.agents.a2c import Losses, Rollout, a2c_losses, losses_by_piece
from echelon.config.agents import TrainConfig
from echelon.models.actor_critic import ActorCritic, MarketTensors


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Case(NamedTuple):
    """A network with a strong opinion and a rollout with masks, an absent asset and a ruin."""

    net: ActorCritic
    rollout: Rollout


GAMMA = 0.9


def made_up(*overrides: str, seed: int = 0) -> Case:
    """G = 2 groups, L = 4 steps, B = 3 books, N = 5 assets."""
    groups, length, books, assets = 2, 4, 3, 5
    config = make_config(
        "window=4", "model.d_model=8", "model.n_layers=1", "model.hidden=8", *overrides
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = ActorCritic(config, 2)
        with torch.no_grad():  # far from the uniform policy that a new network has
            net.actor.outer.weight.mul_(200.0)
        x = torch.randn(groups, length + 4, assets, 2)
        present = torch.rand(groups, length + 1, 1, assets) > 0.2
        allowed = torch.rand(groups, length, books, assets, 3) > 0.3
        allowed[..., 0] = True
        effective = allowed.clone()
        effective[..., 1:] &= present[:, :length, ..., None]
        actions = torch.distributions.Categorical(effective.float()).sample()
        discount = torch.full((groups, length, books), GAMMA)
        discount[0, 1, 2] = 0.0
        discount[1, 3, 0] = 0.0
        rollout = Rollout(
            market=net.encode(x),
            portfolio=torch.rand(groups, length + 1, books, assets, net.n_portfolio),
            present=present,
            allowed=allowed,
            actions=actions,
            reward=torch.randn(groups, length, books),
            discount=discount,
        )
    return Case(net, rollout)


def slow_losses(
    net: ActorCritic, rollout: Rollout, *, normalize: bool, peers: bool = False
) -> Losses:
    """The loss of design note 003, one book and one step at a time."""
    groups, length, books = rollout.reward.shape
    everything = torch.ones(rollout.allowed.shape[3:], dtype=torch.bool)
    log_pi, entropy, value, target = [], [], [], []
    for g in range(groups):
        for b in range(books):
            ahead: list[float] = []
            for k in range(length + 1):
                output = net(
                    rollout.market.map(lambda part: part[g, k]),  # noqa: B023 (called at once)
                    rollout.portfolio[g, k, b][None],
                    rollout.present[g, k, 0],
                    rollout.allowed[g, k, b][None] if k < length else everything[None],
                )
                ahead.append(float(output.value.detach()))
                if k < length:
                    heads = [Categorical(logits=head) for head in output.logits[0]]
                    chosen = rollout.actions[g, k, b]
                    parts = [head.log_prob(a) for head, a in zip(heads, chosen, strict=True)]
                    log_pi.append(torch.stack(parts).sum())
                    entropy.append(torch.stack([head.entropy() for head in heads]).sum())
                    value.append(output.value[0])
            returns, following = [], ahead[length]
            for k in reversed(range(length)):
                alive = float(rollout.discount[g, k, b]) > 0.0
                following = float(rollout.reward[g, k, b]) + (GAMMA * following if alive else 0.0)
                returns.append(following)
            target += reversed(returns)
    aim, guess = torch.tensor(target), torch.stack(value)
    advantage = aim - guess.detach()
    if peers:
        own = advantage.view(groups, books, length)
        others = [
            torch.stack([own[:, other] for other in range(books) if other != b]).mean(0)
            for b in range(books)
        ]
        advantage = (own - torch.stack(others, dim=1)).flatten()
    if normalize:
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    return Losses(
        policy=-(torch.stack(log_pi) * advantage).mean(),
        value=((guess - aim) ** 2).mean(),
        entropy=torch.stack(entropy).mean(),
    )


def settings(normalize: bool = False, peers: bool = False, trace: float = 1.0) -> TrainConfig:
    return TrainConfig.model_construct(
        normalize_advantages=normalize, peer_baseline=peers, gae_lambda=trace
    )


@pytest.mark.parametrize("peers", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    "overrides", [(), ("model.shared_encoder=false",), ("state.include_cash=false",)]
)
def test_losses_equal_those_worked_out_book_by_book(
    overrides: tuple[str, ...], normalize: bool, peers: bool
) -> None:
    case = made_up(*overrides)
    fast = a2c_losses(case.net, case.rollout, settings(normalize, peers)).losses
    slow = slow_losses(case.net, case.rollout, normalize=normalize, peers=peers)
    for name in Losses._fields:
        found, wanted = getattr(fast, name), getattr(slow, name)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_what_happens_to_all_books_of_a_group_moves_no_policy_that_looks_at_peers() -> None:
    net, rollout = made_up()
    alive = rollout._replace(discount=torch.full_like(rollout.discount, GAMMA))
    shock = torch.randn(2, 4, 1)
    shaken = alive._replace(reward=alive.reward + shock)
    calm, storm = (a2c_losses(net, r, settings(peers=True)).losses for r in (alive, shaken))
    torch.testing.assert_close(calm.policy, storm.policy, rtol=1e-4, atol=1e-5)
    alone = [a2c_losses(net, r, settings()).losses.policy for r in (alive, shaken)]
    assert not torch.allclose(*alone, atol=1e-3)


def test_gradients_equal_those_of_the_loss_worked_out_book_by_book() -> None:
    case = made_up()
    parameters = list(case.net.parameters())
    found = [
        torch.autograd.grad(sum(losses), parameters, retain_graph=True)
        for losses in (
            a2c_losses(case.net, case.rollout, settings(normalize=True)).losses,
            slow_losses(case.net, case.rollout, normalize=True),
        )
    ]
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("overrides", [(), ("model.shared_encoder=false",)])
@pytest.mark.parametrize("bars", [1, 2, 3])
def test_pieces_add_up_to_the_loss_and_to_its_gradients(
    bars: int, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, rollout = made_up(*overrides)
    train = settings(normalize=True, trace=0.7, peers=True)
    whole, *once = a2c_losses(net, rollout, train)
    monkeypatch.setattr(module, "_PIECE_ROWS", bars * 2 * 3 * 5)
    found = list(losses_by_piece(net, rollout, train))
    pieces = [piece.losses for piece in found]
    assert len(pieces) == math.ceil(4 / bars)
    for part, wanted in zip(zip(*(p[1:] for p in found), strict=True), once, strict=True):
        torch.testing.assert_close(torch.cat(part, dim=1), wanted, rtol=1e-5, atol=1e-6)
    added = Losses(*(torch.stack(parts).sum() for parts in zip(*pieces, strict=True)))
    parameters = list(net.parameters())
    for one, two in zip(whole, added, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    grads = [torch.autograd.grad(sum(x), parameters, retain_graph=True) for x in (whole, added)]
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_policy_loss_teaches_the_value_nothing_and_the_target_is_no_variable() -> None:
    net, rollout = made_up("model.shared_encoder=false")
    losses = a2c_losses(net, rollout, settings()).losses
    policy = torch.autograd.grad(
        losses.policy, net.critic_parameters(), retain_graph=True, allow_unused=True
    )
    assert all(g is None or not g.any() for g in policy)
    value = torch.autograd.grad(losses.value, net.actor_parameters(), allow_unused=True)
    assert all(g is None or not g.any() for g in value)


class _Answers:
    """A network's face whose answers are given: logits[G,L+1,B,N,3], value[G,L+1,B]."""

    def __init__(self, logits: Tensor, value: Tensor) -> None:
        self.logits, self.value = logits, value

    def __call__(
        self, market: MarketTensors, portfolio: Tensor, present: Tensor, mask: Tensor
    ) -> Any:
        return SimpleNamespace(logits=self.logits, value=self.value)


def given(logits: Tensor, value: Tensor, **parts: Tensor) -> tuple[Any, Rollout]:
    groups, length, books, assets, _ = logits[:, :-1].shape
    usual = {
        "portfolio": torch.zeros(groups, length + 1, books, assets, 2),
        "present": torch.ones(groups, length + 1, 1, assets, dtype=torch.bool),
        "allowed": torch.ones(groups, length, books, assets, 3, dtype=torch.bool),
        "discount": torch.full((groups, length, books), 0.5),
    }
    market = MarketTensors(torch.zeros(groups, length + 1, assets, 1), None)
    return _Answers(logits, value), Rollout(market=market, **(usual | parts))


def test_losses_by_hand_of_one_book_and_two_heads() -> None:
    # Both heads: probabilities ½, ¼, ¼. V = 1, 2, 4; rewards 3, 1; γ = ½.
    # G_1 = 1 + ½·4 = 3, G_0 = 3 + ½·3 = 4.5; advantages 3.5, 1.
    logits = torch.tensor([0.5, 0.25, 0.25]).log().expand(1, 3, 1, 2, 3)
    net, rollout = given(
        logits,
        torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1),
        actions=torch.tensor([[0, 1], [2, 2]]).view(1, 2, 1, 2),
        reward=torch.tensor([3.0, 1.0]).view(1, 2, 1),
    )
    losses = a2c_losses(net, rollout, settings()).losses
    log_2 = math.log(2.0)
    # log π: −log 2 − log 4 = −3 log 2, and −4 log 2.
    assert float(losses.policy) == pytest.approx((3 * 3.5 + 4 * 1.0) * log_2 / 2)
    assert float(losses.value) == pytest.approx((3.5**2 + 1.0) / 2)
    # A head's entropy is 1.5 log 2; two heads add up.
    assert float(losses.entropy) == pytest.approx(3 * log_2)


def test_value_after_the_rollout_counts_unless_the_book_was_ruined() -> None:
    logits = torch.zeros(1, 2, 2, 1, 3)
    net, rollout = given(
        logits,
        torch.tensor([[0.0, 0.0], [10.0, 10.0]]).view(1, 2, 2),
        actions=torch.zeros(1, 1, 2, 1, dtype=torch.long),
        reward=torch.ones(1, 1, 2),
        discount=torch.tensor([0.5, 0.0]).view(1, 1, 2),
    )
    # Returns 1 + ½·10 = 6 and 1; values 0.
    assert float(a2c_losses(net, rollout, settings()).losses.value) == pytest.approx((36 + 1) / 2)


@pytest.mark.parametrize("trace", [1.0, 0.8, 0.0])
def test_losses_equal_those_of_stable_baselines3(trace: float) -> None:
    """SB3's own `train` on the same logits, values, actions and returns, two heads."""
    rng = np.random.default_rng(3)
    n_steps, heads = 6, 2
    logits = torch.from_numpy(rng.normal(size=(n_steps + 1, heads, 3))).float()
    value = torch.from_numpy(rng.normal(size=n_steps + 1)).float()
    actions = torch.from_numpy(rng.integers(0, 3, (n_steps, heads)))
    reward = torch.from_numpy(rng.normal(size=n_steps)).float()
    net, rollout = given(
        logits.view(1, n_steps + 1, 1, heads, 3),
        value.view(1, n_steps + 1, 1),
        actions=actions.view(1, n_steps, 1, heads),
        reward=reward.view(1, n_steps, 1),
        discount=torch.full((1, n_steps, 1), 0.96),
    )
    ours = a2c_losses(net, rollout, settings(trace=trace)).losses
    peers = {"gamma": 0.96, "gae_lambda": trace}
    theirs = _peer_losses(logits, value, actions, reward, peers)
    assert float(ours.policy) == pytest.approx(theirs["train/policy_loss"], abs=1e-6)
    assert float(ours.value) == pytest.approx(theirs["train/value_loss"], abs=1e-6)
    assert -float(ours.entropy) == pytest.approx(theirs["train/entropy_loss"], abs=1e-6)


class _Rows(gym.Env):  # type: ignore[misc]
    """Observes the number of its row; stands in for a market whose numbers are given."""

    observation_space = gym.spaces.Box(0.0, 100.0, (1,))
    action_space = gym.spaces.MultiDiscrete([3, 3])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, dtype=np.float32), {}


def _peer_losses(
    logits: Tensor, value: Tensor, actions: Tensor, reward: Tensor, settings: dict[str, Any]
) -> dict[str, float]:
    """What SB3's A2C logs after one `train`, its network's answers replaced by the numbers."""
    n_steps = len(actions)
    plain = {"normalize_advantage": False, "use_rms_prop": False, "device": "cpu"}
    peer = PeerA2C("MlpPolicy", _Rows(), n_steps=n_steps, **plain, **settings)
    peer.set_logger(Logger(None, []))
    for k in range(n_steps):
        row, first = np.full((1, 1), float(k)), np.array([k == 0])
        taken, paid = actions[k].numpy()[None], reward[k].numpy()[None]
        peer.rollout_buffer.add(row, taken, paid, first, value[k : k + 1], torch.zeros(1))
    ended = np.array([False])
    peer.rollout_buffer.compute_returns_and_advantage(value[n_steps:], ended)

    def evaluate_actions(rows: Tensor, taken: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        at = rows[:, 0].long()  # the buffer shuffles
        told = peer.policy.action_dist.proba_distribution(logits[at].flatten(1))
        tied = sum(p.sum() for p in peer.policy.parameters()) * 0.0
        return value[at][:, None] + tied, told.log_prob(taken) + tied, told.entropy()

    peer.policy.evaluate_actions = evaluate_actions
    peer.train()
    return {name: float(number) for name, number in peer.logger.name_to_value.items()}
