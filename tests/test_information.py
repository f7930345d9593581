"""Information estimates on channels whose information is known, gates and reward scales."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from echelon.errors import TrainingError
from echelon.ops.diversity import RunningStd
from echelon.ops.information import (
    SkillCritic,
    SkillDiscriminator,
    mutual_information,
    normalise_information,
    pointwise_information,
    quality_gate,
)
from echelon.rng import stream
from echelon.types import Floats


def information_loss(scores: Tensor, own: Tensor, log_prior: Tensor | None = None) -> Tensor:
    """What critic and discriminator minimise: the mean estimate, negated."""
    return -pointwise_information(scores, own, log_prior).mean()


def fitted(model: nn.Module, step: Callable[[torch.Generator], Tensor]) -> None:
    """Descend on `step`'s loss."""
    generator = torch.Generator().manual_seed(1)
    descent = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(150):
        descent.zero_grad()
        step(generator).backward()
        descent.step()


def symmetric_channel(k: int, error: float) -> Tensor:
    """p(a | z)[K,K]: the action names its skill, but with `error` one of the others."""
    return torch.full((k, k), error / (k - 1)) + (1.0 - error - error / (k - 1)) * torch.eye(k)


def channel_information(channel: Tensor, prior: Tensor) -> float:
    """I(a; z) of p(a | z)[K,A] by its definition."""
    joint = prior[:, None] * channel
    return float((joint * (channel / joint.sum(0)).log()).sum())


def test_pointwise_information_by_hand() -> None:
    # e^f = (3, 1): own share 3/4 against an even 1/2: log 1.5; the other's: log 0.5.
    scores = torch.tensor([[3.0, 1.0], [3.0, 1.0]]).log()
    got = pointwise_information(scores, torch.tensor([0, 1]))
    assert got.tolist() == pytest.approx([math.log(1.5), math.log(0.5)])
    # Prior (.9, .1): 3 / (.9·3 + .1·1) = 3 / 2.8.
    prior = torch.tensor([0.9, 0.1]).log()
    got = pointwise_information(scores, torch.tensor([0, 1]), prior)
    assert got.tolist() == pytest.approx([math.log(3 / 2.8), math.log(1 / 2.8)], rel=1e-5)


def test_no_scores_exceed_log_k() -> None:
    scores = 1000.0 * torch.randn(500, 7, generator=torch.Generator().manual_seed(0))
    got = pointwise_information(scores, scores.argmax(1))
    assert float(got.max()) <= math.log(7) + 1e-4
    assert float(normalise_information(got, 7).max()) <= 1.0


def test_bonus_is_bounded_on_both_sides_and_carries_no_gradient() -> None:
    information = torch.tensor([-50.0, 0.0, math.log(4) / 2, 9.0], requires_grad=True)
    bonus = normalise_information(information, 4)
    assert bonus.tolist() == pytest.approx([-1.0, 0.0, 0.5, 1.0])
    assert not bonus.requires_grad


@pytest.mark.parametrize("prior", [[0.25] * 4, [0.55, 0.25, 0.15, 0.05]])
def test_true_scores_of_a_discrete_channel_give_its_information_exactly(
    prior: list[float],
) -> None:
    channel, p = symmetric_channel(4, 0.3).double(), torch.tensor(prior).double()
    # Every (skill, action) once, weighted by its probability: no noise of sampling.
    scores = channel.log().T.repeat(4, 1)  # rows: skill 0 with actions 0…3, skill 1 with …
    own = torch.arange(4).repeat_interleave(4)
    got = ((p[:, None] * channel).reshape(-1) * pointwise_information(scores, own, p.log())).sum()
    assert float(got) == pytest.approx(channel_information(channel, p), abs=1e-12)


def test_even_symmetric_channel_has_the_information_in_the_textbook() -> None:
    h = -(0.7 * math.log(0.7) + 0.3 * math.log(0.1))
    assert channel_information(
        symmetric_channel(4, 0.3).double(), torch.full((4,), 0.25).double()
    ) == pytest.approx(math.log(4) - h)


