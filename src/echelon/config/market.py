"""Configuration of trading: what an order costs, what the exchange forbids, when it is filled."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from echelon.config._base import Section
from echelon.errors import ConfigError, shorten

Preset = Literal["us", "cn", "crypto", "paper", "hierarchical"]
PresetSetting = Literal["auto", Preset]
SlippageModel = Literal["none", "fixed", "linear", "sqrt"]

ALIASES: Mapping[str, Preset] = {
    **dict.fromkeys(("ashare", "a-share", "a_share", "china"), "cn"),
    "usa": "us",
}
"""Other names of presets; the configuration keeps the preset's own, so that hashes agree."""
CALENDARS: Mapping[str, Preset] = {
    **dict.fromkeys(("XSHG", "XSHE"), "cn"),
    **dict.fromkeys(("XNYS", "XNAS", "XASE"), "us"),
    "24/7": "crypto",
}
"""Calendar of the data → the market it is of, by the name of its preset."""
_FITTING: Mapping[Preset, tuple[Preset, ...]] = {
    # paper and hierarchical know nothing of stamp duty, lots and T+1, which A-shares have.
    "cn": ("cn",),
    "us": ("us", "paper", "hierarchical"),
    "crypto": ("crypto", "paper", "hierarchical"),
}
"""Market → presets that can be meant there without a word of confirmation."""
_KNOWN_BY: Mapping[Preset, str] = {
    "us": "US stocks",
    "cn": "A-shares: stamp duty, lots, T+1, price limits",
    "crypto": "a market that never closes",
    "paper": "a fee and nothing else",
    "hierarchical": "a fee and linear slippage",
}


