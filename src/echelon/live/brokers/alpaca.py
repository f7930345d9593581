"""`alpaca`: orders to an account at Alpaca, by alpaca-py; the paper account unless told twice.

An order's id is its client_order_id, so the venue refuses a second one with it:

1. `submit` asks once. A refusal is believed only after the venue was asked for the id: what it
   refuses may be the copy of an order that it has. Without an answer the order is `unknown`, and
   those behind it are not sent; the engine asks what became of them and sends the missing.
2. `orders` looks up by client_order_id. What the venue does not know never got there.
3. `fills` are the account's FILL activities, by the venue's id of each. The venue books some a
   little late and out of order, so the cursor is the last activity that is old enough, and those
   behind it that were given out already. Where an order says that it was filled by more than the
   activities add up to, they are not all there yet: BrokerError, and the engine asks again.

The live account takes both the name `alpaca:live` and ECHELON_ALPACA_LIVE=yes.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, time, timedelta
from decimal import ROUND_DOWN, Decimal
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar
from zoneinfo import ZoneInfo

from echelon.errors import UsageError, shorten
from echelon.files import Closing
from echelon.live.alpaca_api import (
    SECONDS,
    Keys,
    Refused,
    ask,
    load_alpaca,
    override_url,
    prepare_client,
)
from echelon.live.brokers import (
    OPEN,
    BrokerError,
    BrokerRequest,
    OrderRequest,
    OrderState,
    OrderStatus,
    OwnSymbols,
    VenueFill,
)
from echelon.serving.engine import Account
from echelon.types import Freq

log = logging.getLogger(__name__)

T = TypeVar("T")
LIVE_VARIABLE = "ECHELON_ALPACA_LIVE"
_STATES: Mapping[str, OrderState] = {
    "filled": "filled",
    "canceled": "cancelled",
    "expired": "cancelled",
    "replaced": "cancelled",
    "rejected": "rejected",
}
"""The venue's final states; every other may still be filled."""
_NEW_YORK = ZoneInfo("America/New_York")
_AUCTION_FROM, _AUCTION_UNTIL = time(19, 0), time(9, 27)
"""When orders for the opening auction are taken (until 9:28, less a minute for the way)."""
_SMALLEST = Decimal("1e-9")
_PAGE, _MOST_ORDERS = 100, 500
_NEWEST: Mapping[str, Any] = {"status": "all", "limit": _MOST_ORDERS, "direction": "desc"}
_FEW = 4
"""Orders that are looked up one by one; of more the newest are listed first."""
_LATE = timedelta(seconds=120)
"""By which the venue may book a fill behind one that it has shown."""
_ROUNDING = 1e-9


def time_in_force(freq: Freq, shares: float, at: datetime) -> Literal["opg", "day"]:
    """How long an order stands. at: when it is sent, timezone-aware

    Daily bars: decided behind the close, filled at the next open, so `opg`, the opening auction, is
    what the backtest assumes. It takes whole shares only, and the venue takes such orders from
    19:00 to 9:28 in New York; otherwise `day`, which the venue keeps until the next session opens
    and fills right behind the auction. Bars within the day: `day`, which is filled at once, at the
    open of the next bar.
    """
    clock = at.astimezone(_NEW_YORK).time()
    takes = clock >= _AUCTION_FROM or clock < _AUCTION_UNTIL
    return "opg" if freq == "1d" and takes and shares == math.floor(shares) else "day"


def open_alpaca(request: BrokerRequest) -> AlpacaBroker:
    """`alpaca`, the paper account, or `alpaca:live`."""
    if request.address not in ("", "live"):
        raise UsageError(
            f"--broker alpaca:{shorten(request.address, 40)}: expected alpaca or alpaca:live."
        )
    live = request.address == "live"
    if live and os.environ.get(LIVE_VARIABLE, "").strip().lower() != "yes":
        raise UsageError(
            f"--broker alpaca:live trades with real money: set {LIVE_VARIABLE}=yes as well, or use "
            "--broker alpaca for the paper account."
        )
    bundle = request.bundle
    universe = bundle.universe
    if universe["timezone"] != str(_NEW_YORK):
        raise UsageError(
            f"{bundle.path}: its market is {universe['calendar']}; Alpaca trades US stocks. Use "
            "--broker paper or sheet:DIRECTORY."
        )
    lots = bool(bundle.rules.get("lots"))
    url = override_url()
    return AlpacaBroker(bundle.symbols, universe["freq"], lots=lots, live=live, url=url)


