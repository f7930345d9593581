"""SAC and TD3: against numbers by hand, against Stable-Baselines3, and what they promise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import stable_baselines3 as sb3
import torch
from densities import squashed_log_prob
from gymnasium import spaces
from stable_baselines3.common.logger import configure
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from torch import Tensor, nn
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from bench._control import CoreSettings, GaussianMLP, TwinMLP, core_settings, load_sb3
from bench.pendulum import judge, train_ours
from echelon.agents.offpolicy import Descent, OffPolicy, ReplayBatch, Target
from echelon.agents.sac import SAC
from echelon.agents.td3 import TD3
from echelon.errors import TrainingError
from echelon.ops.squashed import LOG_STD, squash_log_det
from echelon.runs.checkpoint import load_checkpoint, save_checkpoint

N_OBS, N_ACTIONS, HIDDEN, BATCH = 5, 3, (16, 16), 32
PLAIN = core_settings(lr_actor=1e-3, lr_critic=2e-3, grad_clip=math.inf, warmup_updates=0)
"""Without warm-up and clipping."""
BOTH = pytest.mark.parametrize("algo", [SAC, TD3])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_core(algo: type[OffPolicy], settings: CoreSettings = PLAIN, seed: int = 0) -> OffPolicy:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        actor = GaussianMLP(N_OBS, N_ACTIONS, HIDDEN)
        critic = TwinMLP(N_OBS, N_ACTIONS, HIDDEN)
    return algo(actor, critic, *settings, seed)


def make_batch(seed: int = 0) -> ReplayBatch:
    generator = torch.Generator().manual_seed(seed)
    ended = torch.rand(BATCH, generator=generator) < 0.2
    return ReplayBatch(
        obs=torch.randn(BATCH, N_OBS, generator=generator),
        action=2 * torch.rand(BATCH, N_ACTIONS, generator=generator) - 1,
        reward=torch.randn(BATCH, generator=generator),
        discount=torch.where(ended, 0.0, 0.9),
        next_obs=torch.randn(BATCH, N_OBS, generator=generator),
    )


def weights(core: OffPolicy) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in core.state()[0].items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """Parts (the first word of a name) of which something is different."""
    names = {n.split(".")[0] for n in before.keys() ^ after.keys()}
    same = before.keys() & after.keys()
    return names | {n.split(".")[0] for n in same if not torch.equal(before[n], after[n])}


# --- densities --------------------------------------------------------------------------------


def test_squashed_log_prob_is_that_of_torch_distributions() -> None:
    generator = torch.Generator().manual_seed(1)
    mean, log_std, noise = (
        torch.randn(200, 4, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    raw = mean + log_std.exp() * noise
    normal = Independent(Normal(mean, log_std.exp()), 1)
    wanted = TransformedDistribution(normal, TanhTransform(cache_size=1))
    action = wanted.transforms[0](raw)  # cached: its inverse is exact
    torch.testing.assert_close(squashed_log_prob(raw, mean, log_std), wanted.log_prob(action))


def test_sampled_log_probs_are_the_densities_of_the_actions() -> None:
    core = make_core(SAC)
    obs = make_batch().obs
    drawn = core.act(obs, torch.Generator().manual_seed(2), explore=True)
    with torch.no_grad():
        mean, log_std = core.actor(obs)
    normal = Normal(mean, log_std.exp())
    torch.testing.assert_close(drawn.raw_log_prob, normal.log_prob(drawn.raw).sum(-1))
    torch.testing.assert_close(drawn.log_prob, squashed_log_prob(drawn.raw, mean, log_std))
    assert torch.equal(drawn.action, torch.tanh(drawn.raw))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_squash_correction_stays_finite_where_the_tanh_is_flat(dtype: torch.dtype) -> None:
    raw = torch.tensor([[-60.0], [-20.0], [0.0], [20.0], [60.0]], dtype=dtype, requires_grad=True)
    found = squash_log_det(raw)
    found.sum().backward()
    # −2|u| + log 4 far out, 0 in the middle.
    wanted = torch.tensor([-120.0, -40.0, 0.0, -40.0, -120.0], dtype=dtype)
    wanted[[0, 1, 3, 4]] += math.log(4.0)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(raw.grad, -2.0 * torch.tanh(raw.detach()))


class FixedActor(nn.Module):
    """mean = slope · s, log_std given; which dimensions are free is the observation's part."""

    def __init__(self, slope: float, log_std: float) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(slope))
        self.log_std = nn.Parameter(torch.tensor(log_std))

    def forward(self, obs: Seen) -> tuple[Tensor, Tensor]:
        mean = self.slope * obs.s[:, None].expand(obs.free.shape)
        return mean, self.log_std.expand_as(mean)

    def free(self, obs: Seen) -> Tensor:
        return obs.free


