"""Configuration of features and their normalisation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from echelon.config._base import Section
from echelon.config.code import CodeSection

Periods = tuple[Annotated[int, Field(ge=2)], ...]
WINDOWS = (5, 10, 20, 30, 60)
"""Of Qlib's Alpha158."""


class IndicatorsConfig(Section):
    """Technical indicators. An empty list or null leaves one out."""

    sma: Periods = ()
    """Simple moving averages of the close, one per period."""
    ema: Periods = ()
    """Exponential moving averages of the close, one per period."""
    rsi: Periods = ()
    """Relative strength index, one per period."""
    macd: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None
    """MACD line, signal and histogram: (fast, slow, signal)."""
    atr: Periods = ()
    """Average true range, one per period."""
    bbands: tuple[Annotated[int, Field(ge=2)], PositiveFloat] | None = None
    """Bollinger bands: (period, standard deviations)."""
    ichimoku: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None
    """Ichimoku lines: (tenkan, kijun, senkou b). The lagging span looks ahead and is left out."""
    heikin_ashi: bool = False
    """Heikin-Ashi open, high, low and close."""
    supertrend: tuple[PositiveInt, PositiveFloat] | None = None
    """SuperTrend line and direction: (period, multiplier)."""

    @field_validator("macd")
    @classmethod
    def _fast_is_faster(cls, value: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
        if value is not None and not 2 <= value[0] < value[1]:
            raise ValueError(f"(fast, slow, signal) is {value}: it needs 2 ≤ fast < slow")
        return value


class StationaryConfig(Section):
    """The stationary set, default of the hierarchical agent. Everything is a ratio or a rank."""

    enabled: bool | Literal["auto"] = "auto"
    """Compute the set. auto: where nothing else is asked for."""
    returns: tuple[PositiveInt, ...] = (1, 5, 10, 20, 60)
    """Log returns over these numbers of bars."""
    volatility: Periods = (10, 20, 60)
    """Standard deviation of one-bar log returns over these numbers of bars."""
    volume_ratio: Periods = (5, 20)
    """Log of traded value over its mean of this many bars."""
    ranks: bool = True
    """Cross-sectional ranks, in [−1, 1], of the returns, volatilities and volume ratios."""
    limit_distance: bool = True
    """Distance of the close to the day's upper and lower price limit, where there are limits."""


class CrossSectionConfig(Section):
    """Every bar's features compared across the symbols that are present and members of it."""

    method: Literal["none", "rank", "zscore"] = "none"
    """rank: in [−1, 1], ties averaged. zscore: distance to the mean in standard deviations."""
    of: tuple[str, ...] = ()
    """Columns to compare, your own factors' too; empty: all but the calendar and exogenous ones."""
    keep: bool = False
    """Keep the columns themselves beside their comparison; otherwise they take no room in X."""


class FeaturesConfig(CodeSection):
    """Which features make up X[T,N,F]."""

    ohlcv: bool = False
    """Open, high, low, close (in units of the symbol's first close) and traded value."""
    indicators: IndicatorsConfig = IndicatorsConfig()
    """Technical indicators."""
    relative: bool = False
    """Express `ohlcv` and `indicators` relative to the close, so that a later price level does not
    lie outside of what the scaler saw: lines, bands and candles as ratio − 1, MACD and ATR as
    shares; the close as its one-bar log return, traded value as log ratio to its 20-bar mean."""
    stationary: StationaryConfig = StationaryConfig()
    """Returns, volatilities, volume ratios, ranks, distance to limits."""
    alpha158: bool | Periods = False
    """Price and volume features as Qlib's Alpha158 defines them: candle shapes, and over each of
    these windows trend, dispersion, position and volume. true: windows of 5, 10, 20, 30 and 60."""
    cross_section: CrossSectionConfig = CrossSectionConfig()
    """Ranks or z-scores of features, bar by bar."""
    calendar: bool = False
    """Day of the week, month and, within the day, time of day, as sines and cosines."""
    modules: tuple[str, ...] = ()
    """Python files with your own factors (`@factor`); running the command runs these files. Those
    that a run directory's configuration names run only where --trust-code names them too."""
    custom: tuple[str, ...] = ()
    """Names of your factors to use; empty: every factor the modules register."""

    @property
    def wants_stationary(self) -> bool:
        if self.stationary.enabled != "auto":
            return self.stationary.enabled
        others = (self.ohlcv, self.modules, self.alpha158, self.indicators != IndicatorsConfig())
        return not any(others)

    @property
    def alpha158_windows(self) -> Periods:
        if isinstance(self.alpha158, bool):
            return WINDOWS if self.alpha158 else ()
        return self.alpha158


class NormalizationConfig(Section):
    """How features are scaled."""

    method: Literal["zscore", "none"] = "zscore"
    """zscore: per feature, over all train time × assets."""
    fit_on: Literal["train"] = "train"
    """The scaler sees the train window and nothing else: other values would leak."""
    include: tuple[
        Literal["OHLCV", "indicators", "stationary", "calendar", "custom", "exogenous"], ...
    ] = ("OHLCV", "indicators", "stationary", "custom", "exogenous")
    """Groups of features to scale; the others stay as they are."""
