"""Feeds of history: messages are bar sets to the last bit, and nothing that is sent can hurt."""

from __future__ import annotations

import json
import math
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from message_sets import assert_same_bits, bar_sets_of, drain
from streams import MARKETS, StoredMarket, a_shares

from echelon.errors import DataError, UsageError
from echelon.live.feeds import FEEDS, MAX_BYTES, Address, Message, open_feed, publish_bars
from echelon.live.feeds.history import FileFeed, StoredBars, StoreFeed
from echelon.live.feeds.messages import read_message

NEVER = np.datetime64("NaT")
BAR = {"schema": 1, "type": "bar", "time": "2020-01-03", "symbol": "AAPL", "close": 74.4}


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> StoredMarket:
    return a_shares(tmp_path_factory.mktemp("shares"))


def stored(market: StoredMarket) -> StoredBars:
    return StoredBars(market.store, market.name, market.request)


def as_bundle(market: StoredMarket) -> Any:
    """All that a feed reads of a bundle."""
    data = SimpleNamespace(limits=market.request.limits, delist_after=market.request.delist_after)
    symbols = market.request.symbols or tuple(market.store.symbols(market.name)["symbol"])
    return SimpleNamespace(
        config=SimpleNamespace(data=data),
        universe={"dataset": {"name": market.name}},
        symbols=symbols,
    )


def store_path(market: StoredMarket) -> Path:
    return market.store.root


def cut_of(market: StoredMarket, share: float) -> datetime:
    times = market.panel().times
    return cast(datetime, times[int(share * len(times))].item())


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("name", MARKETS)
def test_a_store_published_and_read_back_is_the_same_bar_sets(
    name: str, share: float, tmp_path: Path
) -> None:
    market = MARKETS[name](tmp_path)
    bundle, after = as_bundle(market), cut_of(market, share)
    sent = publish_bars(bundle, store_path(market), f"file:{tmp_path}/m.jsonl")
    feed = open_feed(f"file:{tmp_path}/m.jsonl", bundle, store_path(market))
    feed.start({}, np.datetime64(after, "us"))
    messages = drain(feed)
    assert len(messages) < sent  # those before `after` are skipped
    sets = market.bar_sets(after)
    assert_same_bits(bar_sets_of(messages, market.facts(after)), sets)

    direct = open_feed("store", bundle, store_path(market))
    direct.start({}, np.datetime64(after, "us"))
    assert_same_bits(bar_sets_of(drain(direct, tries=100_000), market.facts(after)), sets)


def test_published_after_a_day_and_a_number_of_sets(shares: StoredMarket, tmp_path: Path) -> None:
    after = cut_of(shares, 0.5)
    publish_bars(as_bundle(shares), store_path(shares), f"file:{tmp_path}/m", after.date(), 7)
    feed = FileFeed(tmp_path / "m")
    feed.start({}, np.datetime64("NaT"))
    sets = shares.bar_sets(after)[:7]
    assert_same_bits(bar_sets_of(drain(feed), shares.facts(after)), sets)
    with pytest.raises(UsageError, match="is there already"):
        publish_bars(as_bundle(shares), store_path(shares), f"file:{tmp_path}/m")


def test_feeds_go_on_at_any_offset(shares: StoredMarket, tmp_path: Path) -> None:
    after = cut_of(shares, 0.9)
    publish_bars(as_bundle(shares), store_path(shares), f"file:{tmp_path}/m", after.date())

    def everything(offsets: dict[str, int], kind: str, behind: datetime) -> list[Message]:
        bars = stored(shares)
        feed = FileFeed(tmp_path / "m") if kind == "file" else StoreFeed(bars)
        feed.start(offsets, np.datetime64(behind, "us"))
        return drain(feed, tries=100_000)

    for kind in ("file", "store"):
        whole = everything({}, kind, after)
        offsets = [message.offset for message in whole]
        assert offsets == sorted(set(offsets))
        for cut in range(0, len(whole), 5):
            before = [m.time.item() for m in whole[:cut] if m.time < whole[cut].time]
            part = everything({whole[0].source: offsets[cut]}, kind, max(before, default=after))
            assert part == whole[cut:]


