"""The rules in force on some data: what the preset came to, and which rules have nothing to act on.

A rule takes more than its setting: slippage by participation needs volume, lots and limits need
prices as they were quoted, a fill at the open needs opens. What lacks it does nothing, and that is
told wherever the rules are: on the command line, in run.json, in summary.json and in reports.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from echelon.config import Config
from echelon.config.market import Preset
from echelon.data.limits import board_of
from echelon.market.presets import SLIPPAGE_NAMES, MarketRules, resolve_rules
from echelon.types import PriceBasis

FILL_OPEN = "the next bar's open"
FILL_CLOSE = "the close the decision was made on"
FILL_NO_OPENS = "the next bar's close (the source has no opens)"


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
    found = {
        "slippage": no_volume if by_volume else "",
        "participation": no_volume if np.isfinite(rules.participation) else "",
        "stamp_duty": drawn if resolved.stamp_duty else "",
        "lots": (drawn or unquoted or ("" if a_shares else "no_lots")) if resolved.lots else "",
        "price_limits": (drawn or unquoted or "no_limits")
        if rules.price_limits and not data.limits
        else "",
        "fill": "" if opens else "no_opens",
    }
    return {rule: why for rule, why in found.items() if why}
