"""`prepare`: what it writes, that it is deterministic, cached, and honest about what it lacks."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from datetime import date
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from markets import CONFIGS, SPLITS, FrameSource, make_bars, qtmrl_config

from echelon.config import load_config
from echelon.data.build import build_panel
from echelon.data.datasets import ensure_dataset
from echelon.data.importing import import_source
from echelon.data.store import Store
from echelon.errors import (
    ConfigError,
    DamagedError,
    DataError,
    FeatureError,
    StoreError,
    UniverseError,
)
from echelon.features import Prepared, prepare
from echelon.features import prepare as prepare_package
from echelon.features.engine import FeaturePlan, bars_of, symbol_features
from echelon.features.prepare import panel_request
from echelon.features.registry import run, select
from echelon.files import exclusive_lock

# The package offers the function under the module's name.
prepare_module = importlib.import_module("echelon.features.prepare")


def test_prepared_set_has_the_promised_shape_and_names(tmp_path: Path, bars_file: Path) -> None:
    config = qtmrl_config(tmp_path, bars_file)
    prepared = prepare(config, tmp_path / "run").prepared
    t, n, f = prepared.x.shape
    assert prepared.x.dtype == np.float32
    assert (n, f) == (16, 30)
    assert t == len(prepared.times)
    assert prepared.symbols == config.assets
    assert prepared.window == 20
    assert {k: (s.first, s.last) for k, s in prepared.splits.items()} == {
        "train": (date(2015, 1, 2), date(2016, 1, 29)),
        "valid": (date(2016, 2, 1), date(2016, 6, 30)),
        "test": (date(2016, 7, 1), date(2016, 12, 30)),
    }
    assert prepared.scaler.window == (date(2015, 1, 2), date(2016, 1, 29))
    assert np.isfinite(prepared.x).all()
    prepared.verify()


def test_warm_up_is_per_symbol_and_absent_rows_are_zero(tmp_path: Path, bars_file: Path) -> None:
    config = qtmrl_config(tmp_path, bars_file)
    prepared = prepare(config, tmp_path / "run").prepared
    panel = build_panel(
        Store(config.data.store), ensure_dataset(config).name, panel_request(config)
    )
    warm = prepared.manifest["warmup"]
    assert warm == 78
    for n, symbol in enumerate(prepared.symbols):
        bars = np.flatnonzero(~np.isnan(panel.close[:, n]))
        assert prepared.present[:, n].argmax() == bars[warm - 1], symbol
    assert (prepared.x[~prepared.present] == 0).all()
    late, early = prepared.symbols.index("GOOGL"), prepared.symbols.index("AAPL")
    assert prepared.present[:, late].argmax() >= 120 + warm - 1
    assert prepared.present[:, early].argmax() < warm + 10


def test_scaler_is_the_z_score_of_present_train_rows(tmp_path: Path, bars_file: Path) -> None:
    config = qtmrl_config(tmp_path, bars_file)
    prepared = prepare(config, tmp_path / "run").prepared
    train = prepared.splits["train"].rows
    rows = prepared.x[train.start : train.stop][prepared.present[train.start : train.stop]]
    assert rows.mean(axis=0) == pytest.approx(np.zeros(30), abs=1e-4)
    assert rows.std(axis=0) == pytest.approx(np.ones(30), abs=1e-4)
    later = prepared.x[train.stop :][prepared.present[train.stop :]]
    assert np.abs(later.mean(axis=0)).max() > 0.1  # not fitted there


def test_values_land_on_their_bar_and_gaps_carry_or_are_zero(
    tmp_path: Path, bars_file: Path
) -> None:
    config = qtmrl_config(tmp_path, bars_file)
    panel = build_panel(
        Store(config.data.store), ensure_dataset(config).name, panel_request(config)
    )
    plan = FeaturePlan.from_specs(select(config.features, panel.fields).specs)
    n = panel.symbols.index("MSFT")
    values, present = symbol_features(panel, n, plan, 0)
    bars, rows = bars_of(panel, n)
    column = list(plan.names).index("sma_10")
    volume = list(plan.names).index("volume")
    sma = next(feature for feature in plan.series if "sma_10" in feature.names)
    expected = run(sma, bars)[:, 0].astype(np.float32)
    assert np.array_equal(values[rows[100:], column], expected[100:])
    gap = next(t for t in np.flatnonzero(np.isnan(panel.close[:, n])) if present[t])
    assert values[gap, column] == values[gap - 1, column]
    assert values[gap, volume] == 0


def test_same_config_and_data_give_the_same_bytes(tmp_path: Path, bars_file: Path) -> None:
    one = prepare(qtmrl_config(tmp_path, bars_file, "data.cache.enabled=false"), tmp_path / "one")
    two = prepare(qtmrl_config(tmp_path, bars_file, "data.cache.enabled=false"), tmp_path / "two")
    assert not two.cached
    assert one.prepared.manifest["content_hash"] == two.prepared.manifest["content_hash"]


def test_history_before_the_train_window_warms_up(tmp_path: Path, bars_file: Path) -> None:
    late = "split.train=[2015-09-01, 2016-01-29]"
    prepared = prepare(qtmrl_config(tmp_path, bars_file, late), tmp_path / "run").prepared
    assert prepared.splits["train"].rows.start == 19  # W − 1 bars of looking back
    assert prepared.present[0, prepared.symbols.index("AAPL")]


def test_empty_split_is_named_with_the_span_of_the_data(tmp_path: Path, bars_file: Path) -> None:
    config = load_config(
        CONFIGS / "qtmrl.yaml",
        ["data.source=parquet", f"data.path={bars_file}", f"data.store={tmp_path}/store"],
    )
    with pytest.raises(DataError, match=r"split\.train .* is empty: the data run from 2015-01-02"):
        prepare(config, tmp_path / "run")
    assert not (tmp_path / "run" / "prepared").exists()


def test_window_longer_than_the_train_split_is_refused(tmp_path: Path, bars_file: Path) -> None:
    with pytest.raises(DataError, match="fewer than window=400"):
        prepare(qtmrl_config(tmp_path, bars_file, "window=400"), tmp_path / "run")


def test_train_window_shorter_than_the_warm_up_is_refused(tmp_path: Path, bars_file: Path) -> None:
    short = "split.train=[2015-01-02, 2015-03-02]"
    with pytest.raises(DataError, match=r"no symbol is warmed up inside split\.train"):
        prepare(qtmrl_config(tmp_path, bars_file, short), tmp_path / "run")


def test_unknown_asset_is_named(tmp_path: Path, bars_file: Path) -> None:
    with pytest.raises(UniverseError, match=r"GOOG \(did you mean GOOGL\?\)"):
        prepare(qtmrl_config(tmp_path, bars_file, "assets=[GOOG]"), tmp_path / "run")


def test_close_only_source_leaves_features_out_by_name(tmp_path: Path) -> None:
    file = tmp_path / "closes.csv"
    make_bars().select("time", "symbol", "close").write_csv(file)
    config = load_config(
        CONFIGS / "qtmrl.yaml",
        [
            *("data.source=csv", f"data.path={file}", f"data.store={tmp_path}/store"),
            *("assets=[]", SPLITS, f"data.cache.dir={tmp_path}/cache"),
        ],
    )
    report = prepare(config, tmp_path / "run")
    out = {item.name: item.missing for item in report.left_out}
    assert out["atr_14"] == ("high", "low")
    assert out["volume"] == ("volume",)
    assert "sma_10" in report.prepared.names
    assert not set(out) & set(report.prepared.names)
    assert report.prepared.manifest["left_out"]["ha_close"] == ["high", "low", "open"]


def test_group_left_out_of_normalisation_stays_as_it_is(tmp_path: Path, bars_file: Path) -> None:
    prepared = prepare(
        qtmrl_config(tmp_path, bars_file, "normalization.include=[OHLCV]"), tmp_path / "run"
    ).prepared
    rsi = prepared.x[:, :, prepared.names.index("rsi_14")][prepared.present]
    assert 30 < rsi.mean() < 70
    assert dict(zip(prepared.names, prepared.scaler.scaled, strict=True))["close"]


def test_reasons_of_delistings_are_kept_and_those_of_the_future_are_not(tmp_path: Path) -> None:
    bars = make_bars(("AAA", "BBB", "CCC", "DDD"), gone={"BBB": 100, "CCC": 100, "DDD": 100})
    facts = pl.DataFrame(
        {
            "symbol": ["AAA", "BBB", "CCC", "DDD"],
            "delisted": [None, date(2016, 8, 10), date(2016, 8, 10), date(2017, 3, 1)],
            "reason": [None, "merger", None, "bankruptcy"],
        }
    )
    import_source(FrameSource(bars, instruments=facts), Store(tmp_path / "store"), "m")
    config = load_config(
        CONFIGS / "qtmrl.yaml",
        [
            *("data.source=store", "data.dataset=m", f"data.store={tmp_path}/store"),
            *("assets=[]", SPLITS, f"data.cache.dir={tmp_path}/cache", "data.delist_after=20"),
        ],
    )
    prepared = prepare(config, tmp_path / "run").prepared
    gone = prepared.array("delisted")
    assert gone is not None
    assert gone[-1].tolist() == [False, True, True, True]
    assert prepared.manifest["delist_reasons"] == [None, "merger", None, None]
    assert prepared.delist_reasons == (None, "merger", None, None)
    # A set of before has no such key: nothing is known.
    path = prepared.path / "manifest.json"
    old = json.loads(path.read_text(encoding="utf-8"))
    del old["delist_reasons"], old["facts_hash"]
    path.unlink()
    path.write_text(json.dumps(old), encoding="utf-8")
    assert Prepared.open(tmp_path / "run").delist_reasons == (None,) * 4


def test_damaged_prepared_set_is_named(tmp_path: Path, bars_file: Path) -> None:
    prepared = prepare(qtmrl_config(tmp_path, bars_file), tmp_path / "run").prepared
    path = prepared.path / "close.npy"
    path.unlink()
    path.write_bytes(b"junk")
    with pytest.raises(DamagedError, match=r"close\.npy: missing or damaged.*file was changed"):
        Prepared.open(tmp_path / "run")
    with pytest.raises(DamagedError, match=r"close\.npy: missing or damaged"):
        _ = Prepared(prepared.path).close
    (prepared.path / "manifest.json").write_text(json.dumps({"format": 0}))
    with pytest.raises(StoreError, match="another version"):
        Prepared.open(tmp_path / "run")


def test_store_source_needs_a_dataset_name(tmp_path: Path) -> None:
    config = load_config(None, ["data.source=store", f"data.store={tmp_path}"])
    with pytest.raises(ConfigError, match=r"data\.dataset is not set"):
        prepare_package(config, tmp_path / "run")


def test_a_failed_prepare_leaves_the_set_before_it(tmp_path: Path, bars_file: Path) -> None:
    before = prepare(qtmrl_config(tmp_path, bars_file), tmp_path / "run").prepared.manifest
    broken = tmp_path / "broken.py"
    broken.write_text(
        "from echelon.features import factor\n\n"
        "@factor(lookback=1, needs=('close',))\ndef bad(bars):\n    return bars.close / 0.0\n"
    )
    with (
        np.errstate(divide="ignore"),
        pytest.raises(FeatureError, match=r"factor 'bad' .* returned inf"),
    ):
        prepare(qtmrl_config(tmp_path, bars_file, f"features.modules=[{broken}]"), tmp_path / "run")
    assert Prepared.open(tmp_path / "run").manifest == before
    assert _names(tmp_path / "run") == [".prepare.lock", "prepared"]


def _names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


@pytest.mark.parametrize("harm", ["X.npy", "splits.json", "manifest.json", "shorter", "unknown"])
def test_broken_set_is_made_anew(harm: str, tmp_path: Path, bars_file: Path) -> None:
    config = qtmrl_config(tmp_path, bars_file, "data.cache.enabled=false")
    good = prepare(config, tmp_path / "run").prepared
    assert prepare(config, tmp_path / "run").cached
    if harm == "shorter":
        os.truncate(good.path / "close.npy", 1000)
    elif harm == "unknown":
        (good.path / "manifest.json").write_text("[]")
    else:
        (good.path / harm).unlink()
    again = prepare(config, tmp_path / "run")
    assert not again.cached
    assert again.prepared.manifest == good.manifest
    again.prepared.verify()


def test_second_prepare_into_one_directory_is_refused(tmp_path: Path, bars_file: Path) -> None:
    run = tmp_path / "run"
    with (
        exclusive_lock(run / ".prepare.lock", "the prepared set"),
        pytest.raises(StoreError, match=r"the prepared set in .*run is being written by another"),
    ):
        prepare(qtmrl_config(tmp_path, bars_file), run)
    prepare(qtmrl_config(tmp_path, bars_file), run).prepared.verify()


KILLED = """
import importlib, os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from markets import qtmrl_config
module = importlib.import_module("echelon.features.prepare")
if {stage!r} == "making":
    module.fit_scaler = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
