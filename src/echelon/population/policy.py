"""The hierarchy as a policy: what validation, backtest, reports and live run.

At the close of each bar, for all books at once:

1. The experts' own books have gone one bar on; `ExpertStanding` marks them: who is masked, whose
   position limit is scaled.
2. The real book is looked at: one that fell too far is halted (`PortfolioHalt`).
3. The router is asked where `meta_router.every_bars` bars have gone by since its last decision,
   at once where the expert in charge is masked, and where a halt has ended.
4. Every expert says, in one call, what it wants in its own book and what it would do with the real
   one. What the one in charge wants is sent: within its position limit, cash if halted, and only
   so far as `TurnoverLimit` allows.

Own books begin `warm_bars` before a book's first row, where the world has such rows: that is
looking back. Books whose rows do not follow their last ones restart, own books and all, and all
of them together; who needs others gives each group a policy of its own.

What the real book is worth is not in `Holdings`. The policy trades a copy of it next to the own
books, by the same kernel, which is the same to the last bit wherever books are simulated. Where
they are not (live), `observe` is to be called with their values before each decision; a book that
turns out to be another than the copy is refused without it.

Axes: `E` books, `K` experts, number K is cash, `N` assets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from echelon.agents.expert_core import WeightPolicy
from echelon.agents.tables import EmbeddingTable
from echelon.backtest.policy import Policy
from echelon.config import Config
from echelon.envs.act import ActionKind, Holdings, free
from echelon.envs.world import World
from echelon.errors import DataError, UsageError
from echelon.market import Rows
from echelon.models.encoders import Encoder, build_encoder
from echelon.models.expert import ExpertActor
from echelon.population import router_task
from echelon.population.expert_books import (
    ExpertBooks,
    ExpertStanding,
    Verdicts,
    first_rows,
    start_experts,
    warm_bars,
    within_limits,
)
from echelon.population.record import CASH, CommandRecord
from echelon.population.reference_policies import HEDGE, HedgeRouter, RouterPolicy, expert_key
from echelon.risk.events import Alert, RiskEvent, RiskLog
from echelon.risk.portfolio import MONTH, PortfolioHalt, TurnoverLimit
from echelon.runs.checkpoint import below_prefix
from echelon.types import Bools, Floats, Floats32, Ints

_SAME = 1e-4  # weights of a book and of its copy that are further apart belong to different books
_ALL = 2.0  # turnover of an exchange of everything


class HierarchyPolicy:
    """Experts under a router, with risk control."""

    kind: ActionKind = "weights"

    def __init__(
        self,
        experts: Sequence[Policy],
        router: RouterPolicy,
        config: Config,
        seed: int,
        name: str = "hierarchy",
    ) -> None:
        """seed: kept for policies whose choices are drawn; the router's are not."""
        self.name = name
        self.experts = tuple(experts)
        self.router = router
        self.config = config
        self.seed = seed
        names = [expert.name for expert in experts]
        if len({*names, CASH}) <= len(names):  # some are alike
            names = [f"{name} {k}" for k, name in enumerate(names, 1)]
        self.expert_names = tuple(names)
        self._warm = warm_bars(config)
        self.log = RiskLog()
        """What risk control did in the present run, or the last; times count bars of the book."""
        self._alerts: list[Alert] = []
        self._world: World | None = None
        self._run: _Run | None = None
        self._observed: Floats | None = None

    def subscribe(self, alert: Alert) -> None:
        """Call `alert` with every event of risk control, of this run and of later ones."""
        self._alerts.append(alert)
        self.log.subscribe(alert)

    def reference_policies(self) -> Mapping[str, Policy]:
        """The fixed-share hedge over the same experts, and each expert by itself."""
        hedge = HierarchyPolicy(
            self.experts, HedgeRouter(), self.config, self.seed, f"{self.name}, hedge"
        )
        return {HEDGE: hedge} | {expert_key(k): expert for k, expert in enumerate(self.experts)}

    def start(self, world: World, span: range) -> None:
        """Make the experts ready, also for the rows before the span that own books begin at."""
        if world is not self._world:
            self._world = world
            self._first = first_rows(world)
            horizons = self.config.meta_router.horizons
            self._market = router_task.market_view(world, self._first, horizons)
        begin = max(span.start - self._warm, int(self._first[span.start]))
        self._span = range(min(begin, span.start), span.stop)
        start_experts(self.experts, world, self._span)
        self.log = RiskLog(self._alerts)
        self._run = None
        self._observed = None

    def observe(self, value: Floats) -> None:
        """Hear what the books are worth, value[E], at this close: for books not simulated."""
        self._observed = np.asarray(value, dtype=np.float64).copy()

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
            if run is not None:
                self.log = RiskLog(self._alerts)
            assert self._world is not None, "start() comes before decide()"
            run = self._run = _Run(self, row, self._world, self._span, self._market)
            begin = np.maximum(row - self._warm, np.maximum(self._first[row], self._span.start))
            run.warm_up(np.minimum(begin, row))
        observed, self._observed = self._observed, None
        return run.decide(held, observed)

    @property
    def in_charge(self) -> Ints:
        """[E] who is in charge of the books, K for cash, since the last decision."""
        assert self._run is not None, "nothing was decided yet"
        return self._run.in_charge.copy()

    @property
    def record(self) -> CommandRecord | None:
        """What was done in the last run, if that was of one book and at least one bar long."""
        run = self._run
        if run is None or len(run.row) != 1:
            return None
        return run.record(self.expert_names, tuple(self.log))


