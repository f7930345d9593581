"""The z-score scaler: fitted on the train window and nothing else, stored with that window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from echelon.errors import DamagedError
from echelon.files import read_json
from echelon.types import Bools, Floats, Floats32


@dataclass(frozen=True)
class RunningMoments:
    """Count, mean and squared deviations per feature; those of pieces merge (Chan et al., 1979)."""

    count: Floats
    mean: Floats
    squares: Floats

    @staticmethod
    def none(n_features: int) -> RunningMoments:
        return RunningMoments(*(np.zeros(n_features) for _ in range(3)))

    @staticmethod
    def from_values(values: Floats32 | Floats) -> RunningMoments:
        """Moments of `values` [B,F]; NaN does not count."""
        wide = values.astype(np.float64)
        known = ~np.isnan(wide)
        count = known.sum(axis=0).astype(np.float64)
        mean = np.where(known, wide, 0.0).sum(axis=0) / np.maximum(count, 1)
        squares = (np.where(known, wide - mean, 0.0) ** 2).sum(axis=0)
        return RunningMoments(count, mean, squares)

    def merge(self, other: RunningMoments) -> RunningMoments:
        count = self.count + other.count
        share = other.count / np.maximum(count, 1)
        delta = other.mean - self.mean
        return RunningMoments(
            count,
            self.mean + delta * share,
            self.squares + other.squares + delta**2 * self.count * share,
        )


@dataclass(frozen=True)
class Scaler:
    """(x − mean) / std [F], fitted on the days of `window`; what is not `scaled` stays as it is."""

    names: tuple[str, ...]
    mean: Floats
    std: Floats
    scaled: Bools
    window: tuple[date, date]

    @staticmethod
    def fit(
        names: tuple[str, ...], moments: RunningMoments, scaled: Bools, window: tuple[date, date]
    ) -> Scaler:
        assert moments.mean.shape == scaled.shape == (len(names),), "one entry per feature"
        std = np.sqrt(moments.squares / np.maximum(moments.count, 1))
        # Rounding leaves a constant feature a spread of about 1e-8 of its level.
        flat = std <= 1e-7 * np.abs(moments.mean)
        return Scaler(names, moments.mean, np.where(flat | (std == 0), 1.0, std), scaled, window)

    def transform(self, values: Floats32 | Floats) -> Floats32:
        """Scale `values` [...,F]; NaN (not known) becomes 0, the mean."""
        assert values.shape[-1] == len(self.names), "last axis is not F"
        shift, width = self._units
        out: Floats32 = ((values - shift) / width).astype(np.float32)
        out[np.isnan(out)] = 0.0
        largest = np.finfo(np.float32).max
        return np.minimum(np.maximum(out, -largest, out=out), largest, out=out)

    @cached_property
    def _units(self) -> tuple[Floats, Floats]:
        """What is taken off each feature, and what the rest is divided by."""
        return np.where(self.scaled, self.mean, 0.0), np.where(self.scaled, self.std, 1.0)

    def to_dict(self) -> dict[str, Any]:
        return {
            "method": "zscore",
            "window": [str(d) for d in self.window],
            "names": list(self.names),
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
            "scaled": self.scaled.tolist(),
        }

    @staticmethod
    def from_dict(tree: Mapping[str, Any]) -> Scaler:
        """What `to_dict` gave; raises ValueError where the numbers are not one for each name."""
        first, last = (date.fromisoformat(str(d)) for d in tree["window"])
        mean, std = (np.array(tree[name], dtype=np.float64) for name in ("mean", "std"))
        scaled = np.array(tree["scaled"], dtype=np.bool_)
        if not mean.shape == std.shape == scaled.shape == (len(tree["names"]),):
            raise ValueError("names, mean, std and scaled differ in length")
        if not (np.isfinite(mean).all() and np.isfinite(std).all() and (std > 0).all()):
            raise ValueError("mean and std must be numbers, std above 0")
        return Scaler(tuple(tree["names"]), mean, std, scaled, (first, last))

    @staticmethod
    def read(path: Path) -> Scaler:
        remedy = "Run `echelon prepare`."
        tree = read_json(path, _Tree, remedy)
        try:
            return Scaler.from_dict(tree)
        except ValueError as error:
            raise DamagedError(path, str(error), remedy) from None


class _Tree(TypedDict):
    window: tuple[date, date]
    names: list[str]
    mean: list[float]
    std: list[float]
    scaled: list[bool]
