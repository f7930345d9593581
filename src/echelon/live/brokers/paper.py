"""The paper venue: orders filled by the market kernel, at the bars it is shown.

It has a world of its own, whose rows come along the line of the decision engine (`PanelStream`,
`GrowingWorld`), without features: nothing here decides. `show_bars`, for the bars of one time:

1. The bars become a row. What the engine would refuse is refused here, and changes nothing.
2. Open orders become the `market.Orders` of one book, and `Books.fill` takes it one bar on: splits,
   dividends, delistings, T+1, limits, lots, fees and the volume cap are those of backtests.
3. Orders are for one bar: each ends filled, or cancelled with the kernel's reason and with what was
   filled of it.

One order a symbol is open at a time: a newer one takes the place of the older, which is cancelled.

The venue keeps a journal. Orders are in it before they are acknowledged, bars and what they did
before they are answered; so a venue that starts again has its last snapshot, does what was written
behind it, and must come to the same fills. An order's last status is found by its id however old it
is; bars of the last time get the answer that they got.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from echelon.config.agents import RewardConfig
from echelon.data.stream import BarSet, PanelStream
from echelon.envs.act import ActionRule
from echelon.envs.books import Books
from echelon.envs.growing import GrowingWorld, live_span
from echelon.errors import DamagedError, DataError, StaleBarsError, StoreError, UsageError
from echelon.files import Closing, blaming, json_line
from echelon.live.brokers import (
    OrderRequest,
    OrderStatus,
    Shown,
    VenueFill,
    account_of,
    statuses,
)
from echelon.live.journal import (
    Entry,
    Journal,
    blaming_sqlite,
    decode_bars,
    encode_bars,
)
from echelon.market import Fills, Orders, Reason
from echelon.serving.bundle import Bundle
from echelon.serving.engine import (
    Account,
    learn_reasons,
    market_state,
    read_history,
    restore_market,
)
from echelon.serving.state_file import decode_state, encode_state
from echelon.states import below_prefix, with_prefix
from echelon.types import Bools, Floats32

CANCELLED, REPLACED, INVALID = "cancelled", "replaced", "invalid_order"
"""Why an order was not filled, or not whole, beside the kernel's reasons."""

SNAPSHOT_EVERY = 50
_REMEDY = "Run `echelon live journal verify`; start from a backup of the venue's journal."
_MOST = 1e18
_CODES = {int(reason): reason.name.lower() for reason in Reason}
_WHOLE = (int(Reason.NONE), int(Reason.LOT))
"""Reasons of an order that is filled: what is less than a lot cannot be had."""


class _Line(NamedTuple):
    """Where rows come from, and the book that trades in them."""

    panel: PanelStream
    world: GrowingWorld
    books: Books


