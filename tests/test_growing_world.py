"""A world whose rows are appended: bit for bit the loaded one, for policies, books and restarts."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from a_shares import import_a_shares
from markets import CONFIGS
from numpy.typing import NDArray

from echelon.backtest.baselines import make_baseline
from echelon.backtest.policy import Policy, StatefulPolicy, lookback_of
from echelon.backtest.run import run_backtest
from echelon.backtest.top_k import RowScores, TopKPolicy, TopKRule
from echelon.config import Config, load_config
from echelon.config.agents import RewardConfig
from echelon.data.build import build_panel
from echelon.data.panel import Panel
from echelon.data.store import Store
from echelon.envs import ActionRule, Books, World, world_of
from echelon.envs.act import ActionKind, Holdings
from echelon.envs.growing import GrowingWorld, live_span
from echelon.errors import DataError, StoreError, UsageError
from echelon.features import prepare
from echelon.features.prepare import panel_request
from echelon.features.prepared import Prepared
from echelon.market import Fills, Rows
from echelon.population.policy import HierarchyPolicy
from echelon.population.reference_policies import HedgeRouter
from echelon.population.router_task import MarketSums, add_market_rows, market_view
from echelon.runs.registry import TrialRegistry, Window, new_entry
from echelon.types import Floats

SETTINGS = (
    *("data.source=store", "data.dataset=m", "assets=[]", "data.delist_after=20", "window=5"),
    *("features.indicators={sma: [5]}", "features.stationary.enabled=false", "market.preset=cn"),
    *("fee_rate=null", "eval.rebalance_bars=5", "eval.estimation_bars=30", "eval.momentum_bars=7"),
    *("meta_router.horizons=[2,5,12]", "meta_router.every_bars=3", "risk.cvar_window=10"),
    *("risk.drawdown_window=10", "risk.drawdown_limit=0.05", "risk.drawdown_release=0.04"),
    *("risk.cooldown_bars=4", "risk.release_bars=1", "risk.cvar_limit=0.03"),
    *("risk.halt_drawdown=0.08", "risk.halt_bars=6", "risk.turnover_per_bar=0.9"),
)
DAYS = (
    "split={train: [2023-04-03, 2023-06-30], valid: [2023-07-03, 2023-09-15], "
    "test: [2023-09-18, 2023-12-29]}",
)
MINUTES = (
    "split={train: [2023-08-24, 2023-08-25], valid: [2023-08-28, 2023-08-28], "
    "test: [2023-08-29, 2023-08-30]}",
    # Windows are in days: who is masked by one of ten would be so to the end.
    *("risk.drawdown_window=1", "risk.drawdown_limit=0.1"),
)


class Market(NamedTuple):
    """The same data loaded, and as they would come bar by bar."""

    prepared: Prepared
    config: Config
    world: World
    panel: Panel  # the rows of the world, and those before

    @property
    def skip(self) -> int:
        return len(self.panel.times) - len(self.world.times)

    def grow(self, n_rows: int, lookback: int, **more: Any) -> GrowingWorld:
        """A world of the first rows."""
        prepared, whole = self.prepared, cut(self.panel, slice(0, self.skip + n_rows))
        splits = {name: split.rows for name, split in prepared.splits.items()}
        x, present = np.array(prepared.x[:n_rows]), np.array(prepared.present[:n_rows])
        return GrowingWorld.from_history(
            whole, x, present, self.config, splits=splits, lookback=lookback, **more
        )

    def feed(self, world: GrowingWorld, row: int) -> None:
        """Append a row of the loaded world; reasons of delistings come with them."""
        at = self.skip + row
        bar = cut(self.panel, slice(at, at + 1))
        for n in np.flatnonzero(bar.delisted[0] & ~self.panel.delisted[at - 1]):
            reason = self.prepared.delist_reasons[n]
            if reason is not None:
                world.set_delist_reason(world.symbols[n], reason)
        assert world.append(bar, self.prepared.x[row], self.prepared.present[row]) == row

    def announce(self, world: GrowingWorld) -> None:
        """Send the reasons of delistings that are known by now."""
        for symbol, reason in zip(world.symbols, self.prepared.delist_reasons, strict=True):
            if reason is not None:
                world.set_delist_reason(symbol, reason)


def cut(panel: Panel, rows: slice) -> Panel:
    """Some rows of a panel."""
    parts = {f.name: getattr(panel, f.name) for f in fields(Panel)}
    arrays = {
        name: part[rows]
        for name, part in parts.items()
        if isinstance(part, np.ndarray) and name != "anchor"
    }
    return replace(panel, **arrays)


def make_market(path: Path, freq: str, basis: str, *overrides: str) -> Market:
    import_a_shares(path / "store", freq, basis)
    places = (f"data.store={path}/store", f"data.cache.dir={path}/cache")
    split = DAYS if freq == "1d" else MINUTES
    config = load_config(CONFIGS / "qtmrl.yaml", [*SETTINGS, *split, *places, *overrides])
    prepared = prepare(config, path / "run").prepared
    entry = new_entry(Window("made-up", "0", "2023-07-03", "2023-12-29"), path, "0", 1)
    read = TrialRegistry(path / "registry").begin_read(entry)
    panel = build_panel(Store(config.data.store), "m", panel_request(config))
    return Market(prepared, config, world_of(prepared, config, read=read), panel)


@pytest.fixture(scope="module")
def markets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Market]:
    known: dict[tuple[str, str], Market] = {}

    def get(freq: str = "1d", basis: str = "raw") -> Market:
        if (freq, basis) not in known:
            path = tmp_path_factory.mktemp(f"{freq}-{basis}")
            known[freq, basis] = make_market(path, freq, basis)
        return known[freq, basis]

    return get


def arrays_of(world: World) -> dict[str, NDArray[Any]]:
    """Every array of a world, by name."""
    parts = {f.name: getattr(world, f.name) for f in fields(World)}
    parts |= {f"rows.{name}": part for name, part in world.rows._asdict().items()}
    return {name: part for name, part in parts.items() if isinstance(part, np.ndarray)}


def assert_same_bits(one: NDArray[Any], two: NDArray[Any], name: str) -> None:
    assert one.dtype == two.dtype, name
    assert one.shape == two.shape, name
    assert np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(two).tobytes(), name


def assert_same_world(grown: World, loaded: World, rows: range) -> None:
    ours, theirs = arrays_of(grown), arrays_of(loaded)
    assert ours.keys() == theirs.keys()
    assert len(grown.times) == len(loaded.times)
    for name, part in ours.items():
        fixed = part.ndim == 1 and len(part) == grown.n_assets != len(grown.times)
        inside = slice(None) if fixed else slice(rows.start, rows.stop)
        assert_same_bits(part[inside], theirs[name][inside], name)
    for field in fields(World):
        if not isinstance(getattr(loaded, field.name), np.ndarray) and field.name != "rows":
            assert getattr(grown, field.name) == getattr(loaded, field.name), field.name


@pytest.mark.parametrize("share", [0.02, 0.35, 0.75, 0.99])
@pytest.mark.parametrize(
    ("freq", "basis"),
    [("1d", "raw"), ("1d", "split_adjusted"), ("1d", "adjusted"), ("5min", "raw")],
)
def test_rows_appended_are_those_of_the_loaded_world(
    markets: Callable[..., Market], freq: str, basis: str, share: float
) -> None:
    market = markets(freq, basis)
    n_rows = len(market.world.times)
    first = max(1, int(share * n_rows))
    grown = market.grow(first, lookback=n_rows)
    assert isinstance(grown, World)
    for row in range(first, n_rows):
        market.feed(grown, row)
    market.announce(grown)
    assert grown.kept == range(n_rows)
    assert_same_world(grown, market.world, grown.kept)


def test_the_markets_hold_what_must_be_carried_from_row_to_row(
    markets: Callable[..., Market],
) -> None:
    raw, paid = markets("1d", "raw").world, markets("1d", "split_adjusted").world
    assert ((raw.rows.share_step != 1.0).sum(), (paid.rows.dividend > 0).sum()) > (10, 10)
    assert raw.rows.gone.any()
    reasons = markets("1d", "raw").prepared.delist_reasons
    assert reasons[raw.symbols.index("600001.SH")] == "merger"
    assert (~raw.rows.tradable & raw.present).any(), "nothing is suspended"
    assert np.isfinite(raw.rows.limit_up).any()
    assert len(set(raw.rows.stamp.tolist())) == 2
    assert (raw.rows.close[0] == 0.0).any(), "nobody lists late"
    market = markets("1d", "raw")
    n = raw.symbols.index("000001.SZ")
    assert np.isnan(market.panel.close[market.skip, n]), "nothing is suspended as X begins"
    assert raw.rows.close[0, n] > 0.0, "its last close is not known"
    assert (~raw.member & raw.present).any()
    assert not markets("5min", "raw").world.rows.new_session.all()


class Tilting:
    """Towards the highest of a feature, from what is held; reads the world when it is asked."""

    kind: ActionKind = "weights"

    def __init__(self, name: str, sign: float, back: int = 0) -> None:
        self.name, self._sign, self._back = name, sign, back
        self.asked: list[int] = []

    @property
    def lookback(self) -> int:
        return self._back

    def start(self, world: World, span: range) -> None:
        self._world = world

    def state(self) -> dict[str, NDArray[Any]]:
        return {}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Nothing is remembered."""

    def decide(self, row: Rows, held: Holdings) -> Floats:
        self.asked.append(len(row))
        seen = self._sign * self._world.x[row - self._back, :, 0].astype(np.float64)
        power = np.exp(seen - seen.max(axis=1, keepdims=True))
        goal = power / power.sum(axis=1, keepdims=True)
        can = held.allowed[:, :, 1:].any(axis=2)
        return np.where(can, 0.6 * held.weights + 0.4 * goal, np.nan)


