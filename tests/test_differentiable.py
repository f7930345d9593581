"""The differentiable market: the kernel's numbers, and gradients that are right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import make_world

from echelon.config.agents import RewardConfig
from echelon.envs.act import Action, ActionRule, weights_of_actions, weights_of_targets
from echelon.envs.books import Books
from echelon.envs.world import World
from echelon.market.differentiable import (
    DiffMarket,
    allowed_trades,
    diff_cap_weights,
    diff_market,
    diff_weights_of_scores,
    diff_weights_of_targets,
    differentiable_step,
    dropped_rules,
)
from echelon.market.rules import SLIPPAGE_FIXED, SLIPPAGE_LINEAR, SLIPPAGE_SQRT

N_ROWS, N_ASSETS, N_BOOKS, N_STEPS = 40, 5, 24, 9
GAIN = 6.0


def eventful_world(seed: int, **changes: Any) -> World:
    """Everything that can happen without impact, and often."""
    rng = np.random.default_rng(seed)
    shape = (N_ROWS, N_ASSETS)
    close = 20.0 * np.exp(np.cumsum(rng.normal(0.0, 0.02, shape), axis=0))
    opens = np.concatenate([close[:1], close[:-1]]) * np.exp(rng.normal(0.0, 0.02, shape))
    gone = np.zeros(shape, dtype=bool)
    gone[22:, 0] = True
    close[22:, 0] = close[21, 0]
    # Asset 1 is listed late; before its first bar its close is 0, and there is no open.
    close[:8, 1] = opens[:9, 1] = 0.0
    happened = rng.random(shape) < 0.1
    settings: dict[str, Any] = {
        "close": close,
        "open": opens,
        "gone": gone,
        "tradable": (rng.random(shape) < 0.85) & (close > 0.0),
        "member": rng.random(shape) < 0.85,
        "limit_up": np.where(rng.random(shape) < 0.1, opens, np.inf),
        "limit_down": np.where(rng.random(shape) < 0.1, close, 0.0),
        "price_limits": True,
        "share_step": np.where(happened, rng.choice([0.5, 1.3, 2.0], shape), 1.0),
        "dividend": np.where(rng.random(shape) < 0.1, 0.3, 0.0),
        "stamp": np.where(np.arange(N_ROWS) % 2 == 0, 0.001, 0.0005),
        "slippage_model": SLIPPAGE_FIXED,
        "slippage": 0.0008,
        "t_plus_one": True,
        "haircut": np.full(N_ASSETS, 0.3),
        "splits": {"train": range(N_ROWS)},
    }
    return make_world(**(settings | changes))


def market_of(world: World, dtype: torch.dtype = torch.float64) -> DiffMarket:
    return diff_market(
        world.rows,
        world.rules,
        fill_open=world.fill_open,
        members=world.present & world.member,
        capital=world.initial_cash,
        dtype=dtype,
    )


def random_targets(rng: np.random.Generator) -> np.ndarray:
    """Targets that are sometimes negative, sum to more or less than 1, or leave assets alone."""
    target = rng.dirichlet(np.ones(N_ASSETS), N_BOOKS) * rng.uniform(0.3, 1.5, (N_BOOKS, 1))
    target[rng.random(target.shape) < 0.1] -= 0.4
    target[rng.random(target.shape) < 0.15] = np.nan
    return target


def new_books(world: World, seed: int) -> tuple[Books, np.random.Generator]:
    """Books of one unit of money at rows by lot."""
    rng = np.random.default_rng(seed)
    span = range(0, N_ROWS)
    books = Books(world, ActionRule("weights"), RewardConfig(), N_BOOKS, span)
    books.reset(rng.integers(3, N_ROWS - N_STEPS - 1, N_BOOKS))
    return books, rng


def exact(books: Books) -> tuple[np.ndarray, np.ndarray]:
    """(weights, cash share) in full precision; `Holdings` rounds to float32."""
    close = books.world.rows.close[books.row]
    return books.book.shares * close / books.value[:, None], books.book.cash / books.value


@pytest.mark.parametrize("fill_open", [True, False])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("seed", range(6))
def test_steps_are_those_of_the_kernel(
    seed: int, fill_open: bool, dtype: torch.dtype, within: float
) -> None:
    world = eventful_world(seed, fill_open=fill_open)
    market = market_of(world, dtype)
    books, rng = new_books(world, seed)
    weights = torch.zeros(N_BOOKS, N_ASSETS, dtype=dtype)
    cash = torch.ones(N_BOOKS, dtype=dtype)
    traded = 0.0
    for _ in range(N_STEPS):
        row = torch.from_numpy(books.row)
        target, before = random_targets(rng), books.value.copy()
        result = books.step(target)
        gain, weights, cash = differentiable_step(
            market, weights, cash, torch.from_numpy(target).to(dtype), row
        )
        true_weights, true_cash = exact(books)
        assert np.abs(gain.numpy() - (result.value / before - 1.0)).max() < within
        assert np.abs(weights.numpy() - true_weights).max() < within
        assert np.abs(cash.numpy() - true_cash).max() < within
        traded += np.abs(result.fills.shares).sum()
    assert traded > 0.0


@pytest.mark.parametrize("fill_open", [True, False])
def test_what_is_allowed_and_the_weights_of_scores_are_those_of_act(fill_open: bool) -> None:
    world = eventful_world(3, fill_open=fill_open)
    market = market_of(world)
    books, rng = new_books(world, 3)
    frozen = only_sold = 0
    for _ in range(N_STEPS):
        held, row = books.holdings(), torch.from_numpy(books.row)
        weights = torch.from_numpy(held.weights.astype(np.float64))
        buy, sell = allowed_trades(market, weights, row)
        assert np.array_equal(buy.numpy(), held.allowed[:, :, Action.BUY])
        assert np.array_equal(sell.numpy(), held.allowed[:, :, Action.SELL])
        scores = np.tanh(rng.normal(0.0, 1.0, (N_BOOKS, N_ASSETS)))
        target = weights_of_actions(scores.astype(np.float32), held)
        found = diff_weights_of_scores(torch.from_numpy(scores), weights, buy, sell, GAIN).numpy()
        assert np.array_equal(np.isnan(found), np.isnan(target))
        assert np.nanmax(np.abs(found - target)) < 1e-6
        frozen += int(np.isnan(target).sum())
        only_sold += int((~buy & sell).sum())
        books.step(target)
    assert frozen > 0
    assert only_sold > 0


@pytest.mark.parametrize("fill_open", [True, False])
def test_gradients_through_several_bars_are_those_of_differences(fill_open: bool) -> None:
    world = eventful_world(1, fill_open=fill_open)
    market = market_of(world)
    rng = np.random.default_rng(1)
    # All assets are listed: at a weight of zero there is no derivative. One is gone from row 22 on.
    row = torch.tensor([10, 13, 19])
    start = torch.from_numpy(rng.dirichlet(np.ones(N_ASSETS + 1), 3))
    weights = start[:, :-1].clone().requires_grad_()
    cash = start[:, -1].clone().requires_grad_()
    scores = torch.from_numpy(rng.normal(0.0, 0.4, (3, 3, N_ASSETS))).requires_grad_()

    def run(weights: Tensor, cash: Tensor, scores: Tensor) -> Tensor:
        gains, at = [], row
        for k in range(3):
            may = allowed_trades(market, weights, at)
            target = diff_weights_of_scores(scores[k], weights, *may, GAIN)
            gain, weights, cash = differentiable_step(market, weights, cash, target, at)
            gains.append(gain)
            at = at + 1
        return torch.stack([*gains, cash])

    assert torch.autograd.gradcheck(run, (weights, cash, scores), eps=1e-7, atol=1e-6)
    run(weights, cash, scores).sum().backward()
    assert scores.grad is not None
    assert scores.grad.abs().max() > 0.0


def test_a_buy_without_enough_cash_costs_what_there_is_and_has_finite_gradients() -> None:
    """Fee 1 %: all of the book into an asset buys 1/1.01 of it, and the return follows."""
    world = make_world(close=[[10.0], [10.0], [11.0]], commission=0.01, fill_open=False, window=1)
    market = market_of(world)
    target = torch.tensor([[1.0], [0.0]], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([[0.0], [0.0]], dtype=torch.float64)
    cash = torch.ones(2, dtype=torch.float64)
    gain, _, cash = differentiable_step(market, weights, cash, target, torch.tensor([1, 1]))
    assert gain.tolist() == pytest.approx([1.1 / 1.01 - 1.0, 0.0])
    assert cash.tolist() == pytest.approx([0.0, 1.0])
    (gradient,) = torch.autograd.grad(gain.sum(), target)
    assert torch.isfinite(gradient).all()


def test_capping_is_that_of_act_and_leaves_nan() -> None:
    target = torch.tensor([[0.9, 0.6, torch.nan], [-0.2, 0.3, 0.1]])
    expected = torch.tensor([[0.6, 0.4, torch.nan], [0.0, 0.3, 0.1]])
    torch.testing.assert_close(diff_cap_weights(target), expected, equal_nan=True)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"min_commission": 1.0}, ["market.min_commission"]),
        ({"participation": 0.1}, ["market.participation"]),
        ({"lot": [100.0, 0.0, 0.0], "min_value": 9.0}, ["market.lots", "market.min_order_value"]),
        ({"t_plus_one": True, "new_session": np.arange(60) % 2 == 0}, ["market.t_plus_one"]),
        ({"t_plus_one": True, "slippage_model": SLIPPAGE_SQRT, "slippage": 0.01}, []),
    ],
)
def test_rules_that_jump_with_an_order_are_left_out_by_name(
    changes: dict[str, Any], keys: list[str]
) -> None:
    world = make_world(**changes)
    assert dropped_rules(world.rows, world.rules) == keys


@pytest.mark.parametrize("fill_open", [True, False])
@pytest.mark.parametrize("model", [SLIPPAGE_LINEAR, SLIPPAGE_SQRT])
def test_impact_is_that_of_a_book_of_the_capital(model: int, fill_open: bool) -> None:
    """Steps of books worth the capital, half in cash, so that no buy is cut; one volume is none."""
    rng = np.random.default_rng(8)
    volume = rng.uniform(500.0, 5_000.0, (N_ROWS, N_ASSETS))
    volume[:, 0] = np.inf
    changes = {"slippage_model": model, "slippage": 0.05, "fill_open": fill_open}
    world = eventful_world(5, volume_open=volume, volume_close=volume, **changes)
    world = replace(world, initial_cash=10_000.0)
    market = market_of(world)
    books, _ = new_books(world, 5)
    weights = torch.zeros(N_BOOKS, N_ASSETS, dtype=torch.float64)
    cash = torch.ones(N_BOOKS, dtype=torch.float64)
    first = rng.dirichlet(np.ones(N_ASSETS), N_BOOKS) * 0.5
    row, target = torch.from_numpy(books.row), torch.from_numpy(first)
    result = books.step(first)
    gain, weights, cash = differentiable_step(market, weights, cash, target, row)
    assert np.abs(gain.numpy() - (result.value / 10_000.0 - 1.0)).max() < 1e-9
    assert np.abs(cash.numpy() - exact(books)[1]).max() < 1e-9
    assert (result.fills.slippage > 0.0).sum() > N_BOOKS
    # And sells: from books that are worth the capital again, and hold what they hold.
    scale = 10_000.0 / books.value
    books.book = books.book._replace(
        cash=books.book.cash * scale, shares=books.book.shares * scale[:, None]
    )
    books.value = np.full(N_BOOKS, 10_000.0)
    weights, cash = (torch.from_numpy(part) for part in exact(books))
    weights.requires_grad_()
    row, target = torch.from_numpy(books.row), weights.detach() * 0.3
    gain, _, _ = differentiable_step(market, weights, cash, target, row)
    result = books.step(target.numpy())
    assert np.abs(gain.detach().numpy() - (result.value / 10_000.0 - 1.0)).max() < 1e-9
    (gradient,) = torch.autograd.grad(gain.sum(), weights)
    assert torch.isfinite(gradient).all()


def test_targets_are_read_as_act_reads_them() -> None:
    world = eventful_world(3)
    market = market_of(world)
    books, rng = new_books(world, 3)
    for _ in range(3):
        held, row = books.holdings(), torch.from_numpy(books.row)
        weights = torch.from_numpy(held.weights)
        may = allowed_trades(market, weights, row)
        wanted = rng.dirichlet(np.ones(N_ASSETS), N_BOOKS).astype(np.float32)
        target = weights_of_targets(wanted, held)
        diff = diff_weights_of_targets(torch.from_numpy(wanted), weights, *may)
        assert np.array_equal(diff.double().numpy(), target, equal_nan=True)
        books.step(target)
    assert np.isnan(target).any()


def test_weights_of_another_precision_and_rows_outside_are_refused() -> None:
    market = market_of(make_world())
    weights, cash = torch.zeros(1, 3, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    with pytest.raises(AssertionError, match="precision"):
        differentiable_step(market, weights.float(), cash, weights, torch.tensor([0]))
    with pytest.raises(AssertionError, match="row of the market"):
        differentiable_step(market, weights, cash, weights, torch.tensor([-1]))
    with pytest.raises(IndexError):
        differentiable_step(market, weights, cash, weights, torch.tensor([59]))
