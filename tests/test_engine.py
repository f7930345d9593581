"""The decision engine: bit for bit the backtest, stopped anywhere, and unmoved by bad bars."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bundles import EXPORTED
from engines import Served, a_share, daily, payload

from echelon.backtest.run import run_backtest
from echelon.errors import DamagedError, DataError, InvalidDataError, StaleBarsError, StoreError
from echelon.serving.decision import WHY, Decision
from echelon.serving.engine import Account, DecisionEngine
from echelon.serving.export import ExportRequest
from echelon.serving.replay import replay
from echelon.serving.state_file import read_state, write_state

RULES = ("equal_weight", "buy_and_hold", "min_variance", "momentum", "forecast", "random", "cash")
Get = Callable[..., Served]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Get:
    """Bundles by market and algorithm, each made once."""
    known: dict[tuple[str, str, ExportRequest | None], Served] = {}

    def get(
        market: str = "daily", algo: str = "A2C", request: ExportRequest | None = None
    ) -> Served:
        key = market, algo, request
        if key not in known:
            path = tmp_path_factory.mktemp(f"{market}-{algo}")
            if market == "daily":
                known[key] = daily(path, bars_file, algo, request)
            else:
                known[key] = a_share(path, market, algo, request)
        return known[key]

    return get


@pytest.mark.parametrize("algo", EXPORTED)
@pytest.mark.parametrize("market", ["daily", "1d", "5min"])
def test_engine_equals_the_backtest_bit_for_bit(served: Get, market: str, algo: str) -> None:
    known = served(market, algo)
    done = replay(known.bundle, known.store, known.world, known.rows(24))
    assert done.differences == ()
    assert done.bars >= 24
    assert done.orders > 0


def test_scores_of_a_cross_fitted_encoder_are_streamed_as_in_the_backtest(
    tmp_path: Path, bars_file: Path
) -> None:
    known = daily(
        tmp_path,
        bars_file,
        "SAC",
        None,
        *("model.direct=8", "pretrain.targets=[rank, return]", "pretrain.horizons=[1, 3]"),
        *("pretrain.loss=ic", "pretrain.cross_fit=2"),
    )
    done = replay(known.bundle, known.store, known.world, known.rows(12))
    assert done.differences == ()
    assert done.orders > 0


def test_ensemble_of_hierarchies_and_adapters_equal_their_backtests(
    tmp_path: Path, bars_file: Path
) -> None:
    several = daily(
        tmp_path / "ensemble", bars_file, "HIERARCHY", ExportRequest(ensemble=True), seeds=(1, 2)
    )
    adapted = daily(
        tmp_path / "lora",
        bars_file,
        "HIERARCHY",
        None,
        *("lora.enabled=true", "lora.every_updates=1", "lora.refresh_updates=1", "lora.lr=0.05"),
    )
    graphs = [name for name in adapted.bundle.graphs if name.startswith("encoder")]
    assert len(graphs) > 1, "the adapters changed nothing"
    for known in (several, adapted):
        done = replay(known.bundle, known.store, known.world, known.rows(8))
        assert done.differences == ()


DESK = (
    "experts.rules=[min_variance, forecast]",
    "forecast.model=ridge",
    "eval.rebalance_bars=5",
    "eval.estimation_bars=15",
)
"""Rules on the desk, which rebalance within the bars that are compared."""


@pytest.mark.parametrize(
    ("market", "routed"),
    [("1d", ()), ("daily", ("meta_router.prior=fixed_share", "meta_router.command=blend"))],
)
def test_hierarchy_with_rules_on_the_engine_equals_its_backtest(
    tmp_path: Path, bars_file: Path, market: str, routed: tuple[str, ...]
) -> None:
    if market == "daily":
        ensemble = ExportRequest(ensemble=True)
        known = daily(tmp_path, bars_file, "HIERARCHY", ensemble, *DESK, *routed, seeds=(1, 2))
    else:
        known = a_share(tmp_path, market, "HIERARCHY", None, *DESK, *routed)
    done = replay(known.bundle, known.store, known.world, known.rows(14))
    assert done.differences == ()
    assert done.orders > 0
    spec = known.bundle.spec
    hierarchy = spec["members"][0] if spec["kind"] == "ensemble" else spec
    kinds = [expert["kind"] for expert in hierarchy["experts"]]
    assert kinds == ["weights"] * 3 + ["rule", "forecast"]


_LIMITS = ("risk.max_drawdown=0.03", "risk.target_volatility=0.1")


@pytest.mark.parametrize(
    ("market", "algo"), [("daily", "HIERARCHY"), ("daily", "A2C"), ("1d", "A2C"), ("5min", "SAC")]
)
def test_budget_on_the_engine_equals_its_backtest_also_restored_at_every_bar(
    tmp_path: Path, bars_file: Path, market: str, algo: str
) -> None:
    if market == "daily":
        known = daily(tmp_path, bars_file, algo, None, *_LIMITS)
    else:
        known = a_share(tmp_path, market, algo, None, *_LIMITS)
    rows = known.rows(24)
    done = replay(known.bundle, known.store, known.world, rows)
    assert done.differences == ()
    assert done.orders > 0
    backtest = run_backtest(known.bundle.policy(), known.world, rows, known.bundle.config)
    assert backtest.budget is not None
    engine, caps = known.engine(24, tmp_path / "state"), []
    for bars in known.bar_sets(engine):
        answer = engine.answer(bars)
        caps.append(answer["exposure_cap"])
        engine = DecisionEngine.restore(known.bundle, tmp_path / "state")
        assert engine.decision == answer
    assert caps[: len(backtest.budget.cap)] == backtest.budget.cap.tolist()
    assert min(caps) < max(caps)


def test_ensemble_of_wide_actors_equals_its_backtest(tmp_path: Path, bars_file: Path) -> None:
    settings = ("expert.actor=top_k", "expert.top_share=0.3", "expert.buffer=2")
    wide = ("reward={kind: active}", "expert.horizon=10", "pretrain.cross_fit=2", *settings)
    known = daily(tmp_path, bars_file, "APG", ExportRequest(ensemble=True), *wide, seeds=(1, 2))
    assert [m["kind"] for m in known.bundle.spec["members"]] == ["targets", "targets"]
    done = replay(known.bundle, known.store, known.world, known.rows(24))
    assert done.differences == ()
    assert done.orders > 0


@pytest.mark.parametrize("rule", RULES)
def test_rule_on_the_engine_equals_its_backtest(served: Get, rule: str) -> None:
    known = served("1d", "A2C", ExportRequest(baseline=rule))
    done = replay(known.bundle, known.store, known.world, known.rows(12))
    assert done.differences == ()
    assert (done.orders > 0) == (rule != "cash")


def test_replay_names_the_bar_at_which_the_engine_differs(
    served: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = served()
    rows = known.rows(6)
    push = DecisionEngine.push

    def push_other(self: DecisionEngine, bars: object, account: object = None) -> Decision:
        decision = push(self, bars, account)  # type: ignore[arg-type]
        return replace(decision, equity=decision.equity + 1.0)

    monkeypatch.setattr(DecisionEngine, "push", push_other)
    differences = replay(known.bundle, known.store, known.world, rows).differences
    assert len(differences) == 6
    assert str(known.world.times[rows.start]) in differences[0]


def _decisions(known: Served, bars: int) -> list[dict[str, object]]:
    engine = known.engine(bars)
    return [engine.push(one).to_dict() for one in known.bar_sets(engine)]


@pytest.mark.parametrize(
    ("market", "algo"), [("daily", "HIERARCHY"), ("1d", "A2C"), ("5min", "SAC")]
)
def test_engine_stopped_and_restored_at_every_bar_decides_the_same(
    served: Get, tmp_path: Path, market: str, algo: str
) -> None:
    known = served(market, algo)
    expected = _decisions(known, 10)
    engine = known.engine(10, tmp_path / "state")
    answers = []
    for bars in known.bar_sets(engine):
        answers.append(engine.answer(bars))
        engine = DecisionEngine.restore(known.bundle, tmp_path / "state")
        assert engine.decision == answers[-1]
    assert answers == expected
    assert len(expected) >= 10


def test_rule_restored_at_every_bar_decides_the_same(served: Get, tmp_path: Path) -> None:
    known = served("1d", "A2C", ExportRequest(baseline="random"))
    expected = _decisions(known, 8)
    engine = known.engine(8, tmp_path / "state")
    answers = []
    for bars in known.bar_sets(engine):
        answers.append(engine.answer(bars))
        engine = DecisionEngine.restore(known.bundle, tmp_path / "state")
    assert answers == expected


def test_work_that_no_order_waits_for_may_be_done_at_any_time(served: Get) -> None:
    known = served("daily", "HIERARCHY")
    expected = _decisions(known, 10)
    engine, answers = known.engine(10), []
    for bars in known.bar_sets(engine):
        answers.append(engine.push(bars).to_dict())
        engine.complete()
        engine.complete()
    assert answers == expected


def test_another_future_changes_no_earlier_decision(served: Get) -> None:
    known = served("1d", "SAC")
    expected = _decisions(known, 10)
    engine, answers = known.engine(10), []
    for k, bars in enumerate(known.bar_sets(engine)):
        if k >= 5:
            bars = replace(
                bars,
                **{n: getattr(bars, n) * 1.07 for n in ("open", "high", "low", "close")},
            )
        answers.append(engine.push(bars).to_dict())
    assert answers[:5] == expected[:5]
    assert answers[5:] != expected[5:]


def test_fresh_process_without_torch_decides_the_same(served: Get, tmp_path: Path) -> None:
    known = served("daily", "HIERARCHY")
    expected = _decisions(known, 5)
    script = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from datetime import date
from pathlib import Path
from echelon.data.build import PanelRequest, read_bar_sets
from echelon.data.store import Store
from echelon.serving.bundle import load_bundle
from echelon.serving.engine import DecisionEngine
bundle, store = load_bundle(Path({str(known.bundle.path)!r})), Path({str(known.store)!r})
day = date.fromisoformat({str(known.world.times[known.rows(5).start - 1])[:10]!r})
last = date.fromisoformat({str(known.world.times[-1])[:10]!r})
engine = DecisionEngine.from_store(bundle, store, until=day)
request = PanelRequest(bundle.symbols, None, last, "auto", bundle.config.data.delist_after)
name = bundle.universe["dataset"]["name"]
sets = read_bar_sets(Store(store), name, request, engine.time.item())
print(json.dumps([engine.push(bars).to_dict() for bars in sets]))
heavy = {{"torch", "stable_baselines3", "matplotlib", "arch", "sklearn"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps(expected))


def test_bad_bars_are_refused_by_name_and_change_nothing(served: Get) -> None:
    known = served("1d", "A2C")
    expected = _decisions(known, 4)
    engine = known.engine(4)
    sets = list(known.bar_sets(engine))
    symbol = next(s for s, c in zip(engine.symbols, sets[1].close, strict=True) if c == c)
    n = engine.symbols.index(symbol)

    def changed(**values: float) -> object:
        parts = {}
        for name, value in values.items():
            parts[name] = getattr(sets[1], name).copy()
            parts[name][n] = value
        return replace(sets[1], **parts)

    first = engine.push(sets[0]).to_dict()
    stale = (sets[0], replace(sets[1], time=sets[0].time - np.timedelta64(7, "D")))
    for bars in stale:
        with pytest.raises(StaleBarsError, match="not after the last"):
            engine.push(bars)
    bad = {
        "close is -3": changed(close=-3.0),
        "close is 1e+300": changed(close=1e300),
        "open is inf": changed(open=np.inf),
        "high is": changed(high=0.001),
        "not a session": replace(sets[1], time=np.datetime64("2023-10-28", "us")),
        "is missing before": sets[2],
        "grid of 1d bars": replace(sets[1], time=sets[1].time + np.timedelta64(5, "m")),
        "expected float64": replace(sets[1], close=sets[1].close[:-1]),
    }
    for message, bars in bad.items():
        with pytest.raises(DataError, match=message.replace("+", r"\+")):
            engine.push(bars)  # type: ignore[arg-type]
    answers = [first, *(engine.push(bars).to_dict() for bars in sets[1:])]
    assert answers == expected


def test_bar_outside_trading_hours_is_refused(served: Get) -> None:
    known = served("5min", "SAC")
    engine = known.engine(4)
    bars = next(known.bar_sets(engine))
    for minute in ("03:00", "12:00", "15:05"):
        with pytest.raises(DataError, match="outside the hours of XSHG"):
            engine.push(replace(bars, time=np.datetime64(f"{str(bars.time)[:10]}T{minute}", "us")))
    assert engine.push(bars).time == bars.time


def test_bars_of_a_client_become_the_stored_ones(served: Get) -> None:
    known = served("1d", "A2C")
    expected = _decisions(known, 5)
    engine, answers = known.engine(5), []
    for bars in known.bar_sets(engine):
        read = engine.read_bars(str(bars.time), payload(engine, bars), bars.benchmark)
        whole = replace(
            read,
            members=bars.members,
            delisted=bars.delisted,
            listed=bars.listed,
            reasons=bars.reasons,
        )
        answers.append(engine.push(whole).to_dict())
    assert answers == expected


def test_every_problem_of_a_clients_bars_is_listed(served: Get) -> None:
    engine = served("1d", "A2C").engine(5)
    good = payload(engine, next(served("1d", "A2C").bar_sets(engine)))
    first = str(good[0]["symbol"])
    bars = [
        {**good[0], "close": "12"},
        {**good[0]},
        {**good[1], "symbol": "NOPE"},
        {**good[2], "vwap": 1.0},
        {k: v for k, v in good[3].items() if k != "open"},
    ]
    with pytest.raises(InvalidDataError) as error:
        engine.read_bars("2023-10-20", bars)
    text = str(error.value)
    for part in ("'12' is no number", f"{first!r} is given twice", "'NOPE' is not in", "'vwap'"):
        assert part in text
    assert "field 'open'" in text
    assert len(error.value.problems) == 5
    with pytest.raises(DataError, match="is no time"):
        engine.read_bars("yesterday", good)


def test_orders_keep_the_rules_and_symbols_without_one_say_why(served: Get) -> None:
    known = served("1d", "A2C", ExportRequest(baseline="equal_weight"))
    engine = known.engine(40)
    seen: set[str] = set()
    for bars in known.bar_sets(engine):
        decision = engine.push(bars)
        assert {order.symbol for order in decision.orders}.isdisjoint(decision.why)
        assert {order.symbol for order in decision.orders} | set(decision.why) == set(
            engine.symbols
        )
        for order in decision.orders:
            assert order.shares > 0
            if order.side == "buy":
                assert order.shares % 100 == 0
        cost = sum(o.shares * o.price for o in decision.orders if o.side == "buy")
        gained = sum(o.shares * o.price for o in decision.orders if o.side == "sell")
        assert cost <= decision.cash + gained
        seen |= set(decision.why.values())
    assert seen <= set(WHY)
    assert {"no_change", "suspended"} <= seen


def test_account_of_ones_own_is_decided_on_as_it_is(served: Get) -> None:
    known = served("daily", "SAC")
    engine = known.engine(3)
    sets = list(known.bar_sets(engine))
    symbol = engine.symbols[1]
    engine.push(sets[0])
    account = Account(1_000.0, {symbol: 50.0})
    decision = engine.push(sets[1], account)
    assert decision.cash == 1_000.0
    assert decision.fills == ()
    assert decision.shares.tolist() == [0.0, 50.0, 0.0, 0.0]
    assert decision.equity == pytest.approx(1_000.0 + 50.0 * sets[1].close[1], rel=1e-12)
    for wrong, message in (
        (Account(-1.0, {}), "cash is -1"),
        (Account(1.0, {"NOPE": 1.0}), "'NOPE', which is not"),
        (Account(1.0, {symbol: float("nan")}), "nan shares"),
        (Account(1.0, {symbol: 1.0}, {symbol: 2.0}), "locks more"),
    ):
        with pytest.raises(DataError, match=message):
            engine.push(sets[2], wrong)
    assert engine.push(sets[2]).fills  # the orders of the decision before


def test_hierarchy_says_who_is_in_charge_and_how_probable_that_was(served: Get) -> None:
    known = served("daily", "HIERARCHY")
    engine = known.engine(6)
    for bars in known.bar_sets(engine):
        command = engine.push(bars).in_charge
        assert command is not None
        assert command.expert not in command.masked
        assert command.probabilities is not None
        assert sum(command.probabilities.values()) == pytest.approx(1.0)
        if command.decided_now:
            best = max(command.probabilities, key=command.probabilities.__getitem__)
            assert command.expert == best


def test_saved_state_of_another_bundle_or_damaged_is_refused(served: Get, tmp_path: Path) -> None:
    known, stranger = served("daily", "A2C"), served("daily", "SAC")
    path = tmp_path / "state"
    engine = known.engine(3, path)
    engine.push(next(known.bar_sets(engine)))
    with pytest.raises(StoreError, match="state of another bundle"):
        DecisionEngine.restore(stranger.bundle, path)
    whole = path.read_bytes()
    for at in (0, 20, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DamagedError, match="state"):
            DecisionEngine.restore(known.bundle, path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamagedError, match="state"):
        DecisionEngine.restore(known.bundle, path)


def _another_type(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float16)


def _no_number(array: np.ndarray) -> np.ndarray:
    return np.full_like(array, np.nan)


@pytest.mark.parametrize("algo", ["A2C", "HIERARCHY"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("pending", lambda array: array[:, :-1]),
        ("pending", _another_type),
        ("pending", lambda array: np.full_like(array, 7 if array.dtype == np.int8 else np.inf)),
        ("books.row", lambda array: array[:0]),
        ("books.row", lambda array: array - 1),
        ("books.cash", _no_number),
        ("books.shares", _no_number),
        ("world.first", lambda array: array + 1),
        ("world.first", lambda array: array + 2**60),
        ("world.rows", lambda array: array[-2:]),
        ("panel", None),
        ("features", None),
        ("world", None),
        ("decision", None),
        ("digest", None),
        ("policy.run.obs", _another_type),
        ("policy.run.obs_allowed", _another_type),
        ("policy.run.in_charge", lambda array: array + 100),
    ],
)
def test_state_that_somebody_else_wrote_is_refused(
    served: Get,
    tmp_path: Path,
    algo: str,
    name: str,
    change: Callable[[np.ndarray], np.ndarray] | None,
) -> None:
    """The hash fits: a bundle of the same name says nothing of who wrote the state."""
    known, path = served("daily", algo), tmp_path / "state"
    engine = known.engine(3, path)
    engine.push(next(known.bar_sets(engine)))
    arrays, facts = read_state(path, "")
    names = [key for key in arrays if key == name or key.startswith(f"{name}.")]
    if change is None:
        facts[name] = ["text"]
    elif names:
        arrays |= {key: change(arrays[key]) for key in names}
    else:
        pytest.skip(f"the state of {algo} has no {name}: hierarchies have")
    write_state(path, arrays, facts)
    with pytest.raises(DamagedError, match=rf"{path}.*Move it away"):
        DecisionEngine.restore(known.bundle, path)


def test_engine_that_failed_in_the_middle_of_a_bar_does_not_go_on(
    served: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = served("daily", "A2C")
    engine = known.engine(3)
    sets = list(known.bar_sets(engine))
    monkeypatch.setattr(engine.policy, "decide", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.push(sets[0])
    with pytest.raises(StoreError, match="failed in the middle of a bar"):
        engine.push(sets[1])


def test_rows_that_nobody_looks_back_to_are_let_go(served: Get) -> None:
    known = served("daily", "A2C", ExportRequest(baseline="cash"))
    rows = known.rows(150)
    engine = known.engine(150)
    for bars in known.bar_sets(engine):
        engine.push(bars)
    kept = engine.summary()["rows"]
    assert kept["last"] == len(known.world.times) - 1
    assert kept["first"] > rows.start
    backtest = run_backtest(known.bundle.policy(), known.world, rows, known.bundle.config)
    assert engine.summary()["equity"] == backtest.value[-1]