def hierarchy(config: Config, **more: Any) -> HierarchyPolicy:
    experts = [Tilting("up", 3.0), Tilting("down", -3.0, back=2)]
    rules = [make_baseline(name, config) for name in ("equal_weight", "hrp")]
    return HierarchyPolicy([*experts, *rules], HedgeRouter(), config, 1, **more)


POLICIES: dict[str, Callable[[Config], Policy]] = {
    name: partial(make_baseline, name)
    for name in ("equal_weight", "hrp", "momentum", "random", "buy_and_hold", "cash")
}
POLICIES["hierarchy"] = hierarchy


def top_k(config: Config) -> TopKPolicy:
    """The best by the first feature, which moves fast enough to trade at most bars."""
    scores = RowScores(lambda x: x[:, 0].astype(np.float64))
    return TopKPolicy(scores, TopKRule(2, 1.0, 2, 3), "forecast")


POLICIES["forecast"] = top_k
POLICIES["hierarchy with a forecaster"] = lambda config: HierarchyPolicy(
    [Tilting("up", 3.0), top_k(config)], HedgeRouter(), config, 1
)


class Step(NamedTuple):
    """What a bar brought."""

    action: NDArray[Any]
    value: Floats
    fills: Fills


class Live:
    """A book traded bar by bar on a world that grows; can be stopped and started again."""

    def __init__(self, market: Market, make: Callable[[Config], Policy], start: int) -> None:
        self.market, self._make, self._start = market, make, start
        self.policy = make(market.config)
        self.world = market.grow(start + 1, lookback_of(self.policy))
        self._open()

    def _open(self) -> None:
        config, span = self.market.config, live_span(self._start)
        rule = ActionRule.from_config(config, self.policy.kind)
        self.books = Books(self.world, rule, RewardConfig(), 1, span)
        self.policy.start(self.world, span)

    def step(self) -> Step:
        action = self.policy.decide(self.books.row, self.books.holdings())
        self.market.feed(self.world, int(self.books.row[0]) + 1)
        result = self.books.step(action)
        return Step(action[0], result.value, result.fills)

    def restart(self) -> None:
        """Forget everything but what the states hold, as files would."""
        assert isinstance(self.policy, StatefulPolicy)
        saved = [_through_a_file(p.state()) for p in (self.world, self.books, self.policy)]
        facts, config = self.world.facts, self.market.config
        self.policy = self._make(config)
        lookback = lookback_of(self.policy)
        self.world = GrowingWorld.restore(saved[0], facts, config, lookback=lookback)
        self._open()
        self.books.restore(saved[1])
        assert isinstance(self.policy, StatefulPolicy)
        self.policy.restore(saved[2])


