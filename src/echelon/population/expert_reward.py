"""What an expert is paid: its return, the price of its tail losses, and a mutual-information bonus.

    reward = (r / σ_r − λ · c / σ_x) / (1 + λ) + β · information

put together when a transition is drawn (`ExpertReward`). r: what the book earned, as it was stored;
σ_r: its running standard deviation, without which the bonus would drown it or be drowned. c: what
the bar adds to CVaR (`risk.cvar`), where that is constrained, in units of the bars' returns x; λ
its price, set by a PID controller. The information is what the action tells of the skill
(`SkillBonus`), in [−1, 1], for members near the best: how well what it does identifies an expert,
learned by one of two estimators of `ops.information` on what experts of known number did:

- `infonce`: I(a; z | s), what an action tells of the skill beyond what the book s (holdings, cash)
  tells already. Experts' own books differ, so who stands at a book is learned too, q(z|s), and is
  the prior of the candidates in training. The scores are then log p(a|s,z) up to a constant,
  and the reward asks, at any book, how far the action would tell the expert if all K were as
  likely there: log p(a|s,z) − log mean_j p(a|s,z_j).
- `diayn`: log q(z|book) − log p(z), the book being holdings and target weights. Shares of experts
  in a batch are the prior in training, and even ones in the reward, so it does not matter who
  collected more.

Actions enter as the portfolios they ask for, target weights, and the models learn from these with
noise of `NOISE` on them and on the books: scores of assets that nobody holds, or weights that
differ in the third digit, would tell experts apart as surely as other portfolios do.

Both rewards are at most log K nats; they are paid in units of it, within [−1, 1].

Axes: `B` samples or sequences, `L` steps of a sequence, `N` assets, `K` skills, `Z` of a skill.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as fn
from torch import Tensor, nn

from echelon.config import Config
from echelon.envs.act import Holdings, weights_of_actions
from echelon.errors import StoreError, TrainingError
from echelon.models.expert import ExpertObs
from echelon.ops.diversity import RunningStd
from echelon.ops.information import (
    SkillCritic,
    SkillDiscriminator,
    mlp,
    normalise_information,
    pointwise_information,
)
from echelon.population.shared_replay import SharedBatch
from echelon.risk.cvar import TailQuantile, cvar_cost
from echelon.risk.lagrange import PidLagrangian, PidSettings, combine_advantages
from echelon.rng import stream
from echelon.runs.checkpoint import below_prefix, flatten_optimizer, restore_optimizer, with_prefix
from echelon.types import Floats, Floats32

Estimator = Literal["infonce", "diayn"]

NOISE = 0.05
"""Standard deviation, in shares of the book, of what is added to the weights learned from."""
_LEAST_STD = 1e-5  # inputs that vary less are constant: they are centred, not scaled
_FARTHEST = 10.0  # standard deviations from the mean beyond which inputs are cut
_LR, _BATCH_SIZE = 1e-3, 256
_AHEAD = 3.0
"""Times the learning rate: what is not yet known of the visitors of books, the critic takes for
its own (of 0.33 nats that only books tell, 0.21 after 200 updates at the same rate, 0.01 so)."""


class ActionSamples(NamedTuple):
    """What experts source[B] did at holdings[B,N] and cash[B]; actions[B,N]: target weights."""

    holdings: Tensor
    cash: Tensor
    actions: Tensor
    source: Tensor


def target_portfolios(actions: Tensor, holdings: Tensor, cash: Tensor, free: Tensor) -> Tensor:
    """Target weights[B,N] that actions[B,N] in (−1, 1) ask for at holdings[B,N] and cash[B].

    free[B,N]: what can be traded; what could only be sold counts too: the replay does not say
    """
    allowed = np.repeat(free.numpy()[:, :, None], 3, axis=2)
    held = Holdings(holdings.numpy(), cash.numpy(), allowed, np.ones(len(allowed)))
    wanted = weights_of_actions(actions.numpy(), held)
    return torch.from_numpy(np.where(np.isnan(wanted), held.weights, wanted).astype(np.float32))


class BonusMetrics(NamedTuple):
    """Means over the updates of a call: what was minimised, and the information in nats."""

    loss: float
    information: float


class SkillBonus:
    def __init__(
        self,
        n_skills: int,
        n_assets: int,
        skill_dim: int,
        estimator: Estimator,
        seed: int,
        *,
        hidden: int = 64,
        noise: float = NOISE,
    ) -> None:
        """noise: on the portfolios learned from"""
        self.n_skills = n_skills
        self.estimator: Estimator = estimator
        self._noise = noise
        rng = stream(seed, "bonus")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.integers(2**62)))
            make = _InfoNce if estimator == "infonce" else _Diayn
            self._net: _InfoNce | _Diayn = make(n_skills, n_assets, skill_dim, hidden)
        self._optimizer = torch.optim.Adam(self._net.groups(_LR))
        self._draws = torch.Generator().manual_seed(int(rng.integers(2**62)))

    def learn(self, samples: ActionSamples, skills: Tensor, updates: int) -> BonusMetrics:
        """Fit the model to what was done; skills[K,Z]: of the experts, now.

        The information is that of the model before each update: at first too little.
        """
        self._require(samples, skills)
        self._net.scale.count_in(self._net.inputs(self._add_noise(samples)))
        counts = torch.bincount(samples.source, minlength=self.n_skills)
        log_share = torch.log(counts / counts.sum())
        losses, informations = 0.0, 0.0
        for _ in range(updates):
            part = samples
            if len(samples.source) > _BATCH_SIZE:
                rows = torch.randint(len(samples.source), (_BATCH_SIZE,), generator=self._draws)
                part = ActionSamples(*(column[rows] for column in samples))
            loss, information = self._net.losses(self._add_noise(part), skills, log_share)
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = float(nn.utils.clip_grad_norm_(self._net.parameters(), 1.0))
            if not math.isfinite(norm):
                raise TrainingError(
                    f"the mutual-information model diverged: its loss is {float(loss.detach())}, "
                    f"its gradient {norm}. Its weights were not changed; the last checkpoint is "
                    "good. Lower experts.mi_reward_weight, or set it to 0."
                )
            self._optimizer.step()
            losses += float(loss.detach())
            informations += float(information.detach())
        return BonusMetrics(losses / updates, informations / updates)

    def reward(
        self, holdings: Tensor, cash: Tensor, actions: Tensor, own: Tensor, skills: Tensor
    ) -> Tensor:
        """Reward[B] in [−1, 1] that actions[B,N] at holdings[B,N] would earn expert own[B]."""
        samples = ActionSamples(holdings, cash, actions, own)
        self._require(samples, skills)
        with torch.no_grad():
            scores = self._net(samples, skills)
            return normalise_information(pointwise_information(scores, own), self.n_skills)

    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self._net.state_dict().items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take another's weights; the optimizer stays as it is."""
        expected = {name: tuple(v.shape) for name, v in self._net.state_dict().items()}
        given = {name: tuple(v.shape) for name, v in weights.items()}
        if given != expected:
            other = sorted(set(expected.items()) ^ set(given.items()))[:3]
            raise StoreError(
                f"expected weights of the {self.estimator} model of {self.n_skills} skills, found "
                f"others ({other}): resume with the configuration of the run"
            )
        self._net.load_state_dict(dict(weights))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        optimizer, json_state = flatten_optimizer(self._optimizer)
        tensors = with_prefix("net.", self.weights()) | with_prefix("optimizer.", optimizer)
        tensors["chance"] = self._draws.get_state()
        return tensors, {"estimator": self.estimator, "optimizer": json_state}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; refuses that of another model."""
        self.load(below_prefix("net.", tensors))
        optimizer = below_prefix("optimizer.", tensors)
        restore_optimizer(self._optimizer, optimizer, state["optimizer"])
        self._draws.set_state(tensors["chance"])

    def _add_noise(self, samples: ActionSamples) -> ActionSamples:
        """What was done, with noise on books and portfolios."""
        if not self._noise:
            return samples
        held, cash, actions = (
            part + self._noise * torch.randn(part.shape, generator=self._draws)
            for part in samples[:3]
        )
        return ActionSamples(held, cash, actions, samples.source)

    def _require(self, samples: ActionSamples, skills: Tensor) -> None:
        count, own = len(samples.source), samples.source
        assert count > 0, "nothing was done"
        assert samples.holdings.shape == samples.actions.shape, "holdings are not of the actions"
        assert samples.cash.shape == (count,), f"cash should be [{count}], is {samples.cash.shape}"
        assert skills.shape[0] == self.n_skills, f"skills should be [{self.n_skills},Z]"
        assert bool(((own >= 0) & (own < self.n_skills)).all()), "a source is no expert's number"
        for name, values in zip(ActionSamples._fields, samples, strict=True):
            bad = ~torch.isfinite(values).reshape(count, -1).all(dim=1)
            if bool(bad.any()):
                who = sorted(set(own[bad].tolist()))
                raise TrainingError(
                    f"expected finite {name} for the mutual-information reward, found NaN or "
                    f"infinity in {int(bad.sum())} of {count} samples, of expert(s) {who}: put "
                    "them in quarantine"
                )


class _Scale(nn.Module):
    """Inputs at mean 0 and deviation 1, by all samples so far: weights of many assets are small."""

    count: Tensor
    mean: Tensor
    squares: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(size, dtype=torch.float64))

    def count_in(self, x: Tensor) -> None:
        """Merge samples x[B,I] in (Chan et al., 1983)."""
        x = x.detach().double()
        mean, more = x.mean(0), float(len(x))
        gap, total = mean - self.mean, self.count + more
        self.squares += (x - mean).square().sum(0) + gap.square() * self.count * more / total
        self.mean += gap * more / total
        self.count.copy_(total)

    def forward(self, x: Tensor) -> Tensor:
        """[B,I] -> [B,I]."""
        std = (self.squares / self.count.clamp(min=1.0)).sqrt()
        std = torch.where(std > _LEAST_STD, std, 1.0)
        scaled = (x - self.mean.float()) / std.float()
        return scaled.clamp(-_FARTHEST, _FARTHEST)


class _InfoNce(nn.Module):
    """Scores of skills for an action at a book, and who stands at such a book."""

    def __init__(self, n_skills: int, n_assets: int, skill_dim: int, hidden: int) -> None:
        super().__init__()
        self._state = n_assets + 1
        self.scale = _Scale(2 * n_assets + 1)
        self.critic = SkillCritic(n_assets + 1, n_assets, skill_dim, hidden)
        self.visitor = mlp(n_assets + 1, hidden, n_skills)

    def groups(self, lr: float) -> list[dict[str, Any]]:
        visitor = {"params": list(self.visitor.parameters()), "lr": _AHEAD * lr}
        return [{"params": list(self.critic.parameters()), "lr": lr}, visitor]

    @staticmethod
    def inputs(samples: ActionSamples) -> Tensor:
        """[B,2N+1]: the book, then the action."""
        return torch.cat([samples.holdings, samples.cash[:, None], samples.actions], dim=1)

    def forward(self, samples: ActionSamples, skills: Tensor) -> Tensor:
        """Scores[B,K]."""
        x = self.scale(self.inputs(samples))
        scores: Tensor = self.critic(x[:, : self._state], x[:, self._state :], skills)
        return scores

    def losses(
        self, samples: ActionSamples, skills: Tensor, _log_share: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(what to minimise, information I(a; z | s) in nats)."""
        x = self.scale(self.inputs(samples))
        state, action = x[:, : self._state], x[:, self._state :]
        visitors = torch.log_softmax(self.visitor(state), dim=1)
        scores = self.critic(state, action, skills)
        information = pointwise_information(scores, samples.source, visitors.detach()).mean()
        return fn.nll_loss(visitors, samples.source) - information, information.detach()