class Seen(NamedTuple):
    s: Tensor
    free: Tensor


class LinearCritic(nn.Module):
    """q_i = state_i · s + action_i · Σ a."""

    def __init__(self, state: tuple[float, float], action: tuple[float, float]) -> None:
        super().__init__()
        self.state = nn.Parameter(torch.tensor(state))
        self.action = nn.Parameter(torch.tensor(action))

    def forward(self, obs: Seen, action: Tensor) -> Tensor:
        return torch.outer(self.state, obs.s) + torch.outer(self.action, action.sum(-1))


def test_log_std_is_kept_within_its_bounds() -> None:
    seen = Seen(torch.zeros(4000), torch.ones(4000, 1, dtype=torch.bool))
    for given, kept in ((-9.0, LOG_STD[0]), (5.0, LOG_STD[1])):
        core = SAC(FixedActor(0.0, given), LinearCritic((0.0, 0.0), (0.0, 0.0)), *PLAIN, 0)
        drawn = core.act(seen, torch.Generator().manual_seed(0), explore=True)
        assert float(drawn.raw.std()) == pytest.approx(math.exp(kept), rel=0.05)


@BOTH
def test_masked_dimensions_act_zero_and_count_in_no_probability(algo: type[OffPolicy]) -> None:
    core = algo(FixedActor(0.3, -0.5), LinearCritic((0.1, 0.2), (0.3, 0.4)), *PLAIN, 0)
    s = torch.tensor([1.0, -2.0, 0.5])
    free = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    every = torch.ones_like(free)
    some = core.act(Seen(s, free), torch.Generator().manual_seed(3), explore=True)
    full = core.act(Seen(s, every), torch.Generator().manual_seed(3), explore=True)
    assert torch.equal(some.action, full.action * free)
    assert torch.equal(some.raw, full.raw * free)
    if algo is SAC:
        mean = 0.3 * s[:, None].expand(3, 3)
        normal = Normal(mean, math.exp(-0.5))
        by_dimension = normal.log_prob(full.raw)
        torch.testing.assert_close(some.raw_log_prob, (by_dimension * free).sum(-1))
        by_dimension = by_dimension - torch.log(1 - full.action**2)
        torch.testing.assert_close(some.log_prob, (by_dimension * free).sum(-1))
        assert float(some.log_prob[1]) == 0.0
    else:
        assert not some.log_prob.any()
        assert not some.raw_log_prob.any()


def test_target_entropy_counts_free_dimensions_only() -> None:
    free = torch.tensor([[True, False], [False, False], [True, True], [True, False]])
    seen = Seen(torch.tensor([1.0, -2.0, 0.5, 0.1]), free)
    settings = core_settings(target_entropy=-0.7, warmup_updates=0, lr_actor=1e-2)
    core = SAC(FixedActor(0.3, -0.5), LinearCritic((0.1, 0.2), (0.3, 0.4)), *settings, 0)
    generator = torch.Generator()
    generator.set_state(core.generator.get_state())
    log_prob = core.act(seen, generator, explore=True).log_prob
    batch = ReplayBatch(seen, torch.zeros(4, 2), torch.zeros(4), torch.zeros(4), seen)
    core.update(batch)
    excess = float((log_prob - 0.7 * free.sum(1)).mean())
    assert core.log_alpha.grad is not None
    assert float(core.log_alpha.grad) == pytest.approx(-excess, rel=1e-5)


# --- one update by hand -----------------------------------------------------------------------


def adam_first_step(weight: float, gradient: float, lr: float) -> float:
    return weight - lr * gradient / (abs(gradient) + 1e-8)