def _through_a_file(state: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    file = io.BytesIO()
    np.savez(file, **state)  # type: ignore[arg-type]
    file.seek(0)
    with np.load(file, allow_pickle=False) as saved:
        return {name: saved[name] for name in saved.files}


def assert_same_steps(steps: list[Step], market: Market, make: Callable[[Config], Policy]) -> None:
    span = market.world.span("test")
    whole = run_backtest(make(market.config), market.world, span, market.config)
    n = len(steps)
    assert n > 30
    assert np.count_nonzero(whole.fills.shares[:n]) > 0 or whole.policy == "cash"
    assert_same_bits(np.array([s.action for s in steps]), whole.actions[:n], "actions")
    values = np.concatenate([s.value for s in steps])
    assert_same_bits(values, whole.value[1 : n + 1], "value")
    for name in Fills._fields:
        fills = np.concatenate([getattr(s.fills, name) for s in steps])
        assert_same_bits(fills, getattr(whole.fills, name)[:n], name)


@pytest.mark.parametrize("freq", ["1d", "5min"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_backtest_is_what_books_do_on_the_growing_world(
    markets: Callable[..., Market], name: str, freq: str
) -> None:
    market, make = markets(freq), POLICIES[name]
    span = market.world.span("test")
    live = Live(market, make, span.start)
    steps = [live.step() for _ in range(len(span) - 1)]
    assert_same_steps(steps, market, make)
    if freq == "1d" and lookback_of(live.policy) < 40:
        assert live.world.kept.start > 0, "nothing was let go"


def test_the_hierarchy_of_the_parity_test_switches_masks_halts_and_limits(
    markets: Callable[..., Market],
) -> None:
    market = markets()
    policy = hierarchy(market.config)
    run_backtest(policy, market.world, market.world.span("test"), market.config)
    record = policy.record
    assert record is not None
    assert len(set(record.in_charge.tolist())) >= 3
    kinds = {event.kind.value for event in record.events}
    assert {"masked", "halted", "turnover_cut", "halved"} <= kinds


@pytest.mark.parametrize("name", POLICIES)
def test_stopped_and_restored_at_every_bar_decisions_are_the_same(
    markets: Callable[..., Market], name: str
) -> None:
    market, make = markets(), POLICIES[name]
    live = Live(market, make, market.world.span("test").start)
    steps = []
    for _ in range(40):
        steps.append(live.step())
        live.restart()
    assert_same_steps(steps, market, make)
    rows = live.world.kept
    loaded = replace(market.world, **_first_rows(market.world, len(live.world.times)))
    market.announce(live.world)
    assert_same_world(live.world, loaded, rows)


def _first_rows(world: World, n: int) -> dict[str, Any]:
    per_row = ("x", "present", "member", "growth", "times", "benchmark")
    fixed = ("haircut", "lot", "min_lot")
    rows = world.rows._asdict()
    cut_rows = {name: part if name in fixed else part[:n] for name, part in rows.items()}
    return {name: getattr(world, name)[:n] for name in per_row} | {
        "rows": world.rows._replace(**cut_rows)
    }


def test_a_backtest_goes_on_from_a_state_and_can_be_run_again(
    markets: Callable[..., Market],
) -> None:
    market = markets()
    world, config, span = market.world, market.config, market.world.span("test")
    live = Live(market, hierarchy, span.start)
    for _ in range(20):
        live.step()
    assert isinstance(live.policy, HierarchyPolicy)
    policy = hierarchy(config)
    policy.start(world, span)
    policy.restore(live.policy.state())
    rule = ActionRule.from_config(config, "weights")
    books = Books(world, rule, RewardConfig(), 1, span)
    books.restore(live.books.state())
    for _ in range(10):
        action = policy.decide(books.row, books.holdings())
        books.step(action)
        assert_same_bits(action[0], live.step().action, "action")
    _assert_same_state(policy.state(), live.policy.state())
    assert policy.record is not None
    assert policy.record.times[0] == world.times[span.start + 20]
    whole = run_backtest(policy, world, span, config)
    again = run_backtest(hierarchy(config), world, span, config)
    assert_same_bits(whole.actions, again.actions, "actions")


def test_command_and_events_are_the_same_after_a_restart(markets: Callable[..., Market]) -> None:
    market = markets()
    start = market.world.span("test").start
    plain, stopped = (Live(market, hierarchy, start) for _ in range(2))
    heard: list[list[Any]] = [[], []]
    for _ in range(30):
        for n, live in enumerate((plain, stopped)):
            assert isinstance(live.policy, HierarchyPolicy)
            if n == 1 and len(heard[1]) > 3:
                live.restart()
            if not live.policy._callbacks:
                live.policy.subscribe(heard[n].append)
            live.step()
        assert isinstance(plain.policy, HierarchyPolicy)
        assert isinstance(stopped.policy, HierarchyPolicy)
        one, two = plain.policy.command, stopped.policy.command
        assert one.probabilities is not None, "a hedge says what it trusts in"
        assert two.probabilities is not None
        assert one.probabilities.sum() == pytest.approx(1.0)
        assert_same_bits(one.allowed, two.allowed, "allowed")
        assert_same_bits(one.probabilities, two.probabilities, "probabilities")
        assert one._replace(allowed=two.allowed, probabilities=two.probabilities) == two
    assert heard[0] == heard[1]


def test_another_future_changes_no_earlier_decision(markets: Callable[..., Market]) -> None:
    market = markets()
    start, same = market.world.span("test").start, 20
    for name, make in POLICIES.items():
        live, changed = Live(market, make, start), Live(market, make, start)
        for n in range(30):
            row = int(live.books.row[0]) + 1
            bar = cut(market.panel, slice(market.skip + row, market.skip + row + 1))
            x, present = market.prepared.x[row], market.prepared.present[row]
            actions = [a.policy.decide(a.books.row, a.books.holdings()) for a in (live, changed)]
            if n <= same:
                assert_same_bits(actions[0], actions[1], name)
            live.world.append(bar, x, present)
            if n >= same:
                assert bar.open is not None
                assert bar.volume is not None
                bar = replace(bar, close=3 * bar.close, open=bar.open / 2, volume=9 * bar.volume)
                x = -x
            changed.world.append(bar, x, present)
            for a, action in zip((live, changed), actions, strict=True):
                a.books.step(action)
        if name not in ("cash",):
            assert (live.books.value != changed.books.value).any(), "the future was no other"


def plain_panel(n_rows: int, n_assets: int) -> Panel:
    rng = np.random.default_rng(0)
    shape = (n_rows, n_assets)
    everywhere, nowhere = np.ones(shape, dtype=bool), np.zeros(shape, dtype=bool)
    close = 10 * np.exp(np.cumsum(rng.normal(0, 0.01, shape), axis=0))
    return Panel(
        times=np.datetime64("2015-01-01", "us") + np.arange(n_rows) * np.timedelta64(1, "D"),
        symbols=tuple(f"S{n}" for n in range(n_assets)),
        close=close,
        present=everywhere,
        member=everywhere,
        suspended=nowhere,
        tradable=everywhere,
        delisted=nowhere,
        anchor=close[0],
        freq="1d",
        calendar="24/7",
        timezone="UTC",
        price_basis="adjusted",
        open=close,
        volume=np.full(shape, 1e6),
    )


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def plain_world(n_rows: int = 20, n_assets: int = 3, n_features: int = 2, **more: Any) -> Any:
    config = load_config(None, ["market.preset=crypto", "window=4"])
    panel = plain_panel(n_rows, n_assets)
    x = np.ones((n_rows, n_assets, n_features), dtype=np.float32)
    present = np.ones((n_rows, n_assets), dtype=bool)
    splits = {"train": range(n_rows)}
    return GrowingWorld.from_history(
        panel, x, present, config, **({"splits": splits, "lookback": 30} | more)
    )


def next_bar(world: World, panel: Panel) -> Panel:
    """The first row of a panel, a day after the last row of the world."""
    bar = cut(panel, slice(0, 1))
    return replace(bar, times=world.times[-1:] + np.timedelta64(1, "D"))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux says what is resident")
def test_memory_of_many_rows_is_that_of_the_rows_kept() -> None:
    n_assets, n_features = 100, 100  # 40 kB of features a row: 6,000 of them would be 240 MB
    world = plain_world(40, n_assets, n_features, capacity=256)
    panel = plain_panel(1, n_assets)
    x, present = np.ones((n_assets, n_features), np.float32), np.ones(n_assets, dtype=bool)
    before = resident_bytes()
    for _ in range(6_000):
        row = world.append(next_bar(world, panel), x, present)
        assert len(world.kept) < 30 + 2 + 64
    assert resident_bytes() - before < 20e6
    assert row == 6_039
    assert len(world.x) == 6_040
    assert (world.x[world.kept.start : world.kept.stop] == 1.0).all()
    assert (world.x[world.kept.start - 80 : world.kept.start - 20] == 0.0).any(), "all rows stayed"


def test_rows_beyond_the_capacity_go_into_larger_mappings(markets: Callable[..., Market]) -> None:
    market = markets()
    n_rows = len(market.world.times)
    grown = market.grow(10, lookback=25, capacity=11)
    for row in range(10, n_rows):
        market.feed(grown, row)
        if row > 40:
            assert len(grown.kept) <= 25 + 2 + 64
    market.announce(grown)
    assert_same_world(grown, market.world, grown.kept)


Damage = Callable[[Panel], Panel]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda bar: replace(bar, times=bar.times - np.timedelta64(1, "D")), "in order of time"),
        (lambda bar: replace(bar, symbols=("S0", "S1", "S9")), "Feed the data it was made of"),
        (lambda bar: replace(bar, price_basis="raw"), "Feed the data it was made of"),
        (lambda bar: replace(bar, open=None), "Feed the data it was made of"),
        (lambda bar: replace(bar, freq="5min"), "Feed the data it was made of"),
        (lambda bar: replace(bar, benchmark=np.ones(1)), "has no benchmark"),
    ],
)
def test_a_bar_of_something_else_is_refused_and_changes_nothing(
    damage: Damage, message: str
) -> None:
    world = plain_world()
    before = world.state()
    bar = next_bar(world, plain_panel(1, 3))
    x, present = np.ones((3, 2), np.float32), np.ones(3, dtype=bool)
    with pytest.raises(DataError, match=message):
        world.append(damage(bar), x, present)
    _assert_same_state(world.state(), before)
    world.append(bar, x, present)


