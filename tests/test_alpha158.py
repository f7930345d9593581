"""The alpha158 family against a slow twin written from Qlib's expressions, and by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from test_indicators import days, walk

from echelon.config import FeaturesConfig
from echelon.config.features import WINDOWS
from echelon.data.panel import has_vwap
from echelon.features.base import Bars, Feature
from echelon.features.engine import anchor_fields
from echelon.features.indicators import VOLUME_FLOOR, alpha158_features
from echelon.features.registry import column_names, run, select
from echelon.types import Floats

DAILY = frozenset({"open", "high", "low", "close", "volume", "vwap"})
FEATURES = alpha158_features(WINDOWS)
SMALL = (2, 3, 7)
CANDLE = ("KMID", "KLEN", "KMID2", "KUP", "KUP2", "KLOW", "KLOW2", "KSFT", "KSFT2")
ROLLING = (
    *("ROC", "MA", "STD", "BETA", "RSQR", "RESI", "MAX", "MIN", "QTLU", "QTLD", "RANK", "RSV"),
    *("IMAX", "IMIN", "IMXD", "CORR", "CORD", "CNTP", "CNTN", "CNTD", "SUMP", "SUMN", "SUMD"),
    *("VMA", "VSTD", "WVMA", "VSUMP", "VSUMN", "VSUMD"),
)


def market(n: int, seed: int = 0) -> Bars:
    """A walk with a price of the bar's trades, ties and bars without a move."""
    bars = walk(n, seed)
    rng = np.random.default_rng(seed)
    still = rng.random(n) < 0.1
    close = np.round(bars.close, 2) + 0.01
    close[1:][still[1:]] = close[:-1][still[1:]]
    high, low = np.maximum(close, bars.high), np.minimum(close, bars.low)
    return replace(bars, close=close, high=high, low=low, vwap=(high + low + close) / 3)


def computed(bars: Bars, windows: tuple[int, ...] = WINDOWS) -> dict[str, Floats]:
    return {
        name: column
        for feature in alpha158_features(windows)
        for name, column in zip(feature.names, run(feature, bars).T, strict=True)
    }


def rolling(series: pd.Series, window: int, function: str, **more: object) -> Floats:
    """One number a window, by numpy, from the window alone."""
    functions = {
        "argmax": lambda x: np.argmax(x) + 1,
        "argmin": lambda x: np.argmin(x) + 1,
        "slope": lambda x: np.polyfit(np.arange(1, window + 1), x, 1)[0],
        "resi": lambda x: x[-1] - np.polyval(np.polyfit(np.arange(window), x, 1), window - 1),
        "rsqr": lambda x: np.corrcoef(np.arange(window), x)[0, 1] ** 2,
        "std": lambda x: np.std(x, ddof=1),
        "rank": lambda x: (np.sum(x < x[-1]) + (np.sum(x == x[-1]) + 1) / 2) / window,
        "quantile": lambda x: np.quantile(x, more["q"]),
    }
    with np.errstate(invalid="ignore", divide="ignore"):
        apply = functions.get(function, getattr(np, function, None))
        return series.rolling(window).apply(apply, raw=True).to_numpy()


def twin(bars: Bars, windows: tuple[int, ...]) -> dict[str, Floats]:
    """Qlib's expressions, term by term, over windows with trades."""
    o, h, low, c, v = (
        pd.Series(getattr(bars, n)) for n in ("open", "high", "low", "close", "value")
    )
    top, bottom, reach = np.maximum(o, c), np.minimum(o, c), h - low + 1e-12
    shapes = ((c - o) / o, (h - low) / o, (c - o) / reach, (h - top) / o, (h - top) / reach)
    shapes += ((bottom - low) / o, (bottom - low) / reach)
    shapes += ((2 * c - h - low) / o, (2 * c - h - low) / reach)
    out = {name: shape.to_numpy() for name, shape in zip(CANDLE, shapes, strict=True)}
    for name, price in (("OPEN", o), ("HIGH", h), ("LOW", low), ("VWAP", bars.vwap)):
        out[f"{name}0"] = np.asarray(price / c)
    move, turn = c.diff(), v.diff()
    ratio, change = c / c.shift(1), np.log(v / v.shift(1) + 1)
    weight = abs(ratio - 1) * v
    for w in windows:
        most, least = rolling(h, w, "max"), rolling(low, w, "min")
        part = {
            "ROC": c.shift(w) / c,
            "MA": rolling(c, w, "mean") / c,
            "STD": rolling(c, w, "std") / c,
            "BETA": rolling(c, w, "slope") / c,
            "RSQR": rolling(c, w, "rsqr"),
            "RESI": rolling(c, w, "resi") / c,
            "MAX": most / c,
            "MIN": least / c,
            "QTLU": rolling(c, w, "quantile", q=0.8) / c,
            "QTLD": rolling(c, w, "quantile", q=0.2) / c,
            "RANK": rolling(c, w, "rank"),
            "RSV": (c - least) / (most - least + 1e-12),
            "IMAX": rolling(h, w, "argmax") / w,
            "IMIN": rolling(low, w, "argmin") / w,
            "CNTP": rolling((move > 0).astype(float), w, "mean"),
            "CNTN": rolling((move < 0).astype(float), w, "mean"),
            "VMA": rolling(v, w, "mean") / (v + 1e-12),
            "VSTD": rolling(v, w, "std") / (v + 1e-12),
            "WVMA": rolling(weight, w, "std") / (rolling(weight, w, "mean") + 1e-12),
            "CORR": correlations(c, np.log(v), w),  # see `price_volume_windows`
            "CORD": correlations(ratio, change, w),
        }
        part["IMXD"] = part["IMAX"] - part["IMIN"]
        part["CNTD"] = part["CNTP"] - part["CNTN"]
        for prefix, change_of in (("", move), ("V", turn)):
            up = rolling(change_of.clip(lower=0), w, "sum")
            down = rolling((-change_of).clip(lower=0), w, "sum")
            whole = rolling(abs(change_of), w, "sum") + 1e-12
            part[f"{prefix}SUMP"], part[f"{prefix}SUMN"] = up / whole, down / whole
            part[f"{prefix}SUMD"] = (up - down) / whole
        out |= {f"{name}{w}": np.asarray(column) for name, column in part.items()}
    return out


