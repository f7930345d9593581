"""From the configuration to a dataset: names, options a source cannot follow, files beside it."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest
from markets import make_bars
from vendor_fakes import Yahoo, recorded

from echelon.config import Config, load_config
from echelon.data import datasets
from echelon.data.datasets import dataset_name, ensure_dataset
from echelon.data.importing import Extras
from echelon.data.sources import open_source
from echelon.data.sources.files import read_instruments, read_membership
from echelon.data.sources.yfinance_ import YFinanceSource
from echelon.data.store import Store
from echelon.errors import ConfigError, UniverseError

SMALL = ("data.synthetic.n_symbols=3", "data.synthetic.n_days=20", "data.synthetic.index_size=2")


def config(tmp_path: Path, *more: str) -> Config:
    return load_config(None, [f"data.store={tmp_path / 'store'}", *more])


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    path = tmp_path / "bars.parquet"
    make_bars(("AAA", "BBB")).write_parquet(path)
    return path


def of_file(tmp_path: Path, path: Path, *more: str) -> Config:
    return config(tmp_path, "data.source=parquet", f"data.path={path}", *more)


# Options


@pytest.mark.parametrize(
    ("options", "option"),
    [
        (["data.source=sample", "data.freq=5min"], "freq"),
        (["data.source=sample", "data.calendar=XSHG"], "calendar"),
        (["data.source=sample", "data.timezone=Asia/Tokyo"], "timezone"),
        (["data.source=synthetic", "data.timezone=Asia/Tokyo", *SMALL], "timezone"),
        (["data.source=synthetic", "data.calendar=data", *SMALL], "calendar"),
        (["data.source=yfinance", "data.symbols=[AAPL]", "data.calendar=XSHG"], "calendar"),
        (["data.source=yfinance", "data.symbols=[AAPL]", "data.timezone=UTC"], "timezone"),
        (["data.source=akshare", "data.symbols=['600000']", "data.calendar=XNYS"], "calendar"),
        (["data.source=tushare", "data.symbols=['600000']", "data.timezone=UTC"], "timezone"),
        (["data.source=sample", "data.columns={a: close}"], "columns"),
        (["data.source=sample", "data.price_basis=raw"], "price_basis"),
        (["data.source=sample", "data.symbols=[AAPL]"], "symbols"),
        (["data.source=sample", "data.qlib_market=csi300"], "qlib_market"),
        (["data.source=sample", "data.membership_index=000300.SH"], "membership_index"),
    ],
)
def test_option_that_a_source_cannot_follow_is_refused_by_name(
    tmp_path: Path, options: list[str], option: str
) -> None:
    tree = config(tmp_path, *options)
    with pytest.raises(ConfigError) as caught:
        open_source(tree)
    assert f"data.{option} is " in str(caught.value)
    assert repr(tree.data.source) in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        ["data.source=sample", "data.calendar=XNYS", "data.timezone=America/New_York"],
        ["data.source=yfinance", "data.symbols=[AAPL]", "data.calendar=XNYS"],
        ["data.source=akshare", "data.symbols=['600000']", "data.timezone=Asia/Shanghai"],
    ],
)
def test_option_that_says_what_the_source_has_anyway_is_taken(
    tmp_path: Path, options: list[str]
) -> None:
    tree = config(tmp_path, *options)
    assert open_source(tree).info().name == tree.data.source


@pytest.mark.parametrize(("calendar", "zone"), [("XSHG", "Asia/Shanghai"), ("24/7", "UTC")])
def test_synthetic_market_follows_the_calendar(tmp_path: Path, calendar: str, zone: str) -> None:
    tree = config(tmp_path, "data.source=synthetic", f"data.calendar={calendar}", *SMALL)
    info = ensure_dataset(tree).info
    assert (info.calendar, info.timezone) == (calendar, zone)


# Names


def test_vendor_dataset_has_one_name_over_the_days_and_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = config(tmp_path, "data.source=yfinance", "data.symbols=[AAPL]")
    history = recorded("yfinance_daily")
    names, rows = set(), []
    for day, known in ((14, history.iloc[:-2]), (30, history)):
        source = YFinanceSource(
            ("AAPL",),
            start=None,
            end=None,
            freq="1d",
            client=Yahoo(known),
            now=lambda day=day: datetime(2030, 6, day, 23, tzinfo=UTC),  # type: ignore[misc]
        )
        monkeypatch.setattr(datasets, "open_source", lambda _, source=source: source)
        manifest = ensure_dataset(tree)
        names.add(manifest.name)
        rows.append(manifest.rows)
    assert len(names) == 1
    assert rows == [len(history) - 2, len(history)]


@pytest.mark.parametrize(
    "other",
    [
        "data.symbols=[MSFT]",
        "data.freq=5min",
        "data.start=2020-01-02",
        "data.end=2020-01-02",
        "data.benchmark=^GSPC",
    ],
)
def test_another_question_to_a_vendor_is_another_dataset(tmp_path: Path, other: str) -> None:
    asked = [
        config(tmp_path, "data.source=yfinance", "data.symbols=[AAPL]", *o) for o in ((), (other,))
    ]
    names = {dataset_name(tree, open_source(tree), Extras()) for tree in asked}
    assert len(names) == 2
    beside = dataset_name(asked[0], open_source(asked[0]), Extras(fingerprint="a universe"))
    assert beside not in names


# The universe


def test_universe_that_shares_no_symbol_is_refused_with_examples_of_both(
    tmp_path: Path, parquet: Path
) -> None:
    universe = tmp_path / "u.csv"
    universe.write_text("symbol,start,end\nAAA.US,2015-01-02,\nBBB.US,2015-01-02,\n")
    tree = of_file(tmp_path, parquet, f"data.universe={universe}")
    for _ in range(2):  # the second time the dataset is there already
        with pytest.raises(UniverseError) as caught:
            ensure_dataset(tree)
        for part in ("AAA.US, BBB.US", "the bars have AAA, BBB", "data.universe"):
            assert part in str(caught.value)
    universe.write_text("symbol,start,end\nAAA,2015-01-02,\nBBB,2015-01-02,\n")
    assert ensure_dataset(tree).rows > 0


def test_universe_that_shares_some_symbols_is_a_warning(
    tmp_path: Path, parquet: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("echelon"), "propagate", True)
    universe = tmp_path / "u.csv"
    universe.write_text("symbol,start,end\nAAA,2015-01-02,\nZZZ,2015-01-02,\n")
    ensure_dataset(of_file(tmp_path, parquet, f"data.universe={universe}"))
    assert "1 of 2 member(s) have no bars" in caplog.text
    assert "ZZZ" in caplog.text


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_number_codes_are_padded_beside_the_bars_as_in_them(tmp_path: Path, suffix: str) -> None:
    codes = {"000001": 1, "600000": 600000}
    bars = make_bars(tuple(codes), calendar="XSHG").with_columns(
        pl.col("symbol").replace_strict(codes, return_dtype=pl.Int64)
    )
    bars.write_parquet(tmp_path / "bars.parquet")
    members = pl.DataFrame({"symbol": list(codes.values()), "start": ["2015-01-05"] * 2})
    facts = members.select("symbol", listed="start")
    universe, instruments = tmp_path / f"u.{suffix}", tmp_path / f"i.{suffix}"
    for frame, path in ((members, universe), (facts, instruments)):
        frame.write_csv(path) if suffix == "csv" else frame.write_parquet(path)
    tree = of_file(
        tmp_path,
        tmp_path / "bars.parquet",
        f"data.universe={universe}",
        f"data.instruments={instruments}",
    )
    store = Store(tree.data.store)
    name = ensure_dataset(tree).name
    membership = store.table(name, "membership")
    assert membership is not None
    assert membership["symbol"].to_list() == list(codes)
    assert store.symbols(name)["listed"].null_count() == 0


def test_only_short_numbers_are_padded(tmp_path: Path) -> None:
    path = tmp_path / "u.csv"
    path.write_text("symbol,start\n1,2020-01-02\n600000.SH,2020-01-02\nAB,2020-01-02\n")
    assert read_membership(path, pad_symbols=True)["symbol"].to_list() == [
        "000001",
        "600000.SH",
        "AB",
    ]
    assert read_instruments(path)["symbol"].to_list() == ["1", "600000.SH", "AB"]


# Files that are not there


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("data.exogenous.0.path", "data.exogenous=[{path: nowhere.csv}]"),
        ("data.universe", "data.universe=nowhere.csv"),
        ("data.instruments", "data.instruments=nowhere.csv"),
        ("data.benchmark_path", "data.benchmark_path=nowhere.csv"),
    ],
)
def test_missing_file_is_refused_by_its_option_before_anything_is_imported(
    tmp_path: Path, parquet: Path, option: str, value: str
) -> None:
    tree = of_file(tmp_path, parquet, value)
    with pytest.raises(ConfigError, match=rf"^{option}: nowhere\.csv does not exist"):
        ensure_dataset(tree)
    assert Store(tree.data.store).datasets() == []


def test_missing_exogenous_file_is_named_for_a_stored_dataset_too(
    tmp_path: Path, parquet: Path
) -> None:
    name = ensure_dataset(of_file(tmp_path, parquet)).name
    stored = ("data.source=store", f"data.dataset={name}")
    assert ensure_dataset(config(tmp_path, *stored)).name == name
    with pytest.raises(ConfigError, match=r"data\.exogenous\.0\.path"):
        ensure_dataset(config(tmp_path, *stored, "data.exogenous=[{path: nowhere.csv}]"))