def _preset_name(value: object) -> object:
    if not isinstance(value, str):
        return value
    name = value.strip().lower()
    names = get_args(PresetSetting)
    if name in names or name in ALIASES:
        return ALIASES.get(name, name)
    near = difflib.get_close_matches(name, (*names, *ALIASES), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    known = ", ".join((*names, *(f"{alias} (is {preset})" for alias, preset in ALIASES.items())))
    raise ValueError(f"no preset is called {shorten(value, 40)!r}{hint} There are {known}")


class MarketConfig(Section):
    """The rules of the market. What is null comes from the preset."""

    preset: Annotated[PresetSetting, BeforeValidator(_preset_name)] = "auto"
    """auto: by the calendar of the data (XSHG: cn, XNYS: us, 24/7: crypto; of another one name the
    preset). us, cn (or ashare), crypto: those markets' costs and rules. paper: a fee and nothing
    else (design note 003). hierarchical: 3 bp a side and slippage linear in participation (design
    notes 000 and 002). A preset that contradicts the calendar is refused."""
    preset_confirmed: bool = False
    """Use the named preset although it contradicts the calendar of the data. It permits and changes
    no number: the hash of the configuration leaves it out."""
    fill: Literal["open", "close"] = "open"
    """open: orders fill at the next bar's open, or its close where there are no opens. close: at
    the close the decision was made on, as the paper has it."""
    initial_cash: PositiveFloat = 1_000_000.0
    """Money a book starts with."""
    commission_bps: NonNegativeFloat | None = None
    """Commission per side, in basis points of the traded amount; `fee_rate` stands in for it."""
    min_commission: NonNegativeFloat | None = None
    """Least commission of an order, in money."""
    stamp_duty: Literal["none", "cn"] | None = None
    """Duty on sells. cn: 0.1 %, 0.05 % from 2023-08-28."""
    slippage: SlippageModel | None = None
    """How the price moves against an order: not at all, by a fixed share, linearly in the order's
    share of the volume, or with its square root."""
    slippage_bps: NonNegativeFloat | None = None
    """Size of the slippage: flat, or at an order as large as the whole volume."""
    participation: Annotated[float, Field(gt=0, le=1)] | None = None
    """An order takes at most this share of the bar's volume (of a trailing median at the open)."""
    no_cap: bool = False
    """Lift the preset's participation cap."""
    lots: bool | None = None
    """Buy whole lots only (A-shares: 100, STAR at least 200)."""
    t_plus_one: bool | None = None
    """What was bought in a session cannot be sold in it."""
    price_limits: bool | None = None
    """No buying at the upper limit, no selling at the lower one."""
    min_order_value: NonNegativeFloat | None = None
    """Orders below this value are not sent, unless they close a position."""
    delist_haircut: Annotated[float, Field(ge=0, le=1)] = 0.30
    """Share of the last price lost at a delisting whose reason is unknown."""
    median_days: PositiveInt = 20
    """Bars of the trailing median that stands in for volume in fills at the open."""
    executor: Literal["immediate", "twap", "vwap", "almgren_chriss", "learned"] = "immediate"
    """How orders meet the day after the decision. immediate: at its open, at once. The others work
    them through its ticks, for which `executor_dataset` has the bars: evenly, by the volume profile
    of the train days, by Almgren and Chriss's curve (`execution.kappa`), or by a learned policy.
    Agents learn with immediate fills; validation, evaluation and reports use the executor."""
    executor_dataset: str | None = None
    """Dataset of the store with intraday bars of the same symbols. Orders for days it lacks are
    filled at the open, and counted. With an immediate executor it changes no fill: what the fills
    cost is measured against the day's TWAP and VWAP."""
    executor_policy: Path | None = None
    """Directory of the learned policy, as `echelon execution train` leaves it in a seed's."""
    executor_step_minutes: PositiveFloat = 30.0
    """How often the executor decides; within a step it trades evenly."""
    executor_price: Literal["close", "vwap"] = "close"
    """What a tick trades at: its close or its volume-weighted mean."""
    executor_spread_bps: NonNegativeFloat | None = None
    """Half the spread, which every fill pays; null: the slippage where it is fixed, else 0."""
    executor_impact_bps: NonNegativeFloat | None = None
    """Temporary impact at the whole volume of a tick, linear in the share of it; null: by the
    slippage. That by the square root becomes a line that costs the same at a hundredth of the
    volume."""
    executor_permanent_bps: NonNegativeFloat = 0.0
    """Permanent impact at the whole volume of a tick: how far it moves the order's later ticks."""

    def preset_for(self, calendar: str | None) -> Preset:
        """The preset in force on data of a calendar; refuses one that contradicts it.

        calendar: None: a drawn market, of no exchange, where `auto` is `paper`
        """
        if calendar is None:
            return "paper" if self.preset == "auto" else self.preset
        market = CALENDARS.get(calendar)
        if self.preset == "auto":
            if market is None:
                known = ", ".join(f"{name}: {preset}" for name, preset in CALENDARS.items())
                named = shorten(calendar, 40)
                raise ConfigError(
                    f"market.preset is 'auto', but the calendar of the data, {named!r}, does not "
                    f"say whose rules apply (known: {known}). Name the preset, such as "
                    "market.preset=us (us, cn, crypto, paper, hierarchical), or import the data "
                    "with the calendar of their exchange (data.calendar)."
                )
            return market
        if market is None or self.preset_confirmed or self.preset in _FITTING[market]:
            return self.preset
        raise ConfigError(
            f"market.preset is {self.preset!r} ({_KNOWN_BY[self.preset]}), but the calendar of the "
            f"data is {calendar} ({_KNOWN_BY[market]}), whose preset is {market!r}. Leave "
            f"market.preset out or set market.preset={market}; where the calendar is wrong, import "
            f"the data with another data.calendar; to trade by {self.preset!r} all the same, set "
            "market.preset_confirmed=true (of a run that exists: in its config.yaml)."
        )

    def _contradictions(self) -> Iterator[str]:
        if self.executor != "immediate" and self.executor_dataset is None:
            yield (
                f"market.executor is {self.executor!r}, which works orders through the day, but "
                "market.executor_dataset does not name a dataset of intraday bars"
            )
        elif self.executor_dataset is not None and self.fill == "close":
            yield (
                "market.executor and market.executor_dataset are about the day after the decision, "
                f"but market.fill is 'close' (executor {self.executor!r}). Set it to 'open', or "
                "leave them out"
            )
        if self.executor == "learned" and self.executor_policy is None:
            yield (
                "market.executor is 'learned', but market.executor_policy does not name the "
                "policy's directory"
            )


EXECUTOR_KEYS = tuple(f"market.{name}" for name in MarketConfig.model_fields if "executor" in name)
"""What says how orders meet the day: for validation and evaluation, not for what agents collect."""
