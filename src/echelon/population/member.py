"""A member of the population: an expert with a skill, that learns from everybody's data.

It collects and learns as the single expert does (`agents.expert`), with these differences:

- What it did goes into its ring of the shared replay, with the policy that acted.
- Updates draw sequences, its own and others', and learn by Retrace (`SAC.update_sequences`).
- The reward is put together when it is drawn (`population.expert_reward`).
- Every row has a weight in its losses: how much the bar is its own (`population.measurement`).

The coordinator (`population.learner`) says when to collect and to learn. What a member takes and
gives are plain numbers, arrays and tensors, since it may live in another process.

Axes: `M` members, `T` rows, `L` steps of a sequence, `B` sequences, `N` assets, `Z` skill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.agents.expert import Collector
from echelon.agents.expert_core import (
    ExpertCore,
    WeightPolicy,
    expert_obs,
    replayed_obs,
    table_file,
)
from echelon.agents.offpolicy import SequenceBatch
from echelon.agents.replay import Behaviour
from echelon.agents.sac import SAC, Traced
from echelon.agents.tables import EmbeddingTable
from echelon.config import Config
from echelon.envs.act import Holdings, weights_of_actions
from echelon.envs.world import World
from echelon.errors import TrainingError
from echelon.models.encoders import Encoder, build_served
from echelon.models.expert import ExpertActor
from echelon.ops.squashed import by_source
from echelon.population.expert_reward import ExpertReward
from echelon.population.measurement import own_returns, window_sharpes
from echelon.population.shared_replay import Marks, News, SharedBatch, SharedReplay
from echelon.rng import stream
from echelon.runs.checkpoint import below_prefix, pack_generator, unpack_generator, with_prefix
from echelon.types import Floats, Floats32, Metrics


class Brief(NamedTuple):
    """What a member gets before it learns.

    updates: how many; weight[T]: of each row in its losses
    marks: how far the rings were written when the phase began
    bonus: weights of the skill bonus's model, None: there is none; skills[K,Z]; paid: it earns one
    """

    updates: int
    weight: Floats32
    marks: Marks
    bonus: dict[str, Tensor] | None
    skills: Floats32
    paid: bool


class Noise(NamedTuple):
    """Of mutations: `rate` times each tensor's own standard deviation."""

    rate: float
    seed: int


