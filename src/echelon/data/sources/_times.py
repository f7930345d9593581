"""Times as users write them → naive times local to the exchange.

Understood: dates and datetimes of any unit, text (2020-01-02, 20200102, 2020/1/2, 2020年1月2日,
each with or without a time of day and an offset), whole numbers (20200102, 20200102093500) and
Unix time in s, ms, µs or ns. What carries an offset is converted to the exchange's time zone;
what carries none is taken as local already. Day-first and month-first dates are not guessed at.
"""

from __future__ import annotations

import polars as pl

from echelon.types import Freq

UNDERSTOOD = "2020-01-02, 20200102, 2020/1/2, with or without 09:35:00 and an offset as in +08:00"

_FORMATS = (
    "%Y-%m-%d %H:%M:%S%.f",
    "%Y-%m-%d %H:%M",
    "%Y%m%d %H:%M:%S%.f",
    "%Y%m%d %H:%M",
    "%Y%m%d%H%M%S",
    "%Y%m%d%H%M",
    "%Y%m%d%H%M%S%3f",
)
_OFFSET = r"(?i)(?:Z|UTC|GMT|[+-]\d{2}(?::?\d{2})?)$"
_EPOCH = {10: 1_000_000, 13: 1_000, 16: 1}  # digits → µs per unit; 19 digits are ns
_YEARS = (1900, 2200)


def parse_times(cells: pl.Series, *, freq: Freq, timezone: str) -> pl.DataFrame:
    """Parse a column of times.

    Returns `time` (naive, exchange-local, null where nothing was understood) and `aware`
    (whether the cell said its offset; null where there was no time). A daily bar stamped at
    midnight of any zone means that date; it is not moved to the day before.
    """
    cells = drop_absurd(cells)
    dtype = cells.dtype
    daily = freq == "1d"
    if isinstance(dtype, pl.Date):
        parsed = pl.select(time=cells.cast(pl.Datetime("us")), aware=False)
    elif isinstance(dtype, pl.Datetime):
        cell = pl.col("cell").cast(pl.Datetime("us", dtype.time_zone))
        written = cell.dt.replace_time_zone(None)
        if dtype.time_zone is not None:
            local = cell.dt.convert_time_zone(timezone).dt.replace_time_zone(None)
            written = _date_as_wall_clock(written, local, daily)
        aware = dtype.time_zone is not None
        parsed = cells.to_frame("cell").select(time=written, aware=aware)
    else:
        parsed = _from_text(_as_text(cells), timezone, daily)
    known = pl.col("time").dt.year().is_between(*_YEARS)
    return parsed.select(
        time=pl.when(known).then(pl.col("time")),
        aware=pl.when(known).then(pl.col("aware")),
    )


def drop_absurd(cells: pl.Series) -> pl.Series:
    """Dates no market can have as null: beyond polars' own range a cast ends in a panic."""
    if not isinstance(cells.dtype, pl.Date | pl.Datetime):
        return cells
    known = pl.col("cell").dt.year().is_between(*_YEARS)
    frame = cells.to_frame("cell").select(pl.when(known).then(pl.col("cell")))
    return frame.to_series().rename(cells.name)


def join_clock(dates: pl.Series, clock: pl.Series) -> pl.Series:
    """Dates next to times of day (93500, 0935, 9:35), which may repeat the date → text of both."""
    dates = drop_absurd(dates)
    if isinstance(dates.dtype, pl.Datetime):
        dates = dates.cast(pl.Date)
    frame = pl.DataFrame({"date": _as_text(dates), "clock": _as_text(clock)}).with_columns(
        pl.all().str.strip_chars()
    )
    digits = pl.col("clock").str.contains(r"^\d{1,6}$")
    padded = (
        pl.when(pl.col("clock").str.len_bytes() > 4)
        .then(pl.col("clock").str.zfill(6))
        .otherwise(pl.col("clock").str.zfill(4) + "00")
    )
    spread = padded.str.replace(r"^(\d{2})(\d{2})(\d{2})$", "${1}:${2}:${3}")
    whole = pl.col("clock").str.contains(r"^\d{14}(?:\d{3})?$|^\d{4}[-/]")
    return frame.select(
        pl.when(whole)
        .then(pl.col("clock"))
        .when(digits)
        .then(pl.col("date") + " " + spread)
        .otherwise(pl.col("date") + " " + pl.col("clock"))
    ).to_series()


def _as_text(cells: pl.Series) -> pl.Series:
    if cells.dtype.is_float() or cells.dtype.is_decimal():  # pandas: whole numbers with gaps
        whole = cells.cast(pl.Int64, strict=False)
        text = whole.cast(pl.String)
        return text.set(cells != whole.cast(pl.Float64), "not a whole number")
    return cells.cast(pl.String)


