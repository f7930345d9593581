"""The router's task: what it sees of a place, and what it is paid for its decisions.

It sees the experts by their own books, itself, and the market:

    relative/H/NAME   the expert's own book over the last H bars, less the mean over experts
    level/H           that mean
    drawdown/NAME     of the own book, in units of the limit: masked above 1
    masked/NAME       may not be chosen
    scale/NAME        of its position limit
    usage/NAME        decaying share of the router's decisions that chose it; cash too
    charge/NAME       is in charge; cash too. Blended: its share
    market/H          mean over assets of the return over H bars
    market/spread     standard deviation over assets of the return over the second shortest H
    market/calm       log of the market's volatility over that H, over that over the longest
    macro/N           an exogenous series as the agents see it, scaled, with `meta_router.macro`
    trust/NAME        log weight of the expert by the fixed-share rule, with `meta_router.prior`

Everything is free of scale: a return over H bars is in units of √H times the root mean square of
such returns per bar over the longest horizon, and clipped to ±5 (log weights are not). Bars that
are not known count as bars without a return. Nothing lies after the row.

What it is paid in training (`RouterReward`):

    reward = relative return / its running standard deviation + λ · KL

A 5-bar relative return has a standard deviation of about 0.01, λ · log K is 0.16: undivided, the
bonus would be all that counts. KL is one of two (see ops.diversity), both in [0, log K]: `usage`
of the chosen expert, or how unlike the others' its portfolio is, `policy`. Cash is nobody's skill:
choosing it is paid no bonus and is no usage. λ follows the entropy of usage, once a rollout; one
that is set to 0 is a switch, and stays 0.

Axes: `E` places, `K` experts, `H` horizons, `L` the longest of them, `T` rows, `N` assets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.config.hierarchy import MetaRouterConfig
from echelon.envs.world import World
from echelon.errors import ConfigError, DataError
from echelon.ops.diversity import RunningStd, UsageWindow, next_kl_weight, policy_kl
from echelon.states import State, copy_state, match_state
from echelon.types import Bools, Floats, Floats32, Ints

if TYPE_CHECKING:
    from gymnasium import spaces

OBSERVATION_CLIP = 5.0
LEAST_LOG = -20.0
"""Log weights of the fixed-share rule are above this."""
USAGE_MEMORY = 20.0
"""Decisions over which usage decays."""
_LEAST = 1e-9  # returns smaller than this have no volatility to be measured in
_RUIN = 1e-9  # value, as a share of the first, below which a book has no logarithm to speak of


class ExpertView(NamedTuple):
    """What the own books say of the experts in B places or at B rows.

    relative[B,K,H], level[B,H]: returns; drawdown[B,K]: in units of the limit
    allowed[B,K]: by risk control; scale[B,K]: of the position limit
    trust[B,K]: log weights of the fixed-share rule; [B,0] where it is no prior
    """

    relative: Floats32
    level: Floats32
    drawdown: Floats32
    allowed: Bools
    scale: Floats32
    trust: Floats32

    def at(self, rows: NDArray[np.int64]) -> ExpertView:
        return ExpertView._make(part[rows] for part in self)


def observation_names(
    experts: Sequence[str], horizons: Sequence[int], *, macro: int = 0, prior: bool = False
) -> tuple[str, ...]:
    """[O] what the entries of an observation are, in their order."""
    choices = (*experts, "cash")
    trust = tuple(f"trust/{name}" for name in experts) if prior else ()
    return (
        *(f"relative/{h}/{name}" for name in experts for h in horizons),
        *(f"level/{h}" for h in horizons),
        *(f"{kind}/{name}" for kind in ("drawdown", "masked", "scale") for name in experts),
        *(f"{kind}/{name}" for kind in ("usage", "charge") for name in choices),
        *(f"market/{h}" for h in horizons),
        *("market/spread", "market/calm"),
        *(f"macro/{n}" for n in range(macro)),
        *trust,
    )


def observation_size(n_experts: int, meta: MetaRouterConfig) -> int:
    """O."""
    names = [str(k) for k in range(n_experts)]
    prior = meta.prior != "none"
    return len(observation_names(names, meta.horizons, macro=meta.macro, prior=prior))


def observation_space(n_experts: int, meta: MetaRouterConfig) -> spaces.Box:
    """Of observations[O]; gymnasium, which takes a while to import, is imported here."""
    from gymnasium import spaces

    size = observation_size(n_experts, meta)
    # The logarithm of a share that is spread over many experts lies below the others' bound.
    most = OBSERVATION_CLIP if meta.prior == "none" else -LEAST_LOG
    return spaces.Box(-most, most, (size,), np.float32)


def make_observation(
    sight: ExpertView, usage: Floats, in_charge: Ints | Floats, market: Floats32
) -> Floats32:
    """[E,O] float32 of a sight of E places, usage[E,K+1] and market[E,M].

    in_charge[E]: who is; or [E,K+1] the share of each, where they are blended
    """
    relative, level, drawdown, allowed, scale, trust = sight
    relative = relative.reshape(len(relative), -1)
    drawdown = np.minimum(drawdown, OBSERVATION_CLIP)
    charge = _shares(in_charge, usage.shape[1])
    parts = (relative, level, drawdown, ~allowed, scale, usage, charge, market, trust)
    return np.concatenate(parts, axis=1, dtype=np.float32, casting="unsafe")


def with_cash(allowed: Bools) -> Bools:
    """[E,K+1] of allowed[E,K]: cash may always be chosen."""
    return np.column_stack([allowed, np.ones(len(allowed), dtype=np.bool_)])


def even_usage(n_places: int, n_choices: int) -> Floats:
    """Usage[E,K+1] before the first decision."""
    return np.full((n_places, n_choices), 1.0 / n_choices)


def one_hot(chosen: NDArray[Any], n_choices: int) -> Floats:
    """[E,K+1] of who was chosen[E]."""
    return np.asarray(chosen[:, None] == np.arange(n_choices), dtype=np.float64)


def _shares(chosen: Ints | Floats, n_choices: int) -> Floats:
    """[E,K+1] of who was chosen[E], or as it is."""
    shares = chosen if chosen.ndim > 1 else one_hot(chosen, n_choices)
    return np.asarray(shares, dtype=np.float64)


def update_usage(usage: Floats, chosen: Ints | Floats, which: Bools) -> Floats:
    """Usage[E,K+1] after the decisions of the places `which`[E]: chosen[E], or [E,K+1] shares."""
    onto = _shares(chosen, usage.shape[1])
    return np.where(which[:, None], usage + (onto - usage) / USAGE_MEMORY, usage)


class Trail:
    """The last L bars of K own books in E places, and what they made."""

    def __init__(self, n_places: int, n_experts: int, horizons: Sequence[int]) -> None:
        self._horizons = np.array(horizons)
        self._longest = int(max(horizons))
        # In the order of time, moved to the front when full: no number depends on when that is.
        rows = 4 * self._longest + 1
        self._log = np.zeros((rows, n_places, n_experts))
        """Logarithms of the values."""
        self._squares = np.zeros((rows, n_places, 2))
        """Sums so far of squared returns per bar: relative to the mean, and of the mean."""
        self._end = self._longest + 1
        self._known = np.zeros(n_places, dtype=np.int64)

    def push(self, growth: Floats, fresh: Bools) -> None:
        """The values[E,K] after a bar over the first (NaN: ruin); fresh[E]: books that begin."""
        keep = self._longest + 1
        if self._end == len(self._log):
            self._log[:keep] = self._log[-keep:]
            self._squares[:keep] = self._squares[-keep:]
            self._end = keep
        now = self._end
        self._log[now] = np.log(np.fmax(growth, _RUIN))
        bars = self._log[now] - self._log[now - 1]
        mean = bars.mean(axis=1)
        apart = np.square(bars - mean[:, None]).mean(axis=1)
        self._squares[now] = self._squares[now - 1] + np.stack([apart, np.square(mean)], axis=1)
        self._end += 1
        self._known = np.minimum(self._known + 1, self._longest)
        if fresh.any():
            window = slice(self._end - keep, self._end)
            self._log[window, fresh] = 0.0
            self._squares[window, fresh] = 0.0
            self._known[fresh] = 0

    def state(self) -> State:
        parts = {"log": self._log, "squares": self._squares, "known": self._known}
        return copy_state(parts | {"end": self._end})

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        taken = match_state("trail of own books", self.state(), state)
        self._log, self._squares, self._known = (taken[n] for n in ("log", "squares", "known"))
        self._end = int(taken["end"])

    def returns(self) -> tuple[Floats32, Floats32]:
        """(relative[E,K,H], level[E,H]): see the module's text."""
        last = self._end - 1
        squares = self._squares[last] - self._squares[last - self._longest]
        per_bar = squares / np.maximum(self._known, 1)[:, None]
        size = np.maximum(np.sqrt(np.maximum(per_bar, 0.0)), _LEAST)
        made = self._log[last] - self._log[last - self._horizons]  # [H,E,K]
        level = made.mean(axis=2)
        root = np.sqrt(self._horizons)[:, None]
        relative = (made - level[:, :, None]) / (size[:, 0] * root)[:, :, None]
        return _clip(relative.transpose(1, 2, 0)), _clip((level / (size[:, 1] * root)).T)


