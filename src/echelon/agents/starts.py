"""Where episodes begin: anywhere in the train window, or in one of its stretches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from echelon.envs.act import Rows
from echelon.errors import DataError


class Starts:
    """Draws first and last rows of episodes, every bar of every stretch as likely as another."""

    def __init__(
        self, spans: Sequence[range], episode_steps: int | None, rng: np.random.Generator
    ) -> None:
        """episode_steps: None: from the start to the end of its stretch"""
        shortest = min(len(span) for span in spans)
        if episode_steps is not None and episode_steps + 1 > shortest:
            raise DataError(
                f"train.episode_steps={episode_steps} does not fit into split.train, in which a "
                f"book can take {shortest - 1} steps. Shorten the episode."
            )
        self.rng = rng
        self._steps = episode_steps
        self._first = np.array([span.start for span in spans])
        self._last = np.array([span.stop - 1 for span in spans])
        # From its last row a book cannot step.
        rooms = self._last - self._first + 1 - (1 if episode_steps is None else episode_steps)
        self._until = np.cumsum(rooms)

    @property
    def whole(self) -> range:
        """From the first row of all stretches to the last."""
        return range(int(self._first.min()), int(self._last.max()) + 1)

    def draw(self, count: int) -> tuple[Rows, Rows]:
        """(first[count], last[count]) rows of new episodes."""
        place = self.rng.integers(0, self._until[-1], count)
        which = np.searchsorted(self._until, place, side="right")
        before = np.concatenate([[0], self._until])[which]
        first = self._first[which] + place - before
        last = self._last[which] if self._steps is None else first + self._steps
        return first.astype(np.int64), last.astype(np.int64)
