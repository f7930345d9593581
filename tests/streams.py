"""Markets to stream: whole in a store, cut in two, the second half as sets of bars."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import date, datetime
from pathlib import Path

import numpy as np
import polars as pl
from markets import FrameSource

from echelon.config import load_config
from echelon.data.build import PanelRequest, build_panel, read_bar_sets, stream_facts
from echelon.data.calendars import sessions
from echelon.data.datasets import ensure_dataset
from echelon.data.importing import import_source
from echelon.data.panel import Panel
from echelon.data.store import Store
from echelon.data.stream import BarSet, PanelStream, StreamState

A_SHARES = {"calendar": "XSHG", "timezone": "Asia/Shanghai", "price_basis": "raw"}
CODES = ("600000.SH", "300750.SZ", "688981.SH", "000001.SZ", "830799.BJ", "600519.SH", "002594.SZ")


@dataclass(frozen=True)
class StoredMarket:
    """A dataset and the request its panel is built by."""

    store: Store
    name: str
    request: PanelRequest

    def panel(self, end: datetime | None = None) -> Panel:
        """The whole panel, or its history up to `end`."""
        panel = build_panel(self.store, self.name, self.request)
        if end is None:
            return panel
        kept = int(np.searchsorted(panel.times, np.datetime64(end, "us"), side="right"))
        part = {
            f.name: getattr(panel, f.name)[:kept]
            for f in fields(panel)
            if isinstance(getattr(panel, f.name), np.ndarray) and f.name != "anchor"
        }
        return Panel(**{f.name: getattr(panel, f.name) for f in fields(panel)} | part)

    def stream(self, panel: Panel) -> PanelStream:
        """The stream behind `panel`."""
        end = panel.times[-1].item()
        return PanelStream.from_panel(panel, self.facts(end))

    def facts(self, end: datetime):  # noqa: ANN201
        return stream_facts(self.store, self.name, self.request, end)

    def bar_sets(self, after: datetime) -> list[BarSet]:
        return list(read_bar_sets(self.store, self.name, self.request, after))


def configured(root: Path, *overrides: str) -> StoredMarket:
    """A dataset of a configured source; few sessions of silence mean a delisting."""
    config = load_config(None, [f"data.store={root}/store", *overrides])
    name = ensure_dataset(config).name
    request = PanelRequest(limits=config.data.limits, delist_after=12)
    return StoredMarket(Store(config.data.store), name, request)


def sample(root: Path) -> StoredMarket:
    return configured(root, "data.source=sample")


def synthetic(root: Path, freq: str = "1d", days: int = 260) -> StoredMarket:
    """Raw prices with splits, dividends, suspensions, late listings and delistings."""
    return configured(
        root,
        *("data.source=synthetic", f"data.freq={freq}", "data.synthetic.n_symbols=12"),
        *(f"data.synthetic.n_days={days}", "data.synthetic.suspension_rate=0.02"),
        *("data.synthetic.split_rate=0.01", "data.synthetic.late_listings=0.4"),
        *("data.synthetic.delistings=0.3", "data.synthetic.index_size=5"),
    )


def a_share_bars(days: int, seed: int, gaps: float = 0.03, splits: float = 0.01) -> pl.DataFrame:
    """Raw A-share bars around a change of the boards' limits, with ties, splits and ST."""
    rng = np.random.default_rng(seed)
    times = sessions("XSHG", date(2020, 5, 6), date(2022, 6, 30))[:days]
    frames = []
    for k, code in enumerate(CODES):
        close = np.round(20 * np.exp(np.cumsum(rng.normal(0, 0.02, days))), 2) + 1.0
        open_ = np.round(close * np.exp(rng.normal(0, 0.005, days)), 2)
        ratio = np.where(rng.random(days) < splits, 1.5, 1.0)
        keep = rng.random(days) >= gaps
        keep[: days // 3 if k == 2 else 0] = False  # lists late
        keep[days // 2 : days // 2 + 20 if k == 3 else 0] = False  # silent, then back
        keep[3 * days // 4 if k == 5 else days :] = False  # leaves
        keep[days // 2 + 5 : 3 * days // 4 if k == 6 else 0] = False  # delisted within, then back
        volume = np.where(rng.random(days) < 0.05, 0.0, rng.integers(1, 50, days) * 100.0)
        last = np.r_[np.nan, close[:-1]]
        frame = pl.DataFrame(
            {
                "time": times,
                "symbol": [code] * days,
                "open": open_,
                "high": np.maximum(open_, close) + 0.05,
                "low": np.minimum(open_, close) - 0.05,
                "close": close,
                "volume": volume,
                "amount": np.where(rng.random(days) < 0.1, np.nan, close * volume),
                "factor": np.cumprod(ratio),
                "pre_close": np.where(rng.random(days) < 0.5, np.nan, last / ratio),
                "st": rng.random(days) < 0.2,
            }
        )
        frame = frame.with_columns(pl.col("amount", "pre_close").fill_nan(None))
        frames.append(frame.filter(pl.Series(keep)))
    return pl.concat(frames)


def a_shares(root: Path, days: int = 150, seed: int = 0, **more: float) -> StoredMarket:
    """A-shares with limits, special treatment, dated listings and delistings, changing members."""
    bars = a_share_bars(days, seed, **more)
    days_of = bars["time"].unique().sort().dt.date()

    def day(share: float) -> date:
        return days_of[int(share * (len(days_of) - 1))]

    first = bars.filter(symbol=CODES[2])["time"].min().date()
    instruments = pl.DataFrame(
        {
            "symbol": [CODES[2], CODES[5], CODES[6]],
            "listed": [first, date(2001, 8, 27), None],
            "delisted": [None, day(0.8), day(0.6)],  # the last trades on: back to life
            "reason": [None, "merger", "bankruptcy"],
        },
        {"symbol": pl.String, "listed": pl.Date, "delisted": pl.Date, "reason": pl.String},
    )
    membership = pl.DataFrame(
        {
            "symbol": [*CODES[:4], CODES[0], CODES[2]],
            "start": [day(0.0), day(0.1), day(0.2), day(0.0), day(0.7), day(0.9)],
            "end": [day(0.5), None, day(0.65), day(0.45), None, None],
        },
        {"symbol": pl.String, "start": pl.Date, "end": pl.Date},
    )
    benchmark = pl.DataFrame({"time": bars["time"].unique().sort()[5:]}).with_row_index("k")
    benchmark = benchmark.select("time", close=pl.col("k").cast(pl.Float64) * 3.3 + 1000.0)
    source = FrameSource(
        bars,
        membership=membership,
        instruments=instruments,
        benchmark=benchmark,
        **A_SHARES,
    )
    import_source(source, Store(root / "store"), "m")
    return StoredMarket(Store(root / "store"), "m", PanelRequest(symbols=CODES, delist_after=12))


MARKETS = {
    "sample": sample,
    "synthetic": synthetic,
    "a_shares": a_shares,
    "5min": lambda root: synthetic(root, "5min", 8),
    "1min": lambda root: synthetic(root, "1min", 2),
}


def same_state(a: StreamState, b: StreamState) -> bool:
    """Whether two states agree in every bit."""
    arrays = a.arrays.keys() == b.arrays.keys() and all(
        a.arrays[name].tobytes() == b.arrays[name].tobytes() for name in a.arrays
    )
    return arrays and a.facts == b.facts


def assert_row_equal(row: Panel, panel: Panel, t: int) -> None:
    """Every field of the row, in every bit, is the panel's at t."""
    assert row.shape == (1, panel.shape[1])
    for field in fields(panel):
        whole, mine = getattr(panel, field.name), getattr(row, field.name)
        if field.name == "anchor":
            seen = ~np.isnan(mine)
            np.testing.assert_array_equal(mine[seen], whole[seen])
            assert (seen | ~row.present[0]).all()
        elif isinstance(whole, np.ndarray):
            assert mine.dtype == whole.dtype, field.name
            np.testing.assert_array_equal(mine[0], whole[t], err_msg=f"{field.name} at {t}")
        elif field.name == "factor":  # 1 everywhere: None in the batch
            assert np.isin(mine[~np.isnan(mine)], 1.0).all()
        else:
            assert mine == whole, field.name
