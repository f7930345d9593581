"""Backtests: a run by hand, its tables, its measures, and nothing known before its time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from numpy.typing import NDArray
from worlds import make_config, make_world

from echelon.agents import tables
from echelon.agents.a2c import ActorPolicy
from echelon.backtest import baselines
from echelon.backtest.baselines import make_baseline
from echelon.backtest.files import (
    AGENT,
    Book,
    Tables,
    read_tables,
    save_tables,
    tables_of,
    tables_of_book,
)
from echelon.backtest.forecaster import Forecaster, Ridge
from echelon.backtest.policy import Policy
from echelon.backtest.run import Backtest, run_backtest
from echelon.backtest.top_k import TopKRule
from echelon.config import Config
from echelon.envs import Action, World, books
from echelon.envs.act import ActionKind, Holdings
from echelon.errors import StoreError
from echelon.market import MarketRows, Orders, Reason, Rows
from echelon.models.actor_critic import ActorCritic
from echelon.ops import measures as m

HOLD, BUY, SELL = (int(a) for a in Action)
NET = ("window=4", "model.d_model=8", "model.n_layers=1", "model.hidden=8")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Script:
    """Does what is written, a line a step."""

    name = "script"

    def __init__(self, *lines: list[float], kind: ActionKind = "discrete") -> None:
        self.kind: ActionKind = kind
        self._lines = lines

    def start(self, world: World, span: range) -> None:
        self._first = span.start

    def decide(self, row: Rows, held: Holdings) -> NDArray[Any]:
        line = np.array([self._lines[int(row[0]) - self._first]])
        return line.astype(np.int8) if self.kind == "discrete" else line.astype(np.float64)


def actor(config: Config, n_features: int = 2, seed: int = 0, loud: float = 300.0) -> ActorPolicy:
    """A network with opinions: a new one is close to uniform."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = ActorCritic(config, n_features)
    with torch.no_grad():
        net.actor.outer.weight.mul_(loud)
    return ActorPolicy(net, config, seed)


SCRIPT = ([BUY, BUY], [SELL, HOLD], [BUY, HOLD])


def by_hand(*, fill_open: bool) -> tuple[World, Backtest]:
    """Two assets, 1000 of cash, a quarter of the traded amount as fee: 200 buy for 160.

    The fills are at 8 and 16, then 12, then 11.04, whether those are opens or closes.
    """
    opens = [[9.0, 9.0], [8.0, 16.0], [12.0, 99.0], [11.04, 99.0]]
    closes = [[7.0, 15.0], [10.0, 20.0], [11.0, 18.0], [12.0, 20.0]]
    if not fill_open:
        closes = [[8.0, 16.0], [12.0, 20.0], [11.04, 18.0], [12.0, 20.0]]
    world = make_world(
        close=closes,
        open=opens,
        commission=0.25,
        initial_cash=1000.0,
        window=1,
        splits={"test": range(4)},
        fill_open=fill_open,
    )
    return world, run_backtest(Script(*SCRIPT), world, world.span("test"), make_config())


def test_run_by_hand_filled_at_the_next_open() -> None:
    world, run = by_hand(fill_open=True)
    # 200 each: 160/8 = 20 and 160/16 = 10 shares, cash 600, worth 600 + 20·10 + 10·20 = 1000.
    # Half of 20 sold at 12 less 30: cash 690, worth 690 + 10·11 + 10·18 = 980.
    # A fifth of 690 is 138, of which 27.6 fee: 110.4/11.04 = 10 shares; cash 552,
    # worth 552 + 20·12 + 10·20 = 992.
    assert run.value == pytest.approx([1000.0, 1000.0, 980.0, 992.0])
    assert run.fills.shares.ravel() == pytest.approx([20, 10, -10, 0, 10, 0])
    assert run.fills.price.ravel() == pytest.approx([8, 16, 12, 0, 11.04, 0])
    assert run.fills.commission.ravel() == pytest.approx([40, 40, 30, 0, 27.6, 0])
    weights = [[0, 0], [0.2, 0.2], [110 / 980, 180 / 980], [240 / 992, 200 / 992]]
    assert run.weights == pytest.approx(np.array(weights), rel=1e-6)
    assert run.cash_share == pytest.approx([1.0, 0.6, 690 / 980, 552 / 992], rel=1e-6)
    assert run.actions.tolist() == [list(line) for line in SCRIPT]
    assert run.times.tolist() == world.times.tolist()
    assert run.fill_times.tolist() == world.times[1:].tolist()


