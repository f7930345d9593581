"""Daily books whose orders are worked through the day: prices, limits, alignment, no future."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Always, Moving
from execution_nets import build_net
from rule_routers import EqualRouter
from scrambled_days import scramble_after
from worlds import at, basis_points, make_config, make_world

from echelon.agents.execution.network import NetworkSettings
from echelon.agents.execution.policy import save_execution_policy
from echelon.backtest.baselines import make_baseline
from echelon.backtest.run import run_backtest
from echelon.config import Config, load_config, override_config
from echelon.data.datasets import ensure_dataset
from echelon.envs import World, world_of
from echelon.errors import ConfigError, DataError, StoreError, UniverseError, UsageError
from echelon.evaluation.evaluate import evaluate, load_evaluation
from echelon.evaluation.test_access import Look
from echelon.execution.days import Days
from echelon.execution.history import History
from echelon.execution.policies import SCHEDULES, ExecutionPolicy, Twap, Vwap, run_orders
from echelon.execution.portfolio import (
    AlignedDays,
    IntradayExecutor,
    _orders_on,
    align_days,
    execution_rules,
    ticks_in,
)
from echelon.execution.simulator import ExecutionRules, Simulator
from echelon.features import Prepared, prepare
from echelon.features.scaler import Scaler
from echelon.market import MarketRows, Reason, cost_split, new_book, step_worked
from echelon.market.types import Orders
from echelon.population.policy import HierarchyPolicy
from echelon.report.run.tables import execution_costs
from echelon.runs import RunDirectory
from echelon.training.executors import with_executor
from echelon.training.run import TrainedRun, Training, Worlds, seed_directory
from echelon.types import Floats

TICKS = 12
RULES = ExecutionRules(ticks_per_step=3)


class Chaser:
    """Buys what rose and sells what fell since its order began: it reads the market."""

    name = "chaser"

    def start(self, simulator: Simulator) -> None:
        """Nothing to do."""

    def request(self, simulator: Simulator) -> Floats:
        days, orders, progress = simulator.days, simulator.orders, simulator.progress
        now = np.minimum(progress.tick, days.shape[1] - 1)
        move = days.known[orders.day, orders.start] / days.buy[orders.day, np.maximum(now - 1, 0)]
        return np.asarray(progress.left * np.where(progress.step > 0, np.clip(move - 0.5, 0, 1), 0))


def market(
    seed: int = 0, n_rows: int = 20, n_assets: int = 2, **changes: Any
) -> tuple[World, Days]:
    """A world and the days its bars are made of: opens and closes are those of the ticks."""
    rng = np.random.default_rng(seed)
    walk = 20.0 * np.exp(np.cumsum(rng.normal(0.0, 0.003, (n_assets, n_rows * TICKS)), axis=1))
    price = walk.reshape(n_assets, n_rows, TICKS)
    world = make_world(
        close=price[:, :, -1].T, open=price[:, :, 0].T, seed=seed, window=2, **changes
    )
    one = Days.from_prices(
        price.reshape(-1, TICKS), rng.uniform(100, 900, (n_assets * n_rows, TICKS))
    )
    return world, Days(
        symbols=tuple(np.repeat(world.symbols, n_rows)),
        dates=np.tile(world.times, n_assets),
        **{name: getattr(one, name) for name in ("clock", "buy", "sell", "known", "volume")},
    )


def aligned(world: World, days: Days, **how: Any) -> AlignedDays:
    return align_days(days, world.rows, world.times, world.symbols, **({"same_prices": True} | how))


def executor(
    world: World, days: Days, policy: ExecutionPolicy | None = None, **how: Any
) -> IntradayExecutor:
    return IntradayExecutor(aligned(world, days, **how), policy or Twap(), RULES)


def changed(days: Days, **arrays: Floats) -> Days:
    kept = {name: getattr(days, name) for name in Days.__dataclass_fields__}
    return Days(**(kept | {name: np.ascontiguousarray(a) for name, a in arrays.items()}))


def test_twap_pays_exactly_the_mean_of_the_days_ticks() -> None:
    # 12 ticks from 96 to 118 in steps of two have the mean 107.
    price = np.tile(96.0 + 2.0 * np.arange(12), (2, 1))
    days = Days.from_prices(price, np.full((2, 12), 1000.0), symbol="S0", first_date="2020-01-01")
    world = make_world(close=[[118.0], [118.0]], open=[[96.0], [96.0]], commission=0.0)
    orders = Orders(np.array([[24.0]]), np.zeros((1, 1)))
    stepped, execution = step_worked(
        new_book(10_000.0, 1, 1), orders, world.rows, at(0), world.rules, executor(world, days)
    )
    assert stepped.fills.price.tolist() == [[107.0]]
    assert stepped.fills.shares.tolist() == [[24.0]]
    assert stepped.book.cash.tolist() == [10_000.0 - 24.0 * 107.0]
    assert stepped.value.tolist() == [10_000.0 + 24.0 * 11.0]
    assert execution.twap.tolist() == execution.vwap.tolist() == [[107.0]]
    assert execution.arrival.tolist() == [[96.0]]
    assert execution.timing.tolist() == [[24.0 * 11.0]]
    assert execution.impact.tolist() == execution.spread.tolist() == [[0.0]]


def test_spread_impact_and_timing_of_a_sell_are_told_apart() -> None:
    # One step of two ticks at 100 and 50, 10 shares in each of 100: a share of a tenth.
    days = Days.from_prices(
        np.array([[100.0, 50.0]] * 2), np.full((2, 2), 100.0), symbol="S0", first_date="2020-01-01"
    )
    world = make_world(close=[[50.0], [50.0]], open=[[100.0], [100.0]], commission=0.01)
    rules = ExecutionRules(2, half_spread=0.01, temporary=0.2, permanent=0.1)
    book = new_book(0.0, 1, 1)
    book.shares[:] = 20.0
    works = IntradayExecutor(aligned(world, days), Twap(), rules)
    orders = Orders(np.array([[-20.0]]), np.zeros((1, 1)))
    stepped, execution = step_worked(book, orders, world.rows, at(0), world.rules, works)
    # Received 100·(1 − 0.01 − 0.02) = 97 and 50·(1 − 0.01 − 0.02 − 0.01) = 48.
    assert stepped.fills.price == pytest.approx(np.array([[72.5]]))
    assert execution.spread == pytest.approx(np.array([[10.0 + 5.0]]))
    assert execution.impact == pytest.approx(np.array([[20.0 + 15.0]]))
    assert execution.timing == pytest.approx(np.array([[20.0 * 25.0]]))
    split = cost_split(stepped.fills, execution)
    assert split.fees == pytest.approx(14.5)
    assert split.total == pytest.approx(20.0 * 27.5 + 14.5)
    assert split.against_twap == pytest.approx(20.0 * 2.5)
    assert stepped.fills.slippage == pytest.approx(np.array([[50.0]]))


def test_crossing_a_book_is_spread_and_not_impact() -> None:
    days = Days.from_prices(
        np.full((2, 4), 10.0), np.full((2, 4), 1e4), symbol="S0", first_date="2020-01-01"
    )
    days = changed(days, buy=days.buy + 0.02, sell=days.sell - 0.02)
    world = make_world(close=[[10.0], [10.0]], commission=0.0)
    orders = Orders(np.array([[50.0]]), np.zeros((1, 1)))
    stepped, execution = step_worked(
        new_book(1e4, 1, 1), orders, world.rows, at(0), world.rules, executor(world, days)
    )
    assert stepped.fills.price == pytest.approx(np.array([[10.02]]))
    assert execution.spread == pytest.approx(np.array([[1.0]]))
    assert execution.impact == pytest.approx(np.array([[0.0]]), abs=1e-9)


def test_ticks_at_a_limit_are_barred_on_their_side_only() -> None:
    price = np.array([[10.0, 11.0, 11.0, 10.5]] * 2)
    days = Days.from_prices(price, np.full((2, 4), 1000.0), symbol="S0", first_date="2020-01-01")
    limits = {"limit_up": [[11.0], [11.0]], "limit_down": [[9.0], [9.0]], "price_limits": True}
    world = make_world(close=[[10.5]] * 2, open=[[10.0]] * 2, commission=0.0, **limits)
    works = IntradayExecutor(
        aligned(world, days, price_limits=True), Twap(), ExecutionRules(1, volume_cap=0.02)
    )
    bought = works.work(np.array([[40.0]]), at(1))
    sold = works.work(np.array([[-40.0]]), at(1))
    assert bought.executed[0, 0] == 30.0  # 10 by TWAP, none, none, and 20 by the cap
    assert bought.price[0, 0] == pytest.approx((10.0 * 10.0 + 20.0 * 10.5) / 30.0)
    assert bought.vwap[0, 0] == 10.25
    assert bought.reason[0, 0] == Reason.VOLUME
    assert sold.executed[0, 0] == 40.0
    shut = aligned(
        make_world(close=[[10.5]] * 2, open=[[10.0]] * 2, **limits | {"limit_up": [[10.0]] * 2}),
        days,
        price_limits=True,
    )
    never = IntradayExecutor(shut, Twap(), RULES).work(np.array([[40.0]]), at(1))
    assert never.executed[0, 0] == 0.0
    assert never.reason[0, 0] == Reason.LIMIT_UP


def test_days_without_volume_execute_nothing_and_keep_the_book() -> None:
    world, days = market()
    dead = executor(world, changed(days, volume=np.zeros(days.shape)))
    orders = Orders(np.full((1, 2), 30.0), np.zeros((1, 2)))
    stepped, _ = step_worked(new_book(1e4, 1, 2), orders, world.rows, at(3), world.rules, dead)
    assert stepped.book.cash.tolist() == [1e4]
    assert stepped.fills.reason.tolist() == [[Reason.SUSPENDED] * 2]


def test_an_early_close_ends_orders_in_time() -> None:
    world, days = market()
    half = days.dates == world.times[5]
    price = np.where(half[:, None] & (np.arange(TICKS) >= 6), np.nan, days.buy)
    volume = np.where(np.isnan(price), 0.0, days.volume)
    rows = world.rows._replace(close=world.rows.close.copy())
    rows.close[5] = price[half, 5]
    early = align_days(
        changed(days, buy=price, sell=price, volume=volume),
        rows, world.times, world.symbols, same_prices=True,
    )  # fmt: skip
    worked = IntradayExecutor(early, Twap(), RULES).work(np.full((1, 2), 12.0), at(5))
    assert worked.executed.tolist() == [[12.0, 12.0]]
    assert worked.price[0] == pytest.approx(price[half, :6].mean(axis=1))


def test_missing_days_are_filled_at_the_open_and_told(caplog: pytest.LogCaptureFixture) -> None:
    world, days = market(commission=0.0)
    have = days.take(np.flatnonzero(days.dates != world.times[12]))
    works = executor(world, have)
    assert "2 of 40 tradable bars have no intraday data" in caplog.text
    config = make_config()
    run = run_backtest(Moving("moving"), world, range(5, 19), config, works)
    plain = run_backtest(Moving("moving"), world, range(5, 19), config)
    assert run.execution is not None
    filled = run.fills.shares != 0.0
    assert run.execution.worked[filled].sum() == filled.sum() - 2
    assert run.fills.price[6].tolist() == world.rows.open[12].tolist()
    assert f"2 of {run.cost_split.fills} fills were at the open" in caplog.text
    none = executor(world, days.take(np.flatnonzero(days.dates == world.times[0])))
    same = run_backtest(Moving("moving"), world, range(5, 19), config, none)
    assert same.value.tobytes() == plain.value.tobytes()
    assert run.value.tobytes() != plain.value.tobytes()


def test_raw_ticks_come_to_adjusted_days_by_the_close() -> None:
    world, days = market()
    split = np.where(days.dates < world.times[10], 4.0, 1.0)[:, None]
    raw = changed(
        days,
        **{name: getattr(days, name) * split for name in ("buy", "sell", "known")},
        volume=days.volume / split,
    )
    back = aligned(world, raw, same_prices=False).days
    assert back.buy == pytest.approx(days.buy)
    assert back.known == pytest.approx(days.known)
    assert back.volume == pytest.approx(days.volume)


@pytest.mark.parametrize(
    ("times", "match"),
    [(1.2, r"S0 on 2020-01-01: the daily close is .* expected within 10%"), (1.03, "S0: on the")],
)
def test_prices_of_another_basis_are_refused(times: float, match: str) -> None:
    world, days = market()
    other = changed(days, buy=days.buy * times, sell=days.sell * times)
    with pytest.raises(DataError, match=match):
        aligned(world, other)


def test_days_of_another_symbol_are_refused_by_their_opens() -> None:
    world, days = market()
    strange = changed(days, buy=days.buy[::-1] ** 2, sell=days.sell[::-1] ** 2)
    strange.buy[:, 0] *= 1.2
    strange.sell[:, 0] *= 1.2
    with pytest.raises(DataError, match="daily open"):
        aligned(world, strange, same_prices=False)


def test_a_day_that_occurs_twice_and_bars_within_the_day_are_refused() -> None:
    world, days = market()
    with pytest.raises(DataError, match="more than once"):
        aligned(world, days.take(np.array([0, 1, 1])))
    hours = make_world(times=world.times[0] + np.arange(60) * np.timedelta64(1, "h"))
    with pytest.raises(DataError, match="intraday already"):
        align_days(days, hours.rows, hours.times, hours.symbols, same_prices=True)


@pytest.mark.parametrize("policy", [Twap(), Chaser()])
def test_scrambling_what_is_to_come_changes_no_earlier_request_or_fill(
    policy: ExecutionPolicy,
) -> None:
    world, days = market()
    day, cut = 7, 6
    parents = np.array([40.0, -30.0])
    before = _history(aligned(world, days), policy, parents, day)
    scrambled = scramble_after(days, day, cut)
    rows = _closing_as(scrambled, world)
    other = align_days(scrambled, rows, world.times, world.symbols, same_prices=True)
    after = _history(other, policy, parents, day)
    assert before.ticks is not None
    assert after.ticks is not None
    for one, other in zip(before.ticks, after.ticks, strict=True):
        assert one[:, : cut + 1].tobytes() == other[:, : cut + 1].tobytes()
    assert not np.array_equal(before.ticks.price, after.ticks.price, equal_nan=True)
    if isinstance(policy, Chaser):
        assert not np.array_equal(before.ticks.requested, after.ticks.requested)


def _history(aligned: AlignedDays, policy: ExecutionPolicy, parents: Floats, day: int) -> History:
    """All ticks of parents[N] worked during one row, as the executor works them."""
    return run_orders(policy, *_orders_on(aligned, parents, aligned.day_of[day]), RULES)


def _closing_as(days: Days, world: World) -> MarketRows:
    """The world's rows with the closes of these days: the future of the day is in its bar, too."""
    close = world.rows.close.copy()
    for k, (symbol, date) in enumerate(zip(days.symbols, days.dates, strict=True)):
        priced = days.buy[k][days.buy[k] > 0.0]
        if len(priced):
            close[world.times == date, world.symbols.index(symbol)] = priced[-1]
    return world.rows._replace(open=close, close=close)


