"""The hierarchy as a policy: what validation, backtest, reports and live run.

At the close of each bar, for all books at once:

1. The experts' own books have gone one bar on; `ExpertStanding` marks them: who is masked, whose
   position limit is scaled.
2. The real book is looked at: one that fell too far is halted (`PortfolioHalt`).
3. The router is asked where `meta_router.every_bars` bars have gone by since its last decision,
   at once where the expert in charge is masked, and where a halt has ended.
4. The expert in charge says what it would do with the real book. That is sent: within its position
   limit, cash if halted, and only so far as `TurnoverLimit` allows. With `meta_router.command:
   blend` all experts say it, each within its limit, and their mix is sent, in the proportions of
   the router's probabilities at its last decision; those masked since have no part in it. Whoever
   has the largest is called in charge.
5. Then, in a second phase that no order waits for: every expert says what it wants in its own book
   and, for the record, what it would do with the real one.

Phase two needs nothing but what was there at the decision, so it may come whenever there is time:
`complete` runs it (live: after the orders are out), and so does whatever needs it, the next
decision at the latest. Each expert is asked about the real books and about its own in separate
calls, always of the same shapes, so that the same numbers come out everywhere: one batch of two
rows and two batches of one do not round alike. What experts say may depend on the row and on the
book, not on what they were asked before.

Own books begin `warm_bars` before a book's first row, where the world has such rows: that is
looking back. Books whose rows do not follow their last ones restart, own books and all, and all
of them together; who needs others gives each group a policy of its own.

Axes: `E` books, `K` experts, number K is cash, `N` assets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.backtest.policy import Policy, StatefulPolicy, lookback_of
from echelon.backtest.run import Backtest
from echelon.config import Config
from echelon.envs.act import ActionKind, Holdings, cap_weights, free
from echelon.envs.world import World
from echelon.errors import DataError, StoreError, UsageError
from echelon.market import Rows
from echelon.monitoring.alerts import Alert, AlertCallback
from echelon.population import router_task
from echelon.population.expert_books import (
    ExpertBooks,
    ExpertStanding,
    Verdicts,
    start_experts,
    warm_bars,
    within_limits,
)
from echelon.population.record import CASH, CommandRecord
from echelon.population.reference_policies import (
    HEDGE,
    HedgeRouter,
    RouterMemory,
    RouterOdds,
    RouterPolicy,
    expert_key,
)
from echelon.population.router_task import MarketView
from echelon.population.rule_expert import Rule
from echelon.risk.events import RiskEvent, RiskLog, alert_of
from echelon.risk.portfolio import MONTH, PortfolioHalt, TurnoverLimit
from echelon.states import State, below_prefix, copy_state, match_state, with_prefix
from echelon.types import Bools, Floats, Floats32, Ints

_ALL = 2.0  # turnover of an exchange of everything
_LAST_EVENTS = 1_000  # events of risk control that are kept where there is no record


class Command(NamedTuple):
    """Why the last decision about a single book was as it was; experts by number, K is cash."""

    in_charge: int
    decided: bool  # the router was asked at this bar
    probabilities: Floats | None  # [K+1] of its last decision, where it can say them
    allowed: Bools  # [K+1] who might be chosen
    scale: float  # of the position limit of the one in charge
    halted: bool  # all to cash
    turnover_limited: bool  # less was traded than wanted


class HierarchyPolicy:
    kind: ActionKind = "weights"

    def __init__(
        self,
        experts: Sequence[Policy],
        router: RouterPolicy,
        config: Config,
        seed: int,
        name: str = "hierarchy",
        *,
        keep_record: bool = True,
    ) -> None:
        """seed: kept for policies whose choices are drawn; the router's are not.

        keep_record: what `record` tells of every bar; without, nothing grows with the bars
        """
        self.name = name
        self.experts = tuple(experts)
        self.router = router
        self.config = config
        self.seed = seed
        names = [expert.name for expert in experts]
        if len({*names, CASH}) <= len(names):  # some are alike
            names = [f"{name} {k}" for k, name in enumerate(names, 1)]
        self.expert_names = tuple(names)
        self.keep_record = keep_record
        self._warm = warm_bars(config)
        self._most = None if keep_record else _LAST_EVENTS
        self.log = RiskLog(most=self._most)
        """What risk control did in the present run, or the last; times count bars of the book."""
        self._callbacks: list[AlertCallback] = []
        self._world: World | None = None
        self._restored = False
        self._run: _Run | None = None

    def subscribe(self, callback: AlertCallback) -> None:
        """Call `callback` with every event of risk control, of this run and of later ones."""
        self._callbacks.append(callback)
        self.log.subscribe(callback)

    def reference_policies(self) -> Mapping[str, Policy]:
        """The fixed-share hedge over the same experts, and each expert by itself."""
        hedge = HierarchyPolicy(
            self.experts, HedgeRouter(), self.config, self.seed, f"{self.name}, hedge"
        )
        singles = {
            expert_key(k, expert.name if isinstance(expert, Rule) else ""): expert
            for k, expert in enumerate(self.experts)
        }
        return {HEDGE: hedge} | singles

    @property
    def lookback(self) -> int:
        """As far as the experts look back from the rows that own books begin at."""
        return self._warm + max(lookback_of(expert) for expert in self.experts)

    def start(self, world: World, span: range) -> None:
        """Make the experts ready, also for the rows before the span that own books begin at."""
        first = int(world.first_rows(np.array([span.start]))[0])
        if world is not self._world or self._restored:  # what came before is not in its view
            self._world, self._restored = world, False
            meta = self.config.meta_router
            self._market = MarketView(world, first, meta.horizons, meta.macro)
            self._market.catch_up()
        begin = max(span.start - self._warm, first)
        self._span = range(min(begin, span.start), span.stop)
        start_experts(self.experts, world, self._span)
        self.log = RiskLog(self._callbacks, self._most)
        self._run = None

    def decide(self, row: Rows, held: Holdings) -> Floats:
        """Target weights[E,N] of books at `row`[E]; NaN: leave as it is."""
        run = self._run
        follows = np.zeros(len(row), dtype=np.bool_)
        if run is not None and len(run.row) == len(row):
            follows = row == run.row + 1
        if run is not None and follows.all():
            run.advance()
        elif follows.any():
            raise UsageError(
                f"of {len(row)} books {int((~follows).sum())} restart while the others go on; "
                "expected all or none of them. Call start() and begin them together, or give each "
                "group a policy of its own."
            )
        else:
            run = self._begin(row)
        return run.decide(held)

    def complete(self) -> None:
        """Run what the last decision left for later; nothing decided depends on when."""
        if self._run is not None:
            self._run.complete()

    def _begin(self, row: Rows) -> _Run:
        """Books that begin at `row`[E], with own books that have been traded up to there."""
        assert self._world is not None, "start() comes before decide()"
        if self._run is not None:
            self.log = RiskLog(self._callbacks, self._most)
        first = self._world.first_rows(row)
        begin = np.minimum(np.maximum(row - self._warm, np.maximum(first, self._span.start)), row)
        if begin.min() < self._world.kept.start:
            raise DataError(
                f"own books begin at row {int(begin.min())}, but the world holds rows from "
                f"{self._world.kept.start} on. Restore the policy with the state it was saved "
                "with, or load that much history before the first decision."
            )
        self._run = _Run(self, row, self._world, self._span, self._market)
        self._run.warm_up(begin)
        return self._run

    def state(self) -> State:
        """All that the next decision depends on beside the world and the real books.

        Before the first decision that is what the router sees of rows that the world lets go.
        """
        if self._run is None:
            assert self._world is not None, "start() comes before state()"
            return with_prefix("market.", self._market.state(len(self._world.times)))
        parts = with_prefix("run.", self._run.state())
        parts |= with_prefix("market.", self._market.state(int(self._run.row.max()) + 1))
        for k, expert in enumerate(self.experts):
            if isinstance(expert, StatefulPolicy):
                parts |= with_prefix(f"expert.{k}.", expert.state())
        if isinstance(self.router, RouterMemory):
            parts |= with_prefix("router.", self.router.memory())
        return parts

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `state` gave; after `start` on a world that has the rows it needs."""
        assert self._world is not None, "start() comes before restore()"
        if state and not below_prefix("run.", state):  # nothing was decided yet
            self._market.restore(below_prefix("market.", state))
            return
        row = state.get("run.row")
        if row is None or row.ndim != 1 or row.dtype != np.int64:
            raise StoreError(
                "the saved hierarchy says no rows[E] of its books. Restore what state() gave."
            )
        run = _Run(self, row, self._world, self._span, self._market)
        run.restore(below_prefix("run.", state))
        self._market.restore(below_prefix("market.", state))
        for k, expert in enumerate(self.experts):
            if isinstance(expert, StatefulPolicy):
                expert.restore(below_prefix(f"expert.{k}.", state))
        if isinstance(self.router, RouterMemory):
            self.router.recall(below_prefix("router.", state))
        self._run, self._restored = run, True

    @property
    def in_charge(self) -> Ints:
        """[E] who is in charge of the books, K for cash, since the last decision."""
        assert self._run is not None, "nothing was decided yet"
        return self._run.in_charge.copy()

    @property
    def command(self) -> Command:
        """Why the last decision was as it was, of a single book."""
        assert self._run is not None, "nothing was decided yet"
        return self._run.command()

    def own_targets(self) -> Floats | None:
        """[K,N] what the experts' own books are to hold, of a single book; None: nothing yet."""
        return None if self._run is None else self._run.own_targets()

    @property
    def record(self) -> CommandRecord | None:
        """What was done in the last run, if that was of one book and at least one bar long.

        None too without `keep_record`; after `restore` it begins there.
        """
        run = self._run
        if run is None or not run.recording:
            return None
        return run.record(self.expert_names, tuple(self.log))


