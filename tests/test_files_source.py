"""CSV and Parquet sources: layouts, encodings, calendars, and every way to be unreadable."""

from __future__ import annotations

import runpy
import tempfile
from datetime import date, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from bar_files import ENGLISH, csv_of, read, refusal, write
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.data.bars import SCHEMA
from echelon.data.calendars import sessions
from echelon.data.checking import find_oddities
from echelon.data.sources import Source, _tables
from echelon.data.sources.files import CsvSource, ParquetSource
from echelon.data.validate import validate
from echelon.errors import DataError, InvalidDataError, SourceError
from echelon.types import Freq

TemplateSource = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "source.py"))[
    "TemplateSource"
]


def test_sources_fulfil_the_protocol(tmp_path: Path) -> None:
    assert isinstance(csv_of(tmp_path, ENGLISH), Source)
    assert isinstance(ParquetSource(tmp_path / "x.parquet", freq="1d"), Source)
    assert isinstance(TemplateSource(tmp_path / "x"), Source)


def test_long_csv_gives_canonical_bars_with_line_numbers(tmp_path: Path) -> None:
    source = csv_of(tmp_path, ENGLISH)
    (raw,) = source.frames()
    assert raw.origin == str(tmp_path / "bars.csv")
    assert raw.frame.schema == pl.Schema({**SCHEMA, "row": pl.Int64()})
    assert raw.frame["row"].to_list() == [2, 3, 4]
    assert raw.frame.select("time", "symbol", "high", "volume").row(1) == (
        datetime(2020, 1, 2),
        "BBB",
        20.5,
        2000.0,
    )
    info = source.info()
    assert info.fields == {"open", "high", "low", "close", "volume"}
    assert (info.calendar, info.timezone, info.price_basis) == (
        "XNYS",
        "America/New_York",
        "adjusted",
    )
    assert source.problems() == []
    assert source.rejected_rows().is_empty()


CHINESE = """日期,股票代码,名称,开盘,收盘,最高,最低,成交量（手）,成交额(千元),前收盘,复权因子,是否ST
2020/1/2,000001.SZ,平安银行,16.65,16.87,16.95,16.55,1530231,2571196.48,16.45,109.169,否
2020/1/3,000001.SZ,平安银行,16.94,17.18,17.31,16.92,1116194,1914495.47,16.87,109.169,是
"""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gbk", "gb18030", "utf-16"])
@pytest.mark.parametrize("name", ["bars.csv", "bars.csv.gz", "bars.txt"])
def test_chinese_headers_units_and_encodings_are_understood(
    tmp_path: Path, encoding: str, name: str
) -> None:
    source = CsvSource(write(tmp_path / name, CHINESE, encoding), freq="1d")
    assert read(source).drop("row").row(0) == (
        datetime(2020, 1, 2),
        "000001.SZ",
        16.65,
        16.95,
        16.55,
        16.87,
        153023100.0,
        pytest.approx(2571196480.0),
        109.169,
        16.45,
        False,
    )
    assert read(source)["st"].to_list() == [False, True]
    assert (source.info().calendar, source.info().price_basis) == ("XSHG", "raw")


def test_gbk_after_a_long_ascii_beginning_is_detected(tmp_path: Path) -> None:
    rows = [f"{date(1990, 1, 1) + timedelta(days=k)},AAA,{k + 1}," for k in range(70_000)]
    text = "date,symbol,close,name\n" + "\n".join(rows) + "\n2190-01-01,BBB,1,平安\n"
    source = CsvSource(write(tmp_path / "long.csv", text, "gbk"), freq="1d")
    assert read(source)["symbol"].unique().sort().to_list() == ["AAA", "BBB"]


@pytest.mark.parametrize(("name", "delimiter"), [("a.tsv", "\t"), ("a.txt", "|"), ("a.csv", ";")])
def test_other_delimiters_are_recognised(tmp_path: Path, name: str, delimiter: str) -> None:
    source = CsvSource(write(tmp_path / name, ENGLISH.replace(",", delimiter)), freq="1d")
    assert read(source)["close"].to_list() == [10.2, 20.2, 10.4]


