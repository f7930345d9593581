"""Kafka: messages of a topic as a feed, and a topic to publish to.

1. Offsets are ours: partitions are assigned, nothing is ever committed to the broker, and nothing
   starts anywhere but where the journal says, or at a partition's first message.
2. A broker that dies is waited for; the client reconnects by itself, and goes on where it was.
3. Nothing is lost in silence. An offset that the broker no longer has, a topic that is gone or made
   anew (its id is in the name of each source), a partition that is gone: a DataError. Offsets that
   are left out become a message of the kind `refused`, with the reason `gap`.
4. What is held in memory is bounded, whatever others write into the topic.

Messages of a symbol go to one partition, by a hash of its name, the closing one of a bar set to
every partition; the gate puts them in order. Security settings come from ECHELON_KAFKA only.
"""

from __future__ import annotations

import json
import logging
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from echelon.config.secrets import Secrets
from echelon.errors import ConfigError, DataError, UsageError, shorten
from echelon.files import Closing
from echelon.live.feeds import MAX_BYTES, Address, Message
from echelon.live.feeds.messages import read_message, refuse
from echelon.serving.bundle import Bundle

log = logging.getLogger(__name__)
_client_log = log.getChild("client")
_client_log.setLevel(logging.CRITICAL)  # ten lines a second while a broker is away

T = TypeVar("T")
_PLACE = re.compile(r"(?P<server>[A-Za-z0-9.\-]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5})/(?P<topic>.+)")
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_SECURITY = ("security.", "sasl.", "ssl.", "enable.ssl.")
_BATCH = 5_000
_HELD_KILOBYTES = 16_384
_ANSWER_SECONDS = 10.0
_LOOK_SECONDS = 30.0
"""Between two looks at the topic; after a lost connection, before anything is believed."""
_LOOK_PATIENCE = 3.0
_PAUSE_SECONDS = 0.1
_FLUSH_SECONDS = 60.0
_GONE = {
    KafkaError.OFFSET_OUT_OF_RANGE,
    KafkaError._AUTO_OFFSET_RESET,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
}
"""Errors of a partition that no waiting mends."""

_AWAY = {
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TIMED_OUT,
    KafkaError._UNKNOWN_PARTITION,
}
"""A broker that is restarted is back in a moment."""


class TopicAddress(NamedTuple):
    """Where a topic is: `kafka://HOST:PORT/TOPIC`."""

    server: str
    topic: str

    @classmethod
    def parse(cls, address: Address) -> TopicAddress:
        if "@" in address.place:
            raise UsageError(
                "kafka: users and passwords are taken from the environment variable ECHELON_KAFKA "
                "and from nowhere else. Write kafka://HOST:PORT/TOPIC."
            )
        match = _PLACE.fullmatch(address.place)
        if match is None or not _TOPIC.fullmatch(match["topic"]):
            raise UsageError(f"{address.text}: expected kafka://HOST:PORT/TOPIC.")
        return cls(match["server"], match["topic"])

    def __str__(self) -> str:
        return f"kafka://{self.server}/{self.topic}"

    def settings(self) -> dict[str, Any]:
        return {
            "bootstrap.servers": self.server,
            "allow.auto.create.topics": False,
            "reconnect.backoff.max.ms": 1_000,
            "socket.connection.setup.timeout.ms": 5_000,
            **_security(),
        }


def _security() -> dict[str, str]:
    """Settings of ECHELON_KAFKA; what it holds is in no message."""
    secret = Secrets().echelon_kafka
    if secret is None:
        return {}
    try:
        tree = json.loads(secret.get_secret_value())
    except ValueError:
        tree = None
    if not isinstance(tree, dict) or not all(isinstance(value, str) for value in tree.values()):
        raise ConfigError("ECHELON_KAFKA: expected a JSON object of texts, by librdkafka's names.")
    odd = sorted(name for name in tree if not name.startswith(_SECURITY))
    if odd:
        raise ConfigError(
            f"ECHELON_KAFKA: {shorten(odd[0], 60)} is no setting of security; expected names that "
            f"begin with {', '.join(_SECURITY)}."
        )
    return tree


