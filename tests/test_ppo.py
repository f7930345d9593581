"""The router's PPO: up to rounding that of sb3-contrib, and from the fixed-share rule on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from commands import Always, Moving
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from worlds import make_config, make_world

from echelon.config import Config
from echelon.population.meta_env import MetaEnv
from echelon.population.ppo import (
    Gradients,
    Rollout,
    RouterNet,
    advantages,
    masked_log_probs,
)
from echelon.population.router import Router
from echelon.rng import stream

EXPERTS = 3


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_of(*more: str) -> Config:
    small = (
        *("meta_router.horizons=[2,5]", "meta_router.every_bars=2", "meta_router.n_envs=4"),
        *("meta_router.n_steps=64", "meta_router.batch_size=32", "risk.drawdown_limit=0.02"),
        *("meta_router.episode_decisions=10", "risk.drawdown_release=0.01"),
    )
    return make_config(*small, *more)


def env_of(config: Config) -> MetaEnv:
    world = make_world(n_rows=200, seed=1)
    experts = [Moving("a"), Moving("b", -1.0), Always("c", (0.2, 0.2, 0.2))]
    return MetaEnv(experts, world, [range(20, 190)], config, 5)


def sb3_model(config: Config, seed: int) -> MaskablePPO:
    """Ours as sb3-contrib would have it."""
    meta = config.meta_router
    model = MaskablePPO(
        "MlpPolicy",
        None,  # type: ignore[arg-type]
        learning_rate=meta.lr,
        n_steps=meta.n_steps // meta.n_envs,
        batch_size=meta.batch_size,
        gamma=meta.gamma,
        gae_lambda=meta.gae_lambda,
        ent_coef=meta.ent_coef,
        policy_kwargs={"net_arch": [64, 64], "optimizer_kwargs": {"eps": 1e-5, "fused": True}},
        device="cpu",
        _init_setup_model=False,
    )
    net = Router(config, EXPERTS, seed).net
    model.observation_space = spaces.Box(-5.0, 5.0, (net.n_obs,), np.float32)
    model.action_space = spaces.Discrete(EXPERTS + 1)
    model.n_envs = meta.n_envs
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(stream(seed, "router", "weights").integers(2**62)))
        model._setup_model()
    model.set_logger(Logger(folder=None, output_formats=[]))
    return model


def test_router_learns_as_maskable_ppo_does_up_to_rounding() -> None:
    config = config_of()
    ours, theirs = Router(config, EXPERTS, 7), sb3_model(config, 7)
    for name, part in theirs.policy.state_dict().items():
        assert torch.equal(ours.net.state_dict()[name], part), name
    metrics = ours.learn(env_of(config), 192, 0)

    env, twin = env_of(config), Router(config, EXPERTS, 7)
    env.incentive = twin.incentive

    class Adapt(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            twin.incentive.adapt()

    lots = stream(7, "router", 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(lots.integers(2**62)))
        np.random.seed(int(lots.integers(2**32)))  # noqa: NPY002 (SB3 draws from it)
        theirs.set_env(env)
        theirs.learn(192, callback=Adapt(), log_interval=None)  # type: ignore[arg-type]
    for name, part in theirs.policy.state_dict().items():
        torch.testing.assert_close(ours.net.state_dict()[name], part, rtol=1e-4, atol=1e-5)
    logged = theirs.logger.name_to_value
    assert metrics["router/entropy"] == pytest.approx(-logged["train/entropy_loss"], rel=1e-4)
    fit = logged["train/explained_variance"]
    assert metrics["router/explained_variance"] == pytest.approx(fit, rel=1e-3)
    assert ours.incentive.state() == twin.incentive.state()
    assert ours.ppo.updates == theirs._n_updates
    assert not env_of(config).survey.view.allowed.all(), "nobody was masked: nothing was shown"


class Losses(NamedTuple):
    """What an update goes down; entropy: of the policy, kl: from the prior (0 without one)."""

    total: torch.Tensor
    policy: torch.Tensor
    value: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor


def ppo_loss(net: RouterNet, batch: Rollout, meta: Any) -> Losses:
    """The slow twin of `Gradients`, as MaskablePPO has it: autograd finds the gradients."""
    log_probs = masked_log_probs(net.logits(batch.obs), batch.allowed)
    log_prob = log_probs.gather(-1, batch.actions[:, None]).squeeze(-1)
    advantage = batch.advantage
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = torch.exp(log_prob - batch.log_prob)
    clipped = torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
    policy = -torch.min(advantage * ratio, advantage * clipped).mean()
    value = torch.nn.functional.mse_loss(batch.returns, net.values(batch.obs))
    probs = torch.softmax(log_probs, dim=-1)
    zero = torch.zeros((), dtype=probs.dtype)
    entropy = -torch.where(batch.allowed, log_probs * probs, zero).sum(-1).mean()
    total = policy - meta.ent_coef * entropy + 0.5 * value
    kl = zero
    if net.has_prior:
        prior = masked_log_probs(net.prior(batch.obs), batch.allowed)
        kl = torch.where(batch.allowed, probs * (log_probs - prior), zero).sum(-1).mean()
        total = total + meta.prior_kl * kl
    return Losses(total, policy, value, entropy, kl)


def random_batch(net: RouterNet, n: int = 32) -> Rollout:
    rng = np.random.default_rng(3)
    obs = rng.normal(size=(n, net.n_obs)).astype(np.float32)
    if net.has_prior:
        trust = rng.dirichlet(np.ones(net.n_experts), n)
        obs[:, -net.n_experts :] = np.log(trust)
    allowed = rng.random((n, net.n_experts + 1)) < 0.7
    allowed[:, -1] = True
    actions = np.array([rng.choice(np.flatnonzero(row)) for row in allowed])
    parts = (
        obs,
        allowed,
        actions,
        rng.normal(-1.5, 0.3, n),
        rng.normal(size=n),
        rng.normal(size=n),
    )
    made = [torch.from_numpy(np.asarray(part)) for part in parts]
    return Rollout._make(part.float() if part.dtype == torch.float64 else part for part in made)


@pytest.mark.parametrize("prior", [False, True])
def test_gradients_are_those_that_autograd_finds(prior: bool) -> None:
    config = config_of("meta_router.prior_kl=0.3", "meta_router.ent_coef=0.2")
    torch.manual_seed(2)
    net = RouterNet(12, EXPERTS, prior=prior)
    torch.nn.init.normal_(net.action_net.weight, std=0.3)
    (batch,) = random_batch(net).minibatches(torch.randperm(32), 32)
    gradients = Gradients(net, config.meta_router)
    written = gradients.fill(batch)
    got = [part.grad.clone() for part in net.parameters() if part.grad is not None]
    norm = float(torch.sqrt(sum((part.square().sum() for part in got), torch.zeros(()))))
    gradients.clip()
    shorter = [part.grad.clone() for part in net.parameters() if part.grad is not None]
    net.zero_grad(set_to_none=True)
    twin = ppo_loss(net, batch, config.meta_router)
    twin.total.backward()  # type: ignore[no-untyped-call]
    for ours, short, part in zip(got, shorter, net.parameters(), strict=True):
        assert part.grad is not None
        torch.testing.assert_close(ours, part.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(short, part.grad * min(0.5 / norm, 1.0), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(written.entropy, twin.entropy.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(written.kl, twin.kl.detach(), rtol=1e-5, atol=1e-6)
    clipped = (
        torch.exp(
            masked_log_probs(net.logits(batch.obs), batch.allowed).gather(
                1, batch.actions[:, None]
            )[:, 0]
            - batch.log_prob
        )
        - 1.0
    ).abs() > 0.2
    assert clipped.any()
    assert not clipped.all(), "what is not clipped is not shown"


def test_losses_and_gradients_are_those_of_the_formulas_by_hand() -> None:
    config = config_of("meta_router.prior=fixed_share", "meta_router.prior_kl=0.3")
    torch.manual_seed(2)
    net = RouterNet(12, EXPERTS, prior=True)
    torch.nn.init.normal_(net.action_net.weight, std=0.3)
    batch = random_batch(net)
    losses = ppo_loss(net, batch, config.meta_router)
    logits, values = net.logits(batch.obs).detach().numpy(), net.values(batch.obs).detach().numpy()
    prior = net.prior(batch.obs).numpy()
    policy, value, entropy, kl = [], [], [], []
    spread = batch.advantage.numpy()
    normed = (spread - spread.mean()) / (spread.std(ddof=1) + 1e-8)
    for b in range(32):
        may = batch.allowed[b].numpy()
        p = np.where(may, np.exp(logits[b]), 0.0)
        q = np.where(may, np.exp(prior[b]), 0.0)
        p, q = p / p.sum(), q / q.sum()
        ratio = p[batch.actions[b]] / math.exp(batch.log_prob[b])
        policy.append(-min(normed[b] * ratio, normed[b] * min(max(ratio, 0.8), 1.2)))
        value.append((values[b] - float(batch.returns[b])) ** 2)
        entropy.append(-sum(x * math.log(x) for x in p[may]))
        kl.append(sum(x * math.log(x / y) for x, y in zip(p[may], q[may], strict=True)))
    means = [float(np.mean(part)) for part in (policy, value, entropy, kl)]
    got = [float(part.detach()) for part in losses[1:]]
    np.testing.assert_allclose(got, means, rtol=2e-4)
    expected = means[0] + 0.5 * means[1] - config.meta_router.ent_coef * means[2] + 0.3 * means[3]
    assert float(losses.total.detach()) == pytest.approx(expected, rel=1e-4)


def test_advantages_by_hand() -> None:
    rewards = np.array([[1.0], [2.0], [4.0]], dtype=np.float32)
    values = np.array([[0.5], [1.0], [2.0]], dtype=np.float32)
    begins = np.array([[1.0], [0.0], [1.0], [0.0]], dtype=np.float32)
    got = advantages(rewards, values, begins, np.array([8.0], np.float32), 0.5, 0.5)
    # The last step goes on: 4 + 0.5·8 − 2; the one before ended: 2 − 1.
    np.testing.assert_allclose(got[:, 0], [1.0 + 0.5 - 0.5 + 0.25 * 1.0, 1.0, 6.0])


def test_logits_begin_at_the_prior_and_cash_at_what_the_rule_leaves_a_bad_expert() -> None:
    net = RouterNet(12, EXPERTS, prior=True)
    obs = random_batch(net).obs
    trust = np.exp(obs[:, -EXPERTS:].numpy())
    expected = np.column_stack([trust, np.full(32, 0.004 / EXPERTS)])
    expected /= expected.sum(axis=1, keepdims=True)
    allowed = torch.ones(32, EXPERTS + 1, dtype=torch.bool)
    got = masked_log_probs(net.logits(obs), allowed).exp().detach().numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_penalty_holds_the_policy_near_the_prior_and_the_distance_is_reported() -> None:
    kept: dict[str, float] = {}
    for weight in ("0", "100"):
        config = config_of("meta_router.prior=fixed_share", f"meta_router.prior_kl={weight}")
        kept[weight] = Router(config, EXPERTS, 7).learn(env_of(config), 512, 0)["router/kl_prior"]
    assert 0.0 < kept["100"] < 0.2 * kept["0"]
    assert "router/kl_prior" not in Router(config_of(), EXPERTS, 7).learn(
        env_of(config_of()), 64, 0
    )


def test_divergence_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from echelon.errors import TrainingError

    config = config_of()
    router, env = Router(config, EXPERTS, 7), env_of(config)
    step: Any = env.step

    def endless(actions: np.ndarray) -> Any:
        obs, rewards, *rest = step(actions)
        return obs, np.full_like(rewards, np.nan), *rest

    monkeypatch.setattr(env, "step", endless)
    with pytest.raises(TrainingError, match=r"training has diverged. Lower meta_router.lr"):
        router.learn(env, 64, 0)