def test_lines_with_too_few_or_too_many_cells_are_named_and_numbering_goes_on(
    tmp_path: Path,
) -> None:
    text = "date,symbol,close\n2020-01-02,A,1\n\n2020-01-03,A\n2020-01-06,A,1,234\n2020-01-07,A,5\n"
    source = csv_of(tmp_path, text)
    assert read(source)["row"].to_list() == [2, 6]
    assert [(p.row, p.message) for p in source.problems()] == [
        (4, "the line has 2 cells, the header 3"),
        (5, "the line has 4 cells, the header 3"),
    ]
    assert source.rejected_rows()["cells"].to_list() == ["2020-01-03,A", "2020-01-06,A,1,234"]


def test_line_numbers_are_right_in_every_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tables, "_BLOCK_BYTES", 1 << 12)
    lines = ["date,symbol,close"] + [
        "short" if k % 97 == 5 else "" if k % 89 == 3 else f"2020-01-02,S,{k + 2}"
        for k in range(3000)
    ]
    source = csv_of(tmp_path, "\n".join(lines) + "\n")
    frames = [raw.frame for raw in source.frames()]
    assert len(frames) > 5
    bars = pl.concat(frames)
    assert (bars["close"] == bars["row"]).all()
    assert all(p.row is not None and (p.row - 2) % 97 == 5 for p in source.problems())
    assert len(source.problems()) == sum(k % 97 == 5 for k in range(3000))


def test_directory_of_one_file_per_symbol_names_symbols_by_file(tmp_path: Path) -> None:
    write(tmp_path / "d" / "000001.SZ.csv", "日期,收盘\n2020-01-02,16.87\n")
    write(tmp_path / "d" / "sub" / "600000.SH.csv.gz", "日期,收盘\n2020-01-02,12.47\n", "gbk")
    write(tmp_path / "d" / "README", "not data")
    source = CsvSource(tmp_path / "d", freq="1d")
    assert read(source).select("symbol", "close").rows() == [
        ("000001.SZ", 16.87),
        ("600000.SH", 12.47),
    ]
    assert source.info().calendar == "XSHG"
    pattern = CsvSource(tmp_path / "d" / "*.csv", freq="1d")
    assert read(pattern)["symbol"].to_list() == ["000001.SZ"]


def test_files_that_offer_different_fields_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "A.csv", "date,close,volume\n2020-01-02,1,5\n")
    write(tmp_path / "B.csv", "date,close\n2020-01-02,1\n")
    with pytest.raises(InvalidDataError, match=r"B\.csv, field 'volume': the file has no such col"):
        CsvSource(tmp_path, freq="1d").info()


def test_parquet_is_read_in_batches_with_rows_counted_from_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tables, "_BATCH_ROWS", 10)
    days = [date(2020, 1, 1) + timedelta(days=k) for k in range(25)]
    pl.DataFrame({"date": days, "close": [float(k + 1) for k in range(25)]}).write_parquet(
        tmp_path / "BTC.parquet"
    )
    source = ParquetSource(tmp_path / "BTC.parquet", freq="1d")
    frames = [raw.frame for raw in source.frames()]
    assert [f.height for f in frames] == [10, 10, 5]
    assert pl.concat(frames)["row"].to_list() == list(range(25))


def _crypto_hours(zone: str = "") -> str:
    start = datetime(2020, 1, 4)
    rows = [f"{start + timedelta(minutes=5 * k)}{zone},XYZ,1" for k in range(288)]
    return "time,symbol,close\n" + "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    ("symbols", "calendar"),
    [
        (["600000.SH", "000001.SZ"], "XSHG"),
        (["SH600000", "sz000001"], "XSHG"),
        (["600000", "000001"], "XSHG"),
        (["AAPL", "ETH", "SOL"], "XNYS"),
        (["BTC-PERP"], "24/7"),
        (["BTCUSDT", "ETHUSDT"], "24/7"),
        (["ETH/USD"], "24/7"),
    ],
)
def test_calendar_is_guessed_from_the_symbols(
    tmp_path: Path, symbols: list[str], calendar: str
) -> None:
    rows = "".join(f"2020-01-02,{s},1\n" for s in symbols)
    assert csv_of(tmp_path, "date,symbol,close\n" + rows).info().calendar == calendar


