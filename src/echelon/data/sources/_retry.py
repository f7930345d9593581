"""Retry: call a vendor again after a transient failure, waiting longer each time.

Waits double from `base` up to `cap` and are shortened by a random share (jitter), so that many
clients that failed together do not return together. A rate limit is waited out in full instead:
coming back sooner only fails again. Whatever is not transient is raised at once, unchanged.
"""

from __future__ import annotations

import enum
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class Verdict(enum.Enum):
    """What a failure calls for."""

    FATAL = "fatal"
    """Trying again cannot help."""
    TRANSIENT = "transient"
    """The network or the server stumbled."""
    RATE_LIMIT = "rate limit"
    """Too many calls: wait until the vendor's window has passed."""


@dataclass(frozen=True)
class Retry:
    """How often and how patiently to try.

    attempts: calls in all, the first included
    base, cap: the first wait and the longest, in seconds
    rate_limit_wait: seconds to wait when the vendor counts calls per minute
    sleep, jitter: injected by tests; `jitter` gives a number in [0, 1)
    """

    attempts: int = 5
    base: float = 1.0
    cap: float = 60.0
    rate_limit_wait: float = 61.0
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.SystemRandom().random

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, not {self.attempts}")

    def wait(self, attempt: int, verdict: Verdict) -> float:
        """Seconds to wait after failure number `attempt` (from 1)."""
        if verdict is Verdict.RATE_LIMIT:
            return self.rate_limit_wait + self.base * self.jitter()
        full = min(self.cap, self.base * 2.0 ** (attempt - 1))
        return full * (1.0 - 0.5 * self.jitter())

    def call(
        self, function: Callable[[], T], classify: Callable[[Exception], Verdict], what: str
    ) -> T:
        """Return what `function` returns, trying again while `classify` sees a way.

        Raises the last failure itself; the caller knows how to word it.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                return function()
            except Exception as error:
                verdict = classify(error)
                if verdict is Verdict.FATAL or attempt >= self.attempts:
                    raise
                pause = self.wait(attempt, verdict)
                log.warning(
                    "%s failed (%s, %s); attempt %d of %d follows in %.1f s",
                    *(what, verdict.value, type(error).__name__),
                    *(attempt + 1, self.attempts, pause),
                )
            self.sleep(pause)
