"""The whole line on a drawn market: a file of bars like a user's, and everything that follows.

    bars.parquet       one draw, as daily bars with highs, lows and volumes
    store/             the bars as imported
    run/               prepared set, trained agents, evaluations: a run directory like any other
    registry/          trials and looks at the test window

Only what a draw cannot have is taken from a configuration; features and costs stay.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import polars as pl

from echelon.config import Config
from echelon.config.agents import LoggingConfig
from echelon.config.data import CacheConfig, DataConfig
from echelon.config.features import FeaturesConfig, IndicatorsConfig, StationaryConfig
from echelon.config.tree import SplitConfig
from echelon.features import prepare
from echelon.files import write_atomic
from echelon.proving.worlds import Draw
from echelon.rng import stream
from echelon.runs import RunDirectory
from echelon.training.loop import Outcome, Progress
from echelon.training.run import SeedJob, TrainedRun, train_seed
from echelon.workers import Report, ShouldStop

FIRST = date(2000, 1, 3)
"""The first bar; every weekday after it is one."""
_SHARES = 1.0e6
"""Shares of an asset traded in an ordinary bar: at a price of 100, a hundred million."""
_VOLUME_SPREAD = 0.4
"""Standard deviation of the logarithm of volumes, beyond what large moves bring."""


def on_file(
    config: Config, directory: Path, bars: Path, windows: Mapping[str, tuple[int, int]], seed: int
) -> Config:
    """The configuration on a file of bars. windows: first row of each, row after its last"""
    data = DataConfig(
        source="parquet",
        path=bars,
        calendar="data",
        store=directory / "store",
        cache=CacheConfig(enabled=False),
    )
    spans = {
        name: tuple(np.busday_offset(np.datetime64(FIRST), [first, stop - 1]).tolist())
        for name, (first, stop) in windows.items()
    }
    # Without the user's own features; the stationary set where none is left.
    features = config.features.model_copy(update={"modules": (), "custom": ()})
    some = features.ohlcv or features.wants_stationary or features.indicators != IndicatorsConfig()
    if not some:
        features = FeaturesConfig(stationary=StationaryConfig(enabled=True))
    # The forecaster is part of the line that is proved; the others only cost time.
    baselines = ("equal_weight", *(n for n in config.eval.baselines if n == "forecast"))
    fresh = {
        "seed": seed,
        "assets": (),
        "data": data,
        # A file of bars like a user's, but of no exchange.
        "market": config.market.model_copy(update={"preset": config.market.preset_for(None)}),
        "split": SplitConfig(**spans),
        "features": features,
        "eval": config.eval.model_copy(update={"baselines": baselines}),
        "logging": LoggingConfig(output_dir=directory),
    }
    return config.model_copy(update=fresh)


def write_bars(path: Path, draw: Draw, seed: int) -> Path:
    """Write a draw as a file of daily bars, as a user has one.

    Between open and close a log price moves like a Brownian bridge with the variance v of the
    asset's day moves m. Its maximum exceeds h with probability exp(−2h(h − m)/v), so that
    h = (m + sqrt(m² − 2v log U))/2 is a high over the open, and lows likewise. Volumes are
    lognormal, more on days of large moves. Both say nothing of what comes next.
    """
    rng = stream(seed, "bars of a draw")
    day = np.log(draw.close / draw.open)
    variance = day.var(axis=0)
    up, down = (
        np.sqrt(day**2 - 2.0 * variance * np.log(1.0 - rng.random(day.shape))) for _ in range(2)
    )
    high, low = 0.5 * (day + up), 0.5 * (day - down)
    volume = _SHARES * np.exp(
        _VOLUME_SPREAD * rng.standard_normal(day.shape) + np.abs(day) / day.std() - 1.0
    )
    days = np.busday_offset(np.datetime64(FIRST), np.arange(len(day)))
    frames = [
        pl.DataFrame(
            {
                "symbol": np.full(len(day), f"P{n}"),
                "date": days,
                "open": draw.open[:, n],
                "high": draw.open[:, n] * np.exp(high[:, n]),
                "low": draw.open[:, n] * np.exp(low[:, n]),
                "close": draw.close[:, n],
                "volume": np.round(volume[:, n]),
            }
        )
        for n in range(day.shape[1])
    ]
    buffer = io.BytesIO()
    pl.concat(frames).write_parquet(buffer)
    write_atomic(path, buffer.getvalue())
    return path


def train_through(
    config: Config, run: Path, seeds: Sequence[int], report: Report, should_stop: ShouldStop
) -> tuple[TrainedRun, list[Outcome]] | None:
    """Prepare and train a run directory; None: stopped before the end."""
    made = prepare(config, run, expected=RunDirectory(run).trained_on())
    manifest = made.prepared.manifest
    RunDirectory(run).record(
        config, "prove", data=manifest["dataset"], prepared=manifest["content_hash"]
    )
    outcomes: list[Outcome] = []
    for k, seed in enumerate(seeds):

        def report_shifted(message: object, before: int = k) -> None:  # one long training
            assert isinstance(message, Progress)
            done, total = before * message.total, len(seeds) * message.total
            report(replace(message, step=done + message.step, total=total))

        job = SeedJob(config, run, seed, resume=True)
        outcomes.append(train_seed(job, report_shifted, should_stop))
        if outcomes[-1].ending == "stopped":
            return None
    return TrainedRun.open(run), outcomes
