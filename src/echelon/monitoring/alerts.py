"""Alerts: what somebody should know now, sent without ever holding up what it is about.

1. Risk control, the live engine and trainings make `Alert`s, of a kind and its values; the sentence
   is made by whoever sends (`Words.alert`). An alert callback is any function that takes one.
2. `Alerter` is such a function. It drops what it has sent lately (same kind, same subject; the next
   one says how often), and puts the rest into the bounded queue of each channel whose severity it
   has, and of each of the user's `alert_callbacks`, which get every one. It never waits.
3. Each queue has a daemon thread. What came in the meantime shares a message, so no more than
   `per_minute` are sent; a message that is not taken is sent again, waiting longer each time.
4. `close` gives the threads a bounded time to send what they have.

Nothing that a channel does, and no secret of it, reaches the caller: failures are counted, and
logged without addresses, tokens and passwords.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TypeAlias

from echelon.config.alerts import AlertsConfig, Severity
from echelon.errors import EchelonError, UsageError, printable, shorten
from echelon.files import Closing, finite_values
from echelon.monitoring.channels import Channel, Message, Redactor, Undelivered

log = logging.getLogger(__name__)

SEVERITIES: Sequence[Severity] = ("info", "warning", "critical")
QUEUE = 1_000
"""Alerts that wait for a channel; those above are dropped and counted."""
TRIES = 6
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
_MOST_LINES = 20
"""Alerts that share a message."""
_MOST_KNOWN = 1_000
"""Alerts remembered so as not to be repeated."""
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that somebody should know.

    kind: code of the sentence; who: its subject, an expert or a reason; time: of the bar
    values: what the sentence is made of
    """

    kind: str
    severity: Severity
    who: str = ""
    time: str = ""
    values: Mapping[str, float | str] = field(default_factory=dict)


AlertCallback: TypeAlias = Callable[[Alert], None]


def plain_text(alert: Alert) -> str:
    """An alert without a catalogue of sentences."""
    values = ", ".join(f"{name} {value}" for name, value in alert.values.items())
    return f"{alert.severity}: {' '.join((alert.kind, alert.who)).strip()}: {values}".rstrip(": ")


def deliver(send: Callable[[], None], given_up: Callable[[float], bool]) -> str | None:
    """Try until it is taken; why it was not, or None. given_up: waits so long, or says to stop"""
    wait = _FIRST_WAIT
    for attempt in range(1, TRIES + 1):
        try:
            send()
        except Undelivered as error:
            if not error.again or attempt == TRIES or given_up(max(wait, error.after)):
                return f"{error} (tries: {attempt})"
            wait = min(2.0 * wait, _LONGEST_WAIT)
        except Exception as error:  # noqa: BLE001 (the user's callback, or a bug: it ends nothing)
            return f"{type(error).__name__}: {error}"
        else:
            break
    return None


def send_now(config: AlertsConfig, message: Message) -> None:
    """Send a message to every channel, and wait until it was taken."""
    if not config.channels:
        raise UsageError("alerts.channels names none, so there is nobody to send it to. Add one.")
    redact, channels = Redactor.from_environment(), [Channel(own) for own in config.channels]
    said = [(c.config.kind, deliver(partial(c.send, message), _sleep)) for c in channels]
    if failures := [f"{kind}: {shorten(redact(why))}" for kind, why in said if why]:
        raise EchelonError("not every channel took the message:\n" + "\n".join(failures))


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


