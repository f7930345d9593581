"""The scaler: moments merge exactly, the train window decides, missing values become the mean."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from echelon.errors import StoreError
from echelon.features.scaler import RunningMoments, Scaler

WINDOW = (date(2000, 1, 3), date(2010, 12, 31))
tables = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 40), st.just(3)),
    elements=st.floats(-1e3, 1e3, allow_subnormal=False),
)


def _fit(values: np.ndarray, scaled: tuple[bool, ...] = (True, True, True)) -> Scaler:
    return Scaler.fit(("a", "b", "c"), RunningMoments.from_values(values), np.array(scaled), WINDOW)


@given(values=tables, cut=st.integers(0, 40))
def test_moments_of_pieces_merge_into_those_of_the_whole(values: np.ndarray, cut: int) -> None:
    merged = (
        RunningMoments.none(3)
        .merge(RunningMoments.from_values(values[:cut]))
        .merge(RunningMoments.from_values(values[cut:]))
    )
    assert merged.count.tolist() == [len(values)] * 3
    assert merged.mean == pytest.approx(values.mean(axis=0), abs=1e-9)
    assert merged.squares == pytest.approx(values.var(axis=0) * len(values), abs=1e-4)


@given(tables)
def test_scaled_train_values_have_mean_zero_and_spread_one_or_none(values: np.ndarray) -> None:
    out = _fit(values).transform(values).astype(np.float64)
    flat = np.ptp(values, axis=0) < 1e-3
    assert np.abs(out.mean(axis=0)[~flat]).max(initial=0) < 1e-2
    assert np.abs(out.std(axis=0)[~flat] - 1).max(initial=0) < 1e-2
    assert np.isfinite(out).all()


def test_hand_computed_example() -> None:
    values = np.array([[1.0, 5.0, 0.0], [3.0, 5.0, 0.0], [np.nan, 5.0, 6.0]])
    scaler = _fit(values, (True, True, False))
    assert scaler.mean.tolist() == [2.0, 5.0, 2.0]
    assert scaler.std.tolist() == [1.0, 1.0, pytest.approx(np.sqrt(8))]
    out = scaler.transform(np.array([[4.0, 6.0, 7.0], [np.nan, 5.0, np.nan]]))
    assert out.tolist() == [[2.0, 1.0, 7.0], [0.0, 0.0, 0.0]]


def test_scaler_survives_json_exactly(tmp_path: Path) -> None:
    scaler = _fit(np.random.default_rng(0).normal(size=(50, 3)))
    path = tmp_path / "scaler.json"
    path.write_text(json.dumps(scaler.to_dict()))
    back = Scaler.read(path)
    assert np.array_equal(back.mean, scaler.mean)
    assert np.array_equal(back.std, scaler.std)
    assert back.window == WINDOW
    path.write_text("{")
    with pytest.raises(StoreError, match=r"scaler\.json: missing or damaged"):
        Scaler.read(path)
