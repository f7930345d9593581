"""The decision engine: one bar set in, one decision out; the research line, fed by a stream.

`push`, for the bars of one time:

1. A row of the panel (`PanelStream`), of features (`FeatureStream`), of the world (`GrowingWorld`):
   the functions that prepared the training data. Bars that cannot be are refused before anything
   has changed.
2. The account goes one bar on: the orders of the decision before are filled at this bar by the
   kernel, in the `Books` that backtests step. Whoever trades elsewhere says what is held instead.
3. The policy decides, `act` makes orders, and symbols without one get a reason (`decision`).

`complete` does what no order waits for (`HierarchyPolicy.complete`). Pushing stored bars is a
backtest, bit for bit: see `replay`. `save` and `restore` go on after a stop with the same bits.

An engine that fails inside of a push, not by its input, refuses to go on: start it again from its
file, or from the store. Axes: `N` assets, `F` features; one book.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from echelon.backtest.budget import BudgetPolicy, decider
from echelon.backtest.policy import StatefulPolicy, lookback_of
from echelon.config.agents import RewardConfig
from echelon.data.build import PanelRequest, build_panel, panel_kind, stream_facts
from echelon.data.derive import FIELDS, Listings
from echelon.data.exogenous import ExogenousStream
from echelon.data.panel import Panel
from echelon.data.store import Manifest, Store
from echelon.data.stream import BarSet, PanelStream, StreamFacts, StreamState
from echelon.envs.act import Action, ActionRule
from echelon.envs.books import Books
from echelon.envs.growing import GrowingWorld, live_span
from echelon.envs.world import World, WorldFacts
from echelon.errors import (
    DamagedError,
    DataError,
    InvalidDataError,
    Problem,
    StaleBarsError,
    StoreError,
    shorten,
)
from echelon.features.engine import FeaturePlan, load_exogenous
from echelon.features.prepare import panel_fields
from echelon.features.registry import select
from echelon.features.stream import FeatureStream
from echelon.files import check_tree, json_line
from echelon.market import Book, Fills, TradedData
from echelon.market.kernel import mark
from echelon.market.rows import next_volume
from echelon.population.policy import HierarchyPolicy
from echelon.serving.bundle import Bundle
from echelon.serving.decision import (
    Decision,
    depends_on_volume,
    explain,
    list_fills,
    list_orders,
    name_command,
    try_orders,
)
from echelon.serving.state_file import read_state, write_state
from echelon.sources import SourceInfo
from echelon.states import State, below_prefix, match_state, with_prefix
from echelon.types import Bools, Floats32

_AGAIN = "Move it away, or name another state file, and the engine starts from the store again."
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?)?", re.ASCII)


class Account(NamedTuple):
    """What is held at the close of a bar: money, symbol → shares, and those that T+1 locks."""

    cash: float
    positions: Mapping[str, float]
    locked: Mapping[str, float] = {}


class _Line(NamedTuple):
    """The line that a bar goes along; panel is replaced by every push."""

    panel: PanelStream
    features: FeatureStream
    world: GrowingWorld


class History(NamedTuple):
    """A store's bars up to a day, as a panel. first: its row that is the policy's first"""

    panel: Panel
    facts: StreamFacts
    info: SourceInfo
    first: int

    def world(self, bundle: Bundle, x: Floats32, present: Bools, lookback: int) -> GrowingWorld:
        """The world of its rows from `first` on; x[T,N,F], present[T,N]: theirs."""
        return GrowingWorld.from_history(
            self.panel,
            x,
            present,
            bundle.config,
            splits=_splits(bundle),
            lookback=lookback,
            reasons=self.facts.reasons,
            costs=float(bundle.config.eval.use_fee),
        )


def read_history(bundle: Bundle, store: Path, until: date | None) -> History:
    """The history in a store up to the day `until`, or to its last bar."""
    opened, name = Store(store), bundle.universe["dataset"]["name"]
    opened = opened.pin_dataset(name)
    manifest = opened.manifest(name)
    _refuse_dataset(bundle, manifest, store)
    request = bundle_request(bundle, until)
    panel = build_panel(opened, name, request)
    facts = stream_facts(opened, name, request, panel.times[-1].item())
    first = int(np.searchsorted(panel.times, np.datetime64(bundle.universe["first"], "us")))
    if first >= len(panel.times):
        raise DataError(
            f"{store}: the history of {name!r} ends at {panel.times[-1]}, before the first row "
            f"that the policy knows ({bundle.universe['first']}). Import more of it."
        )
    return History(panel, facts, manifest.info, first)


class DecisionEngine:
    def __init__(self, bundle: Bundle, line: _Line, row: int, state: Path | None = None) -> None:
        """Use `from_store` or `restore`. row: of the first decision; state: file to keep up."""
        self.bundle = bundle
        self.policy = bundle.policy()
        self._decision: Decision | dict[str, Any] | None = None
        if (hierarchy := self.hierarchy) is not None:
            hierarchy.keep_record = False
        self._panel, self._features, self._world = line
        self._state_path, self._first_row = state, row
        rule = ActionRule.from_config(bundle.config, self.policy.kind)
        self.policy.start(self._world, live_span(row))
        self._books = Books(self._world, rule, RewardConfig(), 1, live_span(row))
        self._pending: NDArray[Any] | None = None
        self._digest = ""
        self._broken = False
        self._series: ExogenousStream | None = None
        self._series_seen: list[tuple[int, int]] = []

    @classmethod
    def from_store(
        cls, bundle: Bundle, store: Path, *, until: date | None = None, state: Path | None = None
    ) -> DecisionEngine:
        """An engine behind the history in a store, up to the day `until` or its last bar.

        state: file that every push writes, for `restore`
        """
        history = read_history(bundle, store, until)
        plan = _plan(bundle, history.info)
        features, x, present = _fold_features(bundle, plan, history.panel, history.first)
        world = history.world(bundle, x, present, _lookback(bundle))
        line = _Line(PanelStream.from_panel(history.panel, history.facts), features, world)
        return cls(bundle, line, len(x), state)

    @property
    def decision(self) -> dict[str, Any] | None:
        """The last decision, as `Decision.to_dict` gives it."""
        if isinstance(self._decision, Decision):  # no order waits for this
            self._decision = self._decision.to_dict()
        return self._decision

    @property
    def hierarchy(self) -> HierarchyPolicy | None:
        """The policy that decides, where it is one; limits of the real book may stand before it."""
        policy = decider(self.policy)
        return policy if isinstance(policy, HierarchyPolicy) else None

    @property
    def symbols(self) -> tuple[str, ...]:
        return self._world.symbols

    @property
    def world(self) -> World:
        return self._world

    @property
    def row(self) -> int:
        """Of `world`, of the last bar."""
        return self._world.kept.stop - 1

    @property
    def panel(self) -> PanelStream:
        """Where the panel's rows come from: its kind, and the last bar."""
        return self._panel

    @property
    def time(self) -> np.datetime64:
        return self._panel.time

    def read_bars(
        self, time: str, bars: Sequence[Mapping[str, Any]], benchmark: float | None = None
    ) -> BarSet:
        """The bars of one time from one mapping a symbol; raises an error that lists every problem.

        bars: symbol and close, and what else the dataset has; a symbol without a bar did not trade
        """
        kind, place = self._panel.kind, f"bars of {time}"
        column = {symbol: n for n, symbol in enumerate(self.symbols)}
        known = [name for name in FIELDS if name in kind.fields]
        grids: dict[str, Any] = {name: np.full(len(column), np.nan) for name in known}
        st, seen, problems = np.zeros(len(column), dtype=np.bool_), set[str](), list[Problem]()

        def note(row: int, field: str, message: str, remedy: str) -> None:
            problems.append(Problem(place, row, field, message, remedy))

        for row, bar in enumerate(bars):
            symbol = str(bar.get("symbol"))
            if symbol not in column or symbol in seen:
                what = "is given twice" if symbol in seen else "is not in the bundle's universe"
                note(row, "symbol", f"{symbol!r} {what}", "Send each of its symbols once.")
                continue
            seen.add(symbol)
            n = column[symbol]
            for field in bar.keys() - {"symbol", "st", *known}:
                note(row, field, "the dataset has no such field", "Leave it out.")
            for field in known:
                value = bar.get(field)
                if value is None:
                    if field not in ("factor", "pre_close", "amount"):
                        note(row, field, f"{symbol} has none", "Send it: the dataset has it.")
                elif isinstance(value, bool) or not isinstance(value, int | float):
                    note(row, field, f"{value!r} is no number", "Send a number.")
                else:
                    grids[field][n] = float(value)
            st[n] = bool(bar.get("st", False))
        if problems:
            raise InvalidDataError(problems, f"{len(problems)} problem(s) in the {place}")
        return BarSet(time=parse_time(time), st=st, benchmark=benchmark, **grids)

    def push(self, bars: BarSet, account: Account | None = None) -> Decision:
        """Decide on the bars of one time; raises DataError, and changes nothing, by bad input.

        account: what is held at this close; None: the simulated account, one bar on
        """
        held = None if account is None else self._book_of(account)
        fills = self._follow(self._take(bars), held)
        decision = self._decide(fills)
        self._decision, self._digest = decision, _digest(bars, account)
        if self._state_path is not None:
            write_state(self._state_path, *self._state())
        self._broken = False
        return decision

    def observe(self, bars: BarSet) -> int:
        """Take the bars of one time and decide nothing; the number of their row in `world`."""
        row = self._take(bars)
        self._broken = False
        return row

    def _take(self, bars: BarSet) -> int:
        self._refuse_broken()
        if bars.time <= self.time:
            raise StaleBarsError(
                f"the bars of {bars.time} are not after the last ones, {self.time}: they are "
                "repeated or out of order. Push each time once, in order."
            )
        panel = copy.copy(self._panel)
        row = panel.push(bars)
        features = self._features.push(row, self.with_series(bars).exogenous)
        self._broken = True  # until all of it is done
        learn_reasons(self._world, self._panel.reasons, panel.reasons)
        self._panel = panel
        return self._world.append(row, features.x, features.present)

    def answer(self, bars: BarSet, account: Account | None = None) -> dict[str, Any]:
        """What `push` decides, as JSON; the same bars again get the same answer."""
        self._refuse_broken()
        if self.decision is not None and bars.time == self.time:
            if _digest(bars, account) == self._digest:
                return self.decision
            raise StaleBarsError(
                f"other bars of {bars.time} were decided on already. A bar is pushed once; correct "
                "data count from the next bar on."
            )
        self.push(bars, account)
        assert self.decision is not None
        return self.decision

    def complete(self) -> None:
        """Do what no order waits for: the own books of a hierarchy's experts."""
        if self.hierarchy is not None and self._decision is not None:
            self.hierarchy.complete()

    def summary(self) -> dict[str, Any]:
        """What is served, and up to where; for JSON."""
        kept = self._world.kept
        return {
            "bundle": self.bundle.id,
            "policy": self.bundle.manifest["policy"],
            "runtime": self.bundle.runtime,
            "symbols": list(self.symbols),
            "time": str(self.time),
            "rows": {"first": kept.start, "last": kept.stop - 1},
            "decisions": self._decision is not None,
            "equity": float(self._books.value[0]),
        }

    def save(self, path: Path) -> None:
        """Write all that the next decision depends on, whole or not at all."""
        write_state(path, *self.state())

    def state(self) -> tuple[State, dict[str, Any]]:
        """(arrays, document) of all that the next decision depends on, for `from_state`."""
        self._refuse_broken()
        return self._state()

    def _state(self) -> tuple[State, dict[str, Any]]:
        features = self._features.state()
        parts: State = {} if self._pending is None else {"pending": self._pending}
        market, facts = market_state(self._panel, self._world)
        parts |= market | with_prefix("features.", features.arrays)
        parts |= with_prefix("books.", self._books.state())
        if isinstance(self.policy, StatefulPolicy):
            parts |= with_prefix("policy.", self.policy.state())
        facts |= {
            "bundle": self.bundle.id,
            "features": features.facts,
            "decision": self.decision,
            "digest": self._digest,
            "first_row": self._first_row,
        }
        return parts, facts

    @classmethod
    def restore(cls, bundle: Bundle, path: Path, *, keep: bool = True) -> DecisionEngine:
        """The engine that `save` wrote; keep: every push writes the file again."""
        return cls.from_state(bundle, *read_state(path, _AGAIN), path, path if keep else None)

    @classmethod
    def from_state(
        cls,
        bundle: Bundle,
        parts: State,
        facts: Mapping[str, Any],
        path: Path,
        keep: Path | None = None,
        lookback: int = 0,
    ) -> DecisionEngine:
        """The engine that `state` was of; path: where it was read, for errors.

        keep: file that every push writes; lookback: rows to keep, where more than are needed
        """
        known = check_tree(facts, _StateFacts, path, _AGAIN)
        if known["bundle"] != bundle.id:
            raise StoreError(
                f"{path}: the state of another bundle ({shorten(known['bundle'], 12)}) than "
                f"{bundle.path} ({bundle.id[:12]}). {_AGAIN}"
            )
        try:
            line = _restore_line(bundle, parts, facts, lookback)
            decided = "pending" in parts
            row = int(parts["books.row"][0]) if decided else known["first_row"]
            if not 0 <= row < line.world.kept.stop + (not decided):
                raise ValueError(f"row {row} of {line.world.kept.stop}")
            engine = cls(bundle, line, row, keep)
            if isinstance(engine.policy, StatefulPolicy):
                engine.policy.restore(below_prefix("policy.", parts))
            if decided:
                engine._books.restore(below_prefix("books.", parts))
                _refuse_odd_books(engine._books, engine._world)
                engine._pending = engine._match_pending(parts)
            engine._decision, engine._digest = known["decision"], known["digest"]
        except (*_NOT_OURS, StoreError) as error:
            raise DamagedError(path, str(error), _AGAIN) from error
        return engine

    def _match_pending(self, parts: State) -> NDArray[Any]:
        """[1,N] the actions of the last decision, as this policy gives them."""
        kind = np.int8 if self.policy.kind == "discrete" else np.float64
        like = {"pending": np.zeros((1, len(self.symbols)), dtype=kind)}
        pending = match_state("decision", like, parts)["pending"]
        known = np.isin(pending, list(Action)) if kind is np.int8 else ~np.isinf(pending)
        if not known.all():
            raise ValueError(f"pending is {shorten(pending.tolist())}, which is no decision")
        return pending

    def _decide(self, fills: tuple[Any, ...]) -> Decision:
        """Ask the policy about the account as it is now."""
        books, policy, world = self._books, self.policy, self._world
        held = books.holdings()
        action = policy.decide(books.row, held)
        self._pending = np.array(action)
        wanted, refused = books.orders(action)
        row = int(books.row[0])
        volume = np.full(world.n_assets, np.inf)
        if depends_on_volume(books.rules):
            volume = next_volume(world.rows, row, self.bundle.config.market.median_days)
        tried = try_orders(books, wanted, volume, new_session=world.facts.freq == "1d")
        hierarchy = self.hierarchy
        command = None if hierarchy is None else hierarchy.command
        cap = float(policy.verdict.cap[0]) if isinstance(policy, BudgetPolicy) else None
        close = world.rows.close[row]
        return Decision(
            time=world.times[row],
            symbols=world.symbols,
            kind=policy.kind,
            action=np.array(action[0]),
            weights=held.weights[0].astype(np.float64),
            wanted=wanted,
            orders=list_orders(world.symbols, tried, close),
            why=explain(books, wanted, tried, refused, command),
            equity=float(books.value[0]),
            cash=float(books.book.cash[0]),
            shares=books.book.shares[0].copy(),
            fills=fills,
            in_charge=None
            if command is None or hierarchy is None
            else name_command(command, hierarchy.expert_names),
            exposure_cap=cap,
        )

    def _follow(self, row: int, held: Book | None) -> tuple[Any, ...]:
        """Bring the account to the new bar; what came of the last orders, where it is simulated."""
        books = self._books
        if held is not None:
            books.book, books.row = held, np.array([row])
            books.value = mark(held, self._world.rows, books.row)
            return ()
        if self._pending is None:
            books.reset(np.array([row]))
            return ()
        fills: Fills = books.step(self._pending).fills
        return list_fills(self.symbols, fills)

    def _book_of(self, account: Account) -> Book:
        """A book of one account; unknown symbols and odd numbers are refused."""
        column = {symbol: n for n, symbol in enumerate(self.symbols)}
        shares, locked = np.zeros((2, 1, len(column)))
        for grid, given in ((shares, account.positions), (locked, account.locked)):
            for symbol, count in given.items():
                if symbol not in column:
                    raise DataError(
                        f"the account holds {symbol!r}, which is not in the bundle's universe. "
                        "Leave out what the policy does not trade, and its value with it."
                    )
                if not 0.0 <= count <= _MOST_SHARES:
                    raise DataError(f"the account's {symbol}: {count} shares, expected 0 or more.")
                grid[0, column[symbol]] = count
        if (locked > shares).any():
            raise DataError("the account locks more shares than it holds. Correct `locked`.")
        if not 0.0 <= account.cash <= _MOST_SHARES:
            raise DataError(f"the account's cash is {account.cash}, expected 0 or more.")
        return Book(np.array([float(account.cash)]), shares, locked)

    def with_series(self, bars: BarSet) -> BarSet:
        """The bars with the series as known at their time: their own, or those of the files."""
        if not self._features.plan.exogenous or bars.exogenous is not None:
            return bars
        configs, kind = self.bundle.config.data.exogenous, self._panel.kind
        seen = [(stat.st_mtime_ns, stat.st_size) for stat in (c.path.stat() for c in configs)]
        if self._series is None or seen != self._series_seen:  # new values may have come
            place = kind.symbols, kind.freq, kind.calendar, kind.timezone
            self._series, self._series_seen = ExogenousStream(configs, *place), seen
        return replace(bars, exogenous=self._series.at(bars.time))

    def _refuse_broken(self) -> None:
        if self._broken:
            raise StoreError(
                "this engine failed in the middle of a bar and cannot go on. Start it again from "
                "its state file, or from the store."
            )