def test_run_by_hand_filled_at_the_close_of_the_decision() -> None:
    world, run = by_hand(fill_open=False)
    # The same fills; marked at the next closes: 600 + 20·12 + 10·20 = 1040,
    # 690 + 10·11.04 + 10·18 = 980.4, 552 + 20·12 + 10·20 = 992.
    assert run.value == pytest.approx([1000.0, 1040.0, 980.4, 992.0])
    assert run.fills.shares.ravel() == pytest.approx([20, 10, -10, 0, 10, 0])
    assert run.fill_times.tolist() == world.times[:-1].tolist()
    assert run.blotter()["time"].to_list() == [
        t.item() for t in world.times[[0, 0, 1, 2]].astype("datetime64[us]")
    ]


def test_blotter_by_hand() -> None:
    world, run = by_hand(fill_open=True)
    blotter = run.blotter()
    assert blotter["time"].to_list() == [t.item() for t in world.times[[1, 1, 2, 3]]]
    assert blotter["symbol"].to_list() == ["S0", "S1", "S0", "S0"]
    assert blotter["side"].to_list() == ["buy", "buy", "sell", "buy"]
    assert blotter["shares"].to_list() == pytest.approx([20, 10, 10, 10])
    assert blotter["price"].to_list() == pytest.approx([8, 16, 12, 11.04])
    assert blotter["amount"].to_list() == pytest.approx([160, 160, 120, 110.4])
    assert blotter["commission"].to_list() == pytest.approx([40, 40, 30, 27.6])
    assert blotter["not_filled"].to_list() == [None] * 4


def test_blotter_names_why_an_order_was_not_filled() -> None:
    tradable = np.ones((4, 2), dtype=bool)
    tradable[1, 0] = False
    world = make_world(
        close=np.full((4, 2), 10.0), tradable=tradable, window=1, splits={"test": range(4)}
    )
    run = run_backtest(Script([BUY, BUY], [HOLD] * 2, [HOLD] * 2), world, range(4), make_config())
    rows = run.blotter().select("symbol", "side", "shares", "not_filled").rows()
    assert rows[0] == ("S0", "none", 0.0, "suspended")
    assert rows[1][:2] == ("S1", "buy")
    assert rows[1][3] is None


def test_measures_agree_with_the_series() -> None:
    _, run = by_hand(fill_open=True)
    returns = np.array([0.0, -0.02, 992 / 980 - 1])
    assert run.returns == pytest.approx(returns)
    found = run.measures
    assert found["total_return"] == pytest.approx(-0.008)
    assert found["sharpe_annual"] == pytest.approx(m.sharpe_annual(returns, 252))
    assert found["max_drawdown"] == pytest.approx(0.02)
    # Traded: 320 of 1000, 120 of 1000, 110.4 of 980.
    assert run.traded == pytest.approx([0.32, 0.12, 110.4 / 980])
    assert found["turnover_annual"] == pytest.approx((0.32 + 0.12 + 110.4 / 980) / 3 * 252)
    assert found["exposure"] == pytest.approx((0.0 + 0.4 + 290 / 980) / 3)
    assert found["cost_commission"] == found["cost_total"] == pytest.approx(137.6)
    assert found["cost_share"] == pytest.approx(0.1376)
    assert found["cost_slippage"] == found["cost_stamp"] == 0.0


def test_equity_table_by_hand() -> None:
    _, run = by_hand(fill_open=True)
    equity = tables_of(run).equity
    assert equity["value"].to_list() == pytest.approx([1000, 1000, 980, 992])
    assert equity["return"].to_list()[0] is None
    assert equity["return"].to_list()[1:] == pytest.approx([0, -0.02, 992 / 980 - 1])
    assert equity["drawdown"].to_list() == pytest.approx([0, 0, 0.02, 0.008])
    assert equity["traded"].to_list() == pytest.approx([0, 0.32, 0.12, 110.4 / 980])
    assert equity["commission"].to_list() == pytest.approx([0, 80, 30, 27.6])
    assert equity["orders_cut"].to_list() == [0, 0, 0, 0]


def test_slippage_stamp_and_cut_orders_stand_beside_the_step() -> None:
    world = make_world(
        close=np.full((4, 2), 10.0),
        window=1,
        commission=0.0,
        slippage_model=1,
        slippage=0.01,
        stamp=np.full(4, 0.001),
        initial_cash=1000.0,
        splits={"test": range(4)},
    )
    script = Script([BUY, SELL], [SELL, HOLD], [HOLD, HOLD])
    run = run_backtest(script, world, range(4), make_config())
    equity = tables_of(run).equity
    bought = 200.0 / 10.1
    assert equity["slippage"].to_list() == pytest.approx([0, bought * 0.1, bought / 2 * 0.1, 0])
    assert equity["stamp"].to_list() == pytest.approx([0, 0, bought / 2 * 9.9 * 0.001, 0])
    assert equity["orders_cut"].to_list() == [0, 0, 0, 0]  # SELL of nothing is no order
    assert run.costs.slippage == pytest.approx(bought * 0.15)


