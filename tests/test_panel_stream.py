"""A panel streamed bar by bar is the panel built at once, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streams import MARKETS, StoredMarket, a_shares, assert_row_equal, configured, same_state

from echelon.data import validate
from echelon.data.build import PanelRequest
from echelon.data.store import Store
from echelon.data.stream import TOLERANCE, BarSet, PanelStream, StreamState
from echelon.errors import DataError, StoreError


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> StoredMarket:
    return a_shares(tmp_path_factory.mktemp("shares"))


def assert_streams_alike(market: StoredMarket, cut: int) -> None:
    panel = market.panel()
    history = market.panel(panel.times[cut - 1].item())
    stream = market.stream(history)
    sets = market.bar_sets(history.times[-1].item())
    assert len(sets) == len(panel.times) - cut > 0
    for t, bars in enumerate(sets, cut):
        assert_row_equal(stream.push(bars), panel, t)


@pytest.mark.parametrize("name", MARKETS)
def test_rows_equal_those_of_the_panel_built_at_once(name: str, tmp_path: Path) -> None:
    market = MARKETS[name](tmp_path)
    for share in (0.02, 0.5, 0.9):
        assert_streams_alike(market, max(1, int(share * len(market.panel().times))))


def test_the_a_shares_hold_every_case_there_is(shares: StoredMarket) -> None:
    panel = shares.panel()
    assert panel.factor is not None
    assert panel.band is not None
    assert (np.diff(panel.factor, axis=0) > 0).any()
    assert panel.suspended.any()
    assert panel.delisted.any(axis=0).sum() >= 3
    # One came back after a silence, one after its day of delisting.
    assert ((np.diff(panel.delisted.astype(int), axis=0) < 0).any(axis=0)).sum() >= 2
    assert (np.diff(panel.member.astype(int), axis=0) != 0).sum() > 4
    assert len(np.unique(panel.band[np.isfinite(panel.band)])) == 3
    assert np.isnan(panel.close[0]).any()
    assert panel.benchmark is not None
    assert np.isnan(panel.benchmark[0])


def test_stream_from_nothing_equals_the_panel_from_its_first_row(shares: StoredMarket) -> None:
    panel = shares.panel()
    before = datetime(2019, 1, 2)
    stream = PanelStream(shares.facts(before))
    assert np.isnat(stream.time)
    for t, bars in enumerate(shares.bar_sets(before)):
        assert_row_equal(stream.push(bars), panel, t)
    assert stream.reasons[5:] == ("merger", "bankruptcy")


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    gaps=st.sampled_from([0.0, 0.05, 0.3, 0.6]),
    splits=st.sampled_from([0.0, 0.02, 0.3]),
    cut=st.integers(1, 44),
)
def test_any_market_streams_as_it_is_built(
    seed: int, gaps: float, splits: float, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    market = a_shares(tmp_path_factory.mktemp("any"), 45, seed, gaps=gaps, splits=splits)
    assert_streams_alike(market, min(cut, len(market.panel().times) - 1))


def test_stop_and_restore_at_every_bar_gives_the_same_rows(shares: StoredMarket) -> None:
    panel = shares.panel()
    history = shares.panel(panel.times[99].item())
    stream = shares.stream(history)
    for t, bars in enumerate(shares.bar_sets(history.times[-1].item()), 100):
        saved = stream.state()
        facts = json.loads(json.dumps(saved.facts, allow_nan=False))
        assert {a.dtype.kind for a in saved.arrays.values()} <= set("fib")
        fresh = PanelStream(shares.facts(history.times[-1].item()))
        fresh.restore(StreamState(saved.arrays, facts))
        assert same_state(fresh.state(), saved)
        stream.push(bars)
        assert_row_equal(fresh.push(bars), panel, t)
        stream = fresh


def test_another_future_changes_no_earlier_row(shares: StoredMarket) -> None:
    panel = shares.panel()
    history = shares.panel(panel.times[79].item())
    stream = shares.stream(history)
    sets = shares.bar_sets(history.times[-1].item())
    rows = [stream.push(bars) for bars in sets[:20]]
    for bars in sets[20:]:
        wild = {f: None if (a := getattr(bars, f)) is None else a * 3 for f in ("open", "high")}
        wild |= {f: getattr(bars, f) * 3 for f in ("low", "close")}
        stream.push(replace(bars, members=~bars.members, delisted=None, **wild))
    for t, row in enumerate(rows, 80):
        assert_row_equal(row, panel, t)


def test_state_of_other_symbols_or_damaged_is_refused(shares: StoredMarket) -> None:
    stream = PanelStream(shares.facts(datetime(2021, 1, 4)))
    saved = stream.state()
    for other in (
        saved._replace(facts=saved.facts | {"symbols": ["A"]}),
        saved._replace(arrays={k: v for k, v in saved.arrays.items() if k != "total"}),
        saved._replace(arrays=saved.arrays | {"total": np.zeros(3)}),
        saved._replace(arrays=saved.arrays | {"total": np.zeros(7, dtype=np.float32)}),
    ):
        with pytest.raises(StoreError):
            stream.restore(other)
    assert same_state(stream.state(), saved)


def test_facts_of_another_dataset_are_refused(shares: StoredMarket) -> None:
    history = shares.panel(shares.panel().times[120].item())
    facts = shares.facts(history.times[-1].item())
    with pytest.raises(DataError, match="does not follow from these facts"):
        PanelStream.from_panel(history, replace(facts, kind=replace(facts.kind, delist_after=2)))


def spoil(field: str, n: int, value: float) -> Callable[[BarSet], BarSet]:
    def change(bars: BarSet) -> BarSet:
        values = getattr(bars, field).copy()
        values[n] = value
        return replace(bars, **{field: values})

    return change


REFUSED: dict[str, tuple[Callable[[BarSet], BarSet], str]] = {
    "repeated": (lambda b: replace(b, time=np.datetime64("2020-12-01", "us")), "out of order"),
    "no time": (lambda b: replace(b, time=np.datetime64("NaT")), "no time"),
    "frequency": (lambda b: replace(b, time=b.time + np.timedelta64(5, "m")), "frequency"),
    "holiday": (lambda b: replace(b, time=np.datetime64("2021-10-01", "us")), "not a session"),
    "hole": (lambda b: replace(b, time=np.datetime64("2020-12-09", "us")), "is missing before"),
    "shape": (lambda b: replace(b, close=b.close[:3]), "one number for each symbol"),
    "type": (lambda b: replace(b, close=b.close.astype(np.float32)), "float64"),
    "no open": (lambda b: replace(b, open=None), "no open"),
    "negative": (spoil("close", 0, -1.0), "close is -1"),
    "zero": (spoil("low", 0, 0.0), "low is 0"),
    "infinite": (spoil("high", 0, np.inf), "high is inf"),
    "absurd": (spoil("open", 0, 1e30), "open is 1e"),
    "missing": (spoil("open", 0, np.nan), "open is nan"),
    "half a bar": (spoil("close", 0, np.nan), "no close"),
    "volume": (spoil("volume", 0, -5.0), "volume is -5"),
    "outside": (spoil("close", 0, 1000.0), "outside low to high"),
    "inverted": (spoil("high", 0, 1.0), "outside low to high"),
    "factor": (spoil("factor", 0, 0.0), "factor is 0"),
    "members": (lambda b: replace(b, members=np.ones(2, dtype=np.bool_)), "members"),
    "reasons": (lambda b: replace(b, reasons=("merger",)), "reasons"),
    "benchmark": (lambda b: replace(b, benchmark=-3.0), "benchmark"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_bars_are_refused_and_change_nothing(what: str, shares: StoredMarket) -> None:
    change, message = REFUSED[what]
    panel = shares.panel()
    cut = int(np.searchsorted(panel.times, np.datetime64("2020-12-01"))) + 1
    history = shares.panel(panel.times[cut - 1].item())
    stream = shares.stream(history)
    bars = shares.bar_sets(history.times[-1].item())[0]
    before = stream.state()
    with pytest.raises(DataError, match=message):
        stream.push(change(bars))
    assert same_state(stream.state(), before)
    assert_row_equal(stream.push(bars), panel, cut)


def test_field_that_the_dataset_does_not_have_is_refused(tmp_path: Path) -> None:
    market = MARKETS["sample"](tmp_path)
    panel = market.panel()
    stream = market.stream(market.panel(panel.times[-3].item()))
    bars = market.bar_sets(panel.times[-3].item())[0]
    with pytest.raises(DataError, match="has open, which the dataset does not"):
        stream.push(replace(bars, open=bars.close))
    assert_row_equal(stream.push(bars), panel, len(panel.times) - 2)


def test_symbol_without_a_factor_keeps_its_last_one_and_starts_at_one(shares: StoredMarket) -> None:
    panel = shares.panel()
    history = shares.panel(panel.times[20].item())
    stream = shares.stream(history)
    bars = shares.bar_sets(history.times[-1].item())
    row = stream.push(replace(bars[0], factor=None))
    np.testing.assert_array_equal(row.factor[0], history.factor[-1])
    late = next(b for b in bars[1:] if not np.isnan(b.close[2]))
    for b in bars[1:]:
        row = stream.push(replace(b, factor=np.full(7, np.nan)))
        if b is late:
            break
    assert row.factor[0, 2] == 1.0
    assert row.anchor[2] == late.close[2]


def test_bars_are_judged_as_an_import_judges_them() -> None:
    assert TOLERANCE == validate._TOLERANCE


def test_real_a_shares_stream_as_they_are_built(tmp_path: Path, shared_data: Path) -> None:
    path = shared_data / "cn_daily_2010_2020.parquet"
    market = configured(tmp_path, "data.source=parquet", f"data.path={path}")
    request = PanelRequest(end=date(2015, 12, 31), delist_after=40)
    market = StoredMarket(Store(market.store.root), market.name, request)
    assert_streams_alike(market, 900)