class _Run:
    """E books that began together, and everything that belongs to them."""

    def __init__(
        self, policy: HierarchyPolicy, row: Rows, world: World, span: range, market: MarketView
    ) -> None:
        n_books, n_experts = len(row), len(policy.experts)
        config, risk = policy.config, policy.config.risk
        self._policy, self._config = policy, config
        self._world, self._span, self._market = world, span, market
        self.row, self._start = row.copy(), row.copy()
        self._names = (*policy.expert_names, CASH)
        self._cash = n_experts
        self._books = ExpertBooks(policy.experts, world, config, n_books, span)
        self._standing = ExpertStanding(n_books, n_experts, config, world.bars_per_day)
        self._halt = PortfolioHalt(n_books, risk.halt_drawdown, risk.halt_bars)
        self._turnover: TurnoverLimit | None = None
        # Limits that exchange everything at every daily bar are none and need not be kept.
        if risk.turnover_per_bar < _ALL or risk.turnover_per_month < _ALL * MONTH:
            limits = risk.turnover_per_bar, risk.turnover_per_month
            self._turnover = TurnoverLimit(n_books, *limits, MONTH * world.bars_per_day)
        self._usage = router_task.even_usage(n_books, n_experts + 1)
        self._blends = config.meta_router.command == "blend"
        self._shares = router_task.one_hot(np.full(n_books, n_experts), n_experts + 1)
        """[E,K+1] of the last decision, where targets are blended."""
        self.in_charge: Ints = np.full(n_books, n_experts, dtype=np.int64)
        self._age: Ints = np.full(n_books, config.meta_router.every_bars, dtype=np.int64)
        self._forced = np.zeros(n_books, dtype=np.bool_)
        self._limited = np.zeros(n_books, dtype=np.bool_)
        self._asked: tuple[Floats32, Bools] | None = None  # what the router was last asked
        self._pending: Floats = np.zeros((n_experts, n_books, world.n_assets))
        self._later: _Later | None = None
        self.recording = policy.keep_record and n_books == 1
        self._steps: list[_Step] = []
        self._values: list[Floats] = []
        self._costs: list[Floats] = []

    def warm_up(self, begin: Rows) -> None:
        """Trade the own books from `begin`[E] to the first rows; the real ones begin there."""
        books, row = self._books, self._start
        nobody = np.full(len(row), -1, dtype=np.int64)
        for back in range(int((row - begin).max()), 0, -1):
            # A book whose time has not come stands in for one whose has, and is put back.
            active = row - back >= begin
            rows = np.where(active, row - back, (row - back)[active][0])
            fresh = row - back <= begin
            if fresh.any():
                books.begin(rows, fresh)
            self._mark(fresh, nobody)
            books.step(books.ask())
        fresh = begin == row
        if fresh.any():
            books.begin(row, fresh)
        verdicts = self._mark(fresh, nobody)
        if self.recording:
            self._values.append(books.value.T.copy())
        if self._config.risk.enabled:
            # Who was masked or scaled before: of these the log would only tell a release.
            masks, scales = verdicts
            masked, halved = ~masks.allowed, self._standing.cvar.scale < 1.0
            masks = masks._replace(masked_now=masked, released_now=np.zeros_like(masked))
            scales = scales._replace(halved_now=halved, restored_now=np.zeros_like(halved))
            self._report(Verdicts(masks, scales))

    def advance(self) -> None:
        """One bar on, as was decided at the last close."""
        self.complete()
        traded = self._books.step(self._pending)
        self.row = self.row + 1
        verdicts = self._mark(np.zeros(len(self.row), dtype=np.bool_), self.in_charge)
        if self._config.risk.enabled:
            self._forced = verdicts.drawdown.forced
            self._report(verdicts)
        if self.recording:
            if self._values:  # of a run that was restored the first bar is not known
                self._costs.append(traded.cost.T)
            self._values.append(traded.value.T.copy())

    def decide(self, held: Holdings) -> Floats:
        """Phase one: target weights[E,N] of the real books at this close."""
        halted, resumed = self._check_halt(held)
        due = self._age >= self._config.meta_router.every_bars
        ask = (due | self._forced | resumed) & ~halted
        allowed = router_task.with_cash(self._standing.allowed)
        if ask.any():
            self._ask_router(ask, allowed)
        self.in_charge = np.where(halted, self._cash, self.in_charge)
        places = np.arange(len(self.row))
        assert allowed[places, self.in_charge].all(), "a masked expert is in charge"
        self._age = np.where(ask, 1, self._age + 1)
        self._forced = np.zeros_like(self._forced)
        share = self._parts(allowed, halted)
        wanted = {
            k: np.asarray(self._policy.experts[k].decide(self.row, held))
            for k in np.flatnonzero(share[:, :-1].any(axis=0)).tolist()
        }
        self._later = _Later(held, wanted, ask, allowed, share)
        return self._limit_target(wanted, share, held, halted)

    def _ask_router(self, ask: Bools, allowed: Bools) -> None:
        """Who is in charge of the books ask[E] from now on, or how much of each expert is held."""
        now = self._shares if self._blends else self.in_charge
        sight, market = self._standing.view(), self._market.at(self.row)
        obs = router_task.make_observation(sight, self._usage, now, market)
        router = self._policy.router
        if self._blends:
            if not isinstance(router, RouterOdds):
                raise UsageError(
                    f"meta_router.command = blend: {type(router).__name__} does not say how "
                    "probable its choices are. Give it probabilities(), or select."
                )
            said = router.probabilities(obs, allowed)
            self._shares = np.where(ask[:, None], said, self._shares)
            self.in_charge = np.where(ask, said.argmax(axis=1), self.in_charge)
            self._usage = router_task.update_usage(self._usage, said, ask)
        else:
            self.in_charge = np.where(ask, router.choose(obs, allowed), self.in_charge)
            self._usage = router_task.update_usage(self._usage, self.in_charge, ask)
        self._asked = obs, allowed

    def _parts(self, allowed: Bools, halted: Bools) -> Floats:
        """[E,K+1] of each expert's target, and of cash, in what is held until the next bar."""
        one = router_task.one_hot(self.in_charge, self._cash + 1)
        if not self._blends:
            return one
        may = np.where(allowed, self._shares, 0.0)
        total = may.sum(axis=1, keepdims=True)  # above 0: the largest of them is not masked
        return np.where(halted[:, None], one, may / np.where(total > 0.0, total, 1.0))

    def complete(self) -> None:
        """Phase two: what the own books are to trade, and what the record says of the decision."""
        later, self._later = self._later, None
        if later is None:
            return
        self._market.at(self.row)
        self._pending = self._books.ask()
        if not self.recording:
            return
        experts, held = self._policy.experts, later.held
        said = [later.wanted.get(k) for k in range(len(experts))]
        real = np.stack(
            [
                experts[k].decide(self.row, held) if answer is None else answer
                for k, answer in enumerate(said)
            ]
        )
        wanted = np.where(np.isnan(real), held.weights, real)[:, 0]
        share = later.share[0] if self._blends else None
        self._steps.append(
            _Step(self.in_charge[0], later.decided[0], later.allowed[0, :-1], wanted, share)
        )

    def own_targets(self) -> Floats:
        """See `HierarchyPolicy`."""
        pending, held = self._pending[:, 0], self._books.weights[:, 0]
        return cap_weights(np.where(np.isnan(pending), held, pending))

    def command(self) -> Command:
        """Of the last decision about a single book; see `Command`."""
        if len(self.row) != 1:
            raise UsageError(f"command tells of a single book; there are {len(self.row)}")
        router, odds = self._policy.router, None
        if self._blends and self._asked is not None:
            odds = self._shares[0].copy()
        elif self._asked is not None and isinstance(router, RouterOdds):
            odds = router.probabilities(*self._asked)[0]
        return Command(
            in_charge=int(self.in_charge[0]),
            decided=bool(self._age[0] == 1),
            probabilities=odds,
            allowed=router_task.with_cash(self._standing.allowed)[0],
            scale=float(self._scale()[0]),
            halted=bool(self._halt.halted[0]),
            turnover_limited=bool(self._limited[0]),
        )

    def state(self) -> State:
        self.complete()
        parts = copy_state(self._numbers())
        if self._asked is not None:
            parts |= copy_state({"obs": self._asked[0], "obs_allowed": self._asked[1]})
        for name, owner in (("books.", self._books), ("standing.", self._standing)):
            parts |= with_prefix(name, owner.state())
        parts |= with_prefix("halt.", self._halt.flat_state())
        if self._turnover is not None:
            parts |= with_prefix("turnover.", self._turnover.flat_state())
        return parts

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        numbers = match_state("hierarchy", self._numbers(), state)
        for name, owner in (("books.", self._books), ("standing.", self._standing)):
            owner.restore(below_prefix(name, state))
        self._halt.restore_flat(below_prefix("halt.", state))
        if self._turnover is not None:
            self._turnover.restore_flat(below_prefix("turnover.", state))
        self.row, self._start, self.in_charge = (
            numbers[name] for name in ("row", "start", "in_charge")
        )
        self._usage, self._age, self._pending = (
            numbers[name] for name in ("usage", "age", "pending")
        )
        self._limited = numbers["limited"]
        self._shares = numbers.get("shares", self._shares)
        if not ((self.in_charge >= 0) & (self.in_charge <= self._cash)).all():
            raise StoreError(
                f"the saved hierarchy: {self.in_charge.tolist()} are in charge, of experts 0 to "
                f"{self._cash - 1} and {self._cash} for cash. Restore what state() gave."
            )
        if "obs" in state and "obs_allowed" in state:
            n_books, width = len(self.row), state["obs"].shape[-1] if state["obs"].ndim else 0
            asked = {
                "obs": np.zeros((n_books, width), dtype=np.float32),
                "obs_allowed": np.zeros((n_books, self._cash + 1), dtype=np.bool_),
            }
            taken = match_state("hierarchy", asked, state)
            self._asked = taken["obs"], taken["obs_allowed"]

    def _numbers(self) -> State:
        return {
            "row": self.row,
            "start": self._start,
            "in_charge": self.in_charge,
            "usage": self._usage,
            "age": self._age,
            "limited": self._limited,
            "pending": self._pending,
            **({"shares": self._shares} if self._blends else {}),
        }

    def record(self, names: tuple[str, ...], events: tuple[RiskEvent, ...]) -> CommandRecord | None:
        """Of one book: everything up to the bar after its last decision, if that is known."""
        self.complete()
        steps, values, costs = self._steps, list(self._values), list(self._costs)
        known = min(self._span.stop, len(self._world.times))
        if len(steps) == len(values) and int(self.row[0]) + 1 < known:
            after = self._books.peek(self._pending)
            values.append(after.value.T.copy())
            costs.append(after.cost.T)
        first = int(self.row[0]) + 1 - len(steps)
        steps = steps[: len(costs)]
        if not steps:
            return None
        skipped = first - int(self._start[0])  # bars before a restart
        return CommandRecord(
            experts=names,
            times=self._world.times[first : first + len(steps)],
            in_charge=np.array([step.in_charge for step in steps], dtype=np.int64),
            decided=np.array([step.decided for step in steps]),
            allowed=np.stack([step.allowed for step in steps]),
            target=np.stack([step.target for step in steps]),
            own_values=np.concatenate(values),
            own_costs=np.concatenate(costs),
            events=tuple(replace(e, time=e.time - skipped) for e in events if e.time >= skipped),
            shares=np.stack([step.share for step in steps]) if self._blends else None,  # type: ignore[misc]  # then there are
        )

    def _mark(self, fresh: Bools, in_charge: Ints) -> Verdicts:
        verdicts = self._standing.mark(self._books.value.T, fresh, in_charge)
        self._policy.router.follow(self._standing.returns, fresh)
        return verdicts

    def _check_halt(self, held: Holdings) -> tuple[Bools, Bools]:
        """(halted[E], resumed now[E]) by what the real books are worth."""
        if not self._config.risk.enabled:
            nothing = np.zeros(len(self.row), dtype=np.bool_)
            return nothing, nothing
        verdict = self._halt.update(held.value)
        self._log(self._halt.events(verdict, 0))
        return verdict.halted, verdict.resumed_now

    def _scale(self) -> Floats:
        """[E] of the position limit of the one in charge."""
        cash = self.in_charge == self._cash
        if not self._config.risk.enabled:
            return np.ones(len(cash))
        expert = np.minimum(self.in_charge, self._cash - 1)
        return np.where(cash, 1.0, self._standing.scale[np.arange(len(cash)), expert])

    def _limit_target(
        self, wanted: Mapping[int, Floats], share: Floats, held: Holdings, halted: Bools
    ) -> Floats:
        """What is sent[E,N] of what the experts want, wanted[E,N] and share[E,K+1] of each."""
        self._limited = np.zeros_like(halted)
        limits = self._standing.scale if self._config.risk.enabled else np.ones_like(share)
        limited = {k: within_limits(w, held.weights, limits[:, k]) for k, w in wanted.items()}
        target = mix_targets(limited, share, held)
        if not self._config.risk.enabled or self._turnover is None:
            return target
        frozen = np.isnan(target)
        current = held.weights.astype(np.float64)
        # Rounded to float32 they can be a little more than everything, and turnover more than 2.
        current /= np.maximum(current.sum(axis=1, keepdims=True), 1.0)
        moved = self._turnover.apply(current, np.where(frozen, current, target), halted)
        self._limited = moved.cut
        self._log(self._turnover.events(moved, 0))
        return np.where(frozen, np.nan, moved.weights)

    def _log(self, events: Sequence[RiskEvent]) -> None:
        bars = self.row - self._start
        self._policy.log.extend(replace(e, time=int(bars[e.book])) for e in events)

    def _report(self, verdicts: Verdicts) -> None:
        """Write down what the guards of the own books said."""
        standing = self._standing
        self._log(standing.drawdown.events(verdicts.drawdown, 0, self._names))
        self._log(standing.cvar.events(verdicts.cvar, 0, self._names))


