"""Ctrl-C and SIGTERM: the first asks for an orderly stop, a second one ends the work at once.

A terminal, systemd and docker send them to all processes of a group: workers are deaf to both (see
`workers`) and do what their parent asks of them. Where nothing can be asked to stop in
order, both raise KeyboardInterrupt, so that what is half-done is cleared away.

A command that was stopped leaves with 128 + the signal's number, as a shell counts: 130 after
Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
_ONE_REQUEST_SECONDS = 0.5
"""Within which two signals are one: `timeout` sends to its child and then to the group."""
_first: int | None = None
"""The signal that this process got first."""


def exit_code() -> int:
    return 128 + (_first or signal.SIGINT)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does, in a command of the main thread."""
    global _first
    _first = None
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Count the signals instead of raising, the first time: whether a stop is asked for.

    In another thread than the first nothing is counted: whoever owns that one handles signals.
    """
    asked: float | None = None

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked is None:
            _note(number)
            asked = time.monotonic()
        elif time.monotonic() - asked > _ONE_REQUEST_SECONDS:
            _interrupt(number, frame)

    before = {}
    try:
        for number in SIGNALS:
            before[number] = signal.signal(number, ask)
    except ValueError:  # not the main thread
        yield lambda: False
        return
    try:
        yield lambda: asked is not None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _note(number: int) -> None:
    global _first
    if _first is None:
        _first = number


def _interrupt(number: int, _frame: FrameType | None) -> None:
    _note(number)
    raise KeyboardInterrupt
