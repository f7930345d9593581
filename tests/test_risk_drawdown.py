"""Masks of experts: by hand, against a slow twin, and the loss of 16 % in 30 days."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from echelon.config.hierarchy import RiskConfig
from echelon.errors import DataError, StoreError
from echelon.risk.drawdown import DrawdownGuard
from echelon.risk.events import RiskKind
from echelon.rng import stream
from echelon.types import Bools, Floats

CASH = 0


def rules(
    window: int = 30,
    limit: float = 0.15,
    release: float = 0.10,
    confirm: int = 5,
    cooldown: int = 20,
) -> RiskConfig:
    return RiskConfig(
        drawdown_window=window,
        drawdown_limit=limit,
        drawdown_release=release,
        release_bars=confirm,
        cooldown_bars=cooldown,
    )


QUICK = RiskConfig(
    drawdown_window=3, drawdown_limit=0.15, drawdown_release=0.10, release_bars=2, cooldown_bars=0
)
NOBODY = np.array([-1])


def watch(
    path: list[float], rule: RiskConfig, charge: int = -1
) -> tuple[list[float], list[bool], list[bool]]:
    """Drawdown, allowed and forced at each bar, of one expert beside cash."""
    guard = DrawdownGuard(1, 2, CASH, rule)
    drawdown, allowed, forced = [], [], []
    for value in path:
        verdict = guard.update(np.array([[1.0, value]]), np.array([charge]))
        assert verdict.allowed[0, CASH]
        drawdown.append(float(verdict.drawdown[0, 1]))
        allowed.append(bool(verdict.allowed[0, 1]))
        forced.append(bool(verdict.forced[0]))
    return drawdown, allowed, forced


# --- the risk test of the issue -----------------------------------------------------------------


def test_expert_that_loses_16_percent_in_30_days_is_masked_from_the_next_decision_on() -> None:
    """A router that prefers expert 1 decides every 5 bars, and at once where it is forced to."""
    steady = np.full(31, 0.84 ** (1 / 30))
    steady[0] = 1.0
    path = 100.0 * np.cumprod(steady)
    assert path[-1] == pytest.approx(84.0)
    guard = DrawdownGuard(1, 3, CASH, RiskConfig())
    charge, decided, masked_at = -1, {}, None
    for t, value in enumerate(path):
        verdict = guard.update(np.array([[100.0, value, 100.0]]), np.array([charge]))
        if t % 5 == 0 or verdict.forced[0]:
            charge = int(np.flatnonzero(verdict.allowed[0] * [1, 3, 2] == 3).sum()) or 2
            decided[t] = charge
        if masked_at is None and not verdict.allowed[0, 1]:
            masked_at = t
            assert verdict.forced[0]
    # 0.84^(t/30) < 0.85 from t = 27.96 on: bar 28, at which no decision would have been due.
    assert masked_at == 28
    assert decided == {0: 1, 5: 1, 10: 1, 15: 1, 20: 1, 25: 1, 28: 2, 30: 2}


@given(st.lists(st.floats(0.0, 1.0), min_size=30, max_size=30), st.integers(0, 60))
@settings(max_examples=25, deadline=None)
def test_16_percent_in_30_days_mask_on_whichever_days_they_are_lost(
    shares: list[float], before: int
) -> None:
    weights = np.array(shares) + 1e-6
    logs = np.log(0.84) * weights / weights.sum()
    path = [*np.ones(before), *np.exp(np.concatenate([[0.0], np.cumsum(logs)]))]
    _, allowed, forced = watch(path, RiskConfig(), charge=1)
    assert not allowed[-1]
    assert forced[-1]


def test_15_percent_are_not_more_than_15_percent() -> None:
    rule = RiskConfig()
    assert watch([100.0, 85.0], rule)[1] == [True, True]
    assert watch([100.0, 84.999], rule)[1] == [True, False]


# --- by hand ------------------------------------------------------------------------------------


def test_peak_counts_for_as_many_bars_as_the_window_has() -> None:
    drawdown, allowed, _ = watch([100, 96, 92, 86, 86, 86], QUICK)
    # Bars 1–3 began at 100; bar 4 looks back to 96, bar 5 to 92.
    assert drawdown == pytest.approx([0, 0.04, 0.08, 0.14, 10 / 96, 6 / 92])
    assert all(allowed)


def test_mask_comes_at_once_and_goes_after_confirming_bars() -> None:
    path = [100, 80, 89, 91, 95, 89.9, 92, 93, 70]
    rule = RiskConfig(
        drawdown_window=50,
        drawdown_limit=0.15,
        drawdown_release=0.10,
        release_bars=2,
        cooldown_bars=0,
    )
    _, allowed, _ = watch(path, rule)
    # 11 % is not calm; 9 % and 5 % are two calm bars; 10.1 % masks nobody; 30 % does, at once.
    assert allowed == [True, False, False, False, True, True, True, True, False]


def test_relapse_between_confirming_bars_begins_the_count_anew() -> None:
    rule = RiskConfig(
        drawdown_window=50,
        drawdown_limit=0.15,
        drawdown_release=0.10,
        release_bars=3,
        cooldown_bars=0,
    )
    _, allowed, _ = watch([100, 80, 95, 95, 89, 95, 95, 95], rule)
    assert allowed == [True, *[False] * 6, True]


def test_exactly_the_release_level_is_not_calm() -> None:
    rule = RiskConfig(
        drawdown_window=50,
        drawdown_limit=0.15,
        drawdown_release=0.10,
        release_bars=1,
        cooldown_bars=0,
    )
    assert watch([100, 80, 90, 90.1], rule)[1] == [True, False, False, True]


def test_cooldown_holds_a_recovered_expert_back() -> None:
    rule = RiskConfig(
        drawdown_window=50,
        drawdown_limit=0.15,
        drawdown_release=0.10,
        release_bars=1,
        cooldown_bars=4,
    )
    _, allowed, _ = watch([100, 80, *[100] * 6], rule)
    assert allowed == [True, False, False, False, False, True, True, True]


def test_defaults_mask_a_recovered_expert_for_20_bars() -> None:
    _, allowed, _ = watch([100, 84, *[100] * 30], RiskConfig())
    assert allowed.index(False) == 1
    assert len(allowed) - allowed[::-1].index(False) == 21  # bars 1 to 20 masked, 21 not


def test_fall_that_left_the_window_is_forgotten() -> None:
    _, allowed, _ = watch([100, *[80] * 7], QUICK)
    # The peak is seen by bars 1–3; bars 4 and 5 are calm.
    assert allowed == [True, False, False, False, False, True, True, True]


# --- who is in charge ---------------------------------------------------------------------------


def test_masking_an_expert_that_is_not_in_charge_forces_nothing() -> None:
    assert watch([100, 80], QUICK, charge=CASH)[2] == [False, False]
    assert watch([100, 80], QUICK, charge=-1)[2] == [False, False]


def test_nobody_in_charge_is_not_the_first_expert() -> None:
    guard = DrawdownGuard(2, 2, 1, QUICK)
    guard.update(np.full((2, 2), 100.0), np.array([-1, 0]))
    verdict = guard.update(np.full((2, 2), 50.0), np.array([-1, 0]))
    assert verdict.forced.tolist() == [False, True]


def test_charge_left_to_a_masked_expert_is_forced_at_every_bar() -> None:
    assert watch([100, 80, 80], QUICK, charge=1)[2] == [False, True, True]


def test_all_experts_masked_leaves_cash() -> None:
    guard = DrawdownGuard(2, 4, 3, RiskConfig())
    guard.update(np.full((2, 4), 100.0), np.array([0, 1]))
    verdict = guard.update(np.full((2, 4), 50.0), np.array([0, 3]))  # cash itself fell too
    assert verdict.allowed.tolist() == [[False, False, False, True]] * 2
    assert verdict.masked_now.tolist() == [[True, True, True, False]] * 2
    assert verdict.forced.tolist() == [True, False]


def test_mark_that_is_no_number_masks_only_its_expert_and_is_never_a_peak() -> None:
    guard = DrawdownGuard(1, 4, CASH, QUICK)
    guard.update(np.array([[1.0, 100.0, 100.0, 100.0]]), NOBODY)
    verdict = guard.update(np.array([[1.0, np.nan, np.inf, 101.0]]), NOBODY)
    assert verdict.allowed.tolist() == [[True, False, False, True]]
    assert np.isnan(verdict.drawdown[0, 1:3]).all()
    verdict = guard.update(np.array([[1.0, 100.0, 100.0, 101.0]]), NOBODY)
    assert verdict.drawdown.tolist() == [[0.0] * 4]


def test_expert_that_begins_without_a_number_or_with_nothing_is_masked() -> None:
    guard = DrawdownGuard(1, 3, CASH, QUICK)
    verdict = guard.update(np.array([[1.0, -np.inf, 0.0]]), NOBODY)
    assert verdict.allowed.tolist() == [[True, False, False]]
    assert verdict.drawdown[0, 2] == 1.0


def test_cash_expert_without_a_number_is_an_error_and_changes_nothing() -> None:
    guard = DrawdownGuard(1, 2, CASH, QUICK)
    guard.update(np.array([[1.0, 100.0]]), NOBODY)
    before = guard.state()
    with pytest.raises(DataError, match=r"cash expert \(index 0\) is worth .*nan"):
        guard.update(np.array([[np.nan, 90.0]]), NOBODY)
    assert_same(before, guard.state())


# --- many books, resumption ---------------------------------------------------------------------


def slow_masks(path: Floats, rule: RiskConfig) -> Bools:
    """One expert, written as the rules read."""
    masked, since, out = False, 0, []
    lost: list[float] = []
    for t in range(len(path)):
        peak = max(path[max(0, t - rule.drawdown_window) : t + 1])
        lost.append((peak - path[t]) / peak)
        if masked:
            calm = lost[max(since + 1, t - rule.release_bars + 1) :]
            if len(calm) == rule.release_bars and max(calm) < rule.drawdown_release:
                masked = t - since < rule.cooldown_bars
        elif lost[t] > rule.drawdown_limit:
            masked, since = True, t
        out.append(masked)
    return np.array(out)


def walks(n_bars: int, n_books: int, n_experts: int, name: str) -> Floats:
    rng = stream(3, "risk", name)
    return np.exp(np.cumsum(rng.normal(0.0, 0.03, (n_bars, n_books, n_experts)), axis=0))


@pytest.mark.parametrize(
    "rule",
    [
        RiskConfig(),
        RiskConfig(
            drawdown_window=5,
            drawdown_limit=0.08,
            drawdown_release=0.08,
            release_bars=1,
            cooldown_bars=3,
        ),
    ],
)
def test_guard_agrees_with_its_slow_twin_in_every_book(rule: RiskConfig) -> None:
    paths = walks(300, 4, 6, "twin")
    guard = DrawdownGuard(4, 6, 5, rule)
    nobody = np.full(4, -1)
    got = np.array([~guard.update(marks, nobody).allowed for marks in paths])
    assert not got[:, :, 5].any()
    for e in range(4):
        for k in range(5):
            np.testing.assert_array_equal(got[:, e, k], slow_masks(paths[:, e, k], rule))
    assert np.diff(got.astype(int), axis=0).clip(min=0).sum() > 20  # masks that began


def assert_same(one: tuple[dict, dict], other: tuple[dict, dict]) -> None:
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    for name, values in one[0].items():
        np.testing.assert_array_equal(values, other[0][name])


def test_resumed_guard_goes_on_bit_by_bit() -> None:
    paths = walks(200, 3, 4, "resume")
    charge = np.array([1, 2, 0])
    whole = DrawdownGuard(3, 4, CASH, RiskConfig())
    for marks in paths[:77]:
        whole.update(marks, charge)
    arrays, facts = whole.state()
    resumed = DrawdownGuard(3, 4, CASH, RiskConfig())
    resumed.restore(arrays, facts)
    for marks in paths[77:]:
        one, other = whole.update(marks, charge), resumed.update(marks, charge)
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
    assert_same(whole.state(), resumed.state())


def test_state_is_a_copy() -> None:
    guard = DrawdownGuard(1, 2, CASH, QUICK)
    arrays, _ = guard.state()
    guard.update(np.array([[1.0, 5.0]]), NOBODY)
    assert np.isneginf(arrays["marks"]).all()


def test_state_of_another_shape_is_refused_and_changes_nothing() -> None:
    guard = DrawdownGuard(1, 2, CASH, QUICK)
    before = guard.state()
    arrays, facts = DrawdownGuard(1, 2, CASH, RiskConfig()).state()
    with pytest.raises(StoreError, match=r"guard's marks is float64\[1, 2, 31\], expected .* 4\]"):
        guard.restore(arrays, facts)
    good, _ = guard.state()
    with pytest.raises(StoreError, match=r"cursor is 4, expected 0 to 3"):
        guard.restore(good, {"cursor": 4})
    del good["age"]
    with pytest.raises(StoreError, match=r"age is missing"):
        guard.restore(good, {"cursor": 0})
    assert_same(before, guard.state())


def test_restart_forgets_one_book_or_one_expert_and_no_other() -> None:
    guard = DrawdownGuard(2, 3, CASH, RiskConfig())
    nobody = np.full(2, -1)
    guard.update(np.full((2, 3), 100.0), nobody)
    guard.update(np.full((2, 3), 50.0), nobody)
    guard.restart(np.array([[False, True, False], [False, False, False]]))
    assert guard.allowed.tolist() == [[True, True, False], [True, False, False]]
    guard.restart(np.array([False, True]))
    assert guard.allowed.tolist() == [[True, True, False], [True, True, True]]
    verdict = guard.update(np.full((2, 3), 49.0), nobody)
    assert verdict.drawdown.tolist() == [[0.51, 0.0, 0.51], [0.0, 0.0, 0.0]]
    with pytest.raises(ValueError, match=r"which is bool\[3\]"):
        guard.restart(np.zeros(3, dtype=bool))


def test_events_name_who_was_masked_released_and_replaced() -> None:
    names = ["cash", "trend"]
    guard = DrawdownGuard(2, 2, CASH, rules(window=9, confirm=1, cooldown=0))
    found = []
    for t, value in enumerate([100.0, 84.0, 95.0]):
        charge = np.array([1, 0]) if t < 2 else np.array([0, 0])
        verdict = guard.update(np.array([[1.0, 100.0], [1.0, value]])[::-1], charge)
        found += guard.events(verdict, t, names)
    assert [(e.time, e.kind, e.who, round(e.value, 9), e.limit, e.book) for e in found] == [
        (1, RiskKind.MASKED, "trend", 0.16, 0.15, 0),
        (1, RiskKind.FORCED, "trend", 0.16, 0.15, 0),
        (2, RiskKind.RELEASED, "trend", 0.05, 0.1, 0),
    ]


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"drawdown_window": 0},
        {"drawdown_limit": 15.0},
        {"drawdown_limit": float("nan")},
        {"drawdown_release": 0.2},
        {"release_bars": 0},
        {"cooldown_bars": -1},
        {"cvar_limit": 0.0},
        {"cvar_window": 0},
        {"halt_drawdown": 25.0},
        {"halt_bars": 0},
        {"turnover_per_bar": 0.0},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        RiskConfig(**wrong)


def test_wrong_shapes_and_indices_are_refused() -> None:
    with pytest.raises(ValueError, match="cash = 2"):
        DrawdownGuard(1, 2, 2, QUICK)
    guard = DrawdownGuard(1, 2, CASH, QUICK)
    with pytest.raises(ValueError, match=r"equity has shape \(2,\), expected \(1, 2\)"):
        guard.update(np.ones(2), NOBODY)
    with pytest.raises(ValueError, match=r"in_charge = \[2\]: expected -1 to 1"):
        guard.update(np.ones((1, 2)), np.array([2]))