class _Known(NamedTuple):
    """An order as the venue last described it. at: when it was submitted there"""

    venue_id: str
    status: OrderStatus
    at: str


class AlpacaBroker(Closing):
    """An account at Alpaca; see the module's text."""

    def __init__(
        self,
        symbols: Sequence[str],
        freq: Freq,
        *,
        lots: bool = False,
        live: bool = False,
        url: str | None = None,
        keys: Keys | None = None,
        seconds: float = SECONDS,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """symbols: of the bundle; others of the account are left out. lots: whole shares only.

        url: of a fake on this machine; None: Alpaca. now: for tests
        """
        self.name = "alpaca:live" if live else "alpaca"
        self._symbols = OwnSymbols(self.name, symbols)
        self._freq, self._lots, self._now = freq, lots, now
        self._keys = keys or Keys.from_environment()
        trading = load_alpaca("alpaca.trading.client")
        self._requests = load_alpaca("alpaca.trading.requests")
        key, secret = self._keys.plain
        client = trading.TradingClient(key, secret, paper=not live, raw_data=True, url_override=url)
        self._client = prepare_client(client, seconds, direct=url is not None)
        self._known: dict[str, _Known] = {}  # by client id, those whose fills are not all given out
        self._client_ids: dict[str, str] = {}  # by the venue's id
        self._listed: dict[str, float] = {}  # venue's id → shares that its activities add up to
        self._rejected: dict[str, OrderStatus] = {}  # refused without becoming an order there

    def close(self) -> None:
        self._client._session.close()

    # Orders.

    def submit(self, orders: Sequence[OrderRequest]) -> list[OrderStatus]:
        answers: list[OrderStatus] = []
        silence = ""
        for order in orders:
            if silence:
                answers.append(OrderStatus(order.id, "unknown", 0.0, f"not sent: {silence}"))
                continue
            try:
                status = self._submit(order)
                if status.state == "rejected":
                    self._rejected[order.id] = status
                answers.append(status)
            except BrokerError as error:
                silence = str(error)
                log.warning("%s: %s", order.symbol, silence)
                answers.append(OrderStatus(order.id, "unknown", 0.0, silence))
        return answers

    def _submit(self, order: OrderRequest) -> OrderStatus:
        smallest = Decimal(1) if self._lots else _SMALLEST
        shares = float(Decimal(repr(order.shares)).quantize(smallest, ROUND_DOWN))
        if shares <= 0.0:
            known = self._find(order.id)
            return known or OrderStatus(order.id, "rejected", 0.0, "less than the venue trades")
        limit = order.limit
        kind = (
            self._requests.MarketOrderRequest if limit is None else self._requests.LimitOrderRequest
        )
        request = kind(
            **({} if limit is None else {"limit_price": round(limit, 2 if limit >= 1.0 else 4)}),
            symbol=order.symbol,
            qty=shares,
            side=order.side,
            time_in_force=time_in_force(self._freq, shares, self._now()),
            client_order_id=order.id,
        )
        try:
            body = self._ask("an order", lambda: self._client.submit_order(request))
        except Refused as refusal:
            known = self._find(order.id)
            return known or OrderStatus(order.id, "rejected", 0.0, refusal.reason)
        status = self._take(body)
        if status.id != order.id:
            raise BrokerError(f"alpaca: answered of order {shorten(status.id, 60)}, not {order.id}")
        return status

    def cancel(self, ids: Sequence[str]) -> None:
        for status in self.orders(ids).values():
            if status.state not in OPEN:  # also of those that never became an order
                continue
            venue_id = self._known[status.id].venue_id
            try:
                self._ask("a cancel", partial(self._client.cancel_order_by_id, venue_id))
            except Refused as refusal:  # it was filled in between, say: `orders` says what it is
                log.info("%s: not cancelled: %s", status.id, refusal.reason)

    def orders(self, ids: Sequence[str]) -> dict[str, OrderStatus]:
        statuses: dict[str, OrderStatus] = {}
        if len(ids) > _FEW:  # the venue takes 200 requests a minute
            asked = frozenset(ids)
            for body in self._list("/orders", _NEWEST):
                if body.get("client_order_id") in asked:
                    status = self._take(body)
                    statuses[status.id] = status
        for client_id in ids:
            if client_id not in statuses:
                known = self._find(client_id) or self._rejected.get(client_id)
                if known is not None:
                    statuses[client_id] = known
        return statuses

    def open_orders(self) -> list[OrderStatus]:
        statuses: dict[str, OrderStatus] = {}
        query = {"status": "open", "limit": _MOST_ORDERS, "direction": "asc"}
        while True:
            before = len(statuses)
            page = self._list("/orders", query)
            for body in page:
                status = self._take(body)
                statuses[status.id] = status
            if len(page) < _MOST_ORDERS or len(statuses) == before:
                return list(statuses.values())
            # Orders of the same instant may lie on both sides of the page's end.
            last = _time(page[-1], "submitted_at") - timedelta(milliseconds=1)
            query["after"] = last.isoformat()

    def _find(self, client_id: str) -> OrderStatus | None:
        """What the venue has under an id of ours; None: nothing."""
        try:
            call = self._client.get_order_by_client_id
            return self._take(self._ask("a look-up", lambda: call(client_id)))
        except Refused as refusal:
            if refusal.status == 404:
                return None
            raise BrokerError(f"alpaca: looked up {client_id}: {refusal}") from None

    def _take(self, body: object) -> OrderStatus:
        """An order as the venue describes it, kept for its fills."""
        order = _object(body, "order")
        client_id, venue_id = _text(order, "client_order_id"), _text(order, "id")
        name = _text(order, "status")
        filled = _number(order, "filled_qty", 0.0)
        state = _STATES.get(name, "partial" if filled > 0.0 else "accepted")
        reason = None
        if state == "cancelled":
            reason = "replaced by another order" if name == "replaced" else name
        elif state == "rejected":
            reason = "rejected by the exchange"
        status = OrderStatus(client_id, state, filled, reason)
        self._client_ids[venue_id] = client_id
        self._known[client_id] = _Known(venue_id, status, str(order.get("submitted_at") or ""))
        return status

    # Fills.

    def fills(self, after: str) -> tuple[list[VenueFill], str]:
        token, _, given = after.partition("|")
        seen = set(given.split(",")) if given else set()
        query = {"page_token": token} if token else {}
        activities = self._activities(query)
        if self._short_orders():
            activities = self._wait_for_listing(query)
        self._forget_final()
        fresh = [item for item in activities if _digest(_text(item, "id")) not in seen]
        ours = [item for item in fresh if self._symbols.has(_text(item, "symbol"))]
        self._learn_client_ids({_text(item, "order_id") for item in ours})
        return [self._fill(item) for item in ours], self._cursor(token, activities)

    def _activities(self, query: Mapping[str, Any]) -> list[dict[str, Any]]:
        """FILL activities in order, each once, all pages."""
        items: dict[str, dict[str, Any]] = {}
        asked = {"direction": "asc", "page_size": _PAGE, **query}
        while True:
            page = self._list("/account/activities/FILL", asked)
            before = len(items)
            for item in page:
                items[_text(item, "id")] = item
                order, total = _text(item, "order_id"), _number(item, "cum_qty")
                self._listed[order] = max(self._listed.get(order, 0.0), total)
            if len(page) < _PAGE or len(items) == before:
                return list(items.values())
            asked["page_token"] = _text(page[-1], "id")

    def _wait_for_listing(self, query: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The activities once they say as much as the orders; BrokerError: not yet."""
        short = self._short_orders()
        if dates := [known.at for known in short if known.at]:
            self._activities({"after": min(dates)})  # some may lie before the cursor
        activities = self._activities(query)
        if short := self._short_orders():
            raise BrokerError(
                f"alpaca: {len(short)} order(s), such as {short[0].status.id}, were filled by more "
                "than the account's activities list so far"
            )
        return activities

    def _forget_final(self) -> None:
        """Orders of which all is listed, and to which nothing comes any more."""
        for client_id, known in list(self._known.items()):
            if known.status.state not in OPEN:
                del self._known[client_id]
                self._listed.pop(known.venue_id, None)

    def _short_orders(self) -> list[_Known]:
        """Orders that were filled by more than their activities say."""
        each = ((known, self._listed.get(known.venue_id, 0.0)) for known in self._known.values())
        return [k for k, listed in each if k.status.filled > listed + _ROUNDING * max(1.0, listed)]

    def _cursor(self, token: str, activities: Sequence[Mapping[str, Any]]) -> str:
        """The last activity behind which nothing is booked late, and those after it."""
        late = self._now() - _LATE
        behind: list[str] = []
        for item in activities:
            if behind or _time(item, "transaction_time") > late:
                behind.append(_digest(_text(item, "id")))
            else:
                token = _text(item, "id")
        return f"{token}|{','.join(behind)}" if behind else token

    def _fill(self, item: Mapping[str, Any]) -> VenueFill:
        shares, price = _number(item, "qty"), _number(item, "price")
        side = _text(item, "side")
        # Stocks trade without commission there; fees of the regulators come later, as activities
        # of their own, and are seen in the account's cash.
        return VenueFill(
            trade_id=_text(item, "id"),
            order_id=self._client_ids[_text(item, "order_id")],
            symbol=_text(item, "symbol"),
            shares=shares if side == "buy" else -shares,
            price=price,
            time=_text(item, "transaction_time"),
        )

    def _learn_client_ids(self, venue_ids: Collection[str]) -> None:
        """The ids that orders were given by whoever sent them, after a restart."""
        missing = [name for name in venue_ids if name not in self._client_ids]
        if len(missing) > _FEW:
            for body in self._list("/orders", _NEWEST):
                self._client_ids[_text(body, "id")] = _text(body, "client_order_id")
        for name in missing:
            if name not in self._client_ids:
                try:
                    call = partial(self._client.get_order_by_id, name)
                    body = _object(self._ask("an order", call), "order")
                    self._client_ids[name] = _text(body, "client_order_id")
                except Refused:
                    self._client_ids[name] = name  # gone; it is none of ours

    # The account.

    def account(self) -> Account:
        """See Broker. Cash and positions are two answers, so cash is asked for on both sides."""
        for _ in range(3):
            cash = self._cash()
            positions = self._list("/positions", {})
            if self._cash() == cash:
                break
        else:
            raise BrokerError("alpaca: the account changes while it is read")
        held = {}
        for item in positions:
            symbol = _text(item, "symbol")
            if self._symbols.has(symbol):
                held[symbol] = _number(item, "qty")
        return Account(cash, held)

    def _cash(self) -> float:
        body = self._ask("the account", self._client.get_account)
        return _number(_object(body, "account"), "cash")

    # Requests.

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        return ask(self._keys, what, call)

    def _list(self, path: str, query: Mapping[str, Any]) -> list[dict[str, Any]]:
        answer = self._ask(path, lambda: self._client.get(path, dict(query)))
        if not isinstance(answer, list):
            raise BrokerError(f"alpaca: {path}: expected a list, got {type(answer).__name__}")
        return [_object(item, path) for item in answer]


def _digest(activity: str) -> str:
    return hashlib.sha256(activity.encode()).hexdigest()[:12]


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BrokerError(f"alpaca: {what}: expected an object, got {type(value).__name__}")
    return value


def _text(item: Mapping[str, Any], field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str) or not value:
        raise BrokerError(f"alpaca: field {field!r}: expected a text, got {shorten(value, 60)!r}")
    return value


def _number(item: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = item.get(field)
    if value is None and default is not None:
        return default
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise BrokerError(f"alpaca: field {field!r}: expected a number, got {shorten(value, 60)!r}")
    return number


def _time(item: Mapping[str, Any], field: str) -> datetime:
    text = _text(item, field)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise BrokerError(f"alpaca: field {field!r}: no time: {shorten(text, 60)!r}") from None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
