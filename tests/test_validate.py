"""Validation: every kind of bad row is found, named and set aside; good rows are left alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, timedelta
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.data import validate as validating
from echelon.data.bars import RawFrame, conform
from echelon.data.calendars import hours, sessions
from echelon.data.checking import find_oddities
from echelon.data.validate import Validated, validate
from echelon.errors import Problem
from echelon.sources import SourceInfo
from echelon.types import Freq

OHLCV = frozenset({"open", "high", "low", "close", "volume"})
GOOD: dict[str, Any] = {
    "time": datetime(2020, 1, 2),
    "symbol": "A",
    "open": 10.0,
    "high": 11.0,
    "low": 9.0,
    "close": 10.5,
    "volume": 100.0,
}


def info(
    calendar: str = "XNYS",
    freq: Freq = "1d",
    fields: frozenset[str] = OHLCV,
    timezone: str = "America/New_York",
    basis: Any = "raw",
) -> SourceInfo:
    return SourceInfo("test", freq, calendar, timezone, basis, fields, "0")


def frame_of(rows: Sequence[dict[str, Any]]) -> pl.DataFrame:
    """Bars from changes to one good row; rows are numbered as lines of a file, from 2."""
    full = [{**GOOD, "row": k, **row} for k, row in enumerate(rows, start=2)]
    return conform(pl.DataFrame(full, infer_schema_length=None))


def check(rows: Sequence[dict[str, Any]], about: SourceInfo | None = None) -> Validated:
    return validate(RawFrame(frame_of(rows), "bars.csv"), about or info())


def errors(result: Validated) -> list[Problem]:
    return [p for p in result.problems if p.severity == "error"]


def warnings_of(result: Validated) -> list[Problem]:
    return [p for p in result.problems if p.severity == "warning"]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"time": None}, "time", "the time is missing"),
        ({"symbol": None}, "symbol", "the symbol is missing"),
        ({"close": None}, "close", "close is missing or NaN"),
        ({"close": NAN}, "close", "close is missing or NaN"),
        ({"close": INF}, "close", "close is infinite"),
        ({"open": NAN}, "open", "open is missing or NaN"),
        ({"high": None}, "high", "high is missing or NaN"),
        ({"low": NAN}, "low", "low is missing or NaN"),
        ({"close": -10.5, "low": -11.0}, "close", "close -10.5 is not positive"),
        ({"open": 0.0, "low": 0.0}, "open", "open 0.0 is not positive"),
        ({"high": 8.0}, "high", "high 8.0 is below low 9.0"),
        ({"close": 11.5}, "close", "close 11.5 lies outside low 9.0 to high 11.0"),
        ({"open": 8.5}, "open", "open 8.5 lies outside low 9.0 to high 11.0"),
        ({"volume": -1.0}, "volume", "volume -1.0 is negative"),
        ({"volume": NAN}, "volume", "volume is NaN, not a number"),
        ({"amount": -1.0}, "amount", "amount -1.0 is negative"),
        ({"amount": INF}, "amount", "amount is inf, not a number"),
        ({"factor": -0.5}, "factor", "factor -0.5 is not positive"),
        ({"factor": None}, "factor", "factor is missing or NaN"),
        ({"pre_close": 0.0}, "pre_close", "pre_close 0.0 is not positive"),
        ({"time": datetime(2020, 1, 4)}, "time", "2020-01-04 is not a session of XNYS"),
        ({"time": datetime(2020, 1, 3, 16)}, "time", "is not on the grid of 1d bars"),
    ],
)
def test_bad_row_is_set_aside_with_file_row_field_and_remedy(
    change: dict[str, Any], field: str, said: str
) -> None:
    about = info(fields=OHLCV | {"factor", "amount", "pre_close"})
    fine = {"factor": 1.0, "time": datetime(2020, 1, 3)}
    result = check([fine | {"symbol": "Z"}, fine | change], about)
    assert result.good["row"].to_list() == [2]
    assert result.bad["row"].to_list() == [3]
    assert said in result.bad["problem"][0]
    problem = next(p for p in errors(result) if p.field == field)
    assert (problem.file, problem.row) == ("bars.csv", 3)
    assert said in problem.message
    assert problem.remedy
    assert str(problem).startswith(f"bars.csv, row 3, field {field!r}: ")


def oddities(frame: pl.DataFrame, info: SourceInfo) -> list[Problem]:
    return find_oddities([frame], info, info.name)


def test_good_rows_come_back_as_they_were() -> None:
    frame = frame_of([{}, {"symbol": "B"}, {"time": datetime(2020, 1, 3)}])
    result = validate(RawFrame(frame, "f"), info())
    assert result.good.equals(frame)
    assert result.bad.is_empty()
    assert result.bad.columns == [*frame.columns, "problem"]
    assert result.problems == []


def test_empty_piece_has_no_problems() -> None:
    result = validate(RawFrame(frame_of([{}]).head(0), "f"), info())
    assert (result.good.height, result.bad.height, result.problems) == (0, 0, [])


def test_all_problems_of_all_rows_are_listed_at_once() -> None:
    result = check([{"high": 8.0, "volume": -1.0}, {"symbol": None, "close": NAN}, {"symbol": "C"}])
    assert [(p.row, p.field) for p in errors(result)] == [
        (2, "volume"),
        (2, "high"),
        (3, "symbol"),
        (3, "close"),
    ]
    assert result.bad["problem"][0] == "volume -1.0 is negative; high 8.0 is below low 9.0"
    assert result.good["row"].to_list() == [4]


def test_fields_the_source_does_not_have_may_be_missing() -> None:
    row = {"open": None, "high": None, "low": None, "volume": None}
    assert check([row], info(fields=frozenset({"close"}))).problems == []
    assert check([{"volume": None}]).problems == []


def test_rounding_of_a_vendor_is_tolerated() -> None:
    assert check([{"close": 11.0005}, {"symbol": "B", "open": 8.9995}]).problems == []


def test_equal_duplicates_keep_the_first_and_name_both_rows() -> None:
    result = check([{}, {"symbol": "B"}, {}])
    assert result.good["row"].to_list() == [2, 3]
    (problem,) = errors(result)
    assert (problem.row, problem.field) == (4, "time, symbol")
    assert "repeats row 2" in problem.message
    assert "--quarantine" in problem.remedy


def test_duplicates_that_differ_are_all_set_aside() -> None:
    result = check([{}, {"symbol": "B"}, {"close": 10.6}])
    assert result.good["row"].to_list() == [3]
    assert [p.row for p in errors(result)] == [2, 4]
    assert "is also in row 2, with other values" in errors(result)[1].message


def test_unsorted_rows_are_a_warning_and_stay() -> None:
    result = check([{"time": datetime(2020, 1, 3)}, {}, {"time": datetime(2020, 1, 6)}])
    assert result.good.height == 3
    assert errors(result) == []
    (warning,) = warnings_of(result)
    assert (warning.row, warning.field) == (3, "time")
    assert "not sorted: A goes from 2020-01-03 00:00:00 back to 2020-01-02" in warning.message


def test_rows_sorted_within_each_symbol_are_in_order() -> None:
    rows = [{"time": datetime(2020, 1, d), "symbol": s} for s in "BA" for d in (2, 3, 6)]
    assert check(rows).problems == []


def daily(calendar: str, first: date, last: date) -> list[dict[str, Any]]:
    return [{"time": t.item()} for t in sessions(calendar, first, last)]


@pytest.mark.parametrize("true", ["XSHG", "XNYS", "24/7", "XTKS"])
def test_wrong_calendar_gives_one_problem_that_names_the_right_one(true: str) -> None:
    wrong = "XLON"
    rows = daily(true, date(2019, 1, 1), date(2020, 6, 30))
    result = check(rows, info(calendar=wrong))
    (problem,) = errors(result)
    assert (problem.file, problem.row, problem.field) == ("bars.csv", None, "time")
    assert "the calendar looks wrong" in problem.message
    assert f"not sessions of {wrong}; {true} fits" in problem.message
    assert problem.remedy == f"Set data.calendar: {true}"
    assert result.good.height + result.bad.height == len(rows)
    assert result.bad["problem"].str.contains("is not a session of XLON").all()


def test_single_days_off_the_calendar_are_listed_one_by_one() -> None:
    rows = daily("XNYS", date(2019, 1, 1), date(2020, 6, 30))
    rows.append({"time": datetime(2020, 7, 4)})
    result = check(rows)
    (problem,) = errors(result)
    assert problem.row == len(rows) + 1
    assert "2020-07-04 is not a session of XNYS" in problem.message


def test_days_beyond_the_calendar_are_named_not_raised() -> None:
    rows = [{"time": datetime(2020, 1, 3)}, {"time": datetime(2099, 1, 5)}]
    result = check(rows, info(calendar="XSHG", timezone="Asia/Shanghai"))
    (problem,) = errors(result)
    assert problem.row == 3
    assert "2099-01-05 is beyond the calendar XSHG" in problem.message
    assert "data.calendar: data" in problem.remedy


@pytest.mark.parametrize("calendar", ["data", "24/7"])
def test_calendars_without_closed_days_accept_any_day(calendar: str) -> None:
    assert check([{"time": datetime(2020, 1, 4)}], info(calendar=calendar)).problems == []


def intraday(calendar: str, zone: str, shift: timedelta = timedelta()) -> list[dict[str, Any]]:
    """5-minute bars of a few sessions, labelled by their end, lunch left out."""
    rows = []
    for _, begin, lunch, back, end in hours(
        calendar, date(2020, 3, 2), date(2020, 3, 13), zone
    ).iter_rows():
        time = begin + timedelta(minutes=5)
        while time <= end:
            if lunch is None or time <= lunch or time > back:
                rows.append({"time": time + shift})
            time += timedelta(minutes=5)
    return rows


def five(calendar: str, zone: str) -> SourceInfo:
    return info(calendar=calendar, freq="5min", timezone=zone)


@pytest.mark.parametrize(
    ("calendar", "zone", "per_day"),
    [("XNYS", "America/New_York", 78), ("XSHG", "Asia/Shanghai", 48), ("XNYS", "UTC", 78)],
)
def test_intraday_bars_within_hours_are_good(calendar: str, zone: str, per_day: int) -> None:
    rows = intraday(calendar, zone)
    assert len(rows) == 10 * per_day
    assert check(rows, five(calendar, zone)).problems == []


def test_intraday_bars_of_another_time_zone_give_one_problem() -> None:
    rows = intraday("XNYS", "UTC")
    result = check(rows, five("XNYS", "America/New_York"))
    (problem,) = errors(result)
    assert problem.row is None
    assert "the time zone looks wrong: the bars lie within the hours of XNYS in UTC" in str(problem)
    assert "data.timezone: UTC" in problem.remedy
    assert result.bad.height > 0


def test_intraday_bars_outside_hours_are_a_warning_and_stay() -> None:
    rows = [*intraday("XNYS", "America/New_York"), {"time": datetime(2020, 3, 13, 18, 0)}]
    result = check(rows, five("XNYS", "America/New_York"))
    assert errors(result) == []
    assert result.good.height == len(rows)
    (warning,) = warnings_of(result)
    assert "1 bar(s), the first at 2020-03-13 18:00:00, lie outside" in warning.message


def test_intraday_bars_on_a_closed_day_are_set_aside() -> None:
    rows = [*intraday("XSHG", "Asia/Shanghai"), {"time": datetime(2020, 3, 14, 10, 0)}]
    result = check(rows, five("XSHG", "Asia/Shanghai"))
    (problem,) = errors(result)
    assert (problem.row, result.bad.height) == (len(rows) + 1, 1)
    assert "2020-03-14 10:00:00 is not in a session of XSHG" in problem.message


def test_intraday_bars_of_another_exchange_give_one_problem() -> None:
    start = datetime(2020, 3, 2)
    rows = [{"time": start + timedelta(minutes=5 * k)} for k in range(288 * 14)]
    result = check(rows, five("XNYS", "America/New_York"))
    (problem,) = errors(result)
    assert "the calendar looks wrong" in problem.message
    assert "24/7 fits" in problem.message


def test_overnight_session_holds_the_evening_before() -> None:
    zone = "America/Chicago"
    rows = intraday("CMES", zone)
    assert any(r["time"].weekday() == 6 for r in rows)
    assert check(rows, five("CMES", zone)).problems == []


def test_bars_labelled_by_their_start_are_warned_about() -> None:
    rows = intraday("XSHG", "Asia/Shanghai", shift=timedelta(minutes=-5))
    result = check(rows, five("XSHG", "Asia/Shanghai"))
    assert errors(result) == []
    (warning,) = [w for w in warnings_of(result) if "start of each bar" in w.message]
    assert "add one bar's length" in warning.remedy


def test_bars_of_another_length_give_one_problem() -> None:
    start = datetime(2020, 3, 2)
    rows = [{"time": start + timedelta(minutes=k)} for k in range(100)]
    result = check(rows, info(calendar="24/7", freq="5min", timezone="UTC"))
    (problem,) = errors(result)
    assert "80% of the times are not on the grid of 5min bars" in problem.message
    assert "data.freq" in problem.remedy


def test_problems_spelled_out_are_limited_and_the_rest_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(validating, "MAX_PROBLEMS", 10)
    rows = [{"symbol": f"S{k}", "volume": -1.0} for k in range(25)]
    result = check(rows)
    assert len(errors(result)) == 11
    assert "15 more problems" in errors(result)[-1].message
    assert result.bad.height == 25


def slow_reasons(row: dict[str, Any]) -> set[str]:
    """The obvious twin of the rules on a single row: which fields are wrong."""
    wrong = set()
    for name in ("open", "high", "low", "close"):
        value = row[name]
        if value is None or value != value or value in (INF, -INF) or value <= 0:
            wrong.add(name)
    if not wrong & {"high", "low"}:
        if row["high"] < row["low"] * (1 - 1e-4):
            wrong.add("high")
        else:
            for name in {"open", "close"} - wrong:
                if not row["low"] * (1 - 1e-4) <= row[name] <= row["high"] * (1 + 1e-4):
                    wrong.add(name)
    volume = row["volume"]
    if volume is not None and not 0 <= volume < INF:
        wrong.add("volume")
    return wrong


VALUE = st.sampled_from([None, NAN, INF, -INF, -1.0, 0.0, 9.0, 9.5, 10.0, 11.0, 12.0])


@settings(max_examples=60)
@given(
    st.lists(
        st.fixed_dictionaries(dict.fromkeys(("open", "high", "low", "close", "volume"), VALUE)),
        min_size=1,
        max_size=8,
    )
)
def test_rules_agree_with_their_obvious_twin(rows: list[dict[str, Any]]) -> None:
    rows = [row | {"symbol": f"S{k}"} for k, row in enumerate(rows)]
    result = check(rows)
    wrong = {k: slow_reasons(row) for k, row in enumerate(rows, start=2)}
    assert set(result.bad["row"]) == {k for k, fields in wrong.items() if fields}
    found: dict[int | None, set[str | None]] = {}
    for problem in errors(result):
        found.setdefault(problem.row, set()).add(problem.field)
    assert found == {k: fields for k, fields in wrong.items() if fields}


def series(closes: Sequence[float], **columns: Sequence[Any]) -> pl.DataFrame:
    days = sessions("XNYS", date(2020, 1, 2), date(2021, 12, 31))[: len(closes)]
    rows = [
        {"time": t.item(), "close": c} | {n: v[k] for n, v in columns.items()}
        for k, (t, c) in enumerate(zip(days, closes, strict=True))
    ]
    return frame_of(rows)


def test_jump_without_a_factor_is_suspicious_and_with_one_is_not() -> None:
    closes = [10.0, 10.1, 5.0, 5.1]
    (warning,) = oddities(series(closes), info())
    assert warning.severity == "warning"
    assert "A moves -50%" in warning.message or "A moves -51%" in warning.message
    assert "2020-01-06" in warning.message
    split = [1.0, 1.0, 2.0, 2.0]
    assert oddities(series(closes, factor=split), info()) == []
    ex_right = [9.9, 10.0, 5.05, 5.0]
    assert oddities(series(closes, pre_close=ex_right), info()) == []


def test_price_that_stands_still_is_oddities() -> None:
    moving = [10.0 + 0.01 * k for k in range(30)]
    (warning,) = oddities(series([9.0, *[10.0] * 21, *moving[1:]]), info())
    assert "closes at 10.0 for 21 bars in a row, 2020-01-03 to" in warning.message
    assert oddities(series([9.0, *[10.0] * 20, *moving[1:]]), info()) == []


@pytest.mark.parametrize(
    ("factors", "found"),
    [
        ([0.5, 0.7, 1.0], True),
        ([0.5, 0.7, 0.9], True),
        ([1.0, 1.2, 1.5], False),
        ([1.0, 1.0, 1.0], False),
        ([0.5, 0.9, 1.3], False),
    ],
)
def test_end_anchored_factors_are_reported(factors: list[float], found: bool) -> None:
    closes = [10.0 / f for f in factors]
    told = [w for w in oddities(series(closes, factor=factors), info()) if w.field == "factor"]
    assert [("re-anchors" in w.remedy) for w in told] == ([True] if found else [])


def test_sessions_without_any_bar_are_holes() -> None:
    frame = series([10.0 + k for k in range(9)])
    holed = frame.filter(~pl.col("time").dt.day().is_in([6, 7]))
    (warning,) = oddities(holed, info())
    assert "2 of 9 sessions of XNYS have no bar of any symbol: 2020-01-06, 2020-01-07" in (
        warning.message
    )
    assert oddities(holed, info(calendar="data")) == []


@pytest.mark.parametrize(
    ("volume", "amount", "said"),
    [
        (1.0, 1000.0, "Volume seems to be in lots"),
        (100.0, 1.0, "Amount seems to be in thousands"),
        (1.0, 1.0, "Volume seems to be in lots and amount in thousands"),
        (100.0, 1000.0, None),
    ],
)
def test_units_of_volume_and_amount_are_compared(
    volume: float, amount: float, said: str | None
) -> None:
    frame = series([10.0, 10.1], volume=[volume] * 2, amount=[amount] * 2)
    told = [w for w in oddities(frame, info()) if w.field == "volume, amount"]
    assert [w.remedy.startswith(said or "") for w in told] == ([] if said is None else [True])
    adjusted = oddities(frame, info(basis="adjusted"))
    assert all(w.field != "volume, amount" for w in adjusted)


def test_nothing_is_suspicious_about_nothing() -> None:
    assert oddities(frame_of([{}]).head(0), info()) == []
    assert oddities(frame_of([{}]).drop("row"), info()) == []
