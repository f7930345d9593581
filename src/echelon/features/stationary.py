"""The stationary set: returns, volatilities, volume ratios, their ranks, distance to limits.

Everything here is a ratio or a rank: multiplying a symbol's prices, or its traded value, by a
constant changes nothing. No feature is recursive: each depends on its window alone.

What a day without a bar gets, and why:

- the one-bar return, zero: the price one can value the position at did not move;
- longer returns and volatilities, the last value again: they describe the last known window;
- volume ratios, zero, "as usual": repeating the volume of the last trading day through a
  suspension would repeat what is often the most unusual day of all;
- distances to the limits, the last value again.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from echelon.config.features import StationaryConfig
from echelon.features import _kernels
from echelon.features.base import Bars, CrossSection, Feature, FeatureSpec, source_id
from echelon.types import Floats

VOLUME_FLOOR = 0.01
"""Smallest ratio of traded value to its mean that volume ratios tell apart.

The logarithm needs a floor, for a bar may have no trade in it. A floor on the *ratio* keeps the
feature free of the currency, which log1p(value) would not; real sessions are seldom below 1 %.
"""

NO_LIMIT = 1.0
"""Distance given to a day without a price limit (the first days after listing, say).

Farther than any limit can be: the widest band in use, ±30 %, gives at most 1.3 / 0.7 − 1 = 0.86.
"""


def stationary_features(config: StationaryConfig) -> tuple[FeatureSpec, ...]:
    """Return the set `config` describes, ranks after what they rank; nothing if disabled."""
    if not config.enabled:
        return ()
    bases = [log_return(horizon) for horizon in config.returns]
    bases += [return_volatility(window) for window in config.volatility]
    bases += [volume_ratio(window) for window in config.volume_ratio]
    specs: list[FeatureSpec] = list(bases)
    if config.ranks:
        specs += [CrossSection(f"rank_{name}", base=name) for f in bases for name in f.names]
    if config.limit_distance:
        specs.append(limit_distance())
    return tuple(specs)


def log_return(horizon: int) -> Feature:
    """Log return of the close over `horizon` bars: `ret_{horizon}`."""

    def compute(bars: Bars) -> Floats:
        out = np.full(len(bars), np.nan)
        out[horizon:] = np.log(bars.close[horizon:] / bars.close[:-horizon])
        return out

    return Feature(
        names=(f"ret_{horizon}",),
        compute=compute,
        lookback=horizon + 1,
        needs=frozenset({"close"}),
        group="stationary",
        on_gap="zero" if horizon == 1 else "carry",
        source_id=_source_id("ret", horizon),
    )


def return_volatility(window: int) -> Feature:
    """Sample standard deviation of the last `window` one-bar log returns: `vol_{window}`."""

    def compute(bars: Bars) -> Floats:
        out = np.full(len(bars), np.nan)
        returns = np.log(bars.close[1:] / bars.close[:-1])
        out[1:] = _kernels.rolling_std(returns, window)
        return out

    return Feature(
        names=(f"vol_{window}",),
        compute=compute,
        lookback=window + 1,
        needs=frozenset({"close"}),
        group="stationary",
        source_id=_source_id("vol", window),
    )


def volume_ratio(window: int) -> Feature:
    """Log of traded value over its mean of `window` bars, this one included: `volume_ratio_{w}`.

    Lies in [log VOLUME_FLOOR, log window]. Where nothing was traded in the whole window, today
    is as usual: 0.
    """

    def compute(bars: Bars) -> Floats:
        assert bars.value is not None, "volume_ratio needs volume"
        mean = _kernels.rolling_mean(bars.value, window)
        ratio = np.where(np.isnan(mean), np.nan, 1.0)
        np.divide(bars.value, mean, out=ratio, where=mean > 0)
        return cast(Floats, np.log(np.maximum(ratio, VOLUME_FLOOR)))

    return Feature(
        names=(f"volume_ratio_{window}",),
        compute=compute,
        lookback=window,
        needs=frozenset({"volume"}),
        group="stationary",
        on_gap="zero",
        source_id=_source_id("volume_ratio", window, VOLUME_FLOOR),
    )


def limit_distance() -> Feature:
    """Room to the day's price limits: `limit_up_distance`, `limit_down_distance`.

    limit_up / close − 1 and close / limit_down − 1: 0 at the limit, `NO_LIMIT` without one.
    The limits are those before rounding to the tick, so a close at a rounded limit can lie a
    fraction of a tick beyond and give a distance slightly below zero.
    """

    def compute(bars: Bars) -> Floats:
        assert bars.limit_up is not None, "limit_distance needs limits"
        assert bars.limit_down is not None, "limit_distance needs limits"
        room = np.column_stack([bars.limit_up / bars.close, bars.close / bars.limit_down]) - 1.0
        return np.where(np.isnan(room), NO_LIMIT, room)

    return Feature(
        names=("limit_up_distance", "limit_down_distance"),
        compute=compute,
        lookback=1,
        needs=frozenset({"close", "limits"}),
        group="stationary",
        source_id=_source_id("limit_distance", NO_LIMIT),
    )


def _source_id(*parts: object) -> str:
    return source_id(__name__, _kernels.__name__, parts=parts)
