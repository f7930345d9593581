"""Exogenous series: nothing is known before it is published."""

import gzip
from datetime import date, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.config.data import ExogenousConfig
from echelon.data.exogenous import (
    SERIES_SCHEMA,
    Exogenous,
    close_offsets,
    join_all,
    join_as_of,
    read_exogenous,
)
from echelon.errors import ConfigError, InvalidDataError, SourceError

CLOSE = timedelta(hours=16)

CPI = """series,period,published,value
CPI,2020-02-29,2020-03-11 08:30:00,2.3
CPI,2020-03-31,2020-04-10 08:30:00,1.5
CPI,2020-02-29,2020-04-20 08:30:00,2.2
CPI,2020-03-31,2020-05-12 16:30:00,1.6
"""


def file(tmp_path: Path, text: str, name: str = "macro.csv", **options: object) -> ExogenousConfig:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return ExogenousConfig(path=path, **options)


def days(*texts: str) -> np.ndarray:
    return np.array(texts, dtype="datetime64[us]")


def frame(*rows: tuple[str, date, datetime, float, str | None]) -> pl.DataFrame:
    return pl.DataFrame(list(rows), schema=dict(SERIES_SCHEMA), orient="row")


def column(joined: Exogenous, n: int = 0, k: int = 0) -> list[float | None]:
    line = zip(joined.values[:, n, k], ~np.isnan(joined.values[:, n, k]), strict=True)
    return [float(v) if known else None for v, known in line]


# --- the join ---------------------------------------------------------------------------------


def test_value_is_known_from_the_bar_whose_close_follows_its_publication(tmp_path: Path) -> None:
    read = read_exogenous(file(tmp_path, CPI))
    times = days("2020-03-10", "2020-03-11", "2020-04-09", "2020-04-10")
    joined = join_as_of(read, times, ["A"], close_offset=CLOSE)
    assert joined.names == ("CPI",)
    assert joined.values.shape == (4, 1, 1)
    assert column(joined) == [None, 2.3, 2.3, 1.5]


def test_revision_of_an_older_period_changes_nothing_and_of_the_latest_does(tmp_path: Path) -> None:
    read = read_exogenous(file(tmp_path, CPI))
    times = days("2020-04-20", "2020-05-11", "2020-05-12", "2020-05-13")
    # The revision of 12 May comes after the close: it belongs to the next bar.
    assert column(join_as_of(read, times, ["A"], close_offset=CLOSE)) == [1.5, 1.5, 1.5, 1.6]


def test_publication_at_the_very_close_is_known(tmp_path: Path) -> None:
    at = frame(("X", date(2020, 1, 1), datetime(2020, 1, 2, 16), 1.0, None))
    times = days("2020-01-02", "2020-01-03")
    assert column(join_as_of(at, times, ["A"], close_offset=CLOSE)) == [1.0, 1.0]
    late = frame(("X", date(2020, 1, 1), datetime(2020, 1, 2, 16, 0, 0, 1), 1.0, None))
    assert column(join_as_of(late, times, ["A"], close_offset=CLOSE)) == [None, 1.0]


def test_publication_without_an_hour_is_known_from_the_next_day(tmp_path: Path) -> None:
    text = (
        "series,period,published,value\nX,2020-01,2020-02-03,1\nX,2020-02,2020-03-02 00:00:00,2\n"
    )
    read = read_exogenous(file(tmp_path, text))
    times = days("2020-02-03", "2020-02-04", "2020-03-02", "2020-03-03")
    assert column(join_as_of(read, times, ["A"], close_offset=CLOSE)) == [None, 1.0, 1.0, 2.0]


def test_intraday_bar_knows_what_was_published_by_its_end() -> None:
    read = frame(("X", date(2020, 1, 1), datetime(2020, 1, 2, 10, 2), 1.0, None))
    times = days("2020-01-02T10:00", "2020-01-02T10:05")
    assert column(join_as_of(read, times, ["A"])) == [None, 1.0]


def test_value_older_than_the_limit_counts_as_unknown() -> None:
    read = frame(("X", date(2020, 1, 1), datetime(2020, 1, 2, 16), 1.0, None))
    times = days("2020-01-02", "2020-01-12", "2020-01-13")
    joined = join_as_of(read, times, ["A"], close_offset=CLOSE, max_age_days=10)
    assert column(joined) == [1.0, 1.0, None]
    assert np.isnan(joined.values[2, 0, 0])


