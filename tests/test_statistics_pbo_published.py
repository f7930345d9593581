"""Probability of backtest overfitting against numbers that others printed.

Two R packages print results for matrices that anyone can draw again (`r_random` draws as R does):

- pbo (mrbcuda/pbo 1.3.5): its vignette, the vignette's degradation plot and its unit tests;
- PBO (htso/PBO, 2018): the tutorial in its README.

Both follow Bailey, Borwein, López de Prado & Zhu (2017), whose own test cases have no seed. What
counts as low differs: in both packages rank / N at or below ½ among N configurations, in the
tutorial's number rank / N strictly below ½, in ours rank / (N + 1), the paper's relative rank, at
or below ½. For even N, as in every example here, ours and "at or below" are the same ranks and
"strictly" leaves out rank N / 2; for odd N only ours counts the middle rank.

p_bo is a coarse number, so the other printed ones are repeated too, by an obvious twin of our
function: they show that the matrix and the winners are theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from r_random import r_normals

from echelon.evaluation.overfitting import overfitting_probability, split_halves
from echelon.types import Floats

RISK_FREE = 0.03 / 252  # a period, in pbo's Sharpe ratio


class Winners(NamedTuple):
    """The best configuration of each half: its measure inside and outside, its rank outside."""

    inside: Floats
    outside: Floats
    rank: Floats


class Summary(NamedTuple):
    """What pbo's `summary` prints, and the slope that only its plot shows."""

    overfitting: float
    intercept: float
    slope: float
    fit: float
    loss: float


def sharpes(returns: Floats) -> Floats:
    ratios: Floats = returns.mean(axis=0) / returns.std(axis=0, ddof=1)
    return ratios


def means(returns: Floats) -> Floats:
    averages: Floats = returns.mean(axis=0)
    return averages


def winners(returns: Floats, n_blocks: int, measure: Callable[[Floats], Floats]) -> Winners:
    """Go through all halves of returns[T, K] one by one."""
    block = np.arange(len(returns)) // (len(returns) // n_blocks)
    rows = []
    for chosen in itertools.combinations(range(n_blocks), n_blocks // 2):
        held = np.isin(block, chosen)
        inside, outside = measure(returns[held]), measure(returns[~held])
        best = inside.argmax()
        rows.append((inside[best], outside[best], 1 + (outside < outside[best]).sum()))
    return Winners(*np.array(rows, dtype=float).T)


def summary(returns: Floats, n_blocks: int) -> Summary:
    """Repeat pbo's summary; p_bo is ours.

    pbo regresses the measure inside on the one outside and prints the intercept as "slope".
    """
    best = winners(returns, n_blocks, sharpes)
    n = len(best.rank)
    slope, intercept = np.polyfit(best.outside, best.inside, 1).tolist()
    r_squared = float(np.corrcoef(best.outside, best.inside)[0, 1]) ** 2
    adjusted = 1 - (1 - r_squared) * (n - 1) / (n - 2) if n > 2 else float("nan")
    loss = float((best.outside < 0).mean())
    probability = overfitting_probability(returns, split_halves(n_blocks))
    return Summary(probability, intercept, slope, adjusted, loss)


def vignette() -> Floats:
    """[2400, 100]: each column scaled to an annual deviation of 1 and a mean of 0."""
    drawn = r_normals(765, 100 * 2400).reshape(100, 2400).T
    drawn = drawn / np.sqrt(252) / drawn.std(axis=0, ddof=1)
    excess: Floats = drawn - drawn.mean(axis=0) - RISK_FREE
    return excess


@pytest.mark.parametrize(
    ("seed", "printed"),
    [
        (42, [1.37095845, -0.56469817, 0.36312841]),
        (123, [-0.56047565, -0.23017749, 1.55870831]),
    ],
)
def test_normals_are_those_r_prints(seed: int, printed: list[float]) -> None:
    assert r_normals(seed, 3) == pytest.approx(printed, abs=5e-9)


def test_vignette_of_pbo_in_eight_blocks() -> None:
    """Printed: p_bo 1, "slope" -0.003046, adjusted R² 0.97, p_loss 1; in the plot -0.9738."""
    found = summary(vignette(), 8)
    assert found.overfitting == 1.0
    assert found.intercept == pytest.approx(-0.003046, abs=5e-7)
    assert found.slope == pytest.approx(-0.9738, abs=5e-5)
    assert found.fit == pytest.approx(0.97, abs=5e-3)
    assert found.loss == 1.0


def test_vignette_of_pbo_in_four_blocks() -> None:
    """Printed: p_bo 1, "slope" -0.005909, adjusted R² 0.88, p_loss 1."""
    found = summary(vignette(), 4)
    assert found.overfitting == 1.0
    assert found.intercept == pytest.approx(-0.005909, abs=5e-7)
    assert found.fit == pytest.approx(0.88, abs=5e-3)
    assert found.loss == 1.0


def test_unit_test_of_pbo_with_forty_configurations() -> None:
    """Asserted there: p_bo 0.49–0.51, "slope" 0.19–0.20, R² -0.24 to -0.22, p_loss 0.49–0.51.

    Of six halves, 0.49–0.51 is three.
    """
    found = summary(r_normals(852, 200 * 40).reshape(200, 40) - RISK_FREE, 4)
    assert found.overfitting == 0.5
    assert 0.19 < found.intercept < 0.20
    assert -0.24 < found.fit < -0.22
    assert found.loss == 0.5


def test_unit_test_of_pbo_with_four_configurations() -> None:
    """Asserted there: p_bo 0 and p_loss 0.5, in two blocks."""
    found = summary(r_normals(852, 20 * 4).reshape(20, 4) - RISK_FREE, 2)
    assert found.overfitting == 0.0
    assert found.loss == 0.5


def test_tutorial_with_twenty_configurations_in_ten_blocks() -> None:
    """Printed: 0.4126984, which is 104 of 252 halves, by mean return, logits strictly below 0.

    (The tutorial was written when the package left out logits of 0; it counts them today.)

    Our function has no such settings; the matrix can be given so that it must count the same:

    - each return twice, a wide gap above and below: the mean stays, every deviation is the gap, so
      that Sharpe ratios rank as means do;
    - two configurations more that always lose: of 22, at the median or below is rank 11, which is
      rank 9 of the 20.
    """
    returns = r_normals(99989, 1560 * 20).reshape(20, 1560).T
    rank = winners(returns, 10, means).rank
    by_mean = (returns[:, np.newaxis] + np.array([[-1e3], [1e3]])).reshape(2 * 1560, 20)
    losers = by_mean[:, :2] - 1.0
    halves = split_halves(10)
    strict = overfitting_probability(np.concatenate([by_mean, losers], axis=1), halves)
    assert strict == pytest.approx(0.4126984, abs=5e-8)
    assert strict == (rank < 10).mean()
    # With logits of 0, as the paper has it and both packages today: 19 halves more.
    at_median = overfitting_probability(by_mean, halves)
    assert at_median == (rank <= 10).mean()
    assert round(252 * (at_median - strict)) == (rank == 10).sum() == 19
