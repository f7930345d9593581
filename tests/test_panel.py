"""The panel: point in time, nothing dropped, nothing filled backwards."""

from __future__ import annotations

from datetime import date, datetime
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from markets import FrameSource, make_bars

from echelon.config import load_config
from echelon.data.build import PanelRequest, build_panel
from echelon.data.datasets import ensure_dataset
from echelon.data.importing import import_source
from echelon.data.panel import Panel, forward_fill
from echelon.data.store import Store
from echelon.errors import DataError, UniverseError

LIMITED = {"calendar": "XSHG", "timezone": "Asia/Shanghai", "price_basis": "raw"}


def _panel(
    path: Path,
    source: FrameSource,
    request: PanelRequest = PanelRequest(),  # noqa: B008
) -> Panel:
    import_source(source, Store(path), "m")
    return build_panel(Store(path), "m", request)


def test_late_listing_starts_late_and_cuts_nobody_else(tmp_path: Path) -> None:
    panel = _panel(tmp_path, FrameSource(make_bars(late={"BBB": 100})))
    first = panel.present.argmax(axis=0)
    assert first.tolist() == [0, 100, 0]
    assert np.isnan(panel.close[:100, 1]).all()
    assert not np.isnan(panel.close[:, [0, 2]]).any()


def test_gap_is_suspension_valued_at_the_last_price_and_never_tradable(tmp_path: Path) -> None:
    bars = make_bars(gaps=0.1, seed=3)
    panel = _panel(tmp_path, FrameSource(bars))
    gap = np.isnan(panel.close) & panel.present
    assert gap.any()
    assert (panel.suspended == gap).all()
    assert not panel.tradable[gap].any()
    assert panel.volume is not None
    assert (panel.volume[gap] == 0).all()
    value = forward_fill(panel.close)
    t, n = np.argwhere(gap & (np.arange(len(gap))[:, None] > 5))[0]
    before = panel.close[:t, n]
    assert value[t, n] == before[~np.isnan(before)][-1]


def test_symbol_that_leaves_keeps_its_history_and_last_price(tmp_path: Path) -> None:
    bars = make_bars(gone={"CCC": 200})
    facts = pl.DataFrame({"symbol": ["CCC"], "delisted": [date(2016, 3, 21)], "reason": ["merger"]})
    panel = _panel(tmp_path, FrameSource(bars, instruments=facts))
    gone = panel.delisted[:, 2]
    days = panel.times.astype("datetime64[D]")
    assert days[gone.argmax()] == np.datetime64("2016-03-21")
    assert not panel.present[gone, 2].any()
    assert not np.isnan(panel.close[:300, 2]).any()
    assert np.isfinite(forward_fill(panel.close)[-1, 2])


def test_delisting_date_of_the_future_is_not_known_before_it(tmp_path: Path) -> None:
    bars = make_bars(gone={"CCC": 200})
    facts = pl.DataFrame({"symbol": ["CCC"], "delisted": [date(2016, 12, 20)]})
    request = PanelRequest(delist_after=30)
    with_date = _panel(tmp_path / "a", FrameSource(bars, instruments=facts), request)
    without = _panel(tmp_path / "b", FrameSource(bars), request)
    assert np.array_equal(with_date.delisted, without.delisted)


def test_symbol_that_trades_again_after_its_delisting_is_back(tmp_path: Path) -> None:
    bars = make_bars(gaps=0.2)
    facts = pl.DataFrame({"symbol": ["AAA"], "delisted": [date(2016, 3, 1)]})
    panel = _panel(tmp_path, FrameSource(bars, instruments=facts))
    changes = np.abs(np.diff(panel.delisted[:, 0].astype(int))).sum()
    assert changes <= 2


def test_missing_amount_is_close_times_volume_whatever_comes_later(tmp_path: Path) -> None:
    bars = make_bars().with_columns(
        amount=pl.when(pl.col("time") > datetime(2016, 9, 1)).then(pl.lit(7.0))
    )
    panel = _panel(tmp_path, FrameSource(bars))
    assert panel.amount is not None
    assert panel.volume is not None
    assert panel.amount[:100] == pytest.approx(panel.close[:100] * panel.volume[:100])
    assert (panel.amount[-10:] == 7.0).all()


def test_tradable_does_not_depend_on_which_other_symbols_are_loaded(tmp_path: Path) -> None:
    bars = make_bars().with_columns(
        volume=pl.when(pl.col("symbol") != "AAA").then(pl.col("volume"))
    )
    whole = _panel(tmp_path, FrameSource(bars))
    alone = build_panel(Store(tmp_path), "m", PanelRequest(symbols=("AAA",)))
    assert np.array_equal(alone.tradable[:, 0], whole.tradable[:, 0])


def test_undated_delisting_is_known_only_after_a_long_silence(tmp_path: Path) -> None:
    bars = make_bars(gone={"CCC": 200})
    panel = _panel(tmp_path, FrameSource(bars), PanelRequest(delist_after=50))
    last_bar = np.flatnonzero(~np.isnan(panel.close[:, 2]))[-1]
    assert panel.present[last_bar + 49, 2]
    assert panel.suspended[last_bar + 49, 2]
    assert panel.delisted[last_bar + 50, 2]