class MarketSums(NamedTuple):
    """Running sums over the rows of a market since its first; what the next row is added to.

    The last L of them, 0 before the first row: a sum over h ≤ L bars is a difference of two.
    """

    bars: Floats  # [L,N] of returns per bar
    squares: Floats  # [L,N] of their squares
    known: Floats  # [L,N] how many there were
    market: Floats  # [L] of the squared mean return over assets
    level: Floats  # [N] logarithm of the last row's price, 0 where there was none
    priced: Bools  # [N] there was one
    rows: Ints  # [] how many rows there were

    @staticmethod
    def start(n_assets: int, horizons: Sequence[int]) -> MarketSums:
        longest = max(horizons)
        bars, squares, known = np.zeros((3, longest, n_assets))
        level, priced = np.zeros(n_assets), np.zeros(n_assets, dtype=np.bool_)
        rows = np.zeros((), dtype=np.int64)
        return MarketSums(bars, squares, known, np.zeros(longest), level, priced, rows)


def market_view(world: World, first: NDArray[np.int64], horizons: Sequence[int]) -> Floats32:
    """[T,M] the market's part of observations; no row looks behind the window before first[T]."""
    out = np.zeros((len(world.times), len(horizons) + 2), dtype=np.float32)
    edges = np.flatnonzero(np.diff(first)) + 1
    for low, high in zip([0, *edges.tolist()], [*edges.tolist(), len(first)], strict=True):
        since = _first_seen(world, int(first[low]))
        sums = MarketSums.start(world.n_assets, horizons)
        part, _ = add_market_rows(
            world.growth[since:high], world.present[since:high], horizons, sums
        )
        begin = max(low, since)  # nobody stands on rows before
        out[begin:high] = part[begin - since :]
    return out