class _Run:
    """E books that began together, and everything that belongs to them."""

    def __init__(
        self, policy: HierarchyPolicy, row: Rows, world: World, span: range, market: Floats32
    ) -> None:
        n_books, n_experts = len(row), len(policy.experts)
        config, risk = policy.config, policy.config.risk
        self._policy, self._config = policy, config
        self._world, self._span, self._market = world, span, market
        self.row, self._start = row.copy(), row.copy()
        self._names = (*policy.expert_names, CASH)
        self._cash = n_experts
        self._books = ExpertBooks(policy.experts, world, config, n_books, span)
        self._standing = ExpertStanding(n_books, n_experts, config)
        self._halt = PortfolioHalt(n_books, risk.halt_drawdown, risk.halt_bars)
        self._turnover: TurnoverLimit | None = None
        # Nothing can be exchanged more than once a bar: wider limits need not be kept.
        if risk.turnover_per_bar < _ALL or risk.turnover_per_month < _ALL * MONTH:
            self._turnover = TurnoverLimit(n_books, risk.turnover_per_bar, risk.turnover_per_month)
        self._usage = router_task.even_usage(n_books, n_experts + 1)
        self.in_charge: Ints = np.full(n_books, n_experts, dtype=np.int64)
        self._age: Ints = np.full(n_books, config.meta_router.every_bars, dtype=np.int64)
        self._forced = np.zeros(n_books, dtype=np.bool_)
        self._pending: Floats = np.zeros((n_experts + 1, n_books, world.n_assets))
        self._steps: list[_Step] = []
        self._values: list[Floats] = []
        self._costs: list[Floats] = []

    def warm_up(self, begin: Rows) -> None:
        """Trade the own books from `begin`[E] to the first rows; the real ones begin there."""
        books, row = self._books, self._start
        nobody = np.full(len(row), -1, dtype=np.int64)
        idle = np.zeros((1, len(row), self._world.n_assets))
        for back in range(int((row - begin).max()), 0, -1):
            # A book whose time has not come stands in for one whose has, and is put back.
            active = row - back >= begin
            rows = np.where(active, row - back, (row - back)[active][0])
            fresh = row - back <= begin
            if fresh.any():
                books.begin(rows, fresh)
            self._mark(fresh, nobody)
            books.step(np.concatenate([books.ask().own, idle]))
        fresh = begin == row
        if fresh.any():
            books.begin(row, fresh)
        verdicts = self._mark(fresh, nobody)
        self._values.append(books.value[:-1].T.copy())
        if self._config.risk.enabled:
            # Who was masked or scaled before: of these the log would only tell a release.
            masks, scales = verdicts
            masked, halved = ~masks.allowed, self._standing.cvar.scale < 1.0
            masks = masks._replace(masked_now=masked, released_now=np.zeros_like(masked))
            scales = scales._replace(halved_now=halved, restored_now=np.zeros_like(halved))
            self._report(Verdicts(masks, scales))

    def advance(self) -> None:
        """One bar on, as was decided at the last close."""
        traded = self._books.step(self._pending)
        self.row = self.row + 1
        verdicts = self._mark(np.zeros(len(self.row), dtype=np.bool_), self.in_charge)
        if self._config.risk.enabled:
            self._forced = verdicts.drawdown.forced
            self._report(verdicts)
        if len(self.row) == 1:
            self._values.append(traded.value[:-1].T.copy())
            self._costs.append(traded.cost[:-1].T)

    def decide(self, held: Holdings, observed: Floats | None) -> Floats:
        """Target weights[E,N] at this close; observed[E]: what the books are worth, if known."""
        halted, resumed = self._check_halt(held, observed)
        due = self._age >= self._config.meta_router.every_bars
        ask = (due | self._forced | resumed) & ~halted
        allowed = router_task.with_cash(self._standing.allowed)
        if ask.any():
            obs = router_task.make_observation(
                self._standing.view(), self._usage, self.in_charge, self._market[self.row]
            )
            chosen = self._policy.router.choose(obs, allowed)
            self.in_charge = np.where(ask, chosen, self.in_charge)
            self._usage = router_task.update_usage(self._usage, self.in_charge, ask)
        self.in_charge = np.where(halted, self._cash, self.in_charge)
        places = np.arange(len(self.row))
        assert allowed[places, self.in_charge].all(), "a masked expert is in charge"
        self._age = np.where(ask, 1, self._age + 1)
        self._forced = np.zeros_like(self._forced)
        asked = self._books.ask(held)
        assert asked.real is not None
        target = self._limit_target(asked.real, held, halted)
        self._pending = np.concatenate([asked.own, target[None]])
        if len(self.row) == 1:
            wanted = np.where(np.isnan(asked.real), held.weights, asked.real)[:, 0]
            self._steps.append(_Step(self.in_charge[0], ask[0], allowed[0, :-1], wanted))
        return target

    def record(self, names: tuple[str, ...], events: tuple[RiskEvent, ...]) -> CommandRecord | None:
        """Of one book: everything up to the bar after its last decision, if that is in the span."""
        steps, values, costs = self._steps, list(self._values), list(self._costs)
        if len(steps) == len(values) and int(self.row[0]) + 1 < self._span.stop:
            after = self._books.peek(self._pending)
            values.append(after.value[:-1].T.copy())
            costs.append(after.cost[:-1].T)
        steps = steps[: len(costs)]
        if not steps:
            return None
        first = int(self._start[0])
        return CommandRecord(
            experts=names,
            times=self._world.times[first : first + len(steps)],
            in_charge=np.array([step.in_charge for step in steps], dtype=np.int64),
            decided=np.array([step.decided for step in steps]),
            allowed=np.stack([step.allowed for step in steps]),
            target=np.stack([step.target for step in steps]),
            own_values=np.concatenate(values),
            own_costs=np.concatenate(costs),
            events=events,
        )

    def _mark(self, fresh: Bools, in_charge: Ints) -> Verdicts:
        verdicts = self._standing.mark(self._books.value[:-1].T, fresh, in_charge)
        self._policy.router.follow(self._standing.returns, fresh)
        return verdicts

    def _check_halt(self, held: Holdings, observed: Floats | None) -> tuple[Bools, Bools]:
        """(halted[E], resumed now[E]) by what the real books are worth: observed, or copied."""
        if not self._config.risk.enabled:
            nothing = np.zeros(len(self.row), dtype=np.bool_)
            return nothing, nothing
        if observed is None:
            gap = np.abs(self._books.weights[-1] - held.weights).max(axis=1)
            if (gap > _SAME).any():
                bad = int(np.flatnonzero(gap > _SAME)[0])
                raise DataError(
                    f"book {bad} at row {int(self.row[bad])} holds weights up to {gap[bad]:.2g} "
                    "off those it was commanded to: it was not filled as in the simulation. Call "
                    "observe(value) before each decide(), so that its losses are known."
                )
            observed = self._books.value[-1]
        verdict = self._halt.update(observed)
        self._log(self._halt.events(verdict, 0))
        return verdict.halted, verdict.resumed_now

    def _limit_target(self, real: Floats, held: Holdings, halted: Bools) -> Floats:
        """What is sent[E,N] of what the experts want, real[K,E,N]."""
        places = np.arange(len(self.row))
        nothing = np.where(free(held), 0.0, np.nan)
        expert = np.minimum(self.in_charge, self._cash - 1)
        cash = self.in_charge == self._cash
        target = np.where(cash[:, None], nothing, real[expert, places])
        if not self._config.risk.enabled:
            return target
        scale = np.where(cash, 1.0, self._standing.scale[places, expert])
        target = within_limits(target, held.weights, scale)
        if self._turnover is None:
            return target
        frozen = np.isnan(target)
        current = held.weights.astype(np.float64)
        # Rounded to float32 they can be a little more than everything, and turnover more than 2.
        current /= np.maximum(current.sum(axis=1, keepdims=True), 1.0)
        moved = self._turnover.apply(current, np.where(frozen, current, target), halted)
        self._log(self._turnover.events(moved, 0))
        return np.where(frozen, np.nan, moved.weights)

    def _log(self, events: Sequence[RiskEvent]) -> None:
        """Write events down, each with the number of its book's bar."""
        bars = self.row - self._start
        self._policy.log.extend(replace(e, time=int(bars[e.book])) for e in events)

    def _report(self, verdicts: Verdicts) -> None:
        """Write down what the guards of the own books said."""
        standing = self._standing
        self._log(standing.drawdown.events(verdicts.drawdown, 0, self._names))
        self._log(standing.cvar.events(verdicts.cvar, 0, self._names))


class _Step(NamedTuple):
    """What the record keeps of a decision about a single book: allowed[K], target[K,N]."""

    in_charge: np.int64
    decided: np.bool_
    allowed: Bools
    target: Floats


def expert_policy(
    config: Config,
    weights: Mapping[str, Tensor],
    base: Encoder,
    seed: int,
    number: int,
    tables: tuple[EmbeddingTable, ...] = (),
) -> WeightPolicy:
    """An expert's policy from what `Member.acting` gave; tables: of the base encoder."""
    actor = ExpertActor(
        base.d_model, config.expert.hidden, config.state, skill_dim=config.experts.skill_dim
    )
    actor.load_state_dict(below_prefix("actor.", weights))
    encoder, own = base, below_prefix("encoder.", weights)
    plain = base.state_dict()
    if any(not torch.equal(value, plain[name]) for name, value in own.items()):
        encoder = build_encoder(config, base.n_features)
        encoder.load_state_dict(own)
        tables = ()
    return WeightPolicy(encoder, actor, config, seed, f"expert {number}", keep=True, tables=tables)
