"""Returns of rollouts: by hand, against the sum written out, and standardized advantages."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slow_returns import discounted_returns
from torch import Tensor

from echelon.ops.returns import explained_variance, lambda_returns, standardize


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def direct_sum(r_t: Tensor, discount_t: Tensor, v_last: Tensor) -> Tensor:
    """Every return by itself: rewards to come, each times the discounts on the way to it."""
    n_steps, n_books = r_t.shape
    out = torch.zeros_like(r_t)
    for b in range(n_books):
        for t in range(n_steps):
            total, weight = 0.0, 1.0
            for k in range(t, n_steps):
                total += weight * float(r_t[k, b])
                weight *= float(discount_t[k, b])
            out[t, b] = total + weight * float(v_last[b])
    return out


def test_return_by_hand_ends_with_the_bootstrapped_value() -> None:
    # G_2 = 3 + 0.5·8 = 7, G_1 = 2 + 0.5·7 = 5.5, G_0 = 1 + 0.5·5.5 = 3.75
    got = lambda_returns(column(1, 2, 3), column(0.5, 0.5, 0.5), column(9, 9, 9, 8), 1.0)
    assert got[:, 0].tolist() == [3.75, 5.5, 7.0]


def test_return_by_hand_stops_at_a_termination() -> None:
    # The second step ends the episode: nothing of what follows it, nor of the value, comes back.
    got = lambda_returns(column(1, 2, 3), column(0.5, 0.0, 0.5), column(9, 9, 9, 8), 1.0)
    assert got[:, 0].tolist() == [2.0, 2.0, 7.0]


def test_termination_at_the_last_step_drops_the_bootstrap() -> None:
    got = lambda_returns(column(1, 2), column(0.5, 0.0), column(9, 9, 1000), 1.0)
    assert got[:, 0].tolist() == [2.0, 2.0]


def test_books_do_not_mix() -> None:
    rewards = torch.tensor([[1.0, 10.0], [2.0, 20.0]])
    discounts = torch.tensor([[0.5, 0.0], [0.5, 0.1]])
    got = lambda_returns(
        rewards, discounts, torch.tensor([[9.0, 9.0], [9.0, 9.0], [4.0, 100.0]]), 1.0
    )
    assert got.tolist() == [[3.0, 10.0], [4.0, 30.0]]


unit = st.floats(0.0, 1.0, width=32)
money = st.floats(-5.0, 5.0, width=32)


@given(st.integers(1, 9), st.integers(1, 4), st.data())
def test_recursion_equals_the_sum_written_out(
    n_steps: int, n_books: int, data: st.DataObject
) -> None:
    def table(values: st.SearchStrategy[float]) -> Tensor:
        row = st.lists(values, min_size=n_books, max_size=n_books)
        drawn = data.draw(st.lists(row, min_size=n_steps, max_size=n_steps))
        return torch.tensor(drawn, dtype=torch.float64)

    rewards, discounts = table(money), table(st.one_of(unit, st.just(0.0)))
    last = table(money)[0]
    torch.testing.assert_close(
        discounted_returns(rewards, discounts, last),
        direct_sum(rewards, discounts, last),
        rtol=1e-12,
        atol=1e-12,
    )


def generalised_advantages(r_t: Tensor, discount_t: Tensor, v: Tensor, trace: float) -> Tensor:
    """Schulman et al.'s sum: Σ_k (Π γ λ) δ_{t+k}, with δ_t = r_t + γ v_{t+1} − v_t."""
    n_steps, n_books = r_t.shape
    out = torch.zeros_like(r_t)
    for b in range(n_books):
        for t in range(n_steps):
            weight = 1.0
            for k in range(t, n_steps):
                step = float(r_t[k, b]) + float(discount_t[k, b] * v[k + 1, b]) - float(v[k, b])
                out[t, b] += weight * step
                weight *= float(discount_t[k, b]) * trace
    return out


def test_lambda_return_by_hand() -> None:
    # λ = ½, γ = ½. G_1 = 2 + ½·8 = 6; G_0 = 1 + ½·(½·4 + ½·6) = 3.5.
    got = lambda_returns(column(1, 2), column(0.5, 0.5), column(7, 4, 8), 0.5)
    assert got[:, 0].tolist() == [3.5, 6.0]


