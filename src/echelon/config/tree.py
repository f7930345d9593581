"""The root of the configuration: one frozen tree for every command."""

from __future__ import annotations

from collections import Counter
from datetime import date
from typing import Annotated

from pydantic import Field, PositiveInt, field_validator, model_validator

from echelon.config._base import Section
from echelon.config.agents import (
    EvalConfig,
    ExpertConfig,
    Fraction,
    LoggingConfig,
    LoraConfig,
    ModelConfig,
    PretrainConfig,
    RewardConfig,
    StateConfig,
    TrainConfig,
)
from echelon.config.data import DataConfig
from echelon.config.execution import ExecutionConfig
from echelon.config.features import FeaturesConfig, NormalizationConfig
from echelon.config.hierarchy import ExpertsConfig, MetaRouterConfig, RiskConfig, TrainerConfig
from echelon.config.market import MarketConfig
from echelon.config.walkforward import WalkForwardConfig

DateSpan = tuple[date, date]


class SplitConfig(Section):
    """Train, validation and test windows, both ends included, in order and apart."""

    train: DateSpan = (date(1990, 1, 2), date(2012, 12, 31))
    """The window that learners and the scaler see."""
    valid: DateSpan = (date(2013, 1, 2), date(2017, 12, 29))
    """The window that chooses checkpoints and parameters."""
    test: DateSpan = (date(2018, 1, 2), date(2022, 12, 28))
    """The window that is looked at once."""

    @model_validator(mode="after")
    def _in_order_and_apart(self) -> SplitConfig:
        names = ("train", "valid", "test")
        spans = [self.train, self.valid, self.test]
        for name, (first, last) in zip(names, spans, strict=True):
            if first > last:
                raise ValueError(f"split.{name} ends ({last}) before it starts ({first})")
        for k in (0, 1):
            if spans[k][1] >= spans[k + 1][0]:
                raise ValueError(
                    f"split.{names[k + 1]} starts ({spans[k + 1][0]}) before split.{names[k]} "
                    f"ends ({spans[k][1]}); the windows must follow one another without overlap"
                )
        return self


class Config(Section):
    """Everything a run depends on."""

    seed: Annotated[int, Field(ge=0)] = 42
    """Seed of every random stream."""
    assets: tuple[str, ...] = ()
    """Symbols to trade, in this order; empty: all in the data, sorted."""
    window: PositiveInt = 20
    """Bars in an observation (W)."""
    fee_rate: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Fee per side as a share of the traded amount; null: what `market` says."""
    buy_pct: Fraction = 0.20
    """BUY spends this share of the cash."""
    sell_pct: Fraction = 0.50
    """SELL sells this share of the holding."""
    data: DataConfig = DataConfig()
    """Where bars come from."""
    split: SplitConfig = SplitConfig()
    """Train, validation and test windows."""
    features: FeaturesConfig = FeaturesConfig()
    """Which features to compute."""
    normalization: NormalizationConfig = NormalizationConfig()
    """How to scale them."""
    market: MarketConfig = MarketConfig()
    """What trading costs and what the exchange forbids."""
    reward: RewardConfig = RewardConfig()
    """What an agent is paid for."""
    state: StateConfig = StateConfig()
    """What an agent observes besides the market."""
    model: ModelConfig = ModelConfig()
    """The encoder of the market, and the layers after it."""
    train: TrainConfig = TrainConfig()
    """Training of an agent."""
    pretrain: PretrainConfig = PretrainConfig()
    """Pre-training of an expert's encoder."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters on an expert's encoder."""
    expert: ExpertConfig = ExpertConfig()
    """A single expert by target weights."""
    eval: EvalConfig = EvalConfig()
    """Backtests."""
    logging: LoggingConfig = LoggingConfig()
    """Where results go."""
    experts: ExpertsConfig = ExpertsConfig()
    """The population of experts."""
    meta_router: MetaRouterConfig = MetaRouterConfig()
    """The router."""
    trainer: TrainerConfig = TrainerConfig()
    """Training of the hierarchy."""
    risk: RiskConfig = RiskConfig()
    """Risk control of the hierarchy."""
    execution: ExecutionConfig = ExecutionConfig()
    """The execution layer."""
    walk_forward: WalkForwardConfig = WalkForwardConfig()
    """Folds of `echelon walk-forward`."""

    @field_validator("assets")
    @classmethod
    def _assets_once_each(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        twice = sorted(symbol for symbol, count in Counter(value).items() if count > 1)
        if twice:
            raise ValueError(f"listed more than once: {', '.join(twice)}")
        return value
