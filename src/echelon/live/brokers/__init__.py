"""Brokers: where orders go. One protocol, and one contract test that every adapter passes.

An order is known by its id, which follows from the decision (`live.engine`): a venue that gets the
same id again answers about the order it has, and never makes a second one. An answer that did not
come is `unknown`, not `rejected`: the order stays in flight until `orders` says what became of it.

Adding a broker: a file here with a function that opens it, and its line in `BROKERS`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from echelon.config.live import LiveConfig
from echelon.data.stream import BarSet
from echelon.errors import EchelonError, UsageError, shorten
from echelon.serving.bundle import Bundle
from echelon.serving.engine import Account

log = logging.getLogger(__name__)

OrderState = Literal["accepted", "partial", "filled", "cancelled", "rejected", "unknown"]
OPEN: frozenset[OrderState] = frozenset({"accepted", "partial", "unknown"})
"""States in which something may still be filled."""


class BrokerError(EchelonError):
    """The venue did not answer, or not in a way that can be understood; nothing is known of it."""


class OrderRequest(NamedTuple):
    """An order to send. shares > 0, whole lots where the market has such; price: at the decision.

    wanted, spend: what the kernel gets for the asset (`market.Orders`), which a simulated venue
    fills by: shares to buy (positive) or sell before lots and cash, or money to buy for
    limit: the worst price to trade at; None: any. A simulated venue fills as backtests do, by any
    """

    id: str
    symbol: str
    side: Literal["buy", "sell"]
    shares: float
    price: float
    wanted: float = 0.0
    spend: float = 0.0
    limit: float | None = None


class OrderStatus(NamedTuple):
    """What a venue says of an order. filled: shares so far; reason: of what was not filled."""

    id: str
    state: OrderState
    filled: float = 0.0
    reason: str | None = None


class VenueFill(NamedTuple):
    """A trade at the venue; trade_id: its own, which no other fill has.

    shares: bought (positive) or sold; costs in money, ≥ 0, slippage inside the price
    """

    trade_id: str
    order_id: str
    symbol: str
    shares: float
    price: float
    commission: float = 0.0
    stamp: float = 0.0
    slippage: float = 0.0
    time: str = ""


class Broker(Protocol):
    """Where orders go. Every call may raise BrokerError, after which nothing is known."""

    name: str

    def submit(self, orders: Sequence[OrderRequest]) -> list[OrderStatus]:
        """Send orders, one answer each; `unknown`: no answer came. Sent again: the same answer."""

    def cancel(self, ids: Sequence[str]) -> None:
        """Ask for orders to be cancelled; `orders` says what came of it."""

    def orders(self, ids: Sequence[str]) -> dict[str, OrderStatus]:
        """What became of orders, by id; one that the venue never got is missing."""

    def open_orders(self) -> list[OrderStatus]:
        """All that may still be filled, ours or not."""

    def fills(self, after: str) -> tuple[list[VenueFill], str]:
        """(fills behind a cursor in order, the cursor behind them); "" is before the first."""

    def account(self) -> Account:
        """What is held now."""

    def close(self) -> None:
        """Let go of what is open; nothing is cancelled."""


class OwnSymbols:
    """The bundle's symbols; what else an account holds or trades is left out, and told once."""

    def __init__(self, venue: str, names: Iterable[str]) -> None:
        self.names, self._venue, self._foreign = frozenset(names), venue, set[str]()

    def has(self, symbol: str) -> bool:
        if symbol in self.names:
            return True
        if symbol not in self._foreign:
            self._foreign.add(symbol)
            what = "is not in the bundle's universe: it is left out"
            log.warning("%s: %s %s", self._venue, shorten(symbol, 40), what)
        return False


class Shown(NamedTuple):
    """What bars did at a simulated venue, as of these bars.

    statuses: of the orders that they ended; cursor: behind the fills, as of `Broker.fills`
    """

    fills: list[VenueFill]
    account: Account
    statuses: list[OrderStatus]
    cursor: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "fills": [fill._asdict() for fill in self.fills],
            "account": self.account._asdict(),
            "statuses": [status._asdict() for status in self.statuses],
            "cursor": self.cursor,
        }

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Shown:
        fills = [VenueFill(**fill) for fill in body["fills"]]
        said = statuses(body["statuses"])
        return cls(fills, account_of(body["account"]), said, body["cursor"])


@runtime_checkable
class SimulatedVenue(Protocol):
    """A venue that fills by the bars it is shown: paper trading."""

    def show_bars(self, bars: BarSet) -> Shown:
        """Fill what was ordered before at these bars. Shown again: the same answer as before."""


def statuses(values: Iterable[Mapping[str, Any]]) -> list[OrderStatus]:
    return [OrderStatus(**value) for value in values]


def account_of(body: Mapping[str, Any]) -> Account:
    return Account(body["cash"], body["positions"], body["locked"])


class BrokerRequest(NamedTuple):
    """What a broker is opened by.

    text: as it was named; address: what stands behind the name and a colon, "" without one
    journal: the engine's, beside which a broker may keep a file of its own
    store, until: the history that a new paper account begins behind, as of `LiveEngine.open`
    """

    text: str
    address: str
    bundle: Bundle
    journal: Path
    store: Path
    until: date | None
    config: LiveConfig


BROKERS: Mapping[str, str] = {
    "paper": "echelon.live.brokers.remote:open_paper",
    "alpaca": "echelon.live.brokers.alpaca:open_alpaca",
    "sheet": "echelon.live.brokers.sheet:open_sheet",
}
"""Name → module and function (BrokerRequest) → Broker; imported when it is asked for."""


def open_broker(
    text: str,
    bundle: Bundle,
    journal: Path,
    store: Path,
    until: date | None = None,
    config: LiveConfig | None = None,
) -> Broker:
    """The broker that `--broker` names: NAME, or NAME:ADDRESS."""
    name, _, address = text.partition(":")
    if name not in BROKERS:
        raise UsageError(f"--broker {text}: there are {', '.join(BROKERS)}.")
    module, function = BROKERS[name].split(":")
    request = BrokerRequest(text, address, bundle, journal, store, until, config or LiveConfig())
    broker: Broker = getattr(import_module(module), function)(request)
    return broker
