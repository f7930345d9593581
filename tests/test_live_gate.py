"""The gate: what passes, in which order, exactly once, and what is refused with which reason."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from echelon.config.live import GateConfig
from echelon.data.derive import Listings, PanelKind
from echelon.data.stream import BarSet, PanelStream, StreamFacts, StreamState
from echelon.live.feeds import Message
from echelon.live.gate import Gate, Halt, Refusal

SYMBOLS = ("AAA", "BBB", "CCC")
DAYS = ("2020-01-02", "2020-01-03", "2020-01-06", "2020-01-07", "2020-01-08")  # XNYS sessions


def _panel(freq: str = "1d", calendar: str = "XNYS", benchmark: float | None = None) -> PanelStream:
    kind = PanelKind(
        *(SYMBOLS, freq, calendar, "America/New_York", "adjusted"),  # type: ignore[arg-type]
        *(frozenset({"close", "volume"}), False, 0),
    )
    n = len(SYMBOLS)
    nat = np.full(n, np.datetime64("NaT"), dtype="datetime64[us]")
    days = nat.astype("datetime64[D]")
    known = Listings(nat, np.full(n, np.nan), days, days)
    stream = PanelStream(
        StreamFacts(kind, known, (None,) * n, np.ones(n, dtype=np.bool_), benchmark)
    )
    first = np.datetime64("2019-12-31" if freq == "1d" else "2020-01-02T09:35", "us")
    level = None if benchmark is None else benchmark
    stream.push(
        BarSet(first, np.array([10.0, 20.0, 30.0]), volume=np.full(n, 100.0), benchmark=level)
    )
    return stream


def _gate(
    panel: PanelStream | None = None,
    *,
    live: bool = False,
    **settings: Any,
) -> Gate:
    traded = np.ones(len(SYMBOLS), dtype=np.bool_)
    panel = panel or _panel()
    closes = np.array([10.0, 20.0, 30.0])
    return Gate(panel, closes, traded, GateConfig(**settings), live=live)


class Tape:
    """Messages of one source, with rising offsets."""

    def __init__(self, source: str = "s") -> None:
        self.source, self.messages = source, list[Message]()

    def add(self, kind: str, time: str, **body: object) -> Tape:
        at = np.datetime64(time or "NaT", "us")
        self.messages.append(Message(self.source, len(self.messages), kind, at, body))
        return self

    def bar(self, time: str, symbol: str, close: float, volume: float = 100.0) -> Tape:
        return self.add("bar", time, symbol=symbol, close=close, volume=volume)

    def bars(self, time: str, scale: float = 1.0, *, close: bool = True) -> Tape:
        for n, symbol in enumerate(SYMBOLS):
            self.bar(time, symbol, scale * 10.0 * (n + 1), volume=float(len(self.messages)))
        return self.add("close", time) if close else self


def _pass(
    gate: Gate, messages: Iterable[Message], now: float = 0.0, *, ended: bool = False
) -> list[BarSet | Halt]:
    listed = list(messages)
    gate.take(listed, now, tuple(sorted({m.source for m in listed})) or ("s",))
    return list(gate.ready(now, ended=ended))


def _times(items: Iterable[BarSet | Halt]) -> list[str]:
    return [str(i.time)[:10] if isinstance(i, BarSet) else f"halt {i.reason}" for i in items]


def _reasons(gate: Gate) -> list[tuple[str, str]]:
    return [(refusal.reason, refusal.symbol) for refusal in gate.drain()]


def test_a_closed_set_passes_with_its_values() -> None:
    gate, tape = _gate(), Tape()
    tape.bar(DAYS[0], "CCC", 31.0).bar(DAYS[0], "AAA", 11.0)
    assert _pass(gate, tape.messages) == []
    (bars,) = _pass(gate, tape.add("close", DAYS[0]).messages[2:])
    assert isinstance(bars, BarSet)
    np.testing.assert_array_equal(bars.close, [11.0, np.nan, 31.0])
    np.testing.assert_array_equal(bars.volume, [100.0, np.nan, 100.0])
    assert gate.drain() == []
    assert gate.offsets == {"s": 3}


def test_every_source_has_to_close() -> None:
    gate, a, b = _gate(), Tape("a"), Tape("b")
    a.bar(DAYS[0], "AAA", 11.0).add("close", DAYS[0])
    b.bar(DAYS[0], "BBB", 21.0).add("close", DAYS[0])
    gate.take(a.messages, 0.0, ("a", "b"))
    assert list(gate.ready(0.0, ended=False)) == []
    gate.take(b.messages, 0.0, ("a", "b"))
    (bars,) = gate.ready(0.0, ended=False)
    assert isinstance(bars, BarSet)
    np.testing.assert_array_equal(bars.close, [11.0, 21.0, np.nan])


def test_sources_that_interleave_in_any_way_give_the_same_sets() -> None:
    tapes = {}
    for source, symbols in (("a", SYMBOLS[:2]), ("b", SYMBOLS[2:])):
        tapes[source] = Tape(source)
        for k, day in enumerate(DAYS):
            for symbol in symbols:
                tapes[source].bar(day, symbol, 10.0 + k, volume=float(k + 1))
            tapes[source].add("close", day)
    expected = None
    for seed in range(20):
        rng, gate, at = random.Random(seed), _gate(), dict.fromkeys(tapes, 0)
        passed: list[BarSet | Halt] = []
        while any(at[s] < len(tapes[s].messages) for s in tapes):
            source = rng.choice([s for s in tapes if at[s] < len(tapes[s].messages)])
            count = rng.randint(1, 4)
            gate.take(tapes[source].messages[at[source] : at[source] + count], 0.0, ("a", "b"))
            at[source] = min(at[source] + count, len(tapes[source].messages))
            passed += gate.ready(0.0, ended=False)
        assert _times(passed) == list(DAYS)
        values = [bars.close.tolist() for bars in passed if isinstance(bars, BarSet)]
        expected = expected or values
        assert values == expected


def test_disorder_within_the_window_is_put_in_order() -> None:
    gate, tape = _gate(), Tape()
    for day in (DAYS[1], DAYS[0], DAYS[2], DAYS[3], DAYS[4]):
        tape.bars(day, close=False)
    assert _times(_pass(gate, tape.messages, ended=True)) == list(DAYS)
    assert gate.drain() == []


def test_what_comes_after_its_set_passed_is_refused_as_late() -> None:
    gate, tape = _gate(), Tape()
    tape.bars(DAYS[0]).bar(DAYS[0], "AAA", 11.0)
    _pass(gate, tape.messages[:4])
    _pass(gate, tape.messages[4:])
    assert _reasons(gate) == [("late", "AAA")]


def test_a_second_bar_is_a_duplicate_or_a_conflict_and_the_first_stands() -> None:
    gate, tape = _gate(), Tape()
    tape.bar(DAYS[0], "AAA", 11.0).bar(DAYS[0], "AAA", 11.0).bar(DAYS[0], "AAA", 12.0)
    (bars,) = _pass(gate, tape.add("close", DAYS[0]).messages)
    assert isinstance(bars, BarSet)
    assert bars.close[0] == 11.0
    assert _reasons(gate) == [("duplicate", "AAA"), ("conflict", "AAA")]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"symbol": "AAA", "volume": 1.0}, "value"),
        ({"symbol": "AAA", "close": float("nan"), "volume": 1.0}, None),
        ({"symbol": "AAA", "close": -1.0, "volume": 1.0}, "value"),
        ({"symbol": "AAA", "close": 1e300, "volume": 1.0}, "value"),
        ({"symbol": "AAA", "close": float("inf"), "volume": 1.0}, "value"),
        ({"symbol": "AAA", "close": 11.0, "volume": -5.0}, "value"),
        ({"symbol": "AAA", "close": 11.0}, "value"),
        ({"symbol": "ZZZ", "close": 11.0, "volume": 1.0}, "universe"),
        ({"symbol": "AAA", "close": 11.0, "volume": 1.0, "bid": 3.0}, "field"),
    ],
)
def test_odd_bars_are_refused_and_the_others_pass(body: dict[str, Any], reason: str | None) -> None:
    gate, tape = _gate(), Tape()
    tape.add("bar", DAYS[0], **body).bar(DAYS[0], "BBB", 21.0).add("close", DAYS[0])
    (bars,) = _pass(gate, tape.messages)
    assert isinstance(bars, BarSet)
    assert bars.close[1] == 21.0
    reasons = [refusal.reason for refusal in gate.drain()]
    if reason is None:  # no number is no bar
        assert reasons in ([], ["value"])
    else:
        assert reasons == [reason]
    assert np.isnan(bars.close[0]) == (reason != "field")
    _panel().push(bars)  # what passed is never refused behind the gate


def test_strangers_open_no_set_and_start_no_deadline() -> None:
    gate, tape = _gate(live=True, deadline_seconds=5.0), Tape()
    tape.bar(DAYS[0], "ZZZ", 1.0).add("facts", DAYS[0], symbol="YYY", member=True)
    assert _pass(gate, tape.messages) == []
    assert _pass(gate, [], 99.0) == []
    assert _reasons(gate) == [("universe", "ZZZ"), ("universe", "YYY")]
    assert gate.offsets == {"s": 2}
    assert _times(_pass(gate, Tape("s").bars(DAYS[0], close=False).messages, 99.0)) == [DAYS[0]]


def test_times_off_the_calendar_are_refused() -> None:
    gate, tape = _gate(), Tape()
    tape.bar("2020-01-04", "AAA", 11.0).bar("2020-01-02T10:00", "AAA", 11.0)
    tape.add("refused", "", reason="json", detail="no JSON")
    assert _pass(gate, tape.messages) == []
    assert [reason for reason, _ in _reasons(gate)] == ["calendar", "calendar", "unreadable"]


def test_a_jump_needs_a_second_bar_and_the_factor_explains_a_split() -> None:
    gate, tape = _gate(max_jump=2.0), Tape()
    for k, price in enumerate((10.5, 55.0, 56.0, 55.5)):
        tape.bar(DAYS[k], "AAA", price, volume=float(k + 1)).add("close", DAYS[k])
    passed = [bars.close[0] for bars in _pass(gate, tape.messages) if isinstance(bars, BarSet)]
    np.testing.assert_array_equal(passed, [10.5, np.nan, 56.0, 55.5])
    assert _reasons(gate) == [("jump", "AAA")]


def test_a_spike_of_one_bar_never_passes() -> None:
    gate, tape = _gate(max_jump=2.0), Tape()
    for k, price in enumerate((10.5, 1_050.0, 10.6, 10.4)):
        tape.bar(DAYS[k], "AAA", price, volume=float(k + 1)).add("close", DAYS[k])
    passed = [bars.close[0] for bars in _pass(gate, tape.messages) if isinstance(bars, BarSet)]
    np.testing.assert_array_equal(passed, [10.5, np.nan, 10.6, 10.4])


def test_prices_that_stand_still_are_refused_until_they_move() -> None:
    gate, tape = _gate(stale_bars=2), Tape()
    for k, price in enumerate((11.0, 11.0, 11.0, 11.0, 12.0)):
        tape.bar(DAYS[k], "AAA", price, volume=7.0).bar(DAYS[k], "BBB", 5.0 * (k + 3), volume=0.0)
        tape.add("close", DAYS[k])
    passed = [bars.close[0] for bars in _pass(gate, tape.messages) if isinstance(bars, BarSet)]
    np.testing.assert_array_equal(passed, [11.0, 11.0, np.nan, np.nan, 12.0])
    assert _reasons(gate) == [("stale", "AAA")] * 2


def test_a_live_set_waits_for_the_expected_symbols_until_the_deadline() -> None:
    gate, tape = _gate(live=True, deadline_seconds=20.0), Tape()
    tape.bar(DAYS[0], "AAA", 11.0).bar(DAYS[0], "BBB", 21.0)
    assert _pass(gate, tape.messages, now=100.0) == []
    assert list(gate.ready(119.9, ended=False)) == []
    (bars,) = gate.ready(120.0, ended=False)
    assert isinstance(bars, BarSet)
    assert np.isnan(bars.close[2])
    assert [reason for reason, _ in _reasons(gate)] == ["missing"]
    # CCC is not expected any more: the next set does not wait for it
    tape.bar(DAYS[1], "AAA", 11.5).bar(DAYS[1], "BBB", 21.5)
    assert _times(_pass(gate, tape.messages[2:], now=200.0)) == [DAYS[1]]


@pytest.mark.parametrize("settings", [{"missing": "halt"}, {"max_missing": 0.2}])
def test_missing_symbols_halt_by_rule(settings: dict[str, Any]) -> None:
    gate, tape = _gate(live=True, **settings), Tape()
    tape.bar(DAYS[0], "AAA", 11.0).bar(DAYS[0], "BBB", 21.0)
    _pass(gate, tape.messages, now=100.0)
    assert _times(gate.ready(130.0, ended=False)) == ["halt missing", DAYS[0]]


def test_a_session_that_never_came_is_passed_empty_and_halts_a_live_feed() -> None:
    for live, first in ((True, ["halt gap"]), (False, [])):
        gate, tape = _gate(live=live), Tape()
        tape.bars(DAYS[2])
        passed = _pass(gate, tape.messages)
        assert _times(passed) == [*first, DAYS[0], DAYS[1], DAYS[2]]
        assert [reason for reason, _ in _reasons(gate)] == ["gap"]
        empty = passed[-2]
        assert isinstance(empty, BarSet)
        assert np.isnan(empty.close).all()


def test_a_gap_within_the_day_halts_and_makes_no_rows() -> None:
    panel = _panel("5min")
    gate, tape = _gate(panel, live=True), Tape()
    tape.bars("2020-01-02T09:40").bars("2020-01-02T09:55")
    assert _times(_pass(gate, tape.messages)) == ["2020-01-02", "halt gap", "2020-01-02"]
    assert gate.drain()[0].detail.startswith("2 bar sets")


def test_the_end_of_a_session_and_the_next_are_no_gap() -> None:
    panel = _panel("5min")
    gate, tape = _gate(panel, live=True, gap="carry"), Tape()
    tape.bars("2020-01-02T16:00").bars("2020-01-03T09:35")
    _pass(gate, tape.messages)
    gaps = [refusal for refusal in gate.drain() if refusal.reason == "gap"]
    assert [gap.time for gap in gaps] == ["2020-01-02T09:40:00.000000"]


def test_the_benchmark_is_waited_for_where_there_is_one() -> None:
    gate, tape = _gate(_panel(benchmark=100.0), live=True), Tape()
    tape.bars(DAYS[0], close=False).add("benchmark", DAYS[0], level=101.0)
    assert _pass(gate, tape.messages[:3]) == []
    (bars,) = _pass(gate, tape.messages[3:])
    assert isinstance(bars, BarSet)
    assert bars.benchmark == 101.0


def test_facts_travel_with_their_set_and_members_stay() -> None:
    gate, tape = _gate(), Tape()
    tape.add("facts", DAYS[0], symbol="BBB", member=False).bars(DAYS[0])
    tape.add("facts", DAYS[1], symbol="CCC", delisted=DAYS[1], reason="merged").bars(DAYS[1])
    tape.bars(DAYS[2])
    first, second, third = _pass(gate, tape.messages)
    assert isinstance(first, BarSet)
    assert isinstance(second, BarSet)
    assert isinstance(third, BarSet)
    assert first.members is not None
    assert first.members.tolist() == [True, False, True]
    assert second.members is not None
    assert second.members.tolist() == [True, False, True]
    assert second.reasons == (None, None, "merged")
    assert second.delisted is not None
    assert str(second.delisted[2]) == DAYS[1]
    assert third.delisted is None
    assert _reasons(gate) == []


def test_floods_are_counted() -> None:
    gate, tape = _gate(), Tape()
    for _ in range(1_500):
        tape.add("refused", "", reason="json", detail="no JSON")
    _pass(gate, tape.messages[:1_200])
    assert len(gate.drain()) == 1_000
    _pass(gate, tape.messages[1_200:])
    assert gate.drain() == []  # also behind a look: until the next bar set
    _pass(gate, Tape().bars(DAYS[0]).messages)
    (refusal,) = gate.drain()
    assert refusal.reason == "flood"
    assert refusal.detail == "500 more: unreadable"
    _pass(gate, tape.messages[:1])
    assert _reasons(gate) == [("unreadable", "")]


def test_a_live_set_from_the_future_halts_and_waits_and_those_before_it_pass() -> None:
    gate, tape = _gate(live=True), Tape()
    gate.why_early = lambda time: f"{time}!" if time > np.datetime64(DAYS[1]) else None
    tape.bars(DAYS[3]).bars(DAYS[0], close=False)
    assert _times(_pass(gate, tape.messages)) == [DAYS[0], "halt clock"]
    assert _reasons(gate) == [("calendar", "")]  # its close would close those before it
    assert _times(_pass(gate, tape.bar(DAYS[1], "AAA", 11.0).messages[-1:])) == []
    assert _times(_pass(gate, tape.add("close", DAYS[1]).messages[-1:])) == [DAYS[1]]
    assert _pass(gate, [], 99.0) == []
    gate.why_early = lambda _time: None  # the clock has come to it
    assert _times(_pass(gate, [], 99.0)) == ["halt gap", DAYS[2], DAYS[3]]


def test_a_source_far_ahead_is_held_until_the_others_follow() -> None:
    gate, a, b = _gate(pending_sets=2), Tape("a"), Tape("b")
    for day in DAYS:
        a.bar(day, "AAA", 11.0).add("close", day)
        b.bar(day, "BBB", 21.0).add("close", day)
    gate.take(a.messages, 0.0, ("a", "b"))
    assert list(gate.ready(0.0, ended=False)) == []
    assert gate.ahead() == {"a"}
    gate.take(b.messages, 0.0, ("a", "b"))
    assert _times(gate.ready(0.0, ended=False)) == list(DAYS)
    assert gate.ahead() == frozenset()


# Exactly once.


def _journal_of(gate: Gate, tapes: Mapping[str, Tape], dies: Iterator[bool]) -> list[Any]:
    """What a journal would hold if the engine died wherever `dies` says so, and went on."""
    entries: list[Any] = []
    refused_to: dict[str, int] = {}
    offsets: dict[str, int] = {}
    seen: dict[str, int] = {}
    state: StreamState = gate.state()
    rng = random.Random(11)
    config = GateConfig(max_jump=2.0)
    at = dict.fromkeys(tapes, 0)
    committed: list[BarSet] = []

    def write(refusals: list[Refusal]) -> None:
        for refusal in refusals:
            entries.append((refusal.reason, refusal.time, refusal.symbol))
            refused_to[refusal.source] = max(refused_to.get(refusal.source, -1), refusal.offset)

    while True:
        unread = [s for s in tapes if at[s] < len(tapes[s].messages)]
        if unread:
            source = rng.choice(unread)
            upto = min(at[source] + rng.randint(1, 5), len(tapes[source].messages))
            gate.take(tapes[source].messages[at[source] : upto], 0.0, tuple(tapes))
            at[source] = upto
        died = False
        for item in gate.ready(0.0, ended=not unread):
            assert isinstance(item, BarSet)
            if next(dies):  # before the commit
                died = True
                break
            write(gate.drain())
            entries.append((str(item.time)[:10], np.nan_to_num(item.close).tolist()))
            committed.append(item)
            offsets, seen = gate.offsets, gate.seen
            doubted = gate.doubted
            state = gate.state()
            if next(dies):  # after it
                died = True
                break
        if not died and next(dies):
            write(gate.drain())
            died = True
        if died:
            panel = _panel()
            for bars in committed:
                panel.push(bars)
            gate = Gate(panel, np.zeros(3), np.ones(3, dtype=np.bool_), config, live=False)
            gate.restore(state)
            if committed:
                gate.note_set(committed[-1], doubted)
                gate.restore(state)
            gate.resume(offsets, seen, refused_to)
            at = {s: offsets.get(s, 0) for s in tapes}
        elif not unread:
            write(gate.drain())
            return entries


def test_whatever_dies_and_when_every_set_and_refusal_is_written_once() -> None:
    tapes = {"a": Tape("a"), "b": Tape("b")}
    rng = random.Random(5)
    for k, day in enumerate(DAYS):
        for source, symbol in (("a", "AAA"), ("b", "BBB"), ("a", "CCC")):
            price = 10.0 * (1 + SYMBOLS.index(symbol)) * rng.uniform(0.9, 1.1)
            price *= 9.0 if (k, symbol) == (2, "AAA") else 1.0
            tapes[source].bar(day, symbol, price, volume=float(k + 1))
        tapes["a"].bar(day, "AAA", 1.0).add("close", day)
        tapes["b"].add("refused", "", reason="json", detail="").add("close", day)
    config = {"max_jump": 2.0}
    whole = _journal_of(_gate(**config), tapes, iter(lambda: False, None))  # type: ignore[arg-type]
    assert [e[0] for e in whole].count("unreadable") == 5
    assert [e[0] for e in whole].count("jump") == 1
    for seed in range(60):
        deaths = random.Random(seed)
        dies = iter(lambda deaths=deaths: deaths.random() < 0.25, None)  # type: ignore[misc]
        entries = _journal_of(_gate(**config), tapes, dies)  # type: ignore[arg-type]
        assert sorted(map(str, entries)) == sorted(map(str, whole)), seed
        sets = [e for e in entries if len(e) == 2]
        assert sets == [e for e in whole if len(e) == 2], seed
