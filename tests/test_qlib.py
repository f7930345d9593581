"""A Qlib directory: agreement with pyqlib's own answers, and every kind of damage."""

from __future__ import annotations

import json
import shutil
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from echelon.data.bars import SCHEMA
from echelon.data.build import build_panel
from echelon.data.importing import import_source
from echelon.data.sources import Source
from echelon.data.sources.qlib import QlibSource, read_bin, shortest_decimal
from echelon.data.store import Store
from echelon.errors import SourceError
from echelon.types import Freq

FIXTURE = Path(__file__).parent / "fixtures" / "qlib"
BIN = FIXTURE / "bin"
INDEX = "SH000300"
FREQS: list[tuple[Freq, str]] = [("1d", "day"), ("1min", "1min")]


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """What pyqlib read, stored by scripts/qlib_reference.py."""
    return dict(json.loads((FIXTURE / "reference.json").read_text(encoding="utf-8")))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BIN, tmp_path / "bin"))


def bars_of(source: QlibSource) -> dict[str, pl.DataFrame]:
    return {piece.frame["symbol"][0]: piece.frame for piece in source.frames()}


def float32(values: list[float | None]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array([np.nan if v is None else v for v in values], dtype=np.float32)


def times_of(stamps: list[str]) -> list[datetime]:
    return [datetime.fromisoformat(s) for s in stamps]


def test_fixture_comes_from_the_pinned_pyqlib(reference: dict[str, Any]) -> None:
    provenance = reference["provenance"]
    assert provenance["pyqlib"] == "0.9.7"
    assert provenance["script"] == "scripts/qlib_reference.py"
    script = FIXTURE.parents[2] / provenance["script"]
    assert f'PYQLIB = "{provenance["pyqlib"]}"' in script.read_text(encoding="utf-8")
    assert sum(f.stat().st_size for f in FIXTURE.rglob("*") if f.is_file()) < 200 * 1024


@pytest.mark.parametrize(("freq", "name"), FREQS)
def test_stored_features_equal_pyqlib_to_the_last_bit(
    reference: dict[str, Any], freq: Freq, name: str
) -> None:
    lines = (BIN / "calendars" / f"{name}.txt").read_text().split("\n")
    stamps = [datetime.fromisoformat(line) for line in lines if line]
    compared = 0
    for symbol, expected in reference[name]["features"].items():
        for field in ("open", "high", "low", "close", "volume", "vwap", "factor"):
            folder = symbol.lower() if symbol != "CON" else "_qlib_con"
            path = BIN / "features" / folder / f"{field}.{name}.bin"
            start, values = read_bin(path, len(stamps))
            assert values.dtype == np.float32
            assert stamps[start : start + len(values)] == times_of(expected["time"])
            np.testing.assert_array_equal(values, float32(expected[field]))
            compared += len(values)
    assert compared > 2_000


@pytest.mark.parametrize(("freq", "name"), FREQS)
def test_bars_times_factor_are_pyqlibs_adjusted_prices(
    reference: dict[str, Any], freq: Freq, name: str
) -> None:
    bars = bars_of(QlibSource(BIN, freq=freq, calendar="XSHG"))
    shift = timedelta(minutes=1) if freq == "1min" else timedelta()
    for symbol, expected in reference[name]["features"].items():
        close = float32(expected["close"])
        traded = ~np.isnan(close)
        frame = bars[symbol]
        stamps = np.array(times_of(expected["time"]), dtype="datetime64[us]")[traded]
        assert frame["time"].to_list() == [t + shift for t in stamps.astype(datetime)]
        factor = frame["factor"].to_numpy()
        np.testing.assert_array_equal(
            factor.astype(np.float32), float32(expected["factor"])[traded]
        )
        for field in ("open", "high", "low", "close"):
            adjusted = frame[field].to_numpy() * factor
            np.testing.assert_allclose(adjusted, float32(expected[field])[traded], rtol=1.3e-7)
        volume = frame["volume"].to_numpy() / factor
        np.testing.assert_allclose(volume, float32(expected["volume"])[traded], rtol=1.3e-7)


@pytest.mark.parametrize(("freq", "name"), FREQS)
def test_traded_prices_and_volumes_come_back_exactly(
    reference: dict[str, Any], freq: Freq, name: str
) -> None:
    bars = bars_of(QlibSource(BIN, freq=freq, calendar="XSHG"))
    highest = 0.0
    for symbol, expected in reference["traded"][name].items():
        closes = [c for c in expected["close"] if c is not None]
        assert bars[symbol]["close"].to_list() == closes
        highest = max(highest, *closes)
        volumes = np.array([v for v in expected["volume"] if v is not None])
        # Seven digits are all that float32 keeps of 199,234,500 shares.
        np.testing.assert_allclose(bars[symbol]["volume"].to_numpy(), volumes, rtol=1.3e-7)
    assert highest > 1_000 or freq == "1min"


@pytest.mark.parametrize(("freq", "name"), FREQS)
def test_calendar_equals_pyqlib(reference: dict[str, Any], freq: Freq, name: str) -> None:
    source = QlibSource(BIN, freq=freq, calendar="XSHG")
    stamps = times_of(reference[name]["calendar"])
    shift = timedelta(minutes=1) if freq == "1min" else timedelta()
    assert source.times().astype(datetime).tolist() == [t + shift for t in stamps]


def test_membership_is_pyqlibs_instruments_of_each_day(reference: dict[str, Any]) -> None:
    source = QlibSource(BIN, freq="1d", market="csi3")
    members = source.membership()
    assert members is not None
    days = [t.date() for t in source.times().astype(datetime)]
    for symbol, expected in reference["member_days"].items():
        spans = members.filter(symbol=symbol).select("start", "end").rows()
        inside = [d for d in days if any(a <= d and (b is None or d < b) for a, b in spans)]
        assert [d.isoformat() for d in inside] == expected
    assert set(members["symbol"]) == set(reference["instruments"]["csi3"])
    assert set(bars_of(source)) == set(reference["instruments"]["csi3"])


def test_members_keep_their_bars_outside_their_membership() -> None:
    whole = bars_of(QlibSource(BIN, freq="1d"))
    market = bars_of(QlibSource(BIN, freq="1d", market="CSI3"))
    for symbol, frame in market.items():
        assert frame.equals(whole[symbol])


def test_instruments_say_when_symbols_list_and_guess_no_delisting(
    reference: dict[str, Any],
) -> None:
    table = QlibSource(BIN, freq="1d").instruments()
    assert table is not None
    found = dict(table.select("symbol", "listed").iter_rows())
    assert found["SZ000002"] == date(2020, 3, 2)
    assert found["SH688001"] == date(2020, 3, 30)
    assert "delisted" not in table.columns
    assert found.keys() == reference["instruments"]["all"].keys()


def test_market_all_has_no_membership(copy: Path) -> None:
    assert QlibSource(BIN, freq="1d").membership() is None
    assert QlibSource(BIN, freq="1d", market="ALL").membership() is None


def test_directory_without_all_txt_has_no_listing_facts(copy: Path) -> None:
    (copy / "instruments" / "all.txt").unlink()
    source = QlibSource(copy, freq="1d", market="csi3")
    assert source.instruments() is None
    assert source.membership() is not None


def test_symbol_suspended_at_the_end_of_the_dump_is_not_delisted(
    copy: Path, tmp_path: Path
) -> None:
    lines = (copy / "instruments" / "all.txt").read_text(encoding="utf-8").splitlines()
    cut = ["\t".join([*line.split("\t")[:2], "2020-04-20"]) for line in lines]
    (copy / "instruments" / "all.txt").write_text("\n".join(cut) + "\n", encoding="utf-8")
    store = Store(tmp_path / "store")
    import_source(QlibSource(copy, freq="1d"), store, "q")
    assert store.symbols("q")["delisted"].null_count() == store.symbols("q").height
    assert store.table("q", "membership") is None
    panel = build_panel(store, "q")
    assert not panel.delisted.any()
    assert panel.member[-1].all()


def test_given_time_zone_is_that_of_the_calendar_file() -> None:
    source = QlibSource(BIN, freq="1d", calendar="data", timezone="Asia/Shanghai")
    assert source.info().timezone == "Asia/Shanghai"
    assert QlibSource(BIN, freq="1d", calendar="data").info().timezone == "UTC"
    other = QlibSource(BIN, freq="1d", calendar="data").info().fingerprint
    assert source.info().fingerprint != other


def test_suspended_days_give_no_row_and_late_listing_starts_late() -> None:
    bars = bars_of(QlibSource(BIN, freq="1d"))
    assert bars["SZ000001"].height == 56
    assert date(2020, 3, 16) not in bars["SZ000001"]["time"].dt.date().to_list()
    assert bars["SH688001"]["time"].min() == datetime(2020, 3, 30)
    assert bars["CON"].height == 55


def test_frames_are_canonical_and_rows_point_into_the_file() -> None:
    source = QlibSource(BIN, freq="1d")
    assert isinstance(source, Source)
    for piece in source.frames():
        assert dict(piece.frame.schema) == {**SCHEMA, "row": pl.Int64()}
        stored = np.fromfile(piece.origin, dtype="<f4")
        adjusted = stored[piece.frame["row"].to_numpy()]
        expected = (piece.frame["close"] * piece.frame["factor"]).to_numpy()
        np.testing.assert_allclose(adjusted, expected, rtol=1.3e-7)
    assert source.problems() == []


def test_amount_is_volume_weighted_price_times_volume() -> None:
    frame = bars_of(QlibSource(BIN, freq="1d"))["SH600000"]
    middle = (frame["low"] + frame["high"]) / 2
    np.testing.assert_allclose(frame["amount"], middle * frame["volume"], rtol=1e-6)


def test_info_describes_raw_prices_with_factor() -> None:
    info = QlibSource(BIN, freq="1d").info()
    assert (info.price_basis, info.calendar, info.timezone) == ("raw", "XSHG", "Asia/Shanghai")
    assert info.fields == {"open", "high", "low", "close", "volume", "amount", "factor"}


def test_directory_without_factors_is_delivered_adjusted(
    copy: Path, reference: dict[str, Any]
) -> None:
    for path in copy.rglob("factor.day.bin"):
        path.unlink()
    source = QlibSource(copy, freq="1d")
    assert source.info().price_basis == "adjusted"
    frame = bars_of(source)["SH600000"]
    stored = float32(reference["day"]["features"]["SH600000"]["close"])
    np.testing.assert_array_equal(frame["close"].to_numpy(), stored.astype(np.float64))
    assert frame["factor"].null_count() == frame.height


def test_benchmark_is_its_own_series_and_no_bar() -> None:
    source = QlibSource(BIN, freq="1d", benchmark=INDEX)
    series = source.benchmark()
    assert series is not None
    assert series.columns == ["time", "close"]
    assert series.height == 60
    assert INDEX not in bars_of(source)
    assert INDEX in bars_of(QlibSource(BIN, freq="1d"))


@pytest.mark.parametrize(("freq", "symbol"), [("1d", "SH999999"), ("1min", INDEX)])
def test_benchmark_without_data_is_refused_by_name(freq: Freq, symbol: str) -> None:
    with pytest.raises(SourceError, match=f"data.benchmark: {symbol} cannot be read"):
        QlibSource(BIN, freq=freq, benchmark=symbol).benchmark()


def test_since_yields_from_the_stored_bar_on_including_it() -> None:
    since = {"SH600000": datetime(2020, 5, 27)}
    frames = {p.frame["symbol"][0]: p.frame for p in QlibSource(BIN, freq="1d").frames(since)}
    assert frames["SH600000"]["time"].to_list() == [datetime(2020, 5, 27), datetime(2020, 5, 28)]
    assert frames["SZ000001"].height == 56


def test_minutes_named_by_their_end_are_not_moved(copy: Path) -> None:
    path = copy / "calendars" / "1min.txt"
    stamps = times_of(path.read_text().splitlines())
    path.write_text("\n".join(str(t + timedelta(minutes=1)) for t in stamps))
    moved = QlibSource(copy, freq="1min").times()
    np.testing.assert_array_equal(moved, QlibSource(BIN, freq="1min").times())


def test_five_minute_bars_are_refused() -> None:
    with pytest.raises(SourceError, match="day and 1min bars, not 5min"):
        QlibSource(BIN, freq="5min")


def test_missing_parts_are_refused_by_name(copy: Path) -> None:
    with pytest.raises(SourceError, match="no such directory"):
        QlibSource(copy / "absent", freq="1d")
    with pytest.raises(SourceError, match=r"csi300\.txt: no such market.*all, csi3"):
        QlibSource(copy, freq="1d", market="csi300").info()
    (copy / "calendars" / "day.txt").unlink()
    with pytest.raises(SourceError, match=r"day\.txt: no such calendar.*1min"):
        list(QlibSource(copy, freq="1d").frames())


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("calendars/day.txt", "2020-01-02\nsoon\n", "row 2.*'soon' is not a time"),
        ("calendars/day.txt", "2020-01-03\n2020-01-02\n", "does not come after"),
        ("calendars/day.txt", "\n", "empty"),
        ("instruments/all.txt", "SH600000\t2020-01-02\n", "row 1.*separated by tabs"),
        ("instruments/all.txt", "SH600000\t2020-01-02\tlater\n", "row 1"),
        ("instruments/all.txt", "", "no instruments"),
    ],
)
def test_damaged_text_files_are_refused_with_their_line(
    copy: Path, file: str, text: str, message: str
) -> None:
    (copy / file).write_text(text)
    with pytest.raises(SourceError, match=message):
        list(QlibSource(copy, freq="1d").frames())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a start index"),
        (b"\x00" * 7, "7 bytes"),
        (np.array([-1, 10], dtype="<f4").tobytes(), "not a calendar index"),
        (np.array([np.nan, 10], dtype="<f4").tobytes(), "not a calendar index"),
        (np.array([0.5, 10], dtype="<f4").tobytes(), "not a calendar index"),
        (np.array([55] + [1] * 6, dtype="<f4").tobytes(), "do not fit the calendar of 60"),
    ],
)
def test_damaged_bin_costs_its_symbol_and_is_named(
    copy: Path, content: bytes, message: str
) -> None:
    path = copy / "features" / "sh600000" / "high.day.bin"
    path.write_bytes(content)
    source = QlibSource(copy, freq="1d")
    assert set(bars_of(source)) == {"SZ000001", "SH688001", "SZ000002", "CON", INDEX}
    (problem,) = source.problems()
    assert problem.file == str(path)
    assert problem.field == "high"
    assert message in problem.message
    assert "Dump the symbol again" in problem.remedy