@dataclass
class MemberFactory:
    """What members are made of, in whichever process is to host them.

    Pickled to get there: configuration, world and encoder go along, once per process. Replay and
    tables are opened there, as files that all processes map; in this one they are handed in.

    world: the experts' part of the train window; skills[K,Z]; hyperparameters[M]
    directory: of replay and tables; tables: of the frozen encoder
    away: members see no file of this machine: tables go along, and each process has its replay
    """

    config: Config
    world: World
    valid: World
    encoder: Encoder
    directory: Path | None
    seed: int
    skills: Floats32
    hyperparameters: tuple[dict[str, float], ...]
    replay: SharedReplay | None = field(default=None, repr=False)
    tables: tuple[EmbeddingTable, ...] = field(default=(), repr=False)
    away: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Without what is open here."""
        if self.away:
            tables = tuple(table.without_file() for table in self.tables)
            return self.__dict__ | {"replay": None, "tables": tables, "directory": None}
        return self.__dict__ | {"replay": None, "tables": ()}

    def __call__(self, number: int) -> Member:
        """The member of that number, as it begins."""
        if self.replay is None:
            size = self.config.experts.sharing.buffer_size
            place = None if self.directory is None else self.directory / "replay"
            n_members, n_assets = len(self.hyperparameters), self.world.n_assets
            self.replay = SharedReplay(size, n_members, n_assets, place)
        if not self.tables:
            self.tables = new_tables(self.world, self.valid, self.encoder, self.directory)
            for table in self.tables:
                table.attach(version=1)
        return Member(self, self.replay, number)


def new_tables(
    world: World, valid: World, encoder: Encoder, directory: Path | None
) -> tuple[EmbeddingTable, ...]:
    """Tables to fill, of `world` and, where its features are others, of the validation window.

    directory: None: in memory
    """
    tables = (EmbeddingTable(world, encoder.d_model, table_file(directory, "train")),)
    if tables[0].covers(valid):
        return tables
    place = table_file(directory, "valid")
    return (*tables, EmbeddingTable(valid, encoder.d_model, place, fitted=False))


class Member:
    """One member: number[of M], competing for the place of expert niche[of K]."""

    def __init__(self, setup: MemberFactory, replay: SharedReplay, number: int) -> None:
        self.config, self.world, self.valid = setup.config, setup.world, setup.valid
        self.replay = replay
        self.number = number
        self.niche = number // (len(setup.hyperparameters) // len(setup.skills))
        self.seed = int(stream(setup.seed, "member", number).integers(2**31))
        self.steps = self.version = 0
        self.skill_id = self.niche
        self._setup = setup
        self._begin_networks(setup.skills[self.niche])
        self.set_hyperparameters(setup.hyperparameters[number])
        self.collector = Collector(self.config, self.world, self.seed)
        self.pay = ExpertReward(self.config, self.world.n_assets, self.niche, self.seed)
        self._draws = stream(self.seed, "replay")

    def _begin_networks(self, skill: Floats32) -> None:
        """Fresh networks, optimizers and adapter; what was collected stays."""
        config, encoder = self.config, self._setup.encoder
        directory = self._setup.directory
        directory = None if directory is None else directory / f"member-{self.number}"
        tables = self._setup.tables
        if config.lora.enabled:
            # A fresh adapter changes nothing: what the frozen encoder says is its first version.
            tables = new_tables(self.world, self.valid, encoder, directory)
            for table, plain in zip(tables, self._setup.tables, strict=True):
                table.share(plain)
        life = int(stream(self.seed, "life", self.version).integers(2**31))
        self.networks = ExpertCore(
            config, self.world, encoder, tables, SAC, life, directory, len(skill)
        )
        self.core, self.actor, self.tables = self.networks.core, self.networks.actor, tables
        self.actor.skill.copy_(torch.from_numpy(skill))
        name, serving = f"expert {self.niche}", self.networks.serving
        self._policy = WeightPolicy(serving, self.actor, config, self.seed, name, tables=tables)

    def set_hyperparameters(self, values: Mapping[str, float]) -> None:
        """Go on with other ones (`evolution.space`); weights stay what they are."""
        self.hyperparameters = dict(values)
        core, train = self.core, self.config.train
        core.actor_descent.lr = core.alpha_descent.lr = values["lr"]
        core.critic_descent.lr = values["lr"] * train.lr_critic / train.lr_actor
        core.target_entropy = values.get("target_entropy", self.config.expert.target_entropy)

    @property
    def _beta(self) -> float:
        return self.hyperparameters.get("mi_reward_weight", 0.0)

    def copy_state(self) -> dict[str, Any]:
        """Weights, optimizers, adapter: what another member of the niche can go on from."""
        tensors, facts = self.networks.state()
        return {"tensors": tensors, "facts": facts}

    def take_state(self, state: Mapping[str, Any]) -> None:
        """Go on from another member's weights, with one's own skill, books and generator."""
        own_skill, own_generator = self.actor.skill.clone(), self.core.generator.get_state()
        self.networks.restore(state["tensors"], state["facts"])
        self.actor.skill.copy_(own_skill)
        self.core.generator.set_state(own_generator)
        self.set_hyperparameters(self.hyperparameters)
        self.version += 1

    def perturb(self, noise: Noise) -> None:
        """Noise on the actor's weights."""
        generator = torch.Generator().manual_seed(noise.seed)
        with torch.no_grad():
            for weight in self.actor.parameters():
                if weight.numel() > 1:
                    draws = torch.randn(weight.shape, generator=generator)
                    weight.add_(draws, alpha=noise.rate * float(weight.std()))

    def restart(self, skill: Floats) -> None:
        """Fresh networks with another skill; the old ones' data stay in the replay."""
        self.version += 1
        self.skill_id += self.config.experts.n_experts
        self._begin_networks(np.asarray(skill, dtype=np.float32))
        self.set_hyperparameters(self.hyperparameters)
        self.pay.restart()

    def stand(self, marks: Marks, content: Any = None) -> None:  # noqa: ANN401 (of SharedReplay)
        """Let the rings stand where the coordinator says. content: its replay's state"""
        if content is not None:
            self.replay.restore(*content)
        self.replay.refresh(marks)

    def hear(self, news: Sequence[News]) -> None:
        """Take in what all members collected, on whichever machine they did."""
        self.replay.take_news(news)

    def collect(self, bars: int) -> dict[str, Any]:
        """So many bars of every book: mean reward before scaling, and how far its ring is now."""
        rewards, before = [], self.replay.snapshot()[self.number]
        for _ in range(bars):
            lot = self.steps < self.config.expert.learning_starts
            done = self.collector.step(self.core, self.tables[0], lot=lot)
            if not done.chosen.raw.isfinite().all():
                # Of these actions none was traded: weights that are no numbers leave a book alone.
                raise TrainingError(f"expert {self.niche}: its actions are not numbers")
            books = len(done.bar_return)
            behaviour = Behaviour(
                mean=done.chosen.mean.numpy(),
                log_std=done.chosen.log_std.numpy(),
                version=np.full(books, self.version, dtype=np.int32),
                skill=np.full(books, self.skill_id, dtype=np.int32),
                bar_return=done.bar_return.astype(np.float32),
            )
            self.replay.add(self.number, done.transitions, behaviour)
            self.pay.observe(done.transitions.reward, done.bar_return)
            rewards.append(float(done.transitions.reward.mean()))
            self.steps += self.collector.books.n_books
        mark = self.replay.snapshot()[self.number]
        collected = {"reward": float(np.mean(rewards)), "mark": tuple(mark)}
        if self._setup.away:
            written = bars * self.collector.books.n_books
            collected["news"] = self.replay.news(self.number, before, written)
        return collected

    def learn(self, brief: Brief) -> Metrics:
        """The updates of one phase; their metrics, on average: nothing where it is too early."""
        if self.steps < self.config.expert.learning_starts:
            return {}
        self.replay.refresh(brief.marks, keep=(self.number,))
        paid = brief.paid and self._beta > 0.0
        self.pay.settle(brief.bonus if paid else None, brief.skills)
        updates = [self._update(brief) for _ in range(brief.updates)]
        return {name: float(np.mean([update[name] for update in updates])) for name in updates[0]}

    def _update(self, brief: Brief) -> Metrics:
        config, sharing = self.config, self.config.experts.sharing
        length = sharing.sequence_steps
        drawn = self.replay.batch(
            self.number,
            max(1, config.expert.batch_size // length),
            length,
            sharing.own_share if sharing.enabled else 1.0,
            sharing.fresh_steps if sharing.enabled else self.replay.ring_capacity,
            self._draws,
        )
        rows, slow = drawn.transitions.row.reshape(-1), self.networks.slow_table
        z = self.networks.embed(rows)
        batch, information = self._batch(drawn, z, slow.look(rows + 1), brief.weight)
        if self.networks.adapter is not None:
            batch = batch._replace(slow_obs=batch.obs._replace(z=slow.look(rows)))
        traced = self.core.update_sequences(batch, sharing)
        self.networks.finish_update()
        return _metrics_by_source(traced, drawn, self.replay.n_experts) | {
            "charts/information": information,
            "charts/multiplier": self.pay.multiplier,
            "charts/reward_scale": self.pay.scale.std,
        }

    def _batch(
        self, drawn: SharedBatch, z: Tensor, z_next: Tensor, weight: Floats32
    ) -> tuple[SequenceBatch, float]:
        """(what SAC wants, all steps in a row: [L·B,…], mean information); z, z_next[L·B,N,D]."""
        step = drawn.transitions
        obs, next_obs = replayed_obs(step, z, z_next, self.collector.present)
        raw = _flat(step.raw)
        action = torch.tanh(raw)
        reward, information = self.pay.combine(drawn, obs, action, self._beta)
        gamma = self.hyperparameters["gamma"]
        batch = SequenceBatch(
            obs=obs,
            action=action,
            raw=raw,
            raw_log_prob=torch.from_numpy(step.raw_log_prob),
            reward=reward,
            discount=torch.where(torch.from_numpy(step.terminated), 0.0, gamma),
            truncated=torch.from_numpy(step.truncated),
            next_obs=next_obs,
            loss_weights=torch.from_numpy(weight[step.row]).view(reward.shape),
            shared=torch.from_numpy(drawn.shared),
            mean=_flat(drawn.behaviour.mean),
            log_std=_flat(drawn.behaviour.log_std),
        )
        return batch, information

    def skill_number(self) -> int:
        """Number of its present skill, as it stands in the replay."""
        return self.skill_id

    def own_returns(self) -> Floats:
        """[T] returns of its own book on the experts' window."""
        return own_returns(self._policy, self.world, self.config)

    def sharpes(self) -> Floats:
        """[P] Sharpe ratios on the pieces of the validation window."""
        return window_sharpes(self._policy, self.valid, self.config)

    def portfolios(self, rows: NDArray[np.int64], held: Holdings) -> Floats:
        """[S,N] target weights at probe states: rows[S] and books."""
        present = self.collector.present[torch.from_numpy(rows)]
        obs = expert_obs(self.tables[0].look(rows), present, held)
        with torch.no_grad():
            mean, _ = self.actor(obs)
            actions = torch.tanh(mean).numpy()
        if not np.isfinite(actions).all():
            raise TrainingError(f"expert {self.niche}: its actions are not numbers")
        return weights_of_actions(actions, held)

    def acting(self) -> dict[str, Tensor]:
        """Weights that its policy is made from; the encoder's where an adapter has moved it."""
        tensors = with_prefix("actor.", self.actor.state_dict())
        if self.networks.adapter is not None:
            tensors |= with_prefix("encoder.", self.networks.serving.state_dict())
        return tensors

    def state(self) -> dict[str, Any]:
        """All but the replay, {"tensors", "facts"}, from which `restore` goes on bit for bit.

        mark: how far its ring is written
        """
        tensors, networks = self.networks.state()
        books, starts = self.collector.state()
        pay, pay_facts = self.pay.state()
        tensors |= with_prefix("collector.", books) | with_prefix("pay.", pay)
        facts = {
            "networks": networks,
            "starts": starts,
            "steps": self.steps,
            "version": self.version,
            "skill_id": self.skill_id,
            "hyperparameters": self.hyperparameters,
            "draws": pack_generator(self._draws),
            "pay": pay_facts,
        }
        mark = tuple(self.replay.snapshot()[self.number])
        return {"tensors": tensors, "facts": facts, "mark": mark}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; its ring stands where `stand` put it."""
        tensors, facts = state["tensors"], state["facts"]
        self.version, self.skill_id = int(facts["version"]), int(facts["skill_id"])
        self.networks.restore(tensors, facts["networks"])
        self.set_hyperparameters(facts["hyperparameters"])
        self.collector.restore(below_prefix("collector.", tensors), facts["starts"])
        self.steps = int(facts["steps"])
        self.pay.restore(below_prefix("pay.", tensors), facts["pay"])
        self._draws = unpack_generator(facts["draws"])

    def close(self) -> None:
        self.networks.close()


def _metrics_by_source(traced: Traced, drawn: SharedBatch, n_members: int) -> dict[str, float]:
    """Metrics of an update, with how far others were believed, by whose data it was."""
    source = by_source(torch.from_numpy(drawn.source), traced.trace, traced.dropped, n_members)
    metrics = dict(traced.metrics)
    metrics["sharing/trace"] = float(traced.trace.mean())
    metrics["sharing/dropped"] = float(traced.dropped.float().mean())
    # A batch may hold nothing of a member: NaN.
    trace, dropped = source.mean_trace.nan_to_num(), source.dropped_share.nan_to_num()
    for k in range(n_members):
        metrics[f"sharing/trace_from_{k}"] = float(trace[k])
        metrics[f"sharing/dropped_from_{k}"] = float(dropped[k])
    return metrics


def _flat(values: NDArray[Any]) -> Tensor:
    """[L,B,…] -> [L·B,…]."""
    return torch.from_numpy(np.ascontiguousarray(values).reshape(-1, *values.shape[2:]))


def expert_policy(
    config: Config,
    weights: Mapping[str, Tensor],
    base: Encoder,
    seed: int,
    number: int,
    tables: tuple[EmbeddingTable, ...] = (),
) -> WeightPolicy:
    """An expert's policy from what `Member.acting` gave; tables: of the base encoder."""
    actor = ExpertActor(
        base.d_model, config.expert.hidden, config.state, skill_dim=config.experts.skill_dim
    )
    actor.load_state_dict(below_prefix("actor.", weights))
    encoder, own = base, below_prefix("encoder.", weights)
    plain = base.state_dict()
    if any(not torch.equal(value, plain[name]) for name, value in own.items()):
        encoder = build_served(config, base.n_features)
        encoder.load_state_dict(own)
        tables = ()
    return WeightPolicy(encoder, actor, config, seed, f"expert {number}", keep=True, tables=tables)