def test_what_a_book_does_not_know_cannot_change_its_orders() -> None:
    world, days = market()
    config = make_config()
    first = run_backtest(Moving("m"), world, range(5, 12), config, executor(world, days))
    later = days.dates > world.times[11]
    other = changed(days, volume=np.where(later[:, None], 1.0, days.volume))
    again = run_backtest(Moving("m"), world, range(5, 12), config, executor(world, other))
    assert first.value.tobytes() == again.value.tobytes()


def test_books_side_by_side_get_the_fills_they_get_alone() -> None:
    world, days = market()
    works = executor(world, days)
    parents = np.random.default_rng(2).normal(0.0, 50.0, (6, 2))
    rows = np.array([3, 4, 4, 9, 3, 15])
    together = works.work(parents, rows)
    for e in range(6):
        alone = works.work(parents[e : e + 1], rows[e : e + 1])
        for many, one in zip(together, alone, strict=True):
            assert many[e].tobytes() == one[0].tobytes()


def test_the_hierarchy_runs_with_an_executor_and_its_copy_of_the_book_keeps_up() -> None:
    world, days = market(n_rows=60, splits={"train": range(20), "valid": range(20, 60)})
    config = make_config("meta_router.every_bars=5", "meta_router.horizons=[2, 5]")
    experts = [Always("one", (0.9, 0.0)), Moving("two")]
    works = executor(world, days)
    run = run_backtest(
        HierarchyPolicy(experts, EqualRouter(), config, 1), world, range(25, 59), config, works
    )
    plain = run_backtest(
        HierarchyPolicy(experts, EqualRouter(), config, 1), world, range(25, 59), config
    )
    assert run.execution is not None
    assert run.execution.worked[run.fills.shares != 0.0].all()
    assert run.value.tobytes() != plain.value.tobytes()


