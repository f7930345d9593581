"""The prior and blended command: the fixed-share rule to begin with, and one list of trades."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Always, Moving, Tilted
from rule_routers import FixedRouter
from worlds import at, make_config, make_world

from echelon.backtest.run import run_backtest
from echelon.config import Config
from echelon.config.agents import RewardConfig
from echelon.envs import ActionRule, Books, World
from echelon.envs.act import Holdings
from echelon.errors import UsageError
from echelon.population.attribution import RealBook, attribute
from echelon.population.expert_books import survey
from echelon.population.meta_env import MetaEnv
from echelon.population.policy import HierarchyPolicy, mix_targets
from echelon.population.record import CommandRecord
from echelon.population.reference_policies import HedgeRouter
from echelon.population.router import Router, probabilities_along
from echelon.population.router_task import observation_names
from echelon.types import Bools, Floats, Floats32

BLEND, PRIOR = "meta_router.command=blend", "meta_router.prior=fixed_share"
SPAN = range(60, 160)


def config_of(*more: str) -> Config:
    tail = ("risk.cvar_window=20", "risk.cvar_limit=0.9")
    return make_config("meta_router.horizons=[2,5,12]", "meta_router.every_bars=5", *tail, *more)


def experts_of() -> list[Any]:
    return [Moving("up"), Moving("down", -1.0), Always("mixed", (0.3, 0.3, 0.3))]


class Shares(FixedRouter):
    """The same probabilities at every decision."""

    def __init__(self, *shares: float) -> None:
        super().__init__(int(np.argmax(shares)))
        self.shares = np.array(shares)

    def probabilities(self, obs: Floats32, allowed: Bools) -> Floats:
        may = np.where(allowed, self.shares, 0.0)
        return may / may.sum(axis=1, keepdims=True)


def command_of(router: Any, config: Config, world: World) -> tuple[Any, CommandRecord]:
    policy = HierarchyPolicy(experts_of(), router, config, 1)
    done = run_backtest(policy, world, SPAN, config)
    assert policy.record is not None
    return done, policy.record


@pytest.mark.parametrize("command", ["select", "blend"])
@pytest.mark.parametrize("limit", [0.15, 0.03])
def test_router_with_a_prior_decides_as_the_rule_before_it_has_learned(
    command: str, limit: float
) -> None:
    world = make_world(n_rows=200, seed=3)
    risk = (f"risk.drawdown_limit={limit}", f"risk.drawdown_release={limit}")
    config = config_of(PRIOR, f"meta_router.command={command}", *risk)
    rule, ruled = command_of(HedgeRouter(), config, world)
    router, routed = command_of(Router(config, 3, 5), config, world)
    assert len(set(ruled.in_charge.tolist())) >= 2, "the rule never switches"
    np.testing.assert_array_equal(ruled.in_charge, routed.in_charge)
    if command == "select":
        np.testing.assert_array_equal(rule.value, router.value)
    else:  # the prior leaves a little to cash
        assert ruled.shares is not None
        assert routed.shares is not None
        np.testing.assert_allclose(routed.shares, ruled.shares, atol=0.03)


def test_prior_is_warm_before_the_window_and_the_same_in_training() -> None:
    world, config = make_world(n_rows=200, seed=3), config_of(PRIOR)
    names = observation_names(["up", "down", "mixed"], (2, 5, 12), prior=True)
    assert names[-3:] == ("trust/up", "trust/down", "trust/mixed")
    router = HedgeRouter()
    command_of(router, config, world)
    alone = survey(experts_of(), world, [range(60, 160)], config)
    # At the window's last decision, of a rule that began 31 bars before the window.
    np.testing.assert_allclose(np.exp(alone.view.trust[158]), router.trust[0], rtol=1e-5)
    assert np.abs(alone.view.trust[60] - np.log(1 / 3)).max() > 0.05, "cold at the first row"
    np.testing.assert_allclose(np.exp(alone.view.trust[60:160]).sum(axis=1), 1.0, rtol=1e-6)
    env = MetaEnv(experts_of(), world, [range(60, 160)], config, 5)
    rows = env._books.row
    np.testing.assert_array_equal(env.reset()[:, -3:], alone.view.trust[env._books.row])
    assert len(rows) == config.meta_router.n_envs
    plain = survey(experts_of(), world, [range(60, 160)], config_of())
    assert plain.view.trust.shape == (200, 0), "without a prior nothing is seen of it"


def slow_mix(world: World, config: Config, shares: tuple[float, ...]) -> list[float]:
    """Values of a book that holds the mix, asset by asset."""
    experts = experts_of()
    for expert in experts:
        expert.start(world, SPAN)
    real = Books(world, ActionRule.from_config(config, "weights"), RewardConfig(), 1, SPAN)
    real.reset(at(SPAN.start))
    values = [float(real.value[0])]
    while int(real.row[0]) < SPAN.stop - 1:
        wanted = [expert.decide(real.row, real.holdings())[0] for expert in experts]
        target = [sum(s * w[n] for s, w in zip(shares, wanted, strict=False)) for n in range(3)]
        values.append(float(real.step(np.array([target])).value[0]))
    return values


def test_blend_holds_the_mix_of_the_targets_by_one_list_of_trades() -> None:
    world = make_world(n_rows=200, seed=3)
    config = config_of(BLEND, "risk.enabled=false")
    shares = (0.5, 0.2, 0.2, 0.1)
    done, record = command_of(Shares(*shares), config, world)
    np.testing.assert_allclose(done.value, slow_mix(world, config, shares), rtol=1e-12)
    np.testing.assert_allclose(record.shares, np.tile(shares, (99, 1)))
    assert (record.in_charge == 0).all()
    assert record.decided.sum() == 20
    each = [command_of(FixedRouter(k), config_of("risk.enabled=false"), world)[0] for k in range(3)]
    traded = [one.traded.sum() for one in each]
    assert done.traded.sum() < np.dot(shares[:3], traded), "trades of one are set off by another's"


def test_blend_of_one_expert_is_that_expert_selected() -> None:
    world = make_world(n_rows=200, seed=3)
    blended, record = command_of(Shares(0.0, 1.0, 0.0, 0.0), config_of(BLEND), world)
    selected, _ = command_of(FixedRouter(1), config_of(), world)
    np.testing.assert_array_equal(blended.value, selected.value)
    assert record.shares is not None


def test_masked_expert_loses_its_part_at_once_and_the_others_share_it() -> None:
    world = make_world(n_rows=200, seed=3)
    config = config_of(
        BLEND, "risk.drawdown_limit=0.06", "risk.drawdown_release=0.05", "meta_router.every_bars=50"
    )
    _, record = command_of(Shares(0.2, 0.2, 0.5, 0.1), config, world)
    assert record.shares is not None
    assert (record.shares[:, :-1][~record.allowed] == 0.0).all()
    last = np.zeros(4)
    for shares, decided, allowed in zip(record.shares, record.decided, record.allowed, strict=True):
        may = np.append(allowed, True)
        last = np.array([0.2, 0.2, 0.5, 0.1]) * may if decided else last
        np.testing.assert_allclose(shares, last * may / (last * may).sum())
    masked_now = (record.allowed[:-1] & ~record.allowed[1:]).any(axis=1)
    assert masked_now[~record.decided[1:]].any(), "nobody is masked between decisions"


def test_targets_are_mixed_with_what_is_held_where_somebody_leaves_an_asset() -> None:
    held = Holdings(
        np.array([[0.4, 0.2, 0.1]], np.float32),
        np.array([0.3], np.float32),
        np.ones((1, 3, 3), dtype=bool),
        np.ones(1),
    )
    held.allowed[0, 2, 1:] = False  # cannot be traded
    wanted = {
        0: np.array([[np.nan, np.nan, np.nan]]),
        1: np.array([[0.6, 0.0, np.nan]]),
        2: np.full((1, 3), 7.0),
    }
    got = mix_targets(wanted, np.array([[0.5, 0.3, 0.0, 0.2]]), held)
    np.testing.assert_allclose(got[0, :2], [0.5 * 0.4 + 0.3 * 0.6, 0.5 * 0.2], rtol=1e-6)
    assert np.isnan(got[0, 2])
    alone = mix_targets(wanted, np.array([[1.0, 0.0, 0.0, 0.0]]), held)
    assert np.isnan(alone).all(), "nothing is traded where the only one leaves it"


def test_blended_run_stops_and_goes_on_bit_for_bit() -> None:
    world, config = make_world(n_rows=200, seed=3), config_of(BLEND, PRIOR)

    def policy_of() -> HierarchyPolicy:
        experts = [Stateful(Tilted("a", 2.0)), Stateful(Tilted("b", -2.0))]
        return HierarchyPolicy(experts, Router(config, 2, 5), config, 1)

    books = Books(world, ActionRule.from_config(config, "weights"), RewardConfig(), 1, SPAN)
    whole = policy_of()
    whole.start(world, SPAN)
    said = []
    for bar in range(30):
        if bar == 13:
            state = whole.state()
            resumed = policy_of()
            resumed.start(world, SPAN)
            resumed.restore(state)
        held = books.holdings()
        target = whole.decide(books.row, held)
        if bar >= 13:
            np.testing.assert_array_equal(resumed.decide(books.row, held), target)
            assert resumed.command.probabilities is not None
            np.testing.assert_array_equal(
                resumed.command.probabilities, whole.command.probabilities
            )
        said.append(target)
        books.step(target)
    assert np.isfinite(said).any()


class Stateful:
    """An expert that can be stopped."""

    kind = "weights"
    lookback = 0

    def __init__(self, expert: Tilted) -> None:
        self.name, self._expert = expert.name, expert
        self.start, self.decide = expert.start, expert.decide

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Any) -> None:
        assert not state


def test_router_without_probabilities_cannot_blend() -> None:
    with pytest.raises(UsageError, match="FixedRouter does not say how probable"):
        command_of(FixedRouter(0), config_of(BLEND), make_world(n_rows=200))


def test_record_of_a_blend_is_read_as_it_was_written_and_adds_up(tmp_path: Path) -> None:
    world, config = make_world(n_rows=200, seed=3), config_of(BLEND)
    done, record = command_of(HedgeRouter(), config, world)
    record.write(tmp_path, "seed-1")
    read = CommandRecord.read(tmp_path, "seed-1")
    assert read.shares is not None
    np.testing.assert_array_equal(read.shares, record.shares)
    fills = done.fills
    paid = [part.sum(axis=1) for part in (fills.commission, fills.stamp, fills.slippage)]
    book = RealBook(done.value, *paid)
    market = np.zeros(record.bars)
    told = attribute(read, book, market, horizon=5)
    assert told is not None
    np.testing.assert_allclose(
        told.series.total, np.log(done.value[1:] / done.value[:-1]), atol=1e-12
    )
    own = np.log1p(record.own_returns + record.own_costs)
    shares = record.shares
    assert shares is not None
    mixed = np.log((shares[:, :-1] * np.exp(own)).sum(axis=1) + shares[:, -1])
    np.testing.assert_allclose(told.series.routing, mixed - own.mean(axis=1), atol=1e-12)
    assert sum(account.share for account in told.experts) == pytest.approx(1.0)
    assert sum(account.in_charge for account in told.experts) == pytest.approx(told.total.total)


def test_probabilities_along_a_survey_are_those_of_a_blended_backtest() -> None:
    world = make_world(n_rows=200, seed=3)
    config = config_of(BLEND, PRIOR)
    router = Router(config, 3, 5)
    router.learn(MetaEnv(experts_of(), world, [range(60, 190)], config, 5), 1024, 0)
    _, record = command_of(router, config, world)
    along = probabilities_along(router, survey(experts_of(), world, [SPAN], config))
    assert record.shares is not None
    decided = np.flatnonzero(record.decided)
    np.testing.assert_allclose(along[60 + decided], record.shares[decided], atol=1e-6)
