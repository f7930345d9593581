"""The peer of `bench/sac.py`: Stable-Baselines3's SAC on our books, with our networks inside.

SB3 is spared what can be spared: its environment steps all books at once with our own kernel and
keeps no accounts, an observation is one flat array, so that its plain replay buffer serves, and
nothing is masked. Its policy has the layers and sizes of ours, written plainly: `PlainActor`, and
two critics that are each a `PlainCritic`, as SB3 has them; or else our very own modules. Two kinds
of observation:

- embeddings: what our learner looks up, ready made: [N·D, then weights N, then cash]
- windows: [W·N·F, then weights N, then cash], with the encoder as SB3's features extractor, which
  makes the first kind of them

Axes: `E` books, `B` rows of a batch, `W` window, `N` assets, `F` features, `D` embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as fn
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3 import SAC
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.policies import ContinuousCritic
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, FlattenExtractor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.sac.policies import Actor, SACPolicy
from torch import Tensor, nn

from echelon.agents.expert import Starts
from echelon.config import Config
from echelon.envs.act import ActionRule, weights_of_actions
from echelon.envs.books import Books
from echelon.envs.world import World
from echelon.market import Rows
from echelon.models.encoders import Encoder
from echelon.models.expert import ExpertActor, ExpertCritic, ExpertObs, InputScale
from echelon.types import Floats32

See = Callable[[Rows], Floats32]
"""What is seen of the market at rows[E]: [E,S], flat."""
_HEADS = 4
"""Of the actor's attention, as in `ExpertActor`."""


def see_embeddings(z: Tensor) -> See:
    """Rows of the table z[T,N,D]."""
    flat = z.flatten(1).numpy()
    return lambda rows: flat[rows]


def see_windows(world: World) -> See:
    """The last W bars."""
    past = np.arange(1 - world.window, 1)
    return lambda rows: world.x[rows[:, None] + past].reshape(len(rows), -1)