else:
    real = Path.rename
    def rename(self, target):
        real(self, target)
        if str(target).endswith(".old"):
            os.kill(os.getpid(), signal.SIGKILL)
    Path.rename = rename
root = Path({root!r})
config = qtmrl_config(root, Path({bars!r}), "window=10", "data.cache.enabled=false")
module.prepare(config, root / "run")
"""


@pytest.mark.parametrize("stage", ["making", "swapping"])
def test_killed_prepare_is_cleaned_up_and_the_set_before_it_returns(
    stage: str, tmp_path: Path, bars_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = qtmrl_config(tmp_path, bars_file, "data.cache.enabled=false")
    run = tmp_path / "run"
    before = prepare(config, run).prepared.manifest
    tests = str(Path(__file__).parent)
    script = KILLED.format(tests=tests, stage=stage, root=str(tmp_path), bars=str(bars_file))
    done = subprocess.run([sys.executable, "-c", script], env=os.environ, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert ("prepared" in _names(run)) == (stage == "making")
    assert any(name.startswith(".prepared-") for name in _names(run))
    monkeypatch.setattr(prepare_module, "_make", None)  # nothing is computed: the set is back
    assert prepare(config, run).cached
    assert Prepared.open(run).manifest == before
    assert _names(run) == [".prepare.lock", "prepared"]


@pytest.mark.parametrize("name", ["us_daily_2000_2018.parquet"])
def test_real_sixteen_stocks_start_when_they_list(
    name: str, tmp_path: Path, shared_data: Path
) -> None:
    config = load_config(
        CONFIGS / "qtmrl.yaml",
        [
            *("data.source=parquet", f"data.path={shared_data / name}"),
            *(f"data.store={tmp_path}/store", f"data.cache.dir={tmp_path}/cache"),
            *("split.valid=[2011-01-03, 2016-12-30]", "split.test=[2017-01-03, 2018-12-31]"),
        ],
    )
    prepared = prepare(config, tmp_path / "run").prepared
    days = prepared.times.astype("datetime64[D]")
    first = {s: str(days[prepared.present[:, n].argmax()]) for n, s in enumerate(prepared.symbols)}
    late = {"WYNN", "GOOGL", "LVS", "AAL", "UAL", "DAL"}
    assert {s for s, day in first.items() if day > "2000-06-01"} == late
    assert {day for s, day in first.items() if s not in late} == {"2000-04-24"}
    assert prepared.present[-1].all()
    assert np.isfinite(prepared.x).all()