def macro_view(world: World, rows: Ints, count: int) -> Floats32:
    """[E,count] the last features at rows[E], which are the same for all assets that have any."""
    shown = world.present[rows, :, None]
    values = np.where(shown, world.x[rows][:, :, world.x.shape[2] - count :], 0.0)
    return _clip(values.sum(axis=1) / np.maximum(shown.sum(axis=1), 1))


def refuse_macro(world: World, count: int) -> None:
    """Raise where a world has fewer features than the router is to see of them."""
    if count > world.x.shape[2]:
        raise ConfigError(
            f"meta_router.macro = {count} is more than the {world.x.shape[2]} features there are. "
            "Set it to the number of series of data.exogenous."
        )


def _first_seen(world: World, first: int) -> int:
    """The first row that observations of books which begin at row `first` look at."""
    return max(first - world.window + 1, 0)


class MarketView:
    """`market_view` of a world that may grow: rows are added as they come, and let go after.

    Of a loaded world all rows are there, and are added at once.
    """

    def __init__(self, world: World, first: int, horizons: Sequence[int], macro: int = 0) -> None:
        """first: row that books begin at; of a world of several stretches that of each is used."""
        refuse_macro(world, macro)
        self._world, self._horizons, self._macro = world, tuple(horizons), macro
        self._first = self._begin = self._stop = _first_seen(world, first)
        self._table: Floats32 = np.zeros((0, len(horizons) + 2), dtype=np.float32)
        self._sums = MarketSums.start(world.n_assets, horizons)

    def catch_up(self) -> None:
        """Add all that the world has, while it is there; not where `restore` is to come."""
        stop = len(self._world.times)
        if self._world.stretches:  # such a world does not grow
            first = self._world.first_rows(np.arange(stop))
            self._table = market_view(self._world, first, self._horizons)
            self._begin, self._stop = 0, stop
        elif self._world.kept.start <= self._stop < stop:
            self._add_rows(self._begin, stop)

    def at(self, rows: NDArray[np.int64]) -> Floats32:
        """[E,M] at rows[E], macro series after; of rows before the first nothing is kept."""
        low, high = int(rows.min()), int(rows.max())
        if high >= self._stop:
            self._add_rows(low, high + 1)
        if low < self._begin:
            raise DataError(
                f"the router is asked about row {low}, but what it sees of the market is known "
                f"from row {self._begin} on: rows before were let go. Start the policy on the "
                "newest row, or restore what it was saved with."
            )
        seen = self._table[rows - self._begin]
        return np.concatenate([seen, macro_view(self._world, rows, self._macro)], axis=1)

    def state(self, stop: int) -> State:
        """What `restore` goes on from: sums over the rows before `stop`."""
        sums = self._sums
        if stop != self._stop:  # of a loaded world more rows have been added than were visited
            sums = MarketSums.start(self._world.n_assets, self._horizons)
            _, sums = self._sum_rows(sums, self._first, stop)
        return copy_state({"stop": stop, **sums._asdict()})

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        taken = match_state("view of the market", self.state(self._stop), state)
        self._begin = self._stop = int(taken.pop("stop"))
        self._table = self._table[:0]
        self._sums = MarketSums(**taken)

    def _add_rows(self, low: int, stop: int) -> None:
        """Add the rows before `stop`; of those that were there, ones from `low` on are kept."""
        part, self._sums = self._sum_rows(self._sums, self._stop, stop)
        keep = min(max(low, self._begin), self._stop)
        self._table = np.concatenate([self._table[keep - self._begin :], part])
        self._begin, self._stop = keep, stop

    def _sum_rows(self, sums: MarketSums, first: int, stop: int) -> tuple[Floats32, MarketSums]:
        world = self._world
        assert stop <= len(world.times), "a row was asked for that the world does not have"
        if first < world.kept.start:
            raise DataError(
                f"the router's view of the market needs row {first} and all after it, but the "
                f"world holds rows from {world.kept.start} on. Restore the policy with the state "
                "it was saved with, or load the whole history."
            )
        growth, present = world.growth[first:stop], world.present[first:stop]
        return add_market_rows(growth, present, self._horizons, sums)


