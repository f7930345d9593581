"""From the configuration to the rules in force: presets, the numbers the kernel takes, and which
rules have nothing to act on.

A rule takes more than its setting: slippage by participation needs volume, lots and limits need
prices as they were quoted, a fill at the open needs opens. What lacks it does nothing, and that is
said wherever the rules are: on the command line, in run.json, in summary.json and in reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import numpy as np

from echelon.config import Config
from echelon.config.market import Preset, SlippageModel
from echelon.data.limits import board_of
from echelon.market.rules import Rules
from echelon.types import PriceBasis


class MarketRules(NamedTuple):
    """What trading costs and the exchange forbids, by the names and in the units of `market`."""

    commission_bps: float
    min_commission: float
    stamp_duty: bool
    slippage: SlippageModel
    slippage_bps: float
    participation: float | None  # None: no cap
    lots: bool
    t_plus_one: bool
    price_limits: bool
    min_order_value: float

    @property
    def rules(self) -> Rules:
        """As the kernel takes them, for trading by target weights; the rest shapes its rows."""
        return Rules(
            commission=self.commission_bps / 1e4,
            min_commission=self.min_commission,
            slippage_model=get_args(SlippageModel).index(self.slippage),
            slippage=self.slippage_bps / 1e4,
            participation=np.inf if self.participation is None else self.participation,
            t_plus_one=self.t_plus_one,
            price_limits=self.price_limits,
            spend_proceeds=True,
            in_order=False,
            min_value=self.min_order_value,
        )


PRESETS: Mapping[Preset, MarketRules] = {
    # 1 bp and a dollar an order, square-root impact of 100 bp at the whole volume.
    "us": MarketRules(1.0, 1.0, False, "sqrt", 100.0, 0.10, False, False, False, 100.0),
    # 2.5 bp and 5 yuan an order, stamp duty, lots, T+1, limits.
    "cn": MarketRules(2.5, 5.0, True, "sqrt", 100.0, 0.10, True, True, True, 1000.0),
    # 5 bp taker fee, one tick of spread and more.
    "crypto": MarketRules(5.0, 0.0, False, "fixed", 1.0, 0.10, False, False, False, 10.0),
    "paper": MarketRules(5.0, 0.0, False, "none", 0.0, None, False, False, False, 0.0),
    # 3 bp a side; at a tenth of the volume slippage is another 10 bp.
    "hierarchical": MarketRules(3.0, 0.0, False, "linear", 100.0, 0.25, False, False, True, 0.0),
}


def resolve_rules(config: Config, *, calendar: str | None) -> MarketRules:
    """The rules of `config` on data of a calendar (None: drawn), which its preset must fit."""
    market = config.market
    preset = PRESETS[market.preset_for(calendar)]
    own = {name: getattr(market, name) for name in MarketRules._fields}
    given = {name: value for name, value in own.items() if value is not None}
    if config.fee_rate is not None:
        given.setdefault("commission_bps", config.fee_rate * 1e4)
    if market.stamp_duty is not None:
        given["stamp_duty"] = market.stamp_duty == "cn"
    if market.no_cap:
        given["participation"] = None
    return preset._replace(**given)


class TradedData(NamedTuple):
    """What rules can act on; opens, volume, limits: whether the data have them."""

    calendar: str | None  # None: a drawn market, of no exchange
    price_basis: PriceBasis
    symbols: tuple[str, ...]
    opens: bool
    volume: bool
    limits: bool


class RulesInForce(NamedTuple):
    """The rules of a configuration on some data."""

    preset: Preset  # in force
    asked: str  # what the configuration says, `auto` or a name
    calendar: str | None
    resolved: MarketRules  # the numbers
    fill: str  # where orders fill, in the words of a world's ledger
    idle: dict[str, str]  # rule → why it cannot act; of the rules that are set, and of no others
    charged: bool  # whether evaluations charge anything (`eval.use_fee`)
    executor: str  # what works orders through the day in validation and evaluation

    def facts(self) -> dict[str, Any]:
        """As run.json and summary.json keep them, and `report.rules` says them."""
        rules = self.resolved
        return {
            "preset": self.preset,
            "asked": self.asked,
            "calendar": self.calendar,
            **rules._asdict(),
            "commission_bps": round(rules.commission_bps, 9),
            "slippage_bps": round(rules.slippage_bps, 9),
            "fill": self.fill,
            "idle": dict(self.idle),
            "charged": self.charged,
            "executor": self.executor,
        }


def rules_in_force(config: Config, data: TradedData) -> RulesInForce:
    """Resolve the rules; refuses a preset that contradicts the calendar of the data."""
    market = config.market
    resolved = resolve_rules(config, calendar=data.calendar)
    fill = "the close the decision was made on"
    if market.fill == "open":
        no_opens = "the next bar's close (the source has no opens)"
        fill = "the next bar's open" if data.opens else no_opens
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


def _idle(rules: MarketRules, data: TradedData, *, opens: bool) -> dict[str, str]:
    by_volume = rules.slippage in ("linear", "sqrt") and rules.slippage_bps > 0.0
    unquoted = "adjusted" if data.price_basis == "adjusted" else ""
    drawn = "drawn" if data.calendar is None else ""
    no_volume = "" if data.volume else "drawn_volume" if drawn else "no_volume"
    a_shares = any(board_of(symbol) is not None for symbol in data.symbols)
    reasons = {
        "slippage": no_volume if by_volume else "",
        "participation": "" if rules.participation is None else no_volume,
        "stamp_duty": drawn if rules.stamp_duty else "",
        "lots": (drawn or unquoted or ("" if a_shares else "no_lots")) if rules.lots else "",
        "price_limits": (drawn or unquoted or "no_limits")
        if rules.price_limits and not data.limits
        else "",
        "fill": "" if opens else "no_opens",
    }
    return {rule: why for rule, why in reasons.items() if why}