def _assert_same_state(one: Mapping[str, NDArray[Any]], two: Mapping[str, NDArray[Any]]) -> None:
    assert one.keys() == two.keys()
    for name, part in one.items():
        assert_same_bits(part, two[name], name)


def test_features_of_another_shape_or_without_numbers_are_refused() -> None:
    world = plain_world()
    bar, present = next_bar(world, plain_panel(1, 3)), np.ones(3, dtype=bool)
    with pytest.raises(DataError, match=r"features \[3, 5\].*expected 1, \[3, 2\]"):
        world.append(bar, np.ones((3, 5), np.float32), present)
    with pytest.raises(DataError, match="a feature of S1 is not a number"):
        world.append(bar, np.array([[0, 0], [np.nan, 0], [0, 0]], np.float32), present)
    with pytest.raises(DataError, match="'S7', which is not one of the 3 symbols"):
        world.set_delist_reason("S7", "merger")
    with pytest.raises(UsageError, match="capacity is 4, but there are 20 rows"):
        plain_world(capacity=4)
    copy = replace(world, window=2)
    with pytest.raises(UsageError, match="does not grow"):
        copy.append(bar, np.ones((3, 2), np.float32), present)


def test_a_factor_that_stops_coming_is_refused(markets: Callable[..., Market]) -> None:
    market = markets()
    grown = market.grow(100, lookback=10)
    bar = cut(market.panel, slice(market.skip + 100, market.skip + 101))
    with pytest.raises(DataError, match="has no adjustment factor"):
        grown.append(
            replace(bar, factor=None), market.prepared.x[100], market.prepared.present[100]
        )


