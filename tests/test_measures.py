"""Measures against numbers worked out by hand, laws they obey, quantstats and skfolio.

Where the libraries define something else under the same name, a test states the difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import numpy as np
import pandas as pd
import pytest
import quantstats.stats as qs
import skfolio.measures as sk
from hypothesis import assume, given
from hypothesis import strategies as st

from echelon.ops import measures as m
from echelon.types import Floats

YEAR = 252

# +10 %, -50 %, +100 %: worth 1.1, 0.55, 1.1.
HALVED = np.array([0.1, -0.5, 1.0])

# Whole basis points: no two returns differ by rounding alone, where any two formulas part ways.
basis_points = st.integers(-9_999, 20_000)
series = st.lists(basis_points, min_size=1, max_size=120).map(lambda v: np.array(v) / 1e4)


def measured(returns: Floats, periods_per_year: float = YEAR) -> dict[str, float]:
    """All measures of a book that never traded."""
    return m.measure(
        returns,
        periods_per_year=periods_per_year,
        turnover=np.zeros(len(returns)),
        exposure=np.zeros(len(returns)),
        costs=m.Costs(0.0, 0.0, 0.0),
        initial_value=1.0,
    )


ON_RETURNS: list[Callable[[Floats], object]] = [
    m.equity,
    m.total_return,
    m.volatility_period,
    m.sharpe_period,
    m.drawdown_series,
    m.max_drawdown,
    m.cvar,
    m.hit_rate,
    lambda r: m.annual_return(r, YEAR),
    lambda r: m.volatility_annual(r, YEAR),
    lambda r: m.sharpe_annual(r, YEAR),
    lambda r: m.sortino_annual(r, YEAR),
    lambda r: m.calmar(r, YEAR),
    measured,
]


def market_returns(n_periods: int, seed: int = 7) -> Floats:
    """Fat-tailed daily returns with a small drift."""
    rng = np.random.default_rng(seed)
    return np.asarray(rng.standard_t(4, n_periods) * 0.009 + 0.0004)


def dated(returns: Floats) -> pd.Series:
    return pd.Series(returns, index=pd.bdate_range("2011-01-03", periods=len(returns)))


class TestByHand:
    def test_equity_compounds_from_one(self) -> None:
        assert m.equity(HALVED) == pytest.approx([1.1, 0.55, 1.1])

    def test_total_return_is_the_last_equity_less_one(self) -> None:
        assert m.total_return(HALVED) == pytest.approx(0.1)

    def test_annual_return_of_half_a_year_is_squared(self) -> None:
        # Two quarters of +10 %: (1.1²)^(4/2) - 1 = 1.4641 - 1.
        assert m.annual_return(np.array([0.1, 0.1]), 4) == pytest.approx(0.4641)

    def test_annual_return_of_two_years_is_the_root(self) -> None:
        # 1.44 over two years: √1.44 - 1.
        assert m.annual_return(np.array([0.44, 0.0]), 1) == pytest.approx(0.2)

    def test_volatility_is_that_of_a_sample(self) -> None:
        # Mean 2 %, deviations -2, 0, 2: √(8/2) = 2; the population's would be √(8/3).
        r = np.array([0.0, 0.02, 0.04])
        assert m.volatility_period(r) == pytest.approx(0.02)
        assert m.volatility_annual(r, 4) == pytest.approx(0.04)

    def test_sharpe_per_period_has_the_seeds_epsilon(self) -> None:
        r = np.array([0.0, 0.02, 0.04])
        assert m.sharpe_period(r) == pytest.approx(0.02 / (0.02 + 1e-8), rel=1e-12)

    def test_sharpe_annual_has_no_epsilon(self) -> None:
        assert m.sharpe_annual(np.array([0.0, 0.02, 0.04]), 4) == pytest.approx(2.0, rel=1e-12)

    def test_sortino_divides_by_all_periods(self) -> None:
        # Mean 1 %; downside √(0.02² / 4) = 1 %; times √4.
        r = np.array([0.03, -0.02, 0.01, 0.02])
        assert m.sortino_annual(r, 4) == pytest.approx(2.0)

    def test_drawdown_is_measured_from_the_highest_point_so_far(self) -> None:
        assert m.drawdown_series(HALVED) == pytest.approx([0.0, 0.5, 0.0])
        assert m.max_drawdown(HALVED) == pytest.approx(0.5)

    def test_a_first_loss_is_a_drawdown(self) -> None:
        assert m.drawdown_series(np.array([-0.2, 0.1])) == pytest.approx([0.2, 0.12])

    def test_calmar_is_annual_return_over_drawdown(self) -> None:
        # Three thirds of a year: +10 %, drawdown 50 %.
        assert m.calmar(HALVED, 3) == pytest.approx(0.2)

    def test_cvar_of_a_whole_tail_is_the_mean_of_its_losses(self) -> None:
        # 40 returns: the tail is the two worst, 8 % and 4 %.
        r = np.zeros(40)
        r[[3, 30, 31]] = -0.04, -0.08, -0.02
        assert m.cvar(r) == pytest.approx(0.06)

    def test_cvar_of_a_broken_tail_takes_a_part_of_the_next_loss(self) -> None:
        # 30 returns: 1.5 of them. (8 + 0.5·4) / 1.5.
        r = np.zeros(30)
        r[[3, 20, 21]] = -0.04, -0.08, -0.02
        assert m.cvar(r) == pytest.approx(0.1 / 1.5)

    def test_cvar_of_few_returns_is_the_worst_loss(self) -> None:
        assert m.cvar(np.array([0.1, -0.03, -0.02])) == pytest.approx(0.03)

    def test_cvar_is_negative_where_even_the_worst_is_a_gain(self) -> None:
        assert m.cvar(np.array([0.01, 0.02])) == pytest.approx(-0.01)

    def test_cvar_at_another_level(self) -> None:
        assert m.cvar(np.array([0.1, -0.04, -0.02, 0.0]), level=0.5) == pytest.approx(0.03)

    def test_turnover_counts_both_sides(self) -> None:
        # The portfolio is exchanged whole once (sold 1, bought 1) in a year of four periods.
        assert m.turnover_annual(np.array([0.0, 2.0, 0.0, 0.0]), 4) == pytest.approx(2.0)

    def test_information_ratio_is_of_what_is_above_the_yardstick(self) -> None:
        # Active returns 0.01 and 0.03: mean 0.02, deviation √2/100.
        got = m.information_ratio(np.array([0.02, 0.01]), np.array([0.01, -0.02]), 4)
        assert got == pytest.approx(2 * 0.02 / (math.sqrt(2) / 100))

    def test_a_book_that_differs_by_rounding_only_has_no_active_return(self) -> None:
        yardstick = market_returns(50)
        books = np.column_stack([yardstick * (1.0 + 1e-15), yardstick + 1e-6])
        active = m.active_returns(books, yardstick)
        assert not active[:, 0].any()
        np.testing.assert_allclose(active[:, 1], 1e-6, rtol=1e-6)
        assert m.information_ratio(books[:, 0], yardstick, YEAR) == 0.0

    def test_without_a_yardstick_there_is_no_information_ratio(self) -> None:
        assert math.isnan(measured(HALVED)["information_ratio"])

    def test_hit_rate_leaves_out_periods_without_a_move(self) -> None:
        assert m.hit_rate(np.array([0.1, 0.0, -0.1, 0.2, 0.0])) == pytest.approx(2 / 3)


class TestMeasure:
    def test_gives_each_measure_its_function_s_value(self) -> None:
        r, other = market_returns(300), market_returns(300)[::-1]
        got = m.measure(
            r,
            yardstick=other,
            periods_per_year=YEAR,
            turnover=np.full(300, 0.1),
            exposure=np.full(300, 0.8),
            costs=m.Costs(3.0, 2.0, 5.0),
            initial_value=1_000.0,
        )
        assert got == pytest.approx(
            {
                "total_return": m.total_return(r),
                "annual_return": m.annual_return(r, YEAR),
                "volatility_period": m.volatility_period(r),
                "volatility_annual": m.volatility_annual(r, YEAR),
                "sharpe_period": m.sharpe_period(r),
                "sharpe_annual": m.sharpe_annual(r, YEAR),
                "information_ratio": m.sharpe_annual(r - other, YEAR),
                "sortino_annual": m.sortino_annual(r, YEAR),
                "calmar": m.calmar(r, YEAR),
                "max_drawdown": m.max_drawdown(r),
                "max_drawdown_year": m.max_drawdown(r),
                "budget_jumps": math.nan,
                "cvar95": m.cvar(r, 0.95),
                "turnover_annual": 25.2,
                "hit_rate": m.hit_rate(r),
                "exposure": 0.8,
                "cost_total": 10.0,
                "cost_share": 0.01,
                "cost_commission": 3.0,
                "cost_stamp": 2.0,
                "cost_slippage": 5.0,
            },
            nan_ok=True,
        )

    def test_worst_year_counts_each_calendar_year_from_a_peak_of_its_own(self) -> None:
        """-20 % across the turn of the year, -10 % of it within either."""
        days = np.array(["2019-12-30", "2019-12-31", "2020-01-02", "2020-01-03"], "datetime64[us]")
        r = np.array([0.0, -0.1, -0.1, 0.05])
        assert m.max_drawdown(r) == pytest.approx(0.19)
        assert m.max_drawdown_year(r, days) == pytest.approx(0.1)
        assert m.max_drawdown_year(r, None) == m.max_drawdown(r)

    def test_every_measure_has_a_label_in_its_order(self) -> None:
        assert list(m.LABELS) == list(measured(HALVED))

    def test_no_two_measures_share_a_label(self) -> None:
        assert len({label.text for label in m.LABELS.values()}) == len(m.LABELS)


class TestOddSeries:
    @pytest.mark.parametrize("function", ON_RETURNS)
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_return_that_is_no_number_is_refused(
        self, function: Callable[[Floats], object], bad: float
    ) -> None:
        with pytest.raises(ValueError, match=r"finite, but 1 of 3 are not; the first is .* at 1"):
            function(np.array([0.1, bad, 0.1]))

    @pytest.mark.parametrize("function", ON_RETURNS)
    def test_an_empty_series_is_refused(self, function: Callable[[Floats], object]) -> None:
        with pytest.raises(ValueError, match="at least one value"):
            function(np.array([]))

    @pytest.mark.parametrize("function", ON_RETURNS)
    def test_several_series_at_once_are_refused(self, function: Callable[[Floats], object]) -> None:
        with pytest.raises(ValueError, match=r"one series \[T\]"):
            function(np.zeros((4, 2)))

    def test_a_loss_of_more_than_everything_cannot_be_compounded(self) -> None:
        with pytest.raises(ValueError, match=r"below -1 .* at 1 there is -1\.5"):
            m.max_drawdown(np.array([0.0, -1.5]))

    def test_cash_has_zeros_and_no_hit_rate(self) -> None:
        got = measured(np.zeros(10))
        assert math.isnan(got["hit_rate"])
        shown = {
            *("total_return", "annual_return", "volatility_period", "volatility_annual"),
            *("sharpe_period", "sharpe_annual", "sortino_annual", "calmar", "max_drawdown"),
            "cvar95",
        }
        assert {name: value for name, value in got.items() if name in shown} == (
            dict.fromkeys(shown, 0.0)
        )

    @pytest.mark.parametrize(("rate", "limit"), [(0.1, math.inf), (-0.1, -math.inf)])
    def test_sharpe_of_a_constant_series_is_its_limit(self, rate: float, limit: float) -> None:
        r = np.full(3, rate)  # the mean of three 0.1 is rounded: no variance must come of it
        assert m.volatility_period(r) == 0.0
        assert m.sharpe_annual(r, YEAR) == limit
        assert m.sharpe_period(r) == pytest.approx(rate / 1e-8)

    def test_a_single_return_has_no_volatility_and_no_sharpe(self) -> None:
        got = measured(np.array([-0.1]), 4)
        for name in ("volatility_period", "volatility_annual", "sharpe_period", "sharpe_annual"):
            assert math.isnan(got[name]), name
        assert got["total_return"] == pytest.approx(-0.1)
        assert got["annual_return"] == pytest.approx(0.9**4 - 1)
        assert got["sortino_annual"] == pytest.approx(-2.0)
        assert got["max_drawdown"] == pytest.approx(0.1)
        assert got["cvar95"] == pytest.approx(0.1)
        assert got["hit_rate"] == 0.0

    def test_gains_without_a_loss_have_infinite_sortino_and_calmar(self) -> None:
        got = measured(np.array([0.01, 0.02]))
        assert got["sortino_annual"] == got["calmar"] == math.inf

    def test_ruin_is_a_loss_of_everything(self) -> None:
        got = measured(np.array([0.1, -1.0, 0.0]))
        assert got["total_return"] == got["annual_return"] == -1.0
        assert got["max_drawdown"] == 1.0

    def test_a_minute_of_great_luck_taken_to_a_year_is_infinite(self) -> None:
        assert m.annual_return(np.array([0.1]), 252 * 240) == math.inf

    @pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
    def test_a_year_without_periods_is_refused(self, rate: float) -> None:
        with pytest.raises(ValueError, match="periods_per_year must be above 0"):
            measured(HALVED, rate)

    @pytest.mark.parametrize("level", [0.0, 1.0, 95.0, math.nan])
    def test_a_level_that_leaves_no_tail_is_refused(self, level: float) -> None:
        with pytest.raises(ValueError, match="level must lie between 0 and 1"):
            m.cvar(HALVED, level)

    def test_negative_turnover_is_refused(self) -> None:
        with pytest.raises(ValueError, match="traded must not be negative"):
            m.turnover_annual(np.array([0.1, -0.1]), YEAR)


class TestLaws:
    @given(series, st.floats(0.01, 100.0))
    def test_sharpe_and_sortino_do_not_depend_on_scale(self, r: Floats, scale: float) -> None:
        assume(len(r) > 1 and r.min() != r.max())
        for ratio in (m.sharpe_annual, m.sortino_annual):
            # The mean of returns that cancel out is rounding alone: nothing to compare.
            assert ratio(r * scale, YEAR) == pytest.approx(ratio(r, YEAR), rel=1e-9, abs=1e-9)

    @given(series, st.floats(0.01, 100.0))
    def test_volatility_and_cvar_grow_with_scale(self, r: Floats, scale: float) -> None:
        assume(len(r) > 1)
        for size in (m.volatility_period, m.cvar):
            assert size(r * scale) == pytest.approx(scale * size(r), rel=1e-9, abs=1e-12)

    @given(series)
    def test_drawdown_lies_between_nothing_and_everything(self, r: Floats) -> None:
        drawdowns = m.drawdown_series(r)
        assert drawdowns.shape == r.shape
        assert drawdowns.min() >= 0.0
        assert m.max_drawdown(r) == drawdowns.max() <= 1.0

    @given(series)
    def test_a_loss_over_all_is_a_drawdown_of_at_least_as_much(self, r: Floats) -> None:
        assert m.max_drawdown(r) >= -m.total_return(r) - 1e-12

    @given(series)
    def test_cvar_lies_between_value_at_risk_and_the_worst_loss(self, r: Floats) -> None:
        assert sk.value_at_risk(r) - 1e-12 <= m.cvar(r) <= -r.min() + 1e-12

    @given(series)
    def test_cvar_grows_with_the_level(self, r: Floats) -> None:
        assert m.cvar(r, 0.5) - 1e-12 <= m.cvar(r, 0.9) <= m.cvar(r, 0.99) + 1e-12

    @given(series, st.randoms(use_true_random=False))
    def test_order_matters_to_drawdown_alone(self, r: Floats, random: Random) -> None:
        shuffled = r[np.argsort(np.array([random.random() for _ in r]))]
        before = measured(r, 1)
        after = measured(shuffled, 1)
        for name in ("max_drawdown", "max_drawdown_year", "calmar"):
            del before[name], after[name]
        assert after == pytest.approx(before, rel=1e-9, abs=1e-9, nan_ok=True)

    @given(series)
    def test_hit_rates_of_a_series_and_its_mirror_add_up_to_one(self, r: Floats) -> None:
        assume(r.any())
        assert m.hit_rate(r) + m.hit_rate(-r) == pytest.approx(1.0)

    @given(series)
    def test_a_year_repeated_has_the_same_annual_return(self, r: Floats) -> None:
        once, twice = m.annual_return(r, len(r)), m.annual_return(np.tile(r, 2), len(r))
        assert twice == pytest.approx(once, rel=1e-9, abs=1e-9)
        assert once == pytest.approx(m.total_return(r))


@pytest.mark.parametrize("n_periods", [5, 19, 20, 21, 63, 252, 1000, 1258])
@pytest.mark.parametrize("seed", [0, 1, 2])
class TestAgainstLibraries:
    def test_quantstats_agrees(self, n_periods: int, seed: int) -> None:
        r = market_returns(n_periods, seed)
        assert (r < 0).any(), "quantstats has no limits: it needs a loss"
        s = dated(r)
        got = measured(r)
        theirs = {
            "total_return": qs.comp(s),
            "annual_return": qs.cagr(s, periods=YEAR),
            "volatility_period": qs.volatility(s, annualize=False),
            "volatility_annual": qs.volatility(s, periods=YEAR),
            "sharpe_annual": qs.sharpe(s, periods=YEAR),
            "sortino_annual": qs.sortino(s, periods=YEAR),
            "calmar": qs.calmar(s, periods=YEAR),
            "max_drawdown": -qs.max_drawdown(s),
            "hit_rate": qs.win_rate(s),
        }
        assert {name: got[name] for name in theirs} == pytest.approx(theirs, rel=1e-9)
        assert m.drawdown_series(r) == pytest.approx(-qs.to_drawdown_series(s).to_numpy())

    def test_skfolio_agrees(self, n_periods: int, seed: int) -> None:
        r = market_returns(n_periods, seed)
        downside = sk.semi_deviation(r, min_acceptable_return=0.0, biased=True)
        drawdowns = sk.get_drawdowns(r, compounded=True)
        assert m.equity(r) == pytest.approx(sk.get_cumulative_returns(r, compounded=True))
        assert m.volatility_period(r) == pytest.approx(sk.standard_deviation(r), rel=1e-12)
        assert m.sharpe_annual(r, YEAR) == pytest.approx(
            sk.mean(r) / sk.standard_deviation(r) * math.sqrt(YEAR), rel=1e-9
        )
        assert m.sortino_annual(r, YEAR) == pytest.approx(
            sk.mean(r) / downside * math.sqrt(YEAR), rel=1e-9
        )
        assert m.drawdown_series(r) == pytest.approx(-drawdowns)
        assert m.max_drawdown(r) == pytest.approx(sk.max_drawdown(drawdowns), rel=1e-12)
        for level in (0.5, 0.9, 0.95, 0.99):
            assert m.cvar(r, level) == pytest.approx(sk.cvar(r, beta=level), rel=1e-9), level

    def test_the_seeds_epsilon_moves_sharpe_by_a_few_millionths(
        self, n_periods: int, seed: int
    ) -> None:
        r = market_returns(n_periods, seed)
        theirs = qs.sharpe(dated(r), annualize=False)
        assert m.sharpe_period(r) == pytest.approx(theirs, rel=5e-6)


class TestWhereLibrariesDiffer:
    def test_quantstats_historical_cvar_agrees_only_for_a_whole_tail(self) -> None:
        # 1,000 returns: both take the worst 50. 1,010: ours 50.5 of them, theirs 51.
        whole, broken = market_returns(1000), market_returns(1010)
        assert m.cvar(whole) == pytest.approx(historical_cvar(whole), rel=1e-12)
        assert historical_cvar(broken) == pytest.approx(-np.sort(broken)[:51].mean(), rel=1e-12)
        assert m.cvar(broken) > historical_cvar(broken)

    def test_quantstats_default_cvar_is_that_of_a_normal_curve(self) -> None:
        r = market_returns(1000)
        normal = r.std(ddof=1) * 2.062713 - r.mean()  # φ(Φ⁻¹(0.05)) / 0.05
        assert -qs.conditional_value_at_risk(dated(r)) == pytest.approx(normal, rel=1e-5)
        assert m.cvar(r) > normal, "fat tails lose more than a normal curve says"

    def test_skfolio_semi_deviation_is_about_the_mean_unless_told(self) -> None:
        r = market_returns(252)
        theirs = sk.mean(r) / sk.semi_deviation(r) * math.sqrt(YEAR)
        assert m.sortino_annual(r, YEAR) != pytest.approx(theirs, rel=1e-3)

    def test_skfolio_drawdown_is_not_compounded_unless_told(self) -> None:
        assert sk.max_drawdown(sk.get_drawdowns(HALVED)) == pytest.approx(0.5)
        twice = np.array([-0.5, -0.5])
        assert sk.max_drawdown(sk.get_drawdowns(twice)) == pytest.approx(1.0)
        assert m.max_drawdown(twice) == pytest.approx(0.75)


def historical_cvar(returns: Floats) -> float:
    return -float(qs.conditional_value_at_risk(dated(returns), method="historical"))


def so_far(running: m.RunningMeasures) -> dict[str, float]:
    names = ("drawdown", "max_drawdown", "sharpe_annual", "cvar95")
    return {name: getattr(running, name) for name in names}


class TestRunning:
    @given(series, st.sampled_from([1.0, 252.0, 12_096.0]))
    def test_equals_the_batch_functions_at_each_step(self, r: Floats, per_year: float) -> None:
        check_running(r, per_year, every=1)

    def test_equals_the_batch_functions_over_many_years(self) -> None:
        check_running(market_returns(5_000), YEAR, every=97)

    def test_equals_the_batch_functions_when_losses_only_grow_or_shrink(self) -> None:
        check_running(-np.linspace(0.0001, 0.03, 300), YEAR, every=1)
        check_running(-np.linspace(0.03, 0.0001, 300), YEAR, every=1)

    def test_before_the_first_return_there_is_no_drawdown_and_nothing_else_to_tell(self) -> None:
        running = m.RunningMeasures(YEAR)
        assert so_far(running) == pytest.approx(
            {
                "drawdown": 0.0,
                "max_drawdown": 0.0,
                "sharpe_annual": math.nan,
                "cvar95": math.nan,
            },
            nan_ok=True,
        )

    def test_reset_forgets_everything(self) -> None:
        running, fresh = m.RunningMeasures(YEAR), m.RunningMeasures(YEAR)
        for ret in market_returns(50):
            running.update(ret)
        running.reset()
        for ret in HALVED:
            running.update(ret)
            fresh.update(ret)
        assert so_far(running) == so_far(fresh)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -1.5])
    def test_a_return_that_cannot_be_is_refused_and_changes_nothing(self, bad: float) -> None:
        running = m.RunningMeasures(YEAR)
        running.update(0.01)
        before = so_far(running)
        with pytest.raises(ValueError, match="a return must be a number from -1 up"):
            running.update(bad)
        assert so_far(running) == pytest.approx(before, nan_ok=True)


def check_running(returns: Floats, per_year: float, every: int) -> None:
    running = m.RunningMeasures(per_year)
    for t, ret in enumerate(returns.tolist(), start=1):
        running.update(ret)
        if t % every:
            continue
        past = returns[:t]
        expected = {
            "drawdown": m.drawdown_series(past)[-1],
            "max_drawdown": m.max_drawdown(past),
            "sharpe_annual": m.sharpe_annual(past, per_year),
            "cvar95": m.cvar(past),
        }
        assert so_far(running) == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True), t


class TestOverSeeds:
    def test_mean_and_sample_deviation(self) -> None:
        assert m.mean_std([1.0, 3.0, 5.0]) == pytest.approx((3.0, 2.0))

    def test_one_seed_has_no_deviation(self) -> None:
        assert m.mean_std([1.5]) == pytest.approx((1.5, math.nan), nan_ok=True)

    def test_equal_seeds_have_none_at_all(self) -> None:
        assert m.mean_std([0.1, 0.1, 0.1]).std == 0.0

    def test_what_cannot_be_told_of_one_seed_cannot_be_told_of_all(self) -> None:
        assert m.mean_std([1.0, math.nan]) == pytest.approx((math.nan, math.nan), nan_ok=True)

    @pytest.mark.parametrize("values", [[1.0, math.inf], [math.inf, math.inf]])
    def test_an_infinite_seed_makes_the_mean_infinite(self, values: list[float]) -> None:
        assert m.mean_std(values) == pytest.approx((math.inf, math.nan), nan_ok=True)

    def test_no_seeds_are_refused(self) -> None:
        with pytest.raises(ValueError, match="at least one value"):
            m.mean_std([])


class TestLabels:
    @pytest.mark.parametrize(
        ("name", "value", "std", "shown"),
        [
            ("total_return", 0.12345, math.nan, "12.3 %"),
            ("total_return", -0.12345, 0.01, "−12.3 ± 1.0 %"),
            ("total_return", -0.00001, math.nan, "0.00 %"),
            ("sharpe_annual", 1.234, 0.051, "1.23 ± 0.05"),
            ("sortino_annual", math.inf, math.nan, "∞"),
            ("sharpe_annual", -math.inf, math.nan, "−∞"),
            ("cost_total", 12345.678, math.nan, "12,346"),
            ("sharpe_period", 0.05123, math.nan, "0.0512"),
            ("turnover_annual", 94.6117, 3.214, "94.6 ± 3.2×"),
            ("hit_rate", math.nan, math.nan, "–"),
        ],
    )
    def test_prints_by_unit(self, name: str, value: float, std: float, shown: str) -> None:
        assert m.LABELS[name].format(value, std) == shown

    def test_says_which_way_is_better(self) -> None:
        better = {name for name, label in m.LABELS.items() if label.higher_is_better}
        assert better == {
            *("total_return", "annual_return", "sharpe_period", "sharpe_annual"),
            *("information_ratio", "sortino_annual", "calmar", "hit_rate"),
        }
        indifferent = {n for n, label in m.LABELS.items() if label.higher_is_better is None}
        assert indifferent == {"turnover_annual", "exposure"}
