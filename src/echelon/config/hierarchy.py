"""Configuration of the hierarchy: the sections of design note 001, and what else they need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from echelon.config._base import Section
from echelon.config.agents import Baseline, Fraction
from echelon.types import MOST_PROCESSES

Share = Annotated[float, Field(gt=0, lt=1)]
Discount = Annotated[float, Field(ge=0, lt=1)]


_NO_EXPERTS = {
    "benchmark": "it is an index, which nobody trades",
    "buy_and_hold": "it is what a book did once, not what it should hold now",
    "cash": "the router may choose cash anyway",
    "random": "it decides by lot",
}
"""Baselines that no router can put in charge."""


class SharingConfig(Section):
    """Replay that the experts share, and how far each believes the others' data."""

    enabled: bool = True
    """false: every expert learns from its own data alone."""
    buffer_size: PositiveInt = 2_000_000
    """Steps remembered in all; every expert writes into an equal part."""
    on_disk: bool = False
    """Keep the arrays in files that are mapped instead of in memory."""
    own_share: Fraction = 0.5
    """Share of a batch that is the expert's own fresh data; the rest comes from everybody."""
    fresh_steps: PositiveInt = 50_000
    """The expert's own steps that count as fresh, the latest ones."""
    sequence_steps: PositiveInt = 5
    """Steps of a sequence; targets reach that far."""
    trace: Fraction = 0.95
    """λ of Retrace: how much of what later steps found is credited to earlier ones."""
    kl_limit: PositiveFloat = 1.0
    """Shared steps are dropped where the policies differ by more than this per dimension."""
    corrected: bool = True
    """false: others' data count as the expert's own, to show what that does."""


class ExpertsConfig(Section):
    """The population of experts."""

    n_experts: Annotated[int, Field(ge=2)] = 5
    """Number of experts."""
    skill_dim: PositiveInt = 10
    """Dimension of an expert's skill vector."""
    mi_reward_weight: NonNegativeFloat = 0.5
    """Weight β of the mutual-information reward."""
    mi_estimator: Literal["infonce", "diayn"] = "infonce"
    """infonce: what an action tells of the skill; diayn: what a book tells of it."""
    mi_margin: NonNegativeFloat = 0.5
    """The reward is paid where an expert's Sharpe ratio (annual) is this near to the best one's."""
    responsibility: bool = True
    """Weight each expert's loss by how much a bar is its own; false: every bar counts alike."""
    responsibility_by: Literal["returns", "router"] = "returns"
    """returns: by trailing returns of own books; router: once it has learned, by its choices."""
    responsibility_bars: PositiveInt = 40
    """Trailing bars of the experts' own books that tell whose a bar is."""
    responsibility_temperature: PositiveFloat = 0.5
    """Of the softmax over the experts' standardised trailing returns."""
    responsibility_floor: Fraction = 0.05
    """Share of every bar that is spread over all experts."""
    sharing: SharingConfig = SharingConfig()
    """Replay that the experts share."""
    rules: tuple[Baseline, ...] = ()
    """Baselines that join as experts which do not learn, such as equal_weight or hrp, under the
    settings of `eval`; forecast is fitted on the experts' part of the train window."""

    @property
    def count(self) -> int:
        """Of all whom the router can put in charge: the learned ones, then the rules."""
        return self.n_experts + len(self.rules)

    def _contradictions(self) -> Iterator[str]:
        for name in sorted(_NO_EXPERTS.keys() & set(self.rules)):
            yield f"experts.rules: {name} is no expert: {_NO_EXPERTS[name]}. Leave it out"
        if len(set(self.rules)) < len(self.rules):
            yield f"experts.rules = {list(self.rules)} names a rule twice. Name each once"


