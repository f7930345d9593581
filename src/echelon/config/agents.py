"""Configuration of agents, training and evaluation: the sections of design notes 001 and 003."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from echelon.config._base import Section
from echelon.config.algorithms import AlgorithmName
from echelon.types import MOST_PROCESSES, MOST_SEEDS

Baseline = Literal[
    "benchmark",
    "buy_and_hold",
    "equal_weight",
    "min_variance",
    "hrp",
    "momentum",
    "forecast",
    "random",
    "cash",
]
SummaryMeasure = Literal["total_return", "sharpe", "volatility", "max_drawdown"]
Fraction = Annotated[float, Field(ge=0, le=1)]
TargetKind = Literal["return", "volatility", "rank"]

ENCODERS: Mapping[str, str] = {
    "TimeCNN": "encoders:TimeCNN",
    "Transformer": "encoders:TransformerEncoder",
    "TimesNet": "timesnet:TimesNet",
}
"""Every encoder: its file in `models`, and its class there."""

if TYPE_CHECKING:
    EncoderName: TypeAlias = str
else:
    EncoderName = Literal[tuple(ENCODERS)]


class StateConfig(Section):
    """What an agent observes besides the market."""

    include_pos: bool = True
    """Holdings, as weights, join each asset."""
    include_cash: bool = True
    """The cash share joins each asset."""


class ModelConfig(Section):
    """The encoder of the market, and the layers after it."""

    encoder: EncoderName = "TimeCNN"
    """Encoder over the time window of each asset."""
    d_model: PositiveInt = 128
    """Width of the embedding."""
    n_layers: PositiveInt = 3
    """Layers of the encoder."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout inside the encoder."""
    hidden: PositiveInt = 64
    """Width of the layers after the encoder, which run once per book and asset."""
    cross_asset: Literal["mlp", "attention", "none"] = "mlp"
    """How assets see one another: through their mean and an MLP, by self-attention, or not."""
    shared_encoder: bool = True
    """Actor and critic share encoder and first layers; false: the critic has its own."""
    periods: tuple[Annotated[int, Field(ge=2)], ...] = ()
    """Periods of TimesNet, in bars; empty: the strongest ones of the train window."""
    n_periods: PositiveInt = 3
    """How many periods TimesNet looks for, where `periods` names none."""
    direct: NonNegativeInt = 0
    """Width of an MLP that takes the bar's own features past the encoder and is added to the
    embedding: for features that look back by themselves, such as ranks of factors; 0: none."""


class PretrainConfig(Section):
    """Pre-training of an expert's encoder on the train window."""

    enabled: bool = True
    """false: the encoder stays as it was drawn."""
    horizons: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1, 5, 20)
    """Bars ahead over which the targets are predicted."""
    targets: Annotated[tuple[TargetKind, ...], Field(min_length=1)] = ("return", "volatility")
    """What is predicted over each horizon. rank: place of an asset's return from the next fill on
    among those of all assets; agents on scores (`cross_fit`) take the first target as the one."""
    loss: Literal["mse", "ic", "pairwise"] = "mse"
    """What ranks are learned by: squared error; ic: correlation of forecasts and ranks across the
    assets of a bar; pairwise: which of two assets earns more. The others: by squared error."""
    cross_fit: Annotated[int, Field(ge=0, le=100)] = 0
    """Blocks of the train window, each scored by an encoder that was fitted without it. Agents then
    learn on forecasts, out of fold, in place of embeddings; 0: on embeddings of the one encoder."""
    masked_share: Annotated[float, Field(ge=0, lt=1)] = 0.15
    """Share of a window's rows that are hidden and have to be predicted from the rest; 0: none."""
    epochs: PositiveInt = 20
    """Passes over the train window at most."""
    pass_rows: PositiveInt | None = None
    """Bars in a pass at most, drawn by lot for each; null: all of the train window."""
    patience: PositiveInt = 3
    """Stop after this many passes without a lower loss on the validation window."""
    batch_rows: PositiveInt = 64
    """Bars in a step, each with all its assets."""
    lr: PositiveFloat = 1.0e-3
    """Learning rate of Adam."""
    weight_decay: NonNegativeFloat = 1.0e-4
    """Decay of the weights, apart from the gradient (AdamW)."""

    @property
    def n_targets(self) -> int:
        return len(self.targets) * len(self.horizons)

    def _contradictions(self) -> Iterator[str]:
        for name, values in (("targets", self.targets), ("horizons", self.horizons)):
            if len(set(values)) < len(values):
                yield f"{name} {list(values)} name one twice; name it once"
        if self.loss != "mse" and "rank" not in self.targets:
            yield f"loss={self.loss} is of ranks; add rank to targets {list(self.targets)}"
        if self.cross_fit == 1:
            yield "cross_fit=1 leaves nothing to fit on; take 2 blocks or more, or 0"
        if self.cross_fit and not self.enabled:
            yield "cross_fit scores rows by fitted encoders; set enabled=true, or cross_fit=0"


