"""The synthetic market: exact aggregation, determinism, events, index and order book."""

from __future__ import annotations

from datetime import date, datetime
from functools import cache

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from echelon.config import SyntheticConfig, load_config
from echelon.data.bars import PRICES, SCHEMA
from echelon.data.sources import Source, synthetic
from echelon.data.sources.synthetic import SyntheticSource
from echelon.data.synth.index import index_levels, index_membership
from echelon.data.synth.market import SyntheticMarket, build_market
from echelon.data.synth.path import trace
from echelon.errors import ConfigError, DataError, UniverseError
from echelon.types import Freq

SEEDS = (0, 1, 2, 3, 4, 5)
CALM = {"delistings": 0.0, "late_listings": 0.0, "suspension_rate": 0.0}
EVENTFUL = SyntheticConfig(
    n_symbols=12,
    n_days=300,
    delistings=0.34,
    late_listings=0.34,
    suspension_rate=0.02,
    split_rate=0.01,
    dividend_yield=0.04,
    minutes_per_day=30,
    index_size=5,
)


def bars(source: SyntheticSource) -> pl.DataFrame:
    return pl.concat([raw.frame for raw in source.frames()])


@cache
def eventful(freq: Freq = "1d") -> tuple[SyntheticSource, pl.DataFrame]:
    source = SyntheticSource(EVENTFUL, seed=3, freq=freq)
    return source, bars(source)


def aggregated(minutes: pl.DataFrame, by: pl.Expr) -> pl.DataFrame:
    """The obvious twin of the generator's own aggregation: group the minute bars by `by`."""
    return (
        minutes.group_by("symbol", by.alias("bar"), maintain_order=True)
        .agg(
            pl.col("time").last(),
            pl.col("open").first(),
            pl.col("high").max(),
            pl.col("low").min(),
            pl.col("close").last(),
            pl.col("volume", "amount").sum(),
            pl.col("factor", "pre_close").last(),
        )
        .drop("bar")
    )


def test_daily_bars_are_bit_for_bit_the_aggregate_of_minutes() -> None:
    _, daily = eventful("1d")
    _, minutes = eventful("1min")
    made = aggregated(minutes, pl.col("time").dt.date())
    made = made.with_columns(pl.col("time").dt.truncate("1d"))
    assert_frame_equal(made, daily.select(made.columns), check_exact=True)


