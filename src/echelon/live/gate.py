"""The gate: messages in, whole bar sets out, in order of time, each once.

1. `take` reads messages into the set of their time. What cannot be used (a time that is over or off
   the calendar, a second bar, a value that is no number) is refused, with its reason.
2. A set is complete when every source has said `close`, when every symbol that is expected has its
   bar, or, of a live feed, at the deadline after its first message; one that the clock has not come
   to waits, and halts the engine. A source of history that says no `close` is done with a time when
   two later ones have come, or at its end.
3. `ready` passes the oldest set once it is complete. Bars that no market has are refused one by one
   and count as missing: values out of bounds, jumps that the next bar does not confirm, prices that
   stand still. Missing symbols are carried as not tradable, or halt, by rule.
4. Sets that should lie between are gaps: a session without any bar is passed as such, since
   research has such rows; within the day research has none, and neither has the gate. By rule, a
   gap of a live feed halts.

Exactly once: `offsets` says from where every source has to be read again so that no pending bar is
lost, `seen` what was read already. Both are committed with the set, so that a message that is read
again after a crash is neither used nor refused a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Any, NamedTuple

import numpy as np

from echelon.config.live import GateConfig
from echelon.data.calendars import FROM_DATA, MINUTES, ROUND_THE_CLOCK, hours
from echelon.data.derive import FIELDS
from echelon.data.stream import BarSet, PanelStream, StreamState, check_arrays, find_faults
from echelon.errors import DataError, shorten
from echelon.live.feeds import Message
from echelon.live.feeds.ticks import TickBars
from echelon.serving.engine import DecisionEngine
from echelon.states import State
from echelon.types import Bools, Floats, Times

_WINDOW = 2
"""Later times that must have come before a time of history counts as over without `close`."""
_MOST_REFUSALS = 1_000
"""Refusals between two bar sets that are written down one by one; more are counted."""


class Refusal(NamedTuple):
    """What did not pass. offset: of the message; -1: judged with its bar set."""

    source: str
    offset: int
    time: str
    symbol: str
    reason: str
    detail: str


REFUSED = (
    *("unreadable", "late", "calendar", "duplicate", "conflict", "value", "field", "jump", "stale"),
    *("universe", "missing", "gap", "flood"),
)
"""Reasons; what they mean is in the catalogues of texts."""


class Halt(NamedTuple):
    """The engine is to send nothing more, and why."""

    reason: str
    detail: str


@dataclass
class _Pending:
    """A bar set that is not complete. rows: field → [N], NaN where nothing came."""

    time: np.datetime64
    rows: dict[str, list[float]]
    st: list[bool]
    arrived: float  # of the first message, monotonic
    came: set[int] = field(default_factory=set)  # columns with a bar
    facts: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    ticks: list[Message] = field(default_factory=list)
    benchmark: float | None = None
    first: dict[str, int] = field(default_factory=dict)  # source → its first offset


class Gate:
    def __init__(
        self, panel: PanelStream, closes: Floats, traded: Bools, config: GateConfig, *, live: bool
    ) -> None:
        """closes, traded: [N] of the last row, whose panel it is; use `from_engine`."""
        self._config, self._live = config, live
        self._panel, self._kind = panel, panel.kind
        symbols = self._kind.symbols
        self._column = {symbol: n for n, symbol in enumerate(symbols)}
        self._fields = tuple(name for name in FIELDS if name in self._kind.fields)
        self._required = [n for n in self._fields if n not in ("factor", "pre_close", "amount")]
        self._pending: dict[np.datetime64, _Pending] = {}
        self._next: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._refused_to: dict[str, int] = {}
        self._closed: dict[str, np.datetime64] = {}
        self._sources: tuple[str, ...] = ()
        self._refusals: list[Refusal] = []
        self._noted = 0  # of them since the last set
        self._more: Counter[str] = Counter()
        self._strangers: set[str] = set()
        self._ticks = TickBars(self._kind)
        self._last: np.datetime64 = panel.time
        self._members = panel.members.copy()
        self._memory = _Memory.start(closes, panel.factors, traded, self._fields)
        self._expected = set(np.flatnonzero(traded).tolist())
        self._newest: dict[str, np.datetime64] = {}
        self._behind = False
        self.why_early: Callable[[np.datetime64], str | None] = lambda _time: None
        self._early: np.datetime64 | None = None

    @classmethod
    def from_engine(cls, engine: DecisionEngine, config: GateConfig, *, live: bool) -> Gate:
        rows, last = engine.world.rows, len(engine.world.times) - 1
        close, traded = rows.close[last], rows.tradable[last]
        return cls(engine.panel, np.array(close), np.array(traded), config, live=live)

    # Where to go on.

    @property
    def offsets(self) -> dict[str, int]:
        """Source → first offset that has to be read again; none of them is needed before it."""
        offsets = dict(self._next)
        for pending in self._pending.values():
            for source, offset in pending.first.items():
                offsets[source] = min(offsets[source], offset)
        return offsets

    @property
    def seen(self) -> dict[str, int]:
        """Source → first offset that was never looked at."""
        return {s: max(offset, self._seen.get(s, 0)) for s, offset in self._next.items()}

    @property
    def doubted(self) -> dict[str, float]:
        """Symbol → price of a jump that was refused, and that the next bar may confirm."""
        prices = self._memory.doubted
        return {self._kind.symbols[n]: float(prices[n]) for n in np.flatnonzero(~np.isnan(prices))}

    def resume(
        self, offsets: Mapping[str, int], seen: Mapping[str, int], refused_to: Mapping[str, int]
    ) -> None:
        """Go on behind a journal. refused_to: source → last offset whose refusal it holds"""
        self._next, self._seen, self._refused_to = dict(offsets), dict(seen), dict(refused_to)

    def state(self) -> StreamState:
        """What the journal's bars alone do not say, for `restore`."""
        memory = self._memory
        arrays: State = {f"last.{name}": part.copy() for name, part in memory.last.items()}
        arrays |= {name: getattr(memory, name).copy() for name in _Memory.ARRAYS}
        arrays["members"] = self._members.copy()
        return StreamState(arrays, {"time": str(self._last)})

    def restore(self, state: StreamState) -> None:
        check_arrays(state.arrays, self.state().arrays)
        arrays = {name: values.copy() for name, values in state.arrays.items()}
        self._members = arrays.pop("members")
        last = {name: arrays.pop(f"last.{name}") for name in self._memory.last}
        parts: dict[str, Any] = arrays
        self._memory = _Memory(last, **parts)
        self._expected = set(np.flatnonzero(self._memory.had).tolist())
        self._last = np.datetime64(state.facts["time"], "us")

    # Messages.

    def take(self, messages: Sequence[Message], now: float, sources: Sequence[str]) -> None:
        """Read messages. now: monotonic seconds; sources: all that the feed has"""
        self._sources = tuple(sources)
        for message in self._ticks.place(messages):
            self._next[message.source] = message.offset + 1
            if message.kind == "refused":
                detail = f"{message.body.get('reason')}: {message.body.get('detail')}"
                self._refuse(message, "unreadable", detail)
                continue
            time = message.time
            if message.kind == "close" and self._live and (why := self._why_odd(time)):
                self._refuse(message, "calendar", why)  # it would close what lies before, too
                continue
            newest = self._newest.get(message.source)
            if newest is None or time > newest:
                self._newest[message.source] = time
            if message.kind in _OF_A_SYMBOL and message.body["symbol"] not in self._column:
                self._refuse_stranger(message)  # which opens no set, and starts no deadline
                continue
            pending = self._pending.get(time)
            if pending is None:
                if message.kind == "close":
                    self._closed[message.source] = time
                if time <= self._last:
                    used = message.offset < self._seen.get(message.source, 0)
                    if not used and message.kind != "close":
                        self._refuse(message, "late", f"{self._last} has passed")
                    continue
                pending = self._open(message, now)
                if pending is None:
                    continue
            pending.first.setdefault(message.source, message.offset)
            if message.kind == "bar":
                self._take_bar(message, pending)
            elif message.kind == "close":
                self._closed[message.source] = time
            elif message.kind == "benchmark":
                self._take_benchmark(message, pending)
            elif message.kind == "tick":
                pending.ticks.append(message)
            else:
                pending.facts.append((self._column[message.body["symbol"]], message.body))

    def ready(self, now: float, *, ended: bool) -> Iterator[BarSet | Halt]:
        """The bar sets that pass now, oldest first, and what halts the engine."""
        while self._pending:
            time = min(self._pending)
            pending = self._pending[time]
            if not (ended or self._is_complete(pending)):
                many = len(self._pending) > self._config.pending_sets
                if not self._live or not (many or self._is_late(pending, now)):
                    return
                if many and not self._behind:
                    waiting = len(self._pending)
                    yield Halt("behind", f"{waiting} bar sets wait, the first is of {time}")
                self._behind = many
                if not (many or (yield from self._is_due(time))):
                    return
                yield from self._judge_missing(pending)
            elif not (ended or (yield from self._is_due(time))):
                return
            for gap in self._gaps(time):
                if isinstance(gap, Halt):
                    yield gap
                else:
                    self.note_set(gap)
                    yield gap
            self._take_ticks(pending)
            del self._pending[time]
            bars = self._make(pending)
            self.note_set(bars)
            yield bars

    def _is_due(self, time: np.datetime64) -> Generator[Halt, None, bool]:
        """Whether a live set may pass: one that is ahead of the clock waits for it, and halts."""
        why = self.why_early(time) if self._live else None
        if why is not None and time != self._early:
            self._early = time
            yield Halt("clock", why)
        return why is None

    def ahead(self) -> frozenset[str]:
        """Sources to read no further for now: they are past the oldest set, others are not."""
        if len(self._pending) <= self._config.pending_sets:
            return frozenset()
        oldest = min(self._pending)
        ahead = frozenset(source for source, time in self._newest.items() if time > oldest)
        return frozenset() if ahead >= frozenset(self._sources) else ahead

    def note_set(self, bars: BarSet, doubted: Mapping[str, float] | None = None) -> None:
        """Remember a set that has passed; doubted: of the journal, where it passed before."""
        self._last = bars.time
        for reason, count in self._more.items():
            self._refusals.append(Refusal("", -1, "", "", "flood", f"{count:,} more: {reason}"))
        self._more.clear()
        self._noted = 0
        self._memory.note(bars)
        self._expected = set(np.flatnonzero(self._memory.had).tolist())
        if doubted is not None:
            self._memory.doubted = np.full(len(self._column), np.nan)
            for symbol, price in doubted.items():
                self._memory.doubted[self._column[symbol]] = price
        if bars.members is not None:
            self._members = np.array(bars.members)

    def drain(self) -> list[Refusal]:
        refusals, self._refusals = self._refusals, []
        return refusals

    def _why_off_grid(self, time: np.datetime64) -> str | None:
        """Why no bar can be of a time; None: one can."""
        try:
            self._panel.check_grid(time)
        except DataError as error:
            return str(error)
        return None

    def _why_odd(self, time: np.datetime64) -> str | None:
        return self._why_off_grid(time) or self.why_early(time)

    def _open(self, message: Message, now: float) -> _Pending | None:
        why = self._why_off_grid(message.time)
        if why is not None:
            self._refuse(message, "calendar", why)
            return None
        n = len(self._column)
        rows = {name: [np.nan] * n for name in self._fields}
        pending = _Pending(message.time, rows, [False] * n, now)
        self._pending[message.time] = pending
        return pending

    def _take_bar(self, message: Message, pending: _Pending) -> None:
        body = message.body
        n = self._column[body["symbol"]]
        for name in self._required:
            if name not in body:
                self._refuse(message, "value", f"{name} is missing, expected a number")
                return
        values: list[float] = [body.get(name, np.nan) for name in self._fields]
        odd = body.keys() - self._kind.fields - _ALWAYS
        if odd:
            names = shorten(", ".join(sorted(map(str, odd))), 120)
            self._refuse(message, "field", f"the dataset has no {names}; the rest is used")
        rows = pending.rows
        if n in pending.came:
            before = [rows[name][n] for name in self._fields]
            same = np.array_equal(before, values, equal_nan=True)
            self._refuse(message, "duplicate" if same else "conflict", "")
            return
        pending.came.add(n)
        for name, number in zip(self._fields, values, strict=True):
            rows[name][n] = number
        pending.st[n] = body.get("st") is True

    def _take_ticks(self, pending: _Pending) -> None:
        """Bars of a set's ticks, now that no more of them come, as if they had come as bars."""
        if not pending.ticks:
            return
        # As traded: sources come in any order, each is in its own.
        ticks = sorted(pending.ticks, key=lambda m: (m.body["at"], m.source, m.offset))
        bodies, problems = self._ticks.bars(ticks)
        for number, what in problems:
            symbol = shorten(ticks[number].body["symbol"], 64)
            self._note(Refusal("", -1, str(pending.time), symbol, "value", shorten(what)))
        source, offset = ticks[-1][:2]
        for body in bodies:
            message = Message(source, offset, "bar", pending.time, body)
            self._take_bar(message, pending)

    def _take_benchmark(self, message: Message, pending: _Pending) -> None:
        level: float = message.body["level"]
        if not (np.isfinite(level) and level > 0):
            self._refuse(message, "value", f"level is {level}, expected a positive number")
        elif not self._panel.has_benchmark:
            self._refuse(message, "field", "the dataset has no benchmark")
        elif pending.benchmark is not None:
            self._refuse(message, "duplicate" if level == pending.benchmark else "conflict", "")
        else:
            pending.benchmark = level

    def _refuse_stranger(self, message: Message) -> None:
        """Say once of a symbol that the bundle does not trade it."""
        symbol = shorten(str(message.body.get("symbol")), 64)
        if symbol not in self._strangers and len(self._strangers) < _MOST_REFUSALS:
            self._strangers.add(symbol)
            self._refuse(message, "universe", "not in the bundle's universe")

    def _refuse(self, message: Message, reason: str, detail: str) -> None:
        if message.offset <= self._refused_to.get(message.source, -1):
            return  # the journal holds it
        symbol = shorten(str(message.body.get("symbol", "")), 64)
        at = "" if np.isnat(message.time) else str(message.time)
        self._note(Refusal(message.source, message.offset, at, symbol, reason, shorten(detail)))

    def _note(self, refusal: Refusal) -> None:
        self._noted += 1
        if self._noted <= _MOST_REFUSALS:
            self._refusals.append(refusal)
        else:
            self._more[refusal.reason] += 1

    # Bar sets.

    def _is_late(self, pending: _Pending, now: float) -> bool:
        if pending.ticks and not any(time > pending.time for time in self._newest.values()):
            pending.arrived = now  # its bar has not ended: the deadline begins with the next one
        return now - pending.arrived >= self._config.deadline_seconds

    def _is_closed(self, time: np.datetime64) -> bool:
        """Whether every source has said that nothing more of a time comes."""
        closed = self._closed
        return bool(self._sources) and all(
            source in closed and closed[source] >= time for source in self._sources
        )

    def _is_complete(self, pending: _Pending) -> bool:
        if self._is_closed(pending.time):
            return True
        if self._live:
            level = pending.benchmark is not None or not self._panel.has_benchmark
            return level and bool(self._expected) and self._expected <= pending.came
        return bool(self._sources) and all(self._is_over(s, pending.time) for s in self._sources)

    def _is_over(self, source: str, time: np.datetime64) -> bool:
        """Whether nothing more of a time is expected of a source of history."""
        if source in self._closed:
            return bool(self._closed[source] >= time)
        newest = self._newest.get(source)
        if newest is None:
            return False
        return sum(bool(time < t <= newest) for t in self._pending) >= _WINDOW

    def _judge_missing(self, pending: _Pending) -> Iterator[Halt]:
        """By rule, of symbols without a bar at the deadline."""
        missing = sorted(self._expected - pending.came)
        if not missing:
            return
        names = ", ".join(self._kind.symbols[n] for n in missing[:10])
        share = len(missing) / len(self._expected)
        detail = f"{len(missing)} symbols ({share:.0%}) without a bar at the deadline: {names}"
        self._note(Refusal("", -1, str(pending.time), "", "missing", detail))
        if self._config.missing == "halt" or share > self._config.max_missing:
            yield Halt("missing", f"{pending.time}: {detail}")

    def _gaps(self, time: np.datetime64) -> Iterator[BarSet | Halt]:
        """Sets that should lie between the last one and `time`."""
        daily = self._kind.freq == "1d"
        gaps = self._panel.missing_sessions(self._last, time) if daily else self._missing_bars(time)
        if not len(gaps):
            return
        detail = f"{len(gaps)} bar sets did not come, the first of {gaps[0]}"
        self._note(Refusal("", -1, str(gaps[0]), "", "gap", detail))
        if self._config.gap == "halt" and self._live:
            yield Halt("gap", f"before {time}: {detail}")
        for gap in gaps if daily else ():
            yield self._empty(gap)

    def _missing_bars(self, time: np.datetime64) -> Times:
        """Bar ends of the calendar between the last set and `time`, of a live feed."""
        nothing = np.empty(0, dtype="datetime64[us]")
        kind, last = self._kind, self._last
        if not self._live or kind.calendar == FROM_DATA or np.isnat(last):
            return nothing
        step = np.timedelta64(MINUTES[kind.freq], "m")
        if kind.calendar == ROUND_THE_CLOCK:
            return np.arange(last + step, time, step)
        first, until = (t.astype("datetime64[D]").astype(date) for t in (last, time))
        assert isinstance(first, date)
        assert isinstance(until, date)
        if until - first > _LONGEST_GAP:
            first = until - _LONGEST_GAP
        ends = [nothing]
        table = hours(kind.calendar, first, until, kind.timezone)
        names = ("open", "break_start", "break_end", "close")
        for spans in zip(*(table[name].to_numpy() for name in names), strict=True):
            opens, pause, again, close = (span.astype("datetime64[us]") for span in spans)
            parts = [(opens, close)] if np.isnat(pause) else [(opens, pause), (again, close)]
            ends += [np.arange(begin + step, end + step, step) for begin, end in parts]
        every = np.concatenate(ends)
        return every[(every > last) & (every < time)]

    def _empty(self, time: np.datetime64) -> BarSet:
        n = len(self._column)
        grids: dict[str, Any] = {name: np.full(n, np.nan) for name in self._fields}
        return BarSet(time=time, st=np.zeros(n, dtype=np.bool_), **grids)

    def _make(self, pending: _Pending) -> BarSet:
        grids: dict[str, Any] = {name: np.array(row) for name, row in pending.rows.items()}
        bars = BarSet(
            time=pending.time,
            st=np.array(pending.st),
            benchmark=pending.benchmark,
            **grids,
            **self._facts(pending),
        )
        refused: dict[int, tuple[str, str]] = {}
        for fault in find_faults(bars):
            refused[fault.asset] = "value", fault.why
        for n, reason, detail in self._memory.doubts(bars, self._config):
            refused.setdefault(n, (reason, detail))
        for n, (reason, detail) in refused.items():
            symbol = self._kind.symbols[n]
            self._note(Refusal("", -1, str(pending.time), symbol, reason, detail))
            for name in self._fields:
                grids[name][n] = np.nan
        return bars

    def _facts(self, pending: _Pending) -> dict[str, Any]:
        if not pending.facts:
            return {}
        n = len(self._column)
        days = {name: np.full(n, "NaT", dtype="datetime64[D]") for name in ("listed", "delisted")}
        reasons: list[str | None] = [None] * n
        members = self._members.copy()
        for k, body in pending.facts:
            for name, column in days.items():
                if name in body:
                    column[k] = np.datetime64(body[name], "D")
            if "reason" in body:
                reasons[k] = shorten(body["reason"], 64)
            members[k] = body.get("member", members[k])
        return {**days, "reasons": tuple(reasons), "members": members}