class LoraConfig(Section):
    """Low-rank adapters on an expert's encoder."""

    enabled: bool = False
    """false: the pre-trained encoder stays frozen."""
    rank: PositiveInt = 8
    """Rank of an adapter's matrices."""
    alpha: PositiveFloat = 16.0
    """An adapter's output is multiplied by alpha / rank."""
    lr: PositiveFloat = 1.0e-4
    """Learning rate of the adapters."""
    every_updates: PositiveInt = 16
    """One critic update in this many also trains the adapter, which means encoding again."""
    refresh_updates: PositiveInt = 1024
    """Updates between two computations of the whole embedding table."""


class ExpertConfig(Section):
    """A single expert by target weights: SAC, TD3 or APG (`train.algo`)."""

    actor: Literal["attention", "top_k"] = "attention"
    """attention: every asset sees all others, from no portfolio in particular. top_k: only with
    APG, for wide universes; starts as the rule that holds the highest scores, of which the first
    column of the embedding has the score (`pretrain.cross_fit`)."""
    top_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """top_k: share of the assets that the rule holds, before anything is learned."""
    buffer: Annotated[float, Field(ge=1)] = 3.0
    """top_k: a holding is kept until its rank leaves this times `top_share`."""
    speed: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """top_k: share of the way to the wished portfolio at each bar."""
    hidden: Annotated[int, Field(gt=0, multiple_of=4)] = 64
    """Width of actor and critics; a multiple of 4, the heads of the actor's attention."""
    buffer_size: PositiveInt = 1_000_000
    """Transitions that the replay buffer holds."""
    batch_size: PositiveInt = 256
    """Transitions of an update."""
    updates_per_step: PositiveFloat = 0.015625
    """Gradient updates per environment step; each book's bar is a step."""
    learning_starts: PositiveInt = 5_000
    """Environment steps, by lot, before the first update."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.005
    """Share by which the target critics follow at each update."""
    warmup_updates: Annotated[int, Field(ge=0)] = 1_000
    """Updates over which the learning rates rise to their full size."""
    entropy: PositiveFloat | Literal["auto"] = "auto"
    """SAC's temperature; auto: such that the entropy of the actions is `target_entropy`."""
    first_temperature: PositiveFloat = 1.0
    """SAC: temperature to begin with where `entropy` is auto; rewards of 0.1 want one of 0.1."""
    target_entropy: float = -1.0
    """SAC: entropy aimed at, per asset that can be traded."""
    exploration_noise: NonNegativeFloat = 0.1
    """TD3: standard deviation of what is added to actions while collecting."""
    target_noise: NonNegativeFloat = 0.2
    """TD3: standard deviation of what is added to the target's actions, cut at `noise_clip`."""
    noise_clip: NonNegativeFloat = 0.5
    """TD3: largest target noise."""
    policy_delay: PositiveInt = 2
    """TD3: critic updates for each update of the actor and of the targets."""
    horizon: PositiveInt = 20
    """APG: bars over which gradients flow through the market."""
    weight_decay: NonNegativeFloat = 0.0
    """APG: decay of the actor's weights, apart from the gradient (AdamW); of top_k's, towards the
    rule it starts from."""

    def _contradictions(self) -> Iterator[str]:
        if self.top_share * self.buffer >= 1.0:
            yield (
                f"buffer ({self.buffer:g}) times top_share ({self.top_share:g}) leaves no rank at "
                "which a holding is sold: take less than 1 of both together"
            )
        if self.batch_size > self.buffer_size:
            yield (
                f"batch_size ({self.batch_size:,}) exceeds buffer_size ({self.buffer_size:,}): a "
                "batch would hold transitions more than once"
            )