def add_market_rows(
    growth: Floats, present: Bools, horizons: Sequence[int], sums: MarketSums
) -> tuple[Floats32, MarketSums]:
    """([T,M] of growth[T,N] and present[T,N], sums after them), in as many calls as one likes.

    Bit for bit the same however the rows are divided: sums are added to in the order of time.
    """
    priced = present & np.isfinite(growth) & (growth > 0.0)
    level = np.log(np.where(priced, growth, 1.0))
    both = priced & np.concatenate([sums.priced[None], priced[:-1]])
    bars = np.where(both, level - np.concatenate([sums.level[None], level[:-1]]), 0.0)
    longest, ordered = max(horizons), sorted(horizons)
    middle = ordered[min(1, len(ordered) - 1)]
    count = np.maximum(priced.sum(axis=1), 1)

    def mean(values: Floats) -> Floats:
        return np.asarray(np.where(priced, values, 0.0).sum(axis=1) / count)

    total, squares = _add_up(sums.bars, bars), _add_up(sums.squares, np.square(bars))
    known, market = _add_up(sums.known, both), _add_up(sums.market, np.square(mean(bars)))
    n_known, n_rows = _trailing(known, longest, longest), len(growth)
    variance = np.zeros_like(bars)  # rounding may leave a sum of squares below 0
    least = np.maximum(_trailing(squares, longest, longest), 0.0)
    np.divide(least, n_known, out=variance, where=n_known > 0.0)
    volatility = np.maximum(np.sqrt(variance), _LEAST)
    made = {
        h: _trailing(total, h, longest) / (volatility * np.sqrt(h)) for h in (*horizons, middle)
    }
    spread = np.sqrt(mean(np.square(made[middle] - mean(made[middle])[:, None])))
    at = sums.rows + np.arange(n_rows)  # the first row is of no bar

    def per_bar(h: int) -> Floats:
        squared = _trailing(market, h, longest) / np.clip(at, 1, h)
        return np.asarray(np.maximum(squared, _LEAST**2))

    calm = 0.5 * np.log(per_bar(middle) / per_bar(longest))
    seen = _clip(np.column_stack([*(mean(made[h]) for h in horizons), spread, calm]))
    after = MarketSums(
        bars=total[-longest:].copy(),
        squares=squares[-longest:].copy(),
        known=known[-longest:].copy(),
        market=market[-longest:].copy(),
        level=level[-1].copy(),
        priced=priced[-1].copy(),
        rows=np.asarray(sums.rows + n_rows),
    )
    return seen, after