def test_symbol_without_features_is_a_problem_and_without_minutes_a_warning(copy: Path) -> None:
    shutil.rmtree(copy / "features" / "sz000002")
    source = QlibSource(copy, freq="1d")
    assert "SZ000002" not in bars_of(source)
    (problem,) = source.problems()
    assert problem.severity == "error"
    assert "SZ000002 is in instruments/all.txt" in problem.message
    minutes = QlibSource(BIN, freq="1min")
    assert set(bars_of(minutes)) == {"SH600000", "SZ000001"}
    assert {p.severity for p in minutes.problems()} == {"warning"}
    assert len(minutes.problems()) == 4


def test_day_without_a_factor_is_named_and_left_out(copy: Path) -> None:
    path = copy / "features" / "sh600000" / "factor.day.bin"
    factors = np.fromfile(path, dtype="<f4")
    factors[[3, 7]] = [np.nan, 0.0]
    factors.tofile(path)
    source = QlibSource(copy, freq="1d")
    assert bars_of(source)["SH600000"].height == 58
    assert [(p.row, p.field) for p in source.problems()] == [(3, "factor"), (7, "factor")]


def test_fingerprint_follows_content(copy: Path) -> None:
    before = QlibSource(copy, freq="1d").info().fingerprint
    assert before == QlibSource(BIN, freq="1d").info().fingerprint
    market = QlibSource(BIN, freq="1d", market="csi3").info().fingerprint
    assert before != market
    path = copy / "features" / "sh600000" / "close.day.bin"
    values = np.fromfile(path, dtype="<f4")
    values[5] += 1
    values.tofile(path)
    assert QlibSource(copy, freq="1d").info().fingerprint != before


