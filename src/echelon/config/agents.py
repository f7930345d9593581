"""Configuration of agents, training and evaluation: the sections of seeds 001 and 003."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from echelon.config._base import Section

Fraction = Annotated[float, Field(ge=0, le=1)]


class StateConfig(Section):
    """What an agent observes beside the market."""

    include_pos: bool = True
    """Holdings, as weights, join each asset."""
    include_cash: bool = True
    """The cash share joins each asset."""


class ModelConfig(Section):
    """The network of the flat agent."""

    encoder: Literal["TimeCNN", "Transformer"] = "TimeCNN"
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


class TrainConfig(Section):
    """Training of the flat agent."""

    algo: Literal["A2C"] = "A2C"
    """Learning algorithm."""
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
    """Steps between log lines."""


class EvalConfig(Section):
    """Backtests."""

    deterministic: bool = True
    """Take the most probable action instead of sampling."""
    use_fee: bool = True
    """Charge fees in evaluation."""
    metrics: tuple[Literal["total_return", "sharpe", "volatility", "max_drawdown"], ...] = (
        "total_return",
        "sharpe",
        "volatility",
        "max_drawdown",
    )
    """Measures in the summary."""


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


class ExpertsConfig(Section):
    """The population of experts."""

    n_experts: PositiveInt = 5
    """Number of experts."""
    skill_dim: PositiveInt = 10
    """Dimension of an expert's skill vector."""
    mi_reward_weight: NonNegativeFloat = 0.5
    """Weight β of the mutual-information reward."""


class MetaRouterConfig(Section):
    """The router."""

    kl_lambda: NonNegativeFloat = 0.1
    """Weight λ of the KL bonus."""
    ent_coef: NonNegativeFloat = 0.01
    """Entropy coefficient of MaskablePPO."""


class UpdateSchedule(Section):
    """How often a part is trained, in rounds, and for how many steps."""

    freq: PositiveInt
    """Every this many rounds."""
    steps: PositiveInt
    """Environment steps each time."""


class PopulationSchedule(Section):
    """How often the population evolves, in rounds, and how much it mutates."""

    freq: PositiveInt = 20
    """Every this many rounds."""
    mutation_rate: Fraction = 0.1
    """Relative size of a mutation."""


class TrainingSchedule(Section):
    """The three frequencies of MF-PBT."""

    router: UpdateSchedule = UpdateSchedule(freq=10, steps=10_000)
    """Training of the router."""
    experts: UpdateSchedule = UpdateSchedule(freq=5, steps=5_000)
    """Training of the experts."""
    population: PopulationSchedule = PopulationSchedule()
    """Evolution of the population."""


class TrainerConfig(Section):
    """Training of the hierarchy."""

    diversity_threshold: Fraction = 0.25
    """Least mean action pairwise distance; below it the worst expert is re-seeded."""
    training_schedule: TrainingSchedule = TrainingSchedule()
    """Who is trained when."""
