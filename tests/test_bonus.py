"""The mutual-information reward: known information, none where there is none, and resuming."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from echelon.errors import StoreError, TrainingError
from echelon.population.expert_reward import ActionSamples, Estimator, SkillBonus, target_portfolios
from echelon.population.measurement import draw_skills

K, N = 3, 2
MEANS = torch.tensor([[-0.6, 0.0], [0.0, 0.0], [0.6, 0.0]])
WIDTH = 0.5
SKILLS = torch.from_numpy(draw_skills(K, 5, seed=0)).float()


def known_information(centres: Tensor, width: float) -> float:
    """I(a; z) of even skills with Gaussians around the first coordinate, on a fine grid."""
    at = np.linspace(-5.0, 5.0, 20_001)
    middle = centres[:, 0].numpy().astype(np.float64)
    density = np.exp(-0.5 * ((at - middle[:, None]) / width) ** 2) / (width * math.sqrt(2 * np.pi))
    mixture = density.mean(axis=0)
    ratio = np.log(density, where=density > 0, out=np.zeros_like(density)) - np.log(mixture)
    return float((density * ratio).sum(axis=1).mean() * (at[1] - at[0]))


def samples(
    n: int,
    seed: int,
    *,
    actions: Tensor | None = None,
    holdings: Tensor | None = None,
    shares: tuple[float, ...] = (1.0, 1.0, 1.0),
) -> ActionSamples:
    """Samples whose actions and holdings lie around the centres[K,N] of whoever acted."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.multinomial(torch.tensor(shares), n, replacement=True, generator=generator)
    nothing = torch.zeros(K, N)
    spots = [nothing if centres is None else centres for centres in (holdings, actions)]
    held, acted = (
        spot[source] + WIDTH * torch.randn((n, N), generator=generator) for spot in spots
    )
    # Holdings are small numbers, as they are with many assets.
    return ActionSamples(0.01 * held, torch.rand(n, generator=generator), acted, source)


def trained(
    estimator: Estimator, given: ActionSamples, updates: int = 300
) -> tuple[SkillBonus, float]:
    """A model, and the information it found in the last updates."""
    # Without noise, which would drown holdings as small as these and change what is known.
    bonus = SkillBonus(K, N, SKILLS.shape[1], estimator, seed=1, hidden=32, noise=0.0)
    bonus.learn(given, SKILLS, updates - 100)
    return bonus, bonus.learn(given, SKILLS, 100).information


def paid(bonus: SkillBonus, given: ActionSamples) -> float:
    """Mean reward of whoever acted, in nats."""
    reward = bonus.reward(given.holdings, given.cash, given.actions, given.source, SKILLS)
    assert reward.shape == given.source.shape
    assert float(reward.abs().max()) <= 1.0
    assert not reward.requires_grad
    return float(reward.mean()) * math.log(K)


def test_infonce_finds_the_information_of_gaussian_actions() -> None:
    truth = known_information(MEANS, WIDTH)
    bonus, found = trained("infonce", samples(8192, 1, actions=MEANS))
    assert 0.3 < truth < 0.5
    assert paid(bonus, samples(8192, 2, actions=MEANS)) == pytest.approx(truth, abs=0.04)
    assert found == pytest.approx(truth, abs=0.06)


@pytest.mark.parametrize("estimator", ["infonce", "diayn"])
def test_experts_that_do_the_same_earn_about_nothing(estimator: Estimator) -> None:
    bonus, found = trained(estimator, samples(8192, 1))
    assert abs(paid(bonus, samples(8192, 2))) < 0.03
    assert abs(found) < 0.03


def test_diayn_finds_what_the_book_tells_whoever_collected_more() -> None:
    truth = known_information(MEANS, WIDTH)
    uneven = (0.7, 0.2, 0.1)
    bonus, found = trained("diayn", samples(8192, 1, holdings=MEANS, shares=uneven))
    assert paid(bonus, samples(8192, 2, holdings=MEANS)) == pytest.approx(truth, abs=0.05)
    assert found < truth - 0.05  # of uneven skills there is less to be told


def test_infonce_does_not_pay_actions_for_what_the_book_tells() -> None:
    bonus, found = trained("infonce", samples(8192, 1, holdings=MEANS))
    assert abs(paid(bonus, samples(8192, 2, holdings=MEANS))) < 0.05
    assert abs(found) < 0.05
    both = samples(8192, 1, holdings=MEANS, actions=MEANS)
    bonus, _ = trained("infonce", both)
    truth = known_information(MEANS, WIDTH)
    # Actions at books of all experts alike, as the reward has it.
    assert paid(bonus, samples(8192, 2, actions=MEANS)) == pytest.approx(truth, abs=0.08)


def test_reward_is_of_the_expert_it_is_asked_for_not_of_the_one_who_acted() -> None:
    bonus, _ = trained("infonce", samples(8192, 1, actions=MEANS))
    actions = torch.tensor([[-0.8, 0.0]] * K)
    reward = bonus.reward(
        torch.zeros(K, N), torch.full((K,), 0.5), actions, torch.arange(K), SKILLS
    )
    density = torch.exp(-0.5 * ((actions - MEANS) / WIDTH).square().sum(dim=1))
    truth = torch.log(density / density.mean()) / math.log(K)  # 0.74, −0.35, −2.75
    assert reward[:2].tolist() == pytest.approx(truth[:2].tolist(), abs=0.15)
    assert reward[2] == -1.0  # cut there