@given(
    st.dictionaries(
        st.sampled_from(["open", "high", "low", "close", "volume", "amount", "factor"]),
        st.floats(allow_nan=False, allow_infinity=False),
    )
)
def test_every_float_comes_through_to_the_bit(values: dict[str, float]) -> None:
    data = json.dumps({**BAR, **values}).encode()
    message = read_message("s", 3, data)
    assert message[:4] == ("s", 3, "bar", np.datetime64("2020-01-03"))
    for name, value in values.items():
        assert message.body[name] == value
        assert math.copysign(1, message.body[name]) == math.copysign(1, value)


def test_whole_numbers_are_floats_and_nulls_are_left_out() -> None:
    message = read_message("s", 0, json.dumps({**BAR, "volume": 100, "amount": None}).encode())
    assert message.kind == "bar"
    assert message.body == {"symbol": "AAPL", "close": 74.4, "volume": 100.0}
    assert type(message.body["volume"]) is float


@pytest.mark.parametrize(
    ("data", "reason", "detail"),
    [
        (b"", "malformed", "Expecting value"),
        (b"\xff\xfe{", "malformed", "utf-8"),
        (b'{"schema": 1, "type": "bar"', "malformed", "delimiter"),
        (b"[" * 60_000, "malformed", "recursion"),
        (b"{}", "foreign", "no message of ours"),
        (b"[1, 2]", "foreign", "no message of ours"),
        (b'"schema"', "foreign", "no message of ours"),
        (b"hello world", "malformed", "Expecting value"),
        ({"schema": 2, "type": "bars"}, "schema", "expected 1"),
        ({"schema": None}, "schema", "expected 1"),
        ({"schema": 1, "type": "news"}, "foreign", "'news'"),
        ({"schema": 1, "type": ["bar"]}, "foreign", "expected one of"),
        ({**BAR, "time": 20200103}, "fields", "time"),
        ({**BAR, "time": "2020-01-03T09:35Z"}, "fields", "without an offset"),
        ({**BAR, "time": "2020-13-03"}, "fields", "is no time"),
        ({**BAR, "close": "74.4"}, "fields", "expected a number"),
        ({**BAR, "close": True}, "fields", "expected a number"),
        ({**BAR, "close": None}, "fields", "bar without close"),
        ({**BAR, "st": 1}, "fields", "true or false"),
        ({**BAR, "colse": 1.0}, "fields", "'colse'"),
        ({**BAR, "symbol": ["AAPL"]}, "fields", "expected text"),
        ({"schema": 1, "type": "close", "time": "2020-01-03", "x": 1}, "fields", "'x'"),
        (
            {"schema": 1, "type": "facts", "time": "2020-01-03", "symbol": "A", "listed": "soon"},
            "fields",
            "expected a day",
        ),
        (
            {**BAR, "type": "facts", "listed": "2020-99-99"},
            "fields",
            "no field 'close'",
        ),
        (json.dumps(BAR).replace("74.4", "NaN").encode(), "malformed", "NaN is no number"),
        (json.dumps(BAR).replace("74.4", "-Infinity").encode(), "malformed", "no number"),
        (json.dumps({**BAR, "symbol": "A" * MAX_BYTES}).encode(), "oversized", "65,536 bytes"),
    ],
)
def test_what_is_no_message_is_refused_with_its_reason(data: Any, reason: str, detail: str) -> None:
    given_bytes = data if isinstance(data, bytes) else json.dumps(data).encode()
    message = read_message("s", 5, given_bytes)
    assert message[:3] == ("s", 5, "refused")
    assert np.isnat(message.time)
    assert message.body["reason"] == reason
    assert detail in message.body["detail"]
    assert len(message.body["detail"]) <= 300


@given(st.binary(max_size=300))
def test_no_bytes_raise(data: bytes) -> None:
    assert read_message("s", 0, data).kind == "refused"


@given(
    st.dictionaries(
        st.sampled_from(["schema", "type", "time", "symbol", "close", "level", "member", "st"]),
        st.one_of(
            st.sampled_from([1, "bar", "facts", "tick", "close", "2020-01-03", None, True]),
            st.recursive(st.floats() | st.text(max_size=5), lambda leaf: st.lists(leaf)),
        ),
    )
)
def test_no_object_raises(body: dict[str, Any]) -> None:
    message = read_message("s", 0, json.dumps(body).encode())
    assert message.kind in ("bar", "facts", "tick", "close", "benchmark", "refused")
    assert np.isnat(message.time) == (message.kind == "refused")


