"""Files from strangers: nonsense is refused by name, absurd shapes quickly, and nothing escapes."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from echelon.cli.app import app
from echelon.cli.console import add_row, err, fail, out, text_table
from echelon.config.data import ExogenousConfig
from echelon.data.exogenous import read_exogenous
from echelon.data.importing import QUARANTINE, ImportReport, import_source
from echelon.data.sources import _tables
from echelon.data.sources.files import (
    CsvSource,
    ParquetSource,
    read_benchmark,
    read_instruments,
    read_membership,
)
from echelon.data.sources.qlib import QlibSource
from echelon.data.sources.ticks import TicksSource
from echelon.data.store import Store
from echelon.errors import DataError, EchelonError, InvalidDataError, SourceError
from echelon.files import write_csv

HEADER = "date,symbol,open,high,low,close,volume,amount"
DAYS = [f"2020-01-{day:02}" for day in (2, 3, 6, 7, 8)]


def bars(**cells: str) -> str:
    """Five days of AAA; `cells` stand in the third, on line 4."""
    lines = [HEADER]
    for k, day in enumerate(DAYS):
        row = dict(
            zip(
                HEADER.split(","),
                [day, "AAA", *["10", "11", "9", "10", "100", "1000"]],
                strict=True,
            )
        )
        lines.append(",".join((row | (cells if k == 2 else {})).values()))
    return "\n".join(lines) + "\n"


def imported(
    tmp_path: Path, text: str | bytes, name: str = "b.csv", **options: bool
) -> ImportReport:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    source = CsvSource(path, freq="1d", calendar="XNYS")
    return import_source(source, Store(tmp_path / "store"), "d", **options)


# Numbers that no market has


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("close", "1e300"),
        ("open", "1e13"),
        ("low", "5e-324"),
        ("close", "inf"),
        ("close", "-0.0"),
        ("volume", "1e300"),
        ("volume", "inf"),
        ("volume", "1e-300"),
        ("amount", "1e300"),
    ],
)
def test_value_that_cannot_be_meant_is_refused_by_row_and_field(
    tmp_path: Path, field: str, value: str
) -> None:
    with pytest.raises(InvalidDataError) as caught:
        imported(tmp_path, bars(**{field: value}))
    [first, *_] = [p for p in caught.value.problems if p.field == field]
    assert (first.file, first.row) == (str(tmp_path / "b.csv"), 4)
    assert "--quarantine" in str(first)


@pytest.mark.parametrize("price", ["1e300", "1e13", "1e-300"])
def test_row_whose_prices_agree_and_cannot_be_meant_is_refused(tmp_path: Path, price: str) -> None:
    prices = ("open", "high", "low", "close")
    with pytest.raises(InvalidDataError) as caught:
        imported(tmp_path, bars(**dict.fromkeys(prices, price)))
    assert {problem.field for problem in caught.value.problems} == set(prices)
    assert all("cannot be meant" in str(problem) for problem in caught.value.problems)


def test_value_that_cannot_be_meant_is_set_aside_and_the_rest_stored(tmp_path: Path) -> None:
    report = imported(tmp_path, bars(volume="1e300"), quarantine=True)
    assert (report.manifest.rows, report.manifest.quarantined) == (4, 1)
    assert "volume 1e+300 cannot be meant" in (tmp_path / "store" / "d" / QUARANTINE).read_text()


def test_small_coins_and_adjusted_giants_are_taken(tmp_path: Path) -> None:
    coin = dict.fromkeys(("open", "high", "low", "close"), "0.0000000004")
    assert imported(tmp_path, bars(**coin, volume="3e15")).manifest.rows == 5
    giant = dict.fromkeys(("open", "high", "low", "close"), "123456789012")
    assert imported(tmp_path, bars(**giant, volume="0")).manifest.rows == 5


def test_volume_of_minus_zero_is_zero(tmp_path: Path) -> None:
    imported(tmp_path, bars(volume="-0.0"))
    volumes = Store(tmp_path / "store").read_bars("d", "2020")["volume"].to_numpy()
    assert not np.signbit(volumes).any()


def test_bounds_leave_no_overflow_in_single_precision() -> None:
    from echelon.data.bars import BOUNDS

    price, factor, volume = BOUNDS["close"], BOUNDS["factor"], BOUNDS["volume"]
    largest = np.float32([price.high * volume.high, price.high * factor.high / factor.low])
    smallest = np.float32([price.low * factor.low / factor.high])
    assert np.isfinite(largest).all()
    assert (smallest > np.finfo(np.float32).tiny).all()


def test_tick_that_cannot_be_meant_spoils_its_row_and_not_the_bar(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "code,date,time,price,volume\n600000.SH,20200102,93100000,10,100\n"
        "600000.SH,20200102,93101000,1e300,100\n600000.SH,20200102,93102000,11,1e300\n"
        "600000.SH,20200102,93103000,12,100\n"
    )
    source = TicksSource(path, freq="1d")
    [frame] = [raw.frame for raw in source.frames()]
    assert frame.select("high", "volume").row(0) == (12.0, 200.0)
    assert [(p.row, p.field) for p in source.problems()] == [(3, "price"), (4, "volume")]


def test_benchmark_of_a_source_is_judged_as_closes_are(tmp_path: Path) -> None:
    directory = qlib(tmp_path, close=[10.0, 11.0, 12.0])
    member = directory / "features" / "idx"
    member.mkdir()
    np.array([0, 1, np.inf, 3], "<f4").tofile(member / "close.day.bin")
    source = QlibSource(directory, freq="1d", calendar="data", benchmark="IDX")
    with pytest.raises(InvalidDataError, match=r"benchmark, row 1, field 'close'"):
        import_source(source, Store(tmp_path / "store"), "d")


# Symbols


@pytest.mark.parametrize(
    "symbol", ["A\x1b[31mB", "A\u202eB", "A\u200bB", "\u2066AAA", "A\x07", "A\ufe0f", "A" * 65]
)
def test_symbol_that_is_not_what_it_looks_like_is_refused(tmp_path: Path, symbol: str) -> None:
    with pytest.raises(InvalidDataError) as caught:
        imported(tmp_path, bars(symbol=symbol))
    [problem] = caught.value.problems
    assert (problem.row, problem.field) == (4, "symbol")
    assert str(caught.value).replace("\n", "").isprintable()
    path = tmp_path / "m.csv"
    path.write_text(f"symbol,start,end\n{symbol},2020-01-02,\n")
    with pytest.raises(InvalidDataError, match="row 2, field 'symbol'"):
        read_membership(path)


@pytest.mark.parametrize("symbol", ["^GSPC", "BRK-B", "600000.SH", "平安银行", "BTC/USDT", "@ES"])
def test_symbols_of_every_market_are_taken(tmp_path: Path, symbol: str) -> None:
    imported(tmp_path, bars(symbol=symbol))
    assert symbol in set(Store(tmp_path / "store").symbols("d")["symbol"])


def test_tables_and_errors_print_nothing_that_a_terminal_obeys() -> None:
    odd = "A\x1b[31m\u202eB\u200b"
    table = text_table(odd, odd)
    add_row(table, odd)
    with out.capture() as printed:
        out.print(table, width=60)
    assert not set(odd) & {"\x1b", "\u202e", "\u200b"} & set(printed.get())
    with err.capture() as failed:
        fail("error:", EchelonError(f"{odd}\nsecond line {'x' * 100_000}"))
    assert not {"\x1b", "\u202e", "\u200b"} & set(failed.get())
    assert len(failed.get()) < 30_000
    assert len(failed.get().splitlines()) == 2


def test_data_show_prints_names_of_instruments_safely(tmp_path: Path) -> None:
    facts = tmp_path / "i.csv"
    facts.write_text("symbol,name\nAAA,Acme\x1b]0;owned\x07\u202e\n")
    (tmp_path / "b.csv").write_text(bars())
    runner, store = CliRunner(), str(tmp_path / "store")
    options = ["--dataset", "d", "--store", store, "-o", f"data.instruments={facts}"]
    done = runner.invoke(app, ["data", "import", "csv", str(tmp_path / "b.csv"), *options])
    assert done.exit_code == 0, done.output
    shown = runner.invoke(app, ["data", "show", "d", "--symbols", "--store", store])
    assert "Acme" in shown.output
    assert not {"\x1b", "\x07", "\u202e"} & set(shown.output)


# Spreadsheets


def test_no_csv_of_ours_holds_a_formula(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {
            "symbol": ['=HYPERLINK("x")', "+1+1", "-2+3|cmd", "@SUM(A1)", "\t=1", "a;=1", "x\n=1"],
            "kept": ["-1.5", "BRK-B", "^GSPC", "1e-3", "", "a=b", "600000.SH"],
            "number": [-1.0] * 7,
        }
    ).with_columns(kind=pl.col("symbol").cast(pl.Categorical))
    write_csv(tmp_path / "t.csv", frame)
    again = pl.read_csv(tmp_path / "t.csv", infer_schema=False)
    for text in (*again["symbol"], *again["kind"]):
        assert "'" in text
        assert not text.lstrip().startswith(("=", "+", "-", "@"))
    assert again["kept"].fill_null("").to_list() == frame["kept"].to_list()
    assert set(again["number"]) == {"-1.0"}


def test_quarantine_and_blotter_hold_no_formula(tmp_path: Path) -> None:
    from echelon.backtest import files as backtest_files
    from echelon.evaluation import batch

    imported(tmp_path, bars(symbol="=HYPERLINK(1)", close="1e300"), quarantine=True)
    text = (tmp_path / "store" / "d" / QUARANTINE).read_text()
    assert "'=HYPERLINK" in text
    assert ",=HYPERLINK" not in text
    for module in (backtest_files, batch):  # the other tables that people open
        source = Path(str(module.__file__)).read_text()
        assert "write_csv(" in source
        assert ".write_csv(" not in source


def test_blotter_on_disk_holds_no_formula(tmp_path: Path) -> None:
    from echelon.backtest.files import Book, Tables, save_tables

    days = pl.Series("time", [datetime(2020, 1, 2)])
    symbol = "=HYPERLINK(1)"
    plain = pl.DataFrame({"time": days, symbol: [0.5]})
    blotter = pl.DataFrame({"time": days, "symbol": [symbol], "shares": [-1.0]})
    save_tables(tmp_path, {Book("agent", 1): Tables(plain, plain, plain, blotter)}, csv=True)
    for name in ("blotter.csv", "equity.csv"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert f"'{symbol}" in text
        assert f",{symbol}" not in text
    assert ",-1.0" in (tmp_path / "blotter.csv").read_text(encoding="utf-8")
    kept = pl.read_parquet(tmp_path / "blotter.parquet")["symbol"].to_list()
    assert kept == [symbol]  # what we read again is what was traded


# Types of columns


ODD = {
    "list": pa.array([[1.0]] * 5),
    "struct": pa.array([{"a": 1.0}] * 5),
    "binary": pa.array([b"10"] * 5),
    "map": pa.array([[("a", 1)]] * 5, pa.map_(pa.string(), pa.int64())),
    "duration": pa.array([1] * 5, pa.duration("us")),
    "boolean": pa.array([True] * 5),
    "date": pa.array([date(2020, 1, 2)] * 5),
    "time of day": pa.array([1000] * 5, pa.time64("us")),
    "nested": pa.array([[{"a": [1]}]] * 5),
}


def table(**columns: pa.Array) -> pa.Table:
    plain = {
        "date": pa.array([datetime.fromisoformat(d).date() for d in DAYS]),
        "symbol": pa.array(["AAA"] * 5),
        "close": pa.array([10.0] * 5),
        "volume": pa.array([100.0] * 5),
    }
    return pa.table(plain | columns)


def parquet(tmp_path: Path, **columns: pa.Array) -> ParquetSource:
    pq.write_table(table(**columns), tmp_path / "b.parquet")
    return ParquetSource(tmp_path / "b.parquet", freq="1d", calendar="XNYS")


@pytest.mark.parametrize("column", ["close", "volume", "date", "symbol"])
@pytest.mark.parametrize("kind", ODD)
def test_parquet_column_of_an_odd_type_is_refused_by_name(
    tmp_path: Path, kind: str, column: str
) -> None:
    if (kind, column) in (("date", "date"), ("boolean", "symbol"), ("date", "symbol")):
        pytest.skip("a date that is one, or text")
    if (kind, column) == ("time of day", "symbol"):
        pytest.skip("text")
    source = parquet(tmp_path, **{column: ODD[kind]})
    with pytest.raises(DataError) as caught:
        import_source(source, Store(tmp_path / "store"), "d")
    assert "b.parquet" in str(caught.value)
    assert column in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["10.5"] * 5).dictionary_encode(),
        pa.array([10.5] * 5).dictionary_encode(),
        pa.array(np.full(5, 10.5, np.float16)),
        pa.array([10.5] * 5, pa.float32()),
        pa.array([105] * 5).cast(pa.decimal128(20, 0)),
        pa.array([105] * 5).cast(pa.decimal256(60, 0)),
        pa.array(["10.5"] * 5, pa.large_string()),
    ],
    ids=str,
)
def test_number_is_read_from_whatever_holds_it(tmp_path: Path, values: pa.Array) -> None:
    source = parquet(tmp_path, close=values)
    [raw] = source.frames()
    assert raw.frame["close"].to_list() in ([10.5] * 5, [105.0] * 5)


def test_whole_float_symbols_are_codes(tmp_path: Path) -> None:
    [raw] = parquet(tmp_path, symbol=pa.array([600000.0] * 5)).frames()
    assert set(raw.frame["symbol"]) == {"600000"}


@pytest.mark.parametrize("kind", ODD)
def test_odd_types_beside_the_bars_are_clear_errors(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "side.parquet"
    days = pa.array([date(2020, 1, k) for k in range(2, 7)])
    names = pa.array([f"S{k}" for k in range(5)])
    files = (
        (read_membership, {"symbol": names, "start": ODD[kind]}),
        (read_instruments, {"symbol": names, "listed": ODD[kind]}),
        (read_benchmark, {"date": days, "close": ODD[kind]}),
        (
            lambda p: read_exogenous(ExogenousConfig(path=p), "UTC"),
            {"series": names, "period": ODD[kind], "published": days, "value": names},
        ),
    )
    for read, columns in files:
        pq.write_table(pa.table(columns), path)
        if kind == "date" and read in (read_membership, read_instruments):
            continue
        with pytest.raises(DataError, match=r"side\.parquet"):
            read(path)


# Text that is no text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (bars().encode("utf-16")[:-1], "marked as UTF-16 but is cut short"),
        (bars().encode("utf-16-le"), "NUL"),
        (bars().encode("utf-32"), "UTF-32"),
        (b"\x00" * 100, "NUL"),
        (b"\xff\xfe", "UTF-16|blank|empty"),
        (gzip.compress(bars().encode(), mtime=0)[:-9], "gzip file is damaged"),
        (b"\x1f\x8b" + bytes(range(7, 57)), "gzip file is damaged"),
        (b"", "empty"),
        (b"\n\n\n", "empty|blank"),
    ],
    ids=range(9),
)
def test_text_that_cannot_be_read_is_refused_with_a_remedy(
    tmp_path: Path, data: bytes, said: str
) -> None:
    with pytest.raises(SourceError, match=said) as caught:
        imported(tmp_path, data)
    assert str(tmp_path / "b.csv") in str(caught.value)


def test_gzip_without_its_ending_is_read(tmp_path: Path) -> None:
    assert imported(tmp_path, gzip.compress(bars().encode())).manifest.rows == 5


@pytest.mark.parametrize("path", ["a\x00b.csv", "x**y/*.csv", "/nowhere/[/*.csv"])
def test_path_that_is_none_is_refused(path: str) -> None:
    for kind in (CsvSource, TicksSource):
        with pytest.raises(SourceError):
            kind(Path(path), freq="1d").info()


# Absurd shapes


@pytest.fixture
def quickly() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 10


@pytest.mark.usefixtures("quickly")
def test_header_of_a_million_columns_is_refused_quickly(tmp_path: Path) -> None:
    path = tmp_path / "wide.csv"
    path.write_text(",".join(f"c{k}" for k in range(1_000_000)) + "\n1,2\n")
    for kind in (CsvSource, TicksSource):
        with pytest.raises(SourceError, match=r"wide\.csv: .*(columns|header)"):
            kind(path, freq="1d").info()
    path.write_text("date,close," + ",".join("x" * 50_000) + "\n1,2\n")
    with pytest.raises(SourceError, match="50,002 columns"):
        CsvSource(path, freq="1d").info()


@pytest.mark.usefixtures("quickly")
def test_wide_header_within_the_limit_costs_no_square(tmp_path: Path) -> None:
    path = tmp_path / "wide.csv"
    path.write_text("date,close," + ",".join(f"c{k}" for k in range(9_000)) + "\n2020-01-02,2\n")
    assert CsvSource(path, freq="1d", calendar="XNYS").info().fields == {"close"}


@pytest.mark.usefixtures("quickly")
def test_file_of_one_endless_line_is_refused_quickly(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    with path.open("wb") as handle:
        handle.write(b"a,b" * 1000)
        handle.truncate(20 << 30)  # a hole: it takes no space
    for kind in (CsvSource, TicksSource):
        with pytest.raises(SourceError, match=r"long\.csv"):
            kind(path, freq="1d").info()


@pytest.mark.usefixtures("quickly")
def test_endless_line_in_the_body_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"b\.csv"):
        imported(tmp_path, bars() + "x" * (9 << 20))
    path = tmp_path / "t.csv"
    row = "600000.SH,20200102,93100000,10,100\n"
    path.write_text(f"code,date,time,price,volume\n{row * 200_000}{'x' * (3 << 20)}")
    with pytest.raises(SourceError, match=r"t\.csv: a line of more than"):
        list(TicksSource(path, freq="1d").frames())


@pytest.mark.usefixtures("quickly")
def test_gzip_bomb_is_refused_before_it_unfolds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tables, "_UNZIPPED_FREE", 1 << 20)
    with pytest.raises(SourceError, match="200 times its size"):
        imported(tmp_path, gzip.compress(bars().encode() + b"\n" * (8 << 20)), "b.csv.gz")
    path = tmp_path / "t.csv.gz"
    path.write_bytes(
        gzip.compress(b"code,date,time,price\nA,20200102,93000000,1\n" + b"\n" * (8 << 20))
    )
    with pytest.raises(SourceError, match="200 times its size"):
        list(TicksSource(path, freq="1d").frames())


def test_directory_of_too_many_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tables, "MAX_FILES", 20)
    for k in range(30):
        (tmp_path / f"{k}.csv").write_text(bars())
    for kind in (CsvSource, TicksSource):
        with pytest.raises(SourceError, match="more than 20 files"):
            kind(tmp_path, freq="1d").info()


def test_problem_quotes_a_huge_cell_in_short(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataError) as caught:
        imported(tmp_path, bars(close="9x" * 100_000))
    assert len(str(caught.value)) < 5_000


# Qlib


def qlib(tmp_path: Path, **fields: list[float]) -> Path:
    home = tmp_path / "qlib"
    for name in ("calendars", "instruments", "features/aaa"):
        (home / name).mkdir(parents=True)
    (home / "calendars" / "day.txt").write_text("2020-01-02\n2020-01-03\n2020-01-06\n")
    (home / "instruments" / "all.txt").write_text("AAA\t2020-01-02\t2020-01-06\n")
    for name, values in fields.items():
        np.array([0.0, *values], "<f4").tofile(home / "features" / "aaa" / f"{name}.day.bin")
    return home


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        np.array([np.nan, 1, 2], "<f4").tobytes(),
        np.array([np.inf, 1, 2], "<f4").tobytes(),
        np.array([-1, 1, 2], "<f4").tobytes(),
        np.array([0.5, 1, 2], "<f4").tobytes(),
        np.array([1e30, 1, 2], "<f4").tobytes(),
        np.zeros(1000, "<f4").tobytes(),
    ],
)
def test_qlib_file_that_does_not_fit_is_a_problem_with_its_name(
    tmp_path: Path, data: bytes
) -> None:
    home = qlib(tmp_path)
    (home / "features" / "aaa" / "close.day.bin").write_bytes(data)
    source = QlibSource(home, freq="1d", calendar="data")
    with pytest.raises(InvalidDataError, match=r"close\.day\.bin"):
        import_source(source, Store(tmp_path / "store"), "d")


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("calendars/day.txt", b"\xff\xfe2020"),
        ("calendars/day.txt", b"2020-01-02T00:00:00+08:00\n"),
        ("calendars/day.txt", b"\x00\n"),
        ("instruments/all.txt", b"\x81\x82\n"),
        ("instruments/all.txt", b"../../etc\t2020-01-02\t2020-01-03\n"),
        ("instruments/all.txt", b"A\x00B\t2020-01-02\t2020-01-03\n"),
        ("instruments/all.txt", b"A\t2020-01-02\n"),
    ],
)
def test_qlib_text_that_means_nothing_is_refused(tmp_path: Path, file: str, data: bytes) -> None:
    home = qlib(tmp_path, close=[1.0, 2.0, 3.0])
    (home / file).write_bytes(data)
    source = QlibSource(home, freq="1d", calendar="data")
    with pytest.raises(SourceError, match=Path(file).name):
        import_source(source, Store(tmp_path / "store"), "d")


def test_qlib_market_does_not_lead_out_of_its_directory(tmp_path: Path) -> None:
    home = qlib(tmp_path, close=[1.0, 2.0, 3.0])
    (tmp_path / "secret.txt").write_text("AAA\t2020-01-02\t2020-01-06\n")
    with pytest.raises(SourceError, match="no such market"):
        QlibSource(home, freq="1d", calendar="data", market="../../secret").info()
