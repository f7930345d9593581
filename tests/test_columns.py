"""Columns, times and cells of user files: what is understood, and how the rest is named."""

from __future__ import annotations

import tempfile
from datetime import date, datetime, timedelta, timezone
from datetime import time as clock
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import polars as pl
import pytest
from bar_files import ENGLISH, csv_of, problems_of, read, times_of
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.data.sources import _tables
from echelon.data.sources._columns import BARS, normalise, recognise
from echelon.data.sources.files import ParquetSource
from echelon.errors import InvalidDataError


@pytest.mark.parametrize(
    ("header", "ours"),
    [
        ("Adj Close", "adj_close"),
        ("adjclose", "adj_close"),
        ("后复权收盘价", "adj_close"),
        ("TS_CODE", "symbol"),
        ("证券代码", "symbol"),
        ("Ticker", "symbol"),
        ("<VOL>", "volume"),
        ("成交量(股)", "volume"),
        ("收盘价(元)", "close"),
        ("昨收", "pre_close"),
        ("Prev. Close", "pre_close"),
        ("turnover", "amount"),
        ("isST", "st"),
        ("复权因子", "factor"),
    ],
)
def test_aliases_are_recognised(header: str, ours: str) -> None:
    columns = recognise(["date", header], file="f", required=("time",))
    assert columns.by_field[ours].name == header


def test_no_alias_means_two_fields() -> None:
    seen: dict[str, str] = {}
    for ours, names in BARS.items():
        for name in names.split():
            assert seen.setdefault(normalise(name), ours) == ours
    assert all(normalise(ours) in seen for ours in BARS if ours != "clock")


def test_turnover_beside_an_amount_is_taken_for_a_rate_and_left() -> None:
    columns = recognise(["date", "close", "amount", "turnover"], file="f")
    assert columns.by_field["amount"].name == "amount"


def test_own_map_wins_over_a_recognised_name_and_scales(tmp_path: Path) -> None:
    text = "date,close,px,hands\n2020-01-02,1,2,3\n"
    source = csv_of(tmp_path, text, columns={"px": "close", "hands": "volume(lots)"})
    assert read(source).select("close", "volume", "symbol").row(0) == (2.0, 300.0, "bars")


def test_missing_column_names_file_columns_and_remedy(tmp_path: Path) -> None:
    source = csv_of(tmp_path, "date,symbol,clse\n2020-01-02,A,1\n")
    with pytest.raises(InvalidDataError) as caught:
        source.info()
    message = str(caught.value)
    assert str(tmp_path / "bars.csv") in message
    assert "field 'close'" in message
    assert "found date, symbol, clse" in message
    assert "Did you mean 'clse'?" in message
    assert "data.columns: {your_name: close}" in message


def test_all_missing_columns_are_listed_at_once(tmp_path: Path) -> None:
    source = csv_of(tmp_path, "a,b\n1,2\n")
    with pytest.raises(InvalidDataError) as caught:
        source.info()
    assert [p.field for p in caught.value.problems] == ["time", "close"]


def test_two_columns_for_one_field_are_refused(tmp_path: Path) -> None:
    source = csv_of(tmp_path, "date,close,收盘\n2020-01-02,1,2\n")
    with pytest.raises(InvalidDataError, match=r"'close' and '收盘' both mean it.*'ignore'"):
        source.info()
    ignoring = csv_of(tmp_path, "date,close,收盘\n2020-01-02,1,2\n", columns={"收盘": "ignore"})
    assert read(ignoring)["close"].to_list() == [1.0]


def test_one_name_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataError, match="'close' and 'close' both mean it"):
        csv_of(tmp_path, "date,close,close\n2020-01-02,1,2\n").info()


def test_own_map_with_a_typo_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataError, match=r"names 'clos'.*Did you mean 'close'\?"):
        csv_of(tmp_path, ENGLISH, columns={"clos": "open"}).info()
    with pytest.raises(InvalidDataError, match=r"maps it to 'opne'.*Did you mean 'open'\?"):
        csv_of(tmp_path, ENGLISH, columns={"close": "opne"}).info()


def test_adjusted_close_becomes_a_factor_and_a_split_adjusted_basis(tmp_path: Path) -> None:
    source = csv_of(tmp_path, "Date,Close,Adj Close\n2020-01-02,10,5\n2020-01-03,0,5\n")
    assert read(source)["factor"].to_list() == [0.5, None]
    assert source.info().price_basis == "split_adjusted"
    assert source.info().fields == {"close", "factor"}


@pytest.mark.parametrize(
    "cell", ["2020-01-02", "20200102", "2020/1/2", "2020.01.02", "2020年1月2日", "2020-01-02 15:00"]
)
def test_dates_are_read_in_every_common_form(tmp_path: Path, cell: str) -> None:
    assert times_of(tmp_path, [cell], "1d") == [datetime(2020, 1, 2)]


