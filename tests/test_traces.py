"""Ratios and traces of remembered actions, distance of policies, and who made the data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from densities import squashed_log_prob
from memories import sequences
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from echelon.agents.expert import draw_evenly
from echelon.agents.replay import Replay, Transitions
from echelon.ops.squashed import (
    by_source,
    clip_log_std,
    gaussian_log_prob,
    kl_per_dimension,
    log_ratio,
    too_far,
    trace_coefficients,
)

SHAPE = (4, 3, 5)  # L, B, A


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or SHAPE), generator=generator, dtype=torch.float64)


def some_free(seed: int = 9) -> Tensor:
    free = normal(seed) > 0.0
    free[0, 0] = False  # nothing can be traded
    free[1, 1] = True
    return free


def test_log_ratio_by_hand_leaves_masked_dimensions_out() -> None:
    # log N(1; 0, 1) = −½ − ½ log 2π; μ was N(1, 1): −½ log 2π. The second dimension is not free.
    raw, mean = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 50.0]])
    stored = torch.tensor([-0.5 * math.log(2.0 * math.pi)])
    got = log_ratio(raw, stored, mean, torch.zeros(1, 2), torch.tensor([[True, False]]))
    assert float(got) == pytest.approx(-0.5)


def test_log_ratio_is_that_of_the_squashed_actions() -> None:
    free = some_free()
    raw, mu, pi = normal(1) * free, normal(2), normal(3)
    mu_std, pi_std = 0.3 * normal(4), 0.3 * normal(5)
    stored = gaussian_log_prob((raw - mu) * torch.exp(-mu_std), mu_std, free)
    got = log_ratio(raw, stored, pi, pi_std, free)
    squashed = squashed_log_prob(raw, pi, pi_std, free) - squashed_log_prob(raw, mu, mu_std, free)
    assert got.shape == (4, 3)
    torch.testing.assert_close(got, squashed, rtol=1e-10, atol=1e-10)
    assert float(got[0, 0]) == 0.0  # nothing to choose: the same in any policy


def test_log_ratio_of_actions_by_lot_is_against_the_even_density() -> None:
    free = some_free()
    lot = draw_evenly(free, torch.Generator().manual_seed(0))
    mean, log_std = normal(3).float(), 0.3 * normal(5).float()
    got = log_ratio(lot.raw, lot.raw_log_prob, mean, log_std, free)
    wanted = squashed_log_prob(lot.raw, mean, log_std, free) - math.log(0.5) * free.sum(-1)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_log_ratio_bounds_the_spread_as_the_policy_does() -> None:
    raw, mean, beyond = normal(1), normal(2), torch.full(SHAPE, 9.0, dtype=torch.float64)
    stored = torch.zeros(SHAPE[:-1], dtype=torch.float64)
    assert torch.equal(
        log_ratio(raw, stored, mean, beyond), log_ratio(raw, stored, mean, clip_log_std(beyond))
    )


def remembered(steps: int, books: int, n_assets: int) -> tuple[Replay, Tensor, Tensor]:
    """A replay of one policy that depends on the row: mean[row,A], log_std[row,A]."""
    means, log_stds = normal(1, steps, n_assets).float(), 0.5 * normal(2, steps, n_assets).float()
    replay, rng = Replay(steps * books, n_assets), np.random.default_rng(0)
    nothing, zeros = np.zeros(books, np.bool_), np.zeros((books, n_assets), np.float32)
    for t in range(steps):
        free = torch.from_numpy(rng.random((books, n_assets)) < 0.7)
        noise = torch.from_numpy(rng.standard_normal((books, n_assets)).astype(np.float32))
        raw = (means[t] + log_stds[t].exp() * noise) * free
        replay.add(
            Transitions(
                row=np.full(books, t, np.int32),
                weights=zeros,
                cash=zeros[:, 0],
                free=free.numpy(),
                raw=raw.numpy(),
                raw_log_prob=gaussian_log_prob(noise, log_stds[t].expand(books, -1), free).numpy(),
                reward=zeros[:, 0],
                terminated=nothing,
                truncated=nothing,
                next_weights=zeros,
                next_cash=zeros[:, 0],
                next_free=free.numpy(),
            )
        )
    return replay, means, log_stds


def test_sequences_of_the_same_policy_are_believed_whole() -> None:
    replay, means, log_stds = remembered(steps=12, books=3, n_assets=6)
    found = sequences(replay, 8, 5, np.random.default_rng(1))

    def time_first(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values.swapaxes(0, 1)))

    rows = time_first(found.row).long()
    raw, stored, free = (time_first(x) for x in (found.raw, found.raw_log_prob, found.free))
    ratio = log_ratio(raw, stored, means[rows], log_stds[rows], free)
    assert ratio.shape == (5, 8)
    torch.testing.assert_close(ratio, torch.zeros(5, 8), rtol=0.0, atol=2e-5)
    c_t = trace_coefficients(ratio, 0.9)
    torch.testing.assert_close(c_t, torch.full((5, 8), 0.9), rtol=1e-4, atol=0.0)
    moved = log_ratio(raw, stored, means[rows] + 0.5, log_stds[rows], free)
    assert float(trace_coefficients(moved, 0.9).mean()) < 0.8


def test_trace_coefficient_is_bounded_by_lambda_whatever_the_ratio() -> None:
    got = trace_coefficients(torch.tensor([-math.inf, math.log(0.5), 0.0, 3.0, 1e30]), 0.8)
    assert got.tolist() == pytest.approx([0.0, 0.4, 0.8, 0.8, 0.8])
    for bad in (-0.1, 1.01, math.nan):
        with pytest.raises(ValueError, match="trace"):
            trace_coefficients(torch.zeros(2), bad)


def test_trace_coefficients_and_ratios_carry_no_gradient() -> None:
    mean, log_std = normal(1).requires_grad_(), normal(2).requires_grad_()
    ratio = log_ratio(normal(3), normal(4, 4, 3), mean, log_std)
    assert not ratio.requires_grad
    assert not trace_coefficients(ratio, 1.0).requires_grad
    assert not kl_per_dimension(mean, log_std, mean + 1.0, log_std).requires_grad


def test_divergence_by_hand_is_the_mean_over_free_dimensions() -> None:
    # KL(N(0, 1) ‖ N(1, 1)) = ½; KL(N(0, 1) ‖ N(0, 4)) = log 2 + ⅛ − ½; the third is not free.
    mean, log_std = torch.zeros(1, 3), torch.zeros(1, 3)
    other_mean, other = torch.tensor([[1.0, 0.0, 70.0]]), torch.tensor([[0.0, math.log(2), 1.0]])
    free = torch.tensor([[True, True, False]])
    got = kl_per_dimension(mean, log_std, other_mean, other, free)
    assert float(got) == pytest.approx((0.5 + math.log(2.0) - 0.375) / 2.0)


def test_divergence_equals_that_of_torch() -> None:
    means, stds = (normal(1), normal(2)), (0.5 * normal(3), 0.5 * normal(4))
    wanted = kl_divergence(Normal(means[0], stds[0].exp()), Normal(means[1], stds[1].exp()))
    got = kl_per_dimension(means[0], stds[0], means[1], stds[1])
    torch.testing.assert_close(got, wanted.mean(-1), rtol=1e-12, atol=1e-12)
    free = some_free()
    got = kl_per_dimension(means[0], stds[0], means[1], stds[1], free)
    shown = torch.where(free, wanted, math.nan).nanmean(-1).nan_to_num(0.0)
    torch.testing.assert_close(got, shown, rtol=1e-12, atol=1e-12)
    assert float(got[0, 0]) == 0.0


def test_divergence_of_a_policy_from_itself_is_zero_and_never_negative() -> None:
    mean, log_std = normal(1).float(), normal(2).float()
    assert kl_per_dimension(mean, log_std, mean, log_std).abs().max() == 0.0
    near = kl_per_dimension(mean, log_std, mean, log_std + 1e-4)
    # ½ (e^{−2d} − 1) + d ≈ d²
    torch.testing.assert_close(near, torch.full_like(near, 1e-8), rtol=0.3, atol=0.0)


@pytest.mark.parametrize("n_assets", [5, 50, 500])
def test_distance_per_dimension_does_not_grow_with_their_number_where_the_ratio_vanishes(
    n_assets: int,
) -> None:
    mu, log_std = torch.zeros(1, 400, n_assets), torch.zeros(1, 400, n_assets)
    pi = mu + 0.4
    raw = normal(7, 1, 400, n_assets).float()
    kl = kl_per_dimension(pi, log_std, mu, log_std)
    torch.testing.assert_close(kl, torch.full((1, 400), 0.08), rtol=1e-5, atol=0.0)
    c = trace_coefficients(log_ratio(raw, gaussian_log_prob(raw, log_std), pi, log_std), 1.0)
    # E min(1, π/μ) of two Gaussians at distance d is 2 Φ(−d/2) = erfc(d / √8).
    wanted = math.erfc(0.4 * math.sqrt(n_assets) / math.sqrt(8.0))
    assert float(c.mean()) == pytest.approx(wanted, abs=0.08)


def test_only_shared_steps_are_dropped_and_unknown_distance_is_far() -> None:
    kl = torch.tensor([0.1, 0.3, 0.3, math.nan, math.nan, 0.2])
    shared = torch.tensor([True, True, False, True, False, True])
    assert too_far(kl, shared, 0.2).tolist() == [False, True, False, True, False, False]


def test_summary_by_source_by_hand() -> None:
    source = torch.tensor([0, 2, 2, 0, 2])
    c_t = torch.tensor([1.0, 0.5, 0.25, 0.5, 0.0])
    dropped = torch.tensor([False, True, False, False, True])
    got = by_source(source, c_t, dropped, 4)
    assert got.steps.tolist() == [2, 0, 3, 0]
    assert got.mean_trace[[0, 2]].tolist() == [0.75, 0.25]
    assert got.dropped_share[[0, 2]].tolist() == pytest.approx([0.0, 2.0 / 3.0])
    assert got.mean_trace[[1, 3]].isnan().all()
    assert got.dropped_share[[1, 3]].isnan().all()


def test_summary_takes_one_source_for_a_whole_sequence() -> None:
    c_t, dropped = torch.rand(4, 3), torch.rand(4, 3) < 0.5
    source = torch.tensor([1, 0, 1])
    whole = by_source(source.expand(4, 3), c_t, dropped, 2)
    for a, b in zip(by_source(source, c_t, dropped, 2), whole, strict=True):
        assert torch.equal(a, b)
    assert whole.steps.tolist() == [4, 8]


def test_summary_refuses_strange_sources() -> None:
    c_t, dropped = torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="from 0 to 1, found 0 to 2"):
        by_source(torch.tensor([0, 2]), c_t, dropped, 2)
    with pytest.raises(ValueError, match="found -1 to 0"):
        by_source(torch.tensor([0, -1]), c_t, dropped, 2)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(AssertionError, match="differ in shape"):
        log_ratio(normal(1), normal(1, 4, 3), normal(1, 4, 3, 2), normal(1))
    with pytest.raises(AssertionError, match="raw_log_prob"):
        log_ratio(normal(1), normal(1), normal(1), normal(1))
    with pytest.raises(AssertionError, match="free should be bool"):
        kl_per_dimension(normal(1), normal(1), normal(1), normal(1), normal(1))
