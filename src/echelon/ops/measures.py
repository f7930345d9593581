"""How good a series of returns is: pure functions, a table of all of them, and a running version.

`returns`[T] are simple returns per period (0.01 is one per cent), compounded where a path matters.
`periods_per_year` annualises: 252 for daily bars, bars a day times 252 for intraday ones.

Conventions, the same for every measure:

- The risk-free rate is 0. Standard deviations are those of a sample (ddof 1).
- Drawdown, CVaR and costs are positive when they hurt.
- A series must hold at least one return, all of them finite, and none below -1 where they are
  compounded; anything else is a ValueError.
- A ratio with nothing below the line is its limit, 0 for 0/0 (cash has Sharpe 0), else ±inf: the
  order of two results stays right.
- NaN is "undefined": volatility and Sharpe of a single return, the hit rate of a series of zeros.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from echelon.files import package_yaml
from echelon.types import Bools, Floats, Times

CVAR_LEVEL = 0.95


def equity(returns: Floats) -> Floats:
    """[T]: what 1 invested before the first period is worth after each."""
    return np.cumprod(1.0 + _paths(returns), dtype=np.float64)


def total_return(returns: Floats) -> float:
    return float(equity(returns)[-1] - 1.0)


def annual_return(returns: Floats, periods_per_year: float) -> float:
    """(1 + total)^(periods_per_year / T) - 1; -1 after ruin, inf where no float holds it."""
    years = len(returns) / _rate(periods_per_year)
    with np.errstate(over="ignore"):
        return float(np.power(equity(returns)[-1], 1.0 / years) - 1.0)


def volatility_period(returns: Floats) -> float:
    """Standard deviation (ddof 1); exactly 0 if all are the same, NaN for a single return."""
    r = _series(returns)
    if len(r) < 2:
        return math.nan
    # The mean of equal numbers is rounded, which would leave a deviation of about 1e-17.
    return 0.0 if r.min() == r.max() else float(r.std(ddof=1))


def volatility_annual(returns: Floats, periods_per_year: float) -> float:
    return volatility_period(returns) * math.sqrt(_rate(periods_per_year))


def sharpe_period(returns: Floats) -> float:
    """Design note 003's: mean / (std + ε) per period, not annualised; NaN for one return."""
    return float(_series(returns).mean() / (volatility_period(returns) + 1e-8))


def sharpe_annual(returns: Floats, periods_per_year: float) -> float:
    """Mean / std · √periods_per_year, without ε; 0 for cash, NaN for a single return."""
    mean = float(_series(returns).mean())
    return _ratio(mean, volatility_period(returns)) * math.sqrt(_rate(periods_per_year))


def active_returns(returns: Floats, yardstick: Floats) -> Floats:
    """Returns[T] or [T,S] less yardstick[T], exactly 0 where a series differs by rounding only."""
    active = (returns.T - yardstick).T
    scale = float(np.abs(returns).max(initial=0.0) + np.abs(yardstick).max(initial=0.0))
    return np.asarray(np.where(np.abs(active).max(axis=0) > 1e-12 * scale, active, 0.0))


def information_ratio(returns: Floats, yardstick: Floats, periods_per_year: float) -> float:
    """The annual Sharpe ratio of what returns[T] are above yardstick[T]; 0 where they are it."""
    return sharpe_annual(active_returns(_series(returns), _series(yardstick)), periods_per_year)


def sortino_annual(returns: Floats, periods_per_year: float) -> float:
    """Mean / downside deviation · √periods_per_year; inf if no return is negative.

    The downside deviation is the root of the mean of min(r, 0)² over *all* T periods, as in
    quantstats, and in skfolio's semi-deviation with `biased` and a target of 0.
    """
    r = _series(returns)
    # Scaled by the largest loss, since the square of a tiny one would vanish.
    scale = float(max(-r.min(), 0.0)) or 1.0
    downside = scale * math.sqrt(float(np.mean((np.minimum(r, 0.0) / scale) ** 2)))
    return _ratio(float(r.mean()), downside) * math.sqrt(_rate(periods_per_year))


def drawdown_series(returns: Floats) -> Floats:
    """[T]: share in [0, 1] that equity is below its highest point so far, the start included."""
    value = equity(returns)
    return 1.0 - value / np.maximum(np.maximum.accumulate(value), 1.0)


def max_drawdown(returns: Floats) -> float:
    """The deepest drawdown, in [0, 1]; 0 if equity never fell."""
    return float(drawdown_series(returns).max())


def max_drawdown_year(returns: Floats, times: Times | None) -> float:
    """The deepest drawdown within one calendar year, each year from a peak of its own."""
    r = _series(returns)
    if times is None:
        return max_drawdown(r)
    years = times.astype("datetime64[Y]")
    edges = np.flatnonzero(years[1:] != years[:-1]) + 1
    return max(max_drawdown(part) for part in np.split(r, edges))