class _StateFacts(TypedDict):
    bundle: str
    panel: dict[str, Any]
    features: dict[str, Any]
    world: dict[str, bool]
    decision: dict[str, Any] | None
    digest: str
    first_row: int


_NOT_OURS = (
    *(LookupError, ValueError, TypeError, AttributeError, ArithmeticError),
    *(OSError, MemoryError),  # rows that no machine has room for
)
"""What the parts of a state raise that somebody else wrote."""


def _refuse_odd_books(books: Books, world: GrowingWorld) -> None:
    """Raise ValueError where they are not at the last row, or hold what nobody can."""
    kept, row, book = world.kept, int(books.row[0]), books.book
    if row != kept.stop - 1 or len(kept) < world.window:
        what = f"rows {kept.start} to {kept.stop - 1} are kept, books.row is {row}"
        raise ValueError(f"{what}; expected the last one of at least {world.window}")
    for name, part in {"value": books.value, **book._asdict()}.items():
        if not np.isfinite(part).all():
            raise ValueError(f"books.{name} is {shorten(part.tolist())}, expected finite numbers")


_HAS = ("opens", "volume", "limits")
_MOST_SHARES = 1e18


def learn_reasons(
    world: GrowingWorld, before: Sequence[str | None], now: Sequence[str | None]
) -> None:
    """Take news of why symbols [N] are delisted."""
    if now is not before:
        for symbol, was, reason in zip(world.symbols, before, now, strict=True):
            if reason is not None and reason != was:
                world.set_delist_reason(symbol, reason)