def test_tables_return_from_disk_as_they_were(tmp_path: Path) -> None:
    world = make_world()
    config = make_config(*NET)
    span = world.span("valid")
    run = run_backtest(actor(config), world, span, config)
    hold = run_backtest(make_baseline("equal_weight", config), world, span, config)
    books = {Book(AGENT, 1): tables_of(run), Book("equal_weight"): tables_of(hold)}
    save_tables(tmp_path, books, csv=True)
    every = read_tables(tmp_path)
    for book, wanted in books.items():
        found = tables_of_book(every, book, tmp_path)
        for kind in Tables._fields:
            assert getattr(found, kind).equals(getattr(wanted, kind)), (book, kind)
            assert getattr(found, kind).schema == getattr(wanted, kind).schema, (book, kind)
    assert set(every.actions["kind"]) == {"discrete", "weights"}
    with pytest.raises(StoreError, match=r"equity.parquet.*nothing of agent of seed 2"):
        tables_of_book(every, Book(AGENT, 2), tmp_path)
    found, wanted = tables_of_book(every, Book(AGENT, 1), tmp_path), tables_of(run)
    assert found.equity.height == len(run.times)
    assert found.weights.columns == ["time", "S0", "S1", "S2"]
    assert found.actions.height == len(run.times) - 1
    read = pl.read_csv(tmp_path / "equity.csv").filter(pl.col("policy") == AGENT)
    assert read["value"].to_list() == run.value.tolist()
    blotter = pl.read_csv(tmp_path / "blotter.csv").filter(pl.col("policy") == AGENT)
    assert blotter.height == wanted.blotter.height > 0
    assert blotter["shares"].to_list() == wanted.blotter["shares"].to_list()
    assert not list(tmp_path.glob(".*"))


def test_tables_of_the_benchmark_have_its_column_and_no_other(tmp_path: Path) -> None:
    world, config = make_world(), make_config()
    run = run_backtest(make_baseline("equal_weight", config), world, world.span("test"), config)
    tables = tables_of(run)
    index = tables._replace(
        weights=tables.weights.select("time", benchmark="S0"),
        actions=tables.actions.select("time", benchmark="S0"),
    )
    books = {Book("equal_weight"): tables, Book("benchmark"): index}
    save_tables(tmp_path, books)
    every = read_tables(tmp_path)
    for book, wanted in books.items():
        found = tables_of_book(every, book, tmp_path)
        assert all(a.equals(b) for a, b in zip(found, wanted, strict=True)), book


def test_tables_of_a_run_without_trades_return_too(tmp_path: Path) -> None:
    world = make_world()
    run = run_backtest(
        make_baseline("cash", make_config()), world, world.span("test"), make_config()
    )
    save_tables(tmp_path, {Book("cash"): tables_of(run)})
    found = tables_of_book(read_tables(tmp_path), Book("cash"), tmp_path)
    assert not list(tmp_path.glob("*.csv"))
    assert found.blotter.height == 0
    assert found.blotter.schema == tables_of(run).blotter.schema
    assert set(found.equity["value"]) == {1_000_000.0}


@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_tables_that_cannot_be_read_are_an_error(damage: str, tmp_path: Path) -> None:
    _, run = by_hand(fill_open=True)
    save_tables(tmp_path, {Book(AGENT, 1): tables_of(run)})
    file = tmp_path / "weights.parquet"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(StoreError, match=r"weights.parquet.*echelon evaluate"):
        read_tables(tmp_path)


def test_a_ruined_book_stops_there() -> None:
    close = np.full((8, 1), 10.0)
    close[4:] = 1e-9
    world = make_world(close=close, window=1, splits={"test": range(8)}, commission=0.0)
    run = run_backtest(Script(*[[1.0]] * 7, kind="weights"), world, range(8), make_config())
    assert run.value == pytest.approx([1e6, 1e6, 1e6, 1e6, 1e-4])
    assert len(run.times) == len(run.weights) == len(run.cash_share) == 5
    assert len(run.actions) == len(run.fill_times) == len(run.fills.shares) == 4
    assert run.measures["total_return"] == pytest.approx(-1.0)
    assert run.measures["max_drawdown"] == pytest.approx(1.0)
    assert tables_of(run).equity.height == 5