class PaperVenue(Closing):
    """A `Broker` and `SimulatedVenue`; see the module's text."""

    name = "paper"

    def __init__(self, line: _Line, journal: VenueJournal, snapshot_every: int) -> None:
        """Use `open`."""
        self._panel, self._world, self._books = line
        self._journal, self._snapshot_every = journal, snapshot_every
        self._columns = {symbol: n for n, symbol in enumerate(self._world.symbols)}
        self._open: dict[str, OrderRequest] = {}
        self._bars = 0
        self._cursor = ""
        self._broken = False

    @classmethod
    def open(
        cls,
        bundle: Bundle,
        journal: Path,
        store: Path,
        until: date | None = None,
        *,
        snapshot_every: int = SNAPSHOT_EVERY,
        sync: bool = True,
    ) -> PaperVenue:
        """The venue of a journal: recovered from it, or new and behind the store's history.

        until: last day of that history; None: the store's last. sync: as of `Journal.open`
        """
        about = {"bundle": bundle.id, "venue": cls.name, "symbols": list(bundle.symbols)}
        opened = VenueJournal.open(journal, about, sync=sync)
        try:
            last = opened.last_snapshot()
            if last is None:
                venue = cls(_line_behind(bundle, store, until), opened, snapshot_every)
                venue._snapshot()
                opened.commit()
            else:
                with blaming(journal, _REMEDY):  # its chain may hold, whoever wrote it
                    seq, data = last
                    parts, facts = decode_state(data, journal, _REMEDY)
                    venue = cls(_line_of(bundle, parts, facts, journal), opened, snapshot_every)
                    venue._open = {body["id"]: OrderRequest(**body) for body in facts["open"]}
                    venue._bars, venue._cursor = int(facts["bars"]), str(facts["cursor"])
                    venue._replay(opened.entries(seq))
        except BaseException:
            opened.close()
            raise
        return venue

    def close(self) -> None:
        self._journal.close()

    @property
    def time(self) -> np.datetime64:
        """Of the last bars."""
        return self._panel.time

    # Orders.

    def submit(self, orders: Sequence[OrderRequest]) -> list[OrderStatus]:
        """Take orders for the next bar; one that is known already answers as it stands."""
        known = self.orders([order.id for order in orders])
        new: dict[str, OrderRequest] = {}
        for order in orders:
            if order.id not in known:
                new.setdefault(order.id, order)
        if new:
            with self._changing():
                said = self._accept(new.values())
                self._append("orders", {"orders": [o._asdict() for o in new.values()]}, said)
            known |= {status.id: status for status in said}
        return [known[order.id] for order in orders]

    def cancel(self, ids: Sequence[str]) -> None:
        with self._changing():
            said = self._drop(ids, CANCELLED)
            if said:
                self._append("cancel", {"ids": [status.id for status in said]}, said)

    def orders(self, ids: Sequence[str]) -> dict[str, OrderStatus]:
        """What became of orders, by id; one that never came is missing."""
        self._refuse_broken()
        known = {name: OrderStatus(name, "accepted") for name in ids if name in self._open}
        return known | self._journal.last_statuses(name for name in ids if name not in known)

    def open_orders(self) -> list[OrderStatus]:
        self._refuse_broken()
        return [OrderStatus(name, "accepted") for name in self._open]

    # Bars.

    def show_bars(self, bars: BarSet) -> Shown:
        """Fill the open orders at these bars; the last bars again get the same answer.

        Raises DataError, and changes nothing, by bars that cannot be.
        """
        bars = replace(bars, exogenous=None)  # no fill depends on it, and files behind it may grow
        if bars.time <= self.time:
            self._refuse_broken()
            return self._answer_again(bars)
        with self._changing():
            fills, said = self._go_on(bars)
            self._journal.append("bars", *encode_bars(bars))
            self._cursor = str(self._journal.seq + 1)
            shown = Shown(fills, self._account(), said, self._cursor)
            self._append("shown", shown.to_dict(), said)
            if self._bars % self._snapshot_every == 0:
                self._snapshot()
        return shown

    def fills(self, after: str) -> tuple[list[VenueFill], str]:
        self._refuse_broken()
        if after and not (after.isdecimal() and int(after) <= self._journal.seq):
            raise UsageError(
                f"the venue's journal {self._journal.path} has no fill {after[:40]!r}: it is "
                "another one's, or older. Use the venue's journal that belongs to the engine's."
            )
        with blaming(self._journal.path, _REMEDY):
            shown = self._journal.entries(int(after or 0), kinds=("shown",))
            return [fill for entry in shown for fill in _fills_of(entry)], self._cursor

    def account(self) -> Account:
        self._refuse_broken()
        return self._account()

    def _account(self) -> Account:
        book, symbols = self._books.book, self._world.symbols
        shares = book.shares[0]
        # Where T+1 does not hold, more may count as bought today than is left of it.
        locked = np.minimum(book.locked[0], shares)
        held = ({symbols[n]: float(a[n]) for n in np.flatnonzero(a)} for a in (shares, locked))
        return Account(float(book.cash[0]), *held)

    # What happens, of which the journal says only what was asked.

    def _accept(self, orders: Iterable[OrderRequest]) -> list[OrderStatus]:
        """Open new orders; what is said of each, and of those that they replace."""
        said = []
        at = {order.symbol: name for name, order in self._open.items()}
        for order in orders:
            reason = self._refusal(order)
            if reason is not None:
                said.append(OrderStatus(order.id, "rejected", 0.0, reason))
                continue
            said += self._drop([at[order.symbol]] if order.symbol in at else [], REPLACED)
            self._open[order.id], at[order.symbol] = order, order.id
            said.append(OrderStatus(order.id, "accepted"))
        return said

    def _refusal(self, order: OrderRequest) -> str | None:
        if order.symbol not in self._columns:
            return _CODES[Reason.NOT_MEMBER]
        shares, money = _wish(order)
        numbers = np.isfinite([shares, money]).all() and abs(shares) <= _MOST
        either = (shares != 0.0) != (money > 0.0) and 0.0 <= money <= _MOST
        right = (order.side == "sell") == (shares < 0.0)
        return None if numbers and either and right else INVALID

    def _drop(self, ids: Iterable[str], reason: str) -> list[OrderStatus]:
        return [
            OrderStatus(name, "cancelled", 0.0, reason)
            for name in ids
            if self._open.pop(name, None) is not None
        ]

    def _go_on(self, bars: BarSet) -> tuple[list[VenueFill], list[OrderStatus]]:
        """Fill the open orders at these bars: (fills, how each order ended)."""
        world, books = self._world, self._books
        panel = copy.copy(self._panel)
        row = panel.push(bars)
        x, present = _no_features(1, world.n_assets)
        world.append(row, x[0], present[0])
        learn_reasons(world, self._panel.reasons, panel.reasons)
        self._panel = panel
        orders = Orders(*np.zeros((2, 1, world.n_assets)))
        for order in self._open.values():
            n = self._columns[order.symbol]
            orders.shares[0, n], orders.spend[0, n] = _wish(order)
        done = books.fill(orders).fills
        time, ended = str(bars.time.astype("datetime64[us]")), list(self._open.values())
        self._open, self._bars = {}, self._bars + 1
        ended.sort(key=lambda order: self._columns[order.symbol])
        each = [(order, self._columns[order.symbol]) for order in ended]
        fills = [_fill(order, done, n, time) for order, n in each if done.shares[0, n] != 0.0]
        return fills, [_end(order.id, done, n) for order, n in each]

    def _answer_again(self, bars: BarSet) -> Shown:
        """What these bars were answered, if they are those of the last time."""
        shown, entry = self._journal.last("shown"), self._journal.last("bars")
        if shown is None or entry is None or bars.time < self.time:
            raise StaleBarsError(
                f"the bars of {bars.time} are not after the last ones, {self.time}: the venue has "
                f"gone by them. Its journal {self._journal.path} is not that of this engine's: put "
                "back the one it traded with, or begin both anew."
            )
        document, data = encode_bars(bars)
        was = json_line(entry.body, sort_keys=True), entry.data or b""
        if (json_line(document, sort_keys=True), data) != was:
            raise StaleBarsError(
                f"other bars of {bars.time} were shown to the venue already. A bar is shown once; "
                "correct data count from the next bar on."
            )
        with blaming(self._journal.path, _REMEDY):
            return Shown.from_dict(shown.body)

    # The journal.

    def _append(self, kind: str, body: Mapping[str, Any], said: Sequence[OrderStatus]) -> None:
        document = {**body, "statuses": [status._asdict() for status in said]}
        self._journal.append_about(kind, document, [status.id for status in said])

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Around a change: it is on disk at the end. One that fails ends the venue."""
        self._refuse_broken()
        self._broken = True
        try:
            yield
        except DataError:  # refused before anything changed
            self._broken = False
            raise
        self._journal.commit()
        self._broken = False

    def _refuse_broken(self) -> None:
        if self._broken:
            raise StoreError(
                f"{self._journal.path}: the paper venue failed in the middle of a change and "
                "cannot go on. Start it again: it goes on from its journal."
            )

    def _snapshot(self) -> None:
        market, facts = market_state(self._panel, self._world)
        facts |= {
            "open": [order._asdict() for order in self._open.values()],
            "bars": self._bars,
            "cursor": self._cursor,
        }
        self._journal.snapshot(
            encode_state(market | with_prefix("books.", self._books.state()), facts)
        )

    def _replay(self, entries: Iterable[Entry]) -> None:
        """Do again what was asked behind a snapshot; it must come out as it was written."""
        fills: list[VenueFill] = []
        said: list[OrderStatus] = []
        for entry in entries:
            kind, body = entry.kind, entry.body
            if kind == "bars":
                fills, said = self._go_on(decode_bars(body, entry.data or b""))
                continue
            if kind == "orders":
                said = self._accept(OrderRequest(**order) for order in body["orders"])
            elif kind == "cancel":
                said = self._drop(body["ids"], CANCELLED)
            elif kind == "shown":
                self._cursor = body["cursor"]
                was = _fills_of(entry), account_of(body["account"])
                self._compare(entry, was == (fills, self._account()))
            else:
                continue
            self._compare(entry, said == statuses(body["statuses"]))

    def _compare(self, entry: Entry, same: bool) -> None:
        if not same:
            raise DamagedError(
                self._journal.path,
                f"entry {entry.seq}: this machine or version fills otherwise",
                "Run the version that wrote it, on the same kind of machine.",
            )


class VenueJournal(Journal):
    """A journal that knows which entry last said something of an order."""

    @classmethod
    def open(cls, path: Path, about: Mapping[str, Any], *, sync: bool = True) -> VenueJournal:
        journal = super().open(path, about, sync=sync)
        assert isinstance(journal, VenueJournal), "made by the class it was asked of"
        try:
            with blaming_sqlite(path):
                journal._db.execute(
                    "CREATE TABLE IF NOT EXISTS orders(id TEXT PRIMARY KEY, seq INTEGER NOT NULL) "
                    "WITHOUT ROWID"
                )
        except BaseException:
            journal.close()
            raise
        return journal

    def append_about(self, kind: str, body: Mapping[str, Any], ids: Iterable[str]) -> None:
        """Add an entry whose `statuses` are of these orders."""
        seq = self.append(kind, body)
        rows = [(name, seq) for name in ids]
        with self._writing():
            self._db.executemany("INSERT OR REPLACE INTO orders VALUES(?,?)", rows)

    def last_statuses(self, ids: Iterable[str]) -> dict[str, OrderStatus]:
        """What was last said of orders, by id."""
        entries: dict[int, list[str]] = {}
        known: dict[str, OrderStatus] = {}
        with blaming_sqlite(self.path), blaming(self.path, _REMEDY):
            for name in ids:
                row = self._db.execute("SELECT seq FROM orders WHERE id = ?", (name,)).fetchone()
                if row is not None:
                    entries.setdefault(int(row[0]), []).append(name)
            for seq, names in entries.items():
                (entry,) = islice(self.entries(seq - 1), 1)
                said = {status.id: status for status in statuses(entry.body["statuses"])}
                known |= {name: said[name] for name in names}
        return known


def _line_behind(bundle: Bundle, store: Path, until: date | None) -> _Line:
    """A new account behind the history of a store."""
    history = read_history(bundle, store, until)
    n_rows = len(history.panel.times) - history.first
    world = history.world(bundle, *_no_features(n_rows, len(bundle.symbols)), 0)
    panel = PanelStream.from_panel(history.panel, history.facts)
    return _Line(panel, world, _books(bundle, world, n_rows - 1))


def _line_of(
    bundle: Bundle, parts: Mapping[str, Any], facts: Mapping[str, Any], journal: Path
) -> _Line:
    """As a snapshot has it."""
    try:
        panel, world = restore_market(bundle, dict(parts), facts, 0)
        books = _books(bundle, world, world.kept.stop - 1)
        books.restore(below_prefix("books.", dict(parts)))
    except (KeyError, ValueError, TypeError, StoreError) as error:
        raise DamagedError(journal, str(error), _REMEDY) from error
    return _Line(panel, world, books)


def _books(bundle: Bundle, world: GrowingWorld, row: int) -> Books:
    """The one book, at the row of the last bars."""
    rule = ActionRule.from_config(bundle.config, bundle.policy().kind)
    return Books(world, rule, RewardConfig(), 1, live_span(row))


def _no_features(n_rows: int, n_assets: int) -> tuple[Floats32, Bools]:
    """x[T,N,1] and present[T,N] of a world in which nobody decides."""
    shape = n_rows, n_assets
    return np.zeros((*shape, 1), dtype=np.float32), np.zeros(shape, dtype=np.bool_)


def _wish(order: OrderRequest) -> tuple[float, float]:
    """(shares to buy or sell, money to buy for) as the kernel gets them."""
    if order.wanted == 0.0 and order.spend == 0.0:  # sent by the numbers that any broker takes
        return (-order.shares if order.side == "sell" else order.shares), 0.0
    return order.wanted, order.spend


def _fill(order: OrderRequest, done: Fills, n: int, time: str) -> VenueFill:
    """What was filled of the order for asset n. Its number follows from order and bar."""
    names = ("shares", "price", "commission", "stamp", "slippage")
    numbers = {name: float(getattr(done, name)[0, n]) for name in names}
    return VenueFill(f"{order.id}@{time}", order.id, order.symbol, **numbers, time=time)


def _end(name: str, done: Fills, n: int) -> OrderStatus:
    """How the order for asset n ended at its bar."""
    filled, reason = abs(float(done.shares[0, n])), int(done.reason[0, n])
    why = None if reason == Reason.NONE else _CODES[reason]
    if filled > 0.0 and reason in _WHOLE:
        return OrderStatus(name, "filled", filled, why)
    return OrderStatus(name, "cancelled", filled, why or _CODES[Reason.TOO_SMALL])


def _fills_of(entry: Entry) -> list[VenueFill]:
    return [VenueFill(**fill) for fill in entry.body["fills"]]