class MetaRouterConfig(Section):
    """The router: PPO with masks over the experts and cash."""

    every_bars: PositiveInt = 5
    """Bars between its decisions."""
    horizons: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (5, 20, 40, 120)
    """Trailing bars over which it sees the experts' books and the market."""
    macro: NonNegativeInt = 0
    """So many of the last features, which are the exogenous series, it sees too."""
    window_share: Share = 0.3
    """Last part of the train window, kept from the experts: the router learns on it."""
    command: Literal["select", "blend"] = "select"
    """select: the most probable expert is in charge; blend: the mix of all experts' targets is
    held, in the proportions of their probabilities, by one list of trades."""
    prior: Literal["none", "fixed_share"] = "none"
    """fixed_share: it starts at the fixed-share rule, sees its log weights, and learns what to add
    to them; none: it starts from nothing."""
    prior_kl: NonNegativeFloat = 0.01
    """Weight of the penalty on KL(policy ‖ prior) in its loss."""
    kl_lambda: NonNegativeFloat = 0.1
    """Weight λ of the KL bonus, at first; 0: there is none, and λ stays 0."""
    kl_lambda_max: NonNegativeFloat = 0.2
    """λ never exceeds it."""
    kl_bonus: Literal["usage", "policy"] = "usage"
    """usage: for the expert that was seldom chosen; policy: for the one unlike the others."""
    entropy_floor: Fraction = 0.4
    """Least entropy of usage, as a share of log K, that λ adapts to keep."""
    ent_coef: NonNegativeFloat = 0.01
    """Entropy coefficient of PPO."""
    lr: PositiveFloat = 3.0e-4
    """Learning rate of PPO."""
    gamma: Discount = 0.99
    """Discount per decision."""
    gae_lambda: Fraction = 0.95
    """λ of the advantage estimates."""
    n_steps: PositiveInt = 1024
    """Decisions of a rollout, over all its environments."""
    n_envs: PositiveInt = 16
    """Environments side by side; must divide `n_steps`."""
    batch_size: PositiveInt = 64
    """Decisions of a minibatch."""
    episode_decisions: PositiveInt = 100
    """Decisions of an episode."""

    def _contradictions(self) -> Iterator[str]:
        for name in ("n_envs", "batch_size"):
            if self.n_steps % getattr(self, name):
                yield (
                    f"meta_router.{name} ({getattr(self, name)}) does not divide "
                    f"meta_router.n_steps ({self.n_steps})"
                )
        if self.kl_lambda > self.kl_lambda_max:
            yield (
                f"meta_router.kl_lambda ({self.kl_lambda:g}) is above meta_router.kl_lambda_max "
                f"({self.kl_lambda_max:g}). Lower the one or raise the other"
            )


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
    """Relative size of the noise on the weights of an expert that copies another's."""


class TrainingSchedule(Section):
    """The three frequencies of MF-PBT."""

    router: UpdateSchedule = UpdateSchedule(freq=10, steps=10_000)
    """Training of the router."""
    experts: UpdateSchedule = UpdateSchedule(freq=5, steps=5_000)
    """Training of the experts."""
    population: PopulationSchedule = PopulationSchedule()
    """Evolution of the population."""