def test_a_file_of_rubbish_gives_its_messages_all_the_same(tmp_path: Path) -> None:
    close = json.dumps({"schema": 1, "type": "close", "time": "2020-01-03"}).encode()
    lines = [json.dumps(BAR).encode(), b"", b"\x00\xff", b"x" * 3_000_000, close + b"\r", b"{"]
    (tmp_path / "m").write_bytes(b"\n".join(lines))
    feed = FileFeed(tmp_path / "m")
    feed.start({}, NEVER)
    messages = drain(feed)
    assert [(m.offset, m.kind) for m in messages] == [
        *((0, "bar"), (2, "refused"), (3, "refused"), (4, "close"), (5, "refused")),
    ]
    assert messages[2].body["reason"] == "oversized"
    assert "the file ends within the line" in messages[4].body["detail"]
    assert feed.ended

    # Behind the last line there is nothing; a file that has fewer is another.
    feed.start({"m": 6}, NEVER)
    assert drain(feed) == []
    with pytest.raises(DataError, match="made anew"):
        feed.start({"m": 7}, NEVER)
    feed.close()


def test_a_file_that_grows_gives_a_line_when_its_end_is_there(tmp_path: Path) -> None:
    path = tmp_path / "m"
    line = json.dumps(BAR).encode() + b"\n"
    path.write_bytes(line + line[:20])
    feed = FileFeed(path, "history")
    assert not feed.live
    feed.start({}, NEVER)
    assert len(feed.poll(0.0)) == 1
    assert feed.poll(0.01) == []
    with path.open("ab") as handle:
        handle.write(line[20:] + line)
    assert [m.offset for m in feed.poll(1.0)] == [1, 2]
    assert not feed.ended
    path.write_bytes(b"")
    with pytest.raises(DataError, match="cut or replaced"):
        feed.poll(0.0)
    path.unlink()
    with pytest.raises(DataError, match="gone"):
        feed.poll(0.0)
    feed.close()


def test_a_store_replays_at_its_speed(tmp_path: Path) -> None:
    market = MARKETS["1min"](tmp_path)
    times = market.panel().times
    after = times[10].item()
    bundle = as_bundle(market)
    feed = open_feed("store?speed=600", bundle, store_path(market))
    feed.start({}, np.datetime64(after, "us"))
    began = time.monotonic()
    count = 0
    while count < 4:
        count += bool(feed.poll(0.02))
    # Three minutes at 600 times their speed, after a first bar at once.
    assert 0.3 <= time.monotonic() - began < 5.0
    slow = open_feed(f"store:{store_path(market)}?speed=realtime", bundle, tmp_path / "none")
    slow.start({}, np.datetime64(after, "us"))
    assert slow.poll(0.0)
    assert slow.poll(0.05) == []
    assert not slow.ended


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ftp://x", "expected one of store, file"),
        ("store?speed=fast", "above 0"),
        ("store?speed=-1", "above 0"),
        ("store?mode=live", "no option 'mode'"),
        ("store?speed", "name=value"),
        ("file:nowhere", "no such file"),
        ("kafka://127.0.0.1:9092", "HOST:PORT/TOPIC"),
        ("kafka://user:hunter2@127.0.0.1:9092/bars", "ECHELON_KAFKA"),
        ("kafka://127.0.0.1:9092/bars?mode=fast", "expected one of once, history, live"),
    ],
)
def test_an_address_that_cannot_be_used_says_why(
    shares: StoredMarket, text: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as error:
        open_feed(text, as_bundle(shares), store_path(shares))
    assert "hunter2" not in str(error.value)


def test_addresses_are_taken_apart() -> None:
    assert Address.parse("kafka://h:1/t?mode=once", FEEDS, "--feed")[1:] == (
        *("kafka", "h:1/t", {"mode": "once"}),
    )
    assert Address.parse("file:/a/b", FEEDS, "--feed").place == "/a/b"
