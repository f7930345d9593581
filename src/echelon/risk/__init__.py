"""Risk control: who may trade, how much, and what is written down about it.

    drawdown.py    experts that fell too far are masked for the router
    cvar.py        tail loss: a limit on positions while trading, a cost while training
    lagrange.py    the price of that cost (PID-Lagrangian)
    portfolio.py   halt, turnover limit and position limit of what is really held
    events.py      the log of all that, and alerts

Everything here gets what happened, bar by bar, for many books at once, and answers with what
holds for the next decision. Nothing here reads a market.
"""

from echelon.risk.cvar import (
    CvarGuard,
    CvarSettings,
    CvarVerdict,
    QuantileSettings,
    Tail,
    TailQuantile,
    cvar_cost,
    tail_of,
    tail_points,
)
from echelon.risk.drawdown import DrawdownGuard, DrawdownSettings, DrawdownVerdict
from echelon.risk.events import (
    Alert,
    RiskEvent,
    RiskKind,
    RiskLog,
    from_lines,
    read_events,
    to_lines,
)
from echelon.risk.lagrange import (
    Pid,
    PidLagrangian,
    PidSettings,
    combine_advantages,
    new_pid,
    pid_step,
)
from echelon.risk.portfolio import (
    HaltSettings,
    HaltVerdict,
    PortfolioHalt,
    Positions,
    PositionSettings,
    Turnover,
    TurnoverLimit,
    TurnoverSettings,
    limit_positions,
)

__all__ = [
    "Alert",
    "CvarGuard",
    "CvarSettings",
    "CvarVerdict",
    "DrawdownGuard",
    "DrawdownSettings",
    "DrawdownVerdict",
    "HaltSettings",
    "HaltVerdict",
    "Pid",
    "PidLagrangian",
    "PidSettings",
    "PortfolioHalt",
    "PositionSettings",
    "Positions",
    "QuantileSettings",
    "RiskEvent",
    "RiskKind",
    "RiskLog",
    "Tail",
    "TailQuantile",
    "Turnover",
    "TurnoverLimit",
    "TurnoverSettings",
    "combine_advantages",
    "cvar_cost",
    "from_lines",
    "limit_positions",
    "new_pid",
    "pid_step",
    "read_events",
    "tail_of",
    "tail_points",
    "to_lines",
]
