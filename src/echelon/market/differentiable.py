"""The kernel once more, in torch and differentiable: target weights in, the bar's return out.

What a book makes of target weights can be differentiated in them, over several bars. This is `step`
of the kernel and `weight_orders` of `act`, with the book's value taken as 1 and shares counted in
what they were worth at the decision.

One step of a book that stands at row t, filled at the next open:

1. Targets are cut at zero and scaled to a sum of at most 1; the number of shares is fixed here.
2. What happens overnight: dividends, splits, delistings.
3. Sells at the open of t + 1, less slippage, commission and stamp duty.
4. Buys together, scaled by one factor to the cash there is, costs inside; the rest stays cash.
5. The book is worth what it is at the close of t + 1; weights are taken of that.

Filled at the same close, 3 and 4 happen at the close of t, before 2.

Whether an asset trades, is at its limit, is a member or is gone does not depend on the order, so
these rules are masks. Impact moves the price as if every book were worth `capital`: this is smooth,
and what large books pay is learned (buys that the cash scales down pay it at their full size).
What jumps with an order's size has no gradient, and is left out: `dropped_rules` says what.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from echelon.market.rules import SLIPPAGE_FIXED, SLIPPAGE_LINEAR, SLIPPAGE_SQRT, Rules
from echelon.market.types import MarketRows
from echelon.types import Bools, Floats

_LIMIT = 1e-6  # as in the kernel: limits and prices are whole cents in binary


class DiffMarket(NamedTuple):
    """What a step from row t to t + 1 needs, for every t: R = T − 1 steps of N assets."""

    fill: Tensor  # [R,N] price at the fill over the close of t, splits inside; 0 without one
    mark: Tensor  # [R,N] the same of the close of t + 1
    income: Tensor  # [R,N] cash per unit of weight held: dividends, or what a delisting leaves
    alive: Tensor  # [R,N] 0 where the asset is delisted at t + 1, 1 elsewhere
    buyable: Tensor  # [R,N] whether the fill takes place, 1 or 0; not all of it is known at t
    sellable: Tensor  # [R,N]
    may_buy: Tensor  # [R,N] what is known of it at the close of t; see `act.holdings`
    may_sell: Tensor  # [R,N]
    stamp: Tensor  # [R] duty on sells at the fill
    commission: float  # share of the traded amount, per side, as is the next
    slippage: float  # of the price, whatever the order
    depth: Tensor | None  # [R,N] share of the volume that a book's whole value is; None: no impact
    impact: float  # share of the price by which an order as large as the volume moves it
    power: float  # of its share of the volume by which an order moves the price
    fill_open: bool  # orders fill at the next open; otherwise at the close they were decided on


def dropped_rules(rows: MarketRows, rules: Rules) -> list[str]:
    """Settings in force that the differentiable market leaves out: they jump with orders."""
    intraday = not bool(np.asarray(rows.new_session)[1:].all())
    dropped = {
        "market.lots": bool((rows.lot > 0).any()),
        "market.participation": math.isfinite(rules.participation),
        "market.min_commission": rules.min_commission > 0,
        "market.min_order_value": rules.min_value > 0,
        "market.t_plus_one": rules.t_plus_one and intraday,
    }
    return [name for name, in_force in dropped.items() if in_force]


def diff_market(
    rows: MarketRows,
    rules: Rules,
    *,
    fill_open: bool,
    members: Bools,
    capital: float,
    dtype: torch.dtype = torch.float32,
) -> DiffMarket:
    """Lay a market out for differentiable steps.

    members[T,N]: may be bought, as decided there; capital: what a book is worth, for impact
    """
    assert not rules.in_order, "the 20/50 rule is not one of target weights"
    assert rules.spend_proceeds, "target weights spend what sells bring"
    close, after = rows.close[:-1], rows.close[1:]
    split, gone = rows.share_step[1:], rows.gone[1:]
    at = slice(1, None) if fill_open else slice(None, -1)
    price = (rows.open if fill_open else rows.close)[at]
    growth = _over(after, close)
    left = np.where(gone, growth * (1.0 - rows.haircut), _over(rows.dividend[1:], close))
    slippage = rules.slippage if rules.slippage_model == SLIPPAGE_FIXED else 0.0
    stamp = rows.stamp[at]
    pays = (1.0 - slippage) * (1.0 - rules.charge_share - stamp) >= 0.0
    traded = rows.tradable[at] & ~rows.gone[at] & (price > 0.0) & (close > 0.0)
    below_up = above_down = np.ones_like(traded)
    if rules.price_limits:
        below_up = price < rows.limit_up[at] - _LIMIT
        above_down = price > rows.limit_down[at] + _LIMIT
    known = rows.tradable[:-1] & ~rows.gone[:-1] & (close > 0.0)
    now_up, now_down = (below_up, above_down) if not fill_open else (True, True)

    power = {SLIPPAGE_LINEAR: 1.0, SLIPPAGE_SQRT: 0.5}.get(rules.slippage_model)

    def numbers(values: Floats | Bools) -> Tensor:
        return torch.from_numpy(np.array(values, dtype=np.float64)).to(dtype)

    return DiffMarket(
        fill=numbers(_over(price * split, close) if fill_open else (close > 0.0)),
        mark=numbers(growth * split),
        income=numbers(left),
        alive=numbers(~gone),
        buyable=numbers(traded & below_up & members[:-1]),
        sellable=numbers(traded & above_down & pays[:, None]),
        may_buy=torch.from_numpy(known & members[:-1] & now_up),
        may_sell=torch.from_numpy(known & now_down),
        stamp=numbers(stamp),
        commission=rules.charge_share,
        slippage=slippage,
        depth=None if power is None else numbers(_depth(rows, capital, at)),
        impact=0.0 if power is None else rules.slippage,
        power=power or 0.0,
        fill_open=fill_open,
    )


def _depth(rows: MarketRows, capital: float, at: slice) -> Floats:
    """[R,N] the share of the volume at the fill that `capital` is; 0 where it is unbounded."""
    opens = at.start is not None
    volume = (rows.volume_open if opens else rows.volume_close)[at]
    split = rows.share_step[1:] if opens else np.ones_like(volume)
    return _over(capital * split, rows.close[:-1]) / np.maximum(volume, 1e-12)


def differentiable_step(
    market: DiffMarket, weights: Tensor, cash: Tensor, target: Tensor, row: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Take books from the close of `row`[E] to the next: (gain[E], weights[E,N], cash[E]) there.

    weights[E,N], cash[E]: shares of the book's value, sum 1; target[E,N]: NaN leaves an asset as it
    is; gradients flow from everything given to everything returned
    """
    shape = (len(row), market.fill.shape[1])
    assert weights.shape == target.shape == shape, "weights and target are not [E,N]"
    assert cash.shape == shape[:1], "cash is not [E]"
    assert int(row.min()) >= 0, "row is not a row of the market"
    assert weights.dtype == market.fill.dtype, "weights are of another precision than the market"
    income, alive = market.income[row], market.alive[row]
    hold = torch.isnan(target)
    change = torch.where(hold, 0.0, diff_cap_weights(target) - weights)
    if market.fill_open:
        cash = cash + (weights * income).sum(-1)
        weights, cash = _trade_weights(market, weights * alive, cash, change, row)
    else:
        weights, cash = _trade_weights(market, weights, cash, change, row)
        cash = cash + (weights * income).sum(-1)
        weights = weights * alive
    worth = weights * market.mark[row]
    value = cash + worth.sum(-1)
    return value - 1.0, worth / value[:, None], cash / value