class _Diayn(nn.Module):
    """Scores of skills for a book."""

    def __init__(self, n_skills: int, n_assets: int, _skill_dim: int, hidden: int) -> None:
        super().__init__()
        self.scale = _Scale(2 * n_assets + 2)
        self.discriminator = SkillDiscriminator(n_assets, n_skills, hidden)

    def groups(self, lr: float) -> list[dict[str, Any]]:
        return [{"params": list(self.discriminator.parameters()), "lr": lr}]

    @staticmethod
    def inputs(samples: ActionSamples) -> Tensor:
        """[B,2N+2]; cash is what the weights leave."""
        return SkillDiscriminator.book(samples.holdings, samples.actions)

    def forward(self, samples: ActionSamples, _skills: Tensor) -> Tensor:
        """Scores[B,K]."""
        logits: Tensor = self.discriminator(self.scale(self.inputs(samples)))
        return logits

    def losses(
        self, samples: ActionSamples, skills: Tensor, log_share: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(what to minimise, information I(book; z) in nats)."""
        information = pointwise_information(self(samples, skills), samples.source, log_share).mean()
        return -information, information.detach()


class ExpertReward:
    """Scales, price of the tail and bonus of one member."""

    def __init__(self, config: Config, n_assets: int, niche: int, seed: int) -> None:
        self.config, self.n_assets, self.niche, self.seed = config, n_assets, niche, seed
        self.scale = RunningStd()
        self.return_scale = RunningStd()
        self.tail = TailQuantile(1)
        self.pid = PidLagrangian((1,), PidSettings(limit=config.risk.cvar_limit))
        self._costs: list[float] = []
        self._bonus: SkillBonus | None = None
        self._skills: Tensor | None = None

    @property
    def multiplier(self) -> float:
        return float(self.pid.multiplier[0])

    def observe(self, reward: Floats32, bar_return: Floats) -> None:
        """Learn scales and tail from what books[E] earned at a bar."""
        self.scale.update(reward)
        if self.config.risk.cvar_constraint:
            self.return_scale.update(bar_return)
            self._costs.append(float(self.tail.cost(bar_return[:, None]).mean()))

    def settle(self, bonus: Mapping[str, Tensor] | None, skills: Floats32) -> None:
        """Fix λ and the bonus for a phase; bonus: weights of its model, None: none is paid."""
        if self._costs:
            self.pid.update(np.array([np.mean(self._costs)]))
            self._costs.clear()
        self._bonus, self._skills = None, torch.from_numpy(skills)
        if bonus is not None:
            n_skills, dim = skills.shape
            estimator = self.config.experts.mi_estimator
            self._bonus = SkillBonus(n_skills, self.n_assets, dim, estimator, self.seed)
            self._bonus.load(bonus)

    def combine(
        self, drawn: SharedBatch, obs: ExpertObs, action: Tensor, beta: float
    ) -> tuple[Tensor, float]:
        """(reward[L,B], mean information); obs, action: of all steps, [L·B,…]."""
        reward = drawn.transitions.reward / self.scale.std
        if self.config.risk.cvar_constraint:
            cost = cvar_cost(drawn.behaviour.bar_return.astype(np.float64), self.tail.eta[0])
            reward = combine_advantages(reward, cost / self.return_scale.std, self.multiplier)
        paid = torch.from_numpy(np.ascontiguousarray(reward, dtype=np.float32))
        if self._bonus is None:
            return paid, 0.0
        assert self._skills is not None, "`settle` comes first"
        own = torch.full((action.shape[0],), self.niche, dtype=torch.int64)
        wanted = target_portfolios(action, obs.weights, obs.cash, obs.free)
        bonus = self._bonus.reward(obs.weights, obs.cash, wanted, own, self._skills)
        return paid + beta * bonus.view(paid.shape), float(bonus.mean())

    def restart(self) -> None:
        """Forget the tail of a policy that was replaced; scales are the market's and stay."""
        always = np.ones(1, dtype=bool)
        self.tail.restart(always)
        self.pid.restart(always)
        self._costs.clear()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        facts: dict[str, Any] = {
            "scale": self.scale.state(),
            "return_scale": self.return_scale.state(),
            "costs": list(self._costs),
        }
        tensors: dict[str, Tensor] = {}
        for name, memory in (("tail", self.tail), ("pid", self.pid)):
            arrays, facts[name] = memory.state()
            tensors |= {f"{name}.{k}": torch.from_numpy(v) for k, v in arrays.items()}
        return tensors, facts

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.scale.restore(state["scale"])
        self.return_scale.restore(state["return_scale"])
        self._costs = [float(cost) for cost in state["costs"]]
        for name, memory in (("tail", self.tail), ("pid", self.pid)):
            arrays = {k: v.numpy() for k, v in below_prefix(f"{name}.", tensors).items()}
            memory.restore(arrays, state[name])