def bundle_request(bundle: Bundle, until: date | None = None) -> PanelRequest:
    """The bars that a bundle was made for, up to a day."""
    data = bundle.config.data
    return PanelRequest(bundle.symbols, None, until, data.limits, data.delist_after)


def _lookback(bundle: Bundle) -> int:
    return max(lookback_of(bundle.policy()), bundle.config.market.median_days)


def _splits(bundle: Bundle) -> dict[str, range]:
    return {name: range(*rows) for name, rows in bundle.universe["splits"].items()}


def _refuse_dataset(bundle: Bundle, manifest: Manifest, store: Path) -> None:
    """The store's dataset must be of the kind that the policy was trained on."""
    info, universe = manifest.info, bundle.universe
    for name, have in (
        ("freq", info.freq),
        ("calendar", info.calendar),
        ("price_basis", info.price_basis),
        ("fields", sorted(info.fields)),
    ):
        want = sorted(universe["fields"]) if name == "fields" else universe[name]  # type: ignore[literal-required]
        if have != want:
            raise DataError(
                f"{store}: dataset {manifest.name!r} has {name} {have}, but the bundle was trained "
                f"on {want}. Import the same source."
            )


def _plan(bundle: Bundle, info: SourceInfo) -> FeaturePlan:
    """The columns of X as this version computes them, which must be the bundle's."""
    config = bundle.config
    specs = select(config.features, panel_fields(config, info)).specs
    names = tuple(bundle.features["names"])
    computed = len(FeaturePlan.from_specs(specs).names)
    plan = FeaturePlan.from_specs(specs, names[computed:])
    if plan.names != names:
        odd = sorted(set(plan.names) ^ set(names))
        raise StoreError(
            f"{bundle.path}: its features are not those that this version computes "
            f"({', '.join(odd[:5]) or 'their order'}). Export the run again with this version."
        )
    return plan