def test_prior_given_the_state_leaves_what_the_state_told_out() -> None:
    # State 0 belongs to skill 0 at .9, state 1 to skill 1; the action adds nothing to it.
    posterior = torch.tensor([[0.9, 0.1], [0.1, 0.9]])
    states, own = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    weight = 0.5 * posterior[states, own]
    even = (weight * pointwise_information(posterior.log()[states], own)).sum()
    flat = torch.zeros(4, 2)
    conditional = (weight * pointwise_information(flat, own, posterior.log()[states])).sum()
    assert float(even) == pytest.approx(math.log(2) + 0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert float(conditional) == pytest.approx(0.0, abs=1e-6)


def learned_channel_information(errors: tuple[float, float], k: int = 4) -> float:
    """Estimate on fresh samples by a trained critic; the state says which error is at work."""
    channels = torch.stack([symmetric_channel(k, error) for error in errors])
    skills = torch.randn(k, 10, generator=torch.Generator().manual_seed(9))
    critic = SkillCritic(1, k, 10, hidden=32)

    def scored(generator: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
        own = torch.randint(k, (n,), generator=generator)
        state = torch.randint(2, (n,), generator=generator)
        action = torch.multinomial(channels[state, own], 1, generator=generator)[:, 0]
        one_hot = nn.functional.one_hot(action, k).float()
        return critic(state[:, None].float(), one_hot, skills), own

    fitted(critic, lambda generator: information_loss(*scored(generator, 512)))
    with torch.no_grad():
        scores, own = scored(torch.Generator().manual_seed(2), 40_000)
        return float(pointwise_information(scores, own).mean())


def test_infonce_learns_the_information_of_a_channel_that_depends_on_the_state() -> None:
    torch.manual_seed(0)
    even = torch.full((4,), 0.25)
    exact = np.mean([channel_information(symmetric_channel(4, e), even) for e in (0.05, 0.6)])
    assert learned_channel_information((0.05, 0.6)) == pytest.approx(exact, abs=0.02)


def test_infonce_of_independent_actions_is_naught_within_noise() -> None:
    torch.manual_seed(0)
    assert learned_channel_information((0.75, 0.75)) == pytest.approx(0.0, abs=0.01)


def gaussian_pairs(generator: torch.Generator, n: int, k: int, rho: float) -> tuple[Tensor, Tensor]:
    """Actions[n,1] correlated ρ with the first of skills[n,K,1], the rest being the contrast."""
    skills = torch.randn(n, k, 1, generator=generator)
    noise = torch.randn(n, 1, generator=generator)
    return rho * skills[:, 0] + math.sqrt(1.0 - rho * rho) * noise, skills


def gaussian_scores(action: Tensor, skills: Tensor, rho: float) -> Tensor:
    """log p(a | z), up to what no candidate changes."""
    return -((action - rho * skills[..., 0]) ** 2) / (2.0 * (1.0 - rho * rho))


def test_true_scores_of_a_gaussian_channel_give_its_information() -> None:
    # I = −½ log(1 − ρ²); with many candidates the bound is nearly tight.
    action, skills = gaussian_pairs(torch.Generator().manual_seed(3), 20_000, 64, 0.8)
    got = pointwise_information(
        gaussian_scores(action, skills, 0.8), torch.zeros(20_000, dtype=torch.int64)
    ).mean()
    assert float(got) == pytest.approx(-0.5 * math.log(1 - 0.64), abs=0.03)


def test_gaussian_channel_beyond_log_k_is_held_to_log_k() -> None:
    rho, k = 0.99999, 8
    assert -0.5 * math.log(1 - rho * rho) > 2.5 * math.log(k)
    action, skills = gaussian_pairs(torch.Generator().manual_seed(3), 20_000, k, rho)
    got = pointwise_information(
        gaussian_scores(action, skills, rho), torch.zeros(20_000, dtype=torch.int64)
    )
    assert float(got.max()) <= math.log(k) + 1e-4
    assert float(got.mean()) == pytest.approx(math.log(k), abs=0.05)


def test_infonce_learns_what_eight_candidates_can_tell_of_a_gaussian_channel() -> None:
    torch.manual_seed(0)
    rho, k, n = 0.8, 8, 20_000
    critic = SkillCritic(1, 1, 1, hidden=32)

    def scored(action: Tensor, skills: Tensor) -> tuple[Tensor, Tensor]:
        scores = critic(torch.zeros_like(action), action, skills)
        return scores, torch.zeros(len(action), dtype=torch.int64)

    fitted(critic, lambda rng: information_loss(*scored(*gaussian_pairs(rng, 256, k, rho))))
    fresh = gaussian_pairs(torch.Generator().manual_seed(2), n, k, rho)
    with torch.no_grad():
        scores, own = scored(*fresh)
        got = float(pointwise_information(scores, own).mean())
    best = float(pointwise_information(gaussian_scores(*fresh, rho), own).mean())
    assert best == pytest.approx(0.429, abs=1e-3)  # of −½ log(1 − ρ²) = 0.511, for want of more
    assert best - 0.04 < got < best + 0.005


def test_skills_shared_or_given_by_sample_score_alike() -> None:
    torch.manual_seed(0)
    critic = SkillCritic(3, 2, 10)
    state, action, skills = torch.randn(6, 3), torch.randn(6, 2), torch.randn(4, 10)
    shared = critic(state, action, skills)
    assert shared.shape == (6, 4)
    torch.testing.assert_close(critic(state, action, skills.expand(6, 4, 10)), shared)


@pytest.mark.parametrize(("apart", "expected"), [(True, math.log(3)), (False, 0.0)])
def test_discriminator_knows_experts_by_their_books_only_if_they_differ(
    apart: bool, expected: float
) -> None:
    torch.manual_seed(0)
    model = SkillDiscriminator(n_assets=3, n_skills=3, hidden=32)
    centres = torch.eye(3) if apart else torch.full((3, 3), 1 / 3)

    def scored(generator: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
        own = torch.randint(3, (n,), generator=generator)
        noise = torch.rand(n, 3, generator=generator) / 3
        book = 0.8 * centres[own] + 0.2 * noise
        return model(model.book(book, book)), own

    fitted(model, lambda generator: information_loss(*scored(generator, 256)))
    with torch.no_grad():
        got = pointwise_information(*scored(torch.Generator().manual_seed(2), 20_000)).mean()
    assert float(got) == pytest.approx(expected, abs=0.02)


def test_discriminator_sees_cash_as_it_sees_assets() -> None:
    torch.manual_seed(0)
    model = SkillDiscriminator(2, 2)
    invested, cash = torch.tensor([[0.5, 0.5]]), torch.zeros(1, 2)
    rows = torch.cat([torch.zeros(1, 4), torch.ones(1, 2)], dim=1)
    assert torch.equal(model.book(cash, cash), rows)
    assert torch.equal(model.book(invested, cash), torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0, 1.0]]))
    forward, back = model.book(invested, cash), model.book(cash, invested)
    assert not torch.equal(model(forward), model(back))