@pytest.mark.parametrize("minutes_per_day", [30, 33, 3])
def test_five_minute_bars_are_bit_for_bit_the_aggregate_of_minutes(minutes_per_day: int) -> None:
    config = EVENTFUL.model_copy(update={"n_days": 70, "minutes_per_day": minutes_per_day})
    minutes = bars(SyntheticSource(config, 3, "1min"))
    fives = bars(SyntheticSource(config, 3, "5min"))
    since_open = (pl.col("time") - pl.col("time").dt.truncate("1d")).dt.total_minutes() - 571
    made = aggregated(
        minutes, pl.col("time").dt.truncate("1d") + pl.duration(minutes=since_open // 5)
    )
    assert_frame_equal(made, fives.select(made.columns), check_exact=True)


def test_full_sessions_aggregate_exactly_too() -> None:
    config = SyntheticConfig(n_symbols=2, n_days=10, **CALM)
    daily, minutes = (bars(SyntheticSource(config, 9, f)) for f in ("1d", "1min"))
    made = aggregated(minutes, pl.col("time").dt.date())
    made = made.with_columns(pl.col("time").dt.truncate("1d"))
    assert_frame_equal(made, daily.select(made.columns), check_exact=True)
    times = minutes.filter(pl.col("symbol") == "S0000")["time"].to_list()
    assert (times[0].hour, times[0].minute) == (9, 31)
    assert (times[239].hour, times[239].minute) == (13, 30)


def test_session_that_closes_early_has_fewer_bars_and_still_aggregates_exactly() -> None:
    config = SyntheticConfig(n_symbols=3, n_days=10, start=date(2015, 11, 23), **CALM)
    sources = {f: SyntheticSource(config, 9, f) for f in ("1d", "5min", "1min")}
    daily, fives, minutes = (bars(s) for s in sources.values())
    made = aggregated(minutes, pl.col("time").dt.date())
    made = made.with_columns(pl.col("time").dt.truncate("1d"))
    assert_frame_equal(made, daily.select(made.columns), check_exact=True)
    short = pl.col("time").dt.date() == date(2015, 11, 27)
    assert len(minutes.filter(short)) == 3 * 210
    assert len(minutes.filter(~short)) == 3 * 9 * 240
    assert len(fives.filter(short)) == 3 * 42
    assert minutes.filter(short)["time"].max() == datetime(2015, 11, 27, 13, 0)
    assert (minutes["volume"] >= 100).all()
    for freq, frame in (("5min", fives), ("1min", minutes)):
        assert set(sources[freq].benchmark()["time"]) == set(frame["time"])
    book = sources["1d"].order_book("S0001", date(2015, 11, 27))
    shown = minutes.filter(short & (pl.col("symbol") == "S0001"))
    assert book.close.tolist() == shown["close"].to_list()
    assert book.time.tolist() == shown["time"].to_list()


def test_prices_are_ticks_and_volumes_are_lots() -> None:
    _, daily = eventful()
    for name in (*PRICES, "pre_close"):
        assert (daily[name] == daily[name].round(2)).all()
    assert (daily["volume"] % 100 == 0).all()
    assert (daily["amount"] % 1 == 0).all()
    average = daily["amount"] / daily["volume"]
    assert (average >= daily["low"]).all()
    assert (average <= daily["high"]).all()


def test_frame_is_canonical_sorted_and_unique() -> None:
    source, daily = eventful()
    assert isinstance(source, Source)
    assert daily.columns == [*SCHEMA, "row"]
    assert [daily.schema[c] for c in SCHEMA] == list(SCHEMA.values())
    assert daily["row"].to_list() == list(range(len(daily)))
    assert daily.select("symbol", "time").is_unique().all()
    assert daily.drop("st").null_count().sum_horizontal().item() == 0
    assert daily.select("symbol", "time").equals(
        daily.select("symbol", "time").sort("symbol", "time")
    )


def test_same_seed_gives_the_same_bars_and_another_seed_others() -> None:
    _, daily = eventful()
    again = bars(SyntheticSource(EVENTFUL, 3))
    assert_frame_equal(daily, again, check_exact=True)
    other = bars(SyntheticSource(EVENTFUL, 4))
    assert daily["close"].head(50).to_list() != other["close"].head(50).to_list()


def test_seed_of_the_config_wins() -> None:
    config = EVENTFUL.model_copy(update={"seed": 3})
    assert SyntheticSource(config, 99).info() == eventful()[0].info()
    assert SyntheticSource(EVENTFUL, 99).info() != eventful()[0].info()


@pytest.mark.parametrize("freq", ["1d", "1min"])
def test_path_does_not_depend_on_the_pieces_it_is_read_in(
    freq: Freq, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EVENTFUL.model_copy(update={"n_days": 100, "n_symbols": 5})
    whole = list(SyntheticSource(config, 5, freq).frames())
    monkeypatch.setattr(synthetic, "_FRAME_ROWS", 20)
    pieces = list(SyntheticSource(config, 5, freq).frames())
    assert len(whole) == 1
    assert len(pieces) > 5
    assert_frame_equal(whole[0].frame, pl.concat([p.frame for p in pieces]), check_exact=True)


def test_symbol_is_the_same_in_a_larger_and_in_a_longer_market() -> None:
    config = SyntheticConfig(n_symbols=3, n_days=90, minutes_per_day=20, **CALM)
    small = bars(SyntheticSource(config, 5)).drop("row")
    larger = bars(SyntheticSource(config.model_copy(update={"n_symbols": 9}), 5)).drop("row")
    longer = bars(SyntheticSource(config.model_copy(update={"n_days": 200}), 5)).drop("row")
    known = small["symbol"].unique().to_list()
    assert_frame_equal(larger.filter(pl.col("symbol").is_in(known)), small, check_exact=True)
    past = longer.filter(pl.col("time") <= small["time"].max())
    assert_frame_equal(past, small, check_exact=True)


def test_market_parameters_change_the_fingerprint() -> None:
    base = SyntheticSource(EVENTFUL, 3).info().fingerprint
    others = {
        SyntheticSource(EVENTFUL, 4).info().fingerprint,
        SyntheticSource(EVENTFUL, 3, "5min").info().fingerprint,
        SyntheticSource(EVENTFUL.model_copy(update={"n_days": 301}), 3).info().fingerprint,
    }
    assert len(others | {base}) == 4


def test_splits_and_dividends_jump_raw_and_leave_total_return_smooth() -> None:
    market = eventful()[0].market
    seen = 0
    for n in range(market.n_symbols):
        path = trace(market, n)
        days = np.flatnonzero(path.trades)
        for day, ratio, cash in path.actions:
            before = days[np.searchsorted(days, day) - 1]
            close, reference = path.close_ticks[before], path.pre_ticks[day]
            assert reference == pytest.approx((close - 100 * cash) / ratio, abs=0.5001)
            step = path.factor[day] / path.factor[before]
            assert step == pytest.approx(close / reference, rel=1e-12)
            assert path.shares[day] == pytest.approx(path.shares[before] * ratio)
            # The total return across the ex-date is the latent one, up to rounding to ticks.
            total = np.log(path.close_ticks[day] * path.factor[day])
            total -= np.log(close * path.factor[before])
            latent = path.log_close[day] - path.log_close[before]
            assert total == pytest.approx(latent, abs=2.0 / min(close, path.close_ticks[day]))
            if ratio >= 1.5:
                assert path.close_ticks[day] / close < 0.85
            seen += 1
    assert seen > 20


def test_pre_close_is_the_last_close_where_nothing_happens() -> None:
    market = eventful()[0].market
    for n in range(market.n_symbols):
        path = trace(market, n)
        days = np.flatnonzero(path.trades)
        plain = np.setdiff1d(days[1:], [a.day for a in path.actions])
        before = days[np.searchsorted(days, plain) - 1]
        np.testing.assert_array_equal(path.pre_ticks[plain], path.close_ticks[before])
        np.testing.assert_array_equal(path.factor[plain], path.factor[before])
        assert path.factor[days[0]] == 1.0


def test_cheap_shares_are_consolidated_only_where_there_are_splits() -> None:
    base = SyntheticConfig(n_symbols=40, n_days=1500, **CALM | {"delistings": 1.0})
    with_splits = build_market(base, 8)
    without = build_market(base.model_copy(update={"split_rate": 0.0}), 8)
    ratios = [a.ratio for n in range(40) for a in trace(with_splits, n).actions]
    assert 0.1 in ratios
    assert all(a.ratio == 1.0 for n in range(40) for a in trace(without, n).actions)
    assert min(np.nanmin(trace(without, n).close_ticks) for n in range(40)) < 200


def test_delisted_symbols_keep_their_history_and_have_a_reason() -> None:
    source, daily = eventful()
    facts = source.instruments()
    assert facts.schema["listed"] == facts.schema["delisted"] == pl.Date
    gone = facts.filter(pl.col("delisted").is_not_null())
    assert len(gone) == 4
    assert set(gone["reason"]) <= {"merger", "bankruptcy"}
    assert facts.filter(pl.col("delisted").is_null())["reason"].null_count() == 8
    for row in facts.iter_rows(named=True):
        days = daily.filter(pl.col("symbol") == row["symbol"])["time"].dt.date()
        assert len(days) > 0
        assert days.min() == row["listed"]
        if row["delisted"] is not None:
            assert days.max() < row["delisted"]
    late = facts.filter(pl.col("listed") > source.market.clock.sessions[0].item())
    assert len(late) == 4


def test_mergers_end_at_a_premium_and_bankruptcies_in_a_slide() -> None:
    config = SyntheticConfig(n_symbols=40, n_days=600, **CALM | {"delistings": 1.0})
    market = build_market(config, 6)
    final: dict[str, list[float]] = {"merger": [], "bankruptcy": []}
    for n in range(40):
        path, reason = trace(market, n), market.reasons[n]
        start = max(path.listed, path.delisted - 61)
        assert reason is not None
        final[reason].append(path.log_close[path.delisted - 1] - path.log_close[start])
    assert min(map(len, final.values())) > 5
    assert 0.0 < np.mean(final["merger"]) < 0.5
    assert np.mean(final["bankruptcy"]) < -0.5


def test_suspended_days_have_no_rows_and_every_other_day_has_one() -> None:
    source, daily = eventful()
    market, total = source.market, 0
    sessions = market.clock.sessions
    for n, symbol in enumerate(market.symbols):
        path = trace(market, n)
        expected = set(range(path.listed, path.delisted))
        for gap in path.suspensions:
            assert path.listed < gap.start < gap.end <= path.delisted
            expected -= set(range(gap.start, gap.end))
            total += gap.end - gap.start
        days = daily.filter(pl.col("symbol") == symbol)["time"].dt.date().to_list()
        assert days == [sessions[d].item() for d in sorted(expected)]
    assert total > 50


def test_membership_intervals_are_valid_and_fill_the_index() -> None:
    source, _ = eventful()
    market, table = source.market, source.membership()
    assert table.schema == {"symbol": pl.String, "start": pl.Date, "end": pl.Date}
    assert (table["end"].drop_nulls() > table["start"].filter(table["end"].is_not_null())).all()
    member = np.zeros((market.n_days, market.n_symbols), dtype=int)
    for n, start, end in index_membership(market):
        member[start:end, n] += 1
    assert member.max() == 1, "intervals of one symbol overlap"
    days = np.arange(market.n_days)[:, None]
    assert not member[(days < market.listed) | (days >= market.delisted)].any()
    alive = ((days > market.listed) | (market.listed == 0)) & (days < market.delisted)
    np.testing.assert_array_equal(member.sum(axis=1), np.minimum(5, alive.sum(axis=1)))
    assert len(table) > 5, "the index never changed"


def test_membership_is_decided_without_the_future() -> None:
    config = SyntheticConfig(n_symbols=12, n_days=130, index_size=4, **CALM)
    for seed in SEEDS:
        short = build_market(config, seed)
        longer = build_market(config.model_copy(update={"n_days": 400}), seed)
        past = {
            (n, start, end if end is not None and end < 130 else None)
            for n, start, end in index_membership(longer)
            if start < 130
        }
        assert past == set(index_membership(short))


def naive_levels(market: SyntheticMarket) -> list[float]:
    """Index levels the slow, obvious way: day by day, member by member."""
    paths = [trace(market, n) for n in range(market.n_symbols)]
    intervals = index_membership(market)
    worth: dict[int, tuple[float, float]] = {}  # n → last total-return price, capitalisation
    level, levels = 1000.0, []
    for day in range(market.n_days):
        top = bottom = 0.0
        members = [n for n, a, b in intervals if a <= day and (b is None or day < b)]
        for n, p in enumerate(paths):
            if day == p.listed:
                worth[n] = (p.pre_ticks[day], p.pre_ticks[day] * p.shares[day])
            price = p.close_ticks[day] * p.factor[day] if p.trades[day] else worth.get(n, (0,))[0]
            if n in members:
                top += worth[n][1] * price / worth[n][0]
                bottom += worth[n][1]
            if p.trades[day]:
                worth[n] = (price, p.close_ticks[day] * p.shares[day])
        level *= top / bottom
        levels.append(level)
    return levels


def test_benchmark_is_the_capitalisation_weighted_return_of_members() -> None:
    source, _ = eventful()
    table = source.benchmark()
    assert table.schema == {"time": pl.Datetime("us"), "close": pl.Float64}
    assert len(table) == 300
    np.testing.assert_allclose(table["close"], naive_levels(source.market), rtol=1e-10)


def test_intraday_benchmark_closes_at_the_daily_level() -> None:
    source, minutes = eventful("5min")
    table = source.benchmark()
    assert set(minutes["time"]) <= set(table["time"])
    daily = index_levels(source.market, index_membership(source.market))
    last = table.group_by(pl.col("time").dt.date(), maintain_order=True).last()["close"]
    np.testing.assert_allclose(last, daily, rtol=1e-10)


def test_order_book_brackets_each_close_with_five_ordered_levels() -> None:
    source, _ = eventful()
    _, minutes = eventful("1min")
    checked = 0
    for n, symbol in enumerate(source.market.symbols):
        for day in np.flatnonzero(trace(source.market, n).trades)[::40]:
            session = source.market.clock.sessions[day].item()
            book = source.order_book(symbol, session)
            assert book.bid_price.shape == book.ask_size.shape == (30, 5)
            shown = minutes.filter(
                (pl.col("symbol") == symbol) & (pl.col("time").dt.date() == session)
            )
            assert shown["close"].to_list() == book.close.tolist()
            assert shown["time"].to_list() == book.time.tolist()
            bid, ask = book.bid_price[:, 0], book.ask_price[:, 0]
            assert ((bid <= book.close) & (book.close <= ask) & (bid < ask)).all()
            assert (np.diff(book.bid_price, axis=1) < 0).all()
            assert (np.diff(book.ask_price, axis=1) > 0).all()
            assert (book.bid_price > 0).all()
            assert ((book.bid_size >= 100) & (book.ask_size >= 100)).all()
            assert (np.concatenate([book.bid_size, book.ask_size]) % 100 == 0).all()
            checked += 1
    assert checked > 50


def test_order_book_is_deterministic_and_deeper_in_larger_companies() -> None:
    config = SyntheticConfig(n_symbols=30, n_days=64, **CALM)
    source = SyntheticSource(config, 11)
    session = source.market.clock.sessions[40].item()
    again = SyntheticSource(config, 11).order_book("S0007", session)
    for one, other in zip(source.order_book("S0007", session), again, strict=True):
        np.testing.assert_array_equal(one, other)
    depth, lots, spread, noise = [], [], [], []
    for n, symbol in enumerate(source.market.symbols):
        book, path = source.order_book(symbol, session), trace(source.market, n)
        depth.append(book.bid_size.mean() + book.ask_size.mean())
        lots.append(path.lots[40])
        spread.append((book.ask_price[:, 0] - book.bid_price[:, 0]).mean())
        noise.append(path.session_volatility[40] * path.close_ticks[40])
    assert np.corrcoef(np.log(depth), np.log(lots))[0, 1] > 0.7
    assert np.corrcoef(spread, noise)[0, 1] > 0.7


def test_order_book_of_a_closed_or_suspended_day_is_refused() -> None:
    source, _ = eventful()
    market = source.market
    with pytest.raises(DataError, match="no session"):
        source.order_book("S0000", date(2015, 1, 10))
    with pytest.raises(UniverseError, match="unknown symbol 'IBM'"):
        source.order_book("IBM", date(2015, 1, 5))
    n = int(np.argmax(market.listed))
    with pytest.raises(DataError, match="does not trade"):
        source.order_book(market.symbols[n], date(2015, 1, 5))


def test_impossible_markets_are_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="room for 390 minute bars"):
        SyntheticSource(SyntheticConfig(minutes_per_day=391), 1).info()
    with pytest.raises(ConfigError, match="greater than or equal to 0"):
        load_config(overrides=["data.synthetic.seed=-1"])
    with pytest.raises(ConfigError, match="take fewer days"):
        SyntheticSource(SyntheticConfig(n_days=9000), 1, calendar="XSHG").info()


def test_lunch_break_of_the_exchange_is_left_out() -> None:
    config = SyntheticConfig(n_symbols=1, n_days=2, **CALM)
    source = SyntheticSource(config, 1, "5min", calendar="XSHG")
    ends = bars(source)["time"].dt.strftime("%H:%M").to_list()[:48]
    assert source.info().timezone == "Asia/Shanghai"
    assert (ends[0], ends[23], ends[24], ends[-1]) == ("09:35", "11:30", "13:05", "15:00")


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n_symbols=st.integers(1, 5),
    n_days=st.integers(1, 150),
    minutes=st.integers(1, 40),
    share=st.floats(0, 1),
    rate=st.floats(0, 0.99),
    payout=st.floats(0, 0.99),
    freq=st.sampled_from(["1d", "5min", "1min"]),
)
def test_any_market_has_consistent_bars(
    seed: int,
    n_symbols: int,
    n_days: int,
    minutes: int,
    share: float,
    rate: float,
    payout: float,
    freq: Freq,
) -> None:
    config = SyntheticConfig(
        n_symbols=n_symbols,
        n_days=n_days,
        minutes_per_day=minutes,
        delistings=share,
        late_listings=1 - share,
        suspension_rate=rate,
        split_rate=rate,
        dividend_yield=payout,
        index_size=2,
    )
    source = SyntheticSource(config, seed, freq)
    frame = bars(source)
    assert frame["symbol"].n_unique() == n_symbols
    for name in (*PRICES, "factor", "pre_close", "amount"):
        assert frame[name].is_finite().all()
        assert (frame[name] > 0).all()
    assert (frame["low"] <= frame.select(pl.min_horizontal("open", "close")).to_series()).all()
    assert (frame["high"] >= frame.select(pl.max_horizontal("open", "close")).to_series()).all()
    assert (frame["volume"] >= 0).all()
    level = source.benchmark()["close"]
    assert level.is_finite().all()
    assert (level > 0).all()
    for n, start, end in index_membership(source.market):
        assert source.market.listed[n] <= start < (end or n_days)