class EvolutionConfig(Section):
    """MF-PBT: hyperparameters that evolve, and within which bounds."""

    enabled: bool = True
    """false: hyperparameters stay what they are."""
    members_per_niche: PositiveInt = 1
    """Members that compete for each expert's place; 1, or a multiple of 4 · `subpopulations`."""
    subpopulations: PositiveInt = 1
    """Parts of a niche, each evolving at a pace of its own."""
    paces: tuple[PositiveInt, ...] = (1,)
    """δ of each subpopulation: it evolves every so many evolution rounds."""
    variance_penalty: NonNegativeFloat = 0.5
    """Fitness is the mean over validation windows less this times their standard deviation."""
    windows: PositiveInt = 4
    """Pieces of the validation window that fitness is measured on."""
    lr: tuple[PositiveFloat, PositiveFloat] = (3.0e-4, 3.0e-3)
    """Learning rate of experts."""
    router_lr: tuple[PositiveFloat, PositiveFloat] = (1.0e-4, 1.0e-3)
    """Learning rate of the router."""
    target_entropy: tuple[float, float] = (-2.0, -0.2)
    """Entropy aimed at per asset."""
    mi_reward_weight: tuple[NonNegativeFloat, NonNegativeFloat] = (0.05, 1.0)
    """β."""
    kl_lambda: tuple[NonNegativeFloat, NonNegativeFloat] = (0.01, 0.2)
    """λ."""
    gamma: tuple[Discount, Discount] = (0.8, 0.995)
    """Discount of experts, per bar."""

    def _contradictions(self) -> Iterator[str]:
        for name in ("lr", "router_lr", "target_entropy", "mi_reward_weight", "kl_lambda", "gamma"):
            low, high = getattr(self, name)
            if low > high:
                yield f"trainer.evolution.{name}: {low:g} is above {high:g}"
        if len(self.paces) != self.subpopulations:
            yield (
                f"trainer.evolution.paces names {len(self.paces)} for "
                f"{self.subpopulations} subpopulation(s)"
            )
        if list(self.paces) != sorted(set(self.paces)):
            yield (
                f"trainer.evolution.paces = {list(self.paces)}: each must be greater than the one "
                "before, such as [1, 5]"
            )
        members, parts = self.members_per_niche, self.subpopulations
        step = 4 * parts  # quarters by fitness, each of which MF-PBT treats in its own way
        if members % step and (members, parts) != (1, 1):
            fitting = sorted({max(members // step, 1) * step, (members // step + 1) * step})
            yield (
                f"trainer.evolution.members_per_niche = {members} does not divide into "
                f"trainer.evolution.subpopulations = {parts} of four equal quarters. Take "
                f"{' or '.join(map(str, fitting))} members, or 1 member and 1 subpopulation"
            )


class TrainerConfig(Section):
    """Training of the hierarchy."""

    diversity_threshold: Fraction = 0.25
    """Least mean action pairwise distance; below it the worst expert is re-seeded."""
    diversity_patience: NonNegativeInt = 20
    """Rounds from the start, and from one re-seeding to the next, in which none is re-seeded:
    networks begin alike, and become different only as they learn."""
    round_steps: PositiveInt = 1_000
    """Environment steps that every expert collects in a round."""
    probe_states: PositiveInt = 256
    """Shared states on which portfolios are compared."""
    workers: Annotated[int, Field(gt=0, le=MOST_PROCESSES)] = 1
    """Processes that the experts are spread over; results do not depend on it."""
    training_schedule: TrainingSchedule = TrainingSchedule()
    """Who is trained when."""
    evolution: EvolutionConfig = EvolutionConfig()
    """MF-PBT."""


class RiskConfig(Section):
    """Risk control; drawdowns and losses are shares of a book.

    `max_drawdown` and `target_volatility` scale the real book of every policy, baselines too; the
    other keys are of the hierarchy.
    """

    enabled: bool = True
    """false: nobody is masked, nothing is limited."""
    max_drawdown: Share | None = None
    """Drawdown budget of the real book: what of it is left since the peak of the last 252 trading
    days is the share of the policy's wish that is held; null: no budget."""
    target_volatility: PositiveFloat | None = None
    """Most volatility a year, by the last 60 trading days, of what is held; null: no limit."""
    drawdown_window: PositiveInt = 30
    """Trading days that an expert's peak may lie back."""
    drawdown_limit: Share = 0.15
    """An expert that lost more is masked for the router at once."""
    drawdown_release: Share = 0.10
    """It is calm below this."""
    release_bars: PositiveInt = 5
    """Calm bars in a row before an expert is released, or a position limit restored."""
    cooldown_bars: NonNegativeInt = 20
    """Bars that a mask lasts at least."""
    cvar_limit: PositiveFloat = 0.05
    """Beyond this CVaR at 95 %, as a loss per bar, an expert's position limit is halved."""
    cvar_window: PositiveInt = 500
    """Returns that CVaR is estimated from; fewer are not judged."""
    cvar_constraint: bool = False
    """Hold the experts' CVaR to `cvar_limit` in training, by a Lagrange multiplier."""
    halt_drawdown: Share = 0.25
    """The whole portfolio goes to cash after losing more."""
    halt_bars: PositiveInt | None = 20
    """Bars in cash; null: for good."""
    turnover_per_bar: PositiveFloat = 2.0
    """Two-way turnover of one bar, in multiples of the book's value; 2 exchanges everything."""
    turnover_per_month: PositiveFloat = 40.0
    """Two-way turnover of 20 trading days; 40 is no limit."""

    def _contradictions(self) -> Iterator[str]:
        if self.drawdown_release > self.drawdown_limit:
            yield (
                f"risk.drawdown_release ({self.drawdown_release:g}) is above risk.drawdown_limit "
                f"({self.drawdown_limit:g})"
            )