def test_market_rules_become_execution_rules() -> None:
    rules = make_world(participation=0.1, slippage=0.01).rules
    assert execution_rules(rules, 5) == ExecutionRules(5, 0.1)
    fixed = rules._replace(slippage_model=1)
    assert execution_rules(fixed, 5) == ExecutionRules(5, 0.1, half_spread=0.01)
    assert execution_rules(fixed, 5, half_spread=0.0, temporary=0.5, permanent=0.1) == (
        ExecutionRules(5, 0.1, 0.0, 0.5, 0.1)
    )
    assert execution_rules(rules._replace(slippage_model=2), 5).temporary == 0.01
    # 1 % of the whole volume's root is a tenth of a percent at a hundredth of it.
    assert execution_rules(rules._replace(slippage_model=3), 5).temporary == pytest.approx(0.1)
    assert ticks_in(market()[1], 30.0) == 30
    assert ticks_in(market()[1], 0.2) == 1


# --- the whole line, from the configuration


SYNTHETIC = (
    *("data.source=synthetic", "data.synthetic.n_symbols=3", "data.synthetic.n_days=90"),
    *("data.synthetic.late_listings=0", "data.synthetic.delistings=0"),
    *("data.synthetic.minutes_per_day=390", "data.synthetic.split_rate=0.02", "assets=[]"),
    *("features.indicators={rsi: [5]}", "features.stationary.enabled=false", "window=4"),
    *("split.train=[2015-01-05, 2015-03-02]", "split.valid=[2015-03-03, 2015-04-13]"),
    *("split.test=[2015-04-14, 2015-05-11]", "data.cache.enabled=false", "market.no_cap=true"),
)