def _date_as_wall_clock(written: pl.Expr, local: pl.Expr, daily: bool) -> pl.Expr:
    if not daily:
        return local
    at_midnight = written == written.dt.truncate("1d")
    return pl.when(at_midnight).then(written).otherwise(local)


def _uniform(cells: pl.Series) -> pl.Series | None:
    """The common case, fast: every cell in one plain form; None where that is not so."""
    length = cells.str.len_bytes()
    if length.min() is None or length.min() != length.max():
        return None
    form = {10: "%Y-%m-%d", 8: "%Y%m%d", 19: "%Y-%m-%d %H:%M:%S"}.get(int(length[0] or 0))
    if form is None:
        return None
    times = cells.str.strptime(pl.Datetime("us"), form, strict=False)
    return times if times.null_count() == cells.null_count() else None


def _from_text(cells: pl.Series, timezone: str, daily: bool) -> pl.DataFrame:
    plain = _uniform(cells)
    if plain is not None:
        return pl.select(time=plain, aware=False)
    # Dates repeat across symbols: parse each distinct text once.
    frame = cells.rename("cell").to_frame()
    distinct = frame.unique().with_columns(text=pl.col("cell").str.strip_chars())
    has_clock = pl.col("text").str.contains(":", literal=True)
    distinct = distinct.with_columns(
        offset=pl.when(has_clock).then(pl.col("text").str.extract(f"({_OFFSET})"))
    ).with_columns(
        body=pl.when(pl.col("offset").is_null())
        .then(pl.col("text"))
        .otherwise(pl.col("text").str.replace(_OFFSET, ""))
        .str.strip_chars()
        .str.replace(r"^(\d{4})\s*[/.年]\s*(\d{1,2})\s*[/.月]\s*(\d{1,2})日?", "${1}-${2}-${3}")
        .str.replace(r"^([\d-]{8,10})[T\s]+(\d)", "${1} ${2}")
    )
    parsed = distinct.with_columns(written=_wall_clock(), epoch=_epoch()).with_columns(
        utc=pl.coalesce(
            "epoch",
            pl.when(pl.col("offset").is_not_null()).then(pl.col("written") - _offset()),
        )
    )
    local = (
        pl.col("utc")
        .dt.replace_time_zone("UTC")
        .dt.convert_time_zone(timezone)
        .dt.replace_time_zone(None)
    )
    as_written = pl.coalesce("written", "epoch")
    table = parsed.select(
        "cell",
        aware=pl.col("utc").is_not_null(),
        time=pl.when(pl.col("utc").is_null())
        .then(pl.col("written"))
        .otherwise(_date_as_wall_clock(as_written, local, daily)),
    )
    return frame.join(table, on="cell", how="left", nulls_equal=True, maintain_order="left")


def _wall_clock() -> pl.Expr:
    """The wall clock in `body`, whatever its zone."""
    body = pl.col("body")
    dates = [
        body.str.to_date(f, strict=False).cast(pl.Datetime("us")) for f in ("%Y-%m-%d", "%Y%m%d")
    ]
    moments = [body.str.to_datetime(f, time_unit="us", strict=False) for f in _FORMATS]
    # 2020112 may be 1-12 or 11-2: digits alone must be complete.
    incomplete = body.str.contains(r"^\d+$") & ~body.str.len_bytes().is_in([8, 12, 14, 17])
    return pl.when(~incomplete).then(pl.coalesce(*dates, *moments))


def _epoch() -> pl.Expr:
    """Unix time as UTC: all its forms begin with 1 until 2033, and none is as long as a date."""
    body = pl.col("body")
    digits = body.str.len_bytes()
    number = pl.when(body.str.contains(r"^1\d+$")).then(body).cast(pl.Int64, strict=False)
    scaled = [pl.when(digits == n).then(number * scale) for n, scale in _EPOCH.items()]
    micros = pl.coalesce(pl.when(digits == 19).then(number // 1000), *scaled)
    return pl.from_epoch(micros, time_unit="us").cast(pl.Datetime("us"))


def _offset() -> pl.Expr:
    """`offset` as a duration: Z → 0, +08:00, −0500."""
    part = pl.col("offset").str.extract_groups(r"([+-])(\d{2}):?(\d{2})?")
    hours = part.struct[1].cast(pl.Int64).fill_null(0)
    minutes = part.struct[2].cast(pl.Int64).fill_null(0)
    sign = pl.when(part.struct[0] == "-").then(-1).otherwise(1)
    return pl.duration(minutes=sign * (hours * 60 + minutes))
