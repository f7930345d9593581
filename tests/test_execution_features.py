"""Public features of execution: by hand, scaled on train days only, and blind to what comes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scrambled_days import check_causal, scramble_after

from echelon.errors import FeatureError, LeakageError
from echelon.execution.days import Days
from echelon.execution.features import (
    FEATURES,
    Past,
    PublicFeatures,
    Quotes,
    previous_days,
    public_features,
    trailing_profile,
)

HAND = Days.from_prices(
    np.array([[10.0, 10.0, 10.0, 10.0], [10.0, 11.0, np.nan, 9.9]]),
    np.array([[100.0, 100.0, 300.0, 100.0], [100.0, 200.0, 0.0, 100.0]]),
)
"""Two days of four ticks; the second has no trading in its third tick."""


def market(seed: int, n_days: int = 6, n_ticks: int = 12) -> Days:
    """Two symbols by turns, with halts; one day has no trading at all."""
    rng = np.random.default_rng(seed)
    price = np.exp(rng.normal(0, 0.01, (n_days, n_ticks)).cumsum(axis=1)) * 20
    price[rng.random(price.shape) < 0.1] = np.nan
    price[n_days // 2] = np.nan
    volume = np.floor(rng.exponential(100, price.shape)) * (rng.random(price.shape) > 0.1)
    days = Days.from_prices(price, np.where(np.isnan(price), 0.0, volume))
    dates = days.dates[np.arange(n_days) // 2]
    return Days(
        ("AAA", "BBB") * (n_days // 2),
        dates,
        *(days.clock, days.buy, days.sell, days.known, days.volume),
    )


def of(features: PublicFeatures, name: str, day: int) -> np.ndarray:
    return np.asarray(features.today[day, :, features.names.index(name)])


def momentum(past: Past) -> float:
    return float(np.log(past.price[-1] / past.price[0]))


def test_features_of_a_day_by_hand() -> None:
    found = public_features(HAND)
    assert found.names == tuple(n for n, one in FEATURES.items() if not one.book)
    assert found.today.dtype == np.float32
    up, down = np.log(1.1), np.log(9.9 / 11.0)
    np.testing.assert_allclose(of(found, "return_1", 1), [0, up, 0, down], rtol=1e-6)
    np.testing.assert_allclose(of(found, "return_5", 1), [0, up, 0, up + down], rtol=1e-5)
    np.testing.assert_allclose(of(found, "return_day", 1), [0, up, up, up + down], rtol=1e-5)
    np.testing.assert_allclose(
        of(found, "volatility", 1)[[1, 3]],
        [np.sqrt(up**2 / 2), np.sqrt((up**2 + down**2) / 4)],
        rtol=1e-6,
    )
    mean = (100 * 10 + 200 * 11) / 300
    np.testing.assert_allclose(of(found, "vwap_deviation", 1)[1], np.log(11 / mean), rtol=1e-6)
    assert of(found, "halted", 1).tolist() == [0, 0, 1, 0]
    assert of(found, "time", 1).tolist() == [0.25, 0.5, 0.75, 1.0]
    # Floor: a twentieth of the mean tick of the day before, 150 / 20.
    expected = np.log((np.array([100, 200, 0, 100]) + 7.5) / (np.array([100, 100, 300, 100]) + 7.5))
    np.testing.assert_allclose(of(found, "volume", 1), expected, rtol=1e-6)
    assert of(found, "volume", 0).tolist() == [0.0] * 4  # nothing to compare with


def test_yesterday_is_the_symbols_day_before_and_zero_without_one() -> None:
    days = market(0)
    assert previous_days(days).tolist() == [-1, -1, 0, 1, 2, 3]
    found = public_features(days)
    np.testing.assert_array_equal(found.yesterday[4], found.today[2])
    assert not found.yesterday[:2].any()


def test_days_of_the_same_date_are_not_each_others_yesterday() -> None:
    days = Days(("AAA",) * 2, HAND.dates[[0, 0]], HAND.clock, *([HAND.buy] * 3), HAND.volume)
    assert previous_days(days).tolist() == [-1, -1]
    assert np.isnan(trailing_profile(days)).all()


def test_trailing_profile_leaves_out_halted_days_and_looks_back_so_far_and_no_further() -> None:
    volume = np.array([[1.0, 1.0], [0.0, 0.0], [3.0, 5.0], [7.0, 7.0]])
    days = Days.from_prices(np.ones((4, 2)), volume)
    assert trailing_profile(days, 2)[1:].tolist() == [[1, 1], [1, 1], [2, 3]]
    assert trailing_profile(days, 1)[3].tolist() == [3, 5]


def test_scaler_sees_train_days_only_and_says_which() -> None:
    days = market(1)
    train = np.arange(6) < 2
    found = public_features(days, train=train)
    wild = Days(
        *(days.symbols, days.dates, days.clock),
        *(np.where(train[:, None], a, a * 3.0) for a in (days.buy, days.sell, days.known)),
        np.where(train[:, None], days.volume, days.volume * 50.0),
    )
    assert found.scaler is not None
    other = public_features(wild, train=train).scaler
    assert other is not None
    np.testing.assert_array_equal(found.scaler.mean, other.mean)
    np.testing.assert_array_equal(found.scaler.std, other.std)
    assert [str(day) for day in found.scaler.window] == ["2020-01-06", "2020-01-06"]
    again = public_features(days, scaler=found.scaler)
    np.testing.assert_array_equal(again.today, found.today)
    both = np.concatenate([of(found, "return_1", day) for day in (0, 1)])
    both = both[both != 0.0]  # what is unknown is the mean
    assert both.mean() == pytest.approx(0.0, abs=1e-6)
    assert both.std() == pytest.approx(1.0, abs=1e-5)


def test_scaler_of_other_features_is_refused() -> None:
    scaler = public_features(HAND, train=np.array([True, False])).scaler
    with pytest.raises(FeatureError, match="the scaler was fitted on"):
        public_features(HAND, scaler=scaler, names=["time"])
    with pytest.raises(FeatureError, match="no day to fit"):
        public_features(HAND, train=np.array([False, False]))


def test_spread_and_imbalance_where_there_is_a_book() -> None:
    one = np.ones(HAND.shape)
    quotes = Quotes(bid=99.0 * one, ask=101.0 * one, bid_depth=3.0 * one, ask_depth=one)
    found = public_features(HAND, quotes=quotes)
    assert of(found, "spread", 0)[0] == pytest.approx(0.02)
    assert of(found, "imbalance", 0)[0] == 0.5
    with pytest.raises(FeatureError, match="'spread' needs the quotes of an order book"):
        public_features(HAND, names=["spread"])


@pytest.mark.parametrize(
    ("names", "extra", "told"),
    [
        (["return_2"], {}, "did you mean 'return_20'"),
        ([], {}, "no execution feature was asked for"),
        (None, {"time": momentum}, "'time' exists: give yours another name"),
        (["time"], {"bad": lambda past: 1 / 0}, "'bad' failed at SYM on 2020-01-06, tick 0"),
        (["time"], {"bad": lambda past: np.inf}, "'bad' is inf at SYM on 2020-01-06, tick 0"),
    ],
)
def test_features_that_cannot_be_had_are_named(names: object, extra: object, told: str) -> None:
    with pytest.raises(FeatureError, match=told):
        public_features(HAND, extra, names=names)  # type: ignore[arg-type]


def test_ones_own_feature_is_shown_ticks_up_to_now_and_earlier_days() -> None:
    seen = []

    def curious(past: Past) -> float:
        seen.append((past.price.copy(), past.earlier_volume.copy(), past.clock.copy()))
        assert past.price.base is not None
        beyond = np.asarray(past.price.base)[:, len(past.price) :]
        assert np.isnan(beyond).all()
        assert not any(value is HAND for value in vars(past).values())
        return float(past.volume[-1])

    found = public_features(HAND, {"mine": curious}, names=[])
    assert found.names == ("mine",)
    assert found.today[..., 0].tolist() == HAND.volume.tolist()
    price, earlier, clock = seen[5]  # second day, second tick
    assert price.tolist() == [10.0, 11.0]
    assert clock.tolist() == [570.0, 571.0]
    assert earlier.tolist() == HAND.volume[:1].tolist()
    assert seen[0][1].shape == (0, 4)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(0, 5), st.integers(0, 11))
def test_scrambling_the_future_changes_no_feature_before_it(seed: int, day: int, tick: int) -> None:
    days = market(seed)
    train = days.dates < days.dates[2]  # before any cut of the third date on
    extra = {"momentum": momentum}
    fit = public_features(days, extra, train=train)
    other = public_features(scramble_after(days, day, tick, seed), extra, scaler=fit.scaler)
    upto = (days.dates < days.dates[day])[:, None] | (
        (days.dates == days.dates[day])[:, None] & (np.arange(12) <= tick)
    )
    np.testing.assert_array_equal(fit.today[upto], other.today[upto])
    seen = days.dates <= days.dates[day]
    np.testing.assert_array_equal(fit.yesterday[seen], other.yesterday[seen])


def test_check_passes_what_is_shipped_and_refuses_what_looks_ahead() -> None:
    days = market(3, n_days=8)

    def shipped(days: Days) -> PublicFeatures:
        return public_features(days, {"momentum": momentum})

    check_causal(shipped, days)

    def of_the_whole_day(days: Days) -> PublicFeatures:
        found = public_features(days, names=["time", "volume"])
        found.today[..., 1] /= np.maximum(days.volume.sum(axis=1), 1.0)[:, None]
        return found

    with pytest.raises(LeakageError, match="'volume' changes before the end of tick"):
        check_causal(of_the_whole_day, days)

    def of_all_days(days: Days) -> PublicFeatures:
        found = public_features(days, names=["volume_day"])
        found.today[:] -= found.today.mean(axis=0)
        return found

    with pytest.raises(LeakageError, match="volume_day"):
        check_causal(of_all_days, days)
