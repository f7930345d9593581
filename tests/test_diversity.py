"""Diversity of experts and the router's bonuses: by hand, at their bounds, against slow twins."""

from __future__ import annotations

import json
import math
from functools import partial

import numpy as np
import pytest

from echelon.errors import StoreError, TrainingError
from echelon.ops.diversity import (
    UsageWindow,
    entropy,
    mapd,
    next_kl_weight,
    policy_kl,
    population_volume,
    with_cash,
)
from echelon.rng import stream
from echelon.types import Floats


def random_weights(k: int, states: int, n: int, seed: int = 0) -> Floats:
    """Portfolios that leave some cash."""
    return stream(seed, "weights").dirichlet(np.ones(n + 1), (k, states))[..., :n]


def test_mapd_by_hand_counts_cash_states_and_pairs() -> None:
    # Two assets. State 0: a all in the first, b all in the second, c all cash: every pair 1.
    # State 1: a (.5, .5), b (.5, .2, cash .3), c (.5, .5): ab .3, ac 0, bc .3.
    weights = np.array(
        [[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.2]], [[0.0, 0.0], [0.5, 0.5]]]
    )
    assert mapd(weights) == pytest.approx((0.65 + 0.5 + 0.65) / 3)


def test_mapd_of_clones_is_naught_and_of_disjoint_portfolios_one() -> None:
    one = random_weights(1, 20, 4)
    assert mapd(np.repeat(one, 3, axis=0)) == 0.0
    assert mapd(np.eye(4)[:, None, :]) == pytest.approx(1.0)


def test_mapd_is_the_same_whether_cash_has_a_column_or_not() -> None:
    weights = random_weights(4, 30, 5)
    assert mapd(with_cash(weights)) == pytest.approx(mapd(weights), abs=1e-12)


def test_mapd_equals_the_loop_over_states_and_pairs() -> None:
    weights = random_weights(5, 7, 3)
    total, count = 0.0, 0
    for s in range(7):
        for a in range(5):
            for b in range(a):
                x, y = weights[a, s], weights[b, s]
                total += 0.5 * (np.abs(x - y).sum() + abs(x.sum() - y.sum()))
                count += 1
    assert mapd(weights) == pytest.approx(total / count)


def test_not_a_number_is_refused_and_says_what_to_do() -> None:
    weights = random_weights(3, 2, 2)
    weights[1, 0, 0] = np.nan
    with pytest.raises(TrainingError, match="quarantine"):
        mapd(weights)


def test_weights_above_one_are_refused() -> None:
    with pytest.raises(AssertionError, match="sum to ≤ 1"):
        mapd(np.full((2, 1, 2), 0.6))


def test_population_volume_of_two_experts_by_hand() -> None:
    # One asset each: d² = 2, k = exp(−2 / (2·0.25)) = e⁻⁴, det = 1 − e⁻⁸.
    got = population_volume(np.eye(2)[:, None, :], length_scale=0.5, jitter=0.0)
    assert got == pytest.approx(1.0 - math.exp(-8.0))


def test_population_volume_does_not_depend_on_the_number_of_probes() -> None:
    weights = random_weights(4, 6, 3)
    twice = np.concatenate([weights, weights], axis=1)
    assert population_volume(twice) == pytest.approx(population_volume(weights))


def test_clones_take_the_volume_away_and_keep_a_logarithm_while_mapd_stays_high() -> None:
    apart = np.eye(5)[:, None, :]
    cloned = apart[[0, 0, 1, 2, 3]]
    assert mapd(cloned) == pytest.approx(0.9)
    assert population_volume(apart) > 0.95
    assert population_volume(cloned) < 1e-5
    many = np.repeat(random_weights(1, 3, 4), 40, axis=0)
    assert 0.0 < population_volume(many) < math.exp(-400.0)


def test_volume_grows_as_experts_move_apart_and_never_exceeds_one() -> None:
    far = np.eye(4)[:, None, :]
    middle = np.full_like(far, 0.25)
    volumes = [population_volume(middle + x * (far - middle)) for x in (0.1, 0.3, 0.6, 1.0)]
    assert volumes == sorted(volumes)
    assert volumes[-1] <= 1.0


def test_smoothed_shares_and_usage_bonus_by_hand() -> None:
    # Three of the first, one of the second, none of the third: (4, 2, 1) / 7.
    window = UsageWindow(3)
    window.record(np.array([0, 0, 1, 0]))
    np.testing.assert_allclose(window.shares(), [4 / 7, 2 / 7, 1 / 7])
    bonus = window.bonus(np.array([2, 0, 1]))
    # −log 1/7 = 1.95 is over log 3 = 1.0986 and is clipped; −log 2/7 = 1.25 too.
    np.testing.assert_allclose(bonus, [math.log(3), math.log(7 / 4), math.log(3)])