def test_shortest_span_is_one_step() -> None:
    world = make_world()
    run = run_backtest(
        make_baseline("equal_weight", make_config()), world, range(10, 12), make_config()
    )
    assert len(run.value) == 2
    assert math.isnan(run.measures["sharpe_annual"])


def same(one: Backtest, two: Backtest) -> bool:
    arrays = ("times", "value", "weights", "cash_share", "actions", "fill_times")
    return all(
        np.array_equal(getattr(one, n), getattr(two, n), equal_nan=n in ("actions", "weights"))
        for n in arrays
    ) and all(np.array_equal(a, b) for a, b in zip(one.fills, two.fills, strict=True))


@pytest.mark.parametrize("name", ["agent", "random", "hrp", "momentum", "equal_weight"])
def test_the_same_policy_twice_gives_the_same_run(name: str) -> None:
    config = make_config(*NET, "eval.rebalance_bars=3")
    world = make_world(n_rows=100, n_assets=4)
    policy: Policy = actor(config) if name == "agent" else make_baseline(name, config)
    span = range(70, 100)
    first = run_backtest(policy, world, span, config)
    assert same(first, run_backtest(policy, world, span, config))
    assert first.traded.sum() > 0


def test_actor_takes_the_most_probable_action_or_draws_with_its_seed() -> None:
    world = make_world()
    span = world.span("valid")

    def actions(seed: int, *overrides: str) -> list[list[int]]:
        config = make_config(*NET, *overrides)
        policy = ActorPolicy(actor(config, loud=30.0).net, config, seed)
        return run_backtest(policy, world, span, config).actions.tolist()

    drawn = "eval.deterministic=false"
    assert actions(1) == actions(2)
    assert actions(1, drawn) == actions(1, drawn)
    assert actions(1, drawn) != actions(2, drawn)
    assert actions(1, drawn) != actions(1)


def test_actor_does_only_what_is_allowed() -> None:
    rng = np.random.default_rng(0)
    present = rng.random((60, 3)) > 0.3
    world = make_world(present=present, tradable=rng.random((60, 3)) > 0.3)
    config = make_config(*NET, "eval.deterministic=false")
    run = run_backtest(actor(config, loud=1.0), world, range(3, 60), config)
    rows = np.arange(3, 59)
    buys = run.actions == BUY
    assert buys.any()
    assert (present[rows] & world.rows.tradable[rows])[buys].all()
    assert not (run.fills.reason == Reason.NOT_MEMBER).any()


def test_actor_encodes_long_spans_in_pieces_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = make_world(n_rows=90)
    for shared in ("true", "false"):
        config = make_config(*NET, f"model.shared_encoder={shared}")
        whole = run_backtest(actor(config), world, range(3, 90), config)
        with monkeypatch.context() as patch:
            patch.setattr(tables, "_SPAN_BARS", 7)
            pieces = run_backtest(actor(config), world, range(3, 90), config)
        assert np.array_equal(whole.actions, pieces.actions)


def test_actor_decides_for_many_books_as_for_each() -> None:
    world = make_world()
    config = make_config(*NET)
    policy = actor(config)
    policy.start(world, range(3, 60))
    rng = np.random.default_rng(4)
    rows = rng.integers(3, 60, 9)
    held = Holdings(
        rng.random((9, 3)).astype(np.float32) / 3,
        rng.random(9).astype(np.float32),
        np.ones((9, 3, 3), dtype=bool),
        np.ones(9),
    )
    together = policy.decide(rows, held)
    for e in range(9):
        alone = policy.decide(rows[e : e + 1], Holdings(*(part[e : e + 1] for part in held)))
        assert np.array_equal(together[e], alone[0])


CUT = 80
FIRST, LAST = 70, 96
BARS = ("eval.rebalance_bars=2", "eval.estimation_bars=64", "eval.momentum_bars=5")


def a_rich_world(**changes: Any) -> World:
    """Suspensions, limits, dividends, splits, volume, a late listing and a leaver."""
    rng = np.random.default_rng(8)
    shape = (100, 4)
    present, member = np.ones(shape, dtype=bool), np.ones(shape, dtype=bool)
    present[:75, 3] = False
    member[78:, 1] = False
    parts: dict[str, Any] = {
        "tradable": rng.random(shape) > 0.1,
        "present": present,
        "member": member,
        "volume_open": rng.uniform(1e4, 1e6, shape),
        "volume_close": rng.uniform(1e4, 1e6, shape),
        "participation": 0.1,
        "dividend": np.where(rng.random(shape) > 0.95, 0.1, 0.0),
        "share_step": np.where(rng.random(shape) > 0.97, 2.0, 1.0),
        "slippage_model": 3,
        "slippage": 0.01,
    }
    return make_world(n_rows=100, n_assets=4, seed=2, **(parts | changes))