def test_calendar_of_bars_around_the_clock_is_every_day(tmp_path: Path) -> None:
    assert csv_of(tmp_path, _crypto_hours("Z"), "5min").info().calendar == "24/7"
    days = [date(2020, 1, 1) + timedelta(days=k) for k in range(20)]
    daily = "date,symbol,close\n" + "".join(f"{d},XYZ,1\n" for d in days)
    assert csv_of(tmp_path, daily).info().calendar == "24/7"


def test_options_override_what_would_be_guessed(tmp_path: Path) -> None:
    info = csv_of(
        tmp_path, ENGLISH, calendar="XLON", timezone="Europe/Paris", price_basis="raw"
    ).info()
    assert (info.calendar, info.timezone, info.price_basis) == ("XLON", "Europe/Paris", "raw")


def test_fingerprint_follows_content_and_options_only(tmp_path: Path) -> None:
    first = csv_of(tmp_path, ENGLISH).info().fingerprint
    assert CsvSource(tmp_path / "bars.csv", freq="1d").info().fingerprint == first
    assert csv_of(tmp_path, ENGLISH, price_basis="raw").info().fingerprint != first
    assert csv_of(tmp_path, ENGLISH, columns={"open": "ignore"}).info().fingerprint != first
    changed = csv_of(tmp_path, ENGLISH.replace("10.4", "10.5")).info().fingerprint
    assert changed != first
    moved = CsvSource(write(tmp_path / "elsewhere" / "bars.csv", ENGLISH), freq="1d")
    assert moved.info().fingerprint == first


def test_missing_file_is_named_with_a_remedy(tmp_path: Path) -> None:
    message = refusal(CsvSource(tmp_path / "nowhere.csv", freq="1d"))
    assert f"{tmp_path / 'nowhere.csv'}: does not exist. Check data.path" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        (" \n\n", "the file is empty"),
        ("date,close\n", "a header but no rows"),
        ("date,close", "a header but no rows"),
        ("\n2020-01-02,1\n", "the first line is blank"),
    ],
)
def test_empty_file_is_named_with_a_remedy(tmp_path: Path, text: str, said: str) -> None:
    message = refusal(csv_of(tmp_path, text))
    assert str(tmp_path / "bars.csv") in message
    assert said in message