@pytest.mark.parametrize(
    "cell",
    [
        "2020-07-01 09:35",
        "2020-07-01T09:35:00",
        "2020/7/1 9:35:00.000",
        "20200701093500",
        "202007010935",
        "20200701 09:35:00",
        "2020-07-01T13:35:00Z",
        "2020-07-01 09:35:00-04:00",
        "2020-07-01 21:35:00+0800",
        "1593610500",
        "1593610500000",
    ],
)
def test_times_are_read_and_offsets_converted_to_the_exchange(tmp_path: Path, cell: str) -> None:
    assert times_of(tmp_path, [cell], "5min", calendar="XNYS") == [datetime(2020, 7, 1, 9, 35)]


def test_different_offsets_in_one_column_are_daylight_saving_not_a_mixture(tmp_path: Path) -> None:
    cells = ["2020-03-06 09:35:00-05:00", "2020-03-09 09:35:00-04:00"]
    assert times_of(tmp_path, cells, "5min", calendar="XNYS") == [
        datetime(2020, 3, 6, 9, 35),
        datetime(2020, 3, 9, 9, 35),
    ]


@pytest.mark.parametrize("cell", ["2020-01-02T00:00:00Z", "2020-01-02 00:00:00-05:00"])
def test_daily_bar_at_midnight_of_any_zone_stays_on_its_date(tmp_path: Path, cell: str) -> None:
    assert times_of(tmp_path, [cell], "1d", calendar="XNYS") == [datetime(2020, 1, 2)]


def test_daily_bar_stored_as_utc_returns_to_its_session(tmp_path: Path) -> None:
    stored = pl.DataFrame(
        {"date": [datetime(2020, 1, 1, 16), datetime(2020, 1, 2, 16)], "close": [1.0, 2.0]}
    ).with_columns(pl.col("date").dt.replace_time_zone("UTC"))
    stored.write_parquet(tmp_path / "600000.SH.parquet")
    source = ParquetSource(tmp_path / "600000.SH.parquet", freq="1d")
    assert read(source)["time"].to_list() == [datetime(2020, 1, 2), datetime(2020, 1, 3)]


@pytest.mark.parametrize(
    "row",
    ["2020-01-02,09:35", "20200102,93500", "2020-01-02,0935", "2020-01-02,20200102093500000"],
)
def test_date_and_clock_columns_make_one_time(tmp_path: Path, row: str) -> None:
    source = csv_of(tmp_path, f"日期,时间,收盘\n{row},3.4\n", "5min", calendar="XSHG")
    assert read(source)["time"].to_list() == [datetime(2020, 1, 2, 9, 35)]


def test_mixed_time_zones_name_both_rows_and_the_remedy(tmp_path: Path) -> None:
    cells = ["2020-07-01 09:35:00-04:00", "2020-07-01 09:40:00", "2020-07-01 09:45:00-04:00"]
    source = csv_of(
        tmp_path, "time,close\n" + "".join(f"{c},1\n" for c in cells), "5min", calendar="XNYS"
    )
    assert read(source)["row"].to_list() == [2, 4]
    (problem,) = source.problems()
    assert (problem.row, problem.field) == (3, "time")
    assert "mixed time zones" in problem.message
    assert "row 2" in problem.message
    assert "offset" in problem.remedy
    assert str(tmp_path / "bars.csv") in str(problem)
    assert source.rejected_rows().select("row", "problem").rows() == [(3, "mixed time zones")]


def test_mixed_time_zones_across_blocks_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tables, "_BLOCK_BYTES", 1 << 10)
    start = datetime(2020, 1, 1)
    rows = [f"{start + timedelta(minutes=k)}Z,BTC-PERP,1" for k in range(200)]
    rows += [f"{start + timedelta(minutes=200)},BTC-PERP,1"]
    source = csv_of(tmp_path, "time,symbol,close\n" + "\n".join(rows) + "\n", "1min")
    assert read(source).height == 200
    assert [p.row for p in source.problems()] == [202]


def test_unreadable_cells_are_all_listed_with_their_rows(tmp_path: Path) -> None:
    text = (
        "date,symbol,close,volume\n"
        "2020-01-02,A,1,10\n"
        "2020-13-02,A,2,10\n"
        "02/01/2020,A,3,10\n"
        "2020-01-06,A,4.x,10\n"
        "2020-01-07,A,5,many\n"
        "2020-01-08,A,6,--\n"
    )
    source = csv_of(tmp_path, text)
    assert read(source)["row"].to_list() == [2, 7]
    assert [(p.row, p.field) for p in source.problems()] == [
        (3, "date"),
        (4, "date"),
        (5, "close"),
        (6, "volume"),
    ]
    assert "'2020-13-02' cannot be read as a time" in source.problems()[0].message
    assert "2020-01-02, 20200102" in source.problems()[0].remedy
    rejected = source.rejected_rows()
    assert rejected["row"].to_list() == [3, 4, 5, 6]
    assert '"close":"4.x"' in rejected["cells"][2]
    assert "close: 4.x cannot be read as a number" in rejected["problem"][2]


