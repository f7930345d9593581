"""Files beside the bars: membership, instruments and the benchmark."""

from __future__ import annotations

from datetime import date, datetime
from pathlib import Path

import polars as pl
import pytest
from bar_files import ENGLISH, csv_of, write

from echelon.data.sources.files import read_benchmark, read_instruments, read_membership
from echelon.errors import InvalidDataError, UniverseError


def test_membership_is_read_with_aliases_and_sorted(tmp_path: Path) -> None:
    text = "代码,纳入日期,剔除日期\nB,2020-01-02,\nA,20190101,2019-06-01\nA,2020-01-01,2021-01-01\n"
    table = read_membership(write(tmp_path / "u.csv", text, "gbk"))
    assert table.schema == pl.Schema({"symbol": pl.String, "start": pl.Date, "end": pl.Date})
    assert table.rows() == [
        ("A", date(2019, 1, 1), date(2019, 6, 1)),
        ("A", date(2020, 1, 1), date(2021, 1, 1)),
        ("B", date(2020, 1, 2), None),
    ]
    assert csv_of(tmp_path, ENGLISH).membership() is None


def test_membership_intervals_that_touch_do_not_overlap(tmp_path: Path) -> None:
    text = "symbol,start,end\nA,2019-01-01,2020-01-01\nA,2020-01-01,\n"
    assert read_membership(write(tmp_path / "u.csv", text)).height == 2


def test_membership_problems_are_all_listed(tmp_path: Path) -> None:
    text = (
        "symbol,start_date,end_date\n"
        "A,2019-01-01,\n"
        "A,2020-01-01,2021-01-01\n"
        "B,2020-01-01,2020-01-01\n"
        "C,someday,2020-01-01\n"
        ",2020-01-01,\n"
        "D,,2020-01-01\n"
        "E,2019-01-01,2022-01-01\n"
        "E,2019-02-01,2019-03-01\n"
        "E,2020-01-01,2020-02-01\n"
    )
    path = write(tmp_path / "u.csv", text)
    with pytest.raises(InvalidDataError) as caught:
        read_membership(path)
    assert [(p.row, p.field) for p in caught.value.problems] == [
        (3, "start"),
        (4, "end"),
        (5, "start"),
        (6, "symbol"),
        (7, "start"),
        (9, "start"),
        (10, "start"),
    ]
    assert "still in by row 2" in caught.value.problems[0].message
    assert "still in by row 8" in caught.value.problems[6].message
    assert str(path) in str(caught.value)


def test_instruments_are_read_and_repeated_symbols_refused(tmp_path: Path) -> None:
    text = (
        "股票代码,名称,上市日期,退市日期\n"
        "000001.SZ,平安银行,1991-04-03,\n"
        "600001.SH,邯郸,1998-01-22,2009-12-29\n"
    )
    table = read_instruments(write(tmp_path / "i.csv", text))
    assert table.columns == ["symbol", "listed", "delisted", "reason", "name"]
    assert table.row(1) == ("600001.SH", date(1998, 1, 22), date(2009, 12, 29), None, "邯郸")
    bad = "symbol,listed,delisted\nA,2020-01-02,2019-01-01\nA,2020-01-02,\n"
    with pytest.raises(InvalidDataError) as caught:
        read_instruments(write(tmp_path / "bad.csv", bad))
    assert [(p.row, p.field) for p in caught.value.problems] == [(2, "delisted"), (3, "symbol")]


INDEX = (
    "date,symbol,close\n2020-01-03,SPX,3234.85\n2020-01-02,SPX,3257.85\n2020-01-02,DJI,28868.8\n"
)


def test_benchmark_is_the_named_symbol_in_time_order(tmp_path: Path) -> None:
    path = write(tmp_path / "index.csv", INDEX)
    series = read_benchmark(path, "SPX")
    assert series.rows() == [(datetime(2020, 1, 2), 3257.85), (datetime(2020, 1, 3), 3234.85)]
    assert csv_of(tmp_path, ENGLISH).benchmark() is None


def test_unknown_benchmark_symbol_gets_a_suggestion(tmp_path: Path) -> None:
    path = write(tmp_path / "index.csv", INDEX)
    with pytest.raises(UniverseError, match=r"no rows of benchmark 'SPY'. Did you mean 'SPX'\?"):
        read_benchmark(path, "SPY")
    with pytest.raises(UniverseError, match=r"holds 2 symbols \(DJI, SPX\).*data\.benchmark"):
        read_benchmark(path)


def test_benchmark_with_bad_rows_is_refused_with_all_of_them(tmp_path: Path) -> None:
    text = "date,close\n2020-01-02,1\n2020-01-02,2\n2020-01-03,-5\n2020-01-06,\n"
    with pytest.raises(InvalidDataError) as caught:
        read_benchmark(write(tmp_path / "i.csv", text))
    assert {p.row for p in caught.value.problems} == {2, 3, 4, 5}


def test_real_membership_and_benchmark_files_are_read(shared_data: Path) -> None:
    table = read_membership(shared_data / "sp500_membership_intervals.parquet")
    assert (table.height, table["end"].null_count()) == (1230, 503)
    series = read_benchmark(shared_data / "us_index_daily_1999_2018.parquet", "SPX")
    assert series["time"].is_sorted()
    assert series.row(0) == (datetime(1999, 1, 4), 1228.1)
