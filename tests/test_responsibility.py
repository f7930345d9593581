"""Responsibilities: by hand, causal, and against the sum written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import TrainingError
from echelon.population.measurement import responsibilities
from echelon.rng import stream
from echelon.types import Floats


def returns(*shape: int, seed: int = 0) -> Floats:
    return 0.01 * stream(seed, "returns").standard_normal(shape)


def test_responsibility_by_hand() -> None:
    # Window 2. At bar 2 the sums are 0.04 and 0.02: standardised ±1/√2, over τ = 0.5 ±√2.
    r = np.array([[0.01, 0.03, 9.0], [0.02, 0.00, -9.0]])
    odds = math.exp(2.0 * math.sqrt(2.0) * 0.01 * math.sqrt(2) / (0.01 * math.sqrt(2) + 1e-6))
    share = 0.95 * odds / (1.0 + odds) + 0.025
    got = responsibilities(r, window=2)
    np.testing.assert_allclose(got, [[0.5, 0.5, share], [0.5, 0.5, 1.0 - share]], rtol=1e-12)
    assert got[0, 2] == pytest.approx(0.92, abs=0.005)


def test_responsibility_equals_the_loop() -> None:
    r = returns(4, 70, 3)
    got = responsibilities(r, window=15, temperature=0.7, floor=0.1)
    for t in range(70):
        for path in range(3):
            past = r[:, t - 15 : t, path].sum(axis=1) if t >= 15 else np.zeros(4)
            z = (past - past.mean()) / (past.std(ddof=1) + 1e-6)
            p = np.exp(z / 0.7) / np.exp(z / 0.7).sum()
            np.testing.assert_allclose(got[:, t, path], 0.9 * p + 0.1 / 4, rtol=1e-9)


@settings(deadline=None, max_examples=30)
@given(cut=st.integers(0, 99), seed=st.integers(0, 5))
def test_outcomes_from_a_bar_on_change_nothing_at_or_before_it(cut: int, seed: int) -> None:
    r = returns(5, 100, 2, seed=seed)
    other = r.copy()
    other[:, cut:] = returns(5, 100 - cut, 2, seed=seed + 77)
    before, after = responsibilities(r), responsibilities(other)
    assert (before[:, : cut + 1] == after[:, : cut + 1]).all()
    if 40 <= cut < 99:
        assert (before[:, cut + 1] != after[:, cut + 1]).any()


def test_shares_sum_to_one_and_none_falls_below_the_floor() -> None:
    r = returns(5, 300)
    r[0] += 0.05  # always far ahead
    got = responsibilities(r)
    np.testing.assert_allclose(got.sum(axis=0), 1.0)
    assert got.min() >= 0.01
    assert got[0, 40:].min() > 0.8


def test_equal_experts_share_alike_and_so_do_all_before_the_window_is_full() -> None:
    same = np.repeat(returns(1, 60), 3, axis=0)
    np.testing.assert_allclose(responsibilities(same), 1 / 3, rtol=1e-12)
    assert (responsibilities(returns(4, 40)) == 0.25).all()
    assert (responsibilities(returns(4, 7)) == 0.25).all()


def test_shares_do_not_depend_on_how_wild_the_market_is() -> None:
    r = returns(3, 120)
    np.testing.assert_allclose(responsibilities(r), responsibilities(3.0 * r), atol=1e-4)


def test_not_a_number_names_the_expert() -> None:
    r = returns(3, 50)
    r[2, 10] = np.nan
    with pytest.raises(TrainingError, match="expert 2"):
        responsibilities(r)
