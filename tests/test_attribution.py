"""Where the hierarchy's result came from: parts that add up, held to cases worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from command_records import make_book, make_record, weekdays

from echelon.population.attribution import (
    SUMMED,
    RealBook,
    attribute,
    gross_returns,
    part_series,
    router_hit_rate,
)
from echelon.population.record import CommandRecord
from echelon.types import Floats


def small(
    own: list[list[float]],
    in_charge: list[int],
    decided: list[bool] | None = None,
    costs: float = 0.0,
) -> CommandRecord:
    """Experts with own returns[S,K]."""
    returns = np.array(own)
    bars, experts = returns.shape
    values = np.concatenate([np.ones((1, experts)), np.cumprod(1.0 + returns, axis=0)])
    return CommandRecord(
        experts=tuple("abcdef"[:experts]),
        times=weekdays(bars),
        in_charge=np.array(in_charge),
        decided=np.ones(bars, dtype=bool) if decided is None else np.array(decided),
        allowed=np.ones((bars, experts), dtype=bool),
        target=np.zeros((bars, experts, 1)),
        own_values=values,
        own_costs=np.full((bars, experts), costs),
        events=(),
    )


def free(returns: list[float]) -> RealBook:
    """A book with these returns and no costs."""
    none = np.zeros(len(returns))
    return RealBook(np.concatenate([[1.0], np.cumprod(1.0 + np.array(returns))]), none, none, none)


def test_parts_add_up_to_the_net_log_return_at_every_bar() -> None:
    record = make_record(400)
    book = make_book(record)
    market = np.random.default_rng(2).normal(0.0, 0.01, 400)
    series = part_series(record, book, market)
    assert series is not None
    net = np.diff(np.log(book.values))
    np.testing.assert_allclose(series.total, net, rtol=0, atol=1e-12)
    found = attribute(record, book, market, horizon=5)
    assert found is not None
    assert sum(found.parts[name].total for name in SUMMED) == pytest.approx(
        math.log(book.values[-1] / book.values[0]), abs=1e-12
    )
    assert found.total.total == pytest.approx(net.sum(), abs=1e-12)
    costs = [found.parts[name].total for name in ("commission", "stamp", "slippage")]
    assert found.parts["costs"].total == pytest.approx(sum(costs), abs=1e-12)
    assert all(cost < 0.0 for cost in costs)


def test_parts_of_two_bars_worked_out_by_hand() -> None:
    record = small([[0.10, -0.10], [0.02, 0.04]], in_charge=[0, 2], costs=0.01)
    # Bar 1: 5 % before costs, of which 1 % commission and 1 % slippage; bar 2: cash.
    book = RealBook(
        np.array([100.0, 103.0, 103.0]),
        np.array([1.0, 0.0]),
        np.array([0.0, 0.0]),
        np.array([1.0, 0.0]),
    )
    series = part_series(record, book, np.array([0.01, -0.02]))
    assert series is not None
    mean = [(math.log(1.11) + math.log(0.91)) / 2, (math.log(1.03) + math.log(1.05)) / 2]
    np.testing.assert_allclose(series.market, [math.log(1.01), math.log(0.98)], atol=1e-15)
    np.testing.assert_allclose(
        series.skill, [mean[0] - math.log(1.01), mean[1] - math.log(0.98)], atol=1e-15
    )
    np.testing.assert_allclose(series.routing, [math.log(1.11) - mean[0], -mean[1]], atol=1e-15)
    np.testing.assert_allclose(series.holding, [math.log(1.05) - math.log(1.11), 0.0], atol=1e-15)
    half = (math.log(1.03) - math.log(1.05)) / 2
    np.testing.assert_allclose(series.commission, [half, 0.0], atol=1e-15)
    np.testing.assert_allclose(series.slippage, [half, 0.0], atol=1e-15)
    np.testing.assert_array_equal(series.stamp, [0.0, 0.0])


def test_router_that_always_takes_the_best_earns_by_routing_and_one_expert_does_not() -> None:
    rng = np.random.default_rng(3)
    own = rng.normal(0.0, 0.01, (300, 4))
    best = small(own.tolist(), own.argmax(axis=1).tolist())
    one = small(own.tolist(), [2] * 300)
    zero = np.zeros(300)
    by_best = attribute(best, free(own.max(axis=1).tolist()), zero, horizon=1)
    by_one = attribute(one, free(own[:, 2].tolist()), zero, horizon=1)
    assert by_best is not None
    assert by_one is not None
    assert by_best.parts["routing"].low > 0.0
    assert by_best.parts["holding"].total == pytest.approx(0.0, abs=1e-12)
    assert by_best.router.rate == 1.0
    assert by_best.router.random_rate < 0.7
    assert by_one.parts["routing"].low < 0.0 < by_one.parts["routing"].high
    # Both have the same experts, so the same skill.
    assert by_best.parts["skill"] == by_one.parts["skill"]


def test_interval_holds_the_estimate_and_the_same_seed_gives_the_same() -> None:
    record = make_record(500)
    book = make_book(record)
    market = np.zeros(500)
    found, again = (attribute(record, book, market, horizon=5, seed=4) for _ in range(2))
    other = attribute(record, book, market, horizon=5, seed=5)
    assert found is not None
    assert again is not None
    assert other is not None
    assert found.parts == again.parts
    assert found.parts != other.parts
    for name, part in found.parts.items():
        if name != "market":
            assert part.low < part.total < part.high, name


def test_hit_rate_of_decisions_worked_out_by_hand() -> None:
    own = [[0.1, 0.0], [0.0, 0.1], [-0.2, -0.1], [0.3, 0.0], [0.0, 0.5]]
    record = small(own, [0, 0, 2, 2, 1], decided=[True, True, True, False, True])
    found = router_hit_rate(record, 1)
    # Right, wrong, cash while both fell: right; the last: right.
    assert found.decisions == 4
    assert found.rate == pytest.approx(3 / 4)
    # Above the mean: a; b; b and cash; b: each 1 of 3, but the third, 2 of 3.
    assert found.random_rate == pytest.approx((1 + 1 + 2 + 1) / 12)
    # Over two bars the last decision reaches beyond the run; the first two are ties at 1.1.
    assert router_hit_rate(record, 2).decisions == 3
    assert router_hit_rate(record, 6).decisions == 0
    assert math.isnan(router_hit_rate(record, 6).rate)


def test_masked_expert_does_not_count_in_what_chance_would_do() -> None:
    record = small([[0.1, 0.0]], [0])
    assert router_hit_rate(record, 1).random_rate == pytest.approx(1 / 3)
    record = replace(record, allowed=np.array([[False, True]]))
    assert router_hit_rate(record, 1).random_rate == 0.0


def test_accounts_of_experts_worked_out_by_hand() -> None:
    record = small(
        [[0.1, 0.0], [0.0, 0.1], [-0.2, -0.1]], [0, 1, 2], decided=[True, True, True], costs=0.001
    )
    found = attribute(record, free([0.1, 0.09, 0.0]), np.zeros(3), horizon=1)
    assert found is not None
    a, b, cash = found.experts
    assert (a.name, b.name, cash.name) == ("a", "b", "cash")
    assert [one.share for one in found.experts] == pytest.approx([1 / 3] * 3)
    assert [one.chosen for one in found.experts] == [1, 1, 1]
    assert a.in_charge == pytest.approx(math.log(1.1))
    assert b.in_charge == pytest.approx(math.log(1.09))
    assert a.own == pytest.approx(math.log(1.1 * 0.8))
    assert a.own_gross == pytest.approx(math.log(1.101 * 1.001 * 0.801))
    assert (cash.own, cash.own_gross) == (0.0, 0.0)
    assert [one.hit_rate for one in found.experts] == [1.0, 1.0, 1.0]
    assert sum(one.in_charge for one in found.experts) == pytest.approx(found.total.total)


def test_run_too_short_to_resample_has_no_intervals() -> None:
    found = attribute(small([[0.1, 0.0]], [0]), free([0.1]), np.zeros(1), horizon=1)
    assert found is not None
    assert math.isnan(found.parts["skill"].low)
    assert found.parts["skill"].total == pytest.approx(math.log(1.1) / 2)


@pytest.mark.parametrize(
    ("own", "real", "market"),
    [([-1.0], [0.1], [0.0]), ([0.1], [-1.0], [0.0]), ([0.1], [0.1], [-1.0])],
)
def test_book_that_lost_everything_cannot_be_attributed(
    own: list[float], real: list[float], market: list[float]
) -> None:
    assert attribute(small([own], [0]), free(real), np.array(market), horizon=1) is None


def test_series_of_other_lengths_are_refused() -> None:
    record = small([[0.1], [0.1]], [0, 0])
    with pytest.raises(AssertionError, match="market should be"):
        part_series(record, free([0.1, 0.1]), np.zeros(3))
    with pytest.raises(AssertionError, match="values should be"):
        part_series(record, free([0.1]), np.zeros(2))


def test_gross_returns_add_back_what_was_paid() -> None:
    record = small([[0.1], [0.0]], [0, 0], costs=0.02)
    found: Floats = gross_returns(record)
    np.testing.assert_allclose(found, [[math.log(1.12)], [math.log(1.02)]], atol=1e-15)
