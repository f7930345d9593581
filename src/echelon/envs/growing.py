"""A world whose rows are appended: what policies and books trade in when bars come one by one.

It is a `World`: rows have absolute numbers, and whoever reads it through the object sees every row
that there is. Everything that a loaded world derives per row is derived by the same functions,
with what a row needs of those before it carried along, so that a row is bit for bit the same
whether it was loaded or appended.

1. `from_history` takes the panel, features and masks that are known so far.
2. `append` takes the next bar: checked first, so that a bar that is refused changes nothing.
3. Rows older than the longest look-back are let go, some at a time. `kept` says what is there.
4. `state` and `restore` stop and go on without the history.

Each array is a mapping of reserved address space, [capacity,…]: pages cost memory once they are
written, and none once their rows are let go (`madvise`; where the system has none, rows stay).
When all rows of a mapping are used, one of twice as many takes over, and only rows that are kept
are copied. So whoever reads the world takes its arrays from it each time and keeps none of them.

Axes: `T` rows, `N` assets, `F` features.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from echelon import market
from echelon.config import Config
from echelon.data.panel import Panel, forward_fill
from echelon.envs.world import World, WorldFacts, total_return_index
from echelon.errors import DataError, StoreError, UsageError
from echelon.states import State, below_prefix, copy_state, match_state, with_prefix
from echelon.types import Bools, Floats, Floats32

_SWEEP = 64  # rows that are let go together, or more
_LEAST_CAPACITY = 4_096  # rows that a mapping has beyond those of the history, or more
_BEHIND = 2  # a book stands a row behind the newest while it waits to be stepped
_FIXED = ("haircut", "lot", "min_lot")
"""Parts of `MarketRows` that are the same at all rows."""


def facts_of(panel: Panel, window: int, splits: Mapping[str, range]) -> WorldFacts:
    """What a world of this panel is; splits: rows of X, as they were prepared."""
    has = (getattr(panel, name) is not None for name in ("open", "volume", "limit_up"))
    data = market.TradedData(panel.calendar, panel.price_basis, panel.symbols, *has)
    return WorldFacts(data, panel.freq, window, dict(splits), panel.benchmark is not None)


def live_span(start: int) -> range:
    """Rows from `start` on, without an end: where books of a world that grows may stand."""
    return range(start, 2**62)


class GrowingWorld(World):
    """A world that rows are appended to; see the module's text."""

    _source: ClassVar[_Source | None] = None  # none: a copy made of parts, which does not grow

    @classmethod
    def from_history(
        cls,
        panel: Panel,
        x: Floats32,
        present: Bools,
        config: Config,
        *,
        splits: Mapping[str, range],
        lookback: int,
        reasons: Sequence[str | None] | None = None,
        costs: float = 1.0,
        capacity: int | None = None,
    ) -> GrowingWorld:
        """The world of what is known so far, all of it kept until rows are appended.

        x[T,N,F], present[T,N]: as prepared; the panel's last T rows are theirs, and where it has
            more, the ones before say the last known closes
        splits: name → rows of X that the policy was trained and tested on, which say where books
            may begin; lookback: of the policy; reasons[N]: of delistings, where known
        costs: as of `world_of`; capacity: rows of the first mapping
        """
        skip = len(panel.times) - len(x)
        if skip < 0 or not len(x) or present.shape != x.shape[:2]:
            raise DataError(
                f"a history of {len(panel.times)} bars has features {list(x.shape)} and masks "
                f"{list(present.shape)}; expected the same number of rows, at least one, and "
                "bars for all of them."
            )
        facts = facts_of(panel, config.window, splits)
        source = _Source(facts, config, lookback, costs)
        after = slice(skip, None)
        close = forward_fill(panel.close)[after]
        factor = None if panel.factor is None else forward_fill(panel.factor)[after]
        rows = source.lay_out(panel, after, close, factor, reasons)
        parts = rows | {"x": np.asarray(x, dtype=np.float32), "present": present}
        source.open(parts, capacity)
        return cls._from_source(source)

    @classmethod
    def restore(
        cls,
        state: Mapping[str, NDArray[Any]],
        facts: WorldFacts,
        config: Config,
        *,
        lookback: int,
        costs: float = 1.0,
        capacity: int | None = None,
    ) -> GrowingWorld:
        """The world that `state` was taken of, with the rows that were kept."""
        source = _Source(facts, config, lookback, costs)
        source.restore(state, capacity)
        return cls._from_source(source)

    @classmethod
    def _from_source(cls, source: _Source) -> GrowingWorld:
        world = cls(**source.fields(), **source.settings)
        object.__setattr__(world, "_source", source)
        return world

    @property
    def facts(self) -> WorldFacts:
        return self._growing().facts

    @property
    def kept(self) -> range:
        source = self._source
        return range(len(self.times)) if source is None else range(source.kept_from, source.n_rows)

    def append(self, row: Panel, x: Floats32, present: Bools) -> int:
        """Take the next bar, a panel of one row with its features x[N,F] and mask present[N].

        Returns the number of its row. What is refused changes nothing.
        """
        source = self._growing()
        source.append(row, x, present)
        self._renew()
        return source.n_rows - 1

    def set_delist_reason(self, symbol: str, reason: str) -> None:
        """Take a reference message: why a symbol is, or will be, delisted."""
        source = self._growing()
        source.set_delist_reason(symbol, reason)
        self._renew()

    def state(self) -> State:
        """What `restore` goes on from: the rows that policies look back to, and running sums."""
        return self._growing().state()

    def _growing(self) -> _Source:
        if self._source is None:
            raise UsageError(
                "this world was made of another one's parts and does not grow. Append to the "
                "world that from_history or restore gave."
            )
        return self._source

    def _renew(self) -> None:
        """Look at all rows there are."""
        for name, array in self._growing().fields().items():
            object.__setattr__(self, name, array)


