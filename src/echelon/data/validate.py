"""Judging rows: which bars can be stored, and everything that is wrong with the others.

`validate` looks at one piece of a source and lists all problems at once:

1. rules on a single row (missing, non-positive, beyond all bounds, high below low, outside the
   range, negative; symbols with characters that nobody sees);
2. rules on the rows of a piece (duplicates, order);
3. the clock: sessions of the calendar, the grid of the bar length, trading hours.

A row that breaks a rule goes to `bad` with its reasons. Where a whole file is off (the calendar,
the time zone, the bar length) there is one problem for all its rows. Warnings leave their rows in
`good`. What is not wrong but looks odd is for `data.checking`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import NamedTuple

import polars as pl

from echelon.data import calendars
from echelon.data.bars import (
    BOUNDS,
    MAX_PROBLEMS,
    MAX_SYMBOL,
    ODD_IN_SYMBOL,
    PRICES,
    RawFrame,
)
from echelon.errors import Problem, shorten
from echelon.sources import SourceInfo

_TOLERANCE = 1e-4  # adjusted prices are rounded by their vendors, each by itself
_TOO_MANY = 0.01  # a share of days, or bars, that no longer looks like slips in single rows
_FEW = 3
_MEND = "Correct the row, or set it aside with --quarantine"
_CALENDARS = ("XNYS", "XSHG", "XHKG", "XLON", "XTKS", "XETR", "24/5", calendars.ROUND_THE_CLOCK)
_ZONES = ("UTC", "America/New_York", "Asia/Shanghai", "Europe/London")


@dataclass(frozen=True, slots=True)
class Validated:
    good: pl.DataFrame  # rows fit for the store, with `row`, in the order of the source
    bad: pl.DataFrame  # the others, with a column `problem` that gives the reasons
    problems: list[Problem]  # errors of the bad rows, errors of the file, and warnings


class _Rule(NamedTuple):
    """Rows where `broken` holds are bad; `message` says why, `whole` is one problem for all."""

    field: str
    broken: pl.Expr
    message: pl.Expr
    remedy: str = _MEND
    whole: Problem | None = None


def validate(raw: RawFrame, info: SourceInfo) -> Validated:
    frame = raw.frame
    if frame.is_empty():
        return Validated(frame, frame.with_columns(problem=pl.lit("")), [])
    frame = _with_twins(frame)
    clock_rules, warnings = _clock_rules(frame, raw.origin, info)
    rules = [*_row_rules(info), *_duplicate_rules(), *clock_rules]
    flags = [f"_broken{k}" for k in range(len(rules))]
    checked = frame.with_columns(
        r.broken.fill_null(False).alias(flag) for flag, r in zip(flags, rules, strict=True)
    )
    any_broken, columns = pl.any_horizontal(flags), raw.frame.columns
    # In one piece: pl.format panics on some columns of several (polars 2.1).
    wrong = checked.filter(any_broken).rechunk()
    if wrong.is_empty():
        good, bad, errors = raw.frame, wrong.select(columns).with_columns(problem=pl.lit("")), []
    else:
        good = checked.filter(~any_broken).select(columns)
        reasons = [pl.when(f).then(r.message) for f, r in zip(flags, rules, strict=True)]
        wrong = wrong.with_columns(
            problem=pl.concat_str(reasons, separator="; ", ignore_nulls=True)
        )
        bad = wrong.select(*columns, "problem")
        errors = _spell_out(wrong, rules, flags, raw.origin)
    # A volume of −0 is 0, spelled in another way: two files of the same bars have the same hash.
    good = good.with_columns(
        pl.when(pl.col(c) == 0).then(0.0).otherwise(c).alias(c) for c in ("volume", "amount")
    )
    return Validated(good, bad, [*errors, *warnings, *_order(frame, raw.origin)])


def _spell_out(
    wrong: pl.DataFrame, rules: Sequence[_Rule], flags: Sequence[str], origin: str
) -> list[Problem]:
    """One problem per broken rule and row, in the order of the rows, up to a limit."""
    whole = [r.whole for r in rules if r.whole is not None]
    broken = [
        wrong.filter(flag).select("row", number=pl.lit(k), text=rule.message)
        for k, (flag, rule) in enumerate(zip(flags, rules, strict=True))
        if rule.whole is None
    ]
    table = pl.concat(broken).sort("row", "number", nulls_last=True)
    single = [
        Problem(origin, row, rules[k].field, text, rules[k].remedy)
        for row, k, text in table.head(MAX_PROBLEMS).iter_rows()
    ]
    if table.height > MAX_PROBLEMS:
        message = f"{table.height - MAX_PROBLEMS} more problems of the same kinds"
        single.append(Problem(origin, None, None, message, _MEND))
    return [*whole, *single]


def _row_rules(info: SourceInfo) -> list[_Rule]:
    rules = [
        _Rule("time", pl.col("time").is_null(), pl.lit("the time is missing")),
        _Rule("symbol", pl.col("symbol").is_null(), pl.lit("the symbol is missing")),
        *_symbol_rules(),
    ]
    prices = [p for p in PRICES if p in info.fields or p == "close"]
    needed = [*prices, "factor"] if "factor" in info.fields else prices
    remedy = "Fill it in, remove the row (a bar that is not there is a suspension), or set it "
    remedy += "aside with --quarantine"
    for name in needed:
        missing = pl.col(name).is_null() | pl.col(name).is_nan()
        rules.append(_Rule(name, missing, pl.lit(f"{name} is missing or NaN"), remedy))
    for name in (*needed, "pre_close"):
        value = pl.col(name)
        rules.append(_Rule(name, value.is_infinite(), pl.lit(f"{name} is infinite")))
        below = (value <= 0) & value.is_finite()
        rules.append(_Rule(name, below, pl.format(f"{name} {{}} is not positive", value)))
        rules.append(_bounds_rule(name))
    for name in ("volume", "amount"):
        value = pl.col(name)
        odd = value.is_nan() | value.is_infinite()
        rules.append(_Rule(name, odd, pl.format(f"{name} is {{}}, not a number", value)))
        negative = (value < 0) & value.is_finite()
        rules.append(_Rule(name, negative, pl.format(f"{name} {{}} is negative", value)))
        rules.append(_bounds_rule(name))
    return rules + _range_rules(prices)


def _bounds_rule(name: str) -> _Rule:
    """A number that no market has: a slip of the decimal point, another column, or nonsense."""
    bounds, value = BOUNDS[name], pl.col(name)
    text = pl.format(
        f"{name} {{}} cannot be meant: it should lie in {bounds.low:g} to {bounds.high:g}", value
    )
    remedy = "Correct the row or its units (data.columns), or set it aside with --quarantine"
    return _Rule(name, bounds.excludes(value), text, remedy)


def _symbol_rules() -> list[_Rule]:
    """Symbols that are not what they look like, or too long to be any."""
    symbol = pl.col("symbol")
    size = symbol.str.len_chars()
    unusual = symbol.str.contains(ODD_IN_SYMBOL) | (size > MAX_SYMBOL)
    shown = (
        pl.when(unusual)
        .then(symbol)  # the others are null, and cost nothing
        .map_elements(lambda text: shorten(repr(text), 80), return_dtype=pl.String)
    )
    remedy = "Write the symbol in plain characters, or set the row aside with --quarantine"
    odd = pl.format("symbol {} has a control or invisible character", shown)
    long = pl.format(f"symbol {{}} has {{}} characters, at most {MAX_SYMBOL} are read", shown, size)
    return [
        _Rule("symbol", symbol.str.contains(ODD_IN_SYMBOL), odd, remedy),
        _Rule("symbol", size > MAX_SYMBOL, long, remedy),
    ]


def _range_rules(prices: Sequence[str]) -> list[_Rule]:
    if "high" not in prices or "low" not in prices:
        return []
    high, low = pl.col("high"), pl.col("low")
    # NaN compares as the greatest number in polars; what is not finite has its own rule.
    known = high.is_finite() & low.is_finite()
    inverted = known & (high < low * (1 - _TOLERANCE))
    rules = [_Rule("high", inverted, pl.format("high {} is below low {}", high, low))]
    for name in ("open", "close"):
        if name in prices:
            value = pl.col(name)
            outside = (value > high * (1 + _TOLERANCE)) | (value < low * (1 - _TOLERANCE))
            text = pl.format(f"{name} {{}} lies outside low {{}} to high {{}}", value, low, high)
            judged = known & value.is_finite() & ~inverted & (low > 0) & (value > 0)
            rules.append(_Rule(name, outside & judged, text))
    return rules


def _with_twins(frame: pl.DataFrame) -> pl.DataFrame:
    """Add, for rows whose time and symbol occur again, the first such row, and if all agree."""
    again = frame.filter(pl.struct("time", "symbol").is_duplicated())
    if again.is_empty():
        return frame.with_columns(_twin=pl.lit(None, dtype=pl.Int64), _same=pl.lit(True))
    values = pl.struct(pl.all().exclude("row", "time", "symbol"))
    twins = again.group_by("time", "symbol").agg(
        _twin=pl.col("row").first(), _same=values.n_unique() == 1
    )
    return frame.join(twins, on=["time", "symbol"], how="left", maintain_order="left")


def _duplicate_rules() -> list[_Rule]:
    """Equal copies: the first stays. Different ones: nobody knows which is right, so none does."""
    known = pl.col("time").is_not_null() & pl.col("symbol").is_not_null()
    later = known & (pl.col("row") != pl.col("_twin"))
    bar = ("symbol", pl.col("time").cast(pl.String))
    same = pl.format("{} at {} repeats row {}", *bar, "_twin")
    differs = pl.format("{} at {} is also in row {}, with other values", *bar, "_twin")
    first = known & ~pl.col("_same") & (pl.col("row") == pl.col("_twin"))
    several = pl.format("{} at {} comes again below, with other values", *bar)
    remedy = "Keep one of the rows, or set them aside with --quarantine"
    return [
        _Rule("time, symbol", later & pl.col("_same"), same, remedy),
        _Rule("time, symbol", later & ~pl.col("_same"), differs, remedy),
        _Rule("time, symbol", first, several, remedy),
    ]


def _order(frame: pl.DataFrame, origin: str) -> list[Problem]:
    """A warning where time runs backwards within a symbol: the store sorts, the user may wonder."""
    before = pl.col("time").shift(1).over("symbol")
    wrong = frame.select("row", "symbol", "time", before=before).filter(
        pl.col("time") < pl.col("before")
    )
    if wrong.is_empty():
        return []
    row, symbol, time, previous = wrong.row(0)
    message = (
        f"rows are not sorted: {symbol} goes from {previous} back to {time} "
        f"({wrong.height} such step(s))"
    )
    remedy = "Nothing need be done: import sorts. If the order has a meaning, check the file"
    return [Problem(origin, row, "time", message, remedy, severity="warning")]


def _clock_rules(
    frame: pl.DataFrame, origin: str, info: SourceInfo
) -> tuple[list[_Rule], list[Problem]]:
    """Rules on times: the grid of the bar length, the calendar's sessions, trading hours."""
    times = frame["time"].drop_nulls()
    if times.is_empty():
        return [], []
    rules = [_grid_rule(times, origin, info)]
    if info.calendar in (calendars.FROM_DATA, calendars.ROUND_THE_CLOCK):
        return rules, []
    reach = calendars.bounds(info.calendar)
    # One day less at each end: the sessions of some exchanges begin on the day before.
    low = max(reach.first + timedelta(days=1), date(1900, 1, 1))
    high = min(reach.last, date(2200, 12, 31))
    text = pl.format(
        "{} is beyond the calendar " + f"{info.calendar}, which is known from {low} to {high}",
        _time_text(),
    )
    remedy = "Correct the date, install a newer exchange_calendars, or set data.calendar: data"
    beyond = ~pl.col("time").dt.date().is_between(low, high)
    rules.append(_Rule("time", beyond, text, remedy))
    inside = times.filter(times.dt.date().is_between(low, high))
    if inside.is_empty():
        return rules, []
    if info.freq == "1d":
        return [*rules, _session_rule(inside, origin, info)], []
    off_hours, warnings = _hours_rules(inside, origin, info)
    return [*rules, *off_hours], warnings