def _fold_features(
    bundle: Bundle, plan: FeaturePlan, panel: Panel, first: int
) -> tuple[FeatureStream, Floats32, Bools]:
    """(stream behind the panel, x[T,N,F], present[T,N] of its rows from `first` on)."""
    rows = range(first, len(panel.times))
    if first:
        stream = FeatureStream.from_panel(take_rows(panel, slice(0, first)), plan, bundle.scaler)
    else:
        stream = FeatureStream(panel.symbols, plan, bundle.scaler)
    known = load_exogenous(bundle.config, panel) if plan.exogenous else None
    x = np.empty((len(rows), len(panel.symbols), len(plan.names)), dtype=np.float32)
    present = np.empty(x.shape[:2], dtype=np.bool_)
    for k, t in enumerate(rows):
        values = None if known is None else known.values[t]
        x[k], present[k] = stream.push(take_rows(panel, slice(t, t + 1)), values)
    return stream, x, present


def take_rows(panel: Panel, rows: slice) -> Panel:
    parts: dict[str, Any] = {}
    for item in fields(panel):
        array = getattr(panel, item.name)
        if isinstance(array, np.ndarray) and item.name != "anchor":
            parts[item.name] = array[rows]
    return replace(panel, **parts)


def _restore_line(bundle: Bundle, parts: State, facts: Mapping[str, Any], lookback: int) -> _Line:
    """Streams and world as they were saved."""
    panel, world = restore_market(bundle, parts, facts, max(_lookback(bundle), lookback))
    features = FeatureStream(bundle.symbols, _plan(bundle, _source(bundle)), bundle.scaler)
    features.restore(StreamState(below_prefix("features.", parts), facts["features"]))
    return _Line(panel, features, world)


