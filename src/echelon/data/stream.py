"""A panel that grows bar by bar: one set of bars in, one row out, equal to `build_panel`'s.

1. `PanelStream.from_panel` starts behind a historic panel: it derives that panel's rows again and
   keeps what they leave (`RowState`), so the stream continues where the batch ended.
2. `push` refuses what cannot be: a time that is not later, bars off the calendar, prices that no
   market has, fields the dataset does not have. A refusal changes nothing.
3. It takes in the reference facts that came with the bars, derives the row (`derive`, the function
   of the batch) and returns it as a panel of T = 1.

Nothing is known before it is pushed: a delisting, a listing day or a change of members counts from
the bar set it comes with. Where a fact is late, rows of the batch, which knows it on its day, can
differ from those in between; a late listing day also moves the sessions without price limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from echelon.data.bars import BOUNDS, PRICES
from echelon.data.calendars import FROM_DATA, MINUTES, ROUND_THE_CLOCK, bounds, hours, sessions
from echelon.data.derive import FIELDS, Listings, PanelKind, RawRows, RowState, derive
from echelon.data.panel import Panel
from echelon.errors import DataError, StoreError
from echelon.types import Bools, Floats, Times

TOLERANCE = 1e-4
"""How far, relatively, open and close may lie outside low and high, as in an import."""
_FAR = np.datetime64("9998-01-01", "D")
"""No calendar is asked for what comes after."""


@dataclass(frozen=True, eq=False)
class BarSet:
    """The bars of one time, of a panel's `N` symbols in its order, and what is known with them.

    Arrays are float64 [N], NaN where there is no bar; None where the dataset has no such field. A
    factor may be NaN beside a bar: then the last one holds, or 1 on a symbol's first bar.
    """

    time: np.datetime64  # [us], as the store has it: midnight of the session, or the bar's end
    close: Floats
    open: Floats | None = None
    high: Floats | None = None
    low: Floats | None = None
    volume: Floats | None = None
    amount: Floats | None = None
    factor: Floats | None = None
    pre_close: Floats | None = None
    st: Bools | None = None  # under special treatment; None: nobody is
    # Reference facts; None: no news.
    members: Bools | None = None  # [N] who is in the universe from now on
    listed: Times | None = None  # [N] datetime64[D], days of listing; NaT: no news
    delisted: Times | None = None  # [N] datetime64[D], days of delisting; NaT: no news
    reasons: tuple[str | None, ...] | None = None  # [N] why; None: no news
    benchmark: float | None = None  # level of the index
    exogenous: Floats | None = None  # [N,K] series as known now, NaN where none is in force


class StreamState(NamedTuple):
    """What a stream is stopped with and continued from: arrays by name, and facts for JSON."""

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]


@dataclass(frozen=True)
class StreamFacts:
    """What a panel does not say and its continuation needs; `build.stream_facts` reads it.

    members [N]: who is in the universe, listed or not; benchmark: None where the dataset has none
    """

    kind: PanelKind
    known: Listings
    reasons: tuple[str | None, ...]
    members: Bools
    benchmark: float | None


class PanelStream:
    """The rows of a panel as they come."""

    def __init__(self, facts: StreamFacts) -> None:
        """Before the first bar; see `from_panel` for one that continues a history."""
        self._facts = facts
        self._state = RowState.start(len(facts.kind.symbols))
        self._days = np.empty(0, dtype="datetime64[us]")
        self._hours: tuple[np.datetime64, list[Any]] | None = None

    @staticmethod
    def from_panel(panel: Panel, facts: StreamFacts) -> PanelStream:
        stream, kind = PanelStream(facts), facts.kind
        if panel.symbols != kind.symbols:
            raise DataError("the panel's symbols are not those of the stream. Build both from one.")
        names = (*PRICES, "volume", "amount")
        grids = {name: getattr(panel, name) for name in names if getattr(panel, name) is not None}
        ones = np.where(np.isnan(panel.close), np.nan, 1.0)
        grids["factor"] = ones if panel.factor is None else panel.factor
        st = np.zeros(panel.shape, dtype=np.bool_)
        rows = RawRows(panel.times, grids, st, panel.member, panel.benchmark)
        again, stream._state = derive(kind, facts.known, stream._state, rows)
        for name in ("present", "delisted", "suspended", "tradable"):
            if not np.array_equal(getattr(again, name), getattr(panel, name)):
                raise DataError(
                    f"the panel's {name!r} does not follow from these facts: they are of another "
                    "dataset or request. Read them by build.stream_facts as the panel was built."
                )
        return stream

    @property
    def kind(self) -> PanelKind:
        return self._facts.kind

    @property
    def time(self) -> np.datetime64:
        """Of the last row; NaT before the first."""
        return self._state.time

    @property
    def members(self) -> Bools:
        """Who [N] is in the universe."""
        return self._facts.members

    @property
    def has_benchmark(self) -> bool:
        return self._facts.benchmark is not None

    @property
    def factors(self) -> Floats:
        """Last factor of each symbol [N], as it came; NaN before its first bar."""
        return self._state.factor

    @property
    def reasons(self) -> tuple[str | None, ...]:
        """Why each symbol [N] was delisted, as far as known."""
        return self._facts.reasons

    def push(self, bars: BarSet) -> Panel:
        """The row of these bars: a panel of T = 1. Raises DataError, and changes nothing."""
        time = self._check_time(bars.time)
        self._check_shapes(bars)
        self._check_values(bars)
        facts = self._learn(bars)
        arrays = ((name, getattr(bars, name)) for name in FIELDS)
        grids = {name: array[None] for name, array in arrays if array is not None}
        factor = np.full_like(bars.close, np.nan) if bars.factor is None else bars.factor
        fresh = np.isnan(self._state.factor) & ~np.isnan(bars.close)
        grids["factor"] = np.where(fresh & np.isnan(factor), 1.0, factor)[None]
        st = np.zeros(len(fresh), dtype=np.bool_) if bars.st is None else bars.st
        level = None if facts.benchmark is None else np.array([facts.benchmark])
        rows = RawRows(time[None], grids, st[None], facts.members[None], level)
        row, self._state = derive(facts.kind, facts.known, self._state, rows)
        self._facts = facts
        return row

    def _learn(self, bars: BarSet) -> StreamFacts:
        """The facts with those of the bar set, and with first bars."""
        known = self._facts.known
        first = np.isnat(known.first) & ~np.isnan(bars.close)
        if first.any():
            anchor = np.where(first & np.isnan(known.anchor), bars.close, known.anchor)
            known = known._replace(first=np.where(first, bars.time, known.first), anchor=anchor)
        if bars.listed is not None:
            news = bars.listed.astype("datetime64[D]")
            known = known._replace(listed=np.where(np.isnat(news), known.listed, news))
        if bars.delisted is not None:
            news = bars.delisted.astype("datetime64[D]")
            known = known._replace(delisted=np.where(np.isnat(news), known.delisted, news))
        old = self._facts
        reasons, members, level = old.reasons, old.members, old.benchmark
        if bars.reasons is not None:
            both = zip(bars.reasons, reasons, strict=True)
            reasons = tuple(was if news is None else news for news, was in both)
        if bars.members is not None:
            members = bars.members.astype(np.bool_)
        if bars.benchmark is not None:
            level = float(bars.benchmark)
        return StreamFacts(old.kind, known, reasons, members, level)

    def _check_time(self, time: np.datetime64) -> Times:
        """The time as datetime64[us], later than the last and on the grid and the calendar."""
        last = self._state.time
        at = self.check_grid(time)
        if self._state.session >= 0 and at <= last:
            raise DataError(
                f"the bar set of {at} is not after the last one, {last}: it is repeated or out of "
                "order. Push each time once, in order."
            )
        missing = self.missing_sessions(last, at)
        if len(missing):
            raise DataError(
                f"the session {missing[0].item().date()} is missing before "
                f"{at.astype('datetime64[D]')}; the last was {last.astype('datetime64[D]')}. Push "
                "it first, without any bar if nobody traded."
            )
        return at

    def check_grid(self, time: np.datetime64) -> Times:
        """The time as datetime64[us]; DataError where no bar of this kind can end then."""
        kind = self._facts.kind
        at = np.datetime64(time).astype("datetime64[us]")
        if np.isnat(at):
            raise DataError("the bar set has no time. Set it to when its bars ended.")
        day = at.astype("datetime64[D]")
        if (at - day) % np.timedelta64(MINUTES[kind.freq], "m") != np.timedelta64(0, "us"):
            raise DataError(
                f"{at} is not on the grid of {kind.freq} bars: it is of another frequency."
            )
        if kind.calendar != FROM_DATA:
            self._check_session(day)
            if kind.freq != "1d" and kind.calendar != ROUND_THE_CLOCK:
                self._check_hours(np.asarray(at), day)
        return np.asarray(at)

    def missing_sessions(self, last: np.datetime64, at: np.datetime64 | Times) -> Times:
        """Of daily bars: sessions of the calendar between the bars of `last` and `at`."""
        kind = self._facts.kind
        if kind.freq != "1d" or kind.calendar == FROM_DATA or np.isnat(last):
            return self._days[:0]
        self._reach(np.datetime64(at.astype("datetime64[D]").item(), "D"))
        begin, end = np.searchsorted(self._days, [last, at], side="left")
        begin += int(begin < len(self._days) and self._days[begin] == last)
        return self._days[begin:end]

    def _check_hours(self, at: Times, day: np.datetime64) -> None:
        """A bar within the day lies in the hours of its session, both ends included."""
        kind = self._facts.kind
        if self._hours is None or self._hours[0] != day:
            table = hours(kind.calendar, day.astype(date), day.astype(date), kind.timezone)
            names = ("open", "break_start", "break_end", "close")
            spans = [table[name].to_numpy().astype("datetime64[us]")[0] for name in names]
            self._hours = day, spans
        begin, pause, again, end = self._hours[1]
        if not begin <= at <= end or pause < at < again:  # NaT, of no break, compares false
            raise DataError(
                f"{at} is outside the hours of {kind.calendar} ({begin} to {end}): the bars are of "
                "another calendar or time zone."
            )

    def _check_session(self, day: np.datetime64) -> None:
        self._reach(day)
        at = int(np.searchsorted(self._days, day))
        if at == len(self._days) or self._days[at] != day:
            raise DataError(
                f"{day} is not a session of {self.kind.calendar}: the bars are of another calendar."
            )

    def _reach(self, day: np.datetime64) -> None:
        """Let the known sessions include `day` and the last row's."""
        last = self._state.time.astype("datetime64[D]")
        start = day if np.isnat(last) else min(day, last)
        if len(self._days) and self._days[0] <= start and day <= self._days[-1]:
            return
        calendar = self._facts.kind.calendar
        ahead = min(day, _FAR).astype(date) + timedelta(days=400)
        reach = bounds(calendar).clip(start.astype(date), ahead)
        self._days = sessions(calendar, *reach) if reach[0] <= reach[1] else self._days[:0]

    def _check_shapes(self, bars: BarSet) -> None:
        kind = self._facts.kind
        shape = (len(kind.symbols),)
        for name in FIELDS:
            values = getattr(bars, name)
            if values is None and name in kind.fields - {"factor"}:
                raise DataError(f"the bar set has no {name}, which the dataset has. Add it.")
            if values is not None and name not in kind.fields:
                raise DataError(
                    f"the bar set has {name}, which the dataset does not. Leave it out."
                )
            if values is not None and (values.shape != shape or values.dtype != np.float64):
                raise DataError(
                    f"{name} is {values.dtype} {values.shape}, expected float64 {shape}: one "
                    "number for each symbol of the panel, NaN where there is no bar."
                )
        for name in ("st", "members", "listed", "delisted"):
            values = getattr(bars, name)
            if values is not None and values.shape != shape:
                raise DataError(f"{name} has the shape {values.shape}, expected {shape}.")
        if bars.reasons is not None and len(bars.reasons) != shape[0]:
            raise DataError(f"there are {len(bars.reasons)} reasons, expected {shape[0]}.")
        level = bars.benchmark
        if level is not None and self._facts.benchmark is None:
            raise DataError(
                "the bar set has a benchmark, which the dataset does not. Leave it out."
            )
        if level is not None and not (np.isfinite(level) and level > 0):
            raise DataError(f"the benchmark is {level}, expected a positive number.")

    def _check_values(self, bars: BarSet) -> None:
        """Prices that a market can have where there is a bar, and nothing where there is none."""
        for fault in find_faults(bars):
            raise DataError(
                f"{self._facts.kind.symbols[fault.asset]} at {bars.time}: {fault.why}. Correct the "
                "bar, or give it as missing (all NaN)."
            )

    def state(self) -> StreamState:
        """All that `restore` needs; arrays are copies."""
        facts, state = self._facts, self._state
        arrays: dict[str, Any] = {name: np.array(getattr(state, name)) for name in _STATE}
        arrays |= {f"known.{name}": array.copy() for name, array in facts.known._asdict().items()}
        arrays["members"] = facts.members.copy()
        arrays["benchmark"] = np.array(np.nan if facts.benchmark is None else facts.benchmark)
        plain = {
            name: array.astype("int64") if array.dtype.kind == "M" else array
            for name, array in arrays.items()
        }
        tree = {"symbols": list(facts.kind.symbols), "reasons": list(facts.reasons)}
        return StreamState(plain, tree | {"session": state.session})

    def restore(self, state: StreamState) -> None:
        """Continue from what `state` gave, in a stream of the same symbols."""
        facts, mine = self._facts, self.state()
        if state.facts.get("symbols") != mine.facts["symbols"]:
            raise StoreError("the state is of a stream of other symbols. Start anew from history.")
        check_arrays(state.arrays, mine.arrays)
        arrays = {k: v.copy() for k, v in state.arrays.items()}
        for name, unit in _TIMES.items():
            arrays[name] = arrays[name].astype(f"datetime64[{unit}]")
        known = Listings(*(arrays[f"known.{name}"] for name in Listings._fields))
        values: dict[str, Any] = {name: arrays[name][()] for name in _STATE}
        self._state = RowState(session=int(state.facts["session"]), **values)
        reasons = tuple(state.facts["reasons"])
        level = None if facts.benchmark is None else float(arrays["benchmark"])
        self._facts = StreamFacts(facts.kind, known, reasons, arrays["members"], level)


