"""The world: made of a prepared set, its spans, its costs, and the index as a world of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from worlds import make_config, make_world, prepared_run, reseal

from echelon.config import Config, load_config
from echelon.envs import Action, ActionRule, Books, World, index_world, world_of
from echelon.errors import DataError
from echelon.features.prepared import Prepared
from echelon.runs.registry import TestRead, TrialRegistry, Window, new_entry


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Path:
    return prepared_run(tmp_path_factory.mktemp("world"), bars_file)


def opened(run: Path, *overrides: str) -> tuple[Prepared, Config]:
    return Prepared.open(run), load_config(run / "config.yaml", overrides)


def a_read(directory: Path) -> TestRead:
    """Leave to look at a test window."""
    entry = new_entry(Window("made-up", "0", "2016-07-01", "2016-12-30"), directory, "0", 1)
    return TrialRegistry(directory / "registry").begin_read(entry)


def random_values(world: World, steps: int = 60) -> tuple[np.ndarray, float]:
    """Values of a book under random actions, and what it paid."""
    books = Books(world, ActionRule("discrete"), make_config().reward, 1, world.span("train"))
    rng = np.random.default_rng(0)
    values, paid = [], 0.0
    for _ in range(steps):
        result = books.step(rng.integers(0, 3, (1, world.n_assets)))
        fills = result.fills
        values.append(float(result.value[0]))
        paid += float((fills.commission + fills.stamp + fills.slippage).sum())
    return np.array(values), paid


def test_world_holds_what_was_prepared(run: Path) -> None:
    prepared, config = opened(run)
    world = world_of(prepared, config)
    assert world.n_assets == 16
    assert world.symbols == config.assets
    stop = prepared.splits["valid"].rows.stop
    assert np.array_equal(world.x, prepared.x[:stop])
    assert np.array_equal(world.present, prepared.present[:stop])
    assert np.array_equal(world.rows.close, np.nan_to_num(prepared.close[:stop]))
    assert world.window == 5
    assert world.periods_per_year == 252.0
    assert world.initial_cash == config.market.initial_cash
    assert world.splits == {name: prepared.splits[name].rows for name in ("train", "valid")}


def test_splits_begin_at_their_own_first_bar(run: Path, tmp_path: Path) -> None:
    prepared, config = opened(run)
    world = world_of(prepared, config, read=a_read(tmp_path))
    for name, first in (("valid", "2016-02-01"), ("test", "2016-07-01")):
        assert str(world.times[world.span(name).start].astype("datetime64[D]")) == first
    assert world.span("test").stop == len(world.times)


def test_fill_convention_is_that_of_the_configuration_and_told(run: Path) -> None:
    prepared, config = opened(run)
    world = world_of(prepared, config)
    assert world.fill_open
    assert world.ledger["fill"] == "the next bar's open"
    same = world_of(*opened(run, "market.fill=close"))
    assert not same.fill_open
    assert same.ledger["fill"] == "the close the decision was made on"


@pytest.mark.parametrize("preset", ["paper", "us", "cn", "crypto", "hierarchical"])
def test_use_fee_false_removes_every_cost(run: Path, preset: str) -> None:
    prepared, config = opened(
        run, f"market.preset={preset}", "market.preset_confirmed=true", "fee_rate=null"
    )
    free = world_of(prepared, config, costs=0.0)
    values, paid = random_values(free)
    assert paid == 0.0
    charged, costs = random_values(world_of(prepared, config))
    assert costs > 0.0
    assert charged[-1] < values[-1]
    assert not free.rows.stamp.any()


def test_costs_are_multiplied_as_told(run: Path) -> None:
    prepared, config = opened(
        run, "market.preset=cn", "market.preset_confirmed=true", "fee_rate=null"
    )
    once, twice = (world_of(prepared, config, costs=c) for c in (1.0, 2.0))
    for name in ("commission", "min_commission", "slippage"):
        assert getattr(twice.rules, name) == 2.0 * getattr(once.rules, name), name
    assert once.rows.stamp.any()
    assert np.array_equal(twice.rows.stamp, 2.0 * once.rows.stamp)


def test_fees_leave_the_other_rules_alone(run: Path) -> None:
    prepared, config = opened(run, "market.preset=us", "fee_rate=null")
    rules, free = (world_of(prepared, config, costs=c).rules for c in (1.0, 0.0))
    assert free.participation == rules.participation == 0.1
    assert free.min_value == rules.min_value == 100.0
    assert rules.slippage > 0.0


def test_nan_in_the_features_is_named_with_feature_symbol_and_row(
    run: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    x = np.load(broken / "prepared" / "X.npy")
    x[17, 3, 2] = np.nan
    x[40, 3, 2] = np.inf
    np.save(broken / "prepared" / "X.npy", x)
    reseal(broken, record=False)
    prepared, config = opened(broken)
    name, time = prepared.names[2], prepared.times[17]
    with pytest.raises(DataError, match=rf"'{name}' of CVX is not a number at {time} \(row 17\)"):
        world_of(prepared, config)


def test_span_begins_where_a_whole_window_is_known() -> None:
    world = make_world(n_rows=50, window=10)
    assert world.span("train") == range(9, 30)
    assert world.span("valid") == range(30, 40)


@pytest.mark.parametrize(("rows", "left"), [(range(0, 10), 1), (range(0, 4), 0), (range(9, 10), 1)])
def test_split_too_short_for_one_step_is_refused(rows: range, left: int) -> None:
    world = make_world(n_rows=50, window=10, splits={"train": rows})
    with pytest.raises(
        DataError,
        match=rf"split.train has {len(rows)} bars, of which {left} have window=10.*Lengthen",
    ):
        world.span("train")


def test_split_of_two_rows_is_enough() -> None:
    world = make_world(n_rows=50, window=10, splits={"train": range(0, 11)})
    assert world.span("train") == range(9, 11)


@pytest.mark.parametrize("fill_open", [True, False])
def test_index_world_returns_what_the_index_does(fill_open: bool) -> None:
    level = 3000.0 * np.exp(np.cumsum(np.random.default_rng(3).normal(0.0, 0.01, 60)))
    level[30] = np.nan  # a day without a level: the last one stands
    world = make_world(
        benchmark=level,
        fill_open=fill_open,
        slippage_model=3,
        slippage=0.01,
        participation=0.1,
        min_commission=5.0,
        t_plus_one=True,
        stamp=np.full(60, 0.001),
    )
    index = index_world(world)
    assert index is not None
    assert index.symbols == ("benchmark",)
    books = Books(index, ActionRule("weights"), make_config().reward, 1, range(3, 60))
    first = books.step(np.array([[1.0]]))
    values = [float(first.value[0])]
    values += [float(books.step(np.array([[np.nan]])).value[0]) for _ in range(55)]
    known = level.copy()
    known[30] = known[29]
    assert np.array(values) / 1e6 == pytest.approx(known[4:] / known[3], rel=1e-12)
    assert not first.fills.commission.any()


def test_without_a_benchmark_there_is_no_index_world() -> None:
    assert index_world(make_world(benchmark=None)) is None


def test_index_cannot_be_bought_before_its_first_level() -> None:
    level = np.full(60, 100.0)
    level[:10] = np.nan
    index = index_world(make_world(benchmark=level))
    assert index is not None
    assert index.present[:, 0].tolist() == [False] * 10 + [True] * 50
    books = Books(index, ActionRule("weights"), make_config().reward, 1, range(3, 60))
    assert not books.holdings().allowed[0, 0, Action.BUY]
    books.step(np.array([[1.0]]))
    assert not books.book.shares.any()


def test_world_refuses_parts_of_other_shapes() -> None:
    with pytest.raises(AssertionError, match=r"present is not \[T,N\]"):
        make_world(present=np.ones((60, 4), dtype=bool))
    with pytest.raises(AssertionError, match=r"x is not \[T,N,F\]"):
        make_world(x=np.zeros((59, 3, 2), dtype=np.float32))