TINY = (
    *("model.d_model=8", "model.n_layers=1", "model.hidden=8", "train.rollout_steps=10"),
    *("train.books=4", "train.offset_groups=2", "train.total_env_steps=80"),
    *("train.validate_every_steps=40", "logging.tensorboard=false", "eval.baselines=[cash]"),
)


class Line:
    """A synthetic market in a store, daily and in five minutes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = load_config(
            None, ("market.preset=paper", *SYNTHETIC, f"data.store={root}/store")
        )
        self.prepared = prepare(self.config, root / "run").prepared
        minutes = override_config(self.config, ["data.freq=5min", "data.dataset=minutes"])
        self.manifest = ensure_dataset(minutes)

    def with_(self, *overrides: str) -> Config:
        return override_config(self.config, ["market.executor_dataset=minutes", *overrides])

    def world(self, *overrides: str, costs: float = 1.0) -> World:
        config = self.with_(*overrides)
        return with_executor(world_of(self.prepared, config, costs=costs), config, costs=costs)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    return Line(tmp_path_factory.mktemp("line"))


def test_one_line_works_a_daily_backtest_through_the_day(line: Line) -> None:
    world = line.world("market.executor=twap")
    run = run_backtest(Moving("m"), world, world.span("valid"), line.config)
    alone = with_executor(world_of(line.prepared, line.config), line.config)
    plain = run_backtest(Moving("m"), alone, world.span("valid"), line.config)
    assert plain.execution is None
    assert run.execution is not None
    filled = run.fills.shares != 0.0
    assert filled.sum() > 20
    assert run.execution.worked[filled].all()
    # Without a cap TWAP gets the mean of the day's ticks, which is its benchmark too.
    assert run.fills.price[filled] == pytest.approx(run.execution.twap[filled], rel=1e-9)
    opens = np.repeat(world.rows.open[np.isin(world.times, run.fill_times)], 1, axis=0)
    assert run.execution.arrival[filled] == pytest.approx(opens[filled])
    split = run.cost_split
    paid = (run.fills.shares * (run.fills.price - run.execution.arrival))[filled].sum()
    assert split.total == pytest.approx(paid + split.fees)
    assert split.against_twap == pytest.approx(0.0, abs=1e-6)
    assert (run.value > 0.0).all()
    # The report reads the same from the blotter.
    shown, told = execution_costs(run.blotter()), basis_points(split)
    assert {name: told[name] for name in shown} == pytest.approx(shown, abs=1e-6)
    assert run.cash_share.min() >= 0.0
    assert world.ledger["fill"] == "worked through the next day by twap, every 6 ticks"


def test_every_schedule_can_work_the_orders_of_a_portfolio(line: Line) -> None:
    prices = {}
    for name in SCHEDULES:
        world = line.world(f"market.executor={name}")
        run = run_backtest(Moving("m"), world, world.span("valid"), line.config)
        assert run.execution is not None
        assert world.ledger["fill"] == f"worked through the next day by {name}, every 6 ticks"
        prices[name] = run.fills.price[run.fills.shares != 0.0]
        assert len(prices[name]) > 20
    assert not np.array_equal(prices["almgren_chriss"][:20], prices["twap"][:20])


def test_immediate_fills_beside_the_days_bars_stay_the_same_and_tell_their_costs(
    line: Line,
) -> None:
    alone = with_executor(world_of(line.prepared, line.config), line.config)
    assert alone.executor is None
    worlds = {name: line.world(f"market.executor={name}") for name in ("immediate", "twap")}
    span = alone.span("valid")
    plain = run_backtest(Moving("m"), alone, span, line.config)
    runs = {
        name: run_backtest(Moving("m"), world, span, line.config) for name, world in worlds.items()
    }
    told = runs["immediate"]
    assert told.value.tobytes() == plain.value.tobytes()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(told.fills, plain.fills, strict=True))
    assert worlds["immediate"].ledger == alone.ledger
    assert told.execution is not None
    worked = runs["twap"].execution
    assert worked is not None
    assert not told.execution.worked.any()
    both = (told.fills.shares != 0.0) & (runs["twap"].fills.shares != 0.0)
    assert both.sum() > 20
    for name in ("arrival", "twap", "vwap"):
        one, other = (getattr(found, name)[both] for found in (told.execution, worked))
        assert one == pytest.approx(other), name
    split = told.cost_split
    filled = told.fills.shares != 0.0
    over = told.fills.shares * (told.fills.price - told.execution.twap)
    assert split.against_twap == pytest.approx(over[filled].sum())
    assert split.against_twap != 0.0
    assert split.benchmarked == pytest.approx(split.arrived)
    assert split.timing == 0.0
    shown, costs = execution_costs(told.blotter()), basis_points(split)
    assert {name: costs[name] for name in shown} == pytest.approx(shown, abs=1e-6)


def test_one_trained_agent_is_evaluated_with_every_executor(line: Line, tmp_path: Path) -> None:
    path = tmp_path / "run"  # the registry is beside it
    config = override_config(line.config, [*TINY, "market.executor_dataset=minutes"])
    prepare(config, path)
    RunDirectory(path).record(config, "prepare")
    worlds = Worlds.from_prepared(Prepared.open(path), config)
    assert worlds.valid.executor is None
    Training(config, worlds, seed_directory(path, 1), 1).run()
    run = TrainedRun.open(path)
    own = evaluate(run, "valid", trust=False)
    found = {
        name: evaluate(run.executed_by([f"market.executor={name}"]), "valid", trust=False)
        for name in ("immediate", "twap", "vwap")
    }
    assert found["vwap"].directory == path / "executors" / "vwap" / "evaluations" / "valid"
    assert found["immediate"].seeds == own.seeds
    assert load_evaluation(path, "valid").facts["executor"] == "immediate"
    values = {name: one.tables(1).equity["value"].to_numpy() for name, one in found.items()}
    assert not np.array_equal(values["immediate"], values["twap"])
    costs = {name: execution_costs(one.tables(1).blotter) for name, one in found.items()}
    assert costs["twap"]["against_twap"] == pytest.approx(0.0, abs=1e-6)
    assert costs["immediate"]["against_twap"] != pytest.approx(0.0, abs=1e-6)
    # Each is a trial of its own, the run's own and the same again are one.
    keys = {
        Look.back(one, "valid").entry().key
        for one in (run, run.executed_by(["market.executor=vwap"]))
    }
    assert len(keys) == 2
    assert len(Look.back(run, "valid").rivals()) == 3


def test_only_the_executor_may_change_after_training(tmp_path: Path) -> None:
    run = TrainedRun(tmp_path, make_config(), (1,))
    with pytest.raises(UsageError, match=r"'market\.preset' cannot change"):
        run.executed_by(["market.preset=cn"])
    with pytest.raises(UsageError, match=r"executor name '\.\./x'"):
        run.executed_by(["market.executor_dataset=minutes"], "../x")
    with pytest.raises(ConfigError, match=r"market\.fill is 'close'"):
        override_config(make_config(), ["market.fill=close", "market.executor_dataset=minutes"])


def test_vwap_and_costs_of_execution_tell_on_the_fills(line: Line) -> None:
    span = line.world().span("valid")
    worlds = {
        "twap": line.world("market.executor=twap"),
        "vwap": line.world("market.executor=vwap"),
        "spread": line.world("market.executor=twap", "market.executor_spread_bps=5"),
        "twice": line.world("market.executor=twap", "market.executor_spread_bps=5", costs=2.0),
    }
    runs = {
        name: run_backtest(make_baseline("momentum", line.config), world, span, line.config)
        for name, world in worlds.items()
    }
    assert runs["vwap"].value.tobytes() != runs["twap"].value.tobytes()
    costs = {name: basis_points(run.cost_split) for name, run in runs.items()}
    assert costs["twap"]["spread"] == 0.0
    assert costs["spread"]["spread"] == pytest.approx(5.0, rel=0.05)
    assert costs["twice"]["spread"] == pytest.approx(10.0, rel=0.05)


def test_volume_profile_is_of_train_days_alone(line: Line) -> None:
    works = line.world("market.executor=vwap").executor
    assert isinstance(works, IntradayExecutor)
    assert isinstance(works.policy, Vwap)
    days = works._aligned.days
    last = np.datetime64("2015-03-02")
    fitted = Vwap(days.take(np.flatnonzero(days.dates <= last)))
    assert works.policy.pooled == pytest.approx(fitted.pooled)
    assert (days.dates > last).any()


def test_learners_collect_at_once_and_validate_through_the_day(line: Line) -> None:
    worlds = Worlds.from_prepared(line.prepared, line.with_("market.executor=twap"))
    assert worlds.train.executor is None
    assert worlds.valid.executor is not None
    assert Worlds.from_prepared(line.prepared, line.config).valid.executor is None


def test_a_learned_policy_works_orders_from_its_file(line: Line, tmp_path: Path) -> None:
    names = ("return_day", "time")
    net = build_net(NetworkSettings(), len(names), 3)
    scaler = Scaler(
        names, np.zeros(2), np.full(2, 0.5), np.ones(2, bool),
        (line.prepared.splits["train"].first, line.prepared.splits["train"].last),
    )  # fmt: skip
    save_execution_policy(tmp_path / "policy", net, names, {"scaler": scaler.to_dict()})
    world = line.world("market.executor=learned", f"market.executor_policy={tmp_path / 'policy'}")
    span = range(world.span("valid").start, world.span("valid").start + 8)
    run = run_backtest(Moving("m"), world, span, line.config)
    twap = run_backtest(Moving("m"), line.world("market.executor=twap"), span, line.config)
    assert run.execution is not None
    assert run.execution.worked[run.fills.shares != 0.0].all()
    assert run.value.tobytes() != twap.value.tobytes()
    save_execution_policy(tmp_path / "hasty", net, names, {"scaler": None, "rules": [1]})
    with pytest.raises(ConfigError, match="decide every 1 ticks"):
        line.world("market.executor=learned", f"market.executor_policy={tmp_path / 'hasty'}")
    save_execution_policy(tmp_path / "bare", net, names)
    with pytest.raises(StoreError, match="no 'scaler'"):
        line.world("market.executor=learned", f"market.executor_policy={tmp_path / 'bare'}")


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (("market.executor=twap",), "executor_dataset does not name"),
        (("market.executor=twap", "market.executor_dataset=m", "market.fill=close"), "fill is"),
        (("market.executor=learned", "market.executor_dataset=m"), "executor_policy does not"),
    ],
)
def test_executors_without_what_they_need_are_refused(
    overrides: tuple[str, ...], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        make_config(*overrides)


def test_datasets_of_other_symbols_and_missing_ones_are_refused(line: Line) -> None:
    with pytest.raises(StoreError, match="no dataset 'nothing'"):
        line.world("market.executor=twap", "market.executor_dataset=nothing")
    foreign = ["data.freq=5min", "data.dataset=one", "data.synthetic.n_symbols=1"]
    ensure_dataset(override_config(line.config, foreign))
    world = world_of(line.prepared, line.config)
    few = make_world(times=world.times, n_rows=len(world.times))
    config = line.with_("market.executor=twap", "market.executor_dataset=one")
    with pytest.raises(UniverseError, match="none of the portfolio's symbols"):
        with_executor(few, config)
