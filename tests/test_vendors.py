"""What the vendor sources share, on recorded frames: no network."""

import importlib
import json
from collections.abc import Callable, Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pytest
from vendor_fakes import (
    FRAMES,
    NAMES,
    PINNED,
    Yahoo,
    akshare_client,
    clock,
    eastmoney,
    only,
    pro,
    recorded,
    tushare_client,
    yahoo,
)

from echelon.data.importing import import_source
from echelon.data.sources import Source
from echelon.data.sources._times import parse_times
from echelon.data.sources._vendor import AShare, a_share
from echelon.data.sources.akshare_ import AkshareSource
from echelon.data.sources.tushare_ import TushareSource
from echelon.data.sources.yfinance_ import YFinanceSource
from echelon.data.store import Store
from echelon.errors import ConfigError, SourceError


@pytest.mark.parametrize("name", NAMES)
def test_recording_cites_the_pinned_library_and_its_columns(name: str) -> None:
    meta = json.loads((FRAMES / f"{name}.json").read_text(encoding="utf-8"))
    assert meta["version"] == PINNED[meta["library"]]
    assert meta["function"].startswith(meta["library"] + "/")
    assert ".py: " in meta["function"]
    frame = recorded(name)
    assert list(frame.columns) == list(meta["columns"])
    for column, kind in meta["columns"].items():
        if kind != "date":
            assert str(frame[column].dtype) == kind, column


def test_pins_are_those_of_the_project() -> None:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    for source in (YFinanceSource, AkshareSource, TushareSource):
        assert f'"{source.package}"' in project


BROKEN: list[tuple[Callable[[pd.DataFrame], Source], str, str]] = [
    (lambda f: yahoo(Yahoo(f)), "yfinance_daily", "Adj Close"),
    (lambda f: eastmoney(akshare_client(stock_zh_a_hist=f)), "akshare_daily", "成交额"),
    (lambda f: eastmoney(akshare_client(stock_zh_a_daily=f)), "akshare_hfq_factor", "hfq_factor"),
    (lambda f: pro(tushare_client(daily=f)), "tushare_daily", "vol"),
    (lambda f: pro(tushare_client(adj_factor=f)), "tushare_adj_factor", "adj_factor"),
]


@pytest.mark.parametrize(("make", "name", "column"), BROKEN)
def test_missing_column_is_named_with_vendor_symbol_and_remedy(
    make: Callable[[pd.DataFrame], Source], name: str, column: str
) -> None:
    vendor = name.partition("_")[0]
    with pytest.raises(
        SourceError,
        match=rf"{vendor}: .* for (AAPL|000001\.SZ) came without column '{column}'.*pip",
    ):
        only(make(recorded(name).drop(columns=column)))


@pytest.mark.parametrize(("make", "name", "column"), BROKEN)
def test_text_where_numbers_belong_is_named(
    make: Callable[[pd.DataFrame], Source], name: str, column: str
) -> None:
    frame = recorded(name)
    frame[column] = "--"
    with pytest.raises(SourceError, match=r"should hold numbers"):
        only(make(frame))


def sources(**query: Any) -> Iterator[Source]:
    yield yahoo(Yahoo(recorded("yfinance_daily")), **query)
    yield eastmoney(akshare_client(), **query)
    yield pro(tushare_client(), **query)


def test_fingerprint_depends_on_the_query_and_on_the_day() -> None:
    for same, again, longer, later in zip(
        sources(now=clock(2024, 6, 20, 5)),
        sources(now=clock(2024, 6, 20, 6)),
        sources(now=clock(2024, 6, 20, 5), end=date(2024, 6, 18)),
        sources(now=clock(2024, 6, 21, 5)),
        strict=True,
    ):
        prints = [s.info().fingerprint for s in (same, longer, later)]
        assert len(set(prints)) == 3
        assert again.info().fingerprint == prints[0]


def test_info_needs_no_client() -> None:
    for make in (yahoo, eastmoney, pro):
        assert make(None).info().freq == "1d"