_ALWAYS = {"symbol", "st"}
_OF_A_SYMBOL = {"bar", "facts", "tick"}
_LONGEST_GAP = timedelta(days=60)


@dataclass
class _Memory:
    """What the bars before say about the next ones.

    last: field → [N] of the last bar; close, factor: carried forward; had: a bar in the last set
    repeats: bars in a row that equal the one before; doubted: price of a refused jump, else NaN
    """

    last: dict[str, Floats]
    close: Floats
    factor: Floats
    had: Bools
    repeats: Floats
    doubted: Floats

    ARRAYS = ("close", "factor", "had", "repeats", "doubted")

    @classmethod
    def start(cls, closes: Floats, factors: Floats, traded: Bools, names: Sequence[str]) -> _Memory:
        """closes, factors: [N] the last known, NaN: none yet; traded: [N] had a bar just now"""
        nothing = np.full(len(closes), np.nan)
        last = {name: nothing.copy() for name in names}
        parts = (closes.copy(), factors.copy(), traded.copy())
        return cls(last, *parts, np.zeros(len(closes)), nothing.copy())

    def doubts(self, bars: BarSet, config: GateConfig) -> list[tuple[int, str, str]]:
        """(asset, reason, detail) of bars that are not believed; remembers them."""
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = bars.close / self._reference(bars)
            jumps = np.maximum(ratio, 1.0 / ratio) > config.max_jump
            again = bars.close / self.doubted
            confirmed = np.maximum(again, 1.0 / again) <= config.max_jump
        jumped = jumps & ~confirmed
        self.doubted = np.where(jumped, bars.close, np.nan)
        repeats = np.where(self._find_repeats(bars), self.repeats + 1, 0.0)
        still = repeats >= config.stale_bars if config.stale_bars else np.zeros_like(jumped)
        doubts = [
            (int(n), "jump", f"close {bars.close[n]:g} is {ratio[n]:.4g} times the one before")
            for n in np.flatnonzero(jumped)
        ]
        return doubts + [
            (int(n), "stale", f"the same bar {int(repeats[n]) + 1} times in a row")
            for n in np.flatnonzero(still & ~jumped)
        ]

    def note(self, bars: BarSet) -> None:
        """Take in a set that passes."""
        on = ~np.isnan(bars.close)
        self.repeats = np.where(
            on, np.where(self._find_repeats(bars), self.repeats + 1, 0), self.repeats
        )
        self.had = on
        self.close = np.where(on, bars.close, self.close)
        if bars.factor is not None:
            self.factor = np.where(np.isnan(bars.factor), self.factor, bars.factor)
        for name, values in self.last.items():
            now = getattr(bars, name)
            if now is not None:
                self.last[name] = np.where(on, now, values)

    def _reference(self, bars: BarSet) -> Floats:
        """[N] the close before, on today's prices."""
        before = self.close
        if bars.factor is not None:
            factor = np.where(np.isnan(bars.factor), self.factor, bars.factor)
            known = ~np.isnan(factor) & ~np.isnan(self.factor)
            before = np.where(known, before * self.factor / np.where(known, factor, 1.0), before)
        if bars.pre_close is not None:
            before = np.where(np.isnan(bars.pre_close), before, bars.pre_close)
        return before

    def _find_repeats(self, bars: BarSet) -> Bools:
        """[N] whether a bar equals the one before in every field, and something was traded."""
        same = ~np.isnan(bars.close)
        for name, values in self.last.items():
            now = getattr(bars, name)
            if now is not None and name not in ("factor", "pre_close"):
                same &= (now == values) | (np.isnan(now) & np.isnan(values))
        return same if bars.volume is None else same & (bars.volume != 0)
