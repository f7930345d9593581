"""The Kafka feed against a real broker: every bit, every message once, and no silent loss."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from message_sets import assert_same_bits, bar_sets_of, drain
from streams import StoredMarket, a_shares

from echelon.errors import ConfigError, DataError, UsageError
from echelon.live.feeds import MAX_BYTES, Message, open_feed, publish_bars
from echelon.live.feeds.kafka import KafkaFeed, KafkaSink, TopicAddress, partition_of
from scripts.services import TANSU, Running, free_port, running

pytestmark = pytest.mark.services
NEVER = np.datetime64("NaT")


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> StoredMarket:
    return a_shares(tmp_path_factory.mktemp("shares"), 60)


@pytest.fixture
def topic(kafka: Running) -> str:
    return f"{kafka.url}/t{uuid4().hex}"


def as_bundle(market: StoredMarket) -> Any:
    data = SimpleNamespace(limits=market.request.limits, delist_after=market.request.delist_after)
    return SimpleNamespace(
        config=SimpleNamespace(data=data),
        universe={"dataset": {"name": market.name}},
        symbols=market.request.symbols,
    )


def place_of(url: str) -> TopicAddress:
    server, _, topic = url.removeprefix("kafka://").partition("/")
    return TopicAddress(server, topic)


def bar(symbol: str, close: float, day: int = 1) -> bytes:
    at = str(np.datetime64("2020-01-01") + day)
    return json.dumps(
        {"schema": 1, "type": "bar", "time": at, "symbol": symbol, "close": close}
    ).encode()


def send(url: str, *values: bytes, partitions: int = 1) -> None:
    sink = KafkaSink(place_of(url), partitions)
    for value in values:
        sink.send("A", value)
    sink.finish()


def send_raw(url: str, *values: bytes) -> None:
    """As a stranger would, whose messages may be larger."""
    place = place_of(url)
    producer = Producer({"bootstrap.servers": place.server, "message.max.bytes": 900_000})
    for value in values:
        producer.produce(place.topic, value, partition=0)
    assert producer.flush(20) == 0


def remake(url: str, partitions: int = 1, *, delete: bool = True) -> None:
    place = place_of(url)
    admin = AdminClient({"bootstrap.servers": place.server})
    if delete:
        admin.delete_topics([place.topic])[place.topic].result(10)
    admin.create_topics([NewTopic(place.topic, partitions)])[place.topic].result(10)


def started(url: str, offsets: dict[str, int] | None = None, mode: str = "once") -> KafkaFeed:
    feed = KafkaFeed(place_of(url), mode)
    feed.start(offsets or {}, NEVER)
    return feed


def read_all(url: str, offsets: dict[str, int] | None = None) -> list[Message]:
    return drain(started(url, offsets))


def next_offsets(messages: list[Message]) -> dict[str, int]:
    return {message.source: message.offset + 1 for message in messages}


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_store_published_to_a_topic_and_read_back_is_the_same_bar_sets(
    market: StoredMarket, topic: str, partitions: int
) -> None:
    times = market.panel().times
    bundle, root = as_bundle(market), market.store.root
    sent = publish_bars(bundle, root, f"{topic}?partitions={partitions}")
    for cut in (0, len(times) // 2):
        after = times[cut].item()
        feed = open_feed(f"{topic}?mode=once", bundle, root)
        feed.start({}, np.datetime64(after, "us"))
        messages = drain(feed)
        assert len(feed.sources) == partitions
        assert len(messages) < sent
        sets = bar_sets_of(messages, market.facts(after), partitions)
        assert_same_bits(sets, market.bar_sets(after))
    assert open_feed(topic, bundle, root).live
    assert not open_feed(f"{topic}?mode=history", bundle, root).live


def test_a_symbol_has_one_partition_and_the_feed_goes_on_at_any_offset(topic: str) -> None:
    symbols = [f"S{k}" for k in range(12)]
    sink = KafkaSink(place_of(topic), 3)
    for day in range(6):
        for symbol in symbols:
            sink.send(symbol, bar(symbol, 1.0 + day, day))
        close = {"schema": 1, "type": "close", "time": str(np.datetime64("2020-01-01") + day)}
        assert sink.send(None, json.dumps(close).encode()) == 3
    sink.finish()
    whole = read_all(topic)
    assert len(whole) == 6 * (12 + 3)
    for message in whole:
        if message.kind == "bar":
            partition = zlib.crc32(message.body["symbol"].encode()) % 3
            assert message.source.split("/")[1] == str(partition)
            assert partition == partition_of(message.body["symbol"], 3)
    for cut in (1, 17, 44, 89):
        rest = read_all(topic, next_offsets(whole[:cut]))
        seen = next_offsets(whole[:cut])
        expected = [m for m in whole if m.offset >= seen.get(m.source, 0)]
        assert sorted(rest, key=lambda m: m[:2]) == sorted(expected, key=lambda m: m[:2])


def test_offsets_that_are_left_out_are_told_as_a_gap(topic: str) -> None:
    send(topic, *(bar("A", 1.0, day) for day in range(4)))
    feed = started(topic, mode="history")
    read = iter(feed._consumer.consume(4, 10.0))
    kept = [item for item in read if item.offset() != 2]
    messages: list[Message] = []
    for item in [*kept, kept[0]]:  # and one comes again
        feed._take(item, messages)
    assert [(m.offset, m.kind) for m in messages] == [
        *((0, "bar"), (1, "bar"), (2, "refused"), (3, "bar")),
    ]
    assert messages[2].body == {"reason": "gap", "detail": "1 message(s) from 2 on are not there"}
    feed.close()


def test_rubbish_in_a_topic_is_refused_message_by_message(topic: str) -> None:
    remake(topic, delete=False)
    good = bar("A", 1.0)
    send_raw(
        topic,
        *(good, b"", b"\xff\x00", b"x" * 500_000, b"[" * 60_000, b"{}", b'"words"'),
        *(json.dumps({"schema": 2, "type": "bar"}).encode(), good[:-9], good),
        bar("A" * MAX_BYTES, 1.0),
    )
    messages = read_all(topic)
    assert [m.offset for m in messages] == list(range(11))
    assert [m.body.get("reason", m.kind) for m in messages] == [
        *("bar", "malformed", "malformed", "oversized", "malformed", "foreign", "foreign"),
        *("schema", "malformed", "bar", "oversized"),
    ]
    assert messages[0].body == messages[9].body == {"symbol": "A", "close": 1.0}


def test_a_message_that_is_too_large_is_not_published(topic: str) -> None:
    sink = KafkaSink(place_of(topic))
    with pytest.raises(DataError, match=r"1 message\(s\) were not taken, the first: .*too large"):
        sink.send("A", b"x" * (4 * MAX_BYTES))


def test_no_topic_no_broker_and_a_topic_made_anew_are_clear_errors(topic: str) -> None:
    with pytest.raises(DataError, match=r"no such topic.*publish"):
        started(topic)
    send(topic, *(bar("A", 1.0, day) for day in range(5)))
    offsets = next_offsets(read_all(topic))
    assert list(offsets.values()) == [5]
    assert read_all(topic, offsets) == []
    remake(topic)
    send(topic, *(bar("A", 2.0, day) for day in range(9)))
    with pytest.raises(DataError, match="deleted and made anew"):
        started(topic, offsets)


def test_a_broker_that_is_not_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.live.feeds.kafka._ANSWER_SECONDS", 1.0)
    url = f"kafka://127.0.0.1:{free_port()}/bars"
    with pytest.raises(DataError, match=r"no Kafka broker answers.*ECHELON_KAFKA"):
        started(url)
    with pytest.raises(DataError, match="does not answer"):
        KafkaSink(place_of(url))


@pytest.mark.parametrize("code", [KafkaError._TRANSPORT, KafkaError._UNKNOWN_PARTITION])
def test_a_broker_that_is_restarted_while_a_feed_starts_is_waited_for(
    topic: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(topic, *(bar("A", 1.0, day) for day in range(5)))
    asked: list[float] = []

    def restarted(consumer: Any, place: Any, timeout: float) -> tuple[int, int]:
        asked.append(timeout)
        if len(asked) == 1:
            raise KafkaException(KafkaError(code))
        return bounds(consumer, place, timeout=timeout)

    bounds = Consumer.get_watermark_offsets
    watched = type("Watched", (Consumer,), {"get_watermark_offsets": restarted})
    monkeypatch.setattr("echelon.live.feeds.kafka.Consumer", watched)
    assert len(read_all(topic)) == 5
    assert len(asked) == 2


def test_nothing_is_committed_to_the_broker(topic: str) -> None:
    send(topic, *(bar("A", 1.0, day) for day in range(5)))
    assert len(read_all(topic)) == 5
    assert len(read_all(topic)) == 5
    server = place_of(topic).server
    asked = AdminClient({"bootstrap.servers": server}).list_consumer_groups(request_timeout=5)
    assert "echelon" not in [group.group_id for group in asked.result().valid]


def test_a_killed_broker_loses_and_doubles_nothing(
    durable_kafka: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills come between two publications: a write in flight, this broker acknowledges and loses.

    (Tansu stores a producer's sequence before the batch; what is missing then is seen as a gap.)
    """
    monkeypatch.setattr("echelon.live.feeds.kafka._BATCH", 30)
    url = f"{durable_kafka.url}/bars"
    remake(url, 2, delete=False)
    feed = started(url, mode="history")
    messages: list[Message] = []
    for phase in range(4):
        sink = KafkaSink(place_of(url), 2)
        for k in range(100 * phase, 100 * phase + 100):
            sink.send(f"S{k % 7}", bar(f"S{k % 7}", float(k)))
        sink.finish()
        messages += drain(feed, 40)  # the kill comes in the middle of reading
        durable_kafka.kill()
        messages += feed.poll(0.1)
        if phase % 2:  # and the reader dies too
            feed.close()
        durable_kafka.restart()
        if phase % 2:
            feed = started(url, next_offsets(messages), mode="history")
        messages += drain(feed, 100 * (phase + 1) - len(messages))
    assert feed.poll(0.5) == []
    feed.close()
    assert [message for message in messages if message.kind != "bar"] == []
    assert sorted(message.body["close"] for message in messages) == [float(k) for k in range(400)]
    for source in {message.source for message in messages}:
        offsets = [message.offset for message in messages if message.source == source]
        assert offsets == list(range(len(offsets)))


