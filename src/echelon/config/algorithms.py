"""The learning algorithms: one line each, with all that is asked about them by name.

An algorithm is a class (`agents.learner.Learner`) in a module of its own, which the table names and
which is imported when it is used: names are listed in an instant, torch and Stable-Baselines3 take
seconds. To add one, write its module and a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

Family = Literal["flat", "expert", "hierarchy", "sb3"]
ExperienceStore = Literal["rollout", "replay", "horizon", "population"]


class Algorithm(NamedTuple):
    """What an algorithm is, without importing it.

    learner: its class, `module:name`
    family: flat: buys, sells and holds, on an encoder that learns with it. expert: target weights
        on a pre-trained encoder. hierarchy: several experts under a router. sb3: target weights by
        Stable-Baselines3's networks, to compare with
    memory: what it keeps of its books besides the networks (`config.sizes`)
    refuses: function of a configuration, `module:name`, that raises where nothing could be learned
    """

    learner: str
    family: Family
    memory: ExperienceStore | None
    refuses: str | None = None

    @property
    def pretrained(self) -> bool:
        """Whether it stands on the run's pre-trained encoder."""
        return self.family in ("expert", "hierarchy")


_EXPERT = "echelon.config.sizes:refuse_idle_expert"
ALGORITHMS: Mapping[str, Algorithm] = {
    "A2C": Algorithm("echelon.agents.a2c:A2C", "flat", "rollout"),
    "SB3-PPO": Algorithm("echelon.agents.sb3:Sb3PPO", "sb3", None),
    "SB3-SAC": Algorithm("echelon.agents.sb3:Sb3SAC", "sb3", "replay"),
    "SAC": Algorithm("echelon.agents.expert:SACLearner", "expert", "replay", _EXPERT),
    "TD3": Algorithm("echelon.agents.expert:TD3Learner", "expert", "replay", _EXPERT),
    "APG": Algorithm("echelon.agents.apg:APG", "expert", "horizon"),
    "HIERARCHY": Algorithm(
        "echelon.population.learner:HierarchyLearner",
        "hierarchy",
        "population",
        "echelon.population.settings:refuse_hierarchy",
    ),
}


if TYPE_CHECKING:
    AlgorithmName: TypeAlias = str
else:
    AlgorithmName = Literal[tuple(ALGORITHMS)]

FLAT_SETTINGS = (
    *("window=20", "fee_rate=0.0005", "buy_pct=0.20", "sell_pct=0.50"),
    "model={encoder: TimeCNN, d_model: 32, n_layers: 2, dropout: 0.0}",
    "train.gamma=0.96",
    "train.entropy_coef=0.003",
    "train.value_coef=0.02",
    *("train.lr_actor=1.0e-3", "train.lr_critic=1.0e-3", "train.lr_schedule=linear"),
    *("train.grad_clip=1.0", "train.rollout_steps=50", "train.total_env_steps=1000000"),
    *("train.log_interval_steps=16000", "train.books=64", "train.offset_groups=8"),
    *("train.episode_steps=500", "train.gae_lambda=1.0", "train.peer_baseline=true"),
    "train.normalize_advantages=true",
    *("train.validate_every_steps=50000", "train.checkpoint_every_steps=200000"),
    *("reward.kind=return", "reward.scale=100.0", "market.preset=paper"),
)
"""The agent of configs/qtmrl-fast.yaml as overrides: what is proved where no configuration is
named, and how a flat agent learns next to experts. Drawn markets have few assets, so that a BUY is
a fifth of the cash here, by the design note's rule, and a training a million steps."""