def test_membership_is_half_open_and_as_of_the_day(tmp_path: Path) -> None:
    intervals = pl.DataFrame(
        {
            "symbol": ["AAA", "AAA", "ZZZ"],
            "start": [date(2015, 2, 2), date(2016, 1, 4), date(2015, 1, 2)],
            "end": [date(2015, 6, 1), None, None],
        }
    )
    panel = _panel(tmp_path, FrameSource(make_bars(), membership=intervals))
    day = {str(d): t for t, d in enumerate(panel.times.astype("datetime64[D]"))}
    assert not panel.member[day["2015-01-30"], 0]
    assert panel.member[day["2015-02-02"], 0]
    assert panel.member[day["2015-05-29"], 0]
    assert not panel.member[day["2015-06-01"], 0]
    assert panel.member[-1, 0]
    assert not panel.member[:, 1:].any()


def test_session_without_any_bar_is_a_row_not_a_missing_day(tmp_path: Path) -> None:
    hole = datetime(2015, 5, 6)
    panel = _panel(tmp_path, FrameSource(make_bars().filter(pl.col("time") != hole)))
    row = int(np.searchsorted(panel.times, np.datetime64(hole, "us")))
    assert panel.times[row] == np.datetime64(hole, "us")
    assert panel.suspended[row].all()


def test_benchmark_is_the_level_last_known(tmp_path: Path) -> None:
    index = pl.DataFrame(
        {"time": [datetime(2015, 2, 2), datetime(2015, 2, 4)], "close": [100.0, 101.0]}
    ).with_columns(pl.col("time").cast(pl.Datetime("us")))
    panel = _panel(tmp_path, FrameSource(make_bars(), benchmark=index))
    assert panel.benchmark is not None
    day = {str(d): t for t, d in enumerate(panel.times.astype("datetime64[D]"))}
    assert np.isnan(panel.benchmark[day["2015-01-30"]])
    assert panel.benchmark[day["2015-02-03"]] == 100.0
    assert panel.benchmark[-1] == 101.0


def test_daily_benchmark_is_known_to_intraday_bars_only_on_the_next_day(tmp_path: Path) -> None:
    minutes = [datetime(2015, 1, d, 10, m) for d in (5, 6) for m in range(3)]
    bars = pl.DataFrame({"time": minutes, "symbol": "A", "close": 10.0})
    index = pl.DataFrame(
        {"time": [datetime(2015, 1, 5), datetime(2015, 1, 6)], "close": [100.0, 200.0]},
        schema_overrides={"time": pl.Datetime("us")},
    )
    panel = _panel(tmp_path, FrameSource(bars, freq="1min", benchmark=index))
    assert panel.benchmark is not None
    assert np.isnan(panel.benchmark[:3]).all()
    assert panel.benchmark[3:].tolist() == [100.0] * 3


def test_limits_come_from_the_ex_right_reference_price(tmp_path: Path) -> None:
    bars = pl.DataFrame(
        {
            "time": [datetime(2015, 1, d) for d in (5, 6, 7)],
            "symbol": ["600000.SH"] * 3,
            "close": [10.0, 10.5, 5.3],
            "pre_close": [9.97, 10.0, 5.25],
            "volume": [100.0, 100.0, 100.0],
        }
    )
    panel = _panel(tmp_path, FrameSource(bars, **LIMITED))
    assert panel.limit_up is not None
    assert panel.limit_down is not None
    assert panel.limit_up[:, 0].tolist() == [10.97, 11.0, 5.78]
    assert panel.limit_down[:, 0].tolist() == [8.97, 9.0, 4.73]


def test_limits_without_pre_close_use_the_last_close_and_the_factor(tmp_path: Path) -> None:
    bars = pl.DataFrame(
        {
            "time": [datetime(2015, 1, d) for d in (5, 6, 8)],
            "symbol": ["600000.SH"] * 3,
            "close": [10.0, 10.5, 5.3],
            "factor": [1.0, 1.0, 2.0],
        }
    )
    panel = _panel(tmp_path, FrameSource(bars, **LIMITED))
    assert panel.limit_up is not None
    assert np.isnan(panel.limit_up[0, 0])
    assert panel.limit_up[1, 0] == 11.0
    assert panel.limit_up[3, 0] == 5.78  # 10.5 / 2 = 5.25


def test_intraday_limits_hold_for_the_whole_session(tmp_path: Path) -> None:
    stamps = [datetime(2015, 1, d, 9, m) for d in (5, 6, 7) for m in (35, 40)]
    bars = pl.DataFrame(
        {
            "time": stamps,
            "symbol": ["600000.SH"] * 6,
            "close": [10.0, 10.5, 10.8, 11.0, 5.6, 5.7],
            "factor": [1.0, 1.0, 1.0, 1.0, 2.0, 2.0],
        }
    )
    panel = _panel(tmp_path, FrameSource(bars, **(LIMITED | {"freq": "5min"})))
    assert panel.limit_up is not None
    assert np.isnan(panel.limit_up[:2, 0]).all()
    assert panel.limit_up[2:, 0].tolist() == [11.55, 11.55, 6.05, 6.05]  # of 10.5 and 11 / 2


