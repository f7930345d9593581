"""Unlike the training data: whether what a policy is shown still looks like what it learned from.

At export `Reference.fit` summarises the train window, and learns from train and validation how far
ordinary bars stray. Live, `RowGuard.check` looks at every bar between the decision and its orders.

1. `Summary.measure` compares a bar with the train window: which values are out of their feature's
   range, which repeat the bar before though they never did, how far the symbols' rows are from
   those of training (Mahalanobis distance), and the same of the mean embedding, where there is one.
2. That is smoothed over about ten bars, so that one wild day is one wild day, and gives the
   statistics of `STATISTICS`. Distances are logs: values off by a factor of 100 pass at once.
3. A threshold is passed in a stated number of ordinary years. Bars depend on one another, so the
   unit is the largest value of a block of bars, and an alarm ends once a block has passed without
   one: there are at most as many alarms as blocks with an excess, whatever the dependence. Excesses
   over the upper quarter of the blocks have an exponential tail; with k of them, whose sum is s, a
   new one is above c·s with probability (1 + c)^−k, which counts that the tail is an estimate.
4. Blocks of the train window are measured by a summary of the other four fifths of it, as if they
   had not been seen. The validation window itself passes no threshold.

All of it is a pure function of the bars: run again, a journal gives the same alarms. What never
happened in train and validation, a crisis for one, is unlike them: that alarm is no false one.

Axes: `T` bars, `B` rows of symbols, `N` symbols, `F` features, `D` embedding, `S` statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from echelon.states import State
from echelon.types import Bools, Floats, Floats32

STATISTICS: Mapping[str, str] = {
    "out_of_range": "largest share of symbols whose values of one feature are out of its range",
    "symbol": "largest share of one symbol's features that are out of their range",
    "still": "largest share of one symbol's features that repeat, of those that never do",
    "distance": "log distance of the symbols' rows to those of training, on average",
    "embedding": "log distance of the mean embedding to those of training",
}
"""Name → what is compared with a threshold."""
_SHARES = ("out_of_range", "symbol", "still")

_WEIGHT = 0.2
"""Of a new bar in what is smoothed."""
_FOLDS = 5
_BLOCK = 20
"""Least bars of a block; of bars within the day it is a day."""
_APART = 1
"""Blocks between two of one spell: a wild season is one observation of the tail."""
_CHUNK = 256
MOST_ROWS = 20_000
"""Bars of each window that thresholds are learnt from, its last ones; ranges see all."""
_SHRINK = 0.05
"""Part of a covariance that is its diagonal."""
_LEAST_EIGENVALUE = 1e-3
"""As a share of their mean: directions in which training did not move."""
_CLIP = 10.0
"""Values, in standard deviations, that a covariance is learnt from."""
_FAR = 1e6
"""Standard deviations that are far enough; squares of more are no numbers."""
_REPEATS = 0.05
"""Share of bars above which a feature is one that repeats."""
_LEAST_SHARE = 0.5
"""Of one symbol or feature, as threshold of a smoothed share: one odd bar is not enough."""
_TINY = 1e-6


class Moments(NamedTuple):
    """Count, sum[F] and products[F,F] of rows, the range[F] of their values, and how often[F] they
    repeat the row before.
    """

    n: float
    total: Floats
    products: Floats
    low: Floats32
    high: Floats32
    repeated: Floats

    @classmethod
    def from_rows(cls, rows: Floats32, before: Floats32 | None = None) -> Moments:
        """Of rows[B,F]; before[B,F]: those a bar earlier."""
        wide = np.clip(rows, -_CLIP, _CLIP).astype(np.float64)
        low, high = rows.min(axis=0, initial=np.inf), rows.max(axis=0, initial=-np.inf)
        same = np.zeros(rows.shape[1]) if before is None else (rows == before).sum(axis=0)
        return cls(float(len(rows)), wide.sum(axis=0), wide.T @ wide, low, high, same)

    @classmethod
    def merge(cls, parts: Sequence[Moments]) -> Moments:
        n, total, products, low, high, same = zip(*parts, strict=True)
        range_ = np.min(low, axis=0), np.max(high, axis=0)
        return cls(sum(n), np.sum(total, axis=0), np.sum(products, axis=0), *range_, sum(same))

    def whitening(self) -> tuple[Floats32, Floats32]:
        """(mean[F], matrix[F,F]): (row − mean) @ matrix has the covariance 1 in training."""
        mean = self.total / max(self.n, 1.0)
        spread = self.products / max(self.n, 1.0) - np.outer(mean, mean)
        spread = (1.0 - _SHRINK) * spread + _SHRINK * np.diag(np.diag(spread))
        values, vectors = np.linalg.eigh(spread)
        values = np.maximum(values, _LEAST_EIGENVALUE * max(values.mean(), _TINY))
        matrix = vectors / np.sqrt(values)
        return mean.astype(np.float32), np.ascontiguousarray(matrix, dtype=np.float32)


class Summary(NamedTuple):
    """The train window: ranges[F], which features[F] never repeat, and what whitens rows and mean
    embeddings.
    """

    low: Floats32
    high: Floats32
    moves: Floats32
    mean: Floats32
    whiten: Floats32
    embedding_mean: Floats32 | None = None
    embedding_whiten: Floats32 | None = None

    @classmethod
    def from_moments(cls, rows: Moments, embeddings: Moments | None) -> Summary:
        moves = rows.repeated <= _REPEATS * rows.n
        share = (moves / max(int(moves.sum()), 1)).astype(np.float32)
        more = () if embeddings is None else embeddings.whitening()
        return cls(rows.low, rows.high, share, *rows.whitening(), *more)

    def measure(self, x: Floats32, before: Floats32, shown: Bools, z: Floats32 | None) -> Floats32:
        """Compare a bar with training: what `Levels` smooths.

        x[N,F], the bar before it[N,F], symbols with features and a trade[N], mean embedding[D]
        """
        n_symbols, n_features = x.shape
        bar = np.empty(n_features + 2 * n_symbols + 2, dtype=np.float32)
        _measure_rows(x, before, shown, *self[:5], bar)
        bar[-1] = math.nan
        mean, whiten = self.embedding_mean, self.embedding_whiten
        if z is not None and mean is not None and whiten is not None:
            bar[-1] = _log_distance(z, mean, whiten, np.empty_like(z))
        return bar


_compiled = njit(cache=True, nogil=True, error_model="numpy")
# There is no fastmath, and logarithms are the C library's: the same bits whatever the processor.


@_compiled
def _log_distance(row: Floats32, mean: Floats32, whiten: Floats32, white: Floats32) -> float:
    """Of row[D] to the mean, per dimension; white[D]: to write to."""
    white[:] = 0.0
    for i in range(len(row)):
        off = np.float32(min(max(row[i] - mean[i], -_FAR), _FAR))
        for j in range(len(row)):
            white[j] += off * whiten[i, j]
    total = 0.0
    for j in range(len(row)):
        total += white[j] * white[j]
    return math.log(total / len(row) + _TINY)


@_compiled
def _measure_rows(
    x: Floats32,
    before: Floats32,
    shown: Bools,
    low: Floats32,
    high: Floats32,
    moves: Floats32,
    mean: Floats32,
    whiten: Floats32,
    bar: Floats32,
) -> None:
    """All of `Summary.measure` but the embedding, into bar[F+2N+2]."""
    n_symbols, n_features = x.shape
    bar[:] = 0.0
    count = max(shown.sum(), 1)
    white = np.empty(n_features, dtype=np.float32)
    for n in range(n_symbols):
        if not shown[n]:
            continue
        for f in range(n_features):
            if x[n, f] < low[f] or x[n, f] > high[f]:
                bar[f] += 1.0 / count
                bar[n_features + n] += 1.0 / n_features
            if x[n, f] == before[n, f]:
                bar[n_features + n_symbols + n] += moves[f]
        bar[-2] += _log_distance(x[n], mean, whiten, white) / count


class Levels:
    """What is smoothed: shares out of range by feature[F] and by symbol[N], shares that repeat by
    symbol[N], log distances of rows and of the embedding, which is NaN where there is none.
    """

    def __init__(self, start: Floats32, n_features: int, n_symbols: int) -> None:
        """start[2]: both distances of an ordinary bar."""
        shares = np.zeros(n_features + 2 * n_symbols, dtype=np.float32)
        self.values = np.concatenate([shares, start.astype(np.float32)])
        self._n_features = n_features

    def smooth(self, bar: Floats32, shown: Bools) -> list[float]:
        """One bar on, and the statistics[S]; symbols[N] that are not shown stay as they are.

        Where none is shown, all does.
        """
        return list(_smooth(self.values, bar, shown, self._n_features))

    def culprit(self, statistic: str) -> tuple[str, int] | None:
        """(feature or symbol, its number) that a statistic is of."""
        if statistic not in _SHARES:
            return None
        f, end = self._n_features, len(self.values) - 2
        middle = (f + end) // 2
        parts = {"out_of_range": (0, f), "symbol": (f, middle), "still": (middle, end)}
        kind = "feature" if statistic == "out_of_range" else "symbol"
        return kind, int(self.values[slice(*parts[statistic])].argmax())


@_compiled
def _smooth(
    values: Floats32, bar: Floats32, shown: Bools, n_features: int
) -> tuple[float, float, float, float, float]:
    first, second = n_features, n_features + len(shown)
    largest, anybody = np.zeros(3), shown.any()
    for k in range(len(values)):
        part = 0 if k < first else (1 if k < second else 2)
        there = anybody
        if first <= k < len(values) - 2:
            there = shown[k - (first if part == 1 else second)]
        if there and bar[k] == bar[k]:
            values[k] += np.float32(_WEIGHT) * (bar[k] - values[k])
        if k < len(values) - 2:
            largest[part] = max(largest[part], values[k])
    return largest[0], largest[1], largest[2], values[-2], values[-1]


class Tail(NamedTuple):
    """How far the blocks of ordinary bars go: the upper `share` of them is above `level`, by
    `excess` in all, and there are `k` of those. largest: of the validation window
    """

    level: float
    share: float
    excess: float
    k: float
    largest: float

    @classmethod
    def from_values(cls, values: Floats, valid: Floats, block: int) -> Tail:
        """Of a statistic[T] in train and validation, and in validation."""
        blocks = np.array_split(values, max(1, len(values) // block))
        maxima = np.array([part.max() for part in blocks])
        above = max(1, len(maxima) // 4)
        level = np.sort(maxima)[::-1][min(above, len(maxima) - 1)]
        where = np.flatnonzero(maxima > level)
        spells = np.split(where, np.flatnonzero(np.diff(where) > _APART) + 1)
        excess = sum(float(maxima[spell].max() - level) for spell in spells if len(spell))
        share = above / len(maxima)
        return cls(float(level), share, excess, float(len(spells)), float(valid.max()))

    def threshold(self, probability: float) -> float:
        """What a block of ordinary bars passes with this probability, at most."""
        ratio = max(self.share / probability, 1.0)
        new = self.level + self.excess * (math.pow(ratio, 1.0 / self.k) - 1.0)
        return max(new, self.largest)


@dataclass(frozen=True)
class Reference:
    """What a bundle knows of ordinary bars. tails: of the statistics that there are"""

    summary: Summary
    tails: Mapping[str, Tail]
    start: Floats32  # [2], of `Levels`
    block: int
    periods_per_year: float

    @classmethod
    def fit(
        cls,
        x: Floats32,
        shown: Bools,
        train: range,
        valid: range,
        embeddings: Floats32 | None,
        periods_per_year: float,
    ) -> Reference:
        """Of features x[T,N,F] and shown[T,N]; mean embeddings[T,D]: NaN on rows without one."""
        edges = np.linspace(train.start, train.stop, _FOLDS + 1).astype(int).tolist()
        folds = [range(a, b) for a, b in pairwise(edges)]
        rows = [_moments(x, shown, fold) for fold in folds]
        inner = None
        if embeddings is not None:
            some = [embeddings[fold.start : fold.stop] for fold in folds]
            inner = [Moments.from_rows(part[np.isfinite(part).all(axis=1)]) for part in some]

        def summary(left_out: int | None) -> Summary:
            chosen = [k for k in range(_FOLDS) if k != left_out]
            embedded = None if inner is None else Moments.merge([inner[k] for k in chosen])
            return Summary.from_moments(Moments.merge([rows[k] for k in chosen]), embedded)

        whole, first = summary(None), max(train.start, train.stop - MOST_ROWS, 1)
        last = range(valid.start, min(valid.stop, valid.start + MOST_ROWS))
        bars = [
            (t, seen)
            for fold, seen in [*((f, summary(k)) for k, f in enumerate(folds)), (last, whole)]
            for t in range(max(fold.start, first), fold.stop)
        ]
        measured = []
        for t, seen in bars:
            z = None if embeddings is None else embeddings[t]
            measured.append(seen.measure(np.asarray(x[t]), np.asarray(x[t - 1]), shown[t], z))
        facts = np.array(measured)[:, -2:]
        known = np.isfinite(facts)
        start = np.where(known, facts, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
        levels = Levels(start, x.shape[2], x.shape[1])
        pairs = zip(bars, measured, strict=True)
        values = np.array([levels.smooth(bar, shown[t]) for (t, _), bar in pairs])
        block = max(_BLOCK, round(periods_per_year / 252.0))
        tails = {
            name: Tail.from_values(values[:, s], values[-len(last) :, s], block)
            for s, name in enumerate(STATISTICS)
            if name != "embedding" or known[:, -1].any()
        }
        return cls(whole, tails, start.astype(np.float32), block, periods_per_year)

    def thresholds(self, per_year: float, n_symbols: int) -> Floats:
        """[S] that ordinary bars pass so many times a year, all statistics together."""
        per_block = per_year / len(self.tails) * self.block / self.periods_per_year
        values = {name: tail.threshold(per_block) for name, tail in self.tails.items()}
        n_features = len(self.summary.low)
        moving = max(int((self.summary.moves > 0.0).sum()), 1)
        for name, count in zip(_SHARES, (n_symbols, n_features, moving), strict=True):
            values[name] = max(values[name], _LEAST_SHARE / count)
        return np.array([values.get(name, np.inf) for name in STATISTICS])

    def arrays(self) -> State:
        parts = {n: part for n, part in self.summary._asdict().items() if part is not None}
        tails = {f"tail.{name}": np.array(tail) for name, tail in self.tails.items()}
        facts = np.array([self.block, self.periods_per_year])
        return {**parts, **tails, "facts": facts, "start": self.start}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], n_features: int) -> Reference:
        """What `arrays` gave; raises ValueError or KeyError where it is not that."""
        summary = Summary(*(arrays.get(name) for name in Summary._fields))  # type: ignore[arg-type]
        f = n_features
        shapes = {**dict.fromkeys(("low", "high", "moves", "mean"), (f,)), "whiten": (f, f)}
        shapes |= {"start": (2,), "facts": (2,)}
        if summary.embedding_mean is not None:
            d = summary.embedding_mean.size
            shapes |= {"embedding_mean": (d,), "embedding_whiten": (d, d)}
        names = [name for name in STATISTICS if f"tail.{name}" in arrays]
        shapes |= {f"tail.{name}": (len(Tail._fields),) for name in names}
        for name, shape in shapes.items():
            if arrays[name].shape != shape or not np.isfinite(arrays[name]).all():
                raise ValueError(f"{name}: expected finite numbers {list(shape)}")
        if missing := STATISTICS.keys() - {*names, "embedding"}:
            raise ValueError(f"no tail of {', '.join(sorted(missing))}")
        tails = {name: Tail(*arrays[f"tail.{name}"].tolist()) for name in names}
        block, periods = arrays["facts"].tolist()
        least = min(min(tail.k, tail.share) for tail in tails.values())
        if block < 1 or periods <= 0.0 or least <= 0.0:
            raise ValueError("block, periods, and k and share of every tail must be above 0")
        return cls(summary, tails, arrays["start"], int(block), periods)


class Alarm(NamedTuple):
    """That a statistic passed its threshold (on), or has been below it for a block of bars."""

    name: str
    on: bool
    value: float
    threshold: float
    culprit: tuple[str, int] | None = None


class RowGuard:
    """Looks at the bars of one stream; see the module's text."""

    def __init__(self, reference: Reference, n_symbols: int, per_year: float) -> None:
        self.reference = reference
        self.thresholds: list[float] = reference.thresholds(per_year, n_symbols).tolist()
        self.levels = Levels(reference.start, len(reference.summary.low), n_symbols)
        self.statistics = [0.0] * len(STATISTICS)
        self.left = [0] * len(STATISTICS)
        """Bars until each alarm ends; 0: there is none."""

    def check(self, x: Floats32, before: Floats32, shown: Bools, z: Floats32 | None) -> list[Alarm]:
        """Alarms that begin or end with a bar; arguments as of `Summary.measure`."""
        bar = self.reference.summary.measure(x, before, shown, z)
        self.statistics = self.levels.smooth(bar, shown)
        alarms, left = [], self.left
        for s, (value, limit) in enumerate(zip(self.statistics, self.thresholds, strict=True)):
            if value > limit:
                if not left[s]:
                    alarms.append(self._alarm(s, on=True))
                left[s] = self.reference.block
            elif left[s]:
                left[s] -= 1
                if not left[s]:
                    alarms.append(self._alarm(s, on=False))
        return alarms

    def _alarm(self, s: int, *, on: bool) -> Alarm:
        name = list(STATISTICS)[s]
        culprit = self.levels.culprit(name) if on else None
        return Alarm(name, on, self.statistics[s], self.thresholds[s], culprit)

    def state(self) -> State:
        return {"levels": self.levels.values.copy(), "left": np.array(self.left)}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `state` gave; raises ValueError where it is another guard's."""
        levels, left = state["levels"], state["left"]
        if levels.shape != self.levels.values.shape or left.shape != (len(self.left),):
            raise ValueError("the guard's state is of other features or symbols")
        self.levels.values[:] = levels
        self.left = left.astype(int).tolist()


def _moments(x: Floats32, shown: Bools, rows: range) -> Moments:
    """Of the rows of symbols that are shown."""
    parts = []
    for a in range(rows.start, rows.stop, _CHUNK):
        some = slice(a, min(a + _CHUNK, rows.stop))
        now, before = np.asarray(x[some]), np.asarray(x[max(a - 1, 0) : some.stop - 1])
        if not a:
            before = np.concatenate([np.full_like(now[:1], np.nan), before])
        parts.append(Moments.from_rows(now[shown[some]], before[shown[some]]))
    return Moments.merge(parts)
