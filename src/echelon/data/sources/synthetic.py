"""The `synthetic` source: bars of a seeded market whose hidden truth is known.

The market itself is made in `echelon.data.synth`; this file turns it into canonical bars. All
frequencies come from one path of minutes: a 5-minute or a daily bar is exactly the aggregate of
its minute bars. Prices are raw: they jump on ex-dates, and `factor` and `pre_close` say by how
much.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import date, datetime
from functools import cached_property

import numpy as np
import polars as pl

from echelon.config import Config, SyntheticConfig
from echelon.data.bars import PRICES, RawFrame, conform
from echelon.data.calendars import FROM_DATA
from echelon.data.sources import Source
from echelon.data.synth import minutes
from echelon.data.synth.index import MembershipSpan, index_levels, index_membership
from echelon.data.synth.market import GENERATOR_VERSION, SECTORS, SyntheticMarket, build_market
from echelon.data.synth.path import TICKS_PER_UNIT, SymbolPath, trace
from echelon.errors import ConfigError, DataError
from echelon.sources import SourceInfo
from echelon.types import Freq

_FRAME_ROWS = 250_000
FIELDS = frozenset({*PRICES, "volume", "amount", "factor", "pre_close"})


class SyntheticSource(Source):
    """Bars of the market that `config` and `seed` name; `config.seed`, where set, wins."""

    def __init__(
        self,
        config: SyntheticConfig,
        seed: int,
        freq: Freq = "1d",
        calendar: str = "XNYS",
    ) -> None:
        self._config = config
        self._seed = seed if config.seed is None else config.seed
        self._freq = freq
        self._calendar = calendar

    @cached_property
    def market(self) -> SyntheticMarket:
        """The latent state: regimes, factors, true parameters, lives of the symbols."""
        return build_market(self._config, self._seed, self._calendar)

    @cached_property
    def _engine(self) -> minutes.MinuteEngine:
        return minutes.MinuteEngine(self.market)

    @property
    def _step(self) -> int:
        daily = self._config.minutes_per_day
        return {"1min": 1, "5min": min(5, daily), "1d": daily}[self._freq]

    def info(self) -> SourceInfo:
        """Describe the market; the fingerprint is that of its parameters and of the generator."""
        what = {
            "config": self._config.model_dump(mode="json", exclude={"seed"}),
            "seed": self._seed,
            "freq": self._freq,
            "calendar": self._calendar,
            "generator": GENERATOR_VERSION,
        }
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        return SourceInfo(
            name="synthetic",
            freq=self._freq,
            calendar=self._calendar,
            timezone=self.market.clock.timezone,
            price_basis="raw",
            fields=FIELDS,
            fingerprint=digest,
        )

    def frames(self, since: Mapping[str, datetime] | None = None) -> Iterator[RawFrame]:
        """Yield the bars symbol by symbol, each symbol's in order of time; all of them, always."""
        frames: list[pl.DataFrame] = []
        held = row = 0
        for n in range(self.market.n_symbols):
            path = trace(self.market, n)
            for bars in self._pieces(path):
                frames.append(self._to_frame(path, bars))
                held += len(frames[-1])
                if held >= _FRAME_ROWS:
                    yield self._raw(frames, row)
                    row, held, frames = row + held, 0, []
        if frames:
            yield self._raw(frames, row)

    def _pieces(self, path: SymbolPath) -> Iterator[minutes.BarBlock]:
        """Bars of one symbol, in pieces of at most about `_FRAME_ROWS` rows."""
        blocks: list[minutes.BarBlock] = []
        for block in range(self._engine.n_blocks):
            made = self._engine.block(path, block)
            if made is None:
                continue
            blocks.append(minutes.aggregate(made, self._step))
            if sum(b.close.size for b in blocks) >= _FRAME_ROWS:
                yield minutes.join(blocks)
                blocks = []
        if blocks:
            yield minutes.join(blocks)

    def _raw(self, frames: list[pl.DataFrame], first_row: int) -> RawFrame:
        frame = pl.concat(frames).with_row_index("row", offset=first_row)
        return RawFrame(frame=conform(frame), origin=f"synthetic market, seed {self._seed}")

    def _to_frame(self, path: SymbolPath, bars: minutes.BarBlock) -> pl.DataFrame:
        clock = self.market.clock
        ends = clock.bar_ends(self._step)
        if self._freq == "1d":
            ends = np.zeros_like(ends)
        # A session that closes early has fewer bars.
        shown = clock.has_bar(bars.days, self._step)
        n_bars, reference = shown.sum(axis=1), path.pre_ticks[bars.days] / TICKS_PER_UNIT
        return pl.DataFrame(
            {
                "time": (clock.midnights[bars.days][:, None] + ends)[shown],
                **{name: getattr(bars, name)[shown] / TICKS_PER_UNIT for name in PRICES},
                "volume": bars.lots[shown] * 100.0,
                "amount": bars.amount[shown],
                "factor": np.repeat(path.factor[bars.days], n_bars),
                "pre_close": np.repeat(reference, n_bars),
            }
        ).with_columns(symbol=pl.lit(self.market.symbols[path.n]))

    def instruments(self) -> pl.DataFrame:
        """First day, first day after the last, reason for leaving and name of every symbol."""
        market = self.market
        days: list[date] = market.clock.sessions.tolist()
        return pl.DataFrame(
            {
                "symbol": market.symbols,
                "listed": [days[d] for d in market.listed],
                "delisted": [days[d] if d < market.n_days else None for d in market.delisted],
                "reason": market.reasons,
                "name": [f"Synthetic {SECTORS[k]} {n}" for n, k in enumerate(market.sector)],
            },
            schema_overrides={"listed": pl.Date, "delisted": pl.Date, "reason": pl.String},
        )

    def membership(self) -> pl.DataFrame:
        days: list[date] = self.market.clock.sessions.tolist()
        rows = [
            (self.market.symbols[n], days[start], None if end is None else days[end])
            for n, start, end in self._intervals
        ]
        schema = {"symbol": pl.String, "start": pl.Date, "end": pl.Date}
        return pl.DataFrame(rows, schema=schema, orient="row")

    @cached_property
    def _intervals(self) -> tuple[MembershipSpan, ...]:
        return index_membership(self.market)

    def benchmark(self) -> pl.DataFrame:
        """Total-return level of the capitalisation-weighted index, at the end of each bar."""
        clock = self.market.clock
        if self._freq == "1d":
            level = index_levels(self.market, self._intervals)
            return pl.DataFrame({"time": clock.midnights, "close": level})
        time = clock.midnights[:, None] + clock.bar_ends(self._step)
        level = index_levels(self.market, self._intervals, self._step)
        shown = clock.has_bar(np.arange(self.market.n_days), self._step)
        return pl.DataFrame({"time": time[shown], "close": level[shown]})

    def order_book(self, symbol: str, session: date) -> minutes.OrderBook:
        """Five levels of `symbol` at the end of each minute of `session`."""
        day = self.market.clock.day_of(session)
        if day is None:
            first, last = self.market.clock.sessions[[0, -1]]
            raise DataError(
                f"{session} is no session of this market, which has the sessions of "
                f"{self._calendar} from {first} to {last}"
            )
        return minutes.order_book(self._engine, symbol, day)


def from_config(config: Config) -> SyntheticSource:
    data = config.data
    if data.calendar == FROM_DATA:
        raise ConfigError(
            "data.calendar is 'data', but data.source 'synthetic' has no days of its own to take "
            "it from. Set an exchange code such as XNYS or XSHG, or 24/7."
        )
    calendar = "XNYS" if data.calendar == "auto" else data.calendar
    return SyntheticSource(data.synthetic, config.seed, data.freq, calendar)