def test_quality_gate_by_hand() -> None:
    gate = quality_gate(np.array([1.0, 0.85, 0.75, math.nan, -3.0]), margin=0.2)
    assert gate.tolist() == [True, True, False, False, False]
    assert quality_gate(np.array([-1.0, -1.1]), margin=0.2).tolist() == [True, True]
    assert quality_gate(np.array([2.0, 1.9]), margin=0.0).tolist() == [True, False]
    assert quality_gate(np.array([math.nan, math.nan]), margin=1.0).tolist() == [False, False]


def values(n: int) -> Floats:
    return 1e3 + 0.01 * stream(0, "rewards").standard_normal(n)


def test_running_std_of_uneven_batches_is_that_of_all_values() -> None:
    x, running = values(997), RunningStd()
    for part in np.split(x, [0, 1, 2, 40, 41, 900]):
        running.update(part.reshape(1, -1))
    assert running.count == 997
    assert running.mean == pytest.approx(x.mean(), rel=1e-14)
    assert running.std == pytest.approx(x.std(), rel=1e-9)
    np.testing.assert_allclose(running.scale(x[:3]), x[:3] / x.std(), rtol=1e-9)


def test_running_std_by_hand_keeps_the_mean_in() -> None:
    running = RunningStd()
    running.update(np.array([1.0, 3.0]))
    assert running.std == 1.0
    running.update(np.array([5.0, 7.0]))
    assert running.std == pytest.approx(math.sqrt(5.0))
    assert running.scale(np.array([4.0])).tolist() == pytest.approx([4.0 / math.sqrt(5.0)])


def test_rewards_that_do_not_differ_are_left_as_they_are() -> None:
    running = RunningStd()
    assert running.scale(np.array([0.3])).tolist() == [0.3]
    for _ in range(50):
        running.update(np.full(7, 0.1))
    assert running.std == 1.0


def test_running_std_goes_on_from_its_state_bit_by_bit() -> None:
    x, one, other = values(200), RunningStd(), RunningStd()
    one.update(x[:120])
    other.restore(json.loads(json.dumps(one.state())))
    one.update(x[120:])
    other.update(x[120:])
    assert other.state() == one.state()


def test_running_std_refuses_what_is_not_finite_and_stays_as_it_was() -> None:
    running = RunningStd()
    running.update(np.array([1.0, 2.0]))
    before = running.state()
    with pytest.raises(TrainingError, match="quarantine"):
        running.update(np.array([1.0, math.inf]))
    assert running.state() == before


def test_mutual_information_of_labels_by_hand() -> None:
    right = np.array([0, 0, 1, 1])
    same = mutual_information(right, right)
    assert same == pytest.approx({"information": 1.0, "of": 1.0})
    assert mutual_information(np.array([0, 1, 0, 1]), right)["information"] == pytest.approx(0.0)
    # Three of four agree: p = ½·½·…, I = 1 + ¾·log₂(¾) + … worked out from the joint frequencies.
    found = mutual_information(np.array([0, 0, 1, 0]), right)["information"]
    joint = {(0, 0): 0.5, (1, 1): 0.25, (0, 1): 0.25}
    left_share = {0: 0.75, 1: 0.25}
    wanted = sum(p * math.log2(p / (left_share[a] * 0.5)) for (a, _), p in joint.items())
    assert found == pytest.approx(wanted)