def open_kafka(address: Address, _bundle: Bundle, _store: Path) -> KafkaFeed:
    """`kafka://HOST:PORT/TOPIC[?mode=live|history|once]`."""
    address.refuse_options("mode")
    return KafkaFeed(TopicAddress.parse(address), address.mode("live"))


class _Source:
    def __init__(self, name: str, partition: int, offset: int | None) -> None:
        self.name, self.partition = name, partition
        self.next = offset
        self.skips = offset is None  # what is not behind the history
        self.ended = self.held = False


class KafkaFeed(Closing):
    """The messages of a topic; see the module's text."""

    def __init__(self, place: TopicAddress, mode: str = "live") -> None:
        self.live = mode == "live"
        self.sources: tuple[str, ...] = ()
        self._place, self._once = place, mode == "once"
        self._consumer: Any = None  # confluent_kafka has no types
        self._admin: Any = None
        self._id = ""
        self._parts: dict[int, _Source] = {}
        self._after: np.datetime64 = np.datetime64("NaT")
        self._held: list[Any] = []
        self._doubt = False
        self._looked = 0.0
        self._said: set[int] = set()

    def start(self, offsets: Mapping[str, int], after: np.datetime64) -> None:
        """Begin at these offsets, at the first message of a partition without one."""
        self.close()
        self._after = after
        self._admin = AdminClient(self._place.settings(), logger=_client_log)
        self._consumer = Consumer(
            {
                **self._place.settings(),
                "group.id": "echelon",  # asked for, not used
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "enable.partition.eof": self._once,
                "queued.max.messages.kbytes": _HELD_KILOBYTES,
                "fetch.wait.max.ms": 100,
                "error_cb": self._doubt_it,
            },
            logger=_client_log,
        )
        self._parts, self._id, self._held = {}, "", []
        described = self._ask(self._describe)
        if described is None:
            raise DataError(
                f"{self._place}: there is no such topic. `echelon live publish` makes one; or "
                "correct --feed."
            )
        self._id, n_partitions = described
        self._refuse_lost(offsets, n_partitions)
        self._add_partitions(n_partitions, offsets)
        self._looked, self._doubt = time.monotonic(), False

    def poll(self, seconds: float) -> list[Message]:
        """What has come, of all partitions; each partition's in order."""
        if not self._held:
            self._held = self._consumer.consume(_BATCH, max(seconds, 0.0))
        if not self._is_same_topic():
            time.sleep(min(max(seconds, 0.0), _PAUSE_SECONDS))
            return []
        read, self._held = self._held, []
        messages: list[Message] = []
        for item in read:
            if item.error() is None:
                self._take(item, messages)
            else:
                self._look_at(item.error(), item.partition())
        return messages

    @property
    def ended(self) -> bool:
        """Whether all there was is read, where it is read once."""
        return self._once and all(part.ended for part in self._parts.values())

    def hold(self, sources: frozenset[str]) -> None:
        """Pause these partitions, and go on with those that were paused before."""
        for part in self._parts.values():
            held = part.name in sources
            if held != part.held:
                part.held = held
                place = [TopicPartition(self._place.topic, part.partition)]
                (self._consumer.pause if held else self._consumer.resume)(place)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _take(self, item: Any, messages: list[Message]) -> None:  # noqa: ANN401
        part, offset = self._parts[item.partition()], item.offset()
        if part.next is not None and offset < part.next:
            return  # had already: a reconnection may send a batch again
        if part.next is not None and offset > part.next:
            detail = f"{offset - part.next:,} message(s) from {part.next:,} on are not there"
            messages.append(refuse(part.name, offset - 1, "gap", detail))
        part.next = offset + 1
        message = read_message(part.name, offset, item.value() or b"")
        if not (part.skips and message.time <= self._after):
            messages.append(message)

    def _look_at(self, error: Any, partition: int) -> None:  # noqa: ANN401
        code = error.code()
        if code == KafkaError._PARTITION_EOF:
            self._parts[partition].ended = True
        elif code in _GONE:
            part = self._parts[partition]
            raise DataError(
                f"{self._place}: partition {partition} cannot be read at offset {part.next}: "
                f"{shorten(error.str())}. What the broker no longer has cannot be traded on: start "
                "a new journal behind it, from a store that has those bars."
            )
        else:
            log.warning("%s: %s", self._place, shorten(error.str()))
            self._doubt = True

    def _doubt_it(self, error: Any) -> None:  # noqa: ANN401
        """A connection is lost: what comes next may be of another topic."""
        self._doubt = True
        if error.code() not in self._said:
            self._said.add(error.code())
            log.warning("%s: %s; trying again", self._place, shorten(error.str()))

    def _is_same_topic(self) -> bool:
        """Whether it is, as far as known; after a lost connection, the broker has to say so.

        Raises DataError where it says otherwise.
        """
        now = time.monotonic()
        if not self._doubt and now - self._looked < _LOOK_SECONDS:
            return True
        try:
            described = self._describe(_LOOK_PATIENCE)
        except KafkaException as error:
            log.debug("%s: %s", self._place, error)
            return not self._doubt  # nobody answers: the client goes on trying
        self._looked = now
        self._doubt = False
        self._said.clear()
        if described is None or described[0] != self._id or described[1] < len(self._parts):
            what = "is gone" if described is None else "was made anew"
            raise DataError(
                f"{self._place}: the topic {what} while it was read. Its offsets mean nothing any "
                "more: start a new journal behind the last bar of this one."
            )
        if described[1] > len(self._parts):
            log.warning("%s: has %d partitions now", self._place, described[1])
            self._add_partitions(described[1], {})
        return True

    def _describe(self, seconds: float) -> tuple[str, int] | None:
        """(the topic's id, number of partitions); None: there is none."""
        topics = self._admin.list_topics(timeout=seconds).topics  # to ask for one may make it
        if self._place.topic not in topics or topics[self._place.topic].error is not None:
            return None
        count = len(topics[self._place.topic].partitions)
        try:
            asked = TopicCollection([self._place.topic])
            answer = self._admin.describe_topics(asked, request_timeout=seconds)
            name = str(answer[self._place.topic].result().topic_id)
        except KafkaException as error:
            if error.args[0].code() == KafkaError._UNSUPPORTED_FEATURE:
                return "", count
            raise
        return ("" if not name.strip("A=") else name), count

    def _ask(self, question: Callable[[float], T]) -> T:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            try:
                return question(max(deadline - time.monotonic(), 0.5))
            except KafkaException as error:
                mends = error.args[0].retriable() or error.args[0].code() in _AWAY
                if time.monotonic() > deadline or not mends:
                    raise DataError(
                        f"{self._place}: no Kafka broker answers ({shorten(error.args[0].str())}). "
                        "Start it, or correct --feed and ECHELON_KAFKA."
                    ) from None
                time.sleep(0.1)

    def _name(self, partition: int) -> str:
        return f"{self._place.topic}/{partition}" + (f"/{self._id}" if self._id else "")

    def _refuse_lost(self, offsets: Mapping[str, int], n_partitions: int) -> None:
        """Refuse to go on where the journal's offsets are not of this topic."""
        names = {self._name(partition) for partition in range(n_partitions)}
        ours = {name for name in offsets if name.split("/")[0] == self._place.topic}
        if ours - names:
            raise DataError(
                f"{self._place}: the journal has read another topic of this name ({min(ours)}): it "
                "was deleted and made anew. Name the old one, or start a new journal."
            )
        for partition in range(n_partitions):
            offset = offsets.get(self._name(partition), 0)
            if offset and not self._id:
                end = self._bounds_of(partition)[1]
                if offset > end:
                    raise DataError(
                        f"{self._place}: partition {partition} ends at offset {end:,}, and "
                        f"{offset:,} was read before: the topic was made anew. Name the old one, "
                        "or start a new journal."
                    )

    def _bounds_of(self, partition: int) -> tuple[int, int]:
        """(offset of the first message, offset behind the last)."""
        place, ask = TopicPartition(self._place.topic, partition), self._consumer
        first, end = self._ask(lambda s: ask.get_watermark_offsets(place, timeout=s))
        return int(first), int(end)

    def _add_partitions(self, count: int, offsets: Mapping[str, int]) -> None:
        new = []
        for partition in range(len(self._parts), count):
            name = self._name(partition)
            part = self._parts[partition] = _Source(name, partition, offsets.get(name))
            begin = part.next
            if begin is None:
                begin = part.next = self._bounds_of(partition)[0]
            new.append(TopicPartition(self._place.topic, partition, begin))
        self._consumer.incremental_assign(new)
        self.sources = tuple(part.name for part in self._parts.values())


