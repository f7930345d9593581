"""Act: the only place where raw actions become target weights or orders.

Two ways to act:

- `discrete`: HOLD, BUY or SELL for each asset. BUY spends `buy_pct` of the cash at the start of
  the step, fee included; SELL sells `sell_pct` of the holding. Buys are served in the order of
  assets while the cash lasts, and what sells bring can be spent from the next step on.
- `weights`: a target share of the book's value for each asset, the rest cash. The number of
  shares is fixed at the decision, w·V/close; NaN leaves an asset as it is.

What may be done at all is known at the decision: see `holdings`. Only members of the universe are
bought, whatever is asked: see `members_only`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from echelon.config import Config
from echelon.envs.world import World
from echelon.market import Book, MarketRows, Orders, Rows, Rules
from echelon.market.rules import after_fee, commission, sellable_lots
from echelon.types import Bools, Floats, Floats32

ActionKind = Literal["discrete", "weights"]

_GAIN = 4.0  # scores in [−1, 1] reach weights up to e⁸ apart
EXPERT_GAIN = 6.0
"""Of an expert's scores, next to which cash has the score 0: all at −1 leave N·e⁻⁶ invested."""


class Action(IntEnum):
    HOLD = 0
    BUY = 1
    SELL = 2


_BUY, _SELL = int(Action.BUY), int(Action.SELL)


@dataclass(frozen=True)
class ActionRule:
    kind: ActionKind
    buy_pct: float = 0.20
    sell_pct: float = 0.50

    @staticmethod
    def from_config(config: Config, kind: ActionKind) -> ActionRule:
        return ActionRule(kind, config.buy_pct, config.sell_pct)


class Holdings(NamedTuple):
    """What E books hold and may do, at the close of their row."""

    weights: Floats32  # [E,N] shares of the book's value
    cash_share: Floats32  # [E]
    allowed: Bools  # [E,N,3] by `Action`; HOLD is always allowed
    value: Floats  # [E] what the books are worth at this close

    def take(self, which: Bools | slice) -> Holdings:
        return Holdings._make(part[which] for part in self)


def rules_for(rules: Rules, kind: ActionKind) -> Rules:
    """The kernel's rules for a way to act."""
    discrete = kind == "discrete"
    return rules._replace(in_order=discrete, spend_proceeds=not discrete)


def holdings(world: World, book: Book, value: Floats, row: Rows, rule: ActionRule) -> Holdings:
    """What the books hold and may do: all of it known at the close of `row`[E].

    BUY needs an asset that is present, a member, traded at this bar and, where fills are at this
    close, below its upper limit; and money for the least order, fee included: a BUY's share of the
    cash, or by target weights the whole book, as sells pay for buys. SELL needs something to sell
    that is worth more than its fee, a trade at this bar and, for fills at this close, a price above
    the lower limit and no T+1.
    """
    shape = book.shares.shape
    weights, cash_share = np.empty(shape, dtype=np.float32), np.empty(shape[0], dtype=np.float32)
    out = Holdings(weights, cash_share, np.empty((*shape, 3), dtype=np.bool_), value)
    money = rule.buy_pct * book.cash if rule.kind == "discrete" else value
    buyable = world.present, world.member
    _holdings(book, value, money, row, world.rows, *buyable, world.fill_open, world.rules, out)
    return out


@njit(cache=True)
def _holdings(
    book: Book,
    value: Floats,
    money: Floats,
    row: Rows,
    market: MarketRows,
    present: Bools,
    member: Bools,
    fill_open: bool,
    rules: Rules,
    out: Holdings,
) -> None:
    cash, shares, locked = book.cash, book.shares, book.locked
    close, tradable, gone, lot = market.close, market.tradable, market.gone, market.lot
    limit_up, limit_down, min_lot = market.limit_up, market.limit_down, market.min_lot
    weights, cash_share, allowed = out.weights, out.cash_share, out.allowed
    limits_now = not fill_open and rules.price_limits
    t_plus_one_now = not fill_open and rules.t_plus_one
    least = max(rules.min_value, 1e-9)
    for e in range(len(cash)):
        r = row[e]
        worth = max(value[e], 1e-12)
        cash_share[e] = cash[e] / worth
        spendable = after_fee(money[e], rules)
        for n in range(shares.shape[1]):
            price, held = close[r, n], shares[e, n]
            weights[e, n] = held * price / worth
            trades = tradable[r, n] and not gone[r, n]
            order = least
            if lot[n] > 0.0 and price > 0.0:
                # As many lots as the least value takes: of one alone there may not be enough.
                lots = math.ceil(least / (lot[n] * price) - 1e-9)
                order = max(lots * lot[n], min_lot[n]) * price
            buy = trades and spendable >= order and present[r, n] and member[r, n]
            free = held - locked[e, n] if t_plus_one_now else held
            worth_free = free * price
            sell = trades and worth_free > commission(worth_free, rules)
            if limits_now:
                buy = buy and price < limit_up[r, n] - 1e-6
                sell = sell and price > limit_down[r, n] + 1e-6
            allowed[e, n, 0] = True
            allowed[e, n, 1] = buy
            allowed[e, n, 2] = sell


