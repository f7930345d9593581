"""The peer of `bench/a2c.py`: Stable-Baselines3's A2C on windows, as one would set it up.

An ordinary Gymnasium environment of one book: observations are the last W bars and the book, and a
step is a few operations of numpy. The policy is SB3's with our own network in it, which encodes
every window it is shown.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3 import A2C
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import Tensor

from echelon.config import Config
from echelon.envs.world import World
from echelon.models.actor_critic import ActorCritic, ActorCriticOutput

Observation = dict[str, NDArray[np.float32]]


class WindowEnv(gymnasium.Env[Observation, NDArray[np.int64]]):
    """One book under the 20/50 rule; a decision at the close is filled at the next open.

    Observations: x[W,N,F], the last W bars; book[N,2], weight of each holding and cash share.
    """

    def __init__(self, world: World, config: Config) -> None:
        self.x, self.open, self.close = world.x, world.rows.open, world.rows.close
        self.window, self.initial_cash = world.window, world.initial_cash
        self.fee, self.buy, self.sell = config.fee_rate, config.buy_pct, config.sell_pct
        self.most_buys = int(1.0 / self.buy + 1e-9)
        self.scale = config.reward.scale
        self.episode = config.train.episode_steps
        _, n_assets, n_features = self.x.shape
        self.observation_space = spaces.Dict(
            x=spaces.Box(-np.inf, np.inf, (self.window, n_assets, n_features), np.float32),
            book=spaces.Box(-np.inf, np.inf, (n_assets, 2), np.float32),
        )
        self.action_space = spaces.MultiDiscrete([3] * n_assets)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode anywhere, or at `options["row"]`."""
        super().reset(seed=seed)
        last = len(self.x) - 1
        latest = last - self.episode if self.episode else self.window - 1
        anywhere = int(self.np_random.integers(self.window - 1, latest + 1))
        self.row = int((options or {}).get("row", anywhere))
        self.end = self.row + self.episode if self.episode else last
        self.cash = self.value = self.initial_cash
        self.shares = np.zeros(self.x.shape[1])
        return self.observe(), {}

    def step(
        self, action: NDArray[np.int64]
    ) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Hold 0, buy 1, sell 2 of each asset."""
        self.row += 1
        price = self.open[self.row]
        buys = action == 1
        # 20 % of the cash there is at the start of the step: after five the cash is used up.
        buys &= np.cumsum(buys) <= self.most_buys
        spent = self.buy * self.cash
        sold = np.where(action == 2, self.sell * self.shares, 0.0)
        self.shares = self.shares - sold + np.where(buys, spent / (1.0 + self.fee) / price, 0.0)
        self.cash += float(sold @ price) * (1.0 - self.fee) - spent * int(buys.sum())
        before, self.value = self.value, self.cash + float(self.shares @ self.close[self.row])
        reward = (self.value / before - 1.0) * self.scale
        ruined = self.value < 1e-6 * self.initial_cash
        return self.observe(), reward, ruined, self.row >= self.end, {}

    def observe(self) -> Observation:
        """What is known at the close of the row."""
        book = np.empty((len(self.shares), 2), dtype=np.float32)
        book[:, 0] = self.shares * self.close[self.row] / self.value
        book[:, 1] = self.cash / self.value
        return {"x": self.x[self.row - self.window + 1 : self.row + 1].copy(), "book": book}


class WindowPolicy(ActorCriticPolicy):
    """SB3's actor-critic policy with our network, applied to each window by itself.

    No action is masked, since SB3's A2C knows no masks: that is work less than ours does.
    """

    def __init__(self, *args: Any, config: Config, **kwargs: Any) -> None:
        self.config = config
        super().__init__(*args, **kwargs)

    def _build(self, lr_schedule: Schedule) -> None:
        shape = self.observation_space["x"].shape
        self.net = ActorCritic(self.config, shape[-1])
        self.present = torch.ones(shape[1], dtype=torch.bool)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=lr_schedule(1), fused=True)

    def ask(self, obs: dict[str, Tensor]) -> ActorCriticOutput:
        """Logits [B,N,3] and values [B] of windows x[B,W,N,F] and books book[B,N,2]."""
        # A window is a stretch that has one bar to decide on: [B,1,N,H].
        market = self.net.encode(obs["x"])
        output = self.net(market, obs["book"][:, None], self.present)
        return ActorCriticOutput(output.logits[:, 0], output.value[:, 0])

    def _distribution(self, output: ActorCriticOutput) -> Distribution:
        return self.action_dist.proba_distribution(action_logits=output.logits.flatten(1))

    def forward(
        self, obs: dict[str, Tensor], deterministic: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(actions, values, log-probabilities), for the rollout."""
        output = self.ask(obs)
        distribution = self._distribution(output)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, output.value[:, None], distribution.log_prob(actions)

    def evaluate_actions(
        self, obs: dict[str, Tensor], actions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(values, log-probabilities, entropy), for the update."""
        output = self.ask(obs)
        distribution = self._distribution(output)
        return output.value[:, None], distribution.log_prob(actions), distribution.entropy()

    def get_distribution(self, obs: dict[str, Tensor]) -> Distribution:
        """What the policy would do."""
        return self._distribution(self.ask(obs))

    def predict_values(self, obs: dict[str, Tensor]) -> Tensor:
        """Values [B,1], for the bootstrap."""
        return self.ask(obs).value[:, None]


def make_learner(config: Config, world: World, n_envs: int) -> A2C:
    """SB3's A2C with the configuration's settings on `n_envs` environments in this process."""
    train = config.train
    env = DummyVecEnv([lambda: WindowEnv(world, config)] * n_envs)
    learner = A2C(
        WindowPolicy,
        env,
        learning_rate=train.lr_actor,
        n_steps=train.rollout_steps,
        gamma=train.gamma,
        gae_lambda=train.gae_lambda,
        ent_coef=train.entropy_coef,
        vf_coef=train.value_coef,
        max_grad_norm=train.grad_clip,
        normalize_advantage=train.normalize_advantages,
        use_rms_prop=False,
        policy_kwargs={"config": config},
        seed=config.seed,
        device="cpu",
    )
    # Otherwise every call of `learn` makes a directory for its log.
    learner.set_logger(Logger(None, []))
    return learner
