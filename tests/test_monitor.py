"""The diversity monitor: probe states, distances by hand, skills apart, helpers of reports."""

from __future__ import annotations

import math

import numpy as np
import pytest
from worlds import make_world

from echelon.errors import ConfigError
from echelon.population.measurement import (
    draw_skills,
    fill_targets,
    fresh_skill,
    measure_diversity,
    probe_books,
    probe_states,
    return_correlations,
    rolling_usage_entropy,
)
from echelon.rng import stream

NAN = math.nan


def test_probe_states_are_rows_of_the_spans_each_once_and_the_same_by_seed() -> None:
    spans = (range(4, 20), range(30, 40))
    rows = probe_states(spans, 12, stream(1, "probe"))
    assert len(rows) == len(set(rows.tolist())) == 12
    assert all(any(row in span for span in spans) for row in rows.tolist())
    assert (np.diff(rows) > 0).all()
    assert (rows == probe_states(spans, 12, stream(1, "probe"))).all()
    assert (rows != probe_states(spans, 12, stream(2, "probe"))).any()
    assert len(probe_states(spans, 1000, stream(1, "probe"))) == 26


def test_probe_books_are_cash_equal_and_by_lot_of_what_can_be_held() -> None:
    present = np.ones((30, 4), dtype=bool)
    present[:, 2] = False
    world = make_world(n_rows=30, n_assets=4, present=present)
    rows = np.arange(5, 17, dtype=np.int64)
    held = probe_books(world, rows, stream(1, "books"))
    total = held.weights.sum(axis=1) + held.cash_share
    np.testing.assert_allclose(total, 1.0, atol=1e-6)
    assert (held.weights[:, 2] == 0.0).all()
    assert (held.cash_share[0::3] == 1.0).all()
    np.testing.assert_allclose(held.weights[1::3][:, [0, 1, 3]], 1.0 / 3.0, atol=1e-6)
    by_lot = held.weights[2::3]
    assert len(np.unique(by_lot[:, 0])) == 4
    assert ((held.cash_share[2::3] > 0.0) & (held.cash_share[2::3] < 1.0)).all()
    assert held.allowed[:, :, 0].all()
    assert not held.allowed[:, 2, 1].any()


def test_a_row_where_nothing_can_be_held_has_a_book_of_cash() -> None:
    present = np.ones((30, 2), dtype=bool)
    present[6:9] = False
    world = make_world(n_rows=30, n_assets=2, present=present)
    held = probe_books(world, np.array([6, 7, 8]), stream(1, "books"))
    assert (held.cash_share == 1.0).all()


def test_portfolios_of_experts_count_what_is_left_as_held() -> None:
    world = make_world(n_rows=40, n_assets=3)
    rows = probe_states(world.spans("train"), 9, stream(1, "probe"))
    held = probe_books(world, rows, stream(1, "books"))
    wanted = np.stack([np.eye(3)[[n] * 9] for n in (0, 1)])  # all in one asset
    wanted[:, :, 2] = NAN
    first, second = (fill_targets(targets, held) for targets in wanted)
    stays = held.weights[:, 2] / (1.0 + held.weights[:, 2])  # all of one and the rest is too much
    np.testing.assert_allclose(first[:, 2], stays, rtol=1e-6)
    np.testing.assert_allclose(first.sum(axis=1), 1.0)
    found = measure_diversity(np.stack([first, second]))
    assert found.mapd == pytest.approx(float((1.0 - stays).mean()), rel=1e-6)


def test_distances_by_hand_and_an_expert_without_numbers_is_left_out() -> None:
    weights = np.zeros((4, 2, 2))
    weights[0, :, 0] = 1.0  # all in the first
    weights[1, :, 1] = 1.0  # all in the second
    weights[2, 0] = (0.5, 0.5)  # half and half, then cash
    weights[3] = NAN
    found = measure_diversity(weights)
    assert found.mapd == pytest.approx((1.0 + 0.75 + 0.75) / 3.0)
    assert 0.0 < found.volume < 1.0
    assert measure_diversity(weights[[0, 1, 1]]).volume < 1e-5  # clones
    alone = measure_diversity(weights[2:])
    assert math.isnan(alone.mapd)
    assert math.isnan(alone.volume)


def test_skills_are_unit_vectors_at_right_angles_where_there_is_room() -> None:
    for n, dim in ((5, 10), (4, 4)):
        found = draw_skills(n, dim, seed=3)
        np.testing.assert_allclose(found @ found.T, np.eye(n), atol=1e-12)
    assert (draw_skills(5, 10, seed=3) == draw_skills(5, 10, seed=3)).all()
    assert (draw_skills(5, 10, seed=3) != draw_skills(5, 10, seed=4)).any()
    assert (draw_skills(3, 10, seed=3) == draw_skills(5, 10, seed=3)[:3]).all()


def test_more_skills_than_dimensions_are_still_far_apart() -> None:
    found = draw_skills(8, 3, seed=3)
    cosine = found @ found.T
    np.testing.assert_allclose(np.diag(cosine), 1.0)
    assert cosine[~np.eye(8, dtype=bool)].max() < math.cos(math.radians(35.0))
    pair = draw_skills(2, 1, seed=3)
    assert sorted(pair[:, 0].tolist()) == [-1.0, 1.0]
    with pytest.raises(ConfigError, match=r"experts\.skill_dim = 1"):
        draw_skills(3, 1, seed=3)


def test_a_fresh_skill_is_none_of_those_there_were() -> None:
    first = draw_skills(5, 10, seed=3)
    fresh = fresh_skill(first, 5, seed=3)
    assert np.abs(first @ fresh).max() < 1e-12
    assert np.linalg.norm(fresh) == pytest.approx(1.0)
    full = draw_skills(3, 3, seed=3)
    crowded = fresh_skill(full, 3, seed=3)
    assert (full @ crowded).max() < 0.0  # away from all of them
    assert (fresh_skill(full, 4, seed=3) != crowded).any()


def test_correlations_of_returns_by_hand_and_none_of_what_does_not_vary() -> None:
    up = np.array([0.01, -0.02, 0.03, NAN, 0.0])
    found = return_correlations(np.stack([up, 2.0 * up + 0.01, -up, np.full(5, 0.001)]))
    np.testing.assert_allclose(found[:3, :3], [[1, 1, -1], [1, 1, -1], [-1, -1, 1]], atol=1e-12)
    assert np.isnan(found[3]).all()
    assert np.isnan(return_correlations(np.zeros((2, 1)))).all()
    drawn = stream(1, "returns").standard_normal((3, 50))
    np.testing.assert_allclose(return_correlations(drawn), np.corrcoef(drawn), atol=1e-12)


def test_usage_entropy_is_of_the_last_decisions_and_a_share_of_even_use() -> None:
    found = rolling_usage_entropy(np.array([0, 0, 1, 2, 3, 3, 3]), 4, window=4)
    third = -(1 / 3 * math.log(1 / 3) + 2 / 3 * math.log(2 / 3)) / math.log(4)
    fourth = (0.5 * math.log(2) + 0.5 * math.log(4)) / math.log(4)
    last = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(4)
    np.testing.assert_allclose(found, [0.0, 0.0, third, fourth, 1.0, fourth, last], atol=1e-12)
    assert rolling_usage_entropy(np.zeros(0, dtype=np.int64), 3, window=5).shape == (0,)