class Fault(NamedTuple):
    """What is wrong with the bar of one asset; why: field, value and what was expected."""

    asset: int
    why: str


def find_faults(bars: BarSet) -> Iterator[Fault]:
    """Bars that no market has, an asset's first fault each."""
    have = [name for name in FIELDS if getattr(bars, name) is not None]
    values = np.stack([getattr(bars, name) for name in have])
    low, high, zero, optional = (column[:, None] for column in _rules(tuple(have)))
    on, missing = ~np.isnan(bars.close), np.isnan(values)
    inside = ((values >= low) & (values <= high)) | (zero & (values == 0))
    bad = np.where(on, ~(inside | (optional & missing)), ~missing)
    outside = _outside(bars)
    if not bad.any() and not any(mask.any() for mask in outside.values()):
        return
    for n in range(len(on)):
        if bad[:, n].any():
            k = int(np.argmax(bad[:, n]))
            span = f"expected {low[k, 0]:g} to {high[k, 0]:g}"
            why = span if on[n] else "but there is no close, so no bar"
            yield Fault(n, f"{have[k]} is {values[k, n]:g}, {why}")
            continue
        name = next((name for name, mask in outside.items() if mask[n]), None)
        if name is not None:
            yield Fault(n, f"{name} is {getattr(bars, name)[n]:g}, outside low to high")