def test_market_wide_series_reach_every_symbol_and_others_only_their_own() -> None:
    read = frame(
        ("CPI", date(2020, 1, 1), datetime(2020, 1, 2, 8), 1.0, None),
        ("mood", date(2020, 1, 2), datetime(2020, 1, 2, 9), 0.5, "B"),
        ("mood", date(2020, 1, 2), datetime(2020, 1, 2, 9), 0.7, "not in the panel"),
    )
    joined = join_as_of(read, days("2020-01-02"), ["A", "B"], close_offset=CLOSE)
    assert joined.names == ("CPI", "mood")
    assert np.isnan(joined.values[0]).tolist() == [[False, True], [False, False]]
    assert joined.values[0, 1].tolist() == [1.0, 0.5]


def test_named_series_keep_their_place_even_without_rows() -> None:
    read = frame(("b", date(2020, 1, 1), datetime(2020, 1, 2, 8), 1.0, None))
    joined = join_as_of(read, days("2020-01-03"), ["A"], names=["a", "b"])
    assert np.isnan(joined.values[0, 0]).tolist() == [True, False]
    nothing = join_as_of(read.clear(), days("2020-01-03"), ["A"], names=["a"])
    assert np.isnan(nothing.values).all()


# --- the slow twin and the future -------------------------------------------------------------


def slow_join(
    rows: pl.DataFrame, times: np.ndarray, symbols: list[str], age: int | None
) -> dict[tuple[int, int, str], float]:
    """The definition, row by row."""
    found = {}
    for t, time in enumerate(times.tolist()):
        decision = time + CLOSE
        for n, symbol in enumerate(symbols):
            for name in rows["series"].unique():
                seen = [
                    r
                    for r in rows.iter_rows(named=True)
                    if r["series"] == name
                    and r["symbol"] in (None, symbol)
                    and r["published"] <= decision
                ]
                if not seen:
                    continue
                best = max(seen, key=lambda r: (r["period"], r["published"]))
                if age is None or decision - best["published"] <= timedelta(days=age):
                    found[t, n, name] = best["value"]
    return found


START = datetime(2020, 1, 1)
TIMES = np.arange("2020-01-01", "2020-01-25", dtype="datetime64[D]").astype("datetime64[us]")


@st.composite
def releases(draw: st.DrawFn) -> pl.DataFrame:
    """Releases and revisions of a market-wide series and of one per symbol."""
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from([("wide", None), ("own", "A"), ("own", "B")]),
                st.integers(0, 4),
                st.integers(0, 24 * 26),
                st.floats(-5, 5).map(lambda v: round(v, 3)),
            ),
            max_size=25,
            unique_by=lambda r: r[:3],
        )
    )
    return frame(
        *(
            (name, date(2020, 1, 1 + p), START + timedelta(hours=h), value, symbol)
            for (name, symbol), p, h, value in rows
        )
    )


@given(releases(), st.sampled_from([None, 1, 5]))
def test_fast_join_equals_the_slow_one(rows: pl.DataFrame, age: int | None) -> None:
    joined = join_as_of(
        *(rows, TIMES, ["A", "B"]), close_offset=CLOSE, max_age_days=age, names=["wide", "own"]
    )
    slow = slow_join(rows, TIMES, ["A", "B"], age)
    for t, n, k in np.ndindex(joined.values.shape):
        key = (t, n, joined.names[k])
        assert np.isnan(joined.values[t, n, k]) == (key not in slow)
        if key in slow:
            assert joined.values[t, n, k] == slow[key]


@given(releases(), st.integers(0, len(TIMES) - 1), st.randoms(use_true_random=False))
def test_rows_published_after_a_cut_change_nothing_up_to_it(
    rows: pl.DataFrame, cut: int, random: object
) -> None:
    def join(table: pl.DataFrame) -> np.ndarray:
        names = ["wide", "own"]
        return join_as_of(table, TIMES, ["A", "B"], close_offset=CLOSE, names=names).values

    decision = TIMES[cut].item() + CLOSE
    later = pl.col("published") > decision
    true = join(rows)[: cut + 1]
    np.testing.assert_array_equal(true, join(rows.filter(~later))[: cut + 1])
    noise = [random.uniform(-99, 99) for _ in range(rows.height)]  # type: ignore[attr-defined]
    scrambled = rows.with_columns(
        value=pl.when(later).then(pl.Series(noise, dtype=pl.Float64)).otherwise("value"),
        period=pl.when(later).then(pl.lit(date(2030, 1, 1))).otherwise("period"),
    )
    np.testing.assert_array_equal(true, join(scrambled)[: cut + 1])


