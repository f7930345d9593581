"""`sheet:DIRECTORY`: orders as files, for terminals without an API and for people who type.

docs/guide/live.md says what the files are. What has not been reported is open: an order is
`accepted` until its trades are there, or it is in `closed`. A problem is told with file, row, field
and remedy, and until it is mended nothing is known (BrokerError, so the engine asks again). Trades
that were read are history: a file that shrinks or tells it otherwise is refused.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import polars as pl
from pydantic import SecretStr
from typing_extensions import TypedDict

from echelon.config.secrets import Secrets
from echelon.errors import InvalidDataError, Problem, UsageError, shorten
from echelon.files import (
    Closing,
    exclusive_lock,
    json_line,
    read_json,
    write_atomic,
    write_csv,
    write_json,
)
from echelon.live.brokers import (
    BrokerError,
    BrokerRequest,
    OrderRequest,
    OrderState,
    OrderStatus,
    OwnSymbols,
    VenueFill,
)
from echelon.monitoring.channels import Undelivered, check_url, post_json
from echelon.serving.engine import Account

log = logging.getLogger(__name__)

CASH = "$cash"
MAX_BYTES = 64 << 20
_AGAIN_SECONDS = 5.0
"""Between two tries to post a sheet."""
_ROUNDING = 1e-9
_REMEDY = "Sheets are ours: restore the file from a backup, or start with an empty directory."
_SIDES: Mapping[str, Literal["buy", "sell"]] = {
    "buy": "buy",
    "sell": "sell",
    "买入": "buy",
    "卖出": "sell",
}
_ENDS: Mapping[str, OrderState] = {
    "cancelled": "cancelled",
    "canceled": "cancelled",
    "rejected": "rejected",
    "已撤": "cancelled",
    "废单": "rejected",
}
_COLUMNS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "fills": (
        ("trade_id", "order_id", "shares", "price"),
        ("symbol", "side", "commission", "stamp", "time"),
    ),
    "closed": (("order_id", "state"), ("reason",)),
    "account": (("symbol", "shares"), ("available",)),
}
"""File → columns that it must have, and those that it may have."""


class SheetOrder(TypedDict):
    """An order on a sheet. price: the last close; limit: the worst to trade at, null: any"""

    id: str
    symbol: str
    side: Literal["buy", "sell"]
    shares: float
    price: float
    limit: float | None


class Sheet(TypedDict):
    """What a file of orders or cancels holds. id: of the sheet, by which a webhook knows it"""

    schema: int
    id: str
    kind: Literal["orders", "cancels"]
    written: str
    orders: list[SheetOrder]


class _Row(NamedTuple):
    """A row of a file of the user; number: as the user counts; cells: without spaces around."""

    number: int
    cells: Mapping[str, str]


class _Trade(NamedTuple):
    row: int
    fill: VenueFill


def open_sheet(request: BrokerRequest) -> SheetBroker:
    if not request.address:
        raise UsageError("--broker sheet: name the directory, as in sheet:orders_of_mine.")
    directory = Path(request.address)
    broker = SheetBroker(directory, request.bundle.symbols, Secrets().echelon_sheet_webhook)
    try:
        broker.check_account()
    except BaseException:
        broker.close()
        raise
    return broker


class SheetBroker(Closing):
    """A directory of order sheets; see the module's text."""

    def __init__(
        self,
        directory: Path,
        symbols: Sequence[str],
        webhook: SecretStr | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """symbols: of the bundle; others of the account are left out. now: for tests"""
        self.name = "sheet"
        self._directory, self._now = directory, now
        self._symbols = OwnSymbols(str(directory), symbols)
        self._webhook = webhook
        if webhook is not None:
            check_url(webhook, "ECHELON_SHEET_WEBHOOK")
        self._sheets: dict[str, Sheet] = {}  # by name below the directory, without its ending
        self._orders: dict[str, SheetOrder] = {}
        self._cancelled: set[str] = set()
        self._rejected: dict[str, str] = {}  # never written; why
        self._tried = -math.inf
        self._read: list[_Trade] = []  # as last read, to say which row is not what it was
        with ExitStack() as held:
            held.enter_context(exclusive_lock(directory / ".lock", str(directory)))
            self._recover()
            self._held = held.pop_all()

    def _recover(self) -> None:
        """Take in the sheets that are there; a kill may have left one without its CSV."""
        for kind in ("orders", "cancels"):
            for path in sorted((self._directory / kind).glob("*.json")):
                sheet = read_json(path, Sheet, _REMEDY)
                self._take(f"{kind}/{path.stem}", sheet)

    def close(self) -> None:
        self._held.close()

    # Orders.

    def submit(self, orders: Sequence[OrderRequest]) -> list[OrderStatus]:
        """See Broker. All that are new are one sheet."""
        fresh = {order.id: order for order in orders if order.id not in self._orders}
        for order in fresh.values():
            if order.symbol not in self._symbols.names:
                self._rejected[order.id] = f"{order.symbol} is not in the bundle's universe"
            elif not 0.0 < order.shares < math.inf:
                self._rejected[order.id] = f"{order.shares:g} shares"
        written = [order for order in fresh.values() if order.id not in self._rejected]
        if written:
            self._write("orders", [_line(order) for order in written])
        self._post()
        known = self.orders([order.id for order in orders if order.id not in fresh])
        return [known.get(order.id) or self._first(order.id) for order in orders]

    def _first(self, name: str) -> OrderStatus:
        """Of an order that nobody can have reported on yet."""
        reason = self._rejected.get(name)
        return OrderStatus(name, "accepted" if reason is None else "rejected", 0.0, reason)

    def cancel(self, ids: Sequence[str]) -> None:
        """See Broker. A sheet asks for it; what came of it stands in `closed` and `fills`."""
        ours = [self._orders[name] for name in ids if name in self._orders]
        asked = [order for order in ours if order["id"] not in self._cancelled]
        if asked:
            self._write("cancels", asked)
        self._post()

    def orders(self, ids: Sequence[str]) -> dict[str, OrderStatus]:
        self._post()
        ours = [name for name in ids if name in self._orders]
        refused = {name: self._first(name) for name in ids if name in self._rejected}
        if not ours:
            return refused
        filled: dict[str, float] = {}
        for _, fill in self._trades():
            filled[fill.order_id] = filled.get(fill.order_id, 0.0) + abs(fill.shares)
        ends = self._ends()
        return refused | {
            name: self._status(name, filled.get(name, 0.0), ends.get(name)) for name in ours
        }

    def open_orders(self) -> list[OrderStatus]:
        every = self.orders(list(self._orders)).values()
        return [status for status in every if status.state in ("accepted", "partial")]

    def _status(
        self, name: str, filled: float, end: tuple[OrderState, str | None] | None
    ) -> OrderStatus:
        wanted = self._orders[name]["shares"]
        if filled >= wanted - _ROUNDING * max(1.0, wanted):
            return OrderStatus(name, "filled", filled)
        if end is not None:
            state: OrderState = "cancelled" if filled > 0.0 else end[0]
            return OrderStatus(name, state, filled, end[1] or end[0])
        return OrderStatus(name, "partial" if filled > 0.0 else "accepted", filled)

    # What the user reports.

    def fills(self, after: str) -> tuple[list[VenueFill], str]:
        """See Broker. A cursor is a number of trades and what they were."""
        trades = self._trades()
        given, _, digest = after.partition(":")
        count = int(given or 0)
        if count > len(trades) or _digest(trades[:count]) != (digest or _digest(())):
            self._refuse_history(trades, count)
        self._read = trades
        fresh = [trade.fill for trade in trades[count:] if self._symbols.has(trade.fill.symbol)]
        return fresh, f"{len(trades)}:{_digest(trades)}" if trades else ""

    def _refuse_history(self, trades: Sequence[_Trade], count: int) -> None:
        path = self._report_file("fills")
        row, what = None, f"has {len(trades)} trade(s), of which {count} were read before"
        if count <= len(trades):
            what = f"its first {count} trades are not those that were read before"
            pairs = zip(self._read, trades, strict=False)
            row = next((new.row for old, new in pairs if old.fill != new.fill), None)
        remedy = "Put back what was there, and append corrections as trades of their own."
        raise _broken([Problem(path.name, row, None, what, remedy)])

    def _trades(self) -> list[_Trade]:
        """Every trade that was reported, checked."""
        rows, path = self._rows("fills")
        problems: list[Problem] = []
        trades: list[_Trade] = []
        seen: dict[str, int] = {}
        filled: dict[str, float] = {}
        for row in rows:
            check = _Checker(path.name, row, problems)
            trade_id, order_id = check.text("trade_id"), row.cells.get("order_id", "")
            if trade_id in seen:
                check.say("trade_id", f"{trade_id!r} is in row {seen[trade_id]} already", "trade")
            seen.setdefault(trade_id, row.number)
            order = self._orders.get(order_id)
            if order_id and order is None:
                check.say("order_id", f"{order_id!r} is no order of these sheets", "order")
            symbol, side = self._of_order(check, order)
            shares, price = check.positive("shares"), check.positive("price")
            if order is not None:
                filled[order_id] = filled.get(order_id, 0.0) + shares
                most = order["shares"]
                if filled[order_id] > most + _ROUNDING * max(1.0, most):
                    what = f"with this row {filled[order_id]:g} of {most:g} ordered shares"
                    check.say("shares", what, "shares")
            fill = VenueFill(
                *(trade_id, order_id, symbol, shares if side == "buy" else -shares, price),
                commission=check.cost("commission"),
                stamp=check.cost("stamp"),
                time=row.cells.get("time", ""),
            )
            trades.append(_Trade(row.number, fill))
        if problems:
            raise _broken(problems)
        return trades

    def _of_order(self, check: _Checker, order: SheetOrder | None) -> tuple[str, str]:
        """(symbol, side) of a trade: of its order, which the row must not contradict."""
        given = check.row.cells.get("symbol", "")
        text = check.row.cells.get("side", "").lower()
        side = _SIDES.get(text, "")
        if text and not side:
            check.say("side", f"{text!r} is neither buy nor sell", "side")
        if order is None and check.row.cells.get("order_id"):
            return given, side  # which order it is of has to be mended first
        if order is None:
            return given or check.text("symbol"), side or check.text("side")
        if given and given != order["symbol"]:
            check.say("symbol", f"{given!r}, but the order is for {order['symbol']!r}", "order")
        if side and side != order["side"]:
            check.say("side", f"{side}, but the order is to {order['side']}", "order")
        return order["symbol"], order["side"]

    def _ends(self) -> dict[str, tuple[OrderState, str | None]]:
        """Orders that nothing comes of any more: how they ended, and why."""
        rows, path = self._rows("closed")
        problems: list[Problem] = []
        ends: dict[str, tuple[OrderState, str | None]] = {}
        for row in rows:
            check = _Checker(path.name, row, problems)
            name, state = check.text("order_id"), check.text("state").lower()
            if name and name not in self._orders:
                check.say("order_id", f"{name!r} is no order of these sheets", "order")
            if state and state not in _ENDS:
                check.say("state", f"{state!r} is neither cancelled nor rejected", "state")
            ends[name] = _ENDS.get(state, "cancelled"), row.cells.get("reason") or None
        if problems:
            raise _broken(problems)
        return ends

    def account(self) -> Account:
        rows, path = self._rows("account")
        problems: list[Problem] = []
        held: dict[str, float] = {}
        locked: dict[str, float] = {}
        seen: set[str] = set()
        cash = math.nan
        for row in rows:
            check = _Checker(path.name, row, problems)
            symbol, shares = check.text("symbol"), check.number("shares")
            if symbol in seen:
                check.say("symbol", f"{symbol!r} is there twice", "symbol")
            seen.add(symbol)
            if symbol.lower() == CASH:
                cash = shares
                continue
            text = row.cells.get("available", "")
            free = check.number("available") if text else shares
            if shares < 0.0 or not 0.0 <= free <= shares:
                check.say("shares", f"{shares:g} shares, {free:g} available", "shares")
            if symbol and shares and self._symbols.has(symbol):
                held[symbol] = shares
                if free < shares:
                    locked[symbol] = shares - free
        if math.isnan(cash) and not problems:
            remedy = f"Add the row {CASH} with the money as its shares."
            problems.append(Problem(path.name, None, "symbol", f"no row {CASH}", remedy))
        if problems:
            raise _broken(problems)
        return Account(cash, held, locked)

    def check_account(self) -> None:
        """Say how to begin where no account was ever written."""
        path = self._report_file("account")
        if not path.exists():
            raise UsageError(
                f"{path}: not there. Write what is held now, with the columns symbol and shares, "
                f"and the money in the row {CASH}; see docs/guide/live.md."
            )

    def _report_file(self, name: str) -> Path:
        """The user's file of this name, which may not be there."""
        there = [p for e in ("csv", "json") if (p := self._directory / f"{name}.{e}").exists()]
        if len(there) > 1:
            remedy = "Keep one of them."
            raise _broken([Problem(there[0].name, None, None, f"{there[1].name} too", remedy)])
        return there[0] if there else self._directory / f"{name}.csv"

    def _rows(self, name: str) -> tuple[list[_Row], Path]:
        """(rows of a file of the user, its path); no file: none, but of the account."""
        path = self._report_file(name)
        required, optional = _COLUMNS[name]
        if not path.exists():
            if name == "account":
                remedy = "Write what is held now."
                raise _broken([Problem(path.name, None, None, "not there", remedy)])
            return [], path
        try:
            with path.open("rb") as handle:
                data = handle.read(MAX_BYTES + 1)
        except OSError as error:
            raise BrokerError(f"{path}: cannot be read ({error.strerror})") from None
        read = _read_csv if path.suffix == ".csv" else _read_json
        rows, problems = read(path.name, data, required)
        known = {*required, *optional}
        odd = sorted({field for row in rows[:1] for field in row.cells if field not in known})
        for field in odd:
            remedy = f"The columns are {', '.join((*required, *optional))}."
            problems.append(Problem(path.name, None, field, "unknown column", remedy))
        if problems:
            raise _broken(problems)
        return rows, path

    # Sheets.

    def _take(self, name: str, sheet: Sheet) -> None:
        self._sheets[name] = sheet
        path = self._directory / f"{name}.csv"
        if not path.exists():
            write_csv(path, pl.DataFrame([dict(order) for order in sheet["orders"]]))
        if sheet["kind"] == "orders":
            self._orders |= {order["id"]: order for order in sheet["orders"]}
        else:
            self._cancelled |= {order["id"] for order in sheet["orders"]}

    def _write(self, kind: Literal["orders", "cancels"], orders: list[SheetOrder]) -> None:
        """Write a sheet; it counts as soon as its JSON has its name."""
        number = 1 + sum(sheet["kind"] == kind for sheet in self._sheets.values())
        name = f"{kind}/{number:06}"
        ids = "|".join((kind, *(order["id"] for order in orders)))
        sheet = Sheet(
            schema=1,
            id=hashlib.sha256(ids.encode()).hexdigest()[:32],
            kind=kind,
            written=self._now().isoformat(timespec="seconds"),
            orders=orders,
        )
        write_json(self._directory / f"{name}.json", sheet)
        self._take(name, sheet)

    def _post(self) -> None:
        """Post the sheets that the webhook has not taken yet, in their order."""
        if self._webhook is None or time.monotonic() - self._tried < _AGAIN_SECONDS:
            return
        for name, sheet in self._sheets.items():
            marker = self._directory / f"{name}.posted"
            if marker.exists():
                continue
            why = _post_json(self._webhook, sheet)
            if why is not None:
                self._tried = time.monotonic()
                log.warning("%s: the webhook did not take %s: %s", self._directory, name, why)
                return
            write_atomic(marker, f"{sheet['id']}\n")


def _post_json(url: SecretStr, sheet: Sheet) -> str | None:
    """Post a sheet; why it was not taken, without the URL, or None."""
    try:
        answer = post_json(url.get_secret_value(), sheet, {"Idempotency-Key": sheet["id"]})
    except Undelivered as error:
        return str(error)
    taken = answer.status < 300 or answer.status == 409  # 409: it has it already
    return None if taken else f"status {answer.status}"


class _Checker:
    """The cells of a row; what is wrong with one becomes a problem."""

    REMEDIES: Mapping[str, str] = {
        "trade": "Give each trade the terminal's own number, once.",
        "order": "Copy the id from the sheet; leave it empty for a trade of your own.",
        "shares": "Write what the terminal says, without signs.",
        "number": "Write a plain number, such as 1000.5.",
        "side": "Write buy or sell.",
        "state": "Write cancelled or rejected.",
        "symbol": "Write the symbol as the sheets have it, once.",
        "text": "Fill it in.",
    }

    def __init__(self, file: str, row: _Row, problems: list[Problem]) -> None:
        self.file, self.row, self.problems = file, row, problems

    def say(self, field: str, what: str, remedy: str) -> None:
        """Note a problem. remedy: of `REMEDIES`"""
        problem = Problem(self.file, self.row.number, field, what, self.REMEDIES[remedy])
        self.problems.append(problem)

    def text(self, field: str) -> str:
        value = self.row.cells.get(field, "")
        if not value:
            self.say(field, "is empty", "text")
        return value

    def number(self, field: str) -> float:
        text = self.row.cells.get(field, "")
        try:
            value = float(text) if text.isascii() and "_" not in text else math.nan
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            self.say(field, f"{shorten(text, 60)!r} is no number", "number")
            return 0.0
        return value

    def positive(self, field: str) -> float:
        before = len(self.problems)
        value = self.number(field)
        if value <= 0.0 and len(self.problems) == before:
            self.say(field, f"{value:g}, expected more than 0", "shares")
        return value

    def cost(self, field: str) -> float:
        """A cost, 0 where none is given."""
        if not self.row.cells.get(field, ""):
            return 0.0
        value = self.number(field)
        if value < 0.0:
            self.say(field, f"{value:g}, expected 0 or more", "shares")
        return value


def _read_csv(name: str, data: bytes, required: Sequence[str]) -> tuple[list[_Row], list[Problem]]:
    text = _decode(data)
    if text is None:
        return [], [Problem(name, None, None, "neither UTF-8 nor GBK", "Save it as UTF-8.")]
    if text and not text.endswith("\n"):
        # A number that is cut in two is a number: only a line with its end was written whole.
        remedy = "End the last line; a program writes to another name first, then renames."
        return [], [Problem(name, text.count("\n") + 1, None, "the line has no end", remedy)]
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        lines = [(reader.line_num, cells) for cells in reader if any(c.strip() for c in cells)]
    except csv.Error as error:
        return [], [Problem(name, reader.line_num, None, str(error), "Write it as CSV.")]
    if not lines:
        return [], []
    header = [_strip_cell(cell).lower() for cell in lines[0][1]]
    problems = _missing(name, header, required)
    rows = []
    for number, cells in lines[1:]:
        if len(cells) != len(header):
            what = f"{len(cells)} cells, the header has {len(header)}"
            remedy = "Quote cells that hold a comma."
            problems.append(Problem(name, number, None, what, remedy))
        rows.append(_Row(number, dict(zip(header, map(_strip_cell, cells), strict=False))))
    return rows, problems


def _read_json(name: str, data: bytes, required: Sequence[str]) -> tuple[list[_Row], list[Problem]]:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        return [], [Problem(name, None, None, f"no JSON: {error}", "Write a list of objects.")]
    if not isinstance(tree, list):
        return [], [Problem(name, None, None, "not a list", "Write a list of objects.")]
    rows: list[_Row] = []
    problems: list[Problem] = []
    for number, item in enumerate(tree, 1):
        if not isinstance(item, dict):
            problems.append(Problem(name, number, None, "not an object", "Write objects."))
            continue
        problems += _missing(name, list(item), required, number)
        cells = {key: "" if value is None else str(value).strip() for key, value in item.items()}
        rows.append(_Row(number, cells))
    return rows, problems


def _missing(
    name: str, given: Sequence[str], required: Sequence[str], row: int | None = None
) -> list[Problem]:
    return [
        Problem(name, row, field, "is missing", f"The columns {', '.join(required)} must be there.")
        for field in required
        if field not in given
    ]


def _decode(data: bytes) -> str | None:
    for encoding in ("utf-8-sig", "gb18030"):
        try:
            return data.decode(encoding)
        except UnicodeDecodeError:
            continue
    return None


def _strip_cell(cell: str) -> str:
    """A cell without the apostrophe that keeps a spreadsheet from running it, and spaces."""
    text = cell.strip()
    return text[1:].strip() if text[:1] == "'" and text[1:2] in tuple("=+-@＝＋－＠") else text


def _line(order: OrderRequest) -> SheetOrder:
    return SheetOrder(
        id=order.id,
        symbol=order.symbol,
        side=order.side,
        shares=order.shares,
        price=order.price,
        limit=order.limit,
    )


def _digest(trades: Sequence[_Trade]) -> str:
    state = hashlib.sha256()
    for trade in trades:
        state.update(json_line(list(trade.fill)).encode() + b"\n")
    return state.hexdigest()[:16]


def _broken(problems: Sequence[Problem]) -> BrokerError:
    """What the user wrote cannot be read: nothing is known until it is mended."""
    return BrokerError(str(InvalidDataError(problems)))
