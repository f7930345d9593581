"""Books stepped together: the clock, ends, resets, state, and nothing known before its time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from worlds import at, make_config, make_world

from echelon.envs import Action, ActionRule, Books, World
from echelon.envs.act import ActionKind
from echelon.envs.books import equal_weight_returns
from echelon.errors import DataError
from echelon.market import MarketRows, Reason

HOLD, BUY, SELL = (int(a) for a in Action)


def books_of(
    world: World, n_books: int = 1, kind: ActionKind = "discrete", *overrides: str, **span: range
) -> Books:
    config = make_config(*overrides)
    rows = span.get("span", world.span("train"))
    return Books(world, ActionRule.from_config(config, kind), config.reward, n_books, rows)


def small_world(**changes: Any) -> World:
    """Two assets whose open and close tell fill and mark apart."""
    usual: dict[str, Any] = {
        "close": [[10.0, 20.0], [12.0, 20.0], [15.0, 18.0], [15.0, 24.0]],
        "open": [[10.0, 20.0], [11.0, 19.0], [13.0, 21.0], [16.0, 20.0]],
        "initial_cash": 1000.0,
        "commission": 0.0,
        "window": 1,
        "splits": {"train": range(4)},
    }
    return make_world(**(usual | changes))


def test_clock_decides_at_the_close_fills_at_the_next_open_and_marks_at_its_close() -> None:
    books = books_of(small_world())
    result = books.step(np.array([[BUY, HOLD]]))
    shares = 200.0 / 11.0
    assert result.fills.price[0, 0] == 11.0
    assert result.value[0] == pytest.approx(800.0 + shares * 12.0)
    assert result.reward[0] == pytest.approx((800.0 + shares * 12.0) / 1000.0 - 1.0)
    assert books.row.tolist() == [1]


def test_same_close_convention_fills_at_the_close_of_the_decision() -> None:
    books = books_of(small_world(fill_open=False))
    result = books.step(np.array([[BUY, HOLD]]))
    assert result.fills.price[0, 0] == 10.0
    assert result.value[0] == pytest.approx(800.0 + 20.0 * 12.0)


def test_books_at_different_rows_trade_their_own_bars() -> None:
    books = books_of(small_world(), 2)
    books.reset(at(0, 2))
    fills = books.step(np.full((2, 2), BUY)).fills
    assert fills.price.tolist() == [[11.0, 19.0], [16.0, 20.0]]
    assert books.row.tolist() == [1, 3]


@pytest.mark.parametrize("kind", ["discrete", "weights"])
def test_many_books_equal_as_many_single_ones(kind: ActionKind) -> None:
    world = make_world(seed=4, slippage_model=1, slippage=0.001)
    rng = np.random.default_rng(0)
    starts = at(3, 9, 20)
    together = books_of(world, 3, kind)
    together.reset(starts)
    alone = [books_of(world, 1, kind) for _ in starts]
    for book, start in zip(alone, starts, strict=True):
        book.reset(at(start))
    for _ in range(15):
        actions = (
            rng.integers(0, 3, (3, 3))
            if kind == "discrete"
            else rng.dirichlet(np.ones(4), 3)[:, :3]
        )
        results = together.step(actions)
        held = together.holdings()
        for e, book in enumerate(alone):
            single = book.step(actions[e : e + 1])
            assert single.reward[0] == results.reward[e]
            assert single.value[0] == results.value[e]
            assert np.array_equal(single.fills.shares[0], results.fills.shares[e])
            assert np.array_equal(book.holdings().allowed[0], held.allowed[e])


def test_end_of_the_span_truncates_and_goes_no_further() -> None:
    books = books_of(small_world())
    ends = [bool(books.step(np.array([[HOLD, HOLD]])).truncated[0]) for _ in range(3)]
    assert ends == [False, False, True]
    with pytest.raises(AssertionError, match="past the end of its span"):
        books.step(np.array([[HOLD, HOLD]]))


def test_ruin_terminates_only_the_ruined() -> None:
    close = np.full((6, 1), 10.0)
    close[2:] = 1e-8
    world = make_world(close=close, window=1, splits={"train": range(6)}, commission=0.0)
    books = books_of(world, 2, "discrete", "buy_pct=1.0")
    first = books.step(np.array([[BUY], [HOLD]]))
    assert first.terminated.tolist() == [False, False]
    second = books.step(np.array([[HOLD], [HOLD]]))
    assert second.terminated.tolist() == [True, False]
    assert second.truncated.tolist() == [False, False]
    assert second.reward[0] == pytest.approx(-1.0)


def test_reset_gives_new_cash_to_those_named_only() -> None:
    books = books_of(small_world(), 3, "discrete", "reward.drawdown_penalty=1.0")
    books.step(np.full((3, 2), BUY))
    kept = books.state()
    books.reset(at(0, 0, 2), np.array([False, True, False]))
    assert books.row.tolist() == [1, 0, 1]
    assert books.value[1] == books.book.cash[1] == 1000.0
    assert not books.book.shares[1].any()
    assert not books.book.locked[1].any()
    assert books.reward_state.peak[1] == 1000.0
    for e in (0, 2):
        assert books.value[e] == kept["value"][e]
        assert np.array_equal(books.book.shares[e], kept["shares"][e])
        assert books.reward_state.peak[e] == kept["reward.peak"][e]


def test_reset_of_all_is_the_default() -> None:
    books = books_of(small_world(), 2)
    books.step(np.full((2, 2), BUY))
    books.reset(at(1, 2))
    assert books.row.tolist() == [1, 2]
    assert books.value.tolist() == [1000.0, 1000.0]


@pytest.mark.parametrize(
    "reward",
    [
        "{kind: return}",
        "{kind: differential_sharpe, drawdown_penalty: 0.5}",
        "{kind: excess, cvar_penalty: 1.0}",
    ],
)
def test_restored_books_go_on_bit_for_bit(reward: str) -> None:
    world = make_world(t_plus_one=True, slippage_model=1, slippage=0.001)
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 3, (24, 4, 3))
    books = books_of(world, 4, "discrete", f"reward={reward}")
    for chosen in actions[:10]:
        books.step(chosen)
    state = {name: np.array(part) for name, part in books.state().items()}
    expected = [books.step(chosen) for chosen in actions[10:]]
    fresh = books_of(world, 4, "discrete", f"reward={reward}")
    fresh.restore(state)
    for chosen, before in zip(actions[10:], expected, strict=True):
        again = fresh.step(chosen)
        assert np.array_equal(again.reward, before.reward)
        assert np.array_equal(again.value, before.value)
        assert all(np.array_equal(a, b) for a, b in zip(again.fills, before.fills, strict=True))
    assert all(
        np.array_equal(v, fresh.state()[k], equal_nan=True) for k, v in books.state().items()
    )


def test_state_taken_is_not_changed_by_going_on() -> None:
    books = books_of(make_world(), 2, "discrete", "reward.cvar_penalty=1.0")
    state = books.state()
    copy = {name: np.array(part) for name, part in state.items()}
    for _ in range(5):
        books.step(np.full((2, 3), BUY))
    books.reset(at(3, 4))
    assert all(np.array_equal(copy[name], state[name], equal_nan=True) for name in state)


def test_excess_reward_is_over_the_benchmark() -> None:
    world = small_world(benchmark=np.array([100.0, 101.0, 99.0, 99.0]))
    books = books_of(world, 1, "discrete", "reward.kind=excess")
    paid = [float(books.step(np.array([[HOLD, HOLD]])).reward[0]) for _ in range(3)]
    assert paid == pytest.approx([-0.01, 2 / 101, 0.0])


def test_active_reward_is_over_the_mean_of_what_may_be_bought() -> None:
    close = [[10.0, 10.0, 10.0], [11.0, 10.0, 9.0], [11.0, 12.0, 9.0]]
    member = [[True, True, True], [True, False, True], [True, True, True]]
    world = make_world(close=close, member=member, window=1, splits={"train": range(3)})
    config = make_config("reward.kind=active")
    books = Books(world, ActionRule("weights"), config.reward, 1, range(3))
    paid = [float(books.step(np.zeros((1, 3))).reward[0]) for _ in range(2)]
    # Of the second bar the asset that rises is no member.
    assert paid == pytest.approx([-(0.1 + 0.0 - 0.1) / 3, 0.0])
    closed = equal_weight_returns(replace(world, member=np.zeros((3, 3), dtype=bool)), range(3))
    assert closed.tolist() == pytest.approx([0.0, 0.0, np.nan], nan_ok=True)


def test_excess_without_a_benchmark_or_with_a_hole_in_it_is_refused() -> None:
    with pytest.raises(DataError, match=r"no benchmark index.*data.benchmark"):
        books_of(small_world(benchmark=None), 1, "discrete", "reward.kind=excess")
    hole = small_world(benchmark=np.array([100.0, np.nan, 99.0, 99.0]))
    with pytest.raises(DataError, match=r"no level at 2020-01-01.*2 such bars"):
        books_of(hole, 1, "discrete", "reward.kind=excess")


def test_delisting_turns_the_holding_into_cash_less_the_haircut() -> None:
    gone = np.zeros((4, 2), dtype=bool)
    gone[2:, 0] = True
    books = books_of(small_world(gone=gone, haircut=[0.3, 0.3]))
    books.step(np.array([[BUY, HOLD]]))
    shares = float(books.book.shares[0, 0])
    result = books.step(np.array([[SELL, HOLD]]))
    assert result.fills.reason[0, 0] == Reason.DELISTED
    assert books.book.shares[0, 0] == 0.0
    assert books.value[0] == pytest.approx(800.0 + shares * 15.0 * 0.7)


def changed_after(world: World, row: int, other: World) -> World:
    """The world with everything after `row` taken from another."""

    def spliced(first: Any, second: Any) -> Any:
        return np.concatenate([first[: row + 1], second[row + 1 :]])

    n_rows = len(world.times)
    rows = [
        spliced(a, b) if len(a) == n_rows else a
        for a, b in zip(world.rows, other.rows, strict=True)
    ]
    names = ("x", "present", "member", "growth", "benchmark")
    parts = {name: spliced(getattr(world, name), getattr(other, name)) for name in names}
    return replace(world, rows=MarketRows(*rows), **parts)


def eventful_world(seed: int, **changes: Any) -> World:
    """Suspensions, limits, members coming and going, a delisting, dividends, splits."""
    rng = np.random.default_rng(seed)
    shape = (60, 3)
    gone = np.zeros(shape, dtype=bool)
    gone[rng.integers(25, 50) :, rng.integers(3)] = True
    close = 20.0 * np.exp(np.cumsum(rng.normal(0.0, 0.02, shape), axis=0))
    return make_world(
        close=close,
        open=close * np.exp(rng.normal(0.0, 0.01, shape)),
        seed=seed,
        tradable=rng.random(shape) > 0.1,
        present=rng.random(shape) > 0.1,
        member=rng.random(shape) > 0.1,
        gone=gone,
        limit_up=close * np.where(rng.random(shape) > 0.9, 1.0, 1.1),
        limit_down=close * np.where(rng.random(shape) > 0.9, 1.0, 0.9),
        volume_open=rng.uniform(1e3, 1e5, shape),
        volume_close=rng.uniform(1e3, 1e5, shape),
        dividend=np.where(rng.random(shape) > 0.95, 0.1, 0.0),
        share_step=np.where(rng.random(shape) > 0.97, 1.1, 1.0),
        price_limits=True,
        t_plus_one=True,
        participation=0.1,
        slippage_model=3,
        slippage=0.01,
        **changes,
    )


@pytest.mark.parametrize("kind", ["discrete", "weights"])
@pytest.mark.parametrize("fill_open", [True, False])
@pytest.mark.parametrize("cut", [5, 20, 34])
def test_nothing_up_to_a_row_depends_on_what_comes_after_it(
    kind: ActionKind, fill_open: bool, cut: int
) -> None:
    """Masks, holdings, actions of a fixed policy, fills, values and rewards, before the cut."""
    world = eventful_world(1, fill_open=fill_open)
    changed = changed_after(world, cut, eventful_world(2, fill_open=fill_open))
    traces = [trace_of(w, kind, cut) for w in (world, changed)]
    assert len(traces[0]) == len(traces[1]) > 2
    for first, second in zip(*traces, strict=True):
        assert first.keys() == second.keys()
        for name in first:
            assert np.array_equal(first[name], second[name], equal_nan=True), name
    after = [trace_of(w, kind, 35)[-1]["value"] for w in (world, changed)]
    if cut < 34:
        assert after[0] != after[1], "the worlds should differ after the cut"


def trace_of(world: World, kind: ActionKind, last: int) -> list[dict[str, np.ndarray]]:
    """What a fixed policy on features and holdings sees and does, up to the mark at row `last`."""
    books = books_of(world, 1, kind, "reward.kind=excess", "reward.drawdown_penalty=0.1")
    rng = np.random.default_rng(9)
    mix = rng.normal(0.0, 1.0, (world.x[0].size + 4, 9))
    trace = []
    while books.row[0] < last:
        row = int(books.row[0])
        held = books.holdings()
        seen = np.concatenate([world.x[row].ravel(), held.weights[0], held.cash_share])
        scores = np.tanh(seen @ mix)
        if kind == "discrete":
            scored = np.where(held.allowed, scores.reshape(1, 3, 3), -9.0)
            actions = scored.argmax(axis=-1)
        else:
            actions = np.maximum(scores[None, :3], 0.0)
        result = books.step(actions)
        trace.append(
            {
                "seen": seen,
                "allowed": held.allowed,
                "actions": actions,
                "reward": result.reward,
                "value": result.value,
                **result.fills._asdict(),
            }
        )
    held = books.holdings()
    trace.append({"weights": held.weights, "allowed": held.allowed, "value": books.value})
    return trace