@given(releases(), st.randoms(use_true_random=False))
def test_order_of_rows_does_not_matter(rows: pl.DataFrame, random: object) -> None:
    order = list(range(rows.height))
    random.shuffle(order)  # type: ignore[attr-defined]
    names = ["wide", "own"]
    a = join_as_of(rows, TIMES, ["A", "B"], close_offset=CLOSE, names=names)
    b = join_as_of(rows[order], TIMES, ["A", "B"], close_offset=CLOSE, names=names)
    np.testing.assert_array_equal(a.values, b.values)


# --- when a bar is decided on -----------------------------------------------------------------


def test_close_offsets_know_half_days() -> None:
    # The day after Thanksgiving 2020 closed at 13:00; a Saturday is no session.
    times = days("2020-11-25", "2020-11-27", "2020-11-28", "2020-11-30")
    offsets = close_offsets(times, "XNYS", "America/New_York")
    assert np.asarray(offsets).astype("timedelta64[h]").tolist() == [
        timedelta(hours=h) for h in (16, 13, 0, 16)
    ]
    shanghai = close_offsets(days("2020-11-25"), "XSHG", "Asia/Shanghai")
    assert np.asarray(shanghai).tolist() == [timedelta(hours=15)]


def test_close_offset_is_the_next_midnight_around_the_clock_and_zero_where_unknown() -> None:
    times = days("2020-11-25")
    assert close_offsets(times, "24/7", "UTC") == timedelta(days=1)
    assert close_offsets(times, "data", "UTC") == timedelta(0)
    assert close_offsets(times[:0], "XNYS", "America/New_York") == timedelta(0)
    saturday = close_offsets(days("2020-11-28"), "XNYS", "America/New_York")
    assert np.all(np.asarray(saturday, dtype="timedelta64[us]") == np.timedelta64(0, "us"))


def test_release_after_an_early_close_belongs_to_the_next_bar(tmp_path: Path) -> None:
    text = "series,period,published,value\nX,2020-11-27,2020-11-27 14:00:00,1\n"
    times = days("2020-11-27", "2020-11-30")
    joined = join_all([file(tmp_path, text)], times, ["A"], "XNYS")
    assert column(joined) == [None, 1.0]


def test_all_files_side_by_side_each_with_its_age(tmp_path: Path) -> None:
    one = file(tmp_path, CPI, max_age_days=5)
    two = file(tmp_path, CPI.replace("CPI", "PMI"), "two.csv")
    times = days("2020-03-11", "2020-04-01")
    joined = join_all([one, two], times, ["A", "B"], "XNYS")
    assert joined.names == ("CPI", "PMI")
    assert column(joined, 1, 0) == [2.3, None]
    assert column(joined, 1, 1) == [2.3, 2.3]
    assert join_all([], times, ["A"], "XNYS").values.shape == (2, 1, 0)


def test_nothing_published_after_the_last_bars_decision_is_seen(tmp_path: Path) -> None:
    config = file(tmp_path, CPI)
    times = days("2020-03-11", "2020-04-09", "2020-04-10", "2020-04-13")
    until = datetime(2020, 3, 11)
    joined = join_all([config], times, ["A"], "XNYS", published_until=until)
    assert column(joined) == [2.3] * 4  # 11 March's own morning release is still seen
    early = join_all([config], times, ["A"], "XNYS", published_until=datetime(2019, 1, 2))
    assert early.names == ("CPI",)
    assert np.isnan(early.values).all()


def test_intraday_bars_are_decided_on_at_their_end(tmp_path: Path) -> None:
    times = days("2020-03-11T08:25", "2020-03-11T08:30")
    assert column(join_all([file(tmp_path, CPI)], times, ["A"], "24/7")) == [None, 2.3]


def test_series_in_two_files_is_refused(tmp_path: Path) -> None:
    one, two = file(tmp_path, CPI), file(tmp_path, CPI, "two.csv")
    with pytest.raises(ConfigError, match=r"series 'CPI' of .*two\.csv is in an earlier file"):
        join_all([one, two], days("2020-03-11"), ["A"], "XNYS")


# --- reading ----------------------------------------------------------------------------------


