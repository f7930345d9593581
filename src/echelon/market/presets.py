"""The presets, and how the configuration becomes the numbers the kernel takes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np

from echelon.config import Config
from echelon.config.market import Preset, SlippageModel
from echelon.market.rules import (
    SLIPPAGE_FIXED,
    SLIPPAGE_LINEAR,
    SLIPPAGE_NONE,
    SLIPPAGE_SQRT,
    Rules,
)

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