def discrete_orders(
    actions: NDArray[np.integer],
    book: Book,
    rule: ActionRule,
    close: Floats,
    lot: Floats,
    min_value: float,
) -> Orders:
    """Orders of HOLD, BUY and SELL: actions[E,N] by `Action`; close[E,N]: at the decision.

    Where the market takes no order as small as `sell_pct` of the holding, SELL is for the least it
    takes: one lot[N], or all. Otherwise the last lot and small remainders could never be sold.
    """
    assert actions.shape == book.shares.shape == close.shape, "actions are not [E,N]"
    orders, money = Orders(*np.zeros((2, *actions.shape))), rule.buy_pct * book.cash
    _discrete_orders(actions, book.shares, money, rule.sell_pct, close, lot, min_value, orders)
    return orders


@njit(cache=True)
def _discrete_orders(
    actions: NDArray[np.integer],
    held: Floats,
    money: Floats,
    sell_pct: float,
    close: Floats,
    lot: Floats,
    min_value: float,
    orders: Orders,
) -> None:
    shares, spend = orders.shares, orders.spend
    for e in range(len(money)):
        for n in range(held.shape[1]):
            if actions[e, n] == _BUY:
                spend[e, n] = money[e]
            elif actions[e, n] == _SELL:
                sold = sell_pct * held[e, n]
                if sold < lot[n]:
                    sold = min(lot[n], held[e, n])
                # The market rounds to lots before it looks at the value.
                whole = sellable_lots(sold, held[e, n], lot[n])
                if whole * close[e, n] < min_value:
                    sold = held[e, n]
                shares[e, n] = -sold if sell_pct > 0.0 else 0.0


def weight_orders(weights: Floats, book: Book, value: Floats, close: Floats) -> Orders:
    """Orders towards target weights[E,N] (NaN: leave as it is); close[E,N]: at the decision."""
    assert weights.shape == book.shares.shape == close.shape, "weights are not [E,N]"
    priced = close > 0
    target = np.where(priced, weights * value[:, None] / np.where(priced, close, 1.0), np.nan)
    shares = np.where(np.isnan(target), 0.0, target - book.shares)
    return Orders(shares, np.zeros_like(shares))


def members_only(orders: Orders, buyable: Bools) -> tuple[Orders, Bools | None]:
    """(orders without buys where not `buyable`[E,N], which they were [E,N]); None: none were."""
    # The kernel knows no universe, and a policy may ignore what is allowed.
    if buyable.all():
        return orders, None
    refused = ~buyable & ((orders.shares > 0.0) | (orders.spend > 0.0))
    kept = Orders(np.where(refused, 0.0, orders.shares), np.where(refused, 0.0, orders.spend))
    return kept, refused


def cap_weights(weights: Floats) -> Floats:
    """Weights[E,N] as they may be: none below zero, together at most 1; NaN stays NaN."""
    floor = np.maximum(weights, 0.0)
    total = np.nansum(floor, axis=1, keepdims=True)
    return np.asarray(floor / np.maximum(total, 1.0))


def weights_of_scores(scores: Floats, held: Holdings, gain: float = _GAIN) -> Floats:
    """Target weights[E,N] of raw scores[E,N+1] in [−1, 1], the last one for cash.

    Assets that can be neither bought nor sold keep their weight; a softmax (`gain`: its sharpness)
    shares out the rest. An asset that can only be sold gets at most the weight it has.
    """
    n_books, n_assets = held.weights.shape
    assert scores.shape == (n_books, n_assets + 1), "scores are not [E,N+1]"
    buy, sell = held.allowed[:, :, Action.BUY], held.allowed[:, :, Action.SELL]
    frozen = ~(buy | sell)
    current = held.weights.astype(np.float64)
    free = 1.0 - np.where(frozen, current, 0.0).sum(axis=1, keepdims=True)
    power = np.exp(gain * (scores - scores.max(axis=1, keepdims=True)))
    power[:, :-1][frozen] = 0.0
    target = np.clip(free, 0.0, 1.0) * power[:, :-1] / power.sum(axis=1, keepdims=True)
    target = np.where(buy, target, np.minimum(target, current))
    return np.where(frozen, np.nan, target)


def weights_of_actions(actions: Floats32, held: Holdings) -> Floats:
    """Target weights[E,N] of an expert's actions[E,N] in [−1, 1]; cash has the score 0."""
    cash = np.zeros((len(actions), 1))
    return weights_of_scores(np.concatenate([actions, cash], axis=1), held, EXPERT_GAIN)


def weights_of_targets(targets: Floats32, held: Holdings) -> Floats:
    """Target weights[E,N] ≥ 0 as they can be.

    What cannot be traded stays (NaN), what can only be sold gets at most the weight it has.
    """
    buy, sell = held.allowed[:, :, Action.BUY], held.allowed[:, :, Action.SELL]
    capped = np.where(buy, targets, np.minimum(targets, held.weights)).astype(np.float64)
    return np.where(buy | sell, capped, np.nan)


def free(held: Holdings) -> Bools:
    """[E,N] assets that can be traded at all: of the others an action does not count."""
    return np.asarray(held.allowed[:, :, Action.BUY] | held.allowed[:, :, Action.SELL])