def correlations(x: pd.Series, y: pd.Series, window: int) -> Floats:
    out = np.full(len(x), np.nan)
    for t in range(window - 1, len(x)):
        a, b = x.to_numpy()[t + 1 - window : t + 1], y.to_numpy()[t + 1 - window : t + 1]
        if np.isfinite(a).all() and np.isfinite(b).all() and np.ptp(a) > 0 and np.ptp(b) > 0:
            out[t] = np.corrcoef(a, b)[0, 1]
    return out


def test_default_windows_give_the_names_of_qlib() -> None:
    names = {name for feature in FEATURES for name in feature.names}
    rolled = {f"{name}{w}" for name in ROLLING for w in (5, 10, 20, 30, 60)}
    assert names == {*CANDLE, "OPEN0", "HIGH0", "LOW0", "VWAP0", *rolled}
    assert len(names) == sum(len(feature.names) for feature in FEATURES) == 158
    for config in (FeaturesConfig(alpha158=True), FeaturesConfig(alpha158=WINDOWS)):
        assert {name for s in select(config, DAILY).specs for name in column_names(s)} == names
    assert FeaturesConfig().alpha158_windows == ()
    assert max(f.lookback for f in FEATURES) == 61


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("windows", [SMALL, (5, 10), (60,)])
def test_every_column_agrees_with_its_slow_twin(windows: tuple[int, ...], seed: int) -> None:
    bars = market(40 + 2 * max(windows), seed)
    actual, expected = computed(bars, windows), twin(bars, windows)
    assert set(actual) == set(expected)
    for name, column in expected.items():
        warm = ~np.isnan(actual[name])
        assert warm.sum() >= 40 + max(windows)
        same = warm & np.isfinite(column)  # where it has no number, ours is tested below
        assert same.sum() >= 0.9 * warm.sum() or windows == SMALL
        np.testing.assert_allclose(actual[name][same], column[same], 1e-8, 1e-9, err_msg=name)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.names[0])
def test_value_depends_on_the_bars_of_its_lookback_alone(feature: Feature) -> None:
    bars = market(150)
    whole = run(feature, bars)
    for t in (feature.lookback - 1, 70, 149):
        if t < feature.lookback - 1:
            continue
        part = slice(t + 1 - feature.lookback, t + 1)
        have = [n for n in Bars.__slots__ if getattr(bars, n) is not None]
        window = replace(bars, **{name: getattr(bars, name)[part] for name in have})
        np.testing.assert_array_equal(run(feature, window)[-1], whole[t])


def test_prices_and_volumes_that_never_change_give_plain_numbers() -> None:
    flat, n = np.full(30, 3.3), 30
    bars = Bars(days(n), flat, flat, flat, flat, flat, np.full(n, 5e6), vwap=flat)
    out = {name: column[-1] for name, column in computed(bars, (5,)).items()}
    ones = {"ROC5", "MA5", "MAX5", "MIN5", "QTLU5", "QTLD5", "VMA5"} | {
        *("OPEN0", "HIGH0", "LOW0", "VWAP0")
    }
    # Of five equals the middle rank is 3 of 5, and the first is the highest and the lowest.
    others = {"RANK5": 0.6, "IMAX5": 0.2, "IMIN5": 0.2}
    for name, value in out.items():
        assert value == pytest.approx(1.0 if name in ones else others.get(name, 0.0), abs=1e-9), (
            name
        )


