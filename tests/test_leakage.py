"""The leakage check passes what looks back and names what looks ahead."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from markets import CONFIGS, SPLITS, FrameSource, make_bars, write_qtmrl_parquet

from echelon.config import Config, load_config
from echelon.data.build import PanelRequest, build_panel
from echelon.data.datasets import ensure_dataset
from echelon.data.importing import import_source
from echelon.data.store import Store
from echelon.data.views import RescaledView, ScrambledView, TruncatedView
from echelon.errors import DataError, FeatureError
from echelon.features import check_leakage, prepare
from echelon.features.engine import bars_of
from echelon.features.leakage import LeakageReport
from echelon.features.scaler import RunningMoments

HERE = Path(__file__).parent
LEAKS = (
    *("leak_backfill", "leak_centred", "leak_scaling", "leak_level", "leak_end_anchor"),
    *("leak_remembered", "leak_behind_outlier", "leak_in_a_rare_regime"),
)


def _config(tmp_path: Path, *more: str) -> Config:
    return load_config(
        None, [f"data.store={tmp_path}/store", f"data.cache.dir={tmp_path}/cache", SPLITS, *more]
    )


def _with_membership() -> FrameSource:
    bars = make_bars(
        tuple("ABCDEFGH"), gaps=0.05, late={"B": 80, "H": 300}, gone={"C": 100, "G": 250}
    )
    intervals = pl.DataFrame(
        {
            "symbol": ["A", "B", "D", "E", "A"],
            "start": [date(2015, 1, 2), *[date(2015, 6, 1)] * 3, date(2016, 8, 1)],
            "end": [date(2015, 9, 1), None, None, date(2016, 5, 2), None],
        }
    )
    facts = pl.DataFrame({"symbol": ["C"], "delisted": [date(2016, 8, 10)]})
    index = bars.group_by("time").agg(close=pl.col("close").mean()).sort("time")
    return FrameSource(bars, membership=intervals, instruments=facts, benchmark=index)


def _check(config: Config, source: FrameSource) -> LeakageReport:
    store = Store(config.data.store)
    manifest = import_source(source, store, "m").manifest
    return check_leakage(config, store, manifest)


@pytest.mark.parametrize("relative", ["true", "false"])
def test_every_shipped_feature_passes_on_a_market_with_everything(
    relative: str, tmp_path: Path
) -> None:
    config = load_config(
        CONFIGS / "qtmrl.yaml",
        [
            *(f"data.store={tmp_path}/store", SPLITS, "assets=[]", "data.delist_after=30"),
            "features.stationary.enabled=true",
            *("features.alpha158=[5, 20]", f"features.relative={relative}"),
        ],
    )
    report = _check(config, _with_membership())
    assert report.leaks == ()
    assert len(report.features) >= 45 + 12 + 2 * 29
    assert len(report.cuts) == 3


@pytest.mark.parametrize("method", ["rank", "zscore"])
def test_features_compared_across_symbols_pass_and_a_leak_shows_through(
    method: str, tmp_path: Path
) -> None:
    honest = f"features={{alpha158: [5], cross_section: {{method: {method}}}}}"
    report = _check(_config(tmp_path, honest), _with_membership())
    assert report.leaks == ()
    assert set(report.features) >= {f"{method}_KMID", f"{method}_CORR5"}
    assert "CORR5" not in report.features
    leaky = (
        f"features={{modules: [{HERE / 'leaky_factors.py'}], custom: [leak_level], "
        f"cross_section: {{method: {method}}}}}"
    )
    leaks = _check(_config(tmp_path, leaky), _with_membership()).names
    assert leaks == (f"{method}_leak_level",)


def test_a_share_features_with_limits_pass(tmp_path: Path) -> None:
    bars = make_bars(("600000.SH", "300750.SZ"), first=date(2015, 1, 5), calendar="XSHG", gaps=0.03)
    raw = {"calendar": "XSHG", "timezone": "Asia/Shanghai", "price_basis": "raw"}
    config = _config(
        tmp_path, "features.stationary.enabled=true", "split.train=[2015-01-05, 2016-01-29]"
    )
    report = _check(config, FrameSource(bars, **raw))
    assert "limit_up_distance" in report.features
    assert report.leaks == ()


def test_every_planted_leak_is_named_and_the_honest_factor_is_not(tmp_path: Path) -> None:
    config = _config(tmp_path, f"features.modules=[{HERE / 'leaky_factors.py'}]")
    report = _check(config, _with_membership())
    assert set(report.names) == set(LEAKS)
    assert all(leak.detail for leak in report.leaks)
    by_name = {leak.name: leak.test for leak in report.leaks}
    assert by_name["leak_level"] == "rescaled"


def test_price_level_is_found_on_a_market_of_one_symbol(tmp_path: Path) -> None:
    for symbol in ("A", "B", "IBM", "BTC-USD"):
        config = _config(
            tmp_path,
            f"features.modules=[{HERE / 'leaky_factors.py'}]",
            "features.custom=[leak_level]",
        )
        report = _check(config, FrameSource(make_bars((symbol,))))
        assert report.names == ("leak_level",)


def test_dividend_after_the_end_changes_no_feature_of_adjusted_prices(tmp_path: Path) -> None:
    bars = make_bars().drop("factor")
    config = _config(tmp_path, "features.ohlcv=true", "features.stationary.enabled=true")
    report = _check(config, FrameSource(bars, price_basis="adjusted"))
    assert "volume" in report.features
    assert report.leaks == ()


def test_future_volume_in_the_panel_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import echelon.features.leakage as module

    honest = module.build_panel

    def clairvoyant(store: Store, name: str, request: PanelRequest):  # type: ignore[no-untyped-def] # noqa: ANN202
        panel = honest(store, name, request)
        assert panel.volume is not None
        return replace(panel, volume=panel.volume[::-1].cumsum(axis=0)[::-1])

    monkeypatch.setattr(module, "build_panel", clairvoyant)
    report = _check(_config(tmp_path, "features.indicators.rsi=[14]"), _with_membership())
    assert "volume" in report.names


def test_no_false_alarm_where_factor_or_benchmark_begin_late(tmp_path: Path) -> None:
    bars = make_bars(late={"BBB": 200}).with_columns(factor=pl.lit(1.0))
    index = bars.filter(pl.col("symbol") == "AAA", pl.col("time") > datetime(2016, 10, 3))
    hole = pl.col("time").is_between(datetime(2016, 1, 28), datetime(2016, 2, 2))
    source = FrameSource(bars.filter(~hole), benchmark=index.select("time", "close"))
    assert _check(_config(tmp_path, "features.indicators.rsi=[14]"), source).leaks == ()


def test_rank_over_a_leaky_factor_does_not_hide_it(tmp_path: Path) -> None:
    config = _config(
        tmp_path,
        f"features.modules=[{HERE / 'leaky_factors.py'}]",
        "features.custom=[leak_centred]",
        "features.stationary.enabled=true",
    )
    report = _check(config, _with_membership())
    assert report.names == ("leak_centred",)


def test_scaler_fitted_on_everything_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import echelon.features.leakage as module

    honest = module.compute

    def whole_sample(panel, plan, path, *, train, **rest):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN003, ANN202
        return honest(panel, plan, path, train=range(panel.shape[0]), **rest)

    monkeypatch.setattr(module, "compute", whole_sample)
    config = _config(tmp_path, "features.indicators.rsi=[14]")
    report = _check(config, _with_membership())
    assert {(leak.kind, leak.name) for leak in report.leaks} == {("scaler", "rsi_14")}


def test_membership_known_too_early_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import echelon.features.leakage as module

    honest = module.build_panel

    def survivors_only(store: Store, name: str, request: PanelRequest):  # type: ignore[no-untyped-def] # noqa: ANN202
        panel = honest(store, name, request)
        ever_since = panel.member & panel.member[-1]
        return replace(panel, member=ever_since)

    monkeypatch.setattr(module, "build_panel", survivors_only)
    config = _config(tmp_path, "features.indicators.rsi=[14]")
    report = _check(config, _with_membership())
    assert "member" in report.names


def test_exogenous_series_named_like_a_feature_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("series,period,published,value\nrsi_14,2015-01,2015-02-12 08:30,1\n")
    config = _config(tmp_path, "features.indicators.rsi=[14]", f"data.exogenous=[{{path: {file}}}]")
    with pytest.raises(FeatureError, match="rsi_14: a feature has that name already"):
        _check(config, _with_membership())


def test_train_window_without_a_warm_symbol_is_refused_not_passed(tmp_path: Path) -> None:
    short = "split.train=[2015-01-02, 2015-02-02]"
    with pytest.raises(DataError, match="no symbol is warmed up"):
        _check(_config(tmp_path, "features.indicators.sma=[100]", short), _with_membership())


def test_exogenous_series_pass_when_joined_by_publication(tmp_path: Path) -> None:
    rows = [
        f"cpi,{y}-{m:02d},{y + m // 12}-{m % 12 + 1:02d}-12 08:30,{100 + 12 * (y - 2014) + m}"
        for y in (2014, 2015, 2016)
        for m in range(1, 13)
    ]
    file = tmp_path / "cpi.csv"
    file.write_text("series,period,published,value\n" + "\n".join(rows) + "\n")
    config = _config(tmp_path, "features.indicators.rsi=[14]", f"data.exogenous=[{{path: {file}}}]")
    report = _check(config, _with_membership())
    assert report.features == ("rsi_14", "cpi")
    assert report.leaks == ()


def test_vendor_file_adjusted_to_its_last_day_leaks_by_level_only(
    tmp_path: Path, shared_data: Path
) -> None:
    file = shared_data / "us_daily_2000_2018.parquet"
    config = load_config(
        CONFIGS / "qtmrl.yaml",
        [
            "data.source=parquet",
            f"data.path={file}",
            f"data.store={tmp_path}/store",
            "split.valid=[2011-01-03, 2016-12-30]",
            "split.test=[2017-01-03, 2018-12-31]",
            f"features.modules=[{HERE / 'leaky_factors.py'}]",
            "features.custom=[leak_level, leak_end_anchor]",
        ],
    )
    report = check_leakage(config, Store(config.data.store), ensure_dataset(config), n_cuts=1)
    assert set(report.names) == {"leak_level", "leak_end_anchor"}


def test_first_level_of_the_vendor_file_no_longer_tells_its_return(
    tmp_path: Path, shared_data: Path
) -> None:
    file = shared_data / "us_daily_2000_2018.parquet"
    frame = (
        pl.read_parquet(file)
        .sort("date")
        .group_by("symbol")
        .agg(first=pl.col("adj_close").first(), last=pl.col("adj_close").last())
    )
    growth = (frame["last"] / frame["first"]).log()
    as_sold = np.corrcoef(frame["first"].log(), growth)[0, 1]
    assert as_sold < -0.6  # what the file itself gives away
    config = load_config(
        None, ["data.source=parquet", f"data.path={file}", f"data.store={tmp_path}/store"]
    )
    panel = build_panel(Store(config.data.store), ensure_dataset(config).name)
    first = [bars_of(panel, n)[0].close[0] for n in range(panel.shape[1])]
    assert first == pytest.approx(np.ones(panel.shape[1]))


def test_multiplying_a_history_by_a_constant_changes_no_prepared_feature(tmp_path: Path) -> None:
    bars = make_bars(tuple("ABC"), gaps=0.02)
    odd = pl.when(pl.col("symbol") == "B").then(3.7).otherwise(1.0)
    scaled = bars.with_columns(
        *[pl.col(c) * odd for c in ("open", "high", "low", "close")], volume=pl.col("volume") / odd
    )
    found = []
    for name, frame in (("one", bars), ("two", scaled)):
        path = tmp_path / f"{name}.parquet"
        frame.write_parquet(path)
        config = load_config(
            CONFIGS / "qtmrl.yaml",
            [
                *("data.source=parquet", f"data.path={path}", f"data.store={tmp_path}/store"),
                *("assets=[]", SPLITS, "features.stationary.enabled=true"),
                "data.cache.enabled=false",
            ],
        )
        found.append(prepare(config, tmp_path / name).prepared)
    assert found[0].manifest["dataset"] != found[1].manifest["dataset"]
    assert np.allclose(found[0].x, found[1].x, rtol=1e-4, atol=1e-4)


def test_views_change_the_future_and_nothing_else(tmp_path: Path) -> None:
    store = Store(tmp_path)
    import_source(_with_membership(), store, "m")
    cut = datetime(2016, 3, 1)
    true = build_panel(store, "m")
    for view in (TruncatedView(store, cut), ScrambledView(store, cut)):
        other = build_panel(view, "m", PanelRequest(delist_after=250))
        rows = int(np.searchsorted(true.times, np.datetime64(cut, "us"), side="right"))
        columns = [true.symbols.index(s) for s in other.symbols]
        assert np.array_equal(true.close[:rows, columns], other.close[:rows], equal_nan=True)
        assert np.array_equal(true.member[:rows, columns], other.member[:rows])
        assert not np.array_equal(true.close, other.close, equal_nan=True)
    scaled = build_panel(RescaledView(store), "m")
    assert not np.allclose(np.nan_to_num(scaled.close), np.nan_to_num(true.close))
    ratio = scaled.close / true.close
    assert np.nanmax(ratio, axis=0) == pytest.approx(np.nanmin(ratio, axis=0))


def test_empty_moments_leave_the_scaler_alone() -> None:
    assert RunningMoments.none(2).merge(
        RunningMoments.from_values(np.zeros((0, 2)))
    ).count.tolist() == [0, 0]


def test_command_fails_with_exit_code_seven_on_a_leak(tmp_path: Path) -> None:
    path = write_qtmrl_parquet(tmp_path / "bars.parquet")

    def run(name: str) -> subprocess.CompletedProcess[str]:
        command = [
            *(sys.executable, "-m", "echelon", "data", "check", str(path), "--leakage"),
            *("-o", f"data.store={tmp_path}/store", "-o", SPLITS),
            *("-o", f"features.modules=[{HERE / 'leaky_factors.py'}]"),
            *("-o", f"features.custom=[{name}]"),
        ]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    bad, good = run("leak_level"), run("honest_momentum")
    assert bad.returncode == 7, bad.stderr
    assert "leak_level" in bad.stderr
    assert "Traceback" not in bad.stderr
    assert good.returncode == 0, good.stderr
    assert "no leak" in good.stdout
