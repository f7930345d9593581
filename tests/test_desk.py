"""The desk, what is known of own books, and what the router sees: exact, causal, free of scale."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from commands import Always, Moving, Tilted
from worlds import at, make_config, make_world

from echelon.backtest.run import run_values
from echelon.config import Config
from echelon.config.agents import RewardConfig
from echelon.envs import ActionRule, Books, World
from echelon.errors import ConfigError, DataError
from echelon.market import Rows
from echelon.population import expert_books as surveys
from echelon.population.expert_books import (
    ExpertBooks,
    ExpertStanding,
    start_experts,
    survey,
    within_limits,
)
from echelon.population.measurement import parts_of
from echelon.population.router_task import (
    make_observation,
    market_view,
    observation_names,
)
from echelon.proving.worlds import join_worlds

NOBODY = np.array([-1])


def all_first_rows(world: World) -> Rows:
    return world.first_rows(np.arange(len(world.times)))


def config_of(*more: str) -> Config:
    return make_config("meta_router.horizons=[2,5]", *more)


def test_taken_books_are_copies_that_trade_on_as_the_originals() -> None:
    world = make_world()
    config = make_config("reward.drawdown_penalty=1")
    books = Books(world, ActionRule.from_config(config, "weights"), config.reward, 3, range(3, 40))
    wanted = np.array([[0.5, 0.2, 0.0], [0.0, 0.9, 0.1], [0.1, 0.1, 0.1]])
    for _ in range(4):
        books.step(wanted)
    taken = books.take(np.array([1, 1, 0, 2]))
    assert taken.n_books == 4
    after = taken.step(wanted[[1, 1, 0, 2]])
    assert books.row.tolist() == [7, 7, 7], "the originals moved"
    expected = books.step(wanted)
    np.testing.assert_array_equal(after.value, expected.value[[1, 1, 0, 2]])
    np.testing.assert_array_equal(after.reward, expected.reward[[1, 1, 0, 2]])


def test_forks_are_what_each_expert_makes_of_the_same_book_alone() -> None:
    world, config = make_world(n_rows=80), config_of()
    experts = [Tilted("a", 2.0), Moving("b"), Always("c", (0.2, 0.0, 0.7))]
    span = range(3, 80)
    start_experts(experts, world, span)
    desk = ExpertBooks(experts, world, config, 2, span, cash=True)
    desk.begin(at(10, 30), np.ones(2, dtype=bool))
    rule = ActionRule.from_config(config, "weights")
    real = [Books(world, rule, RewardConfig(), 1, span) for _ in range(2)]
    for book, row in zip(real, (10, 30), strict=True):
        book.reset(at(row))
    cash = np.zeros((1, 2, 3))
    for chosen in ([1, 0], [3, 2], [0, 1]):
        forks = [[book.take(at(0)) for book in real] for _ in range(4)]
        for _ in range(5):
            desk.step(desk.ask())
            for e in range(2):
                for expert, fork in zip(experts, forks[:3], strict=True):
                    fork[e].step(expert.decide(fork[e].row, fork[e].holdings()))
                forks[3][e].step(cash[0, :1])
        values = [[fork[e].value[0] for e in range(2)] for fork in forks]
        np.testing.assert_array_equal(desk.value, values)
        desk.gather(np.array(chosen))
        real = [forks[chosen[e]][e] for e in range(2)]
        assert (desk.value == [book.value[0] for book in real]).all()


def test_peeking_shows_the_next_bar_and_changes_nothing() -> None:
    world, config = make_world(), config_of()
    experts = [Moving("a"), Moving("b")]
    start_experts(experts, world, range(3, 50))
    desk = ExpertBooks(experts, world, config, 1, range(3, 50))
    targets = desk.ask()
    shown = desk.peek(targets)
    assert desk.row.tolist() == [3]
    stepped = desk.step(targets)
    np.testing.assert_array_equal(shown.value, stepped.value)
    np.testing.assert_array_equal(shown.cost, stepped.cost)
    assert (stepped.cost > 0).all()


def test_experts_by_discrete_actions_are_refused() -> None:
    class Buyer(Always):
        kind = "discrete"  # type: ignore[assignment]

    with pytest.raises(ConfigError, match="'buyer' acts by 'discrete'"):
        start_experts([Buyer("buyer", (0.0,))], make_world(), range(3, 9))
    with pytest.raises(ConfigError, match="at least one expert"):
        start_experts([], make_world(), range(3, 9))


def test_scaled_limits_count_what_cannot_be_traded() -> None:
    target = np.array([[0.4, np.nan, 0.4], [0.4, np.nan, 0.4], [0.2, 0.1, 0.0]])
    held = np.array([[0.0, 0.2, 0.0]] * 3, dtype=np.float32)
    limited = within_limits(target, held, np.array([0.5, 1.0, 0.5]))
    # 0.5 less the 0.2 that stay leaves 0.3 for two equal targets.
    np.testing.assert_allclose(limited[0], [0.15, np.nan, 0.15], atol=1e-7)
    np.testing.assert_array_equal(limited[1], target[1])
    np.testing.assert_array_equal(limited[2], target[2])


def test_first_rows_stay_in_their_stretch_and_have_a_whole_window() -> None:
    draws = [make_world(n_rows=30, seed=s, splits={"test": range(30)}) for s in (1, 2)]
    together, starts = join_worlds(draws)
    first = all_first_rows(together)
    assert first[starts[0] : 30].tolist() == [3] * 27
    assert first[starts[1] : 60].tolist() == [33] * 27
    assert set(all_first_rows(make_world()).tolist()) == {3}


def test_survey_holds_the_returns_of_separate_backtests() -> None:
    world, config = make_world(n_rows=60), config_of()
    experts = [Moving("a"), Tilted("b", 1.0)]
    span = range(3, 55)
    found = survey(experts, world, [span], config)
    values = [run_values(expert, world, at(3), len(span) - 1, config)[:, 0] for expert in experts]
    standing = ExpertStanding(1, 2, config)
    for row, value in zip(span, np.stack(values, axis=1), strict=True):
        standing.mark(value[None], np.array([row == 3]), NOBODY)
        np.testing.assert_allclose(found.view.relative[row], standing.view().relative[0], atol=1e-6)
        np.testing.assert_allclose(found.view.level[row], standing.view().level[0], atol=1e-6)
    assert (found.view.relative[55:] == 0.0).all()


def test_survey_in_pieces_covers_every_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world, config = make_world(n_rows=120), config_of()
    experts = [Tilted("a", 1.0), Tilted("b", -1.0)]
    spans = [range(10, 47), range(60, 100)]
    whole = survey(experts, world, spans, config)
    monkeypatch.setattr(surveys, "_PIECE_ROWS", 9)
    pieces = survey(experts, world, spans, config)
    for span in spans:
        # After a bar or two a rule's book no longer knows when it began.
        rows = np.arange(span.start, span.stop)
        np.testing.assert_allclose(pieces.view.relative[rows], whole.view.relative[rows], atol=1e-3)
        assert (pieces.view.relative[rows] != 0).all()


def test_survey_refuses_spans_without_a_bar() -> None:
    with pytest.raises(DataError, match="at least 2 rows"):
        survey([Moving("a")], make_world(), [range(5, 6)], config_of())


def test_view_of_two_experts_by_hand() -> None:
    standing = ExpertStanding(1, 2, config_of())
    fresh, goes_on = np.array([True]), np.array([False])
    growth = [(1.0, 1.0), (1.1, 1.0), (1.1, 1.05), (1.21, 1.05)]
    for n, (a, b) in enumerate(growth):
        standing.mark(100.0 * np.array([[a, b]]), fresh if n == 0 else goes_on, NOBODY)
    bars = np.diff(np.log(np.array(growth)), axis=0)
    mean = bars.mean(axis=1)
    apart = bars - mean[:, None]
    rms = np.sqrt(np.square(apart).mean(axis=1).mean())
    level = np.sqrt(np.square(mean).mean())
    sight = standing.view()
    # Over 2 bars, and over the 3 of 5 that are known.
    expected = np.stack([apart[1:].sum(0) / (rms * 2**0.5), apart.sum(0) / (rms * 5**0.5)], 1)
    np.testing.assert_allclose(sight.relative[0], expected, rtol=1e-6)
    expected_level = [mean[1:].sum() / (level * 2**0.5), mean.sum() / (level * 5**0.5)]
    np.testing.assert_allclose(sight.level[0], expected_level, rtol=1e-6)
    assert sight.allowed.all()
    assert sight.drawdown.tolist() == [[0.0, 0.0]]


def test_view_does_not_depend_on_the_scale_of_returns_or_of_money() -> None:
    rng = np.random.default_rng(3)
    bars = 0.004 * rng.standard_normal((40, 2, 3))
    seen = []
    for size, money in ((1.0, 1.0), (0.1, 1e6)):
        standing = ExpertStanding(2, 3, config_of("risk.enabled=false"))
        for n in range(41):
            value = money * np.exp(size * bars[:n].sum(axis=0))
            standing.mark(value, np.full(2, n == 0), np.array([-1, -1]))
        seen.append(standing.view())
    np.testing.assert_allclose(seen[0].relative, seen[1].relative, rtol=1e-5)
    np.testing.assert_allclose(seen[0].level, seen[1].level, rtol=1e-5)


def test_long_trails_forget_what_is_older_than_the_longest_horizon() -> None:
    rng = np.random.default_rng(4)
    bars = 0.01 * rng.standard_normal((90, 1, 2))
    whole, late = ExpertStanding(1, 2, config_of()), ExpertStanding(1, 2, config_of())
    for n in range(91):
        whole.mark(np.exp(bars[:n].sum(axis=0)), np.array([n == 0]), NOBODY)
    for n in range(6):
        late.mark(np.exp(bars[85 : 85 + n].sum(axis=0)), np.array([n == 0]), NOBODY)
    np.testing.assert_allclose(whole.view().relative, late.view().relative, rtol=1e-5)


def test_risk_that_is_off_masks_and_scales_nobody() -> None:
    for enabled in (True, False):
        risk = f"risk.enabled={str(enabled).lower()}"
        standing = ExpertStanding(
            1, 2, config_of(risk, "risk.cvar_window=2", "risk.cvar_limit=0.01")
        )
        for n, value in enumerate((1.0, 0.9, 0.8)):
            marked = np.array([[value, 1.0]])
            standing.mark(marked, np.array([n == 0]), NOBODY)
        assert standing.allowed.tolist() == [[not enabled, True]]
        assert standing.scale.tolist() == [[0.5 if enabled else 1.0, 1.0]]
        assert standing.view().drawdown[0, 0] == pytest.approx(0.2 / 0.15)


def test_observation_has_the_entries_that_names_tells() -> None:
    config = config_of()
    horizons = config.meta_router.horizons
    sight = survey([Moving("a"), Moving("b")], make_world(), [range(3, 40)], config).view
    usage = np.array([[0.5, 0.3, 0.2]])
    market = np.arange(4, dtype=np.float32)[None]
    obs = make_observation(sight.at(np.array([20])), usage, np.array([2]), market)
    names = observation_names(("a", "b"), horizons)
    assert obs.shape == (1, len(names))
    assert obs.dtype == np.float32
    shown = dict(zip(names, obs[0].tolist(), strict=True))
    assert shown["relative/5/b"] == sight.relative[20, 1, 1]
    assert shown["usage/b"] == pytest.approx(0.3)
    assert [shown[f"charge/{who}"] for who in ("a", "b", "cash")] == [0, 0, 1]
    assert [shown["scale/a"], shown["masked/a"]] == [1, 0]
    assert [shown["market/5"], shown["market/calm"]] == [1, 3]


def test_market_view_knows_nothing_of_later_rows_nor_of_other_stretches() -> None:
    draws = [make_world(n_rows=50, seed=s, splits={"test": range(50)}) for s in (1, 2)]
    together, _ = join_worlds(draws)
    whole = market_view(together, all_first_rows(together), (2, 5))
    for n, draw in enumerate(draws):
        alone = market_view(draw, all_first_rows(draw), (2, 5))
        np.testing.assert_array_equal(whole[50 * n + 3 : 50 * n + 50], alone[3:])
    changed = draws[0].growth.copy()
    changed[30:] *= np.linspace(1.0, 3.0, 20)[:, None]
    later = market_view(replace(draws[0], growth=changed), all_first_rows(draws[0]), (2, 5))
    np.testing.assert_array_equal(later[:30], whole[:30])
    assert (later[30:] != whole[30:50]).any()


def test_the_router_sees_the_market_in_its_own_part_of_the_train_window() -> None:
    world = make_world(n_rows=90, window=4, splits={"train": range(60), "valid": range(60, 90)})
    router = parts_of(world, 0.3).router
    first = router.splits["train"].start
    assert first > 40
    seen = market_view(router, all_first_rows(router), (2, 5))
    assert (seen[first:60] != 0.0).any(axis=1).all()
    # From the window of its first row on it is what the whole train window shows there.
    whole = market_view(world, all_first_rows(world), (2, 5))
    np.testing.assert_allclose(seen[first + 5 : 60], whole[first + 5 : 60], atol=1e-5)


def test_market_view_of_two_assets_by_hand() -> None:
    growth = np.exp(np.cumsum([[0.0, 0.0], [0.01, 0.02], [0.03, -0.02], [0.02, 0.04]], axis=0))
    present = np.ones((4, 2), dtype=bool)
    world = make_world(close=growth, present=present, window=1, splits={"train": range(4)})
    seen = market_view(world, all_first_rows(world), (1, 3))[3]
    a, b = np.array([0.01, 0.03, 0.02]), np.array([0.02, -0.02, 0.04])
    rms = [np.sqrt(np.square(x).mean()) for x in (a, b)]
    one = [a[2] / rms[0], b[2] / rms[1]]
    three = [a.sum() / rms[0] / 3**0.5, b.sum() / rms[1] / 3**0.5]
    assert seen[:2] == pytest.approx([np.mean(one), np.mean(three)], rel=1e-5)
    assert seen[2] == pytest.approx(np.std(three), rel=1e-5)
    assert seen[3] == pytest.approx(0.0, abs=1e-6)