def test_a_state_of_another_world_is_refused() -> None:
    world = plain_world()
    config = load_config(None, ["market.preset=crypto", "window=4"])
    state = world.state()
    for name, wrong in (
        ("rows.close", np.zeros((20, 4))),
        ("rows.present", np.zeros((20, 3))),
        ("carried.split", np.ones(4)),
        ("first", np.zeros(2, dtype=np.int64)),
    ):
        with pytest.raises(StoreError, match=name.rpartition(".")[2]):
            GrowingWorld.restore(state | {name: wrong}, world.facts, config, lookback=30)
    del state["rows.x"]
    with pytest.raises(StoreError, match="no features"):
        GrowingWorld.restore(state, world.facts, config, lookback=30)


def test_a_factor_that_begins_to_come_after_years_without_changes_nothing_before() -> None:
    panel = plain_panel(60, 3)
    factor = np.ones((60, 3))
    factor[40:, 1] = 2.0
    raw = replace(panel, price_basis="raw", factor=factor)
    config = load_config(None, ["market.preset=crypto", "window=4"])
    x, present = np.ones((60, 3, 1), dtype=np.float32), np.ones((60, 3), dtype=bool)
    settings: dict[str, Any] = {"splits": {"train": range(60)}, "lookback": 60}
    whole = GrowingWorld.from_history(raw, x, present, config, **settings)
    silent = replace(cut(raw, slice(0, 30)), factor=None)
    grown = GrowingWorld.from_history(silent, x[:30], present[:30], config, **settings)
    for t in range(30, 60):
        bar = cut(raw, slice(t, t + 1))
        grown.append(replace(bar, factor=None) if t < 40 else bar, x[t], present[t])
    assert_same_world(grown, whole, range(60))