def _outside(bars: BarSet) -> dict[str, Bools]:
    """Price → where it lies outside low to high [N]."""
    if bars.high is None or bars.low is None:
        return {}
    top, bottom = bars.high * (1 + TOLERANCE), bars.low * (1 - TOLERANCE)
    prices = ((name, getattr(bars, name)) for name in ("high", "open", "close"))
    return {name: (p > top) | (p < bottom) for name, p in prices if p is not None}


@lru_cache(maxsize=16)
def _rules(names: tuple[str, ...]) -> tuple[np.ndarray, ...]:
    """Of each field: the least and the most it can be, whether 0 too, whether it may be missing."""
    return (
        np.array([BOUNDS[name].low for name in names]),
        np.array([BOUNDS[name].high for name in names]),
        np.array([name in ("volume", "amount") for name in names]),
        np.array([name not in PRICES for name in names]),
    )


_STATE = ("time", "first_day", "last_bar", "listing", "returned", "factor", "total", "before")
_TIMES = {
    **{"time": "us", "first_day": "D", "known.first": "us"},
    **{"known.listed": "D", "known.delisted": "D"},
}


def check_arrays(given: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Refuse a saved state whose arrays are not those that this stream would save."""
    if given.keys() != expected.keys():
        odd = sorted(given.keys() ^ expected.keys())
        raise StoreError(
            f"the state's arrays differ ({', '.join(odd[:5])}): it is of another plan."
        )
    for name, array in expected.items():
        there = given[name]
        if there.shape != array.shape or there.dtype != array.dtype:
            raise StoreError(
                f"the state's {name} is {there.dtype} {there.shape}, expected {array.dtype} "
                f"{array.shape}: it is of another stream."
            )
