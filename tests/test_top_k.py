"""Top k in tranches: by hand, against a slow twin, and a function of the row alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from worlds import at, make_config, make_world

from echelon.backtest.run import run_backtest
from echelon.backtest.top_k import RowScores, TopKPolicy, TopKRule
from echelon.envs import World
from echelon.envs.act import Holdings
from echelon.errors import StoreError
from echelon.types import Floats, Floats32


def first_feature(x: Floats32) -> Floats:
    return x[:, 0].astype(np.float64)


def nothing(n_assets: int, n_books: int = 1) -> Holdings:
    """Books of cash."""
    return Holdings(
        np.zeros((n_books, n_assets), np.float32),
        np.ones(n_books, np.float32),
        np.ones((n_books, n_assets, 3), bool),
        np.ones(n_books),
    )


def policy_on(world: World, rule: TopKRule) -> TopKPolicy:
    policy = TopKPolicy(RowScores(first_feature), rule)
    policy.start(world, range(len(world.times)))
    return policy


def wishes(world: World, rule: TopKRule, rows: range) -> Floats:
    """[R,N] of a book of cash at each row; NaN where an asset is not traded."""
    policy, cash = policy_on(world, rule), nothing(world.n_assets)
    return np.stack([policy.decide(at(row), cash)[0] for row in rows])


def scored(ranking: list[list[float]], **changes: Any) -> World:
    """A world of still prices whose first feature is given, [T,N]."""
    x = np.array(ranking, dtype=np.float32)[..., None]
    return make_world(close=np.full(x.shape[:2], 10.0), x=x, window=1, **changes)


def test_the_best_are_held_and_kept_until_they_leave_the_buffer() -> None:
    # One of five, kept among the best two; everybody decides at every bar.
    world = scored([[5, 4, 3, 2, 1], [4, 5, 3, 2, 1], [3, 5, 4, 2, 1], [9, 1, 2, 3, 4]])
    held = wishes(world, TopKRule(1, 2.0, 1, 1), range(4)).argmax(axis=1)
    assert held.tolist() == [0, 0, 1, 0]


def test_tranches_begin_together_and_then_decide_on_bars_of_their_own() -> None:
    # Two tranches in two bars: the first decides on even rows, the second on odd ones.
    world = scored([[2, 1, 0], [1, 2, 0], [0, 1, 2], [0, 1, 2]])
    held = wishes(world, TopKRule(1, 1.0, 2, 2), range(4))
    assert held.tolist() == [[1, 0, 0], [0.5, 0.5, 0], [0, 0.5, 0.5], [0, 0, 1]]


def test_prices_move_the_weights_between_decisions() -> None:
    world = scored([[2, 1, 0]] * 4)
    growth = np.array([[1.0, 1, 1], [1.5, 1, 1], [3.0, 1, 1], [3.0, 1, 1]])
    held = wishes(replace(world, growth=growth), TopKRule(2, 1.0, 1, 3), range(4))
    # 1.5 against 1, then 3 against 1, until the tranche decides again at row 3.
    assert held[:3, 0] == pytest.approx([0.5, 0.6, 0.75])
    assert held[3].tolist() == [0.5, 0.5, 0]


def test_what_cannot_be_traded_now_is_neither_bought_nor_given_up() -> None:
    tradable = np.ones((4, 3), dtype=bool)
    tradable[0, 1] = tradable[2, 0] = False
    world = scored([[2, 3, 1], [3, 2, 1], [1, 3, 2], [1, 3, 2]], tradable=tradable)
    held = wishes(world, TopKRule(1, 1.0, 1, 1), range(4))
    assert np.nan_to_num(held, nan=-1.0).tolist() == [[1, -1, 0], [1, 0, 0], [-1, 0, 0], [0, 1, 0]]


def test_places_beside_a_stuck_one_share_what_is_left() -> None:
    tradable = np.ones((2, 4), dtype=bool)
    tradable[1, 0] = False
    world = scored([[4, 3, 2, 1], [4, 1, 2, 3]], tradable=tradable)
    growth = np.array([[1.0, 1, 1, 1], [3.0, 1, 1, 1]])
    held = wishes(replace(world, growth=growth), TopKRule(2, 1.0, 1, 1), range(2))
    assert held[1, 1:].tolist() == [0, 0, 0.25]
    assert np.isnan(held[1, 0])


@pytest.mark.parametrize("mask", ["present", "member"])
def test_who_leaves_the_universe_is_sold(mask: str) -> None:
    there = np.ones((2, 3), dtype=bool)
    there[1, 0] = False
    world = scored([[3, 2, 1], [3, 2, 1]], **{mask: there})
    assert wishes(world, TopKRule(1, 3.0, 1, 1), range(2)).tolist() == [[1, 0, 0], [0, 1, 0]]


def test_fewer_than_there_are_places_for_leave_cash() -> None:
    world = scored([[2, 1, 0]], member=[[True, True, False]], splits={"test": range(1)})
    assert wishes(world, TopKRule(4, 1.0, 1, 1), range(1)).tolist() == [[0.25, 0.25, 0]]


def test_small_differences_are_left_alone_but_not_remainders() -> None:
    world = scored([[3, 2, 1]] * 2)
    policy = policy_on(world, TopKRule(2, 1.0, 1, 1))
    held = nothing(3)._replace(weights=np.array([[0.48, 0.4, 0.01]], np.float32))
    target = policy.decide(at(0), held)[0]
    assert np.isnan(target[0])
    assert target[1:].tolist() == [0.5, 0.0]


RULE = TopKRule(4, 2.0, 3, 5)


def stormy_world(n_rows: int = 260, n_assets: int = 24) -> World:
    """Scores with some memory, suspensions, late listings, leavers and a delisting."""
    rng = np.random.default_rng(3)
    score = rng.standard_normal((n_rows, n_assets))
    for t in range(1, n_rows):
        score[t] = 0.9 * score[t - 1] + 0.4 * score[t]
    there = np.ones((n_rows, n_assets), dtype=bool)
    there[:90, 0] = False
    member = rng.random((n_rows, n_assets)) > 0.02
    gone = np.zeros((n_rows, n_assets), dtype=bool)
    gone[150:, 1] = True
    tradable = (rng.random((n_rows, n_assets)) > 0.1) & ~gone
    x = score.astype(np.float32)[..., None]
    return make_world(
        n_rows=n_rows,
        n_assets=n_assets,
        x=x,
        present=there & ~gone,
        member=member,
        tradable=tradable,
        gone=gone,
        window=3,
    )


def slow_wish(world: World, rule: TopKRule, row: int) -> Floats:
    """The same from dictionaries, counted anew from the beginning of the block before."""
    first = min(span.start for span in world.splits.values())
    begin = max(max(first, world.window - 1), (row // rule.block - 1) * rule.block)
    books: list[dict[int, float]] = [{} for _ in range(rule.tranches)]
    for t in range(begin, row + 1):
        for i, book in enumerate(books):
            if t > begin:
                moved = {
                    n: w * world.growth[t, n] / world.growth[t - 1, n] for n, w in book.items()
                }
                worth = 1.0 + sum(moved.values()) - sum(book.values())
                book = {n: w / worth for n, w in moved.items()}
            if t == begin or t % rule.horizon == i * rule.horizon // rule.tranches:
                book = _decide_slowly(world, rule, t, book)
            books[i] = book
    out = np.zeros(world.n_assets)
    for book in books:
        for n, weight in book.items():
            out[n] += weight / rule.tranches
    return out


def _decide_slowly(
    world: World, rule: TopKRule, t: int, book: dict[int, float]
) -> dict[int, float]:
    rows, assets = world.rows, range(world.n_assets)
    open_ = [n for n in assets if rows.tradable[t, n] and not rows.gone[t, n]]
    ranked = [n for n in open_ if world.present[t, n] and world.member[t, n]]
    ranked.sort(key=lambda n: -float(world.x[t, n, 0]))
    stuck = {n: w for n, w in book.items() if n not in open_ and not rows.gone[t, n]}
    places = rule.top - len(stuck)
    chosen = [n for n in ranked[: int(rule.top * rule.buffer)] if n in book][:places]
    chosen += [n for n in ranked if n not in book][: places - len(chosen)]
    return stuck | {n: (1.0 - sum(stuck.values())) / places for n in chosen}


def test_the_policy_equals_its_slow_twin() -> None:
    world = stormy_world()
    rows = range(2, 259)
    target = wishes(world, RULE, rows)
    slow = np.stack([slow_wish(world, RULE, row) for row in rows])
    known = world.rows.tradable[rows.start : rows.stop]
    assert np.array_equal(np.isnan(target), ~known)
    assert target[known] == pytest.approx(slow[known], abs=1e-12)
    assert (np.abs(np.diff(slow, axis=0)).sum(axis=1) > 0.05).mean() > 0.3


def test_what_is_wanted_depends_on_the_row_and_not_on_what_was_asked_before() -> None:
    world = stormy_world()
    in_order = wishes(world, RULE, range(2, 259))
    order = np.random.default_rng(0).permutation(np.arange(2, 259))
    policy = policy_on(world, RULE)
    for row in order.tolist():
        now = policy.decide(at(row), nothing(world.n_assets))[0]
        assert np.array_equal(now, in_order[row - 2], equal_nan=True)
    both = policy.decide(at(50, 200), nothing(world.n_assets, 2))
    assert np.array_equal(both, in_order[[48, 198]], equal_nan=True)


def test_nothing_after_a_row_and_nothing_before_its_lookback_matters() -> None:
    world = stormy_world()
    row, rng = 217, np.random.default_rng(1)
    known = wishes(world, RULE, range(row, row + 1))
    rows = world.rows
    kept = np.arange(len(world.times))
    kept = (kept <= row) & (kept >= row - policy_on(world, RULE).lookback)

    def scramble(values: np.ndarray) -> np.ndarray:
        other = rng.permutation(values.ravel()).reshape(values.shape)
        return np.where(kept.reshape(-1, *[1] * (values.ndim - 1)), values, other)

    other = replace(
        world,
        x=scramble(world.x),
        growth=scramble(world.growth),
        present=scramble(world.present),
        member=scramble(world.member),
        rows=rows._replace(
            tradable=scramble(rows.tradable), gone=scramble(rows.gone), open=scramble(rows.open)
        ),
    )
    assert not np.array_equal(other.x, world.x)
    assert np.array_equal(wishes(other, RULE, range(row, row + 1)), known, equal_nan=True)


def test_a_book_that_fills_at_once_holds_the_mean_of_the_tranches() -> None:
    world = stormy_world()
    rule = TopKRule(4, 2.0, 5, 5)
    tradable = np.ones_like(world.rows.tradable)
    free = replace(world, rows=world.rows._replace(tradable=tradable), fill_open=False)
    free = replace(free, rules=free.rules._replace(commission=0.0))
    span = range(60, 140)
    done = run_backtest(policy_on(free, rule), free, span, make_config())
    wish = np.stack([slow_wish(free, rule, row) for row in span[:-1]])
    gap = np.abs(done.weights[1:] - wish)  # a bar later, but for a bar's returns and the band
    assert gap.max() < 0.1 / 20 + 0.02
    assert done.cash_share[1:].max() < 0.02


def test_it_remembers_nothing_and_refuses_the_memory_of_another() -> None:
    policy = policy_on(stormy_world(), RULE)
    assert policy.state() == {}
    policy.restore({})
    with pytest.raises(StoreError, match="remembers nothing, and the saved state has trust"):
        policy.restore({"trust": np.zeros(1)})


@pytest.mark.parametrize(
    "rule", [TopKRule(0, 2.0, 1, 1), TopKRule(1, 0.5, 1, 1), TopKRule(1, 2.0, 6, 5)]
)
def test_impossible_rules_are_named(rule: TopKRule) -> None:
    assert rule.problem
    assert RULE.problem is None
