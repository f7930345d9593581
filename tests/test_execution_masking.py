"""No policy's request depends on what its day has not brought yet."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from execution_nets import build_net
from hypothesis import given, settings
from hypothesis import strategies as st
from scrambled_days import scramble_after

from echelon.agents.execution.network import NetworkSettings
from echelon.agents.execution.policy import LearnedPolicy
from echelon.execution import Days, ExecutionRules, Simulator, parent_orders
from echelon.execution.features import public_features
from echelon.execution.policies import AlmgrenChriss, ExecutionPolicy, Twap, Vwap
from echelon.types import Floats

N_DAYS, N_TICKS, STEP = 4, 37, 6


def market(seed: int) -> Days:
    rng = np.random.default_rng(seed)
    price = 50.0 * np.exp(rng.normal(0, 0.01, (N_DAYS, N_TICKS)).cumsum(axis=1))
    return Days.from_prices(price, np.floor(rng.exponential(500, price.shape)) + 1.0)


def requests(policy: ExecutionPolicy, days: Days) -> tuple[Floats, Floats]:
    """[E,S] what was asked for, and the tick at which each step begins."""
    start = np.array([0, 0, 5, 13])
    orders = parent_orders([2, 2, 2, 2], 100.0, [True, False, True, False], start, [37, 37, 30, 37])
    simulator = Simulator(days, orders, ExecutionRules(STEP, volume_cap=0.5))
    policy.start(simulator)
    asked, at = [], []
    for _ in range(int(simulator.n_steps.max())):
        at.append(np.where(simulator.progress.done, 10_000, simulator.progress.tick))
        asked.append(np.where(simulator.progress.done, 0.0, policy.request(simulator)))
        simulator.step(asked[-1])
    return np.stack(asked, axis=1), np.stack(at, axis=1)


@pytest.mark.parametrize("sequence", ["gru", "lstm", "attention"])
@pytest.mark.parametrize("block", [1, 4])
@settings(deadline=None, max_examples=3)
@given(seed=st.integers(0, 10_000), cut=st.integers(0, N_TICKS - 1))
def test_a_learned_policy_asks_the_same_whatever_comes(
    sequence: str, block: int, seed: int, cut: int
) -> None:
    days = market(seed)
    known = np.array([True, True, False, False])
    public = public_features(days, train=known)
    other = scramble_after(days, 2, cut, seed)
    seen = public_features(other, scaler=public.scaler)
    shape = NetworkSettings(sequence=sequence, hidden=8, block=block, fractions=())  # type: ignore[arg-type]
    net = build_net(shape, len(public.names), seed)
    # A fresh policy begins as TWAP: weights that are larger let the market speak.
    net.actor[-1].weight.data.mul_(300.0)
    one, at = requests(LearnedPolicy(net, public), days)
    two, _ = requests(LearnedPolicy(net, seen), other)
    # Ticks up to `cut` are as they were, so that a step which begins one later knows the same.
    before = at <= cut + 1
    assert before.any() or cut < 0
    np.testing.assert_array_equal(one[before], two[before])


def test_the_market_does_speak_to_it() -> None:
    """The test above would pass for a policy that does not look."""
    days = market(1)
    public = public_features(days, train=np.array([True, True, False, False]))
    net = build_net(NetworkSettings(hidden=8, fractions=()), len(public.names), 1)
    net.actor[-1].weight.data.mul_(300.0)
    other = scramble_after(days, 2, 3, 1)
    one, _ = requests(LearnedPolicy(net, public), days)
    two, _ = requests(LearnedPolicy(net, public_features(other, scaler=public.scaler)), other)
    assert not np.array_equal(one, two)


def test_an_oracle_is_the_exception() -> None:
    days = market(1)
    public = public_features(days, train=np.array([True, True, False, False]))
    shape = NetworkSettings(hidden=8, fractions=(), oracle=True)
    net = build_net(shape, len(public.names), 1)
    net.actor[-1].weight.data.mul_(300.0)
    other = scramble_after(days, 2, 20, 1)
    one, at = requests(LearnedPolicy(net, public), days)
    two, _ = requests(LearnedPolicy(net, public_features(other, scaler=public.scaler)), other)
    assert not np.array_equal(one[at <= 20], two[at <= 20])


@pytest.mark.parametrize("cut", [0, 7, 20])
def test_schedules_ask_the_same_whatever_comes(cut: int) -> None:
    days = market(3)
    past = replace(
        days,
        symbols=days.symbols[:2],
        dates=days.dates[:2],
        buy=days.buy[:2],
        sell=days.sell[:2],
        known=days.known[:2],
        volume=days.volume[:2],
    )
    for policy in (Twap(), Vwap(past), AlmgrenChriss(0.3)):
        one, at = requests(policy, days)
        two, _ = requests(policy, scramble_after(days, 2, cut, 5))
        np.testing.assert_array_equal(one[at <= cut + 1], two[at <= cut + 1])
