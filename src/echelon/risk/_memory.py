"""What the guards of this package share: a memory that can resume.

A guard keeps arrays that change in place and the place its ring is at. `state` gives copies of
them, `restore` takes them back bit by bit, after all of them were found to fit; `restart` puts
some books, or some experts, back to how all of them began.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from echelon.errors import StoreError
from echelon.states import State
from echelon.types import Bools, Floats


class GuardMemory:
    """Base of the guards.

    REMEMBERED: name → what it begins with, of arrays kept as `_name`: [...] or, rings, [...,slots]
    """

    WHAT: ClassVar[str]
    REMEMBERED: ClassVar[Mapping[str, float]]

    shape: tuple[int, ...]
    """Of the books that can restart; guards of a whole portfolio have none."""
    cursor: int = 0
    """Slot of the ring that the next bar writes to."""
    slots: int = 1

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """(arrays, JSON): copies of all that is remembered."""
        arrays = {name: getattr(self, f"_{name}").copy() for name in self.REMEMBERED}
        return arrays, {"cursor": self.cursor}

    def restore(self, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; nothing changes if it is of another shape."""
        remedy = "Resume with the settings it was made with, or start the run again."
        for name in self.REMEMBERED:
            own, saved = getattr(self, f"_{name}"), arrays.get(name)
            if saved is None or saved.shape != own.shape or saved.dtype != own.dtype:
                saved_form = "missing" if saved is None else f"{saved.dtype}{list(saved.shape)}"
                raise StoreError(
                    f"the saved {self.WHAT}'s {name} is {saved_form}, expected "
                    f"{own.dtype}{list(own.shape)}. {remedy}"
                )
        cursor = facts.get("cursor")
        if not isinstance(cursor, int) or not 0 <= cursor < self.slots:
            raise StoreError(
                f"the saved {self.WHAT}'s cursor is {cursor!r}, expected 0 to {self.slots - 1}. "
                f"{remedy}"
            )
        for name in self.REMEMBERED:
            np.copyto(getattr(self, f"_{name}"), arrays[name])
        self.cursor = cursor

    def flat_state(self) -> State:
        """The same as arrays alone."""
        arrays, facts = self.state()
        return arrays | {name: np.array(value) for name, value in facts.items()}

    def restore_flat(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `flat_state` gave."""
        cursor = state.get("cursor")
        self.restore(state, {"cursor": None if cursor is None else int(cursor)})

    def restart(self, which: Bools) -> None:
        """Forget the past of `which`[E], all there is of a book, or of single ones, `which`[...].

        For a new episode, and for an expert that was replaced.
        """
        if which.dtype != np.bool_ or which.shape != self.shape[: which.ndim]:
            raise ValueError(
                f"which is {which.dtype}{list(which.shape)}, expected bool{list(self.shape)} or "
                "one a book"
            )
        for name, begin in self.REMEMBERED.items():
            getattr(self, f"_{name}")[which] = begin

    def _advance(self) -> None:
        self.cursor = (self.cursor + 1) % self.slots


def require_shape(name: str, values: NDArray[Any], shape: tuple[int, ...]) -> None:
    """Refuse an array of another shape."""
    if values.shape != shape:
        raise ValueError(f"{name} has shape {values.shape}, expected {shape}")


def below_peak(peak: Floats, equity: Floats) -> Floats:
    """Share of the peak that is lost; 1 where the peak is nothing, NaN where `equity` is no number.

    (peak − equity) / peak and not 1 − equity / peak: the difference is exact, so that a loss of
    15 of 100 is 0.15 and not a little more.
    """
    equity = np.where(np.isfinite(equity), equity, np.nan)
    lost = np.ones_like(equity)
    np.divide(peak - equity, peak, out=lost, where=peak > 0.0)
    lost[np.isnan(equity)] = np.nan
    return lost