def with_another_future(world: World, cut: int) -> World:
    """The same world up to and including the row `cut`, and quite another one after it."""
    rng = np.random.default_rng(99)

    def changed(values: NDArray[Any]) -> NDArray[Any]:
        out = values.copy()
        after = out[cut + 1 :]
        if out.dtype == bool:
            out[cut + 1 :] = rng.random(after.shape) > 0.5
        else:
            finite = np.where(np.isfinite(after), after, 1.0)
            out[cut + 1 :] = finite * rng.uniform(0.5, 2.0, after.shape)
        return out

    by_row = {
        name: changed(values)
        for name, values in world.rows._asdict().items()
        if len(values) == len(world.times)
    }
    assert set(MarketRows._fields) - by_row.keys() == {"haircut", "lot", "min_lot"}
    benchmark = world.benchmark
    assert benchmark is not None
    return replace(
        world,
        rows=world.rows._replace(**by_row),
        x=changed(world.x),
        present=changed(world.present),
        member=changed(world.member),
        growth=changed(world.growth),
        benchmark=changed(benchmark),
    )


@pytest.fixture
def orders_sent(monkeypatch: pytest.MonkeyPatch) -> list[Orders]:
    """Every order that books hand to the kernel."""
    sent: list[Orders] = []
    kernel = books.step

    def watched(book: Any, orders: Orders, *rest: Any, **options: Any) -> Any:
        sent.append(Orders(orders.shares.copy(), orders.spend.copy()))
        return kernel(book, orders, *rest, **options)

    monkeypatch.setattr(books, "step", watched)
    return sent


POLICIES = ("agent", "sampling agent", *make_config().eval.baselines)


def runner(name: str, *overrides: str) -> Callable[[World, range], Backtest]:
    """Runs the policy of that name as evaluation does."""
    config = make_config(*NET, *BARS, *overrides)
    if "agent" in name:
        if name != "agent":
            config = make_config(*NET, *BARS, *overrides, "eval.deterministic=false")
        return lambda world, span: run_backtest(actor(config), world, span, config)
    only = make_config(*NET, *BARS, *overrides, f"eval.baselines=[{name}]")
    return lambda world, span: baselines.run_baselines(world, span, only, a_forecaster(world))[name]


def a_forecaster(world: World) -> Forecaster:
    """A ridge by lot: what it was fitted on is no matter here, when it looks at what is."""
    weights = np.random.default_rng(5).normal(size=world.x.shape[2] + 1)
    return Forecaster(Ridge(weights), TopKRule(top=2, buffer=1.5, tranches=2, horizon=4), {})


@pytest.mark.parametrize("fill_open", [True, False])
@pytest.mark.parametrize("name", POLICIES)
def test_what_comes_later_changes_nothing_before(
    name: str, fill_open: bool, orders_sent: list[Orders]
) -> None:
    run = runner(name)
    world = a_rich_world(fill_open=fill_open)
    span = range(FIRST, LAST)
    before = run(world, span)
    sent = list(orders_sent)
    orders_sent.clear()
    after = run(with_another_future(world, CUT), span)
    known = CUT - FIRST
    for part in ("value", "weights", "cash_share", "times"):
        one, two = getattr(before, part)[: known + 1], getattr(after, part)[: known + 1]
        assert np.array_equal(one, two), part
    # The decision at the cut itself is made without knowing what follows.
    assert np.array_equal(before.actions[: known + 1], after.actions[: known + 1], equal_nan=True)
    for one, two in zip(sent[: known + 1], orders_sent[: known + 1], strict=True):
        assert np.array_equal(one.shares, two.shares)
        assert np.array_equal(one.spend, two.spend)
    filled = known if fill_open else known + 1
    for one, two in zip(before.fills, after.fills, strict=True):
        assert np.array_equal(one[:filled], two[:filled])
    assert name == "cash" or before.traded[:known].sum() > 0
    assert name == "cash" or before.value[-1] != after.value[-1]


@pytest.mark.parametrize("name", POLICIES)
def test_a_shorter_span_is_the_beginning_of_a_longer_one(name: str) -> None:
    world = a_rich_world()
    run = runner(name)
    long, short = run(world, range(FIRST, LAST)), run(world, range(FIRST, CUT))
    n = len(short.value)
    assert n == CUT - FIRST
    assert np.array_equal(long.value[:n], short.value)
    assert np.array_equal(long.actions[: n - 1], short.actions, equal_nan=True)
