"""The root of the configuration: one frozen tree for every command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import date
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from echelon.config._base import Section
from echelon.config.agents import (
    EvalConfig,
    ExpertConfig,
    ForecastConfig,
    Fraction,
    LoggingConfig,
    LoraConfig,
    ModelConfig,
    PretrainConfig,
    RewardConfig,
    StateConfig,
    TrainConfig,
)
from echelon.config.alerts import AlertsConfig
from echelon.config.data import DataConfig
from echelon.config.execution import ExecutionConfig
from echelon.config.features import FeaturesConfig, NormalizationConfig
from echelon.config.hierarchy import ExpertsConfig, MetaRouterConfig, RiskConfig, TrainerConfig
from echelon.config.market import MarketConfig

DateSpan = tuple[date, date]
Length = Annotated[int, Field(gt=0, le=1_200)]


class SplitConfig(Section):
    """Train, validation and test windows, both ends included, in order and apart."""

    train: DateSpan = (date(1990, 1, 2), date(2012, 12, 31))
    """The window that learners and the scaler see."""
    valid: DateSpan = (date(2013, 1, 2), date(2017, 12, 29))
    """The window that chooses checkpoints and parameters."""
    test: DateSpan = (date(2018, 1, 2), date(2022, 12, 28))
    """The window that is looked at once."""

    def _contradictions(self) -> Iterator[str]:
        names = ("train", "valid", "test")
        spans = [self.train, self.valid, self.test]
        for name, (first, last) in zip(names, spans, strict=True):
            if first > last:
                yield f"split.{name} ends ({last}) before it starts ({first})"
        for k in (0, 1):
            if spans[k][1] >= spans[k + 1][0]:
                yield (
                    f"split.{names[k + 1]} starts ({spans[k + 1][0]}) before split.{names[k]} "
                    f"ends ({spans[k][1]}); the windows must follow one another without overlap"
                )


class WalkForwardConfig(Section):
    """Folds that move through the data, each with its own train, validation and test window.

    By default a test year at a time from 2008 to 2025, as far as the data reach (design note 002),
    after six years to train and two to validate: data from 2000 on just reach 2008.
    """

    scheme: Literal["rolling", "expanding"] = "rolling"
    """rolling: every train window is as long as `train`. expanding: each begins with the data, the
    first one being at least as long as `train`."""
    unit: Literal["year", "month"] = "year"
    """What lengths are counted in. Windows begin on the first of a calendar year or month."""
    train: Length = 6
    """Length of the train window."""
    valid: Length = 2
    """Length of the validation window, which chooses the checkpoint."""
    test: Length = 1
    """Length of the test window; the next fold's begins where it ends."""
    first_test: date | None = date(2008, 1, 1)
    """No test window begins before this day; null: as early as the data allow."""
    last_test: date | None = date(2025, 12, 31)
    """No test window ends after this day; null: as late as the data allow."""
    purge_bars: NonNegativeInt = 1
    """Bars dropped between train and validation. A reward reaches one bar ahead."""
    embargo_bars: NonNegativeInt = 5
    """Bars dropped between validation and test, so that the days a checkpoint was chosen on are
    not in the same turmoil as those it is judged on."""
    partial: bool = False
    """Also test on a last window that the data, or `last_test`, end within."""

    def _contradictions(self) -> Iterator[str]:
        first, last = self.first_test, self.last_test
        if first is not None and last is not None and first > last:
            yield f"walk_forward.last_test ({last}) is before walk_forward.first_test ({first})"


class ComputeConfig(Section):
    """Where work is done; results do not depend on it, and no hash or run directory holds it."""

    engine: Literal["local", "ray"] = "local"
    """local: processes of this machine. ray: actors of a Ray cluster (extra `scale`)."""
    address: str = "auto"
    """HOST:PORT of the cluster's head; auto: the cluster that this machine is a node of, or one of
    its own; local: one of its own, on loopback, for as long as the command lasts."""
    memory_gb: PositiveFloat | None = None
    """Memory that an actor reserves; null: what a process and its configuration need at least."""


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
    forecast: ForecastConfig = ForecastConfig()
    """The forecaster among the baselines."""
    logging: LoggingConfig = LoggingConfig()
    """Where results go."""
    experts: ExpertsConfig = ExpertsConfig()
    """The population of experts."""
    meta_router: MetaRouterConfig = MetaRouterConfig()
    """The router."""
    trainer: TrainerConfig = TrainerConfig()
    """Training of the hierarchy."""
    risk: RiskConfig = RiskConfig()
    """Risk control: limits of every real book, and of the hierarchy."""
    execution: ExecutionConfig = ExecutionConfig()
    """The execution layer."""
    walk_forward: WalkForwardConfig = WalkForwardConfig()
    """Folds of `echelon walk-forward`."""
    compute: Annotated[ComputeConfig, Field(exclude=True)] = ComputeConfig()
    """Where work is done."""
    alerts: AlertsConfig = AlertsConfig()
    """Who is told of risk events and of how training ended; no result and no hash depends on it."""

    def _contradictions(self) -> Iterator[str]:
        if self.expert.actor == "top_k" and self.train.algo != "APG":
            yield (
                f"expert.actor 'top_k' is moved by gradients through the market alone, and "
                f"train.algo is {self.train.algo!r}: take APG, or expert.actor 'attention'"
            )
        if self.expert.actor == "top_k" and not self.pretrain.cross_fit:
            yield (
                "expert.actor 'top_k' takes the first column of the embedding for a score, which "
                "it is with pretrain.cross_fit of 2 or more: set it, or expert.actor 'attention'"
            )
        if self.lora.enabled and self.pretrain.cross_fit:
            yield (
                f"pretrain.cross_fit={self.pretrain.cross_fit} scores each row by an encoder that "
                "was fitted without it, and lora.enabled=true goes on fitting one on all of them: "
                "turn one of the two off"
            )

    @field_validator("assets")
    @classmethod
    def _assets_once_each(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        twice = sorted(symbol for symbol, count in Counter(value).items() if count > 1)
        if twice:
            raise ValueError(f"listed more than once: {', '.join(twice)}")
        return value