def test_column_of_another_kind_gives_one_problem_and_sets_every_row_aside(tmp_path: Path) -> None:
    rows = "".join(f"{d:02d}/01/2020,{d}\n" for d in range(1, 29))
    source = csv_of(tmp_path, "date,close\n" + rows)
    (problem,) = problems_of(source)
    assert "none of 28 cells can be read as a time, the first: '01/01/2020'" in problem.message
    assert source.rejected_rows().height == 28


def test_numbers_with_thousands_separators_are_read(tmp_path: Path) -> None:
    source = csv_of(tmp_path, 'date,close,volume\n2020-01-02," 1,234.5 ","1,000,000"\n')
    assert read(source).select("close", "volume").row(0) == (1234.5, 1e6)


def test_float32_columns_are_widened_without_noise(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {"date": [date(2020, 1, 2)], "close": [24.37], "volume": [123456.7]},
        schema={"date": pl.Date, "close": pl.Float32, "volume": pl.Float32},
    )
    frame.write_parquet(tmp_path / "A.parquet")
    bars = read(ParquetSource(tmp_path / "A.parquet", freq="1d"))
    assert bars.select("close", "volume", "row").row(0) == (24.37, 123456.7, 0)


@pytest.mark.parametrize("dtype", [pl.Int64, pl.Float64, pl.String])
def test_parquet_dates_may_be_numbers_or_text(tmp_path: Path, dtype: Any) -> None:
    frame = pl.DataFrame({"date": [20200102, 20200103], "close": [1, 2]})
    frame.with_columns(pl.col("date").cast(pl.Int64).cast(dtype)).write_parquet(
        tmp_path / "A.parquet"
    )
    bars = read(ParquetSource(tmp_path / "A.parquet", freq="1d"))
    assert bars["time"].to_list() == [datetime(2020, 1, 2), datetime(2020, 1, 3)]


def test_whole_number_a_share_codes_get_their_zeros_back(tmp_path: Path) -> None:
    frame = pl.DataFrame({"date": [date(2020, 1, 2)] * 2, "code": [1, 600000], "close": [1.0, 2.0]})
    frame.write_parquet(tmp_path / "a.parquet")
    source = ParquetSource(tmp_path / "a.parquet", freq="1d")
    assert source.info().calendar == "XSHG"
    assert read(source)["symbol"].to_list() == ["000001", "600000"]


@settings(max_examples=40)
@given(
    moment=st.datetimes(datetime(1950, 1, 1), datetime(2030, 1, 1)),
    offset=st.integers(-12 * 4, 14 * 4).map(lambda q: timedelta(minutes=15 * q)),
)
def test_any_moment_with_an_offset_is_converted_as_the_standard_library_does(
    moment: datetime, offset: timedelta
) -> None:
    aware = moment.replace(tzinfo=timezone(offset))
    expected = aware.astimezone(ZoneInfo("America/New_York")).replace(tzinfo=None)
    with tempfile.TemporaryDirectory() as directory:
        found = times_of(Path(directory), [aware.isoformat(" ")], "1min", calendar="XNYS")
    assert found == [expected]


def test_time_column_of_clock_type_beside_a_date_is_joined(tmp_path: Path) -> None:
    frame = pl.DataFrame({"date": [date(2020, 1, 2)], "time": [clock(9, 35)], "close": [1.0]})
    frame.write_parquet(tmp_path / "600000.SH.parquet")
    source = ParquetSource(tmp_path / "600000.SH.parquet", freq="5min")
    assert read(source)["time"].to_list() == [datetime(2020, 1, 2, 9, 35)]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "gb18030", "utf-16"])
def test_blocks_of_any_size_hold_the_same_rows(tmp_path: Path, newline: str, encoding: str) -> None:
    lines = [
        "日期,备注,close",
        '2020-01-02,"two\nlines",1',
        "2020-01-03,甲,2",
        "2020-01-06,x",
        "",
        "2020-01-07,乙,4",
    ]
    path = tmp_path / "b.csv"
    path.write_bytes(newline.join(lines).encode(encoding))
    facts = _tables.inspect(path)
    whole = list(_tables.pieces(facts, facts.columns))
    assert [p.row for block in whole for p in block.problems] == [4]
    frame = pl.concat([block.frame for block in whole])
    assert frame["close"].to_list() == ["1", "2", "4"]
    assert frame[_tables.ROW].to_list() == [2, 3, 6]
    for size in (1, 7, 40):
        blocks = list(_tables.pieces(facts, facts.columns, size))
        assert pl.concat([block.frame for block in blocks]).equals(frame)
        assert [p for block in blocks for p in block.problems] == whole[0].problems