class Alerter(Closing):
    """Sends alerts to channels and callbacks; see the module's text."""

    def __init__(
        self,
        config: AlertsConfig,
        source: str = "",
        write: Callable[[Alert], str] = plain_text,
        alert_callbacks: Sequence[AlertCallback] = (),
    ) -> None:
        """source: what is watched, the first line of a message; write: the sentence of an alert"""
        self._config, self._source, self._write = config, source, write
        self.redact = Redactor.from_environment()
        self._recent: OrderedDict[tuple[str, ...], tuple[float, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.sent: Counter[tuple[str, str]] = Counter()  # alerts, by channel and severity
        self.failed: Counter[str] = Counter()  # messages that were never taken, by channel
        self.dropped: Counter[str] = Counter()  # alerts, by reason: repeated, queue_full, closed
        pause, kinds = 60.0 / config.per_minute, Counter(c.kind for c in config.channels)
        self._channels: list[tuple[int, _Sender]] = []
        for k, settings in enumerate(config.channels):
            kind = settings.kind
            name = kind if kinds[kind] == 1 else f"{kind}-{k}"
            sender = _Sender(name, self._sending(Channel(settings)), pause, _MOST_LINES, self)
            self._channels.append((SEVERITIES.index(settings.severity), sender))
        self._callbacks = [
            _Sender(_name_of(callback), partial(_call, callback), 0.0, 1, self)
            for callback in alert_callbacks
        ]

    def __call__(self, alert: Alert) -> None:
        """Send an alert; returns at once, whatever the channels do."""
        for sender in self._callbacks:
            sender.put(alert)
        held = self._count_repeats(alert)
        if held is None:
            self.dropped["repeated"] += 1
            return
        if held:
            alert = replace(alert, values={**alert.values, "repeated": held})
        for least, sender in self._channels:
            if SEVERITIES.index(alert.severity) >= least:
                sender.put(alert)

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Send what waits, as far as it can be in that time."""
        senders = [*(sender for _, sender in self._channels), *self._callbacks]
        for sender in senders:
            sender.end()
        end = time.monotonic() + seconds
        for sender in senders:
            sender.join(max(0.0, end - time.monotonic()))

    def _count_repeats(self, alert: Alert) -> int | None:
        """How often an alert was held back since it was sent; None: it is held back now."""
        now, known = time.monotonic(), self._recent
        key = (alert.kind, alert.who, alert.time if alert.severity == "critical" else "")
        with self._lock:
            last, held = known.pop(key, (None, 0))
            if last is not None and now - last < self._config.repeat_seconds:
                known[key] = last, held + 1
                return None
            known[key] = now, 0
            while len(known) > _MOST_KNOWN:
                known.popitem(last=False)
        return held

    def _sending(self, channel: Channel) -> Callable[[Sequence[Alert]], None]:
        return lambda alerts: channel.send(self._message(alerts))

    def _message(self, alerts: Sequence[Alert]) -> Message:
        lines = [printable(self.redact(self._write(alert))) for alert in alerts]
        documents = []
        for alert, line in zip(alerts, lines, strict=True):
            values = {
                k: self.redact(v) if isinstance(v, str) else v for k, v in alert.values.items()
            }
            documents.append({**asdict(alert), "values": finite_values(values), "text": line})
        more = f" (+{len(lines) - 1})" if len(lines) > 1 else ""
        subject = shorten(f"[Echelon] {lines[0]}", 150) + more
        head = printable(self.redact(f"Echelon · {self._source}".rstrip(" ·")))
        return Message(subject, "\n".join((head, *lines)), tuple(documents))


def _call(callback: AlertCallback, alerts: Sequence[Alert]) -> None:
    callback(alerts[0])


def _name_of(callback: AlertCallback) -> str:
    return str(getattr(callback, "__qualname__", type(callback).__name__))


class _Sender:
    def __init__(
        self,
        name: str,
        send: Callable[[Sequence[Alert]], None],
        pause: float,
        most: int,
        alerter: Alerter,
    ) -> None:
        """pause: seconds between two messages; most: alerts that share one"""
        self.name, self._send, self._pause, self._most = name, send, pause, most
        self._alerter = alerter
        self._waiting: deque[Alert] = deque()
        self._change = threading.Condition()
        self._ending, self._give_up = False, threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, alert: Alert) -> None:
        with self._change:
            if self._ending or len(self._waiting) >= QUEUE:
                self._alerter.dropped["closed" if self._ending else "queue_full"] += 1
                return
            self._waiting.append(alert)
            if self._thread is None:  # not before: worker processes are forked
                name = f"alerts-{self.name}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._change.notify()

    def end(self) -> None:
        with self._change:
            self._ending = True
            self._change.notify()

    def join(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)
            self._give_up.set()
            if self._waiting or self._thread.is_alive():
                log.warning("alerts: %s did not take all that was sent", self.name)

    def _run(self) -> None:
        while alerts := self._take():
            why = deliver(partial(self._send, alerts), self._give_up.wait)
            if why is None:
                self._alerter.sent.update((self.name, alert.severity) for alert in alerts)
            else:
                self._alerter.failed[self.name] += 1
                log.warning("alerts: %s: %s", self.name, shorten(self._alerter.redact(why)))
            with self._change:
                self._change.wait_for(lambda: self._ending, self._pause)

    def _take(self) -> list[Alert]:
        """What the next message is of; nothing: there will be no more."""
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._ending)
            most = 0 if self._give_up.is_set() else min(self._most, len(self._waiting))
            return [self._waiting.popleft() for _ in range(most)]