def _add_up(before: Floats, values: NDArray[np.floating] | Bools) -> Floats:
    """[L+T,…] running sums: the L before[L,…], and with the values[T,…] added one after another."""
    values = np.concatenate([before[-1:], values], dtype=np.float64)
    return np.concatenate([before[:-1], np.cumsum(values, axis=0)])


def _trailing(total: Floats, bars: int, longest: int) -> Floats:
    """[T,…] sums over the last `bars` rows, of running sums[L+T,…]."""
    return np.asarray(total[longest:] - total[longest - bars : len(total) - bars])


def _clip(values: Floats) -> Floats32:
    return np.clip(values, -OBSERVATION_CLIP, OBSERVATION_CLIP).astype(np.float32)


class RouterReward:
    """Makes rewards of relative returns; remembers scale, usage and λ."""

    def __init__(self, config: MetaRouterConfig, n_experts: int) -> None:
        self.n_experts = n_experts
        self.weight = config.kl_lambda
        """λ."""
        self._adapts = config.kl_lambda > 0.0
        self._kind = config.kl_bonus
        self._limits = {"floor": config.entropy_floor, "most": config.kl_lambda_max}
        self.scale = RunningStd()
        self.usage = UsageWindow(n_experts)

    def unlikeness(
        self, targets: Floats, current: Floats32, rng: np.random.Generator
    ) -> Floats | None:
        """KL[K,E] of the experts' target weights[K,E,N] on the same books; None: not paid for.

        current[K,E,N]: what these hold, which stays where a target is NaN
        """
        if self._kind != "policy" or self.weight == 0.0:
            return None
        held = np.maximum(np.where(np.isnan(targets), current, targets), 0.0)
        total = held.sum(axis=-1, keepdims=True)
        return policy_kl(held / np.maximum(total, 1.0), rng)

    def pay(self, relative: Floats, chosen: Ints, kl: Floats | None) -> Floats:
        """Reward[E] of relative returns[E] of the decisions chosen[E], number K being cash."""
        self.scale.update(relative)
        paid = self.scale.scale(relative)
        expert = np.flatnonzero(chosen < self.n_experts)
        if self.weight > 0.0:
            who = chosen[expert]
            bonus = self.usage.bonus(who) if kl is None else kl[who, expert]
            paid[expert] += self.weight * bonus
        self.usage.record(chosen[expert])
        return paid

    def adapt(self) -> None:
        """Move λ by what usage was; once a rollout."""
        if self._adapts:
            spread, count = self.usage.entropy(), self.n_experts
            self.weight = next_kl_weight(self.weight, spread, count, **self._limits)

    def state(self) -> dict[str, Any]:
        return {"weight": self.weight, "scale": self.scale.state(), "usage": self.usage.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.weight = float(state["weight"])
        self.scale.restore(state["scale"])
        self.usage.restore(state["usage"])