class TrainConfig(Section):
    """Training of an agent."""

    algo: AlgorithmName = "A2C"
    """Learning algorithm: A2C buys, sells and holds; the others say target weights. SB3's are
    Stable-Baselines3's, to compare with, and keep its networks, learning rates and discount.
    HIERARCHY: a population of SAC experts under a router (`experts`, `meta_router`, `trainer`)."""
    gamma: Annotated[float, Field(ge=0, lt=1)] = 0.96
    """Discount per bar."""
    entropy_coef: NonNegativeFloat = 0.05
    """Weight of the entropy bonus."""
    value_coef: NonNegativeFloat = 1.0
    """Weight of the value loss."""
    lr_actor: PositiveFloat = 1.0e-5
    """Adam learning rate of the actor."""
    lr_critic: PositiveFloat = 1.0e-5
    """Adam learning rate of the critic."""
    grad_clip: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""
    rollout_steps: PositiveInt = 50
    """Bars per update."""
    total_env_steps: PositiveInt = 1_000_000
    """Environment steps in all."""
    log_interval_steps: PositiveInt = 1000
    """Steps between log lines. This and the other intervals are rounded up to whole rounds of
    `rollout_steps` bars of all books."""
    books: PositiveInt = 1
    """Books that trade side by side; each of their bars is an environment step."""
    offset_groups: PositiveInt = 1
    """Groups of books, each at a time of its own; must divide `books`. A group's bars are encoded
    once for all its books, so fewer groups are faster and more of them see more of the market."""
    episode_steps: PositiveInt | None = None
    """Bars of an episode, started anywhere in the train window; null: the window from its first
    bar to its last."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """λ of the returns: 1 credits an action with all discounted rewards that follow; less, with
    the nearer ones and the critic's estimate of the rest. Noise grows with the horizon."""
    normalize_advantages: bool = False
    """Advantages of an update are scaled to mean 0 and standard deviation 1."""
    peer_baseline: bool = False
    """Take from each book's advantage the mean of the other books of its offset group: what the
    market did to all of them cancels. Needs at least two books in a group."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rates fall to zero over `total_env_steps`, if they do."""
    validate_every_steps: PositiveInt = 50_000
    """Steps between backtests on the validation window."""
    select_by: Literal["sharpe_annual", "sortino_annual", "calmar", "total_return"] = (
        "sharpe_annual"
    )
    """The measure on the validation window that chooses the best checkpoint."""
    patience: PositiveInt | None = None
    """Stop after this many validations without a better one; null: never early."""
    checkpoint_every_steps: PositiveInt = 100_000
    """Steps between checkpoints."""
    keep_checkpoints: PositiveInt = 3
    """Periodic checkpoints to keep, the newest ones; the best one is kept next to them."""
    seeds: Annotated[int, Field(gt=0, le=MOST_SEEDS)] = 1
    """Agents to train, with seeds `seed`, `seed` + 1 and so on."""
    threads: Annotated[int, Field(gt=0, le=MOST_PROCESSES)] = 1
    """Threads of one agent's training. One is fastest for small networks, and results are the
    same only for the same number."""

    def _contradictions(self) -> Iterator[str]:
        if self.books % self.offset_groups:
            yield (
                f"train.offset_groups ({self.offset_groups}) does not divide train.books "
                f"({self.books})"
            )
        if self.peer_baseline and self.books == self.offset_groups:
            yield (
                "train.peer_baseline compares the books of a group, but each of the "
                f"{self.offset_groups} groups has one book. Take more books or fewer groups."
            )


class RewardConfig(Section):
    """What an agent is paid for."""

    kind: Literal["return", "log_return", "excess", "active", "differential_sharpe"] = "return"
    """return: of the book over a bar. log_return: its logarithm. excess: return less the
    benchmark's. active: return less the mean return of all that may be bought; APG maximises the
    information ratio of it, mean over deviation. differential_sharpe: the bar's contribution to a
    decaying Sharpe ratio."""
    scale: PositiveFloat = 1.0
    """Rewards are multiplied by this, last of all."""
    variance_penalty: NonNegativeFloat = 0.0
    """Times the square of the bar's return, taken off: a utility that dislikes risk."""
    drawdown_penalty: NonNegativeFloat = 0.0
    """Times the deepening of the drawdown at a bar, taken off."""
    cvar_penalty: NonNegativeFloat = 0.0
    """Times the loss beyond the value at risk, over `cvar_tail`, taken off."""
    cvar_tail: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the worst returns that make the tail."""
    sharpe_decay: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Rate at which the differential Sharpe ratio forgets."""


class EvalConfig(Section):
    """Backtests."""

    deterministic: bool = True
    """Take the most probable action instead of sampling."""
    use_fee: bool = True
    """Charge fees in evaluation."""
    metrics: tuple[SummaryMeasure, ...] = get_args(SummaryMeasure)
    """Measures in the summary."""
    baselines: tuple[Baseline, ...] = get_args(Baseline)
    """What every agent is compared with."""
    rebalance_bars: PositiveInt = 21
    """Bars between the rebalancings of the baselines that hold target weights."""
    estimation_bars: PositiveInt = 252
    """Past bars min-variance and HRP estimate covariances from."""
    momentum_bars: PositiveInt = 20
    """The momentum baseline buys what rose over this many bars and sells the rest."""


class ForecastConfig(Section):
    """The forecaster: a baseline that learns the ranks of returns, and holds the best."""

    model: Literal["boosting", "ridge"] = "boosting"
    """boosting: regression trees by LightGBM. ridge: a linear model. Both see the features of the
    bar of the decision."""
    horizon: PositiveInt = 5
    """Bars ahead over which returns are ranked; a tranche decides once in as many."""
    tranches: PositiveInt = 5
    """Parts of the book that decide on different bars, so that no weekday is special."""
    trees: PositiveInt = 150
    """Trees of `boosting`."""

    def _contradictions(self) -> Iterator[str]:
        if self.tranches > self.horizon:
            yield (
                f"tranches ({self.tranches}) exceeds horizon ({self.horizon}): every tranche has "
                "a bar of its own among those"
            )


BASELINE_SETTINGS = ("metrics", "baselines", "rebalance_bars", "estimation_bars", "momentum_bars")
"""Keys of `eval` that no agent's own backtest depends on."""


class LoggingConfig(Section):
    """Where results go."""

    use_wandb: bool = False
    """Also log to Weights & Biases."""
    use_mlflow: bool = False
    """Also log to MLflow."""
    tensorboard: bool = True
    """Also write TensorBoard event files."""
    output_dir: Path = Path("./runs")
    """Parent of the run directories."""
    registry: Path | None = None
    """Where trials and looks at test windows are counted; null: in `registry` next to the run."""
