"""The calendar as features: what it says, that it goes round, and where it is left out."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from markets import qtmrl_config

from echelon.config.features import FeaturesConfig
from echelon.data.datasets import ensure_dataset
from echelon.data.store import Store
from echelon.features import check_leakage, prepare
from echelon.features.base import Bars, Feature
from echelon.features.engine import FeaturePlan
from echelon.features.indicators import calendar_features
from echelon.features.registry import run, select

DAILY = frozenset({"open", "high", "low", "close", "volume"})
NAMES = (
    *("day_of_week_sin", "day_of_week_cos", "month_sin", "month_cos"),
    *("time_of_day_sin", "time_of_day_cos"),
)


def bars_at(*times: str | datetime) -> Bars:
    ones = np.ones(len(times))
    return Bars(np.array(times, dtype="datetime64[us]"), ones, ones)


def said(bars: Bars) -> dict[str, np.ndarray]:
    columns = {}
    for feature in calendar_features():
        values = run(feature, bars)
        columns |= {name: values[:, k] for k, name in enumerate(feature.names)}
    return columns


def test_every_part_agrees_with_the_calendar_of_the_standard_library() -> None:
    times = [datetime(1968, 12, 30, 9, 30) + timedelta(hours=7 * k) for k in range(3_000)]
    found = said(bars_at(*times))
    shares = {
        "day_of_week": [t.weekday() / 7 for t in times],
        "month": [(t.month - 1) / 12 for t in times],
        "time_of_day": [(t.hour * 60 + t.minute) / 1440 for t in times],
    }
    for name, share in shares.items():
        sines = [math.sin(2 * math.pi * s) for s in share]
        cosines = [math.cos(2 * math.pi * s) for s in share]
        np.testing.assert_allclose(found[f"{name}_sin"], sines, atol=1e-9)
        np.testing.assert_allclose(found[f"{name}_cos"], cosines, atol=1e-9)


def test_december_is_as_near_to_january_as_january_to_february() -> None:
    found = said(bars_at("2020-12-15", "2021-01-15", "2021-02-15", "2021-06-15"))
    places = np.column_stack([found["month_sin"], found["month_cos"]])
    distance = np.linalg.norm(places - places[1], axis=1)
    assert distance[0] == pytest.approx(distance[2])
    assert distance[3] > 3 * distance[0]


def test_a_bar_says_the_same_whatever_bars_surround_it() -> None:
    times = [datetime(2021, 3, 1, 9, 30) + timedelta(hours=31 * k) for k in range(50)]
    whole = said(bars_at(*times))
    for k in (0, 17, 49):
        for name, value in said(bars_at(times[k])).items():
            assert value[0] == whole[name][k]


def test_the_calendar_is_off_by_default_and_leaves_the_stationary_set_on() -> None:
    without = FeaturePlan.from_specs(select(FeaturesConfig(), DAILY).specs)
    plan = FeaturePlan.from_specs(select(FeaturesConfig(calendar=True), DAILY).specs)
    assert not set(NAMES) & set(without.names)
    assert tuple(n for n in plan.names if n not in NAMES) == without.names
    assert plan.warmup == without.warmup


def test_time_of_day_is_left_out_of_daily_bars_and_used_within_the_day() -> None:
    daily = select(FeaturesConfig(calendar=True), DAILY)
    assert set(NAMES) & set(FeaturePlan.from_specs(daily.specs).names) == set(NAMES[:4])
    assert [item.name for item in daily.left_out if item.missing == ("time",)] == list(NAMES[4:])
    intraday = select(FeaturesConfig(calendar=True), DAILY | {"time"})
    assert set(NAMES) <= set(FeaturePlan.from_specs(intraday.specs).names)
    series = [spec for spec in intraday.specs if isinstance(spec, Feature)]
    assert {f.lookback for f in series if f.group == "calendar"} == {1}


def test_prepared_features_say_the_day_unscaled_unless_asked(
    tmp_path: Path, bars_file: Path
) -> None:
    config = qtmrl_config(tmp_path, bars_file, "features.calendar=true")
    prepared = prepare(config, tmp_path / "run").prepared
    column = prepared.names.index("day_of_week_cos")
    weekday = (prepared.times.astype("datetime64[D]").astype(np.int64) + 3) % 7
    expected = np.where(prepared.present, np.cos(2 * np.pi * weekday / 7)[:, None], 0.0)
    # A day without a bar keeps what the last one said.
    gap = np.asarray(prepared.array("suspended")) & prepared.present
    found = np.array(prepared.x[:, :, column])
    rows, assets = np.nonzero(gap[1:])
    assert len(rows) > 10
    np.testing.assert_array_equal(found[rows + 1, assets], found[rows, assets])
    np.testing.assert_allclose(found[~gap], expected[~gap], atol=1e-6)
    scaled = qtmrl_config(
        tmp_path, bars_file, "features.calendar=true", "normalization.include=[calendar]"
    )
    x = prepare(scaled, tmp_path / "scaled").prepared
    train = x.splits["train"].rows
    seen = np.asarray(x.x[train.start : train.stop, :, column])[x.present[train.start : train.stop]]
    assert abs(float(seen.mean())) < 1e-4
    assert float(seen.std()) == pytest.approx(1.0, abs=1e-3)


def test_the_calendar_does_not_leak(tmp_path: Path, bars_file: Path) -> None:
    config = qtmrl_config(
        tmp_path,
        bars_file,
        "features.calendar=true",
        "features.ohlcv=false",
        "features.indicators={rsi: [14]}",
    )
    report = check_leakage(config, Store(config.data.store), ensure_dataset(config), n_cuts=1)
    assert not report.leaks