@pytest.mark.parametrize("parts", [[1] * 60, [7, 1, 30, 22], [60]])
def test_market_view_is_the_same_however_rows_are_divided(
    markets: Callable[..., Market], parts: list[int]
) -> None:
    world, horizons = markets().world, (2, 5, 12)
    since = int(world.first_rows(np.array([60]))[0]) - world.window + 1
    whole = market_view(world, world.first_rows(np.arange(len(world.times))), horizons)
    sums, at = MarketSums.start(world.n_assets, horizons), since
    for n in parts:
        rows = slice(at, at + n)
        seen, sums = add_market_rows(world.growth[rows], world.present[rows], horizons, sums)
        assert_same_bits(seen, whole[rows], f"rows {rows}")
        at += n


def test_phase_two_may_come_at_once_or_late(markets: Callable[..., Market]) -> None:
    market = markets()
    span, config = market.world.span("test"), market.config
    usual = hierarchy(config)
    expected = run_backtest(usual, market.world, span, config)

    class Eager(HierarchyPolicy):
        def decide(self, row: Rows, held: Holdings) -> Floats:
            target = super().decide(row, held)
            self.complete()
            return target

    eager = Eager(hierarchy(config).experts, HedgeRouter(), config, 1)
    same = run_backtest(eager, market.world, span, config)
    assert_same_bits(same.actions, expected.actions, "actions")
    one, two = eager.record, usual.record
    assert one is not None
    assert two is not None
    for name in ("in_charge", "target", "own_values", "own_costs", "allowed"):
        assert_same_bits(getattr(one, name), getattr(two, name), name)
    silent = hierarchy(config, keep_record=False)
    bare = run_backtest(silent, market.world, span, config)
    assert_same_bits(bare.actions, expected.actions, "actions")
    assert silent.record is None