def mix_targets(wanted: Mapping[int, Floats], share: Floats, held: Holdings) -> Floats:
    """Target[E,N] of the experts' wanted[E,N], in the proportions share[E,K+1]; the last is cash.

    An asset that all who have a part in it leave as it is (NaN) is left; one that some of them
    leave counts as what is held.
    """
    nothing = np.where(free(held), 0.0, np.nan)
    target, leaves = np.zeros_like(nothing), np.ones(nothing.shape, dtype=np.bool_)
    # A sum with the share 1 is what that one wants, bit for bit.
    for k, weights in (*wanted.items(), (share.shape[1] - 1, nothing)):
        part = share[:, k, None]
        unmoved = np.isnan(weights)
        target += np.where(part > 0.0, part * np.where(unmoved, held.weights, weights), 0.0)
        leaves &= unmoved | (part == 0.0)
    return np.where(leaves, np.nan, target)


class _Later(NamedTuple):
    """What phase two needs of phase one; wanted: expert → weights[E,N] for the real books."""

    held: Holdings
    wanted: Mapping[int, Floats]
    decided: Bools  # [E] the router was asked
    allowed: Bools  # [E,K+1]
    share: Floats  # [E,K+1] of each in what is held


class _Step(NamedTuple):
    """What the record keeps of a decision about a single book: allowed[K], target[K,N].

    share[K+1]: of each expert and cash, where targets are blended
    """

    in_charge: np.int64
    decided: np.bool_
    allowed: Bools
    target: Floats
    share: Floats | None


def risk_alerts(policy: Policy, backtest: Backtest) -> list[Alert]:
    """What risk control did in a policy's last run, `backtest`, that is more than information."""
    events = [] if backtest.budget is None else list(backtest.budget.events)
    if isinstance(policy, HierarchyPolicy):
        events += policy.log
    events.sort(key=lambda event: event.time)
    alerts = (alert_of(event, backtest.times[event.time]) for event in events)
    return [alert for alert in alerts if alert.severity != "info"]