@pytest.mark.parametrize("make", [yahoo, eastmoney, pro])
def test_library_that_is_not_installed_says_how_to_install_it(
    make: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(SourceError, match=r"not installed.*pip install 'echelon\[vendors\]'"):
        only(make(None))


@pytest.mark.parametrize("source", [YFinanceSource, AkshareSource, TushareSource])
def test_empty_repeated_and_reversed_queries_are_refused(source: type[Any]) -> None:
    span = {"start": None, "end": None, "freq": "1d"}
    with pytest.raises(ConfigError, match="no symbols to download"):
        source([], **span)
    with pytest.raises(SourceError, match="listed more than once: A"):
        source(["A", "A"], **span)
    with pytest.raises(SourceError, match="start 2024-01-02 is after end 2024-01-01"):
        source(["A"], start=date(2024, 1, 2), end=date(2024, 1, 1), freq="1d")


def test_each_symbol_is_one_frame_with_its_origin() -> None:
    client = tushare_client()
    raws = list(pro(client, "000001.SZ", "600000.SH").frames({"600000.SH": datetime(2024, 6, 18)}))
    assert [r.origin for r in raws] == ["tushare:000001.SZ", "tushare:600000.SH"]
    assert [r.frame.height for r in raws] == [7, 1]  # only the stored one is an update
    assert raws[1].frame["row"].to_list() == [0]  # tushare's newest row comes first


@pytest.mark.parametrize(
    ("make", "until"),
    [
        (lambda **q: yahoo(Yahoo(recorded("yfinance_daily")), **q), date(2020, 8, 31)),
        (lambda **q: eastmoney(akshare_client(), **q), date(2024, 6, 12)),
        (lambda **q: pro(tushare_client(), **q), date(2024, 6, 12)),
    ],
)
def test_import_in_two_steps_across_an_ex_day_equals_one(
    make: Callable[..., Source], until: date, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    import_source(make(end=until), store, "steps")
    report = import_source(make(), store, "steps", update=True)
    import_source(make(), store, "once")
    assert report.added == 3
    assert report.manifest.rows == 7
    steps, once = (
        pl.concat([store.read_bars(name, key) for key in store.partitions(name)])
        for name in ("steps", "once")
    )
    assert steps.equals(once)
    assert steps["factor"][0] == 1.0
    assert steps["factor"][-1] != 1.0


@pytest.mark.parametrize(
    ("text", "index", "share"),
    [
        ("000001.SZ", False, AShare("000001", "SZ")),
        ("600000", False, AShare("600000", "SH")),
        ("688981", False, AShare("688981", "SH")),
        ("300750", False, AShare("300750", "SZ")),
        ("835305", False, AShare("835305", "BJ")),
        ("920001", False, AShare("920001", "BJ")),
        ("sh600000", False, AShare("600000", "SH")),
        ("600000.XSHG", False, AShare("600000", "SH")),
        ("600000.SS", False, AShare("600000", "SH")),
        ("000300", True, AShare("000300", "SH")),
        ("sh000300", True, AShare("000300", "SH")),
        ("399001", True, AShare("399001", "SZ")),
    ],
)
def test_a_share_spellings(text: str, index: bool, share: AShare) -> None:
    assert a_share(text, "x", index=index) == share
    assert a_share(share.dotted, "x", index=index) == share
    assert a_share(share.prefixed, "x", index=index) == share


@pytest.mark.parametrize("text", ["AAPL", "1", "000001.NY", "0000011", ""])
def test_other_symbols_are_refused(text: str) -> None:
    with pytest.raises(SourceError, match="is no A-share symbol"):
        a_share(text, "akshare")


def test_two_spellings_of_one_stock_are_refused() -> None:
    with pytest.raises(SourceError, match=r"'000001\.SZ' and 'sz000001' are the same stock"):
        only(eastmoney(akshare_client(), "000001.SZ", "sz000001"))


def test_volume_check_passes_a_symbol_that_never_traded() -> None:
    idle = pl.DataFrame({"close": [10.0], "volume": [0.0], "amount": [0.0]})
    assert eastmoney(None)._in_shares(idle, 100.0, "y")["volume"].to_list() == [0.0]


@pytest.mark.parametrize("odd", [{}, {"code": -1}, [1], {"日期": [2**70]}], ids=range(4))
def test_answer_that_is_no_table_is_the_vendors_fault(odd: object, tmp_path: Path) -> None:
    client = akshare_client()
    client.answers["stock_zh_a_hist"] = [odd]
    with pytest.raises(SourceError, match=r"akshare: .* is no table of numbers"):
        import_source(eastmoney(client), Store(tmp_path), "d")


def test_day_beyond_every_calendar_is_the_vendors_fault(tmp_path: Path) -> None:
    client = akshare_client()
    frame = client.answers["stock_zh_a_daily"][0]
    absurd = pd.Series([2**62] * len(frame), index=frame.index).astype("datetime64[us]")
    client.answers["stock_zh_a_daily"] = [frame.assign(date=absurd)]
    with pytest.raises(SourceError, match=r"akshare: .* has the .* expected the form"):
        import_source(eastmoney(client), Store(tmp_path), "d")


@pytest.mark.parametrize("kind", [pl.Date, pl.Datetime("ms"), pl.Datetime("us", "UTC")], ids=str)
def test_days_beyond_every_calendar_are_not_understood(kind: pl.DataType) -> None:
    physical = pl.Series([0, 2**30 if kind == pl.Date else 2**62])
    cells = physical.cast(pl.Int32 if kind == pl.Date else pl.Int64).cast(kind)
    assert parse_times(cells, freq="1d", timezone="UTC")["time"].to_list() == [
        datetime(1970, 1, 1),
        None,
    ]