class _Source:
    """The rows of a growing world, and what the next one needs of them."""

    def __init__(self, facts: WorldFacts, config: Config, lookback: int, costs: float) -> None:
        if lookback < 0:
            raise UsageError(f"lookback is {lookback}; expected 0 or more rows")
        self.facts = facts
        self.settings = facts.settings(config, costs)
        self.n_rows = self.kept_from = 0
        self._row_settings, self._costs = facts.row_settings(config), costs
        self._keep = lookback + _BEHIND
        n_assets = len(facts.data.symbols)
        self._state = market.RowState.start(n_assets)
        self._factor: Floats = np.ones(n_assets)
        self._fixed: dict[str, Floats] = {}
        self._columns: dict[str, _Column] = {}

    def lay_out(
        self,
        panel: Panel,
        rows: slice,
        close: Floats,
        factor: Floats | None,
        reasons: Sequence[str | None] | None,
    ) -> dict[str, NDArray[Any]]:
        """Name → [T,…] of the `rows` of a panel, which come next, all but features and masks.

        close[T,N], factor[T,N]: carried forward
        """

        def part(name: str) -> NDArray[Any] | None:
            values = getattr(panel, name)
            return None if values is None else np.asarray(values[rows])

        history = market.PriceHistory(
            times=panel.times[rows],
            symbols=panel.symbols,
            price_basis=panel.price_basis,
            close=close,
            tradable=panel.tradable[rows],
            delisted=panel.delisted[rows],
            factor=part("factor"),
            **{name: part(name) for name in ("open", "volume", "limit_up", "limit_down")},
            reasons=reasons,
        )
        laid, self._state = market.lay_rows(
            history, self._row_settings, self._state, self._fixed or None
        )
        if factor is not None:
            self._factor = factor[-1].copy()
        columns = laid._asdict()
        fixed = {name: columns.pop(name) for name in _FIXED}
        self._fixed = self._fixed or fixed
        columns["stamp"] = columns["stamp"] * self._costs
        columns |= {"member": panel.member[rows], "times": history.times}
        columns["growth"] = total_return_index(close, factor, panel.price_basis)
        if panel.benchmark is not None:
            columns["benchmark"] = panel.benchmark[rows]
        return columns

    def open(self, parts: Mapping[str, NDArray[Any]], capacity: int | None, first: int = 0) -> None:
        """Reserve room for columns and write the first rows, those from number `first` on."""
        stop = first + len(parts["times"])
        room = capacity or stop + max(stop, _LEAST_CAPACITY)
        if room < stop:
            raise UsageError(f"capacity is {room}, but there are {stop} rows already")
        self._columns = {
            name: _Column((room, *part.shape[1:]), part.dtype) for name, part in parts.items()
        }
        for name, part in parts.items():
            self._columns[name].array[first:stop] = part
        self.kept_from, self.n_rows = first, stop

    def fields(self) -> dict[str, Any]:
        """The fields of the world that are of its rows."""
        n = self.n_rows
        parts: dict[str, Any] = {name: part.array[:n] for name, part in self._columns.items()}
        of_market = [name for name in market.MarketRows._fields if name in parts]
        rows = {name: parts.pop(name) for name in of_market} | self._fixed
        return {"benchmark": None, **parts, "rows": market.MarketRows(**rows)}

    def append(self, row: Panel, x: Floats32, present: Bools) -> None:
        self._refuse(row, x, present)
        close = np.where(np.isnan(row.close), self._state.close, row.close)
        factor = row.factor
        if factor is not None:
            factor = np.where(np.isnan(factor), self._factor, factor)
        n = self.n_rows
        if n == len(self._columns["times"].array):
            self._double()
        columns = self.lay_out(row, slice(None), close, factor, None)
        columns |= {"x": x[None], "present": present[None]}
        for name, column in self._columns.items():
            column.array[n] = columns[name][0]
        self.n_rows = n + 1
        if self.n_rows - self._keep - self.kept_from >= _SWEEP:
            self.kept_from = self.n_rows - self._keep
            for column in self._columns.values():
                column.let_go(self.kept_from)

    def set_delist_reason(self, symbol: str, reason: str) -> None:
        """Take what is lost at the delisting of a symbol."""
        symbols = self.facts.data.symbols
        if symbol not in symbols:
            raise DataError(
                f"a reason of delisting came for {symbol!r}, which is not one of the "
                f"{len(symbols)} symbols of this world. Send those of its universe only."
            )
        haircut = self._fixed["haircut"].copy()
        unknown = self._row_settings.unknown_haircut
        haircut[symbols.index(symbol)] = market.haircuts((symbol,), (reason,), unknown)[0]
        self._fixed["haircut"] = haircut

    def state(self) -> State:
        """Kept rows and what the next one needs; days and times as whole numbers."""
        first = max(self.kept_from, self.n_rows - self._keep)
        rows = {
            n: _without_dates(part.array[first : self.n_rows]) for n, part in self._columns.items()
        }
        carried = {name: _without_dates(part) for name, part in self._state._asdict().items()}
        return copy_state(
            {"first": first, "factor": self._factor, "haircut": self._fixed["haircut"]}
            | with_prefix("rows.", rows)
            | with_prefix("carried.", carried)
        )

    def restore(self, state: Mapping[str, NDArray[Any]], capacity: int | None) -> None:
        """Take what `state` gave; StoreError where it is of another world."""
        rows, carried = below_prefix("rows.", state), below_prefix("carried.", state)
        length, width = _lengths(rows)
        n_assets = len(self.facts.data.symbols)
        like = {name: np.zeros(shape, dtype) for name, (shape, dtype) in self._forms(width).items()}
        for name, part in like.items():
            like[name] = np.broadcast_to(part, (length, *part.shape))
        taken = match_state("world's rows", like, rows)
        past = carried.get("volume", np.zeros(0))
        n_past = min(past.shape[0], self._row_settings.median_bars) if past.ndim == 2 else 0
        start = self._state._replace(volume=np.zeros((n_past, n_assets)))
        kept = match_state(
            "world", {k: _without_dates(v) for k, v in start._asdict().items()}, carried
        )
        more = {"first": 0, "factor": self._factor, "haircut": np.zeros(n_assets)}
        facts = match_state("world", more, state)
        day = kept.pop("day").astype("datetime64[D]")
        self._state, self._factor = market.RowState(**kept, day=day), facts["factor"]
        self._fixed = market.fixed_rows(self.facts.data.symbols, self._row_settings)
        self._fixed["haircut"] = facts["haircut"]
        taken["times"] = taken["times"].astype("datetime64[us]")
        self.open(taken, capacity, int(facts["first"]))

    def _forms(self, width: int) -> dict[str, tuple[tuple[int, ...], DTypeLike]]:
        """Name → shape and type of one saved row; width: F."""
        n = len(self.facts.data.symbols)
        forms: dict[str, tuple[tuple[int, ...], DTypeLike]] = {
            name: ((n,), np.float64)
            for name in (*market.MarketRows._fields, "growth")
            if name not in _FIXED
        }
        masks = ("tradable", "gone", "present", "member")
        forms |= dict.fromkeys(masks, ((n,), np.bool_))
        forms |= {"x": ((n, width), np.float32), "times": ((), np.int64)}
        forms |= {"new_session": ((), np.bool_), "stamp": ((), np.float64)}
        if self.facts.benchmark:
            forms["benchmark"] = ((), np.float64)
        return forms

    def _double(self) -> None:
        """Go on in mappings of twice the rows; those that were let go are not copied."""
        kept = slice(self.kept_from, self.n_rows)
        parts = {name: column.array[kept] for name, column in self._columns.items()}
        self.open(parts, 2 * self.n_rows, self.kept_from)

    def _refuse(self, row: Panel, x: Floats32, present: Bools) -> None:
        """Raise where a row cannot be the next one of this world."""
        columns = self._columns
        want = columns["x"].array.shape[1:]
        if len(row.times) != 1 or x.shape != want or present.shape != want[:1]:
            raise DataError(
                f"a row to append has {len(row.times)} bars, features {list(x.shape)} and a mask "
                f"{list(present.shape)}; expected 1, {list(want)} and {list(want[:1])}."
            )
        facts = facts_of(row, self.facts.window, self.facts.splits)
        if (facts.data, facts.freq) != (self.facts.data, self.facts.freq):
            raise DataError(
                f"a row to append is of {facts.data}, {facts.freq}; the world is of "
                f"{self.facts.data}, {self.facts.freq}. Feed the data it was made of."
            )
        if facts.benchmark != self.facts.benchmark:
            had = "has" if self.facts.benchmark else "has no"
            raise DataError(f"the world {had} benchmark, the row not so. Feed the same series.")
        last, now = columns["times"].array[self.n_rows - 1], row.times[0]
        if not now > last:
            raise DataError(f"a row of {now} cannot follow one of {last}. Append in order of time.")
        if not np.isfinite(x).all():
            asset = int(np.argwhere(~np.isfinite(x))[0, 0])
            raise DataError(
                f"a feature of {row.symbols[asset]} is not a number at {now}. Send zeros, with "
                "the symbol masked, where features are not known."
            )
        if row.factor is None and not (self._factor == 1.0)[np.isfinite(self._factor)].all():
            raise DataError(
                f"the row of {now} has no adjustment factor, but those before it had. Feed the "
                "factor, carried forward."
            )