class BooksVec(VecEnv):
    """E books by target weights, as our learner has them, with as little around them as can be."""

    def __init__(self, world: World, config: Config, n_envs: int, see: See) -> None:
        self.see = see
        rng = np.random.default_rng(config.seed)
        self.starts = Starts(world.spans("train"), config.train.episode_steps, rng)
        rule = ActionRule.from_config(config, "weights")
        self.books = Books(world, rule, config.reward, n_envs, self.starts.whole)
        self.held = self.books.holdings()
        self.ends = np.zeros(n_envs, dtype=np.int64)
        seen = self.observe().shape[1]
        super().__init__(
            n_envs,
            spaces.Box(-np.inf, np.inf, (seen,), np.float32),
            spaces.Box(-1.0, 1.0, (world.n_assets,), np.float32),
        )

    def observe(self) -> Floats32:
        """[E,S+N+1]."""
        held = self.held
        return np.concatenate(
            [self.see(self.books.row), held.weights, held.cash_share[:, None]], axis=1
        )

    def reset(self) -> Floats32:
        self._begin(np.ones(self.num_envs, dtype=bool))
        return self.observe()

    def step_async(self, actions: NDArray[Any]) -> None:
        self.actions = actions

    def step_wait(self) -> tuple[Floats32, Floats32, NDArray[np.bool_], list[dict[str, Any]]]:
        result = self.books.step(weights_of_actions(self.actions, self.held))
        self.held = self.books.holdings()
        truncated = (self.books.row >= self.ends) & ~result.terminated
        done = truncated | result.terminated
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        seen = self.observe()
        if done.any():
            for e in np.flatnonzero(done).tolist():
                infos[e] = {
                    "terminal_observation": seen[e],
                    "TimeLimit.truncated": bool(truncated[e]),
                }
            self._begin(done)
            seen = self.observe()
        return seen, result.reward.astype(np.float32), done, infos

    def _begin(self, which: NDArray[np.bool_]) -> None:
        rows, ends = self.starts.draw(int(which.sum()))
        first = self.books.row.copy()
        first[which], self.ends[which] = rows, ends
        self.books.reset(first, which)
        self.held = self.books.holdings()

    def close(self) -> None:
        """Nothing is open."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        if attr_name == "render_mode":
            return [None] * self.num_envs
        raise AttributeError(attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError(attr_name)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **more: Any) -> Any:
        raise AttributeError(method_name)

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


@dataclass(frozen=True)
class Heads:
    """Sizes of actor and critics.

    ours: `ExpertActor` and `ExpertCritic`; otherwise the plain ones
    """

    n_assets: int
    d_model: int
    hidden: int
    ours: bool

    def read(self, features: Tensor) -> ExpertObs:
        """What our networks take, of features[B,N·D+N+1]: all present, all free."""
        n, width = self.n_assets, self.n_assets * self.d_model
        everything = torch.ones(1, n, dtype=torch.bool).expand(len(features), n)
        return ExpertObs(
            features[:, :width].unflatten(1, (n, self.d_model)),
            features[:, width : width + n],
            features[:, width + n],
            everything,
            everything,
        )


class PeerActor(Actor):
    """SB3's actor, whose mean and log_std come from a network of ours."""

    def __init__(self, *args: Any, heads: Heads, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.latent_pi, self.mu, self.log_std
        self.heads = heads
        self.net = (ExpertActor if heads.ours else PlainActor)(heads.d_model, heads.hidden)

    def get_action_dist_params(self, obs: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(mean[B,N], log_std[B,N], nothing)."""
        features = self.extract_features(obs, self.features_extractor)
        mean, log_std = self.net(self.heads.read(features))
        return mean, log_std.clamp(-20.0, 2.0), {}


class PeerCritic(ContinuousCritic):
    """SB3's critics with the layers of `ExpertCritic`."""

    def __init__(self, *args: Any, heads: Heads, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for k in range(len(self.q_networks)):
            delattr(self, f"qf{k}")
        self.heads = heads
        sizes = heads.d_model, heads.hidden
        one = [ExpertCritic(*sizes)] if heads.ours else [PlainCritic(*sizes) for _ in range(2)]
        self.q_networks = []
        self.nets = nn.ModuleList(one)

    def forward(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, ...]:
        """Two values [B,1]."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.share_features_extractor):
            features = self.extract_features(obs, self.features_extractor)
        seen = self.heads.read(features)
        if self.heads.ours:
            return tuple(self.nets[0](seen, actions)[..., None])
        return tuple(net(seen, actions)[:, None] for net in self.nets)


class PlainActor(nn.Module):
    """The layers of `ExpertActor`, under its names."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.scale = InputScale(d_model)
        self.first = nn.Linear(d_model + 2, hidden)
        self.ask = nn.Linear(hidden, 3 * hidden)
        self.join = nn.Linear(hidden, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, 2)

    def forward(self, obs: ExpertObs) -> tuple[Tensor, Tensor]:
        """(mean[B,N], log_std[B,N]); everything is present."""
        h = fn.relu(self.first(torch.cat(_inputs(obs, self.scale), dim=-1)))
        asked = self.ask(h).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = fn.scaled_dot_product_attention(*asked)
        h = h + self.join(mixed.transpose(1, 2).flatten(2))
        mean, log_std = self.last(fn.relu(self.second(h))).unbind(-1)
        return mean, log_std


def _inputs(obs: ExpertObs, scale: InputScale) -> list[Tensor]:
    """Per asset: embedding, weight in units of an equal share, cash share."""
    weights = (obs.weights * obs.weights.shape[1])[..., None]
    return [scale(obs.z), weights, obs.cash[:, None, None].expand_as(weights)]


class PlainCritic(nn.Module):
    """One of the two critics of `ExpertCritic`, by itself."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.scale = InputScale(d_model)
        self.first = nn.Linear(d_model + 3, hidden)
        self.second = nn.Linear(2 * hidden, hidden)
        self.third = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, 1)

    def forward(self, obs: ExpertObs, action: Tensor) -> Tensor:
        """q[B] of action[B,N]; everything is present."""
        x = torch.cat([*_inputs(obs, self.scale), action[..., None]], dim=-1)
        h = fn.relu(self.first(x))
        mean = h.mean(1, keepdim=True).expand_as(h)
        deep = fn.relu(self.second(torch.cat([h, mean], dim=-1)))
        q: Tensor = self.last(fn.relu(self.third(deep.mean(1)))).squeeze(-1)
        return q

    @torch.no_grad()
    def load(self, twin: ExpertCritic, which: int) -> None:
        """Take the weights of one of the two."""
        hidden = self.first.out_features
        own = slice(which * hidden, (which + 1) * hidden)
        self.scale.load_state_dict(twin.scale.state_dict())
        self.first.weight.copy_(twin.first.weight[own])
        self.first.bias.copy_(twin.first.bias[own])
        for mine, theirs in (
            (self.second, twin.second),
            (self.third, twin.third),
            (self.last, twin.last),
        ):
            mine.weight.copy_(theirs.weight[which].T)
            mine.bias.copy_(theirs.bias[which, 0])


class PeerPolicy(SACPolicy):
    """SB3's policy of the two."""

    def __init__(self, *args: Any, heads: Heads, **kwargs: Any) -> None:
        self.heads = heads
        super().__init__(*args, **kwargs)

    def make_actor(self, features_extractor: BaseFeaturesExtractor | None = None) -> Actor:
        """The actor, on an extractor of its own unless it is given one."""
        asked = self._update_features_extractor(self.actor_kwargs, features_extractor)
        return PeerActor(**asked, heads=self.heads)

    def make_critic(
        self, features_extractor: BaseFeaturesExtractor | None = None
    ) -> ContinuousCritic:
        """The critics, likewise."""
        asked = self._update_features_extractor(self.critic_kwargs, features_extractor)
        return PeerCritic(**asked, heads=self.heads)


class Encode(BaseFeaturesExtractor):
    """Windows [B, W·N·F + N + 1] to embeddings [B, N·D + N + 1]."""

    def __init__(
        self, space: spaces.Box, make: Callable[[], Encoder], n_assets: int, *, frozen: bool
    ) -> None:
        encoder = make()
        super().__init__(space, n_assets * (encoder.d_model + 1) + 1)
        self.encoder = encoder.requires_grad_(not frozen)
        self.shape = (encoder.window, n_assets, encoder.n_features)

    def forward(self, obs: Tensor) -> Tensor:
        """Encode each window by itself."""
        wide = int(np.prod(self.shape))
        z = self.encoder(obs[:, :wide].unflatten(1, self.shape))[:, 0]
        return torch.cat([z.flatten(1), obs[:, wide:]], dim=1)


@dataclass(frozen=True)
class Setting:
    """How SB3 is set up.

    n_envs: environments; None: as many as we have books
    ours: with our very own networks inside, both critics being one of them
    fused: torch's fused Adam, which ours has
    share: one encoder for actor and critics, which the actor's loss alone moves
    frozen: the encoder learns nothing, as ours
    """

    n_envs: int | None = None
    ours: bool = False
    fused: bool = False
    share: bool = False
    frozen: bool = False


def make_learner(
    config: Config,
    world: World,
    see: See,
    setting: Setting,
    make_encoder: Callable[[], Encoder] | None = None,
) -> SAC:
    """SB3's SAC with the configuration's settings; make_encoder: of windows, None: embeddings."""
    train, expert, n_assets = config.train, config.expert, world.n_assets
    n_envs = setting.n_envs or train.books
    env = BooksVec(world, config, n_envs, see)
    extractor: dict[str, Any] = {"features_extractor_class": FlattenExtractor}
    if make_encoder is not None:
        extractor = {
            "features_extractor_class": Encode,
            "features_extractor_kwargs": {
                "make": make_encoder,
                "n_assets": n_assets,
                "frozen": setting.frozen,
            },
            "share_features_extractor": setting.share,
        }
    # A step of SB3 is one of all its environments: so many of them make a bar of `train.books`.
    steps = train.books // n_envs
    learner = SAC(
        PeerPolicy,
        env,
        learning_rate=train.lr_actor,
        buffer_size=expert.buffer_size,
        learning_starts=expert.learning_starts,
        batch_size=expert.batch_size,
        tau=expert.tau,
        gamma=train.gamma,
        train_freq=(steps, "step"),
        gradient_steps=round(train.books * expert.updates_per_step),
        ent_coef=f"auto_{expert.first_temperature}",
        target_entropy=expert.target_entropy * n_assets,
        policy_kwargs={
            "heads": Heads(n_assets, config.model.d_model, expert.hidden, setting.ours),
            "net_arch": [],
            "optimizer_kwargs": {"fused": setting.fused},
            **extractor,
        },
        seed=config.seed,
        device="cpu",
    )
    # Otherwise every call of `learn` makes a directory for its log.
    learner.set_logger(Logger(None, []))
    return learner
