"""The risk gate: what every order passes before it is sent.

Limits of the engine, not of the policy: a hierarchy's own risk control decides before, and stays
where it is. An order passes whole or is stopped whole, with a code that reports explain. Sells are
limited too, by their value, the session's turnover and the orders of a minute: a policy gone wrong
sells as wildly as it buys. `flatten` is the operator's way out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from echelon.config.live import LimitsConfig
from echelon.live.brokers import OrderRequest
from echelon.serving.engine import Account

Mode = Literal["running", "reduce_only", "halted"]
_MINUTE = 60.0

STOPPED = (
    *("halted", "reduce_only", "kill_file", "old_data", "closed", "max_position"),
    *("max_order_value", "max_turnover", "min_cash", "max_orders_per_minute"),
)
"""Codes of why an order was not sent; what they mean is in the catalogues of texts."""


class StoppedOrder(NamedTuple):
    """An order that was not sent; code: of `STOPPED`."""

    order: OrderRequest
    code: str


class Situation(NamedTuple):
    """What orders are judged by. close: symbol → price; seconds: on the clock of the feed.

    barred: a code of `STOPPED` that holds for every order; None: none does
    """

    mode: Mode
    equity: float
    account: Account
    close: Mapping[str, float]
    seconds: float
    barred: str | None = None


@dataclass
class RiskRecord:
    """What the limits remember: equity by session, turnover, orders of the last minute."""

    session: str = ""
    before: float = 0.0  # equity at the end of the session before
    equity: float = 0.0
    peak: float = 0.0
    traded: float = 0.0  # value of the session's orders
    recent: tuple[tuple[float, int], ...] = ()  # (seconds, orders)

    def note_equity(self, session: str, equity: float) -> None:
        """The equity at the close of a bar."""
        if session != self.session:
            self.session, self.before, self.traded = session, self.equity or equity, 0.0
        self.equity, self.peak = equity, max(self.peak, equity)

    def note_order(self, value: float, seconds: float) -> None:
        self.traded += value
        if self.recent and self.recent[-1][0] == seconds:
            self.recent = (*self.recent[:-1], (seconds, self.recent[-1][1] + 1))
        else:
            last = tuple(item for item in self.recent if seconds - item[0] < _MINUTE)
            self.recent = (*last, (seconds, 1))

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> RiskRecord:
        recent = tuple((float(at), int(count)) for at, count in tree["recent"])
        return cls(**{**tree, "recent": recent})


def breached_limits(limits: LimitsConfig, record: RiskRecord) -> Iterator[str]:
    loss = 1.0 - record.equity / record.before if record.before > 0.0 else 0.0
    if limits.max_daily_loss is not None and loss > limits.max_daily_loss:
        yield f"loss of the session {loss:.2%}, limits.max_daily_loss {limits.max_daily_loss:.2%}"
    drawdown = 1.0 - record.equity / record.peak if record.peak > 0.0 else 0.0
    if limits.max_drawdown is not None and drawdown > limits.max_drawdown:
        yield f"drawdown {drawdown:.2%}, limits.max_drawdown {limits.max_drawdown:.2%}"


def pass_orders(
    limits: LimitsConfig, record: RiskRecord, orders: Sequence[OrderRequest], now: Situation
) -> tuple[list[OrderRequest], list[StoppedOrder]]:
    """(orders that may be sent, those that may not)."""
    passed: list[OrderRequest] = []
    stopped: list[StoppedOrder] = []
    recent = sum(count for at, count in record.recent if now.seconds - at < _MINUTE)
    cash, traded = now.account.cash, record.traded
    for order in sorted(orders, key=lambda order: order.side, reverse=True):  # sells bring the cash
        value = order_value(order)
        count = recent + len(passed) + 1
        code = now.barred or _judge(limits, order, now, traded + value, cash - value, count)
        if code is not None:
            stopped.append(StoppedOrder(order, code))
            continue
        passed.append(order)
        traded += value
        cash -= value if order.side == "buy" else -value
    return passed, stopped


def _judge(
    limits: LimitsConfig,
    order: OrderRequest,
    now: Situation,
    traded: float,
    cash: float,
    count: int,
) -> str | None:
    """Why an order may not be sent.

    With it: traded: value of the session's orders; cash: what is left; count: orders of this minute
    """
    value, equity, buys = order_value(order), now.equity, order.side == "buy"
    held = now.account.positions.get(order.symbol, 0.0) * now.close.get(order.symbol, 0.0)
    if now.mode == "halted":
        return "halted"
    if limits.max_order_value is not None and value > limits.max_order_value:
        return "max_order_value"
    if buys and now.mode == "reduce_only":
        return "reduce_only"
    if buys and limits.max_position is not None and held + value > limits.max_position * equity:
        return "max_position"
    if limits.max_turnover is not None and traded > limits.max_turnover * equity:
        return "max_turnover"
    if buys and limits.min_cash and cash < limits.min_cash * equity:
        return "min_cash"
    most = limits.max_orders_per_minute
    return "max_orders_per_minute" if most is not None and count > most else None


def order_value(order: OrderRequest) -> float:
    return order.spend or max(abs(order.wanted), order.shares) * order.price