def test_intraday_silence_is_counted_in_sessions(tmp_path: Path) -> None:
    minutes = [datetime(2015, 1, d, 10, m) for d in range(5, 10) for m in range(60)]
    frames = [
        pl.DataFrame({"time": minutes[:n], "symbol": symbol, "close": 10.0})
        for symbol, n in (("A", 300), ("B", 60))
    ]
    source = FrameSource(pl.concat(frames), freq="1min")
    panel = _panel(tmp_path, source, PanelRequest(delist_after=3))
    assert panel.present[:180, 1].all()
    assert panel.delisted[180:, 1].all()


def test_limits_are_off_for_adjusted_prices(tmp_path: Path) -> None:
    bars = make_bars(("600000.SH",), calendar="XSHG", first=date(2015, 1, 5))
    panel = _panel(tmp_path, FrameSource(bars, **(LIMITED | {"price_basis": "adjusted"})))
    assert panel.limit_up is None
    assert "limits" not in panel.fields


def test_unknown_symbol_is_named_with_a_suggestion(tmp_path: Path) -> None:
    import_source(FrameSource(make_bars(("APPLE", "MSFT"))), Store(tmp_path), "m")
    with pytest.raises(UniverseError, match=r"APPL \(did you mean APPLE\?\)"):
        build_panel(Store(tmp_path), "m", PanelRequest(symbols=("APPL",)))


def test_span_without_bars_is_named(tmp_path: Path) -> None:
    import_source(FrameSource(make_bars()), Store(tmp_path), "m")
    with pytest.raises(DataError, match="it runs from 2015-01-02 to 2016-12-30"):
        build_panel(Store(tmp_path), "m", PanelRequest(start=date(2030, 1, 1)))


def test_symbols_come_in_the_order_asked(tmp_path: Path) -> None:
    request = PanelRequest(symbols=("CCC", "AAA"))
    panel = _panel(tmp_path, FrameSource(make_bars()), request)
    assert panel.symbols == ("CCC", "AAA")
    whole = build_panel(Store(tmp_path), "m")
    assert np.array_equal(panel.close[:, 0], whole.close[:, 2])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    gaps=st.floats(0, 0.5),
    late=st.integers(0, 60),
    gone=st.integers(0, 60),
)
def test_panel_invariants(
    seed: int, gaps: float, late: int, gone: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bars = make_bars(
        ("A", "B"), last=date(2015, 8, 31), seed=seed, gaps=gaps, late={"A": late}, gone={"B": gone}
    )
    path = tmp_path_factory.mktemp("store")
    panel = _panel(path, FrameSource(bars), PanelRequest(delist_after=20))
    has_bar = ~np.isnan(panel.close)
    assert has_bar.sum() == bars.height  # nothing dropped
    assert not (panel.present & panel.delisted).any()
    assert not (panel.tradable & panel.suspended).any()
    assert (panel.present == (panel.tradable | panel.suspended)).all()
    assert (panel.member <= panel.present).all()
    value = forward_fill(panel.close)
    first = has_bar.argmax(axis=0)
    for n in range(2):
        assert np.isnan(value[: first[n], n]).all()  # nothing filled backwards
        assert np.isfinite(value[first[n] :, n]).all()


@given(
    hnp.arrays(
        np.float64,
        st.tuples(st.integers(1, 12), st.integers(1, 4)),
        elements=st.one_of(st.just(np.nan), st.floats(-10, 10)),
    )
)
def test_forward_fill_agrees_with_the_obvious_loop(values: np.ndarray) -> None:
    expected = values.copy()
    for t in range(1, len(values)):
        for n in range(values.shape[1]):
            if np.isnan(expected[t, n]):
                expected[t, n] = expected[t - 1, n]
    assert np.array_equal(forward_fill(values), expected, equal_nan=True)


def test_real_a_shares_stay_inside_their_limits(tmp_path: Path, shared_data: Path) -> None:
    config = load_config(
        None,
        [
            f"data.path={shared_data / 'cn_daily_2010_2020.parquet'}",
            *("data.source=parquet", f"data.store={tmp_path}"),
        ],
    )
    panel = build_panel(Store(tmp_path), ensure_dataset(config).name)
    assert panel.limit_up is not None
    assert panel.limit_down is not None
    assert panel.high is not None
    assert panel.low is not None
    known = np.isfinite(panel.limit_up) & np.isfinite(panel.close)
    outside = known & ((panel.high > panel.limit_up + 1e-6) | (panel.low < panel.limit_down - 1e-6))
    touched = known & (np.abs(panel.close - panel.limit_up) < 1e-6)
    assert known.sum() > 150_000
    assert touched.sum() > 500  # limit-up closes exist, to the cent
    assert outside.sum() == 0