def test_entropy_by_hand_and_at_its_ends() -> None:
    assert entropy(np.array([0.5, 0.25, 0.25])) == pytest.approx(1.5 * math.log(2))
    assert entropy(np.full(5, 0.2)) == pytest.approx(math.log(5))
    assert entropy(np.array([1.0, 0.0])) == 0.0


def test_usage_window_forgets_the_oldest_and_pays_by_what_came_before() -> None:
    window = UsageWindow(2, length=4)
    assert window.entropy() == pytest.approx(math.log(2))
    assert window.bonus(np.array([0, 1])).tolist() == pytest.approx([math.log(2)] * 2)
    window.record(np.array([1, 1, 0, 0, 0]))
    assert len(window) == 4
    np.testing.assert_allclose(window.shares(), [4 / 6, 2 / 6])
    window.record(np.array([0]))
    np.testing.assert_allclose(window.shares(), [5 / 6, 1 / 6])
    assert window.bonus(np.array([0]))[0] == pytest.approx(math.log(6 / 5))


def test_usage_window_goes_on_from_its_state_through_json() -> None:
    window, rng = UsageWindow(3), stream(0, "choices")
    window.record(rng.integers(0, 3, 1500))
    other = UsageWindow(3)
    other.restore(json.loads(json.dumps(window.state())))
    more = rng.integers(0, 3, 100)
    window.record(more)
    other.record(more)
    assert other.state() == window.state()
    with pytest.raises(StoreError, match="3 experts over 1000 decisions, found"):
        other.restore(UsageWindow(4).state())


def test_policy_kl_of_clones_is_naught_and_of_disjoint_experts_log_k() -> None:
    clones = np.repeat(random_weights(1, 6, 4), 3, axis=0)
    np.testing.assert_allclose(policy_kl(clones, stream(0, "kl")), 0.0, atol=1e-12)
    apart = policy_kl(np.eye(5)[:, None, :], stream(0, "kl"))
    np.testing.assert_allclose(apart, math.log(5), atol=1e-9)


def test_policy_kl_of_two_experts_agrees_with_quadrature() -> None:
    # Along the line through both centres: KL of N(0,1) from ½N(0,1) + ½N(m,1), m = |d| / σ.
    weights = np.array([[[0.50, 0.20]], [[0.55, 0.15]]])
    m = math.hypot(0.05, 0.05) / 0.05
    x = np.linspace(-9.0, 9.0 + m, 40_001)
    p, q = np.exp(-0.5 * x**2), np.exp(-0.5 * (x - m) ** 2)
    exact = (p * np.log(p / (0.5 * p + 0.5 * q))).sum() / p.sum()
    got = policy_kl(weights, stream(3, "kl"), samples=200_000)
    np.testing.assert_allclose(got[:, 0], exact, atol=4e-3)
    assert 0.1 < exact < math.log(2)


def test_policy_kl_is_bounded_seeded_and_does_not_overflow() -> None:
    weights = random_weights(5, 50, 8)
    first = policy_kl(weights, stream(1, "kl"), sigma=1e-4)
    assert np.isfinite(first).all()
    assert first.min() >= 0.0
    assert first.max() <= math.log(5)
    wide = policy_kl(weights, stream(1, "kl"), samples=8)
    assert (wide == policy_kl(weights, stream(1, "kl"), samples=8)).all()
    assert (wide != policy_kl(weights, stream(2, "kl"), samples=8)).any()


def test_policy_kl_pays_the_expert_unlike_the_others_most() -> None:
    weights = np.array([[[0.5, 0.5]], [[0.5, 0.5]], [[0.45, 0.5]]])
    kl = policy_kl(weights, stream(0, "kl"), samples=4000)[:, 0]
    assert kl[2] > 1.5 * kl[0]
    assert kl[0] == pytest.approx(kl[1])


def test_kl_weight_rises_only_while_usage_is_too_uneven() -> None:
    rule = partial(next_kl_weight, floor=0.4, most=0.2)
    assert rule(0.1, 0.2 * math.log(5), 5) == pytest.approx(0.1 + 0.05 * 0.2)
    assert rule(0.1, 0.4 * math.log(5), 5) == pytest.approx(0.1)
    assert rule(0.1, math.log(5), 5) == pytest.approx(0.1 - 0.05 * 0.6)
    assert rule(0.01, math.log(5), 5) == 0.0
    assert rule(0.2, 0.0, 5) == 0.2
    assert rule(0.1, 0.0, 1) == 0.0