def test_read_frame_has_the_schema_and_is_sorted(tmp_path: Path) -> None:
    read = read_exogenous(file(tmp_path, CPI))
    assert read.schema == pl.Schema(SERIES_SCHEMA)
    assert read["published"].is_sorted()
    assert read["symbol"].null_count() == 4


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gbk"])
def test_chinese_columns_and_encodings_are_read(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "宏观.csv"
    text = "指标,统计期,发布时间,数值,代码\n居民消费价格,2020年3月,2020-04-10 09:30:00,4.3,\n"
    path.write_bytes(text.encode(encoding))
    read = read_exogenous(ExogenousConfig(path=path))
    published = datetime(2020, 4, 10, 9, 30)
    assert read.rows() == [("居民消费价格", date(2020, 3, 31), published, 4.3, None)]


def test_gzip_and_parquet_hold_the_same(tmp_path: Path) -> None:
    plain = read_exogenous(file(tmp_path, CPI))
    packed = tmp_path / "macro.csv.gz"
    packed.write_bytes(gzip.compress(CPI.encode()))
    assert read_exogenous(ExogenousConfig(path=packed)).equals(plain)
    columnar = tmp_path / "macro.parquet"
    plain.drop("symbol").write_parquet(columnar)
    assert read_exogenous(ExogenousConfig(path=columnar)).equals(plain)


def test_parquet_dates_without_hour_count_from_the_next_day(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    table = {"series": ["X"], "period": [date(2020, 1, 1)], "published": [date(2020, 1, 2)]}
    pl.DataFrame({**table, "value": [1]}).write_parquet(path)
    assert read_exogenous(ExogenousConfig(path=path))["published"][0] == datetime(2020, 1, 3)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("2020-02-10", date(2020, 2, 10)),
        ("20200210", date(2020, 2, 10)),
        ("2020/2/10", date(2020, 2, 10)),
        ("2020-02", date(2020, 2, 29)),
        ("202002", date(2020, 2, 29)),
        ("2020年2月", date(2020, 2, 29)),
        ("2020Q1", date(2020, 3, 31)),
        ("2020-q3", date(2020, 9, 30)),
        ("2020年第2季度", date(2020, 6, 30)),
        ("2020", date(2020, 12, 31)),
    ],
)
def test_period_is_its_last_day(tmp_path: Path, text: str, end: date) -> None:
    csv = f"series,period,published,value\nX,{text},2021-06-01 09:00,1\n"
    assert read_exogenous(file(tmp_path, csv))["period"][0] == end


def test_publication_with_offset_becomes_exchange_time(tmp_path: Path) -> None:
    text = (
        "series,period,published,value\n"
        "X,2020-01,2020-02-03T13:30:00Z,1\n"
        "X,2020-02,2020-03-20T08:30:00-04:00,2\n"
        "X,2020-03,2020-04-03,3\n"
    )
    config = file(tmp_path, text)
    read = read_exogenous(config, "America/New_York")
    assert read["published"].to_list() == [
        datetime(2020, 2, 3, 8, 30),
        datetime(2020, 3, 20, 8, 30),
        datetime(2020, 4, 4),
    ]


def test_zoned_parquet_becomes_exchange_time(tmp_path: Path) -> None:
    path = tmp_path / "z.parquet"
    frame(("X", date(2020, 1, 31), datetime(2020, 2, 3, 13, 30), 1.0, None)).with_columns(
        pl.col("published").dt.replace_time_zone("UTC")
    ).write_parquet(path)
    read = read_exogenous(ExogenousConfig(path=path), "Asia/Shanghai")
    assert read["published"][0] == datetime(2020, 2, 3, 21, 30)


def test_chosen_series_come_in_the_order_of_the_configuration(tmp_path: Path) -> None:
    text = CPI + "PMI,2020-03,2020-03-31 09:45:00,49.1\nGDP,2020Q1,2020-04-29 08:30:00,-4.8\n"
    read = read_exogenous(file(tmp_path, text, series=("PMI", "CPI")))
    assert read["series"].unique(maintain_order=True).to_list() == ["PMI", "CPI"]
    read = read_exogenous(file(tmp_path, text))
    assert read["series"].unique(maintain_order=True).to_list() == ["CPI", "GDP", "PMI"]


def test_values_ahead_of_their_period_are_kept_and_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "series,period,published,value\nPMI,2020-03,2020-03-24 09:45:00,49.2\n"
    assert read_exogenous(file(tmp_path, text)).height == 1
    assert "1 of 1 values are published before their period ends (first: row 2)" in caplog.text


# --- bad input --------------------------------------------------------------------------------


def test_missing_publication_column_explains_the_leak(tmp_path: Path) -> None:
    config = file(tmp_path, "series,period,value\nX,2020-01,1\n")
    with pytest.raises(SourceError, match=r"no column 'published'.*leaks the future.*发布时间"):
        read_exogenous(config)