def test_sac_update_is_the_one_worked_out_by_hand() -> None:
    slope, log_std, state, action_w = 0.4, -0.3, (0.5, -0.2), (0.7, 0.9)
    lr, alpha, tau = 1e-2, 0.2, 0.1
    settings = core_settings(
        lr_actor=lr, lr_critic=lr, grad_clip=math.inf, warmup_updates=0, entropy=alpha, tau=tau
    )
    core = SAC(FixedActor(slope, log_std), LinearCritic(state, action_w), *settings, 0)
    generator = torch.Generator()
    generator.set_state(core.generator.get_state())
    noise, noise_next = (torch.randn(2, 1, generator=generator)[:, 0].tolist() for _ in range(2))
    s, s_next, a, r, discount = [1.0, -0.5], [0.2, 0.8], [0.3, -0.6], [1.0, -2.0], [0.9, 0.0]
    every = torch.ones(2, 1, dtype=torch.bool)
    batch = ReplayBatch(
        Seen(torch.tensor(s), every),
        torch.tensor(a)[:, None],
        torch.tensor(r),
        torch.tensor(discount),
        Seen(torch.tensor(s_next), every),
    )
    metrics = core.update(batch)

    def draw(at: float, z: float) -> tuple[float, float]:
        u = slope * at + math.exp(log_std) * z
        density = -0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi)
        return math.tanh(u), density - math.log(1 - math.tanh(u) ** 2)

    target_q = []
    for k in range(2):
        drawn, log_prob = draw(s_next[k], noise_next[k])
        q = min(state[i] * s_next[k] + action_w[i] * drawn for i in range(2))
        target_q.append(r[k] + discount[k] * (q - alpha * log_prob))
    error = [[state[i] * s[k] + action_w[i] * a[k] - target_q[k] for k in range(2)] for i in (0, 1)]
    critic_loss = 0.5 * sum(sum(e * e for e in row) / 2 for row in error)
    assert metrics["losses/critic"] == pytest.approx(critic_loss, rel=1e-5)
    state_grad = [sum(e * s[k] for k, e in enumerate(row)) / 2 for row in error]
    action_grad = [sum(e * a[k] for k, e in enumerate(row)) / 2 for row in error]
    new_state = [adam_first_step(w, g, lr) for w, g in zip(state, state_grad, strict=True)]
    new_action = [adam_first_step(w, g, lr) for w, g in zip(action_w, action_grad, strict=True)]
    assert core.critic.state_dict()["state"].tolist() == pytest.approx(new_state, rel=1e-5)
    assert core.critic.state_dict()["action"].tolist() == pytest.approx(new_action, rel=1e-5)

    actor_loss = slope_grad = log_std_grad = 0.0
    for k in range(2):
        drawn, log_prob = draw(s[k], noise[k])
        values = [new_state[i] * s[k] + new_action[i] * drawn for i in range(2)]
        worse = values.index(min(values))
        actor_loss += (alpha * log_prob - values[worse]) / 2
        # d log π / du = 2 tanh(u) beside d log π / d log_std = −1; d a / du = 1 − a².
        by_u = alpha * 2 * drawn - new_action[worse] * (1 - drawn**2)
        slope_grad += by_u * s[k] / 2
        log_std_grad += (by_u * math.exp(log_std) * noise[k] - alpha) / 2
    assert metrics["losses/actor"] == pytest.approx(actor_loss, rel=1e-5)
    norm = math.hypot(slope_grad, log_std_grad)
    assert metrics["losses/actor_gradient_norm"] == pytest.approx(norm, rel=1e-5)
    moved = core.actor.state_dict()
    assert float(moved["slope"]) == pytest.approx(adam_first_step(slope, slope_grad, lr), rel=1e-5)
    wanted = adam_first_step(log_std, log_std_grad, lr)
    assert float(moved["log_std"]) == pytest.approx(wanted, rel=1e-5)
    followed = [(1 - tau) * old + tau * new for old, new in zip(state, new_state, strict=True)]
    assert core.target_critic.net.state_dict()["state"].tolist() == pytest.approx(followed)
    assert metrics["charts/temperature"] == pytest.approx(alpha)
    assert core.log_alpha.item() == pytest.approx(math.log(alpha))  # given, so it does not move


# --- Stable-Baselines3 ------------------------------------------------------------------------


