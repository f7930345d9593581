"""Live bars: from a Kafka topic to features, memory over many bar sets, latency under load.

    python -m bench live
    python bench/live.py --sets 30 --small-sets 100000

1. Minute bars of 5,000 symbols through a Kafka broker (Tansu, a process of its own on loopback):
   feed → gate → panel row → features. At least 20,000 bars in a second of this process's CPU, all
   its threads counted, or this fails: what one core does that has nothing else to do. The clock
   on the wall is printed too, and the stages one by one.
2. 100,000 bar sets of 20 symbols through gate, panel row and features: memory stays flat, within
   10 MB of what it was after the first tenth, or this fails.
3. Latency under load: while the topic is filled at 20,000 bars/s, from the last message of a set
   in hand to its features.

The bars are a seeded random walk round the clock, prepared before the clock starts.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import numpy as np

from echelon.config import load_config
from echelon.config.live import GateConfig
from echelon.data.derive import Listings, PanelKind
from echelon.data.stream import BarSet, PanelStream, StreamFacts
from echelon.features.engine import FeaturePlan
from echelon.features.registry import select
from echelon.features.scaler import Scaler
from echelon.features.stream import FeatureStream
from echelon.live.feeds import Message
from echelon.live.feeds.kafka import KafkaFeed, KafkaSink, TopicAddress
from echelon.live.feeds.messages import BarSetWriter, read_message
from echelon.live.gate import Gate, Halt
from scripts.services import TANSU, running

GOAL = 20_000
SYMBOLS = 5_000
GROWTH_MB = 10.0
BEGIN = np.datetime64("2024-01-01T00:00", "us")
MINUTE = np.timedelta64(1, "m")
SEED = 7


class Market:
    """Minute bars of N symbols, round the clock."""

    def __init__(self, n: int) -> None:
        names = tuple(f"S{k:05d}" for k in range(n))
        fields = frozenset({"open", "high", "low", "close", "volume"})
        self.kind = PanelKind(names, "1min", "24/7", "UTC", "adjusted", fields, False, 250)
        self._rng = np.random.default_rng(SEED)
        self._close = self._rng.uniform(5, 500, n)
        self._time = BEGIN
        days = np.full(n, "NaT", dtype="datetime64[D]")
        known = Listings(days.astype("datetime64[us]"), np.full(n, np.nan), days, days)
        self.facts = StreamFacts(self.kind, known, (None,) * n, np.ones(n, dtype=np.bool_), None)

    def next(self) -> BarSet:
        """The bars of the next minute."""
        n = len(self._close)
        opens = self._close
        self._close = opens * np.exp(self._rng.normal(0, 0.001, n))
        self._time = self._time + MINUTE
        high, low = np.maximum(opens, self._close), np.minimum(opens, self._close)
        volume = self._rng.integers(1, 10_000, n).astype(np.float64)
        return BarSet(self._time, self._close, opens, high, low, volume)


class Line:
    """What a bar set passes on its way to features."""

    def __init__(self, market: Market, *, live: bool = False) -> None:
        self.panel = PanelStream(market.facts)
        config = load_config(None, []).features
        fields = market.kind.fields
        plan = FeaturePlan.from_specs(select(config, fields).specs)
        n = len(plan.names)
        days = date(2023, 1, 1), date(2023, 12, 31)
        scaler = Scaler(plan.names, np.zeros(n), np.ones(n), np.ones(n, dtype=np.bool_), days)
        self.features = FeatureStream(market.kind.symbols, plan, scaler)
        first = market.next()
        self.features.push(self.panel.push(first))
        traded = np.ones(len(first.close), dtype=np.bool_)
        self.gate = Gate(self.panel, first.close, traded, GateConfig(), live=live)

    def push(self, bars: BarSet) -> None:
        """Panel row and features."""
        self.features.push(self.panel.push(bars))

    def sets(self, messages: Sequence[Message], sources: Sequence[str]) -> Iterator[BarSet]:
        """Bar sets that pass the gate."""
        self.gate.take(messages, time.monotonic(), sources)
        for item in self.gate.ready(time.monotonic(), ended=False):
            assert not isinstance(item, Halt)
            yield item


def fill(place: TopicAddress, writer: BarSetWriter, sets: Sequence[BarSet]) -> int:
    sink = KafkaSink(place, 2)
    sent = sum(sink.send(s, data) for bars in sets for s, data in writer.lines(bars))
    sink.finish()
    return sent


def main(argv: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=40, help="bar sets of 5,000 symbols")
    parser.add_argument("--small-sets", type=int, default=100_000, help="bar sets of 20 symbols")
    args = parser.parse_args(list(argv))
    if reason := TANSU.missing():
        print(reason)
        return 1
    with running(TANSU) as broker:
        server = broker.url.removeprefix("kafka://")
        fast = throughput(TopicAddress(server, "bars"), args.sets)
        latency(TopicAddress(server, "load"), args.sets)
    flat = memory(args.small_sets)
    return 0 if fast and flat else 1


def throughput(place: TopicAddress, n_sets: int) -> bool:
    market = Market(SYMBOLS)
    line, stages = Line(market), Line(Market(SYMBOLS))
    sets = [market.next() for _ in range(n_sets)]
    writer = BarSetWriter(market.kind.symbols, market.facts)
    fill(place, writer, sets)

    feed = KafkaFeed(place, "history")
    feed.start({}, BEGIN)
    done, watch = 0, Stopwatch(n_sets * SYMBOLS)
    while done < n_sets:
        for bars in line.sets(feed.poll(0.1), feed.sources):
            line.push(bars)
            done += 1
    rates = watch.rates()
    feed.close()
    print(f"{n_sets} sets of {SYMBOLS:,} minute bars, {len(feed.sources)} partitions; bars/s:")
    print(f"  {'':34} {'of one core':>12} {'on the wall':>12}")
    for name, (cpu, wall) in [("topic to features", rates), *by_stage(place, stages, sets)]:
        print(f"  {name:34} {cpu:>12,.0f} {wall:>12,.0f}")
    met = rates[0] >= GOAL
    print(f"  goal: {GOAL:,} from topic to features: {'met' if met else 'MISSED'}")
    return met


class Stopwatch:
    """Rates of so many bars, by CPU time and by the clock."""

    def __init__(self, bars: int) -> None:
        self._bars = bars
        self._began = time.process_time(), time.perf_counter()

    def rates(self) -> tuple[float, float]:
        """Bars per second of CPU, bars per second."""
        cpu, wall = self._began
        return self._bars / (time.process_time() - cpu), self._bars / (time.perf_counter() - wall)


def by_stage(
    place: TopicAddress, line: Line, sets: Sequence[BarSet]
) -> Iterator[tuple[str, tuple[float, float]]]:
    """Rates of the stages alone."""
    bars = len(sets) * SYMBOLS
    feed = KafkaFeed(place, "once")
    feed.start({}, BEGIN)
    messages: list[Message] = []
    watch = Stopwatch(bars)
    while not feed.ended:
        messages += feed.poll(0.1)
    yield "  feed (client and parsing)", watch.rates()
    sources = feed.sources
    feed.close()
    writer = BarSetWriter(line.panel.kind.symbols, Market(SYMBOLS).facts)
    lines = [data for bar_set in sets for _, data in writer.lines(bar_set)]
    watch = Stopwatch(bars)
    for k, data in enumerate(lines):
        read_message("s", k, data)
    yield "  parsing alone", watch.rates()
    passed: list[BarSet] = []
    watch = Stopwatch(bars)
    for k in range(0, len(messages), SYMBOLS):
        passed += line.sets(messages[k : k + SYMBOLS], sources)
    yield "  gate alone", watch.rates()
    assert len(passed) == len(sets)
    watch = Stopwatch(bars)
    rows = [line.panel.push(bar_set) for bar_set in passed]
    yield "  panel row alone", watch.rates()
    watch = Stopwatch(bars)
    for row in rows:
        line.features.push(row)
    yield "  features alone", watch.rates()


def latency(place: TopicAddress, n_sets: int) -> None:
    """From the last message of a set in hand to its features, while the topic is filled."""
    market = Market(SYMBOLS)
    line = Line(market)
    sets = [market.next() for _ in range(n_sets)]
    writer = BarSetWriter(market.kind.symbols, market.facts)
    lines = [list(writer.lines(bars)) for bars in sets]
    sink = KafkaSink(place, 2)

    def publish() -> None:
        begin = time.perf_counter()
        for k, part in enumerate(lines):
            for symbol, data in part:
                sink.send(symbol, data)
            time.sleep(max(0.0, begin + (k + 1) * SYMBOLS / GOAL - time.perf_counter()))
        sink.finish()

    feed = KafkaFeed(place, "history")
    feed.start({}, BEGIN)
    thread = threading.Thread(target=publish)
    thread.start()
    waits: list[float] = []
    while len(waits) < n_sets:
        messages = feed.poll(0.1)
        came = time.perf_counter()
        for bars in line.sets(messages, feed.sources):
            line.push(bars)
            waits.append(1e3 * (time.perf_counter() - came))
    thread.join()
    feed.close()
    p50, p99 = np.percentile(waits, [50, 99])
    print(
        f"latency at {GOAL:,} bars/s, publisher in the same process: from a set's last message in "
        f"hand to features, p50 {p50:.0f} ms, p99 {p99:.0f} ms"
    )


def memory(n_sets: int) -> bool:
    market = Market(20)
    line = Line(market)
    writer = BarSetWriter(market.kind.symbols, market.facts)
    early, offset, began = 0.0, 0, time.perf_counter()
    for k in range(n_sets):
        messages = []
        for _, data in writer.lines(market.next()):
            messages.append(read_message("s", offset, data))
            offset += 1
        for bars in line.sets(messages, ("s",)):
            line.push(bars)
        line.gate.drain()
        if k == n_sets // 10:
            early = resident_mb()
    rate = n_sets / (time.perf_counter() - began)
    growth = resident_mb() - early
    flat = growth <= GROWTH_MB
    print(
        f"{n_sets:,} bar sets of 20 symbols, {rate:,.0f} sets/s: memory grew by {growth:.1f} MB "
        f"over the last nine tenths, to {resident_mb():.0f} MB: {'flat' if flat else 'NOT FLAT'}"
    )
    return flat


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
