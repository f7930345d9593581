"""How much of each market a proof has: quick or full, by what the agent is.

A flat agent's training takes half a minute, an expert's several minutes (pre-training, tables of
embeddings), a hierarchy's five times that of one expert. So quick proofs differ: what an agent is
tested on, how many seeds there are, and for hierarchies also how long and on how many draws they
are trained. The bars are the same; where a quick proof has none, its certificate says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from echelon.config import Config
from echelon.config.algorithms import ALGORITHMS, Family
from echelon.proving.null import NullMarket
from echelon.proving.planted_proof import EXPERT_DRAWS
from echelon.proving.regime_proof import PairCounts

Mode = Literal["quick", "full", "reduced"]
NULL = NullMarket()
DRAWS = PairCounts()


class Pace(NamedTuple):
    """How experts are trained in less time, by the same method.

    epochs, pass_rows: of pre-training, at most; warmup: updates, at most
    updates_per_step, lr: of experts, at least
    """

    epochs: int
    pass_rows: int
    warmup: int
    updates_per_step: float
    lr: float


@dataclass(frozen=True)
class Sizes:
    """How much of each market; what is not named is the same in both modes.

    own_draws: of an expert, to learn from and to choose its checkpoint (planted, costly)
    signals: what is planted; planted_steps, …: most steps of one training
    validations: of one training; None: as the configuration says
    claim_draws: draws of the trend market on which claims are counted
    costly_steps: at the low fee, and at the high one
    hierarchy_flat: whether flat agents are trained next to hierarchies
    pace: what of experts' training is hurried; None: nothing
    """

    mode: Mode
    signals: tuple[str, ...]
    planted_seeds: int
    planted_steps: int
    validations: int | None
    null_draws: int
    null_agents: int
    claim_draws: int
    leaky_seeds: int
    costly_seeds: int
    costly_steps: tuple[int, int]
    n_draws: int = 16
    n_bars: int = 6000
    own_draws: tuple[int, int] = EXPERT_DRAWS
    other_seeds: int = 3
    null_steps: int = 1_000_000
    null_market: NullMarket = NULL
    chunk: int = 40
    leaky_steps: int = 320_000
    costly_valid_bars: int = 3000
    regime_pairs: int = 10
    regime_bars: int = 10_000
    regime_seeds: int = 0
    regime_steps: int = 400_000
    hierarchy_seeds: int = 0
    hierarchy_steps: int = 1_000_000
    hierarchy_draws: PairCounts = DRAWS
    hierarchy_flat: bool = True
    pace: Pace | None = None

    @property
    def adjustable(self) -> dict[str, int]:
        """What the command line can change, for the certificate."""
        return {
            "seeds": self.planted_seeds,
            "draws": self.n_draws,
            "bars": self.n_bars,
            "null_draws": self.null_draws,
        }

    def adjust(self, **values: int | None) -> Sizes:
        """With other values of these names; None: as it is. Where one is less, it is reduced."""
        given = {name: value for name, value in values.items() if value is not None}
        less = any(value < getattr(self, name) for name, value in given.items())
        agents = min(self.null_agents, given.get("null_draws", self.null_agents))
        mode: Mode = "reduced" if less else self.mode
        return replace(self, mode=mode, null_agents=agents, **given)  # type: ignore[arg-type]


QUICK = Sizes(
    mode="quick",
    signals=("trend",),
    planted_seeds=5,
    planted_steps=480_000,
    validations=4,
    null_draws=48,
    null_agents=0,
    claim_draws=20,
    leaky_seeds=1,
    costly_seeds=2,
    costly_steps=(480_000, 160_000),
    chunk=24,
)
"""Under five minutes on two cores."""
QUICK_EXPERTS = replace(QUICK, planted_seeds=2, costly_seeds=1, n_draws=8)
"""Fewer seeds and test draws; trained as in the full proof."""
QUICK_HIERARCHY = replace(
    QUICK,
    planted_seeds=1,
    planted_steps=300_000,
    validations=1,
    claim_draws=10,
    leaky_steps=200_000,
    costly_seeds=1,
    costly_steps=(200_000, 200_000),
    costly_valid_bars=2000,
    n_draws=4,
    n_bars=2000,
    own_draws=(4, 1),
    regime_bars=3000,
    hierarchy_seeds=1,
    hierarchy_steps=200_000,
    hierarchy_draws=PairCounts(train=2, valid=1, test=2, valid_bars=1500),
    hierarchy_flat=False,
    pace=Pace(epochs=2, pass_rows=4096, warmup=100, updates_per_step=0.08, lr=2.5e-3),
)
"""One seed a market, few and short draws, a brief training; on the regime market no bar.

With the schedule of seed 001, 200,000 steps are 20 rounds: experts learn after 10, 15 and 20, the
router after 10 and 20; 300,000 are 30. Of an adapted TimesNet's training the updates take most
(36 ms each, 15 of them the adapter's), then encoding: 1,150 rows of 8 assets a second, for each
expert again. On development draws of the trend, with a TimeCNN, 20 rounds reached 81 % of the
filter's Sharpe ratio at a learning rate of 2.5e-3, which `trainer.evolution.lr` allows, and a first
temperature of 0.1 (77 % at 1.0; 71 % at a rate of 1e-3); hence that rate, and 30 rounds where the
bar is 80 %.
"""
FULL = Sizes(
    mode="full",
    signals=("trend", "reversion", "cross_section"),
    planted_seeds=5,
    planted_steps=1_000_000,
    validations=None,
    null_draws=400,
    null_agents=20,
    claim_draws=40,
    leaky_seeds=3,
    costly_seeds=5,
    costly_steps=(800_000, 400_000),
    regime_seeds=3,
    hierarchy_seeds=5,
)


def sizes_for(config: Config, *, quick: bool) -> Sizes:
    """Of a proof of the configuration's agent."""
    if not quick:
        return FULL
    # Looked up now, not when imported: tests give these names sizes of seconds.
    sizes: Mapping[Family, Sizes] = {
        "flat": QUICK,
        "sb3": QUICK,
        "expert": QUICK_EXPERTS,
        "hierarchy": QUICK_HIERARCHY,
    }
    return sizes[ALGORITHMS[config.train.algo].family]


def at_pace(config: Config, sizes: Sizes) -> Config:
    """The configuration at the sizes' pace; nothing is made slower than it is."""
    pace = sizes.pace
    if pace is None:
        return config
    pretrain, expert, train = config.pretrain, config.expert, config.train
    rows = pace.pass_rows if pretrain.pass_rows is None else min(pretrain.pass_rows, pace.pass_rows)
    return config.model_copy(
        update={
            "pretrain": pretrain.model_copy(
                update={"epochs": min(pretrain.epochs, pace.epochs), "pass_rows": rows}
            ),
            "expert": expert.model_copy(
                update={
                    "warmup_updates": min(expert.warmup_updates, pace.warmup),
                    "updates_per_step": max(expert.updates_per_step, pace.updates_per_step),
                }
            ),
            "train": train.model_copy(
                update={
                    "lr_actor": max(train.lr_actor, pace.lr),
                    "lr_critic": max(train.lr_critic, pace.lr),
                }
            ),
        }
    )