def test_directory_without_files_is_named_with_a_remedy(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", "x")
    message = refusal(CsvSource(tmp_path, freq="1d"))
    assert f"{tmp_path}: no csv files there" in message
    assert "data.source" in message


def test_file_of_the_other_format_says_which_source_to_use(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pl.DataFrame({"date": [1], "close": [1]}).write_parquet(path)
    assert "Use data.source: parquet" in refusal(CsvSource(path, freq="1d"))
    text = write(tmp_path / "b.csv", ENGLISH)
    assert "Use data.source: csv" in refusal(ParquetSource(text, freq="1d"))


def parquet_bytes(tmp_path: Path, rows: int = 50_000) -> bytes:
    path = tmp_path / "whole.parquet"
    values = pl.Series(range(rows)).shuffle(seed=1).cast(pl.Float64) + 0.5
    pl.DataFrame(
        {"date": [20200102] * rows, "symbol": ["A"] * rows, "close": values}
    ).write_parquet(path)
    return path.read_bytes()


def test_a_parquet_file_of_one_row_a_group_is_read_in_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "bars.parquet"
    frame = pl.DataFrame(
        {
            "date": [date(2024, 1, 1 + k) for k in range(20)],
            "symbol": pl.Series([f"S{k}" for k in range(20)], dtype=pl.Categorical),
            "close": [10.0 + k for k in range(20)],
        }
    )
    frame.write_parquet(path, row_group_size=1)
    (piece,) = ParquetSource(path, freq="1d").frames()
    assert piece.frame["close"].to_list() == frame["close"].to_list()
    assert piece.frame["row"].to_list() == list(range(20))


def test_truncated_parquet_is_named_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "cut.parquet"
    path.write_bytes(parquet_bytes(tmp_path)[:-100])
    message = refusal(ParquetSource(path, freq="1d"))
    assert f"{path}: the Parquet file is truncated" in message
    assert "again" in message


def test_parquet_damaged_inside_is_named_with_a_remedy(tmp_path: Path) -> None:
    data = bytearray(parquet_bytes(tmp_path))
    data[1000 : len(data) - 2000] = bytes(len(data) - 3000)
    path = tmp_path / "hollow.parquet"
    path.write_bytes(data)
    message = refusal(ParquetSource(path, freq="1d", calendar="XNYS"))
    assert f"{path}: the Parquet file is damaged" in message


def test_parquet_with_a_damaged_footer_is_named_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "foot.parquet"
    path.write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    assert f"{path}: the Parquet file is damaged" in refusal(ParquetSource(path, freq="1d"))


def test_text_called_parquet_is_named_with_a_remedy(tmp_path: Path) -> None:
    path = write(tmp_path / "text.parquet", ENGLISH)
    message = refusal(ParquetSource(path, freq="1d"))
    assert f"{path}: not a Parquet file" in message
    assert "data.source: csv" in message


def test_parquet_without_rows_is_named_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "none.parquet"
    pl.DataFrame(schema={"date": pl.Date, "close": pl.Float64}).write_parquet(path)
    assert f"{path}: the Parquet file has no rows" in refusal(ParquetSource(path, freq="1d"))


def test_truncated_gzip_is_named_with_a_remedy(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv.gz", ENGLISH * 100)
    path.write_bytes(path.read_bytes()[:-20])
    message = refusal(CsvSource(path, freq="1d"))
    assert f"{path}: the gzip file is damaged or truncated" in message
    plain = tmp_path / "b.csv.gz"
    plain.write_text(ENGLISH)
    assert "damaged" in refusal(CsvSource(plain, freq="1d"))


def test_text_in_no_known_encoding_is_named_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"date,close\n2020-01-02,1\n\xff\xff\xff\n")
    assert f"{path}: the text is neither UTF-8 nor GBK" in refusal(CsvSource(path, freq="1d"))


def test_every_unusable_file_of_a_directory_is_named(tmp_path: Path) -> None:
    write(tmp_path / "A.csv", "")
    write(tmp_path / "B.csv", "date,close\n")
    write(tmp_path / "C.csv", "date,close\n2020-01-02,1\n")
    message = refusal(CsvSource(tmp_path, freq="1d"))
    assert "A.csv: the file is empty" in message
    assert "B.csv: the file has a header but no rows" in message
    assert "C.csv" not in message


def test_intraday_file_read_as_daily_says_which_option_to_set(tmp_path: Path) -> None:
    message = refusal(csv_of(tmp_path, _crypto_hours(), "1d"))
    assert "XYZ has 288 bars at different times on 2020-01-04" in message
    assert "Set data.freq: 1min or 5min" in message


def test_daily_file_read_as_intraday_says_which_option_to_set(tmp_path: Path) -> None:
    message = refusal(csv_of(tmp_path, ENGLISH, "5min"))
    assert "Set data.freq: 1d" in message


PRICE = st.integers(1, 10**7).map(lambda cents: cents / 100)


@st.composite
def bars(draw: st.DrawFn) -> pl.DataFrame:
    """Valid daily bars of a few symbols, any subset of sessions, in any order."""
    days = [t.item() for t in sessions("XNYS", date(2019, 12, 1), date(2020, 2, 1))]
    keys = st.tuples(st.sampled_from(days), st.sampled_from(["AAA", "B.B", "C-1", "平安"]))
    rows = []
    for time, symbol in draw(st.lists(keys, min_size=1, max_size=40, unique=True)):
        low, a, b, high = sorted(draw(st.tuples(PRICE, PRICE, PRICE, PRICE)))
        volume = draw(st.none() | st.integers(0, 10**12).map(float))
        factor = draw(st.floats(1e-6, 1e6))
        rows.append((time, symbol, a, high, low, b, volume, factor, draw(st.booleans())))
    names = ["time", "symbol", "open", "high", "low", "close", "volume", "factor", "st"]
    return pl.DataFrame(rows, schema={n: SCHEMA[n] for n in names}, orient="row")


@settings(max_examples=60)
@given(frame=bars(), encoding=st.sampled_from(["utf-8", "utf-8-sig", "gb18030"]), gz=st.booleans())
def test_valid_bars_survive_a_csv_file_unchanged(
    frame: pl.DataFrame, encoding: str, gz: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / ("bars.csv.gz" if gz else "bars.csv")
        write(path, frame.write_csv(), encoding)
        source = CsvSource(path, freq="1d", calendar="XNYS")
        (raw,) = source.frames()
        checked = validate(raw, source.info())
    assert [p for p in checked.problems if p.severity == "error"] == []
    assert checked.good.select(frame.columns).equals(frame)
    assert checked.good["row"].to_list() == list(range(2, 2 + frame.height))


@settings(max_examples=30)
@given(frame=bars())
def test_valid_bars_survive_a_parquet_file_unchanged(frame: pl.DataFrame) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "bars.parquet"
        frame.write_parquet(path)
        source = ParquetSource(path, freq="1d", calendar="XNYS")
        assert read(source).select(frame.columns).equals(frame)


TEMPLATE = """symbol ACME
2020-01-02  10.00  10.50   9.90  10.20  12000
2020-01-03  10.20  10.40  10.10  10.30   9000
"""


def test_template_source_works_and_its_bars_are_valid(tmp_path: Path) -> None:
    source = TemplateSource(write(tmp_path / "acme.txt", TEMPLATE))
    (raw,) = source.frames()
    checked = validate(raw, source.info())
    assert (checked.problems, source.problems()) == ([], [])
    assert checked.good.select("row", "time", "symbol", "close", "volume").rows() == [
        (2, datetime(2020, 1, 2), "ACME", 10.2, 12000.0),
        (3, datetime(2020, 1, 3), "ACME", 10.3, 9000.0),
    ]
    assert source.benchmark() is None


def test_template_source_lists_what_it_cannot_read(tmp_path: Path) -> None:
    text = TEMPLATE + "someday 1 1 1 1 1\n2020-01-06 1 1 1 x 1\n2020-01-07 1\n"
    source = TemplateSource(write(tmp_path / "acme.txt", text))
    (raw,) = source.frames()
    assert raw.frame.height == 2
    assert [(p.row, p.field) for p in source.problems()] == [(4, "time"), (5, "close"), (6, None)]
    with pytest.raises(SourceError, match=r"nowhere: does not exist\. Check data\.path"):
        TemplateSource(tmp_path / "nowhere").info()
    with pytest.raises(SourceError, match="first line must be 'symbol NAME'"):
        list(TemplateSource(write(tmp_path / "x", "ACME\n")).frames())


@pytest.mark.parametrize(
    ("name", "freq", "calendar", "basis", "rows"),
    [
        ("us_daily_2000_2018", "1d", "XNYS", "split_adjusted", 327_508),
        ("us_index_daily_1999_2018", "1d", "XNYS", "adjusted", 14_841),
        ("cn_daily_2010_2020", "1d", "XSHG", "raw", 157_630),
        ("cn_index_daily_2005_2020", "1d", "XSHG", "adjusted", 7_778),
        ("cn_5min_000338_2007_2018", "5min", "XSHG", "adjusted", 133_440),
        ("crypto_1min_btcperp_202201", "1min", "24/7", "adjusted", 45_031),
    ],
)
def test_real_files_are_valid_as_they_are(
    shared_data: Path, name: str, freq: Freq, calendar: str, basis: str, rows: int
) -> None:
    source = ParquetSource(shared_data / f"{name}.parquet", freq=freq)
    info = source.info()
    assert (info.calendar, info.price_basis) == (calendar, basis)
    checked = [validate(raw, info) for raw in source.frames()]
    assert [p for c in checked for p in c.problems] == []
    assert sum(c.good.height for c in checked) == rows
    assert source.problems() == []


def test_real_vendor_file_is_found_to_be_end_anchored(shared_data: Path) -> None:
    source = ParquetSource(shared_data / "us_daily_2000_2018.parquet", freq="1d")
    warnings = find_oddities([read(source)], source.info(), "csv")
    assert [w.field for w in warnings if "anchored at the end" in w.message] == ["factor"]
    assert all(w.severity == "warning" for w in warnings)


def test_errors_of_sources_are_data_errors() -> None:
    assert issubclass(SourceError, DataError)
    assert issubclass(InvalidDataError, DataError)