@contextmanager
def kafka_sink(address: Address) -> Iterator[KafkaSink]:
    """`kafka://HOST:PORT/TOPIC[?partitions=N]`; the topic is made if there is none."""
    address.refuse_options("partitions")
    text = address.options.get("partitions", "1")
    if not re.fullmatch(r"[1-9]\d{0,3}", text, re.ASCII):
        raise UsageError(f"kafka: partitions={text}: expected 1 to 9999.")
    sink = KafkaSink(TopicAddress.parse(address), int(text))
    yield sink
    sink.finish()


class KafkaSink:
    """Sends messages to a topic, each once and in order, also where one had to be sent twice."""

    def __init__(self, place: TopicAddress, partitions: int = 1) -> None:
        self._place = place
        self._errors: list[str] = []
        self._partitions = self._make_topic(partitions)
        self._producer: Any = Producer(
            {
                **place.settings(),
                "enable.idempotence": True,
                "linger.ms": 20,
                "message.max.bytes": MAX_BYTES + 4_096,
                "delivery.timeout.ms": int(1e3 * _FLUSH_SECONDS),
            },
            logger=_client_log,
        )

    def send(self, symbol: str | None, data: bytes) -> int:
        if symbol is None:
            targets = range(self._partitions)
        else:
            place = partition_of(symbol, self._partitions)
            targets = range(place, place + 1)
        for partition in targets:
            while True:
                try:
                    self._producer.produce(
                        self._place.topic, data, partition=partition, on_delivery=self._note
                    )
                    break
                except BufferError:  # the queue is full
                    self._producer.poll(0.1)
                except KafkaException as error:  # too large, for one
                    self._note(error.args[0], None)
                    break
        self._producer.poll(0)
        self._raise_errors()
        return len(targets)

    def finish(self) -> None:
        """Wait until the broker has everything; raises DataError where it does not."""
        left = self._producer.flush(_FLUSH_SECONDS)
        if left:
            self._errors.append(f"{left:,} message(s) got no answer in {_FLUSH_SECONDS:.0f} s")
        self._raise_errors()

    def _note(self, error: Any, _message: object) -> None:  # noqa: ANN401
        if error is not None:
            self._errors.append(shorten(error.str()))

    def _raise_errors(self) -> None:
        if self._errors:
            raise DataError(
                f"{self._place}: {len(self._errors):,} message(s) were not taken, the first: "
                f"{self._errors[0]}. Publish again, into a new topic."
            )

    def _make_topic(self, partitions: int) -> int:
        admin = AdminClient(self._place.settings(), logger=_client_log)
        try:
            topics = admin.list_topics(timeout=_ANSWER_SECONDS).topics
            if self._place.topic not in topics:
                new = NewTopic(self._place.topic, num_partitions=partitions)
                made = admin.create_topics([new], operation_timeout=_ANSWER_SECONDS)
                made[self._place.topic].result(_ANSWER_SECONDS)
                return partitions
        except (KafkaException, TimeoutError) as error:
            raise DataError(
                f"{self._place}: the broker does not answer or refuses the topic "
                f"({shorten(error)}). Start it, or correct --to and ECHELON_KAFKA."
            ) from None
        return len(topics[self._place.topic].partitions)


def partition_of(symbol: str, partitions: int) -> int:
    """Where a symbol's messages go: the same for every publisher."""
    return zlib.crc32(symbol.encode()) % partitions