def test_only_the_expert_in_charge_is_asked_before_the_orders_are_out(
    markets: Callable[..., Market],
) -> None:
    market = markets()
    experts = [Tilting("up", 3.0), Tilting("down", -3.0), Tilting("still", 0.0)]
    policy = HierarchyPolicy(experts, HedgeRouter(), market.config, 1, keep_record=False)
    live = Live(market, lambda config: policy, market.world.span("test").start)
    for _ in range(25):
        for expert in experts:
            expert.asked.clear()
        policy.complete()
        before = [len(expert.asked) for expert in experts]
        assert before in ([0, 0, 0], [1, 1, 1]), "own books are asked about once"
        for expert in experts:
            expert.asked.clear()
        live.step()
        in_charge = policy.command.in_charge
        asked = [expert.asked for expert in experts]
        if live.books.row[0] > market.world.span("test").start + 1:
            assert asked == [[1] if k == in_charge else [] for k in range(3)]


def sizes(thing: object, known: set[int]) -> int:
    """Bytes of arrays and entries of containers that can be reached, the world left out."""
    if id(thing) in known or isinstance(thing, World | Config | type):
        return 0
    known.add(id(thing))
    if isinstance(thing, np.ndarray):
        return thing.nbytes
    if isinstance(thing, dict):
        return len(thing) + sum(sizes(part, known) for part in thing.values())
    if isinstance(thing, list | tuple | set | deque):
        return len(thing) + sum(sizes(part, known) for part in thing)
    return sizes(vars(thing), known) if hasattr(thing, "__dict__") else 0


