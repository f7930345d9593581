"""The guards: thresholds and evidence by hand, alarms in a live engine, the same when replayed."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from engines import Served, daily
from safetensors.numpy import load_file, save_file

from echelon.config.live import DriftConfig, GuardConfig, LiveConfig
from echelon.data.stream import BarSet
from echelon.errors import DamagedError
from echelon.live.brokers import open_broker
from echelon.live.engine import Command, LiveEngine
from echelon.live.feeds import open_feed
from echelon.live.guards import Guards
from echelon.live.journal import Journal
from echelon.live.replay import replay_journal
from echelon.monitoring.drift import (
    QUANTITIES,
    TESTS,
    DriftTests,
    Expectation,
    market_return,
    observe,
    pairs_of_backtest,
)
from echelon.monitoring.guard import STATISTICS, Reference, RowGuard, Tail
from echelon.monitoring.metrics import METRICS
from echelon.serving.bundle import MANIFEST, load_bundle, write_manifest
from echelon.serving.guard_reference import GUARDS
from echelon.types import Floats, Floats32

YEAR = 252.0
N, F = 10, 6


# Bars unlike the training data.


def test_a_threshold_follows_from_the_blocks_by_hand() -> None:
    values = np.repeat([5.0, 1.0, 9.0, 2.0, 3.0, 7.0, 4.0, 0.0], 2)  # eight blocks of two bars
    tail = Tail.from_values(values, values[:2], block=2)
    # the upper quarter: 9 and 7, above 5; they are apart, so two observations
    assert tail == Tail(5.0, 0.25, 6.0, 2.0, 5.0)
    # P(excess > c·6) = (1 + c)^−2, and a quarter of the blocks has one: 0.01 is at c = 4
    assert tail.threshold(0.01) == pytest.approx(5.0 + 6.0 * 4.0)
    assert tail.threshold(0.5) == 5.0
    neighbours = Tail.from_values(np.repeat([0.0, 9.0, 7.0, 5.0], 2), values[:2], block=2)
    assert neighbours.k == 1.0


def test_a_threshold_is_passed_as_often_as_it_says_though_the_tail_is_an_estimate() -> None:
    rng, passed = np.random.default_rng(1), []
    for _ in range(3_000):
        blocks = rng.exponential(size=41)
        limit = Tail.from_values(blocks[:40], blocks[:1] * 0.0, block=1).threshold(0.02)
        passed.append(blocks[40] > limit)
    assert 0.01 < np.mean(passed) < 0.03


def _walk(rng: np.random.Generator, bars: int, mixing: Floats) -> Floats32:
    """x[T,N,F]: correlated features that go on from bar to bar."""
    shocks = rng.standard_t(6, (bars, N, F)) @ mixing
    x = np.empty_like(shocks)
    level = np.zeros((N, F))
    for t in range(bars):
        level = 0.8 * level + 0.6 * shocks[t]
        x[t] = level
    return x.astype(np.float32)


class _Years:
    """Six years to learn from, two to validate, and held-out ones."""

    def __init__(self, seed: int = 0, years: int = 12) -> None:
        rng = np.random.default_rng(seed)
        mixing = np.linalg.qr(rng.normal(size=(F, F)))[0] * np.linspace(1.0, 0.2, F)
        self.x = _walk(rng, 252 * (8 + years), mixing)
        self.shown = np.ones(self.x.shape[:2], dtype=np.bool_)
        self.z = self.x.mean(axis=1) @ rng.normal(size=(F, 4)).astype(np.float32)
        train, valid = range(0, 252 * 6), range(252 * 6, 252 * 8)
        self.reference = Reference.fit(self.x, self.shown, train, valid, self.z, YEAR)
        self.first = valid.stop

    def alarms(self, x: Floats32, z: Floats32, bars: int | None = None) -> list[tuple[int, str]]:
        guard = RowGuard(self.reference, N, 0.5)
        rows = range(self.first, len(x) if bars is None else self.first + bars)
        return [
            (t - self.first, alarm.name)
            for t in rows
            for alarm in guard.check(x[t], x[t - 1], self.shown[t], z[t])
            if alarm.on
        ]


@pytest.fixture(scope="module")
def years() -> _Years:
    return _Years()


def test_ordinary_years_raise_no_more_alarms_than_stated() -> None:
    every = [_Years(seed) for seed in range(6)]
    alarms = sum(len(some.alarms(some.x, some.z)) for some in every)
    assert alarms <= 0.5 * 12 * 6


@pytest.mark.parametrize("fault", ["scaled", "still", "columns", "symbol", "embedding"])
def test_a_fault_is_seen_within_days_and_by_its_statistic(years: _Years, fault: str) -> None:
    x, z = years.x.copy(), years.z.copy()
    after = x[years.first :]
    if fault == "scaled":
        after[:, :, 2] *= 100.0
    elif fault == "still":
        after[:, 4, :4] = years.x[years.first - 1, 4, :4]
    elif fault == "columns":
        after[:, :, [0, F - 1]] = years.x[years.first :, :, [F - 1, 0]] * 3.0
    elif fault == "symbol":
        after[:, 7] *= 30.0
    else:
        z[years.first :] += 30.0
    most, names = {"scaled": (1, ("out_of_range",)), "still": (9, ("still",))}.get(
        fault, (20, ("symbol",) if fault == "symbol" else tuple(STATISTICS))
    )
    alarms = years.alarms(x, z, bars=60)
    assert alarms, "nothing was seen"
    assert alarms[0][0] < most
    assert {name for _, name in alarms} & set(names)
    if fault == "embedding":
        assert {name for _, name in alarms} == {"embedding"}


def test_an_alarm_begins_once_names_the_culprit_and_ends_when_a_block_has_passed(
    years: _Years,
) -> None:
    guard, x = RowGuard(years.reference, N, 0.5), years.x.copy()
    first = years.first
    x[first : first + 5, :, 2] *= 100.0
    events = []
    for t in range(first, first + 60):
        events += [(t - first, a) for a in guard.check(x[t], x[t - 1], years.shown[t], None)]
    own = [(t, a.on, a.culprit) for t, a in events if a.name == "out_of_range"]
    assert [on for _, on, _ in own] == [True, False]
    assert own[0][::2] == (0, ("feature", 2))
    assert own[1][0] > years.reference.block


def test_symbols_that_are_not_shown_do_not_count_and_nobody_shown_changes_nothing(
    years: _Years,
) -> None:
    guard, t = RowGuard(years.reference, N, 0.5), years.first
    x, shown = years.x[t].copy(), years.shown[t].copy()
    x[3] = 1e9
    shown[3] = False
    assert guard.check(x, years.x[t - 1], shown, None) == []
    before = guard.state()["levels"]
    assert guard.check(x, years.x[t - 1], ~years.shown[t], None) == []
    assert np.array_equal(guard.state()["levels"], before)


def test_a_reference_survives_being_saved_and_a_damaged_one_is_refused(years: _Years) -> None:
    arrays = years.reference.arrays()
    again = Reference.from_arrays(arrays, F)
    assert np.array_equal(again.thresholds(0.5, N), years.reference.thresholds(0.5, N))
    for name, part in (
        ("whiten", np.zeros((F, F - 1), np.float32)),
        ("low", np.full(F, np.nan, np.float32)),
        ("tail.still", np.zeros(5)),
    ):
        with pytest.raises(ValueError, match=r"whiten|low|above 0"):
            Reference.from_arrays({**arrays, name: part}, F)
    with pytest.raises(ValueError, match="no tail of distance"):
        Reference.from_arrays({k: v for k, v in arrays.items() if k != "tail.distance"}, F)


# Drift.


def _expectation(quantity: str, bound: float, low: float, high: float) -> Expectation:
    """With a test of one quantity alone, in its first direction."""
    own = [test.quantity == quantity for test in TESTS]
    own = [here and k == own.index(True) for k, here in enumerate(own)]
    columns = [1.0, bound, bound, low, high]
    return Expectation(*np.array([[c if here else 0.0 for here in own] for c in columns]))


def _bar(**values: float) -> Floats:
    """Pairs[Q,2] of a bar."""
    return np.array([(values.get(name, 0.0), 1.0) for name in QUANTITIES])


def test_the_evidence_of_a_test_is_its_bets_money_by_hand() -> None:
    tests = DriftTests(_expectation("cost", 0.25, 0.0, 1.0), per_year=0.5, periods_per_year=YEAR)
    assert tests.limit == 2.0
    sizes = np.array([0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 0.95]) / 0.25
    money, k = np.zeros(8), [test.quantity for test in TESTS].index("cost")
    for cost in (0.25, 0.5, 0.1, 2.0):
        assert tests.step(_bar(cost=cost)) == {}
        money = (money + 1.0 / (YEAR * 8)) * (1.0 + sizes * (min(cost, 1.0) - 0.25))
        assert tests.money[k] == pytest.approx(money)
    alarms: dict[int, float] = {}
    bars = 0
    while not alarms:
        alarms, bars = tests.step(_bar(cost=1.0)), bars + 1
        money = (money + 1.0 / (YEAR * 8)) * (1.0 + sizes * 0.75)
    assert alarms == {k: pytest.approx(money.sum())}
    assert money.sum() >= 2.0
    assert bars < 10
    assert tests.evidence[k] == 0.0


def test_at_the_worst_mean_of_the_hypothesis_alarms_are_no_more_than_stated() -> None:
    rng, years = np.random.default_rng(2), 4_000
    tests = DriftTests(_expectation("cost", 0.3, 0.0, 1.0), per_year=0.5, periods_per_year=12.0)
    alarms = sum(len(tests.step(_bar(cost=float(bad)))) for bad in rng.random(years * 12) < 0.3)
    assert 0 < alarms <= 0.5 * years + 2.0 * math.sqrt(0.5 * years)


def test_a_worse_mean_is_seen_and_a_better_one_is_not() -> None:
    rng = np.random.default_rng(3)
    for mean, seen in ((0.6, True), (0.2, False)):
        tests = DriftTests(_expectation("cost", 0.3, 0.0, 1.0), 0.5, YEAR)
        alarms = [bool(tests.step(_bar(cost=float(b)))) for b in rng.random(500) < mean]
        assert any(alarms) is seen


def test_ratios_wait_until_there_is_something_to_divide_by() -> None:
    pairs = np.array([(1.0, 2.0), (0.0, 0.0), (3.0, 0.0), (1.0, 2.0), (5.0, 5.0)])
    assert observe(pairs, 1).tolist() == [0.5, 2.0, 1.0]
    assert observe(pairs, 2).tolist() == [0.5, 2.0]


def test_the_expectation_allows_for_what_an_estimate_does_not_know() -> None:
    rng = np.random.default_rng(4)
    pairs = np.ones((500, len(QUANTITIES), 2))
    pairs[:, :, 0] = rng.normal(0.001, 0.01, (500, len(QUANTITIES)))
    made = Expectation.fit(pairs, YEAR)
    returns = pairs[:, 0, 0]
    assert made.expected[0] == pytest.approx(returns.mean(), abs=2e-4)
    assert made.bound[0] <= made.expected[0] - 1.6 * returns.std() / 500**0.5
    assert made.bound[2] > made.expected[2]  # more turnover is one test, less another
    assert made.bound[3] < made.expected[3]
    few = Expectation.fit(pairs[:5], YEAR)
    assert not few.bars.any()
    quiet = DriftTests(few, 0.5, YEAR)
    assert quiet.step(pairs[0]) == {}


def test_a_backtests_pairs_by_hand() -> None:
    fills = {
        "shares": np.array([[10.0, -5.0]]),
        "price": np.array([[11.0, 19.0]]),
        "cost": np.array([[1.0, 0.5]]),
        "arrival": np.array([[10.0, 20.0]]),
        "asked": np.array([[True, True]]),
    }
    whole = np.array([[True, False]])
    value, half, market = np.array([1000.0, 1010.0]), np.array([0.5]), np.array([0.004])
    (pairs,) = pairs_of_backtest(value, half, market, fills, whole)
    expected = [
        *((0.01, 1.0), (0.008, 1.0), (0.205, 1.0), (1.5, 205.0), (1.0, 2.0)),
        *((15.0, 200.0), (15.0, 200.0)),
    ]
    assert pairs == pytest.approx(np.array(expected))
    before, now = np.array([1.0, 2.0, np.nan]), np.array([1.1, 2.0, 3.0])
    assert market_return(before, now, np.array([True, True, True])) == pytest.approx(0.05)


# In a live engine.

BARS = 16


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Served:
    return daily(tmp_path_factory.mktemp("served"), bars_file, "A2C")


def _config(action: Literal["warn", "reduce", "halt"] = "warn") -> LiveConfig:
    guard = GuardConfig(action=action, false_alarms_per_year=0.5)
    return LiveConfig(sync=False, snapshot_every=4, guard=guard)


def _open(known: Served, path: Path, config: LiveConfig) -> LiveEngine:
    until = known.world.times[known.rows(BARS).start - 1].astype("datetime64[D]").item()
    assert isinstance(until, date)
    return LiveEngine.open(
        *(known.bundle, known.store, path, open_feed("store", known.bundle, known.store)),
        *(open_broker("paper", known.bundle, path, known.store, until, config), config),
        until=until,
    )


def _faulty(known: Served, engine: LiveEngine, since: int) -> Iterator[BarSet]:
    """What comes next, with volumes in lots of 100 up to a bar, and in shares from then on."""
    for bars in known.bar_sets(engine.decider, BARS - engine.state.bars):
        scaled = engine.state.bars >= since
        yield (
            replace(bars, volume=bars.volume * 1e4) if scaled and bars.volume is not None else bars
        )


def _entries(path: Path, *kinds: str) -> list[dict[str, Any]]:
    with Journal.read(path) as journal:
        return [entry.body for entry in journal.entries(kinds=kinds)]


def _drive(known: Served, path: Path, config: LiveConfig, since: int) -> None:
    with _open(known, path, config) as engine:
        for bars in _faulty(known, engine, since):
            engine.step(bars)


@pytest.mark.parametrize(
    ("action", "mode"), [("warn", "running"), ("reduce", "reduce_only"), ("halt", "halted")]
)
def test_a_scaled_feature_does_what_is_configured_before_the_bars_orders(
    known: Served, tmp_path: Path, action: Literal["warn", "reduce", "halt"], mode: str
) -> None:
    path = tmp_path / "j.db"
    _drive(known, path, _config(action), since=8)
    settings, *alarms = _entries(path, "guard")
    assert settings["event"] == "settings"
    alarm = next(body for body in alarms if body["event"] == "alarm")
    assert alarm["guard"] == "unlike_training"
    assert alarm["action"] == action
    times = [body["time"] for body in _entries(path, "bars")]
    assert alarm["time"] in times[8:11]
    with _open(known, path, _config(action)) as engine:
        assert engine.state.mode == mode
        engine.obey(Command("resume", "ann"))
        assert engine.state.mode == "running"
    bars_of = {body["bar"] for body in _entries(path, "order") if body["side"] == "buy"}
    after = {time for time in times if time >= alarm["time"]}
    assert mode == "running" or not bars_of & after
    codes = {body["code"] for body in _entries(path, "stopped")}
    assert codes <= ({mode} if mode != "running" else set())
    with Journal.read(path) as journal:
        assert replay_journal(known.bundle, journal).differences == ()


def test_the_guards_go_on_behind_a_death_as_if_nothing_had_been(
    known: Served, tmp_path: Path
) -> None:
    _drive(known, tmp_path / "whole.db", _config(), since=8)
    again = tmp_path / "again.db"
    while True:
        with _open(known, again, _config()) as engine:  # dies behind every bar
            bars = next(_faulty(known, engine, since=8), None)
            if bars is None:
                states = [engine.guards.state()]
                break
            engine.step(bars)
    with _open(known, tmp_path / "whole.db", _config()) as engine:
        states.append(engine.guards.state())
    assert _entries(again, "guard") == _entries(tmp_path / "whole.db", "guard")
    (one, facts), (other, expected) = states
    assert facts == expected
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name], equal_nan=True) for name in one)


def test_a_replay_finds_what_the_guards_did_not_say(
    known: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j.db"
    _drive(known, path, _config(), since=8)
    check = Guards.check
    with Journal.read(path) as journal:
        monkeypatch.setattr(Guards, "check", lambda *_: [])
        assert "another entry of the guards" in replay_journal(known.bundle, journal).differences[0]

        def doubled(*arguments: Any) -> list[dict[str, Any]]:
            return [*check(*arguments), {"time": "now"}]

        monkeypatch.setattr(Guards, "check", doubled)
        differences = replay_journal(known.bundle, journal).differences
    assert any("is missing" in text for text in differences)


def test_settings_that_change_are_an_entry_and_begin_afresh(known: Served, tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    for config in (_config(), _config(), _config("halt"), LiveConfig(drift=DriftConfig())):
        with _open(known, path, config) as engine:
            engine.run(bars=3)
    actions = [body["unlike_training"]["action"] for body in _entries(path, "guard")]
    assert actions == ["warn", "halt", "warn"]
    with Journal.read(path) as journal:
        assert replay_journal(known.bundle, journal).differences == ()


def test_drift_alarms_are_entries_too_and_replayed(known: Served, tmp_path: Path) -> None:
    assert known.bundle.guards is not None
    expected = known.bundle.guards.drift
    k = [test.quantity for test in TESTS].index("turnover")
    changed = [np.array(part) for part in expected]
    for part, value in zip(changed, (1.0, 1e-6, 2e-6, 0.0, 1e-5), strict=True):
        part[k] = value  # next to no turnover
    reference = known.bundle.guards._replace(drift=Expectation(*changed))
    strange = known._replace(bundle=replace(known.bundle, guards=reference))
    path, config = tmp_path / "j.db", LiveConfig(sync=False, drift=DriftConfig(action="halt"))
    with _open(strange, path, config) as engine:
        engine.run(bars=BARS)
        reading = engine.guards.reading()
        assert engine.state.mode == "halted"
        assert engine.state.why.startswith("drift: turnover: value traded")
    alarm = next(body for body in _entries(path, "guard") if body.get("guard") == "drift")
    assert alarm["name"] == "turnover"
    assert "above the 1e-06 of the backtest" in alarm["detail"]
    assert reading["drift_alarm"]["turnover"] == 1.0
    assert set(reading) <= {metric.name for metric in METRICS}
    with Journal.read(path) as journal:
        assert replay_journal(strange.bundle, journal).differences == ()


def test_journals_and_bundles_without_guards_go_on(
    known: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, old = tmp_path / "j.db", known._replace(bundle=replace(known.bundle, guards=None))
    with _open(old, path, _config()) as engine:
        engine.run(bars=5)
        assert engine.guards.reading() == {}
    assert "its guards are off" in caplog.text
    assert _entries(path, "guard") == []
    with Journal.read(path) as journal:  # by a version that has them
        assert replay_journal(known.bundle, journal).differences == ()
    with _open(known, path, _config()) as engine:
        engine.run(bars=5)
    assert [body["event"] for body in _entries(path, "guard")] == ["settings"]
    with Journal.read(path) as journal:
        assert replay_journal(known.bundle, journal).differences == ()


def test_a_damaged_reference_is_named(known: Served, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(known.bundle.path, copy)
    file = copy / GUARDS
    (copy / GUARDS).write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(DamagedError, match=r"guards\.safetensors: .*its hash is"):
        load_bundle(copy, replay=False)
    facts = json.loads((copy / MANIFEST).read_text())
    for name in ("format", "echelon", "files", "sha256"):
        facts.pop(name)

    def reseal() -> None:
        (copy / MANIFEST).unlink()
        write_manifest(copy, facts)

    arrays = load_file(known.bundle.path / GUARDS)
    for change in ({"drift": np.zeros((2, 2))}, {"rows.low": np.zeros(1, np.float32)}):
        save_file({**arrays, **change}, file)
        reseal()
        with pytest.raises(DamagedError, match=r"guards\.safetensors: .*expected finite numbers"):
            load_bundle(copy, replay=False)
    file.write_bytes(b"nonsense")
    reseal()
    with pytest.raises(DamagedError, match=r"guards\.safetensors"):
        load_bundle(copy, replay=False)
    file.unlink()
    reseal()
    assert load_bundle(copy, replay=False).guards is None