def test_fingerprint_of_a_market_follows_the_listing_facts_too(copy: Path) -> None:
    before = QlibSource(copy, freq="1d", market="csi3").info().fingerprint
    whole = copy / "instruments" / "all.txt"
    whole.write_text(whole.read_text(encoding="utf-8").replace("2020-03-02", "2020-03-03"))
    assert QlibSource(copy, freq="1d", market="csi3").info().fingerprint != before


def test_shorter_field_is_aligned_by_its_own_start(copy: Path) -> None:
    np.array([2, 9.0, 9.5], dtype="<f4").tofile(copy / "features" / "sh600000" / "open.day.bin")
    frame = bars_of(QlibSource(copy, freq="1d"))["SH600000"]
    assert frame["open"].is_not_null().arg_true().to_list() == [2, 3]


def test_close_file_that_was_cut_is_named_instead_of_dropping_its_days(copy: Path) -> None:
    path = copy / "features" / "sh600000" / "close.day.bin"
    path.write_bytes(path.read_bytes()[:-8])
    source = QlibSource(copy, freq="1d")
    assert "SH600000" not in bars_of(source)
    (problem,) = [p for p in source.problems() if p.severity == "error"]
    assert problem.file == str(path)
    assert "but close only for" in problem.message


def test_read_bin_gives_start_and_values(tmp_path: Path) -> None:
    path = tmp_path / "x.day.bin"
    path.write_bytes(np.array([3, 1.5, np.nan], dtype="<f4").tobytes())
    start, values = read_bin(path, 5)
    assert start == 3
    np.testing.assert_array_equal(values, np.array([1.5, np.nan], dtype=np.float32))


def test_shortest_decimal_rounds_noise_and_keeps_the_rest() -> None:
    noisy = np.array([10.2500003, 1799.9999, 3.1415926, 2.3450001, np.nan])
    rounded = shortest_decimal(noisy, (2, 3, 4))
    np.testing.assert_array_equal(rounded, [10.25, 1800.0, 3.1415926, 2.345, np.nan])