def test_nothing_grows_with_the_bars_where_no_record_is_kept(
    markets: Callable[..., Market],
) -> None:
    market = markets("5min")
    policies = [hierarchy(market.config, keep_record=keep) for keep in (False, True)]
    start = market.world.span("valid").start
    grown = []
    for policy in policies:
        live = Live(market, lambda config, policy=policy: policy, start)  # type: ignore[misc]
        measured = []
        for n in range(110):
            live.step()
            if n in (25, 109):
                policy.complete()
                policy.log._events.clear()
                for expert in policy.experts[:2]:
                    expert.asked.clear()  # type: ignore[attr-defined]
                measured.append(sizes(policy, set()))
        grown.append(measured[1] - measured[0])
    assert grown[0] == 0
    assert grown[1] > 0, "a record is kept, and the count does not see it"


def test_own_books_that_would_begin_at_rows_let_go_are_refused(
    markets: Callable[..., Market],
) -> None:
    market = markets()
    policy = hierarchy(market.config)
    grown = market.grow(60, lookback=0)
    for row in range(60, 131):
        market.feed(grown, row)
    policy.start(grown, live_span(130))
    rule = ActionRule.from_config(market.config, "weights")
    books = Books(grown, rule, RewardConfig(), 1, live_span(130))
    with pytest.raises(DataError, match=r"own books begin at row .* the world holds rows from"):
        policy.decide(books.row, books.holdings())


def test_a_policy_that_does_not_say_how_far_it_looks_back_is_refused() -> None:
    class Silent:
        name = "silent"
        kind: ActionKind = "weights"

        def start(self, world: World, span: range) -> None:
            """Nothing to prepare."""

        def decide(self, row: Rows, held: Holdings) -> Floats:
            return held.weights.astype(np.float64)

    with pytest.raises(UsageError, match="'silent' does not say how far it looks back"):
        lookback_of(Silent())


def test_a_hierarchy_of_other_experts_does_not_take_the_state(
    markets: Callable[..., Market],
) -> None:
    market = markets()
    live = Live(market, hierarchy, market.world.span("test").start)
    live.step()
    assert isinstance(live.policy, HierarchyPolicy)
    state = live.policy.state()
    smaller = HierarchyPolicy([Tilting("up", 3.0)], HedgeRouter(), market.config, 1)
    smaller.start(live.world, live_span(int(live.books.row[0])))
    with pytest.raises(StoreError, match="Restore it with the settings it was saved with"):
        smaller.restore(state)