def _lengths(rows: Mapping[str, NDArray[Any]]) -> tuple[int, int]:
    """(rows, features) of a saved world."""
    x = rows.get("x")
    if x is None or x.ndim != 3 or not len(x):
        raise StoreError("the saved world has no features [T,N,F]. Restore what state() gave.")
    return x.shape[0], x.shape[2]


def _without_dates(array: NDArray[Any]) -> NDArray[Any]:
    """Days and times as whole numbers, which every store of arrays can hold."""
    return array.astype(np.int64) if array.dtype.kind == "M" else array


class _Column:
    """An array [capacity,…] in reserved address space."""

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        count = math.prod(shape)
        size = max(count * np.dtype(dtype).itemsize, 1)
        if hasattr(mmap, "MAP_ANONYMOUS"):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            self._memory = mmap.mmap(-1, size, flags=flags)
        else:
            self._memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a page of 2 MB would hold rows long let go
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.array = np.frombuffer(self._memory, dtype, count).reshape(shape)
        self._gone = 0

    def let_go(self, first: int) -> None:
        """Give back the memory of whole pages of rows before `first`; they are 0 from now on."""
        row_bytes = self.array.strides[0]
        stop = first * row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > self._gone and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, self._gone, stop - self._gone)
        self._gone = max(stop, self._gone)