def _grid_rule(times: pl.Series, origin: str, info: SourceInfo) -> _Rule:
    """Bars end on multiples of their length since midnight; daily ones are at midnight."""
    step = info.freq.replace("min", "m")
    off = pl.col("time") != pl.col("time").dt.truncate(step)
    share = float((times != times.dt.truncate(step)).mean() or 0)  # type: ignore[arg-type]
    whole = None
    if share > _TOO_MANY and share * len(times) >= _FEW:
        message = f"{share:.0%} of the times are not on the grid of {info.freq} bars"
        remedy = "Set data.freq to the length of the bars in the file; times are when a bar ends"
        whole = Problem(origin, None, "time", message, remedy)
    text = pl.format("{} is not on the grid of " + info.freq + " bars", _time_text())
    return _Rule("time", off, text, whole=whole)


def _session_rule(times: pl.Series, origin: str, info: SourceInfo) -> _Rule:
    days = times.dt.date().unique()
    first, last = _span(days)
    open_days = pl.Series(calendars.sessions(info.calendar, first, last)).cast(pl.Date)
    closed = days.filter(~days.is_in(open_days.implode())).sort()
    whole = None
    if len(closed) >= _FEW and len(closed) > _TOO_MANY * len(days):
        whole = _wrong_calendar(days, closed, origin, info.calendar)
    off = pl.col("time").dt.date().is_in(closed.implode())
    text = pl.format("{} is not a session of " + info.calendar, _time_text())
    remedy = "Correct the date, or set data.calendar to the exchange the bars come from"
    return _Rule("time", off, text, remedy, whole)