class Space(gymnasium.Env[Any, Any]):
    """Spaces alone: SB3 wants an environment to be built."""

    observation_space = spaces.Box(-1.0, 1.0, (N_OBS,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (N_ACTIONS,), np.float32)


class SameBatch:
    """A replay buffer of SB3's that knows one batch."""

    def __init__(self, batch: ReplayBatch, gamma: float) -> None:
        self.batch = batch
        self.ended = 1.0 - batch.discount[:, None] / gamma

    def sample(self, batch_size: int, env: object = None) -> ReplayBufferSamples:
        part = self.batch
        return ReplayBufferSamples(
            part.obs, part.action, part.next_obs, self.ended, part.reward[:, None]
        )


def make_peer(name: str, batch: ReplayBatch) -> Any:
    lr = PLAIN.train.lr_critic
    net_arch = {"net_arch": list(HIDDEN)}
    peer = getattr(sb3, name)(
        "MlpPolicy", Space(), learning_rate=lr, gamma=0.9, policy_kwargs=net_arch, device="cpu"
    )
    peer.set_logger(configure(None, []))
    peer.replay_buffer = SameBatch(batch, 0.9)
    return peer


@BOTH
def test_updates_are_those_of_stable_baselines3(algo: type[OffPolicy]) -> None:
    batch = make_batch()
    with torch.random.fork_rng():
        torch.manual_seed(4)
        peer = make_peer(algo.__name__, batch)
        if algo is SAC:
            peer.actor.action_dist.epsilon = 0.0  # SB3 adds 1e-6 under the logarithm; we need not
        settings = core_settings(
            lr_actor=PLAIN.train.lr_critic,
            lr_critic=PLAIN.train.lr_critic,
            grad_clip=math.inf,
            warmup_updates=0,
        )
        core = make_core(algo, settings)
        load_sb3(peer.policy, core.actor, core.critic)
        core = algo(core.actor, core.critic, *settings, 0)  # its targets begin where SB3's do
        theirs = make_core(algo)
        theirs.actor.load_state_dict(core.actor.state_dict())
        torch.manual_seed(5)
        core.generator.manual_seed(5)
        for _ in range(7):
            peer.train(1, BATCH)
            metrics = core.update(batch)
            load_sb3(peer.policy, theirs.actor, theirs.critic)
            for name in ("actor", "critic"):
                ours = getattr(core, name).state_dict()
                for key, wanted in getattr(theirs, name).state_dict().items():
                    torch.testing.assert_close(ours[key], wanted, rtol=0, atol=1e-5)
            log = peer.logger.name_to_value
            assert metrics["losses/critic"] == pytest.approx(log["train/critic_loss"], rel=1e-5)
            if "train/actor_loss" in log:
                assert metrics["losses/actor"] == pytest.approx(log["train/actor_loss"], rel=1e-4)
            if algo is SAC:
                wanted = (log["train/ent_coef"], log["train/ent_coef_loss"])
                found = (metrics["charts/temperature"], metrics["losses/temperature"])
                assert found == pytest.approx(wanted, rel=1e-5, abs=1e-7)


# --- steps of descent -------------------------------------------------------------------------


def test_own_adam_step_is_torchs_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    first = [nn.Parameter(torch.randn(n, 3, generator=generator)) for n in (1, 4, 7)]
    second = [nn.Parameter(p.detach().clone()) for p in first]
    descent = Descent("net", iter(first), 1e-2, math.inf)
    optimizer = torch.optim.Adam(second, lr=1e-2, fused=True)
    for k in range(8):
        for p, q in zip(first, second, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        # A weight without a gradient is left alone, at first or later.
        if k in (0, 1, 4):
            first[k % 3].grad = second[k % 3].grad = None
        descent.step(1.0)
        optimizer.step()
    for p, q in zip(first, second, strict=True):
        assert torch.equal(p, q)


@BOTH
def test_learning_rates_rise_linearly_over_the_warmup(algo: type[OffPolicy]) -> None:
    settings = core_settings(lr_actor=1e-3, lr_critic=4e-3, warmup_updates=4, policy_delay=1)
    core = make_core(algo, settings)
    rates = []
    for _ in range(6):
        core.update(make_batch())
        rates.append([d.optimizer.param_groups[0]["lr"] for d in core._descents()[:2]])
    wanted = [[1e-3 * share, 4e-3 * share] for share in (0.25, 0.5, 0.75, 1.0, 1.0, 1.0)]
    np.testing.assert_allclose(rates, wanted)


@BOTH
def test_gradients_of_each_network_are_clipped_to_the_norm(algo: type[OffPolicy]) -> None:
    clip = 1e-3
    core = make_core(algo, core_settings(grad_clip=clip, warmup_updates=0, policy_delay=1))
    metrics = core.update(make_batch())
    for descent in core._descents()[:2]:
        # After one step Adam's first moment is a tenth of the gradient it was given.
        given = [10 * descent.optimizer.state[p]["exp_avg"] for p in descent.parameters]
        norm = math.sqrt(sum(float(g.square().sum()) for g in given))
        assert norm == pytest.approx(clip, rel=1e-3)
        assert metrics[f"losses/{descent.name}_gradient_norm"] > 10 * clip


def test_target_follows_by_tau_and_takes_buffers_whole() -> None:
    online = nn.BatchNorm1d(2)
    target = Target(online, 0.25)
    with torch.no_grad():
        online.weight.copy_(torch.tensor([5.0, -3.0]))
        online.running_mean.copy_(torch.tensor([1.0, 2.0]))
    target.follow()
    assert target.net.state_dict()["weight"].tolist() == [2.0, 0.0]
    assert target.net.state_dict()["running_mean"].tolist() == [1.0, 2.0]
    assert not any(p.requires_grad for p in target.net.parameters())


def test_td3_moves_actor_and_targets_at_every_second_update_only() -> None:
    core = make_core(TD3)
    for k in range(4):
        before = weights(core)
        core.update(make_batch())
        parts = changed(before, weights(core)) - {"optimizer", "chance"}
        delayed = {"actor", "target_actor", "target_critic"} if k % 2 else set()
        assert parts == {"critic"} | delayed


def test_td3_explores_with_noise_of_the_given_size_and_says_no_density() -> None:
    core = make_core(TD3, core_settings(exploration_noise=0.1))
    obs = torch.zeros(20_000, N_OBS)
    still = core.act(obs, torch.Generator(), explore=False)
    drawn = core.act(obs, torch.Generator().manual_seed(0), explore=True)
    assert float((drawn.action - still.action).std()) == pytest.approx(0.1, rel=0.02)
    torch.testing.assert_close(torch.tanh(drawn.raw), drawn.action)
    assert not drawn.log_prob.any()
    wild = make_core(TD3, core_settings(exploration_noise=50.0))
    drawn = wild.act(obs, torch.Generator().manual_seed(0), explore=True)
    assert torch.isfinite(drawn.raw).all()
    assert float(drawn.action.abs().max()) <= 1.0


def test_td3_smooths_the_target_with_noise_within_its_clip() -> None:
    settings = core_settings(target_noise=5.0, noise_clip=0.3)
    core = TD3(FixedActor(0.0, 0.0), LinearCritic((0.0, 0.0), (1.0, 1.0)), *settings, 0)
    seen = Seen(torch.zeros(1000), torch.ones(1000, 1, dtype=torch.bool))
    zeros = torch.zeros(1000)
    smoothed = core._target_action(ReplayBatch(seen, zeros[:, None], zeros, zeros, seen))
    assert float(smoothed.max()) == pytest.approx(0.3)
    assert float(smoothed.min()) == pytest.approx(-0.3)
    assert 0.0 < float((smoothed.abs() < 0.29).float().mean()) < 0.1


# --- where gradients go, what is refused, what is saved ---------------------------------------


class Doubled(NamedTuple):
    """An observation of two parts."""

    left: Tensor
    right: Tensor


class Joined(nn.Module):
    """A network on a joined observation."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, obs: Doubled, *action: Tensor) -> Any:
        return self.net(torch.cat([obs.left, obs.right], dim=-1), *action)

    def free(self, obs: Doubled) -> Tensor | None:
        return None


@BOTH
def test_critics_gradient_reaches_the_observation_and_the_actors_does_not(
    algo: type[OffPolicy],
) -> None:
    plain = make_core(algo)
    settings = core_settings(warmup_updates=0, policy_delay=1)
    core = algo(Joined(plain.actor), Joined(plain.critic), *settings, 0)
    batch = make_batch()
    weight = torch.eye(N_OBS).requires_grad_()
    encoded = batch.obs @ weight  # stands for an encoder with an adapter
    obs = Doubled(encoded[:, :2], encoded[:, 2:])
    ahead = Doubled(batch.next_obs[:, :2], batch.next_obs[:, 2:])
    generator = torch.Generator()
    generator.set_state(core.generator.get_state())
    before = {name: p.detach().clone() for name, p in core.critic.named_parameters()}
    core.update(batch._replace(obs=obs, next_obs=ahead))
    # The same by hand: the critic's loss alone, with the weights of before.
    twin = make_core(algo)
    twin.critic.load_state_dict({n.removeprefix("net."): v for n, v in before.items()})
    fresh = algo(twin.actor, twin.critic, *settings, 0)
    with torch.no_grad():
        if isinstance(fresh, SAC):
            fresh.act(batch.obs, fresh.generator, explore=True)
            drawn = fresh.act(batch.next_obs, fresh.generator, explore=True)
            q_next = fresh.critic(batch.next_obs, drawn.action).amin(0) - drawn.log_prob
        else:
            action = fresh._target_action(batch)
            q_next = fresh.critic(batch.next_obs, action).amin(0)
        target_q = batch.reward + batch.discount * q_next
    again = torch.eye(N_OBS).requires_grad_()
    error = (fresh.critic(batch.obs @ again, batch.action) - target_q).square().mean(1).sum()
    (error * (0.5 if algo is SAC else 1.0)).backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, again.grad, rtol=1e-4, atol=1e-6)


@BOTH
def test_loss_that_is_no_number_is_refused_before_any_weight_changes(
    algo: type[OffPolicy],
) -> None:
    core = make_core(algo)
    core.update(make_batch())
    batch = make_batch()
    batch.reward[3] = math.nan
    before = weights(core)
    with pytest.raises(TrainingError, match=r"update 2: losses/critic = nan") as caught:
        core.update(batch)
    for key in ("train.lr_actor", "train.lr_critic", "reward.scale"):
        assert key in str(caught.value)
    assert changed(before, weights(core)) == {"chance"}


def test_actor_that_is_no_number_is_refused_before_any_weight_changes() -> None:
    core = make_core(SAC)
    with torch.no_grad():
        core.actor.layers[0].weight[0, 0] = math.nan
    before = weights(core)
    with pytest.raises(TrainingError, match="losses/entropy = nan"):
        core.update(make_batch())
    after = weights(core)
    for name, value in before.items():
        if not name.startswith("chance"):
            assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(after[name])), name


@BOTH
def test_restored_learner_goes_on_bit_for_bit(algo: type[OffPolicy], tmp_path: Path) -> None:
    settings = core_settings(warmup_updates=5)
    core = make_core(algo, settings)
    for k in range(3):
        core.update(make_batch(k))
    tensors, state = core.state()
    path = save_checkpoint(tmp_path, 3, tensors, state, config_hash="none", keep=1)
    rest = [core.update(make_batch(k)) for k in range(3, 9)]
    other = make_core(algo, settings, seed=1)
    saved = load_checkpoint(path)
    other.restore(saved.tensors, saved.state)
    assert [other.update(make_batch(k)) for k in range(3, 9)] == rest
    assert not changed(weights(core), weights(other))
    assert core.state()[1] == other.state()[1]


@BOTH
def test_same_seed_gives_the_same_weights_with_or_without_metrics(algo: type[OffPolicy]) -> None:
    cores = [make_core(algo) for _ in range(2)]
    for k in range(4):
        assert cores[0].update(make_batch(k))
        assert cores[1].update(make_batch(k), want_metrics=False) == {}
    assert not changed(weights(cores[0]), weights(cores[1]))


# --- learning ---------------------------------------------------------------------------------


@BOTH
def test_one_step_task_is_solved(algo: type[OffPolicy]) -> None:
    """Paid is −(a − ½ sign(s))²: the answer is ±½ by the sign of what is seen."""
    torch.manual_seed(0)
    settings = core_settings(lr_actor=3e-3, lr_critic=3e-3, warmup_updates=10)
    core = algo(GaussianMLP(1, 1, (32,)), TwinMLP(1, 1, (32, 32)), *settings, 0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        s = 2.0 * (torch.rand(128, 1, generator=generator) < 0.5) - 1.0
        a = 2.0 * torch.rand(128, 1, generator=generator) - 1.0
        paid = -(a - 0.5 * s).square()[:, 0]
        core.update(ReplayBatch(s, a, 10.0 * paid, torch.zeros(128), s), want_metrics=False)
    answer = core.act(torch.tensor([[1.0], [-1.0]]), generator, explore=False).action
    torch.testing.assert_close(answer[:, 0], torch.tensor([0.5, -0.5]), rtol=0, atol=0.1)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # half a minute of processor time, but others may be using it
@pytest.mark.parametrize(("algo", "steps"), [("SAC", 4_500), ("TD3", 6_500)])
def test_pendulum_is_learned(algo: str, steps: int) -> None:
    """By lot it returns about −1,200; held upright from most states −120 to −200."""
    assert np.mean(judge(train_ours(algo, seed=0, steps=steps))) > -400
