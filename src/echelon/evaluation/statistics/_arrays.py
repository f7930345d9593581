"""What the statistics expect of their arrays, checked in one place, and what counts as constant."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from echelon.types import Bools, Floats

_ROUNDING = 4 * np.finfo(np.float64).eps


def series(values: Floats | Sequence[float], name: str, at_least: int) -> Floats:
    """`values` as float64[T]; ValueError unless one-dimensional, finite and long enough."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis; its shape is {array.shape}")
    return _finite_and_long(array, name, at_least)


def matrix(values: Floats, name: str, at_least: int) -> Floats:
    """`values` as float64[T, K], K ≥ 1; ValueError unless finite and long enough."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2 or array.shape[1] == 0:
        raise ValueError(
            f"{name} must have two axes, periods by series, and at least one series; "
            f"its shape is {array.shape}"
        )
    return _finite_and_long(array, name, at_least)


def as_columns(values: Floats, name: str, at_least: int) -> Floats:
    """`values`[T] or [T, K] as float64[T, K]; ValueError unless finite and long enough."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 1:
        return series(array, name, at_least)[:, np.newaxis]
    return matrix(array, name, at_least)


def same_length(first: Floats, first_name: str, second: Floats, second_name: str) -> None:
    """ValueError unless both cover as many periods (axis 0)."""
    if len(first) != len(second):
        raise ValueError(
            f"{first_name} and {second_name} must cover the same periods; "
            f"they have {len(first)} and {len(second)} rows"
        )


def is_constant(returns: Floats) -> Bools:
    """Per series (axis 0 is time): whether its values differ by no more than rounding.

    The range is looked at, not the standard deviation: the latter of a constant such as 0.1 is
    seldom exactly zero.
    """
    spread = returns.max(axis=0) - returns.min(axis=0)
    constant: Bools = np.asarray(spread <= _ROUNDING * np.abs(returns).max(axis=0))
    return constant


def _finite_and_long(array: Floats, name: str, at_least: int) -> Floats:
    if len(array) < at_least:
        raise ValueError(f"{name} needs at least {at_least} values; it has {len(array)}")
    bad = array.size - int(np.isfinite(array).sum())
    if bad:
        raise ValueError(
            f"{name} must be finite; {bad} of its {array.size} values are not. "
            "Give only periods in which every series has a value"
        )
    return array
