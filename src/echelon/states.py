"""What goes on from bar to bar, as flat dicts of arrays: to be saved, and taken back bit by bit.

Whoever keeps something between two bars gives it as `State`: names to arrays, scalars as arrays
without axes, parts of parts under a prefix. So any store of arrays can hold it, and two states can
be compared. `match_state` refuses what is not of the same shape before anything is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from echelon.errors import StoreError

State: TypeAlias = dict[str, NDArray[Any]]
V = TypeVar("V")


def with_prefix(prefix: str, parts: Mapping[str, V]) -> dict[str, V]:
    """The parts with `prefix` before each name: several owners share one state."""
    return {prefix + name: part for name, part in parts.items()}


def below_prefix(prefix: str, parts: Mapping[str, V]) -> dict[str, V]:
    """The parts whose name starts with `prefix`, without it: the inverse of `with_prefix`."""
    return {n.removeprefix(prefix): part for n, part in parts.items() if n.startswith(prefix)}


def copy_state(arrays: Mapping[str, Any]) -> State:
    """Copies, of numbers too, so that nothing that goes on can change what was saved."""
    return {name: np.array(value) for name, value in arrays.items()}


def match_state(what: str, like: Mapping[str, Any], saved: Mapping[str, NDArray[Any]]) -> State:
    """Copies of the saved arrays that `like` names; StoreError where one is missing or another's.

    like: arrays or numbers whose shapes and types are expected
    """
    taken: State = {}
    for name, value in like.items():
        own = np.asarray(value)
        part = saved.get(name)
        if part is None or part.shape != own.shape or part.dtype != own.dtype:
            form = "missing" if part is None else f"{part.dtype}{list(part.shape)}"
            raise StoreError(
                f"the saved {what}: {name} is {form}, expected {own.dtype}{list(own.shape)}. "
                "Restore it with the settings it was saved with, or start without it."
            )
        taken[name] = part.copy()
    return taken