def test_lambda_one_is_the_discounted_return_and_zero_one_step() -> None:
    rewards, discounts, v = column(1, 2, 3), column(0.5, 0.0, 0.5), column(9, 8, 7, 6)
    whole = lambda_returns(rewards, discounts, v, 1.0)
    assert torch.equal(whole, discounted_returns(rewards, discounts, v[-1]))
    assert torch.equal(lambda_returns(rewards, discounts, v, 0.0), rewards + discounts * v[1:])


@given(st.integers(1, 7), st.integers(1, 3), st.floats(0.0, 1.0), st.integers(0, 2**32 - 1))
def test_lambda_return_less_the_value_is_the_generalised_advantage(
    n_steps: int, n_books: int, trace: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, v = (
        torch.randn(n, n_books, generator=generator, dtype=torch.float64)
        for n in (n_steps, n_steps + 1)
    )
    discounts = 0.9 * (torch.rand(n_steps, n_books, generator=generator, dtype=torch.float64) > 0.2)
    torch.testing.assert_close(
        lambda_returns(rewards, discounts, v, trace) - v[:-1],
        generalised_advantages(rewards, discounts, v, trace),
        rtol=1e-10,
        atol=1e-10,
    )


def test_inputs_are_left_as_they_were() -> None:
    rewards, discounts, v = torch.ones(3, 2), torch.full((3, 2), 0.9), torch.ones(4, 2)
    lambda_returns(rewards, discounts, v, 1.0)
    assert torch.equal(rewards, torch.ones(3, 2))
    assert torch.equal(v, torch.ones(4, 2))


@pytest.mark.parametrize(
    ("rewards", "discounts", "v"),
    [((3,), (3,), ()), ((3, 2), (2, 3), (4, 2)), ((3, 2), (3, 2), (3, 2)), ((3, 2), (3, 2), (4,))],
)
def test_wrong_shapes_are_refused(
    rewards: tuple[int, ...], discounts: tuple[int, ...], v: tuple[int, ...]
) -> None:
    with pytest.raises(AssertionError, match=r"\[T,B\]|\[T\+1,B\]"):
        lambda_returns(torch.zeros(rewards), torch.zeros(discounts), torch.zeros(v), 1.0)


def test_standardized_has_mean_zero_and_deviation_one_over_all_axes() -> None:
    # Mean 3, population variance (4 + 1 + 0 + 9)/4 = 3.5.
    got = standardize(torch.tensor([[1.0, 2.0], [3.0, 6.0]], dtype=torch.float64))
    wanted = torch.tensor([[-2.0, -1.0], [0.0, 3.0]], dtype=torch.float64) / 3.5**0.5
    torch.testing.assert_close(got, wanted, rtol=1e-7, atol=0.0)
    assert float(got.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(got.square().mean()) == pytest.approx(1.0, abs=1e-7)


def test_standardized_equal_values_are_zero_and_finite() -> None:
    assert standardize(torch.full((2, 3), 4.0)).tolist() == [[0.0] * 3] * 2
    assert standardize(torch.tensor([7.0])).tolist() == [0.0]


def test_explained_variance_by_hand() -> None:
    # G = 4, 6, 8, 10: variance 5. G − V = 1, −1, 1, −1: variance 1.
    returns, values = torch.tensor([[4.0, 6.0], [8.0, 10.0]]), torch.tensor([[3.0, 7.0], [7.0, 11]])
    assert explained_variance(returns, values) == pytest.approx(1.0 - 1.0 / 5.0)
    assert explained_variance(returns, returns + 3.0) == 1.0  # a constant error is not variance
    assert explained_variance(returns, torch.full_like(returns, -2.0)) == 0.0
    assert explained_variance(returns, 3.0 * returns) == pytest.approx(1.0 - 4.0)


def test_explained_variance_of_returns_that_do_not_vary_is_zero() -> None:
    same = torch.full((3, 2), 0.1)
    assert explained_variance(same, torch.rand(3, 2)) == 0.0
    assert explained_variance(same[:1, :1], same[:1, :1]) == 0.0


def test_explained_variance_of_nearly_constant_returns_is_a_number() -> None:
    returns = torch.tensor([0.0, 1e-30])
    assert math.isfinite(explained_variance(returns, torch.tensor([0.0, 1e10])))


def test_explained_variance_of_returns_that_are_no_numbers_is_none() -> None:
    assert math.isnan(explained_variance(torch.tensor([1.0, math.nan]), torch.zeros(2)))