def _wrong_calendar(days: pl.Series, closed: pl.Series, origin: str, calendar: str) -> Problem:
    """One problem for the file, naming the calendar that fits best."""
    first, last = _span(days)
    misfits = {}
    for name in _CALENDARS:
        if calendars.bounds(name).clip(first, last) != (first, last):
            continue
        known = pl.Series(calendars.sessions(name, first, last)).cast(pl.Date)
        strangers = len(days.filter(~days.is_in(known.implode())))
        # Bars on closed days count far more than sessions without a bar, which may be holes.
        misfits[name] = 20 * strangers + len(known) - (len(days) - strangers)
    best = min(misfits, key=misfits.__getitem__)
    fits = f"{best} fits" if best != calendar else "no other that we tried fits better"
    message = (
        f"the calendar looks wrong: {len(closed)} of {len(days)} days, the first {closed[0]}, are "
        f"not sessions of {calendar}; {fits}"
    )
    remedy = f"Set data.calendar: {best if best != calendar else 'data'}"
    return Problem(origin, None, "time", message, remedy)


def _hours_rules(
    times: pl.Series, origin: str, info: SourceInfo
) -> tuple[list[_Rule], list[Problem]]:
    """Intraday bars: on no session's day → bad; outside its hours → a warning, they may be real."""
    distinct = times.unique().sort()
    state = _place(distinct, info, info.timezone)
    counts = times.value_counts(name="n").join(state, on="time")
    n_closed, n_outside = counts.select(
        pl.col("n").filter(where).sum().cast(pl.Int64).alias(where)
        for where in ("closed", "outside")
    ).row(0)
    whole = None
    if n_closed + n_outside > _TOO_MANY * len(times) and n_closed + n_outside >= _FEW:
        whole = _wrong_zone(distinct, origin, info)
        closed_days = state.filter("closed")["time"].dt.date().unique().sort()
        days = distinct.dt.date().unique()
        many = len(closed_days) >= _FEW and len(closed_days) > _TOO_MANY * len(days)
        if whole is None and many:
            whole = _wrong_calendar(days, closed_days, origin, info.calendar)
    flagged = state.filter("closed" if whole is None else pl.col("closed") | pl.col("outside"))
    off = pl.col("time").is_in(flagged["time"].implode())
    text = pl.format("{} is not in a session of " + info.calendar, _time_text())
    remedy = "Correct the time, or set data.calendar to the exchange the bars come from"
    rules, warnings = [_Rule("time", off, text, remedy, whole)], []
    if whole is None and n_outside:
        message = (
            f"{n_outside} bar(s), the first at {state.filter('outside')['time'][0]}, lie outside "
            f"the trading hours of {info.calendar}"
        )
        warnings.append((message, "Remove them unless you mean to trade before and after hours"))
    opening, closing = int(state["first"].sum()), int(state["last"].sum())
    if whole is None and opening >= _FEW and closing <= 0.1 * opening:  # known too early
        message = (
            f"{opening} session(s) have a bar at the opening and {closing} one at the close: the "
            "times look like the start of each bar"
        )
        remedy = "Echelon takes a time as the bar's end, when it became known: add one bar's length"
        warnings.append((message, remedy))
    return rules, [Problem(origin, None, "time", *said, severity="warning") for said in warnings]