def test_bars_without_trade_have_finite_values() -> None:
    bars = market(40)
    value = bars.value.copy()
    value[5:12], value[20] = 0.0, 0.0
    out = computed(replace(bars, value=value), (5,))
    assert all(np.isfinite(column[5:]).all() for column in out.values())
    # Nothing in the window: as usual. Nothing today: the floor stands for it.
    np.testing.assert_array_equal([out[n][11] for n in ("VMA5", "VSTD5", "VSUMD5")], [1, 0, 0])
    mean = value[16:21].mean()
    assert out["VMA5"][20] == pytest.approx(1 / VOLUME_FLOOR)
    filled = np.where(value > 0, value, VOLUME_FLOOR * mean)[16:21]
    together = np.corrcoef(bars.close[16:21], np.log(filled))[0, 1]
    assert out["CORR5"][20] == pytest.approx(together)
    assert out["VSTD5"][20] == pytest.approx(np.std(value[16:21], ddof=1) / (VOLUME_FLOOR * mean))


def test_window_of_three_matches_numbers_worked_out_by_hand() -> None:
    close = np.array([1.0, 2.0, 4.0, 3.0])
    value = np.array([10.0, 20.0, 10.0, 40.0])
    high, low = close + 1, close - 0.5
    bars = Bars(days(4), close, close, close, high, low, value, vwap=close)
    out = {name: column[-1] for name, column in computed(bars, (3,)).items()}
    # Closes 2, 4, 3: mean 3, slope 0.5, the line is 2.5, 3, 3.5, so the residual is −0.5.
    assert out["ROC3"] == pytest.approx(1 / 3)
    assert out["MA3"] == 1.0
    assert out["STD3"] == pytest.approx(1 / 3)
    assert out["BETA3"] == pytest.approx(0.5 / 3)
    assert out["RESI3"] == pytest.approx(-0.5 / 3)
    assert out["RSQR3"] == pytest.approx(0.25)
    assert out["QTLU3"] == pytest.approx(3.6 / 3)  # 0.8 · 2 = 1.6 of the way along 2, 3, 4
    assert out["QTLD3"] == pytest.approx(2.4 / 3)
    assert out["RANK3"] == pytest.approx(2 / 3)
    assert (out["MAX3"], out["MIN3"]) == (pytest.approx(5 / 3), 0.5)
    assert out["RSV3"] == pytest.approx((3 - 1.5) / (5 - 1.5))
    assert (out["IMAX3"], out["IMIN3"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert out["IMXD3"] == pytest.approx(1 / 3)
    # Moves +1, +2, −1 and of value +10, −10, +30.
    assert (out["CNTP3"], out["CNTN3"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert (out["SUMP3"], out["SUMN3"], out["SUMD3"]) == pytest.approx((0.75, 0.25, 0.5))
    assert (out["VSUMP3"], out["VSUMN3"], out["VSUMD3"]) == pytest.approx((0.8, 0.2, 0.6))
    assert out["VMA3"] == pytest.approx((70 / 3) / 40)
    assert out["WVMA3"] == pytest.approx(np.std([20, 10, 10], ddof=1) / (40 / 3))


def test_source_with_closes_only_leaves_out_what_it_cannot_give() -> None:
    selection = select(FeaturesConfig(alpha158=(5,)), frozenset({"close"}))
    (only,) = selection.specs
    assert isinstance(only, Feature)
    assert only.names[0] == "ROC5"
    missing = {left.name: left.missing for left in selection.left_out}
    assert missing["CORR5"] == ("volume",)
    assert missing["VWAP0"] == ("vwap",)
    assert missing["MAX5"] == ("high", "low")
    assert len(missing) + len(only.names) == 13 + 29


def test_vwap_is_traded_value_over_shares_where_that_is_a_price_of_the_bar() -> None:
    raw = {
        "close": np.array([10.0, 10.0, 10.0, np.nan]),
        "high": np.array([12.0, 12.0, 12.0, np.nan]),
        "low": np.array([9.5, 9.5, 9.5, np.nan]),
        "volume": np.array([100.0, 0.0, 100.0, 0.0]),
        # The second bar has no trade, the third's value is in thousands, the fourth is none.
        "amount": np.array([1100.0, 0.0, 1.1, 0.0]),
    }
    fields = anchor_fields(raw, np.full(4, 0.5), vwap=True)
    np.testing.assert_array_equal(fields["vwap"], [5.5, 5.25, 5.25, np.nan])
    assert "vwap" not in anchor_fields(raw, np.full(4, 0.5), vwap=False)


@pytest.mark.parametrize(("basis", "given"), [("raw", True), ("adjusted", False)])
def test_average_price_needs_raw_prices_and_traded_value(basis: str, given: bool) -> None:
    bars = {"high", "low", "close", "volume"}
    assert has_vwap(bars, basis) is given
    assert not has_vwap(bars - {"volume"}, basis)