def market_state(panel: PanelStream, world: GrowingWorld) -> tuple[State, dict[str, Any]]:
    """(arrays, document) that `restore_market` goes on from."""
    stream, data = panel.state(), world.facts
    parts = with_prefix("panel.", stream.arrays) | with_prefix("world.", world.state())
    has = {name: getattr(data.data, name) for name in _HAS}
    return parts, {"panel": stream.facts, "world": {**has, "benchmark": data.benchmark}}


def restore_market(
    bundle: Bundle, parts: State, facts: Mapping[str, Any], lookback: int
) -> tuple[PanelStream, GrowingWorld]:
    """Stream and world that `market_state` was of; lookback: rows that are kept."""
    universe, config, symbols = bundle.universe, bundle.config, bundle.symbols
    n = len(symbols)
    nat = np.full(n, np.datetime64("NaT"), dtype="datetime64[us]")
    days = nat.astype("datetime64[D]")
    known = Listings(nat, np.full(n, np.nan), days, days)
    kind = panel_kind(_source(bundle), symbols, bundle_request(bundle))
    has = facts["world"]
    level = np.nan if has["benchmark"] else None
    panel = PanelStream(StreamFacts(kind, known, (None,) * n, np.zeros(n, dtype=np.bool_), level))
    panel.restore(StreamState(below_prefix("panel.", parts), facts["panel"]))
    data = TradedData(
        universe["calendar"], universe["price_basis"], symbols, *(bool(has[k]) for k in _HAS)
    )
    kind_of_world = WorldFacts(
        data, universe["freq"], config.window, _splits(bundle), bool(has["benchmark"])
    )
    world = GrowingWorld.restore(
        below_prefix("world.", parts),
        kind_of_world,
        config,
        lookback=lookback,
        costs=float(config.eval.use_fee),
    )
    return panel, world