def _place(times: pl.Series, info: SourceInfo, zone: str) -> pl.DataFrame:
    """Where times, read in `zone`, stand in the calendar.

    Returns time, closed (its day is no session), outside (the session is not trading then),
    first and last (the bar ends with the opening, or with the close).
    """
    first, last = _span(times.dt.date())
    margin = timedelta(days=7)  # the session of a bar on the first day may have started before
    span = calendars.bounds(info.calendar).clip(first - margin, last + margin)
    table = calendars.hours(info.calendar, *span, zone)
    # A session may begin on the day before (futures): a bar belongs to the last that has opened.
    placed = (
        times.alias("time")
        .to_frame()
        .join_asof(
            table.sort("open"), left_on="time", right_on="open", strategy="backward", coalesce=False
        )
    )
    time = pl.col("time")
    trading = (time <= pl.col("close")).fill_null(False)
    lunch = (time > pl.col("break_start")) & (time < pl.col("break_end"))
    on_day = time.dt.date().is_in(table["session"].cast(pl.Date).implode())
    return placed.select(
        "time",
        closed=~trading & ~on_day,
        outside=(~trading & on_day) | lunch.fill_null(False),
        first=(time == pl.col("open")).fill_null(False),
        last=(time == pl.col("close")).fill_null(False),
    )


def _wrong_zone(times: pl.Series, origin: str, info: SourceInfo) -> Problem | None:
    """One problem where the bars would lie within trading hours if read in another zone."""
    for zone in _ZONES:
        if zone == info.timezone:
            continue
        state = _place(times, info, zone)
        if state.select((pl.col("closed") | pl.col("outside")).mean()).item() <= _TOO_MANY:
            message = (
                f"the time zone looks wrong: the bars lie within the hours of {info.calendar} in "
                f"{zone}, not in {info.timezone}"
            )
            remedy = f"Write the times with their offset, or set data.timezone: {zone}"
            return Problem(origin, None, "time", message, remedy)
    return None


def _span(days: pl.Series) -> tuple[date, date]:
    first, last = days.min(), days.max()
    assert isinstance(first, date)
    assert isinstance(last, date)
    return first, last


def _time_text() -> pl.Expr:
    return pl.col("time").dt.strftime("%Y-%m-%d %H:%M:%S").str.strip_suffix(" 00:00:00")
