"""The hierarchy in a backtest: as a slow twin has it, within risk's limits, with no look ahead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from commands import Always, Moving, Tilted
from rule_routers import EqualRouter, FixedRouter
from worlds import at, make_config, make_world

from echelon.backtest.run import run_backtest, run_values
from echelon.config import Config
from echelon.config.agents import RewardConfig
from echelon.envs import ActionRule, Books, World
from echelon.envs.act import Holdings
from echelon.errors import UsageError
from echelon.monitoring.alerts import Alert
from echelon.population.expert_books import survey, warm_bars
from echelon.population.policy import HierarchyPolicy
from echelon.population.reference_policies import HedgeRouter, RouterPolicy
from echelon.population.router_task import observation_names
from echelon.proving.worlds import join_worlds
from echelon.risk.events import RiskKind, alert_of
from echelon.types import Bools, Floats, Floats32, Ints

HORIZONS = (2, 5, 12)


def config_of(*more: str) -> Config:
    # A short tail window, and a limit that is not met: own books begin 31 bars before.
    tail = ("risk.cvar_window=20", "risk.cvar_limit=0.9")
    return make_config("meta_router.horizons=[2,5,12]", "meta_router.every_bars=5", *tail, *more)


class Trailing:
    """Whoever was best over the last 5 bars and may; remembers what it was asked."""

    def __init__(self, n_experts: int = 3) -> None:
        entries = observation_names([str(k) for k in range(n_experts)], HORIZONS)
        self._entries = [entries.index(f"relative/5/{k}") for k in range(n_experts)]
        self.asked: list[tuple[Floats32, Bools]] = []

    def follow(self, returns: Floats, fresh: Bools) -> None:
        """Not needed."""

    def choose(self, obs: Floats32, allowed: Bools) -> Ints:
        self.asked.append((obs.copy(), allowed.copy()))
        score = np.where(allowed[:, :-1], obs[:, self._entries], -np.inf)
        cash = allowed.shape[1] - 1
        return np.where(allowed[:, :-1].any(axis=1), score.argmax(axis=1), cash)


def experts_of() -> list[Any]:
    return [Moving("up"), Moving("down", -1.0), Always("mixed", (0.3, 0.3, 0.3))]


def policy_of(
    config: Config, router: RouterPolicy | None = None, experts: list[Any] | None = None
) -> HierarchyPolicy:
    return HierarchyPolicy(experts or experts_of(), router or Trailing(), config, 1)


def slow_twin(world: World, span: range, config: Config) -> tuple[Floats, list[int]]:
    """(values[S+1], who was in charge[S]) of `Trailing`, each own book stepped by itself.

    An expert that fell more than the limit below a mark of the window is masked for good.
    """
    begin = max(world.window - 1, span.start - warm_bars(config))
    experts = experts_of()
    own = []
    for expert in experts:
        expert.start(world, range(begin, span.stop))
        own.append(run_values(expert, world, at(begin), span.stop - 1 - begin, config)[:, 0])
    real = Books(world, ActionRule.from_config(config, "weights"), RewardConfig(), 1, span)
    values, who = [float(real.value[0])], []
    masked, charge, age = [False] * 3, -1, 0
    for row in range(begin, span.stop - 1):
        for k in range(3):
            marks = own[k][max(0, row - begin - config.risk.drawdown_window) : row - begin + 1]
            lost = (marks.max() - marks[-1]) / marks.max()
            masked[k] = masked[k] or lost > config.risk.drawdown_limit
        if row < span.start:
            continue
        if charge < 0 or age == 5 or (charge < 3 and masked[charge]):
            past = max(row - begin - 5, 0)
            made = [np.log(v[row - begin] / v[past]) for v in own]
            best = [-np.inf if masked[k] else made[k] for k in range(3)]
            charge, age = (3 if all(masked) else int(np.argmax(best))), 0
        age += 1
        who.append(charge)
        nothing = np.zeros((1, 3))
        target = nothing if charge == 3 else experts[charge].decide(real.row, real.holdings())
        values.append(float(real.step(target).value[0]))
    return np.array(values), who


@pytest.mark.parametrize(("start", "limit"), [(3, 0.15), (8, 0.15), (60, 0.15), (60, 0.05)])
def test_backtest_is_that_of_own_books_stepped_separately(start: int, limit: float) -> None:
    world = make_world(n_rows=160, seed=3)
    risk = (f"risk.drawdown_limit={limit}", f"risk.drawdown_release={limit}")
    config = config_of(*risk, "risk.cooldown_bars=9999", "risk.halt_drawdown=0.9")
    policy = policy_of(config)
    found = run_backtest(policy, world, range(start, 160), config)
    values, who = slow_twin(world, range(start, 160), config)
    assert policy.record is not None
    assert policy.record.in_charge.tolist() == who
    assert len(set(who)) >= 3, "the twin never switches"
    np.testing.assert_allclose(found.value, values, rtol=1e-12)


def test_record_tells_of_own_books_what_separate_backtests_do() -> None:
    world, config = make_world(n_rows=90, seed=5), config_of()
    policy = policy_of(config)
    span = range(40, 90)
    run_backtest(policy, world, span, config)
    record = policy.record
    assert record is not None
    assert record.experts == ("up", "down", "mixed")
    warm = warm_bars(config)
    assert warm == 31
    assert record.bars == 49
    assert record.times[0] == world.times[40]
    for k, expert in enumerate(experts_of()):
        alone = run_backtest(expert, world, range(40 - warm, 90), config)
        np.testing.assert_allclose(record.own_values[:, k], alone.value[warm:], rtol=1e-14)
        fills = alone.fills
        paid = (fills.commission + fills.stamp + fills.slippage).sum(axis=1)[warm:]
        np.testing.assert_allclose(record.own_costs[:, k], paid / alone.value[warm:-1], rtol=1e-12)
    assert record.decided[:11].tolist() == [True, *[False] * 4] * 2 + [True]
    np.testing.assert_array_equal(record.target[:, 2], np.full((49, 3), 0.3))
    assert policy.record is not None, "looking at a record must not change it"
    np.testing.assert_array_equal(policy.record.own_values, record.own_values)


def falling(lost: float, bars: int = 30) -> World:
    """Asset 0 falls by `lost` in `bars` bars from row 40 on; asset 1 stands still."""
    close = np.full((100, 2), 100.0)
    slope = np.linspace(0.0, lost, bars + 1)
    close[40 : 41 + bars, 0] = 100.0 * (1.0 - slope)
    close[41 + bars :, 0] = 100.0 * (1.0 - lost)
    return make_world(close=close, commission=0.0)


def faller_policy(config: Config, router: RouterPolicy | None = None) -> HierarchyPolicy:
    experts = [Always("faller", (1.0, 0.0)), Always("calm", (0.0, 1.0))]
    return HierarchyPolicy(experts, router or Prefers(0), config, 1)


class Prefers:
    """One expert whenever it may be chosen, otherwise the first who may."""

    def __init__(self, expert: int) -> None:
        self._expert = expert
        self.allowed: list[Bools] = []

    def follow(self, returns: Floats, fresh: Bools) -> None:
        """Not needed."""

    def choose(self, obs: Floats32, allowed: Bools) -> Ints:
        self.allowed.append(allowed.copy())
        return np.where(allowed[:, self._expert], self._expert, allowed.argmax(axis=1))


def test_expert_that_loses_16_percent_in_30_bars_is_masked_from_the_next_decision_on() -> None:
    config, world = config_of("risk.cooldown_bars=60"), falling(0.16)
    policy = faller_policy(config)
    run_backtest(policy, world, range(35, 95), config)
    record = policy.record
    assert record is not None
    # At row 69 (bar 34) 15.47 % are lost: no decision is due there, but one is forced.
    assert record.in_charge[:34].tolist() == [0] * 34
    assert record.in_charge[34:].tolist() == [1] * 25
    assert record.allowed[:, 0].tolist() == [True] * 34 + [False] * 25
    assert record.decided[34]
    assert not record.decided[35:39].any(), "a forced decision begins a new count of bars"
    assert record.decided[39]
    kinds = [(event.kind, event.who, event.time) for event in record.events]
    assert kinds == [(RiskKind.MASKED, "faller", 34), (RiskKind.FORCED, "faller", 34)]
    assert record.events[0].value == pytest.approx(0.16 * 29 / 30, abs=1e-9)


def test_expert_that_loses_14_percent_is_not_masked() -> None:
    config = config_of()
    policy = faller_policy(config)
    run_backtest(policy, falling(0.14), range(35, 95), config)
    assert policy.record is not None
    assert set(policy.record.in_charge.tolist()) == {0}
    assert policy.record.events == ()


def test_released_expert_may_be_chosen_again() -> None:
    config = config_of("risk.cooldown_bars=2", "risk.release_bars=2")
    policy = faller_policy(config)
    run_backtest(policy, falling(0.16, bars=2), range(35, 95), config)
    record = policy.record
    assert record is not None
    masked = np.flatnonzero(~record.allowed[:, 0])
    # Down 16 % at row 42. The peak of row 40 counts until row 70; from that of row 41 it is 8.7 %,
    # which is calm, at row 71 and again at row 72: there it is released.
    assert (masked[0], masked[-1]) == (42 - 35, 71 - 35)
    assert record.in_charge[masked].max() == record.in_charge[masked].min() == 1
    assert record.in_charge[-1] == 0
    assert [e.kind for e in record.events][-1] == RiskKind.RELEASED


def test_masked_before_the_first_bar_is_in_the_log_and_not_chosen() -> None:
    config = config_of()
    policy = faller_policy(config)
    run_backtest(policy, falling(0.16, bars=2), range(45, 95), config)
    record = policy.record
    assert record is not None
    assert record.in_charge[0] == 1
    assert (record.events[0].kind, record.events[0].time) == (RiskKind.MASKED, 0)


@pytest.mark.parametrize(
    "router",
    [Prefers(0), FixedRouter(0), EqualRouter(), HedgeRouter()],
    ids=lambda r: type(r).__name__,
)
def test_nobody_left_means_cash(router: RouterPolicy) -> None:
    close = falling(0.5, bars=3).rows.close[:, [0, 0]]
    world = make_world(close=close, commission=0.0)
    config = config_of("risk.cooldown_bars=60", "risk.halt_drawdown=0.99")
    policy = faller_policy(config, router)
    found = run_backtest(policy, world, range(35, 95), config)
    record = policy.record
    assert record is not None
    gone = int(np.flatnonzero(~record.allowed.any(axis=1))[0])
    assert record.in_charge[gone:].tolist() == [2] * (59 - gone)
    assert found.cash_share[gone + 1 :].tolist() == [1.0] * (59 - gone)


def test_risk_that_is_off_lets_everybody_trade_to_the_end() -> None:
    config = config_of("risk.enabled=false", "risk.turnover_per_bar=0.01")
    policy = faller_policy(config)
    found = run_backtest(policy, falling(0.6), range(35, 95), config)
    assert policy.record is not None
    assert policy.record.events == ()
    assert policy.record.allowed.all()
    assert found.weights[1:, 0].min() == 1.0


def test_portfolio_that_falls_too_far_is_halted_at_its_exact_drawdown() -> None:
    world = make_world(n_rows=200, seed=8, n_assets=3)
    config = config_of(
        *("risk.halt_drawdown=0.06", "risk.halt_bars=7", "risk.drawdown_limit=0.9"),
        *("fee_rate=0.002", "risk.drawdown_release=0.9"),
    )
    policy = policy_of(config)
    told: list[Alert] = []
    policy.subscribe(told.append)
    found = run_backtest(policy, world, range(40, 200), config)
    record = policy.record
    assert record is not None
    assert told == [alert_of(event) for event in record.events]
    halts = [e for e in record.events if e.kind == RiskKind.HALTED]
    resumed = [e.time for e in record.events if e.kind == RiskKind.RESUMED]
    assert len(halts) >= 2
    since = 0
    for n, halt in enumerate(halts):
        peak = found.value[since : halt.time + 1].max()
        assert halt.value == pytest.approx(1 - found.value[halt.time] / peak, abs=1e-12)
        assert halt.value > 0.06
        assert (record.in_charge[halt.time : halt.time + 7] == 3).all()
        assert not record.decided[halt.time : halt.time + 7].any()
        np.testing.assert_allclose(found.cash_share[halt.time + 1 : halt.time + 8], 1.0)
        if n < len(resumed):
            since = resumed[n]
            assert since == halt.time + 7
            assert record.decided[since]


def test_turnover_is_limited_and_frozen_assets_do_not_count() -> None:
    config = config_of("risk.turnover_per_bar=0.1")
    tradable = np.ones((60, 2), dtype=bool)
    tradable[30:, 1] = False
    world = make_world(n_rows=60, n_assets=2, tradable=tradable, commission=0.0)

    class Careful(Always):
        def decide(self, row: Any, held: Holdings) -> Floats:
            can = held.allowed[:, :, 1:].any(axis=2)
            return np.where(can, super().decide(row, held), np.nan)

    policy = HierarchyPolicy([Careful("a", (0.5, 0.5))], FixedRouter(0), config, 1)
    found = run_backtest(policy, world, range(20, 50), config)
    moved = np.abs(np.nan_to_num(found.actions - found.weights[:-1])).sum(axis=1)
    assert moved.max() <= 0.1 + 1e-6
    # 0.05 more of each asset at each bar, until one cannot be had any more.
    np.testing.assert_allclose(found.actions[0], [0.05, 0.05])
    assert np.isnan(found.actions[10:, 1]).all()
    np.testing.assert_allclose(found.actions[10:, 0], 0.5, atol=0.02)
    kinds = {event.kind for event in policy.log}
    assert kinds == {RiskKind.TURNOVER_CUT}


def test_wide_limits_never_cut_a_whole_exchange() -> None:
    config, world = config_of(), make_world(n_rows=120, n_assets=2)
    experts = [Always("one", (1.0, 0.0)), Always("other", (0.0, 1.0))]
    policy = HierarchyPolicy(experts, EqualRouter(), config, 1)
    run_backtest(policy, world, range(20, 120), config)
    assert [e for e in policy.log if e.kind == RiskKind.TURNOVER_CUT] == []


def test_tail_losses_halve_the_positions_of_the_expert_in_charge() -> None:
    config = config_of(
        *("risk.cvar_window=20", "risk.cvar_limit=0.005", "risk.drawdown_limit=0.9"),
        "risk.halt_drawdown=0.9",
    )
    world = make_world(n_rows=120, n_assets=2)
    policy = HierarchyPolicy([Always("a", (0.6, 0.4))], FixedRouter(0), config, 1)
    found = run_backtest(policy, world, range(20, 120), config)
    halved = next(e for e in policy.log if e.kind == RiskKind.HALVED)
    assert halved.value > 0.005
    np.testing.assert_allclose(found.actions[: halved.time], [[0.6, 0.4]] * halved.time)
    # Each asset to 0.5 at most, then together: 0.5 + 0.4 become 0.5.
    np.testing.assert_allclose(found.actions[halved.time], [0.5 / 1.8, 0.4 / 1.8])


def test_the_usual_tail_window_is_filled_before_the_first_bar_of_a_short_span() -> None:
    config = config_of(
        *("risk.cvar_window=500", "risk.cvar_limit=0.005", "risk.drawdown_limit=0.9"),
        "risk.halt_drawdown=0.9",
    )
    assert warm_bars(config) == 501
    world = make_world(n_rows=700, n_assets=2)
    policy = HierarchyPolicy([Always("a", (0.6, 0.4))], FixedRouter(0), config, 1)
    found = run_backtest(policy, world, range(600, 700), config)
    halved = next(e for e in policy.log if e.kind == RiskKind.HALVED)
    assert halved.time == 0
    np.testing.assert_allclose(found.actions[0], [0.5 / 1.8, 0.4 / 1.8])
    seen = survey([Always("a", (0.6, 0.4))], world, [range(600, 700)], config).view
    assert (seen.scale[600:700] < 1.0).all()
    off = config_of("risk.cvar_window=500", "risk.enabled=false")
    assert warm_bars(off) == 31


@pytest.mark.parametrize("router", [Trailing(), HedgeRouter()], ids=["trailing", "hedge"])
def test_a_future_that_is_changed_or_cut_off_changes_no_decision(router: RouterPolicy) -> None:
    config, world = config_of(), make_world(n_rows=120, seed=2)
    cut = 80
    later = np.random.default_rng(1).uniform(0.5, 2.0, world.rows.close.shape)
    later[: cut + 1] = 1.0
    rows = world.rows._replace(close=world.rows.close * later, open=world.rows.open * later)
    x = np.where(later[..., None] == 1.0, world.x, -world.x)
    changed = replace(world, rows=rows, x=x, growth=rows.close)
    span = range(30, 120)
    one = run_backtest(policy_of(config, router), world, span, config)
    other = run_backtest(policy_of(config, router), changed, span, config)
    n = cut - span.start + 1
    np.testing.assert_array_equal(one.actions[:n], other.actions[:n])
    assert (one.actions[n:] != other.actions[n:]).any()
    short = run_backtest(policy_of(config, router), world, range(30, cut + 2), config)
    np.testing.assert_array_equal(short.actions, one.actions[:n])


def test_books_at_once_do_what_each_does_alone() -> None:
    config = config_of("risk.drawdown_limit=0.06", "risk.drawdown_release=0.05")
    draws = [make_world(n_rows=90, seed=s, splits={"test": range(90)}) for s in (1, 2, 3)]
    together, _ = join_worlds(draws)
    # With no row to look back to, with a few, and with all.
    starts = at(3, 97, 214)
    n_steps = 50
    policy = policy_of(config)
    values = run_values(policy, together, starts, n_steps, config)
    assert policy.record is None
    events = list(policy.log)
    assert events
    for e, start in enumerate(starts.tolist()):
        alone = policy_of(config)
        value = run_values(alone, together, at(start), n_steps, config)
        np.testing.assert_array_equal(values[:, e], value[:, 0])
        own = [replace(event, book=0) for event in events if event.book == e]
        assert own == list(alone.log)


def test_same_run_twice_gives_the_same_numbers() -> None:
    config, world = config_of(), make_world(n_rows=100)
    policy = policy_of(config, HedgeRouter())
    first = run_backtest(policy, world, range(30, 100), config)
    events = tuple(policy.log)
    second = run_backtest(policy, world, range(30, 100), config)
    np.testing.assert_array_equal(first.actions, second.actions)
    assert tuple(policy.log) == events


def test_book_whose_row_does_not_follow_begins_anew() -> None:
    config, world = config_of(), make_world(n_rows=100)
    policy = policy_of(config)
    policy.start(world, range(30, 100))
    nothing = Holdings(
        np.zeros((1, 3), dtype=np.float32),
        np.ones(1, dtype=np.float32),
        np.ones((1, 3, 3), dtype=bool),
        np.full(1, 100.0),
    )
    first = policy.decide(at(40), nothing)
    policy.decide(at(60), nothing)
    assert policy.record is not None
    assert policy.record.times.tolist() == [world.times[60].item()]
    np.testing.assert_array_equal(policy.decide(at(40), nothing), first)
    pair = Holdings(*(np.concatenate([part, part]) for part in nothing))
    policy.decide(at(40, 50), pair)
    with pytest.raises(UsageError, match="of 2 books 1 restart while the others go on"):
        policy.decide(at(41, 70), pair)


def test_book_filled_by_others_is_halted_by_what_it_is_worth() -> None:
    config, world = config_of(), make_world(n_rows=100)
    policy = policy_of(config)
    policy.start(world, range(30, 100))
    for row, value in ((40, 100.0), (41, 74.0)):
        strange = Holdings(
            np.full((1, 3), 0.2, dtype=np.float32),
            np.full(1, 0.4, dtype=np.float32),
            np.ones((1, 3, 3), dtype=bool),
            np.array([value]),
        )
        target = policy.decide(at(row), strange)
    assert target.tolist() == [[0.0, 0.0, 0.0]]
    halt = next(e for e in policy.log if e.kind == RiskKind.HALTED)
    assert (halt.time, halt.value) == (1, pytest.approx(0.26))


def test_experts_of_one_name_are_numbered() -> None:
    policy = HierarchyPolicy(
        [Always("agent", (1.0,)), Always("agent", (0.0,))], FixedRouter(0), config_of(), 1
    )
    assert policy.expert_names == ("agent 1", "agent 2")


def test_experts_are_started_on_the_rows_their_own_books_begin_at() -> None:
    config, world = config_of(), make_world(n_rows=100)
    experts = [Tilted("a", 1.0), Tilted("b", -1.0)]
    policy = HierarchyPolicy(experts, FixedRouter(0), config, 1)
    found = run_backtest(policy, world, range(50, 100), config)
    alone = run_backtest(Tilted("a", 1.0), world, range(50, 100), config)
    np.testing.assert_allclose(found.value, alone.value, rtol=1e-12)
