"""The kernel once more, in slow plain Python: one book, one asset at a time, no arrays.

Written from the rules' text, not from the compiled code; the two must agree on random cases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from echelon.market import MarketRows, Reason, Rules
from echelon.market.rules import SLIPPAGE_FIXED, SLIPPAGE_LINEAR, SLIPPAGE_NONE


@dataclass
class SlowBook:
    cash: float
    shares: list[float]
    locked: list[float]


@dataclass
class SlowFills:
    shares: list[float]
    reason: list[Reason]
    costs: float = 0.0
    price: list[float] = field(default_factory=list)


def slip_of(quantity: float, volume: float, rules: Rules) -> float:
    if rules.slippage_model == SLIPPAGE_NONE:
        return 0.0
    if rules.slippage_model == SLIPPAGE_FIXED:
        return rules.slippage
    if math.isinf(volume):
        return 0.0
    share = 1.0 if volume <= 0 else min(1.0, quantity / volume)
    power = 1.0 if rules.slippage_model == SLIPPAGE_LINEAR else 0.5
    return float(rules.slippage * share**power)


def cap_of(volume: float, rules: Rules) -> float:
    return math.inf if math.isinf(rules.participation) else rules.participation * volume


def fee_of(amount: float, rules: Rules) -> float:
    return max(rules.commission * amount, rules.min_commission) if amount > 0 else 0.0


def cost_of(quantity: float, price: float, volume: float, rules: Rules) -> float:
    amount = quantity * price * (1 + slip_of(quantity, volume, rules))
    return amount + fee_of(amount, rules)


def blocked(market: MarketRows, r: int, n: int, price: float, rules: Rules, buy: bool) -> Reason:
    if market.gone[r, n]:
        return Reason.DELISTED
    if not market.tradable[r, n] or not price > 0:
        return Reason.SUSPENDED
    if rules.price_limits and buy and price >= market.limit_up[r, n] - 1e-6:
        return Reason.LIMIT_UP
    if rules.price_limits and not buy and price <= market.limit_down[r, n] + 1e-6:
        return Reason.LIMIT_DOWN
    return Reason.NONE


def slow_settle(book: SlowBook, market: MarketRows, r: int) -> None:
    for n in range(len(book.shares)):
        if market.new_session[r]:
            book.locked[n] = 0.0
        if market.gone[r, n]:
            book.cash += book.shares[n] * market.close[r, n] * (1 - market.haircut[n])
            book.shares[n] = book.locked[n] = 0.0
        else:
            book.cash += book.shares[n] * market.dividend[r, n]
            book.shares[n] *= market.share_step[r, n]
            book.locked[n] *= market.share_step[r, n]


def slow_trade(
    book: SlowBook,
    shares: list[float],
    spend: list[float],
    market: MarketRows,
    r: int,
    rules: Rules,
    at_open: bool,
) -> SlowFills:
    n_assets = len(shares)
    prices = list((market.open if at_open else market.close)[r])
    volumes = list((market.volume_open if at_open else market.volume_close)[r])
    out = SlowFills([0.0] * n_assets, [Reason.NONE] * n_assets, price=[0.0] * n_assets)
    proceeds = 0.0
    for n in range(n_assets):
        if shares[n] < 0:
            proceeds += _slow_sell(
                book, -shares[n], n, r, prices[n], volumes[n], market, rules, out
            )
    spendable = book.cash + (proceeds if rules.spend_proceeds else 0.0)
    want = [
        _slow_want(shares[n], spend[n], n, r, prices[n], volumes[n], market, rules, out)
        for n in range(n_assets)
    ]
    scale = 1.0
    if not rules.in_order:
        for _ in range(8):
            total = sum(
                cost_of(want[n] * scale, prices[n], volumes[n], rules)
                for n in range(n_assets)
                if want[n]
            )
            if total <= spendable * (1 + 1e-12):
                break
            scale *= spendable / total * (1 - 1e-12)
    spent = claimed = 0.0
    for n in range(n_assets):
        if want[n] <= 0:
            continue
        quantity = want[n] * scale
        lot = market.lot[n]
        if lot > 0:
            quantity = math.floor(quantity / lot + 1e-9) * lot
            quantity = quantity if quantity >= market.min_lot[n] else 0.0
        if scale < 1:
            out.reason[n] = out.reason[n] or Reason.CASH
        elif quantity < want[n]:
            out.reason[n] = out.reason[n] or Reason.LOT
        cost = cost_of(quantity, prices[n], volumes[n], rules) if quantity > 0 else 0.0
        if rules.in_order:
            claim = max(cost, spend[n])
            if claimed + claim > spendable * (1 + 1e-9):
                out.reason[n] = Reason.CASH
                continue
        elif spent + cost > spendable * (1 + 1e-9):
            out.reason[n] = Reason.CASH
            continue
        if quantity <= 0:
            continue
        if quantity * prices[n] < rules.min_value:
            out.reason[n] = Reason.TOO_SMALL
            continue
        if rules.in_order:
            claimed += claim
        spent += cost
        book.shares[n] += quantity
        book.locked[n] += quantity
        out.shares[n] = quantity
        out.price[n] = prices[n] * (1 + slip_of(quantity, volumes[n], rules))
    left = book.cash + proceeds - spent
    book.cash = 0.0 if -1e-9 * max(1.0, spent) <= left < 0 else left
    return out


def _slow_sell(
    book: SlowBook,
    quantity: float,
    n: int,
    r: int,
    price: float,
    volume: float,
    market: MarketRows,
    rules: Rules,
    out: SlowFills,
) -> float:
    held = book.shares[n]
    out.reason[n] = blocked(market, r, n, price, rules, buy=False)
    if out.reason[n] != Reason.NONE:
        return 0.0
    free = held - book.locked[n] if rules.t_plus_one else held
    if quantity > held * (1 + 1e-12):
        out.reason[n] = Reason.NOT_HELD
    if quantity > free and free < held:
        out.reason[n] = Reason.T_PLUS_ONE
    quantity = min(quantity, free)
    if quantity > cap_of(volume, rules):
        quantity = cap_of(volume, rules)
        out.reason[n] = Reason.VOLUME
    if market.lot[n] > 0 and quantity < held:
        whole = math.floor(quantity / market.lot[n] + 1e-9) * market.lot[n]
        if whole < quantity:
            quantity = whole
            out.reason[n] = out.reason[n] or Reason.LOT
    if quantity <= 0:
        return 0.0
    if quantity * price < rules.min_value and quantity < held:
        out.reason[n] = Reason.TOO_SMALL
        return 0.0
    amount = quantity * price * (1 - slip_of(quantity, volume, rules))
    net = amount - fee_of(amount, rules) - amount * market.stamp[r]
    if net < 0:
        out.reason[n] = Reason.TOO_SMALL
        return 0.0
    book.shares[n] -= quantity
    out.shares[n] = -quantity
    out.price[n] = price * (1 - slip_of(quantity, volume, rules))
    return float(net)


def _slow_want(
    shares: float,
    spend: float,
    n: int,
    r: int,
    price: float,
    volume: float,
    market: MarketRows,
    rules: Rules,
    out: SlowFills,
) -> float:
    quantity = max(shares, 0.0)
    if quantity == 0 and spend <= 0:
        return 0.0
    reason = blocked(market, r, n, price, rules, buy=True)
    if reason != Reason.NONE:
        out.reason[n] = reason
        return 0.0
    if spend > 0:
        slip = slip_of(spend / price, volume, rules)
        after_fee = min(spend / (1 + rules.commission), spend - rules.min_commission)
        quantity = max(after_fee, 0.0) / (price * (1 + slip))
    if quantity > cap_of(volume, rules):
        out.reason[n] = Reason.VOLUME
        quantity = cap_of(volume, rules)
    return quantity
