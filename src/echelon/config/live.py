"""Settings of live trading: a tree of its own, for one engine; see docs/guide/live.md."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from echelon.config._base import Section
from echelon.config.alerts import AlertsConfig

Share = Annotated[float, Field(gt=0, le=1)]


class GateConfig(Section):
    """Which bar sets pass."""

    deadline_seconds: PositiveFloat = 20.0
    """How long after a live bar's end late symbols are waited for."""
    missing: Literal["carry", "halt"] = "carry"
    """Of a symbol that should have a bar and has none at the deadline: carry it as not tradable, or
    halt."""
    max_missing: Share = 0.5
    """Share of the expected symbols without a bar above which the engine halts in any case."""
    gap: Literal["halt", "carry"] = "halt"
    """Of whole bar sets that are missing: halt, or carry them as sets in which nobody traded."""
    max_jump: PositiveFloat = 3.0
    """Factor between two closes of a symbol, adjusted, above which a bar is refused."""
    stale_bars: NonNegativeInt = 20
    """Bars that repeat the one before in every field, after which a symbol's next such bar is
    refused; 0: never."""
    pending_sets: PositiveInt = 64
    """Bar sets that wait for late symbols at the same time; more halt the engine."""


class LimitsConfig(Section):
    """The risk gate that every order passes before it is sent; null: no such limit."""

    max_position: Share | None = None
    """Share of the equity in one symbol after the order."""
    max_order_value: PositiveFloat | None = None
    """Money of one order."""
    max_turnover: PositiveFloat | None = None
    """Value of a session's orders as a multiple of the equity."""
    price_collar: Share | None = None
    """Orders to a broker are limit orders this far from the last close, as a share; null: market
    orders. A paper venue fills as backtests do, at any price."""
    min_cash: Annotated[float, Field(ge=0)] = 0.0
    """Share of the equity that buys leave in cash."""
    max_daily_loss: Share | None = None
    """Loss since the close of the session before at which the engine halts, as a share."""
    max_drawdown: Share | None = None
    """Drawdown from the highest equity of the journal at which the engine halts."""
    max_orders_per_minute: PositiveInt | None = None
    """Orders within a minute; those above are stopped."""
    trading_hours: bool = True
    """Whether orders of a live feed are sent only where the exchange has a session that day."""
    max_age_seconds: PositiveFloat | None = 120.0
    """Age of a live bar set at its decision above which no order is sent."""
    kill_file: Path | None = None
    """While this file exists, no order is sent."""


class MetricsConfig(Section):
    """Where Prometheus reads how an engine stands: `/metrics` of its control server."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the control server, on 127.0.0.1; 0: any that is free, as `JOURNAL.control` says."""


Action = Literal["warn", "reduce", "halt"]


class GuardConfig(Section):
    """Bars that are unlike the training data."""

    action: Action = "warn"
    """What an alarm does: warn: it is written down and reported; reduce: from then on only orders
    that sell are sent; halt: none. `echelon live resume` ends either."""
    false_alarms_per_year: PositiveFloat = 0.5
    """How many alarms a year ordinary bars may raise."""


class DriftConfig(Section):
    """Returns, turnover, costs and fills that are not what the backtest led to expect."""

    action: Action = "warn"
    """What an alarm does, as of `guard`."""
    false_alarms_per_year: PositiveFloat = 0.5
    """How many alarms a year there may be on average while all is as the backtest was."""


class LiveConfig(Section):
    """How an engine runs a bundle."""

    gate: GateConfig = GateConfig()
    """Which bar sets pass."""
    limits: LimitsConfig = LimitsConfig()
    """The risk gate before every order."""
    guard: GuardConfig = GuardConfig()
    """Alarms of bars unlike the training data, before their orders are sent."""
    drift: DriftConfig = DriftConfig()
    """Alarms of a book that is not what the backtest led to expect."""
    alerts: AlertsConfig = AlertsConfig()
    """Who is told of what, by which channel."""
    metrics: MetricsConfig = MetricsConfig()
    """Where Prometheus reads."""
    snapshot_every: PositiveInt = 50
    """Bar sets between two snapshots of the state."""
    sync: bool = True
    """Whether a commit is on the disk before orders are sent. Without it a killed process still
    loses nothing, but a power failure may: for replays and tests."""
    unknown_seconds: PositiveFloat = 60.0
    """How long an order may be unknown before the engine halts."""