def calmar(returns: Floats, periods_per_year: float) -> float:
    """Annual return / maximum drawdown; inf for a gain without any drawdown."""
    return _ratio(annual_return(returns, periods_per_year), max_drawdown(returns))


def cvar(returns: Floats, level: float = CVAR_LEVEL) -> float:
    """Mean loss over the worst `1 - level` of the periods; negative if even those are gains.

    The tail holds k = (1 - level)·T periods: the ⌊k⌋ worst count fully, the next one by the
    fraction left (Rockafellar & Uryasev 2002, and skfolio's `cvar`).
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie between 0 and 1, not {level}: 0.95 is usual")
    losses = np.sort(-_series(returns))[::-1]
    k = (1.0 - level) * len(losses)
    whole = int(k)
    tail = losses[:whole].sum() + (k - whole) * losses[whole : whole + 1].sum()
    return float(tail / k)


def turnover_annual(traded: Floats, periods_per_year: float) -> float:
    """Value traded a year, in multiples of the book's value; two-way.

    traded[T]: value of all buys *plus* all sells of a period, over the value of the book before
    they were made. Turnover times a fee per side is then what the fee takes a year.
    """
    share = _series(traded, "traded")
    if share.min() < 0.0:
        raise ValueError(f"traded must not be negative: sells count as buys do, not {share.min()}")
    return float(share.mean()) * _rate(periods_per_year)


def hit_rate(returns: Floats) -> float:
    """Share of gains among the periods that were not exactly zero; NaN if all were."""
    r = _series(returns)
    gains, moves = int((r > 0.0).sum()), int((r != 0.0).sum())
    return gains / moves if moves else math.nan


class Costs(NamedTuple):
    """What trading cost over a whole run, in money."""

    commission: float
    stamp: float
    slippage: float


def measure(
    returns: Floats,
    *,
    periods_per_year: float,
    turnover: Floats,
    exposure: Floats,
    costs: Costs,
    initial_value: float,
    times: Times | None = None,
    jumped: Bools | None = None,
    yardstick: Floats | None = None,
) -> dict[str, float]:
    """Every measure of returns[T]; `LABELS` says how each prints.

    turnover[T]: two-way traded value as a share of the book, see `turnover_annual`
    exposure[T]: invested share of the book
    initial_value: what the book began with, in the money of `costs`
    times[T]: when each return ended; None: all in one year
    jumped[T]: the drawdown went beyond the budget; None: there is no budget
    yardstick[T]: returns that the information ratio is over; None: it is NaN
    """
    cost = costs.commission + costs.stamp + costs.slippage
    return {
        "total_return": total_return(returns),
        "annual_return": annual_return(returns, periods_per_year),
        "volatility_period": volatility_period(returns),
        "volatility_annual": volatility_annual(returns, periods_per_year),
        "sharpe_period": sharpe_period(returns),
        "sharpe_annual": sharpe_annual(returns, periods_per_year),
        "information_ratio": math.nan
        if yardstick is None
        else information_ratio(returns, yardstick, periods_per_year),
        "sortino_annual": sortino_annual(returns, periods_per_year),
        "calmar": calmar(returns, periods_per_year),
        "max_drawdown": max_drawdown(returns),
        "max_drawdown_year": max_drawdown_year(returns, times),
        "budget_jumps": math.nan if jumped is None else float(jumped.sum()),
        "cvar95": cvar(returns),
        "turnover_annual": turnover_annual(turnover, periods_per_year),
        "hit_rate": hit_rate(returns),
        "exposure": float(_series(exposure, "exposure").mean()),
        "cost_total": cost,
        "cost_share": cost / initial_value,
        "cost_commission": costs.commission,
        "cost_stamp": costs.stamp,
        "cost_slippage": costs.slippage,
    }


class RunningMeasures:
    """Measures of one book so far, a return at a time: at each step, those of the functions."""

    def __init__(self, periods_per_year: float) -> None:
        self._root = math.sqrt(_rate(periods_per_year))
        self.reset()

    def reset(self) -> None:
        self.max_drawdown = 0.0
        """The deepest drawdown so far."""
        self._mean, self._squares = 0.0, 0.0
        self._value, self._peak = 1.0, 1.0
        self._returns: list[float] = []  # the worst first

    def update(self, ret: float) -> None:
        if not -1.0 <= ret < math.inf:
            raise ValueError(f"a return must be a number from -1 up, not {ret}: check the prices")
        insort(self._returns, ret)
        delta = ret - self._mean
        self._mean += delta / len(self._returns)
        self._squares += delta * (ret - self._mean)
        self._value *= 1.0 + ret
        self._peak = max(self._peak, self._value)
        self.max_drawdown = max(self.max_drawdown, self.drawdown)

    @property
    def drawdown(self) -> float:
        """How far below its highest point the book is now; 0 before the first return."""
        return 1.0 - self._value / self._peak

    @property
    def sharpe_annual(self) -> float:
        """Annualised Sharpe ratio so far; NaN before the second return."""
        periods = len(self._returns)
        if periods < 2:
            return math.nan
        if self._returns[0] == self._returns[-1]:
            return _ratio(self._returns[0], 0.0)
        return _ratio(self._mean, math.sqrt(self._squares / (periods - 1))) * self._root

    @property
    def cvar95(self) -> float:
        """CVaR at 95 % of all returns so far; NaN before the first."""
        if not self._returns:
            return math.nan
        k = (1.0 - CVAR_LEVEL) * len(self._returns)
        whole = int(k)
        return -(sum(self._returns[:whole]) + (k - whole) * self._returns[whole]) / k


class MeanStd(NamedTuple):
    """Mean and sample standard deviation (ddof 1) over seeds."""

    mean: float
    std: float


def mean_std(values: Sequence[float]) -> MeanStd:
    """Of one measure over several seeds: what is undefined for one is undefined for their mean."""
    v = np.asarray(values, dtype=np.float64)
    if v.ndim != 1 or not len(v):
        raise ValueError(f"mean_std needs a list of at least one value, not shape {v.shape}")
    with np.errstate(invalid="ignore"):
        mean = float(v.mean())
        return MeanStd(mean, volatility_period(v) if np.isfinite(v).all() else math.nan)


@dataclass(frozen=True, slots=True)
class Label:
    """How a measure is shown: three significant digits, and at most `digits` decimals.

    unit: percent (0.123 prints as 12.3 %), multiple (94.6×), ratio or number (money: 1,235)
    higher_is_better: None where neither is
    least: what no value is below; an interval that assumes a normal distribution is cut there
    meaning: in a sentence; text_zh, meaning_zh: in Chinese, without which the English is shown
    """

    text: str
    unit: Literal["percent", "multiple", "ratio", "number"]
    higher_is_better: bool | None
    digits: int = 2
    meaning: str = ""
    text_zh: str = ""
    meaning_zh: str = ""
    least: float = -math.inf

    @property
    def suffix(self) -> str:
        """The unit, as it stands behind a number."""
        return {"percent": " %", "multiple": "×"}.get(self.unit, "")

    def format(self, value: float, std: float = math.nan) -> str:
        """`12.3 %`, or `12.3 ± 1.1 %` with a std; `–` for NaN, `∞` for infinity."""
        if math.isnan(value):
            return "–"
        scale = 100.0 if self.unit == "percent" else 1.0
        shown = [scale * number for number in (value, std) if not math.isnan(number)]
        largest = max((abs(number) for number in shown if math.isfinite(number)), default=0.0)
        digits = self.digits
        if largest >= 1.0:
            digits = min(digits, max(0, 3 - len(str(int(largest)))))
        return " ± ".join(_decimal(number, digits) for number in shown) + self.suffix


def _decimal(value: float, digits: int) -> str:
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:,.{digits}f}"
    return text.replace("-", "−") if float(text.replace(",", "")) else text.lstrip("-")


LABELS: Mapping[str, Label] = {
    name: Label(**facts) for name, facts in package_yaml("echelon.ops", "measures.yaml").items()
}
"""Of everything that `measure` gives, in its order."""


def _series(values: Floats, name: str = "returns") -> Floats:
    """[T] float64, at least one value, all finite."""
    v = np.asarray(values, dtype=np.float64)
    if v.ndim != 1 or not len(v):
        raise ValueError(f"{name} must be one series [T] of at least one value, not {v.shape}")
    bad = ~np.isfinite(v)
    if bad.any():
        at = int(bad.argmax())
        raise ValueError(
            f"{name} must be finite, but {int(bad.sum())} of {len(v)} are not; the first is "
            f"{v[at]} at {at}. Drop or fill them first."
        )
    return v


def _paths(returns: Floats) -> Floats:
    """Returns that can be compounded: nothing loses more than everything."""
    r = _series(returns)
    if r.min() < -1.0:
        raise ValueError(
            f"returns below -1 cannot be compounded, but at {int(r.argmin())} there is {r.min()}. "
            "Are these per cent, or log returns?"
        )
    return r


def _rate(periods_per_year: float) -> float:
    if not 0.0 < periods_per_year < math.inf:
        raise ValueError(f"periods_per_year must be above 0, not {periods_per_year}: 252 for days")
    return periods_per_year


def _ratio(above: float, below: float) -> float:
    """The quotient, and its limit where there is nothing below the line; 0/0 is 0."""
    if below == 0.0:
        return math.copysign(math.inf, above) if above else 0.0
    return above / below