def _trade_weights(
    market: DiffMarket, weights: Tensor, cash: Tensor, change: Tensor, row: Tensor
) -> tuple[Tensor, Tensor]:
    """(holdings[E,N], cash[E]) after orders `change`[E,N] were filled; sells pay for buys."""
    price = market.fill[row]
    sold = torch.relu(-change) * market.sellable[row]
    wanted = torch.relu(change) * market.buyable[row]
    proceeds = (sold * price * (1.0 - _slippage(market, sold, row))).sum(-1)
    proceeds = proceeds * (1.0 - market.commission - market.stamp[row])
    cost = (wanted * price * (1.0 + _slippage(market, wanted, row))).sum(-1)
    cost = cost * (1.0 + market.commission)
    spendable = (cash + proceeds).clamp(min=0.0)
    fits = cost <= spendable
    # The divisor is not zero where the quotient is taken, nor where its gradient is thrown away.
    scale = torch.where(fits, 1.0, spendable / torch.where(fits, 1.0, cost))
    bought = wanted * scale[:, None]
    left = cash + proceeds - cost * scale
    return weights - sold + bought, torch.where(fits, left, torch.zeros_like(left))


def _slippage(market: DiffMarket, amount: Tensor, row: Tensor) -> Tensor | float:
    """How far prices move against orders of these `amount`[E,N] of the book, shares of them."""
    if market.depth is None:
        return market.slippage
    # At zero the root has no gradient, and an order of nothing pays nothing.
    share = (amount * market.depth[row]).clamp(1e-18, 1.0)
    return market.impact * share**market.power


def diff_cap_weights(target: Tensor) -> Tensor:
    """As `act.cap_weights`, of targets[E,N]; NaN stays NaN, and counts for nothing."""
    hold = torch.isnan(target)
    floor = torch.relu(torch.where(hold, 0.0, target))
    total = floor.sum(-1, keepdim=True)
    return torch.where(hold, torch.nan, floor / total.clamp(min=1.0))


def allowed_trades(market: DiffMarket, weights: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """(buy[E,N], sell[E,N]): what books with `weights`[E,N] at `row`[E] may do, as in `act`."""
    return market.may_buy[row], market.may_sell[row] & (weights > 0.0)


def diff_weights_of_scores(
    scores: Tensor, weights: Tensor, buy: Tensor, sell: Tensor, gain: float
) -> Tensor:
    """As `act.weights_of_scores`, of scores[E,N] and weights[E,N] held; cash has the score 0."""
    frozen = ~(buy | sell)
    free = 1.0 - torch.where(frozen, weights, 0.0).sum(-1, keepdim=True)
    exponents = torch.nn.functional.pad((gain * scores).masked_fill(frozen, -torch.inf), (0, 1))
    target = free.clamp(0.0, 1.0) * torch.softmax(exponents, -1)[:, :-1]
    target = torch.where(buy, target, torch.minimum(target, weights))
    return torch.where(frozen, torch.nan, target)


def diff_weights_of_targets(target: Tensor, weights: Tensor, buy: Tensor, sell: Tensor) -> Tensor:
    """As `act.weights_of_targets`, of target[E,N] and weights[E,N] held."""
    return torch.where(
        buy | sell, torch.where(buy, target, torch.minimum(target, weights)), torch.nan
    )


def _over(above: Floats, below: Floats) -> Floats:
    """Quotient[R,N], 0 where `below` is not positive."""
    out = np.zeros_like(below)
    return np.divide(above, below, out=out, where=below > 0.0)
