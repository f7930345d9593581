"""Daily rank ICs, held to scipy's, to numbers by hand, and their paired interval to the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from echelon.ops.ranks import compare_ic, ic_summary, rank_ic
from echelon.rng import stream


def test_ic_of_hand_ranked_rows() -> None:
    outcomes = np.array([[1.0, 2.0, 3.0, 4.0, 5.0]] * 3)
    scores = np.array([[10.0, 20, 30, 40, 50], [5.0, 4, 3, 2, 1], [1.0, 2, 3, 5, 4]])
    # One swap of neighbours among five: 1 - 6·(1 + 1)/(5·24) = 0.9.
    assert rank_ic(scores, outcomes) == pytest.approx([1.0, -1.0, 0.9])


def test_ic_with_ties_and_gaps_is_scipys_on_the_cells_both_have() -> None:
    rng = stream(5, "ic")
    scores = rng.integers(0, 6, (40, 30)).astype(np.float64)
    outcomes = scores + 4.0 * rng.standard_normal(scores.shape)
    scores[rng.random(scores.shape) < 0.2] = np.nan
    outcomes[rng.random(outcomes.shape) < 0.2] = np.nan
    for row, ic in enumerate(rank_ic(scores, outcomes)):
        both = np.isfinite(scores[row]) & np.isfinite(outcomes[row])
        expected = stats.spearmanr(scores[row, both], outcomes[row, both]).statistic
        assert ic == pytest.approx(expected, abs=1e-12)


def test_silent_forecaster_has_ic_zero_and_rows_that_say_nothing_have_none() -> None:
    outcomes = np.vstack([np.arange(6.0), np.ones(6), np.arange(6.0)])
    scores = np.vstack([np.ones(6), np.arange(6.0), np.arange(6.0)])
    scores[2, 2:] = np.nan  # two assets left
    ic = rank_ic(scores, outcomes)
    assert ic[0] == 0.0
    assert np.isnan(ic[1:]).all()


def test_summary_leaves_out_rows_without_ic() -> None:
    ic = np.array([0.1, np.nan, 0.3] + [0.2] * 30)
    summary = ic_summary(ic, stream(1, "summary"), horizon=1)
    known = ic[np.isfinite(ic)]
    assert summary.days == 32
    assert summary.mean.estimate == pytest.approx(known.mean())
    assert summary.icir == pytest.approx(known.mean() / known.std(ddof=1))
    assert math.isnan(ic_summary(ic[:1], stream(1, "one"), horizon=1).icir)


def test_paired_interval_is_narrow_where_both_share_the_days_and_wide_where_they_overlap() -> None:
    rng = stream(2, "paired")
    shared = 0.15 * rng.standard_normal(1500)
    first = shared + 0.02 * rng.standard_normal(1500) + 0.004
    second = shared + 0.02 * rng.standard_normal(1500)
    paired = compare_ic(first, second, stream(2, "interval"), horizon=5)
    assert paired.low < 0.004 < paired.high
    assert paired.high - paired.low < 0.006
    alone = ic_summary(first, stream(2, "interval"), horizon=5).mean
    assert alone.high - alone.low > 0.012
    assert paired.block >= 5
    second[7] = np.nan
    without = compare_ic(np.delete(first, 7), np.delete(second, 7), stream(2, "i"), horizon=5)
    assert compare_ic(first, second, stream(2, "i"), horizon=5) == without


def test_paired_interval_covers_the_truth_as_often_as_it_says() -> None:
    covered, draws = 0, 200
    for k in range(draws):
        noise = stream(3, "coverage", k).standard_normal(604)
        overlapping = 0.03 * np.convolve(noise, np.ones(5) / math.sqrt(5), "valid")
        interval = compare_ic(
            overlapping + 0.002,
            np.zeros(600),
            stream(3, "coverage of", k),
            horizon=5,
        )
        covered += interval.low <= 0.002 <= interval.high
    assert covered >= 0.90 * draws