def test_empty_publication_time_is_refused_by_row(tmp_path: Path) -> None:
    config = file(tmp_path, "series,period,published,value\nX,2020-01,2020-02-03,1\nX,2020-02,,2\n")
    with pytest.raises(InvalidDataError, match=r"row 3, field 'published': no published; without"):
        read_exogenous(config)


def test_all_bad_rows_are_listed_at_once(tmp_path: Path) -> None:
    text = (
        "series,period,published,value\n"
        "X,2020-13,2020-02-03,1\n"
        "X,2020-02,yesterday,2\n"
        "X,2020-03,2020-04-03,n/a\n"
        "X,2020-04,2020-05-04,inf\n"
        ",2020-05,2020-06-03,5\n"
        "X,2020-06,2020-07-03,\n"
        "X,2020-02-30,2020-07-03,1\n"
    )
    with pytest.raises(InvalidDataError) as caught:
        read_exogenous(file(tmp_path, text))
    found = [(p.row, p.field) for p in caught.value.problems]
    assert found == [
        (2, "period"),
        (3, "published"),
        (4, "value"),
        (5, "value"),
        (6, "series"),
        (7, "value"),
        (8, "period"),
    ]
    assert "'yesterday' is no date or time" in str(caught.value)
    assert "'n/a' is no number" in str(caught.value)


def test_nan_in_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nan.parquet"
    frame(("X", date(2020, 1, 1), datetime(2020, 1, 2, 9), float("nan"), None)).write_parquet(path)
    with pytest.raises(InvalidDataError, match="row 0, field 'value': 'NaN' is no number"):
        read_exogenous(ExogenousConfig(path=path))


def test_two_values_at_one_publication_are_refused(tmp_path: Path) -> None:
    text = CPI + "CPI,2020-03-31,2020-04-10 08:30:00,9.9\n"
    with pytest.raises(InvalidDataError, match="row 6, field 'published': a second value"):
        read_exogenous(file(tmp_path, text))


def test_series_with_and_without_symbols_is_refused(tmp_path: Path) -> None:
    text = (
        "series,period,published,value,symbol\nX,2020-01,2020-02-03,1,A\nX,2020-01,2020-02-03,1,\n"
    )
    with pytest.raises(InvalidDataError, match="row 3, field 'symbol': series 'X' has rows with"):
        read_exogenous(file(tmp_path, text))


def test_mixed_time_zones_are_refused(tmp_path: Path) -> None:
    text = (
        "series,period,published,value\n"
        "X,2020-01,2020-02-03T13:30:00Z,1\n"
        "X,2020-02,2020-03-03 13:30:00,2\n"
    )
    with pytest.raises(InvalidDataError, match=r"row 3, field 'published': .* has no time zone"):
        read_exogenous(file(tmp_path, text), "America/New_York")


def test_unknown_series_suggests_the_near_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no series 'CPJ'; did you mean 'CPI'\?"):
        read_exogenous(file(tmp_path, CPI, series=("CPJ",)))
    with pytest.raises(ConfigError, match="has no series 'unemployment'; it has: CPI"):
        read_exogenous(file(tmp_path, CPI, series=("unemployment",)))


def test_two_columns_of_one_meaning_are_refused(tmp_path: Path) -> None:
    config = file(tmp_path, "series,period,published,发布时间,value\nX,2020,2021-01-04,2021,1\n")
    with pytest.raises(InvalidDataError, match="'published' and '发布时间' both mean it"):
        read_exogenous(config)


def test_missing_truncated_and_undecodable_files_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"none\.csv: does not exist"):
        read_exogenous(ExogenousConfig(path=tmp_path / "none.csv"))
    whole = tmp_path / "whole.parquet"
    read_exogenous(file(tmp_path, CPI)).write_parquet(whole)
    for name, data, said in (
        ("cut.parquet", whole.read_bytes()[:-20], "the Parquet file is truncated"),
        ("cut.csv.gz", gzip.compress(CPI.encode())[:-10], "the gzip file is damaged or truncated"),
        ("empty.csv", b"", "the file is empty"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SourceError, match=f"{name}: {said}"):
            read_exogenous(ExogenousConfig(path=tmp_path / name))
    (tmp_path / "odd.csv").write_bytes(b"series,period\n\xff\xfe\x00\x81")
    with pytest.raises(SourceError, match=r"odd\.csv: .*neither UTF-8 nor GBK"):
        read_exogenous(ExogenousConfig(path=tmp_path / "odd.csv"))
