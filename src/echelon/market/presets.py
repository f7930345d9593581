"""From the configuration to the rules in force: presets, the numbers the kernel takes, and which
rules have nothing to act on.

A rule takes more than its setting: slippage by participation needs volume, lots and limits need
prices as they were quoted, a fill at the open needs opens. What lacks it does nothing, and that is
said wherever the rules are: on the command line, in run.json, in summary.json and in reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from echelon.config import Config
from echelon.config.market import Preset, SlippageModel
from echelon.data.limits import board_of
from echelon.market.rules import (
    SLIPPAGE_FIXED,
    SLIPPAGE_LINEAR,
    SLIPPAGE_NONE,
    SLIPPAGE_SQRT,
    Rules,
)
from echelon.types import PriceBasis

FILL_OPEN = "the next bar's open"
FILL_CLOSE = "the close the decision was made on"
FILL_NO_OPENS = "the next bar's close (the source has no opens)"

_MODELS: Mapping[SlippageModel, int] = MappingProxyType(
    {
        "none": SLIPPAGE_NONE,
        "fixed": SLIPPAGE_FIXED,
        "linear": SLIPPAGE_LINEAR,
        "sqrt": SLIPPAGE_SQRT,
    }
)

SLIPPAGE_NAMES: Mapping[int, SlippageModel] = MappingProxyType(
    {number: name for name, number in _MODELS.items()}
)


class MarketRules(NamedTuple):
    """Everything the configuration says about trading, resolved.

    rules: what the kernel takes; the rest shapes the rows of the market
    """

    rules: Rules
    stamp_duty: bool
    lots: bool


class _Preset(NamedTuple):
    commission_bps: float
    min_commission: float
    stamp_duty: bool
    slippage: SlippageModel
    slippage_bps: float
    participation: float | None
    lots: bool
    t_plus_one: bool
    price_limits: bool
    min_order_value: float


PRESETS: Mapping[Preset, _Preset] = MappingProxyType(
    {
        # 1 bp and a dollar an order, square-root impact of 100 bp at the whole volume.
        "us": _Preset(1.0, 1.0, False, "sqrt", 100.0, 0.10, False, False, False, 100.0),
        # 2.5 bp and 5 yuan an order, stamp duty, lots, T+1, limits.
        "cn": _Preset(2.5, 5.0, True, "sqrt", 100.0, 0.10, True, True, True, 1000.0),
        # 5 bp taker fee, one tick of spread and more.
        "crypto": _Preset(5.0, 0.0, False, "fixed", 1.0, 0.10, False, False, False, 10.0),
        "paper": _Preset(5.0, 0.0, False, "none", 0.0, None, False, False, False, 0.0),
        # 3 bp a side; at a tenth of the volume slippage is another 10 bp.
        "hierarchical": _Preset(3.0, 0.0, False, "linear", 100.0, 0.25, False, False, True, 0.0),
    }
)


_T = TypeVar("_T")


def _pick(given: _T | None, otherwise: _T) -> _T:
    return otherwise if given is None else given


def resolve_rules(config: Config, *, discrete: bool, calendar: str | None) -> MarketRules:
    """The rules of `config` on data of a calendar, which must not contradict its preset.

    discrete: for the 20/50 rule, whose buys are served in order
    calendar: None: a drawn market, of no exchange
    """
    market = config.market
    preset = PRESETS[market.preset_for(calendar)]

    fee = None if config.fee_rate is None else config.fee_rate * 1e4
    commission = _pick(_pick(market.commission_bps, fee), preset.commission_bps)
    cap = _pick(market.participation, preset.participation)
    stamp = preset.stamp_duty if market.stamp_duty is None else market.stamp_duty == "cn"
    rules = Rules(
        commission=commission / 1e4,
        min_commission=_pick(market.min_commission, preset.min_commission),
        slippage_model=_MODELS[_pick(market.slippage, preset.slippage)],
        slippage=_pick(market.slippage_bps, preset.slippage_bps) / 1e4,
        participation=np.inf if cap is None or market.no_cap else cap,
        t_plus_one=_pick(market.t_plus_one, preset.t_plus_one),
        price_limits=_pick(market.price_limits, preset.price_limits),
        spend_proceeds=not discrete,
        in_order=discrete,
        min_value=_pick(market.min_order_value, preset.min_order_value),
    )
    return MarketRules(rules, stamp, _pick(market.lots, preset.lots))


class TradedData(NamedTuple):
    """What rules can act on.

    calendar: None: a drawn market, of no exchange
    opens, volume, limits: whether the data have them
    """

    calendar: str | None
    price_basis: PriceBasis
    symbols: tuple[str, ...]
    opens: bool
    volume: bool
    limits: bool


class RulesInForce(NamedTuple):
    """The rules of a configuration on some data.

    preset: in force; asked: what the configuration says, `auto` or a name
    resolved: the numbers; fill: where orders fill, in the words of a world's ledger
    idle: rule → why it cannot act; of the rules that are set, and of no others
    charged: whether evaluations charge anything (`eval.use_fee`)
    executor: what works orders through the day in validation and evaluation
    """

    preset: Preset
    asked: str
    calendar: str | None
    resolved: MarketRules
    fill: str
    idle: dict[str, str]
    charged: bool
    executor: str

    def facts(self) -> dict[str, Any]:
        """As run.json and summary.json keep them, and `report.rules` says them."""
        rules = self.resolved.rules
        cap = rules.participation
        return {
            "preset": self.preset,
            "asked": self.asked,
            "calendar": self.calendar,
            "commission_bps": round(rules.commission * 1e4, 9),
            "min_commission": rules.min_commission,
            "stamp_duty": self.resolved.stamp_duty,
            "slippage": SLIPPAGE_NAMES[rules.slippage_model],
            "slippage_bps": round(rules.slippage * 1e4, 9),
            "participation": cap if np.isfinite(cap) else None,
            "lots": self.resolved.lots,
            "t_plus_one": rules.t_plus_one,
            "price_limits": rules.price_limits,
            "min_order_value": rules.min_value,
            "fill": self.fill,
            "idle": dict(self.idle),
            "charged": self.charged,
            "executor": self.executor,
        }


def rules_in_force(config: Config, data: TradedData) -> RulesInForce:
    """Resolve the rules; refuses a preset that contradicts the calendar of the data."""
    market = config.market
    resolved = resolve_rules(config, discrete=False, calendar=data.calendar)
    fill = FILL_CLOSE
    if market.fill == "open":
        fill = FILL_OPEN if data.opens else FILL_NO_OPENS
    return RulesInForce(
        preset=market.preset_for(data.calendar),
        asked=market.preset,
        calendar=data.calendar,
        resolved=resolved,
        fill=fill,
        idle=_idle(resolved, data, opens=market.fill != "open" or data.opens),
        charged=config.eval.use_fee,
        executor=market.executor,
    )


def drawn_market(config: Config) -> RulesInForce:
    """On the proving ground's markets: opens and closes of no exchange, and nothing else."""
    return rules_in_force(config, TradedData(None, "adjusted", (), True, False, False))


def _idle(resolved: MarketRules, data: TradedData, *, opens: bool) -> dict[str, str]:
    """Rule → why it cannot act."""
    rules = resolved.rules
    name = SLIPPAGE_NAMES[rules.slippage_model]
    by_volume = name in ("linear", "sqrt") and rules.slippage > 0.0
    unquoted = "adjusted" if data.price_basis == "adjusted" else ""
    drawn = "drawn" if data.calendar is None else ""
    no_volume = "" if data.volume else "drawn_volume" if drawn else "no_volume"
    a_shares = any(board_of(symbol) is not None for symbol in data.symbols)
    reasons = {
        "slippage": no_volume if by_volume else "",
        "participation": no_volume if np.isfinite(rules.participation) else "",
        "stamp_duty": drawn if resolved.stamp_duty else "",
        "lots": (drawn or unquoted or ("" if a_shares else "no_lots")) if resolved.lots else "",
        "price_limits": (drawn or unquoted or "no_limits")
        if rules.price_limits and not data.limits
        else "",
        "fill": "" if opens else "no_opens",
    }
    return {rule: why for rule, why in reasons.items() if why}