def held_portfolios(actions: Tensor, seed: int) -> ActionSamples:
    """What experts[3] with such scores[3,N] (and a little chance) hold and ask for, all free."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(K, (8192,), generator=generator)
    scores = actions[source] + 0.02 * torch.randn((8192, actions.shape[1]), generator=generator)
    wanted = target_portfolios(scores.clamp(-1.0, 1.0), *at_cash(scores))
    return ActionSamples(wanted, 1.0 - wanted.sum(dim=1), wanted, source)


def earned(estimator: Estimator, scores: Tensor) -> float:
    """Mean reward in [−1, 1] of experts with such scores[3,N], by a model trained on them."""
    given, later = held_portfolios(scores, 1), held_portfolios(scores, 2)
    bonus = SkillBonus(K, scores.shape[1], SKILLS.shape[1], estimator, seed=1)
    bonus.learn(given, SKILLS, 200)
    asked = (later.holdings, later.cash, later.actions, later.source, SKILLS)
    return float(bonus.reward(*asked).mean())


@pytest.mark.parametrize("estimator", ["infonce", "diayn"])
def test_other_scores_of_assets_that_nobody_holds_earn_next_to_nothing(
    estimator: Estimator,
) -> None:
    # Everybody holds the first asset; of the others, which get next to nothing, scores differ.
    scores = torch.full((K, 4), -1.0)
    scores[:, 0] = 1.0
    scores[1, 1], scores[2, 2] = -0.5, -0.5
    assert float(target_portfolios(scores, *at_cash(scores))[:, 1:].max()) < 0.01
    assert abs(earned(estimator, scores)) < 0.1


@pytest.mark.parametrize("estimator", ["infonce", "diayn"])
def test_other_portfolios_earn_most_of_what_there_is(estimator: Estimator) -> None:
    scores = torch.full((K, 4), -1.0)
    scores[range(K), range(K)] = 1.0
    assert earned(estimator, scores) > 0.7


def at_cash(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(holdings, cash, free) of books without holdings, in which all can be traded."""
    return torch.zeros_like(scores), torch.ones(len(scores)), torch.ones_like(scores).bool()


def test_portfolios_leave_alone_what_cannot_be_traded() -> None:
    held = torch.tensor([[0.3, 0.2, 0.0]])
    free = torch.tensor([[False, True, True]])
    wanted = target_portfolios(torch.tensor([[1.0, 0.0, 0.0]]), held, torch.tensor([0.5]), free)
    assert wanted[0, 0] == pytest.approx(0.3)
    # Of the other 0.7, two assets and cash of one score have a third each.
    assert wanted[0, 1:].tolist() == pytest.approx([0.7 / 3, 0.7 / 3])


@pytest.mark.parametrize("estimator", ["infonce", "diayn"])
def test_an_expert_that_is_missing_from_a_batch_does_no_harm(estimator: Estimator) -> None:
    given = samples(512, 1, actions=MEANS, shares=(1.0, 1.0, 0.0))
    bonus = SkillBonus(K, N, SKILLS.shape[1], estimator, seed=1)
    told = bonus.learn(given, SKILLS, 5)
    assert math.isfinite(told.loss)
    assert math.isfinite(paid(bonus, samples(64, 2, actions=MEANS)))


@pytest.mark.parametrize("estimator", ["infonce", "diayn"])
def test_learning_goes_on_bit_for_bit_after_restore(estimator: Estimator) -> None:
    given = samples(1024, 1, actions=MEANS)
    straight = SkillBonus(K, N, SKILLS.shape[1], estimator, seed=1)
    straight.learn(given, SKILLS, 3)
    tensors, state = straight.state()
    tensors = {name: value.clone() for name, value in tensors.items()}
    straight.learn(given, SKILLS, 4)
    resumed = SkillBonus(K, N, SKILLS.shape[1], estimator, seed=99)
    resumed.restore(tensors, json.loads(json.dumps(state)))
    resumed.learn(given, SKILLS, 4)
    for name, value in straight.weights().items():
        assert torch.equal(value, resumed.weights()[name]), name
    elsewhere = SkillBonus(K, N, SKILLS.shape[1], estimator, seed=5)
    elsewhere.load(straight.weights())
    asked = (given.holdings, given.cash, given.actions, given.source, SKILLS)
    assert torch.equal(elsewhere.reward(*asked), straight.reward(*asked))


def test_same_seed_gives_the_same_model_whatever_else_draws() -> None:
    first = SkillBonus(K, N, 5, "infonce", seed=3).weights()
    torch.rand(10)
    second = SkillBonus(K, N, 5, "infonce", seed=3).weights()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    other = SkillBonus(K, N, 5, "infonce", seed=4).weights()
    assert not torch.equal(first["critic.pair.0.weight"], other["critic.pair.0.weight"])


def test_weights_of_another_model_are_refused() -> None:
    bonus = SkillBonus(K, N, 5, "infonce", seed=3)
    with pytest.raises(StoreError, match="infonce model of 3 skills"):
        bonus.load(SkillBonus(K, N, 5, "diayn", seed=3).weights())
    with pytest.raises(StoreError, match="resume with the configuration"):
        bonus.load(SkillBonus(K, N + 1, 5, "infonce", seed=3).weights())


def test_what_is_not_finite_is_refused_and_names_the_experts() -> None:
    given = samples(64, 1)
    given.actions[5, 1] = math.nan
    bonus = SkillBonus(K, N, SKILLS.shape[1], "infonce", seed=1)
    before = bonus.weights()
    who = int(given.source[5])
    with pytest.raises(TrainingError, match=rf"finite actions .* 1 of 64 .* \[{who}\]"):
        bonus.learn(given, SKILLS, 2)
    assert all(torch.equal(value, before[name]) for name, value in bonus.weights().items())
    with pytest.raises(TrainingError, match=r"diverged.*not changed"):
        bonus.learn(samples(64, 1), SKILLS * math.inf, 1)
    after = bonus.weights()
    learned = [name for name in before if not name.startswith("scale.")]
    assert all(torch.equal(after[name], before[name]) for name in learned)