def _source(bundle: Bundle) -> SourceInfo:
    universe = bundle.universe
    return SourceInfo(
        universe["dataset"]["name"],
        universe["freq"],
        universe["calendar"],
        universe["timezone"],
        universe["price_basis"],
        frozenset(universe["fields"]),
        "",
    )


def parse_time(text: str) -> np.datetime64:
    """A bar's time as people and messages write it, in the exchange's own time."""
    time: np.datetime64 = np.datetime64("NaT", "us")
    # Neither offsets, which would move a bar to another session, nor years that wrap around.
    if _TIME.fullmatch(text):
        with suppress(ValueError):
            time = np.datetime64(text.replace(" ", "T"), "us")
    if np.isnat(time):
        raise DataError(
            f"{text!r} is no time. Write 2020-01-03, or 2020-01-03T09:35 for bars within the day, "
            "in the exchange's own time and without an offset."
        )
    return time


def _digest(bars: BarSet, account: Account | None) -> str:
    """Of everything that a decision was asked by."""
    state = hashlib.sha256()
    for name, value in vars(bars).items():
        if value is not None:
            content = value.tobytes() if isinstance(value, np.ndarray) else str(value).encode()
            state.update(f"{name}:{len(content)};".encode() + content)
    if account is not None:
        held = [account.cash, sorted(account.positions.items()), sorted(account.locked.items())]
        state.update(json_line(held).encode())
    return state.hexdigest()
