"""SAC on sequences of other policies: Retrace's targets by hand, and who is believed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bench._control import GaussianMLP, TwinMLP, core_settings
from echelon.agents.offpolicy import ReplayBatch, SequenceBatch
from echelon.agents.sac import SAC
from echelon.config.hierarchy import SharingConfig
from echelon.ops.squashed import gaussian_log_prob

N_OBS, N_ACTIONS, HIDDEN = 5, 3, (16, 16)
STEPS, SEQUENCES, GAMMA = 4, 6, 0.9
PLAIN = core_settings(lr_actor=1e-3, lr_critic=2e-3, grad_clip=math.inf, warmup_updates=0)
FULL = SharingConfig.model_construct(trace=0.9, kl_limit=math.inf)


def make_core(seed: int = 0) -> SAC:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        actor = GaussianMLP(N_OBS, N_ACTIONS, HIDDEN)
        critic = TwinMLP(N_OBS, N_ACTIONS, HIDDEN)
    return SAC(actor, critic, *PLAIN, seed)


def stretches(steps: int = STEPS, seed: int = 0, **other: Tensor) -> SequenceBatch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    n = steps * SEQUENCES
    mean, log_std, noise = normal(n, N_ACTIONS), 0.3 * normal(n, N_ACTIONS), normal(n, N_ACTIONS)
    raw = mean + log_std.exp() * noise
    ended = torch.rand(steps, SEQUENCES, generator=generator) < 0.2
    ended[:-1] = False  # a sequence stays within an episode
    made = SequenceBatch(
        obs=normal(n, N_OBS),
        action=torch.tanh(raw),
        raw=raw,
        raw_log_prob=gaussian_log_prob(noise, log_std).view(steps, SEQUENCES),
        reward=normal(steps, SEQUENCES),
        discount=torch.where(ended, 0.0, GAMMA),
        truncated=torch.zeros(steps, SEQUENCES, dtype=torch.bool),
        next_obs=normal(n, N_OBS),
        loss_weights=torch.ones(steps, SEQUENCES),
        shared=torch.arange(SEQUENCES) % 2 == 0,
        mean=mean,
        log_std=log_std,
    )
    return made._replace(**other)


def weights(core: SAC, part: str) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in core.state()[0].items() if k.split(".")[0] == part}


def moved(core: SAC, batch: SequenceBatch, sharing: SharingConfig = FULL) -> dict[str, Tensor]:
    core.update_sequences(batch, sharing)
    return weights(core, "critic") | weights(core, "actor")


def test_a_sequence_of_one_step_teaches_what_the_transition_does() -> None:
    batch = stretches(steps=1)
    single, sequence = make_core(), make_core()
    transition = ReplayBatch(
        batch.obs, batch.action, batch.reward[0], batch.discount[0], batch.next_obs
    )
    metrics = single.update(transition)
    traced = sequence.update_sequences(batch, FULL)
    for name, value in traced.metrics.items():
        assert value == pytest.approx(metrics[name], rel=1e-5), name
    for part in ("actor", "critic", "log_alpha"):
        torch.testing.assert_close(weights(single, part), weights(sequence, part))


@pytest.mark.parametrize("slow", [False, True])
def test_targets_are_retraces_of_a_loop_in_plain_numbers(
    monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    core, batch = make_core(), stretches()
    if slow:  # the target critics see the steps by other embeddings, as they see the next ones
        batch = batch._replace(slow_obs=batch.obs + 0.5)
    seen: list[Tensor] = []
    learn = core._learn_critic

    def spy(obs: object, action: Tensor, target_q: Tensor, *rest: object) -> Tensor:
        seen.append(target_q.clone())
        return learn(obs, action, target_q, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(core, "_learn_critic", spy)
    # What the update will draw, from a twin of its generator: first for now, then for ahead.
    generator = torch.Generator()
    generator.set_state(core.generator.get_state())
    with torch.no_grad():
        core._sample(batch.obs, generator)
        mean, log_std = core.actor(batch.obs)
        ahead = core._sample(batch.next_obs, generator)
        q_next = core.target_critic.net(batch.next_obs, ahead.action).min(0).values
        seen_slowly = batch.obs if batch.slow_obs is None else batch.slow_obs
        q_taken = core.target_critic.net(seen_slowly, batch.action).min(0).values
    core.update_sequences(batch, FULL)

    alpha = 1.0
    noise = (batch.raw - mean) / log_std.exp()
    density = (-0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
    wanted = torch.zeros(STEPS, SEQUENCES)
    for b in range(SEQUENCES):
        after = 0.0  # G − Q of the step after, times its trace
        for t in reversed(range(STEPS)):
            k = t * SEQUENCES + b
            value = float(q_next[k] - alpha * ahead.log_prob[k])
            target = float(batch.reward[t, b]) + float(batch.discount[t, b]) * (value + after)
            wanted[t, b] = target
            trace = 0.9 * min(1.0, math.exp(float(density[k]) - float(batch.raw_log_prob[t, b])))
            after = trace * (target - float(q_taken[k]))
    torch.testing.assert_close(seen[0].view(STEPS, SEQUENCES), wanted, rtol=1e-4, atol=1e-5)


def test_a_cut_stops_the_trace_and_still_bootstraps() -> None:
    whole, cut = stretches(), stretches()
    cut.truncated[1, :] = True
    changed = cut._replace(reward=cut.reward.clone())
    changed.reward[2:] += 5.0
    # With no weight on the later steps only their trace could carry their rewards back.
    for batch in (whole, cut, changed):
        batch.loss_weights[2:] = 0.0
    one, other = moved(make_core(), cut), moved(make_core(), changed)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(
        not torch.equal(one[name], value) for name, value in moved(make_core(), whole).items()
    )


def test_shared_steps_of_a_distant_policy_are_dropped_and_own_ones_never() -> None:
    core, batch = make_core(), stretches()
    strict = SharingConfig.model_construct(trace=0.9, kl_limit=0.0)
    traced = core.update_sequences(batch, strict)
    assert torch.equal(traced.dropped, batch.shared.expand(STEPS, SEQUENCES))
    assert (traced.trace[:, batch.shared] == 0).all()
    assert (traced.trace[:, ~batch.shared] > 0).all()
    wild = batch._replace(reward=torch.where(batch.shared, 1e3, batch.reward))
    before, after = moved(make_core(), batch, strict), moved(make_core(), wild, strict)
    critics = [name for name in before if name.startswith("critic")]
    assert critics
    assert all(torch.equal(before[name], after[name]) for name in critics)


def test_uncorrected_learning_takes_every_step_for_its_own() -> None:
    traced = make_core().update_sequences(stretches(), SharingConfig(trace=0.9, corrected=False))
    assert (traced.trace == 0.9).all()
    assert not traced.dropped.any()


def test_weights_scale_the_losses_step_by_step() -> None:
    batch = stretches()
    none = batch._replace(loss_weights=torch.zeros_like(batch.loss_weights))
    core = make_core()
    before = weights(core, "critic") | weights(core, "actor")
    after = moved(core, none)
    assert all(torch.equal(before[name], after[name]) for name in before)
    twice = moved(make_core(), batch._replace(loss_weights=2.0 * batch.loss_weights))
    once = moved(make_core(), batch)
    # Adam's first step has the size of the learning rate whatever the gradient's.
    for name, value in once.items():
        torch.testing.assert_close(twice[name], value, rtol=1e-3, atol=1e-5)