@pytest.mark.parametrize("again", [False, True])
def test_a_broker_that_forgot_everything_stops_the_feed(
    kafka: Running, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.live.feeds.kafka._LOOK_SECONDS", 0.3)
    with running(TANSU) as up:
        url = f"{up.url}/bars"
        send(url, *(bar("A", 1.0, day) for day in range(5)))
        feed = started(url, mode="live")
        assert len(drain(feed, 5)) == 5
        up.kill()
        assert feed.poll(0.3) == []
        up.restart()
        if again:
            send(url, *(bar("A", 2.0, day) for day in range(9)))
        with pytest.raises(DataError, match=r"is gone|was made anew|cannot be read"):
            drain(feed, 1, tries=100)
        feed.close()


@pytest.fixture
def mock_broker() -> Iterator[str]:
    """librdkafka's own stand-in, which says what is out of range as Apache's broker does."""
    owner = Producer({"bootstrap.servers": "none", "test.mock.num.brokers": 1})
    broker = next(iter(owner.list_topics(timeout=5).brokers.values()))
    yield f"kafka://{broker.host}:{broker.port}/bars"
    del owner


def test_an_offset_that_the_broker_does_not_have_is_an_error(
    mock_broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KafkaFeed, "_describe", lambda *_: ("", 1))  # it knows no topics' ids
    send_raw(mock_broker, *(bar("A", 1.0, day) for day in range(5)))
    messages = drain(started(mock_broker, mode="history"), 5)
    assert [message.offset for message in messages] == [0, 1, 2, 3, 4]
    (source,) = {message.source for message in messages}
    with pytest.raises(DataError, match=r"made anew|cannot be read at offset 700"):
        drain(started(mock_broker, {source: 700}, "history"), 1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("not json", "JSON object"),
        ('["a"]', "JSON object"),
        ('{"sasl.password": 5}', "JSON object"),
        ('{"plugin.library.paths": "x.so"}', "no setting of security"),
    ],
)
def test_security_settings_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    place = TopicAddress("127.0.0.1:9", "bars")
    monkeypatch.setenv("ECHELON_KAFKA", value)
    with pytest.raises(ConfigError, match=message) as error:
        place.settings()
    assert value not in str(error.value)
    monkeypatch.setenv("ECHELON_KAFKA", '{"sasl.password": "hunter2"}')
    assert place.settings()["sasl.password"] == "hunter2"
    assert "hunter2" not in str(place)


@pytest.mark.parametrize("to", ["?partitions=0", "?partitions=x", "?mode=once", "/more"])
def test_a_place_to_publish_to_that_cannot_be_used_is_refused(
    market: StoredMarket, topic: str, to: str
) -> None:
    with pytest.raises(UsageError, match="kafka"):
        publish_bars(as_bundle(market), Path(market.store.root), topic + to)
